"""Attention of which each token uses some dimensions of every head (ToMoE, Sec. 3.3).

The attention module is the base's own, with its own names and plain linear projections, of which
rows or columns may be removed. These are filled with zeros in the activations, so that any
attention kernel, cache and position embedding works as before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import AttentionNames
from moesaic.modules.running import RunningTokens, gumbel
from moesaic.types import Values


def spread(x: Tensor, kept: Tensor, size: int) -> Tensor:
    """Place x (..., kept) at its indices among ``size``, zeros elsewhere.

    >>> spread(torch.tensor([5, 6]), torch.tensor([0, 2]), 4)
    tensor([5, 0, 6, 0])
    """
    return x.new_zeros(*x.shape[:-1], size).index_copy(-1, kept, x)


def _over_heads(x: Tensor, mask: Tensor, start: int = 0) -> Tensor:
    """Multiply each head of x (..., heads times A) from ``start`` on by a mask (..., A)."""
    rest = x[..., start:]
    masked = rest.unflatten(-1, (-1, mask.shape[-1])) * mask.unsqueeze(-2)
    return torch.cat([x[..., :start], masked.flatten(-2)], -1) if start else masked.flatten(-2)


class HeadRouter(nn.Module):
    """Router that chooses for each token the ``top_k`` dimensions of a head, the same for all
    heads.

    Args:
        hidden_size: D.
        embedding: E.
        head_dim: A.
        top_k: dimensions that a token uses.
        passage: the tokens that run, whose Gumbel noise is added to the logits; None for no noise.
    """

    def __init__(
        self,
        hidden_size: int,
        embedding: int,
        head_dim: int,
        top_k: int,
        passage: RunningTokens | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.passage = top_k, passage
        self.embed = nn.Parameter(torch.empty(embedding, hidden_size, dtype=torch.float32))
        self.shift = nn.Parameter(torch.empty(embedding, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(embedding, dtype=torch.float32))
        self.offset = nn.Parameter(torch.empty(embedding, dtype=torch.float32))
        self.project = nn.Parameter(torch.empty(head_dim, embedding, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return the choice for each token (..., A), ones and zeros (Eq. 5 with top-K)."""
        z = F.linear(x.float(), self.embed.float(), self.shift.float())
        z = F.layer_norm(z, z.shape[-1:], self.scale.float(), self.offset.float())
        logits = F.linear(F.gelu(z), self.project.float())
        if self.passage is not None:  # other random numbers than those of the layer's FFN
            rows, columns = logits.flatten(0, -2).shape
            noise = gumbel(self.passage.uniform(rows, columns, logits.device, stream=1))
            logits = logits + noise.view_as(logits)
        chosen = logits.topk(self.top_k, dim=-1).indices
        return torch.zeros_like(logits).scatter_(-1, chosen, 1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"top-{self.top_k} of {self.project.shape[0]}"


class PartialAttention(nn.Module):
    """Child module of an attention module whose hooks mask its projections.

    Removed rows become zeros. Values are masked by their own token's choice, and the input of the
    output projection by the query's.

    Args:
        sizes: outputs of each projection before.
        header: header of an :class:`~moesaic.carving.overlapping_layer.OverlappingLayer`.
        hidden_size: D.
        head_dim: A.
        value_start: the first row of the values in their projection.
        outputs: inputs of the output projection before.
        passage: the tokens that run, if choices are random.
    """

    def __init__(
        self,
        names: AttentionNames,
        sizes: Mapping[str, int],
        header: Values,
        hidden_size: int,
        head_dim: int,
        value_start: int,
        outputs: int,
        passage: RunningTokens | None = None,
    ) -> None:
        super().__init__()
        self.names, self.sizes = names, dict(sizes)
        self.value_start, self.outputs = value_start, outputs
        self.mask: Tensor | None = None
        self._watched: dict[int, str] = {}
        # index lists are not in the router, whose tensors are kept in float32
        for name, count in header["rows"].items():
            self.register_buffer(f"rows_{name}", torch.empty(count, dtype=torch.int64))
        top_k, embedding = header["head_top_k"], header["embedding"]
        size = hidden_size, embedding, head_dim, top_k
        self.router = HeadRouter(*size, passage) if top_k else None

    def watch(self, attention: nn.Module) -> None:
        """Register the hooks on an attention module."""
        attention.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, attention: nn.Module, args: tuple[Tensor, ...], kwargs: Values) -> None:
        if self.router is not None:
            self.mask = self.router(
                kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            )
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

    def _writes(self, projection: nn.Module, args: object, out: Tensor) -> Tensor:
        name = self._watched.get(id(projection))
        if name is None:
            return out
        rows = getattr(self, f"rows_{name}", None)
        if rows is not None:
            out = spread(out, rows, self.sizes[name])
        if self.mask is not None and name == self.names.v:
            out = _over_heads(out, self.mask, self.value_start)
        return out

    def _reads(self, projection: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        if self.mask is None or id(projection) not in self._watched:
            return args
        return (_over_heads(args[0], self.mask),)
