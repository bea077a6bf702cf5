"""The commands that work on what others left: recipes, plans, reports, exports."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.options import MODELS, AsJson, Model, Out, Overwrite, Resume, Value, option
from moesaic.cli.shared import carry_out, emit, figure, register
from moesaic.config import Evaluation, ExportArgs
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON
from moesaic.io.names import check_name, check_out
from moesaic.recipe import Recipe, load_recipe, step_config

if TYPE_CHECKING:
    from rich.table import Table


def run(
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


def demo(
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("moesaic-demo"),
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """The whole story on SmolLM2-135M: carve it, and show what that cost."""
    recipe = Recipe(
        model="smollm2",
        out=str(out),
        steps=(step_config("carve", {}),),
        evaluation=Evaluation(compare=("static",)),
    )
    carry_out(recipe, overwrite, overwrite, as_json)


def apply(
    base: Annotated[str, typer.Argument(metavar="BASE", help=MODELS)],
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json or its folder.")],
    out: Out,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild a result from its base and its plan."""
    check_name(base)
    check_out(out, overwrite)
    if not plan.exists():
        raise MoesaicError(f"No plan at {plan}.")
    from moesaic import pipeline

    pipeline.apply(base, plan, out, overwrite)
    emit(as_json, {"out": str(out)}, f"Checkpoint in {out}")


def export(
    model: Model,
    out: Out,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    **given: Value,
) -> None:
    """Write a model for transformers, vLLM, SGLang or llama.cpp: exact, or refused."""
    asked = ExportArgs(**given)  # before anything slow is imported
    check_name(model)
    if asked.to == "native" or not out.is_file() or not overwrite:
        check_out(out, overwrite)
    from moesaic.exports import export

    record = export(model, out, overwrite=overwrite, **given)
    emit(as_json, record, exported(record))


def exported(record: JSON) -> Table:
    """What was written, what it cost, and who loads it."""
    from rich.table import Table

    table = Table(show_header=False)
    differences = ("largest_difference", "mean_difference", "same_next_token")
    for name in ("out", "model_type", "type", "bytes", "exact", *differences):
        if name in record:
            table.add_row(name.replace("_", " "), figure(record[name]))
    for name, (before, after) in record.get("costs", {}).items():
        more = "" if after == before else f", {after / before - 1:+.1%}"
        table.add_row(name.replace("_", " "), f"{before:,} -> {after:,}{more}")
    for engine, lacks in record.get("engines", {}).items():
        table.add_row(
            engine, "lacks " + "; lacks ".join(lacks) if lacks else "limits met, not run here"
        )
    return table


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Result folders.")],
    out: Annotated[Path, typer.Option(help="The HTML file to make.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """One HTML file about one or more results."""
    from moesaic.io.headers import mapping_of
    from moesaic.record import Record

    records = []
    for folder in runs:
        file = folder / "result.json" if folder.is_dir() else folder
        try:
            records.append(Record.from_json(mapping_of(file)))
        except (ValueError, MoesaicError) as error:
            raise MoesaicError(f"{folder} has no readable result.json: {error}") from error
    from moesaic import report

    out.write_text(report.html(records), "utf-8")
    emit(as_json, {"report": str(out)}, f"Report in {out}")


def architectures(as_json: AsJson = False) -> None:
    """Model types that are supported, and those that are not, with the reason."""
    from moesaic.arch.tried import tried

    found = tried()
    lines = [f"With transformers {found['transformers']}:"]
    for kind, words in (("moe", "mixtures of experts"), ("dense", "dense models")):
        lines.append(f"\n{len(found[kind])} {words}\n{', '.join(found[kind])}")
    lines.append(f"\n{len(found['unsupported'])} not supported")
    lines += [f"{name}: {reason}" for name, reason in found["unsupported"].items()]
    emit(as_json, found, "\n".join(lines))


def commands() -> None:
    """Make these commands."""
    register("run", run, "moesaic run recipes/more-llama-3.1-8b.yaml out=my-folder")
    register("demo", demo, "moesaic demo --out moesaic-demo")
    register("apply", apply, "moesaic apply smollm2 out/plan.json rebuilt")
    form = [option(ExportArgs, of.name) for of in fields(ExportArgs)]
    register("export", export, "moesaic export out out-native --to native", form)
    register("report", report, "moesaic report out-0.8 out-0.7 --out compare.html")
    register("architectures", architectures, "moesaic architectures --json")
