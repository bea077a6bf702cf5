"""Quantised checkpoints: read as values, kept as bytes.

A weight that is only moved or sliced keeps its bytes (:class:`Packed`), so that they are written as
they were read. :mod:`moesaic.io.formats` has the formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from types import EllipsisType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import Checkpoint, Stored
from moesaic.io.formats import BlockFp8, CompressedTensors, Format, Mxfp4Experts, Parts, stored_name
from moesaic.io.naming import expert_number
from moesaic.io.trust import check_fields, mapping_of, reading
from moesaic.types import JSON, Config, Values

FORMATS: dict[str, type[Format]] = {
    kind.method: kind for kind in (BlockFp8, Mxfp4Experts, CompressedTensors)
}


MODELOPT, MODELOPT_FILE = "modelopt", "hf_quant_config.json"
"""Name of a format, and the file that may be the only sign of it."""
UNNAMED = {"bits": "mlx", "load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes"}
"""Formats that are recognised by a key of their settings, as these have no name."""
CODES = {"U8", "I8", "I16", "U16", "I32", "U32"}
"""Types of packed codes, by safetensors' names."""
QUANTIZATION = {"quantization_config", "expert_dtype"}
"""Config keys that describe how weights are stored; the latter is DeepSeek-V4's."""


FIELD = "quantization_config"


def format_of(config: JSON | None) -> Format | None:
    """Return the format that a ``quantization_config`` describes; None without one.

    Raises:
        MoesaicError: the format is not supported.
    """
    if not config:
        return None
    method = _method_of(config)
    if method not in FORMATS:
        raise MoesaicError(
            f"This checkpoint's weights are in the format {method!r}, which is not read; "
            f"{', '.join(FORMATS)} are. Dequantise it first."
        )
    with reading(FIELD):
        format = FORMATS[method](config)
        format.check_settings()
    return format


def _method_of(config: JSON) -> str:
    """Return the name of the format that a ``quantization_config`` describes.

    ModelOpt's names itself as the producer, or an algorithm instead of a method; MLX's has no name.

    >>> _method_of({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}), _method_of({"bits": 4})
    ('modelopt', 'mlx')
    >>> _method_of({"producer": {"name": "modelopt"}})
    'modelopt'
    """
    producer = config.get("producer")
    named = producer.get("name") if isinstance(producer, dict) else None
    if named == MODELOPT or any(key.endswith("quant_algo") for key in config):
        return MODELOPT
    if (method := config.get("quant_method")) is not None:
        return str(method)
    return next((name for key, name in UNNAMED.items() if key in config), "without a name")


