"""Second-order information of HEAPr: how the loss curves in the directions that neurons write to.

With g_t the gradient of the loss at a layer's output, the loss of leaving neuron j of expert i out
is to second order half the sum over tokens of (w_t h_tj)^2 times the mean of (g_t . d_j)^2 over the
tokens that expert i runs: the diagonal of d^T G d, G being the mean of g g^T. No matrix is formed.

One layer's weights are in memory at a time: the tokens go forward once, what enters every layer is
kept (on disk above a limit), and the gradient goes back layer by layer, each run again.

Shape suffixes: T tokens, E experts, M neurons of one, S of the shared path, D hidden size, B
windows, L tokens of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from moesaic.arch.dense import Arch
from moesaic.data.text import IGNORED, Tokens
from moesaic.distributed import gathered
from moesaic.objectives import next_token_loss
from moesaic.observation.job import Job
from moesaic.observation.stream import Block, LayerStream, Spill, valid


@dataclass(frozen=True)
class Curvature:
    """Of one layer's neurons, on the CPU."""

    routed_EM: Tensor
    """float64: mean of (g . d_j)^2 over the expert's tokens."""
    shared_S: Tensor
    """float64: of the shared path's neurons, over all tokens; empty without one."""


@dataclass
class _Sums:
    """Sums over tokens, and their numbers."""

    routed_EM: Tensor
    calls_E: Tensor
    shared_S: Tensor
    tokens: int = 0

    @classmethod
    def of(cls, view: Any) -> _Sums:
        width = view.weights_of(0)[-1].shape[1]
        shared = 0 if view.shared_ffn is None else view.shared_ffn.width
        return cls(
            torch.zeros(view.count, width, dtype=torch.float64),
            torch.zeros(view.count, dtype=torch.int64),
            torch.zeros(shared, dtype=torch.float64),
        )

    def add(self, view: Any, x_TD: Tensor, g_TD: Tensor) -> None:
        """Take in the tokens of a batch: the layer's input, and the gradient at its output."""
        self.tokens += len(x_TD)
        g_TD = g_TD.float()
        for i, rows, _ in view.weighted(x_TD):
            self.calls_E[i] += len(rows)
            self.routed_EM[i] += _squares(g_TD[rows], view.weights_of(i)[-1])
        if view.shared_ffn is not None:
            self.shared_S += _squares(g_TD, view.shared_ffn.down_DM)

    def mean(self) -> Curvature:
        """The means over the tokens of all processes."""
        parts = gathered(self)
        calls_E = sum(p.calls_E for p in parts).clamp(min=1)  # type: ignore[union-attr]
        tokens = max(1, sum(p.tokens for p in parts))
        routed_EM = torch.stack([p.routed_EM for p in parts]).sum(0)
        shared_S = torch.stack([p.shared_S for p in parts]).sum(0)
        return Curvature(routed_EM / calls_E[:, None], shared_S / tokens)


def _squares(g_ND: Tensor, down_DM: Tensor) -> Tensor:
    """sum over tokens of (g . d_j)^2, (M,)."""
    return (g_ND @ down_DM.float()).square().sum(0, dtype=torch.float64).cpu()


@torch.no_grad()
def curvatures(job: Job[Arch], layers: Sequence[int]) -> dict[int, Curvature]:
    """The curvature of some layers' neurons, by layer.

    Args:
        job: the model and the calibration tokens.
        layers: the layers that are slimmed.
    """
    stream = job.stream(layers, job.arch.view, job.share[0])
    states, kwargs = stream.record()
    entering: list[Spill] = []
    handed: list[list[Any]] = []
    gradients = Spill(1 << 30)
    found: dict[int, Curvature] = {}
    try:
        for block in stream.blocks(kwargs):
            entering.append(_kept(states))
            handed.append(block.handed(states))
            block.run(states)
        for gradient in _of_head(stream, states):
            gradients.append(gradient)
        order = range(stream.count - 1, min(layers) - 1, -1)
        steps = job.track(stream.blocks(kwargs, order=order), "Gradients", len(order))
        for block in steps:
            view = job.arch.view(block.layer) if block.index in layers else None
            sums = None if view is None else _Sums.of(view)
            masks = stream.masks()
            for b, before in enumerate(entering[block.index]):
                given, mask = handed[block.index][b], next(masks)
                with _watched(job.arch, block, sums is not None) as seen:
                    gradients.replace(b, _through(block, b, before, given, gradients[b], seen))
                if sums is not None:
                    sums.add(view, *(valid(t, mask) for t in seen))
            if sums is not None:
                found[block.index] = sums.mean()
    finally:
        for spill in (states, gradients, *entering):
            spill.clear()
    return found


def _kept(states: Spill) -> Spill:
    copied = Spill(1 << 30)
    for tensor in states:
        copied.append(tensor.clone())
    return copied


def _of_head(stream: LayerStream[Any], states: Spill) -> Iterator[Tensor]:
    """Batches of the summed next-token loss's gradient at the last layer's output (B, L, D)."""
    leaves = [last.detach().requires_grad_() for last in states]
    heads = stream.heads(leaves, logits=True, gradients=True)
    for leaf, (logits, batch) in zip(leaves, heads, strict=True):
        with torch.enable_grad():
            loss = next_token_loss(logits, _labels(batch).to(logits.device))
            (gradient,) = torch.autograd.grad(loss, leaf)
        yield gradient


def _labels(batch: Tokens) -> Tensor:
    ids, mask = batch.input_ids, batch.attention_mask
    return ids if mask is None else ids.masked_fill(~mask.bool(), IGNORED)


@contextmanager
def _watched(arch: Arch, block: Block, wanted: bool) -> Iterator[list[Tensor]]:
    """Inside, a wanted layer's FFN leaves its input and what its parts add up to in a list."""
    seen: list[Tensor] = []
    handles: list[RemovableHandle] = []
    if wanted:  # some layers have no FFN
        ffn = arch.ffn_of(block.layer)
        handles.append(ffn.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
        handles.append(arch.watch(ffn, seen.append))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _through(
    block: Block,
    batch: int,
    before: Tensor,
    handed: object,
    gradient: Tensor,
    seen: list[Tensor],
) -> Tensor:
    """One batch back through one layer.

    Args:
        block: the layer.
        batch: the batch's number.
        before: what enters the layer (B, L, D).
        handed: what the layer before hands on beside it.
        gradient: of the loss at what leaves it (B, L, D).
        seen: the FFN's input and output, in whose place the gradient at the output comes.

    Returns:
        the gradient at ``before``.
    """
    with torch.enable_grad():
        leaf = before.detach().requires_grad_()
        after = block.output(batch, leaf, handed)
        back, *at_output = torch.autograd.grad(after, (leaf, *seen[1:]), gradient.to(after.device))
    seen[:] = [*(x.detach() for x in seen[:1]), *at_output]
    return back
