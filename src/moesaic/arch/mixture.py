"""Mixtures of experts: where each keeps its parts, and the view that methods see.

Shape suffixes beside those of :mod:`moesaic.arch.dense`::

    E routed experts    C candidate sets of experts    K experts a token runs
    S shared experts that the router weighs    A = E + S
    X what a router decides on (:mod:`moesaic.arch.routing`)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.arch.dense import Arch, DenseFFN, FFNNames, act_of, dense_ffn, linear_size
from moesaic.arch.routing import RouterParts, RoutingFunction, arguments
from moesaic.arch.use import LayerUse, RoutedModule
from moesaic.types import JSON, Config

PLAIN = FFNNames()
ROUTER = RouterParts()
ROUTED = "moe_layers"
"""The config attribute that lists the layers that route, where it is that one."""


@dataclass(frozen=True)
class MoEArch(Arch):
    """One mixture-of-experts architecture. Some of its layers may be dense, or have no FFN."""

    count: str = "num_experts"
    """The config attribute that counts the routed experts."""
    chosen: str | None = "num_experts_per_tok"
    """The config attribute that counts the experts a token runs; None where the router goes by
    none."""
    width: str = "moe_intermediate_size"
    """The config attribute that is the width of one routed expert."""
    transposed: bool = False
    """Experts' matrices are (inputs, outputs)."""
    alternating: bool = False
    """Experts' gates and ups alternate in one matrix; else all gates are before all ups."""
    parts: RouterParts = ROUTER
    """Where the block's router is, and what it chooses by."""
    experts: str = "experts"
    shared: str | None = None
    """The shared path inside the block."""
    shared_gate: str | None = None
    """A linear module whose sigmoid scales the shared path."""
    beside: str | None = None
    """A shared path of the decoder layer, beside the block."""
    after: str | None = None
    """A norm of the block, through which the sum of experts and shared path passes."""
    before: str | None = None
    """A norm of the block, through which experts see what enters it; the router has its own."""
    entry: str | None = None
    """A module that is given what enters the block, where the block is the decoder layer itself:
    ``ffn_path`` is empty, and the rest of the layer is no part of it."""
    shared_names: FFNNames = PLAIN
    """The projections inside the shared path: linear modules; or, of shared experts that the router
    weighs, tensors of them all (S, M, D) and (S, D, M)."""
    shared_size: str | None = None
    """The config attribute that is the shared path's width."""
    shared_count: str | None = None
    """The config attribute that is the shared path's width in widths of a routed expert."""
    shared_times: int = 0
    """The shared path's width in widths of a routed expert, where no attribute of the config says
    it; 0 where one does."""
    dense_layers: str | None = None
    """The config attribute that says which layers are dense: a list of their numbers, or of the
    others', of all layers' types, or how many of the first."""
    never: str | None = None
    """Tensor of the block that, at its lowest, keeps an expert from ever being chosen and changes
    nothing else; None where there is none. (Ernie's choice bias is none: its softmax would still
    count the expert.)"""
    groups: str | None = None
    """The config attribute that counts the router's groups."""
    per_group: int = 1
    """The fewest experts that the router can do with in a group."""

    def view(self, layer: nn.Module) -> DenseFFN | MoEFFN:
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
        """Whether a decoder layer's feed-forward part is a plain MLP; some hybrids' have none, and
        what has a factor of its own is none."""
        block = self._block(layer)
        if block is None or self.is_moe(layer) or not hasattr(block, self.ffn.down):
            return False
        return next(block.parameters(recurse=False), None) is None

    def moe_layers(self, model: nn.Module) -> list[int]:
        """The decoder layers that route."""
        return [i for i, layer in enumerate(self.layers(model)) if self.is_moe(layer)]

    def mixture(self, layer: nn.Module) -> MoEFFN:
        """The routed block of a decoder layer, as methods see it."""
        return _moe_ffn(layer, self)

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
        weights = sum(view.matrix(name).numel() for name in view.matrices)
        per_neuron = weights // (view.count * view.width)
        width = view.shared_width + view.count * view.width
        return LayerUse(
            "moe",
            width,
            view.shared_width + view.top_k * view.width,
            self.attention_size(layer),
            per_neuron * width,
            experts=view.count,
            top_k=view.top_k,
            expert_width=view.width,
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
        return RoutedModule(view.router, view.shared_width, (view.width,) * view.count)

    def act_of(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        """Of a mixture that of its shared path, where it has one, else of its experts."""
        if not self.is_moe(layer):
            return super().act_of(layer)
        view = self.mixture(layer)
        if view.shared_ffn is not None:
            return view.shared_ffn.act
        return view.experts.act_fn

    def nothing_written(self, layer: nn.Module) -> Tensor:
        if not self.is_moe(layer):
            return super().nothing_written(layer)
        experts = self.mixture(layer).experts
        down = experts.down_proj
        return down.new_empty(0, down.shape[2 if self.transposed else 1])

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
        if norm is None:
            return super().watch(ffn, show)

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            show(args[0])

        return norm.register_forward_pre_hook(hook)

    @property
    def replaced_paths(self) -> tuple[str, ...]:
        paths = (self.ffn_path,) if self.ffn_path else (self.parts.router, self.experts)
        return paths if self.beside is None else (*paths, self.beside)

    @property
    def readers(self) -> tuple[str, ...]:
        return (f"{self.inside}{self.parts.weight}", *super().readers)

    @property
    def shared_at(self) -> str | None:
        """The path of the shared path's module in the decoder layer."""
        return self.beside if self.shared is None else f"{self.ffn_path}.{self.shared}"

    def counted(self, shape: Sequence[int]) -> int:
        """The routed experts that a router has rows for.

        Args:
            shape: of its weight.
        """
        return shape[0] - self.parts.always

    def with_experts(self, count: int) -> JSON:
        return {self.count: count}

    def with_top_k(self, top_k: int | list[int]) -> JSON | None:
        """The config attribute by which a token runs so many experts; None if none holds it.

        Args:
            top_k: in every layer; or of each decoder layer, for the few classes that take a list.
        """
        return None if self.chosen is None else {self.chosen: top_k}

    @property
    def ties_widths(self) -> bool:
        return self.width == "intermediate_size"

    def with_shared(self, shared: int, width: int) -> JSON | None:
        """The config attributes by which the shared path has a width; None if none hold it.

        Args:
            shared: its width.
            width: that of a routed expert.
        """
        if self.shared_size is not None:
            return {self.shared_size: shared}
        if self.shared_times:
            return {} if shared == self.shared_times * width else None
        if self.shared_count is None or shared % width:
            return None
        return {self.shared_count: shared // width}

    def shared_width_in(self, config: Config, width: int) -> int:
        """The width of the shared path by a config; the other way round of :meth:`with_shared`.

        Args:
            config: a model's.
            width: that of a routed expert.
        """
        if self.shared_size is not None:
            return int(getattr(config, self.shared_size) or 0)
        count = getattr(config, self.shared_count) if self.shared_count else self.shared_times
        return int(count or 0) * width

    def shared_room(self, shared: int, width: int) -> int:
        """The least width from ``shared`` up that a shared path can have beside such experts."""
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
        """Config attributes that may be the width of dense layers, the likeliest first."""
        yield "intermediate_size"
        for name, value in config.to_dict().items():
            if type(value) is int and "intermediate" in name and name != "intermediate_size":
                yield name

    def group_count(self, config: Config) -> int:
        """Groups that must lose equally many experts; 1 where the router has none."""
        if self.groups is None or getattr(config, "topk_method", "") == "greedy":
            return 1
        return getattr(config, self.groups, None) or 1

    def expert_axis(self, name: str, tensor: Tensor, count: int) -> int | None:
        """The axis of a block's tensor that counts experts, None if it has none.

        Args:
            name: in memory, relative to the block.
            tensor: router rows, choice biases, and fused experts have such an axis.
            count: experts before any are dropped.
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
    """What the modules have that hold all experts of a layer; they are transformers' own.

    Llama 4's have matrices and ``act_fn`` alone.
    """

    down_proj: Tensor
    """Of all experts (E, D, M), or (E, M, D) where it ``is_transposed``; so are the others."""
    gate_up_proj: Tensor
    """Where it ``has_gate``; else there is an ``up_proj``."""
    down_proj_bias: Tensor
    """(E, D), where it ``has_bias``."""
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    """Gates first, then ups; else they alternate."""
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]
    _is_expert_parallel: bool


def each_with_its_tokens(
    chosen_TK: Tensor, weights_TK: Tensor, count: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The experts that some token runs, each with its tokens.

    Args:
        chosen_TK: the experts of each token; one that its router skipped has a number too high.
        weights_TK: their combine weights.
        count: experts.

    Yields:
        the expert's number; its tokens' rows (N,); what its output is multiplied by (N, 1).
    """
    for number in chosen_TK.unique().tolist():
        if number < count:
            rows, place_N = (chosen_TK == number).nonzero(as_tuple=True)
            yield number, rows, weights_TK[rows, place_N, None]


@dataclass(frozen=True)
class MoEFFN:
    """A routed block: ``y = sum_i w_i(x) f_i(x) + shared(x)``; tensors are the module's own.

    Where a router's score scales what an expert F_i is given, ``f_i(x) = F_i(w_i x) / w_i``, with
    the weight that the expert has whenever it is chosen: w_i f_i is what it adds to y.
    """

    arch: MoEArch
    parts: RouterParts
    """Of this block's router."""
    block: nn.Module
    router: nn.Module
    experts: Experts
    routing: RoutingFunction
    shared: Callable[[Tensor], Tensor] | None
    shared_module: nn.Module | None
    """The MLP of the shared path; None without one."""
    before: Callable[[Tensor], Tensor] = lambda x_TD: x_TD
    """What experts see of the block's input."""

    @property
    def count(self) -> int:
        return self.routing.count

    @property
    def top_k(self) -> int:
        return attrgetter(self.parts.top_k)(self.router)

    @property
    def device(self) -> torch.device:
        weight: Tensor = attrgetter(self.parts.weight)(self.block)
        return weight.device

    @property
    def width(self) -> int:
        """Neurons of one expert."""
        return int(self.experts.down_proj.shape[1 if self.arch.transposed else 2])

    @property
    def gated(self) -> bool:
        """Experts have gates."""
        return bool(getattr(self.experts, "has_gate", True))

    @property
    def biased(self) -> bool:
        """Experts' projections have biases."""
        return bool(getattr(self.experts, "has_bias", False))

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of the experts' matrices: up, gates with it where there are any, and down."""
        return ("gate_up_proj" if self.gated else "up_proj"), "down_proj"

    def matrix(self, name: str) -> Tensor:
        """A matrix of all experts, as their module holds it."""
        return getattr(self.experts, name)

    @property
    def shared_width(self) -> int:
        """Neurons of the shared path, inside the block or beside it."""
        ffn = self.shared_ffn
        return 0 if ffn is None else ffn.width

    @property
    def shared_count(self) -> int:
        """The experts that the shared path is made of, which are of one width: those that the
        router weighs, or one."""
        return self.parts.always or 1

    @property
    def weighed(self) -> int:
        """Experts that the router weighs: the routed ones, in some models shared ones too."""
        return self.count + self.parts.always

    @property
    def handed(self) -> JSON:
        """What the block is handed beside its input, inside of :meth:`MoEArch.handing`."""
        key = self.parts.key
        return {} if key is None else {key: getattr(self.block, key)}

    def logits(self, x_TD: Tensor) -> Tensor:
        """The router's logits, and what else it decides on (T, X)."""
        handed = arguments(self.block, self.router)
        if self.parts.lifted:
            x_TD = x_TD[None]
        with self.parts.projected(self.router) as logits:
            return logits(self.router(x_TD, **handed))

    def weights_of(self, i: int) -> tuple[Tensor, ...]:
        """gate (M, D) if there is one, up (M, D) and down (D, M) of expert ``i``, views."""
        both, down = (self.matrix(name)[i] for name in self.matrices)
        if self.arch.transposed:
            both, down = both.T, down.T
        if not self.gated:
            return both, down
        gate, up = (both[::2], both[1::2]) if self.arch.alternating else both.chunk(2)
        return gate, up, down

    def hidden(self, i: int, x_TD: Tensor) -> Tensor:
        """The input of expert ``i``'s down projection (T, M)."""
        if not self.parts.inward:
            return self.activated(i, self.before(x_TD))
        w_TE = self.routing.of_fewer(self.count).weights(self.logits(x_TD))
        w_T1 = w_TE[:, i, None].to(x_TD.dtype).clamp(min=torch.finfo(x_TD.dtype).tiny)
        return self.activated(i, w_T1 * x_TD) / w_T1

    def activated(self, i: int, x_TD: Tensor) -> Tensor:
        """The same for what expert ``i`` itself is given."""
        m, name = self.experts, self.matrices[0]
        up = self.matrix(name)[i]
        bias = self.matrix(f"{name}_bias")[i] if self.biased else None
        up_TM = F.linear(x_TD, up.T if self.arch.transposed else up, bias)
        if not self.gated:
            return m.act_fn(up_TM)
        if not hasattr(m, "_apply_gate"):
            gate_TM, up_TM = up_TM.chunk(2, dim=-1)
            return m.act_fn(gate_TM) * up_TM
        return m._apply_gate(up_TM)

    def split(self, x_RD: Tensor, *routed: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """What the experts' module is called with, taken apart.

        Args:
            x_RD: its rows: tokens; or every expert's tokens in turn, zero where it does not run.
            routed: the chosen experts and their weights (T, K), where the module is told.

        Yields:
            each expert that runs: its number, its rows (N,), these (N, D), and what its output is
            multiplied by (N, 1).
        """
        if routed:
            chosen_TK, weights_TK = routed
            for i, rows, weights_N1 in each_with_its_tokens(chosen_TK, weights_TK, self.count):
                yield i, rows, x_RD[rows], weights_N1
            return
        tokens = len(x_RD) // self.count
        for i in range(self.count):
            runs_T = (x_RD[i * tokens : (i + 1) * tokens] != 0).any(1)
            rows = i * tokens + runs_T.nonzero().flatten()
            if len(rows):
                yield i, rows, x_RD[rows], x_RD.new_ones(len(rows), 1)

    def written(self, i: int, h_TM: Tensor) -> Tensor:
        """What expert ``i``'s down projection makes of its input (T, D)."""
        m = self.experts
        down = m.down_proj[i].T if self.arch.transposed else m.down_proj[i]
        return F.linear(h_TM, down, m.down_proj_bias[i] if self.biased else None)

    def expert(self, i: int, x_TD: Tensor) -> Tensor:
        """f_i(x), the output of expert ``i`` without its weight (T, D)."""
        return self.written(i, self.hidden(i, x_TD))

    def weighted(
        self, x_TD: Tensor, allowed_E: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The experts that run, each with its tokens.

        Args:
            x_TD: the block's input.
            allowed_E: bool; the experts that are there. None: all.

        Yields:
            the expert's number; its tokens' rows in x (N,); w h, the input of its down projection
            times its combine weight (N, M), float32.
        """
        w_TE = self.combine_weights(x_TD, allowed_E)
        for i in (w_TE != 0).any(0).nonzero().flatten().tolist():
            rows = w_TE[:, i].nonzero().flatten()
            yield i, rows, self.hidden(i, x_TD[rows]).float() * w_TE[rows, i, None]

    def combine_weights(self, x_TD: Tensor, allowed_E: Tensor | None = None) -> Tensor:
        """w, zero for experts that are not chosen (T, E), float32; of the allowed ones only."""
        return self._weighed(x_TD, allowed_E)[:, : self.count]

    def _weighed(self, x_TD: Tensor, allowed_E: Tensor | None) -> Tensor:
        """The same, and behind them those of shared experts that the router weighs (T, A)."""
        allowed_TE = None if allowed_E is None else self._of_each(allowed_E, x_TD)
        return self.routing.every_weight(self.logits(x_TD), allowed_TE)

    def _of_each(self, allowed_E: Tensor, x_TD: Tensor) -> Tensor:
        """The same experts for every token (T, E)."""
        return allowed_E.to(x_TD.device).expand(len(x_TD), -1)

    def weighed_beside(self, x_TD: Tensor, allowed_E: Tensor | None = None) -> Tensor | float:
        """What the router weighs beside the experts' neurons (T, D), float32: experts' output
        biases, or shared experts; 0 where it is nothing."""
        if self.biased:
            return self.combine_weights(x_TD, allowed_E) @ self.experts.down_proj_bias.float()
        ffn, h_TM = self.shared_ffn, None
        if self.parts.always:
            h_TM = self.shared_weighted(x_TD, allowed_E)
        return 0.0 if ffn is None or h_TM is None else h_TM @ ffn.down_DM.float().T

    @property
    def shared_ffn(self) -> DenseFFN | None:
        """The shared path's MLP; None without one. Several experts are one, side by side, whose
        down projection is a copy."""
        module = self.shared_module
        if module is None:
            return None
        names = self.arch.shared_names
        return _stacked_ffn(module, names) if self.parts.always else dense_ffn(module, names)

    def shared_weighted(self, x_TD: Tensor, allowed_E: Tensor | None = None) -> Tensor | None:
        """The input of the shared path's down projection times the path's own weight (T, M).

        Args:
            x_TD: the block's input.
            allowed_E: bool; the routed experts that are there, which may share that weight. None:
                all.
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

    def outputs(
        self,
        x_TD: Tensor,
        wanted_TE: Tensor,
        show: Callable[[int, Tensor, Tensor], None] = lambda *_: None,
    ) -> Tensor:
        """f (T, E, D) for the experts that are wanted of each token, zero elsewhere.

        Args:
            x_TD: the block's input.
            wanted_TE: bool.
            show: is given of each expert its number, its tokens' rows (N,) and its h (N, M).
        """
        f_TED = x_TD.new_zeros(x_TD.shape[0], self.count, x_TD.shape[1])
        for i in wanted_TE.any(0).nonzero().flatten().tolist():
            rows = wanted_TE[:, i].nonzero().flatten()
            h_NM = self.hidden(i, x_TD[rows])
            show(i, rows, h_NM)
            f_TED[rows, i] = self.written(i, h_NM)
        return f_TED

    def shared_outputs(self, x_TD: Tensor) -> Tensor:
        """What each shared expert that the router weighs makes, without its weight (T, S, D)."""
        ffn, count = self.shared_ffn, self.parts.always
        if ffn is None or not count:
            return x_TD.new_zeros(len(x_TD), 0, x_TD.shape[1])
        parts = zip(ffn.hidden(x_TD).chunk(count, 1), ffn.down_DM.chunk(count, 1), strict=True)
        return torch.stack([F.linear(h_TM, down_DM) for h_TM, down_DM in parts], 1)

    def output(self, x_TD: Tensor) -> Tensor:
        """What experts and shared path add up to as the block runs now (T, D), before any norm."""
        if self.arch.entry is not None:
            _, weights_TK, chosen_TK = self.router(x_TD)
            return self.experts(self.before(x_TD), chosen_TK, weights_TK)
        outputs: list[Tensor] = []
        with self.arch.watch(self.block, outputs.append):
            self.block(x_TD.unsqueeze(0), **self.handed)
        return outputs[0].squeeze(0)

    @property
    def odd(self) -> str:
        """What sets the experts' matrices apart from gate, up and down; "" where nothing does."""
        if not self.gated:
            return "its experts have no gates"
        if self.biased:
            return "its experts have biases"
        if self.arch.transposed or self.arch.alternating:
            return "its experts lie in memory in another way"
        return ""

    def apart(self, routed: bool) -> str:
        """What keeps the shared path from being a plain gated MLP, in words; "" where nothing does.

        Args:
            routed: so that any of the experts can be folded into it, too.
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
        """Inside, the block routes as if only the allowed experts were there."""

        with self.parts.projected(self.router) as logits:

            def route(_: nn.Module, args: object, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                logits_TX = logits(out)
                allowed_TE = self._of_each(allowed_E, logits_TX)
                return self.parts.written(out, *self.routing.restricted(logits_TX, allowed_TE))

            with self.router.register_forward_hook(route):
                yield


def _gated_by(experts: Experts, acts: Sequence[Callable[[Tensor], Tensor]]) -> bool:
    """Whether experts make ``act(gate) * up``, and all of some functions are that ``act``."""
    generator = torch.Generator("cpu").manual_seed(0)
    both = 100 * torch.randn(64, 8, generator=generator, dtype=torch.float32, device="cpu")
    gate, up = both.chunk(2, dim=1)
    try:
        results = [experts._apply_gate(both), *(act(gate) * up for act in acts)]
        return all(torch.allclose(h, experts.act_fn(gate) * up) for h in results)
    except (AttributeError, TypeError):  # another function of gates and ups
        return False


def _stacked_ffn(module: nn.Module, names: FFNNames) -> DenseFFN:
    """The view of several MLPs as one: their projections are tensors (S, M, D) and (S, D, M)."""
    gate_MD, up_MD = (getattr(module, n or "").flatten(0, 1) for n in (names.gate, names.up))
    down_DM = getattr(module, names.down).transpose(0, 1).flatten(1)
    return DenseFFN(up_MD, down_DM, gate_MD, act_of(module, names))


def _moe_ffn(layer: nn.Module, arch: MoEArch) -> MoEFFN:
    """The view of a routed layer."""
    block = arch.ffn_of(layer)
    router, experts = block.get_submodule(arch.parts.router), getattr(block, arch.experts)
    module = None if arch.shared_at is None else attrgetter(arch.shared_at)(layer)
    shared = module
    if module is not None and arch.shared_gate is not None:
        gate = getattr(block, arch.shared_gate)
        shared = lambda x_TD: torch.sigmoid(gate(x_TD)) * module(x_TD)  # noqa: E731
    elif module is not None and arch.parts.always:
        shared = lambda x_TD: module(x_TD, router(x_TD)[-1])  # noqa: E731
    return MoEFFN(
        arch=arch,
        parts=arch.parts.in_block(block),
        block=block,
        router=router,
        experts=experts,
        routing=RoutingFunction(block, arch.parts),
        shared=shared,
        shared_module=module,
        **({} if arch.before is None else {"before": block.get_submodule(arch.before)}),
    )
