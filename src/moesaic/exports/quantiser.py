"""llama.cpp's own quantiser, and what the tensors of GGUF files are."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moesaic.config import by_text
from moesaic.errors import MoesaicError
from moesaic.metrics.llamacpp import library

ALIGNED = 32
"""Tensors begin at multiples of so many bytes."""
NARROW = "q2_k"
"""The narrowest type that needs no text to round by."""
OTHERS = "q8_0"
"""The type of tensors of which none is said, where it is said of some."""


@dataclass(frozen=True)
class Rounded:
    """A tensor of a file."""

    type: str
    bytes: int
    """With what fills it up to the place of the next one."""
    weights: int


def quantise(
    file: Path,
    out: Path,
    type: str,
    weights: Mapping[str, Tensor],
    chosen: Mapping[str, str] | None = None,
) -> None:
    """Run llama.cpp's quantiser on a GGUF file in f32.

    Args:
        file: what is read.
        out: what is written.
        type: llama.cpp's name of a type of files.
        weights: of :func:`moesaic.exports.importance.importance`; of tensors that are not in it
            all inputs weigh the same.
        chosen: types of single tensors, by their names. A row that a type's blocks do not divide
            gets the next wider type that has shorter ones; a tensor without a weight for its inputs
            no type that rounds by them, but the narrowest of the others.

    Raises:
        MoesaicError: it refuses the file.
    """
    from gguf import GGMLQuantizationType

    llama = library()
    asked = llama.llama_model_quantize_default_params()
    kept = [(name.encode(), mean_I.numpy()) for name, mean_I in weights.items()]
    entries = (llama.llama_model_imatrix_data * (len(kept) + 1))()  # the last one ends it
    for entry, (name, mean_I) in zip(entries, kept, strict=False):
        entry.name, entry.size = name, mean_I.size
        entry.data = mean_I.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if kept:
        asked.imatrix = entries
    told = [
        (
            f"^{re.escape(name)}$".encode(),
            NARROW if by_text(wanted) and name not in weights else wanted,
        )
        for name, wanted in (chosen or {}).items()
    ]
    single = (llama.llama_model_tensor_override * (len(told) + 1))()
    for one, (pattern, name_of) in zip(single, told, strict=False):
        one.pattern, one.type = pattern, GGMLQuantizationType[name_of.upper()]
    if told:
        asked.tt_overrides = single
    asked.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{type.upper()}")
    if (
        llama.llama_model_quantize(bytes(file), bytes(out), ctypes.byref(asked))
        or not out.is_file()
    ):
        raise MoesaicError(f"llama.cpp's quantiser refused {type} for this model.")


def tensors_of(file: Path) -> dict[str, Rounded]:
    """The tensors of a GGUF file, by name."""
    from gguf import GGUFReader

    return {
        tensor.name: Rounded(
            tensor.tensor_type.name.lower(),
            -(-int(tensor.n_bytes) // ALIGNED) * ALIGNED,
            int(tensor.n_elements),
        )
        for tensor in GGUFReader(file).tensors
    }


def types_of(file: Path) -> dict[str, int]:
    """How many weights of a GGUF file are in each of llama.cpp's types, the most first."""
    counts: Counter[str] = Counter()
    for tensor in tensors_of(file).values():
        counts[tensor.type] += tensor.weights
    return dict(counts.most_common())
