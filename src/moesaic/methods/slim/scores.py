"""Scores: how much a neuron counts. One entry each; torch-free to import.

========  =============================================================================
w_t h_tj  input of the down projection at neuron j, times the combine weight of its expert
d_j       column j of the down projection
========  =============================================================================

Within an expert the neurons of the highest score stay; squares of scores add up, so that an
expert's own score is the root of their sum over the neurons that it would keep.

Another package adds a score by an entry point in the group ``moesaic.scores`` that names a
:class:`Score`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesaic.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Neurons:
    """The neurons of a layer's experts (E, M), or of its shared path (S,)."""

    energy: Tensor
    """float64: sum of (w_t h_tj)^2."""
    reach: Tensor
    """float64: ||d_j||."""
    size: Tensor
    """float64: norm of all of a neuron's weights."""
    seed: int
    """Of random choice; another one for every layer."""
    gram: Tensor | None = None
    """float64: sum of (w h_j)(w h_k) of an expert's neurons (E, M, M); None where no score asked
    for it."""
    down: Tensor | None = None
    """float64: the columns d_j (E, D, M); with ``gram``."""


@dataclass(frozen=True)
class Score:
    """A way to decide which neurons stay."""

    name: str
    """What ``score`` calls it."""
    title: str
    """As titles write it: ``slimmed by energy``."""
    help: str
    """What it measures, in a few words."""
    score: Callable[[Neurons], Tensor]
    """Each neuron's score, in the shape of its neurons."""
    paper: str = ""
    """Authors, title and place; empty where it is of no paper that we know."""
    observes: bool = True
    """It looks at tokens."""
    gram: bool = False
    """It needs the inner products of neurons, M x M of each expert."""


def _random(neurons: Neurons) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(neurons.seed)
    return torch.rand(neurons.size.shape, dtype=torch.float64, generator=generator)


def _surgeon(neurons: Neurons) -> Tensor:
    import torch

    from moesaic.methods.slim.surgeon import removal_costs

    assert neurons.gram is not None
    assert neurons.down is not None
    pairs = zip(neurons.gram, neurons.down, strict=True)
    return torch.stack([removal_costs(gram_MM, down_DM) for gram_MM, down_DM in pairs]).sqrt()


BUILT_IN = (
    Score(
        "energy",
        "energy",
        "sqrt(sum of (w h_j)^2) times ||d_j||",
        lambda neurons: neurons.energy.sqrt() * neurons.reach,
        'Xu et al., "CAMERA: Multi-Matrix Joint Compression for MoE Models via Micro-Expert '
        'Redundancy Analysis" (AAAI 2026)',
    ),
    Score(
        "surgeon",
        "optimal brain surgeon",
        "the error that a refit leaves without the neuron, one neuron after the other",
        _surgeon,
        'after Hassibi and Stork, "Second Order Derivatives for Network Pruning: Optimal Brain '
        "Surgeon\" (NeurIPS 1992), whose Hessian is that of the layer's squared error here",
        gram=True,
    ),
    Score(
        "magnitude",
        "magnitude",
        "without data: norm of a neuron's weights",
        lambda neurons: neurons.size,
        observes=False,
    ),
    Score("random", "random choice", "a seeded draw", _random, observes=False),
)
"""Ours, in the order in which they are listed. A new one is an entry here."""


SCORES = Registry("moesaic.scores", {}, {s.name: s for s in BUILT_IN})
"""The scores by name."""
