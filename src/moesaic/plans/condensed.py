"""A mixture turned into one dense MLP, and decoder layers that are removed.

Shared path and chosen experts are folded (CD-MoE, Eq. 3); a removed layer has no attention either
(Block Drop).

Shape suffixes: E routed experts, K chosen ones, M neurons, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch, FFNNames, LayerUse, RoutedModule, put, returns_tuple
from moesaic.arch.mixture import FFN, MoEArch, MoEFFN
from moesaic.errors import MoesaicError, quote
from moesaic.modules.blocks import CondensedFFN, Nothing, PassThrough, shapes
from moesaic.modules.running import LayerTokens
from moesaic.plans.base import (
    NO_EXPERTS,
    Description,
    Header,
    LayerPlan,
    LiveState,
    Sizes,
    State,
    check_numbers,
)
from moesaic.plans.recovery import DownRefit, Ridge
from moesaic.types import JSON, Config

Part = tuple[Tensor, Tensor, Tensor, float]
"""Gate (M, D), up (M, D), down (D, M), and the factor of the part's output."""


@dataclass(frozen=True)
class CondensedLayer(LayerPlan):
    """Plan of one dense MLP in the place of a mixture.

    If the layer is dense already, its MLP is the shared path.
    """

    kind: ClassVar[str] = "condensed"
    held: ClassVar[Mapping[str, str]] = {
        "experts": "experts_K",
        "gates": "gates_K",
        "down": "down_DM",
    }

    experts_K: Tensor
    """Routed experts that every token runs, in the order they were chosen, int64."""
    gates_K: Tensor
    """Fixed weights g_i, the router's scaling included, float32."""
    width: int
    """Neurons, including zeros beyond the experts' own."""
    shared: bool = True
    """True if the shared path is kept."""
    shared_scale: float | list[float] = 1.0
    """Factor of the shared path, besides its gate; one per shared expert if the router weighs
    them."""
    gated: int = 0
    """Neurons of the shared path that keep the base's gate, which scales them token by token."""
    down_DM: Tensor | None = None
    """Down projection that replaces the folded one."""

    def __post_init__(self) -> None:
        if self.experts_K.numel() != self.gates_K.numel():
            raise ValueError(f"{self.experts_K.numel()} experts, {self.gates_K.numel()} weights")
        if self.experts_K.unique().numel() != self.experts_K.numel():
            raise ValueError("an expert is chosen twice")

    @property
    def experts(self) -> list[int]:
        """Routed experts in the order they were chosen."""
        return self.experts_K.tolist()

    def check(self, sizes: Sizes) -> None:
        check_numbers("experts", self.experts_K, sizes.experts)
        for name, value in (("neurons", self.width), ("gated neurons", self.gated)):
            if not 0 <= value <= sizes.most:
                raise ValueError(f"{quote(value, 20)} {name} are more than such a layer has")

    # --- put to use ------------------------------------------------------------------------------

    def sources(self, arch: Arch) -> tuple[str, ...]:
        return tuple(f"{path}." for path in arch.replaced_paths)

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """Yield gate, up and down of the MLP, and the shared path's own gate if it is kept."""
        assert isinstance(arch, MoEArch)
        path = arch.ffn_path
        experts = f"{path}.{arch.experts}."
        is_dense = f"{experts}down_proj" not in state
        parts: list[Part] = []
        if self.shared and is_dense:
            parts.append((*_projections(state, path, arch.ffn), 1.0))
        elif self.shared and arch.shared_at is not None:
            parts += self._shared(arch, arch.shared_at, state)
        if self.experts:
            both, down = (state[experts + name] for name in ("gate_up_proj", "down_proj"))
            for i, scale in zip(self.experts, self.gates_K.tolist(), strict=True):
                gate_MD, up_MD = both[i].chunk(2)
                parts.append((gate_MD, up_MD, down[i], scale))
        empty_0D = _empty_projection(arch, state)
        like = parts[0][2] if parts else empty_0D
        names = arch.ffn.apart
        folded = dict(zip(names, _fold(parts, empty_0D.shape[1], self.width), strict=True))
        if self.down_DM is not None:  # narrower if the layer was widened later
            rest = self.width - self.down_DM.shape[1]
            folded[names[-1]] = F.pad(self.down_DM.to(like.device), (0, rest))
        if self.gated:
            folded["shared_gate"] = state[f"{path}.{arch.shared_gate}.weight"]
        for name, tensor in folded.items():
            yield f"{path}.{name}.weight", tensor.to(like).contiguous()

    def _shared(self, arch: MoEArch, at: str, state: State) -> Iterator[Part]:
        """Yield the shared path's projections and its weight, or those of each shared expert."""
        names, count, scales = arch.shared_names, arch.parts.always, self.shared_scale
        if not count and isinstance(scales, float):
            yield *_projections(state, at, names), scales
            return
        gate, up, down = (state[f"{at}.{name}"] for name in (names.gate, names.up, names.down))
        scales = scales if isinstance(scales, list) else [scales] * count
        yield from zip(gate, up, down, scales, strict=True)

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        layer = layers[index]
        new = _new_ffn(layer, arch, header["width"], header["gated"], "meta")
        for path in arch.replaced_paths:  # some layers call the shared path unconditionally
            put(layer, path, Nothing())
        put(layer, arch.ffn_path, new.train(layer.training))

    # --- words -----------------------------------------------------------------------------------

    def describe(self, experts: int) -> Description:
        kept = ["the shared path"] if self.shared else []
        if self.experts:
            kept.append(f"{len(self.experts)} of {experts} experts with fixed weights")
        text = " and ".join(kept) or "nothing of the feed-forward block"
        shape: JSON = {
            "before": experts,
            "chosen": self.experts,
            "gates": self.gates_K.tolist(),
            "shared": self.shared,
        }
        return Description(f"one dense MLP: {text}" if kept else f"{text} is kept", shape)

    @classmethod
    def use(cls, layer: nn.Module, arch: Arch, header: Header, width: int) -> LayerUse:
        return replace(Arch.use(arch, layer), kind=cls.kind)

    @classmethod
    def routed(cls, layer: nn.Module, arch: Arch, header: Header) -> RoutedModule | None:
        return None

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        if header["gated"]:
            return (
                "Its shared path keeps a gate token by token, which no dense layer has: "
                "condense with shared_gate=mean."
            )
        return None

    def native(self) -> JSON | None:
        return None if self.gated or not self.width else {"dense": self.width}

    # --- refit -----------------------------------------------------------------------------------

    def refit(self, site: LayerTokens[FFN]) -> tuple[CondensedLayer, JSON]:
        """Solve for a new down projection. Features are h~ of the shared path and the chosen
        experts.

        A layer that was dense before, or has no neurons left, is not changed.
        """
        view = site.view
        if not isinstance(view, MoEFFN) or not self.width:
            return self, {}
        module = self.module(site.layer, view.arch)
        _, _, down = module.projections
        down_DM: Tensor = down.weight.detach()
        balance = DownRefit(down_DM)
        features: list[Tensor] = []
        down.register_forward_pre_hook(lambda _, args: features.append(args[0]))
        for x_TD, target_TD in zip(site.inputs(), site.targets(), strict=True):
            y_TD = view.output(x_TD) if target_TD is None else target_TD
            if view.arch.beside is not None and view.shared is not None:
                y_TD = y_TD + view.shared(x_TD)
            kept_TD = module.output(x_TD)
            balance.add(features.pop(), kept_TD, y_TD)
        new_DM, figures = balance.solve()
        return replace(self, down_DM=new_DM), figures

    def refit_bytes(self, view: FFN, hidden: int, tokens: int) -> int:
        return Ridge.bytes(self.width, hidden)

    def module(self, layer: nn.Module, arch: MoEArch) -> CondensedFFN:
        """Return the MLP that replaces a live layer's block; the layer is not changed."""
        prefix = f"{arch.ffn_path}."
        tensors = dict(self.convert(arch, LiveState(layer)))
        new = _new_ffn(layer, arch, self.width, self.gated)
        new.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items()}, assign=True)
        return new.train(layer.training)


