"""GGUF files, made by llama.cpp's own converter."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from moesaic.arch.dense import PREFIX
from moesaic.config import ExportArgs
from moesaic.errors import MoesaicError
from moesaic.exports.engines import limits
from moesaic.exports.form import run_script
from moesaic.exports.native import export_native
from moesaic.foreign import JSON
from moesaic.io.source import resolve

SCRIPT = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"


def find_converter(given: str | Path = "") -> Path:
    """llama.cpp's ``convert_hf_to_gguf.py``: given, in the folder $LLAMA_CPP, or on the PATH.

    Raises:
        MoesaicError: it is not there; the message says how to get it.
    """
    place = given or os.environ.get(VARIABLE) or shutil.which(SCRIPT)
    if place:
        file = Path(place) / SCRIPT if Path(place).is_dir() else Path(place)
        if file.is_file():
            return file
        raise MoesaicError(f"No {SCRIPT} at {place}.")
    raise MoesaicError(
        f"GGUF needs llama.cpp's {SCRIPT}: set {VARIABLE} to a llama.cpp folder, or pass "
        "converter=FOLDER. One is in vendor/llama.cpp of llama-cpp-python's source package on PyPI "
        "(pip download --no-deps --no-binary llama-cpp-python llama-cpp-python)."
    )


def export_gguf(
    model: str, out: str | Path, asked: ExportArgs | None = None, overwrite: bool = False
) -> JSON:
    """Write a model and its tokenizer as one GGUF file.

    A model of a class of this package is exported to a native architecture first.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        out: the file to make.
        asked: its ``type`` is that of the weights; routers and norms stay in f32.
        overwrite: replace ``out`` if it exists.

    Raises:
        MoesaicError: there is no converter, it refuses the model, or llama.cpp would compute
            something else; nothing is left at ``out``.
    """
    asked = asked or ExportArgs(to="gguf")
    script, out = find_converter(asked.converter), Path(out)
    if out.is_dir():
        raise MoesaicError(f"{out} is a folder; give the name of the GGUF file to make.")
    if out.exists() and not overwrite:
        raise MoesaicError(f"{out} exists. Choose another name, or pass overwrite=True.")
    source = resolve(model)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
        record: JSON = {"model_type": source.config.model_type}
        folder = source.folder
        other = asked.target or asked.untie or asked.ep > 1
        if other or source.config.model_type.startswith(PREFIX):
            folder = Path(place) / "native"
            record = export_native(model, folder, asked)
        lacks = record.get("engines", limits(source.config))["llama.cpp"]
        if lacks:
            raise MoesaicError(f"llama.cpp lacks {'; '.join(lacks)}.")
        work = Path(place) / "model.gguf"
        convert(script, folder, work, asked.type)
        work.replace(out)
    return {**record, "out": str(out), "type": asked.type, "bytes": out.stat().st_size}


def convert(script: Path, folder: Path, out: Path, type: str) -> None:
    """Run llama.cpp's converter on a native checkpoint."""
    trouble = run_script("convert.py", json.dumps([str(script), str(folder), str(out), type]))
    if trouble is not None or not out.is_file():
        raise MoesaicError(f"llama.cpp's converter refused {folder.name}: {trouble}")
