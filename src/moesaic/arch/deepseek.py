"""DeepSeekMoE (Dai et al., 2024), ``model_type`` deepseek: DeepSeekMoE-16B, CD-MoE's main model.

transformers does not have it. Its checkpoints bring modelling code of their own, for an old
transformers: current ones cannot import it. Here the model is built from transformers' own parts
(Llama's attention, Qwen2-MoE's experts and router, shared experts without a gate), under the same
names of tensors, so that no code of a checkpoint is run or needs to be trusted.
"""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers import initialization as init
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    Qwen2MoeExperts,
    Qwen2MoeMLP,
    Qwen2MoeTopKRouter,
)


@strict
class DeepseekConfig(LlamaConfig):
    """Config with the keys of DeepSeekMoE's ``config.json``, and their defaults there."""

    model_type = "deepseek"
    attribute_map = {"num_experts": "n_routed_experts"}  # noqa: RUF012

    vocab_size: int = 102_400
    moe_intermediate_size: int = 1407
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    aux_loss_alpha: float = 0.001
    seq_aux: bool = True

    def validate_architecture(self) -> None:
        """Refuse scores that the model's own code does not support either."""
        super().validate_architecture()
        if self.scoring_func != "softmax":
            raise ValueError(f"scoring_func {self.scoring_func!r} is not softmax")

    def routes(self, layer: int) -> bool:
        """Return True if a decoder layer routes."""
        late = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return self.n_routed_experts is not None and late


class DeepseekMoE(nn.Module):
    """Block of routed experts, and shared ones that every token runs."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.gate = Qwen2MoeTopKRouter(config)
        self.experts = Qwen2MoeExperts(config)
        shared = (config.n_shared_experts or 0) * config.moe_intermediate_size
        self.shared_experts = Qwen2MoeMLP(config, shared) if shared else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the block's output, of the shape of its input (B, L, D)."""
        x_TD = hidden_states.flatten(0, -2)
        _, weights_TK, chosen_TK = self.gate(x_TD)
        y_TD: Tensor = self.experts(x_TD, chosen_TK, weights_TK)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view_as(hidden_states)


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """Llama's decoder layer, with a mixture instead of its MLP in the layers that route."""

    def __init__(self, config: DeepseekConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.routes(layer_idx):
            self.mlp = DeepseekMoE(config)


class _Deepseek(PreTrainedModel):
    """Common part of the model with and without head."""

    config_class = DeepseekConfig
    _no_split_modules = ("DeepseekDecoderLayer",)

    def _init_weights(self, module: nn.Module) -> None:
        """Set random values, also in modules that transformers' initialisation does not cover."""
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, Qwen2MoeExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, Qwen2MoeTopKRouter):
            init.normal_(module.weight, mean=0.0, std=std)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for its decorator in this file


class DeepseekModel(_Deepseek, LlamaModel):
    """DeepSeekMoE without its head."""

    def __init__(self, config: DeepseekConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DeepseekDecoderLayer(config, i) for i in layers)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class DeepseekForCausalLM(_Deepseek, LlamaForCausalLM):
    """DeepSeekMoE with its head."""

    def __init__(self, config: DeepseekConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
