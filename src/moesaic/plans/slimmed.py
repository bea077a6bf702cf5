"""Mixture whose experts keep some of their neurons: fewer or narrower experts, or both.

Shape suffixes: E kept experts, M neurons of each before, W kept neurons, S of the shared path, D
hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.arch.use import LayerUse, RoutedModule
from moesaic.errors import shown
from moesaic.modules.uneven import DOWN_ROWS, UP_ROWS, flat, make_uneven
from moesaic.plans.base import (
    PADDING,
    Description,
    Header,
    LayerTokens,
    Sizes,
    State,
    check_numbers,
)
from moesaic.plans.neurons import (
    narrow_experts,
    narrow_mlp,
    narrow_stacked,
    of_experts,
    of_mlp,
    of_stacked,
)
from moesaic.plans.pruned import DOWN, PrunedLayer
from moesaic.plans.recovery import refitted_downs
from moesaic.types import JSON

GATE_UP = "gate_up_proj"


@dataclass(frozen=True)
class SlimmedLayer(PrunedLayer):
    """Plan of narrower experts; weights are the base's own, unless refitted."""

    kind: ClassVar[str] = "slimmed"
    held: ClassVar[Mapping[str, str]] = {
        **PrunedLayer.held,
        "neurons": "neurons_EW",
        "shared": "shared_S",
        "shared_down": "shared_DS",
    }

    neurons_EW: Tensor
    """Kept neurons of each expert, int64, then PADDING for places that are zero."""
    before: int
    """Neurons of each expert before."""
    shared_S: Tensor | None = field(default=None, kw_only=True)
    """Kept neurons of the shared path, int64, PADDING for places that are zero; None if it is
    unchanged. Shared experts follow one another, with the same number of places each."""
    shared_DS: Tensor | None = field(default=None, kw_only=True)
    """Down projection that replaces the shared path's own."""
    uneven: bool = field(default=False, kw_only=True)
    """True if each expert is stored at its own width, without padding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.neurons_EW) != len(self.kept_E):
            raise ValueError(f"{len(self.neurons_EW)} experts have neurons, {self.kept} stay")
        rising_EW = self.neurons_EW.sort(dim=1).values
        if not ((rising_EW.diff(dim=1) > 0) | (rising_EW[:, 1:] == PADDING)).all():
            raise ValueError("a neuron is kept twice")

    @property
    def width(self) -> int:
        """Neurons of each expert, or of the widest."""
        return int(self.neurons_EW.shape[1])

    @property
    def widths(self) -> list[int]:
        """Kept neurons of each expert."""
        return (self.neurons_EW != PADDING).sum(1).tolist()

    def padded(self, count: int, groups: int = 1) -> SlimmedLayer:
        few = PrunedLayer(self.kept_E, down_E=self.down_E).padded(count, groups)
        neurons_EW = torch.arange(self.width).repeat(count, 1)
        neurons_EW[few.kept_E != PADDING] = self.neurons_EW[self.kept_E != PADDING]
        return replace(self, kept_E=few.kept_E, down_E=few.down_E, neurons_EW=neurons_EW)

    def header(self) -> JSON:
        shared = {} if self.shared_S is None else {"shared": self.shared_S.numel()}
        uneven = {"widths": self.widths} if self.uneven else {}
        sizes = {"width": self.width, "before": self.before}
        return {**super().header(), **sizes, **shared, **uneven}

    @classmethod
    def load(cls, header: Header, tensors: Mapping[str, Tensor]) -> SlimmedLayer:
        uneven = "widths" in header
        return cls(before=header["before"], uneven=uneven, **cls.fields_of(tensors))

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        if self.before != sizes.width:
            raise ValueError(
                f"experts had {shown(self.before, 20)} neurons, and have {sizes.width}"
            )
        lists = self.kept_E.numel()
        check_numbers("neurons", self.neurons_EW, sizes.width, padding=True, lists=lists)
        check_numbers("shared neurons", self.shared_S, sizes.most, padding=True)

    # --- put to use ------------------------------------------------------------------------------

    def sources(self, arch: Arch) -> tuple[str, ...]:
        assert isinstance(arch, MoEArch)
        beside = () if self.shared_S is None or arch.beside is None else (f"{arch.beside}.",)
        return (*super().sources(arch), *beside)

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(arch, MoEArch)
        narrowed = Narrowed(self, arch, state)
        yield from super().convert(arch, narrowed)
        if self.uneven:
            path = f"{arch.inside}{arch.experts}."
            down = narrowed.fused(DOWN)[self.kept_E]
            down = down if self.down_E is None else self.down_E.to(down)
            rows = flat(narrowed.fused(GATE_UP)[self.kept_E], down, self.widths)
            yield from zip((path + UP_ROWS, path + DOWN_ROWS), rows, strict=True)
        if arch.beside is not None and self.shared_S is not None:
            for stored, _ in state.stored(f"{arch.beside}."):
                yield stored, narrowed.read(stored)

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        assert isinstance(arch, MoEArch)
        super().install(layers, index, arch, header)
        layer = layers[index]
        block = arch.ffn_of(layer)
        if "widths" in header:
            make_uneven(getattr(block, arch.experts), header["widths"])
        else:
            narrow_experts(block, arch, header["before"], header["width"])
        if "shared" in header:
            view = arch.mixture(layer)
            assert view.shared_module is not None
            if arch.parts.always:
                width = header["shared"] // view.shared_count
                narrow_stacked(view.shared_module, arch.shared_names, width)
            else:
                narrow_mlp(view.shared_module, arch.shared_names, header["shared"])

    # --- words -----------------------------------------------------------------------------------

    def describe(self, experts: int) -> Description:
        fewer = len(self.experts) < experts
        before = super().describe(experts)
        whose = f"of each of {before.text.removesuffix(' stay')}" if fewer else "of each expert"
        width = round(sum(self.widths) / len(self.widths)) if self.uneven else self.width
        text = f"{width:,} of {self.before:,} neurons {whose} stay"
        shape = {**(before.shape if fewer else {}), "neurons": width, "of": self.before}
        if self.uneven:
            text += f" in the mean, {min(self.widths):,} to {max(self.widths):,}"
            shape["widths"] = self.widths
        if self.shared_S is not None:
            shape["shared"] = int((self.shared_S >= 0).sum())
        return Description(text, shape)

    @classmethod
    def use(cls, layer: nn.Module, arch: Arch, header: Header, width: int) -> LayerUse:
        use = super().use(layer, arch, header, width)
        if "widths" not in header:
            return use
        assert isinstance(arch, MoEArch)
        shared, widths = arch.mixture(layer).shared_width, header["widths"]
        every = shared + sum(widths)
        return replace(
            use,
            width=every,
            active_width=shared + use.top_k * sum(widths) / len(widths),
            ffn=use.ffn // use.width * every,
            expert_width=0,
        )

    @classmethod
    def routed(cls, layer: nn.Module, arch: Arch, header: Header) -> RoutedModule | None:
        router = super().routed(layer, arch, header)
        if router is None or "widths" not in header:
            return router
        return replace(router, experts=tuple(header["widths"]))

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        if "widths" not in header:
            return super().obstacle(header)
        return "Experts of different widths have no native form: slim with allocate=uniform."

    def mtp_plan(self) -> SlimmedLayer:
        return replace(self, down_E=None, shared_DS=None)

    def native(self) -> JSON | None:
        if self.uneven:
            return None
        shared = {} if self.shared_S is None else {"shared": self.shared_S.numel()}
        return {"experts": self.kept_E.numel(), "width": self.width, **shared}

    # --- refit -----------------------------------------------------------------------------------

    def neurons_of(self, place: int, width: int) -> Tensor:
        order_W = self.neurons_EW[place]
        return order_W[order_W != PADDING]

    def refit(self, site: LayerTokens[MoEFFN], **options: bool) -> tuple[PrunedLayer, JSON]:
        """Solve for new down projections of the experts and of the shared path."""
        shared_S, width = self.shared_S, site.view.shared_width
        if shared_S is None and width:
            shared_S = torch.arange(width)
        down_E, down_DS, figures = refitted_downs(site, self.kept, self.neurons_of, shared_S)
        if down_E is None:  # the same header as that of refitted layers
            return replace(self, shared_S=shared_S), figures
        if shared_S is None or down_DS is None:
            return replace(self, down_E=down_E), figures
        placed_DS = down_DS.new_zeros(len(down_DS), len(shared_S))
        placed_DS[:, shared_S >= 0] = down_DS
        return replace(self, down_E=down_E, shared_S=shared_S, shared_DS=placed_DS), figures


class Narrowed:
    """State of a layer whose tensors of experts are read at their new width."""

    def __init__(self, plan: SlimmedLayer, arch: MoEArch, state: State) -> None:
        self._plan, self._arch, self._state = plan, arch, state
        shared = () if arch.shared_at is None else (f"{arch.shared_at}.",)
        self._experts = f"{arch.inside}{arch.experts}."
        self._shared = shared[0] if shared else "\0"
        self._names = dict(state.stored(self._experts, *shared))
        count = arch.counted(state[f"{arch.inside}{arch.parts.weight}"].shape)
        self._neurons_EW = torch.arange(plan.width).repeat(count, 1)
        self._neurons_EW[plan.experts] = plan.neurons_EW[plan.kept_E != PADDING]

    def stored(self, *prefixes: str) -> Iterator[tuple[str, str]]:
        """Yield stored names and names in memory, without uneven experts."""
        names = self._state.stored(*prefixes)
        return (p for p in names if not (self._plan.uneven and p[1].startswith(self._experts)))

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name]

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def fused(self, leaf: str) -> Tensor:
        """Return a tensor of all experts in memory's layout, padded to the widest."""
        tensor = self._state[self._experts + leaf]
        return of_experts(self._arch, leaf, leaf, tensor, self._neurons_EW, self._plan.before)

    def read(self, stored: str) -> Tensor:
        tensor, name = self._state.read(stored), self._names.get(stored, "")
        if name.startswith(self._experts):
            leaf = name.removeprefix(self._experts)
            before = self._plan.before
            return of_experts(self._arch, leaf, stored, tensor, self._neurons_EW, before)
        order_S = self._plan.shared_S
        if name.startswith(self._shared) and order_S is not None:
            leaf, names = name.removeprefix(self._shared), self._arch.shared_names
            if self._arch.parts.always:
                return of_stacked(names, leaf, tensor, order_S, self._plan.shared_DS)
            width = self._state[f"{self._shared}{names.down}.weight"].shape[1]
            return of_mlp(names, leaf, tensor, order_S, self._plan.shared_DS, width)
        return tensor
