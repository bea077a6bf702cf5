"""Slimming: neurons are removed from every expert; nothing is trained.

A neuron's share of its layer's output is w h_j d_j. Those that write least are removed, the same
number in every expert, so that the result is of the architecture's own class with another expert
width. A dense FFN is one expert that every token runs.

Deviations from the scores' papers:

- CAMERA ranks the neurons of a layer, or of the model, together, and experts come out of different
  widths, which no architecture holds: zeros are stored. Here experts are of one width;
  where ``allocate`` names ``experts`` a layer's neurons are ranked together, and no zeros are
  stored.
- CAMERA mixes the sum of squares with the largest square (alpha); here it is only the sum.

A budget may also remove experts: N are kept, each as wide as the budget then allows. ``auto`` takes
the N for which the layers' routed output changes least on the calibration tokens, measured exactly
with the restricted router. ``layers`` does so for widths that differ by layer, unless equal widths
change the model's output less on held-out windows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import uncarved_arch
from moesaic.arch.mixture import FFN, MoEArch, MoEFFN
from moesaic.errors import MoesaicError
from moesaic.methods import figures
from moesaic.methods.base import Decision, Summary
from moesaic.methods.figures import span
from moesaic.methods.layered import RESULT, Decided, LayerCase, LayerMethod
from moesaic.methods.prune.subsets import allocate
from moesaic.methods.slim.config import BEST, SCORES, Neurons, SlimConfig, best_score
from moesaic.methods.slim.neurons import (
    NAMES,
    ROW,
    choose,
    down_projections,
    highest,
    highest_in_layer,
    in_blocks,
    inner_products,
    losses,
    neurons_of,
    pairs_bytes,
    share_lost,
    width_for,
)
from moesaic.observation.files import observed_layers
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.plans.cut import WIDENED, CutLayer
from moesaic.plans.neurons import filled_up, in_groups
from moesaic.record import Figure, LayerRecord
from moesaic.surgery import headers_of
from moesaic.types import JSON, Config, Values, silent

WIDTHS = 12
"""Most widths of a layer that are tried."""
EQUAL = "equal widths"


@dataclass(frozen=True)
class Size:
    """Size of a layer: how many experts it keeps, and how wide."""

    count: int
    width: int
    """Neurons of each expert; the mean, rounded up, if they differ."""
    neurons: int
    """Neurons of all experts together."""
    before: int
    """Neurons of each expert before slimming."""
    step: int
    """Multiple of which widths are."""
    shared: int = 0
    """Kept neurons of the shared path."""
    room: int = 0
    """Width of the new shared path, filled up with zeros; 0 if the path is not changed."""


class Slimmer(LayerMethod[SlimConfig, Arch, Size]):
    """Method of ``slim``: removes neurons from every expert, or from every dense FFN."""

    varies = "score"
    words = "Slimming layers"

    def find(self, config: Config) -> Arch:
        """Return the architecture of a dense model or of a mixture, the latter converted or not.

        Raises:
            MoesaicError: the model is unknown, a carved dense model, or has experts of different
                widths.
        """
        arch = uncarved_arch(config, "slim the original")
        stacks = headers_of(config).values()
        if any("widths" in header for stack in stacks for header in stack):
            raise MoesaicError(
                "Experts of different widths are not slimmed again: slim the original."
            )
        return arch

    def resolve_defaults(self, job: Job[Arch]) -> Iterator[str]:
        if self.config.widens:
            self.config = replace(self.config, score="magnitude", refit=False)
        elif self.config.score is None:
            views = [job.arch.view(job.layers[i]) for i in observed_layers(job)]
            widest = max(views, key=lambda view: view.count * view.width**3)
            score = best_score(widest.count, widest.width)
            if job.args.calibration.stats:
                score = "energy"
                yield "Statistics hold no pairs of neurons: they are scored by energy."
            elif score != BEST:
                yield (
                    f"Neurons are scored by energy: {BEST}, which has less KL, would take hours "
                    f"for {widest.count} x {widest.width:,} neurons of each layer."
                )
            self.config = replace(self.config, score=score)
        yield from super().resolve_defaults(job)

    @property
    def needs(self) -> set[str]:
        """Statistics of neurons; also the tokens if they score neurons by their inner products, or
        if several sizes are compared on them."""
        config, score = self.config, self.config.rule
        read = {"reach", "size", *["energy"] * (score.observes and not score.gram)}
        paths = (False, True) if config.shared is not None else (False,)
        needs = {NAMES[field][shared] for field in read for shared in paths}
        tokens = config.measures or score.gram
        return needs | {*["calls_E"] * score.observes, *["tokens"] * tokens}

    def statistics_bytes(self, view: FFN, tokens: int) -> int:
        held = super().statistics_bytes(view, tokens)
        return max(held, self.config.rule.gram * pairs_bytes(view.count, view.width))

    # --- sizes -----------------------------------------------------------------------------------

    def sizes(self, job: Job[Arch]) -> dict[int, list[Size]]:
        config = self.config
        views = {i: job.arch.view(job.layers[i]) for i in observed_layers(job)}
        mixture = any(job.base.experts)
        if not mixture and (config.experts != "all" or config.shared is not None):
            option = "experts" if config.experts != "all" else "shared"
            raise MoesaicError(
                f"{job.arch.model_type} is dense: it has no {option}. Leave {option} out; keep is "
                "the share of each FFN's neurons to keep."
            )
        multiple = self._multiple(job)
        if config.uneven:
            self._check_uneven(views)
        dtype = job.dtype or next(job.skeleton.parameters()).dtype
        row = ROW // dtype.itemsize if mixture and not config.uneven else 1
        block = job.format.columns if job.format and multiple is None else 0
        sizes: dict[int, list[Size]] = {}
        for i, view in views.items():
            if config.widens:
                options = [self._wider(view, multiple or 1)]
            elif config.uneven:
                options = [self._uneven_size(view, multiple or 1)]
            else:
                options = self._even_sizes(job, i, multiple, row, block)
            if config.by_layer:  # the result is not native, so engines set no multiple
                options = self._spread(options[0], multiple or row)
            sizes[i] = [self._with_shared(view, size) for size in options]
        if config.widens and all(size.width == size.before for (size,) in sizes.values()):
            raise MoesaicError(f"keep 1 removes nothing, and multiple {multiple} adds nothing.")
        every = {size.width for options in sizes.values() for size in options}
        odd = sorted(width for width in every if block and width % block)
        if odd and not config.uneven and job.args.track is not silent:  # searches try many widths
            logging.getLogger(__name__).warning(
                "%s neurons are no whole blocks of %d, in which this checkpoint is quantised: FFNs "
                "of that width are stored in %s.",
                ", ".join(map(str, odd)),
                block,
                str(job.original.config.dtype).removeprefix("torch."),
            )
        return sizes

    def _even_sizes(
        self, job: Job[Arch], layer: int, multiple: int | None, row: int, block: int
    ) -> list[Size]:
        """Return the sizes of a layer with experts of one width, one per number of experts.

        Args:
            job: the model.
            layer: index of the layer.
            multiple: widths are a multiple of this; None to find one near the target.
            row: the least multiple.
            block: columns that share a scale on disk; 0 if none do, or ``multiple`` is given.
        """
        config, view = self.config, job.arch.view(job.layers[layer])
        sizes = []
        for count in self._counts(job, layer, view):
            target = config.keep * view.count * view.width / count
            whole = in_blocks(view.width, target, block)
            try:
                width, step = width_for(view.width, target, multiple, "keep", whole or row)
            except MoesaicError:
                if config.experts == "auto":
                    continue
                raise
            sizes.append(Size(count, width, count * width, view.width, step))
        if not sizes:
            raise MoesaicError(
                f"experts auto: no number of experts meets keep {config.keep:g} with multiple "
                f"{multiple}. Another keep or multiple would."
            )
        return sizes

    def _wider(self, view: FFN, multiple: int) -> Size:
        """Return the size of a layer whose experts are filled up with zeros to a multiple."""
        width = -(-view.width // multiple) * multiple
        if width > (most := WIDENED * view.width):
            raise MoesaicError(
                f"multiple {multiple} is out of reach: {view.width} neurons become at most {most}."
            )
        return Size(view.count, width, view.count * view.width, view.width, multiple)

    def _multiple(self, job: Job[Arch]) -> int | None:
        """Return the number that widths must be a multiple of; None if any width will do."""
        multiple, widths = self.config.multiple, [job.base.widths[i] for i in job.base.routed]
        block = job.format.whole if job.format and widths else 0
        if job.format and job.format.loose and max(widths, default=0) <= block:
            block = 0  # a part of one group is a group
        if multiple is not None and block and multiple % block:
            raise MoesaicError(
                f"multiple {multiple}: this checkpoint stores experts in blocks of {block}, so "
                f"widths are a multiple of {block}. With a dtype the result is plain, and any will "
                "do."
            )
        return multiple or block or None

    def _check_uneven(self, views: Mapping[int, FFN]) -> None:
        """Refuse models whose experts cannot differ in width."""
        first = next(iter(views.values()))
        if not isinstance(first, MoEFFN):
            raise MoesaicError(
                f"allocate={self.config.allocate} is of a mixture's experts: a dense model has "
                "none."
            )
        if first.odd:
            raise MoesaicError(
                f"allocate={self.config.allocate} is impossible for {first.arch.model_type}: "
                f"{first.odd}. Leave it out."
            )

    def _counts(self, job: Job[Arch], layer: int, view: FFN) -> list[int]:
        """Return the numbers of experts that a layer may keep."""
        config, count = self.config, view.count
        if config.experts == "all" or not isinstance(view, MoEFFN):
            return [count]
        least = view.arch.least_experts(view.top_k, job.skeleton.config)
        groups = view.arch.group_count(job.skeleton.config)
        full = -(-config.keep * count // 1)  # the budget in whole experts
        least = max(least, int(full) + -int(full) % groups)
        if config.count is None:
            step = groups * max(1, -(-(count - least) // (7 * groups)))  # at most eight numbers
            return list(range(count, least - 1, -step))
        if not least <= config.count <= count or config.count % groups:
            raise MoesaicError(
                f"experts {config.count} is out of reach: layer {layer} has {count} experts of "
                f"{view.width} neurons, and keep {config.keep:g} needs at least {least}"
                + (f", a multiple of {groups} router groups." if groups > 1 else ".")
            )
        return [config.count]

    def _uneven_size(self, view: FFN, step: int) -> Size:
        """Return the size of a layer whose experts differ in width by multiples of ``step``; it
        uses the whole budget."""
        count, width = view.count, view.width
        if step > width:
            width_for(width, width, step, "keep")  # raises
        least, most = count * step, width // step * step * count
        blocks = self.config.keep * count * width / step
        # where layers share one budget none may round up
        neurons = int(blocks if self.config.by_layer else round(blocks)) * step
        if not least <= min(neurons, most):
            raise MoesaicError(
                f"keep {self.config.keep:g} is out of reach: allocate=experts leaves each of "
                f"{count} experts {step} of {width} neurons at least; from {step / width:.4g} on "
                "it works."
            )
        neurons = min(neurons, most)
        return Size(count, -(-neurons // count), neurons, width, step)

    def _spread(self, middle: Size, step: int) -> list[Size]:
        """Return about evenly spaced sizes of a layer around that of equal layers, ``middle``."""
        count, width = middle.count, middle.before
        stride = step * max(1, round(width * 0.75 / WIDTHS / step))
        at = middle.neurons // count
        below = range(at, max(step, at // 3) - 1, -stride)
        widths = sorted({*below, *range(at, width + 1, stride)})
        extra = middle.neurons - at * count  # of experts that differ in width
        most = width // step * step * count
        sizes = [min(w * count + extra, most) for w in widths]
        return [Size(count, -(-n // count), n, width, step) for n in sizes]

    def _with_shared(self, view: FFN, size: Size) -> Size:
        """Return the size with the new width of the shared path."""
        if not isinstance(view, MoEFFN):
            return size
        config, arch, whole = self.config, view.arch, view.shared_width
        if not whole:
            return size
        shared = whole
        if config.shared is not None:
            each = whole // view.shared_count
            shared, _ = width_for(each, config.shared * each, config.multiple, "shared")
            shared *= view.shared_count
        native = config.allocate == "uniform"
        room = arch.shared_room(shared, size.width) if native else shared
        unchanged = shared == room == whole and (arch.shared_size or not native)
        if unchanged:
            return size
        return replace(size, shared=shared, room=room)

    # --- one layer -------------------------------------------------------------------------------

    def decide(self, case: LayerCase[Arch], sizes: Sequence[Size]) -> Decided[Size]:
        view, stats = case.view, case.stats
        if stats is None:  # a dry run
            shape_EM = (view.count, view.width)
            zeros = {"reach_EM": shape_EM, "size_EM": shape_EM, "calls_E": (view.count,)}
            stats = {name: torch.zeros(shape) for name, shape in zeros.items()}
        arch, config = case.job.arch, case.job.skeleton.config
        groups = arch.group_count(config) if isinstance(arch, MoEArch) else 1
        score = SCORES["random"] if case.stats is None else self.config.rule
        seed = self.config.seed * 10_007 + case.index
        score_EM, shared = score.score(self._neurons(case, stats, seed)), None
        if any(size.room for size in sizes):
            alike_1S = torch.zeros(1, getattr(view, "shared_width", 0))
            shared = alike_1S, alike_1S  # all are kept, or this is a dry run
            if "shared_size_S" in stats:
                beside = self._neurons(case, stats, seed + 1, shared=True)
                shared = score.score(beside), beside.reach
        decided = {size: self.choose(case, stats, score_EM, shared, size, groups) for size in sizes}
        if self.config.measures and case.site is not None:
            exact = losses(case.site, [layer for layer, _ in decided.values()])
            for (_, analysis), loss in zip(decided.values(), exact, strict=True):
                analysis["relative_loss"] = loss
        return decided

    def _neurons(
        self, case: LayerCase[Arch], stats: Mapping[str, Tensor], seed: int, shared: bool = False
    ) -> Neurons:
        """Return the neurons of a layer's experts or shared path, as the score reads them."""
        neurons, site = neurons_of(stats, seed, shared), case.site
        if not self.config.rule.gram or site is None:
            return neurons
        gram, down = inner_products(site, shared), down_projections(site.view, shared)
        return replace(neurons, gram=gram, down=down)

    def choose(
        self,
        case: LayerCase[Arch],
        stats: Mapping[str, Tensor],
        score_EM: Tensor,
        shared: tuple[Tensor, Tensor] | None,
        size: Size,
        groups: int,
    ) -> tuple[CutLayer, JSON]:
        """Choose the neurons that a layer keeps, for one size.

        Args:
            case: the layer.
            stats: its statistics, zeros in a dry run.
            score_EM: scores of its neurons.
            shared: scores and reach of the shared path's neurons (1, S), if it is narrowed.
            size: the number of experts to keep, and their width.
            groups: router groups; the same number of experts is removed from each.
        """
        config, reach_EM = self.config, stats["reach_EM"]
        most = min(size.width, size.before)
        kept, neurons_NW = choose(score_EM, size.count, most, reach_EM, groups)
        if config.uneven:
            neurons_NW = highest_in_layer(score_EM, size.neurons, reach_EM, config.multiple or 1)
        analysis: JSON = {}
        if config.rule.observes or case.stats is None:
            lost = share_lost(score_EM, kept, neurons_NW)
            analysis = {"relative_loss": lost, "calls": stats["calls_E"].tolist()}
        form = None if config.uneven else case.job.format  # no format has uneven experts
        columns = form.columns if form else 0  # that share a scale, which most are to keep
        room = max(size.width, neurons_NW.shape[1])
        orders = (filled_up(in_groups(order_W, columns), room) for order_W in neurons_NW)
        orders_EW = torch.stack([*orders])
        view, order_S = case.view, None
        if not isinstance(view, MoEFFN):
            return CutLayer(None, orders_EW, size.before), analysis
        if size.room and shared is not None:
            count = view.shared_count
            score_NS, reach_NS = (x.view(count, -1) for x in shared)
            first_N1 = score_NS.shape[1] * torch.arange(count)[:, None]
            order_NS = first_N1 + highest(score_NS, size.shared // count, reach_NS)
            each = [filled_up(one_S, size.room // count) for one_S in order_NS]
            order_S = in_groups(torch.cat(each), columns)
        return CutLayer(
            kept, orders_EW, size.before, shared_S=order_S, uneven=config.uneven
        ), analysis

    # --- a model ---------------------------------------------------------------------------------

    def tag(self, size: Size) -> str:
        return f"{size.count}-{size.neurons}"

    def alternatives(self) -> Mapping[str, Slimmer]:
        """Return the alternative to widths that differ by layer: equal widths."""
        if not self.config.by_layer:
            return {}
        plain = replace(self.config, allocate="experts" if self.config.uneven else "uniform")
        return {EQUAL: Slimmer(plain)}

    def allocate(self, losses: Mapping[int, Mapping[Size, float]]) -> Mapping[int, Size]:
        """Return the widths of least squared loss, or the best number of experts for all layers."""
        if self.config.by_layer:
            firsts = [next(iter(of_layer)) for of_layer in losses.values()]
            total = sum(size.count * size.before for size in firsts)
            curves = {
                i: {s.neurons: x for s, x in of_layer.items()} for i, of_layer in losses.items()
            }
            spent = allocate(curves, self.config.keep * total)
            return {i: next(s for s in losses[i] if s.neurons == n) for i, n in spent.items()}
        if self.config.experts != "auto":
            return super().allocate(losses)
        totals = _by_count(losses)
        best = min(totals, key=lambda count: totals[count])
        return {i: next(s for s in of_layer if s.count == best) for i, of_layer in losses.items()}

    def summary(self, job: Job[Arch], losses: Mapping[int, Mapping[Size, float]]) -> JSON:
        step = min(size.step for of_layer in losses.values() for size in of_layer)
        summary: JSON = {"multiple": step, "loss": self._loss_in_words()}
        if self.config.experts == "auto":
            summary["tried"] = {str(count): loss for count, loss in _by_count(losses).items()}
        return summary

    def _loss_in_words(self) -> str:
        if self.config.measures:
            return "the change of the experts’ output, relative to the residual stream"
        if not self.config.rule.observes:
            return ""
        return f"the removed share of all neurons’ squared scores, by {self.config.rule.title}"

    # --- words -----------------------------------------------------------------------------------

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        slim = [layer for layer in layers if "neurons" in layer.shape]
        lost, measure = [x.analysis.get("relative_loss") for x in slim], decision.summary["loss"]
        columns = {
            ("neurons kept", ",.0f"): [layer.shape["neurons"] for layer in slim],
            ("lost", ".1%"): lost,
        }
        caption = f"Lost: {measure}." if any(lost) else ""
        parts = "experts" if any(layer.experts for layer in slim) else "layers"
        section = f"How narrow {parts} become"
        return [
            *figures.bars(section, "Neurons by layer.", caption, slim, columns),
            *figures.kept_figures(slim, section, measure),
            *super().figures(layers, decision),
        ]

    def described_config(self, plan: Plan | None) -> SlimConfig:
        config = super().described_config(plan)
        if plan is None or any(
            isinstance(layer, CutLayer) and len(layer.experts) < plan.base.experts_of(i)
            for i, layer in plan.layers.items()
        ):
            return config
        return replace(config, experts="all")

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        assert decision.plan is not None
        config = self.described_config(decision.plan)
        changed = [layer for layer in layers if layer.index in decision.plan.layers]
        neurons = span([layer.shape["neurons"] for layer in changed])
        before = span([layer.shape["of"] for layer in changed])
        mixture = any(layer.experts for layer in changed)
        each = " an expert" if mixture else " a layer"
        if config.widens:
            words = f"filled up with zeros from {before} to {neurons} neurons{each}"
            text = f"Nothing is removed: widths are {words}."
            return Summary(words, text, {"layers": [_as_output(x, decision.plan) for x in layers]})
        added = f", with {', '.join(config.beyond)}" if config.beyond else ""
        by = config.base_label
        differ = " in the mean" if config.uneven else ""
        title = f"slimmed to {neurons} of {before} neurons{each}{differ} by {by}{added}"
        by += " on calibration text" if config.rule.observes else ""
        where = "each routed expert" if mixture else "each feed-forward network"
        text = f"{neurons} of {before} neurons of {where} are kept{differ}, chosen by {by}."
        text += " Experts of a layer differ in width." if differ else ""
        text += _compared(decision.summary, "equal mean width" if differ else "equal width")
        fewer = [layer for layer in changed if "kept" in layer.shape]
        if fewer:
            kept = span([len(layer.shape["kept"]) for layer in fewer])
            were = span([layer.shape["before"] for layer in fewer])
            text += f" {kept} of {were} experts are kept."
        if config.refit:
            text += " The down projections were then refitted."
        return Summary(title, text, {"layers": [_as_output(x, decision.plan) for x in layers]})


def _compared(summary: Values, equally: str) -> str:
    """Return a sentence on how layers of equal width compared with others, on held-out windows."""
    by_name = summary.get("compared")
    if not by_name:
        return ""
    equal, unequal = by_name[EQUAL], by_name[RESULT]
    kept = "are significantly worse" if summary["kept"] == RESULT else "were kept"
    sure = ", which is no sure gain" if kept == "were kept" and unequal < equal else ""
    both = f"KL {equal:.3g} beside {unequal:.3g}"
    return f" Layers of {equally} {kept}: {both} on windows held back{sure}."


def _by_count(losses: Mapping[int, Mapping[Size, float]]) -> dict[int, float]:
    """Return all layers' summed squared loss, by number of experts that every layer can keep."""
    every = set.intersection(*({s.count for s in of_layer} for of_layer in losses.values()))
    return {
        count: sum(
            x**2 for of_layer in losses.values() for s, x in of_layer.items() if s.count == count
        )
        for count in sorted(every, reverse=True)
    }


def _as_output(layer: LayerRecord, plan: Plan) -> JSON:
    """Return a layer as ``--json`` prints it, with ``kept``: the kept experts."""
    decided = plan.layers.get(layer.index)
    kept: JSON = {}
    if isinstance(decided, CutLayer) and not decided.dense:
        kept = {"kept": decided.experts.tolist()}
    plain = asdict(layer)
    return {**plain, **plain.pop("shape"), **plain.pop("analysis"), **kept}
