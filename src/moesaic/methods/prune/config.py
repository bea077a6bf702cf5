"""Options of ``prune``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option, seed_option
from moesaic.errors import MoesaicError
from moesaic.families import FINEST, Family, Shape, shares_of
from moesaic.methods.prune.criteria import CRITERIA, NAEE, Criterion
from moesaic.registry import InWords
from moesaic.types import Values

QUICK = "pairwise"
"""Score used where all numbers of experts are compared in every layer: sums over pairs of experts,
since the exact loss would try every set of every size."""
KEPT = (7 / 8, 3 / 4, 1 / 2)
"""Shares of the experts that `fit` tries to keep before it makes anything else smaller."""


@dataclass(frozen=True)
class PruneConfig(MethodConfig):
    """Options of ``prune``. The defaults are those that measure best; see ``bundles``."""

    verb = "prune"
    name = "naee"
    title = "NAEE"
    paper = NAEE
    implementation = "moesaic.methods.prune.pruning:Pruner"
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
        "Each layer sees the tokens as the layers pruned before it pass them on.",
        seldom=True,
    )
    allocate: Literal["uniform", "layers"] = option(
        "uniform",
        "uniform: equally many experts in every layer; layers: more where removal costs more. The "
        "result is then of the class moesaic_<base>.",
        beyond="counts that differ by layer",
    )
    padding: bool = option(
        False,
        "Fill unequal counts up with experts that are never chosen, so that the result is of the "
        "architecture's own class.",
        seldom=True,
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
        "All sets of experts are tried where sets times tokens are at most so many: 70 sets of 8 "
        "experts on 285,000 tokens. Seconds a layer.",
        minimum=0,
        seldom=True,
    )
    gram_mb: int = option(
        256, "MiB for one layer's Gram matrices, of reconstruction.", minimum=1, seldom=True
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
    def chosen(self) -> Criterion:
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
        return self.chosen.paper

    @property
    def base_label(self) -> str:
        return self.chosen.title

    def experts_of(self, count: int, groups: int = 1) -> float:
        """Return how many of ``count`` experts are kept, a multiple of ``groups`` if uniform."""
        if self.keep >= 1:
            return self.keep
        return round(self.keep * count / groups) * groups if self.uniform else self.keep * count

    def check(self) -> None:
        criterion, by = self.chosen, f"score {self.score!r}"
        if self.keep <= 0:
            raise MoesaicError(f"keep {self.keep:g}: give a number of experts, or a share below 1.")
        if self.uniform and self.keep > 1 and self.keep != int(self.keep):
            raise MoesaicError(
                f"keep {self.keep:g} is not a whole number; a mean needs allocate=layers."
            )
        if self.padding and self.uniform:
            raise MoesaicError("padding fills unequal counts up: it needs allocate=layers.")
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
