"""Dense FFN cut into shared neurons that every token runs and experts of which it runs some.

Neurons are reordered so that the shared ones (MoRE's backbone) and those of every expert (MoRE's
petals) are contiguous. One copy of each weight, under the base's own names: an expert is a
slice.

Shape suffixes: T tokens, D hidden size, M neurons in their new order, R experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from moesaic.arch.dense import (
    Arch,
    DenseFFN,
    FFNNames,
    LayerUse,
    RoutedModule,
    act_of,
    dense_ffn,
    put,
    weight_of,
)
from moesaic.arch.mixture import FFN
from moesaic.carving.routers import CHOOSING, DRAWING, WEIGHING, by_neuron, make_router, norm_scale
from moesaic.errors import quote
from moesaic.modules.running import LayerTokens, Phase, RunningTokens
from moesaic.plans.base import Description, Header, LayerPlan, Sizes, State, check_numbers
from moesaic.plans.neurons import of_ffn
from moesaic.plans.recovery import Ridge, refitted_down
from moesaic.types import JSON, Values

NARROW = 32
"""Least mean neurons of a petal for a matrix product of its own, on the CPU."""

LAUNCHED = 256
"""Least mean neurons of a petal on other devices, where launching a kernel takes longer."""

CROWDED = 0.8
"""Share of active petals above which one product over all neurons is faster."""


class CarvedFFN(nn.Module):
    """Feed-forward block of which each token runs a part.

    Petals have weight one (MoRE Eq. 12), or the weights of a router that weighs, times petals over
    active petals (DSMoE Eq. 8).

    Args:
        projections: the base block's linear modules by name, of the carved width.
        act: the base block's activation function.
        names: which projection is gate, up and down.
        petals: neurons of each petal; the rest of the width is the backbone.
        top_k: petals a token runs.
        routing: name of the router; see :mod:`moesaic.carving.routers`.
        gate: options of a router that weighs.
        phase: if given, tokens are routed only in decoding, and prompts run every neuron.
        passage: the tokens that run, for routing by random numbers.
    """

    shares = False
    """True if petals may share neurons, in the base's order and width."""

    def __init__(
        self,
        projections: Mapping[str, nn.Module],
        act: Callable[[Tensor], Tensor],
        names: FFNNames,
        hidden_size: int,
        backbone: int,
        petals: Sequence[int],
        top_k: int,
        routing: str,
        gate: Values | None = None,
        phase: Phase | None = None,
        passage: RunningTokens | None = None,
    ) -> None:
        super().__init__()
        self.phase = phase
        for name, projection in projections.items():
            self.add_module(name, projection)
        setattr(self, names.act, act)
        self.names = names
        self.backbone = backbone
        self.petals = tuple(petals)
        self.top_k = top_k
        self.slices = tuple(pairwise(accumulate(self.petals, initial=backbone)))
        self.weighs = routing in WEIGHING
        self.router: nn.Module | None = None
        if petals:
            self.router = make_router(hidden_size, len(petals), top_k, routing, gate, passage)

    def view(self) -> DenseFFN:
        """Return the whole block as three matrices, in carved order."""
        return dense_ffn(self, self.names)

    # Group sizes differ by call: if traced, each of them would be compiled anew.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        on_TR = None if self.training else self._routed(x_TD)
        if on_TR is None or not self._worth_moving(x_TD, on_TR):
            y_TD = self._masked(x_TD, on_TR)
        else:
            y_TD = self._apart(x_TD, on_TR)
        return y_TD.view_as(x)

    def _routed(self, x_TD: Tensor) -> Tensor | None:
        """Return the weight of each petal (T, R), zero if it does not run; None if all run."""
        routes = self.phase is None or self.phase.routes or self.training
        if self.router is None or not routes:
            return None
        on_TR: Tensor = self.router(x_TD)
        return on_TR * norm_scale(on_TR) if self.weighs else on_TR

    def _masked(self, x_TD: Tensor, on_TR: Tensor | None) -> Tensor:
        """Run every neuron through the projections, with idle ones set to zero.

        In training all tokens are routed here, after the projections: idle gates learn, too.
        """
        names, act = self.names, act_of(self, self.names)
        h_TM = getattr(self, names.up)(x_TD)
        if names.gate is None:
            h_TM = act(h_TM)
        elif names.fused:
            gate_TM, up_TM = h_TM.chunk(2, dim=-1)
            h_TM = act(gate_TM) * up_TM
        else:
            h_TM = act(getattr(self, names.gate)(x_TD)) * h_TM
        on_TR = self._routed(x_TD) if self.training else on_TR
        if on_TR is not None:
            h_TM = h_TM * self._by_neuron(on_TR, h_TM.shape[1]).to(h_TM.dtype)
        return getattr(self, names.down)(h_TM)

    def _apart(self, x_TD: Tensor, on_TR: Tensor) -> Tensor:
        """Run the backbone over all tokens, and each petal over the tokens that chose it."""
        ffn, weights_TR = self.view(), on_TR.to(x_TD.dtype)
        backbone = ffn.neurons(0, self.backbone)
        y_TD = backbone.output(backbone.hidden(x_TD))
        on_RT = weights_TR.T > 0
        petal, token = on_RT.nonzero(as_tuple=True)
        counts = on_RT.sum(1).tolist()
        weights = weights_TR[token, petal].split(counts)
        for part, rows, weight in zip(self._parts(ffn), token.split(counts), weights, strict=True):
            if len(rows):
                part_TD = part.output(part.hidden(x_TD.index_select(0, rows)))
                if self.weighs:
                    part_TD = part_TD * weight[:, None]
                y_TD = y_TD.index_add_(0, rows, part_TD)
        return y_TD if ffn.down_bias_D is None else y_TD + ffn.down_bias_D

    def _worth_moving(self, x_TD: Tensor, on_TR: Tensor) -> bool:
        """Return True if each petal should run its own tokens in a product of its own."""
        narrow = sum(self.petals) / len(self.petals) < (NARROW if x_TD.is_cpu else LAUNCHED)
        if narrow or self._called():
            return False
        return (on_TR > 0).float().mean().item() < CROWDED

    def _called(self) -> bool:
        """Return True if the projections themselves must be called.

        They must be if one is quantised, wrapped by an adapter, observed by a hook, replicated, or
        offloaded, so that its weight is loaded only when it is called.
        """
        projections = [getattr(self, name) for name in self.names.projections]
        return _has_any_global_hook() or any(_watched(p) for p in projections)

    def _parts(self, ffn: DenseFFN) -> Iterable[DenseFFN]:
        """Return each petal as a block of its own."""
        return ffn.neurons(self.backbone, ffn.width).split(self.petals)

    def _by_neuron(self, on_TR: Tensor, width: int) -> Tensor:
        """Repeat values of experts (T, R) for their neurons (T, M)."""
        return by_neuron(on_TR, self.backbone, self.petals)

    def extra_repr(self) -> str:
        return f"backbone={self.backbone}, petals={self.petals}, top_k={self.top_k}"


