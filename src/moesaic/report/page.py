"""The report: one HTML file that needs nothing beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from moesaic.foreign import Values
from moesaic.record import LayerRecord, Record
from moesaic.report import charts, figures, layers, read, words
from moesaic.report.drawings import drawings
from moesaic.report.frontier import SHAPES, frontiers
from moesaic.report.read import by_layer, figure, part
from moesaic.report.runs import overview

View = dict[str, object]
"""Values for the template, by the names that it uses."""
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
    """
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
    of = f"{len(models)} models" if len(models) > 3 else ", ".join(models)
    most = max((read.most_experts(record) for record in records), default=0)
    page: str = _template().render(
        runs=runs,
        title=f"{len(runs)} runs of {of}" if several else runs[0]["title"],
        several=several,
        overview=overview(records) if several else None,
        strip=layers.strip(records) if several else "",
        frontiers=frontiers(records, first),
        shapes=SHAPES,
        colours=charts.colours(most),
        left_out=[HEAVY[name] for name in without],
        versions=sorted({r.moesaic for r in records if r.moesaic}),
    )
    return page


# --- one run -------------------------------------------------------------------------------------


def _view(record: Record, number: int) -> View:
    """Everything that the template shows of one run, ready to be written."""
    scores, unit = part(record.measured, "scores"), read.unit(record)
    what, ratio = read.compared_ratio(record)
    models = [
        (name, figure(scores, name, "perplexity"), ratio(name)) for name in read.names(scores)
    ]
    generated = dict(part(record.measured, "generation"))
    prompt = generated.pop("prompt", None)
    carved = read.kind(record) in read.CARVED
    structures, others = _structures(read.changed(record))
    return {
        "number": number,
        "title": read.title(record),
        "model": read.model_name(record),
        "subtitle": _subtitle(record),
        "outcome": words.outcome(record),
        "tiles": words.changes(record),
        "warnings": read.warnings(record)[1],
        "summary": words.summary(record),
        "told": [*words.told(record), words.weights(record)] if record.steps else [],
        "scores": read.score_table(record),
        "tasks": read.task_table(record),
        "loops": read.loop_table(record),
        "explained": _explained(record),
        "unit": unit,
        "carved": carved,
        "drawings": drawings(record),
        "renumbered": any("kept" in layer.shape for layer in record.layers),
        "bars": charts.perplexity_bars(models, what) if len(models) > 2 else "",
        "speed": read.speed_table(record),
        "interleaved": read.interleaved(record),
        "prompt": prompt,
        "generations": [(name, generated[name]) for name in read.names(generated)],
        "structures": structures,
        "others": others if len(others) <= MANY else [],
        "layers": layers.layer_table(record) if any(x.told for x in record.layers) else None,
        "samples": _samples(record),
        "about": _about(record),
    }


def _explained(record: Record) -> list[tuple[str, str]]:
    """The compared models in words."""
    known, compared = read.variants(record), read.comparisons(record)
    told = [(n, known[n]) for n in compared if n in known and not n.isdecimal()]
    sizes = sorted(int(n) for n in compared if n.isdecimal())
    if sizes:
        told.append((figures.plain(sizes), "only that many of the layers, the first chosen"))
    return told


def _subtitle(record: Record) -> str:
    layers = [layer.index for layer in read.changed(record)]
    some = layers and len(layers) < len(record.layers)
    parts = [read.done(record), f"layers {figures.ranges(layers)}" if some else ""]
    chosen = [read.order(s) for s in record.steps if s.kind == "condensed"]
    parts += [f"in this order: {figures.plain(order)}" for order in chosen if len(order) > 1]
    return " · ".join(p for p in parts if p)


Piece = tuple[str, float, int]
"""A kind of neurons, their share in percent, their number."""


def _pieces(layer: LayerRecord) -> tuple[Piece, ...]:
    """The neurons of a dense layer that was split or narrowed, in stored order; else none."""
    every = layer.shape.get("backbone", None if layer.experts else layer.shape.get("neurons"))
    if every is None:
        return ()
    petals = layer.shape.get("petals") or ()
    sizes = [("backbone", every)]
    sizes += [(f"petal p{j}", size) for j, size in enumerate(petals)]
    stays = sum(size for _, size in sizes)
    sizes.append(("dropped", max(0, (layer.width_before or layer.width) - stays)))
    whole = sum(size for _, size in sizes) or 1
    return tuple((kind, 100 * size / whole, size) for kind, size in sizes if size)


def _structures(layers: Sequence[LayerRecord]) -> tuple[list[View], list[View]]:
    """What became of layers, those that became the same together: with a bar, and without."""
    alike: dict[tuple[str, tuple[Piece, ...]], list[int]] = {}
    for layer in layers:
        if layer.told:
            alike.setdefault((layer.told, _pieces(layer)), []).append(layer.index)
    found: list[View] = [
        {
            "layers": f"{'Layers' if len(numbers) > 1 else 'Layer'} {figures.ranges(numbers)}",
            "told": told,
            "pieces": pieces,
        }
        for (told, pieces), numbers in alike.items()
    ]
    return [s for s in found if s["pieces"]], [s for s in found if not s["pieces"]]


def _samples(record: Record) -> View | None:
    """Sample texts token by token; None where no token was routed.

    An expert is written with as many digits to base 36 as the greatest number needs, by layer.
    """
    count = read.most_experts(record)
    digits = 1 if count <= 36 else math.ceil(math.log(count, 36))
    samples = []
    numbers: list[int] = []
    for sample in record.measured.get("samples") or ():
        experts = dict(by_layer(sample.get("experts") or {}))
        if not experts:
            continue
        numbers = numbers or list(experts)
        first = experts.get(numbers[0]) or []
        pairs = zip(sample.get("tokens") or (), first, strict=False)
        coded = ("".join(base36(j, digits) for j in experts.get(i, ())) for i in numbers)
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


def base36(number: int, digits: int) -> str:
    """A number as JavaScript's ``parseInt(text, 36)`` reads it.

    >>> base36(7, 1), base36(35, 1), base36(75, 2)
    ('7', 'z', '23')
    """
    known = "0123456789abcdefghijklmnopqrstuvwxyz"
    return "".join(known[number // 36**k % 36] for k in reversed(range(digits)))


def visible(token: str) -> Markup:
    """A token's text, its newlines and tabs marked but kept.

    >>> visible("<b>\\n")
    Markup('&lt;b&gt;<i class="nl">\\n</i>')
    """
    whole = str(escape(token)).replace("\r", "")
    marked = whole.replace("\n", '<i class="nl">\n</i>').replace("\t", '<i class="tab">\t</i>')
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
    return [(name, read.pairs(values)) for name, values in about.items() if values]
