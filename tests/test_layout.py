"""What lies where in a result's folder, as it is now and as it once was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders import equal, inside, weights

import moesaic
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.io.layout import FOLDER, misread
from moesaic.io.outputs import whole_folder
from moesaic.io.source import resolve
from moesaic.methods.naee.config import PruneConfig
from moesaic.plan import Plan


def as_it_was(result: Path, folder: Path) -> Path:
    """A copy of a result in the layout that was written first: every file at the top."""
    shutil.copytree(result, folder)
    for file in (folder / FOLDER).iterdir():
        file.rename(folder / file.name)
    (folder / FOLDER).rmdir()
    return folder


@pytest.fixture
def older(carved_folder: Path, tmp_path: Path) -> Path:
    """A carved model in the layout that was written first."""
    return as_it_was(carved_folder, tmp_path / "older")


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
    resolve(str(folder)).checkpoint.copy_side_files(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not misread(tmp_path / "out")


def test_an_older_result_is_read_as_ever(
    older: Path, carved_folder: Path, llama_folder: Path, tmp_path: Path, command: Any
) -> None:
    ours = {f"{FOLDER}/{name}" for name in inside(older) if not (carved_folder / name).exists()}
    assert ours | (inside(older) & inside(carved_folder)) == inside(carved_folder)
    assert Plan.load(older).fingerprint == Plan.load(carved_folder).fingerprint
    page = tmp_path / "page.html"
    assert command("report", older, carved_folder, "--out", page)[0] == 0
    assert command("apply", llama_folder, older, tmp_path / "a")[0] == 0
    assert command("apply", llama_folder, older / "plan.json", tmp_path / "b")[0] == 0
    for again in ("a", "b"):
        assert equal(weights(tmp_path / again), weights(carved_folder))
        assert Plan.load(tmp_path / again / FOLDER / "plan.json").layers


def test_an_older_result_with_a_weight_left_over_is_refused(older: Path) -> None:
    """By its plan it is known for ours, of which every weight has a place."""
    config = json.loads((older / "config.json").read_text())
    del config["moesaic"], config["auto_map"]
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (older / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoesaicError, match="left over"):
        resolve(str(older)).load()


def test_a_step_keeps_the_plan_of_an_older_result(
    moe_folder: Path, tmp_path: Path, tokens: Tokens
) -> None:
    """So that the plan of both steps rebuilds the result of the first base."""
    once = moesaic.prune(str(moe_folder), PruneConfig(keep=6), calibration=tokens)
    before = as_it_was(once.save(tmp_path / "once"), tmp_path / "older")
    twice = moesaic.prune(str(before), PruneConfig(keep=5), calibration=tokens)
    (earlier,) = Plan.load(twice.save(tmp_path / "twice")).earlier
    assert earlier.fingerprint == Plan.load(before).fingerprint
