"""Dense architectures: an :class:`Arch` holds the paths of their parts.

Methods never name an architecture. They see a *view*, :class:`DenseFFN`, whose tensors are the
module's own (no copies). The parameters of a decoder layer, a :class:`LayerUse`, are counted one
way for all kinds.

Shape suffixes: T tokens, D hidden size, M intermediate size.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.arch.routing import FixedOutput, shallow_copy
from moesaic.errors import MoesaicError
from moesaic.types import JSON, Config

if TYPE_CHECKING:
    from moesaic.arch.mixture import MoEFFN


@dataclass(frozen=True)
class LayerUse:
    """Projection weights of one decoder layer, and how many of them a token uses.

    Only linear projections of attention and FFN are counted; norms and biases are left out, and
    routers are counted apart.
    """

    kind: str
    """``dense``, ``moe``, or a layer kind's name."""
    width: int
    """Intermediate size of the whole layer as stored; for a mixture, of all its experts."""
    active_width: float
    """Neurons that a token runs."""
    attention: int
    """Weights of attention's projections."""
    ffn: int
    """Weights of the FFN's projections."""
    experts: int = 0
    """Routed experts; 0 if the layer does not route."""
    top_k: int = 0
    """Routed experts that a token runs."""
    expert_width: int = 0
    """Neurons of one routed expert if all are equal, else 0."""
    router: int = 0
    """Weights of routers."""
    dropped: int = 0
    """Projection weights of the original that this layer does not have."""
    copied: int = 0
    """FFN weights beyond the original's: copies, if experts overlap."""
    active_attention: float = 1.0
    """Share of attention's stored projections that a token uses."""

    @property
    def stored(self) -> int:
        """Projection weights of the layer."""
        return self.attention + self.ffn

    @property
    def active(self) -> float:
        """Projection weights that a token uses."""
        return self.attention * self.active_attention + self.active_ffn

    @property
    def active_ffn(self) -> float:
        """Weights of the FFN that a token uses."""
        return self.ffn * self.active_width / self.width if self.width else 0.0


@dataclass(frozen=True)
class RoutedModule:
    """Module that chooses a token's experts, and the sizes it chooses from."""

    router: nn.Module
    shared: int
    """Neurons that every token runs besides the chosen experts."""
    experts: tuple[int, ...]
    """Neurons of each expert."""


@dataclass(frozen=True)
class FFNNames:
    """Attribute names inside a feed-forward module.

    ``gate=None`` means not gated. ``gate == up`` means one fused projection, gate rows first.
    """

    up: str = "up_proj"
    down: str = "down_proj"
    gate: str | None = "gate_proj"
    act: str = "act_fn"
    custom_act: bool = False
    """True if h is not act(gate) * up, but computed by the module's own code."""

    @property
    def fused(self) -> bool:
        return self.gate == self.up

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the linear submodules, each once."""
        return tuple(dict.fromkeys(n for n in (self.gate, self.up, self.down) if n))

    @property
    def apart(self) -> tuple[str, str, str]:
        """Names of gate, up and down; the usual ones if these are not three."""
        if self.gate is None or self.fused:
            return "gate_proj", "up_proj", "down_proj"
        return self.gate, self.up, self.down


@dataclass(frozen=True)
class AttentionNames:
    """Attribute names inside an attention module. ``q == k == v`` means one fused projection."""

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    """Norms of queries and keys, after their projections; not every attention has them."""

    @property
    def fused(self) -> bool:
        return self.q == self.v

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the linear submodules, each once."""
        return tuple(dict.fromkeys((self.q, self.k, self.v, self.o)))


