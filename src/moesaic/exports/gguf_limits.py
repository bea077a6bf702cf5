"""Limits of llama.cpp: files that it rejects or computes differently are refused before they are
made.

Found in ggml-org/llama.cpp: src/models/*.cpp, src/llama-hparams.h, conversion/*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moesaic.exports.form import head_dim_of
from moesaic.io.quantised import quantization_of
from moesaic.types import Config

TANH = "gelu_pytorch_tanh"
OTHERS = {"nemotron_h": "relu2", "gemma4": TANH, "gemma4_text": TANH}
"""Activations other than silu that llama.cpp's experts have, by architecture."""


def lacking(config: Config) -> list[str]:
    """Return the features that llama.cpp lacks for a checkpoint of this config."""
    return list(_lacking(config))


def _experts(config: Config) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return next((n for name in names if (n := getattr(config, name, None))), 0)


def _chosen(config: Config) -> list[int]:
    """Return the experts per token, in all layers or by layer."""
    names = ("num_experts_per_tok", "moe_k", "moe_topk")
    value = next((n for name in names if (n := getattr(config, name, None))), 0)
    return value if isinstance(value, list) else [value]


def _activation(config: Config) -> Iterator[str]:
    names = ("hidden_act", "mlp_hidden_act", "hidden_activation")
    act = next((act for name in names if (act := getattr(config, name, None))), "silu")
    if act not in ("silu", "swish", OTHERS.get(config.model_type)):
        yield f"the activation {act}: its experts know silu"


def _granite_attention(config: Config) -> Iterator[str]:
    head_dim = config.hidden_size // config.num_attention_heads
    if head_dim_of(config) != head_dim:
        yield f"heads of {head_dim_of(config)}: its Granite takes hidden size / heads, {head_dim}"


def _lacking(config: Config) -> Iterator[str]:
    count = _experts(config)
    if count:
        yield from _activation(config)
    if count > 1024:
        yield f"{count} experts: LLAMA_MAX_EXPERTS is 1024"
    chosen = _chosen(config)
    if max(chosen) > 20:  # two nodes each; graphs have room for eight a tensor
        yield f"{max(chosen)} experts per token: its graphs have no room for more than about 20"
    if min(chosen) < max(chosen):  # build_moe_ffn in src/llama-graph.cpp
        yield "experts per token by layer: it chooses the first's number, and adds up each's own"
    kinds = getattr(config, "layers_block_type", None) or ()
    if count and (getattr(config, "mlp_only_layers", None) or "mlp" in kinds):
        yield "dense layers between routed ones: its loader wants experts in every layer"
    if config.model_type in _BY_TYPE:
        yield from _BY_TYPE[config.model_type](config)


def _phi(config: Config) -> Iterator[str]:
    if config.intermediate_size != 4 * config.hidden_size:
        yield "a narrower FFN: its Phi converter writes four times the hidden size"


def _phimoe(config: Config) -> Iterator[str]:
    yield "PhiMoE under the name that transformers gives it"


def _glm(config: Config) -> Iterator[str]:
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        yield "llama3 rotary scaling: its GLM4-MoE converter writes no frequency factors"


def _normed(config: Config) -> Iterator[str]:
    kind, normed = config.model_type, config.model_type == "qwen3_moe"
    if config.norm_topk_prob != normed:
        yield f"norm_topk_prob={config.norm_topk_prob}: its {kind} knows only {normed}"


def _deepseek(config: Config) -> Iterator[str]:
    layers = config.num_hidden_layers
    if config.model_type == "deepseek_v2" and (config.n_group or 1) > 1:
        yield "groups scored by their best expert: it adds the two best, as DeepSeek-V3 does"
    lite = layers in (26, 27) or (layers, config.vocab_size) == (48, 128256)
    if lite != (config.q_lora_rank is None):
        yield f"q_lora_rank={config.q_lora_rank} at {layers} layers, which tell it Lite models"


def _deepseek_v4(config: Config) -> Iterator[str]:
    if (quantization_of(config) or {}).get("expert_dtype") != "fp4":
        yield "plain experts of DeepSeek-V4: its converter takes them packed, as released"


def _alternating(config: Config) -> Iterator[str]:
    """Require gpt-oss's pattern: llama.cpp gives every second layer full attention."""
    sliding = [attention == "sliding_attention" for attention in config.layer_types]
    if sliding != [i % 2 == 0 for i in range(len(sliding))]:
        yield "attention types that do not alternate, sliding first"


def _ernie(config: Config) -> Iterator[str]:
    expected = config.intermediate_size // config.num_key_value_heads
    width = config.moe_intermediate_size * (config.moe_num_shared_experts or 0)
    if width not in (0, expected):
        yield f"a shared expert that is not {expected} wide: dense width / key-value heads"


_BY_TYPE: dict[str, Callable[[Config], Iterator[str]]] = {
    "phi": _phi,
    "granitemoe": _granite_attention,
    "granitemoeshared": _granite_attention,
    "phimoe": _phimoe,
    "glm4_moe": _glm,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _normed),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek),
    "deepseek_v4": _deepseek_v4,
    "gpt_oss": _alternating,
    "ernie4_5_moe": _ernie,
}
"""Limits of llama.cpp's classes of single architectures."""
