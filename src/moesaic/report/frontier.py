"""The frontier: what the models of some runs lose, over what they store and run, and how fast.

One for each original and text: models that were made of others say nothing of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from markupsafe import Markup, escape

from moesaic.record import Record
from moesaic.report import figures, read
from moesaic.report.charts import Plane, line, svg, text, ticks
from moesaic.report.read import figure, part

SIZE = (680.0, 400.0)
BOX = (58.0, 30.0, 664.0, 348.0)
"""Left, top, right and bottom edge of the plot."""
SHAPES = ("M-5 -5h10v10h-10z", "M0 -6l6 11h-12z", "M0 -7l7 7l-7 7l-7 -7z", "M0 6l6 -11h-12z")
"""Marks of comparisons, in turn."""
APART = 0.002
"""Figures that differ by less than this share are the same: nothing is to be seen along them."""
Form = Callable[[float | None], str]


@dataclass(frozen=True)
class Axis:
    """One figure of a model, along which models are compared."""

    key: str
    """What it is asked for by."""
    name: str
    value: Callable[[Record, str], float | None]
    """Of a record's model, by its name in ``scores``."""
    form: Form
    sign: int = 1
    """1 where less is better, -1 where more is."""


def _score(record: Record, name: str, key: str) -> float | None:
    return figure(record.measured, "scores", name, key)


def _beside(record: Record, name: str, key: str, own: float) -> float | None:
    """A score that compares with the original, for which it is ``own``."""
    scores = part(record.measured, "scores")
    compared = any(figure(scores, other, key) is not None for other in scores)
    return own if name == "original" and compared else figure(scores, name, key)


def _speed(record: Record, name: str, what: str) -> float | None:
    ratio = figure(record.measured, "speed_ratio", what)
    return 1.0 if name == "original" and ratio else ratio if name == "result" else None


def _memory(record: Record, name: str) -> float | None:
    return figure(record.measured, "speed", name, "peak_memory_bytes")


SAVED = (
    Axis("disk", "bytes on disk", partial(read.size, where="on disk"), figures.memory),
    Axis("bytes", "bytes in memory", partial(read.size, where="in memory"), figures.memory),
    Axis("active", "active parameters", partial(_score, key="active_parameters"), figures.count),
    Axis("decode", "decode speed", partial(_speed, what="decode"), figures.times, -1),
    Axis("prefill", "prefill speed", partial(_speed, what="prefill"), figures.times, -1),
    Axis("memory", "peak memory", _memory, figures.memory),
)
"""What a model may save: the horizontal axes."""
LOST = (
    Axis("perplexity", "perplexity", partial(_score, key="perplexity"), figures.perplexity),
    Axis("kl", "KL from the original", partial(_beside, key="kl", own=0.0), figures.share),
    Axis(
        "agreement",
        "top-1 agreement",
        partial(_beside, key="top1_agreement", own=1.0),
        read.tenths,
        -1,
    ),
    Axis(
        "tasks",
        "tasks, of the original",
        partial(_beside, key="recovery", own=1.0),
        read.tenths,
        -1,
    ),
)
"""What a model may lose: the vertical axes."""


@dataclass(frozen=True)
class Point:
    """One measured model."""

    run: int
    """The run it belongs to, from 1; 0 for an original."""
    kind: str
    """``original``, ``result``, ``fewer layers``, or a comparison's name."""
    name: str
    """What it is, in a few words."""
    told: str
    """What it is, in full."""
    figures: tuple[float | None, ...]
    """Along :data:`SAVED`, then :data:`LOST`."""


@dataclass(frozen=True)
class Frontier:
    """The picture of one original's models, and what a page needs to switch it between axes."""

    model: str
    """The original, and which text where runs were measured on several."""
    saved: list[str]
    """Names of the horizontal axes that tell models apart."""
    lost: list[str]
    """Names of the vertical axes."""
    drawn: Markup
    first: Markup
    """The first choice of axes alone, for a picture that is not switched."""
    kinds: list[str]
    """Comparisons that are drawn."""


# --- points --------------------------------------------------------------------------------------


def _text(record: Record) -> tuple[str, ...]:
    """The model, its own figure and the text: runs that have all of them alike are comparable."""
    asked = part(record.measured, "evaluation")
    keys = ("data", "length", "max_tokens", "limit", "shots")
    own = f"{figure(record.measured, 'scores', 'original', 'perplexity') or 0:.4g}"
    return (record.model, own, *(figures.plain(asked.get(key)) for key in keys))


