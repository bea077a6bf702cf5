"""Checkpoints as their publishers write them, where transformers writes them otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from shrunken import small_model
from torch import Tensor

from moesaic.io.formats import BlockScaled, stored_name

FP8_FP4 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""What DeepSeek-V4's config says of its weights; that experts are in FP4 stands beside it."""
OWN_KEYS = {
    "expert_dtype": "fp4",
    "num_hash_layers": 2,
    "compress_ratios": [0, 128, 4, 128],
    "qk_rope_head_dim": 32,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "quantization_config": FP8_FP4,
}
TRANSFORMERS_KEYS = (
    "layer_types",
    "mlp_layer_types",
    "compress_rates",
    "rope_parameters",
    "partial_rotary_factor",
    "num_local_experts",
    "intermediate_size",
)
_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_FP8 = re.compile(r"\.(attn\.w[a-z_]+|shared_experts\.w[123])\.weight$")


def deepseek_v4(folder: Path) -> Path:
    """A DeepSeek-V4 as released: names of its own, experts in FP4, other matrices in FP8.

    Heads and streams are as wide as llama.cpp wants them.
    """
    model = small_model(
        "deepseek_v4",
        hidden_size=64,
        intermediate_size=64,
        head_dim=64,
        index_head_dim=64,
        hc_mult=4,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    form, tensors = BlockScaled({**FP8_FP4, "expert_dtype": "fp4"}), dict[str, Tensor]()
    scale = torch.zeros(1, 1, dtype=torch.float8_e8m0fnu)
    for stored, tensor in load_file(folder / "model.safetensors").items():
        name = _released(stored)
        like = dict(zip(form.beside, (tensor, scale), strict=True))
        if _EXPERT.search(name):
            parts = form.of("I8").parts(tensor, like)
        elif _FP8.search(name):
            rows, columns = tensor.shape
            whole = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
            whole[:rows, :columns] = tensor
            parts = dict(form.parts(whole, like))
            parts[""] = parts[""][:rows, :columns].contiguous()
        else:
            parts = {"": tensor}
        tensors |= {stored_name(name, end): part for end, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in TRANSFORMERS_KEYS}
    config |= {"moe_intermediate_size": 64, "n_routed_experts": 8, **OWN_KEYS}
    file.write_text(json.dumps(config))
    return folder


def _released(stored: str) -> str:
    """A tensor of DeepSeek-V4 by its own name; transformers adds to some when it writes them."""
    name = stored.removeprefix("model.").replace("embed_tokens.", "embed.")
    name = name.replace(".attn.norm.", ".attn.kv_norm.")
    return re.sub(r"^hc_head\.hc_", "hc_head_", name)
