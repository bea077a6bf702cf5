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
    """Sentence of a report."""

    text: str
    kind: str = "paragraph"
    """``lead`` (the verdict), ``paragraph``, ``remark`` (one of a list), or ``note``: how to read
    the block before it."""
    tone: str = ""
    """``worse`` if it speaks against the result."""


@dataclass(frozen=True)
class Cell:
    """Cell of a table: a figure, and a note in small print."""

    text: str
    note: str = ""
    tone: str = ""
    """``better``, ``worse``, or ``unsure`` where the difference may be noise."""
    value: float | None = None
    """Number that the text writes; None if there is none."""


@dataclass(frozen=True)
class Table:
    """Table whose rows have labels."""

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    kind: str = "table"
    """``table``, ``key`` (the few figures that a page begins with), ``options`` or ``layers``."""
    title: str = ""


@dataclass(frozen=True)
class Text:
    """Text that a model generated."""

    title: str
    text: str
    kind: str = "text"


@dataclass(frozen=True)
class PlotPoint:
    """Model on a plot, as a point."""

    x: float
    y: float
    kind: str
    """``original``, ``result``, ``fewer layers``, or a comparison's name."""
    label: str
    """Name beside the point."""
    tip: str
    """Tooltip: the model's full name, and all its figures."""
    run: int = 0
    """Number of the run that the point links to, from 1; 0 for none."""
    ahead: bool = True
    """True if no other point is as good in both figures and better in one."""


@dataclass(frozen=True, kw_only=True)
class Points(Figure):
    """Plot of models by two figures, a line through those that no other beats."""

    points: tuple[PlotPoint, ...]
    front: tuple[int, ...]
    """Indices of the joined points, from the best along x."""
    x: str
    y: str
    x_form: Format
    y_form: Format
    numbered: bool = False
    """True to mark results by the number of their run."""
    kind: str = "points"


Block = Sentence | Table | Text | Figure


@dataclass(frozen=True)
class Section:
    """Section of a report: blocks under a heading."""

    title: str
    blocks: list[Block]
    also: tuple[str, ...] = ()
    """Renderers that show the section besides the page: ``card``, ``terminal``."""


def cell(form: Format, value: float | None) -> Cell:
    """Return a cell with a figure in a format."""
    return Cell(form(value), value=value)
