"""Drawings of what became of mixtures of experts: pruned, skipping, condensed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from markupsafe import Markup

from moesaic.record import LayerRecord, Record, Step
from moesaic.report import figures, read
from moesaic.report.charts import Figure, text
from moesaic.report.lines import lines
from moesaic.report.maps import Cell, Row, bars, grids, heat, heat_map
from moesaic.report.picture import alone
from moesaic.report.read import figure, part

SHADES = "The darker an expert, the more of its layer’s calls on the calibration text it had."


def _calls(layer: LayerRecord) -> list[float]:
    return list(layer.analysis.get("calls") or ())


def _row(
    layer: LayerRecord, count: int, stays: Collection[int] | None, most: float, note: str = ""
) -> Row:
    """A layer's experts before the change, the shade of each its share of the calls.

    Args:
        layer: of a record.
        count: experts it had.
        stays: those that stay; None where the layer is as it was.
        most: the greatest share of any expert.
        note: written at the right; without one, a bar of what the layer lost.
    """
    calls, cells = _calls(layer), []
    for j in range(count):
        share = calls[j] / sum(calls) if sum(calls) and j < len(calls) else None
        gone = stays is not None and j not in stays
        fate = "" if stays is None else ", dropped" if gone else ", kept"
        told = "" if share is None else f": {figures.percent(share, 1)} of calls"
        strength = 0.6 if share is None else share / most
        kind = "gone" if gone else "heat" if stays is None or not note else "heat kept"
        tip = f"layer {layer.index}, expert {j}{told}{fate}"
        cells.append(Cell(strength, tip, kind=kind, crossed=gone))
    dropped = [] if stays is None else sorted({*range(count)} - {*stays})
    said = f"dropped {figures.ranges(dropped)}" if dropped else "all stay"
    loss = None if note else figure(layer.analysis, "relative_loss")
    note = note if loss is None else figures.share(loss)
    return Row(layer.index, cells, f"layer {layer.index}: {said}", loss, note)


def _most(layers: Sequence[LayerRecord]) -> float:
    """The greatest share of a layer's calls that one expert has."""
    seen = [calls for calls in map(_calls, layers) if sum(calls)]
    return max((max(calls) / sum(calls) for calls in seen), default=0) or 1.0


# --- experts that stay ---------------------------------------------------------------------------


def kept(record: Record, step: Step) -> Sequence[Figure | None]:
    """Which experts stay in each layer."""
    known = [(x, read.experts_before(x), x.shape.get("kept")) for x in record.layers]
    found = [(layer, count, stays) for layer, count, stays in known if count and stays is not None]
    if not found:
        return []
    layers = [layer for layer, _, _ in found]
    most = _most(layers)
    rows = [_row(layer, count, stays, most) for layer, count, stays in found]
    told = ["Blue experts stay, crossed ones are gone."]
    told += [SHADES] if any(map(_calls, layers)) else []
    lost = any(r.bar is not None for r in rows)
    if lost:
        meant = step.summary.get("loss") or "what the layer loses by the measure that decided"
        told.append(f"Bars: {meant}.")
    side = "relative loss" if lost else ""
    columns = range(max(count for _, count, _ in found))
    drawn = heat_map(rows, columns, "Experts that stay, by layer", "expert", side)
    return [("Experts by layer.", " ".join(told), drawn), _together(record)]


def _together(record: Record) -> Figure | None:
    """How often tokens run two experts at once, of the layers of which that is known."""
    found = [(x.index, x.analysis["together"]) for x in record.layers if "together" in x.analysis]
    if not found:
        return None
    told = (
        "The darker, the more tokens of the calibration text run both experts; of the first, the "
        "middle and the last layer that route, before any expert went."
    )
    return "Experts chosen together.", told, together(found)


def together(found: Sequence[tuple[int, Sequence[Sequence[float]]]]) -> Markup:
    """How often two experts are chosen for the same token.

    Args:
        found: numbers of layers, and counts of tokens for each two experts; an expert beside
            itself is not drawn.
    """
    shares, largest = [], {}
    for layer, counts in found:
        beside = [c for i, row in enumerate(counts) for j, c in enumerate(row) if i != j]
        most, largest[layer] = max(beside, default=0) or 1.0, sum(beside) / 2 or 1.0
        grid = [
            [math.nan if i == j else c / most for j, c in enumerate(row)]
            for i, row in enumerate(counts)
        ]
        shares.append((layer, grid))
    counted = dict(found)

    def tip(layer: int, i: int, j: int) -> str:
        share = figures.percent(counted[layer][i][j] / largest[layer], 1)
        return f"experts {i} and {j}: {share} of pairs"

    return grids(shares, "Experts chosen together", tip, across=3)


