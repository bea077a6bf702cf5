"""Pipeline: a model is converted step by step, saved as a checkpoint, and both are measured."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from moesaic.config import OF_BOTH, Calibration, MethodConfig, RunArgs, parse_dtype, path_to
from moesaic.data.sources import wanted_tasks
from moesaic.distributed import gathered, process, wait_for_all
from moesaic.errors import MoesaicError, hint, quote
from moesaic.hub import on_disk
from moesaic.io.models import untouched
from moesaic.io.names import our_folder
from moesaic.io.outputs import (
    check_out,
    discard,
    output_lock,
    resumable,
    run_folder,
    whole_file,
    whole_folder,
)
from moesaic.io.source import Source, resolve
from moesaic.io.trust import mapping_of
from moesaic.methods import VERBS, implementation, methods_of
from moesaic.metrics.evaluate import measured_text
from moesaic.metrics.measurement import Measurement
from moesaic.metrics.tasks import check_tasks
from moesaic.observation.job import Job
from moesaic.plan import Plan, differences
from moesaic.progress import Log
from moesaic.recipe import Recipe, check_anew, check_run, check_step, method_of, step_config
from moesaic.record import Record
from moesaic.result import Result, describe, save_applied
from moesaic.surgery import routing_in
from moesaic.types import JSON, Named, Track, Values, expand_home, silent

logger = logging.getLogger(__name__)

LOADED = "a loaded model"
"""Name in a config of a teacher that was passed loaded."""


def convert(config: MethodConfig, args: RunArgs) -> Result:
    """Carry out one method on one model; all verbs call this."""
    method = implementation(config)
    job = Job(args, method.find, config.window)
    for sentence in method.resolve_defaults(job):
        logger.warning(sentence)
    with untouched(args.model, args.teacher):
        return Result(method, job, method.run(job))


def verb(name: str, model: Named, config: MethodConfig | None = None, **options: Any) -> Result:
    """Carry out a verb of :data:`moesaic.methods.VERBS` by name, also one from another package.

    Args:
        name: the verb's name.
        model: a name or folder, a loaded model, or what a verb returned.
        config: config of one of the verb's methods; None for the one that measures best.
        options: fields of the method's config, ``method`` and ``recipe`` as in a recipe, and
            options of :meth:`~moesaic.config.RunArgs.of`.

    Raises:
        MoesaicError: there is no such verb, or the request cannot be met.
        TypeError: the config is another verb's, or an option is unknown.
    """
    if name not in VERBS:
        step_config(name, {})  # raises
    if config is not None and not isinstance(config, MethodConfig):
        first = next(f.name for f in fields(next(iter(methods_of(name).values()))))
        given = config if isinstance(config, dict) else {first: config}
        shown = ", ".join(f"{key}={value!r:.60}" for key, value in given.items())
        called = repr(str(model)) if isinstance(model, str | Path) else "model"
        raise TypeError(f"Options are given by name: moesaic.{name}({called}, {shown})")
    own, run = _split_options(name, config, options)
    if config is None:
        config = step_config(name, own)
    elif own:
        config = replace(config, **own)
    if config.verb != name:
        raise TypeError(f"{type(config).__name__} is a config of {config.verb}, not of {name}.")
    args = RunArgs.of(model, **run)
    text = "" if args.text is None else type(args.text).__name__
    check_step(config, args.calibration, args.compare, text)
    return convert(config, args)


def _split_options(name: str, config: MethodConfig | None, options: JSON) -> tuple[JSON, JSON]:
    """Split options into those of a verb's method and those of every run.

    Some names are both, as on the command line: a seed and a length are those of text and method.

    Raises:
        TypeError: an option is neither; names it and a similar one.
    """
    configs = [*methods_of(name).values()] if config is None else [type(config)]
    method = {f.name for each in configs for f in fields(each)}
    method |= {"method", "recipe"} if config is None else set()
    every = {"calibration", "progress", *(f.name for f in fields(RunArgs))} - {"model", "track"}
    text = {f.name for f in fields(Calibration)} - {"source"}
    unknown = [key for key in options if key not in method | every | text]
    if unknown:
        known = sorted(method | every | text)
        raise TypeError(
            f"{name}() has no option {unknown[0]!r}; it has {', '.join(known)}."
            f"{hint(unknown[0], known)}"
        )
    both = method & (every | text)
    to_method = set()
    if not VERBS[name].calibrates:
        to_method = {*both}
    elif config is None:
        chosen = method_of(name, {key: options[key] for key in options if key in method - both})
        of_chosen = {f.name for f in fields(methods_of(name).get(chosen, MethodConfig))}
        to_method = of_chosen.intersection(OF_BOTH)
    teacher = options.get("teacher")
    if not isinstance(teacher, str):  # a loaded model, or none
        to_method.discard("teacher")
    own = {key: options[key] for key in options if key in method - both or key in to_method}
    if "teacher" in method and not isinstance(teacher, str | None):
        own["teacher"] = LOADED
    to_run = (every | text) - (to_method - {*OF_BOTH})
    return own, {key: options[key] for key in options if key in to_run}


def apply(
    base: Named,
    plan: str | Path | Plan | Result,
    out: str | Path,
    overwrite: bool = False,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Rebuild a result from its base and its plan, bit for bit; return its folder.

    A plan holds those that made its base, too: the result is rebuilt from the first base, or from
    one between.

    Args:
        base: the model that the plan was made for: a name or folder, a loaded model, or what a verb
            returned; empty for the one that the plan names.
        plan: a result's folder, its ``plan.json``, the plan itself, or what a verb returned.
        out: the folder to write.
        overwrite: replace ``out`` if it exists.
        revision: branch, tag or commit, when ``base`` is a hub id.
        token: access token of the hub.

    Raises:
        MoesaicError: there is no such model or plan, or they do not belong together.
    """
    out = path_to(out)
    if not isinstance(plan, str | Path | Plan | Result):
        raise MoesaicError(f"A plan is a folder, a plan.json, or a Result; got {quote(plan)}.")
    given = plan.complete if isinstance(plan, Result) else plan
    if given is None:
        raise MoesaicError(
            "This result's weights were trained, so no plan can rebuild it: save it."
        )
    read = [] if isinstance(given, Plan) else [Path(expand_home(str(given)))]
    check_out(out, overwrite, [*([base] if isinstance(base, str | Path) else []), *read])
    decided = given if isinstance(given, Plan) else Plan.load(read[0])
    steps = [*decided.earlier, decided]
    if not (base or steps[0].base.name):
        raise MoesaicError("The plan names no base: it was made from a loaded model.")
    with on_disk(base or steps[0].base.name, None, revision, token) as name:
        source = resolve(name)
        own, routing = source.fingerprint, routing_in(source.config)
        done = [  # the source may have been made by some of the steps
            number
            for number, step in enumerate(steps)
            if step.base.weights == own and step.base.routing == routing
        ]
        with whole_folder(out, overwrite, [source.name, *read]) as folder:
            for number in range(max(done, default=0), len(steps)):
                last, before = number == len(steps) - 1, source.folder
                target = folder if last else folder / f"step-{number}"
                target.mkdir(exist_ok=True)
                save_applied(source, steps[number], target, parse_dtype(steps[number].dtype))
                source = Source(f"the result of step {number + 1}", target)
                if before.parent == folder:
                    shutil.rmtree(before)
            decided.save(our_folder(folder))
    return out


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
        recipe: model, steps and settings.
        overwrite: replace ``recipe.out`` if it exists, and delete an unfinished run.
        resume: continue an unfinished run of the same recipe.
        track: shows progress.
        findings: values that led to the recipe, for the record.
        more: function that writes further files into the folder before it is complete, and returns
            values for the record.
        log: a log to continue; by default a new one.

    Returns:
        the record of the run, as in ``result.json``; None in all processes but the first, the
        only one that writes.

    Raises:
        MoesaicError: the request cannot be met; nothing is left at ``recipe.out``.
    """
    check_run(recipe, overwrite=overwrite)
    wait_for_all()  # all have found the output free before the first process locks it
    log, first, work = log or Log(track), process()[0] == 0, run_folder(recipe.out)
    place = output_lock(Path(recipe.out)) if first else nullcontext()
    with place, log.listening(), _discarded_on_failure(recipe.out):
        measurement = None
        if (settings := recipe.evaluation) is not None:  # refuse wrong requests before any work
            check_tasks(wanted_tasks(settings.tasks, settings.shots, settings.limit))
            original = resolve(recipe.model)
            measurement = partial(  # in all processes, which share the text
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
            discard(work)
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
            measured: JSON = {"files": {n: s.nbytes for n, s in sources.items()}}
            if measurement is not None:
                gathered(str(folder))  # the others wait until it is complete
                with log.stage("measure"):
                    measured |= measurement(folder).figures(result.builders)
            measured |= {**(findings or {}), **(more(folder) if more is not None else {})}
            record = result.record(recipe.model, recipe.out, earlier=earlier, measured=measured)
            record.log = log.as_json()
            describe(record, recipe.to_yaml(), folder)
        discard(work)
        return record


@contextmanager
def _discarded_on_failure(out: str) -> Iterator[None]:
    """Delete what a failed run leaves, unless it could be resumed."""
    try:
        yield
    except (MoesaicError, KeyboardInterrupt):
        if process()[0] == 0 and not resumable(out):
            with suppress(MoesaicError):
                discard(run_folder(out))
        raise


def _converted(recipe: Recipe, work: Path, log: Log) -> tuple[Result, Record | None]:
    """Return the result of a recipe's last step, and the record of the steps before it."""
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
            resume_from=work if i == last else work / f"step-{i}.layers",
            track=log.track,
        )
        with log.stage(config.verb):
            result = convert(config, args)
        if i < last:
            earlier = result.record(recipe.model, recipe.out, earlier=earlier)
            model = str(work / f"step-{i}")  # on disk until the run is done
            if process()[0] == 0:
                _save_step(result, Path(model))
            wait_for_all()
    return result, earlier


def _save_step(result: Result, folder: Path) -> None:
    """Save a step's result, unless the same result of the same weights is there already."""
    note = folder.with_name(f"{folder.name}.json")
    identity = result.identity()
    if folder.exists() and note.exists():
        there = {**identity, "saved": resolve(str(folder)).fingerprint}
        if not differences(mapping_of(note), there):
            return
    with whole_folder(folder, overwrite=True) as partial:
        result.write(partial)
    saved = {**identity, "saved": resolve(str(folder)).fingerprint}
    with whole_file(note) as file:
        file.write_text(json.dumps(saved), "utf-8")
