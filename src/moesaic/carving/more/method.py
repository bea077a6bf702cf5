"""MoRE's run: observe sums, choose the backbone, cluster other neurons, compute prototypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import Arch, DenseFFN
from moesaic.carving.budget import (
    LayerSize,
    Split,
    active_ratio,
    ffn_share,
    layer_sizes,
    solved_top_k,
    split_for_share,
    split_for_target,
)
from moesaic.carving.carved_layer import NARROW, CarvedLayer
from moesaic.carving.more.config import MoREConfig
from moesaic.carving.more.formulas import (
    COVERAGE,
    activated,
    add_coactivation,
    fit_router,
    importance,
    memberships,
    mirror,
    petals_of,
    prototypes,
)
from moesaic.config import chosen_layers
from moesaic.methods import figures
from moesaic.methods.base import Decision, DenseMethod, Summary
from moesaic.methods.figures import carved_clause, layers_text, number
from moesaic.methods.layered import Decided, LayerCase, LayerMethod
from moesaic.modules.running import LayerTokens
from moesaic.observation.job import Job
from moesaic.observation.stats import Tally
from moesaic.plans.base import LayerPlan
from moesaic.plans.cut import CutLayer
from moesaic.record import Figure, LayerRecord, Row
from moesaic.types import JSON

OWN = ("x_square_D", "h_square_M", "h_size_M", "coactivation_MM", "covered_CM")
"""MoRE's own statistics over tokens: sums of x_i^2, h_j^2 and |h_j|, float64; number of tokens that
activate both channels, float32; channels ever among a token's largest, by share in COVERAGE."""


