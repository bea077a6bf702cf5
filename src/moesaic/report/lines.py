"""Line charts as inline SVG: a figure by layer, by step, or of models against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup, escape

from moesaic.report.charts import Plane, apart, line, svg, text, ticks

Series = tuple[str, Sequence[tuple[float, float]]]
"""A name and its points."""
MOST = 400
"""Points of a line that are drawn; a longer one is thinned."""
DOTS = 48
"""Points up to which each is marked, with a tooltip."""
COLOURS = 4


def lines(
    series: Sequence[Series],
    label: str,
    below: str,
    strong: str = "",
    width: float = 344,
    height: float = 220,
    form: Callable[[float], str] = "{:,.4g}".format,
    ticked: Callable[[float], str] = "{:g}".format,
    notes: Sequence[str] = (),
    log: bool | None = None,
) -> Markup | str:
    """Lines over a common horizontal axis; values that are no finite numbers are left out.

    Args:
        series: the lines, each named at its end if there are several.
        label: of the vertical axis.
        below: of the horizontal axis.
        strong: the line that is drawn thick.
        width: in pixels.
        height: in pixels.
        form: how a value is written in a tooltip.
        ticked: how a place on the horizontal axis is written.
        notes: written beside the points of the first line.
        log: a logarithmic scale; None where values are far apart.
    """
    drawn = [(n, [p for p in points if all(map(math.isfinite, p))]) for n, points in series]
    drawn = [(n, points) for n, points in drawn if points]
    if not drawn:
        return ""
    named = len(drawn) > 1
    top, foot = 22.0, 36.0
    right = 22.0 + (max(len(n) for n, _ in drawn) * 6.1 if named else 0)
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    plane = Plane(xs, ys, (0.0, top, width - right, height - foot), log)
    plane.left = 14.0 + 6.2 * max((len(f"{y:,.4g}") for y in plane.levels()), default=0)
    whole = all(float(x).is_integer() for x in xs)
    across = [x for x in ticks(plane.low, plane.high, 5) if plane.low <= x <= plane.high]
    shown = [x for x in across if not whole or float(x).is_integer()]
    out = [text(0, 10, f"{label}{', logarithmic' if plane.log else ''}", "quiet")]
    out += plane.axes(shown, ticked)
    out.append(text((plane.left + plane.right) / 2, height - 3, below, "quiet", "middle"))
    ends = []
    for n, (name, points) in enumerate(drawn):
        colour = f"s{n % COLOURS}"
        step = -(-len(points) // MOST)
        thick = " strong" if name and name == strong else " dash" if n >= COLOURS else ""
        out.append(line([plane.at(*p) for p in points[::step]], f"series {colour}{thick}"))
        for k, (x, y) in enumerate(points if len(points) <= DOTS else ()):
            tip = f"{name + ', ' if name else ''}{below} {ticked(x)}: {form(y)}"
            a, b = plane.at(x, y)
            out.append(
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" class="dot {colour}">'
                f"<title>{escape(tip)}</title></circle>"
            )
            if n == 0 and k < len(notes):
                out.append(text(a, b - 8, notes[k], "quiet", "middle"))
        ends.append((plane.at(*points[-1])[1] + 4, name, n % COLOURS))
    if named:
        for y, name, n in apart(ends, 13, height - foot + 4):
            out.append(text(width - right + 7, y, name, f"end s{n}"))
    return svg(width, height, out, f"{label} by {below}")
