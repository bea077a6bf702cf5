"""The drawings of a run: those that suit its steps, and those of what any step may bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from moesaic.record import Record, Step
from moesaic.report import figures, learned, mixtures, read
from moesaic.report.charts import Figure, svg
from moesaic.report.lines import lines
from moesaic.report.maps import Cell, Row, heat_map
from moesaic.report.picture import routes
from moesaic.report.read import figure, part, trainings
from moesaic.report.tried import tried

Draw = Callable[[Record, Step], Sequence[Figure | None]]
OF_STEPS: dict[str, tuple[str, Draw]] = {
    "learned": ("What was learned", learned.learned),
    "gated": ("How many blocks tokens run", learned.gated),
    "experts": ("Which experts stay", mixtures.kept),
    "slimmed": ("How narrow experts become", mixtures.slimmed),
    "skipping": ("What is skipped", mixtures.skipped),
    "fewer": ("How many experts tokens run", mixtures.fewer),
    "condensed": ("Which layers were condensed", mixtures.condensed),
}
"""By :attr:`moesaic.record.Step.kind`; a kind without drawings of its own is not here."""


def drawings(record: Record) -> list[tuple[str, list[Figure]]]:
    """Headings, and the drawings under each; a heading without a drawing is left out."""
    found: dict[str, list[Figure | None]] = {}
    for step in record.steps:
        if step.kind in OF_STEPS:
            head, draw = OF_STEPS[step.kind]
            found[head] = list(draw(record, step))
    found["The search"] = [tried(record)]
    found["What the refit gives back"] = [_refitted(record)]
    found["Training"] = _training(record)
    found["Layer by layer"] = [_routes(record), _coverage(record), _spectra(record)]
    whole = {head: [f for f in drawn if f is not None and f[2]] for head, drawn in found.items()}
    return [(head, drawn) for head, drawn in whole.items() if drawn]


def _refitted(record: Record) -> Figure:
    """The error of each layer's output before and after its down projections were refitted."""
    before, after = [], []
    for layer in record.layers:
        lost, recovered = (figure(layer.analysis, "refit", k) for k in ("lost", "recovered"))
        if lost is not None and recovered is not None:
            before.append((float(layer.index), 100 * lost))
            after.append((float(layer.index), 100 * lost * (1 - recovered)))
    told = (
        "Squared error of a layer’s output on the calibration text, percent of the output’s own "
        "square, before its down projections were refitted and after; where some tokens were held "
        "out of the fit, on those."
    )
    series = [("before", before), ("after", after)]
    drawn = lines(series, "percent", "layer", strong="after", form="{:.2g} %".format)
    return "Error by layer.", told, Markup(drawn)


def _training(record: Record) -> list[Figure | None]:
    """Every figure that training logged, by step; one that never changes is only said."""
    found: list[Figure | None] = []
    for _, training in trainings(record):
        logs = training.get("losses") or ()
        labels = training.get("labels") or {}
        drawn, constant = [], []
        for name in dict.fromkeys(key for log in logs for key in log if key != "step"):
            known = [(figure(log, "step"), figure(log, name)) for log in logs]
            points = [(x, y) for x, y in known if x is not None and y is not None]
            label = str(labels.get(name, name.replace("_", " ")))
            if len(points) > 1 and len({y for _, y in points}) == 1:
                constant.append(f"{label} {figures.plain(points[0][1])}")
            elif points:
                drawn.append(lines([("", points)], label, "step", log=False))
        told = [f"Of the batch of each step. Trained: {training.get('what') or 'weights'}."]
        share, whole = (figure(training, f"{k}_parameters") for k in ("trained", "total"))
        if share:
            of = f" of {figures.count(whole)}" if whole else ""
            told.append(f"{figures.count(share)}{of} parameters.")
        told += [f"Constant: {', '.join(constant)}."] if constant else []
        curves = Markup('<div class="curves">{}</div>').format(Markup("").join(drawn))
        if drawn:
            found.append(("Training by step.", " ".join(told), curves))
    return found


def _routes(record: Record) -> Figure | None:
    """Where tokens went."""
    routed, unit = read.routing(record), read.unit(record)
    if not routed:
        return None
    of = "the expert calls of the evaluation text"
    if read.kind(record) in read.CARVED:
        tokens = figure(record.measured, "scores", "result", "tokens")
        of = f"{figures.count(tokens) if tokens else 'the'} routed tokens"
    kept = any("kept" in layer.shape for layer in record.layers)
    told = (
        f"Percent of {of} by layer and {unit}{', numbered as in the result' if kept else ''}. "
        "Bars: Jensen–Shannon divergence from uniform routing, base 2; 0 is even."
    )
    body, width, height = routes(routed, unit)
    return "Where tokens went.", told, svg(width, height, body, f"Share of tokens by {unit}")


def _coverage(record: Record) -> Figure | None:
    """The share of channels that were never activated, by layer, for each activation ratio."""
    seen = [(layer.index, part(layer.analysis, "never_activated")) for layer in record.layers]
    series = []
    for ratio in sorted({k for _, of in seen for k in of}, key=float):
        points = [(float(i), 100 * of[ratio]) for i, of in seen if of.get(ratio) is not None]
        series.append((f"top {100 * float(ratio):g}{figures.NBSP}%", points))
    told = (
        "Percent of a layer’s channels that were not among a token’s strongest for any "
        "calibration token."
    )
    drawn = lines(series, "percent", "layer", form="{:.1f} %".format, log=False)
    return "Channels never activated.", told, Markup(drawn)


def _spectra(record: Record) -> Figure | None:
    """How much of a layer's activation its strongest channels have."""
    seen = [(layer.index, layer.analysis.get("activation_mass") or ()) for layer in record.layers]
    known = [(i, mass) for i, mass in seen if len(mass) > 1]
    if not known:
        return None
    points = max(len(mass) for _, mass in known)
    columns = [figures.percent(k / (points - 1)) for k in range(1, points)]
    rows = [
        Row(
            i,
            [
                Cell(m, f"layer {i}, top {share}: {figures.percent(m)}")
                for share, m in zip(columns, mass[1:], strict=False)
            ],
            f"layer {i}",
        )
        for i, mass in known
    ]
    told = "The share of a layer’s activation that its strongest channels have, summed up."
    drawn = heat_map(rows, columns, "Activation by share of the channels", "strongest channels")
    return "Activation spectrum.", told, drawn
