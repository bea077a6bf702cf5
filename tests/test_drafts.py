"""Layers that predict further tokens, run: their drafts are transformers' own, and are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from builders import (
    APART,
    BEHIND,
    launch,
    logits,
    pages,
    predicting,
    quantise,
    tiny_moe,
    tiny_tokenizer,
    weights,
)
from safetensors.torch import load_file, save_file
from shrunken import small_model
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import moesaic
from moesaic import CondenseConfig, PruneConfig, SkipConfig, SlimConfig, TopKConfig, TuneConfig
from moesaic.api import verb
from moesaic.data.text import Tokens
from moesaic.distributed import join_processes, process
from moesaic.errors import MoesaicError
from moesaic.io.formats import BlockScaled
from moesaic.io.source import resolve
from moesaic.metrics.drafts import Drafts
from moesaic.metrics.evaluate import evaluate
from moesaic.metrics.forward import Layerwise, Whole

FAMILIES = [
    ("deepseek_v3", BEHIND, 1),
    ("glm4_moe", BEHIND, 2),
    ("qwen3_moe", APART, 1),
    ("qwen3_next", APART, 1),
]


def published(model_type, folder, start=BEHIND, count=1):
    if model_type == "qwen3_next":
        model = small_model(model_type)
    else:
        model = tiny_moe(model_type, num_nextn_predict_layers=count)
    return predicting(model, folder, count, start)


def loaded(folder):
    return resolve(str(folder)).load()


def changed(folder, change):
    """A checkpoint with other tensors."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def transformers_own(model, hidden_BLD, ids_BL, count):
    """What transformers' class for such layers makes of each window, layer by layer."""
    layers = model.config.num_hidden_layers
    model.config.num_mtp_layers = count
    if getattr(model.config, "layer_types", None):
        model.config.mtp_layer_types = ["full_attention"]
    numbers = "|".join(str(layers + depth) for depth in range(count))
    # it goes by the numbers of the models that were published
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({numbers})\..*", "^mtp.*"]
    mtp = MtpModel.from_pretrained(model).eval()
    for window, ids_L in enumerate(ids_BL):
        hidden = hidden_BLD[window : window + 1]
        for depth in range(1, count + 1):
            cache = MtpCache(config=model.config.get_mtp_config())
            places = torch.arange(depth, len(ids_L))[None]
            given = hidden[:, : len(ids_L) - depth], places, cache
            hidden = mtp.forward_layer(depth - 1, *given, input_ids=ids_L[None, depth:])
            yield window, depth, mtp._project_to_logits(hidden)[0]


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "start", "count"), FAMILIES)
def test_drafts_are_those_of_transformers(model_type, start, count, tokens, tmp_path):
    source = resolve(str(published(model_type, tmp_path / "base", start, count)))
    model, ids_BL = source.load(), tokens.input_ids[:2]
    hidden_BLD = model.model(ids_BL, use_cache=False).last_hidden_state
    ours, hidden = {}, hidden_BLD
    for depth, drafter in enumerate(Drafts(source).opened(model), 1):
        hidden, ours[depth] = drafter(hidden, F.pad(ids_BL[:, depth:], (0, depth)))
    assert len(ours) == count
    for window, depth, logits_LV in transformers_own(model, hidden_BLD, ids_BL, count):
        torch.testing.assert_close(
            ours[depth][window, : len(logits_LV)], logits_LV, atol=2e-5, rtol=0
        )


@torch.no_grad()
def test_the_share_that_is_accepted_is_counted_token_by_token(padded, tmp_path):
    """Also where there is padding, and where the model is read layer by layer."""
    source = resolve(str(published("glm4_moe", tmp_path / "base", count=2)))
    drafts, run = Drafts(source), Whole.of(source)
    model = run.shape
    accepted, looked_at = [0, 0], [0, 0]
    for ids_L, mask_L in zip(padded.input_ids, padded.attention_mask, strict=True):
        ids_BL = ids_L[mask_L][None]
        hidden = model.model(ids_BL, use_cache=False).last_hidden_state
        greedy_L = model(ids_BL).logits[0].argmax(-1).tolist()
        for depth, drafter in enumerate(drafts.opened(model), 1):
            hidden, logits = drafter(hidden, F.pad(ids_BL[:, depth:], (0, depth)))
            drafted_L = logits[0].argmax(-1).tolist()
            for place in range(ids_BL.shape[1] - depth):
                accepted[depth - 1] += drafted_L[place] == greedy_L[place + depth]
                looked_at[depth - 1] += 1
    found = drafts.accepted(run, padded)
    shares = [a / n for a, n in zip(accepted, looked_at, strict=True)]
    assert found["acceptance"] == pytest.approx(shares)
    assert found["tokens"] == looked_at[0]
    assert drafts.accepted(Layerwise(source), padded) == found


