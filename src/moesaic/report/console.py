"""The closing words of a run on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moesaic.record import Record
from moesaic.report import numbers, read, tables, words
from moesaic.report.read import part

TONES = {"worse": "yellow", "unsure": "dim"}
"""Styles of figures, by :attr:`moesaic.report.tables.Cell.tone`."""


def terminal(record: Record) -> RenderableType:
    """What came of the run in a sentence, its figures, how other ways do, continuations."""
    parts: list[RenderableType] = [
        Text(read.title(record), style="bold"),
        Padding(Text(words.outcome(record)), (1, 0, 0, 0)),
    ]
    parts += map(_table, tables.tables(record))
    said = Table.grid(padding=(0, 1))
    for sentence in words.summary(record):
        style = "yellow" if sentence.against else ""
        said.add_row(Text("-" if sentence.against else "+", style=style), Text(sentence.text))
    if said.row_count:
        parts.append(Padding(said, (0, 1, 1, 1)))
    generated = dict(part(record.measured, "generation"))
    prompt = generated.pop("prompt", None)
    if generated:
        if prompt:
            parts.append(Text.assemble(" ", (numbers.printable(str(prompt)), "bold")))
        parts.append(Beside([(name, str(generated[name])) for name in read.names(generated)]))
    return Group(*parts)


def _table(of: tables.Table) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", style="dim", no_wrap=True)
    for name in of.columns:
        table.add_column(
            Text(name),
            justify="right",
            style="bold" if name == "result" else "",
            header_style="bold cyan" if name == "result" else "bold",
        )
    for label, cells in of.rows:
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


@dataclass
class Beside:
    """Texts in panels, as many beside each other as can be read."""

    texts: Sequence[tuple[str, str]]
    least: int = 34

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the panels out for a width."""
        across = max(1, min(len(self.texts), options.max_width // self.least, 3))
        for start in range(0, len(self.texts), across):
            row = self.texts[start : start + across]
            grid = Table.grid(expand=True, padding=(0, 0))
            for _ in range(across):
                grid.add_column(ratio=1)
            tallest = max(
                len(console.render_lines(p, options.update(width=options.max_width // across)))
                for p in map(_panel, row)
            )
            grid.add_row(*(_panel(pair, tallest) for pair in row))
            yield grid


def _panel(pair: tuple[str, str], height: int | None = None) -> Panel:
    name, text = pair
    return Panel(
        Text(numbers.printable(text).strip() or "(nothing)"),
        title=Text(name, style="bold cyan" if name == "result" else ""),
        title_align="left",
        box=box.ROUNDED,
        border_style="dim",
        height=height,
    )
