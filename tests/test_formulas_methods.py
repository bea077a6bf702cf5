"""Formulas of methods by hand or by an independent few lines: divergences, searches, clusters."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import drawn, stream_of, tiny_moe

from moesaic import CondenseConfig, MoesaicError, Plan, RunArgs
from moesaic.api import condense
from moesaic.arch.lookup import moe_arch
from moesaic.carving.budget import LayerSize, split_for_share
from moesaic.carving.more import formulas
from moesaic.methods.condense.search import cosine, js, kl, tail_exponent
from moesaic.methods.layered import recover
from moesaic.methods.prune.subsets import every_set, exhaustive
from moesaic.methods.slim.config import SCORES, Neurons
from moesaic.metrics.score import model_size
from moesaic.observation.job import Job
from moesaic.observation.stats import tally_of
from moesaic.plan import Progress
from moesaic.plans.cut import CutLayer
from moesaic.surgery import base_shape
from moesaic.train.tune.method import factors

# --- divergences ---------------------------------------------------------------------------------


def shares(x):
    whole = sum(math.exp(v) for v in x.tolist())
    return [math.exp(v) / whole for v in x.tolist()]


def kl_by_hand(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("apart", [1.0, 0.1])
def test_divergences_of_hidden_states(apart):
    p_ND = drawn(5, 7)
    q_ND = p_ND + apart * drawn(5, 7, seed=1)
    kept = p_ND.clone(), q_ND.clone()
    for i, (p_D, q_D) in enumerate(zip(p_ND, q_ND, strict=True)):
        p, q = shares(p_D), shares(q_D)
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        close = {"rel": 1e-3, "abs": 3e-7}
        assert kl(p_ND, q_ND)[i].item() == pytest.approx(kl_by_hand(p, q), **close)
        half = (kl_by_hand(p, m) + kl_by_hand(q, m)) / 2
        assert js(p_ND, q_ND)[i].item() == pytest.approx(half, **close)
        inner = sum(a * b for a, b in zip(p_D.tolist(), q_D.tolist(), strict=True))
        size = math.sqrt(sum(a * a for a in p_D.tolist()) * sum(b * b for b in q_D.tolist()))
        assert cosine(p_ND, q_ND)[i].item() == pytest.approx(1 - inner / size, **close)
    assert torch.equal(p_ND, kept[0])
    assert torch.equal(q_ND, kept[1])


def test_equal_states_are_at_no_distance_and_far_ones_at_ln_2():
    p_ND = torch.tensor([[0.0, 200.0], [3.0, 1.0]])
    assert 0 <= js(p_ND, p_ND.clone()).min() <= js(p_ND, p_ND.clone()).max() < 1e-7
    assert kl(p_ND, p_ND.clone()).tolist() == [0, 0]
    assert js(p_ND[:1], -p_ND[:1]).item() == pytest.approx(math.log(2))
    assert js(p_ND[:1], p_ND.clone()).shape == (2,)


# --- clusters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "dims"), [(30, 3), (8, 3)], ids=["Lanczos", "few"])
@pytest.mark.parametrize("large", [False, True], ids=["", "by blocks"])
def test_embeddings_are_leading_eigenvectors(count, dims, large, monkeypatch):
    """Of D^-1/2 C D^-1/2 over the members without the diagonal; rows of norm one."""
    if large:
        monkeypatch.setattr(formulas, "LARGE", 0)
    group_M = torch.arange(40) % 3
    affinity_MM = (group_M[:, None] == group_M).float() + 0.2 * drawn(40, 40).abs()
    affinity_MM = affinity_MM + affinity_MM.T + 5 * torch.eye(40)
    members = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:count]
    own = affinity_MM.double().numpy()[np.ix_(members, members)]
    np.fill_diagonal(own, 0)
    degree = own.sum(1)
    assert np.allclose(formulas.affinity_degree(affinity_MM, members), degree, rtol=1e-5)
    values, vectors = np.linalg.eigh(own / np.sqrt(np.outer(degree, degree)))
    assert values[-1] == pytest.approx(1)
    wanted = vectors[:, -dims:]
    wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    found = formulas.spectral_embedding(affinity_MM, members, dims, seed=0)
    assert found.shape == (count, dims)
    assert np.allclose(found @ found.T, wanted @ wanted.T, atol=1e-2 if large else 1e-4)


FILLED = [
    # the point of least cost moves to a cluster that has too few
    ([[0, 1], [0, 2], [0, 3], [0, 9]], [1, 1], [4, 4], [1, 0, 0, 0]),
    ([[0, 1], [0, 2], [0, 3], [0, 9]], [2, 2], [4, 4], [1, 1, 0, 0]),
    ([[5, 6], [0, 2], [0, 3], [0, 9]], [1, 1], [4, 4], [1, 0, 0, 0]),
    # but nobody leaves a cluster that has no more than it must
    ([[0, 9, 4], [0, 9, 5], [0, 9, 6], [9, 0, 1]], [1, 1, 1], [4, 4, 4], [2, 0, 0, 1]),
    # a full cluster sends those away whose second choice costs them least
    ([[0, 1], [0, 2], [0, 3], [0, 9]], [0, 0], [2, 4], [1, 1, 0, 0]),
    ([[3, 4], [0, 2], [1, 1], [2, 9]], [0, 0], [1, 4], [1, 1, 1, 0]),
    ([[1], [2]], [2], [2], [0, 0]),
]


@pytest.mark.parametrize(("distance", "least", "most", "label"), FILLED)
def test_clusters_are_filled_within_bounds(distance, least, most, label):
    found = formulas.fill(np.array(distance, float), np.array(least), np.array(most))
    assert found.tolist() == label


def test_distances_are_those_to_every_centre():
    points = np.array([[0.0, 0], [0, 2], [9, 9], [9, 11]])
    label, distance = formulas.cluster(points, 2, seed=0)
    near, far = label[0], label[2]
    assert label.tolist() == [near, near, far, far]
    assert distance[:, near] == pytest.approx([1, 1, 145, 181])
    assert distance[:, far] == pytest.approx([181, 145, 1, 1])


# --- budgets and tails ---------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_share_needs_some_petals_to_run_and_some_to_idle(top_k):
    with pytest.raises(MoesaicError, match="at least 1 and below experts 4"):
        split_for_share([LayerSize(0, 300, 100)], [0], 0.5, 4, top_k)


def test_a_tail_begins_at_the_peak_where_nothing_is_near_it():
    """Bins of two decades: the last holds both, and its lower edge is far below them."""
    value_N = torch.tensor([1e-100, 5e98, 1e100], dtype=torch.float64)
    assert tail_exponent(value_N) == pytest.approx(1 + 1 / math.log(20))


def test_an_experts_prototype_is_of_its_tokens_in_every_batch():
    """Two tokens run the first expert, both in the first batch; their mean is not the strongest."""
    x_TD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
    h_TM = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    site = SimpleNamespace(
        tokens=4,
        view=SimpleNamespace(up_MD=torch.zeros(2, 2)),
        activations=lambda: zip(x_TD.split(2), h_TM.split(2), strict=True),
    )
    found = formulas.prototypes(site, torch.eye(2), alpha=0.5)
    wanted = torch.tensor([[1.0, 1.0], [2.0, 1.0]])
    assert torch.allclose(found, wanted / wanted.norm(dim=1, keepdim=True))


# --- neurons -------------------------------------------------------------------------------------


def test_scores_of_neurons_by_hand():
    squares = {"energy": [4.0, 9.0], "reach": [3.0, 1.0], "size": [5.0, 7.0]}
    energy, reach, size = (torch.tensor([v]).double() for v in squares.values())
    gram, down = torch.diag(energy[0])[None], torch.diag(reach[0])[None]
    neurons = Neurons(energy, reach, size, 3, gram, down)
    found = {name: SCORES[name].score(neurons) for name in SCORES}
    assert found["energy"].tolist() == [[6.0, 3.0]]
    assert found["magnitude"].tolist() == [[5.0, 7.0]]
    # alone each costs its square times its column's, and the ridge, a tenth of the mean square
    wanted = [[((e + 0.65) * r**2) ** 0.5 for e, r in ((4, 3), (9, 1))]]
    assert torch.allclose(found["surgeon"], torch.tensor(wanted).double())
    assert torch.equal(found["random"], SCORES["random"].score(neurons))


@pytest.mark.parametrize("keep", ["shared", "nothing"])
def test_what_condensing_leaves_is_counted_as_in_the_result(tokens, keep):
    model = tiny_moe("qwen2_moe")
    result = condense(model, CondenseConfig(count=1, keep=keep), calibration=tokens)
    for key, of in (("original", model), ("result", result.model)):
        size = model_size(of)
        assert result.summary["active_parameters"][key] == size.active_parameters
        assert result.summary["memory_bytes"][key] == 4 * size.total_parameters


# --- choices -------------------------------------------------------------------------------------


def test_channels_that_fire_alone_go_to_the_smallest_petal_in_turn():
    together = torch.zeros(8, 8)
    together[0, 1] = together[1, 0] = together[2, 3] = together[3, 2] = 5.0
    petals = formulas.petals_of(together, torch.arange(8), 2, balanced=True, seed=0)
    either = {(0, 1, 4, 6), (2, 3, 5, 7)}, {(0, 1, 5, 7), (2, 3, 4, 6)}
    assert {tuple(petal.tolist()) for petal in petals} in either


@pytest.mark.parametrize("best", [3, 1900])
def test_the_best_of_all_sets_in_whatever_block_it_is(best):
    """2,002 sets of 9 of 14 come in two blocks."""
    numbers = iter(range(2002))

    def losses(kept_CE):
        return torch.tensor([float(abs(next(numbers) - best)) for _ in kept_CE])

    found = exhaustive(losses, 14, 9)
    everything = torch.cat(list(every_set(14, 9)))
    assert torch.equal(found.kept_E, everything[best])
    assert (found.loss, found.evaluated) == (0.0, 2002)


def test_weights_are_kept_out_of_condensed_layers_alone():
    model = tiny_moe("qwen2_moe")
    arch = moe_arch(model.config)
    cut = Plan("naee", base_shape(model, arch), {1: CutLayer(torch.arange(4))})
    assert [factors(arch, model.config, plan) for plan in (cut, None)] == [{}, {}]


def test_without_a_shared_path_there_is_nothing_of_it(tokens):
    model = tiny_moe("mixtral")
    for site in stream_of(model, tokens, [1]):
        names = {"shared_reach_S", "shared_energy_S"}
        found = {name: t.numel() for name, t in tally_of(site, names).stats().items()}
        assert found == dict.fromkeys(names, 0)


@pytest.mark.parametrize("again", [False, True])
def test_each_plan_is_refitted_in_its_own_layers_and_once(tokens, again, monkeypatch):
    model = tiny_moe("mixtral")
    job = Job(RunArgs(model, text=tokens), moe_arch)
    base = base_shape(model, moe_arch(model.config))
    kept = CutLayer(torch.arange(6))
    plans = {"result": Plan("naee", base, {1: kept}), "other": Plan("naee", base, {2: kept})}
    finished = Progress(None, {})
    refitted, found = recover(job, plans, finished)
    own = {"result": [1], "other": [2]}
    assert {name: list(plan.layers) for name, plan in refitted.items()} == own
    assert finished.keys() == {("result-refit", 1), ("other-refit", 2)}
    assert {name: list(layers) for name, layers in found.items()} == own
    if again:
        monkeypatch.setattr(CutLayer, "refit", None)
        assert recover(job, plans, finished)[0].keys() == plans.keys()
        del finished["other-refit", 2]
        with pytest.raises(TypeError):
            recover(job, plans, finished)


def test_a_layer_is_refitted_on_what_changed_layers_before_it_pass_on(tokens):
    model = tiny_moe("mixtral", num_hidden_layers=2)
    base = base_shape(model, moe_arch(model.config))
    plan = Plan("naee", base, {i: CutLayer(torch.arange(4)) for i in range(2)})
    job = Job(RunArgs(model, text=tokens), moe_arch)
    results = [
        recover(job, {"result": plan}, Progress(None, {}), propagate=follow)[1]["result"]
        for follow in (False, True)
    ]
    assert results[0][0] == results[1][0]
    assert results[0][1] != results[1][1]
