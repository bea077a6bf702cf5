"""Statistics of single neurons: how much each writes into the residual stream.

A neuron is a row of gate and up and a column of down together; a dense FFN is one expert that
every token runs.

Shape suffixes: T tokens, E experts, M neurons of one, S neurons of the shared path, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import reduce

import torch
from torch import Tensor, nn

from moesaic.arch.dense import FFN, Arch
from moesaic.arch.mixture import MoEArch
from moesaic.distributed import gathered
from moesaic.observation.stream import LayerTokens
from moesaic.observation.tap import Event, Masks, square_sums, tapped


@dataclass
class NeuronStats:
    """Statistics of one layer's neurons, on the CPU: sums over tokens, and sizes of weights."""

    tokens: int
    calls_E: Tensor
    """Tokens routed to each expert, int64."""
    energy_EM: Tensor
    """Sum of (w_t h_tj)^2, float64."""
    reach_EM: Tensor
    """Norm ||W_down[:, j]||, float64."""
    size_EM: Tensor
    """Norm of all of a neuron's weights, float64."""
    shared_energy_S: Tensor
    """Energy of the shared path's neurons, float64; empty without a shared path."""
    shared_reach_S: Tensor
    shared_size_S: Tensor

    @classmethod
    def none(cls) -> NeuronStats:
        """Return empty statistics."""
        sums = {field.name: torch.zeros(0, dtype=torch.float64) for field in fields(cls)[2:]}
        return cls(tokens=0, calls_E=torch.zeros(0, dtype=torch.int64), **sums)

    def merge(self, other: NeuronStats) -> NeuronStats:
        """Return the statistics of both token sets together."""
        summed = ("tokens", "calls_E", "energy_EM", "shared_energy_S")
        merged = {
            field.name: getattr(self, field.name)
            + (getattr(other, field.name) if field.name in summed else 0)
            for field in fields(self)
        }
        return NeuronStats(**merged)

    @classmethod
    def merged(cls, parts: Iterable[NeuronStats]) -> NeuronStats:
        """Return the statistics of several token sets together."""
        return reduce(cls.merge, parts)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by name, the number of tokens as a tensor of one element."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: torch.tensor(t) if n == "tokens" else t.contiguous() for n, t in named.items()}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> NeuronStats:
        """Return statistics from the output of :meth:`tensors`."""
        rest = {name: tensor for name, tensor in tensors.items() if name != "tokens"}
        return cls(tokens=int(tensors["tokens"]), **rest)


