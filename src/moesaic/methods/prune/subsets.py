"""Search for the best set of experts: all subsets if they are few, else greedy removal and swaps.

A set is a row of booleans (E,), True for a kept expert. ``losses`` scores many sets at once: (C, E)
to (C,). Router groups are equal runs of neighbouring experts; each keeps the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations, islice, product
from math import comb

import torch
from torch import Tensor

Losses = Callable[[Tensor], Tensor]

ENOUGH = 1e-7
"""Relative improvement that a swap must bring, above the rounding error of float32 weights."""


class Neighbours:
    """Losses of sets; subclasses may compute those of sets that differ in one expert faster.

    Args:
        losses: function from any sets (C, E) to their losses (C,).
    """

    def __init__(self, losses: Losses) -> None:
        self._losses = losses

    def __call__(self, kept_CE: Tensor) -> Tensor:
        return self._losses(kept_CE)

    def without(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        """Return the losses of the sets without one more candidate (C,)."""
        return self(_neighbour_sets(kept_E, candidates, False))

    def having(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        """Return the losses of the sets with one candidate restored (C,)."""
        return self(_neighbour_sets(kept_E, candidates, True))


def neighbours(losses: Losses) -> Neighbours:
    """Wrap a loss function as :class:`Neighbours`, unless it is one."""
    return losses if isinstance(losses, Neighbours) else Neighbours(losses)


@dataclass(frozen=True)
class SearchResult:
    """Best set that a search found."""

    kept_E: Tensor
    """Kept experts, bool."""
    loss: float
    """Loss of the set, as ``losses`` returned it."""
    search: str
    """Name of the search: exhaustive, or greedy+swap."""
    evaluated: int
    """Number of sets that were scored."""


def subsets(experts: int, keep: int, groups: int = 1) -> int:
    """Return the number of sets to choose from."""
    return comb(experts // groups, keep // groups) ** groups


def every_set(experts: int, keep: int, groups: int = 1, block: int = 1024) -> Iterator[Tensor]:
    """Yield all sets in blocks (C, E), in lexicographic order of the dropped experts.

    >>> [s.int().tolist() for s in every_set(3, 2)]
    [[[0, 1, 1], [1, 0, 1], [1, 1, 0]]]
    """
    size = experts // groups
    runs = [range(g * size, (g + 1) * size) for g in range(groups)]
    choices = product(*(combinations(run, size - keep // groups) for run in runs))
    while dropped := list(islice(choices, block)):
        kept_CE = torch.ones(len(dropped), experts, dtype=torch.bool)
        for row, removed in zip(kept_CE, dropped, strict=True):
            row[list(chain(*removed))] = False
        yield kept_CE


def exhaustive(losses: Losses, experts: int, keep: int, groups: int = 1) -> SearchResult:
    """Return the best of all sets; of equal ones, that of lexicographically first dropped
    experts."""
    best: tuple[float, Tensor] | None = None
    evaluated = 0
    for kept_CE in every_set(experts, keep, groups):
        loss_C = losses(kept_CE).double().cpu().numpy()
        first = int(loss_C.argmin())  # numpy's argmin takes the first of equals
        evaluated += len(kept_CE)
        if best is None or loss_C[first] < best[0]:
            best = (float(loss_C[first]), kept_CE[first])
    assert best is not None
    return SearchResult(best[1], best[0], "exhaustive", evaluated)


def _neighbour_sets(kept_E: Tensor, candidates: Tensor, restored: bool) -> Tensor:
    """Return the sets with one more candidate removed, or ``restored`` (C, E)."""
    return kept_E.repeat(len(candidates), 1).scatter_(1, candidates[:, None], restored)


def greedy(losses: Losses, kept_E: Tensor, keep: int, groups: int = 1) -> SearchResult:
    """Remove one expert at a time, always the one that leaves the lowest loss."""
    kept_E, evaluated, loss = kept_E.clone(), 0, 0.0
    near = neighbours(losses)
    size = len(kept_E) // groups
    while int(kept_E.sum()) > keep:
        surplus_G = kept_E.view(groups, size).sum(1) > keep // groups
        candidates = (kept_E & surplus_G.repeat_interleave(size)).nonzero().flatten()
        loss_C = near.without(kept_E, candidates).double().cpu().numpy()
        evaluated += len(candidates)
        kept_E, loss = kept_E.clone(), float(loss_C.min())
        kept_E[candidates[int(loss_C.argmin())]] = False
    if not evaluated:
        loss, evaluated = float(losses(kept_E[None])[0]), 1
    return SearchResult(kept_E, loss, "greedy", evaluated)


def swap(losses: Losses, start: SearchResult, groups: int = 1, rounds: int = 64) -> SearchResult:
    """Restore one expert and remove another, as long as that lowers the loss."""
    kept_E, loss, evaluated = start.kept_E, start.loss, start.evaluated
    near = neighbours(losses)
    group_E = torch.arange(len(kept_E)) // (len(kept_E) // groups)
    for _ in range(rounds):
        removed = (~kept_E).nonzero().flatten()
        if not len(removed) or not kept_E.any():
            break
        back_CE = _neighbour_sets(kept_E, removed, True)
        order = near.having(kept_E, removed).double().cpu().argsort(stable=True)
        evaluated += len(removed)
        for c in order.tolist():
            others = (kept_E & (group_E == group_E[removed[c]])).nonzero().flatten()
            loss_C = near.without(back_CE[c], others).double().cpu().numpy()
            evaluated += len(others)
            if loss_C.min() < loss * (1 - ENOUGH):
                kept_E, loss = back_CE[c].clone(), float(loss_C.min())
                kept_E[others[int(loss_C.argmin())]] = False
                break
        else:
            break
    exact = float(losses(kept_E[None])[0])  # losses of neighbours differ in the last bits
    return SearchResult(kept_E, exact, "greedy+swap", evaluated)


def best_scores(score_E: Tensor, keep: int, groups: int = 1) -> Tensor:
    """Return the set of highest scores, by group; of equal ones the lower indices are removed
    first.

    >>> best_scores(torch.tensor([1.0, 3.0, 1.0, 2.0]), 2).tolist()
    [False, True, False, True]
    """
    score_GE = score_E.view(groups, -1)
    removed_GE = score_GE.argsort(dim=1, stable=True)[:, : score_GE.shape[1] - keep // groups]
    return torch.ones_like(score_GE, dtype=torch.bool).scatter(1, removed_GE, False).flatten()


# --- counts that differ by layer -----------------------------------------------------------------


def allocate(losses: Mapping[int, Mapping[int, float]], total: float) -> dict[int, int]:
    """Return the number of experts of each layer, at most ``total`` in all, that minimises the
    summed squared loss.

    The result is exact. If no choice is within ``total``, it has the fewest experts.

    Args:
        losses: relative losses by layer and number of experts.
        total: most experts of all layers together; fractions are rounded down.

    >>> allocate({0: {1: 0.9, 2: 0.1, 3: 0.0}, 1: {1: 0.2, 2: 0.1, 3: 0.0}}, 3)
    {0: 2, 1: 1}
    >>> allocate({0: {1: 0.9, 2: 0.1}}, 1.5)
    {0: 1}
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for options in losses.values():
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for spent, (loss, counts) in best.items():
            for count, more in options.items():
                option = (loss + more**2, (*counts, count))
                if spent + count not in extended or option < extended[spent + count]:
                    extended[spent + count] = option
        best = extended
    reach = max((spent for spent in best if spent <= total + 1e-9), default=min(best))
    return dict(zip(losses, best[reach][1], strict=True))
