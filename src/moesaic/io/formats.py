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

from moesaic.errors import MoesaicError, dims
from moesaic.types import JSON

Parts = Mapping[str, Tensor]
"""Stored tensors of a weight by the ends of their names."""
FP8 = torch.float8_e4m3fn
EXPONENTS = 127
"""Bias that is added to an exponent of two to store it in a byte."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1 codes; the fourth bit is the sign."""


def stored_name(weight: str, end: str) -> str:
    """Return the name of a weight's stored tensor; an end with a dot replaces the last part.

    >>> stored_name("ffn.w1.weight", "_scale_inv"), stored_name("ffn.w1.weight", ".scale")
    ('ffn.w1.weight_scale_inv', 'ffn.w1.scale')
    """
    return weight.rpartition(".")[0] + end if end.startswith(".") else weight + end


_ONE_EXPERT = re.compile(r"(?<=experts)\\?\.[(\[]?\d+")


def _renumbered(entry: str, moved: Mapping[str, str]) -> list[str]:
    """Return an entry of a config's module list with the expert numbers of a result.

    Args:
        entry: a module, or a regular expression after ``re:``.
        moved: new names of single experts' modules, by their old names.

    >>> moved = {"layers.1.experts.5.up": "layers.1.experts.2.up"}
    >>> [_renumbered(f"layers.1.experts.{i}", moved) for i in (5, 6)]
    [['layers.1.experts.2'], []]
    """
    if not _ONE_EXPERT.search(entry):
        return [entry]
    if entry.startswith("re:"):
        try:
            pattern = re.compile(entry.removeprefix("re:"))
        except re.error:  # which nobody can have matched with
            return [entry]
        return sorted({new for old, new in moved.items() if pattern.match(old)})
    here = [new for old, new in moved.items() if f".{entry}." in f".{old}."]
    numbers = dict.fromkeys(match.group() for new in here if (match := _ONE_EXPERT.search(new)))
    return [_ONE_EXPERT.sub(number, entry) for number in numbers]


