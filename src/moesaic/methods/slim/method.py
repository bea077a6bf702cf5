"""Slimming: experts made narrower, neuron by neuron; nothing trained.

A neuron's share of its layer's output is w h_j d_j. Those that write least go, in every expert
equally many, so that the result is of the architecture's own class: only the experts' width is
another. A dense FFN is one expert that every token runs.

Where we depart from the scores' papers:

- CAMERA and HEAPr rank the neurons of a layer, or of the model, together, and experts come out of
  different widths, which no architecture holds: zeros are stored. Here experts are of one width;
  where they are ``uneven`` a layer's neurons are ranked together, and no zeros are stored.
- CAMERA mixes the sum of squares with the largest square (alpha); here it is the sum alone.
- HEAPr's curvature is that of each expert's own tokens.

One budget may be spent on both: N experts stay, each as wide as the rest allows. ``auto`` takes
the N whose layers' routed output changes least on the calibration tokens, measured exactly, the
router deciding as it will; ``spread`` does so for widths that differ by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.arch.dense import PREFIX, Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.data.text import Tokens
from moesaic.distributed import gathered
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Config
from moesaic.layers.base import LayerPlan
from moesaic.layers.narrowed import NarrowedLayer
from moesaic.layers.neurons import filled_up
from moesaic.layers.slimmed import SlimmedLayer
from moesaic.methods import figures
from moesaic.methods.base import Decision, Method, Outline, Told
from moesaic.methods.beyond.recovery import recover, settled
from moesaic.methods.mixtures import least_experts, span
from moesaic.methods.naee.observed import NO_TEXT, from_file
from moesaic.methods.naee.search import allocate
from moesaic.methods.slim.choice import (
    Products,
    Shape,
    candidates,
    choose,
    highest,
    losses,
    narrowest,
    neurons_of,
    share_lost,
    shared_neurons,
    uneven,
)
from moesaic.methods.slim.config import BEST, PAIRS_BYTES, SlimConfig, pairs_bytes
from moesaic.methods.slim.curvature import Curvature, curvatures
from moesaic.methods.slim.widths import ROW, width_for
from moesaic.observation.job import Finished, Job
from moesaic.observation.neurons import (
    NeuronStats,
    no_stats,
    observe_neurons,
    watching,
    weight_stats,
)
from moesaic.observation.stream import Site
from moesaic.plan import Plan
from moesaic.record import Figure, LayerRecord
from moesaic.surgery import headers_of

RESULT = "result"
"""The name of what was asked for, beside its comparisons."""
WIDTHS = 12
"""The most widths of a layer that ``spread`` tries."""


@dataclass(frozen=True)
class Size:
    """A layer's experts, as many and as wide as they may become."""

    count: int
    width: int
    """Of each expert; rounded up where they differ."""
    neurons: int
    """Of all experts together."""
    shared: int = 0
    """Neurons of the shared path that stay."""
    room: int = 0
    """Places for them; what is left over holds zeros. 0 where the path is left alone."""
    dense: bool = False
    """It is a dense FFN, seen as one expert."""

    def key(self, name: str) -> str:
        """The name under which a layer of this size is kept."""
        return f"{name}-{self.count}-{self.neurons}"


