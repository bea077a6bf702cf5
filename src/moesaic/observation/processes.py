"""Work on layers shared among several processes."""

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
    """Work on layers, each in one of several processes, and yield all results in each process.

    Args:
        job: shows progress.
        layers: indices of the layers.
        source: opens some of them, one after the other; with all tokens if layers are shared.
        work: function of an opened layer.
        words: label of the progress bar.
        shared: False if every process works on all layers, because each layer needs the results of
            those before it, or because processes share the tokens.
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
