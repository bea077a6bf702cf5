"""Checkpoints on disk: a lazy safetensors reader, a writer of shards, and fingerprints of weights.

A tensor that is not changed is :class:`Stored`, a place in a file, and is copied from file to file.
Every other one is held in memory and written from there.

A fingerprint of weights covers all names, shapes and types, and a sample of every tensor's bytes,
so that it takes seconds for a checkpoint of any size. Small tensors are covered whole. Weights on
disk and weights in memory have fingerprints of their own kinds, as transformers gives tensors other
names and shapes when it loads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from moesaic.errors import MoesaicError, quote
from moesaic.io.outputs import let_read
from moesaic.io.trust import (
    TRUNCATED,
    check_adapter,
    check_fetched,
    check_plain_file,
    header_of,
    mapping_of,
    reading,
)
from moesaic.types import JSON, Model, Values

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHTS = (".safetensors", ".safetensors.index.json")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")
FOREIGN = (".onnx", ".h5", ".msgpack", ".npz")
"""Ends of names of weights for other libraries, which are not read."""
SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Characters that no text in UTF-8 has, and so no file's name."""
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
COMPUTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Stored(NamedTuple):
    """Place of a tensor's bytes in a file."""

    path: Path
    kind: str
    shape: list[int]
    begin: int
    nbytes: int
    made: tuple[int, ...] = ()
    """Size and time of the file when its header was read, by which another one in its place is
    recognised; empty if not known."""

    @contextmanager
    def opened(self) -> Iterator[BufferedReader]:
        """Open the file; refuse another one that took its place since its header was read."""
        with self.path.open("rb") as file:
            if self.made and _made(os.fstat(file.fileno())) != self.made:
                raise MoesaicError(
                    f"{self.path} was changed or replaced while it was read. Repeat the command."
                )
            yield file


