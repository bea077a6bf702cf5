"""Dense FFN cut into shared neurons that every token runs and experts of which it runs some.

Neurons are reordered so that the shared ones (MoRE's backbone) and those of every expert (MoRE's
petals) are contiguous.

Shape suffixes: T tokens, D hidden size, M neurons in their new order, R experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from moesaic.arch.dense import Arch, DenseFFN, put
from moesaic.arch.use import LayerUse, RoutedModule
from moesaic.carving.carved_ffn import CarvedFFN, carved_like
from moesaic.carving.routers import CHOOSING, WEIGHING, by_neuron, make_router, norm_scale
from moesaic.errors import shown
from moesaic.plans.base import (
    Description,
    Header,
    LayerPlan,
    LayerTokens,
    Sizes,
    State,
    check_numbers,
)
from moesaic.plans.neurons import of_ffn
from moesaic.plans.recovery import refitted_down
from moesaic.types import JSON

PROMPTS = ("petals", "dense")
"""Values of ``prompts``: tokens are routed everywhere, or only in decoding."""


@dataclass(frozen=True)
class CarvedLayer(LayerPlan):
    """Plan of a dense FFN whose tokens run a part of its neurons.

    An ``order_M`` shorter than the original width removes neurons: static pruning does, MoRE never.
    """

    kind: ClassVar[str] = "carved"
    held: ClassVar[Mapping[str, str]] = {
        "order": "order_M",
        "router": "router_RD",
        "down": "down_DM",
    }

    order_M: Tensor
    """Original neuron at each new place, int64: shared ones first, then expert after expert."""
    backbone: int
    """Neurons that every token runs."""
    petals: tuple[int, ...] = ()
    """Neurons of each expert."""
    top_k: int = 0
    """Experts that a token runs."""
    routing: str = "cosine"
    """Name of the router; see :mod:`moesaic.carving.routers`."""
    router_RD: Tensor | None = None
    """Weight of the router, one row per expert, float32 (R, D)."""
    down_DM: Tensor | None = None
    """Down projection in carved order that replaces the base's own."""
    gate: JSON = field(default_factory=dict)
    """Options of a router that weighs; with ``tau``, ``top_k`` is an upper bound."""
    prompts: str = "petals"
    """Routing of prompts: ``petals`` routes their tokens, too; ``dense`` runs every neuron."""

    def __post_init__(self) -> None:
        width = self.backbone + sum(self.petals)
        if self.order_M.numel() != width:
            raise ValueError(f"{self.order_M.numel()} neurons are ordered, {width} are placed")
        if min(self.backbone, *self.petals, 0) < 0:
            raise ValueError("a number of neurons is below 0")
        if self.petals and self.routing not in (*CHOOSING, *WEIGHING):
            raise ValueError(f"routing {shown(self.routing)} is unknown")
        if self.order_M.unique().numel() != width:
            raise ValueError("a neuron is placed twice")
        if not 0 <= self.top_k <= len(self.petals):
            raise ValueError(f"top_k {self.top_k} of {len(self.petals)} experts")
        if (self.router_RD is None) != (not self.petals):
            raise ValueError("a router is needed for experts, and only for experts")
        if self.prompts not in PROMPTS:
            raise ValueError(f"prompts {shown(self.prompts)} is none of {', '.join(PROMPTS)}")
        if self.routing in WEIGHING and len(set(self.petals)) > 1:
            raise ValueError("experts that are weighed are of one size")

    @property
    def active_width(self) -> float:
        """Mean neurons that a token runs under uniform routing (MoRE, App. F.2)."""
        if not self.petals:
            return self.backbone
        return self.backbone + self.top_k * sum(self.petals) / len(self.petals)

    def header(self) -> JSON:
        return {
            "kind": self.kind,
            "backbone": self.backbone,
            "petals": list(self.petals),
            "top_k": self.top_k,
            "routing": self.routing,
            **({"gate": self.gate} if self.gate else {}),
            **({} if self.prompts == "petals" else {"prompts": self.prompts}),
        }

    @classmethod
    def load(cls, header: Header, tensors: Mapping[str, Tensor]) -> CarvedLayer:
        return cls(
            backbone=header["backbone"],
            petals=tuple(header["petals"]),
            top_k=header["top_k"],
            routing=header["routing"],
            gate=header.get("gate", {}),
            prompts=header.get("prompts", "petals"),
            **cls.fields_of(tensors),
        )

    def check(self, sizes: Sizes) -> None:
        check_numbers("neurons", self.order_M, sizes.width)

    # --- put to use ------------------------------------------------------------------------------

    def sources(self, arch: Arch) -> tuple[str, ...]:
        return (f"{arch.ffn_path}.",)

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's own or refitted values in carved order, and the router."""
        yield from of_ffn(arch, state, self.order_M, self.down_DM)
        if self.router_RD is not None:
            down = state[f"{arch.ffn_path}.{arch.ffn.down}.weight"]
            yield f"{arch.ffn_path}.router.weight", self.router_RD.to(down.device)

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        layer = layers[index]
        put(layer, arch.ffn_path, carved_like(arch.ffn_of(layer), arch.ffn, header, layer))

    # --- words -----------------------------------------------------------------------------------

    def describe(self, experts: int) -> Description:
        header = self.header()
        text = f"{self._words()}; prompts run dense" if self.prompts == "dense" else self._words()
        shape = {k: header[k] for k in header if k not in ("kind", "top_k")}
        return Description(text, shape)

    def _words(self) -> str:
        if not self.petals:
            return f"every token runs the same {self.backbone:,} neurons"
        shared = f"{self.backbone:,} neurons for every token and " if self.backbone else ""
        if "tau" in self.gate:
            return f"{shared}those of {len(self.petals)} experts whose gate is open"
        return f"{shared}{self.top_k} of {len(self.petals)} experts"

    @classmethod
    def use(cls, layer: nn.Module, arch: Arch, header: Header, width: int) -> LayerUse:
        ffn, use = arch.ffn_of(layer), arch.use(layer)
        assert isinstance(ffn, CarvedFFN)
        missing = use.ffn * (width - use.width) // use.width
        experts, sizes = len(ffn.petals), {*ffn.petals}
        return replace(
            use,
            kind=cls.kind,
            active_width=ffn.backbone + (ffn.top_k * sum(ffn.petals) / experts if experts else 0),
            experts=experts,
            top_k=ffn.top_k,
            expert_width=sizes.pop() if len(sizes) == 1 else 0,
            router=0 if ffn.router is None else sum(p.numel() for p in ffn.router.parameters()),
            dropped=max(0, missing),
            copied=max(0, -missing),
        )

    @classmethod
    def routed(cls, layer: nn.Module, arch: Arch, header: Header) -> RoutedModule | None:
        ffn = arch.ffn_of(layer)
        assert isinstance(ffn, CarvedFFN)
        if ffn.router is None:
            return None
        return RoutedModule(ffn.router, ffn.backbone, ffn.petals)

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        if header.get("prompts") == "dense":
            return "No native format routes at decoding alone: carve with prompts=petals."
        if header["petals"] and header["routing"] not in ("cosine", "linear"):
            return f"Routing by {header['routing']!r} has no native form yet."
        return None

    @classmethod
    def exporter(cls, header: Header) -> Callable[..., Any] | None:
        from moesaic.carving.as_experts import as_experts

        return as_experts if header.get("petals") else None

    # --- refit -----------------------------------------------------------------------------------

    def refit(self, site: LayerTokens[DenseFFN], **options: bool) -> tuple[CarvedLayer, JSON]:
        """Solve for a new down projection.

        Features are h~, the input of the down projection, masked or weighed by the layer's own
        router.
        """
        order_M = self.order_M.to(site.view.device)
        down_DM, figures = refitted_down(site, order_M, self.running(site))
        return replace(self, down_DM=down_DM), figures

    def running(self, site: LayerTokens[DenseFFN]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of hidden activations, and of those that a token still runs.

        Yields:
            h (T, M) of the original; h~ (T, M) in carved order.
        """
        order_M = self.order_M.to(site.view.device)
        router = None
        if self.router_RD is not None:
            experts, hidden_size = self.router_RD.shape
            form = hidden_size, experts, self.top_k, self.routing, self.gate
            router = make_router(*form, site.passage).to(site.view.device).eval()
            router.weight.data = self.router_RD.to(site.view.device)
        for x_TD, whole_TM in site.activations():
            h_TM = whole_TM[:, order_M]
            if router is not None:
                on_TR = router(x_TD)
                if self.routing in WEIGHING:
                    on_TR = on_TR * norm_scale(on_TR)
                h_TM = h_TM * by_neuron(on_TR, self.backbone, self.petals).to(h_TM)
            yield whole_TM, h_TM
