"""``moesaic MODEL``, without a verb: what it is, a search, and what to do with what it finds."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from moesaic.cli.commands import (
    GUIDE,
    app,
    emit,
    fail,
    print_notice,
    pushed,
    register,
    show_page,
)
from moesaic.cli.fitting import search_options, search_recipe
from moesaic.cli.options import (
    AsJson,
    Model,
    Overwrite,
    Resume,
    Value,
    flag_of,
)
from moesaic.config import ROUNDED, Calibration, MethodConfig, about
from moesaic.errors import MoesaicError
from moesaic.fitting.config import FitConfig
from moesaic.io.layout import FOLDER, PAGE
from moesaic.io.outputs import discard, output_lock
from moesaic.methods import methods_of
from moesaic.recipe import Recipe, check_anew, check_run, checked
from moesaic.types import JSON

if TYPE_CHECKING:
    from rich.table import Table

    from moesaic.fitting.candidates import Candidate
    from moesaic.fitting.search import Search
    from moesaic.record import Record

SHARES = (0.8, 0.65, 0.5)
"""Shares of the original that are tried beside a budget."""
LOSS = 0.05
"""The rise of perplexity that a result may have where nobody said anything."""
ROOM = 0.8
"""The share of the free memory that weights may take: running them takes the rest."""
GOALS = ("fits in memory", "smallest within a loss", "fastest")


@dataclass(frozen=True)
class Goal:
    """What matters, and the budgets that are tried for it."""

    kind: str
    """One of :data:`GOALS`."""
    budgets: tuple[FitConfig, ...]
    limit: float
    """Bytes, or the rise of perplexity."""

    @property
    def size(self) -> str:
        """What is to become smaller."""
        return "active_parameters" if self.kind == GOALS[2] else "memory"

    def best(self, points: Sequence[Candidate]) -> int:
        """The number of the point that meets the goal best, from 1; 0 where none does."""
        from moesaic.fitting.candidates import plainest

        if self.kind == GOALS[0]:
            best = plainest(c for c in points if c.weight.memory <= self.limit)
        else:
            within = (c for c in points if c.loss <= self.limit)
            best = min(within, key=lambda c: getattr(c.weight, self.size), default=None)
        return 0 if best is None else points.index(best) + 1


def guide(
    model: Model,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The folder to make. Default: MODEL-smaller."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: save the best that fits.")
    ] = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
    **options: Value,
) -> None:
    """Look at a model and this machine, search, show what is possible, and save what you pick."""
    name = Path(model).expanduser().resolve().name.removesuffix(".gguf")
    folder = out or Path(f"{name}-smaller")
    recipe = search_recipe(model, folder, options, baselines=ROUNDED)
    native = bool(options.pop("native", False))
    config = checked(FitConfig, options, "") if options else None
    if config is not None and config.memory is not None and config.max_loss is not None:
        raise MoesaicError("memory and max_loss are two goals: give one; moesaic fit takes both.")
    check_run(recipe, overwrite=overwrite, resume=resume)  # before anything slow is imported
    check_anew(recipe, overwrite=overwrite, resume=resume)
    from moesaic.bars import bars, err_console
    from moesaic.fitting.run import opened

    ask = not yes and not as_json and sys.stdin.isatty()
    situation = look(recipe)
    for line in situation.lines:
        err_console.print(line, markup=False, highlight=False)
    goal = _goal(situation, config, native, ask)
    asks_again = partial(_goal, situation, None, native, ask) if ask and config is None else None
    with output_lock(folder):
        search = opened(
            recipe,
            goal.budgets[0],
            overwrite=overwrite,
            resume=resume,
            track=bars,
            tell=print_notice,
        )
        goal, points = explored(search, goal, asks_again)
        rounding = search.trials.baselines() if goal.size == "memory" else []
    err_console.print(drawn(points, rounding, situation))
    if advice := better_rounded(points, rounding):
        err_console.print(advice)
    chosen = goal.best(points)
    if not chosen and config is not None and not ask:
        discard(search.work)
        least = min(c.loss for c in points)
        raise MoesaicError(
            f"max_loss {goal.limit:g} is out of reach: the best of these loses {least:.2g}."
        )
    if not chosen:
        err_console.print(f"None loses as little as {goal.limit:.0%}; 1 loses least.")
        chosen = 1
    session = Session(search, points, rounding, recipe.out, overwrite, resume)
    if ask:
        try:
            session.menu(chosen)
        except (KeyboardInterrupt, EOFError):
            if not search.work.exists():  # what it had tried went when a point was saved
                raise
            _stopped()
        return
    record = session.save(chosen, folder)
    from moesaic import report

    emit(
        as_json,
        {
            "machine": situation.machine,
            "frontier": [one.as_json() for one in points],
            "rounding": rounding,
            **record.output(),
        },
        report.terminal(record),
    )


def explored(
    search: Search, goal: Goal, asks_again: Callable[[], Goal] | None
) -> tuple[Goal, list[Candidate]]:
    """What a search finds for a goal, and the goal, which is asked for again where it cannot be.

    Args:
        search: of the model.
        goal: what matters.
        asks_again: asks what matters; None where nobody is asked.

    Raises:
        MoesaicError: nothing meets it.
    """
    from moesaic.bars import err_console

    while True:
        try:
            search.config = goal.budgets[0]
            return goal, search.frontier(goal.budgets)
        except MoesaicError as error:
            message = str(error)
            if goal.kind != GOALS[0] and "out of reach" in message:  # nobody asked for that number
                message = f"This looks for at least {1 - SHARES[0]:.0%} less, but {message}"
            if asks_again is None:
                discard(search.work)
                raise MoesaicError(message) from error
            err_console.print(f"Not possible: {message}", style="yellow")
            goal = asks_again()
        except KeyboardInterrupt:
            _stopped()


def _stopped() -> NoReturn:
    """Say how a search that was interrupted goes on."""
    again = shlex.join(["moesaic", *sys.argv[1:]])
    resumed = again if "--resume" in again else f"{again} --resume"
    fail(f"Interrupted; nothing was saved. To go on: {resumed}", 130)


# --- what there is -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """A model on a machine."""

    lines: tuple[str, ...]
    """In words."""
    bytes: int
    """Of the model's weights."""
    active: int
    """Parameters that a token uses."""
    free: int
    """Bytes of memory that nothing holds."""
    machine: JSON


