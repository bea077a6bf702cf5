"""Fewer experts a token: one number for all layers, or, of plans, a number for each."""

from __future__ import annotations

import json

import pytest
import torch
from builders import loaded, logits, saved, tiny_moe
from click.testing import CliRunner
from shrunken import small_model

import moesaic
from moesaic.arch.lookup import moe_arch
from moesaic.cli import app
from moesaic.errors import MoesaicError
from moesaic.hub import native_config
from moesaic.methods.skip.config import SkipConfig, TopKConfig
from moesaic.plan import Plan
from moesaic.plans.cut import CutLayer
from moesaic.surgery import base_shape


def four(moe_type="qwen3_moe", **changes):
    return tiny_moe(moe_type, top_k=4, **changes)


def top_ks(model):
    arch = moe_arch(model.config)
    return [arch.mixture(arch.layers(model)[i]).top_k for i in arch.moe_layers(model)]


# --- one number for all layers -------------------------------------------------------------------


def test_as_many_as_before_changes_nothing(tokens):
    model = four()
    result = moesaic.skip(model, TopKConfig(top_k=4))
    assert result.model.config.to_dict() == model.config.to_dict()
    assert torch.equal(logits(result.model, tokens), logits(model, tokens))
    assert [layer.top_k for layer in result.plan.layers.values()] == [4, 4, 4]


# --- layers that differ ---------------------------------------------------------------------------


@torch.no_grad()
def test_a_config_that_takes_a_list_holds_them(tokens, tmp_path):
    """hunyuan's class has one number for all layers, or a list."""
    model = small_model("hunyuan_v1_moe")
    before = logits(model, tokens)
    layers = {i: CutLayer(top_k=1 + i % 2) for i in range(model.config.num_hidden_layers)}
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
        layers = {i: CutLayer(top_k=k) for i, k in zip(routed, numbers, strict=True)}
        plan = Plan("test", base_shape(model, arch), layers)
        assert (native_config(model.config, arch, plan) is not None) == native


def test_skipping_after_it_counts_the_experts_that_are_left(tokens):
    fewer = moesaic.skip(four(), TopKConfig(top_k=3)).model
    skipping = moesaic.skip(fewer, SkipConfig(calls=2), calibration=tokens)
    assert skipping.analyses[0]["calls_per_token"] == pytest.approx(2, abs=0.05)
    with pytest.raises(MoesaicError, match="skips already"):
        moesaic.skip(skipping.model, TopKConfig(top_k=1))


# --- asked for -----------------------------------------------------------------------------------


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
    run = CliRunner().invoke(app, ["skip", "tiny-shared-moe", str(tmp_path / "x"), "--top-k", "9"])
    assert run.exit_code != 0
    assert "4 works" in str(run.exception)
