"""Slimming: experts and dense FFNs made narrower, neuron by neuron."""

import copy
from statistics import fmean

import pytest
import torch
from builders import (
    any_model,
    drawn,
    equal,
    loaded,
    logits,
    pages,
    same,
    same_model,
    saved,
    site_of,
)
from cases import many_tokens

import moesaic
from moesaic import MoesaicError, Tokens
from moesaic.arch.lookup import base_arch
from moesaic.methods.slim.config import BUILT_IN, SCORES, Neurons, SlimConfig
from moesaic.methods.slim.neurons import highest_in_layer, losses, removal_costs
from moesaic.metrics.score import model_size
from moesaic.observation.stats import tally_of
from moesaic.plans import recovery
from moesaic.plans.cut import CutLayer


def slimmed(model, tokens, *, compare=(), **options):
    """What slimming makes of a model; by energy and without a refit, unless said otherwise."""
    config = SlimConfig(**{"score": "energy", "refit": False, **options})
    return moesaic.slim(model, config, text=tokens, compare=compare)


# --- every architecture --------------------------------------------------------------------------


def test_result_is_native_and_what_it_computes_is_the_original_without_neurons(
    model_type, tokens, tmp_path
):
    """Saved, loaded by transformers alone, and compared with masked neurons."""
    model = any_model(model_type)
    result = slimmed(model, tokens, keep=0.5)
    again = loaded(result.save(tmp_path / "out"))
    assert again.config.model_type == model_type
    assert equal(dict(again.state_dict()), dict(result.model.state_dict()))
    masked = copy.deepcopy(model)
    silence(masked, result.plan)
    found = logits(again, tokens)
    torch.testing.assert_close(found, logits(masked, tokens), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, logits(model, tokens), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def silence(model, plan):
    """Set the down columns of neurons that go to zero."""
    arch = base_arch(model.config)
    for i, layer in plan.layers.items():
        view = arch.view(arch.layers(model)[i])
        for expert, kept in enumerate(layer.neurons_EW):
            down_DM = view.weights_of(expert)[-1]
            gone = torch.ones(down_DM.shape[1], dtype=torch.bool)
            gone[kept] = False
            down_DM[:, gone] = 0


# --- formulas ------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss", "granitemoeshared", "llama"])
def test_energy_is_what_a_neuron_writes(model_type, tokens):
    """sum over tokens of |w h_j d_j|^2, neuron by neuron, by the module's own weights."""
    site = site_of(any_model(model_type), tokens)
    view, stats = site.view, tally_of(site, {"energy_EM", "reach_EM"}).stats()
    (x_TD,) = list(site.inputs())
    energy_EM, reach_EM = stats["energy_EM"], stats["reach_EM"]
    score_EM = SCORES["energy"].score(Neurons(energy_EM, reach_EM, reach_EM, 0))
    for i in range(view.count):
        down_DM = view.weights_of(i)[-1]
        if model_type == "llama":
            wh_TM = view.hidden(x_TD)
        else:
            w_TE = view.routing.weights(view.logits(x_TD))
            wh_TM = view.hidden(i, x_TD) * w_TE[:, i, None]
        for j in (0, 7, down_DM.shape[1] - 1):
            written_TD = wh_TM[:, j, None] * down_DM[:, j]
            expected = written_TD.double().square().sum().sqrt()
            torch.testing.assert_close(score_EM[i, j], expected, rtol=1e-5, atol=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("block", [1, 7, 40])
def test_turns_taken_in_blocks_cost_what_they_do_one_by_one(block, monkeypatch):
    """Against the matrices worked out anew, of those kept, before every turn."""
    h_TM, down_DM = drawn(90, 40).double(), drawn(12, 40, seed=1).double()
    monkeypatch.setattr("moesaic.methods.slim.neurons.BLOCK", block)
    gram_MM = h_TM.T @ h_TM
    costs = removal_costs(gram_MM.clone(), down_DM, ridge=0.1)
    gram_MM += 0.1 * gram_MM.diagonal().mean() * torch.eye(40)
    target_MD, kept = gram_MM @ down_DM.T, list(range(40))
    highest = 0.0
    for _ in range(40):
        inverse = torch.linalg.inv(gram_MM[kept][:, kept])
        # with those removed, the rest is (G_SS)^-1 (G D^T)_S
        rest_DS = (inverse @ target_MD[kept]).T
        trial = rest_DS.square().sum(0) / inverse.diagonal()
        place = int(trial.argmin())
        highest = max(highest, trial[place].item())
        assert costs[kept.pop(place)].item() == pytest.approx(highest, rel=1e-6)


def test_surgeon_takes_what_a_refit_makes_up_for_best():
    """Least squares without it leaves the least error, by brute force; costs are what is added."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 6, generator=generator).double()
    h_TM = torch.randn(80, 6, generator=generator).double() @ mixing
    down_DM = torch.randn(4, 6, generator=generator).double()
    y_TD = h_TM @ down_DM.T

    def error(kept):
        weight = torch.linalg.lstsq(h_TM[:, kept], y_TD).solution
        return (y_TD - h_TM[:, kept] @ weight).square().sum().item()

    cost_M = removal_costs(h_TM.T @ h_TM, down_DM, ridge=0.0)
    kept, spent = list(range(6)), 0.0
    while len(kept) > 1:
        errors = {j: error([k for k in kept if k != j]) for j in kept}
        cheapest = min(errors, key=errors.__getitem__)
        assert cost_M[kept].argmin().item() == kept.index(cheapest)
        assert cost_M[cheapest].item() == pytest.approx(errors[cheapest] - spent, rel=1e-6)
        spent = errors[cheapest]
        kept.remove(cheapest)


@pytest.mark.parametrize("score", [score.name for score in BUILT_IN])
def test_every_score_decides_of_a_dense_model(score, tokens):
    """And of mixtures: laws/test_mixtures.py."""
    assert slimmed(any_model("llama"), tokens, keep=0.5, score=score).model is not None


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen2_moe", {"experts": "4"}),
        ("gpt_oss", {"experts": "4"}),
        ("deepseek_v3", {"experts": "4"}),
        ("mixtral", {"allocate": "experts"}),
        ("llama", {}),
    ],
)
def test_loss_is_that_of_the_layer_as_it_will_be(model_type, options, tokens):
    """The error of the converted block's own output, of the residual stream after the layer."""
    model = any_model(model_type)
    result = slimmed(model, tokens, keep=0.25, **options)
    i, layer = next(iter(result.plan.layers.items()))
    site = site_of(model, tokens, i)
    (found,) = losses(site, [layer])
    arch = base_arch(model.config)
    converted_view = arch.view(arch.layers(result.model)[i])
    wrong = 0.0
    for x_TD in site.inputs():
        before_TD, after_TD = (output(view, x_TD) for view in (site.view, converted_view))
        wrong += (after_TD - before_TD).double().square().sum()
    states = model(input_ids=tokens.input_ids, output_hidden_states=True).hidden_states
    assert i + 2 < len(states)  # the last is after the final norm
    whole = states[i + 1].double().square().sum()
    assert found == pytest.approx((wrong / whole).sqrt().item(), rel=1e-3)


def output(view, x_TD):
    return view.output(x_TD) if hasattr(view, "router") else view.output(view.hidden(x_TD))


# --- budgets -------------------------------------------------------------------------------------


def lost(model, result, tokens):
    """What all layers lose, squared."""
    pairs = result.plan.layers.items()
    return sum(losses(site_of(model, tokens, i), [x])[0] ** 2 for i, x in pairs)


def test_experts_and_neurons_share_one_budget(tokens):
    model = any_model("qwen3_moe")
    result = slimmed(model, tokens, keep=0.5, experts="4")
    assert {tuple(x.neurons_EW.shape) for x in result.plan.layers.values()} == {(4, 16)}
    result = slimmed(model, tokens, keep=0.25, experts="4")
    assert {tuple(x.neurons_EW.shape) for x in result.plan.layers.values()} == {(4, 8)}
    assert result.model.config.moe_intermediate_size == 8
    assert result.model.config.num_experts == 4


def test_auto_takes_the_number_of_experts_of_least_error(tokens):
    """Measured by converting every layer to each of the sizes that was tried."""
    model = any_model("mixtral")
    result = slimmed(model, tokens, keep=0.5, experts="auto")
    tried = result.summary["tried"]
    assert len(tried) > 1
    for count, total in tried.items():
        one = slimmed(model, tokens, keep=0.5, experts=count)
        found = lost(model, one, tokens)
        if one.plan.layers[0].width == round(8 * 16 * 0.5 / int(count)):
            assert total == pytest.approx(found, rel=0.2)
    best = min(tried, key=tried.__getitem__)
    assert {len(x.kept_E) for x in result.plan.layers.values()} == {int(best)}


@pytest.mark.parametrize(
    ("model_type", "experts"), [("mixtral", False), ("mixtral", True), ("llama", False)]
)
def test_widths_spread_by_the_error_of_layers(model_type, experts, tokens):
    """The budget is met, the result is moesaic_<base>, and no uniform width has less error."""
    model = any_model(model_type)
    with torch.no_grad():  # a layer that does little, and one that does much
        for layer, factor in ((0, 0.25), (1, 4.0)):
            for name, weight in model.model.layers[layer].named_parameters():
                if "down_proj" in name:
                    weight *= factor
    by_layer, evenly = ("layers+experts", "experts") if experts else ("layers", "uniform")
    spread = slimmed(model, tokens, keep=0.5, allocate=by_layer)
    neurons = [(x.neurons_EW >= 0).sum().item() for x in spread.plan.layers.values()]
    whole = 8 * 16 if model_type == "mixtral" else 64
    assert sum(neurons) <= 0.5 * whole * len(neurons)
    assert neurons[0] < neurons[1]
    assert spread.model.config.model_type == f"moesaic_{model_type}"
    uniform = slimmed(model, tokens, keep=0.5, allocate=evenly)
    assert lost(model, spread, tokens) < lost(model, uniform, tokens)


OUTCOMES = {
    # losses by window of widths by layer, and of equal ones; the sentence
    "surely less": ([1.0, 1.2], [2.0, 2.2], "are significantly worse: KL 2.1 beside 1.1"),
    "less, perhaps": ([1.0, 1.2], [1.1, 1.9], "were kept: KL 1.5 beside 1.1"),
    "as much": ([1.0, 1.2], [1.0, 1.2], "were kept: KL 1.1 beside 1.1"),
    "more": ([2.0, 2.2], [1.0, 1.2], "were kept: KL 1.1 beside 2.1"),
    "in one window": ([1.0], [2.0], "were kept: KL 2 beside 1"),
}


@pytest.mark.usefixtures("short_text")
@pytest.mark.parametrize(
    ("outcome", "experts"), [*((name, False) for name in OUTCOMES), ("more", True)]
)
def test_widths_by_layer_are_kept_only_if_equal_ones_are_worse(experts, outcome, monkeypatch):
    """On windows that decided nothing; what is kept is what the result says that it is."""
    draw = torch.Generator().manual_seed(1)
    tokens = Tokens(torch.randint(1, 384, (6, 96), generator=draw))  # each layer's refit gains
    own, equal, sentence = OUTCOMES[outcome]
    better = outcome != "surely less"
    compared = []

    def found(stream, changes, track=None):
        compared.append((changes, sum(len(states) for states in stream.record()[0])))
        return torch.tensor([own, equal], dtype=torch.float64)

    monkeypatch.setattr("moesaic.methods.layered.divergences", found)
    by_layer, evenly = ("layers+experts", "experts") if experts else ("layers", "uniform")
    result = slimmed(any_model("mixtral"), tokens, keep=0.5, allocate=by_layer, refit=True)
    ((changes, windows),) = compared
    assert windows == 2
    kept = changes[better]
    assert all(same(kept[i], layer) for i, layer in result.plan.layers.items())
    assert all(layer.down_E is not None for layer in kept.values())
    assert result.plan.config["allocate"] == (evenly if better else by_layer)
    assert len({int((x.neurons_EW >= 0).sum()) for x in changes[1].values()}) == 1
    kls = {"result": fmean(own), "equal widths": fmean(equal)}
    assert result.summary["compared"] == pytest.approx(kls)
    words = result.current_record.steps[0].text
    assert sentence in words
    assert ("no sure gain" in words) == (outcome in ("less, perhaps", "in one window"))
    if not experts:
        assert result.model.config.model_type == ("mixtral" if better else "moesaic_mixtral")


def test_where_equal_widths_are_kept_the_result_is_theirs(moe_folder, monkeypatch):
    """Text has windows to compare on beside those that were asked for, which all decide."""
    seen = []

    def found(stream, changes, track=None):
        seen.extend(batch.input_ids for batch in stream.batches)
        return torch.tensor([[1.0], [0.0]])

    monkeypatch.setattr("moesaic.methods.layered.divergences", found)
    options = {"keep": 0.5, "score": "energy"}
    text = {"samples": 16, "length": 32, "calibration": pages("calibration")}
    plain = moesaic.slim(moe_folder, SlimConfig(**options), **text)
    kept = moesaic.slim(moe_folder, SlimConfig(**options, allocate="layers"), **text)
    for i, layer in plain.plan.layers.items():
        theirs = kept.plan.layers[i].neurons_EW
        assert layer.neurons_EW.shape == theirs.shape
        pairs = zip(layer.neurons_EW.tolist(), theirs.tolist(), strict=True)
        common = sum(len({*ours} & {*others}) for ours, others in pairs)
        assert common >= 0.95 * theirs.numel()  # sums are of another order
    assert kept.plan.calibration == plain.plan.calibration
    held = torch.cat(seen)
    assert held.shape == (2, 32)
    deciding = kept.job.tokens.input_ids.unfold(1, 16, 1).flatten(0, 1).tolist()
    assert not any(piece in deciding for piece in held.unfold(1, 16, 1).flatten(0, 1).tolist())


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "ernie4_5_moe"])
def test_a_shared_path_that_is_counted_in_experts_is_filled_up(model_type, tokens, tmp_path):
    """12 of 16 neurons an expert, and a shared path of 16: two of 12, the last 8 are zero."""
    model = any_model(model_type)
    result = slimmed(model, tokens, keep=0.75, multiple=4)
    again = loaded(result.save(tmp_path / "out"))
    assert again.config.model_type == model_type
    arch = base_arch(again.config)
    assert getattr(again.config, arch.shared_count) == 2
    view = arch.mixture(arch.layers(again)[arch.moe_layers(again)[0]])
    assert (view.width, view.shared_width) == (12, 24)
    assert not view.shared_ffn.down_DM[:, 16:].any()
    assert view.shared_ffn.down_DM[:, :16].any()


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "deepseek_v3", "llama"])
def test_widths_that_differ_are_exported_filled_up(model_type, tokens, tmp_path):
    model = any_model(model_type)
    arch = base_arch(model.config)
    layers = {}
    for n, (i, layer) in enumerate(slimmed(model, tokens, keep=0.5).plan.layers.items()):
        width = (4, 8, 12, 8)[n % 4]
        if layer.kept_E is not None:
            order = torch.arange(width).repeat(8, 1)
            shared = layer.shared_S if model_type == "deepseek_v3" else None
            layers[i] = CutLayer(torch.arange(8), order, 16, shared_S=shared)
        else:
            layers[i] = CutLayer(None, torch.arange(width)[None], 64)
    assert len({x.width for x in layers.values()}) > 1
    source = saved(tmp_path / "spread", model, layers)
    assert source.config.model_type == f"moesaic_{model_type}"
    _, again = same_model(source, tmp_path / "out", tokens)
    assert again.config.model_type == model_type
    view = arch.view(arch.layers(again)[max(layers)])
    assert view.width == max(x.width for x in layers.values())


