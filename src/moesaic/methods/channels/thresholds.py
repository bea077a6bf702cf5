"""Distributions of scores, and the thresholds that leave a share of them.

Shape suffixes: S samples, I inputs (channels), O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)

_OCTAVES = (-40, 24)
"""Scores below 2 to the first power count as nothing, those above the second as equal."""

BINS = 64
"""Of an octave: a threshold is within a hundredth of what it should be."""


class Scores:
    """Scores of one projection's channels, counted by their logarithm."""

    def __init__(self) -> None:
        low, high = _OCTAVES
        self.counts = torch.zeros((high - low) * BINS, dtype=torch.int64)

    def add(self, score_SI: Tensor) -> None:
        """Count some scores; none is negative."""
        low = _OCTAVES[0]
        bins = (score_SI.float().log2().sub(low).mul(BINS)).floor()
        bins = bins.clamp(0, len(self.counts) - 1).long().flatten().cpu()
        self.counts += torch.bincount(bins, minlength=len(self.counts))

    def threshold(self, share: float) -> float:
        """The score that this share of the channels, in the mean, is above.

        >>> scores = Scores()
        >>> scores.add(torch.tensor([1.0, 2.0, 4.0, 8.0]))
        >>> 2 < scores.threshold(0.5) <= 4, scores.threshold(1.0)
        (True, 0.0)
        """
        if share >= 1:
            return 0.0
        above = self.counts.flip(0).cumsum(0).flip(0)
        target = share * float(above[0])
        place = int((above > target).sum())  # the first bin from which fewer are left
        inside = float(self.counts[max(place - 1, 0)])
        left = float(above[place]) if place < len(above) else 0.0
        part = 1 - (target - left) / inside if inside else 1.0  # of the bin before, gone as well
        exponent = _OCTAVES[0] + (max(place - 1, 0) + part) / BINS
        return 2.0**exponent

    def share(self, threshold: float) -> float:
        """The share of the channels that is above a threshold.

        >>> scores = Scores()
        >>> scores.add(torch.tensor([1.0, 2.0, 4.0, 8.0]))
        >>> scores.share(3.0)
        0.5
        """
        total = float(self.counts.sum())
        if threshold <= 0 or not total:
            return 1.0
        place = (math.log2(threshold) - _OCTAVES[0]) * BINS
        first = min(max(int(place), 0), len(self.counts) - 1)
        part = min(max(place - first, 0.0), 1.0)
        above = float(self.counts[first + 1 :].sum()) + (1 - part) * float(self.counts[first])
        return above / total


def one_threshold(
    scores: Mapping[K, Scores],
    weights: Mapping[K, float],
    prices: Mapping[K, float],
    active: float,
) -> dict[K, float]:
    """Thresholds that take the least loss for what they save, in all projections alike.

    Leaving channel i out loses about s_i^2 / 2 and saves its column, so that s_i^2 over the
    column's length is compared with one number for the whole model.

    Args:
        scores: by projection.
        weights: that a token runs, by projection.
        prices: the length of a column, by projection.
        active: the share of all weights to read.

    Returns:
        the threshold of every projection.
    """
    total = sum(weights.values())
    low, high = float(_OCTAVES[0]), float(_OCTAVES[1])
    for _ in range(50):
        middle = (low + high) / 2
        read = sum(
            weights[name] * scores[name].share(2.0**middle * math.sqrt(prices[name]))
            for name in scores
        )
        if read > active * total:
            low = middle
        else:
            high = middle
    return {name: 2.0**high * math.sqrt(prices[name]) for name in scores}


def shares_for(weights: Mapping[str, float], others: float, active: float) -> float:
    """The share that projections read so that a token reads ``active`` of all that it runs.

    Args:
        weights: that a token runs, of projections that skip.
        others: the same of those that do not.
        active: of all of them; 1 or less.

    >>> round(shares_for({"up": 60.0}, 40.0, 0.7), 9)
    0.5
    """
    skipping = sum(weights.values())
    return 1 - (1 - active) * (skipping + others) / skipping
