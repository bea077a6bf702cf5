"""Laws of training: exactly what should train does, masks, resuming, several processes."""

import copy
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import equal, examples, losses_of, stored, tiny_model, tiny_moe
from shrunken import small_model

import moesaic
from moesaic import CondenseConfig, MoesaicError, MoREConfig, Plan, SkipConfig, TuneConfig
from moesaic.arch.lookup import base_arch, moe_arch
from moesaic.io.source import resolve
from moesaic.modules.running import always_routing
from moesaic.plans.cut import CutLayer
from moesaic.recipe import Recipe
from moesaic.sizes import on_headers
from moesaic.train.learning import Schedule, collate, distillation_loss
from moesaic.train.loop import _arguments, _learning
from moesaic.train.text import training_text
from moesaic.train.tune.method import factors, outside

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # peft's, not ours
)


def condensed_model(model_type, tokens, keep="shared+routed"):
    return moesaic.condense(
        tiny_moe(model_type), CondenseConfig(count=1, keep=keep), calibration=tokens
    )


def changed(before, after):
    old, new = before.state_dict(), after.state_dict()
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


@pytest.mark.parametrize("model_type", ["qwen2_moe", "deepseek_v2", "granitemoeshared", "mixtral"])
def test_only_the_condensed_layers_projections_train(model_type, tokens):
    result = condensed_model(model_type, tokens)
    arch = moe_arch(result.model.config)
    (i,) = result.summary["layers"]
    projections = {
        f"{arch.ffn_prefix(i)}{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")
    }
    before = copy.deepcopy(result.model)
    config = TuneConfig(steps=3, batch=4, lr=1e-2)
    tuned = moesaic.tune(result.model, config, text=examples(), plan=result.plan)
    assert changed(before, tuned.model) == projections
    width = result.plan.layers[i].width
    assert tuned.summary["training"]["trained_parameters"] == 3 * 32 * width
    assert tuned.summary["training"]["total_parameters"] == sum(
        p.numel() for p in before.parameters()
    )


def test_a_step_is_that_of_the_experts_without_their_weights(tokens):
    """AdamW on the folded layer, g outside, moves what runs as AdamW on Eq. 3's own parts does."""
    given = moesaic.condense(
        tiny_moe("qwen2_moe"),
        CondenseConfig(
            count=1, keep="shared+routed", shared_gate="mean", candidates=(2,), refit=False
        ),
        calibration=tokens,
    )
    layer, arch = given.plan.layers[2], moe_arch(given.model.config)
    view = arch.mixture(tiny_moe("qwen2_moe").model.layers[2])
    x, target = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(4))
    shared = view.shared_module
    parts = [[w.weight for w in (shared.gate_proj, shared.up_proj, shared.down_proj)]]
    parts += [list(view.weights_of(e)) for e in layer.experts]
    parts = [[w.detach().clone().requires_grad_() for w in part] for part in parts]
    g = [layer.shared_scale, *layer.gates_K.tolist()]
    F = torch.nn.functional

    def unfolded():
        return sum(
            s * F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
            for s, (gate, up, down) in zip(g, parts, strict=True)
        )

    ffn = given.model.model.layers[2].mlp
    own = [ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight]
    before = ffn(x).detach()
    torch.testing.assert_close(before, unfolded().detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ffn(x), before)
    factor = factors(arch, given.model.config, given.plan)
    assert [round(float(f), 5) for f in factor[2].unique_consecutive()[:3]] == [
        round(s, 5) for s in g
    ]
    with outside(given.model, arch, factor):
        torch.testing.assert_close(ffn(x), before, rtol=1e-4, atol=1e-5)
        optimizers = [
            torch.optim.AdamW(ws, lr=0.01, weight_decay=0.1)
            for ws in (own, [w for part in parts for w in part])
        ]
        for _ in range(3):
            for run, optimizer in zip((lambda: ffn(x), unfolded), optimizers, strict=True):
                optimizer.zero_grad()
                (run() - target).square().sum().backward()
                optimizer.step()
        torch.testing.assert_close(ffn(x), unfolded(), rtol=1e-3, atol=1e-4)
    assert not ffn.down_proj._forward_pre_hooks
    torch.testing.assert_close(ffn(x), unfolded(), rtol=1e-3, atol=1e-4)
    assert (ffn(x) - before).abs().max() > 0.01
    folded = torch.cat([s * part[2] for s, part in zip(g, parts, strict=True)], 1)
    torch.testing.assert_close(own[2][:, : folded.shape[1]], folded, rtol=1e-3, atol=1e-4)


