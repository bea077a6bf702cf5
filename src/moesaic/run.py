"""The story: a model goes in, a plan is made, a checkpoint comes out, and both are measured."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from moesaic import hub, report
from moesaic.arch import Arch, dense_arch
from moesaic.budget import layer_sizes
from moesaic.checkpoint import ShardWriter, check_out, skeleton, whole_folder
from moesaic.data import Tokens, calibration_tokens, evaluation_tokens
from moesaic.errors import MoesaicError
from moesaic.hub import Source, resolve
from moesaic.measure import check_device, environment, measure, parse_dtype
from moesaic.methods import CARVERS, MoREConfig, carve_layers
from moesaic.metrics.score import Score, score
from moesaic.plan import Plan, Progress
from moesaic.progress import Track, silent
from moesaic.recipe import Evaluation, Recipe
from moesaic.stream import LayerStream
from moesaic.surgery import apply_plan, base_shape, check_base, rewrite
from moesaic.version import __version__

# --- carve ---------------------------------------------------------------------------------------


@dataclass
class Result:
    """A converted model: the decision, and from it the model, its files and its scores."""

    plan: Plan
    analyses: dict[int, dict[str, Any]]
    """What the method saw of each layer."""
    comparisons: dict[str, Plan]
    """Plans of the variants that were asked for, from the same statistics."""
    arch: Arch
    original: Any
    """The caller's model, or the :class:`~moesaic.hub.Source` that was read from disk."""
    tokenizer: Any = None
    inplace: bool = False
    dtype: torch.dtype | None = None
    device: str = "cpu"
    evaluation: Tokens | None = field(default=None, repr=False)

    def build(self, plan: Plan) -> Any:
        """The original with a plan applied, live. The original is left alone."""
        if isinstance(self.original, Source):
            model = self.original.load(self.device, self.dtype)
        else:
            model = self.original if self.inplace else copy.deepcopy(self.original)
        apply_plan(model, self.arch, plan)
        hub.convert_class(model, self.arch, plan)
        return model

    @cached_property
    def model(self) -> Any:
        """The converted model, an ordinary PreTrainedModel."""
        return self.build(self.plan)

    @cached_property
    def scores(self) -> dict[str, Score]:
        """Perplexity and size of result and original on text that was not calibrated on.

        Raises:
            MoesaicError: there is no tokenizer to read the text with.
        """
        tokens = self.evaluation
        if tokens is None:
            if self.tokenizer is None:
                raise MoesaicError("scores need a tokenizer: pass tokenizer= to carve.")
            settings = Evaluation()
            tokens = evaluation_tokens("", self.tokenizer, settings.length, settings.max_tokens)
        scores = {"result": score(self.model, tokens)}
        if not self.inplace:
            original = self.original
            loaded = original.load(self.device) if isinstance(original, Source) else original
            scores["original"] = score(loaded, tokens)
        return scores

    def save(self, out: str | Path, overwrite: bool = False) -> Path:
        """Write the checkpoint, whole or not at all."""
        with whole_folder(Path(out), overwrite) as folder:
            self.write(folder)
        return Path(out)

    def write(self, folder: Path) -> None:
        """Write checkpoint and plan into an existing folder."""
        if isinstance(self.original, Source):
            save_applied(self.original, self.plan, folder, self.dtype)
        else:
            self.model.save_pretrained(folder)
            hub.write_stub(self.model.config, folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
        self.plan.save(folder)


def save_applied(
    source: Source, plan: Plan, folder: Path, dtype: torch.dtype | None = None
) -> None:
    """Write a source with a plan applied, tensor by tensor from disk to disk."""
    config = copy.deepcopy(source.config)
    arch = dense_arch(config)
    check_base(plan, skeleton(config), arch)
    rewrite(source.checkpoint, arch, plan, ShardWriter(folder), dtype)
    if dtype is not None:
        config.dtype = dtype
    hub.convert_config(config, arch, plan)
    config.save_pretrained(folder)
    hub.write_stub(config, folder)
    source.checkpoint.copy_side_files(folder)


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
        config: a method's config, such as :class:`~moesaic.methods.more.MoREConfig`.
        calibration: texts, tokens (N, L), or what ``--calibration`` takes.
        samples: windows drawn from calibration text.
        length: tokens a window.
        seed: of the draw.
        tokenizer: for texts, when ``model`` is loaded; a name brings its own.
        compare: variants of the method to decide on beside it, from the same statistics.
        inplace: convert the caller's model itself.
        device: where layers run, when ``model`` is a name.
        dtype: floating-point type, when ``model`` is a name; None for the checkpoint's own.
        progress: folder for finished layers; a run that finds them there continues.
        track: shows progress.

    Raises:
        MoesaicError: the request cannot be met.
    """
    config = config if config is not None else MoREConfig()
    original: Any = resolve(str(model)) if isinstance(model, str | Path) else model
    arch = dense_arch(original.config)
    on_disk = isinstance(original, Source)
    if tokenizer is None and on_disk:
        tokenizer = original.tokenizer
    shape = skeleton(original.config) if on_disk else original
    tokens = _tokens(calibration, tokenizer, samples, length, seed)

    method = CARVERS[type(config)]
    methods = {"result": method(config)}
    methods |= {name: method(replace(config, variant=name)) for name in compare}
    sizes = layer_sizes(shape, arch)
    budgets = {name: m.choose(sizes) for name, m in methods.items()}
    base = base_shape(shape, arch)

    store: dict[tuple[str, int], Any] = {}
    if progress is not None:
        request = {"base": asdict(base), "config": asdict(config), "compare": list(compare)}
        on_file = Progress(progress, {**request, "calibration": tokens.fingerprint})
        store |= on_file.finished()

    def finished(name: str, index: int, layer: Any, analysis: dict[str, Any]) -> None:
        store[name, index] = (layer, analysis)
        if progress is not None:
            on_file.add(name, index, layer, analysis)

    wanted = budgets["result"]
    done = {i for i in wanted if all((name, i) in store for name in methods)}
    if len(done) < len(wanted):
        if on_disk:
            stream = LayerStream.from_disk(
                original.checkpoint,
                original.config,
                arch,
                tokens,
                wanted,
                device=device,
                dtype=dtype,
            )
        else:
            original.eval()
            stream = LayerStream(original, arch, tokens, wanted)
        sites = track(stream, "Carving layers", len(wanted))
        carve_layers(methods, budgets, sites, finished, skip=done)

    def plan(name: str) -> Plan:
        layers = {i: store[name, i][0] for i in wanted}
        options = asdict(methods[name].config)
        return Plan(methods[name].name, base, layers, options, tokens.fingerprint)

    return Result(
        plan=plan("result"),
        analyses={i: store["result", i][1] for i in wanted},
        comparisons={name: plan(name) for name in compare},
        arch=arch,
        original=original,
        tokenizer=tokenizer,
        inplace=inplace,
        dtype=dtype,
        device=device,
    )


def _tokens(given: Any, tokenizer: Any, samples: int, length: int, seed: int) -> Tokens:
    if isinstance(given, Tokens):
        return given
    if isinstance(given, torch.Tensor):
        return Tokens(given.to(torch.int64))
    if tokenizer is None and not (isinstance(given, str) and given.endswith(".safetensors")):
        raise MoesaicError("Calibration text needs a tokenizer: pass tokenizer=, or token ids.")
    return calibration_tokens(given, tokenizer, samples, length, seed)


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
    if len(recipe.steps) > 1:
        raise MoesaicError("A recipe can have one step for now.")
    settings, dtype = recipe.evaluation, parse_dtype(recipe.dtype)
    check_device(recipe.device)
    result = carve(
        recipe.model,
        recipe.steps[0],
        calibration=recipe.calibration.source,
        samples=recipe.calibration.samples,
        length=recipe.calibration.length,
        seed=recipe.calibration.seed,
        compare=settings.compare if settings else (),
        device=recipe.device,
        dtype=dtype,
        progress=unfinished,
        track=track,
    )
    with whole_folder(out, overwrite) as folder:
        result.write(folder)
        record = _describe(recipe, result)
        if settings is not None:
            plans = result.comparisons.items()
            record |= measure(
                folder,
                result.original,
                {name: partial(result.build, plan) for name, plan in plans},
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


def _describe(recipe: Recipe, result: Result) -> dict[str, Any]:
    """The part of ``result.json`` that is known before anything is measured."""
    plan = result.plan
    return {
        "moesaic": __version__,
        "model": recipe.model,
        "out": recipe.out,
        "model_type": f"moesaic_{plan.base.model_type}",
        "method": plan.method,
        "config": plan.config,
        "calibration": {**asdict(recipe.calibration), "fingerprint": plan.calibration},
        "environment": environment(recipe.device),
        "layers": {
            str(i): {
                "width": plan.base.widths[i],
                "backbone": layer.backbone,
                "petals": list(layer.petals),
                "top_k": layer.top_k,
                "active_width": layer.active_width,
                **result.analyses[i],
            }
            for i, layer in sorted(plan.layers.items())
        },
    }
