"""Commands that search for a recipe: ``fit``, and ``moesaic MODEL`` without a verb.

The latter prints whether a model fits this machine, searches, and asks what to save.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import click

from moesaic.cli import commands as shared
from moesaic.cli import options as given
from moesaic.cli.commands import print_notice, print_words
from moesaic.config import BASELINES, Calibration, Evaluation, GgufType, in_unit
from moesaic.errors import MoesaicError
from moesaic.fitting.config import FitConfig
from moesaic.io.names import check_repository
from moesaic.io.outputs import discard, output_lock, search_folder, whole_file
from moesaic.io.trust import check_fields, mapping_of, reading
from moesaic.recipe import Recipe, check_anew, check_run, command_of, parse_as
from moesaic.types import JSON, expand_home

if TYPE_CHECKING:
    from rich.table import Table

    from moesaic.fitting.candidates import Candidate
    from moesaic.fitting.search import Search
    from moesaic.record import Record


MEASURED_ON = ("data", "max_tokens")
"""Fields of Evaluation that say on which text a search measures."""

# --- fit -----------------------------------------------------------------------------------------


def fit(
    model: str,
    out: Path,
    overwrite: bool,
    resume: bool,
    push: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the recipe of least KL within a budget, and carry it out."""
    recipe = _search_recipe(model, out, options)
    config = parse_as(FitConfig, options, "")
    if push is not None:
        check_repository(push)
    check_run(recipe, overwrite=overwrite)  # before anything slow is imported
    shared.print_start(model)
    from rich.console import Group

    from moesaic import report
    from moesaic.fitting.run import search_and_make
    from moesaic.progress import bars

    again = {"overwrite": overwrite, "resume": resume}
    record = search_and_make(recipe, config, **again, track=bars, notify=print_notice)
    assert record is not None
    shown = Group(candidates_table(record.measured["tried"]), report.terminal(record))
    if record.steps:
        shared.print_made(out)
    else:
        outcome = f"No step is worth it at that size. Only the file is in {out}."
        outcome += " Not pushed: it has no card; hf upload takes it." if push else ""
        print_notice(outcome)
    upload = shared.push_result(str(out), push) if record.steps else {}
    shared.emit(as_json, {**record.output(), **upload}, shown)


def _search_recipe(model: str, out: Path, options: JSON, **measured: Any) -> Recipe:
    """Return the recipe of a search, without steps; the options that it reads are removed.

    Options of :class:`~moesaic.config.Evaluation` stand in place of ``measured``.
    """
    return Recipe(
        model=model,
        out=str(out),
        steps=(),
        calibration=parse_as(Calibration, given.take(options, given.TEXT), ""),
        evaluation=parse_as(Evaluation, measured | given.take(options, MEASURED_ON), ""),
        **given.take(options, given.PLACE),
    )


def _search_options(*names: str) -> list[click.Parameter]:
    """Return the options of a search: some of its own, text, evaluation, device and type."""
    own = [given.option_of(FitConfig, name) for name in names]
    text = [given.option_of(Calibration, name, given.COMMON) for name in given.TEXT]
    measured = [given.option_of(Evaluation, name, given.COMMON) for name in MEASURED_ON]
    return [*own, *text, *measured, given.DEVICE, given.DTYPE]


def candidates_table(candidates: list[Any]) -> Any:
    """Return a table of measured candidates, those of least KL first."""
    from rich.table import Table

    from moesaic.report.numbers import memory

    table = Table(title="Candidates", title_justify="left")
    for name in ("form", "memory", "active", "perplexity rises", "KL", "estimated"):
        table.add_column(name, justify="left" if name == "form" else "right")
    for c in sorted(candidates, key=lambda c: float(c["kl"])):
        figures = (memory(c["memory"]), f"{c['active_parameters']:,}", f"{c['loss']:.1%}")
        table.add_row(c["form"], *figures, f"{c['kl']:.4f}", f"{c['estimated_kl']:.4f}")
    return table


# --- moesaic MODEL -------------------------------------------------------------------------------


