"""The story: a model goes in, steps are carried out, a checkpoint comes out, both are measured."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from moesaic import report
from moesaic.config import MethodConfig, RunArgs, parse_dtype
from moesaic.data.questions import wanted_tasks
from moesaic.distributed import gathered, process, wait_for_all
from moesaic.errors import MoesaicError
from moesaic.io.headers import mapping_of
from moesaic.io.layout import (
    CARD,
    PAGE,
    RECIPE,
    RECORD,
    our_folder,
)
from moesaic.io.outputs import (
    check_out,
    discard,
    marked,
    output_lock,
    resumable,
    unfinished,
    whole_file,
    whole_folder,
)
from moesaic.io.restore import untouched
from moesaic.io.source import Source, resolve
from moesaic.log import Log
from moesaic.methods import implementation
from moesaic.metrics.evaluate import measured_text
from moesaic.metrics.machine import environment
from moesaic.metrics.measurement import Measurement
from moesaic.metrics.tasks import check_tasks
from moesaic.observation.job import Job
from moesaic.plan import Plan, Progress
from moesaic.recipe import Recipe, check_anew, check_run, check_step
from moesaic.record import Record
from moesaic.result import Result, save_applied
from moesaic.surgery import routing_in
from moesaic.types import JSON, Track, Values, at_home, silent

logger = logging.getLogger(__name__)


def convert(config: MethodConfig, args: RunArgs) -> Result:
    """Carry out one method on one model: the body of all verbs.

    Raises:
        MoesaicError: the request cannot be met.
    """
    check_step(config, args.calibration, args.compare)
    method = implementation(config)
    job = Job(args, method.find, config.window)
    for sentence in method.resolve_defaults(job):
        logger.warning(sentence)
    with untouched(args.model, args.teacher):
        return Result(method, job, method.run(job))


def apply(base: str, plan: str | Path, out: str | Path, overwrite: bool = False) -> None:
    """Rebuild a result from its base and its plan, bit for bit.

    A plan holds those that made its base, too: it is rebuilt of the first base, or of one between.

    Args:
        base: the model that the plan was made for, by name; empty for the one that the plan names.
        plan: a result's folder, or its ``plan.json``.
        out: the folder to make.
        overwrite: replace ``out`` if it exists.

    Raises:
        MoesaicError: there is no such model or plan, or they do not belong together.
    """
    out, plan = Path(out).expanduser(), at_home(str(plan))
    check_out(out, overwrite, [base, plan])
    place = Path(plan)
    decided = Plan.load(place)
    steps = [*decided.earlier, decided]
    if not (base or steps[0].base.name):
        raise MoesaicError(f"The plan at {plan} names no base: it was made from a loaded model.")
    source = resolve(base or steps[0].base.name)
    own, routing = source.fingerprint, ("", routing_in(source.config))
    done = [
        number
        for number, step in enumerate(steps)
        if step.base.weights == own and step.base.routing in routing
    ]
    with whole_folder(out, overwrite, [source.name, place]) as folder:
        for number in range(max(done, default=0), len(steps)):
            last, before = number == len(steps) - 1, source.folder
            target = folder if last else folder / f"step-{number}"
            target.mkdir(exist_ok=True)
            save_applied(source, steps[number], target, parse_dtype(steps[number].dtype))
            source = Source(f"the result of step {number + 1}", target)
            if before.parent == folder:
                shutil.rmtree(before)
        decided.save(our_folder(folder))


def run_recipe(
    recipe: Recipe,
    *,
    overwrite: bool = False,
    resume: bool = False,
    track: Track = silent,
    findings: Values | None = None,
    more: Callable[[Path], Values] | None = None,
    log: Log | None = None,
) -> Record | None:
    """Carry out a recipe: convert, save, measure, report.

    Args:
        recipe: what to do.
        overwrite: replace ``recipe.out`` if it exists, and drop an unfinished run.
        resume: continue an unfinished run of the same recipe.
        track: shows progress.
        findings: what led to the recipe, for the record.
        more: writes further files into the folder before it is whole, and returns what the record
            says of them.
        log: one that was begun; by default a new one.

    Returns:
        what is known of the run, as ``result.json`` holds it; None in all processes of a run but
        the first, which alone writes.

    Raises:
        MoesaicError: the request cannot be met; nothing is left at ``recipe.out``.
    """
    check_run(recipe, overwrite=overwrite, resume=resume)
    wait_for_all()  # all have found the place free before the first one takes it
    log, first, work = log or Log(track), process()[0] == 0, unfinished(recipe.out)
    place = output_lock(Path(recipe.out)) if first else nullcontext()
    with place, log.listening(), _cleared(recipe.out):
        measurement = None
        if (settings := recipe.evaluation) is not None:  # what is wrong is said before any work
            check_tasks(wanted_tasks(settings.tasks, settings.shots, settings.limit))
            original = resolve(recipe.model)
            measurement = partial(  # made in all processes, which share the text
                Measurement,
                original=original,
                settings=settings,
                text=measured_text(original, settings, recipe.calibration.stats),
                device=recipe.device,
                dtype=parse_dtype(recipe.dtype),
                track=log.track,
            )
        check_anew(recipe, overwrite=overwrite, resume=resume)
        if not resume and first:
            Progress(work, {}).discard()
        wait_for_all()
        result, earlier = _converted(recipe, work, log)
        if not first:
            if measurement is not None:
                measurement(Path(gathered("")[0]))
            return None
        with whole_folder(Path(recipe.out), overwrite) as folder:
            with log.stage("write"):
                result.write(folder)
            sources = {"original": resolve(recipe.model), "result": Source("result", folder)}
            measured: JSON = {"files": {n: s.checkpoint.nbytes() for n, s in sources.items()}}
            if measurement is not None:
                gathered(str(folder))  # the others wait until it is whole
                with log.stage("measure"):
                    measured |= measurement(folder).figures(result.builders)
            measured |= {**(findings or {}), **(more(folder) if more is not None else {})}
            record = _record(recipe, result, earlier, measured)
            record.log = log.as_json()
            describe(record, recipe, folder)
        Progress(work, {}).discard()
        return record


@contextmanager
def _cleared(out: str) -> Iterator[None]:
    """What is left of a run that fails goes, unless it could be resumed."""
    try:
        yield
    except (MoesaicError, KeyboardInterrupt):
        if process()[0] == 0 and not resumable(out):
            with suppress(MoesaicError):
                discard(unfinished(out))
        raise


def _converted(recipe: Recipe, work: Path, log: Log) -> tuple[Result, Record | None]:
    """The result of a recipe's last step, and what is known of the steps before it."""
    settings, earlier = recipe.evaluation, None
    model, last = recipe.model, len(recipe.steps) - 1
    for i, config in enumerate(recipe.steps):
        compare = settings.compare if settings and i == last else ()
        args = RunArgs(
            model,
            recipe.calibration,
            compare=tuple(compare),
            device=recipe.device,
            dtype=parse_dtype(recipe.dtype),
            progress=work if i == last else work / f"step-{i}.layers",
            track=log.track,
        )
        with log.stage(config.verb):
            result = convert(config, args)
        if i < last:
            earlier = _record(recipe, result, earlier)
            model = str(work / f"step-{i}")  # on disk until the run is done
            if process()[0] == 0:
                _keep(result, Path(model))
            wait_for_all()
    return result, earlier


