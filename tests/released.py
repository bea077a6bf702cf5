"""Checkpoints as their publishers write them, where transformers writes them otherwise."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from builders import blank
from safetensors.torch import load_file, save_file
from shrunken import SIZES, small_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from moesaic.io.checkpoint import ShardWriter
from moesaic.io.formats import BlockFp8, CompressedTensors, Mxfp4Experts, stored_name

FP8_FP4 = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
"""What DeepSeek-V4's config says of its weights; that experts are in FP4 stands beside it."""
OWN_KEYS = {
    "expert_dtype": "fp4", "num_hash_layers": 2, "compress_ratios": [0, 128, 4, 128],
    "qk_rope_head_dim": 32, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32,
        "beta_slow": 1,
    },
    "quantization_config": FP8_FP4,
}  # fmt: skip
TRANSFORMERS_KEYS = (
    "layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor",
    "num_local_experts", "intermediate_size",
)  # fmt: skip
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
    form, tensors = BlockFp8({**FP8_FP4, "expert_dtype": "fp4"}), dict[str, Tensor]()
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


# --- configs as published, small -----------------------------------------------------------------

HIDDEN, DENSE, WIDE, EXPERTS = 64, 96, 32, 8
DEPTHS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
ROUTED = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SMALLER: dict[str, int] = {
    **{name: size for name, size in SIZES.items() if type(size) is int and size > 0},
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size", "ffn_hidden_size"), DENSE),
    **dict.fromkeys(("intermediate_size_mlp", "block_ff_dim", "shared_intermediate_size"), DENSE),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDE),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_expert_dim"), WIDE),
    **dict.fromkeys(("moe_top_k", "experts_per_token", "num_experts_per_token"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "v_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("global_head_dim", "swa_head_dim", "swa_v_head_dim", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_head_dim", "index_head_dim"), 32),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "full_attention_interval"), 2),
    **dict.fromkeys(("num_global_key_value_heads", "swa_num_key_value_heads", "o_groups"), 2),
    **dict.fromkeys(("attn_layer_offset", "num_hash_layers", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("num_attention_heads", "swa_num_attention_heads"), 4), "kv_n_heads": 2,
    "moe_latent_size": 48, "rotary_dim": 8, "mamba_expand": 1, "expand": 1, "mamba_dt_rank": 4,
    "time_step_rank": 4, "n_shared_experts": 2,
}  # fmt: skip
"""Sizes of a small model by the names that published configs have for them."""
PARTS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "mm_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "vt_num_hidden_layers", "vt_num_attention_heads"), 2),
    **dict.fromkeys(("vt_hidden_size", "vt_intermediate_size", "vision_output_dim"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 32),
    **dict.fromkeys(("patch_size", "init_pos_emb_height", "init_pos_emb_width"), 4),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "projection_dim"), HIDDEN),
    **dict.fromkeys(("head_dim", "global_head_dim", "image_size", "position_embedding_size"), 16),
    "num_position_embeddings": 16,
}
"""The same of parts beside a language model."""


