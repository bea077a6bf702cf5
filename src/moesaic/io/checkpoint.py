"""Checkpoints on disk: a lazy safetensors reader, and a writer of shards.

A tensor that is not changed is :class:`Stored`, a place in a file, and is copied from file to file.
Every other one is held in memory and written from there.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from moesaic.errors import MoesaicError, shown
from moesaic.io.fingerprint import Stored, of_stored, stored_in
from moesaic.io.outputs import let_read
from moesaic.io.trust import (
    TRUNCATED,
    check_adapter,
    check_fetched,
    check_file,
    mapping_of,
    reading,
)
from moesaic.types import JSON, Config, Model, Values

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHTS = (".safetensors", ".safetensors.index.json")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")
VARIANT = re.compile(r"model\.[^.]+\.safetensors|model\.safetensors\.index\.[^.]+\.json")
PIECES = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Names of sharded files by rank; transformers would read these and ignore all others."""
TYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by safetensors' names, in the order in which safetensors stores tensors."""
NAMES = {kind: name for name, kind in TYPES.items()}
PIECE = 1 << 20
"""Bytes that are copied and checked at a time: with fewer, threads cost more than they save."""
LARGE = 1 << 20
"""Elements from which on :class:`_NoRoom` gives a tensor no memory."""
ROOM = 1 << 28
"""Largest number of values of one buffer: a gigabyte in float32."""
PARAMETERS = 500_000
"""Largest number of tensors of a model: five times those of the known one with most experts."""
COMPUTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

SHAPES = 8
"""Number of skeletons that :func:`shape_of` caches."""
_SHAPES: dict[str, Model] = {}

Value: TypeAlias = Tensor | Stored
"""Value of a tensor to write: a tensor, or the place of bytes that are copied."""


