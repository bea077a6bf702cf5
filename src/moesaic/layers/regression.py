"""Ridge regression in closed form, from sums over tokens; its strength chosen on held-out tokens.

Shape suffixes: T tokens, F features, O outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STRENGTHS = (math.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-5)
"""What lambda is chosen from, relative to the features' mean square. Infinite: all weights zero."""

HELD_OUT = 5
"""The last of this many parts of every batch's tokens is held out."""


@dataclass
class Sums:
    """The normal equations of one set of tokens."""

    gram_FF: Tensor
    """float64: sum of x x^T."""
    cross_FO: Tensor
    """float64: sum of x y^T."""
    square: float = 0.0
    """Sum of ||y||^2."""

    @classmethod
    def zero(cls, features: int, outputs: int, device: torch.device | str) -> Sums:
        gram_FF = torch.zeros(features, features, dtype=torch.float64, device=device)
        return cls(gram_FF, gram_FF.new_zeros(features, outputs))

    def add(self, x_TF: Tensor, y_TO: Tensor) -> None:
        self.gram_FF += x_TF.T @ x_TF  # products in the tokens' own type, sums in float64
        self.cross_FO += x_TF.T @ y_TO
        self.square += y_TO.double().square().sum().item()

    def error(self, weight_FO: Tensor) -> float:
        """sum_t ||y_t - x_t W||^2, of any W: no token is looked at again.

        >>> sums = Sums(torch.zeros(1, 1).double(), torch.zeros(1, 1).double())
        >>> sums.add(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
        >>> sums.error(torch.tensor([[2.0]], dtype=torch.float64))
        2.0
        """
        quadratic = (weight_FO * (self.gram_FF @ weight_FO)).sum()
        return self.square + (quadratic - 2 * (weight_FO * self.cross_FO).sum()).item()


@dataclass(frozen=True)
class Fit:
    """What a regression found."""

    weight_FO: Tensor
    """float64."""
    strength: float
    """lambda, relative to the features' mean square; infinite where nothing helps."""
    unexplained: float
    """Squared error on held-out tokens, relative to that of weights that are zero."""
    trial_FO: Tensor
    """float64: the weights of that error, from the other tokens alone."""


class Ridge:
    """min over W of sum_t ||y_t - x_t W||^2 + lambda sum_f ||W_f||^2, lambda on held-out tokens.

    Two float64 matrices of features x features are held, and a third one while solving: 4.9 GB at
    14,336 features.

    Args:
        features: F.
        outputs: O.
    """

    def __init__(self, features: int, outputs: int, device: torch.device | str = "cpu") -> None:
        self.fit = Sums.zero(features, outputs, device)
        self.held = Sums.zero(features, outputs, device)

    def add(self, x_TF: Tensor, y_TO: Tensor) -> None:
        """Take a batch of tokens in."""
        cut = len(x_TF) - len(x_TF) // HELD_OUT
        self.fit.add(x_TF[:cut], y_TO[:cut])
        self.held.add(x_TF[cut:], y_TO[cut:])

    def solve(self) -> Fit:
        """The weights from all tokens, with the strength that is best for held-out ones."""
        best, least = math.inf, self.held.square
        trial_FO = self._weight(self.fit, best)
        for strength in STRENGTHS[1:]:
            weight_FO = self._weight(self.fit, strength)
            error = self.held.error(weight_FO)
            if error < least:
                best, least, trial_FO = strength, error, weight_FO
        sums = Sums(self.fit.gram_FF + self.held.gram_FF, self.fit.cross_FO + self.held.cross_FO)
        unexplained = least / max(self.held.square, 1e-300)
        return Fit(self._weight(sums, best), best, unexplained, trial_FO)

    def _weight(self, sums: Sums, strength: float) -> Tensor:
        """(X^T X + lambda)^-1 X^T Y by one Cholesky factorisation."""
        if strength == math.inf or not sums.gram_FF.diagonal().any():
            return torch.zeros_like(sums.cross_FO)
        square_F = sums.gram_FF.diagonal()
        mean = square_F.mean()
        penalty_F = torch.full_like(square_F, 1e-10) * mean  # features that are always zero
        penalty_F += strength * mean
        system_FF = sums.gram_FF + torch.diag(penalty_F)
        return torch.cholesky_solve(sums.cross_FO, torch.linalg.cholesky(system_FF))
