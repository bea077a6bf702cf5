"""Progress of long jobs: the library is silent, the command line draws bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Figures(dict[str, float]):
    """An item that tells figures, of which curves are drawn as the items pass."""


class Track(Protocol):
    """Wraps an iterable so that passing through it is shown."""

    def __call__(self, items: Iterable[T], label: str, total: int | None = None) -> Iterable[T]: ...


def silent(items: Iterable[T], label: str, total: int | None = None) -> Iterable[T]:
    """Show nothing."""
    return items
