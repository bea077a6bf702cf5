"""Exports in llama.cpp itself: the same logits, the same text. Run by ``make test-llamacpp``."""

import copy
import ctypes
import math
import os
import shutil
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from builders import (
    BARE,
    DENSE,
    EQUAL,
    LAST_HALF,
    UNEVEN,
    VOCAB,
    applied,
    carved_layer,
    finish,
    quantised_file,
    saved,
    stored,
    tiny_model,
    tiny_moe,
    tiny_tokenizer,
)
from gguf import GGUFReader, GGUFWriter
from released import deepseek_v4
from safetensors.torch import load_file, save_file
from shrunken import small_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import moesaic
from moesaic import FitConfig, MoesaicError, MoREConfig, PruneConfig, Recipe, SlimConfig, export
from moesaic.api import carve, slim, verb
from moesaic.arch.lookup import base_arch
from moesaic.config import Calibration, Evaluation, ExportArgs, GgufType, by_text
from moesaic.data.reader import shipped_texts
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.exports.native import NEAR
from moesaic.exports.quantiser import tensors_of
from moesaic.fitting.gguf_files import Files
from moesaic.fitting.run import search_and_make as fit
from moesaic.io.source import resolve
from moesaic.metrics.gguf_engine import split_otherwise
from moesaic.plans.cut import CutLayer
from moesaic.sizes import Skeleton

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="needs $LLAMA_CPP"),
    pytest.mark.filterwarnings("ignore"),
]
llamacpp = pytest.importorskip("moesaic.metrics.gguf_engine")

TEXT = "\n\n".join(shipped_texts("evaluation", "prose"))
PIECES, BPE = 384, 49152
"""Sizes of a SentencePiece vocabulary and of SmolLM2's."""


@pytest.fixture(scope="module")
def tokenizer():
    return resolve("smollm2").tokenizer


