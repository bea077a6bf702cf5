"""Layers' formulas by hand: sizes that are counted, regressions, norms and orders of neurons."""

import math
from types import SimpleNamespace

import pytest
import torch
from builders import carved_layer, converted, drawn, stream_of, tiny_model, tiny_moe
from cases import many_tokens
from torch import nn
from torch.nn import functional as F

from moesaic.arch.dense import LayerUse
from moesaic.arch.lookup import base_arch, moe_arch
from moesaic.arch.routing import RouterParts, RoutingFunction
from moesaic.carving.carved_layer import CarvedLayer
from moesaic.carving.overlapping_layer import OverlappingLayer
from moesaic.metrics.score import model_size
from moesaic.modules.blocks import make_skipping, skip
from moesaic.plans import recovery
from moesaic.plans.cut import CutLayer

ATTENTION = 2 * 32 * 32 + 2 * 32 * 16
"""Queries and outputs; keys and values of half as many heads."""
NEURON = 3 * 32


def used(layer):
    """What is counted of a layer of 64 neurons once it is converted."""
    return model_size(converted(tiny_model("llama"), {1: layer})).layers[1]


# --- sizes ---------------------------------------------------------------------------------------

four = torch.stack([torch.arange(24) + i for i in range(4)])
USES = {
    "uneven experts": (
        carved_layer(40, (8, 16)),
        LayerUse("carved", 64, 52, ATTENTION, 64 * NEURON, experts=2, top_k=1, router=64),
    ),
    "equal experts": (
        carved_layer(34, (10, 10, 10), top_k=2),
        LayerUse(
            "carved", 64, 54, ATTENTION, 64 * NEURON,
            experts=3, top_k=2, expert_width=10, router=96,
        ),
    ),
    "fewer neurons": (
        carved_layer(40, ()),
        LayerUse("carved", 40, 40, ATTENTION, 40 * NEURON, dropped=24 * NEURON),
    ),
    "cut": (
        CutLayer(None, torch.arange(24)[None], 64, counted=True),
        LayerUse("cut", 24, 24, ATTENTION, 24 * NEURON, dropped=40 * NEURON),
    ),
    "copies": (
        OverlappingLayer(four, drawn(4, 32), materialized=True),
        LayerUse(
            "overlapping", 96, 24, ATTENTION, 96 * NEURON,
            experts=4, top_k=1, expert_width=24, router=128, copied=32 * NEURON,
        ),
    ),
    "shared weights": (
        OverlappingLayer(four, drawn(4, 32)),
        LayerUse(
            "overlapping", 64, 24, ATTENTION, 64 * NEURON,
            experts=4, top_k=1, expert_width=24, router=128,
        ),
    ),
    "dimensions of heads": (
        OverlappingLayer(
            rows={"q_proj": torch.arange(16), "k_proj": torch.arange(8)},
            head_router={
                "embed": drawn(6, 32), "shift": drawn(6), "scale": drawn(6), "offset": drawn(6),
                "project": drawn(8, 6),
            },
            head_top_k=2,
        ),
        LayerUse(
            "overlapping", 64, 64, ATTENTION - 16 * 32 - 8 * 32, 64 * NEURON,
            router=6 * 32 + 3 * 6 + 8 * 6, dropped=16 * 32 + 8 * 32,
            active_attention=1 - (32 * 16 + 32 * 32) * (1 - 2 / 8) / (ATTENTION - 24 * 32),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_what_a_layer_uses(name):
    layer, wanted = USES[name]
    found = used(layer)
    assert {k: pytest.approx(v) for k, v in vars(wanted).items()} == vars(found)


def test_more_neurons_than_there_were_are_copies():
    model = converted(tiny_model("llama"), {1: carved_layer(40, (12, 12))})
    arch = base_arch(model.config)
    use = CarvedLayer.use(arch.layers(model)[1], arch, {}, 48)
    assert (use.dropped, use.copied) == (0, 16 * NEURON)


@pytest.mark.parametrize("groups", [1, 2])
def test_places_without_experts_are_at_the_end_of_each_group(groups):
    down_E = torch.arange(1.0, 5.0).view(4, 1, 1)
    layer = CutLayer(torch.tensor([0, 2, 5, 7]), down_E=down_E).padded(8, groups)
    kept = {1: [0, 2, 5, 7, -1, -1, -1, -1], 2: [0, 2, -1, -1, 5, 7, -1, -1]}[groups]
    downs = {1: [1, 2, 3, 4, 0, 0, 0, 0], 2: [1, 2, 0, 0, 3, 4, 0, 0]}[groups]
    assert layer.kept == kept
    assert layer.experts.tolist() == [0, 2, 5, 7]
    assert layer.down_E.shape == (8, 1, 1)
    assert layer.down_E.flatten().tolist() == downs


def test_experts_that_are_not_there_hold_zeros_and_are_never_chosen():
    model = tiny_moe("gpt_oss")
    before = {n: t.clone() for n, t in model.model.layers[2].mlp.named_parameters()}
    down_E = drawn(2, *before["experts.down_proj"].shape[1:])
    converted(model, {2: CutLayer(torch.tensor([1, 5]), down_E=down_E).padded(4)})
    after = dict(model.model.layers[2].mlp.named_parameters())
    for name, old in before.items():
        new = after[name]
        wanted = down_E if name == "experts.down_proj" else old[[1, 5]]
        assert len(new) == 4
        assert torch.equal(new[:2], wanted), name
        never = name == "router.bias"
        assert torch.equal(new[2:], torch.full_like(new[2:], torch.finfo().min / 4 * never)), name


# --- routing -------------------------------------------------------------------------------------


def test_hooks_of_a_router_see_nothing_of_its_routing_function():
    """Devices' hooks would move what it is asked about; users' would be called with no token."""
    model = tiny_moe("ernie4_5_moe")
    arch = moe_arch(model.config)
    view = arch.mixture(arch.layers(model)[1])
    router = view.router
    seen = []
    for module in router.modules():
        module.register_forward_hook(lambda *_: seen.append("after"))
        module.register_forward_pre_hook(lambda *_: seen.append("before"))
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    routing = RoutingFunction(view.block, arch.parts)
    weights_NK, chosen_NK = routing.choose(drawn(5, 8))
    assert weights_NK.shape == chosen_NK.shape == (5, 2)
    assert seen == []
    assert all(torch.equal(before[name], t) for name, t in router.state_dict().items())


class Asking(nn.Module):
    """A router that wants sentences, and of its block a bias to choose by and a temperature."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(drawn(4, 6, seed=1))

    def forward(self, hidden_BTD, heat, correction):
        _, _, _ = hidden_BTD.shape
        logits_NE = F.linear(hidden_BTD, self.weight).flatten(0, 1)
        scores_NE = (logits_NE / heat).sigmoid()
        chosen_NK = (scores_NE + correction).topk(2).indices
        return logits_NE, scores_NE.gather(1, chosen_NK), chosen_NK


class Asked(nn.Module):
    """Its block."""

    heat, scale = 4.0, 2.5

    def __init__(self):
        super().__init__()
        self.gate = Asking()
        self.correction = nn.Parameter(torch.tensor([0.0, 3.0, 0.0, 0.1]))


@pytest.mark.parametrize("gone", [None, 1])
def test_a_router_is_given_all_that_its_block_gives_it(gone):
    parts = RouterParts(choice_bias="correction", lifted=True, factor="scale")
    routing = RoutingFunction(Asked(), parts)
    logits_NE = drawn(7, 4)
    allowed_NE = None if gone is None else torch.arange(4).ne(gone).expand(7, 4)
    score_NE = (logits_NE / 4).sigmoid()
    biased_NE = score_NE + torch.tensor([0.0, 3.0, 0.0, 0.1])
    if gone is not None:
        biased_NE[:, gone] = -math.inf
    wanted_NK = biased_NE.topk(2).indices
    weights_NK, chosen_NK = routing.choose(logits_NE, allowed_NE)
    assert torch.equal(chosen_NK, wanted_NK)
    torch.testing.assert_close(weights_NK, 2.5 * score_NE.gather(1, wanted_NK))
    if allowed_NE is not None:
        found_NK = routing.routed(logits_NE, allowed_NE)[1]
        torch.testing.assert_close(found_NK, score_NE.gather(1, wanted_NK))
    assert torch.equal(routing.routed(logits_NE)[0], logits_NE)


def test_each_token_skips_by_its_own_weights():
    """Of eight experts: one token skips both of its tail, one the last, two none."""
    weights_TK = torch.tensor([[0.9, 0.05, 0.05], [0.1, 0.5, 0.4], [0.4, 0.3, 0.3], [0, 0, 0]])
    chosen_TK = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 0, 1], [2, 3, 4]])
    left_TK, kept_TK = skip(weights_TK, chosen_TK, 0.25, "tail", 8)
    assert kept_TK.tolist() == [[1, 8, 8], [5, 6, 8], [7, 0, 1], [2, 3, 4]]
    torch.testing.assert_close(left_TK[:2], torch.tensor([[1.0, 0, 0], [5 / 9, 4 / 9, 0]]))
    assert torch.equal(left_TK[2:], weights_TK[2:]), "to the bit, and no weights at all are zeros"


def test_a_skipped_place_has_the_number_after_the_last_expert():
    model = tiny_moe("mixtral")
    arch = moe_arch(model.config)
    view = arch.mixture(arch.layers(model)[1])
    make_skipping(view.router, 0.999, "top2", view.experts)
    _, weights_TK, chosen_TK = view.router(drawn(5, 32))
    skipped_T = weights_TK[:, 1] == 0
    assert skipped_T.any()
    assert (chosen_TK[skipped_T, 1] == 8).all()
    assert (chosen_TK[:, 0] < 8).all()


# --- regression ----------------------------------------------------------------------------------


def ridge_of(x_TF, y_TO, strength):
    """(X^T X + lambda m)^-1 X^T Y, m the mean square sum; 0 at infinity."""
    if strength == math.inf:
        return torch.zeros(x_TF.shape[1], y_TO.shape[1], dtype=torch.float64)
    x_TF, y_TO = x_TF.double(), y_TO.double()
    penalty = strength * x_TF.square().sum(0).mean()
    return torch.linalg.solve(x_TF.T @ x_TF + penalty * torch.eye(x_TF.shape[1]), x_TF.T @ y_TO)


@pytest.mark.parametrize("noise", [0.3, 30.0, 0.0])
def test_a_regression_is_the_best_strength_on_held_out_tokens(noise):
    batches = []
    for seed, tokens in enumerate((40, 23)):
        x_TF = drawn(tokens, 6, seed=seed)
        y_TO = x_TF @ drawn(6, 3, seed=9) + noise * drawn(tokens, 3, seed=7 + seed)
        batches.append((x_TF, y_TO))
    ridge = recovery.Ridge(6, 3)
    for batch in batches:
        ridge.add(*batch)
    found = ridge.solve()
    cuts = [len(x) - len(x) // recovery.HELD_OUT for x, _ in batches]
    fit = [torch.cat([b[k][:c] for b, c in zip(batches, cuts, strict=True)]) for k in (0, 1)]
    held = [torch.cat([b[k][c:] for b, c in zip(batches, cuts, strict=True)]) for k in (0, 1)]
    errors = []
    for strength in recovery.STRENGTHS:
        weight_FO = ridge_of(*fit, strength)
        errors.append((held[1].double() - held[0].double() @ weight_FO).square().sum().item())
    best = min(range(len(recovery.STRENGTHS)), key=errors.__getitem__)
    assert found.strength == recovery.STRENGTHS[best]
    assert found.unexplained == pytest.approx(errors[best] / errors[0], rel=1e-4, abs=1e-6)
    whole = [torch.cat(pair) for pair in zip(fit, held, strict=True)]
    assert torch.allclose(found.weight_FO, ridge_of(*whole, recovery.STRENGTHS[best]), atol=1e-5)


def test_no_strength_is_better_on_held_out_tokens_than_the_one_chosen():
    """Errors of few held-out tokens may have several valleys."""
    for seed in range(60):
        x_TF = drawn(30, 12, seed=seed) * torch.logspace(0, -3, 12)
        y_TO = x_TF @ drawn(12, 2, seed=seed + 1) * 3 + drawn(30, 2, seed=seed + 2)
        ridge = recovery.Ridge(12, 2)
        ridge.add(x_TF, y_TO)
        cut = 30 - 30 // recovery.HELD_OUT
        fits = (ridge_of(x_TF[:cut], y_TO[:cut], s) for s in recovery.STRENGTHS)
        x, y = x_TF[cut:].double(), y_TO[cut:].double()
        errors = [(y - x @ w_FO).square().sum() for w_FO in fits]
        least = min(errors) / errors[0]
        assert ridge.solve().unexplained == pytest.approx(least.item(), rel=1e-3), seed


def test_what_was_lost_and_what_came_back():
    assert recovery.recovered(6.0, 1.5, 24.0) == {"lost": 0.25, "recovered": 0.75}
    assert recovery.recovered(6e-9, 1.5e-9, 24e-9)["recovered"] == pytest.approx(0.75)
    assert recovery.recovered(0.0, 0.0, 0.0) == {"lost": 0.0, "recovered": 1.0}
    down = drawn(2, 3, seed=3)
    balance = recovery.DownRefit(down)
    features, left, y = drawn(50, 3), drawn(50, 2, seed=1), drawn(50, 2, seed=2)
    balance.add(features[:30], left[:30], y[:30])
    balance.add(features[30:], left[30:], y[30:])
    new, found = balance.solve()
    fit = balance.ridge.solve()
    torch.testing.assert_close(new, (down.double() + fit.weight_FO.T).to(down.dtype))
    assert found["lost"] == pytest.approx(((y - left).square().sum() / y.square().sum()).item())
    assert found["recovered"] == pytest.approx(1 - fit.unexplained)
    assert found["strength"] == (fit.strength if math.isfinite(fit.strength) else None)


def some_blocks(tokens, seed, dtype=torch.float64):
    """Three blocks of features, of which each token has some."""
    draw, features = torch.Generator().manual_seed(seed), {}
    for block, width in enumerate((4, 3, 5)):
        rows = torch.randperm(tokens, generator=draw)[: 2 * tokens // 3].sort().values
        features[block] = rows, torch.randn(len(rows), width, generator=draw, dtype=dtype)
    return recovery.Blocks(torch.randn(tokens, 2, generator=draw, dtype=dtype), features)


def written_out(blocks):
    """X (T, F), float64."""
    parts = []
    for rows, x_NF in blocks.features.values():
        x_TF = torch.zeros(len(blocks.y_TO), x_NF.shape[1], dtype=torch.float64)
        x_TF[rows] = x_NF.double()
        parts.append(x_TF)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("strengths", [(0.1,), (3.0, 0.3, 0.1)])
def test_conjugate_gradients_end_at_the_ridge_of_all_blocks(strengths):
    samples = [some_blocks(40, 1), some_blocks(25, 2)]
    x_TF = torch.cat([written_out(s) for s in samples])
    y_TO, start_FO = torch.cat([s.y_TO for s in samples]), drawn(12, 2).double()
    *_, found_FO = recovery.ridge_path(samples, start_FO, strengths, iterations=20)
    powers = x_TF.square().sum(0).split([4, 3, 5])
    penalty_F = torch.cat([0.1 * power_F.mean().expand(len(power_F)) for power_F in powers])
    expected_FO = torch.linalg.solve(x_TF.T @ x_TF + penalty_F.diag(), x_TF.T @ y_TO)
    torch.testing.assert_close(found_FO, expected_FO)


def test_features_of_few_tokens_are_solved_for_in_the_space_of_those_tokens():
    whole = [some_blocks(5, 1), some_blocks(3, 2)]  # five tokens of each block
    assert not recovery.within_tokens(*whole)[0].bases
    wider = []
    for s in whole:
        four_fold = {i: (rows, x_NF.repeat(1, 4)) for i, (rows, x_NF) in s.features.items()}
        wider.append(recovery.Blocks(s.y_TO, four_fold))
    turned = recovery.within_tokens(*wider)
    assert [x_NF.shape[1] for _, x_NF in turned[0].features.values()] == [5, 5, 5]
    paths = (recovery.ridge_path(s, None, (3.0, 0.1), iterations=3) for s in (wider, turned))
    for expected_FO, found_FO in zip(*paths, strict=True):
        weights = turned[0].split(found_FO)
        back_FO = torch.cat([turned[0].bases[i] @ weights[i] for i in weights])
        torch.testing.assert_close(back_FO, expected_FO)
        for before, after in zip(wider, turned, strict=True):
            torch.testing.assert_close(after.times(found_FO), before.times(expected_FO))


def test_one_block_alone_takes_one_iteration():
    alone = some_blocks(40, 1).only([2])
    rows, x_NF = alone.features[2]
    found = recovery.ridge_path([alone], torch.zeros(5, 2).double(), (1.0, 0.1), iterations=1)
    for strength, weight_FO in zip((1.0, 0.1), found, strict=True):
        torch.testing.assert_close(weight_FO, ridge_of(x_NF, alone.y_TO[rows], strength))


# --- the refit of a mixture ----------------------------------------------------------------------


def linear_site(target_TD, *experts):
    """A site of one batch whose whole target is missing; experts are rows (N,), neurons (N, 3)."""
    down_EDM = torch.zeros(len(experts), target_TD.shape[1], 3)
    every = torch.arange(len(target_TD))
    view = SimpleNamespace(
        count=len(experts),
        width=3,
        device=torch.device("cpu"),
        shared_ffn=None,
        arch=SimpleNamespace(transposed=False),
        experts=SimpleNamespace(down_proj=down_EDM),
        weights_of=lambda i: (down_EDM[i],),
        output=lambda x_TD: torch.zeros_like(target_TD),
        weighted=lambda x_TD, _: ((i, rows, h_NM) for i, (rows, h_NM) in enumerate(experts)),
    )
    return SimpleNamespace(view=view, inputs=lambda: [every], targets=lambda: [target_TD])


def refitted_all(site):
    """New down projections, transposed (E, M, D), and the figures."""
    experts = range(site.view.count)
    down_EDM, _, figures = recovery.refitted_downs(site, experts, lambda *_: torch.arange(3))
    return (None if down_EDM is None else down_EDM.mT), figures


def test_experts_that_run_the_same_tokens_are_solved_for_together():
    """Their difference is what is missing, which neither can see alone."""
    first_TM, noise_TM, every = drawn(400, 3), drawn(400, 3, seed=1), torch.arange(400)
    target_TD = noise_TM @ drawn(3, 4, seed=2)
    experts = (every, first_TM), (every, first_TM + 0.3 * noise_TM)
    down_EMD, figures = refitted_all(linear_site(target_TD, *experts))
    assert figures["recovered"] > 0.99
    torch.testing.assert_close(down_EMD[0], -down_EMD[1], atol=0.1, rtol=0.1)


def test_what_came_back_is_told_of_tokens_that_the_fit_did_not_see():
    """Of few noisy tokens, for which it makes a difference."""
    h_TM, every = drawn(100, 3), torch.arange(100)
    y_TD = h_TM @ drawn(3, 2, seed=1) + drawn(100, 2, seed=2)
    errors = {}
    for strength in recovery.PATH:
        trial_MD = ridge_of(h_TM[:80], y_TD[:80], strength)
        errors[strength] = (y_TD[80:] - h_TM[80:].double() @ trial_MD).square().sum().item()
    down_EMD, figures = refitted_all(linear_site(y_TD, (every, h_TM)))
    best = min(errors, key=errors.__getitem__)
    expected = 1 - errors[best] / y_TD[80:].square().sum().item()
    assert figures["recovered"] == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(down_EMD[0].double(), ridge_of(h_TM, y_TD, best), atol=1e-4, rtol=0)


@pytest.mark.parametrize("held", [15, 16])
def test_an_expert_of_few_held_out_tokens_keeps_its_weights(held):
    """The other one is solved for as if it were not there."""
    every, rows = torch.arange(400), torch.cat([torch.arange(60), torch.arange(400 - held, 400)])
    h_TM, few_NM = drawn(400, 3), drawn(60 + held, 3, seed=1)
    y_TD = h_TM @ drawn(3, 4, seed=2)
    y_TD[rows] += few_NM @ drawn(3, 4, seed=3)
    down_EMD, _ = refitted_all(linear_site(y_TD, (every, h_TM), (rows, few_NM)))
    assert bool(down_EMD[1].any()) is (held == recovery.LEAST)
    if held < recovery.LEAST:
        strengths = [ridge_of(h_TM, y_TD, x).float() for x in recovery.PATH]
        assert any(torch.allclose(down_EMD[0], w_MD, atol=1e-4) for w_MD in strengths)


def test_what_helps_by_chance_changes_nothing():
    """A strength is the best of several on held-out tokens, of noise too."""
    every, changed = torch.arange(100), 0
    for seed in range(20):
        h_TM, noise_TD = drawn(100, 3, seed=seed), drawn(100, 4, seed=100 + seed)
        clear_TD = noise_TD + h_TM @ drawn(3, 4, seed=200 + seed)
        noise, clear = drawn(100, 3, seed=300 + seed), (every, h_TM)
        down_EMD, _ = refitted_all(linear_site(clear_TD, clear, (every, noise)))
        assert down_EMD[0].any()
        changed += bool(down_EMD[1].any())
    assert changed <= 2


def test_a_shared_path_without_some_neurons_is_refitted_with_the_experts():
    """Alone where all experts are whole: its new columns are the regression of what is missing."""
    model = tiny_moe("qwen2_moe")
    layer = CutLayer(torch.arange(8), torch.arange(16).repeat(8, 1), 16, shared_S=torch.arange(20))
    for site in stream_of(model, many_tokens(), [2]):
        new, found = layer.refit(site)
        down_DM = site.view.shared_ffn.down_DM
        own = [site.view.shared_weighted(x) for x in site.inputs()]
        lost = [h[:, 20:] @ down_DM[:, 20:].T for h in own]
        change_SD = (new.shared_DS - down_DM[:, :20]).T
        left = [y - h[:, :20] @ change_SD for h, y in zip(own, lost, strict=True)]
        before, after = (sum(y.square().sum().item() for y in part) for part in (lost, left))
        assert found["recovered"] > 0
        assert after < before
