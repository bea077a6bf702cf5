"""``moesaic MODEL``, without a verb: whether it fits, a search, and what to do with what it finds."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from moesaic.cli.commands import (
    Command,
    app,
    emit,
    fail,
    print_notice,
    print_start,
    print_words,
    pushed,
    show_page,
)
from moesaic.cli.fitting import search_options, search_recipe
from moesaic.cli.options import AS_JSON, MODEL, OVERWRITE, PATH, RESUME, Option, command_of
from moesaic.config import ROUNDED, GgufType, in_unit
from moesaic.errors import MoesaicError
from moesaic.fitting.config import FitConfig
from moesaic.io.headers import mapping_of
from moesaic.io.layout import FOLDER, PAGE
from moesaic.io.outputs import discard, output_lock, searched
from moesaic.recipe import Recipe, check_anew, check_run, checked
from moesaic.types import JSON

if TYPE_CHECKING:
    from rich.table import Table

    from moesaic.fitting.candidates import Candidate
    from moesaic.fitting.search import Search
    from moesaic.record import Record

SHARES = (0.8, 0.65, 0.5)
"""Shares of the original's bytes that are tried, beside a budget."""
MAX_KL = 0.05
"""The KL that a result may have where nobody said anything: hardly noticed."""
ROOM = 0.8
"""The share of the free memory that weights may take: running them takes the rest."""
QUANTISED = tuple(type for type in ROUNDED if type in get_args(GgufType))
"""Types that the original is measured in, and that it can be written in."""
GOAL = "goal.json"


@dataclass(frozen=True)
class Goal:
    """Bytes that the weights may take, or the KL that a result may have."""

    memory: int | None = None
    max_kl: float | None = None

    def __str__(self) -> str:
        return in_unit(self.memory) if self.memory else f"a KL of at most {self.max_kl:g}"

    def budgets(self, size: int, native: bool = False) -> list[FitConfig]:
        """Return the budgets to try, falling, for a model of ``size`` bytes."""
        sizes = [share * size for share in SHARES]
        if self.memory:
            sizes = [self.memory, *(s for s in sizes if s < 0.95 * self.memory)]
        return [FitConfig(memory=int(s), native=native, confirm=1) for s in sizes]

    def met(self, point: Point) -> bool:
        """Return whether a point meets it."""
        limit = self.memory or self.max_kl or 0.0
        return (point.memory if self.memory else point.kl) <= limit

    def best(self, points: Sequence[Point]) -> int:
        """Return the number, from 1, of the point that meets it best; 0 where none does."""
        key = (lambda p: p.kl) if self.memory else (lambda p: float(p.memory))
        best = min(filter(self.met, points), key=key, default=None)
        return 0 if best is None else points.index(best) + 1