def test_experts_rows_are_wide_enough_for_grouped_products(tokens):
    """16 bytes: 8 numbers of 16 bits, 4 of 32; a multiple that leaves others is refused."""
    for dtype, width in ((torch.bfloat16, 8), (torch.float32, 4)):
        model = any_model("qwen2_moe").to(dtype)
        made = slimmed(model, tokens, keep=0.25).model
        assert made.config.moe_intermediate_size == width
        assert torch.isfinite(logits(made, tokens)).all()
    assert slimmed(model, tokens, keep=0.4).plan.layers[0].width == 8  # 6.4 would not run
    with pytest.raises(MoesaicError, match=r"multiple 2: 6 neurons are not .* 16 bytes.*; 8 are"):
        slimmed(model, tokens, keep=0.4, multiple=2)


@pytest.mark.parametrize(("options", "neurons"), [({}, 90), ({"multiple": 4}, 88)])
def test_experts_of_different_widths_use_all_of_the_budget(options, neurons, tokens):
    """0.7 of 8 x 16 neurons are 89.6; equal widths would be 11, or 12."""
    for allocate in ("experts", "layers+experts"):
        plan = slimmed(any_model("qwen2_moe"), tokens, keep=0.7, allocate=allocate, **options).plan
        every = [sum(layer.widths) for layer in plan.layers.values()]
        budget, step = 0.7 * 8 * 16 * len(every), options.get("multiple", 1)
        assert budget - step * len(every) < sum(every) <= budget + step * len(every) / 2
        assert allocate == "layers+experts" or {*every} == {neurons}


