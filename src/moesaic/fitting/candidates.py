"""Candidates of a search: recipes that fit a budget, with estimated and measured KL.

Forms are recipes whose results differ only in size: the families of all methods, and pairs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import ExportArgs, MethodConfig
from moesaic.exports.allocation import Numbers, tensor_types
from moesaic.exports.quantiser import WHOLE, block_of
from moesaic.families import Family, Shape
from moesaic.fitting.config import FitConfig
from moesaic.io.source import Source
from moesaic.losses import significantly_worse
from moesaic.methods import METHODS
from moesaic.methods.slim.config import SlimConfig
from moesaic.metrics.score import Score
from moesaic.plans.condensed import cache_leaders
from moesaic.sizes import ResultSize, Skeleton, Steps, conversions, steps_as_json
from moesaic.types import JSON

# --- forms ----------------------------------------------------------------------------------------

BLOCK = 32
"""Weights that GGUF's types round together, at least."""


@dataclass(frozen=True, eq=False)
class Form:
    """Recipes of one family of configs, after one config of another family or none."""

    family: Family[Any]
    before: Family[Any] | None = None
    first: MethodConfig | None = None
    """Config of the step ``before``."""

    @property
    def name(self) -> str:
        """Names of the families, and the size of the first step."""
        if self.before is None:
            return self.family.name
        ends = self.before.configs[0], self.before.configs[-1]
        size = next(
            (
                f"{getattr(self.first, f.name):g} "
                for f in fields(ends[0])
                if len({getattr(end, f.name) for end in ends}) > 1
            ),
            "",
        )
        return f"{self.before.name} {size}, {self.family.name}".replace(" ,", ",")

    @property
    def single(self) -> bool:
        """True if the recipes have one step."""
        return self.first is None

    @property
    def count(self) -> int:
        """Number of recipes, whose results rise in size."""
        return len(self.family.configs)

    def steps(self, place: int, careful: bool = False) -> tuple[MethodConfig, ...]:
        """Return the steps of recipe ``place``, quick to carry out or, if ``careful``, refitted."""
        steps = [] if self.first is None else [(self.before, self.first)]
        every = [*steps, (self.family, self.family.configs[place])]
        return tuple(family.careful(c) if careful and family else c for family, c in every)


def places_priced(family: Family[Any]) -> list[int]:
    """Return the numbers of the configs whose KL is estimated, both ends among them.

    >>> places_priced(Family("", range(20), lambda c: c, priced=3))
    [0, 10, 19]
    """
    count = len(family.configs)
    return sorted({round(n) for n in np.linspace(0, count - 1, min(count, family.priced))})


def forms(source: Source, config: FitConfig) -> list[Form]:
    """Return the forms of recipe that suit a model: families of methods, single and in pairs.

    Raises:
        MoesaicError: the model is of no architecture that can be made smaller.
    """
    shape = _shape(source, config)
    every = [f for m in METHODS.values() for f in m.families(shape) if f.configs]
    size = config.memory or config.parameters
    # a family that keeps all weights meets no budget of weights
    single = [f for f in every if not f.reads_less or (config.active_parameters and not size)]
    first = [f for f in every if not f.reads_less or config.active_parameters]
    pairs = [Form(fill, f, c) for fill in every if fill.fills for f in first for c in f.first]
    return [*map(Form, single), *pairs]


def ending(config: FitConfig) -> ExportArgs:
    """Return the file that recipes end in: of one type, or of the best of several by layer."""
    if len({*config.types} - {WHOLE}) > 1:
        return ExportArgs(to="gguf", memory=config.memory, among=config.types)
    return ExportArgs(to="gguf", type=config.types[0])  # type: ignore[arg-type]


