"""Speed, memory and file size of a model beside another."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch

from moesaic.config import Bench
from moesaic.data.text import LENGTH, evaluation_tokens, positions
from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import shape_of
from moesaic.io.dtypes import working_type
from moesaic.io.source import Source, resolve
from moesaic.metrics.evaluate import have_room
from moesaic.metrics.size import model_size
from moesaic.metrics.speed import Speed, against, compare_speed, peak_memory
from moesaic.types import JSON, Model, Track, silent


def bench(
    models: Mapping[str, str],
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    track: Track = silent,
    **options: int,
) -> dict[str, JSON]:
    """Speed of models, the peak memory of each in its own process.

    They are timed in turn, round by round, if there is room for all at once; else one by one.

    Args:
        models: names for :func:`moesaic.io.source.resolve` by column; ``model`` is compared with
            ``against`` where both are there.
        device: where they compute.
        dtype: floating-point type; None for the checkpoint's own.
        track: shows progress.
        options: fields of :class:`~moesaic.config.Bench`.

    Returns:
        by column the keys of :meth:`moesaic.metrics.speed.Speed.as_json`, ``peak_memory_bytes``,
        ``active_parameters`` and ``file_bytes``; under ``ratio`` those of
        :func:`moesaic.metrics.speed.against`.

    Raises:
        MoesaicError: a model cannot be loaded.
    """
    settings = Bench(**options)
    speeds, figures = _measured(models, settings, device, dtype, track)
    measured = {name: {**speeds[name].as_json(), **figures[name]} for name in models}
    if {"model", "against"} <= speeds.keys():
        theirs, ours = (figures[name]["active_parameters"] for name in ("against", "model"))
        measured["ratio"] = against(speeds["model"], speeds["against"], theirs / ours)
    return measured


def _measured(
    models: Mapping[str, str],
    settings: Bench,
    device: str,
    dtype: torch.dtype | None,
    track: Track,
) -> tuple[dict[str, Speed], dict[str, JSON]]:
    new_tokens, rounds = settings.new_tokens, settings.rounds
    sources = {name: resolve(model) for name, model in models.items()}
    length = _length(settings, sources.values())
    types = {name: working_type(source.config, dtype, device) for name, source in sources.items()}
    prompt = _prompt(sources, length)
    together = have_room(sources.values(), device, dtype)
    speeds: dict[str, Speed] = {}
    for names in [[*sources]] if together else [[name] for name in sources]:
        loading = track(names, "Loading models", len(names))
        live = {name: sources[name].load(device, types[name]) for name in loading}
        speeds |= compare_speed(live, prompt, new_tokens, rounds, track)
        live.clear()
    active = {name: _active(shape_of(source.config)) for name, source in sources.items()}
    return speeds, {
        name: {
            "peak_memory_bytes": peak_memory(
                source.folder, length, new_tokens, device, types[name]
            ),
            "active_parameters": active[name],
            "file_bytes": source.checkpoint.nbytes(),
        }
        for name, source in sources.items()
    }


def _length(settings: Bench, sources: Iterable[Source]) -> int:
    """Tokens of the prompt.

    Raises:
        MoesaicError: they, and what follows them, are beyond a model's positions.
    """
    length = LENGTH if settings.length is None else settings.length
    for source in sources:
        room = (positions(source.config) or sys.maxsize) - settings.new_tokens
        if room < (length if settings.length else 2):
            raise MoesaicError(
                f"length {length} and {settings.new_tokens} new tokens are beyond the "
                f"{room + settings.new_tokens:,} positions of {source.name}; give fewer."
            )
        length = min(length, room)
    return length


def _prompt(sources: Mapping[str, Source], length: int) -> torch.Tensor:
    """The first model's tokens of a text, as numbers that all the models know."""
    first = next(iter(sources.values()))
    ids = evaluation_tokens("", first.tokenizer, length, length).input_ids
    return ids % min(source.config.vocab_size for source in sources.values())


def _active(model: Model) -> int:
    """Parameters that a token uses; all, of a model whose architecture we do not know."""
    try:
        return model_size(model).active_parameters
    except MoesaicError:
        return sum(p.numel() for p in model.parameters())
