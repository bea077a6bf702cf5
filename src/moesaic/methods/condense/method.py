"""CD-MoE's run: mixture layers become small dense layers, nothing is trained.

Cao et al., "Condense, Don't Just Prune: Enhancing Efficiency and Performance in MoE Layer Pruning"
(TMLR 2025). Each layer's experts (Alg. 1), then the layers (Alg. 2), until the request is met; both
searches are in :mod:`moesaic.methods.condense.search`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import cast

import torch
from torch import nn

from moesaic.arch.dense import returns_tuple
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.config import in_unit
from moesaic.errors import MoesaicError
from moesaic.hub import convert_config
from moesaic.io.models import sizes_in, skeleton_of
from moesaic.io.naming import read_as
from moesaic.methods import figures
from moesaic.methods.base import Decision, Method, Outline, Summary, original
from moesaic.methods.condense.config import KEEPS, CondenseConfig
from moesaic.methods.condense.search import ExpertSearch, LayerSearch, Replaced, legs
from moesaic.methods.figures import credit_clause, listed, span
from moesaic.methods.layered import recover
from moesaic.metrics.score import model_size
from moesaic.observation.job import Job
from moesaic.observation.stream import LayerStream
from moesaic.plan import BaseShape, Plan, Progress
from moesaic.plans.base import NO_EXPERTS, LayerPlan
from moesaic.plans.condensed import NO_FFN, CondensedLayer, DroppedLayer, cache_leaders
from moesaic.record import Figure, LayerRecord, Row
from moesaic.surgery import applied_bytes
from moesaic.types import JSON, Config


class Target:
    """Stopping rule of a run, and the complete plan for a choice of layers.

    Raises:
        MoesaicError: the model meets the target as it is, or the target is out of reach even with
            all layers condensed.
    """

    def __init__(
        self, job: Job[MoEArch], config: CondenseConfig, plans: Mapping[int, Replaced]
    ) -> None:
        self.job, self.config, self.plans = job, config, plans
        self.headers = replace(job.original, headers_only=True) if job.on_disk else None
        if config.count is None and self.met([]):
            raise MoesaicError(f"The model is within {self} as it is: give a smaller target.")
        if not self.met([*plans]):
            memory, active = self.sizes([*plans])
            raise MoesaicError(
                f"{self} is out of reach: with all {len(plans)} layers condensed the weights take "
                f"{in_unit(memory)}, and a token uses {active:,} parameters."
            )

    def __str__(self) -> str:
        """Return the target as it was given, such as ``memory 8MB``."""
        config = self.config
        if config.memory is not None:
            return f"memory {in_unit(config.memory)}"
        return f"active {config.active:,}" if config.active is not None else f"count {config.count}"

    def finish(self, chosen: Sequence[int]) -> dict[int, LayerPlan]:
        """Return the plans of all layers that change if ``chosen`` are condensed."""
        some = {i: self.plans[i] for i in sorted(chosen)}
        if self.config.keep != "nothing":
            condensed, job = cast("dict[int, CondensedLayer]", some), self.job
            return {**padded(condensed, job.base, job.arch, job.original.config)}
        return {**some}

    def sizes(self, chosen: Sequence[int]) -> tuple[int, int]:
        """Return bytes and active parameters of the model with these layers condensed."""
        job, config = self.job, copy.deepcopy(self.job.original.config)
        plan = Plan(self.config.name, job.base, self.finish(chosen))
        changed = convert_config(config, job.arch, plan) if chosen else {}
        model = skeleton_of(config, job.dtype or next(job.skeleton.parameters()).dtype)
        size = model_size(model)
        if self.headers is not None:
            memory = applied_bytes(self.headers, job.arch, plan, changed, job.dtype)
        else:
            memory = size.total_bytes + sum(map(_tables, job.arch.layers(model)))
        return memory, size.active_parameters

    def shapes(self, chosen: Sequence[int]) -> tuple[object, ...]:
        """Return all that a result's bytes depend on, for comparison with another choice."""
        job, shared = self.job, self.config.keep.startswith("shared")
        dense = {*chosen} | {i for i, count in enumerate(job.base.experts) if not count}
        # parts beside a language model are written with a result of the base's own class
        beside = job.on_disk and job.original.beside and shared
        native = beside and job.arch.dense_at(job.original.config, dense) is not None
        layers = ((self.job.layers[i], plan) for i, plan in self.finish(chosen).items())
        sizes = ((sum(sizes_in(x)) + _tables(x), json.dumps(plan.header())) for x, plan in layers)
        return native, *sorted(sizes)

    def met(self, chosen: Sequence[int]) -> bool:
        """Return True if the layers chosen so far are enough."""
        config = self.config
        if config.count is not None:
            return len(chosen) >= config.count
        memory, active = self.sizes(chosen)
        if config.memory is not None:
            return memory <= config.memory
        return config.active is not None and active <= config.active