@pytest.fixture(scope="module")
def vocabularies(tokenizer, tmp_path_factory):
    """Folders by size: SentencePiece's own file, and a vocabulary that the converter knows."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folders = {size: tmp_path_factory.mktemp("vocabulary") for size in (PIECES, BPE)}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_prefix=str(folders[PIECES] / "tokenizer"),
        vocab_size=PIECES,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (folders[PIECES] / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer.save_pretrained(folders[BPE])
    return folders


@pytest.fixture(scope="module")
def carved(tmp_path_factory):
    """SmolLM2 at half the FFN width in every layer."""
    config = MoREConfig(active=0.625, layers="all")
    result = carve("smollm2", config, samples=8, length=128)
    return result.save(tmp_path_factory.mktemp("smollm2") / "carved")


def sentencepiece_in_json(space_first):
    """A vocabulary as SentencePiece's are, in ``tokenizer.json``, transformers 5's alone."""
    spaces = normalizers.Replace(" ", "\u2581")
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if space_first else spaces
    )
    raw.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")  # to learn alone
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=special, show_progress=False)
    raw.train_from_iterator(TEXT.splitlines(), trainer)
    raw.pre_tokenizer = None
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence(steps)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **names)


@pytest.mark.parametrize(
    ("model_type", "space_first"), [("llama", True), ("gemma2", False), ("gemma3_text", False)]
)
def test_text_is_split_alike_without_a_file_of_sentencepiece(model_type, space_first, tmp_path):
    tokenizer = sentencepiece_in_json(space_first)
    make = partial(tiny_model, mlp_bias=False)
    if model_type != "llama":
        make = partial(small_model, query_pre_attn_scalar=8)  # the head size
    make(model_type, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    export(str(tmp_path / "model"), tmp_path / "model.gguf", to="gguf", type="f32")
    llama_cpp = pytest.importorskip("llama_cpp.llama").Llama
    engine = llama_cpp(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    text = TEXT + " caf\u00e9 \u65e5\u672c  two  spaces\n\n"
    split = engine.tokenize(text.encode(), add_bos=False)
    for one in (tokenizer, resolve(str(tmp_path / "model.gguf")).tokenizer):
        assert one(text, add_special_tokens=False).input_ids == split


def test_a_vocabulary_that_llama_cpp_reads_otherwise_is_told(tmp_path, monkeypatch, caplog):
    export("tiny-moe", tmp_path / "model.gguf", to="gguf", type="q8_0")
    assert "other tokens" not in caplog.text
    texts = shipped_texts("evaluation")[:4]
    for name, others in (("tiny-moe", 0), ("smollm2", 4)):
        split = split_otherwise(tmp_path / "model.gguf", resolve(name).tokenizer, texts)
        assert split == others, name
    (tmp_path / "odd.gguf").write_bytes(b"GGUF of another time")
    with pytest.raises(MoesaicError, match="llama.cpp cannot load"):
        split_otherwise(tmp_path / "odd.gguf", resolve("tiny-moe").tokenizer, texts)
    monkeypatch.setattr("moesaic.exports.llamacpp.split_otherwise", lambda *_: 3)
    export("tiny-moe", tmp_path / "model.gguf", to="gguf", type="q8_0", overwrite=True)
    assert "llama.cpp splits 3 of 34 texts" in caplog.text


def ids_of(tokenizer, count=256):
    return tokenizer(TEXT, return_tensors="pt").input_ids[0, :count]


def logits_of(source, ids, dtype=torch.float32):
    """The logits (T, V) of transformers."""
    with torch.no_grad():
        return source.load(dtype=dtype)(ids[None]).logits[0]


def logits_in(file, ids):
    """The logits (T, V) of llama.cpp."""
    with llamacpp.Engine(file, len(ids) + 64) as engine:
        return engine.logits(ids)


def kl(wanted, found):
    """KL (in nats a token) of logarithms of probabilities."""
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


def parity(file, source, ids):
    """Largest difference of logits, relative to the largest logit, and both sides' next tokens."""
    model = source.load(dtype=torch.float32)
    with torch.no_grad():
        wanted = model(ids[None]).logits[0]
        new = model.generate(ids[None, :24], max_new_tokens=32, do_sample=False, pad_token_id=0)
    with llamacpp.Engine(file, len(ids) + 64) as engine:
        found = engine.logits(ids)
        greedy = engine.greedy(ids[:24], 32)
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    return difference, greedy, new[0, 24:].tolist()


def test_smollm2_says_the_same(carved, tokenizer, tmp_path):
    file = tmp_path / "model.gguf"
    record = export(str(carved), file, to="gguf", target="granitemoeshared")
    assert record["model_type"] == "granitemoeshared"
    difference, greedy, wanted = parity(file, resolve(str(carved)), ids_of(tokenizer))
    assert difference < 1e-4
    assert greedy == wanted[: len(greedy)]
    assert len(wanted) == 32


def test_several_petals_say_nearly_the_same(tokenizer, tmp_path):
    """llama.cpp chooses by probability: the order of petals must survive its rounding."""
    many = {"experts": 40, "top_k": 20, "router": "ridge", "prompts": "petals"}
    config = MoREConfig(active=0.8, layers="all", refit=True, **many)
    carve("smollm2", config, samples=8, length=128).save(tmp_path / "carved")
    file = tmp_path / "model.gguf"
    record = export(str(tmp_path / "carved"), file, to="gguf", target="granitemoeshared")
    assert not record["exact"]
    ids = ids_of(tokenizer)
    wanted, found = logits_of(resolve(str(tmp_path / "carved")), ids), logits_in(file, ids)
    assert (found - wanted).norm() < NEAR * wanted.norm()
    assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.93
    losses = [F.cross_entropy(logits[:-1], ids[1:]) for logits in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1].item(), rel=0.01)


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0"])
def test_narrower_types_agree_as_often_as_bfloat16_does(type, carved, tokenizer, tmp_path):
    file = tmp_path / "model.gguf"
    export(str(carved), file, to="gguf", type=type)
    source, ids = resolve(str(carved)), ids_of(tokenizer)
    wanted, own = (logits_of(source, ids, t).argmax(-1) for t in (torch.float32, torch.bfloat16))
    found = logits_in(file, ids).argmax(-1)
    assert (found == wanted).float().mean() > (own == wanted).float().mean() - 0.05


