"""How much the loss of the whole model feels each channel of each projection.

The change of the loss where channel i is left out is g_i x_i to first order, with g the gradient of
the loss with respect to what this projection alone takes in; over tokens its mean square is
E[g_i^2] x_i^2 (the diagonal of the Fisher information). Not in a paper on channel skipping; the
square root of E[g_i^2] takes the place of WINA's column norm. Of an expert the mean is over the
tokens that it runs.

Shape suffixes: T tokens, I inputs (channels), O outputs, E experts, N tokens of one, K top-k.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import Arch
from moesaic.data.text import Tokens
from moesaic.foreign import Model, Track, logits_alone
from moesaic.methods.channels.projections import Projection
from moesaic.observation.tap import Event, Squares, tapped

Key = tuple[int, str]
"""A decoder layer, and the path of a projection in it."""


def gradient_sizes(
    model: Model,
    arch: Arch,
    wanted: Mapping[int, Collection[Projection]],
    tokens: Tokens,
    track: Track,
) -> dict[Key, Tensor]:
    """The root mean square of the loss's gradient by channel, float32: (I), of experts (E, I).

    The loss is the sum over a window's tokens, so that a gradient is what one token's value changes
    of everything after it. An expert that runs for none of the tokens has the mean of the others.

    Args:
        model: live.
        arch: its architecture.
        wanted: projections by decoder layer.
        tokens: padding is left out of the loss.
        track: shows progress.
    """
    squares = Squares()
    batches = list(tokens.batches(1024))
    with ExitStack() as taps:
        for i, projections in wanted.items():
            layer = arch.layers(model)[i]
            seen = partial(_take, squares, i, arch.experts_in(layer))
            masks = iter([batch.attention_mask for batch in batches])
            paths = [p.path for p in projections]
            taps.enter_context(tapped(layer, arch, paths, seen, masks, gradients=True))
        for batch in track(batches, "Gradients", len(batches)):
            _backward(model, batch)
    return {
        (i, p.path): _size(squares, (i, p.path), p.experts).float()
        for i, projections in wanted.items()
        for p in projections
    }


def _take(squares: Squares, layer: int, experts: int, event: Event) -> None:
    count = 1 if event.expert is None else experts
    squares.add((layer, event.path), event.x_NI.double(), event.expert, count)


def _size(squares: Squares, key: Key, experts: bool) -> Tensor:
    """The root of the mean square (I), of experts (E, I)."""
    mean_EI, calls_E = squares.mean(key), squares.counts[key]
    if not experts:
        return mean_EI[0].sqrt()
    mean_EI[calls_E == 0] = mean_EI[calls_E > 0].mean(0)
    return mean_EI.sqrt()


def _backward(model: Model, batch: Tokens) -> None:
    """Run one batch forward and backward; parameters collect nothing."""
    embedding = model.get_input_embeddings()
    ids = batch.input_ids.to(embedding.weight.device)
    mask = None if batch.attention_mask is None else batch.attention_mask.to(ids.device)
    with torch.no_grad():
        states = embedding(ids)
    states = states.detach().requires_grad_()
    with torch.enable_grad():
        options = {"use_cache": False, **logits_alone(model.config)}
        logits = model(inputs_embeds=states, attention_mask=mask, **options).logits
        wanted = ids[:, 1:] if mask is None else ids[:, 1:].masked_fill(~mask[:, 1:].bool(), -100)
        loss = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), wanted.flatten(), reduction="sum"
        )
        torch.autograd.backward(loss, inputs=[states])
