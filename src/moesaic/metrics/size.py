"""Parameters: total, active per token, and the active ratio of the projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from moesaic.arch.lookup import base_arch
from moesaic.arch.use import LayerUse
from moesaic.io.checkpoint import check_whole, shape_of
from moesaic.io.dtypes import sizes_in
from moesaic.io.headers_only import headers_of_model
from moesaic.io.source import resolve
from moesaic.metrics.routing_counts import Routing
from moesaic.surgery import layer_uses
from moesaic.types import JSON, Model


@dataclass(frozen=True)
class Size:
    """A model's parameters, counted."""

    total_parameters: int
    active_parameters: int
    """Parameters that one token runs: embeddings, head and routers included."""
    active_ratio: float
    """Share of the original's projections that one token runs (see :mod:`moesaic.arch.use`)."""
    router_parameters: int
    total_bytes: int
    """What all parameters take in memory, in the types that they have there."""
    layers: tuple[LayerUse, ...]


def model_size(model: Model, routing: Mapping[int, Routing] | None = None) -> Size:
    """Count a model, live or a skeleton.

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


def inspect(model: str) -> JSON:
    """The parts of a checkpoint, read from its config; of its weights only headers are looked at.

    Returns:
        ``model_type``, ``layers`` (of each ``kind``, ``experts``, ``top_k``, ``width`` and
        ``active_width``), ``total_parameters``, ``active_parameters``, ``active_ratio`` and
        ``router_parameters``.

    Raises:
        MoesaicError: there is no such model, or its architecture is unknown.
    """
    with TemporaryDirectory(prefix="moesaic-") as folder:
        local = Path(model).expanduser().is_dir()
        source = resolve(model) if local else headers_of_model(model, Path(folder))
        size = model_size(shape_of(source.config))
        check_whole(source.folder)
    of_layer = ("kind", "experts", "top_k", "width", "active_width")
    of_model = ("total_parameters", "active_parameters", "active_ratio", "router_parameters")
    return {
        "model_type": source.config.model_type,
        "layers": [{name: getattr(use, name) for name in of_layer} for use in size.layers],
        **{name: getattr(size, name) for name in of_model},
    }
