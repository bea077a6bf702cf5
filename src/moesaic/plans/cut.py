"""Cut of a layer: which experts, which neurons of each and how many calls of a token are kept.

A dense FFN is one expert that every token runs.

Shape suffixes: T tokens, E kept experts, M neurons of each before, W kept neurons, S of the shared
path, D hidden size, V tokens of the vocabulary, K experts that a token runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch, DenseFFN, LayerUse, weight_of
from moesaic.arch.mixture import FFN, MoEArch, MoEFFN
from moesaic.arch.routing import replace_removed, set_top_k
from moesaic.errors import MoesaicError, quote
from moesaic.io.naming import expert_number, renumbered
from moesaic.modules.blocks import DOWN_ROWS, RULES, UP_ROWS, flat, make_skipping, make_uneven
from moesaic.modules.running import LayerTokens, always_routing
from moesaic.plans import neurons
from moesaic.plans.base import (
    NO_EXPERTS,
    PADDING,
    Description,
    Header,
    LayerPlan,
    Sizes,
    State,
    check_numbers,
)
from moesaic.plans.recovery import Ridge, joint_bytes, refitted_down, refitted_downs
from moesaic.types import JSON

DOWN, GATE_UP = "down_proj", "gate_up_proj"
WIDENED = 2
"""Factor by which zeros may widen an expert, at most."""
ROWS = 1 << 14
"""Rows of a table processed at a time."""


@dataclass(frozen=True)
class CutLayer(LayerPlan):
    """Plan of what is kept of a layer. What is None is not cut; weights are the base's own, unless
    refitted."""

    kind: ClassVar[str] = "cut"
    held: ClassVar[Mapping[str, str]] = {
        "experts": "kept_E",
        "neurons": "neurons_EW",
        "down": "down_E",
        "shared": "shared_S",
        "shared_down": "shared_DS",
    }

    kept_E: Tensor | None = None
    """Original expert at each new place, int64; PADDING if there is none. None for a dense FFN."""
    neurons_EW: Tensor | None = None
    """Kept neurons of each place, int64, then PADDING for places that are zero; (1, W) of a dense
    FFN."""
    before: int = 0
    """Neurons of each expert before; 0 if all are kept."""
    uneven: bool = field(default=False, kw_only=True)
    """True if each expert is stored at its own width, without padding."""
    counted: bool = field(default=False, kw_only=True)
    """True if a dense model becomes ``moesaic_<base>``, whose active ratio counts the removed
    neurons; False if it is of the base's own class, narrower."""
    shared_S: Tensor | None = field(default=None, kw_only=True)
    """Kept neurons of the shared path, int64, PADDING for places that are zero. Shared experts
    follow one another, with the same number of places each."""
    top_k: int | None = field(default=None, kw_only=True)
    """Experts that a token runs, the first columns of a table of each token's experts."""
    beta: float | None = field(default=None, kw_only=True)
    """Threshold below which the router skips an expert, token by token."""
    rule: str = field(default="", kw_only=True)
    """Rule: ``top2`` compares the second weight to the first, ``tail`` the last ones to the sum."""
    down_E: Tensor | None = field(default=None, kw_only=True)
    """Down projections that replace the experts' own (E, D, W), in their module's layout."""
    shared_DS: Tensor | None = field(default=None, kw_only=True)
    """Down projection that replaces the shared path's own."""

    def __post_init__(self) -> None:
        if self.kept_E is not None and (
            not len(self.experts) or not torch.equal(self.experts, self.experts.unique())
        ):
            raise ValueError(f"kept experts must be distinct and in order: {self.kept}")
        if self.neurons_EW is not None:
            places = 1 if self.kept_E is None else len(self.kept_E)
            if len(self.neurons_EW) != places:
                raise ValueError(f"{len(self.neurons_EW)} experts have neurons, {places} are kept")
            rising_EW = self.neurons_EW.sort(dim=1).values
            if not ((rising_EW.diff(dim=1) > 0) | (rising_EW[:, 1:] == PADDING)).all():
                raise ValueError("a neuron is kept twice")

    @property
    def kept(self) -> list[int]:
        """Original expert at each new place, PADDING if there is none; empty of a dense FFN."""
        return [] if self.kept_E is None else self.kept_E.tolist()

    @property
    def experts(self) -> Tensor:
        """Original experts that are kept, int64, padding left out; empty of a dense FFN."""
        kept_E = NO_EXPERTS if self.kept_E is None else self.kept_E
        return kept_E[kept_E != PADDING]

    @property
    def dense(self) -> bool:
        """True if the neurons are those of a dense FFN."""
        return self.kept_E is None and self.neurons_EW is not None

    @property
    def width(self) -> int:
        """Neurons at each place, or at the widest; 0 if all are kept."""
        return 0 if self.neurons_EW is None else int(self.neurons_EW.shape[1])

    @property
    def widths(self) -> list[int]:
        """Neurons at each place, padding left out; empty if all are kept."""
        return [] if self.neurons_EW is None else (self.neurons_EW != PADDING).sum(1).tolist()

    def neurons_of(self, place: int, width: int) -> Tensor:
        """Return the neurons, of ``width`` before, that the expert at a place keeps, int64."""
        if self.neurons_EW is None:
            return torch.arange(width)
        order_W = self.neurons_EW[place]
        return order_W[order_W != PADDING]

    def padded(self, count: int, groups: int = 1) -> CutLayer:
        """Return the same layer with ``count`` places, the new ones at the end of every group.

        Args:
            count: places in all.
            groups: router groups, equal runs of neighbouring experts, which are kept.
        """
        assert self.kept_E is not None
        kept_GE = self.kept_E.view(groups, -1)
        missing = count // groups - kept_GE.shape[1]
        kept_E = F.pad(kept_GE, (0, missing), value=PADDING).flatten()
        down_E, neurons_EW = self.down_E, self.neurons_EW
        if down_E is not None:
            down_GE = down_E.unflatten(0, (groups, -1))
            more = down_GE.new_zeros(groups, missing, *down_E.shape[1:])
            down_E = torch.cat([down_GE, more], 1).flatten(0, 1)
        if neurons_EW is not None:
            every_EW = torch.arange(self.width).repeat(count, 1)
            every_EW[kept_E != PADDING] = neurons_EW[self.kept_E != PADDING]
            neurons_EW = every_EW
        return replace(self, kept_E=kept_E, down_E=down_E, neurons_EW=neurons_EW)

    def _sizes(self) -> JSON:
        """Return the new sizes of the parts that are cut."""
        sizes = {
            "experts": None if self.kept_E is None else self.kept_E.numel(),
            "width": None if self.neurons_EW is None else self.width,
            "shared": None if self.shared_S is None else self.shared_S.numel(),
            "top_k": self.top_k,
        }
        return {name: size for name, size in sizes.items() if size is not None}

    def header(self) -> JSON:
        header = {"kind": self.kind, **self._sizes()}
        if self.neurons_EW is not None:
            header["before"] = self.before
        if self.uneven:
            header["widths"] = self.widths
        if self.counted:
            header["counted"] = True
        if self.beta is not None:
            header |= {"beta": self.beta, "rule": self.rule}
        return header

    @classmethod
    def load(cls, header: Header, tensors: Mapping[str, Tensor]) -> CutLayer:
        plain = ("before", "counted", "top_k", "beta", "rule")
        given = {name: header[name] for name in plain if name in header}
        return cls(uneven="widths" in header, **given, **cls.fields_of(tensors))

    def check(self, sizes: Sizes) -> None:
        check_numbers("experts", self.kept_E, sizes.experts, sizes.padding)
        if self.neurons_EW is not None:
            if self.dense and sizes.experts:
                raise ValueError("it keeps neurons, and names no experts")
            if self.before != sizes.width:
                raise ValueError(
                    f"experts had {quote(self.before, 20)} neurons, and have {sizes.width}"
                )
            room = {"lists": len(self.neurons_EW), "places": WIDENED * sizes.width}
            check_numbers("neurons", self.neurons_EW, sizes.width, padding=True, **room)
        if not sizes.experts and (self.shared_S, self.top_k, self.beta) != (None, None, None):
            raise ValueError("it has no router and no shared path")
        check_numbers("shared neurons", self.shared_S, sizes.most, padding=True)
        count = len(self.experts) or sizes.experts
        if self.top_k is not None and not 1 <= self.top_k <= count:
            raise ValueError(f"a token cannot run {quote(self.top_k, 20)} of {count} experts")
        if self.beta is not None and (self.rule not in RULES or not 0 <= self.beta < math.inf):
            raise ValueError(
                f"rule {quote(self.rule, 20)} with beta {quote(self.beta, 20)} is no valid skipping"
            )

    # --- put to use ------------------------------------------------------------------------------

    def sources(self, arch: Arch) -> tuple[str, ...]:
        starts = () if self.kept_E is None and self.neurons_EW is None else arch.starts
        if not isinstance(arch, MoEArch):
            return starts
        if self.shared_S is not None and arch.shared_at is not None:
            starts += (f"{arch.shared_at}.",)
        if self.top_k is not None and arch.parts.table is not None:
            starts += (f"{arch.inside}{arch.parts.table}",)
        return starts

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """Yield the kept parts of each tensor; single experts' tensors are renumbered."""
        if self.neurons_EW is not None and self.kept_E is None:
            down_DW = None if self.down_E is None else self.down_E[0]
            yield from neurons.of_ffn(arch, state, self.neurons_EW[0], down_DW)
            return
        assert isinstance(arch, MoEArch)
        experts = f"{arch.inside}{arch.experts}."
        shared = "\0" if arch.shared_at is None else f"{arch.shared_at}."
        router = f"{arch.inside}{arch.parts.weight}"
        count = 0 if self.kept_E is None else state[router].shape[0] - arch.parts.always
        for stored, name in state.stored(*self.sources(arch)):
            if self.uneven and name.startswith(experts):
                continue
            leaf, number = name.removeprefix(arch.inside), expert_number(stored)
            if name.startswith(shared) and self.shared_S is not None:
                names, leaf = arch.shared_names, name.removeprefix(shared)
                tensor = state.read(stored)
                if arch.parts.always:
                    part = neurons.of_stacked(names, leaf, tensor, self.shared_S, self.shared_DS)
                else:
                    width = state[f"{arch.shared_at}.{names.down}.weight"].shape[1]
                    part = neurons.of_mlp(names, leaf, tensor, self.shared_S, self.shared_DS, width)
                yield stored, part
            elif number is None:
                yield stored, self._of_all(arch, leaf, state.read(stored), count)
            elif places := [n for n, old in enumerate(self.kept) if max(0, old) == number]:
                tensor = state.read(stored)
                for n in places:
                    yield renumbered(stored, n), self._of_one(arch, leaf, tensor, n)
        if self.uneven:
            both, down = (
                self._of_all(arch, f"{arch.experts}.{leaf}", state[experts + leaf], count)
                for leaf in (GATE_UP, DOWN)
            )
            rows = flat(both, down, self.widths)
            yield from zip((experts + UP_ROWS, experts + DOWN_ROWS), rows, strict=True)

    def masked(self, arch: Arch, layer: nn.Module) -> AbstractContextManager[nn.Module] | None:
        view = arch.view(layer)
        copied = isinstance(view, MoEFFN) and view.parts.always and self.shared_S is not None
        others = (self.top_k, self.beta, self.down_E, self.shared_DS)
        plain = not copied and all(value is None for value in others)
        return self._masked(view, layer) if plain else None

    @contextmanager
    def _masked(self, view: FFN, layer: nn.Module) -> Iterator[nn.Module]:
        """Choose no removed experts, and keep removed neurons' columns of down projections zero."""
        with ExitStack() as stack:
            stack.enter_context(always_routing(layer))
            if isinstance(view, MoEFFN) and 0 < len(self.experts) < view.count:
                stack.enter_context(view.restricted(_among(self.experts, view.count)))
            for down_DM, kept_W in self._narrowed(view):
                removed_M = ~_among(kept_W, down_DM.shape[1])
                stack.callback(down_DM.__setitem__, (slice(None), removed_M), down_DM[:, removed_M])
                down_DM[:, removed_M] = 0
            yield layer

    def _narrowed(self, view: FFN) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each down projection (D, M) that loses neurons, and the neurons that it keeps."""
        if self.neurons_EW is not None:
            for place, i in enumerate(self.kept or [0]):
                if i != PADDING:
                    yield view.weights_of(i)[-1].detach(), self.neurons_of(place, self.before)
        if self.shared_S is not None and view.shared_ffn is not None:
            yield view.shared_ffn.down_DM.detach(), self.shared_S[self.shared_S != PADDING]

    def _of_one(self, arch: MoEArch, leaf: str, tensor: Tensor, place: int) -> Tensor:
        """Return the kept neurons' part of a tensor of the expert at a place.

        Args:
            arch: the architecture.
            leaf: name of all experts' tensor in memory, relative to the block.
            tensor: the expert's part of it.
            place: the expert's new number.
        """
        inside = leaf.removeprefix(f"{arch.experts}.")
        if self.down_E is not None and inside == DOWN:
            tensor = self.down_E[place].to(tensor)
        elif self.neurons_EW is not None and (axis := neurons.axis_of(arch, inside)) is not None:
            order_W = self.neurons_EW[place]
            if tensor.shape[axis - 1] == 2 * self.before:
                order_W = neurons.twice(order_W, self.before, arch.alternating)
            tensor = neurons.ordered_values(tensor, axis - 1, order_W)
        return torch.zeros_like(tensor) if self.kept[place] == PADDING else tensor

    def _of_all(self, arch: MoEArch, leaf: str, tensor: Tensor, count: int) -> Tensor:
        """Return the kept part of a tensor of the block that is no single expert's.

        Args:
            arch: the architecture.
            leaf: its name in memory, relative to the block.
            tensor: its values.
            count: experts before.
        """
        if leaf == arch.parts.table:
            table_VK = tensor if self.kept_E is None else self._tabled(tensor, count)
            return table_VK[:, : self.top_k].contiguous()
        inside = leaf.removeprefix(f"{arch.experts}.")
        if self.down_E is not None and inside != leaf and inside == DOWN:
            return self.down_E.to(tensor.device, tensor.dtype)
        axis = arch.expert_axis(leaf, tensor, count)
        if axis is None or self.kept_E is None:
            return tensor
        if self.neurons_EW is not None and inside != leaf:  # one by one: all may fill the memory
            parts = (
                self._of_one(arch, leaf, tensor[max(0, old)], n) for n, old in enumerate(self.kept)
            )
            first = next(parts)
            made = first.new_empty(len(self.kept), *first.shape)
            for place, part in zip(made, chain([first], parts), strict=True):
                place.copy_(part)
            return made
        lowest = torch.finfo(tensor.dtype).min / 4 if leaf == arch.never else 0
        # shared experts follow the routed ones, and are kept
        always = arch.parts.always if leaf == arch.parts.weight else 0
        size = tensor.shape[axis]
        order = torch.cat([self.kept_E, torch.arange(size - always, size)])
        return neurons.ordered_values(tensor, axis, order, lowest)

    def _tabled(self, table_VK: Tensor, count: int) -> Tensor:
        """Return a table of each token's experts, with removed experts replaced."""
        assert self.kept_E is not None
        allowed_E = _among(self.experts, count).to(table_VK.device)
        place_E = torch.zeros(count, dtype=table_VK.dtype, device=table_VK.device)
        places = (self.kept_E != PADDING).nonzero().flatten()
        place_E[self.experts] = places.to(place_E)
        parts = (
            replace_removed(part_NK.long(), allowed_E.expand(len(part_NK), -1))
            for part_NK in table_VK.split(ROWS)
        )
        return torch.cat([place_E[part_NK] for part_NK in parts])

    def origin(self, stored: str) -> str:
        number = expert_number(stored)
        if number is None or self.kept_E is None:
            return stored
        return renumbered(stored, max(0, self.kept[number]))

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        layer, width = layers[index], header.get("width")
        if width is not None and "experts" not in header:
            neurons.narrow_mlp(arch.ffn_of(layer), arch.ffn, width)
            return
        assert isinstance(arch, MoEArch)
        if "experts" in header:
            _resize_experts(layer, arch, header["experts"])
        view = arch.mixture(layer)
        if "widths" in header:
            make_uneven(view.experts, header["widths"])
        elif width is not None:
            neurons.narrow_experts(view.block, arch, header["before"], width)
        if "shared" in header:
            if view.shared_module is None:
                raise MoesaicError(f"{arch.model_type} has no shared path that could be cut.")
            each = header["shared"] // view.shared_count
            neurons.narrow_mlp(view.shared_module, arch.shared_names, each)
        if "top_k" in header:
            set_top_k(view.router, arch.parts, header["top_k"])
            if hasattr(view.block, "top_k"):  # some blocks hold it, too
                view.block.top_k = header["top_k"]
        if "beta" in header:
            make_skipping(view.router, header["beta"], header["rule"], view.experts)

    # --- words -----------------------------------------------------------------------------------

    def describe(self, experts: int) -> Description:
        parts: list[str] = []
        shape: JSON = {}
        kept: list[int] = self.experts.tolist()
        whose, of = f"{len(kept)} of {experts} experts", "" if self.dense else " of each expert"
        if self.kept_E is not None and (len(kept) < experts or self.neurons_EW is None):
            of = f" of each of {whose}"
            shape = {"kept": kept, "before": experts}
            if len(self.kept_E) > len(kept):
                shape["places"] = len(self.kept_E)
        if self.neurons_EW is not None:
            widths = self.widths if self.uneven else [self.width]
            width = round(sum(widths) / len(widths))
            parts.append(f"{width:,} of {self.before:,} neurons{of} kept")
            shape |= {"neurons": width, "of": self.before}
            if width > self.before:
                parts[0] = f"{self.before:,} neurons{of} filled up with zeros to {width:,}"
            elif self.dense:
                parts[0] += ", the same for every token"
            if self.uneven:
                parts[0] += f" in the mean, {min(widths):,} to {max(widths):,}"
                shape["widths"] = widths
        elif self.kept_E is not None:
            parts.append(f"{whose} kept")
        if self.shared_S is not None:
            shape["shared"] = int((self.shared_S >= 0).sum())
        if self.top_k is not None:
            parts.append(f"a token runs {self.top_k} of {len(kept) or experts} experts")
            shape["experts_per_token"] = self.top_k
        if self.beta is not None:
            parts.append(f"experts of low weight are skipped, beta {self.beta:.3g}")
            shape |= {"beta": self.beta, "rule": self.rule}
        return Description("; ".join(parts), shape)

    @classmethod
    def use(cls, layer: nn.Module, arch: Arch, header: Header, width: int) -> LayerUse:
        use = arch.use(layer)
        if "width" not in header or "experts" in header:
            return use
        hidden = weight_of(arch.ffn_of(layer), arch.ffn.down).shape[0]
        neuron = (3 if arch.ffn.gate else 2) * hidden
        return replace(use, kind=cls.kind, dropped=neuron * (header["before"] - use.width))

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        if "widths" in header:
            return "Experts of different widths have no native form: slim with allocate=uniform."
        if "beta" in header:
            return "No native router skips experts: export the model without skip."
        if "top_k" in header:
            return (
                "Its layers run different numbers of experts a token: give all of them one "
                "(skip --top-k N)."
            )
        return None

    def mtp_plan(self) -> CutLayer | None:
        if self.kept_E is None:
            return None
        return replace(self, top_k=None, beta=None, down_E=None, shared_DS=None)

    def native(self) -> JSON | None:
        if self.uneven or self.counted or self.beta is not None:
            return None
        return {"dense": self.width} if self.dense else self._sizes()

    # --- refit -----------------------------------------------------------------------------------

    def refit(self, site: LayerTokens[FFN]) -> tuple[CutLayer, JSON]:
        """Solve for new down projections of the kept experts, jointly.

        If neurons are removed, the shared path's is solved for, too.
        """
        neurons_EW, view = self.neurons_EW, site.view
        if neurons_EW is not None and self.dense:
            order_W = neurons_EW[0].to(view.device)
            running = ((h_TM, h_TM[:, order_W]) for _, h_TM in site.activations())
            down_DW, figures = refitted_down(cast("LayerTokens[DenseFFN]", site), order_W, running)
            return replace(self, down_E=down_DW[None]), figures
        if self.kept_E is None:
            raise MoesaicError("Layers of which no weights are removed are not refitted.")
        shared_S, routed = self.shared_S, cast("LayerTokens[MoEFFN]", site)
        if shared_S is None and neurons_EW is not None and routed.view.shared_width:
            shared_S = torch.arange(routed.view.shared_width)
        down_E, down_DS, figures = refitted_downs(routed, self.kept, self.neurons_of, shared_S)
        new = replace(self, shared_S=shared_S)  # the same header as that of refitted layers
        if down_E is not None:
            new = replace(new, down_E=down_E)
        if shared_S is not None and down_DS is not None:
            placed_DS = down_DS.new_zeros(len(down_DS), len(shared_S))
            placed_DS[:, shared_S >= 0] = down_DS
            new = replace(new, shared_DS=placed_DS)
        return new, figures

    def refit_bytes(self, view: FFN, hidden: int, tokens: int) -> int:
        if not isinstance(view, MoEFFN):
            return Ridge.bytes(self.width, hidden)
        width, count, shared = self.width or view.width, len(self.kept), 0
        if self.neurons_EW is not None:
            shared = view.shared_width if self.shared_S is None else len(self.shared_S)
        running = min(view.top_k, count) * width + shared
        return joint_bytes([width] * count + [shared] * bool(shared), running, hidden, tokens)


def _among(numbers: Tensor, count: int) -> Tensor:
    """Return True at each of some numbers below ``count``: bool (count,)."""
    return torch.zeros(count, dtype=torch.bool).index_fill(0, numbers, True)


def _resize_experts(layer: nn.Module, arch: MoEArch, count: int) -> None:
    """Give a routed block another number of experts, in place.

    Its tensors are resized by :func:`moesaic.plans.neurons.resize`.
    """
    view = arch.mixture(layer)
    before = view.count
    for name, tensor in [*view.block.named_parameters(), *view.block.named_buffers()]:
        axis = arch.expert_axis(name, tensor, before)
        if axis is None:
            continue
        owner, _, leaf = name.rpartition(".")
        size = tensor.shape[axis] + count - before
        neurons.resize(view.block.get_submodule(owner), leaf, axis, size)
    for module in (view.block, *view.router.modules(), view.experts):
        for name in ("num_experts", "out_features"):
            if getattr(module, name, None) == before:
                setattr(module, name, count)