def test_what_was_condensed_before_another_step_trains(tokens, tmp_path):
    """With its weights outside, which are after the shared path's, while those are as many."""
    condensed = condensed_model("deepseek_v2", tokens)
    (i,) = condensed.summary["layers"]
    g = factors(moe_arch(condensed.model.config), condensed.model.config, condensed.plan)
    condensed.save(tmp_path / "condensed")
    skip = SkipConfig(betas=(0.5,))
    skips = moesaic.skip(str(tmp_path / "condensed"), skip, calibration=tokens)
    skips.save(tmp_path / "skips")
    plan = Plan.load(tmp_path / "skips")
    assert i not in plan.layers
    tuned = moesaic.tune(str(tmp_path / "skips"), TuneConfig(steps=1), text=examples())
    assert tuned.summary["training"]["layers"] == [i]
    arch, config = base_arch(tuned.model.config), tuned.model.config
    assert torch.equal(factors(arch, config, plan)[i], g[i])
    one = torch.arange(1)
    slim = CutLayer(one, one[None], 2, shared_S=one)
    later = replace(plan, layers={2: slim}, earlier=(*plan.earlier, replace(plan, earlier=())))
    assert factors(arch, config, later) == {}


def test_layer_drop_trains_its_attention_alone(tokens):
    result = condensed_model("mixtral", tokens, keep="attention")
    (i,) = result.summary["layers"]
    before = copy.deepcopy(result.model)
    config = TuneConfig(what="attention", steps=2, batch=8, lr=1e-2)
    tuned = moesaic.tune(result.model, config, text=examples(), plan=result.plan)
    names = {f"model.layers.{i}.self_attn.{p}_proj.weight" for p in "qkvo"}
    assert changed(before, tuned.model) == names
    dropped = condensed_model("mixtral", tokens, keep="nothing")
    with pytest.raises(MoesaicError, match="no condensed layers with attention"):
        moesaic.tune(dropped.model, config, text=examples(), plan=dropped.plan)


def test_zeros_that_fill_a_width_up_stay_zeros(tokens):
    model = tiny_moe("deepseek_v2", intermediate_size=64)
    result = moesaic.condense(model, CondenseConfig(count=1, candidates=(1,)), calibration=tokens)
    assert result.plan.layers[1].width == 64
    tuned = moesaic.tune(
        result.model, TuneConfig(steps=3, lr=1e-2), text=examples(), plan=result.plan
    ).model
    ffn = tuned.model.layers[1].mlp
    assert not ffn.gate_proj.weight[16:].any()
    assert not ffn.down_proj.weight[:, 16:].any()
    assert ffn.down_proj.weight[:, :16].any()


def test_routers_learn_from_the_original():
    original = tiny_moe("deepseek_v3")
    student = copy.deepcopy(original)
    gates = {f"model.layers.{i}.mlp.gate.weight" for i in (1, 2)}
    with torch.no_grad():
        for name in gates:
            weight = student.get_parameter(name)
            weight.mul_(0.2)
    before = copy.deepcopy(student)
    options = {"what": "routers", "steps": 12, "batch": 16, "lr": 2e-2}
    tuned = moesaic.tune(student, text=examples(), teacher=original, **options)
    assert tuned.method.config.teacher == "a loaded model"
    assert changed(before, tuned.model) == gates
    losses = [step["loss"] for step in losses_of(tuned)]
    assert losses[-1] < losses[0]
    ids = torch.tensor([row["input_ids"] for row in examples()])
    with torch.no_grad():
        student, teacher = before(ids).logits, original(ids).logits
        count = ids[:, 1:].numel()
        assert losses[0] == pytest.approx(
            (distillation_loss(student, teacher, ids) / count).item(), rel=1e-4
        )


def test_a_teacher_may_be_a_folder(tmp_path):
    """It is loaded, and teaches as the loaded model does."""
    original = tiny_moe("deepseek_v3")
    original.save_pretrained(tmp_path)
    student = tiny_moe("deepseek_v3", seed=1)
    options = {"what": "routers", "steps": 2, "lr": 2e-2, "text": examples()}
    told, tuned = (
        moesaic.tune(student, teacher=teacher, **options) for teacher in (str(tmp_path), original)
    )
    assert told.method.config.teacher == str(tmp_path)
    assert equal(told.model.state_dict(), tuned.model.state_dict())


