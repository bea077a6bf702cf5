"""Choice of the neurons that are kept, and the error that removing the others causes.

Shape suffixes: T tokens, E experts, N kept experts, M neurons of one expert, W kept neurons, S
neurons of the shared path, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moesaic.arch.mixture import FFN
from moesaic.methods.prune.subsets import best_scores
from moesaic.methods.slim.scores import Neurons
from moesaic.modules.running import LayerTokens
from moesaic.plans.base import PADDING
from moesaic.plans.neurons import filled_up

NAMES = {
    "energy": ("energy_EM", "shared_energy_S"),
    "reach": ("reach_EM", "shared_reach_S"),
    "size": ("size_EM", "shared_size_S"),
    "gram": ("gram_EMM", "shared_gram_SS"),
    "down": ("down_EDM", "shared_down_DS"),
}
"""Statistics by field of :class:`~moesaic.methods.slim.scores.Neurons`: those of routed experts and
of the shared path."""


def neurons_of(stats: Mapping[str, Tensor], seed: int, shared: bool = False) -> Neurons:
    """Return the neurons of routed experts (E, M), or of the shared path as one expert (1, S).

    Energies that were not observed are zero.
    """
    found = {name: stats[of[shared]] for name, of in NAMES.items() if of[shared] in stats}
    if shared:
        found = {name: tensor[None] for name, tensor in found.items()}
    return Neurons(**{"energy": torch.zeros_like(found["size"]), **found}, seed=seed)


def ranked(score_EM: Tensor, reach_EM: Tensor) -> Tensor:
    """Return each row's indices, highest scores first (E, M); equal ones by reach, then by index.

    The neurons of an expert that no token reached all score zero.

    >>> ranked(torch.tensor([[1.0, 3.0, 1.0]]), torch.tensor([[1.0, 1.0, 2.0]])).tolist()
    [[1, 2, 0]]
    """
    order_EM = reach_EM.argsort(dim=1, descending=True, stable=True)
    again_EM = score_EM.gather(1, order_EM).argsort(dim=1, descending=True, stable=True)
    return order_EM.gather(1, again_EM)


def highest(score_EM: Tensor, width: int, reach_EM: Tensor) -> Tensor:
    """Return the rising indices of each row's highest scores (E, W); equal ones by reach."""
    return ranked(score_EM, reach_EM)[:, :width].sort(dim=1).values


def uneven(score_EM: Tensor, count: int, reach_EM: Tensor, step: int = 1) -> Tensor:
    """Return the kept neurons of each expert (E, W), those of the highest scores in the layer, then
    PADDING.

    Args:
        score_EM: scores of neurons.
        count: neurons to keep, of all experts together.
        reach_EM: order of neurons with equal scores.
        step: widths are a multiple of this, and at least this.

    >>> score = torch.tensor([[1.0, 9, 8], [6, 2, 7], [0, 0, 1]])
    >>> uneven(score, count=5, reach_EM=torch.ones(3, 3)).tolist()
    [[1, 2], [0, 2], [2, -1]]
    """
    ranked_EM = ranked(score_EM, reach_EM)
    blocks = ranked_EM[:, : ranked_EM.shape[1] // step * step].unflatten(1, (-1, step))
    worth_EB, reach_EB = (
        table_EM.gather(1, blocks.flatten(1)).square().view(blocks.shape).sum(2)
        for table_EM in (score_EM, reach_EM)
    )
    worth_EB[:, 0] = torch.inf
    best = ranked(worth_EB.view(1, -1), reach_EB.view(1, -1))[0, : count // step]
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
    stay_NW = square_EM[kept].gather(1, neurons_NW.clamp(min=0))
    stays = stay_NW[neurons_NW != PADDING].sum().item()
    return 1 - stays / max(square_EM.sum().item(), 1e-300)


Shape = tuple[Tensor, Tensor]
"""Kept experts (N,), and the kept neurons of each (N, W)."""


@torch.no_grad()
def losses(site: LayerTokens[FFN], shapes: Sequence[Shape]) -> list[float]:
    """Return the exact error of the routed output for each of several shapes.

    The error is ||F' - F|| / ||r|| over the site's tokens, F' with the router restricted to the
    kept experts, and r the residual stream after the layer, which all later layers read: so losses
    of different layers can be compared.
    """
    total, errors = 0.0, [0.0] * len(shapes)
    for x_TD, r_TD in zip(site.inputs(), site.residuals(), strict=True):
        y_TD = routed(site.view, x_TD)
        total += r_TD.double().square().sum().item()
        for c, (kept, neurons_NW) in enumerate(shapes):
            error_TD = routed(site.view, x_TD, kept, neurons_NW) - y_TD
            errors[c] += error_TD.double().square().sum().item()
    return [(error / max(total, 1e-300)) ** 0.5 for error in errors]


def routed(
    view: FFN,
    x_TD: Tensor,
    kept: Tensor | None = None,
    neurons_NW: Tensor | None = None,
) -> Tensor:
    """Return the routed experts' part of a layer's output (T, D), float32.

    Args:
        view: the layer before slimming.
        x_TD: its input.
        kept: the kept experts (N,); None for all.
        neurons_NW: the kept neurons of each, then PADDING; None for all.
    """
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    allowed_E = None
    order: dict[int, Tensor] = {}
    if kept is not None and neurons_NW is not None:
        orders = (order_W[order_W != PADDING] for order_W in neurons_NW.to(x_TD.device))
        order = dict(zip(kept.tolist(), orders, strict=True))
        if len(order) < view.count:
            allowed_E = torch.zeros(view.count, dtype=torch.bool)
            allowed_E[kept] = True
    for i, rows, h_NM in view.weighted(x_TD, allowed_E):
        down_DM = view.weights_of(i)[-1]
        if i in order:
            h_NM, down_DM = h_NM[:, order[i]], down_DM[:, order[i]]
        y_TD[rows] += h_NM @ down_DM.T.float()
    return y_TD + view.weighed_beside(x_TD, allowed_E)


def candidates(least: int, most: int, step: int) -> Iterator[int]:
    """Yield numbers of experts to try, the most first: multiples of ``step``, at most eight.

    >>> list(candidates(2, 8, 1)), list(candidates(4, 32, 2))
    ([8, 7, 6, 5, 4, 3, 2], [32, 28, 24, 20, 16, 12, 8, 4])
    """
    stride = step * max(1, -(-(most - least) // (7 * step)))
    yield from range(most, least - 1, -stride)
