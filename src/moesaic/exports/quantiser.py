"""GGUF files quantised row by row by ggml's own quantiser, and types of their tensors.

The types of a file such as q4_k_m follow ``llama_tensor_get_type`` of ggml-org/llama.cpp,
src/llama-quant.cpp, for the types that :data:`moesaic.config.GgufType` lists, without Falcon's and
GLM5-next's exceptions.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from io import BufferedReader
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.config import by_text
from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import check_finite
from moesaic.metrics.gguf_engine import library

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

ALIGNED = 32
"""Alignment of tensors in bytes."""
NARROW = "q2_k"
"""Narrowest type that needs no importance weights."""
AT_ONCE = 1 << 24
"""Weights of several experts, or rows, that are quantised at once: dequantising takes many times
their bytes."""
ROWS = 128
"""Number of rows of a matrix that one thread quantises at a time."""
OTHERS = "q8_0"
"""Type of tensors that are not named where types of single tensors are given."""
OWN = ("general.architecture", "general.quantization_version", "general.file_type")
"""Keys for which a quantised file has values of its own."""
Held: TypeAlias = "npt.NDArray[np.uint8]"
"""Stored bytes of rows."""
Values: TypeAlias = "npt.NDArray[np.float32]"
FALLBACK = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Types that llama.cpp uses if blocks of 256 do not divide a row; for iq types ``IQ_FALLBACK``."""
IQ_FALLBACK, WHOLE = "iq4_nl", "f32"


