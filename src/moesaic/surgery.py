"""Applies a plan: to a live model, or to a stream of tensors. Both by the same functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.arch import PREFIX, Arch, FFNNames
from moesaic.checkpoint import Checkpoint, Writer, cast
from moesaic.errors import MoesaicError
from moesaic.folding import NO_FFN, condensed_tensors, empty, put, replacement, sources
from moesaic.merging import DOWN, GATE_UP, averaged_E, orders, reader
from moesaic.moe import MoEArch, MoEFFN
from moesaic.naming import Naming, expert_number, renumbered
from moesaic.nn import carved_like, make_skipping
from moesaic.overlapping import OverlappingLayer
from moesaic.plan import (
    PADDING,
    BaseShape,
    CarvedLayer,
    CondensedLayer,
    DroppedLayer,
    LayerPlan,
    MergedLayer,
    Plan,
    PrunedLayer,
    SkippingLayer,
)
from moesaic.sharing import apply_shared, install_shared, shared_sources, shared_tensors


def base_shape(model: Any, arch: Arch) -> BaseShape:
    """What a plan for this model will ask of its source."""
    views = [arch.view(layer) for layer in arch.layers(model)]
    experts = tuple(v.count if isinstance(v, MoEFFN) else 0 for v in views)
    return BaseShape(
        arch.model_type,
        model.get_input_embeddings().weight.shape[1],
        tuple(v.width for v in views),
        experts if any(experts) else (),
    )


def check_base(plan: Plan, model: nn.Module, arch: Arch) -> None:
    """Refuse to apply a plan to another model than it was made for."""
    found = base_shape(model, arch)
    if found != plan.base:
        raise MoesaicError(
            f"The plan was made for {_describe(plan.base)}; this is {_describe(found)}."
        )


def _describe(base: BaseShape) -> str:
    def spread(values: tuple[int, ...]) -> str:
        return "/".join(map(str, sorted(set(values))))

    experts = f", {spread(base.experts)} experts" if base.experts else ""
    return (
        f"a {base.model_type} of {len(base.widths)} layers, hidden size {base.hidden_size}, "
        f"FFN width {spread(base.widths)}{experts}"
    )


# --- carved layers -------------------------------------------------------------------------------


def carve_tensors(
    layer: CarvedLayer, names: FFNNames, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """An FFN's tensors in carved order, the router added.

    Values are the base's own, but for a down projection and biases that the plan brings.
    """
    carved = {}
    for name, tensor in state.items():
        projection, _, kind = name.rpartition(".")
        order_M = layer.order_M.to(tensor.device)
        if projection == names.down and kind == "weight" and layer.down_DM is not None:
            carved[name] = layer.down_DM.to(tensor)
        elif projection == names.down:
            carved[name] = tensor.index_select(1, order_M) if kind == "weight" else tensor
        elif names.fused:
            both = torch.cat([order_M, order_M + tensor.shape[0] // 2])
            carved[name] = tensor.index_select(0, both)
        else:
            carved[name] = tensor.index_select(0, order_M)
    like = state[f"{names.down}.weight"]
    if layer.router_RD is not None:
        carved["router.weight"] = layer.router_RD.to(like.device)
    if layer.bias_RD is not None:
        carved["petal_bias"] = layer.bias_RD.to(like)
    return carved


def _install_carved(
    layers: nn.ModuleList, index: int, arch: Arch, header: Mapping[str, Any]
) -> None:
    layer = layers[index]
    _put(layer, arch.ffn_path, carved_like(arch.ffn_of(layer), arch.ffn, header))


def _apply_carved(layers: nn.ModuleList, index: int, arch: Arch, plan: CarvedLayer) -> None:
    old = arch.ffn_of(layers[index])
    state = carve_tensors(plan, arch.ffn, old.state_dict())
    _install_carved(layers, index, arch, plan.header())
    new = arch.ffn_of(layers[index])
    new.load_state_dict(state, assign=True)
    new.train(old.training)


def _install_shared(
    layers: nn.ModuleList, index: int, arch: Arch, header: Mapping[str, Any]
) -> None:
    install_shared(layers[index], arch, header)


def _apply_shared(layers: nn.ModuleList, index: int, arch: Arch, plan: OverlappingLayer) -> None:
    apply_shared(layers[index], arch, plan)


# --- pruned and skipping layers ------------------------------------------------------------------


def _taken(arch: MoEArch, name: str, tensor: Tensor, kept_E: Tensor, axis: int) -> Tensor:
    """The kept experts' part of a block's tensor; padding is never chosen and holds zeros."""
    taken = tensor.index_select(axis, kept_E.clamp(min=0).to(tensor.device))
    padding = (kept_E == PADDING).nonzero().flatten()
    if len(padding):
        never = name == f"{arch.router}.{arch.never}"
        lowest = torch.finfo(tensor.dtype).min / 4
        taken.index_fill_(axis, padding.to(tensor.device), lowest if never else 0)
    return taken


def keep_experts(
    layer: nn.Module, arch: MoEArch, kept_E: Tensor, down_E: Tensor | None = None
) -> None:
    """Take all other experts out of a live layer, in place; ``down_E``: new down projections."""
    view = arch.view(layer)
    assert isinstance(view, MoEFFN)
    for name, tensor in [*view.block.named_parameters(), *view.block.named_buffers()]:
        axis = arch.expert_axis(name, tensor, view.count)
        if axis is not None:
            owner, _, leaf = name.rpartition(".")
            new = _taken(arch, name, tensor.detach(), kept_E, axis)
            if down_E is not None and name == f"{arch.experts}.{DOWN}":
                new = down_E.to(new)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            setattr(view.block.get_submodule(owner), leaf, new)
    for module in (view.block, view.router, view.experts):
        for count in ("num_experts", "out_features"):
            if getattr(module, count, None) == view.count:
                setattr(module, count, kept_E.numel())


def merge_experts(layer: nn.Module, arch: MoEArch, plan: MergedLayer) -> None:
    """Put the means of a live layer's experts into those that stay, in place."""
    view = arch.view(layer)
    assert isinstance(view, MoEFFN)
    whole = {name: getattr(view.experts, name).detach() for name in (GATE_UP, DOWN)}
    order_of = orders(plan, *whole.values())
    for name, tensor in whole.items():
        grad = getattr(view.experts, name).requires_grad
        merged = nn.Parameter(averaged_E(plan, name, tensor, order_of), requires_grad=grad)
        setattr(view.experts, name, merged)


