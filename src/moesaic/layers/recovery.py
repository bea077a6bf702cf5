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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import DenseFFN
from moesaic.arch.mixture import MoEFFN
from moesaic.foreign import JSON
from moesaic.layers.base import Seen
from moesaic.layers.regression import HELD_OUT, Fit, Ridge


class Staying(Protocol):
    """The experts of a mixture that stay, as a layer's plan says."""

    @property
    def kept(self) -> list[int]:
        """The original expert at each new place, below 0 where there is none."""

    @property
    def experts(self) -> Tensor:
        """The original experts that stay, int64."""

    def neurons_of(self, place: int, width: int) -> Tensor:
        """The neurons, of ``width``, that the expert at a place keeps, int64."""


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


def refitted_down(
    site: Seen[DenseFFN],
    order_M: Tensor,
    running: Iterable[tuple[Tensor, Tensor, Tensor]],
    weights: bool,
    biases: int,
) -> tuple[Tensor | None, Tensor | None, JSON]:
    """A new down projection of a dense FFN of which each token runs a part, and output biases.

    Args:
        site: the layer as it was, and its tokens.
        order_M: the neurons that stay, in their new order.
        running: by batch the hidden activations as they were, h~ (T, M) of the neurons that stay,
            zero where a token does not run one, and ones and zeros (T, R) for the biases it gets.
        weights: solve for the down projection.
        biases: R, or 0 to solve for none.

    Returns:
        the down projection (D, M) or None, the biases (R, D) or None; ``lost``, ``recovered`` and
        ``strength`` for the record.
    """
    ffn = site.view
    down_DM = ffn.down_DM[:, order_M]
    hidden_size, width = down_DM.shape
    balance = Balance(hidden_size, width * weights + biases, ffn.device, biases)
    for (whole_TM, h_TM, on_TR), target_TD in zip(running, site.targets(), strict=True):
        y_TD = ffn.output(whole_TM) if target_TD is None else target_TD
        features = [h_TM] * weights + [on_TR] * bool(biases)
        balance.add(torch.cat(features, dim=1), F.linear(h_TM, down_DM, ffn.down_bias_D), y_TD)
    fit, found = balance.solve()
    change_DF = fit.weight_FO.T
    new_DM = bias_RD = None
    if weights:
        new_DM = (down_DM.double() + change_DF[:, :width]).to(down_DM.dtype).cpu()
    if biases:
        bias_RD = change_DF[:, -biases:].T.to(down_DM.dtype).contiguous().cpu()
    return new_DM, bias_RD, found


@dataclass
class _Part:
    """An expert, or the shared path, while its down projection is solved for."""

    features: list[tuple[Tensor, Tensor]]
    """By batch its tokens' rows (N,), and h~ (N, W)."""
    change_WO: Tensor
    """float64: what is added to the down projection, transposed."""


