"""How good candidates are: they are made, measured beside the original, and their figures kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch

from moesaic import __version__
from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.config import ROUNDED, MethodConfig, RunArgs, parse_dtype
from moesaic.data.text import evaluation_tokens
from moesaic.errors import MoesaicError
from moesaic.fitting.candidates import Candidate, figures
from moesaic.fitting.files import Files
from moesaic.fitting.redundancy import WINDOWS
from moesaic.fitting.sizes import Costs, told
from moesaic.fitting.texts import Texts
from moesaic.foreign import JSON, Track, give_back
from moesaic.io.layout import OWN, own
from moesaic.io.names import cache_folder
from moesaic.io.outputs import whole_file
from moesaic.io.source import Source
from moesaic.layers.base import LayerPlan
from moesaic.metrics.evaluate import have_room
from moesaic.metrics.forward import Layerwise, Runner, Whole
from moesaic.metrics.rounding import rounded_scores
from moesaic.metrics.score import scores
from moesaic.observation.branches import divergences
from moesaic.observation.files import observe
from moesaic.observation.job import Job
from moesaic.pipeline import convert
from moesaic.recipe import Recipe

STATS = "observed.stats"
ROOM = 8
"""Originals that the disk has room for, at least, while first steps are kept."""


class Trials:
    """Makes candidates and measures them.

    Args:
        recipe: model, device and type.
        source: the model.
        texts: by which is decided and chosen.
        costs: sizes of recipes.
        files: GGUF files, where candidates end in one.
        work: a folder for what is finished.
        track: shows progress.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Source,
        texts: Texts,
        costs: Costs,
        files: Files | None,
        work: Path,
        track: Track,
    ) -> None:
        self.recipe, self.source, self.texts, self.costs = recipe, source, texts, costs
        self.files, self.work, self.track = files, work, track
        self.dtype = parse_dtype(recipe.dtype)
        self.refused: dict[str, str] = {}
        """What the model cannot have, with the reason."""

    def measured(self, candidate: Candidate) -> Candidate:
        """A candidate with its figures, which are kept."""
        file = self.work / f"tried-{_key(_said(candidate))}.json"
        if file.is_file():
            return candidate.scored(json.loads(file.read_text("utf-8")))
        give_back()  # of the candidate before
        tokens = self.texts.both[1]
        with self._opened(candidate) as (run, memory):
            score = figures(*scores([run, self._reference], tokens))
            if memory is not None:
                score["memory"] = memory
        with whole_file(file) as partial:
            partial.write_text(json.dumps(score), "utf-8")
        if shutil.disk_usage(self.work).free < ROOM * self.costs.made(()).bytes:
            for folder in self.work.glob("made-*"):  # first steps that others would start from
                shutil.rmtree(folder, ignore_errors=True)
        return candidate.scored(score)

    def alone(self, steps: Sequence[MethodConfig]) -> dict[MethodConfig, float]:
        """What each of several first steps loses without any rounding: KL, nats a token.

        Decided as quickly as they say, applied to the layers in passing and measured together on
        the first windows that choose. What was measured once is kept in the cache. A step that the
        model cannot have loses infinitely much.
        """
        deciding, choosing = self.texts.both
        few = choosing.rows(slice(WINDOWS))
        prints = self.source.fingerprint, deciding.fingerprint, few.fingerprint
        name = _key([__version__, *prints, str(self.dtype)])
        file = cache_folder() / f"steps-{name}.json"
        kept: dict[str, float] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        new = {_key(told((step,))): step for step in steps}
        plans = {key: self._decided(step) for key, step in new.items() if key not in kept}
        possible = {key: plan for key, plan in plans.items() if plan is not None}
        if possible:
            job: Job[Arch] = Job(self.run_args(), base_arch)
            changed = sorted({layer for plan in possible.values() for layer in plan})
            stream = job.stream(changed, lambda layer: layer, few)
            losses = divergences(stream, [*possible.values()], self.track)
            kept |= zip(possible, losses, strict=True)
            with whole_file(file) as partial:
                partial.write_text(json.dumps(kept), "utf-8")
        return {step: kept.get(key, torch.inf) for key, step in new.items()}

    def _decided(self, step: MethodConfig) -> Mapping[int, LayerPlan] | None:
        """A step's layers; None where the model cannot have it."""
        try:
            plan = convert(step, self._args(self.recipe.model, step, 0)).plan
        except MoesaicError as error:
            self.refused[step.verb] = str(error)
            return None
        return None if plan is None else plan.layers

    def baselines(self) -> list[JSON]:
        """What rounding alone makes of the model; nothing where there is no room for it."""
        device = self.recipe.device
        if not have_room((self.source,), device, torch.float32):
            return []
        types = self.track(ROUNDED, "Rounding alone", len(ROUNDED))
        choosing = self.texts.both[1]
        made = rounded_scores(self.source, self._reference, choosing, types, device)
        return [
            {"form": f"rounded to {type}", "memory": ours.total_bytes, **figures(ours, theirs)}
            for type, ours, theirs in made
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
        asked = chosen.file
        if asked is None or self.files is None:
            return {}
        file = own(folder) / f"model-{asked.called}.gguf"
        model = folder if len(chosen.steps) > 1 else None
        said: JSON = {"file": f"{OWN}/{file.name}", "type": asked.called}
        said |= self.files.make(model, file, asked, chosen.types)
        settings = self.recipe.evaluation
        if settings is not None:
            tokens = evaluation_tokens(
                settings.data, self.source.tokenizer, settings.length, settings.max_tokens
            )
            place = self.recipe.device, self.dtype
            with self.files.opened(file) as read:
                run = Whole.of(read, *place)
                said |= figures(*scores([run, Layerwise(self.source, *place)], tokens))
        return {"gguf": said}

    # --- what is made ----------------------------------------------------------------------------

    def result(self, steps: Sequence[MethodConfig]) -> Path | None:
        """The folder of a recipe's result, made where it is not there; None without steps.

        What recipes have in common is made once.
        """
        model, folder = self.recipe.model, None
        for number, config in enumerate(steps):
            folder = self.work / f"made-{_key(told(tuple(steps[: number + 1])))}"
            if not folder.exists():
                convert(config, self._args(model, config, number)).save(folder)
            model = str(folder)
        return folder

    @contextmanager
    def _opened(self, candidate: Candidate) -> Iterator[tuple[Runner, int | None]]:
        """A candidate's result or file, and the bytes of the latter."""
        made, asked, files = self.result(candidate.converted), candidate.file, self.files
        if asked is None or files is None:
            assert made is not None
            yield self._runner(Source("candidate", made)), None
            shutil.rmtree(made, ignore_errors=True)
        elif candidate.types:
            live = files.live(made, self.costs.made(candidate.converted))
            with live.rounded(candidate.types) as model:
                yield Whole(model), live.layout.size(candidate.types)
        else:
            file = files.folder / "candidate.gguf"
            size = files.make(made, file, asked)["bytes"]
            with files.opened(file) as source:
                yield self._runner(source), size
            file.unlink()

    def _runner(self, made: Source) -> Runner:
        place = self.recipe.device, self.dtype
        room = have_room((made,), *place)
        return Whole.of(made, *place) if room else Layerwise(made, *place)

    @cached_property
    def _reference(self) -> Layerwise:
        return Layerwise(self.source, self.recipe.device, self.dtype, keep=True)

    def _args(self, model: str, config: MethodConfig, number: int) -> RunArgs:
        stats = str(self._stats) if self.costs.decided(config, number) else ""
        return self.run_args(model, stats)

    def run_args(self, model: str = "", stats: str = "") -> RunArgs:
        """What decides a step.

        Args:
            model: whose; by default the original's.
            stats: a file of statistics.
        """
        return RunArgs.of(
            model or self.recipe.model,
            calibration=self.texts.both[0],
            stats=stats,
            device=self.recipe.device,
            dtype=self.dtype,
            seed=self.recipe.calibration.seed,
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
                track=self.track,
            )
        return file

    def observed(self) -> RunArgs:
        """What decides by the file of statistics."""
        return self.run_args(stats=str(self._stats))


def _said(candidate: Candidate) -> object:
    steps = told(candidate.steps)
    return [steps, dict(candidate.types)] if candidate.types else steps


def _key(said: object) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
