"""ToMoE: experts of a dense model and their routers, learned over frozen weights.

Gao et al., "ToMoE: Converting Dense Large Language Models to Mixture-of-Experts through Dynamic
Structural Pruning", TMLR 2025. https://openreview.net/forum?id=RFHq46pjv6

E_all = HN(z)                          expert embeddings of all layers (Eq. 1)
s     = ST-GSig(Proj_D(G E))           neurons of each token's expert (Eq. 3)
G     = ST-GSmax(Router(X))            the expert of each token (Eq. 3)
s_t   = ST-GSig(Proj_D(Proj_E(X_t) + mean E))   value and output dimensions of a head (Eq. 5)
s_0   = ST-GSig(Proj_D(mean E))        query and key dimensions, the same for all tokens
R_P, R_U, R_L                          budget, union of experts, load balance (Eqs. 6-9)

Deviations of our defaults from the paper; ``PUBLISHED`` (``--recipe paper``) undoes all of them:

- Masks are random in training only. A result is deterministic: a neuron is on if its logit plus b
  exceeds minus the Gumbel median, the majority of random masks. The budget counts what is deployed:
  the widest expert without noise, and the mean over tokens of a head's dimensions; at the end one
  threshold for all layers is chosen at which the active ratio is ``active``. With ``published`` the
  result is random and the budget counts maxima over random masks, as in the paper, which leaves the
  result below its target.
- Attention starts further from its threshold than FFNs (b is 6, not 3): else the budget removes
  half of it in the first steps, before distillation has an effect.
- A mask multiplies hidden activations once, so that neurons that are off still learn whether they
  should be on.
- R_L has an eighth of the paper's weight (1/8, not 1): what the released code computes for eight
  experts, which leaves out Eq. 9's factor N.

Whatever the options:

- R_U covers attention too, as in the paper, unlike in the released code.
- Where queries and keys are normalised (Qwen3, Gemma 3, OLMo 2), which the paper's models are not,
  their s_0 is 1: Eq. 4 masks the norm's output, and its mean needs every row of W_Q and W_K, so
  that no row could be removed.

Shape suffixes: B texts, L tokens of each, N experts, M neurons, E embedding, A size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Heads
from moesaic.carving.budget import LayerSize
from moesaic.carving.tomoe.config import ToMoEConfig

EMBEDDING, INPUT, HIDDEN = 128, 32, 64
"""Sizes: d_e, the hypernetwork's input, and its state in each direction (Tab. 8)."""

MEDIAN = -math.log(math.log(2))
"""Median of the Gumbel(0, 1) distribution."""


# --- straight-through masks (App. A.3) -----------------------------------------------------------


def gumbel_like(like: Tensor) -> Tensor:
    """Return noise of the Gumbel(0, 1) distribution, in the shape of a tensor."""
    return -torch.empty_like(like).exponential_().log()


def st_sigmoid(x: Tensor, tau: float, bias: float, noise: bool) -> Tensor:
    """Return ST-GSig, Eq. 15: round(sigmoid((x + g + b) / tau)), with the sigmoid's gradient.

    Without noise, g is the Gumbel median: the more likely mask.

    >>> st_sigmoid(torch.tensor([-4.0, -3.0, 0.0]), 0.4, 3.0, noise=False)
    tensor([0., 1., 1.])
    """
    g = gumbel_like(x) if noise else MEDIAN
    soft = ((x + g + bias) / tau).sigmoid()
    return soft + (soft.round() - soft).detach()


def gs_max(x: Tensor, tau: float, noise: bool) -> Tensor:
    """Return GSmax (App. A.3): softmax((x + g) / tau)."""
    return ((x + gumbel_like(x) if noise else x) / tau).softmax(-1)


def st_gs_max(soft: Tensor) -> Tensor:
    """Return ST-GSmax of a GSmax, Eq. 14: the one-hot of the largest, with the gradient of
    ``soft``.

    >>> st_gs_max(torch.tensor([0.1, 0.7, 0.2]))
    tensor([0., 1., 0.])
    """
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1)
    return soft + (hard - soft).detach()


# --- regularisers (Sec. 3.4) ---------------------------------------------------------------------


def f_reg(x: Tensor, y: float) -> Tensor:
    """Return log(max(x, y) / min(x, y)), with 1e-3 added to both as in the released code.

    >>> f_reg(torch.tensor(0.5), 0.5), f_reg(torch.tensor(0.999), 0.499)
    (tensor(0.), tensor(0.6931))
    """
    return ((x + 1e-3) / (y + 1e-3)).log().abs()


