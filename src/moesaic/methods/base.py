"""What a method is, and the loop that runs it over a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from moesaic.budget import LayerSize
from moesaic.methods.refit import refitted
from moesaic.plan import CarvedLayer
from moesaic.stream import Site


class Carver(Protocol):
    """A method that carves a layer from what it saw of it: sums over tokens, then a plan."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> Any: ...

    def choose(self, sizes: list[LayerSize]) -> Mapping[int, Any]:
        """The layers to carve, each with its budget."""

    def observe(self, site: Site) -> Any:
        """Statistics of the site's tokens. Those of two token sets ``merge`` into one."""

    def decide(self, stats: Any, site: Site, budget: Any) -> CarvedLayer:
        """The layer's plan. May look at the tokens once more: routers are fitted to petals."""

    def analyse(self, stats: Any) -> dict[str, Any]:
        """What the paper reports about a layer, for the report."""


class Kept(Protocol):
    """Layers that were decided, by method and number, each with its analysis."""

    def __contains__(self, key: tuple[str, int]) -> bool: ...

    def __getitem__(self, key: tuple[str, int]) -> tuple[Any, dict[str, Any]]: ...

    def add(self, name: str, index: int, layer: CarvedLayer, analysis: dict[str, Any]) -> None: ...


@torch.no_grad()
def carve_layers(
    methods: Mapping[str, Carver],
    budgets: Mapping[str, Mapping[int, Any]],
    sites: Iterable[Site],
    kept: Kept,
    change: Callable[..., Any] | None = None,
) -> None:
    """Observe each layer once, let every method decide on it, and keep each plan at once.

    Args:
        methods: one method and its comparisons; the first observes for all.
        budgets: what each method's ``choose`` returned.
        sites: the layers, from a :class:`~moesaic.stream.LayerStream`.
        kept: takes the plans; what it has already is not decided again.
        change: for a result that propagates: of a layer and its ``plan``, the context inside which
            the layer is as the plan will have it.
    """
    first, observer = next(iter(methods.items()))
    for site in sites:
        i = site.index
        missing = [name for name in methods if (name, i) not in kept]
        if missing:
            stats = observer.observe(site)
            analysis = observer.analyse(stats)
            for name in missing:
                method = methods[name]
                found: dict[str, Any] = {}
                plan = method.decide(stats, site, budgets[name][i])
                if method.config.refit or method.config.bias:
                    plan, found = refitted(plan, site, method.config.refit, method.config.bias)
                kept.add(name, i, plan, analysis | ({"refit": found} if found else {}))
        if change is not None:
            site.change = change(site.layer, plan=kept[first, i][0])
