"""Results as GGUF files: their bytes, told from the original's, and the files themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from moesaic.arch.dense import PREFIX
from moesaic.config import ExportArgs
from moesaic.errors import MoesaicError
from moesaic.exports.engines import limits
from moesaic.exports.llamacpp import export_gguf, find_converter, rounding
from moesaic.exports.mixed import Sensitivities
from moesaic.foreign import JSON, Track, silent
from moesaic.io.outputs import whole_file
from moesaic.io.source import Source, resolve

ROUTER = "ffn_gate_inp"


@dataclass(frozen=True)
class Quantised:
    """What the original weighs in one of llama.cpp's types."""

    bytes: int
    """Of the file."""
    each: float
    """Bytes of one weight of an expert or an FFN, mean of all."""


class Files:
    """GGUF files of a model and of what is made of it.

    Args:
        source: the original.
        text: source of the text by which k-quants weigh what they round; empty: what ships.
        folder: an existing one, for the original's files.
        track: shows progress.

    Raises:
        MoesaicError: there is no converter, or llama.cpp cannot run the architecture.
    """

    def __init__(self, source: Source, text: str, folder: Path, track: Track = silent):
        self.source, self.text, self.folder, self.track = source, text, folder, track
        find_converter()
        lacks = limits(source.config)["llama.cpp"]
        if lacks or source.config.model_type.startswith(PREFIX):
            told = "; ".join(lacks) or "what only this package runs"
            raise MoesaicError(f"types needs a model that llama.cpp runs; it lacks {told}.")
        self._known: dict[str, Quantised] = {}

    def bytes(self, type: str, removed: int) -> int:
        """Bytes of a result's file, told: weights that are taken out are those of experts.

        Args:
            type: llama.cpp's.
            removed: parameters that the result lacks.
        """
        if type not in self._known:
            self._known[type] = self._weighed(type)
        whole = self._known[type]
        return round(whole.bytes - removed * whole.each)

    def make(self, model: str, out: Path, asked: ExportArgs) -> JSON:
        """Write a model's file; see :func:`moesaic.exports.llamacpp.export_gguf`."""
        asked = replace(asked, calibration=self.text)
        return export_gguf(model, out, asked, overwrite=True, track=self.track)

    def rounding(self, types: tuple[str, ...]) -> Sensitivities:
        """What the original loses by types in each group of its tensors; measured once.

        Args:
            types: llama.cpp's.
        """
        file = self.folder / f"rounding-{'-'.join(types)}.json"
        if not file.is_file():
            place = str(self.source.folder), self.folder
            found = rounding(*place, types, self.text, self.track)
            with whole_file(file) as partial:
                partial.write_text(json.dumps(found.as_json()), "utf-8")
        return Sensitivities.load(json.loads(file.read_text("utf-8")))

    @contextmanager
    def opened(self, file: Path) -> Iterator[Source]:
        """A file as a model; what the cache keeps of it goes afterwards."""
        source = resolve(str(file))
        try:
            yield source
        finally:
            shutil.rmtree(source.folder, ignore_errors=True)

    def _weighed(self, type: str) -> Quantised:
        """By the original's own file, without text: that changes no size."""
        from gguf import GGUFReader

        file = self.folder / f"original-{type}.gguf"
        asked = ExportArgs(to="gguf", type=type, calibration="none")  # type: ignore[arg-type]
        export_gguf(str(self.source.folder), file, asked, overwrite=True)
        tensors = [
            tensor
            for tensor in GGUFReader(file).tensors
            if ".ffn_" in tensor.name and len(tensor.shape) > 1 and ROUTER not in tensor.name
        ]
        weights = sum(int(tensor.n_elements) for tensor in tensors)
        size = sum(int(tensor.n_bytes) for tensor in tensors)
        found = Quantised(file.stat().st_size, size / weights)
        file.unlink()
        return found
