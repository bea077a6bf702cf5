"""ToMoE's objective and masks against values computed by hand, or by a few lines of their own."""

import math

import pytest
import torch
from builders import configured, tiny_model
from torch import nn

from moesaic.arch.dense import AttentionNames, Heads
from moesaic.arch.lookup import dense_arch
from moesaic.carving.overlapping_layer import HeadRouter
from moesaic.carving.tomoe import masks
from moesaic.carving.tomoe.config import ToMoEConfig
from moesaic.carving.tomoe.method import decide, learned_logits
from moesaic.carving.tomoe.student import MaskingHooks
from moesaic.modules.running import RunningTokens

HEADS = Heads(queries=4, keys=2, size=4, rotary=4)
SHAPES = (
    masks.LayerShape(hidden=6, width=10, heads=HEADS, ffn=180, attention=192),
    masks.LayerShape(hidden=6, width=20, heads=HEADS, ffn=360, attention=192),
)
MEDIAN = 0.36651292058166435  # -ln ln 2


def masking_of(**options):
    """Modules of two layers, their embeddings and weights at random, about half of a mask off."""
    config = configured(ToMoEConfig, **{"experts": 3, "bias": 0.0, "head_bias": 0.1, **options})
    torch.manual_seed(0)
    masking = masks.MaskingModules(config, SHAPES)
    with torch.no_grad():
        for parameter in masking.parameters():
            parameter.normal_()
    masking.begin(torch.ones(2, 5, dtype=torch.bool), noise=False)
    masking.E_all = torch.randn(4, 3, 128)
    return masking


def inputs():
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))


def on(logits, bias):
    """Where a deterministic mask is on: the logit, b and the median of the noise exceed zero."""
    return [[v + bias + MEDIAN > 0 for v in row] for row in logits.tolist()]


# --- noise and masks -----------------------------------------------------------------------------


def test_noise_is_gumbels():
    """exp(-exp(-x)) of it is below x, at every decile; its mean is Euler's constant."""
    torch.manual_seed(0)
    drawn = masks.gumbel_like(torch.empty(200_000, dtype=torch.float64))
    for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        quantile = -math.log(-math.log(share))
        assert (drawn < quantile).double().mean().item() == pytest.approx(share, abs=0.005)
    assert drawn.mean().item() == pytest.approx(0.5772156649, abs=0.01)
    assert abs(masks.MEDIAN - MEDIAN) < 1e-12
    assert math.exp(-math.exp(-masks.MEDIAN)) == pytest.approx(0.5)


def test_a_neurons_mask_by_hand(monkeypatch):
    """Eq. 15: round(sigmoid((x + g + b) / tau)), with the gradient s (1 - s) / tau."""
    noise = torch.tensor([-1.0, 2.0, 0.25, -4.0])
    monkeypatch.setattr(masks, "gumbel_like", lambda like: noise)
    values = [0.5, -3.0, -3.0, 0.0]
    for tossed, added in ((True, noise.tolist()), (False, [MEDIAN] * 4)):
        x = torch.tensor(values, requires_grad=True)
        mask = masks.st_sigmoid(x, 0.4, 2.5, tossed)
        mask.sum().backward()
        for found, slope, v, g in zip(mask.tolist(), x.grad.tolist(), values, added, strict=True):
            soft = 1 / (1 + math.exp(-(v + g + 2.5) / 0.4))
            assert found == (1.0 if v + g + 2.5 > 0 else 0.0)
            assert slope == pytest.approx(soft * (1 - soft) / 0.4, rel=1e-3)


def test_a_tokens_expert_by_hand(monkeypatch):
    """Eq. 14: the one-hot of the largest x + g, with the softmax's gradient at temperature tau."""
    noise = torch.tensor([[2.5, 0.0, 0.0]])
    monkeypatch.setattr(masks, "gumbel_like", lambda like: noise)
    weight = torch.tensor([[1.0, -2.0, 0.5]])
    for tossed, best, added in ((True, 0, noise), (False, 1, torch.zeros(1, 3))):
        x = torch.tensor([[1.0, 3.0, 2.0]], requires_grad=True)
        chosen = masks.st_gs_max(masks.gs_max(x, 0.4, tossed))
        (chosen * weight).sum().backward()
        assert chosen.tolist() == [[float(i == best) for i in range(3)]]
        powers = [math.exp(v / 0.4) for v in (x.detach() + added)[0].tolist()]
        soft = [p / sum(powers) for p in powers]
        mean = sum(s * w for s, w in zip(soft, weight[0].tolist(), strict=True))
        wanted = [s * (w - mean) / 0.4 for s, w in zip(soft, weight[0].tolist(), strict=True)]
        assert x.grad[0].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-7)


