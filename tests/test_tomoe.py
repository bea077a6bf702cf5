"""ToMoE: what its modules mean, that training and conversion agree, and the laws of its parts."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from builders import configured, converted, drawn_ids, losses_of, saved, tiny_model
from shrunken import small_model
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import MoesaicError, Plan, Tokens, ToMoEConfig
from moesaic.arch.lookup import dense_arch
from moesaic.carving.overlapping_layer import OverlappingFFN, OverlappingLayer
from moesaic.carving.tomoe import method
from moesaic.carving.tomoe.masks import MEDIAN
from moesaic.carving.tomoe.student import MaskingHooks, Student, layer_shapes
from moesaic.metrics.score import model_size
from moesaic.surgery import apply_plan, base_shape
from moesaic.train.loop import last_checkpoint

SHORT: dict[str, Any] = {
    "steps": 6, "batch": 2, "lr": 0.03, "experts": 3, "active": 0.7, "head_bias": 3.0
}  # fmt: skip


def ids(rows=6, length=24):
    return drawn_ids(rows, length, seed=3)


def student_of(model, **options):
    """Untrained, its logits spread so that about half of every mask is off."""
    config = configured(ToMoEConfig, **{**SHORT, **options})
    student = Student(model, dense_arch(model.config), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in student.masking.named_parameters():
            if "proj_d.linear" in name:
                parameter.normal_(0, 0.6)
            if "proj_d.norm.bias" in name:
                parameter.normal_(0, 0.5)
            if "router" in name or "proj_e" in name:
                parameter.normal_(0, 1.0)
        bias = -student.masking.config.bias
        for name in ("bias", "head_bias"):
            object.__setattr__(student.masking.config, name, bias / 10)
    return student.eval()


def carved(model, **options):
    """What carving makes of a model in a few steps."""
    config = configured(ToMoEConfig, **{**SHORT, **options})
    return moesaic.carve(model, config, calibration=ids())


def decided(student, tokens, threshold=0.0):
    """What becomes of a student: the base with its layers converted, and these."""
    arch, base = dense_arch(student.base.config), copy.deepcopy(student.base)
    logits = student.head_logits(tokens)
    with torch.no_grad():
        student.masking.begin(torch.ones(1, 1, dtype=torch.bool), noise=False)
        learned = method.learned_logits(student.masking, logits)
        layers, _ = method.decide(student.masking, learned, arch.attention, threshold)
    for module in base.modules():  # a copy of the student's base has its hooks; take them off
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return converted(base, dict(layers)), layers


# --- the student ---------------------------------------------------------------------------------


def test_at_first_every_expert_is_the_whole_ffn(model_type):
    model = tiny_model(model_type)
    dense = model(ids()).logits
    student = Student(model, dense_arch(model.config), configured(ToMoEConfig, experts=3)).eval()
    torch.testing.assert_close(student.logits(ids()), dense, rtol=0, atol=1e-5)
    student.train()
    loss = student(ids(), ids())
    assert loss["terms"]["distillation"] < 0.05
    assert loss["terms"]["active"] == 1
    assert loss["terms"]["parameters"].item() == pytest.approx(math.log(1 / 0.6), abs=1e-2)


def test_masks_of_ones_are_the_dense_model_exactly():
    model = tiny_model("llama")
    dense = model(ids()).logits
    config = configured(ToMoEConfig, bias=100.0, head_bias=100.0)
    student = Student(model, dense_arch(model.config), config)
    student.base.eval()
    assert torch.equal(student.eval().logits(ids()), dense)


def test_only_the_modules_learn():
    student = student_of(tiny_model("llama"))
    student.base.requires_grad_(False)
    student.train()(ids(), ids())["loss"].backward()
    assert all(p.grad is None for p in student.base.parameters())
    grads = {n: p.grad for n, p in student.masking.named_parameters()}
    assert all(g is not None and g.abs().sum() > 0 for g in grads.values()), grads.keys()


def test_neurons_that_are_off_learn_from_the_teacher():
    student = student_of(tiny_model("llama"), parameters=0.0, union=0.0, balance=0.0)
    student.base.requires_grad_(False)
    student.base.eval()
    student(ids(), ids())["loss"].backward()
    linear = student.masking.mlp[0].proj_d.linear
    logits = student.masking.expert_logits(0)
    never = (logits + student.masking.config.bias + 0.3665 < 0).all(0)
    assert never.any()
    assert (linear.weight.grad[never].abs().sum(-1) > 0).all()


# --- conversion ----------------------------------------------------------------------------------


class ByHand:
    """Masks that a plan says, made of a student's modules alone: nothing of what it installs."""

    def __init__(self, student, layers):
        self.student, self.layers = student, layers

    def ffn(self, index, x_BLD):
        masking, layer = self.student.masking, self.layers[index]
        logits_NM = masking.expert_logits(index)
        width = layer.experts_NW.shape[1]
        on_NM = torch.zeros_like(logits_NM).scatter(1, logits_NM.topk(width).indices, 1)
        return on_NM[masking.mlp_modules(index).router(x_BLD).argmax(-1)]

    def attention(self, index, x_BLD):
        masking, layer = self.student.masking, self.layers[index]
        heads = masking.shapes[index].heads
        shift = masking.config.head_bias + MEDIAN
        static = masking.static_logits(index)[heads.size :] + shift
        on = (static > 0) | (static == static.max()) if len(static) else static > 0
        qk = heads.paired(on.float())
        logits = masking.head_logits(index, x_BLD)
        k = layer.head_top_k or heads.size
        vo = torch.zeros_like(logits).scatter(-1, logits.topk(k, -1).indices, 1)
        return {
            "q": qk.repeat(heads.queries),
            "k": qk.repeat(heads.keys),
            "v": vo.repeat(1, 1, heads.keys),
            "o": vo.repeat(1, 1, heads.queries),
        }


