"""Expert pruning: fewer experts in every layer, nothing trained.

Lu et al., "Not All Experts are Equal: Efficient Expert Pruning and Skipping for Mixture-of-Experts
Large Language Models" (ACL 2024). Equation numbers are the paper's.

==================  ==========================================================
n, r                experts of a layer, experts that stay
C                   the experts that stay, |C| = r
w, w'               combine weights of a token, with all experts and with C (T, E)
f_i(x)              output of expert i
F(x), F'(x, C)      output of the routed experts, with all and with C
G_t                 <f_i(x_t), f_j(x_t)>: the Gram matrix of a token (E, E)
==================  ==========================================================

Eq. 3: C minimises ||F'(x, C) - F(x)||_F. With every expert's output known once,

    ||F'(x, C) - F(x)||^2 = sum_t (w'_t - w_t)^T G_t (w'_t - w_t),

so a set costs its routing and a small quadratic form: exact, and no layer is run again.

Where we depart from the paper or its code, and how to have theirs:

- One squared error over all tokens, the root once. The released code sums the norms of batches,
  so that its answer depends on the batch size: ``sum_batch_norms``.
- Equal losses: the lexicographically first set of dropped experts.
- Sets are enumerated up to ``exhaustive_limit``; beyond it, greedy removal and swaps on the same
  exact loss. Where both run (n <= 16) the gap is reported.
- w' is what will be deployed: the architecture's own router over the experts that stay. Where it
  does not normalise, the softmax over fewer experts inflates the weights, and that counts.
- Gram matrices are kept for as many tokens, evenly spread, as fit ``gram_mb`` a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.methods.naee.criteria import SCORES, pairwise_losses, random_scores
from moesaic.methods.naee.merging import merged_layer
from moesaic.methods.naee.search import (
    Found,
    Losses,
    best_scores,
    exhaustive,
    greedy,
    refined,
    subsets,
)
from moesaic.arch.mixture import Rule
from moesaic.plan import PrunedLayer
from moesaic.stream.experts import ExpertStats, unpacked

SEARCHED = ("reconstruction", "pairwise")
MERGE = "merge"
"""Frequency, and the experts that go are merged into those that stay (M-SMoE)."""
CRITERIA = (*SEARCHED, "random", *SCORES, MERGE)
DATA_FREE = ("random", "aimer")
ELEMENTS = 1 << 22
"""Numbers in one block of candidate sets times tokens times experts."""


@dataclass(frozen=True)
class PruneConfig:
    """Options of expert pruning. The defaults are the paper's, or our decision."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    keep: float = 6
    """Experts that stay in each layer; their mean, if counts may differ."""
    criterion: str = "reconstruction"
    """reconstruction (Eq. 3), frequency, random, reap, ean, man, msan, gate, aimer, pairwise,
    or merge (M-SMoE)."""
    progressive: bool = False
    """Each layer sees the tokens as the layers pruned before it pass them on."""
    uniform: bool = True
    """Equally many experts in every layer, as the architecture itself needs."""
    padding: bool = False
    """Fill unequal counts up with experts that are never chosen, for the architecture's sake."""
    sum_batch_norms: bool = False
    """Sum the norms of batches, as the released code does."""
    exhaustive_limit: int = 13_000
    """The most sets that are enumerated; C(16, 8) = 12870."""
    gram_mb: int = 256
    """Memory for one layer's Gram matrices."""
    refit: bool = False
    """Refit the experts that stay to the whole layer's output. Not the paper's."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise MoesaicError(
                f"Unknown criterion {self.criterion!r}; choose from {', '.join(CRITERIA)}."
            )
        if self.uniform and self.keep != int(self.keep):
            raise MoesaicError(
                f"--keep {self.keep:g} is not a whole number; a mean needs --non-uniform."
            )
        if self.padding and self.uniform:
            raise MoesaicError("--padding fills unequal counts up: it needs --non-uniform.")
        if not self.uniform and self.criterion in DATA_FREE:
            raise MoesaicError(
                f"--criterion {self.criterion} gives no loss by which layers could be compared; "
                "--non-uniform needs another."
            )
        if not self.uniform and self.progressive:
            raise MoesaicError(
                "--progressive decides a layer before the next is seen; --non-uniform needs all."
            )
        if self.progressive and self.criterion in DATA_FREE:
            raise MoesaicError(f"--criterion {self.criterion} sees no tokens: drop --progressive.")
        if self.refit and self.criterion == MERGE:
            raise MoesaicError("--criterion merge makes experts of its own: drop --refit.")
        if self.progressive and self.criterion == MERGE:
            raise MoesaicError(
                "--progressive passes tokens on without the experts that go, not with merged ones: "
                "--criterion merge decides every layer on the original's tokens."
            )

    @property
    def gram_bytes(self) -> int:
        """Memory for one layer's Gram matrices; none are needed by most criteria."""
        return self.gram_mb << 20 if self.criterion == "reconstruction" else 0


