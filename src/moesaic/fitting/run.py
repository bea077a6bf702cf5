"""A search carried out: begun or continued, and its result made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from moesaic.distributed import process
from moesaic.errors import MoesaicError
from moesaic.fitting.candidates import Candidate
from moesaic.fitting.config import FitConfig
from moesaic.fitting.file_search import FileSearch
from moesaic.fitting.search import Search
from moesaic.io.layout import RECORD, our_folder
from moesaic.io.outputs import discard, output_lock, searched, whole_folder
from moesaic.io.source import Source
from moesaic.log import Log
from moesaic.metrics.machine import environment
from moesaic.pipeline import run_recipe
from moesaic.plan import Progress
from moesaic.recipe import Recipe, check_anew, check_run
from moesaic.record import Record
from moesaic.types import JSON, Track, silent


def fit(
    recipe: Recipe,
    config: FitConfig,
    *,
    overwrite: bool = False,
    resume: bool = False,
    track: Track = silent,
    tell: Callable[[str], None] | None = None,
) -> Record | None:
    """Find the recipe that loses least within a budget, and carry it out.

    Args:
        recipe: the model, the folder to make, text, and how the result is measured; without steps.
        config: the budget.
        overwrite: replace ``recipe.out`` if it exists, and drop an unfinished search.
        resume: continue an unfinished search; finished candidates are not measured again.
        track: shows progress.
        tell: shows a line, of what pays.

    Returns:
        the record of the result, with ``chosen`` and ``tried`` among what was measured.

    Raises:
        MoesaicError: nothing fits, or the model cannot be made smaller; names what would work.
    """
    if process()[1] > 1:
        raise MoesaicError("fit runs in one process; the recipe that it finds runs in several.")
    check_run(recipe, overwrite=overwrite, resume=resume)
    check_anew(recipe, overwrite=overwrite, resume=resume)
    with output_lock(Path(recipe.out)):
        log = Log(track)
        again = {"overwrite": overwrite, "resume": resume}
        search = opened(recipe, config, **again, track=log.track, tell=tell)
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
        return carried_out(search, chosen, tried, **again, log=log)


def opened(
    recipe: Recipe,
    config: FitConfig,
    *,
    overwrite: bool = False,
    resume: bool = False,
    track: Track = silent,
    tell: Callable[[str], None] | None = None,
) -> Search:
    """A search, begun or continued; the arguments are those of :func:`fit`.

    Raises:
        MoesaicError: an unfinished search is in the way.
    """
    work = searched(recipe.out)
    if not resume:
        if work.exists() and not overwrite:
            raise MoesaicError(
                f"{work} holds an unfinished search: continue it with resume=True, or start anew "
                "with overwrite=True."
            )
        discard(work)
    search = (FileSearch if config.types else Search)(recipe, config, work, track, tell)
    request = {
        "weights": search.source.fingerprint,
        "calibration": asdict(search.recipe.calibration),
        "windows": config.windows,
        "text": [tokens.fingerprint for tokens in search.texts.both],
        "dtype": recipe.dtype,
    }
    Progress(work, request).begin()
    return search


def carried_out(
    search: Search,
    chosen: Candidate,
    tried: Sequence[Candidate],
    *,
    overwrite: bool = False,
    resume: bool = False,
    log: Log | None = None,
    **findings: object,
) -> Record | None:
    """Make and measure what was chosen; what the search kept on disk goes.

    Args:
        search: that chose it.
        chosen: the candidate.
        tried: all that were measured.
        overwrite: replace the folder if it exists.
        resume: continue an unfinished run.
        log: one that was begun; by default a new one.
        findings: more that led to it, for the record.
    """
    best = replace(search.recipe, steps=chosen.converted)
    refused = [{"form": form, "reason": reason} for form, reason in search.trials.refused.items()]
    findings = {
        "chosen": chosen.as_json(),
        "tried": [c.as_json() for c in tried],
        "refused": refused,
        **findings,
    }

    more = partial(search.trials.filed, chosen)  # the file that was asked for, beside the result
    record: Record | None
    if best.steps:
        record = run_recipe(
            best,
            overwrite=overwrite,
            resume=resume,
            findings=findings,
            more=more,
            track=search.track,
            log=log,
        )
    else:
        record = rounded(best, search.source, findings, more, overwrite)
    shutil.rmtree(search.work, ignore_errors=True)
    return record


def rounded(
    recipe: Recipe, source: Source, findings: JSON, more: Callable[[Path], JSON], overwrite: bool
) -> Record:
    """The record of a folder that holds the original's GGUF file alone: no step was worth it."""
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
            measured={**findings, **more(folder)},
        )
        (our_folder(folder) / RECORD).write_text(json.dumps(record.as_json(), indent=1), "utf-8")
    return record
