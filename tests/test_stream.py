"""Layer by layer is the whole forward, bitwise; statistics are merged and kept in files."""

import json
import tempfile
from typing import Any

import pytest
import torch
from builders import (
    converted,
    loaded,
    nightly,
    routed_sites,
    site_of,
    statistics,
    stored,
    stream_of,
    tiny_model,
    tiny_moe,
)
from safetensors.torch import load_file, safe_open, save_file
from shrunken import small_model

import moesaic
from moesaic import CondenseConfig, MoesaicError, PruneConfig, SlimConfig, TopKConfig, observe
from moesaic.api import prune
from moesaic.arch.lookup import base_arch, dense_arch
from moesaic.data.text import process_share
from moesaic.io.checkpoint import Checkpoint
from moesaic.metrics.forward import InMemory
from moesaic.modules.running import SpilledList
from moesaic.observation import stats as module
from moesaic.observation import stream as streaming
from moesaic.observation.changes import estimates
from moesaic.observation.files import FILED, StatsFile
from moesaic.observation.stats import layer_stats, tally_of
from moesaic.observation.stream import LayerStream
from moesaic.plans.cut import CutLayer


def dense_from_disk(folder, model, tokens):
    arch, checkpoint = dense_arch(model.config), Checkpoint(folder)
    return LayerStream.from_disk(checkpoint, model.config, arch, tokens, view=arch.dense)


def seen_by_full_forward(model, arch, batches):
    """What enters each FFN in an ordinary forward, padding dropped."""
    inputs = {i: [] for i in range(len(arch.layers(model)))}
    for batch in batches:
        handles = [
            arch.ffn_of(layer).register_forward_pre_hook(
                lambda _, args, i=i: inputs[i].append(args[0].flatten(0, -2))
            )
            for i, layer in enumerate(arch.layers(model))
        ]
        with torch.inference_mode():
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        for handle in handles:
            handle.remove()
        if batch.attention_mask is not None:
            for rows in inputs.values():
                rows[-1] = rows[-1][batch.attention_mask.flatten()]
    return {i: torch.cat(rows) for i, rows in inputs.items()}


def streamed(stream):
    return {site.index: torch.cat(list(site.inputs())) for site in stream}


@pytest.mark.parametrize("kind", ["tokens", "padded"])
def test_layerwise_is_the_full_forward(model_type, kind, request):
    tokens = request.getfixturevalue(kind)
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    expected = seen_by_full_forward(model, arch, tokens.batches(48))
    found = streamed(stream_of(model, tokens, tokens_per_batch=48))
    assert found.keys() == expected.keys()
    for i in expected:
        assert torch.equal(found[i], expected[i]), f"layer {i}"


