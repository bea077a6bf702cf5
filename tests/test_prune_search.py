"""The search for experts to keep: the same choices as by scoring every set, for far less."""

import faraway
import pytest
import torch
from builders import MOE, site_of, statistics, stream_of, tiny_moe
from shrunken import small_model

import moesaic
from moesaic import SkipConfig, Tokens
from moesaic.arch.lookup import moe_arch
from moesaic.arch.mixture import MoEFFN
from moesaic.methods.prune.config import CRITERIA, PruneConfig
from moesaic.methods.prune.reconstruction import Law, Reconstruction, law_of
from moesaic.methods.prune.subsets import Neighbours, greedy, swap
from moesaic.observation.files import FILED
from moesaic.observation.stats import tally_of

LAWS = {
    "mixtral": Law.STAY,
    "qwen2_moe": Law.GROW,
    "qwen3_moe": Law.STAY,
    "olmoe": Law.GROW,
    "deepseek": Law.GROW,
    "deepseek_v2": None,  # groups
    "deepseek_v3": None,
    "glm4_moe": Law.STAY,
    "ernie4_5_moe": None,  # a bias added to a softmax
    "granitemoe": Law.STAY,
    "granitemoeshared": Law.STAY,
    "gpt_oss": Law.STAY,
    "phimoe": None,  # experts near the best count, chosen or not
    "deepseek_v4": Law.STAY,  # whose tables, in its first layers, say which experts follow
    "inkling_text": Law.STAY,  # whose router weighs shared experts, too
}
FAST = [name for name, law in LAWS.items() if law is not None]


def observed(model_type, experts=12, top_k=3, length=48, follow=False):
    """The statistics of the last layer, and its routing function."""
    if model_type in MOE:
        model = tiny_moe(model_type, experts=experts, top_k=2 if model_type == "phimoe" else top_k)
    else:
        model, experts = small_model(model_type), 8
    ids = torch.randint(1, 384, (6, length), generator=torch.Generator().manual_seed(1))
    layers = [0, 1] if model_type == "deepseek_v4" else moe_arch(model.config).moe_layers(model)
    options, found = {"tokens_per_batch": 2 * length, "follow": follow}, None
    for site in stream_of(model, Tokens(ids), layers, **options):
        found = statistics(site), site.view.routing
        if follow:  # so that the next layer has something to make good
            allowed_E = torch.ones(experts, dtype=torch.bool)
            allowed_E[::4] = False
            site.change = site.view.restricted(allowed_E)
    assert found is not None
    return found


def every(experts):
    return torch.ones(experts, dtype=torch.bool)


def best(losses, experts, keep):
    return swap(losses, greedy(losses, every(experts), keep))


def test_the_law_of_every_router(moe_type):
    stats, routing = observed(moe_type)
    assert law_of(routing, stats["logits_TX"]) is LAWS[moe_type]


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_groups_that_are_all_open_are_none(model_type):
    model = tiny_moe(model_type, experts=12, top_k=3, n_group=1, topk_group=1, topk_method="greedy")
    arch = moe_arch(model.config)
    routing = arch.mixture(arch.layers(model)[1]).routing
    logits = torch.randn(400, 12, generator=torch.Generator().manual_seed(2))
    assert law_of(routing, logits) is (Law.GROW if model_type == "deepseek_v2" else Law.STAY)


@pytest.mark.parametrize(("follow", "norms"), [(False, False), (True, True)])
@pytest.mark.parametrize("model_type", FAST)
def test_neighbours_have_the_losses_of_their_sets(model_type, follow, norms):
    """Along a walk of sets, one expert out or in at a time."""
    stats, routing = observed(model_type, follow=follow)
    assert ("delta_S" in stats) is follow
    assert law_of(routing, stats["logits_TX"]) is LAWS[model_type]
    losses = Reconstruction(stats, routing, sum_batch_norms=norms)
    slow = Neighbours(losses)
    generator = torch.Generator().manual_seed(3)
    kept_E = every(len(stats["calls_E"]))
    for _ in range(25):
        here, gone = kept_E.nonzero().flatten(), (~kept_E).nonzero().flatten()
        if len(here) > 3:
            expected = slow.without(kept_E, here)
            assert torch.allclose(losses.without(kept_E, here), expected, rtol=1e-6, atol=1e-6)
        if len(gone):
            expected = slow.having(kept_E, gone)
            assert torch.allclose(losses.having(kept_E, gone), expected, rtol=1e-6, atol=1e-6)
        out = len(gone) == 0 or (len(here) > 3 and torch.rand(1, generator=generator) < 0.6)
        choice = here if out else gone
        at = choice[torch.randint(len(choice), (1,), generator=generator)]
        kept_E = kept_E.clone()
        kept_E[at] = not out