@dataclass(frozen=True)
class FileTensor:
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

    def filled(self, type: str) -> FileTensor:
        """Return the tensor with its rows filled up to whole blocks of a type."""
        row, block = self.shape[0], block_of(type)
        return replace(self, shape=(-(-row // block) * block, *self.shape[1:]))

    def as_type(self, type: str, weighed: bool) -> FileTensor:
        """Return the tensor after a file is quantised to a type.

        Args:
            type: of tensors.
            weighed: its inputs have importance weights.
        """
        if self.type == WHOLE:  # norms, routers
            return self
        return self.in_type(NARROW if by_text(type) and not weighed else type)

    def in_type(self, type: str) -> FileTensor:
        """Return the tensor in a type, or in the next one whose blocks divide its rows."""
        if self.shape[0] % _block(type)[0]:
            type = FALLBACK.get(type, IQ_FALLBACK if type.startswith("iq") else type)
        return replace(self, type="f16" if self.shape[0] % _block(type)[0] else type)


class KeptRows:
    """Quantised rows in a temporary file, found again by their values, importance and type.

    Quantising is most of a search: ``fit`` needs a candidate's rows when it measures the candidate,
    when it writes the file, and when it measures that.

    Args:
        folder: for the file.
        room: bytes that stay free on its disk; without that much room nothing more is kept.
    """

    def __init__(self, folder: Path, room: int) -> None:
        self.folder, self.room = folder, room
        self._places: dict[bytes, int] = {}
        self._lock = Lock()

    @cached_property
    def _file(self) -> IO[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return TemporaryFile(dir=self.folder)

    def fill(
        self, held: Held, make: Callable[[], object], type: str, *values: Values | None
    ) -> None:
        """Read quantised rows; if there are none, let ``make`` write them, and keep them.

        Args:
            held: bytes to fill.
            make: fills them.
            type: of the rows.
            values: all else that determines the bytes: the rows, and the mean squares of inputs.
        """
        digest = hashlib.sha256(type.encode())
        for part in values:
            digest.update(b"" if part is None else part.data)
        key = digest.digest()
        with self._lock:
            if key in self._places:
                self._file.seek(self._places[key])
                held[:] = np.frombuffer(self._file.read(held.nbytes), np.uint8).reshape(held.shape)
                return
        make()
        with self._lock:
            end = self._file.seek(0, os.SEEK_END)
            if shutil.disk_usage(self.folder).free > self.room:
                self._file.write(held.data)
                self._places[key] = end

    def clear(self) -> None:
        """Give the disk space back."""
        self._places.clear()
        self._file.truncate(0)


def held_rows(
    matrix: Tensor, type: str, weights: Tensor | None = None, kept: KeptRows | None = None
) -> Held:
    """Quantise a matrix by ggml's own quantiser; return the bytes, row by row.

    Args:
        matrix: rows (R, I), or several matrices (E, R, I).
        type: of tensors; its blocks must divide the rows.
        weights: importance of the inputs (I), or of each matrix's (E, I); by default equal.
        kept: rows that were quantised before; new ones are added.

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
        source_RI, held_RB = (every[expert, start : start + ROWS] for every in (source_ERI, held))
        make = partial(
            chunk,
            number,
            source_RI.ctypes.data_as(floats),
            held_RB.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(0),
            ctypes.c_int64(len(source_RI)),
            ctypes.c_int64(inputs),
            None if mean_I is None else mean_I.ctypes.data_as(floats),
        )
        if kept is None:
            make()
        else:
            kept.fill(held_RB, make, type, source_RI, mean_I)

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


def block_of(type: str) -> int:
    """Return the number of weights of a block of a type of tensors."""
    return _block(type)[0]


@cache
def _block(type: str) -> tuple[int, int]:
    """Return the number of weights of a block, and its bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes: tuple[int, int] = GGML_QUANT_SIZES[GGMLQuantizationType[type.upper()]]
    return sizes


def begin_file(
    reader: GGUFReader,
    out: Path,
    type: str,
    weights: Mapping[str, Tensor],
    chosen: Mapping[str, str] | None = None,
) -> dict[str, FileTensor]:
    """Write a quantised GGUF file but for its values, with the types of llama.cpp's quantiser.

    In their place is a hole of their size, which takes no room on a disk.

    Args:
        reader: of a file in f32 or bf16, which may have such a hole too. To make one takes seconds
            for a large vocabulary.
        out: the file to write.
        type: llama.cpp's name of a type of files.
        weights: of :func:`moesaic.exports.quantised_model.importance`; inputs of tensors that are
            not in it weigh the same.
        chosen: types of single tensors, by their names. A row that a type's blocks do not divide
            gets the next wider type with shorter blocks; a tensor without importance weights, of
            the types that need none, at least the narrowest.

    Returns:
        the tensors of the file, by name; those that are not matrices are in f32.

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
    given = sorted(reader.tensors, key=lambda tensor: order(tensor.name))
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in given}
    arch = str(fields["general.architecture"].contents())
    rows = {name: shape[0] for name, shape in shapes.items() if _is_quantised(name, shape)}
    whole = type == WHOLE
    wanted = {} if whole else mixture(rows, type, _model(fields, arch), bool(weights))
    wanted |= {
        name: NARROW if by_text(kind) and name not in weights else kind
        for name, kind in (chosen or {}).items()
        if name in rows
    }
    types = {n: FileTensor(WHOLE, shapes[n]).in_type(kind).type for n, kind in wanted.items()}
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
    for name, (row, *others) in shapes.items():
        block, size = _block(types.setdefault(name, WHOLE))
        shape = *others[::-1], row // block * size
        number = GGMLQuantizationType[types[name].upper()]
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    tensors = {name: FileTensor(types[name], shape) for name, shape in shapes.items()}
    start = -(-out.stat().st_size // ALIGNED) * ALIGNED
    os.truncate(out, start + sum(tensor.bytes for tensor in tensors.values()))
    return tensors


def fill_file(
    out: Path,
    tensors: Mapping[str, FileTensor],
    reader: GGUFReader,
    values: BufferedReader,
    weights: Mapping[str, Tensor],
    kept: KeptRows | None = None,
) -> None:
    """Write the values of a quantised file, a part of one tensor at a time in memory.

    Args:
        out: the file of :func:`begin_file`.
        tensors: its tensors.
        reader: of the file in f32 or bf16.
        values: that file's values, from its first tensor on.
        weights: importance of inputs, as for :func:`begin_file`.
        kept: rows that were quantised before.

    Raises:
        EOFError: there are fewer values.
        MoesaicError: a value is not finite.
    """
    places, place = dict[str, int](), out.stat().st_size
    for name, tensor in reversed([*tensors.items()]):
        places[name] = place = place - tensor.bytes
    given = sorted(reader.tensors, key=lambda tensor: int(tensor.data_offset))
    read = int(given[0].data_offset)
    with out.open("r+b") as file:
        for tensor in given:
            name = tensor.name
            file.seek(places[name])
            _read(values, int(tensor.data_offset) - read)
            for part, mean in _parts(values, tensor, tensors[name].shape, weights.get(name)):
                type = tensors[name].type
                check_finite(name, part)
                held = part.numpy() if type == WHOLE else held_rows(part, type, mean, kept)
                file.write(held.data)
            read = int(tensor.data_offset + tensor.n_bytes)


def _parts(
    values: BufferedReader, tensor: ReaderTensor, shape: tuple[int, ...], mean: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield a tensor's values, some rows or experts at a time, with their inputs' importance.

    Args:
        values: those that come next are the tensor's.
        tensor: its type is that of the values.
        shape: the length of a row first.
        mean: importance of the inputs (I,), of all experts (E I,), or None.
    """
    count, *inner = shape[::-1]
    bytes, step = tensor.n_bytes // count, max(1, AT_ONCE // math.prod(inner))
    mean_EI = None if mean is None or len(inner) < 2 else mean.view(count, -1)
    for start in range(0, count, step):
        some = min(step, count - start)
        held = np.frombuffer(_read(values, some * bytes), np.uint8)
        rows = values_of(held.reshape(*(some, *inner)[:-1], -1), tensor.tensor_type.name)
        part = mean if mean_EI is None else mean_EI[start : start + some]
        yield rows.view(some, *inner), part


def _read(values: BufferedReader, bytes: int) -> bytearray:
    """Return the next bytes, all of them."""
    held = bytearray(bytes)
    if values.readinto(held) < bytes:
        raise EOFError("values are missing")
    return held


def _model(fields: Mapping[str, Any], arch: str) -> ModelFacts:
    """Return the numbers of a file's model that determine types; of lists by layer the first."""

    def number(key: str, default: int = 0) -> int:
        found = fields[f"{arch}.{key}"].contents() if f"{arch}.{key}" in fields else default
        return int(found[0] if isinstance(found, list) else found)

    heads = number("attention.head_count")
    key_heads = number("attention.head_count_kv", heads)
    return ModelFacts(arch, number("block_count"), number("expert_count"), heads, key_heads)


def tensors_of(file: Path) -> dict[str, FileTensor]:
    """Return the tensors of a GGUF file, by name."""
    from gguf import GGUFReader

    return {
        tensor.name: FileTensor(tensor.tensor_type.name.lower(), tuple(map(int, tensor.shape)))
        for tensor in GGUFReader(file).tensors
    }


def check_values(file: Path) -> None:
    """Refuse a GGUF file with a value that is not finite: its type may not hold the model's."""
    from gguf import GGUFReader, quants

    for tensor in GGUFReader(file).tensors:
        type = tensor.tensor_type
        if type.name.startswith("I"):  # whole numbers, as converters write no iq types
            continue
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        for start in range(0, len(rows), step := max(1, AT_ONCE // rows.shape[1])):
            if not np.isfinite(quants.dequantize(rows[start : start + step], type)).all():
                raise MoesaicError(
                    f"{tensor.name} holds a value that is not finite in {type.name.lower()}. The "
                    "checkpoint may be damaged, or the type too narrow: try type=bf16."
                )


def types_of(tensors: Mapping[str, FileTensor]) -> dict[str, int]:
    """Count the weights of a GGUF file's tensors in each of llama.cpp's types, the most first."""
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.type] += tensor.numel
    return dict(counts.most_common())


# --- types of a file's tensors -------------------------------------------------------------------


FILES = {"q5_k_m": "q5_k", "q4_k_m": "q4_k", "q4_k_s": "q4_k", "q3_k_m": "q3_k"}
"""Types of tensors by those of files, if these have other names."""
LOW, IQ3 = ("iq2_xxs", "iq2_xs", "iq1_s", "iq1_m"), "iq3_xxs"
KEPT = re.compile(
    r"_norm\.weight|ffn_gate_(inp|tid2eid)\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|"
    r"shortconv\.conv\.weight|indexer\.[kq]_proj\.weight|attn_rel_b\.weight|position_embd|"
    r"^token_types|time_mix_(first|[wva][012]|g[12]|decay_w[12]|lerp_fused)\.weight"
)
"""Pattern of the names of matrices that are not quantised."""
PARTS = {
    "head": r"^output\.weight",
    "embeddings": r"^(per_layer_)?token_embd\.weight",
    "values": r"attn_(qkv|kv_b|v)\.weight",
    "keys": r"attn_k\.weight",
    "queries": r"attn_q\.weight",
    "attn_output": r"attn_output\.weight",
    "down": r"ffn_down",
}
"""Parts of a model that the rule distinguishes, by patterns of tensors' names."""


@dataclass(frozen=True)
class ModelFacts:
    """Numbers of a model that the rule of types needs."""

    arch: str
    layers: int
    experts: int
    heads: int
    key_heads: int

    @property
    def is_70b(self) -> bool:
        """True for models of 70B, whose values are a small part of the weights."""
        layers = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}.get(self.arch)
        return self.layers == layers and (self.arch != "llama" or self.heads != self.key_heads)


def order(name: str) -> tuple[int, str]:
    """Return the sort key of a tensor in a file: by layer, those outside of layers first."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1, name


def _is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Return True for matrices to quantise: no routers or small ones (row length: ``shape[0]``)."""
    return math.prod(shape[1:]) > 1 and name.endswith("weight") and not KEPT.search(name)


def mixture(rows: Mapping[str, int], type: str, model: ModelFacts, weighed: bool) -> dict[str, str]:
    """Return the types of tensors, whether or not a type's blocks divide their rows.

    Args:
        rows: row lengths by the names of all quantised tensors, sorted by :func:`order`.
        type: type of the file.
        model: the model's numbers.
        weighed: True if there is an importance matrix.
    """
    parts = {n: next((p for p, words in PARTS.items() if re.search(words, n)), "") for n in rows}
    if "head" not in parts.values():
        parts = {name: "head" if p == "embeddings" else p for name, p in parts.items()}
    values, seen, types = Counter(parts.values())["values"], Counter[str](), {}
    for name, part in parts.items():
        place = seen[part]
        seen[part] += 1
        if part == "down" and model.experts > 1 and type not in LOW:
            place = order(name)[0]
        chosen = _choices(part, place, values, model, weighed).get(type)
        if part == "head" and rows[name] % 256:
            chosen = "q8_0"
        types[name] = chosen or FILES.get(type, type)
        if part == "values" and model.is_70b and types[name] in ("q3_k", "q4_k"):
            types[name] = "q5_k" if type not in LOW else types[name]
        if part in ("values", "keys") and model.experts == 8 and type not in LOW:
            types[name] = "q8_0"
    return types


def _choices(
    part: str, place: int, values: int, model: ModelFacts, weighed: bool
) -> dict[str, str | None]:
    """Return a tensor's type for each type of file; None for the file's own type."""

    def low(chosen: str | None) -> dict[str, str | None]:
        return dict.fromkeys(LOW, chosen)

    def more(count: int) -> dict[str, str | None]:
        """Return q6_k for the first and last eighth, and every third between."""
        many = place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2
        return dict.fromkeys(("q4_k_m", "q5_k_m"), "q6_k" if many else None)

    grouped = model.key_heads > 0 and model.heads // model.key_heads >= 4
    early = place < model.layers // 8
    if part == "head":
        wide = ("q6_k", "q5_k_m", "q4_k_m", "q4_k_s", "q4_0", "iq4_xs", "q3_k_m", "q2_k")
        return low("q5_k") | {IQ3: "q5_k"} | dict.fromkeys(wide, "q6_k")
    if part == "embeddings":
        return low("q2_k") | {IQ3: "iq3_s"}
    if part == "values":
        return {
            **low("q4_k" if grouped or model.experts >= 4 else "q2_k"),
            **more(values),
            "q2_k": "q4_k" if grouped else "q3_k",
            IQ3: "q4_k" if grouped else None if weighed else "iq3_s",
            "q3_k_m": "q5_k" if place < 2 else "q4_k",
            "iq4_xs": "q5_k" if grouped else None,
            "q4_k_s": "q5_k" if place < 4 else None,
        }
    if part in ("keys", "queries"):
        return low("q4_k" if part == "keys" and model.experts == 8 else None) | {IQ3: "iq2_s"}
    if part == "down":
        return {
            **low("q2_k" if early else None),
            **more(model.layers),
            "q2_k": "q3_k",
            IQ3: None if weighed else "q4_k" if early else "q3_k",
            "q3_k_m": "q5_k" if place < model.layers // 16 else "q4_k",
            "iq4_xs": "q5_k" if early and not weighed else None,
            "q4_k_s": "q5_k" if early else None,
            "q4_0": "q4_1" if early and weighed else None,
        }
    if part == "attn_output" and model.experts == 8:
        also = ("q2_k", IQ3, "q3_k_m", "q4_k_s", "q4_k_m", "iq4_xs")
        return low("q5_k") | dict.fromkeys(also, "q5_k")
    if part == "attn_output":
        narrow = dict.fromkeys(("iq1_s", "iq1_m"), "iq2_xxs")
        return {**narrow, "q2_k": "q3_k", IQ3: "iq3_s", "q3_k_m": "q4_k"}
    return {}