class Slimmer(Method[SlimConfig, Arch]):
    """Takes neurons out of every expert, or of every dense FFN."""

    ratio = "stored"

    def find(self, config: Config) -> Arch:
        """The architecture of a dense model or of a mixture, the latter converted or not.

        Raises:
            MoesaicError: it is unknown, or a dense model that was carved.
        """
        arch = base_arch(config)
        if config.model_type.startswith(PREFIX) and not isinstance(arch, MoEArch):
            raise MoesaicError(f"{config.model_type} was carved already: slim the original.")
        stacks = headers_of(config).values()
        if any("widths" in header for stack in stacks for header in stack):
            raise MoesaicError(
                "Experts of different widths are not slimmed again: slim the original."
            )
        return arch

    def settle(self, job: Job[Arch]) -> Iterator[str]:
        score, why_not = self.config.score, ""
        if score is None:
            score, why_not = self._score(job)
        refit, why_no_refit = settled(job, self.config.refit)
        self.config = replace(self.config, score=score, refit=refit)
        yield from filter(None, [why_not, why_no_refit])

    def _score(self, job: Job[Arch]) -> tuple[str, str]:
        """The best score that can be afforded, and a sentence where it is not the best of all."""
        if job.args.calibration.stats:
            return "energy", "Statistics hold no pairs of neurons: they are scored by energy."
        views = [job.arch.view(job.layers[i]) for i in _layers(job)]
        pairs = max(pairs_bytes(view.count, view.width) for view in views)
        if pairs > PAIRS_BYTES:
            return "energy", (
                f"Neurons are scored by energy: {BEST}, which loses less, would hold "
                f"{pairs / 2**30:.1f} GiB of inner products for each layer."
            )
        return BEST, ""

    # --- sizes -----------------------------------------------------------------------------------

    def sizes(self, job: Job[Arch]) -> tuple[dict[int, list[Size]], int]:
        """The sizes that each layer may get, and what their widths are a multiple of.

        Raises:
            MoesaicError: the request cannot be met.
        """
        config, multiple = self.config, self._multiple(job)
        views = {i: job.arch.view(job.layers[i]) for i in _layers(job)}
        if not any(job.base.experts) and (config.experts != "all" or config.shared is not None):
            option = "experts" if config.experts != "all" else "shared"
            raise MoesaicError(
                f"{job.arch.model_type} is dense: it has no {option}. Leave {option} out; keep is "
                "the share of each FFN's neurons that stays."
            )
        if config.uneven:
            self._check_uneven(views)
        dtype = job.dtype or next(job.shape.parameters()).dtype
        grouped = any(job.base.experts) and not config.uneven
        row = ROW // dtype.itemsize if grouped else 1
        found: dict[int, list[Size]] = {}
        steps = set()
        for i, view in views.items():
            budget = config.keep * view.count * view.width
            options = []
            for count in self._counts(job, i, view.count, view.width):
                if config.uneven:
                    options.append(self._uneven_size(view.count, view.width, multiple or 1))
                    steps.add(multiple or 1)
                    continue
                try:
                    target = budget / count
                    width, step = width_for(view.width, target, multiple, "keep", row)
                except MoesaicError:
                    if config.experts == "auto":
                        continue
                    raise
                options.append(Size(count, width, count * width))
                steps.add(step)
            if not options:
                raise MoesaicError(
                    f"experts auto: no number of experts meets keep {config.keep:g} with multiple "
                    f"{multiple}. Another keep or multiple would."
                )
            if config.spread == "sensitivity":
                steps = {multiple or row}  # the result is no engine's own, so none is asked
                options = self._spread(view.count, view.width, options[0], min(steps))
            found[i] = [self._with_shared(job.arch, view, size) for size in options]
        return found, min(steps)

    def _multiple(self, job: Job[Arch]) -> int | None:
        """What widths must be a multiple of; None where anything is right.

        Raises:
            MoesaicError: the checkpoint's format cannot hold what was asked for.
        """
        asked, block = self.config.multiple, job.block
        if asked is not None and block and asked % block:
            raise MoesaicError(
                f"multiple {asked}: this checkpoint stores experts in blocks of {block}, so widths "
                f"are a multiple of {block}. With a dtype the result is plain, and any will do."
            )
        return asked or block or None

    def _check_uneven(self, views: Mapping[int, Any]) -> None:
        """Refuse models whose experts cannot differ in width.

        Raises:
            MoesaicError: says which.
        """
        first = next(iter(views.values()))
        if not isinstance(first, MoEFFN):
            raise MoesaicError("uneven is of a mixture's experts: a dense model has none.")
        if first.odd:
            raise MoesaicError(
                f"uneven is impossible for {first.arch.model_type}: {first.odd}. Leave uneven out."
            )

    def _counts(self, job: Job[Arch], layer: int, count: int, width: int) -> list[int]:
        """The numbers of experts that a layer may keep."""
        config, arch = self.config, job.arch
        if config.experts == "all" or not isinstance(arch, MoEArch):
            return [count]
        top_k = arch.mixture(job.layers[layer]).top_k
        least = least_experts(arch, top_k, job.shape.config)
        groups = arch.group_count(job.shape.config)
        full = -(-config.keep * count // 1)  # so many whole experts are the budget
        least = max(least, int(full) + -int(full) % groups)
        if config.count is None:
            return list(candidates(least, count, groups))
        if not least <= config.count <= count or config.count % groups:
            raise MoesaicError(
                f"experts {config.count} is out of reach: layer {layer} has {count} experts of "
                f"{width} neurons, and keep {config.keep:g} needs at least {least}"
                + (f", a multiple of {groups} router groups." if groups > 1 else ".")
            )
        return [config.count]

    def _uneven_size(self, count: int, width: int, step: int) -> Size:
        """The size of a layer whose experts differ in width: all of its budget is used.

        Args:
            count: experts.
            width: neurons that each had.
            step: widths are a multiple of it.

        Raises:
            MoesaicError: not every expert would keep a neuron.
        """
        if step > width:
            width_for(width, width, step, "keep")  # refuses
        least, most = count * step, width // step * step * count
        blocks = self.config.keep * count * width / step
        # where layers share one budget none may round up
        neurons = int(blocks if self.config.spread == "sensitivity" else round(blocks)) * step
        if not least <= min(neurons, most):
            raise MoesaicError(
                f"keep {self.config.keep:g} is out of reach: uneven leaves each of {count} experts "
                f"{step} of {width} neurons at least; from {step / width:.4g} on it works."
            )
        return Size(count, -(-min(neurons, most) // count), min(neurons, most))

    def _spread(self, count: int, width: int, middle: Size, step: int) -> list[Size]:
        """The sizes that a layer may get where they differ, about evenly spread.

        Args:
            count: experts.
            width: neurons that each had.
            middle: the size that it had if all were alike.
            step: widths are a multiple of it.
        """
        stride = step * max(1, round(width * 0.75 / WIDTHS / step))
        at = middle.neurons // count
        below = range(at, max(step, at // 3) - 1, -stride)
        widths = sorted({*below, *range(at, width + 1, stride)})
        beyond = middle.neurons - at * count  # of experts that differ in width
        most = width // step * step * count
        sizes = [min(w * count + beyond, most) for w in widths]
        return [Size(count, -(-n // count), n) for n in sizes]

    def _with_shared(self, arch: Arch, view: Any, size: Size) -> Size:
        """The size with what becomes of the shared path."""
        if not isinstance(arch, MoEArch):
            return replace(size, dense=True)
        config, whole = self.config, view.shared_width
        if not whole:
            return size
        shared = whole
        if config.shared is not None:
            shared, _ = width_for(whole, config.shared * whole, config.multiple, "shared")
        native = config.spread == "uniform" and not config.uneven
        room = arch.shared_room(shared, size.width) if native else shared
        alone = shared == room == whole and (arch.shared_size or not native)
        return size if alone else replace(size, shared=shared, room=room)

    # --- one layer -------------------------------------------------------------------------------

    def decide(
        self,
        stats: NeuronStats,
        layer: int,
        size: Size,
        groups: int = 1,
        curvature: Curvature | None = None,
        products: Products | None = None,
    ) -> tuple[LayerPlan, JSON]:
        """The neurons of a layer that stay.

        Args:
            stats: what was observed of it.
            layer: its number.
            size: the experts that stay, and their width.
            groups: router groups, which lose equally many experts.
            curvature: of its neurons, where the score needs gradients.
            products: of its neurons, where the score looks at pairs.

        Returns:
            the plan, and ``calls``, and of scores that look at tokens ``relative_loss``: the share
            of all squared scores that goes.
        """
        config, score = self.config, self.config.chosen
        seed = config.seed * 10_007 + layer
        neurons = neurons_of(stats, curvature.routed_EM if curvature else None, seed, products)
        score_EM = score.score(neurons)
        kept, neurons_NW = choose(score_EM, size.count, size.width, neurons.reach, groups)
        if config.uneven:
            neurons_NW = uneven(score_EM, size.neurons, neurons.reach, config.multiple or 1)
        analysis: JSON = {}
        if score.observes:
            lost = share_lost(score_EM, kept, neurons_NW)
            analysis = {"relative_loss": lost, "calls": stats.calls_E.tolist()}
        before = stats.energy_EM.shape[1]
        if size.dense:
            return narrowest(score_EM[0], size.width), analysis
        shared_S: Tensor | None = None
        if size.room:
            curved = curvature.shared_S if curvature else None
            beside = shared_neurons(stats, curved, seed + 1, products)
            order_1S = highest(score.score(beside), size.shared, beside.reach)
            shared_S = filled_up(order_1S[0], size.room)
        slim = SlimmedLayer(kept, neurons_NW, before, shared_S=shared_S, uneven=config.uneven)
        return slim, analysis

    # --- a model ---------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, job: Job[Arch]) -> Decision:
        """Observe the layers once, and decide.

        Raises:
            MoesaicError: the request cannot be met.
        """
        config, args = self.config, job.args
        compare, stats_path = args.compare, args.calibration.stats
        slimmers = {n: Slimmer(replace(config, score=n)) for n in compare if config.compared(n)}
        slimmers[RESULT] = self
        scores = [slimmer.config.chosen for slimmer in slimmers.values()]
        sizes, step = self.sizes(job)
        reads = (
            bool(config.refit)
            or config.measures
            or any(score.gradients or score.gram for score in scores)
        )
        blind = not reads and not any(score.observes for score in scores)
        file = self._file(job, scores) if stats_path else None
        if file is not None and not reads:
            fingerprint = str(file.header["calibration"])
        else:
            fingerprint = "" if blind else job.tokens.fingerprint
        finished = job.finished(
            {
                "config": asdict(config),
                "compare": list(compare),
                "stats": "" if file is None else file.fingerprint,
                "calibration": fingerprint,
            }
        )
        groups = job.arch.group_count(job.shape.config) if isinstance(job.arch, MoEArch) else 1
        missing = [
            i
            for i, options in sizes.items()
            if any((size.key(n), i) not in finished for n in slimmers for size in options)
        ]
        curved: Mapping[int, Curvature] = {}
        if missing and any(score.gradients for score in scores):
            curved = curvatures(job, list(sizes))

        def decide(i: int, stats: NeuronStats, site: Site[Any] | None) -> None:
            products = None
            if site is not None and any(score.gram for score in scores):
                products = Products.of(site, shared_out=not config.measures)
            for name, slimmer in slimmers.items():
                made = [
                    slimmer.decide(stats, i, size, groups, curved.get(i), products)
                    for size in sizes[i]
                ]
                if config.measures:
                    assert site is not None
                    exact = losses(site, [_shape(layer) for layer, _ in made])
                    for (_, analysis), loss in zip(made, exact, strict=True):
                        analysis["relative_loss"] = loss
                for size, (layer, analysis) in zip(sizes[i], made, strict=True):
                    finished.add(size.key(name), i, layer, analysis)

        if file is not None:
            for i in args.track(missing, "Deciding layers", len(sizes)):
                decide(i, file.layer(i).neurons, None)
        elif missing:
            pairs = any(score.gram for score in scores)
            if config.measures or pairs or config.shared is not None:
                observed = self._seen(job, list(sizes), gather=not config.measures)
            else:
                observed = _passing(job, list(sizes), NO_TEXT if blind else job.share[0])
            for i, stats, site in args.track(observed, "Slimming layers", len(sizes)):
                if i in missing:
                    decide(i, stats, site)
        chosen = {name: self._chosen(name, sizes, finished) for name in slimmers}
        plans = {
            name: Plan(
                config.name,
                job.base,
                {i: finished[size.key(name), i][0] for i, size in chosen[name].items()},
                asdict(slimmer.config),
                fingerprint,
            )
            for name, slimmer in slimmers.items()
        }
        analyses = {i: finished[s.key(RESULT), i][1] for i, s in chosen[RESULT].items()}
        if config.refit:
            plans, found = recover(job, plans, finished)
            analyses = {i: {**seen, "refit": found[i]} for i, seen in analyses.items()}
        summary: JSON = {"multiple": step, "loss": self._loss_in_words()}
        if config.experts == "auto":
            summary["tried"] = self._tried(sizes, finished)
        return Decision(plans.pop(RESULT), analyses, plans, summary)

    @torch.no_grad()
    def outline(self, job: Job[Arch]) -> Outline:
        """Neurons at random, of the widths that the result gets; the mean where layers differ."""
        config = self.config
        sizes, _ = self.sizes(job)
        groups = job.arch.group_count(job.shape.config) if isinstance(job.arch, MoEArch) else 1
        blind = Slimmer(replace(config, score="random"))
        layers, held, work = {}, 0, 0.0
        for i, options in sizes.items():
            view = job.arch.view(job.layers[i])
            whole = config.keep * view.count * view.width
            size = min(options, key=lambda size: abs(size.neurons - whole))
            stats = no_stats(view.count, view.width, getattr(view, "shared_width", 0))
            layers[i], _ = blind.decide(stats, i, size, groups)
            held = max(held, pairs_bytes(view.count, view.width))
            turns = 16.0 * view.count * view.width**3  # in float64, as the products that precede it
            work += 4.0 * getattr(view, "top_k", 1) * view.width**2 + turns / job.planned_tokens
        return Outline(
            Plan(config.name, job.base, layers, asdict(config)),
            exact=not config.measures,
            passes=config.chosen.observes
            + 2 * bool(config.refit)
            + 2.0 * config.chosen.gradients
            + 3.0 * config.measures,
            work=work * config.chosen.gram,
            held=held * config.chosen.gram,
            whole=config.chosen.gradients,
        )

    def _seen(self, job: Job[Arch], layers: list[int], gather: bool) -> Iterator[Observed]:
        """Each layer's statistics and its tokens, of which more can be asked."""
        share = job.share[0] if gather else job.tokens
        for site in job.stream(layers, job.arch.view, share):
            stats = observe_neurons(site)
            yield site.index, NeuronStats.merged(gathered(stats)) if gather else stats, site

    def _file(self, job: Job[Arch], scores: Sequence[Any]) -> Any:
        """The statistics that were observed before.

        Raises:
            MoesaicError: they cannot serve this request.
        """
        if not isinstance(job.arch, MoEArch):
            raise MoesaicError("stats are of mixtures; a dense model is observed as it is slimmed.")
        if self.config.measures:
            raise MoesaicError(
                "experts auto and spread sensitivity measure losses on tokens: they need the "
                "model, and cannot decide from stats."
            )
        blocked = [score.name for score in scores if score.gradients or score.gram]
        if blocked:
            raise MoesaicError(
                f"stats hold neither gradients nor pairs of neurons: score {blocked[0]!r} needs "
                "the model. energy decides from stats."
            )
        mixture = cast("Job[MoEArch]", job)
        return from_file(mixture, job.args.calibration.stats, needs_gram=False)

    def _chosen(
        self, name: str, sizes: Mapping[int, list[Size]], finished: Finished
    ) -> dict[int, Size]:
        """The size that each layer gets."""
        config = self.config
        if config.spread == "sensitivity":
            curves = {
                i: {s.neurons: _loss(finished, s.key(name), i) for s in options}
                for i, options in sizes.items()
            }
            whole = sum(o[0].count * _before(finished, o[0].key(name), i) for i, o in sizes.items())
            spent = allocate(curves, config.keep * whole)
            by_cost = {i: {s.neurons: s for s in options} for i, options in sizes.items()}
            return {i: by_cost[i][cost] for i, cost in spent.items()}
        if config.experts != "auto":
            return {i: options[0] for i, options in sizes.items()}
        totals = self._tried(sizes, finished, name)
        best = min(totals, key=lambda count: totals[count])
        return {i: next(s for s in o if str(s.count) == best) for i, o in sizes.items()}

    def _tried(
        self, sizes: Mapping[int, list[Size]], finished: Finished, name: str = RESULT
    ) -> dict[str, float]:
        """By number of experts that every layer can keep, the summed squared loss of all layers."""
        every = set.intersection(*({s.count for s in options} for options in sizes.values()))
        return {
            str(count): sum(
                _loss(finished, s.key(name), i) ** 2
                for i, options in sizes.items()
                for s in options
                if s.count == count
            )
            for count in sorted(every, reverse=True)
        }

    def _loss_in_words(self) -> str:
        if self.config.measures:
            return "the change of the experts’ output, relative to the residual stream"
        if not self.config.chosen.observes:
            return ""
        return f"the share of {self.config.chosen.title}, squared, that went with the neurons"

    # --- words -----------------------------------------------------------------------------------

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        slim = [layer for layer in layers if "neurons" in layer.shape]
        lost, meant = [x.analysis.get("relative_loss") for x in slim], decision.summary["loss"]
        columns = {
            ("neurons that stay", ",.0f"): [layer.shape["neurons"] for layer in slim],
            ("lost", ".1%"): lost,
        }
        section, caption = "How narrow experts become", f"Lost: {meant}." if any(lost) else ""
        return [
            *figures.bars(section, "Neurons by layer.", caption, slim, columns),
            *figures.kept(slim, section, meant),
            *super().figures(layers, decision),
        ]

    def tell(self, layers: list[LayerRecord], decision: Decision, active: float | None) -> Told:
        assert decision.plan is not None
        changed = [layer for layer in layers if layer.index in decision.plan.layers]
        stay = span([layer.shape["neurons"] for layer in changed])
        before = span([layer.shape["of"] for layer in changed])
        mixture = any(layer.experts for layer in changed)
        each = " an expert" if mixture else " a layer"
        beyond = f", and beyond it ({', '.join(self.config.beyond)})" if self.config.beyond else ""
        comma = "," if beyond else ""
        by = self.config.base_label
        differ = " in the mean" if self.config.uneven else ""
        title = f"slimmed by {by}{beyond}{comma} to {stay} of {before} neurons{each}{differ}"
        by += " on calibration text" if self.config.chosen.observes else ""
        where = "each routed expert" if mixture else "each feed-forward network"
        told = f"{stay} of {before} neurons of {where} stay{differ}, chosen by {by}."
        told += " Experts of a layer differ in width." if differ else ""
        fewer = [layer for layer in changed if "kept" in layer.shape]
        if fewer:
            kept = span([len(layer.shape["kept"]) for layer in fewer])
            were = span([layer.shape["before"] for layer in fewer])
            told += f" {kept} of {were} experts stay."
        if self.config.refit:
            told += " The down projections were then refitted."
        return Told(title, told, {"layers": [_laid_open(x, decision.plan) for x in layers]})


Observed = tuple[int, NeuronStats, Site[Any] | None]
"""A layer's number, its statistics, and its tokens where they were kept."""


def _passing(job: Job[Arch], layers: list[int], tokens: Tokens) -> Iterator[Observed]:
    """Each layer's statistics, taken in while the tokens pass through it: one forward pass.

    Those of the shared path are left out.
    """
    stream = job.stream(layers, job.arch.view, tokens)
    states, kwargs = stream.record()
    try:
        for block in stream.blocks(kwargs, max(layers) + 1):
            if block.index not in layers:
                block.run(states)
                continue
            view = job.arch.view(block.layer)
            stats, ffn = weight_stats(view), job.arch.ffn_of(block.layer)
            with watching(view, ffn, job.arch, stats, stream.masks()):
                block.run(states)
            yield block.index, NeuronStats.merged(gathered(stats)), None
    finally:
        states.clear()


def _layers(job: Job[Arch]) -> list[int]:
    """The layers that are slimmed: those that route, or all of a dense model.

    Raises:
        MoesaicError: there is none.
    """
    if not any(job.base.experts):
        return list(range(len(job.base.widths)))
    found = sorted(job.base.routed)
    if not found:
        raise MoesaicError("No layer of this model routes.")
    return found


def _laid_open(layer: LayerRecord, plan: Plan) -> JSON:
    """A layer as ``--json`` prints it, with ``kept``: the experts that stay."""
    decided = plan.layers.get(layer.index)
    kept = {"kept": decided.experts.tolist()} if isinstance(decided, SlimmedLayer) else {}
    plain = asdict(layer)
    return {**plain, **plain.pop("shape"), **plain.pop("analysis"), **kept}


def _shape(layer: LayerPlan) -> Shape:
    """The experts of a decided layer, and their neurons."""
    if isinstance(layer, NarrowedLayer):
        return torch.zeros(1, dtype=torch.int64), layer.order_W[None]
    assert isinstance(layer, SlimmedLayer)
    return layer.kept_E, layer.neurons_EW


def _loss(finished: Finished, key: str, layer: int) -> float:
    loss: float = finished[key, layer][1]["relative_loss"]
    return loss


def _before(finished: Finished, key: str, layer: int) -> int:
    """The neurons that each expert of a decided layer had."""
    before: int = finished[key, layer][0].header()["before"]
    return before