def overlap(layers: Sequence[tuple[int, int, Sequence[int], Sequence[int]]], title: str) -> str:
    """The experts that two runs kept, as one SVG file.

    Args:
        layers: of each its number, the experts it had, those that the first run kept, and those
            that the second did.
        title: the two runs.
    """
    fates = {
        (True, True): ("both", 1.0, "heat"),
        (True, False): ("the first alone", 0.35, "heat"),
        (False, True): ("the second alone", 0.6, "gone"),
        (False, False): ("none", 0.0, "heat"),
    }
    rows = []
    for layer, count, first, second in layers:
        cells = []
        for j in range(count):
            by, strength, kind = fates[j in first, j in second]
            cells.append(Cell(strength, f"layer {layer}, expert {j}: kept by {by}", kind=kind))
        both = {*first} & {*second}
        note = "the same" if {*first} == {*second} else f"{len(both)} in common"
        rows.append(Row(layer, cells, f"layer {layer}: {note}", note=note))
    columns = range(max(count for _, count, _, _ in layers))
    body, width, height = heat(rows, columns, "expert")
    legend = "Dark: kept in both; pale: in the first alone; grey: in the second alone."
    drawn = f'<g transform="translate(28 76)">{"".join(body)}</g>'
    head = [text(28, 36, title), text(28, 56, legend, "quiet")]
    return alone(max(560, round(width) + 56), round(height) + 100, title, [*head, drawn])


# --- neurons that stay ---------------------------------------------------------------------------


def slimmed(record: Record, step: Step) -> Sequence[Figure | None]:
    """How wide each layer's experts are, and what went with the other neurons."""
    layers = [layer for layer in record.layers if "neurons" in layer.shape]

    meant = step.summary.get("loss")
    columns = [
        ("neurons that stay", _column(layers, "shape", "neurons"), lambda v: f"{v:,.0f}"),
        ("lost", _column(layers, "analysis", "relative_loss"), lambda v: figures.percent(v, 1)),
    ]
    columns = [c for c in columns if c[1]]
    if not columns:
        return []
    told = f"Lost: {meant}." if meant and len(columns) > 1 else ""
    drawn = [("Neurons by layer.", told, bars(columns))]
    return [*drawn, *(kept(record, step) if any("kept" in x.shape for x in layers) else ())]


# --- experts left out, token by token ------------------------------------------------------------


def skipped(record: Record, step: Step) -> Sequence[Figure | None]:
    """How much each layer leaves out."""
    layers = [layer for layer in record.layers if "beta" in layer.shape]

    calls = _column(layers, "analysis", "calls_per_token")
    columns = [
        ("calls skipped", _column(layers, "analysis", "skipped"), lambda v: figures.percent(v, 1)),
        ("beta", _column(layers, "shape", "beta"), lambda v: f"{v:.3f}"),
        ("experts a token runs", calls, lambda v: f"{v:.2f}"),
    ]
    columns = [c for c in columns if c[1]]
    if not columns:
        return []
    return [("Skipping by layer.", "On the calibration text.", bars(columns))]


def fewer(record: Record, step: Step) -> Sequence[Figure | None]:
    """How many experts a token runs in each layer, and how far that moves the layer's output."""
    layers = [layer for layer in record.layers if "experts_per_token" in layer.shape]
    number = _column(layers, "shape", "experts_per_token")
    moved = _column(layers, "analysis", "relative_loss")
    columns = [
        ("experts a token runs", number, lambda v: f"{v:.0f}"),
        ("its output moves by", moved, lambda v: figures.percent(v, 1)),
    ]
    told = "Moves: the change’s size as a share of the output’s own." if moved else ""
    return [("Experts a token, by layer.", told, bars([c for c in columns if c[1]]))]


def _column(layers: Sequence[LayerRecord], of: str, key: str) -> dict[int, float]:
    """One figure of every layer that has it.

    Args:
        layers: of a record.
        of: ``shape`` or ``analysis``.
        key: of the figure.
    """
    found = {layer.index: figure(getattr(layer, of), key) for layer in layers}
    return {i: v for i, v in found.items() if v is not None}


