"""The commands that work on results: exports and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli import options as given
from moesaic.cli.commands import emit, figure, print_start, register
from moesaic.config import ExportArgs, form_of
from moesaic.errors import MoesaicError
from moesaic.io.names import RECORD, check_name, placed
from moesaic.io.outputs import DRAWING, GGUF, check_file, check_out, marked, whole_file
from moesaic.io.trust import ODD, mapping_of
from moesaic.types import JSON

if TYPE_CHECKING:
    from rich.table import Table

    from moesaic.record import Record


def export(model: str, out: Path, overwrite: bool, as_json: bool, **options: Any) -> None:
    """Write a model for transformers, vLLM, SGLang or llama.cpp: exact, or refused."""
    chosen = given.read(
        ExportArgs, {**options, "to": form_of(out, options.get("to", ""))}
    )  # before anything slow is imported
    check_name(model)
    if chosen["to"] == "gguf":
        check_file(out, GGUF, overwrite, [model])
    else:
        check_out(out, overwrite, [model])
    print_start(model)
    from moesaic.bars import bars
    from moesaic.exports import export

    record = export(model, out, overwrite=overwrite, progress=bars, **chosen)
    emit(as_json, record, exported(record))


def exported(record: JSON) -> Table:
    """Return a table of what was written and what it cost."""
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
    """Return what is known of a run, by its folder or by its ``result.json``.

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


def report(runs: Sequence[Path], out: Path, as_json: bool) -> None:
    """Draw one page about one or more results: what is lost, what is saved, layer by layer."""
    if out.suffix not in (".html", ".svg"):
        raise MoesaicError(f"{out}: the name of what is drawn ends in .html or .svg.")
    check_file(out, DRAWING, overwrite=True)
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
    with whole_file(out) as partial:
        partial.write_text(marked(page), "utf-8")
    emit(as_json, {"report": str(out)}, f"Report in {out}")


def commands() -> None:
    """Make these commands."""
    out = given.Argument("out", "The folder to make, or the .gguf file.", type=given.PATH)
    form = [given.option(ExportArgs, field.name) for field in fields(ExportArgs)]
    example = "moesaic export out out-native --to native"
    register("export", export, example, [given.MODEL, out, *form, given.OVERWRITE, given.AS_JSON])
    runs = given.Argument(
        "runs", "Result folders.", "RUN...", nargs=-1, type=given.PATH, required=True
    )
    help = "The .html page to make, or the frontier alone as .svg. Default: report.html."
    page = given.Option("--out", help, metavar="FILE", type=given.PATH, default="report.html")
    example = "moesaic report out-0.8 out-0.7 --out compare.html"
    register("report", report, example, [runs, page, given.AS_JSON])
