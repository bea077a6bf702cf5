"""What was done, what it cost and what it brought, in plain words made of the record alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.foreign import Values
from moesaic.record import WEIGHTS, Record
from moesaic.report import figures
from moesaic.report.read import (
    compared_ratio,
    comparisons,
    doubt,
    figure,
    kind,
    names,
    pace,
    part,
    trainings,
    variants,
)

AS_WELL = 0.01
"""Perplexities that differ by less than this share are called equally good."""
ALL = 0.995
"""Shares above it are called about as many."""


@dataclass(frozen=True)
class Sentence:
    """One statement, and whether it is against the result."""

    text: str
    against: bool = False


# --- what was done -------------------------------------------------------------------------------

CLAIMS = {
    "own": "All weights that stay are the base model's own; some may be moved, sliced or scaled "
    "by constants.",
    "refitted": "Down projections or output biases differ from the base model's: they were solved "
    "for in closed form on the calibration text.",
    "averaged": "Experts are means over several of the base model's experts.",
    "trained": "Weights differ from the base model's: they were trained.",
}
"""What became of the base model's weights, by the names of :data:`moesaic.record.WEIGHTS`."""


def weights(record: Record) -> str:
    """What became of the base model's weights over all steps, and what was trained."""
    changes = {step.weights for step in record.steps} | {x.weights for x in record.layers}
    changes = changes - {"own"} or {"own"}
    trained = [_trained(training) for _, training in trainings(record)]
    said = [CLAIMS[change] for change in WEIGHTS if change in changes]
    if trained:
        said.append(f"Trained: {'; then '.join(trained)}.")
    elif "trained" not in changes:
        said.append("Nothing was trained.")
    return " ".join(said)


def _trained(training: Values) -> str:
    steps = len(training.get("losses") or ())
    return f"{training.get('what') or 'weights'}{f', {steps:,} steps' if steps else ''}"


def told(record: Record) -> list[str]:
    """A paragraph a step: what it did, by which paper, and what of it is not in that paper."""
    many = len(record.steps) > 1
    found = []
    for n, step in enumerate(record.steps, 1):
        said = [f"{n}. {step.told}" if many else step.told]
        said += [f"Method: {step.paper.rstrip('.')}."] if step.paper else []
        if step.beyond:
            beyond = ", ".join(step.beyond)
            said.append(f"Not in that paper: {beyond}." if step.paper else f"Added: {beyond}.")
        found.append(" ".join(s for s in said if s))
    return found


# --- what it cost and brought --------------------------------------------------------------------


def summary(record: Record) -> list[Sentence]:
    """The statements, the most important first. Says plainly what did not pay."""
    if part(record.measured, "scores", "result") or part(record.measured, "speed_ratio"):
        return [*_quality(record), *_file(record), *_speed(record), *_comparisons(record)]
    return _file(record) or [
        Sentence("Nothing was measured: what it costs is not known.", against=True)
    ]


def _file(record: Record) -> list[Sentence]:
    """The GGUF file beside the result, as it was read back."""
    made = part(record.measured, "gguf")
    if not made:
        return []
    text = f"{made['file']} has {figures.memory(made['bytes'])}"
    if "kl" in made:
        text += (
            f", perplexity {figures.perplexity(made['perplexity'])}, and is {made['kl']:.3f} nats "
            "a token from the original (KL)"
        )
    return [Sentence(f"{text}.")]


