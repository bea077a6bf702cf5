"""A model's score: how well it predicts a text, how it routed it, and how large it is.

Of two models the logits are compared at every token, over the whole vocabulary: nothing is cut off
or rounded. Of a model that is read from disk only the last layer's outputs and the head are held
meanwhile (see :class:`moesaic.metrics.forward.Layerwise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Model, Tokenizer, Track, Values, silent
from moesaic.metrics.forward import (
    BATCH,
    Layerwise,
    Runner,
    Whole,
    all_routing,
    all_shares,
    own_share,
)
from moesaic.metrics.routing_counts import Routing
from moesaic.metrics.size import model_size
from moesaic.nn.phase import set_mode

P = TypeVar("P", bound="Part")
LARGEST = 709.0
"""Nats a token of the largest perplexity that is told: JSON has no infinity."""


@dataclass(frozen=True)
class Part:
    """How well a model predicts one kind of text."""

    perplexity: float
    tokens: int
    """Tokens that were scored."""
    kl: float | None = None
    """Mean of KL(original || this model) over the scored tokens, in nats a token; None where it was
    compared with nothing."""
    top1_agreement: float | None = None
    """Share of tokens at which original and this model think the same next one most probable."""

    def as_json(self) -> JSON:
        """The figures that there are, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Quality(Part):
    """How well a model predicts a text, and how it routed its tokens."""

    routing: dict[int, Routing] = field(repr=False)
    """By decoder layer; empty for a model whose layers do not route."""
    sources: dict[str, Part] = field(default_factory=dict)
    """By source of a mix, or by domain of rows that have one; empty for a single text."""
    kl_N: tuple[float, ...] = field(default=(), repr=False)
    """``kl`` by window; windows weigh as much as they have tokens, so that their mean is ``kl``."""


@dataclass(frozen=True, kw_only=True)
class Score(Quality):
    """The figures that ``eval`` reports of one model."""

    total_parameters: int
    active_parameters: int
    """Parameters that one token runs on this text, embeddings and head included."""
    active_ratio: float
    """Measured on this text's routed tokens."""
    nominal_active_ratio: float
    """Under uniform routing."""
    router_parameters: int
    total_bytes: int
    """What all parameters take in memory, in the types in which the model was measured."""
    tasks: Mapping[str, Values] = field(default_factory=dict)
    """By task, the keys of :func:`moesaic.metrics.tasks.measure_tasks`; ``recovery`` beside them
    where it was compared."""
    recovery: float | None = None
    """Of all tasks together: :func:`moesaic.metrics.tasks.recovery_ratio`; None where it was
    compared with nothing."""
    mtp: Values = field(default_factory=dict)
    """Of layers that predict further tokens, the keys of
    :meth:`moesaic.metrics.drafts.Drafts.accepted`."""
    generations: Mapping[str, Values] = field(default_factory=dict, repr=False)
    """By temperature, the keys of :func:`moesaic.metrics.generations.generations`."""
    against: Score | None = None
    """The model that this one was compared with."""

    def as_json(self) -> JSON:
        """The figures under the names that programs rely on."""
        figures: JSON = {
            "perplexity": self.perplexity,
            "tokens": self.tokens,
            "total_parameters": self.total_parameters,
            "active_parameters": self.active_parameters,
            "active_ratio": self.active_ratio,
            "nominal_active_ratio": self.nominal_active_ratio,
            "router_parameters": self.router_parameters,
            "total_bytes": self.total_bytes,
        }
        if self.sources:
            figures["sources"] = {name: part.as_json() for name, part in self.sources.items()}
        for name in ("kl", "top1_agreement", "mtp", "tasks", "recovery", "generations"):
            value = getattr(self, name)
            if value not in (None, {}):
                figures[name] = value
        if self.against is not None:
            figures["against"] = self.against.as_json()
        return figures


def score(model: Model | Runner, tokens: Tokens) -> Score:
    """Measure one model on a text; see :func:`scores`.

    Args:
        model: loaded, or a :class:`~moesaic.metrics.forward.Runner`.
        tokens: the windows.
    """
    run = model if isinstance(model, Whole | Layerwise) else Whole(model)
    return scores([run], tokens)[0]


