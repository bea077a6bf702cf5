"""The carved FFN: a backbone that every token runs, and petals of which it runs top-k.

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

ROUTINGS = ("cosine", "random")


class Router(nn.Module):
    """Chooses ``top_k`` petals for each token, from one direction a petal.

    ``cosine``: the petals whose prototypes are most similar to x (MoRE Eqs. 12-13). Rows have norm
    one; the norm of x changes no comparison, so it is not computed.

    ``random``: a fixed pseudo-random choice, uniform over petals and unrelated to what they hold
    (MoRE-Random): the low-order digits of the same products.
    """

    def __init__(self, hidden_size: int, experts: int, top_k: int, routing: str = "cosine") -> None:
        super().__init__()
        if routing not in ROUTINGS:
            raise ValueError(f"routing {routing!r} is not one of {ROUTINGS}")
        self.weight = nn.Parameter(torch.empty(experts, hidden_size, dtype=torch.float32))
        self.top_k = top_k
        self.routing = routing

    def forward(self, x_TD: Tensor) -> Tensor:
        """The chosen petals (T, K)."""
        scores_TR = F.linear(x_TD.float(), self.weight.float())
        if self.routing == "random":
            scores_TR = torch.frac(scores_TR.abs() * 1e4)
        if self.top_k == 1:
            return scores_TR.argmax(-1, keepdim=True)
        return scores_TR.topk(self.top_k, dim=-1).indices

    def extra_repr(self) -> str:
        experts, hidden_size = self.weight.shape
        return f"{hidden_size} -> top-{self.top_k} of {experts}, {self.routing}"


class CarvedFFN(nn.Module):
    """A feed-forward block of which each token runs a part. Weight one, no rescale (MoRE Eq. 12).

    Args:
        projections: the base block's linear modules by name, of the carved width.
        act: the base block's activation function.
        names: which projection is gate, up and down.
        petals: neurons of each petal; what is left of the width is the backbone.
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
        self.router = Router(hidden_size, len(petals), top_k, routing) if petals else None

    def view(self) -> DenseFFN:
        """The whole block as three matrices, in carved order."""
        return dense_ffn(self, self.names)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        if not self._sliceable():
            return self._masked(x_TD).view_as(x)
        ffn = self.view()
        if self.router is None or self.top_k == 0:
            y_TD = self._backbone(ffn, x_TD)
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

    def _petal(self, ffn: DenseFFN, number: int) -> DenseFFN:
        return ffn.neurons(*self.slices[number])

    def _running(self, chosen_TK: Tensor, width: int) -> Tensor:
        """Ones for the neurons that a token runs (T, M), zeros for the others."""
        on_TR = torch.zeros(len(chosen_TK), len(self.petals), device=chosen_TK.device)
        on_TR.scatter_(1, chosen_TK, 1)
        widths = torch.tensor(self.petals, device=chosen_TK.device)
        on_TM = on_TR.repeat_interleave(widths, dim=1, output_size=sum(self.petals))
        return F.pad(on_TM, (self.backbone, 0), value=1)

    def _grouped(self, ffn: DenseFFN, x_TD: Tensor, chosen_TK: Tensor) -> Tensor:
        """The backbone once over all tokens, each petal once over its own."""
        if len(x_TD) == 1:  # no sorting, no gathering: most of the time of a decoding step
            y_TD = self._backbone(ffn, x_TD)
            for e in chosen_TK[0].tolist():
                petal = self._petal(ffn, e)
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
            self._petal(ffn, e).by_columns(group_DT, base_DT)
            for e, (group_DT, base_DT) in enumerate(
                zip(sorted_DT.split(counts, dim=1), onto, strict=True)
            )
        ]
        y_TD = torch.cat(parts, dim=1).T.index_select(0, back)
        if alone:
            return y_TD
        return self._backbone(ffn, x_TD) + y_TD.view(len(x_TD), self.top_k, -1).sum(1)

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
            h_TM = h_TM * self._running(self.router(x_TD), h_TM.shape[1]).to(h_TM.dtype)
        return getattr(self, names.down)(h_TM)

    def extra_repr(self) -> str:
        return f"backbone={self.backbone}, petals={self.petals}, top_k={self.top_k}"


def projections_like(ffn: nn.Module, names: FFNNames, width: int) -> dict[str, nn.Module]:
    """Empty projections (on the meta device) of another width than a block's own."""
    hidden_size = getattr(ffn, names.down).weight.shape[0]
    projections: dict[str, nn.Module] = {}
    with torch.device("meta"):
        for name in names.projections:
            old = getattr(ffn, name)
            rows = width * (2 if names.fused else 1)
            ins, outs = (width, hidden_size) if name == names.down else (hidden_size, rows)
            options = {"bias": old.bias is not None, "dtype": old.weight.dtype}
            projections[name] = nn.Linear(ins, outs, **options)
    return projections


def carved_like(ffn: nn.Module, names: FFNNames, header: Mapping[str, Any]) -> CarvedFFN:
    """An empty carved FFN (weights on the meta device) of the shape that a plan's header gives."""
    width = header["backbone"] + sum(header["petals"])
    with torch.device("meta"):
        return CarvedFFN(
            projections_like(ffn, names, width),
            getattr(ffn, names.act),
            names,
            getattr(ffn, names.down).weight.shape[0],
            header["backbone"],
            header["petals"],
            header["top_k"],
            header["routing"],
        )
