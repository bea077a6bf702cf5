"""Skipping: a token runs fewer experts.

Dynamic expert skipping (Lu et al., ACL 2024, Sec. 3.3 and App. A.2): a token skips experts that
weigh little for it.

Top-2 (Sec. 3.3): the second expert is skipped when w_2 < beta w_1, where beta is the median of
w_2 / w_1 over the calibration tokens of the layer. Top-k (App. A.2): the first i experts are kept,
i being the smallest number for which the other weights sum to at most beta times the sum of all k.

Deviations from the paper:

- App. A.2 gives no beta; it is the median of w_k / sum w, which for k = 2 marks the same tokens.
- Both rules compare strictly, so that at k = 2 they are one rule: beta = 0 never skips.
- Survivors take over the weight of the skipped in proportion. A router whose weights sum to one
  keeps that; others keep their own sum.
- ``quantile`` moves beta: 0.5 is the median. ``calls`` asks for a mean number of experts a token
  instead, to compare with a lower num_experts_per_tok. ``betas`` are taken as they are; the
  calibration text then only shows how much they skip.

Lower top-k (:class:`FewerExperts`): one number of experts per token for all layers. Reads no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moesaic.arch.mixture import MoEArch
from moesaic.errors import MoesaicError
from moesaic.methods import figures
from moesaic.methods.base import Decision, Summary, unskipped
from moesaic.methods.figures import span
from moesaic.methods.layered import Decided, LayerCase, LayerMethod
from moesaic.methods.skip.config import SkipConfig, TopKConfig
from moesaic.modules.blocks import survivors
from moesaic.observation.job import Job
from moesaic.plans.cut import CutLayer
from moesaic.record import Figure, LayerRecord
from moesaic.types import JSON, Config


def ratios(weights_TK: Tensor, rule: str) -> Tensor:
    """Return the ratios of which beta is a quantile (T,): w_2 / w_1, or w_k / sum w.

    Args:
        weights_TK: combine weights in falling order.
        rule: ``top2`` or ``tail``.

    >>> ratios(torch.tensor([[0.6, 0.3]]), "top2"), ratios(torch.tensor([[0.6, 0.3]]), "tail")
    (tensor([0.5000]), tensor([0.3333]))
    """
    if rule == "top2":
        return weights_TK[:, 1] / weights_TK[:, 0]
    return weights_TK[:, -1] / weights_TK.sum(-1)


def mean_calls(weights_TK: Tensor, beta: float, rule: str) -> float:
    """Return the mean number of experts that a token runs at this beta."""
    return survivors(weights_TK, beta, rule).sum().item() / max(1, len(weights_TK))


def _beta_for_calls(weights_TK: Tensor, calls: float, rule: str) -> float:
    """Return the beta at which a token runs ``calls`` experts on average, by bisection.

    >>> w = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    >>> 1 / 9 < _beta_for_calls(w, 1.5, "top2") < 2 / 3
    True
    """
    low, high = 0.0, 2.0  # above 1 only the first expert is kept
    for _ in range(60):
        middle = (low + high) / 2
        if mean_calls(weights_TK, middle, rule) > calls:
            low = middle
        else:
            high = middle
    return high


def quantile(values_T: Tensor, q: float) -> float:
    """Return a quantile, interpolated linearly; for any number of values.

    >>> quantile(torch.tensor([3.0, 1.0, 2.0]), 0.5)
    2.0
    """
    ranked_T = values_T.double().sort().values
    place = q * (len(ranked_T) - 1)
    low = int(place)
    high = min(low + 1, len(ranked_T) - 1)
    return torch.lerp(ranked_T[low], ranked_T[high], place - low).item()


class Skipper(LayerMethod[SkipConfig, MoEArch, float | None]):
    """Method of ``skip``: routers skip, token by token, experts that weigh little.

    Beta is calibrated on the given model: prune first, then skip. A size is a requested beta, or
    None for one that is calibrated.
    """

    ratio = "active"
    words = "Calibrating layers"
    needs = ("logits_TX", "bias_E")

    def find(self, config: Config) -> MoEArch:
        return unskipped(config)

    def sizes(self, job: Job[MoEArch]) -> dict[int, list[float | None]]:
        layers = job.arch.moe_layers(job.skeleton)
        betas = self.config.betas
        if len(betas) == 1:
            betas = betas * len(layers)
        if betas and len(betas) != len(layers):
            raise MoesaicError(
                f"betas: {len(betas)} numbers for {len(layers)} layers that route; give one for "
                "each, or one for all."
            )
        for i in layers:
            self.rule(job.arch.mixture(job.layers[i]).top_k)
        if job.arch.parts.inward:
            raise MoesaicError(
                f"A router of {job.arch.model_type} scales what experts are given: the kept ones "
                "cannot take over the weight of others. skip --top-k N works."
            )
        return {i: [beta] for i, beta in zip(layers, betas or [None] * len(layers), strict=True)}

    def decide(
        self, case: LayerCase[MoEArch], sizes: Sequence[float | None]
    ) -> Decided[float | None]:
        top_k = case.view.top_k
        if case.stats is None:
            return {beta: (CutLayer(beta=0.5, rule=self.rule(top_k)), {}) for beta in sizes}
        w_TE = case.routing.weights(case.stats["logits_TX"])
        weights_TK = w_TE.topk(top_k, dim=-1).values.double()
        return {beta: self.calibrate(weights_TK, beta) for beta in sizes}

    def calibrate(self, weights_TK: Tensor, fixed: float | None = None) -> tuple[CutLayer, JSON]:
        """Return a layer's plan with its beta, and how much it skips of the calibration tokens.

        Args:
            weights_TK: combine weights of the experts that tokens run, in falling order.
            fixed: the requested beta; None to calibrate it.

        Returns:
            the layer's plan, and ``calls_per_token`` and ``skipped``, the share of calls.
        """
        config, top_k = self.config, weights_TK.shape[1]
        rule = self.rule(top_k)
        if fixed is not None:
            beta = fixed
        elif config.calls is not None:
            beta = _beta_for_calls(weights_TK, config.calls, rule)
        else:
            beta = quantile(ratios(weights_TK, rule), config.quantile)
        calls = mean_calls(weights_TK, beta, rule)
        analysis = {"calls_per_token": calls, "skipped": 1 - calls / top_k}
        return CutLayer(beta=beta, rule=rule), analysis

    def rule(self, top_k: int) -> str:
        """Return the rule of a layer with this top-k: ``top2`` or ``tail``.

        Raises:
            MoesaicError: the request cannot be met in such a layer.
        """
        config = self.config
        if top_k < 2:
            raise MoesaicError("A token runs one expert already: there is nothing to skip.")
        kind = ("top2" if top_k == 2 else "tail") if config.rule == "auto" else config.rule
        if kind == "top2" and top_k != 2:
            raise MoesaicError(f"rule 'top2' is for two experts a token; here there are {top_k}.")
        if config.calls is not None and config.calls > top_k:
            raise MoesaicError(f"calls {config.calls:g}: a token runs {top_k} experts now.")
        return kind

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        shares = [round(100 * analysis["skipped"]) for analysis in decision.analyses.values()]
        skipped = f"{span(shares)}\u00a0%"
        title = f"{skipped} of expert calls skipped with {self.config.label}"
        text = (
            "The routers leave out experts that weigh little, token by token, by the rule of "
            f"{self.config.label}: {skipped} of expert calls on the calibration text."
        )
        return Summary(title, text, {"beta": [layer.shape.get("beta") for layer in layers]})

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        skip = [layer for layer in layers if "beta" in layer.shape]
        columns = {
            ("calls skipped", ".1%"): [layer.analysis.get("skipped") for layer in skip],
            ("beta", ".3f"): [layer.shape["beta"] for layer in skip],
            ("experts a token runs", ".2f"): [x.analysis.get("calls_per_token") for x in skip],
        }
        title, caption = "Skipping by layer.", "On the calibration text."
        return figures.bars("What is skipped", title, caption, skip, columns)


# --- one number of experts for all layers --------------------------------------------------------


class FewerExperts(LayerMethod[TopKConfig, MoEArch, int]):
    """Method of ``skip --top-k``: a token runs fewer experts, the same number in every layer.

    Sizes are numbers of experts per token.
    """

    ratio = "active"
    words = "Setting experts per token"
    needs = ()

    def find(self, config: Config) -> MoEArch:
        return unskipped(config)

    def sizes(self, job: Job[MoEArch]) -> dict[int, Sequence[int]]:
        arch, target = job.arch, self.config.top_k
        tops = {i: arch.mixture(job.layers[i]).top_k for i in arch.moe_layers(job.skeleton)}
        if arch.chosen is None:
            raise MoesaicError(
                f"A router of {arch.model_type} runs {span(tops.values())} experts a token, "
                "whatever its config holds."
            )
        most = min(tops.values())
        if target > most:
            raise MoesaicError(
                f"top_k {target} is out of reach: a token runs "
                f"{span(tops.values())} experts now; from 1 to {most} works."
            )
        return {i: [target] for i in tops}

    def resolve_defaults(self, job: Job[MoEArch]) -> Iterator[str]:
        yield from super().resolve_defaults(job)
        if all(job.arch.mixture(job.layers[i]).top_k == k for i, (k,) in self.sizes(job).items()):
            yield "A token runs as many experts as before."

    def decide(self, case: LayerCase[MoEArch], sizes: Sequence[int]) -> Decided[int]:
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