# --- regularisers --------------------------------------------------------------------------------


def test_regularisers_by_hand():
    for used, ratio in ((0.2, 0.601 / 0.201), (0.9, 0.901 / 0.601)):
        found = masks.f_reg(torch.tensor(used), 0.6).item()
        assert found == pytest.approx(math.log(ratio), rel=1e-5)
    s_NM = torch.tensor([[1.0, 0.5, 0.0, 0.0], [0.0, 0.5, 0.25, 0.0]])
    assert masks.union(s_NM).item() == pytest.approx((1 + 0.75 + 0.25 + 0) / 4)
    chosen_TN = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]])
    probability_TN = torch.tensor(
        [[0.5, 0.25, 0.25], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.6, 0.0, 0.4]]
    )
    wanted = 3 * (3 / 4 * 1.9 / 4 + 1 / 4 * 1.25 / 4)
    assert masks.load_balance(chosen_TN, probability_TN).item() == pytest.approx(wanted)


def test_the_objectives_terms_by_hand():
    """Eqs. 7-10 from widths, unions and balances of two layers that differ."""
    masking = masking_of(active=0.5, parameters=16.0, union=2.0, balance=1.0)
    one = {"width": 4.0, "union": 0.7, "balance": 0.5}
    two = {"width": 15.0, "union": 0.9, "balance": 0.4}
    heads = [{"qk": 2.0, "vo": 3.0, "union": 0.8}, {"qk": 4.0, "vo": 1.0, "union": 0.2}]
    for i, (ffn, attention) in enumerate(zip((one, two), heads, strict=True)):
        masking.measured[i, "mlp"] = {n: torch.tensor(v) for n, v in ffn.items()}
        masking.measured[i, "mha"] = {n: torch.tensor(v) for n, v in attention.items()}
    # 18 weights a neuron, 192 / 2 / 4 = 24 a dimension of all heads
    used = 18 * 4 + 24 * (2 + 3) + 18 * 15 + 24 * (4 + 1)
    active = used / (180 + 360 + 2 * 192)
    unions = [math.log(1.001 / (u + 1e-3)) for u in (0.7, 0.8, 0.9, 0.2)]
    wanted = {
        "active": active,
        "parameters": abs(math.log((active + 1e-3) / 0.501)),
        "union": sum(unions) / 4,
        "balance": (0.5 + 0.4) / 2,
    }
    terms = masking.terms()
    assert {n: t.item() for n, t in terms.items()} == pytest.approx(wanted, rel=1e-5)
    total = 16 * wanted["parameters"] + 2 * wanted["union"] + wanted["balance"]
    assert masking.penalty(terms).item() == pytest.approx(total, rel=1e-5)
    factors = {"parameters": 3.0, "union": 5.0, "balance": 7.0}
    masking.config = configured(ToMoEConfig, experts=3, active=0.5, **factors)
    total = 3 * wanted["parameters"] + 5 * wanted["union"] + 7 * wanted["balance"]
    assert masking.penalty(terms).item() == pytest.approx(total, rel=1e-5)


# --- what a layer's masks are --------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
@torch.no_grad()
def test_an_ffns_masks_by_hand(index):
    """Eq. 3, of the FFN's own expert embeddings; and what the terms are made of, padding out."""
    masking, x_BLD, valid_BL = masking_of(), inputs(), torch.arange(10).view(2, 5) < 8
    masking.valid_T = valid_BL.flatten()
    s_BLM = masking.ffn(index, x_BLD)
    modules = masking.mlp_modules(index)
    mask_NM = on(modules.proj_d(masking.E_all[2 * index + 1]), masking.config.bias)
    widths = [sum(row) for row in mask_NM]
    assert len(set(widths)) > 1, "the widest is not the narrowest"
    logits = (x_BLD.flatten(0, 1) @ modules.router.weight.T).tolist()
    tokens = [t for t in range(10) if valid_BL.flatten()[t]]
    best = [row.index(max(row)) for row in logits]
    for t in range(10):
        assert s_BLM.flatten(0, 1)[t].bool().tolist() == mask_NM[best[t]]
    seen = {name: value.item() for name, value in masking.measured[index, "mlp"].items()}
    assert seen["width"] == max(widths)
    together = [any(column) for column in zip(*mask_NM, strict=True)]
    assert seen["union"] == pytest.approx(sum(together) / len(together))
    balance = 0.0
    for i in range(3):
        share = sum(best[t] == i for t in tokens) / len(tokens)
        powers = {t: [math.exp(v / 0.4) for v in logits[t]] for t in tokens}
        soft = [powers[t][i] / sum(powers[t]) for t in tokens]
        balance += 3 * share * sum(soft) / len(tokens)
    assert seen["balance"] == pytest.approx(balance, rel=1e-4)


