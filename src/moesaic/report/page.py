"""Sections as HTML: one file that needs nothing beside it, and runs no script.

Plots are inline SVG: lines, bars, heat maps and points, whose colours come from ``plot.css``. All
their sizes are in CSS pixels at natural size, so that text is as large as the page's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby, pairwise

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from moesaic.errors import MoesaicError, printable
from moesaic.record import Bars, Figure, Heat, Lines, Record, Row, Series
from moesaic.report import facts, tables
from moesaic.report.blocks import Block, PlotPoint, Points, Section, Table
from moesaic.report.contents import contents, outcome
from moesaic.report.frontier import SECTION, frontiers
from moesaic.report.numbers import number, ranges, share

PLOTS = ("lines", "bars", "heat", "points")


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("moesaic.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def html(records: Sequence[Record]) -> str:
    """Return one self-contained HTML file about one or more runs.

    Plots and tables of layers are only on the page of a single run. What was not measured is left
    out.

    Raises:
        MoesaicError: there are no runs.
    """
    if not records:
        raise MoesaicError("A page is about one run at least.")
    several = len(records) > 1
    models = dict.fromkeys(facts.model_name(record) for record in records)
    shared = list[Section]()
    if several:
        shared = [Section(SECTION, [*frontiers(records)])]
        shared.append(Section("Runs", [tables.overview(records)]))
    originals = f"{len(models)} models" if len(models) > 2 else " and ".join(models)
    page = _template().render(
        title=f"{len(records)} runs of {originals}" if several else facts.title(records[0]),
        several=several,
        runs=[
            {
                "number": n,
                "title": facts.title(record),
                "outcome": outcome(record),
                "sections": contents(record, single=not several),
            }
            for n, record in enumerate(records, 1)
        ],
        shared=shared,
        groups=_groups,
        halves=_halves,
        drawn=_figure_svg,
        versions=sorted({r.moesaic for r in records if r.moesaic}),
    )
    return printable(page)


def _groups(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Return neighbouring blocks of one kind as groups; all plots are one kind."""
    kinds = groupby(blocks, key=lambda b: "plot" if b.kind in PLOTS else b.kind)
    return [(kind, [*of]) for kind, of in kinds]


def _halves(sections: Sequence[Section]) -> list[bool]:
    """Return whether each section is shown beside its neighbour, two by two, on a wide screen."""
    halves = [False] * len(sections)
    for n in range(len(sections) - 1):
        if not halves[n] and _half(sections[n]) and _half(sections[n + 1]):
            halves[n] = halves[n + 1] = True
    return halves


def _half(section: Section) -> bool:
    """Return True if there is room for a section beside another one on a wide screen."""
    plots = [block for block in section.blocks if block.kind in PLOTS]
    found = [block for block in section.blocks if isinstance(block, Table)]
    tables_fit = all(t.kind == "table" and len(t.columns) <= 4 for t in found)
    plots_fit = all(plot.kind != "points" for plot in plots) and len(plots) <= 1
    return bool(section.title and (plots or found)) and tables_fit and plots_fit


def frontier_picture(records: Sequence[Record]) -> str:
    """Return the frontiers of runs as one SVG, which brings its colours and its ground.

    Empty where fewer than three models were measured.
    """
    plots = frontiers(records)
    if not plots:
        return ""
    body, top, edge, width = [], 20.0, 24.0, 728
    for plot in plots:
        plotted, _, height = point_chart(plot, width - 2 * edge)
        body.append(text(edge, top + 14, plot.title, "head"))
        body.append(shift(edge, top + 34, plotted))
        top += height + 50
    for n, record in enumerate(records if len(records) > 1 else (), 1):
        body.append(text(edge, top, f"{n}. {facts.title(record)}", "quiet"))
        top += 18
    style = files("moesaic.report").joinpath("plot.css").read_text("utf-8")
    return printable(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{width}" height="{top:g}" '
        f'viewBox="0 0 {width} {top:g}" role="img"><title>{escape(SECTION)}</title>'
        f"<style>{Markup(style)}</style>"
        f'<rect width="{width}" height="{top:g}" rx="10" class="ground"/>{"".join(body)}</svg>\n'
    )


