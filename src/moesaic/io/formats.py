"""Ways to store matrices in few bits: codes, and a scale for every block of them.

FP8 with a scale for every block of a matrix (``weight_scale_inv``: DeepSeek-V3, Qwen3-FP8;
``scale``: DeepSeek-V4), MXFP4 by the OCP Microscaling specification 1.0 (``_blocks`` and
``_scales``: gpt-oss; ``weight`` and ``scale``: DeepSeek-V4's experts), and compressed-tensors
(``weight_packed`` or ``weight``, and ``weight_scale``: llm-compressor, Kimi-K2).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.types import JSON

Parts = Mapping[str, Tensor]
"""A weight's stored tensors by what their names end with."""
FP8 = torch.float8_e4m3fn
EXPONENTS = 127
"""The number that is added to an exponent of two to store it in a byte."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1; the fourth bit is the sign."""


def stored_name(weight: str, end: str) -> str:
    """The name of a weight's stored tensor; an end with a dot takes the place of the last part.

    >>> stored_name("ffn.w1.weight", "_scale_inv"), stored_name("ffn.w1.weight", ".scale")
    ('ffn.w1.weight_scale_inv', 'ffn.w1.scale')
    """
    return weight.rpartition(".")[0] + end if end.startswith(".") else weight + end


OTHERWISE = ("ignored_layers",)
"""Keys by which other programs list modules that are in no format."""
_ONE_EXPERT = re.compile(r"(?<=experts)\\?\.[(\[]?\d+")


def _renumbered(entry: str, moved: Mapping[str, str]) -> list[str]:
    """An entry of a list of modules, by the numbers that single experts have in a result.

    Args:
        entry: a module, or a regular expression behind ``re:``.
        moved: by their names before, what such modules are called now.

    >>> moved = {"layers.1.experts.5.up": "layers.1.experts.2.up"}
    >>> [_renumbered(f"layers.1.experts.{i}", moved) for i in (5, 6)]
    [['layers.1.experts.2'], []]
    """
    if not _ONE_EXPERT.search(entry):
        return [entry]
    if entry.startswith("re:"):
        try:
            pattern = re.compile(entry.removeprefix("re:"))
        except re.error:  # which nobody can have gone by
            return [entry]
        return sorted({new for old, new in moved.items() if pattern.match(old)})
    here = [new for old, new in moved.items() if f".{entry}." in f".{old}."]
    numbers = dict.fromkeys(match.group() for new in here if (match := _ONE_EXPERT.search(new)))
    return [_ONE_EXPERT.sub(number, entry) for number in numbers]


