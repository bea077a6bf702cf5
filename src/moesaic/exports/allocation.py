"""Types of the tensors of a GGUF file: those with the least estimated KL within a budget of bytes.

A group of tensors is a layer's attention, the gates and ups of its FFN, its downs, both of its
shared expert, the embeddings, or the head. If KLs of quantising each group to each type add up,
the best types are a knapsack with one choice a group, of which scipy's milp finds the optimum:

    min sum_gt x_gt KL_gt  with  sum_gt x_gt bytes_gt <= budget,  sum_t x_gt = 1,  x_gt in {0, 1}

They nearly do where errors of different groups are independent. In some models and types they are
not: errors of many layers point the same way, and the KL of all is several times the sum. Mixed
terms of pairs are therefore added to the objective, which several such programs approach.

Shape suffixes: G groups, C choices (types), X pairs of a group and a choice, S samples of an
estimate.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import product
from operator import add
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from moesaic.config import in_unit
from moesaic.errors import MoesaicError
from moesaic.exports import quantiser
from moesaic.exports.quantiser import WHOLE

GAP = 1e-4
"""Relative gap to the least possible KL at which a solver stops."""
ALIKE = 0.01
"""Largest p with which errors of experts are taken to have something in common."""
OF_A_BIT = 2.0
"""Factor by which errors of quantising grow with one bit less a weight: 6 dB, their KL fourfold."""
SOLUTIONS = 10
"""Most linear programs that are solved for one choice."""
OUTSIDE = EMBEDDINGS, HEAD = "embeddings", "head"
"""Groups of tensors outside layers, which have no importance weights."""
TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
"""Default types to choose from."""

Types = Mapping[str, str]
"""Types of tensors by group, or those of a file's tensors by name."""
Numbers: TypeAlias = "npt.NDArray[np.float64]"
PriceTable: TypeAlias = "Mapping[str, Mapping[str, Price]]"
"""Prices by type of tensors, then by group."""
Sampled: TypeAlias = "tuple[Price, Price, tuple[int, int], int]"
"""Prices of quantising two halves of some experts, how many each half has, and a layer has."""


def _group_of(name: str, layers: int) -> str:
    """Return the group of a tensor by llama.cpp's name; MTP layers are of the last layer's groups.

    >>> _group_of("blk.5.ffn_gate_exps.weight", 9), _group_of("blk.5.ffn_down_exps.weight", 9)
    ('gate-up 5', 'down 5')
    >>> _group_of("blk.1.attn_q.weight", 9), _group_of("blk.9.ffn_down_shexp.weight", 9)
    ('attn 1', 'shared-down 8')
    >>> _group_of("token_embd.weight", 9), _group_of("output.weight", 9)
    ('embeddings', 'head')
    """
    match = re.match(r"blk\.(\d+)\.(?:(ffn_down)|(ffn))?(\w*)", name)
    if match is None:
        return HEAD if name.startswith("output") else EMBEDDINGS
    number, down, ffn, rest = match.groups()
    part = "down" if down else "gate-up" if ffn else "attn"
    if rest.endswith("_shexp"):
        part = "shared-down" if down else "shared"
    return f"{part} {min(int(number), layers - 1)}"


@dataclass(frozen=True)
class Layout:
    """Tensors of a GGUF file, from which its size in other types is computed."""

    tensors: Mapping[str, quantiser.FileTensor]
    """Tensors by name, from a file in any types."""
    header: int
    """Bytes of the file without the tensors."""
    layers: int

    @cached_property
    def group_of(self) -> dict[str, str]:
        """Group of each tensor that is quantised."""
        quantised = (name for name, tensor in self.tensors.items() if tensor.type != WHOLE)
        return {name: _group_of(name, self.layers) for name in quantised}

    @cached_property
    def tensors_of(self) -> dict[str, dict[str, quantiser.FileTensor]]:
        """Tensors of each group, by name."""
        tensors = defaultdict[str, dict[str, quantiser.FileTensor]](dict)
        for name, group in self.group_of.items():
            tensors[group][name] = self.tensors[name]
        return tensors

    def bytes(self, names: Sequence[str], types: Sequence[str]) -> tuple[int, Numbers]:
        """Return bytes that no choice changes, and bytes of each group in each type (G, C).

        Args:
            names: of groups.
            types: of tensors.
        """
        bytes_GC = np.zeros((len(names), len(types)))
        fixed, groups = self.header, self.group_of
        for name, tensor in self.tensors.items():
            if name not in groups:
                fixed += tensor.bytes
                continue
            for c, type in enumerate(types):
                quantised = tensor.as_type(type, weighed=groups[name] not in OUTSIDE)
                bytes_GC[names.index(groups[name]), c] += quantised.bytes
        return fixed, bytes_GC

    def types_in(self, group: str, type: str, filled: bool = False) -> dict[str, str]:
        """Return the types of a group's tensors by name, where the group is to have a type.

        Rows that blocks of the type do not divide have another one, of more bits.

        Args:
            group: name of the group.
            type: of tensors.
            filled: True if rows of down projections, whose length is the width of the FFN, are
                filled up to whole blocks with zeros.
        """
        tensors = self.tensors_of[group]
        if filled and group.startswith(("down", "shared-down")):
            tensors = {name: tensor.filled(type) for name, tensor in tensors.items()}
        weighed = group not in OUTSIDE
        return {name: tensor.as_type(type, weighed).type for name, tensor in tensors.items()}

    def growth(self, before: Types, after: Types) -> float:
        """Return the factor by which errors of some tensors grow from types to others.

        Each bit less a weight, in the mean of the tensors, is a factor of :data:`OF_A_BIT`.
        """
        numel = {name: self.tensors[name].numel for name in before}
        fewer = {name: quantiser.bits(before[name]) - quantiser.bits(after[name]) for name in numel}
        total = sum(n * fewer[name] for name, n in numel.items())
        return float(OF_A_BIT ** (total / sum(numel.values())))

    def size(self, types: Mapping[str, str]) -> int:
        """Return the bytes of a file with types by groups."""
        fixed, bytes_GC = self.bytes(tuple(types), tuple(types.values()))
        return fixed + int(bytes_GC.trace())

    def least(self, types: Sequence[str]) -> int:
        """Return the bytes of the smallest file in some types of files."""
        names = tuple(dict.fromkeys(self.group_of.values()))
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


