"""Recovery in closed form: the least squares that every layer kind's ``refit`` solves.

Not in a paper; the least-squares reconstruction of layer-wise pruning, over features that differ
token by token. With h~ the input of the down projection of what a token still runs, idle neurons
zero,

    min over dW of  sum_t ||y - W h~ - dW h~||^2 + lambda ||dW||^2,

y the layer's output in the model as it was. The result stays near the weights W it starts from;
lambda is chosen on held-out tokens, and infinite where no change helps. One solve a layer, see
:class:`~moesaic.layers.regression.Ridge` for its memory.

Shape suffixes: T tokens, F features, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import DenseFFN
from moesaic.arch.mixture import MoEFFN
from moesaic.foreign import JSON
from moesaic.layers.base import Site
from moesaic.layers.regression import HELD_OUT, Fit, Ridge, behind


class Balance:
    """A regression of what a layer's output misses, and how large that is.

    Args:
        down_DF: the down projection that what explains it is added to.
    """

    def __init__(self, down_DF: Tensor) -> None:
        self.down_DF = down_DF
        self.ridge = Ridge(down_DF.shape[1], down_DF.shape[0], down_DF.device)
        self.square = 0.0

    def add(self, h_TF: Tensor, kept_TD: Tensor, y_TD: Tensor) -> None:
        """Take in a batch: features, the output that is left, and the original's output."""
        self.ridge.add(h_TF.float(), (y_TD - kept_TD).float())
        self.square += y_TD.double().square().sum().item()

    def solve(self) -> tuple[Tensor, JSON]:
        """The new down projection (D, F), on the CPU; ``lost``, ``recovered`` and ``strength``."""
        fit = self.ridge.solve()
        missing = self.ridge.fit.square + self.ridge.held.square
        strength = fit.strength if math.isfinite(fit.strength) else None
        errors = recovered(missing, fit.unexplained * missing, self.square)
        new_DF = (self.down_DF.double() + fit.weight_FO.T).to(self.down_DF.dtype).cpu()
        return new_DF, {**errors, "strength": strength}


def recovered(before: float, after: float, square: float) -> JSON:
    """Squared errors for the record.

    Args:
        before: of what is missing, before the refit.
        after: the same after it.
        square: of the output itself.

    Returns:
        ``lost``: the error before, relative to the output; ``recovered``: the share that went.
    """
    return {"lost": before / max(square, 1e-300), "recovered": 1 - after / max(before, 1e-300)}


def refitted_down(
    site: Site[DenseFFN], order_M: Tensor, running: Iterable[tuple[Tensor, Tensor]]
) -> tuple[Tensor, JSON]:
    """A new down projection of a dense FFN of which each token runs a part.

    Args:
        site: the layer as it was, and its tokens.
        order_M: the neurons that stay, in their new order.
        running: by batch the hidden activations as they were, and h~ (T, M) of the neurons that
            stay, zero where a token does not run one.

    Returns:
        the down projection (D, M); ``lost``, ``recovered`` and ``strength`` for the record.
    """
    ffn = site.view
    down_DM = ffn.down_DM[:, order_M]
    balance = Balance(down_DM)
    for (whole_TM, h_TM), target_TD in zip(running, site.targets(), strict=True):
        y_TD = ffn.output(whole_TM) if target_TD is None else target_TD
        balance.add(h_TM, F.linear(h_TM, down_DM, ffn.down_bias_D), y_TD)
    return balance.solve()


LEAST = 16
"""Held-out tokens of an expert below which no gain is believed: neighbours in a text are alike."""


