"""The modules that train in ToMoE: expert embeddings, and those that make masks of them
(App. A.1, Tab. 8).

Shape suffixes: N experts, M neurons, E embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EMBEDDING, INPUT, HIDDEN = 128, 32, 64
"""d_e, and the sizes of the hypernetwork's input and of its state in each direction."""


class Hypernetwork(nn.Module):
    """HN, Eq. 1: a Bi-GRU along the slots attention 0, FFN 0, attention 1, ...; a batch of experts.

    Its input is random and fixed.
    """

    def __init__(self, slots: int, experts: int) -> None:
        super().__init__()
        self.register_buffer("z", torch.randn(slots, experts, INPUT))
        self.gru = nn.GRU(INPUT, HIDDEN, bidirectional=True)

    def forward(self) -> Tensor:
        """E_all (slots, N, E)."""
        embeddings: Tensor = self.gru(self.z)[0]
        return embeddings


class LocalEmbeddings(nn.Module):
    """Without a hypernetwork (Tab. 13): free embeddings of FFNs, none of attention."""

    def __init__(self, slots: int, experts: int) -> None:
        super().__init__()
        self.ffn = nn.Parameter(torch.randn(slots // 2, experts, EMBEDDING))

    def forward(self) -> Tensor:
        """E_all (slots, N, E)."""
        return torch.stack([torch.zeros_like(self.ffn), self.ffn], 1).flatten(0, 1)


class ProjD(nn.Module):
    """Proj_D: LayerNorm, GELU, Linear, from the embedding to one logit a dimension (Tab. 8)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(EMBEDDING)
        self.linear = nn.Linear(EMBEDDING, width, bias=False)

    def forward(self, e: Tensor) -> Tensor:
        logits: Tensor = self.linear(F.gelu(self.norm(e)))
        return logits


class MLPModules(nn.Module):
    """Router and Proj_D of one FFN."""

    def __init__(self, hidden_size: int, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden_size, experts, bias=False)
        self.proj_d = ProjD(width)


class MHAModules(nn.Module):
    """Proj_D of one attention, and Proj_E if each token chooses."""

    def __init__(self, hidden_size: int, width: int, routed: bool) -> None:
        super().__init__()
        self.proj_d = ProjD(width)
        if routed:
            self.proj_e = nn.Linear(hidden_size, EMBEDDING, bias=False)