# --- plots ---------------------------------------------------------------------------------------


FAR = 8
"""Values further apart than this, as a ratio, are drawn on a logarithmic scale."""
FEW = 400
"""Cells of one drawing up to which each has a tooltip of its own."""
LEVELS = 20
"""Shades that many cells are drawn in."""
DOTS = 48
"""Points of a line up to which each is marked, with a tooltip."""
COLOURS = 4
ROW = 19.0
"""Height of a row."""
ACROSS = 8
"""Maps side by side."""
LETTER = 6.2
"""Mean width of a character."""
NARROW = 340.0
"""Width of a plot of points on a phone; :func:`_figure_svg` makes both."""

Drawing = tuple[list[str], float, float]
"""SVG elements, their width and their height."""


def _figure_svg(figure: Figure) -> Markup:
    """Return a figure as SVG; points twice, of which the page shows the one that has room."""
    if isinstance(figure, Points):
        forms = (("desk", 680.0), ("phone", NARROW))
        return Markup("").join(
            svg(*point_chart(figure, width), figure.title, kind) for kind, width in forms
        )
    if isinstance(figure, Lines):
        return svg(*_line_chart(figure), f"{figure.y} by {figure.x}")
    if isinstance(figure, Bars):
        label = f"{' and '.join(column.name for column in figure.columns)} by {figure.row}"
        return svg(*_bar_chart(figure), label)
    assert isinstance(figure, Heat)
    return svg(*heat_maps(figure), figure.title)


# --- pieces --------------------------------------------------------------------------------------


def svg(body: Iterable[str], width: float, height: float, label: str, kind: str = "") -> Markup:
    """Return a chart of a natural size: a small one shrinks with the page, a wide one scrolls."""
    fit = kind or ("fit" if width < 360 else "")
    role = "group" if kind else "img"  # points are links
    return Markup(
        f'<svg class="{f"chart {fit}".rstrip()}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="{role}" aria-label="{escape(label)}">'
        f"{''.join(body)}</svg>"
    )


def text(x: float, y: float, content: object, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text, its baseline at y."""
    kind = f' class="{kind}"' if kind else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{at}>{escape(content)}</text>'


def rect(
    x: float, y: float, width: float, height: float, kind: str, opacity: float = 1, tip: str = ""
) -> str:
    """Return a rectangle with an optional tooltip."""
    fill = "" if opacity == 1 else f' fill-opacity="{opacity:.3f}"'
    shape = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
        f'rx="1.5" class="{kind}"{fill}'
    )
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def line(points: Iterable[tuple[float, float]], kind: str) -> str:
    """Return a line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}"></polyline>'


def shift(x: float, y: float, body: Iterable[str]) -> str:
    """Return a drawing at another place."""
    return f'<g transform="translate({x:.1f} {y:.1f})">{"".join(body)}</g>'


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round numbers in a range.

    >>> ticks(0.0, 1.0), ticks(12.0, 31.0)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [15, 20, 25, 30])
    """
    rough = (high - low) / about or 1.0
    size = 10 ** math.floor(math.log10(rough))
    step = min((s * size for s in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Plane:
    """Area of a plot, with the scales that place points on it.

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

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a point, in pixels."""
        across = (x - self.low) / (self.high - self.low)
        up = (self._scale(y) - self.least) / (self.most - self.least)
        return (
            self.left + (self.right - self.left) * across,
            self.bottom - (self.bottom - self.top) * up,
        )

    def levels(self) -> list[float]:
        """Return round values on the vertical axis; 1, 2, 5 times powers of 10 if logarithmic."""
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
        """Return lines and figures of both axes, the horizontal one's at ``marked``."""
        out = []
        for level in self.levels():
            _, y = self.at(self.low, level)
            out.append(line([(self.left, y), (self.right, y)], "grid"))
            out.append(text(self.left - 7, y + 4, risen(level), "quiet", "end"))
        for x in marked:
            place = self.left + (self.right - self.left) * (x - self.low) / (self.high - self.low)
            out.append(text(place, self.bottom + 15, ticked(x), "quiet", "middle"))
        return out


