"""Drawings as inline SVG: lines, bars and heat maps. Colours come from the style sheet around them.

All sizes are in CSS pixels at natural size, so that text stays as large as the page's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup, escape

from moesaic.record import Bars, Figure, Heat, Lines, Row, Series
from moesaic.report.numbers import number, percent, perplexity, ranges, share

OKABE_ITO = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a8a8a",
)  # fmt: skip
"""Colours that are told apart with any colour vision. Black is left out: it is the ink."""
FAR = 8
"""Values further apart than this, as a ratio, are drawn on a logarithmic scale."""
FEW = 400
"""Cells of one drawing up to which each has a tooltip of its own."""
LEVELS = 20
"""Shades that many cells are drawn in."""
DOTS = 48
"""Points up to which each is marked, with a tooltip."""
COLOURS = 4
ROW = 19.0
"""Height of a row."""
ACROSS = 8
"""Maps side by side."""


def colours(count: int) -> list[str]:
    """One colour an expert: Okabe and Ito's while they last, else hues around the circle.

    Neighbouring numbers differ in hue and in lightness.

    >>> colours(3), len(set(colours(64)))
    (['#0072b2', '#e69f00', '#009e73'], 64)
    """
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    return [f"hsl({i * 137.508 % 360:.1f} 62% {(38, 52, 64)[i % 3]}%)" for i in range(count)]


def drawn(figure: Figure) -> Markup:
    """A figure as a chart of its own."""
    if isinstance(figure, Lines):
        return svg(*lines(figure), f"{figure.y} by {figure.x}")
    if isinstance(figure, Bars):
        label = f"{' and '.join(column.name for column in figure.columns)} by {figure.row}"
        return svg(*bars(figure), label)
    assert isinstance(figure, Heat)
    return svg(*maps(figure), figure.title)


# --- pieces --------------------------------------------------------------------------------------


def svg(body: Iterable[str], width: float, height: float, label: str, role: str = "img") -> Markup:
    """A chart of a natural size: a small one shrinks with a narrow page, a wide one scrolls."""
    kind = "chart fit" if width < 360 else "chart"
    return Markup(
        f'<svg class="{kind}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="{role}" aria-label="{escape(label)}">'
        f"{''.join(body)}</svg>"
    )


def text(x: float, y: float, content: object, kind: str = "", anchor: str = "start") -> str:
    """A line of text, its baseline at y."""
    kind = f' class="{kind}"' if kind else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{at}>{escape(content)}</text>'


def rect(
    x: float, y: float, width: float, height: float, kind: str, opacity: float = 1, tip: str = ""
) -> str:
    """A rectangle with an optional tooltip."""
    fill = "" if opacity == 1 else f' fill-opacity="{opacity:.3f}"'
    shape = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
        f'rx="1.5" class="{kind}"{fill}'
    )
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def line(points: Iterable[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}"></polyline>'


def moved(x: float, y: float, body: Iterable[str]) -> str:
    """A drawing at another place."""
    return f'<g transform="translate({x:.1f} {y:.1f})">{"".join(body)}</g>'


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers in a range.

    >>> ticks(0.0, 1.0), ticks(12.0, 31.0)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [15, 20, 25, 30])
    """
    rough = (high - low) / about or 1.0
    size = 10 ** math.floor(math.log10(rough))
    step = min((s * size for s in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Plane:
    """The area of a plot, and where on it a point of two figures lies.

    Args:
        points: all that are drawn.
        box: left, top, right and bottom edge, in pixels.
        log: a logarithmic vertical axis; None where values are :data:`FAR` apart.
        edge: room left and right of the points, as a share of their range.
    """

    def __init__(
        self,
        points: Sequence[tuple[float, float]],
        box: tuple[float, float, float, float],
        log: bool | None = None,
        edge: float = 0.0,
    ) -> None:
        self.left, self.top, self.right, self.bottom = box
        xs, ys = zip(*points, strict=True)
        positive = min(ys) > 0
        self.log = positive and (max(ys) / min(ys) > FAR if log is None else log)
        self._scale: Callable[[float], float] = math.log if self.log else float
        least, most = self._scale(min(ys)), self._scale(max(ys))
        room = (most - least) * 0.08 or 0.1 * abs(most) or 1.0
        from_zero = not self.log and min(ys) >= 0
        self.least = max(0.0, least - room) if from_zero else least - room
        self.most = most + room
        margin = edge * (max(xs) - min(xs)) or (0.0 if max(xs) > min(xs) else 0.5)
        self.low, self.high = min(xs) - margin, max(xs) + margin

    def across(self, x: float) -> float:
        """The place of a value on the horizontal axis, in pixels."""
        return self.left + (self.right - self.left) * (x - self.low) / (self.high - self.low)

    def up(self, y: float) -> float:
        """The place of a value on the vertical axis, in pixels."""
        share = (self._scale(y) - self.least) / (self.most - self.least)
        return self.bottom - (self.bottom - self.top) * share

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a point, in pixels."""
        return self.across(x), self.up(y)

    def levels(self) -> list[float]:
        """Round values on the vertical axis: of a logarithmic one 1, 2 and 5 times powers of 10."""
        if self.log:
            low, high = (math.floor(end / math.log(10)) for end in (self.least, self.most))
            every = [m * 10.0**e for e in range(low, high + 1) for m in (1, 2, 5)]
            return [v for v in every if self.least <= math.log(v) <= self.most]
        return ticks(self.least, self.most)

    def axes(
        self,
        marked: Sequence[float],
        ticked: Callable[[float], str],
        risen: Callable[[float], str] = "{:,.4g}".format,
    ) -> list[str]:
        """Lines and figures of both axes.

        Args:
            marked: values on the horizontal axis.
            ticked: how they are written.
            risen: how values on the vertical axis are written.
        """
        levels = self.levels()
        out = [line([(self.left, y), (self.right, y)], "grid") for y in map(self.up, levels)]
        out += [text(self.left - 7, self.up(y) + 4, risen(y), "quiet", "end") for y in levels]
        below = self.bottom + 15
        out += [text(self.across(x), below, ticked(x), "quiet", "middle") for x in marked]
        return out


# --- lines ---------------------------------------------------------------------------------------

Drawing = tuple[list[str], float, float]
"""What is drawn, its width and its height."""


def lines(figure: Lines, width: float = 0.0, height: float = 220.0) -> Drawing:
    """Lines over a common horizontal axis."""
    series = [s for s in figure.series if s.points]
    named = len(series) > 1
    width = width or (430.0 if named else 344.0)
    right = 22.0 + (max(len(s.name) for s in series) * 6.1 if named else 0)
    points = [point for s in series for point in s.points]
    plane = Plane(points, (0.0, 22.0, width - right, height - 36.0), figure.log)
    plane.left = 14.0 + 6.2 * max((len(f"{y:,.4g}") for y in plane.levels()), default=0)
    whole = all(x.is_integer() for x, _ in points)
    across = [x for x in ticks(plane.low, plane.high, 5) if not whole or float(x).is_integer()]
    out = [text(0, 10, f"{figure.y}{', logarithmic' if plane.log else ''}", "quiet")]
    out += plane.axes(across, "{:g}".format)
    out.append(text((plane.left + plane.right) / 2, height - 3, figure.x, "quiet", "middle"))
    for n, s in enumerate(series):
        out += _line(figure, s, n, plane)
    if named:
        out += _names(series, plane, width - right + 7)
    return out, width, height


def _line(figure: Lines, series: Series, n: int, plane: Plane) -> list[str]:
    """One line, a tooltip at each point of few."""
    colour = f"s{n % COLOURS}"
    strong = series.name and series.name == figure.strong
    thick = " strong" if strong else " dash" if n >= COLOURS else ""
    places = [plane.at(*point) for point in series.points]
    out = [line(places, f"series {colour}{thick}")]
    name = f"{series.name}, " if series.name else ""
    for (x, y), (a, b) in zip(series.points, places, strict=True):
        if len(places) <= DOTS:
            tip = escape(f"{name}{figure.x} {x:g}: {number(y, figure.form)}")
            dot = f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" class="dot {colour}">'
            out.append(f"{dot}<title>{tip}</title></circle>")
    return out


def _names(series: Sequence[Series], plane: Plane, x: float) -> list[str]:
    """The name of each line at its end, clear of the one below."""
    ends = [(plane.at(*s.points[-1])[1] + 4, s.name, n) for n, s in enumerate(series)]
    out, floor = [], plane.bottom + 4
    for y, name, n in sorted(ends, reverse=True):
        floor = min(y, floor)
        out.append(text(x, floor, name, f"end s{n % COLOURS}"))
        floor -= 13
    return out


# --- bars ----------------------------------------------------------------------------------------


def bars(figure: Bars) -> Drawing:
    """Columns of bars beside each other, each on a scale of its own from 0."""
    left, head, room, bar = 30.0, 22.0, 140.0, 74.0
    out = []
    for n, column in enumerate(figure.columns):
        x = left + n * room
        most = max((v for v in column.values if v is not None), default=0) or 1.0
        out.append(text(x, 10, column.name, "quiet"))
        for i, (row, value) in enumerate(zip(figure.rows, column.values, strict=True)):
            if value is None:
                continue
            y, long = head + i * ROW, bar * max(0.0, value) / most
            kind = "bar result" if n == 0 else "bar original"
            tip = f"{figure.row} {row}, {column.name}: {number(value, column.form)}"
            out.append(rect(x, y + ROW * 0.22, long, ROW * 0.46, kind, tip=tip))
            out.append(text(x + long + 6, y + ROW / 2 + 3, number(value, column.form), "quiet"))
    for i, row in enumerate(figure.rows):
        out.append(text(left - 8, head + i * ROW + ROW / 2 + 3, row, "quiet", "end"))
    return out, left + len(figure.columns) * room, head + len(figure.rows) * ROW


def perplexities(
    models: Sequence[tuple[str, float | None, float | None]], width: float, row: float, left: float
) -> Drawing:
    """Perplexity of models by name as bars, with a ratio at the right.

    What is more than four times as high as the highest of original and result is cut, and marked.
    """
    room, bar = width - left - 104, min(20.0, 0.45 * row)
    finite = {n: p for n, p, _ in models if p is not None and math.isfinite(p)}
    ours = [finite[n] for n in ("original", "result") if n in finite]
    most = max(finite.values(), default=1.0)
    top = min(most, 4 * max(ours, default=most)) or 1.0
    out = []
    for i, (name, value, ratio) in enumerate(models):
        y = i * row
        middle, edge = y + row / 2 + 4, y + (row - bar) / 2
        kind = name if name in ("original", "result") else "other"
        out.append(text(left - 10, middle, name, f"name {kind}", "end"))
        shown = finite.get(name, 0.0 if value is None else math.inf)
        long = room * min(shown, top) / top
        out.append(rect(left, edge, long, bar, f"bar {kind}"))
        for x in (left + room - 14, left + room - 18) if shown > top else ():
            out.append(line([(x, edge + bar + 1), (x + 4, edge - 1)], "break"))
        out.append(text(left + long + 7, middle, perplexity(value), f"value {kind}"))
        out.append(text(width, middle, percent(ratio, 1), "quiet", "end"))
    return out, width, row * len(models)


# --- heat maps -----------------------------------------------------------------------------------


def maps(figure: Heat, row: float = ROW, cell: float = 0.0) -> Drawing:
    """The map of a figure, or several side by side.

    Args:
        figure: what is drawn.
        row: height of a row.
        cell: width of a column; 0 for what fits.
    """
    panels = [(panel, list(rows)) for panel, rows in groupby(figure.rows, lambda r: r.panel)]
    if len(panels) == 1:
        return _Map(figure, figure.rows, row, cell).drawn(figure.column)
    across = min(ACROSS, len(panels))
    cell = min(20.0, max(3.0, (600 / across - 44) / len(figure.columns)))
    out, widths, heights = [], [], []
    for n, (panel, rows) in enumerate(panels):
        body, width, height = _Map(figure, rows, cell, cell).drawn(panel)
        x, y = (width + 4) * (n % across), (height + 10) * (n // across)
        out.append(moved(x, y, body))
        widths.append(x + width)
        heights.append(y + height)
    return out, max(widths), max(heights)


@dataclass(frozen=True)
class _Cell:
    """A rectangle, the darker the more."""

    x: float
    y: float
    width: float
    height: float
    strength: float
    tip: str
    kind: str

    @property
    def cross(self) -> list[tuple[float, float]]:
        """From corner to corner, of what is gone."""
        right, bottom = self.x + self.width, self.y + self.height
        return [(self.x + 1, bottom - 1), (right - 1, self.y + 1)]

    @property
    def level(self) -> tuple[str, int]:
        """Those alike are drawn together where there are many."""
        return self.kind, round(LEVELS * self.strength)


class _Map:
    """One map of a figure, and where its parts stand; see :func:`maps`."""

    top, bar = 30.0, 62.0
    """Where rows begin, and the length of the longest bar."""

    def __init__(self, figure: Heat, rows: Sequence[Row], row: float, cell: float) -> None:
        self.figure, self.rows, self.row = figure, rows, row
        self.cell = cell or min(40.0, max(7.0, 320 / max(1, len(figure.columns))))
        self.left = max(30.0, 12 + 6.2 * max(len(r.label) for r in rows))
        self.right = self.left + len(figure.columns) * self.cell + 14
        self.gap = 2.0 if self.cell >= 14 and row >= 10 else 1.0 if self.cell >= 6 else 0.5
        values = [v for r in rows for v in r.values if v is not None]
        self.darkest = max(values, default=0.0) or 1.0
        barred = [r.bar for r in rows if r.bar is not None]
        self.widest = max(barred, default=0.0) or 1.0
        beside = [] if barred else [len(_note(r)) for r in rows]
        width = 6.2 * max([len(figure.side), *beside])
        self.room = max(self.bar + 44 if barred else 0.0, width)

    def drawn(self, head: str) -> Drawing:
        """The map under a heading."""
        cells = [[*self._cells(n, r)] for n, r in enumerate(self.rows)]
        out = _shaded([(self._row_tip(r), c) for r, c in zip(self.rows, cells, strict=True)])
        out += [text(self.left, 10, head, "quiet"), text(self.right, 10, self.figure.side, "quiet")]
        for k in range(0, len(self.figure.columns), math.ceil(22 / self.cell)):
            x = self.left + (k + 0.5) * self.cell - self.gap / 2
            out.append(text(x, self.top - 5, self.figure.columns[k], "quiet", "middle"))
        for n, r in enumerate(self.rows):
            out += self._beside(n, r)
        width = self.right + (self.room or -8)
        return out, width, self.top + len(self.rows) * self.row

    def _cells(self, n: int, r: Row) -> Iterator[_Cell]:
        for k, value in enumerate(r.values):
            outlined = k in r.outlined
            if value is None and r.gone is None and not outlined:
                continue
            depth = 0.6 if value is None else max(0.0, value) / (r.darkest or self.darkest)
            kind = "gone" if k in (r.gone or ()) else "heat kept" if outlined else "heat"
            yield _Cell(
                self.left + k * self.cell,
                self.top + n * self.row,
                self.cell - self.gap,
                self.row - self.gap,
                min(1.0, 0.05 + 0.75 * depth),
                self._tip(r, k),
                kind,
            )

    def _beside(self, n: int, r: Row) -> Iterator[str]:
        """What is written into the cells of a row, and left and right of it."""
        y, x, note = self.top + n * self.row, self.right, _note(r)
        base = y + self.row / 2 + 3
        if n % math.ceil(10 / self.row) == 0:
            yield text(self.left - 8, base, r.label, "quiet", "end")
        if r.bar is not None:
            long = self.bar * r.bar / self.widest
            yield rect(x, y + self.row * 0.28, long, self.row * 0.36, "bar result", tip=note)
            x += long + 5
        if self.row < 13:
            return
        if note:
            yield text(x, base, note, "quiet")
        for k, value in enumerate(r.values if self.figure.written and self.cell >= 26 else ()):
            if value is not None:
                place = (self.left + k * self.cell + (self.cell - self.gap) / 2, base)
                yield text(*place, number(value, self.figure.written), "cell", "middle")

    def _tip(self, r: Row, k: int) -> str:
        """The tooltip of one cell: ``layer 3, expert 5: 12.5 % of calls, dropped``."""
        figure, value, panel = self.figure, r.values[k], f"{r.panel}, " if r.panel else ""
        written = "" if value is None else f": {number(value, figure.form)} {figure.of}".rstrip()
        fate = "" if r.gone is None else ", dropped" if k in r.gone else ", kept"
        return f"{panel}{figure.row} {r.label}, {figure.column} {figure.columns[k]}{written}{fate}"

    def _row_tip(self, r: Row) -> str:
        """The tooltip of a row whose cells have none."""
        fate = "" if r.gone is None else f"dropped {ranges(r.gone)}" if r.gone else "all stay"
        where = ", ".join(filter(None, (r.panel, f"{self.figure.row} {r.label}")))
        return ": ".join(filter(None, (where, fate or _note(r))))


def _note(row: Row) -> str:
    """What is written at the right of a row: its bar's figure where it has one."""
    return row.note if row.bar is None else share(row.bar)


def _shaded(rows: Sequence[tuple[str, Sequence[_Cell]]]) -> list[str]:
    """Rows of cells, each row with its tooltip.

    Few cells have a tooltip each. More than :data:`FEW` are drawn together, those of a shade as one
    path, and have one tooltip a row, which keeps a large model's page small.
    """
    out = []
    if sum(len(cells) for _, cells in rows) <= FEW:
        for cell in (cell for _, cells in rows for cell in cells):
            place = (cell.x, cell.y, cell.width, cell.height)
            out.append(rect(*place, cell.kind, cell.strength, cell.tip))
            out += [line(cell.cross, "cross")] if cell.kind == "gone" else []
        return out
    for tip, cells in rows:
        out.append(f"<g><title>{escape(tip)}</title>")
        ranked = sorted(cells, key=lambda c: c.level)
        for (kind, level), alike in groupby(ranked, key=lambda c: c.level):
            path = "".join(
                f"M{c.x:.4g} {c.y:.4g}h{c.width:.3g}v{c.height:.3g}h-{c.width:.3g}z" for c in alike
            )
            out.append(f'<path class="{kind}" fill-opacity="{level / LEVELS:g}" d="{path}"/>')
        crosses = [c.cross for c in cells if c.kind == "gone"]
        path = "".join(f"M{a:.4g} {b:.4g}L{c:.4g} {d:.4g}" for (a, b), (c, d) in crosses)
        out.append(f'<path class="cross" d="{path}"/></g>' if path else "</g>")
    return out