@dataclass(frozen=True, eq=False)
class Price:
    """Estimated effect of a change of a model, window by window.

    The prices of several changes add up to that of all of them together, interactions included.
    """

    v_KN: Numbers
    """Change of the log-likelihood of drawn labels (:mod:`moesaic.observation.changes`), over
    the square root of twice the tokens of a window."""
    apart: float = 0.0
    """KL that no other change interacts with, nats a token, such as a changed head's. Negative if
    the products of ``v_KN`` with other changes are right, but its square is too large
    (:func:`of_all_experts`)."""

    def __add__(self, other: Price) -> Price:
        return Price(self.v_KN + other.v_KN, self.apart + other.apart)

    def __mul__(self, factor: float) -> Price:
        """Return the price of a change whose errors are so many times as large."""
        return Price(self.v_KN * factor, self.apart * factor**2)

    @classmethod
    def together(cls, prices: Iterable[Price]) -> Price:
        """Return the price of several changes at once."""
        return reduce(add, prices)

    @property
    def kl_S(self) -> Numbers:
        """KL in nats a token, by draw and window: as many samples."""
        kl_S: Numbers = np.square(self.v_KN).ravel() + self.apart
        return kl_S

    @property
    def kl(self) -> float:
        """Mean KL in nats a token."""
        return float(self.kl_S.mean())


def prices_in(prices: PriceTable, of: Layout, layout: Layout) -> dict[str, dict[str, Price]]:
    """Return the prices of types for the file of a result, by type and group.

    Blocks of some types divide the rows of a result and not the original's, or the reverse. If the
    types that a group's tensors then have were not priced, errors are taken to grow by
    :data:`OF_A_BIT`.

    Args:
        prices: of quantising each group of the original, with rows filled up to whole blocks, by
            type and group; those that not all groups have are of substitutes of types.
        of: layout of the original's file.
        layout: of the result's.
    """

    def price(group: str, type: str) -> Price:
        wanted = layout.types_in(group, type)
        for other in (type, *prices):
            if group in prices[other] and of.types_in(group, other, filled=True) == wanted:
                return prices[other][group]
        return prices[type][group] * layout.growth(of.types_in(group, type, filled=True), wanted)

    groups = max(prices.values(), key=len, default={})
    whole = [type for type, of_type in prices.items() if len(of_type) == len(groups)]
    return {type: {group: price(group, type) for group in groups} for type in whole}


def of_all_experts(sampled: Sequence[Sampled]) -> list[Price]:
    """Return prices of quantising all E experts, by those of two halves of n of them.

    With n_a and n_b experts in halves a and b, two experts have a share s of KL_n in common:

        s = E[v_a v_b] / (n_a n_b KL_n)    KL_E = E/n (1 + n (E - n) s) KL_n

    and products with the errors of other tensors are E/n times those of the sampled experts. If s,
    of which every group gives an estimate, is not significantly above 0, errors are taken to be
    independent: KL_E = E/n KL_n, and products are (E/n)^(1/2) times as large. s is large in a model
    that was trained on from quantised weights and is quantised again.

    Args:
        sampled: by group; of one matrix in all layers, in one type.
    """
    from scipy.stats import ttest_1samp

    kl_G = np.array([(a + b).kl for a, b, *_ in sampled])
    of_pair_G = np.array([(a.v_KN * b.v_KN).mean() / (m * n) for a, b, (m, n), _ in sampled])
    s_G = of_pair_G / np.maximum(kl_G, 1e-30)
    alike = s_G.std() > 0 and ttest_1samp(s_G, 0, alternative="greater").pvalue < ALIKE
    prices = []
    for (a, b, halves, experts), kl in zip(sampled, kl_G.tolist(), strict=True):
        n, times = sum(halves), experts / sum(halves)
        growth = 1 + n * (experts - n) * float(s_G.mean()) if alike else 1.0
        whole = (a + b) * (times if alike else times**0.5)
        prices.append(Price(whole.v_KN, times * min(growth, times) * kl - whole.kl))
    return prices