def helps(fit: Fit, held: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether held-out tokens gain for sure.

    Of an expert that few tokens reach, a strength may look good by chance, and do great harm.

    Args:
        fit: what was found.
        held: features (N, F) of these tokens and what they miss (N, D).
    """
    if sum(len(r_ND) for _, r_ND in held) < LEAST:
        return False
    trial_FD = fit.trial_FO.float()
    before_N = torch.cat([r_ND.double().square().sum(1) for _, r_ND in held])
    after_N = [(r_ND - h_NF @ trial_FD).double().square().sum(1) for h_NF, r_ND in held]
    return behind(before_N, torch.cat(after_N))


SHARED = -1
"""The shared path among the numbers of experts."""


@dataclass
class _Missing:
    """What a layer's output misses, batch by batch."""

    residuals: list[Tensor]
    """(T, D), float32."""
    cuts: list[int]
    """Of each batch the first token that is held out."""

    def held_out(self) -> float:
        """The squared error of held-out tokens."""
        pairs = zip(self.residuals, self.cuts, strict=True)
        return sum(r_TD[cut:].double().square().sum().item() for r_TD, cut in pairs)


@dataclass
class _Part:
    """An expert, or the shared path, whose down projection is solved for."""

    down_DM: Tensor
    """As it was."""
    order_W: Tensor
    """The neurons that stay, int64."""
    gone: Tensor = field(init=False)
    """The others."""
    tokens: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """Of each batch that reaches it: its number, its tokens' rows (N,), and h~ (N, W)."""
    change_WD: Tensor = field(init=False)
    """float64: what is added to the down projection, transposed."""

    def __post_init__(self) -> None:
        self.order_W = self.order_W.to(self.down_DM.device)
        self.gone = left_out(self.order_W, self.down_DM.shape[1])

    def take(self, batch: int, rows: Tensor, h_NM: Tensor, residual_TD: Tensor) -> None:
        """Take in the tokens of a batch: what the neurons that go wrote to it is missing."""
        residual_TD[rows] += h_NM[:, self.gone] @ self.down_DM[:, self.gone].T.float()
        self.tokens.append((batch, rows, h_NM[:, self.order_W]))

    def fit(self, missing: _Missing) -> None:
        """Fit it to what is missing, and take what that explains from it."""
        ridge = self._ridge()
        held: list[tuple[Tensor, Tensor]] = []
        for batch, rows, h_NW in self.tokens:
            held_N, r_ND = rows >= missing.cuts[batch], missing.residuals[batch][rows]
            ridge.fit.add(h_NW[~held_N], r_ND[~held_N])
            held.append((h_NW[held_N], r_ND[held_N]))
            ridge.held.add(*held[-1])
        fit = ridge.solve()
        if not helps(fit, held):
            self.change_WD = torch.zeros_like(fit.weight_FO)
            return
        self.change_WD = fit.weight_FO
        for batch, rows, h_NW in self.tokens:
            missing.residuals[batch][rows] -= h_NW @ fit.trial_FO.float()

    def fit_alone(self, site: Site[MoEFFN], expert: int) -> None:
        """Fit it to its own output of all of the layer's tokens, as if it ran them."""
        ridge, down_DM = self._ridge(), self.down_DM.float()
        for x_TD in site.inputs():
            h_TM = site.view.hidden(expert, x_TD).float()
            ridge.add(h_TM[:, self.order_W], h_TM[:, self.gone] @ down_DM[:, self.gone].T)
        self.change_WD = ridge.solve().weight_FO

    def refitted(self) -> Tensor:
        """The new down projection (D, W), float64."""
        return self.down_DM[:, self.order_W].double() + self.change_WD.T

    def _ridge(self) -> Ridge:
        return Ridge(len(self.order_W), len(self.down_DM), self.down_DM.device)


def refitted_downs(
    site: Site[MoEFFN],
    kept: Sequence[int],
    neurons_of: Callable[[int, int], Tensor],
    shared_S: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, JSON]:
    """New down projections of a mixture's experts that stay.

    Features are h~ = w_i h_i of the neurons that stay, with the router's true weight. One after the
    other, each expert is fitted to the error that those before it left over: systems of one
    expert's width; it stays as it is where its held-out tokens do not gain for sure. An expert that
    lost neurons and that no token runs is fitted to its own output of all tokens. What is told of
    it was measured on tokens that no fit saw; the weights are then solved for from all tokens.

    Args:
        site: the layer as it was, and its tokens.
        kept: the original expert at each new place, below 0 where there is none.
        neurons_of: tells the neurons, int64, that the expert at a place keeps of so many.
        shared_S: the neurons of the shared path that stay, whose down projection is solved for
            too; None to leave that path alone.

    Returns:
        down projections by place, as the experts' module holds them (E, D, W), None where none
        changed; that of the shared path (D, S) or None; ``lost`` and ``recovered`` for the record.
    """
    view = site.view
    parts = {
        i: _Part(view.weights_of(i)[-1].detach(), neurons_of(place, view.width))
        for place, i in enumerate(kept)
        if i >= 0
    }
    ffn = view.shared_ffn
    if shared_S is not None and ffn is not None:
        parts[SHARED] = _Part(ffn.down_DM.detach(), shared_S[shared_S >= 0])
    missing, square = _missing(site, parts)
    lost = sum(r_TD.double().square().sum().item() for r_TD in missing.residuals)
    before = max(missing.held_out(), 1e-300)
    for part in parts.values():
        part.fit(missing)
    after = missing.held_out() / before
    for i, part in parts.items():
        if len(part.gone) and not part.tokens:
            part.fit_alone(site, i)
    figures = recovered(lost, after * lost, square)
    if not any(part.change_WD.any() for part in parts.values()):
        return None, None, figures
    shared_DS = None
    if SHARED in parts:
        shared = parts.pop(SHARED)
        shared_DS = shared.refitted().to(shared.down_DM.dtype).contiguous().cpu()
    return _placed(kept, view, parts), shared_DS, figures


def _missing(site: Site[MoEFFN], parts: dict[int, _Part]) -> tuple[_Missing, float]:
    """What the layer's output misses without what goes, and the square of that output.

    ``parts`` take in their tokens.
    """
    view = site.view
    allowed_E = torch.zeros(view.count, dtype=torch.bool, device=view.device)
    allowed_E[[i for i in parts if i != SHARED]] = True
    whole = bool(allowed_E.all())
    missing, square = _Missing([], []), 0.0
    for b, (x_TD, target_TD) in enumerate(zip(site.inputs(), site.targets(), strict=True)):
        with nullcontext() if whole else view.restricted(allowed_E):
            kept_TD = view.output(x_TD)
        y_TD = target_TD
        if y_TD is None:
            y_TD = kept_TD if whole else view.output(x_TD)
        residual_TD = (y_TD - kept_TD).float()
        for i, rows, h_NM in view.weighted(x_TD, allowed_E):
            parts[i].take(b, rows, h_NM, residual_TD)
        if SHARED in parts:
            h_TS = view.shared_weighted(x_TD, allowed_E)
            assert h_TS is not None
            every = torch.arange(len(x_TD), device=view.device)
            parts[SHARED].take(b, every, h_TS, residual_TD)
        missing.residuals.append(residual_TD)
        missing.cuts.append(len(x_TD) - len(x_TD) // HELD_OUT)
        square += y_TD.double().square().sum().item()
    return missing, square


def _placed(kept: Sequence[int], view: MoEFFN, parts: dict[int, _Part]) -> Tensor:
    """The experts' down projections by place, zero where there is none (E, D, W)."""
    fused, transposed = view.experts.down_proj, view.arch.transposed
    room = max(len(part.order_W) for part in parts.values())
    new_DW = []
    for i in kept:
        down_DW = fused.new_zeros(len(next(iter(parts.values())).down_DM), room)
        if i in parts:
            refitted_DW = parts[i].refitted().to(fused.dtype)
            down_DW[:, : refitted_DW.shape[1]] = refitted_DW
        new_DW.append(down_DW.T if transposed else down_DW)
    return torch.stack(new_DW).contiguous().cpu()


def left_out(order_W: Tensor, width: int) -> Tensor:
    """The neurons of ``width`` that are not in an order.

    >>> left_out(torch.tensor([0, 2]), 4).tolist()
    [1, 3]
    """
    gone_M = torch.ones(width, dtype=torch.bool, device=order_W.device)
    gone_M[order_W] = False
    return gone_M.nonzero().flatten()
