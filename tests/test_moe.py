"""The contract that every mixture of experts of the table keeps."""

from __future__ import annotations

import pytest
import torch
from moe_models import COUNT, tiny_moe
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.auto import CONFIG_MAPPING

import moesaic
from moesaic import MoesaicError, PruneConfig
from moesaic.io.checkpoint import Checkpoint
from moesaic.hub import Source
from moesaic.arch.mixture import MOE, MoEFFN, moe_arch
from moesaic.io.naming import Naming
from moesaic.plan import Plan, PrunedLayer
from moesaic.result import save_applied
from moesaic.stream.stream import LayerStream
from moesaic.surgery import apply_plan, base_shape

KEEP = 6


@pytest.fixture(params=sorted(MOE))
def moe_type(request):
    return request.param


@pytest.fixture
def moe(moe_type):
    return tiny_moe(moe_type)


def views(model):
    arch = moe_arch(model.config)
    layers = arch.layers(model)
    found = [arch.view(layers[i]) for i in arch.moe_layers(model)]
    assert found
    assert all(isinstance(view, MoEFFN) for view in found)
    return found


def some_sets(count, groups):
    """A few sets that keep KEEP of ``count`` experts, equally many a group."""
    for seed in range(4):
        order = torch.rand(groups, count // groups, generator=torch.Generator().manual_seed(seed))
        yield (order.argsort(1).argsort(1) < KEEP // groups).flatten()


@torch.no_grad()
def test_the_block_is_what_its_view_says(moe):
    x_TD = torch.randn(64, 32)
    for view in views(moe):
        w_TE = view.rule.weights(view.logits(x_TD))
        assert (w_TE != 0).sum(1).unique().tolist() == [view.top_k]
        y_TD = (w_TE.unsqueeze(-1) * view.outputs(x_TD, w_TE != 0)).sum(1)
        if view.shared is not None and view.arch.beside is None:
            y_TD = y_TD + view.shared(x_TD)
        block_TD = view.output(x_TD)
        assert block_TD.abs().max() > 0.01
        torch.testing.assert_close(y_TD, block_TD, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_experts_weights_are_its_output(moe):
    x_TD = torch.randn(8, 32)
    view = views(moe)[0]
    if moe.config.model_type == "gpt_oss":  # biases and a clamped gate besides
        gate, up, down = view.weights_of(3)
        assert (gate.shape, up.shape, down.shape) == ((16, 32), (16, 32), (32, 16))
        return
    gate, up, down = view.weights_of(3)
    y_TD = (view.experts.act_fn(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T
    torch.testing.assert_close(y_TD, view.expert(3, x_TD))


@torch.no_grad()
def test_masked_routing_is_the_router_of_the_sliced_model(moe):
    """A set of experts is scored as it will be deployed."""
    arch = moe_arch(moe.config)
    x_TD = torch.randn(64, 32)
    i = arch.moe_layers(moe)[-1]
    masked = arch.view(arch.layers(moe)[i])
    for kept_E in some_sets(8, arch.group_count(moe.config)):
        logits_TE = masked.logits(x_TD)
        w_TE = masked.rule.weights(logits_TE, kept_E.expand_as(logits_TE))
        assert not w_TE[:, ~kept_E].any()
        sliced_model = tiny_moe(moe.config.model_type)
        plan = Plan("test", base_shape(moe, arch), {i: PrunedLayer(kept_E.nonzero().flatten())})
        apply_plan(sliced_model, arch, plan)
        sliced = arch.view(arch.layers(sliced_model)[i])
        assert sliced.count == KEEP
        found_TE = sliced.rule.weights(sliced.logits(x_TD))
        torch.testing.assert_close(w_TE[:, kept_E], found_TE, rtol=1e-5, atol=1e-6)
        with masked.restricted(kept_E):
            torch.testing.assert_close(
                masked.output(x_TD), sliced.output(x_TD), rtol=1e-4, atol=1e-5
            )


def test_candidate_sets_can_share_one_call(moe):
    """Choice biases are masked row by row, too."""
    view = views(moe)[0]
    groups = view.arch.group_count(moe.config)
    logits_TE = torch.randn(16, 8)
    sets_CE = torch.stack(list(some_sets(8, groups)))
    together = view.rule.weights(
        logits_TE.repeat_interleave(len(sets_CE), 0), sets_CE.repeat(len(logits_TE), 1)
    ).view(16, len(sets_CE), 8)
    for c, kept_E in enumerate(sets_CE):
        alone = view.rule.weights(logits_TE, kept_E.expand_as(logits_TE))
        assert torch.equal(together[:, c], alone)


def test_keeping_all_experts_changes_nothing(moe, tokens, tmp_path):
    result = moesaic.prune(moe, PruneConfig(keep=8), calibration=tokens)
    assert all(a["loss"] == 0 for a in result.analyses.values())
    result.save(tmp_path / "out")
    moe.save_pretrained(tmp_path / "base")
    original, same = (Checkpoint(tmp_path / name) for name in ("base", "out"))
    assert sorted(original.names()) == sorted(same.names())
    assert all(torch.equal(original.tensor(n), same.tensor(n)) for n in original.names())


@torch.no_grad()
def test_the_result_loads_in_plain_transformers_bitwise(moe, moe_type, tokens, tmp_path):
    """From memory and from disk the same decision, the same files, and the live model's logits."""
    config = PruneConfig(keep=KEEP)
    live = moesaic.prune(moe, config, calibration=tokens)
    live.save(tmp_path / "live")
    moe.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    disk = moesaic.prune(tmp_path / "base", config, calibration=tokens, tokenizer=object())
    disk.save(tmp_path / "disk")
    a, b = Checkpoint(tmp_path / "live"), Checkpoint(tmp_path / "disk")
    assert sorted(a.names()) == sorted(b.names())
    assert all(torch.equal(a.tensor(n), b.tensor(n)) for n in a.names())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "disk").eval()
    assert type(loaded) is type(moe)
    assert getattr(loaded.config, COUNT[moe_type]) == KEEP
    assert not (tmp_path / "disk" / "modeling_moesaic.py").exists()
    ids = tokens.input_ids
    assert torch.equal(loaded(ids).logits, live.model(ids).logits)
    assert not torch.equal(loaded(ids).logits, moe(ids).logits)


@torch.no_grad()
def test_reading_from_disk_is_loading(moe, moe_type, tokens, tmp_path):
    """bfloat16, where some tensors stay wide."""
    moe.save_pretrained(tmp_path / "base", max_shard_size="50KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    arch = moe_arch(moe.config)
    stream = LayerStream.from_disk(
        Checkpoint(tmp_path / "base"), loaded.config, arch, tokens, dtype=torch.bfloat16
    )
    for site in stream:
        wanted = arch.layers(loaded)[site.index].state_dict()
        found = site.layer.state_dict()
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


def test_apply_rebuilds_the_result_from_its_plan(moe, tokens, tmp_path):
    moe.save_pretrained(tmp_path / "base")
    result = moesaic.prune(moe, PruneConfig(keep=KEEP), calibration=tokens)
    result.save(tmp_path / "out")
    size = sum(f.stat().st_size for f in (tmp_path / "out").glob("plan.*"))
    assert size < 8192
    moesaic.apply(str(tmp_path / "base"), tmp_path / "out", tmp_path / "again")
    a, b = Checkpoint(tmp_path / "out"), Checkpoint(tmp_path / "again")
    assert all(torch.equal(a.tensor(n), b.tensor(n)) for n in a.names())


def test_a_dtype_is_applied_on_the_way(tokens, tmp_path):
    """And choice biases stay in float32, as the architecture keeps them."""
    moe = tiny_moe("deepseek_v3")
    moe.save_pretrained(tmp_path / "base")
    source = Source("base", tmp_path / "base")
    plan = moesaic.prune(moe, PruneConfig(keep=KEEP), calibration=tokens).plan
    (tmp_path / "out").mkdir()
    save_applied(source, plan, tmp_path / "out", torch.bfloat16)
    out = Checkpoint(tmp_path / "out")
    types = {n: out.tensor(n).dtype for n in out.names()}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert types.pop(bias) == torch.float32
    assert torch.bfloat16 in types.values()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


def test_names_on_disk_and_in_memory_cover_each_other(moe, tmp_path):
    moe.save_pretrained(tmp_path)
    naming = Naming(Checkpoint(tmp_path), moe.config.model_type)
    state = moe.state_dict()
    assert set(naming.in_memory.values()) == set(state)
    for name, tensor in state.items():
        assert torch.equal(naming.read(name), tensor), name


def test_unknown_and_dense_models_are_refused():
    with pytest.raises(MoesaicError, match="no routed experts"):
        moe_arch(CONFIG_MAPPING["llama"]())
    with pytest.raises(MoesaicError, match="Mixtures of experts that are: deepseek_v2"):
        moe_arch(CONFIG_MAPPING["switch_transformers"]())
    with pytest.raises(MoesaicError, match="quantised"):
        moe_arch(MixtralConfig(quantization_config={"quant_method": "mxfp4"}))


def test_a_missing_tensor_is_named(tokens, tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_moe("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(MoesaicError, match="no tensor 'model.layers.1.input_layernorm.weight'"):
        moesaic.prune(tmp_path, PruneConfig(keep=KEEP), calibration=tokens, tokenizer=object())
