"""Maps and bars by layer as inline SVG: rows of cells, the darker the more, and rows of bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from moesaic.report.charts import Shade, rect, shaded, svg, text

ROW = 19.0


@dataclass(frozen=True)
class Cell:
    """One field of a map."""

    strength: float
    """From 0 to 1: the more, the darker."""
    tip: str = ""
    text: str = ""
    """Written inside, where there is room."""
    kind: str = "heat"
    """``heat``; ``heat kept``, which is outlined; ``gone``, which is of another colour."""
    crossed: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a map."""

    label: object
    cells: Sequence[Cell | None]
    """One a column; None is left empty."""
    told: str = ""
    """Of the whole row, where cells are too many for a tooltip each."""
    bar: float | None = None
    """Drawn at the right, on a scale from 0."""
    note: str = ""
    """Written at the right."""


def heat(
    rows: Sequence[Row],
    columns: Sequence[object],
    head: str = "",
    side: str = "",
    row: float = ROW,
    cell: float = 0.0,
    bar: float = 62.0,
) -> tuple[list[str], float, float]:
    """A map: the drawing, its width and its height.

    Args:
        rows: from the top.
        columns: what is written above each column.
        head: what the columns are.
        side: what the bars or notes at the right are.
        row: height of a row, in pixels.
        cell: width of a column; 0 for what fits.
        bar: length of the longest bar.
    """
    cell = cell or min(40.0, max(7.0, 320 / max(1, len(columns))))
    left, top = max(30.0, 12 + 6.2 * max(len(str(r.label)) for r in rows)), 30.0
    right = left + len(columns) * cell + 14
    gap = 2.0 if cell >= 14 and row >= 10 else 1.0 if cell >= 6 else 0.5
    widest = max((r.bar for r in rows if r.bar and math.isfinite(r.bar)), default=0) or 1.0
    out = [text(left, 10, head, "quiet"), text(right, 10, side, "quiet")]
    for k in range(0, len(columns), math.ceil(22 / cell)):
        place = (left + (k + 0.5) * cell - gap / 2, top - 5)
        out.append(text(*place, columns[k], "quiet", "middle"))
    drawn = []
    for n, r in enumerate(rows):
        y = top + n * row
        base = y + row / 2 + 3
        if n % math.ceil(10 / row) == 0:
            out.append(text(left - 8, base, r.label, "quiet", "end"))
        shades = []
        for k, c in enumerate(r.cells):
            if c is None:
                continue
            x = left + k * cell
            strength = min(1.0, 0.05 + 0.75 * max(0.0, c.strength))
            shades.append(
                Shade(x, y, cell - gap, row - gap, strength, c.tip, c.kind, crossed=c.crossed)
            )
            if c.text and cell >= 26 and row >= 13:
                out.append(text(x + (cell - gap) / 2, base, c.text, "cell", "middle"))
        drawn.append((r.told, shades))
        x = right
        if r.bar is not None:
            long = bar * r.bar / widest if math.isfinite(r.bar) else bar
            out.append(rect(x, y + row * 0.28, long, row * 0.36, "bar result", tip=r.note))
            x += long + 5
        if r.note and row >= 13:
            out.append(text(x, base, r.note, "quiet"))
    barred = bar + 44 if any(r.bar is not None for r in rows) else 0.0
    room = max(barred, 6.2 * max([len(side), *(len(r.note) for r in rows if r.bar is None)]))
    return shaded(drawn) + out, right + room - (0 if room else 8), top + len(rows) * row


def heat_map(
    rows: Sequence[Row],
    columns: Sequence[object],
    label: str,
    head: str = "",
    side: str = "",
    cell: float = 0.0,
) -> Markup:
    """:func:`heat` as a chart of its own; ``label`` says what it shows."""
    body, width, height = heat(rows, columns, head, side, cell=cell)
    return svg(width, height, body, label)


def grids(
    found: Sequence[tuple[int, Sequence[Sequence[float]]]],
    label: str,
    tip: Callable[[int, int, int], str],
    across: int = 8,
) -> Markup:
    """Figures of every two experts: a square a layer, side by side.

    Args:
        found: numbers of layers, and of each a figure, 0 to 1, for every two experts; nan is
            not drawn.
        label: what it shows.
        tip: of a field, by its layer and two experts.
        across: squares in a line.
    """
    count = max(len(grid) for _, grid in found)
    cell = min(20.0, max(3.0, (600 / min(across, len(found)) - 44) / count))
    out, places = [], []
    for n, (layer, grid) in enumerate(found):
        rows = [
            Row(
                i,
                [
                    None if v != v else Cell(v, f"layer {layer}, {tip(layer, i, j)}")
                    for j, v in enumerate(values)
                ],
                f"layer {layer}, expert {i}",
            )
            for i, values in enumerate(grid)
        ]
        body, width, height = heat(rows, range(count), f"layer {layer}", row=cell, cell=cell)
        x, y = (width + 4) * (n % across), (height + 10) * (n // across)
        places.append((x + width, y + height))
        out.append(f'<g transform="translate({x:.1f} {y:.1f})">{"".join(body)}</g>')
    return svg(max(x for x, _ in places), max(y for _, y in places), out, label)


Column = tuple[str, Mapping[int, float], Callable[[float], str]]
"""A heading, a value a layer, how it is written."""


def bars(columns: Sequence[Column], room: float = 110, bar: float = 74) -> Markup:
    """Figures by layer as bars beside each other, each column on a scale of its own from 0."""
    layers = sorted({i for _, values, _ in columns for i in values})
    left, head = 30.0, 22.0
    out = []
    for n, (name, values, form) in enumerate(columns):
        x = left + n * (room + 30)
        most = max((v for v in values.values() if math.isfinite(v)), default=0) or 1.0
        out.append(text(x, 10, name, "quiet"))
        for i, layer in enumerate(layers):
            if (value := values.get(layer)) is None:
                continue
            y = head + i * ROW
            long = bar * max(0.0, value) / most if math.isfinite(value) else bar
            kind = "bar result" if n == 0 else "bar original"
            tip = f"layer {layer}, {name}: {form(value)}"
            out.append(rect(x, y + ROW * 0.22, long, ROW * 0.46, kind, tip=tip))
            out.append(text(x + long + 6, y + ROW / 2 + 3, form(value), "quiet"))
    for i, layer in enumerate(layers):
        out.append(text(left - 8, head + i * ROW + ROW / 2 + 3, layer, "quiet", "end"))
    width = left + len(columns) * (room + 30)
    label = f"{' and '.join(name for name, _, _ in columns)} by layer"
    return svg(width, head + len(layers) * ROW, out, label)
