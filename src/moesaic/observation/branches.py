"""KL at a model's output after changing some layers, for many changes in one pass.

Every change branches off at the first layer in which it differs; until then it shares the hidden
states of others. So a model is read from disk once for all of them, and layers before a change are
run once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.data.text import Tokens
from moesaic.losses import divergence, in_chunks
from moesaic.modules.running import SpilledList
from moesaic.observation.stream import LayerStream
from moesaic.plans.base import LayerPlan
from moesaic.surgery import converted_copy
from moesaic.types import Track, silent

StandIn = Callable[[nn.Module], AbstractContextManager[nn.Module]]
"""Function from a layer to a context with the module that replaces it."""
Metric = Callable[[Tensor, Tokens], Callable[[Tensor], Tensor]]
"""Function of one window's output and its tokens to a function that compares another output of the
window: its losses by token, or by whatever else it counts (T,)."""
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
                with layer_replacement(block.layer, stream.arch, plan) as layer:
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


def layer_replacement(
    layer: nn.Module, arch: Arch, plan: LayerPlan | StandIn | None
) -> AbstractContextManager[nn.Module | None]:
    """Return a context with the module that replaces a layer under a plan; None without a plan."""
    if plan is None:
        return nullcontext()
    if not isinstance(plan, LayerPlan):
        return plan(layer)
    return plan.masked(arch, layer) or converted_copy(layer, arch, plan)


def _of_next_token(logits_BLV: Tensor, window: Tokens) -> Callable[[Tensor], Tensor]:
    """Return a function of other logits of a window to KL(these || those) of each token (T,)."""
    labels = window.labels.to(logits_BLV.device)
    chunks = [*in_chunks(logits_BLV, labels)]

    def compare(other_BLV: Tensor) -> Tensor:
        pairs = zip(chunks, in_chunks(other_BLV, labels), strict=True)
        return torch.cat([divergence(p_TV, q_TV) for p_TV, q_TV in pairs])

    return compare


@torch.no_grad()
def window_sums(
    stream: LayerStream[object],
    changes: Sequence[Change],
    track: Track = silent,
    metric: Metric = _of_next_token,
    *,
    logits: bool = True,
    original: SpilledList | None = None,
) -> tuple[Tensor, Tensor]:
    """Return how much changes alter a model's output, summed over each window.

    Args:
        stream: the model, and the tokens.
        changes: as for :func:`branches`.
        track: shows progress.
        metric: compares the outputs of one window; by default by KL of the next token.
        logits: False to compare the last hidden states after the final norm.
        original: the unchanged last layer's output, from :func:`branches`; by default it is run.

    Returns:
        sums by change and window (C, N), and the number of tokens of each window, or of whatever
        else the metric returns values of (N,); float64.
    """
    first: list[Change] = [{}] if original is None else []
    finals = branches(stream, [*first, *changes], track)
    ours = finals[len(first) :]
    different = [*dict.fromkeys(ours)]  # equal changes share one object
    windows = [b.rows(slice(n, n + 1)) for b in stream.batches for n in range(len(b.input_ids))]
    sums_NC, tokens_N = list[Tensor](), list[int]()
    try:
        with stream.headed(logits=logits) as finish:
            unchanged = finals[0] if original is None else original
            together = zip(windows, *map(_rows, [unchanged, *different]), strict=True)
            for window, before, *states in track(together, "Comparing outputs", len(windows)):
                compare = metric(finish(window, before), window)
                losses = [compare(finish(window, last)) for last in states]
                sums_NC.append(torch.stack([loss_T.double().sum().cpu() for loss_T in losses]))
                tokens_N.append(len(losses[0]))
        places_C = [different.index(spill) for spill in ours]
        return torch.stack(sums_NC, 1)[places_C], torch.tensor(tokens_N).double()
    finally:
        for spill in finals:
            spill.clear()


def divergences(
    stream: LayerStream[object], changes: Sequence[Change], track: Track = silent
) -> Tensor:
    """Return KL(original || changed) of the next token's distribution, in nats per token.

    Args:
        stream: the model, and the tokens.
        changes: as for :func:`branches`.
        track: shows progress.

    Returns:
        KL by change and window (C, N), float64. Windows are weighted by their tokens: the mean over
        windows is the mean over all tokens.
    """
    sums_CN, tokens_N = window_sums(stream, changes, track)
    return sums_CN / tokens_N.mean().clamp(min=1.0)


def _rows(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield windows as batches of their own: logits of several would be too large."""
    return (window for batch in batches for window in batch.split(1))
