"""Options of ``prune``, and criteria, which decide the experts that a layer keeps, one entry each.

Imports no torch.

A criterion either scores one expert at a time, and those of the lowest scores are removed, or gives
the loss of a whole set of experts, and the best set is searched for
(:mod:`moesaic.methods.prune.subsets`).

==========  ==========================
T_j         tokens routed to expert j
g_j, f_j    its combine weight, its output
==========  ==========================

Another package adds a criterion by an entry point in the group ``moesaic.criteria`` that names a
:class:`Criterion`: ``mine = "my_package:MINE"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from moesaic.config import MethodConfig, option, seed_option
from moesaic.errors import MoesaicError
from moesaic.families import FINEST, Family, Shape, shares_of
from moesaic.registry import InWords, Registry
from moesaic.types import Values

if TYPE_CHECKING:
    from torch import Tensor

    from moesaic.arch.routing import RoutingFunction
    from moesaic.methods.prune.subsets import Losses


@dataclass(frozen=True)
class ScoredLayer:
    """Input of a criterion: one layer, and everything that was observed of it."""

    stats: Mapping[str, Tensor]
    """Statistics of the layer by name (:mod:`moesaic.observation.stats`)."""
    routing: RoutingFunction
    """Routing function of the layer."""
    index: int
    """Index of the layer."""
    seed: int = 0
    """Seed of random choices."""
    sum_batch_norms: bool = False
    """True if losses are sums of norms over batches, as in the authors' code."""
    device: str = "cpu"
    """Device on which to search."""


@dataclass(frozen=True)
class Criterion:
    """Rule that decides which experts are kept. It has either ``score`` or ``losses``."""

    name: str
    """Value of the option ``score`` that chooses it."""
    title: str
    """Name in titles, as in ``pruned by REAP``."""
    help: str
    """Measure in a few words."""
    paper: str = ""
    """Authors, title and place; empty if it comes from no paper that we know."""
    score: Callable[[ScoredLayer], Tensor] | None = None
    """Function that returns each expert's score (E,); the highest are kept."""
    losses: Callable[[ScoredLayer], tuple[Losses, float]] | None = None
    """Function that returns the loss of sets of experts, and that of removing all experts."""
    squared: bool = False
    """True if ``losses`` returns squares; records hold their roots."""
    observes: bool = True
    """True if it reads tokens; without, there is no loss by which layers could be compared."""
    needs: tuple[str, ...] = ()
    """Statistics that it reads (:mod:`moesaic.observation.stats`). If it reads tokens, ``calls_E``,
    ``batch_T`` and ``bias_E`` are always there."""


# --- scores --------------------------------------------------------------------------------------


def mean_over(sum_E: Tensor, calls_E: Tensor) -> Tensor:
    """Return the mean over T_j (E,); 0 for an expert that no token was routed to.

    >>> import torch
    >>> mean_over(torch.tensor([6.0, 0.0]), torch.tensor([3, 0]))
    tensor([2., 0.])
    """
    return sum_E / calls_E.clamp(min=1)


def random_scores(experts: int, layer: int, seed: int) -> Tensor:
    """Return random scores (E,), the same for the same seed and layer."""
    import torch

    generator = torch.Generator().manual_seed(seed * 10_007 + layer)
    return torch.rand(experts, dtype=torch.float64, generator=generator)


# --- losses of sets ------------------------------------------------------------------------------


