"""Neurons taken out one after the other, those that stay making up for each as well as they can.

With H the tokens' w h (T, M) of an expert and D its down projection (D, M), leaving out a set S and
solving for the other columns leaves the squared error ||H_S D_S^T - H_K X||^2, least over X. Taking
the neurons out one by one, with A = (H^T H + lambda)^-1 and D as it was made up for so far, neuron
j costs ||d_j||^2 / A_jj, and the other columns take over A_kj / A_jj of d_j: the optimal brain
surgeon on a layer's own squared error. M^3 operations an expert.

Shape suffixes: M neurons of one expert, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 0.1
"""lambda, relative to the mean square of h: little is made up for where tokens are few."""
BLOCK = 64
"""Turns after which matrices are brought up to date, in one product instead of one for each."""


def removal_costs(gram_MM: Tensor, down_DM: Tensor, ridge: float = RIDGE) -> Tensor:
    """What each neuron costs when its turn to go comes, the cheapest first (M,), float64.

    Costs rise from turn to turn, so that the neurons of the highest cost are those that stay.

    Args:
        gram_MM: H^T H, float64.
        down_DM: the down projection, float64.
        ridge: lambda.

    >>> gram, down = torch.diag(torch.tensor([1.0, 4.0]).double()), torch.ones(1, 2).double()
    >>> removal_costs(gram, down, ridge=0.0).float().tolist()
    [1.0, 4.0]
    >>> first, second = removal_costs(torch.eye(2).double(), down, ridge=0.0).tolist()
    >>> first < second
    True
    """
    width = len(gram_MM)
    strength = max(ridge * gram_MM.diagonal().mean().item(), 1e-12)
    inverse_MM = torch.linalg.inv(gram_MM + strength * torch.eye(width, dtype=gram_MM.dtype))
    alike_MM = down_DM.T @ down_DM
    spread_M, norm_M = inverse_MM.diagonal().clone(), alike_MM.diagonal().clone()
    cost_M = torch.zeros(width, dtype=torch.float64)
    gone_M = torch.zeros(width, dtype=torch.bool)
    last = 0.0
    for start in range(0, width, BLOCK):
        turns = min(BLOCK, width - start)
        # inverse - column share^T, and alike - share half^T - half share^T, of this block's turns
        column_MB, share_MB, half_MB = torch.zeros(3, width, turns, dtype=torch.float64)
        for t in range(turns):
            trial_M = norm_M / spread_M.clamp(min=1e-300)
            j = int(trial_M.masked_fill(gone_M, torch.inf).argmin())
            gone_M[j] = True
            last = max(trial_M[j].item(), last * (1 + 1e-9))
            cost_M[j] = last
            before_MB, shares_MB, halves_MB = column_MB[:, :t], share_MB[:, :t], half_MB[:, :t]
            column_M = inverse_MM[:, j] - before_MB @ shares_MB[j]
            alike_M = alike_MM[:, j] - shares_MB @ halves_MB[j] - halves_MB @ shares_MB[j]
            share_M = column_M / column_M[j]
            column_MB[:, t], share_MB[:, t] = column_M, share_M
            half_MB[:, t] = alike_M - share_M * alike_M[j] / 2
            spread_M -= column_M * share_M
            norm_M -= 2 * share_M * half_MB[:, t]
        inverse_MM -= column_MB @ share_MB.T
        change_MM = share_MB @ half_MB.T
        alike_MM -= change_MM + change_MM.T
        spread_M, norm_M = inverse_MM.diagonal().clone(), alike_MM.diagonal().clone()
    return cost_M
