"""Configs of rising size that a method offers to ``fit``, by a model's shape.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")
FINEST = 128
"""Shares that are told apart where nothing else limits them."""


@dataclass(frozen=True)
class Shape:
    """A model as far as sizes of results follow from it."""

    layers: int
    """Layers that route; of a dense model all."""
    width: int
    """Neurons of an expert; of a dense model of its narrowest FFN."""
    multiple: int
    """Widths that kernels like are a multiple of it, at least."""
    experts: int = 0
    """In each layer that routes; 0 of a dense model."""
    fewest: int = 0
    """Experts that a router can do with."""
    groups: int = 1
    """Experts go by so many."""
    top_k: int = 0
    """Experts that a token runs; 0 where no other number can be had."""
    shared: bool = False
    """There are experts that all tokens run."""
    uneven: bool = False
    """The experts of a layer may differ in width."""
    replaceable: bool = True
    """A layer that routes may become another one, or none."""
    leaders: int = 0
    """Layers that route and cannot be dropped whole."""
    native: bool = False
    """Results must be of the base's own architecture."""

    @property
    def widths(self) -> tuple[float, ...]:
        """The shares of a width that kernels like, rising.

        >>> Shape(1, 32, 4).widths[:2], Shape(1, 32, 8).widths[:2], len(Shape(1, 1408, 8).widths)
        ((0.125, 0.25), (0.25, 0.5), 22)
        """
        steps = (s for s in (64, 32, 16, 8) if self.multiple <= s <= self.width // 8)
        step = next(steps, self.multiple)
        return tuple(n / self.width for n in range(step, self.width + 1, step))


@dataclass(frozen=True, eq=False)
class Family(Generic[C]):
    """Configs of one method that differ in the size of the result alone."""

    name: str
    configs: Sequence[C]
    """Quick to carry out; the size of the result rises."""
    careful: Callable[[C], C]
    """Makes of a config the one whose result is as large, made with more care."""
    first: Sequence[C] = ()
    """A few of them, after each of which another family may fill a budget."""
    priced: int = 8
    """How many of them are priced; the KL of those between is interpolated."""
    fills: bool = False
    """True if it may follow another method; of several such families the last one does."""
    reads_less: bool = False
    """All weights are kept; a token uses fewer of them."""


def shares_of(count: int, start: int, step: int = 1) -> tuple[float, ...]:
    """Shares of a number, rising, from ``start`` of it to all.

    >>> shares_of(8, 4, 2)
    (0.5, 0.75, 1.0)
    """
    return tuple(n / count for n in range(start, count + 1, step))
