"""The report: one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from moesaic.errors import MoesaicError, printable
from moesaic.record import (
    Figure,
    Heat,
    LayerRecord,
    Record,
    Row,
)
from moesaic.report import draw, numbers, read, tables, words
from moesaic.report.frontier import SHAPES, frontiers, tried
from moesaic.report.read import figure, part
from moesaic.types import Values

View = dict[str, object]
"""Values for the template, by the names that it uses."""
Drawing = tuple[str, str, Markup]
"""A caption in a few words, how to read the drawing, the drawing."""
SEARCH = "The search"
"""The heading of what came before a recipe was found."""
MANY = 6
"""Layers told apart beyond this number are only in the table of layers."""
LARGEST = 1_000_000
"""Bytes of a page."""
HEAVY = {
    "drawings": "drawings of layers",
    "layers": "tables of layers",
}
"""Parts of a run that a page of many runs can do without, by their names in the template."""


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("moesaic.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("template.html")


def html(records: Sequence[Record]) -> str:
    """One self-contained HTML file about one or more runs.

    Parts that take the most room and say the least are left out of all runs, one after another,
    until the page is smaller than :data:`LARGEST`; it says which.

    Args:
        records: of the runs. What was not measured is left out.

    Raises:
        MoesaicError: there are no runs.
    """
    if not records:
        raise MoesaicError("A page is about one run at least.")
    without: list[str] = []
    page = _page(records, without)
    for name in HEAVY:
        if len(page.encode()) < LARGEST:
            break
        without.append(name)
        page = _page(records, without)
    return page


def _page(records: Sequence[Record], without: Sequence[str]) -> str:
    """The page without some of the parts in :data:`HEAVY`."""
    several = len(records) > 1
    runs = [_view(record, n) | dict.fromkeys(without) for n, record in enumerate(records, 1)]
    models = dict.fromkeys(read.model_name(record) for record in records)
    originals = f"{len(models)} models" if len(models) > 2 else " and ".join(models)
    most = max((read.most_experts(record) for record in records), default=0)
    page = _template().render(
        runs=runs,
        title=f"{len(runs)} runs of {originals}" if several else runs[0]["title"],
        several=several,
        overview=tables.overview(records) if several else None,
        strip=_strip(records) if several else "",
        frontiers=frontiers(records),
        shapes=SHAPES,
        colours=draw.colours(most),
        left_out=[HEAVY[name] for name in without],
        versions=sorted({r.moesaic for r in records if r.moesaic}),
    )
    return printable(page)


# --- one run -------------------------------------------------------------------------------------


def _view(record: Record, number: int) -> View:
    """Everything that the template shows of one run, ready to be written."""
    generated = dict(part(record.measured, "generation"))
    prompt = generated.pop("prompt", None)
    structures, others = _structures(read.changed(record))
    return {
        "number": number,
        "title": read.title(record),
        "model": read.model_name(record),
        "subtitle": _subtitle(record),
        "made": read.step_labels(record),
        "outcome": words.outcome(record),
        "tiles": words.changes(record),
        "warnings": read.warnings(record)[1],
        "summary": words.summary(record),
        "told": [*words.step_paragraphs(record), words.weights(record)] if record.steps else [],
        "scores": tables.score_table(record),
        "texts": tables.text_table(record),
        "tasks": tables.task_table(record),
        "loops": tables.loop_table(record),
        "explained": _explained(record),
        "carved": read.by_projections(record),
        "drawings": drawings(record),
        "bars": _bars(record),
        "speed": tables.speed_table(record),
        "interleaved": read.interleaved(record),
        "prompt": prompt,
        "generations": [(name, generated[name]) for name in read.names(generated)],
        "structures": structures,
        "others": others if len(others) <= MANY else [],
        "layers": tables.layer_table(record) if any(x.told for x in record.layers) else None,
        "about": _about(record),
    }


def _bars(record: Record) -> Markup | str:
    """Perplexity of original, result and comparisons; nothing without comparisons."""
    models, ratio = read.models(record)
    if len(models) < 3:
        return ""
    head = [
        draw.text(76, 11, "perplexity, lower is better", "quiet"),
        draw.text(340, 11, ratio, "quiet", "end"),
    ]
    body, width, height = draw.perplexities(models, 340, 30, 76)
    label = "Perplexity of each model"
    return draw.svg([*head, draw.moved(0, 18, body)], width, height + 20, label)


def _explained(record: Record) -> list[tuple[str, str]]:
    """The compared models in words."""
    variants, compared = read.variants(record), read.comparisons(record)
    rows = [(n, variants[n]) for n in compared if n in variants and not n.isdecimal()]
    sizes = sorted(int(n) for n in compared if n.isdecimal())
    if sizes:
        rows.append((numbers.plain(sizes), "only that many of the layers, the first chosen"))
    return rows


def _subtitle(record: Record) -> str:
    layers = [layer.index for layer in read.changed(record)]
    some = f"layers {numbers.ranges(layers)}" if 0 < len(layers) < len(record.layers) else ""
    return " · ".join(filter(None, (read.done(record), some)))


def _pairs(options: Values) -> list[tuple[str, str]]:
    """Options by name, as text."""
    return [(key.replace("_", " "), numbers.plain(value)) for key, value in options.items()]


# --- layers --------------------------------------------------------------------------------------

Piece = tuple[str, float, int]
"""A kind of neurons, their share in percent, their number."""


def _pieces(layer: LayerRecord) -> tuple[Piece, ...]:
    """The neurons of a dense layer that was cut into pieces, in stored order; else none."""
    if not layer.parts:
        return ()
    kinds = ["backbone", *(f"petal p{j}" for j in range(len(layer.parts) - 1)), "dropped"]
    gone = max(0, (layer.width_before or layer.width) - sum(layer.parts))
    sizes = (*layer.parts, gone)
    total = sum(sizes) or 1
    named = zip(kinds, sizes, strict=True)
    return tuple((kind, 100 * size / total, size) for kind, size in named if size)


def _structures(layers: Sequence[LayerRecord]) -> tuple[list[View], list[View]]:
    """What became of layers, those that became the same together: with a bar, and without."""
    alike: dict[tuple[str, tuple[Piece, ...]], list[int]] = {}
    for layer in layers:
        if layer.told:
            alike.setdefault((layer.told, _pieces(layer)), []).append(layer.index)
    views: list[View] = [
        {
            "layers": f"{'Layers' if len(n) > 1 else 'Layer'} {numbers.ranges(n)}",
            "told": form,
            "pieces": pieces,
        }
        for (form, pieces), n in alike.items()
    ]
    return [s for s in views if s["pieces"]], [s for s in views if not s["pieces"]]


def drawings(record: Record) -> list[tuple[str, list[Drawing]]]:
    """Headings, and the drawings under each: of the steps, and of what any run measures."""
    by_section: dict[str, list[Drawing]] = {}
    figures = [figure for step in record.steps for figure in step.figures]
    for chart in (*figures, *_of_measured(record)):
        drawing = (chart.title, chart.caption, draw.drawn(chart))
        by_section.setdefault(chart.section, []).append(drawing)
    if searched := tried(record):
        by_section.setdefault(SEARCH, []).append(("What was tried.", *searched))
    return list(by_section.items())


def _of_measured(record: Record) -> Iterator[Figure]:
    """Where tokens went."""
    unit = read.unit(record)
    if not read.routing(record):
        return
    total = "the expert calls of the evaluation text"
    if read.by_projections(record):
        tokens = figure(record.measured, "scores", "result", "tokens")
        total = f"{numbers.count(tokens) if tokens else 'the'} routed tokens"
    numbering = ", numbered as in the result" if read.renumbered(record) else ""
    yield read.routes(
        record,
        f"Percent of {total} by layer and {unit}{numbering}. Bars: Jensen–Shannon divergence from "
        "uniform routing, base 2; 0 is even.",
    )


def _strip(records: Sequence[Record]) -> Markup | str:
    """A row a run, a cell a layer, the darker the more is left of it."""
    shares = [{x.index: left(x, read.compared_ratio(r)[0]) for x in r.layers} for r in records]
    layers = sorted({i for run in shares for i, v in run.items() if v is not None})
    if not layers:
        return ""
    rows = [Row(str(n), tuple(run.get(i) for i in layers), 1.0) for n, run in enumerate(shares, 1)]
    figure = Heat(
        section="",
        title="What is left of each layer, by run",
        rows=tuple(row for row in rows if any(v is not None for v in row.values)),
        columns=tuple(map(str, layers)),
        row="run",
        column="layer",
    )
    return draw.svg(*draw.maps(figure, cell=min(28.0, max(7.0, 640 / len(layers)))), figure.title)


def left(layer: LayerRecord, ratio: str) -> float | None:
    """What is left of a layer; None where it is not known.

    Args:
        layer: of the result.
        ratio: where it is ``stored``, neurons are counted that are stored, else those that a token
            runs.

    >>> left(LayerRecord(0, "carved", "", width=100, width_before=100, active_width=80), "active")
    0.8
    >>> six = LayerRecord(0, "pruned", "", width=9, width_before=9, experts=6, experts_before=8)
    >>> left(six, "stored")
    0.75
    """
    if not layer.changed:
        return 1.0
    before = layer.width_before or layer.width
    skipped = figure(layer.analysis, "skipped")
    if skipped is not None:
        return 1.0 - skipped
    experts = layer.experts_before or layer.experts
    if ratio == "stored" and experts and before:
        return min(1.0, max(1, layer.experts) * layer.width / (experts * before))
    return min(1.0, layer.active_width / before) if before and layer.active_width else None


# --- text, options -------------------------------------------------------------------------------


def _about(record: Record) -> list[tuple[str, list[tuple[str, str]]]]:
    """Options of every step, and the machine, as they are in the record."""
    about: dict[str, Values] = {}
    for n, step in enumerate(record.steps, 1):
        head = f"{n}. {step.verb}" if len(record.steps) > 1 else step.verb
        about[head] = {"method": step.method, **step.config}
    calibration = dict(record.calibration)
    if calibration.get("source") == "":
        calibration["source"] = "shipped"
    about["calibration"] = calibration
    about["evaluation"] = part(record.measured, "evaluation")
    about["environment"] = record.environment
    return [(name, _pairs(values)) for name, values in about.items() if values]