SHARES = (0.8, 0.65, 0.5)
"""Shares of the original's bytes that are tried, beside a budget; larger ones where the last is out
of reach, as of a small model with a large vocabulary."""
MAX_KL = 0.05
"""Largest KL of a result by default: hardly noticed."""
ROOM = 0.8
"""Share of the free memory that weights may take: running them takes the rest."""
QUANTISED = tuple(type for type in BASELINES if type in get_args(GgufType))
"""Types that the original is measured in, and that it can be written in."""
BELOW, FEW_BITS = 0.75, ("q8_0", "q4_k_m", "q2_k", "iq2_xxs")
"""Share of the smallest quantised file's bytes, and types, with which ``fit`` is suggested."""
GOAL = "goal.json"


@dataclass(frozen=True)
class Goal:
    """Goal of a search: bytes that the weights may take, or the KL that a result may have."""

    memory: int | None = None
    max_kl: float | None = None

    def __post_init__(self) -> None:
        if self.max_kl is not None and not 0 < self.max_kl < math.inf:
            raise MoesaicError(f"max_kl {self.max_kl:g} must be a number above 0.")

    def __str__(self) -> str:
        return in_unit(self.memory) if self.memory else f"a KL of at most {self.max_kl:g}"

    def budgets(self, size: int, native: bool = False, least: int = 0) -> list[FitConfig]:
        """Return the budgets to try, falling: from the original's bytes to the ``least``."""
        last = SHARES[-1]
        least = max(least, round(last * size))
        sizes = [least + (share - last) / (1 - last) * (size - least) for share in SHARES]
        if self.memory:
            sizes = [self.memory, *(s for s in sizes if s < 0.95 * self.memory)]
        return [FitConfig(memory=int(s), native=native, confirm=1) for s in sizes]

    def best(self, points: Sequence[Point]) -> Point | None:
        """Return the point that meets the goal best; None if none does."""
        if self.memory:
            fitting = [point for point in points if point.memory <= self.memory]
            return min(fitting, key=lambda point: point.kl, default=None)
        near = [point for point in points if point.kl <= (self.max_kl or 0.0)]
        return min(near, key=lambda point: point.memory, default=None)


@dataclass(frozen=True)
class Point:
    """Possible result, with its figures on evaluation text."""

    form: str
    memory: int
    figures: JSON
    candidate: Candidate | None = None
    """Candidate of the search; None for the original in a quantised type."""
    type: str = ""
    """GGUF type of the quantised original; empty for a candidate."""

    @property
    def kl(self) -> float:
        """KL from the original in nats a token."""
        return float(self.figures["kl"])

    @property
    def native(self) -> bool:
        """True if engines load the result as it is."""
        return self.candidate is not None and self.candidate.size.native

    def as_json(self) -> JSON:
        """Return form, bytes and figures, and the steps of a candidate."""
        found = self.candidate.as_json() if self.candidate else {"form": self.form}
        return {**found, "memory": self.memory, **self.figures}


def guide(
    model: str,
    out: Path | None,
    yes: bool,
    overwrite: bool,
    resume: bool,
    as_json: bool,
    max_kl: float | None,
    **options: Any,
) -> None:
    """Print whether a model fits this machine, find a smaller one, and save what you choose."""
    name = Path(expand_home(model)).resolve().name.removesuffix(".gguf")
    recipe = _search_recipe(model, out or Path(f"{name}-smaller"), options, baselines=BASELINES)
    config = parse_as(FitConfig, {"memory": 1, **options}, "")
    asked_for = Goal(config.memory if "memory" in options else None, max_kl)
    if asked_for.memory and max_kl is not None:
        raise MoesaicError("--memory and --max-kl are two goals: give one.")
    check_run(recipe, overwrite=overwrite)  # before anything slow is imported
    check_anew(recipe, overwrite=overwrite, resume=resume)
    shared.print_start(model)
    from moesaic import report
    from moesaic.fitting.run import open_search
    from moesaic.progress import bars, err_console

    ask = not yes and not as_json and shared.is_terminal(sys.stdin)
    machine = _print_model(recipe)
    if (goal := _goal(machine, asked_for, search_folder(recipe.out), resume, ask)) is None:
        return
    again = {"overwrite": overwrite, "resume": resume}
    with output_lock(Path(recipe.out)):
        first = goal.budgets(machine["weight_bytes"], config.native)[0]
        search = open_search(recipe, first, **again, track=bars, notify=print_notice)
        with whole_file(search.work / GOAL) as partial:
            partial.write_text(json.dumps(asdict(goal)), "utf-8")
        try:
            points = measure(search, front(search, goal, machine["weight_bytes"]))
        except MoesaicError:
            discard(search.work)
            raise
        except KeyboardInterrupt:
            _stopped()
    err_console.print(_points_table(points, machine["weight_bytes"]))
    _suggest_both(search, points)
    files = ask and not _no_gguf(search)
    choice = [p for p in points if p.candidate or files]
    chosen, least = goal.best(choice), min(choice, key=lambda p: p.kl)
    if chosen is None and max_kl is not None and not ask:
        discard(search.work)
        raise MoesaicError(f"max_kl {max_kl:g} is out of reach: the least is {least.kl:.2g}.")
    if chosen is None:
        print_words(f"None of these is within {goal}; the one of least KL comes nearest.")
    chosen = chosen or least
    if ask:
        try:
            _choose(search, points, choice, chosen, again)
        except (KeyboardInterrupt, EOFError):
            if not search.work.exists():  # removed when a point was saved
                raise
            _stopped()
        return
    others = (p for p in points if p.type and p.memory <= chosen.memory)
    for better in (p for p in others if 0 < p.kl < chosen.kl):  # 0: a quantised file's own type
        command = _export(model, f"{name}-{better.type}.gguf", better.type)
        print_words(f"The original in {better.type} is no larger, at less KL:\n$ {command}")
        break
    record = save(search, points, chosen, again)
    frontier, quantised = (
        [p.as_json() for p in points if bool(p.type) is b] for b in (False, True)
    )
    found_json = {"machine": machine, "frontier": frontier, "quantised": quantised}
    shared.emit(as_json, {**found_json, **record.output()}, report.terminal(record))


