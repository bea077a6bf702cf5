"""Statistics of a mixture of experts, observed once for every later decision.

Sums over tokens for the criteria that score one expert at a time; for the exact reconstruction
error, every token's router logits and the inner products of all its experts' outputs. Statistics
of batches, processes and machines merge.

Shape suffixes: T tokens, N or a block B of them, S sampled ones, E experts, A those and the shared
ones that the router weighs, D hidden size, P = A (A + 1) / 2 packed pairs, X inputs of a router's
decision (:mod:`moesaic.arch.routing`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from math import isqrt

import torch
from torch import Tensor

from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.arch.routing import RoutingFunction
from moesaic.data.text import Tokens
from moesaic.distributed import gathered
from moesaic.errors import MoesaicError
from moesaic.observation.job import Job
from moesaic.observation.neuron_stats import NeuronStats, weight_stats
from moesaic.observation.stream import LayerTokens
from moesaic.observation.tap import square_sums

PARTS = ("weights", "outputs", "pairs", "gram", "neurons")
"""Statistics that may be observed besides the router: ``spread_E``; ``norm_E``, ``square_E`` and
``gated_E``; ``pair_EE``; ``gram_SP`` with ``cross_SA`` and ``delta_S``; ``neurons``. Others are
empty."""
EMPTY = torch.empty(0, dtype=torch.float64)
BLOCK_BYTES = 128 << 20
"""Bytes of expert outputs in memory at once."""


@dataclass
class ExpertStats:
    """Statistics of one routed layer, on the CPU."""

    calls_E: Tensor
    """|T_j|, tokens routed to each expert, int64.
    """
    gate_E: Tensor
    """Sum of the combine weights g_j over T_j, float64."""
    norm_E: Tensor
    """Sum of |f_j| over T_j, float64."""
    square_E: Tensor
    """Sum of |f_j|^2 over T_j, float64."""
    gated_E: Tensor
    """Sum of g_j |f_j| over T_j, float64."""
    pair_EE: Tensor
    """Sum of g_i g_j <f_i, f_j> over tokens, float64."""
    spread_E: Tensor
    """Mean |w| over root mean square of w, of each expert's weights, float64."""
    bias_E: Tensor
    """Choice bias of the router, or its factors by expert; empty if it has neither."""
    batch_T: Tensor
    """Calibration batch of each token, int64."""
    logits_TX: Tensor
    """Inputs of the router's decision, X numbers per token, float32."""
    sampled_T: Tensor
    """Tokens of which the Gram matrix is kept, bool."""
    gram_SP: Tensor
    """<f_i, f_j> for i <= j, packed, one row per sampled token, float32."""
    cross_SA: Tensor
    """<f_j, delta>, delta being the output error from earlier layers, float64; empty without."""
    delta_S: Tensor
    """|delta|^2, float64; empty without.
    """
    neurons: NeuronStats

    @classmethod
    def none(cls, experts: int, always: int = 0) -> ExpertStats:
        """Return empty statistics of routed, and ``always`` weighed shared experts."""
        weighed = experts + always
        return cls(
            calls_E=torch.zeros(experts, dtype=torch.int64),
            gate_E=torch.zeros(experts, dtype=torch.float64),
            norm_E=EMPTY,
            square_E=EMPTY,
            gated_E=EMPTY,
            pair_EE=EMPTY.view(0, 0),
            spread_E=EMPTY,
            bias_E=EMPTY.float(),
            batch_T=torch.zeros(0, dtype=torch.int64),
            logits_TX=torch.zeros(0, weighed),
            sampled_T=torch.zeros(0, dtype=torch.bool),
            gram_SP=torch.empty(0, weighed * (weighed + 1) // 2),
            cross_SA=EMPTY.view(0, 1).expand(0, weighed),
            delta_S=EMPTY,
            neurons=NeuronStats.none(),
        )

    @property
    def tokens(self) -> int:
        """Number of observed tokens."""
        return len(self.batch_T)

    @property
    def experts(self) -> int:
        """Routed experts of the layer."""
        return len(self.calls_E)

    @property
    def weighed(self) -> int:
        """Routed experts, plus shared experts that the router weighs."""
        return (isqrt(8 * self.gram_SP.shape[1] + 1) - 1) // 2

    def check(self) -> None:
        """Refuse statistics whose parts differ in size.

        Raises:
            ValueError: names the part.
        """
        tokens, weighed = self.tokens, max(self.experts, self.weighed)
        sampled = int(self.sampled_T.sum())
        sizes = {"T": tokens, "E": self.experts, "A": weighed, "P": weighed * (weighed + 1) // 2}
        sizes["X"] = self.logits_TX.shape[1]
        for name, tensor in self.tensors().items():
            axes = name.rpartition("_")[2]
            if "." in name or (not tensor.numel() and name != "sampled_T"):
                continue
            expected = [sampled if axis == "S" else sizes[axis] for axis in axes]
            if list(tensor.shape) != expected:
                raise ValueError(f"{name} is of shape {list(tensor.shape)}, not {expected}")

    def merge(self, other: ExpertStats) -> ExpertStats:
        """Return the statistics of both token sets, tokens in the order of their batches."""
        order_T = torch.cat([self.batch_T, other.batch_T]).argsort(stable=True)
        batch_S = [s.batch_T[s.sampled_T] for s in (self, other)]
        order_S = torch.cat(batch_S).argsort(stable=True)
        merged = {}
        for entry in fields(self):
            a, b = getattr(self, entry.name), getattr(other, entry.name)
            if entry.name in ("spread_E", "bias_E"):
                merged[entry.name] = a
            elif entry.name == "neurons":
                merged[entry.name] = a.merge(b)
            elif entry.name.endswith(("_E", "_EE")):
                merged[entry.name] = a + b
            else:
                both = torch.cat([a, b])
                by = order_T if entry.name.endswith(("_T", "_TX")) else order_S
                merged[entry.name] = both[by] if len(both) else both
        return ExpertStats(**merged)

    @classmethod
    def merged(cls, parts: Iterable[ExpertStats]) -> ExpertStats:
        """Return the statistics of several token sets together."""
        return reduce(cls.merge, parts)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by name, those of neurons under ``neurons.``."""
        outer = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "neurons"}
        inner = {f"neurons.{name}": tensor for name, tensor in self.neurons.tensors().items()}
        return {name: tensor.contiguous() for name, tensor in {**outer, **inner}.items()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> ExpertStats:
        """Return statistics from the output of :meth:`tensors`."""
        inner = {n.removeprefix("neurons."): t for n, t in tensors.items() if "." in n}
        outer = {n: t for n, t in tensors.items() if "." not in n}
        return cls(neurons=NeuronStats.of_tensors(inner), **outer)


def packed(gram_SEE: Tensor) -> Tensor:
    """Return the upper triangle of symmetric matrices, row after row (S, P).

    >>> packed(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]))
    tensor([[1., 2., 3.]])
    """
    i, j = torch.triu_indices(*gram_SEE.shape[1:])
    return gram_SEE[:, i, j]


def unpacked(gram_SP: Tensor, experts: int) -> Tensor:
    """Return packed matrices as symmetric ones (S, E, E), float64."""
    places_EE = packed_places(experts).to(gram_SP.device)
    return gram_SP.index_select(1, places_EE.flatten()).view(-1, experts, experts).double()


def packed_places(experts: int) -> Tensor:
    """Return the index of each entry of a matrix when it is packed (E, E).

    >>> packed_places(2).tolist()
    [[0, 1], [1, 2]]
    """
    i, j = torch.triu_indices(experts, experts)
    places_EE = torch.zeros(experts, experts, dtype=torch.int64)
    places_EE[i, j] = torch.arange(len(i))
    places_EE[j, i] = places_EE[i, j]
    return places_EE


def gram_room(tokens: int, experts: int) -> int:
    """Return the bytes of the Gram matrices of a layer's tokens."""
    return tokens * experts * (experts + 1) // 2 * 4