@torch.no_grad()
def test_the_converted_model_is_its_masks(model_type):
    """T4: three experts, and dimensions that every token chooses, against masks over the base."""
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    student = student_of(model)
    result, layers = decided(student, Tokens(ids()))
    headers = [layer.header() for layer in layers.values()]
    assert all(len(h["petals"]) == 3 and h["petals"][0] < 64 for h in headers)
    assert any(h["head_top_k"] for h in headers)
    student.masking.begin(torch.ones(6, 24, dtype=torch.bool), noise=False)
    student.release()
    dense = model(ids()).logits
    masked = MaskingHooks(model, arch, ByHand(student, layers))
    expected = model(ids()).logits
    masked.remove()
    assert not torch.allclose(expected, dense, atol=0.05)
    torch.testing.assert_close(result(ids()).logits, expected, rtol=0, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "olmo2", "phi"])
def test_queries_and_keys_are_masked_after_their_norm(model_type):
    """S17: the norm's mean counted zeros. Of the first layer's input no mask has touched any."""
    changes = {"qk_layernorm": True} if model_type == "phi" else {}
    model = tiny_model(model_type, **changes)
    names = dense_arch(model.config).attention

    def normalised(of, run):
        seen = []
        first = of.model.layers[0].self_attn
        norms = [getattr(first, name) for name in (names.q_norm, names.k_norm)]
        handles = [n.register_forward_hook(lambda _, a, out: seen.append(out)) for n in norms]
        run(ids())
        for handle in handles:
            handle.remove()
        return seen

    wanted = normalised(model, model)
    student = student_of(model)
    result, layers = decided(student, Tokens(ids()))
    for found in (normalised(model, student.logits), normalised(result, result)):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for layer in layers.values():
        assert not {names.q, names.k} & layer.rows.keys()


@pytest.mark.parametrize("model_type", ["qwen3", "olmo2"])
def test_rows_that_a_norm_needs_cannot_go(model_type):
    """S17, for plans that are not ToMoE's."""
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    rows = torch.cat([torch.arange(8 * h, 8 * h + 6) for h in range(4)])
    layer = OverlappingLayer(rows={"q_proj": rows})
    with pytest.raises(MoesaicError, match="q_norm takes the mean over"):
        apply_plan(model, arch, Plan("test", base_shape(model, arch), {1: layer}))


def test_widths_are_equal_and_experts_lie_inside_the_union():
    student = student_of(tiny_model("llama"))
    _, layers = decided(student, Tokens(ids()))
    for i, layer in layers.items():
        logits = student.masking.expert_logits(i) + student.masking.config.bias + 0.36651
        widest = int((logits > 0).sum(-1).max())
        assert layer.experts_NW.shape == (3, widest)
        for expert, own in zip(layer.experts_NW, logits, strict=True):
            assert len(expert.unique()) == widest
            assert own[expert].min() >= own[~torch.isin(torch.arange(64), expert)].max()