def echoing(folder):
    """A model that repeats the token it reads, and a further layer that does so, too."""

    def change(tensors):
        embedding = tensors["model.embed_tokens.weight"]
        width = embedding.shape[1]
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()  # layers add nothing
            elif name.endswith("norm.weight"):
                tensor.fill_(1)
        tensors["model.layers.3.eh_proj.weight"][:] = torch.eye(width, 2 * width)
        tensors["lm_head.weight"] = embedding / embedding.norm(dim=1, keepdim=True)
        return tensors

    return changed(folder, change)


def test_drafts_of_what_the_model_would_say_are_all_accepted(tokens, tmp_path):
    folder = echoing(published("glm4_moe", tmp_path / "base"))
    found = evaluate(str(folder), against=str(folder), data=tokens, mtp=True).as_json()
    windows, length = tokens.input_ids.shape
    assert found["mtp"] == {"acceptance": [1.0], "tokens": windows * (length - 1)}
    assert found["against"]["mtp"] == found["mtp"]
    assert "mtp" not in evaluate(str(folder), data=tokens).as_json()


def test_what_is_read_layer_by_layer_is_read_once(tokens, tmp_path, monkeypatch):
    folder = published("deepseek_v3", tmp_path / "base")
    whole = evaluate(str(folder), data=tokens, mtp=True)
    passes, passed = [], Layerwise._passed
    monkeypatch.setattr(
        Layerwise, "_passed", lambda run, *given: passes.append(run) or passed(run, *given)
    )
    assert evaluate(str(folder), data=tokens, mtp=True, stream=True) == whole
    assert len(passes) == 1


def share(model: Path, windows: Tokens, out: Path) -> None:
    """In one of several processes."""
    join_processes()
    found = [
        evaluate(str(model), against=str(model), data=windows, mtp=True, stream=s).as_json()
        for s in (False, True)
    ]
    Path(f"{out}-{process()[0]}").write_text(json.dumps(found))


@pytest.mark.parametrize("windows", [50, 10], ids=["several batches", "fewer than processes"])
def test_processes_share_the_drafts(windows, tmp_path):
    folder = published("glm4_moe", tmp_path / "base", count=2)
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(1, 384, (windows, 48), generator=generator)
    mask_BL = torch.arange(48) < torch.randint(20, 49, (windows, 1), generator=generator)
    tokens = Tokens(ids_BL, mask_BL)
    launch(share, folder, tokens, tmp_path / "out")
    alone = evaluate(str(folder), against=str(folder), data=tokens, mtp=True)
    assert alone.as_json()["mtp"]["tokens"] == int(mask_BL[:, 1:].sum())
    for number in range(2):
        found = json.loads((tmp_path / f"out-{number}").read_text())
        assert found == 2 * [json.loads(json.dumps(alone.as_json()))]


