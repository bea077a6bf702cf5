"""Products of few tokens with chosen rows of a matrix, by numba on a CPU and by Triton on a GPU.

Where neither can be used, decoding leaves nothing out (:class:`moesaic.nn.phase.Phase`): making
channels zero in a dense product takes longer than the product alone, and saves nothing.

Shape suffixes: T tokens, I inputs (channels), O outputs, G matrices.
"""

from __future__ import annotations

import logging
from functools import cache
from math import prod
from struct import pack
from types import ModuleType

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

FEW = 8
"""Tokens up to which rows are worth choosing one by one: more of them want nearly all rows."""

APART = 1 << 18
"""Weights of a product from which several threads share it."""

LINE = 32
"""Outputs that a part is a multiple of: no two threads write to one cache line."""

PAGE = 4096
"""Bytes, after which rows have the same places in a cache."""

TYPES = (torch.float32, torch.bfloat16)
"""Of the rows that numba's functions take."""


@cache
def fast(kind: str = "cpu") -> ModuleType | None:
    """The module of compiled functions for a type of device; None where there are none, which is
    said once."""
    try:
        if kind == "cpu":
            from moesaic.nn.kernels import cpu

            one = torch.ones(1)
            at = one.data_ptr()  # compiles, or says why not
            cpu.sums(at, 0, at, 1, 0, 0, at, 1, 1, 1, 1, 0, 0, size=1)
            return cpu
        if kind == "cuda":
            from moesaic.nn.kernels import gpu

            one = torch.ones(1, 1, device=kind)
            gpu.sums(one, one, None, 0.0, None)
            return gpu
        if kind != "meta":
            raise RuntimeError("neither numba nor Triton knows it")
    except Exception as error:  # whatever a compiler may raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning(
            "No compiled functions for %s here (%.100s): decoding leaves out no channels, "
            "and is not faster for them.", kind, reason,
        )  # fmt: skip
    return None