@pytest.mark.parametrize(("router", "top_k"), [("cosine", 1), ("ridge", 3)])
def test_a_carved_models_routers_learn(router, top_k, tokens):
    """Only they change, towards the original, and what trains is what runs at decoding."""
    original = tiny_model("llama")
    config = MoREConfig(experts=8, top_k=top_k, layers="all", router=router, refit=True)
    student = moesaic.carve(original, config, calibration=tokens).model
    before = copy.deepcopy(student)
    options = TuneConfig(what="routers", teacher="given", steps=25, batch=16, lr=3e-3)
    tuned = moesaic.tune(student, options, text=examples(), teacher=original)
    assert changed(before, tuned.model) == {f"model.layers.{i}.mlp.router.weight" for i in range(4)}
    ids = torch.tensor([row["input_ids"] for row in examples()])
    lost = []
    with torch.no_grad():
        target = original(ids).logits
        for model in (before, tuned.model):
            with always_routing(model):
                lost.append(distillation_loss(model(ids).logits, target, ids).item())
    count = ids[:, 1:].numel()
    assert losses_of(tuned)[0]["loss"] == pytest.approx(lost[0] / count, rel=1e-4)
    assert lost[1] < lost[0]


@pytest.mark.parametrize("what", ["lora", "all"])
def test_lora_is_merged_and_all_is_all(what, tokens):
    result = condensed_model("qwen2_moe", tokens)
    before = copy.deepcopy(result.model)
    tuned = moesaic.tune(result.model, TuneConfig(what=what, steps=2, lr=1e-2), text=examples())
    names = changed(before, tuned.model)
    assert any(".q_proj." in name for name in names)
    assert any(".embed_tokens." in name for name in names) == (what == "all")


def test_low_rank_updates_leave_out_what_fused_kernels_read():
    """peft refused Falcon-H1."""
    model = small_model("falcon_h1")
    config = TuneConfig(what="lora", steps=1, lr=1e-2)
    names = changed(model, moesaic.tune(model, config, text=examples()).model)
    assert any(".q_proj." in name for name in names)
    assert not any(".out_proj." in name for name in names)


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_low_rank_updates_are_counted_beforehand_as_they_are_trained(model):
    """Of a mixture most are of its fused experts."""
    config = TuneConfig(what="lora", steps=1, rank=2)
    with on_headers(Recipe(model, "out", (config,))) as (step,):
        counted = step.outline.trained
    tuned = moesaic.tune(model, config, text=examples())
    assert counted == tuned.decision.summary["training"]["trained_parameters"]


