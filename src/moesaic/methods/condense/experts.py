"""Eq. 2, Alg. 1 and Tab. 5 of CD-MoE: gates and choice of the experts of one condensed layer.

Cao et al., "Condense, Don't Just Prune: Enhancing Efficiency and Performance in MoE Layer Pruning"
(TMLR 2025). Equation and algorithm numbers are the paper's.

==================  ==========================================================
E_s, E_i            the shared path, routed expert i
g_{i,t}             the true combine weight of expert i for token t (T, E)
g_i                 Eq. 2: its fixed weight, the mean of g_{i,t} where it is not 0
C, K                the routed experts that are kept, |C| = K
h                   Eq. 3: x + E_s(x) + sum_{i in C} g_i E_i(x); no router
==================  ==========================================================

Alg. 1 chooses C greedily by JS(O_ref, O) of the decoder layer's output, each layer alone. With the
residual, the shared path and every E_i(x) known once, each candidate's output is a sum of vectors,
so the paper's 369 inferences a layer (66 experts, K = 6) become one. Where a layer does more with
its block's output than to add it, such as normalise it, each candidate is run.

Deviations from the paper or its code, and options that restore theirs:

- Experts that no token chose have no g_i and are left out.
- Qwen's shared path keeps its gate, a sigmoid a token: ``shared_gate="token"``. ``"mean"`` fixes it
  to its mean as Eq. 2 fixes the others, which lets the architecture itself hold the layer.
- Models without shared experts: ``keep="shared"`` would leave nothing of a layer (Layer Drop) and
  is refused.
- ``metric="ppl"`` is for the choice of layers (Tab. 8); a layer's output has no perplexity, and
  experts are then chosen by JS.
- PL_Alpha_Hill is the mean over an expert's three matrices; x_min is sought from 0.95 to 1.5 times
  the histogram's peak, as in the code that Yang et al. describe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from moesaic.arch.mixture import MoEFFN
from moesaic.distributed import mean_over_processes
from moesaic.methods.prune.criteria import random_scores

BLOCK_BYTES = 64 << 20
"""Bytes of candidates' outputs in memory at once."""


# --- Alg. 1 --------------------------------------------------------------------------------------


def candidate_losses(
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    chosen: list[int],
    g_E: Tensor,
    candidates: list[int],
    divergence: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the mean divergence from O_ref with each candidate added to the chosen experts
    (candidates,); without candidates, that of the chosen experts alone (1,).

    Args:
        batches: O_ref (T, D), the layer's output before it is condensed; the residual plus the kept
            part of the shared path (T, D); and the outputs E_i(x) of all routed experts, scaled as
            they are added to the residual (T, E, D).
        chosen: the experts chosen so far.
        g_E: the fixed weights of Eq. 2.
        candidates: experts to add, one at a time.
        divergence: of two outputs, by token.
    """
    total = torch.zeros(max(1, len(candidates)), dtype=torch.float64)
    tokens = 0
    for reference_TD, start_TD, experts_TED in batches:
        now_TD = start_TD.float()
        g = g_E.to(now_TD)
        for i in chosen:
            now_TD = now_TD + g[i] * experts_TED[:, i].float()
        rows = max(1, BLOCK_BYTES // (4 * total.numel() * now_TD.shape[1]))
        for at in torch.arange(len(now_TD)).split(rows):
            trial = now_TD[at, None]
            if candidates:
                f = experts_TED[at][:, candidates].float()
                trial = trial + g[candidates, None] * f
            total += divergence(reference_TD[at, None], trial).double().sum(0).cpu()
        tokens += len(now_TD)
    return mean_over_processes(total, tokens)


def greedy_experts(
    losses: Callable[[list[int], list[int]], Tensor], g_E: Tensor, k: int
) -> tuple[list[int], list[float]]:
    """Choose experts greedily by Alg. 1; of equally good ones the first.

    Args:
        losses: function of (chosen, candidates) that returns the divergence with each candidate
            added (candidates,).
        g_E: the fixed weights of Eq. 2; experts without one are left out.
        k: experts to choose.

    Returns:
        experts in the order in which they were chosen, and the divergence after each.
    """
    left = [i for i, g in enumerate(g_E.tolist()) if g == g]
    chosen: list[int] = []
    least: list[float] = []
    while left and len(chosen) < k:
        loss_C = losses(chosen, left)
        best = int(loss_C.numpy().argmin())
        least.append(loss_C[best].item())
        chosen.append(left.pop(best))
    return chosen, least


# --- Tab. 5: experts by their weights alone ------------------------------------------------------


BINS = 100
"""Bins of the histogram in which the fix-finger method looks for a peak."""
AROUND = (0.95, 1.5)
"""Range in which it looks for x_min, in multiples of the peak."""


def pl_alpha_hill(weight: Tensor) -> float:
    """Return PL_Alpha_Hill, Eq. 4: 1 + k / sum_{i <= k} ln(lambda_{n-i+1} / lambda_{n-k}), lambda
    of W^T W.

    k by the fix-finger method (Yang et al. 2023): lambda_{n-k}, their x_min, is sought around the
    peak of the histogram of log10 lambda; the one whose power law is nearest to the eigenvalues
    from there on, by their Kolmogorov-Smirnov distance, is taken.
    """
    value_N = torch.linalg.svdvals(weight.float()).square().flip(0)
    return tail_exponent(value_N[value_N > value_N[-1] * 1e-12].double())


def tail_exponent(value_N: Tensor) -> float:
    """Return Eq. 4 for eigenvalues in rising order, with x_min by the fix-finger method.

    Args:
        value_N: at least two, above zero, float64.
    """
    log_N = value_N.log10()
    counts = torch.histc(log_N, bins=BINS)
    step = (log_N[-1] - log_N[0]) / BINS
    peak = (10 ** (log_N[0] + counts.argmax() * step)).item()
    least, most = (share * peak for share in AROUND)
    near = ((value_N >= least) & (value_N <= most)).nonzero().flatten().tolist()
    starts = [i for i in near if i < len(value_N) - 1] or [
        min(int((value_N < peak).sum()), len(value_N) - 2)
    ]
    fits = []
    for start in starts:
        ratio_K = value_N[start:] / value_N[start]
        alpha = 1 + (len(ratio_K) - 1) / ratio_K.log().sum().clamp(min=1e-12).item()
        below_K = torch.arange(len(ratio_K)) / len(ratio_K)
        distance = (1 - ratio_K ** (1 - alpha) - below_K).abs().max().item()
        fits.append((distance, start, alpha))
    return min(fits)[-1]


def weight_scores(view: MoEFFN, search: str, layer: int, seed: int) -> list[float]:
    """Return a score for each expert from its weights or at random; the lowest are kept."""
    if search == "random":
        return random_scores(view.count, layer, seed).tolist()
    experts = [view.weights_of(i) for i in range(view.count)]
    if search == "l1":
        return [sum(w.double().abs().sum().item() for w in weights) for weights in experts]
    return [sum(map(pl_alpha_hill, weights)) / 3 for weights in experts]


def ranked_experts(score_E: list[float], g_E: Tensor, k: int) -> list[int]:
    """Return the k experts of lowest score among those that at least one token chose.

    >>> ranked_experts([0.2, 0.1, 0.3], torch.tensor([0.5, float("nan"), 0.5]), 1)
    [0]
    """
    left = [i for i, g in enumerate(g_E.tolist()) if g == g]
    return sorted(left, key=lambda i: (score_E[i], i))[:k]