def reads_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether :class:`Product` works there, at a cost of the rows that are chosen."""
    return (device.type != "cpu" or dtype in TYPES) and fast(device.type) is not None


def chosen(x_TI: Tensor, scale_TI: Tensor | None, keep: int, threshold: float) -> Tensor:
    """The channels of a token with the highest scores |x| * scale, bool (T, I).

    Args:
        x_TI: values; any leading shape.
        scale_TI: a factor of each channel, as it broadcasts; None for ones.
        keep: how many; below zero: those with scores above the threshold.
        threshold: of a score.

    >>> chosen(torch.tensor([[3.0, -2.0, 1.0]]), torch.tensor([1.0, 1.0, 5.0]), 2, 0.0)
    tensor([[ True, False,  True]])
    """
    score_TI = x_TI.abs().float()
    if scale_TI is not None:
        score_TI = score_TI * scale_TI
    return score_TI > threshold if keep < 0 else top(score_TI, keep)


def top(score_TI: Tensor, keep: int) -> Tensor:
    """The places of the highest scores of each token, bool (T, I); of equal ones the first.

    >>> top(torch.tensor([[1.0, 2.0, 1.0]]), 2)
    tensor([[ True,  True, False]])
    """
    if keep == 0:
        return torch.zeros_like(score_TI, dtype=torch.bool)
    lowest_T1 = score_TI.topk(keep, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    on_TI = score_TI >= lowest_T1
    looks = score_TI.is_cpu and not torch.compiler.is_compiling()
    if looks and int(on_TI.count_nonzero()) * score_TI.shape[-1] == keep * on_TI.numel():
        return on_TI  # no equal ones: the rest takes as long again
    above_TI = score_TI > lowest_T1
    left_T1 = keep - above_TI.sum(-1, keepdim=True)
    return above_TI | (on_TI & ((on_TI & ~above_TI).cumsum(-1) <= left_T1))


class Product:
    """The sum over each token's chosen channels i of x[t, i] rows[group[t], i] (T, O).

    Reads the chosen rows alone. What calls have in common is worked out once: a call of a small
    product takes as long as the product. It holds while the matrices lie where they do, and holds
    them; see :meth:`lies`.

    Args:
        rows_GIO: matrices as :func:`rows_of` gives them, or contiguous; also (I, O), one matrix.
        scale_GI: factors of the scores by which channels are chosen (see :func:`chosen`).
        keep: channels of a token; below zero: by the threshold.
        threshold: of a score.
    """

    def __init__(
        self, rows_GIO: Tensor, scale_GI: Tensor | None, keep: int, threshold: float
    ) -> None:
        self.rows_GIO, self.scale_GI = rows_GIO, scale_GI
        self.keep, self.threshold = keep, threshold
        self.inputs, self.outputs = rows_GIO.shape[-2:]
        compiled = fast(rows_GIO.device.type)
        if compiled is None or not reads_rows(rows_GIO.device, rows_GIO.dtype):
            raise TypeError(f"no compiled functions for {rows_GIO.dtype} on {rows_GIO.device}")
        self.compiled = compiled
        self.held_GI = None if scale_GI is None else scale_GI.float().contiguous()
        self.fixed = (
            0 if self.held_GI is None else self.held_GI.data_ptr(), rows_GIO.data_ptr(),
            self.inputs, self.outputs, max(self.outputs, rows_GIO.stride(-2)), keep,
            int.from_bytes(pack("<f", threshold), "little"), rows_GIO.dtype == torch.bfloat16,
        )  # fmt: skip

    def lies(self, weight: Tensor, scale_GI: Tensor | None) -> bool:
        """Whether these are the weight, turned, and the factors that it was made of."""
        same = scale_GI is self.scale_GI and weight.data_ptr() == self.fixed[1]
        return same and weight.dtype == self.rows_GIO.dtype and weight.stride(-2) == 1

    @property
    def _step(self) -> int:
        """Outputs of a thread's part; 0, one part, where a second thread is not worth starting."""
        threads = torch.get_num_threads()
        if threads == 1 or self.inputs * self.outputs < APART:
            return 0
        return -(-self.outputs // (LINE * threads)) * LINE

    def __call__(self, x_TI: Tensor, group_T: Tensor | None = None) -> Tensor:
        """
        Args:
            x_TI: few tokens; any leading shape, which the result has.
            group_T: int64, the matrix of each token; None for the first.
        """
        *shape, inputs = x_TI.shape
        if not x_TI.is_cpu:
            by = (self.rows_GIO, self.scale_GI, self.keep, self.threshold, group_T)
            return by_triton(self.compiled, x_TI.reshape(-1, inputs), *by).view(*shape, -1)
        rows_TI = (x_TI if x_TI.dtype in TYPES else x_TI.float()).contiguous()
        out_TO = rows_TI.new_empty(*shape, self.outputs)
        self.compiled.sums(
            rows_TI.data_ptr(), 0 if group_T is None else group_T.data_ptr(), out_TO.data_ptr(),
            prod(shape), rows_TI.dtype == torch.bfloat16, *self.fixed,
            size=self.outputs, step=self._step,
        )  # fmt: skip
        return out_TO.to(x_TI.dtype) if rows_TI is not x_TI else out_TO


def rows_of(weight: Tensor) -> Tensor:
    """The columns of a weight (..., O, I) as rows (..., I, O): each of them contiguous.

    The weight is turned in memory the first time; it keeps its shape and its values. Rows of
    bfloat16 that are whole pages are set apart: prompts fetch a few numbers of each, which would
    all want the same places in the cache.
    """
    rows = weight.data.mT
    if rows.is_contiguous():
        return rows
    inputs, outputs = rows.shape[-2:]
    apart = outputs + LINE
    if rows.stride()[-2:] == (apart, 1) and (rows.dim() == 2 or rows.stride(0) == inputs * apart):
        return rows
    pages = rows.element_size() * outputs % PAGE == 0
    spread = pages and rows.dtype == torch.bfloat16 and rows.is_cpu
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        room = rows.new_empty(*rows.shape[:-1], apart if spread else outputs)
        weight.data = room[..., :outputs].copy_(rows).mT
    return weight.data.mT


def by_triton(
    compiled: ModuleType,
    x_TI: Tensor,
    rows_GIO: Tensor,
    scale_GI: Tensor | None,
    keep: int,
    threshold: float,
    group_T: Tensor | None,
) -> Tensor:
    """As :class:`Product`, by the functions of :mod:`moesaic.nn.kernels.gpu`; asks for no value."""
    if keep >= 0:  # the highest scores are found by torch, and the others' inputs made zero
        scale_TI = scale_GI if scale_GI is None or group_T is None else scale_GI[group_T]
        x_TI = x_TI * chosen(x_TI, scale_TI, keep, threshold)
        scale_GI, threshold = None, 0.0
    scale = None if scale_GI is None else scale_GI.float().contiguous()
    y_TO: Tensor = compiled.sums(x_TI.contiguous(), rows_GIO, scale, threshold, group_T)
    return y_TO.to(x_TI.dtype)
