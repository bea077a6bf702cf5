"""The report: one HTML file that needs nothing beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from moesaic.errors import MoesaicError, printable
from moesaic.foreign import Values
from moesaic.record import (
    WITHOUT_FIGURES,
    Figure,
    Heat,
    LayerRecord,
    Lines,
    Record,
    Row,
    Series,
)
from moesaic.report import draw, numbers, read, tables, words
from moesaic.report.frontier import SHAPES, frontiers, tried
from moesaic.report.read import by_layer, figure, part

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
    "samples": "texts token by token",
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


def html(records: Sequence[Record], first: Sequence[str] = ()) -> str:
    """One self-contained HTML file about one or more runs.

    Parts that take the most room and say the least are left out of all runs, one after another,
    until the page is smaller than :data:`LARGEST`; it says which.

    Args:
        records: of the runs. What was not measured is left out.
        first: axes of the frontier that are drawn first
            (:func:`moesaic.report.frontier.frontier`).

    Raises:
        MoesaicError: there are no runs.
    """
    if not records:
        raise MoesaicError("A page is about one run at least.")
    without: list[str] = []
    page = _page(records, without, first)
    for name in HEAVY:
        if len(page.encode()) < LARGEST:
            break
        without.append(name)
        page = _page(records, without, first)
    return page


def _page(records: Sequence[Record], without: Sequence[str], first: Sequence[str]) -> str:
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
        frontiers=frontiers(records, first),
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
        "search": _words(record),
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
        "unit": read.unit(record),
        "carved": read.by_projections(record),
        "drawings": drawings(record),
        "figureless": record.format == WITHOUT_FIGURES,
        "renumbered": read.renumbered(record),
        "bars": _bars(record),
        "speed": tables.speed_table(record),
        "interleaved": read.interleaved(record),
        "prompt": prompt,
        "generations": [(name, generated[name]) for name in read.names(generated)],
        "structures": structures,
        "others": others if len(others) <= MANY else [],
        "layers": tables.layer_table(record) if any(x.told for x in record.layers) else None,
        "samples": _samples(record),
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


def _words(record: Record) -> str:
    """Names, words and options of a run, and what became of its layers: it is found by them."""
    options = [f"{k} {v}" for step in record.steps for k, v in _pairs(step.config)]
    forms = dict.fromkeys(layer.told for layer in read.changed(record))
    every = [read.title(record), read.step_labels(record), *options, *forms]
    return " ".join(every).lower().replace(numbers.NBSP, " ")


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
    """Where it was redundant, where tokens went, and how many experts they ran."""
    redundancy = part(record.measured, "redundancy")
    ways = {"whole experts go": "dropped", "each gets narrower": "narrowed"}
    series = [
        Series(name, tuple(sorted((float(k), float(v)) for k, v in part(redundancy, way).items())))
        for name, way in ways.items()
    ]
    if series := [line for line in series if line.points]:
        yield Lines(
            section=SEARCH,
            title="Where it is redundant.",
            caption="KL from the original before any refit, by the share of experts' parameters "
            "that goes, in both ways.",
            series=tuple(series),
            x="share that goes",
            y="KL",
            form=".3f",
            log=False,
        )
    unit, routed = read.unit(record), read.routing(record)
    texts = part(record.measured, "activity")
    means = {name: dict(by_layer(part(texts, name))) for name in texts}
    if layers := sorted({i for counts in means.values() for i in counts}):
        most = float(max(1, read.most_experts(record)))
        rows = [
            Row(str(i), tuple(counts.get(i) for counts in means.values()), most) for i in layers
        ]
        mean = tuple(sum(counts.values()) / max(1, len(counts)) for counts in means.values())
        yield Heat(
            section=f"How many {unit}s tokens run",
            title=f"Active {unit}s.",
            caption=f"Mean number of {unit}s that a token runs, of {most:.0f}, by layer and text.",
            rows=(*rows, Row("mean", mean, most)),
            columns=tuple(means),
            column="text",
            form=".2f",
            written=".1f",
        )
    if not routed:
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


def _samples(record: Record) -> View | None:
    """Sample texts token by token; None where no token was routed.

    An expert is written with as many digits to base 36 as the greatest number needs, by layer; of
    a token that ran none it is the number of experts, the most of all layers.
    """
    count = read.most_experts(record)
    routed = {layer.index: layer.experts for layer in record.layers if layer.experts}
    digits = 1 if count < 36 else math.ceil(math.log(count + 1, 36))
    samples = []
    numbers: list[int] = []
    for sample in record.measured.get("samples") or ():
        experts = {
            i: [j if j < routed.get(i, count) else count for j in chosen]
            for i, chosen in by_layer(sample.get("experts") or {})
        }
        if not experts:
            continue
        numbers = numbers or list(experts)
        first = experts.get(numbers[0]) or []
        pairs = zip(sample.get("tokens") or (), first, strict=False)
        coded = ("".join(_base36(j, digits) for j in experts.get(i, ())) for i in numbers)
        samples.append(
            {
                "domain": sample.get("domain", ""),
                "tokens": [(visible(token), petal) for token, petal in pairs],
                "experts": " ".join(coded),
            }
        )
    if not samples:
        return None
    several = any(layer.top_k != 1 for layer in record.layers if layer.experts)
    return {
        "layers": numbers,
        "texts": samples,
        "petals": count,
        "several": several,
        "digits": digits,
    }


def _base36(number: int, digits: int) -> str:
    """A number as JavaScript's ``parseInt(text, 36)`` reads it.

    >>> _base36(7, 1), _base36(35, 1), _base36(75, 2)
    ('7', 'z', '23')
    """
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyz"
    return "".join(alphabet[number // 36**k % 36] for k in reversed(range(digits)))


def visible(token: str) -> Markup:
    """A token's text, its newlines and tabs marked but kept.

    >>> visible("<b>\\n")
    Markup('&lt;b&gt;<i class="nl">\\n</i>')
    """
    escaped = str(escape(token)).replace("\r", "")
    marked = escaped.replace("\n", '<i class="nl">\n</i>').replace("\t", '<i class="tab">\t</i>')
    return Markup(marked)


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
