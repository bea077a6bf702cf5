"""Tiny random mixtures of experts of every architecture in the table."""

from __future__ import annotations

from typing import Any

import torch
from conftest import SMALL, tiny_model

MOE_SMALL: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 16,
}

COUNT: dict[str, str] = {
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
    "ernie4_5_moe": "moe_num_experts",
    "granitemoe": "num_local_experts",
    "granitemoeshared": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "phimoe": "num_local_experts",
}
MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 2.5,
}
MOE_EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    "deepseek_v2": {
        **MLA,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
        "n_shared_experts": 1,
    },
    "deepseek_v3": {**MLA, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "glm4_moe": {
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_k": 2,
    },
    "granitemoeshared": {"shared_intermediate_size": 24},
    "gpt_oss": {"head_dim": 8, "sliding_window": 8},
    "phimoe": {"router_jitter_noise": 0.01, "input_jitter_noise": 0.0},
}


def tiny_moe(model_type: str, experts: int = 8, top_k: int = 2, **changes: Any) -> Any:
    """A random model whose routers send tokens everywhere and whose choice biases matter."""
    extra = {**MOE_EXTRA.get(model_type, {}), COUNT[model_type]: experts}
    key = "moe_k" if model_type == "ernie4_5_moe" else "num_experts_per_tok"
    settings = {**MOE_SMALL, "tie_word_embeddings": False, **extra, key: top_k, **changes}
    model = tiny_model(model_type, **settings)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            router = ".gate.weight" in name or ".router.weight" in name
            if router or name.endswith(("router.bias", "e_score_correction_bias")):
                scale = 0.5 if router else 0.3
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=scale)
    return model