def test_widths_by_expert_are_multiples_and_counted(tokens, tmp_path):
    model = any_model("qwen2_moe")
    result = slimmed(model, tokens, keep=0.5, allocate="experts", multiple=4, score="surgeon")
    layers = result.plan.layers
    assert {w % 4 for layer in layers.values() for w in layer.widths} == {0}
    assert all(sum(layer.widths) == 64 for layer in layers.values())
    assert min(min(layer.widths) for layer in layers.values()) >= 4
    even = slimmed(model, tokens, keep=0.5, multiple=4)
    found, wanted = (model_size(x.model) for x in (result, even))
    assert found.total_parameters == wanted.total_parameters
    assert found.active_parameters == wanted.active_parameters
    i = next(iter(layers))
    assert found.layers[i].width == 8 * 8 + 24
    title = result.record("model", "out").steps[0].title
    assert title.endswith("to 8 of 16 neurons an expert in the mean by optimal brain surgeon")
    with pytest.raises(MoesaicError, match="not slimmed again"):
        slimmed(result.model, tokens, keep=0.5)
    with pytest.raises(MoesaicError, match="no native form"):
        moesaic.export(str(result.save(tmp_path / "out")), tmp_path / "native")
    config = moesaic.TuneConfig(what="all", steps=3, batch=2)
    tuned = moesaic.tune(result.model, config, text=tokens).model
    name = f"model.layers.{i}.mlp.experts.down_rows"
    assert not torch.equal(tuned.state_dict()[name], result.model.state_dict()[name])