TINY = {
    "biased attention": ("llama", EQUAL, {"attention_bias": True}),
    "granite": ("granite", EQUAL, {}),
    "last half": ("llama", LAST_HALF, {}),
    "no backbone": ("llama", BARE, {}),
    "uneven, filled up": ("llama", UNEVEN, {}),
    "tied": ("llama", EQUAL, {"tie_word_embeddings": True}),
}


def largest_difference(model, layers, vocabularies, place):
    """Of logits, between a tiny model with these layers and its GGUF."""
    size = model.config.vocab_size
    source = saved(place / "made", model, layers)
    shutil.copytree(vocabularies[size], source.folder, dirs_exist_ok=True)
    export(str(source.folder), place / "model.gguf", to="gguf")
    ids = torch.randint(3, size, (64,), generator=torch.Generator().manual_seed(0))
    return parity(place / "model.gguf", source, ids)[0]


@pytest.mark.parametrize("case", TINY)
def test_tiny_models_have_the_same_logits(case, vocabularies, tmp_path):
    model_type, shapes, changes = TINY[case]
    if model_type == "llama":
        changes = {"mlp_bias": False, **changes}
    model = tiny_model(model_type, vocab_size=BPE, **changes)
    layers = {i: carved_layer(*shape, seed=i) for i, shape in shapes.items()}
    assert largest_difference(model, layers, vocabularies, tmp_path) < 1e-4


UNSAID = {"dots1": {"num_key_value_heads": 4}, "minimax_m2": {"rotary_dim": 8}, "exaone_moe": {}}


@pytest.mark.parametrize("verb", ["", "prune"])
@pytest.mark.parametrize("model_type", UNSAID)
def test_scores_that_no_config_names_are_the_models(model_type, verb, tmp_path):
    """Sigmoids in transformers' classes, without which llama.cpp aborted."""
    base = stored(small_model(model_type, **UNSAID[model_type]), tmp_path / "base")
    if verb:
        calibration = torch.randint(1, 380, (8, 16))
        made = moesaic.prune(base, keep=6, score="frequency", calibration=calibration)
        base = made.save_pretrained(tmp_path / "out")
    export(str(base), tmp_path / "model.gguf", to="gguf", type="f32")
    ids = torch.randint(1, 380, (40,), generator=torch.Generator().manual_seed(4))
    wanted, found = logits_of(resolve(str(base)), ids), logits_in(tmp_path / "model.gguf", ids)
    torch.testing.assert_close(found[:, : wanted.shape[1]], wanted, rtol=0, atol=1e-4)


SUPPORTED = {
    "llama": {"mlp_bias": False},
    "gemma2": {"query_pre_attn_scalar": 8},  # the head size
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "olmo2": {"num_key_value_heads": 4},  # all heads
}


