"""The frontier: what the models of some runs lose, over what they store and run, and how fast.

One for each original and text: models that were made of others say nothing of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from moesaic.record import Record
from moesaic.report import numbers, read
from moesaic.report.draw import Plane, line, svg, text, ticks
from moesaic.report.read import figure, part
from moesaic.report.tables import Format, tenths

SIZE = (680.0, 400.0)
BOX = (58.0, 30.0, 664.0, 348.0)
"""Left, top, right and bottom edge of the plot."""
SHAPES = ("M-5 -5h10v10h-10z", "M0 -6l6 11h-12z", "M0 -7l7 7l-7 7l-7 -7z", "M0 6l6 -11h-12z")
"""Marks of comparisons, in turn."""
APART = 0.002
"""Figures that differ by less than this share are the same: nothing is to be seen along them."""


@dataclass(frozen=True)
class Axis:
    """One figure of a model, along which models are compared."""

    name: str
    form: Format
    path: tuple[str, ...]
    """Where it stands in a record, ``*`` for the model's name; without one it is the result's."""
    original: float | None = None
    """Of the original, where the figure is one beside the original's."""
    sign: int = 1
    """1 where less is better, -1 where more is."""

    @property
    def title(self) -> str:
        """What is written beside it."""
        relative = ", relative to the original" if self.name.endswith("speed") else ""
        return f"{self.name}{relative} ({'less' if self.sign > 0 else 'more'} is better)"

    def value(self, record: Record, name: str) -> float | None:
        """The figure of a record's model; None where it was not measured."""
        scores = part(record.measured, "scores")
        if name == "original" and self.original is not None:
            values = (self.value(record, other) for other in scores if other != "original")
            return self.original if any(value is not None for value in values) else None
        if "*" not in self.path and name != "result":
            return None
        return figure(record.measured, *(name if key == "*" else key for key in self.path))


def _score(key: str) -> tuple[str, ...]:
    return "scores", "*", key


SAVED = (
    Axis("bytes on disk", numbers.memory, ("files", "*")),
    Axis("bytes in memory", numbers.memory, _score("total_bytes")),
    Axis("active parameters", numbers.count, _score("active_parameters")),
    Axis("decode speed", numbers.times, ("speed_ratio", "decode"), 1.0, -1),
    Axis("prefill speed", numbers.times, ("speed_ratio", "prefill"), 1.0, -1),
    Axis("peak memory", numbers.memory, ("speed", "*", "peak_memory_bytes")),
)
"""What a model may save: the horizontal axes."""
LOST = (
    Axis("perplexity", numbers.perplexity, _score("perplexity")),
    Axis("KL from the original", numbers.share, _score("kl"), 0.0),
    Axis("top-1 agreement", tenths, _score("top1_agreement"), 1.0, -1),
    Axis("tasks, of the original", tenths, _score("recovery"), 1.0, -1),
)
"""What a model may lose: the vertical axes."""
AXES = (*SAVED, *LOST)


@dataclass(frozen=True)
class Point:
    """One measured model."""

    run: int
    """The run it belongs to, from 1; 0 for an original."""
    kind: str
    """``original``, ``result``, ``fewer layers``, or a comparison's name."""
    name: str
    """What it is, in a few words."""
    title: str
    """What it is, in full."""
    figures: tuple[float | None, ...]
    """Along :data:`AXES`."""


@dataclass(frozen=True)
class Frontier:
    """The picture of one original's models."""

    model: str
    """The original, and which text where runs were measured on several."""
    said: str
    """The axes, and which models are on the frontier."""
    drawn: Markup
    kinds: list[str]
    """Comparisons that are drawn."""


# --- points --------------------------------------------------------------------------------------


def _text(record: Record) -> tuple[str, ...]:
    """The model, its own figure and the text: runs that have all of them alike are comparable."""
    settings = part(record.measured, "evaluation")
    keys = ("data", "length", "max_tokens", "bos", "limit", "shots")
    perplexity = f"{figure(record.measured, 'scores', 'original', 'perplexity') or 0:.4g}"
    return (record.model, perplexity, *(numbers.plain(settings.get(key)) for key in keys))


def points(records: Sequence[Record]) -> dict[str, list[Point]]:
    """Every model that was scored, by its original; and by the text, where there are several.

    An original that several runs share is one point.
    """
    groups: dict[tuple[str, ...], list[tuple[int, Record]]] = {}
    for n, record in enumerate(records, 1):
        if part(record.measured, "scores"):
            groups.setdefault(_text(record), []).append((n, record))
    models = [read.model_name(runs[0][1]) for runs in groups.values()]
    by_name = {}
    for i, (model, runs) in enumerate(zip(models, groups.values(), strict=True)):
        texts = models.count(model)
        name = model if texts == 1 else f"{model}, text {models[: i + 1].count(model)}"
        every = [p for n, record in runs for p in _points(record, n, len(records) > 1)]
        first = next((p for p in every if p.kind == "original"), None)
        by_name[name] = [p for p in every if p.kind != "original" or p is first]
    return by_name


