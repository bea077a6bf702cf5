"""Types layer by layer: of all GGUF files within a budget the one whose rounding loses least.

A group of tensors is a layer's attention, its FFN, or what is beside the layers. Each group is
rounded alone to each type, and KL(original || rounded) measured on text. Losses this small nearly
add up, so that the best types are a knapsack with one choice a group, of which scipy's milp finds
the exact optimum:

    min sum_gt x_gt KL_gt  with  sum_gt x_gt bytes_gt <= budget,  sum_t x_gt = 1,  x_gt in {0, 1}

Shape suffixes: G groups, C choices (types).
"""

from __future__ import annotations

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moesaic.arch.lookup import base_arch
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.exports.quantiser import tensors_of
from moesaic.foreign import JSON, Model, Track, silent
from moesaic.io.source import Source, resolve
from moesaic.metrics.forward import Layerwise, Whole
from moesaic.metrics.machine import free_bytes
from moesaic.metrics.score import qualities

WINDOWS = 8
"""Of the text by which groups are measured."""
PARTS = 8
"""Layers are told apart up to so many; of more, neighbours have the same types."""
BESIDE, FFN = "beside the layers", "ffn"
TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
"""What is chosen from, where nothing is said."""
FILES = {"q5_k_m": "q5_k", "q4_k_m": "q4_k", "q4_k_s": "q4_k", "q3_k_m": "q3_k"}
"""Types of tensors by those of files, where they have other names."""


Numbers: TypeAlias = "npt.NDArray[np.float64]"
Parameters: TypeAlias = "dict[str, nn.Parameter]"


def groups(layers: int) -> int:
    """How many groups a model of so many layers has.

    >>> groups(6), groups(30)
    (13, 17)
    """
    return 2 * min(layers, PARTS) + 1


def group(name: str, layers: int) -> str:
    """The group of a tensor by llama.cpp's name.

    >>> group("blk.5.ffn_gate_exps.weight", 6), group("blk.1.attn_q.weight", 32)
    ('ffn 5', 'attn 0')
    >>> group("token_embd.weight", 6)
    'beside the layers'
    """
    found = re.match(r"blk\.(\d+)\.(ffn)?", name)
    if found is None:
        return BESIDE
    return f"{found[2] or 'attn'} {int(found[1]) * min(PARTS, layers) // layers}"


@dataclass(frozen=True)
class Sensitivities:
    """What a model loses where one group of tensors is rounded, and what the group then takes."""

    groups: tuple[str, ...]
    types: tuple[str, ...]
    loss_GC: Numbers
    """KL from the model, nats a token."""
    bytes_GC: Numbers
    fixed: int
    """Bytes of a file beside them."""
    ffn: int
    """Weights of all FFNs, experts and routers."""

    def as_json(self) -> JSON:
        """All of it, lists for arrays."""
        arrays = {"loss_GC": self.loss_GC.tolist(), "bytes_GC": self.bytes_GC.tolist()}
        return {**vars(self), **arrays}

    @classmethod
    def load(cls, said: JSON) -> Sensitivities:
        """The inverse of :meth:`as_json`."""
        arrays = {name: np.array(said[name]) for name in ("loss_GC", "bytes_GC")}
        names = {name: tuple(said[name]) for name in ("groups", "types")}
        return cls(**{**said, **arrays, **names})

    def choice(self, budget: int, kept: float = 1.0) -> tuple[dict[str, str], float]:
        """The type of each group by which a file within a budget loses least.

        Args:
            budget: bytes.
            kept: the share of FFNs' weights that stay, where some are taken out first.

        Returns:
            types by group, and what they lose together.

        Raises:
            MoesaicError: no such file is small enough.
        """
        share_G1 = np.array([[kept if name.startswith(FFN) else 1.0] for name in self.groups])
        bytes_GC = self.bytes_GC * share_G1
        _check_reach(bytes_GC, self.fixed, budget)
        place_G = least(self.loss_GC, bytes_GC, budget - self.fixed)
        loss = sum(self.loss_GC[g, c] for g, c in enumerate(place_G))
        types = {name: self.types[c] for name, c in zip(self.groups, place_G, strict=True)}
        return types, float(loss)