def shrunk(published: dict[str, Any]) -> dict[str, Any]:
    """A published config with every key and small sizes; of its layers a few, one of each kind."""
    config = copy.deepcopy(published)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    if text is not config:  # or the class would take a large one of its own
        config.setdefault("vision_config", dict.fromkeys(PARTS, 1))
    for name, part in config.items():
        if isinstance(part, dict) and name in ("vision_config", "audio_config"):
            small = {k: PARTS[k] for k, size in part.items() if type(size) is int and k in PARTS}
            # a class may have names of its own for these, and large sizes after them
            part |= {k.removeprefix("vt_"): size for k, size in small.items()} | small
            part |= {"deepstack_visual_indexes": [0]} if "deepstack_visual_indexes" in part else {}
    heads = text.get("num_attention_heads")
    own_keys = heads is not None and heads == text.get("num_key_value_heads")
    ungrouped = text.get("n_group") in (None, 1)
    width = text.get("moe_intermediate_size")
    of_experts = width is None or {*_several(width)} == {text.get("intermediate_size")}
    _fewer_layers(text)
    for name, value in [*text.items()]:
        numbers = _several(value)
        if name not in SMALLER or name in DEPTHS:
            continue
        if not (name in ("n_group", "topk_group") and ungrouped):
            small = [min(n, SMALLER[name]) if type(n) is int else n for n in numbers]
            text[name] = small if isinstance(value, list) else small[0]
    for nested in (text[k] for k in ("attn_config", "ffn_config") if isinstance(text.get(k), dict)):
        nested |= {k: SMALLER[k] for k, v in nested.items() if type(v) is int and k in SMALLER}
    if own_keys:
        text["num_key_value_heads"] = text["num_attention_heads"]
    if any(text.get(name) for name in ROUTED) and of_experts:
        grouped = (text.get("quantization_config") or {}).get("quant_method") == "mxfp4"
        text["intermediate_size"] = 2 * WIDE if grouped else WIDE  # half of it is a group
    for part in (config, text):
        for name, value in part.items():
            if re.search("_(id|index|token)$", name):
                each = _several(value)
                tokens = [300 + n % 80 if type(n) is int and n > 300 else n for n in each]
                part[name] = tokens if isinstance(value, list) else tokens[0]
        for rope in (v for k, v in part.items() if k.startswith("rope_") and isinstance(v, dict)):
            _shrink_rotary(text, rope)
        quantization = part.get("quantization_config") or {}
        if quantization.get("weight_block_size"):
            quantization["weight_block_size"] = [16, 16]
    return config


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _fewer_layers(text: dict[str, Any]) -> None:
    """Leave of the layers the first of each kind, and four at least."""
    depth = next((text[name] for name in DEPTHS if name in text), 0)
    each = [k for k, v in text.items() if isinstance(v, list | str) and len(v) == depth > 0]
    kinds = [*zip(*(map(str, text[k]) for k in each), strict=True)]
    chosen = sorted({kinds.index(kind) for kind in kinds} | {*range(min(4, depth))})[:7]
    for name, value in text.items():
        if isinstance(value, list | str) and len(value) in (depth, depth + 1) and depth:
            taken = [*(value[i] for i in chosen), *value[depth:]]
            text[name] = "".join(taken) if isinstance(value, str) else taken
        elif name in DEPTHS:
            text[name] = len(chosen)


def _shrink_rotary(text: dict[str, Any], rope: dict[str, Any]) -> None:
    """Give rotary settings the sizes of heads of 16."""
    if "qk_rope_head_dim" in text and "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = text["qk_rope_head_dim"] / text["head_dim"]
    share = rope.get("partial_rotary_factor", text.get("partial_rotary_factor") or 1.0)
    half = int(16 * share) // 2
    if "mrope_section" in rope:
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    for name in ("long_factor", "short_factor"):
        if name in rope:
            rope[name] = rope[name][:half]


def rebuilt(published: dict[str, Any], folder: Path) -> Any:
    """A small random model of a published config, half of which is never used.

    Every second expert is never chosen, and every second neuron has nothing in its column of the
    down projection.

    Returns:
        the model, bfloat16 with routers in float32 where its class keeps them so. The folder has
        the config with all its keys, and weights in the format that it says.
    """
    folder.mkdir(parents=True)
    small = shrunk(published)
    formats = {k: small.pop(k) for k in ("quantization_config", "expert_dtype") if k in small}
    (folder / "config.json").write_text(json.dumps(small))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    whole = config.get_text_config() is not config
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16).eval()
    wide = model._keep_in_fp32_modules_strict or ()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _fill(name, tensor, any(part in name for part in wide))
        for name, module in model.named_modules():
            _halve(name, module)
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 8 * embedding.std() + embedding.abs().max()
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        own = {n.replace("model.blocks.", "model.layers."): t for n, t in load_file(file).items()}
        tensors |= own  # names that transformers 5.23 writes and cannot read: layers of Kimi-K2.5
        file.unlink()
    said = formats.get("quantization_config") or (small.get("text_config") or {}).get(
        "quantization_config"
    )
    writer = ShardWriter(folder, 200_000)
    for name, tensor in tensors.items():
        for stored in _in_format(name, tensor, said).items():
            writer.add(*stored)
    writer.close()
    (folder / "config.json").write_text(json.dumps({**small, **formats}))
    return model


