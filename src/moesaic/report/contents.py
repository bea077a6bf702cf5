"""Contents of a report: the sections of blocks that three renderers show, and their sentences.

The sentences state how good a result is, what else could be done, and how it was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.config import BASELINES
from moesaic.record import WEIGHTS, Figure, Record
from moesaic.report import facts, numbers, tables
from moesaic.report.blocks import Block, Cell, Section, Sentence, Table, Text
from moesaic.report.facts import figure, part
from moesaic.report.frontier import SECTION, candidates_plot, frontiers
from moesaic.report.tables import UNCLEAR, pace, ratio_cell
from moesaic.types import Values

CARD, TERMINAL, BOTH = ("card",), ("terminal",), ("card", "terminal")
MANY = 6
"""Forms of layers beyond this number are only in the table of layers."""


def contents(record: Record, single: bool = True) -> list[Section]:
    """Return the sections about a run, in reading order, without what was not measured.

    Beside other runs (not ``single``) those that only a run's own page has are left out, too.
    """
    paragraphs = [*steps(record), weights(record)] if record.steps else []
    made: list[Block] = [Sentence(paragraph) for paragraph in paragraphs]
    sections = [
        *verdict(record),
        *_measured(record),
        *(_layers(record) if single else ()),
        *(_plots(record) if single else ()),
        Section("The same prompt, continued", _continued(record), TERMINAL),
        Section("How it was made", made, CARD),
        Section("Options and machine", [*_options(record)]),
    ]
    return [section for section in sections if section.blocks]


def verdict(record: Record) -> list[Section]:
    """Return the first section of a page: the verdict, a few figures, and alternatives."""
    lead: list[Block] = [Sentence(words, "lead")] if (words := outcome(record)) else []
    rows = [(c.what, [Cell(c.figure), Cell(c.difference, tone=c.tone)]) for c in changes(record)]
    key = [Table([f"original → {facts.wanted(record)}", ""], rows, "key")] if rows else []
    others = facts.warnings(record)[1]
    warned = [Sentence(f"Warning of the run: {warning}", "remark") for warning in others]
    return [
        Section("", lead, BOTH),
        Section("", [*key, *warned], CARD),
        Section("Other ways, measured beside it", [*other_ways(record)], BOTH),
    ]


def _measured(record: Record) -> list[Section]:
    """Return the sections of measurements, each kind of figure under its heading."""
    kinds = [
        ("Quality and size", tables.score_table(record), _of_scores(record)),
        ("Speed and memory", tables.speed_table(record), _of_speed(record)),
        ("What was lost where", tables.text_table(record),
         "Perplexity by kind of text. Last columns: the "
         f"{facts.wanted(record)} beside the original, KL in nats a token."),
        ("Tasks", tables.task_table(record),
         "± is the standard error. Recovery: the result’s figure over the original’s."),
        ("Does it repeat itself?", tables.loop_table(record),
         "Of continuations of fixed prompts: the share that ends in one repeated piece, "
         "and the share of 4-grams that came before."),
    ]  # fmt: skip
    found = [
        Section(title, [table, Sentence(note, "note")] if note else [table], BOTH)
        for title, table, note in kinds
        if table.rows
    ]
    return [Section(SECTION, [*frontiers([record])]), *found]


def _of_scores(record: Record) -> str:
    """Return how to read the scores: the text, the ratios, the compared models."""
    settings = part(record.measured, "evaluation")
    data, kind = settings.get("data"), settings.get("computed_in")
    notes = []
    if data:
        text = "text that ships with Moesaic" if data == "shipped" else str(data)
        precision = f", computed in {kind}" if kind else ""
        length = f", in windows of {settings['length']}" if settings.get("length") else ""
        bos = ", each begun with BOS" if settings.get("bos") else ""
        notes.append(f"Perplexity on {text}{length}{bos}{precision}.")
    if facts.by_projections(record):
        notes.append(
            "Active ratio: the share of the original’s projection parameters that a token runs."
        )
    variants, compared = facts.variants(record), facts.comparisons(record)
    notes += [f"{n}: {variants[n]}." for n in compared if n in variants and not n.isdecimal()]
    if sizes := sorted(int(n) for n in compared if n.isdecimal()):
        notes.append(f"{numbers.plain(sizes)}: only that many of the layers, the first chosen.")
    return " ".join(notes)


def _of_speed(record: Record) -> str:
    """Return sentences on how speed was measured, on which machine, and what explains it."""
    machine, turns = record.environment, "models timed in turn"
    if record.measured.get("speed_interleaved") is False:
        turns = "one model after the other, as there was room for one at a time"
    notes = [f"Medians over rounds, with the least and the greatest; {turns}."]
    notes.append(
        f"A difference is one where each of at least {tables.ROUNDS} rounds agrees, and the "
        f"medians differ by {numbers.percent(tables.GAP)}."
    )
    where = [str(machine[key]) for key in ("processor", "device") if machine.get(key)]
    if where:
        threads = machine.get("threads", "some")
        notes.append(
            f"On {' · '.join(where)}, {threads} thread{'' if threads == 1 else 's'}, torch "
            f"{machine.get('torch', numbers.NONE)}."
        )
    return " ".join([*notes, *facts.warnings(record)[0]])


def _layers(record: Record) -> list[Section]:
    """Return the sections about layers: sentences for layers that are alike, a table of all."""
    alike: dict[str, list[int]] = {}
    for layer in record.layers:
        if layer.changed and layer.text:
            alike.setdefault(layer.text, []).append(layer.index)
    blocks: list[Block] = [
        Sentence(f"{'Layers' if len(n) > 1 else 'Layer'} {numbers.ranges(n)}: {form}.")
        for form, n in (alike.items() if len(alike) <= MANY else ())
    ]
    if any(layer.text for layer in record.layers):
        note = (
            "Neurons: those of the whole feed-forward network, of all experts together. Relative "
            "loss: by the method’s own measure. Refit: the squared error before it, relative to "
            "the output, and the share of it that was recovered, on tokens that no fit saw."
        )
        blocks += [tables.layer_table(record), Sentence(note, "note")]
    return [Section("What became of the layers", blocks)]


def _plots(record: Record) -> list[Section]:
    """Return the plots of the steps, of routed tokens, and of a search, by their headings."""
    figures: list[Figure] = [figure for step in record.steps for figure in step.figures]
    figures += filter(None, (facts.routes(record), candidates_plot(record)))
    titles = dict.fromkeys(figure.section for figure in figures)
    return [Section(t, [figure for figure in figures if figure.section == t]) for t in titles]


def _continued(record: Record) -> list[Block]:
    """Return one prompt and how every model continues it."""
    written = dict(part(record.measured, "generation"))
    prompt = written.pop("prompt", None)
    texts: list[Block] = [
        Text(name, str(written[name]).strip() or "(nothing)") for name in facts.names(written)
    ]
    return [Sentence(str(prompt), "prompt"), *texts] if prompt and texts else texts


def _options(record: Record) -> list[Table]:
    """Return the options of every step, the text, and the machine, as they are in the record."""
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
    return [
        Table(
            [""],
            [(key.replace("_", " "), [Cell(numbers.plain(value))]) for key, value in of.items()],
            "options",
            title,
        )
        for title, of in about.items()
        if of
    ]


# --- sentences -----------------------------------------------------------------------------------


AS_WELL = 0.01
"""Perplexities that differ by less than this share are called equally good."""
SAME = 0.005
"""Sizes that differ by less than this share are called the same."""
CLAIMS = {
    "own": "All weights that are kept are the base model's own; some may be moved, sliced or "
    "scaled by constants.",
    "refitted": "Down projections or output biases differ from the base model's: they were solved "
    "for in closed form on the calibration text.",
    "trained": "Weights differ from the base model's: they were trained.",
}
"""Sentences about the base model's weights, by the names of :data:`moesaic.record.WEIGHTS`."""


