"""Selection of an MLP's neurons: its tensors without the others, and its modules made narrower.

Shape suffixes: E experts, M neurons before, W kept neurons, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch, FFNNames
from moesaic.arch.mixture import MoEArch
from moesaic.plans.base import PADDING, State


def ordered_values(tensor: Tensor, axis: int, order_W: Tensor, padding: float = 0) -> Tensor:
    """Return a tensor's rows or columns in another order, ``padding`` where the order has PADDING.

    >>> ordered_values(torch.tensor([[1.0, 2.0, 3.0]]), 1, torch.tensor([2, PADDING])).tolist()
    [[3.0, 0.0]]
    """
    if not tensor.shape[axis]:  # of an FFN without neurons
        rest = tensor.shape[:axis], tensor.shape[axis + 1 :]
        return tensor.new_zeros(*rest[0], len(order_W), *rest[1])
    empty = (order_W == PADDING).nonzero().flatten().to(tensor.device)
    if not tensor.is_meta:  # blocks of quantised weights read the order
        order_W = order_W.to(tensor.device)
    chosen = tensor.index_select(axis, order_W.clamp(min=0))
    return chosen.index_fill_(axis, empty, padding) if len(empty) else chosen


def filled_up(order_W: Tensor, room: int) -> Tensor:
    """Return an order of neurons, followed by PADDING up to ``room`` places (room,).

    >>> filled_up(torch.tensor([2, 0]), 4).tolist()
    [2, 0, -1, -1]
    """
    return torch.cat([order_W, order_W.new_full((room - len(order_W),), PADDING)])


def in_groups(order_W: Tensor, size: int) -> Tensor:
    """Reorder neurons so that those of one old group of columns share a new group as far as
    possible.

    Each of the old groups with the most neurons left gets a new group, which neurons of the other
    groups fill up. So most columns keep the group for which their scale was computed.

    Args:
        order_W: the neurons, then PADDING.
        size: columns of a group; if it does not divide the neurons, the order is not changed.

    >>> in_groups(torch.tensor([0, 1, 3, 4, 5, 6]), 3).tolist()
    [0, 1, 6, 3, 4, 5]
    """
    real_W = order_W[order_W != PADDING]
    if not size or len(real_W) % size:
        return order_W
    old_W = real_W // size
    counts = old_W.bincount()
    most = counts.argsort(descending=True, stable=True)[: len(real_W) // size].sort().values
    new_W = torch.searchsorted(most, old_W)
    elsewhere_W = ~torch.isin(old_W, most)
    room = size - counts[most]
    new_W[elsewhere_W] = torch.arange(len(most), device=most.device).repeat_interleave(room)
    return filled_up(real_W[new_W.argsort(stable=True)], len(order_W))


def twice(order_W: Tensor, width: int, alternate: bool = False) -> Tensor:
    """Return the order of gates and ups in one tensor: all gates before all ups, or alternating (2
    W,).

    >>> order = torch.tensor([2, 0, PADDING])
    >>> twice(order, 3).tolist(), twice(order, 3, alternate=True).tolist()
    ([2, 0, -1, 5, 3, -1], [4, 5, 0, 1, -1, -1])
    """
    real = order_W != PADDING
    if alternate:
        both = torch.stack([2 * order_W, 2 * order_W + 1], -1)
        return both.masked_fill(~real[:, None], PADDING).flatten()
    return torch.cat([order_W, (order_W + width).masked_fill(~real, PADDING)])


def of_mlp(
    names: FFNNames,
    name: str,
    tensor: Tensor,
    order_W: Tensor,
    down_DW: Tensor | None = None,
    width: int = 0,
) -> Tensor:
    """Return a tensor of an MLP with its neurons in another order.

    Args:
        names: the MLP's projections.
        name: the tensor's name, relative to the MLP.
        tensor: its values.
        order_W: int64: the neuron at each new place, or PADDING.
        down_DW: replaces the down projection.
        width: neurons before, for gates and ups that one projection makes but that may be stored
            apart.
    """
    projection, _, part = name.rpartition(".")
    if projection == names.down:
        if part != "weight":
            return tensor
        return ordered_values(tensor, 1, order_W) if down_DW is None else down_DW.to(tensor)
    if names.fused and tensor.shape[0] != width:
        order_W = twice(order_W, tensor.shape[0] // 2)
    return ordered_values(tensor, 0, order_W)


def of_ffn(
    arch: Arch, state: State, order_W: Tensor, down_DW: Tensor | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a dense layer's FFN with its neurons in another order, by their stored
    names.

    Args:
        arch: the architecture.
        state: the layer's tensors.
        order_W: int64: the neuron at each new place.
        down_DW: takes the place of the down projection.
    """
    block = f"{arch.ffn_path}."
    for stored, name in state.stored(block):
        leaf, tensor = name.removeprefix(block), state.read(stored)
        yield stored, of_mlp(arch.ffn, leaf, tensor, order_W, down_DW)


