"""Statistics of a layer: named tensors, each with a rule by which those of two token sets merge.

A method names what it ``needs``, and nothing else is computed; experts run once for all names. A
dense FFN is one expert that every token runs. Sums and norms are float64.

==========================  =====  =================================================================
name                        rule   meaning
==========================  =====  =================================================================
calls_E                     add    |T_j|, number of tokens routed to each expert, int64
gate_E                      add    sum of the combine weights g_j over T_j
norm_E, square_E, gated_E   add    sums of |f_j|, |f_j|^2 and g_j |f_j| over T_j
pair_EE                     add    sum of g_i g_j <f_i, f_j> over tokens
energy_EM                   add    sums of (w h_j)^2 over an expert's tokens
batch_T                     join   calibration batch of each token, int64
logits_TX                   join   inputs of the router's decision, float32
sampled_T                   join   True for tokens whose Gram matrix is kept
gram_SP                     join   <f_i, f_j> for i <= j, packed, of the sampled tokens, float32
cross_SA, delta_S           join   with gram_SP if the stream follows: <f_j, delta> and |delta|^2,
                                   delta being the output error from earlier layers
bias_E                      keep   choice bias of the router, or its factors by expert; may be empty
spread_E                    keep   mean |w| over root mean square of w, of each expert's weights
reach_EM, size_EM           keep   norms of W_down[:, j], and of all of a neuron's weights
shared_energy_S, ...        ..     the same of the shared path's neurons (also ``reach`` and
                                   ``size``); empty without one
==========================  =====  =================================================================

Methods add statistics of their own: :meth:`moesaic.methods.layered.LayerMethod.observe`.

Shape suffixes: T tokens, N or a block B of them, S sampled ones (in names that begin with
``shared``: neurons of the shared path), E experts, A those and the shared ones that the router
weighs, D hidden size, M neurons of an expert, P = A (A + 1) / 2 packed pairs, X inputs of a
router's decision (:mod:`moesaic.arch.routing`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from moesaic.arch.mixture import FFN, MoEFFN
from moesaic.data.text import Tokens
from moesaic.distributed import gathered
from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import not_finite
from moesaic.modules.running import LayerTokens

Stats = dict[str, Tensor]
"""Statistics of one layer by name, on the CPU."""
BLOCK_BYTES = 128 << 20
"""Bytes of expert outputs in memory at once."""
OUTPUTS = frozenset({"norm_E", "square_E", "gated_E"})
GRAM = frozenset({"sampled_T", "gram_SP"})
OF_TOKENS = frozenset(
    {
        *("calls_E", "gate_E", "batch_T", "logits_TX", "pair_EE", "energy_EM", "shared_energy_S"),
        *OUTPUTS,
        *GRAM,
    }
)
"""Statistics that need text."""


@dataclass
class Tally:
    """Statistics of one layer in the making."""

    added: Stats = field(default_factory=dict)
    joined: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    """Parts by name, each with the index of its batch."""
    kept: Stats = field(default_factory=dict)

    def add(self, name: str, value: Tensor, row: int | None = None, rows: int = 1) -> None:
        """Add to a sum over tokens, float64 or int64.

        Args:
            name: the statistic.
            value: sum over some tokens.
            row: index of the expert that it is of; None if it is of all.
            rows: number of experts.
        """
        value = value.cpu()
        if name not in self.added:
            shape = value.shape if row is None else (rows, *value.shape)
            dtype = torch.float64 if value.is_floating_point() else torch.int64
            self.added[name] = torch.zeros(shape, dtype=dtype)
        total = self.added[name]
        (total if row is None else total[row]).add_(value)

    def join(self, name: str, value: Tensor, batch: int) -> None:
        """Append one row for each token of a batch; batches are joined in the order of their
        indices."""
        self.joined.setdefault(name, []).append((batch, value.cpu()))

    def keep(self, name: str, value: Tensor) -> None:
        """Set a statistic that is the same for all tokens."""
        self.kept[name] = value

    def stats(self, every: bool = False) -> Stats:
        """Return the statistics by name.

        Args:
            every: True to merge those of all processes, each of which has a share of the tokens.
        """
        total, *others = gathered(self) if every else [self]
        for other in others:
            for name, value in other.added.items():
                total.add(name, value)
            for name, parts in other.joined.items():
                total.joined.setdefault(name, []).extend(parts)
        rows = {
            name: torch.cat([value for _, value in sorted(parts, key=itemgetter(0))])
            for name, parts in total.joined.items()
        }
        return {**total.added, **rows, **total.kept}


def square_sums(h_NM: Tensor) -> Tensor:
    """Return sums of squares over tokens, (N, M) to (M,), float64."""
    return h_NM.square().sum(0, dtype=torch.float64)


def layer_stats(
    site: LayerTokens[FFN],
    names: Collection[str],
    tokens: Tokens,
    numbers: Sequence[int] | None = None,
    gram_bytes: int = 0,
    own: Callable[[LayerTokens[FFN], Tally], None] | None = None,
) -> Stats:
    """Return a layer's statistics over the tokens of all processes, the same in each.

    Args:
        site: the layer, and this process's share of the tokens.
        names: statistics to compute.
        tokens: those of all processes.
        numbers: indices of the batches in this process's share; None if the site has all tokens.
        gram_bytes: memory for the layer's Gram matrices.
        own: adds a method's own statistics.

    Raises:
        MoesaicError: not even one token's Gram matrix fits, or a sum is not finite.
        ValueError: nothing computes one of ``names``.
    """
    view, share = site.view, 0.0
    if "gram_SP" in names and isinstance(view, MoEFFN):
        share = sample_share(tokens.count, view.weighed, gram_bytes)
    tally = tally_of(site, names, numbers, share)
    if own is not None:
        own(site, tally)
    if not all(total.isfinite().all() for total in tally.added.values()):
        raise not_finite(f"Layer {site.index} computes")
    stats = tally.stats(every=numbers is not None)
    if "gram_SP" in names and "gram_SP" not in stats:
        raise MoesaicError(
            f"gram_mb {gram_bytes / 2**20:.3g} is too small for {view.count} experts and "
            f"{tokens.count:,} tokens: no token's Gram matrix is kept. Raise gram_mb."
        )
    missing = {*names} - {*stats, "tokens"}
    if missing:
        raise ValueError(f"nothing computes {', '.join(sorted(missing))} of layer {site.index}")
    return stats


@torch.no_grad()
def tally_of(
    site: LayerTokens[FFN],
    names: Collection[str],
    numbers: Sequence[int] | None = None,
    gram_share: float = 1.0,
) -> Tally:
    """Return the statistics of a site's tokens, batch by batch.

    Args:
        site: the layer, and tokens.
        names: statistics to compute; others are left out.
        numbers: indices of the site's batches; None for 0, 1, 2 ...
        gram_share: share of tokens whose Gram matrices are kept.
    """
    tally, asked = Tally(), {*names}
    for together, statistics in _OF_WEIGHTS.items():
        if asked.intersection(together):
            for name, value in zip(together, statistics(site.view), strict=True):
                if name in asked:
                    tally.keep(name, value)
    if not asked & OF_TOKENS:
        return tally
    numbers = range(len(site)) if numbers is None else numbers
    for x_TD, target_TD, number in zip(site.inputs(), site.targets(), numbers, strict=True):
        _Batch(site.view, x_TD, number, asked, tally).observe(target_TD, gram_share)
    return tally


# --- weights -------------------------------------------------------------------------------------


def _bias(view: FFN) -> list[Tensor]:
    bias_E = view.routing.bias_E if isinstance(view, MoEFFN) else None
    return [torch.zeros(0) if bias_E is None else bias_E.float().cpu()]


def _spread(view: FFN) -> list[Tensor]:
    """Return mean |w| / rms(w) over gate, up and down of each expert (E,); 1 if all are equal."""
    spread_E = torch.zeros(view.count, dtype=torch.float64)
    for i in range(view.count):
        weights = [w.float() for w in view.weights_of(i)]
        count = sum(w.numel() for w in weights)
        mean = sum(w.abs().sum(dtype=torch.float64).item() for w in weights) / count
        square = sum(w.square().sum(dtype=torch.float64).item() for w in weights) / count
        spread_E[i] = mean / max(square, 1e-300) ** 0.5
    return [spread_E]


def _norms(view: FFN) -> list[Tensor]:
    """Return the norms of each neuron's down column, and of all its weights (E, M)."""
    reach_EM, size_EM = torch.empty(2, view.count, view.width, dtype=torch.float64)
    for i in range(view.count):
        *rows, down = view.weights_of(i)
        # 32 rows at a time: as float64 they fit into a processor's cache
        square_M = torch.stack([w.double().square().sum(0) for w in down.split(32)]).sum(0)
        reach_EM[i] = square_M.sqrt().cpu()
        for weight in rows:
            square_M += torch.cat([w.double().square().sum(1) for w in weight.split(32)])
        size_EM[i] = square_M.sqrt().cpu()
    return [reach_EM, size_EM]


