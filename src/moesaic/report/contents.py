"""Contents of a report: the sections of blocks that three renderers show."""

from __future__ import annotations

from moesaic.record import Figure, Record
from moesaic.report import facts, numbers, sentences, tables
from moesaic.report.blocks import Block, Cell, Section, Sentence, Table, Text
from moesaic.report.facts import part
from moesaic.report.frontier import frontiers, tried
from moesaic.types import Values

CARD, TERMINAL, BOTH = ("card",), ("terminal",), ("card", "terminal")
MANY = 6
"""Forms of layers beyond this number are only in the table of layers."""


def contents(record: Record, alone: bool = True) -> list[Section]:
    """Return everything that is said of a run, in reading order. What was not measured is left out.

    Args:
        record: of the run.
        alone: False beside other runs, whose page leaves out what only one run's own page has.
    """
    sections = [
        *verdict(record),
        *_measured(record),
        *(_layers(record) if alone else ()),
        *(_plots(record) if alone else ()),
        Section("The same prompt, continued", _continued(record), TERMINAL),
        Section("How it was made", _made(record), CARD),
        Section("Options and machine", [*_options(record)]),
    ]
    return [section for section in sections if section.blocks]


def verdict(record: Record) -> list[Section]:
    """Return what a page begins with: one sentence, a few figures, what else could be done."""
    outcome = sentences.outcome(record)
    lead: list[Block] = [Sentence(outcome, "lead")] if outcome else []
    key = sentences.key_figures(record)
    others = facts.warnings(record)[1]
    warned = [Sentence(f"Warning of the run: {warning}", "remark") for warning in others]
    return [
        Section("", lead, BOTH),
        Section("", [*([key] if key.rows else []), *warned], CARD),
        Section("Other ways, measured beside it", [*sentences.other_ways(record)], BOTH),
    ]


def _measured(record: Record) -> list[Section]:
    """Return what was measured, each kind of figure under its heading."""
    kinds = [
        ("Quality and size", tables.score_table(record), _of_scores(record)),
        ("Speed and memory", tables.speed_table(record), _of_speed(record)),
        ("What was lost where", tables.text_table(record),
         "Perplexity by kind of text. KL: from the original, in nats a token."),
        ("Tasks", tables.task_table(record),
         "± is the standard error. Recovery: the result’s figure over the original’s."),
        ("Does it repeat itself?", tables.loop_table(record),
         "Of continuations of fixed prompts: the share that ends in one piece said again and "
         "again, and the share of 4-grams that came before."),
    ]  # fmt: skip
    found = [
        Section(title, [table, Sentence(note, "note")] if note else [table], BOTH)
        for title, table, note in kinds
        if table.rows
    ]
    plots = frontiers([record])
    return [*([Section(plots[0].section, [*plots])] if plots else []), *found]


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
    """Return how speed was measured, on which machine, and what explains it."""
    machine, turns = record.environment, "models timed in turn"
    if not facts.interleaved(record):
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
    """Return what became of the layers: those that became the same together, then every one."""
    alike: dict[str, list[int]] = {}
    for layer in facts.changed(record):
        if layer.told:
            alike.setdefault(layer.told, []).append(layer.index)
    blocks: list[Block] = [
        Sentence(f"{'Layers' if len(n) > 1 else 'Layer'} {numbers.ranges(n)}: {form}.")
        for form, n in (alike.items() if len(alike) <= MANY else ())
    ]
    if any(layer.told for layer in record.layers):
        note = (
            "Neurons: those of the whole feed-forward network, of all experts together. Relative "
            "loss: by the method’s own measure. Refit: the squared error before it, relative to "
            "the output, and the share of it that was recovered, on tokens that no fit saw."
        )
        blocks += [tables.layer_table(record), Sentence(note, "note")]
    return [Section("What became of the layers", blocks)]


def _plots(record: Record) -> list[Section]:
    """Return the plots of the steps, of where tokens went, and of a search, by their headings."""
    figures: list[Figure] = [figure for step in record.steps for figure in step.figures]
    figures += filter(None, (facts.routes(record), tried(record)))
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


def _made(record: Record) -> list[Block]:
    """Return a paragraph for each step, and what became of the weights."""
    if not record.steps:
        return []
    return [Sentence(t) for t in (*sentences.steps(record), sentences.weights(record))]


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
