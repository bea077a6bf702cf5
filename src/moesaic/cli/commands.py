"""Commands, their help texts, and the printing of what a run returned."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn, TextIO

import click

from moesaic import __version__
from moesaic.cli.options import COMMON, OWN, RUN, Argument, Option, field_of
from moesaic.errors import MoesaicError, bounded, hint
from moesaic.io.names import FOLDER, MODELS, NAMES, PAGE, check_repository, names_model
from moesaic.io.outputs import resumable, run_folder, search_folder
from moesaic.recipe import Recipe, check_run

ALL = "--help-all"
SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "token_normalize_func": lambda name: name.replace("_", "-"),  # fields may be written as such
}


class Command(click.Command):
    """Command whose help is brief, unless ``--help-all`` asks for every option."""

    def __init__(
        self,
        name: str,
        run: Callable[..., None],
        example: str,
        params: Sequence[click.Parameter],
        help: str = "",
    ) -> None:
        def callback(**values: Any) -> None:
            ours = {p.name for p in self.params if isinstance(p, Option) and p.of_field}
            given = {k: v for k, v in values.items() if k not in ours or v not in (None, ())}
            try:
                run(**given)
            except MoesaicError as error:
                named = {str(value) for value in given.values()}  # a folder may be called data
                raise MoesaicError(self.in_flags(str(error), named)) from error
            except (KeyboardInterrupt, EOFError):
                made = given.get("out") or given.get("stats")
                fail_interrupted(made if "resume" in given else None)

        self.example, words = example, help or run.__doc__ or ""
        super().__init__(
            name,
            callback=callback,
            params=[*params],
            help=words,
            short_help=re.split(r"[;:.](?!\w)", words)[0],
            context_settings={**SETTINGS},
        )

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)[1:]
        return [*(piece for piece in pieces if piece != self.name), "[OPTIONS]"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        hidden = all(getattr(p, "group", OWN) != COMMON for p in self.params)  # it shows no more
        show = Option(
            ALL, "Print this with every option.", is_flag=True, is_eager=True, hidden=hidden,
            expose_value=False, callback=_print_all,
        )  # fmt: skip
        self.params = [*(p for p in self.params if ALL not in p.opts), show]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise MoesaicError(self.unknown(error.option_name)) from None

    def in_flags(self, message: str, values: Collection[str]) -> str:
        """Return a message of the library with flags, where it and its parts begin with fields."""
        flags = {p.name: p.opts[0] for p in self.params if isinstance(p, click.Option)}
        known = {name: flag for name, flag in flags.items() if name not in values}
        if re.split(r"[ :,;=]", message, maxsplit=1)[0] not in known:
            return message
        start = r"(?:^|(?<=; ))\w+(?=[ :,;=]|$)"
        return re.sub(start, lambda found: known.get(found[0], found[0]), message)

    def unknown(self, flag: str, others: Iterable[str] = ()) -> str:
        """Return a message that there is no such option; ``others`` may have been meant, too."""
        from moesaic.methods import VERBS, methods_of

        name = field_of(flag)
        verbs = [
            verb
            for verb in VERBS
            if any(name == f.name for c in methods_of(verb).values() for f in fields(c))
        ]
        if verbs and verbs != [self.name]:
            return f"No such option of {self.name}: {flag}. It is one of {', '.join(verbs)}."
        flags = [flag for p in self.params for flag in (*p.opts, *p.secondary_opts)]
        return f"No such option of {self.name}: {flag}.{hint(flag, [*flags, *others])}"

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        arguments = [(str(p.metavar), p.words) for p in self.params if isinstance(p, Argument)]
        if arguments:
            formatter.write_paragraph()
            formatter.write_dl(arguments)
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record:
                groups.setdefault(getattr(param, "group", OWN), []).append(record)
        brief = COMMON in groups and not ctx.meta.get(ALL)
        for group, records in groups.items():
            if group == OWN or not brief:
                with formatter.section(self.titles().get(group, group)):
                    formatter.write_dl(records)
        sentences = self.remarks(ctx)
        if brief:
            flags = [
                re.split(r"[ ,/]", record[0])[0] for n in (COMMON, RUN) for record in groups[n]
            ]
            sentences.insert(0, f"Also: {', '.join(flags)} (see {ALL}).")
        for sentence in [*sentences, f"Example: {self.example}"]:
            formatter.write_paragraph()
            formatter.write_text(sentence)

    def titles(self) -> dict[str, str]:
        """Return titles of option groups that differ from their names."""
        return {}

    def remarks(self, ctx: click.Context) -> list[str]:
        """Return sentences that follow the options."""
        return []


def _print_all(ctx: click.Context, _: object, value: bool) -> None:
    if value:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


class _GuidedCommands(click.Group):
    """Group of commands, in which a model's name in a command's place starts the guide."""

    guide: Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the words name, its name, and its own words."""
        word = args[0]
        if word == "help":
            named = [name for name in args[1:2] if name in self.commands]
            if named:
                return named[0], self.commands[named[0]], ["--help"]
            click.echo(ctx.get_help())
            ctx.exit()
        if word not in self.commands and names_model(word):
            return "MODEL", self.guide, args
        if word not in self.commands and not word.startswith("-") and not ctx.resilient_parsing:
            raise MoesaicError(
                f"No such command: {word}.{hint(word, [*self.commands, *NAMES])} Commands: "
                f"{', '.join(self.commands)} (moesaic --help describes them). Models by name: "
                f"{MODELS}."
            )
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["COMMAND|MODEL ..."]