def test_low_rank_updates_start_at_the_seed_alone():
    """Not at whatever drew random numbers before them."""
    model, weights = tiny_model("llama"), []
    for before, seed in ((0, 0), (1, 0), (0, 1)):
        torch.manual_seed(before)
        state = torch.random.get_rng_state()
        config = TuneConfig(what="lora", steps=2, lr=1e-2, seed=seed)
        tuned = moesaic.tune(model, config, text=examples())
        assert torch.equal(torch.random.get_rng_state(), state)
        weights.append(tuned.model.model.layers[0].self_attn.q_proj.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_dense_model_trains_by_lora_but_has_no_routers():
    model = tiny_model("llama")
    assert losses_of(moesaic.tune(model, TuneConfig(what="all", steps=1), text=examples()))
    with pytest.raises(MoesaicError, match="no routers that learn"):
        moesaic.tune(
            model, TuneConfig(what="routers", teacher="given"), text=examples(), teacher=model
        )


def test_bfloat16_trains_in_float32_and_stays_bfloat16(tokens):
    result = condensed_model("deepseek_v2", tokens)
    model = result.model.to(torch.bfloat16)
    before = copy.deepcopy(model)
    tuned = moesaic.tune(model, TuneConfig(steps=3, lr=1e-2), text=examples(), plan=result.plan)
    assert all(p.dtype == torch.bfloat16 for p in tuned.model.parameters())
    assert changed(before, tuned.model)


def test_a_trained_model_computes_as_it_was_saved(tmp_path):
    """In its own types, routers in float32, and not under the Trainer's autocast."""
    base = stored(tiny_moe("deepseek_v3").to(torch.bfloat16), tmp_path / "base")
    ids = torch.tensor([examples()[0]["input_ids"]])
    tuned = moesaic.tune(base, TuneConfig(what="all", steps=1), text=examples())
    saved = resolve(str(tuned.save_pretrained(tmp_path / "out"))).load()
    assert torch.equal(tuned.model(ids).logits, saved(ids).logits)


def test_parameters_get_their_type_back_however_it_ends():
    model = tiny_moe("mixtral").to(torch.bfloat16)
    with suppress(KeyboardInterrupt), _learning(model, dict(model.named_parameters()), "cpu"):
        raise KeyboardInterrupt
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_processor_with_a_number_is_one(tmp_path):
    assert _arguments(Schedule.of(TuneConfig(steps=1)), tmp_path, "cpu:0", half=False).use_cpu


# --- what is predicted ---------------------------------------------------------------------------


def test_padding_is_not_predicted(tokenizer):
    """Nor are prompts: test_text.py. Of plain text every token is."""
    data = [{"question": "Why?", "answer": "Because of it."}, {"text": "plain text " * 200}]
    examples = training_text(data, tokenizer, 512, answers=True)
    assert examples[1]["labels"] == examples[1]["input_ids"]
    assert len(examples[1]["labels"]) == 512
    batch = collate(examples)
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_loss_is_the_mean_over_answers_alone(tokens):
    """Of two texts of different length, as one batch and as two accumulated."""
    result = condensed_model("deepseek_v2", tokens)
    short, long = examples(2, 20)
    short = {"input_ids": short["input_ids"][:9], "labels": [-100] * 5 + short["input_ids"][5:9]}
    total, count = 0.0, 0
    with torch.no_grad():
        for example in (short, long):
            ids, labels = (torch.tensor([example[k]]) for k in ("input_ids", "labels"))
            logits = result.model(ids).logits[0, :-1]
            kept = labels[0, 1:] != -100
            loss = torch.nn.functional.cross_entropy(
                logits[kept], labels[0, 1:][kept], reduction="sum"
            )
            total, count = total + loss.item(), count + int(kept.sum())
    for batch, accumulate in ((2, 1), (1, 2)):
        config = TuneConfig(steps=1, batch=batch, accumulate=accumulate)
        model = copy.deepcopy(result.model)
        (step,) = losses_of(moesaic.tune(model, config, text=[short, long], plan=result.plan))
        assert step["loss"] == pytest.approx(total / count, rel=1e-4)


# --- the stated loss, and what it is trained with ------------------------------------------------


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")
@pytest.mark.parametrize(("model_type", "what"), [("mixtral", "all"), ("qwen2_moe", "lora")])
def test_a_mixture_that_asks_for_router_logits_learns_the_next_token_alone(model_type, what):
    """However its batches are divided; transformers would add what balances its experts."""
    model = tiny_moe(model_type, output_router_logits=True, router_aux_loss_coef=0.5)
    texts = examples(8)
    ids = torch.tensor([row["input_ids"] for row in texts])
    with torch.no_grad():
        logits = model(ids, output_router_logits=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    for batch, accumulate in ((8, 1), (4, 2), (2, 4)):
        config = TuneConfig(what=what, steps=1, batch=batch, accumulate=accumulate, warmup=0.0)
        tuned = moesaic.tune(copy.deepcopy(model), config, text=texts)
        (step,) = losses_of(tuned)
        assert step["loss"] == pytest.approx(loss, rel=1e-5)
        assert changed(model, tuned.model)


def test_an_only_step_has_the_whole_rate():
    """The rate of a first step of several rises from 0."""
    for steps, warmup in ((1, 0), (2, 0.1)):
        schedule = Schedule.of(TuneConfig(steps=steps))
        assert _arguments(schedule, Path("unused"), "cpu", False).warmup_steps == warmup
    with pytest.raises(MoesaicError, match="epochs 0 must be above 0"):
        TuneConfig(epochs=0)


def test_gradients_are_clipped_at_what_is_said():
    for clip in (1.0, 0.0, 0.25):
        schedule = Schedule.of(TuneConfig(clip=clip))
        assert _arguments(schedule, Path("unused"), "cpu", False).max_grad_norm == clip
    assert TuneConfig().clip == 1.0


@pytest.mark.parametrize("verb", ["tune", "tomoe", "slim"])
def test_windows_beyond_the_positions_are_refused_by_the_dry_run_too(
    verb, llama_folder, tmp_path, refused
):
    lines = {
        "tune": ["tune", "-o", "what=all", "-o", "steps=1", "-o", "length=300"],
        "tomoe": ["carve", "--method", "tomoe", "--recipe", "paper", "--active", "0.8"],
        "slim": ["slim", "--keep", "0.5", "--length", "300"],
    }
    first, *options = lines[verb]
    for how in (["--dry-run"], []):
        said = "is beyond the model's 256 positions"
        refused(said, first, llama_folder, tmp_path / "out", *options, *how)
    assert not (tmp_path / "out").exists()


def test_unasked_windows_are_no_longer_than_the_positions(tokenizer):
    model = tiny_model("llama")
    tuned = moesaic.tune(
        model, TuneConfig(what="all", steps=1, batch=1), text="prose", tokenizer=tokenizer
    )
    assert tuned.method.config.length == model.config.max_position_embeddings == 256
    long = [{"input_ids": [1] * 300, "labels": [1] * 300}]
    with pytest.raises(MoesaicError, match="length 300 is beyond"):
        moesaic.tune(model, TuneConfig(what="all", steps=1), text=long)
