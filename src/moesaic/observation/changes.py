"""KL at a model's output after changing some layers: measured, or estimated.

Many changes are measured in one pass. Every change branches off at the first layer in which it
differs; until then it shares the hidden states of others. So a model is read from disk once for all
of them, and layers before a change are run once for all.

Measuring what a change of a layer does to the output means running every later layer again. An
estimate takes one forward and one backward pass over a model, for all changes of all layers: only
the changed layer is run, and the layers after it are linearised. For each position s a label
y_s is drawn from the model's own distribution, and the log-likelihood of the labels is carried
back. With g_t its gradient at the layer's output for token t, and delta_t what the change does to
that output (exact), a window of T predicted tokens has

    v = sum_t <g_t, delta_t>        estimated KL = v^2 / 2        nats, of the whole window

which is the quadratic form of the Fisher information in the direction of the change: labels of
different positions are independent, so that mixed terms have expectation zero. Several draws of the
labels are averaged. The v of changes in different layers add up before they are squared. A changed
head needs no estimate: its KL is measured.

Shape suffixes: C changes, K draws of labels, N windows, B windows of a batch, L tokens, D hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.data.text import Tokens
from moesaic.io.checkpoint import not_finite
from moesaic.io.outputs import whole_file
from moesaic.losses import divergence, in_chunks, log_probabilities, predicting
from moesaic.modules.running import SpilledList
from moesaic.observation.stream import BEFORE, Block, LayerStream
from moesaic.plans.base import LayerPlan
from moesaic.surgery import converted_copy
from moesaic.types import Track, release_memory, silent

StandIn = Callable[[nn.Module], AbstractContextManager[nn.Module | None]]
"""Function from a layer to a context with the module that replaces it; None: the layer itself."""
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


# --- estimates -----------------------------------------------------------------------------------


PRICED, SHORT = 2048, 64
"""Tokens by which changes are priced for a choice, and those of a window."""
DRAWS, FEW, LARGE = 32, 8, 1 << 30
"""Draws of labels by which a choice is made; of models with so many parameters fewer."""
PRICED_AT_ONCE = 1024
"""Tokens of a batch while changes are priced: the activations of wide experts take memory beside
their weights."""
IN_MEMORY = 1 << 28
"""Bytes of hidden states, and of gradients, that are kept in memory; the rest is on disk."""
LOGITS = 1 << 29
"""Bytes of the model's own logits that are kept while changes of its head are measured."""


@dataclass
class PricedPart:
    """Open decoder layer, or what lies around the layers, with the gradient at its output.

    Attributes:
        place: the layer's index; :data:`~moesaic.observation.stream.BEFORE` of the embeddings.
    """

    place: int
    _outputs: Callable[[StandIn], Iterable[Tensor]]
    """Function from what changes the part to its output then, one entry a batch (B, L, D)."""
    _unchanged: SpilledList
    _gradients: Sequence[SpilledList]
    """At that output, a draw a spill, one entry a batch (B, L, D)."""

    @torch.no_grad()
    def directional(self, stand_in: StandIn) -> Tensor:
        """Return v (K, N), float64: the change of the labels' log-likelihood by a changed part.

        Args:
            stand_in: makes of the part what stands in its place, or changes it while the context
                lasts.
        """
        pairs = zip(self._outputs(stand_in), self._unchanged, strict=True)
        v_KN = [
            torch.stack([_per_window((after - before) * g[b]) for g in self._gradients])
            for b, (after, before) in enumerate(pairs)
        ]
        release_memory()  # else what wide experts leave behind would add up from change to change
        return torch.cat(v_KN, 1).cpu()


def _layer_outputs(
    block: Block, entering: Sequence[Tensor], handed: Sequence[object], stand_in: StandIn
) -> Iterator[Tensor]:
    """Yield a changed layer's output for each batch of its input."""
    with stand_in(block.layer) as layer:
        for b, before in enumerate(entering):
            yield block.output(b, before, handed[b], layer)


def _embedded(stream: LayerStream[object], stand_in: StandIn) -> Iterator[Tensor]:
    """Yield the first layer's input for each batch, of changed embeddings."""
    before = stream.change
    stream.change = lambda model, place: stand_in(model) if place == BEFORE else nullcontext()
    try:
        states, _ = stream.record()
    finally:
        stream.change = before
    yield from states
    states.clear()


