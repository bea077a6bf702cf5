"""DeciLM: a Llama whose layers differ in the width of their feed-forward networks.

vLLM, SGLang and mlx-lm have it (``model_type`` nemotron-nas, as NVIDIA calls what its search
finds), llama.cpp too (deci); transformers has not. This file is copied beside the weights of an
export, whose ``config.json`` names it, so it needs transformers alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

BLOCK = 256
"""NVIDIA's ``ffn_mult``, which all engines read, can say multiples of this; vLLM alone reads
widths."""
PLAIN = {"no_op": False, "replace_with_linear": False}


class Block(dict[str, Any]):
    """A JSON object whose values are attributes, too, as vLLM reads them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def blocks_of(widths: Sequence[int], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``block_configs`` of layers with these widths, where a Llama's config says all else."""
    if any(width % BLOCK for width in widths):
        ffns: list[dict[str, Any]] = [{"intermediate_size": width} for width in widths]
    else:
        ffns = [{"ffn_mult": 1.5 * width / settings["hidden_size"]} for width in widths]
    group = settings["num_attention_heads"] // settings["num_key_value_heads"]
    attention = {**PLAIN, "n_heads_in_group": group}
    return [{"attention": attention, "ffn": {**PLAIN, **ffn}} for ffn in ffns]


def widths_of(settings: Mapping[str, Any]) -> list[int]:
    """The width of every layer; the inverse of :func:`blocks_of`.

    Raises:
        ValueError: there are not as many as layers, or one is none of a Llama.
    """
    blocks, layers = settings["block_configs"], settings["num_hidden_layers"]
    if len(blocks) != layers:
        raise ValueError(f"block_configs has {len(blocks)} entries for {layers} layers")
    widths = []
    for i, block in enumerate(blocks):
        ffn = block["ffn"]
        width = ffn.get("intermediate_size") or _width(ffn.get("ffn_mult") or 0, settings)
        alike = blocks_of([width], settings)[0]["attention"].items() <= block["attention"].items()
        if not alike or not width or not PLAIN.items() <= {**PLAIN, **ffn}.items():
            raise ValueError(f"block_configs[{i}] is no layer of a Llama: {block}")
        widths.append(width)
    return widths


def _width(multiplier: float, settings: Mapping[str, Any]) -> int:
    return BLOCK * -(-int(2 * multiplier * settings["hidden_size"] / 3) // BLOCK)


class DeciLMConfig(LlamaConfig):  # type: ignore[misc]
    """A Llama's config, and ``block_configs``, one for each layer."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[dict[str, Any]] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.block_configs = json.loads(json.dumps(block_configs or []), object_hook=Block)
        if block_configs:
            widths_of(vars(self))  # refuses others


class DeciLMForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama with an MLP of its own width in each layer."""

    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(config)
        for layer, width in zip(self.model.layers, widths_of(vars(config)), strict=True):
            narrow = copy.copy(config)
            narrow.intermediate_size = width
            layer.mlp = LlamaMLP(narrow)
        self.post_init()