def _tables(layer: nn.Module) -> int:
    """Return the bytes of stored tensors that are no parameters, such as a router's table."""
    parameters = {name for name, _ in layer.named_parameters(remove_duplicate=False)}
    return sum(t.nbytes for name, t in layer.state_dict().items() if name not in parameters)


class Condenser(Method[CondenseConfig, MoEArch]):
    """Method of ``condense``: turns some of a mixture's layers into small dense layers."""

    def find(self, config: Config) -> MoEArch:
        return original(config, "condense the original")

    def outline(self, job: Job[MoEArch]) -> Outline:
        """Outline a run: the first candidates, each with its first experts."""
        config = self.config
        candidates = _candidates(job, config)
        target = self._outlined(job, candidates)
        count = next(n for n in range(len(candidates) + 1) if target.met(candidates[:n]))
        first, rest = candidates[: max(0, count - 1)], candidates[max(0, count - 1) :]
        others = {target.shapes([*first, i]) for i in rest} if count else set()
        return Outline(
            Plan(config.name, job.base, target.finish(candidates[:count]), asdict(config)),
            exact=len(others) <= 1,
        )

    def _outlined(self, job: Job[MoEArch], candidates: Sequence[int]) -> Target:
        """Return the target with plans of all candidates, each with its first experts."""
        views = {i: job.arch.mixture(job.layers[i]) for i in candidates}
        plans = {i: outlined(view, self.config) for i, view in views.items()}
        return Target(job, self.config, plans)

    def run(self, job: Job[MoEArch]) -> Decision:
        config = self.config
        candidates = _candidates(job, config)
        if config.count is None:
            self._outlined(job, candidates)  # refuses what no choice of layers meets
        request = job.request({**job.request_of(config), "text": job.text})
        finished = Progress(job.args.resume_from, request)
        stream = job.stream(candidates, job.arch.mixture, job.own_tokens[0])
        self._search_experts(job, stream, candidates, finished)
        plans = {i: cast(Replaced, finished["experts", i][0]) for i in candidates}
        analyses: dict[int, JSON] = {i: dict(finished["experts", i][1]) for i in candidates}
        target = Target(job, config, plans)
        steps: list[JSON] = []
        with closing(self._in_order(job, stream, plans, finished)) as order:
            while not target.met(chosen := [step["layer"] for step in steps]):
                steps.append(next(order))
                analyses[steps[-1]["layer"]]["order"] = len(chosen)
        for name in job.args.compare:
            config.check_compared(name, len(chosen))
        (bytes_, active), (memory, runs) = target.sizes(()), target.sizes(chosen)
        summary = {
            "layers": chosen,
            "experts": {str(i): plans[i].describe(0).shape.get("chosen", []) for i in chosen},
            "search": steps,
            "memory_bytes": {"original": bytes_, "result": memory},
            "active_parameters": {"original": active, "result": runs},
        }
        counts = {**{name: int(name) for name in job.args.compare}, "result": len(chosen)}
        made = partial(Plan, config.name, job.base, config=asdict(config))
        results = {
            name: made(target.finish(chosen[:n]), calibration=job.tokens.fingerprint)
            for name, n in counts.items()
        }
        if config.refit:
            results, refits = recover(job, results, finished)
            for i, refit in refits["result"].items():
                if refit:
                    analyses[i] = {**analyses.get(i, {}), "refit": refit}
        return Decision(results.pop("result"), analyses, results, summary)

    # --- searches --------------------------------------------------------------------------------

    @torch.no_grad()
    def _search_experts(
        self,
        job: Job[MoEArch],
        stream: LayerStream[MoEFFN],
        candidates: Sequence[int],
        finished: Progress,
    ) -> None:
        """Choose the experts of every unfinished candidate, in one pass over the layers."""
        missing = [i for i in candidates if ("experts", i) not in finished]
        if not missing:
            return
        for block, states in job.track(stream.turns(missing), "Choosing experts", len(missing)):
            search = ExpertSearch(self.config, stream, job.arch, block, states)
            finished.add("experts", block.index, *search.decide())
            if block.index < missing[-1]:
                block.run(states)

    def _in_order(
        self,
        job: Job[MoEArch],
        stream: LayerStream[MoEFFN],
        plans: Mapping[int, Replaced],
        finished: Progress,
    ) -> Generator[JSON, None, None]:
        """Yield layers in the order of choice, each with the losses it was chosen by, those of an
        unfinished run first."""
        config = self.config
        rounds = sorted(key for key in finished if key[0].startswith("round"))
        yield from ({"layer": i, **finished[name, i][1]} for name, i in rounds)
        streams = [stream]
        if config.layer_search == "racing":
            parts = legs(job.own_tokens[0])
            streams = [job.stream(list(plans), job.arch.mixture, part) for part in parts]
        search = LayerSearch(streams, plans, config.metric)
        measure, key = "divergence", config.keep
        if config.layer_search == "cosine":
            measure, key = "cosine", "nothing" if key == "nothing" else "attention"
        scores = {i: finished["experts", i][1][measure][key] for i in plans}
        order = search.order(config.layer_search, scores, [i for _, i in rounds])
        total = len(plans) if config.count is None else config.count
        try:
            tracked = job.track(order, "Choosing layers", total)
            for n, (i, losses) in enumerate(tracked, len(rounds)):
                analysis = {"losses": {str(j): x for j, x in losses.items()}}
                finished.add(f"round-{n:04d}", i, plans[i], analysis)
                yield {"layer": i, **analysis}
        finally:
            search.close()

    # --- words -----------------------------------------------------------------------------------

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        assert decision.plan is not None
        config, every = self.described_config(decision.plan), len(decision.plan.base.routed)
        chosen: list[int] = decision.summary["layers"]
        shapes = [layers[i].shape for i in chosen]
        kept = ["the shared path"] if any(shape.get("shared") for shape in shapes) else []
        if config.keep == "shared+routed":
            count = span({len(shape["chosen"]) for shape in shapes})
            kept.append(f"{count} routed expert{'' if count == '1' else 's'} at fixed weights")
        done = {"attention": "feed-forward blocks dropped", "nothing": "layers dropped"}
        what = done.get(config.keep, "layers condensed")
        title = f"{len(chosen)} of {every} {what}{credit_clause(config, 'with')}"
        text = {
            "attention": "Without feed-forward block",
            "nothing": "Dropped, attention included",
        }.get(config.keep, "Turned from mixtures of experts into small dense layers")
        text += f": {listed(sorted(chosen))}"
        text += f", keeping {' and '.join(kept)}" if kept else ""
        text += "."
        if config.refit and chosen:
            text += " Their down projections were then refitted."
        output = {"layers": chosen, "experts": decision.summary["experts"]}
        return Summary(title, text, output)

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        order, section = decision.summary["layers"], "Which layers were condensed"
        divergence = {x.index: x.analysis.get("divergence") or {} for x in layers}
        return [
            *_choice_figure(layers, order, section),
            *_search_figure(decision.summary.get("search") or (), section),
            *figures.lines(
                section,
                "Change of a layer’s output.",
                [
                    figures.series(
                        name, [(i, values.get(name)) for i, values in divergence.items()]
                    )
                    for name in dict.fromkeys(
                        name for values in divergence.values() for name in values
                    )
                ],
                f"{self.config.metric} divergence",
                strong=self.config.keep,
                caption="Of a layer’s output from what it was, were only that layer replaced, by "
                "what of it would be kept. Thick: what was kept.",
            ),
            *super().figures(layers, decision),
        ]


