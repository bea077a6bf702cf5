"""Experts of different widths: every neuron is stored once, without zeros.

Shape suffixes: T tokens, E experts, D hidden size, W neurons of the widest expert, N tokens of one
expert, H neurons of one, R neurons of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.mixture import Experts, each_with_its_tokens
from moesaic.registry import Dynamic, remade

UP_ROWS, DOWN_ROWS = "gate_up_rows", "down_rows"
"""Names of tensors: each expert's gates, then ups (2 R, D); columns of its down projection (R,
D)."""


class _UnevenExperts(nn.Module):
    """Mixin for the class of a layer's experts: each has its own width."""

    slices: Sequence[tuple[int, int]]
    """First row of each expert in ``down_rows``, and the row after its last."""
    gate_up_rows: Tensor
    down_rows: Tensor
    _apply_gate: Callable[[Tensor], Tensor]

    @property
    def widths(self) -> tuple[int, ...]:
        """Neurons of each expert."""
        return tuple(stop - start for start, stop in self.slices)

    def weights_of(self, number: int) -> tuple[Tensor, Tensor]:
        """Return gates and ups of an expert (2 H, D), and its down projection transposed (H, D)."""
        start, stop = self.slices[number]
        return self.gate_up_rows[2 * start : 2 * stop], self.down_rows[start:stop]

    @property
    def gate_up_proj(self) -> Tensor:
        """Copy in the base's layout, padded with zeros (E, 2 W, D)."""
        room = max(self.widths)
        filled = []
        for number, (start, stop) in enumerate(self.slices):
            missing = (0, 0, 0, room - (stop - start))
            filled += [F.pad(part, missing) for part in self.weights_of(number)[0].chunk(2)]
        return torch.stack(
            [torch.cat(pair) for pair in zip(filled[::2], filled[1::2], strict=True)]
        )

    @property
    def down_proj(self) -> Tensor:
        """Copy in the base's layout, padded with zeros (E, D, W)."""
        downs = [self.weights_of(number)[1].T for number in range(len(self.slices))]
        room = max(down.shape[1] for down in downs)
        return torch.stack([F.pad(down, (0, room - down.shape[1])) for down in downs])

    # Group sizes differ by call: if traced, each of them would be compiled anew.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y_TD = torch.zeros_like(hidden_states)
        experts = each_with_its_tokens(top_k_index, top_k_weights, len(self.slices))
        for number, rows, weights_N1 in experts:
            both, down_HD = self.weights_of(number)
            h_NH = self._apply_gate(F.linear(hidden_states[rows], both))
            y_TD.index_add_(0, rows, ((h_NH @ down_HD) * weights_N1).to(y_TD.dtype))
        return y_TD


@remade
def _uneven(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a layer's experts whose widths may differ."""
    return Dynamic(f"Uneven{base.__name__}", (_UnevenExperts, base), {})  # type: ignore[return-value]


def make_uneven(experts: Experts, widths: Sequence[int]) -> None:
    """Give routed experts widths of their own, in place; new parameters are on the meta device.

    Args:
        experts: the module of all of a layer's experts.
        widths: neurons of each.
    """
    like = experts.down_proj
    hidden_size, every = like.shape[1], sum(widths)
    vars(experts)["slices"] = tuple(pairwise(accumulate(widths, initial=0)))
    for name, rows in ((UP_ROWS, 2 * every), (DOWN_ROWS, every)):
        new = torch.empty(rows, hidden_size, dtype=like.dtype, device="meta")
        experts.register_parameter(name, nn.Parameter(new, requires_grad=like.requires_grad))
    del experts.gate_up_proj, experts.down_proj
    experts.num_experts = len(widths)
    experts.__class__ = _uneven(type(experts))  # type: ignore[assignment]


def flat(gate_up_EWD: Tensor, down_EDW: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return both tensors of uneven experts, from those of padded experts.

    Args:
        gate_up_EWD: gates, then ups, of each expert (E, 2 W, D).
        down_EDW: down projections (E, D, W).
        widths: neurons of each.

    >>> gates = torch.tensor([[[1.0], [0.0], [3.0], [0.0]], [[5.0], [6.0], [7.0], [8.0]]])
    >>> [t.flatten().tolist() for t in flat(gates, torch.ones(2, 1, 2), (1, 2))]
    [[1.0, 3.0, 5.0, 6.0, 7.0, 8.0], [1.0, 1.0, 1.0]]
    """
    parts = []
    for both_WD, width in zip(gate_up_EWD, widths, strict=True):
        parts += [half_WD[:width] for half_WD in both_WD.chunk(2)]
    downs = [down_DW[:, :w].T for down_DW, w in zip(down_EDW, widths, strict=True)]
    return torch.cat(parts), torch.cat(downs)
