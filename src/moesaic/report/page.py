"""Sections as HTML: one file that needs nothing beside it, and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from moesaic.errors import MoesaicError, printable
from moesaic.record import Record
from moesaic.report import draw, facts, sentences, tables
from moesaic.report.blocks import Block, Section, Table
from moesaic.report.contents import contents
from moesaic.report.frontier import SECTION, frontiers

PLOTS = ("lines", "bars", "heat", "points")


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("moesaic.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def html(records: Sequence[Record]) -> str:
    """Return one self-contained HTML file about one or more runs.

    Plots and tables of layers are only on the page of a single run.

    Args:
        records: of the runs. What was not measured is left out.

    Raises:
        MoesaicError: there are no runs.
    """
    if not records:
        raise MoesaicError("A page is about one run at least.")
    several = len(records) > 1
    models = dict.fromkeys(facts.model_name(record) for record in records)
    originals = f"{len(models)} models" if len(models) > 2 else " and ".join(models)
    page = _template().render(
        title=f"{len(records)} runs of {originals}" if several else facts.title(records[0]),
        several=several,
        runs=[
            {
                "number": n,
                "title": facts.title(record),
                "outcome": sentences.outcome(record),
                "sections": contents(record, alone=not several),
            }
            for n, record in enumerate(records, 1)
        ],
        shared=_shared(records) if several else [],
        groups=_groups,
        half=_half,
        drawn=draw.drawn,
        versions=sorted({r.moesaic for r in records if r.moesaic}),
    )
    return printable(page)


def _shared(records: Sequence[Record]) -> list[Section]:
    """Return what compares several runs: their frontiers and a table."""
    plots = frontiers(records)
    compared: list[Block] = [tables.overview(records)]
    return [*([Section(SECTION, [*plots])] if plots else []), Section("Runs", compared)]


def _groups(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Return blocks that follow each other and are of one kind together; all plots are one."""
    kinds = groupby(blocks, key=lambda b: "plot" if b.kind in PLOTS else b.kind)
    return [(kind, [*of]) for kind, of in kinds]


def _half(section: Section) -> bool:
    """Return True if there is room for a section beside another one on a wide screen."""
    plots = [block for block in section.blocks if block.kind in PLOTS]
    found = [block for block in section.blocks if isinstance(block, Table)]
    tables_fit = all(t.kind == "table" and len(t.columns) <= 4 for t in found)
    plots_fit = all(plot.kind != "points" for plot in plots) and len(plots) <= 1
    return bool(plots or found) and tables_fit and plots_fit


def frontier_picture(records: Sequence[Record]) -> str:
    """Return the frontiers of runs as one SVG, which brings its colours and its ground.

    Empty where fewer than three models were measured.
    """
    plots = frontiers(records)
    if not plots:
        return ""
    body, top, edge, width = [], 20.0, 24.0, 728
    for plot in plots:
        drawn, _, height = draw.points(plot, width - 2 * edge)
        body.append(draw.text(edge, top + 14, plot.title, "head"))
        body.append(draw.moved(edge, top + 34, drawn))
        top += height + 50
    for n, record in enumerate(records if len(records) > 1 else (), 1):
        body.append(draw.text(edge, top, f"{n}. {facts.title(record)}", "quiet"))
        top += 18
    style = files("moesaic.report").joinpath("plot.css").read_text("utf-8")
    return printable(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{width}" height="{top:g}" '
        f'viewBox="0 0 {width} {top:g}" role="img"><title>{escape(SECTION)}</title>'
        f"<style>{Markup(style)}</style>"
        f'<rect width="{width}" height="{top:g}" rx="10" class="ground"/>{"".join(body)}</svg>\n'
    )