@dataclass(frozen=True)
class Point:
    """A result that can be had, with the figures that it has on evaluation text."""

    form: str
    memory: int
    figures: JSON
    candidate: Candidate | None = None
    """None of the original quantised alone."""
    type: str = ""
    """The GGUF type of the latter."""

    @property
    def kl(self) -> float:
        """Nats a token."""
        return float(self.figures["kl"])

    @property
    def native(self) -> bool:
        """True of a checkpoint that engines load as it is."""
        return self.candidate is not None and self.candidate.weight.native

    def as_json(self) -> JSON:
        """Return form, bytes and figures; of a candidate its steps, too."""
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
    name = Path(model).expanduser().resolve().name.removesuffix(".gguf")
    folder = out or Path(f"{name}-smaller")
    recipe = search_recipe(model, folder, options, baselines=ROUNDED)
    config = checked(FitConfig, {"memory": 1, **options}, "")
    given = Goal(config.memory if "memory" in options else None, max_kl)
    if given.memory and max_kl is not None:
        raise MoesaicError("memory and max_kl are two goals: give one.")
    if max_kl is not None and not max_kl > 0:
        raise MoesaicError(f"max_kl {max_kl:g} must be above 0.")
    check_run(recipe, overwrite=overwrite, resume=resume)  # before anything slow is imported
    check_anew(recipe, overwrite=overwrite, resume=resume)
    print_start(model)
    from moesaic.bars import bars, err_console
    from moesaic.fitting.run import opened

    ask = not yes and not as_json and sys.stdin.isatty()
    situation = look(recipe)
    for line in situation.lines:
        print_words(line)
    goal = _goal(situation, given, searched(recipe.out), resume, ask)
    if goal is None:
        return
    again = {"overwrite": overwrite, "resume": resume}
    with output_lock(folder):
        budgets = goal.budgets(situation.bytes, config.native)
        search = opened(recipe, budgets[0], **again, track=bars, tell=print_notice)
        (search.work / GOAL).write_text(json.dumps(asdict(goal)), "utf-8")
        try:
            points = measured(search, found(search, goal, budgets, situation.bytes))
        except MoesaicError:
            discard(search.work)
            raise
        except KeyboardInterrupt:
            _stopped()
    err_console.print(drawn(points, situation.bytes))
    session = Session(search, points, recipe.out, overwrite, resume)
    choice = [p for p in points if p.candidate or (ask and session.writes_gguf)]
    chosen = goal.best(choice)
    if not chosen and max_kl is not None and not ask:
        discard(search.work)
        least = min(p.kl for p in choice)
        raise MoesaicError(f"max_kl {goal.max_kl:g} is out of reach: the least is {least:.2g}.")
    if not chosen:
        print_words(f"None of these is within {goal}; the one of least KL comes nearest.")
        chosen = choice.index(min(choice, key=lambda p: p.kl)) + 1
    number = points.index(choice[chosen - 1]) + 1
    if ask:
        try:
            session.menu(number)
        except (KeyboardInterrupt, EOFError):
            if not search.work.exists():  # removed when a point was saved
                raise
            _stopped()
        return
    if advice := quantised_better(points, number, model, name):
        print_words(advice)
    record = session.save(number, folder)
    from moesaic import report

    frontier, rounding = ([p.as_json() for p in points if bool(p.type) == b] for b in (False, True))
    found_json = {"machine": situation.machine, "frontier": frontier, "rounding": rounding}
    emit(as_json, {**found_json, **record.output()}, report.terminal(record))


def _stopped() -> NoReturn:
    """Print how a search that was interrupted goes on."""
    again = shlex.join(["moesaic", *sys.argv[1:]])
    resumed = again if "--resume" in again else f"{again} --resume"
    fail(f"Interrupted; nothing was saved. To go on:\n{resumed}", 130)


# --- what there is -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """A model on a machine."""

    lines: tuple[str, ...]
    """In words."""
    bytes: int
    """Of the model's weights."""
    free: int
    """Bytes of memory that nothing holds."""
    machine: JSON

    @property
    def fits(self) -> bool:
        """True if the model runs here as it is."""
        return self.bytes <= ROOM * self.free


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
        shape = f"{first.experts} experts in each of {len(routed)} layers, {first.top_k} a token"
    machine = environment(recipe.device)
    number = torch.cuda.device_count()
    name = machine["processor"] or machine["machine"]
    accelerator = f"{number or 'no'} accelerator{'s' if number > 1 else ''}"
    threads = f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}"
    fits = "fits as it is" if built.bytes <= ROOM * free else "does not fit"
    lines = (
        f"{recipe.model}: {source.config.model_type}, {shape}; {count(size.total_parameters)} "
        f"parameters, {count(size.active_parameters)} of them a token.",
        f"This machine: {name}, {threads}, {accelerator}; {memory(free)} are free.",
        f"Its weights take {memory(built.bytes)}: it {fits}.",
    )
    facts = {**machine, "free_bytes": free, "weight_bytes": built.bytes}
    return Situation(lines, built.bytes, free, facts)


