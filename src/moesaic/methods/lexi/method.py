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
from dataclasses import asdict

import torch

from moesaic.arch.mixture import MoEArch
from moesaic.arch.routing import RoutingFunction
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Config
from moesaic.layers.fewer import FewerLayer
from moesaic.methods import figures
from moesaic.methods.base import Decision, Method, Outline, Told
from moesaic.methods.lexi.config import LExIConfig
from moesaic.methods.mixtures import span, unskipped
from moesaic.methods.naee.observed import from_file, observed, routing_of
from moesaic.methods.naee.reconstruction import ELEMENTS, output_norm, squared_errors
from moesaic.methods.naee.search import allocate
from moesaic.observation.experts import ExpertStats, gram_room, unpacked
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.record import Figure, LayerRecord

SEEN = "losses"
"""The name under which a layer's losses are kept."""


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
    logits_SE = stats.logits_TE[stats.sampled_T]
    squared_K = torch.zeros(top_k, dtype=torch.float64)
    for block in torch.arange(len(logits_SE)).split(max(1, ELEMENTS // stats.experts**2)):
        w_SE = routing.weights(logits_SE[block]).double()
        gram_SEE = unpacked(stats.gram_SP[block], stats.experts)
        for k, few in enumerate(fewer, 1):
            v_SE = few.weights(logits_SE[block]).double()
            error_S1 = squared_errors((v_SE - w_SE).unsqueeze(1), gram_SEE)
            squared_K[k - 1] += error_S1.sum()
    size = output_norm(stats, routing)
    return [x**0.5 / size if size else 0.0 for x in squared_K.clamp(min=0).tolist()]


def allotted(found: Mapping[int, Sequence[float]], config: LExIConfig) -> dict[int, int]:
    """Each layer's number of experts a token.

    Args:
        found: by layer :func:`losses`.
        config: the mean that is asked for, or the loss.

    >>> found = {0: [0.9, 0.0], 1: [0.2, 0.0]}
    >>> allotted(found, LExIConfig(experts_per_token=1.5))
    {0: 2, 1: 1}
    >>> allotted(found, LExIConfig(layer_loss=0.2)), allotted(found, LExIConfig(layer_loss=1))
    ({0: 2, 1: 1}, {0: 1, 1: 1})
    """
    mean = config.experts_per_token
    if mean is None:
        within = {
            i: [k for k, x in enumerate(row, 1) if x <= config.layer_loss]
            for i, row in found.items()
        }
        return {i: within[i][0] for i in found}
    by_number = {i: dict(enumerate(row, 1)) for i, row in found.items()}
    return allocate(by_number, mean * len(found))


class FewerExperts(Method[LExIConfig, MoEArch]):
    """Lets a token run fewer experts, as many in every layer or as each layer needs."""

    ratio = "active"

    def find(self, config: Config) -> MoEArch:
        return unskipped(config)

    def numbers(self, job: Job[MoEArch]) -> dict[int, int]:
        """Experts that a token runs now, by layer that routes.

        Raises:
            MoesaicError: no layer routes, its routers know one number, or the request is above it.
        """
        arch, wanted = job.arch, self.config.experts_per_token
        found = {i: arch.mixture(job.layers[i]).top_k for i in arch.moe_layers(job.shape)}
        if not found:
            raise MoesaicError("No layer of this model routes.")
        if arch.chosen is None:
            raise MoesaicError(
                f"A router of {arch.model_type} runs {span(found.values())} experts a token, "
                "whatever its config says."
            )
        least = min(found.values())
        most = least if self.config.uniform else sum(found.values()) / len(found)
        if wanted is not None and wanted > most:
            raise MoesaicError(
                f"experts_per_token {wanted:g} is out of reach: a token runs "
                f"{span(found.values())} experts now; from 1 to {most:g} works."
            )
        return found

    def run(self, job: Job[MoEArch]) -> Decision:
        config, tops = self.config, self.numbers(job)
        if config.experts_per_token is not None and config.uniform:
            chosen = dict.fromkeys(tops, int(config.experts_per_token))
            seen: dict[int, JSON] = {i: {} for i in tops}
            return self._decision(job, tops, chosen, seen, "")
        stats = job.args.calibration.stats
        file = from_file(job, stats, needs_gram=True) if stats else None
        fingerprint = job.tokens.fingerprint if file is None else str(file.header["calibration"])
        known = "" if file is None else file.fingerprint
        request = {"config": asdict(config), "stats": known, "calibration": fingerprint}
        finished = job.finished(request)

        def see(i: int, stats: ExpertStats) -> None:
            found = losses(stats, routing_of(job, i, stats), tops[i])
            finished.add(SEEN, i, FewerLayer(tops[i], tops[i]), {"losses": found})

        missing = [i for i in tops if (SEEN, i) not in finished]
        if file is not None:
            for i in job.track(missing, "Deciding layers", len(tops)):
                see(i, file.layer(i))
        elif missing:
            share, numbers = job.share
            stream = job.stream(tops, job.arch.mixture, share)
            for site in job.track(stream, "Trying fewer experts", len(tops)):
                if site.index in missing:
                    gram_bytes = config.gram_mb << 20
                    see(site.index, observed(site, job.tokens, numbers, gram_bytes, ("gram",)))
        seen = {i: dict(finished[SEEN, i][1]) for i in tops}
        chosen = allotted({i: x["losses"] for i, x in seen.items()}, config)
        for i, number in chosen.items():
            seen[i]["relative_loss"] = seen[i]["losses"][number - 1]
        return self._decision(job, tops, chosen, seen, fingerprint)

    def _decision(
        self,
        job: Job[MoEArch],
        tops: Mapping[int, int],
        chosen: Mapping[int, int],
        seen: Mapping[int, JSON],
        fingerprint: str,
    ) -> Decision:
        layers = {i: FewerLayer(number, tops[i]) for i, number in chosen.items()}
        plan = Plan(self.config.name, job.base, layers, asdict(self.config), fingerprint)
        skipped = {i: 1 - number / tops[i] for i, number in chosen.items()}
        told = {
            i: {**seen[i], "calls_per_token": n, "skipped": skipped[i]} for i, n in chosen.items()
        }
        return Decision(plan, told)

    def outline(self, job: Job[MoEArch]) -> Outline:
        """Layers of equal losses; where no number is asked for all stay as they are."""
        config, tops = self.config, self.numbers(job)
        if config.uniform and config.experts_per_token is not None:
            chosen = dict.fromkeys(tops, int(config.experts_per_token))
        else:
            evenly = {i: [1 - k / top_k for k in range(1, top_k + 1)] for i, top_k in tops.items()}
            chosen = allotted(evenly, config)
        decided = self._decision(job, tops, chosen, {i: {} for i in tops}, "")
        assert decided.plan is not None
        if config.uniform:
            return Outline(decided.plan, passes=0.0)
        view = job.arch.mixture(job.layers[next(iter(tops))])
        one = sum(w.numel() for w in view.weights_of(0))
        pairs = view.count * (view.count + 1) // 2 * len(view.weights_of(0)[-1])
        return Outline(
            decided.plan,
            exact=False,  # which layers run fewer follows from text
            work=2.0 * len(tops) * ((view.count - view.top_k) * one + pairs),
            held=min(config.gram_mb << 20, gram_room(job.planned_tokens, view.count)),
        )

    def tell(self, layers: list[LayerRecord], decision: Decision, active: float | None) -> Told:
        told = {i: seen["calls_per_token"] for i, seen in decision.analyses.items()}
        before = decision.plan.layers if decision.plan is not None else {}
        was = span([layer.before for layer in before.values() if isinstance(layer, FewerLayer)])
        numbers, mean = span(told.values()), sum(told.values()) / len(told)
        output = {"experts_per_token": [told.get(layer.index) for layer in layers]}
        if self.config.uniform:
            title = f"{numbers} of {was} experts a token"
            return Told(
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
        return Told(title, words, output)

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
