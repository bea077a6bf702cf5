"""Charts as inline SVG. Colours come from the style sheet around them, by class.

All sizes are in CSS pixels at natural size, so that text stays as large as the page's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from markupsafe import Markup, escape

from moesaic.foreign import Values
from moesaic.report import figures

OKABE_ITO = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a8a8a",
)  # fmt: skip
"""Colours that are told apart with any colour vision. Black is left out: it is the ink."""


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


def svg(width: float, height: float, body: Iterable[str], label: str) -> Markup:
    """A chart of a natural size: a small one shrinks with a narrow page, a wide one scrolls."""
    kind = "chart fit" if width < 360 else "chart"
    return Markup(
        f'<svg class="{kind}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
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


# --- routing -------------------------------------------------------------------------------------


def heat(
    routing: Sequence[tuple[int, Values]],
    row: float = 19,
    cell: float | None = None,
    bar: float = 62,
    unit: str = "petal",
) -> tuple[list[str], float, float]:
    """Routing share by layer and petal, and its divergence from uniform as bars.

    Returns the drawing, its width and its height.
    """
    count = max(len(r.get("share") or ()) for _, r in routing)
    cell = cell or min(40.0, max(8.0, 320 / count))
    left, head = 30.0, 30.0
    side = left + count * cell + 16
    most = max((s for _, r in routing for s in r.get("share") or ()), default=0) or 1
    widest = max((r.get("jsd") or 0 for _, r in routing), default=0) or 1
    every = math.ceil(22 / cell)
    out = [text(left, 10, unit, "quiet"), text(side, 10, "JSD from uniform", "quiet")]
    out += [
        text(left + (j + 0.5) * cell - 1, head - 5, j, "quiet", "middle")
        for j in range(0, count, every)
    ]
    numbers = cell >= 26 and row >= 13
    gap = 2 if cell >= 14 and row >= 10 else 1
    for i, (layer, r) in enumerate(routing):
        y = head + i * row
        base = y + row / 2 + 3
        if row >= 10 or i % 2 == 0:
            out.append(text(left - 8, base, layer, "quiet", "end"))
        for j, share in enumerate(r.get("share") or ()):
            x = left + j * cell
            tip = f"layer {layer}, {unit} {j}: {figures.percent(share, 1)}"
            strength = 0.05 + 0.7 * share / most
            out.append(rect(x, y, cell - gap, row - gap, "heat", strength, tip))
            if numbers:
                out.append(text(x + (cell - gap) / 2, base, f"{100 * share:.0f}", "cell", "middle"))
        if (jsd := r.get("jsd")) is not None:
            long = bar * jsd / widest
            tip = f"layer {layer}: JSD {jsd:.4f}"
            out.append(rect(side, y + row * 0.28, long, row * 0.36, "bar result", tip=tip))
            if row >= 13:
                out.append(text(side + long + 5, base, f"{jsd:.3f}", "quiet"))
    return out, side + bar + 38, head + len(routing) * row


def heat_map(routing: Sequence[tuple[int, Values]], unit: str = "petal") -> Markup:
    """The heat map as a chart of its own."""
    body, width, height = heat(routing, unit=unit)
    return svg(width, height, body, f"Share of routed tokens by layer and {unit}")


# --- channels ------------------------------------------------------------------------------------


def apart(
    labels: list[tuple[float, str, int]], gap: float, floor: float
) -> list[tuple[float, str, int]]:
    """Labels moved up until they stand clear of each other, the lowest first."""
    out: list[tuple[float, str, int]] = []
    for y, label, n in sorted(labels, reverse=True):
        limit = out[-1][0] - gap if out else floor
        out.append((min(y, limit), label, n))
    return out


def spectrum(layer: int, mass: Sequence[float]) -> Markup:
    """One layer's cumulative activation over its channels, the strongest first."""
    width, height, top = 60.0, 58.0, 16.0
    last = max(1, len(mass) - 1)
    points = [(1 + 58 * i / last, top + 41 * (1 - m)) for i, m in enumerate(mass)]
    path = " ".join(f"L{x:.1f} {y:.1f}" for x, y in points)
    told = ", ".join(
        f"top {figures.percent(i / last)}: {figures.percent(mass[i])}"
        for i in sorted({round(last * q) for q in (0.05, 0.25, 0.5)} - {0})
    )
    body = [
        text(1, 10, layer, "quiet"),
        line([(1, top + 41), (59, top)], "grid"),
        f'<path d="M1 {top + 41:g} {path} L59 {top + 41:g}Z" class="area"/>',
        line(points, "series s0"),
        f'<rect width="{width:g}" height="{height:g}" fill="transparent">'
        f"<title>{escape(f'layer {layer}; {told}')}</title></rect>",
    ]
    return svg(width, height, body, f"Activation spectrum of layer {layer}")