def _told(record: Record, name: str) -> str:
    """A model in words."""
    if name == "original":
        return f"{read.model_name(record)}, the original"
    if name == "result":
        return read.title(record)
    if name.isdecimal():
        return f"{read.made(record)}, only {name} layers"
    return f"{read.variants(record).get(name, name)}, beside {read.made(record)}"


def points(records: Sequence[Record]) -> dict[str, list[Point]]:
    """Every model that was scored, by its original; and by the text, where there are several.

    An original that several runs share is one point.
    """
    groups: dict[tuple[str, ...], list[tuple[int, Record]]] = {}
    for n, record in enumerate(records, 1):
        if part(record.measured, "scores"):
            groups.setdefault(_text(record), []).append((n, record))
    models = [read.model_name(runs[0][1]) for runs in groups.values()]
    found = {}
    for i, (model, runs) in enumerate(zip(models, groups.values(), strict=True)):
        texts = models.count(model)
        name = model if texts == 1 else f"{model}, text {models[: i + 1].count(model)}"
        found[name] = [p for n, record in runs for p in _points(record, n, len(records) > 1)]
        first = next((p for p in found[name] if p.kind == "original"), None)
        found[name] = [p for p in found[name] if p.kind != "original" or p is first]
    return found


def _points(record: Record, run: int, several: bool) -> Iterator[Point]:
    """The models of one run."""
    for name in read.names(part(record.measured, "scores")):
        if name != "0":  # no layer was taken: the original again
            kind = "fewer layers" if name.isdecimal() else name
            known = tuple(axis.value(record, name) for axis in (*SAVED, *LOST))
            short = _short(name, run if several else 0)
            number = 0 if name == "original" else run
            yield Point(number, kind, short, _told(record, name), known)


def _short(name: str, run: int) -> str:
    """A model in a few words; without a run there is one."""
    if name == "original":
        return "the original"
    of = f"run {run}" if run else "the result"
    if name == "result":
        return of
    return f"{of} with {name} of its layers" if name.isdecimal() else f"{name} beside {of}"


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


def frontiers(records: Sequence[Record], first: Sequence[str] = ()) -> list[Frontier]:
    """A picture for every original that three models or more were measured of, itself among them.

    Args:
        records: of the runs.
        first: keys of the axes to be drawn first; otherwise those that most models have.
    """
    drawn = [
        _frontier(model, found, first, len(records) > 1)
        for model, found in points(records).items()
        if len(found) > 2
    ]
    return [f for f in drawn if f is not None]


def _frontier(
    model: str, found: Sequence[Point], first: Sequence[str], numbered: bool
) -> Frontier | None:
    """The picture of some models; None where no two axes tell them apart."""
    axes = [*SAVED, *LOST]
    columns = [
        [v if v is not None and math.isfinite(v) else None for v in column]
        for column in zip(*(p.figures for p in found), strict=True)
    ]
    told = [k for k, column in enumerate(columns) if _tells(column)]
    # those that were asked for come first, then those that most models have
    told.sort(key=lambda k: (axes[k].key not in first, columns[k].count(None)))
    across = [k for k in told if k < len(SAVED)]
    rising = [k for k in told if k >= len(SAVED)]
    if not across or not rising:
        return None
    pictures: list[str] = []
    places: list[list[Place]] = []
    for y in rising:
        for x in across:
            drawn, at = _plot((axes[x], columns[x]), (axes[y], columns[y]), found)
            hidden = ' style="display:none"' if pictures else ""
            pictures.append(f'<g class="plot"{hidden}>{drawn}</g>')
            places.append(at)
    kinds = list(dict.fromkeys(p.kind for p in found))
    shared = [k for k in kinds if k not in ("original", "result")]
    marks = [_mark(p, shared, [at[n] for at in places], numbered) for n, p in enumerate(found)]
    alone = [
        _mark(p, shared, places[0][n : n + 1], numbered)
        for n, p in enumerate(found)
        if places[0][n] is not None
    ]
    label = f"Models made of {model} by what they lose and what they save"
    return Frontier(
        model=model,
        saved=[axes[k].name for k in across],
        lost=[axes[k].name for k in rising],
        drawn=svg(*SIZE, [*pictures, *marks], label, role="group"),
        first=Markup("".join([pictures[0], *alone])),
        kinds=shared,
    )