def _points(record: Record, run: int, several: bool) -> Iterator[Point]:
    """The models of one run."""
    result, steps = f"run {run}" if several else "the result", read.step_labels(record)
    for name in read.names(part(record.measured, "scores")):
        kind, number = name, run
        if name == "0":  # no layer was taken: the original again
            continue
        if name == "original":
            number, short, title = 0, "the original", f"{read.model_name(record)}, the original"
        elif name == "result":
            short, title = result, read.title(record)
        elif name.isdecimal():
            kind = "fewer layers"
            short, title = f"{result} with {name} of its layers", f"{steps}, only {name} layers"
        else:
            title = f"{read.variants(record).get(name, name)}, beside {steps}"
            short = f"{name} beside {result}"
        yield Point(number, kind, short, title, tuple(axis.value(record, name) for axis in AXES))


def best(places: Sequence[tuple[float, float]]) -> list[int]:
    """The points that no other beats: none is as good in both and better in one. Less is better.

    Figures that differ by less than :data:`APART` count as equal.

    >>> best([(1, 5), (2, 3), (3, 4), (2, 3), (4, 1)])
    [0, 1, 3, 4]
    >>> best([(100, 20), (99.9, 30)])
    [0]
    """

    def ahead(a: float, b: float) -> int:
        """1 where a is less than b, -1 where it is more, 0 where they are as good as equal."""
        return 0 if abs(a - b) <= APART * max(abs(a), abs(b)) else 1 if a < b else -1

    def beaten(x: float, y: float) -> bool:
        return any(
            min(ahead(a, x), ahead(b, y)) >= 0 and max(ahead(a, x), ahead(b, y)) > 0
            for a, b in places
        )

    return [i for i, (x, y) in enumerate(places) if not beaten(x, y)]


# --- the picture ---------------------------------------------------------------------------------


def frontiers(records: Sequence[Record]) -> list[Frontier]:
    """A picture for every original that three models or more were measured of, itself among them.

    Its axes are those that most models have.
    """
    pictures = [
        _frontier(model, models, len(records) > 1)
        for model, models in points(records).items()
        if len(models) > 2
    ]
    return [f for f in pictures if f is not None]


def _frontier(model: str, models: Sequence[Point], numbered: bool) -> Frontier | None:
    """The picture of some models; None where no two axes tell them apart."""
    axes = _axes(models)
    across = next((along for along in axes if along[0] in SAVED), None)
    rising = next((along for along in axes if along[0] in LOST), None)
    if across is None or rising is None:
        return None
    said, drawn, places = _plot(across, rising, models)
    shared = list(dict.fromkeys(p.kind for p in models if p.kind not in ("original", "result")))
    marks = [
        _mark(point, shared, place, numbered)
        for point, place in zip(models, places, strict=True)
        if place is not None
    ]
    label = f"Models made of {model} by what they lose and what they save"
    return Frontier(model, said, svg([*drawn, *marks], *SIZE, label, role="group"), shared)


Along = tuple[Axis, list[float | None]]
"""An axis, and where each model is along it."""
Place = tuple[float, float, bool] | None
"""Where a point lies on a picture and whether it is on the frontier; None where it is not there."""


def _axes(models: Sequence[Point]) -> list[Along]:
    """The axes along which models differ, first those that most models have."""
    axes = []
    for axis, column in zip(AXES, zip(*(p.figures for p in models), strict=True), strict=True):
        values = [v if v is not None and math.isfinite(v) else None for v in column]
        finite = [v for v in values if v is not None]
        if len(finite) > 1 and max(finite) - min(finite) > APART * max(map(abs, finite)):
            axes.append((axis, values))
    return sorted(axes, key=lambda along: along[1].count(None))


def _plot(x: Along, y: Along, models: Sequence[Point]) -> tuple[str, list[str], list[Place]]:
    """Return a caption, axes and frontier, and where each point lies."""
    coordinates = {
        n: (a, b)
        for n, (a, b) in enumerate(zip(x[1], y[1], strict=True))
        if a is not None and b is not None
    }
    places: list[Place] = [None] * len(models)
    if not coordinates:
        return f"No model has both {y[0].name} and {x[0].name}.", [], places
    out, plane, front = scatter([*coordinates.values()], x[0], y[0], BOX)
    members = list(coordinates)
    for i, n in enumerate(members):
        places[n] = (*plane.at(*coordinates[n]), i in front)
    ahead = ", ".join(models[members[i]].name for i in front)
    caption = f"{y[0].title} over {x[0].title}. On the frontier: {ahead}."
    return caption[0].upper() + caption[1:], out, places