def _new_ffn(
    layer: nn.Module, arch: Arch, width: int, gated: int, device: str | torch.device | None = None
) -> CondensedFFN:
    """Return the MLP that replaces a live layer's FFN, by default on its device."""
    like_0D = _empty_projection(arch, LiveState(layer))
    device = device or like_0D.device
    act = arch.act_of(layer) if width else nn.Identity()
    more = returns_tuple(type(arch.ffn_of(layer)).forward)
    return CondensedFFN(
        *(like_0D.shape[1], width, act, arch.ffn.apart, gated, more),
        device=device,
        dtype=like_0D.dtype,
    )


def _empty_projection(arch: Arch, state: State) -> Tensor:
    """Return an FFN's projection with no neurons (0, D), of the dtype of its experts or neurons.

    Routers may have a wider dtype.
    """
    reader = next(state[name] for name in arch.readers if name in state)
    experts = f"{arch.inside}{arch.experts}." if isinstance(arch, MoEArch) else "\0"
    stored = next((name for name, _ in state.stored(experts)), None)
    like = reader if stored is None else state.read(stored)
    return torch.empty(0, reader.shape[1], dtype=like.dtype, device=like.device)


NO_FFN = CondensedLayer(NO_EXPERTS, torch.empty(0, device="cpu"), 0, shared=False)
"""Plan of a layer whose whole FFN block is removed: Layer Drop."""