def _choice_figure(layers: list[LayerRecord], order: Sequence[int], section: str) -> list[Figure]:
    """Draw which layers were condensed, and which of their experts were kept."""
    routed = [layer for layer in layers if layer.experts_before or layer.experts]
    rows = []
    for layer in routed:
        count, taken = layer.experts_before or layer.experts, layer.index in order
        kept = tuple(layer.shape.get("chosen") or ()) if taken else ()
        rows.append(
            Row(
                str(layer.index),
                figures.calls(layer, count),
                gone=tuple(sorted({*range(count)} - {*kept})) if taken else None,
                outlined=kept,
                note=f"choice {order.index(layer.index) + 1}" if taken else "routes",
            )
        )
    caption = "Outlined experts are kept with fixed weights, crossed ones are removed."
    if len(order) > 1:
        caption += f" Layers in this order: {', '.join(map(str, order))}."
    caption, side = f"{caption} {figures.SHADES}", "what became of it"
    return figures.heat(section, "Experts by layer.", caption, rows, side=side, of="of calls")


def _search_figure(rounds: Sequence[JSON], section: str) -> list[Figure]:
    """Draw a search over layers: one row per round, one column per layer, the layer taken outlined.

    Args:
        rounds: each with the ``layer`` taken, and the ``losses`` by layer.
        section: the heading.
    """
    losses = [{int(j): figures.finite(v) for j, v in step["losses"].items()} for step in rounds]
    columns = sorted({j for step in losses for j in step} | {step["layer"] for step in rounds})
    rows = []
    for n, (step, loss) in enumerate(zip(rounds, losses, strict=True), 1):
        values = tuple(loss.get(j) for j in columns)
        taken = loss.get(step["layer"])
        note = "" if taken is None else f"{taken:.4g}"
        finite = [v for v in values if v is not None]
        outlined = (columns.index(step["layer"]),)
        rows.append(Row(str(n), values, max(finite, default=0.0), outlined=outlined, note=note))
    return figures.heat(
        section,
        "The order of choice.",
        "A row a round, a column a layer: the lighter, the less the search counts it a loss to "
        "take this layer next. The layer taken is outlined.",
        rows,
        [*map(str, columns)],
        row="round",
        column="layer",
        side="loss of the layer taken",
        form=".4g",
    )


