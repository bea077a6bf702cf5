"""Dynamic expert skipping: a token leaves out experts that weigh little for it.

Lu et al. (ACL 2024), Sec. 3.3 and App. A.2.

Top-2 (Sec. 3.3): the second expert is skipped when w_2 < beta w_1, where beta is the median of
w_2 / w_1 over the calibration tokens of the layer. Top-k (App. A.2): the smallest i experts stay
for which the sum of the other weights is at most beta times the sum of all k.

Where we depart from the paper:

- App. A.2 gives no beta; it is the median of w_k / sum w, which for k = 2 marks the same tokens.
- Both rules compare strictly, so that at k = 2 they are one rule: beta = 0 never skips.
- Survivors take over the weight of the skipped in proportion. A router whose weights sum to one
  keeps that; others keep their own sum.
- ``quantile`` moves beta: 0.5 is the median. ``calls`` asks for a mean number of experts a token
  instead, which is what a lower num_experts_per_tok must be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.arch.mixture import Rule
from moesaic.nn import survivors
from moesaic.plan import SkippingLayer
from moesaic.stream.experts import ExpertStats


@dataclass(frozen=True)
class SkipConfig:
    """Options of dynamic skipping. The defaults are the paper's."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    quantile: float = 0.5
    """Which quantile of the ratio beta is; 0.5 is the median."""
    calls: float | None = None
    """The mean number of experts a token should run instead."""
    rule: str = "auto"
    """top2, tail, or auto: top2 where a token has two experts."""

    def __post_init__(self) -> None:
        if not 0 <= self.quantile <= 1:
            raise MoesaicError(f"--quantile {self.quantile:g} must be from 0 to 1.")
        if self.rule not in ("auto", "top2", "tail"):
            raise MoesaicError(f"Unknown rule {self.rule!r}; choose from auto, top2, tail.")
        if self.calls is not None and self.calls < 1:
            raise MoesaicError(f"--calls {self.calls:g}: a token runs at least one expert.")


def ratios(weights_TK: Tensor, rule: str) -> Tensor:
    """What beta is a quantile of, for weights in falling order: w_2 / w_1, or w_k / sum w (T,).

    >>> ratios(torch.tensor([[0.6, 0.3]]), "top2"), ratios(torch.tensor([[0.6, 0.3]]), "tail")
    (tensor([0.5000]), tensor([0.3333]))
    """
    if rule == "top2":
        return weights_TK[:, 1] / weights_TK[:, 0]
    return weights_TK[:, -1] / weights_TK.sum(-1)


def mean_calls(weights_TK: Tensor, beta: float, rule: str) -> float:
    """Experts a token runs at this beta."""
    return survivors(weights_TK, beta, rule).sum().item() / max(1, len(weights_TK))


def beta_for_calls(weights_TK: Tensor, calls: float, rule: str, steps: int = 60) -> float:
    """The beta at which a token runs ``calls`` experts in the mean, by bisection.

    >>> w = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    >>> 1 / 9 < beta_for_calls(w, 1.5, "top2") < 2 / 3
    True
    """
    low, high = 0.0, 2.0  # above 1 only the first expert stays
    for _ in range(steps):
        middle = (low + high) / 2
        if mean_calls(weights_TK, middle, rule) > calls:
            low = middle
        else:
            high = middle
    return high


class Skipper:
    """Decides, from one layer's statistics, when its router skips."""

    name = "naee-skipping"

    def __init__(self, config: SkipConfig) -> None:
        self.config = config

    def decide(
        self, stats: ExpertStats, rule: Rule, top_k: int
    ) -> tuple[SkippingLayer, dict[str, Any]]:
        """The layer's beta, and how much it skips of the calibration tokens."""
        config = self.config
        if top_k < 2:
            raise MoesaicError("A token runs one expert already: there is nothing to skip.")
        kind = ("top2" if top_k == 2 else "tail") if config.rule == "auto" else config.rule
        if kind == "top2" and top_k != 2:
            raise MoesaicError(f"--rule top2 is for two experts a token; here there are {top_k}.")
        weights_TK = rule.weights(stats.logits_TE).topk(top_k, dim=-1).values.double()
        if config.calls is not None:
            if config.calls > top_k:
                raise MoesaicError(f"--calls {config.calls:g}: a token runs {top_k} experts now.")
            beta = beta_for_calls(weights_TK, config.calls, kind)
        else:
            beta = quantile(ratios(weights_TK, kind), config.quantile)
        calls = mean_calls(weights_TK, beta, kind)
        analysis = {"calls_per_token": calls, "skipped": 1 - calls / top_k}
        return SkippingLayer(beta, kind), analysis


def quantile(values_T: Tensor, q: float) -> float:
    """The quantile, between neighbours in proportion; for any number of values.

    >>> quantile(torch.tensor([3.0, 1.0, 2.0]), 0.5)
    2.0
    """
    ranked_T = values_T.double().sort().values
    place = q * (len(ranked_T) - 1)
    low = int(place)
    high = min(low + 1, len(ranked_T) - 1)
    return torch.lerp(ranked_T[low], ranked_T[high], place - low).item()
