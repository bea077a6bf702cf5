"""DSMoE: gates, gradients, sparse execution, losses by hand, and the verbs around it."""

import copy
import json
import math
from contextlib import contextmanager
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from builders import WAYS, configured, converted, drawn_ids, force, losses_of, masked, tiny_model

import moesaic
from moesaic import DSMoEConfig, MoesaicError, Recipe, Tokens
from moesaic.arch.lookup import dense_arch
from moesaic.carving import routers
from moesaic.carving.budget import layer_sizes
from moesaic.carving.carved_layer import CarvedFFN
from moesaic.carving.dsmoe.method import DSMoE, SparseObjective, imbalance, sparsity
from moesaic.data.sources import MIXES, Mix
from moesaic.metrics.forward import InMemory
from moesaic.metrics.score import scores
from moesaic.pipeline import run_recipe
from moesaic.train.text import PackedText

BLOCKS = 4


def carved(model, scale=1.0, **options):
    """A model with gates of its own scale, or of a larger one, in place."""
    sizes = layer_sizes(model, dense_arch(model.config))
    layers = DSMoE(configured(DSMoEConfig, experts=BLOCKS, **options)).start(sizes)
    converted(model, dict(layers))
    with torch.no_grad():
        for ffn in ffns(model):
            ffn.router.weight.mul_(scale)
    return model


def ffns(model):
    return [m for m in model.modules() if isinstance(m, CarvedFFN)]


def gated(model_type="llama", dtype=torch.float64, **options):
    """One block whose gates differ from token to token, and its inputs (T, D)."""
    changes = {"mlp_bias": False} if model_type == "llama" else {}
    model = carved(tiny_model(model_type, **changes), 20, **options).to(dtype)
    return ffns(model)[0].eval(), torch.randn(17, 32, dtype=dtype)


@contextmanager
def gates_of(model):
    """What routers give inside, layer by layer and call by call."""
    seen = []
    hooks = [f.router.register_forward_hook(lambda *a: seen.append(a[2])) for f in ffns(model)]
    yield seen
    for hook in hooks:
        hook.remove()


# --- the block -----------------------------------------------------------------------------------


def test_open_gates_are_the_dense_block(model_type):
    """Also: the blocks' outputs add up to the dense block's (Eq. 6)."""
    torch.manual_seed(0)
    model = tiny_model(model_type).double()
    arch = dense_arch(model.config)
    dense = copy.deepcopy(arch.ffn_of(arch.layers(model)[0]))
    ffn = ffns(carved(model))[0]
    with torch.no_grad():
        ffn.router.weight.fill_(100.0)  # sigmoid is 1.0 exactly
    x_TD = torch.randn(9, 32, dtype=torch.float64).abs()
    want = dense(x_TD)
    for training in (True, False):
        assert torch.allclose(ffn.train(training)(x_TD), want, atol=1e-12)
    assert torch.allclose(ffn.eval()(x_TD[:1]), want[:1], atol=1e-12)
    view = ffn.view()
    parts = [view.neurons(*place) for place in ffn.slices]
    whole = sum(part.output(part.hidden(x_TD)) for part in parts)
    bias = 0 if view.down_bias_D is None else view.down_bias_D
    assert torch.allclose(whole + bias, want, atol=1e-12)


@pytest.mark.parametrize("routing", ["full", "top-k"])
@pytest.mark.parametrize("way", WAYS)
def test_sparse_execution_is_masked_execution(model_type, routing, way, monkeypatch):
    """To float32's tolerance: gates are computed in it."""
    torch.manual_seed(1)
    force(monkeypatch, way)
    options = {"active": 0.6} if routing == "top-k" else {}
    ffn, x_TD = gated(model_type, variant=routing, **options)
    active = (ffn.router(x_TD) > 0).sum(-1)
    if routing == "full":
        assert len(active.unique()) > 2, "tokens differ in how many blocks they run"
    with torch.no_grad():
        want = masked(ffn)(x_TD)
        assert torch.allclose(ffn(x_TD), want, atol=1e-6)
        alone = torch.cat([ffn(x_1D) for x_1D in x_TD.split(1)])
        assert torch.allclose(alone, want, atol=1e-6)
        assert torch.allclose(ffn.train()(x_TD), want, atol=1e-6), "S has the value of G"


def test_idle_blocks_are_not_computed(monkeypatch):
    """Neurons that are run, counted where they are."""
    torch.manual_seed(2)
    ffn, x_TD = gated()
    force(monkeypatch, "petal by petal")
    ran = []
    hidden = type(ffn.view()).hidden

    def counted(self, x_TD):
        ran.append(self.width)
        return hidden(self, x_TD)

    monkeypatch.setattr(type(ffn.view()), "hidden", counted)
    for x_1D in x_TD.split(1):
        ran.clear()
        ffn(x_1D)
        assert sum(ran) == 16 * (ffn.router(x_1D) > 0).sum()