def scatter(
    at: Sequence[tuple[float, float]], x: Axis, y: Axis, box: tuple[float, float, float, float]
) -> tuple[list[str], Plane, list[int]]:
    """The axes of a plane of points, and the line through those that none beats.

    Args:
        at: the points.
        x: the horizontal axis.
        y: the vertical one.
        box: left, top, right and bottom edge, in pixels.

    Returns:
        what is drawn, the plane, and the points on the line, from the best along x.
    """
    plane = Plane(at, box, edge=0.06)
    step = 1.0
    if x.form is numbers.memory:  # round in binary units
        step = 2.0**30 if plane.high >= 2**30 else 2.0**20
    marked = [step * v for v in ticks(plane.low / step, plane.high / step, 5)]
    out = plane.axes(marked, x.form, y.form)
    out.append(text(0, box[1] - 18, f"{y.title}{', logarithmic' if plane.log else ''}", "quiet"))
    out.append(text(plane.right, plane.bottom + 40, x.title, "quiet", "end"))
    signed = [(x.sign * a, y.sign * b) for a, b in at]
    front = sorted(best(signed), key=lambda i: signed[i])
    corners = _stairs([plane.at(*at[i]) for i in front])
    if len(corners) > 1:
        out.append(line(corners, "series s0 front"))
    return out, plane, front


def _stairs(at: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """From point to point along the axes: what lies behind the line is beaten.

    >>> _stairs([(0, 0), (5, 7)])
    [(0, 0), (5, 0), (5, 7)]
    """
    out = list(at[:1])
    for (_, before), (a, b) in pairwise(at):
        out += [(a, before), (a, b)]
    return out


def _mark(
    point: Point, shared: Sequence[str], place: tuple[float, float, bool], numbered: bool
) -> str:
    """A point: a disc with its run's number, or the shape of its comparison."""
    values = [
        f"{axis.name} {axis.form(v)}"
        for axis, v in zip(AXES, point.figures, strict=True)
        if v is not None
    ]
    tip = escape(", ".join([point.title, *values]))
    if point.kind in shared:
        kind = "comparison"
        shape = f'<path d="{SHAPES[shared.index(point.kind) % len(SHAPES)]}"/>'
    else:
        kind = point.kind
        label = f"<text y='4' text-anchor='middle'>{point.run}</text>"
        shape = f'<circle r="{9 if point.run else 6}"/>{label if numbered and point.run else ""}'
    x, y, ahead = place
    beaten = "" if ahead else " beaten"
    marked = f'class="point {kind} s0{beaten}" transform="translate({x:.0f} {y:.0f})"'
    inside = f"<title>{tip}</title>{shape}"
    if not point.run:
        return f'<g {marked} role="img" aria-label="{tip}">{inside}</g>'
    return f'<a {marked} href="#run-{point.run}" aria-label="{tip}">{inside}</a>'


# --- a search ------------------------------------------------------------------------------------

MEMORY = Axis("memory of the weights", numbers.memory, ())
KL = LOST[1]


def tried(record: Record) -> tuple[str, Markup] | None:
    """Every candidate that a search measured, by the memory its weights take and what it loses.

    Returns:
        how to read it, and the drawing; None where nothing was searched.
    """
    candidates = [
        (candidate, (size, loss))
        for candidate in record.measured.get("tried") or ()
        for size, loss in [(figure(candidate, "memory"), figure(candidate, "kl"))]
        if size is not None and loss is not None and math.isfinite(loss)
    ]
    if not candidates:
        return None
    chosen = part(record.measured, "chosen").get("steps")
    out, plane, _ = scatter([at for _, at in candidates], MEMORY, KL, (52.0, 28.0, 520.0, 256.0))
    for candidate, (size, loss) in candidates:
        x, y = plane.at(size, loss)
        ours = candidate.get("steps") == chosen
        kind = "result" if ours else "comparison"
        form = numbers.plain(candidate.get("form"))
        tip = escape(f"{form}: {numbers.memory(size)}, KL {numbers.share(loss)}")
        out.append(
            f'<g class="point {kind} s{0 if ours else 1}" transform="translate({x:.1f} {y:.1f})">'
            f'<circle r="{7 if ours else 4}"/><title>{tip}</title></g>'
        )
    how = (
        f"{len(candidates)} candidates, on calibration text that nothing was decided on. Blue: "
        "chosen. The line: none is smaller and loses less."
    )
    label = "Candidates by the memory they take and what they lose"
    return how, svg(out, 540, 300, label)
