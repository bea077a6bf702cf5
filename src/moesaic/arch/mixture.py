"""Mixtures of experts: one table entry a ``model_type``, and the view that methods see.

Shape suffixes beside those of :mod:`moesaic.arch.dense`::

    E routed experts    C candidate sets of experts    K experts a token runs
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import (
    EXPERT_COUNTS,
    PLUGINS,
    PREFIX,
    Arch,
    DenseFFN,
    FFNNames,
    dense_arch,
    dense_architectures,
    dense_ffn,
)
from moesaic.arch.routing import RoutingFunction
from moesaic.arch.use import LayerUse, RoutedModule
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Config

PLAIN = FFNNames()


@dataclass(frozen=True)
class MoEArch(Arch):
    """One mixture-of-experts architecture. Some of its layers may be dense."""

    count: str = "num_experts"
    """The config attribute that counts the routed experts."""
    width: str = "moe_intermediate_size"
    """The config attribute that is the width of one routed expert."""
    transposed: bool = False
    """Experts' matrices are (inputs, outputs), and their gates and ups alternate."""
    router: str = "gate"
    experts: str = "experts"
    shared: str | None = None
    """The shared path inside the block."""
    shared_gate: str | None = None
    """A linear module whose sigmoid scales the shared path."""
    beside: str | None = None
    """A shared path of the decoder layer, beside the block."""
    shared_names: FFNNames = PLAIN
    """The projections inside the shared path."""
    shared_size: str | None = None
    """The config attribute that is the shared path's width."""
    shared_count: str | None = None
    """The config attribute that is the shared path's width in widths of a routed expert."""
    dense_layers: str | None = None
    """The config attribute that says which layers are dense: a list, or how many of the first."""
    choice_bias: str | None = None
    """Tensor of the router that is added to the scores only to choose experts."""
    never: str | None = None
    """Tensor of the router that, at its lowest, keeps an expert from ever being chosen and changes
    nothing else; None where there is none. (Ernie's choice bias is none: its softmax would still
    count the expert.)"""
    groups: str | None = None
    """The config attribute that counts the router's groups."""
    per_group: int = 1
    """The fewest experts that the router can do with in a group."""

    def view(self, layer: nn.Module) -> DenseFFN | MoEFFN:
        return self.mixture(layer) if self.is_moe(layer) else self.dense(layer)

    def is_moe(self, layer: nn.Module) -> bool:
        return hasattr(self.ffn_of(layer), self.experts)

    def moe_layers(self, model: nn.Module) -> list[int]:
        """The decoder layers that route."""
        return [i for i, layer in enumerate(self.layers(model)) if self.is_moe(layer)]

    def mixture(self, layer: nn.Module) -> MoEFFN:
        """The routed block of a decoder layer, as methods see it."""
        return moe_ffn(layer, self)

    def experts_in(self, layer: nn.Module) -> int:
        return self.mixture(layer).count if self.is_moe(layer) else 0

    def width_of(self, layer: nn.Module) -> int:
        return self.mixture(layer).width if self.is_moe(layer) else super().width_of(layer)

    def use(self, layer: nn.Module) -> LayerUse:
        if not self.is_moe(layer):
            return super().use(layer)
        view = self.mixture(layer)
        weights = view.experts.gate_up_proj.numel() + view.experts.down_proj.numel()
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

    def routed(self, layer: nn.Module) -> RoutedModule | None:
        if not self.is_moe(layer):
            return None
        view = self.mixture(layer)
        return RoutedModule(view.router, view.shared_width, (view.width,) * view.count)

    def act_of(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        if not self.is_moe(layer):
            return super().act_of(layer)
        act: Callable[[Tensor], Tensor] = self.mixture(layer).experts.act_fn
        return act

    @property
    def replaced_paths(self) -> tuple[str, ...]:
        return tuple(path for path in (self.ffn_path, self.beside) if path)

    @property
    def shared_at(self) -> str | None:
        """The path of the shared path's module in the decoder layer."""
        return self.beside if self.shared is None else f"{self.ffn_path}.{self.shared}"

    @property
    def wide_modules(self) -> tuple[str, ...]:
        return ()

    def with_experts(self, count: int) -> JSON:
        return {self.count: count}

    def with_width(self, width: int) -> JSON:
        return {self.width: width}

    def with_shared(self, shared: int, width: int) -> JSON | None:
        """The config attributes by which the shared path has a width; None if none hold it.

        Args:
            shared: its width.
            width: that of a routed expert.
        """
        if self.shared_size is not None:
            return {self.shared_size: shared}
        if self.shared_count is None or shared % width:
            return None
        return {self.shared_count: shared // width}

    def shared_room(self, shared: int, width: int) -> int:
        """The least width from ``shared`` up that a shared path can have beside such experts."""
        return shared if self.shared_count is None else -(-shared // width) * width

    def dense_at(self, config: Config, layers: Collection[int]) -> JSON | None:
        if self.dense_layers is None:
            return None
        if isinstance(getattr(config, self.dense_layers), list):
            return {self.dense_layers: sorted(layers)}
        first = set(layers) == set(range(len(layers)))
        return {self.dense_layers: len(layers)} if first else None

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
        if not name.startswith((f"{self.router}.", f"{self.experts}.")):
            return None
        return 0 if tensor.shape[0] == count else tensor.dim() - 1


_DEEPSEEK: JSON = {
    "count": "n_routed_experts",
    "shared": "shared_experts",
    "shared_count": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
}
_BIASED: JSON = {
    "choice_bias": "e_score_correction_bias",
    "never": "e_score_correction_bias",
    "groups": "n_group",
    "per_group": 2,
}

MOE: dict[str, MoEArch] = {
    arch.model_type: arch
    for arch in (
        MoEArch("mixtral", count="num_local_experts", width="intermediate_size"),
        MoEArch(
            "qwen2_moe",
            shared="shared_expert",
            shared_gate="shared_expert_gate",
            shared_size="shared_expert_intermediate_size",
            dense_layers="mlp_only_layers",
        ),
        MoEArch("qwen3_moe", dense_layers="mlp_only_layers"),
        MoEArch("olmoe", width="intermediate_size"),
        MoEArch("deepseek", **_DEEPSEEK),
        MoEArch("deepseek_v2", groups="n_group", **_DEEPSEEK),
        MoEArch("deepseek_v3", **_DEEPSEEK, **_BIASED),
        MoEArch("glm4_moe", **_DEEPSEEK, **_BIASED),
        MoEArch(
            "ernie4_5_moe",
            count="moe_num_experts",
            shared="shared_experts",
            shared_count="moe_num_shared_experts",
            dense_layers="moe_layer_start_index",
            choice_bias="moe_statics.e_score_correction_bias",
        ),
        MoEArch(
            "granitemoe",
            ffn_path="block_sparse_moe",
            count="num_local_experts",
            width="intermediate_size",
            router="router",
        ),
        MoEArch(
            "granitemoeshared",
            ffn_path="block_sparse_moe",
            count="num_local_experts",
            width="intermediate_size",
            router="router",
            beside="shared_mlp",
            shared_size="shared_intermediate_size",
            shared_names=FFNNames("input_linear", "output_linear", "input_linear", "activation"),
        ),
        MoEArch(
            "gpt_oss",
            count="num_local_experts",
            width="intermediate_size",
            transposed=True,
            router="router",
            never="bias",
        ),
        MoEArch("phimoe", count="num_local_experts", width="intermediate_size", router="router"),
    )
}


def moe_architectures() -> dict[str, MoEArch]:
    """Every mixture-of-experts architecture by ``model_type``."""
    return {**{n: a for n, a in PLUGINS.items() if isinstance(a, MoEArch)}, **MOE}


def architectures() -> dict[str, Arch]:
    """Every architecture, dense and mixture, by ``model_type``."""
    return {**dense_architectures(), **moe_architectures()}


def moe_arch(config: Config) -> MoEArch:
    """The architecture of a mixture of experts' config, reduced by us before or not.

    Raises:
        MoesaicError: the model is dense, quantised, or unknown.
    """
    base, known = config.model_type.removeprefix(PREFIX), moe_architectures()
    if getattr(config, "quantization_config", None) is not None:
        raise MoesaicError(
            f"This {base} checkpoint is quantised; experts are taken out of plain weights. "
            "Dequantise it first."
        )
    if base in known:
        return known[base]
    if base in dense_architectures():
        raise MoesaicError(f"{config.model_type} has no routed experts: carve it first.")
    raise MoesaicError(
        f"Architecture {base!r} is not supported. Mixtures of experts that are: "
        f"{', '.join(sorted(known))}."
    )


def base_arch(config: Config) -> Arch:
    """The architecture of any config, dense or a mixture of experts, converted or not.

    Raises:
        MoesaicError: it is unknown.
    """
    base, dense = config.model_type.removeprefix(PREFIX), dense_architectures()
    if base in dense:
        return dense[base]
    if base in moe_architectures() or any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return moe_arch(config)
    return dense_arch(config)


# --- the block -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoEFFN:
    """A routed block: ``y = sum_i w_i(x) f_i(x) + shared(x)``; tensors are the module's own."""

    arch: MoEArch
    block: nn.Module
    router: Any
    experts: Any
    routing: RoutingFunction
    shared: Callable[[Tensor], Tensor] | None
    shared_module: Any
    """The MLP of the shared path; None without one."""
    scale: float = 1.0
    """The factor by which the decoder layer multiplies the block's output before adding it."""

    @property
    def count(self) -> int:
        return self.routing.count

    @property
    def top_k(self) -> int:
        top_k: int = self.router.top_k
        return top_k

    @property
    def device(self) -> torch.device:
        device: torch.device = self.router.weight.device
        return device

    @property
    def width(self) -> int:
        """Neurons of one expert."""
        return int(self.experts.down_proj.shape[1 if self.experts.is_transposed else 2])

    @property
    def shared_width(self) -> int:
        """Neurons of the shared path, inside the block or beside it."""
        if self.shared_module is None:
            return 0
        return int(getattr(self.shared_module, self.arch.shared_names.down).weight.shape[1])

    def logits(self, x_TD: Tensor) -> Tensor:
        """The router's logits (T, E)."""
        logits_TE: Tensor = self.router(x_TD)[0]
        return logits_TE

    def weights_of(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate (M, D), up (M, D) and down (D, M) of expert ``i``, views."""
        both, down = self.experts.gate_up_proj[i], self.experts.down_proj[i]
        if self.experts.is_transposed:
            both, down = both.T, down.T
        gate, up = both.chunk(2) if self.experts.is_concatenated else (both[::2], both[1::2])
        return gate, up, down

    def hidden(self, i: int, x_TD: Tensor) -> Tensor:
        """The input of expert ``i``'s down projection (T, M)."""
        m = self.experts
        both = m.gate_up_proj[i].T if m.is_transposed else m.gate_up_proj[i]
        bias = m.gate_up_proj_bias[i] if m.has_bias else None
        h_TM: Tensor = m._apply_gate(F.linear(x_TD, both, bias))
        return h_TM

    def written(self, i: int, h_TM: Tensor) -> Tensor:
        """What expert ``i``'s down projection makes of its input (T, D)."""
        m = self.experts
        down = m.down_proj[i].T if m.is_transposed else m.down_proj[i]
        return F.linear(h_TM, down, m.down_proj_bias[i] if m.has_bias else None)

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
        logits_TE = self.logits(x_TD)
        allowed = None if allowed_E is None else allowed_E.to(x_TD.device).expand_as(logits_TE)
        return self.routing.weights(logits_TE, allowed)

    def bias_sum(self, x_TD: Tensor, allowed_E: Tensor | None = None) -> Tensor | float:
        """The sum of the experts' output biases times their combine weights (T, D); 0 without."""
        if not self.experts.has_bias:
            return 0.0
        bias_ED: Tensor = self.experts.down_proj_bias
        return self.combine_weights(x_TD, allowed_E) @ bias_ED.float()

    @property
    def shared_ffn(self) -> DenseFFN | None:
        """The shared path's MLP; None without one."""
        module = self.shared_module
        return None if module is None else dense_ffn(module, self.arch.shared_names)

    def shared_weighted(self, x_TD: Tensor) -> Tensor | None:
        """The input of the shared path's down projection times the path's own weight (T, M)."""
        ffn = self.shared_ffn
        if ffn is None:
            return None
        h_TM = ffn.hidden(x_TD).float()
        if self.arch.shared_gate is None:
            return h_TM
        gate = getattr(self.block, self.arch.shared_gate)
        return h_TM * torch.sigmoid(gate(x_TD)).float()

    def outputs(
        self,
        x_TD: Tensor,
        wanted_TE: Tensor,
        seen: Callable[[int, Tensor, Tensor], None] = lambda *_: None,
    ) -> Tensor:
        """f (T, E, D) for the experts that are wanted of each token, zero elsewhere.

        Args:
            x_TD: the block's input.
            wanted_TE: bool.
            seen: told of each expert its number, its tokens' rows (N,) and its h (N, M).
        """
        f_TED = x_TD.new_zeros(x_TD.shape[0], self.count, x_TD.shape[1])
        for i in wanted_TE.any(0).nonzero().flatten().tolist():
            rows = wanted_TE[:, i].nonzero().flatten()
            h_NM = self.hidden(i, x_TD[rows])
            seen(i, rows, h_NM)
            f_TED[rows, i] = self.written(i, h_NM)
        return f_TED

    def output(self, x_TD: Tensor) -> Tensor:
        """The block as it runs now, shared path included (T, D)."""
        y = self.block(x_TD.unsqueeze(0))
        y_1TD: Tensor = y[0] if isinstance(y, tuple) else y
        return y_1TD.squeeze(0)

    @contextmanager
    def restricted(self, allowed_E: Tensor) -> Iterator[None]:
        """Inside, the block routes as if only the allowed experts were there."""

        def route(_: nn.Module, args: object, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            logits_TE = out[0]
            allowed_TE = allowed_E.to(logits_TE.device).expand_as(logits_TE)
            weights_TK, chosen_TK = self.routing.choose(logits_TE, allowed_TE)
            return logits_TE, weights_TK.to(out[1].dtype), chosen_TK

        handle = self.router.register_forward_hook(route)
        try:
            yield
        finally:
            handle.remove()


def moe_ffn(layer: nn.Module, arch: MoEArch) -> MoEFFN:
    """The view of a routed layer."""
    block = arch.ffn_of(layer)
    router, experts = getattr(block, arch.router), getattr(block, arch.experts)
    module = None if arch.shared_at is None else attrgetter(arch.shared_at)(layer)
    shared = module
    if module is not None and arch.shared_gate is not None:
        gate = getattr(block, arch.shared_gate)
        shared = lambda x_TD: torch.sigmoid(gate(x_TD)) * module(x_TD)  # noqa: E731
    return MoEFFN(
        arch=arch,
        block=block,
        router=router,
        experts=experts,
        routing=RoutingFunction(router, arch.choice_bias),
        shared=shared,
        shared_module=module,
        scale=getattr(layer, "residual_multiplier", 1.0),
    )
