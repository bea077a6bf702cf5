"""Fingerprints: whose weights, and whose text, something was made from.

A fingerprint of weights covers all names, shapes and types, and a sample of every tensor's bytes,
so that it takes seconds for a checkpoint of any size. Small tensors are covered whole. Weights on
disk and weights in memory have fingerprints of their own kinds, as transformers gives tensors other
names and shapes when it loads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.io.headers import header_of
from moesaic.types import Model, Values

PIECE = 4096
"""Bytes that are read at one place."""
MOST, LEAST = 64, 4
"""Pieces of a tensor."""
READS = 16_384
"""Pieces of a whole checkpoint, where LEAST of every tensor are fewer: seconds on a cold disk."""
IN_MEMORY = "memory-"
"""The start of a live model's fingerprint."""
EXAMPLES = 64
"""Training texts of an endless stream that its fingerprint covers."""


def pieces(nbytes: int, tensors: int) -> list[tuple[int, int]]:
    """The places of a tensor that are looked at, evenly spread from its first byte to its last.

    Args:
        nbytes: its size.
        tensors: tensors of the checkpoint.

    Returns:
        first byte and the byte behind the last one, of each piece; starts are multiples of 64.

    >>> pieces(100, 1), pieces(1 << 20, 5000)[-1]
    ([(0, 100)], (1044480, 1048576))
    """
    count = max(LEAST, min(MOST, READS // max(1, tensors)))
    if nbytes <= count * PIECE:
        return [(0, nbytes)]
    starts = ((nbytes - PIECE) * i // (count - 1) // 64 * 64 for i in range(count))
    return [(start, nbytes if start + 64 > nbytes - PIECE else start + PIECE) for start in starts]


class Stored(NamedTuple):
    """The place of a tensor's bytes in a file."""

    path: Path
    kind: str
    shape: list[int]
    begin: int
    nbytes: int


def stored_in(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name.

    Raises:
        MoesaicError: the file is damaged.
    """
    header, start = header_of(path)
    stored = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        stored[name] = Stored(path, entry["dtype"], entry["shape"], start + begin, end - begin)
    return stored


def of_stored(stored: Mapping[str, Stored]) -> str:
    """The fingerprint of tensors by name, wherever they lie: how they are divided into files does
    not matter."""
    total = hashlib.sha256()
    digests: dict[str, str] = {}
    for path, names in _by_file(stored).items():
        with path.open("rb") as file:
            for name in names:
                digest = hashlib.sha256()
                for first, last in pieces(stored[name].nbytes, len(stored)):
                    file.seek(stored[name].begin + first)
                    digest.update(file.read(last - first))
                digests[name] = digest.hexdigest()
    for name in sorted(stored):
        total.update(
            json.dumps([name, stored[name].kind, stored[name].shape, digests[name]]).encode()
        )
    return total.hexdigest()[:16]


def _by_file(stored: Mapping[str, Stored]) -> dict[Path, list[str]]:
    """Names by file, in the order in which their bytes lie there."""
    files: dict[Path, list[str]] = {}
    for name in sorted(stored, key=lambda name: stored[name].begin):
        files.setdefault(stored[name].path, []).append(name)
    return files


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The fingerprint of tensors in memory, wherever they live; of meta ones, of their shapes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        for sample in _samples(tensor, len(tensors)):
            digest.update(sample)
    return digest.hexdigest()[:16]


def _samples(tensor: Tensor, tensors: int) -> Iterator[bytes]:
    if tensor.is_meta or tensor.numel() == 0 or type(tensor) not in (Tensor, torch.nn.Parameter):
        return
    flat = tensor.reshape(-1)
    size = flat.element_size()
    parts = [flat[a // size : -(-b // size)] for a, b in pieces(flat.numel() * size, tensors)]
    sampled = torch.cat(parts).cpu()
    yield sampled.view(torch.uint8).numpy().tobytes()


def of_model(model: Model) -> str:
    """The fingerprint of a live model's weights."""
    return IN_MEMORY + of_tensors(model.state_dict())


def of_examples(examples: Iterable[Values]) -> str:
    """The fingerprint of training texts as token ids and labels.

    A stream may have one of its own, ``fingerprint``; else it is that of its beginning.
    """
    fingerprint = getattr(examples, "fingerprint", None)
    if fingerprint is not None:
        return str(fingerprint)
    digest = hashlib.sha256()
    sized = hasattr(examples, "__len__")
    for example in examples if sized else islice(examples, EXAMPLES):
        plain = {name: list(map(int, ids)) for name, ids in sorted(example.items())}
        digest.update(json.dumps(plain).encode())
    return digest.hexdigest()[:16]
