"""Fewer experts a token: one number for all layers, or for each layer its own.

One number for all is a field of the config, and no method of a paper. Each layer's own follows
LExI (Chitty-Venkata et al., 2025):

- Stage 1 (Alg. 1): Delta_j(k) = ||f_j(x; k) - f_j(x; K)||_F, how far layer j's output moves when a
  token runs k experts instead of K.
- Stage 2 (Alg. 2): k_j for all layers j of least sum of Delta_j(k_j), sum k_j being the budget.

Where we depart from the paper:

- x are the calibration tokens that reach the layer; LExI has no data and draws x from a normal
  distribution.
- Delta is a share of the routed experts' own output, ||f_j(x; K)||_F, and is squared: outputs of
  layers differ in size, and errors that know nothing of each other add up in their squares.
- The sum is minimised exactly, over all layers and numbers, instead of by an evolutionary search.
- Without a budget every layer gets the fewest experts with Delta within ``layer_loss``.

No expert is run again for each k: with G the Gram matrix of a token's expert outputs and w(k) its
combine weights, Delta^2 is the sum over tokens of (w(k) - w(K))^T G (w(k) - w(K)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moesaic.arch.mixture import MoEArch
from moesaic.arch.routing import RoutingFunction
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Config
from moesaic.layers.base import LayerPlan
from moesaic.layers.fewer import FewerLayer
from moesaic.methods import figures
from moesaic.methods.base import Decision, Summary
from moesaic.methods.layered import Case, LayerMethod
from moesaic.methods.lexi.config import LExIConfig
from moesaic.methods.mixtures import routed_layers, span, unskipped
from moesaic.methods.naee.reconstruction import ELEMENTS, output_norm, squared_errors
from moesaic.methods.naee.subsets import allocate
from moesaic.observation.expert_stats import ExpertStats, routing_of, unpacked
from moesaic.observation.job import Job
from moesaic.record import Figure, LayerRecord


def losses(stats: ExpertStats, routing: RoutingFunction, top_k: int) -> list[float]:
    """How far a layer's output is off if a token runs 1, 2, ... of the experts that it does.

    Args:
        stats: of the layer, Gram matrices among them.
        routing: its routing function.
        top_k: experts that a token runs.

    Returns:
        ||f(x; k) - f(x; K)|| / ||f(x; K)|| for k from 1 to K; the last is 0.
    """
    fewer = [routing.of_fewer(k) for k in range(1, top_k)]
    logits_SX = stats.logits_TX[stats.sampled_T]
    squared_K = torch.zeros(top_k, dtype=torch.float64)
    for block in torch.arange(len(logits_SX)).split(max(1, ELEMENTS // stats.weighed**2)):
        w_SA = routing.every_weight(logits_SX[block]).double()
        gram_SAA = unpacked(stats.gram_SP[block], stats.weighed)
        for k, few in enumerate(fewer, 1):
            v_SA = few.every_weight(logits_SX[block]).double()
            error_S1 = squared_errors((v_SA - w_SA).unsqueeze(1), gram_SAA)
            squared_K[k - 1] += error_S1.sum()
    size = output_norm(stats, routing)
    return [x**0.5 / size if size else 0.0 for x in squared_K.clamp(min=0).tolist()]


class FewerExperts(LayerMethod[LExIConfig, MoEArch, int]):
    """Lets a token run fewer experts, as many in every layer or as each layer needs.

    Sizes are numbers of experts a token.
    """

    ratio = "active"
    words = "Trying fewer experts"

    def find(self, config: Config) -> MoEArch:
        return unskipped(config)

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.config.uniform else ("router", "gram")

    @property
    def gram_bytes(self) -> int:
        return 0 if self.config.uniform else self.config.gram_mb << 20

    def sizes(self, job: Job[MoEArch]) -> dict[int, Sequence[int]]:
        arch, target = job.arch, self.config.top_k
        tops = {i: arch.mixture(job.layers[i]).top_k for i in routed_layers(job)}
        if arch.chosen is None:
            raise MoesaicError(
                f"A router of {arch.model_type} runs {span(tops.values())} experts a token, "
                "whatever its config says."
            )
        least = min(tops.values())
        most = least if self.config.uniform else sum(tops.values()) / len(tops)
        if target is not None and target > most:
            raise MoesaicError(
                f"top_k {target:g} is out of reach: a token runs "
                f"{span(tops.values())} experts now; from 1 to {most:g} works."
            )
        if target is not None and self.config.uniform:
            return {i: [int(target)] for i in tops}
        return {i: range(1, top_k + 1) for i, top_k in tops.items()}

    def decide(
        self, case: Case[MoEArch], sizes: Sequence[int]
    ) -> dict[int, tuple[LayerPlan, JSON]]:
        top_k = case.view.top_k
        analysis: JSON = {}
        if case.stats is not None and case.stats.experts is not None:
            stats = case.stats.experts
            analysis["losses"] = losses(stats, routing_of(case.job, case.index, stats), top_k)
        off = analysis.get("losses", [1 - k / top_k for k in range(1, top_k + 1)])
        lost = {k: {} if self.config.uniform else {"relative_loss": off[k - 1]} for k in sizes}
        return {
            k: (
                FewerLayer(k, top_k),
                {**analysis, **lost[k], "calls_per_token": k, "skipped": 1 - k / top_k},
            )
            for k in sizes
        }

    def allocate(self, losses: Mapping[int, Mapping[int, float]]) -> Mapping[int, int]:
        """Each layer's number of experts a token: the mean that is asked for, or the loss.

        >>> losses = {0: {1: 0.9, 2: 0.0}, 1: {1: 0.2, 2: 0.0}}
        >>> dict(FewerExperts(LExIConfig(top_k=1.5)).allocate(losses))
        {0: 2, 1: 1}
        >>> dict(FewerExperts(LExIConfig(layer_loss=0.2)).allocate(losses))
        {0: 2, 1: 1}
        """
        config, mean = self.config, self.config.top_k
        if config.uniform:
            return super().allocate(losses)
        if mean is not None:
            return allocate(losses, mean * len(losses))
        return {
            i: next(k for k, loss in of_layer.items() if loss <= config.layer_loss)
            for i, of_layer in losses.items()
        }

    def tell(self, layers: list[LayerRecord], decision: Decision, active: float | None) -> Summary:
        counts = {i: analysis["calls_per_token"] for i, analysis in decision.analyses.items()}
        before = decision.plan.layers if decision.plan is not None else {}
        was = span([layer.before for layer in before.values() if isinstance(layer, FewerLayer)])
        numbers, mean = span(counts.values()), sum(counts.values()) / len(counts)
        output = {"experts_per_token": [counts.get(layer.index) for layer in layers]}
        if self.config.uniform:
            title = f"{numbers} of {was} experts a token"
            return Summary(
                title,
                f"A token runs {numbers} experts instead of {was} in every layer that routes.",
                output,
            )
        title = (
            f"{mean:.3g} of {was} experts a token in the mean, by layer after {self.config.label}"
        )
        words = (
            f"A token runs {numbers} experts instead of {was}, {mean:.3g} in the mean of the "
            "layers that route. Each layer’s number was chosen by how far its output moves, on the "
            "calibration text."
        )
        return Summary(title, words, output)

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        fewer = [layer for layer in layers if "experts_per_token" in layer.shape]
        moved = [layer.analysis.get("relative_loss") for layer in fewer]
        columns = {
            ("experts a token runs", ".0f"): [x.shape["experts_per_token"] for x in fewer],
            ("its output moves by", ".1%"): moved,
        }
        caption = "Moves: the change’s size as a share of the output’s own." if any(moved) else ""
        section, title = "How many experts tokens run", "Experts a token, by layer."
        return figures.bars(section, title, caption, fewer, columns)
