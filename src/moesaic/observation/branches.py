"""KL at a model's output after changing some layers, for many changes in one pass.

Every change branches off at the first layer in which it differs; until then it shares the hidden
states of others. So a model is read from disk once for all of them, and layers before a change are
run once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from moesaic.arch.dense import Arch
from moesaic.data.text import Tokens
from moesaic.losses import divergence, in_chunks
from moesaic.observation.stream import LayerStream, SpilledList
from moesaic.plans.base import LayerPlan
from moesaic.surgery import applied
from moesaic.types import Track, silent

StandIn = Callable[[nn.Module], AbstractContextManager[nn.Module]]
"""Function from a layer to a context with the module that replaces it."""
Original = Callable[[Sequence[Tokens]], Iterator[tuple[torch.Tensor, Tokens]]]
"""Function from batches of tokens to the logits (B, L, V) and tokens of each."""
Change = Mapping[int, LayerPlan | StandIn]
"""Plans, or functions that replace a layer, by layer index."""
LIMIT = 4 << 30
"""Bytes of hidden states that all branches together keep in memory."""


@torch.no_grad()
def branches(
    stream: LayerStream[object], changes: Sequence[Change], track: Track = silent
) -> list[SpilledList]:
    """Return the last layer's output under each of several changes.

    Args:
        stream: the model, and the tokens.
        changes: changes of whole layers; those that share a layer's change hold the same object.
        track: shows progress.

    Returns:
        for each change its hidden states, one entry per batch (B, L, D), to be cleared by the
        caller; equal changes share one object.
    """
    states, kwargs = stream.record()
    groups = [(list(range(len(changes))), states)]
    for block in track(stream.blocks(kwargs), "Running changes", stream.count):
        regrouped: list[tuple[list[int], SpilledList]] = []
        for members, hidden in groups:
            plans = {id(p): p for n in members for p in (changes[n].get(block.index),)}
            for place, (key, plan) in enumerate(plans.items(), 1):
                some = [n for n in members if id(changes[n].get(block.index)) == key]
                with changed(block.layer, stream.arch, plan) as layer:
                    if place == len(plans):  # the last branch reuses the states
                        block.run(hidden, layer)
                        regrouped.append((some, hidden))
                        continue
                    branched = SpilledList(LIMIT // len(changes))
                    block.branch(hidden, branched, layer or block.layer)
                    regrouped.append((some, branched))
        groups = regrouped
    by_change = {n: hidden for members, hidden in groups for n in members}
    return [by_change[n] for n in range(len(changes))]


def changed(
    layer: nn.Module, arch: Arch, plan: LayerPlan | StandIn | None
) -> AbstractContextManager[nn.Module | None]:
    """Return a context with the module that replaces a layer under a plan; None without a plan."""
    if plan is None:
        return nullcontext()
    return applied(layer, arch, plan) if isinstance(plan, LayerPlan) else plan(layer)


@torch.no_grad()
def divergences(
    stream: LayerStream[object],
    changes: Sequence[Change],
    track: Track = silent,
    original: Original | None = None,
) -> torch.Tensor:
    """Return KL(original || changed) of the next token's distribution, in nats per token.

    Args:
        stream: the model, and the tokens.
        changes: as for :func:`branches`.
        track: shows progress.
        original: logits to compare with; by default those of the unchanged stream.

    Returns:
        KL by change and window (C, N), float64. Windows are weighted by their tokens: the mean over
        windows is the mean over all tokens.
    """
    first: list[Change] = [] if original else [{}]
    finals = branches(stream, [*first, *changes], track)
    ours = finals[len(first) :]
    different = [*dict.fromkeys(ours)]  # equal changes share one object
    windows = [b.rows(slice(n, n + 1)) for b in stream.batches for n in range(len(b.input_ids))]
    sums_CN, tokens_N = list[torch.Tensor](), list[int]()
    try:
        with stream.headed(logits=True) as finish:
            unchanged = (
                (logits for logits, _ in original(windows))
                if original
                else map(finish, windows, _rows(finals[0]))
            )
            together = zip(windows, unchanged, *map(_rows, different), strict=True)
            tracked = track(together, "Comparing outputs", len(windows))
            for window, logits, *states in tracked:
                labels = window.labels.to(logits.device)
                chunks = [*in_chunks(logits, labels)]
                sums = []
                for last in states:
                    pairs = zip(chunks, in_chunks(finish(window, last), labels), strict=True)
                    sums.append(torch.cat([divergence(p_TV, q_TV) for p_TV, q_TV in pairs]).sum())
                sums_CN.append(torch.stack(sums))
                tokens_N.append(sum(map(len, chunks)))
        share = torch.tensor(tokens_N).double().mean().clamp(min=1.0)
        places_C = [different.index(spill) for spill in ours]
        return torch.stack(sums_CN, 1)[places_C] / share
    finally:
        for spill in finals:
            spill.clear()


def _rows(batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield windows as batches of their own: logits of several would be too large."""
    return (window for batch in batches for window in batch.split(1))