def _stopped() -> NoReturn:
    """Exit with the command that continues an interrupted search."""
    again = shlex.join(["moesaic", *sys.argv[1:]])
    resumed = again if "--resume" in again else f"{again} --resume"
    shared.fail(f"Interrupted; nothing was saved. To continue:\n{resumed}", 130)


def prompt(what: str, default: str, choices: Sequence[str] = ()) -> str:
    """Ask a question, and return the answer."""
    from rich.prompt import Prompt

    from moesaic.progress import err_console

    return Prompt.ask(what, default=default, choices=[*choices] or None, console=err_console)


# --- what there is -------------------------------------------------------------------------------


def _print_model(recipe: Recipe) -> JSON:
    """Print what a model is and whether it fits this machine; return facts about the machine."""
    from moesaic.config import parse_dtype
    from moesaic.io.source import resolve
    from moesaic.metrics.speed import environment, free_bytes
    from moesaic.report.numbers import count, memory
    from moesaic.sizes import Skeleton

    source, machine = resolve(recipe.model), environment(recipe.device)
    built, free = Skeleton.of(source, parse_dtype(recipe.dtype)), free_bytes(recipe.device)
    size = built.size
    routed = [use for use in size.layers if use.experts]
    shape = f"{len(size.layers)} dense layers"
    if routed:
        first = routed[0]
        shape = f"{first.experts} experts in each of {len(routed)} layers, {first.top_k} a token"
    unpacked = ""
    if source.file is not None:
        unpacked = f" unpacked, as in results; the file has {memory(source.nbytes)}"
    fits = "fits as it is" if built.bytes <= ROOM * free else "does not fit"
    device = "no GPU" if machine["device"] == "cpu" else machine["device"]
    print_words(
        f"{recipe.model}: {source.config.model_type}, {shape}; {count(size.total_parameters)} "
        f"parameters, {count(size.active_parameters)} of them a token.\n"
        f"This machine: {machine['processor'] or machine['machine']}, {device}; "
        f"{memory(free)} are free.\nIts weights take {memory(built.bytes)}{unpacked}: it {fits}."
    )
    return {**machine, "free_bytes": free, "weight_bytes": built.bytes}


