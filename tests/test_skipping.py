"""Skipping: Lu et al. (2024), Sec. 3.3 and App. A.2, and fewer experts a token by a number."""

import json

import pytest
import torch
from builders import loaded, logits, nightly, saved, tiny_moe
from hypothesis import given, settings
from hypothesis import strategies as st
from shrunken import small_model

import moesaic
from moesaic import MoesaicError, Plan, SkipConfig, SlimConfig, TopKConfig
from moesaic.arch.lookup import moe_arch
from moesaic.hub import native_config
from moesaic.methods.skip.method import mean_calls, quantile, ratios
from moesaic.metrics.forward import count_routing
from moesaic.metrics.score import model_size
from moesaic.modules.blocks import skip, survivors
from moesaic.plans.cut import CutLayer
from moesaic.surgery import base_shape


def falling(tokens, top_k, seed=0):
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(seed)).double()
    return (weights / weights.sum(-1, keepdim=True)).sort(dim=-1, descending=True).values


@torch.no_grad()
def calls(model, tokens):
    with count_routing(model) as routing:
        model(tokens.input_ids)
    return {i: layer.calls for i, layer in routing.items()}


# --- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "top_k"), [("top2", 2), ("tail", 2), ("tail", 4)])
def test_the_median_skips_for_half_of_the_tokens(rule, top_k):
    weights_TK = falling(1000, top_k)
    beta = quantile(ratios(weights_TK, rule), 0.5)
    changed = (~survivors(weights_TK, beta, rule)).any(1).double().mean().item()
    assert changed == pytest.approx(0.5, abs=0.001)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.floats(0, 1), st.integers(2, 60))
def test_at_two_experts_both_rules_are_one(seed, q, tokens):
    weights_TK = falling(tokens, 2, seed)
    betas = {rule: quantile(ratios(weights_TK, rule), 0.5) for rule in ("top2", "tail")}
    if tokens % 2:  # the median is a token's own ratio, in both
        tail = betas["tail"] / (1 - betas["tail"])
        assert tail == pytest.approx(betas["top2"])
    beta = q  # w_2 < b w_1 and w_2 < b / (1 + b) (w_1 + w_2)
    apart = (ratios(weights_TK, "top2") - beta).abs() > 1e-9
    a = survivors(weights_TK, beta, "top2")
    b = survivors(weights_TK, beta / (1 + beta), "tail")
    assert torch.equal(a[apart], b[apart])


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.floats(0, 1.2), st.integers(2, 6))
def test_the_tail_is_the_smallest_prefix(seed, beta, top_k):
    """App. A.2 by a plain loop."""
    for weights_K, kept_K in zip(
        falling(8, top_k, seed), survivors(falling(8, top_k, seed), beta, "tail"), strict=True
    ):
        total = weights_K.sum()
        for i in range(1, top_k + 1):
            if i == top_k or weights_K[i:].sum() < beta * total - 1e-12:
                break
        near = abs(float(weights_K[i:].sum() - beta * total)) < 1e-9
        assert near or int(kept_K.sum()) == i
        assert kept_K.int().diff().le(0).all()


def test_weights_of_few_bits_are_shared_out_exactly_and_rounded_once():
    weights_TK = falling(64, 4).bfloat16()
    chosen_TK = torch.arange(4).expand(64, 4)
    left_TK, _ = skip(weights_TK, chosen_TK, 0.3, "tail", 8)
    exact_TK, _ = skip(weights_TK.float(), chosen_TK, 0.3, "tail", 8)
    assert (left_TK == 0).any()
    assert torch.equal(left_TK, exact_TK.bfloat16())


# --- models --------------------------------------------------------------------------------------


@torch.no_grad()
def test_skipped_experts_do_not_run(tokens):
    """What a skipping model computes is what its survivors alone give."""
    plain = tiny_moe("mixtral")
    model = moesaic.skip(plain, SkipConfig(quantile=0.8), calibration=tokens).model
    beta = model.config.moesaic["layers"]["0"][-1]["beta"]
    x_TD = torch.randn(40, 32)
    block, router = plain.model.layers[0].mlp, plain.model.layers[0].mlp.gate
    _, w_TK, chosen_TK = router(x_TD)
    y_TD = torch.zeros_like(x_TD)
    skipped = 0
    for t in range(40):
        (w1, w2), (e1, e2) = w_TK[t].tolist(), chosen_TK[t].tolist()
        one = torch.ones(1, 1)
        f1, f2 = (block.experts(x_TD[t : t + 1], torch.tensor([[e]]), one)[0] for e in (e1, e2))
        y_TD[t] = f1 if w2 < beta * w1 else w1 * f1 + w2 * f2
        skipped += w2 < beta * w1
    assert 0 < skipped < 40
    found = model.model.layers[0].mlp(x_TD[None])[0]
    torch.testing.assert_close(found, y_TD, rtol=1e-4, atol=1e-5)