def union(s_NM: Tensor) -> Tensor:
    """Return the share of u = 1 - prod_i (1 - s_i), Eqs. 6 and 16: neurons that any expert has.

    >>> union(torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]]))
    tensor(0.5000)
    """
    return (1 - (1 - s_NM).prod(0)).mean()


def load_balance(chosen_TN: Tensor, probability_TN: Tensor) -> Tensor:
    """Return R_L = N sum_i F_i P_i, Eq. 9: 1 when balanced, N when collapsed.

    F_i counts tokens, so only P_i has a gradient.

    Args:
        chosen_TN: the one-hot of each token's expert.
        probability_TN: GSmax of the router's output, before it is made one-hot.

    >>> even = torch.eye(4)
    >>> load_balance(even, even), load_balance(even[[0, 0]], even[[0, 0]])
    (tensor(1.), tensor(4.))
    """
    F_N, P_N = chosen_TN.detach().mean(0), probability_TN.mean(0)
    return len(P_N) * F_N @ P_N


# --- what trains (App. A.1, Tab. 8) --------------------------------------------------------------


class Hypernetwork(nn.Module):
    """HN, Eq. 1: a Bi-GRU along the slots attention 0, FFN 0, attention 1, ...; experts are its
    batch.

    Its input is random and fixed.
    """

    def __init__(self, slots: int, experts: int) -> None:
        super().__init__()
        self.register_buffer("z", torch.randn(slots, experts, INPUT))
        self.gru = nn.GRU(INPUT, HIDDEN, bidirectional=True)

    def forward(self) -> Tensor:
        """Return E_all (slots, N, E)."""
        return self.gru(self.z)[0]


class _ProjD(nn.Module):
    """Proj_D: LayerNorm, GELU, Linear, from the embedding to one logit a dimension (Tab. 8)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(EMBEDDING)
        self.linear = nn.Linear(EMBEDDING, width, bias=False)

    def forward(self, e: Tensor) -> Tensor:
        return self.linear(F.gelu(self.norm(e)))


class _MLPModules(nn.Module):
    """Router and Proj_D of one FFN."""

    def __init__(self, hidden_size: int, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden_size, experts, bias=False)
        self.proj_d = _ProjD(width)


class _MHAModules(nn.Module):
    """Proj_D and Proj_E of one attention."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.proj_d = _ProjD(width)
        self.proj_e = nn.Linear(hidden_size, EMBEDDING, bias=False)


@dataclass(frozen=True)
class LayerShape(LayerSize):
    """Sizes of a decoder layer that ToMoE needs."""

    heads: Heads = field(kw_only=True)

    @property
    def neuron(self) -> float:
        return self.ffn / self.width

    @property
    def dimension(self) -> float:
        """Weights of one dimension of all heads, of queries and keys or of values and outputs."""
        return self.attention / 2 / self.heads.size


