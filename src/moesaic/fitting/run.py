"""Runs of a search: begin or continue it, then make and measure its result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moesaic import __version__
from moesaic.config import RunArgs, takes_options
from moesaic.distributed import process
from moesaic.errors import MoesaicError
from moesaic.fitting.candidates import Candidate
from moesaic.fitting.config import FitConfig
from moesaic.fitting.search import Search
from moesaic.hub import on_disk
from moesaic.io.models import untouched
from moesaic.io.names import RECORD, our_folder
from moesaic.io.outputs import (
    check_unfinished,
    discard,
    output_lock,
    run_folder,
    search_folder,
    whole_folder,
)
from moesaic.io.source import Source
from moesaic.metrics.speed import environment
from moesaic.pipeline import convert, run_recipe
from moesaic.plan import Progress
from moesaic.progress import Log
from moesaic.recipe import Recipe, check_anew, check_run, parse_as
from moesaic.record import Record
from moesaic.result import Result
from moesaic.surgery import settings_digest
from moesaic.types import JSON, Named, Track, silent


@takes_options(FitConfig, without=("compare", "plan", "teacher", "inplace", "stats"))
def fit(model: Named, config: FitConfig | None = None, **options: Any) -> Result:
    """Find the steps of least KL within a budget, and carry them out.

    A search takes minutes even of a small model: ``resume_from`` names a folder that keeps what was
    measured, from which the same call continues. The search itself measures as the command does.

    Raises:
        MoesaicError: nothing fits, or the model cannot be made smaller; names what would work. A
            GGUF file (``types``) is made by the command, or by ``result.export``.
        TypeError: an option is unknown.
    """
    if config is not None and not isinstance(config, FitConfig):
        raise TypeError(f"Options are given by name: moesaic.fit(model, memory={config!r:.60})")
    budgets = {f.name for f in fields(FitConfig)}
    own = {name: options.pop(name) for name in [*options] if name in budgets}
    args = RunArgs.of(model, **options)
    config = parse_as(FitConfig, {**({} if config is None else asdict(config)), **own}, "")
    if config.types:
        raise MoesaicError("types: result.export(FILE, to='gguf', type=...) writes a GGUF file.")
    if process()[1] > 1:
        raise MoesaicError("fit runs in one process; what it finds runs in several.")
    if args.text is not None:
        raise MoesaicError("calibration of a search is a source: give its name, file or mix.")
    with ExitStack() as held:
        place = Path(held.enter_context(TemporaryDirectory(prefix="moesaic-")))
        name = held.enter_context(on_disk(model, args.tokenizer, args.revision, args.token))
        recipe = Recipe(
            model=name,
            out=str(place / "result"),
            steps=(),
            calibration=args.calibration,
            evaluation=None,
            device=args.device,
            dtype=str(args.dtype or "auto").removeprefix("torch."),
        )
        check_run(recipe)
        work = args.resume_from or place / "search"
        with untouched(model):
            search = Search(recipe, config, work, args.track)
            Progress(work, _request(search, config)).begin()
            chosen, _ = search.run()
        made, calibration = model, search.recipe.calibration
        for step in chosen.conversions:
            made = convert(
                step, replace(args, model=made, calibration=calibration, resume_from=None)
            )
    assert isinstance(made, Result)
    return made


def search_and_make(
    recipe: Recipe,
    config: FitConfig,
    *,
    overwrite: bool = False,
    resume: bool = False,
    track: Track = silent,
    notify: Callable[[str], None] | None = None,
) -> Record | None:
    """Find the recipe of least KL within a budget, and carry it out.

    Args:
        recipe: the model, the folder to make, text, and how the result is measured; without steps.
        config: the budget.
        overwrite: replace ``recipe.out`` if it exists, and drop an unfinished search.
        resume: continue an unfinished search; finished candidates are not measured again.
        track: shows progress.
        notify: called with one line that compares the kinds of changes.

    Returns:
        the record of the result, with ``chosen`` and ``tried`` among what was measured.

    Raises:
        MoesaicError: nothing fits, or the model cannot be made smaller; names what would work.
    """
    if process()[1] > 1:
        raise MoesaicError("fit runs in one process; the recipe that it finds runs in several.")
    check_run(recipe, overwrite=overwrite)
    check_anew(recipe, overwrite=overwrite, resume=resume)
    with output_lock(Path(recipe.out)):
        log = Log(track)
        again = {"overwrite": overwrite, "resume": resume}
        search = open_search(recipe, config, **again, track=log.track, notify=notify)
        try:
            with log.listening(), log.stage("search"):
                chosen, tried = search.run()
        except MoesaicError:
            if not resume and not search.tried:  # nothing that could be resumed
                shutil.rmtree(search.work, ignore_errors=True)
            raise
        except KeyboardInterrupt:
            search.leave_best()
            raise
        return make_chosen(search, chosen, tried, **again, log=log)


def open_search(
    recipe: Recipe,
    config: FitConfig,
    *,
    overwrite: bool = False,
    resume: bool = False,
    track: Track = silent,
    notify: Callable[[str], None] | None = None,
) -> Search:
    """Begin or continue a search; the arguments are those of :func:`search_and_make`.

    Raises:
        MoesaicError: an unfinished search is in the way.
    """
    work = search_folder(recipe.out)
    if not resume:
        check_unfinished(work, overwrite, resume, "search")
        discard(work)
    search = Search(recipe, config, work, track, notify)
    Progress(work, _request(search, config)).begin()
    return search


def _request(search: Search, config: FitConfig) -> JSON:
    """Return what finished candidates depend on; only a search of the same is continued."""
    return {
        "version": __version__,
        "weights": search.source.fingerprint,
        "settings": settings_digest(search.source.config),
        "calibration": asdict(search.recipe.calibration),
        "windows": config.windows,
        "text": [tokens.fingerprint for tokens in search.texts.both],
        "dtype": search.recipe.dtype,
    }


def make_chosen(
    search: Search,
    chosen: Candidate,
    tried: Sequence[Candidate],
    *,
    overwrite: bool = False,
    resume: bool = False,
    log: Log | None = None,
    **findings: object,
) -> Record | None:
    """Make and measure the chosen candidate, and remove what the search kept on disk.

    Args:
        search: the one that chose it.
        chosen: the candidate.
        tried: all candidates that were measured.
        overwrite: replace the folder if it exists.
        resume: continue an unfinished run.
        log: of the run so far; by default a new one.
        findings: further figures of the search, for the record.
    """
    best = replace(search.recipe, steps=chosen.conversions)
    if search.files and best.evaluation:  # transformers' speed is not that of the file
        best = replace(best, evaluation=replace(best.evaluation, rounds=0))
    refused = [{"form": form, "reason": reason} for form, reason in search.trials.refused.items()]
    findings = {
        "chosen": chosen.as_json(),
        "tried": [c.as_json() for c in tried],
        "refused": refused,
        **findings,
    }

    more = partial(search.trials.write_file, chosen)  # the requested file, beside the result
    record: Record | None
    if best.steps:
        if not resume:
            discard(run_folder(best.out))
        search.trials.make_room()
        begun = search.trials.hand_over(best.steps, best.out)
        record = run_recipe(
            best,
            overwrite=overwrite,
            resume=resume or begun,
            findings=findings,
            more=more,
            track=search.track,
            log=log,
        )
    else:
        record = _write_gguf_alone(best, search.source, findings, more, overwrite)
    shutil.rmtree(search.work, ignore_errors=True)
    return record


def _write_gguf_alone(
    recipe: Recipe, source: Source, findings: JSON, more: Callable[[Path], JSON], overwrite: bool
) -> Record:
    """Write a folder with only the original's GGUF file, and return its record."""
    with whole_folder(Path(recipe.out), overwrite) as folder:
        record = Record(
            model=recipe.model,
            out=recipe.out,
            model_type=source.config.model_type,
            native=True,
            steps=[],
            layers=[],
            calibration=asdict(recipe.calibration),
            environment=environment(recipe.device),
            measured={**findings, **more(folder), "files": {"original": source.nbytes}},
        )
        (our_folder(folder) / RECORD).write_text(json.dumps(record.as_json(), indent=1), "utf-8")
    return record