def _goal(situation: Situation, given: Goal, work: Path, resume: bool, ask: bool) -> Goal | None:
    """Return the goal: given, of the search that is resumed, asked for, or by default."""
    if given.memory and given.memory >= situation.bytes:
        raise MoesaicError(
            f"The model is within this budget as it is (memory {in_unit(situation.bytes)}): give "
            "a smaller one."
        )
    if given != Goal():
        return given
    if resume and (work / GOAL).is_file():
        goal = Goal(**mapping_of(work / GOAL))
        print_words(f"Going on with: {goal}.")
        return goal
    if not situation.fits:
        return Goal(memory=int(ROOM * situation.free))
    if not ask:
        return Goal(max_kl=MAX_KL)
    print_words(
        "It can be made smaller. KL says how differently the result predicts: 0.05 is hardly "
        "noticed, 0.5 is clearly worse."
    )
    while True:
        answer = asked("Largest KL (0: leave it as it is)", f"{MAX_KL:g}")
        with suppress(ValueError):
            return Goal(max_kl=float(answer)) if float(answer) > 0 else None
        print_words(f"{answer!r} is not a number.")


def asked(what: str, default: str) -> str:
    """Ask a question, and return the answer."""
    from rich.prompt import Prompt

    from moesaic.bars import err_console

    return Prompt.ask(what, default=default, console=err_console)


# --- what came of it -----------------------------------------------------------------------------


def found(search: Search, goal: Goal, budgets: Sequence[FitConfig], size: int) -> list[Candidate]:
    """Return the candidates that no other one beats, among them one that engines load as it is."""
    from moesaic.fitting.candidates import unbeaten

    points = search.frontier(budgets)
    if not any(point.weight.native for point in points):
        with suppress(MoesaicError):  # there may be none
            natives = goal.budgets(size, native=True)
            search.config = natives[0]
            search.frontier(natives)
        every = unbeaten([c for c in search.tried if c.weight.native], "memory")
        within = [c for c in every if not goal.memory or c.weight.memory <= goal.memory]
        points += (within or every)[:1]
    return points


def measured(search: Search, candidates: Sequence[Candidate]) -> list[Point]:
    """Return points with their figures on evaluation text, as results that are saved have them."""
    import torch

    from moesaic.config import parse_dtype
    from moesaic.data.text import evaluation_tokens
    from moesaic.fitting.candidates import figures
    from moesaic.io.outputs import remove
    from moesaic.io.source import Source
    from moesaic.metrics.evaluate import have_room
    from moesaic.metrics.forward import Layerwise
    from moesaic.metrics.rounding import rounded_scores
    from moesaic.metrics.score import scores

    source, settings, device = search.source, search.recipe.evaluation, search.recipe.device
    assert settings is not None
    dtype = parse_dtype(search.recipe.dtype)
    text = settings.data, source.tokenizer, settings.length, settings.max_tokens, source.config
    tokens, reference = evaluation_tokens(*text), Layerwise(source, device, dtype, keep=True)
    points = []
    for one in search.track(candidates, "Measuring what is shown", len(candidates)):
        folder = search.trials.result(one.converted)
        assert folder is not None
        run = Layerwise(Source("candidate", folder), device, dtype)
        score = figures(*scores([run, reference], tokens))
        points.append(Point(one.form, one.weight.memory, score, one))
        remove(folder)
    if have_room((source,), device, torch.float32):
        types = search.track(QUANTISED, "Quantising alone", len(QUANTISED))
        for type, ours, theirs in rounded_scores(source, reference, tokens, types, device):
            assert ours.total_bytes is not None
            score = figures(ours, theirs)
            points.append(Point(f"quantised to {type}", ours.total_bytes, score, type=type))
    return points