def _format_settings(config: Values, folder: Path) -> JSON:
    """Return the settings of the format of a folder's weights; empty if there are none.

    Args:
        config: content of ``config.json``, whose language model may have settings of its own.
        folder: the model's, which may hold ModelOpt's file.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "quantization"):  # the latter is MLX's
            if isinstance(part.get(key), dict) and part[key]:
                dtype = {k: part[k] for k in ("expert_dtype",) if k in part}
                return {**dtype, **part[key]}
    return {"quant_method": MODELOPT} if (folder / MODELOPT_FILE).is_file() else {}


def quantization_of(config: Config) -> JSON | None:
    """Return the ``quantization_config`` of a config as plain JSON; None without one."""
    quantization: Config = getattr(config, FIELD, None)
    if not hasattr(quantization, "to_dict"):
        with reading("config.json"):
            check_fields({FIELD: quantization}, {FIELD: dict | None})
    return (
        quantization
        if quantization is None or isinstance(quantization, dict)
        else cast(JSON, quantization.to_dict())
    )


T = TypeVar("T")


# --- values that remember their bytes ------------------------------------------------------------


class Packed(Tensor):
    """Tensor that is held as its stored bytes and dequantised on demand.

    Selecting whole experts, rows or blocks, and concatenating rows, works on the bytes; every other
    operation dequantises first. Stored tensors that do not fit each other raise a ValueError.
    """

    format: Format | None
    """Storage format; None where the values were changed."""
    parts: Parts
    _row: bool
    _changed_values: Tensor | None

    @staticmethod
    def __new__(cls, format: Format, parts: Parts, row: bool = False) -> Packed:
        shape = format.check(parts)
        device = next(iter(parts.values())).device
        tensor: Packed = Tensor._make_wrapper_subclass(
            cls, shape[1:] if row else shape, dtype=torch.float32, device=device
        )
        tensor.format, tensor.parts, tensor._row, tensor._changed_values = format, parts, row, None
        return tensor

    @property
    def plain(self) -> Tensor:
        """Dequantised values, float32."""
        if self._changed_values is not None or self.format is None:
            return cast(Tensor, self._changed_values)
        values = self.format.values(self.parts)
        return values[0] if self._row else values

    @property
    def stack(self) -> bool:
        """True for weights (E, ...) that each have bytes of their own."""
        return self.format is not None and not self._row and self.dim() > 2

    def weight_at(self, index: int) -> Packed:
        """Return one weight of a stack (E, ...), with its own bytes."""
        assert self.format is not None
        i = range(self.shape[0])[index]
        return Packed(self.format, {e: part[i : i + 1] for e, part in self.parts.items()}, row=True)

    def __iter__(self) -> Iterator[Tensor]:
        yield from map(self.weight_at, range(self.shape[0])) if self.stack else self.plain

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Values | None = None,
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            if func in PROPERTIES:
                return func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            if name.endswith("_") and not name.startswith("_") and isinstance(args[0], Packed):
                args[0]._changed_values = args[0].plain
                args[0].format = None  # its values change
            carried = None
            if func is Tensor.__getitem__ and isinstance(args[1], int) and args[0].stack:
                carried = args[0].weight_at(args[1])
            elif func is Tensor.index_select:
                carried = _chosen(*args)
            elif func is torch.stack and len(args) == 1 and not kwargs:
                carried = _stacked(args[0])
            elif func is Tensor.to and isinstance(args[1], torch.dtype) and len(args) == 2:
                carried = _cast(*args)
            return func(*_plain(args), **_plain(kwargs or {})) if carried is None else carried

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Values | None = None,
    ) -> object:
        """Run any other operation of torch on dequantised values."""
        return func(*_plain(args), **_plain(kwargs or {}))


_SIZES = ("shape", "dtype", "device", "ndim", "is_meta", "requires_grad", "layout")
PROPERTIES = {
    *(getattr(Tensor, name).__get__ for name in _SIZES),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
}
"""Properties of a tensor that need no values."""


def _plain(argument: T) -> T:
    """Return arguments with packed weights dequantised."""
    plain: object = argument
    if isinstance(argument, Packed):
        plain = argument.plain
    elif isinstance(argument, dict):
        plain = {name: _plain(value) for name, value in argument.items()}
    elif type(argument) in (list, tuple):
        parts = map(_plain, cast("list[object]", argument))
        plain = tuple(parts) if isinstance(argument, tuple) else [*parts]
    return cast(T, plain)


def _chosen(source: Tensor, axis: int, order: Tensor) -> Tensor | None:
    """Return the chosen part of a weight, as bytes if possible; None if the weight has no bytes."""
    if not isinstance(source, Packed) or source.format is None:
        return None
    axis = axis % source.dim() - source.dim()
    parts = source.format.select(source.parts, axis, order)
    if parts is not None:
        return Packed(source.format, parts, source._row)
    return source.plain.index_select(axis, order)


def _cast(source: Packed, dtype: torch.dtype) -> Tensor | None:
    """Dequantise a stack (E, ...) to a type, expert by expert; None for any other tensor."""
    if not source.stack:
        return None
    values = torch.empty(source.shape, dtype=dtype, device=source.device)
    for row, place in zip(source, values, strict=True):
        place.copy_(row)
    return values


def _stacked(rows: Sequence[Tensor]) -> Packed | None:
    packed = [row for row in rows if isinstance(row, Packed) and row._row and row.format]
    if not packed or len(packed) < len(rows):
        return None
    carried = [row.parts for row in packed]
    parts = {end: _joined([part[end] for part in carried]) for end in carried[0]}
    return Packed(cast(Format, packed[0].format), parts)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, also of types of one byte, which ``cat`` does not support."""
    if parts[0].element_size() > 1:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


# --- checkpoints ---------------------------------------------------------------------------------


