"""Petals by numba on CPU: which of them run, those of few tokens alone, the others silenced.

Shape suffixes: T tokens, D hidden size, R petals, K top-k, M neurons, N neurons that a token runs
(those of T tokens stand at the left of M places).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import DenseFFN
from moesaic.nn.kernels import FEW, LINE, TYPES, fast, rows_of, step_of, top

MOST = {torch.float32: FEW, torch.bfloat16: 2}
"""Tokens whose petals are worth reading one by one: of more, a product over all neurons is faster
where the processor multiplies bfloat16 by itself."""

SCORED = 16
"""Petals up to which torch takes longer to score tokens of bfloat16, and to copy them first."""

UNEVEN = 4
"""Parts of a thread where neurons are chosen: every token runs those of the backbone, few the
others."""


def compiled_for(*tensors: Tensor | None) -> Any:
    """The compiled functions, if they take such tensors: plain ones, in CPU's memory, of a type
    that they know, without gradients."""
    kind, learns = None, torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        kind = kind or tensor.dtype
        if not tensor.is_cpu or tensor.dtype != kind or (learns and tensor.requires_grad):
            return None
    return fast() if kind in TYPES and not torch.compiler.is_compiling() else None


def highest(scores_TR: Tensor, top_k: int) -> Tensor:
    """Ones for the petals with the highest scores of each token, zeros for the others (T, R); of
    equal scores the first.

    >>> highest(torch.tensor([[0.5, -1.0, 2.0]]), 2)
    tensor([[1., 0., 1.]])
    """
    compiled = compiled_for(scores_TR) if scores_TR.dtype == torch.float32 else None
    if compiled is None:
        return top(scores_TR, top_k).to(scores_TR.dtype)
    scores_TR = scores_TR.contiguous()
    tokens, petals = scores_TR.shape
    on_TR = torch.empty_like(scores_TR)
    compiled.highest(
        scores_TR.data_ptr(), on_TR.data_ptr(), tokens, petals, top_k,
        size=tokens, step=step_of(tokens, tokens * petals),
    )  # fmt: skip
    return on_TR


def scored(x_TD: Tensor, weight_RD: Tensor) -> Tensor:
    """A router's scores x W^T (T, R), float32; x is not copied where it is bfloat16.

    Args:
        x_TD: the block's input.
        weight_RD: float32.
    """
    tokens, inputs = x_TD.shape
    petals = weight_RD.shape[0]
    compiled = None
    if x_TD.dtype == torch.bfloat16 and tokens > 1 and petals <= SCORED:
        compiled = compiled_for(x_TD) and compiled_for(weight_RD)
    if compiled is None or not (x_TD.is_contiguous() and weight_RD.is_contiguous()):
        return F.linear(x_TD.float(), weight_RD)
    out_TR = torch.empty(tokens, petals)
    compiled.scores(
        x_TD.data_ptr(), weight_RD.data_ptr(), out_TR.data_ptr(), inputs, petals,
        size=tokens, step=step_of(tokens, tokens * weight_RD.numel()),
    )  # fmt: skip
    return out_TR


def silenced(h_TM: Tensor, on_TR: Tensor, backbone: int, petals: tuple[int, ...]) -> bool:
    """Make hidden activations of petals that a token does not run zero, in place.

    False, and nothing is done, where that is not possible here.

    Args:
        h_TM: hidden activations in carved order, nobody else's.
        on_TR: zero for each petal that a token does not run; weights are not looked at.
        backbone: neurons that every token runs.
        petals: neurons of each petal.
    """
    compiled = compiled_for(h_TM)
    if compiled is None or not h_TM.is_contiguous():
        return False
    tokens, width = h_TM.shape
    on_TR = _plain(on_TR)
    compiled.silence(
        h_TM.data_ptr(), on_TR.data_ptr(), _ends(backbone, petals).data_ptr(),
        _owners(backbone, petals).data_ptr(), tokens,
        len(petals), width, h_TM.dtype == torch.bfloat16,
        size=tokens, step=step_of(tokens, h_TM.numel()),
    )  # fmt: skip
    return True


def few(
    ffn: DenseFFN,
    x_TD: Tensor,
    on_TR: Tensor,
    backbone: int,
    petals: tuple[int, ...],
    weighs: bool,
) -> Tensor | None:
    """The output of a carved block for few tokens, at a cost of the neurons that they run.

    None where that cannot be done here. Sums are float32. A float32 down projection is turned in
    memory the first time, so that neurons are its rows.

    Args:
        ffn: the whole block, in carved order.
        x_TD: its input.
        on_TR: the weight of each petal, zero for those that a token does not run.
        backbone: neurons that every token runs.
        petals: neurons of each petal.
        weighs: weights are other than one and zero.
    """
    tokens, size = x_TD.shape
    if tokens > MOST.get(x_TD.dtype, 0) or (torch.is_grad_enabled() and on_TR.requires_grad):
        return None
    compiled = compiled_for(x_TD, ffn.up_MD, ffn.gate_MD, ffn.down_DM)
    turns = x_TD.dtype == torch.float32
    if compiled is None or not (
        ffn.up_MD.is_contiguous() and (turns or ffn.down_DM.is_contiguous())
    ):
        return None
    width = ffn.width
    on_TR, ends = _plain(on_TR), _ends(backbone, petals)
    chosen_TM = torch.empty(tokens, width, dtype=torch.int32)
    count_T = torch.empty(tokens, dtype=torch.int64)
    weight_TM = torch.zeros(tokens, width) if weighs else None
    compiled.listed(
        on_TR.data_ptr(), ends.data_ptr(), chosen_TM.data_ptr(), count_T.data_ptr(),
        0 if weight_TM is None else weight_TM.data_ptr(), tokens, len(petals), width,
    )  # fmt: skip
    listed = chosen_TM, count_T
    x32_TD = _plain(x_TD)
    if ffn.gate_MD is None:
        up_TM = _dots(compiled, x32_TD, [ffn.up_MD], *listed)[0]
        h_TM = ffn.act(_plus(up_TM, ffn.up_bias_M))
    else:
        gate_TM, up_TM = _dots(compiled, x32_TD, [ffn.gate_MD, ffn.up_MD], *listed)
        h_TM = ffn.act(_plus(gate_TM, ffn.gate_bias_M)) * _plus(up_TM, ffn.up_bias_M)
    if weight_TM is not None:
        h_TM = h_TM * weight_TM
    elif ffn.gate_MD is None or ffn.up_bias_M is not None:  # idle ones need not be zero
        silenced(h_TM, on_TR, backbone, petals)
    y_TD = torch.empty_like(x32_TD)
    if turns:
        function, down = compiled.weighted, rows_of(ffn.down_DM)
    else:  # prompts take up to twice as long through a bfloat16 weight that is turned
        function, down = compiled.spanned, ffn.down_DM
    function(
        h_TM.data_ptr(), down.data_ptr(), chosen_TM.data_ptr(), count_T.data_ptr(),
        y_TD.data_ptr(), tokens, width, size, size=size, step=step_of(size, down.numel(), LINE),
    )  # fmt: skip
    return y_TD if turns else y_TD.to(x_TD.dtype)


def _plain(tensor: Tensor) -> Tensor:
    """As float32, contiguous; as it is if it is that already, which is asked in less time."""
    return (tensor if tensor.dtype == torch.float32 else tensor.float()).contiguous()


def _dots(
    compiled: Any,
    x_TI: Tensor,
    matrices: Sequence[Tensor],
    chosen_TM: Tensor,
    count_T: Tensor,
) -> Tensor:
    """Products of tokens with the rows that they run of one or two matrices, float32 (G, T, M);
    zeros for the others."""
    rows_MI, more_MI = matrices[0], matrices[-1]
    width, inputs = rows_MI.shape
    out_GTM = torch.zeros(len(matrices), *chosen_TM.shape)
    size = len(matrices) * width
    compiled.dots(
        x_TI.data_ptr(), rows_MI.data_ptr(), more_MI.data_ptr(), chosen_TM.data_ptr(),
        count_T.data_ptr(), out_GTM.data_ptr(), x_TI.shape[0], inputs, width,
        rows_MI.dtype == torch.bfloat16,
        size=size, step=step_of(size, size * inputs, LINE, UNEVEN),
    )  # fmt: skip
    return out_GTM


def _plus(h_TM: Tensor, bias_M: Tensor | None) -> Tensor:
    return h_TM if bias_M is None else h_TM + bias_M.float()


@lru_cache
def _ends(backbone: int, petals: tuple[int, ...]) -> Tensor:
    """Where the backbone ends, and each petal; kept, as they are asked for at every step."""
    with torch.inference_mode(False):
        return torch.tensor([*accumulate(petals, initial=backbone)])


@lru_cache
def _owners(backbone: int, petals: tuple[int, ...]) -> Tensor:
    """The petal of every neuron, int32 (M); of the backbone's, one more than there are."""
    with torch.inference_mode(False):
        widths = torch.tensor([backbone, *petals])
        numbers = torch.tensor([len(petals), *range(len(petals))], dtype=torch.int32)
        return numbers.repeat_interleave(widths)
