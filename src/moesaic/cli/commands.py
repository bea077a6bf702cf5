"""What the commands share: how they are registered, and how they show what came of a run."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from moesaic.cli.options import Option, Value, in_flags
from moesaic.errors import MoesaicError, bounded, meant
from moesaic.io.layout import FOLDER, PAGE
from moesaic.io.names import MODELS, NAMES, check_repository, names_model
from moesaic.io.outputs import resumable, searched, unfinished
from moesaic.recipe import Recipe, check_run
from moesaic.types import JSON, Values

if TYPE_CHECKING:
    from rich.table import Table
    from typer._click import Command, Context, HelpFormatter

    from moesaic.record import Record

HELP, ALL = ["-h", "--help"], "--help-all"
RUNS = ("dry_run", "overwrite", "resume", "push", "as_json")
"""Options of every verb that are about the run; a brief help names them in a line."""
LAST = (*RUNS, "evaluate")
"""Parameters of a command that follow the options made from dataclasses; its others lead."""

GUIDE = "guide"
"""The command behind ``moesaic MODEL``, without a verb."""


class Guided(TyperGroup):
    """Commands; a model in a command's place is looked at, and asked about."""

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        """The command that words are of, its name, and its own words."""
        word = args[0]
        if word == "help":
            named = [name for name in args[1:2] if name in self.commands]
            if named:
                return named[0], self.commands[named[0]], ["--help"]
            typer.echo(ctx.get_help())
            ctx.exit()
        if word not in self.commands and names_model(word):
            return GUIDE, self.commands[GUIDE], args
        if word not in self.commands and not word.startswith("-"):
            commands = [name for name, command in self.commands.items() if not command.hidden]
            hint = meant(word, [*commands, *NAMES])
            raise MoesaicError(
                f"No such command: {word}.{hint} Commands: {', '.join(commands)} (moesaic --help "
                f"describes them). Models by name: {MODELS}."
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Guided,
    help="Rebuild pretrained language models out of experts. `moesaic MODEL` asks what matters, "
    "searches, and offers what to do with what it finds.",
    epilog="Examples: moesaic tiny-moe, moesaic prune tiny-moe out --keep 6",
    no_args_is_help=True,
    context_settings={"help_option_names": HELP},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Brief(TyperCommand):
    """A command whose help fits a screen: of one method, and without what all verbs share."""

    options: ClassVar[Sequence[Option]] = ()
    example: ClassVar[str] = ""

    def get_help_option_names(self, ctx: Context) -> list[str]:
        """Return them in their order, which click takes from a set."""
        return sorted(super().get_help_option_names(ctx), key=ctx.help_option_names.index)

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the help of the method that ``--method`` names, else of the first one."""
        arguments, by_name = sys.argv, {o.name: o for o in self.options}
        methods = dict.fromkeys(m for o in self.options for m in o.methods)
        named = [
            m for m in methods if f"--method={m}" in arguments or m in _after("--method", arguments)
        ]
        method = next(iter(named or methods), "")
        left_out: list[str] = []
        shared: list[str] = []
        brief = any(o.common for o in self.options) and ALL not in arguments
        for parameter in self.params:
            option = by_name.get(str(parameter.name))
            if parameter.name in RUNS and isinstance(parameter, TyperOption):
                parameter.hidden = brief
                shared += parameter.opts if brief else []
            if option is None or not isinstance(parameter, TyperOption):
                continue
            parameter.help = option.methods.get(method, option.help)
            common = option.common and ALL not in arguments
            seldom = option.hidden and (brief or not option.methods)
            parameter.hidden = (
                seldom or common or bool(option.methods and method not in option.methods)
            )
            left_out += [option.flag.split()[0].partition("/")[0]] if common else []
        more = []
        if left_out:
            sentence = f"For text, measuring and device: {' '.join(left_out)}."
            more.append(f"{sentence} For the run: {' '.join(shared)} (see {ALL}).")
        if len(methods) > 1:
            others = ", ".join(m for m in methods if m != method)
            more.append(f"These are the options of {method}; of {others}: --method NAME --help.")
        self.epilog = "\n\n".join([" ".join(more), f"Example: {self.example}"]).strip()
        super().format_help(ctx, formatter)


def _after(word: str, words: Sequence[str]) -> list[str]:
    return [value for before, value in pairwise(words) if before == word]


def register(
    name: str,
    run: Callable[..., None],
    example: str,
    options: Sequence[Option] = (),
    seldom: Sequence[str] = (),
    hidden: bool = False,
) -> None:
    """Make a command of a function.

    Args:
        name: of the command.
        run: its parameters and its docstring are the command's; ``**options`` takes the options,
            those that were given.
        example: a command line that works.
        options: options made from dataclasses, which follow the function's own parameters.
        seldom: fields that ``-o`` takes.
        hidden: it is not in the list of commands.
    """
    signature = inspect.signature(run, eval_str=True)
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY)
        for p in signature.parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    arguments = [p for p in parameters if _is_argument(p)]
    switches = [p for p in parameters if not _is_argument(p)]
    flags = {p.name: _flag(p) for p in switches}
    flags |= {field: f"-o {field}" for field in seldom}
    flags |= {o.name: o.flag for o in options if not o.hidden}
    by_name = {o.name: o for o in options}

    def command(**values: Value) -> None:
        parsed = {
            key: by_name[key].read(value) if key in by_name else _expanded(value)
            for key, value in values.items()
            if key not in by_name or value is not None
        }
        try:
            run(**parsed)
        except MoesaicError as error:
            raise MoesaicError(in_flags(str(error), flags)) from error
        except (KeyboardInterrupt, EOFError):  # here, for typer says nothing of them
            interrupted(parsed.get("out") or parsed.get("stats") if "resume" in parsed else None)

    leading = [p for p in switches if p.name not in LAST]
    following = [p for p in switches if p.name in LAST]
    ordered = [*arguments, *leading, *(o.parameter for o in options), *following]
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    vars(command)["__signature__"] = signature.replace(parameters=ordered)
    cls = type("Brief", (Brief,), {"options": options, "example": example})
    names = [*HELP, ALL] if any(o.common for o in options) else HELP
    app.command(
        name,
        cls=cls,
        hidden=hidden,
        short_help=re.split(r"[;:.](?!\w)", run.__doc__ or "")[0],
        epilog=f"Example: {example}",
        context_settings={"help_option_names": names},
    )(command)


def _expanded(value: Value) -> Value:
    """A path that begins with ~, which shells leave alone behind =, in the user's folder."""
    if isinstance(value, list):
        return [_expanded(part) for part in value]
    return value.expanduser() if isinstance(value, Path) else value


def _info(parameter: inspect.Parameter) -> Value:
    return parameter.annotation.__metadata__[0]


def _is_argument(parameter: inspect.Parameter) -> bool:
    return isinstance(_info(parameter), typer.models.ArgumentInfo)


def _flag(parameter: inspect.Parameter) -> str:
    info = _info(parameter)
    names = [
        str(one) for one in (info.default, *(info.param_decls or ()))
    ]  # typer's first is there
    return next(
        (one for one in names if one.startswith("--")), f"--{parameter.name.replace('_', '-')}"
    )


def emit(as_json: bool, data: object, view: object) -> None:
    """Print ``data`` as JSON, or the view for people."""
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
    else:
        from moesaic.bars import console

        console.print(view)


def pushed(folder: str, repo: str) -> dict[str, str]:
    """Upload a result where that was asked for.

    Returns:
        ``pushed``, the repository's address; nothing where it was not.
    """
    if not repo:
        return {}
    from moesaic.bars import err_console
    from moesaic.sharing import push

    where = push(folder, repo)
    err_console.print(f"Pushed to {where}")
    return {"pushed": where}


def show_page(file: Path) -> None:
    """Open a page in the browser; without one say where it is."""
    import webbrowser

    from moesaic.bars import err_console

    if not webbrowser.open(file.resolve().as_uri()):
        err_console.print(f"No browser here. The page is {file.resolve()}")


def carry_out(
    recipe: Recipe,
    overwrite: bool,
    resume: bool,
    as_json: bool,
    dry_run: bool = False,
    push: str = "",
) -> None:
    """Run a recipe and show what came of it, or what would."""
    if push:
        check_repository(push)
    if dry_run:
        check_run(recipe, overwrite=overwrite, resume=resume)
        _foretell(recipe, as_json)
        return
    record = carried_out(recipe, overwrite, resume)
    if record is None:  # another process wrote the result
        return
    from moesaic import report
    from moesaic.bars import err_console
    from moesaic.report.numbers import memory

    files = record.measured["files"]
    before, after = (memory(files[name]) for name in ("original", "result"))
    place = f"Checkpoint in {recipe.out} ({before} -> {after})"
    err_console.print(
        f"{place}, report in {Path(recipe.out) / FOLDER / PAGE}", markup=False, soft_wrap=True
    )
    upload = pushed(recipe.out, push)
    emit(as_json, {**record.output(), **upload}, report.terminal(record))


def _foretell(recipe: Recipe, as_json: bool) -> None:
    """Show the sizes of a recipe's result."""
    from moesaic.estimates import estimate
    from moesaic.report.numbers import memory

    figures = estimate(recipe).as_json()
    table: JSON = {
        n.removesuffix("_bytes"): memory(x) if n.endswith("_bytes") else x
        for n, x in figures.items()
    }
    view = columns({recipe.out: table})
    view.caption = "Nothing was computed; peak memory is estimated."
    emit(as_json, {"out": recipe.out, "estimate": figures}, view)


def carried_out(recipe: Recipe, overwrite: bool, resume: bool) -> Record | None:
    """Run a recipe; None in all processes but the first."""
    check_run(recipe, overwrite=overwrite, resume=resume)  # before anything slow is imported
    print_start(recipe.model)
    from moesaic import pipeline
    from moesaic.bars import bars

    if unfinished(recipe.out).exists() and not (overwrite or resume):
        from moesaic.estimates import foreseen

        with foreseen(recipe) as steps:  # what is wrong with the request is said first
            if recipe.calibration.source:
                _ = steps[0].job.tokens
    try:
        return pipeline.run_recipe(recipe, overwrite=overwrite, resume=resume, track=bars)
    except KeyboardInterrupt:
        interrupted(recipe.out)


def print_start(model: str) -> None:
    """Print on a terminal that a model is read, before libraries take seconds to import."""
    if sys.stderr.isatty():
        sys.stderr.write(bounded(f"Reading {model} ...") + "\n")
        sys.stderr.flush()


def print_notice(line: str) -> None:
    """Print a line on stderr."""
    from moesaic.bars import err_console

    err_console.print(line, soft_wrap=True, markup=False, highlight=False)


def interrupted(out: str | Path | None) -> NoReturn:
    """Say that a command was interrupted, and what is kept of what it was to make."""
    message = "Interrupted."
    if out and (resumable(out) or searched(out).exists()):
        message += " What is finished is kept; --resume continues from it."
    elif out and not Path(out).exists():
        message += " Nothing is finished yet: the same command begins anew."
    fail(message, 130)


def fail(message: str, code: int) -> NoReturn:
    """Say what is wrong on stderr and leave."""
    from rich.text import Text

    from moesaic.bars import err_console

    text = Text.assemble(("Error:", "bold red"), " ", bounded(message))
    err_console.print(text, soft_wrap=True)
    sys.exit(code)


def columns(figures: Mapping[str, Values]) -> Table:
    """Figures as rows, models as columns; what has figures of its own has a row for each."""
    from rich.table import Table

    figures = {name: dict(_flat(column)) for name, column in figures.items()}
    table = Table()
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")
    keys = dict.fromkeys(key for column in figures.values() for key in column)
    for key in keys:
        table.add_row(key, *(figure(column.get(key)) for column in figures.values()))
    return table


def _flat(figures: Values, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}: ")
        else:
            yield prefix + key.replace("_", " "), value


def figure(value: object) -> str:
    """A figure as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " - ".join(figure(v) for v in value)
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
