"""The carved FFN: a backbone that every token runs, and petals of which it runs some.

One copy of each weight, under the base's own names. Neurons are ordered so that the backbone and
every petal are contiguous: an expert is a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from moesaic.arch.dense import DenseFFN, FFNNames, assembled, dense_ffn
from moesaic.foreign import Values
from moesaic.nn.kernels.petals import few, silenced
from moesaic.nn.phase import Phase
from moesaic.nn.routers import WEIGHING, by_neuron, chosen, make_router, norm_scale

NARROW = 256
"""Neurons below which a petal is too narrow to be a matrix product of its own for few tokens."""

WIDE = 1 << 14
"""Weights of one of a petal's projections from which a token's own petals are worth the calls."""

CROWDED = 0.8
"""Where more than this share of petals is active, one product over all of them is faster."""

MOVED = {torch.float32: 16, torch.bfloat16: 24}
"""Neurons of a petal whose products take as long as moving a token to the petal and back."""

CALLED = {torch.float32: 400_000, torch.bfloat16: 10_000_000}
"""Weights that a token is multiplied with by one thread in the time that calls for a petal take."""

SAVED = 0.9
"""Of the time of one product over all petals, what each taking its own tokens may take."""


def saves_prompts(petals: Sequence[int], top_k: int) -> bool:
    """Whether a prompt, however long, can gain by petals that take their own tokens.

    >>> saves_prompts((272,) * 4, 1), saves_prompts((3,) * 256, 119)
    (True, False)
    """
    width = sum(petals) / len(petals)
    return _saves(top_k / len(petals), width, max(MOVED.values()))


def _saves(share: float, width: float, moved: float, tokens: int = 1, calls: float = 0.0) -> bool:
    """Whether petals that take their own tokens are faster than one product over all of them.

    Times of a petal, in those of a token's product with one neuron.

    Args:
        share: of the petals that a token runs.
        width: neurons of a petal.
        moved: the time to move a token to the petal and back.
        tokens: of the product.
        calls: the time of a petal's calls.
    """
    return share * tokens * (width + moved) + calls < SAVED * tokens * width


class CarvedFFN(nn.Module):
    """A feed-forward block of which each token runs a part.

    Petals have weight one (MoRE Eq. 12); those of a router that weighs have its weights, times
    petals over active petals (DSMoE Eq. 8).

    Args:
        projections: the base block's linear modules by name, of the carved width.
        act: the base block's activation function.
        names: which projection is gate, up and down.
        petals: neurons of each petal; what is left of the width is the backbone.
        top_k: petals a token runs.
        routing: how they are chosen; see :mod:`moesaic.nn.routers`.
        bias: every petal that runs adds an output bias of its own; without petals there is one.
        gate: options of the router: of one that weighs, or ``threshold``.
        phase: tokens are routed at decoding alone, and prompts run every neuron; None: always.
    """

    def __init__(
        self,
        projections: Mapping[str, nn.Module],
        act: Callable[[Tensor], Tensor],
        names: FFNNames,
        hidden_size: int,
        backbone: int,
        petals: Sequence[int],
        top_k: int,
        routing: str,
        bias: bool = False,
        gate: Values | None = None,
        phase: Phase | None = None,
    ) -> None:
        super().__init__()
        self.phase = phase
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
            self.router = make_router(hidden_size, len(petals), top_k, routing, gate, backbone)
        rows = max(1, len(petals))
        self.petal_bias = nn.Parameter(torch.empty(rows, hidden_size)) if bias else None

    def view(self) -> DenseFFN:
        """The whole block as three matrices, in carved order."""
        return dense_ffn(self, self.names)

    # Group sizes differ call by call: traced, each of them would be compiled anew.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        # Idle gates learn, too.
        ffn = None if self._learns() else self._plain()
        if ffn is None:
            return self._masked(x_TD).view_as(x)
        on_TR, y_TD = None, None
        if not self._routes():
            y_TD = F.linear(ffn.hidden(x_TD), ffn.down_DM)
        elif self.router is None or self.top_k == 0:
            y_TD = self._backbone(ffn, x_TD)
        else:
            h_TB = None
            if self.weighs:
                weights_TR = self.router(x_TD)
                on_TR = weights_TR * norm_scale(weights_TR)
            else:
                if self.router.sees_backbone:
                    h_TB = ffn.neurons(0, self.backbone).hidden(x_TD)
                on_TR = chosen(self.router(x_TD, h_TB), len(self.petals))
            y_TD = few(ffn, x_TD, on_TR, self.backbone, self.petals, self.weighs)
            if y_TD is None:
                y_TD = self._several(ffn, x_TD, on_TR, h_TB)
        y_TD = self._biased(y_TD, on_TR)
        if ffn.down_bias_D is not None:
            y_TD = y_TD + ffn.down_bias_D
        return y_TD.view_as(x)

    def _routes(self) -> bool:
        """Whether tokens are routed now: in training all are, since routers learn from them."""
        return self.phase is None or self.phase.skips or self.training

    def _learns(self) -> bool:
        """Whether the router is being trained: a random one has nothing to learn."""
        if self.router is None or not self.training or not torch.is_grad_enabled():
            return False
        return self.weighs or (self.router.routing != "random" and self.router.weight.requires_grad)

    def _backbone(self, ffn: DenseFFN, x_TD: Tensor) -> Tensor:
        if not self.backbone:
            return torch.zeros_like(x_TD)
        backbone = ffn.neurons(0, self.backbone)
        return backbone.output(backbone.hidden(x_TD))

    def _parts(self, ffn: DenseFFN) -> Iterable[DenseFFN]:
        """Each petal as a block of its own."""
        return ffn.neurons(self.backbone, ffn.width).split(self.petals)

    def _by_neuron(self, on_TR: Tensor, width: int) -> Tensor:
        """Values of experts (T, R) repeated for their neurons (T, M)."""
        return by_neuron(on_TR, self.backbone, self.petals)

    def _biased(self, y_TD: Tensor, on_TR: Tensor | None) -> Tensor:
        """The output biases of the petals that run added."""
        if self.petal_bias is None:
            return y_TD
        if on_TR is None:
            return y_TD + self.petal_bias[0]
        return y_TD + on_TR.to(y_TD.dtype) @ self.petal_bias

    def _several(
        self, ffn: DenseFFN, x_TD: Tensor, weights_TR: Tensor, h_TB: Tensor | None = None
    ) -> Tensor:
        """Petals, each with its weight; zero for those that a token does not run.

        A single token runs its own petals. Of many tokens each petal takes its own, where that is
        worth moving them; else every neuron is computed, and idle ones are zero.

        Args:
            weights_TR: a weight for every petal.
            h_TB: the backbone's hidden activations, where the router has looked at them.
        """
        if len(x_TD) == 1:
            if self._worth_reading(x_TD, weights_TR):
                return self._single(ffn, x_TD, weights_TR.to(x_TD.dtype), h_TB)
        elif self._worth_moving(x_TD, weights_TR):
            return self._by_petal(ffn, x_TD, weights_TR.to(x_TD.dtype), h_TB)
        rest = ffn if h_TB is None else ffn.neurons(self.backbone, ffn.width)
        h_TM = rest.hidden(x_TD)
        if h_TB is not None:
            h_TM = torch.cat([h_TB, h_TM], dim=1)
        if self.weighs or not silenced(h_TM, weights_TR, self.backbone, self.petals):
            h_TM = h_TM * self._by_neuron(weights_TR.to(h_TM.dtype), ffn.width)
        return F.linear(h_TM, ffn.down_DM)

    def _share(self, weights_TR: Tensor) -> float:
        """The share of petals that tokens run."""
        if self.weighs:
            return (weights_TR > 0).float().mean().item()
        return self.top_k / len(self.petals)

    def _worth_reading(self, x_1D: Tensor, weights_1R: Tensor) -> bool:
        """Whether one token's own petals are worth the calls."""
        width = sum(self.petals) / len(self.petals)
        wide = width >= NARROW and width * x_1D.shape[1] >= WIDE
        return wide and self._share(weights_1R) < CROWDED

    def _worth_moving(self, x_TD: Tensor, weights_TR: Tensor) -> bool:
        """Whether each petal should take its own tokens: measured, benchmarks/fine_petals.py."""
        tokens, hidden_size = x_TD.shape
        width = sum(self.petals) / len(self.petals)
        if x_TD.device.type != "cpu":
            return width >= NARROW and self._share(weights_TR) < CROWDED
        kind = x_TD.dtype if x_TD.dtype in MOVED else torch.float32
        calls = CALLED[kind] * torch.get_num_threads() / hidden_size
        return _saves(self._share(weights_TR), width, MOVED[kind], tokens, calls)

    def _single(
        self, ffn: DenseFFN, x_TD: Tensor, weights_TR: Tensor, h_TB: Tensor | None
    ) -> Tensor:
        """One token's own petals, neighbours together."""
        backbone = ffn.neurons(0, self.backbone)
        if h_TB is None:
            h_TB = backbone.hidden(x_TD)
        active = weights_TR[0].nonzero().flatten().tolist()
        places = joined(self.slices[e] for e in active)
        parts = [ffn.neurons(*place) for place in places]
        hidden = [part.hidden(x_TD) for part in parts]
        if self.weighs:
            by_TM = self._by_neuron(weights_TR, ffn.width)
            hidden = [h * by_TM[:, slice(*at)] for h, at in zip(hidden, places, strict=True)]
        y_TD = backbone.output(h_TB)
        for part, h in zip(parts, hidden, strict=True):
            y_TD = y_TD + part.output(h)
        return y_TD

    def _by_petal(
        self,
        ffn: DenseFFN,
        x_TD: Tensor,
        weights_TR: Tensor,
        h_TB: Tensor | None,
    ) -> Tensor:
        """The backbone over all tokens, and each petal once over those that run it."""
        backbone = ffn.neurons(0, self.backbone)
        y_TD = backbone.output(backbone.hidden(x_TD) if h_TB is None else h_TB)
        on_RT = weights_TR.T > 0
        petal, token = on_RT.nonzero(as_tuple=True)
        counts = on_RT.sum(1).tolist()
        weights = weights_TR[token, petal].split(counts)
        for part, rows, weight in zip(self._parts(ffn), token.split(counts), weights, strict=True):
            if len(rows):
                part_TD = part.output(part.hidden(x_TD.index_select(0, rows)))
                if self.weighs:
                    part_TD = part_TD * weight[:, None]
                y_TD = y_TD.index_add_(0, rows, part_TD)
        return y_TD

    def _plain(self) -> DenseFFN | None:
        """The view, or None where somebody waits for a projection itself to be called.

        That is one that is quantised, wrapped by an adapter, observed by a hook, replicated, or
        offloaded, so that its weight comes only when it is called.

        Looks into the modules' own tables: asking for attributes took as long as the router does.
        """
        if _has_any_global_hook():
            return None
        weights: dict[str, Tensor] = {}
        biases: dict[str, Tensor | None] = {}
        for name in self._projections:
            projection = self._modules[name]
            if type(projection) is not nn.Linear or _watched(projection):
                return None
            tensors = projection._parameters
            weight = tensors.get("weight")
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
        on_TR = None
        routes = self.router is not None and self._routes()
        if routes and self.weighs:
            weights_TR = self.router(x_TD)
            on_TR = weights_TR * norm_scale(weights_TR)
        elif routes:
            h_TB = h_TM[:, : self.backbone] if self.router.sees_backbone else None
            if self._learns():
                on_TR = self.router.gates(x_TD, h_TB)
            else:
                on_TR = chosen(self.router(x_TD, h_TB), len(self.petals))
        if on_TR is not None:
            h_TM = h_TM * self._by_neuron(on_TR, h_TM.shape[1]).to(h_TM.dtype)
        return self._biased(getattr(self, names.down)(h_TM), on_TR)

    def extra_repr(self) -> str:
        return f"backbone={self.backbone}, petals={self.petals}, top_k={self.top_k}"


