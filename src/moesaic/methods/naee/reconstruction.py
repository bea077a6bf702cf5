"""Eq. 3 of NAEE: the exact error of a layer's routed output for any set of experts that stays.

Equation numbers are the paper's (Lu et al., 2024).

==================  ==========================================================
C                   the experts that stay
w, w'               combine weights of a token, with all experts and with C (T, E)
f_i(x)              output of expert i
F(x), F'(x, C)      output of the routed experts, with all and with C
G_t                 <f_i(x_t), f_j(x_t)>: the Gram matrix of a token (E, E)
==================  ==========================================================

Eq. 3: C minimises ||F'(x, C) - F(x)||_F. With every expert's output known once,

    ||F'(x, C) - F(x)||^2 = sum_t (w'_t - w_t)^T G_t (w'_t - w_t),

so a set costs its routing and a small quadratic form: exact, and no layer is run again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.arch.routing import RoutingFunction
from moesaic.errors import MoesaicError
from moesaic.methods.naee.search import Losses
from moesaic.stream.experts import ExpertStats, unpacked

ELEMENTS = 1 << 22
"""Numbers in one block of candidate sets times tokens times experts."""


def squared_errors(diff_SCE: Tensor, gram_SEE: Tensor) -> Tensor:
    """||F'(x_t, C) - F(x_t)||^2 = (w' - w)^T G_t (w' - w) for every token and set (S, C).

    >>> diff = torch.tensor([[[1.0, -1.0]]])
    >>> gram = torch.tensor([[[2.0, 0.5], [0.5, 1.0]]])
    >>> squared_errors(diff, gram)
    tensor([[2.]])
    """
    return ((diff_SCE @ gram_SEE) * diff_SCE).sum(-1)


def reconstruction_losses(
    stats: ExpertStats, routing: RoutingFunction, sum_batch_norms: bool = False
) -> Losses:
    """||F'(x, C) - F(x)||_F of Eq. 3 for many sets at once, (C, E) to (C,), float64.

    Tokens go through in blocks, so that memory is bounded whatever their number. With cross terms
    (progressive pruning) the target is the original model's output, F(x) + delta.

    Raises:
        MoesaicError: the statistics hold no Gram matrix.
    """
    if not stats.sampled_T.any():
        raise MoesaicError("No token's Gram matrix was kept: reconstruction needs more gram_mb.")
    logits_SE = stats.logits_TE[stats.sampled_T]
    w_SE = routing.weights(logits_SE).double()
    batches, batch_S = stats.batch_T[stats.sampled_T].unique(return_inverse=True)
    rows = max(1, ELEMENTS // stats.experts**2)

    def losses(kept_CE: Tensor) -> Tensor:
        squared_CB = torch.zeros(len(kept_CE), len(batches), dtype=torch.float64)
        for block in torch.arange(len(w_SE)).split(rows):
            gram_SEE = unpacked(stats.gram_SP[block], stats.experts)
            sets = max(1, ELEMENTS // (len(block) * stats.experts))
            for at in torch.arange(len(kept_CE)).split(sets):
                diff_SCE = weights_for(routing, logits_SE[block], kept_CE[at]) - w_SE[block, None]
                error_SC = squared_errors(diff_SCE, gram_SEE)
                if len(stats.delta_S):
                    cross_SC = (diff_SCE @ stats.cross_SE[block].unsqueeze(-1)).squeeze(-1)
                    error_SC = error_SC - 2 * cross_SC + stats.delta_S[block, None]
                into = torch.zeros(len(at), len(batches), dtype=torch.float64)
                squared_CB[at] += into.index_add_(1, batch_S[block], error_SC.T.contiguous())
        squared_CB = squared_CB.clamp(min=0)
        return squared_CB.sqrt().sum(1) if sum_batch_norms else squared_CB.sum(1).sqrt()

    return losses


def weights_for(routing: RoutingFunction, logits_SE: Tensor, kept_CE: Tensor) -> Tensor:
    """w', the combine weights with only a set of experts there (S, C, E), float64."""
    tokens, sets = len(logits_SE), len(kept_CE)
    every_NE = logits_SE.repeat_interleave(sets, 0)
    w_NE = routing.weights(every_NE, kept_CE.repeat(tokens, 1))
    return w_NE.double().view(tokens, sets, -1)


def output_norm(stats: ExpertStats, routing: RoutingFunction) -> float:
    """||F(x)||_F over the sampled tokens: what a loss is a share of."""
    logits_SE = stats.logits_TE[stats.sampled_T]
    total = 0.0
    for block in torch.arange(len(logits_SE)).split(max(1, ELEMENTS // stats.experts**2)):
        w_SE = routing.weights(logits_SE[block]).double()
        gram_SEE = unpacked(stats.gram_SP[block], stats.experts)
        total += squared_errors(w_SE.unsqueeze(1), gram_SEE).sum().item()
    return max(total, 0.0) ** 0.5
