"""Evaluation of a model, and of another beside it, in the same way for every command.

Baselines by only quantisation, a user's alternative to a smaller model, are measured beside it:
matrices then hold the values that a GGUF file of a plain type does, quantised by the gguf package,
in blocks of 32 along a row; everything else, routers too, is float32 as in llama.cpp's files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import Evaluation, checked_place, text_fields
from moesaic.data.reader import RowRange, check_apart
from moesaic.data.sources import wanted_tasks
from moesaic.data.text import Tokens, evaluation_tokens, needs_tokenizer
from moesaic.distributed import gathered, own_device, process
from moesaic.errors import MoesaicError, quote
from moesaic.io.models import leaves_untouched, sizes_in, skeleton_of, working_type
from moesaic.io.names import RECORD, our_path
from moesaic.io.source import Source, source_or_model, tokenizer_of
from moesaic.io.trust import mapping_of
from moesaic.methods import METHODS
from moesaic.metrics.forward import InMemory, Layerwise, Runner
from moesaic.metrics.generations import generations as repeated
from moesaic.metrics.score import Score, check_vocabularies, scores
from moesaic.metrics.speed import free_bytes
from moesaic.metrics.tasks import check_tasks, headline, measure_tasks, recovery_ratio
from moesaic.observation.files import StatsFile
from moesaic.progress import tracked
from moesaic.record import Record
from moesaic.types import JSON, Model, Named, Tokenizer, Track, Values, release_memory, silent

ROOM = 1.25
"""Memory of running models, as a multiple of that of their weights."""


@leaves_untouched
def evaluate(
    model: Named,
    *,
    against: Named | Source | None = None,
    data: str | Sequence[str] | Tokens | torch.Tensor = "",
    length: int | None = Evaluation.length,
    max_tokens: int | None = Evaluation.max_tokens,
    tasks: str = Evaluation.tasks,
    limit: int | None = Evaluation.limit,
    shots: int | None = Evaluation.shots,
    generations: bool = Evaluation.generations,
    stream: bool = Evaluation.stream,
    baselines: Sequence[str] = Evaluation.baselines,
    tokenizer: Tokenizer | None = None,
    device: str = "cpu",
    dtype: torch.dtype | str | None = None,
    progress: bool | Track = True,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Score:
    """Return perplexity, size and routing of a model on a text; KL, tasks and generations.

    A model given by name that does not fit into memory is read layer by layer. Several processes,
    as torchrun starts them, share the batches; all must call this, and each returns everything.

    Args:
        model: a name or folder, a loaded PreTrainedModel, or what a verb returned.
        against: the original, given in the same ways, which is measured beside it and compared with
            it token by token.
        data: texts, tokens (N, L), or a source; the text that ships by default.
        length: tokens of a window; None for 512, or for a token file's own.
        max_tokens: use at most this much of the text; 0 or None for all of it.
        tasks: as for :func:`moesaic.data.sources.wanted_tasks`.
        limit: questions of each task at most; None for all.
        shots: examples before each question; None for the task's own.
        generations: continue fixed prompts, and measure how the continuations repeat themselves.
        stream: read models given by name layer by layer in any case.
        baselines: types of :data:`~moesaic.config.BASELINES`; the original, given by name, is
            measured quantised to each.
        tokenizer: for texts and tasks, when ``model`` is loaded.
        device: where to compute, when a model is a name.
        dtype: type or its name, when a model is a name; None for the checkpoint's own.
        progress: draw bars on stderr; or a function (items, label, total).
        revision: branch, tag or commit, when ``model`` is a hub id.
        token: of the hub, for models that are hub ids.

    Raises:
        MoesaicError: there is no such model, text or task, or the models cannot be compared.
    """
    track = tracked(progress)
    device, dtype = checked_place(device, dtype, tokenizer)
    data = str(data) if isinstance(data, Path) else data
    if not isinstance(data, str | Sequence | Tokens | torch.Tensor) or not isinstance(tasks, str):
        raise MoesaicError(
            "data is a source, texts or token ids, and tasks are names with commas between; got "
            f"{quote(data)} and {quote(tasks)}."
        )
    check_tasks(wanted_tasks(tasks, shots, limit))
    settings = Evaluation(
        length=length,
        max_tokens=max_tokens,
        tasks=tasks,
        limit=limit,
        shots=shots,
        generations=generations,
        stream=stream,
        baselines=tuple(baselines),
    )
    models = {"model": source_or_model(model, revision, token)}
    if against is not None:
        models["original"] = source_or_model(against, token=token)
    original = models.get("original")
    if baselines and not isinstance(original, Source):
        raise MoesaicError("baselines are of the original: pass its name or folder as against.")
    tokenizer = _tokenizer(model, models, data, settings, tokenizer)
    tokens = _tokens(models["model"], data, tokenizer, settings)
    for each in models.values():
        tokens.check(each.config)
        if isinstance(each, Source):
            _check_unseen(each, tokens, data)
    options: JSON = {"device": device, "dtype": dtype, "track": track}
    result = ScoredModels(models, tokens, tokenizer, settings, **options)
    if generations:
        assert tokenizer is not None
        for name in models:
            repetition = repeated(result.model(name), tokenizer, track=track)
            result.scores[name] = replace(result.scores[name], generations=repetition)
    against_score = result.scores.get("original")
    return replace(result.scores["model"], against=against_score, baselines=result.quantised())


class ScoredModels:
    """One model, or two of which the first is compared with the second, opened and scored.

    Several processes share the batches; all of them make this object.

    Args:
        models: by name; loaded, or on disk. The first is compared with ``original``.
        tokens: the windows of text.
        tokenizer: for tasks.
        settings: tasks, baselines, and whether models are read layer by layer in any case.
        device: where those on disk compute.
        dtype: their floating-point type; None for their own.
        track: shows progress.

    Raises:
        MoesaicError: a loaded model cannot be read layer by layer, or there is no room to generate.
    """

    def __init__(
        self,
        models: Mapping[str, Source | Model],
        tokens: Tokens,
        tokenizer: Tokenizer | None,
        settings: Evaluation,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        track: Track = silent,
    ) -> None:
        release_memory()  # of deciding, before models are loaded
        self.tokens, self.tokenizer, self.settings, self.track = tokens, tokenizer, settings, track
        self.device, self.dtype = own_device(device), dtype
        original = models.get("original")
        self.original = original if isinstance(original, Source) else None
        """Original, if it is on disk."""
        sources = [model for model in models.values() if isinstance(model, Source)]
        if settings.stream and len(sources) < len(models):
            raise MoesaicError("stream reads models from disk: pass their names or folders.")
        self.together = all(gathered(have_room(sources, self.device, dtype)))
        """True if there was memory for all of them at once."""
        needed = [name for name in ("tasks", "generations") if getattr(settings, name)]
        for source in sources if needed and not self.together else ():
            if not have_room([source], self.device, dtype):
                raise MoesaicError(
                    f"{needed[0]} needs {source.name} in memory, and it does not fit; leave it "
                    "out, or give a narrower dtype."
                )
        items = track(models.items(), "Loading models", len(models)) if sources else models.items()
        self.runs = {name: self._opened(model) for name, model in items}
        """Models, loaded or to be read layer by layer."""
        measured = scores([*self.runs.values()], tokens, track, process()[1] > 1)
        self.scores = dict(zip(self.runs, measured, strict=True))
        if tasks := wanted_tasks(settings.tasks, settings.shots, settings.limit):
            assert tokenizer is not None
            asked = [] if process()[0] else [*self.runs]  # lm-eval answers only the first process
            (figures, *_) = gathered(
                {
                    name: measure_tasks(self.model(name), tokenizer, tasks, settings.limit)
                    for name in track(asked, "Tasks", len(asked))
                }
            )
            for name, score in self.scores.items():
                self.scores[name] = with_tasks(score, figures[name], figures.get("original"))

    def _opened(self, model: Source | Model) -> Runner:
        if not isinstance(model, Source):
            return InMemory(model)
        if self.together and not self.settings.stream:
            return InMemory.of(model, self.device, self.dtype)
        return Layerwise(model, self.device, self.dtype)

    @cached_property
    def reference(self) -> Layerwise:
        """Original on disk, run once for all models that are compared with it."""
        assert self.original is not None
        return Layerwise(self.original, self.device, self.dtype, keep=True)

    def quantised(self) -> dict[str, Score]:
        """Return the scores of the original quantised to some types, with the bytes of such files.

        Raises:
            MoesaicError: there is no room for the original in float32.
        """
        types = self.settings.baselines
        if not types or self.original is None:
            return {}
        if not have_room([self.original], self.device, torch.float32):
            raise MoesaicError(f"baselines needs {self.original.name} in float32: no room for it.")
        place = (self.device, self.track)
        quantised = quantised_scores(self.original, self.reference, self.tokens, types, *place)
        return {type: score for type, score, _ in quantised}

    def model(self, name: str) -> Model:
        """Return one of the models, loaded."""
        run = self.runs[name]
        if isinstance(run, Layerwise):
            run = InMemory.of(run.source, self.device, self.dtype)
        return run.shape


def with_tasks(
    score: Score, tasks: dict[str, JSON], original: Mapping[str, Values] | None
) -> Score:
    """Return a score with its tasks' figures, beside the original's where those are others.

    Each task then has ``recovery``: its main figure over the original's.
    """
    if original is None or tasks is original:
        return replace(score, tasks=tasks)
    compared = {}
    for name, task in tasks.items():
        after, before = headline(task), headline(original.get(name, {}))
        recovered = {"recovery": after / before} if after is not None and before else {}
        compared[name] = {**task, **recovered}
    return replace(score, tasks=compared, recovery=recovery_ratio(tasks, original))


def label_with(track: Track, name: str) -> Track:
    """Return progress whose labels name the model."""
    return lambda items, label, total=None: track(items, f"{label}, {name}", total)


# --- text ----------------------------------------------------------------------------------------


def measured_text(
    source: Source, settings: Evaluation, stats: str = ""
) -> tuple[Tokens, Tokenizer | None]:
    """Return the windows that a model and its results are measured on, and its tokenizer.

    The tokenizer is None if the model has none and no requested measurement needs one.

    Args:
        source: the model.
        settings: how it is measured.
        stats: a file of ``observe`` that a method decides from; its text is not measured on.

    Raises:
        MoesaicError: there is no such text, too little of it, or it is not for the model.
    """
    try:
        tokenizer: Tokenizer | None = source.tokenizer
    except MoesaicError:
        if needs_tokenizer(settings.data) or settings.tasks or settings.generations:
            raise
        tokenizer = None
    tokens = _tokens(source, settings.data, tokenizer, settings)
    _check_unseen(source, tokens, settings.data)
    if stats:
        _check_rows(map(RowRange.of, StatsFile(Path(stats)).sources), tokens, stats)
    return tokens, tokenizer


def _tokens(
    model: Source | Model, data: object, tokenizer: Tokenizer | None, settings: Evaluation
) -> Tokens:
    if tokenizer is None and needs_tokenizer(data):
        raise MoesaicError("Text to measure on needs a tokenizer: pass tokenizer=, or Tokens.")
    assert isinstance(data, str | Sequence | Tokens | torch.Tensor)
    return evaluation_tokens(data, tokenizer, settings.length, settings.max_tokens, model.config)


def _tokenizer(
    model: Named,
    models: Mapping[str, Source | Model],
    data: object,
    settings: Evaluation,
    tokenizer: Tokenizer | None,
) -> Tokenizer | None:
    """Return the tokenizer for text, tasks and generations; None if they need none.

    Raises:
        MoesaicError: there is none, or a token is not the same to both models.
    """
    generated = bool(settings.tasks or settings.generations)
    if not generated and not needs_tokenizer(data):
        return tokenizer
    first, original = models["model"], models.get("original")
    tokenizer = tokenizer or tokenizer_of(model, first)
    if isinstance(original, Source) and tokenizer is not None:
        check_vocabularies(tokenizer, original.tokenizer)
    if generated and tokenizer is None:
        raise MoesaicError("tasks and generations of a loaded model need tokenizer=.")
    return tokenizer


def text_behind(folder: Path) -> tuple[list[RowRange], list[str]]:
    """Return the rows that a result of ours was calibrated on, and the text that it was trained on.

    Those of earlier results that it was made from are included. Both are empty for other models.
    """
    file = our_path(folder, RECORD)
    if not file.is_file():
        return [], []
    try:
        record = Record.from_json(mapping_of(file))
        rows = [*record.calibration.get("sources", ()), *record.before.get("sources", ())]
        steps = [(METHODS[f"{step.verb}.{step.method}"], step.config) for step in record.steps]
        trained = [
            step[name] for config, step in steps for name in text_fields(config) if step.get(name)
        ]
        return [*map(RowRange.of, rows)], [*trained, *record.before.get("trained", ())]
    except (ValueError, TypeError, AttributeError, KeyError, MoesaicError):
        return [], []  # it is another version's, or damaged


def _check_unseen(source: Source, tokens: Tokens, data: object) -> None:
    """Refuse to measure a result of ours on rows that it was calibrated or trained on.

    Args:
        source: any model; only results of ours hold what text made them.
        tokens: the text to measure on.
        data: its name, where it has one.

    Raises:
        MoesaicError: some row is in both.
    """
    used, trained = text_behind(source.folder)
    _check_rows(used, tokens, source.name)
    if isinstance(data, str):
        check_apart(trained, data)


def _check_rows(used: Iterable[RowRange], tokens: Tokens, name: str) -> None:
    """Refuse to measure on rows that something of this name was calibrated on."""
    ranges = [*used]
    for theirs in tokens.origins:
        if any(theirs.meets(ours) for ours in ranges):
            raise MoesaicError(
                f"{theirs.source} is to be measured on, and {name} was calibrated on rows of it. "
                "Measure on another text, split or slice."
            )


# --- room ----------------------------------------------------------------------------------------


def have_room(sources: Collection[Source], device: str, dtype: torch.dtype | None) -> bool:
    """Return True if a device has room for all of these models at once."""
    types = ((source.config, working_type(source.config, dtype, device)) for source in sources)
    need = sum(sum(sizes_in(skeleton_of(config), kind)) for config, kind in types)
    return ROOM * need <= free_bytes(device)


# --- the original quantised ----------------------------------------------------------------------


BLOCK = 32
"""Number of weights of a row that share a scale."""


@torch.no_grad()
def quantise_in_place(model: Model, type: str) -> int:
    """Quantise a live model's matrices in place, as those of a GGUF file in one type are.

    Routers and single rows stay in f32, matrices whose rows no block divides in f16.

    Args:
        model: in float32.
        type: one of :data:`~moesaic.config.BASELINES`.

    Returns:
        bytes of the tensors of such a file.
    """
    from gguf import GGMLQuantizationType, quants

    kind, arch = GGMLQuantizationType[type.upper()], base_arch(model.config)
    whole, turned = set[int](), set[int]()
    for layer in arch.layers(model):
        if isinstance(arch, MoEArch) and arch.is_moe(layer):
            view = arch.mixture(layer)
            whole |= {id(p) for p in view.router.parameters()}
            if arch.transposed:
                turned |= {id(p) for p in view.experts.parameters()}
    size = 0
    for parameter in model.parameters():
        matrix: Tensor = parameter.data
        matrix = matrix.transpose(-1, -2) if id(parameter) in turned else matrix
        if matrix.ndim < 2 or matrix[..., 0].numel() < 2 or id(parameter) in whole:
            size += 4 * matrix.numel()
            continue
        if matrix.shape[-1] % BLOCK:
            size += 2 * matrix.numel()
            matrix.copy_(matrix.half())
            continue
        for part in matrix if matrix.ndim == 3 else [matrix]:
            quantised = quants.quantize(part.contiguous().float().cpu().numpy(), kind)
            size += int(quantised.nbytes)
            part.copy_(torch.from_numpy(quants.dequantize(quantised, kind)))
    return size


def quantised_scores(
    source: Source,
    reference: Runner,
    tokens: Tokens,
    types: Iterable[str],
    device: str = "cpu",
    track: Track = silent,
) -> Iterator[tuple[str, Score, Score]]:
    """Yield the scores of a model quantised to some types, one held at a time, beside its own.

    Args:
        source: the model, for which there is room in float32.
        reference: the same model, not quantised.
        tokens: what both are measured on.
        types: of :data:`~moesaic.config.BASELINES`.
        device: where to compute.
        track: shows progress.

    Yields:
        the type, its score, whose bytes are those of a file, and the score of the reference.
    """
    for type in types:
        run = InMemory.of(source, device, torch.float32)
        size = quantise_in_place(run.shape, type)
        score, reference_score = scores([run, reference], tokens, label_with(track, type))
        yield type, replace(score, total_bytes=size), reference_score
        del run, score, reference_score  # before the next one comes