def drawn(points: Sequence[Point], size: int) -> Table:
    """Return the points as a table."""
    from rich.table import Table

    from moesaic.report.numbers import count, memory, share

    table = Table(title="What no other candidate beats", title_justify="left")
    for column in ("", "what", "native", "weights", "a token uses", "perplexity", "KL"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for n, point in enumerate(points, 1):
        weight = point.candidate.weight if point.candidate else None
        table.add_row(
            str(n),
            point.form,
            "GGUF" if weight is None else "yes" if point.native else "no",
            memory(point.memory),
            "" if weight is None else count(weight.active_parameters),
            _signed(point.figures["loss"]),
            share(point.kl),
        )
    table.caption = (
        f"The original takes {memory(size)}. Native: other engines load it as it is; the others "
        "need transformers and Moesaic. Figures are of evaluation text."
    )
    return table


def _signed(share: float) -> str:
    """Return a change in percent.

    >>> _signed(0.0512), _signed(-0.0001)
    ('+5.1 %', '0.0 %')
    """
    return f"{share:+.1%}".replace("%", " %").replace("-0.0", "0.0").replace("+0.0", "0.0")


def quantised_better(points: Sequence[Point], number: int, model: str, name: str) -> str:
    """Return a sentence where the original quantised alone is as small as a point, at less KL."""
    point = points[number - 1]
    ahead = [p for p in points if p.type and p.memory <= point.memory and p.kl < point.kl]
    if not ahead:
        return ""
    type = min(ahead, key=lambda p: p.kl).type
    command = shlex.join(["moesaic", "export", model, f"{name}-{type}.gguf", "--type", type])
    return f"{type} alone has less KL at no more bytes. If llama.cpp is to run it: {command}"


# --- what to do with it --------------------------------------------------------------------------


@dataclass
class Session:
    """What came of a search, and what a user makes of it."""

    search: Search
    points: Sequence[Point]
    out: str
    """The folder that was asked for."""
    overwrite: bool
    resume: bool
    saved: dict[int, Path] = field(default_factory=dict)
    """Folders and files of what was saved, by the point's number."""

    @property
    def writes_gguf(self) -> bool:
        """True if llama.cpp's converter is here, and knows the model."""
        from moesaic.exports.gguf_limits import lacking
        from moesaic.exports.llamacpp import find_converter

        with suppress(MoesaicError):
            return bool(find_converter()) and not lacking(self.search.source.config)
        return False

    def save(self, number: int, folder: Path) -> Record:
        """Make, measure and save a point; print the command that would do it again."""
        from moesaic.fitting.run import carried_out

        chosen = self.points[number - 1].candidate
        assert chosen is not None
        self.search.recipe = replace(self.search.recipe, out=str(folder))
        again = command_of(replace(self.search.recipe, steps=chosen.converted))
        print_notice(f"$ {again}", "dim")
        record = carried_out(
            self.search,
            chosen,
            [p.candidate for p in self.points if p.candidate],
            overwrite=self.overwrite,
            resume=self.resume,
            rounding=[p.as_json() for p in self.points if p.type],
        )
        assert record is not None
        self.saved[number] = folder
        print_notice(f"Checkpoint in {folder}")
        print_notice(f"Report in {folder / FOLDER / PAGE}")
        return record

    def menu(self, number: int) -> None:
        """Ask what to do with a point until nothing more is wanted."""
        from rich.prompt import IntPrompt, Prompt

        from moesaic.bars import err_console

        gguf = self.writes_gguf
        choices = [str(n) for n, p in enumerate(self.points, 1) if gguf or not p.type]
        number = IntPrompt.ask("Which one", choices=choices, default=number, console=err_console)
        while True:
            does = self.actions(number, gguf)
            listed = "  ".join(f"[{key}] {name}" for key, name in does.items())
            print_words(f"\n{number}: {listed}  [p] another point  [q] quit")
            key = Prompt.ask("Then", choices=[*does, "p", "q"], default=next(iter(does)),
                             console=err_console)  # fmt: skip
            if key == "q":
                discard(self.search.work)  # there is nothing to go on with
                return
            if key == "p":
                number = IntPrompt.ask("Which one", choices=choices, console=err_console)
                continue
            try:
                getattr(self, f"_{does[key].split()[0]}")(number)
            except MoesaicError as error:
                print_words(f"Not done: {error}")

    def actions(self, number: int, gguf: bool) -> dict[str, str]:
        """Return what can be done with a point, by its key."""
        from huggingface_hub import constants, get_token

        point, saved = self.points[number - 1], number in self.saved
        offered = {
            "s": ("save", not saved),
            "t": ("try it", True),
            "e": ("evaluate", True),
            "g": ("gguf file", gguf and point.native),
            "o": ("open the page", saved and not point.type),
            "u": ("upload", not point.type and get_token() and not constants.HF_HUB_OFFLINE),
        }
        return {key: name for key, (name, works) in offered.items() if works}

    def _folder(self, number: int) -> Path:
        """Return the folder or file of a point, which is saved first where it was not."""
        if number not in self.saved:
            self._save(number)
        return self.saved[number]

    def _save(self, number: int) -> None:
        from moesaic import report
        from moesaic.bars import console

        type, default = self.points[number - 1].type, f"{self.out}-{number}"
        if type:
            file = Path(asked("File", f"{self.out}-{type}.gguf")).expanduser()
            if self._does("export", self.search.recipe.model, file, "--type", type):
                self.saved[number] = file
            return
        folder = Path(asked("Folder", default if self.saved else self.out)).expanduser()
        console.print(report.terminal(self.save(number, folder)))

    def _gguf(self, number: int) -> None:
        type, folder = asked("Type", "q8_0"), self._folder(number)
        file = folder.with_name(f"{folder.name}-{type}.gguf")
        self._does("export", folder, file, "--type", type)

    def _try(self, number: int) -> None:
        from rich.table import Table

        from moesaic.bars import console
        from moesaic.io.source import resolve
        from moesaic.metrics.generations import generate

        folder, source = self._folder(number), self.search.source
        models = {"original": source.load(), "result": resolve(str(folder)).load()}
        tokenizer = source.tokenizer
        chat = bool(getattr(tokenizer, "chat_template", None))
        while prompt := asked("Prompt (empty: back)", ""):
            table = Table(*models, expand=True)
            texts = [generate(m, prompt, tokenizer=tokenizer, chat=chat) for m in models.values()]
            table.add_row(*texts)
            console.print(table)

    def _evaluate(self, number: int) -> None:
        folder, tasks = self._folder(number), asked("Tasks, with commas (empty: text)", "")
        options = ["--tasks", tasks] if tasks else []
        self._does("eval", folder, "--against", self.search.recipe.model, *options)

    def _does(self, *words: object) -> bool:
        """Print a command, and carry it out; return whether it came to its end."""
        arguments = [str(word) for word in words]
        print_notice(f"$ {shlex.join(['moesaic', *arguments])}", "dim")
        with suppress(SystemExit):  # one that was interrupted, which it has said
            app(arguments, standalone_mode=False)
            return True
        return False

    def _open(self, number: int) -> None:
        show_page(self._folder(number) / FOLDER / PAGE)

    def _upload(self, number: int) -> None:
        if repo := asked("Repository, such as you/name (empty: back)", ""):
            pushed(str(self._folder(number)), repo)


def commands() -> None:
    """Make the command."""
    most = Option("--max-kl", "The smallest result of at most this KL from the original, such as "
                  "0.05.", metavar="NUMBER", type=float)  # fmt: skip
    out = Option(
        "--out", "The folder to make. Default: MODEL-smaller.", metavar="FOLDER", type=PATH
    )
    yes = Option("--yes -y", "Ask nothing: save the best that meets the goal.")
    memory, native, *common = search_options("memory", "native")
    params = [MODEL, memory, most, native, out, yes, *common, OVERWRITE, RESUME, AS_JSON]
    app.guide = Command("MODEL", guide, "moesaic tiny-moe --memory 8MB --yes", params)
