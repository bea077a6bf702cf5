"""Scores of neurons. One entry each; imports no torch.

========  =============================================================================
w_t h_tj  input of the down projection at neuron j, times the combine weight of its expert
d_j       column j of the down projection
========  =============================================================================

Within an expert the neurons of the highest score are kept; squares of scores add up, so that an
expert's own score is the root of their sum over its kept neurons.

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
    """Statistics of the neurons of a layer's experts (E, M), or of its shared path (S,)."""

    energy: Tensor
    """Sum of (w_t h_tj)^2, float64."""
    reach: Tensor
    """Norm ||d_j||, float64."""
    size: Tensor
    """Norm of all of a neuron's weights, float64."""
    seed: int
    """Seed of random choice, different for every layer."""
    gram: Tensor | None = None
    """Sum of (w h_j)(w h_k) of an expert's neurons (E, M, M), float64; None if not needed."""
    down: Tensor | None = None
    """Columns d_j (E, D, M), float64; given with ``gram``."""


@dataclass(frozen=True)
class Score:
    """Rule that decides which neurons are kept."""

    name: str
    """Value of the option ``score`` that chooses it."""
    title: str
    """Name in titles, as in ``slimmed by energy``."""
    help: str
    """Measure in a few words."""
    score: Callable[[Neurons], Tensor]
    """Function that returns each neuron's score, in the shape of its neurons."""
    paper: str = ""
    """Authors, title and place; empty if it comes from no paper that we know."""
    observes: bool = True
    """True if it reads tokens."""
    gram: bool = False
    """True if it needs the inner products of neurons, M x M for each expert."""


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
"""Scores of this package, in the order in which they are listed. A new one is an entry here."""


SCORES = Registry("moesaic.scores", {}, {s.name: s for s in BUILT_IN})
"""Scores by name, those of other packages included."""
