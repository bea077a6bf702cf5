"""Tables of a record's figures: quality, size, tasks, speed, layers; several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from moesaic.data.sources import HEADLINE
from moesaic.record import LayerRecord, Record
from moesaic.report import facts, numbers
from moesaic.report.blocks import Cell, Format, Table, cell
from moesaic.report.facts import figure, pair, part
from moesaic.types import Values

tenths = partial(numbers.percent, digits=1)


def _has_values(cells: Sequence[Cell]) -> bool:
    return any(cell.value is not None for cell in cells)


# --- quality and size ----------------------------------------------------------------------------

SCORES: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", numbers.perplexity),
    ("KL from the original, nats", "kl", numbers.share),
    ("top-1 agreement", "top1_agreement", tenths),
    ("tokens measured", "tokens", numbers.count),
    ("active ratio", "active_ratio", tenths),
    ("active ratio, even routing", "nominal_active_ratio", tenths),
    ("parameters a token uses", "active_parameters", numbers.count),
    ("parameters", "total_parameters", numbers.count),
    ("router parameters", "router_parameters", numbers.count),
    ("weights in memory", "total_bytes", numbers.memory),
)


def score_table(record: Record) -> Table:
    """Return quality and size of all models that were scored; no rows if none was.

    Rows without information are left out: no routers, active ratios beside an original mixture.
    """
    scores = facts.scores(record)
    columns = facts.names(scores)
    rows = {
        key: (label, [cell(form, figure(scores, name, key)) for name in columns])
        for label, key, form in SCORES
    }
    for n, name in enumerate(columns):
        if interval := pair(scores, name, "kl_interval"):
            half = numbers.share((interval[1] - interval[0]) / 2)
            rows["kl"][1][n] = replace(rows["kl"][1][n], note=f"± {half}")
    files = [cell(numbers.memory, facts.size(record, name, "on disk")) for name in columns]
    rows["files"] = "files on disk", files
    active, nominal, routers = (
        rows[key][1] for key in ("active_ratio", "nominal_active_ratio", "router_parameters")
    )
    dense = figure(scores, "original", "active_ratio") in (None, 1.0)
    carved = dense and any(c.value not in (None, 1.0) for c in active)
    idle = [] if carved else ["active_ratio"]
    alike = [c.text for c in active] == [c.text for c in nominal]
    idle += ["nominal_active_ratio"] if not carved or alike else []
    idle += [] if carved and any(c.value for c in routers) else ["router_parameters"]
    kept = (row for key, row in rows.items() if key not in idle)
    return Table(columns, [(label, cells) for label, cells in kept if _has_values(cells)])


def text_table(record: Record) -> Table:
    """Return perplexity by kind of text; with an original, how much worse the result or its GGUF
    file is, and its KL.

    No rows if the text was of one kind.
    """
    scores, wanted = facts.scores(record), facts.wanted(record)
    columns = [name for name in facts.names(scores) if part(scores, name, "sources")]
    compared = {wanted, "original"} <= {*columns}
    rows = []
    for kind in dict.fromkeys(kind for name in columns for kind in part(scores, name, "sources")):
        values = {name: figure(scores, name, "sources", kind, "perplexity") for name in columns}
        cells = [cell(numbers.perplexity, value) for value in values.values()]
        if compared:
            result, original = values[wanted], values["original"]
            worse = result / original - 1 if result is not None and original else None
            kl = figure(scores, wanted, "sources", kind, "kl")
            cells += [cell(tenths, worse), cell(numbers.share, kl)]
        rows.append((kind, cells))
    return Table([*columns, "worse by", "KL"] if compared else columns, rows)


def task_table(record: Record) -> Table:
    """Return every task's headline figure with its standard error, and recovery; then the means.

    Recovery is the result's figure over the original's. No rows if no task was measured.
    """
    scores = part(record.measured, "scores")
    columns = [name for name in facts.names(scores) if part(scores, name, "tasks")]
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
    metric = next((m for m in HEADLINE if any(m in scores for scores in results)), "")
    error = "stderr" if metric == "acc" else f"{metric}_stderr"
    cells = []
    for scores in results:
        value, e = figure(scores, metric), figure(scores, error)
        cells.append(Cell(tenths(value), "" if e is None else f"± {100 * e:.1f}", value=value))
    return f"{task}, {metric.replace('_', ' ')}", cells


LOOPS = (("looping", "end in a loop"), ("repetition", "repeated 4-grams"))


def loop_table(record: Record) -> Table:
    """Return how continuations repeat themselves, by temperature; no rows if not measured."""
    scores = part(record.measured, "scores")
    columns = [name for name in facts.names(scores) if part(scores, name, "generations")]
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
    ("parameters a token uses", "active_parameters", "", numbers.count),
    ("files on disk", "file_bytes", "", numbers.memory),
)
"""Rows: a label, the key of the value, and the word for its spread and its ratio."""
ROUNDS = 5
"""Fewest rounds after which speeds are called faster or slower."""
GAP = 0.02
"""Least difference of medians that is called so: five rounds agree by chance one time in 16."""
UNCLEAR = "no clear difference"
TONES = {"faster": "better", "slower": "worse", UNCLEAR: "unsure"}


def speed_table(record: Record) -> Table:
    """Return speed and memory of all models that were timed, and the ratio to the other one."""
    speeds = part(record.measured, "speed")
    columns = facts.names(speeds)
    ratios = bool(part(record.measured, "speed_ratio"))
    rows = []
    for label, key, what, form in SPEEDS:
        cells = [
            Cell(form(value), "–".join(map(numbers.rate, spread)), value=value)
            for name in columns
            for value in [figure(speeds, name, key)]
            for spread in [pair(speeds, name, f"{what}_spread") or ()]
        ]
        beside = [ratio_cell(record, what) if what else Cell("")] if ratios else []
        rows += [(label, [*cells, *beside])] if _has_values(cells) else []
    return Table([*columns, "ratio"] if ratios else columns, rows)


def ratio_cell(record: Record, what: str) -> Cell:
    """Return a speed relative to the other model's, in words too; no number where it is unclear.

    The ratio is that of the medians in the table of speeds.
    """
    speeds, ratios = part(record.measured, "speed"), part(record.measured, "speed_ratio")
    ours, theirs = (
        figure(speeds, name, f"{what}_tokens_per_second") for name in ("result", "original")
    )
    ratio = ours / theirs if ours and theirs else figure(ratios, what)
    rounds = figure(ratios, "rounds")
    word = pace(ratio, pair(ratios, f"{what}_spread"), ROUNDS if rounds is None else rounds)
    text = "" if word == UNCLEAR else numbers.times(ratio)
    return Cell(text, word, TONES.get(word, ""), ratio)


def pace(ratio: float | None, spread: tuple[float, float] | None, rounds: float = ROUNDS) -> str:
    """Return "faster" or "slower" if every round agrees, by at least :data:`GAP`.

    Args:
        ratio: of the medians.
        spread: the least and the greatest ratio of all rounds.
        rounds: how many there were.

    >>> pace(1.3, (1.1, 1.4)), pace(1.3, (0.9, 1.4)), pace(1.3, (1.1, 1.4), 3), pace(None, None)
    ('faster', 'no clear difference', 'no clear difference', '')
    """
    if ratio is None or ratio != ratio:
        return ""
    low, high = spread or (ratio, ratio)
    if rounds < ROUNDS or low >= high:
        return UNCLEAR
    if low > 1 and ratio >= 1 + GAP:
        return "faster"
    return "slower" if high < 1 and ratio <= 1 - GAP else UNCLEAR


# --- layers --------------------------------------------------------------------------------------

FINDINGS = 8
"""Figures of single methods that the table of layers has columns for."""
PLAIN: dict[str, Callable[[LayerRecord], float]] = {
    "neurons before": lambda layer: layer.width_before,
    "neurons": lambda layer: layer.width,
    "a token runs": lambda layer: layer.active_width,
    "experts": lambda layer: layer.experts,
    "top-k": lambda layer: layer.top_k,
}
"""Figures of every layer; 0 where it has none."""


def layer_table(record: Record) -> Table:
    """Return a table of layers: form, widths, and every figure of the method."""
    found = [dict(_scalars({**x.shape, **x.analysis})) for x in record.layers]
    names = dict.fromkeys(name for row in found for name in row)
    of_method = {name: [row.get(name) for row in found] for name in names}
    varying = [(name, values) for name, values in of_method.items() if len(set(values)) > 1]
    columns: dict[str, list[float | None]] = {
        name: [float(get(layer)) or None for layer in record.layers] for name, get in PLAIN.items()
    }
    columns |= dict(varying[:FINDINGS])
    columns = {n: values for n, values in columns.items() if any(v is not None for v in values)}
    rows = []
    for n, layer in enumerate(record.layers):
        form = Cell(layer.text or f"{layer.kind}, as it was")
        rows.append((str(layer.index), [form, *(cell(_plain, v[n]) for v in columns.values())]))
    return Table(["what it is", *columns], rows, "layers")


def _scalars(values: Values, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a mapping and of those inside it, by name."""
    for key, inner in values.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(inner, dict):
            yield from _scalars(inner, f"{name}: ")
        elif (value := figure(values, key)) is not None:
            yield name, value