# --- experts that no token reached ----------------------------------------------------------------


@torch.no_grad()
def unreached(layer=1, expert=0):
    """A mixture with an expert that is never chosen, whose first neurons hardly write anything."""
    model = any_model("deepseek_v3")
    view = base_arch(model.config).mixture(model.model.layers[layer])
    view.router.e_score_correction_bias[expert] = -1e4
    view.weights_of(expert)[-1][:, :8] *= 1e-4
    return model


@pytest.mark.parametrize("options", [{"score": "energy"}, {"allocate": "experts"}])
def test_neurons_that_no_token_reached_go_by_their_reach(options, tokens):
    layer = slimmed(unreached(), tokens, keep=0.5, **options).plan.layers[1]
    kept = layer.neurons_of(0, 16).tolist()
    assert kept
    assert min(kept) >= 8


def test_of_equal_blocks_those_of_more_reach_are_kept():
    score, reach = torch.zeros(2, 4), torch.tensor([[1.0, 1, 1, 1], [2, 2, 2, 9]])
    assert highest_in_layer(score, 6, reach, step=2).tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]


@torch.no_grad()
def test_a_refit_makes_up_for_neurons_of_an_expert_that_no_token_reached(tokens):
    model = unreached()
    with torch.no_grad():  # neurons that do much the same, so that the rest can make up for some
        gate, up, _ = base_arch(model.config).mixture(model.model.layers[1]).weights_of(0)
        for part in (gate, up):
            part[::2] = part[1::2] + 0.1 * part[::2]
    site = site_of(model, tokens, 1)
    whole = [site.view.expert(0, x) for x in site.inputs()]

    def error(**options):
        made = slimmed(model, tokens, keep=0.5, score="random", **options).model
        view = base_arch(made.config).mixture(made.model.layers[1])
        pairs = zip(site.inputs(), whole, strict=True)
        return sum((view.expert(0, x) - y).square().sum().item() for x, y in pairs)

    assert error(refit=True) < 0.9 * error()


