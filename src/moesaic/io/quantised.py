"""Checkpoints of few bits a weight: read as values, kept as bytes.

Two formats, as transformers loads them: FP8 with a scale for every block of a matrix
(``weight_scale_inv``: DeepSeek-V3, Qwen3-FP8), and MXFP4 (``_blocks`` and ``_scales``: gpt-oss), by
the OCP Microscaling specification 1.0. A weight that is only moved or chosen from carries its bytes
along (:class:`Packed`), so that what is written is what was read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Config, Values
from moesaic.io.checkpoint import Checkpoint
from moesaic.io.headers import mapping_of

Parts = Mapping[str, Tensor]
"""A weight's stored tensors by what their names end with."""
FP8 = torch.float8_e4m3fn
EXPONENTS = 127
"""What is added to an exponent of two that is stored in a byte."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1; the fourth bit is the sign."""


class Format(ABC):
    """A way to store matrices in few bits.

    Args:
        said: ``quantization_config`` of a checkpoint's config.
    """

    method: ClassVar[str]
    whole: ClassVar[bool] = False
    """Matrices of one module are all in the format, or none."""
    ends: ClassVar[tuple[str, str]]
    """Ends of the names of codes and of scales, beyond the weight's own name."""

    def __init__(self, said: JSON) -> None:
        self.said = said

    @abstractmethod
    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of the values.

        Raises:
            ValueError: the scales do not fit the codes.
        """

    @abstractmethod
    def values(self, parts: Parts) -> Tensor:
        """The values, float32."""

    @abstractmethod
    def parts(self, values: Tensor, like: Parts) -> Parts:
        """Values in this format, each block with the scale that its largest value asks for.

        Args:
            values: of a shape that whole blocks fill.
            like: a weight of the same checkpoint, whose types are taken over.

        Raises:
            ValueError: blocks do not divide the shape.
        """

    @abstractmethod
    def chosen(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        """The parts of ``values.index_select(axis, order)``; None where it cuts through blocks.

        Args:
            parts: the weight's.
            axis: of the values, counted from the end: -1, -2 or -3.
            order: int64.
        """


class BlockScaled(Format):
    """FP8 (E4M3) matrices (..., O, I), each block of which is multiplied by its scale."""

    method = "fp8"
    ends = ("", "_scale_inv")

    def __init__(self, said: JSON) -> None:
        super().__init__(said)
        if said.get("activation_scheme", "dynamic") != "dynamic":
            raise MoesaicError("FP8 with static activation scales is not read; dynamic is.")
        if said.get("expert_dtype", "fp8") != "fp8":
            raise MoesaicError(f"FP8 with experts in {said['expert_dtype']} is not read.")

    def block(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a block."""
        rows, columns = self.said.get("weight_block_size") or shape[-2:]
        return int(rows), int(columns)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        whole, scales = (shapes[end] for end in self.ends)
        if len(whole) < 2:
            raise ValueError("it is no matrix")
        rows, columns = self.block(whole)
        grid = (*whole[:-2], -(-whole[-2] // rows), -(-whole[-1] // columns))
        if prod(scales) != prod(grid) or (len(scales) > 1 and scales != grid):
            raise ValueError(
                f"blocks of {rows} x {columns} need scales of {_spoken(grid)}, and they are of "
                f"{_spoken(scales)}"
            )
        return whole

    def values(self, parts: Parts) -> Tensor:
        codes, scales = (parts[end] for end in self.ends)
        self.shape({end: tuple(t.shape) for end, t in parts.items()})
        rows, columns = self.block(codes.shape)
        grid = _scales(scales)
        if grid.dim() < 2:
            grid = grid.view(*[1] * codes.dim())
        wide = grid.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        return codes.float() * wide[..., : codes.shape[-2], : codes.shape[-1]]

    def parts(self, values: Tensor, like: Parts) -> Parts:
        rows, columns = self.block(values.shape)
        if values.shape[-2] % rows or values.shape[-1] % columns:
            raise ValueError(f"blocks of {rows} x {columns} do not divide {_spoken(values.shape)}")
        blocks = values.float().unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        most = blocks.abs().amax((-3, -1))
        scales = torch.where(most > 0, most / torch.finfo(FP8).max, torch.ones_like(most))
        kind = like[self.ends[1]].dtype
        if kind in (torch.uint8, torch.float8_e8m0fnu):
            scales = scales.log2().ceil().exp2()
        codes = blocks / scales.unsqueeze(-1).unsqueeze(-3)
        most_fp8 = torch.finfo(FP8).max
        codes = codes.clamp(-most_fp8, most_fp8).to(FP8).view(values.shape)
        stored = (scales.log2() + EXPONENTS).to(kind) if kind == torch.uint8 else scales.to(kind)
        return {self.ends[0]: codes, self.ends[1]: stored.view(_like(stored, like[self.ends[1]]))}

    def chosen(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        codes, scales = (parts[end] for end in self.ends)
        taken = _rows(codes, axis, order)
        if axis < -2:
            return {self.ends[0]: taken, self.ends[1]: _rows(scales, axis, order)}
        if scales.dim() < 2:
            return {self.ends[0]: taken, self.ends[1]: scales}
        blocks = whole_blocks(order, self.block(codes.shape)[axis])
        if blocks is None:
            return None
        return {self.ends[0]: taken, self.ends[1]: _rows(scales, axis, blocks)}


class Microscaled(Format):
    """MXFP4 experts: values (E, I, O); codes (E, O, G, 16), two a byte, scales (E, O, G)."""

    method = "mxfp4"
    whole = True
    ends = ("_blocks", "_scales")
    group: ClassVar[int] = 32

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        codes, scales = (shapes[end] for end in self.ends)
        if len(codes) != 4 or codes[-1] != self.group // 2 or codes[:-1] != scales:
            raise ValueError(
                f"blocks of {_spoken(codes)} do not fit scales of {_spoken(scales)}: 16 bytes each"
            )
        return codes[0], codes[2] * self.group, codes[1]

    def values(self, parts: Parts) -> Tensor:
        codes, scales = (parts[end] for end in self.ends)
        self.shape({end: tuple(t.shape) for end, t in parts.items()})
        table = torch.tensor([*FP4, *(-v for v in FP4)], device=codes.device)
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
        found = torch.ldexp(table[both], scales.int().unsqueeze(-1) - EXPONENTS)
        return found.flatten(-2).transpose(1, 2).contiguous()

    def parts(self, values: Tensor, like: Parts) -> Parts:
        if values.shape[1] % self.group:
            raise ValueError(f"blocks of {self.group} do not divide {_spoken(values.shape)}")
        blocks = values.float().transpose(1, 2).unflatten(-1, (-1, self.group))
        most = blocks.abs().amax(-1)
        powers = torch.floor(torch.log2(most.clamp(min=torch.finfo(torch.float32).tiny)))
        powers = (powers - 2).clamp(-EXPONENTS, EXPONENTS)  # the largest E2M1 is 1.5 times 2^2
        magnitudes = torch.ldexp(blocks.abs(), -powers.int().unsqueeze(-1)).contiguous()
        middles = torch.tensor([(a + b) / 2 for a, b in pairwise(FP4)])
        codes = torch.bucketize(magnitudes, middles.to(values.device))
        # halfway between two, the one with an even code
        low = torch.bucketize(magnitudes, middles.to(values.device), right=True)
        codes = torch.where((codes != low) & (codes % 2 == 1), low, codes)
        codes = (codes + 8 * (blocks < 0)).to(torch.uint8)
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        return {self.ends[0]: packed, self.ends[1]: (powers + EXPONENTS).to(torch.uint8)}

    def chosen(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        if axis == -2:
            blocks = whole_blocks(order, self.group)
            if blocks is None:
                return None
            return {end: _rows(part, 2, blocks) for end, part in parts.items()}
        return {end: _rows(part, 0 if axis == -3 else 1, order) for end, part in parts.items()}


FORMATS: dict[str, type[Format]] = {kind.method: kind for kind in (BlockScaled, Microscaled)}


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
            f"{' and '.join(FORMATS)} are. Dequantise it first."
        )
    return FORMATS[method](said)


def said_of(config: Config) -> JSON | None:
    """The ``quantization_config`` of a config as plain JSON."""
    said: Config = getattr(config, "quantization_config", None)
    return said if said is None or isinstance(said, dict) else cast(JSON, said.to_dict())


def _spoken(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _scales(stored: Tensor) -> Tensor:
    """Scales as numbers: exponents of two are stored in bytes."""
    if stored.dtype == torch.uint8:
        return torch.exp2(stored.float() - EXPONENTS)
    return stored.float()


def _like(tensor: Tensor, like: Tensor) -> list[int]:
    return list(tensor.shape) if like.dim() >= 2 else list(like.shape)


def _rows(tensor: Tensor, axis: int, order: Tensor) -> Tensor:
    """``index_select`` for types of one byte too."""
    order = order.to(tensor.device)
    if tensor.element_size() > 1:
        return tensor.index_select(axis, order)
    return tensor.view(torch.uint8).index_select(axis, order).view(tensor.dtype)


def whole_blocks(order: Tensor, size: int) -> Tensor | None:
    """The blocks that an order consists of, in its order; None if it cuts through one.

    >>> whole_blocks(torch.tensor([4, 5, 0, 1]), 2), whole_blocks(torch.tensor([1, 2]), 2)
    (tensor([2, 0]), None)
    """
    if len(order) % size:
        return None
    runs = order.view(-1, size)
    first = runs[:, :1]
    same = (runs == first + torch.arange(size, device=order.device)).all()
    return first.flatten() // size if same and not (first % size).any() else None


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
        codes, scales = format.ends
        there = super().names()
        packed = [name for name in there if name.endswith(scales)]
        if codes:
            packed += [name.removesuffix(codes) + scales for name in there if name.endswith(codes)]
        else:
            packed += [name + scales for name in there if self._types[name] == "F8_E4M3"]
        self._parts: dict[str, dict[str, str]] = {}
        for name in dict.fromkeys(packed):
            weight = name.removesuffix(scales)
            stored = {end: weight + end for end in format.ends}
            missing = [part for part in stored.values() if part not in self._files]
            if missing:
                raise MoesaicError(
                    f"{folder} has no tensor {missing[0]!r}, and {weight} cannot be read without "
                    f"it ({format.method})."
                )
            if not codes and self._types[weight] != "F8_E4M3":
                raise MoesaicError(
                    f"{weight} in {folder} has scales and is stored as {self._types[weight]}, "
                    "which is not read; F8_E4M3 is."
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
        return Packed.of(
            self.format,
            {end: super(QuantisedCheckpoint, self).tensor(part) for end, part in stored.items()},
        )

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
        said = dict(said_of(config) or {})
        before = said.get("modules_to_not_convert") or []
        said["modules_to_not_convert"] = sorted({*before, *checkpoint.plain})
        config.quantization_config = said
