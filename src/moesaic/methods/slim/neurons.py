"""Choice of the neurons that are kept, the error that removing the others causes, and the widths
that meet a budget.

Shape suffixes: T tokens, E experts, N kept experts, M neurons of one expert, W kept neurons, S
neurons of the shared path, D hidden size; in the surgeon L neurons left, B removals of a block.

Optimal brain surgeon: neurons are removed one by one, the others compensating each removal.

With H the tokens' w h (T, M) of an expert and D its down projection (D, M), leaving out a set S and
solving for the other columns leaves the squared error ||H_S D_S^T - H_K X||^2, least over X. Taking
the neurons out one by one, with A = (H^T H + lambda)^-1 and D as compensated so far, neuron j costs
||d_j||^2 / A_jj, and the other columns take over A_kj / A_jj of d_j: the optimal brain surgeon on a
layer's own squared error. M^3 operations an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moesaic.arch.mixture import FFN
from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import not_finite
from moesaic.methods.prune.subsets import best_scores
from moesaic.methods.slim.config import Neurons
from moesaic.modules.running import LayerTokens
from moesaic.plans.base import PADDING
from moesaic.plans.cut import CutLayer
from moesaic.plans.neurons import filled_up

NAMES = {
    "energy": ("energy_EM", "shared_energy_S"),
    "reach": ("reach_EM", "shared_reach_S"),
    "size": ("size_EM", "shared_size_S"),
}
"""Statistics by field of :class:`~moesaic.methods.slim.config.Neurons`: those of routed experts and
of the shared path."""


def neurons_of(stats: Mapping[str, Tensor], seed: int, shared: bool = False) -> Neurons:
    """Return the neurons of routed experts (E, M), or of the shared path as one expert (1, S).

    Energies that were not observed are zero.
    """
    found = {name: stats[of[shared]] for name, of in NAMES.items() if of[shared] in stats}
    if shared:
        found = {name: tensor[None] for name, tensor in found.items()}
    return Neurons(**{"energy": torch.zeros_like(found["size"]), **found}, seed=seed)


PASS_BYTES = 256 << 20
"""Memory for inner products of neurons: of the experts whose sums are taken in one pass."""


def pairs_bytes(experts: int, width: int) -> int:
    """Return the bytes of the inner products that are held at once, float64, and of the three
    matrices like them in which neurons are removed from one expert.

    >>> pairs_bytes(128, 768) >> 20, pairs_bytes(1, 14_336) >> 20
    (269, 6272)
    """
    each = 8 * width**2
    return min(experts * each, max(PASS_BYTES, each)) + 3 * each


@torch.no_grad()
def inner_products(site: LayerTokens[FFN], shared: bool = False) -> Iterator[Tensor]:
    """Yield the sum of (w h_j)(w h_k) over an expert's tokens (M, M), float64, expert by expert.

    The tokens are read once for as many experts as fit :data:`PASS_BYTES`.

    Args:
        site: the layer, and its tokens.
        shared: True for the shared path, as one expert (S, S).

    Raises:
        MoesaicError: a sum is not finite.
    """
    view = site.view
    count = 1 if shared else view.count
    width = getattr(view, "shared_width", 0) if shared else view.width
    together = max(1, PASS_BYTES // (8 * max(1, width) ** 2))
    for first in range(0, count, together):
        experts = range(first, min(first + together, count))
        gram_NMM = torch.zeros(len(experts), width, width, dtype=torch.float64)
        for x_TD in site.inputs():
            if not shared:
                for i, _, wh_TM in view.weighted(x_TD, experts=experts):
                    gram_NMM[i - first] += (wh_TM.T @ wh_TM).cpu()
            elif (h_TS := view.shared_weighted(x_TD)) is not None:
                gram_NMM[0] += (h_TS.T @ h_TS).cpu()
        if not gram_NMM.isfinite().all():
            raise not_finite(f"Layer {site.index} computes")
        yield from gram_NMM


def down_projections(view: FFN, shared: bool = False) -> Iterator[Tensor]:
    """Yield the down projection of each expert (D, M), or of the shared path (D, S)."""
    ffns = [view.shared_ffn] if shared else [view] * view.count
    for i, ffn in enumerate(ffns):
        if ffn is not None:
            yield ffn.weights_of(i)[-1].detach().cpu()


def _ranking(score_EM: Tensor, reach_EM: Tensor) -> Tensor:
    """Return each row's indices, highest scores first (E, M); equal ones by reach, then by index.

    The neurons of an expert that no token reached all score zero.

    >>> _ranking(torch.tensor([[1.0, 3.0, 1.0]]), torch.tensor([[1.0, 1.0, 2.0]])).tolist()
    [[1, 2, 0]]
    """
    order_EM = reach_EM.argsort(dim=1, descending=True, stable=True)
    again_EM = score_EM.gather(1, order_EM).argsort(dim=1, descending=True, stable=True)
    return order_EM.gather(1, again_EM)


def highest(score_EM: Tensor, width: int, reach_EM: Tensor) -> Tensor:
    """Return the rising indices of each row's highest scores (E, W); equal ones by reach."""
    return _ranking(score_EM, reach_EM)[:, :width].sort(dim=1).values