def _of_shared(statistics: Callable[[FFN], list[Tensor]], count: int) -> _Statistics:
    """Return a function of a layer that computes ``count`` statistics of its shared path."""

    def of(view: FFN) -> list[Tensor]:
        if (ffn := view.shared_ffn) is None:
            return [torch.zeros(0, dtype=torch.float64)] * count
        return [tensor[0] for tensor in statistics(ffn)]

    return of


_Statistics = Callable[[FFN], list[Tensor]]
_OF_WEIGHTS: Mapping[tuple[str, ...], _Statistics] = {
    ("bias_E",): _bias,
    ("spread_E",): _spread,
    ("reach_EM", "size_EM"): _norms,
    ("shared_reach_S", "shared_size_S"): _of_shared(_norms, 2),
}
"""Functions of a layer's view by the names of what they return together."""
OF_WEIGHTS = frozenset(chain.from_iterable(_OF_WEIGHTS))
"""Statistics that need no text."""


# --- tokens --------------------------------------------------------------------------------------


@dataclass
class _Batch:
    """Batch of tokens at one layer, whose statistics are added to a tally."""

    view: FFN
    x_TD: Tensor
    number: int
    names: set[str]
    tally: Tally

    def observe(self, target_TD: Tensor | None, gram_share: float) -> None:
        """Add the batch's statistics to the tally."""
        view, x_TD, tally, names = self.view, self.x_TD, self.tally, self.names
        w_TE, sampled_T = torch.ones(len(x_TD), 1), torch.zeros(len(x_TD), dtype=torch.bool)
        if isinstance(view, MoEFFN):
            logits_TX = view.logits(x_TD).float()
            w_TE = view.routing.weights(logits_TX)
            if "logits_TX" in names:
                tally.join("logits_TX", logits_TX, self.number)
        if "batch_T" in names:
            tally.join("batch_T", torch.full((len(x_TD),), self.number), self.number)
        if "calls_E" in names:
            tally.add("calls_E", (w_TE != 0).sum(0))
        if "gate_E" in names:
            tally.add("gate_E", w_TE.double().sum(0))
        if "gram_SP" in names:
            # as if all batches were of one size: no process needs to know those of the others
            sampled_T = evenly(len(x_TD), gram_share, self.number * len(x_TD))
            tally.join("sampled_T", sampled_T, self.number)
        if isinstance(view, MoEFFN) and ("pair_EE" in names or sampled_T.any()):
            self._together(view, w_TE, sampled_T.to(x_TD.device), target_TD)
        else:
            if isinstance(view, MoEFFN) and names & OUTPUTS:
                self._alone(view, w_TE)
            for i, _, wh_NM in view.weighted(x_TD) if "energy_EM" in names else ():
                tally.add("energy_EM", square_sums(wh_NM), i, view.count)
        if "shared_energy_S" in names:
            h_TS = view.shared_weighted(x_TD)
            tally.add("shared_energy_S", square_sums(torch.zeros(0, 0) if h_TS is None else h_TS))

    def _add_sizes(self, square_NE: Tensor, w_NE: Tensor, row: int | None = None) -> None:
        """Add sums over tokens of |f|, |f|^2 and g |f|, of all experts or of one (N,)."""
        norm_NE = square_NE.sqrt()
        values = {"norm_E": norm_NE, "square_E": square_NE, "gated_E": w_NE.double() * norm_NE}
        for name in self.names & OUTPUTS:
            self.tally.add(name, values[name].sum(0), row, self.view.count)

    def _alone(self, view: MoEFFN, w_TE: Tensor) -> None:
        """Add the sizes of outputs, expert after expert; no output is kept."""
        for i in (w_TE != 0).any(0).nonzero().flatten().tolist():
            rows = w_TE[:, i].nonzero().flatten()
            square_N = view.expert(i, self.x_TD[rows]).double().square().sum(1)
            self._add_sizes(square_N, w_TE[rows, i], i)

    def _together(
        self, view: MoEFFN, w_TE: Tensor, sampled_T: Tensor, target_TD: Tensor | None
    ) -> None:
        """Add sums over outputs of several experts for the same token, block by block."""
        names, tally, routed_TE = self.names, self.tally, w_TE != 0
        ran_TE = sampled_T[:, None].expand_as(routed_TE)
        if names & {"pair_EE", "energy_EM", *OUTPUTS}:
            ran_TE = ran_TE | routed_TE

        def show(tokens: Tensor, i: int, rows: Tensor, h_NM: Tensor) -> None:
            """Add an expert's neurons; the weights of tokens not routed to it are zero."""
            if "energy_EM" in names:
                wh_NM = h_NM.float() * w_TE[tokens[rows], i, None]
                tally.add("energy_EM", square_sums(wh_NM), i, view.count)

        delta_TD = None
        if target_TD is not None and sampled_T.any():
            delta_TD = target_TD.double() - view.output(self.x_TD).double()
        for at, f_NKD, always_NSD in self._outputs(view, ran_TE, show):
            sampled_N, w_NE = sampled_T[at], w_TE[at].double()
            # experts that ran come first
            ran_NK = (~ran_TE[at]).byte().sort(stable=True)[1][:, : f_NKD.shape[1]]
            if names & OUTPUTS:
                square_NE = torch.zeros_like(w_NE).scatter(1, ran_NK, f_NKD.square().sum(2))
                self._add_sizes(square_NE * routed_TE[at], w_NE)
            if "pair_EE" in names:
                weighted_NKD = f_NKD * w_NE.gather(1, ran_NK)[:, :, None]
                pair_NKK = weighted_NKD @ weighted_NKD.transpose(1, 2)
                pair_EE, places = w_NE.new_zeros(view.count, view.count), ran_NK.unsqueeze(1)
                pair_EE.index_put_((places.mT, places), pair_NKK, accumulate=True)
                tally.add("pair_EE", pair_EE)
            if sampled_N.any():  # of these tokens every expert ran
                f_SAD = torch.cat([f_NKD, always_NSD], 1)[sampled_N]
                gram_SAA = (f_SAD @ f_SAD.transpose(1, 2)).float()
                tally.join("gram_SP", packed(gram_SAA), self.number)
                if delta_TD is not None:
                    delta_SD = delta_TD[at[sampled_N]]
                    cross_SA = (f_SAD @ delta_SD.unsqueeze(-1)).squeeze(-1)
                    tally.join("cross_SA", cross_SA, self.number)
                    tally.join("delta_S", delta_SD.square().sum(-1), self.number)

    def _outputs(
        self, view: MoEFFN, ran_TE: Tensor, show: Callable[[Tensor, int, Tensor, Tensor], None]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield experts' outputs, for as many tokens at a time as fit into memory.

        Args:
            view: the layer.
            ran_TE: the experts to run for each token.
            show: called with each expert's tokens, its index, their rows among these, and h.

        Yields:
            tokens (N,), the outputs of the experts that ran for each (N, K, D), by index, and those
            of the shared ones that the router weighs; float64.
        """
        x_TD = self.x_TD
        most = view.weighed - view.count + int(ran_TE.sum(1).max())
        rows = max(1, BLOCK_BYTES // (max(1, most) * x_TD.shape[1] * x_TD.element_size()))
        for block in torch.arange(len(x_TD), device=x_TD.device).split(rows):
            f_BKD = view.packed_outputs(x_TD[block], ran_TE[block], partial(show, block))
            always_BSD = view.shared_outputs(x_TD[block])
            for part in torch.arange(len(block), device=x_TD.device).split(max(1, rows // 8)):
                yield block[part], f_BKD[part].double(), always_BSD[part].double()


# --- Gram matrices -------------------------------------------------------------------------------


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


def bytes_of(needs: Collection[str], view: FFN, tokens: int, gram_bytes: int = 0) -> int:
    """Return the bytes of a layer's largest statistics, from its shapes.

    Args:
        needs: names of statistics.
        view: the layer.
        tokens: number of tokens.
        gram_bytes: memory for the layer's Gram matrices.
    """
    if "gram_SP" in needs and isinstance(view, MoEFFN):
        return min(gram_bytes, gram_room(tokens, view.weighed))
    return 0
