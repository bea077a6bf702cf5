"""The closing words of a run on the command line."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moesaic.record import Record
from moesaic.report import read, tables, words
from moesaic.report.read import part

TONES = {"worse": "yellow", "unsure": "dim"}
"""Styles of figures, by :attr:`moesaic.report.tables.Cell.tone`."""
ACROSS = 2
"""Continuations beside each other."""


def terminal(record: Record) -> RenderableType:
    """What came of the run in a sentence, its figures, how other ways do, continuations."""
    parts: list[RenderableType] = [
        Text(read.title(record), style="bold"),
        Padding(Text(words.outcome(record)), (1, 0, 0, 0)),
    ]
    parts += map(_table, tables.tables(record))
    remarks = Table.grid(padding=(0, 1))
    for sentence in words.summary(record):
        style = "yellow" if sentence.against else ""
        remarks.add_row(Text("-" if sentence.against else "+", style=style), Text(sentence.text))
    if remarks.row_count:
        parts.append(Padding(remarks, (0, 1, 1, 1)))
    generated = dict(part(record.measured, "generation"))
    prompt = generated.pop("prompt", None)
    if generated and prompt:
        parts.append(Text.assemble(" ", (str(prompt), "bold")))
    names = read.names(generated)
    for start in range(0, len(names), ACROSS):
        beside = names[start : start + ACROSS]
        table = Table(box=box.ROUNDED, border_style="dim", expand=True)
        for name in beside:
            style = "bold cyan" if name == "result" else ""
            table.add_column(Text(name), header_style=style, ratio=1)
        written = (str(generated[name]).strip() for name in beside)
        table.add_row(*(Text(text or "(nothing)") for text in written))
        parts.append(table)
    return Group(*parts)


def _table(figures: tables.Table) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", style="dim", no_wrap=True)
    for name in figures.columns:
        table.add_column(
            Text(name),
            justify="right",
            style="bold" if name == "result" else "",
            header_style="bold cyan" if name == "result" else "bold",
        )
    for label, cells in figures.rows:
        table.add_row(Text(label), *(_cell(cell) for cell in cells))
    return table


def _cell(cell: tables.Cell) -> Text:
    text = Text(cell.text, style=TONES.get(cell.tone, ""))
    if cell.note:
        worded = cell.note.replace(" ", "").isalpha()
        text.append(
            f" {cell.note}" if worded else f" ({cell.note})",
            style="not bold" if cell.tone else "dim not bold",
        )
    return text
