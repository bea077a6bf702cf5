"""Eq. 3 of NAEE: the exact error of a layer's routed output for any set of kept experts.

Equation numbers are the paper's (Lu et al., 2024).

==================  ==========================================================
C                   the kept experts
w, w'               combine weights of a token, with all experts and with C (T, A)
f_i(x)              output of expert i
F(x), F'(x, C)      output of the experts, with all and with C
G_t                 <f_i(x_t), f_j(x_t)>: the Gram matrix of a token (A, A)
==================  ==========================================================

Experts are the E routed ones, followed by the shared ones if the router weighs these too: all A
whose weights may change.

Eq. 3: C minimises ||F'(x, C) - F(x)||_F. With every expert's output known once,

    ||F'(x, C) - F(x)||^2 = sum_t (w'_t - w_t)^T G_t (w'_t - w_t),

so a set costs its routing and a small quadratic form: exact, and no layer is run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from moesaic.arch.routing import RoutingFunction
from moesaic.methods.prune.rerouting import Rerouting, law_of
from moesaic.methods.prune.subsets import Neighbours
from moesaic.observation.stats import unpacked

ELEMENTS = 1 << 22
"""Elements in one block of candidate sets times tokens times experts."""
RELEASED_BATCH = 16_384
"""Tokens of a batch in the released code: 8 sequences of 2,048."""


def squared_errors(diff_SCA: Tensor, gram_SAA: Tensor) -> Tensor:
    """Return ||F'(x_t, C) - F(x_t)||^2 = (w' - w)^T G_t (w' - w) for every token and set (S, C).

    >>> diff = torch.tensor([[[1.0, -1.0]]])
    >>> gram = torch.tensor([[[2.0, 0.5], [0.5, 1.0]]])
    >>> squared_errors(diff, gram)
    tensor([[2.]])
    """
    return ((diff_SCA @ gram_SAA) * diff_SCA).sum(-1)


class Reconstruction(Neighbours):
    """Function from sets of experts (C, E) to ||F'(x, C) - F(x)||_F of Eq. 3 (C,), float64.

    Tokens are processed in blocks, so memory is bounded. For sets that differ in one expert only
    the tokens that are rerouted are computed, if the router allows it
    (:mod:`moesaic.methods.prune.rerouting`). With cross terms (progressive pruning) the target is
    the original model's output, F(x) + delta.

    Args:
        stats: the layer's statistics: ``logits_TX``, ``batch_T``, ``sampled_T``, ``gram_SP``, and
            the cross terms if there are any.
        routing: its routing function.
        sum_batch_norms: sum the norms of batches of :data:`RELEASED_BATCH` tokens, as the released
            code does.
        device: where to compute.
    """

    def __init__(
        self,
        stats: Mapping[str, Tensor],
        routing: RoutingFunction,
        sum_batch_norms: bool = False,
        device: str | torch.device = "cpu",
    ) -> None:
        self.stats, self.routing = stats, routing
        self.sum_batch_norms = sum_batch_norms
        self.device = torch.device(device)
        sampled_T = stats["sampled_T"]
        self.logits_SX = stats["logits_TX"][sampled_T].to(self.device)
        self.w_SA = routing.every_weight(self.logits_SX).double()
        batch_T = stats["batch_T"]
        if sum_batch_norms:
            batch_T = torch.arange(len(batch_T)) // RELEASED_BATCH
        batches, batch_S = batch_T[sampled_T].unique(return_inverse=True)
        self.batch_S, self.batches = batch_S.to(self.device), len(batches)

    @cached_property
    def rerouting(self) -> Rerouting | None:
        """Errors of neighbouring sets by rerouted tokens; None without a known law."""
        law = law_of(self.routing, self.logits_SX)
        if law is None:
            return None
        return Rerouting(self.stats, self.routing, law, self.batch_S, self.device)

    def __call__(self, kept_CE: Tensor) -> Tensor:
        stats, kept_CE, weighed = self.stats, kept_CE.to(self.device), self.w_SA.shape[1]
        squared_CB = torch.zeros(
            len(kept_CE), self.batches, dtype=torch.float64, device=self.device
        )
        rows = max(1, ELEMENTS // weighed**2)
        for block in torch.arange(len(self.w_SA)).split(rows):
            gram_SAA = unpacked(stats["gram_SP"][block].to(self.device), weighed)
            sets = max(1, ELEMENTS // (len(block) * weighed))
            batch_S = self.batch_S[block.to(self.device)]
            logits_SX, w_S1A = (
                x[block.to(self.device)] for x in (self.logits_SX, self.w_SA[:, None])
            )
            for at in torch.arange(len(kept_CE), device=self.device).split(sets):
                diff_SCA = _weights_for(self.routing, logits_SX, kept_CE[at]) - w_S1A
                error_SC = squared_errors(diff_SCA, gram_SAA)
                if "delta_S" in stats:
                    cross_SA, delta_S = (
                        stats[name][block].to(self.device) for name in ("cross_SA", "delta_S")
                    )
                    cross_SC = (diff_SCA @ cross_SA.unsqueeze(-1)).squeeze(-1)
                    error_SC = error_SC - 2 * cross_SC + delta_S[:, None]
                into = torch.zeros_like(squared_CB[at])
                squared_CB[at] += into.index_add_(1, batch_S, error_SC.T.contiguous())
        return self._roots(squared_CB)

    def without(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        if self.rerouting is None:
            return super().without(kept_E, candidates)
        return self._roots(self.rerouting.without(kept_E, candidates))

    def having(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        if self.rerouting is None:
            return super().having(kept_E, candidates)
        return self._roots(self.rerouting.having(kept_E, candidates))

    def _roots(self, squared_CB: Tensor) -> Tensor:
        squared_CB = squared_CB.clamp(min=0)
        loss_C = squared_CB.sqrt().sum(1) if self.sum_batch_norms else squared_CB.sum(1).sqrt()
        # some routers return NaN for experts without a score: such sets never win
        return loss_C.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _weights_for(routing: RoutingFunction, logits_SX: Tensor, kept_CE: Tensor) -> Tensor:
    """Return w', the combine weights with only a set of experts present (S, C, A), float64."""
    tokens, sets = len(logits_SX), len(kept_CE)
    every_NX = logits_SX.repeat_interleave(sets, 0)
    w_NA = routing.every_weight(every_NX, kept_CE.repeat(tokens, 1))
    return w_NA.double().view(tokens, sets, -1)


def output_norm(stats: Mapping[str, Tensor], routing: RoutingFunction) -> float:
    """Return ||F(x)||_F over the sampled tokens, the denominator of relative losses."""
    logits_SX, weighed = stats["logits_TX"][stats["sampled_T"]], routing.count + routing.always
    total = 0.0
    for block in torch.arange(len(logits_SX)).split(max(1, ELEMENTS // weighed**2)):
        w_SA = routing.every_weight(logits_SX[block]).double()
        gram_SAA = unpacked(stats["gram_SP"][block], weighed)
        total += squared_errors(w_SA.unsqueeze(1), gram_SAA).sum().item()
    return max(total, 0.0) ** 0.5
