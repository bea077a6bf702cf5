"""The frontier: models by their error and by what they store or run.

One for each original and text: models that were made of others cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moesaic.config import BASELINES
from moesaic.record import Record
from moesaic.report import facts, numbers
from moesaic.report.blocks import Format, PlotPoint, Points
from moesaic.report.facts import figure, part

SECTION = "What is lost, and what is saved"
APART = 0.002
"""Relative difference below which figures count as equal, so that no plot is drawn along them."""


@dataclass(frozen=True)
class Axis:
    """Figure of a model by which models are compared, as an axis of a plot."""

    name: str
    form: Format
    key: str = ""
    """Name of the figure among a model's scores; empty for the bytes of its file."""

    def value(self, record: Record, name: str) -> float | None:
        """Return the figure of a record's model; None where it was not measured."""
        if not self.key:
            return facts.size(record, name, "on disk")
        return figure(facts.scores(record), name, self.key)


KL = Axis("KL from the original", numbers.share, "kl")
MEMORY = Axis("memory of the weights", numbers.memory)
SAVED = (
    Axis("bytes on disk", numbers.memory),
    Axis("bytes in memory", numbers.memory, "total_bytes"),
    Axis("active parameters", numbers.count, "active_parameters"),
)
"""Sizes, which a model may save: the horizontal axes."""
LOST = (Axis("perplexity", numbers.perplexity, "perplexity"), KL)
"""Errors, which a model may add: the vertical axes."""
AXES = (*SAVED, *LOST)


@dataclass(frozen=True)
class MeasuredModel:
    """Measured model, with its figures along all axes."""

    run: int
    """Number of its run, from 1; 0 for an original, quantised or not."""
    kind: str
    """``original``, ``result``, ``fewer layers``, or a comparison's name."""
    label: str
    title: str
    """Full name of the model."""
    figures: tuple[float | None, ...]
    """Figures along :data:`AXES`; None if not measured."""


def _text(record: Record) -> tuple[str, ...]:
    """Return the model, its own figure and the text: runs with equal ones are comparable."""
    settings = part(record.measured, "evaluation")
    keys = ("data", "length", "max_tokens", "bos", "limit", "shots")
    perplexity = f"{figure(facts.scores(record), 'original', 'perplexity') or 0:.4g}"
    return (record.model, perplexity, *(numbers.plain(settings.get(key)) for key in keys))


def points(records: Sequence[Record]) -> dict[str, list[MeasuredModel]]:
    """Return the models that were scored, by original, and by text if there are several.

    An original that several runs share is one point, also quantised.
    """
    groups: dict[tuple[str, ...], list[tuple[int, Record]]] = {}
    for n, record in enumerate(records, 1):
        if facts.scores(record):
            groups.setdefault(_text(record), []).append((n, record))
    models = [facts.model_name(runs[0][1]) for runs in groups.values()]
    by_name = {}
    for i, (model, runs) in enumerate(zip(models, groups.values(), strict=True)):
        texts = models.count(model)
        name = model if texts == 1 else f"{model}, text {models[: i + 1].count(model)}"
        every = [p for n, record in runs for p in _points(record, n)]
        shared = {p.kind: p for p in reversed(every) if p.kind in ("original", *BASELINES)}
        by_name[name] = [p for p in every if shared.get(p.kind, p) is p]
    return by_name


def _points(record: Record, run: int) -> Iterator[MeasuredModel]:
    """Yield the models of one run; its GGUF file, if it wrote one, in place of its result."""
    steps, wanted = facts.step_labels(record), facts.wanted(record)
    for name in facts.names(facts.scores(record)):
        kind, number, label = name, run, name
        if name == "0" or (name == "result" != wanted):  # 0: no layer was taken, the original again
            continue
        if name == "original":
            number, title = 0, f"{facts.model_name(record)}, the original"
        elif name == wanted:
            kind, label, title = "result", "result", facts.title(record)
        elif name.isdecimal():
            kind, label, title = "fewer layers", f"{name} layers", f"{steps}, only {name} layers"
        else:
            number = 0 if name in BASELINES else run
            title = f"{facts.variants(record).get(name, name)}, beside {steps}"
        yield MeasuredModel(number, kind, label, title, tuple(a.value(record, name) for a in AXES))


