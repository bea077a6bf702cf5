"""Everything that ``eval`` measures of a model, and of another beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from moesaic.config import Evaluation
from moesaic.data.questions import wanted_tasks
from moesaic.data.text import Tokens, evaluation_tokens, needs_tokenizer
from moesaic.distributed import own_device, process
from moesaic.errors import MoesaicError
from moesaic.foreign import Model, Tokenizer, Track, silent
from moesaic.io.caller import leaves_untouched, taken
from moesaic.io.source import Source
from moesaic.metrics.divergence import check_vocabularies
from moesaic.metrics.forward import Layerwise, Runner, Whole
from moesaic.metrics.generations import generations as continued
from moesaic.metrics.measure import check_unseen, fit
from moesaic.metrics.score import Score, score, scores_beside
from moesaic.metrics.tasks import check_tasks, measure_tasks, recovery_ratio, with_recovery


@leaves_untouched
def evaluate(
    model: str | Path | Model,
    *,
    against: str | Path | Model | None = None,
    data: str | Sequence[str] | Tokens | torch.Tensor = "",
    length: int | None = Evaluation.length,
    max_tokens: int | None = Evaluation.max_tokens,
    tasks: str = Evaluation.tasks,
    limit: int | None = Evaluation.limit,
    shots: int | None = Evaluation.shots,
    generations: bool = Evaluation.generations,
    stream: bool = Evaluation.stream,
    tokenizer: Tokenizer | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    track: Track = silent,
) -> Score:
    """Perplexity, size and routing of a model on a text; divergence, tasks and generations.

    A model given by name that does not fit into memory is read layer by layer. Several processes,
    as torchrun starts them, share the batches; all must call this, and each returns everything.

    Args:
        model: a loaded PreTrainedModel, or a name for :func:`moesaic.io.source.resolve`.
        against: the original, which is measured beside it and compared with it token by token.
        data: texts, tokens (N, L), or a source; the text that ships by default.
        length: tokens of a window; None for 512, or for a token file's own.
        max_tokens: use at most this much of the text; 0 or None for all of it.
        tasks: as for :func:`moesaic.data.questions.wanted_tasks`.
        limit: questions of each task at most; None for all.
        shots: examples before each question; None for the task's own.
        generations: continue fixed prompts, and tell how the continuations repeat themselves.
        stream: read models given by name layer by layer in any case.
        tokenizer: for texts and tasks, when ``model`` is loaded.
        device: where to compute, when a model is a name.
        dtype: floating-point type, when a model is a name; None for the checkpoint's own.
        track: shows progress.

    Raises:
        MoesaicError: there is no such model, text or task, or the models cannot be compared.
    """
    wanted = wanted_tasks(tasks, shots, limit)
    check_tasks(wanted)
    shared, device = process()[1] > 1, own_device(device)
    found = [taken(m) for m in ([model] if against is None else [model, against])]
    first = found[0]
    asked = bool(wanted or generations or needs_tokenizer(data))
    if tokenizer is None and isinstance(first, Source) and asked:
        tokenizer = first.tokenizer
    if asked and len(found) > 1 and isinstance(found[1], Source) and tokenizer is not None:
        check_vocabularies(tokenizer, found[1].tokenizer)
    if (wanted or generations) and tokenizer is None:
        raise MoesaicError("tasks and generations of a loaded model need tokenizer=.")
    data = Tokens(data) if isinstance(data, torch.Tensor) else data
    if isinstance(data, Tokens):
        tokens = data
    else:
        if tokenizer is None and needs_tokenizer(data):
            raise MoesaicError("Text to measure on needs a tokenizer: pass tokenizer=, or Tokens.")
        tokens = evaluation_tokens(data, tokenizer, length, max_tokens, first.config)
    for each in found:
        tokens.check(each.config)
        if isinstance(each, Source):
            check_unseen(each, tokens, data)
    runs = runners(found, stream, device, dtype, track)
    if generations:
        for run in runs:
            check_room(run, device, dtype)
    if len(runs) == 1:
        scores = [score(runs[0], tokens, track, shared)]
    else:
        scores = [*scores_beside(runs[0], runs[1], tokens, track, shared)]
    if wanted:
        assert tokenizer is not None
        told = [measure_tasks(run, tokenizer, wanted, limit, track, shared) for run in runs]
        recovery = recovery_ratio(told[0], told[1]) if len(told) > 1 else None
        told[0] = with_recovery(told[0], told[1]) if len(told) > 1 else told[0]
        scores = [replace(s, tasks=t) for s, t in zip(scores, told, strict=True)]
        scores[0] = replace(scores[0], recovery=recovery)
    if generations:
        assert tokenizer is not None
        said = [continued(live(run, device, dtype), tokenizer, track=track) for run in runs]
        scores = [replace(s, generations=g) for s, g in zip(scores, said, strict=True)]
    return scores[0] if len(scores) == 1 else replace(scores[0], against=scores[1])


def runners(
    models: Sequence[Source | Model],
    stream: bool,
    device: str,
    dtype: torch.dtype | None,
    track: Track = silent,
) -> list[Runner]:
    """Models as runners: loaded if there is room for all of them, else read layer by layer.

    Args:
        models: loaded, or on disk.
        stream: read those on disk layer by layer in any case.
        device: where to compute.
        dtype: floating-point type of those on disk; None for their own.
        track: shows progress.

    Raises:
        MoesaicError: a loaded model cannot be read layer by layer.
    """
    sources = [model for model in models if isinstance(model, Source)]
    if stream and len(sources) < len(models):
        raise MoesaicError("stream reads models from disk: pass their names or folders.")
    layerwise = stream or not fit(sources, device, dtype)
    shown = track(models, "Loading models", len(models)) if sources else models
    return [_runner(model, layerwise, device, dtype) for model in shown]


def _runner(
    model: Source | Model, layerwise: bool, device: str, dtype: torch.dtype | None
) -> Runner:
    if not isinstance(model, Source):
        return Whole(model)
    return Layerwise(model, device, dtype) if layerwise else Whole.of(model, device, dtype)


def check_room(run: Runner, device: str, dtype: torch.dtype | None) -> None:
    """Refuse to generate with a model that there is no room for.

    Raises:
        MoesaicError: says what would work.
    """
    if isinstance(run, Layerwise) and not fit([run.source], device, dtype):
        raise MoesaicError(
            f"generations needs {run.source.name} in memory, and it does not fit; leave it out, "
            "or give a narrower dtype."
        )


def live(run: Runner, device: str, dtype: torch.dtype | None) -> Model:
    """A runner's model, loaded."""
    run = Whole.of(run.source, device, dtype) if isinstance(run, Layerwise) else run
    return run.shape
