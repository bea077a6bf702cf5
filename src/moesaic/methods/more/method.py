"""MoRE: Mixture of Recognized Experts, dense to MoE without training.

Zhang et al., "Less Prune, MoRE Experts: Recognizing and Restructuring Latent Experts for Model
Compression". Equation numbers are the paper's.

==================  ==========================================================
x, h                FFN input (T, D), input of the down projection (T, M)
S(t), k_act         activated channels of a token, their number (Eq. 4)
f, C                channel frequency, co-activation (Eqs. 5, 6)
s                   global importance of a channel (Eq. 7)
C_share             backbone: the channels every token runs
S_i, r              petals: a partition of the other channels, their number
E_i                 expert: S_i and C_share
A(h, E_i)           expert energy (Eq. 9)
T_i, mu_i           calibration tokens of an expert, their centroid (Eqs. 10, 11)
==================  ==========================================================

Where the paper is silent or we depart from it:

- Gated FFNs: h is the true input of the down projection, act(gate) * up, and experts keep their
  gate rows. The paper ignores the gate; dropping it would break the model.
- rho_act = 0.1 and alpha = 0.5 are not given in the paper. Both are options.
- Petals have equal sizes by default (``balanced``), which native architectures need. Otherwise
  k-means sizes, clamped to half and one and a half times the mean. No channel is dropped.
- Channels that are never activated together with another go to the smallest petal.
- An expert that no token prefers takes the centroid of its highest-energy tokens.
- ``weighted``, ``router``, ``refit``, ``bias``, ``propagate`` and ``spread`` go beyond the paper:
  :mod:`moesaic.methods.beyond.routers`, :mod:`moesaic.methods.beyond.refit`, docs/beyond.md. Their defaults are
  the paper's method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import DenseFFN
from moesaic.methods.budget import (
    LayerSize,
    Split,
    chosen_layers,
    ffn_share,
    solved_top_k,
    split_for_target,
)
from moesaic.methods.clustering import affinity_degree, cluster, fill, spectral_embedding
from moesaic.errors import MoesaicError
from moesaic.methods.beyond.routers import fit_router, neuron_weights
from moesaic.methods.beyond.spread import spread_splits
from moesaic.plan import CarvedLayer
from moesaic.stream.stream import Site

Variant = Literal["full", "backbone", "random", "naive", "static"]
SpreadName = Literal["uniform", "sensitivity"]
RouterName = Literal["cosine", "ridge", "backbone"]

COVERAGE = (0.1, 0.01, 0.001)
"""Shares of the channels for which Table 4's never-activated ratio is reported."""


