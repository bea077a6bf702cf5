"""Expert pruning: fewer experts in every layer, nothing trained.

Lu et al., "Not All Experts are Equal: Efficient Expert Pruning and Skipping for Mixture-of-Experts
Large Language Models" (ACL 2024): the set of experts is kept that changes the layer's output least
(:mod:`moesaic.methods.prune.reconstruction`). Criteria of other papers are in
:mod:`moesaic.methods.prune.config`.

Deviations from the paper or its code, and options that restore theirs:

- One squared error over all tokens, the root once. The released code sums the norms of batches,
  so that its answer depends on the batch size: ``sum_batch_norms``.
- Equal losses: the lexicographically first set of dropped experts.
- Sets are enumerated while sets times tokens are within ``exhaustive_limit``; beyond it, greedy
  removal and swaps on the same exact loss. Where both run (n <= 16) the gap is reported.
- w' is what will be deployed: the architecture's own router over the kept experts. If it does not
  normalise, the softmax over fewer experts inflates the weights, and that counts.
- A set that differs in one expert from a known one is scored by the tokens that are rerouted
  (:mod:`moesaic.methods.prune.reconstruction`), to the same loss.
- Gram matrices are kept for as many tokens, evenly spread, as fit ``gram_mb`` a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moesaic.arch.mixture import MoEArch
from moesaic.errors import MoesaicError
from moesaic.methods import figures
from moesaic.methods.base import Decision, Summary, original
from moesaic.methods.figures import credit_clause, span
from moesaic.methods.layered import Decided, LayerCase, LayerMethod
from moesaic.methods.prune import subsets
from moesaic.methods.prune.config import PruneConfig, ScoredLayer
from moesaic.observation.job import Job
from moesaic.plans.cut import CutLayer
from moesaic.record import Figure, LayerRecord
from moesaic.types import JSON, Config


class Pruner(LayerMethod[PruneConfig, MoEArch, int]):
    """Method of ``prune``: removes experts from every routing layer; sizes count experts."""

    varies = "score"
    words = "Pruning layers"

    def find(self, config: Config) -> MoEArch:
        return original(config, "prune the original, and repeat the other step on that")

    @property
    def needs(self) -> set[str]:
        chosen = self.config.criterion
        return {*chosen.needs, *(("calls_E", "batch_T", "bias_E") if chosen.observes else ())}

    def resolve_defaults(self, job: Job[MoEArch]) -> Iterator[str]:
        yield from super().resolve_defaults(job)
        sizes = self.sizes(job).items()
        if all(kept == [job.arch.mixture(job.layers[i]).count] for i, kept in sizes):
            yield "All experts are kept: nothing is removed."

    @property
    def gram_bytes(self) -> int:
        return self.config.gram_mb << 20 if "gram_SP" in self.needs else 0

    def sizes(self, job: Job[MoEArch]) -> dict[int, list[int]]:
        config, args = self.config, job.args
        if config.progressive and args.calibration.stats:
            raise MoesaicError("progressive must see the model: it cannot decide from stats.")
        if config.progressive and args.compare:
            raise MoesaicError(
                "progressive follows one criterion: nothing can be decided beside it."
            )
        arch, model_config = job.arch, job.skeleton.config
        groups = arch.group_count(model_config)
        sizes: dict[int, list[int]] = {}
        for i in arch.moe_layers(job.skeleton):
            view = arch.mixture(job.layers[i])
            least = arch.least_experts(view.top_k, model_config)
            keep = config.experts_of(view.count, groups)
            if not least <= keep <= view.count:
                raise MoesaicError(
                    f"keep {config.keep:g} is out of reach: layer {i} has {view.count} experts and "
                    f"needs at least {least} (a token runs {view.top_k}"
                    + (f", {groups} router groups)." if groups > 1 else ").")
                )
            if config.uniform and keep % groups:
                raise MoesaicError(
                    f"keep {config.keep:g} is not a multiple of the {groups} router groups, which "
                    f"must keep equally many; {int(keep // groups) * groups} is."
                )
            every = range(least, view.count + 1, groups)
            sizes[i] = [int(keep)] if config.uniform else list(every)
        return sizes

    # --- one layer -------------------------------------------------------------------------------

    def decide(self, case: LayerCase[MoEArch], sizes: Sequence[int]) -> Decided[int]:
        groups, stats = case.job.arch.group_count(case.job.skeleton.config), case.stats
        if stats is None and self.needs:
            alike_E = torch.zeros(case.view.count)
            return {
                r: (
                    _layer(subsets.best_scores(alike_E, r, groups)),
                    {"relative_loss": 1 - r / len(alike_E)},
                )
                for r in sizes
            }
        layer = ScoredLayer(
            stats or {},
            case.routing,
            case.index,
            seed=self.config.seed,
            sum_batch_norms=self.config.sum_batch_norms,
            device=case.job.device,
        )
        return self.choose(layer, sizes, groups)

    def choose(self, layer: ScoredLayer, sizes: Sequence[int], groups: int = 1) -> Decided[int]:
        """Choose the experts that a layer keeps, for each size.

        Args:
            layer: its statistics.
            sizes: numbers of experts to keep.
            groups: router groups; the same number is removed from each.

        Returns:
            by size the layer's plan and analysis; if the criterion reads tokens, with ``calls``,
            ``loss`` and ``relative_loss``.
        """
        criterion, stats = self.config.criterion, layer.stats
        if criterion.score is not None:
            score_E = criterion.score(layer)
            if len(score_E) != layer.routing.count:
                raise ValueError(
                    f"criterion {criterion.name!r} gives {len(score_E)} scores for "
                    f"{layer.routing.count} experts"
                )
            return {r: self._scored(score_E, stats, r, groups) for r in sizes}
        assert criterion.losses is not None, f"{criterion.name} neither scores nor searches"
        losses, scale = criterion.losses(layer)
        decided: dict[int, tuple[CutLayer, JSON]] = {}
        path_E = torch.ones(layer.routing.count, dtype=torch.bool)
        sampled_T = stats.get("sampled_T")
        tokens = len(stats["batch_T"]) if sampled_T is None else int(sampled_T.sum())
        for r in sorted(sizes, reverse=True):
            path = subsets.greedy(losses, path_E, r, groups)
            path_E = path.kept_E
            best, gap = self._search(losses, path, r, groups, tokens)
            loss = max(best.loss, 0) ** 0.5 if criterion.squared else best.loss
            analysis = {
                "loss": loss,
                "relative_loss": loss / scale if scale else 0.0,
                "search": best.search,
                "sets": best.evaluated,
                **gap,
                "calls": stats["calls_E"].tolist(),
                "tokens": tokens,
            }
            decided[r] = (_layer(best.kept_E), analysis)
        return decided

    def _search(
        self, losses: subsets.Losses, path: subsets.SearchResult, r: int, groups: int, tokens: int
    ) -> tuple[subsets.SearchResult, dict[str, float]]:
        n = len(path.kept_E)
        if r == n:
            return path, {}
        if subsets.subsets(n, r, groups) * tokens > self.config.exhaustive_limit:
            return subsets.swap(losses, path, groups), {}
        best = subsets.exhaustive(losses, n, r, groups)
        if n > 16:
            return best, {}
        swapped = subsets.swap(losses, path, groups)
        return best, {"greedy_gap": swapped.loss / best.loss - 1 if best.loss > 0 else 0.0}

    def _scored(
        self, score_E: Tensor, stats: Mapping[str, Tensor], r: int, groups: int
    ) -> tuple[CutLayer, JSON]:
        kept_E = subsets.best_scores(score_E, r, groups)
        if not self.config.criterion.observes:
            return _layer(kept_E), {"scores": score_E.tolist()}
        removed = score_E[~kept_E].sum().item()
        return _layer(kept_E), {
            "scores": score_E.tolist(),
            "calls": stats["calls_E"].tolist(),
            "loss": removed,
            "relative_loss": removed / max(score_E.sum().item(), 1e-300),
        }

    # --- a model ---------------------------------------------------------------------------------

    def allocate(self, losses: Mapping[int, Mapping[int, float]]) -> Mapping[int, int]:
        if self.config.uniform:
            return super().allocate(losses)
        counts = (max(of_layer) for of_layer in losses.values())  # all of them may be kept
        return subsets.allocate(losses, sum(map(self.config.experts_of, counts)))

    # --- words -----------------------------------------------------------------------------------

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        config = self.described_config(decision.plan)
        changed = [layer for layer in layers if layer.index in decision.analyses]
        kept = span([len(layer.shape["kept"]) for layer in changed])
        before = span([layer.shape["before"] for layer in changed])
        comma = "," if config.beyond else ""
        title = f"pruned{credit_clause(config, 'by')}{comma} to {kept} of {before} experts"
        chosen = config.criterion
        by = chosen.title + (" on calibration text" if chosen.observes else "")
        text = f"{kept} of {before} experts are kept in every layer that routes, chosen by {by}."
        if config.refit:
            text += " The down projections of the kept experts were then refitted."
        return Summary(title, text)

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        return [*figures.kept_figures(layers), *super().figures(layers, decision)]


def _layer(kept_E: Tensor) -> CutLayer:
    return CutLayer(kept_E.nonzero().flatten())