def best(places: Sequence[tuple[float, float]]) -> list[int]:
    """Return the points that no other beats: none is as good in both and better in one.

    Less is better. Figures that differ by less than :data:`APART` count as equal.

    >>> best([(1, 5), (2, 3), (3, 4), (2, 3), (4, 1)])
    [0, 1, 3, 4]
    >>> best([(100, 20), (99.9, 30)])
    [0]
    """

    def ahead(a: float, b: float) -> int:
        """Return 1 if a is less than b, -1 if it is more, 0 if they are equal."""
        return 0 if abs(a - b) <= APART * max(abs(a), abs(b)) else 1 if a < b else -1

    def beaten(x: float, y: float) -> bool:
        return any(
            min(ahead(a, x), ahead(b, y)) >= 0 and max(ahead(a, x), ahead(b, y)) > 0
            for a, b in places
        )

    return [i for i, (x, y) in enumerate(places) if not beaten(x, y)]


# --- plots ---------------------------------------------------------------------------------------


def frontiers(records: Sequence[Record]) -> list[Points]:
    """Return a plot for every original of which three models or more were measured, itself too.

    Its axes are those that most models have.
    """
    several = len(records) > 1
    plots = [
        _plot(f"{model}: " if several else "", models, several)
        for model, models in points(records).items()
        if len(models) > 2
    ]
    return [plot for plot in plots if plot is not None]


def _plot(prefix: str, models: Sequence[MeasuredModel], numbered: bool) -> Points | None:
    """Return the plot of some models; None where they differ along no two axes."""
    axes = []
    for axis, column in zip(AXES, zip(*(m.figures for m in models), strict=True), strict=True):
        values = [v if v is not None and math.isfinite(v) else None for v in column]
        finite = [v for v in values if v is not None]
        if len(finite) > 1 and max(finite) - min(finite) > APART * max(map(abs, finite)):
            axes.append((axis, values))
    axes.sort(key=lambda along: along[1].count(None))
    across = next((along for along in axes if along[0] in SAVED), None)
    rising = next((along for along in axes if along[0] in LOST), None)
    if across is None or rising is None:
        return None
    placed = [
        (PlotPoint(a, b, m.kind, m.label, _tip(m), m.run))
        for m, a, b in zip(models, across[1], rising[1], strict=True)
        if a is not None and b is not None
    ]
    return _joined(placed, across[0], rising[0], prefix, numbered) if placed else None


def _tip(model: MeasuredModel) -> str:
    """Return a model's name and figures in one line."""
    figures = zip(AXES, model.figures, strict=True)
    known = (f"{axis.name} {axis.form(value)}" for axis, value in figures if value is not None)
    return ", ".join([model.title, *known])


def _joined(
    models: Sequence[PlotPoint], x: Axis, y: Axis, prefix: str = "", numbered: bool = False
) -> Points:
    """Return a plot in which the points that none beats are joined."""
    at = [(p.x, p.y) for p in models]
    front = sorted(best(at), key=lambda i: at[i])
    names = (f"{p.label} of run {p.run}" if numbered and p.run else p.label for p in models)
    ahead = ", ".join(name for i, name in enumerate(names) if i in front)
    return Points(
        section=SECTION,
        title=f"{prefix}{y.name[:1].upper()}{y.name[1:]} over {x.name}.",
        caption="The line joins the models that none beats: none is as good in both figures and "
        f"better in one. They are: {ahead}.",
        points=tuple(replace(p, ahead=i in front) for i, p in enumerate(models)),
        front=tuple(front),
        x=f"{x.name} (less is better)",
        y=f"{y.name} (less is better)",
        x_form=x.form,
        y_form=y.form,
        numbered=numbered,
    )


def candidates_plot(record: Record) -> Points | None:
    """Return every candidate that a search measured, by the memory of its weights and its KL.

    None where fewer than two were.
    """
    chosen = part(record.measured, "chosen").get("steps")
    candidates = []
    for candidate in record.measured.get("tried") or ():
        size, kl = figure(candidate, "memory"), figure(candidate, "kl")
        if size is None or kl is None or not math.isfinite(kl):
            continue
        form, ours = numbers.plain(candidate.get("form")), candidate.get("steps") == chosen
        tip = f"{form}: {numbers.memory(size)}, KL {numbers.share(kl)}"
        kind, label = ("result", "chosen") if ours else ("candidate", form)
        candidates.append(PlotPoint(size, kl, kind, label, tip))
    if len(candidates) < 2:
        return None
    plot = _joined(candidates, MEMORY, KL)
    count = f"{len(candidates)} candidates, on the text that chooses among them."
    return replace(plot, section="The search", caption=f"{count} {plot.caption}")
