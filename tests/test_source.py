"""Models by name: found, or refused with what would work."""

import shutil

import pytest
import torch
from builders import edited, equal, loaded, logits, tiny_model, tiny_moe, weights
from safetensors.torch import save_file

from moesaic.api import evaluate, verb
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.io.outputs import whole_file
from moesaic.io.source import resolve
from moesaic.methods.prune.config import PruneConfig


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


def test_attention_that_is_not_here_is_no_obstacle(tokens, tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    edited(tmp_path / "config.json", _attn_implementation="flash_attention_2")
    source = resolve(str(tmp_path))
    assert torch.equal(logits(source.load(), tokens), logits(model, tokens))
    assert evaluate(str(tmp_path), data=Tokens(tokens.input_ids), stream=True).perplexity > 1


def test_tensors_that_transformers_would_not_find_are_refused(tokens, tmp_path):
    """A language model alone whose names are those within a larger one."""
    tiny_moe("mixtral").save_pretrained(tmp_path)
    base = rewritten(tmp_path, lambda ts: {f"language_model.{n}": t for n, t in ts.items()})
    text, words = Tokens(tokens.input_ids), "named as parts of a larger model"
    with pytest.raises(MoesaicError, match=words):
        verb("prune", base, PruneConfig(keep=6), text=text)
    with pytest.raises(MoesaicError, match=words):
        evaluate(base, data=text, stream=True)
