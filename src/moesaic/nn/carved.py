"""The carved FFN: a backbone that every token runs, and petals of which it runs some.

One copy of each weight, under the base's own names. Neurons are ordered so that the backbone and
every petal are contiguous: an expert is a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch import DenseFFN, FFNNames, dense_ffn
from moesaic.nn.routers import WEIGHING, make_router, norm_scale

CROWDED = 0.65
"""Where more than this share of petals is active, one product over all of them is faster."""


class CarvedFFN(nn.Module):
    """A feed-forward block of which each token runs a part.

    Petals have weight one (MoRE Eq. 12); those of a router that weighs have its weights, times
    petals over active petals (DSMoE Eq. 8).

    Args:
        projections: the base block's linear modules by name, of the carved width.
        act: the base block's activation function.
        names: which projection is gate, up and down.
        petals: neurons of each petal; what is left of the width is the backbone.
        gate: options of a router that weighs.
    """

    def __init__(
        self,
        projections: Mapping[str, nn.Module],
        act: Any,
        names: FFNNames,
        hidden_size: int,
        backbone: int,
        petals: Sequence[int],
        top_k: int,
        routing: str,
        gate: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for name, projection in projections.items():
            self.add_module(name, projection)
        setattr(self, names.act, act)
        self.names = names
        self.backbone = backbone
        self.petals = tuple(petals)
        self.top_k = top_k
        ends = tuple(accumulate(self.petals, initial=backbone))
        self.slices = tuple(pairwise(ends))
        self.weighs = routing in WEIGHING
        self.router: Any = None
        if petals:
            self.router = make_router(hidden_size, len(petals), top_k, routing, gate)

    def view(self) -> DenseFFN:
        """The whole block as three matrices, in carved order."""
        return dense_ffn(self, self.names)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        if not self._sliceable() or (self.weighs and self.training):  # idle gates learn too
            return self._masked(x_TD).view_as(x)
        ffn = self.view()
        if self.router is None or self.top_k == 0:
            y_TD = self._backbone(ffn, x_TD)
        elif self.weighs:
            y_TD = self._weighted(ffn, x_TD, self.router(x_TD))
        else:
            y_TD = self._grouped(ffn, x_TD, self.router(x_TD))
        if ffn.down_bias_D is not None:
            y_TD = y_TD + ffn.down_bias_D
        return y_TD.view_as(x)

    def _backbone(self, ffn: DenseFFN, x_TD: Tensor) -> Tensor:
        if not self.backbone:
            return torch.zeros_like(x_TD)
        backbone = ffn.neurons(0, self.backbone)
        return backbone.output(backbone.hidden(x_TD))

    def _grouped(self, ffn: DenseFFN, x_TD: Tensor, chosen_TK: Tensor) -> Tensor:
        """The backbone once over all tokens, each petal once over its own."""
        if len(x_TD) == 1:  # no sorting, no gathering: most of the time of a decoding step
            y_TD = self._backbone(ffn, x_TD)
            for e in chosen_TK[0].tolist():
                petal = ffn.neurons(*self.slices[e])
                y_TD = y_TD + petal.output(petal.hidden(x_TD))
            return y_TD
        flat = chosen_TK.flatten()
        order = flat.argsort(stable=True)  # token-choice pairs, petal by petal
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        counts = torch.bincount(flat, minlength=len(self.petals)).tolist()
        sorted_DT = x_TD.index_select(0, order // self.top_k).T
        alone = self.top_k == 1  # then the backbone runs in petal order and petals add onto it
        if alone and self.backbone:
            onto = ffn.neurons(0, self.backbone).by_columns(sorted_DT).split(counts, dim=1)
        else:
            onto = [None] * len(counts)
        parts = [
            ffn.neurons(*place).by_columns(group_DT, base_DT)
            for place, group_DT, base_DT in zip(
                self.slices, sorted_DT.split(counts, dim=1), onto, strict=True
            )
        ]
        y_TD = torch.cat(parts, dim=1).T.index_select(0, back)
        if alone:
            return y_TD
        return self._backbone(ffn, x_TD) + y_TD.view(len(x_TD), self.top_k, -1).sum(1)

    def _weighted(self, ffn: DenseFFN, x_TD: Tensor, weights_TR: Tensor) -> Tensor:
        """The backbone, and each petal once over the tokens that it has a weight for."""
        weights_TR = (weights_TR * norm_scale(weights_TR)).to(x_TD.dtype)
        y_TD = self._backbone(ffn, x_TD)
        on_RT = weights_TR.T > 0
        if len(x_TD) == 1:  # neighbours are one slice
            for first, last in runs(on_RT[:, 0].tolist()):
                part = ffn.neurons(self.slices[first][0], self.slices[last - 1][1])
                h_RM = part.hidden(x_TD).view(last - first, -1) * weights_TR[0, first:last, None]
                y_TD = y_TD + part.output(h_RM.view(1, -1))
            return y_TD
        petal, token = on_RT.nonzero(as_tuple=True)
        if len(token) > CROWDED * on_RT.numel():
            petals = ffn.neurons(self.backbone, ffn.width)
            h_TRM = petals.hidden(x_TD).view(*weights_TR.shape, -1) * weights_TR[..., None]
            return y_TD + petals.output(h_TRM.flatten(1))
        counts = on_RT.sum(1).tolist()
        weights = weights_TR[token, petal].split(counts)
        for place, rows, weight in zip(self.slices, token.split(counts), weights, strict=True):
            if len(rows):
                group_DT = x_TD.index_select(0, rows).T
                part_DT = ffn.neurons(*place).by_columns(group_DT) * weight
                y_TD = y_TD.index_add_(0, rows, part_DT.T.contiguous())
        return y_TD

    def _sliceable(self) -> bool:
        """Whether the projections are plain: not quantised, not wrapped by an adapter."""
        return all(
            type(p) is nn.Linear and type(p.weight) in (nn.Parameter, Tensor)
            for p in (getattr(self, n) for n in self.names.projections)
        )

    def _masked(self, x_TD: Tensor) -> Tensor:
        """The same result through the projections as they are, idle neurons set to zero."""
        names = self.names
        act = getattr(self, names.act)
        if names.fused:
            gate_TM, up_TM = getattr(self, names.up)(x_TD).chunk(2, dim=-1)
            h_TM = act(gate_TM) * up_TM
        else:
            h_TM = getattr(self, names.up)(x_TD)
            h_TM = act(getattr(self, names.gate)(x_TD)) * h_TM if names.gate else act(h_TM)
        if self.router is not None:
            on_TR = torch.zeros(len(x_TD), len(self.petals), dtype=h_TM.dtype, device=h_TM.device)
            if self.weighs:
                weights_TR = self.router(x_TD)
                on_TR = (weights_TR * norm_scale(weights_TR)).to(h_TM.dtype)
            elif self.top_k:
                on_TR.scatter_(1, self.router(x_TD), 1)
            widths = torch.tensor(self.petals, device=h_TM.device)
            on_TM = on_TR.repeat_interleave(widths, dim=1, output_size=sum(self.petals))
            h_TM = h_TM * F.pad(on_TM, (self.backbone, 0), value=1)
        return getattr(self, names.down)(h_TM)

    def extra_repr(self) -> str:
        return f"backbone={self.backbone}, petals={self.petals}, top_k={self.top_k}"


def runs(on: Sequence[bool]) -> list[tuple[int, int]]:
    """Where stretches of true begin and end.

    >>> runs([True, True, False, True])
    [(0, 2), (3, 4)]
    """
    edges = [i for i, (a, b) in enumerate(pairwise([False, *on, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def carved_like(ffn: nn.Module, names: FFNNames, header: Mapping[str, Any]) -> CarvedFFN:
    """An empty carved FFN (weights on the meta device) of the shape that a plan's header gives."""
    hidden_size = getattr(ffn, names.down).weight.shape[0]
    width = header["backbone"] + sum(header["petals"])
    projections: dict[str, nn.Module] = {}
    with torch.device("meta"):
        for name in names.projections:
            old = getattr(ffn, name)
            rows = width * (2 if names.fused else 1)
            shape = (width, hidden_size) if name == names.down else (hidden_size, rows)
            projections[name] = nn.Linear(*shape, bias=old.bias is not None, dtype=old.weight.dtype)
        return CarvedFFN(
            projections,
            getattr(ffn, names.act),
            names,
            hidden_size,
            header["backbone"],
            header["petals"],
            header["top_k"],
            header["routing"],
            header.get("gate"),
        )
