"""Lower top-k of one mixture layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch
from moesaic.arch.routing import set_top_k
from moesaic.plans.base import Description, Header, RoutingPlan, Sizes, State
from moesaic.types import JSON


@dataclass(frozen=True)
class FewerLayer(RoutingPlan):
    """Plan of a layer in which a token runs fewer experts; weights and earlier steps are kept.

    A table of each token's experts keeps its first columns.
    """

    kind: ClassVar[str] = "fewer"
    refines: ClassVar[bool] = True

    top_k: int
    """Experts that a token runs."""
    before: int
    """Experts that a token ran before."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.before:
            raise ValueError(f"a token cannot run {self.top_k} of the {self.before} experts it did")

    def check(self, sizes: Sizes) -> None:
        if self.before > sizes.experts:
            raise ValueError(f"a token ran {self.before} of {sizes.experts} experts")

    def sources(self, arch: Arch) -> tuple[str, ...]:
        assert isinstance(arch, MoEArch)
        return () if arch.parts.table is None else (f"{arch.inside}{arch.parts.table}",)

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        for stored, _ in state.stored(*self.sources(arch)):
            yield stored, state.read(stored)[:, : self.top_k].contiguous()

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        assert isinstance(arch, MoEArch)
        view = arch.mixture(layers[index])
        set_top_k(view.router, arch.parts, header["top_k"])
        if hasattr(view.block, "top_k"):  # some blocks hold it, too
            view.block.top_k = header["top_k"]

    def describe(self, experts: int) -> Description:
        text = f"a token runs {self.top_k} of {experts} experts, instead of {self.before}"
        return Description(text, {"experts_per_token": self.top_k})

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        return (
            "Its layers run different numbers of experts a token: give all of them one "
            "(skip --top-k N)."
        )

    def native(self) -> JSON | None:
        return {"top_k": self.top_k}
