"""What a run cost and what it brought, in plain words made of the record's own figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.report import figures
from moesaic.report.read import (
    CRITERIA,
    VARIANTS,
    Record,
    family,
    figure,
    names,
    pace,
    part,
    within_spread,
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


def summary(record: Record) -> list[Sentence]:
    """The statements, the most important first. Says plainly what did not pay."""
    if not part(record, "scores", "result") and not part(record, "speed_ratio"):
        return [Sentence("Nothing was measured: what it costs is not known.", against=True)]
    return [*_quality(record), *_speed(record), *_comparisons(record)]


def _quality(record: Record) -> list[Sentence]:
    scores = part(record, "scores")
    sentences = []
    active = figure(scores, "result", "active_parameters")
    whole = figure(scores, "original", "total_parameters")
    dense = figure(scores, "original", "active_parameters") or whole
    if active and dense and family(record) != "tune":
        share = f"{figures.percent(active / dense)} of the original's parameters per token"
        saves = active / dense < ALL
        text = (
            f"Runs {share} ({figures.count(active)} of {figures.count(dense)})."
            if saves
            else f"A token runs {figures.count(active)} parameters, about as many as before."
        )
        if active / dense > 2 - ALL:
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
    if stored and whole and family(record) != "tune":
        fewer = stored < whole
        sentences.append(
            Sentence(
                f"Stores {figures.count(stored)} parameters, the original {figures.count(whole)}"
                f"{_percent(stored / whole) if family(record) != 'carve' else ''}."
                if fewer
                else f"Stores {figures.count(stored)} parameters, no fewer than the original.",
                against=not fewer,
            )
        )
    return sentences


def _speed(record: Record) -> list[Sentence]:
    sentences = []
    for what in ("prefill", "decode"):
        ratio = figure(record, "speed_ratio", what)
        word = pace(ratio)
        if not word:
            continue
        unsure = ", but within the spread of the rounds" if within_spread(record, what) else ""
        than = word if word == "as fast" else f"{word} than the original"
        sentences.append(
            Sentence(
                f"{what.capitalize()} {figures.times(ratio)}: {than}{unsure}.",
                against=word == "slower",
            )
        )
    return sentences


def speed_words(ratios: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a speed comparison found, one sentence a figure: the ratio, the ideal, the share."""
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


def _percent(ratio: float) -> str:
    return f" ({figures.percent(ratio, 1)} of it)"


def _criteria(record: Record) -> list[Sentence]:
    """Other criteria at the same number of experts, whatever they say of the one that was used."""
    scores = part(record, "scores")
    ours = figure(scores, "result", "perplexity")
    sentences = []
    for name in names(scores):
        theirs = figure(scores, name, "perplexity")
        if name in ("original", "result") or ours is None or theirs is None:
            continue
        sizes = {figure(scores, n, "total_parameters") for n in (name, "result")}
        where = " at the same size" if len(sizes) == 1 else ""
        verdict = _verdict(ours, theirs)
        text = f"Pruning by {CRITERIA.get(name, name)}{where} {verdict}: {_both(theirs, ours)}."
        sentences.append(Sentence(text, against=verdict != "does worse"))
    return sentences


def _comparisons(record: Record) -> list[Sentence]:
    if family(record) == "prune":
        return _criteria(record)
    if family(record) == "condense":
        return []  # other sizes, not other ways: the chart has them
    scores = part(record, "scores")
    ours = figure(scores, "result", "perplexity")
    ratio = figures.percent(figure(scores, "result", "active_ratio"), 1)
    sentences = []
    for name in names(scores):
        theirs = figure(scores, name, "perplexity")
        if name in ("original", "result") or ours is None or theirs is None:
            continue
        verdict = _verdict(ours, theirs)
        if verdict == "does worse" and name != "static":
            continue
        known = VARIANTS.get(name, name)
        at = figures.percent(figure(scores, name, "active_ratio"), 1)
        where = "the same active ratio" if at == ratio else f"{at} active"
        text = f"{known[0].upper()}{known[1:]} at {where} {verdict}: {_both(theirs, ours)}."
        if verdict != "does worse" and name == "static":
            text += " Routing did not pay here."
        sentences.append(Sentence(text, against=verdict != "does worse"))
    return sentences


def _verdict(ours: float, theirs: float) -> str:
    """How the other does beside us, by perplexity. What is no number does worse than a number."""
    if ours != ours or theirs != theirs:
        return "does worse" if ours == ours else "does as well or better"
    if theirs == ours or abs(theirs - ours) < AS_WELL * ours:
        return "does as well"
    return "does better" if theirs < ours else "does worse"


def _both(theirs: float, ours: float) -> str:
    return f"perplexity {figures.perplexity(theirs)} against {figures.perplexity(ours)}"
