"""Experts that share weights: index lists into a dense FFN, and attention with fewer dimensions.

ToMoE, Secs. 3.2 and 3.3. The attention module is the base's own, with its own names and plain
linear projections, of which rows or columns may be removed. These are filled with zeros in the
activations, so that any attention kernel, cache and position embedding works as before.

Shape suffixes: N experts, W neurons of an expert, D hidden size, A size of a head, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch, AttentionNames, LayerUse, RoutedModule, weight_of
from moesaic.carving.carved_layer import CarvedFFN, CarvedLayer, put_carved
from moesaic.errors import MoesaicError, quote
from moesaic.modules.running import RunningTokens, gumbel
from moesaic.plans.base import Description, Header, LayerPlan, Sizes, State, check_numbers
from moesaic.plans.neurons import narrow_linear, of_ffn
from moesaic.types import JSON, Values


class OverlappingFFN(CarvedFFN):
    """Carved FFN without a backbone whose petals may share neurons (ToMoE, Eqs. 12-13).

    The weights are the base's own, in the base's order: the dense block runs, and is masked
    (Eq. 17).
    """

    experts: Tensor
    shares = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shape = len(self.petals), self.petals[0]
        self.register_buffer("experts", torch.empty(shape, dtype=torch.int64))

    def _worth_moving(self, x_TD: Tensor, on_TR: Tensor) -> bool:
        return False

    def _by_neuron(self, on_TR: Tensor, width: int) -> Tensor:
        on_RM = torch.zeros(len(self.petals), width, device=on_TR.device)
        return on_TR @ on_RM.scatter_(1, self.experts, 1)


# --- attention -----------------------------------------------------------------------------------


def spread(x: Tensor, kept: Tensor, size: int) -> Tensor:
    """Place x (..., kept) at its indices among ``size``, zeros elsewhere.

    >>> spread(torch.tensor([5, 6]), torch.tensor([0, 2]), 4)
    tensor([5, 0, 6, 0])
    """
    return x.new_zeros(*x.shape[:-1], size).index_copy(-1, kept, x)


def _over_heads(x: Tensor, mask: Tensor, start: int = 0) -> Tensor:
    """Multiply each head of x (..., heads times A) from ``start`` on by a mask (..., A)."""
    rest = x[..., start:]
    masked = rest.unflatten(-1, (-1, mask.shape[-1])) * mask.unsqueeze(-2)
    return torch.cat([x[..., :start], masked.flatten(-2)], -1) if start else masked.flatten(-2)


class HeadRouter(nn.Module):
    """Router that chooses for each token the ``top_k`` dimensions of a head, the same for all
    heads.

    Args:
        hidden_size: D.
        embedding: E.
        head_dim: A.
        top_k: dimensions that a token uses.
        passage: the tokens that run, whose Gumbel noise is added to the logits; None for no noise.
    """

    def __init__(
        self,
        hidden_size: int,
        embedding: int,
        head_dim: int,
        top_k: int,
        passage: RunningTokens | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.passage = top_k, passage
        self.embed = nn.Parameter(torch.empty(embedding, hidden_size, dtype=torch.float32))
        self.shift = nn.Parameter(torch.empty(embedding, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(embedding, dtype=torch.float32))
        self.offset = nn.Parameter(torch.empty(embedding, dtype=torch.float32))
        self.project = nn.Parameter(torch.empty(head_dim, embedding, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return the choice for each token (..., A), ones and zeros (Eq. 5 with top-K)."""
        z = F.linear(x.float(), self.embed.float(), self.shift.float())
        z = F.layer_norm(z, z.shape[-1:], self.scale.float(), self.offset.float())
        logits = F.linear(F.gelu(z), self.project.float())
        if self.passage is not None:  # other random numbers than those of the layer's FFN
            rows, columns = logits.flatten(0, -2).shape
            noise = gumbel(self.passage.uniform(rows, columns, logits.device, stream=1))
            logits = logits + noise.view_as(logits)
        chosen = logits.topk(self.top_k, dim=-1).indices
        return torch.zeros_like(logits).scatter_(-1, chosen, 1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"top-{self.top_k} of {self.project.shape[0]}"


class PartialAttention(nn.Module):
    """Child module of an attention module whose hooks mask its projections.

    Removed rows become zeros. Values are masked by their own token's choice, and the input of the
    output projection by the query's.

    Args:
        sizes: outputs of each projection before.
        header: header of an :class:`~moesaic.carving.overlapping_layer.OverlappingLayer`.
        hidden_size: D.
        head_dim: A.
        value_start: the first row of the values in their projection.
        outputs: inputs of the output projection before.
        passage: the tokens that run, if choices are random.
    """

    def __init__(
        self,
        names: AttentionNames,
        sizes: Mapping[str, int],
        header: Values,
        hidden_size: int,
        head_dim: int,
        value_start: int,
        outputs: int,
        passage: RunningTokens | None = None,
    ) -> None:
        super().__init__()
        self.names, self.sizes = names, dict(sizes)
        self.value_start, self.outputs = value_start, outputs
        self.mask: Tensor | None = None
        self._watched: dict[int, str] = {}
        # index lists are not in the router, whose tensors are kept in float32
        for name, count in header["rows"].items():
            self.register_buffer(f"rows_{name}", torch.empty(count, dtype=torch.int64))
        top_k, embedding = header["head_top_k"], header["embedding"]
        size = hidden_size, embedding, head_dim, top_k
        self.router = HeadRouter(*size, passage) if top_k else None

    def watch(self, attention: nn.Module) -> None:
        """Register the hooks on an attention module."""
        attention.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, attention: nn.Module, args: tuple[Tensor, ...], kwargs: Values) -> None:
        if self.router is not None:
            self.mask = self.router(
                kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            )
        # adapters and quantisers put other modules in the projections' places: follow them
        self._watched = {}
        for name in self.names.projections:
            projection = getattr(attention, name)
            self._watched[id(projection)] = name
            if name == self.names.o:
                if self._reads not in projection._forward_pre_hooks.values():
                    projection.register_forward_pre_hook(self._reads)
            elif self._writes not in projection._forward_hooks.values():
                projection.register_forward_hook(self._writes)

    def _writes(self, projection: nn.Module, args: object, out: Tensor) -> Tensor:
        name = self._watched.get(id(projection))
        if name is None:
            return out
        rows = getattr(self, f"rows_{name}", None)
        if rows is not None:
            out = spread(out, rows, self.sizes[name])
        if self.mask is not None and name == self.names.v:
            out = _over_heads(out, self.mask, self.value_start)
        return out

    def _reads(self, projection: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        if self.mask is None or id(projection) not in self._watched:
            return args
        return (_over_heads(args[0], self.mask),)


# --- plan ----------------------------------------------------------------------------------------


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
            "routing": "gumbel" if self.noise else "cosine",
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
                raise ValueError(f"attention has no {quote(projection, 40)}")
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
            put_carved(layer, arch, header, CarvedFFN if header["materialized"] else OverlappingFFN)
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
            return "Random routers have no native form; carve with published=false for one."
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
            f"{projection} of {arch.model_type} must keep all rows: {norm} takes the mean over "
            f"{span} of them."
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
