"""Drawings of experts that were learned, and of tokens that choose how many blocks they run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

from markupsafe import Markup

from moesaic.record import LayerRecord, Record, Step
from moesaic.report import figures
from moesaic.report.charts import Figure
from moesaic.report.lines import Series, lines
from moesaic.report.maps import Cell, Row, bars, grids, heat_map
from moesaic.report.read import by_layer, figure, most_experts, part


def learned(record: Record, step: Step) -> Sequence[Figure | None]:
    """Widths, unions and similarity of the experts of each layer."""
    return [_widths(record), _union(record), _spread(record), _similar(record)]


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
    return "Width by layer.", told, bars(columns)


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


def _spread(record: Record) -> Figure | None:
    """Quartiles, least and greatest of the experts' widths before they were made equal."""
    names = ("narrowest", "a quarter is below", "half is below", "three quarters are", "widest")
    at: list[list[tuple[float, float]]] = [[] for _ in names]
    for layer in _layers(record):
        width = _before(layer)
        values = sorted(v / width for v in layer.analysis["expert_widths"] if width)
        if len(values) > 1:
            marks = (values[0], *quantiles(values, method="inclusive"), values[-1])
            for points, mark in zip(at, marks, strict=True):
                points.append((float(layer.index), mark))
    series: list[Series] = list(zip(names, at, strict=True))
    drawn = lines(
        series, "share of the width", "layer", names[2], width=430, form=figures.percent, log=False
    )
    told = "As trained, before all experts of a layer were given the width of the widest."
    return ("Widths of experts.", told, Markup(drawn)) if drawn else None


def _similar(record: Record) -> Figure | None:
    known = [(layer.index, layer.analysis.get("similarity")) for layer in _layers(record)]
    found = [(i, grid) for i, grid in known if grid]
    if not found:
        return None
    told = "The share of neurons that two experts of a layer have in common: the darker, the more."
    shares = dict(found)

    def tip(layer: int, a: int, b: int) -> str:
        return f"experts {a} and {b}: {figures.percent(shares[layer][a][b])}"

    drawn = grids(found, "Similarity of experts by layer", tip)
    return "Similarity of experts.", told, drawn


def gated(record: Record, step: Step) -> Sequence[Figure | None]:
    """How many blocks a token runs, by layer and text."""
    texts = part(record.measured, "activity")
    columns = {name: dict(by_layer(part(texts, name))) for name in texts}
    layers = sorted({i for values in columns.values() for i in values})
    if not layers:
        return []
    blocks = max(1, most_experts(record))
    rows = [
        Row(
            i,
            [
                None
                if (v := values.get(i)) is None
                else Cell(v / blocks, f"layer {i}, {name}: {v:.2f} of {blocks} blocks", f"{v:.1f}")
                for name, values in columns.items()
            ],
        )
        for i in layers
    ]
    means = [sum(values.values()) / max(1, len(values)) for values in columns.values()]
    rows.append(Row("mean", [Cell(m / blocks, "the mean", f"{m:.2f}") for m in means]))
    told = "Mean number of blocks that a token runs, by layer and text."
    drawn = heat_map(rows, [*columns], "Active blocks by layer and text", cell=84.0)
    return [("Active blocks.", told, drawn)]
