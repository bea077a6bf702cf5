"""Where tokens went: counted on real routed tokens, never assumed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.arch import base_arch
from moesaic.errors import MoesaicError
from moesaic.nn import CarvedFFN


@dataclass
class Routing:
    """Tokens of one layer by petal."""

    backbone: int
    petals: tuple[int, ...]
    tokens: int = 0
    counts: list[int] = field(default_factory=list)
    """Tokens that ran each petal."""

    @property
    def share(self) -> list[float]:
        """The distribution of routed tokens over petals."""
        total = max(1, sum(self.counts))
        return [c / total for c in self.counts]

    @property
    def active_width(self) -> float:
        """Mean neurons a token ran."""
        routed = sum(c * p for c, p in zip(self.counts, self.petals, strict=True))
        return self.backbone + (routed / self.tokens if self.tokens else 0)

    @property
    def jsd(self) -> float:
        """Divergence of the routing from uniform (MoRE Eq. 18)."""
        return jsd(self.share, [1 / len(self.counts)] * len(self.counts)) if self.counts else 0.0


def jsd(p: Sequence[float], q: Sequence[float]) -> float:
    """Jensen-Shannon divergence to base 2, in [0, 1] (MoRE Eq. 18).

    >>> jsd([1.0, 0.0], [0.0, 1.0]), jsd([0.5, 0.5], [0.5, 0.5])
    (1.0, 0.0)
    """

    def kl(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(x * math.log2(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return (kl(p, m) + kl(q, m)) / 2


def carved_layers(model: Any) -> dict[int, CarvedFFN]:
    """The carved FFNs of a model by decoder layer; empty for a model that has none."""
    try:
        arch = base_arch(model.config)
    except MoesaicError:
        return {}
    ffns = {i: arch.ffn_of(layer) for i, layer in enumerate(arch.layers(model))}
    return {i: ffn for i, ffn in ffns.items() if isinstance(ffn, CarvedFFN)}


@contextmanager
def counted(model: Any) -> Iterator[dict[int, Routing]]:
    """Count the routing of everything that runs inside."""
    routing, handles = {}, []
    for i, ffn in carved_layers(model).items():
        routing[i] = Routing(ffn.backbone, ffn.petals, counts=[0] * len(ffn.petals))
        if ffn.router is not None:
            handles.append(ffn.router.register_forward_hook(_counter(routing[i])))
    try:
        yield routing
    finally:
        for handle in handles:
            handle.remove()


def _counter(layer: Routing) -> Any:
    def count(_: nn.Module, args: Any, chosen_TK: Tensor) -> None:
        layer.tokens += chosen_TK.shape[0]
        new = torch.bincount(chosen_TK.flatten(), minlength=len(layer.petals)).tolist()
        layer.counts = [a + b for a, b in zip(layer.counts, new, strict=True)]

    return count


@torch.inference_mode()
def trace(model: Any, input_ids: Tensor) -> dict[int, list[int]]:
    """The first choice of petal for each token of one text, by layer: for token colours."""
    chosen: dict[int, list[int]] = {}
    handles = []
    for i, ffn in carved_layers(model).items():
        if ffn.router is not None:
            handles.append(
                ffn.router.register_forward_hook(
                    lambda _, args, out, i=i: chosen.__setitem__(i, out[:, 0].tolist())
                )
            )
    try:
        model(input_ids=input_ids.view(1, -1).to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return chosen