# --- runs ----------------------------------------------------------------------------------------

MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
    lambda x, y: f"M{x:.1f} {y - 5:.1f}l5 9h-10z",
    lambda x, y: f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
    lambda x, y: f"M{x:.1f} {y + 5:.1f}l5 -9h-10z",
)
"""Shapes of comparisons, in turn."""


def mark(kind: str, kinds: Sequence[str], x: float, y: float) -> str:
    """The path of a point's shape: a circle for original and result, else by its place."""
    if kind in ("original", "result"):
        return f"M{x - 5:.1f} {y:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0"
    others = [k for k in kinds if k not in ("original", "result")]
    return MARKS[others.index(kind) % len(MARKS)](x, y)


Point = tuple[str, str, float, float]
"""Kind, name for the tooltip, ratio, perplexity."""


def trade(
    groups: Mapping[str, Sequence[Point]],
    below: str = "active ratio, measured",
    ratio: str = "active",
) -> Markup:
    """Perplexity over a ratio: the points of each model, its results joined by a line."""
    width, height, left, right, top, foot = 720.0, 340.0, 46.0, 18.0, 14.0, 62.0
    points = [p for group in groups.values() for p in group]
    xs, ys = [p[2] for p in points], [p[3] for p in points]
    low, high = min([*xs, 0.95]) - 0.02, max([*xs, 1.0]) + 0.02
    log = max(ys) / max(min(ys), 1e-9) > 8
    scale: Callable[[float], float] = math.log if log else float
    least, most = scale(min(ys)), scale(max(ys))
    room = (most - least) * 0.08 or 0.1 * abs(most) or 1.0
    least, most = least - room, most + room

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (width - left - right) * (x - low) / (high - low),
            top + (height - top - foot) * (1 - (scale(y) - least) / (most - least)),
        )

    kinds = list(dict.fromkeys(p[0] for p in points))
    out = []
    for y in powers(math.exp(least), math.exp(most)) if log else ticks(least, most):
        out.append(line([(left, at(low, y)[1]), (width - right, at(low, y)[1])], "grid"))
        out.append(text(left - 8, at(low, y)[1] + 4, f"{y:,.4g}", "quiet", "end"))
    for x in ticks(low, high, 6):
        here = at(x, ys[0])[0]
        out.append(text(here, height - foot + 16, figures.percent(x), "quiet", "middle"))
    base = height - foot + 34
    out.append(text(width - right, base, below, "quiet", "end"))
    out.append(text(left, base, f"perplexity{', logarithmic' if log else ''}", "quiet"))
    for n, (model, group) in enumerate(groups.items()):
        ours = sorted((p[2], p[3]) for p in group if p[0] in ("original", "result"))
        out.append(line([at(*p) for p in ours], f"series s{n % 4} thin"))
        for kind, name, x, y in sorted(group, key=lambda p: p[0] in ("original", "result")):
            tip = f"{name}: {figures.percent(x, 1)} {ratio}, perplexity {figures.perplexity(y)}"
            shape = mark(kind, kinds, *at(x, y))
            plain = "mark" if kind in ("original", "result") else "mark other"
            hollow = " hollow" if kind == "original" else ""
            out.append(
                f'<path d="{shape}" class="{plain}{hollow} s{n % 4}">'
                f"<title>{escape(tip)}</title></path>"
            )
        if len(groups) > 1 and ours:
            x, y = at(*ours[0])
            out.append(text(x + 9, y - 7, model, f"end s{n % 4}"))
    at_x = left
    for kind in kinds:
        shape = mark(kind, kinds, at_x + 5, height - 10)
        plain = "mark" if kind in ("original", "result") else "mark other"
        hollow = " hollow" if kind == "original" else ""
        out.append(f'<path d="{shape}" class="{plain}{hollow} s0"/>')
        out.append(text(at_x + 15, height - 6, kind, "quiet"))
        at_x += 32 + 6.4 * len(kind)
    return svg(width, height, out, f"Perplexity over {below}")


def powers(low: float, high: float) -> list[float]:
    """One, two and five times powers of ten in a range."""
    every = [m * 10.0**e for e in range(-3, 10) for m in (1, 2, 5)]
    return [v for v in every if low <= v <= high]
