"""Sections on a terminal, by rich: the closing words of a run, and what ``eval`` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text as Line

from moesaic.record import Record
from moesaic.report import facts
from moesaic.report.blocks import Cell, Sentence, Table, Text
from moesaic.report.contents import contents, speed_words
from moesaic.report.tables import speed_table
from moesaic.types import JSON, Values

TONES = {"worse": "yellow", "unsure": "dim"}
"""Styles of figures, by :attr:`moesaic.report.blocks.Cell.tone`."""
ACROSS = 2
"""Continuations beside each other."""


def terminal(record: Record) -> RenderableType:
    """Return a run's verdict, figures, alternatives and continuations for a terminal."""
    parts: list[RenderableType] = [Line(facts.title(record), style="bold"), ""]
    for section in contents(record):
        if "terminal" in section.also:
            for kind, blocks in groupby(section.blocks, key=lambda block: block.kind):
                if kind in SHOWN:
                    parts += SHOWN[kind]([*blocks])
    return Group(*parts)


def speeds(models: Mapping[str, Values], ratios: Mapping[str, Values]) -> RenderableType:
    """Return the figures of ``bench``: a table, and sentences that compare two models.

    Args:
        models: by name the keys of :meth:`moesaic.metrics.speed.Speed.as_json`, and sizes.
        ratios: of :func:`moesaic.metrics.speed.against`; empty for one model.
    """
    found: JSON = {what: ratio["ratio"] for what, ratio in ratios.items()}
    found |= {f"{what}_spread": ratio["spread"] for what, ratio in ratios.items()}
    if ratios:
        found["rounds"] = min(ratio["rounds"] for ratio in ratios.values())
    measured = {"speed": models, "speed_ratio": found}
    record = Record("", "", "", True, [], [], measured=measured)
    return Group(_table_grid(speed_table(record)), *map(Line, speed_words(ratios)))


def _remarks(blocks: Sequence[Sentence]) -> list[RenderableType]:
    grid = Grid.grid(padding=(0, 1))
    for block in blocks:
        style, sign = ("yellow", "-") if block.tone == "worse" else ("", "+")
        grid.add_row(Line(sign, style=style), Line(block.text))
    return [Padding(grid, (1, 1, 0, 1))]


def _texts(blocks: Sequence[Text]) -> list[RenderableType]:
    """Return texts beside each other."""
    grids: list[RenderableType] = []
    for start in range(0, len(blocks), ACROSS):
        grid = Grid(box=box.ROUNDED, border_style="dim", expand=True)
        beside = blocks[start : start + ACROSS]
        for block in beside:
            style = "bold cyan" if block.title == "result" else ""
            grid.add_column(Line(block.title), header_style=style, ratio=1)
        grid.add_row(*(Line(block.text) for block in beside))
        grids.append(grid)
    return grids


def _table_grid(table: Table) -> Grid:
    """Return a table of figures."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    grid.add_column("", style="dim", no_wrap=True)
    for name in table.columns:
        grid.add_column(
            Line(name),
            justify="right",
            style="bold" if name == "result" else "",
            header_style="bold cyan" if name == "result" else "bold",
        )
    for label, cells in table.rows:
        grid.add_row(Line(label), *map(_cell, cells))
    return grid


def _cell(cell: Cell) -> Line:
    text = Line(cell.text, style=TONES.get(cell.tone, ""))
    if cell.note:
        worded = not cell.text or cell.note[0] == "±" or cell.note.replace(" ", "").isalpha()
        text.append(
            f" {cell.note}" if worded else f" ({cell.note})",
            style="not bold" if cell.tone else "dim not bold",
        )
    return text


SHOWN: dict[str, Callable[[Any], list[RenderableType]]] = {
    "lead": lambda blocks: [Line(block.text) for block in blocks],
    "table": lambda blocks: [_table_grid(block) for block in blocks],
    "remark": _remarks,
    "prompt": lambda blocks: [Line(f" {block.text}", style="bold") for block in blocks],
    "text": _texts,
}
"""Functions that show blocks on a terminal, by kind. Others, such as notes, are on card and page;
warnings were printed in the run."""
