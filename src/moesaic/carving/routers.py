"""Routers of carved layers, which choose a token's experts, or weigh them.

A router that only chooses returns ones for the petals that a token runs and zeros for the others
(T, R); one that weighs returns a weight for every petal (T, R), zero where the token does not run
it. All multiply in float32 whatever the model's dtype, so that choices do not depend on rounding.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.modules.running import RunningTokens, gumbel
from moesaic.types import Values

DRAWING = ("random", "gumbel")
CHOOSING = ("cosine", "random", "linear", "gumbel")


def _logits(weight_RD: Tensor, x_TD: Tensor) -> Tensor:
    with torch.autocast(x_TD.device.type, enabled=False):
        return F.linear(x_TD.float(), weight_RD.float())


def top(score_TI: Tensor, keep: int) -> Tensor:
    """Return the places of the highest scores of each token, bool (T, I); of equal ones the first.

    >>> top(torch.tensor([[1.0, 2.0, 1.0]]), 2)
    tensor([[ True,  True, False]])
    """
    if keep == 0:
        return torch.zeros_like(score_TI, dtype=torch.bool)
    lowest_T1 = score_TI.topk(keep, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    on_TI = score_TI >= lowest_T1
    looks = score_TI.is_cpu and not torch.compiler.is_compiling()
    if looks and int(on_TI.count_nonzero()) * score_TI.shape[-1] == keep * on_TI.numel():
        return on_TI  # no equal ones: skip the rest, which takes as long again
    above_TI = score_TI > lowest_T1
    left_T1 = keep - above_TI.sum(-1, keepdim=True)
    return above_TI | (on_TI & ((on_TI & ~above_TI).cumsum(-1) <= left_T1))


class Router(nn.Module):
    """Router that chooses ``top_k`` petals for each token by one score per petal. Weights are
    float32.

    ``cosine``: the petals whose prototypes are most similar to x (MoRE Eqs. 12-13). Rows have norm
    one; the norm of x changes no comparison, so it is not computed.

    ``random``: a fixed pseudo-random choice, uniform over petals and unrelated to what they hold
    (MoRE-Random): a function of only the token's id, position and layer.

    ``linear``: scores are a linear function of x, as in native routers.

    ``gumbel``: a linear function of x, and Gumbel noise: the softmax's probabilities (ToMoE,
    Eq. 14).

    Args:
        hidden_size: D.
        experts: petals R.
        top_k: petals a token runs.
        routing: one of the above.
        passage: the tokens that run, for routing by random numbers; None for an empty one.
    """

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        top_k: int,
        routing: str = "cosine",
        passage: RunningTokens | None = None,
    ) -> None:
        super().__init__()
        if routing not in CHOOSING:
            raise ValueError(f"routing {routing!r} is not one of {CHOOSING}")
        self.weight = nn.Parameter(torch.empty(experts, hidden_size, dtype=torch.float32))
        self.top_k = top_k
        self.routing = routing
        self.passage = passage or RunningTokens()

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return ones for the chosen petals (T, R), of equal scores the first.

        In training they have the gradient of a sigmoid around the border between chosen and other
        scores.
        """
        scores_TR = self.scores(x_TD)
        on_TR = top(scores_TR.detach(), self.top_k).to(scores_TR.dtype)
        if not (self.training and self.learns and scores_TR.requires_grad):
            return on_TR
        border_T2 = scores_TR.topk(min(self.top_k + 1, scores_TR.shape[1]), dim=-1).values[:, -2:]
        apart_TR = scores_TR - border_T2.mean(-1, keepdim=True).detach()
        spread_T1 = scores_TR.std(-1, keepdim=True).clamp(min=1e-6).detach()
        return straight_through(on_TR, (apart_TR / spread_T1).sigmoid())

    def scores(self, x_TD: Tensor) -> Tensor:
        """Return a score for each petal (T, R), float32; the highest are chosen."""
        drawn = (len(x_TD), len(self.weight), x_TD.device)
        if self.routing == "random":
            return self.passage.uniform(*drawn)
        scores_TR = _logits(self.weight, x_TD)
        noisy = self.routing == "gumbel"
        return scores_TR + gumbel(self.passage.uniform(*drawn)) if noisy else scores_TR

    @property
    def learns(self) -> bool:
        """True if its weights have a gradient in training; a random choice has none."""
        return self.routing != "random"

    def extra_repr(self) -> str:
        experts, inputs = self.weight.shape
        return f"{inputs} -> top-{self.top_k} of {experts}, {self.routing}"


@lru_cache
def _widths(petals: tuple[int, ...], device: torch.device) -> Tensor:
    """Return petal widths as a tensor, cached because making it takes longer than routing."""
    with torch.inference_mode(False):
        return torch.tensor(petals, device=device)


