"""Limits of the engines that serve native exports, read in their own sources.

transformers is not in the table: every export is run there before it is kept. ``tests/engines``
tries vLLM, mlx-lm and llama.cpp: they compute what nothing is said of here. SGLang is read, not
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from moesaic.arch.decilm import BLOCK, DeciLMConfig
from moesaic.exports.targets import head_dim_of
from moesaic.foreign import Config
from moesaic.io.quantised import quantization_of

TANH = "gelu_pytorch_tanh"
OTHERS = {"nemotron_h": "relu2", "gemma4": TANH, "gemma4_text": TANH}
"""Architectures whose experts have another activation than silu, wherever they are known."""


def limits(config: Config, ep: int = 1) -> dict[str, list[str]]:
    """By engine, what it lacks for a checkpoint of this config; an empty list where nothing.

    Args:
        config: the export's.
        ep: expert-parallel size.
    """
    return {name: list(engine(config, ep)) for name, engine in ENGINES.items()}


def _experts(config: Config) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return next((n for name in names if (n := getattr(config, name, None))), 0)


def _chosen(config: Config) -> list[int]:
    """Experts that a token runs, in all layers or in each."""
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


def _decilm(config: Config) -> Iterator[str]:
    if any("ffn_mult" not in block["ffn"] for block in config.block_configs):
        yield f"widths that are no multiples of {BLOCK}: its DeciLM reads no others"


def _vllm(config: Config, ep: int) -> Iterator[str]:
    """vllm-project/vllm: model_executor/models/{granitemoe,granitemoeshared,glm4_moe,gpt_oss}.py.

    ``determine_expert_map`` (layers/fused_moe/layer.py) spreads a remainder of experts over the
    first ranks. ``topk_softmax`` (csrc/moe/topk_softmax_kernels.cu) has a fused kernel for powers
    of two and multiples of 64, and a slower path for all other counts.
    """
    if not _experts(config):
        return
    yield from _activation(config)
    if config.model_type in ("granitemoe", "granitemoeshared"):
        yield from _granite_attention(config)
        if config.attention_bias:
            yield "attention biases: its Granite builds the projections with bias=False"
    if config.model_type == "gpt_oss":
        yield from _alternating(config)


def _irregular(layer_types: Sequence[str]) -> bool:
    """Whether other layers than every fourth have full attention."""
    return any((kind == "full_attention") != (i % 4 == 3) for i, kind in enumerate(layer_types))


def _mlx(config: Config, ep: int) -> Iterator[str]:
    """ml-explore/mlx-lm: mlx_lm/models/*.py."""
    kind, method = config.model_type, (quantization_of(config) or {}).get("quant_method")
    if kind == "granitemoeshared":
        yield "GraniteMoeShared: it has no such class"
    if kind == "qwen2_moe" and config.tie_word_embeddings:
        yield "tied embeddings: its Qwen2-MoE has a head of its own (export --untie writes one)"
    if kind == "qwen2_moe" and config.mlp_only_layers:
        yield "dense layers between routed ones: its Qwen2-MoE wants experts in every layer"
    if kind == "gpt_oss" and method != "mxfp4":
        yield "experts that are not in MXFP4: its gpt-oss does not find their names"
    if kind == "qwen3_next" and _irregular(config.layer_types):
        yield "full attention elsewhere than in every fourth layer: one number says where it is"
    alone = kind in ("deepseek_v3", "glm4_moe") and config.num_experts_per_tok == 1
    if alone and config.norm_topk_prob:
        yield "one expert per token: its weight is not normalised there"
    if kind == DeciLMConfig.model_type:
        yield from _decilm(config)
        if head_dim_of(config) != config.hidden_size // config.num_attention_heads:
            yield f"heads of {head_dim_of(config)}: its DeciLM takes hidden size / heads"
    if method == "fp8" and kind != "deepseek_v3":
        yield "weights in FP8: it reads them in DeepSeek-V3 alone"
    if method == "compressed-tensors":
        yield "weights in compressed-tensors: it does not read them"


def _sglang(config: Config, ep: int) -> Iterator[str]:
    """sgl-project/sglang: srt/models/{granitemoeshared,glm4_moe,nemotron_nas}.py; layers/moe."""
    if config.model_type == DeciLMConfig.model_type:
        yield from _decilm(config)
        if config.mlp_bias:
            yield "biases of MLPs: its DeciLM leaves them out"
    count = _experts(config)
    if not count:
        return
    yield from _activation(config)
    if config.model_type == "granitemoeshared":
        yield "GraniteMoeShared: its decoder layer does not take what its model calls it with"
    if config.model_type in ("glm4_moe", "mixtral") and config.tie_word_embeddings:
        yield "tied embeddings: its head is a tensor of its own (export --untie writes one)"
    if count % ep:
        yield f"{count} experts over {ep} ranks: it asserts that they divide"


def _llamacpp(config: Config, ep: int) -> Iterator[str]:
    """ggml-org/llama.cpp: src/models/*.cpp, src/llama-hparams.h, conversion/*.py."""
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
    if config.model_type in _LLAMACPP:
        yield from _LLAMACPP[config.model_type](config)


def _llamacpp_phi(config: Config) -> Iterator[str]:
    if config.intermediate_size != 4 * config.hidden_size:
        yield "a narrower FFN: its Phi converter writes four times the hidden size"


def _llamacpp_phimoe(config: Config) -> Iterator[str]:
    yield "PhiMoE under the name that transformers gives it"


def _llamacpp_glm(config: Config) -> Iterator[str]:
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        yield "llama3 rotary scaling: its GLM4-MoE converter writes no frequency factors"


def _llamacpp_normed(config: Config) -> Iterator[str]:
    kind, normed = config.model_type, config.model_type == "qwen3_moe"
    if config.norm_topk_prob != normed:
        yield f"norm_topk_prob={config.norm_topk_prob}: its {kind} knows only {normed}"


def _llamacpp_deepseek(config: Config) -> Iterator[str]:
    layers = config.num_hidden_layers
    if config.model_type == "deepseek_v2" and (config.n_group or 1) > 1:
        yield "groups scored by their best expert: it adds the two best, as DeepSeek-V3 does"
    lite = layers in (26, 27) or (layers, config.vocab_size) == (48, 128256)
    if lite != (config.q_lora_rank is None):
        yield f"q_lora_rank={config.q_lora_rank} at {layers} layers, which tell it Lite models"


def _llamacpp_deepseek_v4(config: Config) -> Iterator[str]:
    if (quantization_of(config) or {}).get("expert_dtype") != "fp4":
        yield "plain experts of DeepSeek-V4: its converter takes them packed, as released"


def _alternating(config: Config) -> Iterator[str]:
    """gpt-oss: every second layer looks at all tokens, whatever the config says."""
    sliding = [attention == "sliding_attention" for attention in config.layer_types]
    if sliding != [i % 2 == 0 for i in range(len(sliding))]:
        yield "attention types that do not alternate, sliding first"


def _llamacpp_ernie(config: Config) -> Iterator[str]:
    expected = config.intermediate_size // config.num_key_value_heads
    width = config.moe_intermediate_size * (config.moe_num_shared_experts or 0)
    if width not in (0, expected):
        yield f"a shared expert that is not {expected} wide: dense width / key-value heads"


_LLAMACPP: dict[str, Callable[[Config], Iterator[str]]] = {
    "phi": _llamacpp_phi,
    "granitemoe": _granite_attention,
    "granitemoeshared": _granite_attention,
    "phimoe": _llamacpp_phimoe,
    "glm4_moe": _llamacpp_glm,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _llamacpp_normed),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _llamacpp_deepseek),
    "deepseek_v4": _llamacpp_deepseek_v4,
    "gpt_oss": _alternating,
    "ernie4_5_moe": _llamacpp_ernie,
}
"""What its classes of single architectures lack."""
ENGINES: dict[str, Callable[[Config, int], Iterator[str]]] = {
    "vllm": _vllm,
    "mlx-lm": _mlx,
    "sglang": _sglang,
    "llama.cpp": _llamacpp,
}
