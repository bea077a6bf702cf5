"""GGUF files, made by llama.cpp's own converter and its own quantiser."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from moesaic.arch.dense import PREFIX
from moesaic.config import ExportArgs
from moesaic.data.text import Tokens, calibration_tokens
from moesaic.errors import MoesaicError
from moesaic.exports.engines import limits
from moesaic.exports.form import run_script
from moesaic.exports.importance import importance
from moesaic.exports.mixed import TYPES, WINDOWS, Sensitivities, group, sensitivities
from moesaic.exports.native import export_native
from moesaic.exports.quantiser import OTHERS, quantise, tensors_of, types_of
from moesaic.foreign import JSON, Track, silent
from moesaic.io.gguf import GgufCheckpoint
from moesaic.io.outputs import alone, check_file, put_file
from moesaic.io.prediction import predicts
from moesaic.io.source import resolve
from moesaic.metrics.llamacpp import library

SCRIPT = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"
CONVERTED = ("f32", "f16", "bf16", "q8_0")
"""Types that the converter writes; the others are the quantiser's."""
NO_TEXT, SAMPLES, LENGTH = "none", 64, 256
"""No text for k-quants; windows of it, and their tokens."""


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
    model: str,
    out: str | Path,
    asked: ExportArgs | None = None,
    overwrite: bool = False,
    track: Track = silent,
) -> JSON:
    """Write a model and its tokenizer as one GGUF file.

    A model of a class of this package is exported to a native architecture first.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        out: the file to make.
        asked: its ``type`` is that of the weights; routers and norms stay in f32. Where blocks of
            a k-quant (256 weights) do not divide rows, llama.cpp takes another type for them.
            With ``memory`` types are chosen layer by layer, see :mod:`moesaic.exports.mixed`.
        overwrite: replace ``out`` if it exists.
        track: shows progress.

    Returns:
        ``out``, ``type``, ``bytes``, and ``types``: how many weights each of llama.cpp's types
        has; beside what the native export says.

    Raises:
        MoesaicError: there is no converter or quantiser, it refuses the model, or llama.cpp would
            compute something else; nothing is left at ``out``.
    """
    asked = asked or ExportArgs(to="gguf")
    script, out = find_converter(asked.converter), Path(out)
    plain = asked.type in CONVERTED and asked.memory is None
    if not plain:
        library()
    check_file(out, overwrite, [model, asked.calibration])
    source = resolve(model)
    out.parent.mkdir(parents=True, exist_ok=True)
    with alone(out), tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
        record: JSON = {"model_type": source.config.model_type}
        folder = source.folder
        other = asked.target or asked.untie or asked.ep > 1
        if other or source.config.model_type.startswith(PREFIX):
            folder = Path(place) / "native"
            record = export_native(model, folder, asked)
            record.pop("trust_remote_code", None)  # llama.cpp has a class of its own
        elif isinstance(source.checkpoint, GgufCheckpoint):
            folder = Path(place) / "plain"
            source.checkpoint.unpack(folder)
        lacks = record.get("engines", limits(source.config))["llama.cpp"]
        if lacks:
            raise MoesaicError(f"llama.cpp lacks {'; '.join(lacks)}.")
        work = Path(place) / "model.gguf"
        convert(script, folder, work, asked.type if plain else "f32")
        if not plain:
            work = _Rounding(folder, work, asked, track).made()
        types = types_of(work)
        put_file(work, out, overwrite)
    said = {"out": str(out), "type": asked.called, "bytes": out.stat().st_size, "types": types}
    return {**record, **said}


def rounding(
    model: str, folder: Path, types: Sequence[str], text: str = "", track: Track = silent
) -> Sensitivities:
    """What a native model loses by each type in each group of its tensors.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        folder: an existing one, for files that go afterwards.
        types: llama.cpp's, of files.
        text: source of the text that decides.
        track: shows progress.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        whole, source = Path(place) / "model.gguf", resolve(model)
        convert(find_converter(), source.folder, whole, "f32")
        asked = ExportArgs(to="gguf", calibration=text)
        return _Rounding(source.folder, whole, asked, track).sensitivities(types)


class _Rounding:
    """A file in f32 that llama.cpp's quantiser rounds, in several ways.

    Args:
        folder: the checkpoint.
        whole: its file.
        asked: the text, and the types.
        track: shows progress.
    """

    def __init__(self, folder: Path, whole: Path, asked: ExportArgs, track: Track) -> None:
        self.native, self.named = resolve(str(folder)), names_of(whole)
        self.whole, self.asked, self.track = whole, asked, track
        self.weights: Mapping[str, Tensor] = {}
        self.tokens: Tokens | None = None
        if asked.calibration != NO_TEXT:
            text, tokenizer = asked.calibration, self.native.tokenizer
            self.tokens = calibration_tokens(text, tokenizer, SAMPLES, LENGTH)
            self.weights = importance(self.native, self.tokens, self.named, track)

    def made(self) -> Path:
        """The file that was asked for, beside the whole one."""
        out = self.whole.with_name("quantised.gguf")
        if self.asked.memory is None:
            quantise(self.whole, out, self.asked.type, self.weights)
            return out
        budget = self.asked.memory
        types, _ = self.sensitivities(self.asked.among or TYPES, budget).choice(budget)
        layers = self.native.config.num_hidden_layers
        self._write(out, {name: types[group(name, layers)] for name in tensors_of(self.whole)})
        return out

    def sensitivities(self, types: Sequence[str], budget: int | None = None) -> Sensitivities:
        """By group of tensors and type; a budget out of reach is refused before all measuring."""
        assert self.tokens is not None  # without text no types are chosen
        place = self.native, self.whole, types, self.tokens.rows(slice(WINDOWS))
        return sensitivities(*place, self.named, self._write, budget, self.track)

    def _write(self, file: Path, types: Mapping[str, str]) -> None:
        quantise(self.whole, file, OTHERS, self.weights, types)


def convert(script: Path, folder: Path, out: Path, type: str) -> None:
    """Run llama.cpp's converter on a native checkpoint."""
    source = resolve(str(folder))
    layers = source.config.num_hidden_layers
    predicting = any(predicts(name, layers) for name in source.checkpoint.names())
    said = getattr(source.config, "moesaic", None)  # as a DeciLM is read
    widths = said["base"]["widths"] if said else None
    request = json.dumps([str(script), str(folder), str(out), type, predicting, widths])
    trouble = run_script("convert.py", request)
    if trouble is not None or not out.is_file():
        raise MoesaicError(f"llama.cpp's converter refused {folder.name}: {trouble}")


def names_of(file: Path) -> Callable[[str], str | None]:
    """llama.cpp's name of a module of transformers, in a GGUF file."""
    from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

    fields = GGUFReader(file).fields
    called = str(fields["general.architecture"].contents())
    arch = next(number for number, name in MODEL_ARCH_NAMES.items() if name == called)
    names = get_tensor_name_map(arch, int(fields[f"{called}.block_count"].contents()))
    named: Callable[[str], str | None] = names.get_name
    return named
