"""Charts as inline SVG. Colours come from the style sheet around them, by class.

All sizes are in CSS pixels at natural size, so that text stays as large as the page's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup, escape

from moesaic.report import figures

OKABE_ITO = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a8a8a",
)  # fmt: skip
"""Colours that are told apart with any colour vision. Black is left out: it is the ink."""
Figure = tuple[str, str, Markup]
"""A caption in a few words, how to read the drawing, the drawing."""
FAR = 8
"""Values further apart than this, as a ratio, are drawn on a logarithmic scale."""
FEW = 400
"""Shaded rectangles of one drawing up to which each has a tooltip of its own."""
LEVELS = 20
"""Shades that many rectangles are drawn in."""


def colours(count: int) -> list[str]:
    """One colour a petal: Okabe and Ito's while they last, else hues around the circle.

    Neighbouring numbers differ in hue and in lightness.

    >>> colours(3), len(set(colours(64)))
    (['#0072b2', '#e69f00', '#009e73'], 64)
    """
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    return [f"hsl({i * 137.508 % 360:.1f} 62% {(38, 52, 64)[i % 3]}%)" for i in range(count)]


# --- pieces --------------------------------------------------------------------------------------


def svg(width: float, height: float, body: Iterable[str], label: str, role: str = "img") -> Markup:
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
    seen = "" if opacity == 1 else f' fill-opacity="{opacity:.3f}"'
    shape = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
        f'rx="1.5" class="{kind}"{seen}'
    )
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def line(points: Sequence[tuple[float, float]], kind: str, tip: str = "") -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<polyline points="{path}" class="{kind}">{inside}</polyline>'


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


def powers(low: float, high: float) -> list[float]:
    """One, two and five times powers of ten in a range."""
    every = [m * 10.0**e for e in range(-3, 12) for m in (1, 2, 5)]
    return [v for v in every if low <= v <= high]


class Plane:
    """The area of a plot, and where on it a point of two figures lies.

    Args:
        xs: of all points.
        ys: of all points.
        box: left, top, right and bottom edge, in pixels.
        log: a logarithmic vertical axis; None where values are :data:`FAR` apart.
        edge: room left and right of the points, as a share of their range.
    """

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        box: tuple[float, float, float, float],
        log: bool | None = None,
        edge: float = 0.0,
    ) -> None:
        self.left, self.top, self.right, self.bottom = box
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
        """Round values on the vertical axis."""
        if self.log:
            return powers(math.exp(self.least), math.exp(self.most))
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
        out = []
        for y in map(self.up, levels := self.levels()):
            out.append(line([(self.left, y), (self.right, y)], "grid"))
        for value in levels:
            out.append(text(self.left - 7, self.up(value) + 4, risen(value), "quiet", "end"))
        for value in marked:
            place = (self.across(value), self.bottom + 15)
            out.append(text(*place, ticked(value), "quiet", "middle"))
        return out


@dataclass(frozen=True)
class Shade:
    """A rectangle, the darker the more."""

    x: float
    y: float
    width: float
    height: float
    strength: float
    tip: str = ""
    kind: str = "heat"
    crossed: bool = False

    @property
    def cross(self) -> list[tuple[float, float]]:
        """From corner to corner."""
        right, bottom = self.x + self.width, self.y + self.height
        return [(self.x + 1, bottom - 1), (right - 1, self.y + 1)]


def shaded(rows: Sequence[tuple[str, Sequence[Shade]]]) -> list[str]:
    """Rows of shaded rectangles.

    Few have a tooltip each. More than :data:`FEW` are drawn together, those of a shade as one
    path, and have one tooltip a row, which keeps a large model's page small.

    Args:
        rows: of each its tooltip, for the case that it has but one, and its rectangles.
    """
    if sum(len(row) for _, row in rows) <= FEW:
        return [mark for _, row in rows for shade in row for mark in _alone(shade)]
    out = []
    for tip, row in rows:
        out.append(f"<g><title>{escape(tip)}</title>")
        ranked = sorted(row, key=_level)
        for (kind, level), alike in groupby(ranked, key=_level):
            path = "".join(
                f"M{s.x:.4g} {s.y:.4g}h{s.width:.3g}v{s.height:.3g}h-{s.width:.3g}z" for s in alike
            )
            out.append(f'<path class="{kind}" fill-opacity="{level / LEVELS:g}" d="{path}"/>')
        crosses = [s.cross for s in row if s.crossed]
        path = "".join(f"M{a:.4g} {b:.4g}L{c:.4g} {d:.4g}" for (a, b), (c, d) in crosses)
        out.append(f'<path class="cross" d="{path}"/></g>' if path else "</g>")
    return out


def _alone(shade: Shade) -> list[str]:
    place = (shade.x, shade.y, shade.width, shade.height)
    drawn = [rect(*place, shade.kind, shade.strength, shade.tip)]
    return [*drawn, line(shade.cross, "cross")] if shade.crossed else drawn


def _level(shade: Shade) -> tuple[str, int]:
    return shade.kind, round(LEVELS * min(1.0, shade.strength))


# --- perplexity ----------------------------------------------------------------------------------


def bars(
    models: Sequence[tuple[str, float | None, float | None]],
    width: float = 340,
    row: float = 30,
    bar: float = 12,
    left: float = 76,
) -> tuple[list[str], float]:
    """Perplexity of models by name, with a ratio at the right. Returns the drawing and its height.

    What is more than four times as high as the highest of original and result is cut, and marked.
    """
    room = width - left - 104
    finite = {n: p for n, p, _ in models if p is not None and math.isfinite(p)}
    ours = [finite[n] for n in ("original", "result") if n in finite]
    most = max(finite.values(), default=1.0)
    cut = 4 * max(ours) if ours else most
    top = min(most, cut) or 1.0
    out = []
    for i, (name, value, ratio) in enumerate(models):
        y = i * row
        middle = y + row / 2 + 4
        kind = name if name in ("original", "result") else "other"
        out.append(text(left - 10, middle, name, f"name {kind}", "end"))
        shown = value if value is not None and math.isfinite(value) else None
        long = room * min(shown, top) / top if shown is not None else (0 if value is None else room)
        out.append(rect(left, y + (row - bar) / 2, long, bar, f"bar {kind}"))
        if value is not None and (shown is None or shown > top):
            for shift in (14, 18):
                x, b = left + room - shift, y + (row - bar) / 2
                out.append(line([(x, b + bar + 1), (x + 4, b - 1)], "break"))
        out.append(text(left + long + 7, middle, figures.perplexity(value), f"value {kind}"))
        out.append(text(width, middle, figures.percent(ratio, 1), "quiet", "end"))
    return out, row * len(models)


def perplexity_bars(
    models: Sequence[tuple[str, float | None, float | None]], ratio: str = "active"
) -> Markup:
    """Perplexity bars as a chart of their own, a ratio at the right."""
    body, height = bars(models)
    head = [
        text(76, 11, "perplexity, lower is better", "quiet"),
        text(340, 11, ratio, "quiet", "end"),
    ]
    inner = f'<g transform="translate(0 18)">{"".join(body)}</g>'
    return svg(340, height + 20, [*head, inner], "Perplexity of each model")


def uneven(shares: Sequence[float], unit: str) -> str:
    """The most used of a layer's experts, and the least used, in words.

    >>> uneven([0.1, 0.6, 0.3], "expert").replace(figures.NBSP, " ")
    'most to expert 1 (60.0 %), least to expert 0 (10.0 %)'
    """
    if not shares:
        return "nothing routed"
    most, least = shares.index(max(shares)), shares.index(min(shares))
    told = [f"{unit} {j} ({figures.percent(shares[j], 1)})" for j in (most, least)]
    return f"most to {told[0]}, least to {told[1]}"


def apart(
    labels: list[tuple[float, str, int]], gap: float, floor: float
) -> list[tuple[float, str, int]]:
    """Labels moved up until they stand clear of each other, the lowest first."""
    out: list[tuple[float, str, int]] = []
    for y, label, n in sorted(labels, reverse=True):
        limit = out[-1][0] - gap if out else floor
        out.append((min(y, limit), label, n))
    return out