def of_stacked(
    names: FFNNames, leaf: str, tensor: Tensor, order_S: Tensor, down_DS: Tensor | None = None
) -> Tensor:
    """Return a tensor of several MLPs of one width with their neurons in another order.

    Args:
        names: the projections of each.
        leaf: the tensor's name.
        tensor: (N, M, D), or (N, D, M) of down projections.
        order_S: int64: the neurons of all N MLPs, one MLP after the other.
        down_DS: takes the place of the down projections.

    Raises:
        ValueError: an MLP gets another's neuron.
    """
    axis = 2 if leaf == names.down else 1
    count, width = tensor.shape[0], tensor.shape[axis]
    order_NW = order_S.view(count, -1)
    first_N1 = width * torch.arange(count)[:, None]
    if ((order_NW != PADDING) & (order_NW // width * width != first_N1)).any():
        raise ValueError("a neuron of one shared expert would stand in another's place")
    if axis == 2 and down_DS is not None:
        return down_DS.unflatten(1, (count, -1)).transpose(0, 1).to(tensor).contiguous()
    local_NW = torch.where(order_NW == PADDING, PADDING, order_NW - first_N1)
    parts = zip(tensor, local_NW, strict=True)
    return torch.stack([ordered_values(part, axis - 1, order_W) for part, order_W in parts])


def axis_of(arch: MoEArch, leaf: str) -> int | None:
    """Return the axis of a fused tensor of experts that counts neurons; None if it has none."""
    if leaf == "down_proj":
        return 1 if arch.transposed else 2
    if leaf in ("gate_up_proj", "up_proj"):
        return 2 if arch.transposed else 1
    return 1 if leaf in ("gate_up_proj_bias", "up_proj_bias") else None


def narrow_mlp(module: nn.Module, names: FFNNames, width: int) -> None:
    """Give an MLP another number of neurons, in place; new parameters are on the meta device.

    Args:
        module: the MLP; or several of one width, in tensors (N, M, D) and (N, D, M).
        names: its projections, or the projections of each.
        width: neurons, or neurons of each.
    """
    down = getattr(module, names.down)
    before = (down.weight if isinstance(down, nn.Linear) else down).shape[-1]
    for name in names.projections:
        part, axis = getattr(module, name), 1 if name == names.down else 0
        if isinstance(part, nn.Linear):
            narrow_linear(part, axis, width * (2 if names.fused and not axis else 1))
        else:
            resize(module, name, axis + 1, width)
    _update_width([module], before, width)


def narrow_linear(linear: nn.Linear, axis: int, size: int) -> None:
    """Give a linear module another number of outputs (axis 0) or inputs (1), in place."""
    resize(linear, "weight", axis, size)
    linear.out_features, linear.in_features = linear.weight.shape
    if linear.bias is not None and axis == 0:
        resize(linear, "bias", 0, size)


def narrow_experts(block: nn.Module, arch: MoEArch, before: int, width: int) -> None:
    """Give routed experts another number of neurons, in place; new parameters are on meta."""
    experts = getattr(block, arch.experts)
    for leaf, tensor in list(experts.named_parameters()):
        axis = axis_of(arch, leaf)
        if axis is not None:
            resize(experts, leaf, axis, tensor.shape[axis] // before * width)
    _update_width([block, experts], before, width)


def resize(owner: nn.Module, leaf: str, axis: int, size: int) -> None:
    """Replace a parameter by one of another size on the meta device, a buffer by one on its own.

    vLLM gives values only to parameters.
    """
    old = getattr(owner, leaf)
    shape = list(old.shape)
    shape[axis] = size
    learned = isinstance(old, nn.Parameter)
    new = torch.empty(shape, dtype=old.dtype, device="meta" if learned else old.device)
    setattr(owner, leaf, nn.Parameter(new, requires_grad=old.requires_grad) if learned else new)


def _update_width(modules: Sequence[nn.Module], before: int, width: int) -> None:
    """Update the attributes in which modules hold their intermediate size."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if "intermediate" in name and value == before and type(value) is int:
                setattr(module, name, width)
