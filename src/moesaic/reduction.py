"""A mixture of experts made smaller or quicker: observe(), prune(), skip()."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from moesaic.arch import PREFIX
from moesaic.data import Tokens
from moesaic.errors import MoesaicError
from moesaic.methods.naee import DATA_FREE, MERGE, PruneConfig, Pruner, allocate
from moesaic.methods.skipping import SkipConfig, Skipper
from moesaic.moe import MoEArch, MoEFFN, Rule, moe_arch
from moesaic.plan import BaseShape, Plan, PrunedLayer, SkippingLayer
from moesaic.progress import Track, silent
from moesaic.recovery import recover
from moesaic.result import Finished, Job, Result
from moesaic.statistics import (
    ExpertStats,
    StatsFile,
    gathered,
    join,
    layer_file,
    observe_experts,
    process,
    sample_share,
    save_layer,
)
from moesaic.stream import Site

Calibration = str | Sequence[str] | Tokens | torch.Tensor
NO_TEXT = Tokens(torch.zeros(1, 1, dtype=torch.int64))
"""Where weights or a file say everything."""
ALL = 256
"""MB of Gram matrices a layer that ``observe`` keeps by default, as pruning does."""


def _original(config: Any) -> MoEArch:
    if config.model_type.startswith(PREFIX):
        raise MoesaicError(
            f"{config.model_type} was reduced already; prune the original, then skip."
        )
    return moe_arch(config)


# --- statistics of each layer, from the model or from a file -------------------------------------


def _observed(
    job: Job, sites: Iterator[Site], gram_bytes: int
) -> Iterator[tuple[Site, ExpertStats]]:
    """Each site with the statistics of all processes' tokens."""
    for site in sites:
        assert isinstance(site.view, MoEFFN)
        share = sample_share(job.tokens.count, site.view.count, gram_bytes)
        yield site, gathered(observe_experts(site, job.share[1], share))


def _from_file(job: Job, path: str | Path, needs_gram: bool) -> StatsFile:
    file = StatsFile(Path(path))
    if file.header["base"] != _plain(job.base):
        raise MoesaicError(f"{path} was observed on another model than this.")
    if needs_gram and not file.header["gram"]:
        raise MoesaicError(f"{path} holds no Gram matrices, which reconstruction needs.")
    return file


def _plain(base: BaseShape) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(base).items()}


def _rule(job: Job, layer: int, stats: ExpertStats) -> Rule:
    """A layer's router, ready to decide over recorded logits."""
    view = job.arch.view(job.arch.layers(job.shape)[layer])
    rule: Rule = view.rule
    if rule.bias_E is not None:
        rule.bias_E = stats.bias_E
    return rule