def look(recipe: Recipe) -> Situation:
    """Read the model's headers and ask the machine."""
    import torch

    from moesaic.config import parse_dtype
    from moesaic.estimates import Built
    from moesaic.io.source import resolve
    from moesaic.metrics.machine import environment, free_bytes
    from moesaic.report.numbers import count, memory

    source = resolve(recipe.model)
    built = Built(source.config, parse_dtype(recipe.dtype))
    size, free = built.size, free_bytes(recipe.device)
    routed = [use for use in size.layers if use.experts]
    shape = f"{len(size.layers)} dense layers"
    if routed:
        first = routed[0]
        shape = (
            f"{first.experts} experts in each of {len(routed)} layers, of which a token runs "
            f"{first.top_k}"
        )
    fits = "fits" if built.bytes <= ROOM * free else "does not fit"
    machine = environment(recipe.device)
    number = torch.cuda.device_count()
    name = machine["processor"] or machine["machine"]
    accelerator = f"{number or 'no'} accelerator{'s' if number > 1 else ''}"
    threads = f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}"
    lines = (
        f"{recipe.model}: {source.config.model_type}, {shape}; {count(size.total_parameters)} "
        f"parameters, {count(size.active_parameters)} of them a token.",
        f"This machine: {name}, {threads}, {accelerator}; {memory(free)} are free.",
        f"Its weights take {memory(built.bytes)}: that {fits}.",
    )
    facts = {**machine, "free_bytes": free, "weight_bytes": built.bytes}
    return Situation(lines, built.bytes, size.active_parameters, free, facts)


def _goal(situation: Situation, config: FitConfig | None, native: bool, ask: bool) -> Goal:
    """What matters: given, asked for, or by default what memory there is."""
    kind, limit = GOALS[1], LOSS
    if config is not None and config.memory is not None:
        kind, limit = GOALS[0], float(config.memory)
    elif config is not None and config.max_loss is not None:
        limit = config.max_loss
    elif situation.bytes > ROOM * situation.free:
        kind, limit = GOALS[0], ROOM * situation.free
    elif ask:
        kind, limit = _asked_goal(situation)
    return Goal(kind, tuple(_budgets(situation, kind, limit, native)), limit)


def _asked_goal(situation: Situation) -> tuple[str, float]:
    from rich.prompt import IntPrompt, Prompt

    from moesaic.bars import err_console
    from moesaic.config import parse_bytes
    from moesaic.report.numbers import memory

    listed = "  ".join(f"{n} {goal}" for n, goal in enumerate(GOALS, 1))
    question = f"What matters?  {listed}\n"
    which = IntPrompt.ask(question, choices=["1", "2", "3"], default=1, console=err_console)
    if which == 1:
        default = memory(min(situation.free * ROOM, situation.bytes / 2))
        while True:
            default = default.replace("\u00a0", "").replace(",", "")
            answer = Prompt.ask("The weights may take", default=default, console=err_console)
            try:
                return GOALS[0], float(parse_bytes(answer))
            except MoesaicError as error:
                err_console.print(str(error), style="yellow")
    return GOALS[which - 1], LOSS


