"""Drawings of experts that were learned: curves, widths, unions, similarity (ToMoE, Figs. 3-9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

from markupsafe import Markup

from moesaic.report import figures
from moesaic.report.charts import line, rect, svg, text, ticks
from moesaic.report.lines import lines
from moesaic.report.maps import rows
from moesaic.report.read import Record, figure, learned, listed, part

Figure = tuple[str, str, Markup]
"""What it shows, how to read it, the drawing."""
CURVES = {
    "distillation": "KL divergence from the dense model",
    "language": "language-model loss",
    "parameters": "R_P, the budget",
    "union": "R_U, the union of experts",
    "balance": "R_L, the load balance",
}


def drawings(record: Record) -> list[Figure | None]:
    """What the paper draws; nothing of a record without training."""
    if not learned(record):
        return []
    return [_curves(record), _widths(record), _union(record), _boxes(record), _similar(record)]


def _layers(record: Record) -> list[tuple[int, Any]]:
    return [(i, d) for i, d in listed(record.get("layers")) if d.get("expert_widths")]


def _curves(record: Record) -> Figure | None:
    logs = listed(part(record, "training").get("losses"))
    drawn = []
    for name, label in CURVES.items():
        known = [(figure(d, "step"), figure(d, name)) for _, d in logs]
        points = [(x, y) for x, y in known if x is not None and y is not None]
        drawn.append(lines([("", points)], label, "step", log=False))
    count = figure(record, "training", "trained_parameters")
    kept = figure(record, "scores", "result", "router_parameters")
    told = ["Of the batch of each step."]
    told += [f"{figures.count(count)} parameters were trained."] if count else []
    whole = figure(record, "scores", "original", "total_parameters")
    share = f", {figures.percent(kept / whole, 1)} of the original’s" if kept and whole else ""
    told += [f"The routers that stay have {figures.count(kept)}{share}."] if kept else []
    side_by_side = Markup('<div class="curves">{}</div>').format(Markup("").join(drawn))
    return "The losses.", " ".join(told), side_by_side


def _widths(record: Record) -> Figure | None:
    layers = _layers(record)

    def shares(key: str, of: str) -> dict[int, float]:
        known = {i: (figure(d, key), figure(d, of)) for i, d in layers}
        return {i: a / b for i, (a, b) in known.items() if a is not None and b}

    columns = [
        ("FFN, an expert", shares("active_width", "width"), figures.percent),
        ("queries and keys", shares("qk", "head_dim"), figures.percent),
        ("values and outputs", shares("vo", "head_dim"), figures.percent),
    ]
    columns = [c for c in columns if c[1]]
    if not columns:
        return None
    told = "What a token uses of each layer, of the dense model’s width."
    return "Width by layer.", told, rows(columns)


def _union(record: Record) -> Figure | None:
    union, widths = [], []
    for i, d in _layers(record):
        u, active, width = (figure(d, k) for k in ("union", "active_width", "width"))
        if u is not None and active is not None and width:
            union.append((float(i), u))
            widths.append((float(i), active / width))
    named = [("all experts together", union), ("one expert", widths)]
    drawn = lines(named, "share of the neurons", "layer", width=430, log=False)
    told = "How much of the dense FFN some expert has."
    return ("The union of experts.", told, Markup(drawn)) if drawn else None


def _boxes(record: Record) -> Figure | None:
    """Quartiles, least and greatest of the experts' widths before they were made equal."""
    boxes = []
    for i, d in _layers(record):
        values = sorted(v / d["width"] for v in d["expert_widths"] if d.get("width"))
        if len(values) > 1:
            boxes.append((i, values[0], *quantiles(values, method="inclusive"), values[-1]))
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
    grids = [(i, d["similarity"]) for i, d in _layers(record) if d.get("similarity")]
    if not grids:
        return None
    told = "The share of neurons that two experts of a layer have in common: the darker, the more."
    return "Similarity of experts.", told, _grids(grids)


def _grids(grids: Sequence[tuple[int, Sequence[Sequence[float]]]], across: int = 8) -> Markup:
    count = max(len(grid) for _, grid in grids)
    cell = max(3.0, 64 / count)
    side = count * cell + 18
    out = []
    for n, (i, grid) in enumerate(grids):
        x, y = side * (n % across), (side + 12) * (n // across)
        out.append(text(x, y + 10, i, "quiet"))
        for a, row in enumerate(grid):
            for b, share in enumerate(row):
                tip = f"layer {i}, experts {a} and {b}: {figures.percent(share)}"
                place = (x + b * cell, y + 16 + a * cell)
                out.append(rect(*place, cell - 1, cell - 1, "heat", 0.04 + 0.86 * share, tip))
    lines_of = -(-len(grids) // across)
    width, height = side * min(across, len(grids)), (side + 12) * lines_of
    return svg(width, height, out, "Similarity of experts by layer")
