"""What a method is, and the loop that runs it over a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch

from moesaic.budget import LayerSize
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


Finished = Callable[[str, int, CarvedLayer, dict[str, Any]], None]


@torch.no_grad()
def carve_layers(
    methods: Mapping[str, Carver],
    budgets: Mapping[str, Mapping[int, Any]],
    sites: Iterable[Site],
    finished: Finished,
    skip: Collection[int] = (),
) -> None:
    """Observe each layer once, let every method decide on it, and hand each plan over at once.

    Args:
        methods: one method and its comparisons; the first observes for all.
        budgets: what each method's ``choose`` returned.
        sites: the layers, from a :class:`~moesaic.stream.LayerStream`.
        finished: called with name, layer, plan and analysis.
        skip: layers that were finished before.
    """
    observer = next(iter(methods.values()))
    for site in sites:
        if site.index in skip:
            continue
        stats = observer.observe(site)
        analysis = observer.analyse(stats)
        for name, method in methods.items():
            plan = method.decide(stats, site, budgets[name][site.index])
            finished(name, site.index, plan, analysis)
