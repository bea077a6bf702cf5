"""What lies where in a result's folder, as it is now and as it once was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moesaic.io.names import FOLDER, misread
from moesaic.io.outputs import whole_folder
from moesaic.io.trust import copy_side_files


def test_at_the_top_lies_what_others_know(carved_folder: Path) -> None:
    top = {f.name for f in carved_folder.iterdir()}
    assert {f for f in top if f.endswith(".safetensors")} == {"model.safetensors"}
    known = {"config.json", "generation_config.json", "README.md", "modeling_moesaic.py", FOLDER}
    assert top - known - {"model.safetensors"} <= {
        f for f in top if f.startswith(("tokenizer", "special_tokens", "chat_template"))
    }


@pytest.mark.parametrize(
    "name", ["plan.safetensors", "x.bin", "x.pt", "x.pth", "x.gguf", "consolidated.00.json"]
)
def test_nothing_that_an_engine_would_read_lies_beside_the_model(tmp_path: Path, name: str) -> None:
    """vLLM reads every .safetensors of a folder that has no index."""
    with pytest.raises(AssertionError, match="engines would read"):  # noqa: SIM117
        with whole_folder(tmp_path / "out") as folder:
            (folder / name).touch()
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert not misread(tmp_path)


def test_a_tokenizer_brings_no_weights_along(llama_folder: Path, tmp_path: Path) -> None:
    """Side files are taken over by pattern, and a folder may hold anything of such a name."""
    folder = tmp_path / "m"
    shutil.copytree(llama_folder, folder)
    (folder / "tokenizer.safetensors").write_bytes(b"x")
    (folder / "vocab.bin").write_bytes(b"x")
    (tmp_path / "out").mkdir()
    copy_side_files(folder, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not misread(tmp_path / "out")