@dataclass(frozen=True)
class MoREConfig:
    """Options of MoRE. The defaults are the paper's, or our decision where it gives none."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    active: float = 0.8
    """Target active ratio of the whole model (APR = 1 - PR)."""
    experts: int = 4
    """Petals r a layer."""
    top_k: int = 1
    """Petals a token runs beside the backbone. 0: as many as leave two thirds of a token's neurons
    to the backbone."""
    layers: str | tuple[int, ...] = "last-half"
    """last-half, all, uniform, early-middle, or layer numbers."""
    variant: Variant = "full"
    """full; backbone (no petals), random (random routing), naive (no backbone), static (pruning at
    the same active width): the paper's comparisons."""
    activation_ratio: float = 0.1
    """rho_act: the share of channels that count as activated by a token (Eq. 4)."""
    alpha: float = 0.5
    """Debiasing of expert energy by expert size (Eq. 9)."""
    balanced: bool = True
    """Petals of equal size."""
    weighted: bool = False
    """Neurons count by |h_j| ||W_down[:, j]|| instead of |h_j| in Eqs. 4 and 9. Not the paper's."""
    router: RouterName = "cosine"
    """cosine; ridge, fitted to the petals' energies; backbone, which sees the backbone's hidden
    activations too. The last two are not the paper's."""
    refit: bool = False
    """Refit the down projection to the whole layer's output. Not the paper's."""
    bias: bool = False
    """An output bias for each petal: the mean of what it leaves out. Not the paper's."""
    propagate: bool = False
    """Refit on what the layers converted before pass on, towards the original's outputs."""
    spread: SpreadName = "uniform"
    """uniform: the same share of every layer; sensitivity: more where more would be lost."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.spread not in get_args(SpreadName):
            raise MoesaicError(
                f"Unknown spread {self.spread!r}; choose from {', '.join(get_args(SpreadName))}."
            )
        if self.spread != "uniform" and self.variant == "naive":
            raise MoesaicError("naive clustering has no backbone to spread: drop spread.")
        if self.router not in get_args(RouterName):
            raise MoesaicError(
                f"Unknown router {self.router!r}; choose from {', '.join(get_args(RouterName))}."
            )
        if self.propagate and not (self.refit or self.bias):
            raise MoesaicError("propagate says what a refit looks at: it needs refit or bias.")
        if self.variant not in get_args(Variant):
            raise MoesaicError(
                f"Unknown variant {self.variant!r}; choose from {', '.join(get_args(Variant))}."
            )
        if not 0 < self.activation_ratio <= 1 or not 0 <= self.alpha <= 1:
            raise MoesaicError("activation_ratio must be in (0, 1], alpha in [0, 1].")


# --- Sums over tokens: Eqs. 4 to 7 ---------------------------------------------------------------


def activated(h_TM: Tensor, ratio: float) -> Tensor:
    """S(t), Eq. 4: the k_act channels of largest magnitude a token, largest first (T, k_act).

    >>> activated(torch.tensor([[0.1, -3.0, 2.0, 0.0]]), ratio=0.5)
    tensor([[1, 2]])
    """
    k_act = max(1, int(ratio * h_TM.shape[1]))
    return h_TM.abs().topk(k_act, dim=1).indices


def frequency(channels_TK: Tensor, width: int) -> Tensor:
    """N f, Eq. 5: how many tokens activate each channel (M,).

    >>> frequency(torch.tensor([[0, 1], [1, 2]]), width=4)
    tensor([1, 2, 1, 0])
    """
    return torch.bincount(channels_TK.flatten(), minlength=width)


def add_coactivation(into_MM: Tensor, channels_TK: Tensor, block: int = 4096) -> None:
    """Add N C, Eq. 6: how many tokens activate both channels. Upper blocks only.

    Counts in float32 are exact up to 2^24 tokens. Blocks below the diagonal stay zero until
    :func:`mirror`.

    >>> C = torch.zeros(3, 3)
    >>> add_coactivation(C, torch.tensor([[0, 1], [1, 2]])); C.tolist()
    [[1.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 1.0]]
    """
    tokens, width = len(channels_TK), into_MM.shape[0]
    on_TM = torch.zeros(tokens, width, device=into_MM.device)
    on_TM.scatter_(1, channels_TK, 1)
    for row in range(0, width, block):
        rows = slice(row, row + block)
        into_MM[rows, row:].addmm_(on_TM[:, rows].T, on_TM[:, row:])


def mirror(upper_MM: Tensor, block: int = 4096) -> Tensor:
    """Fill the blocks below the diagonal from those above, in place."""
    for row in range(0, upper_MM.shape[0], block):
        stop = row + block
        upper_MM[stop:, row:stop] = upper_MM[row:stop, stop:].T
    return upper_MM


def importance(ffn: DenseFFN, x_square_D: Tensor, h_square_M: Tensor) -> Tensor:
    """s, Eq. 7: s_j = sum_i |W_up[j,i]| E[x_i^2] + sum_k |W_down[k,j]| E[h_j^2] (M,)."""
    up_MD, down_DM = ffn.up_MD.double().abs(), ffn.down_DM.double().abs()
    return up_MD @ x_square_D + down_DM.sum(0) * h_square_M


@dataclass
class MoREStats:
    """Running sums over one layer's tokens."""

    tokens: int
    x_square_D: Tensor
    """float64: sum of x_i^2."""
    h_square_M: Tensor
    """float64: sum of h_j^2."""
    frequency_M: Tensor
    """int64: tokens that activate a channel."""
    coactivation_MM: Tensor
    """float32: tokens that activate both channels."""
    covered: dict[float, Tensor]
    """For each share of COVERAGE, the channels that were ever among a token's largest."""

    def merge(self, other: MoREStats) -> MoREStats:
        """The statistics of both token sets together."""
        return MoREStats(
            self.tokens + other.tokens,
            self.x_square_D + other.x_square_D,
            self.h_square_M + other.h_square_M,
            self.frequency_M + other.frequency_M,
            self.coactivation_MM + other.coactivation_MM,
            {share: seen | other.covered[share] for share, seen in self.covered.items()},
        )


# --- Petals: spectral clustering of the residual co-activation -----------------------------------