class Format(ABC):
    """Format that stores matrices in few bits.

    Args:
        config: ``quantization_config`` of a checkpoint's config.
    """

    method: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]
    """Ends of the names of a weight's stored tensors: of codes, of scales (:func:`stored_name`)."""
    plainly: ClassVar[str] = "modules_to_not_convert"
    """Config key that lists the modules that are not quantised."""
    cut_off: ClassVar[bool] = False
    """True if a matrix may end within a block."""
    loose: ClassVar[bool] = False
    """True if the scale of a whole row or column is also that of some of its values."""

    def __init__(self, config: JSON) -> None:
        self.config = config

    @property
    @abstractmethod
    def columns(self) -> int:
        """Number of neighbouring columns of a down projection that share a scale; 0 if all do."""

    @property
    def whole(self) -> int:
        """Divisor of experts' widths, if all or none of their matrices are quantised; else 0."""
        return 0

    @abstractmethod
    def weights(self, types: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield each quantised weight's name and the ends of its stored tensors' names.

        Args:
            types: safetensors' type of each stored tensor, by name.

        Raises:
            ValueError: codes are of a type that is not read.
        """

    @abstractmethod
    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of a weight's values from its stored tensors' shapes, by ends.

        Raises:
            ValueError: the scales do not fit the codes.
        """

    def check_settings(self) -> None:
        """Refuse settings of undeclared types by a ValueError or a TypeError that names one."""
        if self.columns < 0:
            raise ValueError(f"{self.columns} columns share a scale")
        self.leaving((), {})

    def of(self, kind: str) -> Format:
        """Return the format of weights whose codes have a type, named as safetensors does."""
        return self

    def check(self, parts: Parts) -> tuple[int, ...]:
        """Return the shape of a weight's values, like :meth:`shape`, from its stored tensors."""
        return self.shape({end: tuple(part.shape) for end, part in parts.items()})

    def values(self, parts: Parts) -> Tensor:
        """Return the dequantised values, float32."""
        codes, scales, zeros = self._split(parts)
        block = self._block(codes.shape, scales.shape)
        values = self._numbers(codes)
        if zeros is not None:
            _blockwise(values, zeros.float(), block, Tensor.sub_)
        return _blockwise(values, _scales(scales), block)

    def parts(self, values: Tensor, like: Parts) -> Parts:
        """Quantise values to this format, the scale of each block chosen by its largest value.

        Args:
            values: (..., O, I).
            like: a weight of the same checkpoint, whose types are used.

        Raises:
            ValueError: blocks do not divide the shape, and did not divide the other weight's.
        """
        *_, height, width = values.shape
        rows, columns = self._block_like(values.shape, like)
        rest = -height % rows, -width % columns
        if any(rest):
            before = self._split(like)[0].shape if self.cut_off else (rows, columns)
            if (rest[0] and not before[-2] % rows) or (rest[1] and not before[-1] % columns):
                raise ValueError(f"blocks of {rows} x {columns} do not divide {dims(values.shape)}")
            values = F.pad(values, (0, rest[1], 0, rest[0]))
        blocks = values.float().unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        codes, scales, zeros = self._codes(blocks, like)
        codes = codes.reshape(values.shape)[..., :height, :width].contiguous()
        return self._stored(codes, scales, zeros, like)

    def select(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        """Return the parts of ``values.index_select(axis, order)``; None if it cuts through blocks.

        Args:
            parts: the weight's stored tensors.
            axis: of the values, counted from the end: -1, -2 or -3.
            order: int64.
        """
        codes, scales, zeros = self._split(parts)
        grids = [g if g.dim() > 1 else g.view(-1, 1) for g in (scales, zeros) if g is not None]
        whole = (self.loose or scales.dim() < 2) and axis > -3 and grids[0].shape[axis] == 1
        if not whole and grids[0].dim() >= -axis:
            size = 1 if axis < -2 else self._block(codes.shape, scales.shape)[axis]
            blocks = order if size == 1 else _whole_blocks(order, size)
            if blocks is None:
                return None
            scales, *others = (_like(_rows(grid, axis, blocks), scales) for grid in grids)
            zeros = others[0] if others else None
        return self._stored(self._cut(codes, axis, order), scales, zeros, parts)

    # each format's own

    @abstractmethod
    def _split(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a weight's codes (..., O, I), scales, and zero points if there are any."""

    @abstractmethod
    def _stored(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, like: Parts) -> Parts:
        """Return the stored tensors of what :meth:`_split` returns, of the types of others."""

    @abstractmethod
    def _block(self, shape: Sequence[int], scales: Sequence[int] = ()) -> tuple[int, int]:
        """Return the numbers of rows and columns that share a scale, by the shapes of codes and
        scales; ValueError if these do not fit."""

    def _block_like(self, shape: Sequence[int], like: Parts) -> tuple[int, int]:
        """Return the block of values of a shape, stored like others."""
        return self._block(shape)

    @abstractmethod
    def _codes(self, blocks: Tensor, like: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the codes of blocks (..., G, rows, H, columns), their scales and zero points
        (..., G, H)."""

    def _numbers(self, codes: Tensor) -> Tensor:
        """Return codes as float32."""
        return _by_pieces(e4m3, codes) if codes.dtype == FP8 else codes.float()

    def _cut(self, codes: Tensor, axis: int, order: Tensor) -> Tensor:
        """Return the codes of some indices of an axis; of the last one they are whole blocks."""
        return _rows(codes, axis, order)

    def leaving(self, modules: Collection[str], moved: Mapping[str, str]) -> JSON:
        """Return the ``quantization_config`` of a result in which some modules are not quantised.

        Args:
            modules: names of these modules; all experts of a layer are one.
            moved: single experts' modules that were not quantised: new names by old ones.
        """
        settings = dict(self.config)
        # other programs list modules that are not quantised by the latter
        for key in (key for key in (self.plainly, "ignored_layers") if settings.get(key)):
            entries = (_renumbered(str(entry), moved) for entry in settings[key])
            settings[key] = [new for several in entries for new in several]
        more = {*modules} - {*(settings.get(self.plainly) or ())}
        if more:
            settings[self.plainly] = sorted({*(settings.get(self.plainly) or ()), *more})
        return settings


class BlockFp8(Format):
    """FP8 (E4M3) matrices (..., O, I), each block of which is multiplied by its scale.

    Experts may be in FP4 (``expert_dtype``), :class:`Mxfp4`.
    """

    method = "fp8"
    ends = ("", "_scale_inv")
    cut_off = True
    beside: ClassVar[tuple[str, ...]] = ("", ".scale")
    """Ends of names in DeepSeek-V4."""

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
        return Mxfp4(self.config) if kind == "I8" else self

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
        if min(self._block((1, 1))) < 1:
            raise ValueError(f"weight_block_size is {self.config['weight_block_size']}")

    def _block(self, shape: Sequence[int], scales: Sequence[int] = ()) -> tuple[int, int]:
        rows, columns = self.config.get("weight_block_size") or shape[-2:]
        return int(rows), int(columns)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        whole, scales = shapes.values()
        if len(whole) < 2:
            raise ValueError("it is no matrix")
        rows, columns = self._block(whole)
        grid = (*whole[:-2], -(-whole[-2] // rows), -(-whole[-1] // columns))
        if prod(scales) != prod(grid) or (len(scales) > 1 and scales != grid):
            raise ValueError(
                f"blocks of {rows} x {columns} need scales of {dims(grid)}, and they are of "
                f"{dims(scales)}"
            )
        return whole

    def _split(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        codes, scales = parts.values()
        return codes, scales, None

    def _stored(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, like: Parts) -> Parts:
        (code_end, _), (scale_end, like_scales) = like.items()
        kind = like_scales.dtype
        if kind == torch.uint8 and scales.dtype != kind:  # powers of two
            scales = torch.frexp(scales).exponent - 1 + EXPONENTS
        return {code_end: codes, scale_end: _like(scales.to(kind), like_scales)}

    def _codes(self, blocks: Tensor, like: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        _, like_scales = like.values()
        scales = _positive(blocks.abs().amax((-3, -1)) / torch.finfo(FP8).max, torch.float32)
        exponents = (torch.uint8, torch.float8_e8m0fnu)
        if like_scales.dtype in exponents or self.config.get("scale_fmt") == "ue8m0":
            scales = scales.log2().ceil().exp2()
        return _float8(blocks, scales), scales, None


GROUP = 32
"""Values of MXFP4 that share a scale."""


class Mxfp4(BlockFp8):
    """MXFP4 matrices (O, I): two codes a byte (O, I/2), a scale for 32 of a row (O, I/32)."""

    cut_off = False

    def _block(self, shape: Sequence[int], scales: Sequence[int] = ()) -> tuple[int, int]:
        return 1, GROUP

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        (code_end, codes), (scale_end, scales) = shapes.items()
        return super().shape({code_end: (*codes[:-1], 2 * codes[-1]), scale_end: scales})

    def _numbers(self, codes: Tensor) -> Tensor:
        return _two_a_byte(codes.view(torch.uint8))

    def _cut(self, codes: Tensor, axis: int, order: Tensor) -> Tensor:
        return _rows(codes, axis, order if axis < -1 else order[::2] // 2)

    def _stored(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, like: Parts) -> Parts:
        if codes.dtype == torch.int64:  # just quantised
            codes = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).view(torch.int8)
        return super()._stored(codes, scales, zeros, like)

    def _codes(self, blocks: Tensor, like: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        most = blocks.abs().amax((-3, -1))
        powers = torch.floor(torch.log2(most.clamp(min=torch.finfo(torch.float32).tiny)))
        powers = (powers - 2).clamp(-EXPONENTS, EXPONENTS)  # the largest E2M1 is 1.5 times 2^2
        magnitudes = torch.ldexp(blocks.abs(), -_wide(powers.int())).contiguous()
        middles = torch.tensor([(a + b) / 2 for a, b in pairwise(FP4)], device=blocks.device)
        codes = torch.bucketize(magnitudes, middles)
        # halfway between two, the one with an even code
        low = torch.bucketize(magnitudes, middles, right=True)
        codes = torch.where((codes != low) & (codes % 2 == 1), low, codes)
        return codes + 8 * (blocks < 0), torch.ldexp(torch.ones_like(powers), powers.int()), None


class Mxfp4Experts(Mxfp4):
    """MXFP4 experts: values (E, I, O); codes (E, O, G, 16), two a byte, scales (E, O, G)."""

    method = "mxfp4"
    ends = ("_blocks", "_scales")
    columns = whole = GROUP

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
                f"blocks of {dims(codes)} do not fit scales of {dims(scales)}: 16 bytes each"
            )
        return codes[0], codes[2] * GROUP, codes[1]

    def values(self, parts: Parts) -> Tensor:
        return super().values(parts).transpose(1, 2).contiguous()

    def parts(self, values: Tensor, like: Parts) -> Parts:
        one = dict.fromkeys(self.ends, torch.empty(1, 1, dtype=torch.uint8))
        parts = super().parts  # of one expert: its codes take four times its memory until packed
        each = [parts(value.T, one) for value in values]
        return {end: torch.stack([parts[end] for parts in each]) for end in self.ends}

    def select(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        return super().select(parts, axis if axis < -2 else -3 - axis, order)

    def _split(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        return parts[self.ends[0]].flatten(-2), parts[self.ends[1]], None

    def _stored(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, like: Parts) -> Parts:
        parts = super()._stored(codes, scales, zeros, like)
        codes = parts[self.ends[0]].view(torch.uint8)
        return {**parts, self.ends[0]: codes.unflatten(-1, (-1, GROUP // 2))}


def _two_a_byte(codes: Tensor) -> Tensor:
    """Decode E2M1 codes, two in a byte, the lower bits first: (..., N) to (..., 2 N), float32.

    >>> _two_a_byte(torch.tensor([[0x21, 0xF7]], dtype=torch.uint8)).tolist()
    [[0.5, 1.0, 6.0, -6.0]]
    """
    table = torch.tensor([*FP4, *(-v for v in FP4)], device=codes.device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], -1)
    return _by_pieces(lambda piece: pairs.index_select(0, piece.int()), codes, 2)


class CompressedTensors(Format):
    """compressed-tensors: matrices (O, I) of integers of 4 or 8 bits, packed or not, or of FP8.

    A scale is for a row, for a group of a row, for a block, or for all; integers may have a zero
    point each.
    """

    method = "compressed-tensors"
    ends = ("_packed", "_scale", "_shape")
    plain: ClassVar[tuple[str, ...]] = ("", "_scale")
    """Ends of names where codes are not packed."""
    zero: ClassVar[str] = "_zero_point"
    plainly = "ignore"
    loose = True
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
        """Number of codes in a word of 32 bits."""

    @property
    def _groups(self) -> list[JSON]:
        """Settings of each group of modules."""
        return list((self.config.get("config_groups") or {}).values())

    @property
    def _weights(self) -> list[JSON]:
        """Settings of the weights of each group of modules."""
        return [group.get("weights") or {} for group in self._groups]

    @property
    def columns(self) -> int:
        structures = ((w.get("block_structure") or (0, 0), w) for w in self._weights)
        return max([0, *(int(w.get("group_size") or block[1]) for block, w in structures)])

    @property
    def whole(self) -> int:
        """Divisor of experts' widths: transformers loads a layer's experts in one form."""
        return self.columns

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

    def _block(self, shape: Sequence[int], scales: Sequence[int] = ()) -> tuple[int, int]:
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
                    f"scales of {dims(scales)} for {dims(shape)} are not for groups of "
                    f"{' or '.join(map(str, sorted(sizes)))}, which its config says"
                )
        raise ValueError(f"scales of {dims(scales)} do not divide {dims(shape)}")

    def check_settings(self) -> None:
        super().check_settings()
        blocks = [int(n) for w in self._weights for n in w.get("block_structure") or ()]
        if min([1, *self._group_sizes(), *blocks]) < 1:
            raise ValueError("a group or a block of weights has no size")

    def _group_sizes(self) -> set[int]:
        """Return the group sizes (columns), if the config puts all weights in groups."""
        if any(w.get("strategy") != "group" or not w.get("group_size") for w in self._weights):
            return set()
        return {int(w["group_size"]) for w in self._weights}

    def _split(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        scales, zeros = parts["_scale"], parts.get(self.zero)
        if "_packed" not in parts:
            return parts[""], scales, zeros
        if zeros is not None:
            zeros = unpacked(zeros.T, self.bits).T[: scales.shape[0]]
        return unpacked(parts["_packed"], self.bits), scales, zeros

    def _stored(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, like: Parts) -> Parts:
        parts = {"_scale": _like(scales, like["_scale"])}
        if "_packed" not in like:
            parts |= {"": codes} if zeros is None else {"": codes, self.zero: zeros}
            return parts
        parts["_packed"] = packed(codes, self.bits)
        parts["_shape"] = torch.tensor(codes.shape, dtype=like["_shape"].dtype)
        if zeros is not None:
            missing = -zeros.shape[0] % self.each
            parts[self.zero] = packed(F.pad(zeros, (0, 0, 0, missing)).T, self.bits).T.contiguous()
        return parts

    def check(self, parts: Parts) -> tuple[int, ...]:
        shape = super().check(parts)
        if "_packed" in parts and not parts["_shape"].is_meta:  # a header has no values
            declared = parts["_shape"].tolist()
            if tuple(declared) != shape:
                raise ValueError(
                    f"its shape is given as {dims(declared)}, and its codes are {dims(shape)}"
                )
        return shape

    def _block_like(self, shape: Sequence[int], like: Parts) -> tuple[int, int]:
        before, scales, _ = self._split(like)
        if "_packed" in like and shape[1] % self.each:
            raise ValueError(f"{self.each} codes a word do not divide {dims(shape)}")
        # a scale for whole rows, or for all, is so of any number of columns
        sizes = zip(shape, self._block(before.shape, scales.shape), before.shape, strict=True)
        rows, columns = (n if size >= old else size for n, size, old in sizes)
        return rows, columns

    def _codes(self, blocks: Tensor, like: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        highest, kind = 2 ** (self.bits - 1) - 1, like["_scale"].dtype
        if like.get("", like["_scale"]).dtype == FP8:
            scales = _positive(blocks.abs().amax((1, 3)) / torch.finfo(FP8).max, kind)
            return _float8(blocks, scales.float()), scales, None
        if self.zero not in like:
            scales = _positive(self._nearest(blocks, kind), kind)
            codes = (blocks / _wide(scales.float())).round()
            return codes.clamp(-highest - 1, highest).to(torch.int8), scales, None
        low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
        scales = _positive((high - low) / (2 * highest + 1), kind)
        zeros = (-highest - 1 - low / scales.float()).round().clamp(-highest - 1, highest)
        codes = (blocks / _wide(scales.float()) + _wide(zeros)).round()
        return codes.clamp(-highest - 1, highest).to(torch.int8), scales, zeros.to(torch.int8)

    def _nearest(self, blocks: Tensor, kind: torch.dtype) -> Tensor:
        """Return the scales (G, H) of blocks (G, rows, H, columns), stored as ``kind``, with the
        least squared error of their integer codes.

        Any code is tried for a block's largest value: values that were quantised before are met
        exactly even if the value with the largest code was removed.
        """
        highest = 2 ** (self.bits - 1) - 1
        most = blocks.abs().amax((1, 3))
        steps = [highest + 0.5, highest, highest + 1]  # the first is llm-compressor's
        steps += range(1, highest) if self.bits == 4 else ()
        best, least = most, torch.full_like(most, torch.inf)
        for step in steps:
            scales = _positive(most / step, kind)
            wide = _wide(scales.float())
            codes = (blocks / wide).round().clamp(-highest - 1, highest)
            lost = (codes * wide - blocks).square().sum((1, 3))
            best = torch.where(lost < least, most / step, best)
            least = torch.minimum(lost, least)
        return best

    def select(self, parts: Parts, axis: int, order: Tensor) -> Parts | None:
        if "_packed" in parts and axis == -1 and len(order) % self.each:
            return None
        return super().select(parts, axis, order)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack the integers in words of 32 bits, lowest bits first, their offset subtracted; int8.

    >>> unpacked(torch.tensor([[0x76543210]], dtype=torch.int32), 4).tolist()
    [[-8, -7, -6, -5, -4, -3, -2, -1]]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return (codes.flatten(-2) - 2 ** (bits - 1)).to(torch.int8)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack integers into int32 words, inverting :func:`unpacked`; the last axis must fill words."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    raised = (codes.int() + 2 ** (bits - 1)).unflatten(-1, (-1, len(shifts)))
    return (raised << shifts).sum(-1, dtype=torch.int32)


def _positive(scales: Tensor, kind: torch.dtype) -> Tensor:
    """Return scales in their stored type; 1 for blocks of zeros."""
    positive = torch.where(scales > 0, scales, torch.ones_like(scales)).to(kind)
    return positive.clamp(min=torch.finfo(kind).tiny)


PIECE = 1 << 18
"""Codes that are decoded at a time, so that intermediate values fit into the CPU's cache."""


def _by_pieces(read: Callable[[Tensor], Tensor], codes: Tensor, each: int = 1) -> Tensor:
    """Apply a function to codes (..., N), ``each`` values of one; float32 (..., each N)."""
    values = torch.empty(*codes.shape[:-1], each * codes.shape[-1], device=codes.device)
    if values.is_meta:
        return values
    places = values.view(-1).split(each * PIECE)
    for piece, place in zip(codes.flatten().split(PIECE), places, strict=True):
        place.copy_(read(piece).view(-1))
    return values


def e4m3(codes: Tensor) -> Tensor:
    """Convert FP8 (E4M3) codes to float16 faster than ``codes.half()``, which works value by value.

    Exponent and mantissa mean the same in a half, 2^8 times smaller. Only the two codes of NaN
    are numbers there.

    >>> e4m3(torch.tensor([0x38, 0xFE, 0x01], dtype=torch.uint8).view(FP8)).tolist()
    [1.0, -448.0, 0.001953125]
    """
    bits = codes.view(torch.int8).short()
    sign, size = bits & -(1 << 15), bits & 0x7F
    nan = (size + 1 & 0x80) * (0x7C00 // 0x80)  # the exponent of a half's, for only 0x7F
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


def _scales(scales: Tensor) -> Tensor:
    """Return scales as numbers: exponents of two are stored in bytes."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - EXPONENTS)
    return scales.float()


def _like(grid: Tensor, like: Tensor) -> Tensor:
    """Return a grid (..., G, H) with as few axes as others have that hold one number or a row."""
    return grid if like.dim() > 1 else grid.reshape([-1] * like.dim())


def _wide(grid: Tensor) -> Tensor:
    """Return a grid (..., G, H) as (..., G, 1, H, 1), for blocks."""
    return grid.unsqueeze(-1).unsqueeze(-3)


def _float8(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return blocks (..., G, rows, H, columns) divided by their scales (..., G, H), in FP8."""
    most = torch.finfo(FP8).max
    return (blocks / _wide(scales)).clamp(-most, most).to(FP8)


def _rows(tensor: Tensor, axis: int, order: Tensor) -> Tensor:
    """``index_select`` for types of one byte too."""
    order = order.to(tensor.device)
    if tensor.element_size() > 1:
        return tensor.index_select(axis, order)
    return tensor.view(torch.uint8).index_select(axis, order).view(tensor.dtype)


def _whole_blocks(order: Tensor, size: int) -> Tensor | None:
    """Return the numbers of the whole blocks that an order consists of; None if it cuts one.

    >>> _whole_blocks(torch.tensor([4, 5, 0, 1]), 2), _whole_blocks(torch.tensor([1, 2]), 2)
    (tensor([2, 0]), None)
    """
    if len(order) % size:
        return None
    runs = order.view(-1, size)
    first = runs[:, :1]
    same = (runs == first + torch.arange(size, device=order.device)).all()
    return first.flatten() // size if same and not (first % size).any() else None
