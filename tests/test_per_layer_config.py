"""What differs from layer to layer is said in config.json as other programs read it."""

import copy
import json

import pytest
import torch
from builders import MOE, OLD, converted, loaded, logits, saved, tiny_moe
from shrunken import small_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moesaic.arch.lookup import moe_arch
from moesaic.errors import MoesaicError
from moesaic.exports.llamacpp import lacking
from moesaic.per_layer_config import listed
from moesaic.plans.cut import CutLayer

WIDTHS, TOP_KS = (8, 12, 16), (1, 2, 1)


def slimmed(width, **changes):
    """All eight experts, the first neurons of each."""
    return CutLayer(torch.arange(8), torch.arange(width).repeat(8, 1), 16, **changes)


def routed(model):
    return moe_arch(model.config).moe_layers(model)


def uneven(moe_type):
    """A model whose layers have widths and experts a token of their own."""
    model = tiny_moe(moe_type)
    layers = routed(model)
    model = converted(model, {i: slimmed(WIDTHS[i]) for i in layers[:-1]})
    return converted(model, {i: CutLayer(top_k=TOP_KS[i]) for i in layers})


@pytest.mark.parametrize("moe_type", sorted({*MOE} - {"phimoe"}))  # whose router takes two always
@torch.no_grad()
def test_config_json_describes_each_layer_and_the_model_is_the_same(moe_type, tokens, tmp_path):
    """By transformers' schema, and as lists; with a head and without; saved once more, too."""
    model = uneven(moe_type)
    source = saved(tmp_path / "out", copy.deepcopy(model), {})
    said = json.loads((source.folder / "config.json").read_text("utf-8"))
    arch, layers = moe_arch(model.config), routed(model)
    width, chosen = arch.width, str(arch.chosen)
    widths = [WIDTHS[i] if i in layers[:-1] else 16 for i in range(3)]
    top_ks = [TOP_KS[i] if i in layers else 2 for i in range(3)]
    assert said[width] == widths
    assert said[chosen] == top_ks
    wanted = [{width: w, chosen: k} for w, k in zip(widths, top_ks, strict=True)]
    assert [*said["per_layer_config"].values()] == wanted
    config = AutoConfig.from_pretrained(source.folder)
    for name, numbers in ((width, widths), (chosen, top_ks)):
        assert [getattr(layer, name) for layer in config.per_layer_config] == numbers
        assert getattr(config, name) == numbers

    again = loaded(source.folder)
    assert torch.equal(logits(again, tokens), logits(model, tokens))
    bare = AutoModel.from_pretrained(source.folder, trust_remote_code=True).eval()
    assert type(bare).__name__ == said["auto_map"]["AutoModel"].partition(".")[2]
    hidden = bare(tokens.input_ids).last_hidden_state
    assert torch.equal(hidden, again.base_model(tokens.input_ids).last_hidden_state)
    again.save_pretrained(tmp_path / "again")
    assert (
        json.loads((tmp_path / "again/config.json").read_text())["per_layer_config"]
        == said["per_layer_config"]
    )


def test_lists_go_when_layers_are_alike_again_or_differ_in_more(tokens, tmp_path):
    model = converted(tiny_moe("mixtral"), {0: slimmed(8)})
    assert model.config.intermediate_size == [8, 16, 16]
    converted(model, {i: CutLayer(top_k=1) for i in range(3)})
    assert model.config.num_experts_per_tok == [1, 1, 1]
    fewer = CutLayer(torch.arange(6))
    some = converted(copy.deepcopy(model), {1: fewer})
    assert some.config.num_experts_per_tok == 2
    assert some.config.intermediate_size == 16
    assert not some.config.is_heterogeneous
    every = converted(copy.deepcopy(some), dict.fromkeys((0, 2), fewer))
    assert every.config.num_local_experts == 6
    assert every.config.num_experts_per_tok == [1, 1, 1]
    again = saved(tmp_path, every, {}).load()
    assert torch.equal(logits(again, tokens), logits(every, tokens))


@pytest.mark.parametrize("name", ["intermediate_size", "num_experts_per_tok"])
def test_a_list_of_the_wrong_length_is_refused_in_one_line(name, tmp_path):
    file = saved(tmp_path, uneven("mixtral"), {}).folder / "config.json"
    said = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**said, name: said[name][:-1]}), "utf-8")
    for read in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(MoesaicError) as refusal:
            read.from_pretrained(tmp_path)
        assert str(refusal.value) == (
            f"config.json: {name} lists 2 numbers, but there are 3 layers."
        )


