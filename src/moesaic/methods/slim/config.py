"""Options of ``slim``, and scores of neurons, one entry each. Imports no torch.

========  =============================================================================
w_t h_tj  input of the down projection at neuron j, times the combine weight of its expert
d_j       column j of the down projection
========  =============================================================================

Within an expert the neurons of the highest score are kept; squares of scores add up, so that an
expert's own score is the root of their sum over its kept neurons.

Another package adds a score by an entry point in the group ``moesaic.scores`` that names a
:class:`Score`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from moesaic.config import MethodConfig, option, seed_option
from moesaic.errors import MoesaicError
from moesaic.families import FINEST, Family, Shape, shares_of
from moesaic.registry import InWords, Registry
from moesaic.types import JSON, Values

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Neurons:
    """Statistics of the neurons of a layer's experts (E, M), or of its shared path (S,)."""

    energy: Tensor
    """Sum of (w_t h_tj)^2, float64."""
    reach: Tensor
    """Norm ||d_j||, float64."""
    size: Tensor
    """Norm of all of a neuron's weights, float64."""
    seed: int
    """Seed of random choice, different for every layer."""
    gram: Iterable[Tensor] | None = None
    """Sum of (w h_j)(w h_k) of one expert's neurons after the other (M, M), float64, to be read
    once; None if not needed."""
    down: Iterable[Tensor] | None = None
    """Columns d_j of one expert after the other (D, M); given with ``gram``."""


@dataclass(frozen=True)
class Score:
    """Rule that decides which neurons are kept."""

    name: str
    """Value of the option ``score`` that chooses it."""
    title: str
    """Name in titles, as in ``slimmed by energy``."""
    help: str
    """Measure in a few words."""
    score: Callable[[Neurons], Tensor]
    """Function that returns each neuron's score, in the shape of its neurons."""
    paper: str = ""
    """Authors, title and place; empty if it comes from no paper that we know."""
    observes: bool = True
    """True if it reads tokens."""
    gram: bool = False
    """True if it needs the inner products of neurons, M x M for each expert."""


def _random(neurons: Neurons) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(neurons.seed)
    return torch.rand(neurons.size.shape, dtype=torch.float64, generator=generator)


def _surgeon(neurons: Neurons) -> Tensor:
    import torch

    from moesaic.methods.slim.neurons import removal_costs

    assert neurons.gram is not None
    assert neurons.down is not None
    pairs = zip(neurons.gram, neurons.down, strict=True)
    costs = [removal_costs(gram_MM, down_DM.double()) for gram_MM, down_DM in pairs]
    return torch.stack(costs).sqrt()


BUILT_IN = (
    Score(
        "energy",
        "energy",
        "sqrt(sum of (w h_j)^2) times ||d_j||",
        lambda neurons: neurons.energy.sqrt() * neurons.reach,
        'Xu et al., "CAMERA: Multi-Matrix Joint Compression for MoE Models via Micro-Expert '
        'Redundancy Analysis" (AAAI 2026)',
    ),
    Score(
        "surgeon",
        "optimal brain surgeon",
        "the error that a refit leaves without the neuron, one neuron after the other",
        _surgeon,
        'after Hassibi and Stork, "Second Order Derivatives for Network Pruning: Optimal Brain '
        "Surgeon\" (NeurIPS 1992), whose Hessian is that of the layer's squared error here",
        gram=True,
    ),
    Score(
        "magnitude",
        "magnitude",
        "without data: norm of a neuron's weights",
        lambda neurons: neurons.size,
        observes=False,
    ),
    Score("random", "random choice", "a seeded draw", _random, observes=False),
)
"""Scores of this package, in the order in which they are listed. A new one is an entry here."""


SCORES = Registry("moesaic.scores", {}, {s.name: s for s in BUILT_IN})
"""Scores by name, those of other packages included."""


# --- options -------------------------------------------------------------------------------------


BEST = "surgeon"
"""Score of the lowest KL."""
OPERATIONS = 3e12
"""Largest sum of M^3 over a layer's experts for which ``surgeon`` is the default score: about a
quarter of an hour of one core for each layer, of an AMD EPYC."""


def best_score(experts: int, width: int) -> str:
    """Return the score of lowest KL that takes minutes and not hours for each layer.

    >>> best_score(128, 768), best_score(256, 2048), best_score(8, 14_336)
    ('surgeon', 'surgeon', 'energy')
    """
    return BEST if experts * width**3 <= OPERATIONS else "energy"


