"""Architectures that a rule finds do what is said of them; ``-m slow`` tries every one."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from builders import OLD, applied, equal, loaded, nightly, saved, stream_of, weights
from contract import TOKENS, beside, held, logits
from safetensors.torch import save_file
from shrunken import TYPES, small_config, small_model, small_whole

import moesaic
from moesaic import (
    FitConfig,
    MoesaicError,
    PruneConfig,
    SkipConfig,
    SlimConfig,
    Tokens,
    TopKConfig,
    TuneConfig,
)
from moesaic.arch import support_table
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.exports.quantised_model import tap
from moesaic.fitting.candidates import forms
from moesaic.io.models import predicts_tokens
from moesaic.io.source import Source, resolve
from moesaic.methods.condense.config import KEEPS, CondenseConfig
from moesaic.methods.condense.method import obstacle
from moesaic.metrics.forward import count_routing
from moesaic.observation.stats import Tally, square_sums, tally_of
from moesaic.plans.cut import CutLayer

SCRIPTS = Path(__file__).parent.parent / "scripts"
TEXT = Tokens(TOKENS)
SOME = (
    "afmoe",  # sentences to a router with a bias of its block
    "falcon_h1",  # layers that return a tuple of one, buffers that another module's code fills
    "gemma4_text",  # experts in the decoder layer itself, with norms of their own
    "gpt_neox",  # a head of another name on disk
    "glm_moe_dsa",  # layers that hand on more than hidden states
    "inkling_text",  # shared experts that the router weighs
    "hunyuan_v1_moe",  # no attribute for the shared path
    "jamba",  # experts and dense layers of one width
    "laguna",  # a factor of the block
    "lfm2",  # an activation function that is no module
    "llama4_text",  # scores that scale what experts are given, layers that route by a list
    "qwen3_5_moe",  # a part that sees
    "nemotron_h",  # layers without FFN, experts without gates, another prefix on disk
    "stablelm",
)

old = pytest.mark.skipif(OLD, reason="this transformers has no such language model alone")


def said_of(model_type):
    found = support_table()
    if model_type in found["unsupported"]:
        return "unsupported"
    return "moe" if model_type in found["moe"] else "dense"


@pytest.mark.nightly  # by day, six are tried in laws/test_architectures.py
@pytest.mark.parametrize("model_type", SOME)
def test_it_does_what_is_said_of_it(model_type):
    assert held(model_type) == (said_of(model_type), "")


@old
def test_names_of_a_language_model_that_only_its_whole_knows_are_refused():
    """By themselves its experts, which stand in the layer on disk, are pruned and slimmed."""
    kind, reason = held("mistral_large4")
    assert kind == "unsupported"
    assert reason.startswith("Parts beside text: MoesaicError")
    assert "have names that are not read" in reason


@old
def test_one_tensor_for_several_of_the_model_is_refused_by_name(tmp_path):
    """transformers splits Sarvam's queries, keys and values by the sizes of a live model."""
    small_model("sarvam_moe").save_pretrained(tmp_path)
    for verb, config in (
        (moesaic.prune, PruneConfig(keep=6)),
        (moesaic.slim, SlimConfig(keep=0.5)),
    ):
        with pytest.raises(MoesaicError, match="query_key_value.* is one tensor for several of"):
            verb(str(tmp_path), config, calibration=TEXT)


@pytest.mark.nightly
def test_a_language_model_of_many_options_is_held_within_its_whole():
    assert held("glm5_next") == ("moe", "")


@old
@pytest.mark.parametrize(
    ("whole", "language"),
    [
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        *(
            pytest.param(*pair, marks=pytest.mark.nightly)
            for pair in (
                ("mistral3", "mistral4"),
                ("glm4v_moe", "glm4v_moe_text"),
                ("internvl", "qwen3_moe"),
                ("kimi_k25", "deepseek_v3"),
                ("mistral3", "mistral"),
                ("gemma4", "gemma4_text"),
                ("llama4", "llama4_text"),
                ("minimax_m3_vl", "minimax_m3_vl_text"),
            )
        ),
    ],
)
def test_parts_beside_a_language_model_keep_their_bytes(whole, language):
    torch.manual_seed(0)
    beside(whole, language)


