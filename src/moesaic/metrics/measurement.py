"""Measurements of a run, its result beside its original and comparisons; and of only speed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from moesaic.config import Bench, Evaluation, checked_place
from moesaic.data.sources import wanted_tasks
from moesaic.data.text import LENGTH, Tokens, evaluation_tokens, positions
from moesaic.distributed import own_device
from moesaic.errors import MoesaicError
from moesaic.hub import on_disk
from moesaic.io.models import skeleton_of, working_type
from moesaic.io.source import Source, resolve
from moesaic.metrics.evaluate import ScoredModels, have_room, label_with, with_tasks
from moesaic.metrics.forward import InMemory
from moesaic.metrics.generations import generate
from moesaic.metrics.generations import generations as repeated
from moesaic.metrics.score import model_size, scores
from moesaic.metrics.speed import Speed, interleaved, one_round, peak_memory
from moesaic.metrics.speed import against as ratios
from moesaic.metrics.tasks import measure_tasks
from moesaic.progress import tracked
from moesaic.types import JSON, Model, Named, Tokenizer, Track, silent

logger = logging.getLogger(__name__)

NEW_TOKENS = 32
"""Number of new tokens after a prompt in measurements of speed."""


class Measurement(ScoredModels):
    """Measurements of a saved result beside its original and comparisons, on the same text.

    Original and result are held together if there is room for both, and timed in turn, round by
    round. Otherwise they are scored layer by layer from disk, and one is held at a time, to
    generate and to be timed; measurements without room even for that are left out, which the
    record notes. Each is loaded once. Several processes all make this object, which scores the
    two, and the first continues with :meth:`figures`.

    Args:
        folder: the result as saved, which a user will load.
        original: the model it was made from.
        settings: text, its length, and how speed is measured.
        text: of :func:`moesaic.metrics.evaluate.measured_text`.
        device: where to compute.
        dtype: floating-point type; None for the checkpoint's own.
        track: shows progress.
    """

    def __init__(
        self,
        folder: Path,
        original: Source,
        settings: Evaluation,
        text: tuple[Tokens, Tokenizer | None],
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        track: Track = silent,
    ) -> None:
        self.sources = {"result": Source("result", folder), "original": original}
        device = own_device(device)
        dtype = working_type(original.config, dtype, device)
        super().__init__(self.sources, *text, settings, device=device, dtype=dtype, track=track)
        self.scores = {name: self.scores[name] for name in ("original", "result")}
        self._generation: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    def figures(self, comparisons: Mapping[str, Callable[[], Model]]) -> JSON:
        """Measure everything that the settings request.

        Args:
            comparisons: other models by name, each built when its turn comes; they are compared
                with the original token by token, too.

        Returns:
            the fields of :attr:`moesaic.record.Record.measured`.
        """
        together, place = self.together, (self.device, self.dtype)
        fits = together or all(have_room((source,), *place) for source in self.sources.values())
        speeds: dict[str, Speed] = {}
        if fits:
            for group in [["original", "result"]] if together else [["original"], ["result"]]:
                speeds |= self._of_loaded(group)
            self._compared(comparisons)
            self._quantised()
        else:
            logger.warning(
                "There is no room for a whole model in memory: continuations, speed, comparisons "
                "and quantised baselines are left out."
            )
        files = {n: self.sources[n].nbytes for n in ("original", "result")}
        routing = self.scores["result"].routing
        measured: JSON = {
            "evaluation": self._circumstances(),
            "files": {**files, **self._sizes},
            "scores": {name: score.as_json() for name, score in self.scores.items()},
            "routing": {str(i): layer.as_json() for i, layer in routing.items()},
        }
        if self._generation:
            measured["generation"] = {"prompt": self.settings.prompt, **self._generation}
        return {**measured, **(self._speed(speeds) if speeds else {})}

    def _of_loaded(self, names: list[str]) -> dict[str, Speed]:
        """Measure generations and speed, each model loaded once; return speeds, if requested."""
        runs = self.runs
        waiting = self.track(names, "Loading models", len(names))
        if all(isinstance(runs[name], InMemory) for name in names):
            waiting = names
        models = {name: self.model(name) for name in waiting}
        for name, model in models.items():
            self._continue(name, model)
        if not self.settings.rounds:
            return {}
        runners = {name: partial(one_round, model) for name, model in models.items()}
        return interleaved(runners, self._prompt, NEW_TOKENS, self.settings.rounds, self.track)

    def _continue(self, name: str, model: Model) -> None:
        """Generate a model's continuations and keep their figures."""
        if self.tokenizer is None:
            return
        if self.settings.generations:
            repetition = repeated(model, self.tokenizer, track=label_with(self.track, name))
            self.scores[name] = replace(self.scores[name], generations=repetition)
        for _ in self.track((name,), f"Continuation, {name}", 1):
            self._generation[name] = generate(
                model,
                self.settings.prompt,
                tokenizer=self.tokenizer,
                new_tokens=self.settings.new_tokens,
            )

    def _compared(self, comparisons: Mapping[str, Callable[[], Model]]) -> None:
        """Score and continue other models, of which one is held at a time."""
        self.runs.clear()
        settings, original = self.settings, self.scores["original"]
        wanted = wanted_tasks(settings.tasks, settings.shots, settings.limit)
        for name, build in comparisons.items():
            shown, run = label_with(self.track, name), InMemory(build())
            self.scores[name] = scores([run, self.reference], self.tokens, shown)[0]
            if wanted:
                assert self.tokenizer is not None
                tasks = measure_tasks(run.shape, self.tokenizer, wanted, settings.limit)
                self.scores[name] = with_tasks(self.scores[name], tasks, original.tasks)
            self._continue(name, run.shape)
            del run  # before the next one comes

    def _quantised(self) -> None:
        """Score the original quantised to GGUF's types, where there is room for it in float32."""
        try:
            quantised = self.quantised()
        except MoesaicError as error:
            logger.warning("%s It is left out.", error)
            return
        self.scores |= quantised
        self._sizes = {type: score.total_bytes for type, score in quantised.items()}

    @property
    def _prompt(self) -> torch.Tensor:
        room = (positions(self.sources["original"].config) or sys.maxsize) - NEW_TOKENS
        return self.tokens.input_ids[:1, : max(2, min(512, room))]

    def _speed(self, speeds: Mapping[str, Speed]) -> JSON:
        """Return speeds, the peak memory of each model in its own process, and their ratios."""
        length, place = self._prompt.shape[1], (self.device, self.dtype)
        names = ("original", "result")

        def peaks() -> Iterator[int]:
            with ThreadPoolExecutor(2 if self.together else 1) as pool:  # if there is room
                folders = [self.sources[name].folder for name in names]
                yield from pool.map(lambda folder: peak_memory(folder, length, 8, *place), folders)

        shown = zip(names, self.track(peaks(), "Peak memory", 2), strict=True)
        timed = {
            name: {**speeds[name].as_json(), "peak_memory_bytes": peak} for name, peak in shown
        }
        found = ratios(speeds["result"], speeds["original"], 1.0)
        medians = {what: ratio["ratio"] for what, ratio in found.items()}
        spreads = {f"{what}_spread": ratio["spread"] for what, ratio in found.items()}
        return {
            "speed_interleaved": self.together,
            "speed": timed,
            "speed_ratio": {**medians, **spreads, "rounds": self.settings.rounds},
        }

    def _circumstances(self) -> JSON:
        """Return the text and the settings of the measurement."""
        settings, config = self.settings, self.sources["original"].config
        extra: JSON = {"bos": True} if self.tokens.begun else {}
        if settings.tasks:
            extra["tasks"] = settings.tasks
        for name in ("limit", "shots"):
            if getattr(settings, name) is not None:
                extra[name] = getattr(settings, name)
        if settings.stream or not self.together:
            extra["layer_by_layer"] = True
        return {
            "data": settings.data or "shipped",
            "length": self.tokens.input_ids.shape[1],
            "max_tokens": settings.max_tokens,
            "computed_in": str(self.dtype or config.dtype).removeprefix("torch."),
            "sources": [origin.as_json() for origin in self.tokens.origins],
            **extra,
        }