def test_the_command_tells_of_model_and_original(command, tmp_path):
    folder = published("glm4_moe", tmp_path / "base")
    tiny_tokenizer().save_pretrained(folder)
    asked = ("eval", folder, "--against", folder, "--mtp", "--data", pages("evaluation"))
    code, out, _ = command(*asked, "--max-tokens", 1024, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["mtp"] == found["against"]["mtp"]
    assert found["mtp"].keys() == {"acceptance", "tokens"}
    _, out, _ = command(*asked, "--max-tokens", 1024)
    assert "mtp: acceptance" in out
    code, _, said = command("eval", "tiny-moe", "--mtp")
    assert (code, said.count("predict further tokens")) == (2, 1)


VERBS = {
    "prune": PruneConfig(keep=6),
    "prune by layer": PruneConfig(keep=6, allocate="layers"),
    "slim": SlimConfig(keep=0.5),
    "slim by expert": SlimConfig(keep=0.5, allocate="experts"),
    "condense": CondenseConfig(),
    "condense all": CondenseConfig(count=2, keep="nothing"),
    "skip": SkipConfig(),
    "skip --top-k": TopKConfig(top_k=1),
}


@pytest.mark.parametrize("asked", VERBS)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_they_run_in_every_result_that_has_them(model_type, asked, tokens, tmp_path):
    base = published(model_type, tmp_path / "base")
    config = VERBS[asked]
    out = verb(config.verb, str(base), config, calibration=tokens).save(tmp_path / "out")
    found = evaluate(str(out), against=str(base), data=tokens, mtp=True).as_json()
    assert found["mtp"]["tokens"] == found["against"]["mtp"]["tokens"]
    plan = next((tmp_path / "out").rglob("plan.safetensors"))
    again = tmp_path / "again"
    moesaic.apply(str(base), str(plan.parent), again)
    assert Drafts(resolve(str(again))).layers
    assert (again / "config.json").read_text() == (out / "config.json").read_text()


def test_they_stay_in_what_is_trained(tokens, tmp_path):
    """As they were, whatever the model has learnt: what that does to their drafts is measured."""
    base = published("glm4_moe", tmp_path / "base")
    config = TuneConfig(
        what="all", steps=2, batch=2, length=16, lr=1e-2, train=pages("calibration")
    )
    result = moesaic.tune(str(base), config, tokenizer=tiny_tokenizer())
    out = result.save(tmp_path / "out")
    assert "stay as they are" in result.record(str(base), str(out)).steps[-1].told
    before, after = weights(base), weights(out)
    assert before.keys() == after.keys()
    assert {n for n in before if torch.equal(before[n], after[n])} >= {
        n for n in before if n.startswith("model.layers.3.")
    }
    found = evaluate(str(out), against=str(base), data=tokens, mtp=True)
    assert found.mtp["tokens"] == found.against.mtp["tokens"]
    assert torch.equal(logits(loaded(out), tokens), logits(result.model, tokens))


def test_few_bits_stay_and_are_run(tokens, tmp_path):
    wide = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
    wide |= {"num_nextn_predict_layers": 1}
    base = predicting(tiny_moe("deepseek_v3", **wide), tmp_path / "base")
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantise(base, BlockScaled(said), lambda n, _: ".mlp." in n and n.endswith("_proj.weight"))
    out = moesaic.prune(str(base), PruneConfig(keep=4), calibration=tokens).save(tmp_path / "out")
    down = weights(out)["model.layers.3.mlp.experts.3.down_proj.weight"]
    assert down.dtype == torch.float8_e4m3fn
    found = evaluate(str(out), against=str(base), data=tokens, mtp=True, stream=True)
    assert found.mtp["tokens"] == found.against.mtp["tokens"]


# --- what cannot be run --------------------------------------------------------------------------


def refused(folder, tokens, words):
    with pytest.raises(MoesaicError, match=words) as error:
        evaluate(str(folder), data=tokens, mtp=True)
    assert "\n" not in str(error.value)


def test_layers_that_are_counted_and_not_there_are_refused(tokens, tmp_path):
    tiny_moe("deepseek_v3", num_nextn_predict_layers=2).save_pretrained(tmp_path / "none")
    refused(tmp_path / "none", tokens, "config.json counts 2 of them, and there are no weights")
    one = published("glm4_moe", tmp_path / "one")
    said = json.loads((one / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (one / "config.json").write_text(json.dumps(said))
    refused(one, tokens, "config.json counts 2 of them, and there are weights of 1")


def test_a_model_without_such_layers_is_refused(tokens, tmp_path):
    tiny_moe("mixtral").save_pretrained(tmp_path)
    refused(tmp_path, tokens, "layers that predict further tokens cannot be run: there are none")
    with pytest.raises(MoesaicError, match="a loaded model does not have"):
        evaluate(resolve(str(tmp_path)).load(), data=tokens, mtp=True)


@pytest.mark.parametrize("part", ["hnorm", "shared_head.norm", "self_attn.o_proj"])
def test_a_layer_of_which_a_weight_is_missing_is_refused_by_name(part, tokens, tmp_path):
    name = f"model.layers.3.{part}.weight"

    def without(tensors):
        del tensors[name]
        return tensors

    folder = changed(published("glm4_moe", tmp_path / "base"), without)
    if part == "shared_head.norm":  # the model's own takes its place, as in engines
        evaluate(str(folder), data=tokens, mtp=True)
    else:
        refused(folder, tokens, name if part == "hnorm" else "has the tensors of none")


def test_layers_under_other_names_are_refused_by_name(tokens, tmp_path):
    def renamed(tensors):
        return {n.replace("mtp.fc.", "mtp.joined."): t for n, t in tensors.items()}

    folder = changed(published("qwen3_moe", tmp_path / "base", APART), renamed)
    refused(folder, tokens, r"named in no way that is known \(mtp\.")


def test_windows_of_too_few_tokens_are_refused(tmp_path):
    folder = published("glm4_moe", tmp_path / "base", count=2)
    refused(folder, Tokens(torch.ones(4, 2, dtype=torch.int64)), "pass a greater length")
