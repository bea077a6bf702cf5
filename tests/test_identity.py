"""What was made from other weights, text or options is refused; nothing that loads is random."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    altered,
    any_model,
    carved_model,
    edited,
    equal,
    examples,
    loaded,
    logits,
    tiny_model,
    tiny_moe,
    weights,
    with_others,
)
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import (
    Calibration,
    CondenseConfig,
    DSMoEConfig,
    MoesaicError,
    MoREConfig,
    Plan,
    PruneConfig,
    Recipe,
    SkipConfig,
    Tokens,
    ToMoEConfig,
    TuneConfig,
    hub,
)
from moesaic.io import checkpoint
from moesaic.io.checkpoint import Checkpoint
from moesaic.io.source import resolve
from moesaic.pipeline import run_recipe
from moesaic.train import text as training

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # peft's, not ours
)
ONE_TEXT: dict[str, Any] = {"steps": 4, "lr": 1e-2, "save_every": 2}
A_RUN: dict[str, Any] = {**ONE_TEXT, "batch": 2}


def text(tokens, folder):
    save_file({"input_ids": tokens.input_ids}, folder / "text.safetensors")
    return str(folder / "text.safetensors")


# --- fingerprints --------------------------------------------------------------------------------


def test_a_fingerprint_is_of_names_shapes_types_and_values(tmp_path):
    """Division into files does not matter; everything else does."""
    model = tiny_moe("mixtral")
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    own = Checkpoint(tmp_path / "a").fingerprint
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert Checkpoint(tmp_path / "shards").fingerprint == own

    def swapped(t):
        name = "model.layers.0.self_attn.{}_proj.weight".format
        t[name("k")], t[name("v")] = t[name("v")], t[name("k")]

    norm = "model.norm.weight"
    for name, change in {
        "renamed": lambda t: t.update({"model.norm.wait": t.pop(norm)}),
        "reshaped": altered("lm_head.weight", lambda t: t.T.contiguous()),
        "retyped": altered(norm, lambda t: t.view(torch.int32)),
        "nudged": lambda t: t[norm][3].add_(1e-3),
        "swapped": swapped,
    }.items():
        folder = with_others(tmp_path / "a", tmp_path / name, change)
        assert Checkpoint(folder).fingerprint != own, name


def test_a_live_models_fingerprint_changes_with_its_weights():
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    assert checkpoint.model_fingerprint(model) == checkpoint.model_fingerprint(tiny_model("llama"))
    assert checkpoint.model_fingerprint(model) != checkpoint.model_fingerprint(other)
    wider = tiny_model("llama").double()
    assert checkpoint.model_fingerprint(model) != checkpoint.model_fingerprint(wider)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 300_000, 12_345_678])
@pytest.mark.parametrize("tensors", [1, 700, 44_000])
def test_pieces_reach_from_end_to_end(nbytes, tensors):
    """Few of a checkpoint of many tensors, at most 64 of any; small tensors whole."""
    found = checkpoint.pieces(nbytes, tensors)
    assert found[0][0] == 0
    assert found[-1][1] == nbytes
    assert all(a <= b for a, b in found)
    assert all(start % 64 == 0 for start, _ in found)
    read = sum(b - a for a, b in found)
    assert read <= 64 * (checkpoint.SAMPLE + 64)
    assert read == nbytes or len(found) == max(4, min(64, 16_384 // tensors))


def test_only_a_sample_of_a_large_tensor_is_read(tmp_path):
    """A change between the pieces is not seen: that is what makes it cheap. One inside is."""
    big = {"x": torch.zeros(4_000_000, dtype=torch.uint8)}
    save_file(big, tmp_path / "a.safetensors")
    own = checkpoint.stored_fingerprint(checkpoint.stored_in(tmp_path / "a.safetensors"))
    live = checkpoint.tensors_fingerprint(big)
    (_, gap), (inside, _) = checkpoint.pieces(4_000_000, 1)[:2]
    for at, seen in ((gap + 1, False), (inside + 1, True)):
        other = {"x": big["x"].clone()}
        other["x"][at] = 1
        save_file(other, tmp_path / "b.safetensors")
        stored = checkpoint.stored_in(tmp_path / "b.safetensors")
        assert (checkpoint.stored_fingerprint(stored) != own) is seen
        assert (checkpoint.tensors_fingerprint(other) != live) is seen


# --- progress, statistics, plans ------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    """Two mixtures of one shape and other weights."""
    for name, seed in (("a", 0), ("b", 1)):
        tiny_moe("qwen2_moe", seed=seed).save_pretrained(tmp_path / name)
    return str(tmp_path / "a"), str(tmp_path / "b")


RUNS: dict[str, tuple[Any, str, Any, Any]] = {
    "prune": (moesaic.prune, "qwen2_moe", PruneConfig(keep=5), {"keep": 6}),
    "skip": (moesaic.skip, "qwen2_moe", SkipConfig(), {"quantile": 0.4}),
    "condense": (moesaic.condense, "qwen2_moe", CondenseConfig(count=1), {"seed": 3}),
    "dsmoe": (moesaic.carve, "llama", DSMoEConfig(experts=4, **A_RUN), {"lr": 2e-2}),
    "tomoe": (
        moesaic.carve,
        "llama",
        ToMoEConfig(active=0.8, experts=3, tau=0.4, **ONE_TEXT),
        {"tau": 0.3},
    ),
}
"""Of each verb that keeps layers or steps: a model, what is asked, and something else."""


@pytest.mark.parametrize(
    ("run", "live"),
    [("prune", False), ("prune", True), ("skip", False), ("condense", True), ("dsmoe", True),
     ("tomoe", True)],
)  # fmt: skip
def test_what_is_kept_of_a_run_is_of_its_weights_and_request(run, live, tokens, tmp_path):
    """B resumed in A's folder mixed both models' layers; DSMoE's resume looked at no option."""
    call, model_type, config, other = RUNS[run]
    models = [any_model(model_type, seed=seed) for seed in (0, 1)]
    if not live:
        names = [tmp_path / "a", tmp_path / "b"]
        for model, name in zip(models, names, strict=True):
            model.save_pretrained(name)
        models = [*map(str, names)]
    options = {"calibration": tokens, "resume_from": tmp_path / "kept"}
    call(models[0], config, **options)
    with pytest.raises(MoesaicError, match=f"another request.*{next(iter(other))}"):
        call(models[0], replace(config, **other), **options)
    with pytest.raises(MoesaicError, match="another request") as refused:
        call(models[1], config, **options)
    assert all(words in str(refused.value) for words in (["weights"] if live else models))