def test_gradients_are_equations_13_to_16():
    """Of one token, by hand: with active and idle blocks."""
    torch.manual_seed(3)
    ffn, x_TD = gated()
    ffn.train()
    x_1D = next(x for x in x_TD.split(1) if 0 < (ffn.router(x) > 0).sum() < BLOCKS)
    v_D = torch.randn(32, dtype=torch.float64)
    (ffn(x_1D) @ v_D).sum().backward()
    W, U, V, Y = (p.weight for p in (ffn.gate_proj, ffn.up_proj, ffn.down_proj, ffn.router))
    x = x_1D[0]
    g_N = torch.sigmoid(Y.detach() @ x)
    scale = BLOCKS / int((g_N > 0.5).sum())
    for i, (start, stop) in enumerate(ffn.slices):
        Wi, Ui, Vi = W[start:stop].detach(), U[start:stop].detach(), V[:, start:stop].detach()
        z, u = Wi @ x, Ui @ x
        a, slope = F.silu(z), torch.sigmoid(z) * (1 + z * (1 - torch.sigmoid(z)))
        o = Vi @ (a * u)
        dY = x * (o @ v_D) * g_N[i] * (1 - g_N[i]) * scale  # Eq. 16: whether or not it is active
        assert torch.allclose(Y.grad[i].double(), dY, rtol=1e-5, atol=1e-6)
        g = g_N[i] * scale if g_N[i] > 0.5 else 0.0
        back = Vi.T @ v_D
        assert torch.allclose(V.grad[:, start:stop], torch.outer(v_D, a * u) * g, rtol=1e-6)
        assert torch.allclose(W.grad[start:stop], torch.outer(slope * u * back, x) * g, rtol=1e-6)
        assert torch.allclose(U.grad[start:stop], torch.outer(a * back, x) * g, rtol=1e-6)


def test_without_the_piecewise_function_all_blocks_train_and_few_are_left():
    torch.manual_seed(3)
    ffn, x_TD = gated(variant="no-piecewise")
    g_TN = torch.sigmoid(x_TD @ ffn.router.weight.double().T)
    view = ffn.view()
    parts = [view.neurons(*place) for place in ffn.slices]
    want = sum(p.output(p.hidden(x_TD)) * g_TN[:, i, None] for i, p in enumerate(parts))  # Eq. 20
    assert torch.allclose(ffn.train()(x_TD), want, atol=1e-6)
    ffn.eval()
    assert torch.equal(ffn.router(x_TD) > 0, g_TN > 0.5)


def test_a_token_without_blocks_is_finite():
    ffn, x_TD = gated(tau=0.999)
    with torch.no_grad():
        ffn.router.weight.mul_(0.01)
        for tokens in (x_TD, x_TD[:1]):
            y_TD = ffn(tokens)
            assert not y_TD.any()
            assert torch.allclose(y_TD, masked(ffn)(tokens), atol=1e-12)
    assert not (ffn.router(x_TD) > 0).any()
    ffn.train()(x_TD).sum().backward()
    assert ffn.router.weight.grad.isfinite().all()
    assert ffn.router.weight.grad.any(), "a gate that is never open still learns"


# --- losses --------------------------------------------------------------------------------------


def test_the_sparsity_loss_pushes_active_gates_alone():
    """Eq. 19: also through S, whose gradient is one everywhere."""
    g = torch.tensor([[[0.7, 0.3], [0.2, 0.9]]], requires_grad=True)
    S = (g * (g > 0.5)).detach() + g - g.detach()
    sparsity(S).sum().backward()
    assert g.grad.tolist() == [[[0.5, 0.0], [0.0, 0.5]]]


def test_the_objective_by_hand_padding_left_out():
    torch.manual_seed(5)
    model = carved(tiny_model("llama"), 20, sparsity=0.7, tau=0.9).train()
    ids = drawn_ids(2, 12, seed=3)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[1, 7:], mask[1, 7:] = -100, 0
    config = configured(DSMoEConfig, sparsity=0.7)
    objective = SparseObjective([f.router for f in ffns(model)], config, None)
    batch = {"input_ids": ids, "labels": labels.clone(), "attention_mask": mask}
    loss, figures = objective(model, batch)
    with gates_of(model) as seen:
        logits = model(input_ids=ids, attention_mask=mask).logits
    total, gates, on, idle = 0.0, 0.0, 0, 0
    predicting = (labels[:, 1:] != -100).nonzero().tolist()
    for b, t in predicting:
        total += F.cross_entropy(logits[b, t], labels[b, t + 1]).item()
        here = torch.stack([G[b * 12 + t] for G in seen])
        gates += here.mean().item()
        on += int((here > 0).sum())
        idle += int((here <= 0).all(-1).sum())
    assert len(predicting) == 11 + 6
    assert figures["language"].item() == pytest.approx(total, rel=1e-5)
    assert figures["sparsity"].item() == pytest.approx(gates, rel=1e-5)
    assert figures["active_blocks"].item() == pytest.approx(on / 4 / BLOCKS, rel=1e-5)
    assert 0 < idle < on
    assert figures["idle_tokens"].item() == pytest.approx(idle / 4, rel=1e-5)
    assert loss.item() == pytest.approx(total + 0.7 * gates, rel=1e-5)