def _pairwise_losses(pair_EE: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from sets (C, E) to losses (C,): dropping S without rerouting costs 1_S^T Q
    1_S.

    Q_ij = sum over tokens of g_i g_j <f_i, f_j>.

    >>> import torch
    >>> loss = _pairwise_losses(torch.tensor([[1.0, -1.0], [-1.0, 2.0]]))
    >>> loss(torch.tensor([[False, True], [False, False]]))
    tensor([1., 1.])
    """

    def losses(kept_CE: Tensor) -> Tensor:
        gone_CE = (~kept_CE).to(pair_EE.dtype)
        return ((gone_CE @ pair_EE) * gone_CE).sum(-1)

    return losses


def _pairwise(layer: ScoredLayer) -> tuple[Losses, float]:
    pair_EE = layer.stats["pair_EE"]
    return _pairwise_losses(pair_EE), pair_EE.sum().item() ** 0.5


def _reconstruction(layer: ScoredLayer) -> tuple[Losses, float]:
    from moesaic.methods.prune.reconstruction import Reconstruction, output_norm

    device = "cpu" if layer.device.startswith("mps") else layer.device  # mps has no float64
    losses = Reconstruction(layer.stats, layer.routing, layer.sum_batch_norms, device)
    return losses, output_norm(layer.stats, layer.routing)


# --- the table -----------------------------------------------------------------------------------

NAEE = (
    'Lu et al., "Not All Experts are Equal: Efficient Expert Pruning and Skipping for '
    'Mixture-of-Experts Large Language Models" (ACL 2024)'
)

SCORING = (
    'Liu et al., "How to Score Experts for One-Shot MoE Expert Pruning: A Unified Formulation and '
    'Selection Principle" (2026)'
)

BUILT_IN = (
    Criterion(
        "reconstruction",
        "NAEE",
        "change of the routed output, Eq. 3",
        NAEE,
        losses=_reconstruction,
        needs=("logits_TX", "sampled_T", "gram_SP"),
    ),
    Criterion(
        "pairwise",
        "pairwise reconstruction",
        "change of the routed output, were no token rerouted",
        losses=_pairwise,
        needs=("pair_EE",),
        squared=True,
    ),
    Criterion(
        "random",
        "random choice",
        "a seeded draw",
        NAEE,
        score=lambda layer: random_scores(layer.routing.count, layer.index, layer.seed),
        observes=False,
    ),
    Criterion(
        "frequency",
        "frequency",
        "tokens routed to the expert: |T_j|",
        NAEE,
        score=lambda layer: layer.stats["calls_E"].double(),
    ),
    Criterion(
        "gate",
        "gate weight",
        "sum of its combine weights g_j",
        score=lambda layer: layer.stats["gate_E"],
        needs=("gate_E",),
    ),
    Criterion(
        "ean",
        "EAN",
        "expert activation norm: sum of |f_j| over T_j",
        'Jaiswal et al., "Finding Fantastic Experts in MoEs: A Unified Study for Expert Dropping '
        'Strategies and Observations" (2025)',
        score=lambda layer: layer.stats["norm_E"],
        needs=("norm_E",),
    ),
    Criterion(
        "weighted-ean",
        "weighted EAN",
        "sum of g_j |f_j| over T_j, weighted_ean_sum in REAP's released code",
        score=lambda layer: layer.stats["gated_E"],
        needs=("gated_E",),
    ),
    Criterion(
        "man",
        "MAN",
        "mean of |f_j| over T_j",
        SCORING,
        score=lambda layer: mean_over(layer.stats["norm_E"], layer.stats["calls_E"]),
        needs=("norm_E",),
    ),
    Criterion(
        "msan",
        "MSAN",
        "mean of |f_j|^2 over T_j",
        SCORING,
        score=lambda layer: mean_over(layer.stats["square_E"], layer.stats["calls_E"]),
        needs=("square_E",),
    ),
    Criterion(
        "reap",
        "REAP",
        "router-weighted expert activation pruning: mean of g_j |f_j| over T_j",
        'Lasby et al., "REAP the Experts: Why Pruning Prevails for One-Shot MoE Compression" '
        "(2025)",
        score=lambda layer: mean_over(layer.stats["gated_E"], layer.stats["calls_E"]),
        needs=("gated_E",),
    ),
    Criterion(
        "aimer",
        "AIMER",
        "without data: mean |w| over rms(w), pooled over gate, up and down; the highest are cut",
        'Liu et al., "AIMER: Calibration-Free Task-Agnostic MoE Pruning" (2026)',
        score=lambda layer: -layer.stats["spread_E"],
        needs=("spread_E",),
        observes=False,
    ),
)
"""Criteria of this package, in the order in which they are listed. A new one is an entry here."""


CRITERIA = Registry("moesaic.criteria", {}, {c.name: c for c in BUILT_IN})
"""Criteria by name, those of other packages included."""


# --- options -------------------------------------------------------------------------------------


QUICK = "pairwise"
"""Score used where all numbers of experts are compared in every layer: sums over pairs of experts,
since the exact loss would try every set of every size."""
KEPT = (7 / 8, 3 / 4, 1 / 2, 1 / 4, 0)
"""Shares of the experts that `fit` tries to keep before it makes anything else smaller; the last is
the fewest possible."""


@dataclass(frozen=True)
class PruneConfig(MethodConfig):
    """Options of ``prune``. The defaults are those that measure best; see ``bundles``."""

    verb = "prune"
    name = "naee"
    title = "NAEE"
    paper = NAEE
    implementation = "moesaic.methods.prune.method:Pruner"
    variants: ClassVar[Mapping[str, str]] = InWords(CRITERIA, "pruning by {.title}")
    bundles: ClassVar[Mapping[str, Values]] = {
        "best": {},
        "paper": {"score": "reconstruction", "refit": False},
    }

    keep: float = option(
        6,
        "How many experts to keep in each layer: 6, or a share such as 0.75; the mean where "
        "counts may differ.",
    )
    score: str = option(
        "reconstruction", "How to decide which experts to keep.", choices=tuple(CRITERIA)
    )
    progressive: bool = option(
        False,
        "Calibrate each layer on the outputs of the layers already pruned.",
        seldom=True,
    )
    allocate: Literal["uniform", "layers"] = option(
        "uniform",
        "uniform: equally many experts in every layer; layers: more where removal costs more. The "
        "result is then of the class moesaic_<base>.",
        beyond="counts that differ by layer",
    )
    refit: bool | None = option(
        None,
        "Solve for new down projections of the kept experts, nearest to the original's output. "
        "Default: where it can be done, not with stats.",
        beyond="refitted down projections",
    )
    sum_batch_norms: bool = option(
        False,
        "Sum the norms of batches of 16,384 tokens, as the paper's released code does.",
        seldom=True,
    )
    exhaustive_limit: int = option(
        20_000_000,
        "Try every set of experts where sets times tokens are at most this, otherwise search "
        "greedily, with swaps. The default is 70 sets of 8 experts on 285,000 tokens: seconds a "
        "layer.",
        minimum=0,
        seldom=True,
    )
    gram_mb: int = option(
        256,
        "MiB for one layer's inner products of experts' outputs, which score=reconstruction reads; "
        "fewer tokens are sampled where they do not fit.",
        minimum=1,
        seldom=True,
    )
    seed: int = seed_option("Seed of random choice.", seldom=True)

    @classmethod
    def families(cls, model: Shape) -> Iterator[Family[PruneConfig]]:
        if not model.experts:
            return
        counts = range(model.fewest, model.experts + 1, model.groups)
        few = _at_least(counts, [share * model.experts for share in KEPT])
        quick = partial(cls, refit=False, score=QUICK)
        every, first = ([quick(keep=n) for n in of] for of in (counts, few))
        refitted = partial(replace, refit=True, score=cls.score)
        yield Family("prune", every, refitted, [c for c in first if c.keep < model.experts])
        if model.layers > 1 and not model.native:
            total = model.layers * model.experts
            shares = shares_of(total, model.layers * model.fewest, max(1, total // FINEST))
            spread = partial(cls, allocate="layers", score=QUICK, refit=False)
            every = [spread(keep=share * model.experts) for share in shares]
            yield Family("prune spread", every, partial(replace, refit=True), priced=3)

    @property
    def criterion(self) -> Criterion:
        """Criterion named by ``score``."""
        return CRITERIA[self.score]

    @property
    def uniform(self) -> bool:
        """True if every layer keeps the same number of experts."""
        return self.allocate == "uniform"

    @property
    def decides_from_stats(self) -> bool:
        return not self.progressive

    @property
    def credit(self) -> str:
        return self.criterion.paper

    @property
    def base_label(self) -> str:
        return self.criterion.title

    def experts_of(self, count: int, groups: int = 1) -> float:
        """Return how many of ``count`` experts are kept, a multiple of ``groups`` if uniform."""
        if self.keep >= 1:
            return self.keep
        return round(self.keep * count / groups) * groups if self.uniform else self.keep * count

    def check(self) -> None:
        criterion, by = self.criterion, f"score {self.score!r}"
        if self.keep <= 0:
            raise MoesaicError(f"keep {self.keep:g}: give a number of experts, or a share below 1.")
        if self.uniform and self.keep > 1 and self.keep != int(self.keep):
            raise MoesaicError(
                f"keep {self.keep:g} is not a whole number; a mean needs allocate=layers."
            )
        if not self.uniform and not criterion.observes:
            raise MoesaicError(
                f"{by} gives no loss by which layers could be compared; allocate=layers needs "
                "another."
            )
        if not self.uniform and self.progressive:
            raise MoesaicError(
                "progressive decides a layer before the next is seen; allocate=layers needs all."
            )
        if self.progressive and not criterion.observes:
            raise MoesaicError(f"{by} sees no tokens: progressive changes nothing.")


def _at_least(counts: range, wishes: list[float]) -> list[int]:
    """Return for each wish the smallest count that is not below it, in falling order, each once.

    >>> _at_least(range(4, 13, 4), [11, 9, 6, 3])
    [12, 8, 4]
    """
    chosen = {next((n for n in counts if n >= wish), counts[-1]) for wish in wishes}
    return sorted(chosen, reverse=True)