def highest_in_layer(score_EM: Tensor, count: int, reach_EM: Tensor, step: int = 1) -> Tensor:
    """Return the kept neurons of each expert (E, W), those of the highest scores in the layer, then
    PADDING.

    Args:
        score_EM: scores of neurons.
        count: neurons to keep, of all experts together.
        reach_EM: order of neurons with equal scores.
        step: widths are a multiple of this, and at least this.

    >>> score = torch.tensor([[1.0, 9, 8], [6, 2, 7], [0, 0, 1]])
    >>> highest_in_layer(score, count=5, reach_EM=torch.ones(3, 3)).tolist()
    [[1, 2], [0, 2], [2, -1]]
    """
    ranked_EM = _ranking(score_EM, reach_EM)
    blocks = ranked_EM[:, : ranked_EM.shape[1] // step * step].unflatten(1, (-1, step))
    worth_EB, reach_EB = (
        table_EM.gather(1, blocks.flatten(1)).square().view(blocks.shape).sum(2)
        for table_EM in (score_EM, reach_EM)
    )
    worth_EB[:, 0] = torch.inf
    best = _ranking(worth_EB.view(1, -1), reach_EB.view(1, -1))[0, : count // step]
    blocks_E = torch.bincount(best // worth_EB.shape[1], minlength=len(score_EM))
    widths: list[int] = (blocks_E * step).tolist()
    orders = [row[:width].sort().values for row, width in zip(ranked_EM, widths, strict=True)]
    return torch.stack([filled_up(order_W, max(widths)) for order_W in orders])


def choose(
    score_EM: Tensor, count: int, width: int, reach_EM: Tensor, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the kept experts (N,), and the kept neurons of each (N, W).

    Args:
        score_EM: scores of neurons.
        count: experts to keep: those with the highest sum of squared scores over their best
            ``width`` neurons.
        width: neurons to keep of each.
        reach_EM: order of neurons with equal scores.
        groups: router groups; the same number of experts is removed from each.

    >>> score = torch.tensor([[1.0, 9], [6, 6], [0, 2]])
    >>> kept, neurons = choose(score, count=2, width=1, reach_EM=torch.ones(3, 2))
    >>> kept.tolist(), neurons.tolist()
    ([0, 1], [[1], [0]])
    """
    neurons_EW = highest(score_EM, width, reach_EM)
    worth_E = score_EM.gather(1, neurons_EW).square().sum(1)
    kept = best_scores(worth_E, count, groups).nonzero().flatten()
    return kept, neurons_EW[kept]


def share_lost(score_EM: Tensor, kept: Tensor, neurons_NW: Tensor) -> float:
    """Return the share of all neurons' squared scores that is removed."""
    square_EM = score_EM.square()
    kept_NW = square_EM[kept].gather(1, neurons_NW.clamp(min=0))
    kept_sum = kept_NW[neurons_NW != PADDING].sum().item()
    return 1 - kept_sum / max(square_EM.sum().item(), 1e-300)


@torch.no_grad()
def losses(site: LayerTokens[FFN], layers: Sequence[CutLayer]) -> list[float]:
    """Return the exact error of the routed output for each of several plans of a layer.

    The error is ||F' - F|| / ||r|| over the site's tokens, F' with the router restricted to the
    kept experts, and r the residual stream after the layer, which all later layers read: so losses
    of different layers can be compared.
    """
    total, errors = 0.0, [0.0] * len(layers)
    for x_TD, r_TD in zip(site.inputs(), site.residuals(), strict=True):
        y_TD = _routed_output(site.view, x_TD)
        total += r_TD.double().square().sum().item()
        for c, layer in enumerate(layers):
            error_TD = _routed_output(site.view, x_TD, layer) - y_TD
            errors[c] += error_TD.double().square().sum().item()
    return [(error / max(total, 1e-300)) ** 0.5 for error in errors]


def _routed_output(view: FFN, x_TD: Tensor, layer: CutLayer | None = None) -> Tensor:
    """Return the routed experts' part of a layer's output (T, D), float32.

    Args:
        view: the layer before slimming.
        x_TD: its input.
        layer: plan of the kept experts and neurons; None for all.
    """
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    allowed_E = None
    order: dict[int, Tensor] = {}
    if layer is not None:
        places = enumerate(layer.kept or [0])
        order = {i: layer.neurons_of(n, view.width).to(x_TD.device) for n, i in places}
        if len(order) < view.count:
            allowed_E = torch.zeros(view.count, dtype=torch.bool)
            allowed_E[layer.kept_E] = True
    for i, rows, h_NM in view.weighted(x_TD, allowed_E):
        down_DM = view.weights_of(i)[-1]
        if i in order:
            h_NM, down_DM = h_NM[:, order[i]], down_DM[:, order[i]]
        y_TD[rows] += h_NM @ down_DM.T.float()
    return y_TD + view.weighed_beside(x_TD, allowed_E)


# --- optimal brain surgeon -----------------------------------------------------------------------


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
    factor_MM = gram_MM.clone()
    factor_MM.diagonal().add_(strength)
    factor_MM = torch.linalg.cholesky(factor_MM)
    inverse_LL = torch.cholesky_inverse(factor_MM)
    del factor_MM  # matrices of wide experts are gigabytes
    alike_LL = down_DM.T @ down_DM
    left_L = torch.arange(width)
    cost_M = torch.zeros(width, dtype=torch.float64)
    last = 0.0
    while len(left_L):
        spread_L, norm_L = inverse_LL.diagonal().clone(), alike_LL.diagonal().clone()
        removed_L = torch.zeros(len(left_L), dtype=torch.bool)
        turns = min(BLOCK, len(left_L))
        # inverse - column^T share, and alike - share^T half - half^T share, in this block
        column_BL, share_BL, half_BL = torch.zeros(3, turns, len(left_L), dtype=torch.float64)
        for t in range(turns):
            trial_L = norm_L / spread_L.clamp(min=1e-300)
            j = int(trial_L.masked_fill(removed_L, torch.inf).argmin())
            removed_L[j] = True
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
        kept_L = (~removed_L).nonzero().flatten()
        left_L = left_L[kept_L]
        column_BL, share_BL, half_BL = (t_BL[:, kept_L] for t_BL in (column_BL, share_BL, half_BL))
        square_LL = kept_L[:, None], kept_L
        inverse_LL = inverse_LL[square_LL].addmm_(column_BL.T, share_BL, alpha=-1)
        alike_LL = alike_LL[square_LL].addmm_(share_BL.T, half_BL, alpha=-1)
        alike_LL.addmm_(half_BL.T, share_BL, alpha=-1)
    return cost_M


# --- widths that meet a budget -------------------------------------------------------------------


MULTIPLES = {256: 0.01, 64: 0.01, 32: 0.01, 8: 0.05, 4: 0.05}
"""Most distance from the target width, relative to the width before, at which a multiple is chosen.

Blocks of k-quants, tiles of kernels, blocks of q8_0 and q4_0; 8 and 4 numbers are :data:`ROW`
bytes, in 16 and in 32 bits.
"""
ROW = 16
"""Bytes of which experts' rows must be a multiple in transformers' grouped matrix products."""
BLOCKED = 0.1
"""Most distance from the target width, relative to the width before, at which experts keep whole
blocks of a checkpoint's quantisation."""
CLOSE = 0.01
"""Distance by which a requested multiple may miss its target, relative to the width before."""


def _multiple_for(width: int, target: float, row: int = 1) -> int:
    """Return the largest multiple that comes close enough to a target.

    Args:
        width: neurons before.
        target: neurons to keep.
        row: the least multiple, near the target or not, if it divides the width.

    >>> _multiple_for(14_336, 7_168), _multiple_for(1408, 704), _multiple_for(96, 67.2)
    (256, 64, 8)
    >>> _multiple_for(32, 4), _multiple_for(32, 4, row=8), _multiple_for(30, 4, row=8)
    (4, 8, 4)
    """
    row = 1 if width % row else row

    def misses(multiple: int) -> float:
        return abs(nearest(target, multiple, width) - target) / width

    fits = (m for m, most in MULTIPLES.items() if row <= m <= width and misses(m) <= most)
    return next(fits, row)


def in_blocks(width: int, target: float, block: int) -> int:
    """Return a format's block if experts should keep whole ones, else 0.

    Experts of other widths are stored in twice the bits. They should if the nearest width is within
    :data:`BLOCKED` of the target.

    >>> in_blocks(768, 460.8, 128), in_blocks(48, 40, 16), in_blocks(100, 50, 16)
    (128, 0, 0)
    """
    if not block or width % block or abs(nearest(target, block, width) - target) > BLOCKED * width:
        return 0
    return block


def nearest(target: float, multiple: int, width: int) -> int:
    """Return the multiple nearest to a target, at least one of it, at most the width before.

    >>> nearest(70, 64, 100), nearest(10, 64, 100), nearest(100, 64, 100)
    (64, 64, 64)
    """
    return max(multiple, min(round(target / multiple), width // multiple) * multiple)


def width_for(
    width: int, target: float, multiple: int | None, option: str, row: int = 1
) -> tuple[int, int]:
    """Return the width that meets a target, and the number that it is a multiple of.

    Args:
        width: neurons before.
        target: neurons to keep; may be a fraction.
        multiple: the requested multiple; None for the largest that meets the target.
        option: name of the option that set the target, for messages.
        row: the least multiple, if it divides the width.

    Raises:
        MoesaicError: no multiple is close (names the nearest that works), or it is none of ``row``.

    >>> width_for(128, 64, None, "keep"), width_for(128, 96, 32, "keep")
    ((64, 64), (96, 32))
    >>> width_for(1000, 505, 10, "keep")  # a hundredth of the width is close enough
    (500, 10)
    """
    if multiple is None:
        step = _multiple_for(width, target, row)
        return nearest(target, step, width), step
    if multiple > width:
        raise MoesaicError(
            f"multiple {multiple} is out of reach: there are {width} neurons, the most that works."
        )
    best, step = nearest(target, multiple, width), multiple
    if abs(best - target) > max(CLOSE * width, 0.5):
        raise MoesaicError(
            f"{option} {target / width:.4g} is out of reach with multiple {step} of {width} "
            f"neurons; the nearest that works is {best / width:.4g} ({best} neurons)."
        )
    if best % row and not width % row:
        raise MoesaicError(
            f"multiple {step}: {best} neurons are not a whole number of rows of {ROW} bytes, which "
            f"transformers' products of experts take; {nearest(target, row, width)} are."
        )
    return best, step
