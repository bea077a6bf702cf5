"""How good candidates are: they are made, measured beside the original, and their figures kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from moesaic import __version__
from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.config import ROUNDED, MethodConfig, RunArgs, parse_dtype
from moesaic.data.text import evaluation_tokens
from moesaic.errors import MoesaicError
from moesaic.fitting.candidates import BY_WINDOW, Candidate, figures
from moesaic.fitting.gguf_files import Files
from moesaic.fitting.sizes import Costs, steps_as_json
from moesaic.fitting.texts import Texts
from moesaic.io.headers import mapping_of, reading
from moesaic.io.layout import FOLDER, our_folder
from moesaic.io.names import cache_folder
from moesaic.io.outputs import remove, whole_file, whole_folder
from moesaic.io.source import Source
from moesaic.metrics.evaluate import have_room
from moesaic.metrics.forward import Layerwise, Runner, Whole
from moesaic.metrics.rounding import rounded_scores
from moesaic.metrics.score import scores
from moesaic.observation.branches import divergences
from moesaic.observation.files import observe
from moesaic.observation.job import Job
from moesaic.pipeline import convert
from moesaic.recipe import Recipe
from moesaic.surgery import routing_in
from moesaic.types import JSON, Track, give_back

STATS = "observed.stats"
WINDOWS = 16
"""Of the text that chooses: on them steps are measured alone."""
ROOM = 8
"""Originals that the disk has room for, at least, while first steps are kept."""


@dataclass
class Trials:
    """Makes candidates and measures them."""

    recipe: Recipe
    """Its model, device and type."""
    source: Source
    texts: Texts
    """By which is decided and chosen."""
    costs: Costs
    files: Files | None
    """Where candidates end in one."""
    work: Path
    """A folder for what is finished."""
    track: Track
    refused: dict[str, str] = field(default_factory=dict)
    """What the model cannot have, with the reason."""

    @property
    def dtype(self) -> torch.dtype | None:
        return parse_dtype(self.recipe.dtype)

    def measured(self, candidate: Candidate) -> Candidate:
        """A candidate with its figures, which are kept."""
        steps, types = steps_as_json(candidate.steps), candidate.types
        file = self.work / f"tried-{_key([steps, dict(types)] if types else steps)}.json"
        if file.is_file():
            score = mapping_of(file)
            with reading(file, "Remove it, and that is measured anew."):
                return candidate.scored(score)
        give_back()  # of the candidate before
        tokens = self.texts.both[1]
        with self._opened(candidate) as (run, memory):
            ours, theirs = scores([run, self._reference], tokens)
            score = {**figures(ours, theirs), BY_WINDOW: ours.kl_N}
            if memory is not None:
                score["memory"] = memory
        with whole_file(file) as partial:
            partial.write_text(json.dumps(score), "utf-8")
        if shutil.disk_usage(self.work).free < ROOM * self.costs.built(()).bytes:
            for folder in self.work.glob("made-*"):  # first steps that others would start from
                remove(folder)
        return candidate.scored(score)

    def alone(self, steps: Sequence[MethodConfig]) -> dict[MethodConfig, float]:
        """What each of several first steps loses without any rounding: KL, nats a token.

        Decided as quickly as they say, applied to the layers in passing and measured together on
        the first windows that choose. What was measured once is kept in the cache. A step that the
        model cannot have loses infinitely much.
        """
        deciding, choosing = self.texts.both
        windows = choosing.rows(slice(WINDOWS))
        prints = self.source.fingerprint, deciding.fingerprint, windows.fingerprint
        name = _key([__version__, *prints, str(self.dtype), routing_in(self.source.config)])
        file = cache_folder() / f"steps-{name}.json"
        losses: dict[str, float] = mapping_of(file) if file.is_file() else {}
        keys = {step: _key(steps_as_json((step,))) for step in steps}
        plans = {}
        for step, key in keys.items():
            if key not in losses:
                try:
                    args = self.args(stats=self.costs.decided(step, 0))
                    plan = convert(step, args).plan
                    assert plan is not None  # those of ladders decide layer by layer
                    plans[key] = plan.layers
                except MoesaicError as error:
                    self.refused[step.verb] = str(error)
        if plans:
            job: Job[Arch] = Job(self.args(), base_arch)
            stream = job.stream((), lambda layer: layer, windows)
            kl_CN = divergences(stream, [*plans.values()], self.track)
            losses |= dict(zip(plans, kl_CN.mean(1).tolist(), strict=True))
            with whole_file(file) as partial:
                partial.write_text(json.dumps(losses), "utf-8")
        return {step: losses.get(key, torch.inf) for step, key in keys.items()}

    def baselines(self) -> list[JSON]:
        """What rounding alone makes of the model; nothing where there is no room for it."""
        device = self.recipe.device
        if not have_room((self.source,), device, torch.float32):
            return []
        types = self.track(ROUNDED, "Rounding alone", len(ROUNDED))
        choosing = self.texts.both[1]
        rounded = rounded_scores(self.source, self._reference, choosing, types, device)
        return [
            {"form": f"rounded to {type}", "memory": ours.total_bytes, **figures(ours, theirs)}
            for type, ours, theirs in rounded
        ]

    def filed(self, chosen: Candidate, folder: Path) -> JSON:
        """Write the file of the chosen candidate beside its result.

        Args:
            chosen: the candidate.
            folder: of the result; empty where nothing was changed before rounding.

        Returns:
            ``gguf`` with ``file``, ``type``, ``bytes``, ``types``, and its figures on the text that
            results are measured on; nothing where no file was asked for.
        """
        if chosen.file is None or self.files is None:
            return {}
        type = chosen.file.called
        out = our_folder(folder) / f"model-{type}.gguf"
        result = folder if chosen.converted else None
        record: JSON = {"file": f"{FOLDER}/{out.name}", "type": type}
        record |= self.files.make(result, out, chosen.file, chosen.types)
        settings = self.recipe.evaluation
        if settings is not None:
            tokens = evaluation_tokens(
                settings.data, self.source.tokenizer, settings.length, settings.max_tokens
            )
            with self.files.opened(out) as source:
                models = Whole.of(source, *self._place), Layerwise(self.source, *self._place)
                record |= figures(*scores([*models], tokens))
        return {"gguf": record}

    # --- what is made ----------------------------------------------------------------------------

    def result(self, steps: Sequence[MethodConfig]) -> Path | None:
        """The folder of a recipe's result, made where it is not there; None without steps.

        What recipes have in common is made once.
        """
        model, folder = self.recipe.model, None
        for number, config in enumerate(steps):
            folder = self.work / f"made-{_key(steps_as_json(tuple(steps[: number + 1])))}"
            if not folder.exists():
                stats = self.costs.decided(config, number)
                made = convert(config, self.args(model, stats))
                with whole_folder(folder) as partial:
                    made.write(partial)
            model = str(folder)
        return folder

    @contextmanager
    def _opened(self, candidate: Candidate) -> Iterator[tuple[Runner, int | None]]:
        """A candidate's result or file, and the bytes of the latter."""
        result, file, files = self.result(candidate.converted), candidate.file, self.files
        if file is None or files is None:
            assert result is not None
            yield self._runner(Source("candidate", result)), None
            remove(result)
        elif candidate.types:
            live = files.live(result, self.costs.built(candidate.converted))
            with live.rounded(candidate.types) as model:
                yield Whole(model), live.layout.size(candidate.types)
        else:
            out = files.folder / "candidate.gguf"
            size = files.make(result, out, file)["bytes"]
            with files.opened(out) as source:
                yield self._runner(source), size
            out.unlink()

    def _runner(self, source: Source) -> Runner:
        room = have_room((source,), *self._place)
        return Whole.of(source, *self._place) if room else Layerwise(source, *self._place)

    @property
    def _place(self) -> tuple[str, torch.dtype | None]:
        """Where models are run, and in which type."""
        return self.recipe.device, self.dtype

    @cached_property
    def _reference(self) -> Layerwise:
        return Layerwise(self.source, *self._place, keep=True)

    def args(self, model: str = "", stats: bool = False) -> RunArgs:
        """What decides a step.

        Args:
            model: what it starts from; by default the original.
            stats: it decides from the file of statistics.
        """
        return RunArgs.of(
            model or self.recipe.model,
            calibration=self.texts.both[0],
            stats=str(self._stats) if stats else "",
            device=self.recipe.device,
            dtype=self.dtype,
            progress=False,
        )

    @cached_property
    def _stats(self) -> Path:
        """One file of statistics, from which all first steps decide that can."""
        file = self.work / STATS
        if not file.is_file():
            observe(
                self.recipe.model,
                file,
                calibration=self.texts.both[0],
                device=self.recipe.device,
                dtype=self.dtype,
                resume=True,
                progress=self.track,
            )
        return file


def _key(request: object) -> str:
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:16]
