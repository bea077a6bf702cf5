"""Routers and recovery in closed form."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from builders import (
    VOCAB,
    WAYS,
    force,
    masked,
    same,
    same_model,
    site_of,
    stream_of,
    tiny_model,
    tiny_moe,
)

import moesaic
from moesaic import CondenseConfig, MoesaicError, MoREConfig, PruneConfig, Tokens
from moesaic.api import verb
from moesaic.arch.lookup import dense_arch
from moesaic.carving.budget import LayerSize, active_ratio, solved_top_k, split_for_target
from moesaic.carving.carved_layer import CarvedFFN, CarvedLayer
from moesaic.carving.more.formulas import fit_router, neuron_weights, petal_energies
from moesaic.exports.native import decide
from moesaic.io.source import resolve
from moesaic.metrics.forward import InMemory
from moesaic.metrics.score import model_size, scores
from moesaic.modules.running import always_routing
from moesaic.observation.job import Job
from moesaic.plans.recovery import Ridge
from moesaic.surgery import converted_copy
from moesaic.types import cache_of


def dense_site(tokens):
    return site_of(tiny_model("llama"), tokens, 2)


def petals_plan(top_k=2, routing="linear", seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    return CarvedLayer(
        order_M=torch.randperm(64, generator=generator),
        backbone=24,
        petals=(10,) * 4,
        top_k=top_k,
        routing=routing,
        router_RD=torch.randn(4, 32, generator=generator),
        **more,
    )


def missing(plan, site):
    """Squared error of a carved layer's output, run by the module itself."""
    x_TD = torch.cat(list(site.inputs()))
    y_TD = site.ffn(x_TD)
    arch = dense_arch(tiny_model("llama").config)
    with converted_copy(site.layer, arch, plan) as layer:
        return (arch.ffn_of(layer)(x_TD) - y_TD).double().square().sum().item()


@pytest.fixture
def tokens():
    """More of them than features."""
    ids = torch.randint(1, VOCAB, (24, 24), generator=torch.Generator().manual_seed(1))
    return Tokens(ids)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


# --- ridge regression ----------------------------------------------------------------------------


def test_noise_alone_is_not_fitted():
    """More features than tokens, and nothing to find: the strength stays infinite."""
    torch.manual_seed(0)
    ridge = Ridge(40, 2)
    ridge.add(torch.randn(60, 40), torch.randn(60, 2))
    fit = ridge.solve()
    assert fit.strength >= 10
    assert fit.unexplained <= 1
    ridge = Ridge(3, 2)
    ridge.add(torch.randn(60, 3), torch.zeros(60, 2))
    assert ridge.solve().strength == math.inf
    assert not ridge.solve().weight_FO.any()


# --- routers -------------------------------------------------------------------------------------


def test_weighted_energy_bounds_what_a_petal_adds(tokens):
    site = dense_site(tokens)
    petals = [torch.arange(10), torch.arange(10, 64)]
    h_TM = torch.cat([h for _, h in site.activations()])
    found = petal_energies(h_TM, neuron_weights(site.view), petals)
    for e, petal in enumerate(petals):
        by_hand = (h_TM[:, petal] * site.view.down_DM[:, petal].norm(dim=0)).norm(dim=1)
        torch.testing.assert_close(found[:, e], by_hand)
        alone = (h_TM[:, petal] @ site.view.down_DM[:, petal].T).norm(dim=1)
        assert (alone <= found[:, e] * len(petal) ** 0.5 + 1e-4).all()  # Cauchy-Schwarz


def test_ridge_router_beats_cosine_and_random_on_energy(tokens):
    """On the tokens that all were fitted to."""
    config = {"active": 0.7, "experts": 8, "top_k": 3, "layers": "all"}
    model = tiny_model("llama")
    kept = {}
    for name, more in {
        "cosine": {},
        "random": {"variant": "random"},
        "fitted": {"router": "ridge"},
    }.items():
        plan = moesaic.carve(model, MoREConfig(**config, **more), calibration=tokens).plan.layers[2]
        site = dense_site(tokens)
        worth_M = neuron_weights(site.view)[plan.order_M]
        kept[name] = sum((h_TM * worth_M).square().sum() for _, h_TM in plan.running(site))
    assert kept["fitted"] > kept["cosine"]
    assert kept["fitted"] > kept["random"]


