"""MTP layers: reduced as the last layer is, kept, and true in the config (S14)."""

import json

import pytest
import torch
from builders import (
    APART,
    BEHIND,
    applied,
    edited,
    equal,
    logits,
    opened,
    pages,
    predicting,
    quantise,
    tiny_moe,
    tiny_tokenizer,
    weights,
)

import moesaic
from moesaic import CondenseConfig, PruneConfig, SkipConfig, SlimConfig, TopKConfig, TuneConfig
from moesaic.api import verb
from moesaic.arch.lookup import moe_arch
from moesaic.io.checkpoint import Checkpoint
from moesaic.io.formats import BlockFp8
from moesaic.io.source import Source
from moesaic.plans.cut import CutLayer
from moesaic.sizes import Skeleton

BEHIND_3 = BEHIND.format(number=3)
LAYOUTS = {"deepseek_v3": BEHIND_3, "glm4_moe": BEHIND_3, "qwen3_moe": "mtp.layers.0."}


def published(model_type, folder):
    """A checkpoint with one layer more, of random values."""
    start = BEHIND if LAYOUTS[model_type] == BEHIND_3 else APART
    return predicting(tiny_moe(model_type, num_nextn_predict_layers=1), folder, start=start)


def loaded(folder):
    return Source(folder.name, folder).load()


def further(folder, model_type):
    start = LAYOUTS[model_type]
    found = weights(folder)
    return {n.removeprefix(start): t for n, t in found.items() if n.startswith(start)}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_pruned_along_with_the_last_layers_choice(model_type, tokens, tmp_path):
    base = published(model_type, tmp_path / "base")
    config = PruneConfig(keep=6, score="frequency", refit=True)
    result = moesaic.prune(str(base), config, calibration=tokens)
    out = result.save(tmp_path / "out")
    kept = result.plan.layers[2].kept
    before, after = (further(folder, model_type) for folder in (base, out))
    for name, tensor in after.items():
        head, experts, rest = name.partition(".experts.")
        number, _, leaf = rest.partition(".")
        if experts:  # not refitted: nobody saw its tokens
            wanted = before[f"{head}.experts.{kept[int(number)]}.{leaf}"]
        else:
            wanted = before[name]
            wanted = wanted[kept] if ".gate." in name else wanted
        assert torch.equal(tensor, wanted), name
    experts = {name.split(".")[2] for name in after if ".experts." in name}
    assert experts == {*"012345"}
    said = json.loads((out / "config.json").read_text())
    assert said["num_nextn_predict_layers"] == 1
    assert torch.equal(logits(loaded(out), tokens), logits(result.model, tokens))
    step = result.record(str(base), str(out)).steps[-1]
    assert step.summary["along"] == {"num_nextn_predict_layers": 1}
    assert "are reduced as the last layer is" in step.text
    again = moesaic.prune(str(out), PruneConfig(keep=4, score="frequency"), calibration=tokens)
    again.save(tmp_path / "again")
    downs = [name for name in further(tmp_path / "again", model_type) if "s.3.down_proj" in name]
    assert len(downs) == 1


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_slimmed_along(model_type, tokens, tmp_path):
    base = published(model_type, tmp_path / "base")
    config = SlimConfig(keep=0.5, refit=False)
    result = moesaic.slim(str(base), config, calibration=tokens)
    out = result.save(tmp_path / "out")
    plan = result.plan.layers[2]
    before, after = (further(folder, model_type) for folder in (base, out))
    for i in range(8):
        order = plan.neurons_EW[i]
        for leaf, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            name = f"mlp.experts.{i}.{leaf}.weight"
            assert torch.equal(after[name], before[name].index_select(axis, order)), name
    if plan.shared_S is not None:
        name = "mlp.shared_experts.up_proj.weight"
        assert torch.equal(after[name], before[name][plan.shared_S])


def test_a_live_model_has_none(tokens, tmp_path):
    """transformers does not load them: the config and the record say so."""
    base = published("glm4_moe", tmp_path / "base")
    result = moesaic.prune(loaded(base), PruneConfig(keep=4), calibration=tokens)
    out = result.save(tmp_path / "out")
    assert not further(out, "glm4_moe")
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    step = result.record(str(base), str(out)).steps[-1]
    assert step.summary["left_out"] == {"num_nextn_predict_layers": 1}
    assert "speculative decoding, are left out" in step.text