@old
@torch.no_grad()
def test_experts_that_lie_turned_on_disk_stay_so(tmp_path):
    """Qwen3-VL's mixtures are published so; transformers reads both and writes the other one."""
    assert predicts_tokens("qwen3_vl_moe_text")
    model = small_model("qwen3_vl_moe_text", moe_intermediate_size=24)
    base, out = tmp_path / "base", tmp_path / "out"
    model.save_pretrained(base)

    def turned(folder):
        experts = ("gate_up_proj", "down_proj")
        return {
            name: t.mT.contiguous() if t.dim() == 3 and name.endswith(experts) else t
            for name, t in weights(folder).items()
        }

    save_file(turned(base), base / "model.safetensors", {"format": "pt"})
    source = Source("base", base)
    assert torch.equal(logits(source.load()), logits(model))
    arch = base_arch(model.config)
    few = torch.arange(6)
    orders = torch.rand(6, 24).argsort(1)[:, :8].sort(1).values
    layers = {i: CutLayer(few, orders, 24) for i in arch.moe_layers(model)}
    applied(source, model, layers, out)
    saved(tmp_path / "live", model, layers)
    assert equal(turned(out), weights(tmp_path / "live"))
    assert torch.equal(logits(Source("out", out).load()), logits(model))


@old
def test_a_language_model_without_a_class_of_its_own_is_not_trained(tmp_path):
    """What training writes is the language model alone, and nothing could open it."""
    small_whole("qwen3_vl", "qwen3_vl_text").save_pretrained(tmp_path / "whole")
    with pytest.raises(MoesaicError, match="no class for qwen3_vl_text outside of the whole"):
        moesaic.tune(str(tmp_path / "whole"), TuneConfig(steps=1), text=[{"input_ids": [1, 2]}])


def test_experts_in_the_decoder_layer_itself_are_not_condensed(tmp_path):
    """Nor does a search offer it."""
    model = small_model("gemma4_text")
    model.save_pretrained(tmp_path)
    offered = {form.name.split()[0] for form in forms(resolve(str(tmp_path)), FitConfig(memory=1))}
    assert offered == {"prune", "slim"}
    arch = base_arch(model.config)
    layer = arch.layers(model)[0]
    for keep in KEEPS:
        assert "stand in the decoder layer" in obstacle(arch.view(layer), layer, keep)


