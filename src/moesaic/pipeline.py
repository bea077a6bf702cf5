"""The story: a model goes in, a plan is made, a checkpoint comes out, and both are measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from moesaic import report
from moesaic.arch.dense import dense_arch
from moesaic.methods.budget import chosen_layers, layer_sizes
from moesaic.io.checkpoint import check_out, whole_folder
from moesaic.methods.cdmoe.method import METHOD as CONDENSED
from moesaic.methods.cdmoe.method import condense
from moesaic.methods.dsmoe.method import carve_and_train
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.hub import native_config, resolve
from moesaic.methods.tomoe.method import learn
from moesaic.metrics.measure import check_device, environment, measure, parse_dtype
from moesaic.methods import (
    CARVERS,
    CondenseConfig,
    DSMoEConfig,
    MoREConfig,
    PruneConfig,
    SkipConfig,
    Skipper,
    ToMoEConfig,
    TuneConfig,
    carve_layers,
)
from moesaic.methods.beyond.spread import losses
from moesaic.layers.overlapping_plan import OverlappingLayer
from moesaic.plan import (
    CarvedLayer,
    CondensedLayer,
    DroppedLayer,
    Plan,
    Progress,
    PrunedLayer,
    SkippingLayer,
)
from moesaic.progress import Track, silent
from moesaic.recipe import Recipe
from moesaic.methods.naee.reduction import prune, skip
from moesaic.result import Finished, Job, Result, save_applied
from moesaic.stream.experts import process, wait_for_all
from moesaic.surgery import applied
from moesaic.methods.sft.method import Tuned, tune
from moesaic.version import __version__

# --- carve ---------------------------------------------------------------------------------------


def carve(
    model: Any,
    config: Any = None,
    *,
    calibration: str | Sequence[str] | Tokens | torch.Tensor = "",
    samples: int = 100,
    length: int = 256,
    seed: int = 0,
    tokenizer: Any = None,
    compare: Sequence[str] = (),
    inplace: bool = False,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Path | None = None,
    track: Track = silent,
) -> Result:
    """Carve a dense model into a mixture of experts.

    Args:
        model: a loaded PreTrainedModel, or a name for :func:`moesaic.hub.resolve`. From a name the
            model is read from disk layer by layer and never held whole.
        config: a method's config, such as :class:`~moesaic.methods.more.method.MoREConfig`. With
            DSMoE's, :func:`moesaic.methods.dsmoe.method.carve_and_train` takes over.
        calibration: texts, tokens (N, L), or what ``--calibration`` takes.
        samples: windows drawn from calibration text.
        length: tokens a window.
        seed: of the draw.
        tokenizer: for texts, when ``model`` is loaded; a name brings its own.
        compare: variants of the method to decide on beside it, from the same statistics; of ToMoE,
            more or static, carved at the active ratio that it came to.
        inplace: convert the caller's model itself.
        device: where layers run, when ``model`` is a name.
        dtype: floating-point type, when ``model`` is a name; None for the checkpoint's own.
        progress: folder for finished layers; a run that finds them there continues.
        track: shows progress.

    Raises:
        MoesaicError: the request cannot be met.
    """
    config = config if config is not None else MoREConfig()
    if isinstance(config, DSMoEConfig):
        return carve_and_train(
            model,
            config,
            calibration=calibration,
            tokenizer=tokenizer,
            compare=compare,
            inplace=inplace,
            device=device,
            dtype=dtype,
            progress=progress,
            track=track,
        )
    if isinstance(config, ToMoEConfig):
        text = {"calibration": calibration, "samples": samples, "length": length, "seed": seed}
        shared = {**text, "tokenizer": tokenizer, "device": device, "dtype": dtype, "track": track}
        learned = learn(model, config, inplace=inplace, progress=progress, **shared)
        for name in compare:
            baseline = _beside(name, learned.summary["training"]["active"])
            folder = None if progress is None else progress / name
            learned.comparisons[name] = carve(model, baseline, progress=folder, **shared).plan
        return learned
    if config.propagate and compare:
        raise MoesaicError("--propagate follows one result: nothing can be compared beside it.")
    job = Job.open(
        model,
        dense_arch,
        calibration,
        samples=samples,
        length=length,
        seed=seed,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
    )
    method = CARVERS[type(config)]
    methods = {"result": method(config)}
    methods |= {name: method(replace(config, variant=name)) for name in compare}
    sizes = layer_sizes(job.shape, job.arch)
    spread = config.spread == "sensitivity"
    given = (_losses(job, config.layers, track),) if spread else ()
    budgets = {name: m.choose(sizes, *given) for name, m in methods.items()}
    finished = Finished(progress, job, {"config": asdict(config), "compare": list(compare)})
    wanted = budgets["result"]
    if not all((name, i) in finished for name in methods for i in wanted):
        sites = track(job.stream(wanted, follow=config.propagate), "Carving layers", len(wanted))
        change = partial(applied, arch=job.arch) if config.propagate else None
        carve_layers(methods, budgets, sites, finished, change)

    def plan(name: str) -> Plan:
        layers = {i: finished[name, i][0] for i in wanted}
        options = asdict(methods[name].config)
        return Plan(methods[name].name, job.base, layers, options, job.tokens.fingerprint)

    plans = {name: plan(name) for name in methods}
    analyses = {i: finished["result", i][1] for i in wanted}
    return job.result(plans.pop("result"), analyses, comparisons=plans, inplace=inplace)


@torch.no_grad()
def _losses(job: Job, layers: Any, track: Track) -> dict[int, torch.Tensor]:
    """What leaving each neuron out of each layer would lose."""
    chosen = chosen_layers(layers, len(job.base.widths))
    sites = track(job.stream(chosen), "Weighing layers", len(chosen))
    return {site.index: losses(site) for site in sites}


def _beside(name: str, active: float) -> MoREConfig:
    """What a learned result is compared with, at its active ratio."""
    if name == "more":
        return MoREConfig(active=active, experts=8, layers="all")
    if name == "static":
        return MoREConfig(active=active, experts=8, layers="all", variant="static")
    raise MoesaicError(f"ToMoE is compared with more or static, not {name!r}.")


# --- apply ---------------------------------------------------------------------------------------


def apply(base: str, plan: str | Path, out: str | Path, overwrite: bool = False) -> None:
    """Rebuild a result from its base and its plan."""
    check_out(Path(out), overwrite)
    source = resolve(base)
    decided = Plan.load(Path(plan))
    with whole_folder(Path(out), overwrite) as folder:
        save_applied(source, decided, folder)
        decided.save(folder)


# --- a whole recipe ------------------------------------------------------------------------------


def partial_folder(out: Path) -> Path:
    """Where an unfinished run keeps its finished layers."""
    return out.with_name(out.name + ".partial")


def run_recipe(
    recipe: Recipe, *, overwrite: bool = False, resume: bool = False, track: Track = silent
) -> dict[str, Any]:
    """Carry out a recipe: convert, save, measure, report. Returns what ``result.json`` holds.

    Raises:
        MoesaicError: the request cannot be met; nothing is left at ``recipe.out``.
    """
    out = Path(recipe.out)
    check_out(out, overwrite)
    unfinished = partial_folder(out)
    if unfinished.exists() and not resume:
        if not overwrite:
            raise MoesaicError(
                f"{unfinished} holds an unfinished run: pass --resume to continue it, "
                "or --overwrite to start anew."
            )
        Progress(unfinished, {}).discard()
    wait_for_all()
    settings, dtype = recipe.evaluation, parse_dtype(recipe.dtype)
    check_device(recipe.device)
    record: dict[str, Any] = {}
    model, *names = recipe.model, *(f"step-{i}" for i in range(len(recipe.steps) - 1)), ""
    for step, name in zip(recipe.steps, names, strict=True):
        last = step is recipe.steps[-1]
        compare = settings.compare if settings and last else ()
        progress = unfinished / f"{name}.layers" if name else unfinished
        result = _take(step, model, recipe, compare, progress, track)
        record = _describe(recipe, result, record)
        if not last:  # the next step's model: on disk until the run is done
            model = str(unfinished / name)
            if process()[0] == 0 and not Path(model).exists():
                result.save(model)
            wait_for_all()
    if process()[0] != 0:
        return {}
    with whole_folder(out, overwrite) as folder:
        result.write(folder)
        if settings is not None:
            record |= measure(
                folder,
                resolve(recipe.model),
                result.builders,
                settings,
                device=recipe.device,
                dtype=dtype,
                track=track,
            )
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), "utf-8")
        (folder / "result.json").write_text(json.dumps(record, indent=1), "utf-8")
        (folder / "README.md").write_text(report.model_card(record, recipe.to_yaml()), "utf-8")
        (folder / "report.html").write_text(report.html([record]), "utf-8")
        (folder / "picture.svg").write_text(report.picture(record), "utf-8")
    Progress(unfinished, {}).discard()
    return record


VERBS: dict[type, Any] = {
    MoREConfig: carve,
    DSMoEConfig: carve,
    ToMoEConfig: carve,
    PruneConfig: prune,
    SkipConfig: skip,
    CondenseConfig: condense,
    TuneConfig: tune,
}


def _take(
    step: Any, model: str, recipe: Recipe, compare: Sequence[str], progress: Path, track: Track
) -> Result | Tuned:
    """One step of a recipe."""
    given = recipe.calibration
    options: dict[str, Any] = {"compare": compare} if compare else {}
    if given.stats:
        options["stats"] = given.stats
    verb = VERBS[type(step)]
    takes = signature(verb).parameters.keys()
    unknown = options.keys() - takes
    if unknown:
        raise MoesaicError(f"{verb.__name__} takes no {', '.join(sorted(unknown))}.")
    text = {
        "calibration": given.source,
        "samples": given.samples,
        "length": given.length,
        "seed": given.seed,
    }
    options |= {name: value for name, value in text.items() if name in takes}
    result: Result | Tuned = verb(
        model,
        step,
        device=recipe.device,
        dtype=parse_dtype(recipe.dtype),
        progress=progress,
        track=track,
        **options,
    )
    return result


def _describe(recipe: Recipe, result: Result | Tuned, earlier: dict[str, Any]) -> dict[str, Any]:
    """The part of ``result.json`` that is known before anything is measured.

    Args:
        recipe: what was asked for.
        result: of the last step so far.
        earlier: what the steps before it said.
    """
    if isinstance(result, Tuned):
        known = earlier or {
            "moesaic": __version__,
            "model": recipe.model,
            "out": recipe.out,
            "model_type": result.model.config.model_type,
            "method": "tune",
            "config": asdict(result.config),
            "environment": environment(recipe.device),
            "layers": {},
        }
        return {**known, "tune": result.summary}
    plan = result.plan
    native = native_config(result.original.config, result.arch, plan) is not None
    described = [
        _describe_layer(plan, i, result.analyses.get(i, {})) for i in range(len(plan.base.widths))
    ]
    carved = any(
        isinstance(layer, CarvedLayer | OverlappingLayer) for layer in plan.layers.values()
    )
    return {
        "moesaic": __version__,
        "model": recipe.model,
        "out": recipe.out,
        "model_type": plan.base.model_type if native else f"moesaic_{plan.base.model_type}",
        "method": plan.method,
        "config": plan.config,
        **({"calibration": _calibration(recipe, plan)} if plan.calibration else {}),
        "environment": environment(recipe.device),
        "layers": {str(i): described[i] for i in sorted(plan.layers)} if carved else described,
        **({"beta": [d.get("beta") for d in described]} if plan.method == Skipper.name else {}),
        **result.summary,
        **({"condensed": described} if plan.method == CONDENSED else {}),
    }


def _calibration(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    return {**asdict(recipe.calibration), "fingerprint": plan.calibration}


def _describe_layer(plan: Plan, index: int, analysis: dict[str, Any]) -> dict[str, Any]:
    layer, width = plan.layers.get(index), plan.base.widths[index]
    if isinstance(layer, CarvedLayer):
        return {
            "width": width,
            "backbone": layer.backbone,
            "petals": list(layer.petals),
            "top_k": layer.top_k,
            "active_width": layer.active_width,
            **({"routing": layer.routing, "gate": layer.gate} if layer.gate else {}),
            **analysis,
        }
    if isinstance(layer, OverlappingLayer):
        header = layer.header()
        shape = {name: header[name] for name in ("kind", "backbone", "petals", "top_k")}
        return {**shape, "width": width, "active_width": sum(header["petals"][:1]), **analysis}
    if isinstance(layer, PrunedLayer):
        kept = layer.experts.tolist()
        return {"kind": layer.kind, "experts": plan.base.experts[index], "kept": kept, **analysis}
    if isinstance(layer, SkippingLayer):
        return {"kind": layer.kind, "beta": layer.beta, "rule": layer.rule, **analysis}
    if isinstance(layer, CondensedLayer):
        fixed = {"chosen": layer.experts, "gates": layer.gates_K.tolist(), "width": layer.width}
        return {"kind": layer.kind, "experts": plan.base.experts[index], **fixed, **analysis}
    if isinstance(layer, DroppedLayer):
        return {"kind": layer.kind, **analysis}
    routes = bool(plan.base.experts and plan.base.experts[index])
    return {"kind": "moe" if routes else "dense", "width": width, **analysis}
