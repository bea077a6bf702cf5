"""What a method offers to ``fit``: configs of rising size, told from a model's shape.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

C_co = TypeVar("C_co", covariant=True)
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


@dataclass(frozen=True)
class Rung(Generic[C_co]):
    """A config of a coarse ladder, after which a fine one may fill a budget."""

    name: str
    quick: C_co
    careful: C_co


@dataclass(frozen=True)
class Ladder(Generic[C_co]):
    """Configs of one form, of which one number is open."""

    name: str
    shares: tuple[float, ...]
    """The values of that number, rising: the larger, the larger the result."""
    quick: Callable[[float], C_co]
    """The config that is quick to carry out."""
    careful: Callable[[float], C_co] | None = None
    """Of the same size, made with more care."""
    rungs: Sequence[Rung[C_co]] = ()
    """A few of its configs, to be followed by a ladder that fills."""
    fills: bool = False
    """It may follow a rung of another method; of several such ladders the last one does."""
    reads_less: bool = False
    """All weights stay; a token uses fewer of them."""


def shares_of(count: int, start: int, step: int = 1) -> tuple[float, ...]:
    """Shares of a number, rising, from ``start`` of it to all.

    >>> shares_of(8, 4, 2)
    (0.5, 0.75, 1.0)
    """
    return tuple(n / count for n in range(start, count + 1, step))