# --- refit ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_text")
def test_layers_that_a_refit_leaves_alone_are_of_the_same_architecture(monkeypatch):
    """One of two, whose held-out tokens do not gain."""
    gains = iter([False, True])
    solved = recovery.refitted_downs
    left = (None, None, {"lost": 1.0, "recovered": 0.0})
    monkeypatch.setattr(
        "moesaic.plans.cut.refitted_downs", lambda *a: solved(*a) if next(gains) else left
    )
    result = slimmed(any_model("qwen2_moe"), many_tokens(), keep=0.5, refit=True)
    assert [layer.weights for layer in result.plan.layers.values()] == ["own", "refitted"]
    assert result.model.config.model_type == "qwen2_moe"


def test_few_tokens_change_no_expert_that_they_reach(padded):
    plain, refit = (slimmed(any_model("mixtral"), padded, keep=0.5, refit=r) for r in (False, True))
    site = site_of(any_model("mixtral"), padded, 0)
    reached_E = tally_of(site, {"calls_E"}).stats()["calls_E"] > 0
    before, after = (
        base_arch(r.model.config).mixture(r.model.model.layers[0]).experts.down_proj
        for r in (plain, refit)
    )
    assert reached_E.sum() > 4
    assert torch.equal(before[reached_E], after[reached_E])