def petals_of(
    coactivation_MM: Tensor, members: Tensor, experts: int, balanced: bool, seed: int
) -> list[Tensor]:
    """S_1 ... S_r: a partition of ``members`` by how often channels are activated together."""
    if experts == 1:
        return [members]
    connected = (affinity_degree(coactivation_MM, members) > 0).cpu().numpy()
    label = np.full(len(members), -1)
    mean = len(members) / experts
    if balanced:
        least, most = np.full(experts, int(mean)), np.full(experts, int(np.ceil(mean)))
    else:
        least, most = np.full(experts, int(0.5 * mean)), np.full(experts, int(1.5 * mean))
    if connected.sum() >= experts:
        tied = members[torch.from_numpy(connected).to(members.device)]
        points = spectral_embedding(coactivation_MM, tied, experts, seed)
        labels, distance = cluster(points, experts, seed)
        fits = np.bincount(labels, minlength=experts)
        within = not balanced and (fits >= least).all() and (fits <= most).all()
        none = np.zeros(experts, dtype=int)
        label[connected] = labels if within else fill(distance, none, most)
    sizes = np.bincount(label[label >= 0], minlength=experts)
    for channel in np.flatnonzero(label < 0):  # isolated: to the smallest petal
        label[channel] = sizes.argmin()
        sizes[label[channel]] += 1
    if not balanced or (sizes < least).any():
        label = fill((label[:, None] != np.arange(experts)).astype(float), least, most)
    return [members[torch.from_numpy(label == e).to(members.device)] for e in range(experts)]


# --- Prototypes: Eqs. 9 to 11 --------------------------------------------------------------------


def memberships(backbone: Tensor, petals: list[Tensor], width: int) -> Tensor:
    """E_i = S_i and C_share as columns of zeros and ones (M, R)."""
    member_MR = torch.zeros(width, len(petals), device=backbone.device)
    member_MR[backbone] = 1
    for i, petal in enumerate(petals):
        member_MR[petal, i] = 1
    return member_MR


def energies(h_TM: Tensor, member_MR: Tensor, alpha: float) -> Tensor:
    """A(h, E_i), Eq. 9: ||h on E_i||_2 / |E_i|^alpha (T, R).

    >>> experts = memberships(torch.tensor([0]), [torch.tensor([1]), torch.tensor([2])], 3)
    >>> energies(torch.tensor([[3.0, 4.0, 0.0]]), experts, alpha=0.0)
    tensor([[5., 3.]])
    """
    return (h_TM.float().square() @ member_MR).sqrt() / member_MR.sum(0) ** alpha


