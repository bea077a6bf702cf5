"""Results as GGUF files: their bytes, told from the original's tensors, and the files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from torch import nn

from moesaic.arch.dense import PREFIX, Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import ExportArgs
from moesaic.errors import MoesaicError
from moesaic.estimates import Built
from moesaic.exports.engines import limits
from moesaic.exports.live import Live
from moesaic.exports.llamacpp import Rounding, convert, find_converter
from moesaic.exports.mixed import Layout
from moesaic.exports.quantiser import ALIGNED, WHOLE, types_of
from moesaic.foreign import JSON, Track, silent
from moesaic.io.gguf import GgufCheckpoint
from moesaic.io.outputs import whole_file
from moesaic.io.source import Source, resolve

Sizes = tuple[int, int, int]
"""Experts of a layer, their width, and that of what all tokens run."""


class Files:
    """GGUF files of a model and of what is made of it.

    Args:
        source: the original.
        text: source of the text by which k-quants weigh what they round; empty: what ships.
        folder: for files that are made on the way.
        track: shows progress.

    Raises:
        MoesaicError: there is no converter, or llama.cpp cannot run the architecture.
    """

    def __init__(self, source: Source, text: str, folder: Path, track: Track = silent):
        self.source, self.text, self.folder, self.track = source, text, folder, track
        self._converter = find_converter()
        lacks = limits(source.config)["llama.cpp"]
        if lacks or source.config.model_type.startswith(PREFIX):
            told = "; ".join(lacks) or "what only this package runs"
            raise MoesaicError(f"types needs a model that llama.cpp runs; it lacks {told}.")
        self._plain: dict[str, int] = {}
        self._live: tuple[Path, Live] | None = None

    @cached_property
    def original(self) -> Rounding:
        """The original, to be rounded."""
        checkpoint, folder = self.source.checkpoint, self.source.folder
        if isinstance(checkpoint, GgufCheckpoint):
            folder = self.folder / "plain"
            if not folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                checkpoint.unpack(folder)
        return self._begun(folder, self.folder / "original.gguf")

    def live(self, result: Path | None, made: Built) -> Live:
        """The original or a result in memory, where it is rounded as in a file.

        Args:
            result: the folder of a result; None for the original.
            made: it without values.
        """
        if result is None:
            return self.original.live
        if self._live is None or self._live[0] != result:
            tokens, place = self.original.tokens, resolve(str(result))
            assert tokens is not None
            live = Live(place, self.layout(made), self.original.named, tokens, self.track)
            self._live = result, live
        return self._live[1]

    def _begun(self, folder: Path, whole: Path) -> Rounding:
        if not whole.is_file():
            with whole_file(whole) as partial:
                convert(self._converter, folder, self.source.folder, partial, WHOLE)
        return Rounding(folder, whole, self.text, self.track)

    def layout(self, made: Built) -> Layout:
        """The tensors of a result's file, of the original's architecture."""
        return resized(self.original.layout, Built(self.source.config, None), made)

    def told(self, made: Built, asked: ExportArgs) -> int:
        """Bytes of a result's file."""
        if asked.memory is not None:
            return asked.memory
        more = self.layout(made).least([asked.type]) - self.original.layout.least([asked.type])
        return self._plain_bytes(asked.type) + more

    def _plain_bytes(self, type: str) -> int:
        """Of the original's file in one type: llama.cpp gives some tensors others."""
        if type not in self._plain:
            file = self.folder / f"original-{type}.gguf"
            self.original.made(file, type)
            self._plain[type] = file.stat().st_size
            file.unlink()
        return self._plain[type]

    def make(
        self,
        result: Path | None,
        out: Path,
        asked: ExportArgs,
        types: Mapping[str, str] | None = None,
    ) -> JSON:
        """Write a file.

        Args:
            result: the folder of a result; None for the original.
            out: the file.
            asked: its type.
            types: by groups of tensors, where they differ.

        Returns:
            ``bytes``, and ``types``: how many weights each of llama.cpp's types has.
        """
        made, whole = self.original, self.folder / "result.gguf"
        if result is not None:
            whole.unlink(missing_ok=True)
            made = self._begun(result, whole)
        if types is None:
            made.made(out, asked.type)
        else:
            made.mixed(out, types)
        return {"bytes": out.stat().st_size, "types": types_of(out)}

    @contextmanager
    def opened(self, file: Path) -> Iterator[Source]:
        """A file as a model; what the cache keeps of it goes afterwards."""
        source = resolve(str(file))
        try:
            yield source
        finally:
            shutil.rmtree(source.folder, ignore_errors=True)


def resized(layout: Layout, original: Built, made: Built) -> Layout:
    """The tensors of a result's file, told from those of the original's, and the most it takes.

    Both files have one name and card; how many weights there are is said in words, which may be
    longer.

    Args:
        layout: of the original's file.
        original: without values.
        made: the result, of the same architecture, without values.
    """
    arch, tensors = base_arch(original.config), dict(layout.tensors)
    old, new = ([_sizes(arch, layer) for layer in arch.layers(of.model)] for of in (original, made))
    for name, tensor in tensors.items():
        if inside := re.match(r"blk\.(\d+)\.ffn_(.+)\.", name):
            i = int(inside[1])
            shape = _shape(inside[2], tensor.shape, old[i], new[i])
            tensors[name] = replace(tensor, shape=shape)
    longer = ALIGNED if tensors != layout.tensors else 0
    return replace(layout, tensors=tensors, header=layout.header + longer)


def _sizes(arch: Arch, layer: nn.Module) -> Sizes:
    if isinstance(arch, MoEArch) and arch.is_moe(layer):
        view = arch.mixture(layer)
        return view.count, view.width, view.shared_width
    return 0, 0, arch.width_of(layer)


def _shape(part: str, shape: tuple[int, ...], old: Sizes, new: Sizes) -> tuple[int, ...]:
    """The shape of a part of an FFN, the length of its rows first, where sizes change.

    >>> _shape("down_exps", (96, 256, 8), (8, 96, 0), (6, 64, 0))
    (64, 256, 6)
    >>> _shape("gate_inp", (256, 8), (8, 96, 0), (6, 96, 0))
    (256, 6)
    >>> _shape("up", (8, 9), (0, 0, 9), (0, 0, 3))
    (8, 3)
    """
    changed = list(shape)
    routed = part.endswith("_exps")
    if part in ("gate_inp", "exp_probs_b"):
        changed[-1] = new[0]
    elif len(shape) > 1 and part != "gate_inp_shexp":
        axis = 0 if part.startswith("down") else 1
        place = 1 if routed else 2
        changed[axis] = shape[axis] * new[place] // old[place]
        if routed:
            changed[2] = new[0]
    return tuple(changed)