# --- condensed layers ----------------------------------------------------------------------------


def condensed(record: Record, step: Step) -> Sequence[Figure | None]:
    """Which layers were taken, in which order, and what each loses."""
    return [_chosen(record, step), _search(step), _divergence(record, step), _sizes(record, step)]


def _chosen(record: Record, step: Step) -> Figure | None:
    order = read.order(step)
    layers = [layer for layer in record.layers if read.experts_before(layer)]
    if not layers:
        return None
    rows, most = [], _most(layers)
    for layer in layers:
        taken = layer.index in order
        stays = set(layer.shape.get("chosen") or ()) if taken else None
        note = f"chosen {_ordinal(order.index(layer.index) + 1)}" if taken else "routes"
        rows.append(_row(layer, read.experts_before(layer), stays, most, note))
    told = "Outlined experts stay with fixed weights, crossed ones are gone. "
    columns = range(max(map(read.experts_before, layers)))
    label, side = "Experts that stay, by layer", "what became of it"
    return "Experts by layer.", told + SHADES, heat_map(rows, columns, label, "expert", side)


def _ordinal(n: int) -> str:
    """A place in an order.

    >>> [_ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '21st']
    """
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def _search(step: Step) -> Figure | None:
    """A search over layers: a row a round, a column a layer, the layer taken in each outlined."""
    found: list[tuple[int, dict[int, float]]] = []
    for of in step.summary.get("search") or ():
        known = ((int(j), figure(of, "losses", j)) for j in part(of, "losses"))
        found.append((int(of["layer"]), {j: v for j, v in known if v is not None}))
    if not found:
        return None
    columns = sorted({j for taken, losses in found for j in (taken, *losses)})
    rows = []
    for n, (taken, losses) in enumerate(found, 1):
        most = max((v for v in losses.values() if math.isfinite(v)), default=0) or 1.0
        cells = []
        for j in columns:
            loss, kind = losses.get(j), "heat kept" if j == taken else "heat"
            tip = f"round {n}, layer {j}: {'–' if loss is None else f'{loss:.4g}'}"
            strength = 0.0 if loss is None else loss / most if math.isfinite(loss) else 1.0
            shown = loss is not None or j == taken
            cells.append(Cell(strength, tip, kind=kind) if shown else None)
        note = f"{losses[taken]:.4g}" if taken in losses else ""
        rows.append(Row(n, cells, f"round {n}: layer {taken}", note=note))
    told = (
        "A row a round, a column a layer: the lighter, the less the search counts it a loss to "
        "take this layer next. The layer taken is outlined."
    )
    side, label = "loss of the layer taken", "Layers in the order of choice"
    return "The order of choice.", told, heat_map(rows, columns, label, "layer", side)


def _divergence(record: Record, step: Step) -> Figure | None:
    layers = [(layer.index, part(layer.analysis, "divergence")) for layer in record.layers]
    series = []
    for name in dict.fromkeys(n for _, d in layers for n in d):
        known = [(float(i), figure(d, name)) for i, d in layers]
        series.append((name, [(i, v) for i, v in known if v is not None]))
    metric, used = (str(step.config.get(key) or "") for key in ("metric", "keep"))
    drawn = lines(series, f"{metric} divergence".strip(), "layer", used, width=430)
    told = (
        "Of a layer’s output from what it was, were that layer alone replaced, by what of it would "
        "be kept. Thick: what was kept."
    )
    return ("What a layer loses.", told, Markup(drawn)) if drawn else None


def _sizes(record: Record, step: Step) -> Figure | None:
    scores = part(record.measured, "scores")
    counts = {"original": 0, "result": len(read.order(step))}
    counts |= {n: int(n) for n in scores if n.isdecimal()}
    points: dict[int, tuple[float, float]] = {}
    for name, count in counts.items():
        x, y = read.stored_ratio(record, name), figure(scores, name, "perplexity")
        if x is not None and y is not None:
            points[count] = (x, y)
    if len(points) < 2:
        return None
    ranked = sorted(points.items())
    drawn = lines(
        [("", [p for _, p in ranked])],
        "perplexity",
        "parameters stored, of the original",
        form=figures.perplexity,
        ticked=figures.percent,
        notes=[str(count) for count, _ in ranked],
        width=380,
    )
    told = "Numbers: how many layers were condensed."
    return ("Perplexity over size.", told, Markup(drawn)) if drawn else None
