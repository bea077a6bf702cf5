"""Mixtures of experts: one table entry a ``model_type``, and the view that methods see.

Routing is never written down a second time here. :class:`Rule` is the architecture's own router
with its projection taken off: the code that runs in the model decides over the logits it is given,
so softmax or sigmoid, normalised or not, scaled, grouped and biased routers are right by
construction, and a set of allowed experts is scored exactly as it will be deployed.

Shape suffixes beside those of :mod:`moesaic.arch`::

    E routed experts    C candidate sets of experts    K experts a token runs
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch import DENSE, EXPERT_COUNTS, PREFIX, Arch, FFNNames, dense_arch
from moesaic.errors import MoesaicError

PLAIN = FFNNames()


@dataclass(frozen=True)
class MoEArch(Arch):
    """One mixture-of-experts architecture. Some of its layers may be dense."""

    count: str = "num_experts"
    """The config attribute that counts the routed experts."""
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
    dense: str | None = None
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

    def is_moe(self, layer: nn.Module) -> bool:
        return hasattr(self.ffn_of(layer), self.experts)

    def moe_layers(self, model: nn.Module) -> list[int]:
        """The decoder layers that route."""
        return [i for i, layer in enumerate(self.layers(model)) if self.is_moe(layer)]

    def view(self, layer: nn.Module) -> Any:
        """A :class:`MoEFFN` for a layer that routes, a DenseFFN for one that does not."""
        return moe_ffn(layer, self) if self.is_moe(layer) else super().view(layer)

    @property
    def shared_at(self) -> str | None:
        """Where the shared path is, relative to the decoder layer."""
        return self.beside if self.shared is None else f"{self.ffn_path}.{self.shared}"

    def dense_at(self, config: Any, layers: Collection[int]) -> dict[str, Any] | None:
        """The config attributes by which exactly these layers are dense; None if it has none."""
        if self.dense is None:
            return None
        if isinstance(getattr(config, self.dense), list):
            return {self.dense: sorted(layers)}
        return {self.dense: len(layers)} if set(layers) == set(range(len(layers))) else None

    def group_count(self, config: Any) -> int:
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


_DEEPSEEK: dict[str, Any] = {
    "count": "n_routed_experts",
    "shared": "shared_experts",
    "dense": "first_k_dense_replace",
}
_BIASED: dict[str, Any] = {
    "choice_bias": "e_score_correction_bias",
    "never": "e_score_correction_bias",
    "groups": "n_group",
    "per_group": 2,
}

MOE: dict[str, MoEArch] = {
    arch.model_type: arch
    for arch in (
        MoEArch("mixtral", count="num_local_experts"),
        MoEArch(
            "qwen2_moe",
            shared="shared_expert",
            shared_gate="shared_expert_gate",
            dense="mlp_only_layers",
        ),
        MoEArch("qwen3_moe", dense="mlp_only_layers"),
        MoEArch("olmoe"),
        MoEArch("deepseek_v2", groups="n_group", **_DEEPSEEK),
        MoEArch("deepseek_v3", **_DEEPSEEK, **_BIASED),
        MoEArch("glm4_moe", **_DEEPSEEK, **_BIASED),
        MoEArch(
            "ernie4_5_moe",
            count="moe_num_experts",
            shared="shared_experts",
            dense="moe_layer_start_index",
            choice_bias="moe_statics.e_score_correction_bias",
        ),
        MoEArch(
            "granitemoe",
            ffn_path="block_sparse_moe",
            count="num_local_experts",
            router="router",
        ),
        MoEArch(
            "granitemoeshared",
            ffn_path="block_sparse_moe",
            count="num_local_experts",
            router="router",
            beside="shared_mlp",
            shared_names=FFNNames("input_linear", "output_linear", "input_linear", "activation"),
        ),
        MoEArch("gpt_oss", count="num_local_experts", router="router", never="bias"),
        MoEArch("phimoe", count="num_local_experts", router="router"),
    )
}


def moe_arch(config: Any) -> MoEArch:
    """The table entry of a mixture of experts' config, reduced by us before or not.

    Raises:
        MoesaicError: the model is dense, quantised, or not in the table.
    """
    base = config.model_type.removeprefix(PREFIX)
    if getattr(config, "quantization_config", None) is not None:
        raise MoesaicError(
            f"This {base} checkpoint is quantised; experts are taken out of plain weights. "
            "Dequantise it first."
        )
    if base in MOE:
        return MOE[base]
    if base in DENSE:
        raise MoesaicError(f"{config.model_type} has no routed experts: carve it first.")
    raise MoesaicError(
        f"Architecture {base!r} is not supported. Mixtures of experts that are: "
        f"{', '.join(sorted(MOE))}."
    )


def base_arch(config: Any) -> Arch:
    """The table entry of any config, dense or a mixture of experts, converted or not."""
    base = config.model_type.removeprefix(PREFIX)
    if base in DENSE:
        return DENSE[base]
    if base in MOE or any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return moe_arch(config)
    return dense_arch(config)


# --- the router's own decision -------------------------------------------------------------------


def _floor(dtype: torch.dtype) -> float:
    """A logit whose softmax and sigmoid are exactly zero, and that stays finite in products."""
    return torch.finfo(dtype).min / 4


class Rule:
    """A router without its projection: logits in, the true combine weights out.

    Args:
        router: the module; not changed, and nothing of its weights is kept but the choice bias.
        choice_bias: the name of that bias inside the router.
    """

    def __init__(self, router: Any, choice_bias: str | None = None) -> None:
        self._router = _unbound(router)
        self._forward = type(router).forward
        self._choice_bias = choice_bias
        self.count: int = router.weight.shape[0]
        self.bias_E: Tensor | None = None
        if choice_bias is not None:
            self.bias_E = attrgetter(choice_bias)(router).detach().flatten()
            for part in choice_bias.split(".")[:-1]:
                self._router._modules[part] = _unbound(getattr(router, part))

    @torch.no_grad()
    def choose(self, logits_NE: Tensor, allowed_NE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts (N, K).

        Args:
            logits_NE: router logits, one row a token.
            allowed_NE: bool; the experts that are there. None: all.
        """
        bias_E = self.bias_E
        if allowed_NE is not None:
            logits_NE = logits_NE.masked_fill(~allowed_NE, _floor(logits_NE.dtype))
            if bias_E is not None:
                bias_E = bias_E.to(logits_NE.device).masked_fill(~allowed_NE, float("-inf"))
        self._set("weight", torch.eye(self.count, dtype=logits_NE.dtype, device=logits_NE.device))
        if self._router._parameters.get("bias") is not None:
            self._set("bias", logits_NE.new_zeros(self.count))
        if self._choice_bias is not None and bias_E is not None:
            self._set(self._choice_bias, bias_E.to(logits_NE.device))
        _, weights_NK, chosen_NK = self._forward(self._router, logits_NE)
        return weights_NK, chosen_NK

    def weights(self, logits_NE: Tensor, allowed_NE: Tensor | None = None) -> Tensor:
        """w, the combine weight of every expert, zero for those not chosen (N, E), float32."""
        weights_NK, chosen_NK = self.choose(logits_NE, allowed_NE)
        w_NE = torch.zeros(
            len(logits_NE), self.count + 1, device=logits_NE.device
        )  # one place more: a skipped expert's number is the count
        return w_NE.scatter_(1, chosen_NK, weights_NK.float())[:, :-1]

    def _set(self, name: str, tensor: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        module = self._router.get_submodule(owner)
        places = module._buffers if leaf in module._buffers else module._parameters
        places[leaf] = tensor


def _unbound(module: Any) -> Any:
    """A shallow copy with tables of tensors and modules of its own, and no hooks."""
    twin = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[table] = dict(module.__dict__[table])
    for table in ("_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[table] = OrderedDict()
    if hasattr(twin, "hidden_dim"):
        twin.hidden_dim = module.weight.shape[0]
    return twin


# --- the block -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoEFFN:
    """A routed block: ``y = sum_i w_i(x) f_i(x) + shared(x)``; tensors are the module's own."""

    arch: MoEArch
    block: nn.Module
    router: Any
    experts: Any
    rule: Rule
    shared: Callable[[Tensor], Tensor] | None
    shared_module: Any
    """The MLP of the shared path."""
    scale: float = 1.0
    """What the decoder layer multiplies the block's output with before it adds it."""

    @property
    def count(self) -> int:
        return self.rule.count

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
        """What the router decides on (T, E)."""
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

    def expert(self, i: int, x_TD: Tensor) -> Tensor:
        """f_i(x), the output of expert ``i`` without its weight (T, D)."""
        m = self.experts
        down = m.down_proj[i].T if m.is_transposed else m.down_proj[i]
        return F.linear(self.hidden(i, x_TD), down, m.down_proj_bias[i] if m.has_bias else None)

    def outputs(self, x_TD: Tensor, wanted_TE: Tensor) -> Tensor:
        """f (T, E, D) for the experts that are wanted of each token, zero elsewhere."""
        f_TED = x_TD.new_zeros(x_TD.shape[0], self.count, x_TD.shape[1])
        for i in wanted_TE.any(0).nonzero().flatten().tolist():
            rows = wanted_TE[:, i].nonzero().flatten()
            f_TED[rows, i] = self.expert(i, x_TD[rows])
        return f_TED

    def output(self, x_TD: Tensor) -> Tensor:
        """The block as it runs now, shared path included (T, D)."""
        y = self.block(x_TD.unsqueeze(0))
        y_1TD: Tensor = y[0] if isinstance(y, tuple) else y
        return y_1TD.squeeze(0)

    @contextmanager
    def restricted(self, allowed_E: Tensor) -> Iterator[None]:
        """Inside, the block routes as if only the allowed experts were there."""

        def route(_: nn.Module, args: Any, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            logits_TE = out[0]
            allowed_TE = allowed_E.to(logits_TE.device).expand_as(logits_TE)
            weights_TK, chosen_TK = self.rule.choose(logits_TE, allowed_TE)
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
        rule=Rule(router, arch.choice_bias),
        shared=shared,
        shared_module=module,
        scale=getattr(layer, "residual_multiplier", 1.0),
    )