def test_router_weights_solve_the_normal_equations(tokens):
    site = dense_site(tokens)
    petals = list(torch.arange(24, 64).split(10))
    weight_RD = fit_router(site, petals)
    assert weight_RD.shape == (4, 32)
    x_TD = torch.cat(list(site.inputs())).double()
    energy_TR = torch.cat(
        [petal_energies(h, neuron_weights(site.view), petals) for _, h in site.activations()]
    )
    residual_TR = energy_TR - x_TD @ weight_RD.double().T
    left_RD = residual_TR.T @ x_TD  # X^T (Y - X W) = lambda W
    strength = (left_RD * weight_RD).sum() / weight_RD.square().sum()
    torch.testing.assert_close(left_RD, strength * weight_RD.double(), atol=1e-3, rtol=1e-3)
    assert residual_TR.square().sum() < 0.2 * energy_TR.square().sum()


# --- execution -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("routing", "top_k"), [("linear", 3), ("cosine", 1)])
@pytest.mark.parametrize("way", WAYS)
def test_execution_is_what_was_fitted(tokens, routing, top_k, way, monkeypatch):
    """Weights and router of the plan, through the module, are the masked sum."""
    force(monkeypatch, way)
    generator = torch.Generator().manual_seed(1)
    plan = petals_plan(top_k, routing, down_DM=torch.randn(32, 64, generator=generator))
    site = dense_site(tokens)
    arch = dense_arch(tiny_model("llama").config)
    x_TD = next(site.inputs())
    _, h_TM = next(plan.running(site))
    expected = h_TM @ plan.down_DM.T + site.view.down_bias_D
    with converted_copy(site.layer, arch, plan) as layer:
        module = arch.ffn_of(layer)
        for count in (1, 17):
            for made in (module, masked(module)):
                torch.testing.assert_close(
                    made(x_TD[:count]), expected[:count], atol=1e-4, rtol=1e-4
                )
    assert arch.ffn_of(site.layer) is site.ffn


# --- refit ---------------------------------------------------------------------------------------


def test_everything_kept_is_left_alone(tokens):
    site = dense_site(tokens)
    plan = petals_plan(top_k=4)
    new, found = plan.refit(site)
    assert found["lost"] < 1e-10
    torch.testing.assert_close(new.down_DM, site.view.down_DM[:, plan.order_M])


@pytest.mark.parametrize("routing", ["linear", "cosine", "none"])
def test_refit_lowers_the_error(tokens, routing):
    """Of petals, and of a layer that routes nothing."""
    site, static = dense_site(tokens), CarvedLayer(order_M=torch.arange(40), backbone=40)
    plan = static if routing == "none" else petals_plan(routing=routing)
    assert missing(plan.refit(site)[0], site) < missing(plan, site)


def test_infinite_strength_changes_nothing(tokens, monkeypatch):
    monkeypatch.setattr("moesaic.plans.recovery.STRENGTHS", (math.inf,))
    site = dense_site(tokens)
    plan = petals_plan()
    new, found = plan.refit(site)
    assert torch.equal(new.down_DM, site.view.down_DM[:, plan.order_M])
    assert found["recovered"] == 0


# --- prompts that run dense ----------------------------------------------------------------------

FINE = MoREConfig(layers="all", active=0.7, experts=8, top_k=3, router="ridge")


@pytest.mark.parametrize(
    ("options", "prompts"),
    [
        ({}, "dense"),
        ({"router": "cosine"}, "petals"),  # the paper's routes everywhere
        ({"experts": 2, "top_k": 1}, "petals"),  # wide ones
        ({"prompts": "petals"}, "petals"),
        ({"router": "cosine", "prompts": "dense"}, "dense"),
    ],
)
def test_prompts_run_dense_where_petals_save_them_nothing(options, prompts, tokens):
    model = tiny_model("llama", intermediate_size=96)
    plan = moesaic.carve(model, replace(FINE, **options), calibration=tokens).plan
    assert {layer.prompts for layer in plan.layers.values()} == {prompts}
    assert ("prompts run dense" in plan.layers[0].describe(0).text) == (prompts == "dense")