# --- how it was made -----------------------------------------------------------------------------


def weights(record: Record) -> str:
    """Return sentences on how all steps changed the base model's weights, and what was trained."""
    changes = {step.weights for step in record.steps} | {x.weights for x in record.layers}
    changes = changes - {"own"} or {"own"}
    trained = []
    for training in filter(None, (part(step.summary, "training") for step in record.steps)):
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


def steps(record: Record) -> list[str]:
    """Return a paragraph for each step: its result, its paper, and additions to that paper."""
    many = len(record.steps) > 1
    paragraphs = []
    for n, step in enumerate(record.steps, 1):
        sentences = [f"{n}. {step.text}" if many else step.text]
        sentences += [f"Method: {step.paper.rstrip('.')}."] if step.paper else []
        if step.beyond:
            beyond = ", ".join(step.beyond)
            sentences.append(f"Not in that paper: {beyond}." if step.paper else f"Added: {beyond}.")
        paragraphs.append(" ".join(s for s in sentences if s))
    return paragraphs


# --- what came of it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Figure of the result beside the original's."""

    figure: str
    """``51.92 → 59.52``"""
    what: str
    """Name of the figure."""
    difference: str
    """Difference in words: ``14.6 % worse``."""
    tone: str = ""
    """``better``, ``worse``, or ``unsure`` where the difference may be noise."""
    clause: str = ""
    """Clause of the verdict; empty if the figure is not part of it."""