def _goal(machine: JSON, wanted: Goal, work: Path, resume: bool, ask: bool) -> Goal | None:
    """Return the goal: the given one, the resumed search's, the user's answer, or the default."""
    size, room = machine["weight_bytes"], int(ROOM * machine["free_bytes"])
    if wanted.memory and wanted.memory >= size:
        raise MoesaicError(
            f"This model is within this budget as it is (memory {in_unit(size)}): give a smaller "
            "one."
        )
    if wanted != Goal():
        return wanted
    if resume and (work / GOAL).is_file():
        with reading(work / GOAL, "Remove it, and give the goal again."):
            kept = mapping_of(work / GOAL)
            check_fields(kept, {"memory": int | None, "max_kl": int | float | None})
            goal = Goal(kept["memory"], kept["max_kl"])
            if goal == Goal():
                raise ValueError("it holds no goal")
        print_words(f"Continuing with: {goal}.")
        return goal
    if size > room:
        return Goal(memory=room)
    if not ask:
        return Goal(max_kl=MAX_KL)
    print_words(
        "It can be made smaller. KL measures how differently the result predicts: 0.05 is hardly "
        "noticed, 0.5 is clearly worse."
    )
    while True:
        answer = prompt("Largest KL (0: leave it as it is)", f"{MAX_KL:g}")
        with suppress(ValueError):
            if 0 <= (most := float(answer)) < math.inf:
                return Goal(max_kl=most) if most else None
        print_words(f"{answer!r} is no KL: give 0 or more.")


# --- what came of it -----------------------------------------------------------------------------


def front(search: Search, goal: Goal, size: int) -> list[Candidate]:
    """Return the candidates that no other one beats, and a native one if none of them is."""
    from moesaic.fitting.candidates import pareto_front

    points = search.frontier(goal.budgets(size, search.config.native, search.least()))
    if not any(point.size.native for point in points):
        with suppress(MoesaicError):  # there may be none
            search.config = replace(search.config, native=True)
            search.frontier(goal.budgets(size, native=True, least=search.least()))
        every = pareto_front([c for c in search.tried if c.size.native], "memory")
        within = [c for c in every if not goal.memory or c.size.memory <= goal.memory]
        points += (within or every)[:1]
    return points


def measure(search: Search, candidates: Sequence[Candidate]) -> list[Point]:
    """Measure candidates, and the quantised original, on evaluation text; return them as points."""
    import torch

    from moesaic.config import parse_dtype
    from moesaic.fitting.candidates import figures
    from moesaic.metrics.evaluate import have_room, measured_text, quantised_scores
    from moesaic.metrics.forward import Layerwise
    from moesaic.metrics.score import scores

    source, settings = search.source, search.recipe.evaluation
    assert settings is not None
    place = search.recipe.device, parse_dtype(search.recipe.dtype)
    (tokens, _), reference = measured_text(source, settings), Layerwise(source, *place, keep=True)
    points = []
    for one in search.track(candidates, "Measuring what is shown", len(candidates)):
        with search.trials.open(one) as (run, _):
            score = figures(*scores([run, reference], tokens))
            points.append(Point(one.form, one.size.memory, score, one))
    if have_room((source,), place[0], torch.float32):
        types = search.track(QUANTISED, "Quantising the original", len(QUANTISED))
        for type, ours, theirs in quantised_scores(source, reference, tokens, types, place[0]):
            score = figures(ours, theirs)
            points.append(Point(f"quantised to {type}", int(ours.total_bytes), score, type=type))
    return points


