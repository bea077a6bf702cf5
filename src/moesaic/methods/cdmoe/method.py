"""Mixture layers made into small dense layers: condense()."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from moesaic.arch.dense import PREFIX
from moesaic.io.checkpoint import skeleton
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.layers.condensed import sources
from moesaic.hub import Source
from moesaic.methods.cdmoe.experts import CondenseConfig
from moesaic.methods.cdmoe.layers import NONE_K, ExpertSearch, LayerSearch, Replaced
from moesaic.metrics.size import model_size
from moesaic.arch.mixture import MoEArch, MoEFFN, moe_arch
from moesaic.plan import BaseShape, CondensedLayer, LayerPlan, Plan
from moesaic.progress import Track, silent
from moesaic.methods.beyond.recovery import recover
from moesaic.result import Finished, Job, Result
from moesaic.stream.stream import LayerStream

METHOD = "cd-moe"


def _original(config: Any) -> MoEArch:
    if config.model_type.startswith(PREFIX):
        raise MoesaicError(f"{config.model_type} was reduced already; condense the original.")
    return moe_arch(config)


# --- what a plan weighs --------------------------------------------------------------------------


class Footprint:
    """Bytes of the weights and parameters a token uses, of a model and of its results."""

    def __init__(self, job: Job) -> None:
        shape = job.shape
        if isinstance(job.original, Source):
            shape = skeleton(job.original.config, job.dtype)
        self.hidden_size = job.base.hidden_size
        layers = job.arch.layers(shape)
        self.itemsize = next(layers.parameters()).element_size()
        self.bytes = sum(p.numel() * p.element_size() for p in shape.parameters())
        size = model_size(shape)
        self.active = size.active_parameters
        self._whole = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        self._block = [
            sum(p.numel() for n, p in layer.named_parameters() if n.startswith(sources(job.arch)))
            for layer in layers
        ]
        self._idle = [round(use.ffn - use.active_ffn) for use in size.layers]

    def of(self, plans: Mapping[int, LayerPlan]) -> tuple[int, int]:
        """Bytes and active parameters with a plan applied."""
        bytes_, active = self.bytes, self.active
        for i, plan in plans.items():
            if isinstance(plan, CondensedLayer):
                gate = self.hidden_size if plan.gated else 0
                gone = self._block[i] - 3 * self.hidden_size * plan.width - gate
            else:
                gone = self._whole[i]
            bytes_ -= gone * self.itemsize
            active -= gone - self._idle[i]
        return bytes_, active


def padded(
    plans: Mapping[int, Replaced], base: BaseShape, arch: MoEArch, config: Any
) -> dict[int, LayerPlan]:
    """Equal widths for all dense layers, if the architecture itself can then hold the result."""
    condensed = {i: plan for i, plan in plans.items() if isinstance(plan, CondensedLayer)}
    dense = {i for i, count in enumerate(base.experts) if not count}
    width = max((plan.width for plan in condensed.values()), default=0)
    fits = len(condensed) == len(plans) and not any(plan.gated for plan in condensed.values())
    if not fits or not width or arch.dense_at(config, dense | condensed.keys()) is None:
        return dict(plans)
    width = max([width, *(base.widths[i] for i in dense)])
    wider = {i for i in dense if base.widths[i] < width}
    return {
        **{i: replace(plan, width=width) for i, plan in condensed.items()},
        **{i: CondensedLayer(NONE_K, torch.empty(0), width) for i in wider},
    }


# --- what was asked for --------------------------------------------------------------------------


def _candidates(job: Job, config: CondenseConfig) -> list[int]:
    """The layers to choose from.

    Raises:
        MoesaicError: the request cannot be met.
    """
    arch, layers = job.arch, job.arch.layers(job.shape)
    routed = arch.moe_layers(job.shape)
    if not routed:
        raise MoesaicError("No layer of this model routes.")
    unknown = set(config.candidates) - set(routed)
    if unknown:
        raise MoesaicError(
            f"--candidates {', '.join(map(str, sorted(unknown)))}: not layers that route; "
            f"those are {', '.join(map(str, routed))}."
        )
    candidates = [i for i in routed if i in (config.candidates or routed)]
    if config.keep == "nothing":  # generation reads the cache's length from the first layer
        candidates = [i for i in candidates if i != 0]
    for i in candidates:
        view = arch.view(layers[i])
        assert isinstance(view, MoEFFN)
        if view.experts.has_bias or view.experts.is_transposed:
            raise MoesaicError(
                f"The experts of {arch.model_type} have biases and an activation of their own; "
                "they are no plain gated MLPs and cannot be condensed."
            )
        if config.keep == "shared" and not view.shared_width and not config.force:
            raise MoesaicError(
                f"{arch.model_type} has no shared experts, so --keep shared would leave nothing "
                "of a layer. Use --keep shared+routed (or --force, which is Block Drop)."
            )
        if config.experts is not None and config.experts > view.count:
            raise MoesaicError(f"--experts {config.experts}: layer {i} has {view.count}.")
    if config.layers is not None and config.layers > len(candidates):
        raise MoesaicError(
            f"--layers {config.layers} is out of reach: {len(candidates)} layers can be condensed."
        )
    return candidates


def _enough(
    config: CondenseConfig, finish: Callable[[Sequence[int]], dict[int, LayerPlan]], size: Footprint
) -> Callable[[Sequence[int]], bool]:
    """Whether the layers chosen so far meet the request."""

    def enough(chosen: Sequence[int]) -> bool:
        if config.layers is not None:
            return len(chosen) >= config.layers
        memory, active = size.of(finish(chosen))
        if config.memory is not None:
            return memory <= config.memory
        return config.active is not None and active <= config.active

    return enough


# --- condense ------------------------------------------------------------------------------------


def condense(
    model: Any,
    config: CondenseConfig | None = None,
    *,
    calibration: str | Sequence[str] | Tokens | torch.Tensor = "",
    samples: int = 100,
    length: int = 512,
    seed: int = 0,
    tokenizer: Any = None,
    compare: Sequence[str] = (),
    inplace: bool = False,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Path | None = None,
    track: Track = silent,
) -> Result:
    """Turn some of a mixture's layers into small dense layers.

    Args:
        model: a loaded PreTrainedModel, or a name. From a name the model is read from disk layer
            by layer and never held whole.
        config: how many layers, what stays of each, and how they are chosen.
        calibration: texts, tokens (N, L), or what ``--calibration`` takes.
        samples: windows drawn from text.
        length: tokens a window.
        seed: of the draw.
        tokenizer: for texts, when ``model`` is loaded; a name brings its own.
        compare: numbers of layers to look at beside it, such as ``"1"``: greedy choices nest, so
            a sweep costs no second search.
        inplace: condense the caller's model itself.
        device: where layers run, when ``model`` is a name.
        dtype: floating-point type, when ``model`` is a name; None for the checkpoint's own.
        progress: folder for finished layers; a run that finds them there continues.
        track: shows progress.

    Raises:
        MoesaicError: the request cannot be met.
    """
    config = config or CondenseConfig(layers=1)
    job = Job.open(
        model,
        _original,
        calibration,
        samples=samples,
        length=length,
        seed=seed,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
    )
    candidates = _candidates(job, config)
    finished = Finished(progress, job, {"config": asdict(config)})
    stream = job.stream(candidates, job.share[0])
    _search_experts(job, config, stream, candidates, finished, track)
    plans: dict[int, Replaced] = {i: finished["experts", i][0] for i in candidates}

    def finish(chosen: Sequence[int]) -> dict[int, LayerPlan]:
        some = {i: plans[i] for i in sorted(chosen)}
        if config.padding:
            return padded(some, job.base, job.arch, job.original.config)
        return dict(some)

    size = Footprint(job)
    enough = _enough(config, finish, size)
    if not enough(candidates):
        memory, active = size.of(finish(candidates))
        raise MoesaicError(
            f"The target is out of reach: with all {len(candidates)} layers condensed the weights "
            f"take {memory:,} bytes, and a token uses {active:,} parameters."
        )
    chosen: list[int] = []
    steps: list[dict[str, Any]] = []
    order = _in_order(job, config, stream, plans, finished, track)
    while not enough(chosen):
        i, losses = next(order)
        chosen.append(i)
        steps.append({"layer": i, "losses": {str(j): x for j, x in losses.items()}})
    order.close()
    layers = finish(chosen)
    analyses: dict[int, dict[str, Any]] = {i: dict(finished["experts", i][1]) for i in candidates}
    for place, i in enumerate(chosen):
        analyses[i]["order"] = place
    memory, active = size.of(layers)
    summary = {
        "layers": chosen,
        "experts": {str(i): _experts(plans[i]) for i in chosen},
        "search": steps,
        "memory_bytes": {"original": size.bytes, "result": memory},
        "active_parameters": {"original": size.active, "result": active},
    }
    counts = {name: _count(name, chosen) for name in compare}

    def plan(some: dict[int, LayerPlan]) -> Plan:
        return Plan(METHOD, job.base, some, asdict(config), job.tokens.fingerprint)

    made = {name: plan(finish(chosen[:count])) for name, count in counts.items()}
    made["result"] = plan(layers)
    if config.refit:
        made, found = recover(job, made, finished, track)
        analyses |= {i: {**analyses.get(i, {}), "refit": seen} for i, seen in found.items() if seen}
    return job.result(
        made.pop("result"), analyses, comparisons=made, summary=summary, inplace=inplace
    )


def _experts(plan: Replaced) -> list[int]:
    return plan.experts if isinstance(plan, CondensedLayer) else []


def _count(name: str, chosen: Sequence[int]) -> int:
    if not name.isdecimal() or int(name) > len(chosen):
        raise MoesaicError(
            f"--compare {name!r}: give a number of layers, at most the {len(chosen)} condensed."
        )
    return int(name)


def _search_experts(
    job: Job,
    config: CondenseConfig,
    stream: LayerStream,
    candidates: Sequence[int],
    finished: Finished,
    track: Track,
) -> None:
    """Decide on every candidate's experts that is not finished, in one pass over the layers."""
    missing = [i for i in candidates if ("experts", i) not in finished]
    if not missing:
        return
    search = ExpertSearch(config, stream, job.arch)
    with torch.no_grad():
        hidden, kwargs = stream.record()
        try:
            blocks = stream.blocks(kwargs, max(missing) + 1)
            for block in track(blocks, "Choosing experts", max(missing) + 1):
                if block.index in missing:
                    finished.add("experts", block.index, *search.decide(block, hidden))
                block.run(hidden)
        finally:
            hidden.clear()