def sample_share(tokens: int, experts: int, limit_bytes: int) -> float:
    """Return the share of tokens whose Gram matrices fit ``limit_bytes``."""
    need = gram_room(tokens, experts)
    return min(1.0, limit_bytes / need) if need else 1.0


def evenly(count: int, share: float, before: int = 0) -> Tensor:
    """Return which of ``count`` tokens are sampled, spread evenly: bool (count,).

    Args:
        count: tokens of a batch.
        share: share of all tokens to sample; a batch may be too small for one.
        before: tokens of the batches before it.

    >>> evenly(6, 0.5).tolist()
    [False, True, False, True, False, True]
    """
    steps = (torch.arange(before, before + count + 1, dtype=torch.float64) * share).floor()
    return steps[1:] > steps[:-1]


def _spread_of(view: MoEFFN, i: int) -> float:
    """Return mean |w| / rms(w) over gate, up and down of expert ``i``; 1 if all are equal."""
    weights = [w.float() for w in view.weights_of(i)]
    count = sum(w.numel() for w in weights)
    mean = sum(w.abs().sum(dtype=torch.float64).item() for w in weights) / count
    square = sum(w.square().sum(dtype=torch.float64).item() for w in weights) / count
    return mean / max(square, 1e-300) ** 0.5


@torch.no_grad()
def observe_experts(
    site: LayerTokens[MoEFFN],
    batches: Sequence[int] | None = None,
    gram_share: float = 1.0,
    parts: Collection[str] = PARTS,
) -> ExpertStats:
    """Run a site's tokens through its router and experts, and return the statistics.

    Args:
        site: a routed layer.
        batches: the numbers of the site's batches; None for 0, 1, 2 ...
        gram_share: the share of tokens whose Gram matrices are kept.
        parts: statistics to compute, of :data:`PARTS`; experts run only if one needs their outputs.
    """
    view = site.view
    numbers = range(len(site)) if batches is None else batches
    observer = _Observer(view, gram_share if "gram" in parts else 0, parts)
    merged = ExpertStats.merged(
        observer.batch(x_TD, target_TD, number)
        for x_TD, target_TD, number in zip(site.inputs(), site.targets(), numbers, strict=True)
    )
    if "weights" in parts:
        spread = [_spread_of(view, i) for i in range(view.count)]
        merged.spread_E = torch.tensor(spread, dtype=torch.float64)
    return merged


