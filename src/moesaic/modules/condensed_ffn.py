"""Condensed FFN: the experts that every token runs, as one dense MLP (CD-MoE, Eq. 3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn


class CondensedFFN(nn.Module):
    """MLP without biases: ``y = down(act(gate x) * up x)``.

    Fixed expert weights are folded into the down projection. If the base scales its shared path by
    a gate for each token, the first ``gated`` neurons are that path and ``shared_gate`` scales
    them: sigmoid(g x) down(h) = down(sigmoid(g x) h).

    Args:
        hidden_size: D.
        width: number of neurons; 0 for a block that adds nothing.
        act: the base's activation function.
        names: names of gate, up and down.
        gated: number of neurons that the shared path's gate scales.
        more: True if the base's block returns a pair, whose second part is for the router's loss.
        device: device of the new parameters.
        dtype: their dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        act: Callable[[Tensor], Tensor],
        names: tuple[str, str, str],
        gated: int = 0,
        more: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():  # torch warns of an empty matrix, which is intended
            warnings.simplefilter("ignore", UserWarning)
            for name, (rows, columns) in shapes(names, hidden_size, width).items():
                linear = nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)
                self.add_module(name, linear)
        self.act_fn, self.names = act, names
        self.gated, self.more = gated, more
        if gated:
            self.shared_gate = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=dtype)

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Gate, up and down."""
        gate, up, down = (getattr(self, name) for name in self.names)
        return gate, up, down

    def forward(self, x: Tensor, **_: object) -> Tensor | tuple[Tensor, None]:
        """Return the block's output, of the shape of its input (..., D).

        Other arguments of the base's block are for its router, and are ignored.
        """
        return (self.written(x), None) if self.more else self.written(x)

    def written(self, x: Tensor) -> Tensor:
        """Return the output alone, never a pair."""
        gate, up, down = self.projections
        h = self.act_fn(gate(x)) * up(x)
        if self.gated:
            scale = torch.sigmoid(self.shared_gate(x))
            h = torch.cat([scale * h[..., : self.gated], h[..., self.gated :]], -1)
        return down(h)

    def extra_repr(self) -> str:
        return f"gated={self.gated}" if self.gated else ""


def shapes(
    names: tuple[str, str, str], hidden_size: int, width: int = 0
) -> dict[str, tuple[int, int]]:
    """Return the shapes of gate, up and down by name."""
    rows, columns = (width, hidden_size), (hidden_size, width)
    return dict(zip(names, (rows, rows, columns), strict=True))


class Nothing(nn.Module):
    """Replacement of a path beside the block that was folded into the block: it adds zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class PassThrough(nn.Module):
    """Removed decoder layer: no attention, no neurons, its input is its output."""

    def __init__(self, hidden_size: int, ffn_path: str, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.self_attn = nn.Identity()
        setattr(self, ffn_path, CondensedFFN(hidden_size, 0, nn.Identity(), names))

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states
