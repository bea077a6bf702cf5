"""GGUF files: every weight as transformers has it, one at a time; refused where that is not so."""

import errno
import itertools
import json
import os
import re
import shutil
import struct
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import scipy.optimize
import torch
from builders import (
    APART,
    OLD,
    altered,
    drawn,
    equal,
    few_forms,
    finish,
    loaded,
    logits,
    nightly,
    pages,
    predicting,
    quantised_file,
    stored,
    tiny_model,
    tiny_moe,
    values_in,
    weights,
)
from gguf import GGMLQuantizationType as Type
from shrunken import small_model
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import FitConfig, MoesaicError, PruneConfig, Recipe, SlimConfig
from moesaic.arch.lookup import base_arch
from moesaic.config import Calibration, Evaluation, ExportArgs
from moesaic.exports import llamacpp, quantised_model, quantiser
from moesaic.exports.allocation import Price, least
from moesaic.exports.llamacpp import find_converter
from moesaic.exports.native import head_dim_of
from moesaic.exports.quantiser import OTHERS, ModelFacts, mixture, tensors_of, types_of
from moesaic.fitting.candidates import Candidate
from moesaic.fitting.gguf_files import Files
from moesaic.fitting.run import search_and_make
from moesaic.fitting.search import Search
from moesaic.io.gguf import folder_of
from moesaic.io.naming import Naming
from moesaic.io.source import resolve
from moesaic.metrics import gguf_engine
from moesaic.metrics.evaluate import quantise_in_place
from moesaic.metrics.forward import Layerwise
from moesaic.metrics.gguf_engine import library
from moesaic.metrics.score import qualities
from moesaic.observation.changes import estimates
from moesaic.observation.stream import LayerStream
from moesaic.sizes import Skeleton

pytestmark = pytest.mark.filterwarnings("ignore")
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""What llama.cpp calls an architecture."""
SHARED_WIDTH = "shared_expert_intermediate_size"


def stacked(model, folder):
    """A model's published tensors with experts stacked, by llama.cpp's names."""
    model.save_pretrained(folder)
    parts, tensors, architecture = {}, weights(folder), ARCHITECTURES[model.config.model_type]
    kind = gguf.MODEL_ARCH[architecture.upper().replace("-", "_")]
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    for name in sorted(tensors, key=lambda n: [int(p) if p.isdigit() else 0 for p in n.split(".")]):
        plain = re.sub(r"(?<=experts)\.\d+", "", name)
        short = names.get_name(plain, (".weight", ".bias")) or plain
        parts.setdefault(short, []).append(tensors[name].float().numpy())
    return {n: np.stack(p) if "_exps" in n else p[0] for n, p in parts.items()}


def add_vocabulary(writer, tokenizer):
    """A byte-level tokenizer, as llama.cpp's converter writes it."""
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary["vocab"], key=vocabulary["vocab"].get))
    writer.add_token_types([3] + [1] * (len(vocabulary["vocab"]) - 1))
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_eos_token_id(0)
    if OLD:  # it reads no file without one
        writer.add_bos_token_id(0)


def interleaved(rows, heads):
    """Rows of a head as llama.cpp's rotation wants them: the halves by turns."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def written(model, tokenizer, file, kind=Type.F32, change=lambda tensors: None, **said):
    """A model as a GGUF file, by hand; matrices in a type, vectors and routers in float32."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    numbers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "feed_forward_length": config.intermediate_size,
        "rope.dimension_count": head_dim_of(config),
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.value_length": getattr(config, "head_dim", None),
        "expert_count": getattr(config, "num_experts", getattr(config, "num_local_experts", None)),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, SHARED_WIDTH, None),
        **said,
    }
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    for field, value in numbers.items():
        if value is not None:
            name = field if field.startswith("split") else f"{architecture}.{field}"
            writer.add_uint32(name, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_parameters["rope_theta"])
    add_vocabulary(writer, tokenizer)
    tensors = stacked(model, file.with_suffix(""))
    change(tensors)
    for name, tensor in tensors.items():
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            heads = config.num_attention_heads if "_q" in name else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        plain = tensor.ndim < 2 or "ffn_gate_inp" in name
        own = Type.F32 if plain or name in KEPT else kind
        if "ffn_gate_inp_shexp" in name:
            tensor = tensor[0]
        data = tensor if own == Type.F32 else gguf.quants.quantize(tensor, own)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=own)
    finish(writer)
    shutil.rmtree(file.with_suffix(""))
    return file


KEPT = ("output.weight",)
"""Matrices that are kept in float32, so that a file has several types."""
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}


def model_of(model_type, experts=4, **sizes):
    sizes = {**SIZES, **sizes}
    if model_type in ("llama", "qwen2"):
        sizes |= {"mlp_bias": False} if model_type == "llama" else {}
        return tiny_model(model_type, **sizes)
    width = sizes["intermediate_size"]
    if model_type == "mixtral":
        return tiny_moe(model_type, experts, **sizes)
    extra = {"mlp_only_layers": [], "moe_intermediate_size": width}
    if model_type == "qwen2_moe":
        extra["shared_expert_intermediate_size"] = 2 * width
    return tiny_moe(model_type, experts, **sizes, **extra)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))


def needs_llamacpp(converter=False):
    try:
        library()
        if converter:
            find_converter()
    except MoesaicError as error:
        pytest.skip(str(error))


def theirs(file, config):
    """transformers' own load; it does not read the experts' width."""
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=config, dtype=torch.float32
    )


def same(model, other):
    return equal(dict(model.state_dict()), dict(other.state_dict()))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen2_moe"])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m"])
def test_values_are_those_of_transformers(model_type, kind, tmp_path, tokenizer):
    """Loaded, and read one by one as the stream does."""
    file = tmp_path / "model.gguf"
    if kind == "q4_k_m":
        needs_llamacpp()
        model = model_of(model_type, hidden_size=256, intermediate_size=256)
        quantised_file(written(model, tokenizer, tmp_path / "whole.gguf"), file, kind, {})
    else:
        file = written(model_of(model_type), tokenizer, file, Type[kind.upper()])
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert len(kinds) > 1, kinds
    assert kind != "q4_k_m" or {"Q4_K", "Q6_K"} <= kinds
    source, wanted = resolve(str(file)), theirs(file, resolve(str(file)).config)
    assert same(source.load(), wanted)
    naming = Naming(source.checkpoint, source.config.model_type)
    naming.check(wanted)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(naming.read(name), tensor), name
    assert source.tokenizer("a word").input_ids == tokenizer("a word").input_ids