def _shape(source: Source, config: FitConfig) -> Shape:
    """Return the sizes of a model, read from headers, that families of configs depend on.

    Raises:
        MoesaicError: no layer routes, or the architecture is unknown.
    """
    arch, model = base_arch(source.config), Skeleton(source.config, None).model
    itemsize = next(model.parameters()).element_size()
    multiple = BLOCK if config.types else 16 // itemsize  # rows of 16 bytes are what kernels like
    layers, types = arch.layers(model), tensor_types(config.types) if config.types else ()
    lengths = {block_of(type) for type in types} - {1}
    blocks = (*lengths | {BLOCK},) if lengths else ()  # types of longer ones have a substitute
    if not isinstance(arch, MoEArch):
        widths = [arch.width_of(layer) for layer in layers]
        return Shape(len(layers), min(widths), multiple, native=config.native_only, blocks=blocks)
    routed = arch.moe_layers(model)
    view = arch.mixture(layers[routed[0]])
    return Shape(
        layers=len(routed),
        width=view.width,
        multiple=multiple,
        experts=view.count,
        fewest=arch.least_experts(view.top_k, source.config),
        groups=arch.group_count(source.config),
        top_k=0 if arch.chosen is None else view.top_k,
        shared=bool(view.shared_width),
        uneven=not view.odd and not config.native_only,
        blocks=blocks,
        # llama.cpp wants experts in every layer
        replaceable=arch.entry is None and not config.types,
        leaders=len(cache_leaders(source.config) & {*routed}),
        native=config.native_only,
    )