def by_neuron(on_TR: Tensor, backbone: int, petals: tuple[int, ...]) -> Tensor:
    """Repeat values of experts (T, R) for their neurons (T, M); ones for the shared neurons.

    >>> by_neuron(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 1, (1, 2))
    tensor([[1., 0., 1., 1.],
            [1., 1., 0., 0.]])
    """
    widths = _widths(petals, on_TR.device)
    on_TM = on_TR.repeat_interleave(widths, dim=1, output_size=sum(petals))
    return F.pad(on_TM, (backbone, 0), value=1)


# --- routers that weigh --------------------------------------------------------------------------


def thresholded(g_TR: Tensor, tau: float) -> Tensor:
    """Return G, DSMoE Eq. 7: the gates above tau, zero elsewhere.

    >>> thresholded(torch.tensor([[0.4, 0.5, 0.75]]), 0.5)
    tensor([[0.0000, 0.0000, 0.7500]])
    """
    return g_TR * (g_TR > tau)


def straight_through(value: Tensor, g: Tensor) -> Tensor:
    """Return S, DSMoE Eq. 10: the value of G, the gradient of g.

    >>> g = torch.tensor([0.4, 0.75], requires_grad=True)
    >>> S = straight_through(thresholded(g, 0.5), g); S.sum().backward()
    >>> S.tolist(), g.grad.tolist()
    ([0.0, 0.75], [1.0, 1.0])
    """
    return value.detach() + g - g.detach()


def norm_scale(weights_TR: Tensor) -> Tensor:
    """Return n / k, DSMoE Eq. 8: petals over a token's active ones (T, 1). No gradient; k = 0
    counts as 1.

    >>> norm_scale(torch.tensor([[0.6, 0.0, 0.7, 0.0], [0.0, 0.0, 0.0, 0.0]])).tolist()
    [[2.0], [4.0]]
    """
    active_T1 = (weights_TR > 0).sum(-1, keepdim=True).clamp(min=1)
    return weights_TR.shape[-1] / active_T1


class ThresholdRouter(nn.Module):
    """Router with one sigmoid gate per petal; a token runs petals with a gate above tau (DSMoE Eq.
    7).

    Args:
        through: True if gates below tau get gradients too in training (Eqs. 10, 11).
        piecewise: True if gates below tau are zero in training; False is the ablation of Eq. 20.
    """

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        top_k: int,
        *,
        tau: float = 0.5,
        through: bool = True,
        piecewise: bool = True,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden_size, dtype=torch.float32))
        self.tau, self.through, self.piecewise = tau, through, piecewise

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return G(g), or S(g) of the same value in training (T, R)."""
        g_TR = _logits(self.weight, x_TD).sigmoid()
        if self.training and not self.piecewise:
            return g_TR
        G_TR = thresholded(g_TR, self.tau)
        return straight_through(G_TR, g_TR) if self.training and self.through else G_TR

    def extra_repr(self) -> str:
        experts, hidden_size = self.weight.shape
        return f"{hidden_size} -> {experts}, tau={self.tau:g}"


class SoftmaxRouter(nn.Module):
    """Router of a fixed number of petals, weighed by a softmax over their logits (LLaMA-MoE).

    Args:
        scale: the sum of a token's weights; 1 in LLaMA-MoE.
    """

    def __init__(self, hidden_size: int, experts: int, top_k: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden_size, dtype=torch.float32))
        self.top_k, self.scale = top_k, scale

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the weights (T, R)."""
        logits_TR = _logits(self.weight, x_TD)
        top_TK, chosen_TK = logits_TR.topk(self.top_k, dim=-1)
        weights_TK = self.scale * top_TK.softmax(-1)
        return torch.zeros_like(logits_TR).scatter(-1, chosen_TK, weights_TK)

    def probabilities(self, x_TD: Tensor) -> Tensor:
        """Return the softmax over all petals (T, R), for the load-balance loss."""
        return _logits(self.weight, x_TD).softmax(-1)

    def extra_repr(self) -> str:
        experts, hidden_size = self.weight.shape
        return f"{hidden_size} -> top-{self.top_k} of {experts}"


WEIGHING: dict[str, type[nn.Module]] = {"threshold": ThresholdRouter, "softmax": SoftmaxRouter}


def make_router(
    hidden_size: int,
    experts: int,
    top_k: int,
    routing: str,
    gate: Values | None = None,
    passage: RunningTokens | None = None,
) -> nn.Module:
    """Return a router by name, its weights not set; ``gate`` are the options of one that weighs."""
    if routing in WEIGHING:
        return WEIGHING[routing](hidden_size, experts, top_k, **(gate or {}))
    return Router(hidden_size, experts, top_k, routing, passage)
