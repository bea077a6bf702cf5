"""CD-MoE over a whole model: each layer's experts (Alg. 1), then which layers (Alg. 2).

Alg. 2 adds the layer that moves the model's last hidden state least, after the final norm, again
and again. One round is one pass over the layers: each candidate branches off at its own layer, and
all branches go on together, so that a model read from disk is read once a round.

``racing`` compares the same candidates on less text. Each round begins with all of them on a few
windows, and those that are behind the best one for good, by the standard error of the difference
from window to window, are out; the others go on with four times the text, until one is left or the
text ends.

Comparisons (Tab. 7): ``rank`` orders layers by the divergence of the layer's own output,
``global-rank`` by the model's with that layer alone condensed. ``cosine`` is the rule of He et al.
(2024) for Block Drop and Layer Drop: the module whose output is most like its input goes first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import hands_on
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.data.text import Tokens
from moesaic.distributed import gathered, mean_over_processes
from moesaic.methods.condense.config import CondenseConfig
from moesaic.methods.condense.divergence import DIVERGENCES, cosine
from moesaic.methods.condense.experts import (
    Outputs,
    candidate_losses,
    fixed_gates,
    greedy_experts,
    ranked_experts,
    weight_scores,
)
from moesaic.observation.branches import branches
from moesaic.observation.stream import Block, LayerStream, Spill, valid
from moesaic.plans.condensed import NO_FFN, NONE_K, CondensedLayer
from moesaic.plans.dropped import DroppedLayer
from moesaic.plans.regression import significantly_worse
from moesaic.surgery import applied
from moesaic.types import JSON

Replaced: TypeAlias = CondensedLayer | DroppedLayer
CHUNK_BYTES = 128 << 20
"""Expert outputs computed at a time."""
FIRST, LEAST, GROWTH = 16, 8, 4
"""A race begins on one of so many windows, and at least on so many, and goes on with so many times
the text."""
SURE = 3.0
"""Standard errors of the mean difference by which a candidate is behind for good."""


class ExpertSearch:
    """Decides what one layer would be condensed to, and how much that would change it.

    Args:
        config: the options.
        stream: that the layer is of.
        arch: its architecture.
        block: the layer, open.
        hidden: what enters it, one entry a batch.
    """

    def __init__(
        self,
        config: CondenseConfig,
        stream: LayerStream[MoEFFN],
        arch: MoEArch,
        block: Block,
        hidden: Spill,
    ) -> None:
        self.config, self.stream, self.arch = config, stream, arch
        self.block, self.hidden, self.view = block, hidden, arch.mixture(block.layer)
        self.divergence = DIVERGENCES["js" if config.metric == "ppl" else config.metric]
        self.inputs, self.reference = Spill(1 << 30), Spill(1 << 30)
        """By batch what enters the layer's block, and what the layer makes of it (T, D)."""

    def decide(self) -> tuple[Replaced, JSON]:
        """The layer's plan, and what it costs beside the other variants (Fig. 5)."""
        try:
            with self.stream.collected(self.view.block, self.inputs, None, self.block.index):
                for out_TD in self._outputs():
                    self.reference.append(out_TD)
            return self._decide()
        finally:
            self.inputs.clear()
            self.reference.clear()

    def _outputs(self, plan: Replaced | None = None) -> Iterator[Tensor]:
        """What the layer makes of each batch (T, D), as it is or as a plan would have it."""
        instead = nullcontext() if plan is None else applied(self.block.layer, self.arch, plan)
        with instead as layer:
            outputs = self.block.outputs(self.hidden, layer)
            for out, mask in zip(outputs, self.stream.masks(), strict=False):
                yield valid(out, mask)

    def _decide(self) -> tuple[Replaced, JSON]:
        config, view = self.config, self.view
        g_A, calls_E = self._gates()
        g_E = g_A[: view.count]
        shared, routed = self._shared(g_A[view.count :]), NONE_K
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
        with_experts = self._with_experts(shared, routed, g_E)
        variants: dict[str, Replaced] = {"attention": NO_FFN}
        if not hands_on(type(self.block.layer).forward):
            variants["nothing"] = DroppedLayer()
        if shared.shared and not view.apart(routed=False):
            variants["shared"] = shared
        variants[config.keep] = variants.get(config.keep, with_experts)
        analysis |= {
            "divergence": {name: self._cost(plan) for name, plan in variants.items()},
            "cosine": self._importance(),
        }
        return variants[config.keep], analysis

    def _gates(self) -> tuple[Tensor, Tensor]:
        """g of Eq. 2 over the tokens of all processes (A,), and how often each was chosen (E,)."""
        view = self.view
        sums_2A = torch.zeros(2, view.weighed, dtype=torch.float64)
        for x_TD in self.stream.entered(self.block, self.inputs):
            w_TA = view.routing.every_weight(view.logits(x_TD.to(view.device)).float())
            sums_2A += torch.stack([w_TA.double().sum(0), (w_TA != 0).double().sum(0)]).cpu()
        sums_2A = torch.stack(gathered(sums_2A)).sum(0)
        return fixed_gates(sums_2A[0], sums_2A[1]), sums_2A[1, : view.count]

    def _shared(self, g_S: Tensor) -> CondensedLayer:
        """The layer with its shared path alone; ``g_S`` are its experts' where they are weighed."""
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
        return CondensedLayer(NONE_K, torch.empty(0), width, True, scale, gated)

    def _with_experts(
        self, shared: CondensedLayer, routed_K: Tensor, g_E: Tensor
    ) -> CondensedLayer:
        """The shared path with some routed experts at their fixed weights."""
        gates_K, width = g_E[routed_K].float(), shared.width + len(routed_K) * self.view.width
        return replace(shared, experts_K=routed_K, gates_K=gates_K, width=width)

    def _greedy(self, shared: CondensedLayer, g_E: Tensor, k: int) -> tuple[list[int], list[float]]:
        """Alg. 1 over outputs that are computed once and kept, on disk where they are many."""
        view, factor = self.view, self._factor()
        if factor is None:

            def run(chosen: list[int], left: list[int]) -> Tensor:
                sets = [torch.tensor([*chosen, i]) for i in left]
                return torch.tensor(
                    [self._cost(self._with_experts(shared, routed, g_E)) for routed in sets]
                )

            return greedy_experts(run, g_E, k)
        start, experts = Spill(1 << 30), Spill(2 << 30)
        try:
            for out_TD in self._outputs(shared):
                start.append(out_TD)
            for x_TD in self.inputs:
                rows = max(1, CHUNK_BYTES // (view.count * x_TD.shape[1] * x_TD.element_size()))
                parts = [
                    view.outputs(x, torch.ones(len(x), view.count, dtype=torch.bool))
                    for x in x_TD.to(view.device).split(rows)
                ]
                experts.append(torch.cat(parts) * factor)

            def losses(chosen: list[int], left: list[int]) -> Tensor:
                batches = map(Outputs, self.reference, start, experts)
                return candidate_losses(batches, chosen, g_E, left, self.divergence)

            return greedy_experts(losses, g_E, k)
        finally:
            start.clear()
            experts.clear()

    def _factor(self) -> float | None:
        """The factor by which the layer adds what its block makes to the residual stream.

        None where it does something else with it. Asked of the first batch.
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
        """Divergence of the layer's output from what it was."""
        pairs = zip(self.reference, self._outputs(plan), strict=True)
        return _mean([self.divergence(o_TD, out_TD) for o_TD, out_TD in pairs])

    def _importance(self) -> dict[str, float]:
        """1 - cos of input and output, of the block with its residual and of the whole layer."""
        entering = map(valid, self.hidden, self.stream.masks())
        befores = {"attention": self._outputs(NO_FFN), "nothing": entering}
        return {
            name: _mean([cosine(x, o) for x, o in zip(before, self.reference, strict=True)])
            for name, before in befores.items()
        }


def _mean(parts: Sequence[Tensor]) -> float:
    """Mean over the tokens of all processes."""
    total = sum(part.double().sum().cpu() for part in parts)
    return mean_over_processes(torch.as_tensor(total), sum(len(part) for part in parts)).item()


# --- Alg. 2 --------------------------------------------------------------------------------------


def legs(tokens: Tokens) -> list[Tokens]:
    """The windows of a race in a random order, cut where it goes on with more text.

    Every process has as many parts: those of the process with the fewest windows.
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
    """Orders layers by what condensing them does to the model's output.

    Args:
        streams: over the text, or over its :func:`legs`.
        plans: what each layer would become.
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
        self._references: dict[int, Spill] = {}

    def losses(self, chosen: Collection[int], candidates: Collection[int]) -> dict[int, float]:
        """The model's loss with the chosen layers condensed, and each candidate as well."""
        parts = [self.sums(chosen, candidates, n) for n in range(len(self.streams))]
        return {i: _mean_of([part[i] for part in parts]) for i in candidates}

    @torch.no_grad()
    def sums(
        self, chosen: Collection[int], candidates: Collection[int], leg: int
    ) -> dict[int, Tensor]:
        """By candidate what each window of one leg loses, summed, and the tokens or windows that it
        is the sum of, float64 (2, N); of all processes."""
        some, stream = {i: self.plans[i] for i in chosen}, self.streams[leg]
        changes = [{**some, i: self.plans[i]} for i in candidates]
        if leg not in self._references:
            reference = self._references[leg] = Spill(1 << 30)
            (final,) = branches(stream, [{}])
            for output, _ in self._judged(stream, final):
                reference.append(output)
            final.clear()
        sums: dict[int, Tensor] = {}
        for i, final in zip(candidates, branches(stream, changes), strict=True):
            local = self._by_window(stream, self._references[leg], final)
            sums[i] = torch.cat(gathered(local), 1)
            final.clear()
        return sums

    def _judged(
        self, stream: LayerStream[MoEFFN], final: Spill
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """What is compared of each batch, (T, D) after the final norm or (B,) perplexities, and how
        many rows of it each window has."""
        for out, batch in stream.heads(final, logits=self.metric == "ppl"):
            windows, mask = len(batch.input_ids), batch.attention_mask
            if self.metric == "ppl":
                yield _window_perplexities(out, batch), [1] * windows
            elif mask is None:
                yield valid(out, None), [out.shape[1]] * windows
            else:
                yield valid(out, mask), mask.sum(1).tolist()

    def _by_window(self, stream: LayerStream[MoEFFN], reference: Spill, final: Spill) -> Tensor:
        """Sums and counts of :meth:`sums`, of this process's windows."""
        sums, counts = list[float](), list[int]()
        for before, (after, rows) in zip(reference, self._judged(stream, final), strict=True):
            if self.metric == "ppl":
                losses = after - before
            else:
                losses = DIVERGENCES[self.metric](before, after)
            sums += [part.double().sum().item() for part in losses.split([*rows])]
            counts += rows
        return torch.tensor([sums, counts], dtype=torch.float64)

    def order(
        self, search: str, scores: Mapping[int, float], done: Sequence[int] = ()
    ) -> Iterator[tuple[int, dict[int, float]]]:
        """Layers in the order they should be condensed, each with the losses it was chosen by.

        Args:
            search: racing, greedy, global-rank, or another by ``scores``.
            scores: of every layer; the lowest goes first.
            done: layers that were chosen before, in order.
        """
        chosen = [*done]
        left = [i for i in self.plans if i not in chosen]
        losses: dict[int, float] = dict(scores)
        if search == "global-rank" and left:
            losses = self.losses((), left)
        while left:
            if search == "greedy":
                losses = self.losses(chosen, left)
            elif search == "racing":
                losses = self._raced(chosen, left)
            best = min(losses.keys() & left, key=lambda i: (losses[i], i))
            yield best, {i: losses[i] for i in left if i in losses}
            chosen.append(best)
            left.remove(best)

    def _raced(self, chosen: Sequence[int], left: Sequence[int]) -> dict[int, float]:
        """The losses of those that ran the last leg, on all text that they were compared on."""
        running, collected = [*left], {i: list[Tensor]() for i in left}
        losses = dict[int, float]()
        for leg in range(len(self.streams)):
            for i, sums_2N in self.sums(chosen, running, leg).items():
                collected[i].append(sums_2N)
            losses = {i: _mean_of(collected[i]) for i in running}
            by_window = {i: _by_window(collected[i]) for i in running}
            best_N = by_window[min(running, key=lambda i: (losses[i], i))]
            running = [i for i in running if not significantly_worse(by_window[i], best_N, SURE)]
            if len(running) == 1:
                break
        return losses

    def close(self) -> None:
        """Let go of what is kept on disk."""
        for reference in self._references.values():
            reference.clear()


def _mean_of(parts: Sequence[Tensor]) -> float:
    """The mean loss over windows, of their sums and counts (2, N) each."""
    total, count = torch.cat([*parts], 1).sum(1).tolist()
    return float(total / max(1.0, count))


def _by_window(parts: Sequence[Tensor]) -> Tensor:
    """The loss of each window (N,), of their sums and counts (2, N) each."""
    sums_N, count_N = torch.cat([*parts], 1)
    return sums_N / count_N.clamp(min=1)


def _window_perplexities(logits_BLV: Tensor, batch: Tokens) -> Tensor:
    """exp of the mean next-token loss of each window (B,); padding is not scored."""
    ids = batch.input_ids.to(logits_BLV.device)[:, 1:]
    losses = F.cross_entropy(logits_BLV[:, :-1].float().transpose(1, 2), ids, reduction="none")
    mask = torch.ones_like(ids) if batch.attention_mask is None else batch.attention_mask[:, 1:]
    mask = mask.to(losses)
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).exp()
