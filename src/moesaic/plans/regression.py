"""Ridge regression with held-out strength, in closed form or by conjugate gradients; a paired test.

The closed form works on sums over tokens; conjugate gradients solve many blocks of features
jointly.

Shape suffixes: T tokens, N tokens of one block, F features, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TypeAlias

import torch
from torch import Tensor

STRENGTHS = (math.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-5)
"""Candidates of lambda, relative to the features' mean square. Infinite: all weights zero."""

SURE = 2.0
"""Standard errors of the mean difference above which one choice is significantly worse."""

HELD_OUT = 5
"""Number of parts into which every batch's tokens are cut; the last is held out."""

COLUMNS = 1024
"""Outputs of many blocks that are solved for at a time, to save memory."""


@dataclass
class _Sums:
    """Normal equations of one set of tokens."""

    gram_FF: Tensor
    """Sum of x x^T, float64."""
    cross_FO: Tensor
    """Sum of x y^T, float64."""
    square: float = 0.0
    """Sum of ||y||^2."""

    @classmethod
    def zero(cls, features: int, outputs: int, device: torch.device | str) -> _Sums:
        gram_FF = torch.zeros(features, features, dtype=torch.float64, device=device)
        return cls(gram_FF, gram_FF.new_zeros(features, outputs))

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
    trial_FO: Tensor
    """Weights from the tokens that are not held out, float64; ``unexplained`` is their error."""


class Ridge:
    """Solver of min over W of sum_t ||y_t - x_t W||^2 + lambda sum_f ||W_f||^2, lambda chosen on
    held-out tokens.

    Two float64 matrices of features x features are held, and three more while solving: 8.2 GB at
    14,336 features.

    Args:
        features: F.
        outputs: O.
    """

    def __init__(self, features: int, outputs: int, device: torch.device | str = "cpu") -> None:
        self.fit = _Sums.zero(features, outputs, device)
        self.held = _Sums.zero(features, outputs, device)

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
        square_FF = (turn_FF.T @ held.gram_FF @ turn_FF).mul_(cross_FO @ cross_FO.T)
        linear_F = (cross_FO * (turn_FF.T @ held.cross_FO)).sum(1)
        best, least, trial_F = math.inf, held.square, torch.zeros_like(power_F)
        for strength in STRENGTHS[1:]:
            scale_F = 1 / (power_F.clamp(min=0) + _penalty(fit, strength))
            error = held.square + (scale_F @ (square_FF @ scale_F - 2 * linear_F)).item()
            if error < least:
                best, least, trial_F = strength, error, scale_F
        sums = _Sums(fit.gram_FF + held.gram_FF, fit.cross_FO + held.cross_FO)
        unexplained = least / max(held.square, 1e-300)
        trial_FO = turn_FF @ (trial_F[:, None] * cross_FO)
        return _Fit(_weight(sums, best), best, unexplained, trial_FO)


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

    def only(self, blocks: Iterable[int]) -> Blocks:
        return Blocks(self.y_TO, {i: self.features[i] for i in blocks})

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


def _gram_times(w_FO: Tensor, tokens: Blocks) -> Tensor:
    """Return X^T X W (F, O)."""
    return tokens.transposed(tokens.times(w_FO))


def ridge_path(
    samples: Sequence[Blocks], start_FO: Tensor | None, strengths: Iterable[float], iterations: int
) -> Iterator[Tensor]:
    """Solve min over W of sum_t ||y_t - x_t W||^2 + sum_i lambda_i ||W_i||^2 by conjugate
    gradients.

    Preconditioned by each block's own X_i^T X_i + lambda_i (Saad, "Iterative Methods for Sparse
    Linear Systems", 9.2): one block alone takes one iteration, and no product of two is held.

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
    w_FO = like_TO.new_zeros(sum(sizes), like_TO.shape[1]) if start_FO is None else start_FO
    left_FO = summed(lambda tokens: tokens.transposed(tokens.y_TO - tokens.times(w_FO)))
    for strength in strengths:
        factors, lambdas = [], []
        for gram_FF in grams:
            lambda_F = (strength * gram_FF.diagonal().mean()).clamp(min=1e-30).expand(len(gram_FF))
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


def significantly_worse(losses_N: Tensor, best_N: Tensor, errors: float = SURE) -> bool:
    """Return True if ``losses_N`` is higher than ``best_N`` by more than ``errors`` standard
    errors.

    Args:
        losses_N: losses of one change, by window or token.
        best_N: losses of another change on the same windows, which pairs them.
        errors: standard errors of the mean difference. One window has no error: False.

    >>> best_N = torch.tensor([2.0, 3.0, 4.0])
    >>> significantly_worse(best_N + 1, best_N)
    True
    >>> significantly_worse(best_N.flip(0), best_N), significantly_worse(best_N, best_N)
    (False, False)
    """
    difference_N = losses_N - best_N
    if len(difference_N) < 2:
        return False
    error = difference_N.std() / len(difference_N) ** 0.5
    return bool(difference_N.mean() > errors * error)