def largest(numbers: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest number that fits, where all below it do; None where none does.

    >>> largest(range(5), lambda n: n < 4), largest([0], lambda _: False)
    (3, None)
    """
    count = bisect_right(numbers, False, key=lambda number: not fits(number))
    return numbers[count - 1] if count else None


# --- candidates -----------------------------------------------------------------------------------

BY_WINDOW = "kl_N"
"""Key of ``kl`` by window in a score."""
ALIKE = 1.03
"""Ratio below which two sizes count as equal: of two such candidates the simpler one is kept,
unless it is significantly worse."""
SIMPLER = 1.05
"""Ratio to the KL of the best candidate up to which a simpler one is preferred."""
FAR = 1.5
"""Ratio to the estimated KL of the best candidate above which others are not measured, if they are
significantly worse."""
QUANTISE = "quantise"
KINDS = {"slim": "narrow", "prune": "drop", "condense": "drop", "skip": "route less"}
"""Words for the kinds of changes, by verb."""
WIDEN = "widen"
"""Word for filling experts up with zeros."""
NONE = np.zeros(1)
"""KL of no change, by sample."""
Levels = dict[str, float]


@dataclass(frozen=True)
class Candidate:
    """Recipe that fits a budget, with its sizes, estimated KL and, once measured, figures."""

    form: str
    steps: Steps
    size: ResultSize
    score: JSON | None = None
    """``perplexity``, ``loss`` (its rise, relative), ``kl`` and ``tokens``; None: not measured."""
    types: Mapping[str, str] | None = None
    """Types of a file whose layers differ, by group of tensors."""
    steps_S: Numbers = field(default_factory=NONE.copy, compare=False)
    """Estimated KL of the steps by sample, before any refit; see ``Price.kl_S``."""
    types_S: Numbers = field(default_factory=NONE.copy, compare=False)
    """Estimated KL of the file's types by sample."""
    kl_N: tuple[float, ...] = ()
    """``kl`` by window of the text that chooses."""

    def with_score(self, score: JSON) -> Candidate:
        """Return the candidate with measured figures; ``memory`` among them replaces its bytes."""
        memory = score.get("memory", self.size.memory)
        rest = {name: value for name, value in score.items() if name != BY_WINDOW}
        size = replace(self.size, memory=memory)
        return replace(self, score=rest, size=size, kl_N=tuple(score[BY_WINDOW]))

    @property
    def conversions(self) -> tuple[MethodConfig, ...]:
        """Steps that convert the model, without the file that is made last."""
        return conversions(self.steps)

    @property
    def file(self) -> ExportArgs | None:
        """GGUF file that the recipe ends in; None if it ends in a checkpoint."""
        last = self.steps[-1]
        return last if isinstance(last, ExportArgs) else None

    def as_json(self) -> JSON:
        """Return the form, the steps, sizes and figures."""
        steps = steps_as_json(self.steps)
        recipe = {"form": self.form, "estimated_kl": self.estimate(), "steps": steps}
        types = {"types": dict(self.types)} if self.types else {}
        return {**recipe, **types, **asdict(self.size), **(self.score or {})}

    @property
    def kind(self) -> str:
        """Words for what the steps do: ``narrow``, ``drop and quantise``."""
        words = [
            WIDEN
            if isinstance(step, SlimConfig) and step.widens
            else KINDS.get(step.verb, step.verb)
            for step in self.conversions
        ]
        return " and ".join(words) or QUANTISE

    @property
    def plain(self) -> bool:
        """True if the candidate is the original, quantised to one type.

        It is always measured: llama.cpp gives some tensors wider types, and the estimate takes all
        to be of the one.
        """
        return self.kind == QUANTISE and self.types is None

    def estimate(self, levels: Levels | None = None) -> float:
        """Return the estimated KL in nats a token.

        Args:
            levels: measured over estimated KL by kind; that of quantising scales the types.
        """
        known = levels or {}
        of_types = known.get(QUANTISE, 1.0) * self.types_S.mean()
        return float(of_types + known.get(self.kind, 1.0) * self.steps_S.mean())

    def far(self, best: Candidate) -> bool:
        """Return True if its estimated KL is significantly and much above another candidate's."""
        pairs = np.broadcast_arrays(self.steps_S + self.types_S, best.steps_S + best.types_S)
        ours_S, theirs_S = map(torch.tensor, pairs)
        worse = len(ours_S) < 2 or significantly_worse(ours_S, theirs_S)
        return self.estimate() > FAR * best.estimate() and worse

    @property
    def kl(self) -> float:
        """KL by which candidates are compared: nats a token, infinite before it is measured."""
        return float(self.score["kl"]) if self.score else math.inf

    @property
    def loss(self) -> float:
        """Relative rise of perplexity, infinite before it is measured."""
        return float(self.score["loss"]) if self.score else math.inf


def simplest(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the simplest candidate that is not significantly worse than the best.

    It has at most :data:`SIMPLER` times the best one's KL, as few windows cannot show small
    differences. Simpler is an ordinary checkpoint, then fewer steps, then one type for all, then a
    lower KL. Two are compared by :func:`moesaic.losses.significantly_worse`, paired by
    window; with a single window the best one is returned. None if the list is empty.
    """

    def order(candidate: Candidate) -> tuple[bool, int, bool, float]:
        mixed = candidate.types is not None
        return not candidate.size.native, len(candidate.steps), mixed, candidate.kl

    ordered = sorted(candidates, key=order)
    best = min(ordered, key=lambda c: c.kl, default=None)
    if best is None or len(best.kl_N) < 2:
        return best
    best_N, near = torch.tensor(best.kl_N), [c for c in ordered if c.kl <= SIMPLER * best.kl]
    return next(c for c in near if not significantly_worse(torch.tensor(c.kl_N), best_N))


def pareto_front(candidates: Iterable[Candidate], size: str) -> list[Candidate]:
    """Return the candidates that no other one beats in both size and KL, the largest first.

    Args:
        candidates: measured.
        size: what is counted, ``memory`` or ``active_parameters``.
    """
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (getattr(c.size, size), c.kl)):
        if best and getattr(candidate.size, size) < ALIKE * getattr(best[-1].size, size):
            chosen = simplest([best[-1], candidate])
            if chosen and (len(best) < 2 or chosen.kl < best[-2].kl):
                best[-1] = chosen
        elif not best or candidate.kl < best[-1].kl:
            best.append(candidate)
    return best[::-1]


def figures(ours: Score, theirs: Score) -> JSON:
    """Return ``perplexity``, ``loss``, ``kl`` and ``tokens`` of a candidate beside the original."""
    return {
        "perplexity": ours.perplexity,
        "loss": ours.perplexity / theirs.perplexity - 1,
        "kl": ours.kl,
        "tokens": ours.tokens,
    }
