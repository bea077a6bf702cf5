"""Drawings of models whose tokens choose how many blocks they run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from moesaic.foreign import Values
from moesaic.record import Record, Step
from moesaic.report import figures
from moesaic.report.charts import rect, svg, text
from moesaic.report.lines import lines
from moesaic.report.maps import ROW
from moesaic.report.picture import alone
from moesaic.report.read import by_layer, most_experts, part

Figure = tuple[str, str, Markup]
"""A caption in a few words, how to read the drawing, the drawing."""


def drawings(record: Record, step: Step) -> Sequence[Figure | None]:
    """How many blocks a token runs, by layer and text."""
    texts = part(record.measured, "activity")
    columns = {name: dict(by_layer(part(texts, name))) for name in texts}
    if not any(columns.values()):
        return []
    told = "Mean number of blocks that a token runs, by layer and text."
    return [("Active blocks.", told, activity_map(columns, most_experts(record)))]


def activity_map(columns: Mapping[str, Mapping[int, float]], blocks: int) -> Markup:
    """A row a layer, a column a text; the darker, the more blocks.

    Args:
        columns: by text the mean number of active blocks of each layer.
        blocks: how many there are.
    """
    layers = sorted({i for values in columns.values() for i in values})
    cell, left, head = 84.0, 44.0, 22.0
    out = []
    for n, (name, values) in enumerate(columns.items()):
        x = left + n * cell
        out.append(text(x + cell / 2, 12, name, "quiet", "middle"))
        for row, i in enumerate(layers):
            value = values.get(i)
            if value is None or not math.isfinite(value):
                continue
            y, share = head + row * ROW, min(1.0, value / max(1, blocks))
            tip = f"layer {i}, {name}: {value:.2f} of {blocks} blocks"
            out.append(rect(x, y, cell - 2, ROW - 2, "heat", 0.05 + 0.6 * share, tip))
            out.append(text(x + cell / 2, y + ROW / 2 + 3, f"{value:.1f}", "cell", "middle"))
        mean = sum(values.values()) / max(1, len(values))
        y = head + len(layers) * ROW
        out.append(text(x + cell / 2, y + ROW / 2 + 3, f"{mean:.2f}", "quiet", "middle"))
    for row, i in enumerate(layers):
        out.append(text(left - 8, head + row * ROW + ROW / 2 + 3, i, "quiet", "end"))
    out.append(text(left - 8, head + len(layers) * ROW + ROW / 2 + 3, "mean", "quiet", "end"))
    size = (left + len(columns) * cell + 4, head + (len(layers) + 1) * ROW)
    return svg(*size, out, "Active blocks by layer and text")


def sweep(points: Sequence[Values], title: str) -> str:
    """Perplexity against measured active ratio as one SVG file, a point a threshold.

    Args:
        points: tau, active_ratio and perplexity of each.
        title: what was measured.
    """
    ranked = sorted(points, key=lambda p: p["active_ratio"])
    drawn = lines(
        [("", [(p["active_ratio"], p["perplexity"]) for p in ranked])],
        "perplexity",
        "active ratio",
        form=figures.perplexity,
        ticked=figures.percent,
        notes=[f"τ {p['tau']:g}" for p in ranked],
        width=520,
        height=320,
    )
    body = [text(28, 36, title), f'<g transform="translate(28 58)">{drawn}</g>']
    return alone(580, 400, title, body)