def test_losses_of_neighbours_do_not_depend_on_blocks(monkeypatch):
    stats, routing = observed("qwen2_moe")
    here = torch.arange(12)
    whole = Reconstruction(stats, routing).without(every(12), here)
    monkeypatch.setattr("moesaic.methods.prune.reconstruction.ROWS", 7 * 12)
    assert torch.allclose(Reconstruction(stats, routing).without(every(12), here), whole)


@pytest.mark.parametrize("keep", [3, 6])
def test_the_search_decides_as_it_does_over_every_set(moe_type, keep):
    stats, routing = observed(moe_type)
    losses = Reconstruction(stats, routing)
    ours, theirs = best(losses, 12, keep), best(Neighbours(losses), 12, keep)
    assert ours.kept_E.tolist() == theirs.kept_E.tolist()
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-12)
    assert ours.evaluated == theirs.evaluated


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe"])
def test_a_token_is_routed_again_only_when_it_is_moved(model_type, monkeypatch):
    """64 -> 32 of top-8: by far fewer rows than sets times tokens, which is what it cost before."""
    stats, routing = observed(model_type, experts=64, top_k=8)
    rows = [0]
    choose = routing.choose

    def counted(logits_NE, allowed_NE=None):
        rows[0] += len(logits_NE)
        return choose(logits_NE, allowed_NE)

    monkeypatch.setattr(routing, "choose", counted)
    losses = Reconstruction(stats, routing)
    found = best(losses, 64, 32)
    assert rows[0] < 0.05 * found.evaluated * len(stats["batch_T"])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "glm4_moe", "qwen2_moe"])
def test_logits_that_are_equal(model_type):
    """bfloat16 routers give equal logits; the reported loss is that of the set all the same."""
    stats, routing = observed(model_type)
    stats["logits_TX"] = (stats["logits_TX"] * 4).round() / 4
    losses = Reconstruction(stats, routing)
    assert losses.rerouting is not None, "equal logits are no other law"
    ours, theirs = best(losses, 12, 6), best(Neighbours(losses), 12, 6)
    assert ours.loss == losses(ours.kept_E[None]).item()
    assert ours.loss <= theirs.loss * 1.05


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "glm4_moe"])
def test_the_search_runs_on_the_device_that_was_named(model_type):
    stats, routing = observed(model_type)
    here = best(Reconstruction(stats, routing), 12, 6)
    with faraway.device():
        losses = Reconstruction(stats, routing, device=faraway.FAR)
        there = best(losses, 12, 6)
        assert isinstance(losses.without(every(12), torch.arange(12)), faraway.Faraway)
    assert there.kept_E.tolist() == here.kept_E.tolist()
    assert there.loss == pytest.approx(here.loss)


# --- what is observed for it ---------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch):
    """How often outputs of experts are computed one by one, and side by side with all others."""
    done = {"expert": 0, "packed_outputs": 0}

    def counted(name):
        first = getattr(MoEFFN, name)

        def run(self, *given):
            done[name] += 1
            return first(self, *given)

        return run

    for name in done:
        monkeypatch.setattr(MoEFFN, name, counted(name))
    return done


def test_a_criterion_pays_for_what_it_reads(work, tokens):
    """Only reconstruction and pairwise see experts' outputs side by side; some see none at all."""
    model = tiny_moe("mixtral")
    for criterion in CRITERIA:
        work.update(expert=0, packed_outputs=0)
        moesaic.prune(model, PruneConfig(keep=4, score=criterion, refit=False), text=tokens)
        beside = criterion in ("reconstruction", "pairwise")
        alone = criterion in ("ean", "weighted-ean", "man", "msan", "reap")
        assert (work["packed_outputs"] > 0) is beside, criterion
        assert (work["expert"] > 0) is alone, criterion


def test_skipping_runs_no_expert_for_itself(work, tokens):
    moesaic.skip(tiny_moe("mixtral"), SkipConfig(), text=tokens)
    assert work == {"expert": 0, "packed_outputs": 0}


ALONE = (
    {"norm_E", "square_E", "gated_E"},
    {"pair_EE"},
    {"sampled_T", "gram_SP"},
    {"spread_E", "bias_E"},
    {"energy_EM", "shared_energy_S", "reach_EM"},
    {"norm_E", "gram_SP", "sampled_T"},
    {"calls_E"},
)
"""Names that are asked for together."""


@pytest.mark.parametrize("follow", [False, True])
def test_a_statistic_is_what_it_is_among_all(follow, tokens):
    site = site_of(tiny_moe("qwen2_moe"), tokens, follow=follow)
    whole = tally_of(site, FILED).stats()
    for names in ALONE:
        part = tally_of(site, names).stats()
        crosses = {"cross_SA", "delta_S"} if follow and "gram_SP" in names else set()
        assert part.keys() == names | crosses, "others were not asked for"
        for name, tensor in part.items():
            assert torch.allclose(tensor, whole[name], rtol=1e-5), name