_ROUTER = re.compile(r"(?:^|\.)(?:gate|router)(?:\.\w+)?$")
_DOWN = re.compile(r"(?:^|\.)(?:down_proj|w2|fc2|dense_4h_to_h|output_linear)$")
_BESIDE = re.compile(r"vision|visual|audio|multi_modal|mm_projector")
_AS_MADE = re.compile(r"inv_freq|A_log|dt_bias|\.D$|rotary|position|tid2eid")
_PLAIN = re.compile(r"embed|lm_head|head\.|norm|\.gate\.|router|vision|visual|projector|conv")


def _fill(name: str, tensor: Tensor, wide: bool) -> None:
    if not tensor.is_floating_point() or _AS_MADE.search(name):
        return
    values = torch.randn(tensor.shape)
    if tensor.dim() > 1:
        size = 1 if "embed" in name else tensor.shape[-1]
        values = values / size**0.5
    else:
        values = tensor.float() + 0.05 * values.abs()
    tensor.data = values if wide else values.to(torch.bfloat16)


def _halve(name: str, module: nn.Module) -> None:
    """Let nobody choose every second expert, and every second neuron write nothing."""
    if _BESIDE.search(name):
        return
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    for leaf, tensor in own.items():
        path = f"{name}.{leaf}"
        if leaf == "weight" and _ROUTER.search(name) and len(tensor) >= EXPERTS:
            tensor[1:EXPERTS:2] = 0
            tensor[1:EXPERTS:2, 0] = -300
            tensor[0:EXPERTS:2, 0] = 0
        elif re.search("correction_bias|expert_bias", leaf) or path.endswith("router.bias"):
            tensor.flatten()[1:EXPERTS:2] = -1000
        elif leaf == "tid2eid":
            chosen = torch.rand(len(tensor), EXPERTS // 2).argsort(1)[:, : tensor.shape[1]]
            tensor.copy_(2 * chosen)
        elif leaf == "down_proj" and tensor.dim() == 3:
            turned = getattr(module, "is_transposed", not hasattr(module, "is_concatenated"))
            (tensor[:, 1::2] if turned else tensor[:, :, 1::2]).zero_()
        elif leaf == "weight" and _DOWN.search(name):
            tensor[:, 1::2] = 0


def _in_format(name: str, tensor: Tensor, said: dict[str, Any] | None) -> dict[str, Tensor]:
    """A tensor as a checkpoint of a format stores it; of formats that are not read, by its look."""
    method = (said or {}).get("quant_method")
    form: Any = None
    matrix = tensor.dim() == 2 and name.endswith(".weight") and not _PLAIN.search(name)
    if method == "fp8" and matrix and not any(n % 16 for n in tensor.shape):
        form = BlockFp8(said or {})
    elif method == "mxfp4" and name.endswith(("experts.down_proj", "experts.gate_up_proj")):
        form = Mxfp4Experts(said or {})
    elif method == "compressed-tensors" and ".experts." in name:
        form = CompressedTensors(said or {})
    elif method == "modelopt" and matrix:
        codes = torch.randint(256, (len(tensor), tensor.shape[1] // 2)).to(torch.uint8)
        scale = torch.ones(len(tensor), tensor.shape[1] // 16).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale": scale, f"{name}_scale_2": torch.ones(())}
    if form is None:
        return {name: tensor}
    parts = form.parts(tensor.float(), blank(form, tensor))
    return {stored_name(name, end): part for end, part in parts.items()}


# --- what was published --------------------------------------------------------------------------

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text()
)
"""Configs as they were published; of their keys those that matter here.

Among them: layers that use what another one's indexer chose (GLM-5.2), a router that divides by a
sum that may be zero (MiniMax-M2), weights in FP8, MXFP4 and INT4.
"""