def _in_order(
    job: Job,
    config: CondenseConfig,
    stream: LayerStream,
    plans: Mapping[int, Replaced],
    finished: Finished,
    track: Track,
) -> Generator[tuple[int, dict[int, float]], None, None]:
    """Layers in the order of choice, those of an unfinished run first."""
    rounds = sorted((name, i) for name, i in finished.store if name.startswith("round"))
    done = [i for _, i in rounds]
    for name, i in rounds:
        yield i, {int(j): loss for j, loss in finished[name, i][1]["losses"].items()}
    search = LayerSearch(stream, job.arch, plans, config.metric)
    found = search.order(config.layer_search, _scores(config, plans, finished), done)
    total = len(plans) if config.layers is None else config.layers
    try:
        for i, losses in track(found, "Choosing layers", total):
            name = f"round-{len(done):04d}"
            finished.add(name, i, plans[i], {"losses": {str(j): x for j, x in losses.items()}})
            done.append(i)
            yield i, losses
    finally:
        search.close()


def _scores(
    config: CondenseConfig, plans: Mapping[int, Replaced], finished: Finished
) -> dict[int, float]:
    """What layers are ranked by, where no search looks at the whole model."""
    if config.layer_search == "random":
        generator = torch.Generator().manual_seed(config.seed)
        drawn = torch.rand(len(plans), dtype=torch.float64, generator=generator).tolist()
        return dict(zip(plans, drawn, strict=True))
    seen = {i: finished["experts", i][1] for i in plans}
    if config.layer_search == "cosine":
        which = "nothing" if config.keep == "nothing" else "attention"
        return {i: found["cosine"][which] for i, found in seen.items()}
    return {i: found["divergence"][config.keep] for i, found in seen.items()}
