"""Recovery in closed form: what stays of a layer, refitted to what the whole layer made.

Not in a paper; the least-squares reconstruction of layer-wise pruning, over features that differ
token by token. With h~ the input of the down projection of what a token still runs, idle neurons
zero,

    min over dW, b of  sum_t ||y - W h~ - dW h~ - sum_e b_e [e runs]||^2 + lambda ||dW||^2,

y the layer's output in the model as it was. The result stays near the weights W it starts from;
lambda is chosen on held-out tokens, and infinite where no change helps. One solve a layer, see
:class:`~moesaic.layers.regression.Ridge` for its memory.

- Carved: h~ in carved order, masked by the layer's own router; petal biases b_e if asked for.
- Condensed: h~ of the shared path and the chosen experts side by side.
- Pruned: expert by expert, h~ = w_i h_i with the router's true weight, each fitted to what those
  before it left over: a system of one expert's width instead of all experts' at once.

Shape suffixes: T tokens, D hidden size, M neurons in their new order, R petals, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.layers.condensed import replacement
from moesaic.arch.mixture import MoEFFN
from moesaic.nn import Router, chosen, running
from moesaic.plan import CarvedLayer, CondensedLayer, LayerPlan, MergedLayer, PrunedLayer
from moesaic.layers.regression import Fit, Ridge
from moesaic.stream.stream import Site

Refitted = tuple[Any, dict[str, Any]]
"""A layer's plan with weights of its own, and what that recovered."""


def refitted(plan: LayerPlan, site: Site, weights: bool = True, biases: bool = False) -> Refitted:
    """A layer's plan with a down projection fitted to the original layer's output.

    Args:
        plan: what was decided; layers of which nothing is left out are returned as they are.
        site: the layer as it was, and its tokens.
        weights: refit the down projection.
        biases: give every petal of a carved layer an output bias.

    Raises:
        MoesaicError: the plan's kind cannot be refitted.
    """
    if isinstance(plan, CarvedLayer):
        return refit_carved(plan, site, weights, biases)
    if isinstance(plan, MergedLayer):
        raise MoesaicError("Merged experts are not refitted; choose another criterion.")
    if isinstance(plan, PrunedLayer):
        return refit_pruned(plan, site)
    if isinstance(plan, CondensedLayer) and isinstance(site.view, MoEFFN):
        return refit_condensed(plan, site)
    return plan, {}


def _found(missing: float, left: float, whole: float) -> dict[str, Any]:
    """For the report: squared error before, relative to the output; the share of it that went."""
    return {"lost": missing / max(whole, 1e-300), "recovered": 1 - left / max(missing, 1e-300)}


class _Balance:
    """A regression of what a layer's output misses, and how large that is."""

    def __init__(self, outputs: int, features: int, device: torch.device, free: int = 0) -> None:
        self.ridge = Ridge(features, outputs, device, free)
        self.whole = 0.0

    def add(self, h_TF: Tensor, kept_TD: Tensor, y_TD: Tensor) -> None:
        self.ridge.add(h_TF.float(), (y_TD - kept_TD).float())
        self.whole += y_TD.double().square().sum().item()

    def solve(self) -> tuple[Fit, dict[str, Any]]:
        fit = self.ridge.solve()
        missing = self.ridge.fit.square + self.ridge.held.square
        strength = fit.strength if math.isfinite(fit.strength) else None
        found = _found(missing, fit.unexplained * missing, self.whole)
        return fit, {**found, "strength": strength}


# --- carved --------------------------------------------------------------------------------------


def router_of(plan: CarvedLayer, device: torch.device) -> Router:
    """The router that a layer will have."""
    assert plan.router_RD is not None
    router = Router(plan.router_RD.shape[1], len(plan.petals), plan.top_k, plan.routing).to(device)
    router.weight.data = plan.router_RD.to(device)
    return router