def choice(prices: PriceTable, layout: Layout, budget: int) -> dict[str, str]:
    """Return the type of each group for the file with the least KL within a budget.

    Args:
        prices: of quantising each group, by type of tensors and by group.
        layout: of the file.
        budget: bytes.

    Raises:
        MoesaicError: no such file is small enough.
    """
    types, groups = (*prices,), (*next(iter(prices.values())),)
    layout.check(types, budget)
    kl_GC = np.array([[prices[type][group].kl for type in types] for group in groups])
    v_GCS = np.array([[prices[t][group].v_KN.ravel() for t in types] for group in groups])
    fixed, bytes_GC = layout.bytes(groups, types)
    chosen = least_of_all(kl_GC, mixed_terms(v_GCS), bytes_GC, budget - fixed)
    return {group: types[c] for group, c in zip(groups, chosen, strict=True)}


def mixed_terms(v_GCS: Numbers) -> Numbers:
    """Return what pairs of choices add to the KL of both, nats a token (X, X); 0 within a group.

    The KL of several changes is E[(sum v)^2], so that a pair's mixed term is E[v v']. From few
    samples that is mostly noise, which a choice would exploit. The correlations r of each pair of
    types are therefore shrunk to r (1 - sum var(r) / sum r^2), as Schaefer and Strimmer do (2005,
    "A shrinkage approach to large-scale covariance matrix estimation", target D), with the noise
    taken to be two standard errors larger.

    Args:
        v_GCS: effects of quantising each group to each type (``Price.v_KN``).
    """
    count, choices, samples = v_GCS.shape
    scale_GC = np.sqrt(np.square(v_GCS).mean(-1))
    u_GCS = v_GCS / np.maximum(scale_GC, 1e-30)[..., None]
    mixed_GCGC = np.zeros((count, choices, count, choices))
    apart_GG = 1 - np.eye(count)
    most = 1 + 2 * (2 / max(apart_GG.sum() / 2, 1)) ** 0.5  # of a mean of r^2 over all pairs
    for c, d in product(range(choices), repeat=2):
        r_GG = u_GCS[:, c] @ u_GCS[:, d].T / samples * apart_GG
        squares_GG = np.square(u_GCS[:, c]) @ np.square(u_GCS[:, d]).T / samples * apart_GG
        noise = squares_GG.sum() / samples
        kept = max(0.0, 1 - most * noise / max(np.square(r_GG).sum(), 1e-30))
        mixed_GCGC[:, c, :, d] = kept * r_GG * np.outer(scale_GC[:, c], scale_GC[:, d])
    return mixed_GCGC.reshape(count * choices, -1)


def least_of_all(kl_GC: Numbers, mixed_XX: Numbers, bytes_GC: Numbers, budget: float) -> list[int]:
    """Return choices of about the least KL, x'kl + x'M x with M the mixed terms; see :func:`least`.

    The objective is linearised at the mean of the solutions so far (Frank and Wolfe, 1956), and of
    the solutions, which are whole numbers, the best is returned.
    """
    kl_X, mean_X, best = kl_GC.ravel(), np.zeros(kl_GC.size), (np.inf, list[int]())
    for step in range(SOLUTIONS):
        slope_X = kl_X + 2 * mixed_XX @ mean_X
        slope_GC = slope_X.reshape(kl_GC.shape)
        chosen = least(slope_GC - slope_GC.min(1, keepdims=True), bytes_GC, budget)
        x_X = np.eye(kl_GC.shape[1])[chosen].ravel()
        best = min(best, (float(x_X @ kl_X + x_X @ mixed_XX @ x_X), chosen))
        if step and slope_X @ (mean_X - x_X) <= GAP * best[0]:
            break
        mean_X += (x_X - mean_X) * (2 / (step + 2))
    return best[1]


def tensor_types(types: Iterable[str]) -> tuple[str, ...]:
    """Return types of tensors for types of files, the widest first; f32 only if no other is given.

    >>> tensor_types(["q2_k", "q4_k_m", "f32", "q8_0", "q4_k_s"])
    ('q8_0', 'q4_k', 'q2_k')
    """
    names = dict.fromkeys(quantiser.FILES.get(type, type) for type in types if type != WHOLE)
    return tuple(sorted(names, key=quantiser.bits, reverse=True)) or (WHOLE,)


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
    with _quiet_stdout():
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
def _quiet_stdout() -> Iterator[None]:
    """Drop what compiled code prints: HiGHS writes lines for its developers to stdout."""
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