def _plain(value: float | None) -> str:
    """Return a figure to four digits; whole numbers exactly."""
    if value is None:
        return numbers.NONE
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


# --- several runs --------------------------------------------------------------------------------


def overview(records: Sequence[Record]) -> Table:
    """Return the runs as rows by number; columns that no run has a figure for are left out."""
    rows = []
    for record in records:
        scores, wanted = facts.scores(record), facts.wanted(record)
        rows.append(
            {
                "what was done": Cell(facts.step_labels(record) or numbers.NONE),
                "perplexity": cell(numbers.perplexity, figure(scores, wanted, "perplexity")),
                "of original": cell(numbers.perplexity, figure(scores, "original", "perplexity")),
                "KL": cell(numbers.share, figure(scores, wanted, "kl")),
                "tasks kept": cell(tenths, figure(scores, "result", "recovery")),
                "active": cell(tenths, facts.measured_active_ratio(record)),
                "parameters kept": cell(
                    tenths, facts.relative(record, "result", "total_parameters")
                ),
                "on disk": cell(numbers.memory, facts.size(record, wanted, "on disk")),
                "prefill": ratio_cell(record, "prefill"),
                "decode": ratio_cell(record, "decode"),
            }
        )
    heads = [h for h in rows[0] if any(cells[h].text not in ("", numbers.NONE) for cells in rows)]
    labels = [f"{n}. {facts.model_name(record)}" for n, record in enumerate(records, 1)]
    body = [(label, [cells[h] for h in heads]) for label, cells in zip(labels, rows, strict=True)]
    return Table(heads, body, "layers")
