"""Writes checkpoints of well-known shapes without their values, to be predicted, timed or cut.

    python benchmarks/shapes.py DIR                    a config.json each: enough for dry runs
    python benchmarks/shapes.py DIR qwen1.5-moe-a2.7b --values random      28 GB of bfloat16
    python benchmarks/shapes.py DIR glm-4.5-air --values holes    200 GB that take no room
    python benchmarks/shapes.py DIR glm-4.5-air --values holes --fp8    the half of it
    python benchmarks/shapes.py DIR llama-2048 --values random             a small dense model
    python benchmarks/shapes.py DIR layers-4 layers-8 --values random     small mixtures
    python benchmarks/shapes.py DIR qwen3-moe-1b --values random    what peers.py compares memory at
    python benchmarks/shapes.py DIR gpt-oss-20b --values random    14 GB, experts in MXFP4

Shapes are written by hand as the published configs have them; parameters counted from them are
those of the models' cards. ``random`` repeats a pool of normal values, ``holes`` are zeros that the
file system does not store. Beside weights lies the tokenizer of tiny-moe.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moesaic.io.checkpoint import ShardWriter
from moesaic.io.models import skeleton
from moesaic.io.source import resolve
from moesaic.types import Config

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
"""How gpt-oss has its experts: codes, two a byte, and a scale for 32 of them."""
BLOCK = 128
"""Rows and columns that share a scale in FP8."""
POOL = 1 << 24
"""Random values that all weights are cut from: to draw every one would take minutes."""


def shapes(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """A config of hidden size, layers, heads, key-value heads and vocabulary."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    settings = dict(zip((*names, "vocab_size"), sizes, strict=True))
    return {"model_type": model_type, **settings, "tie_word_embeddings": False, **more}