@torch.no_grad()
def test_the_widest_toss_is_counted_where_the_paper_does(monkeypatch):
    """``noise``: the maximum over tokens of the neurons that each was tossed."""
    masking = masking_of(noise=True)
    masking.begin(torch.ones(2, 5, dtype=torch.bool), noise=True)
    torch.manual_seed(3)
    s_BLM = masking.ffn(0, inputs())
    widths = s_BLM.sum(-1).flatten().tolist()
    assert len(set(widths)) > 1
    assert masking.measured[0, "mlp"]["width"].item() == max(widths)


@pytest.mark.parametrize("index", [0, 1])
@torch.no_grad()
def test_attentions_masks_by_hand(index):
    """Eqs. 4 and 5, of attention's own embeddings: pairs of Q and K, and each token's V and O."""
    masking, x_BLD = masking_of(), inputs()
    masking.valid_T[8:] = False
    found = masking.attention(index, x_BLD)
    modules = masking.mha_modules(index)
    mean = masking.E_all[2 * index].mean(0)
    pairs = on(modules.proj_d(mean)[None, 4:], 0.1)[0]  # RoPE turns dimension i with i + 2
    tokens = on(modules.proj_d(modules.proj_e(x_BLD) + mean)[..., :4].flatten(0, 1), 0.1)
    assert found["q"].bool().tolist() == [*pairs, *pairs] * 4
    assert found["k"].bool().tolist() == [*pairs, *pairs] * 2
    for part, heads in (("v", 2), ("o", 4)):
        assert found[part].flatten(0, 1).bool().tolist() == [row * heads for row in tokens]
    seen = {name: value.item() for name, value in masking.measured[index, "mha"].items()}
    real = tokens[:8]
    assert seen["qk"] == 2 * sum(pairs)
    assert seen["vo"] == pytest.approx(sum(map(sum, real)) / 8)
    assert seen["union"] == pytest.approx(sum(any(c) for c in zip(*real, strict=True)) / 4)


@torch.no_grad()
def test_masks_are_tossed_and_what_is_deployed_is_counted():
    """Without ``noise`` the terms are those of the masks without noise."""
    quiet, tossed = masking_of(), masking_of()
    tossed.E_all = quiet.E_all
    tossed.noise = True
    torch.manual_seed(5)
    for made, term, count in (("ffn", "mlp", "width"), ("attention", "mha", "vo")):
        found = [getattr(masking, made)(0, inputs()) for masking in (quiet, tossed)]
        masks = [f if made == "ffn" else f["v"] for f in found]
        assert not torch.equal(*masks)
        terms = [masking.measured[0, term] for masking in (quiet, tossed)]
        assert terms[0][count] == terms[1][count]
        assert terms[0]["union"] == terms[1]["union"]


def test_the_gradient_of_the_load_balance(monkeypatch):
    """Eq. 9: N sum F P, F counted, P of the noisy softmax before it is one-hot; padding is out."""
    masking, x_BLD, valid_BL = masking_of(), inputs(), torch.arange(10).view(2, 5) < 8
    x_TD = x_BLD.flatten(0, 1)[valid_BL.flatten()]
    noise = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(2))
    for tossed in (False, True):
        masking.begin(valid_BL, noise=tossed)
        drawn = lambda x: noise if x.shape == noise.shape else 0 * x  # noqa: E731
        monkeypatch.setattr(masks, "gumbel_like", drawn)
        weight = masking.mlp_modules(0).router.weight
        weight.grad = None
        masking.ffn(0, x_BLD)
        masking.measured[0, "mlp"]["balance"].backward()
        W = weight.detach().double().requires_grad_()
        added = noise.flatten(0, 1)[valid_BL.flatten()] * tossed
        P_TN = torch.exp((x_TD.double() @ W.T + added) / 0.4)
        P_TN = P_TN / P_TN.sum(1, keepdim=True)
        F = [(P_TN.argmax(1) == i).double().mean().item() for i in range(3)]
        assert len(set(F)) > 1, "a balanced router has no gradient"
        (3 * sum(F[i] * P_TN[:, i].mean() for i in range(3))).backward()
        torch.testing.assert_close(weight.grad.double(), W.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "phi3", "phi"])
