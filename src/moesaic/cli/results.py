"""The commands that work on what others left: recipes, plans, reports, exports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.commands import (
    carried_out,
    carry_out,
    emit,
    figure,
    register,
    show_page,
    tell,
)
from moesaic.cli.options import (
    AsJson,
    DryRun,
    Model,
    Out,
    Overwrite,
    Push,
    PushPlan,
    Resume,
    Value,
    option,
)
from moesaic.config import ROUNDED, Calibration, Evaluation, ExportArgs
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, at_home
from moesaic.io.layout import PAGE, RECIPE, RECORD, placed
from moesaic.io.names import check_name
from moesaic.io.outputs import (
    GGUF,
    check_drawing,
    check_file,
    check_free,
    check_out,
    write_drawing,
)
from moesaic.recipe import Recipe, check_run, load_recipe, plain_values, step_config

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
    push_plan: PushPlan = False,
    as_json: AsJson = False,
) -> None:
    """Carry out a recipe, one complete run."""
    loaded = load_recipe(recipe, overrides or ())
    carry_out(loaded, overwrite, resume, as_json, dry_run, push, push_plan)


FASTER: JSON = {"method": "wina", "active": 0.8, "gradients": True, "gradient_tokens": 1024}
HALF: JSON = {"keep": 0.5, "score": "surgeon", "refit": True}
DEMO: Mapping[str, tuple[str, str, JSON, Evaluation]] = {
    "mixture": (
        "tiny-moe", "slim", HALF, Evaluation(max_tokens=4096, baselines=("q8_0", "q4_0")),
    ),
    "dense": ("smollm2", "carve", FASTER, Evaluation(max_tokens=2048, baselines=("q8_0",))),
}  # fmt: skip
"""By its folder, each half of the demonstration: the model, the verb, its options, and how it is
measured, beside what a user would take instead."""
SHOWN = Calibration(samples=32)
"""Text of the demonstration."""


def demo(
    out: Annotated[Path, typer.Option(metavar="OUT", help="The folder to make.")] = Path(
        "moesaic-demo"
    ),
    overwrite: Overwrite = False,
    resume: Resume = False,
    page: Annotated[bool, typer.Option("--page", help="Open the page in the browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild a mixture and a dense model (SmolLM2-135M); what each cost and brought."""
    halves = {
        name: Recipe(model, str(out / name), (step_config(verb, options),), SHOWN, measured)
        for name, (model, verb, options, measured) in DEMO.items()
    }
    finished = {
        name: _record_of(out / name) for name, r in halves.items() if resume and _is_whole(r)
    }
    remaining = {name: recipe for name, recipe in halves.items() if name not in finished}
    for recipe in remaining.values():
        check_run(recipe, overwrite=overwrite, resume=resume)
    check_free(out, overwrite or resume)
    check_drawing(out / PAGE, ".html")
    warn_of_company()
    fresh = {name: carried_out(recipe, overwrite, resume) for name, recipe in remaining.items()}
    records = {name: record for name in halves if (record := {**finished, **fresh}[name])}
    if len(records) < len(halves):  # another process wrote the results, and goes on
        return
    from rich.console import Group

    from moesaic import report

    file = out / PAGE
    write_drawing(file, report.html([*records.values()]))
    tables = [report.terminal(record) for record in records.values()]
    summary = f"Checkpoints in {out}, both runs on one page in {file}"
    shown = {name: record.output() for name, record in records.items()}
    if mixture := records.get("mixture"):
        engine = shown["llama.cpp"] = in_llama_cpp(out / "mixture", mixture)
        if not engine:
            summary += "\nNot opened in llama.cpp: that needs LLAMA_CPP and llama-cpp-python"
        else:
            text = "the same text as" if engine["same_text"] else "another text than"
            summary += f"\nllama.cpp opens {engine['out']} and writes {text} transformers"
    emit(as_json, shown, Group(*tables, summary))
    if page:
        show_page(file)


def in_llama_cpp(folder: Path, record: Record) -> JSON:
    """A result's file in float16 for llama.cpp, and how it continues the prompt there.

    Returns:
        ``out``, ``bytes``, ``text``, and whether it is transformers' ``same_text``; without
        llama.cpp nothing.
    """
    from moesaic.exports import export
    from moesaic.exports.llamacpp import find_converter
    from moesaic.io.source import resolve
    from moesaic.metrics.generations import until
    from moesaic.metrics.gguf_engine import Engine, library

    try:
        find_converter()
        library()
    except MoesaicError:
        return {}
    file = folder.with_suffix(".gguf")
    written = export(str(folder), file, to="gguf", type="f16", overwrite=True, progress=False)
    tokenizer, settings = resolve(str(folder)).tokenizer, Evaluation()
    ids = tokenizer(settings.prompt, return_tensors="pt")["input_ids"][0]
    with Engine(file, len(ids) + settings.new_tokens) as engine:
        tokens = until(engine.greedy(ids, settings.new_tokens), {tokenizer.eos_token_id})
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    same = text == record.measured["generation"]["result"]
    return {"out": str(file), "bytes": written["bytes"], "text": text, "same_text": same}


def warn_of_company() -> None:
    """Say that other programs take the processors, if they do: threads then wait for each other."""
    import psutil

    if psutil.getloadavg()[0] > (psutil.cpu_count() or 1) / 2:
        from moesaic.bars import err_console

        err_console.print(
            "Other programs keep this machine busy: this may take several times as long, and the "
            "speeds it shows are less sure. With OMP_NUM_THREADS=1 it waits less."
        )


def _is_whole(recipe: Recipe) -> bool:
    """Whether a recipe's result is there."""
    file = placed(Path(recipe.out), RECIPE)
    return file.is_file() and file.read_text("utf-8") == recipe.to_yaml()


