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

import torch
from torch import Tensor

from moesaic.foreign import JSON
from moesaic.layers.regression import Fit, Ridge


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
