"""JSON files and headers of safetensors and GGUF files, checked before they are trusted.

They come from strangers: sizes are limited and types checked before anything is computed from them,
or a library reads them. Nothing here reads a tensor.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from moesaic.errors import MoesaicError, shown
from moesaic.types import JSON, Values, suits

LARGEST = 100_000_000
"""Largest number of bytes of a header or of a JSON file, as in safetensors itself."""
DEEPEST = 64
"""Deepest nesting of lists and mappings."""
DIGITS = 300
"""Largest number of digits of a whole number, so that it can be converted to a float."""
ODD = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, OSError,
    AssertionError, SafetensorError, struct.error,
)  # fmt: skip
"""Exceptions that readers raise over a damaged file, RecursionError included."""
LAYERS, EXPERTS = 1000, 10_000
"""Largest numbers of decoder layers and of experts; the largest known are 126 and 1,024. More are a
mistake, and would take minutes to be found out."""
_COUNTS = (
    (re.compile(r"(layers?|num_blocks|block_count|depth)$"), LAYERS),
    (re.compile(r"experts|expert_(used_)?count$"), EXPERTS),
)


TRUNCATED = "is missing, truncated or corrupt"


@contextmanager
def reading(
    what: object,
    remedy: str = "",
    failure: str = "cannot be read",
    errors: tuple[type[Exception], ...] = ODD,
) -> Iterator[None]:
    """Context in which the exceptions of readers of a damaged file become :class:`MoesaicError`.

    Args:
        what: the file or field that is read, for the message.
        remedy: a sentence that ends the message.
        failure: says what is wrong with the file, before the reason.
        errors: that its readers may raise.

    Raises:
        MoesaicError: gives the reason why the file cannot be read.

    >>> with reading("plan.json"):
    ...     {}["layers"]
    Traceback (most recent call last):
    moesaic.errors.MoesaicError: plan.json cannot be read: it has no 'layers'.
    """
    try:
        yield
    except MoesaicError:
        raise
    except errors as error:
        reason = " ".join(f"{error}".split())[:300].strip(" .") or type(error).__name__
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        if isinstance(error, KeyError):
            reason = f"it has no {reason}"
        end = f" {remedy}" if remedy else ""
        raise MoesaicError(f"{what} {failure}: {reason}.{end}") from error


def parsed(text: str | bytes, where: str) -> Any:
    """Parse JSON from a file.

    Args:
        text: the file's content.
        where: the file, for messages.

    Raises:
        MoesaicError: it is not JSON, is no text, is larger than :data:`LARGEST`, is nested beyond
            :data:`DEEPEST`, or holds a whole number of more than :data:`DIGITS`.

    >>> parsed("[" * 100_000, "a.json")
    Traceback (most recent call last):
    moesaic.errors.MoesaicError: a.json cannot be read: it is nested too deeply.
    """
    with reading(where):
        return _json(text)


def _json(text: str | bytes, **options: Any) -> Any:
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    content = json.loads(text, parse_int=_whole, **options)
    level, depth = [content], 0
    while level := [p for value in level for p in _parts(value) if isinstance(p, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise RecursionError
    return content


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _parts(value: object) -> Iterable[object]:
    """Return the values directly in a list or a mapping; nothing for anything else."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def mapping_of(path: Path) -> JSON:
    """Return the JSON object that a file holds.

    Raises:
        MoesaicError: it cannot be read, or holds something else.
    """
    with reading(path), path.open("rb") as file:
        text = file.read(LARGEST + 1)
    content = parsed(text, str(path))
    if not isinstance(content, dict):
        raise MoesaicError(f"{path} cannot be read: it holds no JSON object.")
    return content


def check_fields(plain: Values, hints: Mapping[str, object]) -> None:
    """Refuse values whose type is not their hint's; missing ones pass.

    Args:
        plain: values by name.
        hints: types by name.

    Raises:
        TypeError: names the first.

    >>> check_fields({"layers": "x"}, {"layers": list[int]})
    Traceback (most recent call last):
    TypeError: layers is 'x'
    """
    for name, hint in hints.items():
        if name in plain and not suits(plain[name], hint):
            raise TypeError(f"{name} is {shown(plain[name])}")


def check_counts(plain: object) -> None:
    """Refuse numbers of layers and of experts that no model has, at any depth of a config.

    Args:
        plain: a config as plain JSON, or a part of one.

    Raises:
        ValueError: names the first.

    >>> check_counts({"text_config": {"num_hidden_layers": 10**9}})
    Traceback (most recent call last):
    ValueError: num_hidden_layers is 1,000,000,000, of 1,000 at most
    """
    for key, value in plain.items() if isinstance(plain, dict) else ():
        for names, most in _COUNTS:
            if type(value) in (int, float) and value > most and names.search(str(key)):
                raise ValueError(f"{key} is {value:,}, of {most:,} at most")
    for part in _parts(plain):
        check_counts(part)


def _once(pairs: list[tuple[str, object]]) -> JSON:
    """Return key-value pairs as a JSON object; ValueError if a key occurs twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(name)} is there twice")
    return mapping


def header_of(path: Path) -> tuple[JSON, int]:
    """Read the header of a safetensors file.

    Returns:
        for every tensor's name its ``dtype``, ``shape`` and ``data_offsets``, counted from the
        second value: the byte at which data begin.

    Raises:
        MoesaicError: the file is missing or truncated, names a tensor twice, or has an entry that
            is not valid.
    """
    with reading(path, failure=TRUNCATED):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            room = path.stat().st_size - 8 - size
            if not 0 < size <= LARGEST or room < 0:
                raise ValueError(f"a header of {size} bytes")
            header = _json(file.read(size), object_pairs_hook=_once)
        check_fields({"the header": header}, {"the header": dict})
        notes = header.pop("__metadata__", None) or {}
        check_fields({"metadata": notes}, {"metadata": dict})
        check_fields(notes, dict.fromkeys(notes, str))
        for name, entry in header.items():
            _check_entry(name, entry, room)
    return header, 8 + size


_ENTRY = {"dtype", "shape", "data_offsets"}


def _check_entry(name: str, entry: object, room: int) -> None:
    """Refuse a tensor's entry in a header if it is not valid.

    Args:
        name: of the tensor.
        entry: its type, shape and offsets.
        room: bytes of all data.

    Raises:
        ValueError: names the tensor.
    """
    if isinstance(entry, dict) and entry.keys() == _ENTRY:
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(kind) is str and _are_counts(shape) and _are_counts(offsets):
            first, *last = offsets or [0]
            if len(last) == 1 and first <= last[0] <= room:
                return
    raise ValueError(f"{shown(name)} is said to be {shown(entry, 200)}")


def _are_counts(value: object) -> bool:
    """Return True if a value is a list of whole numbers, none of them below 0."""
    return type(value) is list and all(type(n) is int and n >= 0 for n in value)


# --- GGUF ----------------------------------------------------------------------------------------

# The format is that of ggml's ``docs/gguf.md``: a magic, a version, numbers of tensors and of
# fields, the fields, and each tensor's description.
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


def check_gguf(path: Path) -> None:
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
