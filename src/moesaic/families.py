"""Configs of rising size that a method offers to ``fit``, by a model's shape.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")
WIDER = 1.5
"""Largest ratio of widths by which experts are filled up to whole blocks."""
FINEST = 128
"""Number of different shares that are tried where nothing else limits them."""


@dataclass(frozen=True)
class Shape:
    """Numbers of a model that the sizes of its results depend on."""

    layers: int
    """Layers that route; of a dense model all."""
    width: int
    """Neurons of an expert; of a dense model of its narrowest FFN."""
    multiple: int
    """Widths of results are multiples of this, for fast kernels."""
    experts: int = 0
    """Experts in each layer that routes; 0 for a dense model."""
    fewest: int = 0
    """Fewest experts that a router can choose from."""
    groups: int = 1
    """Number of router groups, which keep equally many experts; 1 without groups."""
    top_k: int = 0
    """Experts that a token runs; 0 if the architecture fixes that number."""
    shared: bool = False
    """True if there is a shared path, which all tokens run."""
    uneven: bool = False
    """True if the experts of a layer may differ in width."""
    replaceable: bool = True
    """True if a layer that routes may be condensed or dropped."""
    leaders: int = 0
    """Layers that route and cannot be dropped, since others read their caches."""
    native: bool = False
    """True if results must be of the base's own architecture."""
    blocks: tuple[int, ...] = ()
    """Lengths of the blocks in which a file quantises rows; empty if no file is made."""

    @property
    def wider(self) -> tuple[int, ...]:
        """Block lengths that a little more width makes divide it, the least width first.

        >>> Shape(1, 1408, 32, blocks=(32, 256)).wider, Shape(1, 80, 32, blocks=(32, 256)).wider
        ((256,), (32,))
        """
        wider = {block: -(-self.width // block) * block for block in sorted(self.blocks)}
        return tuple(b for b, width in wider.items() if self.width < width <= WIDER * self.width)

    @property
    def widths(self) -> tuple[float, ...]:
        """Shares of the width at which it is a multiple that suits kernels, rising, and 1.

        >>> Shape(1, 32, 4).widths[:2], Shape(1, 32, 8).widths[:2], len(Shape(1, 1408, 8).widths)
        ((0.125, 0.25), (0.25, 0.5), 22)
        >>> Shape(1, 80, 32).widths
        (0.4, 0.8, 1.0)
        """
        steps = (s for s in (64, 32, 16, 8) if self.multiple <= s <= self.width // 8)
        step = next(steps, self.multiple)
        return (*(n / self.width for n in range(step, self.width, step)), 1.0)


@dataclass(frozen=True, eq=False)
class Family(Generic[C]):
    """Configs of one method that differ only in the size of the result."""

    name: str
    configs: Sequence[C]
    """Configs that are quick to carry out, by rising size of the result."""
    careful: Callable[[C], C]
    """Function that returns a config with refit, whose result has the same size."""
    first: Sequence[C] = ()
    """Configs after each of which another family may use the rest of the budget."""
    priced: int = 8
    """Number of configs whose KL is estimated; that of those between is interpolated."""
    fills: bool = False
    """True if its configs may follow those of another family."""
    removes: bool = True
    """True if all configs but the last, which keeps everything, remove weights."""
    reads_less: bool = False
    """True if all weights are kept and a token uses fewer of them."""


def shares_of(count: int, start: int, step: int = 1) -> tuple[float, ...]:
    """Return shares of a number, rising, from ``start`` of it to all.

    >>> shares_of(8, 4, 2)
    (0.5, 0.75, 1.0)
    """
    return tuple(n / count for n in range(start, count + 1, step))
