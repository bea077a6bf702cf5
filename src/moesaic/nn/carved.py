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

from moesaic.arch import DenseFFN, FFNNames, assembled, dense_ffn
from moesaic.nn.routers import WEIGHING, make_router, norm_scale


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
        self._projections = names.projections
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

    # Group sizes differ call by call: traced, each of them would be compiled anew.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        # Idle gates learn, too.
        ffn = None if self.weighs and self.training else self._plain()
        if ffn is None:
            return self._masked(x_TD).view_as(x)
        if self.router is None or self.top_k == 0:
            y_TD = self._backbone(ffn, x_TD)
        elif self.weighs:
            y_TD = self._backbone(ffn, x_TD) + self._weighted(ffn, x_TD, self.router(x_TD))
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
        """Each petal once over the tokens that it has a weight for."""
        weights_TR = (weights_TR * norm_scale(weights_TR)).to(x_TD.dtype)
        on_RT = weights_TR.T > 0
        y_TD = torch.zeros_like(x_TD)
        if len(x_TD) == 1:  # neighbours are one slice
            for first, last in runs(on_RT[:, 0].tolist()):
                part = ffn.neurons(self.slices[first][0], self.slices[last - 1][1])
                h_RM = part.hidden(x_TD).view(last - first, -1)
                h_RM = h_RM * weights_TR[0, first:last, None]
                y_TD = y_TD + part.output(h_RM.view(1, -1))
            return y_TD
        petal, token = on_RT.nonzero(as_tuple=True)
        if not len(token):
            return y_TD
        groups = x_TD.index_select(0, token).T.split(on_RT.sum(1).tolist(), dim=1)
        parts = [
            ffn.neurons(*place).by_columns(group_DT)
            for place, group_DT in zip(self.slices, groups, strict=True)
            if group_DT.shape[1]
        ]
        parts_TD = torch.cat(parts, dim=1).T * weights_TR[token, petal, None]
        return y_TD.index_add(0, token, parts_TD)

    def _plain(self) -> DenseFFN | None:
        """The view, or None where a projection is quantised or wrapped by an adapter.

        Looks into the modules' own tables: asking for attributes took as long as the router does.
        """
        weights: dict[str, Tensor] = {}
        biases: dict[str, Tensor | None] = {}
        for name in self._projections:
            projection = self._modules[name]
            if type(projection) is not nn.Linear:
                return None
            tensors = projection._parameters
            weight = tensors["weight"]
            if weight is None or type(weight) not in (nn.Parameter, Tensor):
                return None
            weights[name], biases[name] = weight, tensors["bias"]
        return assembled(self.names, weights, biases, getattr(self, self.names.act))

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