def test_what_was_asked_otherwise_is_named_and_no_fingerprint_is_shown(pair, tokens, tmp_path):
    """Two texts differ by fingerprints, which show nobody that it was the number of samples."""
    options = {"calibration": tokens, "resume_from": tmp_path / "kept"}
    few, other = Tokens(tokens.input_ids[:3]), Tokens(tokens.input_ids.flip(0))
    moesaic.prune(pair[0], PruneConfig(keep=5), **options)
    for changes, said in (
        ({"calibration": few}, r"windows was \d+, is 3"),
        ({"calibration": other}, "the text is another"),
        ({"dtype": torch.bfloat16}, "dtype was 'torch.float32', is 'torch.bfloat16'"),
    ):
        with pytest.raises(MoesaicError, match=said) as refused:
            moesaic.prune(pair[0], PruneConfig(keep=5), **{**options, **changes})
        assert not re.search(r"\b[0-9a-f]{16}\b", str(refused.value))
    moesaic.prune(pair[0], PruneConfig(keep=5), dtype=torch.float32, **options)


def test_statistics_of_other_weights_are_refused(pair, tokens, tmp_path):
    """The shape alone was looked at."""
    a = moesaic.observe(pair[0], tmp_path / "a.st", calibration=tokens)
    for call, config in ((moesaic.prune, PruneConfig(keep=5)), (moesaic.skip, SkipConfig())):
        with pytest.raises(MoesaicError, match="another model") as refused:
            call(pair[1], config, stats=str(a))
        assert pair[0] in str(refused.value)
        call(pair[0], config, stats=str(a))
    blind = PruneConfig(keep=5, score="random")  # which needs nothing of it
    with pytest.raises(MoesaicError, match="another model"):
        moesaic.prune(pair[1], blind, stats=str(a))
    plan = moesaic.prune(pair[0], blind, stats=str(a)).plan
    assert not plan.calibration


