"""Backpropagation layer by layer: the loss's gradient, from the last layer to the first.

One layer's weights are in memory at a time: after one forward pass, which keeps every layer's input
(on disk above a limit), the gradient is carried back layer by layer, each run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import tee

import torch
from torch import Tensor

from moesaic.losses import next_token_loss
from moesaic.observation.stream import Block, LayerStream, SpilledList
from moesaic.types import Track

LIMIT = 1 << 30
"""Bytes of the layers' inputs kept in memory."""
Watch = Callable[[Block], AbstractContextManager[object]]


@torch.no_grad()
def backward(
    stream: LayerStream[object], layers: Collection[int], watch: Watch, track: Track
) -> Iterator[int]:
    """Carry the gradient of the summed next-token loss back through the layers.

    Args:
        stream: the model, and the tokens; padding is left out of the loss.
        layers: the layers that are watched; those before the first of them are not run again.
        watch: returns a context for an open layer, in which every batch in turn runs forward and
            then backward.
        track: shows progress.

    Yields:
        the index of each watched layer after all batches have passed it, while it is open.
    """
    states, kwargs = stream.record()
    batches = len(states)
    entering, gradients = SpilledList(LIMIT), SpilledList(LIMIT)
    handed: list[list[object]] = []
    try:
        for block in stream.blocks(kwargs):
            for before in states:
                entering.append(before.clone())
            handed.append(block.handed(states))
            block.run(states)
        for gradient in _head_gradients(stream, states):
            gradients.append(gradient)
        order = range(stream.count - 1, min(layers) - 1, -1)
        for block in track(stream.blocks(kwargs, order=order), "Gradients", len(order)):
            i, watched = block.index, block.index in layers
            with watch(block) if watched else nullcontext():
                _through_layer(block, entering, handed[i], gradients, batches)
            if watched:
                yield i
    finally:
        for spill in (states, gradients, entering):
            spill.clear()


def _through_layer(
    block: Block, entering: SpilledList, handed: list[object], gradients: SpilledList, batches: int
) -> None:
    """Carry every batch back through one layer; ``gradients`` become those at its input."""
    for b in range(batches):
        with torch.enable_grad():
            leaf = entering[block.index * batches + b].detach().requires_grad_()
            after = block.output(b, leaf, handed[b])
            (gradient,) = torch.autograd.grad(after, leaf, gradients[b].to(after.device))
        gradients.replace(b, gradient)


def _head_gradients(stream: LayerStream[object], states: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield batches of the loss's gradient at the last layer's output (B, L, D)."""
    leaves, outputs = tee(last.detach().requires_grad_() for last in states)
    heads = stream.heads(outputs, logits=True, gradients=True)
    for leaf, (logits, batch) in zip(leaves, heads, strict=True):
        with torch.enable_grad():
            loss = next_token_loss(logits, batch.labels.to(logits.device))
            (gradient,) = torch.autograd.grad(loss, leaf)
        yield gradient
