"""Criteria that score one expert at a time: baselines and newer ones. The lowest scores go.

==========  ====================================================  ==========================
T_j         tokens routed to expert j
g_j, f_j    its true combine weight, its output
==========  ====================================================  ==========================

frequency   Lu et al. (2024), Sec. 4.1: |T_j|
gate        sum of g_j over T_j
ean         expert activation norm: sum of ||f_j|| over T_j
man, msan   mean of ||f_j||, of ||f_j||^2, over T_j
reap        Lasby et al. (2025), router-weighted expert activation pruning: mean of g_j ||f_j||
aimer       without data: mean |w| over rms(w), pooled over gate, up and down; the highest go
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moesaic.stream.experts import ExpertStats


def mean_over(sum_E: Tensor, calls_E: Tensor) -> Tensor:
    """Mean over T_j; 0 for an expert that no token was routed to.

    >>> mean_over(torch.tensor([6.0, 0.0]), torch.tensor([3, 0]))
    tensor([2., 0.])
    """
    return sum_E / calls_E.clamp(min=1)


SCORES: dict[str, Callable[[ExpertStats], Tensor]] = {
    "frequency": lambda s: s.calls_E.double(),
    "gate": lambda s: s.gate_E,
    "ean": lambda s: s.norm_E,
    "man": lambda s: mean_over(s.norm_E, s.calls_E),
    "msan": lambda s: mean_over(s.square_E, s.calls_E),
    "reap": lambda s: mean_over(s.gated_E, s.calls_E),
    "aimer": lambda s: -s.spread_E,
}


def random_scores(experts: int, layer: int, seed: int) -> Tensor:
    """A score that says nothing, the same for the same seed and layer."""
    generator = torch.Generator().manual_seed(seed * 10_007 + layer)
    return torch.rand(experts, dtype=torch.float64, generator=generator)


def pairwise_losses(pair_EE: Tensor) -> Callable[[Tensor], Tensor]:
    """What dropping a set S costs if no token is rerouted: 1_S^T Q 1_S.

    Q_ij = sum over tokens of g_i g_j <f_i, f_j>.

    >>> loss = pairwise_losses(torch.tensor([[1.0, -1.0], [-1.0, 2.0]]))
    >>> loss(torch.tensor([[False, True], [False, False]]))
    tensor([1., 1.])
    """

    def losses(kept_CE: Tensor) -> Tensor:
        gone_CE = (~kept_CE).to(pair_EE.dtype)
        return ((gone_CE @ pair_EE) * gone_CE).sum(-1)

    return losses
