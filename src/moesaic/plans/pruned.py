"""Mixture that keeps some of its experts, in their old order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.arch.routing import replaced
from moesaic.io.naming import expert_number, renumbered
from moesaic.plans.base import (
    PADDING,
    Description,
    Header,
    LayerPlan,
    LayerTokens,
    Sizes,
    State,
    check_numbers,
)
from moesaic.plans.recovery import refitted_downs
from moesaic.types import JSON

DOWN = "down_proj"
ROWS = 1 << 14
"""Rows of a table processed at a time."""


@dataclass(frozen=True)
class PrunedLayer(LayerPlan):
    """Plan of a mixture that keeps some experts, with the base's own weights unless refitted."""

    kind: ClassVar[str] = "pruned"
    held: ClassVar[Mapping[str, str]] = {"kept": "kept_E", "down": "down_E"}

    kept_E: Tensor
    """Original expert at each new place, int64; PADDING if there is none."""
    down_E: Tensor | None = field(default=None, kw_only=True)
    """Down projections that replace the experts' own (E, D, M), in their module's layout."""

    def __post_init__(self) -> None:
        real_E = self.experts
        if real_E.numel() == 0 or not torch.equal(real_E, real_E.unique()):
            raise ValueError(f"kept experts must be distinct and in order: {self.kept}")

    @property
    def kept(self) -> list[int]:
        """Original expert at each new place, PADDING if there is none."""
        return self.kept_E.tolist()

    @property
    def experts(self) -> Tensor:
        """Original experts that are kept, int64, padding left out."""
        return self.kept_E[self.kept_E != PADDING]

    def padded(self, count: int, groups: int = 1) -> PrunedLayer:
        """Return the same layer with ``count`` places, the new ones at the end of every group.

        Args:
            count: places in all.
            groups: router groups, equal runs of neighbouring experts, which are kept.
        """
        kept_GE = self.kept_E.view(groups, -1)
        missing = count // groups - kept_GE.shape[1]
        kept_E = F.pad(kept_GE, (0, missing), value=PADDING).flatten()
        down_E = self.down_E
        if down_E is not None:
            down_GE = down_E.unflatten(0, (groups, -1))
            more = down_GE.new_zeros(groups, missing, *down_E.shape[1:])
            down_E = torch.cat([down_GE, more], 1).flatten(0, 1)
        return replace(self, kept_E=kept_E, down_E=down_E)

    def header(self) -> JSON:
        return {"kind": self.kind, "experts": self.kept_E.numel()}

    def check(self, sizes: Sizes) -> None:
        check_numbers("experts", self.kept_E, sizes.experts, padding=True)

    # --- put to use ------------------------------------------------------------------------------

    def sources(self, arch: Arch) -> tuple[str, ...]:
        return arch.starts

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """Yield single experts' tensors renumbered, and fused tensors with fewer rows."""
        assert isinstance(arch, MoEArch)
        count = arch.counted(state[f"{arch.inside}{arch.parts.weight}"].shape)
        for stored, name in state.stored(*arch.starts):
            if expert_number(stored) in (None, 0, *self.kept):
                inside = name.removeprefix(arch.inside)
                yield from self._kept(arch, count, inside, stored, state.read(stored))

    def _kept(
        self, arch: MoEArch, count: int, name: str, stored: str, tensor: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the kept parts of one tensor.

        Args:
            arch: the architecture.
            count: experts before.
            name: the tensor's name in memory, relative to the block.
            stored: its name as stored.
            tensor: its values.
        """
        number = expert_number(stored)
        down_E = self.down_E if name == f"{arch.experts}.{DOWN}" else None
        if number is None and down_E is not None:
            yield stored, down_E.to(tensor)
        elif name == arch.parts.table:
            yield stored, self._tabled(tensor, count)
        elif number is None:
            axis = arch.expert_axis(name, tensor, count)
            yield stored, tensor if axis is None else self._taken(arch, name, tensor, axis)
        else:
            for place, old in enumerate(self.kept):
                if old == number:
                    new = tensor if down_E is None else down_E[place].to(tensor)
                    yield renumbered(stored, place), new
                elif old == PADDING and number == 0:
                    yield renumbered(stored, place), torch.zeros_like(tensor)

    def origin(self, stored: str) -> str:
        number = expert_number(stored)
        return stored if number is None else renumbered(stored, max(0, self.kept[number]))

    def _taken(self, arch: MoEArch, name: str, tensor: Tensor, axis: int) -> Tensor:
        """Return the kept experts' part of a tensor; padding is never chosen and holds zeros."""
        kept_E = self.kept_E.clamp(min=0)
        if name == arch.parts.weight:  # rows of shared experts are the last
            rows = tensor.shape[axis]
            kept_E = torch.cat([kept_E, torch.arange(rows - arch.parts.always, rows)])
        selected = tensor.index_select(axis, kept_E.to(tensor.device))
        padding = (self.kept_E == PADDING).nonzero().flatten()
        if len(padding):
            never = name == arch.never
            lowest = torch.finfo(tensor.dtype).min / 4
            selected.index_fill_(axis, padding.to(tensor.device), lowest if never else 0)
        return selected

    def _tabled(self, table_VK: Tensor, count: int) -> Tensor:
        """Return a table of each token's experts, with removed experts replaced."""
        allowed_E = torch.zeros(count, dtype=torch.bool, device=table_VK.device)
        allowed_E[self.experts] = True
        place_E = torch.zeros(count, dtype=table_VK.dtype, device=table_VK.device)
        places = (self.kept_E != PADDING).nonzero().flatten()
        place_E[self.experts] = places.to(place_E)
        parts = (
            replaced(part_NK.long(), allowed_E.expand(len(part_NK), -1))
            for part_NK in table_VK.split(ROWS)
        )
        return torch.cat([place_E[part_NK] for part_NK in parts])

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        assert isinstance(arch, MoEArch)
        _resize_experts(layers[index], arch, header["experts"])

    # --- words -----------------------------------------------------------------------------------

    def describe(self, experts: int) -> Description:
        kept: list[int] = self.experts.tolist()
        shape: JSON = {"kept": kept, "before": experts}
        if self.kept_E.numel() > len(kept):
            shape["places"] = self.kept_E.numel()
        return Description(f"{len(kept)} of {experts} experts stay", shape)

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        return None

    def mtp_plan(self) -> PrunedLayer:
        return replace(self, down_E=None)

    def native(self) -> JSON | None:
        return {"experts": self.kept_E.numel()}

    # --- refit -----------------------------------------------------------------------------------

    def neurons_of(self, place: int, width: int) -> Tensor:
        """Return the neurons, of ``width`` before, that the expert at a place keeps, int64."""
        return torch.arange(width)

    def refit(self, site: LayerTokens[MoEFFN], **options: bool) -> tuple[PrunedLayer, JSON]:
        """Solve for new down projections of the kept experts, jointly."""
        down_E, _, figures = refitted_downs(site, self.kept, self.neurons_of)
        return self if down_E is None else replace(self, down_E=down_E), figures


def _resize_experts(layer: nn.Module, arch: MoEArch, count: int) -> None:
    """Give a routed block another number of experts, in place.

    Parameters with an axis of experts are replaced by new ones on the meta device, buffers by new
    ones on their own device: vLLM gives values to parameters alone.
    """
    view = arch.mixture(layer)
    before = view.count
    for name, tensor in [*view.block.named_parameters(), *view.block.named_buffers()]:
        axis = arch.expert_axis(name, tensor, before)
        if axis is None:
            continue
        owner, _, leaf = name.rpartition(".")
        shape = list(tensor.shape)
        shape[axis] += count - before
        learned = isinstance(tensor, nn.Parameter)
        new = torch.empty(shape, dtype=tensor.dtype, device="meta" if learned else tensor.device)
        if learned:
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        setattr(view.block.get_submodule(owner), leaf, new)
    for module in (view.block, *view.router.modules(), view.experts):
        for name in ("num_experts", "out_features"):
            if getattr(module, name, None) == before:
                setattr(module, name, count)
