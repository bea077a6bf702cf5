"""Refit in closed form: the least-squares problem that every layer kind's ``refit`` solves.

Not in a paper; the least-squares reconstruction of layer-wise pruning, over features that differ by
token. With h~ the input of the down projection after conversion, zero for idle neurons,

    min over dW of  sum_t ||y - W h~ - dW h~||^2 + lambda ||dW||^2,

y the layer's output in the original model. The result is near the weights W it starts from; lambda
is chosen on held-out tokens, and infinite where no change helps. A dense layer is one
:class:`Ridge`, solved in closed form from sums over tokens; W of a mixture are the down projections
of all its experts side by side, solved jointly by conjugate gradients (:func:`ridge_path`).

Shape suffixes: T tokens, N of one expert or block, F features, O outputs, D hidden size, M neurons
of an expert, W kept ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import DenseFFN
from moesaic.arch.mixture import MoEFFN
from moesaic.io.checkpoint import not_finite
from moesaic.losses import significantly_worse
from moesaic.modules.running import LayerTokens
from moesaic.types import JSON

STRENGTHS = (math.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-5)
"""Candidates of lambda, relative to the features' mean square. Infinite: all weights zero."""


HELD_OUT = 5
"""Number of parts into which every batch's tokens are cut; the last is held out."""

COLUMNS = 256
"""Outputs of many blocks that are solved for at a time: six matrices of so many are in memory."""


@dataclass
class _Sums:
    """Normal equations of one set of tokens."""

    gram_FF: Tensor
    """Sum of x x^T, float64."""
    cross_FO: Tensor
    """Sum of x y^T, float64."""
    square: float = 0.0
    """Sum of ||y||^2."""

    def add(self, x_TF: Tensor, y_TO: Tensor) -> None:
        self.gram_FF += x_TF.T @ x_TF  # products in the tokens' own dtype, sums in float64
        self.cross_FO += x_TF.T @ y_TO
        self.square += y_TO.double().square().sum().item()


@dataclass(frozen=True)
class _Fit:
    """Result of a regression."""

    weight_FO: Tensor
    """Weights from all tokens, float64."""
    strength: float
    """Chosen lambda, relative to the features' mean square; infinite if no candidate helps."""
    unexplained: float
    """Squared error on held-out tokens, relative to that of weights that are zero."""


class Ridge:
    """Solver of min over W of sum_t ||y_t - x_t W||^2 + lambda sum_f ||W_f||^2, lambda chosen on
    held-out tokens.

    Args:
        features: F.
        outputs: O.
    """

    def __init__(self, features: int, outputs: int, device: torch.device | str = "cpu") -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.fit, self.held = (
            _Sums(zeros(features, features), zeros(features, outputs)) for _ in range(2)
        )

    @staticmethod
    def bytes(features: int, outputs: int) -> int:
        """Return the bytes held while solving: 11.7 GB at 14,336 features and 4,096 outputs.

        They are float64: two matrices of features x features from the tokens, and four more.
        """
        return 8 * features * (6 * features + 4 * outputs)

    def add(self, x_TF: Tensor, y_TO: Tensor) -> None:
        """Add a batch of tokens."""
        cut = len(x_TF) - len(x_TF) // HELD_OUT
        self.fit.add(x_TF[:cut], y_TO[:cut])
        self.held.add(x_TF[cut:], y_TO[cut:])

    def solve(self) -> _Fit:
        """Solve for the weights from all tokens, with the strength that is best for held-out ones.

        In the basis of eigenvectors of X^T X, the weights of every strength are X^T Y with its rows
        scaled, and their held-out error is a quadratic form in these scales.
        """
        fit, held = self.fit, self.held
        power_F, turn_FF = torch.linalg.eigh(fit.gram_FF)
        cross_FO = turn_FF.T @ fit.cross_FO
        square_FF = turn_FF.T @ held.gram_FF
        square_FF = square_FF @ turn_FF  # in two steps, the first product is freed
        square_FF.mul_(cross_FO @ cross_FO.T)
        linear_F = (cross_FO * (turn_FF.T @ held.cross_FO)).sum(1)
        best, least = math.inf, held.square
        for strength in STRENGTHS[1:]:
            scale_F = 1 / (power_F.clamp(min=0) + _penalty(fit, strength))
            error = held.square + (scale_F @ (square_FF @ scale_F - 2 * linear_F)).item()
            if error < least:
                best, least = strength, error
        del turn_FF, square_FF
        sums = _Sums(fit.gram_FF + held.gram_FF, fit.cross_FO + held.cross_FO)
        unexplained = least / max(held.square, 1e-300)
        return _Fit(_weight(sums, best), best, unexplained)


