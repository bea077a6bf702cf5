"""Attention of which each token uses some dimensions of every head (ToMoE, Sec. 3.3).

The attention module stays the base's own, with its own names and plain linear projections, of
which rows or columns may be gone. What is gone is filled with zeros on the way through, so that
any attention kernel, cache and position embedding works as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch import AttentionNames
from moesaic.overlapping import EMBED, OFFSET, PROJECT, SCALE, SHIFT


def spread(x: Tensor, kept: Tensor, size: int) -> Tensor:
    """x (..., kept) at its places among ``size``, zeros elsewhere.

    >>> spread(torch.tensor([5, 6]), torch.tensor([0, 2]), 4)
    tensor([5, 0, 6, 0])
    """
    return x.new_zeros(*x.shape[:-1], size).index_copy(-1, kept, x)


def over_heads(x: Tensor, mask: Tensor, start: int = 0) -> Tensor:
    """x (..., heads times A) with the same mask (..., A) over each head from ``start`` on."""
    rest = x[..., start:]
    masked = rest.unflatten(-1, (-1, mask.shape[-1])) * mask.unsqueeze(-2)
    return torch.cat([x[..., :start], masked.flatten(-2)], -1) if start else masked.flatten(-2)


class HeadRouting(nn.Module):
    """Chooses for each token the ``top_k`` dimensions of a head that values and outputs use.

    It sits in the attention module, watches it, and acts on its projections: rows that are gone
    come back as zeros, values are masked by their own token's choice, and what a query reads by
    the query's. One choice holds for all heads.

    Args:
        sizes: outputs of each projection, as they were.
        header: of an :class:`~moesaic.overlapping.OverlappingLayer`.
        hidden_size: D.
        head_dim: A.
        value_start: the first row of the values in their projection.
        outputs: what the output projection read, as it was.
    """

    embed: Tensor
    shift: Tensor
    scale: Tensor
    offset: Tensor
    project: Tensor

    def __init__(
        self,
        names: AttentionNames,
        sizes: Mapping[str, int],
        header: Mapping[str, Any],
        hidden_size: int,
        head_dim: int,
        value_start: int,
        outputs: int,
    ) -> None:
        super().__init__()
        self.names, self.sizes = names, dict(sizes)
        self.top_k, self.mask_outputs = header["head_top_k"], header["mask_outputs"]
        self.value_start, self.outputs = value_start, outputs
        self.mask: Tensor | None = None
        self._watched: dict[int, str] = {}
        for name, count in header["rows"].items():
            self.register_buffer(f"rows_{name}", torch.empty(count, dtype=torch.int64))
        columns = header["columns"]
        self.register_buffer(
            "columns", None if columns is None else torch.empty(columns, dtype=torch.int64)
        )
        if self.top_k:
            size = header["embedding"]
            shapes = {
                EMBED: (size, hidden_size),
                SHIFT: (size,),
                SCALE: (size,),
                OFFSET: (size,),
                PROJECT: (head_dim, size),
            }
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x: Tensor) -> Tensor:
        """The choice for each token (..., A), ones and zeros (Eq. 5 with top-K)."""
        z = F.linear(x.float(), self.embed.float(), self.shift.float())
        z = F.layer_norm(z, z.shape[-1:], self.scale.float(), self.offset.float())
        logits = F.linear(F.gelu(z), self.project.float())
        chosen = logits.topk(self.top_k, dim=-1).indices
        return torch.zeros_like(logits).scatter_(-1, chosen, 1).to(x.dtype)

    def watch(self, attention: nn.Module) -> None:
        """Act on this module from now on."""
        attention.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, attention: nn.Module, args: Any, kwargs: Any) -> None:
        if self.top_k:
            self.mask = self(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        # adapters and quantisers put other modules in the projections' places: follow them
        self._watched = {}
        for name in self.names.projections:
            projection = getattr(attention, name)
            self._watched[id(projection)] = name
            if name == self.names.o:
                if self._reads not in projection._forward_pre_hooks.values():
                    projection.register_forward_pre_hook(self._reads)
            elif self._writes not in projection._forward_hooks.values():
                projection.register_forward_hook(self._writes)

    def _writes(self, projection: nn.Module, args: Any, out: Tensor) -> Tensor:
        name = self._watched.get(id(projection))
        if name is None:
            return out
        rows = getattr(self, f"rows_{name}", None)
        if rows is not None:
            out = spread(out, rows, self.sizes[name])
        if self.mask is not None and name == self.names.v:
            out = over_heads(out, self.mask, self.value_start)
        return out

    def _reads(self, projection: nn.Module, args: Any) -> Any:
        if id(projection) not in self._watched:
            return args
        (x,) = args
        if self.mask is not None and self.mask_outputs:
            x = over_heads(x, self.mask)
        return (x if self.columns is None else x.index_select(-1, self.columns),)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, mask_outputs={self.mask_outputs}"
