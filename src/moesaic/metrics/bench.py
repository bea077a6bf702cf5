"""Speed, memory and file size of a model beside another."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch

from moesaic.bars import tracked
from moesaic.config import Bench
from moesaic.data.text import LENGTH, evaluation_tokens, positions
from moesaic.errors import MoesaicError
from moesaic.hub import on_disk
from moesaic.io.models import shape_of, working_type
from moesaic.io.source import Source, resolve
from moesaic.metrics.evaluate import have_room
from moesaic.metrics.size import model_size
from moesaic.metrics.speed import Speed, compare_speed, peak_memory
from moesaic.metrics.speed import against as ratios
from moesaic.types import JSON, Model, Named, Tokenizer, Track


def bench(
    model: Named,
    against: Named | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool | Track = True,
    revision: str | None = None,
    token: str | bool | None = None,
    **options: int,
) -> dict[str, JSON]:
    """Return the speed of models, and the peak memory of each in its own process.

    They are timed in turn, round by round, if there is room for all at once; else one by one.

    Args:
        model: a name or folder, a loaded model, or what a verb returned.
        against: another, which is timed in turn with it.
        tokenizer: for a loaded model, which brings none.
        device: where they compute.
        dtype: floating-point type; None for the checkpoint's own.
        progress: draw bars on stderr; or a function (items, label, total).
        revision: branch, tag or commit, when ``model`` is a hub id.
        token: of the hub, when ``model`` is a hub id.
        options: fields of :class:`~moesaic.config.Bench`.

    Returns:
        under ``model`` and ``against`` the keys of :meth:`moesaic.metrics.speed.Speed.as_json`,
        ``peak_memory_bytes``, ``active_parameters`` and ``file_bytes``; under ``ratio`` those of
        :func:`moesaic.metrics.speed.against`.

    Raises:
        MoesaicError: a model cannot be loaded.
    """
    settings = Bench(**options)
    track = tracked(progress)
    given = {"model": model} | ({} if against is None else {"against": against})
    with ExitStack() as held:
        models = {
            name: held.enter_context(on_disk(each, tokenizer, revision, token))
            for name, each in given.items()
        }
        speeds, figures = _measured(models, settings, device, dtype, track)
    measured = {name: {**speeds[name].as_json(), **figures[name]} for name in models}
    if {"model", "against"} <= speeds.keys():
        theirs, ours = (figures[name]["active_parameters"] for name in ("against", "model"))
        measured["ratio"] = ratios(speeds["model"], speeds["against"], theirs / ours)
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
            "file_bytes": source.nbytes,
        }
        for name, source in sources.items()
    }


def _length(settings: Bench, sources: Iterable[Source]) -> int:
    """Return the number of tokens of the prompt.

    Raises:
        MoesaicError: with the new tokens they exceed a model's positions.
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
    """Return the first model's tokens of a text, within all models' vocabularies."""
    first = next(iter(sources.values()))
    ids = evaluation_tokens("", first.tokenizer, length, length).input_ids
    return ids % min(source.config.vocab_size for source in sources.values())


def _active(model: Model) -> int:
    """Return the parameters that a token uses; all if the architecture is not known."""
    try:
        return model_size(model).active_parameters
    except MoesaicError:
        return sum(p.numel() for p in model.parameters())