def apply(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[BASE] PLAN OUT",
            help="A model, without it the one that the plan names; a result's folder, its "
            "plan.json, or the hub id it was pushed to; the folder to make.",
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
    if not Path(plan).exists() and (plan.startswith((".", "/", "~")) or plan.count("/") != 1):
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
    options = plain_values(ExportArgs, options)
    args = ExportArgs(**options)  # before anything slow is imported
    check_name(model)
    if args.to == "gguf":
        check_file(out, GGUF, overwrite, [model])
    else:
        check_out(out, overwrite, [model])
    from moesaic.bars import bars
    from moesaic.exports import export

    if args.memory is not None:
        from moesaic.estimates import notice_of_choosing

        tell(notice_of_choosing(model, args.among))
    record = export(model, out, overwrite=overwrite, progress=bars, **options)
    emit(as_json, record, exported(record))


def exported(record: JSON) -> Table:
    """What was written, what it cost, and who loads it."""
    from rich.table import Table

    table = Table(show_header=False)
    differences = ("largest_difference", "mean_difference", "same_next_token")
    for name in ("out", "model_type", "type", "bytes", "exact", *differences, "trust_remote_code"):
        if name in record:
            table.add_row(name.replace("_", " "), figure(record[name]))
    for name, weights in record.get("types", {}).items():
        table.add_row(f"weights in {name}", figure(weights))
    for name, (before, after) in record.get("costs", {}).items():
        more = "" if after == before else f", {after / before - 1:+.1%}"
        table.add_row(name.replace("_", " "), f"{before:,} -> {after:,}{more}")
    for engine, lacks in record.get("engines", {}).items():
        table.add_row(
            engine, "lacks " + "; lacks ".join(lacks) if lacks else "limits met, not run here"
        )
    return table


def _record_of(run: Path) -> Record:
    """What is known of a run, by its folder or by its ``result.json``.

    Raises:
        MoesaicError: it cannot be read.
    """
    from moesaic.io.headers import mapping_of
    from moesaic.record import Record

    if not run.exists():
        raise MoesaicError(f"No run at {run}: give the folder that a command made.")
    file = placed(run, RECORD) if run.is_dir() else run
    if not file.exists():
        raise MoesaicError(f"{run} has no result.json: give the folder that a command made.")
    try:
        return Record.from_json(mapping_of(file))
    except (ValueError, MoesaicError) as error:
        raise MoesaicError(f"{run} has no readable result.json: {error}") from error


SAVED = ("disk", "bytes", "active", "decode", "prefill", "memory")
LOST = ("perplexity", "kl", "agreement", "tasks")
"""Axes of the frontier."""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Result folders.")],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The .html page to make, or the frontier alone as .svg."),
    ] = Path("report.html"),
    saved: Annotated[
        str, typer.Option(metavar="AXIS", help=f"Drawn first across: {', '.join(SAVED)}.")
    ] = "",
    lost: Annotated[
        str, typer.Option(metavar="AXIS", help=f"Drawn first upwards: {', '.join(LOST)}.")
    ] = "",
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            metavar="TYPE",
            help=f"Also measure each original rounded to this type, of {', '.join(ROUNDED)}, on "
            "its first run's text. Repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One page about one or more results: what is lost, what is saved, layer by layer."""
    for axis, key, axes in (("saved", saved, SAVED), ("lost", lost, LOST)):
        if key and key not in axes:
            raise MoesaicError(f"{axis} {key!r} is not known; known: {', '.join(axes)}.")
    types = Evaluation(baselines=tuple(baselines or ())).baselines  # or says which there are
    check_drawing(out, ".html", ".svg")
    records = [_record_of(folder) for folder in runs]
    if types:
        records = _beside_rounding(runs, records, types)
    from moesaic import report
    from moesaic.report.frontier import measured

    first = [key for key in (saved, lost) if key]
    try:
        known = measured(records) if first else set()
        for axis, key, axes in (("saved", saved, SAVED), ("lost", lost, LOST)):
            if key and key not in known:
                there = ", ".join(name for name in axes if name in known) or "none"
                raise MoesaicError(
                    f"{axis} {key!r} was not measured in these runs; known: {there}."
                )
        page = (report.frontier_picture if out.suffix == ".svg" else report.html)(records, first)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # files are anybody's
        raise MoesaicError(
            f"{RECORD} holds figures that no run leaves, and cannot be drawn "
            f"({type(error).__name__}: {error})."
        ) from error
    if not page:
        raise MoesaicError("An .svg needs three measured models; these runs have fewer.")
    write_drawing(out, page)
    emit(as_json, {"report": str(out)}, f"Report in {out}")


def _beside_rounding(
    runs: Sequence[Path], records: Sequence[Record], types: Sequence[str]
) -> list[Record]:
    """The records, the first of each original with it rounded to some types."""
    from moesaic.bars import bars
    from moesaic.pipeline import with_baselines

    originals, updated = set[str](), []
    for run, record in zip(runs, records, strict=True):
        if record.model not in originals:
            file = placed(run, RECIPE) if run.is_dir() else run.with_name(RECIPE)
            record = with_baselines(load_recipe(file), record, types, bars)
        originals.add(record.model)
        updated.append(record)
    return updated


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
    register("demo", demo, "moesaic demo --out moesaic-demo")
    register("apply", apply, "moesaic apply smollm2 out rebuilt")
    form = [option(ExportArgs, field.name) for field in fields(ExportArgs)]
    register("export", export, "moesaic export out out-native --to native", form)
    register("report", report, "moesaic report out-0.8 out-0.7 --out compare.html")
    register("architectures", architectures, "moesaic architectures --json")
