"""A layer whose projections skip channels of little score at decoding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch
from moesaic.arch.use import LayerUse
from moesaic.errors import shown
from moesaic.foreign import JSON
from moesaic.layers.base import Description, Header, LayerPlan, Sizes, State
from moesaic.nn.channel_linear import Cut, make_channels, measured_share

SCORES = ("size", "norm", "given")
"""Channels are ranked by |x|, by |x| times the norm of their column, or by |x| times a factor that
the plan brings."""


@dataclass(frozen=True)
class ChannelsLayer(LayerPlan):
    """Weights stay as they are, and so does what earlier steps made of the layer."""

    kind: ClassVar[str] = "channels"
    refines: ClassVar[bool] = True

    cuts: Mapping[str, Cut]
    """By the path of a projection in the decoder layer, or of a tensor that holds all experts'."""
    score: str = "norm"
    """One of :data:`SCORES`."""
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 (I), or (E, I) of experts: factors of scores, where they are given."""

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score {self.score!r} is none of {', '.join(SCORES)}")
        if self.score == "given" and self.factors.keys() != self.cuts.keys():
            raise ValueError("a factor is needed for every projection")

    def header(self) -> JSON:
        return {
            "kind": self.kind,
            "score": self.score,
            "scaled": self.score != "size",
            "projections": {path: cut.as_json() for path, cut in self.cuts.items()},
        }

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.factors)

    @classmethod
    def load(cls, header: Header, tensors: Mapping[str, Tensor]) -> ChannelsLayer:
        cuts = {path: Cut(**cut) for path, cut in header["projections"].items()}
        return cls(cuts, header["score"], tensors)

    def check(self, sizes: Sizes) -> None:
        for path, cut in self.cuts.items():
            if not (0 <= cut.share <= 1 and cut.keep <= sizes.most and cut.threshold < math.inf):
                raise ValueError(f"{path} cannot read {shown(cut.share, 20)} of its channels")

    # --- put to use ------------------------------------------------------------------------------

    def sources(self, arch: Arch) -> tuple[str, ...]:
        return tuple(f"{path}{part}" for path in self.cuts for part in (".scale", "_scale"))

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """Beside the weights, which stay as they are, the factors of scores."""
        for path in self.cuts if self.score != "size" else ():
            linear = f"{path}.weight" in state
            weight = state[f"{path}.weight" if linear else path]
            scale = self.factors.get(path)
            if scale is None:
                scale = column_norms(weight, not linear and _transposed(arch))
            yield f"{path}.scale" if linear else f"{path}_scale", scale.to(weight.device)

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        make_channels(layers[index], header)

    # --- words -----------------------------------------------------------------------------------

    def describe(self, experts: int) -> Description:
        shares = {path: cut.share for path, cut in self.cuts.items()}
        low, high = 100 * min(shares.values()), 100 * max(shares.values())
        span = f"{low:.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:.0f} to {high:.0f}"
        text = f"decoding reads {span}\u00a0% of each projection's channels; prompts run dense"
        return Description(text, {"channels": shares})

    @classmethod
    def refine(cls, use: LayerUse, layer: nn.Module, arch: Arch, header: Header) -> LayerUse:
        """What a token reads at decoding; measured where it was counted."""
        attention = f"{arch.attention_path}."
        read = {path: measured_share(layer, path) for path in header["projections"]}
        left, saved = 1.0, 0.0
        for path, share in read.items():
            target: Any = attrgetter(path)(layer)
            routed = isinstance(target, nn.Parameter)
            size = float((target if routed else target.weight).numel())
            if path.startswith(attention):
                left -= (1 - share) * size / use.attention
                continue
            saved += (1 - share) * size * (use.top_k / max(1, use.experts) if routed else 1)
        return replace(
            use,
            active_attention=use.active_attention * left,
            read=use.read * (1 - saved / use.active_ffn if saved else 1.0),
        )

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        return "No native format skips channels: export the model without carve wina or teal."


def _transposed(arch: Arch) -> bool:
    return isinstance(arch, MoEArch) and arch.transposed


def column_norms(weight: Tensor, transposed: bool = False) -> Tensor:
    """The Euclidean norm of every input's column, float32 (..., I).

    Args:
        weight: (..., O, I); (..., I, O) where ``transposed``.
        transposed: inputs come first.

    >>> column_norms(torch.tensor([[3.0, 1.0], [4.0, 0.0]]))
    tensor([5., 1.])
    """
    dim = -1 if transposed else -2
    return torch.linalg.vector_norm(weight, dim=dim, dtype=torch.float32)
