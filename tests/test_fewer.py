"""Fewer experts a token: one number for all layers, or each layer's own (LExI)."""

from __future__ import annotations

import copy
import json
from itertools import product

import pytest
import torch
from builders import MOE, loaded, logits, saved, tiny_moe
from shrunken import small_model
from typer.testing import CliRunner

import moesaic
from moesaic import LExIConfig, MoesaicError, SkipConfig
from moesaic.arch.lookup import moe_arch
from moesaic.cli import app
from moesaic.hub import native_config
from moesaic.layers.fewer import FewerLayer
from moesaic.methods.lexi.method import FewerExperts
from moesaic.metrics.size import model_size
from moesaic.observation.stream import LayerStream
from moesaic.plan import Plan
from moesaic.recipe import step_config
from moesaic.surgery import base_shape, headers_of


def four(moe_type="qwen3_moe", **changes):
    return tiny_moe(moe_type, top_k=4, **changes)


def by_layer(mean):
    return LExIConfig(top_k=mean, allocate="layers")


def top_ks(model):
    arch = moe_arch(model.config)
    return [arch.mixture(arch.layers(model)[i]).top_k for i in arch.moe_layers(model)]


def numbers(result):
    return [layer.top_k for layer in result.plan.layers.values()]


# --- one number for all layers -------------------------------------------------------------------


@pytest.mark.parametrize("moe_type", sorted({*MOE} - {"phimoe"}))
@torch.no_grad()
def test_one_number_is_a_field_of_the_config(moe_type, tokens, tmp_path):
    """The result is the model that its architecture makes of that field, and loads natively."""
    model = tiny_moe(moe_type)
    result = moesaic.skip(model, LExIConfig(top_k=1))
    result.save(tmp_path / "live")
    model.save_pretrained(tmp_path / "base")
    moesaic.skip(str(tmp_path / "base"), LExIConfig(top_k=1)).save(tmp_path / "disk")
    wanted = tiny_moe(moe_type, top_k=1)
    wanted.load_state_dict(model.state_dict())
    for name in ("live", "disk"):
        again = loaded(tmp_path / name)
        assert again.config.model_type == moe_type
        assert set(top_ks(again)) == {1}
        assert torch.equal(logits(again, tokens), logits(wanted, tokens))
    assert torch.equal(logits(result.model, tokens), logits(wanted, tokens))
    assert not torch.equal(logits(model, tokens), logits(wanted, tokens))
    sizes = [model_size(m).active_parameters for m in (result.model, wanted, model)]
    assert sizes[0] == sizes[1] < sizes[2]


def test_as_many_as_before_changes_nothing(tokens):
    model = four()
    for config in (LExIConfig(top_k=4), by_layer(4), LExIConfig(layer_loss=0)):
        result = moesaic.skip(model, config, calibration=tokens)
        assert result.model.config.to_dict() == model.config.to_dict()
        assert torch.equal(logits(result.model, tokens), logits(model, tokens))
        assert numbers(result) == [4, 4, 4]


# --- each layer's own ----------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("moe_type", ["qwen3_moe", "deepseek_v3", "granitemoe"])
def test_a_layers_loss_is_what_its_output_moves_by(moe_type, tokens):
    """By running the block itself with fewer; the shared path is in both and falls out."""
    model = four(moe_type)
    result = moesaic.skip(model, by_layer(2), calibration=tokens)
    arch = moe_arch(model.config)
    for site in LayerStream(model, arch, tokens, arch.moe_layers(model), view=arch.mixture):
        x_TD = torch.cat([*site.inputs()])
        view = site.view
        whole_TD = view.output(x_TD)
        own_TD = whole_TD if view.shared is None else whole_TD - view.shared(x_TD)
        found = result.analyses[site.index]["losses"]
        assert len(found) == 4
        for k, loss in enumerate(found, 1):
            view.router.top_k = k
            moved = (view.output(x_TD) - whole_TD).norm() / own_TD.norm()
            view.router.top_k = 4
            assert loss == pytest.approx(moved.item(), rel=1e-3, abs=1e-5)
        assert found == sorted(found, reverse=True)
        chosen = result.plan.layers[site.index].top_k
        assert result.analyses[site.index]["relative_loss"] == found[chosen - 1]


def allotted(losses, config):
    """Each layer's number of experts a token, by layer what 1, 2, ... lose."""
    by_number = {i: dict(enumerate(row, 1)) for i, row in losses.items()}
    return dict(FewerExperts(config).allocate(by_number))


@pytest.mark.parametrize("seed", range(6))
def test_no_other_numbers_of_that_mean_lose_less(seed):
    """By all combinations."""
    drawn = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)).tolist()
    found = {i: [*sorted(row, reverse=True), 0.0] for i, row in enumerate(drawn)}
    for mean in (1, 1.25, 2, 3.5):
        chosen = allotted(found, by_layer(mean))
        least = min(
            sum(found[i][k - 1] ** 2 for i, k in enumerate(ks))
            for ks in product(range(1, 5), repeat=4)
            if sum(ks) <= 4 * mean
        )
        assert sum(chosen.values()) == 4 * mean
        assert sum(found[i][k - 1] ** 2 for i, k in chosen.items()) == pytest.approx(least)


@pytest.mark.parametrize("mean", [1.5, 2.6, 3.9])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_mean_is_never_exceeded_and_always_changes_something(mean, layers):
    found = {i: [0.9, 0.5, 0.2, 0.0] for i in range(layers)}
    total = sum(allotted(found, LExIConfig(top_k=mean)).values())
    assert mean * layers - 1 < total <= mean * layers
    assert total < 4 * layers