class _Observer:
    """Observer of one layer's experts, batch by batch."""

    def __init__(self, view: MoEFFN, share: float, parts: Collection[str]) -> None:
        self.view, self.share, self.parts = view, share, parts
        self.of_weights = weight_stats(view) if "neurons" in parts else NeuronStats.none()

    def batch(self, x_TD: Tensor, target_TD: Tensor | None, number: int) -> ExpertStats:
        """Return the statistics of one batch (T, D)."""
        view, routing = self.view, self.view.routing
        logits_TX = view.logits(x_TD).float()
        w_TE = routing.weights(logits_TX)
        calls_E = (w_TE != 0).sum(0).cpu()
        # as if all batches were of one size, so that no process needs to know those of the others
        sampled_T = evenly(len(x_TD), self.share, number * len(x_TD)).to(x_TD.device)
        stats = replace(
            ExpertStats.none(view.count, view.parts.always),
            calls_E=calls_E,
            gate_E=w_TE.double().sum(0).cpu(),
            bias_E=EMPTY.float() if routing.bias_E is None else routing.bias_E.float().cpu(),
            batch_T=torch.full((len(x_TD),), number),
            logits_TX=logits_TX.cpu(),
            sampled_T=sampled_T.cpu(),
            neurons=self.of_weights,
        )
        if {"pairs", "neurons"} & set(self.parts) or sampled_T.any():
            self._together(stats, x_TD, target_TD, w_TE, sampled_T)
        elif "outputs" in self.parts:
            self._alone(stats, x_TD, w_TE)
        return stats

    def _alone(self, stats: ExpertStats, x_TD: Tensor, w_TE: Tensor) -> None:
        """Sum the sizes of outputs, expert after expert; no output is kept."""
        sums_3E = torch.zeros(3, self.view.count, dtype=torch.float64)
        for i in stats.calls_E.nonzero().flatten().tolist():
            rows = w_TE[:, i].nonzero().flatten()
            square_N = self.view.expert(i, x_TD[rows]).double().square().sum(1)
            sums_3E[:, i] = _sizes(square_N, w_TE[rows, i]).cpu()
        stats.norm_E, stats.square_E, stats.gated_E = (sum_E.clone() for sum_E in sums_3E)

    def _together(
        self,
        stats: ExpertStats,
        x_TD: Tensor,
        target_TD: Tensor | None,
        w_TE: Tensor,
        sampled_T: Tensor,
    ) -> None:
        """Sum over outputs of several experts for the same token, block by block."""
        parts, routed_TE = set(self.parts), w_TE != 0
        energy_EM = torch.zeros_like(self.of_weights.energy_EM)

        def show(tokens: Tensor, i: int, rows: Tensor, h_NM: Tensor) -> None:
            """Add the squares over tokens routed to expert i; the weights of others are zero."""
            if "neurons" in parts:
                energy_EM[i] += square_sums(h_NM.float() * w_TE[tokens[rows], i, None])

        ran_TE = sampled_T[:, None].expand_as(routed_TE)
        if parts & {"outputs", "pairs", "neurons"}:
            ran_TE = ran_TE | routed_TE
        sums = _OutputSums.none(self.view.count)
        delta_TD = None
        if target_TD is not None and sampled_T.any():
            delta_TD = target_TD.double() - self.view.output(x_TD).double()
        for at, f_NAD in self._outputs(x_TD, ran_TE, show):
            chosen, f_NED = sampled_T[at], f_NAD[:, : self.view.count]
            if "outputs" in parts:
                sums.add_sizes(f_NED, w_TE[at].double(), routed_TE[at])
            if "pairs" in parts:
                sums.add_pairs(f_NED, w_TE[at].double())
            if chosen.any():
                sums.add_grams(f_NAD[chosen], None if delta_TD is None else delta_TD[at[chosen]])
        sums.fill(stats, parts)
        if "neurons" in parts:
            stats.neurons = replace(
                self.of_weights,
                tokens=len(x_TD),
                calls_E=stats.calls_E.clone(),  # a file holds no tensor twice
                energy_EM=energy_EM,
            )
            h_TS = self.view.shared_weighted(x_TD)
            if h_TS is not None:
                stats.neurons.shared_energy_S = square_sums(h_TS)

    def _outputs(
        self, x_TD: Tensor, ran_TE: Tensor, show: Callable[[Tensor, int, Tensor, Tensor], None]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield experts' outputs, for as many tokens at a time as fit into memory.

        Args:
            x_TD: a batch.
            ran_TE: the experts to run for each token.
            show: called with each expert's tokens, its index, their rows among these, and h.

        Yields:
            tokens (N,), and every expert's output for each (N, A, D), float64.
        """
        rows = max(1, BLOCK_BYTES // (self.view.weighed * x_TD.shape[1] * x_TD.element_size()))
        for block in torch.arange(len(x_TD), device=x_TD.device).split(rows):
            f_BED = self.view.outputs(x_TD[block], ran_TE[block], partial(show, block))
            f_BAD = torch.cat([f_BED, self.view.shared_outputs(x_TD[block])], 1)
            for part in torch.arange(len(block), device=x_TD.device).split(max(1, rows // 8)):
                yield block[part], f_BAD[part].double()


@dataclass
class _OutputSums:
    """Sums over experts' outputs, and Gram matrices that are kept."""

    size_3E: Tensor
    pair_EE: Tensor
    grams: list[Tensor] = field(default_factory=list)
    crosses: list[Tensor] = field(default_factory=list)
    deltas: list[Tensor] = field(default_factory=list)

    @classmethod
    def none(cls, experts: int) -> _OutputSums:
        zeros_3E = torch.zeros(3, experts, dtype=torch.float64)
        return cls(zeros_3E, torch.zeros(experts, experts, dtype=torch.float64))

    def add_sizes(self, f_NED: Tensor, w_NE: Tensor, routed_NE: Tensor) -> None:
        self.size_3E += _sizes(f_NED.square().sum(2) * routed_NE, w_NE).cpu()

    def add_pairs(self, f_NED: Tensor, w_NE: Tensor) -> None:
        weighted_NED = f_NED * w_NE[:, :, None]
        self.pair_EE += torch.einsum("nid,njd->ij", weighted_NED, weighted_NED).cpu()

    def add_grams(self, f_SAD: Tensor, delta_SD: Tensor | None) -> None:
        self.grams.append(packed((f_SAD @ f_SAD.transpose(1, 2)).float()).cpu())
        if delta_SD is not None:
            self.crosses.append((f_SAD @ delta_SD.unsqueeze(-1)).squeeze(-1).cpu())
            self.deltas.append(delta_SD.square().sum(-1).cpu())

    def fill(self, stats: ExpertStats, parts: Collection[str]) -> None:
        """Write the computed parts into the statistics of a batch."""
        if "outputs" in parts:
            stats.norm_E, stats.square_E, stats.gated_E = (sum_E.clone() for sum_E in self.size_3E)
        if "pairs" in parts:
            stats.pair_EE = self.pair_EE
        if self.grams:
            stats.gram_SP = torch.cat(self.grams)
        if self.crosses:
            stats.cross_SA, stats.delta_S = torch.cat(self.crosses), torch.cat(self.deltas)


def _sizes(square_NE: Tensor, w_NE: Tensor) -> Tensor:
    """Return sums over tokens of |f|, |f|^2 and g |f|: (N, E) to (3, E), or of one expert (N,) to
    (3,).

    >>> _sizes(torch.tensor([4.0, 9.0]), torch.tensor([0.5, 1.0])).tolist()
    [5.0, 13.0, 4.0]
    """
    norm_NE = square_NE.sqrt()
    return torch.stack([norm_NE.sum(0), square_NE.sum(0), (w_NE.double() * norm_NE).sum(0)])


def observed(
    site: LayerTokens[MoEFFN],
    tokens: Tokens,
    numbers: Sequence[int] | None,
    gram_bytes: int,
    parts: Collection[str] = PARTS,
) -> ExpertStats:
    """Return a layer's statistics over the tokens of all processes, the same in each.

    Args:
        site: the layer, and this process's share of the tokens.
        tokens: those of all processes.
        numbers: indices of the batches in this process's share; None if the site has all tokens.
        gram_bytes: memory for the layer's Gram matrices; 0 for none.
        parts: statistics to compute, of :data:`PARTS`.

    Raises:
        MoesaicError: not even one token's Gram matrix fits.
    """
    share = sample_share(tokens.count, site.view.weighed, gram_bytes)
    stats = observe_experts(site, numbers, share, parts)
    if numbers is not None:
        stats = ExpertStats.merged(gathered(stats))
    if gram_bytes and not stats.sampled_T.any():
        raise MoesaicError(
            f"gram_mb {gram_bytes / 2**20:.3g} is too small for {stats.experts} experts and "
            f"{stats.tokens:,} tokens: no token's Gram matrix is kept. Raise gram_mb."
        )
    return stats


def routing_of(job: Job[MoEArch], layer: int, stats: ExpertStats) -> RoutingFunction:
    """Return a layer's routing function, ready to decide on recorded logits."""
    routing = job.arch.mixture(job.layers[layer]).routing
    start = f"{job.arch.layer_prefix(layer)}{job.arch.inside}"
    routing.fill(lambda name, _: job.naming.read(start + name))
    if routing.bias_E is not None:
        routing.bias_E = stats.bias_E
    return routing
