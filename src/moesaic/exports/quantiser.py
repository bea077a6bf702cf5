"""GGUF files quantised row by row by ggml's own quantiser, and types of their tensors."""

from __future__ import annotations

import ctypes
import math
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.config import by_text
from moesaic.errors import MoesaicError
from moesaic.exports.file_types import Model, is_quantised, mixture, order
from moesaic.metrics.gguf_engine import library

if TYPE_CHECKING:
    from gguf import GGUFReader

ALIGNED = 32
"""Alignment of tensors in bytes."""
NARROW = "q2_k"
"""Narrowest type that needs no importance weights."""
ROWS = 128
"""Number of rows of a matrix that one thread quantises at a time."""
OTHERS = "q8_0"
"""Type of tensors that are not named where types of single tensors are given."""
OWN = ("general.architecture", "general.quantization_version", "general.file_type")
"""Keys for which a quantised file has values of its own."""
Held: TypeAlias = "npt.NDArray[np.uint8]"
"""Stored bytes of rows."""
FALLBACK = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Types that llama.cpp uses if blocks of 256 do not divide a row; for iq types ``IQ_FALLBACK``."""
IQ_FALLBACK, WHOLE = "iq4_nl", "f32"


@dataclass(frozen=True)
class Rounded:
    """Type and shape of a tensor in a GGUF file."""

    type: str
    shape: tuple[int, ...]
    """Shape, the length of a row first."""

    @property
    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes in the file, including padding up to the next tensor."""
        block, size = _block(self.type)
        return -(-(self.numel // block * size) // ALIGNED) * ALIGNED

    def as_type(self, type: str, weighed: bool) -> Rounded:
        """Return the tensor after a file is quantised to a type.

        Args:
            type: of tensors.
            weighed: its inputs have importance weights.
        """
        if self.type == WHOLE:  # norms, routers
            return self
        return self.rounded(NARROW if by_text(type) and not weighed else type)

    def rounded(self, type: str) -> Rounded:
        """Return the tensor in a type, or in the next one whose blocks divide its rows."""
        if self.shape[0] % _block(type)[0]:
            type = FALLBACK.get(type, IQ_FALLBACK if type.startswith("iq") else type)
        return replace(self, type="f16" if self.shape[0] % _block(type)[0] else type)


def held_rows(matrix: Tensor, type: str, weights: Tensor | None = None) -> Held:
    """Quantise a matrix by ggml's own quantiser; return the bytes, row by row.

    Args:
        matrix: rows (R, I), or several matrices (E, R, I).
        type: of tensors; its blocks must divide the rows.
        weights: importance of the inputs (I), or of each matrix's (E, I); by default equal.

    Raises:
        MoesaicError: values are not finite.
    """
    from gguf import GGMLQuantizationType

    ggml, number = library()[1], ctypes.c_int(GGMLQuantizationType[type.upper()].value)
    chunk = ggml.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    if not matrix.isfinite().all():
        raise MoesaicError(f"{type} cannot hold these weights: some are not finite.")
    floats = ctypes.POINTER(ctypes.c_float)
    block, size = _block(type)
    source_ERI = matrix.detach().float().contiguous().view(-1, *matrix.shape[-2:]).numpy()
    mean_EI = None if weights is None else weights.float().contiguous().numpy()
    experts, rows, inputs = source_ERI.shape
    held = np.zeros((experts, rows, inputs // block * size), np.uint8)

    def hold(place: tuple[int, int]) -> None:
        expert, start = place
        mean_I = None if mean_EI is None else mean_EI.reshape(-1, inputs)[expert]
        chunk(
            number,
            source_ERI[expert].ctypes.data_as(floats),
            held[expert].ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(start * inputs),
            ctypes.c_int64(min(ROWS, rows - start)),
            ctypes.c_int64(inputs),
            None if mean_I is None else mean_I.ctypes.data_as(floats),
        )

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        places = product(range(experts), range(0, rows, ROWS))
        list(threads.map(hold, places))  # raises what one of them raised
    return held.reshape(experts * rows, -1)


def values_of(held: Held, type: str) -> Tensor:
    """Dequantise the stored bytes of rows to float32."""
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(held, GGMLQuantizationType[type.upper()]))


def bits(type: str) -> float:
    """Return the bits of a weight in a type of tensors.

    >>> bits("q8_0"), bits("iq1_s")
    (8.5, 1.5625)
    """
    block, size = _block(type)
    return 8 * size / block


def _block(type: str) -> tuple[int, int]:
    """Return the number of weights of a block, and its bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes: tuple[int, int] = GGML_QUANT_SIZES[GGMLQuantizationType[type.upper()]]
    return sizes


def quantise(
    reader: GGUFReader,
    out: Path,
    type: str,
    weights: Mapping[str, Tensor],
    chosen: Mapping[str, str] | None = None,
    values: bool = True,
) -> dict[str, Rounded]:
    """Quantise the matrices of a GGUF file in f32 or bf16, as llama.cpp's quantiser does.

    One of them is in memory at a time; other tensors are written in f32.

    Args:
        reader: of the file. To make one takes seconds for a large vocabulary.
        out: the file to write.
        type: llama.cpp's name of a type of files.
        weights: of :func:`moesaic.exports.importance.importance`; inputs of tensors that are not
            in it weigh the same.
        chosen: types of single tensors, by their names. A row that a type's blocks do not divide
            gets the next wider type with shorter blocks; a tensor without importance weights, of
            the types that need none, at least the narrowest.
        values: write them; False leaves a hole of their size, which takes no room on a disk.

    Returns:
        the tensors written, by name.

    Raises:
        MoesaicError: a type needs importance weights that a tensor does not have.
    """
    from gguf import (
        GGML_QUANT_VERSION,
        GGMLQuantizationType,
        GGUFValueType,
        GGUFWriter,
        LlamaFileType,
    )

    fields = {name: field for name, field in reader.fields.items() if field.types}
    given = {tensor.name: tensor for tensor in sorted(reader.tensors, key=lambda t: order(t.name))}
    shapes = {name: tuple(map(int, tensor.shape)) for name, tensor in given.items()}
    arch = str(fields["general.architecture"].contents())
    rows = {name: shape[0] for name, shape in shapes.items() if is_quantised(name, shape)}
    whole = type == WHOLE
    wanted = {} if whole else mixture(rows, type, _model(fields, arch), bool(weights))
    wanted |= {
        name: NARROW if by_text(kind) and name not in weights else kind
        for name, kind in (chosen or {}).items()
        if name in rows
    }
    types = {n: Rounded(WHOLE, shapes[n]).rounded(kind).type for n, kind in wanted.items()}
    for name, kind in types.items():
        if by_text(kind) and kind != "iq3_s" and name not in weights:
            raise MoesaicError(f"{type} rounds {name} by its inputs, which are not known.")
    writer = GGUFWriter(out, arch)
    for name, field in fields.items():
        if name not in OWN and not name.startswith("GGUF."):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_file_type(LlamaFileType["ALL_F32" if whole else f"MOSTLY_{type.upper()}"])
    for name in given:
        kind = types.setdefault(name, WHOLE)
        block, size = _block(kind)
        shape = *shapes[name][:0:-1], shapes[name][0] // block * size
        number = GGMLQuantizationType[kind.upper()]
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file = reader.data.filename  # read, not mapped: mapped pages count as memory
    for name, tensor in given.items() if values else ():
        held = np.fromfile(file, np.uint8, tensor.n_bytes, offset=tensor.data_offset)
        held = held.reshape(*shapes[name][:0:-1], -1)
        matrix = values_of(held, tensor.tensor_type.name).view(shapes[name][::-1])
        if types[name] == WHOLE:
            writer.write_tensor_data(matrix.numpy())
        else:
            writer.write_tensor_data(held_rows(matrix, types[name], weights.get(name)))
    writer.close()
    written = {name: Rounded(types[name], shapes[name]) for name in given}
    if not values:
        start = -(-out.stat().st_size // ALIGNED) * ALIGNED
        os.truncate(out, start + sum(tensor.bytes for tensor in written.values()))
    return written


def _model(fields: Mapping[str, Any], arch: str) -> Model:
    """Return the numbers of a file's model that determine types; of lists by layer the first."""

    def number(key: str, default: int = 0) -> int:
        found = fields[f"{arch}.{key}"].contents() if f"{arch}.{key}" in fields else default
        return int(found[0] if isinstance(found, list) else found)

    heads = number("attention.head_count")
    key_heads = number("attention.head_count_kv", heads)
    return Model(arch, number("block_count"), number("expert_count"), heads, key_heads)


def tensors_of(file: Path) -> dict[str, Rounded]:
    """Return the tensors of a GGUF file, by name."""
    from gguf import GGUFReader

    return {
        tensor.name: Rounded(tensor.tensor_type.name.lower(), tuple(map(int, tensor.shape)))
        for tensor in GGUFReader(file).tensors
    }


def types_of(tensors: Mapping[str, Rounded]) -> dict[str, int]:
    """Count the weights of a GGUF file's tensors in each of llama.cpp's types, the most first."""
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.type] += tensor.numel
    return dict(counts.most_common())