def refitted_downs(
    layer: Staying,
    site: Seen[MoEFFN],
    shared_S: Tensor | None = None,
    jointly: bool = False,
) -> tuple[Tensor, Tensor | None, JSON]:
    """New down projections of a mixture's experts that stay.

    Features are h~ = w_i h_i of the neurons that stay, with the router's true weight. One after the
    other, each expert is fitted to the error that those before it left over: systems of one
    expert's width. Jointly, all are solved for in one system, whose features are those of every
    expert side by side, zero where a token does not run it. An expert that lost neurons and that no
    token runs is fitted to its own output of all tokens. What is told of it was measured on
    tokens that no fit saw; the weights are then solved for from all tokens.

    Args:
        layer: the layer, with the experts' own down projections.
        site: the layer as it was, and its tokens.
        shared_S: the neurons of the shared path that stay, whose down projection is solved for
            too; None to leave that path alone.
        jointly: try it jointly, too, where there are at most :data:`JOINT` features, and take what
            leaves less on held-out tokens.

    Returns:
        down projections by place, as the experts' module holds them (E, D, W); that of the shared
        path (D, S) or None; ``lost`` and ``recovered`` for the record, and with ``jointly`` also
        ``tried``: what each way recovered.
    """
    view = site.view
    device, width = view.device, view.width
    allowed_E = torch.zeros(view.count, dtype=torch.bool, device=device)
    allowed_E[layer.experts.to(device)] = True
    place_of = {i: place for place, i in enumerate(layer.kept) if i >= 0}
    neurons = {i: layer.neurons_of(place, width).to(device) for i, place in place_of.items()}
    gone = {i: left_out(order, width) for i, order in neurons.items()}
    downs = {i: view.weights_of(i)[-1].detach() for i in place_of}
    parts = {i: _part(len(order), downs[i]) for i, order in neurons.items()}
    ffn = view.shared_ffn
    if shared_S is not None and ffn is not None:
        shared_S = shared_S[shared_S >= 0].to(device)
        parts[SHARED] = _part(len(shared_S), ffn.down_DM)
    residuals, held = [], []
    whole = missing = 0.0
    for x_TD, target_TD in zip(site.inputs(), site.targets(), strict=True):
        y_TD = view.output(x_TD) if target_TD is None else target_TD
        with view.restricted(allowed_E):
            residual_TD = (y_TD - view.output(x_TD)).float()
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        running = {i: (rows, h_NM) for i, rows, h_NM in view.weighted(x_TD, allowed_E)}
        for i, order in neurons.items():
            rows, h_NM = running.get(i, (empty, x_TD.new_zeros(0, width).float()))
            residual_TD[rows] += h_NM[:, gone[i]] @ downs[i][:, gone[i]].T.float()
            parts[i].features.append((rows, h_NM[:, order]))
        h_TS = view.shared_weighted(x_TD)
        if SHARED in parts and shared_S is not None and h_TS is not None and ffn is not None:
            lost = left_out(shared_S, h_TS.shape[1])
            residual_TD += h_TS[:, lost] @ ffn.down_DM[:, lost].T.float()
            every = torch.arange(len(x_TD), device=device)
            parts[SHARED].features.append((every, h_TS[:, shared_S]))
        residuals.append(residual_TD)
        held.append(torch.arange(len(x_TD), device=device) >= len(x_TD) - len(x_TD) // HELD_OUT)
        whole += y_TD.double().square().sum().item()
        missing += residual_TD.double().square().sum().item()
    before = max(_held_out(residuals, held), 1e-300)
    widths = [len(part.change_WO) for part in parts.values()]
    together = None
    if jointly and sum(widths) <= JOINT:
        together = _fit_jointly([*parts.values()], residuals, held)
    for part in parts.values():
        _fit(part, residuals, held)
    left = _held_out(residuals, held) / before
    tried = {"one after the other": 1 - left}
    if together is not None:
        tried["jointly"] = 1 - together.unexplained
        if together.unexplained < left:
            left = together.unexplained
            changes = together.weight_FO.split(widths)
            for part, change_WO in zip(parts.values(), changes, strict=True):
                part.change_WO = change_WO
    for i, part in parts.items():
        if i in gone and len(gone[i]) and not any(len(rows) for rows, _ in part.features):
            part.change_WO = _alone(site, i, neurons[i], gone[i])
    fused = view.experts.down_proj.detach()
    room = max(map(len, neurons.values()))
    new = [fused.new_zeros(view.weights_of(min(place_of))[-1].shape[0], room)] * len(layer.kept)
    for i, place in place_of.items():
        changed = downs[i][:, neurons[i]].double() + parts[i].change_WO.T
        new[place] = F.pad(changed.to(fused.dtype), (0, room - len(neurons[i])))
    down_E = torch.stack([d_DW.T if view.experts.is_transposed else d_DW for d_DW in new])
    shared_DS = None
    if SHARED in parts and shared_S is not None and ffn is not None:
        changed = ffn.down_DM.detach()[:, shared_S].double() + parts[SHARED].change_WO.T
        shared_DS = changed.to(ffn.down_DM.dtype).contiguous().cpu()
    told = recovered(missing, left * missing, whole)
    return down_E.contiguous().cpu(), shared_DS, {**told, "tried": tried} if jointly else told


SHARED = -1
"""The shared path among the numbers of experts."""

JOINT = 4096
"""Features up to which all experts of a layer are solved for jointly: 400 MB while solving."""


def _part(width: int, down_DM: Tensor) -> _Part:
    change_WO = torch.zeros(width, len(down_DM), dtype=torch.float64, device=down_DM.device)
    return _Part([], change_WO)


def _fit(part: _Part, residuals: list[Tensor], held: list[Tensor]) -> None:
    """Fit one expert to what is left, and take what it explains from held-out tokens, too."""
    features, outputs = part.change_WO.shape
    ridge = Ridge(features, outputs, part.change_WO.device)
    for (rows, h_NW), residual_TD, held_T in zip(part.features, residuals, held, strict=True):
        r_ND, held_N = residual_TD[rows], held_T[rows]
        ridge.fit.add(h_NW[~held_N], r_ND[~held_N])
        ridge.held.add(h_NW[held_N], r_ND[held_N])
    fit = ridge.solve()
    part.change_WO += fit.weight_FO
    for (rows, h_NW), residual_TD in zip(part.features, residuals, strict=True):
        residual_TD[rows] -= h_NW @ fit.trial_FO.float()


def _alone(site: Seen[MoEFFN], expert: int, order_W: Tensor, gone: Tensor) -> Tensor:
    """What an expert that no token reached adds to its down projection, fitted to its own output.

    All of the layer's tokens are looked at, as if it ran them.
    """
    down_DM = site.view.weights_of(expert)[-1].detach().float()
    ridge = Ridge(len(order_W), len(down_DM), down_DM.device)
    for x_TD in site.inputs():
        h_TM = site.view.hidden(expert, x_TD).float()
        ridge.add(h_TM[:, order_W], h_TM[:, gone] @ down_DM[:, gone].T)
    return ridge.solve().weight_FO


@torch.no_grad()
def _fit_jointly(parts: list[_Part], residuals: list[Tensor], held: list[Tensor]) -> Fit:
    """All experts fitted to what is left, by one system; nothing is taken from what is left."""
    widths = [len(part.change_WO) for part in parts]
    ridge = Ridge(sum(widths), residuals[0].shape[1], residuals[0].device)
    for b, (residual_TD, held_T) in enumerate(zip(residuals, held, strict=True)):
        h_TF = residual_TD.new_zeros(len(residual_TD), sum(widths))
        for part, h_TW in zip(parts, h_TF.split(widths, dim=1), strict=True):
            rows, h_NW = part.features[b]
            h_TW[rows] = h_NW
        ridge.fit.add(h_TF[~held_T], residual_TD[~held_T])
        ridge.held.add(h_TF[held_T], residual_TD[held_T])
    return ridge.solve()


def left_out(order_W: Tensor, width: int) -> Tensor:
    """The neurons of ``width`` that are not in an order.

    >>> left_out(torch.tensor([0, 2]), 4).tolist()
    [1, 3]
    """
    gone_M = torch.ones(width, dtype=torch.bool, device=order_W.device)
    gone_M[order_W] = False
    return gone_M.nonzero().flatten()


def _held_out(residuals: list[Tensor], held: list[Tensor]) -> float:
    """The squared error of held-out tokens."""
    pairs = zip(residuals, held, strict=True)
    return sum(r_TD[held_T].double().square().sum().item() for r_TD, held_T in pairs)