def changes(record: Record) -> list[Change]:
    """Return size, quality and speed of the result beside the original's, as far as known."""
    return [*_size(record), *_active(record), *_quality(record), *_speed(record)]


def outcome(record: Record) -> str:
    """Return the verdict on the result in one sentence: size, quality and speed."""
    size_and_quality = [*_size(record), *_active(record), *_quality(record)]
    clauses, speeds = ([c.clause for c in of] for of in (size_and_quality, _speed(record)))
    if speeds and all(clause.endswith(UNCLEAR) for clause in speeds):
        speeds = [f"speed: {UNCLEAR}"]
    unknown = "" if facts.scores(record) else "quality was not measured"
    groups = (", ".join(filter(None, of)) for of in (clauses, speeds))
    sentence = "; ".join(filter(None, (*groups, unknown)))
    if file := part(record.measured, "gguf").get("file"):
        return f"{file}: {sentence}."
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def _size(record: Record) -> list[Change]:
    """Return the bytes of the weights."""
    if (sizes := facts.bytes_before_after(record)) is None:
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
    """Return the change of the parameters that a token runs, if there is one."""
    ratio = facts.relative(record, "result", "active_parameters")
    if not ratio or abs(ratio - 1) < SAME:
        return []
    tone = "better" if ratio < 1 else "worse"
    difference = f"{numbers.percent(abs(ratio - 1))} {'fewer' if ratio < 1 else 'more'}"
    sizes = facts.bytes_before_after(record)
    smaller = sizes is not None and sizes[1] < (1 - SAME) * sizes[0]
    # a smaller model also runs fewer: one clause is enough
    clause = "" if smaller and ratio < 1 else f"runs {difference} parameters per token"
    return [Change(difference, "parameters per token", "than before", tone, clause)]


