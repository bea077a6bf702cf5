"""The tables of a record's figures: scores, tasks, speed, layers; and a row a run of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from moesaic.data.questions import HEADLINE
from moesaic.record import LayerRecord, Record
from moesaic.report import numbers, read
from moesaic.report.read import figure, part
from moesaic.types import Values

Format = Callable[[float | None], str]
tenths = partial(numbers.percent, digits=1)


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
class Table:
    """Rows by their names, and what is known of each."""

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


def cell(form: Format, value: float | None) -> Cell:
    """A figure as it is written."""
    return Cell(form(value), value=value)


def tables(record: Record) -> list[Table]:
    """All tables of the models that have rows, in reading order."""
    quality = (score_table(record), text_table(record), task_table(record), loop_table(record))
    return [table for table in (*quality, speed_table(record)) if table.rows]


# --- quality and size ----------------------------------------------------------------------------

SCORES: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", numbers.perplexity),
    ("KL from the original, nats", "kl", numbers.share),
    ("top-1 agreement", "top1_agreement", tenths),
    ("tokens measured", "tokens", numbers.count),
    ("active ratio", "active_ratio", tenths),
    ("nominal ratio", "nominal_active_ratio", tenths),
    ("active parameters", "active_parameters", numbers.count),
    ("total parameters", "total_parameters", numbers.count),
    ("router parameters", "router_parameters", numbers.count),
    ("weights in memory", "total_bytes", numbers.memory),
)


def _with_interval(record: Record, name: str, kl: Cell) -> Cell:
    """Return a model's KL with half of its 95 % interval beside it, where that is known."""
    interval = _pair(record.measured, "scores", name, "kl_interval")
    if interval is None or not kl.text:
        return kl
    return replace(kl, note=f"± {numbers.share((interval[1] - interval[0]) / 2)}")


def score_table(record: Record) -> Table:
    """Quality and size of all models that were scored; no rows if none was.

    Rows that say nothing are left out: no routers, a nominal ratio that is the measured one.
    """
    scores = part(record.measured, "scores")
    columns = read.names(scores)
    rows = {
        key: (label, [cell(form, figure(scores, name, key)) for name in columns])
        for label, key, form in SCORES
    }
    if "kl" in rows:
        rows["kl"] = (
            rows["kl"][0],
            [_with_interval(record, n, c) for n, c in zip(columns, rows["kl"][1], strict=True)],
        )
    files = [cell(numbers.memory, read.size(record, name, "on disk")) for name in columns]
    stored = [cell(tenths, read.stored_ratio(record, name)) for name in columns]
    rows["files"] = "files on disk", files
    rows["stored"] = "stored, of the original", stored
    for key in _idle({key: cells for key, (_, cells) in rows.items()}, read.by_projections(record)):
        del rows[key]
    return Table(columns, [(label, cells) for label, cells in rows.values() if _has_values(cells)])


def _idle(rows: Mapping[str, Sequence[Cell]], carved: bool) -> set[str]:
    """Rows that say nothing of a result that is dense layers made experts, or of any other."""
    idle = set() if any(c.value for c in rows["router_parameters"]) else {"router_parameters"}
    if not carved:
        alike = all(c.value in (None, 1.0) for c in rows["stored"])
        return idle | {"active_ratio", "nominal_active_ratio", *(["stored"] if alike else [])}
    active, nominal = ([c.text for c in rows[k]] for k in ("active_ratio", "nominal_active_ratio"))
    return idle | {"stored"} | ({"nominal_active_ratio"} if active == nominal else set())


def _has_values(cells: Sequence[Cell]) -> bool:
    """Whether a row says anything."""
    return any(cell.value is not None for cell in cells)


def text_table(record: Record) -> Table:
    """Perplexity by kind of text; where a result is compared, how much worse it is, and its KL. No
    rows if text was of one kind."""
    scores = part(record.measured, "scores")
    columns = [name for name in read.names(scores) if part(scores, name, "sources")]
    compared = {"result", "original"} <= {*columns}
    rows = []
    for kind in dict.fromkeys(kind for name in columns for kind in part(scores, name, "sources")):
        values = {name: figure(scores, name, "sources", kind, "perplexity") for name in columns}
        cells = [cell(numbers.perplexity, value) for value in values.values()]
        if compared:
            result, original = values["result"], values["original"]
            worse = result / original - 1 if result is not None and original else None
            kl = figure(scores, "result", "sources", kind, "kl")
            cells += [cell(tenths, worse), cell(numbers.share, kl)]
        rows.append((kind, cells))
    return Table([*columns, "worse by", "KL"] if compared else columns, rows)