# --- Eq. 3 ---------------------------------------------------------------------------------------


def squared_errors(diff_SCE: Tensor, gram_SEE: Tensor) -> Tensor:
    """||F'(x_t, C) - F(x_t)||^2 = (w' - w)^T G_t (w' - w) for every token and set (S, C).

    >>> diff = torch.tensor([[[1.0, -1.0]]])
    >>> gram = torch.tensor([[[2.0, 0.5], [0.5, 1.0]]])
    >>> squared_errors(diff, gram)
    tensor([[2.]])
    """
    return ((diff_SCE @ gram_SEE) * diff_SCE).sum(-1)


def reconstruction_losses(stats: ExpertStats, rule: Rule, sum_batch_norms: bool = False) -> Losses:
    """||F'(x, C) - F(x)||_F of Eq. 3 for many sets at once, (C, E) to (C,), float64.

    Tokens go through in blocks, so that memory is bounded whatever their number. With cross terms
    (progressive pruning) the target is the original model's output, F(x) + delta.
    """
    logits_SE = stats.logits_TE[stats.sampled_T]
    w_SE = rule.weights(logits_SE).double()
    batches, batch_S = stats.batch_T[stats.sampled_T].unique(return_inverse=True)
    rows = max(1, ELEMENTS // stats.experts**2)

    def losses(kept_CE: Tensor) -> Tensor:
        squared_CB = torch.zeros(len(kept_CE), len(batches), dtype=torch.float64)
        for block in torch.arange(len(w_SE)).split(rows):
            gram_SEE = unpacked(stats.gram_SP[block], stats.experts)
            sets = max(1, ELEMENTS // (len(block) * stats.experts))
            for at in torch.arange(len(kept_CE)).split(sets):
                diff_SCE = weights_for(rule, logits_SE[block], kept_CE[at]) - w_SE[block, None]
                error_SC = squared_errors(diff_SCE, gram_SEE)
                if len(stats.delta_S):
                    cross_SC = (diff_SCE @ stats.cross_SE[block].unsqueeze(-1)).squeeze(-1)
                    error_SC = error_SC - 2 * cross_SC + stats.delta_S[block, None]
                into = torch.zeros(len(at), len(batches), dtype=torch.float64)
                squared_CB[at] += into.index_add_(1, batch_S[block], error_SC.T.contiguous())
        squared_CB = squared_CB.clamp(min=0)
        return squared_CB.sqrt().sum(1) if sum_batch_norms else squared_CB.sum(1).sqrt()

    return losses


def weights_for(rule: Rule, logits_SE: Tensor, kept_CE: Tensor) -> Tensor:
    """w', the combine weights with only a set of experts there (S, C, E), float64."""
    tokens, sets = len(logits_SE), len(kept_CE)
    every_NE = logits_SE.repeat_interleave(sets, 0)
    w_NE = rule.weights(every_NE, kept_CE.repeat(tokens, 1))
    return w_NE.double().view(tokens, sets, -1)


def output_norm(stats: ExpertStats, rule: Rule) -> float:
    """||F(x)||_F over the sampled tokens: what a loss is a share of."""
    logits_SE = stats.logits_TE[stats.sampled_T]
    total = 0.0
    for block in torch.arange(len(logits_SE)).split(max(1, ELEMENTS // stats.experts**2)):
        w_SE = rule.weights(logits_SE[block]).double()
        gram_SEE = unpacked(stats.gram_SP[block], stats.experts)
        total += squared_errors(w_SE.unsqueeze(1), gram_SEE).sum().item()
    return max(total, 0.0) ** 0.5


# --- counts that differ --------------------------------------------------------------------------


def allocate(losses: Mapping[int, Mapping[int, float]], total: int) -> dict[int, int]:
    """Experts for each layer, ``total`` in all, of least summed squared loss; exact.

    Args:
        losses: by layer and number of experts, relative to the layer's output.
        total: experts of all layers together.

    >>> allocate({0: {1: 0.9, 2: 0.1, 3: 0.0}, 1: {1: 0.2, 2: 0.1, 3: 0.0}}, 3)
    {0: 2, 1: 1}
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for options in losses.values():
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for spent, (loss, counts) in best.items():
            for count, more in options.items():
                offer = (loss + more**2, (*counts, count))
                if spent + count not in grown or offer < grown[spent + count]:
                    grown[spent + count] = offer
        best = grown
    reach = max((spent for spent in best if spent <= total), default=min(best))
    return dict(zip(losses, best[reach][1], strict=True))


# --- The method ----------------------------------------------------------------------------------


class Pruner:
    """Decides, from one layer's statistics, which experts stay at one or more sizes."""

    name = "naee"

    def __init__(self, config: PruneConfig) -> None:
        self.config = config

    def decide(
        self, stats: ExpertStats, rule: Rule, layer: int, sizes: list[int], groups: int = 1
    ) -> dict[int, tuple[PrunedLayer, dict[str, Any]]]:
        """The experts that stay for each size, and what that costs.

        Args:
            stats: what was observed of the layer.
            rule: the layer's router.
            layer: its number.
            sizes: how many experts may stay.
            groups: router groups, which lose equally many.
        """
        config = self.config
        if config.criterion not in SEARCHED:
            score_E = self._scores(stats, layer)
            return {r: self._scored(score_E, stats, r, groups) for r in sizes}
        if config.criterion == "pairwise":
            losses, scale = pairwise_losses(stats.pair_EE), stats.pair_EE.sum().item() ** 0.5
        else:
            losses = reconstruction_losses(stats, rule, config.sum_batch_norms)
            scale = output_norm(stats, rule)
        decided = {}
        path_E = torch.ones(stats.experts, dtype=torch.bool)
        for r in sorted(sizes, reverse=True):
            path = greedy(losses, path_E, r, groups)
            path_E = path.kept_E
            found, gap = self._search(losses, path, r, groups)
            loss = max(found.loss, 0) ** 0.5 if config.criterion == "pairwise" else found.loss
            analysis = {
                "loss": loss,
                "relative_loss": loss / scale if scale else 0.0,
                "search": found.search,
                "sets": found.evaluated,
                **gap,
                "calls": stats.calls_E.tolist(),
                "tokens": int(stats.sampled_T.sum()) or stats.tokens,
            }
            decided[r] = (_layer(found.kept_E), analysis)
        return decided

    def _search(
        self, losses: Losses, path: Found, r: int, groups: int
    ) -> tuple[Found, dict[str, float]]:
        n = len(path.kept_E)
        if r == n:
            return path, {}
        count = subsets(n, r, groups)
        if count > self.config.exhaustive_limit:
            return refined(losses, path, groups), {}
        best = exhaustive(losses, n, r, groups)
        if n > 16:
            return best, {}
        other = refined(losses, path, groups)
        return best, {"greedy_gap": other.loss / best.loss - 1 if best.loss > 0 else 0.0}

    def _scores(self, stats: ExpertStats, layer: int) -> Tensor:
        if self.config.criterion == "random":
            return random_scores(stats.experts, layer, self.config.seed)
        criterion = self.config.criterion
        return SCORES["frequency" if criterion == MERGE else criterion](stats)

    def _scored(
        self, score_E: Tensor, stats: ExpertStats, r: int, groups: int
    ) -> tuple[PrunedLayer, dict[str, Any]]:
        kept_E = best_scores(score_E, r, groups)
        analysis: dict[str, Any] = {"scores": score_E.tolist(), "calls": stats.calls_E.tolist()}
        if self.config.criterion not in DATA_FREE:
            gone = score_E[~kept_E].sum().item()
            analysis |= {"loss": gone, "relative_loss": gone / max(score_E.sum().item(), 1e-300)}
        if self.config.criterion == MERGE:
            merged = merged_layer(kept_E, stats.logits_TE, stats.calls_E)
            return merged, {**analysis, "into": merged.into_E.tolist()}
        return _layer(kept_E), analysis


def _layer(kept_E: Tensor) -> PrunedLayer:
    return PrunedLayer(kept_E.nonzero().flatten())