def _points_table(points: Sequence[Point], size: int) -> Table:
    """Return a table of points."""
    from rich.table import Table

    from moesaic.report.numbers import count, memory, share

    table = Table(title="Ways to make it smaller", title_justify="left")
    for column in ("", "what", "native", "weights", "a token uses", "perplexity", "KL"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for n, point in enumerate(points, 1):
        active = count(point.candidate.size.active_parameters) if point.candidate else ""
        native = "GGUF" if point.type else "yes" if point.native else "no"
        loss = f"{point.figures['loss']:+.1%}".replace("%", " %").replace("-0.0 ", "+0.0 ")
        table.add_row(
            str(n), point.form, native, memory(point.memory), active, loss, share(point.kl)
        )
    table.caption = (
        f"The original takes {memory(size)}. Native: other engines load it as it is; the others "
        "need transformers and Moesaic. Figures are of evaluation text."
    )
    return table


def _suggest_both(search: Search, points: Sequence[Point]) -> None:
    """Print a command that removes and quantises weights if quantising only beats all points."""
    from moesaic.exports.llamacpp import lacking

    least = min((p for p in points if p.type), key=lambda p: p.memory, default=None)
    if least is None or lacking(search.source.config):
        return
    if all(p.memory >= least.memory and p.kl >= least.kl for p in points if not p.type):
        types = (word for type in FEW_BITS for word in ("--type", type))
        size = f"{int(BELOW * least.memory / 1000)}KB"
        words = ["moesaic", "fit", search.recipe.model, "OUT", "--memory", size, *types]
        print_words(
            f"The original in {least.type} beats the others. For smaller files, fewer weights in "
            f"fewer bits:\n$ {shlex.join(words)}"
        )


# --- what is made of it --------------------------------------------------------------------------


def _no_gguf(search: Search) -> str:
    """Return why no GGUF file of a model can be written; empty if one can."""
    from moesaic.exports.llamacpp import find_converter, lacking

    try:
        find_converter()
    except MoesaicError as error:
        return str(error)
    lacks = lacking(search.source.config)
    return f"llama.cpp lacks {'; '.join(lacks)}." if lacks else ""


def _export(model: object, file: object, type: str) -> str:
    """Return the command that writes a GGUF file."""
    return shlex.join(["moesaic", "export", str(model), str(file), "--type", type])


def save(search: Search, points: Sequence[Point], chosen: Point, again: JSON) -> Record:
    """Make, measure and save a candidate; print the command that would do it again."""
    from moesaic.fitting.run import make_chosen

    candidate = chosen.candidate
    assert candidate is not None
    command = command_of(replace(search.recipe, steps=candidate.conversions))
    print_notice(f"$ {command}", "dim")
    tried = [p.candidate for p in points if p.candidate]
    quantised = [p.as_json() for p in points if p.type]
    record = make_chosen(search, candidate, tried, **again, quantised=quantised)
    assert record is not None
    shared.print_made(search.recipe.out)
    return record


def _choose(
    search: Search, points: list[Point], choice: list[Point], chosen: Point, again: JSON
) -> None:
    """Ask which points to save, save them, and print commands that use each."""
    from moesaic import report
    from moesaic.progress import console

    model, out = search.recipe.model, search.recipe.out
    numbers = ["0", *(str(points.index(p) + 1) for p in choice)]
    default, made = points.index(chosen) + 1, 0
    if others := [str(n) for n, p in enumerate(points, 1) if p not in choice]:
        print_words(f"{' and '.join(others)} cannot be saved: {_no_gguf(search)}")
    while number := int(prompt("Which one (0: none)", str(default), numbers)):
        point, default = points[number - 1], 0
        try:
            if point.type:
                place = prompt("File", f"{out}-{point.type}.gguf")
                if not place.endswith(".gguf"):
                    place += ".gguf"
                print_notice(f"$ {_export(model, place, point.type)}", "dim")
                shared.app(["export", model, place, "--type", point.type], standalone_mode=False)
            else:
                folder = prompt("Folder", f"{out}-{number}" if made else out)
                place = str(Path(expand_home(folder)))
                search.recipe = replace(search.recipe, out=place)
                console.print(report.terminal(save(search, points, point, again)))
        except MoesaicError as error:
            print_words(f"Not done: {error}")
            continue
        made += 1
        following = [["generate", place, "Your prompt"], ["eval", place, "--against", model]]
        lines = [shlex.join(["moesaic", *words]) for words in following]
        if point.native and not _no_gguf(search):
            lines.append(_export(place, f"{place}-q8_0.gguf", "q8_0"))
        print_notice("\n".join(["What you may do with it:", *lines]))
    discard(search.work)  # nothing is left to continue


def commands() -> None:
    """Register the two commands."""
    names = (field.name for field in fields(FitConfig) if field.name != "confirm")
    run = [given.OVERWRITE, given.RESUME, given.PUSH, given.AS_JSON]
    params = [given.MODEL, given.OUT, *_search_options(*names), *run]
    shared.register("fit", fit, "moesaic fit tiny-moe out --memory 9MB", params)
    help = "The smallest result of at most this KL from the original, such as 0.05."
    most = given.Option("--max-kl", help, metavar="NUMBER", type=given.Number(float))
    help = "The folder to make. Default: MODEL-smaller."
    out = given.Option("--out", help, metavar="FOLDER", type=given.PATH)
    yes = given.Option("--yes -y", "Ask nothing: save the best that meets the goal.")
    memory, native, *common = _search_options("memory", "native")
    run = [given.OVERWRITE, given.RESUME, given.AS_JSON]
    params = [given.MODEL, memory, most, native, out, yes, *common, *run]
    shared.app.guide = shared.Command("MODEL", guide, "moesaic tiny-moe --memory 8MB --yes", params)
