"""Models by name: found, or refused with what would work."""

import shutil

import pytest
import torch
from builders import logits

from moesaic.errors import MoesaicError
from moesaic.io.outputs import whole_file
from moesaic.io.source import resolve


def test_unreachable_hub_names_the_model_and_the_way_out():
    with pytest.raises(MoesaicError, match=r"some/model could not be fetched.*pass the folder"):
        resolve("some/model")


@pytest.mark.parametrize("name", ["nothing-here", "./nothing", "/no/such/place", "a/b/c"])
def test_unknown_names_list_what_is_known(name):
    with pytest.raises(MoesaicError, match="No model folder at .*smollm2, .*tiny-dense"):
        resolve(name)


def test_folder_without_config(tmp_path):
    with pytest.raises(MoesaicError, match=r"no config\.json"):
        _ = resolve(str(tmp_path)).config


@pytest.mark.parametrize(
    ("content", "words"), [(None, "no config.json"), ("{", "config.json cannot be read")]
)
def test_a_folder_that_is_no_model_is_not_said_to_lack_a_tokenizer(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(MoesaicError, match=words):
        _ = resolve(str(tmp_path)).tokenizer


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


def test_gguf_that_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(MoesaicError, match="cannot be read as GGUF"):
        resolve(str(file))
    assert not (tmp_path / "cache").exists() or not any((tmp_path / "cache").iterdir())


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
