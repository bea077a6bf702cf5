"""The commands that measure and look."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table

from moesaic import benching, report
from moesaic import measure as measuring
from moesaic.cli.bars import bars
from moesaic.cli.options import (
    AsJson,
    Device,
    Dtype,
    EvalData,
    EvalLength,
    MaxTokens,
    Model,
    numbers,
)
from moesaic.cli.shared import app, columns, emit, example, out_console
from moesaic.errors import MoesaicError
from moesaic.export.llamacpp import TYPES
from moesaic.hub import resolve
from moesaic.metrics.measure import check_device, parse_dtype


@app.command("eval", epilog=example("moesaic eval out --against smollm2 --max-tokens 16384"))
def evaluate(
    model: Model,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Measured beside it.")
    ] = None,
    data: EvalData = "",
    length: EvalLength = 512,
    max_tokens: MaxTokens = None,
    tau: Annotated[
        str, typer.Option(help="Thresholds of the gates to measure at, such as 0.3,0.5,0.7.")
    ] = "",
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="With --tau: draw what was measured.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Perplexity, parameters and active ratio, measured on routed tokens."""
    if draw and not tau:
        raise MoesaicError("--draw draws a sweep over thresholds; give them with --tau.")
    if tau:
        points = measuring.sweep(
            model,
            numbers(tau),
            data=data,
            length=length,
            max_tokens=max_tokens,
            device=check_device(device),
            dtype=parse_dtype(dtype),
            track=bars,
        )
        if draw:
            draw.write_text(report.sweep(points, f"{model}, by threshold"), "utf-8")
        emit(as_json, {"sweep": points}, columns({f"tau {p['tau']:g}": p for p in points}))
        return
    names = {"model": model} | ({"against": against} if against else {})
    scores = {
        key: measuring.evaluate(
            name,
            data=data,
            length=length,
            max_tokens=max_tokens,
            device=check_device(device),
            dtype=parse_dtype(dtype),
            track=bars,
        ).as_json()
        for key, name in names.items()
    }
    figures = dict(scores["model"])
    if against:
        figures["against"] = scores["against"]
    emit(as_json, figures, columns({names[key]: scores[key] for key in names}))


@app.command(epilog=example("moesaic bench out --against smollm2 --rounds 5"))
def bench(
    model: Model,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Timed in turn with it.")
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Prompt tokens.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decoding steps a round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds, after one of warm-up.")] = 5,
    engine: Annotated[str, typer.Option(help=f"{', '.join(benching.ENGINES)}.")] = "transformers",
    type: Annotated[
        str, typer.Option(help=f"Of weights converted for llamacpp: {', '.join(TYPES)}.")
    ] = "f32",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Speed in interleaved rounds beside the ideal one, peak memory and file size."""
    names = {"model": model} | ({"against": against} if against else {})
    figures = benching.bench(
        names,
        engine=engine,
        type=type,
        length=length,
        new_tokens=new_tokens,
        rounds=rounds,
        device=check_device(device),
        dtype=parse_dtype(dtype),
        track=bars,
    )
    result = figures["model"] | {k: v for k, v in figures.items() if k != "model"}
    table = columns({names[key]: figures[key] for key in names})
    said = report.speed_words(figures.get("ratio", {}))
    emit(as_json, result, Group(table, *said))


@app.command(epilog=example("moesaic inspect out"))
def inspect(model: Model, as_json: AsJson = False) -> None:
    """What a checkpoint is made of, layer by layer; reads no weights."""
    figures = measuring.inspect(model)
    table = Table(title=f"{model}: {figures['model_type']}", title_justify="left")
    for name in ("layer", "kind", "width", "active", "experts", "top-k"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for i, layer in enumerate(figures["layers"]):
        routed = (str(layer["experts"]), str(layer["top_k"])) if layer["experts"] else ("", "")
        active = f"{layer['active_width']:,.0f}"
        table.add_row(str(i), layer["kind"], f"{layer['width']:,}", active, *routed)
    table.caption = (
        f"{figures['total_parameters']:,} parameters, {figures['active_parameters']:,} active; "
        f"active ratio {figures['active_ratio']:.3f}"
    )
    emit(as_json, figures, table)


@app.command(epilog=example('moesaic generate out "The capital of France is"'))
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user would.")] = False,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a text greedily."""
    source = resolve(model)
    loaded = source.load(check_device(device), parse_dtype(dtype))
    text = measuring.generate(loaded, source.tokenizer, prompt, new_tokens, chat)
    if as_json:
        emit(True, {"prompt": prompt, "text": text}, None)
    else:
        out_console.print(prompt, style="dim", end="\n" if chat else "", markup=False)
        out_console.print(text, markup=False)