def scores(
    runs: Sequence[Runner], tokens: Tokens, track: Track = silent, shared: bool = False
) -> list[Score]:
    """Measure one model on a text, or two of which the first is compared with the second.

    The arguments are those of :func:`qualities`.
    """
    with ExitStack() as modes:
        for run in runs:  # channels: what is read is counted
            modes.enter_context(set_mode(run.shape, "always"))
        measured = qualities(runs, tokens, track, shared)
        sizes = [model_size(run.shape, q.routing) for run, q in zip(runs, measured, strict=True)]
    return [
        Score(
            **vars(quality),
            total_parameters=size.total_parameters,
            active_parameters=size.active_parameters,
            active_ratio=size.active_ratio,
            nominal_active_ratio=model_size(run.shape).active_ratio,
            router_parameters=size.router_parameters,
            total_bytes=size.total_bytes,
        )
        for run, quality, size in zip(runs, measured, sizes, strict=True)
    ]


@torch.no_grad()
def qualities(
    runs: Sequence[Runner], tokens: Tokens, track: Track = silent, shared: bool = False
) -> list[Quality]:
    """How well one model predicts a text, or two, of which the first is compared with the second.

    Perplexity is exp of the mean next-token loss over windows; the first token of each is not
    scored, nor padding or what stands behind it. A model that skips channels at decoding is
    measured with every token as at decoding. Each model runs once.

    Args:
        runs: one model, or a result and its original, which has the same vocabulary.
        tokens: the windows.
        track: shows progress.
        shared: several processes share the batches, and all of them call this.

    Raises:
        MoesaicError: logits are not finite, no token can be scored, or vocabularies differ.
    """
    batches = own_share(list(tokens.batches(BATCH)), shared)
    ours, *others = runs
    # the original's layers first: then nothing of it but its states is kept
    # (a whole model runs in step with the other, whose bar is drawn)
    passes = [
        run.run(batches, track if isinstance(run, Layerwise) else silent, "Original")
        for run in others
    ]
    passes = [ours.run(batches, track), *passes]
    losses = [_Losses() for _ in passes]
    sums: list[Tensor] = []
    windows: list[Tensor] = []
    for parts in zip(*(passed.logits for passed in passes), strict=True):
        batch = parts[0][1]
        logits = [out for out, _ in parts]
        predicted = [out.shape[-1] for out in logits]
        if len({*predicted}) > 1:
            raise MoesaicError(
                f"against: the original predicts {predicted[1]:,} tokens, the model "
                f"{predicted[0]:,}; measure each by itself."
            )
        for added, out in zip(losses, logits, strict=True):
            added.add(out, batch)
        for theirs in logits[1:]:
            figures, kl_N = _compared(theirs, logits[0].to(theirs.device), batch)
            sums.append(figures)
            windows.append(kl_N)
    quality, *compared = (
        added.quality(tokens, passed.routing, shared)
        for added, passed in zip(losses, passes, strict=True)
    )
    if others:
        total, *of_parts = torch.stack(all_shares(sums, shared)).sum(0)
        sources = {
            name: _beside(part, sums_2)
            for (name, part), sums_2 in zip(quality.sources.items(), of_parts, strict=True)
        }
        kl_N = torch.cat(all_shares(windows, shared))
        share = quality.tokens / len(kl_N)
        by_window = tuple((kl_N / share).tolist())
        quality = _beside(replace(quality, sources=sources, kl_N=by_window), total)
    return [
        replace(q, sources={name: part for name, part in q.sources.items() if part.tokens})
        for q in (quality, *compared)
    ]


def _beside(part: P, sums_2: Tensor) -> P:
    """The same with its divergence and its agreement, of their sums over its tokens."""
    divergence, agreement = (sums_2 / max(1, part.tokens)).tolist()
    return replace(part, kl=divergence, top1_agreement=agreement)


