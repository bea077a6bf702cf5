"""A model's score: quality, size and routing of one text, measured together."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.data.text import Tokens
from moesaic.foreign import JSON, Model, Track, silent
from moesaic.metrics.perplexity import perplexity
from moesaic.metrics.routing import Routing
from moesaic.metrics.size import model_size
from moesaic.nn.channels import set_mode


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
    routing: dict[int, Routing]
    sources: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of a mix, each source's perplexity and tokens."""

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
        }
        if self.sources:
            figures["sources"] = {
                name: {"perplexity": value, "tokens": count}
                for name, (value, count) in self.sources.items()
            }
        return figures


def score(model: Model, tokens: Tokens, track: Track = silent) -> Score:
    """Measure a model on a text."""
    with set_mode(model, "always"):  # channels: what is read is counted
        quality = perplexity(model, tokens, track)
        measured = model_size(model, quality.routing)
    return Score(
        perplexity=quality.perplexity,
        tokens=quality.tokens,
        total_parameters=measured.total_parameters,
        active_parameters=measured.active_parameters,
        active_ratio=measured.active_ratio,
        nominal_active_ratio=model_size(model).active_ratio,
        router_parameters=measured.router_parameters,
        routing=quality.routing,
        sources=quality.sources,
    )
