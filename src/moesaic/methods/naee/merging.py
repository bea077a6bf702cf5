"""Experts merged instead of dropped: M-SMoE, a baseline.

Li et al., "Merge, Then Compress: Demystify Efficient SMoE with Hints from Its Routing Policy"
(ICLR 2024).

1. The experts that most tokens are routed to are dominant, and stay.
2. Every other expert joins the dominant one whose router logits are most like its own.
3. Its neurons are put in the order of the dominant one's, by the assignment of least squared
   distance between the weights (:mod:`moesaic.layers.merged`).
4. The members' weights are averaged, each with its share of the group's tokens.

Where we depart from it:

- Only the dominant experts' rows stay in the router, so that the result is of the architecture's
  own class. There, a token that chose a member is routed to the merged expert; here it is routed
  anew among those that are there, as after pruning.
- Equally many experts stay in every layer, unless counts may differ; then they are allotted as for
  the other criteria, by the share of tokens whose expert goes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.layers.merged import MergedLayer


def most_alike(logits_TE: Tensor, kept_E: Tensor) -> Tensor:
    """For each expert the kept one of most similar router logits (E,); a kept one is its own.

    Similarity is the cosine over the tokens.

    >>> logits = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.1, 3.0]])
    >>> most_alike(logits, torch.tensor([True, False, True])).tolist()
    [0, 0, 2]
    """
    unit_ET = F.normalize(logits_TE.double().T, dim=1)
    alike_EE = (unit_ET @ unit_ET.T).masked_fill(~kept_E, float("-inf"))
    return torch.where(kept_E, torch.arange(len(kept_E)), alike_EE.argmax(1))


def shares(calls_E: Tensor, into_E: Tensor) -> Tensor:
    """Each expert's share of the tokens of its group (E,); equal ones where there are no tokens.

    >>> shares(torch.tensor([6, 2, 0, 0]), torch.tensor([0, 0, 2, 2])).tolist()
    [0.75, 0.25, 0.5, 0.5]
    """
    calls_E = calls_E.double()
    total_E, size_E = torch.zeros(2, len(calls_E), dtype=torch.float64)
    total_E.index_add_(0, into_E, calls_E)
    size_E.index_add_(0, into_E, torch.ones_like(calls_E))
    total_E, size_E = total_E[into_E], size_E[into_E]
    return torch.where(total_E > 0, calls_E / total_E.clamp(min=1), 1 / size_E).float()


def merged_layer(kept_E: Tensor, logits_TE: Tensor, calls_E: Tensor) -> MergedLayer:
    """The layer in which the experts that go join those that stay."""
    into_E = most_alike(logits_TE, kept_E)
    return MergedLayer(kept_E.nonzero().flatten(), into_E, shares(calls_E, into_E))
