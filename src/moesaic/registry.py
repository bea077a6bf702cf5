"""Tables of names: methods, layer kinds, criteria, architectures, export targets.

An entry is ``"package.module:Name"`` and is imported when it is used, so that reading a table is
cheap. Other packages add entries by Python's own means, an entry point in the group
``moesaic.<table>`` of their metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to objects that are imported when they are first looked up.

    Args:
        group: entry points of this group are added to the entries.
        entries: ``"module:attribute"`` by name. An entry point cannot replace one of them.
        loaded: entries that are at hand.
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