def test_a_model_is_quantised_in_memory_as_in_its_file(tmp_path):
    """Beside which results are measured. No block divides the rows of the experts' downs."""
    needs_llamacpp(converter=True)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 64}
    base = stored(small_model("qwen2_moe", norm_topk_prob=False, **sizes), tmp_path / "base")
    file = tmp_path / "model.gguf"
    moesaic.export(base, file, type="q8_0")
    model = resolve(str(base)).load("cpu", torch.float32)
    size = quantise_in_place(model, "q8_0")
    assert size == sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)
    assert same(model, resolve(str(file)).load("cpu", torch.float32))


def test_the_end_of_a_files_name_may_be_in_capitals(tmp_path, tokenizer):
    model = model_of("qwen2")
    file = written(model, tokenizer, tmp_path / "model.gguf").rename(tmp_path / "MODEL.GGUF")
    assert same(resolve(str(file)).load(), model)


def test_a_head_that_is_the_embeddings_is_not_missed(tmp_path, tokenizer):
    base = model_of("llama", tie_word_embeddings=True)
    file = written(base, tokenizer, tmp_path / "model.gguf")
    assert "output.weight" not in tensors_of(file)
    model = resolve(str(file)).load()
    assert same(model, base)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_a_mixture_is_what_it_was_made_from(model_type, tmp_path, tokenizer, tokens):
    """Mixtral too, which transformers would take for a dense Llama."""
    model = model_of(model_type)
    source = resolve(str(written(model, tokenizer, tmp_path / "model.gguf")))
    assert source.config.model_type == model_type
    assert source.config.num_experts_per_tok == 2
    assert same(source.load(), model)
    assert torch.allclose(logits(source.load(), tokens), logits(model, tokens), atol=1e-5)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 64}
ROTARY: dict[str, tuple[dict[str, Any], bool]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, True),
    "yarn": ({"rope_type": "yarn", "beta_fast": 16.0, **STRETCHED}, True),
    "yarn, louder": ({"rope_type": "yarn", "attention_factor": 2.0, **STRETCHED}, False),
    "llama3": ({**LLAMA3, "original_max_position_embeddings": 8192}, True),
    "llama3, of another length": ({**LLAMA3, "original_max_position_embeddings": 64}, False),
}
"""Rotary scalings, and whether a file says all about them."""


@pytest.mark.parametrize("which", ROTARY)
def test_rotary_scaling_is_read_or_refused(which, tmp_path, tokens):
    """transformers reads none of it."""
    needs_llamacpp(converter=True)
    scaling, read = ROTARY[which]
    rope = {"rope_theta": 500_000.0, **scaling}
    model = model_of("llama", rope_parameters=rope, max_position_embeddings=16384)
    file = tmp_path / "model.gguf"
    moesaic.export(stored(model, tmp_path / "model"), file)
    if read:
        assert torch.equal(logits(resolve(str(file)).load(), tokens), logits(model, tokens))
    else:
        with pytest.raises(MoesaicError, match="its rotary scaling is none that is read"):
            resolve(str(file))


def test_from_a_file_to_a_result(tmp_path, tokenizer, command):
    """By the command line; estimated beforehand, and the same as of what transformers loads."""
    file = written(model_of("qwen2_moe"), tokenizer, tmp_path / "model.gguf", Type.Q8_0)
    plain = model_of("qwen2_moe")  # transformers saves what it read of a file under other names
    plain.load_state_dict(theirs(file, resolve(str(file)).config).state_dict())
    stored(plain, tmp_path / "plain")
    text = pages("calibration")
    wanted = "--keep", "3", "--samples", "4", "--length", "16", "--no-eval", "--calibration", text
    for base, out in ((file, "a"), (tmp_path / "plain", "b")):
        assert command("prune", base, tmp_path / out, *wanted)[0] == 0
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    code, said, _ = command("prune", file, tmp_path / "c", *wanted, "--dry-run", "--json")
    size = sum(f.stat().st_size for f in (tmp_path / "a").glob("model*.safetensors"))
    assert code == 0
    assert json.loads(said)["estimate"]["output_bytes"] == size


def test_a_file_is_as_large_as_it_is(tmp_path, tokenizer, done):
    """Not as the folder that it is unpacked into, in float32."""
    model = model_of("llama")
    file = written(model, tokenizer, tmp_path / "model.gguf", Type.Q8_0)
    stored(model, tmp_path / "plain")
    text = "--data", pages("evaluation"), "--length", "16", "--max-tokens", "200"
    said = done("eval", file, "--against", tmp_path / "plain", *text)
    assert "smaller on disk" in said
    assert resolve(str(file)).nbytes == file.stat().st_size


TEXT = ("--samples", "4", "--length", "16", "--calibration", "{text}", "--no-eval")
VERBS = {
    "qwen2_moe": {
        "slim": ["{out}", "--keep", "0.5", "--refit", *TEXT],
        "observe": ["{out}", *TEXT[:-1]],
        "tune": ["{out}", "--what=all", "--steps=1", "--length=16", "--train={text}", "--no-eval"],
        "eval": ["--max-tokens", "64", "--data", "{text}"],
        "inspect": [],
        "generate": ["a word", "--new-tokens", "2"],
        "export": ["{out}"],
    },
    "llama": {"carve": ["{out}", "--method", "more", "--active", "0.85", "--refit", *TEXT]},
}
"""What each verb is given beside a file; a mixture's are tried on a mixture."""


@pytest.mark.parametrize("model_type", VERBS)
def test_every_verb_takes_a_file(model_type, tmp_path, tokenizer, command):
    file = written(model_of(model_type), tokenizer, tmp_path / "model.gguf", Type.Q8_0)
    failed = {}
    for verb, words in VERBS[model_type].items():
        said = [word.format(out=tmp_path / verb, text=pages("calibration")) for word in words]
        code, _, wrong = command(verb, file, *said)
        if code:
            failed[verb] = wrong
    assert failed == {}


