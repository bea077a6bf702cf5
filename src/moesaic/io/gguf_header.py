"""Headers of GGUF files, checked against limits before any library reads them.

The format is that of ggml's ``docs/gguf.md``: a magic, a version, numbers of tensors and of fields,
the fields, and each tensor's description. Nothing here reads a tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

from moesaic.errors import shown
from moesaic.io.headers import check_counts

MOST = {"fields": 10_000, "tensors": 200_000, "values": 4_000_000, "dimensions": 8}
"""Limits of a header: the largest vocabularies have 300,000 tokens, as many merges, scores and
types."""
NAME, WORD, TEXT = 1000, 4096, 1 << 24
"""Largest numbers of bytes of a name, of a string in a list, and of any other string."""
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Codes of :mod:`struct` by the types of fields that are numbers."""
STRING, LIST = 8, 9


class _Reader:
    """Reader of a header that checks every size first."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left = file, size
        self.order = "<"

    def take(self, count: int) -> bytes:
        """Return the next bytes; raises ValueError if the file ends before."""
        self.left -= count
        if self.left < 0:
            raise ValueError("it ends within its header")
        return self.file.read(count)

    def number(self, kind: str) -> float:
        """Return the next number of a :mod:`struct` type."""
        (value,) = struct.unpack(self.order + kind, self.take(struct.calcsize(f"={kind}")))
        return value

    def count(self, what: str, most: int, kind: str = "Q") -> int:
        """Return the next number; raises ValueError if it is above ``most``."""
        count = int(self.number(kind))
        if count > most:
            raise ValueError(f"{count:,} {what}, of {most:,} at most")
        return count

    def text(self, most: int) -> bytes:
        """Return the next string, of at most ``most`` bytes."""
        return self.take(self.count("bytes of text", most))


def check_header(path: Path) -> None:
    """Refuse a header that asks for more than any model has; ValueError names the value and its
    limit."""
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        if reader.take(4) != b"GGUF":
            raise ValueError("it does not begin as GGUF does")
        version = reader.take(4)
        if version[0] == 0:  # the other order of bytes
            reader.order = ">"
        tensors = reader.count("tensors", MOST["tensors"])
        fields = reader.count("fields", MOST["fields"])
        for key, number in _numbers(reader, fields):
            check_counts({key: number})
        for _ in range(tensors):
            name = reader.text(NAME)
            dimensions = reader.count("dimensions", MOST["dimensions"], "I")
            shape = [reader.number("Q") for _ in range(dimensions)]
            reader.number("I"), reader.number("Q")
            if prod(shape) >= 2**62:
                raise ValueError(f"{shown(name)} is of shape {shown(shape)}")


def _numbers(reader: _Reader, fields: int) -> Iterator[tuple[str, float]]:
    """Yield the fields that are numbers, with the last part of their names."""
    values = 0
    for _ in range(fields):
        name = reader.text(NAME).decode("utf-8", "replace")
        kind = int(reader.number("I"))
        if kind in NUMBERS:
            yield name.rpartition(".")[2], reader.number(NUMBERS[kind])
        elif kind == STRING:
            reader.text(TEXT)
        elif kind == LIST:
            kind = int(reader.number("I"))
            count = reader.count("values", MOST["values"] - values)
            values += count
            if kind == STRING:
                for _ in range(count):
                    reader.text(WORD)
            elif kind in NUMBERS:
                reader.take(count * struct.calcsize(f"={NUMBERS[kind]}"))
            else:
                raise ValueError(f"{shown(name)} is a list of type {kind}")
        else:
            raise ValueError(f"{shown(name)} is of type {kind}")