def test_observation_of_other_weights_is_not_resumed(pair, tokens, tmp_path, monkeypatch):
    """Of ``observe --resume``."""

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moesaic.observation.files.join", stop)
        with pytest.raises(KeyboardInterrupt):
            moesaic.observe(pair[0], tmp_path / "x.st", calibration=tokens)
    with pytest.raises(MoesaicError, match="another request"):
        moesaic.observe(pair[1], tmp_path / "x.st", calibration=tokens, resume=True)
    with pytest.raises(MoesaicError, match="gram was 256, is 1"):
        moesaic.observe(pair[0], tmp_path / "x.st", calibration=tokens, resume=True, gram_mb=1)
    moesaic.observe(pair[0], tmp_path / "x.st", calibration=tokens, resume=True)


@pytest.mark.parametrize(("live", "dtype"), [(False, None), (True, None), (True, torch.bfloat16)])
def test_a_plan_for_other_weights_is_not_applied(live, dtype, pair, tokens, tmp_path):
    """A foreign plan of the right shape was applied. One made from memory still is."""
    model = pair[0]
    if live:
        model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=dtype or "auto")
    plan = moesaic.prune(model, PruneConfig(keep=5), calibration=tokens).plan
    (tmp_path / "plan").mkdir()
    plan.save(tmp_path / "plan")
    with pytest.raises(MoesaicError, match="has other weights") as refused:
        moesaic.apply(pair[1], tmp_path / "plan", tmp_path / "out")
    assert pair[0] in str(refused.value)
    assert pair[1] in str(refused.value)
    assert not (tmp_path / "out").exists()
    moesaic.apply(pair[0], tmp_path / "plan", tmp_path / "out")
    assert Plan.load(tmp_path / "out").base.weights == plan.base.weights
    edited(tmp_path / "plan" / "plan.json", format=2)
    with pytest.raises(MoesaicError, match="Make the plan again"):
        Plan.load(tmp_path / "plan")


def test_a_step_that_was_saved_is_used_only_if_it_is_the_same(pair, tokens, tmp_path, monkeypatch):
    """A saved step of a recipe was reused whatever it was."""
    steps, calibration = (PruneConfig(keep=5), SkipConfig()), Calibration(text(tokens, tmp_path))
    recipe = Recipe(pair[0], str(tmp_path / "out"), steps, calibration, evaluation=None)

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moesaic.pipeline.describe", stop)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe)
    step = tmp_path / "out.partial" / "step-0"
    own = weights(step)
    foreign = moesaic.prune(pair[1], PruneConfig(keep=5), calibration=tokens)
    foreign.save(step, overwrite=True)
    run_recipe(recipe, resume=True)
    assert equal(weights(tmp_path / "out"), own)


# --- training -------------------------------------------------------------------------------------


def tuned(folder, **changes):
    """A short training in a folder, some things changed."""
    given = {"seed": 0, "text": examples(8, 16), "config": {}, "teacher": None, **changes}
    model = tiny_model("llama", seed=given["seed"])
    config = TuneConfig(**{"what": "all", **A_RUN, **given["config"]})
    options = {"text": given["text"], "teacher": given["teacher"], "resume_from": folder}
    return moesaic.tune(model, config, **options)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, "the weights of a model in memory have changed"),
        ({"config": {"lr": 2e-2}}, "lr was 0.01, is 0.02"),
        ({"config": {"what": "lora"}}, "what was 'all', is 'lora'"),
        ({"text": examples(8, 16, seed=4)}, "the training text is another"),
        ({"teacher": 2}, "the teacher is another"),
    ],
    ids=["weights", "rate", "what", "text", "teacher"],
)
def test_training_continues_only_as_it_began(changes, said, tmp_path):
    """Model B with another rate became bitwise A's trained weights."""
    whole = tuned(tmp_path).model.state_dict()
    if "teacher" in changes:
        changes = {"teacher": tiny_model("llama", seed=changes["teacher"])}
    with pytest.raises(MoesaicError, match="another request") as refused:
        tuned(tmp_path, **changes)
    assert said in str(refused.value)
    assert equal(dict(tuned(tmp_path).model.state_dict()), dict(whole))


def test_a_stream_of_training_texts_is_known_by_its_first_ones():
    def texts(count):
        return ({"input_ids": [n]} for n in range(count))

    known = training.examples_fingerprint(texts(training.EXAMPLES))
    longer = training.EXAMPLES + 1
    assert training.examples_fingerprint(texts(longer)) == known
    assert training.examples_fingerprint([*texts(longer)]) != known
    assert training.examples_fingerprint(texts(training.EXAMPLES - 1)) != known


