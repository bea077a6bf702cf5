"""What every engine is given: small random models, rebuilt by every verb that takes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from builders import MOE, VOCAB, int4_config, quantise, tiny_model, tiny_moe, tiny_tokenizer
from shrunken import small_model
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import nn
from transformers import PreTrainedTokenizerFast

from moesaic.api import verb
from moesaic.carving.more.config import MoREConfig
from moesaic.config import MethodConfig
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.exports.native import decide, write
from moesaic.io.formats import BlockFp8, CompressedTensors, Mxfp4Experts
from moesaic.io.source import resolve
from moesaic.methods.condense.config import CondenseConfig
from moesaic.methods.prune.config import PruneConfig
from moesaic.methods.skip.config import TopKConfig
from moesaic.methods.slim.config import SlimConfig

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads of 32, the smallest that engines have attention for."""
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 64},
    "qwen2_moe": {
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "mlp_only_layers": [],
    },
    "qwen3_moe": {"moe_intermediate_size": 64, "head_dim": 32},
    "deepseek_v3": {
        "moe_intermediate_size": 64, "intermediate_size": 128, "num_key_value_heads": 4,
        # On a CPU, vLLM has this attention for these two alone, which are the published model's.
        "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 32, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    "glm4_moe": {"moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32},
    "gpt_oss": {
        "num_hidden_layers": 4,  # without the third, attention does not alternate
        "intermediate_size": 64, "head_dim": 32,
        # mlx-lm and llama.cpp round YaRN's bounds, which shows in heads this small.
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": True,
        },
    },
    "olmoe": {"intermediate_size": 64, "num_key_value_heads": 4},
    "granitemoe": {"intermediate_size": 64},
    "granitemoeshared": {"intermediate_size": 64, "shared_intermediate_size": 96},
    "qwen3_next": {
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "head_dim": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "gemma4_text": {"moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32},
}  # fmt: skip
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 256, "mlp_bias": False}, "qwen2": {"intermediate_size": 256},
    "qwen3": {"intermediate_size": 256, "head_dim": 32},
}  # fmt: skip
FORMATS = {
    "deepseek_v3 in FP8": "fp8",
    "qwen3_moe in FP8": "fp8",
    "gpt_oss in MXFP4": "mxfp4",
    "qwen3_moe in int4": "int4",
    "llama in int4": "int4",
    "qwen3_next in bfloat16": "bfloat16",  # the one type of vLLM's linear attention on a CPU
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


PRUNED, SLIMMED = PruneConfig(keep=6), SlimConfig(keep=0.5)
VERBS: dict[str, MethodConfig] = {
    "prune": PRUNED,
    "prune --no-refit": PruneConfig(keep=6, refit=False),
    "prune --allocate layers": PruneConfig(keep=6, allocate="layers"),
    "slim": SLIMMED,
    "slim --no-refit": SlimConfig(keep=0.5, refit=False),
    "condense": CondenseConfig(keep="shared+routed", shared_gate="mean", candidates=(1,)),
    "condense --keep attention": CondenseConfig(keep="attention", candidates=(1,)),
    "condense --keep nothing": CondenseConfig(keep="nothing", candidates=(2,)),
    "skip --top-k 1": TopKConfig(top_k=1),
}
BY_LAYER: dict[str, MethodConfig] = {
    "slim --allocate layers": SlimConfig(keep=0.5, allocate="layers", multiple=8),
}
"""Layers differ afterwards: vLLM runs that as it is, by our own class."""
LISTED = ("glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""The models of which that is tried."""
DENSE_VERBS: dict[str, MethodConfig] = {
    "carve --method more": MoREConfig(active=0.75, layers="all"),
    "carve --method more --variant naive": MoREConfig(variant="naive", active=0.5, layers="all"),
    "carve --method more --variant static": MoREConfig(variant="static", active=0.75, layers="all"),
    "slim": SLIMMED,
    "slim --no-refit": SlimConfig(keep=0.5, refit=False),
    "slim --allocate layers": SlimConfig(keep=0.5, allocate="layers"),
}


def verbs_of(model: str) -> dict[str, MethodConfig]:
    """What is tried of a model; of one in few bits, how its bytes come out."""
    verbs = DENSE_VERBS if model.partition(" ")[0] in DENSE else VERBS
    if FORMATS.get(model, "bfloat16") != "bfloat16":
        return {name: verbs[name] for name in ("prune", "slim") if name in verbs}
    return verbs | BY_LAYER if model in LISTED else verbs


MODELS = {*MIXTURES, *DENSE, *FORMATS} - {"qwen3_next"}
CASES = [(model, verb) for model in sorted(MODELS) for verb in verbs_of(model)]
"""Pairs of a model and a verb."""

PLAIN = ("mixtral", "olmoe", "granitemoe", "granitemoeshared")
"""Mixtures all of whose layers route, and whose routers have no bias."""
REFUSED = {
    "prune --allocate layers": (
        *PLAIN,
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next in bfloat16",
        "gemma4_text",
    ),
    "condense": (*PLAIN, "gpt_oss", "gemma4_text"),
    "condense --keep attention": (*PLAIN, "gpt_oss", "gemma4_text"),
    "condense --keep nothing": ("gemma4_text",),
    "carve --method more": ("qwen2", "qwen3"),
    "carve --method more --variant naive": ("qwen2", "qwen3"),
}
"""By verb, the models of which there is no native result."""


@dataclass(frozen=True)
class Form:
    """A result in the form that engines read, or why there is none."""

    folder: Path | None
    source: Path | None = None
    """The result that it was exported from, itself where it is native."""
    config: Any = None
    """What the folder's says, as the class that was written there has it."""
    listed: bool = False
    """vLLM runs the result itself, by our class."""
    refusal: str = ""

    def folder_for(self, engine: str) -> Path | None:
        """What an engine is given."""
        return self.source if engine == "vllm" and self.listed else self.folder

    def config_of(self, engine: str) -> Any:
        """The config of what an engine is given."""
        folder = self.folder_for(engine)
        return self.config if folder == self.folder else resolve(str(folder)).config


def falling_back_to_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer of the kind that llama.cpp wants of a Gemma 4."""
    tokens = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]
    tokens += map(chr, range(0x400, 0x400 + VOCAB - len(tokens)))
    raw = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, [("a", "b")], byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


def base(called: str, folder: Path) -> Path:
    """Write the model that verbs start from."""
    name = called.partition(" ")[0]
    sizes = {**SIZES, **MIXTURES.get(name, DENSE.get(name, {}))}
    if called in FORMATS:
        wide = "intermediate_size" if name == "gpt_oss" else "moe_intermediate_size"
        sizes |= {wide: 256, "num_key_value_heads": 4}
    make_model = tiny_moe if name in MOE else tiny_model if name in DENSE else small_model
    model = make_model(name, **sizes)
    with torch.no_grad():
        for bias, values in model.named_buffers():
            if bias.endswith("e_score_correction_bias"):
                values.abs_()  # a score below zero is below the zero of other groups in mlx-lm
    if FORMATS.get(called) == "bfloat16":
        model.bfloat16()
    model.save_pretrained(folder)
    tokenizer = falling_back_to_bytes() if name == "gemma4_text" else tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    if FORMATS.get(called) == "fp8":
        others = [
            f"model.layers.{i}.self_attn.{name}"
            for i, layer in enumerate(model.model.layers)
            for name, module in layer.self_attn.named_modules()
            if isinstance(module, nn.Linear)
        ]
        quantised = FP8 | {"modules_to_not_convert": ["lm_head", *others]}
        quantise(
            folder, BlockFp8(quantised), lambda n, t: ".mlp." in n and n.endswith("_proj.weight")
        )
    elif FORMATS.get(called) == "mxfp4":
        projections = ("experts.down_proj", "experts.gate_up_proj")
        quantise(folder, Mxfp4Experts(MXFP4), lambda name, _: name.endswith(projections))
    elif FORMATS.get(called) == "int4":
        form = CompressedTensors(int4_config(group=32))
        quantise(folder, form, lambda n, t: ".mlp." in n and n.endswith("_proj.weight"))
    return folder


def make(model: str, asked: str, place: Path) -> Form:
    """What a verb makes of a model, exported where it is not of the architecture's own class."""
    start = place / "base" / model
    if not start.exists():
        base(model, start)
    config = verbs_of(model)[asked]
    result, native = place / model / asked / "result", place / model / asked / "native"
    ids = torch.randint(3, VOCAB, (32, 64), generator=torch.Generator().manual_seed(1))
    listed = model in LISTED and asked in BY_LAYER
    try:
        verb(config.verb, str(start), config, calibration=Tokens(ids)).save(result)
        source = resolve(str(result))
        if not source.config.model_type.startswith("moesaic_"):
            return Form(result, result, source.config)
        native.mkdir()
        decided = decide(source)
        write(source, decided, native)  # the suite itself verifies it
        return Form(native, result, decided.config, listed)
    except MoesaicError as refusal:
        return Form(None, result, listed=listed, refusal=str(refusal))
