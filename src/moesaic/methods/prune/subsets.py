"""Which experts stay: all subsets where they can be counted, else greedy removal and swaps.

A set is a row of booleans (E,), True for an expert that stays. ``losses`` scores many sets at
once: (C, E) to (C,). Groups, where a router has them, are equal runs of neighbouring experts that
lose equally many.
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
"""The share by which a swap must make a set better: more than float32 weights are rounded by."""


class Neighbours:
    """Losses of sets; a subclass may have those of sets that differ in one expert for less.

    Args:
        losses: of any sets: (C, E) to (C,).
    """

    def __init__(self, losses: Losses) -> None:
        self._losses = losses

    def __call__(self, kept_CE: Tensor) -> Tensor:
        return self._losses(kept_CE)

    def without(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        """The losses of the sets that lose one candidate more (C,)."""
        return self(changed(kept_E, candidates, False))

    def having(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        """The losses of the sets that one candidate comes back to (C,)."""
        return self(changed(kept_E, candidates, True))


def neighbours(losses: Losses) -> Neighbours:
    """Losses that can be asked for neighbours of a set."""
    return losses if isinstance(losses, Neighbours) else Neighbours(losses)


@dataclass(frozen=True)
class SearchResult:
    """The best set that a search saw."""

    kept_E: Tensor
    """bool."""
    loss: float
    """As ``losses`` gave it."""
    search: str
    """exhaustive, or greedy+swap."""
    evaluated: int
    """Sets that were scored."""


def subsets(experts: int, keep: int, groups: int = 1) -> int:
    """How many sets there are to choose from."""
    return comb(experts // groups, keep // groups) ** groups


def every_set(experts: int, keep: int, groups: int = 1, block: int = 1024) -> Iterator[Tensor]:
    """All sets in blocks (C, E), in lexicographic order of what they drop.

    >>> [s.int().tolist() for s in every_set(3, 2)]
    [[[0, 1, 1], [1, 0, 1], [1, 1, 0]]]
    """
    size = experts // groups
    runs = [range(g * size, (g + 1) * size) for g in range(groups)]
    choices = product(*(combinations(run, size - keep // groups) for run in runs))
    while dropped := list(islice(choices, block)):
        kept_CE = torch.ones(len(dropped), experts, dtype=torch.bool)
        for row, gone in zip(kept_CE, dropped, strict=True):
            row[list(chain(*gone))] = False
        yield kept_CE


def exhaustive(losses: Losses, experts: int, keep: int, groups: int = 1) -> SearchResult:
    """The best of all sets; of equal ones, the one that drops the lexicographically first."""
    best: tuple[float, Tensor] | None = None
    evaluated = 0
    for kept_CE in every_set(experts, keep, groups):
        loss_C = losses(kept_CE).double().cpu().numpy()
        first = int(loss_C.argmin())  # numpy's is the first of equals
        evaluated += len(kept_CE)
        if best is None or loss_C[first] < best[0]:
            best = (float(loss_C[first]), kept_CE[first])
    assert best is not None
    return SearchResult(best[1], best[0], "exhaustive", evaluated)


def changed(kept_E: Tensor, candidates: Tensor, stays: bool) -> Tensor:
    """The sets in which one candidate more goes, or one comes back and ``stays`` (C, E)."""
    return kept_E.repeat(len(candidates), 1).scatter_(1, candidates[:, None], stays)


def greedy(losses: Losses, kept_E: Tensor, keep: int, groups: int = 1) -> SearchResult:
    """Take out the expert whose loss hurts least, again and again."""
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


def refined(losses: Losses, start: SearchResult, groups: int = 1, rounds: int = 64) -> SearchResult:
    """Put one expert back and take another out, as long as that makes it better."""
    kept_E, loss, evaluated = start.kept_E, start.loss, start.evaluated
    near = neighbours(losses)
    group_E = torch.arange(len(kept_E)) // (len(kept_E) // groups)
    for _ in range(rounds):
        gone = (~kept_E).nonzero().flatten()
        if not len(gone) or not kept_E.any():
            break
        back_CE = changed(kept_E, gone, True)
        order = near.having(kept_E, gone).double().cpu().argsort(stable=True)
        evaluated += len(gone)
        for c in order.tolist():
            others = (kept_E & (group_E == group_E[gone[c]])).nonzero().flatten()
            loss_C = near.without(back_CE[c], others).double().cpu().numpy()
            evaluated += len(others)
            if loss_C.min() < loss * (1 - ENOUGH):
                kept_E, loss = back_CE[c].clone(), float(loss_C.min())
                kept_E[others[int(loss_C.argmin())]] = False
                break
        else:
            break
    exact = float(losses(kept_E[None])[0])  # neighbours are rounded otherwise
    return SearchResult(kept_E, exact, "greedy+swap", evaluated)


def best_scores(score_E: Tensor, keep: int, groups: int = 1) -> Tensor:
    """The set of highest scores, group by group; of equal ones the lower numbers go first.

    >>> best_scores(torch.tensor([1.0, 3.0, 1.0, 2.0]), 2).tolist()
    [False, True, False, True]
    """
    score_GE = score_E.view(groups, -1)
    gone_GE = score_GE.argsort(dim=1, stable=True)[:, : score_GE.shape[1] - keep // groups]
    return torch.ones_like(score_GE, dtype=torch.bool).scatter(1, gone_GE, False).flatten()


# --- counts that differ by layer ------------------------------------------------------------------


def allocate(losses: Mapping[int, Mapping[int, float]], total: float) -> dict[int, int]:
    """Experts for each layer, at most ``total`` in all, of least summed squared loss; exact.

    Where no choice is within ``total``, one of the fewest experts.

    Args:
        losses: by layer and number of experts, relative to the layer's output.
        total: experts of all layers together at most; a fraction of one buys nothing.

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