class MaskingModules(nn.Module):
    """Theta of Eq. 10: all trainable modules, which compute masks from a layer's input."""

    def __init__(self, config: ToMoEConfig, shapes: Sequence[LayerShape]) -> None:
        super().__init__()
        self.config, self.shapes = config, shapes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # a dry run starts where training does
            self.hypernetwork = Hypernetwork(2 * len(shapes), config.experts)
            self.mlp = nn.ModuleList(_MLPModules(s.hidden, s.width, config.experts) for s in shapes)
            self.mha = nn.ModuleList(
                _MHAModules(s.hidden, s.heads.size + s.heads.free)
                for s in shapes
                if config.attention != "none"
            )
        self.total = sum(s.attention + s.ffn for s in shapes)
        self.noise = False
        self.E_all = torch.empty(0)
        self.valid_T = torch.empty(0)
        self.kept: dict[int, list[Tensor]] | None = None
        self.measured: dict[tuple[int, str], dict[str, Tensor]] = {}

    def mlp_modules(self, index: int) -> _MLPModules:
        return cast(_MLPModules, self.mlp[index])

    def mha_modules(self, index: int) -> _MHAModules:
        return cast(_MHAModules, self.mha[index])

    def begin(self, valid_BL: Tensor, noise: bool) -> None:
        """Prepare a forward pass: set which tokens are real, and whether masks are random."""
        self.valid_T, self.noise = valid_BL.flatten(), noise
        with torch.autocast(valid_BL.device.type, enabled=False):
            self.E_all = self.hypernetwork()

    def _neurons(self, x: Tensor, noise: bool) -> Tensor:
        return st_sigmoid(x, self.config.tau, self.config.bias, noise)

    def _dimensions(self, x: Tensor, noise: bool) -> Tensor:
        return st_sigmoid(x, self.config.tau, self.config.head_bias, noise)

    def mean_embedding(self, index: int) -> Tensor:
        """Return the mean expert embedding of one attention (Eq. 5)."""
        return self.E_all[2 * index].mean(0)

    def expert_logits(self, index: int) -> Tensor:
        """Return Proj_D(E) of one FFN (N, M), Eq. 11."""
        return self.mlp_modules(index).proj_d(self.E_all[2 * index + 1])

    def ffn(self, index: int, x_BLD: Tensor) -> Tensor:
        """Return s (B, L, M), Eq. 3."""
        noisy = self.config.noise and self.noise
        with torch.autocast(x_BLD.device.type, enabled=False):
            logits = self.mlp_modules(index).router(x_BLD.float())
            probability = gs_max(logits, self.config.tau, self.noise)
            chosen = st_gs_max(probability)
            embedded = chosen @ self.E_all[2 * index + 1]
            s = self._neurons(self.mlp_modules(index).proj_d(embedded), self.noise)
            s_NM = self._neurons(self.expert_logits(index), noisy)
            valid = self.valid_T
            self.measured[index, "mlp"] = {
                "width": (s.flatten(0, 1)[valid] if noisy else s_NM).sum(-1).max(),
                "union": union(s_NM),
                "balance": load_balance(
                    chosen.flatten(0, 1)[valid], probability.flatten(0, 1)[valid]
                ),
            }
        return s

    def attention(self, index: int, x_BLD: Tensor) -> Mapping[str, Tensor]:
        """Return s_0 for queries and keys, s_t for values and outputs, over all heads (Eqs. 4-5).

        Returns:
            masks by ``q``, ``k``, ``v`` and ``o``; empty if attention is not changed.
        """
        if self.config.attention == "none":
            return {}
        heads, noisy = self.shapes[index].heads, self.config.noise and self.noise
        with torch.autocast(x_BLD.device.type, enabled=False):
            static = self.static_logits(index)[heads.size :]
            s_0 = heads.paired(self._dimensions(static, self.noise))
            deployed = heads.paired(self._dimensions(static, noisy))
            logits = self.head_logits(index, x_BLD)
            s_t = self._dimensions(logits, self.noise)
            s_TA = s_t if noisy == self.noise else self._dimensions(logits, noisy)
            s_TA = s_TA.flatten(0, -2)[self.valid_T]
            if self.kept is not None:
                self.kept.setdefault(index, []).append(logits.flatten(0, -2)[self.valid_T])
            widths_T = s_TA.sum(-1)
            self.measured[index, "mha"] = {
                "qk": deployed.sum(),
                "vo": widths_T.max() if noisy else widths_T.mean(),
                "union": union(s_TA),
            }
            return {
                "q": s_0.repeat(heads.queries),
                "k": s_0.repeat(heads.keys),
                "v": torch.cat([s_t] * heads.keys, -1),
                "o": torch.cat([s_t] * heads.queries, -1),
            }

    def static_logits(self, index: int) -> Tensor:
        """Return Proj_D(mean E): logits for all tokens alike, V/O dimensions, then Q/K."""
        return self.mha_modules(index).proj_d(self.mean_embedding(index))

    def head_logits(self, index: int, x_BLD: Tensor) -> Tensor:
        """Return logits of the V/O dimensions (B, L, A)."""
        modules, size = self.mha_modules(index), self.shapes[index].heads.size
        embedded = modules.proj_e(x_BLD.float()) + self.mean_embedding(index)
        logits: Tensor = modules.proj_d(embedded)
        return logits[..., :size]

    def terms(self) -> dict[str, Tensor]:
        """Return the regularisers of the last forward pass (Eqs. 7-9).

        Returns:
            ``parameters``, ``union`` and ``balance``: R_P, R_U and R_L; ``active``: the ratio.
        """
        used = self.E_all.new_zeros(())
        for i, shape in enumerate(self.shapes):
            used = used + shape.neuron * self.measured[i, "mlp"]["width"]
            if self.config.attention == "none":
                used = used + shape.attention
            else:
                mha = self.measured[i, "mha"]
                used = used + shape.dimension * (mha["qk"] + mha["vo"])
        active = used / self.total
        unions = torch.stack([part["union"] for part in self.measured.values()])
        balance = [part["balance"] for part in self.measured.values() if "balance" in part]
        return {
            "parameters": f_reg(active, self.config.active),
            "union": f_reg(unions, 1.0).mean(),
            "balance": torch.stack(balance).mean(),
            "active": active,
        }

    def penalty(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return alpha R_P + beta R_U + gamma R_L, Eq. 10."""
        config = self.config
        budget = config.parameters * terms["parameters"] + config.union * terms["union"]
        return budget + config.balance * terms["balance"]