class QuantisedCheckpoint(Checkpoint):
    """Quantised checkpoint whose weights are read by their plain names, as values.

    Raises:
        MoesaicError: codes are without scales, scales without codes, or they do not fit.
    """

    def __init__(self, folder: Path, format: Format, dtype: torch.dtype) -> None:
        super().__init__(folder)
        self.format, self._dtype = format, dtype
        self.plain: set[str] = set()
        """Modules of which an unquantised weight was written."""
        self.moved: dict[str, str] = {}
        """New names of single experts' modules that are not quantised, by old names."""
        stored_names = super().names()
        self._parts: dict[str, dict[str, str]] = {}
        self._formats: dict[str, Format] = {}
        with reading(folder):
            weights = list(format.weights({n: s.kind for n, s in self._stored.items()}))
        for weight, ends in weights:
            stored = {end: stored_name(weight, end) for end in ends}
            missing = [part for part in stored.values() if part not in self._stored]
            if missing:
                raise MoesaicError(
                    f"{folder} has no tensor {missing[0]!r}, and {weight} cannot be read without "
                    f"it ({format.method})."
                )
            if weight in self._stored and weight not in stored.values():
                raise MoesaicError(
                    f"{folder} has {weight} twice: as it is, and as {', '.join(stored.values())}."
                )
            self._parts[weight] = stored
            self._formats[weight] = format.of(self._stored[stored[ends[0]]].kind)
            self.shape(weight)
        owned = {part: w for w, parts in self._parts.items() for part in parts.values()}
        self._names = list(dict.fromkeys(owned.get(name, name) for name in stored_names))

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def names(self) -> list[str]:
        return self._names

    def tensor(self, name: str) -> Tensor:
        stored = self._parts.get(name)
        if stored is None:
            return super().tensor(name)
        parts = {end: super(QuantisedCheckpoint, self).tensor(p) for end, p in stored.items()}
        with reading(f"{name} in {self.folder}"):
            return Packed(self._formats[name], parts)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._parts.get(name)
        if stored is None:
            return super().shape(name)
        with reading(f"{name} in {self.folder}"):
            shapes = {end: tuple(self._stored[part].shape) for end, part in stored.items()}
            return self._formats[name].shape(shapes)

    def is_floating(self, name: str) -> bool:
        return name in self._parts or super().is_floating(name)

    def stored(self, name: str) -> Iterator[tuple[str, Stored]]:
        self._note(name, name)
        for part in self._parts.get(name, {"": name}).values():
            yield part, self._place(part)

    def _note(self, name: str, origin: str) -> None:
        if expert_number(origin) is not None and origin not in self._parts:
            self.moved[origin.rpartition(".")[0]] = name.rpartition(".")[0]

    def encode(self, name: str, tensor: Tensor, origin: str) -> Iterator[tuple[str, Tensor]]:
        """Yield a weight's stored tensors: unchanged if it was only moved, else quantised again.

        Weights that the format cannot hold, and new ones, are written in the checkpoint's
        floating-point type; weights that were not quantised keep their own.
        """
        self._note(name, origin)
        if isinstance(tensor, Packed) and tensor.format is not None:
            for end, part in tensor.parts.items():
                yield stored_name(name, end), part
            return
        tensor = tensor.as_subclass(Tensor)
        stored = self._parts.get(origin)
        if stored is not None:
            like = {end: super(QuantisedCheckpoint, self).tensor(p) for end, p in stored.items()}
            try:
                for end, part in self._formats[origin].parts(tensor, like).items():
                    yield stored_name(name, end), part
                return
            except ValueError as error:
                if self.format.whole and ".experts." in name:
                    raise MoesaicError(
                        f"{name}: {error}; choose a width that they divide."
                    ) from error
        if stored is not None or (origin not in self._stored and tensor.dtype == torch.float32):
            tensor = tensor.to(self._dtype)
            if tensor.dim() > 1:
                self.plain.add(_module_of(name))
        yield name, tensor


class LazyWeight:
    """Weight of a checkpoint that is read when it is sliced, like safetensors' slices."""

    _one = Lock()

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, index: EllipsisType) -> Tensor:
        with self._one:  # transformers reads several at a time, a checkpoint opens one file
            tensor: Tensor = self._checkpoint.tensor(self._name).as_subclass(Tensor)[index]
            return tensor


def _module_of(name: str) -> str:
    """Return the module of a weight; all experts of a layer are one module.

    >>> _module_of("model.layers.1.mlp.experts.3.up_proj.weight"), _module_of("lm_head.weight")
    ('model.layers.1.mlp.experts', 'lm_head')
    """
    before, experts, _ = name.partition(".experts.")
    return before + ".experts" if experts else name.rpartition(".")[0]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the checkpoint of a folder in the format that its config names.

    Raises:
        MoesaicError: it is damaged, its format is not supported, or its config names none and a
            weight is quantised all the same.
    """
    file = folder / "config.json"
    config = mapping_of(file) if file.is_file() else {}
    format = format_of(_format_settings(config, folder))
    if format is None:
        checkpoint = Checkpoint(folder)
        for name, stored in checkpoint._stored.items():
            packed = stored.kind in CODES and re.search(r"weight(_packed)?$|_blocks$", name)
            if stored.kind.startswith("F8") or packed:
                raise MoesaicError(
                    f"{name} in {folder} is stored as {stored.kind}, and config.json names no "
                    f"format by which it could be read; {', '.join(FORMATS)} are. Dequantise it "
                    "first."
                )
        return checkpoint
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."), torch.bfloat16)
    return QuantisedCheckpoint(folder, format, dtype)


def describe_format(config: Config, checkpoint: Checkpoint, kept: bool) -> None:
    """Write the storage format of a result's weights into its config, in place.

    Args:
        config: of the result.
        checkpoint: the source, after everything was written from it.
        kept: the source's format was kept; otherwise no weight is quantised.
    """
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return
    if not kept:
        for name in QUANTIZATION & vars(config).keys():
            delattr(config, name)
    else:
        settings = checkpoint.format.leaving(checkpoint.plain, checkpoint.moved)
        if settings != checkpoint.format.config:
            config.quantization_config = settings