def test_what_cannot_come_along_is_left_out(tmp_path):
    """Of another number of experts than the last layer, it would not be as the config says."""
    base = published("glm4_moe", tmp_path / "base")
    with opened(base) as tensors:
        gate = f"{LAYOUTS['glm4_moe']}mlp.gate.weight"
        tensors[gate] = tensors[gate][:6].clone()
    model = loaded(base)
    arch = moe_arch(model.config)
    layers = {i: CutLayer(torch.arange(4)) for i in arch.moe_layers(model)}
    applied(base, model, layers, tmp_path / "out")
    assert not further(tmp_path / "out", "glm4_moe")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_one_that_the_config_names_and_no_file_holds_is_named_no_more(model_type, tokens, tmp_path):
    """transformers writes such folders: it drops the layers and keeps their number."""
    base = tmp_path / "base"
    tiny_moe(model_type, num_nextn_predict_layers=1).save_pretrained(base)
    edited(base / "config.json", num_nextn_predict_layers=1)
    config = PruneConfig(keep=6, score="frequency", refit=False)
    out = moesaic.prune(str(base), config, calibration=tokens).save(tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert torch.isfinite(logits(loaded(out), tokens)).all()


VERBS = {
    "prune by layer": PruneConfig(keep=6, allocate="layers"),
    "slim by expert": SlimConfig(keep=0.5, allocate="experts"),
    "condense": CondenseConfig(),
    "condense all": CondenseConfig(count=2, keep="nothing"),
    "skip": SkipConfig(),
    "skip --top-k": TopKConfig(top_k=1),
}


@pytest.mark.parametrize("asked", VERBS)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_they_survive_every_verb(model_type, asked, tokens, tmp_path):
    base, config = published(model_type, tmp_path / "base"), VERBS[asked]
    out = verb(config.verb, str(base), config, calibration=tokens).save(tmp_path / "out")
    if config.verb == "skip":  # which changes nothing in them
        assert equal(further(base, model_type), further(out, model_type))
    found = {name: tensor for name, tensor in weights(out).items() if "eh_proj" in name}
    said = json.loads((out / "config.json").read_text())["num_nextn_predict_layers"]
    assert said == len(found) == 1
    plan = next((tmp_path / "out").rglob("plan.safetensors"))
    again = tmp_path / "again"
    moesaic.apply(str(base), str(plan.parent), again)
    assert equal(weights(again), weights(out))
    assert (again / "config.json").read_text() == (out / "config.json").read_text()


def test_mtp_layers_are_kept_in_what_is_trained(tokens, tmp_path):
    """As they were, whatever the model has learnt."""
    base = published("glm4_moe", tmp_path / "base")
    config = TuneConfig(
        what="all", steps=2, batch=2, length=16, lr=1e-2, train=pages("calibration")
    )
    result = moesaic.tune(str(base), config, tokenizer=tiny_tokenizer())
    out = result.save(tmp_path / "out")
    assert "are kept as they are" in result.record(str(base), str(out)).steps[-1].text
    before, after = weights(base), weights(out)
    assert before.keys() == after.keys()
    assert {n for n in before if torch.equal(before[n], after[n])} >= {
        n for n in before if n.startswith("model.layers.3.")
    }
    assert torch.equal(logits(loaded(out), tokens), logits(result.model, tokens))


def test_few_bits_are_kept(tokens, tmp_path):
    wide = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
    wide |= {"num_nextn_predict_layers": 1}
    base = predicting(tiny_moe("deepseek_v3", **wide), tmp_path / "base")
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantise(base, BlockFp8(said), lambda n, _: ".mlp." in n and n.endswith("_proj.weight"))
    out = moesaic.prune(str(base), PruneConfig(keep=4), calibration=tokens).save(tmp_path / "out")
    down = weights(out)["model.layers.3.mlp.experts.3.down_proj.weight"]
    assert down.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", ["float32", "fp8"])
def test_condensing_counts_bytes_as_stored(stored, dtype, tokens, tmp_path):
    """MTP layers, and what is in few bits: a target counts what is then written."""
    wide = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
    wide |= {"num_nextn_predict_layers": 1, "num_hidden_layers": 4}
    base = predicting(tiny_moe("deepseek_v3", **wide), tmp_path / "base")
    if stored == "fp8":
        said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        quantise(base, BlockFp8(said), lambda n, _: ".mlp." in n and n.endswith("_proj.weight"))
    few = {"refit": False, "layer_search": "rank"}

    def condensed(**target):
        config = CondenseConfig(**target, **few)
        result = moesaic.condense(str(base), config, calibration=tokens, dtype=dtype)
        return result, result.summary["memory_bytes"]

    one, bytes_ = condensed(count=1)
    out = one.save(tmp_path / "out")
    assert bytes_["original"] == Skeleton.of(Source("base", base), dtype).bytes
    assert bytes_["result"] == Checkpoint(out).tensor_bytes()
    for memory, count in ((bytes_["result"], 1), (bytes_["result"] - 1, 2)):
        assert len(condensed(memory=memory)[0].summary["layers"]) == count
