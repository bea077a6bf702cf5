"""Searches of CD-MoE: each layer's experts (Eq. 2, Alg. 1, Tab. 5), then the layers (Alg. 2).

Cao et al., "Condense, Don't Just Prune: Enhancing Efficiency and Performance in MoE Layer Pruning"
(TMLR 2025). Equation and algorithm numbers are the paper's.

==================  ==========================================================
E_s, E_i            the shared path, routed expert i
g_{i,t}             the true combine weight of expert i for token t (T, E)
g_i                 Eq. 2: its fixed weight, the mean of g_{i,t} where it is not 0
C, K                the routed experts that are kept, |C| = K
h                   Eq. 3: x + E_s(x) + sum_{i in C} g_i E_i(x); no router
==================  ==========================================================

Alg. 1 chooses C greedily by JS(O_ref, O) of the decoder layer's output, layer by layer. With the
residual, the shared path and every E_i(x) known once, each candidate's output is a sum of vectors,
so the paper's 369 inferences a layer (66 experts, K = 6) become one. Where a layer does more with
its block's output than to add it, such as normalise it, each candidate is run.

Deviations from the paper or its code, and options that restore theirs:

- Experts that no token chose have no g_i and are left out.
- Qwen's shared path keeps its gate, a sigmoid a token: ``shared_gate="token"``. ``"mean"`` fixes it
  to its mean as Eq. 2 fixes the others, which lets the architecture itself hold the layer.
- Models without shared experts: ``keep="shared"`` would leave nothing of a layer (Layer Drop) and
  is refused.
- ``metric="ppl"`` is for the choice of layers (Tab. 8); a layer's output has no perplexity, and
  experts are then chosen by JS.
- PL_Alpha_Hill is the mean over an expert's three matrices; x_min is sought from 0.95 to 1.5 times
  the histogram's peak, as in the code that Yang et al. describe.

Alg. 2 repeatedly condenses the layer that changes the model's last hidden state least, after the
final norm. One round is one pass over the layers: each candidate branches off at its own layer, and
all branches are carried on together, so that a model read from disk is read once a round.

``racing`` compares the same candidates on less text. Each round begins with all of them on a few
windows, and those that are significantly worse than the best one, by the standard error of the
difference over windows, are out; the others are compared on four times the text, until one is left
or the text ends.

Comparisons (Tab. 7): ``rank`` orders layers by the divergence of the layer's own output,
``global-rank`` by the model's with only that layer condensed. ``cosine`` is the rule of He et al.
(2024) for Block Drop and Layer Drop: the module whose output is most like its input is first.

For divergences the released code turns each hidden state into a distribution by a softmax over
the hidden dimension, in float32, and takes natural logarithms; so do we.

Shape suffixes: N any number of tokens or candidates, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from moesaic.arch.dense import returns_tuple
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.data.text import Tokens
from moesaic.distributed import gathered, mean_over_processes
from moesaic.losses import next_token_loss, predicting, significantly_worse
from moesaic.methods.condense.config import CondenseConfig
from moesaic.methods.prune.config import random_scores
from moesaic.modules.running import SpilledList
from moesaic.observation.changes import Metric, branches, layer_replacement, window_sums
from moesaic.observation.stream import Block, LayerStream, valid
from moesaic.plans.base import NO_EXPERTS
from moesaic.plans.condensed import NO_FFN, CondensedLayer, DroppedLayer
from moesaic.types import JSON

TINY = torch.finfo(torch.float32).tiny
"""Lower bound of a mean of two probabilities, so that the logarithm of two zeros is finite."""


def js(p_ND: Tensor, q_ND: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of softmax(p) and softmax(q) over D (N,); 0 to ln 2.

    JS = (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2. Arguments broadcast to the shape of the
    second, since a search scores many q against one p. Temporaries are reused in place.

    >>> js(torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 100.0]]))
    tensor([0.6931])
    """
    log_p, log_q = (x.float().log_softmax(-1) for x in (p_ND, q_ND))
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.add(p / 2, q, alpha=0.5).clamp_(min=TINY).log_()
    q_part = log_q.sub_(log_m).mul_(q)
    return q_part.addcmul_(p, log_m.neg_().add_(log_p)).sum(-1).clamp(min=0) / 2


