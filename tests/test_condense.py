"""Laws of condensing: the formulas, both searches against full forwards, files, sizes, errors."""

import json
import math
from dataclasses import replace

import pytest
import torch
from builders import MOE, same, stream_of, tiny_moe, tiny_tokenizer
from shrunken import small_model

from moesaic import CondenseConfig, MoesaicError, Plan, Tokens
from moesaic.api import condense
from moesaic.arch.lookup import moe_arch
from moesaic.arch.mixture import MoEFFN
from moesaic.methods.condense import search
from moesaic.methods.condense.method import Condenser
from moesaic.plans.condensed import CondensedLayer
from moesaic.sizes import weight_bytes
from moesaic.surgery import converted_copy
from moesaic.types import cache_of


def routed_layer(model):
    """The table entry, the number and the module of the last layer that routes."""
    arch = moe_arch(model.config)
    i = arch.moe_layers(model)[-1]
    return arch, i, arch.layers(model)[i]


def searched(model, tokens, **options):
    """Each layer's plan and analysis, without the choice of layers."""
    arch = moe_arch(model.config)
    stream = stream_of(model, tokens)
    config, found = CondenseConfig(count=1, **options), {}
    with torch.no_grad():
        hidden, kwargs = stream.record()
        for block in stream.blocks(kwargs):
            if arch.is_moe(block.layer):
                experts = search.ExpertSearch(config, stream, arch, block, hidden)
                found[block.index] = experts.decide()
            block.run(hidden)
    return {i: f[0] for i, f in found.items()}, {i: f[1] for i, f in found.items()}


@torch.no_grad()
def seen(model, index, tokens):
    """The real tokens entering a layer's block (T, D), and what runs the layer on its input."""
    arch = moe_arch(model.config)
    layer = arch.layers(model)[index]
    kept = {}

    def note(_, args, kwargs):
        kept["args"], kept["kwargs"] = args, kwargs

    hooks = [
        layer.register_forward_pre_hook(note, with_kwargs=True),
        arch.ffn_of(layer).register_forward_pre_hook(lambda _, a: kept.update(x=a[0])),
    ]
    model(tokens.input_ids, attention_mask=tokens.attention_mask, use_cache=False)
    for hook in hooks:
        hook.remove()
    mask = tokens.attention_mask
    keep = torch.ones_like(tokens.input_ids, dtype=torch.bool) if mask is None else mask
    return kept["x"][keep], lambda m: m(*kept["args"], **kept["kwargs"])[keep]


# --- formulas ------------------------------------------------------------------------------------


def fitted(value):
    """Eq. 4 with k by the fix-finger method, in plain Python; eigenvalues in rising order."""
    low, high = math.log10(value[0]), math.log10(value[-1])
    counts = [0] * 100
    for v in value:
        counts[min(99, int((math.log10(v) - low) / (high - low) * 100))] += 1
    peak = 10 ** (low + counts.index(max(counts)) * (high - low) / 100)
    best = (math.inf, 0.0)
    for at, least in enumerate(value[:-1]):
        if not 0.95 * peak <= least <= 1.5 * peak:
            continue
        k = len(value) - at - 1
        alpha = 1 + k / sum(math.log(value[-j] / least) for j in range(1, k + 1))
        off = [abs(1 - (value[at + j] / least) ** (1 - alpha) - j / (k + 1)) for j in range(k + 1)]
        best = min(best, (max(off), alpha))
    return best[1]


