"""The drawings of a run: those that suit its steps, and those of what any step may bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from moesaic.record import Record, Step
from moesaic.report import figures, gated, learned, mixtures
from moesaic.report.lines import lines
from moesaic.report.read import figure, trainings
from moesaic.report.tried import tried

Figure = tuple[str, str, Markup]
"""A caption in a few words, how to read the drawing, the drawing."""
Draw = Callable[[Record, Step], Sequence[Figure | None]]
OF_STEPS: dict[str, tuple[str, Draw]] = {
    "learned": ("What was learned", learned.drawings),
    "gated": ("How many blocks tokens run", gated.drawings),
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