@pytest.mark.parametrize("model_type", sorted({*DENSE} - {"phi"}))
def test_static_pruning_has_the_same_logits(model_type, vocabularies, tmp_path):
    """Layers of different widths. It reads GELU from a table in half precision."""
    size = BPE if model_type in ("olmo2", "granite") else PIECES
    model = tiny_model(model_type, vocab_size=size, **SUPPORTED.get(model_type, {}))
    layers = {i: carved_layer(width, (), seed=i) for i, width in enumerate((40, 48, 32, 40))}
    bound = 2e-3 if model_type.startswith("gemma") else 1e-4
    assert largest_difference(model, layers, vocabularies, tmp_path) < bound


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A dense model that knows some English, with widths by layer."""
    config = SlimConfig(keep=0.75, allocate="layers", multiple=32)
    result = slim("tiny-dense", config, samples=16, length=128)
    folder = result.save(tmp_path_factory.mktemp("uneven") / "model")
    assert resolve(str(folder)).config.model_type == "moesaic_llama"
    return folder


@pytest.mark.parametrize("asked", [{"type": "q8_0"}, {"type": "q4_k_m"}, {"memory": 4_000_000}])
def test_layers_of_different_widths_in_narrow_types(asked, uneven, tmp_path):
    """With an importance matrix, and types by layer; our own reader and llama.cpp agree."""
    file = tmp_path / "model.gguf"
    record = export(str(uneven), file, to="gguf", **asked)
    assert record["bytes"] <= asked.get("memory", record["bytes"])
    source = resolve(str(uneven))
    ids = ids_of(source.tokenizer)
    made = logits_of(source, ids), logits_of(resolve(str(file)), ids), logits_in(file, ids)
    wanted, read, found = (logits.log_softmax(-1) for logits in made)
    for narrow in (found, read):
        assert kl(wanted, narrow) < LIMITS["q4_k_m"]
    assert kl(read, found) < LIMITS["q8_0"]


@pytest.mark.parametrize("predicting", [False, True])
@pytest.mark.parametrize("layer", ["pruned", "slimmed"])
def test_layers_that_predict_further_tokens_come_along(layer, predicting, tmp_path):
    """Those of Qwen3-Next, reduced as the last layer is; the converter asks for them otherwise."""
    model = small_model("qwen3_next", head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32)
    file = stored(model, tmp_path / "base") / "model.safetensors"
    tensors, last = load_file(file), "model.layers.3."
    if predicting:
        more = {n.replace(last, "mtp.layers.0."): t for n, t in tensors.items() if last in n}
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        more |= {f"mtp.{name}.weight": torch.zeros(32) for name in norms}
        more["mtp.fc.weight"] = torch.ones(32, 64)
        save_file(tensors | {n: t.clone() for n, t in more.items()}, file, {"format": "pt"})
    kept, neurons = torch.arange(6), torch.arange(8).repeat(8, 1)
    made = CutLayer(kept) if layer == "pruned" else CutLayer(torch.arange(8), neurons, 16)
    layers = dict.fromkeys(base_arch(model.config).moe_layers(model), made)
    applied(tmp_path / "base", model, layers, tmp_path / "out")
    tiny_tokenizer().save_pretrained(tmp_path / "out")
    export(str(tmp_path / "out"), tmp_path / "model.gguf", to="gguf")
    ids = torch.randint(3, VOCAB, (64,), generator=torch.Generator().manual_seed(0))
    assert parity(tmp_path / "model.gguf", resolve(str(tmp_path / "out")), ids)[0] < 1e-4
    shapes = {t.name: t.shape.tolist() for t in GGUFReader(tmp_path / "model.gguf").tensors}
    wanted = {"pruned": [32, 16, 6], "slimmed": [32, 8, 8]}[layer]
    assert shapes["blk.3.ffn_up_exps.weight"] == wanted
    assert shapes.get("blk.4.ffn_up_exps.weight") == (wanted if predicting else None)


def test_a_nemotron_whose_layers_differ_has_the_same_logits(tmp_path):
    config = SlimConfig(keep=0.5, allocate="layers", score="energy", refit=False)
    kinds = ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"]
    model = small_model("nemotron_h", layers_block_type=kinds, num_hidden_layers=6)
    model.save_pretrained(tmp_path / "base")
    ids = torch.randint(3, 384, (8, 32), generator=torch.Generator().manual_seed(0))
    result = verb(config.verb, str(tmp_path / "base"), config, calibration=Tokens(ids))
    result.save(tmp_path / "out")
    tiny_tokenizer().save_pretrained(tmp_path / "out")
    file, source = tmp_path / "model.gguf", resolve(str(tmp_path / "out"))
    record = export(str(tmp_path / "out"), file, to="gguf")
    assert record["model_type"] == "nemotron_h"
    numbers = (source.config.to_dict()[n] for n in ("moe_intermediate_size", "num_experts_per_tok"))
    assert any(isinstance(number, list) and len({*number}) > 1 for number in numbers)
    difference, greedy, wanted = parity(file, source, ids[0])
    assert difference < 1e-4
    assert greedy == wanted


def test_a_released_deepseek_v4_is_pruned_as_packed_as_it_was(tmp_path):
    """Experts are kept in FP4; what is in FP8 becomes q8_0 there, as of the original."""
    folder = deepseek_v4(tmp_path / "base")
    tiny_tokenizer().save_pretrained(folder)
    config = PruneConfig(keep=6, score="aimer", refit=False)
    verb("prune", str(folder), config).save(tmp_path / "out")
    file = tmp_path / "model.gguf"
    ids = torch.randint(3, 384, (32,), generator=torch.Generator().manual_seed(0))
    export(str(tmp_path / "out"), file, to="gguf")
    kinds = {t.tensor_type.name for t in GGUFReader(file).tensors if "_exps" in t.name}
    assert kinds == {"MXFP4"}
    difference, *_ = parity(file, resolve(str(tmp_path / "out")), ids)
    from_original, *_ = parity(file, resolve(str(folder)), ids)
    assert difference < from_original / 3


def counting(file, counts, out):
    """The same file, with a number of experts a token for each layer."""
    reader = GGUFReader(file)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.endswith(".expert_used_count"):
            writer.add_array(name, counts)
        elif not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, *inner[-1:])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return out


def test_experts_a_token_by_layer_are_refused_for_it_computes_something_else(
    vocabularies, tmp_path
):
    """It takes a list, chooses as many as the first layer in each, and adds up a layer's own."""
    model = tiny_moe("mixtral", vocab_size=PIECES)
    base = saved(tmp_path / "base", copy.deepcopy(model), {})
    fewer = saved(tmp_path / "fewer", model, {i: CutLayer(top_k=1) for i in (1, 2)})
    for source in (base, fewer):
        shutil.copytree(vocabularies[PIECES], source.folder, dirs_exist_ok=True)
    with pytest.raises(MoesaicError, match="run different numbers of experts a token"):
        export(str(fewer.folder), tmp_path / "fewer.gguf", to="gguf")
    whole = tmp_path / "base.gguf"
    export(str(base.folder), whole, to="gguf")
    ids = torch.randint(3, PIECES, (64,), generator=torch.Generator().manual_seed(0))
    alike = counting(whole, [2, 2, 2], tmp_path / "alike.gguf")
    assert parity(alike, base, ids)[0] < 1e-4
    differing = counting(whole, [2, 1, 1], tmp_path / "differing.gguf")
    assert parity(differing, fewer, ids)[0] > 1e-2
    assert parity(differing, base, ids)[0] > 1e-2


