"""The commands that measure and look."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.commands import emit, print_start, register
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
    from moesaic import report

    record = judged(model, against, figures, evaluation)
    if card and not as_json:
        sys.stdout.write(report.verdict(record))
    else:
        emit(as_json, figures, report.terminal(record))


def judged(model: str, against: str | None, figures: JSON, evaluation: Evaluation) -> Record:
    """Return the figures of ``eval`` as a record: of a model alone, or as made of the other."""
    from moesaic.io.source import resolve
    from moesaic.record import Record

    ours = resolve(model)
    name, model_type = Path(model).name, str(ours.config.model_type)
    if against is None:
        scores, files, native = {name: figures}, {name: ours.checkpoint.nbytes()}, True
    else:
        theirs = resolve(against)
        baselines: JSON = figures.get("baselines", {})
        scores = {"original": figures["against"], "result": figures, **baselines}
        files = {"original": theirs.checkpoint.nbytes(), "result": ours.checkpoint.nbytes()}
        files |= {type: found["total_bytes"] for type, found in baselines.items()}
        name = f"{name} beside {Path(against).name}"
        native = model_type == str(theirs.config.model_type)
    settings = {
        "data": evaluation.data or "shipped",
        "length": evaluation.length or 512,
        "bos": figures.get("bos", False),
    }
    return Record(
        model=name,
        out=model,
        model_type=model_type,
        native=native,
        steps=[],
        layers=[],
        measured={"evaluation": settings, "files": files, "scores": scores},
    )


def beside(model: str, against: str) -> str:
    """What the second column is called."""
    return against if against != model else f"{against}, again"


def bench(model: Model, against: Against = None, as_json: AsJson = False, **options: Value) -> None:
    """Measure speed, peak memory and file size; beside another model in interleaved rounds."""
    where = place(options)
    Bench(**options)  # before anything slow is imported
    for name in (model, against or model):
        check_name(name)
    print_start(model)
    from moesaic import report
    from moesaic.bars import bars
    from moesaic.metrics.bench import bench

    figures = bench(model, against, **where, **options, progress=bars)
    result = figures["model"] | {k: v for k, v in figures.items() if k != "model"}
    shown = {model: figures["model"]}
    if against:
        shown[beside(model, against)] = figures["against"]
    emit(as_json, result, report.speeds(shown, figures.get("ratio", {})))


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
