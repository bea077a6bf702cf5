"""Expert pruning: fewer experts in every layer, nothing trained.

Lu et al., "Not All Experts are Equal: Efficient Expert Pruning and Skipping for Mixture-of-Experts
Large Language Models" (ACL 2024): the set of experts that stays is the one that changes the
layer's output least (:mod:`moesaic.methods.naee.reconstruction`). Other criteria, of other papers,
stand in :mod:`moesaic.methods.naee.criteria`.

Where we depart from the paper or its code, and how to have theirs:

- One squared error over all tokens, the root once. The released code sums the norms of batches,
  so that its answer depends on the batch size: ``sum_batch_norms``.
- Equal losses: the lexicographically first set of dropped experts.
- Sets are enumerated while sets times tokens stay within ``exhaustive_limit``; beyond it, greedy
  removal and swaps on the same exact loss. Where both run (n <= 16) the gap is reported.
- w' is what will be deployed: the architecture's own router over the experts that stay. Where it
  does not normalise, the softmax over fewer experts inflates the weights, and that counts.
- A set that differs in one expert from a known one is scored by the tokens that it moves
  (:mod:`moesaic.methods.naee.rerouting`), to the same loss.
- Gram matrices are kept for as many tokens, evenly spread, as fit ``gram_mb`` a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import cast

import torch
from torch import Tensor

from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Config
from moesaic.layers.pruned import PrunedLayer
from moesaic.methods import figures
from moesaic.methods.base import Decision, Method, Outline, Told
from moesaic.methods.beyond.recovery import recover, settled
from moesaic.methods.mixtures import credited, least_experts, original, span
from moesaic.methods.naee.config import PruneConfig
from moesaic.methods.naee.criteria import Case
from moesaic.methods.naee.observed import NO_TEXT, from_file, observed, routing_of
from moesaic.methods.naee.search import (
    Found,
    Losses,
    allocate,
    best_scores,
    exhaustive,
    greedy,
    refined,
    subsets,
)
from moesaic.observation.experts import ExpertStats, gram_room, sample_share
from moesaic.observation.job import Finished, Job
from moesaic.plan import Plan
from moesaic.record import Figure, LayerRecord

REROUTED, RECOMBINED = 10_000, 1_100
"""Operations as long as it takes to score a set by a token, and more for each expert: the router
chooses anew, which is no product. Measured."""
RESULT = "result"
"""The name of what was asked for, beside its comparisons."""


class Pruner(Method[PruneConfig, MoEArch]):
    """Takes experts out of every layer that routes."""

    ratio = "stored"

    def find(self, config: Config) -> MoEArch:
        return original(config, "prune the original, then skip")

    def settle(self, job: Job[MoEArch]) -> Iterator[str]:
        refit, why_not = settled(job, self.config.refit)
        self.config = replace(self.config, refit=refit)
        yield from filter(None, [why_not])

    # --- one layer -------------------------------------------------------------------------------

    def decide(
        self, case: Case, sizes: list[int], groups: int = 1
    ) -> dict[int, tuple[PrunedLayer, JSON]]:
        """The experts that stay in a layer, for each size.

        Args:
            case: the layer.
            sizes: how many experts may stay.
            groups: router groups, which lose equally many.

        Returns:
            by size the layer's plan, and what it costs: ``calls``, and of criteria that look at
            tokens ``loss`` and ``relative_loss``.
        """
        criterion, stats = self.config.chosen, case.stats
        if criterion.score is not None:
            score_E = criterion.score(case)
            return {r: self._scored(score_E, stats, r, groups) for r in sizes}
        assert criterion.losses is not None, f"{criterion.name} neither scores nor searches"
        losses, scale = criterion.losses(case)
        decided: dict[int, tuple[PrunedLayer, JSON]] = {}
        path_E = torch.ones(stats.experts, dtype=torch.bool)
        for r in sorted(sizes, reverse=True):
            path = greedy(losses, path_E, r, groups)
            path_E = path.kept_E
            looked = int(stats.sampled_T.sum()) or stats.tokens
            found, gap = self._search(losses, path, r, groups, looked)
            loss = max(found.loss, 0) ** 0.5 if criterion.squared else found.loss
            analysis = {
                "loss": loss,
                "relative_loss": loss / scale if scale else 0.0,
                "search": found.search,
                "sets": found.evaluated,
                **gap,
                "calls": stats.calls_E.tolist(),
                "tokens": looked,
            }
            decided[r] = (_layer(found.kept_E), analysis)
        return decided

    def _search(
        self, losses: Losses, path: Found, r: int, groups: int, tokens: int
    ) -> tuple[Found, dict[str, float]]:
        n = len(path.kept_E)
        if r == n:
            return path, {}
        if not self._tries_all(n, r, groups, tokens):
            return refined(losses, path, groups), {}
        best = exhaustive(losses, n, r, groups)
        if n > 16:
            return best, {}
        other = refined(losses, path, groups)
        return best, {"greedy_gap": other.loss / best.loss - 1 if best.loss > 0 else 0.0}

    def _tries_all(self, experts: int, keep: int, groups: int, tokens: int) -> bool:
        """Whether all sets are scored; each is, by every token."""
        return subsets(experts, keep, groups) * tokens <= self.config.exhaustive_limit

    def _scored_sets(self, view: MoEFFN, keep: int, groups: int, tokens: int) -> float:
        """Sets that are scored by all tokens, told beforehand; a neighbour, by those that move."""
        if not tokens or keep == view.count:
            return 0.0
        greedily = 2.0 * view.top_k * (view.count - keep)
        every = self._tries_all(view.count, keep, groups, tokens)
        return greedily + every * subsets(view.count, keep, groups)

    def _scored(
        self, score_E: Tensor, stats: ExpertStats, r: int, groups: int
    ) -> tuple[PrunedLayer, JSON]:
        if len(score_E) != stats.experts:
            raise ValueError(
                f"criterion {self.config.criterion!r} gives {len(score_E)} scores for "
                f"{stats.experts} experts; does its needs name what it reads?"
            )
        kept_E = best_scores(score_E, r, groups)
        analysis: JSON = {"scores": score_E.tolist(), "calls": stats.calls_E.tolist()}
        if self.config.chosen.observes:
            gone = score_E[~kept_E].sum().item()
            analysis |= {"loss": gone, "relative_loss": gone / max(score_E.sum().item(), 1e-300)}
        return _layer(kept_E), analysis

    # --- a model ---------------------------------------------------------------------------------

    def run(self, job: Job[MoEArch]) -> Decision:
        config, args = self.config, job.args
        stats, compare = args.calibration.stats, args.compare
        pruners = {name: Pruner(replace(config, criterion=name)) for name in compare}
        pruners[RESULT] = self
        if stats and config.progressive:
            raise MoesaicError("progressive must see the model: it cannot decide from stats.")
        if compare and config.progressive:
            raise MoesaicError(
                "progressive follows one criterion: nothing can be decided beside it."
            )
        criteria = [pruner.config.chosen for pruner in pruners.values()]
        sizes = _sizes(job, config)
        file, blind = None, not any(criterion.observes for criterion in criteria)
        if stats:
            file = from_file(job, stats, any(criterion.gram for criterion in criteria))
            fingerprint = str(file.header["calibration"])
        else:
            fingerprint = job.tokens.fingerprint if config.refit or not blind else ""
        finished = job.finished(
            {
                "config": asdict(config),
                "compare": list(compare),
                "stats": "" if file is None else file.fingerprint,
                "calibration": job.tokens.fingerprint if config.refit else fingerprint,
            }
        )
        groups = job.arch.group_count(job.shape.config)

        def decide(i: int, seen: ExpertStats) -> None:
            for name, pruner in pruners.items():
                case = Case(seen, routing_of(job, i, seen), i, pruner.config, job.device)
                for size, (layer, analysis) in pruner.decide(case, sizes[i], groups).items():
                    if blind and file is None:
                        del analysis["calls"]  # of no text
                    finished.add(_key(name, size), i, layer, analysis)

        missing = [
            i
            for i, options in sizes.items()
            if any((_key(name, r), i) not in finished for name in pruners for r in options)
        ]
        if file is not None:
            for i in job.track(missing, "Deciding layers", len(sizes)):
                decide(i, file.layer(i))
        elif missing:
            needs = {part for criterion in criteria for part in criterion.needs}
            gram_bytes = max(pruner.config.gram_bytes for pruner in pruners.values())
            tokens = NO_TEXT if blind else job.tokens
            share, numbers = (tokens, [0]) if blind else job.share
            stream = job.stream(sizes, job.arch.mixture, share, follow=config.progressive)
            for site in job.track(stream, "Pruning layers", len(sizes)):
                i = site.index
                if i in missing:
                    decide(i, observed(site, tokens, numbers, gram_bytes, needs))
                if config.progressive:
                    kept = cast(PrunedLayer, finished[_key(RESULT, sizes[i][0]), i][0])
                    allowed_E = torch.zeros(site.view.count, dtype=torch.bool)
                    allowed_E[kept.experts] = True
                    site.change = site.view.restricted(allowed_E)
        counts = {name: self._counts(name, sizes, finished) for name in pruners}
        plans = {
            name: _plan(job, pruner.config, name, counts[name], finished, fingerprint)
            for name, pruner in pruners.items()
        }
        analyses = {i: finished[_key(RESULT, r), i][1] for i, r in counts[RESULT].items()}
        if config.refit:
            plans, found = recover(job, plans, finished, propagate=config.progressive)
            analyses = {i: {**seen, "refit": found[i]} for i, seen in analyses.items()}
        return Decision(plans.pop(RESULT), analyses, plans)

    def outline(self, job: Job[MoEArch]) -> Outline:
        """The first experts stay; where counts may differ, equally many in every layer."""
        config, arch = self.config, job.arch
        sizes, groups = _sizes(job, config), arch.group_count(job.shape.config)
        counts = {i: options[0] for i, options in sizes.items()}
        if not config.uniform:
            evenly = {i: {r: 1 - r / options[-1] for r in options} for i, options in sizes.items()}
            counts = allocate(evenly, config.keep * len(sizes))
        views = {i: arch.mixture(job.layers[i]) for i in sizes}
        layers = {
            i: _layer(best_scores(torch.zeros(views[i].count), count, groups))
            for i, count in counts.items()
        }
        view = next(iter(views.values()))
        one = sum(w.numel() for w in view.weights_of(0))
        pairs = view.count * (view.count + 1) // 2 * len(view.weights_of(0)[-1])
        looked = len(views) * (config.chosen.gram or bool(config.chosen.needs))
        share = sample_share(job.planned_tokens, view.count, config.gram_bytes)
        sampled = int(share * job.planned_tokens) * config.chosen.gram
        searched = sum(
            self._scored_sets(view, r, groups, sampled)
            for options in sizes.values()
            for r in options
        )
        return Outline(
            _planned(job, config, layers, ""),
            exact=config.uniform,
            passes=config.chosen.observes + bool(config.refit) * (1 + config.progressive),
            work=2.0 * looked * ((view.count - view.top_k) * one + config.chosen.gram * pairs)
            + share * searched * (REROUTED + RECOMBINED * view.count),
            held=min(config.gram_bytes, gram_room(job.planned_tokens, view.count)),
        )

    def _counts(
        self, name: str, sizes: Mapping[int, list[int]], finished: Finished
    ) -> dict[int, int]:
        """How many experts stay in each layer."""
        if self.config.uniform:
            return {i: options[0] for i, options in sizes.items()}
        curves = {
            i: {r: finished[_key(name, r), i][1]["relative_loss"] for r in options}
            for i, options in sizes.items()
        }
        return allocate(curves, self.config.keep * len(sizes))

    # --- words -----------------------------------------------------------------------------------

    def tell(self, layers: list[LayerRecord], decision: Decision, active: float | None) -> Told:
        changed = [layer for layer in layers if layer.index in decision.analyses]
        stay = span([len(layer.shape["kept"]) for layer in changed])
        before = span([layer.shape["before"] for layer in changed])
        comma = "," if self.config.beyond else ""
        title = f"pruned{credited(self.config, 'by')}{comma} to {stay} of {before} experts"
        chosen = self.config.chosen
        by = chosen.title + (" on calibration text" if chosen.observes else "")
        told = f"{stay} of {before} experts stay in every layer that routes, chosen by {by}."
        if self.config.refit:
            told += " The down projections of the experts that stay were then refitted."
        return Told(title, told)

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        return [*figures.kept(layers), *super().figures(layers, decision)]


def _key(name: str, size: int) -> str:
    return f"{name}-keep-{size}"


def _layer(kept_E: Tensor) -> PrunedLayer:
    return PrunedLayer(kept_E.nonzero().flatten())


def _plan(
    job: Job[MoEArch],
    config: PruneConfig,
    name: str,
    kept: Mapping[int, int],
    finished: Finished,
    fingerprint: str,
) -> Plan:
    layers = {i: cast(PrunedLayer, finished[_key(name, r), i][0]) for i, r in kept.items()}
    return _planned(job, config, layers, fingerprint)


def _planned(
    job: Job[MoEArch], config: PruneConfig, layers: Mapping[int, PrunedLayer], fingerprint: str
) -> Plan:
    """The plan of decided layers, filled up where that was asked for."""
    if config.padding:
        most = max(layer.kept_E.numel() for layer in layers.values())
        groups = job.arch.group_count(job.shape.config)
        layers = {i: layer.padded(most, groups) for i, layer in layers.items()}
    return Plan(config.name, job.base, layers, asdict(config), fingerprint)


def _sizes(job: Job[MoEArch], config: PruneConfig) -> dict[int, list[int]]:
    """The numbers of experts that each layer may keep.

    Raises:
        MoesaicError: the request cannot be met.
    """
    arch, model_config = job.arch, job.shape.config
    groups = arch.group_count(model_config)
    sizes = {}
    for i in arch.moe_layers(job.shape):
        view = arch.mixture(job.layers[i])
        least = least_experts(arch, view.top_k, model_config)
        if not least <= config.keep <= view.count:
            raise MoesaicError(
                f"keep {config.keep:g} is out of reach: layer {i} has {view.count} experts and "
                f"needs at least {least} (a token runs {view.top_k}"
                + (f", {groups} router groups)." if groups > 1 else ").")
            )
        if config.uniform and config.keep % groups:
            raise MoesaicError(
                f"keep {config.keep:g} is not a multiple of the {groups} router groups, which "
                f"must lose equally many; {int(config.keep // groups) * groups} is."
            )
        if config.padding and arch.never is None:
            raise MoesaicError(
                f"padding needs a router with a bias that can keep an expert from being chosen; "
                f"{arch.model_type} has none. Without padding the result is moesaic_"
                f"{arch.model_type}."
            )
        every = range(least, view.count + 1, groups)
        sizes[i] = [int(config.keep)] if config.uniform else list(every)
    if not sizes:
        raise MoesaicError("No layer of this model routes.")
    return sizes
