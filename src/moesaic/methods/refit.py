"""Recovery in closed form: what stays of a layer, refitted to what the whole layer made.

Not in a paper; the least-squares reconstruction of layer-wise pruning (OBC, SparseGPT, FLAP's
bias) over features that are masked token by token. With h~ the hidden activations of the neurons
that a token runs, idle ones zero,

    min over dW, b of  sum_t ||y - W h~ - dW h~ - sum_e b_e [e runs]||^2 + lambda ||dW||^2,

y the layer's output in the model as it was. The refit stays near the weights W it starts from;
lambda is chosen on held-out tokens and is infinite where no change helps. One solve a layer, see
:class:`~moesaic.regression.Ridge` for its memory.

Shape suffixes: T tokens, D hidden size, M neurons in carved order, R petals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.nn import Router, chosen, running
from moesaic.plan import CarvedLayer
from moesaic.regression import Ridge
from moesaic.stream import Site


def router_of(plan: CarvedLayer, device: torch.device) -> Router:
    """The router that a layer will have."""
    assert plan.router_RD is not None
    shape = (plan.router_RD.shape[1], len(plan.petals), plan.top_k, plan.routing)
    router = Router(*shape).to(device)
    router.weight.data = plan.router_RD.to(device)
    if plan.router_bias_R is not None:
        router.bias.data = plan.router_bias_R.to(device)
    return router


def runs(plan: CarvedLayer, site: Site) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of x (T, D), of h in carved order, idle neurons zero (T, M), and of the petals that
    run (T, R): one column of ones where there are none."""
    order_M = plan.order_M.to(site.view.device)
    router = router_of(plan, site.view.device) if plan.petals else None
    for x_TD, h_TM in site.activations():
        h_TM = h_TM[:, order_M]
        if router is None:
            yield x_TD, h_TM, h_TM.new_ones(len(h_TM), 1)
            continue
        seen = h_TM[:, : plan.backbone] if router.sees_backbone else None
        chosen_TK = router(x_TD, seen)
        on_TM = running(chosen_TK, plan.backbone, plan.petals)
        yield x_TD, h_TM * on_TM.to(h_TM), chosen(chosen_TK, len(plan.petals)).to(h_TM)


def refitted(
    plan: CarvedLayer, site: Site, weights: bool, biases: bool
) -> tuple[CarvedLayer, dict[str, Any]]:
    """The same layer with a new down projection, petal biases, or both, and how well it fits.

    Biases alone are the mean of what is left out, petal by petal.

    Args:
        plan: a carved layer without either.
        site: the layer and its tokens.
        weights: refit the down projection.
        biases: give every petal an output bias.
    """
    down_DM = site.view.down_DM[:, plan.order_M.to(site.view.device)]
    petals, width = max(1, len(plan.petals)), plan.order_M.numel()
    free = petals if biases else 0
    ridge = Ridge(width * weights + free, down_DM.shape[0], down_DM.device, free)
    whole = 0.0
    for (x_TD, h_TM, on_TR), target_TD in zip(runs(plan, site), site.targets(), strict=True):
        bias_D = site.view.down_bias_D
        y_TD = site.view.output(site.view.hidden(x_TD)) if target_TD is None else target_TD
        kept_TD = F.linear(h_TM, down_DM, bias_D)
        features = [h_TM] * weights + [on_TR] * biases
        ridge.add(torch.cat(features, dim=1).float(), (y_TD - kept_TD).float())
        whole += y_TD.double().square().sum().item()
    fit = ridge.solve()
    missing = ridge.fit.square + ridge.held.square
    change_DF = fit.weight_FO.T
    found = {
        "lost": missing / whole,
        "strength": fit.strength if math.isfinite(fit.strength) else None,
        "recovered": 1 - fit.unexplained,
    }
    if weights:
        new_DM = (down_DM.double() + change_DF[:, :width]).to(down_DM.dtype)
        plan = replace(plan, down_DM=new_DM.cpu())
    if biases:
        plan = replace(plan, bias_RD=change_DF[:, -free:].T.to(down_DM.dtype).contiguous().cpu())
    return plan, found