def _watched(module: nn.Module) -> bool:
    """Return True if a call of the module does more than multiply with its own weight.

    Hooks are found as torch itself does; accelerate replaces ``forward`` in the module's own
    dictionary.
    """
    return (
        type(module) is not nn.Linear
        or type(module._parameters.get("weight")) not in (nn.Parameter, Tensor)
        or "forward" in module.__dict__
        or bool(module._forward_hooks or module._forward_pre_hooks)
        or bool(module._backward_hooks or module._backward_pre_hooks)
    )


def put_carved(
    layer: nn.Module, arch: Arch, header: Values, kind: type[CarvedFFN] = CarvedFFN
) -> None:
    """Replace a decoder layer's FFN by an empty carved one (weights on the meta device) of the
    shape in the header of a :class:`CarvedLayer`."""
    ffn, names = arch.ffn_of(layer), arch.ffn
    hidden_size, width = weight_of(ffn, names.down).shape
    if not kind.shares:
        width = header["backbone"] + sum(header["petals"])
    phase = Phase.of(layer) if header.get("prompts") == "dense" else None
    rows = width * (2 if names.fused else 1)
    projections: dict[str, nn.Module] = {}
    with torch.device("meta"):
        for name in names.projections:
            old = getattr(ffn, name)
            ins, outs = (width, hidden_size) if name == names.down else (hidden_size, rows)
            options = {"bias": old.bias is not None, "dtype": old.weight.dtype}
            projections[name] = nn.Linear(ins, outs, **options)
        carved = kind(
            projections,
            act_of(ffn, names),
            names,
            hidden_size,
            header["backbone"],
            header["petals"],
            header["top_k"],
            header["routing"],
            header.get("gate"),
            phase,
            RunningTokens.of(layer) if header["routing"] in DRAWING else None,
        )
    put(layer, arch.ffn_path, carved)


# --- plan ----------------------------------------------------------------------------------------


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
            raise ValueError(f"routing {quote(self.routing)} is unknown")
        if self.order_M.unique().numel() != width:
            raise ValueError("a neuron is placed twice")
        if not 0 <= self.top_k <= len(self.petals):
            raise ValueError(f"top_k {self.top_k} of {len(self.petals)} experts")
        if (self.router_RD is None) != (not self.petals):
            raise ValueError("a router is needed for experts, and only for experts")
        if self.prompts not in PROMPTS:
            raise ValueError(f"prompts {quote(self.prompts)} is none of {', '.join(PROMPTS)}")
        if self.routing in WEIGHING and len(set(self.petals)) > 1:
            raise ValueError("experts that are weighed are of one size")

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
        put_carved(layers[index], arch, header)

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
        running = ffn.top_k * sum(ffn.petals) / experts if experts else 0  # MoRE, App. F.2
        return replace(
            use,
            kind=cls.kind,
            active_width=ffn.backbone + running,
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
            return "No native format routes only at decoding: carve with prompts=petals."
        if header["petals"] and header["routing"] not in ("cosine", "linear"):
            return f"Routing by {header['routing']!r} has no native form yet."
        return None

    @classmethod
    def exporter(cls, header: Header) -> Callable[..., Any] | None:
        from moesaic.carving.as_experts import as_experts

        return as_experts if header.get("petals") else None

    # --- refit -----------------------------------------------------------------------------------

    def refit(self, site: LayerTokens[DenseFFN]) -> tuple[CarvedLayer, JSON]:
        """Solve for a new down projection.

        Features are h~, the input of the down projection, masked or weighed by the layer's own
        router.
        """
        order_M = self.order_M.to(site.view.device)
        down_DM, figures = refitted_down(site, order_M, self.running(site))
        return replace(self, down_DM=down_DM), figures

    def refit_bytes(self, view: FFN, hidden: int, tokens: int) -> int:
        return Ridge.bytes(len(self.order_M), hidden)

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
