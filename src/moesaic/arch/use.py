"""Parameters of a decoder layer, counted one way for all kinds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LayerUse:
    """Projection weights of one decoder layer, and how many of them a token uses.

    Only linear projections of attention and FFN are counted; norms and biases are left out, and
    routers are counted apart.
    """

    kind: str
    """``dense``, ``moe``, or a layer kind's name."""
    width: int
    """Intermediate size of the whole layer as stored; for a mixture, of all its experts."""
    active_width: float
    """Neurons that a token runs."""
    attention: int
    """Weights of attention's projections."""
    ffn: int
    """Weights of the FFN's projections."""
    experts: int = 0
    """Routed experts; 0 if the layer does not route."""
    top_k: int = 0
    """Routed experts that a token runs."""
    expert_width: int = 0
    """Neurons of one routed expert if all are equal, else 0."""
    router: int = 0
    """Weights of routers."""
    dropped: int = 0
    """Projection weights of the original that this layer does not have."""
    copied: int = 0
    """FFN weights beyond the original's: copies, if experts overlap."""
    active_attention: float = 1.0
    """Share of attention's stored projections that a token uses."""

    @property
    def stored(self) -> int:
        """Projection weights of the layer."""
        return self.attention + self.ffn

    @property
    def active(self) -> float:
        """Projection weights that a token uses."""
        return self.attention * self.active_attention + self.active_ffn

    @property
    def active_ffn(self) -> float:
        """Weights of the FFN that a token uses."""
        return self.ffn * self.active_width / self.width if self.width else 0.0


@dataclass(frozen=True)
class RoutedModule:
    """Module that chooses a token's experts, and the sizes it chooses from."""

    router: nn.Module
    shared: int
    """Neurons that every token runs besides the chosen experts."""
    experts: tuple[int, ...]
    """Neurons of each expert."""
