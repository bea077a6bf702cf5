"""What files say before they are trusted: JSON, and the headers of safetensors files.

Both come from strangers. Nothing here reads a tensor.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from moesaic.errors import MoesaicError
from moesaic.foreign import JSON

LARGEST = 100_000_000
"""Bytes of a header at most, as in safetensors itself."""


def parsed(text: str | bytes, where: str) -> Any:
    """JSON from a file.

    Args:
        text: the file's content.
        where: the file, for messages.

    Raises:
        MoesaicError: it is not JSON, is nested too deeply, or is no text.

    >>> parsed("[" * 100_000, "a.json")
    Traceback (most recent call last):
    moesaic.errors.MoesaicError: a.json cannot be read: it is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise MoesaicError(f"{where} cannot be read: it is nested too deeply.") from None
    except ValueError as error:
        raise MoesaicError(f"{where} cannot be read: {error}.") from error


def mapping_of(path: Path) -> JSON:
    """The JSON object that a file holds.

    Raises:
        MoesaicError: it cannot be read, or holds something else.
    """
    try:
        content = parsed(path.read_bytes(), str(path))
    except OSError as error:
        raise MoesaicError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise MoesaicError(f"{path} cannot be read: it holds no JSON object.")
    return content


def _once(pairs: list[tuple[str, object]]) -> JSON:
    """A JSON object whose keys are all different."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in mapping if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return mapping


def header_of(path: Path) -> tuple[JSON, int]:
    """The header of a safetensors file.

    Returns:
        for every tensor's name its ``dtype``, ``shape`` and ``data_offsets``, counted from the
        second value: the byte at which data begin.

    Raises:
        MoesaicError: the file is missing, truncated, or names a tensor twice.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if not 0 < size <= min(LARGEST, path.stat().st_size - 8):
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size), object_pairs_hook=_once)
        header.pop("__metadata__", None)
    except (OSError, ValueError, AttributeError, struct.error, RecursionError) as error:
        raise MoesaicError(f"{path} is missing, truncated or corrupt: {error}") from error
    return header, 8 + size