def test_the_budget_is_met_and_counted_as_everywhere():
    model = tiny_model("llama")
    student = student_of(model)
    logits = student.head_logits(Tokens(ids()))
    student.masking.begin(torch.ones(1, 1, dtype=torch.bool), noise=False)
    layers = method.learned_logits(student.masking, logits)
    assert method.active_ratio_at(layers, -100.0) == 1
    for target in (0.4, 0.6, 0.8):
        threshold = method.threshold_for(layers, target)
        found = method.active_ratio_at(layers, threshold)
        assert found == pytest.approx(target, abs=0.01)
        result, _ = decided(student, Tokens(ids()), threshold)
        counted = model_size(result)
        assert counted.active_ratio == pytest.approx(found, abs=1e-6)
    assert counted.router_parameters > 0


def test_materialised_experts_are_the_shared_ones():
    logits = []
    for materialize in (False, True):
        student = student_of(tiny_model("llama"), materialize=materialize)
        result, _ = decided(student, Tokens(ids()))
        assert isinstance(result.model.layers[0].mlp, OverlappingFFN) != materialize
        logits.append(result(ids()).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    made = carved(tiny_model("llama"), materialize=True)
    blocks = [layer.mlp for layer in made.model.model.layers]
    weights = sum(p.weight.numel() for b in blocks for p in (b.gate_proj, b.up_proj, b.down_proj))
    assert made.summary["training"]["copied_parameters"] == weights - 4 * 3 * 32 * 64


def test_copies_beside_whole_attention_are_a_mixtral(tmp_path):
    result = carved(tiny_model("mistral"), attention="none", materialize=True)
    result.save(tmp_path / "carved")
    made = moesaic.export(str(tmp_path / "carved"), tmp_path / "native")
    assert made["model_type"] == "mixtral"
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native").eval()
    torch.testing.assert_close(native(ids()).logits, result.model(ids()).logits, atol=1e-5, rtol=0)
    experts = torch.arange(24).repeat(4, 1) + torch.arange(4)[:, None]
    layers = {i: OverlappingLayer(experts.clone(), torch.randn(4, 32)) for i in range(4)}
    saved(tmp_path / "shared", tiny_model("mistral"), layers)
    with pytest.raises(MoesaicError, match="materialize"):
        moesaic.export(str(tmp_path / "shared"), tmp_path / "never")


# --- training ------------------------------------------------------------------------------------


def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path):
    for step in (8, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert last_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint-8" / "trainer_state.json").touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")