def test_vllm_is_given_only_what_it_builds_as_we_do(monkeypatch):
    """It makes experts of the base's kind and routes by itself, whatever was there."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", None)
    for layer, builds in (
        (slimmed(8), True),
        (CutLayer(top_k=1), True),
        (CutLayer(beta=0.5, rule="top2"), False),
        (slimmed(8, uneven=True), False),
        (CutLayer(torch.arange(6)), False),
    ):
        config = copy.deepcopy(converted(tiny_moe("mixtral"), {1: layer}).config)
        config._attn_implementation = "vllm"
        if builds:
            AutoModel.from_config(config)
            continue
        with pytest.raises(MoesaicError, match="vLLM's Transformers backend cannot run this"):
            AutoModel.from_config(config)


@pytest.mark.parametrize(
    ("moe_type", "normed"),
    [
        ("mixtral", True),
        pytest.param("jamba", False, marks=pytest.mark.skipif(OLD, reason="no rule")),
    ],
)
def test_whether_one_experts_weight_is_one_is_said_where_the_base_leaves_it_open(moe_type, normed):
    """vLLM takes a lone expert's weight as the router's score unless it is told otherwise."""
    model = small_model(moe_type)
    assert not hasattr(model.config, "norm_topk_prob")
    first = routed(model)[0]
    assert converted(model, {first: CutLayer(top_k=1)}).config.norm_topk_prob == normed


def test_only_what_engines_read_may_be_a_list():
    config = uneven("ernie4_5_moe").config
    assert listed(config) == {"moe_intermediate_size", "intermediate_size", "moe_k"}
    assert config.num_experts_per_tok == config.moe_k == [2, 2, 1]
    with pytest.raises(Exception, match="vocab_size"):
        config.vocab_size = [1, 2, 3]


def test_llamacpp_lacks_experts_a_token_by_layer():
    """Also where the architecture's own config takes a list."""
    model = small_model("hunyuan_v1_moe")
    top_k = moe_arch(model.config).mixture(model.model.layers[0]).top_k
    fewer = {i: CutLayer(top_k=top_k - (i == 0)) for i in routed(model)}
    differing = converted(model, fewer).config
    assert differing.model_type == "hunyuan_v1_moe"
    (lack,) = lacking(differing)
    assert lack.startswith("experts per token by layer")


@pytest.mark.skipif(OLD, reason="this transformers has no such model")
@torch.no_grad()
def test_settings_of_a_layer_type_are_found_where_widths_differ(tokens, tmp_path):
    """Gemma 4 asks for one setting of all layers of a type when it is read."""
    model = small_model("gemma4_text", enable_moe_block=False, num_experts=None)
    layers = {i: CutLayer(None, torch.arange(16 + 8 * i)[None], 64) for i in range(4)}
    source = saved(tmp_path, model, layers)
    assert source.config.model_type == "moesaic_gemma4_text"
    assert torch.equal(logits(loaded(tmp_path), tokens), logits(model, tokens))


@pytest.mark.skipif(OLD, reason="this transformers has no such model")
@torch.no_grad()
def test_layers_of_twice_the_width_stay_so(tokens, tmp_path):
    """As in Gemma 4 E2B, whose last layers share keys and values."""
    types = ["sliding_attention", "full_attention"] * 2
    sharing = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "layer_types": types}
    model = small_model("gemma4_text", enable_moe_block=False, num_experts=None, **sharing)
    widths = [64, 64, 128, 128]
    halves = {i: torch.arange(w // 2)[None] for i, w in enumerate(widths)}
    layers = {i: CutLayer(None, half, widths[i]) for i, half in halves.items()}
    source = saved(tmp_path, model, layers)
    assert (source.config.model_type, source.config.intermediate_size) == ("gemma4_text", 32)
    assert torch.equal(logits(loaded(tmp_path), tokens), logits(model, tokens))


@torch.no_grad()
def test_layer_types_are_those_of_the_base(tokens, tmp_path):
    """transformers 5.17 renames LFM2's ``conv`` in configs of classes that are not its own."""
    model = small_model("lfm2_moe")
    kinds = [*model.config.layer_types]
    cut = CutLayer(torch.arange(8), torch.arange(8).repeat(8, 1), 16)
    source = saved(tmp_path, model, {routed(model)[0]: cut})
    assert source.config.model_type == "moesaic_lfm2_moe"
    assert source.config.layer_types == kinds
    assert torch.equal(logits(loaded(tmp_path), tokens), logits(model, tokens))
