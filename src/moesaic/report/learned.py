"""Drawings of experts that were learned: their widths, unions and similarity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import quantiles

from markupsafe import Markup

from moesaic.record import LayerRecord, Record, Step
from moesaic.report import figures
from moesaic.report.charts import Shade, line, rect, shaded, svg, text, ticks
from moesaic.report.lines import lines
from moesaic.report.maps import rows
from moesaic.report.read import figure

Figure = tuple[str, str, Markup]
"""A caption in a few words, how to read the drawing, the drawing."""


def drawings(record: Record, step: Step) -> Sequence[Figure | None]:
    """Widths, unions and similarity of the experts of each layer."""
    return [_widths(record), _union(record), _boxes(record), _similar(record)]


def _layers(record: Record) -> list[LayerRecord]:
    return [layer for layer in record.layers if layer.analysis.get("expert_widths")]


def _before(layer: LayerRecord) -> int:
    """The width of the dense layer that the experts share."""
    return layer.width_before or layer.width


def _widths(record: Record) -> Figure | None:
    layers = _layers(record)

    def shares(key: str) -> dict[int, float]:
        seen = {layer.index: layer.analysis for layer in layers}
        known = {i: (figure(d, key), figure(d, "head_dim")) for i, d in seen.items()}
        return {i: a / b for i, (a, b) in known.items() if a is not None and b}

    ffn = {x.index: x.active_width / _before(x) for x in layers if _before(x)}
    columns = [
        ("FFN, an expert", ffn, figures.percent),
        ("queries and keys", shares("qk"), figures.percent),
        ("values and outputs", shares("vo"), figures.percent),
    ]
    columns = [c for c in columns if c[1]]
    if not columns:
        return None
    told = "What a token uses of each layer, of the dense model’s width."
    kept = figure(record.measured, "scores", "result", "router_parameters")
    whole = figure(record.measured, "scores", "original", "total_parameters")
    if kept and whole:
        share = figures.percent(kept / whole, 1)
        told += f" The routers have {figures.count(kept)} parameters, {share} of the original’s."
    return "Width by layer.", told, rows(columns)


def _union(record: Record) -> Figure | None:
    union, widths = [], []
    for layer in _layers(record):
        share, width = figure(layer.analysis, "union"), _before(layer)
        if share is not None and width:
            union.append((float(layer.index), share))
            widths.append((float(layer.index), layer.active_width / width))
    named = [("all experts together", union), ("one expert", widths)]
    drawn = lines(named, "share of the neurons", "layer", width=430, log=False)
    told = "How much of the dense FFN some expert has."
    return ("The union of experts.", told, Markup(drawn)) if drawn else None


def _boxes(record: Record) -> Figure | None:
    """Quartiles, least and greatest of the experts' widths before they were made equal."""
    boxes: list[tuple[int, float, float, float, float, float]] = []
    for layer in _layers(record):
        width = _before(layer)
        values = sorted(v / width for v in layer.analysis["expert_widths"] if width)
        if len(values) > 1:
            boxes.append(
                (layer.index, values[0], *quantiles(values, method="inclusive"), values[-1])
            )
    if not boxes:
        return None
    height, top, foot, left, step = 200.0, 16.0, 34.0, 40.0, max(9.0, min(34.0, 640 / len(boxes)))
    low = max(0.0, min(b[1] for b in boxes) - 0.05)
    high = min(1.0, max(b[-1] for b in boxes) + 0.05)

    def at(share: float) -> float:
        return top + (height - top - foot) * (1 - (share - low) / (high - low or 1))

    right = left + step * len(boxes)
    out = []
    for share in ticks(low, high):
        out.append(line([(left, at(share)), (right, at(share))], "grid"))
        out.append(text(left - 6, at(share) + 4, figures.percent(share), "quiet", "end"))
    every = math.ceil(22 / step)
    for n, (i, least, first, middle, third, most) in enumerate(boxes):
        x, half = left + (n + 0.5) * step, step * 0.3
        tip = f"layer {i}: {figures.percent(least)} to {figures.percent(most)}"
        out.append(line([(x, at(least)), (x, at(most))], "series s0 thin"))
        out.append(
            rect(x - half, at(third), 2 * half, at(first) - at(third), "bar result", tip=tip)
        )
        out.append(line([(x - half, at(middle)), (x + half, at(middle))], "break"))
        if n % every == 0:
            out.append(text(x, height - foot + 15, i, "quiet", "middle"))
    out.append(text((left + right) / 2, height - 3, "layer", "quiet", "middle"))
    drawn = svg(right + 12, height, out, "Widths of experts by layer")
    told = "As trained, before all experts of a layer were given the width of the widest."
    return "Widths of experts.", told, drawn


def _similar(record: Record) -> Figure | None:
    known = [(layer.index, layer.analysis.get("similarity")) for layer in _layers(record)]
    grids = [(i, grid) for i, grid in known if grid]
    if not grids:
        return None
    told = "The share of neurons that two experts of a layer have in common: the darker, the more."
    return "Similarity of experts.", told, _grids(grids)


def _grids(grids: Sequence[tuple[int, Sequence[Sequence[float]]]], across: int = 8) -> Markup:
    count = max(len(grid) for _, grid in grids)
    cell = max(3.0, 64 / count)
    side = count * cell + 18
    out, drawn = [], []
    for n, (i, grid) in enumerate(grids):
        x, y = side * (n % across), (side + 12) * (n // across)
        out.append(text(x, y + 10, i, "quiet"))
        cells = []
        for a, row in enumerate(grid):
            for b, share in enumerate(row):
                tip = f"layer {i}, experts {a} and {b}: {figures.percent(share)}"
                place = (x + b * cell, y + 16 + a * cell, cell - 1, cell - 1)
                cells.append(Shade(*place, 0.04 + 0.86 * share, tip))
        drawn.append((f"layer {i}", cells))
    out = shaded(drawn) + out
    lines_of = -(-len(grids) // across)
    width, height = side * min(across, len(grids)), (side + 12) * lines_of
    return svg(width, height, out, "Similarity of experts by layer")