@pytest.mark.skipif(OLD, reason="this transformers reads no such file")
@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", nightly("qwen3_5_text")])
def test_hybrids_are_converted_tensor_by_tensor(model_type, tmp_path, tokenizer, command):
    """As transformers converts them whole, without layers that predict tokens; on to a result."""
    needs_llamacpp(converter=True)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    sizes = {"vocab_size": len(tokenizer), "head_dim": 32, "linear_num_value_heads": 4}
    model, file = small_model(model_type, rope_parameters=rope, **sizes), tmp_path / "model.gguf"
    tokenizer.save_pretrained(predicting(model, tmp_path / "base", start=APART))
    moesaic.export(tmp_path / "base", file, type="f16")
    assert any("nextn" in name for name in tensors_of(file))
    source = resolve(str(file))
    wanted_model = theirs(file, source.config)
    assert same(source.load(), wanted_model)
    assert source.config.model_type == model_type
    stored(wanted_model, tmp_path / "plain")
    text = "--samples", "4", "--length", "16", "--no-eval", "--calibration", pages("calibration")
    wanted = ("prune", "--keep", "6") if "moe" in model_type else ("slim", "--keep", "0.5")
    for base, out in ((file, "a"), (tmp_path / "plain", "b")):
        assert command(wanted[0], base, tmp_path / out, *wanted[1:], *text)[0] == 0
    assert same(loaded(tmp_path / "a"), loaded(tmp_path / "b"))
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes().replace(b"blk.0.ssm_beta.weight", b"blk.9.ssm_beta.weight"))
    with pytest.raises(MoesaicError, match=r"short.gguf has no tensor .*in_proj_b"):
        resolve(str(short))


def test_every_expert_of_a_file_is_read_or_none(tmp_path, tokenizer):
    """A router and fields that say fewer left the last ones out."""
    file = tmp_path / "model.gguf"

    def fewer(tensors):
        for layer in range(2):
            tensors[f"blk.{layer}.ffn_gate_inp.weight"] = np.zeros((2, 64), np.float32)

    written(model_of("mixtral"), tokenizer, file, change=fewer, expert_count=2)
    with pytest.raises(MoesaicError, match=r"of shape 4 x .* and its config asks for 2 x "):
        resolve(str(file))


GONE, NONE = altered("blk.1.ffn_up.weight"), lambda tensors: None
UNKNOWN = altered("blk.1.ffn_gate_inp.weight", lambda _: np.zeros((4, 64), np.float32))
NARROWED = altered("blk.0.ffn_up.weight", lambda up: up[:32])
TURNED = altered("blk.0.attn_k.weight", lambda keys: keys.reshape(64, 32))


@pytest.mark.parametrize(
    ("change", "said", "message"),
    [
        (GONE, {"block_count": None}, r"has no field llama\.block_count"),
        (GONE, {"context_length": None}, r"has no field llama\.context_length"),
        (GONE, {"expert_count": 4, "expert_used_count": None}, "no field llama.expert_used_count"),
        (NONE, {"rope.dimension_count": 8}, "its rotary scaling is none that is"),
        (GONE, {}, r"'llama' and has no tensor for model\.layers\.1\.mlp\.up_proj\.weight"),
        (UNKNOWN, {}, r"a llama has no place for: blk\.1\.ffn_gate_inp\.weight"),
        (
            NARROWED,
            {},
            "blk.0.ffn_up.weight in .* is of shape 32 x 64, and its config asks for 64 x",
        ),
        (TURNED, {}, "blk.0.attn_k.weight in .* is of shape 64 x 32, and its config asks for 32 x"),
        (NONE, {"split.count": 3}, "one of several parts; merge them"),
    ],
)
def test_what_would_be_wrong_is_refused(change, said, message, tmp_path, tokenizer, command):
    file = written(model_of("llama"), tokenizer, tmp_path / "model.gguf", change=change, **said)
    with pytest.raises(MoesaicError, match=message):
        resolve(str(file))
    assert command("prune", file, tmp_path / "out")[0] == 2
    assert not [*(tmp_path / "cache").glob("*")]


@pytest.mark.parametrize(
    ("name", "back", "code", "value", "message"),
    [
        ("blk.0.attn_q.weight", -8, "Q", 0, "begins at byte 0 of the data, not "),
        ("blk.0.attn_q.weight", -8, "Q", 2**64 - 32, "begins at byte 18,446,744,073,709,551,584"),
        ("blk.0.attn_norm.weight", -12, "I", 1, "begins at byte .* of the data, not "),  # f16
        ("blk.0.attn_norm.weight", -12, "I", 99, "99 is not a valid"),
        ("", None, "", 0, "it ends within its tensors, which take"),
    ],
)
def test_tensors_lie_one_after_the_other_as_ggml_wants_them(
    name, back, code, value, message, tmp_path, tokenizer
):
    """Others were read from a wrong place, or as a type that takes less room."""
    file = written(model_of("llama"), tokenizer, tmp_path / "model.gguf")
    content = bytearray(file.read_bytes())
    if name:
        ranks = 1 if "norm" in name else 2
        end = content.index(name.encode()) + len(name) + 4 + 8 * ranks + 4 + 8
        struct.pack_into(f"<{code}", content, end + back, value)
    else:
        del content[-1:]
    file.write_bytes(content)
    with pytest.raises(MoesaicError, match=f"cannot be read as GGUF: .*{message}"):
        resolve(str(file))


def test_a_folder_in_the_cache_is_of_one_version_of_transformers(tmp_path, monkeypatch):
    """Names of weights and of a config's attributes are its."""
    monkeypatch.setattr(
        "moesaic.io.gguf._unfold", lambda file, work: (work / "config.json").touch()
    )
    file = tmp_path / "model.gguf"
    file.touch()
    first, again = folder_of(file), folder_of(file)
    monkeypatch.setattr("transformers.__version__", "0")
    assert first == again != folder_of(file)


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr("moesaic.io.gguf._unfold", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(MoesaicError, match=r"No space left.*MOESAIC_CACHE may name another"):
            resolve(str(tmp_path / "model.gguf"))
    monkeypatch.setenv("MOESAIC_CACHE", "/proc/cache")
    with pytest.raises(MoesaicError, match="is unpacked into /proc/cache, which cannot be written"):
        resolve(str(tmp_path / "model.gguf"))


def test_architectures_and_types_that_are_not_read(tmp_path, tokenizer, monkeypatch):
    for name, message in (
        ("grok", "architecture grok is not supported"),
        ("gpt-oss", "transformers misreads the rotary scaling"),
    ):
        monkeypatch.setitem(ARCHITECTURES, "llama", name)
        with pytest.raises(MoesaicError, match=message):
            resolve(str(written(model_of("llama"), tokenizer, tmp_path / f"{name}.gguf")))
    monkeypatch.undo()
    file = written(model_of("llama"), tokenizer, tmp_path / "model.gguf")
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    whole = file.read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MoesaicError, match="cannot be read as GGUF"):
        resolve(str(tmp_path / "short.gguf"))
    monkeypatch.setattr("gguf.dequantize", lambda *_: (_ for _ in ()).throw(NotImplementedError))
    with pytest.raises(MoesaicError, match="tensors of type F32, which is not read"):
        resolve(str(file))


# --- types layer by layer ------------------------------------------------------------------------


