"""Projections that read the weights of a token's most important input channels only.

Where a decoder layer is given one position a sequence, as at decoding, a token leaves out the
channels of low score: their columns of the weight are not read. Prompts run dense, and decoding
where there are no compiled functions for it. No weight is changed, none is stored twice: a weight
is turned in memory once, so that a channel's column is a row, and keeps its name and shape.

Shape suffixes: T tokens, I inputs (channels), O outputs, E experts, K top-k, S pairs of a token and
an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.mixture import each_with_its_tokens
from moesaic.dynamic import Dynamic, remade
from moesaic.foreign import JSON, Values
from moesaic.nn.kernels import FEW, Product, chosen, reads_rows, rows_of
from moesaic.nn.phase import Phase


@dataclass(frozen=True)
class Cut:
    """The channels of one projection that a token reads."""

    share: float
    """Of all channels; where a threshold decides, the mean on the calibration text."""
    keep: int = -1
    """This many with the highest scores; below zero: those with scores above the threshold."""
    threshold: float = 0.0

    def as_json(self) -> JSON:
        """The fields that matter."""
        plain = asdict(self)
        del plain["threshold" if self.keep >= 0 else "keep"]
        return plain


WHOLE = Cut(1.0, threshold=-1.0)
"""Every channel."""

EXPERTS = ("gate_up_proj", "down_proj")
"""The tensors that hold all experts' projections."""


class _Tally:
    """The share of a projection's channels that tokens read, counted while it is measured."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.read = self.all = 0

    def add(self, on_TI: Tensor, real: Tensor | None) -> None:
        """Count a mask, of real tokens alone: padding is not measured.

        Args:
            on_TI: any leading shape.
            real: bool, as many as tokens; False on padding. None: none of them is.
        """
        if real is not None:
            on_TI = on_TI.flatten(0, -2)[real.flatten().to(on_TI.device)]
        self.read += int(on_TI.sum())
        self.all += on_TI.numel()

    def share(self, nominal: float) -> float:
        """What was counted; where nothing was, the nominal share."""
        return self.read / self.all if self.all else nominal


def plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary tensor: not quantised, not offloaded."""
    return type(weight) in (nn.Parameter, Tensor)


def here(x: Tensor, weight: Tensor) -> bool:
    """Whether rows can be chosen one by one: few tokens, plain weights, no gradients."""
    if torch.compiler.is_compiling() or x.numel() > FEW * x.shape[-1] or not plain(weight):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    return reads_rows(x.device, weight.dtype)


