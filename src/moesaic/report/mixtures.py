"""Drawings of what became of mixtures of experts: pruned, skipping, condensed."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from moesaic.record import LayerRecord, Record, Step
from moesaic.report import figures, read
from moesaic.report.charts import text
from moesaic.report.lines import lines
from moesaic.report.maps import Experts, expert_map, overlap_map, pairs, rounds, rows
from moesaic.report.picture import alone
from moesaic.report.read import figure, part

Figure = tuple[str, str, Markup]
"""A caption in a few words, how to read the drawing, the drawing."""
SHADES = "The darker an expert, the more of its layer’s calls on the calibration text it had."


def _calls(layer: LayerRecord) -> list[float]:
    return list(layer.analysis.get("calls") or ())


# --- experts that stay ---------------------------------------------------------------------------


def kept(record: Record, step: Step) -> Sequence[Figure | None]:
    """Which experts stay in each layer."""
    layers = []
    for layer in record.layers:
        count, stays = read.experts_before(layer), layer.shape.get("kept")
        if count and stays is not None:
            loss = figure(layer.analysis, "relative_loss")
            layers.append(Experts(layer.index, count, set(stays), _calls(layer), loss=loss))
    if not layers:
        return []
    told = ["Blue experts stay, crossed ones are gone."]
    told += [SHADES] if any(e.calls for e in layers) else []
    lost = any(e.loss is not None for e in layers)
    if lost:
        meant = step.summary.get("loss") or "what the layer loses by the measure that decided"
        told.append(f"Bars: {meant}.")
    side = "relative loss" if lost else ""
    drawn = ("Experts by layer.", " ".join(told), expert_map(layers, side))
    return [drawn, _together(record)]


def _together(record: Record) -> Figure | None:
    """How often tokens run two experts at once, of the layers of which that is known."""
    found = [(x.index, x.analysis["together"]) for x in record.layers if "together" in x.analysis]
    if not found:
        return None
    told = (
        "The darker, the more tokens of the calibration text run both experts; of the first, the "
        "middle and the last layer that route, before any expert went."
    )
    return "Experts chosen together.", told, pairs(found)


def overlap(layers: Sequence[tuple[int, int, Sequence[int], Sequence[int]]], title: str) -> str:
    """The experts that two runs kept, as one SVG file.

    Args:
        layers: as for :func:`moesaic.report.maps.overlap_map`.
        title: the two runs.
    """
    drawn = f'<g transform="translate(28 58)">{overlap_map(layers)}</g>'
    return alone(560, 130 + 19 * len(layers), title, [text(28, 36, title), drawn])


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
    drawn = [("Neurons by layer.", told, rows(columns))]
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
    return [("Skipping by layer.", "On the calibration text.", rows(columns))]


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
    return [("Experts a token, by layer.", told, rows([c for c in columns if c[1]]))]


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
    layers = []
    for layer in record.layers:
        count = read.experts_before(layer)
        if not count:
            continue
        taken = layer.index in order
        stays = set(layer.shape.get("chosen") or ()) if taken else None
        note = f"chosen {_ordinal(order.index(layer.index) + 1)}" if taken else "routes"
        layers.append(Experts(layer.index, count, stays, _calls(layer), note))
    if not layers:
        return None
    told = "Outlined experts stay with fixed weights, crossed ones are gone. "
    return "Experts by layer.", told + SHADES, expert_map(layers, "what became of it", outline=True)


def _ordinal(n: int) -> str:
    """A place in an order.

    >>> [_ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '21st']
    """
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def _search(step: Step) -> Figure | None:
    steps = []
    for found in step.summary.get("search") or ():
        losses = {int(j): figure(found, "losses", j) for j in part(found, "losses")}
        steps.append((int(found["layer"]), {j: v for j, v in losses.items() if v is not None}))
    if not steps:
        return None
    told = (
        "A row a round, a column a layer: the lighter, the less the search counts it a loss to "
        "take this layer next. The layer taken is outlined."
    )
    return "The order of choice.", told, rounds(steps)


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
