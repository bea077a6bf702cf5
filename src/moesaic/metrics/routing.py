"""Where tokens went: counted on real routed tokens, never assumed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.errors import MoesaicError
from moesaic.moe import MoEFFN, base_arch
from moesaic.nn import CarvedFFN


@dataclass
class Routing:
    """Tokens of one layer by petal."""

    backbone: int
    petals: tuple[int, ...]
    tokens: int = 0
    counts: list[int] = field(default_factory=list)
    """Tokens that ran each petal."""
    idle: int = 0
    """Tokens that ran no petal."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * len(self.petals)

    @property
    def calls(self) -> float:
        """Mean petals a token ran."""
        return sum(self.counts) / max(1, self.tokens)

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


def routers(model: Any) -> dict[int, tuple[nn.Module, Routing]]:
    """The router of every layer that routes, and an empty count for it; none in a dense model."""
    try:
        arch = base_arch(model.config)
    except MoesaicError:
        return {}
    found: dict[int, tuple[nn.Module, Routing]] = {}
    for i, layer in enumerate(arch.layers(model)):
        ffn = arch.ffn_of(layer)
        if isinstance(ffn, CarvedFFN):
            if ffn.router is not None:
                found[i] = (ffn.router, Routing(ffn.backbone, ffn.petals))
            continue
        view = arch.view(layer)
        if isinstance(view, MoEFFN):
            routing = Routing(view.shared_width, (view.width,) * view.count)
            found[i] = (view.router, routing)
    return found


def _choice(out: Any) -> Tensor:
    """The experts that a router chose (T, K): ours returns them alone, others as the last part.

    A router that weighs returns weights (T, R): heaviest first, and the number R where it is zero.
    """
    chosen: Tensor = out[-1] if isinstance(out, tuple) else out
    if not chosen.is_floating_point():
        return chosen
    weights_TR, chosen_TR = chosen.sort(dim=-1, descending=True, stable=True)
    return chosen_TR.masked_fill(weights_TR == 0, chosen.shape[-1])


@contextmanager
def counted(model: Any) -> Iterator[dict[int, Routing]]:
    """Count the routing of everything that runs inside."""
    found = routers(model)
    handles = [
        router.register_forward_hook(_counter(routing)) for router, routing in found.values()
    ]
    try:
        yield {i: routing for i, (_, routing) in found.items()}
    finally:
        for handle in handles:
            handle.remove()


def _counter(layer: Routing) -> Any:
    def count(_: nn.Module, args: Any, out: Any) -> None:
        chosen_TK = _choice(out)
        experts = len(layer.petals)
        layer.tokens += chosen_TK.shape[0]
        layer.idle += int((chosen_TK == experts).all(-1).sum())
        new = torch.bincount(chosen_TK.flatten(), minlength=experts)[:experts].tolist()
        layer.counts = [a + b for a, b in zip(layer.counts, new, strict=True)]

    return count


@torch.inference_mode()
def trace(model: Any, input_ids: Tensor) -> dict[int, list[int]]:
    """The first choice of petal for each token of one text, by layer: for token colours."""
    chosen: dict[int, list[int]] = {}
    handles = []
    for i, (router, _) in routers(model).items():
        handles.append(
            router.register_forward_hook(
                lambda _, args, out, i=i: chosen.__setitem__(i, _choice(out)[:, 0].tolist())
            )
        )
    try:
        model(input_ids=input_ids.view(1, -1).to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return chosen
