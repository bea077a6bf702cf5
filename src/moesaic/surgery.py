"""Applies a plan: to a live model, or to a stream of tensors. Both by the same function."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.arch import Arch, FFNNames
from moesaic.checkpoint import Checkpoint, ShardWriter, cast
from moesaic.errors import MoesaicError
from moesaic.nn import carved_like
from moesaic.plan import BaseShape, CarvedLayer, Plan


def base_shape(model: nn.Module, arch: Arch) -> BaseShape:
    """What a plan for this dense model will ask of its source."""
    downs = [getattr(arch.ffn_of(layer), arch.ffn.down) for layer in arch.layers(model)]
    return BaseShape(
        arch.model_type, downs[0].weight.shape[0], tuple(d.weight.shape[1] for d in downs)
    )


def check_base(plan: Plan, model: nn.Module, arch: Arch) -> None:
    """Refuse to apply a plan to another model than it was made for."""
    found = base_shape(model, arch)
    if found != plan.base:
        raise MoesaicError(
            f"The plan was made for {_describe(plan.base)}; this is {_describe(found)}."
        )


def _describe(base: BaseShape) -> str:
    widths = sorted(set(base.widths))
    return (
        f"a {base.model_type} of {len(base.widths)} layers, hidden size {base.hidden_size}, "
        f"FFN width {'/'.join(map(str, widths))}"
    )


def carve_tensors(
    layer: CarvedLayer, names: FFNNames, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """An FFN's tensors in carved order, the router added. Values are the base's own."""
    carved = {}
    for name, tensor in state.items():
        projection, _, kind = name.rpartition(".")
        order_M = layer.order_M.to(tensor.device)
        if projection == names.down:
            carved[name] = tensor.index_select(1, order_M) if kind == "weight" else tensor
        elif names.fused:
            both = torch.cat([order_M, order_M + tensor.shape[0] // 2])
            carved[name] = tensor.index_select(0, both)
        else:
            carved[name] = tensor.index_select(0, order_M)
    if layer.router_RD is not None:
        device = next(iter(state.values())).device
        carved["router.weight"] = layer.router_RD.to(device)
    return carved


def install(model: nn.Module, arch: Arch, headers: Mapping[str, Mapping[str, Any]]) -> None:
    """Swap in empty carved FFNs of the shapes that a plan's header gives."""
    owner, _, leaf = arch.ffn_path.rpartition(".")
    for i, header in headers.items():
        layer = arch.layers(model)[int(i)]
        parent = attrgetter(owner)(layer) if owner else layer
        setattr(parent, leaf, carved_like(arch.ffn_of(layer), arch.ffn, header))


@torch.no_grad()
def apply_plan(model: nn.Module, arch: Arch, plan: Plan) -> None:
    """Convert a live model's layers in place."""
    check_base(plan, model, arch)
    for i, layer_plan in plan.layers.items():
        old = arch.ffn_of(arch.layers(model)[i])
        state = carve_tensors(layer_plan, arch.ffn, old.state_dict())
        install(model, arch, {str(i): layer_plan.header()})
        new = arch.ffn_of(arch.layers(model)[i])
        new.load_state_dict(state, assign=True)
        new.train(old.training)


def rewrite(
    checkpoint: Checkpoint,
    arch: Arch,
    plan: Plan,
    writer: ShardWriter,
    dtype: torch.dtype | None = None,
) -> None:
    """Convert a checkpoint tensor by tensor; at most one FFN's weights are in memory."""
    prefixes = {arch.ffn_prefix(i): layer for i, layer in plan.layers.items()}
    for name in checkpoint.names():
        if not name.startswith(tuple(prefixes)):
            writer.add(name, cast(checkpoint.tensor(name), dtype))
    for prefix, layer in prefixes.items():
        state = {n: cast(t, dtype) for n, t in checkpoint.under(prefix).items()}
        for name, tensor in carve_tensors(layer, arch.ffn, state).items():
            writer.add(prefix + name, tensor)
    writer.close()
