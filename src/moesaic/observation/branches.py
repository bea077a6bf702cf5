"""What changing some layers does to a model's output, for many changes at once.

Every change goes its own way from the first layer that it alone changes; as long as changes have
been alike, they go together. So a model that is read from disk is read once for all of them, and
layers before a change are run once for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch

from moesaic.foreign import Track, silent
from moesaic.layers.base import LayerPlan
from moesaic.objectives import distillation_loss, predicting
from moesaic.observation.backward import labels_of
from moesaic.observation.stream import LayerStream, Spill
from moesaic.surgery import applied

Change = Mapping[int, LayerPlan]
"""Some layers of a model, by number, as they would be."""
LIMIT = 4 << 30
"""Bytes of hidden states that all branches together keep in memory."""


@torch.no_grad()
def branches(
    stream: LayerStream[object], changes: Sequence[Change], track: Track = silent
) -> list[Spill]:
    """The last layer's output under each of several changes.

    Args:
        stream: the model, and the tokens.
        changes: whole layers; the plan of a layer that several share is one object.
        track: shows progress.

    Returns:
        for each change its hidden states, one entry a batch (B, L, D), to be cleared by the caller;
        those of changes that are the same are one object.
    """
    states, kwargs = stream.record()
    groups = [(list(range(len(changes))), states)]
    for block in track(stream.blocks(kwargs), "Comparing outputs", stream.count):
        grown: list[tuple[list[int], Spill]] = []
        for members, hidden in groups:
            plans = {id(p): p for n in members for p in (changes[n].get(block.index),)}
            for place, (key, plan) in enumerate(plans.items(), 1):
                some = [n for n in members if id(changes[n].get(block.index)) == key]
                changed = None if plan is None else applied(block.layer, stream.arch, plan)
                with changed or nullcontext() as layer:
                    if place == len(plans):  # the last to leave takes the states along
                        block.run(hidden, layer)
                        grown.append((some, hidden))
                        continue
                    born = Spill(LIMIT // len(changes))
                    block.branch(hidden, born, layer or block.layer)
                    grown.append((some, born))
        groups = grown
    by_change = {n: hidden for members, hidden in groups for n in members}
    return [by_change[n] for n in range(len(changes))]


@torch.no_grad()
def divergences(
    stream: LayerStream[object], changes: Sequence[Change], track: Track = silent
) -> list[float]:
    """KL(original || changed) of the next token's distribution, in nats a token.

    Args:
        stream: the model, and the tokens.
        changes: as of :func:`branches`.
        track: shows progress.
    """
    reference, *finals = branches(stream, [{}, *changes], track)
    try:
        return [_divergence(stream, reference, final) for final in finals]
    finally:
        for spill in (reference, *finals):
            spill.clear()


def _divergence(stream: LayerStream[object], reference: Spill, final: Spill) -> float:
    pairs: Iterator[torch.Tensor] = map(torch.cat, zip(reference, final, strict=True))
    total, count = 0.0, 0
    for both, batch in stream.heads(pairs, logits=True):
        reference_logits, logits = both.chunk(2)
        labels = labels_of(batch).to(both.device)
        total += distillation_loss(logits, reference_logits, labels).item()
        count += int(predicting(labels).sum())
    return total / max(1, count)
