"""Commands that measure, inspect, generate, export and draw reports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli import options as given
from moesaic.cli.commands import emit, print_start, register, shown_figure
from moesaic.config import Bench, Evaluation, ExportArgs, form_of
from moesaic.data.sources import wanted_tasks
from moesaic.errors import MoesaicError
from moesaic.io.names import RECORD, check_name, our_path
from moesaic.io.outputs import DRAWING, GGUF, check_out, check_out_file, mark_drawn, whole_file
from moesaic.io.trust import ODD, mapping_of
from moesaic.types import JSON

if TYPE_CHECKING:
    from rich.table import Table

    from moesaic.record import Record


def evaluate(model: str, against: str | None, card: bool, as_json: bool, **options: Any) -> None:
    """Measure KL, perplexity, size and tasks of any checkpoint beside its original."""
    for name in (model, against or model):
        check_name(name)
    chosen = given.read(Evaluation, options)  # before anything slow is imported
    evaluation = Evaluation(**chosen)
    if not against and (card or evaluation.baselines):
        raise MoesaicError(f"--{'card' if card else 'baseline'} needs --against ORIGINAL.")
    wanted_tasks(evaluation.tasks, evaluation.shots, evaluation.limit)
    settings = {**chosen, **given.device_and_dtype(options)}
    print_start(model)
    from rich.console import Group

    from moesaic.distributed import process
    from moesaic.metrics.evaluate import evaluate
    from moesaic.progress import bars

    result = evaluate(model, against=against, **settings, progress=bars).as_json()
    if process()[0]:  # the first process prints what all have measured
        return
    figures = {**result, "max_tokens": evaluation.max_tokens or None}
    from moesaic import report

    record = _eval_record(model, against, figures, evaluation)
    if card and not as_json:
        sys.stdout.write(report.verdict(record))
    else:
        most = evaluation.max_tokens
        limit = f"On at most {most:,} tokens of the text; --max-tokens 0: on all of it."
        emit(as_json, figures, Group(report.terminal(record), limit if most else ""))


def _eval_record(model: str, against: str | None, figures: JSON, evaluation: Evaluation) -> Record:
    """Return the figures of ``eval`` as the record of a model, or of a result and its original."""
    from moesaic.io.source import resolve
    from moesaic.record import Record

    ours = resolve(model)
    name, model_type = Path(model).name, str(ours.config.model_type)
    if against is None:
        scores, files, native = {name: figures}, {name: ours.nbytes}, True
    else:
        theirs = resolve(against)
        baselines: JSON = figures.get("baselines", {})
        scores = {"original": figures["against"], "result": figures, **baselines}
        files = {"original": theirs.nbytes, "result": ours.nbytes}
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


def bench(model: str, against: str | None, as_json: bool, **options: Any) -> None:
    """Measure speed, peak memory and file size; beside another model in interleaved rounds."""
    for name in (model, against or model):
        check_name(name)
    settings = given.read(Bench, options)  # before anything slow is imported
    settings |= given.device_and_dtype(options)
    print_start(model)
    from moesaic import report
    from moesaic.metrics.measurement import bench
    from moesaic.progress import bars

    figures = bench(model, against, **settings, progress=bars)
    result = figures["model"] | {k: v for k, v in figures.items() if k != "model"}
    shown = {model: figures["model"]}
    if against:
        shown[against if against != model else f"{against}, again"] = figures["against"]
    emit(as_json, result, report.speeds(shown, figures.get("ratio", {})))


def inspect(model: str | None, as_json: bool) -> None:
    """Show what a checkpoint is made of, layer by layer; without MODEL, what is supported."""
    if model is None:
        _architectures(as_json)
        return
    check_name(model)
    print_start(model)
    from rich.table import Table

    from moesaic.sizes import inspect

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
        f"{figures['active_parameters']:,}; active ratio without embeddings: "
        f"{figures['active_ratio']:.1%}"
    )
    emit(as_json, figures, table)


def _architectures(as_json: bool) -> None:
    """Print the model types that are supported, and those that are not, with the reason."""
    from moesaic.arch import support_table

    outcomes = support_table()
    lines = [f"With transformers {outcomes['transformers']}:"]
    titles = ("mixtures of experts", "dense models", "multimodal models")
    for kind, words in zip(("moe", "dense", "beside"), titles, strict=True):
        lines.append(f"\n{len(outcomes[kind])} {words}\n{', '.join(outcomes[kind])}")
    lines.append(f"\n{len(outcomes['unsupported'])} not supported")
    lines += [f"{name}: {reason}" for name, reason in outcomes["unsupported"].items()]
    emit(as_json, outcomes, "\n".join(lines))


def generate(
    model: str, prompt: str, new_tokens: int, chat: bool, as_json: bool, **options: Any
) -> None:
    """Continue a text greedily."""
    if not prompt:
        raise MoesaicError("The prompt is empty.")
    check_name(model)
    where = given.device_and_dtype(options)
    print_start(model)
    from rich.text import Text

    from moesaic.metrics.generations import generate
    from moesaic.progress import console

    text = generate(model, prompt, new_tokens=new_tokens, chat=chat, **where)
    if as_json:
        emit(True, {"prompt": prompt, "text": text}, None)
    else:
        asked = (prompt + ("\n" if chat else ""), "dim")
        console.print(Text.assemble(asked, text), soft_wrap=True)


# --- results -------------------------------------------------------------------------------------


def export(model: str, out: Path, overwrite: bool, as_json: bool, **options: Any) -> None:
    """Write a model for transformers, vLLM, SGLang or llama.cpp: exact, or refused."""
    options["to"] = form_of(out, options.get("to", ""))
    chosen = given.read(ExportArgs, options)  # before anything slow is imported
    check_name(model)
    if chosen["to"] == "gguf":
        check_out_file(out, GGUF, overwrite, [model])
    else:
        check_out(out, overwrite, [model])
    print_start(model)
    from moesaic.exports import export
    from moesaic.progress import bars

    record = export(model, out, overwrite=overwrite, progress=bars, **chosen)
    emit(as_json, record, _export_table(record))


def _export_table(record: JSON) -> Table:
    """Return a table of an export: its files, and what padding cost."""
    from rich.table import Table

    from moesaic.report.numbers import memory

    table = Table(show_header=False)
    differences = ("largest_difference", "mean_difference", "same_next_token")
    for name in ("out", "model_type", "type", "bytes", "exact", *differences):
        if name in record:
            written = memory(record[name]) if name == "bytes" else shown_figure(record[name])
            table.add_row(name.replace("_", " "), written)
    for name, weights in record.get("types", {}).items():
        table.add_row(f"weights in {name}", shown_figure(weights))
    for name, (before, after) in record.get("costs", {}).items():
        more = "" if after == before else f", {after / before - 1:+.1%}"
        table.add_row(name.replace("_", " "), f"{before:,} -> {after:,}{more}")
    return table


def _record_of(run: Path) -> Record:
    """Return the record of a run, by its folder or by its ``result.json``."""
    from moesaic.io.trust import check_links
    from moesaic.record import Record

    if not run.exists():
        raise MoesaicError(f"No run at {run}: give the folder that a command made.")
    if run.is_dir():
        check_links(run)
    file = our_path(run, RECORD) if run.is_dir() else run
    if not file.exists():
        raise MoesaicError(f"{run} has no result.json: give the folder that a command made.")
    try:
        return Record.from_json(mapping_of(file))
    except (ValueError, MoesaicError) as error:
        raise MoesaicError(f"{run} has no readable result.json: {error}") from error


def report(runs: Sequence[Path], out: Path, as_json: bool) -> None:
    """Draw one page about one or more results: quality, sizes and speed, layer by layer."""
    if out.suffix not in (".html", ".svg"):
        raise MoesaicError(f"{out}: the name of what is drawn ends in .html or .svg.")
    check_out_file(out, DRAWING, overwrite=True)
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
        partial.write_text(mark_drawn(page), "utf-8")
    emit(as_json, {"report": str(out)}, f"Report in {out}")


def commands() -> None:
    """Register these commands."""
    names = ("data", "max_tokens", "length", "tasks", "limit", "shots", "generations", "stream")
    text = [given.option_of(Evaluation, name) for name in (*names, "baselines")]
    words = "Measured beside it, and compared with it token by token."
    original = given.Option("--against", words, metavar="ORIGINAL")
    card = given.Option("--card", "Print Markdown for a model card.")
    params = [given.MODEL, original, *text, card, given.DEVICE, given.DTYPE, given.AS_JSON]
    register("eval", evaluate, "moesaic eval out --against tiny-moe", params)
    speed = [given.option_of(Bench, field.name) for field in fields(Bench)]
    other = given.Option("--against", "Measured beside it.", metavar="MODEL")
    params = [given.MODEL, other, *speed, given.DEVICE, given.DTYPE, given.AS_JSON]
    register("bench", bench, "moesaic bench out --against tiny-moe --rounds 5", params)
    any_model = given.Argument("model", given.MODEL.words, "[MODEL]", required=False)
    register("inspect", inspect, "moesaic inspect tiny-moe", [any_model, given.AS_JSON])
    prompt = given.Argument("prompt", "Text to continue.")
    most = given.Number(int, 1)
    help = "Tokens to add at most. Default: 64."
    tokens = given.Option("--new-tokens", help, metavar="N", type=most, default=64)
    chat = given.Option("--chat", "Ask as a user would: by the model's chat template.")
    params = [given.MODEL, prompt, tokens, chat, given.DEVICE, given.DTYPE, given.AS_JSON]
    register("generate", generate, 'moesaic generate tiny-moe "The capital of France is"', params)
    out = given.Argument("out", "The folder to make, or the .gguf file.", type=given.PATH)
    form = [given.option_of(ExportArgs, field.name) for field in fields(ExportArgs)]
    example = "moesaic export out out-native --to native"
    register("export", export, example, [given.MODEL, out, *form, given.OVERWRITE, given.AS_JSON])
    runs = given.Argument(
        "runs", "Result folders.", "RUN...", nargs=-1, type=given.PATH, required=True
    )
    help = "The .html page to make, or only the frontier as .svg. Default: report.html."
    page = given.Option("--out", help, metavar="FILE", type=given.PATH, default="report.html")
    example = "moesaic report out-0.8 out-0.7 --out compare.html"
    register("report", report, example, [runs, page, given.AS_JSON])
