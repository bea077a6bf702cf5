"""MoRE against its paper, equation by equation."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import site_of, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import moesaic
from moesaic import MoesaicError, MoREConfig
from moesaic.arch.lookup import base_arch, dense_arch
from moesaic.carving.budget import (
    NEAR,
    LayerSize,
    Split,
    active_ratio,
    layer_sizes,
    split_for_target,
)
from moesaic.carving.more import formulas
from moesaic.carving.more.method import MoRE
from moesaic.config import chosen_layers
from moesaic.metrics.forward import jsd
from moesaic.observation.stats import tally_of
from moesaic.surgery import layer_uses


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def observed(tokens, config=None, **options):
    site = site_of(tiny_model("llama"), tokens, 2, **options)
    method = MoRE(config or MoREConfig())
    tally = tally_of(site, {"calls_E"})
    method.observe(site, tally)
    return site, method, tally.stats()


def importance_of(site, stats):
    squares = (stats[name] / stats["calls_E"] for name in ("x_square_D", "h_square_M"))
    return formulas.importance(site.view, *squares)


def test_frequency_and_coactivation(tokens):
    """Sum f = k_act; C symmetric with diagonal f; both equal the plain definition."""
    site, _, stats = observed(tokens)
    h_TM = torch.cat([h for _, h in site.activations()])
    k_act = int(0.1 * 64)
    on_TM = torch.zeros_like(h_TM)
    for t, row in enumerate(h_TM.abs()):
        on_TM[t, row.argsort(descending=True)[:k_act]] = 1
    assert stats["calls_E"] == tokens.count
    assert torch.equal(stats["coactivation_MM"], on_TM.T @ on_TM)
    assert stats["coactivation_MM"].diagonal().sum() == k_act * tokens.count
    torch.testing.assert_close(stats["h_square_M"], h_TM.double().square().sum(0))


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.5])
def test_coverage_is_of_the_share_that_is_named(ratio, tokens):
    """S11: "top 10 %" was the top ``activation_ratio`` where that is smaller."""
    site, method, stats = observed(tokens, MoREConfig(activation_ratio=ratio))
    h_TM = torch.cat([h for _, h in site.activations()]).abs()
    seen = {c for row in h_TM for c in row.argsort(descending=True)[:6].tolist()}  # 6.4 of 64
    assert method.analyse(stats)["never_activated"]["0.1"] == pytest.approx(1 - len(seen) / 64)
    assert len(seen) > len({int(c) for c in h_TM.argmax(1)})
    assert stats["coactivation_MM"].diagonal().sum() == max(1, int(ratio * 64)) * tokens.count


def test_the_activation_spectrum_sums_sizes(tokens):
    """S16: Fig. 1 cumulates sum |h|; it was the root mean square."""
    site, method, stats = observed(tokens)
    h_TM = torch.cat([h for _, h in site.activations()]).double().abs()
    sizes = sorted(h_TM.sum(0).tolist(), reverse=True)
    found = method.analyse(stats)["activation_mass"]
    places = [int(i) for i in torch.linspace(0, 63, 21).long()]
    assert found == pytest.approx([sum(sizes[: i + 1]) / sum(sizes) for i in places])
    roots = sorted(h_TM.square().sum(0).sqrt().tolist(), reverse=True)
    assert found != pytest.approx([sum(roots[: i + 1]) / sum(roots) for i in places], rel=1e-3)


@pytest.mark.parametrize("block", [3, 7, 64])
def test_coactivation_by_blocks(block):
    channels = formulas.activated(torch.randn(40, 17), 0.3)
    whole, blocked = torch.zeros(17, 17), torch.zeros(17, 17)
    formulas.add_coactivation(whole, channels, 17)
    formulas.add_coactivation(blocked, channels, block)
    assert torch.equal(whole, formulas.mirror(blocked, block))
    frequency_M = torch.bincount(channels.flatten(), minlength=17)  # Eq. 5
    assert torch.equal(whole.diagonal().long(), frequency_M)


def test_importance_is_equation_7(tokens):
    site, _, stats = observed(tokens)
    ffn, found = site.view, importance_of(site, stats)
    x_TD = torch.cat(list(site.inputs())).double()
    h_TM = torch.cat([h for _, h in site.activations()]).double()
    for j in (0, 13, 63):
        up = sum(abs(float(ffn.up_MD[j, i])) * float((x_TD[:, i] ** 2).mean()) for i in range(32))
        down = sum(abs(float(ffn.down_DM[k, j])) for k in range(32))
        expected = up + down * float((h_TM[:, j] ** 2).mean())
        assert found[j].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("large", [1, 1 << 18], ids=["by blocks", ""])
@pytest.mark.parametrize(("count", "balanced"), [(3, True), (3, False), (24, True)])
def test_planted_coactivation_is_recovered(count, balanced, large, monkeypatch):
    """Channels that fire in separate groups are found again, in a shuffled order."""
    monkeypatch.setattr("moesaic.carving.more.formulas.LARGE", large)
    generator = torch.Generator().manual_seed(0)
    groups = torch.randperm(10 * count, generator=generator).view(count, 10)
    counts = torch.rand(10 * count + 4, 10 * count + 4, generator=generator)
    counts = counts + counts.T
    for group in groups:
        counts[group[:, None], group] += 50
    petals = formulas.petals_of(counts, torch.arange(10 * count), count, balanced, seed=0)
    assert {frozenset(p.tolist()) for p in petals} == {frozenset(g.tolist()) for g in groups}


@settings(max_examples=25, deadline=None)
@given(st.integers(12, 40), st.integers(1, 5), st.booleans(), st.integers(0, 6), st.integers(0, 5))
def test_petals_partition_their_members(width, experts, balanced, isolated, seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.rand(width, width, generator=generator)
    counts = counts + counts.T
    counts[:isolated] = counts[:, :isolated] = 0
    members = torch.randperm(width, generator=generator)[: width - 2].sort().values
    petals = formulas.petals_of(counts, members, experts, balanced, seed)
    assert len(petals) == experts
    assert torch.equal(torch.cat(petals).sort().values, members)
    sizes = [len(p) for p in petals]
    mean = len(members) / experts
    if balanced:
        assert max(sizes) - min(sizes) <= 1
    else:
        assert min(sizes) >= int(0.5 * mean)


def test_prototypes_are_equations_9_to_11(tokens):
    site = site_of(tiny_model("llama"), tokens, 2)
    backbone, petals = torch.arange(10), [torch.arange(10, 30), torch.arange(30, 64)]
    x_TD = torch.cat(list(site.inputs()))
    h_TM = torch.cat([h for _, h in site.activations()])
    members = formulas.memberships(backbone, petals, 64)
    found = formulas.prototypes(site, members, alpha=0.5)
    ours = [torch.cat([backbone, petal]) for petal in petals]
    energy = torch.stack([h_TM[:, own].norm(dim=1) / len(own) ** 0.5 for own in ours], 1)
    torch.testing.assert_close(formulas.energies(h_TM, members, 0.5), energy)
    for i in range(2):
        mean = x_TD[energy.argmax(1) == i].double().mean(0)
        torch.testing.assert_close(found[i], (mean / mean.norm()).float())


def test_expert_without_tokens_takes_its_highest_energy_ones(tokens):
    site = site_of(tiny_model("llama"), tokens, 2)
    h_TM = torch.cat([h for _, h in site.activations()])
    weakest = h_TM.square().sum(0).argsort()
    petals = [weakest[:1], weakest[1:]]  # the first can never win
    members = formulas.memberships(weakest[:0], petals, 64)
    found = formulas.prototypes(site, members, alpha=0.0)
    x_TD = torch.cat(list(site.inputs()))
    assert (formulas.energies(h_TM, members, 0.0).argmax(1) == 1).all()
    best = x_TD[h_TM[:, weakest[0]].abs().argmax()].double()
    torch.testing.assert_close(found[0], (best / best.norm()).float())


@pytest.mark.parametrize("config", [MoREConfig(), MoREConfig(balanced=False, alpha=1.0)])
def test_sunflower(tokens, config):
    """Experts meet in the backbone only, and together they are all neurons."""
    site, method, stats = observed(tokens, config)
    sizes = [LayerSize(1000, 64 * 96, 64)] * 4
    plan = method.carve_layer(stats, site, method.choose(sizes)[2])
    ends = np.cumsum([plan.backbone, *plan.petals])
    order = plan.order_M.tolist()
    core = set(order[: plan.backbone])
    experts = [core | set(order[a:b]) for a, b in itertools.pairwise(ends)]
    for i, one in enumerate(experts):
        for other in experts[:i]:
            assert one & other == core
    assert set().union(*experts) == set(range(64))
    score_M = importance_of(site, stats)
    assert min(score_M[list(core)]) >= max(score_M[list(set(range(64)) - core)])


def test_variants_share_backbone_and_budget(tokens):
    site, _, stats = observed(tokens)
    sizes = [LayerSize(1000, 6144, 64)] * 4
    plans = {}
    for variant in ("full", "backbone", "random", "static", "naive"):
        method = MoRE(MoREConfig(variant=variant))
        plans[variant] = method.carve_layer(stats, site, method.choose(sizes)[2])

    def active_width(plan):
        return plan.backbone + plan.top_k * sum(plan.petals) / len(plan.petals)

    full = plans["full"]
    assert torch.equal(plans["random"].order_M, full.order_M)
    assert plans["random"].routing == "random"
    alone = plans["backbone"].neurons_EW[0]
    assert {*alone.tolist()} == {*full.order_M[: full.backbone].tolist()}
    assert plans["static"].width == active_width(full)
    assert plans["static"].kind == plans["backbone"].kind == "cut"  # as slim makes them
    assert plans["naive"].backbone < 64 % len(plans["naive"].petals) + 1
    assert abs(active_width(plans["naive"]) - active_width(full)) < 8


def test_a_backbone_of_no_neurons_is_counted(tokens):
    """Where the petals are the whole FFN, the variant without them has none."""
    config = MoREConfig(active=0.5, layers="all", variant="backbone")
    result = moesaic.carve(tiny_model("llama"), config, calibration=tokens)
    use = layer_uses(result.model, base_arch(result.model.config))[0]
    assert (use.width, use.ffn, use.dropped) == (0, 0, 3 * 32 * 64)


# --- budget --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(512, 4096), st.integers(2, 16), st.data(), st.floats(0.5, 0.99))
def test_budget_round_trip(width, experts, data, active):
    top_k = data.draw(st.integers(1, experts - 1))
    sizes = [LayerSize(attention=width * 100, ffn=width * 300, width=width)] * 8
    try:
        splits = split_for_target(sizes, range(2, 8), active, experts, top_k)
    except MoesaicError:
        floor = active_ratio(sizes, dict.fromkeys(range(2, 8), width * top_k / experts))
        assert active < floor + 1e-9
        return
    found = active_ratio(sizes, {i: s.active_width for i, s in splits.items()})
    step = 0.75 * 0.75 * max(0.02, (experts - top_k) / width)
    assert found == pytest.approx(active, abs=step + 1e-9)
    for split in splits.values():
        assert split.backbone + experts * split.petal == width
        assert split.backbone >= 0


FAST = MoREConfig.bundles["fast"]
SIZES = {
    "smollm2": LayerSize(884_736, 2_654_208, 1536),
    "tiny-dense": LayerSize(196_608, 589_824, 768),
    "llama-3-8b": LayerSize(41_943_040, 176_160_768, 14_336),
}


def fast_split(name, active, **options):
    size = SIZES[name]
    splits = MoRE(MoREConfig(**FAST | options, active=active)).choose([size] * 2)
    assert splits[0] == splits[1]
    return size, splits[0]


def test_widths_are_multiples_as_near_to_the_target_as_these_allow():
    """No number of idle petals of any width comes nearer, but for what is not noticed."""
    for name, active in itertools.product(SIZES, (0.9, 0.8, 0.7, 0.625)):
        size, split = fast_split(name, active)
        assert split.petal % 32 == split.backbone % 32 == 0
        assert split.backbone + split.experts * split.petal == size.width
        assert 1 <= split.top_k < split.experts == 6
        idle = size.width * (1 - active) * (size.attention + size.ffn) / size.ffn
        nearest = min(
            abs(petal * count - idle)
            for petal in range(32, size.width // split.experts + 1, 32)
            for count in range(1, split.experts)
        )
        missed = abs((split.experts - split.top_k) * split.petal - idle)
        assert missed <= max(nearest, NEAR * size.width + 1e-6)
        assert 0.5 <= split.backbone / split.active_width < 0.9  # two thirds, where widths allow


@pytest.mark.parametrize(
    ("active", "options", "wanted"),
    [
        (0.8, {}, Split(backbone=768, petal=128, experts=6, top_k=3)),
        (0.8, {"experts": 24}, Split(backbone=768, petal=32, experts=24, top_k=11)),
        (0.8, {"experts": 24, "top_k": 12}, Split(backbone=768, petal=32, experts=24, top_k=12)),
        (0.8, {"experts": 4, "top_k": 1}, Split(backbone=1024, petal=128, experts=4, top_k=1)),
        (0.75, {"multiple": 256}, Split(backbone=0, petal=256, experts=6, top_k=4)),
        (1.0, {}, Split(backbone=1536, petal=0, experts=6, top_k=5)),
    ],
)
def test_a_number_of_petals_and_a_top_k_may_be_given_beside_a_multiple(active, options, wanted):
    """What is said to work below does, and where all is asked for nothing is taken."""
    assert fast_split("smollm2", active, **options)[1] == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple": 100}, r"multiple 100: the 1536 neurons .*; multiple=96 works"),
        ({"multiple": 1536}, r"multiple=768 works"),
        ({"experts": 64}, r"fewer than 64 such petals have; experts=48 works"),
        ({"multiple": 256}, r"active 0\.8 is out of reach .* nearest that works is active=0\.75"),
        ({"balanced": False}, "or balanced=False"),
    ],
)
def test_multiples_that_cannot_be_say_what_would_work(options, message):
    with pytest.raises(MoesaicError, match=message):
        fast_split("smollm2", 0.8, **options)


def test_the_record_says_what_multiples_made_of_the_target(tokens):
    config = MoREConfig(active=0.83, experts=4, top_k=0, multiple=8, layers="all")
    result = moesaic.carve(tiny_model("llama"), config, calibration=tokens)
    layer = result.plan.layers[0]
    assert (layer.backbone, set(layer.petals)) == (32, {8})
    # of 64 neurons 16 idle; attention has 3,072 of a layer's 9,216 weights
    assert result.summary["active"] == pytest.approx(1 - 16 / 64 * 6144 / 9216)
    text = str(result.record("model", "out"))
    assert "0.8333 of the projections' parameters, where 0.83 was asked for" in text


def test_budget_counts_the_models_own_projections():
    model = tiny_model("llama")
    sizes = layer_sizes(model, dense_arch(model.config))
    attention = 2 * 32 * 32 + 2 * 32 * 16
    assert sizes[0] == LayerSize(attention, ffn=3 * 32 * 64, width=64, hidden=32)
    assert active_ratio(sizes, {}) == 1


def test_layer_choices():
    assert chosen_layers("last-half", 5) == [2, 3, 4]
    assert chosen_layers("all", 3) == [0, 1, 2]
    assert chosen_layers("uniform", 6) == [1, 3, 5]
    assert chosen_layers("early-middle", 6) == [0, 1, 2]
    assert chosen_layers("4,1,4", 6) == [1, 4]


def test_jsd_bounds():
    assert jsd([0.25] * 4, [0.25] * 4) == 0
    assert 0 < jsd([0.7, 0.1, 0.1, 0.1], [0.25] * 4) < 1


@pytest.mark.parametrize("variant", ["full", "static", "backbone"])
def test_full_width_is_dense(variant, tokens):
    """rho_share = 1: the backbone is everything, and the carved model is the dense one."""
    model = tiny_model("llama")
    wanted = model(tokens.input_ids).logits
    config = MoREConfig(active=1.0, layers="all", variant=variant)
    result = moesaic.carve(model, config, calibration=tokens)
    for layer in result.plan.layers.values():
        (order,) = layer.tensors().values()  # no router
        assert order.flatten().tolist() == [*range(64)]
    assert len(result.plan.layers) == 4
    torch.testing.assert_close(result.model(tokens.input_ids).logits, wanted, rtol=0, atol=1e-5)
    less = moesaic.carve(model, replace(config, active=0.95), calibration=tokens).model
    assert not torch.allclose(less(tokens.input_ids).logits, wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("variant", ["full", "static", "random"])
def test_rho_share_is_the_backbone(variant, tokens):
    """Sec. 2.2: k_share = max(1, floor(rho_share m)); the petals are what it leaves, all of it."""
    model = tiny_model("llama")
    config = MoREConfig(share=0.56, experts=4, layers="all", variant=variant)
    result = moesaic.carve(model, config, calibration=tokens)
    width, sizes = 64, layer_sizes(model, dense_arch(model.config))
    k_share = int(0.56 * width)  # 35.84
    petals = (width - k_share) / 4
    for layer, of in zip(result.plan.layers.values(), result.model.model.layers, strict=True):
        if variant == "static":
            assert of.mlp.down_proj.weight.shape[1] == k_share + int(petals)
            continue
        assert layer.backbone == k_share
        assert sum(layer.petals) == width - k_share
        assert max(layer.petals) - min(layer.petals) <= 1
    wanted = active_ratio(sizes, dict.fromkeys(range(len(sizes)), k_share + int(petals)))
    assert result.summary["active"] == pytest.approx(wanted)


def test_shares_below_one_channel_are_left_out(tokens):
    """Table 4 has 5e-4 of 14,336 channels; of 64 not even a hundredth is one."""
    _, method, stats = observed(tokens)
    assert set(method.analyse(stats)["never_activated"]) == {"0.1"}
    seen_CM = torch.ones(len(formulas.COVERAGE), 2000) > 0
    wide = {**stats, "h_size_M": torch.ones(2000), "covered_CM": seen_CM}
    assert set(method.analyse(wide)["never_activated"]) == {"0.1", "0.01", "0.001", "0.0005"}