def test_the_least_loss_within_a_budget_is_that_of_every_choice_tried():
    rng = np.random.default_rng(0)
    for _ in range(20):
        losses, sizes = rng.random((4, 3)) * 1e-4, rng.integers(1, 50, (4, 3)).astype(float)
        budget = sizes.min(1).sum() + float(rng.integers(60))
        every = itertools.product(range(3), repeat=4)
        fits = [c for c in every if sum(sizes[g, t] for g, t in enumerate(c)) <= budget]
        wanted = [sum(losses[g, t] for g, t in enumerate(c)) for c in fits]
        found = least(losses, sizes, budget)
        assert tuple(found) in fits
        assert sum(losses[g, t] for g, t in enumerate(found)) == pytest.approx(min(wanted))


def test_what_the_solver_prints_is_dropped(monkeypatch, capfd):
    """As HiGHS does now and then, past Python's own stream."""
    milp = scipy.optimize.milp

    def printing(*args, **options):
        os.write(1, b"tmpSolver.run();")
        return milp(*args, **options)

    monkeypatch.setattr(scipy.optimize, "milp", printing)
    assert least(np.array([[0.0, 1.0]]), np.array([[2.0, 1.0]]), 1) == [1]
    os.write(1, b"after")
    assert capfd.readouterr() == ("after", "")


@pytest.fixture
def converted(tmp_path, tokenizer, tokens):
    """Of a small model of a type, its file in f32 with what ggml's quantiser makes of it."""
    needs_llamacpp()
    from moesaic.exports.llamacpp import ConvertedFile

    def made(model_type, width=256, change=lambda model: None, experts=2):
        model = model_of(model_type, experts=experts, hidden_size=256, intermediate_size=width)
        with torch.no_grad():
            change(model)
        folder, file = stored(model, tmp_path / "model"), tmp_path / "whole.gguf"
        written(model, tokenizer, file)
        found = ConvertedFile(folder, file)
        found.tokens = tokens.rows(slice(2))
        return found

    return made


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2"])
def test_layers_get_the_types_of_least_kl_within_a_budget(model_type, converted, tmp_path):
    """What adds next to nothing is the first to become narrow."""

    def idle(model):
        base_arch(model.config).layers(model)[1].self_attn.v_proj.weight.mul_(1e-6)

    whole, among = converted(model_type, change=idle), ("q8_0", "q2_k")
    names = dict.fromkeys(whole.layout.group_of.values())
    wide, narrow = (whole.layout.least([type]) for type in among)
    wanted = {name: "q2_k" if name == "attn 1" else "q8_0" for name in names}
    budget = whole.layout.size(wanted)
    assert narrow < budget < wide
    assert whole.quantised.best(among, budget) == wanted
    assert whole.layout.size(whole.quantised.best(among, budget - 1)) < budget
    assert set(whole.quantised.best(among, narrow).values()) == {"q2_k"}
    with pytest.raises(MoesaicError, match="out of reach: the least is"):
        whole.quantised.best(among, narrow - 1)
    with values_in(whole.whole) as values:
        whole.mixed(tmp_path / "made.gguf", wanted, values)
    assert (tmp_path / "made.gguf").stat().st_size == budget


@pytest.mark.parametrize(
    ("model_type", "width", "low"),
    [
        ("mixtral", 96, "iq2_xxs"),
        ("qwen2", 256, "iq2_xxs"),
        pytest.param("mixtral", 96, "iq1_s", marks=pytest.mark.nightly),  # ggml takes long for it
    ],
)
def test_a_model_in_memory_has_the_values_and_the_bytes_of_its_file(
    model_type, width, low, converted, tmp_path
):
    """Rows that blocks do not divide, and types that round by text, among them."""
    whole, file = converted(model_type, width), tmp_path / "made.gguf"
    types = dict.fromkeys(whole.quantised.groups, "q2_k")
    types |= {"attn 0": low, "down 1": "iq2_xxs", "gate-up 0": "q3_k", "attn 1": "q6_k"}
    assert types.keys() == {*whole.layout.group_of.values()}
    batch = whole.tokens
    for chosen in (types, dict.fromkeys(types, low), dict.fromkeys(types, "q5_k")):
        with values_in(whole.whole) as values:
            whole.mixed(file, chosen, values)
        assert file.stat().st_size == whole.layout.size(chosen)
        read = resolve(str(file)).load("cpu", torch.float32)
        change = partial(whole.quantised.quantising, chosen)
        run = Layerwise(whole.native, dtype=torch.float32, change=change)
        ((logits, _),) = run.run([batch]).logits
        with torch.no_grad():
            torch.testing.assert_close(logits, read(batch.input_ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("type", ["q8_0", "q4_k", "iq2_xxs"])
def test_rows_are_the_same_however_many_threads_round_them(type, monkeypatch):
    """Those of one matrix, row by row, and of several, each by its own inputs' weights."""
    needs_llamacpp()
    matrix_ERI, weights_EI = drawn(2, 300, 256), drawn(2, 256, seed=1).abs()
    each = [
        quantiser.held_rows(matrix_ERI[e, row : row + 1], type, weights_EI[e])
        for e in range(2)
        for row in range(300)
    ]
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        held = quantiser.held_rows(matrix_ERI, type, weights_EI.flatten())
        assert np.array_equal(held, np.concatenate(each))


def test_kept_rows_are_those_of_the_quantiser(tmp_path):
    """They are read for the same rows, type and inputs' weights, whatever matrix they are in."""
    needs_llamacpp()
    matrix_ERI, weights_EI = drawn(2, 300, 256), drawn(2, 256, seed=1).abs()
    kept = quantiser.KeptRows(tmp_path, room=0)
    requests = [
        (matrix_ERI, "q4_k", weights_EI),
        (matrix_ERI, "q4_k", weights_EI.flip(1)),
        (matrix_ERI, "q4_k", None),
        (matrix_ERI, "q2_k", weights_EI),
        (matrix_ERI[:, :128], "q4_k", weights_EI),
    ]
    for request in requests * 2:
        assert np.array_equal(quantiser.held_rows(*request, kept), quantiser.held_rows(*request))
    made = []
    for values in (matrix_ERI[0].numpy(), matrix_ERI[0].numpy(), matrix_ERI[1].numpy()):
        kept.fill(np.zeros((300, 1), np.uint8), lambda: made.append(1), "q4_k", values)
    assert len(made) == 2
    kept.clear()
    first = requests[0]
    assert np.array_equal(quantiser.held_rows(*first, kept), quantiser.held_rows(*first))
    kept.fill(np.zeros((300, 1), np.uint8), lambda: made.append(1), "q4_k", matrix_ERI[0].numpy())
    assert len(made) == 3, "what was cleared is made again"


def test_rows_are_not_kept_without_room_on_the_disk(tmp_path):
    made, kept = [], quantiser.KeptRows(tmp_path, room=1 << 62)
    for _ in range(2):
        kept.fill(np.zeros((1, 1), np.uint8), lambda: made.append(1), "q4_k")
    assert len(made) == 2


def test_one_type_rounds_by_text_too(converted, tmp_path):
    whole, file = converted("qwen2"), tmp_path / "made.gguf"
    with values_in(whole.whole) as values:
        whole.uniform(file, "iq2_xxs", values)
    assert {"blk.0.attn_q.weight", "blk.1.ffn_down.weight"} <= {*whole.weights}
    assert "iq2_xxs" in types_of(tensors_of(file))


def test_values_of_a_conversion_are_not_on_disk(tmp_path, tokenizer):
    """They are those of a whole file, in its order; nobody has to read them."""
    needs_llamacpp(converter=True)
    folder, whole, hollow = (tmp_path / name for name in ("base", "whole.gguf", "hollow.gguf"))
    stored(small_model("mixtral", vocab_size=4096), folder)
    tokenizer.save_pretrained(folder)
    given = find_converter(), folder, folder
    llamacpp.convert(*given, whole, "f32")
    with llamacpp.converting(*given, hollow, "f32") as values:
        held = values.read()
    with values_in(whole) as wanted:
        assert held == wanted.read()
    assert tensors_of(hollow) == tensors_of(whole)
    assert hollow.stat().st_size == whole.stat().st_size
    assert hollow.stat().st_blocks < whole.stat().st_blocks / 2
    with llamacpp.converting(*given, hollow, "f32"):
        pass


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        ("OSError: stopped", MoesaicError, "refused base: OSError: stopped"),
        ("OSError: 2000 requested and 1000 written", OSError, "No space left on device"),
        (None, MoesaicError, "Values of base are missing"),
    ],
)
def test_a_converter_that_stops_among_the_values_is_refused(
    trouble, error, message, tmp_path, monkeypatch
):
    folder, whole = stored(small_model("qwen2"), tmp_path / "base"), tmp_path / "whole.gguf"
    out, writer = tmp_path / "made.gguf", gguf.GGUFWriter(whole, "qwen2")
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
    finish(writer)

    def run(_, request, output):
        os.write(output, b"\n" + bytes(100))
        return trouble

    monkeypatch.setattr(llamacpp, "run_script", run)
    reader = gguf.GGUFReader(whole)
    tensors = quantiser.begin_file(reader, out, "q8_0", {})
    given = Path("script.py"), folder, folder, whole, "f32"
    refused = pytest.raises(error, match=message)
    with refused, llamacpp.converting(*given) as values:
        quantiser.fill_file(out, tensors, reader, values, {})


