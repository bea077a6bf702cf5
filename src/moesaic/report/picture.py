"""One SVG of a run for a README: readable on light and on dark pages, since it brings its card."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from markupsafe import escape

from moesaic.foreign import Values
from moesaic.record import Record
from moesaic.report import charts, figures
from moesaic.report.frontier import frontiers
from moesaic.report.lines import lines
from moesaic.report.maps import ROW, Cell, Row, heat
from moesaic.report.read import compared_ratio, figure, names, part, routing, tenths, title, unit

STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
fill:#1d2126}
.title{font-size:19px;font-weight:600}
.title.long{font-size:14px}
.head{font-size:12.5px;font-weight:600}
.quiet{fill:#666d75;font-size:11px}
.cell{font-size:10px}
.name.result,.value.result{font-weight:600}
.bar{fill:#b9bdb8}
.bar.original,.gone{fill:#7d858c}
.bar.result{fill:#0072b2}
.heat{fill:#0072b2}
.break{stroke:#fcfbf8;stroke-width:2;fill:none}
.s0{--s:#0072b2}.s1{--s:#b36b00}.s2{--s:#007a59}.s3{--s:#a8487c}
.grid{stroke:#dedbd2;fill:none}
.series{stroke:#0072b2;stroke-width:1.5;fill:none}
.dot{fill:#0072b2}
.front{stroke:var(--s);stroke-width:1.5;stroke-opacity:.6;fill:none}
.dash{stroke-dasharray:4 3}
.point circle,.point path{fill:var(--s);stroke:#fcfbf8;stroke-width:1.5}
.point.original circle,.point.comparison path{fill:#fcfbf8;stroke:var(--s);stroke-width:2}
.point text{fill:#fcfbf8;font-weight:650;font-size:11.5px}
.beaten circle,.beaten path{opacity:.5}
"""


def frontier_picture(records: Sequence[Record], first: Sequence[str] = ()) -> str:
    """What several runs lose over what they save, their names beside it, as one SVG.

    Args:
        records: of the runs.
        first: keys of the two axes, as for :func:`moesaic.report.frontier.frontiers`.

    Returns:
        the picture; empty where fewer than three models were measured.
    """
    drawn = frontiers(records, first)
    if not drawn:
        return ""
    width, edge, tall = 900, 28, 450
    told = "What is lost, and what is saved"
    body, top = [], 0
    for of in drawn:
        many = [charts.text(edge + 70, top + 24, of.model, "head")] if len(drawn) > 1 else []
        at = f"translate({edge + 70} {top + edge + 8})"
        body += [*many, f'<g transform="{at}">{of.first}</g>']
        top += tall
    rows = [
        row
        for n, record in enumerate(records, 1)
        for row in textwrap.wrap(f"{n}. {title(record)}", 130, subsequent_indent="    ")
    ]
    kinds = list(dict.fromkeys(kind for of in drawn for kind in of.kinds))
    rows += [f"Comparisons: {', '.join(kinds)}."] if kinds else []
    body += [charts.text(edge, top + 18 * n, row, "quiet") for n, row in enumerate(rows)]
    return alone(width, top + 18 * len(rows) - 10, told, body)


def picture(record: Record) -> str:
    """Perplexity beside the original and comparisons at the left, routing shares at the right."""
    width, height, edge = 900, 420, 36
    scores = part(record.measured, "scores")
    what, ratio = compared_ratio(record)
    models = [(name, figure(scores, name, "perplexity"), ratio(name)) for name in names(scores)]
    routed = routing(record)
    body = _title(title(record), edge)
    tokens = figure(scores, "result", "tokens")
    if models:
        row = min(48.0, 284 / len(models))
        drawn, _ = charts.bars(models, 440, row, min(20, row * 0.5), 80)
        told = f"Perplexity on {figures.count(tokens)} tokens" if tokens else "Perplexity"
        body += [
            charts.text(edge, 92, f"{told}, lower is better", "head"),
            charts.text(edge + 440, 92, what, "quiet", "end"),
            f'<g transform="translate({edge} 106)">{"".join(drawn)}</g>',
        ]
    if routed:
        row = min(17.5, 262 / len(routed))
        count = max(len(r["share"]) for _, r in routed)
        drawn, wide, _ = routes(routed, unit(record), row, min(44.0, 190 / count))
        x = width - edge - wide + 6
        body += [
            charts.text(x + 6, 92, f"Tokens by layer and {unit(record)}, %", "head"),
            f'<g transform="translate({x:.0f} 106)">{"".join(drawn)}</g>',
        ]
    return alone(width, height, title(record), body)


def alone(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """A drawing as a file of its own, on its own ground."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img"><title>{escape(title)}</title>'
        f'<style>{STYLE}</style><rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" '
        f'rx="10" fill="#fcfbf8" stroke="#dedbd2"/>{"".join(body)}</svg>\n'
    )


def routes(
    routed: Sequence[tuple[int, Values]], unit: str, row: float = ROW, cell: float = 0.0
) -> tuple[list[str], float, float]:
    """The share of tokens by layer and expert, and its divergence from uniform as bars."""
    most = max((s for _, r in routed for s in r["share"]), default=0) or 1.0
    rows = []
    for layer, r in routed:
        cells = [
            Cell(s / most, f"layer {layer}, {unit} {j}: {tenths(s)}", f"{100 * s:.0f}")
            for j, s in enumerate(r["share"])
        ]
        jsd = r.get("jsd")
        told = f"layer {layer}: {charts.uneven(r['share'], unit)}"
        rows.append(Row(layer, cells, told, jsd, "" if jsd is None else f"{jsd:.3f}"))
    columns = range(max(len(r["share"]) for _, r in routed))
    return heat(rows, columns, unit, "JSD from uniform", row, cell)


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
    body = [charts.text(28, 36, title), f'<g transform="translate(28 58)">{drawn}</g>']
    return alone(580, 400, title, body)


def _title(said: str, left: float) -> list[str]:
    """One large line, or two smaller ones where that is too short."""
    if len(said) <= 82:
        return [charts.text(left, 50, said, "title")]
    rows = textwrap.wrap(said, 112, max_lines=2, placeholder=" …")
    return [charts.text(left, 42 + 22 * n, row, "title long") for n, row in enumerate(rows)]