def test_a_training_that_is_whole_takes_no_step_more(tmp_path):
    """From a checkpoint of the last step the Trainer does one more."""
    config = {"steps": 3, "save_every": 1, "batch": 1, "accumulate": 1}
    whole = tuned(tmp_path, config=config)
    again = tuned(tmp_path, config=config)
    assert len(again.summary["training"]["losses"]) == 3
    assert again.summary["training"]["losses"] == whole.summary["training"]["losses"]
    assert equal(dict(again.model.state_dict()), dict(whole.model.state_dict()))


# --- nothing random -------------------------------------------------------------------------------


UP = "model.layers.1.mlp.up_proj.weight"
DROP, ADD = altered(UP), altered("model.layers.1.mlp.left_proj.weight", lambda _: torch.zeros(3))
CUT = altered(UP, lambda up: up[:-1].clone())


@pytest.mark.parametrize("change", [DROP, ADD, CUT], ids=["drop", "add", "cut"])
def test_a_result_that_is_not_whole_does_not_load(change, tmp_path):
    """Missing weights came out random, with a warning that was switched off."""
    hub.save_live(carved_model(), None, tmp_path / "whole")
    folder = with_others(tmp_path / "whole", tmp_path / "damaged", change)
    said = "missing|left over|another shape"
    with pytest.raises(MoesaicError, match=said):
        resolve(str(folder)).load()
    with pytest.raises((MoesaicError, RuntimeError), match=f"{said}|mismatched"):
        AutoModelForCausalLM.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(model.lm_head.weight, loaded(tmp_path / "whole").lm_head.weight)


def test_any_model_with_a_weight_missing_is_refused(refused, tokenizer, tmp_path):
    """In one message; weights left over are said of somebody's checkpoint, of a result refused."""
    hub.save_live(tiny_model("llama"), tokenizer, tmp_path / "whole")
    less = with_others(tmp_path / "whole", tmp_path / "less", DROP)
    said = refused("missing: model.layers.1.mlp.up_proj.weight", "eval", less)
    assert "LOAD REPORT" not in said
    more = with_others(tmp_path / "whole", tmp_path / "more", ADD)
    resolve(str(more)).load()
    (more / "plan.json").write_text("{}")
    with pytest.raises(MoesaicError, match="left over"):
        resolve(str(more)).load()


def test_scores_compare_in_one_type(tokens, tmp_path):
    """A float32 result was measured beside a bfloat16 original."""
    tiny_model("llama").bfloat16().save_pretrained(tmp_path / "base")
    config = MoREConfig(active=0.9, layers=(1,))
    result = moesaic.carve(str(tmp_path / "base"), config, calibration=tokens, dtype=torch.float32)
    result.evaluation = tokens
    from moesaic.metrics.forward import InMemory
    from moesaic.metrics.score import scores

    original = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    assert result.model.dtype == torch.float32
    (found,) = scores([InMemory(original)], tokens)
    assert result.scores["original"].perplexity == found.perplexity
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    (found,) = scores([InMemory(narrow)], tokens)
    assert result.scores["original"].perplexity != found.perplexity


@pytest.mark.parametrize("keep", [6, 5])
def test_configs_keep_their_sources_keys(keep, tokens, tmp_path):
    """Num_experts came out as num_local_experts alone, of which others know nothing."""
    tiny_moe("qwen3_moe").save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text())
    del config["num_local_experts"]
    rope = config.pop("rope_parameters")
    config |= {"num_experts": 8, "rope_theta": rope["rope_theta"], "torch_dtype": "float32"}
    config |= {"our_own_key": [1]}
    file.write_text(json.dumps(config))
    asked = {"config": PruneConfig(keep=keep), "calibration": tokens}
    result = moesaic.prune(str(tmp_path / "base"), **asked)
    made = json.loads((result.save(tmp_path / "out") / "config.json").read_text())
    assert made["num_experts"] == made["num_local_experts"] == keep
    assert (made["rope_theta"], made["our_own_key"]) == (rope["rope_theta"], [1])
    assert made.keys() >= config.keys()
    again = loaded(tmp_path / "out")
    assert again.config.num_experts == keep
    assert torch.equal(logits(again, tokens), logits(result.model, tokens))
    narrow = moesaic.prune(str(tmp_path / "base"), **asked, dtype=torch.bfloat16)
    made = json.loads((narrow.save(tmp_path / "narrow") / "config.json").read_text())
    assert made["dtype"] == made["torch_dtype"] == "bfloat16"
    assert {t.dtype for t in weights(tmp_path / "narrow").values()} == {torch.bfloat16}
