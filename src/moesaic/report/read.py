"""Reading a record: names and titles, and the tables of its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import TypeVar

from moesaic.foreign import Values
from moesaic.record import LayerRecord, Record, Step
from moesaic.report import figures

V = TypeVar("V")
CARVED = ("split", "learned", "gated")
"""Kinds of step that make experts of dense layers."""
FEWER = ("experts", "slimmed", "condensed")
"""Kinds of step whose result stores less, and is compared by that."""

# --- parts of what was measured ------------------------------------------------------------------


def part(of: object, *keys: str) -> Values:
    """The mapping at a path; empty where there is none."""
    for key in keys:
        of = of.get(key) if isinstance(of, Mapping) else None
    return of if isinstance(of, Mapping) else {}


def figure(of: object, *keys: str) -> float | None:
    """The number at a path; None where there is none."""
    value = part(of, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def names(of: Values) -> list[str]:
    """Models in reading order: the original, the result, then the comparisons."""
    first = [name for name in ("original", "result") if name in of]
    return first + [name for name in of if name not in first]


def comparisons(record: Record) -> list[str]:
    """The names of the models that were measured beside original and result."""
    return [n for n in part(record.measured, "scores") if n not in ("original", "result")]


def by_layer(of: Mapping[str, V]) -> list[tuple[int, V]]:
    """What is kept by layer, in the model's order."""
    return sorted((int(i), value) for i, value in of.items())


def routing(record: Record) -> list[tuple[int, Values]]:
    """Where tokens went in the layers of the result that route, in the model's order."""
    return [(i, r) for i, r in by_layer(part(record.measured, "routing")) if r.get("share")]


# --- steps and layers ----------------------------------------------------------------------------


def main_step(record: Record) -> Step | None:
    """The last step that changed the model's shape, else the last; None where there is none."""
    shaped = [step for step in record.steps if step.kind != "trained"]
    return (shaped or record.steps or [None])[-1]  # type: ignore[list-item]


def kind(record: Record) -> str:
    """Of the main step; see :attr:`moesaic.record.Step.kind`."""
    step = main_step(record)
    return step.kind if step else ""


def unit(record: Record) -> str:
    """The name of the things that the result's routers choose."""
    step = main_step(record)
    return step.unit if step else "expert"


def variants(record: Record) -> dict[str, str]:
    """Comparisons in words, by name."""
    return {name: told for step in record.steps for name, told in step.variants.items()}


def changed(record: Record) -> list[LayerRecord]:
    """The layers that are not as they were in the base."""
    return [layer for layer in record.layers if layer.changed]


def experts_before(layer: LayerRecord) -> int:
    """The routed experts that a layer had in the model it was made from; 0 where not known."""
    known = layer.shape.get("before") if layer.changed else layer.experts
    return int(known or len(layer.analysis.get("calls") or ()))


def most_experts(record: Record) -> int:
    """The most experts that a layer of the result routes to; 0 where nothing is routed."""
    counts = [layer.experts for layer in record.layers]
    return max([0, *counts, *(len(r["share"]) for _, r in routing(record))])


def trainings(record: Record) -> list[tuple[Step, Values]]:
    """The steps that trained, and what they say of it."""
    found = [(step, part(step.summary, "training")) for step in record.steps]
    return [(step, training) for step, training in found if training]


def order(step: Step) -> list[int]:
    """Layers in the order in which a step chose them; empty where it chose none."""
    chosen = step.summary.get("layers")
    return list(chosen) if isinstance(chosen, list | tuple) else []


# --- names ---------------------------------------------------------------------------------------


def model_name(record: Record) -> str:
    """The model as it was asked for; of a path, its last part."""
    name = record.model or "a model"
    looks_like_path = name.startswith(("/", "./", "../", "~")) or "\\" in name
    return (PurePath(name.replace("\\", "/")).name or name) if looks_like_path else name


def done(record: Record) -> str:
    """The clauses of all steps."""
    return ", then ".join(step.title for step in record.steps)


def title(record: Record) -> str:
    """One line: what was made of what, how far."""
    return ", ".join(part for part in (model_name(record), done(record)) if part)


def made(record: Record) -> str:
    """The verbs and methods of all steps, short."""
    return " · ".join(f"{step.verb}, {step.label}" for step in record.steps)


def stored_ratio(record: Record, name: str = "result") -> float | None:
    """Parameters that a model stores, relative to the original."""
    scores = record.measured.get("scores")
    ours = figure(scores, name, "total_parameters")
    theirs = figure(scores, "original", "total_parameters")
    return ours / theirs if ours is not None and theirs else None


def active_ratio(record: Record, name: str = "result") -> float | None:
    """What a token runs as measured: of dense layers made experts the share of their projections,
    of other results the share of the original's active parameters."""
    scores = part(record.measured, "scores")
    if kind(record) in CARVED:
        return figure(scores, name, "active_ratio")
    ours, theirs = (figure(scores, n, "active_parameters") for n in (name, "original"))
    return ours / theirs if ours is not None and theirs else None


