"""The command that looks for the recipe itself."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from moesaic.cli import options as given
from moesaic.cli.commands import emit, print_made, print_notice, print_start, pushed, register
from moesaic.config import Calibration, Evaluation
from moesaic.fitting.config import FitConfig
from moesaic.io.names import check_repository
from moesaic.recipe import Recipe, check_run, checked
from moesaic.types import JSON


def fit(
    model: str,
    out: Path,
    overwrite: bool,
    resume: bool,
    push: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the recipe of least KL within a budget, and carry it out."""
    recipe = search_recipe(model, out, options)
    config = checked(FitConfig, options, "")
    if push:
        check_repository(push)
    check_run(recipe, overwrite=overwrite)  # before anything slow is imported
    print_start(model)
    from rich.console import Group

    from moesaic import report
    from moesaic.bars import bars
    from moesaic.fitting.run import search_and_make

    again = {"overwrite": overwrite, "resume": resume}
    record = search_and_make(recipe, config, **again, track=bars, tell=print_notice)
    assert record is not None
    shown = Group(tried(record.measured["tried"]), report.terminal(record))
    if record.steps:
        print_made(out)
    else:
        outcome = f"No step is worth it at that size. The file alone is in {out}."
        outcome += " Not pushed: it has no card; hf upload takes it." if push else ""
        print_notice(outcome)
    upload = pushed(str(out), push or "") if record.steps else {}
    emit(as_json, {**record.output(), **upload}, shown)


def search_recipe(model: str, out: Path, options: JSON, **measured: Any) -> Recipe:
    """Return what a search is asked for, without steps; what it reads is taken out of ``options``.

    Args:
        model: the original.
        out: the folder to make.
        options: of the search, and others.
        measured: of :class:`~moesaic.config.Evaluation`, where ``options`` does not say otherwise.
    """
    return Recipe(
        model=model,
        out=str(out),
        steps=(),
        calibration=checked(Calibration, given.taken(options, given.TEXT), ""),
        evaluation=checked(Evaluation, measured | given.taken(options, ("data", "max_tokens")), ""),
        **given.taken(options, given.PLACE),
    )


def search_options(*names: str) -> list[click.Parameter]:
    """Return options of a search: some of its own, text, measuring, and where to compute."""
    text = [given.option(Calibration, name, given.COMMON) for name in given.TEXT]
    evaluation = [given.option(Evaluation, name, given.COMMON) for name in ("data", "max_tokens")]
    return [
        *(given.option(FitConfig, name) for name in names),
        *text,
        *evaluation,
        given.DEVICE,
        given.DTYPE,
    ]


def tried(candidates: list[Any]) -> Any:
    """Return a table of candidates, those of least KL first."""
    from rich.table import Table

    from moesaic.report.numbers import memory

    table = Table(title="Candidates", title_justify="left")
    for name in ("form", "memory", "active", "perplexity rises", "KL", "estimated"):
        table.add_column(name, justify="left" if name == "form" else "right")
    for c in sorted(candidates, key=lambda c: float(c["kl"])):
        figures = (memory(c["memory"]), f"{c['active_parameters']:,}", f"{c['loss']:.1%}")
        table.add_row(c["form"], *figures, f"{c['kl']:.4f}", f"{c['estimated_kl']:.4f}")
    return table


def commands() -> None:
    """Make the command."""
    names = (field.name for field in fields(FitConfig) if field.name != "confirm")
    run = [given.OVERWRITE, given.RESUME, given.PUSH, given.AS_JSON]
    params = [given.MODEL, given.OUT, *search_options(*names), *run]
    register("fit", fit, "moesaic fit tiny-moe out --memory 9MB", params)