def task_table(record: Record) -> Table:
    """Every task's headline figure, where it has one, its standard error, and recovery: the
    result's over the original's; below them their means. No rows if no task was measured."""
    scores = part(record.measured, "scores")
    columns = [name for name in read.names(scores) if part(scores, name, "tasks")]
    tasks = dict.fromkeys(task for name in columns for task in part(scores, name, "tasks"))
    rows = [_task(task, [part(scores, name, "tasks", task) for name in columns]) for task in tasks]
    rows = [(label, cells) for label, cells in rows if _has_values(cells)]
    values = [[c.value for c in cells if c.value is not None] for _, cells in rows]
    complete = [v for v in values if len(v) == len(columns)]
    if len(complete) > 1:
        means = [sum(column) / len(complete) for column in zip(*complete, strict=True)]
        rows.append(("mean", [cell(tenths, mean) for mean in means]))
    if not {"result", "original"} <= {*columns}:
        return Table(columns, rows)
    for _, cells in rows:
        result, original = (cells[columns.index(name)].value for name in ("result", "original"))
        recovery = result / original if result is not None and original else None
        cells.append(cell(tenths, recovery))
    return Table([*columns, "recovery"], rows)


def _task(task: str, results: Sequence[Values]) -> tuple[str, list[Cell]]:
    """A task's row: of each model's figures the headline and its standard error."""
    metric = next((m for m in HEADLINE if any(m in scores for scores in results)), "")
    error = "stderr" if metric == "acc" else f"{metric}_stderr"
    cells = []
    for scores in results:
        value, e = figure(scores, metric), figure(scores, error)
        cells.append(Cell(tenths(value), "" if e is None else f"± {100 * e:.1f}", value=value))
    return f"{task}, {metric.replace('_', ' ')}", cells


LOOPS = (("looping", "end in a loop"), ("repetition", "4-grams said before"))


def loop_table(record: Record) -> Table:
    """How continuations repeat themselves, by temperature; no rows if that was not measured."""
    scores = part(record.measured, "scores")
    columns = [name for name in read.names(scores) if part(scores, name, "generations")]
    heats = dict.fromkeys(t for name in columns for t in part(scores, name, "generations"))
    rows = []
    for heat in heats:
        where = "greedy" if heat == "0" else f"temperature {heat}"
        for key, label in LOOPS:
            values = [figure(scores, name, "generations", heat, key) for name in columns]
            rows.append((f"{where}: {label}", [cell(tenths, v) for v in values]))
    return Table(columns, rows)


# --- speed ---------------------------------------------------------------------------------------

SPEEDS: tuple[tuple[str, str, str, Format], ...] = (
    ("prefill, tokens/s", "prefill_tokens_per_second", "prefill", numbers.rate),
    ("decode, tokens/s", "decode_tokens_per_second", "decode", numbers.rate),
    ("time to first token", "first_token_seconds", "", numbers.duration),
    ("peak memory", "peak_memory_bytes", "", numbers.memory),
)
"""Rows: a label, the key of the value, and what its spread and its ratio are called."""


def speed_table(record: Record) -> Table:
    """Speed and memory of all models that were timed, and the ratio to the original."""
    speeds = part(record.measured, "speed")
    columns = read.names(speeds)
    ratios = bool(part(record.measured, "speed_ratio"))
    rows = []
    for label, key, what, form in SPEEDS:
        values = {name: figure(speeds, name, key) for name in columns}
        spreads = {name: _pair(speeds, name, f"{what}_spread") or () for name in columns}
        cells = [
            Cell(form(value), "–".join(map(numbers.rate, spreads[name])), value=value)
            for name, value in values.items()
        ]
        beside = [ratio_cell(record, what) if what else Cell("")] if ratios else []
        rows += [(label, [*cells, *beside])] if _has_values(cells) else []
    return Table([*columns, "ratio"] if ratios else columns, rows)


UNCLEAR = "no clear difference"
TONES = {"faster": "better", "slower": "worse", UNCLEAR: "unsure"}


def ratio_cell(record: Record, what: str) -> Cell:
    """Return a speed relative to the original's, in words too; no number where it is unclear."""
    ratio = figure(record.measured, "speed_ratio", what)
    word = pace(ratio, _ratio_spread(record, what))
    if word == UNCLEAR:
        return Cell("", word, TONES[word], ratio)
    return Cell(numbers.times(ratio), word, TONES.get(word, ""), ratio)


