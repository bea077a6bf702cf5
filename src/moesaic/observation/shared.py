"""Layers shared among several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import nn

from moesaic.distributed import gathered, process
from moesaic.observation.job import Job
from moesaic.observation.stream import Site

V = TypeVar("V")
T = TypeVar("T")


def each_layer(
    job: Job[Any],
    layers: Sequence[int],
    view: Callable[[nn.Module], V],
    work: Callable[[Site[V]], T],
    words: str,
    *,
    follow: bool = False,
) -> Iterator[tuple[int, T]]:
    """Work on layers, each with all tokens; of several processes each works on its own layers.

    All pass the tokens through the layers, and all get everything: what one process would get,
    bit for bit.

    Args:
        job: the model and its tokens.
        layers: their numbers.
        view: what ``work`` sees of a layer.
        work: given the layer's site.
        words: for the progress bar.
        follow: as of :class:`~moesaic.observation.stream.LayerStream`; every layer then needs what
            was made of those before it, so that each process works on all.

    Yields:
        a layer's number, and what came of it.
    """
    number, world = (0, 1) if follow else process()
    mine = sorted(layers)[number::world]
    stream = job.stream(mine, view, follow=follow) if mine else ()
    sites = iter(job.track(stream, words, len(mine)))
    for _ in range(-(-len(layers) // world)):
        site = next(sites, None)
        own = None if site is None else (site.index, work(site))
        yield from (made for made in ([own] if follow else gathered(own)) if made is not None)
    for _ in sites:  # lets the stream end
        pass