def _quality(record: Record) -> list[Sentence]:
    scores = part(record.measured, "scores")
    resized = kind(record) != "trained"
    sentences = []
    active = figure(scores, "result", "active_parameters")
    whole = figure(scores, "original", "total_parameters")
    before = figure(scores, "original", "active_parameters") or whole
    if active and before and resized:
        share = f"{figures.percent(active / before)} of the original's parameters per token"
        saves = active / before < ALL
        text = (
            f"Runs {share} ({figures.count(active)} of {figures.count(before)})."
            if saves
            else f"A token runs {figures.count(active)} parameters, about as many as before."
        )
        if active / before > 2 - ALL:
            text = f"Runs {share}: more than before."
        sentences.append(Sentence(text, against=not saves))
    ours = figure(scores, "result", "perplexity")
    theirs = figure(scores, "original", "perplexity")
    if ours is not None and theirs is not None:
        change = f"{figures.perplexity(theirs)} → {figures.perplexity(ours)}"
        worse = not ours <= theirs
        tail = "lower is better" if worse else "no quality lost on this text"
        sentences.append(Sentence(f"Perplexity {change} ({tail}).", against=worse))
    elif ours is not None:
        sentences.append(Sentence(f"Perplexity {figures.perplexity(ours)}."))
    stored = figure(scores, "result", "total_parameters")
    if stored and whole and resized:
        fewer = stored < whole
        text = (
            f"Stores {figures.count(stored)} parameters, the original {figures.count(whole)} "
            f"({figures.percent(stored / whole, 1)} of it)."
            if fewer
            else f"Stores {figures.count(stored)} parameters, no fewer than the original."
        )
        sentences.append(Sentence(text, against=not fewer))
    return sentences


def _speed(record: Record) -> list[Sentence]:
    sentences = []
    for what in ("prefill", "decode"):
        ratio = figure(record.measured, "speed_ratio", what)
        word = pace(ratio)
        if not word:
            continue
        than = word if word == "as fast" else f"{word} than the original"
        text = f"{what.capitalize()} {figures.times(ratio)}: {than}{doubt(record, what)}."
        sentences.append(Sentence(text, against=word == "slower"))
    return sentences


def speed_words(ratios: Mapping[str, Values]) -> list[str]:
    """What a speed comparison found, one sentence a figure: the ratio, the ideal, the share.

    Args:
        ratios: by figure (prefill, decode) its ratio, spread, ideal and share.
    """
    said = []
    for what, found in ratios.items():
        word, (low, high) = pace(found["ratio"]), found["spread"]
        than = word if word == "as fast" else f"{word} than the other"
        unsure = ", but not in every round" if low < 1 < high else ""
        said.append(
            f"{what.capitalize()}: {figures.times(found['ratio'])} ({figures.times(low)} to "
            f"{figures.times(high)}), {than}{unsure}. Active parameters alone "
            f"would allow {figures.times(found['ideal'])}; {figures.percent(found['share'])} of "
            "that is reached."
        )
    return said


def _comparisons(record: Record) -> list[Sentence]:
    """How every comparison does beside the result, whatever it says of the result."""
    scores, known = part(record.measured, "scores"), variants(record)
    ours = figure(scores, "result", "perplexity")
    sentences = []
    for name in names(scores):
        theirs = figure(scores, name, "perplexity")
        # names that are numbers are other sizes of the result, not other ways: a chart has them
        if name not in comparisons(record) or name.isdecimal() or ours is None or theirs is None:
            continue
        verdict = _verdict(ours, theirs)
        called = known.get(name, name)
        text = (
            f"{called[:1].upper()}{called[1:]}{_where(record, name)} {verdict}: "
            f"perplexity {figures.perplexity(theirs)} against {figures.perplexity(ours)}."
        )
        routers = [figure(scores, n, "router_parameters") for n in (name, "result")]
        if verdict != "does worse" and routers[0] == 0 and routers[1]:
            text += " Routing did not pay here."
        sentences.append(Sentence(text, against=verdict != "does worse"))
    return sentences


def _where(record: Record, name: str) -> str:
    """How much a comparison runs or stores beside the result."""
    what, ratio = compared_ratio(record)
    theirs, ours = (figures.percent(ratio(n), 1) for n in (name, "result"))
    if figures.NONE in (theirs, ours):
        return ""
    if theirs == ours:
        return " at the same size" if what == "stored" else " at the same active ratio"
    return f" at {theirs} {what}"


def _verdict(ours: float, theirs: float) -> str:
    """How the other does beside us, by perplexity. What is no number does worse than a number."""
    if ours != ours or theirs != theirs:
        return "does worse" if ours == ours else "does as well or better"
    if theirs == ours or abs(theirs - ours) < AS_WELL * ours:
        return "does as well"
    return "does better" if theirs < ours else "does worse"
