"""Checkpoints of few bits a weight: read as values, kept as bytes.

A weight that is only moved or chosen from carries its bytes along (:class:`Packed`), so that what
is written is what was read. :mod:`moesaic.io.formats` has the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Config, Values
from moesaic.io.checkpoint import Checkpoint
from moesaic.io.formats import BlockScaled, Compressed, Format, Microscaled, Parts
from moesaic.io.headers import mapping_of

FORMATS: dict[str, type[Format]] = {
    kind.method: kind for kind in (BlockScaled, Microscaled, Compressed)
}


def format_of(said: JSON | None) -> Format | None:
    """The format that a ``quantization_config`` describes; None without one.

    Raises:
        MoesaicError: it is none that is read.
    """
    if not said:
        return None
    method = str(said.get("quant_method"))
    if method not in FORMATS:
        raise MoesaicError(
            f"This checkpoint's weights are in the format {method!r}, which is not read; "
            f"{', '.join(FORMATS)} are. Dequantise it first."
        )
    return FORMATS[method](said)


def said_of(config: Config) -> JSON | None:
    """The ``quantization_config`` of a config as plain JSON."""
    said: Config = getattr(config, "quantization_config", None)
    return said if said is None or isinstance(said, dict) else cast(JSON, said.to_dict())


# --- values that remember their bytes ------------------------------------------------------------


class Packed(Tensor):
    """A weight's values, with the bytes that it is stored in.

    Choosing whole experts, rows or blocks chooses among the bytes too; every other operation makes
    an ordinary tensor.
    """

    format: Format | None
    parts: Parts

    @classmethod
    def of(cls, format: Format, parts: Parts) -> Packed:
        """The values of a stored weight."""
        return _carrying(format.values(parts), format, parts)

    def __iter__(self) -> Iterator[Tensor]:
        for i, values in enumerate(self.as_subclass(Tensor).unbind(0)):
            if self.format is None:
                yield values
            else:
                parts = {end: part[i : i + 1] for end, part in self.parts.items()}
                yield _carrying(values, self.format, parts)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Values | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.startswith("_") and isinstance(args[0], Packed):
            args[0].format = None  # its values changed
            return made
        if func is Tensor.index_select:
            return _chosen(made, *args)
        if func is torch.stack:
            return _stacked(made, args[0])
        return made.as_subclass(Tensor) if isinstance(made, Packed) else made


def _carrying(values: Tensor, format: Format, parts: Parts) -> Packed:
    packed = values.as_subclass(Packed)
    packed.format, packed.parts = format, parts
    return packed


def _chosen(made: Tensor, source: Packed, axis: int, order: Tensor) -> Tensor:
    if source.format is None:
        return made
    parts = source.format.chosen(source.parts, axis % source.dim() - source.dim(), order)
    return made if parts is None else _carrying(made, source.format, parts)


def _stacked(made: Tensor, rows: Sequence[Tensor]) -> Tensor:
    first = rows[0]
    if not all(isinstance(row, Packed) and row.format is not None for row in rows):
        return made
    carried = [cast(Packed, row).parts for row in rows]
    if any(part.shape[:1] != (1,) for parts in carried for part in parts.values()):
        return made  # they were matrices, not rows of one tensor
    parts = {end: _joined([part[end] for part in carried]) for end in carried[0]}
    return _carrying(made, cast(Format, cast(Packed, first).format), parts)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """``cat`` for types of one byte too."""
    if parts[0].element_size() > 1:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


# --- checkpoints ---------------------------------------------------------------------------------


class QuantisedCheckpoint(Checkpoint):
    """A checkpoint whose weights have their own names and values, whatever they are stored as.

    Raises:
        MoesaicError: codes are without scales, scales without codes, or they do not fit.
    """

    def __init__(self, folder: Path, format: Format, dtype: torch.dtype) -> None:
        super().__init__(folder)
        self.format, self.dtype = format, dtype
        self.plain: set[str] = set()
        """Modules of which something was written that is in no format."""
        there = super().names()
        self._parts: dict[str, dict[str, str]] = {}
        try:
            weights = list(format.found(self._types))
        except ValueError as error:
            raise MoesaicError(f"{folder} cannot be read: {error}.") from error
        for weight, ends in weights:
            stored = {end: weight + end for end in ends}
            missing = [part for part in stored.values() if part not in self._files]
            if missing:
                raise MoesaicError(
                    f"{folder} has no tensor {missing[0]!r}, and {weight} cannot be read without "
                    f"it ({format.method})."
                )
            self._parts[weight] = stored
            self.shape(weight)
        owned = {part: w for w, parts in self._parts.items() for part in parts.values()}
        self._names = list(dict.fromkeys(owned.get(name, name) for name in there))

    def names(self) -> list[str]:
        return self._names

    def tensor(self, name: str) -> Tensor:
        stored = self._parts.get(name)
        if stored is None:
            return super().tensor(name)
        parts = {end: super(QuantisedCheckpoint, self).tensor(p) for end, p in stored.items()}
        try:
            return Packed.of(self.format, parts)
        except ValueError as error:
            raise MoesaicError(f"{name} in {self.folder} cannot be read: {error}.") from error

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._parts.get(name)
        if stored is None:
            return super().shape(name)
        try:
            return self.format.shape({end: self._shapes[part] for end, part in stored.items()})
        except ValueError as error:
            raise MoesaicError(f"{name} in {self.folder} cannot be read: {error}.") from error

    def is_floating(self, name: str) -> bool:
        return name in self._parts or super().is_floating(name)

    def stored(self, name: str) -> Iterator[tuple[str, Tensor]]:
        for part in self._parts.get(name, {"": name}).values():
            yield part, super().tensor(part)

    def written(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A weight's stored tensors: as they were if it only moved, else in the same format.

        What the format cannot hold, and what is new, stays in the checkpoint's floating-point type.
        """
        if isinstance(tensor, Packed) and tensor.format is not None:
            for end, part in tensor.parts.items():
                yield name + end, part
            return
        tensor = tensor.as_subclass(Tensor)
        stored = self._parts.get(name)
        if stored is not None:
            like = {end: super(QuantisedCheckpoint, self).tensor(p) for end, p in stored.items()}
            try:
                for end, part in self.format.parts(tensor, like).items():
                    yield name + end, part
                return
            except ValueError as error:
                if self.format.whole:
                    raise MoesaicError(
                        f"{name}: {error}; choose a width that they divide."
                    ) from error
        if stored is not None or (name not in self._files and tensor.dtype == torch.float32):
            tensor = tensor.to(self.dtype)
            if tensor.dim() > 1:
                self.plain.add(module_of(name))
        yield name, tensor