@click.group(
    cls=_GuidedCommands,
    invoke_without_command=True,
    context_settings=SETTINGS,
    epilog="Examples: moesaic tiny-moe, moesaic prune tiny-moe out --keep 6. Options of a command: "
    "moesaic COMMAND --help.",
)
@click.version_option(__version__, message="%(version)s", help="Print the version.")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Make language models smaller: mixtures of experts and dense ones.

    `moesaic MODEL` prints whether a model fits this machine, and finds a smaller one that does.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def register(
    name: str, run: Callable[..., None], example: str, params: Sequence[click.Parameter]
) -> None:
    """Register a command that a function carries out; its docstring is the command's help."""
    app.add_command(Command(name, run, example, params))


# --- what is printed -----------------------------------------------------------------------------


def emit(as_json: bool, data: object, view: object) -> None:
    """Print ``data`` as JSON, or the view for people.

    Raises:
        MoesaicError: stdout takes no more; whatever the command made is complete by now.
    """
    try:
        if as_json:
            print(json.dumps(data), flush=True)
        else:
            from moesaic.progress import console

            console.print(view)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MoesaicError(
            f"Figures could not be printed: {error.strerror}. What the command made is complete."
        ) from error


def push_result(folder: str, repo: str | None) -> dict[str, str]:
    """Upload a result if a repository is named; return its address as ``pushed``, or nothing."""
    if repo is None:
        return {}
    from moesaic.result import push

    where = push(folder, repo)
    print_notice(f"Pushed to {where}")
    return {"pushed": where}


def carry_out(
    recipe: Recipe, overwrite: bool, resume: bool, as_json: bool, dry_run: bool, push: str | None
) -> None:
    """Run a recipe and print its record, or the sizes that a dry run computes."""
    for step in recipe.steps:
        if step.idle:
            raise MoesaicError(f"{step.idle}: give another value.")
    if push is not None:
        check_repository(push)
    check_run(recipe, overwrite=overwrite)  # before anything slow is imported
    print_start(recipe.model)
    if dry_run:
        _print_sizes(recipe, as_json)
        return
    from moesaic import pipeline, report
    from moesaic.progress import bars
    from moesaic.report.numbers import memory
    from moesaic.sizes import on_headers

    if run_folder(recipe.out).exists() and not (overwrite or resume):
        with on_headers(recipe) as steps:  # wrong requests are refused first
            if recipe.calibration.source:
                _ = steps[0].job.tokens
    try:
        record = pipeline.run_recipe(recipe, overwrite=overwrite, resume=resume, track=bars)
    except KeyboardInterrupt:
        fail_interrupted(recipe.out)
    if record is None:  # another process wrote the result
        return
    files = record.measured["files"]
    before, after = (memory(files[name]) for name in ("original", "result"))
    print_made(recipe.out, f" ({before} -> {after})")
    upload = push_result(recipe.out, push)
    emit(as_json, {**record.output(), **upload}, report.terminal(record))


def _print_sizes(recipe: Recipe, as_json: bool) -> None:
    """Print the sizes of a recipe's result."""
    from rich.table import Table

    from moesaic.report.numbers import memory
    from moesaic.sizes import estimate

    figures = estimate(recipe).as_json()
    table = Table(caption="Nothing was computed; peak memory is estimated.")
    table.add_column("")
    table.add_column(recipe.out, justify="right")
    for name, value in figures.items():
        shown = memory(value) if name.endswith("_bytes") else shown_figure(value)
        table.add_row(name.removesuffix("_bytes").replace("_", " "), shown)
    emit(as_json, {"out": recipe.out, "estimate": figures}, table)


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if a standard stream is a terminal; it is None in a process begun without it."""
    return stream is not None and stream.isatty()


def print_start(model: str) -> None:
    """Print that a model is read, before libraries take seconds to import."""
    if is_terminal(sys.stderr):
        sys.stderr.write(bounded(f"Reading {model} ...") + "\n")
        sys.stderr.flush()


def print_notice(line: str, style: str = "") -> None:
    """Print a line on stderr as it is, such as a path or a command: no line is broken."""
    from moesaic.progress import err_console

    err_console.print(line, style=style, soft_wrap=True, markup=False, highlight=False)


def print_made(folder: str | Path, more: str = "") -> None:
    """Print where a result and its page are, each on a line of its own."""
    print_notice(f"Checkpoint in {folder}{more}")
    print_notice(f"Report in {Path(folder) / FOLDER / PAGE}")


def print_words(text: str) -> None:
    """Print a text on stderr, its lines broken between words; commands, after ``$``, are not."""
    from rich.text import Text

    from moesaic.progress import err_console

    if is_terminal(sys.stderr):
        words: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        text = "\n".join(
            line if line.startswith("$ ") else fill(line, err_console.width, **words)
            for line in text.splitlines()
        )
    shown = Text(text)
    shown.highlight_words(["Error:"], "bold red")
    err_console.print(shown, soft_wrap=True)


def fail_interrupted(out: str | Path | None) -> NoReturn:
    """Exit with a message that a command was interrupted, and what is kept of its output."""
    message = "Interrupted."
    if out and (resumable(out) or search_folder(out).exists()):
        message += " What is finished is kept; --resume continues from it."
    elif out and not Path(out).exists():
        message += " Nothing is finished yet: the same command begins anew."
    fail(message, 130)


def fail(message: str, code: int) -> NoReturn:
    """Print a message on stderr and exit."""
    print_words(f"{'' if code == 130 else 'Error: '}{bounded(message)}")
    sys.exit(code)


def shown_figure(value: object) -> str:
    """Return a figure as a table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
