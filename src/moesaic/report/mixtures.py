"""Drawings of what was done, by what was done: prune, skip, condense, tune, carve by learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from moesaic.report import figures, learned, read
from moesaic.report.lines import lines
from moesaic.report.maps import Experts, expert_map, rounds, rows
from moesaic.report.read import Record, figure, listed, part

Figure = tuple[str, str, Markup]
"""What it shows, how to read it, the drawing."""
SHADES = "The darker an expert, the more of its layer’s calls on the calibration text it had."
VARIANTS = {
    "shared": "shared",
    "shared+routed": "shared+routed",
    "attention": "no FFN block",
    "nothing": "no layer",
}
RULES = {
    "top2": "A token’s second expert is left out where it weighs less than beta times the first.",
    "tail": "A token’s last experts are left out while together they weigh less than beta times "
    "all of them.",
}


def drawings(record: Record) -> list[tuple[str, list[Figure]]]:
    """Headings, and the drawings under each; what the record has not is left out."""
    of: dict[str, tuple[str, Callable[[Record], Sequence[Figure | None]]]] = {
        "carve": ("What was learned", learned.drawings),
        "prune": ("Which experts stay", _pruned),
        "skip": ("What is skipped", _skipped),
        "condense": ("Which layers were condensed", _condensed),
    }
    found = []
    head, draw = of.get(read.family(record), ("", lambda _: ()))
    found.append((head, [f for f in draw(record) if f is not None and f[2]]))
    found.append(("What the refit gives back", [f for f in _refitted(record) if f[2]]))
    found.append(("Training", [f for f in _tuned(record) if f[2]]))
    return [(head, drawn) for head, drawn in found if drawn]


def _numbers(values: Any) -> list[float]:
    """A list of numbers; empty if anything else is in it."""
    if not isinstance(values, list | tuple):
        return []
    return [] if any(not isinstance(v, int | float) for v in values) else list(values)


def _refitted(record: Record) -> list[Figure]:
    """Of any verb: the error of each layer's output before and after."""
    before, after = [], []
    for i, d in listed(record.get("layers")):
        lost, recovered = figure(d, "refit", "lost"), figure(d, "refit", "recovered")
        if lost is not None and recovered is not None:
            before.append((float(i), 100 * lost))
            after.append((float(i), 100 * lost * (1 - recovered)))
    told = (
        "Squared error of a layer’s output on the calibration text, percent of the output’s own "
        "square, before its down projections were refitted and after; of carved and condensed "
        "layers, as tokens that were held out have it."
    )
    series = [("before", before), ("after", after)]
    drawn = lines(series, "percent", "layer", strong="after", form="{:.2g} %".format)
    return [("Error by layer.", told, Markup(drawn))]


# --- prune ---------------------------------------------------------------------------------------


def _pruned(record: Record) -> list[Figure | None]:
    layers = []
    for i, d in listed(record.get("layers")):
        calls, kept = _numbers(d.get("calls")), d.get("kept")
        count = int(figure(d, "experts") or len(calls))
        if count and kept is not None:
            layers.append(Experts(i, count, set(kept), calls, loss=figure(d, "relative_loss")))
    if not layers:
        return []
    told = ["Blue experts stay, crossed ones are gone."]
    told += [SHADES] if any(e.calls for e in layers) else []
    lost = any(e.loss is not None for e in layers)
    if lost:
        told.append(_loss_meant(str(part(record, "config").get("criterion") or "")))
    side = "relative loss" if lost else ""
    return [("Experts by layer.", " ".join(told), expert_map(layers, side))]


def _loss_meant(criterion: str) -> str:
    if criterion in ("", "reconstruction"):
        return "Bars: change of the routed output, relative to it."
    if criterion == "pairwise":
        return "Bars: change of the routed output by pairs of experts, relative to it."
    return f"Bars: the dropped experts’ share of the score, {read.CRITERIA.get(criterion)}."


# --- skip ----------------------------------------------------------------------------------------


