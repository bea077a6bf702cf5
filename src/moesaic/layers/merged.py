"""A pruned layer whose experts that stay are means over those that went (M-SMoE).

Neurons are matched first, then weights meet.

Shape suffixes: E routed experts, M neurons of one, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON
from moesaic.io.naming import expert_number, renumbered
from moesaic.layers.base import Description, Header, Seen, State
from moesaic.layers.pruned import DOWN, PrunedLayer
from moesaic.layers.state import Rewritten

GATE_UP = "gate_up_proj"


@dataclass(frozen=True)
class MergedLayer(PrunedLayer):
    """Experts averaged into those that stay."""

    kind: ClassVar[str] = "merged"

    into_E: Tensor
    """int64: the expert that each original one joins; a kept one joins itself."""
    share_E: Tensor
    """float32: its weight in the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.down_E is not None:
            raise ValueError("merged experts have no down projections beside their means")
        if not torch.equal(self.into_E.unique(), self.experts):
            raise ValueError(f"experts join {self.into_E.unique().tolist()}, {self.kept} are kept")
        if not torch.equal(self.into_E[self.experts], self.experts):
            raise ValueError("a kept expert joins another")

    @property
    def weights(self) -> str:
        return "averaged"

    @property
    def groups(self) -> dict[int, list[int]]:
        """By kept expert those that become it, itself included."""
        kept: list[int] = self.experts.tolist()
        return {i: (self.into_E == i).nonzero().flatten().tolist() for i in kept}

    def tensors(self) -> dict[str, Tensor]:
        return {"kept": self.kept_E, "into": self.into_E, "share": self.share_E}

    @classmethod
    def load(cls, header: Header, tensors: Mapping[str, Tensor]) -> MergedLayer:
        return cls(tensors["kept"], tensors["into"], tensors["share"])

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        yield from super().convert(arch, Averaged(self, arch, state))

    def describe(self, experts: int) -> Description:
        before = super().describe(experts)
        told = f"{experts} experts averaged into {len(self.experts)}"
        return Description(told, {**before.shape, "into": self.into_E.tolist()})

    def refit(self, site: Seen[Any], **options: bool) -> tuple[PrunedLayer, JSON]:
        raise MoesaicError("Merged experts are not refitted; choose another criterion.")


class Averaged(Rewritten):
    """A layer's tensors, the experts' as they will be."""

    def __init__(self, plan: MergedLayer, arch: Arch, state: State) -> None:
        assert isinstance(arch, MoEArch)
        super().__init__(state)
        self._plan = plan
        self._experts = f"{arch.ffn_path}.{arch.experts}."
        whole = (state[self._experts + name] for name in (GATE_UP, DOWN))
        self._order_of = orders(plan, *whole)
        self._names = dict(state.stored(self._experts))

    def read(self, stored: str) -> Tensor:
        number, groups = expert_number(stored), self._plan.groups
        if stored not in self._names or (number is not None and number not in groups):
            return super().read(stored)
        name = self._names[stored]
        axis = 1 if name.endswith(DOWN) else 0
        if number is None:
            return averaged_E(self._plan, name, self._state.read(stored), self._order_of)
        part: Callable[[int], Tensor] = lambda i: self._state.read(renumbered(stored, i))  # noqa: E731
        return average(self._plan, number, part, self._order_of, axis)


def matched(like_MX: Tensor, other_MX: Tensor) -> Tensor:
    """For each neuron of ``like_MX`` the one of ``other_MX`` that takes its place (M,).

    Of all permutations the one of least ``sum |like - other[order]|^2``, which is that of the
    largest sum of inner products. In float64 on the CPU, so that it is the same wherever it runs.

    >>> matched(torch.eye(3), torch.eye(3)[[2, 0, 1]])
    tensor([1, 2, 0])
    """
    from scipy.optimize import linear_sum_assignment

    like, other = (w.detach().cpu().double() for w in (like_MX, other_MX))
    return torch.from_numpy(linear_sum_assignment((like @ other.T).numpy(), maximize=True)[1])


def neurons(gate_up_XD: Tensor, down_DM: Tensor) -> Tensor:
    """All weights of an expert, one row a neuron (M, 3 D)."""
    gate_MD, up_MD = gate_up_XD.chunk(2)
    return torch.cat([gate_MD, up_MD, down_DM.T], dim=1)


def orders(plan: MergedLayer, gate_up_EXD: Tensor, down_EDM: Tensor) -> dict[int, Tensor]:
    """By expert that joins another: its neurons (M,) in the order of that one's."""

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
        order_of: neurons by expert, from :func:`orders`.
        axis: the axis that counts neurons: M of them, or the gates and then the ups.

    Returns:
        of the shape of one expert's tensor.
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
    """A fused tensor in which every expert that others join is their mean; of the same shape."""
    merged_E = tensor_E.clone()
    axis = 1 if name.endswith(DOWN) else 0
    for into in plan.groups:
        merged_E[into] = average(plan, into, lambda i: tensor_E[i], order_of, axis)
    return merged_E
