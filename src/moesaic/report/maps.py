"""Maps as inline SVG: experts by layer, layers by the round in which they were chosen, rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from moesaic.report import figures
from moesaic.report.charts import Shade, rect, shaded, svg, text

ROW = 19.0


@dataclass(frozen=True)
class Experts:
    """One layer's experts before the change."""

    layer: int
    count: int
    kept: Collection[int] | None
    """Those that stay; None where the layer is as it was."""
    calls: Sequence[float] = ()
    """How often tokens chose each."""
    note: str = ""
    """Written at the right."""
    loss: float | None = None
    """Drawn as a bar at the right."""


def expert_map(layers: Sequence[Experts], side: str = "", outline: bool = False) -> Markup:
    """Which experts stay, layer by layer, the shade of each its share of the calls.

    Args:
        layers: from the first.
        side: what the bars or notes at the right are.
        outline: set those that stay apart from those of layers that are as they were.
    """
    count = max(layer.count for layer in layers)
    cell = min(40.0, max(7.0, 320 / max(1, count)))
    left, head, bar = 30.0, 30.0, 62.0
    gap = 2 if cell >= 14 else 1
    right = left + count * cell + 14
    known = [c / sum(e.calls) for e in layers if sum(e.calls) for c in e.calls]
    most = max(known, default=0) or 1.0
    widest = max((e.loss for e in layers if e.loss is not None), default=0) or 1.0
    out = [text(left, 10, "expert", "quiet"), text(right, 10, side, "quiet")]
    for j in range(0, count, math.ceil(22 / cell)):
        out.append(text(left + (j + 0.5) * cell - 1, head - 5, j, "quiet", "middle"))
    drawn = []
    for i, e in enumerate(layers):
        y = head + i * ROW
        base = y + ROW / 2 + 3
        total = sum(e.calls)
        out.append(text(left - 8, base, e.layer, "quiet", "end"))
        cells = []
        for j in range(e.count):
            share = e.calls[j] / total if total and j < len(e.calls) else None
            stays = e.kept is None or j in e.kept
            fate = "" if e.kept is None else ", kept" if stays else ", dropped"
            told = "" if share is None else f": {figures.percent(share, 1)} of calls"
            tip = f"layer {e.layer}, expert {j}{told}{fate}"
            strength = 0.5 if share is None else 0.06 + 0.8 * share / most
            kind = "heat kept" if outline and e.kept is not None else "heat"
            kind = kind if stays else "gone"
            place = (left + j * cell, y, cell - gap, ROW - gap)
            cells.append(Shade(*place, strength, tip, kind, crossed=not stays))
        gone = [] if e.kept is None else sorted(set(range(e.count)) - set(e.kept))
        said = f"dropped {figures.ranges(gone)}" if gone else "all stay"
        drawn.append((f"layer {e.layer}: {said}", cells))
        if e.loss is not None:
            long = bar * e.loss / widest if math.isfinite(e.loss) else bar
            out.append(rect(right, y + ROW * 0.28, long, ROW * 0.36, "bar result"))
            out.append(text(right + long + 5, base, figures.share(e.loss), "quiet"))
        elif e.note:
            out.append(text(right, base, e.note, "quiet"))
    room = max(bar + 44, 6.2 * max(len(side), *(len(e.note) for e in layers)))
    out = shaded(drawn) + out
    return svg(right + room, head + len(layers) * ROW, out, "Experts that stay, by layer")


