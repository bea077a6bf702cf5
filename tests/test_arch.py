"""Architectures are found by a config, and refused with what would work."""

import copy

import pytest
import torch
import torch.nn.functional as F
from builders import MOE, converted, logits, tiny_config, tiny_model, tiny_moe, whole_plan
from shrunken import small_config
from transformers import AutoConfig

from moesaic.arch.lookup import base_arch, dense_arch, moe_arch
from moesaic.errors import MoesaicError
from moesaic.hub import SAME
from moesaic.io import models
from moesaic.io.models import SKELETONS, skeleton, skeleton_of
from moesaic.plans.cut import CutLayer


@pytest.mark.parametrize(
    ("find", "config", "words"),
    [
        (dense_arch, {"model_type": "gpt2"}, "'gpt2' is not supported. Every decoder.*GPT2MLP"),
        (dense_arch, {"model_type": "mixtral"}, "already a mixture of experts"),
        (dense_arch, {"model_type": "mpt"}, "MptMLP of this mpt computes with residual too"),
        (moe_arch, {"model_type": "llama"}, "no routed experts"),
        (moe_arch, {"model_type": "switch_transformers"}, "no causal language model"),
        (
            moe_arch,
            {"model_type": "mixtral", "quantization_config": {"quant_method": "gptq"}},
            "'gptq', which is not read",
        ),
    ],
)
def test_what_is_no_such_architecture_is_refused(find, config, words):
    with pytest.raises(MoesaicError, match=words):
        find(AutoConfig.for_model(**config))


@pytest.mark.parametrize("model_type", MOE)
def test_keys_that_only_other_programs_read_are_not_taken(model_type):
    """Published configs have them beside those of transformers' class."""
    config = tiny_moe(model_type).config
    arch = base_arch(config)
    known = {*type(config).__dataclass_fields__, *config.attribute_map}
    for names in SAME:
        ours = {arch.count, arch.chosen, arch.width, arch.shared_size} & {*names}
        for other in {*names} - known if len(ours) == 1 else ():
            setattr(config, other, getattr(config, *ours))
    assert base_arch(config) == arch


@pytest.mark.parametrize("experts_size", [32, 64])
def test_the_width_is_the_attribute_that_the_layers_are_made_of(experts_size):
    """Granite 4 Micro has a mixture's class without experts: its shared path is its MLP."""
    sizes = {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": experts_size}
    config = small_config("granitemoehybrid", shared_intermediate_size=64, **sizes)
    assert dense_arch(config).width == "shared_intermediate_size"


def test_heads_are_told_from_the_weights():
    model = tiny_model("llama")
    arch = dense_arch(model.config)
    heads = arch.heads(arch.layers(model)[0], model.config)
    assert (heads.queries, heads.keys, heads.size, heads.rotary) == (4, 2, 8, 8)
    assert torch.equal(heads.paired(torch.arange(4)), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]))


def test_looking_a_config_up_leaves_it_and_its_models_alone():
    """transformers writes a type into the config that a model is made from."""
    model = tiny_model("llama")
    converted(model, dict(whole_plan(model, dense_arch(model.config), top_k=1).layers))
    config = model.config
    config.dtype = torch.bfloat16
    config.initializer_range = 0.0123  # a config that nobody has looked up yet
    made = skeleton(config)
    assert config.dtype == torch.bfloat16
    assert made.model.embed_tokens.weight.dtype == torch.bfloat16


def test_a_shape_is_made_once_and_leaves_its_config_alone():
    """Of each size and type one; those that were not asked for lately are forgotten."""
    config = tiny_config("llama")
    first, narrow = skeleton_of(config), skeleton_of(config, torch.bfloat16)
    assert skeleton_of(tiny_config("llama")) is first
    assert config.dtype != torch.bfloat16
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    wanted = {n: t.shape for n, t in skeleton(tiny_config("llama")).state_dict().items()}
    assert {n: t.shape for n, t in first.state_dict().items()} == wanted
    for width in range(SKELETONS):
        other = skeleton_of(tiny_config("llama", intermediate_size=8 + 8 * width))
        assert other.config.intermediate_size == 8 + 8 * width
        assert skeleton_of(config) is first
    assert skeleton_of(config, torch.bfloat16) is not narrow


def test_a_config_says_how_wide_the_shared_path_is(moe):
    arch = moe_arch(moe.config)
    layer = arch.layers(moe)[arch.moe_layers(moe)[0]]
    view = arch.mixture(layer)
    assert arch.shared_width_in(moe.config, view.width) == view.shared_width


@pytest.mark.parametrize("kept", [{"top_k": 1}, {"beta": 0.5, "rule": "top2"}])
def test_a_router_may_return_its_results_in_reverse(kept, monkeypatch, tokens):
    """As GraniteMoe's does in transformers 5.17: indices, weights, logits."""
    plain = tiny_moe("granitemoe")
    mixture = plain.model.layers[0].block_sparse_moe
    plan = CutLayer(torch.arange(4), **kept)
    wanted = logits(converted(copy.deepcopy(plain), {0: plan}), tokens)

    def router(self, x_TD):
        logits_TE = F.linear(x_TD, self.weight).float()
        top_TK, chosen_TK = logits_TE.topk(self.top_k)
        return chosen_TK, top_TK.softmax(-1).type_as(x_TD), logits_TE

    def block(self, x_BLD):
        x_TD = x_BLD.flatten(0, 1)
        chosen_TK, weights_TK, _ = self.router(x_TD)
        return self.experts(x_TD, chosen_TK, weights_TK).view(x_BLD.shape)

    monkeypatch.setattr(type(mixture.router), "forward", router)
    monkeypatch.setattr(type(mixture), "forward", block)
    view = base_arch(plain.config).mixture(plain.model.layers[0])
    x_TD = torch.randn(5, view.router.weight.shape[1])
    allowed_E = torch.arange(view.count) > 0
    with view.restricted(allowed_E):
        assert (view.router(x_TD)[0] > 0).all()
    assert torch.equal(view.logits(x_TD), F.linear(x_TD, view.router.weight))
    assert torch.equal(logits(converted(plain, {0: plan}), tokens), wanted)


def test_a_config_may_ask_for_as_many_tensors_as_there_are(monkeypatch):
    config = tiny_config("mixtral")
    there = len([*skeleton(config).parameters()])
    monkeypatch.setattr(models, "PARAMETERS", there * 5 // 4)
    skeleton(config)
    monkeypatch.setattr(models, "PARAMETERS", there - 1)
    with pytest.raises(MoesaicError, match=f"asks for more than {there - 1} tensors"):
        skeleton(config)
