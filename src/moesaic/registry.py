"""Tables of names (methods, layer kinds, criteria, architectures), and classes made at run time.

An entry of a table is ``"package.module:Name"`` and is imported when it is used, so that reading a
table is cheap. Other packages add entries by Python's own means, an entry point in the group
``moesaic.<table>`` of their metadata.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, wraps
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Mapping from names to objects that are imported when they are first looked up.

    Args:
        group: entry points of this group are added to the entries.
        entries: ``"module:attribute"`` by name. An entry point cannot replace one of them.
        loaded: objects by name that need no import.
    """

    def __init__(
        self, group: str, entries: Mapping[str, str], loaded: Mapping[str, T] | None = None
    ) -> None:
        self.group = group
        self._loaded = dict(loaded or {})
        self._entries = {**entries, **dict.fromkeys(self._loaded, "")}

    @cached_property
    def _where(self) -> dict[str, str]:
        added = {e.name: e.value for e in entry_points(group=self.group)}
        return {**self._entries, **added, **self._entries}  # in this order, ours as they are

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self._loaded[name] = cast(T, resolve_name(self._where[name]))
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


class InWords(Mapping[str, str]):
    """Mapping from a table's names to words about its entries, each looked up when it is used.

    Args:
        table: the entries by name.
        words: with a place for an entry: ``pruning by {.title}``.
    """

    def __init__(self, table: Mapping[str, object], words: str) -> None:
        self._table, self._words = table, words

    def __getitem__(self, name: str) -> str:
        return self._words.format(self._table[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


# --- classes made at run time that can be pickled ------------------------------------------------


C = TypeVar("C", bound=Callable[..., type])


class Dynamic(type):
    """Metaclass of the classes that a function decorated with :func:`remade` returns."""


def remade(make: C) -> C:
    """Decorate a module's function that returns a :class:`Dynamic` class.

    Equal arguments return the same class. Pickling it, or one of its instances, keeps the function
    and its arguments, from which another process makes the class again.
    """

    @wraps(make)
    @cache
    def made(*arguments: object) -> type:
        kind = make(*arguments)
        kind._remade = made, arguments  # type: ignore[attr-defined]
        return kind

    return made  # type: ignore[return-value]


def _reduced(kind: type) -> str | tuple[object, ...]:
    """Return the pickled form of a class: a call, or its name if it is a subclass that has one."""
    return vars(kind).get("_remade", kind.__qualname__)


copyreg.pickle(Dynamic, _reduced)  # type: ignore[arg-type]
