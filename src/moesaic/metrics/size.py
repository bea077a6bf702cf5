"""Parameters: total, active per token, and the active ratio of the projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from moesaic.arch import Arch
from moesaic.metrics.routing import Routing
from moesaic.moe import MoEFFN, base_arch
from moesaic.nn import CarvedFFN, PartialAttention


@dataclass(frozen=True)
class LayerUse:
    """One decoder layer's projections and what a token uses of them."""

    kind: str
    """dense, carved or moe."""
    experts: int
    """Routed experts; 0 for a dense layer."""
    top_k: int
    width: int
    """Intermediate size of the whole layer as stored."""
    active_width: float
    """Neurons a token runs."""
    attention: int
    ffn: int
    """Projection weights stored."""
    router: int
    dropped: int = 0
    """Projection weights that the dense original had and this layer has not."""
    copied: int = 0
    """FFN weights beyond the dense original's: copies, where experts overlap."""
    active_attention: float = 1.0
    """The share of attention's stored projections that a token uses."""

    @property
    def active_ffn(self) -> float:
        return self.ffn * self.active_width / self.width if self.width else 0.0


@dataclass(frozen=True)
class Size:
    """A model's parameters, counted."""

    total_parameters: int
    active_parameters: int
    """What one token runs: embeddings, head and routers included."""
    active_ratio: float
    """Of the projections of the dense original (see :mod:`moesaic.budget`)."""
    router_parameters: int
    layers: tuple[LayerUse, ...]


def model_size(model: Any, routing: Mapping[int, Routing] | None = None) -> Size:
    """Count a model, live or a skeleton.

    Args:
        model: a dense or converted causal language model.
        routing: measured routing; None counts nominally, as under uniform routing.
    """
    arch = base_arch(model.config)
    header = getattr(model.config, "moesaic", None)
    layers = [
        _use(layer, arch, None if routing is None else routing.get(i), header, i)
        for i, layer in enumerate(arch.layers(model))
    ]
    total = sum(p.numel() for p in model.parameters())
    stored = sum(use.attention + use.ffn for use in layers)
    projections = stored + sum(use.dropped - use.copied for use in layers)
    used = sum(use.attention * use.active_attention + use.active_ffn for use in layers)
    return Size(
        total_parameters=total,
        active_parameters=round(total - stored + used),
        active_ratio=used / projections,
        router_parameters=sum(use.router for use in layers),
        layers=tuple(layers),
    )


def _use(
    layer: nn.Module, arch: Arch, routing: Routing | None, header: Any, index: int
) -> LayerUse:
    attention, ffn = arch.attention_size(layer), arch.ffn_of(layer)
    heads = _heads_use(layer, arch)
    if not isinstance(ffn, CarvedFFN):
        view = arch.view(layer)
        if isinstance(view, MoEFFN):
            return _moe_use(view, attention, routing)
    stored = sum(getattr(ffn, name).weight.numel() for name in arch.ffn.projections)
    width = getattr(ffn, arch.ffn.down).weight.shape[1]
    if not isinstance(ffn, CarvedFFN):
        return LayerUse("dense", 0, 0, width, width, attention, stored, **heads)
    petals = len(ffn.petals)
    active = ffn.backbone + (ffn.top_k * sum(ffn.petals) / petals if petals else 0)
    if routing is not None and ffn.router is not None:
        active = routing.active_width
    original = header["base"]["widths"][index]
    missing = stored * (original - width) // width
    if ffn.router is not None:
        heads["router"] += sum(p.numel() for p in ffn.router.parameters())
    heads["dropped"] += max(0, missing)
    return LayerUse(
        "carved",
        petals,
        ffn.top_k,
        width,
        active,
        attention,
        stored,
        copied=max(0, -missing),
        **heads,
    )


def _heads_use(layer: nn.Module, arch: Arch) -> dict[str, Any]:
    """What is gone of an attention, what a token uses of the rest, and its router's weights."""
    attention = arch.attention_of(layer)
    partial = getattr(attention, "partial", None)
    if not isinstance(partial, PartialAttention):
        return {"router": 0, "dropped": 0, "active_attention": 1.0}
    stored, dropped, idle = arch.attention_size(layer), 0, 0.0
    names = arch.attention
    for name in names.projections:
        weight = getattr(attention, name).weight
        rows, columns = weight.shape
        whole = rows * partial.outputs if name == names.o else columns * partial.sizes[name]
        dropped += whole - weight.numel()
    if partial.router is not None:
        v, o = (getattr(attention, name).weight for name in (names.v, names.o))
        routed = v.shape[1] * (partial.sizes[names.v] - partial.value_start) + o.numel()
        idle = routed * (1 - partial.router.top_k / attention.head_dim)
    return {
        "router": sum(p.numel() for p in partial.parameters()),
        "dropped": dropped,
        "active_attention": 1 - idle / stored,
    }


def _moe_use(view: MoEFFN, attention: int, routing: Routing | None) -> LayerUse:
    experts = [view.experts.gate_up_proj, view.experts.down_proj]
    per_neuron = sum(t.numel() for t in experts) // (view.count * view.width)
    width = view.shared_width + view.count * view.width
    nominal = view.shared_width + view.top_k * view.width
    return LayerUse(
        "moe",
        view.count,
        view.top_k,
        width,
        nominal if routing is None else routing.active_width,
        attention,
        ffn=per_neuron * width,
        router=sum(p.numel() for p in view.router.parameters()),
    )