class Format(ABC):
    """A way to store matrices in few bits.

    Args:
        config: ``quantization_config`` of a checkpoint's config.
    """

    method: ClassVar[str]
    whole: ClassVar[int] = 0
    """Matrices of one module are all in the format, or none: widths must be a multiple of this."""
    ends: ClassVar[tuple[str, ...]]
    """Ends of the names of a weight's stored tensors: of codes, of scales (:func:`stored_name`)."""
    plainly: ClassVar[str] = "modules_to_not_convert"
    """The key of a config that lists modules that are in no format."""

    def __init__(self, config: JSON) -> None:
        self.config = config

    @property
    @abstractmethod
    def columns(self) -> int:
        """Neighbouring columns of a down projection that share scales; 0 where all do."""

    @abstractmethod
    def weights(self, types: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The weights that are in the format, and the ends of their stored tensors' names.

        Args:
            types: of all stored tensors, by name, as safetensors calls them.

        Raises:
            ValueError: codes are of a type that is not read.
        """

    @abstractmethod
    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of the values.

        Raises:
            ValueError: the scales do not fit the codes.
        """

    def check_settings(self) -> None:
        """Refuse a config whose settings are of other types than they are said to be.

        Raises:
            ValueError, TypeError: names one.
        """
        if self.columns < 0:
            raise ValueError(f"{self.columns} columns share a scale")
        self.leaving((), {})

    def of(self, kind: str) -> Format:
        """The format of the weights whose codes are of a type, as safetensors calls it."""
        return self

    def check(self, parts: Parts) -> None:
        """Refuse parts that do not fit.

        Raises:
            ValueError: says how.
        """
        self.shape({end: tuple(part.shape) for end, part in parts.items()})

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

    def leaving(self, modules: Collection[str], moved: Mapping[str, str]) -> JSON:
        """A config's words of a checkpoint in which some modules are in no format.

        Args:
            modules: their names; experts are one.
            moved: those of single experts that were in none before, and what they are called now.
        """
        said = dict(self.config)
        for key in (key for key in (self.plainly, *OTHERWISE) if said.get(key)):
            said[key] = [new for entry in said[key] for new in _renumbered(str(entry), moved)]
        more = {*modules} - {*(said.get(self.plainly) or ())}
        if more:
            said[self.plainly] = sorted({*(said.get(self.plainly) or ()), *more})
        return said

    @abstractmethod
    def chosen(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        """The parts of ``values.index_select(axis, order)``; None where it cuts through blocks.

        Args:
            parts: the weight's.
            axis: of the values, counted from the end: -1, -2 or -3.
            order: int64.
        """


class BlockScaled(Format):
    """FP8 (E4M3) matrices (..., O, I), each block of which is multiplied by its scale.

    Experts may be in FP4 (``expert_dtype``), :class:`Halved`.
    """

    method = "fp8"
    ends = ("", "_scale_inv")
    beside: ClassVar[tuple[str, ...]] = ("", ".scale")
    """The ends in DeepSeek-V4."""

    def __init__(self, config: JSON) -> None:
        super().__init__(config)
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise MoesaicError("FP8 with static activation scales is not read; dynamic is.")
        experts = config.get("expert_dtype") or "fp8"
        if experts not in ("fp8", "fp4"):
            raise MoesaicError(f"FP8 with experts in {experts} is not read; in fp8 or fp4 it is.")
        self.halves = experts == "fp4"

    @property
    def columns(self) -> int:
        return GROUP if self.halves else int((self.config.get("weight_block_size") or (0, 0))[1])

    def of(self, kind: str) -> Format:
        return Halved(self.config) if kind == "I8" else self

    def weights(self, types: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        read = ("F8_E4M3", "I8") if self.halves else ("F8_E4M3",)
        scaled = {n.removesuffix(self.ends[1]) for n in types if n.endswith(self.ends[1])}
        others = {
            n for n in types if n.endswith(".weight") and stored_name(n, self.beside[1]) in types
        }
        for name, kind in types.items():
            if kind == "F8_E4M3" or name in scaled or name in others:
                if kind not in read:
                    raise ValueError(
                        f"{name} has scales and is stored as {kind}, which is not read; "
                        f"{' and '.join(read)} are"
                    )
                yield name, self.beside if name in others else self.ends
        for name in sorted(scaled - {*types}):
            yield name, self.ends

    def check_settings(self) -> None:
        super().check_settings()
        if min(self.block((1, 1))) < 1:
            raise ValueError(f"weight_block_size is {self.config['weight_block_size']}")

    def block(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a block."""
        rows, columns = self.config.get("weight_block_size") or shape[-2:]
        return int(rows), int(columns)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        whole, scales = shapes.values()
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
        codes, scales = parts.values()
        self.shape({end: tuple(t.shape) for end, t in parts.items()})
        return _blockwise(_numbers(codes), _scales(scales), self.block(codes.shape))

    def parts(self, values: Tensor, like: Parts) -> Parts:
        rows, columns = self.block(values.shape)
        if values.shape[-2] % rows or values.shape[-1] % columns:
            raise ValueError(f"blocks of {rows} x {columns} do not divide {_spoken(values.shape)}")
        (code_end, _), (scale_end, like_scales) = like.items()
        blocks = values.float().unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        most = blocks.abs().amax((-3, -1))
        scales = torch.where(most > 0, most / torch.finfo(FP8).max, torch.ones_like(most))
        kind = like_scales.dtype
        if kind in (torch.uint8, torch.float8_e8m0fnu) or self.config.get("scale_fmt") == "ue8m0":
            scales = scales.log2().ceil().exp2()
        codes = blocks / scales.unsqueeze(-1).unsqueeze(-3)
        most_fp8 = torch.finfo(FP8).max
        codes = codes.clamp(-most_fp8, most_fp8).to(FP8).view(values.shape)
        stored = (scales.log2() + EXPONENTS).to(kind) if kind == torch.uint8 else scales.to(kind)
        return {code_end: codes, scale_end: stored.view(_like(stored, like_scales))}

    def chosen(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        (code_end, codes), (scale_end, scales) = parts.items()
        if axis < -2:
            scales = _rows(scales, axis, order)
        elif scales.dim() >= 2:
            blocks = _whole_blocks(order, self.block(codes.shape)[axis])
            if blocks is None:
                return None
            scales = _rows(scales, axis, blocks)
        return {code_end: _rows(codes, axis, order), scale_end: scales}


GROUP = 32
"""Values of MXFP4 that share a scale."""


class Halved(BlockScaled):
    """MXFP4 matrices (O, I): two codes a byte (O, I/2), a scale for 32 of a row (O, I/32)."""

    def block(self, shape: Sequence[int]) -> tuple[int, int]:
        return 1, GROUP

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        (code_end, codes), (scale_end, scales) = shapes.items()
        return super().shape({code_end: (*codes[:-1], 2 * codes[-1]), scale_end: scales})

    def values(self, parts: Parts) -> Tensor:
        codes, scales = parts.values()
        values = _two_a_byte(codes.view(torch.uint8))
        return _blockwise(values, _scales(scales), (1, GROUP))

    def parts(self, values: Tensor, like: Parts) -> Parts:
        (code_end, _), (scale_end, like_scales) = like.items()
        codes, powers = _e2m1(values)
        kind = like_scales.dtype
        scales = (powers + EXPONENTS).to(torch.uint8) if kind == torch.uint8 else powers.exp2()
        return {code_end: codes.flatten(-2).view(torch.int8), scale_end: scales.to(kind)}

    def chosen(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        if axis != -1:
            return {end: _rows(part, axis, order) for end, part in parts.items()}
        blocks = _whole_blocks(order, GROUP)
        if blocks is None:
            return None
        (code_end, codes), (scale_end, scales) = parts.items()
        grouped = _rows(codes.unflatten(-1, (-1, GROUP // 2)), -2, blocks)
        return {code_end: grouped.flatten(-2), scale_end: _rows(scales, -1, blocks)}


class Microscaled(Format):
    """MXFP4 experts: values (E, I, O); codes (E, O, G, 16), two a byte, scales (E, O, G)."""

    method = "mxfp4"
    whole = GROUP
    ends = ("_blocks", "_scales")
    columns = GROUP

    def weights(self, types: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        names = (n.removesuffix(end) for n in types for end in self.ends if n.endswith(end))
        for name in dict.fromkeys(names):
            for part in (name + end for end in self.ends):
                if types.get(part, "U8") != "U8":
                    raise ValueError(f"{part} is stored as {types[part]}, which is not read; U8 is")
            yield name, self.ends

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        codes, scales = (shapes[end] for end in self.ends)
        if len(codes) != 4 or codes[-1] != GROUP // 2 or codes[:-1] != scales:
            raise ValueError(
                f"blocks of {_spoken(codes)} do not fit scales of {_spoken(scales)}: 16 bytes each"
            )
        return codes[0], codes[2] * GROUP, codes[1]

    def values(self, parts: Parts) -> Tensor:
        codes, scales = (parts[end] for end in self.ends)
        self.shape({end: tuple(t.shape) for end, t in parts.items()})
        values = _two_a_byte(codes).mul_(_scales(scales).unsqueeze(-1))
        return values.flatten(-2).transpose(1, 2).contiguous()

    def parts(self, values: Tensor, like: Parts) -> Parts:
        codes, powers = _e2m1(values.transpose(1, 2))
        return {self.ends[0]: codes, self.ends[1]: (powers + EXPONENTS).to(torch.uint8)}

    def chosen(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        if axis == -2:
            blocks = _whole_blocks(order, GROUP)
            if blocks is None:
                return None
            return {end: _rows(part, 2, blocks) for end, part in parts.items()}
        return {end: _rows(part, 0 if axis == -3 else 1, order) for end, part in parts.items()}


def _two_a_byte(codes: Tensor) -> Tensor:
    """The values of E2M1 codes, two in a byte (..., N), the lower bits first (..., 2 N); float32.

    >>> _two_a_byte(torch.tensor([[0x21, 0xF7]], dtype=torch.uint8)).tolist()
    [[0.5, 1.0, 6.0, -6.0]]
    """
    table = torch.tensor([*FP4, *(-v for v in FP4)], device=codes.device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], -1)
    return _by_pieces(lambda piece: pairs.index_select(0, piece.int()), codes, 2)


def _e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4's codes of values.

    Args:
        values: (..., I), 32 neighbours share a scale.

    Returns:
        the codes, two a byte (..., I / 32, 16), and the scales' powers of two (..., I / 32).

    Raises:
        ValueError: blocks do not divide the values.
    """
    if values.shape[-1] % GROUP:
        raise ValueError(f"blocks of {GROUP} do not divide {_spoken(values.shape)}")
    blocks = values.float().unflatten(-1, (-1, GROUP))
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
    return codes[..., ::2] | codes[..., 1::2] << 4, powers


class Compressed(Format):
    """compressed-tensors: matrices (O, I) of integers of 4 or 8 bits, packed or not, or of FP8.

    A scale is for a row, for a group of a row, for a block, or for all; integers may have a zero
    point each.
    """

    method = "compressed-tensors"
    ends = ("_packed", "_scale", "_shape")
    plain: ClassVar[tuple[str, ...]] = ("", "_scale")
    """The ends where codes are not packed."""
    zero: ClassVar[str] = "_zero_point"
    plainly = "ignore"
    layouts: ClassVar[tuple[str, ...]] = (
        "pack-quantized",
        "float-quantized",
        "int-quantized",
        "naive-quantized",
        "mixed-precision",
    )

    def __init__(self, config: JSON) -> None:
        super().__init__(config)
        groups = self._groups
        formats = {
            str(config.get("format")),
            *(str(g["format"]) for g in groups if g.get("format")),
        }
        odd = sorted(formats - {*self.layouts})
        if odd:
            raise MoesaicError(
                f"compressed-tensors of format {odd[0]!r} is not read; "
                f"{', '.join(self.layouts)} are. Dequantise it first."
            )
        if config.get("quantization_status", "compressed") != "compressed":
            status = config["quantization_status"]
            raise MoesaicError(
                f"compressed-tensors of status {status!r} is not read; compressed is."
            )
        sparse = (config.get("sparsity_config") or {}).get("format", "dense")
        if sparse != "dense" or config.get("transform_config"):
            raise MoesaicError("compressed-tensors with sparse or transformed weights is not read.")
        if any((g.get("input_activations") or {}).get("dynamic", True) is False for g in groups):
            raise MoesaicError(
                "compressed-tensors with static activation scales is not read; dynamic is."
            )
        bits = {int(w.get("num_bits", 8)) for w in self._weights if w.get("type", "int") == "int"}
        if not bits <= {4, 8} or len(bits) > 1:
            widths = " and ".join(map(str, sorted(bits)))
            raise MoesaicError(
                f"compressed-tensors with integers of {widths} bits is not read; of 4 or of 8 is."
            )
        self.bits = bits.pop() if bits else 8
        self.each = 32 // self.bits
        """Codes of a word."""

    @property
    def _groups(self) -> list[JSON]:
        """The settings of each group of modules."""
        return list((self.config.get("config_groups") or {}).values())

    @property
    def _weights(self) -> list[JSON]:
        """The settings of the weights of each group of modules."""
        return [group.get("weights") or {} for group in self._groups]

    @property
    def columns(self) -> int:
        structures = ((w.get("block_structure") or (0, 0), w) for w in self._weights)
        return max([0, *(int(w.get("group_size") or block[1]) for block, w in structures)])

    def leaving(self, modules: Collection[str], moved: Mapping[str, str]) -> JSON:
        names = {
            f"re:{re.escape(name)}\\..*" if name.endswith(".experts") else name for name in modules
        }
        return super().leaving(names, moved)

    def weights(self, types: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        packed, scale = self.ends[0], f"weight{self.ends[1]}"
        for name, kind in types.items():
            weight = name.removesuffix(packed) if name.endswith(f"weight{packed}") else name
            zero = (self.zero,) if weight + self.zero in types else ()
            if f"{weight}_g_idx" in types:
                raise ValueError(f"{weight} is in groups by activation order, which is not read")
            if weight != name:
                if kind != "I32":
                    raise ValueError(f"{name} is stored as {kind}, which is not read; I32 is")
                yield weight, (*self.ends, *zero)
            elif name.endswith(".weight") and kind in ("F8_E4M3", "I8"):
                yield weight, (*self.plain, *zero)
            elif name.endswith(f".{scale}"):
                scaled = name.removesuffix(self.ends[1])
                if scaled + packed not in types and types.get(scaled, "I8") not in (
                    "F8_E4M3",
                    "I8",
                ):
                    raise ValueError(
                        f"{scaled} has scales and is stored as {types[scaled]}, which is not read; "
                        "F8_E4M3 and I8 are"
                    )
                if scaled + packed not in types and scaled not in types:
                    yield scaled, self.ends

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        codes, scales = shapes.get("", ()), shapes["_scale"]
        if "_packed" in shapes:
            *rows, words = shapes["_packed"]
            codes = (*rows, words * self.each)
        if len(codes) != 2:
            raise ValueError("it is no matrix")
        self._block(codes, scales)
        return codes

    def _block(self, shape: Sequence[int], scales: Sequence[int]) -> tuple[int, int]:
        """Rows and columns that have a scale in common.

        Args:
            shape: of the codes (O, I).
            scales: the scales' shape.

        Raises:
            ValueError: they do not fit.
        """
        grid = (*scales, *[1] * (2 - len(scales)))
        if len(grid) == 2:
            blocks = (w.get("block_structure") for w in self._weights)
            for block in filter(None, blocks):
                if grid == tuple(-(-n // int(b)) for n, b in zip(shape, block, strict=True)):
                    return int(block[0]), int(block[1])
            if all(n % parts == 0 for n, parts in zip(shape, grid, strict=True)):
                rows, columns = (n // parts for n, parts in zip(shape, grid, strict=True))
                sizes = self._group_sizes()
                # what was narrowed to less than a group is one
                if not sizes or columns in sizes or (grid[1] == 1 and columns < max(sizes)):
                    return rows, columns
                raise ValueError(
                    f"scales of {_spoken(scales)} for {_spoken(shape)} are not for groups of "
                    f"{' or '.join(map(str, sorted(sizes)))}, which its config says"
                )
        raise ValueError(f"scales of {_spoken(scales)} do not divide {_spoken(shape)}")

    def check_settings(self) -> None:
        super().check_settings()
        blocks = [int(n) for w in self._weights for n in w.get("block_structure") or ()]
        if min([1, *self._group_sizes(), *blocks]) < 1:
            raise ValueError("a group or a block of weights has no size")

    def _group_sizes(self) -> set[int]:
        """Columns of a group, where a config says that all weights are in groups."""
        if any(w.get("strategy") != "group" or not w.get("group_size") for w in self._weights):
            return set()
        return {int(w["group_size"]) for w in self._weights}

    def _codes(self, parts: Parts) -> Tensor:
        """The codes (O, I), zero points not taken off."""
        return unpacked(parts["_packed"], self.bits) if "_packed" in parts else parts[""]

    def _zeros(self, parts: Parts) -> Tensor | None:
        """The zero points, of the scales' shape; None without any."""
        zeros = parts.get(self.zero)
        if zeros is None or "_packed" not in parts:
            return zeros
        return unpacked(zeros.T, self.bits).T[: parts["_scale"].shape[0]]

    def _stored(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, like: Parts) -> Parts:
        """The stored tensors of codes, scales and zero points."""
        parts = {"_scale": scales}
        if "_packed" not in like:
            parts |= {"": codes} if zeros is None else {"": codes, self.zero: zeros}
            return parts
        parts["_packed"] = packed(codes, self.bits)
        parts["_shape"] = torch.tensor(codes.shape, dtype=like["_shape"].dtype)
        if zeros is not None:
            missing = -zeros.shape[0] % self.each
            parts[self.zero] = packed(F.pad(zeros, (0, 0, 0, missing)).T, self.bits).T.contiguous()
        return parts

    def check(self, parts: Parts) -> None:
        super().check(parts)
        if "_packed" in parts and not parts["_shape"].is_meta:  # a header has no values
            declared = parts["_shape"].tolist()
            shape = self.shape({end: tuple(part.shape) for end, part in parts.items()})
            if tuple(declared) != shape:
                raise ValueError(
                    f"it is said to be {_spoken(declared)}, and its codes are {_spoken(shape)}"
                )

    def values(self, parts: Parts) -> Tensor:
        codes, scales, zeros = self._codes(parts), parts["_scale"].float(), self._zeros(parts)
        block = self._block(codes.shape, scales.shape)
        values = _numbers(codes)
        if zeros is not None:
            _blockwise(values, zeros.float(), block, Tensor.sub_)
        return _blockwise(values, scales, block)

    def parts(self, values: Tensor, like: Parts) -> Parts:
        before = self._codes(like)
        size = self._block(before.shape, like["_scale"].shape)
        # a scale for whole rows, or for all, is so of any number of columns
        block = [
            n if b >= old else b for n, b, old in zip(values.shape, size, before.shape, strict=True)
        ]
        rows, columns = block
        if values.shape[0] % rows or values.shape[1] % columns:
            raise ValueError(f"groups of {rows} x {columns} do not divide {_spoken(values.shape)}")
        if "_packed" in like and values.shape[1] % self.each:
            raise ValueError(f"{self.each} codes a word do not divide {_spoken(values.shape)}")
        blocks = values.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        float8 = before.dtype == FP8
        highest = 2 ** (self.bits - 1) - 1
        zeros = None
        if self.zero in like:
            low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
            scales = (high - low) / (2 * highest + 1)
        elif float8:
            scales = blocks.abs().amax((1, 3)) / torch.finfo(FP8).max
        else:
            scales = self._nearest(blocks, like["_scale"].dtype)
        scales = _positive(scales, like["_scale"].dtype)
        codes = blocks / scales.float()[:, None, :, None]
        if self.zero in like:
            zeros = (-highest - 1 - low / scales.float()).round().clamp(-highest - 1, highest)
            codes = codes + zeros[:, None, :, None]
            zeros = zeros.to(torch.int8)
        if float8:
            most_fp8 = torch.finfo(FP8).max
            codes = codes.clamp(-most_fp8, most_fp8).to(FP8)
        else:
            codes = codes.round().clamp(-highest - 1, highest).to(torch.int8)
        grid = scales.view(-1) if like["_scale"].dim() < 2 else scales
        return self._stored(
            codes.view(values.shape), grid.view(_like(grid, like["_scale"])), zeros, like
        )

    def _nearest(self, blocks: Tensor, kind: torch.dtype) -> Tensor:
        """The scale of each block (G, H) by which whole numbers are nearest to its values.

        The largest value may have any code where values were rounded before and the largest code
        went with others: only then are they met exactly again.

        Args:
            blocks: (G, rows, H, columns).
            kind: of stored scales.
        """
        highest = 2 ** (self.bits - 1) - 1
        most = blocks.abs().amax((1, 3))
        steps = [highest + 0.5, highest, highest + 1]  # the first is llm-compressor's
        steps += range(1, highest) if self.bits == 4 else ()
        best, least = most, torch.full_like(most, torch.inf)
        for step in steps:
            scales = _positive(most / step, kind)
            wide = scales.float()[:, None, :, None]
            codes = (blocks / wide).round().clamp(-highest - 1, highest)
            lost = (codes * wide - blocks).square().sum((1, 3))
            best = torch.where(lost < least, most / step, best)
            least = torch.minimum(lost, least)
        return best

    def chosen(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        codes, scales, zeros = self._codes(parts), parts["_scale"], self._zeros(parts)
        block = self._block(codes.shape, scales.shape)
        if "_packed" in parts and axis == -1 and len(order) % self.each:
            return None
        if scales.dim() == 2 and scales.shape[axis] > 1:
            blocks = _whole_blocks(order, block[axis])
            if blocks is None:
                return None
            scales = _rows(scales, axis, blocks)
            zeros = None if zeros is None else _rows(zeros, axis, blocks)
        elif scales.dim() == 1 and axis == -2 and scales.numel() > 1:
            scales = _rows(scales, 0, order)
            zeros = None if zeros is None else _rows(zeros, 0, order)
        return self._stored(_rows(codes, axis, order), scales, zeros, parts)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The integers of words of 32 bits, the lowest bits first, their offset taken off; int8.

    >>> unpacked(torch.tensor([[0x76543210]], dtype=torch.int32), 4).tolist()
    [[-8, -7, -6, -5, -4, -3, -2, -1]]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return (codes.flatten(-2) - 2 ** (bits - 1)).to(torch.int8)


def packed(codes: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`unpacked`; the last axis is a multiple of a word's codes."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    raised = (codes.int() + 2 ** (bits - 1)).unflatten(-1, (-1, len(shifts)))
    return (raised << shifts).sum(-1, dtype=torch.int32)


def _positive(scales: Tensor, kind: torch.dtype) -> Tensor:
    """Scales as they are stored; one where there is nothing to scale."""
    positive = torch.where(scales > 0, scales, torch.ones_like(scales)).to(kind)
    return positive.clamp(min=torch.finfo(kind).tiny)


PIECE = 1 << 18
"""Codes that are read at a time: what is between them and their values stays in a cache."""


def _by_pieces(read: Callable[[Tensor], Tensor], codes: Tensor, each: int = 1) -> Tensor:
    """Apply a function to codes (..., N), ``each`` values of one; float32 (..., each N)."""
    values = torch.empty(*codes.shape[:-1], each * codes.shape[-1], device=codes.device)
    if values.is_meta:
        return values
    places = values.view(-1).split(each * PIECE)
    for piece, place in zip(codes.flatten().split(PIECE), places, strict=True):
        place.copy_(read(piece).view(-1))
    return values


def _numbers(codes: Tensor) -> Tensor:
    """Codes as float32."""
    return _by_pieces(e4m3, codes) if codes.dtype == FP8 else codes.float()


def e4m3(codes: Tensor) -> Tensor:
    """FP8 (E4M3) codes as halves: what ``codes.half()`` is, which goes value by value.

    Exponent and mantissa mean the same in a half, 2^8 times smaller. Only the two codes of NaN
    are numbers there.

    >>> e4m3(torch.tensor([0x38, 0xFE, 0x01], dtype=torch.uint8).view(FP8)).tolist()
    [1.0, -448.0, 0.001953125]
    """
    bits = codes.view(torch.int8).short()
    sign, size = bits & -(1 << 15), bits & 0x7F
    nan = (size + 1 & 0x80) * (0x7C00 // 0x80)  # the exponent of a half's, for 0x7F alone
    return (sign | size << 7 | nan).view(torch.float16) * 256


def _blockwise(
    values: Tensor,
    grid: Tensor,
    block: Sequence[int],
    change: Callable[[Tensor, Tensor], object] = Tensor.mul_,
) -> Tensor:
    """Change values (..., O, I) by their block's number, in place; the last blocks may be cut off.

    Args:
        values: float32.
        grid: a number for each block.
        block: its rows and columns.
        change: of a view of the values, in place; by default times the number.
    """
    rows, columns = block
    grid = grid if grid.dim() > 1 else grid.view(-1, 1)
    wide = grid.repeat_interleave(columns, -1)[..., : values.shape[-1]]
    whole = values.shape[-2] // rows
    blocks = values[..., : whole * rows, :].unflatten(-2, (whole, rows))
    change(blocks, wide[..., :whole, :].unsqueeze(-2))
    change(values[..., whole * rows :, :], wide[..., whole:, :])
    return values


def _spoken(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _scales(scales: Tensor) -> Tensor:
    """Scales as numbers: exponents of two are stored in bytes."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - EXPONENTS)
    return scales.float()


def _like(tensor: Tensor, like: Tensor) -> list[int]:
    return list(tensor.shape) if like.dim() >= 2 else list(like.shape)


def _rows(tensor: Tensor, axis: int, order: Tensor) -> Tensor:
    """``index_select`` for types of one byte too."""
    order = order.to(tensor.device)
    if tensor.element_size() > 1:
        return tensor.index_select(axis, order)
    return tensor.view(torch.uint8).index_select(axis, order).view(tensor.dtype)


def _whole_blocks(order: Tensor, size: int) -> Tensor | None:
    """The blocks that an order consists of, in its order; None if it cuts through one.

    >>> _whole_blocks(torch.tensor([4, 5, 0, 1]), 2), _whole_blocks(torch.tensor([1, 2]), 2)
    (tensor([2, 0]), None)
    """
    if len(order) % size:
        return None
    runs = order.view(-1, size)
    first = runs[:, :1]
    same = (runs == first + torch.arange(size, device=order.device)).all()
    return first.flatten() // size if same and not (first % size).any() else None
