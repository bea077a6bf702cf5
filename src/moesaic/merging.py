"""Experts averaged into one, live or from disk: neurons are matched first, then weights meet.

Shape suffixes: E routed experts, M neurons of one, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moesaic.naming import expert_number, renumbered
from moesaic.plan import MergedLayer

GATE_UP, DOWN = "gate_up_proj", "down_proj"


def matched(like_MX: Tensor, other_MX: Tensor) -> Tensor:
    """For each neuron of ``like_MX`` the one of ``other_MX`` that takes its place (M,).

    Of all permutations the one of least ``sum |like - other[order]|^2``, which is that of the
    largest sum of inner products. In float64 on the CPU, so that it is the same wherever it runs.

    >>> matched(torch.eye(3), torch.eye(3)[[2, 0, 1]])
    tensor([1, 2, 0])
    """
    like, other = (w.detach().cpu().double() for w in (like_MX, other_MX))
    return torch.from_numpy(linear_sum_assignment((like @ other.T).numpy(), maximize=True)[1])


def neurons(gate_up_XD: Tensor, down_DM: Tensor) -> Tensor:
    """All weights of an expert, one row a neuron (M, 3 D)."""
    gate_MD, up_MD = gate_up_XD.chunk(2)
    return torch.cat([gate_MD, up_MD, down_DM.T], dim=1)


def orders(plan: MergedLayer, gate_up_EXD: Tensor, down_EDM: Tensor) -> dict[int, Tensor]:
    """By expert that joins another: its neurons in the order of that one's."""

    def rows(i: int) -> Tensor:
        return neurons(gate_up_EXD[i], down_EDM[i])

    return {
        i: matched(rows(into), rows(i))
        for into, members in plan.groups.items()
        for i in members
        if i != into
    }


def average(
    plan: MergedLayer,
    into: int,
    part: Callable[[int], Tensor],
    order_of: dict[int, Tensor],
    axis: int,
) -> Tensor:
    """The weighted mean of one tensor over the experts that become one.

    Args:
        plan: who joins whom.
        into: the expert that they join.
        part: an expert's own tensor.
        order_of: what :func:`orders` found.
        axis: the axis that counts neurons: M of them, or the gates and then the ups.
    """
    own = part(into)
    members = plan.groups[into]
    if members == [into]:
        return own
    total = torch.zeros_like(own, dtype=torch.float32)
    for i in members:
        tensor = part(i)
        if i != into:
            order = order_of[i]
            if tensor.shape[axis] == 2 * len(order):
                order = torch.cat([order, order + len(order)])
            tensor = tensor.index_select(axis, order.to(tensor.device))
        total += tensor.float() * plan.share_E[i].item()
    return total.to(own.dtype)


def averaged_E(
    plan: MergedLayer, name: str, tensor_E: Tensor, order_of: dict[int, Tensor]
) -> Tensor:
    """A fused tensor in which every expert that others join is their mean."""
    merged_E = tensor_E.clone()
    axis = 1 if name.endswith(DOWN) else 0
    for into in plan.groups:
        merged_E[into] = average(plan, into, lambda i: tensor_E[i], order_of, axis)
    return merged_E


def reader(
    plan: MergedLayer,
    order_of: dict[int, Tensor],
    names: dict[str, str],
    read: Callable[[str], Tensor],
) -> Callable[[str], Tensor]:
    """Reads a layer's tensors by their names on disk, the experts' as they will be.

    Args:
        plan: who joins whom.
        order_of: what :func:`orders` found.
        names: what the experts' tensors are called in memory, by their names on disk.
        read: a tensor as it is.
    """

    def merged(disk: str) -> Tensor:
        number = expert_number(disk)
        if disk not in names or (number is not None and number not in plan.groups):
            return read(disk)
        if number is None:
            return averaged_E(plan, names[disk], read(disk), order_of)
        axis = 1 if names[disk].endswith(DOWN) else 0
        return average(plan, number, lambda i: read(renumbered(disk, i)), order_of, axis)

    return merged