LIMITS = {"f16": 1e-4, "q8_0": 1e-2, "q4_k_m": 0.2, "iq2_xxs": 0.8}
"""The most that types may be away from float32: KL in nats a token."""


@pytest.fixture(scope="module")
def slimmed(tmp_path_factory):
    """64 of the 96 neurons of every expert of a mixture that knows some English."""
    result = slim("tiny-moe", SlimConfig(keep=2 / 3, multiple=32), samples=16, length=128)
    return result.save(tmp_path_factory.mktemp("slimmed") / "model")


@pytest.mark.parametrize("type", LIMITS)
def test_a_slimmed_mixture_in_narrow_types(type, slimmed, tmp_path):
    """Its vocabulary is none that the converter knows; rows of 64 are too short for k-quants."""
    source = resolve(str(slimmed))
    record = export(str(slimmed), tmp_path / "model.gguf", to="gguf", type=type)
    assert type.removesuffix("_m") in record["types"]
    ids = ids_of(source.tokenizer)
    wanted = logits_of(source, ids).log_softmax(-1)
    with llamacpp.Engine(tmp_path / "model.gguf", 320) as engine:
        assert engine.split(TEXT)[:256] == ids.tolist()
        found = engine.logits(ids).log_softmax(-1)
        said = source.tokenizer.decode(engine.greedy(ids[:24], 24))
    assert kl(wanted, found) < LIMITS[type]
    assert len(said.split()) > 5