@dataclass(frozen=True)
class SlimConfig(MethodConfig):
    """Options of ``slim``. The defaults measure best; ``paper`` is CAMERA's pruning."""

    verb = "slim"
    name = "neurons"
    title = "slimming"
    paper = ""
    implementation = "moesaic.methods.slim.method:Slimmer"
    variants: ClassVar[Mapping[str, str]] = InWords(SCORES, "slimming by {.title}")
    bundles: ClassVar[Mapping[str, Values]] = {
        "best": {},
        "paper": {"score": "energy", "allocate": "experts", "refit": False},
    }

    keep: float = option(
        0.5,
        "Share of the routed experts' parameters to keep; of a dense model, of its FFNs'.",
        above=0,
        maximum=1,
        idle=(1, "removes nothing"),
    )
    score: str | None = option(
        None,
        "How to decide which neurons to keep. Default: surgeon, or energy with stats and where "
        "experts are so wide that surgeon would take hours.",
        choices=tuple(SCORES),
    )
    experts: str = option(
        "all",
        "Routed experts to keep, each as wide as the budget then allows: all, a number, or auto "
        "for the number with the least output error on the calibration tokens.",
        metavar="all|N|auto",
        beyond="fewer experts",
    )
    shared: float | None = option(
        None,
        "Share of the shared path's neurons to keep. Default: all of them.",
        above=0,
        maximum=1,
        seldom=True,
    )
    multiple: int | None = option(
        None,
        "Widths are a multiple of this. Default: the largest of 256, 64, 32, 8, 4 and 1 that comes "
        "near the target; of experts at least 8, in 32 bits 4. With keep 1, widths are rounded up "
        "by neurons of zeros.",
        minimum=1,
    )
    refit: bool | None = option(
        None,
        "Solve for new down projections by least squares. Default: where it can be done, except "
        "with stats.",
        beyond="refitted down projections",
    )
    allocate: Literal["uniform", "layers", "experts", "layers+experts"] = option(
        "uniform",
        "uniform: all experts equally wide; layers: wider in layers where narrowing costs more; "
        "experts: a layer keeps its neurons of the highest scores, whichever expert they are of; "
        "layers+experts: both. Unless uniform, the result is of the class moesaic_<base>.",
    )
    seed: int = seed_option("Seed of random choice.", seldom=True)

    @classmethod
    def families(cls, model: Shape) -> Iterator[Family[SlimConfig]]:
        score = best_score(model.experts, model.width) if model.experts else "energy"
        careful = partial(replace, score=score, refit=True)

        def family(
            name: str,
            shares: tuple[float, ...],
            priced: int = 8,
            fills: bool = False,
            **options: Any,
        ) -> Family[SlimConfig]:
            configs = [cls(keep=s, score="energy", refit=False, **options) for s in shares]
            return Family(name, configs, careful, priced=priced, fills=fills)

        yield family("slim", model.widths, fills=not model.uneven)
        for block in model.wider:
            wider = [cls(keep=1, multiple=block, refit=False)]
            yield Family(f"widen to blocks of {block}", wider, lambda config: config, removes=False)
        widest, shares, options, few = "slim", model.widths, JSON(), 8
        if model.uneven:
            one_each = -(-FINEST // model.width)
            shares, options = shares_of(FINEST, one_each), {"allocate": "experts", "multiple": 1}
            yield family("slim by expert", shares, **options)
            widest, options = "slim by layer and expert", {**options, "allocate": "layers+experts"}
            few = 3
        if model.shared:
            both = {**options, "shared": 0.5}
            yield family(f"{widest}, shared", shares, few, fills=model.native, **both)
        if model.uneven:
            yield family(widest, shares, few, fills=True, **options)

    @property
    def uneven(self) -> bool:
        """True if experts of a layer may differ in width."""
        return "experts" in self.allocate

    @property
    def by_layer(self) -> bool:
        """True if layers may differ in width, by their losses."""
        return "layers" in self.allocate

    @property
    def rule(self) -> Score:
        """Score named by ``score``."""
        return SCORES[self.score or BEST]

    @property
    def decides_from_stats(self) -> bool:
        needs_model = self.score is not None and self.rule.gram
        return not (self.measures or needs_model)

    @property
    def credit(self) -> str:
        return self.rule.paper

    @property
    def base_label(self) -> str:
        return self.rule.title

    @property
    def beyond(self) -> tuple[str, ...]:
        widths = ("widths spread by sensitivity",) if self.by_layer else ()
        return (*super().beyond, *widths)

    @property
    def count(self) -> int | None:
        """Number of routed experts to keep; None if no number was given."""
        return int(self.experts) if self.experts.isdecimal() else None

    @property
    def measures(self) -> bool:
        """True if several shapes are compared by their exact error on the calibration tokens."""
        return self.experts == "auto" or self.by_layer

    @property
    def widens(self) -> bool:
        """True if nothing is removed and widths are rounded up."""
        uniform = self.allocate == "uniform" and self.shared is None
        return self.keep == 1 and self.multiple is not None and uniform

    @property
    def idle(self) -> str:
        return "" if self.shared or self.widens else super().idle

    def check(self) -> None:
        if self.experts not in ("all", "auto") and not self.count:
            raise MoesaicError(f"experts {self.experts!r} is none of all, auto, or a number.")
        if self.widens and (self.refit or self.experts != "all"):
            raise MoesaicError(
                "keep 1 with a multiple only adds neurons of zeros: leave refit and experts out."
            )
        if self.allocate != "uniform" and self.experts != "all":
            raise MoesaicError(
                f"allocate={self.allocate} shares the budget out among all experts: leave experts "
                "out."
            )
