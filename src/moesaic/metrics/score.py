"""A model's score: quality, size and routing of one text, measured together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moesaic.data.text import Tokens
from moesaic.foreign import JSON, Model, Track, Values, silent
from moesaic.metrics.divergence import beside
from moesaic.metrics.forward import Runner, runner
from moesaic.metrics.perplexity import Quality, perplexity
from moesaic.metrics.routing import Routing
from moesaic.metrics.size import Size, model_size
from moesaic.nn.phase import set_mode


@dataclass(frozen=True)
class Score:
    """The figures that ``eval`` reports of one model."""

    perplexity: float
    tokens: int
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
    routing: dict[int, Routing] = field(repr=False)
    """By decoder layer."""
    sources: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of a mix, each source's perplexity and tokens."""
    kl: float | None = None
    """KL(original || this model) in nats a token; None where it was compared with nothing."""
    top1_agreement: float | None = None
    """Share of tokens at which original and this model think the same next one most probable."""
    tasks: Mapping[str, Values] = field(default_factory=dict)
    """By task, the keys of :func:`moesaic.metrics.tasks.measure_tasks`; ``recovery`` beside them
    where it was compared."""
    recovery: float | None = None
    """Of all tasks together: :func:`moesaic.metrics.tasks.recovery_ratio`; None where it was
    compared with nothing."""
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
            figures["sources"] = {
                name: {"perplexity": value, "tokens": count}
                for name, (value, count) in self.sources.items()
            }
        for name in ("kl", "top1_agreement", "tasks", "recovery", "generations"):
            value = getattr(self, name)
            if value not in (None, {}):
                figures[name] = value
        if self.against is not None:
            figures["against"] = self.against.as_json()
        return figures


def score(
    model: Model | Runner, tokens: Tokens, track: Track = silent, shared: bool = False
) -> Score:
    """Measure a model on a text.

    Args:
        model: loaded, or a :class:`~moesaic.metrics.forward.Runner`.
        tokens: the windows.
        track: shows progress.
        shared: several processes share the batches, and all of them call this.
    """
    run = runner(model)
    with set_mode(run.shape, "always"):  # channels: what is read is counted
        quality = perplexity(run, tokens, track, shared)
        measured = model_size(run.shape, quality.routing)
    return _score(run, quality, measured)


def scores_beside(
    model: Runner, original: Runner, tokens: Tokens, track: Track = silent, shared: bool = False
) -> tuple[Score, Score]:
    """Measure a model and what it is compared with; see :func:`score`.

    Returns:
        the model's score, with divergence and agreement, and the original's.
    """
    with set_mode(model.shape, "always"), set_mode(original.shape, "always"):
        found = beside(model, original, tokens, track, shared)
        sizes = [
            model_size(run.shape, quality.routing)
            for run, quality in ((model, found.result), (original, found.original))
        ]
    own = _score(model, found.result, sizes[0], kl=found.kl, top1_agreement=found.top1_agreement)
    return own, _score(original, found.original, sizes[1])


def _score(run: Runner, quality: Quality, measured: Size, **compared: float) -> Score:
    return Score(
        perplexity=quality.perplexity,
        tokens=quality.tokens,
        total_parameters=measured.total_parameters,
        active_parameters=measured.active_parameters,
        active_ratio=measured.active_ratio,
        nominal_active_ratio=model_size(run.shape).active_ratio,
        router_parameters=measured.router_parameters,
        total_bytes=measured.total_bytes,
        routing=quality.routing,
        sources=quality.sources,
        **compared,  # type: ignore[arg-type]
    )