def outlined(view: MoEFFN, config: CondenseConfig) -> Replaced:
    """Return a plan of the final size for a layer, with its first experts at equal weights."""
    if config.keep == "nothing":
        return DroppedLayer()
    if config.keep == "attention":
        return NO_FFN
    gate = view.arch.shared_gate is not None and config.shared_gate == "token"
    width, routed = view.shared_width, NO_EXPERTS
    if config.keep == "shared+routed":
        count = view.top_k if config.experts is None else config.experts
        routed = torch.arange(count)
    if not width and not len(routed):
        return NO_FFN
    return CondensedLayer(
        routed,
        torch.full((len(routed),), 1 / max(1, len(routed))),
        width + len(routed) * view.width,
        shared=width > 0,
        gated=width if gate else 0,
    )


def padded(
    plans: Mapping[int, CondensedLayer], base: BaseShape, arch: MoEArch, config: Config
) -> Mapping[int, CondensedLayer]:
    """Give all dense layers the same width, if the architecture itself can then hold the result."""
    dense = {i for i, count in enumerate(base.experts) if not count}
    width = max((plan.width for plan in plans.values()), default=0)
    fits = not any(plan.gated for plan in plans.values())
    if not fits or not width or arch.dense_at(config, dense | plans.keys()) is None:
        return plans
    width = max([width, *(base.widths[i] for i in dense)])
    wider = {i for i in dense if base.widths[i] < width}
    return {
        **{i: replace(plan, width=width) for i, plan in plans.items()},
        **{i: CondensedLayer(NO_EXPERTS, torch.empty(0), width) for i in wider},
    }


# --- the request ---------------------------------------------------------------------------------


def _candidates(job: Job[MoEArch], config: CondenseConfig) -> list[int]:
    """Return the layers to choose from.

    Raises:
        MoesaicError: the request cannot be met.
    """
    arch = job.arch
    routed = arch.moe_layers(job.skeleton)
    unknown = set(config.candidates) - set(routed)
    if unknown:
        raise MoesaicError(
            f"candidates {', '.join(map(str, sorted(unknown)))}: not layers that route; "
            f"those are {', '.join(map(str, routed))}."
        )
    candidates = [i for i in routed if i in (config.candidates or routed)]
    if config.keep == "nothing":
        leaders = cache_leaders(job.original.config)
        candidates = [i for i in candidates if i not in leaders]
    for i in candidates:
        view = arch.mixture(job.layers[i])
        why = obstacle(view, job.layers[i], config.keep)
        if why:
            others = [keep for keep in KEEPS if not obstacle(view, job.layers[i], keep)]
            works = f" keep={' or '.join(others)} works." if others else ""
            raise MoesaicError(
                f"keep={config.keep} is impossible for {arch.model_type}: {why}.{works}"
            )
        if config.experts is not None and config.experts > view.count:
            raise MoesaicError(f"experts {config.experts}: layer {i} has {view.count}.")
    if config.count is not None and config.count > len(candidates):
        raise MoesaicError(
            f"count {config.count} is out of reach: {len(candidates)} layers can be condensed."
        )
    return candidates


def obstacle(view: MoEFFN, layer: nn.Module, keep: str) -> str:
    """Return what keeps a layer from being condensed so, in words; "" if nothing does.

    Args:
        view: its experts and shared path.
        layer: the decoder layer.
        keep: the part of it to keep, as ``--keep``.
    """
    if view.arch.entry is not None:
        return "its experts stand in the decoder layer itself"
    gate = f"{view.arch.ffn_prefix(0)}gate_proj.weight"
    if read_as(view.arch.model_type, [gate])[gate] != gate:
        return "transformers makes one projection of an MLP's gates and ups when it reads them"
    if keep == "nothing" and returns_tuple(type(layer).forward):
        return "its layers hand on to the next one more than hidden states"
    if keep not in ("shared", "shared+routed"):
        return ""
    if keep == "shared" and not view.shared_width:
        return "it has no shared experts, so that nothing of a layer would be kept"
    return view.apart(routed=keep == "shared+routed")
