"""Tiny random models of every causal language model that transformers has, by rule.

A config class says by its attributes which sizes it knows; most have the same few names.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from moesaic.io.models import skeleton

TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every model_type with a causal language model."""

LARGEST = 5_000_000
"""Parameters of a tiny model, at most."""

SIZES: dict[str, Any] = {
    name: size
    for size, names in {
        384: "vocab_size vocab_size_per_layer_input",
        256: "max_position_embeddings n_positions",
        64: "intermediate_size mamba_d_ssm ffn_dim ffn_hidden_size",
        32: "hidden_size n_embd d_model word_embed_proj_dim",
        24: (
            "shared_expert_intermediate_size shared_intermediate_size "
            "moe_shared_expert_intermediate_size shared_experts_intermediate_size"
        ),
        16: (
            "moe_intermediate_size expert_ffn_hidden_size index_head_dim mamba_d_head "
            "mamba_head_dim chunk_size mamba_chunk_size"
        ),
        8: (
            "head_dim sliding_window num_experts num_local_experts n_routed_experts "
            "moe_num_experts kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim "
            "v_head_dim index_topk linear_key_head_dim linear_value_head_dim linear_head_dim "
            "mamba_d_state ssm_state_size hidden_size_per_layer_input"
        ),
        4: (
            "num_hidden_layers num_attention_heads mamba_n_heads mamba_num_heads mamba_dt_rank "
            "n_layer n_head n_layers n_heads laurel_rank"
        ),
        2: (
            "num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts n_group "
            "index_n_heads linear_num_key_heads linear_num_value_heads linear_num_heads"
        ),
        1: "n_shared_experts topk_group first_k_dense_replace mamba_n_groups n_groups",
        0: "pad_token_id bos_token_id eos_token_id num_mtp_layers num_nextn_predict_layers",
    }.items()
    for name in names.split()
}
SIZES["tie_word_embeddings"] = False


def sections(*sizes: int) -> dict[str, Any]:
    """Positions in three dimensions, which share what of a head is turned."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes)}
    return {"rope_parameters": rope}


HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}

MORE: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "phimoe": {"router_jitter_noise": 0.01, "input_jitter_noise": 0.0},
    "mixtral": {"intermediate_size": 16},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2, "position_embedding_type": None,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
        "num_hidden_layers": 5,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "gemma4_text": {"enable_moe_block": True},
    "minimax_m3_vl_text": {
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "dense_intermediate_size": 48,
    },
    "llama4_text": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 96},
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_vl_text"), sections(2, 1, 1)),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "glm_image_text"), sections(2, 1, 1)),
    **dict.fromkeys(("glm4v_moe_text", "glm4v_text", "glm_ocr_text"), sections(1, 1, 0)),
    "ernie4_5_moe": {"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4},
    "qwen3_moe": {"norm_topk_prob": True},
    "dots3_note_text": {"layer_types": ["indexed_attention"] * 4},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense"] * 3 + ["sparse"], "adapter_in_dim": 32, "adapter_out_dim": 32,
    },
    "dots3_note_audio_encoder": {
        "adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 16,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "hc_lowrank": 8,
    },
    "inkling_text": {
        "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "d_rel": 4,
        "rel_extent": 8, "n_shared_experts": 2, "logits_mup_width_multiplier": 1.0,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    "inkling2_text": {
        "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1, "intermediate_size": 16, "partial_rotary_factor": 0.5,
        "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2,
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 2,
        "layer_types": ["sliding_attention"]
        + ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    **{
        kind: {"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
            "mrope_section": [1, 0, 0], "mrope_interleaved": True,
        }}
        for kind in ("qwen3_5_text", "qwen3_5_moe_text")
    },
    "glm5_next_text": {"index_kpool": 4, "qk_rope_head_dim": 0},
    **dict.fromkeys(("olmo_hybrid", "kimi_linear", "bailing_hybrid"), HYBRID),
}  # fmt: skip
"""What some need beside, by model_type."""


def attributes(kind: type) -> set[str]:
    """The names that a config class knows."""
    names = {*inspect.signature(kind.__init__).parameters}
    for base in kind.__mro__:
        names |= {*getattr(base, "__annotations__", {})}
    aliases: dict[str, str] = getattr(kind, "attribute_map", None) or {}
    return names | {*aliases} | {*aliases.values()}


def small_config(model_type: str, **changes: Any) -> Any:
    """The config of a tiny model."""
    kind = CONFIG_MAPPING[model_type]
    names = attributes(kind)
    sizes = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in sizes:  # every head has keys of its own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return kind(**{**sizes, **MORE.get(model_type, {}), **changes})


def wholes() -> list[str]:
    """Every model_type that has parts beside a language model."""
    kinds = CONFIG_MAPPING.items()
    return [n for n, kind in kinds if "text_config" in getattr(kind, "sub_configs", ())]


def small_whole(model_type: str, language: str) -> Any:
    """A tiny random model with parts beside a language model of some type."""
    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    types = {n: (getattr(usual, n, None) or sub).model_type for n, sub in kind.sub_configs.items()}
    types["text_config"] = language
    parts = {name: small_config(part).to_dict() for name, part in types.items()}
    config = kind(**parts)
    torch.manual_seed(0)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).float().eval()
    if model.num_parameters() > 10 * LARGEST:
        raise ValueError(f"it would have {model.num_parameters():,} parameters")
    return model


def small_model(model_type: str, **changes: Any) -> Any:
    """A tiny random model; routers send tokens everywhere, and biases matter."""
    config = small_config(model_type, **changes)
    size = skeleton(config).num_parameters()
    if size > LARGEST:
        raise ValueError(f"it would have {size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dtype == torch.int64 and tensor.dim() == 2:  # of each token's experts
                experts = torch.rand(len(tensor), config.n_routed_experts).argsort(1)
                tensor.copy_(experts[:, : tensor.shape[1]])
            if not tensor.is_floating_point() or "inv_freq" in name:
                continue
            routes = any(part in name for part in ("router", ".gate.", "correction_bias"))
            routes |= name.endswith("expert_bias")
            tensor.add_(torch.randn_like(tensor), alpha=0.5 if routes else 0.05)
    return model
