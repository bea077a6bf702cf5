"""GGUF files of a search: their sizes, computed from the original's tensors, and the files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from io import BufferedReader
from pathlib import Path

import torch
from torch import nn

from moesaic.arch.dense import PREFIX, Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import ExportArgs
from moesaic.errors import MoesaicError
from moesaic.exports.allocation import Layout, Types
from moesaic.exports.llamacpp import SAMPLES, ConvertedFile, converting, find_converter, lacking
from moesaic.exports.quantised_model import QuantisedModel
from moesaic.exports.quantiser import ALIGNED, WHOLE, KeptRows, types_of
from moesaic.io.source import Source, resolve
from moesaic.sizes import Skeleton
from moesaic.types import JSON, Track, silent

Sizes = tuple[int, int, int]
"""Experts of a layer, their width, and that of the shared path."""


class Files:
    """GGUF files of a model and of its results.

    Args:
        source: the original.
        text: source of the text by which k-quants weigh what they round; empty: what ships.
        folder: for files that are made on the way.
        track: shows progress.
        samples: windows of that text, at most as many as an export takes.

    Raises:
        MoesaicError: there is no converter, or llama.cpp cannot run the architecture.
    """

    def __init__(
        self,
        source: Source,
        text: str,
        folder: Path,
        track: Track = silent,
        samples: int | None = None,
    ) -> None:
        self.source, self.text, self.folder, self.track = source, text, folder, track
        self.samples = min(samples or SAMPLES, SAMPLES)
        self._converter = find_converter()
        lacks = lacking(source.config)
        if lacks or source.config.model_type.startswith(PREFIX):
            listed = "; ".join(lacks) or "what only this package runs"
            raise MoesaicError(f"types needs a model that llama.cpp runs; it lacks {listed}.")
        self.kept = KeptRows(folder, source.nbytes // 2)
        self._uniform: dict[str, tuple[Types, int]] = {}

    @cached_property
    def original(self) -> ConvertedFile:
        """Original as a file in f32 or bf16, of which quantised files are made; without values."""
        with self._converted(self.source.folder) as (whole, _):
            return self._of(self.source.folder, whole)

    def _of(self, folder: Path, whole: Path) -> ConvertedFile:
        context = self.text, self.track, self.samples, self.kept
        return ConvertedFile(folder, whole, *context)

    @contextmanager
    def _converted(self, folder: Path) -> Iterator[tuple[Path, BufferedReader]]:
        """Convert a checkpoint; yield a file without values, which is removed, and the values."""
        whole = self.folder / "whole.gguf"
        type = "bf16" if self.source.config.dtype == torch.bfloat16 else WHOLE
        whole.parent.mkdir(parents=True, exist_ok=True)
        try:
            with converting(self._converter, folder, self.source.folder, whole, type) as values:
                yield whole, values
        finally:
            whole.unlink(missing_ok=True)

    @contextmanager
    def _file_of(
        self, result: Path | None, weights: Mapping[str, torch.Tensor] | None
    ) -> Iterator[tuple[ConvertedFile, BufferedReader]]:
        """Yield the original or a result, converted, and its values.

        Args:
            result: the folder of a result; None for the original.
            weights: of the matrices' inputs, where they are known.
        """
        known = self.original if result is None else None
        folder = result or self.source.folder
        with self._converted(folder) as (whole, values):
            converted = known or self._of(folder, whole)
            if weights is not None:
                converted.quantised.weights = weights
            yield converted, values

    def quantised(self, result: Path | None, built: Skeleton) -> QuantisedModel:
        """Return the original or a result, quantised layer by layer as its file is.

        Args:
            result: the folder of a result; None for the original.
            built: skeleton of the result.
        """
        if result is None:
            return self.original.quantised
        tokens, source = self.original.tokens, resolve(str(result))
        assert tokens is not None
        context = self.original.named, tokens, self.track, self.kept
        return QuantisedModel(source, self.layout(built), *context)

    def layout(self, built: Skeleton) -> Layout:
        """Return the tensors of the file of a result of the original's architecture.

        Shapes are computed from the original's file. Of bytes these are the most: a header states
        the number of weights in words, which may be longer than the original's.
        """
        layout, arch = self.original.layout, base_arch(self.source.config)
        models = Skeleton(self.source.config, None).model, built.model
        old, new = ([_sizes(arch, layer) for layer in arch.layers(model)] for model in models)
        tensors = dict(layout.tensors)
        for name, tensor in tensors.items():
            if match := re.match(r"blk\.(\d+)\.((?:ffn_|exp_probs_b).+)", name):
                i = min(int(match[1]), len(old) - 1)  # MTP layers are cut as the last layer is
                shape = _shape(match[2], tensor.shape, old[i], new[i])
                tensors[name] = replace(tensor, shape=shape)
        longer = ALIGNED if tensors != layout.tensors else 0
        return replace(layout, tensors=tensors, header=layout.header + longer)

    def size(self, built: Skeleton, file: ExportArgs) -> int:
        """Return the bytes of a result's file, which is not made."""
        if file.memory is not None:
            return file.memory
        type = file.type
        more = self.layout(built).least([type]) - self.original.layout.least([type])
        return self.uniform(None, type)[1] + more

    def uniform(
        self, result: Path | None, type: str, weights: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[Types, int]:
        """Return the types of a file's tensors by name, and its bytes; no value is written.

        Args:
            result: the folder of a result; None for the original.
            type: type of the file, of which some tensors have wider ones.
            weights: of the matrices' inputs, where they are known.
        """
        if result is None and type in self._uniform:
            return self._uniform[type]
        file = self.folder / "candidate.gguf"
        if result is None:
            tensors = self.original.uniform(file, type, None)
        else:
            with self._file_of(result, weights) as (converted, _):
                tensors = converted.uniform(file, type, None)
        size = file.stat().st_size
        file.unlink()
        types = {name: tensor.type for name, tensor in tensors.items()}
        if result is None:
            self._uniform[type] = types, size
        return types, size

    def make(
        self,
        result: Path | None,
        out: Path,
        file: ExportArgs,
        types: Mapping[str, str] | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> JSON:
        """Write a GGUF file.

        Args:
            result: the folder of a result; None for the original.
            out: the file.
            file: its type.
            types: by groups of tensors, where they differ.
            weights: of the matrices' inputs, where they are known.

        Returns:
            ``bytes``, and ``types``: how many weights each of llama.cpp's types has.
        """
        with self._file_of(result, weights) as (converted, values):
            if types:
                tensors = converted.mixed(out, types, values)
            else:
                tensors = converted.uniform(out, file.type, values)
        return {"bytes": out.stat().st_size, "types": types_of(tensors)}


def _sizes(arch: Arch, layer: nn.Module) -> Sizes:
    if isinstance(arch, MoEArch) and arch.is_moe(layer):
        view = arch.mixture(layer)
        return view.count, view.width, view.shared_width
    return 0, 0, arch.width_of(layer)


def _shape(name: str, shape: tuple[int, ...], old: Sizes, new: Sizes) -> tuple[int, ...]:
    """Return the shape of a tensor of an FFN, the length of its rows first, where sizes change.

    >>> _shape("ffn_down_exps.weight", (96, 256, 8), (8, 96, 0), (6, 64, 0))
    (64, 256, 6)
    >>> _shape("ffn_gate_exps.bias", (96, 8), (8, 96, 0), (6, 64, 0))
    (64, 6)
    >>> _shape("ffn_gate_inp.weight", (256, 8), (8, 96, 0), (6, 96, 0))
    (256, 6)
    >>> _shape("ffn_up.weight", (8, 9), (0, 0, 9), (0, 0, 3))
    (8, 3)
    """
    sizes, (part, kind) = list(shape), name.rsplit(".", 1)
    routed, down, bias = part.endswith("_exps"), part.startswith("ffn_down"), kind == "bias"
    if routed or part in ("ffn_gate_inp", "exp_probs_b"):
        sizes[-1] = new[0]
    if re.match(r"ffn_(gate|up|down)(_up)?(_exps|_shexp)?$", part) and not (down and bias):
        axis, width = 0 if down or bias else 1, 1 if routed else 2
        sizes[axis] = shape[axis] * new[width] // old[width]
    return tuple(sizes)