def kl(p_ND: Tensor, q_ND: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence KL(softmax(p) || softmax(q)) over D (N,)."""
    log_p, log_q = (x.float().log_softmax(-1) for x in (p_ND, q_ND))
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)


def cosine(p_ND: Tensor, q_ND: Tensor) -> Tensor:
    """Return 1 - cos(p, q) (N,), a module's importance in He et al. (2024), Eq. 3."""
    return 1 - torch.cosine_similarity(p_ND.float(), q_ND.float(), dim=-1)


DIVERGENCES = {"js": js, "kl": kl}
"""Divergences of hidden states, by name."""


def _of_states(
    divergence: Callable[[Tensor, Tensor], Tensor], before_1LD: Tensor, window: Tokens
) -> Callable[[Tensor], Tensor]:
    mask = window.attention_mask
    before_TD = valid(before_1LD, mask)
    return lambda after_1LD: divergence(before_TD, valid(after_1LD, mask))


def _of_perplexity(before_1LV: Tensor, window: Tokens) -> Callable[[Tensor], Tensor]:
    labels = window.labels.to(before_1LV.device)
    count = predicting(labels).sum().clamp(min=1)
    before = (next_token_loss(before_1LV, labels) / count).exp()
    return lambda logits: ((next_token_loss(logits, labels) / count).exp() - before)[None]


METRICS: dict[str, Metric] = {
    **{name: partial(_of_states, divergence) for name, divergence in DIVERGENCES.items()},
    "ppl": _of_perplexity,
}
"""Changes of a window's output by name: of the hidden states after the final norm by token, or of
the perplexity (Tab. 8)."""


BLOCK_BYTES = 64 << 20
"""Bytes of candidates' outputs in memory at once."""


# --- Alg. 1 --------------------------------------------------------------------------------------


def _greedy_experts(
    losses: Callable[[list[int], list[int]], Tensor], g_E: Tensor, k: int
) -> tuple[list[int], list[float]]:
    """Choose experts greedily by Alg. 1; of equally good ones the first.

    Args:
        losses: function of (chosen, candidates) that returns the divergence with each candidate
            added (candidates,).
        g_E: the fixed weights of Eq. 2; experts without one are left out.
        k: experts to choose.

    Returns:
        experts in the order in which they were chosen, and the divergence after each.
    """
    left = [i for i, g in enumerate(g_E.tolist()) if g == g]
    chosen: list[int] = []
    least: list[float] = []
    while left and len(chosen) < k:
        loss_C = losses(chosen, left)
        best = int(loss_C.numpy().argmin())
        least.append(loss_C[best].item())
        chosen.append(left.pop(best))
    return chosen, least


# --- Tab. 5: experts by their weights --------------------------------------------------------


BINS = 100
"""Bins of the histogram in which the fix-finger method looks for a peak."""
AROUND = (0.95, 1.5)
"""Range in which it looks for x_min, in multiples of the peak."""


def pl_alpha_hill(weight: Tensor) -> float:
    """Return PL_Alpha_Hill, Eq. 4: 1 + k / sum_{i <= k} ln(lambda_{n-i+1} / lambda_{n-k}), lambda
    of W^T W.

    k by the fix-finger method (Yang et al. 2023): lambda_{n-k}, their x_min, is sought around the
    peak of the histogram of log10 lambda; the one whose power law is nearest to the eigenvalues
    from there on, by their Kolmogorov-Smirnov distance, is taken.
    """
    value_N = torch.linalg.svdvals(weight.float()).square().flip(0)
    return tail_exponent(value_N[value_N > value_N[-1] * 1e-12].double())


def tail_exponent(value_N: Tensor) -> float:
    """Return Eq. 4 for eigenvalues in rising order, with x_min by the fix-finger method.

    Args:
        value_N: at least two, above zero, float64.
    """
    log_N = value_N.log10()
    counts = torch.histc(log_N, bins=BINS)
    step = (log_N[-1] - log_N[0]) / BINS
    peak = (10 ** (log_N[0] + counts.argmax() * step)).item()
    least, most = (share * peak for share in AROUND)
    near = ((value_N >= least) & (value_N <= most)).nonzero().flatten().tolist()
    starts = [i for i in near if i < len(value_N) - 1] or [
        min(int((value_N < peak).sum()), len(value_N) - 2)
    ]
    fits = []
    for start in starts:
        ratio_K = value_N[start:] / value_N[start]
        alpha = 1 + (len(ratio_K) - 1) / ratio_K.log().sum().clamp(min=1e-12).item()
        below_K = torch.arange(len(ratio_K)) / len(ratio_K)
        distance = (1 - ratio_K ** (1 - alpha) - below_K).abs().max().item()
        fits.append((distance, start, alpha))
    return min(fits)[-1]


def weight_scores(view: MoEFFN, search: str, layer: int, seed: int) -> list[float]:
    """Return a score for each expert from its weights or at random; the lowest are kept."""
    if search == "random":
        return random_scores(view.count, layer, seed).tolist()
    experts = [view.weights_of(i) for i in range(view.count)]
    if search == "l1":
        return [sum(w.double().abs().sum().item() for w in weights) for weights in experts]
    return [sum(map(pl_alpha_hill, weights)) / 3 for weights in experts]


def ranked_experts(score_E: list[float], g_E: Tensor, k: int) -> list[int]:
    """Return the k experts of lowest score among those that at least one token chose.

    >>> ranked_experts([0.2, 0.1, 0.3], torch.tensor([0.5, float("nan"), 0.5]), 1)
    [0]
    """
    left = [i for i, g in enumerate(g_E.tolist()) if g == g]
    return sorted(left, key=lambda i: (score_E[i], i))[:k]


# --- one layer -----------------------------------------------------------------------------------


Replaced: TypeAlias = CondensedLayer | DroppedLayer
CHUNK_BYTES = 128 << 20
"""Bytes of expert outputs computed at a time."""
FIRST, LEAST, GROWTH = 16, 8, 4
"""Schedule of a race: it starts on one window in ``FIRST``, at least on ``LEAST`` windows, and
multiplies the text by ``GROWTH`` each leg."""
SURE = 3.0
"""Standard errors of the mean difference above which a candidate is significantly worse."""


class ExpertSearch:
    """Search for what one layer is condensed to, and how much that changes its output.

    Args:
        config: the options.
        stream: the model's layers.
        arch: its architecture.
        block: the layer, with its weights loaded.
        hidden: the layer's input, one entry a batch.
    """

    def __init__(
        self,
        config: CondenseConfig,
        stream: LayerStream[MoEFFN],
        arch: MoEArch,
        block: Block,
        hidden: SpilledList,
    ) -> None:
        self.config, self.stream, self.arch = config, stream, arch
        self.block, self.hidden, self.view = block, hidden, arch.mixture(block.layer)
        self.divergence = DIVERGENCES["js" if config.metric == "ppl" else config.metric]
        self.inputs, self.reference = SpilledList(1 << 30), SpilledList(1 << 30)
        """Per batch, input of the layer's FFN block and output of the layer (T, D)."""

    def decide(self) -> tuple[Replaced, JSON]:
        """Return the layer's plan, and the divergence of every variant of ``keep`` (Fig. 5)."""
        try:
            with self.stream.collected(self.view.block, self.inputs, None, self.block.index):
                for out_TD in self._outputs():
                    self.reference.append(out_TD)
            return self._decide()
        finally:
            self.inputs.clear()
            self.reference.clear()

    def _outputs(self, plan: Replaced | None = None) -> Iterator[Tensor]:
        """Yield the layer's output for each batch (T, D), as it is or with a plan applied."""
        with layer_replacement(self.block.layer, self.arch, plan) as layer:
            outputs = self.block.outputs(self.hidden, layer)
            yield from map(valid, outputs, self.stream.masks())

    def _decide(self) -> tuple[Replaced, JSON]:
        config, view = self.config, self.view
        g_A, calls_E = self._gates()
        g_E = g_A[: view.count]
        shared, routed = self._shared(g_A[view.count :]), NO_EXPERTS
        analysis: JSON = {"calls": calls_E.tolist()}
        if config.keep == "shared+routed":
            k = view.top_k if config.experts is None else config.experts
            if config.expert_search == "greedy":
                order, losses = self._greedy(shared, g_E, k)
                analysis["expert_losses"] = losses
            else:
                scores = weight_scores(view, config.expert_search, self.block.index, config.seed)
                analysis["scores"] = scores
                order = ranked_experts(scores, g_E, k)
            routed = torch.tensor(order, dtype=torch.int64)
        variants: dict[str, Replaced] = {"attention": NO_FFN}
        if not returns_tuple(type(self.block.layer).forward):
            variants["nothing"] = DroppedLayer()
        if shared.shared and not view.apart(routed=False):
            variants["shared"] = shared
        variants.setdefault(config.keep, self._with_experts(shared, routed, g_E))
        entering = map(valid, self.hidden, self.stream.masks())
        befores = {"attention": self._outputs(NO_FFN), "nothing": entering}
        analysis |= {
            "divergence": {name: self._cost(plan) for name, plan in variants.items()},
            # 1 - cos of input and output, of block plus residual and of the whole layer
            "cosine": {name: self._mean(cosine, before) for name, before in befores.items()},
        }
        return variants[config.keep], analysis

    def _gates(self) -> tuple[Tensor, Tensor]:
        """Return g of Eq. 2 over all processes' tokens (A,), NaN for experts that none chose, and
        each expert's calls (E,)."""
        view = self.view
        sums_2A = torch.zeros(2, view.weighed, dtype=torch.float64)
        for x_TD in self.stream.entered(self.block, self.inputs):
            w_TA = view.routing.every_weight(view.logits(x_TD.to(view.device)).float())
            sums_2A += torch.stack([w_TA.double().sum(0), (w_TA != 0).double().sum(0)]).cpu()
        sums_2A = torch.stack(gathered(sums_2A)).sum(0)
        return sums_2A[0] / sums_2A[1], sums_2A[1, : view.count]

    def _shared(self, g_S: Tensor) -> CondensedLayer:
        """Return the plan with only the shared path; ``g_S`` are gates of weighed shared
        experts."""
        view, width = self.view, self.view.shared_width
        if not width:
            return NO_FFN
        scale: float | list[float] = g_S.tolist() if len(g_S) else 1.0
        gated = 0
        if self.arch.shared_gate is not None:
            gated = width
            if self.config.shared_gate == "mean":
                gate = getattr(view.block, self.arch.shared_gate)
                total = torch.zeros(1, dtype=torch.float64)
                for x_TD in self.inputs:
                    total += torch.sigmoid(gate(x_TD.to(view.device))).double().sum().cpu()
                count = sum(len(x) for x in self.inputs)
                scale, gated = mean_over_processes(total, count).item(), 0
        return CondensedLayer(NO_EXPERTS, torch.empty(0), width, True, scale, gated)

    def _with_experts(
        self, shared: CondensedLayer, routed_K: Tensor, g_E: Tensor
    ) -> CondensedLayer:
        """Add routed experts at their fixed weights to the shared path."""
        gates_K, width = g_E[routed_K].float(), shared.width + len(routed_K) * self.view.width
        return replace(shared, experts_K=routed_K, gates_K=gates_K, width=width)

    def _greedy(self, shared: CondensedLayer, g_E: Tensor, k: int) -> tuple[list[int], list[float]]:
        """Run Alg. 1 on outputs that are computed once and kept, on disk if they are many."""
        view, factor = self.view, self._factor()
        if factor is None:

            def run(chosen: list[int], left: list[int]) -> Tensor:
                sets = [torch.tensor([*chosen, i]) for i in left]
                return torch.tensor(
                    [self._cost(self._with_experts(shared, routed, g_E)) for routed in sets]
                )

            return _greedy_experts(run, g_E, k)
        start, experts = SpilledList(1 << 30), SpilledList(2 << 30)
        try:
            for out_TD in self._outputs(shared):
                start.append(out_TD)
            for x_TD in self.inputs:
                rows = max(1, CHUNK_BYTES // (view.count * x_TD.shape[1] * x_TD.element_size()))
                parts = [
                    view.packed_outputs(x, torch.ones(len(x), view.count, dtype=torch.bool))
                    for x in x_TD.to(view.device).split(rows)
                ]
                experts.append(torch.cat(parts) * factor)
            return _greedy_experts(partial(self._added, start, experts, g_E), g_E, k)
        finally:
            start.clear()
            experts.clear()

    def _added(
        self,
        starts: SpilledList,
        experts: SpilledList,
        g_E: Tensor,
        chosen: list[int],
        left: list[int],
    ) -> Tensor:
        """Return the mean divergence from the original output with each expert that is left added
        to the chosen ones.

        Args:
            starts: per batch, the residual plus the kept part of the shared path (T, D).
            experts: per batch, the outputs E_i(x) of all routed experts, scaled as they are added
                to the residual (T, E, D).
            g_E: the fixed weights of Eq. 2.
            chosen: the experts chosen so far.
            left: experts to add, one at a time.
        """
        total, tokens = torch.zeros(len(left), dtype=torch.float64), 0
        for reference_TD, start_TD, experts_TED in zip(
            self.reference, starts, experts, strict=True
        ):
            now_TD = start_TD.float()
            g = g_E.to(now_TD)
            for i in chosen:
                now_TD = now_TD + g[i] * experts_TED[:, i].float()
            rows = max(1, BLOCK_BYTES // (4 * total.numel() * now_TD.shape[1]))
            for at in torch.arange(len(now_TD)).split(rows):
                f = experts_TED[at][:, left].float()
                trial = now_TD[at, None] + g[left, None] * f
                total += self.divergence(reference_TD[at, None], trial).double().sum(0).cpu()
            tokens += len(now_TD)
        return mean_over_processes(total, tokens)

    def _factor(self) -> float | None:
        """Return the factor by which the layer adds its block's output to the residual stream.

        None if the layer does not just add it. Found by comparing outputs of the first batch.
        """
        view, before_TD = self.view, next(self._outputs(NO_FFN))
        x_TD, o_TD = self.inputs[0].to(view.device), self.reference[0]
        with self.stream.handing(self.block, 0):
            y_TD = view.output(x_TD).float()
        if self.arch.beside is not None and view.shared is not None:
            y_TD = y_TD + view.shared(x_TD)
        added_TD, adds, factor = (o_TD - before_TD).float(), False, 0.0
        if added_TD.shape == y_TD.shape:
            factor = ((added_TD * y_TD).sum() / y_TD.square().sum()).item()
            rounding = 4 * torch.finfo(o_TD.dtype).eps * o_TD.float().norm()
            off = (added_TD - factor * y_TD).norm()
            adds = bool(off <= 0.01 * added_TD.norm() + rounding)
        every = mean_over_processes(torch.tensor([float(adds), factor]), 1)
        if every[0] < 1:
            return None
        return 1.0 if abs(every[1] - 1) < 1e-3 else every[1].item()

    def _cost(self, plan: Replaced) -> float:
        """Return the divergence of the layer's output under a plan from its original output."""
        return self._mean(self.divergence, self._outputs(plan))

    def _mean(
        self, divergence: Callable[[Tensor, Tensor], Tensor], outputs: Iterable[Tensor]
    ) -> float:
        """Return the mean divergence from the original output over the tokens of all processes."""
        total, count = torch.zeros(1, dtype=torch.float64), 0
        for o_TD, out_TD in zip(self.reference, outputs, strict=True):
            total += divergence(o_TD, out_TD).double().sum().cpu()
            count += len(o_TD)
        return mean_over_processes(total, count).item()


# --- Alg. 2 --------------------------------------------------------------------------------------


def legs(tokens: Tokens) -> list[Tokens]:
    """Return the windows of a race in a random order, cut where more text is added.

    Every process has the same number of parts, that of the process with the fewest windows.
    """
    count = len(tokens.input_ids)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    fewest = min(gathered(count))
    ends, end = [0], max(LEAST, fewest // FIRST)
    while 2 * end <= fewest:
        ends.append(end)
        end *= GROWTH
    return [tokens.rows(order[start:end]) for start, end in pairwise([*ends, count])]


class LayerSearch:
    """Search for the layers whose condensing changes the model's output least.

    Args:
        streams: over the text, or one for each of its :func:`legs`.
        plans: plan of each layer if it is condensed.
        metric: of the output's change: ``js``, ``kl`` or ``ppl``.
    """

    def __init__(
        self,
        streams: Sequence[LayerStream[MoEFFN]],
        plans: Mapping[int, Replaced],
        metric: str = "js",
    ) -> None:
        self.streams = streams
        self.plans = plans
        self.metric = metric
        self._originals: dict[int, SpilledList] = {}

    def sums(
        self, chosen: Collection[int], candidates: Collection[int], leg: int
    ) -> dict[int, Tensor]:
        """Return, by candidate, the change of the output summed over each window of one leg, and
        the tokens or windows summed over, float64 (2, N); of all processes."""
        some, stream = {i: self.plans[i] for i in chosen}, self.streams[leg]
        if leg not in self._originals:
            (self._originals[leg],) = branches(stream, [{}])
        sums_CN, count_N = window_sums(
            stream,
            [{**some, i: self.plans[i]} for i in candidates],
            metric=METRICS[self.metric],
            logits=self.metric == "ppl",
            original=self._originals[leg],
        )
        both_C2N = torch.stack([sums_CN, count_N.expand_as(sums_CN)], 1)
        return dict(zip(candidates, torch.cat(gathered(both_C2N), 2), strict=True))

    def losses(self, chosen: Collection[int], candidates: Collection[int]) -> dict[int, float]:
        """Return the change of the output with each candidate condensed besides the chosen layers.

        Candidates are compared leg by leg; those that are significantly worse than the best one are
        left out.
        """
        running, parts = [*candidates], {i: list[Tensor]() for i in candidates}
        losses = dict[int, float]()
        for leg in range(len(self.streams)):
            for i, sums_2N in self.sums(chosen, running, leg).items():
                parts[i].append(sums_2N)
            every = {i: torch.cat(parts[i], 1) for i in running}
            losses = {i: (x.sum() / n.sum().clamp(min=1)).item() for i, (x, n) in every.items()}
            by_window = {i: sums_N / n_N.clamp(min=1) for i, (sums_N, n_N) in every.items()}
            best_N = by_window[min(running, key=lambda i: (losses[i], i))]
            running = [i for i in running if not significantly_worse(by_window[i], best_N, SURE)]
            if len(running) == 1:
                break
        return losses

    def order(
        self, search: str, scores: Mapping[int, float], done: Sequence[int] = ()
    ) -> Iterator[tuple[int, dict[int, float]]]:
        """Yield layers in the order in which to condense them, each with the losses it was chosen
        by.

        Args:
            search: racing, greedy, global-rank, or any other name to order by ``scores``.
            scores: by layer; the lowest is condensed first.
            done: layers that were chosen before, in order.
        """
        chosen = [*done]
        left = [i for i in self.plans if i not in chosen]
        losses = dict(scores)
        if search == "global-rank" and left:
            losses = self.losses((), left)
        while left:
            if search in ("greedy", "racing"):
                losses = self.losses(chosen, left)
            best = min(losses.keys() & left, key=lambda i: (losses[i], i))
            yield best, {i: losses[i] for i in left if i in losses}
            chosen.append(best)
            left.remove(best)

    def close(self) -> None:
        """Delete the outputs kept on disk."""
        for original in self._originals.values():
            original.clear()