def test_an_architecture_that_the_package_gguf_does_not_know_is_refused(converted, monkeypatch):
    monkeypatch.setattr(gguf, "MODEL_ARCH_NAMES", {})
    with pytest.raises(MoesaicError, match="gguf does not know 'qwen2'.*type=f16 works"):
        converted("qwen2")


def test_the_kl_of_rounding_a_group_is_estimated(converted):
    """Each as the whole model with that group quantised; tied embeddings with their head."""
    whole = converted("qwen2")
    quantised, tokens = whole.quantised, whole.tokens
    stream = LayerStream.from_disk(
        whole.native.checkpoint,
        whole.native.config,
        quantised.arch,
        tokens,
        view=lambda layer: layer,
    )
    found = estimates(stream, quantised.changes(["q5_k"]), 64).kl_CN.mean(1).tolist()
    reference = Layerwise(whole.native, dtype=torch.float32, keep=True)
    for group, kl in zip(quantised.groups, found, strict=True):
        change = partial(quantised.quantising, {group: "q5_k"})
        changed = Layerwise(whole.native, dtype=torch.float32, change=change)
        assert kl == pytest.approx(qualities([changed, reference], tokens)[0].kl, rel=0.5), group


@pytest.mark.parametrize(
    ("held", "computed"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_weights_are_as_they_were_after_their_price(held, computed, converted, monkeypatch):
    """Bitwise, whatever bfloat16 holds or layers compute in. Of large experts two are quantised."""
    monkeypatch.setattr(quantised_model, "SAMPLED_VALUES", 1)
    quantised = converted("mixtral", experts=4).quantised
    layer = quantised.source.load().to(held).to(computed).model.layers[1]
    weights = layer.mlp.experts.down_proj.data
    before, count = weights.clone(), len(weights)
    assert before.bfloat16().to(computed).equal(before) is (held == torch.bfloat16)
    for half, place in enumerate([0, count // 2]):
        with quantised.quantising({"down 1": "q4_k"}, layer, 1, half):
            assert [i for i in range(count) if not weights[i].equal(before[i])] == [place]
        assert weights.equal(before)
    a, b = Price(np.array([[0.3]])), Price(np.array([[0.1]]))
    many = ("gate-up", "down")
    found = [p for g in quantised.groups for p in ([a, b] if g.startswith(many) else [a])]
    prices = quantised.prices(["q4_k"], found)["q4_k"]
    assert prices["attn 1"] is a
    assert prices["down 1"].kl == pytest.approx(count / 2 * (a + b).kl)


def test_filled_rows_have_the_values_of_a_wider_models_file(tmp_path, tokenizer):
    """Rows of 48 get 16 bits of q8_0, whose blocks of 32 fill rows of 64."""
    needs_llamacpp(converter=True)
    small_model("mixtral", intermediate_size=48).save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    tokenizer.save_pretrained(base)
    wider = moesaic.slim(str(base), keep=1, multiple=64).save(tmp_path / "out")
    files = Files(resolve(str(base)), pages("calibration"), tmp_path, samples=2)
    narrow, wide = resolve(str(base)), resolve(str(wider))
    quantised = files.original.quantised
    of_wider = files.quantised(Path(wider), Skeleton(wide.config, None))
    assert quantised.layout.types_in("down 1", "q8_0") == {"blk.1.ffn_down_exps.weight": "f16"}
    filled = quantised.layout.types_in("down 1", "q8_0", filled=True)
    assert filled == of_wider.layout.types_in("down 1", "q8_0")
    layer, other = (source.load().float().model.layers[1] for source in (narrow, wide))
    before = layer.mlp.experts.down_proj.clone()
    with quantised.quantising(filled, layer, 1), of_wider.quantising(filled, other, 1):
        down, wider_down = layer.mlp.experts.down_proj, other.mlp.experts.down_proj
    assert wider_down[..., :48].equal(down)
    assert not wider_down[..., 48:].any()
    assert 0 < (down - before).abs().max() < 0.01 * before.abs().max()
    alone, both = (len(quantised.changes(["q8_0"], filled=filled)) for filled in (False, True))
    assert both == alone + quantised.layout.layers


SMALLER = {"prune": PruneConfig(keep=0.5, score="random", refit=False)}
SMALLER |= {"slim": SlimConfig(keep=0.5, score="magnitude", refit=False)}


@pytest.mark.parametrize(
    ("model_type", "verb"),
    [
        *itertools.product(("mixtral", "gpt_oss", "deepseek_v3", "glm4_moe"), SMALLER),
        ("starcoder2", "slim"),
    ],
)
def test_a_smaller_models_file_has_the_estimated_tensors(model_type, verb, tmp_path, tokenizer):
    """Biases, what only chooses experts, and MTP layers (GLM-4.5) are among them."""
    needs_llamacpp(converter=True)
    mtp = model_type == "glm4_moe"
    model = small_model(model_type, **({"num_nextn_predict_layers": 1} if mtp else {}))
    predicting(model, tmp_path / "base", count=int(mtp))
    tokenizer.save_pretrained(tmp_path / "base")
    getattr(moesaic, verb)(str(tmp_path / "base"), SMALLER[verb]).save(tmp_path / "out")
    files = Files(resolve(str(tmp_path / "base")), "none", tmp_path)
    result = Skeleton(resolve(str(tmp_path / "out")).config, None)
    args = ExportArgs(to="gguf", type="q8_0")
    made = files.make(tmp_path / "out", tmp_path / "made.gguf", args)
    sized, held = files.layout(result).tensors, tensors_of(tmp_path / "made.gguf")
    assert {n: t.shape for n, t in sized.items()} == {n: t.shape for n, t in held.items()}
    assert files.size(result, args) - 32 <= made["bytes"] <= files.size(result, args)


def values_of(file, *names):
    """Tensors of a file, dequantised."""
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    return (torch.from_numpy(gguf.dequantize(held[n].data, held[n].tensor_type)) for n in names)


def test_keys_and_values_of_mla_are_those_of_the_file(tmp_path, tokens):
    """llama.cpp has them in two tensors, by head, of which the keys are transposed."""
    needs_llamacpp(converter=True)
    heads = {"qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64}
    base = stored(small_model("deepseek_v3", **heads), tmp_path / "base")
    files, file = Files(resolve(str(base)), "", tmp_path), tmp_path / "made.gguf"
    files.original.tokens, quantised = tokens.rows(slice(2)), files.original.quantised
    types, size = files.uniform(None, "iq3_xxs")
    made = files.make(None, file, ExportArgs(to="gguf", type="iq3_xxs"))
    assert size == made["bytes"]
    assert types["blk.1.attn_k_b.weight"] == types["blk.1.attn_v_b.weight"] == "iq4_nl"
    keys_HIN, values_HNI = values_of(file, *(f"blk.1.attn_{part}_b.weight" for part in "kv"))
    model = files.source.load("cpu", torch.float32)
    with torch.no_grad(), quantised.quantising(types, model.model.layers[1], 1) as layer:
        found = layer.self_attn.kv_b_proj.weight
        assert found.equal(torch.cat([keys_HIN.mT, values_HNI], 1).flatten(0, 1))


UNSIZED = ("gpt_bigcode", "granitemoehybrid", "lfm2", "llama4_text")
MEASURED = (*UNSIZED, "afmoe", "dots1", "exaone4", "exaone_moe", "glm4_moe", "gpt_oss", "olmo2")
MEASURED += ("qwen2_moe", "qwen3_5_text")
READ = {
    "exaone4": {"layer_types": ["full_attention"] * 4},
    "dots1": {"num_key_value_heads": 4},
    "afmoe": {"mup_enabled": True, "route_norm": True},
}
"""What llama.cpp takes an architecture to have."""


@pytest.mark.skipif(OLD, reason="this transformers reads no such file")
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text", *map(nightly, MEASURED)])
def test_the_values_that_are_measured_are_those_of_the_file(model_type, tmp_path, tokens):
    """Weighed by the same inputs. llama.cpp has heads in another order, or a matrix in two."""
    needs_llamacpp(converter=True)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    sizes |= {"linear_num_value_heads": 4, "linear_value_head_dim": 16}
    sizes["norm_topk_prob"] = model_type != "qwen2_moe"
    sizes = READ.get(model_type, {}) | ({} if model_type in UNSIZED else sizes)
    files = Files(resolve(str(stored(small_model(model_type, **sizes), tmp_path))), "", tmp_path)
    files.original.tokens, quantised = tokens.rows(slice(2)), files.original.quantised
    types, file = files.uniform(None, "q4_k_m")[0], tmp_path / "made.gguf"
    files.make(None, file, ExportArgs(to="gguf", type="q4_k_m"))
    wanted = {name: [] for name in quantised.groups}
    for name, group in quantised.layout.group_of.items():
        wanted[group].append(*(values.flatten() for values in values_of(file, name)))
    for place, layer in enumerate(quantised.arch.layers(files.source.load("cpu", torch.float32))):
        found = {}
        with torch.no_grad(), quantised.quantising(types, layer, place):
            for name, matrix in quantised._held(layer, place).items():
                found.setdefault(quantised.layout.group_of[name], []).append(matrix.flatten())
        for group, matrices in found.items():
            ours, theirs = (torch.cat(x).sort().values for x in (matrices, wanted[group]))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=group)


def test_a_shared_path_that_is_fused_is_two_tensors_of_the_file(tmp_path, tokens):
    needs_llamacpp(converter=True)
    base = small_model("granitemoeshared", hidden_size=64, shared_intermediate_size=32)
    files = Files(resolve(str(stored(base, tmp_path / "base"))), "", tmp_path)
    files.original.tokens, quantised = tokens.rows(slice(2)), files.original.quantised
    types = {group: "q4_0" if group == "shared 0" else "q8_0" for group in quantised.groups}
    assert {"shared 0", "shared 1"} <= types.keys()
    files.make(None, tmp_path / "made.gguf", ExportArgs(to="gguf", memory=1), types)
    names = (f"blk.0.ffn_{part}_shexp.weight" for part in ("gate", "up", "down"))
    gate_MD, up_MD, down_DM = values_of(tmp_path / "made.gguf", *names)
    model = files.source.load("cpu", torch.float32)
    with torch.no_grad(), quantised.quantising(types, model.model.layers[0], 0) as layer:
        assert layer.shared_mlp.input_linear.weight.equal(torch.cat([gate_MD, up_MD]))
        assert layer.shared_mlp.output_linear.weight.equal(down_DM)


@pytest.mark.parametrize("types", [("q8_0",), ("q8_0", "q4_0")])
@pytest.mark.parametrize("model_type", ["deepseek_v3", nightly("olmoe"), nightly("glm4_moe")])
def test_a_file_that_transformers_cannot_read_is_found_and_measured(
    model_type, types, tmp_path, tokenizer, monkeypatch
):
    """DeepSeek's MLA and GLM-4.5's MTP layers among them."""
    needs_llamacpp(converter=True)
    monkeypatch.setattr("moesaic.fitting.search.forms", few_forms)
    mtp = model_type == "glm4_moe"
    changes = {"glm4_moe": {"num_nextn_predict_layers": 1}, "olmoe": {"num_key_value_heads": 4}}
    model = small_model(model_type, **changes.get(model_type, {}))
    predicting(model, tmp_path / "base", count=int(mtp))
    tokenizer.save_pretrained(tmp_path / "base")
    files = Files(resolve(str(tmp_path / "base")), "none", tmp_path)
    budget = int(1.01 * files.original.layout.least(types[-1:]))
    texts = [Calibration(samples=4, length=32)]
    texts += [Evaluation(length=32, max_tokens=128, rounds=0, new_tokens=2)]
    recipe = Recipe(str(tmp_path / "base"), str(tmp_path / "out"), (), *texts)
    config = FitConfig(memory=budget, types=types, windows=4, confirm=1)
    record = search_and_make(recipe, config)
    made = record.measured["gguf"]
    assert made["bytes"] <= budget
    assert made["kl"] < 0.1


SEARCHED = ("olmoe", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoeshared")
SEARCHED += ("qwen3_next", "afmoe", "dots1", "exaone_moe", "granitemoehybrid", "llama4_text")


@pytest.mark.parametrize("model_type", ["qwen2_moe", *map(nightly, SEARCHED)])
def test_whole_searches_run_with_all_alternatives(model_type, tmp_path):
    """Of what ships, llama.cpp runs no mixture with a shared expert: at 553055c2 they failed."""
    needs_llamacpp(converter=True)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    sizes |= {"norm_topk_prob": model_type not in ("qwen2_moe", "olmoe"), "num_key_value_heads": 4}
    sizes = READ.get(model_type, {}) | ({} if model_type in UNSIZED else sizes)
    base, types = stored(small_model(model_type, **sizes), tmp_path / "base"), ("q8_0", "q4_0")
    least = Files(resolve(str(base)), "none", tmp_path).original.layout.least(types)
    texts = [Calibration(samples=4, length=32)]
    texts += [Evaluation(length=32, max_tokens=128, rounds=0, new_tokens=2)]
    recipe = Recipe(str(base), str(tmp_path / "out"), (), *texts)
    config = FitConfig(memory=int(0.97 * least), types=types, windows=4, confirm=1)
    made = search_and_make(recipe, config).measured["gguf"]
    assert made["bytes"] <= config.memory
    assert made["kl"] < 0.1


def test_types_that_round_by_text_are_for_tensors_with_text(tmp_path, tokenizer):
    """llama.cpp would end the process; embeddings have no inputs that could be weighed."""
    needs_llamacpp()
    file, out = tmp_path / "whole.gguf", tmp_path / "made.gguf"
    written(model_of("qwen2", hidden_size=256, intermediate_size=256), tokenizer, file)
    up = "blk.0.ffn_up.weight"
    chosen = dict.fromkeys(tensors_of(file), "iq2_xxs")
    tensors = quantised_file(file, out, OTHERS, {up: torch.ones(256)}, chosen)
    assert tensors == tensors_of(out)
    types = {name: tensor.type for name, tensor in tensors.items()}
    assert types[up] == "iq2_xxs"
    assert types["token_embd.weight"] == types["blk.1.ffn_up.weight"] == "q2_k"
    with pytest.raises(
        MoesaicError, match="type=iq1_s needs an importance matrix: leave calibration=none out"
    ):
        ExportArgs(to="gguf", type="iq1_s", calibration="none")


def test_weights_that_are_not_finite_are_refused():
    needs_llamacpp()
    with pytest.raises(MoesaicError, match="q4_k cannot hold these weights"):
        quantiser.held_rows(torch.full((2, 256), torch.nan), "q4_k")


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m"])
def test_no_file_has_values_that_are_not_finite(kind, tmp_path):
    """Norms are in f32 in every file; 1e6 is beyond f16 alone."""
    needs_llamacpp(converter=True)
    model = model_of("qwen2", hidden_size=256, intermediate_size=256)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.inf
        model.model.layers[0].mlp.up_proj.weight[1, 2] = 1e6
    stored(model, tmp_path / "base")
    wrong = "blk.0.ffn_up.weight" if kind == "f16" else "output_norm.weight"
    with pytest.raises(MoesaicError, match=f"{wrong} holds a value that is not finite"):
        moesaic.export(tmp_path / "base", tmp_path / "model.gguf", type=kind, calibration="none")
    assert not (tmp_path / "model.gguf").exists()


def test_a_type_that_rounds_by_text_is_refused_for_a_tensor_without(tmp_path, tokenizer):
    """One type for all: there is no narrower one to take instead."""
    file = tmp_path / "whole.gguf"
    written(model_of("qwen2", hidden_size=256, intermediate_size=256), tokenizer, file)
    with pytest.raises(MoesaicError, match="iq2_xxs rounds blk.0.attn_k.weight by its inputs"):
        quantised_file(file, tmp_path / "made.gguf", "iq2_xxs", {})
    assert not (tmp_path / "made.gguf").exists()


@pytest.mark.parametrize(
    ("type", "experts", "weighed", "downs", "values"),
    [  # of 16 layers, as llama.cpp's own program writes them
        ("q4_k_m", 0, True, "6644644644644666", "6644644644644666"),
        ("q4_k_m", 8, True, "6644644644644666", "8888888888888888"),
        ("q3_k_m", 4, True, "5444444444444444", "5544444444444444"),
        ("q4_0", 0, True, "1100000000000000", "0000000000000000"),
        ("q4_0", 0, False, "0000000000000000", "0000000000000000"),
    ],
)
def test_files_are_mixtures_of_types(type, experts, weighed, downs, values):
    parts = "attn_v", "ffn_down_exps" if experts else "ffn_down"
    rows = dict.fromkeys(("output.weight", "token_embd.weight"), 256)
    rows |= {f"blk.{i}.{part}.weight": 256 for i in range(16) for part in parts}
    types = mixture(rows, type, ModelFacts("llama", 16, experts, 8, 8), weighed)
    assert types["output.weight"] == "q6_k"
    assert types["token_embd.weight"] == type.removesuffix("_m")
    for part, wanted in zip(parts, (values, downs), strict=True):
        digit = 3 if type == "q4_0" else 1
        found = "".join(types[f"blk.{i}.{part}.weight"][digit] for i in range(16))
        assert found == wanted, part


@pytest.mark.parametrize(
    ("part", "type", "weighed", "heads", "experts", "wanted"),
    [
        ("values", "iq3_xxs", True, 2, 0, None),
        ("values", "iq3_xxs", False, 2, 0, "iq3_s"),
        ("values", "iq3_xxs", True, 8, 0, "q4_k"),
        ("values", "iq4_xs", True, 8, 0, "q5_k"),
        ("values", "iq1_s", True, 2, 4, "q4_k"),
        ("attn_output", "iq4_xs", True, 2, 8, "q5_k"),
        ("attn_output", "q4_k_s", True, 2, 8, "q5_k"),
        ("attn_output", "iq1_m", True, 2, 0, "iq2_xxs"),
    ],
)
def test_types_of_attention_are_those_of_llamacpp(part, type, weighed, heads, experts, wanted):
    """llama_tensor_get_type of src/llama-quant.cpp; None is the file's own type."""
    model = ModelFacts("llama", 16, experts, heads, 2)
    assert quantiser._choices(part, 0, 16, model, weighed).get(type) == wanted


def test_a_model_of_70b_is_known_by_its_layers():
    """Their values are a small part of the weights, and have more bits."""
    numbers = {"block_count": 80, "attention.head_count": 64, "attention.head_count_kv": 8}
    fields = {f"llama.{k}": SimpleNamespace(contents=lambda n=n: n) for k, n in numbers.items()}
    model = quantiser._model(fields, "llama")
    assert model == ModelFacts("llama", 80, 0, 64, 8)
    rows = {"blk.9.attn_v.weight": 256, "output.weight": 256}
    assert mixture(rows, "q3_k_m", model, True)["blk.9.attn_v.weight"] == "q5_k"


def test_a_file_is_quantised_part_by_part(tmp_path, monkeypatch):
    """One expert or row at a time gives the same bytes, by the importance of its own inputs."""
    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "llama")
    shapes = {"ffn_down_exps": (3, 5, 256), "attn_q": (7, 256), "attn_norm": (256,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", torch.randn(shape).numpy())
    finish(writer)
    weights = {"blk.0.ffn_down_exps.weight": torch.rand(3 * 256) * 9}
    made = []
    for at_once in (1 << 24, 512, 1):
        monkeypatch.setattr(quantiser, "AT_ONCE", at_once)
        file = tmp_path / f"{at_once}.gguf"
        quantised_file(tmp_path / "whole.gguf", file, "q4_k_m", weights)
        made.append(file.read_bytes())
    assert made[0] == made[1] == made[2]


def test_llamacpp_continues_a_file_and_transformers_where_it_is_not_there(
    tmp_path, tokenizer, monkeypatch
):
    needs_llamacpp()
    file, seen = tmp_path / "model.gguf", []
    written(model_of("llama"), tokenizer, file)
    greedy = gguf_engine.Engine.greedy
    monkeypatch.setattr(
        gguf_engine.Engine, "greedy", lambda *given: seen.append(greedy(*given)) or seen[-1]
    )
    found = [moesaic.generate(file, "The people", new_tokens=8)]
    assert len(seen) == 1
    found.append(moesaic.generate(file, "The people", new_tokens=8, dtype=torch.float32))

    def missing():
        raise MoesaicError(gguf_engine.MISSING)

    monkeypatch.setattr(gguf_engine, "library", missing)
    found.append(moesaic.generate(file, "The people", new_tokens=8))
    assert len(seen) == 1
    assert found[0] == found[1] == found[2] != ""


def test_a_continuation_ends_where_the_text_does(tmp_path, tokenizer):
    needs_llamacpp()
    file = tmp_path / "model.gguf"
    written(model_of("llama"), tokenizer, file)
    prompt = torch.tensor(tokenizer("The people")["input_ids"])
    with gguf_engine.Engine(file, 64) as engine:
        tokens = engine.greedy(prompt, 8)
        end = tokens.index(tokens[3])
        assert engine.greedy(prompt, 8, {tokens[3]}) == tokens[: end + 1]
    assert len(tokens) == 8


def test_an_installed_llamacpp_comes_first(monkeypatch):
    """Where it cannot be loaded xllamacpp is taken; without either one command is named."""
    there = {"llama_cpp": [], "xllamacpp": []}
    monkeypatch.setattr(gguf_engine, "installed", lambda package, _: there[package])
    with pytest.raises(MoesaicError, match=re.escape(gguf_engine.MISSING) + "$"):
        library.__wrapped__()
    broken = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "llama_cpp", broken)
    there["llama_cpp"] = ["llama_cpp.py"]
    with pytest.raises(MoesaicError, match=re.escape(gguf_engine.MISSING) + r" \(.*llama_cpp"):
        library.__wrapped__()
    monkeypatch.undo()
    if files := gguf_engine.installed("xllamacpp", "xllamacpp*.so"):
        monkeypatch.setitem(sys.modules, "llama_cpp", broken)
        there["xllamacpp"] = files
        monkeypatch.setattr(gguf_engine, "installed", lambda package, _: there[package])
        assert library.__wrapped__()[2].startswith("xllamacpp ")


@pytest.mark.nightly
@pytest.mark.parametrize("budget", [2_614_000, 1_700_000])
def test_nothing_that_could_have_been_chosen_is_much_better(budget, tmp_path):
    """All options of nearly the least estimate are made, refitted and measured, too."""
    needs_llamacpp()
    config = FitConfig(memory=budget, types=("q8_0", "q4_k_m", "q2_k"), windows=32)
    recipe = Recipe("tiny-moe", str(tmp_path / "out"), (), Calibration(samples=64, length=256))
    looking = Search(recipe, config, tmp_path / "work")
    chosen, _ = looking.run()
    options = sorted(looking._options(config), key=Candidate.estimate)
    near = [o for o in options if o.estimate() < 2 * options[0].estimate()][:8]
    assert len(near) > 1
    assert chosen.kl <= 1.05 * min(looking.trials.measure(option).kl for option in near)