def _weight(sums: _Sums, strength: float) -> Tensor:
    """Return (X^T X + lambda)^-1 X^T Y by one Cholesky factorisation."""
    if strength == math.inf:
        return torch.zeros_like(sums.cross_FO)
    system_FF = sums.gram_FF.clone()
    system_FF.diagonal().add_(_penalty(sums, strength))
    return torch.cholesky_solve(sums.cross_FO, torch.linalg.cholesky(system_FF))


def _penalty(sums: _Sums, strength: float) -> Tensor:
    """Return lambda, plus a little for features that are always zero."""
    return (strength + 1e-10) * sums.gram_FF.diagonal().mean()


Block: TypeAlias = tuple[Tensor, Tensor]
"""Row indices of some tokens (N,), and their features (N, F_i)."""


@dataclass(frozen=True)
class Blocks:
    """Tokens that each have some of several blocks of features; the others are zero."""

    y_TO: Tensor
    """Outputs to explain."""
    features: Mapping[int, Block]
    """Rows and features by block."""
    bases: Mapping[int, Tensor] = field(default_factory=dict)
    """Of blocks whose features are coordinates in a subspace, its orthonormal basis (W, F_i)."""

    def only(self, blocks: Iterable[int]) -> Blocks:
        return Blocks(self.y_TO, {i: self.features[i] for i in blocks}, self.bases)

    def widths(self) -> list[int]:
        """Return the number of features by block, before they became coordinates."""
        return [len(self.bases.get(i, x_NF.T)) for i, (_, x_NF) in self.features.items()]

    def split(self, w_FO: Tensor) -> dict[int, Tensor]:
        """Return weights by block (F_i, O)."""
        sizes = [x_NF.shape[1] for _, x_NF in self.features.values()]
        return dict(zip(self.features, w_FO.split(sizes), strict=True))

    def times(self, w_FO: Tensor) -> Tensor:
        """Return X W (T, O)."""
        product_TO = self.y_TO.new_zeros(len(self.y_TO), w_FO.shape[1])
        for i, part_FO in self.split(w_FO).items():
            rows, x_NF = self.features[i]
            product_TO.index_add_(0, rows, x_NF @ part_FO)
        return product_TO

    def transposed(self, y_TO: Tensor) -> Tensor:
        """Return X^T Y (F, O)."""
        return torch.cat([x_NF.T @ y_TO[rows] for rows, x_NF in self.features.values()])


def joint_bytes(widths: Sequence[int], running: int, outputs: int, tokens: int) -> int:
    """Return the bytes that :func:`refitted_downs` holds, all float32.

    Args:
        widths: features of each block.
        running: features that a token has.
        outputs: O.
        tokens: T.
    """
    of_tokens = tokens * (running + 3 * outputs)
    weights = sum(widths) * (3 * outputs + 6 * min(COLUMNS, outputs))
    return 4 * (of_tokens + weights + 2 * sum(width**2 for width in widths))


def within_tokens(*samples: Blocks) -> tuple[Blocks, ...]:
    """Replace the features of blocks with fewer tokens than features by coordinates in the space
    that these tokens span.

    Weights of a ridge regression lie in it, so they stay the same, and so do all products; only
    the cost changes, to that of as many features as tokens.

    Args:
        samples: several sets of tokens; each block's tokens of all sets span one space.
    """
    features: list[dict[int, Block]] = [dict(tokens.features) for tokens in samples]
    bases = {}
    for i in {i for blocks in features for i in blocks}:
        found = [blocks for blocks in features if i in blocks]
        counts = [len(blocks[i][0]) for blocks in found]
        if sum(counts) < found[0][i][1].shape[1]:
            x_NF = torch.cat([blocks[i][1] for blocks in found])
            bases[i], turned_NN = torch.linalg.qr(x_NF.T)
            for blocks, part_NN in zip(found, turned_NN.T.split(counts), strict=True):
                blocks[i] = blocks[i][0], part_NN
    return tuple(
        Blocks(tokens.y_TO, blocks, bases) for tokens, blocks in zip(samples, features, strict=True)
    )