def _tells(column: Sequence[float | None]) -> bool:
    """Whether models differ along an axis."""
    known = [v for v in column if v is not None]
    return len(known) > 1 and max(known) - min(known) > APART * max(map(abs, known))


Place = tuple[float, float, bool] | None
"""Where a point lies on a picture and whether it is on the frontier; None where it is not there."""


def _plot(
    x: tuple[Axis, list[float | None]], y: tuple[Axis, list[float | None]], found: Sequence[Point]
) -> tuple[str, list[Place]]:
    """Axes and frontier of one choice of axes, and where each point lies."""
    known = {
        n: (a, b)
        for n, (a, b) in enumerate(zip(x[1], y[1], strict=True))
        if a is not None and b is not None
    }
    places: list[Place] = [None] * len(found)
    if not known:
        said = f"No model has both {y[0].name} and {x[0].name}."
        middle = text(SIZE[0] / 2, SIZE[1] / 2, said, "quiet", "middle")
        return f"<desc>{said}</desc>{middle}", places
    plane = Plane([a for a, _ in known.values()], [b for _, b in known.values()], BOX, edge=0.06)
    names = [
        f"{axis.name}{', relative to the original' if axis.name.endswith('speed') else ''}"
        f" ({'less' if axis.sign > 0 else 'more'} is better)"
        for axis, _ in (x, y)
    ]
    step = 1.0
    if x[0].form is figures.memory:  # round in binary units
        step = 2.0**30 if plane.high >= 2**30 else 2.0**20
    marked = [step * v for v in ticks(plane.low / step, plane.high / step, 5)]
    out = plane.axes(marked, x[0].form, y[0].form)
    out.append(text(0, 12, f"{names[1]}{', logarithmic' if plane.log else ''}", "quiet"))
    out.append(text(plane.right, plane.bottom + 40, names[0], "quiet", "end"))
    members = list(known)
    signed = [(x[0].sign * a, y[0].sign * b) for a, b in known.values()]
    front = sorted(best(signed), key=lambda i: signed[i])
    for i, n in enumerate(members):
        places[n] = (*plane.at(*known[n]), i in front)
    corners = stairs([plane.at(*known[members[i]]) for i in front])
    if len(corners) > 1:
        out.append(line(corners, "series s0 front"))
    ahead = ", ".join(found[members[i]].name for i in front)
    told = f"{names[1]} over {names[0]}. On the frontier: {ahead}."
    told = told[0].upper() + told[1:]
    return f"<desc>{escape(told)}</desc>{''.join(out)}", places


def stairs(at: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """From point to point along the axes: what lies behind the line is beaten.

    >>> stairs([(0, 0), (5, 7)])
    [(0, 0), (5, 0), (5, 7)]
    """
    out = list(at[:1])
    for (_, before), (a, b) in pairwise(at):
        out += [(a, before), (a, b)]
    return out


def _mark(point: Point, shared: Sequence[str], places: Sequence[Place], numbered: bool) -> str:
    """A point: a disc with its run's number, or the shape of its comparison."""
    every = ";".join("" if p is None else f"{p[0]:.0f},{p[1]:.0f},{p[2]:d}" for p in places)
    first = places[0]
    told = [point.told]
    axes = (*SAVED, *LOST)
    told += [
        f"{axis.name} {axis.form(v)}"
        for axis, v in zip(axes, point.figures, strict=True)
        if v is not None
    ]
    said = escape(", ".join(told))
    if point.kind in shared:
        kind = "comparison"
        shape = f'<path d="{SHAPES[shared.index(point.kind) % len(SHAPES)]}"/>'
    else:
        kind = point.kind
        number = point.run if numbered else ""
        label = f"<text y='4' text-anchor='middle'>{number}</text>" if point.run and number else ""
        shape = f'<circle r="{9 if point.run else 6}"/>{label}'
    at = "" if first is None else f' transform="translate({first[0]:.0f} {first[1]:.0f})"'
    hidden = ' style="display:none"' if first is None else ""
    beaten = "" if first is None or first[2] else " beaten"
    marked = f'class="point {kind} s0{beaten}" data-run="{point.run}" data-at="{every}"{at}{hidden}'
    inside = f"<title>{said}</title>{shape}"
    if not point.run:
        return f'<g {marked} role="img" aria-label="{said}">{inside}</g>'
    return f'<a {marked} href="#run-{point.run}" aria-label="{said}">{inside}</a>'
