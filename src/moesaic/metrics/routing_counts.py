"""Routing as it happened: counted on real tokens, never assumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moesaic.arch.lookup import base_arch
from moesaic.errors import MoesaicError
from moesaic.surgery import routed_modules
from moesaic.types import JSON, Model


@dataclass
class Routing:
    """Tokens of one layer by expert."""

    shared: int
    """Neurons that every token runs."""
    widths: tuple[int, ...]
    """Neurons of each expert."""
    tokens: int = 0
    counts: list[int] = field(default_factory=list)
    """Tokens that ran each expert."""
    idle: int = 0
    """Tokens that ran no expert."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * len(self.widths)

    @property
    def calls(self) -> float:
        """Mean experts that a token ran."""
        return sum(self.counts) / max(1, self.tokens)

    @property
    def share(self) -> list[float]:
        """The distribution of routed tokens over experts."""
        total = max(1, sum(self.counts))
        return [c / total for c in self.counts]

    @property
    def active_width(self) -> float:
        """Mean neurons that a token ran."""
        routed = sum(c * w for c, w in zip(self.counts, self.widths, strict=True))
        return self.shared + (routed / self.tokens if self.tokens else 0)

    @property
    def jsd(self) -> float:
        """Divergence of the routing from uniform (MoRE Eq. 18)."""
        return jsd(self.share, [1 / len(self.counts)] * len(self.counts)) if self.counts else 0.0

    def as_json(self) -> JSON:
        """``share``, ``jsd``, ``active_width``; ``idle``, a share of tokens, if any."""
        figures = {"share": self.share, "jsd": self.jsd, "active_width": self.active_width}
        return {**figures, **({"idle": self.idle / self.tokens} if self.idle else {})}


def jsd(p: Sequence[float], q: Sequence[float]) -> float:
    """Jensen-Shannon divergence to base 2, in [0, 1] (MoRE Eq. 18).

    >>> jsd([1.0, 0.0], [0.0, 1.0]), jsd([0.5, 0.5], [0.5, 0.5])
    (1.0, 0.0)
    """

    def kl(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(x * math.log2(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return (kl(p, m) + kl(q, m)) / 2


def routers(model: Model) -> dict[int, tuple[nn.Module, Routing]]:
    """By decoder layer that routes, its router and an empty count for it; empty if dense."""
    try:
        arch = base_arch(model.config)
    except MoesaicError:
        return {}
    return {
        i: (routed.router, Routing(routed.shared, routed.experts))
        for i, routed in routed_modules(model, arch).items()
    }


def _choice(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The experts that a router chose (T, K): ours returns them alone, others as a part.

    A router that weighs all returns weights (T, R), alone or first: heaviest first, and the number
    R where it is zero.
    """
    parts = out if isinstance(out, tuple) else (out,)
    for chosen in parts:
        if not chosen.is_floating_point():
            return chosen
    every = out[0] if isinstance(out, tuple) else out
    weights_TR, chosen_TR = every.sort(dim=-1, descending=True, stable=True)
    return chosen_TR.masked_fill(weights_TR == 0, every.shape[-1])


class Counts(dict[int, Routing]):
    """Routing by decoder layer, while it is counted."""

    mask: Tensor | None = None

    def look_at(self, mask: Tensor | None) -> None:
        """Count these tokens of the batch that runs next: bool (B, L), False on padding."""
        self.mask = mask


@contextmanager
def counted(model: Model) -> Iterator[Counts]:
    """Count the routing of everything that runs inside."""
    by_layer = routers(model)
    counts = Counts({i: routing for i, (_, routing) in by_layer.items()})
    with ExitStack() as hooks:
        hooks.callback(counts.look_at, None)
        for router, routing in by_layer.values():
            hooks.enter_context(router.register_forward_hook(_counter(routing, counts)))
        yield counts


def _counter(layer: Routing, counts: Counts) -> Callable[..., None]:
    def count(_: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> None:
        chosen_TK = _choice(out)
        if counts.mask is not None:
            chosen_TK = chosen_TK[counts.mask.flatten().to(chosen_TK.device)]
        experts = len(layer.widths)
        layer.tokens += chosen_TK.shape[0]
        layer.idle += int((chosen_TK == experts).all(-1).sum())
        new = torch.bincount(chosen_TK.flatten(), minlength=experts)[:experts].tolist()
        layer.counts = [a + b for a, b in zip(layer.counts, new, strict=True)]

    return count