def _gram_times(w_FO: Tensor, tokens: Blocks) -> Tensor:
    """Return X^T X W (F, O)."""
    return tokens.transposed(tokens.times(w_FO))


def ridge_path(
    samples: Sequence[Blocks], start_FO: Tensor | None, strengths: Iterable[float], iterations: int
) -> Iterator[Tensor]:
    """Solve min over W of sum_t ||y_t - x_t W||^2 + sum_i lambda_i ||W_i||^2 by conjugate
    gradients.

    Preconditioned by each block's own X_i^T X_i + lambda_i (Saad, "Iterative Methods for Sparse
    Linear Systems", 9.2): a single block takes one iteration, and no product of two is held.

    Args:
        samples: several sets of tokens with the same blocks.
        start_FO: W to start from; None for zero.
        strengths: lambda_i relative to the mean square of its block's features.
        iterations: number of iterations for each strength.

    Yields:
        W (F, O) by strength, each started from the last.
    """

    def summed(of_each: Callable[[Blocks], Tensor]) -> Tensor:
        total: Tensor = reduce(torch.add, map(of_each, samples))
        return total

    same = zip(*(tokens.features.values() for tokens in samples), strict=True)
    grams = [reduce(torch.add, (x_NF.T @ x_NF for _, x_NF in block)) for block in same]
    sizes, like_TO = [len(gram_FF) for gram_FF in grams], samples[0].y_TO
    squares = [gram_FF.trace() / n for gram_FF, n in zip(grams, samples[0].widths(), strict=True)]
    w_FO = like_TO.new_zeros(sum(sizes), like_TO.shape[1]) if start_FO is None else start_FO
    left_FO = summed(lambda tokens: tokens.transposed(tokens.y_TO - tokens.times(w_FO)))
    for strength in strengths:
        factors, lambdas = [], []
        for gram_FF, square in zip(grams, squares, strict=True):
            lambda_F = (strength * square).clamp(min=1e-30).expand(len(gram_FF))
            system_FF = (gram_FF + lambda_F.diag()).double()
            factors.append(torch.linalg.cholesky(system_FF).to(w_FO))
            lambdas.append(lambda_F)
        lambda_F1, w_FO = torch.cat(lambdas)[:, None], w_FO.clone()
        for part_FO, rest_FO in zip(*(x.split(COLUMNS, 1) for x in (w_FO, left_FO)), strict=True):
            step_FO, before_O = torch.zeros_like(part_FO), part_FO.new_tensor(math.inf)
            for _ in range(iterations):
                slope_FO = rest_FO - lambda_F1 * part_FO
                pieces = zip(slope_FO.split(sizes), factors, strict=True)
                turned_FO = torch.cat([torch.cholesky_solve(*piece) for piece in pieces])
                size_O = (slope_FO * turned_FO).sum(0).clamp(min=1e-30)
                step_FO = turned_FO.add_(size_O / before_O * step_FO)
                bent_FO = summed(partial(_gram_times, step_FO))
                length_O = size_O / (step_FO * (bent_FO + lambda_F1 * step_FO)).sum(0).clamp(1e-30)
                part_FO += length_O * step_FO
                rest_FO -= length_O * bent_FO
                before_O = size_O
        yield w_FO