def rounds(steps: Sequence[tuple[int, Mapping[int, float]]]) -> Markup:
    """A search over layers: a row a round, a column a layer, the layer taken in each outlined."""
    columns = sorted({j for taken, losses in steps for j in (taken, *losses)})
    cell = min(44.0, max(14.0, 320 / len(columns)))
    left, head = 30.0, 30.0
    every = math.ceil(22 / cell)
    out = [text(left, 10, "layer", "quiet")]
    for k, j in enumerate(columns):
        if k % every == 0:
            out.append(text(left + (k + 0.5) * cell - 1, head - 5, j, "quiet", "middle"))
    right = left + len(columns) * cell + 12
    out.append(text(right, 10, "loss of the layer taken", "quiet"))
    drawn = []
    for i, (taken, losses) in enumerate(steps):
        y = head + i * ROW
        base = y + ROW / 2 + 3
        finite = [v for v in losses.values() if math.isfinite(v)]
        most = max(finite, default=0) or 1.0
        out.append(text(left - 8, base, i + 1, "quiet", "end"))
        cells = []
        for k, j in enumerate(columns):
            x = left + k * cell
            loss = losses.get(j)
            if loss is not None:
                tip = f"round {i + 1}, layer {j}: {loss:.4g}"
                strength = 0.05 + 0.7 * (max(0.0, loss) / most if math.isfinite(loss) else 1)
                cells.append(Shade(x, y, cell - 2, ROW - 2, min(1.0, strength), tip))
            if j == taken:
                out.append(rect(x + 1, y + 1, cell - 4, ROW - 4, "taken"))
        drawn.append((f"round {i + 1}: layer {taken}", cells))
        if (loss := losses.get(taken)) is not None:
            out.append(text(right, base, f"{loss:.4g}", "quiet"))
    out = shaded(drawn) + out
    return svg(right + 130, head + len(steps) * ROW, out, "Layers in the order of choice")


def pairs(layers: Sequence[tuple[int, Sequence[Sequence[float]]]]) -> Markup:
    """How often two experts are chosen for the same token: a square a layer, side by side.

    Args:
        layers: numbers of layers, and counts of tokens for each two experts; an expert beside
            itself is not drawn.
    """
    count = max(len(counts) for _, counts in layers)
    cell = min(20.0, max(3.0, 200 / count))
    gap = 1.5 if cell >= 10 else 0.5
    room, head = count * cell + 34, 30.0
    every = math.ceil(22 / cell)
    out, drawn = [], []
    for n, (layer, counts) in enumerate(layers):
        left = 22 + n * room
        out.append(text(left, 10, f"layer {layer}", "quiet"))
        beside = [(i, j) for i in range(len(counts)) for j in range(len(counts)) if i != j]
        most = max((counts[i][j] for i, j in beside), default=0) or 1.0
        total = sum(counts[i][j] for i, j in beside) / 2 or 1.0
        for k in range(0, len(counts), every):
            out.append(text(left + (k + 0.5) * cell, head - 5, k, "quiet", "middle"))
            out.append(text(left - 4, head + (k + 0.5) * cell + 4, k, "quiet", "end"))
        cells = []
        for i, j in beside:
            share = figures.percent(counts[i][j] / total, 1)
            tip = f"layer {layer}, experts {i} and {j}: {share} of pairs"
            place = (left + j * cell, head + i * cell, cell - gap, cell - gap)
            cells.append(Shade(*place, 0.04 + 0.8 * counts[i][j] / most, tip))
        drawn.append((f"layer {layer}", cells))
    out = shaded(drawn) + out
    return svg(len(layers) * room, head + count * cell + 4, out, "Experts chosen together")


