"""Routing counted on real tokens."""

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
    """Counts of one layer's tokens by expert."""

    shared: int
    """Number of neurons that every token runs."""
    widths: tuple[int, ...]
    """Number of neurons of each expert."""
    tokens: int = 0
    counts: list[int] = field(default_factory=list)
    """Number of tokens that ran each expert."""
    idle: int = 0
    """Number of tokens that ran no expert."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * len(self.widths)

    @property
    def calls(self) -> float:
        """Mean number of experts that a token ran."""
        return sum(self.counts) / max(1, self.tokens)

    @property
    def share(self) -> list[float]:
        """Distribution of routed tokens over experts."""
        total = max(1, sum(self.counts))
        return [c / total for c in self.counts]

    @property
    def active_width(self) -> float:
        """Mean number of neurons that a token ran."""
        routed = sum(c * w for c, w in zip(self.counts, self.widths, strict=True))
        return self.shared + (routed / self.tokens if self.tokens else 0)

    @property
    def jsd(self) -> float:
        """Divergence of the routing from uniform (MoRE Eq. 18)."""
        return jsd(self.share, [1 / len(self.counts)] * len(self.counts)) if self.counts else 0.0

    def as_json(self) -> JSON:
        """Return ``share``, ``jsd``, ``active_width``; ``idle``, a share of tokens, if above 0."""
        figures = {"share": self.share, "jsd": self.jsd, "active_width": self.active_width}
        return {**figures, **({"idle": self.idle / self.tokens} if self.idle else {})}


def jsd(p: Sequence[float], q: Sequence[float]) -> float:
    """Return the Jensen-Shannon divergence to base 2, in [0, 1] (MoRE Eq. 18).

    >>> jsd([1.0, 0.0], [0.0, 1.0]), jsd([0.5, 0.5], [0.5, 0.5])
    (1.0, 0.0)
    """

    def kl(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(x * math.log2(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return (kl(p, m) + kl(q, m)) / 2


def routers(model: Model) -> dict[int, tuple[nn.Module, Routing]]:
    """Return, by decoder layer that routes, its router and an empty count; empty if dense."""
    try:
        arch = base_arch(model.config)
    except MoesaicError:
        return {}
    return {
        i: (routed.router, Routing(routed.shared, routed.experts))
        for i, routed in routed_modules(model, arch).items()
    }


def _choice(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the experts that a router chose (T, K); ours returns them alone, others in a tuple.

    For a router that returns weights of all experts (T, R), alone or first: the experts by falling
    weight, and the number R where the weight is zero.
    """
    parts = out if isinstance(out, tuple) else (out,)
    for chosen in parts:
        if not chosen.is_floating_point():
            return chosen
    every = out[0] if isinstance(out, tuple) else out
    weights_TR, chosen_TR = every.sort(dim=-1, descending=True, stable=True)
    return chosen_TR.masked_fill(weights_TR == 0, every.shape[-1])


class Counts(dict[int, Routing]):
    """Counter of routing by decoder layer."""

    mask: Tensor | None = None

    def look_at(self, mask: Tensor | None) -> None:
        """Count these tokens of the batch that runs next: bool (B, L), False on padding."""
        self.mask = mask


@contextmanager
def counted(model: Model) -> Iterator[Counts]:
    """Context in which the routing of everything that runs is counted."""
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
