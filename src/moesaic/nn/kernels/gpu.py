"""Products of few tokens with chosen rows of a matrix on a GPU, by Triton.

After TEAL's kernel (Liu et al., ICLR 2025, Sec. 4.4): whether a channel counts is decided while its
input is loaded, and masks the load of its row, so that what is left out is never read; programs
share the channels and the outputs of a token. Unlike there each writes a sum of its own, which are
added afterwards: no atomics, so that bfloat16 works and the same step gives the same bits.

Shape suffixes: T tokens, G matrices, I inputs (channels), O outputs, P parts of the channels.
"""

# Triton compiles this function from its source and brings no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_I, BLOCK_O = 32, 128
"""Rows and columns of a matrix that are loaded together."""
PART = 256
"""Channels of a part: enough programs for a GPU where there is one token."""


@triton.jit
def partial_sums(
    x,
    scale,
    rows,
    group,
    out,
    threshold,
    inputs,
    outputs,
    scaled: tl.constexpr,
    grouped: tl.constexpr,
    part: tl.constexpr,
    block_i: tl.constexpr,
    block_o: tl.constexpr,
):
    """out[p, t] = sum over the chosen channels i of part p of x[t, i] rows[group[t], i]."""
    t = tl.program_id(0)
    o = tl.program_id(1) * block_o + tl.arange(0, block_o)
    p = tl.program_id(2)
    matrix = tl.full((), 0, tl.int64)
    if grouped:
        matrix = tl.load(group + t)
    sum_O = tl.zeros((block_o,), tl.float32)
    for start in range(0, part, block_i):
        i = p * part + start + tl.arange(0, block_i)
        inside = i < inputs
        x_I = tl.load(x + t * inputs + i, mask=inside, other=0.0).to(tl.float32)
        score_I = tl.abs(x_I)
        if scaled:
            score_I *= tl.load(scale + matrix * inputs + i, mask=inside, other=0.0)
        on = inside & (score_I > threshold)
        at = (matrix * inputs + i[:, None]) * outputs + o[None, :]
        row_IO = tl.load(rows + at, mask=on[:, None] & (o < outputs)[None, :], other=0.0)
        sum_O += tl.sum(row_IO.to(tl.float32) * x_I[:, None], axis=0)
    tl.store(out + (p * tl.num_programs(0) + t) * outputs + o, sum_O, mask=o < outputs)


def sums(
    x_TI: Tensor,
    rows_GIO: Tensor,
    scale_GI: Tensor | None,
    threshold: float,
    group_T: Tensor | None,
) -> Tensor:
    """The sum over each token's chosen channels i of x[t, i] rows[group[t], i] (T, O), float32.

    Args:
        x_TI: few tokens, contiguous.
        rows_GIO: matrices, contiguous; also (I, O), one matrix.
        scale_GI: float32, contiguous; a channel counts where |x| times this is above the threshold.
            None for ones.
        threshold: of a score.
        group_T: int64, the matrix of each token; None for the first.
    """
    tokens, inputs = x_TI.shape
    outputs = rows_GIO.shape[-1]
    parts = -(-inputs // PART)
    out_PTO = x_TI.new_empty((parts, tokens, outputs), dtype=torch.float32)
    partial_sums[tokens, -(-outputs // BLOCK_O), parts](
        x_TI,
        x_TI if scale_GI is None else scale_GI,
        rows_GIO,
        x_TI if group_T is None else group_T,
        out_PTO,
        threshold,
        inputs,
        outputs,
        scale_GI is not None,
        group_T is not None,
        PART,
        BLOCK_I,
        BLOCK_O,
    )
    return out_PTO.sum(0)
