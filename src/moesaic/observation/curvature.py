"""Second-order information of HEAPr: how the loss curves in the directions that neurons write to.

With g_t the gradient of the loss at a layer's output, the loss of leaving neuron j of expert i out
is to second order half the sum over tokens of (w_t h_tj)^2 times the mean of (g_t . d_j)^2 over the
tokens that expert i runs: the diagonal of d^T G d, G being the mean of g g^T. No matrix is formed.

Shape suffixes: T tokens, E experts, M neurons of one, S of the shared path, D hidden size, B
windows, L tokens of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moesaic.arch.dense import FFN, Arch
from moesaic.distributed import gathered
from moesaic.observation.backward import backward
from moesaic.observation.job import Job
from moesaic.observation.stream import Block, LayerStream, valid


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
    def of(cls, view: FFN) -> _Sums:
        width = view.weights_of(0)[-1].shape[1]
        shared = 0 if view.shared_ffn is None else view.shared_ffn.width
        return cls(
            torch.zeros(view.count, width, dtype=torch.float64),
            torch.zeros(view.count, dtype=torch.int64),
            torch.zeros(shared, dtype=torch.float64),
        )

    def add(self, view: FFN, x_TD: Tensor, g_TD: Tensor) -> None:
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
        calls_E = torch.stack([p.calls_E for p in parts]).sum(0).clamp(min=1)
        tokens = max(1, sum(p.tokens for p in parts))
        routed_EM = torch.stack([p.routed_EM for p in parts]).sum(0)
        shared_S = torch.stack([p.shared_S for p in parts]).sum(0)
        return Curvature(routed_EM / calls_E[:, None], shared_S / tokens)


def _squares(g_ND: Tensor, down_DM: Tensor) -> Tensor:
    """sum over tokens of (g . d_j)^2, (M,)."""
    return (g_ND @ down_DM.float()).square().sum(0, dtype=torch.float64).cpu()


def curvatures(job: Job[Arch], layers: Sequence[int]) -> dict[int, Curvature]:
    """The curvature of some layers' neurons, by layer.

    Args:
        job: the model and the calibration tokens.
        layers: the layers that are slimmed.
    """
    stream = job.stream(layers, job.arch.view, job.share[0])
    sums: dict[int, _Sums] = {}

    def watch(block: Block) -> AbstractContextManager[None]:
        view = job.arch.view(block.layer)
        sums[block.index] = _Sums.of(view)
        return _watched(stream, block, partial(sums[block.index].add, view))

    return {i: sums[i].mean() for i in backward(stream, layers, watch, job.track)}


@contextmanager
def _watched(
    stream: LayerStream[FFN], block: Block, take: Callable[[Tensor, Tensor], None]
) -> Iterator[None]:
    """Inside, what enters the layer's FFN, and the gradient at what its parts add up to."""
    entered: list[Tensor] = []
    masks, ffn = enumerate(stream.masks()), stream.arch.ffn_of(block.layer)

    def after(y: Tensor) -> None:
        x, (batch, mask) = entered.pop(), next(masks)

        def back(g: Tensor) -> None:
            with stream.handing(block, batch):
                take(valid(x.detach(), mask), valid(g, mask))

        y.register_hook(back)

    with stream.arch.enter(ffn, entered.append), stream.arch.watch(ffn, after):
        yield