def test_a_text_makes_k_quants_better(tmp_path):
    """SmolLM2 at two bits and a half, with an importance matrix of the text that ships."""
    source = resolve("smollm2")
    ids, losses = ids_of(source.tokenizer, 512), {}
    for text in ("", "none"):
        file = tmp_path / f"model-{text}.gguf"
        export("smollm2", file, to="gguf", type="q2_k", calibration=text)
        losses[text] = F.cross_entropy(logits_in(file, ids)[:-1], ids[1:]).item()
    assert losses[""] < losses["none"]


def test_types_by_layer_have_less_kl_than_one_type_of_as_many_bytes(tmp_path):
    """tiny-moe, at what q4_k_m takes, by llama.cpp's own logits."""
    source = resolve("tiny-moe")
    ids = ids_of(source.tokenizer, 2048).view(4, 512)
    wanted = torch.stack([logits_of(source, row) for row in ids]).log_softmax(-1)
    one = export("tiny-moe", tmp_path / "one.gguf", to="gguf", type="q4_k_m")
    asked = {"memory": one["bytes"], "among": ("q6_k", "q5_k_m", "q4_k_m", "q3_k_m")}
    many = export("tiny-moe", tmp_path / "many.gguf", to="gguf", **asked)
    assert many["type"] == "mixed"
    assert (tmp_path / "many.gguf").stat().st_size == many["bytes"] <= one["bytes"]
    losses = []
    for name in ("one.gguf", "many.gguf"):
        found = torch.stack([logits_in(tmp_path / name, row) for row in ids]).log_softmax(-1)
        losses.append(kl(wanted, found).item())
    assert losses[1] < 0.9 * losses[0]


def test_a_chat_in_llamacpp_is_that_of_transformers(tokenizer, tmp_path):
    """The chat template and the tokenizer are in the file, and the answer makes sense."""
    result = carve("smollm2", MoREConfig(active=0.9), samples=8, length=128)
    export(str(result.save(tmp_path / "carved")), tmp_path / "model.gguf", to="gguf")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = tokenizer.apply_chat_template(chat, **options).input_ids
    new = result.model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
    wanted = tokenizer.decode(new[0, prompt.shape[1] :], skip_special_tokens=True)
    llama_cpp = pytest.importorskip("llama_cpp.llama").Llama
    llama = llama_cpp(str(tmp_path / "model.gguf"), n_ctx=256, verbose=False)
    answer = llama.create_chat_completion(chat, temperature=0, max_tokens=16)
    llama.close()
    assert answer["usage"]["prompt_tokens"] == prompt.shape[1]
    assert answer["choices"][0]["message"]["content"] == wanted
    assert "Paris" in wanted


def test_fit_makes_the_file_that_it_told(tmp_path):
    """Bytes within the budget; what is chosen runs in llama.cpp as it was measured."""
    texts = Calibration(samples=8, length=128), Evaluation(max_tokens=1024, rounds=0)
    recipe = Recipe("tiny-moe", str(tmp_path / "out"), (), *texts)
    config = FitConfig(memory=3_600_000, types=("q8_0", "q4_k_m"), windows=4, confirm=1)
    record = fit(recipe, config)
    made = record.measured["gguf"]
    file = tmp_path / "out" / made["file"]
    assert file.stat().st_size == made["bytes"] <= 3_600_000
    tokens = evaluation_tokens("", resolve("tiny-moe").tokenizer, 512, 1024)
    losses = [F.cross_entropy(logits_in(file, ids)[:-1], ids[1:]) for ids in tokens.input_ids]
    assert torch.stack(losses).mean().exp().item() == pytest.approx(made["perplexity"], rel=5e-3)


