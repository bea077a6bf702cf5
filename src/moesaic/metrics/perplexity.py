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
from moesaic.metrics.routing import Routing, counted
from moesaic.nn.channels import set_mode


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


@torch.inference_mode()
def perplexity(model: Model, tokens: Tokens, track: Track = silent) -> Quality:
    """exp of the mean next-token loss over windows, the first token of each not scored.

    A model that skips channels at decoding is measured with every token as at decoding.

    Padding is neither seen nor scored, and no token is scored behind padding.

    Raises:
        MoesaicError: the model's logits are not finite, or no token can be scored.
    """
    device = model.get_input_embeddings().weight.device
    batches = list(tokens.batches(1024))
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    with counted(model) as routing, set_mode(model, "always"):
        for batch in track(batches, "Perplexity", len(batches)):
            ids = batch.input_ids.to(device)
            mask = batch.attention_mask
            mask = None if mask is None else mask.to(device)
            routing.mask = mask
            out = model(input_ids=ids, attention_mask=mask, use_cache=False)
            logits = out.logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            loss_BL = loss.view(len(ids), -1).double()
            scored_BL = torch.ones_like(loss_BL, dtype=torch.bool)
            if mask is not None:
                scored_BL = mask[:, 1:] & mask[:, :-1]
                loss_BL = loss_BL.masked_fill(~scored_BL, 0)
            sums.append(loss_BL.sum(1).cpu())
            counts.append(scored_BL.sum(1).cpu())
    sum_N, count_N = torch.cat(sums), torch.cat(counts)
    if not count_N.any():
        raise MoesaicError("The text has no token behind another one to score.")
    if not sum_N.isfinite().all():
        raise MoesaicError("The model's logits are not finite on this text; try dtype float32.")
    return Quality(*_mean(sum_N, count_N), dict(routing), _by_source(tokens, sum_N, count_N))


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