def _ratio_spread(record: Record, what: str) -> tuple[float, float] | None:
    """The least and the greatest ratio of all rounds; of records without it, what it may be."""
    key, measured = f"{what}_spread", record.measured
    if spread := _pair(measured, "speed_ratio", key):
        return spread
    result, original = (_pair(measured, "speed", name, key) for name in ("result", "original"))
    if not (result and original and all(original)):
        return None
    return result[0] / original[1], result[1] / original[0]


def _pair(mapping: Values, *keys: str) -> tuple[float, float] | None:
    """The two numbers at a path; None of anything else."""
    values = part(mapping, *keys[:-1]).get(keys[-1])
    if not isinstance(values, list | tuple) or len(values) != 2:
        return None
    pair = [v for v in values if isinstance(v, int | float)]
    return (pair[0], pair[1]) if len(pair) == 2 else None


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


# --- layers --------------------------------------------------------------------------------------

FINDINGS = 8
"""Figures of a method's own that a table has columns for."""
PLAIN: dict[str, Callable[[LayerRecord], float]] = {
    "neurons before": lambda layer: layer.width_before,
    "neurons": lambda layer: layer.width,
    "a token runs": lambda layer: layer.active_width,
    "experts": lambda layer: layer.experts,
    "top-k": lambda layer: layer.top_k,
}
"""Figures of every layer; 0 where it has none."""


def layer_table(record: Record) -> Table:
    """A row a layer: what it is, how wide, and every plain figure that its method saw of it."""
    figures = [dict(_scalars({**x.shape, **x.analysis})) for x in record.layers]
    names = dict.fromkeys(name for row in figures for name in row)
    of_method = {name: [row.get(name) for row in figures] for name in names}
    telling = [(name, values) for name, values in of_method.items() if len(set(values)) > 1]
    columns: dict[str, list[float | None]] = {
        name: [float(get(layer)) or None for layer in record.layers] for name, get in PLAIN.items()
    }
    columns |= dict(telling[:FINDINGS])
    columns = {n: values for n, values in columns.items() if any(v is not None for v in values)}
    rows = []
    for n, layer in enumerate(record.layers):
        form = Cell(layer.told or f"{layer.kind}, as it was")
        rows.append((str(layer.index), [form, *(cell(_plain, v[n]) for v in columns.values())]))
    return Table(["what it is", *columns], rows)


def _scalars(values: Values, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The plain figures of a mapping and of those inside it, by name."""
    for key, inner in values.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(inner, dict):
            yield from _scalars(inner, f"{name}: ")
        elif (value := figure(values, key)) is not None:
            yield name, value


def _plain(value: float | None) -> str:
    """A figure to four digits; whole numbers exactly."""
    if value is None:
        return numbers.NONE
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


# --- several runs --------------------------------------------------------------------------------


def overview(records: Sequence[Record]) -> Table:
    """The runs as rows, by their number; columns that no run has a figure for are left out."""
    compared = dict.fromkeys(n for r in records for n in read.comparisons(r) if not n.isdecimal())
    models = {"result": "perplexity", "original": "the original’s"}
    models |= {name: f"{name}, perplexity" for name in compared}
    rows = []
    for record in records:
        scores = part(record.measured, "scores")
        cells = {
            head: cell(numbers.perplexity, figure(scores, name, "perplexity"))
            for name, head in models.items()
        }
        cells |= {
            "KL": cell(numbers.share, figure(scores, "result", "kl")),
            "tasks kept": cell(tenths, figure(scores, "result", "recovery")),
            "active ratio": cell(tenths, read.active_ratio(record)),
            "stored": cell(tenths, read.stored_ratio(record)),
            "experts": Cell(_routed(record)),
            "on disk": cell(numbers.memory, read.size(record, "result", "on disk")),
            "in memory": cell(numbers.memory, read.size(record, "result", "in memory")),
            "prefill": ratio_cell(record, "prefill"),
            "decode": ratio_cell(record, "decode"),
        }
        rows.append(cells)
    heads = [h for h in rows[0] if any(cells[h].text != numbers.NONE for cells in rows)]
    return Table(heads, [(str(n), [cells[h] for h in heads]) for n, cells in enumerate(rows, 1)])


def _routed(record: Record) -> str:
    """How many experts of how many a token runs in the layers that route."""
    layers = [layer for layer in record.layers if layer.experts]
    if not layers:
        return numbers.NONE
    top_ks, experts = ({layer.top_k for layer in layers}, {layer.experts for layer in layers})
    return " of ".join(numbers.between(min(n), max(n)) for n in (top_ks, experts))