@dataclass(frozen=True)
class Arch:
    """Paths and names of one architecture's decoder layers, attention and FFN."""

    model_type: str
    ffn: FFNNames = FFNNames()
    ffn_path: str = "mlp"
    layers_path: str = "model.layers"
    attention: AttentionNames = AttentionNames()
    attention_path: str = "self_attn"
    width: str = "intermediate_size"
    """Config attribute that holds the width of an FFN."""
    times: int = 1
    """Factor between that attribute's value and the width."""
    adjusted: str | None = None
    """Config attribute that, if true, makes the model compute the width from ``width``; if false,
    ``width`` is the width itself."""

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """Return the decoder layers of a causal language model."""
        return attrgetter(self.layers_path)(model)

    def ffn_of(self, layer: nn.Module) -> nn.Module:
        """Return the feed-forward module of one decoder layer."""
        return layer.get_submodule(self.ffn_path)

    @property
    def inside(self) -> str:
        """Prefix of the names of the FFN's tensors in their layer."""
        return f"{self.ffn_path}."

    @property
    def starts(self) -> tuple[str, ...]:
        """Prefixes of the names, in their layer, of all tensors of the FFN."""
        return (self.inside,)

    def attention_of(self, layer: nn.Module) -> nn.Module:
        """Return the attention module of one decoder layer."""
        return layer.get_submodule(self.attention_path)

    def heads(self, layer: nn.Module, config: Config) -> Heads:
        """Return how a dense model's attention is divided into heads.

        Raises:
            MoesaicError: the attention has no plain heads, or its positions are not rotary.
        """
        names, kind = self.attention, config.model_type
        try:
            attention = self.attention_of(layer)
            size = int(getattr(attention, "head_dim"))  # noqa: B009
            count = weight_of(attention, names.o).shape[1] // size
            rows = weight_of(attention, names.k).shape[0] // size
            norm = getattr(attention, names.q_norm, None)
            span = 0 if norm is None else norm.weight.numel()
        except AttributeError as error:
            raise MoesaicError(
                f"Not every layer of {kind} has attention that can be cut by heads: carve with "
                "method=more."
            ) from error
        keys = (rows - count) // 2 if names.fused else rows
        if names.q == "query_key_value" and keys > 1:
            raise MoesaicError(
                f"{names.q} of this {kind} has queries, keys and values head by head, not one "
                "after the other, and cannot be cut: carve with method=more."
            )
        rope = getattr(config, "rope_parameters", None)
        if not rope:
            raise MoesaicError(f"{kind} has no rotary position embedding here.")
        rotary = int(size * rope.get("partial_rotary_factor", 1.0))
        return Heads(count, keys, size, rotary, span)

    def attention_size(self, layer: nn.Module) -> int:
        """Return the number of weights in linear projections outside the FFN, biases left out."""
        parts = (attrgetter(path)(layer) for path in self.replaced_paths)
        return linear_size(layer) - sum(linear_size(part) for part in parts if part is not None)

    def dense(self, layer: nn.Module) -> DenseFFN:
        """Return the view of a dense decoder layer's FFN."""
        return dense_ffn(self.ffn_of(layer), self.ffn)

    def view(self, layer: nn.Module) -> DenseFFN | MoEFFN:
        """Return the view of any decoder layer's FFN."""
        return self.dense(layer)

    def experts_in(self, layer: nn.Module) -> int:
        """Return the number of a decoder layer's routed experts; 0 if it does not route."""
        return 0

    def width_of(self, layer: nn.Module) -> int:
        """Return the intermediate size of a decoder layer, or of one expert if it routes."""
        return weight_of(self.ffn_of(layer), self.ffn.down).shape[1]

    def use(self, layer: nn.Module) -> LayerUse:
        """Return the parameters of an unconverted decoder layer, and those that a token uses."""
        ffn = self.ffn_of(layer)
        width = self.width_of(layer)
        stored = sum(weight_of(ffn, name).numel() for name in self.ffn.projections)
        return LayerUse("dense", width, width, self.attention_size(layer), stored)

    def routed(self, layer: nn.Module) -> RoutedModule | None:
        """Return a decoder layer's router and its experts' sizes; None if it does not route."""
        return None

    def act_of(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the activation function of a decoder layer's FFN."""
        return act_of(self.ffn_of(layer), self.ffn)

    def enter(self, ffn: nn.Module, show: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``show`` with the input of an FFN (..., D) whenever it runs."""
        return ffn.register_forward_pre_hook(lambda _, args: show(args[0]))

    def handing(
        self, ffn: nn.Module, arguments: JSON, tokens: Callable[[Tensor], Tensor]
    ) -> AbstractContextManager[None]:
        """Return a context in which an FFN is given a batch's arguments for its router.

        Args:
            ffn: the FFN of a decoder layer.
            arguments: the layer's arguments besides hidden states.
            tokens: function from a value per token (B, L) to those of real tokens (T,).
        """
        return nullcontext()

    def watch(self, ffn: nn.Module, show: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``show`` with the sum of an FFN's parts (..., D), before any norm, when it runs."""
        return ffn.register_forward_hook(
            lambda _, args, out: show(out[0] if isinstance(out, tuple) else out)
        )

    def with_experts(self, count: int) -> JSON:
        """Return the config attributes with which every routed layer has this many experts."""
        return {}

    def with_width(self, width: int) -> JSON:
        """Return the config attributes that give every FFN, or routed expert, this width."""
        plainly = {} if self.adjusted is None else {self.adjusted: False}
        return {self.width: self.times * width, **plainly}

    def with_shared(self, shared: int, width: int) -> JSON | None:
        """Return the config attributes that give a shared path a width; None without any."""
        return None

    def dense_at(self, config: Config, layers: Collection[int]) -> JSON | None:
        """Return the config attributes that make exactly these layers dense; None without any."""
        return None

    @property
    def replaced_paths(self) -> tuple[str, ...]:
        """Paths of the modules of a decoder layer that together are its FFN."""
        return (self.ffn_path,)

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of weights with a column per hidden dimension; an FFN has at least one."""
        return (f"{self.inside}{self.ffn.up}.weight",)

    def layer_prefix(self, index: int) -> str:
        """Return the prefix of the names of layer ``index``'s tensors on disk."""
        return f"{self.layers_path}.{index}."

    def ffn_prefix(self, index: int) -> str:
        """Return the prefix of the names of layer ``index``'s FFN tensors on disk."""
        return f"{self.layer_prefix(index)}{self.inside}"


def linear_size(module: nn.Module) -> int:
    """Return the number of weights in all linear modules inside a module, biases left out."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def weight_of(module: nn.Module, name: str) -> Tensor:
    """Return the weight of a linear submodule."""
    return getattr(module, name).weight


def act_of(module: nn.Module, names: FFNNames) -> Callable[..., Tensor]:
    """Return the activation function of a feed-forward module; a custom one takes gates and ups."""
    act: Callable[..., Tensor] | None = getattr(module, names.act, None)
    return CustomAct(module, names) if names.custom_act or act is None else act


class CustomAct:
    """Function from gates and ups to h: the code of a gated FFN without its projections.

    Args:
        module: the FFN; its weights are not used.
        names: its projections.
    """

    def __init__(self, module: nn.Module, names: FFNNames) -> None:
        self._twin, self._names = shallow_copy(module), names
        self._twin._modules |= dict.fromkeys(names.projections, nn.Identity())

    def __call__(self, gate_TM: Tensor, up_TM: Tensor | None = None) -> Tensor:
        """Return h (T, M).

        Args:
            gate_TM: gates.
            up_TM: ups; None for ones.
        """
        names, twin = self._names, shallow_copy(self._twin)
        up_TM = torch.ones_like(gate_TM) if up_TM is None else up_TM
        if names.fused:
            twin._modules[names.up] = FixedOutput(torch.cat([gate_TM, up_TM], -1))
        else:
            twin._modules |= {names.gate or "": FixedOutput(gate_TM), names.up: FixedOutput(up_TM)}
        h_TM: Tensor = type(twin).forward(twin, up_TM)
        return h_TM


def put(layer: nn.Module, path: str, module: nn.Module | None) -> None:
    """Replace the module at a path of a decoder layer."""
    owner, _, leaf = path.rpartition(".")
    setattr(attrgetter(owner)(layer) if owner else layer, leaf, module)


@cache
def returns_tuple(forward: Callable[..., object]) -> bool:
    """Return True if a module returns a tuple: more than hidden states."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return any(isinstance(value, ast.Tuple) for value in returns)


PREFIX = "moesaic_"
"""Prefix of a converted checkpoint's model_type; the base's follows."""


@dataclass(frozen=True)
class Heads:
    """Division of attention into query heads and key and value heads, and their size."""

    queries: int
    keys: int
    size: int
    rotary: int
    """Leading dimensions of a head to which RoPE applies, the first half paired with the second."""
    norm: int = 0
    """Dimensions of queries that are normalised together, and so are all needed: of a head, or of
    all; 0 without a norm."""

    @property
    def free(self) -> int:
        """Number of dimensions of queries and keys that can be chosen: RoPE pairs, and those
        without RoPE.

        0 if a norm needs all.
        """
        return 0 if self.norm else self.rotary // 2 + self.size - self.rotary

    def paired(self, chosen: Tensor) -> Tensor:
        """Expand a choice among free dimensions (..., free) to all of a head (..., size).

        Dimensions that cannot be chosen are all on.

        >>> Heads(1, 1, 6, 4).paired(torch.tensor([1, 2, 3, 4]))
        tensor([1, 2, 1, 2, 3, 4])
        """
        if self.norm:
            return chosen.new_ones(*chosen.shape[:-1], self.size)
        pairs = chosen[..., : self.rotary // 2]
        return torch.cat([pairs, pairs, chosen[..., self.rotary // 2 :]], -1)


@dataclass(frozen=True)
class DenseFFN:
    """Feed-forward block as three matrices: ``y = act(x Wg^T) * (x Wu^T) Wd^T``.

    ``gate_MD`` is None for a block that is not gated: ``y = act(x Wu^T) Wd^T``.
    Row ``j`` of gate and up, and column ``j`` of down, are neuron ``j``.
    """

    up_MD: Tensor
    down_DM: Tensor
    gate_MD: Tensor | None
    act: Callable[..., Tensor]
    up_bias_M: Tensor | None = None
    gate_bias_M: Tensor | None = None
    down_bias_D: Tensor | None = None
    custom_act: bool = False
    """True if ``act`` takes gates and ups, and returns h."""

    @property
    def width(self) -> int:
        """Neurons of the block."""
        return self.up_MD.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.up_MD.device

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        return self.gate_bias_M, self.up_bias_M, self.down_bias_D

    def hidden(self, x_TD: Tensor) -> Tensor:
        """Return the input of the down projection, h (T, M)."""
        up_TM = F.linear(x_TD, self.up_MD, self.up_bias_M)
        if self.gate_MD is None:
            return self.act(up_TM)
        gate_TM = F.linear(x_TD, self.gate_MD, self.gate_bias_M)
        return self.act(gate_TM, up_TM) if self.custom_act else self.act(gate_TM) * up_TM

    count: ClassVar[int] = 1
    top_k: ClassVar[int] = 1
    """Numbers of a block seen as one expert that every token runs."""

    def weights_of(self, i: int) -> tuple[Tensor, ...]:
        """Return gate (M, D) if there is one, up (M, D) and down (D, M), as views."""
        gate = () if self.gate_MD is None else (self.gate_MD,)
        return (*gate, self.up_MD, self.down_DM)

    def weighted(
        self,
        x_TD: Tensor,
        allowed_E: Tensor | None = None,
        experts: Container[int] | None = None,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the single expert: 0, all tokens' rows (T,) and h (T, M), float32."""
        yield 0, torch.arange(len(x_TD), device=x_TD.device), self.hidden(x_TD).float()

    def weighed_beside(self, x_TD: Tensor, allowed_E: Tensor | None = None) -> float:
        """Return 0: a dense block has no weighted output biases; its own bias is constant."""
        return 0.0

    @property
    def shared_ffn(self) -> None:
        """Shared path of the block: None, as dense blocks have none."""

    def shared_weighted(self, x_TD: Tensor, allowed_E: Tensor | None = None) -> None:
        """Return None: a dense block has no shared path."""

    def output(self, h_TM: Tensor) -> Tensor:
        """Return the block's output (T, D) for hidden activations h."""
        return F.linear(h_TM, self.down_DM, self.down_bias_D)

    def neurons(self, start: int, stop: int) -> DenseFFN:
        """Return neurons ``start`` to ``stop`` as a block: views, and no output bias."""
        own = slice(start, stop)
        gate, up_bias, gate_bias = (
            None if tensor is None else tensor[own]
            for tensor in (self.gate_MD, self.up_bias_M, self.gate_bias_M)
        )
        return DenseFFN(self.up_MD[own], self.down_DM[:, own], gate, self.act, up_bias, gate_bias)

    def split(self, sizes: Sequence[int]) -> list[DenseFFN]:
        """Split all neurons into blocks of these sizes, faster than by :meth:`neurons`."""

        def rows(tensor: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(sizes) if tensor is None else tensor.split(sizes)

        up, down = self.up_MD.split(sizes), self.down_DM.split(sizes, dim=1)
        rest = rows(self.gate_MD), rows(self.up_bias_M), rows(self.gate_bias_M)
        parts = zip(up, down, *rest, strict=True)
        return [DenseFFN(u, d, g, self.act, ub, gb) for u, d, g, ub, gb in parts]


def dense_ffn(module: nn.Module, names: FFNNames) -> DenseFFN:
    """Return the view of a feed-forward module; its tensors share the module's storage."""
    projections = {name: getattr(module, name) for name in names.projections}
    return assembled_ffn(
        names,
        {name: p.weight for name, p in projections.items()},
        {name: p.bias for name, p in projections.items()},
        act_of(module, names),
    )


def assembled_ffn(
    names: FFNNames,
    weights: Mapping[str, Tensor],
    biases: Mapping[str, Tensor | None],
    act: Callable[..., Tensor],
) -> DenseFFN:
    """Return a block made of its projections' tensors by name."""
    up_MD, up_bias = weights[names.up], biases.get(names.up)
    if names.gate is None:
        gate_MD, gate_bias = None, None
    elif names.fused:
        gate_MD, up_MD = up_MD.chunk(2)
        gate_bias, up_bias = (None, None) if up_bias is None else up_bias.chunk(2)
    else:
        gate_MD, gate_bias = weights[names.gate], biases.get(names.gate)
    down_DM, down_bias = weights[names.down], biases.get(names.down)
    return DenseFFN(up_MD, down_DM, gate_MD, act, up_bias, gate_bias, down_bias, names.custom_act)