def test_a_number_of_calls_can_be_asked_for(tokens):
    model = tiny_moe("qwen3_moe", top_k=4)
    result = moesaic.skip(model, SkipConfig(calls=3), calibration=tokens)
    assert all(layer.rule == "tail" for layer in result.plan.layers.values())
    for analysis in result.analyses.values():
        assert analysis["calls_per_token"] == pytest.approx(3, abs=0.02)
        assert analysis["skipped"] == pytest.approx(1 - analysis["calls_per_token"] / 4)
    assert calls(result.model, tokens)[0] == pytest.approx(3, abs=0.02)
    assert mean_calls(falling(10, 4), 0.0, "tail") == 4


def test_experts_of_unequal_width_that_are_skipped_count_as_wide_as_they_are(tokens):
    slimmed = SlimConfig(keep=0.5, allocate="experts", score="energy", refit=False)
    uneven = moesaic.slim(tiny_moe("mixtral"), slimmed, calibration=tokens).model
    skipping = moesaic.skip(uneven, calibration=tokens).model
    assert model_size(skipping) == model_size(uneven)


def test_published_betas_are_taken_as_they_are(tokens):
    """And the share that is said to be skipped is that of those betas."""
    model = tiny_moe("mixtral")
    result = moesaic.skip(model, SkipConfig(betas=(0.2, 0.5, 0.9)), calibration=tokens)
    assert [layer.beta for layer in result.plan.layers.values()] == [0.2, 0.5, 0.9]
    skipped = [a["skipped"] for a in result.analyses.values()]
    assert skipped[0] < skipped[1] < skipped[2]
    one = moesaic.skip(model, SkipConfig(betas=(0.5,)), calibration=tokens)
    assert [layer.beta for layer in one.plan.layers.values()] == [0.5, 0.5, 0.5]
    assert one.analyses[1] == result.analyses[1]
    for name in ("mixtral-c4", "mixtral-math"):
        assert len(SkipConfig.bundles[name]["betas"]) == 32, name


@pytest.mark.parametrize("model_type", ["lfm2_moe", *map(nightly, ("minimax_m2", "deepseek_v4"))])
def test_routers_that_are_handed_more_than_hidden_states_skip_and_are_observed(model_type, tokens):
    """A bias, or where a token stands in a table, as the base's router is."""
    skips = moesaic.skip(small_model(model_type), calibration=tokens)
    slim = moesaic.slim(skips.model, plan=skips.plan, calibration=tokens).model
    skipped, kept = calls(skips.model, tokens), calls(slim, tokens)
    first = min(kept)
    assert kept[first] == pytest.approx(skipped[first], abs=0.1)
    assert kept[first] < 1.9


def four(moe_type="qwen3_moe", **changes):
    return tiny_moe(moe_type, top_k=4, **changes)


def top_ks(model):
    arch = moe_arch(model.config)
    return [arch.mixture(arch.layers(model)[i]).top_k for i in arch.moe_layers(model)]


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
    for again in (TopKConfig(top_k=1), SkipConfig()):
        with pytest.raises(MoesaicError, match="skips already"):
            moesaic.skip(skipping.model, again, calibration=tokens)


# --- asked for -----------------------------------------------------------------------------------


def test_the_command(tmp_path, done):
    """From a folder with its native config."""
    out = tmp_path / "out"
    printed = done("skip", "tiny-shared-moe", out, "--top-k", 2, "--no-eval", "--json")
    record = json.loads(printed)
    assert record["native"]
    assert set(record["experts_per_token"]) <= {2, None}
    assert record["steps"][0]["title"] == "2 of 4 experts a token"
    assert json.loads((out / "config.json").read_text())["num_experts_per_tok"] == 2
