"""Perplexity, with the routing of the same tokens counted on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.foreign import Model, Track, silent
from moesaic.metrics.forward import BATCH, Runner, all_routing, all_shares, own_share, runner
from moesaic.metrics.routing import Routing


@dataclass(frozen=True)
class Quality:
    """How well a model predicts a text, and how it routed its tokens."""

    perplexity: float
    tokens: int
    """Tokens that were scored."""
    routing: dict[int, Routing]
    """By decoder layer; empty for a model without petals."""
    sources: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of a mix, each source's perplexity and scored tokens; empty for a single text."""


class Losses:
    """Next-token losses, added up by window."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.counts: list[Tensor] = []

    def add(self, logits: Tensor, batch: Tokens) -> None:
        """Score a batch.

        Args:
            logits: (B, L, V), of the model.
            batch: its tokens; padding is not scored, nor anything behind padding.
        """
        ids = batch.input_ids.to(logits.device)
        given = logits[:, :-1].float()
        loss = F.cross_entropy(given.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss_BL = loss.view(len(ids), -1).double()
        scored_BL = scored(batch).to(logits.device)
        self.sums.append(loss_BL.masked_fill(~scored_BL, 0).sum(1).cpu())
        self.counts.append(scored_BL.sum(1).cpu())

    def quality(self, tokens: Tokens, routing: dict[int, Routing], shared: bool = False) -> Quality:
        """The mean over all windows.

        Args:
            tokens: the windows.
            routing: of the same tokens.
            shared: several processes have a share of the batches each, and all come here.

        Raises:
            MoesaicError: the model's logits are not finite, or no token can be scored.
        """
        sum_N = torch.cat(all_shares(self.sums, shared))
        count_N = torch.cat(all_shares(self.counts, shared))
        if not count_N.any():
            raise MoesaicError("The text has no token behind another one to score.")
        if not sum_N.isfinite().all():
            raise MoesaicError("The model's logits are not finite on this text; try dtype float32.")
        by_source = _by_source(tokens, sum_N, count_N)
        return Quality(*_mean(sum_N, count_N), all_routing(routing, shared), by_source)


def scored(batch: Tokens) -> Tensor:
    """Which next tokens are scored, bool (B, L - 1): those behind a real token, and real."""
    mask = batch.attention_mask
    if mask is None:
        return torch.ones_like(batch.input_ids[:, 1:], dtype=torch.bool)
    return mask[:, 1:] & mask[:, :-1]


@torch.no_grad()
def perplexity(
    model: Model | Runner, tokens: Tokens, track: Track = silent, shared: bool = False
) -> Quality:
    """exp of the mean next-token loss over windows, the first token of each not scored.

    A model that skips channels at decoding is measured with every token as at decoding.

    Padding is neither seen nor scored, and no token is scored behind padding.

    Args:
        model: loaded, or a :class:`~moesaic.metrics.forward.Runner`.
        tokens: the windows.
        track: shows progress.
        shared: several processes share the batches, and all of them call this.

    Raises:
        MoesaicError: the model's logits are not finite, or no token can be scored.
    """
    batches = own_share(list(tokens.batches(BATCH)), shared)
    losses, found = Losses(), runner(model).run(batches, track)
    for logits, batch in found.logits:
        losses.add(logits, batch)
    return losses.quality(tokens, found.routing, shared)


def _mean(sum_N: Tensor, count_N: Tensor) -> tuple[float, int]:
    """Perplexity, and the tokens that it is of."""
    count = int(count_N.sum())
    return math.exp(sum_N.sum().item() / max(1, count)), count


def _by_source(tokens: Tokens, sum_N: Tensor, count_N: Tensor) -> dict[str, tuple[float, int]]:
    if len(tokens.origins) < 2:
        return {}
    ends = [0]
    for origin in tokens.origins:
        ends.append(ends[-1] + origin.windows)
    names = (origin.taken.source or "shipped" for origin in tokens.origins)
    return {
        name: _mean(sum_N[start:stop], count_N[start:stop])
        for name, (start, stop) in zip(names, pairwise(ends), strict=True)
    }