def _install_reduced(
    layers: nn.ModuleList, index: int, arch: Arch, header: Mapping[str, Any]
) -> None:
    assert isinstance(arch, MoEArch)
    layer = layers[index]
    if "experts" in header:
        keep_experts(layer, arch, torch.arange(header["experts"], device="cpu"))
    if "beta" in header:
        view = arch.view(layer)
        assert isinstance(view, MoEFFN)
        make_skipping(view.router, header["beta"], header["rule"], view.experts)


def _apply_reduced(
    layers: nn.ModuleList, index: int, arch: Arch, plan: PrunedLayer | SkippingLayer
) -> None:
    assert isinstance(arch, MoEArch)
    pruned = plan if isinstance(plan, PrunedLayer) else plan.pruned
    if isinstance(pruned, MergedLayer):
        merge_experts(layers[index], arch, pruned)
    if pruned is not None:
        keep_experts(layers[index], arch, pruned.kept_E, pruned.down_E)
    if isinstance(plan, SkippingLayer):
        _install_reduced(layers, index, arch, {"beta": plan.beta, "rule": plan.rule})


def kept_tensors(
    arch: MoEArch, plan: PrunedLayer, count: int, name: str, on_disk: str, tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """What becomes of one tensor on disk of a block of which some experts stay.

    Args:
        arch: the architecture.
        plan: the experts that stay.
        count: the experts there were.
        name: the tensor's name in memory, relative to the block.
        on_disk: its full name on disk.
        tensor: its values.
    """
    number, kept_E = expert_number(on_disk), plan.kept_E
    down_E = plan.down_E if name == f"{arch.experts}.{DOWN}" else None
    if number is None and down_E is not None:
        yield on_disk, down_E.to(tensor)
        return
    if number is None:
        axis = arch.expert_axis(name, tensor, count)
        yield on_disk, tensor if axis is None else _taken(arch, name, tensor, kept_E, axis)
        return
    for place, old in enumerate(kept_E.tolist()):
        if old == number:
            yield renumbered(on_disk, place), tensor if down_E is None else down_E[place].to(tensor)
        elif old == PADDING and number == 0:
            yield renumbered(on_disk, place), torch.zeros_like(tensor)


# --- condensed and dropped layers ----------------------------------------------------------------


def _install_condensed(
    layers: nn.ModuleList, index: int, arch: Arch, header: Mapping[str, Any]
) -> None:
    assert isinstance(arch, MoEArch)
    put(layers, index, arch, empty(layers[index], arch, header))


def _apply_condensed(
    layers: nn.ModuleList, index: int, arch: Arch, plan: CondensedLayer | DroppedLayer
) -> None:
    assert isinstance(arch, MoEArch)
    put(layers, index, arch, replacement(layers[index], arch, plan))


# --- whole models --------------------------------------------------------------------------------

_INSTALL: dict[str, Callable[..., None]] = {
    "carved": _install_carved,
    "overlapping": _install_shared,
    "pruned": _install_reduced,
    "merged": _install_reduced,
    "skipping": _install_reduced,
    "condensed": _install_condensed,
    "dropped": _install_condensed,
}
_APPLY: dict[str, Callable[..., None]] = {
    "carved": _apply_carved,
    "overlapping": _apply_shared,
    "pruned": _apply_reduced,
    "merged": _apply_reduced,
    "skipping": _apply_reduced,
    "condensed": _apply_condensed,
    "dropped": _apply_condensed,
}


def install(model: nn.Module, arch: Arch, headers: Mapping[str, Mapping[str, Any]]) -> None:
    """Give layers the shapes that a plan's header says, without their values."""
    for i, header in headers.items():
        _INSTALL[header["kind"]](arch.layers(model), int(i), arch, header)


@torch.no_grad()
def apply_plan(model: nn.Module, arch: Arch, plan: Plan) -> None:
    """Convert a live model's layers in place."""
    check_base(plan, model, arch)
    for i, layer_plan in plan.layers.items():
        _APPLY[layer_plan.kind](arch.layers(model), i, arch, layer_plan)


@contextmanager
def applied(layer: nn.Module, arch: Arch, plan: LayerPlan) -> Iterator[None]:
    """Inside, a live decoder layer is as its plan will have it; attention stays."""
    beside = arch.beside if isinstance(arch, MoEArch) else None
    kept = {name: attrgetter(name)(layer) for name in (arch.ffn_path, beside) if name}
    for name, module in kept.items():
        _put(layer, name, copy.deepcopy(module))
    try:
        _APPLY[plan.kind](nn.ModuleList([layer]), 0, arch, plan)
        yield
    finally:
        for name, module in kept.items():
            _put(layer, name, module)


def _put(layer: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(attrgetter(owner)(layer) if owner else layer, leaf, module)


def _replaced(layer: LayerPlan, arch: Arch) -> tuple[str, ...]:
    """The starts of the names, relative to the decoder layer, of what a plan changes."""
    if isinstance(layer, DroppedLayer):
        return ("",)
    if isinstance(layer, CondensedLayer):
        assert isinstance(arch, MoEArch)
        return sources(arch)
    if isinstance(layer, OverlappingLayer):
        return shared_sources(arch, layer.header())
    return (f"{arch.ffn_path}.",)


def _rewritten(
    arch: Arch,
    plan: Plan,
    index: int,
    names: Mapping[str, str],
    read: Callable[[str], Tensor],
    fused: Callable[[str], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """One layer's tensors that a plan changes, converted.

    Args:
        arch: the architecture.
        plan: what to make of it.
        index: the layer.
        names: what they are called in the layer, by their names on disk.
        read: a tensor by its name on disk.
        fused: a tensor by its name in memory.
    """
    layer: LayerPlan = plan.layers[index]
    if isinstance(layer, CondensedLayer | DroppedLayer):
        assert isinstance(arch, MoEArch)
        prefix = arch.layer_prefix(index)
        wanted = dict.fromkeys(n for n in names.values() if n.startswith(sources(arch)))
        state = {name: fused(prefix + name) for name in wanted}
        condensed = layer if isinstance(layer, CondensedLayer) else NO_FFN
        for name, tensor in condensed_tensors(condensed, arch, state).items():
            yield prefix + name, tensor
        return
    if isinstance(layer, OverlappingLayer):
        state = {name: read(disk) for disk, name in names.items()}
        for name, tensor in shared_tensors(layer, arch, state).items():
            yield arch.layer_prefix(index) + name, tensor
        return
    block = f"{arch.ffn_path}."
    if isinstance(layer, CarvedLayer):
        state = {name.removeprefix(block): read(disk) for disk, name in names.items()}
        for name, tensor in carve_tensors(layer, arch.ffn, state).items():
            yield arch.ffn_prefix(index) + name, tensor
        return
    pruned = layer if isinstance(layer, PrunedLayer) else layer.pruned
    if isinstance(pruned, MergedLayer):
        assert isinstance(arch, MoEArch)
        experts = f"{block}{arch.experts}."
        whole = [fused(f"{arch.layer_prefix(index)}{experts}{name}") for name in (GATE_UP, DOWN)]
        inside = {disk: name for disk, name in names.items() if name.startswith(experts)}
        read = reader(pruned, orders(pruned, *whole), inside, read)
    for disk, full in names.items():
        name = full.removeprefix(block)
        if pruned is None:
            yield disk, read(disk)
        else:
            assert isinstance(arch, MoEArch)
            count = plan.base.experts[index]
            if expert_number(disk) in (None, 0, *pruned.kept):
                yield from kept_tensors(arch, pruned, count, name, disk, read(disk))


def rewrite(
    checkpoint: Checkpoint,
    arch: Arch,
    plan: Plan,
    writer: Writer,
    dtype: Callable[[str], torch.dtype | None] = lambda _: None,
) -> None:
    """Convert a checkpoint tensor by tensor; at most one FFN's weights are in memory.

    Args:
        checkpoint: the source.
        arch: its architecture.
        plan: what to make of it.
        writer: takes the tensors.
        dtype: the floating-point type by name in memory, None for the checkpoint's own.
    """
    naming = Naming(checkpoint, plan.base.model_type.removeprefix(PREFIX))
    prefixes = {
        arch.layer_prefix(i) + start: i
        for i, layer in plan.layers.items()
        for start in _replaced(layer, arch)
    }
    inside: dict[int, dict[str, str]] = {i: {} for i in plan.layers}

    def read(disk: str) -> Tensor:
        return cast(checkpoint.tensor(disk), dtype(naming.in_memory[disk]))

    for disk, name in naming.in_memory.items():
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        if prefix is None:
            writer.add(disk, read(disk))
        else:
            index = prefixes[prefix]
            inside[index][disk] = name.removeprefix(arch.layer_prefix(index))

    def fused(name: str) -> Tensor:
        return naming.read(name, lambda tensor: cast(tensor, dtype(name)))

    for index, names in inside.items():
        for disk, tensor in _rewritten(arch, plan, index, names, read, fused):
            writer.add(disk, tensor)
    writer.close()