def _watched(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward (as torch itself decides it).

    accelerate puts its hooks around ``forward`` itself, in the module's own table.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def joined(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring places made one.

    >>> joined([(0, 2), (2, 4), (6, 8)])
    [(0, 4), (6, 8)]
    """
    out: list[tuple[int, int]] = []
    for start, stop in places:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


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


def carved_like(
    ffn: nn.Module, names: FFNNames, header: Values, layer: nn.Module | None = None
) -> CarvedFFN:
    """An empty carved FFN (weights on the meta device) of the shape that a plan's header gives.

    Args:
        ffn: the base block.
        names: of its projections.
        header: of a :class:`moesaic.layers.carved.CarvedLayer`.
        layer: the decoder layer, which tells prompts from decoding where the header does.
    """
    width = header["backbone"] + sum(header["petals"])
    with torch.device("meta"):
        carved = CarvedFFN(
            projections_like(ffn, names, width),
            getattr(ffn, names.act),
            names,
            getattr(ffn, names.down).weight.shape[0],
            header["backbone"],
            header["petals"],
            header["top_k"],
            header["routing"],
            header.get("bias", False),
            header.get("gate"),
            Phase.of(layer) if layer is not None and header.get("prompts") == "dense" else None,
        )
    if carved.petal_bias is not None:
        carved.petal_bias.data = carved.petal_bias.to(getattr(ffn, names.down).weight.dtype)
    return carved
