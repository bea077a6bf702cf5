"""GGUF files, made by llama.cpp's own converter."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from moesaic.arch.dense import PREFIX
from moesaic.errors import MoesaicError
from moesaic.exports.engines import limits
from moesaic.exports.form import run_script
from moesaic.exports.native import export_native
from moesaic.foreign import JSON
from moesaic.io.source import resolve

TYPES = ("f32", "bf16", "q8_0")
SCRIPT = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"


def find_converter(given: str | Path | None = None) -> Path:
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
        "--converter. One is in vendor/llama.cpp of llama-cpp-python's source package on PyPI "
        "(pip download --no-deps --no-binary llama-cpp-python llama-cpp-python)."
    )


def export_gguf(
    model: str,
    out: str | Path,
    *,
    type: str = "f32",
    converter: str | Path | None = None,
    overwrite: bool = False,
    **native: Any,
) -> JSON:
    """Write a model and its tokenizer as one GGUF file.

    A model of a class of this package is exported to a native architecture first.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        out: the file to make.
        type: what weights are stored as, of :data:`TYPES`; routers and norms stay in f32.
        converter: llama.cpp's script or folder; None to look for it.
        overwrite: replace ``out`` if it exists.
        native: options of :func:`moesaic.exports.native.export_native`.

    Raises:
        MoesaicError: there is no converter, it refuses the model, or llama.cpp would compute
            something else; nothing is left at ``out``.
    """
    if type not in TYPES:
        raise MoesaicError(f"--type {type!r} is none of {', '.join(TYPES)}.")
    script, out = find_converter(converter), Path(out)
    if out.is_dir():
        raise MoesaicError(f"{out} is a folder; give the name of the GGUF file to make.")
    if out.exists() and not overwrite:
        raise MoesaicError(f"{out} exists. Choose another name or pass --overwrite.")
    source = resolve(model)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
        record: JSON = {"model_type": source.config.model_type}
        folder = source.folder
        asked = native.get("target") or native.get("untie") or native.get("ep", 1) > 1
        if asked or source.config.model_type.startswith(PREFIX):
            folder = Path(place) / "native"
            record = export_native(model, folder, **native)
        lacks = record.get("engines", limits(source.config))["llama.cpp"]
        if lacks:
            raise MoesaicError(f"llama.cpp lacks {'; '.join(lacks)}.")
        work = Path(place) / "model.gguf"
        convert(script, folder, work, type)
        work.replace(out)
    return {**record, "out": str(out), "type": type, "bytes": out.stat().st_size}


def convert(script: Path, folder: Path, out: Path, type: str) -> None:
    """Run llama.cpp's converter on a native checkpoint."""
    trouble = run_script("convert.py", json.dumps([str(script), str(folder), str(out), type]))
    if trouble is not None or not out.is_file():
        raise MoesaicError(f"llama.cpp's converter refused {folder.name}: {trouble}")
