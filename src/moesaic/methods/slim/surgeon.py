"""Optimal brain surgeon: neurons are removed one by one, the others compensating each removal.

With H the tokens' w h (T, M) of an expert and D its down projection (D, M), leaving out a set S and
solving for the other columns leaves the squared error ||H_S D_S^T - H_K X||^2, least over X. Taking
the neurons out one by one, with A = (H^T H + lambda)^-1 and D as compensated so far, neuron j costs
||d_j||^2 / A_jj, and the other columns take over A_kj / A_jj of d_j: the optimal brain surgeon on a
layer's own squared error. M^3 operations an expert.

Shape suffixes: M neurons of one expert, L of them left, B removals of a block, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 0.1
"""Ridge lambda relative to the mean square of h: little is compensated if there are few tokens."""
BLOCK = 64
"""Removals after which matrices are updated, in one product instead of one each."""


def removal_costs(gram_MM: Tensor, down_DM: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return the cost of each neuron when it is the cheapest one left (M,), float64.

    Costs rise with each removal, so the neurons of the highest cost are those to keep.

    Args:
        gram_MM: H^T H, float64.
        down_DM: the down projection, float64.
        ridge: lambda, relative to the mean of the diagonal of ``gram_MM``.

    >>> gram, down = torch.diag(torch.tensor([1.0, 4.0]).double()), torch.ones(1, 2).double()
    >>> removal_costs(gram, down, ridge=0.0).float().tolist()
    [1.0, 4.0]
    >>> first, second = removal_costs(torch.eye(2).double(), down, ridge=0.0).tolist()
    >>> first < second
    True
    """
    width = len(gram_MM)
    strength = max(ridge * gram_MM.diagonal().mean().item(), 1e-12)
    damped_MM = gram_MM + strength * torch.eye(width, dtype=gram_MM.dtype)
    inverse_LL = torch.cholesky_inverse(torch.linalg.cholesky(damped_MM))
    alike_LL = down_DM.T @ down_DM
    left_L = torch.arange(width)
    cost_M = torch.zeros(width, dtype=torch.float64)
    last = 0.0
    while len(left_L):
        spread_L, norm_L = inverse_LL.diagonal().clone(), alike_LL.diagonal().clone()
        gone_L = torch.zeros(len(left_L), dtype=torch.bool)
        turns = min(BLOCK, len(left_L))
        # inverse - column^T share, and alike - share^T half - half^T share, in this block
        column_BL, share_BL, half_BL = torch.zeros(3, turns, len(left_L), dtype=torch.float64)
        for t in range(turns):
            trial_L = norm_L / spread_L.clamp(min=1e-300)
            j = int(trial_L.masked_fill(gone_L, torch.inf).argmin())
            gone_L[j] = True
            last = max(trial_L[j].item(), last * (1 + 1e-9))
            cost_M[left_L[j]] = last
            before_BL, shares_BL, halves_BL = column_BL[:t], share_BL[:t], half_BL[:t]
            column_L = inverse_LL[j] - shares_BL[:, j] @ before_BL
            alike_L = alike_LL[j] - halves_BL[:, j] @ shares_BL - shares_BL[:, j] @ halves_BL
            share_L = column_L / column_L[j]
            half_L = alike_L - share_L * (alike_L[j] / 2)
            column_BL[t], share_BL[t], half_BL[t] = column_L, share_L, half_L
            spread_L -= column_L * share_L
            norm_L -= 2 * share_L * half_L
        stay_L = ~gone_L
        left_L = left_L[stay_L]
        column_BL, share_BL, half_BL = (t_BL[:, stay_L] for t_BL in (column_BL, share_BL, half_BL))
        inverse_LL = inverse_LL[stay_L][:, stay_L] - column_BL.T @ share_BL
        change_LL = share_BL.T @ half_BL
        alike_LL = alike_LL[stay_L][:, stay_L] - change_LL - change_LL.T
    return cost_M