class ChannelLinear(nn.Linear):
    """A linear projection of which a token reads the columns of its highest-scoring channels."""

    cut: Cut
    phase: Phase
    tallies: Mapping[str, _Tally]
    product: Product | None
    scale: Tensor | None
    """(I): channels are ranked by |x| times this; None for ones."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.phase.skips:
            return super().forward(x)
        cut, weight = self.cut, self.weight
        if self.phase.mode == "always" or not here(x, weight):
            on = chosen(x, self.scale, cut.keep, cut.threshold)
            if self.phase.mode == "always":
                self.tallies["weight"].add(on, self.phase.real)
            return super().forward(x * on)
        y = self._laid_out(weight)(x)
        return y if self.bias is None else y + self.bias

    def _laid_out(self, weight: Tensor) -> Product:
        """The product with the chosen channels, laid out anew where the weight was moved."""
        scale = self._buffers["scale"]
        if self.product is None or not self.product.lies(weight, scale):
            self.product = Product(rows_of(weight), scale, self.cut.keep, self.cut.threshold)
        return self.product

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ChannelLinear:
        self.product = None  # which holds the weight as it was before
        return nn.Linear._apply(self, fn, recurse)

    def __getstate__(self) -> JSON:
        return {**vars(self), "product": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, share={self.cut.share:.3f}"


class ChannelExperts(nn.Module):
    """Mixed into the class of a layer's experts: same weights, same names, channels skipped."""

    cuts: dict[str, Cut]
    phase: Phase
    tallies: Mapping[str, _Tally]
    down_proj: Tensor
    has_bias: bool
    is_transposed: bool
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not self.phase.skips:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        many = self.phase.mode == "always" or len(hidden_states) > FEW
        run = self._by_expert if many else self._by_pair
        return run(hidden_states, top_k_index, top_k_weights)

    def _by_pair(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Few tokens: each with each of its experts."""
        count = self.down_proj.shape[0]
        top_k = expert_TK.shape[1]
        expert_S = expert_TK.reshape(-1)
        there_S = expert_S < count  # a number too high: skipped by the router
        expert_S = expert_S.clamp(max=count - 1)
        h_SM = self._few("gate_up_proj", x_TD.repeat_interleave(top_k, 0), expert_S)
        y_SD = self._few("down_proj", self._apply_gate(h_SM), expert_S)
        weight_S = weight_TK.reshape(-1).masked_fill(~there_S, 0)
        y_TKD = (y_SD * weight_S[:, None]).view(len(x_TD), top_k, -1)
        return y_TKD.sum(1).to(x_TD.dtype)

    def _few(self, name: str, x_SI: Tensor, expert_S: Tensor) -> Tensor:
        weight, cut = getattr(self, name), self.cuts[name]
        scale_EI = getattr(self, f"{name}_scale", None)
        if here(x_SI[:1], weight):
            rows = weight.data if self.is_transposed else rows_of(weight)
            y_SO = Product(rows, scale_EI, cut.keep, cut.threshold)(x_SI, expert_S)
        else:
            scale_SI = None if scale_EI is None else scale_EI[expert_S]
            x_SI = x_SI * chosen(x_SI, scale_SI, cut.keep, cut.threshold)
            form = "si,sio->so" if self.is_transposed else "si,soi->so"
            y_SO = torch.einsum(form, x_SI, weight[expert_S])
        return y_SO + getattr(self, f"{name}_bias")[expert_S] if self.has_bias else y_SO

    def _by_expert(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Many tokens: each expert with its own."""
        y_TD = torch.zeros_like(x_TD)
        experts = each_with_its_tokens(expert_TK, weight_TK, self.down_proj.shape[0])
        for number, rows, weights_N1 in experts:
            real = self.phase.real
            real = None if real is None else real.to(rows.device).flatten()[rows]
            h_NM = self._apply_gate(self._one("gate_up_proj", x_TD[rows], number, real))
            part_ND = self._one("down_proj", h_NM, number, real) * weights_N1
            y_TD.index_add_(0, rows, part_ND.to(y_TD.dtype))
        return y_TD

    def _one(self, name: str, x_TI: Tensor, number: int, real_T: Tensor | None) -> Tensor:
        cut, weight = self.cuts[name], getattr(self, name)[number]
        scale_EI = getattr(self, f"{name}_scale", None)
        scale_I = None if scale_EI is None else scale_EI[number]
        on_TI = chosen(x_TI, scale_I, cut.keep, cut.threshold)
        if self.phase.mode == "always":
            self.tallies[name].add(on_TI, real_T)
        bias = getattr(self, f"{name}_bias")[number] if self.has_bias else None
        return F.linear(x_TI * on_TI, weight.T if self.is_transposed else weight, bias)


def make_channels(layer: nn.Module, header: Values) -> None:
    """Let projections of a decoder layer skip channels, in place; new buffers are on meta.

    ``header`` is that of a :class:`moesaic.layers.channels.ChannelsLayer`.
    """
    phase = Phase.of(layer)
    for path, fields in header["projections"].items():
        owner_path, _, leaf = path.rpartition(".")
        owner = layer.get_submodule(owner_path)
        target: nn.Parameter | nn.Module = getattr(owner, leaf)
        if isinstance(target, nn.Parameter):
            _make_experts(owner, leaf, Cut(**fields), phase, header["scaled"])
        else:
            _make_linear(target, Cut(**fields), phase, header["scaled"])


def _make_linear(linear: nn.Module, cut: Cut, phase: Phase, scaled: bool) -> None:
    if type(linear) is not nn.Linear:
        raise TypeError(f"{type(linear).__name__} is no linear projection")
    linear.__class__ = ChannelLinear
    vars(linear).update(cut=cut, phase=phase, tallies={"weight": _Tally()}, product=None)
    _buffer(linear, "scale", (linear.in_features,) if scaled else None)


@remade
def _channel(base: type[nn.Module]) -> type[nn.Module]:
    return Dynamic(f"Channel{base.__name__}", (ChannelExperts, base), {})


def _make_experts(experts: nn.Module, name: str, cut: Cut, phase: Phase, scaled: bool) -> None:
    if not isinstance(experts, ChannelExperts):
        experts.__class__ = _channel(type(experts))
        tallies = {name: _Tally() for name in EXPERTS}
        vars(experts).update(cuts=dict.fromkeys(EXPERTS, WHOLE), tallies=tallies, phase=phase)
    experts = cast(ChannelExperts, experts)
    experts.cuts[name] = cut
    weight = getattr(experts, name)
    inputs = weight.shape[1 if experts.is_transposed else 2]
    shape = (weight.shape[0], inputs) if scaled else None
    _buffer(experts, f"{name}_scale", shape)


def _buffer(module: nn.Module, name: str, shape: tuple[int, ...] | None) -> None:
    empty = None if shape is None else torch.empty(shape, dtype=torch.float32, device="meta")
    module.register_buffer(name, empty)


def measured_share(layer: nn.Module, path: str) -> float:
    """The share of one projection's channels that a token reads: as counted, else nominal."""
    owner_path, _, leaf = path.rpartition(".")
    owner = layer.get_submodule(owner_path)
    if isinstance(owner, ChannelExperts):
        return owner.tallies[leaf].share(owner.cuts[leaf].share)
    linear = owner.get_submodule(leaf)
    if not isinstance(linear, ChannelLinear):  # an adapter around it
        linear = cast(ChannelLinear, linear.base_layer)
    return linear.tallies["weight"].share(linear.cut.share)