def size(record: Record, name: str, where: str) -> float | None:
    """Bytes of a model's weights ``on disk`` or ``in memory``."""
    if where == "on disk":
        return figure(record.measured, "files", name)
    return figure(record.measured, "scores", name, "total_bytes")


def sizes(record: Record) -> tuple[float, float, str] | None:
    """Bytes of the original and of the result, and where: on disk, if files were looked at."""
    for where in ("on disk", "in memory"):
        before, after = (size(record, name, where) for name in ("original", "result"))
        if before and after:
            return before, after, where
    return None


def warnings(record: Record) -> tuple[list[str], list[str]]:
    """The warnings of the run: those that explain its speed, and the others."""
    every = list(record.log.get("warnings") or ())
    speed = [said for said in every if said in (record.log.get("of_speed") or ())]
    return speed, [said for said in every if said not in speed]


def compared_ratio(record: Record) -> tuple[str, Callable[[str], float | None]]:
    """The ratio that says most of the models of a run, in a word, and how to look it up."""
    if kind(record) in FEWER:
        return "stored", lambda name: stored_ratio(record, name)
    return "active", lambda name: active_ratio(record, name)


# --- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A figure, and what stands small beside it."""

    text: str
    note: str = ""
    tone: str = ""
    """``better``, ``worse``, or ``unsure`` where what is seen may be noise."""
    value: float | None = None
    """What the text writes, to sort by."""


@dataclass(frozen=True)
class Figures:
    """Figures as rows, models as columns."""

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


Format = Callable[[float | None], str]
tenths = partial(figures.percent, digits=1)

SCORES: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", figures.perplexity),
    ("KL from the original, nats", "kl", figures.share),
    ("top-1 agreement", "top1_agreement", tenths),
    ("tokens measured", "tokens", figures.count),
    ("active ratio", "active_ratio", tenths),
    ("nominal ratio", "nominal_active_ratio", tenths),
    ("active parameters", "active_parameters", figures.count),
    ("total parameters", "total_parameters", figures.count),
    ("router parameters", "router_parameters", figures.count),
    ("weights in memory", "total_bytes", figures.memory),
)
STORED = "stored, of the original"
SPEEDS: tuple[tuple[str, str, str, str, Format], ...] = (
    ("prefill, tokens/s", "prefill_tokens_per_second", "prefill_spread", "prefill", figures.rate),
    ("decode, tokens/s", "decode_tokens_per_second", "decode_spread", "decode", figures.rate),
    ("time to first token", "first_token_seconds", "", "", figures.duration),
    ("peak memory", "peak_memory_bytes", "", "", figures.memory),
)


def score_table(record: Record) -> Figures:
    """Quality and size of all models that were scored; no rows if none was.

    Rows that say nothing are left out: no routers, a nominal ratio that is the measured one.
    """
    scores = part(record.measured, "scores")
    columns = names(scores)
    known = {key: [figure(scores, name, key) for name in columns] for _, key, _ in SCORES}
    shares = [[tenths(v) for v in known[key]] for key in ("active_ratio", "nominal_active_ratio")]
    idle = {"nominal_active_ratio"} if shares[0] == shares[1] else set()
    idle |= set() if kind(record) in CARVED else {"active_ratio", "nominal_active_ratio"}
    idle |= set() if any(known["router_parameters"]) else {"router_parameters"}
    rows = [
        (label, [Cell(form(value)) for value in known[key]])
        for label, key, form in SCORES
        if key not in idle and any(value is not None for value in known[key])
    ]
    files = [size(record, name, "on disk") for name in columns]
    if any(files):
        rows.append(("files on disk", [Cell(figures.memory(value)) for value in files]))
    ratios = [stored_ratio(record, name) for name in columns]
    if kind(record) not in CARVED and any(ratio not in (None, 1.0) for ratio in ratios):
        rows.append((STORED, [Cell(tenths(ratio)) for ratio in ratios]))
    return Figures(columns, rows)


HEADLINES = ("acc_norm", "acc", "exact_match", "f1")
"""The metrics that a task is summed up by; the first that it has."""


def task_table(record: Record) -> Figures:
    """Every task's headline figure, its standard error, and recovery: the result's over the
    original's; below them their means. No rows if no task was measured."""
    scores = part(record.measured, "scores")
    columns = [name for name in names(scores) if part(scores, name, "tasks")]
    rows, every = [], []
    for task in dict.fromkeys(t for name in columns for t in part(scores, name, "tasks")):
        told = [part(scores, name, "tasks", task) for name in columns]
        metric = next((m for m in HEADLINES if any(m in found for found in told)), "")
        values = [figure(found, metric) for found in told]
        error = "stderr" if metric == "acc" else f"{metric}_stderr"
        errors = [figure(found, error) for found in told]
        cells = [
            Cell(figures.percent(value, 1), "" if e is None else f"± {100 * e:.1f}")
            for value, e in zip(values, errors, strict=True)
        ]
        every.append(values)
        rows.append((f"{task}, {metric.replace('_', ' ')}", [*cells, _recovery(columns, values)]))
    known = [values for values in every if None not in values]
    if len(known) > 1:
        means = [
            sum(v for v in column if v is not None) / len(known)
            for column in zip(*known, strict=True)
        ]
        cells = [Cell(figures.percent(mean, 1)) for mean in means]
        rows.append(("mean", [*cells, _recovery(columns, means)]))
    if not {"result", "original"} <= {*columns}:
        return Figures(columns, [(label, cells[:-1]) for label, cells in rows])
    return Figures([*columns, "recovery"], rows)


