"""The commands that work on what others left: recipes, plans, reports, exports."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.commands import (
    carry_out,
    emit,
    figure,
    register,
)
from moesaic.cli.options import (
    AsJson,
    DryRun,
    Model,
    Out,
    Overwrite,
    Push,
    Resume,
    Value,
    option,
)
from moesaic.config import ExportArgs, form_of
from moesaic.errors import MoesaicError
from moesaic.io.headers import ODD, mapping_of
from moesaic.io.layout import RECORD, placed
from moesaic.io.names import check_name
from moesaic.io.outputs import (
    GGUF,
    check_drawing,
    check_file,
    check_out,
    write_drawing,
)
from moesaic.recipe import load_recipe, plain_values
from moesaic.types import JSON, at_home

if TYPE_CHECKING:
    from rich.table import Table

    from moesaic.record import Record


def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="A recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Places to change.")
    ] = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    push: Push = "",
    as_json: AsJson = False,
) -> None:
    """Carry out a recipe, one complete run."""
    loaded = load_recipe(recipe, overrides or ())
    carry_out(loaded, overwrite, resume, as_json, dry_run, push)


def apply(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[BASE] PLAN OUT",
            help="A model, without it the one that the plan names; a result's folder or "
            "its plan.json; the folder to make.",
            show_default=False,
        ),
    ],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild a result from its base and its plan."""
    if not 2 <= len(places) <= 3:
        raise MoesaicError(f"apply takes [BASE] PLAN OUT; got {len(places)} of them.")
    *bases, plan, out = map(at_home, places)
    for base in bases:
        check_name(base)
    check_out(Path(out), overwrite, [*bases, plan])
    if not Path(plan).exists():
        raise MoesaicError(f"No plan at {plan}.")
    from moesaic import pipeline

    pipeline.apply(bases[0] if bases else "", plan, out, overwrite)
    emit(as_json, {"out": out}, f"Checkpoint in {out}")


def export(
    model: Model,
    out: Out,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    **options: Value,
) -> None:
    """Write a model for transformers, vLLM, SGLang or llama.cpp: exact, or refused."""
    options = {"to": form_of(out), **plain_values(ExportArgs, options)}
    args = ExportArgs(**options)  # before anything slow is imported
    check_name(model)
    if args.to == "gguf":
        check_file(out, GGUF, overwrite, [model])
    else:
        check_out(out, overwrite, [model])
    from moesaic.bars import bars
    from moesaic.exports import export

    record = export(model, out, overwrite=overwrite, progress=bars, **options)
    emit(as_json, record, exported(record))


def exported(record: JSON) -> Table:
    """What was written and what it cost."""
    from rich.table import Table

    from moesaic.report.numbers import memory

    table = Table(show_header=False)
    differences = ("largest_difference", "mean_difference", "same_next_token")
    for name in ("out", "model_type", "type", "bytes", "exact", *differences):
        if name in record:
            written = memory(record[name]) if name == "bytes" else figure(record[name])
            table.add_row(name.replace("_", " "), written)
    for name, weights in record.get("types", {}).items():
        table.add_row(f"weights in {name}", figure(weights))
    for name, (before, after) in record.get("costs", {}).items():
        more = "" if after == before else f", {after / before - 1:+.1%}"
        table.add_row(name.replace("_", " "), f"{before:,} -> {after:,}{more}")
    return table


def _record_of(run: Path) -> Record:
    """What is known of a run, by its folder or by its ``result.json``.

    Raises:
        MoesaicError: it cannot be read.
    """
    from moesaic.io.trust import check_links
    from moesaic.record import Record

    if not run.exists():
        raise MoesaicError(f"No run at {run}: give the folder that a command made.")
    if run.is_dir():
        check_links(run)
    file = placed(run, RECORD) if run.is_dir() else run
    if not file.exists():
        raise MoesaicError(f"{run} has no result.json: give the folder that a command made.")
    try:
        return Record.from_json(mapping_of(file))
    except (ValueError, MoesaicError) as error:
        raise MoesaicError(f"{run} has no readable result.json: {error}") from error


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Result folders.")],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The .html page to make, or the frontier alone as .svg."),
    ] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """One page about one or more results: what is lost, what is saved, layer by layer."""
    check_drawing(out, ".html", ".svg")
    records = [_record_of(folder) for folder in runs]
    from jinja2 import TemplateError

    from moesaic import report

    try:
        page = (report.frontier_picture if out.suffix == ".svg" else report.html)(records)
    except (*ODD, TemplateError) as error:  # files are anybody's
        raise MoesaicError(
            f"{RECORD} holds figures that no run leaves, and cannot be drawn "
            f"({type(error).__name__}: {error})."
        ) from error
    if not page:
        raise MoesaicError("An .svg needs three measured models; these runs have fewer.")
    write_drawing(out, page)
    emit(as_json, {"report": str(out)}, f"Report in {out}")


def architectures(as_json: AsJson = False) -> None:
    """Model types that are supported, and those that are not, with the reason."""
    from moesaic.arch.tried import tried

    outcomes = tried()
    lines = [f"With transformers {outcomes['transformers']}:"]
    titles = ("mixtures of experts", "dense models", "multimodal models")
    for kind, words in zip(("moe", "dense", "beside"), titles, strict=True):
        lines.append(f"\n{len(outcomes[kind])} {words}\n{', '.join(outcomes[kind])}")
    lines.append(f"\n{len(outcomes['unsupported'])} not supported")
    lines += [f"{name}: {reason}" for name, reason in outcomes["unsupported"].items()]
    emit(as_json, outcomes, "\n".join(lines))


def commands() -> None:
    """Make these commands."""
    register("run", run, "moesaic run recipes/more-llama-3.1-8b.yaml out=my-folder")
    register("apply", apply, "moesaic apply smollm2 out rebuilt")
    form = [option(ExportArgs, field.name) for field in fields(ExportArgs)]
    register("export", export, "moesaic export out out-native --to native", form)
    register("report", report, "moesaic report out-0.8 out-0.7 --out compare.html")
    register("architectures", architectures, "moesaic architectures --json")