def _budgets(situation: Situation, kind: str, limit: float, native: bool) -> list[FitConfig]:
    """The limit itself, where it is a size, and shares below it."""
    if kind == GOALS[2]:
        return [
            FitConfig(active_parameters=int(share * situation.active), native=native, confirm=1)
            for share in SHARES
        ]
    sizes = [share * situation.bytes for share in SHARES]
    if kind == GOALS[0] and limit < situation.bytes:
        sizes = [limit, *(size for size in sizes if size < 0.95 * limit)]
    return [FitConfig(memory=int(size), native=native, confirm=1) for size in sizes]


# --- what came of it -----------------------------------------------------------------------------


def drawn(points: Sequence[Candidate], rounding: Sequence[JSON], situation: Situation) -> Table:
    """Return the frontier as a table."""
    from moesaic.report.numbers import memory

    table = _table(points, rounding)
    original = memory(situation.bytes)
    table.caption = f"The original takes {original}."
    table.caption += " · is rounding alone, as llama.cpp's files are." if rounding else ""
    return table


def _table(points: Sequence[Candidate], rounding: Sequence[JSON]) -> Table:
    from rich.table import Table

    from moesaic.report.numbers import count, memory, share

    table = Table(title="What no other candidate beats", title_justify="left")
    for column in ("", "what", "native", "weights", "a token uses", "perplexity", "KL"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for n, point in enumerate(points, 1):
        table.add_row(
            str(n),
            point.form,
            "yes" if point.weight.native else "no",
            memory(point.weight.memory),
            count(point.weight.active_parameters),
            _signed(point.loss),
            share(point.kl),
        )
    for baseline in rounding:
        figures = (memory(baseline["memory"]), "", _signed(baseline["loss"]), share(baseline["kl"]))
        table.add_row("·", baseline["form"], "GGUF", *figures, style="dim")
    return table


def _signed(share: float) -> str:
    """A change in percent.

    >>> _signed(0.0512), _signed(-0.0001)
    ('+5.1 %', '0.0 %')
    """
    return f"{share:+.1%}".replace("%", " %").replace("-0.0", "0.0").replace("+0.0", "0.0")


def better_rounded(points: Sequence[Candidate], rounding: Sequence[JSON]) -> str:
    """A sentence where rounding alone is as small as what was found, and loses less."""
    ahead = [
        baseline
        for baseline in rounding
        if (as_large := [c.kl for c in points if c.weight.memory >= baseline["memory"]])
        and baseline["kl"] < min(as_large)
    ]
    if not ahead:
        return ""
    type = ahead[-1]["form"].rpartition(" ")[2]
    return (
        f"Rounding alone to {type} loses less than all of these that are as large: where llama.cpp "
        f"is to run it, take that (moesaic export MODEL FILE.gguf --to gguf --type {type}). What "
        "is listed here is for engines that read safetensors, and can be rounded as well."
    )


def command_of(recipe: Recipe) -> str:
    """The command that carries a recipe of one step out again."""
    (step,) = recipe.steps
    words = ["moesaic", step.verb, recipe.model, recipe.out]
    words += ["--method", step.name] if len(methods_of(step.verb)) > 1 else []
    words += [*_flags(step), *_flags(recipe.calibration)]
    for name in ("device", "dtype"):
        value = getattr(recipe, name)
        words += [f"--{name}", value] if value != getattr(Recipe, name) else []
    return shlex.join(words)


def _flags(config: MethodConfig | Calibration) -> list[str]:
    """Options that are not as by default."""
    words: list[str] = []
    for entry in fields(config):
        value = getattr(config, entry.name)
        if value == entry.default and entry.name != "keep":
            continue
        on, _, off = flag_of(entry).partition("/")
        if about(entry).seldom:
            written = str(value).lower() if value in (True, False) else value
            words += ["-o", f"{entry.name}={written}"]
        elif value is True or value is False:
            words.append(on if value else off or f"--no-{on.removeprefix('--')}")
        else:
            words += [on, str(value)]
    return words


# --- what to do with it --------------------------------------------------------------------------


@dataclass
class Session:
    """What came of a search, and what a user makes of it."""

    search: Search
    points: Sequence[Candidate]
    rounding: Sequence[JSON]
    out: str
    """The folder that was asked for."""
    overwrite: bool
    resume: bool
    saved: dict[int, Path] = field(default_factory=dict)
    """Folders of what was saved, by the point's number."""

    def save(self, number: int, folder: Path) -> Record:
        """Make, measure and save a point; says the command that would do it again."""
        from moesaic.bars import err_console
        from moesaic.fitting.run import carried_out

        chosen = self.points[number - 1]
        self.search.recipe = replace(self.search.recipe, out=str(folder))
        err_console.print(
            f"$ {command_of(replace(self.search.recipe, steps=chosen.converted))}",
            markup=False, soft_wrap=True, style="dim",
        )  # fmt: skip
        record = carried_out(
            self.search,
            chosen,
            self.points,
            overwrite=self.overwrite,
            resume=self.resume,
            rounding=[*self.rounding],
        )
        assert record is not None
        self.saved[number] = folder
        err_console.print(
            f"Checkpoint in {folder}, report in {folder / FOLDER / PAGE}", soft_wrap=True
        )
        return record

    def menu(self, number: int) -> None:
        """Ask what to do with a point until nothing more is wanted."""
        from rich.prompt import IntPrompt, Prompt

        from moesaic.bars import err_console

        choices = [str(n) for n in range(1, len(self.points) + 1)]
        number = IntPrompt.ask("Which one", choices=choices, default=number, console=err_console)
        does: dict[str, tuple[str, Callable[[int], None]]] = {
            "s": ("save", self._save),
            "g": ("write GGUF", self._gguf),
            "t": ("try it", self._try),
            "e": ("evaluate", self._evaluate),
            "o": ("open the page", self._open),
            "u": ("upload", self._push),
        }
        actions = "  ".join(f"[{key}] {name}" for key, (name, _) in does.items())
        while True:
            err_console.print(f"\n{number}: {actions}  [p] another point  [q] quit")
            key = Prompt.ask("Then", choices=[*does, "p", "q"], default="s", console=err_console)
            if key == "q":
                discard(self.search.work)  # there is nothing to go on with
                return
            if key == "p":
                number = IntPrompt.ask("Which one", choices=choices, console=err_console)
                continue
            try:
                does[key][1](number)
            except MoesaicError as error:
                err_console.print(f"Not done: {error}", style="yellow")

    def _folder(self, number: int) -> Path:
        """The folder of a point, which is saved first where it was not."""
        if number not in self.saved:
            self._save(number)
        return self.saved[number]

    def _save(self, number: int) -> None:
        from moesaic import report
        from moesaic.bars import console

        default = f"{self.out}-{number}" if self.saved else self.out
        folder = Path(self._asked("Folder", default)).expanduser()
        console.print(report.terminal(self.save(number, folder)))

    def _gguf(self, number: int) -> None:
        from moesaic.exports.llamacpp import find_converter

        find_converter()  # or says how to get it
        type = self._asked("Type", "q8_0")
        folder = self._folder(number)
        file = folder.with_name(f"{folder.name}-{type}.gguf")
        self._does("export", folder, file, "--to", "gguf", "--type", type)

    def _try(self, number: int) -> None:
        from rich.table import Table

        from moesaic.bars import console
        from moesaic.io.source import resolve
        from moesaic.metrics.generations import generate

        folder, source = self._folder(number), self.search.source
        models = {"original": source.load(), "result": resolve(str(folder)).load()}
        asked = {
            "tokenizer": source.tokenizer,
            "chat": bool(getattr(source.tokenizer, "chat_template", None)),
        }
        while True:
            if not (prompt := self._asked("Prompt (empty: back)", "")):
                return
            table = Table(expand=True)
            texts = []
            for name, model in models.items():
                table.add_column(name, ratio=1)
                texts.append(generate(model, prompt, **asked))
            table.add_row(*texts)
            console.print(table)

    def _evaluate(self, number: int) -> None:
        folder, tasks = self._folder(number), self._asked("Tasks, with commas (empty: text)", "")
        options = ["--tasks", tasks] if tasks else []
        self._does("eval", folder, "--against", self.search.recipe.model, *options)

    def _does(self, *words: object) -> None:
        """Say a command, and carry it out."""
        from moesaic.bars import err_console

        arguments = [str(word) for word in words]
        err_console.print(f"$ {shlex.join(['moesaic', *arguments])}", style="dim", soft_wrap=True)
        with suppress(SystemExit):  # one that was interrupted, which it has said
            app(arguments, standalone_mode=False)

    def _asked(self, what: str, default: str) -> str:
        from rich.prompt import Prompt

        from moesaic.bars import err_console

        return Prompt.ask(what, default=default, console=err_console)

    def _open(self, number: int) -> None:
        show_page(self._folder(number) / FOLDER / PAGE)

    def _push(self, number: int) -> None:
        if not (repo := self._asked("Repository, such as you/name (empty: back)", "")):
            return
        pushed(str(self._folder(number)), repo)


def commands() -> None:
    """Make the command."""
    every = search_options("memory", "max_loss", "native")
    register(GUIDE, guide, "moesaic tiny-moe --memory 8MB --yes", every, hidden=True)