def runs(plan: CarvedLayer, site: Site) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of h, of what each token still runs of it, and of which petals that are.

    Yields:
        h (T, M), as it was; h~ in carved order; ones and zeros (T, R), without petals one column
        of ones.
    """
    order_M = plan.order_M.to(site.view.device)
    router = router_of(plan, site.view.device) if plan.petals else None
    for x_TD, whole_TM in site.activations():
        h_TM = whole_TM[:, order_M]
        if router is None:
            yield whole_TM, h_TM, h_TM.new_ones(len(h_TM), 1)
            continue
        chosen_TK = router(x_TD, h_TM[:, : plan.backbone] if router.sees_backbone else None)
        on_TM = running(chosen_TK, plan.backbone, plan.petals)
        yield whole_TM, h_TM * on_TM.to(h_TM), chosen(chosen_TK, len(plan.petals)).to(h_TM)


def refit_carved(plan: CarvedLayer, site: Site, weights: bool, biases: bool) -> Refitted:
    """A new down projection, petal biases, or both. Biases alone are the mean left out."""
    ffn = site.view
    down_DM = ffn.down_DM[:, plan.order_M.to(ffn.device)]
    hidden_size, width = down_DM.shape
    petals = max(1, len(plan.petals)) if biases else 0
    balance = _Balance(hidden_size, width * weights + petals, ffn.device, petals)
    for (whole_TM, h_TM, on_TR), target_TD in zip(runs(plan, site), site.targets(), strict=True):
        y_TD = ffn.output(whole_TM) if target_TD is None else target_TD
        features = [h_TM] * weights + [on_TR] * biases
        balance.add(torch.cat(features, dim=1), F.linear(h_TM, down_DM, ffn.down_bias_D), y_TD)
    fit, found = balance.solve()
    change_DF = fit.weight_FO.T
    if weights:
        new_DM = (down_DM.double() + change_DF[:, :width]).to(down_DM.dtype)
        plan = replace(plan, down_DM=new_DM.cpu())
    if biases:
        bias_RD = change_DF[:, -petals:].T.to(down_DM.dtype).contiguous()
        plan = replace(plan, bias_RD=bias_RD.cpu())
    return plan, found


# --- condensed -----------------------------------------------------------------------------------


def refit_condensed(plan: CondensedLayer, site: Site) -> Refitted:
    """A new down projection of the dense MLP that takes a mixture's place."""
    view = site.view
    assert isinstance(view, MoEFFN)
    module: Any = replacement(site.layer, view.arch, plan)
    down_DM: Tensor = module.down_proj.weight.detach()
    if not down_DM.numel():
        return plan, {}
    balance = _Balance(down_DM.shape[0], down_DM.shape[1], down_DM.device)
    seen: list[Tensor] = []
    module.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for x_TD, target_TD in zip(site.inputs(), site.targets(), strict=True):
        y_TD = view.output(x_TD) if target_TD is None else target_TD
        if view.arch.beside is not None and view.shared is not None:
            y_TD = y_TD + view.shared(x_TD)
        kept_TD = module(x_TD)
        balance.add(seen.pop(), kept_TD, y_TD)
    fit, found = balance.solve()
    new_DM = (down_DM.double() + fit.weight_FO.T).to(down_DM.dtype)
    return replace(plan, down_DM=new_DM.cpu()), found


# --- pruned --------------------------------------------------------------------------------------


def refit_pruned(plan: PrunedLayer, site: Site) -> Refitted:
    """New down projections of the experts that stay, one after the other."""
    view = site.view
    assert isinstance(view, MoEFFN)
    allowed_E = torch.zeros(view.count, dtype=torch.bool, device=view.device)
    allowed_E[plan.experts.to(view.device)] = True
    inputs, residuals, weights = [], [], []
    whole = missing = 0.0
    for x_TD, target_TD in zip(site.inputs(), site.targets(), strict=True):
        y_TD = view.output(x_TD) if target_TD is None else target_TD
        with view.restricted(allowed_E):
            residual_TD = (y_TD - view.output(x_TD)).float()
        logits_TE = view.logits(x_TD)
        weights.append(view.rule.weights(logits_TE, allowed_E.expand_as(logits_TE)))
        inputs.append(x_TD)
        residuals.append(residual_TD)
        whole += y_TD.double().square().sum().item()
        missing += residual_TD.double().square().sum().item()
    down = view.experts.down_proj.detach()
    new = down[plan.kept_E.clamp(min=0).to(down.device)].clone()
    for place, i in enumerate(plan.kept):
        if i < 0:  # a place for an expert that is never routed to
            new[place] = 0
            continue
        rows = [w_TE[:, i].nonzero().flatten() for w_TE in weights]
        parts = [
            view.hidden(i, x_TD[at]).float() * w_TE[at, i, None]
            for x_TD, w_TE, at in zip(inputs, weights, rows, strict=True)
        ]
        ridge = Ridge(view.width, inputs[0].shape[1], down.device)
        for h_TM, residual_TD, at in zip(parts, residuals, rows, strict=True):
            ridge.add(h_TM, residual_TD[at])
        change_MD = ridge.solve().weight_FO
        for h_TM, residual_TD, at in zip(parts, residuals, rows, strict=True):
            residual_TD[at] -= h_TM @ change_MD.float()
        change = change_MD if view.experts.is_transposed else change_MD.T
        new[place] = (new[place].double() + change).to(down.dtype)
    left = sum(r_TD.double().square().sum().item() for r_TD in residuals)
    return replace(plan, down_E=new.cpu()), _found(missing, left, whole)
