"""The contract of every table entry: the view is the block, and a carved block is the base's."""

import copy

import pytest
import torch
from conftest import tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig

from moesaic import hub
from moesaic.arch.dense import DENSE, dense_arch, dense_ffn
from moesaic.errors import MoesaicError
from moesaic.plan import CarvedLayer, Plan
from moesaic.surgery import apply_plan, base_shape


def whole_plan(model, arch, top_k=3, seed=0):
    """Petals in a random order, of which ``top_k`` of 3 are run; with 3 every neuron is."""
    generator = torch.Generator().manual_seed(seed)
    base = base_shape(model, arch)
    layers = {}
    for i in (1, 3):
        layers[i] = CarvedLayer(
            order_M=torch.randperm(base.widths[i], generator=generator),
            backbone=base.widths[i] - 3 * 16,
            petals=(16, 16, 16),
            top_k=top_k,
            router_RD=torch.randn(3, base.hidden_size, generator=generator),
        )
    return Plan("test", base, layers)


def test_view_recomputes_the_block(model_type):
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    x_TD = torch.randn(7, 32)
    for layer in arch.layers(model):
        ffn = arch.ffn_of(layer)
        view = dense_ffn(ffn, arch.ffn)
        torch.testing.assert_close(view.output(view.hidden(x_TD)), ffn(x_TD))
        assert view.width == 64
        assert view.up_MD.untyped_storage().data_ptr() in {
            p.untyped_storage().data_ptr() for p in ffn.parameters()
        }


def test_all_petals_are_the_dense_model(model_type, tokens):
    dense = tiny_model(model_type).double()
    arch = dense_arch(dense.config)
    carved = copy.deepcopy(dense)
    apply_plan(carved, arch, whole_plan(dense, arch))
    with torch.no_grad():
        expected, found = dense(tokens.input_ids).logits, carved(tokens.input_ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_some_petals_are_not(model_type, tokens):
    dense = tiny_model(model_type)
    arch = dense_arch(dense.config)
    carved = copy.deepcopy(dense)
    apply_plan(carved, arch, whole_plan(dense, arch, top_k=1))
    with torch.no_grad():
        difference = dense(tokens.input_ids).logits - carved(tokens.input_ids).logits
    assert difference.abs().max() > 1e-3


def test_saved_is_live_bitwise(model_type, tokens, tmp_path):
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    plan = whole_plan(model, arch, top_k=1)
    apply_plan(model, arch, plan)
    hub.convert_class(model, arch, plan)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.model_type == f"moesaic_{model_type}"
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(model(tokens.input_ids).logits, again(tokens.input_ids).logits)


def test_weights_are_the_bases_own_only_permuted(model_type):
    dense = tiny_model(model_type)
    arch = dense_arch(dense.config)
    carved = copy.deepcopy(dense)
    plan = whole_plan(dense, arch)
    apply_plan(carved, arch, plan)
    for i, layer in plan.layers.items():
        old = dense_ffn(arch.ffn_of(arch.layers(dense)[i]), arch.ffn)
        new = arch.ffn_of(arch.layers(carved)[i]).view()
        assert torch.equal(new.up_MD, old.up_MD[layer.order_M])
        assert torch.equal(new.down_DM, old.down_DM[:, layer.order_M])
        if old.gate_MD is not None:
            assert torch.equal(new.gate_MD, old.gate_MD[layer.order_M])


def test_unknown_architecture_lists_what_is_supported():
    with pytest.raises(MoesaicError, match="'gpt2' is not supported.*llama, mistral"):
        dense_arch(AutoConfig.for_model("gpt2"))


def test_mixture_of_experts_is_refused():
    with pytest.raises(MoesaicError, match="already a mixture of experts"):
        dense_arch(MixtralConfig())


def test_carved_is_refused():
    config = tiny_config("llama")
    config.__class__ = hub.CLASSES["llama"][0]
    with pytest.raises(MoesaicError, match="already carved"):
        dense_arch(config)


def test_every_entry_is_registered():
    assert set(hub.CLASSES) >= set(DENSE)