class Checkpoint:
    """Folder of safetensors, read one tensor at a time. Pickled weights are never opened."""

    weightless = False
    """True if tensors have no values: files are read no further than their headers."""
    loadable: ClassVar[bool] = True
    """True if ``from_pretrained`` reads the folder's weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored: dict[str, Stored] = {}
        self._survey()

    def _survey(self) -> None:
        """Learn the file, the shape and the type of every tensor."""
        for file in self._shards():
            check_file(file, self.folder)
            check_fetched(file)
            stored = stored_in(file)
            # torch's way would map the file to be written to, which the system may refuse to
            # one that is larger than memory
            with reading(file, failure=TRUNCATED), safe_open(file, framework="np") as shard:
                self._stored |= {name: stored[name] for name in shard.keys()}

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the first tensor that torch can compute with, for configs without a type."""
        types = (TYPES.get(stored.kind) for stored in self._stored.values())
        return next((kind for kind in types if kind in COMPUTABLE), None)

    def _shards(self) -> list[Path]:
        return [self.folder / name for name in shards(self.folder)]

    def names(self) -> list[str]:
        return list(self._stored)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of its weights; see :mod:`moesaic.io.fingerprint`."""
        return of_stored(self._stored)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            MoesaicError: it is missing, or its file is corrupt.
        """
        stored = self._place(name)
        if self.weightless:
            return torch.empty(stored.shape, dtype=TYPES[stored.kind], device="meta")
        return self._read(name)

    def _place(self, name: str) -> Stored:
        """Return where a tensor lies on disk."""
        if name not in self._stored:
            raise MoesaicError(f"{self.folder} has no tensor {name!r}.")
        stored = self._stored[name]
        if stored.kind not in TYPES:
            raise MoesaicError(f"{name} is stored as {shown(stored.kind)}, which is not read.")
        return stored

    def _read(self, name: str) -> Tensor:
        return mapped(self._stored[name])

    def stored(self, name: str) -> Iterator[tuple[str, Stored]]:
        """Return a tensor as the files have it: the places of its parts, by their names there."""
        yield name, self._place(name)

    def written(self, name: str, tensor: Tensor, origin: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors of a result's tensor, in this checkpoint's storage format.

        Args:
            name: the tensor's name in the result.
            tensor: its values.
            origin: name in this checkpoint of the tensor it was made from, which may not exist.

        Yields:
            name and values of each stored tensor.
        """
        yield name, tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its values; ``name`` is one of :meth:`names`."""
        return tuple(self._stored[name].shape)

    def is_floating(self, name: str) -> bool:
        """Return True if a tensor has a floating-point type; ``name`` is one of :meth:`names`."""
        return "F" in self._stored[name].kind

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with ``prefix``, by their names without it."""
        names = (name for name in self.names() if name.startswith(prefix))
        return {name.removeprefix(prefix): self.tensor(name) for name in names}

    def nbytes(self) -> int:
        """Size of the weight files on disk."""
        return sum(file.stat().st_size for file in {s.path for s in self._stored.values()})


def first_file(names: Iterable[str], config: Values, where: object) -> str:
    """Return the name of the file that transformers opens first, the weights or their index.

    Args:
        names: of the files in a folder or a repository.
        config: the content of its config.json.
        where: named in messages.

    Raises:
        MoesaicError: there is none; names the files that are there instead.
    """
    here = {name for name in names if "/" not in name}
    check_adapter(here, where)
    named = config.get("transformers_weights")
    if named is not None and not (_is_plain(named) and str(named).endswith(WEIGHTS)):
        raise MoesaicError(
            f"{where}: transformers_weights {named!r:.60} in config.json is no name."
        )
    if pieces := sorted(filter(PIECES.fullmatch, here)):
        raise MoesaicError(f"{where} holds pieces of a model such as {pieces[0]}: join them first.")
    for name in (SINGLE_NAME, INDEX_NAME) if named is None else (str(named),):
        if name in here:
            return name
    if variants := sorted(filter(VARIANT.fullmatch, here)):
        raise MoesaicError(
            f"{where} holds its weights as variants only, such as {variants[0]}: name them "
            f"{SINGLE_NAME} in a folder with the other files."
        )
    if any(name.endswith(PICKLED) for name in here):
        raise MoesaicError(
            f"{where} holds pickled weights only, which can run code when opened. "
            "Convert them to safetensors first (save_pretrained does)."
        )
    if files := sorted(name for name in here if name.endswith(".gguf")):
        raise MoesaicError(f"{where} holds GGUF files: give one of them, such as {files[0]}.")
    raise MoesaicError(f"No {named or f'{SINGLE_NAME} or {INDEX_NAME}'} in {where}.")


def shards(folder: Path, names: Iterable[str] | None = None, where: object = None) -> list[str]:
    """Return the names of the files of weights that a checkpoint's folder has or should have.

    Args:
        folder: with its config.json and its index.
        names: of the files of the whole checkpoint; by default those in the folder.
        where: the repository, for messages; by default the folder.

    Raises:
        MoesaicError: there are none, or the index is not valid.
    """
    config = folder / "config.json"
    said = mapping_of(config) if config.is_file() else {}
    if names is None:
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    first = first_file(names, said, where or folder)
    if not first.endswith(".index.json"):
        return [first]
    check_file(folder / first, folder)
    check_fetched(folder / first)
    places = mapping_of(folder / first).get("weight_map")
    found: set[str] = {*map(str, places.values())} if isinstance(places, dict) else {""}
    if wrong := [name for name in found if not _is_plain(name)]:
        raise MoesaicError(
            f"{folder / first} is not a valid shard index: {wrong[0]!r:.60} is no file's name."
        )
    return sorted(found)


def check_whole(folder: Path) -> None:
    """Refuse a folder in which a weight file is missing or has a damaged header.

    Raises:
        MoesaicError: names the file.
    """
    if any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        Checkpoint(folder)


def _is_plain(name: object) -> bool:
    """Return True if a name is a plain file name, without a path.

    >>> [_is_plain(name) for name in ("a.safetensors", "../a.safetensors", "..", "", 3)]
    [True, False, False, False, False]
    """
    odd = ("", ".", "..")
    plain = isinstance(name, str) and name not in odd and not set("/\\\0") & set(name)
    return plain and len(str(name)) < 256


def mapped(value: Value) -> Tensor:
    """Return a tensor's values; stored ones are mapped, and in memory no longer than it is."""
    if isinstance(value, Tensor):
        return value
    kind, shape = TYPES[value.kind], tuple(value.shape)
    if not value.nbytes:
        return torch.empty(shape, dtype=kind)
    with reading(value.path, failure=TRUNCATED):
        bytes = np.memmap(value.path, np.uint8, "c", value.begin, (value.nbytes,))
    return torch.from_numpy(bytes).view(kind).reshape(shape)


class Writer(Protocol):
    """Takes a checkpoint's tensors one by one."""

    def add(self, name: str, value: Value) -> None: ...

    def close(self) -> None: ...


def _kind(value: Value) -> str:
    """Return the name of a type as safetensors has it."""
    return value.kind if isinstance(value, Stored) else NAMES[value.dtype]


def _stored_order(values: Mapping[str, Value]) -> list[str]:
    """Return names in the order in which safetensors stores tensors: the widest types first."""
    rank = {kind: place for place, kind in enumerate(TYPES)}
    return sorted(values, key=lambda name: (rank[_kind(values[name])], name))


LINE = 64
"""Bytes of a cache line. Files are mapped as they are: where values begin at a line no row of a
matrix lies across one more than it must, and a CPU reads it up to a tenth faster."""


def _begun_at_a_line(header: bytes) -> bytes:
    """Return a header after its length (uint64), padded with spaces so that values begin at a
    whole cache line."""
    header += b" " * (-(8 + len(header)) % LINE)
    return struct.pack("<Q", len(header)) + header


def align(path: Path) -> None:
    """Let the values of a safetensors file begin at a whole cache line, as ours do; all may read it
    who may read a new file."""
    let_read(path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if (8 + length) % LINE == 0:
            return
        moved = path.with_name(f"{path.name}.moved")
        with moved.open("wb") as out:
            out.write(_begun_at_a_line(file.read(length)))
            shutil.copyfileobj(file, out, 1 << 24)
    moved.replace(path)


def _header_bytes(values: Mapping[str, Value]) -> bytes:
    """Return the header that safetensors writes for some tensors, its number of bytes before it."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dtype not in NAMES:
            raise MoesaicError(f"{name} is of type {value.dtype}, which no file holds.")
    header: JSON = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in _stored_order(values):
        value = values[name]
        end = start + value.nbytes
        entry = {"dtype": _kind(value), "shape": list(value.shape), "data_offsets": [start, end]}
        header[name] = entry
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return _begun_at_a_line(text)


def _copied(stored: Stored, out: BinaryIO) -> int:
    """Copy a tensor from file to file by the system; return the bytes copied, fewer if that fails.

    The bytes do not pass through this process; a file system that can share them does.
    """
    done = 0
    out.flush()
    # not every system and file system can, nor any on a full disk
    with suppress(OSError, AttributeError), stored.path.open("rb") as file:
        ends = file.fileno(), out.fileno()
        while count := os.copy_file_range(*ends, stored.nbytes - done, stored.begin + done):
            done += count
    return done


def _pieces(stored: Stored, start: int = 0) -> Iterator[memoryview]:
    """Yield a tensor's stored bytes from byte ``start`` on; each piece overwrites the one before.

    Raises:
        MoesaicError: the file ends early.
    """
    left = stored.nbytes - start
    room = memoryview(bytearray(min(PIECE, left)))
    with reading(stored.path, failure=TRUNCATED), stored.path.open("rb") as file:
        file.seek(stored.begin + start)
        while left:
            piece = room[:left]
            if file.readinto(piece) < len(piece):
                raise ValueError("it ends early")
            yield piece
            left -= len(piece)


def _write(name: str, stored: Stored, out: BinaryIO) -> None:
    """Copy a tensor's bytes from its file; values that can be wrong are looked at on the way.

    Raises:
        MoesaicError: the file ends early, or a value is not finite.
    """
    kind = TYPES[stored.kind]
    checked = kind in COMPUTABLE
    for piece in _pieces(stored, 0 if checked else _copied(stored, out)):
        if checked:
            check_finite(name, torch.frombuffer(piece, dtype=kind))
        out.write(piece)


def write_shard(path: Path, values: Mapping[str, Value], outline: bool = False) -> None:
    """Write a safetensors file; only its header, and a hole as long as the values, if ``outline``.

    Raises:
        MoesaicError: a value is not finite, of a type that no file has, or its file ends early.
    """
    with path.open("wb") as file:
        file.write(header := _header_bytes(values))
        if outline:
            file.truncate(len(header) + sum(value.nbytes for value in values.values()))
            return
        for name in _stored_order(values):
            value = values[name]
            if isinstance(value, Stored):
                _write(name, value, file)
                continue
            check_finite(name, value)
            flat = value.detach().cpu().reshape(-1).view(torch.uint8)
            file.write(flat.numpy().data)


class ShardWriter:
    """Writes tensors in shards as they come, and the index at the end; or an outline of them."""

    def __init__(self, folder: Path, shard_bytes: int = 2 << 30, outline: bool = False) -> None:
        self.folder, self.shard_bytes, self.outline = folder, shard_bytes, outline
        self._pending: dict[str, Value] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, value: Value) -> None:
        """Take a tensor, or the place of one that is copied as it is.

        Raises:
            MoesaicError: a value, of it or of one that waited with it, is not finite.
        """
        if self._pending and self._pending_bytes + value.nbytes > self.shard_bytes:
            self._flush()
        self._pending[name] = value.contiguous() if isinstance(value, Tensor) else value
        self._pending_bytes += value.nbytes

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"

    def _flush(self) -> None:
        write_shard(self._path(len(self._shards)), self._pending, self.outline)
        self._shards.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> None:
        """Write what is pending and give the shards their final names."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self.folder / SINGLE_NAME)
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._path(number).rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=1))