def _quality(record: Record) -> list[Change]:
    """Return the changes of perplexity and of the mean score on tasks."""
    scores = facts.scores(record)
    original, result = (
        figure(scores, name, "perplexity") for name in ("original", facts.wanted(record))
    )
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
    """Return how much worse a perplexity is, in words and as a tone; small gains are no gain.

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
    """Return prefill and decode speed."""
    speeds, found = part(record.measured, "speed"), []
    for what in ("prefill", "decode"):
        ratio, key = ratio_cell(record, what), f"{what}_tokens_per_second"
        if not ratio.note:
            continue
        both = [figure(speeds, name, key) for name in ("original", "result")]
        shown = ratio.text if None in both else " → ".join(map(numbers.rate, both))
        difference = " ".join(filter(None, (ratio.note, ratio.text and f"({ratio.text})")))
        clause = f"{what} {difference}"
        found.append(Change(shown, f"{what}, tokens/s", difference, ratio.tone, clause))
    return found


# --- what else could be done ---------------------------------------------------------------------


def other_ways(record: Record) -> list[Sentence]:
    """Return how every comparison does, for or against the result or its GGUF file."""
    scores, variants = facts.scores(record), facts.variants(record)
    ours = figure(scores, facts.wanted(record), "perplexity")
    sentences = []
    for name in facts.comparisons(record):
        theirs = figure(scores, name, "perplexity")
        # names that are numbers are other sizes of the result, not other ways: a chart has them
        if name.isdecimal() or ours is None or theirs is None:
            continue
        verdict = _verdict(ours, theirs)
        called = variants.get(name, name)
        both = f"{numbers.perplexity(theirs)} against {numbers.perplexity(ours)}"
        if size := _bytes_beside(record, name):
            joined = "but" if size.startswith("larger") ^ (verdict == "worse") else "and"
            good = "as good" if verdict == "as well" else verdict
            text = f"{called} is {size} {joined} {good} (perplexity {both})."
        else:
            text = f"{called}{_share_beside(record, name)} does {verdict}: perplexity {both}."
        routers = [figure(scores, n, "router_parameters") for n in (name, "result")]
        if verdict != "worse" and routers[0] == 0 and routers[1]:
            text += " Routing did not pay here."
        tone = "" if verdict == "worse" else "worse"
        sentences.append(Sentence(f"{text[:1].upper()}{text[1:]}", "remark", tone))
    return sentences


def _bytes_beside(record: Record, name: str) -> str:
    """Return how large a quantised file is beside the result; empty for other comparisons."""
    theirs, ours = (facts.size(record, n, "on disk") for n in (name, facts.wanted(record)))
    if name not in BASELINES or not theirs or not ours:
        return ""
    both = f"{numbers.memory(theirs)} against {numbers.memory(ours)}"
    if abs(theirs / ours - 1) < SAME:
        return f"as large ({both})"
    return f"{'smaller' if theirs < ours else 'larger'} ({both})"


def _share_beside(record: Record, name: str) -> str:
    """Return how much a comparison runs or stores beside the result."""
    what, ratio = facts.compared_ratio(record)
    theirs, ours = (numbers.percent(ratio(n), 1) for n in (name, "result"))
    if numbers.NONE in (theirs, ours):
        return ""
    if theirs == ours:
        return " at the same active ratio" if what == "active" else " at the same size"
    return f" at {theirs} {what}"


def _verdict(ours: float, theirs: float) -> str:
    """Return how the other does beside the result, by perplexity; NaN does worse than a number."""
    if ours != ours or theirs != theirs:
        return "worse" if ours == ours else "better"
    if theirs == ours or abs(theirs - ours) < AS_WELL * ours:
        return "as well"
    return "better" if theirs < ours else "worse"


def speed_words(ratios: Mapping[str, Values]) -> list[str]:
    """Return a sentence for each figure of a speed comparison: ratio, ideal, share.

    Args:
        ratios: by figure (prefill, decode) the keys of :func:`moesaic.metrics.speed.against`.
    """
    sentences = []
    for what, ratio in ratios.items():
        low, high = ratio["spread"]
        word = pace(ratio["ratio"], (low, high), ratio["rounds"])
        than = word if word == UNCLEAR else f"{word} than the other"
        sentences.append(
            f"{what.capitalize()}: {numbers.times(ratio['ratio'])} ({numbers.times(low)} to "
            f"{numbers.times(high)}), {than}. Active parameters "
            f"would allow {numbers.times(ratio['ideal'])}; {numbers.percent(ratio['share'])} of "
            "that is reached."
        )
    return sentences