@torch.no_grad()
def priced_layers(
    stream: LayerStream[object],
    draws: int = 1,
    seed: int = 0,
    track: Track = silent,
    last: Callable[[SpilledList], None] | None = None,
) -> Iterator[PricedPart]:
    """Run a model forward, and yield its layers from the last to the first, each open.

    One layer's weights are in memory at a time, and each is read twice. What lies around the layers
    comes in the end.

    Args:
        stream: the model, and the tokens.
        draws: draws of labels; a draw costs about two forward passes.
        seed: of the draws.
        track: shows progress.
        last: is shown the last layer's output, one entry a batch (B, L, D).
    """
    states, kwargs = stream.record()
    batches = len(states)
    entering, leaving = SpilledList(IN_MEMORY), SpilledList(IN_MEMORY)
    gradients = [SpilledList(IN_MEMORY // draws) for _ in range(draws)]
    handed: list[list[object]] = []
    try:
        for block in track(stream.blocks(kwargs), "Running the model", stream.count):
            for before in states:
                entering.append(before.clone())
            handed.append(block.handed(states))
            block.run(states)
        for after in states:
            leaving.append(after.clone())
        if last is not None:
            last(states)
        _draw(stream, states, gradients, seed, track)
        order = range(stream.count - 1, -1, -1)
        for block in track(stream.blocks(kwargs, order=order), "Pricing changes", stream.count):
            mine = [entering[block.index * batches + b] for b in range(batches)]
            outputs = partial(_layer_outputs, block, mine, handed[block.index])
            yield PricedPart(block.index, outputs, leaving, gradients)
            for b, before in enumerate(mine):
                _carry_back(block, b, before, handed[block.index][b], gradients)
                leaving.replace(b, before)
        yield PricedPart(BEFORE, partial(_embedded, stream), leaving, gradients)
    finally:
        for spill in (states, entering, leaving, *gradients):
            spill.clear()


@torch.enable_grad()
def _carry_back(
    block: Block, b: int, before: Tensor, handed: object, gradients: Sequence[SpilledList]
) -> None:
    """Replace gradients at a layer's output by those at its input, one batch of every draw.

    The graph ends here: it holds the layer's weights, beside which the next ones are read.
    """
    leaf = before.detach().requires_grad_()
    after = block.output(b, leaf, handed)
    for k, spill in enumerate(gradients, 1):
        given, more = spill[b].to(after.device), k < len(gradients)
        spill.replace(b, *torch.autograd.grad(after, leaf, given, retain_graph=more))


def _draw(
    stream: LayerStream[object],
    last: SpilledList,
    into: Sequence[SpilledList],
    seed: int,
    track: Track,
) -> None:
    """Append batches of the gradient (B, L, D) of drawn labels' log-likelihood, a draw a spill.

    With h the head's input and z its output, the log-likelihood of a label y is f(z_y) less the
    logarithm of a sum, f being the cap or scale of each logit alone. The gradient of that sum at h
    is the same for all draws, and that of f(z_y) is f'(z_y) times row y of the head.

    Logits are made of one window at a time: those of a batch may be larger than a layer.

    Raises:
        MoesaicError: a logit is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    head, passed = stream.model.get_output_embeddings(), list[tuple[Tensor, Tensor]]()
    seen = head.register_forward_hook(lambda _, entering, z: passed.append((entering[0], z)))
    with seen, stream.headed(logits=True, gradients=True) as finish:
        pairs = zip(stream.batches, last, strict=True)
        for batch, states in track(pairs, "Drawing labels", len(stream.batches)):
            found: list[list[Tensor]] = [[] for _ in into]
            for n, window in enumerate(states.split(1)):
                one = batch.rows(slice(n, n + 1))
                with torch.enable_grad():
                    leaf, counted = window.detach().requires_grad_(), predicting(one.labels)
                    logits_TV = finish(one, leaf)[counted].float()
                    (h_BLD, z_BLV), total = passed.pop(), logits_TV.logsumexp(-1).sum()
                    (slope_BLV,) = torch.autograd.grad(logits_TV.sum(), z_BLV, retain_graph=True)
                    (of_total,) = torch.autograd.grad(total, leaf, retain_graph=True)
                sums_TV = logits_TV.detach().double().softmax(-1).cumsum(-1).cpu()
                if not sums_TV.isfinite().all():
                    raise not_finite("The model computes")
                draws_TK = torch.rand(len(sums_TV), len(found), generator=generator).double()
                labels_TK = torch.searchsorted(sums_TV, draws_TK * sums_TV[:, -1:])
                slope_TV, labels_TK = slope_BLV[counted], labels_TK.to(leaf.device)
                for gradients, labels_T in zip(found, labels_TK.T, strict=True):
                    rows_TD = head.weight[labels_T] * slope_TV.gather(1, labels_T[:, None])
                    at_h = torch.zeros_like(h_BLD).masked_scatter_(counted[..., None], rows_TD)
                    (of_label,) = torch.autograd.grad(h_BLD, leaf, at_h, retain_graph=True)
                    gradients.append(of_label - of_total)
            for spill, gradients in zip(into, found, strict=True):
                spill.append(torch.cat(gradients))


def _per_window(product: Tensor) -> Tensor:
    """Return sums (B) over all but the first axis, float64."""
    return product.flatten(1).sum(1, dtype=torch.float64)


@dataclass(frozen=True)
class Estimates:
    """Effects of changes of a model on its prediction, window by window.

    Attributes:
        v_CKN: the change of the drawn labels' log-likelihood, float64. Those of changes in
            different layers add up.
        head_C: measured KL of changed heads, nats a token; 0 where a head is as it was.
        tokens: predicted tokens of a window, on average.
    """

    v_CKN: Tensor
    head_C: Tensor
    tokens: float

    @property
    def per_token(self) -> Tensor:
        """``v_CKN`` over the square root of twice the tokens: its squares are KLs, nats a token."""
        return self.v_CKN / (2 * max(self.tokens, 1.0)) ** 0.5

    @property
    def kl_CN(self) -> Tensor:
        """Estimated KL(original || changed) of the next token's distribution, nats a token (C, N).

        The counterpart of :func:`divergences`, for a fraction of its time. It is 10 to 35 % low for
        small changes, and lower for large ones: use it to choose. Windows weigh as much as they
        have tokens: the mean over windows is the mean over all tokens.
        """
        return self.per_token.square().mean(1) + self.head_C[:, None]


def priced_on(tokens: Tokens) -> Tokens:
    """Return some of a text's windows, cut into short ones.

    A window gives one sample for each draw of labels, however long it is.
    """
    length = tokens.input_ids.shape[1]
    some = tokens.rows(slice(max(2, PRICED // length)))
    if some.attention_mask is not None or length % SHORT:
        return some
    return Tokens(some.input_ids.reshape(-1, SHORT))


def draws_for(model: nn.Module) -> int:
    """Return the draws of labels by which changes of a model, or of a skeleton, are chosen.

    With eight draws of 32 windows an estimate has an error of 9 %. A large model has many groups of
    tensors, whose errors are independent, and its draws take long.
    """
    return DRAWS if sum(p.numel() for p in model.parameters()) < LARGE else FEW


def estimates(
    stream: LayerStream[object],
    changes: Sequence[Change],
    draws: int = 1,
    seed: int = 0,
    track: Track = silent,
    folder: Path | None = None,
) -> Estimates:
    """Estimate the effect of changes on the prediction; layers after a changed one are linearised.

    Args:
        stream: the model, and the tokens.
        changes: layers by number as they would be; what several share in a layer is one object. The
            model with other embeddings has the number :data:`~moesaic.observation.stream.BEFORE`,
            with another head the number of layers.
        draws: draws of labels.
        seed: of the draws.
        track: shows progress.
        folder: keeps what was found of each layer. A later call of the same arguments runs no
            change of those layers again.
    """
    tokens_N = torch.cat([predicting(batch.labels).sum(1) for batch in stream.batches])
    v_CKN = torch.zeros(len(changes), draws, len(tokens_N), dtype=torch.float64)
    head_C = torch.zeros(len(changes), dtype=torch.float64)

    def users(place: int) -> list[list[int]]:
        """Return the changes that share one object at a place."""
        every = defaultdict[int, list[int]](list)
        for c, change in enumerate(changes):
            if place in change:
                every[id(change[place])].append(c)
        return [*every.values()]

    def once(place: int, found: Iterable[Tensor]) -> Tensor:
        """Return the findings of a place, by its users; those of finished layers are read."""
        file = None if folder is None else folder / f"layer-{place}.safetensors"
        if file is not None and file.is_file():
            return load_file(file)["found"]
        result = torch.stack([*found])
        if file is not None:
            with whole_file(file) as work:
                save_file({"found": result}, work)
        return result

    def heads(states: SpilledList) -> None:
        if every := users(stream.count):
            plans = [changes[members[0]][stream.count] for members in every]
            found = track(_head_divergences(stream, states, plans), "Pricing heads", len(plans))
            for members, kl in zip(every, once(stream.count, found), strict=True):
                head_C[members] = kl

    for part in priced_layers(stream, draws, seed, track, heads):
        if every := users(part.place):
            plans = (changes[members[0]][part.place] for members in every)
            stands_in = (partial(layer_replacement, arch=stream.arch, plan=plan) for plan in plans)
            v_UKN = once(part.place, map(part.directional, stands_in))
            for members, v_KN in zip(every, v_UKN, strict=True):
                v_CKN[members] += v_KN
    return Estimates(v_CKN, head_C, tokens_N.double().mean().item())


def _head_divergences(
    stream: LayerStream[object], states: SpilledList, plans: Sequence[LayerPlan | StandIn]
) -> Iterator[Tensor]:
    """Yield KL(original || changed head), nats a token, of the windows whose logits may be kept."""
    kept, bytes = list[tuple[Tokens, Tensor, Tensor]](), 0
    with stream.headed(logits=True) as finish:
        for batch, last in zip(stream.batches, states, strict=True):
            for n, window in enumerate(last.split(1)):
                if bytes < LOGITS:
                    one = batch.rows(slice(n, n + 1))
                    p_TV = log_probabilities(finish(one, window), one.labels)
                    kept.append((one, window, p_TV))
                    bytes += p_TV.nbytes
        tokens = sum(len(p_TV) for *_, p_TV in kept)
        for plan in plans:
            with layer_replacement(stream.model, stream.arch, plan):
                after = (log_probabilities(finish(w, last), w.labels) for w, last, _ in kept)
                pairs = zip((p_TV for *_, p_TV in kept), after, strict=True)
                sums = [divergence(*pair).sum() for pair in pairs]
                yield torch.stack(sums).sum().cpu() / max(tokens, 1)