@pytest.mark.parametrize("seed", range(4))
def test_alpha_is_that_of_the_nearest_power_law(seed):
    """Against every x_min near the peak, one by one; and near the exponent that was planted."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(60, 80, generator=generator, dtype=torch.float64)
    weight *= torch.linspace(-1, 1, 60).exp()[:, None]
    value = torch.linalg.svdvals(weight.float()).square().flip(0).double()
    assert search.pl_alpha_hill(weight) == pytest.approx(fitted(value.tolist()), rel=1e-9)
    planted = torch.rand(4000, generator=generator, dtype=torch.float64) ** (-1 / 1.5)
    assert search.tail_exponent(planted.sort().values) == pytest.approx(2.5, abs=0.15)


def test_an_expert_that_no_token_chose_is_left_out(tokens):
    model = tiny_moe("ernie4_5_moe", experts=4)
    _, i, layer = routed_layer(model)
    layer.mlp.gate.moe_statics.e_score_correction_bias.data[0, 2] = -100
    plans, found = searched(model, tokens, keep="shared+routed", experts=4)
    assert found[i]["calls"][2] == 0
    assert sorted(plans[i].experts) == [0, 1, 3]
    assert not plans[i].gates_K.isnan().any()


# --- Alg. 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "metric"),
    [("qwen2_moe", "js"), ("mixtral", "kl"), ("deepseek_v2", "js"), ("granitemoeshared", "kl")],
)
def test_cached_search_is_the_search_by_full_forwards(model_type, metric, padded, monkeypatch):
    """K = 2; its first step is brute force over K = 1."""
    changes = {"residual_multiplier": 0.5} if model_type == "granitemoeshared" else {}
    factors, found_by = [], search.ExpertSearch._factor
    noted = lambda it: factors.append(found_by(it)) or factors[-1]  # noqa: E731
    monkeypatch.setattr(search.ExpertSearch, "_factor", noted)
    model = tiny_moe(model_type, **changes)
    arch, i, layer = routed_layer(model)
    view = arch.mixture(layer)
    x_TD, forward = seen(model, i, padded)
    w_TE = view.routing.weights(view.logits(x_TD))
    g_E = w_TE.sum(0) / (w_TE != 0).sum(0)
    gated = view.shared_width if arch.shared_gate else 0
    divergence = {"js": search.js, "kl": search.kl}[metric]
    chosen, expected = [], []
    with torch.no_grad():
        reference = forward(layer)
        for _ in range(2):
            losses = {}
            for e in range(view.count):
                if e not in chosen and not g_E[e].isnan():
                    some, shared = torch.tensor([*chosen, e]), view.shared_width
                    width = shared + len(some) * view.width
                    plan = CondensedLayer(some, g_E[some], width, shared > 0, 1.0, gated)
                    with converted_copy(layer, arch, plan) as trial:
                        losses[e] = divergence(reference, forward(trial)).mean().item()
            best = min(losses, key=lambda e: (losses[e], e))
            expected.append(losses[best])
            chosen.append(best)
    plans, found = searched(model, padded, keep="shared+routed", metric=metric)
    assert {*factors} == {changes.get("residual_multiplier", 1.0)}, "experts were run again"
    assert plans[i].experts == chosen
    assert plans[i].gates_K.tolist() == pytest.approx(g_E[chosen].tolist(), rel=1e-5)
    assert found[i]["calls"] == (w_TE != 0).sum(0).tolist()
    assert found[i]["expert_losses"] == pytest.approx(expected, rel=1e-3)
    assert found[i]["divergence"]["shared+routed"] == pytest.approx(expected[-1], rel=1e-3)


def test_no_routed_experts_is_the_shared_path_alone(tokens):
    model = tiny_moe("deepseek_v2")
    none, _ = searched(model, tokens, keep="shared+routed", experts=0)
    shared, _ = searched(model, tokens, keep="shared")
    assert none.keys() == shared.keys()
    assert all(same(none[i], shared[i]) for i in none)


@pytest.mark.parametrize("by", ["random", "l1", "pl_alpha_hill"])
def test_experts_by_their_weights_alone(by, tokens):
    model = tiny_moe("olmoe")
    arch, i, layer = routed_layer(model)
    view = arch.mixture(layer)
    assert isinstance(view, MoEFFN)
    scores = search.weight_scores(view, by, i, seed=3)
    plans, _ = searched(model, tokens, keep="shared+routed", expert_search=by, seed=3)
    assert plans[i].experts == search.ranked_experts(scores, torch.ones(8), 2)
    with torch.no_grad():
        for weight in view.weights_of(plans[i].experts[0]):
            weight.mul_(100)
    again, _ = searched(model, tokens, keep="shared+routed", expert_search=by, seed=3)
    if by == "l1":
        assert plans[i].experts[0] not in again[i].experts
    else:
        assert again[i].experts == plans[i].experts, "scale changes neither a spectrum nor chance"


# --- Alg. 2 --------------------------------------------------------------------------------------


@torch.no_grad()
def last_hidden(model, tokens):
    out = model.base_model(tokens.input_ids, attention_mask=tokens.attention_mask, use_cache=False)
    mask = tokens.attention_mask
    return out[0].flatten(0, 1) if mask is None else out[0][mask]


@pytest.mark.parametrize("model_type", ["qwen2_moe", "ernie4_5_moe"])
def test_layer_search_is_the_search_by_full_forwards(model_type, padded):
    model = tiny_moe(model_type, num_hidden_layers=4)
    reference = last_hidden(model, padded)
    result = condense(model, CondenseConfig(count=2), calibration=padded)
    routed = moe_arch(model.config).moe_layers(model)
    chosen = []
    for step in result.summary["search"]:
        losses = {}
        for i in set(routed) - set(chosen):
            plans, _ = searched(model, padded)
            some = {j: plans[j] for j in sorted([*chosen, i])}
            trial = result.build(Plan("cd-moe", result.plan.base, some))
            losses[i] = search.js(reference, last_hidden(trial, padded)).mean().item()
        assert {int(i): x for i, x in step["losses"].items()} == pytest.approx(losses, rel=1e-3)
        assert step["layer"] == min(losses, key=lambda i: losses[i])
        chosen.append(step["layer"])
    assert result.summary["layers"] == chosen


def test_a_race_takes_less_text_and_chooses_the_same(tmp_path, monkeypatch):
    """Of six layers that matter unequally; a search that was stopped continues as it would."""
    changes = {"num_hidden_layers": 6, "mlp_only_layers": [], "decoder_sparse_step": 1}
    model = tiny_moe("qwen2_moe", experts=4, **changes)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(8 * torch.rand(1, generator=draw).item())
    tokens = Tokens(torch.randint(3, 60, (64, 8), generator=draw))
    assert [len(leg.input_ids) for leg in search.legs(tokens)] == [8, 24, 32]
    windows = {"greedy": 0, "racing": 0}
    found, sums = {}, search.LayerSearch.sums

    def counted(self, chosen, candidates, leg):
        result = sums(self, chosen, candidates, leg)
        windows[kind] += sum(of.shape[1] for of in result.values())
        return result

    monkeypatch.setattr(search.LayerSearch, "sums", counted)
    for kind in ("greedy", "racing"):
        config = CondenseConfig(count=2, layer_search=kind, refit=False)
        found[kind] = condense(model, config, calibration=tokens).summary
    assert found["racing"]["layers"] == found["greedy"]["layers"]
    assert windows["greedy"] == 64 * (6 + 5)
    assert windows["racing"] < 0.6 * windows["greedy"]
    for race in found["racing"]["search"]:
        assert race["losses"][str(race["layer"])] == min(race["losses"].values())

    folder, rounds = tmp_path / "progress", 0

    def stopped(self, chosen, candidates, leg):
        nonlocal rounds
        rounds += leg == 0
        if rounds == 2:
            raise KeyboardInterrupt
        return sums(self, chosen, candidates, leg)

    run = {"calibration": tokens, "resume_from": folder}
    monkeypatch.setattr(search.LayerSearch, "sums", stopped)
    with pytest.raises(KeyboardInterrupt):
        condense(model, config, **run)
    monkeypatch.setattr(search.LayerSearch, "sums", counted)
    assert condense(model, config, **run).summary == found["racing"]


def test_the_losses_of_a_race_are_those_of_all_its_text(tokens):
    """Cut into legs or whole, with padding and without, by hidden states and by perplexity."""
    model = tiny_moe("deepseek_v2", experts=4, num_hidden_layers=5)
    text = Tokens(tokens.input_ids.repeat(5, 1)[:16])
    mask = torch.ones_like(text.input_ids, dtype=torch.bool)
    mask[3:9, 5:] = False
    plans, _ = searched(model, tokens)
    for windows in (text, replace(text, attention_mask=mask)):
        for metric in ("js", "ppl"):
            losses = []
            for parts in ([windows], search.legs(windows)):
                streams = [stream_of(model, part) for part in parts]
                layers = search.LayerSearch(streams, plans, metric)
                found = [layers.sums((), list(plans), leg) for leg in range(len(parts))]
                sums = {i: torch.cat([leg[i] for leg in found], 1).sum(1) for i in plans}
                losses.append({i: (total / count).item() for i, (total, count) in sums.items()})
            assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_rankings_and_metrics(tokens):
    model = tiny_moe("deepseek_v2", experts=4, num_hidden_layers=5)
    _, found = searched(model, tokens)

    def order(**options):
        config = CondenseConfig(count=4, refit=False, **options)
        result = condense(model, config, calibration=tokens)
        return result.summary["layers"]

    local = {i: f["divergence"]["shared"] for i, f in found.items()}
    assert order(layer_search="rank") == sorted(local, key=lambda i: local[i])
    stream = stream_of(model, tokens)
    plans, _ = searched(model, tokens)
    alone = search.LayerSearch([stream], plans).losses((), list(plans))
    assert order(layer_search="global-rank") == sorted(alone, key=lambda i: alone[i])
    assert order(layer_search="greedy")[0] == min(alone, key=lambda i: alone[i])
    cosines = {i: f["cosine"]["attention"] for i, f in found.items()}
    assert order(layer_search="cosine") == sorted(cosines, key=lambda i: cosines[i])


def test_perplexity_as_the_metric(padded, tmp_path):
    model = tiny_moe("granitemoeshared", tie_word_embeddings=True, logits_scaling=2.0)
    config = CondenseConfig(count=1, metric="ppl", refit=False)
    result = condense(model, config, calibration=padded)

    @torch.no_grad()
    def perplexities(model):
        found = []
        for ids, mask in zip(padded.input_ids, padded.attention_mask, strict=True):
            row = ids[mask][None]
            found.append(model(row, labels=row).loss.exp())
        return torch.stack(found)

    i = result.summary["layers"][0]
    rise = (perplexities(result.model) - perplexities(model)).mean().item()
    assert result.summary["search"][0]["losses"][str(i)] == pytest.approx(rise, rel=1e-3)
    model.save_pretrained(tmp_path / "model")
    disk = condense(tmp_path / "model", config, calibration=padded, tokenizer=tiny_tokenizer())
    assert disk.summary == result.summary


def test_what_he_et_al_call_layer_drop_leaves_the_attention():
    """Their Layer Drop takes the mixture out, their Block Drop attention as well."""
    named = {keep: CondenseConfig(keep=keep).base_label for keep in ("attention", "nothing")}
    assert named == {"attention": "Layer Drop", "nothing": "Block Drop"}


@torch.no_grad()
def test_the_first_layer_of_each_kind_of_attention_is_not_dropped(tokens):
    """Of gpt-oss 0 and 1, whose caches say how large masks are."""
    model = tiny_moe("gpt_oss", num_hidden_layers=4)
    config = CondenseConfig(count=3, keep="nothing")
    with pytest.raises(MoesaicError, match="count 3 is out of reach: 2 layers"):
        condense(model, config, calibration=tokens)
    result = condense(model, replace(config, count=2), calibration=tokens)
    assert [*result.plan.layers] == [2, 3]
    ids = tokens.input_ids[:2, :8]
    first = result.model(ids[:, :6], use_cache=True)
    rest = result.model(ids[:, 6:], **cache_of(first))
    torch.testing.assert_close(rest.logits, result.model(ids).logits[:, 6:], rtol=0, atol=1e-5)


NATIVE = [
    ("qwen3_moe", {"keep": "shared+routed"}, {}),
    ("qwen2_moe", {"keep": "shared+routed", "shared_gate": "mean"}, {"mlp_only_layers": []}),
    ("deepseek_v2", {"keep": "shared+routed", "candidates": (1,)}, {}),
    ("deepseek_v3", {"keep": "shared", "candidates": (1,)}, {"intermediate_size": 40}),
    ("glm4_moe", {"keep": "shared", "candidates": (1,)}, {}),
    ("ernie4_5_moe", {"keep": "shared+routed", "candidates": (1,)}, {}),
    ("lfm2_moe", {"keep": "shared+routed", "candidates": (1,)}, {}),  # w1, w3, w2
]


@pytest.mark.parametrize(("model_type", "options", "changes"), NATIVE)
def test_the_architecture_itself_holds_the_mix_where_it_can(
    model_type, options, changes, tokens, tmp_path, monkeypatch
):
    build = tiny_moe if model_type in MOE else small_model
    model = build(model_type, **changes)
    config = CondenseConfig(count=1, refit=False, **options)
    model.save_pretrained(tmp_path / "model")
    result = condense(tmp_path / "model", config, calibration=tokens, tokenizer=tiny_tokenizer())
    result.save(tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert type(loaded) is type(model)
    monkeypatch.setattr("moesaic.methods.condense.method.padded", lambda condensed, *_: condensed)
    expected = condense(model, config, calibration=tokens)
    got, want = (m(tokens.input_ids).logits for m in (loaded, expected.model))
    assert torch.allclose(got, want, atol=1e-5)
    assert weight_bytes(tmp_path / "out") >= result.summary["memory_bytes"]["result"]
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == model_type


def test_mean_gate_is_the_shared_path_times_a_number(tokens):
    model = tiny_moe("qwen2_moe")
    _, i, layer = routed_layer(model)
    x_TD, _ = seen(model, i, tokens)
    plans, _ = searched(model, tokens, shared_gate="mean")
    mean = torch.sigmoid(layer.mlp.shared_expert_gate(x_TD)).mean().item()
    assert plans[i].shared_scale == pytest.approx(mean, rel=1e-5)
    assert plans[i].gated == 0


def test_targets_in_bytes_and_active_parameters(tokens):
    model = tiny_moe("deepseek_v2", experts=4, num_hidden_layers=5)

    def sizes(**target):
        result = condense(model, CondenseConfig(**target, refit=False), calibration=tokens)
        parameters = sum(p.numel() for p in result.model.parameters())
        memory, active = (result.summary[k] for k in ("memory_bytes", "active_parameters"))
        assert memory["result"] == 4 * parameters
        return len(result.summary["layers"]), (memory["result"], active["result"])

    (one, (bytes_1, active_1)), (two, (bytes_2, active_2)) = sizes(count=1), sizes(count=2)
    assert (one, two) == (1, 2)
    assert bytes_2 < bytes_1
    assert active_2 < active_1
    assert [sizes(memory=bytes_2 + more)[0] for more in (-1, 0, 1)] == [3, 2, 2]
    assert sizes(active=active_1)[0] == 1
    with pytest.raises(MoesaicError, match="out of reach: with all 4 layers"):
        sizes(memory=10)


def test_a_sweep_is_the_starts_of_one_search(tokens):
    model = tiny_moe("deepseek_v2", experts=4, num_hidden_layers=5)
    config = CondenseConfig(count=3, refit=False)
    result = condense(model, config, calibration=tokens, compare=["1", "2"])
    for name in ("1", "2"):
        alone = condense(model, replace(config, count=int(name)), calibration=tokens)
        plan = result.comparisons[name]
        assert plan.layers.keys() == alone.plan.layers.keys()
        assert all(same(plan.layers[i], alone.plan.layers[i]) for i in plan.layers)


def test_all_layers_that_route_are_counted(tokens):
    """Those too that were none to choose from, such as the first one of a kind of attention."""
    model = tiny_moe("mixtral", num_hidden_layers=4)
    for options in ({"keep": "nothing"}, {"keep": "attention", "candidates": (1, 2)}):
        result = condense(model, CondenseConfig(count=1, **options), calibration=tokens)
        assert result.current_record.steps[-1].title.startswith("1 of 4 ")


def test_a_comparison_of_more_layers_is_refused_before_the_search(tokens, monkeypatch):
    """Where the number is given; where bytes are, it is known only after."""
    model = tiny_moe("deepseek_v2", experts=4, num_hidden_layers=5)
    with pytest.raises(MoesaicError, match="within memory 1GB as it is"):
        condense(model, CondenseConfig(memory=10**9), calibration=tokens)
    smaller = sum(p.nbytes for p in model.parameters()) - 1
    with pytest.raises(MoesaicError, match="at most the 1 condensed"):
        condense(model, CondenseConfig(memory=smaller), calibration=tokens, compare=["2"])
    monkeypatch.setattr(search.ExpertSearch, "decide", lambda _: pytest.fail("it has begun"))
    with pytest.raises(MoesaicError, match="compare '3': .* at most the 2 condensed"):
        condense(model, CondenseConfig(count=2), calibration=tokens, compare=["3"])


def test_a_target_out_of_reach_is_refused_before_anything_runs(monkeypatch, tokens):
    """By headers; it ran the whole search first, and left its folder in the way."""
    monkeypatch.setattr(Condenser, "_search_experts", lambda *_: pytest.fail("it ran"))
    with pytest.raises(MoesaicError, match=r"memory 1KB is out of reach: with all 2 layers"):
        condense(tiny_moe("qwen2_moe"), CondenseConfig(memory=1000), calibration=tokens)