@torch.no_grad()
@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", *map(nightly, ("gemma4_text", "llama4_text", "nemotron_h"))]
)
def test_what_passes_experts_is_what_their_view_says(model_type):
    """The same tokens enter each expert, with the same activations."""
    model = small_model(model_type)
    arch = base_arch(model.config)
    i = arch.moe_layers(model)[0]
    layer = arch.layers(model)[i]
    view, before, tally = arch.mixture(layer), logits(model), Tally()
    down = f"{arch.inside}{arch.experts}.{view.matrices[1]}"

    def note(_, h_NM, expert):
        tally.add("calls_E", torch.tensor(len(h_NM)), expert, view.count)
        tally.add("square_EM", square_sums(h_NM.float()), expert, view.count)

    with count_routing(model) as routed, tap(layer, arch, [down], note):
        assert torch.equal(logits(model), before)
    wanted = Tally()
    for site in stream_of(model, TEXT, [i]):
        assert tally.added["calls_E"].tolist() == routed[i].counts
        assert torch.equal(tally.added["calls_E"], tally_of(site, {"calls_E"}).added["calls_E"])
        for x_TD in site.inputs():
            w_TE = site.view.combine_weights(x_TD)
            for e in (w_TE != 0).any(0).nonzero().flatten().tolist():
                rows = w_TE[:, e].nonzero().flatten()
                h_NM = site.view.hidden(e, x_TD[rows]).float()
                if view.parts.inward:
                    h_NM = h_NM * w_TE[rows, e, None]
                wanted.add("square_EM", square_sums(h_NM), e, view.count)
    found, expected = (t.added["square_EM"] for t in (tally, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-9)


@torch.no_grad()
def test_scores_of_one_expert_a_token_scale_what_it_is_given(tmp_path):
    """Llama 4 as it is published: Eq. 3's loss is the block's own, and nothing can be skipped."""
    model = small_model("llama4_text", num_experts_per_tok=1)
    arch = base_arch(model.config)
    i = arch.moe_layers(model)[0]
    block = arch.ffn_of(arch.layers(model)[i])
    entered = []
    block.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    logits(model)
    config = PruneConfig(keep=5, refit=False)
    result = moesaic.prune(copy.deepcopy(model), config, text=TEXT)
    pruned = arch.ffn_of(arch.layers(result.model)[i])
    error = (pruned(entered[0])[0] - block(entered[0])[0]).norm().item()
    assert result.analyses[i]["loss"] == pytest.approx(error, rel=1e-4)
    assert result.model.config.model_type == "llama4_text"
    alike = SlimConfig(keep=0.5, shared=0.5, allocate="uniform", refit=False)
    narrow = loaded(moesaic.slim(copy.deepcopy(model), alike, text=TEXT).save(tmp_path / "out"))
    assert (narrow.config.model_type, narrow.config.intermediate_size) == ("llama4_text", 32)
    assert narrow.config.intermediate_size_mlp == 96
    for skipping in (SkipConfig(), TopKConfig(top_k=2)):
        with pytest.raises(MoesaicError, match="nothing to skip|from 1 to 1 works"):
            moesaic.skip(model, skipping, text=TEXT)


@torch.no_grad()
def test_an_mlp_with_bounds_of_its_own_is_asked_for_them(tmp_path):
    """MiniMax M3's, whose gates and ups are apart on disk; act(gate) * up is another model."""
    model = small_model("minimax_m3_vl_text")
    arch = base_arch(model.config)
    assert isinstance(arch, MoEArch)
    assert arch.shared_names.custom_act
    x_TD = 300 * torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    view = arch.mixture(arch.layers(model)[1])
    ffn, module = view.shared_ffn, view.shared_module
    torch.testing.assert_close(ffn.output(ffn.hidden(x_TD)), module(x_TD))
    plain = replace(ffn, custom_act=False, act=torch.nn.functional.silu)
    assert not torch.allclose(plain.output(plain.hidden(x_TD)), module(x_TD), rtol=0.1)
    config = SlimConfig(keep=0.5, shared=0.5, allocate="uniform", refit=True)
    predicts_tokens("minimax_m3_vl_text")
    model.save_pretrained(tmp_path / "base")
    assert any("shared_experts.gate_proj" in name for name in weights(tmp_path / "base"))
    disk = moesaic.slim(str(tmp_path / "base"), config, text=TEXT)
    again = loaded(disk.save(tmp_path / "out"))
    assert again.config.shared_intermediate_size == 12
    live = moesaic.slim(model, config, text=TEXT)
    assert equal(dict(again.state_dict()), dict(live.model.state_dict()))
    with pytest.raises(MoesaicError, match="one projection of an MLP's gates and ups"):
        moesaic.condense(model, CondenseConfig(count=1, keep="attention"), text=TEXT)


@old
@pytest.mark.parametrize(
    "there", [(), ("preprocessor_config.json",), ("processor_config.json", "chat_template.jinja")]
)
def test_processors_of_images_are_copied_if_they_are_there(there, tmp_path):
    base = tmp_path / "base"
    small_whole("qwen3_vl_moe", "qwen3_vl_moe_text").save_pretrained(base)
    for name in there:
        (base / name).write_text('{ "image_processor_type":  "Qwen2VLImageProcessorFast" }')
    config = PruneConfig(keep=6, score="frequency", refit=False)
    out = moesaic.prune(str(base), config, text=TEXT).save(tmp_path / "out")
    before, after = ({p.name for p in f.iterdir() if p.is_file()} for f in (base, out))
    assert after == before | {"README.md"}
    for name in there:
        assert (out / name).read_bytes() == (base / name).read_bytes()


@old
def test_a_head_of_ours_divides_a_loss_by_the_tokens_that_it_is_told():
    """Of all batches before the weights move."""
    assert predicts_tokens("qwen3_vl_text")
    model, ids = small_model("qwen3_vl_text"), torch.ones(1, 5, dtype=torch.int64)
    mean, total = (model(ids, labels=ids, num_items_in_batch=n).loss.item() for n in (None, 1))
    assert total == pytest.approx(4 * mean)


def test_a_result_that_is_only_the_language_model_is_warned_of(caplog):
    beside("llava", "llama")
    assert "only the language model" in caplog.text


@old
def test_a_result_that_is_only_the_language_model_reads_no_images(tmp_path):
    small_whole("qwen3_vl_moe", "qwen3_vl_moe_text").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").write_text("{}")
    config = SkipConfig()
    out = moesaic.skip(str(tmp_path / "base"), config, text=TEXT).save(tmp_path / "out")
    assert not [*out.glob("*processor*")]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_every_architecture_is_as_said(model_type):
    assert held(model_type)[0] == said_of(model_type)


def test_the_list_is_complete():
    found = support_table()
    listed = [*found["moe"], *found["dense"], *({*found["unsupported"]} & {*TYPES})]
    if transformers.__version__ != found["transformers"]:  # an older one lacks some
        listed = [model_type for model_type in listed if model_type in TYPES]
    assert sorted(listed) == sorted(TYPES)
    assert len(found["moe"]) >= 50
    assert len(found["dense"]) >= 40
    assert len(found["beside"]) >= 25
    assert not {*found["beside"]} & {*TYPES}


@pytest.mark.parametrize("reason", ["", "A norm follows every expert."])
def test_a_multimodal_type_is_listed_whatever_came_of_it(reason):
    sys.path.insert(0, str(SCRIPTS))
    import architectures

    result = {"moe": ["mixtral"], "dense": [], "beside": ["seer"], "unsupported": {}}
    architectures.note(result, "seer", "beside", reason)
    assert result["beside"] == ([] if reason else ["seer"])
    assert result["unsupported"] == ({"seer": reason} if reason else {})


def test_the_page_is_made_from_the_list():
    sys.path.insert(0, str(SCRIPTS))
    import architectures

    found = support_table()
    assert architectures.PAGE.read_text() == architectures.page(found)
    numbers = f"{len(found['dense'])} dense ones and {len(found['moe'])} mixtures of experts"
    assert numbers in (architectures.ROOT / "README.md").read_text("utf-8")


def test_an_odd_router_is_named(monkeypatch):
    """What was found, and what was not."""
    model = small_model("mixtral")
    config = model.config
    config.num_hidden_layers = 3  # another key for the same class
    import transformers.models.mixtral.modeling_mixtral as mixtral

    def forward(self, hidden_states, weather):
        raise AssertionError

    monkeypatch.setattr(mixtral.MixtralTopKRouter, "forward", forward)
    with pytest.raises(MoesaicError, match="MixtralTopKRouter chooses by weather too"):
        base_arch(config)


def test_a_shared_path_that_is_averaged_is_refused():
    """cohere2_moe halves the sum, if its config says so: its view would be wrong."""
    average = {"num_shared_experts": 1, "shared_expert_combination_strategy": "average"}
    with pytest.raises(MoesaicError, match="not simply added"):
        base_arch(small_config("cohere2_moe", **average))
    average["shared_expert_combination_strategy"] = "sum"
    assert base_arch(small_config("cohere2_moe", **average)).shared == "shared_experts"


def test_the_command(command, done):
    out = done("inspect", "--json")
    assert json.loads(out).keys() >= {"moe", "dense", "unsupported"}
    code, out, _ = command("inspect")
    mixtures, _, dense = out.partition("dense models")
    assert code == 0
    assert "mixtral" in mixtures
    assert "llama" in dense