def test_the_controller_reaches_its_target():
    """From about half of the blocks, down and up."""
    tokens = drawn_ids(32, 24, seed=3)
    for active, above in ((0.6, False), (0.85, True)):
        training = {"steps": 60, "batch": 8, "lr": 1e-2, "gain": 1}
        config = configured(DSMoEConfig, experts=BLOCKS, active=active, **training)
        model = tiny_model("llama", mlp_bias=False, num_hidden_layers=2)
        arch = dense_arch(model.config)
        target = DSMoE(config).target(layer_sizes(model, arch))
        result = moesaic.carve(model, config, calibration=tokens)
        assert target is not None
        last = [step["active_blocks"] for step in losses_of(result)[-10:]]
        assert sum(last) / 10 == pytest.approx(target, abs=0.08)
        measured = scores([InMemory(result.model)], Tokens(tokens))[0]
        assert measured.active_ratio == pytest.approx(active, abs=0.08)
        least = min(step["lambda"] for step in losses_of(result))
        assert (least < 0) == above, "what is too sparse is rewarded for activity"


# --- training ------------------------------------------------------------------------------------


def interrupting(items, label, total=None):
    if label == "Training":
        raise KeyboardInterrupt
    return items


def test_training_that_comes_to_nothing_ends_at_once_and_is_not_in_the_way(llama_folder, tmp_path):
    few, places = {"length": 24, "steps": 3, "batch": 2}, (str(llama_folder), str(tmp_path / "out"))
    diverging = Recipe(*places, (configured(DSMoEConfig, lr=1e30, **few),), evaluation=None)
    with pytest.raises(MoesaicError, match=r"lr 1e\+30 is too high: the (loss|gradient) of step"):
        run_recipe(diverging)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(KeyboardInterrupt):
        run_recipe(Recipe(*places, (configured(DSMoEConfig, **few),)), track=interrupting)
    assert not [*tmp_path.iterdir()]


# --- results -------------------------------------------------------------------------------------


def test_activity_is_counted_on_real_tokens(tokens):
    model = carved(tiny_model("llama", mlp_bias=False), 20)
    with gates_of(model) as outs:
        measured = scores([InMemory(model)], tokens)[0]
    for i, routing in measured.routing.items():
        on = torch.cat(outs[i::4]) > 0
        assert routing.counts == on.sum(0).tolist()
        assert routing.idle == int((~on.any(-1)).sum())
        assert routing.active_width == pytest.approx(on.float().mean().item() * 64)
    share = torch.cat(outs).gt(0).double().mean().item()
    attention, ffn = 32 * (32 + 16 + 16 + 32), 3 * 32 * 64
    want = (attention + ffn * share) / (attention + ffn)
    assert measured.active_ratio == pytest.approx(want)


# --- text ----------------------------------------------------------------------------------------


def test_packed_text_is_mixed_by_weight_and_repeatable(tmp_path, tokenizer):
    for name, letter in (("a", "a"), ("b", "b")):
        lines = [json.dumps({"text": f"{letter} " * 30}) for _ in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    mix = f"{tmp_path}/a.jsonl=3,{tmp_path}/b.jsonl=1"

    def first(count, seed=0):
        stream = PackedText(mix, tokenizer, 16, seed, buffer=4)
        return [window["input_ids"] for window in islice(stream, count)]

    windows = first(400)
    assert {len(w) for w in windows} == {16}
    from_a = sum("a" in tokenizer.decode(w) for w in windows)
    assert 260 <= from_a <= 340, "three quarters, and the small source begins anew"
    assert not any({"a", "b"} <= set(tokenizer.decode(w)) for w in windows)
    assert any(tokenizer.eos_token_id in w for w in windows)
    assert first(20) == windows[:20]
    assert first(20, seed=1) != windows[:20]


def test_a_source_beside_a_named_mix_that_holds_it_counts_twice(tmp_path, tokenizer, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}')
    monkeypatch.setitem(MIXES, "ours", Mix("", (str(file),)))
    stream = PackedText(f"ours=2,{file}=1,prose=1", tokenizer, 16)
    assert stream.weights == {str(file): 3.0, "prose": 1.0}


ROWS = [[1.0, 0.0], [0.0, -1.0], [0.5, 0.5]]
TOKENS = [[2.0, 1.0], [-1.0, 0.25], [0.5, -3.0]]


def gates():
    """sigmoid(x . Y_i) of every token and block."""
    return [[1 / (1 + math.exp(-(x[0] * y[0] + x[1] * y[1]))) for y in ROWS] for x in TOKENS]


def with_rows(router):
    with torch.no_grad():
        router.weight.copy_(torch.tensor(ROWS))
    return router


@pytest.mark.parametrize("tau", [0.4, 0.5, 0.7])
@pytest.mark.parametrize("training", [True, False])
def test_the_gate_by_hand(tau, training):
    """Eqs. 3 and 7: the sigmoid where it is above tau, zero elsewhere."""
    router = with_rows(routers.ThresholdRouter(2, 3, 0, tau=tau)).train(training)
    found = router(torch.tensor(TOKENS)).tolist()
    wanted = [[g if g > tau else 0.0 for g in row] for row in gates()]
    assert any(g for row in wanted for g in row)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)