class DownRefit:
    """Ridge regression of what a converted layer's output lacks, from its features.

    It sums the squares of the original's output too, of which errors are shares.

    Args:
        down_DF: the down projection to which the solution is added.
    """

    def __init__(self, down_DF: Tensor) -> None:
        self.down_DF = down_DF
        self.ridge = Ridge(down_DF.shape[1], down_DF.shape[0], down_DF.device)
        self.square = 0.0

    def add(self, h_TF: Tensor, kept_TD: Tensor, y_TD: Tensor) -> None:
        """Add a batch: features, the converted layer's output, and the original's output."""
        self.ridge.add(h_TF.float(), (y_TD - kept_TD).float())
        self.square += y_TD.double().square().sum().item()

    def solve(self) -> tuple[Tensor, JSON]:
        """Return the new down projection (D, F), on the CPU, and figures for the record."""
        fit = self.ridge.solve()
        missing = self.ridge.fit.square + self.ridge.held.square
        strength = fit.strength if math.isfinite(fit.strength) else None
        errors = recovered(missing, fit.unexplained * missing, self.square)
        new_DF = (self.down_DF.double() + fit.weight_FO.T).to(self.down_DF.dtype).cpu()
        return new_DF, {**errors, "strength": strength}


def recovered(before: float, after: float, square: float) -> JSON:
    """Return squared errors for the record.

    Args:
        before: squared error before the refit.
        after: squared error after it.
        square: squared norm of the output itself.

    Returns:
        ``lost``: the error before, relative to the output; ``recovered``: the removed share of it.
    """
    return {"lost": before / max(square, 1e-300), "recovered": 1 - after / max(before, 1e-300)}


def refitted_down(
    site: LayerTokens[DenseFFN], order_M: Tensor, running: Iterable[tuple[Tensor, Tensor]]
) -> tuple[Tensor, JSON]:
    """Solve for a new down projection of a dense FFN of which each token runs a part.

    Args:
        site: the unchanged layer, and its tokens.
        order_M: the kept neurons, in their new order.
        running: per batch, the original hidden activations, and h~ (T, M) of the kept neurons, zero
            where a token does not run one.

    Returns:
        the down projection (D, M); ``lost``, ``recovered`` and ``strength`` for the record.
    """
    ffn = site.view
    down_DM = ffn.down_DM[:, order_M]
    balance = DownRefit(down_DM)
    for (whole_TM, h_TM), target_TD in zip(running, site.targets(), strict=True):
        y_TD = ffn.output(whole_TM) if target_TD is None else target_TD
        balance.add(h_TM, F.linear(h_TM, down_DM, ffn.down_bias_D), y_TD)
    return balance.solve()


LEAST = 16
"""Least held-out tokens of an expert for a gain to count: neighbours in a text are alike."""
PATH = (10.0, 1.0, 0.3, 0.1, 0.03, 0.01, 1e-3)
"""Candidates of lambda for a mixture's experts, relative to the mean square of h~."""
TRIAL_STEPS, LAST_STEPS = 2, 3
"""Iterations of conjugate gradients for each candidate, and for the solve from all tokens."""


def helps(before_ND: Tensor, after_ND: Tensor) -> bool:
    """Return True if held-out tokens' errors are significantly lower after a change."""
    before_N, after_N = (r_ND.double().square().sum(1) for r_ND in (before_ND, after_ND))
    return significantly_worse(before_N, after_N)


SHARED = -1
"""Key of the shared path among the experts."""