def overlap_map(layers: Sequence[tuple[int, int, Collection[int], Collection[int]]]) -> Markup:
    """The experts that two runs kept, layer by layer.

    Args:
        layers: of each its number, the experts it had, those that the first run kept, and those
            that the second did.
    """
    count = max(experts for _, experts, _, _ in layers)
    cell = min(40.0, max(7.0, 320 / max(1, count)))
    left, head = 30.0, 30.0
    gap = 2 if cell >= 14 else 1
    out = [text(left, 10, "expert", "quiet")]
    for j in range(0, count, math.ceil(22 / cell)):
        out.append(text(left + (j + 0.5) * cell - 1, head - 5, j, "quiet", "middle"))
    for n, (layer, experts, first, second) in enumerate(layers):
        y = head + n * ROW
        out.append(text(left - 8, y + ROW / 2 + 3, layer, "quiet", "end"))
        for j in range(experts):
            x, width, height = left + j * cell, cell - gap, ROW - gap
            fate = {(True, True): "both", (True, False): "the first alone"}
            by = fate.get((j in first, j in second), "the second alone" if j in second else "none")
            tip = f"layer {layer}, expert {j}: kept by {by}"
            strength = 0.8 if by == "both" else 0.06
            out.append(rect(x, y, width, height, "heat", strength, tip))
            if by.endswith("alone"):
                half = width / 2
                at = x if j in first else x + half
                out.append(rect(at, y, half, height, "heat", 0.45, tip))
        same = set(first) == set(second)
        told = "the same" if same else f"{len(set(first) & set(second))} in common"
        out.append(text(left + count * cell + 8, y + ROW / 2 + 3, told, "quiet"))
    label = "Experts kept by two runs"
    return svg(left + count * cell + 90, head + len(layers) * ROW, out, label)


Column = tuple[str, Mapping[int, float], Callable[[float], str]]
"""A heading, a value a layer, how it is written."""


def rows(columns: Sequence[Column], room: float = 110, bar: float = 74) -> Markup:
    """Figures by layer as bars beside each other, each column on a scale of its own from 0."""
    layers = sorted({i for _, values, _ in columns for i in values})
    left, head = 30.0, 22.0
    out = []
    for n, (name, values, form) in enumerate(columns):
        x = left + n * (room + 30)
        most = max((v for v in values.values() if math.isfinite(v)), default=0) or 1.0
        out.append(text(x, 10, name, "quiet"))
        for i, layer in enumerate(layers):
            if (value := values.get(layer)) is None:
                continue
            y = head + i * ROW
            long = bar * max(0.0, value) / most if math.isfinite(value) else bar
            kind = "bar result" if n == 0 else "bar original"
            tip = f"layer {layer}, {name}: {form(value)}"
            out.append(rect(x, y + ROW * 0.22, long, ROW * 0.46, kind, tip=tip))
            out.append(text(x + long + 6, y + ROW / 2 + 3, form(value), "quiet"))
    for i, layer in enumerate(layers):
        out.append(text(left - 8, head + i * ROW + ROW / 2 + 3, layer, "quiet", "end"))
    width = left + len(columns) * (room + 30)
    label = f"{' and '.join(name for name, _, _ in columns)} by layer"
    return svg(width, head + len(layers) * ROW, out, label)


def strips(found: Sequence[tuple[str, Mapping[int, float]]]) -> Markup | str:
    """A row a run, a cell a layer, the darker the higher its share.

    Args:
        found: of each run its label and the share, 0 to 1, of each layer; empty draws nothing.
    """
    layers = sorted({i for _, shares in found for i in shares})
    if not layers:
        return ""
    cell = min(28.0, max(7.0, 640 / len(layers)))
    left, head, gap = 30.0, 30.0, 2 if cell >= 14 else 1
    out = [text(left, 10, "layer", "quiet")]
    for k in range(0, len(layers), math.ceil(22 / cell)):
        place = (left + (k + 0.5) * cell - 1, head - 5)
        out.append(text(*place, layers[k], "quiet", "middle"))
    drawn = []
    for n, (label, shares) in enumerate(found):
        y = head + n * ROW
        out.append(text(left - 8, y + ROW / 2 + 3, label, "quiet", "end"))
        cells = [
            Shade(
                *(left + k * cell, y, cell - gap, ROW - gap, 0.05 + 0.75 * shares[i]),
                f"run {label}, layer {i}: {figures.percent(shares[i], 1)}",
            )
            for k, i in enumerate(layers)
            if i in shares
        ]
        drawn.append((f"run {label}", cells))
    size = (left + len(layers) * cell + 8, head + len(found) * ROW)
    return svg(*size, shaded(drawn) + out, "What is left of each layer, by run")
