"""The commands. Text for people goes through rich; ``--json`` puts one JSON object on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from moesaic import benching, exporting, reduction, report, run
from moesaic import measure as measuring
from moesaic.checkpoint import disk_full
from moesaic.errors import MoesaicError
from moesaic.exporting.llamacpp import TYPES
from moesaic.hub import resolve
from moesaic.measure import check_device, parse_bytes, parse_dtype
from moesaic.methods import STEPS, MoREConfig
from moesaic.methods.naee import CRITERIA
from moesaic.recipe import Calibration, Evaluation, Recipe, load_recipe, step_config
from moesaic.statistics import StatsFile, join_processes, merge_files, process
from moesaic.version import __version__

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

# --- options that commands share -----------------------------------------------------------------

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
    with Progress(*columns, console=err_console) as progress:
        yield from progress.track(items, total=total, description=label)


def emit(as_json: bool, data: Any, view: Any) -> None:
    """Print ``data`` as JSON, or the view for people."""
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
    else:
        out_console.print(view)


def example(line: str) -> str:
    """The example at the end of a help text."""
    return f"Example: [bold]{line}[/bold]"


# --- commands ------------------------------------------------------------------------------------


@app.command(epilog=example("moesaic carve smollm2 out --active 0.8 --experts 4"))
def carve(
    model: Model,
    out: Out,
    method: Annotated[str, typer.Option(help=f"{', '.join(STEPS['carve'])}.")] = "more",
    active: Annotated[
        float | None,
        typer.Option(
            help="Share of the projections' parameters a token may use; more: 0.8, tomoe: 0.6."
        ),
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Petals a layer; more: 4, tomoe and dsmoe: 8.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Petals a token runs; more: 1.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="last-half (more), all (dsmoe), uniform, early-middle, or numbers such as 4,5,6."
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="full, or a comparison; more: backbone, random, naive, static; dsmoe: top-k, "
            "no-straight-through, no-piecewise."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; tomoe, dsmoe.")] = None,
    materialize: Annotated[
        bool | None, typer.Option("--materialize", help="tomoe: a copy of its weights an expert.")
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Also measure this variant at the same active ratio; tomoe: more or static. "
            "Repeatable."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="key=value: any other option of the method's config."),
    ] = None,
    calibration: CalibrationText = "",
    samples: Samples = 100,
    length: CalibrationLength = 256,
    seed: Seed = 0,
    evaluate: Annotated[
        bool, typer.Option("--eval/--no-eval", help="Measure result and original.")
    ] = True,
    data: EvalData = "",
    max_tokens: MaxTokens = 16_384,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Turn a dense model into a mixture of experts."""
    given: dict[str, Any] = {
        "active": active,
        "experts": experts,
        "top_k": top_k,
        "layers": layers,
        "variant": variant,
        "steps": steps,
        "materialize": materialize,
    }
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"method": method, "seed": seed, **options(option)}
    recipe = Recipe(
        model=model,
        out=str(out),
        steps=(step_config("carve", given),),
        calibration=Calibration(calibration, samples, length, seed),
        evaluation=Evaluation(data, max_tokens=max_tokens, compare=tuple(compare or ()))
        if evaluate
        else None,
        device=device,
        dtype=dtype,
    )
    carry_out(recipe, overwrite, resume, as_json)


