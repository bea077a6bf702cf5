"""Experts that share weights: index lists into a dense FFN, and attention with fewer dimensions.

Shape suffixes: N experts, W neurons of an expert, D hidden size, A size of a head, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch, LayerUse, RoutedModule, act_of, put, weight_of
from moesaic.carving.carved_ffn import CarvedFFN, carved_like, projections_like
from moesaic.carving.carved_layer import CarvedLayer
from moesaic.carving.heads import PartialAttention
from moesaic.carving.overlapping_ffn import OverlappingFFN
from moesaic.carving.routers import DRAWING
from moesaic.errors import MoesaicError, shown
from moesaic.modules.running import RunningTokens
from moesaic.plans.base import Description, Header, LayerPlan, Sizes, State, check_numbers
from moesaic.plans.neurons import narrow_linear, of_ffn
from moesaic.types import JSON

EMBED, SHIFT, SCALE, OFFSET, PROJECT = "embed", "shift", "scale", "offset", "project"
_HEAD_ROUTER = (EMBED, SHIFT, SCALE, OFFSET, PROJECT)
"""Names of the tensors of the router over head dimensions, in the order in which they are used."""
ROUTER, PARTIAL = "router", "partial"
MOST = 64
"""Most experts: each may be a copy."""


@dataclass(frozen=True)
class OverlappingLayer(LayerPlan):
    """Plan of an FFN of which a token runs one expert, and attention of which it uses some
    dimensions.

    Either may be unchanged. Weights are the base's own.
    """

    kind: ClassVar[str] = "overlapping"
    held: ClassVar[Mapping[str, str]] = {"experts": "experts_NW", "router": "router_ND"}

    experts_NW: Tensor | None = None
    """Neurons of each expert, in rising order, int64."""
    router_ND: Tensor | None = None
    """Weight of the router, one row per expert, float32."""
    materialized: bool = False
    """True if each expert holds a copy of its weights."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Kept rows by attention projection, int64; its other outputs are zero."""
    head_router: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by the names in _HEAD_ROUTER, float32: (E, D), (E,), (E,), (E,), (A, E)."""
    head_top_k: int = 0
    """Dimensions of a head that a token uses of values and outputs; 0 for all."""
    noise: bool = False
    """True if routers add Gumbel noise to their logits."""

    def __post_init__(self) -> None:
        if (self.experts_NW is None) != (self.router_ND is None):
            raise ValueError("experts and their router come together")
        if set(self.head_router) != (set(_HEAD_ROUTER) if self.head_top_k else set()):
            raise ValueError("head_top_k and a router of head dimensions come together")

    def header(self) -> JSON:
        count, width = (0, 0) if self.experts_NW is None else self.experts_NW.shape
        return {
            "kind": self.kind,
            "backbone": 0,
            "petals": [width] * count,
            "top_k": 1,
            "routing": "tossed" if self.noise else "cosine",
            "materialized": self.materialized,
            "rows": {name: rows.numel() for name, rows in self.rows.items()},
            "head_top_k": self.head_top_k,
            "embedding": self.head_router[SHIFT].numel() if self.head_top_k else 0,
            **({"noise": True} if self.noise else {}),
        }

    def tensors(self) -> dict[str, Tensor]:
        return {
            **super().tensors(),
            **{f"rows.{name}": rows for name, rows in self.rows.items()},
            **{f"head.{name}": tensor for name, tensor in self.head_router.items()},
        }

    @classmethod
    def load(cls, header: Header, tensors: Mapping[str, Tensor]) -> OverlappingLayer:
        def part(start: str) -> dict[str, Tensor]:
            return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}

        return cls(
            materialized=header["materialized"],
            rows=part("rows."),
            head_router=part("head."),
            head_top_k=header["head_top_k"],
            noise=header.get("noise", False),
            **cls.fields_of(tensors),
        )

    def check(self, sizes: Sizes) -> None:
        check_numbers("neurons", self.experts_NW, sizes.width, lists=MOST)
        for name, rows in self.rows.items():
            check_numbers(f"rows of {name}", rows, None)

    # --- put to use ------------------------------------------------------------------------------

    def sources(self, arch: Arch) -> tuple[str, ...]:
        attention = (f"{arch.attention_path}.",) if _cuts_attention(self.header()) else ()
        return (f"{arch.ffn_path}.", *attention)

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's own values, index lists and routers."""
        ffn, attention = f"{arch.ffn_path}.", f"{arch.attention_path}."
        tensors = {stored: state.read(stored) for stored, _ in state.stored(*self.sources(arch))}
        device = next(iter(tensors.values())).device
        for projection, rows in self.rows.items():
            if projection not in arch.attention.projections:
                raise ValueError(f"attention has no {shown(projection, 40)}")
            _check_norm(arch, state, projection, rows)
            for name in (f"{attention}{projection}.{part}" for part in ("weight", "bias")):
                if name in tensors:
                    tensors[name] = tensors[name].index_select(0, rows.to(device))
        tensors |= {f"{attention}{PARTIAL}.rows_{name}": rows for name, rows in self.rows.items()}
        tensors |= {
            f"{attention}{PARTIAL}.{ROUTER}.{name}": t for name, t in self.head_router.items()
        }
        if self.experts_NW is not None and self.router_ND is not None:
            tensors[f"{ffn}{ROUTER}.weight"] = self.router_ND
            if self.materialized:  # every expert's neurons one after another
                tensors |= of_ffn(arch, state, self.experts_NW.flatten())
            else:
                tensors[f"{ffn}experts"] = self.experts_NW
        for name, tensor in tensors.items():
            yield name, tensor.to(device).contiguous()

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        layer = layers[index]
        if header["petals"]:
            put(layer, arch.ffn_path, _ffn_like(layer, arch, header))
        if _cuts_attention(header):
            _install_attention(layer, arch, header)

    # --- words -----------------------------------------------------------------------------------

    def describe(self, experts: int) -> Description:
        header = self.header()
        parts = []
        if header["petals"]:
            width, count = header["petals"][0], len(header["petals"])
            shared = "with weights of their own" if self.materialized else "that share weights"
            parts.append(f"one of {count} experts of {width:,} neurons {shared}")
        if _cuts_attention(header):
            parts.append("attention of fewer dimensions")
        shape = {k: header[k] for k in ("petals", "materialized", "rows", "head_top_k")}
        return Description(", ".join(parts), shape)

    @classmethod
    def use(cls, layer: nn.Module, arch: Arch, header: Header, width: int) -> LayerUse:
        ffn = arch.ffn_of(layer)
        carved = isinstance(ffn, CarvedFFN)
        use = CarvedLayer.use(layer, arch, header, width) if carved else arch.use(layer)
        attention = arch.attention_of(layer)
        partial = getattr(attention, PARTIAL, None)
        use = replace(use, kind=cls.kind)
        if not isinstance(partial, PartialAttention):
            return use
        dropped, idle, names = use.dropped, 0.0, arch.attention
        for name in names.projections:
            weight = weight_of(attention, name)
            rows, columns = weight.shape
            full = rows * partial.outputs if name == names.o else columns * partial.sizes[name]
            dropped += full - weight.numel()
        if partial.router is not None:
            v, o = (weight_of(attention, name) for name in (names.v, names.o))
            routed = v.shape[1] * (partial.sizes[names.v] - partial.value_start) + o.numel()
            idle = routed * (1 - partial.router.top_k / partial.router.project.shape[0])
        return replace(
            use,
            router=use.router + sum(p.numel() for p in partial.parameters()),
            dropped=dropped,
            active_attention=1 - idle / use.attention,
        )

    @classmethod
    def exporter(cls, header: Header) -> Callable[..., Any] | None:
        return CarvedLayer.exporter(header)

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        if _cuts_attention(header) or not header["materialized"]:
            return (
                "Overlapping experts and partial attention have no native form; carve with "
                "materialize and attention=none for one."
            )
        if header.get("noise", False):
            return "Routers that toss have no native form; carve with published=false for one."
        return None

    @classmethod
    def routed(cls, layer: nn.Module, arch: Arch, header: Header) -> RoutedModule | None:
        return CarvedLayer.routed(layer, arch, header) if header["petals"] else None


