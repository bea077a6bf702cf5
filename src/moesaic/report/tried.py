"""What a search tried on its way to a recipe."""

from __future__ import annotations

import math

from markupsafe import escape

from moesaic.record import Record
from moesaic.report import figures
from moesaic.report.charts import Figure, Plane, line, svg, text, ticks
from moesaic.report.frontier import best, stairs
from moesaic.report.read import figure, part


def tried(record: Record) -> Figure | None:
    """Every candidate that was measured, by the memory its weights take and what it loses."""
    known = [
        (of, size, loss)
        for of in record.measured.get("tried") or ()
        for size, loss in [(figure(of, "memory"), figure(of, "kl"))]
        if size is not None and loss is not None and math.isfinite(loss)
    ]
    if not known:
        return None
    chosen = part(record.measured, "chosen").get("steps")
    plane = Plane(
        [size for _, size, _ in known],
        [loss for _, _, loss in known],
        (52.0, 24.0, 520.0, 260.0),
        edge=0.06,
    )
    step = 2.0**30 if plane.high >= 2**30 else 2.0**20
    marked = [step * v for v in ticks(plane.low / step, plane.high / step, 5)]
    out = [text(0, 10, "KL from the original, nats", "quiet")]
    out += plane.axes(marked, figures.memory, figures.share)
    out.append(text(plane.right, plane.bottom + 34, "memory of the weights", "quiet", "end"))
    last = [(size, loss) for _, size, loss in known]
    ahead = sorted(last[i] for i in best(last))
    if len(ahead) > 1:
        out.append(line(stairs([plane.at(*at) for at in ahead]), "series s0 front"))
    for of, size, loss in known:
        x, y = plane.at(size, loss)
        ours, rough = of.get("steps") == chosen, of.get("stage") == "rough"
        kind = "result" if ours else "beaten" if rough else "comparison"
        said = f"{figures.plain(of.get('form'))}: {figures.memory(size)}, KL {figures.share(loss)}"
        out.append(
            f'<g class="point {kind} s{0 if ours else 1}" transform="translate({x:.1f} {y:.1f})">'
            f'<circle r="{7 if ours else 4}"/><title>{escape(said)}</title></g>'
        )
    drawn = svg(540, 300, out, "Candidates by the memory they take and what they lose")
    how = (
        f"{len(known)} candidates, on calibration text that nothing was decided on; pale ones "
        "as they are quickly made. Blue: chosen. The line: none is smaller and loses less."
    )
    left = record.measured.get("left_out") or ()
    if left:
        how += f" {len(left)} more were not tried, for they would take too long as predicted."
    return "What was tried.", how, drawn
