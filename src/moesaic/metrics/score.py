"""Scores of a model: prediction of a text, routing, and size.

The logits of two models are compared at every token, over the whole vocabulary, without
truncation. Of a model that is read from disk only the last layer's outputs and the head are held
meanwhile (see :class:`moesaic.metrics.forward.Layerwise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moesaic.arch.dense import LayerUse
from moesaic.arch.lookup import base_arch
from moesaic.data.text import IGNORED, Tokens
from moesaic.distributed import process
from moesaic.errors import MoesaicError
from moesaic.io.models import sizes_in
from moesaic.losses import divergence, in_chunks
from moesaic.metrics import forward
from moesaic.surgery import layer_uses
from moesaic.types import JSON, Model, Tokenizer, Track, Values, silent

LARGEST = 709.0
"""Nats a token of the largest perplexity that is reported: JSON has no infinity."""
LEAST_COMMON = 0.9
"""Least share of the larger vocabulary that the smaller one has, for two models to be compared."""
FIGURES = (
    *("perplexity", "tokens", "total_parameters", "active_parameters", "active_ratio"),
    *("nominal_active_ratio", "router_parameters", "total_bytes"),
)
"""Figures of every score, in the order in which they are printed."""


# --- size ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Parameter counts of a model."""

    total_parameters: int
    active_parameters: int
    """Parameters that one token runs: embeddings, head and routers included."""
    active_ratio: float
    """Share of the original's projections that one token runs (see :mod:`moesaic.arch.dense`)."""
    router_parameters: int
    total_bytes: int
    """Bytes of all parameters, in their types in memory."""
    layers: tuple[LayerUse, ...]


def model_size(model: Model, routing: Mapping[int, forward.Routing] | None = None) -> Size:
    """Count the parameters of a loaded model or a skeleton.

    Args:
        model: a dense or converted causal language model.
        routing: measured routing by decoder layer; None counts as under uniform routing.
    """
    measured = routing or {}
    layers = [
        replace(use, active_width=measured[i].active_width) if i in measured else use
        for i, use in enumerate(layer_uses(model, base_arch(model.config)))
    ]
    total = sum(p.numel() for p in model.parameters())
    stored = sum(use.stored for use in layers)
    projections = stored + sum(use.dropped - use.copied for use in layers)
    used = sum(use.active for use in layers)
    return Size(
        total_parameters=total,
        active_parameters=round(total - stored + used),
        active_ratio=used / projections,
        router_parameters=sum(use.router for use in layers),
        total_bytes=sum(sizes_in(model)),
        layers=tuple(layers),
    )


# --- quality -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Quality of a model's predictions of one part of a text."""

    perplexity: float
    tokens: int
    """Number of scored tokens."""
    kl: float | None = None
    """Mean of KL(original || this model) over the scored tokens, in nats a token; None where it was
    compared with nothing."""
    top1_agreement: float | None = None
    """Share of tokens at which original and this model think the same next one most probable."""

    def as_json(self) -> JSON:
        """Return the figures that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Quality(Part):
    """Quality of a model's predictions of a text, with its routing."""

    routing: dict[int, forward.Routing] = field(repr=False)
    """Routing by decoder layer; empty for a model whose layers do not route."""
    sources: dict[str, Part] = field(default_factory=dict)
    """Quality by source of a mix, or by domain of rows that have one; empty for a single text."""
    kl_N: tuple[float, ...] = field(default=(), repr=False)
    """KL by window, weighted by its tokens, so that the mean is ``kl``."""


