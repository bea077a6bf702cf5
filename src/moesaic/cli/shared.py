"""What the commands share: the app, and how it shows what came of a run."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from moesaic import report, run
from moesaic.cli.bars import bars, err_console
from moesaic.recipe import Recipe
from moesaic.stream.experts import process

out_console = Console()

app = typer.Typer(
    help="Rebuild pretrained language models out of experts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def emit(as_json: bool, data: Any, view: Any) -> None:
    """Print ``data`` as JSON, or the view for people."""
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
    else:
        out_console.print(view)


def example(line: str) -> str:
    """The example at the end of a help text."""
    return f"Example: [bold]{line}[/bold]"


def carry_out(recipe: Recipe, overwrite: bool, resume: bool, as_json: bool) -> None:
    """Run a recipe and show what came of it."""
    try:
        record = run.run_recipe(recipe, overwrite=overwrite, resume=resume, track=bars)
    except KeyboardInterrupt:
        fail("Interrupted. Finished layers are kept; --resume continues from them.", 130)
    if process()[0]:  # another process wrote the result
        return
    emit(as_json, record, report.terminal(record))
    err_console.print(f"Checkpoint in {recipe.out}, report in {recipe.out}/report.html")


def fail(message: str, code: int) -> NoReturn:
    """Say what is wrong on stderr and leave."""
    err_console.print(f"[bold red]Error:[/bold red] {message}", highlight=False, soft_wrap=True)
    sys.exit(code)


def columns(figures: dict[str, dict[str, Any]]) -> Table:
    """Figures as rows, models as columns."""
    table = Table()
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")
    keys = dict.fromkeys(key for column in figures.values() for key in column)
    for key in keys:
        label = key.replace("_", " ")
        table.add_row(label, *(figure(column.get(key)) for column in figures.values()))
    return table


def figure(value: Any) -> str:
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