def prototypes(
    site: Site, member_MR: Tensor, alpha: float, worth_M: Tensor | None = None
) -> Tensor:
    """mu_i, Eqs. 10 and 11, of norm one: what the router compares x with (R, D)."""
    experts = member_MR.shape[1]
    keep = max(1, site.tokens // (100 * experts))
    hidden_size = site.view.up_MD.shape[1]
    sum_RD = torch.zeros(experts, hidden_size, dtype=torch.float64, device=member_MR.device)
    count_R = torch.zeros(experts, device=member_MR.device)
    best: list[tuple[Tensor, Tensor]] = []  # energies and inputs of each expert's top tokens
    for x_TD, h_TM in site.activations():
        energy_TR = energies(h_TM if worth_M is None else h_TM * worth_M, member_MR, alpha)
        assigned_TR = F.one_hot(energy_TR.argmax(1), experts).double()
        sum_RD += assigned_TR.T @ x_TD.double()
        count_R += assigned_TR.sum(0)
        top = energy_TR.topk(min(keep, len(energy_TR)), dim=0)
        best.append((top.values, x_TD[top.indices]))
    for i in torch.nonzero(count_R == 0).flatten().tolist():
        values = torch.cat([v[:, i] for v, _ in best])
        candidates = torch.cat([x[:, i] for _, x in best]).double()
        sum_RD[i] = candidates[values.topk(min(keep, len(values))).indices].sum(0)
    return F.normalize(sum_RD, dim=1).float()  # the centroid's length changes no cosine


# --- The method ----------------------------------------------------------------------------------


class MoRE:
    """Observe sums, pick the backbone, cluster the rest, place the prototypes."""

    name = "more"

    def __init__(self, config: MoREConfig) -> None:
        self.config = config

    def choose(
        self, sizes: list[LayerSize], losses_M: Mapping[int, Tensor] | None = None
    ) -> Mapping[int, Split]:
        """The layers to carve with backbone and petal sizes that meet the target in closed form.

        All variants get the same active width; they differ in what fills it.

        Args:
            sizes: all layers.
            losses_M: what leaving each neuron out loses, of the layers to carve, where the budget
                is spread by that.
        """
        config = self.config
        layers = chosen_layers(config.layers, len(sizes))
        top_k = config.top_k or solved_top_k(sizes, layers, config.active, config.experts)
        if losses_M is not None:
            return spread_splits(sizes, losses_M, config.active, config.experts, top_k)
        if config.variant == "naive":
            return _without_backbone(sizes, layers, ffn_share(sizes, layers, config.active))
        return split_for_target(sizes, layers, config.active, config.experts, top_k)

    def observe(self, site: Site) -> MoREStats:
        """Sums over the site's tokens: Eqs. 4 to 7."""
        ffn = site.view
        width, device = ffn.width, ffn.up_MD.device
        stats = MoREStats(
            tokens=0,
            x_square_D=torch.zeros(ffn.up_MD.shape[1], dtype=torch.float64, device=device),
            h_square_M=torch.zeros(width, dtype=torch.float64, device=device),
            frequency_M=torch.zeros(width, dtype=torch.int64, device=device),
            coactivation_MM=torch.zeros(width, width, device=device),
            covered={s: torch.zeros(width, dtype=torch.bool, device=device) for s in COVERAGE},
        )
        worth_M = neuron_weights(ffn) if self.config.weighted else torch.ones((), device=device)
        for x_TD, h_TM in site.activations():
            channels_TK = activated(h_TM * worth_M, self.config.activation_ratio)
            stats.tokens += len(x_TD)
            stats.x_square_D += x_TD.double().square().sum(0)
            stats.h_square_M += h_TM.double().square().sum(0)
            stats.frequency_M += frequency(channels_TK, width)
            add_coactivation(stats.coactivation_MM, channels_TK)
            for share, seen in stats.covered.items():
                seen[channels_TK[:, : max(1, int(share * width))].flatten()] = True
        mirror(stats.coactivation_MM)
        return stats

    def decide(self, stats: MoREStats, site: Site, budget: Split) -> CarvedLayer:
        """Backbone by importance, petals by co-activation, and a router."""
        backbone, petals = self.structure(stats, site, budget)
        return CarvedLayer(
            order_M=torch.cat([backbone, *petals]).cpu(),
            backbone=len(backbone),
            petals=tuple(len(p) for p in petals),
            top_k=budget.top_k if petals else 0,
            **(self._router(site, backbone, petals) if petals else {}),
        )

    def structure(self, stats: MoREStats, site: Site, budget: Split) -> tuple[Tensor, list[Tensor]]:
        """The neurons of the backbone and of each petal."""
        config = self.config
        score_M = importance(
            site.view, stats.x_square_D / stats.tokens, stats.h_square_M / stats.tokens
        )
        ranked_M = score_M.argsort(descending=True, stable=True)
        if config.variant in ("static", "backbone"):
            whole = config.variant == "static"
            width = budget.active_width if whole else budget.backbone
            return ranked_M[:width].sort().values, []
        if budget.petal == 0:  # a layer that nothing is taken from
            return ranked_M.sort().values, []
        backbone = ranked_M[: budget.backbone].sort().values
        residual = ranked_M[budget.backbone :].sort().values
        petals = petals_of(
            stats.coactivation_MM, residual, budget.experts, config.balanced, config.seed
        )
        return backbone, petals

    def _router(self, site: Site, backbone: Tensor, petals: list[Tensor]) -> dict[str, Any]:
        """The router's part of a layer's plan."""
        config = self.config
        if config.variant == "random":
            seeded = torch.Generator().manual_seed(config.seed * 10_007 + site.index)
            directions_RD = torch.randn(len(petals), site.view.up_MD.shape[1], generator=seeded)
            return {"routing": "random", "router_RD": F.normalize(directions_RD, dim=1)}
        if config.router == "cosine":
            member_MR = memberships(backbone, petals, site.view.width)
            worth_M = neuron_weights(site.view) if config.weighted else None
            return {"router_RD": prototypes(site, member_MR, config.alpha, worth_M).cpu()}
        sees_backbone = config.router == "backbone"
        weight_RF = fit_router(site, backbone, petals, sees_backbone)
        return {"routing": "backbone" if sees_backbone else "linear", "router_RD": weight_RF}

    def analyse(self, stats: MoREStats) -> dict[str, Any]:
        """Channel coverage (Table 4) and the activation spectrum (Fig. 1)."""
        mass_M = stats.h_square_M.sqrt().sort(descending=True).values.cumsum(0)
        quantiles = torch.linspace(0, len(mass_M) - 1, 21).long()
        return {
            "tokens": stats.tokens,
            "never_activated": {
                str(share): 1 - seen.double().mean().item() for share, seen in stats.covered.items()
            },
            "activation_mass": (mass_M[quantiles] / mass_M[-1]).tolist(),
        }


def _without_backbone(
    sizes: list[LayerSize], layers: list[int], share: float, limit: int = 8
) -> dict[int, Split]:
    """Disjoint petals only (paper, App. E.3), k of r the closest to the active share."""
    _, experts, top_k = min(
        (abs(k / r - share), r, k) for r in range(2, limit + 1) for k in range(1, r)
    )
    splits = {}
    for i in layers:
        petal = sizes[i].width // experts
        splits[i] = Split(sizes[i].width - experts * petal, petal, experts, top_k)
    return splits