def test_a_bfloat16_model_stays_one(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    result = carved(model, recompute=True)
    assert result.model.dtype == torch.bfloat16
    routers = [p for n, p in result.model.named_parameters() if "router" in n]
    assert routers
    assert all(p.dtype == torch.float32 for p in routers)
    expected = result.model(ids()).logits
    assert expected.isfinite().all()
    loaded = AutoModelForCausalLM.from_pretrained(result.save(tmp_path / "out"), dtype="auto")
    assert torch.equal(loaded.eval()(ids()).logits, expected)


def test_recomputing_changes_nothing_but_memory():
    """Dropout is kept off as well, and the same masks are tossed again."""
    plain, again = (
        losses_of(carved(tiny_model("phi", resid_pdrop=0.5), recompute=recompute))
        for recompute in (False, True)
    )
    for ours, theirs in zip(again, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_curves_of_the_losses_are_kept():
    """In an order that a checkpoint, which sorts names, does not change."""
    losses = losses_of(carved(tiny_model("llama"), accumulate=2))
    assert [line["step"] for line in losses] == [1, 2, 3, 4, 5, 6]
    for line in losses:
        penalty = 16 * line["parameters"] + 2 * line["union"] + line["balance"] / 8
        assert line["loss"] == pytest.approx(line["distillation"] + penalty, rel=1e-3)
        assert [*line] == ["loss", *sorted(line.keys() - {"loss"})]


def test_other_masks():
    result = carved(tiny_model("llama"), published=True, noise=False, steps=2)
    assert result.model(ids()).logits.isfinite().all()
    assert model_size(result.model).active_ratio == pytest.approx(0.7, abs=0.02)
    headers = [layer.header() for layer in result.plan.layers.values()]
    assert any(h["rows"] or h["head_top_k"] for h in headers)


def test_the_papers_bundle_is_the_paper_in_every_switch(tmp_path):
    """Sec. 4.1, App. A.3 and C; and what it makes is saved and gives its tosses again."""
    bundle = dict(ToMoEConfig.bundles["paper"])
    config = configured(ToMoEConfig, **bundle)
    schedule = (config.steps, config.batch, config.length, config.lr, config.decay)
    assert schedule == (10_000, 1, 2048, 1e-3, "constant")
    assert (config.parameters, config.union, config.balance) == (16.0, 2.0, 1.0)
    assert (config.tau, config.bias, config.head_bias) == (0.4, 3.0, 3.0)
    assert (config.weight_decay, config.warmup, config.clip, config.accumulate) == (0.05, 0, 0, 1)
    assert (config.experts, config.attention) == (8, "routed")
    assert (config.noise, config.published, config.beyond) == (True, True, ())
    short = {"steps": 8, "batch": 2, "lr": 0.05, "length": 24, "experts": 3, "active": 0.6}
    result = carved(tiny_model("llama"), **bundle | short)
    assert result.summary["training"]["threshold"] == 0
    headers = [layer.header() for layer in result.plan.layers.values()]
    assert all(h["noise"] and h["routing"] == "gumbel" for h in headers)
    assert any(h["head_top_k"] for h in headers)
    again = AutoModelForCausalLM.from_pretrained(result.save(tmp_path / "out"))
    assert torch.equal(again(ids()).logits, result.model(ids()).logits)
    for module in result.model.modules():
        if isinstance(module, OverlappingFFN):
            module.router.routing = "cosine"
    assert not torch.equal(again(ids()).logits, result.model(ids()).logits)
    whole = {"materialized": True, "rows": {}, "head_top_k": 0}
    assert "Random routers" in (OverlappingLayer.obstacle({**headers[0], **whole}) or "")


@pytest.mark.parametrize(
    ("model_type", "attention"), [("llama", "routed"), ("qwen3", "routed"), ("phi", "none")]
)
def test_targets_out_of_reach_are_refused(model_type, attention):
    """S12: 0.1 with attention=none came out as 0.344, without a word."""
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    shapes = layer_shapes(model, arch)
    shape, head = shapes[0], shapes[0].heads
    step = 1 if shape.width * 0.01 < 4 else 8  # neurons that widths are multiples of
    one = 2 * 8
    if attention == "routed":  # of queries and keys a pair that RoPE turns, or one
        turned = head.rotary == head.size
        one = 1 + (head.size if model_type == "qwen3" else 2 if turned else 1)
    least = (shape.neuron * step + shape.dimension * one) / (shape.ffn + shape.attention)
    assert method.least_ratio(shapes, attention) == pytest.approx(least)
    config = configured(ToMoEConfig, **{**SHORT, "active": least - 0.01, "attention": attention})
    with pytest.raises(MoesaicError, match=f"out of reach.*{least:.3f}"):
        moesaic.carve(model, config, calibration=ids())
    config = dataclasses.replace(config, active=least + 0.01, steps=1)
    summary = moesaic.carve(model, config, calibration=ids()).summary["training"]
    assert summary["active"] == pytest.approx(least + 0.01, abs=0.06)


def test_falcons_with_one_key_head_keep_queries_keys_and_values_one_after_the_other():
    kinds = {"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}
    for changes in kinds:
        model = small_model("falcon", **changes)
        with pytest.raises(MoesaicError, match="this falcon has .* head by head"):
            layer_shapes(model, dense_arch(model.config))
    model = small_model("falcon", multi_query=True)
    assert layer_shapes(model, dense_arch(model.config))[0].heads.keys == 1


def test_a_comparison_out_of_reach_is_refused_before_training(monkeypatch):
    monkeypatch.setattr("moesaic.carving.tomoe.method.learn", pytest.fail)
    config = configured(ToMoEConfig, **{**SHORT, "active": 0.4})
    with pytest.raises(MoesaicError, match="0.4 is out of reach: .* 8 experts, top-1"):
        moesaic.carve(tiny_model("llama"), config, calibration=ids(), compare=("more",))
