"""Parameters: total, active per token, and the active ratio of the projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from moesaic.arch.dense import LayerUse
from moesaic.arch.lookup import base_arch
from moesaic.io.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from moesaic.io.models import shape_of, sizes_in
from moesaic.io.source import headers_of_model, resolve, source_or_model
from moesaic.metrics.routing_counts import Routing
from moesaic.surgery import layer_uses
from moesaic.types import JSON, Model, Named


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


def model_size(model: Model, routing: Mapping[int, Routing] | None = None) -> Size:
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


def inspect(model: Named, *, revision: str | None = None, token: str | bool | None = None) -> JSON:
    """Return the parts of a model; for a name only the config and headers of weights are read.

    Args:
        model: a name or folder, a loaded model, or what a verb returned.
        revision: branch, tag or commit, when ``model`` is a hub id.
        token: of the hub, when ``model`` is a hub id.

    Returns:
        ``model_type``, ``layers`` (of each ``kind``, ``experts``, ``top_k``, ``width`` and
        ``active_width``), ``total_parameters``, ``active_parameters``, ``active_ratio`` and
        ``router_parameters``.

    Raises:
        MoesaicError: there is no such model, or its architecture is unknown.
    """
    opened: Model
    with TemporaryDirectory(prefix="moesaic-") as folder:
        if isinstance(model, str | Path):
            name, at = str(model), (revision, token)
            local = Path(name).expanduser().is_dir()
            opened = resolve(name) if local else headers_of_model(name, Path(folder), *at)
            size = model_size(shape_of(opened.config))
            if any((opened.folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
                Checkpoint(opened.folder)  # a missing or damaged file is reported
        else:
            opened = source_or_model(model)
            size = model_size(opened)
    of_layer = ("kind", "experts", "top_k", "width", "active_width")
    of_model = ("total_parameters", "active_parameters", "active_ratio", "router_parameters")
    return {
        "model_type": opened.config.model_type,
        "layers": [{name: getattr(use, name) for name in of_layer} for use in size.layers],
        **{name: getattr(size, name) for name in of_model},
    }