def test_a_loss_for_each_layer():
    found = {0: [0.5, 0.2, 0.0], 3: [0.05, 0.01, 0.0]}
    assert allotted(found, LExIConfig()) == {0: 3, 3: 1}
    assert allotted(found, LExIConfig(layer_loss=0.3)) == {0: 2, 3: 1}


@torch.no_grad()
def test_layers_differ_saved_and_loaded(tokens, tmp_path):
    """A model whose routers were told by hand is the same one."""
    model = four()
    result = moesaic.skip(model, LExIConfig(top_k=2.34), calibration=tokens)
    found = numbers(result)
    assert sum(found) == 7
    twin = copy.deepcopy(model)
    for layer, k in zip(twin.model.layers, found, strict=True):
        layer.mlp.gate.top_k = k
    result.save(tmp_path / "out")
    again = loaded(tmp_path / "out")
    assert top_ks(again) == found
    assert again.config.model_type == "moesaic_qwen3_moe"
    for made in (result.model, again):
        assert torch.equal(logits(made, tokens), logits(twin, tokens))
    record = result.current_record
    assert [layer.top_k for layer in record.layers] == found
    assert record.output()["experts_per_token"] == found
    one = moesaic.skip(again, LExIConfig(top_k=1))
    assert top_ks(one.model) == [1, 1, 1]
    assert [len(stack) for stack in headers_of(one.model.config).values()] == [2, 2, 2]


@torch.no_grad()
def test_a_config_that_takes_a_list_holds_them(tokens, tmp_path):
    """hunyuan's class has one number for all layers, or a list."""
    model = small_model("hunyuan_v1_moe")
    before = logits(model, tokens)
    layers = {i: FewerLayer(1 + i % 2, 2) for i in range(model.config.num_hidden_layers)}
    saved(tmp_path, model, layers)
    again = loaded(tmp_path)
    assert again.config.model_type == "hunyuan_v1_moe"
    assert top_ks(again) == [1, 2, 1, 2]
    assert torch.equal(logits(again, tokens), logits(model, tokens))
    assert not torch.equal(logits(again, tokens), before)


def test_a_config_that_takes_a_list_and_goes_by_none_holds_no_list():
    """kimi_linear's class refuses nothing; its routers would all get the list itself."""
    model = small_model("kimi_linear")
    arch = moe_arch(model.config)
    routed = arch.moe_layers(model)
    for numbers, native in (([1] * len(routed), True), ([1, *[2] * (len(routed) - 1)], False)):
        layers = {i: FewerLayer(k, 2) for i, k in zip(routed, numbers, strict=True)}
        plan = Plan("test", base_shape(model, arch), layers)
        assert (native_config(model.config, arch, plan) is not None) == native


def test_statistics_and_other_steps(tokens, tmp_path):
    """From a file of observe the same is decided; experts that were left out are not counted."""
    model = four()
    moesaic.observe(model, tmp_path / "stats", calibration=tokens)
    a = moesaic.skip(model, by_layer(2), stats=tmp_path / "stats")
    b = moesaic.skip(model, by_layer(2), calibration=tokens)
    assert numbers(a) == numbers(b)
    fewer = moesaic.skip(model, LExIConfig(top_k=3)).model
    skipping = moesaic.skip(fewer, SkipConfig(calls=2), calibration=tokens)
    assert skipping.analyses[0]["calls_per_token"] == pytest.approx(2, abs=0.05)
    with pytest.raises(MoesaicError, match="skips already"):
        moesaic.skip(skipping.model, LExIConfig(top_k=1))


# --- asked for -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 3}, "runs 2 experts now; from 1 to 2 works"),
        ({"top_k": 2.5}, "from 1 to 2 works"),
        ({"top_k": 0.5}, "at least 1"),
        ({"allocate": "layers"}, "needs top_k"),
        ({"top_k": 1, "layer_loss": 0.2}, "leave layer_loss out"),
    ],
)
def test_what_cannot_be_done_is_said(options, message, tokens):
    with pytest.raises(MoesaicError, match=message):
        moesaic.skip(tiny_moe("mixtral"), LExIConfig(**options), calibration=tokens)


def test_a_router_that_knows_one_number_is_said(tokens):
    """phimoe's mixes two experts."""
    with pytest.raises(MoesaicError, match="runs 2 experts a token, whatever"):
        moesaic.skip(tiny_moe("phimoe"), LExIConfig(top_k=1), calibration=tokens)


def test_the_method_is_the_one_that_has_the_option():
    assert isinstance(step_config("skip", {"top_k": 1.5}), LExIConfig)
    assert isinstance(step_config("skip", {}), SkipConfig)
    assert isinstance(step_config("skip", {"calls": 1.5}), SkipConfig)
    with pytest.raises(MoesaicError, match="is not an option"):
        step_config("skip", {"method": "naee", "top_k": 1.5})
    with pytest.raises(MoesaicError, match="is not an option"):
        step_config("skip", {"calls": 1.5, "top_k": 1.5})


def test_the_command(tmp_path):
    """From a folder with its native config; a wrong request is one message."""
    given = ["skip", "tiny-shared-moe", str(tmp_path / "out"), "--top-k", "2"]
    run = CliRunner().invoke(app, [*given, "--no-eval", "--json"], catch_exceptions=False)
    assert run.exit_code == 0, run.stderr
    record = json.loads(run.stdout)
    assert record["native"]
    assert set(record["experts_per_token"]) <= {2, None}
    assert record["steps"][0]["title"] == "2 of 4 experts a token"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_experts_per_tok"] == 2
    for wrong, said in ((["--top-k", "9"], "4 works"), (["--allocate", "layers"], "needs")):
        run = CliRunner().invoke(app, ["skip", "tiny-shared-moe", str(tmp_path / "x"), *wrong])
        assert run.exit_code != 0
        assert said in str(run.exception)
