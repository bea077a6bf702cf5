"""One budget spread over layers by what each would lose: a knapsack over measured local losses.

Not in a paper. Leaving neuron j of a layer out changes the residual stream s by h_j W_down[:, j],
so its loss is taken as the mean over tokens of

    l_j = (h_j ||W_down[:, j]||)^2 / ||s||^2,

and a layer of width w loses the l_j of all but its w largest. These curves are convex: dropping
the neurons of least loss, wherever they are, is optimal for the sum over layers.

Shape suffixes: T tokens, M neurons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moesaic.arch.dense import DenseFFN
from moesaic.errors import MoesaicError
from moesaic.methods.beyond.routers import neuron_weights
from moesaic.methods.budget import LayerSize, Split
from moesaic.observation.stream import Site


def losses(site: Site[DenseFFN]) -> Tensor:
    """l, the change that leaving each neuron out makes, relative to the residual stream (M,)."""
    ffn = site.view
    sum_M = torch.zeros(ffn.width, dtype=torch.float64, device=ffn.device)
    worth_M = neuron_weights(ffn)
    for (_, h_TM), stream_TD in zip(site.activations(), site.residuals(), strict=True):
        share_TM = (h_TM.float() * worth_M).square() / stream_TD.float().square().sum(1)[:, None]
        sum_M += share_TM.double().sum(0)
    return (sum_M / site.tokens).cpu()


def spread_splits(
    sizes: Sequence[LayerSize],
    losses_M: Mapping[int, Tensor],
    active: float,
    experts: int,
    top_k: int,
    least: float = 0.25,
) -> dict[int, Split]:
    """Backbone and petal sizes of each layer that meet one active ratio together.

    Args:
        sizes: all layers.
        losses_M: of the layers to carve.
        active: the target of the whole model.
        experts: petals a layer.
        top_k: petals a token runs.
        least: the share of its neurons that a token runs in any layer, at least; ``top_k`` of
            ``experts`` if that is more.

    Raises:
        MoesaicError: the target is out of reach.

    >>> sizes = [LayerSize(0, 8, 8), LayerSize(0, 8, 8)]
    >>> flat, steep = torch.ones(8), torch.tensor([9.0, 9, 9, 9, 0, 0, 0, 0])
    >>> splits = spread_splits(sizes, {0: flat, 1: steep}, 0.75, experts=2, top_k=1)
    >>> [split.active_width for split in splits.values()]
    [8, 4]
    """
    idle = experts - top_k
    cost = {i: sizes[i].ffn / sizes[i].width for i in losses_M}  # weights of a neuron
    budget = (1 - active) * sum(s.attention + s.ffn for s in sizes)
    # a petal one neuron wider leaves ``idle`` neurons more out
    steps: list[tuple[float, int]] = []
    for i, loss_M in losses_M.items():
        width = sizes[i].width
        most = min(width // experts, int((1 - least) * width) // idle)
        cheapest_M = loss_M.sort().values[: most * idle].view(most, idle).sum(1)
        steps += [(value / (cost[i] * idle), i) for value in cheapest_M.tolist()]
    if sum(cost[i] * idle for _, i in steps) < budget * 0.999:
        raise MoesaicError(
            f"active {active:g} is out of reach with {experts} experts, top-{top_k}, and at "
            f"least {least:g} of each layer active. Carve more layers or use more experts."
        )
    petal = dict.fromkeys(losses_M, 0)
    spent = 0.0
    for _, i in sorted(steps):
        step = cost[i] * idle
        if abs(budget - spent - step) > abs(budget - spent):
            break
        petal[i] += 1
        spent += step
    return {i: Split(sizes[i].width - experts * p, p, experts, top_k) for i, p in petal.items()}
