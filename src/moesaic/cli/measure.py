"""The commands that measure and look."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.commands import columns, emit, print_start, register
from moesaic.cli.options import DEVICE, DTYPE, AsJson, Model, Value, option
from moesaic.config import (
    Bench,
    Evaluation,
    check_device,
    parse_dtype,
)
from moesaic.data.questions import wanted_tasks
from moesaic.errors import MoesaicError
from moesaic.io.names import check_name
from moesaic.recipe import Recipe
from moesaic.types import JSON

if TYPE_CHECKING:
    from rich.console import Group

    from moesaic.record import Record

Against = Annotated[str | None, typer.Option(metavar="MODEL", help="Measured beside it.")]
Original = Annotated[
    str | None,
    typer.Option(
        metavar="ORIGINAL", help="Measured beside it, and compared with it token by token."
    ),
]


def place(options: JSON) -> JSON:
    """Device and floating-point type, taken out of what was given."""
    dtype = parse_dtype(options.pop("dtype", Recipe.dtype))
    return {"device": check_device(options.pop("device", Recipe.device)), "dtype": dtype}


def evaluate(
    model: Model,
    against: Original = None,
    card: Annotated[bool, typer.Option("--card", help="Print Markdown for a model card.")] = False,
    as_json: AsJson = False,
    **options: Value,
) -> None:
    """Judge any checkpoint beside its original: KL, perplexity, size, tasks, quantised files."""
    for name in (model, against or model):
        check_name(name)
    where = place(options)
    evaluation = Evaluation(**options)  # before anything slow is imported
    if not against and (card or evaluation.baselines):
        raise MoesaicError(f"{'card' if card else 'baselines'} needs against=ORIGINAL.")
    wanted_tasks(evaluation.tasks, evaluation.shots, evaluation.limit)
    settings = {**options, **where}
    print_start(model)
    from moesaic.bars import bars
    from moesaic.distributed import process
    from moesaic.metrics.evaluate import evaluate

    result = evaluate(model, against=against, **settings, progress=bars).as_json()
    if process()[0]:  # the first process tells what all have found
        return
    figures = {**result, "max_tokens": evaluation.max_tokens or None}
    if not against:
        emit(as_json, figures, score_tables({model: result}, evaluation.max_tokens))
        return
    from moesaic import report

    record = judged(model, against, figures, evaluation)
    if card and not as_json:
        sys.stdout.write(report.verdict(record))
    else:
        emit(as_json, figures, report.terminal(record))


def judged(model: str, against: str, figures: JSON, evaluation: Evaluation) -> Record:
    """Return the figures of ``eval`` as the record of a run that made the one of the other."""
    from moesaic.io.source import resolve
    from moesaic.record import Record

    sources = {"original": resolve(against), "result": resolve(model)}
    baselines: JSON = figures.get("baselines", {})
    files = {name: source.checkpoint.nbytes() for name, source in sources.items()}
    files |= {name: scores["total_bytes"] for name, scores in baselines.items()}
    measured = {
        "evaluation": {
            "data": evaluation.data or "shipped",
            "length": evaluation.length or 512,
            "bos": figures.get("bos", False),
        },
        "files": files,
        "scores": {"original": figures["against"], "result": figures, **baselines},
    }
    model_type = str(sources["result"].config.model_type)
    native = model_type == sources["original"].config.model_type
    return Record(
        model=f"{Path(model).name} beside {Path(against).name}",
        out=model,
        model_type=model_type,
        native=native,
        steps=[],
        layers=[],
        measured=measured,
    )


def beside(model: str, against: str) -> str:
    """What the second column is called."""
    return against if against != model else f"{against}, again"


TITLES = {"sources": "On ", "tasks": "", "generations": "Generations at temperature "}
"""Figures of several kinds, which have a table of each kind, and what its title begins with."""


def score_tables(by_model: Mapping[str, JSON], most: int | None) -> Group:
    """Tables of what was measured of each model."""
    from rich.console import Group

    plain = {
        name: {k: v for k, v in figures.items() if k not in (*TITLES, "against")}
        for name, figures in by_model.items()
    }
    table = columns(plain)
    if most:
        table.caption = f"On at most {most:,} tokens of the text; --max-tokens 0: on all of it."
    tables = [table]
    for part, title in TITLES.items():
        kinds = {kind: None for figures in by_model.values() for kind in figures.get(part, {})}
        for kind in kinds:
            scores = columns({name: figures[part][kind] for name, figures in by_model.items()})
            scores.title = f"{title}{kind}"
            scores.title_justify = "left"
            tables.append(scores)
    return Group(*tables)


def bench(model: Model, against: Against = None, as_json: AsJson = False, **options: Value) -> None:
    """Measure speed, peak memory and file size; beside another model in interleaved rounds."""
    where = place(options)
    Bench(**options)  # before anything slow is imported
    for name in (model, against or model):
        check_name(name)
    print_start(model)
    from rich.console import Group

    from moesaic import report
    from moesaic.bars import bars
    from moesaic.metrics.bench import bench

    figures = bench(model, against, **where, **options, progress=bars)
    result = figures["model"] | {k: v for k, v in figures.items() if k != "model"}
    shown = {model: figures["model"]}
    if against:
        shown[beside(model, against)] = figures["against"]
    table = columns(shown)
    sentences = report.speed_words(figures.get("ratio", {}))
    emit(as_json, result, Group(table, *sentences))


def inspect(model: Model, as_json: AsJson = False) -> None:
    """What a checkpoint is made of, layer by layer; reads no weights."""
    check_name(model)
    from rich.table import Table

    from moesaic.metrics.size import inspect

    figures = inspect(model)
    table = Table(title=f"{model}: {figures['model_type']}", title_justify="left")
    for name in ("layer", "kind", "neurons", "a token runs", "experts", "top-k"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for i, layer in enumerate(figures["layers"]):
        routed = (str(layer["experts"]), str(layer["top_k"])) if layer["experts"] else ("", "")
        active = f"{layer['active_width']:,.0f}"
        table.add_row(str(i), layer["kind"], f"{layer['width']:,}", active, *routed)
    table.caption = (
        f"{figures['total_parameters']:,} parameters, of which a token uses "
        f"{figures['active_parameters']:,}; without embeddings {figures['active_ratio']:.1%}"
    )
    emit(as_json, figures, table)


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    new_tokens: Annotated[
        int, typer.Option(metavar="INT", min=1, help="Tokens to add at most.")
    ] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user would.")] = False,
    as_json: AsJson = False,
    **options: Value,
) -> None:
    """Continue a text greedily."""
    if not prompt:
        raise MoesaicError("The prompt is empty.")
    check_name(model)
    where = place(options)
    from rich.text import Text

    from moesaic.bars import console
    from moesaic.metrics.generations import generate

    text = generate(model, prompt, new_tokens=new_tokens, chat=chat, **where)
    if as_json:
        emit(True, {"prompt": prompt, "text": text}, None)
    else:
        asked = (prompt + ("\n" if chat else ""), "dim")
        console.print(Text.assemble(asked, text), soft_wrap=True)


def commands() -> None:
    """Make these commands."""
    names = ("tasks", "limit", "shots", "generations", "stream", "data", "length", "max_tokens")
    text = [option(Evaluation, name) for name in (*names, "baselines")]
    speed = [option(Bench, field.name) for field in fields(Bench)]
    where = [DEVICE, DTYPE]
    register("eval", evaluate, "moesaic eval out --against smollm2", [*text, *where])
    register("bench", bench, "moesaic bench out --against smollm2 --rounds 5", [*speed, *where])
    register("inspect", inspect, "moesaic inspect out")
    register("generate", generate, 'moesaic generate out "The capital of France is"', where)
