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
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor

from moesaic.foreign import Track
from moesaic.methods.channels.projections import Projection
from moesaic.observation.backward import backward
from moesaic.observation.stream import Block, LayerStream
from moesaic.observation.tap import Event, Squares, tapped

Key = tuple[int, str]
"""A decoder layer, and the path of a projection in it."""


def gradient_sizes(
    stream: LayerStream[object], skipping: Mapping[int, Collection[Projection]], track: Track
) -> dict[Key, Tensor]:
    """The root mean square of the loss's gradient by channel, float32: (I), of experts (E, I).

    The loss is the sum over a window's tokens, so that a gradient is what one token's value changes
    of everything after it. An expert that runs for none of the tokens has the mean of the others;
    a projection that no gradient reaches is left out.

    Args:
        stream: the model, and the tokens; padding is left out of the loss.
        skipping: projections by decoder layer.
        track: shows progress.
    """
    squares: Squares[Key] = Squares()
    arch = stream.arch

    def watch(block: Block) -> AbstractContextManager[None]:
        take = partial(_take, squares, block.index, arch.experts_in(block.layer))
        paths = [p.path for p in skipping[block.index]]
        return tapped(block.layer, arch, paths, take, stream.masks(), gradients=True)

    return {
        (i, p.path): _size(squares, (i, p.path), p.experts).float()
        for i in backward(stream, skipping, watch, track)
        for p in skipping[i]
        if (i, p.path) in squares.sums
    }


def _take(squares: Squares[Key], layer: int, experts: int, event: Event) -> None:
    count = 1 if event.expert is None else experts
    squares.add((layer, event.path), event.x_NI.double(), event.expert, count)


def _size(squares: Squares[Key], key: Key, experts: bool) -> Tensor:
    """The root of the mean square (I), of experts (E, I)."""
    mean_EI, calls_E = squares.mean(key), squares.counts[key]
    if not experts:
        return mean_EI[0].sqrt()
    mean_EI[calls_E == 0] = mean_EI[calls_E > 0].mean(0)
    return mean_EI.sqrt()
