"""Type of each tensor in a GGUF file of a type such as q4_k_m: llama.cpp's own mixtures.

Their rule is ``llama_tensor_get_type`` of ggml-org/llama.cpp, src/llama-quant.cpp, for the types
that :data:`moesaic.config.GgufType` lists, without Falcon's and GLM5-next's exceptions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FILES = {"q5_k_m": "q5_k", "q4_k_m": "q4_k", "q4_k_s": "q4_k", "q3_k_m": "q3_k"}
"""Types of tensors by those of files, if these have other names."""
LOW, IQ3 = ("iq2_xxs", "iq2_xs", "iq1_s", "iq1_m"), "iq3_xxs"
KEPT = re.compile(
    r"_norm\.weight|ffn_gate_(inp|tid2eid)\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|"
    r"shortconv\.conv\.weight|indexer\.[kq]_proj\.weight|attn_rel_b\.weight|position_embd|"
    r"^token_types|time_mix_(first|[wva][012]|g[12]|decay_w[12]|lerp_fused)\.weight"
)
"""Pattern of the names of matrices that are not quantised."""
PARTS = {
    "head": r"^output\.weight",
    "embeddings": r"^(per_layer_)?token_embd\.weight",
    "values": r"attn_(qkv|kv_b|v)\.weight",
    "keys": r"attn_k\.weight",
    "queries": r"attn_q\.weight",
    "attn_output": r"attn_output\.weight",
    "down": r"ffn_down",
}
"""Parts of a model that the rule distinguishes, by patterns of tensors' names."""


@dataclass(frozen=True)
class Model:
    """Numbers of a model that the rule of types needs."""

    arch: str
    layers: int
    experts: int
    heads: int
    key_heads: int

    @property
    def is_70b(self) -> bool:
        """True for models of 70B, whose values are a small part of the weights."""
        layers = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}.get(self.arch)
        return self.layers == layers and (self.arch != "llama" or self.heads != self.key_heads)


def order(name: str) -> tuple[int, str]:
    """Return the sort key of a tensor in a file: by layer, those outside of layers first."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1, name


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Return True for matrices to quantise: no routers or small ones (row length: ``shape[0]``)."""
    return math.prod(shape[1:]) > 1 and name.endswith("weight") and not KEPT.search(name)


def mixture(rows: Mapping[str, int], type: str, model: Model, weighed: bool) -> dict[str, str]:
    """Return the types of tensors, whether or not a type's blocks divide their rows.

    Args:
        rows: row lengths by the names of all quantised tensors, sorted by :func:`order`.
        type: type of the file.
        model: the model's numbers.
        weighed: True if there is an importance matrix.
    """
    parts = {n: next((p for p, words in PARTS.items() if re.search(words, n)), "") for n in rows}
    if "head" not in parts.values():
        parts = {name: "head" if p == "embeddings" else p for name, p in parts.items()}
    values, seen, types = Counter(parts.values())["values"], Counter[str](), {}
    for name, part in parts.items():
        place = seen[part]
        seen[part] += 1
        if part == "down" and model.experts > 1 and type not in LOW:
            place = order(name)[0]
        chosen = _choices(part, place, values, model, weighed).get(type)
        if part == "head" and rows[name] % 256:
            chosen = "q8_0"
        types[name] = chosen or FILES.get(type, type)
        if part == "values" and model.is_70b and types[name] in ("q3_k", "q4_k"):
            types[name] = "q5_k" if type not in LOW else types[name]
        if part in ("values", "keys") and model.experts == 8 and type not in LOW:
            types[name] = "q8_0"
    return types


def _choices(
    part: str, place: int, values: int, model: Model, weighed: bool
) -> dict[str, str | None]:
    """Return a tensor's type for each type of file; None for the file's own type."""

    def low(chosen: str | None) -> dict[str, str | None]:
        return dict.fromkeys(LOW, chosen)

    def more(count: int) -> dict[str, str | None]:
        """Return q6_k for the first and last eighth, and every third between."""
        many = place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2
        return dict.fromkeys(("q4_k_m", "q5_k_m"), "q6_k" if many else None)

    grouped = model.key_heads > 0 and model.heads // model.key_heads >= 4
    early = place < model.layers // 8
    if part == "head":
        wide = ("q6_k", "q5_k_m", "q4_k_m", "q4_k_s", "q4_0", "iq4_xs", "q3_k_m", "q2_k")
        return low("q5_k") | {IQ3: "q5_k"} | dict.fromkeys(wide, "q6_k")
    if part == "embeddings":
        return low("q2_k") | {IQ3: "iq3_s"}
    if part == "values":
        return {
            **low("q4_k" if grouped or model.experts >= 4 else "q2_k"),
            **more(values),
            "q2_k": "q4_k" if grouped else "q3_k",
            IQ3: "q4_k" if grouped else None if weighed else "iq3_s",
            "q3_k_m": "q5_k" if place < 2 else "q4_k",
            "iq4_xs": "q5_k" if grouped else None,
            "q4_k_s": "q5_k" if place < 4 else None,
        }
    if part in ("keys", "queries"):
        return low("q4_k" if part == "keys" and model.experts == 8 else None) | {IQ3: "iq2_s"}
    if part == "down":
        return {
            **low("q2_k" if early else None),
            **more(model.layers),
            "q2_k": "q3_k",
            IQ3: None if weighed else "q4_k" if early else "q3_k",
            "q3_k_m": "q5_k" if place < model.layers // 16 else "q4_k",
            "iq4_xs": "q5_k" if early and not weighed else None,
            "q4_k_s": "q5_k" if early else None,
            "q4_0": "q4_1" if early and weighed else None,
        }
    if part == "attn_output" and model.experts == 8:
        also = ("q2_k", IQ3, "q3_k_m", "q4_k_s", "q4_k_m", "iq4_xs")
        return low("q5_k") | dict.fromkeys(also, "q5_k")
    if part == "attn_output":
        narrow = dict.fromkeys(("iq1_s", "iq1_m"), "iq2_xxs")
        return {**narrow, "q2_k": "q3_k", IQ3: "iq3_s", "q3_k_m": "q4_k"}
    return {}
