"""Parts of a report: sentences, tables, texts, and the plots that a record holds.

:func:`moesaic.report.contents.contents` makes them of a record; Markdown, terminal and page show
the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moesaic.record import Figure

Format = Callable[[float | None], str]


@dataclass(frozen=True)
class Sentence:
    """One statement."""

    text: str
    kind: str = "paragraph"
    """``lead`` (the verdict), ``paragraph``, ``remark`` (one of a list), or ``note``: how to read
    the block before it."""
    tone: str = ""
    """``worse`` where it speaks against the result."""


@dataclass(frozen=True)
class Cell:
    """A figure, and a note that is written small beside it."""

    text: str
    note: str = ""
    tone: str = ""
    """``better``, ``worse``, or ``unsure`` where the difference may be noise."""
    value: float | None = None
    """The number that the text writes; None where there is none."""


@dataclass(frozen=True)
class Table:
    """Rows by their labels."""

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    kind: str = "table"
    """``table``, ``key`` (the few figures that a page begins with), ``options`` or ``layers``."""
    title: str = ""


@dataclass(frozen=True)
class Text:
    """Text that a model wrote."""

    title: str
    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Point:
    """One model on a plot."""

    x: float
    y: float
    kind: str
    """``original``, ``result``, ``fewer layers``, or a comparison's name."""
    label: str
    """Written beside it."""
    tip: str
    """The tooltip: its full name, and all that was measured of it."""
    run: int = 0
    """The run that it leads to, from 1; 0 for none."""
    ahead: bool = True
    """No other point is as good in both figures and better in one."""


@dataclass(frozen=True, kw_only=True)
class Points(Figure):
    """Models by two figures, those that none beats joined by a line."""

    points: tuple[Point, ...]
    front: tuple[int, ...]
    """The joined points, from the best along x."""
    x: str
    y: str
    x_form: Format
    y_form: Format
    numbered: bool = False
    """Results are marked by the number of their run."""
    kind: str = "points"


Block = Sentence | Table | Text | Figure


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: list[Block]
    also: tuple[str, ...] = ()
    """``card`` and ``terminal``, where they show it; the page shows all."""


def cell(form: Format, value: float | None) -> Cell:
    """Return a figure in a format."""
    return Cell(form(value), value=value)
