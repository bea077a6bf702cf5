"""What the commands share: options, bars, output."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from moesaic import report, run
from moesaic.errors import MoesaicError
from moesaic.progress import Figures
from moesaic.recipe import Calibration, Evaluation, Recipe
from moesaic.statistics import process

T = TypeVar("T")
out_console = Console()
err_console = Console(stderr=True)

app = typer.Typer(
    help="Rebuild pretrained language models out of experts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

MODELS = "A hub id, a folder, a .gguf file, smollm2, or a model that ships (tiny-dense ...)."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODELS, show_default=False)]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an unfinished run of the same.")]
CalibrationText = Annotated[
    str,
    typer.Option(
        "--calibration",
        help="Text to calibrate on, or to train on: a .txt, .jsonl, .json or .parquet file, a "
        ".safetensors file of input_ids, a hub dataset id, prose, reference or code, or a mix such "
        "as code=3,prose=1. Default: all text that ships.",
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="Calibration windows.")]
CalibrationLength = Annotated[int, typer.Option("--length", min=2, help="Tokens a window.")]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.")]
EvalData = Annotated[
    str, typer.Option("--data", help="Text to measure on; as for --calibration. Default: ships.")
]
EvalLength = Annotated[int, typer.Option("--length", min=2, help="Tokens a window.")]
MaxTokens = Annotated[int | None, typer.Option(min=2, help="Use at most this much of the text.")]
Refit = Annotated[
    bool | None,
    typer.Option("--refit", help="Refit down projections to the original layers' outputs."),
]
Bundle = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="NAME", help="best: what measures best, where no option says otherwise."
    ),
]
Stats = Annotated[
    str, typer.Option(metavar="FILE", help="Decide from this file of observe; run nothing.")
]
Evaluate = Annotated[bool, typer.Option("--eval/--no-eval", help="Measure result and original.")]


class Bar(Progress):
    """A bar, and under it the curves of the figures that the items tell."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        self.curves: dict[str, list[float]] = {}  # looked at while Progress is made
        super().__init__(*columns, **options)

    def tell(self, figures: Figures) -> None:
        for name, value in figures.items():
            self.curves.setdefault(name, []).append(value)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        for name, values in self.curves.items():
            yield Text(f"  {name:<24}{sparkline(values)} {values[-1]:.4g}")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The course of some values, from the least to the greatest.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7]), sparkline([1, 3, 1, 3], 2), sparkline([math.nan, 2])
    ('▁▂▃▄▅▆▇█', '▁▁', ' ▁')
    """
    steps = "▁▂▃▄▅▆▇█"
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    known = [mean for mean in means if math.isfinite(mean)] or [0.0]
    room = (max(known) - min(known)) or 1.0
    return "".join(
        steps[round(7 * (mean - min(known)) / room)] if math.isfinite(mean) else " "
        for mean in means
    )


def bars(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Draw a bar with the time left on stderr while the items pass."""
    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=err_console) as bar:
        for item in bar.track(items, total=total, description=label):
            if isinstance(item, Figures):
                bar.tell(item)
            yield item


def emit(as_json: bool, data: Any, view: Any) -> None:
    """Print ``data`` as JSON, or the view for people."""
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
    else:
        out_console.print(view)


def example(line: str) -> str:
    """The example at the end of a help text."""
    return f"Example: [bold]{line}[/bold]"


def said(**given: Any) -> dict[str, Any]:
    """The options that were given; a method's config has the defaults of the others."""
    return {name: value for name, value in given.items() if value is not None}


def options(pairs: list[str] | None) -> dict[str, Any]:
    """``key=value`` pairs; values are read as in a recipe."""
    given = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise MoesaicError(f"--option {pair!r} is not key=value.")
        given[key] = value
    return given


def numbers(text: str) -> list[float]:
    """Numbers between commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise MoesaicError(f"{text!r} is not a list of numbers such as 0.3,0.5.") from None


# --- options that commands share -----------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """What is calibrated on."""

    calibration: CalibrationText = ""
    samples: Samples = 100
    length: CalibrationLength = 256
    seed: Seed = 0

    def drawn(self, stats: str = "") -> Calibration:
        """As a recipe says it."""
        return Calibration(self.calibration, self.samples, self.length, self.seed, stats)


@dataclass(frozen=True)
class Rest:
    """What is measured, where it runs, and what is shown."""

    evaluate: Evaluate = True
    data: EvalData = ""
    max_tokens: MaxTokens = 16_384
    device: Device = "cpu"
    dtype: Dtype = "auto"
    overwrite: Overwrite = False
    resume: Resume = False
    as_json: AsJson = False

    def carry_out(
        self,
        model: str,
        out: Path,
        step: Any,
        calibration: Calibration | None = None,
        compare: list[str] | None = None,
    ) -> None:
        """Run one step as a recipe, and show what came of it."""
        measured = Evaluation(self.data, max_tokens=self.max_tokens, compare=tuple(compare or ()))
        recipe = Recipe(
            model=model,
            out=str(out),
            steps=(step,),
            calibration=calibration or Calibration(),
            evaluation=measured if self.evaluate else None,
            device=self.device,
            dtype=self.dtype,
        )
        carry_out(recipe, self.overwrite, self.resume, self.as_json)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be dataclasses: each field becomes an option."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        group = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(group, include_extras=True)
        groups[name] = (group, [field.name for field in fields(group)])
        parameters += [
            inspect.Parameter(
                f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
            )
            for f in fields(group)
        ]

    def run(**given: Any) -> None:
        for name, (group, names) in groups.items():
            given[name] = group(**{n: given.pop(n) for n in names})
        command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


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
    if isinstance(value, list):
        return " - ".join(figure(v) for v in value)
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