SHAPES: dict[str, dict[str, Any]] = {
    "llama-2048": shapes("llama", 2048, 3, 32, 8, 32000, intermediate_size=8192),
    "olmoe-1b-7b": shapes("olmoe", 2048, 16, 16, 16, 50304, intermediate_size=1024)
    | {"num_experts": 64, "num_experts_per_tok": 8},
    "qwen1.5-moe-a2.7b": shapes("qwen2_moe", 2048, 24, 16, 16, 151936, intermediate_size=5632)
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    | {"num_experts": 60, "num_experts_per_tok": 4},
    "qwen3-30b-a3b": shapes("qwen3_moe", 2048, 48, 32, 4, 151936, intermediate_size=6144)
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
    | {"norm_topk_prob": True},
    "mixtral-8x7b": shapes("mixtral", 4096, 32, 32, 8, 32000, intermediate_size=14336)
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "glm-4.5-air": shapes("glm4_moe", 4096, 46, 96, 8, 151552, intermediate_size=10944)
    | {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1}
    | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"attention_bias": True, "num_nextn_predict_layers": 0, "head_dim": 128},
    "gpt-oss-120b": shapes("gpt_oss", 2880, 36, 64, 8, 201088, intermediate_size=2880)
    | {"num_local_experts": 128, "num_experts_per_tok": 4, "head_dim": 64},
    "gpt-oss-20b": shapes("gpt_oss", 2880, 24, 64, 8, 201088, intermediate_size=2880)
    | {"num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 64},
    "qwen3-235b-a22b": shapes("qwen3_moe", 4096, 94, 64, 4, 151936, intermediate_size=12288)
    | {"moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8}
    | {"head_dim": 128, "norm_topk_prob": True},
    "deepseek-v3": shapes("deepseek_v3", 7168, 61, 128, 128, 129280, intermediate_size=18432)
    | {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
    | {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
    | {"num_nextn_predict_layers": 0, "q_lora_rank": 1536, "kv_lora_rank": 512}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "qwen3-moe-1b": shapes("qwen3_moe", 1024, 12, 16, 4, 4096, head_dim=64)
    | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768},
}


def mixture(layers: int = 4, experts: int = 16, width: int = 128) -> dict[str, Any]:
    """A small mixture, of which one size is another."""
    of_experts = {"num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": width}
    return shapes("qwen3_moe", 256, layers, 4, 2, 4096, head_dim=64, **of_experts)


SHAPES |= {
    f"{size}-{value << doubled}": mixture(**{size: value << doubled})
    for size, value in (("layers", 4), ("experts", 16), ("width", 128))
    for doubled in range(4)
}


def tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """By name on disk the shape of every tensor; of gpt-oss experts in MXFP4."""
    result: dict[str, tuple[int, ...]] = {}
    model = skeleton(config, torch.bfloat16)
    for name, tensor in revert_weight_conversion(model, dict(model.state_dict())).items():
        shape = tuple(tensor.shape)
        if config.model_type == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            result[f"{name}_blocks"] = (experts, outputs, inputs // 32, 16)
            result[f"{name}_scales"] = (experts, outputs, inputs // 32)
        else:
            result[name] = shape
    return result


def write_random(config: Config, folder: Path) -> None:
    """Normal values of the config's own deviation; norms are ones, codes uniform."""
    writer, generator = ShardWriter(folder, shard_bytes=1 << 30), torch.Generator().manual_seed(0)
    pool = (torch.randn(POOL, generator=generator) * config.initializer_range).bfloat16()
    others = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (POOL,), generator=others, dtype=torch.uint8)
    for name, shape in tensors(config).items():
        if name.endswith("norm.weight"):
            values = torch.ones(shape, dtype=torch.bfloat16)
        elif name.endswith("_scales"):
            values = torch.full(shape, 120, dtype=torch.uint8)
        else:
            count, start = math.prod(shape), int(torch.randint(POOL, (1,), generator=generator))
            drawn = (codes if name.endswith("_blocks") else pool).roll(start)
            values = drawn.repeat(-(-count // POOL))[:count].view(shape).clone()
        writer.add(name, values)
    writer.close()


def write_holes(config: Config, folder: Path) -> None:
    """One file of zeros, of which only the header is stored."""
    header: dict[str, Any] = {}
    end = 0
    fp8 = "weight_block_size" in (getattr(config, "quantization_config", None) or {})
    for name, shape in tensors(config).items():
        stored = ("U8", 1) if name.endswith(("_blocks", "_scales")) else ("BF16", 2)
        parts = {name: (*stored, shape)}
        if fp8 and name.endswith("proj.weight"):
            blocks = tuple(-(-n // BLOCK) for n in shape)
            parts = {name: ("F8_E4M3", 1, shape), f"{name}_scale_inv": ("F32", 4, blocks)}
        for part, (dtype, item, dims) in parts.items():
            start, end = end, end + item * math.prod(dims)
            header[part] = {"dtype": dtype, "shape": list(dims), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[*SHAPES], metavar="NAME")
    parser.add_argument("--values", choices=("none", "random", "holes"), default="none")
    parser.add_argument("--fp8", action="store_true", help="holes as DeepSeek-V3 has its weights")
    parser.add_argument("--layers", type=int, help="this many of the layers")
    args = parser.parse_args(arguments)
    fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    for name in args.names:
        folder = args.folder / name
        folder.mkdir(parents=True)
        settings = {**SHAPES[name], "dtype": "bfloat16"}
        settings["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings["model_type"]]]
        settings |= {"quantization_config": fp8} if args.fp8 else {}
        if settings["model_type"] == "gpt_oss" and args.values != "none":
            settings["quantization_config"] = MXFP4
        settings |= {"num_hidden_layers": args.layers} if args.layers else {}
        text = json.dumps(settings, indent=1)
        (folder / "config.json").write_text(text, "utf-8")
        if args.values == "none":
            continue
        config = resolve(str(folder)).config
        {"random": write_random, "holes": write_holes}[args.values](config, folder)
        for file in resolve("tiny-moe").folder.glob("tokenizer*"):
            shutil.copyfile(file, folder / file.name)


if __name__ == "__main__":
    main()