def _skipped(record: Record) -> list[Figure | None]:
    layers = listed(record.get("layers"))

    def column(key: str) -> dict[int, float]:
        found = {i: figure(d, key) for i, d in layers}
        return {i: v for i, v in found.items() if v is not None}

    betas = record.get("beta")
    beta = column("beta") or {
        i: float(b)
        for i, b in enumerate(betas if isinstance(betas, list | tuple) else ())
        if isinstance(b, int | float)
    }
    columns = [
        ("calls skipped", column("skipped"), lambda v: figures.percent(v, 1)),
        ("beta", beta, lambda v: f"{v:.3f}"),
        ("experts a token runs", column("calls_per_token"), lambda v: f"{v:.2f}"),
    ]
    columns = [c for c in columns if c[1]]
    if not columns:
        return []
    rules = {str(d["rule"]) for _, d in layers if d.get("rule")}
    told = ["On the calibration text.", *(RULES[r] for r in sorted(rules) if r in RULES)]
    return [("Skipping by layer.", " ".join(told), rows(columns))]


# --- condense ------------------------------------------------------------------------------------


def _condensed(record: Record) -> list[Figure | None]:
    return [_chosen(record), _search(record), _divergence(record), _sizes(record)]


def _chosen(record: Record) -> Figure | None:
    order = read.chosen_layers(record)
    keep = part(record, "config").get("keep")
    layers = []
    for i, d in listed(record.get("condensed")):
        calls = _numbers(d.get("calls"))
        count = int(figure(d, "experts") or len(calls))
        if not count:
            continue
        taken = i in order
        kept = set(d.get("chosen") or ()) if taken else None
        how = "dropped" if keep in read.GONE else "condensed"
        note = f"{how}, {_ordinal(order.index(i) + 1)}" if taken else "routes"
        layers.append(Experts(i, count, kept, calls, note))
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


def _search(record: Record) -> Figure | None:
    steps = []
    for _, step in listed(record.get("search")):
        taken = figure(step, "layer")
        losses = {int(j): figure(step, "losses", j) for j in part(step, "losses")}
        if taken is not None:
            steps.append((int(taken), {j: v for j, v in losses.items() if v is not None}))
    if not steps:
        return None
    how = str(part(record, "config").get("layer_search") or "greedy")
    looks = how in ("greedy", "global-rank")
    lighter = "the less condensing it would move the model" if looks else f"the lower by {how}"
    told = f"A row a round, a column a layer: the lighter, {lighter}. The layer taken is outlined."
    return "The order of choice.", told, rounds(steps)


def _divergence(record: Record) -> Figure | None:
    layers = [(i, part(d, "divergence")) for i, d in listed(record.get("condensed"))]
    names = [n for n in VARIANTS if any(n in d for _, d in layers)]
    names += sorted({n for _, d in layers for n in d} - set(names))
    series = []
    for name in names:
        known = [(float(i), figure(d, name)) for i, d in layers]
        series.append((VARIANTS.get(name, name), [(i, v) for i, v in known if v is not None]))
    strong = VARIANTS.get(str(part(record, "config").get("keep")), "")
    metric = "KL" if part(record, "config").get("metric") == "kl" else "Jensen–Shannon"
    drawn = lines(series, f"{metric} divergence", "layer", strong, width=430)
    told = (
        "Of a layer’s output from what it was, were that layer alone replaced by what each "
        "variant leaves of it. Thick: the variant that was used."
    )
    return ("What a layer loses.", told, Markup(drawn)) if drawn else None


def _sizes(record: Record) -> Figure | None:
    scores = part(record, "scores")
    chosen = len(read.chosen_layers(record))
    counts = {"original": 0, "result": chosen} | {n: int(n) for n in scores if n.isdecimal()}
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


# --- tune ----------------------------------------------------------------------------------------


def _tuned(record: Record) -> list[Figure]:
    logs = listed(part(record, "tune").get("losses"))

    def curve(key: str) -> list[tuple[float, float]]:
        found = [(figure(d, "step"), figure(d, key)) for _, d in logs]
        return [(x, y) for x, y in found if x is not None and y is not None]

    what = read.trained(record)
    loss = lines([("", curve("loss"))], "loss", "step", width=520, height=230, log=False)
    rate = lines([("", curve("learning_rate"))], "learning rate", "step", log=False)
    share = figure(record, "tune", "trained_parameters")
    whole = figure(record, "tune", "total_parameters")
    of = f" {figures.count(share)} of {figures.count(whole)} parameters." if share and whole else ""
    return [
        ("Loss by step.", f"Of the batch of each step. Trained: {what}.{of}", Markup(loss)),
        ("Learning rate.", "Of each step.", Markup(rate)),
    ]
