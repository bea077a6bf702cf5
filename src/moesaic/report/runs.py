"""Several runs beside each other: a row a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.record import Record
from moesaic.report import figures, read
from moesaic.report.read import Cell, figure, part


@dataclass(frozen=True)
class Row:
    """A run."""

    number: int
    model: str
    made: str
    words: str
    """Everything that a search finds it by, in lower case."""
    cells: list[Cell]


@dataclass(frozen=True)
class Overview:
    """A table of runs."""

    columns: list[str]
    rows: list[Row]


def overview(records: Sequence[Record]) -> Overview:
    """The runs as rows; columns that no run has a figure for are left out."""
    compared = dict.fromkeys(n for r in records for n in read.comparisons(r) if not n.isdecimal())
    models = {"result": "perplexity", "original": "the original’s"}
    models |= {name: f"{name}, perplexity" for name in compared}
    rows = []
    for record in records:
        scores = part(record.measured, "scores")
        ours = part(scores, "result")
        cells = {
            head: _cell(figures.perplexity, figure(scores, name, "perplexity"))
            for name, head in models.items()
        }
        cells |= {
            "KL": _cell(figures.share, figure(ours, "kl")),
            "tasks kept": _cell(read.tenths, figure(ours, "recovery")),
            "active ratio": _cell(read.tenths, read.active_ratio(record)),
            "stored": _cell(read.tenths, read.stored_ratio(record)),
            "experts": Cell(_routed(record)),
            "on disk": _cell(figures.memory, read.size(record, "result", "on disk")),
            "in memory": _cell(figures.memory, read.size(record, "result", "in memory")),
            "prefill": read.ratio_cell(record, "prefill"),
            "decode": read.ratio_cell(record, "decode"),
        }
        rows.append((record, cells))
    heads = list(rows[0][1])
    kept = [h for h in heads if any(cells[h].text != figures.NONE for _, cells in rows)]
    return Overview(
        kept,
        [
            Row(n, read.model_name(r), read.made(r), _words(r), [cells[h] for h in kept])
            for n, (r, cells) in enumerate(rows, 1)
        ],
    )


def _cell(form: read.Format, value: float | None) -> Cell:
    return Cell(form(value), value=value)


def _words(record: Record) -> str:
    """Names, words and options of a run, and what became of its layers."""
    options = [f"{k} {v}" for step in record.steps for k, v in read.pairs(step.config)]
    told = dict.fromkeys(layer.told for layer in read.changed(record))
    said = [read.title(record), read.made(record), *options, *told]
    return " ".join(said).lower().replace(figures.NBSP, " ")


def _routed(record: Record) -> str:
    """How many experts of how many a token runs in the layers that route."""
    layers = [layer for layer in record.layers if layer.experts]
    if not layers:
        return figures.NONE
    run, of = ({layer.top_k for layer in layers}, {layer.experts for layer in layers})
    return f"{_span(run)} of {_span(of)}"


def _span(values: set[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least}–{most}"