@pytest.mark.parametrize("width", [64, 520])
def test_by_default_petals_are_as_fine_as_layers_allow(width, tokens):
    """256 of them, or half as many as there are neurons; the active ratio is met all the same."""
    result = moesaic.carve(tiny_model("llama", intermediate_size=width), calibration=tokens)
    layers = result.plan.layers.values()
    assert {len(layer.petals) for layer in layers} == {min(256, width // 2)}
    assert model_size(result.model).active_ratio == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_a_dense_prompt_is_the_original_and_a_step_is_routed(name, tokens):
    """Without a refit nothing of a prompt changes; what is decoded runs its petals."""
    model, ids = tiny_model(name), tokens.input_ids[:2, :9]
    carved = moesaic.carve(model, FINE, calibration=tokens).model.eval()
    torch.testing.assert_close(carved(ids).logits, model(ids).logits)
    cache = cache_of(carved(ids[:, :-1]))
    step = carved(ids[:, -1:], **cache).logits
    assert not torch.allclose(step, model(ids).logits[:, -1:], atol=1e-4)
    with always_routing(carved):
        cache = cache_of(model(ids[:, :-1]))
        routed = carved(ids[:, -1:].repeat(1, 2), **cache).logits[:, :1]
    torch.testing.assert_close(step, routed)


def test_what_is_measured_is_routed(tokens):
    """Perplexity and active ratio are those of decoding."""
    kinds = {}
    for prompts in ("petals", "dense"):
        model = moesaic.carve(
            tiny_model("llama"), replace(FINE, prompts=prompts), calibration=tokens
        ).model
        found = scores([InMemory(model)], tokens)[0]
        kinds[prompts] = found.perplexity, found.active_ratio
    assert kinds["petals"] == kinds["dense"]


def test_routers_learn_from_prompts(tokens):
    result = moesaic.carve(tiny_model("llama"), FINE, calibration=tokens)
    model = result.model.train().requires_grad_()
    with torch.enable_grad():
        model(tokens.input_ids[:2]).logits.square().mean().backward()
    routers = [m.router for m in model.modules() if isinstance(m, CarvedFFN)]
    assert len(routers) == 4
    assert all(router.weight.grad.abs().sum() > 0 for router in routers)


def test_dense_prompts_have_no_native_form(tokens, tmp_path):
    moesaic.carve(tiny_model("llama"), FINE, calibration=tokens).save(tmp_path / "out")
    with pytest.raises(MoesaicError, match="carve with prompts=petals"):
        decide(resolve(str(tmp_path / "out")))


# --- defaults, files -----------------------------------------------------------------------------


def test_defaults_are_the_published_method(tokens):
    plan = moesaic.carve(tiny_model("llama"), MoREConfig(layers="all"), calibration=tokens).plan
    for layer in plan.layers.values():
        assert layer.header().keys() == {"kind", "backbone", "petals", "top_k", "routing"}
        assert layer.tensors().keys() == {"order", "router"}
        assert layer.routing == "cosine"
        torch.testing.assert_close(layer.router_RD.norm(dim=1), torch.ones(4))


def test_refitted_weights_are_exported(tokens, tmp_path):
    """Uniform petals, top-1, cosine: native still."""
    model = tiny_model("llama", mlp_bias=False)
    config = MoREConfig(layers="all", refit=True)
    moesaic.carve(model, config, calibration=tokens).save(tmp_path / "out")
    decided, native = same_model(resolve(str(tmp_path / "out")), tmp_path / "native", tokens)
    assert decided.model_type == native.config.model_type == "granitemoeshared"


def test_refit_takes_no_pass_of_its_own(tokens, monkeypatch):
    """And fits what the method decides without it."""
    passes, stream = [], Job.stream
    monkeypatch.setattr(Job, "stream", lambda *a, **k: passes.append(a) or stream(*a, **k))
    model, config = tiny_model("llama"), MoREConfig(layers="all", experts=8, top_k=3)
    plain = moesaic.carve(model, config, calibration=tokens)
    whole = moesaic.carve(model, replace(config, refit=True), calibration=tokens)
    assert len(passes) == 2
    for site in stream_of(model, tokens, range(4)):
        expected, _ = plain.plan.layers[site.index].refit(site)
        assert same(expected, whole.plan.layers[site.index])


def test_a_top_k_that_is_solved_for_meets_the_target():
    for active, experts, width in product((0.9, 0.8, 0.6), (16, 64, 256), (576, 1536, 14_336)):
        sizes = [LayerSize(width * 576, width * 1728, width)] * 2
        top_k = solved_top_k(sizes, [0, 1], active, experts)
        splits = split_for_target(sizes, [0, 1], active, experts, top_k)
        widths = {i: split.active_width for i, split in splits.items()}
        assert active_ratio(sizes, widths) == pytest.approx(active, abs=0.01)
        if width > 10 * experts:
            backbone = splits[0].backbone / splits[0].active_width
            assert backbone == pytest.approx(2 / 3, abs=0.1)


# --- pruned and condensed ------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PruneConfig(keep=4), CondenseConfig(count=1)])
def test_mixtures_are_refitted_unless_told_otherwise(config, tokens):
    model = tiny_moe("qwen2_moe")
    for refit in (None, False):
        asked = replace(config, refit=refit)
        result = verb(config.verb, model, asked, calibration=tokens)
        assert result.plan.config["refit"] is (refit is None)
        assert any("refit" in seen for seen in result.analyses.values()) is (refit is None)


def test_from_statistics_nothing_is_refitted_unasked(tokens, tmp_path, caplog):
    """They are to be decided from in seconds, without running the model."""
    model = tiny_moe("mixtral")
    stats = str(moesaic.observe(model, tmp_path / "stats", calibration=tokens))
    for refit, text in ((None, {}), (True, {"calibration": tokens})):
        result = moesaic.prune(model, PruneConfig(keep=4, refit=refit), stats=stats, **text)
        assert result.plan.config["refit"] is (refit is True)
    assert caplog.messages == ["Statistics hold no tokens to refit on: nothing is refitted."]


def test_a_layer_without_ffn_has_nothing_to_refit():
    assert CondenseConfig(keep="attention").refit is False
    with pytest.raises(MoesaicError, match="keep=nothing leaves nothing of the FFN"):
        CondenseConfig(keep="nothing", refit=True)


@pytest.mark.usefixtures("short_text")
def test_progressive_prune_refits_on_what_is_passed_on(tokens):
    config = PruneConfig(keep=4, score="frequency", progressive=True, refit=True)
    result = moesaic.prune(tiny_moe("mixtral"), config, calibration=tokens)
    found = [result.analyses[i]["refit"] for i in result.plan.layers]
    assert all(0 < seen["recovered"] <= 1 for seen in found)


# --- words ---------------------------------------------------------------------------------------


def test_a_variant_has_its_own_name():
    assert MoREConfig(variant="static").base_label == "static pruning"
    assert MoREConfig(variant="full").base_label == MoREConfig.title


@pytest.mark.usefixtures("short_text")
def test_an_addition_that_changed_nothing_is_not_claimed(tokens):
    model = tiny_moe("mixtral")
    refit, fewer = "refitted down projections", "fewer experts"
    for call, config, added in (
        (moesaic.prune, PruneConfig(keep=8), ()),
        (moesaic.prune, PruneConfig(keep=6), (refit,)),
        (moesaic.slim, moesaic.SlimConfig(keep=1.0, experts="auto"), ()),
        (moesaic.slim, moesaic.SlimConfig(keep=0.5, experts="4"), (fewer, refit)),
    ):
        step = call(model, config, calibration=tokens).current_record.steps[-1]
        assert step.beyond == added
        for what in (refit, fewer):
            assert (what in step.title) == (what in added)
            assert (what in step.label) == (what in added)
        assert ("then refitted" in step.text) == (refit in added)