# --- points --------------------------------------------------------------------------------------


def point_chart(figure: Points, width: float) -> Drawing:
    """Return models as points with their names, and a line through those that none beats."""
    height = 400.0 if width > NARROW else 330.0
    at = [(p.x, p.y) for p in figure.points]
    plane = Plane(at, (58.0, 30.0, width - 16, height - 52), edge=0.06)
    every = (ticks(plane.low, plane.high, n) for n in range(5 if width > NARROW else 3, 0, -1))
    marked = next((x for x in every if len({*map(figure.x_form, x)}) == len(x)), [])
    out = plane.axes(marked, figure.x_form, figure.y_form)
    out.append(text(0, 12, f"{figure.y}{', logarithmic' if plane.log else ''}", "quiet"))
    out.append(text(plane.right, plane.bottom + 40, figure.x, "quiet", "end"))
    corners = _stairs([plane.at(*at[i]) for i in figure.front])
    if len(corners) > 1:
        out.append(line(corners, "front"))
    placed = [(p, *plane.at(p.x, p.y)) for p in figure.points]
    out += [_mark(p, x, y, figure.numbered) for p, x, y in placed]
    return [*out, *_labels(placed, width, figure.numbered)], width, height


def _stairs(at: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a line in steps from point to point; models beyond it are beaten.

    >>> _stairs([(0, 0), (5, 7)])
    [(0, 0), (5, 0), (5, 7)]
    """
    out = list(at[:1])
    for (_, before), (a, b) in pairwise(at):
        out += [(a, before), (a, b)]
    return out


def _mark(point: PlotPoint, x: float, y: float, numbered: bool) -> str:
    """Return a disc, with its run's number where it has one; comparisons are squares."""
    ours = point.kind in ("original", "result", "fewer layers", "candidate")
    number = numbered and point.run and ours
    radius = 9 if number else 4 if point.kind == "candidate" else 6
    shape = f'<circle r="{radius}"/>' if ours else '<path d="M-5 -5h10v10h-10z"/>'
    shape += f"<text y='4' text-anchor='middle'>{point.run}</text>" if number else ""
    kind = point.kind if ours else "comparison"
    beaten = "" if point.ahead else " beaten"
    tip = escape(point.tip)
    marked = f'class="point {kind}{beaten}" transform="translate({x:.0f} {y:.0f})"'
    inside = f"<title>{tip}</title>{shape}"
    if not point.run:
        return f'<g {marked} role="img" aria-label="{tip}">{inside}</g>'
    return f'<a {marked} href="#run-{point.run}" aria-label="{tip}">{inside}</a>'


def _labels(
    placed: Sequence[tuple[PlotPoint, float, float]], width: float, numbered: bool
) -> Iterator[str]:
    """Yield the names beside the points that have room for one, those that none beats first."""
    taken = [(x - 8, y - 8, x + 8, y + 8) for _, x, y in placed]
    shown = [
        (p, x, y)
        for p, x, y in placed
        if (p.ahead or p.kind != "candidate") and not (numbered and p.kind == "result")
    ]
    for point, x, y in sorted(shown, key=lambda t: not t[0].ahead):
        long = LETTER * len(point.label)
        level = [(11.0, 4.0, "start"), (-11.0, 4.0, "end"), (0.0, -12.0, "middle")]
        slanted = [(9.0 * x, y, e) for y in (-8.0, 17.0) for x, e in ((1, "start"), (-1, "end"))]
        places = [*level, (0.0, 21.0, "middle"), *slanted]
        for dx, dy, anchor in places:
            left = x + dx - {"start": 0.0, "end": long, "middle": long / 2}[anchor]
            area = (left, y + dy - 10, left + long, y + dy + 3)
            if left < 60 or area[2] > width or any(_meet(area, other) for other in taken):
                continue
            taken.append(area)
            kind = "label result" if point.kind == "result" else "label"  # names are anybody's
            yield text(x + dx, y + dy, point.label, kind, anchor)
            break


def _meet(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return True if two areas (left, top, right, bottom) overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# --- lines ---------------------------------------------------------------------------------------


def _line_chart(figure: Lines) -> Drawing:
    """Return lines over a common horizontal axis."""
    series = [s for s in figure.series if s.points]
    named = len(series) > 1
    width, height = 430.0 if named else 344.0, 220.0
    right = 22.0 + (max(len(s.name) for s in series) * LETTER if named else 0)
    every = [point for s in series for point in s.points]
    plane = Plane(every, (0.0, 22.0, width - right, height - 36.0), figure.log)
    plane.left = 14.0 + LETTER * max((len(f"{y:,.4g}") for y in plane.levels()), default=0)
    whole = all(x.is_integer() for x, _ in every)
    across = [x for x in ticks(plane.low, plane.high, 5) if not whole or float(x).is_integer()]
    out = [text(0, 10, f"{figure.y}{', logarithmic' if plane.log else ''}", "quiet")]
    out += plane.axes(across, "{:g}".format)
    out.append(text((plane.left + plane.right) / 2, height - 3, figure.x, "quiet", "middle"))
    for n, s in enumerate(series):
        out += _line(figure, s, n, plane)
    return [*out, *(_names(series, plane, width - right + 7) if named else ())], width, height


def _line(figure: Lines, series: Series, n: int, plane: Plane) -> list[str]:
    """Return one line, with a tooltip at each point if there are few."""
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
    """Return the names of lines at their ends, moved so that none overlap."""
    ends = [(plane.at(*s.points[-1])[1] + 4, s.name, n) for n, s in enumerate(series)]
    out, floor = [], plane.bottom + 4
    for y, name, n in sorted(ends, reverse=True):
        floor = min(y, floor)
        out.append(text(x, floor, name, f"end s{n % COLOURS}"))
        floor -= 13
    return out


# --- bars ----------------------------------------------------------------------------------------


def _bar_chart(figure: Bars) -> Drawing:
    """Return columns of bars beside each other, each on a scale of its own from 0."""
    head, room, bar = 22.0, 140.0, 74.0
    left = 12 + LETTER * max(map(len, (figure.row, *figure.rows)))
    out = [text(left - 8, 10, figure.row, "quiet", "end")]
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


# --- heat maps -----------------------------------------------------------------------------------


def heat_maps(figure: Heat) -> Drawing:
    """Return the map of a figure, or several side by side."""
    panels = [(panel, list(rows)) for panel, rows in groupby(figure.rows, lambda r: r.panel)]
    if len(panels) == 1:
        cell = min(40.0, max(7.0, 320 / max(1, len(figure.columns))))
        return _map(figure, figure.rows, figure.column, ROW, cell)
    across = min(ACROSS, len(panels))
    cell = min(20.0, max(3.0, (600 / across - 44) / len(figure.columns)))
    out, widths, heights = [], [], []
    for n, (panel, rows) in enumerate(panels):
        body, width, height = _map(figure, rows, panel, cell, cell)
        x, y = (width + 4) * (n % across), (height + 10) * (n // across)
        out.append(shift(x, y, body))
        widths.append(x + width)
        heights.append(y + height)
    return out, max(widths), max(heights)


def _map(figure: Heat, rows: Sequence[Row], head: str, row: float, cell: float) -> Drawing:
    """Return one map under a heading, bars or notes at the right of its rows."""
    top, bar = 30.0, 62.0
    left = 12 + LETTER * max(map(len, (figure.row, *(r.label for r in rows))))
    right = left + len(figure.columns) * cell + 14
    gap = 2.0 if cell >= 14 and row >= 10 else 1.0 if cell >= 6 else 0.5
    darkest = max((v for r in rows for v in r.values if v is not None), default=0.0) or 1.0
    barred = [r.bar for r in rows if r.bar is not None]
    widest = max(barred, default=0.0) or 1.0
    out = [text(left, 10, head, "quiet"), text(right, 10, figure.side, "quiet")]
    out.append(text(left - 8, top - 5, figure.row, "quiet", "end"))
    middle = (cell - gap) / 2
    for k in range(0, len(figure.columns), math.ceil(22 / cell)):
        out.append(text(left + k * cell + middle, top - 5, figure.columns[k], "quiet", "middle"))
    many = sum(len(r.values) for r in rows) > FEW
    for n, r in enumerate(rows):
        y, note = top + n * row, r.note if r.bar is None else share(r.bar)
        out += _cells(figure, r, (left, y, cell, gap, row - gap), darkest, many)
        base, x = y + row / 2 + 3, right
        if n % math.ceil(10 / row) == 0:
            out.append(text(left - 8, base, r.label, "quiet", "end"))
        if r.bar is not None:
            long = bar * r.bar / widest
            out.append(rect(x, y + row * 0.28, long, row * 0.36, "bar result", tip=note))
            x += long + 5
        if row >= 13:
            out += [text(x, base, note, "quiet")] if note else []
            for k, value in enumerate(r.values if figure.written and cell >= 26 else ()):
                if value is not None:
                    written = number(value, figure.written)
                    out.append(text(left + k * cell + middle, base, written, "cell", "middle"))
    beside = [] if barred else [len(r.note) for r in rows]
    room = max(bar + 44 if barred else 0.0, LETTER * max([len(figure.side), *beside]))
    return out, right + (room or -8), top + len(rows) * row


def _cells(
    figure: Heat, r: Row, at: tuple[float, float, float, float, float], darkest: float, many: bool
) -> Iterator[str]:
    """Yield a row of cells, the darker the more, each with a tooltip.

    If there are many, those of a shade are one path, and the row has one tooltip, which keeps a
    large model's page small.
    """
    left, y, cell, gap, height = at
    width, shades, crosses = cell - gap, dict[tuple[str, int], str](), ""
    for k, value in enumerate(r.values):
        kept = k in r.outlined
        if value is None and r.gone is None and not kept:
            continue
        depth = 0.6 if value is None else max(0.0, value) / (r.darkest or darkest)
        strength, x = min(1.0, 0.05 + 0.75 * depth), left + k * cell
        kind = "gone" if k in (r.gone or ()) else "heat kept" if kept else "heat"
        if kind == "gone":
            crosses += f"M{x + 1:.4g} {y + height - 1:.4g}L{x + width - 1:.4g} {y + 1:.4g}"
        if many:
            path = f"M{x:.4g} {y:.4g}h{width:.3g}v{height:.3g}h-{width:.3g}z"
            shade = kind, round(LEVELS * strength)
            shades[shade] = shades.get(shade, "") + path
        else:
            yield rect(x, y, width, height, kind, strength, _tip(figure, r, k))
    if many:
        removed = f": removed {ranges(r.gone)}" if r.gone else ""
        where = ", ".join(filter(None, (r.panel, f"{figure.row} {r.label}")))
        yield f"<g><title>{escape(where + removed)}</title>"
        for (kind, level), path in shades.items():
            yield f'<path class="{kind}" fill-opacity="{level / LEVELS:g}" d="{path}"/>'
        yield "</g>"
    if crosses:
        yield f'<path class="cross" d="{crosses}"/>'


def _tip(figure: Heat, r: Row, k: int) -> str:
    """Return the tooltip of one cell: ``layer 3, expert 5: 12.5 % of calls, removed``."""
    value, panel = r.values[k], f"{r.panel}, " if r.panel else ""
    written = "" if value is None else f": {number(value, figure.form)} {figure.of}".rstrip()
    fate = "" if r.gone is None else ", removed" if k in r.gone else ", kept"
    return f"{panel}{figure.row} {r.label}, {figure.column} {figure.columns[k]}{written}{fate}"