@dataclass(frozen=True, kw_only=True)
class Score(Quality, Size):
    """Figures that ``eval`` reports of one model; active parameters are those of the text's tokens,
    and bytes those of the types in which the model was measured."""

    bos: bool = False
    """True if windows begin with BOS, as the tokenizer's do; False for given token ids, which are
    measured unchanged."""
    nominal_active_ratio: float
    """Active ratio under uniform routing."""
    tasks: Mapping[str, Values] = field(default_factory=dict)
    """Keys of :func:`moesaic.metrics.tasks.measure_tasks` by task, and ``recovery`` if there was a
    comparison."""
    recovery: float | None = None
    """Recovery ratio over all tasks (:func:`moesaic.metrics.tasks.recovery_ratio`); None without a
    comparison."""
    generations: Mapping[str, Values] = field(default_factory=dict, repr=False)
    """Keys of :func:`moesaic.metrics.generations.generations`, by temperature."""
    against: Score | None = None
    """Model that this one was compared with."""
    baselines: Mapping[str, Score] = field(default_factory=dict, repr=False)
    """Scores of the original quantised to each type, compared with the original."""

    @property
    def kl_interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of ``kl``, from its spread over windows; None for one window."""
        if len(self.kl_N) < 2:
            return None
        kl_N = torch.tensor(self.kl_N, dtype=torch.float64)
        error = 1.96 * (kl_N.std() / len(kl_N) ** 0.5).item()
        return max(kl_N.mean().item() - error, 0.0), kl_N.mean().item() + error

    def __repr__(self) -> str:
        """Return quality and size, in one line."""
        kl = "" if self.kl is None else f", KL {self.kl:.4g}"
        size = f"{self.total_parameters:,} parameters, {self.active_ratio:.0%} active"
        return f"<Score: perplexity {self.perplexity:.4g}{kl} on {self.tokens:,} tokens; {size}>"

    def as_json(self) -> JSON:
        """Return the figures under the names that programs rely on."""
        figures: JSON = {name: getattr(self, name) for name in FIGURES}
        if self.bos:
            figures["bos"] = True
        if self.sources:
            figures["sources"] = {name: part.as_json() for name, part in self.sources.items()}
        for name in ("kl", "top1_agreement", "tasks", "recovery", "generations"):
            value = getattr(self, name)
            if value not in (None, {}):
                figures[name] = value
        if self.kl_interval:
            figures["kl_interval"] = [*self.kl_interval]
        if self.baselines:
            figures["baselines"] = {name: s.as_json() for name, s in self.baselines.items()}
        if self.against is not None:
            figures["against"] = self.against.as_json()
        return figures


def scores(
    runs: Sequence[forward.Runner], tokens: Tokens, track: Track = silent, shared: bool = False
) -> list[Score]:
    """Measure one model on a text, or two of which the first is compared with the second.

    The arguments are those of :func:`qualities`.
    """
    measured = qualities(runs, tokens, track, shared)
    return [
        Score(
            **vars(quality),
            **vars(model_size(run.shape, quality.routing)),
            bos=bool(tokens.begun),
            nominal_active_ratio=model_size(run.shape).active_ratio,
        )
        for run, quality in zip(runs, measured, strict=True)
    ]


@torch.no_grad()
def qualities(
    runs: Sequence[forward.Runner], tokens: Tokens, track: Track = silent, shared: bool = False
) -> list[Quality]:
    """Measure how well one model predicts a text, or two, the first compared with the second.

    Perplexity is exp of the mean next-token loss over windows; the first token of each is not
    scored, nor BOS, padding or tokens after it. A carved model that routes only in decoding is
    measured with every token routed. Each model runs once.

    Args:
        runs: one model, or a result and its original. If one was padded, or got more tokens,
            predictions of those that both have are measured.
        tokens: the windows.
        track: shows progress.
        shared: several processes share the batches, and all of them call this.

    Raises:
        MoesaicError: logits are not finite, no token can be scored, or vocabularies differ.
    """
    number, world = process() if shared else (0, 1)
    ours, *others = runs
    vocabulary = ours.shape.config.get_text_config().vocab_size
    most = min(forward.BATCH, forward.LOGITS // vocabulary)
    batches = list(tokens.batches(most))[number::world]
    # the original's layers first: then nothing of it but its states is kept
    # (a whole model runs in step with the other, whose bar is drawn)
    passes = [
        run.run(batches, track if isinstance(run, forward.Layerwise) else silent, "Original")
        for run in others
    ]
    passes = [ours.run(batches, track), *passes]
    of_windows: list[Tensor] = []
    of_parts: list[Tensor] = []
    for batch in batches:  # of the one before nothing is left when the next one's are made
        figures_CNL = _figures([next(passed.logits)[0] for passed in passes], batch.labels)
        of_windows.append(figures_CNL.sum(-1))
        of_parts.append(_by_part(batch, figures_CNL))
    for passed in passes:
        next(passed.logits, None)  # its end, where routing is whole
    sums_CN = torch.cat(forward.all_shares(of_windows, shared), 1)
    parts_PC = torch.stack(forward.all_shares(of_parts, shared)).sum(0)
    scored_N, losses_MN, compared_N = sums_CN[0], sums_CN[1 : len(runs) + 1], sums_CN[-2]
    if not scored_N.any():
        raise MoesaicError("The text has no token after another one to score.")
    if not losses_MN.isfinite().all():
        raise MoesaicError("The model's logits are not finite on this text; try dtype float32.")
    total_C = sums_CN.sum(1)
    window = total_C[0].item() / len(scored_N)
    return [
        Quality(
            **vars(_part(total_C, n)),
            routing=forward.all_routing(passed.routing, shared),
            sources={
                name: _part(sums_C, n)
                for name, sums_C in zip(tokens.parts, parts_PC, strict=True)
                if sums_C[0]
            },
            kl_N=() if n or not others else tuple((compared_N / window).tolist()),
        )
        for n, passed in enumerate(passes)
    ]


def _figures(logits: Sequence[Tensor], labels_NL: Tensor) -> Tensor:
    """Return figures of each predicted token (C, N, L - 1), float64, 0 where none is scored.

    Args:
        logits: of one model, or of a result and its original (N, L, V).
        labels_NL: token ids, :data:`IGNORED` where none is scored.

    Returns:
        along C: 1; the loss of each model; for two models KL(original || result), and 1 where both
        have the same most probable token.

    Raises:
        MoesaicError: vocabularies are of other sizes by far.
    """
    predicted = [out.shape[-1] for out in logits]
    if min(predicted) < LEAST_COMMON * max(predicted):
        raise MoesaicError(
            f"against: the original predicts {predicted[1]:,} tokens, the model "
            f"{predicted[0]:,}; measure each by itself."
        )
    logits = [out[..., : min(predicted)] for out in logits]
    scored_NL = labels_NL[:, 1:] != IGNORED
    # of one model two, of a result and its original five
    figures_CT = torch.ones(3 * len(logits) - 1, int(scored_NL.sum()), dtype=torch.float64)
    next_T1 = labels_NL[:, 1:][scored_NL][:, None]
    first = 0
    for log_p in zip(*(in_chunks(out, labels_NL.to(out.device)) for out in logits), strict=True):
        here = slice(first, first := first + len(log_p[0]))
        for n, p_TV in enumerate(log_p, 1):
            figures_CT[n, here] = -p_TV.gather(1, next_T1[here].to(p_TV.device))[:, 0].double()
        for p_TV in log_p[1:]:
            q_TV = log_p[0].to(p_TV.device)
            figures_CT[-2, here] = divergence(p_TV, q_TV)
            figures_CT[-1, here] = (p_TV.argmax(-1) == q_TV.argmax(-1)).double()
    figures_CNL = figures_CT.new_zeros(len(figures_CT), *scored_NL.shape)
    figures_CNL[:, scored_NL] = figures_CT
    return figures_CNL


def _part(sums_C: Tensor, model: int) -> Part:
    """Return one model's quality from these sums over tokens."""
    tokens, *figures = sums_C.tolist()
    mean = [figure / max(1, tokens) for figure in figures]
    perplexity = math.exp(min(mean[model], LARGEST))
    return Part(perplexity, int(tokens), *(mean[2:] if model == 0 else ()))


def _by_part(batch: Tokens, figures_CNL: Tensor) -> Tensor:
    """Add up figures by the part of the text that tokens belong to (P, C)."""
    sums_PC = figures_CNL.new_zeros(len(batch.parts), len(figures_CNL))
    if batch.part_NL is None:
        return sums_PC
    scored_NL = batch.labels[:, 1:] != IGNORED
    return sums_PC.index_add_(0, batch.part_NL[:, 1:][scored_NL], figures_CNL[:, scored_NL].T)


def check_vocabularies(model: Tokenizer, original: Tokenizer) -> None:
    """Refuse to compare models token by token if a token id has different meanings.

    Both get the same ids, so that nothing else need agree: tokenizers may split text differently,
    as those of GGUF files do, and a vocabulary may be padded.

    Raises:
        MoesaicError: an id stands for two tokens.
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