def test_one_layer_at_a_time_is_in_memory(tokens, tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    stream = dense_from_disk(tmp_path, model, tokens)
    for site in stream:
        real = {n.split(".")[2] for n, p in stream.model.named_parameters() if not p.is_meta}
        assert real == {str(site.index)}


def test_spilling_changes_nothing(tokens):
    model = tiny_model("gemma2")
    kept = streamed(stream_of(model, tokens, tokens_per_batch=24))
    spilled = streamed(stream_of(model, tokens, tokens_per_batch=24, spill_bytes=5000))
    for i in kept:
        assert torch.equal(kept[i], spilled[i])


@pytest.mark.parametrize("follow", [False, True])
def test_all_that_is_kept_in_memory_keeps_to_one_limit(follow, tokens, monkeypatch):
    limits = []

    class Noted(SpilledList):
        def __init__(self, limit):
            limits.append(limit)
            super().__init__(limit)

    monkeypatch.setattr(streaming, "SpilledList", Noted)
    for site in stream_of(tiny_model("llama"), tokens, spill_bytes=800, follow=follow):
        kept = limits[:-1] if site._targets is None else limits  # without targets none are kept
        assert sum(kept) == 800


TIED, APART = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("phimoe", {**TIED, "lm_head_bias": True}), ("gpt_bigcode", APART), ("gpt_bigcode", TIED),
        nightly("falcon", TIED), nightly("inkling_text", TIED), nightly("gpt_neox_japanese", TIED),
        nightly("modernbert-decoder", TIED), nightly("modernbert-decoder", APART),
    ],
)  # fmt: skip
def test_head_and_embedding_have_names_of_their_own(kind, changes, tokens, tmp_path):
    """A tied head may have a bias of its own, and more may be before one; not every class ties it
    whose config says so."""
    model = small_model(kind, **changes)
    model.save_pretrained(tmp_path)
    arch = base_arch(model.config)
    stream = LayerStream.from_disk(Checkpoint(tmp_path), model.config, arch, tokens, view=arch.view)
    states, kwargs = stream.record()
    for block in stream.blocks(kwargs):
        block.run(states)
    found = torch.cat([logits for logits, _ in stream.heads(states)])
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens.input_ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spill_keeps_values_and_lives_on_disk(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spill = SpilledList(limit=100)
    first, second = torch.randn(4, 4).to(dtype), torch.randn(50, 3).to(dtype)
    spill.append(first)
    spill.append(second)
    (folder,) = tmp_path.iterdir()
    assert [file.name for file in folder.iterdir()] == ["1"], "only what is too large lives there"
    assert torch.equal(spill[1], second)
    spill.replace(1, second * 2)
    assert torch.equal(spill[1], second * 2)
    spill.clear()
    assert len(spill) == 0
    assert not any(tmp_path.iterdir())


def test_only_wanted_layers_are_run(tokens):
    model = tiny_model("llama")
    arch = dense_arch(model.config)
    ran = []
    for i, layer in enumerate(arch.layers(model)):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    sites = [site.index for site in stream_of(model, tokens, [0, 2], tokens_per_batch=999)]
    assert sites == [0, 2]
    assert 3 not in ran[len(arch.layers(model)) :], "the layer after the last wanted one ran"


def test_activations_are_the_down_projections_input(tokens):
    model = tiny_model("phi3")
    for cache in (0, 1 << 20):
        for site in stream_of(model, tokens, [2], cache_bytes=cache):
            caught = []
            handle = site.ffn.down_proj.register_forward_pre_hook(lambda _, a: caught.append(a[0]))  # noqa: B023
            for x_TD, h_TM in site.activations():
                site.ffn(x_TD)
                torch.testing.assert_close(h_TM, caught.pop())
            first, second = ([h for _, h in site.activations()] for _ in range(2))
            handle.remove()
            assert all((a is b) == (cache > 0) for a, b in zip(first, second, strict=True))
            assert sum(len(h) for h in second) == tokens.count


def test_value_that_is_not_finite_is_named(tokens):
    model, words = tiny_model("llama"), "calibration batch 0 layer 2 meets a value .* not finite"
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("inf")
    with pytest.raises(MoesaicError, match=words):
        list(stream_of(model, tokens))


def test_a_router_that_is_not_finite_is_named_by_its_layer(tokens, tmp_path):
    """Of 72539f03 it was a fault of ours: its layer's sums were decomposed."""
    model = tiny_moe("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(MoesaicError, match="Layer 1 computes a value that is not finite"):
        moesaic.slim(str(tmp_path), keep=0.5, calibration=tokens, progress=False)


def test_an_expert_that_is_not_finite_is_named_by_its_layer(tokens, tmp_path):
    """The layer is refitted before its output reaches the next one."""
    model = tiny_moe("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[3, 0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(MoesaicError, match="Layer 1 computes a value that is not finite"):
        moesaic.prune(str(tmp_path), keep=6, calibration=tokens, progress=False)
    with pytest.raises(MoesaicError, match="The model computes a value that is not finite"):
        estimates(stream_of(model, tokens), [{}])


ASKING = {"output_router_logits": True, "output_hidden_states": True}


def test_slimmed_layers_with_fewer_experts_have_no_loss_of_their_loads(tokens):
    """Which is of one number of experts."""
    model = tiny_moe("mixtral", output_router_logits=True)
    few = CutLayer(torch.arange(6), torch.arange(8).repeat(6, 1), 16)
    assert converted(model, {1: few})(tokens.input_ids, labels=tokens.input_ids).loss.isfinite()


def test_a_config_that_asks_for_more_than_logits_changes_nothing(moe, padded):
    """Blocks are stood in for, and have no router logits of which a loss could be made."""
    whole = next(iter(InMemory(moe).run([padded]).logits))[0]
    for name, value in ASKING.items():
        setattr(moe.config, name, value)
    stream = stream_of(moe, [padded])
    states, kwargs = stream.record()
    for block in stream.blocks(kwargs):
        block.run(states)
    for made in (stream.heads(states), InMemory(moe).run([padded]).logits):
        assert torch.equal(next(made)[0], whole)
    assert {name: getattr(moe.config, name) for name in ASKING} == ASKING


def test_models_that_ask_for_router_logits_are_scored_and_measured(tokens, tmp_path):
    model = tiny_moe("qwen2_moe", output_router_logits=True)
    name = str(stored(model, tmp_path / "model"))
    for verb, config in (
        (moesaic.slim, SlimConfig(keep=0.5, score="energy")),
        (moesaic.condense, CondenseConfig(count=1, metric="ppl", keep="attention")),
        (moesaic.prune, PruneConfig(keep=5.5, allocate="layers")),
    ):
        out = tmp_path / verb.__name__
        verb(name, config, calibration=tokens).save(out)
        asks = json.loads((out / "config.json").read_text())["output_router_logits"]
        assert asks == (verb is not moesaic.prune), "a loss over unequal numbers of experts"
        assert loaded(out)(tokens.input_ids).logits.isfinite().all()
        layerwise = moesaic.evaluate(out, against=name, data=tokens, stream=True)
        assert layerwise == moesaic.evaluate(out, against=name, data=tokens)


def test_a_live_models_loss_counts_the_experts_that_its_tokens_run(tokens, tmp_path):
    """Ernie's config and model have different names for their number."""
    result = moesaic.skip(tiny_moe("ernie4_5_moe"), TopKConfig(top_k=1))
    result.model.save_pretrained(tmp_path / "saved")
    asked = {"input_ids": tokens.input_ids, "labels": tokens.input_ids}
    losses = [
        model(**asked, output_router_logits=True).aux_loss
        for model in (result.model, loaded(tmp_path / "saved"))
    ]
    assert torch.equal(*losses)


def test_shares_of_the_batches_merge_to_the_whole(tokens, monkeypatch):
    """Two processes with every second batch each, a method's own sum among them."""
    model = tiny_moe("qwen2_moe")

    def tally(share, numbers=None):
        site = site_of(model, share, tokens_per_batch=24)
        found = tally_of(site, FILED, numbers, 0.5)
        for x_TD in site.inputs():
            found.add("own_D", x_TD.abs().sum(0))
        return found

    whole = tally(tokens).stats()
    parts = [tally(*process_share(tokens, number, 2, 24)) for number in range(2)]
    monkeypatch.setattr(module, "gathered", lambda _: parts)
    merged = parts[0].stats(every=True)
    assert merged.keys() == whole.keys() == {*FILED, "own_D"}
    for name, tensor in whole.items():
        if name in ("batch_T", "sampled_T", "calls_E", "bias_E", "reach_EM"):
            assert torch.equal(merged[name], tensor), name
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)
    assert whole["batch_T"].tolist() == sorted(whole["batch_T"].tolist())
    assert 0 < int(whole["sampled_T"].sum()) < len(whole["sampled_T"])


def test_a_name_that_nothing_computes_is_an_error(tokens):
    model = tiny_moe("mixtral")
    for site in stream_of(model, tokens, [1]):
        with pytest.raises(ValueError, match="nothing computes loud_M of layer 1"):
            layer_stats(site, {"calls_E", "loud_M"}, tokens)


CHANGES: dict[str, Any] = {
    "it has no 'gram_SP'": lambda held: held.pop("layers.1.gram_SP"),
    "logits_TX is of shape": lambda held: held.update(
        {"layers.1.batch_T": held["layers.1.batch_T"][1:].clone()}
    ),
    "gram_SP is of shape": lambda held: held.update(
        {"layers.1.gram_SP": held["layers.1.gram_SP"][:, 1:].clone()}
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_damaged_statistics_are_refused(message, tokens, tmp_path):
    model, file = tiny_moe("mixtral"), tmp_path / "model.stats"
    observe(model, file, calibration=tokens)
    with safe_open(file, "pt") as opened:
        notes = opened.metadata()
    held = load_file(file)
    CHANGES[message](held)
    save_file(held, file, metadata=notes)
    with pytest.raises(MoesaicError, match=f"layer 1 cannot be read: .*{message}"):
        prune(model, PruneConfig(keep=6), stats=file)


def test_a_file_gives_what_is_asked_for_as_it_was_observed(tokens, tmp_path):
    model, file = tiny_moe("mixtral"), tmp_path / "model.stats"
    observe(model, file, calibration=tokens)
    for site in routed_sites(model, tokens):
        wanted = statistics(site)
        assert {*load_file(file)} >= {f"layers.{site.index}.{name}" for name in wanted}
        found = StatsFile(file).layer(site.index, ["logits_TX", "pair_EE"])
        assert found.keys() == {"logits_TX", "pair_EE"}
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