class _Losses:
    """Next-token losses, added up by window, and by part of the text."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.parts: list[Tensor] = []
        """Of each batch the parts' losses and tokens, float64 (P, 2)."""

    def add(self, logits: Tensor, batch: Tokens) -> None:
        """Score a batch.

        Args:
            logits: (B, L, V), of the model.
            batch: its tokens; padding is not scored, nor anything behind padding.
        """
        ids = batch.input_ids.to(logits.device)
        predicted = logits[:, :-1].float()
        loss = F.cross_entropy(predicted.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss_BL = loss.view(len(ids), -1).double()
        scored_BL = _scored(batch).to(logits.device)
        loss_BL = loss_BL.masked_fill(~scored_BL, 0)
        self.sums.append(loss_BL.sum(1).cpu())
        self.counts.append(scored_BL.sum(1).cpu())
        both_T2 = torch.stack([loss_BL, scored_BL.double()], -1)[scored_BL].cpu()
        self.parts.append(_by_part(batch, both_T2, scored_BL.cpu()))

    def quality(self, tokens: Tokens, routing: dict[int, Routing], shared: bool) -> Quality:
        """The mean over all windows, of all processes where they share them."""
        sum_N = torch.cat(all_shares(self.sums, shared))
        count_N = torch.cat(all_shares(self.counts, shared))
        if not count_N.any():
            raise MoesaicError("The text has no token behind another one to score.")
        if not sum_N.isfinite().all():
            raise MoesaicError("The model's logits are not finite on this text; try dtype float32.")
        parts = [
            Part(*_mean(loss, count))
            for loss, count in torch.stack(all_shares(self.parts, shared)).sum(0)
        ]
        sources = dict(zip(tokens.parts, parts, strict=True))
        every = all_routing(routing, shared)
        return Quality(*_mean(sum_N, count_N), routing=every, sources=sources)


def _scored(batch: Tokens) -> Tensor:
    """Which next tokens are scored, bool (B, L - 1): those behind a real token, and real."""
    return batch.real[:, 1:] & batch.real[:, :-1]


def _mean(sum_N: Tensor, count_N: Tensor) -> tuple[float, int]:
    """Perplexity, and the tokens that it is of."""
    count = int(count_N.sum())
    loss = sum_N.sum().item() / max(1, count)
    return math.exp(min(loss, LARGEST)), count


def _by_part(batch: Tokens, values_TC: Tensor, chosen_NL: Tensor) -> Tensor:
    """Values of predicted tokens, added up by the part of the text that they are of (P, C).

    Args:
        batch: the tokens.
        values_TC: of those that were chosen, in order.
        chosen_NL: bool (N, L - 1): which of the predicted ones.
    """
    sums_PC = values_TC.new_zeros(len(batch.parts), values_TC.shape[-1])
    if batch.part_NL is None:
        return sums_PC
    return sums_PC.index_add_(0, batch.part_NL[:, 1:][chosen_NL], values_TC)


def _compared(theirs: Tensor, ours: Tensor, batch: Tokens) -> tuple[Tensor, Tensor]:
    """Sums over the scored tokens of the divergence and of the agreement, of all and then of each
    part of the text, float64 (1 + P, 2); and of the divergence alone by window (N,)."""
    total, figures = torch.zeros(2, dtype=torch.float64), []
    scored_NL = _scored(batch)
    for p_LV, q_LV, scored_L in zip(theirs, ours, scored_NL, strict=True):
        chosen = scored_L.to(theirs.device)
        p, q = (x[:-1][chosen].float() for x in (p_LV, q_LV))
        agreed = (p.argmax(-1) == q.argmax(-1)).double()
        figures_T2 = torch.stack([kl(p, q), agreed], -1)
        total += figures_T2.sum(0).cpu()
        figures.append(figures_T2.cpu())
    kl_N = torch.stack([figures_T2[:, 0].sum() for figures_T2 in figures])
    return torch.cat([total[None], _by_part(batch, torch.cat(figures), scored_NL)]), kl_N


def kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL(p || q) of each token in nats (T), float64.

    Args:
        p_TV: logits of the one distribution.
        q_TV: logits of the other.
    """
    log_p, log_q = p_TV.log_softmax(-1), q_TV.log_softmax(-1)
    # what p never predicts adds nothing, even where q never does either
    difference = (log_p - log_q).masked_fill(log_p == -torch.inf, 0)
    return (log_p.exp() * difference).double().sum(-1)


def check_vocabularies(model: Tokenizer, original: Tokenizer) -> None:
    """Refuse to compare models token by token to which a token is not the same.

    Both get the same tokens, so that nothing else need agree: one file's reader may cut text
    otherwise than another's, as of GGUF files, and a vocabulary may be filled up with more.

    Raises:
        MoesaicError: a number stands for two tokens.
    """
    ours, theirs = (
        {i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (model, original)
    )
    different = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    if different or not ours.keys() & theirs.keys():
        first = (
            f": {different[0]} is {ours[different[0]]!r}, there {theirs[different[0]]!r}"
            if different
            else ""
        )
        raise MoesaicError(
            f"against: its vocabulary differs from the model's{first}. Their predictions cannot be "
            "compared token by token; measure each by itself."
        )