def observe(
    model: Any,
    out: str | Path,
    *,
    calibration: Calibration = "",
    samples: int = 100,
    length: int = 256,
    seed: int = 0,
    tokenizer: Any = None,
    gram_mb: int = ALL,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    resume: bool = False,
    track: Track = silent,
) -> Path:
    """Observe a mixture of experts once, for any number of decisions.

    The file serves every criterion and size of :func:`prune`, and :func:`skip`. Files of the same
    model on different tokens merge (:func:`moesaic.statistics.merge_files`).

    Args:
        model: a loaded PreTrainedModel, or a name.
        out: the file to write.
        calibration: texts, tokens (N, L), or what ``--calibration`` takes.
        samples: windows drawn from text.
        length: tokens a window.
        seed: of the draw.
        tokenizer: for texts, when ``model`` is loaded.
        gram_mb: memory for one layer's Gram matrices; 0 leaves them out, and reconstruction with
            them.
        device: where layers run, when ``model`` is a name.
        dtype: floating-point type, when ``model`` is a name.
        overwrite: replace ``out`` if it exists.
        resume: continue an unfinished run of the same.
        track: shows progress.

    Raises:
        MoesaicError: the request cannot be met.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise MoesaicError(f"{out} exists. Choose another name or pass --overwrite.")
    job = Job.open(
        model,
        moe_arch,
        calibration,
        samples=samples,
        length=length,
        seed=seed,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
    )
    layers = job.arch.moe_layers(job.shape)
    header = {
        "base": _plain(job.base),
        "layers": layers,
        "calibration": job.tokens.fingerprint,
        "tokens": job.tokens.count,
        "gram": gram_mb > 0,
    }
    folder = out.with_name(out.name + ".partial")
    if folder.exists() and not resume:
        if not overwrite:
            raise MoesaicError(
                f"{folder} holds an unfinished run: pass --resume to continue it, "
                "or --overwrite to start anew."
            )
        shutil.rmtree(folder)
    done = [i for i in layers if layer_file(folder, i).exists()]
    for i in done:
        if StatsFile(layer_file(folder, i)).header != header:
            raise MoesaicError(f"{folder} holds layers of another request.")
    if len(done) < len(layers):
        stream = job.stream(layers, job.share[0])
        sites = (s for s in track(stream, "Observing layers", len(layers)) if s.index not in done)
        for site, stats in _observed(job, sites, gram_mb << 20):
            if process()[0] == 0:
                save_layer(stats, folder, site.index, header)
    if process()[0] == 0:
        join({i: layer_file(folder, i) for i in layers}, out, header)
        shutil.rmtree(folder)
    return out


# --- prune ---------------------------------------------------------------------------------------


def _sizes(job: Job, config: PruneConfig) -> dict[int, list[int]]:
    """The numbers of experts that each layer may keep.

    Raises:
        MoesaicError: the request cannot be met.
    """
    arch, model_config = job.arch, job.shape.config
    groups = arch.group_count(model_config)
    sizes = {}
    for i in arch.moe_layers(job.shape):
        view = arch.view(arch.layers(job.shape)[i])
        least = max(view.top_k, groups * arch.per_group if groups > 1 else 1)
        if groups > 1:
            open_groups = min(getattr(model_config, "topk_group", None) or groups, groups)
            least = max(least, -(-view.top_k // open_groups) * groups)
        least += -least % groups
        if not least <= config.keep <= view.count:
            raise MoesaicError(
                f"--keep {config.keep:g} is out of reach: layer {i} has {view.count} experts and "
                f"needs at least {least} (a token runs {view.top_k}"
                + (f", {groups} router groups)." if groups > 1 else ").")
            )
        if config.uniform and config.keep % groups:
            raise MoesaicError(
                f"--keep {config.keep:g} is not a multiple of the {groups} router groups, which "
                f"must lose equally many; {int(config.keep // groups) * groups} is."
            )
        if config.padding and arch.never is None:
            raise MoesaicError(
                f"--padding needs a router with a bias that can keep an expert from being chosen; "
                f"{arch.model_type} has none. Without --padding the result is moesaic_"
                f"{arch.model_type}."
            )
        every = range(least, view.count + 1, groups)
        sizes[i] = [int(config.keep)] if config.uniform else list(every)
    if not sizes:
        raise MoesaicError("No layer of this model routes.")
    return sizes


def _check_mergeable(job: Job) -> None:
    """Refuse experts whose neurons cannot be matched."""
    for i in job.arch.moe_layers(job.shape):
        experts = job.arch.view(job.arch.layers(job.shape)[i]).experts
        if experts.has_bias or experts.is_transposed:
            raise MoesaicError(
                f"--criterion {MERGE}: the experts of {job.arch.model_type} have biases and an "
                "order of weights of their own; only plain gated MLPs are merged."
            )


def prune(
    model: Any,
    config: PruneConfig | None = None,
    *,
    stats: str | Path | None = None,
    calibration: Calibration = "",
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
    """Take experts out of a mixture of experts.

    Args:
        model: a loaded PreTrainedModel, or a name. From a name the model is read from disk layer
            by layer and never held whole.
        config: how many experts stay, and by which criterion.
        stats: a file of :func:`observe`; then the model is not run.
        calibration: texts, tokens (N, L), or what ``--calibration`` takes.
        samples: windows drawn from text.
        length: tokens a window.
        seed: of the draw.
        tokenizer: for texts, when ``model`` is loaded; a name brings its own.
        compare: criteria to decide by beside it, from the same statistics.
        inplace: prune the caller's model itself.
        device: where layers run, when ``model`` is a name.
        dtype: floating-point type, when ``model`` is a name; None for the checkpoint's own.
        progress: folder for finished layers; a run that finds them there continues.
        track: shows progress.

    Raises:
        MoesaicError: the request cannot be met.
    """
    config = config or PruneConfig()
    methods = {name: Pruner(replace(config, criterion=name)) for name in compare}
    methods["result"] = Pruner(config)
    if stats is not None and config.progressive:
        raise MoesaicError("--progressive must see the model: it cannot decide from --stats.")
    if compare and config.progressive:
        raise MoesaicError("--progressive follows one criterion: nothing can be decided beside it.")
    criteria = {method.config.criterion for method in methods.values()}
    without_text = (stats is not None or criteria <= set(DATA_FREE)) and not config.refit
    job = Job.open(
        model,
        _original,
        NO_TEXT if without_text else calibration,
        samples=samples,
        length=length,
        seed=seed,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
    )
    sizes = _sizes(job, config)
    if MERGE in criteria:
        _check_mergeable(job)
    groups = job.arch.group_count(job.shape.config)
    request = {"config": asdict(config), "compare": list(compare), "stats": str(stats or "")}
    finished = Finished(progress, job, request)

    def decide(i: int, observed: ExpertStats) -> None:
        for name, method in methods.items():
            rule = _rule(job, i, observed)
            decided = method.decide(observed, rule, i, sizes[i], groups)
            for size, (layer, analysis) in decided.items():
                finished.add(f"{name}-keep-{size}", i, layer, analysis)

    def missing(i: int) -> bool:
        keys = (f"{name}-keep-{size}" for name in methods for size in sizes[i])
        return any((key, i) not in finished for key in keys)

    fingerprint = job.tokens.fingerprint
    if stats is not None:
        file = _from_file(job, stats, "reconstruction" in criteria)
        fingerprint = file.header["calibration"]
        for i in track([i for i in sizes if missing(i)], "Deciding layers", len(sizes)):
            decide(i, file.layer(i))
    elif any(missing(i) for i in sizes):
        gram_bytes = max(method.config.gram_bytes for method in methods.values())
        stream = job.stream(sizes, job.share[0], follow=config.progressive)
        for site in track(stream, "Pruning layers", len(sizes)):
            i = site.index
            if missing(i):
                ((_, observed),) = _observed(job, iter([site]), gram_bytes)
                decide(i, observed)
            if config.progressive:
                kept, _ = finished[f"result-keep-{sizes[i][0]}", i]
                assert isinstance(site.view, MoEFFN)
                allowed_E = torch.zeros(site.view.count, dtype=torch.bool)
                allowed_E[kept.experts] = True
                site.change = site.view.restricted(allowed_E)

    def counts(name: str) -> dict[int, int]:
        if config.uniform:
            return {i: options[0] for i, options in sizes.items()}
        curves = {
            i: {r: finished[f"{name}-keep-{r}", i][1]["relative_loss"] for r in options}
            for i, options in sizes.items()
        }
        return allocate(curves, round(config.keep * len(sizes)))

    def plan(name: str) -> Plan:
        kept = counts(name)
        layers = {i: finished[f"{name}-keep-{r}", i][0] for i, r in kept.items()}
        if config.padding:
            layers = {i: layer.padded(max(kept.values())) for i, layer in layers.items()}
        options = asdict(methods[name].config)
        return Plan(Pruner.name, job.base, layers, options, fingerprint)

    decided = counts("result").items()
    plans = {name: plan(name) for name in methods}
    analyses = {i: finished[f"result-keep-{r}", i][1] for i, r in decided}
    if config.refit:
        plans, found = recover(job, plans, finished, track, propagate=config.progressive)
        analyses = {i: {**seen, "refit": found[i]} for i, seen in analyses.items()}
    return job.result(plans.pop("result"), analyses, comparisons=plans, inplace=inplace)


# --- skip ----------------------------------------------------------------------------------------


def skip(
    model: Any,
    config: SkipConfig | None = None,
    *,
    stats: str | Path | None = None,
    calibration: Calibration = "",
    samples: int = 100,
    length: int = 256,
    seed: int = 0,
    tokenizer: Any = None,
    inplace: bool = False,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Path | None = None,
    track: Track = silent,
) -> Result:
    """Let a mixture of experts skip, token by token, experts that weigh little.

    Beta is calibrated on the model that is given and saved: prune first, then skip. Arguments are
    those of :func:`prune`.

    Raises:
        MoesaicError: the request cannot be met.
    """
    config = config or SkipConfig()
    job = Job.open(
        model,
        moe_arch,
        NO_TEXT if stats is not None else calibration,
        samples=samples,
        length=length,
        seed=seed,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
    )
    header = getattr(job.shape.config, "moesaic", None)
    if header is not None and any(h["kind"] == "skipping" for h in header["layers"].values()):
        raise MoesaicError("This model skips already; start from the one it was made from.")
    wanted = job.arch.moe_layers(job.shape)
    if not wanted:
        raise MoesaicError("No layer of this model routes.")
    method = Skipper(config)
    finished = Finished(progress, job, {"config": asdict(config), "stats": str(stats or "")})

    def decide(i: int, observed: ExpertStats) -> None:
        view = job.arch.view(job.arch.layers(job.shape)[i])
        layer, analysis = method.decide(observed, _rule(job, i, observed), view.top_k)
        if header is not None:  # counts that differ by layer must be said again
            layer = SkippingLayer(layer.beta, layer.rule, PrunedLayer(torch.arange(view.count)))
        finished.add("result", i, layer, analysis)

    missing = [i for i in wanted if ("result", i) not in finished]
    fingerprint = job.tokens.fingerprint
    if stats is not None:
        file = _from_file(job, stats, needs_gram=False)
        fingerprint = file.header["calibration"]
        for i in missing:
            decide(i, file.layer(i))
    elif missing:
        stream = job.stream(wanted, job.share[0])
        sites = (s for s in track(stream, "Calibrating layers", len(wanted)) if s.index in missing)
        for site, observed in _observed(job, sites, 0):
            decide(site.index, observed)
    layers = {i: finished["result", i][0] for i in wanted}
    plan = Plan(method.name, job.base, layers, asdict(config), fingerprint)
    return job.result(plan, {i: finished["result", i][1] for i in wanted}, inplace=inplace)
