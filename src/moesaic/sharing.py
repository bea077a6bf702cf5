"""Experts that share weights, from a base's decoder layer: live, or from a stream of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.arch import Arch
from moesaic.nn import CarvedFFN, OverlappingFFN, PartialAttention, carved_like, projections_like
from moesaic.overlapping import OverlappingLayer

ROUTER, PARTIAL = "router", "partial"


def shared_sources(arch: Arch, header: Mapping[str, Any]) -> tuple[str, ...]:
    """The starts of the names, relative to the decoder layer, of what changes."""
    attention = f"{arch.attention_path}."
    return (f"{arch.ffn_path}.", attention) if _routes_heads(header) else (f"{arch.ffn_path}.",)


def _routes_heads(header: Mapping[str, Any]) -> bool:
    return bool(header["rows"] or header["head_top_k"] or header["columns"] is not None)


def shared_tensors(
    layer: OverlappingLayer, arch: Arch, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A decoder layer's tensors as the plan wants them, names relative to the layer.

    Args:
        layer: the plan.
        arch: the architecture.
        state: the layer's tensors under :func:`shared_sources`. Values are the base's own.
    """
    ffn, attention = f"{arch.ffn_path}.", f"{arch.attention_path}."
    tensors = dict(state)
    device = next(iter(state.values())).device
    for projection, rows in layer.rows.items():
        for name in state.keys() & {f"{attention}{projection}.{k}" for k in ("weight", "bias")}:
            tensors[name] = state[name].index_select(0, rows.to(device))
    if layer.columns is not None:
        name = f"{attention}{arch.attention.o}.weight"
        tensors[name] = state[name].index_select(1, layer.columns.to(device))
        tensors[f"{attention}{PARTIAL}.columns"] = layer.columns
    tensors |= {f"{attention}{PARTIAL}.rows_{name}": rows for name, rows in layer.rows.items()}
    tensors |= {f"{attention}{PARTIAL}.{ROUTER}.{name}": t for name, t in layer.head_router.items()}
    if layer.experts_NW is not None and layer.router_ND is not None:
        tensors[f"{ffn}{ROUTER}.weight"] = layer.router_ND
        if layer.materialized:
            tensors |= _copied(layer.experts_NW.flatten().to(device), arch, state)
        else:
            tensors[f"{ffn}experts"] = layer.experts_NW
    return {n: t.to(device).contiguous() for n, t in tensors.items()}


def _copied(order: Tensor, arch: Arch, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The FFN's tensors with every expert's neurons one after another."""
    names, copied = arch.ffn, {}
    for name in names.projections:
        for kind in ("weight", "bias"):
            full = f"{arch.ffn_path}.{name}.{kind}"
            if full not in state or (name == names.down and kind == "bias"):
                continue
            tensor = state[full]
            if name == names.down:
                copied[full] = tensor.index_select(1, order)
            elif names.fused:
                both = torch.cat([order, order + tensor.shape[0] // 2])
                copied[full] = tensor.index_select(0, both)
            else:
                copied[full] = tensor.index_select(0, order)
    return copied


# --- live layers ---------------------------------------------------------------------------------


def _linear_like(old: nn.Linear, rows: int, columns: int) -> nn.Linear:
    with torch.device("meta"):
        return nn.Linear(columns, rows, bias=old.bias is not None, dtype=old.weight.dtype)


def install_shared(layer: nn.Module, arch: Arch, header: Mapping[str, Any]) -> None:
    """Give a decoder layer the modules that a plan's header says, without their values."""
    if header["petals"]:
        owner, _, leaf = arch.ffn_path.rpartition(".")
        parent = attrgetter(owner)(layer) if owner else layer
        setattr(parent, leaf, _ffn_like(arch.ffn_of(layer), arch, header))
    if _routes_heads(header):
        attention, names = arch.attention_of(layer), arch.attention
        old = {name: getattr(attention, name) for name in names.projections}
        values, size = old[names.v].weight.shape[0], attention.head_dim
        read = old[names.o].weight.shape[1]
        start = read + (values - read) // 2 if names.fused else 0
        hidden_size = old[names.q].weight.shape[1]
        sizes = {name: module.weight.shape[0] for name, module in old.items()}
        with torch.device("meta"):
            partial = PartialAttention(names, sizes, header, hidden_size, size, start, read)
        for name, count in header["rows"].items():
            setattr(attention, name, _linear_like(old[name], count, old[name].weight.shape[1]))
        if header["columns"] is not None:
            o = old[names.o]
            setattr(attention, names.o, _linear_like(o, o.weight.shape[0], header["columns"]))
        attention.add_module(PARTIAL, partial)
        partial.watch(attention)


def _ffn_like(ffn: nn.Module, arch: Arch, header: Mapping[str, Any]) -> CarvedFFN:
    if header["materialized"]:
        return carved_like(ffn, arch.ffn, header)
    hidden_size, full = getattr(ffn, arch.ffn.down).weight.shape
    with torch.device("meta"):
        return OverlappingFFN(
            projections_like(ffn, arch.ffn, full),
            getattr(ffn, arch.ffn.act),
            arch.ffn,
            hidden_size,
            len(header["petals"]),
            header["petals"][0],
        )


def apply_shared(layer: nn.Module, arch: Arch, plan: OverlappingLayer) -> None:
    """Convert a live decoder layer in place."""
    header = plan.header()
    sources = shared_sources(arch, header)
    state = {n: t for n, t in layer.state_dict().items() if n.startswith(sources)}
    tensors = shared_tensors(plan, arch, state)
    training = layer.training
    install_shared(layer, arch, header)
    for source in sources:
        module = layer.get_submodule(source.removesuffix("."))
        own = {n.removeprefix(source): t for n, t in tensors.items() if n.startswith(source)}
        module.load_state_dict(own, assign=True)
    layer.train(training)
