"""Layers shared among several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from moesaic.arch.dense import Arch
from moesaic.distributed import gathered, process
from moesaic.observation.job import Job

V = TypeVar("V")
T = TypeVar("T")


def each_layer(
    job: Job[Arch],
    layers: Sequence[int],
    source: Callable[[Sequence[int]], Iterable[V]],
    work: Callable[[V], T],
    words: str,
    *,
    shared: bool = True,
) -> Iterator[T]:
    """Work on layers; of several processes each works on its own, and all get everything.

    Args:
        job: shows progress.
        layers: their numbers.
        source: opens some of them, one after the other; with all tokens, where they are shared.
        work: what is made of one.
        words: for the progress bar.
        shared: where not, every process works on all: each layer needs what was made of those
            before it, or processes share the tokens.
    """
    number, world = process() if shared else (0, 1)
    numbers = sorted(layers)[number::world]
    items = iter(job.track(source(numbers) if numbers else (), words, len(numbers)))
    for _ in range(-(-len(layers) // world)):
        results = [work(item) for item in (next(items, None),) if item is not None]
        for part in gathered(results) if shared else [results]:
            yield from part
    for _ in items:  # lets the source end
        pass