@dataclass
class _Part:
    """Expert, or the shared path, whose down projection is solved for."""

    down_DM: Tensor
    """Original down projection."""
    order_W: Tensor
    """Kept neurons, int64."""
    removed: Tensor = field(init=False)
    """Removed neurons, int64."""
    change_FD: Tensor | None = None
    """Change of the down projection, transposed."""
    basis_WF: Tensor | None = None
    """Basis in which the change has its coordinates; None for that of the neurons."""

    def __post_init__(self) -> None:
        self.order_W = self.order_W.to(self.down_DM.device)
        removed_M = torch.ones(self.down_DM.shape[1], dtype=torch.bool, device=self.down_DM.device)
        removed_M[self.order_W] = False
        self.removed = removed_M.nonzero().flatten()

    def split(self, h_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kept neurons' activations (T, W), and what the removed ones wrote (T, D)."""
        removed_DN = self.down_DM[:, self.removed].float()
        return h_TM[:, self.order_W], h_TM[:, self.removed] @ removed_DN.T

    def fit_alone(self, site: LayerTokens[MoEFFN], expert: int) -> None:
        """Fit an expert to its own output for all of the layer's tokens, as if it ran them."""
        ridge = Ridge(len(self.order_W), len(self.down_DM), self.down_DM.device)
        for x_TD in site.inputs():
            ridge.add(*self.split(site.view.hidden(expert, x_TD).float()))
        self.change_FD = ridge.solve().weight_FO

    def refitted(self) -> Tensor:
        """Return the new down projection (D, W), float64."""
        down_DW, change_FD = self.down_DM[:, self.order_W].double(), self.change_FD
        if change_FD is None:
            return down_DW
        return down_DW + (change_FD if self.basis_WF is None else self.basis_WF @ change_FD).T


@torch.no_grad()
def refitted_downs(
    site: LayerTokens[MoEFFN],
    kept: Sequence[int],
    neurons_of: Callable[[int, int], Tensor],
    shared_S: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, JSON]:
    """Solve jointly for new down projections of a mixture's kept experts.

    Features are h~ = w_i h_i of the kept neurons, with the router's true weight. An expert is not
    changed if its change does not significantly lower the error of its held-out tokens. A narrowed
    expert that no token runs is fitted to its own output for all tokens. The figures are of
    held-out tokens; the weights are then solved for from all.

    Args:
        site: the unchanged layer, and its tokens.
        kept: the original expert at each new place, below 0 if there is none.
        neurons_of: function of (place, width) that returns the expert's kept neurons, int64.
        shared_S: the kept neurons of the shared path, whose down projection is solved for too; None
            to leave that path unchanged.

    Returns:
        down projections by place, in the layout of the experts' module (E, D, W), None if none
        changed; that of the shared path (D, S) or None; ``lost`` and ``recovered`` for the record.

    Raises:
        MoesaicError: the layer's output is not finite.
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
    fitted, held, square = _regression_data(site, parts)
    if not math.isfinite(square):
        raise not_finite(f"Layer {site.index} computes")
    fitted, held = within_tokens(fitted, held)
    before = _square(held.y_TO)
    lost = _square(fitted.y_TO) + before
    enough = [i for i, (rows, _) in held.features.items() if len(rows) >= LEAST]
    after = _square(_fit(parts, fitted.only(enough), held.only(enough)))
    for i, part in parts.items():
        if len(part.removed) and i not in held.features:
            part.fit_alone(site, i)
    figures = recovered(lost, after / max(before, 1e-300) * lost, square)
    if all(part.change_FD is None for part in parts.values()):
        return None, None, figures
    shared_DS = None
    if SHARED in parts:
        shared = parts.pop(SHARED)
        shared_DS = shared.refitted().to(shared.down_DM.dtype).contiguous().cpu()
    return _by_place(kept, view, parts), shared_DS, figures


def _square(r_TD: Tensor) -> float:
    return r_TD.double().square().sum().item()


def _regression_data(
    site: LayerTokens[MoEFFN], parts: Mapping[int, _Part]
) -> tuple[Blocks, Blocks, float]:
    """Return the output's error without the removed parts, and h~ of the kept ones, as regression
    data.

    Returns:
        tokens to fit to; held-out tokens; the squared norm of the layer's output.
    """
    view = site.view
    allowed_E = torch.zeros(view.count, dtype=torch.bool, device=view.device)
    allowed_E[[i for i in parts if i != SHARED]] = True
    whole = bool(allowed_E.all())
    residuals: tuple[list[Tensor], ...] = [], []
    features: tuple[dict[int, list[Block]], ...] = {}, {}
    square = 0.0
    for x_TD, target_TD in zip(site.inputs(), site.targets(), strict=True):
        with nullcontext() if whole else view.restricted(allowed_E):
            kept_TD = view.output(x_TD)
        y_TD = target_TD
        if y_TD is None:
            y_TD = kept_TD if whole else view.output(x_TD)
        square += _square(y_TD)
        residual_TD = (y_TD - kept_TD).float()
        running = list(view.weighted(x_TD, allowed_E))
        if SHARED in parts:
            h_TS = view.shared_weighted(x_TD, allowed_E)
            assert h_TS is not None
            running.append((SHARED, torch.arange(len(x_TD), device=view.device), h_TS))
        cut = len(x_TD) - len(x_TD) // HELD_OUT
        starts = [sum(map(len, of_set)) for of_set in residuals]
        for i, rows, h_NM in running:
            h_NW, removed_ND = parts[i].split(h_NM)
            residual_TD[rows] += removed_ND
            at = int((rows < cut).sum())
            features[0].setdefault(i, []).append((rows[:at] + starts[0], h_NW[:at]))
            features[1].setdefault(i, []).append((rows[at:] - cut + starts[1], h_NW[at:]))
        for of_set, r_TD in zip(residuals, residual_TD.tensor_split([cut]), strict=True):
            of_set.append(r_TD)
    fitted, held = (
        Blocks(torch.cat(of_set), {i: _joined(batches) for i, batches in found.items()})
        for of_set, found in zip(residuals, features, strict=True)
    )
    return fitted, held, square


def _joined(batches: list[Block]) -> Block:
    """Join batches into one; the list is emptied, so that only one part is in memory twice."""
    rows, h_NW = (torch.cat(pieces) for pieces in zip(*batches, strict=True))
    batches.clear()
    return rows, h_NW


def _fit(parts: Mapping[int, _Part], fitted: Blocks, held: Blocks) -> Tensor:
    """Fit the parts whose change significantly lowers the error of held-out tokens.

    Args:
        parts: by expert; their change is set.
        fitted: tokens to fit to.
        held: held-out tokens, which choose strength and parts.

    Returns:
        the remaining error of the held-out tokens (T, D) after the fit to the others.
    """
    strengths: Sequence[float] = PATH
    start_FD: Tensor | None = None
    while held.features:
        best, trial_FD, left_TD = _trial(fitted, held, strengths, start_FD)
        if trial_FD is None:
            break
        strengths, sure = strengths[best:], dict[int, Tensor]()
        for i, change_FD in held.split(trial_FD).items():
            rows, h_NF = held.features[i]
            if helps(left_TD[rows] + h_NF @ change_FD, left_TD[rows]):
                sure[i] = change_FD
        if len(sure) == len(held.features):
            if not helps(held.y_TO, left_TD):
                break
            last_FD = next(ridge_path([fitted, held], trial_FD, strengths, LAST_STEPS))
            for i, change_FD in held.split(last_FD).items():
                parts[i].change_FD, parts[i].basis_WF = change_FD, held.bases.get(i)
            return left_TD
        start_FD = torch.cat([*sure.values(), trial_FD[:0]])
        fitted, held = fitted.only(sure), held.only(sure)
        del trial_FD, change_FD, sure  # as large as the down projections
    return held.y_TO


def _trial(
    fitted: Blocks, held: Blocks, strengths: Sequence[float], start_FD: Tensor | None
) -> tuple[int, Tensor | None, Tensor]:
    """Find the strength that is best for held-out tokens.

    Args:
        fitted: tokens to fit to.
        held: held-out tokens.
        strengths: candidates of lambda, falling.
        start_FD: change to start from; None for zero.

    Returns:
        the number of the strength; the change (F, D), None if no strength helps; the held-out
        tokens' error (T, D).
    """
    best, trial_FD, left_TD, least = 0, None, held.y_TO, _square(held.y_TO)
    for n, w_FD in enumerate(ridge_path([fitted], start_FD, strengths, TRIAL_STEPS)):
        error_TD = held.y_TO - held.times(w_FD)
        if _square(error_TD) >= least:
            break
        best, trial_FD, left_TD, least = n, w_FD, error_TD, _square(error_TD)
    return best, trial_FD, left_TD


def _by_place(kept: Sequence[int], view: MoEFFN, parts: dict[int, _Part]) -> Tensor:
    """Return the experts' down projections by place, zero at empty places (E, D, W)."""
    fused, transposed = view.experts.down_proj, view.arch.transposed
    room = max(len(part.order_W) for part in parts.values())
    hidden = len(next(iter(parts.values())).down_DM)
    shape = (room, hidden) if transposed else (hidden, room)
    down_EDW = torch.zeros(len(kept), *shape, dtype=fused.dtype)
    for place, i in enumerate(kept):
        if i in parts:
            refitted_DW = parts[i].refitted().to(fused.dtype).cpu()
            new_DW = down_EDW[place].T if transposed else down_EDW[place]
            new_DW[:, : refitted_DW.shape[1]] = refitted_DW
    return down_EDW
