"""Mixtures of experts: the paths of their parts, and the view that methods see.

Shape suffixes beside those of :mod:`moesaic.arch.dense`::

    E routed experts    C candidate sets of experts    K experts a token runs
    S shared experts that the router weighs    A = E + S
    X inputs of a router's decision (:mod:`moesaic.arch.routing`)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.arch.dense import (
    Arch,
    DenseFFN,
    FFNNames,
    LayerUse,
    RoutedModule,
    act_of,
    dense_ffn,
    linear_size,
)
from moesaic.arch.routing import RouterParts, RoutingFunction, arguments
from moesaic.errors import MoesaicError
from moesaic.types import JSON, Config

PLAIN = FFNNames()
ROUTER = RouterParts()
ROUTED = "moe_layers"
"""Config attribute that lists the layers that route, in the architectures that have it."""


@dataclass(frozen=True)
class MoEArch(Arch):
    """Paths and names of one mixture-of-experts architecture; layers may be dense or have no
    FFN."""

    count: str = "num_experts"
    """Config attribute that holds the number of routed experts."""
    chosen: str | None = "num_experts_per_tok"
    """Config attribute that holds the top-k; None if the router reads none."""
    width: str = "moe_intermediate_size"
    """Config attribute that holds the width of one routed expert."""
    transposed: bool = False
    """True if experts' matrices are (inputs, outputs)."""
    alternating: bool = False
    """True if experts' gates and ups alternate in one matrix; else all gates are before all ups."""
    parts: RouterParts = ROUTER
    """Names of the block's router and of the tensors by which it chooses."""
    experts: str = "experts"
    shared: str | None = None
    """Name of the shared path inside the block."""
    shared_gate: str | None = None
    """Name of a linear module whose sigmoid scales the shared path."""
    beside: str | None = None
    """Path of a shared path in the decoder layer, beside the block."""
    after: str | None = None
    """Name of a norm of the block, applied to the sum of experts and shared path."""
    before: str | None = None
    """Name of a norm of the block, applied to the experts' input; the router has its own."""
    entry: str | None = None
    """Name of a module that gets the block's input, if the block is the decoder layer itself:
    ``ffn_path`` is empty, and the rest of the layer is no part of it."""
    shared_names: FFNNames = PLAIN
    """Projections inside the shared path: linear modules; or, for shared experts that the router
    weighs, tensors of all of them (S, M, D) and (S, D, M)."""
    shared_size: str | None = None
    """Config attribute that holds the shared path's width."""
    shared_count: str | None = None
    """Config attribute that holds the shared path's width over that of a routed expert."""
    shared_times: int = 0
    """Width of the shared path over that of a routed expert, if the config does not have it; else
    0."""
    dense_layers: str | None = None
    """Config attribute that defines which layers are dense: a list of their indices, or of the
    others', of all layers' types, or the number of leading ones."""
    never: str | None = None
    """Tensor of the block that, at its lowest value, keeps an expert from ever being chosen and
    changes nothing else; None if there is none. (Ernie's choice bias is none: its softmax would
    still count the expert.)"""
    groups: str | None = None
    """Config attribute that holds the number of router groups."""
    per_group: int = 1
    """Fewest experts per group that the router can work with."""

    def view(self, layer: nn.Module) -> FFN:
        return self.mixture(layer) if self.is_moe(layer) else self.dense(layer)

    @property
    def inside(self) -> str:
        return f"{self.ffn_path}." if self.ffn_path else ""

    @property
    def starts(self) -> tuple[str, ...]:
        if self.ffn_path:
            return super().starts
        return (*self.parts.tensors, f"{self.experts}.")

    def _block(self, layer: nn.Module) -> nn.Module | None:
        return getattr(layer, self.ffn_path, None) if self.ffn_path else layer

    def is_moe(self, layer: nn.Module) -> bool:
        return hasattr(self._block(layer), self.experts)

    def is_dense(self, layer: nn.Module) -> bool:
        """Return True if a decoder layer's FFN is a plain MLP; hybrids may have none, and an MLP
        with a factor of its own is not plain."""
        block = self._block(layer)
        if block is None or self.is_moe(layer) or not hasattr(block, self.ffn.down):
            return False
        return next(block.parameters(recurse=False), None) is None

    def moe_layers(self, model: nn.Module) -> list[int]:
        """Return the indices of the decoder layers that route.

        Raises:
            MoesaicError: there is none.
        """
        routed = [i for i, layer in enumerate(self.layers(model)) if self.is_moe(layer)]
        if not routed:
            raise MoesaicError("No layer of this model routes.")
        return routed

    def mixture(self, layer: nn.Module) -> MoEFFN:
        """Return the view of a decoder layer's routed block."""
        block = self.ffn_of(layer)
        router, experts = block.get_submodule(self.parts.router), getattr(block, self.experts)
        module = None if self.shared_at is None else attrgetter(self.shared_at)(layer)
        shared = module
        if module is not None and self.shared_gate is not None:
            gate = getattr(block, self.shared_gate)
            shared = lambda x_TD: torch.sigmoid(gate(x_TD)) * module(x_TD)  # noqa: E731
        elif module is not None and self.parts.always:
            shared = lambda x_TD: module(x_TD, router(x_TD)[-1])  # noqa: E731
        return MoEFFN(
            arch=self,
            parts=self.parts.in_block(block),
            block=block,
            router=router,
            experts=experts,
            routing=RoutingFunction(block, self.parts),
            shared=shared,
            shared_module=module,
            **({} if self.before is None else {"before": block.get_submodule(self.before)}),
        )

    def experts_in(self, layer: nn.Module) -> int:
        return self.mixture(layer).count if self.is_moe(layer) else 0

    def width_of(self, layer: nn.Module) -> int:
        if self.is_moe(layer):
            return self.mixture(layer).width
        return super().width_of(layer) if self.is_dense(layer) else 0

    def use(self, layer: nn.Module) -> LayerUse:
        if self.is_dense(layer):
            return super().use(layer)
        if not self.is_moe(layer):
            return LayerUse("dense", 0, 0.0, self.attention_size(layer), 0)
        view = self.mixture(layer)
        weights = sum(getattr(view.experts, name).numel() for name in view.matrices)
        per_neuron = weights // (view.count * view.width)
        widths = view.widths
        width, even = view.shared_width + sum(widths), len({*widths}) == 1
        mean = view.width if even else sum(widths) / view.count
        return LayerUse(
            "moe",
            width,
            view.shared_width + view.top_k * mean,
            self.attention_size(layer),
            per_neuron * width,
            experts=view.count,
            top_k=view.top_k,
            expert_width=view.width if even else 0,
            router=sum(p.numel() for p in view.router.parameters()),
        )

    def attention_size(self, layer: nn.Module) -> int:
        if self.is_moe(layer) or self.is_dense(layer):
            return super().attention_size(layer)
        return linear_size(layer)

    def routed(self, layer: nn.Module) -> RoutedModule | None:
        if not self.is_moe(layer):
            return None
        view = self.mixture(layer)
        return RoutedModule(view.router, view.shared_width, view.widths)

    def act_of(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the activation function; of a mixture that of its shared path, else of its
        experts."""
        if not self.is_moe(layer):
            return super().act_of(layer)
        view = self.mixture(layer)
        if view.shared_ffn is not None:
            return view.shared_ffn.act
        return view.experts.act_fn

    def enter(self, ffn: nn.Module, show: Callable[[Tensor], None]) -> RemovableHandle:
        return super().enter(ffn if self.entry is None else ffn.get_submodule(self.entry), show)

    @contextmanager
    def handing(
        self, ffn: nn.Module, arguments: JSON, tokens: Callable[[Tensor], Tensor]
    ) -> Iterator[None]:
        key = self.parts.in_block(ffn).key if hasattr(ffn, self.experts) else None
        if key is None:
            yield
            return
        weight: Tensor = attrgetter(self.parts.weight)(ffn)
        setattr(ffn, key, tokens(arguments[key]).to(weight.device))
        try:
            yield
        finally:
            vars(ffn).pop(key, None)

    def watch(self, ffn: nn.Module, show: Callable[[Tensor], None]) -> RemovableHandle:
        norm = None if self.after is None else getattr(ffn, self.after, None)
        return super().watch(ffn, show) if norm is None else super().enter(norm, show)

    @property
    def replaced_paths(self) -> tuple[str, ...]:
        paths = (self.ffn_path,) if self.ffn_path else (self.parts.router, self.experts)
        return paths if self.beside is None else (*paths, self.beside)

    @property
    def readers(self) -> tuple[str, ...]:
        return (f"{self.inside}{self.parts.weight}", *super().readers)

    @property
    def shared_at(self) -> str | None:
        """Path of the shared path's module in the decoder layer."""
        return self.beside if self.shared is None else f"{self.ffn_path}.{self.shared}"

    def with_experts(self, count: int) -> JSON:
        return {self.count: count}

    def with_top_k(self, top_k: int | list[int]) -> JSON | None:
        """Return the config attribute with which a token runs this many experts; None if there is
        none.

        Args:
            top_k: one number; or one per decoder layer, for the few classes that take a list.
        """
        return None if self.chosen is None else {self.chosen: top_k}

    def with_shared(self, shared: int, width: int) -> JSON | None:
        """Return the config attributes with which the shared path has a width; None if there are
        none.

        Args:
            shared: the shared path's width.
            width: a routed expert's width.
        """
        if self.shared_size is not None:
            return {self.shared_size: shared}
        if self.shared_times:
            return {} if shared == self.shared_times * width else None
        if self.shared_count is None or shared % width:
            return None
        return {self.shared_count: shared // width}

    def shared_width_in(self, config: Config, width: int) -> int:
        """Return the width of the shared path in a config; the inverse of :meth:`with_shared`.

        Args:
            config: the model's config.
            width: a routed expert's width.
        """
        if self.shared_size is not None:
            return int(getattr(config, self.shared_size) or 0)
        count = getattr(config, self.shared_count) if self.shared_count else self.shared_times
        return int(count or 0) * width

    def shared_room(self, shared: int, width: int) -> int:
        """Return the least width from ``shared`` up that is possible with experts of ``width``."""
        if self.shared_times:
            return max(shared, self.shared_times * width)
        return shared if self.shared_count is None else -(-shared // width) * width

    def dense_at(self, config: Config, layers: Collection[int]) -> JSON | None:
        if self.dense_layers is None:
            return None
        value = getattr(config, self.dense_layers)
        if self.dense_layers == ROUTED:
            return {ROUTED: [i for i in range(config.num_hidden_layers) if i not in layers]}
        if isinstance(value, list) and value and isinstance(value[0], str):
            kinds = ("dense" if i in layers else "sparse" for i in range(len(value)))
            return {self.dense_layers: list(kinds)} if {*value} <= {"dense", "sparse"} else None
        if isinstance(value, list):
            return {self.dense_layers: sorted(layers)}
        first = set(layers) == set(range(len(layers)))
        return {self.dense_layers: len(layers)} if first else None

    def dense_sizes(self, config: Config) -> Iterator[str]:
        """Yield config attributes that may hold the width of dense layers, the likeliest first."""
        yield "intermediate_size"
        for name, value in config.to_dict().items():
            if type(value) is int and "intermediate" in name and name != "intermediate_size":
                yield name

    def group_count(self, config: Config) -> int:
        """Return the number of router groups, which keep equally many experts; 1 without groups."""
        if self.groups is None or getattr(config, "topk_method", "") == "greedy":
            return 1
        return getattr(config, self.groups, None) or 1

    def least_experts(self, top_k: int, config: Config) -> int:
        """Return the fewest experts that a router can work with: the top-k, spread over its
        groups."""
        groups = self.group_count(config)
        if groups == 1:
            return top_k
        open_groups = min(getattr(config, "topk_group", None) or groups, groups)
        least = max(top_k, groups * self.per_group, -(-top_k // open_groups) * groups)
        return least + -least % groups

    def expert_axis(self, name: str, tensor: Tensor, count: int) -> int | None:
        """Return the axis of a block's tensor that counts experts; None if it has none.

        Args:
            name: the tensor's name in memory, relative to the block.
            tensor: its values; router rows, choice biases, and fused experts have such an axis.
            count: number of experts before any are removed.
        """
        if not name.startswith((*self.parts.tensors, f"{self.experts}.")) or not tensor.dim():
            return None
        if name == self.parts.table:
            return None
        sizes = list(tensor.shape)
        if name == self.parts.weight:
            count += self.parts.always
        return next((axis for axis in (0, tensor.dim() - 1) if sizes[axis] == count), None)


# --- the block -----------------------------------------------------------------------------------


class Experts(nn.Module):
    """Interface of transformers' modules that hold all experts of a layer.

    Llama 4's have only matrices and ``act_fn``.
    """

    down_proj: Tensor
    """Down projections of all experts (E, D, M), or (E, M, D) if ``is_transposed``."""
    gate_up_proj: Tensor
    """Gates and ups if ``has_gate``; else there is an ``up_proj``."""
    down_proj_bias: Tensor
    """Biases (E, D), if ``has_bias``."""
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    """True if gates are before ups; else they alternate."""
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]
    _is_expert_parallel: bool


def each_with_its_tokens(
    chosen_TK: Tensor, weights_TK: Tensor, count: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the experts that at least one token runs, each with its tokens.

    Args:
        chosen_TK: the experts of each token; ``count`` stands for a skipped one.
        weights_TK: their combine weights.
        count: number of experts.

    Yields:
        the expert's index; its tokens' rows (N,); the factor of its output (N, 1).
    """
    for number in chosen_TK.unique().tolist():
        if number < count:
            rows, place_N = (chosen_TK == number).nonzero(as_tuple=True)
            yield number, rows, weights_TK[rows, place_N, None]


@dataclass(frozen=True)
class MoEFFN:
    """View of a routed block: ``y = sum_i w_i(x) f_i(x) + shared(x)``; tensors are the module's
    own.

    If a router's score scales the input of an expert F_i, ``f_i(x) = F_i(w_i x) / w_i``, with the
    weight that the expert has whenever it is chosen: it adds w_i f_i to y.
    """

    arch: MoEArch
    parts: RouterParts
    """Names of this block's router parts."""
    block: nn.Module
    router: nn.Module
    experts: Experts
    routing: RoutingFunction
    shared: Callable[[Tensor], Tensor] | None
    shared_module: nn.Module | None
    """MLP of the shared path; None without one."""
    before: Callable[[Tensor], Tensor] = lambda x_TD: x_TD
    """Function from the block's input to the experts' input."""

    @property
    def count(self) -> int:
        """Number of routed experts."""
        return self.routing.count

    @property
    def top_k(self) -> int:
        """Experts that a token runs."""
        return attrgetter(self.parts.top_k)(self.router)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        weight: Tensor = attrgetter(self.parts.weight)(self.block)
        return weight.device

    @property
    def width(self) -> int:
        """Neurons of one expert; of the widest if they differ."""
        return int(self.experts.down_proj.shape[1 if self.arch.transposed else 2])

    @property
    def widths(self) -> tuple[int, ...]:
        """Neurons of each expert, which differ only in modules that have ``widths``."""
        widths: tuple[int, ...] | None = getattr(self.experts, "widths", None)
        return (self.width,) * self.count if widths is None else widths

    @property
    def gated(self) -> bool:
        """True if experts have gates."""
        return bool(getattr(self.experts, "has_gate", True))

    @property
    def biased(self) -> bool:
        """True if experts' projections have biases."""
        return bool(getattr(self.experts, "has_bias", False))

    @property
    def matrices(self) -> tuple[str, str]:
        """Names of the experts' matrices: up (with gates if there are any) and down."""
        return ("gate_up_proj" if self.gated else "up_proj"), "down_proj"

    @property
    def shared_width(self) -> int:
        """Neurons of the shared path, inside the block or beside it."""
        ffn = self.shared_ffn
        return 0 if ffn is None else ffn.width

    @property
    def shared_count(self) -> int:
        """Number of experts in the shared path: those that the router weighs, or one."""
        return self.parts.always or 1

    @property
    def weighed(self) -> int:
        """Number of experts that the router weighs: routed, and in some models shared ones."""
        return self.count + self.parts.always

    @property
    def handed(self) -> JSON:
        """Arguments of the block besides its input, inside :meth:`MoEArch.handing`."""
        key = self.parts.key
        return {} if key is None else {key: getattr(self.block, key)}

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the router's logits, and any other inputs of its decision (T, X)."""
        handed = arguments(self.block, self.router)
        if self.parts.lifted:
            x_TD = x_TD[None]
        with self.parts.projected(self.router) as logits:
            return logits(self.router(x_TD, **handed))

    def weights_of(self, i: int) -> tuple[Tensor, ...]:
        """Return gate (M, D) if any, up (M, D) and down (D, M) of expert ``i``, as views."""
        both, down = (getattr(self.experts, name)[i] for name in self.matrices)
        if self.arch.transposed:
            both, down = both.T, down.T
        if not self.gated:
            return both, down
        gate, up = (both[::2], both[1::2]) if self.arch.alternating else both.chunk(2)
        return gate, up, down

    def hidden(self, i: int, x_TD: Tensor) -> Tensor:
        """Return the input of expert ``i``'s down projection (T, M), from the block's input."""
        if not self.parts.inward:
            return self.activate(i, self.before(x_TD))
        w_TE = self.routing.with_top_k(self.count).weights(self.logits(x_TD))
        w_T1 = w_TE[:, i, None].to(x_TD.dtype).clamp(min=torch.finfo(x_TD.dtype).tiny)
        return self.activate(i, w_T1 * x_TD) / w_T1

    def activate(self, i: int, x_TD: Tensor) -> Tensor:
        """Return the input of expert ``i``'s down projection (T, M), from its own input."""
        m, name = self.experts, self.matrices[0]
        up = getattr(m, name)[i]
        bias = getattr(m, f"{name}_bias")[i] if self.biased else None
        up_TM = F.linear(x_TD, up.T if self.arch.transposed else up, bias)
        if not self.gated:
            return m.act_fn(up_TM)
        if not hasattr(m, "_apply_gate"):
            gate_TM, up_TM = up_TM.chunk(2, dim=-1)
            return m.act_fn(gate_TM) * up_TM
        return m._apply_gate(up_TM)

    def split(self, x_RD: Tensor, *routed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Split the input of the experts' module: yield each expert that runs and its rows (N, D).

        Args:
            x_RD: tokens; or every expert's tokens in turn, zero if it does not run.
            routed: the chosen experts and their weights (T, K), if the module takes them.
        """
        if routed:
            chosen_TK, weights_TK = routed
            for i, rows, _ in each_with_its_tokens(chosen_TK, weights_TK, self.count):
                yield i, x_RD[rows]
            return
        for i, x_TD in enumerate(x_RD.unflatten(0, (self.count, -1))):
            runs_T = (x_TD != 0).any(1)
            if runs_T.any():
                yield i, x_TD[runs_T]

    def project_down(self, i: int, h_TM: Tensor) -> Tensor:
        """Return the output of expert ``i``'s down projection for its input (T, D)."""
        m = self.experts
        down = m.down_proj[i].T if self.arch.transposed else m.down_proj[i]
        return F.linear(h_TM, down, m.down_proj_bias[i] if self.biased else None)

    def expert(self, i: int, x_TD: Tensor) -> Tensor:
        """Return f_i(x), the output of expert ``i`` without its weight (T, D)."""
        return self.project_down(i, self.hidden(i, x_TD))

    def weighted(
        self,
        x_TD: Tensor,
        allowed_E: Tensor | None = None,
        experts: Container[int] | None = None,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the experts that run, each with its tokens.

        Args:
            x_TD: the block's input.
            allowed_E: bool; the available experts. None: all.
            experts: indices of those to yield; None for all.

        Yields:
            the expert's index; its tokens' rows in x (N,); w h, the input of its down projection
            times its combine weight (N, M), float32.
        """
        w_TE = self.combine_weights(x_TD, allowed_E)
        for i in (w_TE != 0).any(0).nonzero().flatten().tolist():
            if experts is not None and i not in experts:
                continue
            rows = w_TE[:, i].nonzero().flatten()
            yield i, rows, self.hidden(i, x_TD[rows]).float() * w_TE[rows, i, None]

    def combine_weights(self, x_TD: Tensor, allowed_E: Tensor | None = None) -> Tensor:
        """Return w among allowed experts, zero for those not chosen (T, E), float32."""
        return self._weighed(x_TD, allowed_E)[:, : self.count]

    def _weighed(self, x_TD: Tensor, allowed_E: Tensor | None) -> Tensor:
        """Return w, followed by the weights of shared experts that the router weighs (T, A)."""
        each = None if allowed_E is None else allowed_E.to(x_TD.device).expand(len(x_TD), -1)
        return self.routing.every_weight(self.logits(x_TD), each)

    def weighed_beside(self, x_TD: Tensor, allowed_E: Tensor | None = None) -> Tensor | float:
        """Return the weighted output that is not of the experts' neurons (T, D), float32: experts'
        output biases, or shared experts; 0 if there are none."""
        if self.biased:
            return self.combine_weights(x_TD, allowed_E) @ self.experts.down_proj_bias.float()
        ffn, h_TM = self.shared_ffn, None
        if self.parts.always:
            h_TM = self.shared_weighted(x_TD, allowed_E)
        return 0.0 if ffn is None or h_TM is None else h_TM @ ffn.down_DM.float().T

    @property
    def shared_ffn(self) -> DenseFFN | None:
        """MLP of the shared path; None without one. Several experts are one, side by side, whose
        down projection is a copy."""
        module = self.shared_module
        if module is None:
            return None
        names = self.arch.shared_names
        return _stacked_ffn(module, names) if self.parts.always else dense_ffn(module, names)

    def shared_weighted(self, x_TD: Tensor, allowed_E: Tensor | None = None) -> Tensor | None:
        """Return the input of the shared down projection times the path's own weight (T, M).

        Args:
            x_TD: the block's input.
            allowed_E: bool; the available routed experts, which may share that weight. None: all.
        """
        ffn = self.shared_ffn
        if ffn is None:
            return None
        h_TM = ffn.hidden(x_TD).float()
        if self.parts.always:
            w_TS = self._weighed(x_TD, allowed_E)[:, self.count :]
            return h_TM * w_TS.repeat_interleave(ffn.width // self.parts.always, 1)
        if self.arch.shared_gate is None:
            return h_TM
        gate = getattr(self.block, self.arch.shared_gate)
        return h_TM * torch.sigmoid(gate(x_TD)).float()

    def packed_outputs(
        self,
        x_TD: Tensor,
        wanted_TE: Tensor,
        show: Callable[[int, Tensor, Tensor], None] = lambda *_: None,
    ) -> Tensor:
        """Return f (T, K, D) of the wanted experts of each token, by index; zero where fewer are.

        Args:
            x_TD: the block's input.
            wanted_TE: bool; K is the most of a token.
            show: called with each expert's index, its tokens' rows (N,) and its h (N, M).
        """
        place_TE = wanted_TE.cumsum(1) - 1
        most = int(place_TE.max()) + 1 if len(x_TD) else 0
        f_TKD = x_TD.new_zeros(x_TD.shape[0], most, x_TD.shape[1])
        for i in wanted_TE.any(0).nonzero().flatten().tolist():
            rows = wanted_TE[:, i].nonzero().flatten()
            h_NM = self.hidden(i, x_TD[rows])
            show(i, rows, h_NM)
            f_TKD[rows, place_TE[rows, i]] = self.project_down(i, h_NM)
        return f_TKD

    def shared_outputs(self, x_TD: Tensor) -> Tensor:
        """Return the unweighted outputs of shared experts that the router weighs (T, S, D)."""
        ffn, count = self.shared_ffn, self.parts.always
        if ffn is None or not count:
            return x_TD.new_zeros(len(x_TD), 0, x_TD.shape[1])
        parts = zip(ffn.hidden(x_TD).chunk(count, 1), ffn.down_DM.chunk(count, 1), strict=True)
        return torch.stack([F.linear(h_TM, down_DM) for h_TM, down_DM in parts], 1)

    def output(self, x_TD: Tensor) -> Tensor:
        """Return the block's sum of experts and shared path (T, D), before any norm."""
        if self.arch.entry is not None:
            _, weights_TK, chosen_TK = self.router(x_TD)
            return self.experts(self.before(x_TD), chosen_TK, weights_TK)
        outputs: list[Tensor] = []
        with self.arch.watch(self.block, outputs.append):
            self.block(x_TD.unsqueeze(0), **self.handed)
        return outputs[0].squeeze(0)

    @property
    def odd(self) -> str:
        """Difference of the experts' matrices from gate, up and down, in words, or ""."""
        if not self.gated:
            return "its experts have no gates"
        if self.biased:
            return "its experts have biases"
        if self.arch.transposed or self.arch.alternating:
            return "its experts lie in memory in another way"
        return ""

    def apart(self, routed: bool) -> str:
        """Return why the shared path is no plain gated MLP, in words; "" if it is one.

        Args:
            routed: True if experts are to be folded into it, too.
        """
        ffn = self.shared_ffn
        if self.arch.after is not None:
            return "a norm follows the sum of what experts and shared path make"
        if ffn is not None and ffn.gate_MD is None:
            return "its shared path has no gate"
        if ffn is not None and ffn.custom_act:
            return "its shared path has an activation of its own"
        if ffn is not None and any(b is not None for b in ffn.biases):
            return "its shared path has biases"
        if not routed or self.odd:
            return self.odd if routed else ""
        plain = _gated_by(self.experts, [] if ffn is None else [ffn.act])
        return "" if plain else "its experts have an activation of their own"

    @contextmanager
    def restricted(self, allowed_E: Tensor) -> Iterator[None]:
        """Let the block route among the allowed experts only, while the context lasts."""

        with self.parts.projected(self.router) as logits:

            def route(_: nn.Module, args: object, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                logits_TX = logits(out)
                allowed_TE = allowed_E.to(logits_TX.device).expand(len(logits_TX), -1)
                return self.parts.written(out, *self.routing.routed(logits_TX, allowed_TE)[1:])

            with self.router.register_forward_hook(route):
                yield


FFN: TypeAlias = DenseFFN | MoEFFN
"""FFN as experts that tokens run: a mixture's, or a dense block as one expert."""


def _gated_by(experts: Experts, acts: Sequence[Callable[[Tensor], Tensor]]) -> bool:
    """Return True if experts compute ``act(gate) * up``, and all of ``acts`` are that ``act``."""
    generator = torch.Generator("cpu").manual_seed(0)
    both = 100 * torch.randn(64, 8, generator=generator, dtype=torch.float32, device="cpu")
    gate, up = both.chunk(2, dim=1)
    try:
        results = [experts._apply_gate(both), *(act(gate) * up for act in acts)]
        return all(torch.allclose(h, experts.act_fn(gate) * up) for h in results)
    except (AttributeError, TypeError):  # another function of gates and ups
        return False


def _stacked_ffn(module: nn.Module, names: FFNNames) -> DenseFFN:
    """Return the view of several MLPs as one; their tensors are (S, M, D) and (S, D, M)."""
    gate_MD, up_MD = (getattr(module, n or "").flatten(0, 1) for n in (names.gate, names.up))
    down_DM = getattr(module, names.down).transpose(0, 1).flatten(1)
    return DenseFFN(up_MD, down_DM, gate_MD, act_of(module, names))
