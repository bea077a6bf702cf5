"""Lower top-k: one number of experts per token for all layers. Reads no text."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.arch.mixture import MoEArch
from moesaic.errors import MoesaicError
from moesaic.methods import figures
from moesaic.methods.base import Decision, Summary
from moesaic.methods.layered import LayerCase, LayerMethod
from moesaic.methods.mixtures import routed_layers, span, unskipped
from moesaic.methods.skip.config import TopKConfig
from moesaic.observation.job import Job
from moesaic.plans.base import LayerPlan
from moesaic.plans.cut import CutLayer
from moesaic.record import Figure, LayerRecord
from moesaic.types import JSON, Config


class FewerExperts(LayerMethod[TopKConfig, MoEArch, int]):
    """Method of ``skip --top-k``: a token runs fewer experts, the same number in every layer.

    Sizes are numbers of experts per token.
    """

    ratio = "active"
    words = "Trying fewer experts"
    needs = ()

    def find(self, config: Config) -> MoEArch:
        return unskipped(config)

    def sizes(self, job: Job[MoEArch]) -> dict[int, Sequence[int]]:
        arch, target = job.arch, self.config.top_k
        tops = {i: arch.mixture(job.layers[i]).top_k for i in routed_layers(job)}
        if arch.chosen is None:
            raise MoesaicError(
                f"A router of {arch.model_type} runs {span(tops.values())} experts a token, "
                "whatever its config says."
            )
        most = min(tops.values())
        if target > most:
            raise MoesaicError(
                f"top_k {target} is out of reach: a token runs "
                f"{span(tops.values())} experts now; from 1 to {most} works."
            )
        return {i: [target] for i in tops}

    def decide(
        self, case: LayerCase[MoEArch], sizes: Sequence[int]
    ) -> dict[int, tuple[LayerPlan, JSON]]:
        before = case.view.top_k
        return {
            k: (
                CutLayer(top_k=k),
                {"calls_per_token": k, "skipped": 1 - k / before, "calls_before": before},
            )
            for k in sizes
        }

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        was = span([analysis["calls_before"] for analysis in decision.analyses.values()])
        now = self.config.top_k
        counts = [now if layer.index in decision.analyses else None for layer in layers]
        return Summary(
            f"{now} of {was} experts a token",
            f"A token runs {now} experts instead of {was} in every layer that routes.",
            {"experts_per_token": counts},
        )

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        fewer = [layer for layer in layers if "experts_per_token" in layer.shape]
        columns: dict[tuple[str, str], list[float | None]] = {
            ("experts a token runs", ".0f"): [x.shape["experts_per_token"] for x in fewer]
        }
        section, title = "How many experts tokens run", "Experts a token, by layer."
        return figures.bars(section, title, "", fewer, columns)