def test_a_gate_at_the_threshold_is_idle():
    found = routers.thresholded(torch.tensor([0.5, 0.50001]), 0.5)
    assert found.tolist() == [0.0, pytest.approx(0.50001)]


def test_the_straight_through_gradient_by_hand():
    """Eqs. 10 and 11: dS/dg is 1 for idle gates too, so that dY is g (1 - g) x."""
    for through in (True, False):
        router = with_rows(routers.ThresholdRouter(2, 3, 0, through=through)).train()
        router(torch.tensor(TOKENS[:1])).sum().backward()
        for row, g in zip(router.weight.grad.tolist(), gates()[0], strict=True):
            slope = g * (1 - g) if through or g > 0.5 else 0.0
            assert row == pytest.approx([slope * v for v in TOKENS[0]], rel=1e-4, abs=1e-7)
    value = torch.tensor([3.0])
    g = torch.tensor([0.25], requires_grad=True)
    S = routers.straight_through(value, g)
    (5 * S).backward()
    assert (S.item(), g.grad.item()) == (3.0, 5.0)


def test_the_scale_by_hand():
    """Eq. 8: n over the active blocks of a token; over one where there is none."""
    weights_TR = torch.tensor([[0.6, 0.9, 0.0], [0.7, 0.8, 0.9], [0.0, 0.0, 0.0], [0.0, 0.1, 0.0]])
    assert routers.norm_scale(weights_TR).tolist() == [[1.5], [1.0], [3.0], [3.0]]


def test_the_softmax_by_hand():
    """LLaMA-MoE: the highest logits' own softmax, times the scale."""
    router = with_rows(routers.SoftmaxRouter(2, 3, 2, scale=1.5))
    found = router(torch.tensor(TOKENS[:1]))[0].tolist()  # logits 2, -1, 1.5
    one, two = math.exp(2), math.exp(1.5)
    assert found == pytest.approx([1.5 * one / (one + two), 0, 1.5 * two / (one + two)], rel=1e-5)
    powers = [math.exp(v) for v in (2, -1, 1.5)]
    wanted = [p / sum(powers) for p in powers]
    assert router.probabilities(torch.tensor(TOKENS[:1]))[0].tolist() == pytest.approx(wanted)


def test_the_losses_by_hand():
    G_LTN = torch.tensor([[[0.9, 0.0], [0.6, 0.7]], [[0.0, 0.0], [0.8, 0.0]]])
    assert sparsity(G_LTN).tolist() == pytest.approx([0.9 / 4, 2.1 / 4])
    weights_TN = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])  # f = 1/3, 2/3, 0
    probabilities_TN = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.7, 0.2]])
    wanted = 3 * (1 / 3 * 0.15 + 2 / 3 * 0.6)
    assert imbalance(weights_TN, probabilities_TN).item() == pytest.approx(wanted)


def test_the_controller_by_hand():
    """Proportional and integral: lambda + gain (sum of what is too many) + 10 gain (the last)."""
    objective = SparseObjective([], configured(DSMoEConfig, sparsity=2.0, gain=0.1), target=0.5)
    assert objective.after_step({"active_blocks": 0.9}) == {"lambda": 2.0}
    assert objective.state == pytest.approx({"lambda": 2 + 0.04 + 0.4, "sum": 0.04})
    assert objective.after_step({"active_blocks": 0.4}) == {"lambda": pytest.approx(2.44)}
    assert objective.state == pytest.approx({"lambda": 2 + 0.03 - 0.1, "sum": 0.03})
    free = SparseObjective([], configured(DSMoEConfig, sparsity=2.0), target=None)
    free.after_step({"active_blocks": 0.9})
    assert free.state["lambda"] == 2.0