class MoRE(DenseMethod[MoREConfig], LayerMethod[MoREConfig, Arch, Split]):
    """Method ``more`` of ``carve``: divides FFNs into a backbone and petals, without training."""

    ratio = "projections"
    words = "Carving layers"
    needs = ("tokens", "calls_E", *OWN)

    def sizes(self, job: Job[Arch]) -> dict[int, list[Split]]:
        return {i: [split] for i, split in self.choose(layer_sizes(job.skeleton, job.arch)).items()}

    def tag(self, size: Split) -> str:
        return f"{size.backbone}-{size.experts}x{size.petal}"

    def decide(self, case: LayerCase[Arch], sizes: Sequence[Split]) -> Decided[Split]:
        (split,) = sizes
        if case.site is None or case.stats is None:
            hidden_size, width = case.view.weights_of(0)[-1].shape
            return {split: (self._outlined(width, hidden_size, split), {})}
        return {split: (self.carve_layer(case.stats, case.site, split), self.analyse(case.stats))}

    def summary(self, job: Job[Arch], losses: Mapping[int, Mapping[Split, float]]) -> JSON:
        if not self.config.share and not self.config.multiple:
            return {}
        widths = {i: next(iter(of_layer)).active_width for i, of_layer in losses.items()}
        return {"active": active_ratio(layer_sizes(job.skeleton, job.arch), widths)}

    def _outlined(self, width: int, hidden: int, budget: Split) -> LayerPlan:
        """Return a layer's plan of the final size, with its neurons in their old order."""
        if self.config.variant in ("static", "backbone"):
            return self._narrowed(torch.arange(width, 0.0, -1), budget)
        neurons = torch.arange(width)
        if not budget.petal:
            return self._carved(neurons, [], budget.top_k, None)
        backbone, rest = neurons.split([budget.backbone, width - budget.backbone])
        petals = [*rest.tensor_split(budget.experts)]
        return self._carved(backbone, petals, budget.top_k, torch.zeros(len(petals), hidden))

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        return [*super().figures(layers, decision), *_activated(layers)]

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        """Describe how the FFNs were divided, or what they were cut down to."""
        nominal = decision.summary.get("active", self.config.active)
        title = carved_clause(self.config, nominal if active is None else active)
        assert decision.plan is not None
        carved_layers = [layer for layer in layers if layer.index in decision.plan.layers]
        where = f"The feed-forward networks of {layers_text(len(carved_layers), len(layers))}"
        text = f"{where} are {self._described(carved_layers)}."
        if self.config.multiple:
            text += (
                f" Widths are multiples of {self.config.multiple}: with them a token uses "
                f"{nominal:.4g} of the projections' parameters, where {self.config.active:g} was "
                "asked for."
            )
        return Summary(title, text)

    def _described(self, layers: list[LayerRecord]) -> str:
        """Return what these options make of FFNs, in words."""
        variant = self.config.variant
        if variant == "static":
            return "cut down to their most important channels, the same for every token"
        if variant == "backbone":
            return "cut down to the backbone that MoRE finds for them; the petals are left out"
        counts = {layer.top_k for layer in layers if layer.experts}
        if not counts:
            return "left whole: at this active ratio nothing is taken from them"
        few = number(counts.pop()) if len(counts) == 1 else "a few"
        if variant == "naive":
            return f"divided into petals without a backbone; a router picks {few} for each token"
        shape = "rebuilt as a backbone that every token runs and petals, of which"
        if variant == "random":
            return f"{shape} each token runs {few}, chosen at random"
        return f"{shape} a router picks {few} for each token"

    def choose(self, sizes: list[LayerSize]) -> Mapping[int, Split]:
        """Return the layers to carve, with backbone and petal sizes that meet the target in closed
        form.

        All variants get the same active width; they differ in what fills it.

        Raises:
            MoesaicError: the target is out of reach.
        """
        config = self.config
        layers = chosen_layers(config.layers, len(sizes))
        if config.share is not None:
            return split_for_share(sizes, layers, config.share, config.experts, config.top_k)
        active, experts, multiple = config.active, config.experts, config.multiple
        if config.variant == "naive":
            return _without_backbone(sizes, layers, ffn_share(sizes, layers, active))
        if not config.top_k:
            experts = min(experts, min(sizes[i].width for i in layers) // 2)
        top_k = config.top_k or solved_top_k(sizes, layers, active, experts, multiple)
        return split_for_target(sizes, layers, active, experts, top_k, multiple)

    def observe(self, site: LayerTokens[DenseFFN], tally: Tally) -> None:
        """Sum over the site's tokens, which are all: Eqs. 4 to 7."""
        ffn = site.view
        width, device = ffn.width, ffn.up_MD.device
        x_square_D = torch.zeros(ffn.up_MD.shape[1], dtype=torch.float64, device=device)
        h_square_M = torch.zeros(width, dtype=torch.float64, device=device)
        h_size_M = torch.zeros_like(h_square_M)
        coactivation_MM = torch.zeros(width, width, device=device)
        shares = _shares(width)
        covered_CM = torch.zeros(len(shares), width, dtype=torch.bool, device=device)
        for x_TD, h_TM in site.activations():
            ratio, most = self.config.activation_ratio, max(COVERAGE)
            channels_TK = activated(h_TM, ratio)
            largest_TK = channels_TK if ratio >= most else activated(h_TM, most)
            x_square_D += x_TD.double().square().sum(0)
            h_square_M += h_TM.double().square().sum(0)
            h_size_M += h_TM.abs().sum(0, dtype=torch.float64)
            add_coactivation(coactivation_MM, channels_TK)
            for share, covered_M in zip(shares, covered_CM, strict=True):
                covered_M[largest_TK[:, : int(share * width)].flatten()] = True
        sums = (x_square_D, h_square_M, h_size_M, mirror(coactivation_MM), covered_CM)
        for name, tensor in zip(OWN, sums, strict=True):
            tally.keep(name, tensor)

    def carve_layer(
        self, stats: Mapping[str, Tensor], site: LayerTokens[DenseFFN], budget: Split
    ) -> LayerPlan:
        """Return a plan: backbone by importance, petals by co-activation, router; or a narrower
        FFN."""
        config, tokens = self.config, int(stats["calls_E"])
        score_M = importance(site.view, stats["x_square_D"] / tokens, stats["h_square_M"] / tokens)
        if config.variant in ("static", "backbone"):
            return self._narrowed(score_M, budget)
        ranked_M = score_M.argsort(descending=True, stable=True)
        if not budget.petal:  # a layer that keeps all neurons
            return self._carved(ranked_M.sort().values, [], budget.top_k, None)
        backbone = ranked_M[: budget.backbone].sort().values
        residual = ranked_M[budget.backbone :].sort().values
        petals = petals_of(
            stats["coactivation_MM"], residual, budget.experts, config.balanced, config.seed
        )
        return self._carved(backbone, petals, budget.top_k, self._router(site, backbone, petals))

    def _narrowed(self, score_M: Tensor, budget: Split) -> LayerPlan:
        """Return a plan that keeps the highest scores, for variants that do not route."""
        width = budget.active_width if self.config.variant == "static" else budget.backbone
        kept_W = score_M.argsort(descending=True, stable=True)[:width].sort().values.cpu()
        return CutLayer(None, kept_W[None], len(score_M), counted=True)

    def _carved(
        self, backbone: Tensor, petals: Sequence[Tensor], top_k: int, router_RD: Tensor | None
    ) -> CarvedLayer:
        """Return a plan with these neurons; backbone and petals are indices in rising order."""
        config, widths = self.config, tuple(len(petal) for petal in petals)
        fitted = "linear" if config.router == "ridge" else "cosine"
        prompts = config.prompts
        if prompts == "auto":
            narrow = sum(widths) < NARROW * len(widths)
            prompts = "dense" if narrow and config.router == "ridge" else "petals"
        return CarvedLayer(
            order_M=torch.cat([backbone, *petals]).cpu(),
            backbone=len(backbone),
            petals=widths,
            top_k=top_k if petals else 0,
            routing=("random" if config.variant == "random" else fitted) if petals else "cosine",
            router_RD=router_RD,
            prompts=prompts if petals else "petals",
        )

    def _router(
        self, site: LayerTokens[DenseFFN], backbone: Tensor, petals: list[Tensor]
    ) -> Tensor:
        """Return the router's weight (R, D)."""
        config = self.config
        if config.variant == "random":
            seeded = torch.Generator().manual_seed(config.seed * 10_007 + site.index)
            directions_RD = torch.randn(len(petals), site.view.up_MD.shape[1], generator=seeded)
            return F.normalize(directions_RD, dim=1)
        if config.router == "ridge":
            return fit_router(site, petals)
        member_MR = memberships(backbone, petals, site.view.width)
        return prototypes(site, member_MR, config.alpha).cpu()

    def analyse(self, stats: Mapping[str, Tensor]) -> JSON:
        """Return channel coverage (Table 4) and the activation spectrum (Fig. 1), for the record.

        Returns:
            ``tokens``; ``never_activated``: by share in COVERAGE, the part of the channels that no
            token activated; ``activation_mass``: 21 points of the cumulative curve of sum |h|.
        """
        mass_M = stats["h_size_M"].sort(descending=True).values.cumsum(0)
        quantiles = torch.linspace(0, len(mass_M) - 1, 21).long()
        return {
            "tokens": int(stats["calls_E"]),
            "never_activated": {
                str(share): 1 - covered_M.double().mean().item()
                for share, covered_M in zip(_shares(len(mass_M)), stats["covered_CM"], strict=True)
            },
            "activation_mass": (mass_M[quantiles] / mass_M[-1]).tolist(),
        }


def _shares(width: int) -> list[float]:
    """Return the shares in COVERAGE that are at least one channel."""
    return [share for share in COVERAGE if int(share * width)]


def _without_backbone(sizes: list[LayerSize], layers: list[int], share: float) -> dict[int, Split]:
    """Return disjoint petals only (paper, App. E.3), with k of r, at most 8, closest to the active
    share."""
    _, experts, top_k = min((abs(k / r - share), r, k) for r in range(2, 9) for k in range(1, r))
    splits = {}
    for i in layers:
        petal = sizes[i].width // experts
        splits[i] = Split(sizes[i].width - experts * petal, petal, experts, top_k)
    return splits


def _activated(layers: Sequence[LayerRecord]) -> list[Figure]:
    """Draw how many channels no token activated, and the share of activation of the strongest."""
    section, analyses = "Layer by layer", {layer.index: layer.analysis for layer in layers}
    never = {i: x.get("never_activated") or {} for i, x in analyses.items()}
    curves = [
        figures.series(
            f"top {100 * float(ratio):g}\u00a0%",
            [(i, 100 * x[ratio]) for i, x in never.items() if x.get(ratio) is not None],
        )
        for ratio in sorted({ratio for x in never.values() for ratio in x}, key=float)
    ]
    caption = (
        "Percent of a layer’s channels that were not among a token’s strongest for any "
        "calibration token."
    )
    title, form = "Channels never activated.", ".1f"
    drawn = figures.lines(section, title, curves, "percent", form=form, log=False, caption=caption)
    rows = [
        Row(str(i), tuple(map(figures.finite, x["activation_mass"][1:])), 1.0)
        for i, x in analyses.items()
        if len(x.get("activation_mass") or ()) > 1
    ]
    count = max((len(row.values) for row in rows), default=0)
    columns = [f"{100 * k / count:.0f}\u00a0%" for k in range(1, count + 1)]
    spectrum = figures.heat(
        section,
        "Activation spectrum.",
        "The share of a layer’s activation that its strongest channels have, summed up.",
        rows,
        columns,
        column="strongest channels",
        form=".0%",
    )
    return [*drawn, *spectrum]
