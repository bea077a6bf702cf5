"""Fingerprints of the weights and the text that something was made from.

A fingerprint of weights covers all names, shapes and types, and a sample of every tensor's bytes,
so that it takes seconds for a checkpoint of any size. Small tensors are covered whole. Weights on
disk and weights in memory have fingerprints of their own kinds, as transformers gives tensors other
names and shapes when it loads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.io.trust import header_of
from moesaic.types import Model, Values

PIECE = 4096
"""Bytes of one sampled piece."""
MOST, LEAST = 64, 4
"""Sampled pieces of a tensor, at most and at least."""
READS = 16_384
"""Sampled pieces of a checkpoint, unless LEAST of every tensor are more: seconds on a cold disk."""
IN_MEMORY = "memory-"
"""Prefix of a loaded model's fingerprint."""
EXAMPLES = 64
"""Training texts of an endless stream that its fingerprint covers."""


def pieces(nbytes: int, tensors: int) -> list[tuple[int, int]]:
    """Return the sampled byte ranges of a tensor, evenly spread from its first byte to its last.

    Args:
        nbytes: size of the tensor.
        tensors: number of tensors of the checkpoint.

    Returns:
        first byte and the one after the last of each piece; starts are multiples of 64.

    >>> pieces(100, 1), pieces(1 << 20, 5000)[-1]
    ([(0, 100)], (1044480, 1048576))
    """
    count = max(LEAST, min(MOST, READS // max(1, tensors)))
    if nbytes <= count * PIECE:
        return [(0, nbytes)]
    starts = ((nbytes - PIECE) * i // (count - 1) // 64 * 64 for i in range(count))
    return [(start, nbytes if start + 64 > nbytes - PIECE else start + PIECE) for start in starts]


class Stored(NamedTuple):
    """Place of a tensor's bytes in a file."""

    path: Path
    kind: str
    shape: list[int]
    begin: int
    nbytes: int


def stored_in(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, by name.

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
    """Return the fingerprint of stored tensors by name (16 hex digits), however they are divided
    into files."""
    total = hashlib.sha256()
    digests: dict[str, str] = {}
    files: dict[Path, list[str]] = {}
    for name in sorted(stored, key=lambda name: stored[name].begin):
        files.setdefault(stored[name].path, []).append(name)
    for path, names in files.items():
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


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the fingerprint of tensors on any device (16 hex digits); meta ones count by shape."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if not tensor.is_meta and tensor.numel() and type(tensor) in (Tensor, torch.nn.Parameter):
            flat, size = tensor.reshape(-1), tensor.element_size()
            ranges = pieces(flat.numel() * size, len(tensors))
            sample = torch.cat([flat[a // size : -(-b // size)] for a, b in ranges]).cpu()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def of_model(model: Model) -> str:
    """Return the fingerprint of a loaded model's weights, which begins with :data:`IN_MEMORY`."""
    return IN_MEMORY + of_tensors(model.state_dict())


def of_examples(examples: Iterable[Values]) -> str:
    """Return the fingerprint of training texts, given as token ids and labels.

    A stream may have an attribute ``fingerprint``; else its first :data:`EXAMPLES` texts count.
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
