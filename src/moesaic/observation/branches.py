"""What changing some layers does to a model's output, for many changes at once.

Every change goes its own way from the first layer that it alone changes; as long as changes have
been alike, they go together. So a model that is read from disk is read once for all of them, and
layers before a change are run once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from moesaic.arch.dense import Arch
from moesaic.data.text import Tokens
from moesaic.losses import divergence, in_chunks
from moesaic.observation.stream import LayerStream, Spill
from moesaic.plans.base import LayerPlan
from moesaic.surgery import applied
from moesaic.types import Track, silent

StandIn = Callable[[nn.Module], AbstractContextManager[nn.Module]]
"""Makes of a layer what stands in its place while the context lasts."""
Original = Callable[[Sequence[Tokens]], Iterator[tuple[torch.Tensor, Tokens]]]
"""What a model makes of batches of tokens: the logits (B, L, V) of each, and the tokens."""
Change = Mapping[int, LayerPlan | StandIn]
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
        changes: whole layers; what several share in a layer is one object.
        track: shows progress.

    Returns:
        for each change its hidden states, one entry a batch (B, L, D), to be cleared by the caller;
        those of changes that are the same are one object.
    """
    states, kwargs = stream.record()
    groups = [(list(range(len(changes))), states)]
    for block in track(stream.blocks(kwargs), "Running changes", stream.count):
        regrouped: list[tuple[list[int], Spill]] = []
        for members, hidden in groups:
            plans = {id(p): p for n in members for p in (changes[n].get(block.index),)}
            for place, (key, plan) in enumerate(plans.items(), 1):
                some = [n for n in members if id(changes[n].get(block.index)) == key]
                with changed(block.layer, stream.arch, plan) as layer:
                    if place == len(plans):  # the last branch reuses the states
                        block.run(hidden, layer)
                        regrouped.append((some, hidden))
                        continue
                    branched = Spill(LIMIT // len(changes))
                    block.branch(hidden, branched, layer or block.layer)
                    regrouped.append((some, branched))
        groups = regrouped
    by_change = {n: hidden for members, hidden in groups for n in members}
    return [by_change[n] for n in range(len(changes))]


def changed(
    layer: nn.Module, arch: Arch, plan: LayerPlan | StandIn | None
) -> AbstractContextManager[nn.Module | None]:
    """Inside, what stands in a layer's place under a plan; None where nothing does."""
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
    """KL(original || changed) of the next token's distribution, in nats a token.

    Args:
        stream: the model, and the tokens.
        changes: as of :func:`branches`.
        track: shows progress.
        original: what is compared with, where the model is another one already.

    Returns:
        for each change and window (C, N), float64. Windows weigh as much as they have tokens: the
        mean over windows is the mean over all tokens.
    """
    first: list[Change] = [] if original else [{}]
    finals = branches(stream, [*first, *changes], track)
    ours = finals[len(first) :]
    different = [*dict.fromkeys(ours)]  # what is the same model is one object
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
    """The windows of batches, each a batch of its own: logits of all at once would be too large."""
    return (window for batch in batches for window in batch.split(1))
