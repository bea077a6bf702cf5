"""Reading a record, any part of which may be missing, and the tables of its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from moesaic.report import figures

Record = Mapping[str, Any]

METHODS = {"more": "MoRE", "naee": "NAEE", "naee-skipping": "NAEE skipping"}
VARIANTS = {
    "static": "static pruning",
    "backbone": "the backbone alone",
    "random": "random routing",
    "naive": "petals without a backbone",
}


# --- parts ---------------------------------------------------------------------------------------


def part(record: Any, *keys: str) -> Mapping[str, Any]:
    """The mapping at a path; empty where there is none."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record if isinstance(record, Mapping) else {}


def figure(record: Any, *keys: str) -> float | None:
    """The number at a path; None where there is none."""
    value = part(record, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def names(of: Mapping[str, Any]) -> list[str]:
    """Models in reading order: the original, the result, then the comparisons."""
    first = [name for name in ("original", "result") if name in of]
    return first + [name for name in of if name not in first]


def by_layer(of: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """What is kept by layer, in the model's order."""
    return sorted((int(i), value) for i, value in of.items())


def petals(record: Record) -> int:
    """The most petals that a layer has; 0 where nothing is routed."""
    layers = [len(layer.get("petals") or ()) for _, layer in by_layer(part(record, "layers"))]
    shares = [len(layer.get("share") or ()) for _, layer in by_layer(part(record, "routing"))]
    return max([0, *layers, *shares])


# --- names ---------------------------------------------------------------------------------------


def model_name(record: Record) -> str:
    """The model as it was asked for; of a path, its last part."""
    name = str(record.get("model") or "a model")
    looks_like_path = name.startswith(("/", "./", "../", "~")) or "\\" in name
    return (PurePath(name.replace("\\", "/")).name or name) if looks_like_path else name


def method_name(record: Record) -> str:
    """The method as its paper writes it, with the variant if it was not the full one."""
    method = str(record.get("method") or "")
    variant = str(part(record, "config").get("variant") or "full")
    known = METHODS.get(method, method)
    return known if variant == "full" else f"{known}, {VARIANTS.get(variant, variant)}"


def active_ratio(record: Record) -> float | None:
    """Measured where it was, else what was asked for."""
    measured = figure(record, "scores", "result", "active_ratio")
    return measured if measured is not None else figure(record, "config", "active")


def title(record: Record) -> str:
    """One line: what was made of what, how far."""
    line = model_name(record)
    if method := method_name(record):
        line += f", carved with {method}"
    ratio = active_ratio(record)
    return line if ratio is None else f"{line} to {figures.percent(ratio)} active"


# --- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A figure, and what stands small beside it."""

    text: str
    note: str = ""
    slow: bool = False


@dataclass(frozen=True)
class Figures:
    """Figures as rows, models as columns."""

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


Format = Callable[[float | None], str]

SCORES: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", figures.perplexity),
    ("tokens measured", "tokens", figures.count),
    ("active ratio", "active_ratio", lambda v: figures.percent(v, 1)),
    ("nominal ratio", "nominal_active_ratio", lambda v: figures.percent(v, 1)),
    ("active parameters", "active_parameters", figures.count),
    ("total parameters", "total_parameters", figures.count),
    ("router parameters", "router_parameters", figures.count),
)
SPEEDS: tuple[tuple[str, str, str, str, Format], ...] = (
    ("prefill, tokens/s", "prefill_tokens_per_second", "prefill_spread", "prefill", figures.rate),
    ("decode, tokens/s", "decode_tokens_per_second", "decode_spread", "decode", figures.rate),
    ("time to first token", "first_token_seconds", "", "", figures.duration),
    ("peak memory", "peak_memory_bytes", "", "", figures.memory),
)


def score_table(record: Record) -> Figures:
    """Quality and size of all models that were scored; no rows if none was."""
    scores = part(record, "scores")
    columns = names(scores)
    rows = []
    for label, key, form in SCORES:
        values = [figure(scores, name, key) for name in columns]
        if any(value is not None for value in values):
            rows.append((label, [Cell(form(value)) for value in values]))
    return Figures(columns, rows)


def speed_table(record: Record) -> Figures:
    """Speed and memory of all models that were timed, and the ratio to the original."""
    speeds = part(record, "speed")
    columns = names(speeds)
    ratios = part(record, "speed_ratio")
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
            cells.append(ratio_cell(figure(ratios, ratio)) if ratio else Cell(""))
        rows.append((label, cells))
    return Figures(columns + (["ratio"] if ratios else []), rows)


def ratio_cell(ratio: float | None) -> Cell:
    """A speed relative to the original's, in words too."""
    word = pace(ratio)
    return Cell(figures.times(ratio), word, slow=word == "slower")


def pace(ratio: float | None) -> str:
    """faster, slower, or as fast: what the written figure says."""
    if ratio is None or ratio != ratio:
        return ""
    shown = round(ratio, 2)
    return "slower" if shown < 1 else "faster" if shown > 1 else "as fast"


def within_spread(record: Record, what: str) -> bool:
    """Whether the rounds of result and original overlap, so that either may be the faster."""
    pairs = [part(record, "speed", name).get(f"{what}_spread") for name in ("result", "original")]
    if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        return False
    (low, high), (other_low, other_high) = pairs  # type: ignore[misc]
    return bool(low <= other_high and other_low <= high)


def pairs(of: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Options by name, as text."""
    return [(key.replace("_", " "), figures.plain(value)) for key, value in of.items()]
