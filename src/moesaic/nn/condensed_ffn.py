"""The condensed FFN: the experts that every token runs, as one dense MLP (CD-MoE, Eq. 3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn


class CondensedFFN(nn.Module):
    """``y = down(act(gate x) * up x)``, without biases.

    Fixed expert weights are folded into ``down_proj``. Where the base scales its shared path by a
    gate token by token, the first ``gated`` neurons are that path and ``shared_gate`` scales them:
    sigmoid(g x) down(h) = down(sigmoid(g x) h).

    Args:
        hidden_size: D.
        width: neurons; 0 for a block that adds nothing.
        act: the base's activation function.
        gated: neurons that the shared path's gate scales.
        more: the base's block returns a pair, of which the second part is for the router's loss.
        device: of the new parameters.
        dtype: their type.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        act: Callable[[Tensor], Tensor],
        gated: int = 0,
        more: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():  # torch warns of an empty matrix; it is what is meant
            warnings.simplefilter("ignore", UserWarning)
            self.gate_proj = nn.Linear(hidden_size, width, bias=False, device=device, dtype=dtype)
            self.up_proj = nn.Linear(hidden_size, width, bias=False, device=device, dtype=dtype)
            self.down_proj = nn.Linear(width, hidden_size, bias=False, device=device, dtype=dtype)
        self.act_fn = act
        self.gated, self.more = gated, more
        if gated:
            self.shared_gate = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, None]:
        """The block's output, of the shape of its input (..., D)."""
        return (self.written(x), None) if self.more else self.written(x)

    def written(self, x: Tensor) -> Tensor:
        """The same, and nothing beside it."""
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if self.gated:
            scale = torch.sigmoid(self.shared_gate(x))
            h = torch.cat([scale * h[..., : self.gated], h[..., self.gated :]], -1)
        return self.down_proj(h)

    def extra_repr(self) -> str:
        return f"gated={self.gated}" if self.gated else ""


class Nothing(nn.Module):
    """In the place of a path beside the block that was folded into it: it adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class PassThrough(nn.Module):
    """A decoder layer that is gone: no attention, no neurons, its input is its output."""

    @staticmethod
    def shapes(hidden_size: int) -> dict[str, tuple[int, int]]:
        """Shapes of the projections without neurons, by name."""
        rows, columns = (0, hidden_size), (hidden_size, 0)
        return {"gate_proj": rows, "up_proj": rows, "down_proj": columns}

    def __init__(self, hidden_size: int, ffn_path: str) -> None:
        super().__init__()
        self.self_attn = nn.Identity()
        setattr(self, ffn_path, CondensedFFN(hidden_size, 0, nn.Identity()))

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states
