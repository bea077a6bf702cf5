"""GGUF types layer by layer: the file with the least estimated KL within a budget of bytes.

A group of tensors is a layer's attention, the gates and ups of its FFN, its downs, its shared
expert, the embeddings, or the head. The KL of quantising each group to each type is estimated
(:mod:`moesaic.exports.rounder`). KLs this small nearly add up, so that the best types are a
knapsack with one choice a group, of which scipy's milp finds the optimum:

    min sum_gt x_gt KL_gt  with  sum_gt x_gt bytes_gt <= budget,  sum_t x_gt = 1,  x_gt in {0, 1}

Shape suffixes: G groups, C choices (types).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from moesaic.config import in_unit
from moesaic.errors import MoesaicError
from moesaic.exports.file_types import FILES
from moesaic.exports.quantiser import WHOLE, Rounded, bits

GAP = 1e-4
"""Relative gap to the least possible sum of KL at which the solver stops."""
OUTSIDE = EMBEDDINGS, HEAD = "embeddings", "head"
"""Groups of tensors outside layers, which have no importance weights."""
TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
"""Default types to choose from."""

Numbers: TypeAlias = "npt.NDArray[np.float64]"


def group_of(name: str) -> str:
    """Return the group of a tensor by llama.cpp's name.

    >>> group_of("blk.5.ffn_gate_exps.weight"), group_of("blk.5.ffn_down_exps.weight")
    ('gate-up 5', 'down 5')
    >>> group_of("blk.1.attn_q.weight"), group_of("blk.31.ffn_down_shexp.weight")
    ('attn 1', 'shared 31')
    >>> group_of("token_embd.weight"), group_of("output.weight")
    ('embeddings', 'head')
    """
    match = re.match(r"blk\.(\d+)\.(?:(ffn_down)|(ffn))?(\w*)", name)
    if match is None:
        return HEAD if name.startswith("output") else EMBEDDINGS
    number, down, ffn, rest = match.groups()
    part = "down" if down else "gate-up" if ffn else "attn"
    if rest.endswith("_shexp"):
        part = "shared"
    return f"{part} {number}"


@dataclass(frozen=True)
class Layout:
    """Tensors of a GGUF file, from which its size in other types is computed."""

    tensors: Mapping[str, Rounded]
    """Tensors by name, from a file in any types."""
    header: int
    """Bytes of the file without the tensors."""
    layers: int

    @property
    def rounded(self) -> dict[str, str]:
        """Group of each tensor that is quantised."""
        return {
            name: group_of(name) for name, tensor in self.tensors.items() if tensor.type != WHOLE
        }

    def bytes(self, names: Sequence[str], types: Sequence[str]) -> tuple[int, Numbers]:
        """Return bytes that no choice changes, and bytes of each group in each type (G, C).

        Args:
            names: of groups.
            types: of tensors.
        """
        bytes_GC = np.zeros((len(names), len(types)))
        fixed, groups = self.header, self.rounded
        for name, tensor in self.tensors.items():
            if name not in groups:
                fixed += tensor.bytes
                continue
            for c, type in enumerate(types):
                rounded = tensor.as_type(type, weighed=groups[name] not in OUTSIDE)
                bytes_GC[names.index(groups[name]), c] += rounded.bytes
        return fixed, bytes_GC

    def size(self, types: Mapping[str, str]) -> int:
        """Return the bytes of a file with types by groups."""
        fixed, bytes_GC = self.bytes(tuple(types), tuple(types.values()))
        return fixed + int(bytes_GC.trace())

    def least(self, types: Sequence[str]) -> int:
        """Return the bytes of the smallest file in some types of files."""
        names = tuple(dict.fromkeys(self.rounded.values()))
        fixed, bytes_GC = self.bytes(names, tensor_types(types))
        return fixed + int(bytes_GC.min(1).sum())

    def check(self, types: Sequence[str], budget: int) -> None:
        """Refuse a budget that no file in some types of files meets.

        Raises:
            MoesaicError: names the smallest.
        """
        if self.least(types) > budget:
            raise MoesaicError(
                f"memory {in_unit(budget)} is out of reach: "
                f"the least is {in_unit(self.least(types))}."
            )


def choice(kls: Mapping[str, Mapping[str, float]], layout: Layout, budget: int) -> dict[str, str]:
    """Return the type of each group for the file with the least KL within a budget.

    Args:
        kls: estimated KL of quantising each group, by type of tensors and by group.
        layout: of the file.
        budget: bytes.

    Raises:
        MoesaicError: no such file is small enough.
    """
    types, groups = (*kls,), (*next(iter(kls.values())),)
    layout.check(types, budget)
    kl_GC = np.array([[kls[type][group] for type in types] for group in groups])
    fixed, bytes_GC = layout.bytes(groups, types)
    chosen = least(kl_GC, bytes_GC, budget - fixed)
    return {group: types[c] for group, c in zip(groups, chosen, strict=True)}


def tensor_types(types: Iterable[str]) -> tuple[str, ...]:
    """Return types of tensors for types of files, the widest first; f32 only if alone.

    >>> tensor_types(["q2_k", "q4_k_m", "f32", "q8_0", "q4_k_s"])
    ('q8_0', 'q4_k', 'q2_k')
    """
    names = dict.fromkeys(FILES.get(type, type) for type in types if type != WHOLE)
    return tuple(sorted(names, key=bits, reverse=True)) or (WHOLE,)


def least(kl_GC: Numbers, bytes_GC: Numbers, budget: float) -> list[int]:
    """Return the choice of each group with the least sum of KL.

    Args:
        kl_GC: KL of each choice.
        bytes_GC: its bytes.
        budget: largest sum of bytes; the smallest choices must meet it.

    Returns:
        a choice for each group.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    count, choices = kl_GC.shape
    group_GX = np.kron(np.eye(count), np.ones(choices))
    kl_X = kl_GC.ravel()
    with _stdout_to_stderr():
        solution = milp(
            kl_X / max(kl_X.max(), 1e-30),  # the solver's tolerances are absolute
            integrality=np.ones(kl_GC.size),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(group_GX, 1, 1),
                LinearConstraint(bytes_GC.reshape(1, -1), -np.inf, budget),
            ],
            options={"mip_rel_gap": GAP},
        )
    return [int(c) for c in solution.x.reshape(kl_GC.shape).argmax(1)]


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout of compiled code to stderr: HiGHS prints a line for its developers there."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
