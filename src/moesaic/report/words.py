"""What was done, what it cost and what it brought, in plain words made of the record alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moesaic.record import WEIGHTS, Record
from moesaic.report import numbers, read
from moesaic.report.read import figure, part
from moesaic.report.tables import UNCLEAR, pace, ratio_cell
from moesaic.types import Values

AS_WELL = 0.01
"""Perplexities that differ by less than this share are called equally good."""
SAME = 0.005
"""Sizes that differ by less than this share are called the same."""


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
    trained = []
    for training in read.trainings(record):
        steps = len(training.get("losses") or ())
        trained.append(
            f"{training.get('what') or 'weights'}{f', {steps:,} steps' if steps else ''}"
        )
    sentences = [CLAIMS[change] for change in WEIGHTS if change in changes]
    if trained:
        sentences.append(f"Trained: {'; then '.join(trained)}.")
    elif "trained" not in changes:
        sentences.append("Nothing was trained.")
    return " ".join(sentences)


def step_paragraphs(record: Record) -> list[str]:
    """A paragraph a step: what it did, by which paper, and what of it is not in that paper."""
    many = len(record.steps) > 1
    paragraphs = []
    for n, step in enumerate(record.steps, 1):
        sentences = [f"{n}. {step.told}" if many else step.told]
        sentences += [f"Method: {step.paper.rstrip('.')}."] if step.paper else []
        if step.beyond:
            beyond = ", ".join(step.beyond)
            sentences.append(f"Not in that paper: {beyond}." if step.paper else f"Added: {beyond}.")
        paragraphs.append(" ".join(s for s in sentences if s))
    return paragraphs


# --- what it cost and brought --------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One figure of the result beside the original's."""

    figure: str
    """``51.92 → 59.52``"""
    what: str
    """What the figure is."""
    difference: str
    """How they differ: ``14.6 % worse``."""
    tone: str = ""
    """``better``, ``worse``, or ``unsure`` where the difference may be noise."""
    clause: str = ""
    """Its part of the sentence that sums a run up; empty where it says nothing."""
    why: str = ""
    """The warnings that explain it."""


def changes(record: Record) -> list[Change]:
    """Size, quality and speed of the result beside the original's, as far as they are known."""
    return [*_size(record), *_active(record), *_quality(record), *_speed(record)]


def outcome(record: Record) -> str:
    """What came of the run, in one sentence."""
    clauses = [c.clause for c in changes(record) if c.clause]
    speeds = _speed(record)
    if speeds and all(c.difference == UNCLEAR for c in speeds):
        speed = f"speed: {UNCLEAR}"
    else:
        speed = ", ".join(
            f"{c.what.removesuffix(' speed')} {c.difference}"
            + ("" if c.difference == UNCLEAR else f" ({c.figure})")
            for c in speeds
        )
    unknown = "" if part(record.measured, "scores") else "what it costs was not measured"
    sentence = "; ".join(filter(None, (", ".join(clauses), speed, unknown)))
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def _size(record: Record) -> list[Change]:
    """The bytes of the weights."""
    if (sizes := read.sizes(record)) is None:
        return []
    before, after, where = sizes
    what = "on disk" if where == "on disk" else "weights in memory"
    ratio = after / before
    if abs(ratio - 1) < SAME:
        return [Change(numbers.memory(after), what, "as before")]
    difference = f"{numbers.percent(abs(ratio - 1))} {'smaller' if ratio < 1 else 'larger'}"
    if ratio >= 2:
        difference = f"{ratio:.1f} times as large"
    size = f"{numbers.memory(before)} → {numbers.memory(after)}"
    return [
        Change(size, what, difference, "better" if ratio < 1 else "worse", f"{difference} {where}")
    ]


def _active(record: Record) -> list[Change]:
    """The share of the parameters that a token runs, where it is another."""
    scores = part(record.measured, "scores")
    result, original = (figure(scores, n, "active_parameters") for n in ("result", "original"))
    if not result or not original or abs(result / original - 1) < SAME:
        return []
    share, tone = numbers.percent(result / original), "better" if result < original else "worse"
    difference = f"{'fewer' if result < original else 'more'} than before"
    sizes = read.sizes(record)
    smaller = sizes is not None and sizes[1] < (1 - SAME) * sizes[0]
    # what is smaller runs fewer, too: that is said once
    clause = "" if smaller and result < original else f"runs {share} of the parameters per token"
    return [Change(share, "of the parameters run per token", difference, tone, clause)]


