"""Removal of a whole decoder layer, attention included (Block Drop)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from moesaic.arch.dense import FFN, Arch
from moesaic.arch.use import LayerUse, RoutedModule
from moesaic.modules.condensed_ffn import PassThrough, shapes
from moesaic.plans.base import Description, Header, LayerPlan, LayerTokens, Sizes, State
from moesaic.plans.condensed import empty_projection
from moesaic.types import JSON, Config


def _attributes(layer: nn.Module) -> JSON:
    """Return the strings and numbers that a layer, or its class, has as attributes."""
    noted = {**vars(type(layer)), **vars(layer)}
    return {n: v for n, v in noted.items() if n[0] != "_" and isinstance(v, str | int | float)}


def cache_leaders(config: Config) -> set[int]:
    """Return the layers without which cached decoding goes wrong: the first one, and the first one
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
        empty_0D = empty_projection(arch, state)
        for name, shape in shapes(arch.ffn.apart, empty_0D.shape[1]).items():
            yield f"{arch.ffn_path}.{name}.weight", empty_0D.new_empty(shape)

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        hidden = arch.empty_output(layers[index]).shape[1]
        noted = _attributes(layers[index])
        layers[index] = PassThrough(hidden, arch.ffn_path, arch.ffn.apart)
        vars(layers[index]).update(noted)  # some models read a layer's type

    def describe(self, experts: int) -> Description:
        return Description("the whole layer is gone")

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

    def refit(self, site: LayerTokens[FFN], **options: bool) -> tuple[DroppedLayer, JSON]:
        """Return the plan unchanged: nothing is left that could be fitted."""
        return self, {}