def norms(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the norm of each neuron's down column, and of all its weights (M,), float64.

    Args:
        weights: any number of matrices with neurons as rows (M, D), then down (D, M).

    >>> up, down = torch.tensor([[3.0], [0.0]]), torch.tensor([[4.0, 2.0]])
    >>> [t.tolist() for t in norms([up, down])]
    [[4.0, 2.0], [5.0, 2.0]]
    """
    *rows, down = weights
    # 32 rows at a time: as float64 they fit into a processor's cache
    reach_M = torch.stack([w.double().square().sum(0) for w in down.split(32)]).sum(0)
    size_M = reach_M.clone()
    for weight in rows:
        size_M += torch.cat([w.double().square().sum(1) for w in weight.split(32)])
    return reach_M.sqrt().cpu(), size_M.sqrt().cpu()


def weight_stats(view: FFN) -> NeuronStats:
    """Return statistics without tokens: sizes of weights, and sums that are zero."""
    # two large tensors: small ones between the temporaries of norms would fragment memory
    reach_EM, size_EM = (torch.empty(view.count, view.width, dtype=torch.float64) for _ in range(2))
    for i in range(view.count):
        reach_EM[i], size_EM[i] = norms(view.weights_of(i))
    none, ffn = torch.zeros(0, dtype=torch.float64), view.shared_ffn
    shared = (none, none) if ffn is None else norms(ffn.weights_of(0))
    return NeuronStats(
        tokens=0,
        calls_E=torch.zeros(view.count, dtype=torch.int64),
        energy_EM=torch.zeros_like(reach_EM),
        reach_EM=reach_EM,
        size_EM=size_EM,
        shared_energy_S=torch.zeros_like(shared[0]),
        shared_reach_S=shared[0],
        shared_size_S=shared[1],
    )


def no_stats(experts: int, width: int, shared: int) -> NeuronStats:
    """Return statistics of the right shape with zeros, for dry runs.

    Args:
        experts: number of experts.
        width: neurons of each.
        shared: neurons of the shared path.
    """
    zeros_EM, zeros_S = (torch.zeros(n, dtype=torch.float64) for n in ((experts, width), shared))
    calls_E = torch.zeros(experts, dtype=torch.int64)
    return NeuronStats(0, calls_E, *[zeros_EM] * 3, *[zeros_S] * 3)


@torch.no_grad()
def observe_neurons(site: LayerTokens[FFN]) -> NeuronStats:
    """Run a site's tokens once, and return the statistics of the neurons."""
    stats = weight_stats(site.view)
    for x_TD in site.inputs():
        stats.tokens += len(x_TD)
        for i, rows, h_NM in site.view.weighted(x_TD):
            stats.calls_E[i] += len(rows)
            stats.energy_EM[i] += square_sums(h_NM)
        h_TS = site.view.shared_weighted(x_TD)
        if h_TS is not None:
            stats.shared_energy_S += square_sums(h_TS)
    return stats


@contextmanager
def watching(layer: nn.Module, arch: Arch, stats: NeuronStats, masks: Masks) -> Iterator[None]:
    """Add what passes through a layer to ``stats`` while the context lasts; nothing is run twice.

    The shared path's neurons and the number of tokens are not counted.

    Args:
        layer: the decoder layer.
        arch: its architecture.
        stats: statistics to add to.
        masks: per batch the tokens to count (B, L); None for all.
    """
    routed = isinstance(arch, MoEArch) and arch.is_moe(layer)
    inside = f"{arch.experts}.down_proj" if isinstance(arch, MoEArch) and routed else arch.ffn.down

    def add(event: Event) -> None:
        h_NM = event.x_NI.float()
        if event.weights_N1 is not None:
            h_NM = h_NM * event.weights_N1.float()
        stats.calls_E[event.expert or 0] += len(h_NM)
        stats.energy_EM[event.expert or 0] += square_sums(h_NM)

    with tapped(layer, arch, [f"{arch.inside}{inside}"], add, masks, instead=True):
        yield


@dataclass(frozen=True)
class Products:
    """Inner products and down projections for the scores of pairs of neurons, float64."""

    gram_EMM: Tensor
    down_EDM: Tensor
    shared_SS: Tensor
    shared_DS: Tensor

    @classmethod
    def of(cls, site: LayerTokens[FFN], shared_out: bool) -> Products:
        """Compute the products over a layer's tokens, or those of all processes."""
        parts = gathered(grams(site)) if shared_out else [grams(site)]
        gram_EMM, shared_SS = (torch.stack(p).sum(0) for p in zip(*parts, strict=True))
        view, ffn = site.view, site.view.shared_ffn
        downs = [view.weights_of(i)[-1].detach().double().cpu() for i in range(view.count)]
        shared_DS = downs[0][:, :0] if ffn is None else ffn.down_DM.detach().double().cpu()
        return cls(gram_EMM, torch.stack(downs), shared_SS, shared_DS)


@torch.no_grad()
def grams(site: LayerTokens[FFN]) -> tuple[Tensor, Tensor]:
    """Return inner products of neurons over a site's tokens: sum of (w h_j)(w h_k), float64.

    Returns:
        those of each expert's neurons (E, M, M), and of the shared path's (S, S), empty without
        one.
    """
    view = site.view
    width = view.weights_of(0)[-1].shape[1]
    shared = 0 if view.shared_ffn is None else view.shared_ffn.width
    like = torch.zeros(0, dtype=torch.float64)
    gram_EMM, shared_SS = like.new_zeros(view.count, width, width), like.new_zeros(shared, shared)
    for x_TD in site.inputs():
        for i, _, h_NM in view.weighted(x_TD):
            gram_EMM[i] += (h_NM.T @ h_NM).cpu()
        h_TS = view.shared_weighted(x_TD)
        if h_TS is not None:
            shared_SS += (h_TS.T @ h_TS).cpu()
    return gram_EMM, shared_SS
