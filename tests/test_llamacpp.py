"""Exports in llama.cpp itself: the same logits, the same text. Needs $LLAMA_CPP.

``make test-llamacpp`` builds llama-cpp-python from its source package and runs this file.
"""

import os

import pytest
import torch
from conftest import tiny_model
from moe_models import tiny_moe
from test_export import BARE, EQUAL, LAST_HALF, UNEVEN, carved_layer, saved

from moesaic import MoREConfig, bench, carve, export
from moesaic.data import shipped_texts
from moesaic.hub import resolve
from moesaic.plan import PrunedLayer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="needs $LLAMA_CPP"),
    pytest.mark.filterwarnings("ignore"),
]
llamacpp = pytest.importorskip("moesaic.metrics.llamacpp")
pytest.importorskip("llama_cpp")

TEXT = "\n\n".join(shipped_texts("evaluation", "prose"))


@pytest.fixture(scope="module")
def tokenizer():
    return resolve("smollm2").tokenizer


@pytest.fixture(scope="module")
def carved(tmp_path_factory):
    """SmolLM2 at half the FFN width in every layer."""
    config = MoREConfig(active=0.625, layers="all")
    result = carve("smollm2", config, samples=8, length=128)
    return result.save(tmp_path_factory.mktemp("smollm2") / "carved")


def parity(file, source, ids):
    """Largest difference of logits, relative to the largest logit, and both sides' next tokens."""
    model = source.load(dtype=torch.float32)
    with torch.no_grad():
        wanted = model(ids[None]).logits[0]
        new = model.generate(ids[None, :24], max_new_tokens=32, do_sample=False, pad_token_id=0)
    with llamacpp.Engine(file, len(ids) + 64, exact=True) as engine:
        found = engine.logits(ids)
        greedy = engine.greedy(ids[:24], 32)
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    return difference, greedy, new[0, 24:].tolist()


@pytest.mark.parametrize("target", ["granitemoeshared", "glm4_moe"])
def test_smollm2_says_the_same(target, carved, tokenizer, tmp_path):
    file = tmp_path / "model.gguf"
    record = export(str(carved), file, to="gguf", target=target)
    assert record["model_type"] == target
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[0, :256]
    difference, greedy, wanted = parity(file, resolve(str(carved)), ids)
    assert difference < 1e-4
    assert greedy == wanted[: len(greedy)]
    assert len(wanted) == 32


@pytest.mark.parametrize("type", ["bf16", "q8_0"])
def test_narrower_types_agree_as_often_as_bfloat16_does(type, carved, tokenizer, tmp_path):
    file = tmp_path / "model.gguf"
    export(str(carved), file, to="gguf", type=type)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[0, :256]
    source = resolve(str(carved))
    with torch.no_grad():
        wanted = source.load(dtype=torch.float32)(ids[None]).logits[0].argmax(-1)
        own = source.load(dtype=torch.bfloat16)(ids[None]).logits[0].argmax(-1)
    with llamacpp.Engine(file, 320, exact=True) as engine:
        found = engine.logits(ids).argmax(-1)
    assert (found == wanted).float().mean() > (own == wanted).float().mean() - 0.05


TINY = {
    "biased attention": ("llama", EQUAL, {"attention_bias": True}, {}),
    "qwen2": ("qwen2", EQUAL, {}, {}),
    "qwen3": ("qwen3", EQUAL, {}, {}),
    "granite": ("granite", EQUAL, {}, {}),
    "last half": ("llama", LAST_HALF, {}, {}),
    "no backbone": ("llama", BARE, {}, {}),
    "uneven, filled up": ("llama", UNEVEN, {}, {"ep": 3}),
    "tied": ("llama", EQUAL, {"tie_word_embeddings": True}, {}),
}


@pytest.mark.parametrize("case", TINY)
def test_tiny_models_have_the_same_logits(case, tokenizer, tmp_path):
    model_type, shapes, changes, options = TINY[case]
    if model_type == "llama":
        changes = {"mlp_bias": False, **changes}
    model = tiny_model(model_type, vocab_size=len(tokenizer), **changes)
    layers = {i: carved_layer(*shape, seed=i) for i, shape in shapes.items()}
    source = saved(tmp_path / "carved", model, layers)
    tokenizer.save_pretrained(source.folder)
    export(str(source.folder), tmp_path / "model.gguf", to="gguf", **options)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[0, :64]
    difference, _, _ = parity(tmp_path / "model.gguf", source, ids)
    assert difference < 1e-4


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe", "granitemoe"])
def test_pruned_mixtures_have_the_same_logits(model_type, tokenizer, tmp_path):
    heads = {"num_key_value_heads": 4} if model_type == "olmoe" else {}  # its loader wants all
    model = tiny_moe(model_type, vocab_size=len(tokenizer), **heads)
    layers = {i: PrunedLayer(torch.tensor([0, 2, 3, 5, 7])) for i in range(3)}
    source = saved(tmp_path / "pruned", model, layers)
    tokenizer.save_pretrained(source.folder)
    export(str(source.folder), tmp_path / "model.gguf", to="gguf")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[0, :64]
    difference, _, _ = parity(tmp_path / "model.gguf", source, ids)
    assert difference < 1e-4


def test_bench_in_llamacpp(carved):
    figures = bench(
        {"model": str(carved), "against": "smollm2"},
        engine="llamacpp", length=64, new_tokens=4, rounds=2,
    )  # fmt: skip
    assert figures["ratio"]["decode"]["ideal"] == pytest.approx(1.42, abs=0.01)
    assert figures["ratio"]["prefill"]["share"] > 0
    for side in ("model", "against"):
        assert figures[side]["peak_memory_bytes"] > figures[side]["file_bytes"] > 500e6
        assert figures[side]["decode_tokens_per_second"] > 0