@app.command(epilog=example("moesaic condense tiny-shared-moe out --layers 2"))
def condense(
    model: Model,
    out: Out,
    layers: Annotated[int | None, typer.Option(help="Layers to condense.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Condense until the weights fit: bytes, 12GB, 800MB.")
    ] = None,
    active: Annotated[
        int | None, typer.Option(help="Condense until a token uses at most this many parameters.")
    ] = None,
    keep: Annotated[
        str,
        typer.Option(
            help="What stays of a layer: shared, shared+routed, attention (Block Drop), "
            "nothing (Layer Drop)."
        ),
    ] = "shared",
    experts: Annotated[
        int | None, typer.Option(help="Routed experts that stay; default: as many as a token runs.")
    ] = None,
    metric: Annotated[str, typer.Option(help="js, kl or ppl.")] = "js",
    expert_search: Annotated[
        str, typer.Option(help="greedy, random, l1 or pl_alpha_hill.")
    ] = "greedy",
    layer_search: Annotated[
        str, typer.Option(help="greedy, rank, global-rank, cosine or random.")
    ] = "greedy",
    shared_gate: Annotated[
        str, typer.Option(help="A gate on the shared path: token keeps it, mean fixes it.")
    ] = "token",
    candidates: Annotated[
        str, typer.Option(help="Layers to choose from, such as 1,2,3. Default: all that route.")
    ] = "",
    padding: Annotated[
        bool,
        typer.Option(help="Fill up with zeros where the architecture itself can then hold it."),
    ] = True,
    force: Annotated[
        bool, typer.Option("--force", help="Keep the shared path even where there is none.")
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Also measure with this many of the layers condensed. Repeatable."),
    ] = None,
    calibration: CalibrationText = "",
    samples: Samples = 100,
    length: CalibrationLength = 512,
    seed: Seed = 0,
    evaluate: Annotated[
        bool, typer.Option("--eval/--no-eval", help="Measure result and original.")
    ] = True,
    data: EvalData = "",
    max_tokens: MaxTokens = 16_384,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Turn some layers of a mixture of experts into small dense layers."""
    if layers is None and memory is None and active is None:
        layers = 1
    given = {
        "layers": layers,
        "memory": None if memory is None else parse_bytes(memory),
        "active": active,
        "keep": keep,
        "experts": experts,
        "metric": metric,
        "expert_search": expert_search,
        "layer_search": layer_search,
        "shared_gate": shared_gate,
        "candidates": [part.strip() for part in candidates.split(",") if part.strip()],
        "padding": padding,
        "force": force,
        "seed": seed,
    }
    recipe = Recipe(
        model=model,
        out=str(out),
        steps=(step_config("condense", given),),
        calibration=Calibration(calibration, samples, length, seed),
        evaluation=Evaluation(data, max_tokens=max_tokens, compare=tuple(compare or ()))
        if evaluate
        else None,
        device=device,
        dtype=dtype,
    )
    carry_out(recipe, overwrite, resume, as_json)


@app.command(epilog=example("moesaic tune out tuned --data text.jsonl --what condensed"))
def tune(
    model: Model,
    out: Out,
    data: Annotated[
        str, typer.Option("--data", help="Text to train on; as for --calibration. Default: ships.")
    ] = "",
    what: Annotated[str, typer.Option(help="condensed, routers, lora or all.")] = "condensed",
    teacher: Annotated[
        str, typer.Option(metavar="MODEL", help="Learn from this original, not from the text.")
    ] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps; default: --epochs.")] = None,
    epochs: Annotated[float, typer.Option(help="Times that the text passes.")] = 1.0,
    batch: Annotated[int, typer.Option(help="Texts a process takes at a time.")] = 8,
    accumulate: Annotated[int, typer.Option(help="Batches before the weights move.")] = 1,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a text at most.")] = 512,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-4,
    warmup: Annotated[float, typer.Option(help="Share of the steps in which it rises.")] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="AdamW's.")] = 0.0,
    rank: Annotated[int, typer.Option(help="Of the updates, for --what lora.")] = 8,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    seed: Seed = 0,
    evaluate: Annotated[
        bool, typer.Option("--eval/--no-eval", help="Measure result and original.")
    ] = True,
    eval_data: Annotated[
        str, typer.Option("--eval-data", help="Text to measure on. Default: ships.")
    ] = "",
    max_tokens: MaxTokens = 16_384,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a converted model a little. Runs under accelerate launch."""
    given = {
        "what": what,
        "data": data,
        "teacher": teacher,
        "length": length,
        "steps": steps,
        "epochs": epochs,
        "batch": batch,
        "accumulate": accumulate,
        "lr": lr,
        "warmup": warmup,
        "weight_decay": weight_decay,
        "rank": rank,
        "save_every": save_every,
        "seed": seed,
    }
    recipe = Recipe(
        model=model,
        out=str(out),
        steps=(step_config("tune", given),),
        evaluation=Evaluation(eval_data, max_tokens=max_tokens) if evaluate else None,
        device=device,
        dtype=dtype,
    )
    carry_out(recipe, overwrite, resume, as_json)


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


Stats = Annotated[
    str, typer.Option(metavar="FILE", help="Decide from this file of observe; run nothing.")
]
Evaluate = Annotated[bool, typer.Option("--eval/--no-eval", help="Measure result and original.")]


@app.command(epilog=example("moesaic prune tiny-moe out --keep 6 --criterion reconstruction"))
def prune(
    model: Model,
    out: Out,
    keep: Annotated[float, typer.Option(help="Experts that stay a layer; a mean if non-uniform.")],
    criterion: Annotated[str, typer.Option(help=f"{', '.join(CRITERIA)}.")] = "reconstruction",
    progressive: Annotated[
        bool, typer.Option("--progressive", help="Each layer sees what the pruned ones pass on.")
    ] = False,
    non_uniform: Annotated[
        bool, typer.Option("--non-uniform", help="Let counts differ: saved as moesaic_<base>.")
    ] = False,
    padding: Annotated[
        bool, typer.Option("--padding", help="Fill counts up with experts never chosen: native.")
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Also measure this criterion at the same size. Repeatable."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="key=value: any other option of the method's config."),
    ] = None,
    stats: Stats = "",
    calibration: CalibrationText = "",
    samples: Samples = 100,
    length: CalibrationLength = 256,
    seed: Seed = 0,
    evaluate: Evaluate = True,
    data: EvalData = "",
    max_tokens: MaxTokens = 16_384,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Take experts out of a mixture of experts; the result loads wherever the original does."""
    given: dict[str, Any] = {
        "keep": keep,
        "criterion": criterion,
        "progressive": progressive,
        "uniform": not non_uniform,
        "padding": padding,
        "seed": seed,
        **options(option),
    }
    recipe = Recipe(
        model=model,
        out=str(out),
        steps=(step_config("prune", given),),
        calibration=Calibration(calibration, samples, length, seed, stats),
        evaluation=Evaluation(data, max_tokens=max_tokens, compare=tuple(compare or ()))
        if evaluate
        else None,
        device=device,
        dtype=dtype,
    )
    carry_out(recipe, overwrite, resume, as_json)


@app.command(epilog=example("moesaic skip tiny-moe out --quantile 0.5"))
def skip(
    model: Model,
    out: Out,
    quantile: Annotated[
        float, typer.Option(help="Of the ratio beta compares; 0.5 is the paper's median.")
    ] = 0.5,
    calls: Annotated[
        float | None, typer.Option(help="Mean experts a token should run, instead.")
    ] = None,
    rule: Annotated[str, typer.Option(help="auto, top2 or tail.")] = "auto",
    stats: Stats = "",
    calibration: CalibrationText = "",
    samples: Samples = 100,
    length: CalibrationLength = 256,
    seed: Seed = 0,
    evaluate: Evaluate = True,
    data: EvalData = "",
    max_tokens: MaxTokens = 16_384,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Let tokens leave out experts of little weight; beta is calibrated on MODEL as it is."""
    given = {"quantile": quantile, "calls": calls, "rule": rule}
    recipe = Recipe(
        model=model,
        out=str(out),
        steps=(step_config("skip", given),),
        calibration=Calibration(calibration, samples, length, seed, stats),
        evaluation=Evaluation(data, max_tokens=max_tokens) if evaluate else None,
        device=device,
        dtype=dtype,
    )
    carry_out(recipe, overwrite, resume, as_json)


@app.command(epilog=example("moesaic observe tiny-moe tiny-moe.stats"))
def observe(
    model: Model,
    stats: Annotated[Path, typer.Argument(metavar="STATS", help="The file to make.")],
    merge: Annotated[
        list[Path] | None,
        typer.Option(help="Merge this file of the same model in; MODEL is not run. Repeatable."),
    ] = None,
    calibration: CalibrationText = "",
    samples: Samples = 100,
    length: CalibrationLength = 256,
    seed: Seed = 0,
    gram_mb: Annotated[
        int, typer.Option(min=0, help="MB a layer for reconstruction; 0 leaves that out.")
    ] = 256,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Observe a mixture of experts once; prune and skip then decide in seconds with --stats."""
    if merge:
        if stats.exists() and not overwrite:
            raise MoesaicError(f"{stats} exists. Choose another name or pass --overwrite.")
        merge_files(merge, stats)
    else:
        reduction.observe(
            model,
            stats,
            calibration=calibration,
            samples=samples,
            length=length,
            seed=seed,
            gram_mb=gram_mb,
            device=check_device(device),
            dtype=parse_dtype(dtype),
            overwrite=overwrite,
            resume=resume,
            track=bars,
        )
    if process()[0]:
        return
    header = StatsFile(stats).header
    figures = {"stats": str(stats), "bytes": stats.stat().st_size, "layers": header["layers"]}
    emit(as_json, figures, f"Statistics of {len(header['layers'])} layers in {stats}")


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


@app.command("run", epilog=example("moesaic run recipes/more-llama-3.1-8b.yaml out=my-folder"))
def run_file(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="A recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Places to change.")
    ] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Carry out a recipe, one complete run."""
    carry_out(load_recipe(recipe, overrides or ()), overwrite, resume, as_json)


@app.command(epilog=example("moesaic demo --out moesaic-demo"))
def demo(
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("moesaic-demo"),
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """The whole story on SmolLM2-135M: carve it, and show what that cost."""
    recipe = Recipe(
        model="smollm2",
        out=str(out),
        steps=(MoREConfig(),),
        evaluation=Evaluation(compare=("static",)),
    )
    carry_out(recipe, overwrite, overwrite, as_json)


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


@app.command(epilog=example("moesaic apply smollm2 out/plan.json rebuilt"))
def apply(
    base: Annotated[str, typer.Argument(metavar="BASE", help=MODELS)],
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json or its folder.")],
    out: Out,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild a result from its base and its plan."""
    run.apply(base, plan, out, overwrite)
    emit(as_json, {"out": str(out)}, f"Checkpoint in {out}")


@app.command(epilog=example("moesaic export out out-native --to native"))
def export(
    model: Model,
    out: Out,
    to: Annotated[str, typer.Option(help="native (a checkpoint) or gguf (a file).")] = "native",
    target: Annotated[
        str, typer.Option(help="The architecture; default: the one with the least to compute.")
    ] = "",
    ep: Annotated[
        int, typer.Option(min=1, help="Expert-parallel size that the experts must divide by.")
    ] = 1,
    untie: Annotated[
        bool, typer.Option("--untie", help="Write the head as a tensor of its own, for SGLang.")
    ] = False,
    type: Annotated[str, typer.Option(help=f"Of a GGUF's weights: {', '.join(TYPES)}.")] = "f32",
    converter: Annotated[
        Path | None, typer.Option(help="llama.cpp, or its convert_hf_to_gguf.py; or $LLAMA_CPP.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a model for transformers, vLLM, SGLang or llama.cpp: exact, or refused."""
    given: dict[str, Any] = {"target": target, "ep": ep, "untie": untie, "overwrite": overwrite}
    if to == "gguf":
        given |= {"type": type, "converter": converter}
    record = exporting.export(model, out, to, **given)
    emit(as_json, record, exported(record))


def exported(record: dict[str, Any]) -> Table:
    """What was written, what it cost, and who loads it."""
    table = Table(show_header=False)
    for name in ("out", "model_type", "type", "bytes", "largest_difference"):
        if name in record:
            table.add_row(name.replace("_", " "), _figure(record[name]))
    for name, (before, after) in record.get("costs", {}).items():
        more = "" if after == before else f", {after / before - 1:+.1%}"
        table.add_row(name.replace("_", " "), f"{before:,} -> {after:,}{more}")
    for engine, lacks in record.get("engines", {}).items():
        table.add_row(
            engine, "lacks " + "; lacks ".join(lacks) if lacks else "limits met, not run here"
        )
    return table


@app.command("report", epilog=example("moesaic report out-0.8 out-0.7 --out compare.html"))
def write_report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Result folders.")],
    out: Annotated[Path, typer.Option(help="The HTML file to make.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """One HTML file about one or more results."""
    records = []
    for folder in runs:
        file = folder / "result.json" if folder.is_dir() else folder
        try:
            records.append(json.loads(file.read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise MoesaicError(f"{folder} has no readable result.json: {error}") from error
    out.write_text(report.html(records), "utf-8")
    emit(as_json, {"report": str(out)}, f"Report in {out}")


def columns(figures: dict[str, dict[str, Any]]) -> Table:
    """Figures as rows, models as columns."""
    table = Table()
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")
    keys = dict.fromkeys(key for column in figures.values() for key in column)
    for key in keys:
        label = key.replace("_", " ")
        table.add_row(label, *(_figure(column.get(key)) for column in figures.values()))
    return table


def _figure(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return " - ".join(_figure(v) for v in value)
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- errors --------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@contextmanager
def explained() -> Iterator[None]:
    """Turn exceptions into one message and an exit code: 2 the request, 1 ourselves."""
    try:
        yield
    except MoesaicError as error:
        fail(str(error), 2)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if os.environ.get("MOESAIC_DEBUG"):
            raise
        if disk_full(error):
            fail(f"The disk is full ({error}). OUT was not made; free space, then --resume.", 2)
        if type(error).__name__ == "OutOfMemoryError":
            fail("Out of memory on the device; try --device cpu or a narrower --dtype.", 1)
        fail(
            f"{type(error).__name__}: {error}\n"
            "This is a fault of moesaic, not of your request; MOESAIC_DEBUG=1 shows where.",
            1,
        )


def fail(message: str, code: int) -> NoReturn:
    """Say what is wrong on stderr and leave."""
    err_console.print(f"[bold red]Error:[/bold red] {message}", highlight=False, soft_wrap=True)
    sys.exit(code)


def quiet_libraries() -> None:
    """Keep other libraries' bars and notices out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main() -> None:
    """Entry point of the ``moesaic`` command."""
    quiet_libraries()
    with explained():
        join_processes()
        app()


if __name__ == "__main__":
    main()