def _cuts_attention(header: Header) -> bool:
    return bool(header["rows"] or header["head_top_k"])


def _check_norm(arch: Arch, state: State, projection: str, rows: Tensor) -> None:
    """Refuse to remove queries or keys if a norm after the projection needs every row.

    Raises:
        MoesaicError: only some of the dimensions that are normalised together would be removed.
    """
    names = arch.attention
    norm = {names.q: names.q_norm, names.k: names.k_norm}.get(projection)
    weight = f"{arch.attention_path}.{norm}.weight"
    if norm is None or weight not in state:
        return
    span = state[weight].numel()
    kept = torch.bincount(rows // span)
    if not set(kept.tolist()) <= {0, span}:
        raise MoesaicError(
            f"{projection} of {arch.model_type} cannot lose rows: {norm} takes the mean over "
            f"{span} of them."
        )


def _ffn_like(layer: nn.Module, arch: Arch, header: Header) -> CarvedFFN:
    ffn = arch.ffn_of(layer)
    if header["materialized"]:
        return carved_like(ffn, arch.ffn, header, layer)
    hidden_size, full = weight_of(ffn, arch.ffn.down).shape
    with torch.device("meta"):
        return OverlappingFFN(
            projections_like(ffn, arch.ffn, full),
            act_of(ffn, arch.ffn),
            arch.ffn,
            hidden_size,
            len(header["petals"]),
            header["petals"][0],
            header["routing"],
            RunningTokens.of(layer) if header["routing"] in DRAWING else None,
        )


def _install_attention(layer: nn.Module, arch: Arch, header: Header) -> None:
    names, attention = arch.attention, arch.attention_of(layer)
    passage = RunningTokens.of(layer) if header.get("noise") else None
    old: dict[str, nn.Linear] = {name: getattr(attention, name) for name in names.projections}
    values, size = old[names.v].weight.shape[0], int(getattr(attention, "head_dim"))  # noqa: B009
    read = old[names.o].weight.shape[1]
    start = read + (values - read) // 2 if names.fused else 0
    hidden_size = old[names.q].weight.shape[1]
    sizes = {name: module.weight.shape[0] for name, module in old.items()}
    with torch.device("meta"):
        partial = PartialAttention(names, sizes, header, hidden_size, size, start, read, passage)
    for name, count in header["rows"].items():
        narrow_linear(old[name], 0, count)
    attention.add_module(PARTIAL, partial)
    partial.watch(attention)
