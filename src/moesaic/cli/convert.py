"""The commands that make a model of a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic import reduction
from moesaic.cli.bars import bars
from moesaic.cli.options import (
    AsJson,
    Bundle,
    CalibrationLength,
    CalibrationOptions,
    Device,
    Dtype,
    Model,
    Out,
    Overwrite,
    Refit,
    Resume,
    RunOptions,
    Seed,
    Stats,
    grouped,
    options,
    said,
)
from moesaic.cli.shared import app, emit, example
from moesaic.errors import MoesaicError
from moesaic.measure import check_device, parse_bytes, parse_dtype
from moesaic.methods import STEPS
from moesaic.methods.naee import CRITERIA
from moesaic.recipe import step_config
from moesaic.statistics import StatsFile, merge_files, process


@dataclass(frozen=True)
class LongCalibration(CalibrationOptions):
    """Condensing looks at longer windows."""

    length: CalibrationLength = 512


@dataclass(frozen=True)
class TuneOptions(RunOptions):
    """Where --data is the text to train on."""

    data: Annotated[
        str, typer.Option("--eval-data", help="Text to measure on. Default: ships.")
    ] = ""


@app.command(epilog=example("moesaic carve smollm2 out --active 0.8 --experts 4"))
@grouped
def carve(
    model: Model,
    out: Out,
    *,
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
    top_k: Annotated[
        int | None, typer.Option(help="Petals a token runs; more: 1; 0 solves for it.")
    ] = None,
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
    recipe: Bundle = None,
    router: Annotated[
        str | None,
        typer.Option(
            help="more: cosine, or fitted in closed form: ridge, backbone. To train it: tune."
        ),
    ] = None,
    refit: Refit = None,
    bias: Annotated[
        bool | None, typer.Option("--bias", help="more: an output bias for each petal.")
    ] = None,
    propagate: Annotated[
        bool | None,
        typer.Option("--propagate", help="more: refit on what the converted layers pass on."),
    ] = None,
    spread: Annotated[
        str | None,
        typer.Option(help="more: uniform, or sensitivity: wider layers where more would be lost."),
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
    text: CalibrationOptions,
    rest: RunOptions,
) -> None:
    """Turn a dense model into a mixture of experts."""
    given = said(
        active=active,
        experts=experts,
        top_k=top_k,
        layers=layers,
        variant=variant,
        steps=steps,
        materialize=materialize,
        recipe=recipe,
        router=router,
        refit=refit,
        bias=bias,
        propagate=propagate,
        spread=spread,
    )
    given |= {"method": method, "seed": text.seed, **options(option)}
    rest.carry_out(model, out, step_config("carve", given), text.drawn(), compare)


@app.command(epilog=example("moesaic condense tiny-shared-moe out --layers 2"))
@grouped
def condense(
    model: Model,
    out: Out,
    *,
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
    recipe: Bundle = None,
    refit: Refit = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Also measure with this many of the layers condensed. Repeatable."),
    ] = None,
    text: LongCalibration,
    rest: RunOptions,
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
        **said(recipe=recipe, refit=refit),
        "seed": text.seed,
    }
    rest.carry_out(model, out, step_config("condense", given), text.drawn(), compare)


@app.command(epilog=example("moesaic tune out tuned --data text.jsonl --what condensed"))
@grouped
def tune(
    model: Model,
    out: Out,
    *,
    text: Annotated[
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
    rest: TuneOptions,
) -> None:
    """Train a converted model a little. Runs under accelerate launch."""
    given = {
        "what": what,
        "data": text,
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
    rest.carry_out(model, out, step_config("tune", given))


@app.command(epilog=example("moesaic prune tiny-moe out --keep 6 --criterion reconstruction"))
@grouped
def prune(
    model: Model,
    out: Out,
    *,
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
    recipe: Bundle = None,
    refit: Refit = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Also measure this criterion at the same size. Repeatable."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="key=value: any other option of the method's config."),
    ] = None,
    stats: Stats = "",
    text: CalibrationOptions,
    rest: RunOptions,
) -> None:
    """Take experts out of a mixture of experts; the result loads wherever the original does."""
    given: dict[str, Any] = {
        "keep": keep,
        "criterion": criterion,
        "progressive": progressive,
        "uniform": not non_uniform,
        "padding": padding,
        **said(recipe=recipe, refit=refit),
        "seed": text.seed,
        **options(option),
    }
    rest.carry_out(model, out, step_config("prune", given), text.drawn(stats), compare)


@app.command(epilog=example("moesaic skip tiny-moe out --quantile 0.5"))
@grouped
def skip(
    model: Model,
    out: Out,
    *,
    quantile: Annotated[
        float, typer.Option(help="Of the ratio beta compares; 0.5 is the paper's median.")
    ] = 0.5,
    calls: Annotated[
        float | None, typer.Option(help="Mean experts a token should run, instead.")
    ] = None,
    rule: Annotated[str, typer.Option(help="auto, top2 or tail.")] = "auto",
    stats: Stats = "",
    text: CalibrationOptions,
    rest: RunOptions,
) -> None:
    """Let tokens leave out experts of little weight; beta is calibrated on MODEL as it is."""
    given = {"quantile": quantile, "calls": calls, "rule": rule}
    rest.carry_out(model, out, step_config("skip", given), text.drawn(stats))


@app.command(epilog=example("moesaic observe tiny-moe tiny-moe.stats"))
@grouped
def observe(
    model: Model,
    stats: Annotated[Path, typer.Argument(metavar="STATS", help="The file to make.")],
    *,
    merge: Annotated[
        list[Path] | None,
        typer.Option(help="Merge this file of the same model in; MODEL is not run. Repeatable."),
    ] = None,
    gram_mb: Annotated[
        int, typer.Option(min=0, help="MB a layer for reconstruction; 0 leaves that out.")
    ] = 256,
    text: CalibrationOptions,
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
            **asdict(text),
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