def _keep(result: Result, folder: Path) -> None:
    """Save a step's result, unless it is there already: the same, made from the same weights."""
    note = folder.with_name(f"{folder.name}.json")
    identity: JSON = json.loads(json.dumps(result.identity()))
    if folder.exists() and note.exists():
        noted: JSON = mapping_of(note)
        if noted == {**identity, "saved": resolve(str(folder)).fingerprint}:
            return
    result.save(folder, overwrite=True)
    saved = {**identity, "saved": resolve(str(folder)).fingerprint}
    with whole_file(note) as partial:
        partial.write_text(json.dumps(saved), "utf-8")


def describe(record: Record, recipe: Recipe, folder: Path) -> None:
    """Write recipe, record, card and page into a result's folder."""
    recipe_yaml = recipe.to_yaml()
    files = {
        RECIPE: recipe_yaml,
        RECORD: json.dumps(record.as_json(), indent=1),
        PAGE: marked(report.html([record])),
    }
    (folder / CARD).write_text(report.model_card(record, recipe_yaml), "utf-8")
    for name, text in files.items():
        (our_folder(folder) / name).write_text(text, "utf-8")


def _record(
    recipe: Recipe, result: Result, earlier: Record | None, measured: Values | None = None
) -> Record:
    return result.record(
        recipe.model,
        recipe.out,
        earlier=earlier,
        calibration=asdict(recipe.calibration),
        environment=environment(recipe.device),
        measured=measured,
    )