def _recovery(columns: Sequence[str], values: Sequence[float | None]) -> Cell:
    """The result's figure over the original's."""
    known = dict(zip(columns, values, strict=True))
    ours, theirs = known.get("result"), known.get("original")
    return Cell(figures.percent(ours / theirs if ours is not None and theirs else None, 1))


LOOPS = (("looping", "end in a loop"), ("repetition", "4-grams said before"))


def loop_table(record: Record) -> Figures:
    """How continuations repeat themselves, by temperature; no rows if that was not measured."""
    scores = part(record.measured, "scores")
    columns = [name for name in names(scores) if part(scores, name, "generations")]
    heats = dict.fromkeys(t for name in columns for t in part(scores, name, "generations"))
    rows = []
    for heat in heats:
        where = "greedy" if heat == "0" else f"temperature {heat}"
        for key, said in LOOPS:
            values = [figure(scores, name, "generations", heat, key) for name in columns]
            rows.append((f"{where}: {said}", [Cell(figures.percent(v, 1)) for v in values]))
    return Figures(columns, rows)


def tables(record: Record) -> list[Figures]:
    """All tables that have rows, in reading order."""
    found = (score_table(record), task_table(record), loop_table(record), speed_table(record))
    return [table for table in found if table.rows]


def speed_table(record: Record) -> Figures:
    """Speed and memory of all models that were timed, and the ratio to the original."""
    speeds = part(record.measured, "speed")
    columns = names(speeds)
    ratios = part(record.measured, "speed_ratio")
    rows = []
    for label, key, around, ratio, form in SPEEDS:
        values = [figure(speeds, name, key) for name in columns]
        if all(value is None for value in values):
            continue
        cells = [
            Cell(form(value), figures.spread(part(speeds, name).get(around)))
            for name, value in zip(columns, values, strict=True)
        ]
        if ratios:
            cells.append(ratio_cell(record, ratio) if ratio else Cell(""))
        rows.append((label, cells))
    return Figures(columns + (["ratio"] if ratios else []), rows)


def interleaved(record: Record) -> bool:
    """Models were timed in turn; False where there was room for one at a time only."""
    return record.measured.get("speed_interleaved", True) is not False


UNCLEAR = "no clear difference"
TONES = {"faster": "better", "slower": "worse", UNCLEAR: "unsure"}


def ratio_cell(record: Record, what: str) -> Cell:
    """A speed relative to the original's, in words too."""
    ratio = figure(record.measured, "speed_ratio", what)
    word = pace(ratio, ratio_spread(record, what))
    return Cell(figures.times(ratio), word, TONES.get(word, ""), ratio)


def ratio_spread(record: Record, what: str) -> tuple[float, float] | None:
    """The least and the greatest ratio of all rounds; of records without it, what it may be."""
    if known := _pair(part(record.measured, "speed_ratio").get(f"{what}_spread")):
        return known
    speeds = part(record.measured, "speed")
    ours, theirs = (_pair(part(speeds, n).get(f"{what}_spread")) for n in ("result", "original"))
    if ours and theirs and all(theirs):
        return ours[0] / theirs[1], ours[1] / theirs[0]
    return None


def _pair(values: object) -> tuple[float, float] | None:
    """Two numbers; None of anything else."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != 2:
        return None
    known = [v for v in values if isinstance(v, int | float)]
    return (known[0], known[1]) if len(known) == 2 else None


def pace(ratio: float | None, spread: tuple[float, float] | None) -> str:
    """faster or slower, where every one of several rounds says so and the written figure, too.

    >>> pace(1.3, (1.1, 1.4)), pace(1.3, (0.9, 1.4)), pace(1.3, (1.3, 1.3)), pace(None, None)
    ('faster', 'no clear difference', 'no clear difference', '')
    """
    if ratio is None or ratio != ratio:
        return ""
    low, high = spread or (ratio, ratio)
    shown = round(ratio, 2)
    if low < high and low > 1 and shown > 1:
        return "faster"
    return "slower" if low < high < 1 and shown < 1 else UNCLEAR


def pairs(of: Values) -> list[tuple[str, str]]:
    """Options by name, as text."""
    return [(key.replace("_", " "), figures.plain(value)) for key, value in of.items()]