def sensitivities(
    source: Source,
    whole: Path,
    types: Sequence[str],
    tokens: Tokens,
    named: Callable[[str], str | None],
    rounded: Callable[[Path, Mapping[str, str]], None],
    budget: int | None = None,
    track: Track = silent,
) -> Sensitivities:
    """Round each group of tensors alone to each type, and measure.

    Args:
        source: a native checkpoint.
        whole: its GGUF file in f32; files beside it are made and deleted.
        types: llama.cpp's, of files.
        tokens: text that decides.
        named: llama.cpp's name of a module by transformers'.
        rounded: writes to a file what ``whole`` is with types by tensors' names.
        budget: bytes that are to be met, if any; one out of reach is refused before all measuring.
        track: shows progress.

    Raises:
        MoesaicError: the budget is out of reach, or the model does not fit into memory twice in
            float32.
    """
    every = tensors_of(whole)
    need = 2 * sum(tensor.bytes for tensor in every.values())
    if need > free_bytes("cpu"):
        raise MoesaicError(
            f"memory: types are chosen of a model that is in memory twice in float32, {need:,} "
            "bytes; give a type instead."
        )
    layers = source.config.num_hidden_layers
    known = tuple(dict.fromkeys(FILES.get(type, type) for type in types if type != "f32"))
    with TemporaryDirectory(dir=whole.parent) as place:
        files = [Path(place) / f"{type}.gguf" for type in known]
        for type, file in zip(known, files, strict=True):
            rounded(file, dict.fromkeys(every, type))
        model = _loaded(source)
        own = _grouped(model, layers, named)
        fixed, bytes_GC = _sizes(files, list(own), layers)
        if budget is not None:
            _check_reach(bytes_GC, fixed, budget)
        reference = Layerwise(source, "cpu", torch.float32, keep=True)
        loss_GC = np.zeros_like(bytes_GC)
        for c, file in enumerate(files):
            opened = resolve(str(file))
            theirs = _grouped(_loaded(opened), layers, named)
            shutil.rmtree(opened.folder, ignore_errors=True)  # what the cache keeps of the file
            for g, name in enumerate(track(own, f"Rounding to {known[c]}", len(own))):
                with _exchanged(own[name], theirs[name]):
                    loss_GC[g, c] = qualities([Whole(model), reference], tokens)[0].kl
    ffn = sum(t.weights for name, t in every.items() if group(name, layers).startswith(FFN))
    return Sensitivities(tuple(own), known, loss_GC, bytes_GC, fixed, ffn)


def _sizes(files: Sequence[Path], names: Sequence[str], layers: int) -> tuple[int, Numbers]:
    """Bytes of files beside what is rounded, and of the groups' tensors in each (G, C)."""
    bytes_GC = np.zeros((len(names), len(files)))
    fixed = 0
    for c, file in enumerate(files):
        fixed = file.stat().st_size
        for name, tensor in tensors_of(file).items():
            if tensor.type != "f32":
                bytes_GC[names.index(group(name, layers)), c] += tensor.bytes
                fixed -= tensor.bytes
    return fixed, bytes_GC


def _check_reach(bytes_GC: Numbers, fixed: int, budget: int) -> None:
    smallest = fixed + math.ceil(bytes_GC.min(1).sum())
    if smallest > budget:
        raise MoesaicError(f"memory {budget:,} is out of reach: the least is {smallest:,} bytes.")


def least(loss_GC: Numbers, bytes_GC: Numbers, budget: float) -> list[int]:
    """The choice of each group by which losses add up to the least.

    Args:
        loss_GC: what each choice loses.
        bytes_GC: what it takes.
        budget: that all may take together; the smallest ones take no more.

    Returns:
        a choice for each group.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    count, choices = loss_GC.shape
    one_GX = np.kron(np.eye(count), np.ones(choices))
    found = milp(
        loss_GC.ravel() / max(loss_GC.max(), 1e-30),  # the solver's tolerances are absolute
        integrality=np.ones(loss_GC.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_GX, 1, 1),
            LinearConstraint(bytes_GC.reshape(1, -1), -np.inf, budget),
        ],
        options={"mip_rel_gap": 0},
    )
    return [int(c) for c in found.x.reshape(loss_GC.shape).argmax(1)]


def _loaded(source: Source) -> Model:
    return source.load("cpu", torch.float32)


def _grouped(
    model: Model, layers: int, named: Callable[[str], str | None]
) -> dict[str, Parameters]:
    """A model's parameters by group; what llama.cpp has no name for in a layer are experts."""
    path = base_arch(model.config).layers_path
    found: dict[str, Parameters] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        inside = re.match(rf"{re.escape(path)}\.(\d+)\.", name)
        said = named(name.rpartition(".")[0]) or (f"blk.{inside[1]}.ffn" if inside else "")
        found[group(said, layers)][name] = parameter
    return dict(found)


@contextmanager
def _exchanged(own: Parameters, theirs: Parameters) -> Iterator[None]:
    """Values of two models' parameters in each other's place, while the context lasts."""

    def exchange() -> None:
        for name, parameter in own.items():
            parameter.data, theirs[name].data = theirs[name].data, parameter.data

    exchange()
    try:
        yield
    finally:
        exchange()