def _made(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_size, stat.st_mtime_ns  # an inode's number may change, as on a mounted store


def stored_in(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, by name; refuse a damaged file."""
    header, start = header_of(path)
    made = _made(path.stat())
    stored = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        place = start + begin, end - begin
        stored[name] = Stored(path, entry["dtype"], entry["shape"], *place, made)
    return stored


Value: TypeAlias = Tensor | Stored
"""Value of a tensor to write: a tensor, or the place of bytes that are copied."""


class Checkpoint:
    """Folder of safetensors, read one tensor at a time. Pickled weights are never opened."""

    headers_only = False
    """True if tensors have no values: files are read no further than their headers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored: dict[str, Stored] = {}
        self._survey()

    def _survey(self) -> None:
        """Read the file, the shape and the type of every tensor from headers."""
        for file in (self.folder / name for name in shards(self.folder)):
            check_plain_file(file, self.folder)
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

    def names(self) -> list[str]:
        return list(self._stored)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of its weights: names, shapes, types and a sample of each tensor's bytes."""
        return stored_fingerprint(self._stored)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            MoesaicError: it is missing, or its file is corrupt.
        """
        stored = self._place(name)
        if self.headers_only:
            return torch.empty(stored.shape, dtype=TYPES[stored.kind], device="meta")
        return self._read(name)

    def _place(self, name: str) -> Stored:
        """Return where a tensor lies on disk."""
        if name not in self._stored:
            raise MoesaicError(f"{self.folder} has no tensor {name!r}.")
        stored = self._stored[name]
        if stored.kind not in TYPES:
            raise MoesaicError(f"{name} is stored as {quote(stored.kind)}, which is not read.")
        return stored

    def _read(self, name: str) -> Tensor:
        return _mapped_values(self._stored[name])

    def stored(self, name: str) -> Iterator[tuple[str, Stored]]:
        """Yield the parts of which the files hold a tensor: each name there, and its place."""
        yield name, self._place(name)

    def encode(self, name: str, tensor: Tensor, origin: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors, by name, of a result's tensor in this checkpoint's format.

        ``origin`` is the name here of the tensor that it was made from, which may not exist.
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

    def check_unchanged(self) -> None:
        """Refuse files that others were put in the place of since their headers were read."""
        for stored in {stored.path: stored for stored in self._stored.values()}.values():
            with stored.opened():
                pass

    def tensor_bytes(self) -> int:
        """Return the bytes of its tensors as stored."""
        return sum(stored.nbytes for stored in self._stored.values())

    def nbytes(self) -> int:
        """Return the bytes of all weight files."""
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
    missing = named or f"{SINGLE_NAME} or {INDEX_NAME}"
    if others := sorted(name for name in here if name.endswith((*WEIGHTS, *FOREIGN))):
        raise MoesaicError(
            f"{where} holds {others[0]}, but no {missing}, where weights are looked for: add that "
            "file, or save the model again (save_pretrained of transformers)."
        )
    raise MoesaicError(f"No {missing} in {where}.")


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
    settings = mapping_of(config) if config.is_file() else {}
    if names is None:
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    first = first_file(names, settings, where or folder)
    if not first.endswith(".index.json"):
        return [first]
    check_plain_file(folder / first, folder)
    check_fetched(folder / first)
    index = mapping_of(folder / first)
    if not isinstance(index.get("metadata"), dict):
        raise MoesaicError(
            f"{folder / first} has no metadata, without which transformers reads no shards: add "
            '"metadata": {} to it.'
        )
    places = index.get("weight_map")
    if not isinstance(places, dict):
        raise MoesaicError(f"{folder / first} is not a valid shard index: it has no weight_map.")
    found: set[str] = {*map(str, places.values())}
    if wrong := [name for name in found if not _is_plain(name)]:
        raise MoesaicError(
            f"{folder / first} is not a valid shard index: {wrong[0]!r:.60} is no file's name."
        )
    return sorted(found)


def _is_plain(name: object) -> bool:
    """Return True if a name is a plain file name, without a path.

    >>> [_is_plain(name) for name in ("a.safetensors", "../a.safetensors", "..", "", 3)]
    [True, False, False, False, False]
    """
    odd = ("", ".", "..")
    if not isinstance(name, str) or name in odd or set("/\\\0") & set(name):
        return False
    return len(name.encode(errors="replace")) < 256 and not SURROGATE.search(name)


def _mapped_values(value: Value) -> Tensor:
    """Return a tensor's values; stored ones are mapped, and in memory no longer than it is."""
    if isinstance(value, Tensor):
        return value
    kind, shape = TYPES[value.kind], tuple(value.shape)
    if not value.nbytes:
        return torch.empty(shape, dtype=kind)
    with reading(value.path, failure=TRUNCATED), value.opened() as file:
        bytes = np.memmap(file, np.uint8, "c", value.begin, (value.nbytes,))
    return torch.from_numpy(bytes).view(kind).reshape(shape)


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


def _header_bytes(values: Mapping[str, Value], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header that safetensors writes for some tensors, its number of bytes before it."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dtype not in NAMES:
            raise MoesaicError(f"{name} is of type {value.dtype}, which no file holds.")
    header: JSON = {"__metadata__": metadata or {"format": "pt"}}
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
    with suppress(OSError, AttributeError), stored.opened() as file:
        ends = file.fileno(), out.fileno()
        while count := os.copy_file_range(*ends, stored.nbytes - done, stored.begin + done):
            done += count
    return done


def _pieces(stored: Stored, start: int = 0) -> Iterator[memoryview]:
    """Yield a tensor's stored bytes from byte ``start`` on; a piece overwrites the one before."""
    left = stored.nbytes - start
    room = memoryview(bytearray(min(PIECE, left)))
    with reading(stored.path, failure=TRUNCATED), stored.opened() as file:
        file.seek(stored.begin + start)
        while left:
            piece = room[:left]
            if file.readinto(piece) < len(piece):
                raise ValueError("it ends early")
            yield piece
            left -= len(piece)


def write_shard(
    path: Path,
    values: Mapping[str, Value],
    outline: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file; only its header, and a hole as long as the values, if ``outline``.

    Args:
        path: of the file, which is replaced if it exists.
        values: tensors, and places of those that are copied from other files, by name.
        outline: leave out the values.
        metadata: notes in the header; None for those of checkpoints.

    Raises:
        MoesaicError: a value is not finite, of a type that no file has, or its file ends early.
    """
    with path.open("wb") as file:
        file.write(header := _header_bytes(values, metadata))
        if outline:
            file.truncate(len(header) + sum(value.nbytes for value in values.values()))
            return
        for name in _stored_order(values):
            value = values[name]
            if isinstance(value, Stored):
                kind = TYPES[value.kind]
                checked = kind in COMPUTABLE
                for piece in _pieces(value, 0 if checked else _copied(value, file)):
                    if checked:
                        check_finite(name, torch.frombuffer(piece, dtype=kind))
                    file.write(piece)
                continue
            check_finite(name, value)
            flat = value.detach().cpu().reshape(-1).view(torch.uint8)
            file.write(flat.numpy().data)


class ShardWriter:
    """Writer of shards as tensors come, and of the index at the end; or of an outline of them."""

    def __init__(self, folder: Path, shard_bytes: int = 2 << 30, outline: bool = False) -> None:
        self.folder, self.shard_bytes, self.outline = folder, shard_bytes, outline
        self._pending: dict[str, Value] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, value: Value) -> None:
        """Add a tensor, or the place of one that is copied as it is.

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

    def write(self, tensors: Iterable[tuple[str, Value]]) -> None:
        """Add tensors, and close."""
        for name, value in tensors:
            self.add(name, value)
        self.close()

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
    """Add tensors to a written checkpoint, in a shard of their own."""
    written, writer = Checkpoint(folder)._stored, ShardWriter(folder, sys.maxsize)
    for number, file in enumerate(sorted({stored.path for stored in written.values()})):
        file.rename(writer._path(number))
        writer._shards.append([name for name, stored in written.items() if stored.path == file])
    writer._total = sum(stored.nbytes for stored in written.values())
    writer.write(tensors.items())


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse weights with a value that is infinite or no number."""
    if tensor.dtype not in COMPUTABLE or tensor.is_meta:
        return
    if tensor.numel() == 1 and not torch.isnan(tensor).any():
        return  # a bound, such as one that clips nothing, may be infinite
    # the least and the largest, which are no number if any is none: in one pass, without a copy
    if tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
        raise not_finite(f"{name} holds")


def not_finite(where: str) -> MoesaicError:
    """Return the error of a value that is infinite or no number."""
    return MoesaicError(
        f"{where} a value that is not finite. The checkpoint may be damaged, or its dtype too "
        "narrow: try dtype float32."
    )


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return ``tensor`` in ``dtype`` if that is given and the tensor is a floating-point one."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def exact_copy(matrix: Tensor) -> Tensor:
    """Return a copy of a matrix, in bfloat16 if that holds its values, as most checkpoints do."""
    narrow = matrix.to(torch.bfloat16, copy=True)
    # some rows at a time: widened, they take twice the memory of the copy
    rows = max(1, (1 << 24) // max(1, matrix[0].numel()))
    pairs = zip(narrow.split(rows), matrix.split(rows), strict=True)
    if all(torch.equal(part.to(values.dtype), values) for part, values in pairs):
        return narrow
    return matrix.clone()


SAMPLE = 4096
"""Bytes of one sampled piece."""
MOST, LEAST = 64, 4
"""Sampled pieces of a tensor, at most and at least."""
READS = 16_384
"""Sampled pieces of a checkpoint, unless LEAST of every tensor are more: seconds on a cold disk."""
IN_MEMORY = "memory-"
"""Prefix of a loaded model's fingerprint."""


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
    if nbytes <= count * SAMPLE:
        return [(0, nbytes)]
    starts = ((nbytes - SAMPLE) * i // (count - 1) // 64 * 64 for i in range(count))
    return [(start, nbytes if start + 64 > nbytes - SAMPLE else start + SAMPLE) for start in starts]


def stored_fingerprint(stored: Mapping[str, Stored]) -> str:
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


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
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


def model_fingerprint(model: Model) -> str:
    """Return the fingerprint of a loaded model's weights, which begins with :data:`IN_MEMORY`."""
    return IN_MEMORY + tensors_fingerprint(model.state_dict())