def _quality(record: Record) -> list[Change]:
    """Perplexity, and what is kept of the scores on tasks."""
    scores = part(record.measured, "scores")
    original, result = (figure(scores, name, "perplexity") for name in ("original", "result"))
    quality, what = [], "perplexity on this text"
    if result is not None and original is not None:
        both = f"{numbers.perplexity(original)} → {numbers.perplexity(result)}"
        difference, tone = _worse(result / original - 1 if original else math.inf)
        clause = f"{difference} on this text (perplexity {both})"
        quality.append(Change(both, what, difference, tone, clause))
    elif result is not None:
        perplexity = numbers.perplexity(result)
        quality.append(Change(perplexity, what, "", clause=f"perplexity {perplexity}"))
    recovery = figure(scores, "result", "recovery")
    if recovery is not None:
        share = numbers.percent(recovery, 1)
        tone = "worse" if recovery < 1 - SAME else ""
        clause = f"{share} of the original’s score on tasks"
        quality.append(Change(share, "of the original’s score on tasks", "", tone, clause))
    return quality


def _worse(more: float) -> tuple[str, str]:
    """How much worse a perplexity is, in words and as a tone. A gain has to be large to be one.

    >>> [_worse(v)[0].replace(numbers.NBSP, " ") for v in (0.066, -0.004, 0.0001, -0.05, 3.0)]
    ['6.6 % worse', 'no clear difference', 'no clear difference', '5.0 % better', '300 % worse']
    """
    if not math.isfinite(more):
        return "worse", "worse"
    if -AS_WELL < more < 0.0005:
        return UNCLEAR, "unsure"
    size = numbers.percent(abs(more), 0 if abs(more) >= 1 else 1)
    return (f"{size} worse", "worse") if more > 0 else (f"{size} better", "better")


def _speed(record: Record) -> list[Change]:
    cells = {f"{what} speed": ratio_cell(record, what) for what in ("prefill", "decode")}
    speeds = [Change(c.text, what, c.note, c.tone) for what, c in cells.items() if c.note]
    why = " ".join(read.warnings(record)[0])
    return [*speeds[:-1], *(replace(last, why=why) for last in speeds[-1:])]


@dataclass(frozen=True)
class Sentence:
    """One statement, and whether it is against the result."""

    text: str
    against: bool = False


def summary(record: Record) -> list[Sentence]:
    """What the figures beside the original's leave out: the file made of it, other ways.

    Says plainly what did not pay.
    """
    return [*_file(record), *_comparisons(record)]


def _file(record: Record) -> list[Sentence]:
    """The GGUF file beside the result, as it was read back."""
    gguf = part(record.measured, "gguf")
    if not gguf:
        return []
    text = f"{gguf['file']} has {numbers.memory(gguf['bytes'])}"
    if "kl" in gguf:
        text += (
            f", perplexity {numbers.perplexity(gguf['perplexity'])}, and is {gguf['kl']:.3f} nats "
            "a token from the original (KL)"
        )
    return [Sentence(f"{text}.")]


def speed_words(ratios: Mapping[str, Values]) -> list[str]:
    """What a speed comparison found, one sentence a figure: the ratio, the ideal, the share.

    Args:
        ratios: by figure (prefill, decode) its ratio, spread, ideal and share.
    """
    sentences = []
    for what, ratio in ratios.items():
        low, high = ratio["spread"]
        word = pace(ratio["ratio"], (low, high))
        than = word if word == UNCLEAR else f"{word} than the other"
        sentences.append(
            f"{what.capitalize()}: {numbers.times(ratio['ratio'])} ({numbers.times(low)} to "
            f"{numbers.times(high)}), {than}. Active parameters alone "
            f"would allow {numbers.times(ratio['ideal'])}; {numbers.percent(ratio['share'])} of "
            "that is reached."
        )
    return sentences


def _comparisons(record: Record) -> list[Sentence]:
    """How every comparison does beside the result, whatever it says of the result."""
    scores, variants = part(record.measured, "scores"), read.variants(record)
    ours = figure(scores, "result", "perplexity")
    sentences = []
    for name in read.comparisons(record):
        theirs = figure(scores, name, "perplexity")
        # names that are numbers are other sizes of the result, not other ways: a chart has them
        if name.isdecimal() or ours is None or theirs is None:
            continue
        verdict = _verdict(ours, theirs)
        called = variants.get(name, name)
        text = (
            f"{called[:1].upper()}{called[1:]}{_where(record, name)} {verdict}: "
            f"perplexity {numbers.perplexity(theirs)} against {numbers.perplexity(ours)}."
        )
        routers = [figure(scores, n, "router_parameters") for n in (name, "result")]
        if verdict != "does worse" and routers[0] == 0 and routers[1]:
            text += " Routing did not pay here."
        sentences.append(Sentence(text, against=verdict != "does worse"))
    return sentences


def _where(record: Record, name: str) -> str:
    """How much a comparison runs or stores beside the result; what is rounded, in bytes."""
    if name in read.rounded(record):
        sizes = (read.size(record, n, "on disk") for n in (name, "result"))
        theirs, ours = map(numbers.memory, sizes)
        return f", {theirs} against {ours},"
    what, ratio = read.compared_ratio(record)
    theirs, ours = (numbers.percent(ratio(n), 1) for n in (name, "result"))
    if numbers.NONE in (theirs, ours):
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
