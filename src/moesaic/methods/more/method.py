"""MoRE as a method: observe sums, pick the backbone, cluster the rest, place the prototypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import Arch, DenseFFN
from moesaic.config import chosen_layers
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON
from moesaic.layers.base import LayerPlan
from moesaic.layers.carved import CarvedLayer
from moesaic.methods.base import Decision, DenseMethod, Outline, Told
from moesaic.methods.beyond.routers import fit_router, neuron_weights
from moesaic.methods.beyond.spread import losses, spread_splits
from moesaic.methods.budget import (
    LayerSize,
    Split,
    active_ratio,
    ffn_share,
    layer_sizes,
    solved_top_k,
    split_for_share,
    split_for_target,
)
from moesaic.methods.clustering import LIBRARIES
from moesaic.methods.more.config import MoREConfig
from moesaic.methods.more.formulas import (
    COVERAGE,
    MoREStats,
    activated,
    add_coactivation,
    frequency,
    importance,
    memberships,
    mirror,
    petals_of,
    prototypes,
)
from moesaic.methods.slim.choice import narrowest
from moesaic.methods.words import carved, number, some
from moesaic.nn.carved import saves_prompts
from moesaic.observation.job import Job
from moesaic.observation.shared import each_layer
from moesaic.observation.stream import Site
from moesaic.plan import Plan
from moesaic.record import LayerRecord
from moesaic.surgery import applied


class MoRE(DenseMethod[MoREConfig]):
    """Carves a dense model without training it."""

    kind = "split"

    @torch.no_grad()
    def run(self, job: Job[Arch]) -> Decision:
        """Observe each layer once, and let the method and its comparisons decide on it.

        Raises:
            MoesaicError: the request cannot be met.
        """
        config, compare = self.config, job.args.compare
        if config.propagate and compare:
            raise MoesaicError("propagate follows one result: nothing can be compared beside it.")
        variants = {"result": self}
        for name in compare:
            config.compared(name)
            variants[name] = MoRE(replace(config, variant=name))  # type: ignore[arg-type]
        sizes = layer_sizes(job.shape, job.arch)
        lost_M = self._losses(job, sizes) if config.spread == "sensitivity" else None
        budgets = {name: method.choose(sizes, lost_M) for name, method in variants.items()}
        wanted = budgets["result"]
        ratio = active_ratio(sizes, {i: split.active_width for i, split in wanted.items()})
        finished = job.finished(
            {
                "config": asdict(config),
                "compare": list(compare),
                "calibration": job.tokens.fingerprint,
            }
        )
        missing = {i: [name for name in variants if (name, i) not in finished] for i in wanted}

        def carved(site: Site[DenseFFN]) -> dict[str, tuple[LayerPlan, JSON]]:
            i, found = site.index, {}
            if missing[i]:
                stats = self.observe(site)
                analysis = self.analyse(stats)
                for name in missing[i]:
                    layer, more = variants[name].carve(stats, site, budgets[name][i])
                    found[name] = (layer, analysis | more)
            if config.propagate:
                layer, _ = found["result"] if "result" in found else finished["result", i]
                site.change = applied(site.layer, job.arch, layer)
            return found

        if any(missing.values()):
            layers = [i for i in wanted if missing[i] or config.propagate]
            follow = config.propagate
            done = each_layer(job, layers, job.arch.dense, carved, "Carving layers", follow=follow)
            for i, made in done:
                for name, (layer, analysis) in made.items():
                    finished.add(name, i, layer, analysis)
        plans = {
            name: Plan(
                config.name,
                job.base,
                {i: finished[name, i][0] for i in wanted},
                asdict(method.config),
                job.tokens.fingerprint,
            )
            for name, method in variants.items()
        }
        return Decision(
            plans.pop("result"),
            analyses={i: finished["result", i][1] for i in wanted},
            comparisons=plans,
            summary={"active": ratio} if config.share or config.multiple else {},
        )

    def outline(self, job: Job[Arch]) -> Outline:
        """Neurons in their old order, divided as they will be."""
        config = self.config
        sizes = layer_sizes(job.shape, job.arch)
        even = {i: torch.arange(s.width, 0.0, -1) for i, s in enumerate(sizes)}
        chosen = chosen_layers(config.layers, len(sizes))
        spread = {i: even[i] for i in chosen} if config.spread == "sensitivity" else None
        wanted = self.choose(sizes, spread)
        layers = {i: self._outlined(even[i], sizes[i].hidden, s) for i, s in wanted.items()}
        return Outline(
            Plan(config.name, job.base, layers, asdict(config)),
            exact=spread is None,
            passes=1.0 + (config.spread == "sensitivity") + 2 * config.propagate,
            work=sum(2.0 * s.width**2 for s in (sizes[i] for i in wanted))
            * (config.activation_ratio + 2 * config.refit),
            held=max(12 * sizes[i].width ** 2 for i in wanted),
            libraries=LIBRARIES * any(isinstance(x, CarvedLayer) for x in layers.values()),
        )

    def _outlined(self, worth_M: Tensor, hidden: int, budget: Split) -> LayerPlan:
        """A layer of a budget, its neurons as they come."""
        config, width = self.config, len(worth_M)
        bias = hidden if config.bias else 0
        if config.variant in ("static", "backbone"):
            kept = budget.active_width if config.variant == "static" else budget.backbone
            narrow = narrowest(worth_M, kept, counted=True)
            return replace(narrow, bias_D=torch.zeros(bias) if bias else None)
        petals = petal_sizes(width - budget.backbone, budget)
        routing, seen = "cosine", 0
        if config.variant == "random":
            routing = "random"
        elif config.router != "cosine":
            routing = "backbone" if config.router == "backbone" else "linear"
            seen = budget.backbone if config.router == "backbone" else 0
        return CarvedLayer(
            order_M=torch.arange(width),
            backbone=budget.backbone if petals else width,
            petals=petals,
            top_k=budget.top_k if petals else 0,
            routing=routing if petals else "cosine",
            router_RD=torch.zeros(len(petals), hidden + seen) if petals else None,
            bias_RD=torch.zeros(max(1, len(petals)), bias) if bias else None,
            gate={"threshold": 0.0} if petals and config.variable else {},
            prompts=self._prompts(petals, budget.top_k),
        )

    def tell(self, layers: list[LayerRecord], decision: Decision, active: float | None) -> Told:
        """Says how the FFNs were divided, or what they were cut down to."""
        nominal = decision.summary.get("active", self.config.active)
        title = carved(self.config, nominal if active is None else active)
        assert decision.plan is not None
        carved_layers = [layer for layer in layers if layer.index in decision.plan.layers]
        where = f"The feed-forward networks of {some(len(carved_layers), len(layers))}"
        told = f"{where} are {self._made(carved_layers)}."
        if self.config.multiple:
            told += (
                f" Widths are multiples of {self.config.multiple}: with them a token uses "
                f"{nominal:.4g} of the projections' parameters, where {self.config.active:g} was "
                "asked for."
            )
        return Told(title, told)

    def _made(self, layers: list[LayerRecord]) -> str:
        """The FFNs that these options make, in words."""
        variant = self.config.variant
        if variant == "static":
            return "cut down to their most important channels, the same for every token"
        if variant == "backbone":
            return "cut down to the backbone that MoRE finds for them; the petals are left out"
        counts = {layer.top_k for layer in layers if layer.experts}
        if not counts:
            return "left whole: at this active ratio nothing is taken from them"
        few = number(counts.pop()) if len(counts) == 1 else "a few"
        if self.config.variable:
            few = f"{few} in the mean"
        if variant == "naive":
            return f"divided into petals without a backbone; a router picks {few} for each token"
        shape = "rebuilt as a backbone that every token runs and petals, of which"
        if variant == "random":
            return f"{shape} each token runs {few}, chosen at random"
        return f"{shape} a router picks {few} for each token"

    def _losses(self, job: Job[Arch], sizes: list[LayerSize]) -> dict[int, Tensor]:
        """By layer, what leaving each neuron out would lose (M,)."""
        chosen = chosen_layers(self.config.layers, len(sizes))
        return dict(each_layer(job, chosen, job.arch.dense, losses, "Weighing layers"))

    def choose(
        self, sizes: list[LayerSize], losses_M: Mapping[int, Tensor] | None = None
    ) -> Mapping[int, Split]:
        """The layers to carve with backbone and petal sizes that meet the target in closed form.

        All variants get the same active width; they differ in what fills it.

        Args:
            sizes: all layers.
            losses_M: what leaving each neuron out loses, of the layers to carve, where the budget
                is spread by that.

        Raises:
            MoesaicError: the target is out of reach.
        """
        config = self.config
        layers = chosen_layers(config.layers, len(sizes))
        if config.share is not None:
            return split_for_share(sizes, layers, config.share, config.experts, config.top_k)
        active, experts, multiple = config.active, config.experts, config.multiple
        top_k = config.top_k or solved_top_k(sizes, layers, active, experts, multiple)
        if losses_M is not None:
            return spread_splits(sizes, losses_M, active, experts, top_k)
        if config.variant == "naive":
            return _without_backbone(sizes, layers, ffn_share(sizes, layers, active))
        return split_for_target(sizes, layers, active, experts, top_k, multiple)

    def observe(self, site: Site[DenseFFN]) -> MoREStats:
        """Sums over the site's tokens: Eqs. 4 to 7."""
        ffn = site.view
        width, device = ffn.width, ffn.up_MD.device
        stats = MoREStats(
            tokens=0,
            x_square_D=torch.zeros(ffn.up_MD.shape[1], dtype=torch.float64, device=device),
            h_square_M=torch.zeros(width, dtype=torch.float64, device=device),
            h_size_M=torch.zeros(width, dtype=torch.float64, device=device),
            frequency_M=torch.zeros(width, dtype=torch.int64, device=device),
            coactivation_MM=torch.zeros(width, width, device=device),
            covered={
                share: torch.zeros(width, dtype=torch.bool, device=device)
                for share in COVERAGE
                if int(share * width)
            },
        )
        worth_M = neuron_weights(ffn) if self.config.weighted else torch.ones((), device=device)
        for x_TD, h_TM in site.activations():
            ratio, most = self.config.activation_ratio, max(COVERAGE)
            weighed_TM = h_TM * worth_M
            channels_TK = activated(weighed_TM, ratio)
            largest_TK = channels_TK if ratio >= most else activated(weighed_TM, most)
            stats.tokens += len(x_TD)
            stats.x_square_D += x_TD.double().square().sum(0)
            stats.h_square_M += h_TM.double().square().sum(0)
            stats.h_size_M += h_TM.abs().sum(0, dtype=torch.float64)
            stats.frequency_M += frequency(channels_TK, width)
            add_coactivation(stats.coactivation_MM, channels_TK)
            for share, seen in stats.covered.items():
                seen[largest_TK[:, : int(share * width)].flatten()] = True
        mirror(stats.coactivation_MM)
        return stats

    def carve(
        self, stats: MoREStats, site: Site[DenseFFN], budget: Split
    ) -> tuple[LayerPlan, JSON]:
        """The layer's plan, refitted if that was asked for, and ``refit``: what that recovered."""
        config = self.config
        layer = self.decide(stats, site, budget)
        if not config.refit and not config.bias:
            return layer, {}
        refit, found = layer.refit(site, weights=config.refit, biases=config.bias)
        return refit, {"refit": found} if found else {}

    def decide(self, stats: MoREStats, site: Site[DenseFFN], budget: Split) -> LayerPlan:
        """Backbone by importance, petals by co-activation, and a router; or a narrower FFN."""
        if self.config.variant in ("static", "backbone"):
            width = budget.active_width if self.config.variant == "static" else budget.backbone
            return narrowest(self._importance(stats, site), width, counted=True)
        backbone, petals = self.structure(stats, site, budget)
        routing, router_RF = self._router(site, backbone, petals) if petals else ("cosine", None)
        widths = tuple(len(p) for p in petals)
        layer = CarvedLayer(
            order_M=torch.cat([backbone, *petals]).cpu(),
            backbone=len(backbone),
            petals=widths,
            top_k=budget.top_k if petals else 0,
            routing=routing,
            router_RD=router_RF,
            prompts=self._prompts(widths, budget.top_k),
        )
        if not petals or not self.config.variable:
            return layer
        return replace(layer, gate={"threshold": layer.threshold(site)})

    def _prompts(self, petals: Sequence[int], top_k: int) -> str:
        """Whether prompts run their petals, or every neuron."""
        config = self.config
        if config.prompts != "auto":
            return config.prompts if petals else "petals"
        fine = petals and not saves_prompts(petals, top_k)
        return "dense" if fine and config.router != "cosine" and not config.bias else "petals"

    def structure(
        self, stats: MoREStats, site: Site[DenseFFN], budget: Split
    ) -> tuple[Tensor, list[Tensor]]:
        """The neurons of the backbone, and those of each petal, by number in rising order."""
        config = self.config
        ranked_M = self._importance(stats, site).argsort(descending=True, stable=True)
        if budget.petal == 0:  # a layer that nothing is taken from
            return ranked_M.sort().values, []
        backbone = ranked_M[: budget.backbone].sort().values
        residual = ranked_M[budget.backbone :].sort().values
        petals = petals_of(
            stats.coactivation_MM, residual, budget.experts, config.balanced, config.seed
        )
        return backbone, petals

    def _importance(self, stats: MoREStats, site: Site[DenseFFN]) -> Tensor:
        """What each neuron matters (M,)."""
        tokens = stats.tokens
        return importance(site.view, stats.x_square_D / tokens, stats.h_square_M / tokens)

    def _router(
        self, site: Site[DenseFFN], backbone: Tensor, petals: list[Tensor]
    ) -> tuple[str, Tensor]:
        """The routing function's name, and the router's weight: (R, D), or (R, D + B)."""
        config = self.config
        if config.variant == "random":
            seeded = torch.Generator().manual_seed(config.seed * 10_007 + site.index)
            directions_RD = torch.randn(len(petals), site.view.up_MD.shape[1], generator=seeded)
            return "random", F.normalize(directions_RD, dim=1)
        if config.router == "cosine":
            member_MR = memberships(backbone, petals, site.view.width)
            worth_M = neuron_weights(site.view) if config.weighted else None
            return "cosine", prototypes(site, member_MR, config.alpha, worth_M).cpu()
        sees_backbone = config.router == "backbone"
        weight_RF = fit_router(site, backbone, petals, sees_backbone)
        return "backbone" if sees_backbone else "linear", weight_RF

    def analyse(self, stats: MoREStats) -> JSON:
        """Channel coverage (Table 4) and the activation spectrum (Fig. 1), for the record.

        Returns:
            ``tokens``; ``never_activated``: by share of the channels, the part of them that no
            token activated; ``activation_mass``: 21 points of the cumulative curve of sum |h|.
        """
        mass_M = stats.h_size_M.sort(descending=True).values.cumsum(0)
        quantiles = torch.linspace(0, len(mass_M) - 1, 21).long()
        return {
            "tokens": stats.tokens,
            "never_activated": {
                str(share): 1 - seen.double().mean().item() for share, seen in stats.covered.items()
            },
            "activation_mass": (mass_M[quantiles] / mass_M[-1]).tolist(),
        }


def petal_sizes(neurons: int, budget: Split) -> tuple[int, ...]:
    """The sizes of balanced petals, some of a neuron more where they do not divide.

    >>> petal_sizes(10, Split(6, 2, 4, 1)), petal_sizes(0, Split(16, 0, 4, 1))
    ((3, 3, 2, 2), ())
    """
    if not budget.petal:
        return ()
    each, more = divmod(neurons, budget.experts)
    return tuple(each + (i < more) for i in range(budget.experts))


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
