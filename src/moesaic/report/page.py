"""The report: one HTML file that needs nothing beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from moesaic.report import charts, dynamic, figures, mixtures, read, words
from moesaic.report.lines import lines
from moesaic.report.read import Record, by_layer, figure, part

EXPLAINED = {
    "more": "backbone and petals by MoRE, without training, in all layers",
    "static": "pruned to the most important channels, the same for every token",
    "backbone": "the result’s backbone without its petals",
    "random": "the result’s petals, chosen by random directions",
    "naive": "petals alone, without a shared backbone",
    "top-k": "the same blocks, a fixed number of them for every token, trained as long",
    "no-straight-through": "trained as long, gates below the threshold without a gradient",
    "no-piecewise": "trained as long, the threshold left out until then",
}
WHOSE = {"carve": "the original’s", "tune": "the"}
"""Of whose projections the active ratio is the share; of each model's own otherwise."""
ABOUT = ("config", "calibration", "evaluation", "environment")


@cache
def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("moesaic.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("template.html")


def html(records: Sequence[Mapping[str, Any]]) -> str:
    """One self-contained HTML file about one or more runs.

    Args:
        records: what ``result.json`` holds. Parts that a record has not are left out.
    """
    runs = [_view(record, f"run-{n}") for n, record in enumerate(records, 1)]
    most = max((read.petals(record) for record in records), default=0)
    page: str = _template().render(
        runs=runs,
        title=runs[0]["title"] if len(runs) == 1 else f"{len(runs)} runs beside each other",
        overview=_overview(records) if len(runs) > 1 else None,
        trades=_trades(records) if len(runs) > 1 else [],
        colours=charts.colours(most),
        versions=sorted({str(r["moesaic"]) for r in records if r.get("moesaic")}),
    )
    return page


# --- one run -------------------------------------------------------------------------------------


def _view(record: Record, anchor: str) -> dict[str, Any]:
    """Everything that the template shows of one run, ready to be written."""
    scores, unit = part(record, "scores"), read.unit(record)
    what, ratio = read.compared_ratio(record)
    models = [
        (name, figure(scores, name, "perplexity"), ratio(name)) for name in read.names(scores)
    ]
    routing = [(i, r) for i, r in by_layer(part(record, "routing")) if r.get("share")]
    layers = by_layer(part(record, "layers"))
    covered = [(i, layer) for i, layer in layers if layer.get("never_activated")]
    generated = dict(part(record, "generation"))
    prompt = generated.pop("prompt", None)
    return {
        "anchor": anchor,
        "title": read.title(record),
        "model": read.model_name(record),
        "subtitle": _subtitle(record),
        "summary": _ledger(record),
        "tiles": _tiles(record),
        "scores": read.score_table(record),
        "explained": _explained(record),
        "whose": WHOSE.get(read.family(record), "each model’s own"),
        "unit": unit,
        "carved": read.family(record) == "carve",
        "mixtures": [*mixtures.drawings(record), *dynamic.drawings(record)],
        "renumbered": read.family(record) == "prune",
        "bars": charts.perplexity_bars(models, what) if len(models) > 1 else "",
        "speed": read.speed_table(record),
        "prompt": prompt,
        "generations": [(name, generated[name]) for name in read.names(generated)],
        "structures": _structures(layers),
        "heat": charts.heat_map(routing, unit) if routing else "",
        "routed_tokens": figures.count(figure(scores, "result", "tokens")),
        "coverage": _coverage(covered),
        "spectra": [
            charts.spectrum(i, layer["activation_mass"])
            for i, layer in layers
            if len(layer.get("activation_mass") or ()) > 1
        ],
        "samples": _samples(record),
        "about": _about(record),
    }


def _coverage(layers: Sequence[tuple[int, Any]]) -> Markup | str:
    """The share of channels that were never activated, by layer, for each activation ratio."""
    ratios = sorted({k for _, layer in layers for k in layer["never_activated"]}, key=float)
    series = []
    for ratio in ratios:
        known = ((i, layer["never_activated"].get(ratio)) for i, layer in layers)
        points = [(float(i), 100 * share) for i, share in known if share is not None]
        series.append((f"top {100 * float(ratio):g}{figures.NBSP}%", points))
    return lines(series, "percent", "layer", form="{:.1f} %".format, log=False)


def _explained(record: Record) -> list[tuple[str, str]]:
    """What the compared models are."""
    scores, kind = part(record, "scores"), read.family(record)
    if kind == "carve":
        return [(name, EXPLAINED[name]) for name in scores if name in EXPLAINED]
    if kind == "condense":
        numbered = sorted(int(name) for name in scores if name.isdecimal())
        told = "that many of the result’s layers, the first chosen, condensed"
        return [(figures.plain(numbered), told)] if numbered else []
    others = [n for n in read.names(scores) if n not in ("original", "result")]
    if kind == "prune":
        named = ((name, read.CRITERIA.get(name, name)) for name in others)
        return [(name, f"as many experts, chosen by {told}") for name, told in named]
    return []


def _subtitle(record: Record) -> str:
    method, ratio = read.method_name(record), read.active_ratio(record)
    layers = [i for i, _ in read.listed(record.get("layers"))]
    chosen, kind = read.chosen_layers(record), read.family(record)
    where = f"layers {figures.ranges(layers)}" if layers else ""
    parts = {
        "carve": (
            f"carved with {method}" if method else "",
            f"{figures.percent(ratio, 1)} of the projections active" if ratio is not None else "",
            where,
        ),
        "prune": (f"pruned with {method}" if method else "pruned", read.kept_experts(record)),
        "skip": (
            f"{read.skipped_calls(record) or 'some'} of expert calls skipped",
            method,
        ),
        "condense": (
            method,
            read.condensed_layers(record),
            f"in this order: {figures.plain(chosen)}" if len(chosen) > 1 else "",
        ),
        "tune": (),
    }[kind]
    trained = read.trained(record)
    then = f"{'trained' if kind == 'tune' else 'then trained'}: {trained}" if trained else ""
    return " · ".join(p for p in (*parts, then) if p)


def _tiles(record: Record) -> list[tuple[str, str, bool]]:
    """The figures to see first: large, what it is, whether it is against the result."""
    scores, tiles = part(record, "scores"), []
    ours, theirs = (figure(scores, name, "perplexity") for name in ("result", "original"))
    if ours is not None:
        before = "" if theirs is None else f"{figures.perplexity(theirs)} → "
        tiles.append((before + figures.perplexity(ours), "perplexity", False))
    active, dense = (figure(scores, n, "active_parameters") for n in ("result", "original"))
    if active and dense and active / dense < words.ALL:
        tiles.append((figures.percent(active / dense), "of the parameters per token", False))
    stored = read.stored_ratio(record)
    if stored is not None and stored < words.ALL:
        tiles.append((figures.percent(stored), "of the parameters stored", False))
    for what in ("prefill", "decode"):
        cell = read.ratio_cell(figure(record, "speed_ratio", what))
        if cell.note:
            tiles.append((cell.text, f"{what} speed, {cell.note}", cell.slow))
    return tiles


def _structures(layers: Sequence[tuple[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """How FFNs were cut: one bar for all layers that were cut alike."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, layer in layers:
        if layer.get("width") and layer.get("kind") != "overlapping":
            petals = tuple(layer.get("petals") or ())
            tau = part(layer, "gate").get("tau")
            key = (layer["width"], layer.get("backbone") or 0, petals, layer.get("top_k") or 0, tau)
            alike.setdefault(key, []).append(i)
    structures = []
    for (width, backbone, petals, top_k, tau), numbers in alike.items():
        dropped = width - backbone - sum(petals)
        pieces = [("backbone", backbone)] + [(f"petal p{j}", p) for j, p in enumerate(petals)]
        sizes = figures.ranges(sorted({*petals}))
        told = f"every token runs the same {backbone:,}"
        if petals:
            told = f"every token runs a backbone of {backbone:,}" if backbone else ""
            chosen = f"{top_k} of {len(petals)} petals of {sizes}"
            if tau is not None:
                chosen = f"those of {len(petals)} blocks of {sizes} whose gate is above {tau:g}"
            told = f"{told} and {chosen}" if told else f"every token runs {chosen}"
        if dropped > 0:
            pieces.append(("dropped", dropped))
            told += f"; {dropped:,} are gone"
        structures.append(
            {
                "layers": figures.ranges(numbers),
                "many": len(numbers) > 1,
                "told": f"of {width:,} neurons, {told}.",
                "pieces": [(kind, 100 * size / width, size) for kind, size in pieces if size],
            }
        )
    return structures


def _samples(record: Record) -> dict[str, Any] | None:
    """Sample texts token by token; None where no token was routed."""
    samples = []
    layers: list[int] = []
    for sample in record.get("samples") or ():
        experts = dict(by_layer(sample.get("experts") or {}))
        if not experts:
            continue
        layers = layers or list(experts)
        first = experts.get(layers[0]) or []
        pairs = zip(sample.get("tokens") or (), first, strict=False)
        samples.append(
            {
                "domain": sample.get("domain", ""),
                "tokens": [(visible(token), petal) for token, petal in pairs],
                "experts": json.dumps(experts, separators=(",", ":")),
            }
        )
    if not samples:
        return None
    return {"layers": layers, "texts": samples, "petals": read.petals(record)}


def visible(token: str) -> Markup:
    """A token's text, its newlines and tabs marked but kept.

    >>> visible("<b>\\n")
    Markup('&lt;b&gt;<i class="nl">\\n</i>')
    """
    whole = str(escape(token)).replace("\r", "")
    marked = whole.replace("\n", '<i class="nl">\n</i>').replace("\t", '<i class="tab">\t</i>')
    return Markup(marked)


def _ledger(record: Record) -> list[tuple[str, list[str]]]:
    """The statements of the summary, for and against the result."""
    said = words.summary(record)
    sides = (("What it brings", False), ("What it costs", True))
    ledger = [
        (head, [s.text.replace("'", "’") for s in said if s.against is side])
        for head, side in sides
    ]
    return [(head, texts) for head, texts in ledger if texts]


def _about(record: Record) -> list[tuple[str, list[tuple[str, str]]]]:
    """Options and machine, as they are in the record."""
    about = {name: dict(part(record, name)) for name in ABOUT if part(record, name)}
    if about.get("calibration", {}).get("source") == "":
        about["calibration"]["source"] = "shipped"
    return [(name, read.pairs(values)) for name, values in about.items()]


# --- several runs --------------------------------------------------------------------------------


def _overview(records: Sequence[Record]) -> dict[str, Any]:
    """The runs as rows; columns that no run has a figure for are left out."""
    columns = [
        "active",
        "stored",
        "experts",
        "original",
        "result",
        "static",
        "parameters",
        "prefill",
    ]
    columns.append("decode")
    mixed = any(read.family(record) != "carve" for record in records)
    rows = []
    for n, record in enumerate(records, 1):
        scores = part(record, "scores")
        experts, top_k = figure(record, "config", "experts"), figure(record, "config", "top_k")
        carved = read.family(record) == "carve"
        routed = carved and read.petals(record) and experts is not None
        chosen = f"{figures.plain(top_k)} of {figures.plain(experts)}"
        perplexities = [
            read.Cell(figures.perplexity(figure(scores, name, "perplexity")))
            for name in ("original", "result", "static")
        ]
        cells = [
            read.Cell(figures.percent(read.active_ratio(record), 1)),
            read.Cell(figures.percent(read.stored_ratio(record), 1) if mixed else figures.NONE),
            read.Cell(chosen if routed else figures.NONE),
            *perplexities,
            read.Cell(figures.count(figure(scores, "result", "active_parameters"))),
            read.ratio_cell(figure(record, "speed_ratio", "prefill")),
            read.ratio_cell(figure(record, "speed_ratio", "decode")),
        ]
        rows.append((f"run-{n}", read.model_name(record), read.made(record), cells))
    kept = [j for j in range(len(columns)) if any(row[3][j].text != figures.NONE for row in rows)]
    return {
        "columns": [columns[j] for j in kept],
        "rows": [(*row[:3], [row[3][j] for j in kept]) for row in rows],
    }


def _trades(records: Sequence[Record]) -> list[Markup]:
    """Perplexity over what was saved: active parameters of dense models, else stored ones."""
    dense = [r for r in records if read.family(r) == "carve"]
    mixtures = [r for r in records if read.family(r) in ("prune", "condense")]
    drawn = []
    if groups := _groups(dense, lambda r, name: figure(r, "scores", name, "active_ratio")):
        drawn.append(charts.trade(groups))
    if groups := _groups(mixtures, read.stored_ratio):
        drawn.append(charts.trade(groups, "parameters stored, of the original", "stored"))
    return drawn


def _groups(
    records: Sequence[Record], ratio: Callable[[Record, str], float | None]
) -> dict[str, list[charts.Point]]:
    """The points of everything that was scored, by model."""
    groups: dict[str, list[charts.Point]] = {}
    for record in records:
        model, kinds = read.model_name(record), read.family(record)
        model += "" if kinds == "carve" else f", {read.DONE[kinds]}"
        scores = part(record, "scores")
        for name in read.names(scores):
            x, y = ratio(record, name), figure(scores, name, "perplexity")
            if x is None or y is None or not math.isfinite(y) or y <= 0:
                continue
            variant = part(record, "config").get("variant") or "full"
            kind = name if name != "result" or variant == "full" else str(variant)
            told = f"{model}, {kind}"
            if kinds == "condense" and name == "0":  # the original again
                continue
            if kinds == "condense" and name.isdecimal():  # a smaller result
                kind, told = "result", f"{model}, {name} layers"
            point = (kind, told, x, y)
            group = groups.setdefault(model, [])
            if point not in group:
                group.append(point)
    return groups
