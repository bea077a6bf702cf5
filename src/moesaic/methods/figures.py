"""Phrases and figures that methods share in the reports of their results.

Figures are plain data, drawn by :mod:`moesaic.report`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from moesaic.config import MethodConfig
from moesaic.record import Bars, Column, Figure, Heat, LayerRecord, Lines, Row, Series
from moesaic.types import Values

NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def percent(share: float) -> str:
    """Return a share in percent, with a space that does not break.

    >>> percent(0.804).replace(chr(160), " ")
    '80 %'
    """
    return f"{100 * share:.0f}\u00a0%"


def number(count: int) -> str:
    """Return a count as text has it.

    >>> number(1), number(12)
    ('one', '12')
    """
    return NUMBERS[count] if 0 <= count < len(NUMBERS) else f"{count:,}"


def layers_text(count: int, total: int) -> str:
    """Return how many layers, in words: ``all layers``, ``2 of 8 layers``.

    >>> layers_text(8, 8), layers_text(2, 8)
    ('all layers', '2 of 8 layers')
    """
    return "all layers" if count == total else f"{count} of {total} layers"


def span(counts: Collection[int]) -> str:
    """Return the least and the greatest of some numbers as a range; "0" without numbers.

    >>> span([6, 4]), span([8, 8]), span([])
    ('4–6', '8', '0')
    """
    least, most = min(counts, default=0), max(counts, default=0)
    return f"{least}" if least == most else f"{least}–{most}"


def listed(numbers: Sequence[int]) -> str:
    """Return layer indices in words.

    >>> listed([1]), listed([0, 2, 5]), listed([])
    ('layer 1', 'layers 0, 2 and 5', 'no layer')
    """
    if not numbers:
        return "no layer"
    *first, last = map(str, numbers)
    return f"layers {', '.join(first)} and {last}" if first else f"layer {last}"


def carved_clause(config: MethodConfig, active: float | None) -> str:
    """Return the title's clause of a carved model; ``active`` is the share of its projections that
    a token uses, None if unknown."""
    comma = "," if config.beyond else ""
    target = "" if active is None else f"{comma} to {percent(active)} active"
    return f"carved{credit_clause(config, 'with')}{target}"


def credit_clause(config: MethodConfig, by: str) -> str:
    """Return the end of a title's clause: ``by`` or ``with`` a method, and additions to it."""
    if not config.beyond:
        return f" {by} {config.base_label}"
    return f", beyond {config.base_label} ({', '.join(config.beyond)})"


# --- figures -------------------------------------------------------------------------------------


MOST = 400
"""Most points of a line."""
SHADES = "The darker an expert, the more of its layer’s calls on the calibration text it had."


