"""Layers one by one: a table of a run's, and a strip of every run's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from moesaic.foreign import Values
from moesaic.record import LayerRecord, Record
from moesaic.report import figures, read
from moesaic.report.maps import Cell as Field
from moesaic.report.maps import Row, heat_map
from moesaic.report.read import Cell, Figures, figure

FINDINGS = 8
"""Figures of a method's own that a table has columns for."""


def layer_table(record: Record) -> Figures:
    """A row a layer: what it is, how wide, and every plain figure that its method saw of it."""
    layers = record.layers
    known: dict[str, list[float | None]] = {
        "neurons before": [float(x.width_before) or None for x in layers],
        "neurons": [float(x.width) or None for x in layers],
        "a token runs": [x.active_width or None for x in layers],
        "experts": [float(x.experts) or None for x in layers],
        "top-k": [float(x.top_k) or None for x in layers],
    }
    seen = [dict(_scalars({**x.shape, **x.analysis})) for x in layers]
    names = dict.fromkeys(name for of in seen for name in of)
    found = {name: [of.get(name) for of in seen] for name in names}
    told = {name: values for name, values in found.items() if len(set(values)) > 1}
    known |= dict(list(told.items())[:FINDINGS])
    known = {name: values for name, values in known.items() if any(v is not None for v in values)}
    rows = []
    for n, layer in enumerate(layers):
        cells = [Cell(layer.told or f"{layer.kind}, as it was")]
        cells += [Cell(_plain(values[n]), value=values[n]) for values in known.values()]
        rows.append((str(layer.index), cells))
    return Figures(["what it is", *known], rows)


def _scalars(of: Values, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The plain figures of a mapping and of those inside it, by name."""
    for key, inside in of.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(inside, dict):
            yield from _scalars(inside, f"{name}: ")
        elif (value := figure(of, key)) is not None:
            yield name, value


def _plain(value: float | None) -> str:
    """A figure to four digits; whole numbers exactly."""
    if value is None:
        return figures.NONE
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def left(layer: LayerRecord, kind: str) -> float | None:
    """What is left of a layer; None where it is not known.

    Args:
        layer: of the result.
        kind: of the step that shaped it. What is made smaller on disk is counted by the neurons
            that are stored, everything else by those that a token runs.

    >>> left(LayerRecord(0, "carved", "", width=100, width_before=100, active_width=80), "split")
    0.8
    >>> six = LayerRecord(0, "pruned", "", width=9, width_before=9, experts=6, shape={"before": 8})
    >>> left(six, "experts")
    0.75
    """
    if not layer.changed:
        return 1.0
    before = layer.width_before or layer.width
    experts = read.experts_before(layer) or layer.experts
    skipped = figure(layer.analysis, "skipped")
    if skipped is not None:
        return 1.0 - skipped
    if kind in read.FEWER and experts and before:
        return min(1.0, max(1, layer.experts) * layer.width / (experts * before))
    return min(1.0, layer.active_width / before) if before and layer.active_width else None


def strip(records: Sequence[Record]) -> Markup | str:
    """A row a run, a cell a layer, the darker the more is left of it."""
    shares = [{x.index: left(x, read.kind(record)) for x in record.layers} for record in records]
    layers = sorted({i for of in shares for i, v in of.items() if v is not None})
    rows = []
    for n, of in enumerate(shares, 1):
        cells = [
            None if (v := of.get(i)) is None else Field(v, f"run {n}, layer {i}: {read.tenths(v)}")
            for i in layers
        ]
        rows += [Row(n, cells, f"run {n}")] if any(cells) else []
    cell = min(28.0, max(7.0, 640 / max(1, len(layers))))
    label = "What is left of each layer, by run"
    return heat_map(rows, layers, label, "layer", cell=cell) if layers else ""