# --- wrong requests ------------------------------------------------------------------------------


def test_by_default_it_is_the_score_of_least_kl(tokens, tmp_path, caplog, monkeypatch):
    """Surgeon and refit; where that cannot be, the next best, in one sentence."""
    model = any_model("qwen2_moe")

    def decided(config=None, **options):
        caplog.clear()
        text = {} if "stats" in options and config is None else {"calibration": tokens}
        plan = moesaic.slim(model, config, **text, **options).plan
        return plan.config["score"], plan.config["refit"]

    assert decided() == ("surgeon", True)
    assert not caplog.messages
    monkeypatch.setattr("moesaic.methods.slim.config.OPERATIONS", 8 * 16**3 - 1)
    assert decided() == ("energy", True)
    assert "surgeon, which has less KL, would take hours" in caplog.text
    assert decided(SlimConfig(score="surgeon", refit=False)) == ("surgeon", False)
    stats = moesaic.observe(model, tmp_path / "stats", calibration=tokens)
    assert decided(stats=str(stats)) == ("energy", False)
    assert len(caplog.messages) == 2
    assert decided(SlimConfig(refit=True), stats=str(stats)) == ("energy", True)


def test_a_dense_model_is_slimmed_from_statistics_as_from_its_text(tmp_path):
    """By scores that read single neurons; others need the tokens."""
    model, tokens = any_model("llama"), many_tokens()
    stats = str(moesaic.observe(model, tmp_path / "model.stats", calibration=tokens))
    config = SlimConfig(keep=0.5, score="energy", refit=False)
    plan = moesaic.slim(model, config, stats=stats).plan
    for i, layer in slimmed(model, tokens, keep=0.5).plan.layers.items():
        assert same(layer, plan.layers[i])
    with pytest.raises(MoesaicError, match="stats hold no tokens"):
        moesaic.slim(model, SlimConfig(keep=0.5, score="surgeon"), stats=stats)


def test_a_carved_model_is_not_observed(tmp_path):
    config = moesaic.MoREConfig(active=0.8)
    carved = moesaic.carve(any_model("llama"), config, calibration=many_tokens())
    with pytest.raises(MoesaicError, match="observe the original"):
        moesaic.observe(carved.model, tmp_path / "model.stats", calibration=many_tokens())
