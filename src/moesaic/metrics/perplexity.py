"""Perplexity, with the routing of the same tokens counted on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.foreign import Model, Track, silent
from moesaic.metrics.routing import Routing, counted


@dataclass(frozen=True)
class Quality:
    """How well a model predicts a text, and how it routed its tokens."""

    perplexity: float
    tokens: int
    """Tokens that were scored."""
    routing: dict[int, Routing]
    """By decoder layer; empty for a model without petals."""


@torch.inference_mode()
def perplexity(model: Model, tokens: Tokens, track: Track = silent) -> Quality:
    """exp of the mean next-token loss over windows, the first token of each not scored.

    Raises:
        MoesaicError: the model's logits are not finite.
    """
    device = model.get_input_embeddings().weight.device
    batches = list(tokens.batches(1024))
    total, scored = 0.0, 0
    with counted(model) as routing:
        for batch in track(batches, "Perplexity", len(batches)):
            ids = batch.input_ids.to(device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            total += loss.double().sum().item()
            scored += loss.numel()
    if not math.isfinite(total):
        raise MoesaicError("The model's logits are not finite on this text; try --dtype float32.")
    return Quality(math.exp(total / scored), scored, routing)