def extend(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put further tensors into a checkpoint that is written, in a shard of their own."""
    written, writer = Checkpoint(folder)._stored, ShardWriter(folder, sys.maxsize)
    for number, file in enumerate(sorted({stored.path for stored in written.values()})):
        file.rename(writer._path(number))
        writer._shards.append([name for name, stored in written.items() if stored.path == file])
    writer._total = sum(stored.nbytes for stored in written.values())
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse weights that no model can be run with.

    Raises:
        MoesaicError: a value is infinite or no number.
    """
    if tensor.dtype not in COMPUTABLE or tensor.is_meta:
        return
    if tensor.numel() == 1 and not torch.isnan(tensor).any():
        return  # a bound, such as one that clips nothing, may be infinite
    # the least and the largest, which are no number if any is none: in one pass, without a copy
    if tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
        raise MoesaicError(
            f"{name} holds a value that is not finite. The checkpoint may be damaged, or its dtype "
            "too narrow: try dtype float32."
        )


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return ``tensor`` in ``dtype`` if that is given and the tensor is a floating-point one."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def narrowed(model: Model) -> Callable[[str], torch.dtype]:
    """Return a function of a tensor's name to its type: the model's, or float32 if strict."""
    dtype, wide = model.dtype, model._keep_in_fp32_modules_strict or ()
    types = {name: p.dtype for name, p in model.named_parameters()}

    def type_of(name: str) -> torch.dtype:
        strict = any(part in name for part in wide)
        return torch.float32 if strict else types.get(name, dtype)

    return type_of


def path_of(model: Model, module: nn.Module) -> str:
    """Return the dotted name of a module in its model."""
    return next(name for name, other in model.named_modules() if other is module)


def shape_of(config: Config, dtype: torch.dtype | None = None) -> Model:
    """Return the cached skeleton of a config (no values), which must not be run or changed.

    Args:
        config: of the model.
        dtype: floating-point type; None for the config's own.

    Raises:
        MoesaicError: there is no such model.
    """
    dtype = dtype or config.dtype or torch.get_default_dtype()
    key = f"{type(config).__name__} {dtype} {config.to_json_string(use_diff=False)}"
    model = _SHAPES.pop(key, None)
    if model is None:
        with torch.device("cpu"):  # a converted model asks while it is made on the meta device
            model = skeleton(config, dtype, bare=True)
    while len(_SHAPES) >= SHAPES:
        del _SHAPES[next(iter(_SHAPES))]
    _SHAPES[key] = model
    return model


_FILLED = {torch.ones, torch.zeros, torch.full, torch.rand, torch.randn}
_COUNTED = {torch.arange, torch.linspace}


def _elements(func: Any, args: Sequence[Any], kwargs: Values) -> float:
    """Return the number of elements of the tensor that a torch factory function is to make."""
    if func is torch.arange:
        bounds = [n for n in (*args, kwargs.get("end")) if isinstance(n, int | float)]
        step = bounds[2] if len(bounds) > 2 else kwargs.get("step") or 1
        start, end = bounds[:2] if len(bounds) > 1 else (0, *bounds, 0)[:2]
        return abs((end - start) / (step or 1))
    if func is torch.linspace:
        return float(kwargs.get("steps", args[2] if len(args) > 2 else 0))
    size = kwargs.get("size", args[:1] if func is torch.full else args)
    size = size[0] if size and isinstance(size[0], tuple | list) else size
    return prod(size)


class _NoRoom(TorchFunctionMode):
    """Context in which large uninitialised tensors, whose sizes come from a config, get no memory;
    nor do filled ones of more than :data:`ROOM`, which are no buffers of any model."""

    def __init__(self) -> None:
        super().__init__()
        self._made = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            if _elements(func, args, kwargs) > LARGE:
                kwargs = {**kwargs, "device": "meta"}
        elif func in _FILLED or func in _COUNTED:
            count = _elements(func, args, kwargs)
            if count > ROOM and func in _FILLED:
                kwargs = {**kwargs, "device": "meta"}
            else:
                self._made += count
            if self._made > 4 * ROOM:
                raise ValueError(f"it asks for buffers of more than {4 * ROOM:,} values")
        return func(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which a module's parameters move to the meta device; buffers keep their values."""
    count = 0

    def moved(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal count
        count += 1
        if count > PARAMETERS:
            raise ValueError(f"it asks for more than {PARAMETERS:,} tensors")
        if parameter is None or parameter.is_meta:
            return parameter
        return type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]
    with hook, _NoRoom():
        yield


def skeleton(config: Config, dtype: torch.dtype | None = None, bare: bool = False) -> Model:
    """Make the model of a config with parameters on the meta device and real buffers.

    Args:
        config: of the model.
        dtype: floating-point type; None for the config's own.
        bare: buffers are not initialised either, which takes half the time; such a model cannot
            be run. :func:`shape_of` caches these.

    Raises:
        MoesaicError: there is no such model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.models.auto import MODEL_FOR_CAUSAL_LM_MAPPING

    options = {} if dtype is None else {"dtype": dtype}
    if options:  # transformers writes the type into the config, so into a copy
        config = copy.deepcopy(config)
    try:
        values = no_init_weights() if bare else nullcontext()
        with _parameters_on_meta(), values:
            model = AutoModelForCausalLM.from_config(config, **options).eval()
        model.tie_weights()  # becoming empty broke the ties
    except MoesaicError:
        raise
    except Exception as error:  # transformers raises anything over a config that is odd
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise MoesaicError(
                f"transformers has no causal language model of the type {config.model_type}."
            ) from error
        message = " ".join(str(error).split())
        raise MoesaicError(
            f"config.json describes no {config.model_type} that can be made: "
            f"{type(error).__name__}: {message:.300}"
        ) from error
    return model