def finite(value: object) -> float | None:
    """Return a finite number to five digits, as a figure holds it; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


def series(name: str, points: Iterable[tuple[object, object]]) -> Series:
    """Return a line through the points whose coordinates are finite, thinned to ``MOST`` points."""
    every = ((finite(x), finite(y)) for x, y in points)
    complete = [(x, y) for x, y in every if x is not None and y is not None]
    return Series(name, tuple(complete[:: -(-len(complete) // MOST) or 1]))


def lines(section: str, title: str, curves: Sequence[Series], y: str, **more: Any) -> list[Figure]:
    """Return a figure of lines by layer, or by the field ``x``; [] if no line has points."""
    filled = tuple(s for s in curves if s.points)
    return [Lines(section=section, title=title, series=filled, y=y, **more)] if filled else []


def bars(
    section: str,
    title: str,
    caption: str,
    layers: Sequence[LayerRecord],
    columns: Mapping[tuple[str, str], Sequence[object]],
) -> list[Figure]:
    """Return a figure with columns of bars, one row per layer; [] if there are no values.

    Args:
        section: the heading.
        title: the figure's title.
        caption: how to read it.
        layers: the rows.
        columns: by name and format, a value a layer.
    """
    every = [
        Column(name, tuple(map(finite, values)), form) for (name, form), values in columns.items()
    ]
    filled = tuple(column for column in every if any(v is not None for v in column.values))
    rows = tuple(str(layer.index) for layer in layers)
    figure = Bars(section=section, title=title, caption=caption, rows=rows, columns=filled)
    return [figure] if filled else []


def heat(
    section: str,
    title: str,
    caption: str,
    rows: Sequence[Row],
    columns: Sequence[str] = (),
    **more: Any,
) -> list[Figure]:
    """Return a figure with rows of shaded cells; [] without rows. Columns without names are
    numbered.

    ``more`` are further fields of :class:`~moesaic.record.Heat`.
    """
    if not rows:
        return []
    names = tuple(columns) or tuple(map(str, range(max(len(row.values) for row in rows))))
    figure = {"section": section, "title": title, "caption": caption}
    return [Heat(**figure, rows=tuple(rows), columns=names, **more)]


# --- experts of mixtures -------------------------------------------------------------------------


def calls(layer: LayerRecord, count: int) -> tuple[float | None, ...]:
    """Return each expert's share of its layer's calls (count,); None if calls were not counted."""
    counts = list(layer.analysis.get("calls") or ())
    total = sum(counts)
    return tuple(
        finite(counts[j] / total) if total and j < len(counts) else None for j in range(count)
    )


def kept_figures(
    layers: Iterable[LayerRecord], section: str = "Which experts are kept", lost: str = ""
) -> list[Figure]:
    """Draw which experts of each layer are kept, how often each was called, and the layer's loss.

    Args:
        layers: records; used if their shape has ``before`` (a count) and ``kept`` (experts).
        section: the heading.
        lost: meaning of the loss, in words.
    """
    cut = [layer for layer in layers if "kept" in layer.shape and "before" in layer.shape]
    rows = [
        Row(
            str(layer.index),
            calls(layer, layer.shape["before"]),
            gone=tuple(sorted({*range(layer.shape["before"])} - {*layer.shape["kept"]})),
            bar=finite(layer.analysis.get("relative_loss")),
        )
        for layer in cut
    ]
    caption = ["Blue experts are kept, crossed ones are removed."]
    caption += [SHADES] if any("calls" in layer.analysis for layer in cut) else []
    barred = any(row.bar is not None for row in rows)
    measure = lost or "the layer’s error by the measure that decided"
    caption += [f"Bars: {measure}."] if barred else []
    side = "relative loss" if barred else ""
    return heat(section, "Experts by layer.", " ".join(caption), rows, side=side, of="of calls")


# --- what any method may bring -------------------------------------------------------------------


def refit_figures(layers: Iterable[LayerRecord]) -> list[Figure]:
    """Draw the error of each layer's output before and after its down projections were refitted."""
    errors = [
        (layer.index, 100 * refit["lost"], 100 * refit["lost"] * (1 - refit["recovered"]))
        for layer in layers
        if {"lost", "recovered"} <= (refit := layer.analysis.get("refit") or {}).keys()
    ]
    return lines(
        "What the refit gives back",
        "Error by layer.",
        [
            series("before", [(i, before) for i, before, _ in errors]),
            series("after", [(i, after) for i, _, after in errors]),
        ],
        "percent",
        strong="after",
        form=".2g",
        caption="Squared error of a layer’s output on the calibration text, percent of the "
        "output’s own square, before its down projections were refitted and after; where some "
        "tokens were held out of the fit, on those.",
    )


def training_figures(training: Values) -> list[Figure]:
    """Draw every value that training logged, by step; one that never changes is in the caption.

    Args:
        training: ``what`` was trained, the values (``losses``) logged at each step, their
            ``labels``, ``trained_parameters`` and ``total_parameters``.
    """
    logs = training.get("losses") or ()
    names = dict.fromkeys(name for log in logs for name in log if name != "step")
    curves = {n: series("", [(log.get("step"), log.get(n)) for log in logs]) for n in names}
    curves = {name: curve for name, curve in curves.items() if curve.points}
    labels = {name: name.replace("_", " ") for name in curves} | (training.get("labels") or {})
    varying, constant = [], []
    for name, curve in curves.items():
        if len(curve.points) > 1 and len({y for _, y in curve.points}) == 1:
            constant.append(f"{labels[name]} {curve.points[0][1]:g}")
        else:
            varying.append((str(labels[name]), curve))
    caption = f"Of the batch of each step. Trained: {training.get('what') or 'weights'}."
    if share := training.get("trained_parameters"):
        total = training.get("total_parameters")
        caption += f" {share:,}{f' of {total:,}' if total else ''} parameters."
    caption += f" Constant: {', '.join(constant)}." if constant else ""
    return [
        Lines(
            section="Training",
            title="Training by step." if n == 0 else f"{label[:1].upper()}{label[1:]}.",
            caption=caption if n == 0 else "",
            series=(curve,),
            x="step",
            y=label,
            log=False,
        )
        for n, (label, curve) in enumerate(varying)
    ]