def test_a_mask_in_three_places_is_eq_2(model_type):
    """sigma(X W_G S) * (X W_U S) S W_D: the value of one mask, the gradient of three factors."""
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    ids = torch.arange(1, 9)[None]
    width = arch.use(arch.layers(model)[0]).width
    s_BLM = (torch.rand(1, 8, width, generator=torch.Generator().manual_seed(0)) > 0.4).float()

    class ByHand:
        def __init__(self):
            self.given = [s_BLM.clone().requires_grad_() for _ in arch.layers(model)]

        def attention(self, index, x_BLD):
            return {}

        def ffn(self, index, x_BLD):
            self.x_BLD = x_BLD if index == 0 else self.x_BLD
            return self.given[index]

    logits, slopes = [], []
    for projections in (False, True):
        masker = ByHand()
        masked = MaskingHooks(model, arch, masker, projections)
        out = arch.ffn_of(arch.layers(model)[0])
        seen = []
        handle = out.register_forward_hook(lambda m, a, y, into=seen: into.append(y))
        logits.append(model(ids).logits)
        seen[0].sum().backward()
        handle.remove()
        masked.remove()
        slopes.append(masker.given[0].grad)
    torch.testing.assert_close(logits[0], logits[1])
    ffn = arch.dense(arch.layers(model)[0])
    s = s_BLM.clone().requires_grad_()
    x, bias = masker.x_BLD.detach(), torch.nn.functional.linear
    up = bias(x, ffn.up_MD, ffn.up_bias_M) * s
    gate = None if ffn.gate_MD is None else bias(x, ffn.gate_MD, ffn.gate_bias_M) * s
    h = (ffn.act(up) if gate is None else ffn.act(gate) * up) * s
    bias(h, ffn.down_DM, ffn.down_bias_D).sum().backward()
    torch.testing.assert_close(slopes[1], s.grad, rtol=1e-4, atol=1e-6)
    off = s_BLM == 0
    assert slopes[0][off].abs().max() > 0, "one mask: idle neurons learn"
    assert slopes[1][off].abs().max() == 0, "three: they do not"


@torch.no_grad()
def test_a_result_that_tosses_is_one_toss_of_its_logits():
    """Eqs. 11 and 15: the experts, Q and K of a result with noise; another seed is another toss."""
    masking, found = masking_of(noise=True, seed=7), {}
    for seed in (7, 7, 8):
        object.__setattr__(masking.config, "seed", seed)
        found[seed], before = learned_logits(masking, {}), found.get(seed)
        if before:
            assert torch.equal(before[1].mlp_NM, found[seed][1].mlp_NM)
    assert not torch.equal(found[7][0].mlp_NM, found[8][0].mlp_NM)
    torch.manual_seed(7)
    for i in range(2):
        ffn, static = masking.expert_logits(i), masking.static_logits(i)
        torch.testing.assert_close(found[7][i].mlp_NM, ffn + masks.gumbel_like(ffn))  # b is 0 here
        tossed = static + 0.1 + masks.gumbel_like(static)
        torch.testing.assert_close(found[7][i].qk, tossed[4:])
        torch.testing.assert_close(found[7][i].vo_TA, tossed[None, :4])


@torch.no_grad()
def test_routed_dimensions_are_tossed_too():
    masking = masking_of(noise=True, attention="routed", seed=7)
    logits_TA = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    first, second = (learned_logits(masking, {0: logits_TA})[0].vo_TA for _ in range(2))
    assert torch.equal(first, second)
    noise_TA = first - logits_TA - 0.1
    assert noise_TA.std() > 0.1, "no constant, as the median is"


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True])
def test_a_decision_says_how_its_layers_run(given):
    options = {"materialize": given, "noise": given}
    masking = masking_of(attention="none", **options)
    plans, _ = decide(masking, learned_logits(masking, {}), AttentionNames(), 0.0)
    for plan in plans.values():
        assert (plan.materialized, plan.noise) == (given, given)


@torch.no_grad()
@pytest.mark.parametrize(("threshold", "routed"), [(-100.0, False), (0.0, True)])
def test_values_are_routed_where_some_of_them_go(threshold, routed):
    masking = masking_of(attention="routed")
    logits_TA = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    layers = {0: learned_logits(masking, {0: logits_TA})[0]}
    assert (layers[0].widths(threshold)[2] < 4) == routed
    plans, _ = decide(masking, layers, AttentionNames(), threshold)
    assert bool(plans[0].head_router) == routed


def test_a_head_router_that_tosses_prefers_what_its_logits_prefer():
    torch.manual_seed(0)
    quiet, noisy = (HeadRouter(6, 5, 4, 2, passage) for passage in (None, RunningTokens()))
    for parameter in quiet.parameters():
        nn.init.normal_(parameter)
    noisy.load_state_dict(quiet.state_dict())
    x_TD = torch.randn(2000, 6)
    plain, tossed = quiet(x_TD), noisy(x_TD)
    assert torch.equal(tossed, noisy(x_TD))
    assert (tossed.sum(-1) == 2).all()
    assert not torch.equal(plain, tossed)
    assert (plain * tossed).sum() > 1.2 * 2000  # at random 1 of 2 would agree
