"""Recovery in closed form: the least squares that every layer kind's ``refit`` solves.

Not in a paper; the least-squares reconstruction of layer-wise pruning, over features that differ
token by token. With h~ the input of the down projection of what a token still runs, idle neurons
zero,

    min over dW, b of  sum_t ||y - W h~ - dW h~ - sum_e b_e [e runs]||^2 + lambda ||dW||^2,

y the layer's output in the model as it was. The result stays near the weights W it starts from;
lambda is chosen on held-out tokens, and infinite where no change helps. One solve a layer, see
:class:`~moesaic.layers.regression.Ridge` for its memory.

Shape suffixes: T tokens, F features, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.arch.mixture import MoEFFN
from moesaic.foreign import JSON
from moesaic.layers.base import Seen
from moesaic.layers.regression import HELD_OUT, Fit, Ridge

if TYPE_CHECKING:
    from moesaic.layers.pruned import PrunedLayer


class Balance:
    """A regression of what a layer's output misses, and how large that is.

    Args:
        outputs: D.
        features: F.
        device: where sums are kept.
        free: the last so many features are not penalised.
    """

    def __init__(self, outputs: int, features: int, device: torch.device, free: int = 0) -> None:
        self.ridge = Ridge(features, outputs, device, free)
        self.whole = 0.0

    def add(self, h_TF: Tensor, kept_TD: Tensor, y_TD: Tensor) -> None:
        """Take in a batch: features, the output that is left, and the original's output."""
        self.ridge.add(h_TF.float(), (y_TD - kept_TD).float())
        self.whole += y_TD.double().square().sum().item()

    def solve(self) -> tuple[Fit, JSON]:
        """The weights; and ``lost``, ``recovered`` and ``strength`` for the record."""
        fit = self.ridge.solve()
        missing = self.ridge.fit.square + self.ridge.held.square
        strength = fit.strength if math.isfinite(fit.strength) else None
        found = recovered(missing, fit.unexplained * missing, self.whole)
        return fit, {**found, "strength": strength}


def recovered(missing: float, left: float, whole: float) -> JSON:
    """Squared errors for the record.

    Args:
        missing: before the refit.
        left: after it.
        whole: the square of the output.

    Returns:
        ``lost``: the error before, relative to the output; ``recovered``: the share that went.
    """
    return {"lost": missing / max(whole, 1e-300), "recovered": 1 - left / max(missing, 1e-300)}


def refitted_downs(
    layer: PrunedLayer, site: Seen[MoEFFN], shared: Tensor | None = None
) -> tuple[PrunedLayer, JSON]:
    """New down projections of a mixture's experts that stay, one expert after the other.

    Features are h~ = w_i h_i of the neurons that stay, with the router's true weight; each expert
    is fitted to the error that those before it left over: a system of one expert's width instead
    of all at once. What is told of it was measured on tokens that no fit saw; the weights are then
    solved for from all tokens.

    Args:
        layer: the layer, with the experts' own down projections.
        site: the layer as it was, and its tokens.
        shared: the neurons of the shared path that stay; None for all.

    Returns:
        the layer, and ``lost`` and ``recovered`` for the record.
    """
    view = site.view
    device, width = view.device, view.width
    allowed_E = torch.zeros(view.count, dtype=torch.bool, device=device)
    allowed_E[layer.experts.to(device)] = True
    place_of = {i: place for place, i in enumerate(layer.kept) if i >= 0}
    neurons = {i: layer.neurons_of(place, width).to(device) for i, place in place_of.items()}
    downs = {i: view.weights_of(i)[2].detach() for i in place_of}
    gone = {i: left_out(order, width) for i, order in neurons.items()}
    inputs, residuals, held, weights = [], [], [], []
    whole = missing = 0.0
    for x_TD, target_TD in zip(site.inputs(), site.targets(), strict=True):
        y_TD = view.output(x_TD) if target_TD is None else target_TD
        with view.restricted(allowed_E):
            residual_TD = (y_TD - view.output(x_TD)).float()
        for i, rows, h_NM in view.weighted(x_TD, allowed_E):
            if len(gone[i]):
                residual_TD[rows] += h_NM[:, gone[i]] @ downs[i][:, gone[i]].T.float()
        weights.append(view.combine_weights(x_TD, allowed_E))
        residual_TD += shared_loss(view, x_TD, shared)
        inputs.append(x_TD)
        residuals.append(residual_TD)
        held.append(torch.arange(len(x_TD), device=device) >= len(x_TD) - len(x_TD) // HELD_OUT)
        whole += y_TD.double().square().sum().item()
        missing += residual_TD.double().square().sum().item()
    lost = held_out(residuals, held)
    fused = view.experts.down_proj.detach()
    new: list[Tensor] = []
    for place, i in enumerate(layer.kept):
        if i < 0:  # a place for an expert that is never routed to
            order = layer.neurons_of(place, width)
            new.append(torch.zeros_like(downs[layer.kept[0]][:, order]))
            continue
        down_DW = downs[i][:, neurons[i]].double()
        ridge = Ridge(down_DW.shape[1], down_DW.shape[0], device)
        parts = []
        for x_TD, w_TE, residual_TD, held_T in zip(inputs, weights, residuals, held, strict=True):
            rows = w_TE[:, i].nonzero().flatten()
            h_NM = view.hidden(i, x_TD[rows]).float() * w_TE[rows, i, None]
            h_NW, r_ND, held_N = h_NM[:, neurons[i]], residual_TD[rows], held_T[rows]
            ridge.fit.add(h_NW[~held_N], r_ND[~held_N])
            ridge.held.add(h_NW[held_N], r_ND[held_N])
            parts.append((rows, h_NW))
        fit = ridge.solve()
        for residual_TD, (rows, h_NW) in zip(residuals, parts, strict=True):
            residual_TD[rows] -= h_NW @ fit.trial_FO.float()
        new.append((down_DW + fit.weight_FO.T).to(fused.dtype))
    down_E = torch.stack([d_DW.T if view.experts.is_transposed else d_DW for d_DW in new])
    share = held_out(residuals, held) / max(lost, 1e-300)
    found = recovered(missing, share * missing, whole)
    return replace(layer, down_E=down_E.contiguous().cpu()), found


def left_out(order_W: Tensor, width: int) -> Tensor:
    """The neurons of ``width`` that are not in an order.

    >>> left_out(torch.tensor([0, 2]), 4).tolist()
    [1, 3]
    """
    gone_M = torch.ones(width, dtype=torch.bool, device=order_W.device)
    gone_M[order_W] = False
    return gone_M.nonzero().flatten()


def shared_loss(view: MoEFFN, x_TD: Tensor, order_S: Tensor | None) -> Tensor | float:
    """What the shared path's output loses with its neurons (T, D); 0 where all stay."""
    h_TS, ffn = view.shared_weighted(x_TD), view.shared_ffn
    if order_S is None or h_TS is None or ffn is None or view.arch.beside is not None:
        return 0.0  # a path beside the block is no part of its output
    order_S = order_S[order_S >= 0].to(x_TD.device)
    gone = left_out(order_S, h_TS.shape[1])
    return h_TS[:, gone] @ ffn.down_DM[:, gone].T.float()


def held_out(residuals: list[Tensor], held: list[Tensor]) -> float:
    """The squared error of held-out tokens."""
    pairs = zip(residuals, held, strict=True)
    return sum(r_TD[held_T].double().square().sum().item() for r_TD, held_T in pairs)