# --- speed, memory and file size -----------------------------------------------------------------


def bench(
    model: Named,
    against: Named | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    device: str = "cpu",
    dtype: torch.dtype | str | None = None,
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
        dtype: floating-point type or its name; None for the checkpoint's own.
        progress: draw bars on stderr; or a function (items, label, total).
        revision: branch, tag or commit, when ``model`` is a hub id.
        token: of the hub, for those that are hub ids.
        options: fields of :class:`~moesaic.config.Bench`.

    Returns:
        under ``model`` and ``against`` the keys of :meth:`moesaic.metrics.speed.Speed.as_json`,
        ``peak_memory_bytes``, ``active_parameters`` and ``file_bytes``; under ``ratio`` those of
        :func:`moesaic.metrics.speed.against`.

    Raises:
        MoesaicError: a model cannot be loaded.
    """
    device, dtype = checked_place(device, dtype, tokenizer)
    settings = Bench(**options)
    track = tracked(progress)
    given = {"model": model} | ({} if against is None else {"against": against})
    at = {"model": revision}
    with ExitStack() as held:
        sources = {
            name: resolve(held.enter_context(on_disk(each, tokenizer, at.get(name), token)))
            for name, each in given.items()
        }
        length, new_tokens = _length(settings, sources.values()), settings.new_tokens
        types = {name: working_type(each.config, dtype, device) for name, each in sources.items()}
        prompt = _prompt(sources, length)
        together = have_room(sources.values(), device, dtype)
        speeds: dict[str, Speed] = {}
        for names in [[*sources]] if together else [[name] for name in sources]:
            loading = track(names, "Loading models", len(names))
            live = {n: partial(one_round, sources[n].load(device, types[n])) for n in loading}
            speeds |= interleaved(live, prompt, new_tokens, settings.rounds, track)
            live.clear()
        active = {name: _active(skeleton_of(source.config)) for name, source in sources.items()}
        measured: dict[str, JSON] = {
            name: {
                **speeds[name].as_json(),
                "peak_memory_bytes": peak_memory(
                    source.folder, length, new_tokens, device, types[name]
                ),
                "active_parameters": active[name],
                "file_bytes": source.nbytes,
            }
            for name, source in sources.items()
        }
    if against is not None:
        ideal = active["against"] / active["model"]
        measured["ratio"] = ratios(speeds["model"], speeds["against"], ideal)
    return measured


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
    """Return the first model's tokens of a text, within all models' vocabularies.

    They are drawn at random if it has no tokenizer.
    """
    tokens = min(source.config.vocab_size for source in sources.values())
    try:
        tokenizer = next(iter(sources.values())).tokenizer
    except MoesaicError:
        return torch.randint(tokens, (1, length), generator=torch.Generator().manual_seed(0))
    return evaluation_tokens("", tokenizer, length, length).input_ids % tokens


def _active(model: Model) -> int:
    """Return the parameters that a token uses; all if the architecture is not known."""
    try:
        return model_size(model).active_parameters
    except MoesaicError:
        return sum(p.numel() for p in model.parameters())