class Awaited:
    """A weight of a checkpoint that is read when it is asked for, as slices of safetensors are."""

    _one = Lock()

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, index: Any) -> Tensor:
        with self._one:  # transformers reads several at a time, a checkpoint opens one file
            found: Tensor = self._checkpoint.tensor(self._name).as_subclass(Tensor)[index]
            return found


def module_of(name: str) -> str:
    """The module of a weight, the experts as one.

    >>> module_of("model.layers.1.mlp.experts.3.up_proj.weight"), module_of("lm_head.weight")
    ('model.layers.1.mlp.experts', 'lm_head')
    """
    before, experts, _ = name.partition(".experts.")
    return before + ".experts" if experts else name.rpartition(".")[0]


def opened(folder: Path) -> Checkpoint:
    """The checkpoint of a folder, by the format that its config says.

    Raises:
        MoesaicError: it is damaged, or of a format that is not read.
    """
    file = folder / "config.json"
    said = mapping_of(file) if file.is_file() else {}
    format = format_of(said.get("quantization_config"))
    if format is None:
        return Checkpoint(folder)
    name = str(said.get("dtype") or said.get("torch_dtype") or "bfloat16")
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."), torch.bfloat16)
    return QuantisedCheckpoint(folder, format, dtype)


def settle(config: Config, checkpoint: Checkpoint, kept: bool) -> None:
    """Say in a result's config what its weights are stored as, in place.

    Args:
        config: of the result.
        checkpoint: the source, after all was written from it.
        kept: its format was kept; otherwise all weights are plain.
    """
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return
    if not kept:
        del config.quantization_config
    elif checkpoint.plain:
        config.quantization_config = checkpoint.format.leaving(checkpoint.plain)
