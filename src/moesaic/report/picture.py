"""One SVG of a run for a README: readable on light and on dark pages, since it brings its card."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from markupsafe import escape

from moesaic.errors import printable
from moesaic.record import Record
from moesaic.report import draw, numbers, read
from moesaic.report.frontier import frontiers
from moesaic.report.read import figure

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


def frontier_picture(records: Sequence[Record]) -> str:
    """What several runs lose over what they save, their names beside it, as one SVG.

    Returns:
        the picture; empty where fewer than three models were measured.
    """
    plots = frontiers(records)
    if not plots:
        return ""
    width, edge, tall = 900, 28, 450
    title = "What is lost, and what is saved"
    body, top = [], 0
    for plot in plots:
        many = [draw.text(edge + 70, top + 24, plot.model, "head")] if len(plots) > 1 else []
        body += [*many, draw.moved(edge + 70, top + edge + 8, [plot.drawn])]
        top += tall
    rows = [
        row
        for n, record in enumerate(records, 1)
        for row in textwrap.wrap(f"{n}. {read.title(record)}", 130, subsequent_indent="    ")
    ]
    kinds = list(dict.fromkeys(kind for plot in plots for kind in plot.kinds))
    rows += [f"Comparisons: {', '.join(kinds)}."] if kinds else []
    body += [draw.text(edge, top + 18 * n, row, "quiet") for n, row in enumerate(rows)]
    return standalone_svg(width, top + 18 * len(rows) - 10, title, body)


def picture(record: Record) -> str:
    """Perplexity beside the original and comparisons at the left, routing shares at the right."""
    width, height, edge = 900, 420, 36
    title, (models, ratio) = read.title(record), read.models(record)
    body = _title(title, edge)
    tokens = figure(record.measured, "scores", "result", "tokens")
    if models:
        row = min(48.0, 284 / len(models))
        head = f"Perplexity on {numbers.count(tokens)} tokens" if tokens else "Perplexity"
        body += [
            draw.text(edge, 92, f"{head}, lower is better", "head"),
            draw.text(edge + 440, 92, ratio, "quiet", "end"),
            draw.moved(edge, 106, draw.perplexities(models, 440, row, 80)[0]),
        ]
    routes = read.routes(record)
    if routes.rows:
        row = min(17.5, 262 / len(routes.rows))
        heat, wide, _ = draw.maps(routes, row, min(44.0, 190 / len(routes.columns)))
        x = width - edge - wide + 6
        body += [
            draw.text(x + 6, 92, f"Tokens by layer and {routes.column}, %", "head"),
            draw.moved(x, 106, heat),
        ]
    return standalone_svg(width, height, title, body)


def standalone_svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """A drawing as a file of its own, on its own ground."""
    return printable(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img"><title>{escape(title)}</title>'
        f'<style>{STYLE}</style><rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" '
        f'rx="10" fill="#fcfbf8" stroke="#dedbd2"/>{"".join(body)}</svg>\n'
    )


def _title(title: str, left: float) -> list[str]:
    """One large line, or two smaller ones where that is too short."""
    if len(title) <= 82:
        return [draw.text(left, 50, title, "title")]
    rows = textwrap.wrap(title, 112, max_lines=2, placeholder=" …")
    return [draw.text(left, 42 + 22 * n, row, "title long") for n, row in enumerate(rows)]
