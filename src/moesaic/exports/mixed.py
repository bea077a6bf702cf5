"""Types layer by layer: of all GGUF files within a budget the one of least estimated KL.

A group of tensors is a layer's attention, the gates and ups of its FFN, its downs, its shared
expert, the embeddings, or the head. What each loses by being rounded to each type is estimated
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

WINDOWS = 16
"""Of the text by which the KL of groups is estimated."""
GAP = 1e-4
"""The share by which the sum of KL may lie above the least possible one."""
OUTSIDE = EMBEDDINGS, HEAD = "embeddings", "head"
"""The groups of what is in no layer, which no text weighs."""
TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
"""What is chosen from, where nothing is said."""

Numbers: TypeAlias = "npt.NDArray[np.float64]"


def group_of(name: str) -> str:
    """The group of a tensor by llama.cpp's name.

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
    """The tensors of a GGUF file, from which its bytes follow whatever their types."""

    tensors: Mapping[str, Rounded]
    """By name, as in a file that has them in any types."""
    header: int
    """Bytes of the file beside them."""
    layers: int

    @property
    def rounded(self) -> dict[str, str]:
        """The group of each tensor that is rounded."""
        return {
            name: group_of(name) for name, tensor in self.tensors.items() if tensor.type != WHOLE
        }

    def bytes(self, names: Sequence[str], types: Sequence[str]) -> tuple[int, Numbers]:
        """What a file takes beside what is rounded, and each group in each type (G, C).

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
        """Bytes of a file with types by groups."""
        fixed, bytes_GC = self.bytes(tuple(types), tuple(types.values()))
        return fixed + int(bytes_GC.trace())

    def least(self, types: Sequence[str]) -> int:
        """Bytes of the smallest file in some types of files."""
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
    """The type of each group by which a file within a budget has the least KL.

    Args:
        kls: by type of tensors and by group the KL where that group is rounded.
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
    """Types of tensors by those of files, the widest first; f32 where it is the only one.

    >>> tensor_types(["q2_k", "q4_k_m", "f32", "q8_0", "q4_k_s"])
    ('q8_0', 'q4_k', 'q2_k')
    """
    names = dict.fromkeys(FILES.get(type, type) for type in types if type != WHOLE)
    return tuple(sorted(names, key=bits, reverse=True)) or (WHOLE,)


def least(kl_GC: Numbers, bytes_GC: Numbers, budget: float) -> list[int]:
    """The choice of each group of which the KL adds up to the least.

    Args:
        kl_GC: of each choice.
        bytes_GC: what it takes.
        budget: that all may take together; the smallest ones take no more.

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
    """What compiled code prints goes to stderr: HiGHS has a line for its developers on stdout,
    where programs read JSON."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
