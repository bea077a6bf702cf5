"""Merging experts: M-SMoE (Li et al., 2024), as a criterion of prune."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from builders import COUNT, tiny_model, tiny_moe
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import MoesaicError, PruneConfig
from moesaic.arch.mixture import MOE, moe_arch
from moesaic.io.checkpoint import Checkpoint
from moesaic.layers.base import same
from moesaic.layers.merged import MergedLayer, averaged_E, matched, neurons, orders
from moesaic.methods.naee.merging import merged_layer
from moesaic.plan import Plan
from moesaic.surgery import apply_layer

MERGE = PruneConfig(keep=4, criterion="merge")
PLAIN = sorted(set(MOE) - {"gpt_oss"})


def shuffle(experts, source, into, seed=0):
    """Make expert ``into`` a copy of ``source`` with its neurons in another order."""
    gate, up = experts.gate_up_proj[source].chunk(2)
    order = torch.randperm(len(gate), generator=torch.Generator().manual_seed(seed))
    experts.gate_up_proj[into] = torch.cat([gate[order], up[order]])
    experts.down_proj[into] = experts.down_proj[source][:, order]
    return order


def joined(into, share):
    into, share = torch.tensor(into), torch.tensor(share)
    return MergedLayer(into.unique(), into, share)


# --- matching and averaging ----------------------------------------------------------------------


def test_matching_is_the_closest_of_all_permutations():
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 6, 5, generator=generator)
    distance = {p: (a - b[list(p)]).square().sum().item() for p in permutations(range(6))}
    assert tuple(matched(a, b).tolist()) == min(distance, key=distance.get)


@torch.no_grad()
@pytest.mark.parametrize("moe_type", PLAIN)
def test_shuffled_copies_merge_into_the_same_function(moe_type):
    model = tiny_moe(moe_type)
    arch = moe_arch(model.config)
    i = arch.moe_layers(model)[0]
    view = arch.mixture(arch.layers(model)[i])
    order = shuffle(view.experts, 2, 5)
    x_TD = torch.randn(30, view.block(torch.zeros(1, 1, 32))[0].shape[-1])
    wanted = view.expert(2, x_TD)
    torch.testing.assert_close(view.expert(5, x_TD), wanted)
    plan = joined([0, 1, 2, 3, 4, 2, 6, 7], [1, 1, 0.7, 1, 1, 0.3, 1, 1])
    found = orders(plan, view.experts.gate_up_proj, view.experts.down_proj)
    assert torch.equal(order[found[5]], torch.arange(len(order)))
    others = view.expert(7, x_TD)
    apply_layer(arch.layers(model), i, arch, plan)
    merged = arch.mixture(arch.layers(model)[i])
    torch.testing.assert_close(merged.expert(2, x_TD), wanted)
    assert torch.equal(merged.expert(6, x_TD), others), "the last of the seven that stay"


def test_the_mean_is_weighted_and_of_matched_neurons():
    generator = torch.Generator().manual_seed(5)
    gate_up, down = (torch.randn(3, *s, generator=generator) for s in ((8, 6), (6, 4)))
    plan = joined([0, 1, 0], [0.75, 1.0, 0.25])
    found = orders(plan, gate_up, down)
    a, b = (neurons(gate_up[i], down[i]) for i in (0, 2))
    mean = 0.75 * a + 0.25 * b[matched(a, b)]
    new = [
        averaged_E(plan, n, t, found) for n, t in (("gate_up_proj", gate_up), ("down_proj", down))
    ]
    torch.testing.assert_close(neurons(new[0][0], new[1][0]), mean)
    assert torch.equal(new[0][1], gate_up[1])


# --- who joins whom ------------------------------------------------------------------------------


def test_the_most_called_stay_and_the_others_join_the_most_alike(tokens):
    model = tiny_moe("mixtral")
    result = moesaic.prune(model, MERGE, calibration=tokens, compare=["frequency"])
    for i, layer in result.plan.layers.items():
        calls = torch.tensor(result.analyses[i]["calls"]).double()
        assert layer.kept == result.comparisons["frequency"].layers[i].kept
        assert len(layer.groups) == 4
        assert sorted(i for group in layer.groups.values() for i in group) == list(range(8))
        for into, members in layer.groups.items():
            assert calls[into] == calls[members].max()
            share = calls[members] / calls[members].sum()
            torch.testing.assert_close(layer.share_E[members], share.float())


def test_router_logits_say_who_is_alike():
    logits_TE = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    logits_TE[:, 3] = 2 * logits_TE[:, 1] + 0.1 * logits_TE[:, 0]
    kept_E = torch.tensor([True, True, True, False])
    layer = merged_layer(kept_E, logits_TE, torch.tensor([5, 6, 7, 2]))
    assert layer.groups == {0: [0], 1: [1, 3], 2: [2]}
    assert layer.share_E.tolist() == [1, 0.75, 1, 0.25]


def test_a_plan_must_be_of_groups():
    with pytest.raises(ValueError, match="experts join"):
        MergedLayer(torch.tensor([0, 1]), torch.tensor([0, 0, 0]), torch.ones(3))
    with pytest.raises(ValueError, match="joins another"):
        MergedLayer(torch.tensor([0, 1]), torch.tensor([1, 0, 0]), torch.ones(3))


# --- results -------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("moe_type", PLAIN)
def test_live_and_streamed_are_one_native_checkpoint(moe_type, tokens, tmp_path):
    model = tiny_moe(moe_type)
    live = moesaic.prune(model, MERGE, calibration=tokens)
    live.save(tmp_path / "live")
    model.save_pretrained(tmp_path / "base", max_shard_size="50KB")
    disk = moesaic.prune(tmp_path / "base", MERGE, calibration=tokens, tokenizer=object())
    disk.save(tmp_path / "disk")
    moesaic.apply(str(tmp_path / "base"), tmp_path / "live", tmp_path / "again")
    a = Checkpoint(tmp_path / "live")
    for other in ("disk", "again"):
        b = Checkpoint(tmp_path / other)
        assert sorted(a.names()) == sorted(b.names())
        assert all(torch.equal(a.tensor(n), b.tensor(n)) for n in a.names())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "disk").eval()
    assert type(loaded) is type(model)
    assert getattr(loaded.config, COUNT[moe_type]) == 4
    ids = tokens.input_ids
    assert torch.equal(loaded(ids).logits, live.model(ids).logits)
    dropped = moesaic.prune(model, PruneConfig(keep=4, criterion="frequency"), calibration=tokens)
    assert not torch.equal(loaded(ids).logits, dropped.model(ids).logits)
    plan = Plan.load(tmp_path / "disk")
    assert all(same(plan.layers[i], layer) for i, layer in live.plan.layers.items())


@torch.no_grad()
def test_keeping_every_expert_changes_nothing(tokens):
    model = tiny_moe("qwen2_moe")
    result = moesaic.prune(model, PruneConfig(keep=8, criterion="merge"), calibration=tokens)
    ids = tokens.input_ids
    assert torch.equal(result.model(ids).logits, model(ids).logits)


def test_the_original_is_left_alone(tokens):
    model = tiny_moe("olmoe")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert moesaic.prune(model, MERGE, calibration=tokens).model is not model
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


@torch.no_grad()
def test_merging_from_a_file_and_in_bfloat16(tokens, tmp_path):
    model = tiny_moe("qwen3_moe").bfloat16()
    moesaic.observe(model, tmp_path / "stats", calibration=tokens, gram_mb=0)
    filed = moesaic.prune(model, MERGE, stats=tmp_path / "stats")
    direct = moesaic.prune(model, MERGE, calibration=tokens)
    assert all(same(filed.plan.layers[i], x) for i, x in direct.plan.layers.items())
    assert {p.dtype for p in filed.model.parameters()} == {torch.bfloat16}
    assert torch.equal(filed.model(tokens.input_ids).logits, direct.model(tokens.input_ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("padding", [False, True])
def test_counts_that_differ(padding, tokens, tmp_path):
    config = PruneConfig(keep=5.5, criterion="merge", uniform=False, padding=padding)
    model = tiny_moe("glm4_moe")
    result = moesaic.prune(model, config, calibration=tokens)
    counts = {len(layer.groups) for layer in result.plan.layers.values()}
    assert len(counts) > 1
    model.save_pretrained(tmp_path / "base")
    result.save(tmp_path / "out")
    moesaic.apply(str(tmp_path / "base"), tmp_path / "out", tmp_path / "disk")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "disk").eval()
    assert (type(loaded) is type(model)) == padding
    assert torch.equal(loaded(tokens.input_ids).logits, result.model(tokens.input_ids).logits)


@pytest.mark.parametrize(
    ("moe_type", "options", "message"),
    [
        ("gpt_oss", {}, "only plain gated MLPs are merged"),
        ("mixtral", {"progressive": True}, "not with merged ones"),
        ("mixtral", {"keep": 1}, "needs at least 2"),
        ("llama", {}, "no routed experts"),
    ],
)
def test_what_cannot_be_merged_is_said(moe_type, options, message, tokens):
    model = tiny_model("llama") if moe_type == "llama" else tiny_moe(moe_type)
    options = {"keep": 4, "criterion": "merge", **options}
    with pytest.raises(MoesaicError, match=message):
        moesaic.prune(model, PruneConfig(**options), calibration=tokens)