@pytest.mark.parametrize("config", [PruneConfig(keep=6), SlimConfig(keep=2 / 3, multiple=32)])
def test_no_file_takes_more_than_was_told(config, tmp_path):
    """Whatever its folder is called, and whatever card lies there."""
    source = resolve("tiny-moe")
    config = replace(config, score="magnitude" if config.verb == "slim" else "random", refit=False)
    folder = tmp_path / "a_folder_with_a_long_name_that_the_converter_takes_for_the_model's-v1.0"
    verb(config.verb, "tiny-moe", config).save(folder)
    tags = ", ".join(f"tag-{number}" for number in range(100))
    (folder / "README.md").write_text(f"---\nlicense: mit\ntags: [{tags}]\n---\n")
    files = Files(source, "none", tmp_path)
    built = Skeleton(resolve(str(folder)).config, None)
    args = ExportArgs(to="gguf", type="q8_0")
    groups = dict.fromkeys(files.original.layout.group_of.values(), "q4_0")
    sizes = files.size(built, args), files.layout(built).size(groups)
    for types, size in zip((None, groups), sizes, strict=True):
        actual = files.make(folder, tmp_path / "model.gguf", args, types)["bytes"]
        assert size - 32 <= actual <= size


# --- rounding ------------------------------------------------------------------------------------


def layers_of(file, arch, layers, experts, key_heads, width, tied):
    """A file with the tensors of a model whose rows are few."""
    writer, generator = GGUFWriter(file, arch), np.random.default_rng(0)
    sizes = {"context_length": 64, "embedding_length": 256, "block_count": layers,
             "feed_forward_length": width, "attention.head_count": 8,
             "attention.head_count_kv": key_heads, "rope.dimension_count": 32,
             "expert_count": experts, "expert_used_count": min(experts, 2)}  # fmt: skip
    for name, size in sizes.items():
        writer.add_uint32(f"{arch}.{name}", size)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_file_type(0)
    stack, stacked = ((experts,), "_exps") if experts else ((), "")
    shapes = {"token_embd": (4, 256), **({} if tied else {"output": (4, 256)})}
    for i in range(layers):
        shapes |= {f"blk.{i}.attn_{part}": (2, 256) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{part}{stacked}": (*stack, 2, 256) for part in ("up", "gate")}
        shapes |= {f"blk.{i}.ffn_down{stacked}": (*stack, 2, width), f"blk.{i}.attn_norm": (256,)}
        shapes |= {f"blk.{i}.ffn_gate_inp": (experts, 256)} if experts else {}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape, np.float32))
    finish(writer)


def by_its_own_program(file, out, type, weights):
    """What ``llama-quantize`` calls."""
    llama = pytest.importorskip("llama_cpp.llama_cpp")
    params = llama.llama_model_quantize_default_params()
    means = [(name.encode(), mean_I.numpy()) for name, mean_I in weights.items()]
    entries = (llama.llama_model_imatrix_data * (len(means) + 1))()
    for entry, (name, mean_I) in zip(entries, means, strict=False):
        entry.name, entry.size = name, mean_I.size
        entry.data = mean_I.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params.imatrix = entries if means else None
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{type.upper()}")
    assert not llama.llama_model_quantize(bytes(file), bytes(out), ctypes.byref(params))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("arch", "layers", "experts", "key_heads", "width"),
    [
        ("llama", 17, 0, 8, 256),
        ("qwen2", 17, 0, 2, 96),
        ("llama", 80, 0, 2, 256),
        ("llama", 33, 8, 2, 256),
        ("qwen3moe", 16, 4, 4, 40),
    ],
)
def test_files_are_those_of_its_own_quantiser(
    arch, layers, experts, key_heads, width, tied, tmp_path
):
    file, own, theirs = (tmp_path / name for name in ("whole", "own", "theirs"))
    layers_of(file, arch, layers, experts, key_heads, width, tied)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.rand(tensor.shape[0] * math.prod(tensor.shape[2:]), generator=generator)
        for name, tensor in tensors_of(file).items()
        if name.startswith("blk") and len(tensor.shape) > 1
    }
    for type in get_args(GgufType)[3:]:
        for given in (weights, {}):
            if given or not by_text(type):
                by_its_own_program(file, theirs, type, given)
                quantised_file(file, own, type, given)
                assert tensors_of(own) == tensors_of(theirs), (type, bool(given))
                assert own.read_bytes() == theirs.read_bytes(), (type, bool(given))