def _fold(parts: list[Part], hidden_size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate (M, D), up (M, D) and down (D, M) of one MLP that is the weighted sum of its
    parts.

    sum_i g_i down_i h_i = [g_1 down_1, g_2 down_2, ...] [h_1; h_2; ...]; neurons beyond the
    parts' own are zero.

    >>> one = torch.ones(1, 1)
    >>> _fold([(one, one, one, 1.0), (one, one, one, 0.5)], 1, 3)[2]
    tensor([[1.0000, 0.5000, 0.0000]])
    """
    like = parts[0][0] if parts else torch.empty(0, hidden_size)
    gate_MD = torch.cat([gate for gate, _, _, _ in parts] or [like])
    up_MD = torch.cat([up for _, up, _, _ in parts] or [like])
    scaled = [(down.float() * scale).to(down.dtype) for _, _, down, scale in parts]
    down_DM = torch.cat(scaled or [like.T], dim=1)
    rest = width - gate_MD.shape[0]
    pad = (0, 0, 0, rest)
    return F.pad(gate_MD, pad), F.pad(up_MD, pad), F.pad(down_DM, (0, rest))


def _projections(state: State, at: str, names: FFNNames) -> tuple[Tensor, Tensor, Tensor]:
    if names.gate is None or any(f"{at}.{name}.bias" in state for name in names.projections):
        raise MoesaicError(f"{at} has biases or no gate; only MLPs like gate, up, down condense.")
    up_MD, down_DM = (state[f"{at}.{name}.weight"] for name in (names.up, names.down))
    if names.fused:
        gate_MD, up_MD = up_MD.chunk(2)
        return gate_MD, up_MD, down_DM
    return state[f"{at}.{names.gate}.weight"], up_MD, down_DM


def cache_leaders(config: Config) -> set[int]:
    """Return the layers without which cached decoding is wrong: the first one, and the first one
    of each kind of attention, since transformers reads positions and mask sizes from their
    caches."""
    kinds = list(getattr(config, "layer_types", None) or ())
    return {0, *(kinds.index(kind) for kind in {*kinds} - {"moe", "mlp"})}


@dataclass(frozen=True)
class DroppedLayer(LayerPlan):
    """Plan of a removed layer: tokens pass unchanged."""

    kind: ClassVar[str] = "dropped"

    def check(self, sizes: Sizes) -> None:
        """Accept any layer: nothing is chosen."""

    def sources(self, arch: Arch) -> tuple[str, ...]:
        return ("",)

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """Yield three projections without neurons, by which the block is recognised."""
        empty_0D = _empty_projection(arch, state)
        for name, shape in shapes(arch.ffn.apart, empty_0D.shape[1]).items():
            yield f"{arch.ffn_path}.{name}.weight", empty_0D.new_empty(shape)

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        hidden = _empty_projection(arch, LiveState(layers[index])).shape[1]
        every = {**vars(type(layers[index])), **vars(layers[index])}
        layers[index] = PassThrough(hidden, arch.ffn_path, arch.ffn.apart)
        for name, value in every.items():  # some models read a layer's type
            if name[0] != "_" and isinstance(value, str | int | float):
                vars(layers[index])[name] = value

    def describe(self, experts: int) -> Description:
        return Description("the whole layer is removed")

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        return None

    @classmethod
    def removes(cls, header: Header) -> bool:
        return True

    @classmethod
    def use(cls, layer: nn.Module, arch: Arch, header: Header, width: int) -> LayerUse:
        return LayerUse(cls.kind, 0, 0, 0, 0)

    @classmethod
    def routed(cls, layer: nn.Module, arch: Arch, header: Header) -> RoutedModule | None:
        return None

    def refit(self, site: LayerTokens[FFN]) -> tuple[DroppedLayer, JSON]:
        """Return the plan unchanged: nothing is left that could be fitted."""
        return self, {}
