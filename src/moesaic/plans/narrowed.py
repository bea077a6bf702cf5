"""Dense FFN that keeps some of its neurons: static width pruning.

Shape suffixes: T tokens, W kept neurons, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from moesaic.arch.dense import Arch, DenseFFN
from moesaic.arch.use import LayerUse
from moesaic.plans.base import (
    Description,
    Header,
    LayerPlan,
    LayerTokens,
    Sizes,
    State,
    check_numbers,
)
from moesaic.plans.neurons import narrow_mlp, of_ffn
from moesaic.plans.recovery import refitted_down
from moesaic.types import JSON


@dataclass(frozen=True)
class NarrowedLayer(LayerPlan):
    """Plan of a dense FFN of which every token runs the same kept neurons."""

    kind: ClassVar[str] = "narrowed"
    held: ClassVar[Mapping[str, str]] = {"order": "order_W", "down": "down_DW"}

    order_W: Tensor
    """Original neuron at each new place, int64."""
    before: int
    """Neurons before."""
    down_DW: Tensor | None = None
    """Down projection that replaces the base's own."""
    counted: bool = False
    """True if the model becomes ``moesaic_<base>``, whose active ratio counts the removed neurons;
    False if it is of the base's own class, narrower."""

    def __post_init__(self) -> None:
        if self.order_W.unique().numel() != self.order_W.numel():
            raise ValueError("a neuron is kept twice")

    @property
    def width(self) -> int:
        """Number of kept neurons."""
        return self.order_W.numel()

    def header(self) -> JSON:
        counted = {"counted": True} if self.counted else {}
        return {"kind": self.kind, "width": self.width, "before": self.before, **counted}

    @classmethod
    def load(cls, header: Header, tensors: Mapping[str, Tensor]) -> NarrowedLayer:
        counted = header.get("counted", False)
        return cls(before=header["before"], counted=counted, **cls.fields_of(tensors))

    def check(self, sizes: Sizes) -> None:
        check_numbers("neurons", self.order_W, sizes.width)

    # --- put to use ------------------------------------------------------------------------------

    def sources(self, arch: Arch) -> tuple[str, ...]:
        return (f"{arch.ffn_path}.",)

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's own or refitted values, without the removed neurons."""
        return of_ffn(arch, state, self.order_W, self.down_DW)

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        narrow_mlp(arch.ffn_of(layers[index]), arch.ffn, header["width"])

    # --- words -----------------------------------------------------------------------------------

    def describe(self, experts: int) -> Description:
        text = f"{self.width:,} of {self.before:,} neurons stay, the same for every token"
        return Description(text, {"neurons": self.width, "of": self.before})

    @classmethod
    def use(cls, layer: nn.Module, arch: Arch, header: Header, width: int) -> LayerUse:
        use = arch.use(layer)
        neuron = (3 if arch.ffn.gate else 2) * arch.empty_output(layer).shape[1]
        return replace(use, kind=cls.kind, dropped=neuron * (header["before"] - use.width))

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        return None

    def native(self) -> JSON | None:
        return None if self.counted else {"dense": self.width}

    # --- refit -----------------------------------------------------------------------------------

    def refit(self, site: LayerTokens[DenseFFN], **options: bool) -> tuple[NarrowedLayer, JSON]:
        """Solve for a new down projection."""
        order_W = self.order_W.to(site.view.device)
        running = ((h_TM, h_TM[:, order_W]) for _, h_TM in site.activations())
        down_DW, figures = refitted_down(site, order_W, running)
        return replace(self, down_DW=down_DW), figures
