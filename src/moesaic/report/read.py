"""Reading a record, any part of which may be missing, and the tables of its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from moesaic.report import figures

Record = Mapping[str, Any]

METHODS = {
    "more": "MoRE",
    "dsmoe": "DSMoE",
    "tomoe": "ToMoE",
    "naee": "NAEE",
    "naee-skipping": "NAEE",
    "cd-moe": "CD-MoE",
    "tune": "",
}
FAMILIES = {"naee": "prune", "naee-skipping": "skip", "cd-moe": "condense", "tune": "tune"}
CRITERIA = {
    "reconstruction": "NAEE",
    "pairwise": "pairwise reconstruction",
    "random": "random choice",
    "frequency": "frequency",
    "gate": "gate weight",
    "ean": "EAN",
    "man": "MAN",
    "msan": "MSAN",
    "reap": "REAP",
    "aimer": "AIMER",
}
KEEPS = {
    "shared": "CD-MoE-S",
    "shared+routed": "CD-MoE-SR",
    "attention": "Block Drop",
    "nothing": "Layer Drop",
}
DONE = {"prune": "pruned", "skip": "skipping", "condense": "condensed"}
GONE = {"attention": "feed-forward blocks dropped", "nothing": "layers dropped"}
TRAINED = {
    "condensed": "the condensed layers",
    "routers": "the routers",
    "lora": "low-rank updates",
    "all": "all weights",
}
VARIANTS = {
    "static": "static pruning",
    "more": "MoRE",
    "backbone": "the backbone alone",
    "random": "random routing",
    "naive": "petals without a backbone",
    "top-k": "a fixed number of blocks (LLaMA-MoE)",
    "no-straight-through": "training without straight-through",
    "no-piecewise": "training without the threshold",
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


def listed(of: Any) -> list[tuple[int, Mapping[str, Any]]]:
    """The mappings of a list that has one a layer, or of what is kept by layer."""
    if isinstance(of, Mapping):
        found = by_layer(of)
    else:
        found = list(enumerate(of)) if isinstance(of, list | tuple) else []
    return [(i, layer) for i, layer in found if isinstance(layer, Mapping)]


def petals(record: Record) -> int:
    """The most petals, or experts, that a layer has; 0 where nothing is routed."""
    layers = [len(layer.get("petals") or ()) for _, layer in by_layer(part(record, "layers"))]
    shares = [len(layer.get("share") or ()) for _, layer in by_layer(part(record, "routing"))]
    return max([0, *layers, *shares])


# --- names ---------------------------------------------------------------------------------------


def model_name(record: Record) -> str:
    """The model as it was asked for; of a path, its last part."""
    name = str(record.get("model") or "a model")
    looks_like_path = name.startswith(("/", "./", "../", "~")) or "\\" in name
    return (PurePath(name.replace("\\", "/")).name or name) if looks_like_path else name


def family(record: Record) -> str:
    """carve, prune, skip, condense or tune: by the method, else by what the record holds."""
    known = FAMILIES.get(str(record.get("method")))
    if known or record.get("method"):
        return known or "carve"
    if record.get("condensed"):
        return "condense"
    if record.get("beta"):
        return "skip"
    if any("kept" in layer for _, layer in listed(record.get("layers"))):
        return "prune"
    return "tune" if record.get("tune") and not record.get("layers") else "carve"


def unit(record: Record) -> str:
    """What the result's routers choose."""
    return "petal" if family(record) == "carve" and not learned(record) else "expert"


def learned(record: Record) -> bool:
    """Whether experts were learned over weights that stayed."""
    return bool(part(record, "training"))


def trained(record: Record) -> str:
    """What was trained of the result; empty where nothing was."""
    if not record.get("tune") and record.get("method") != "tune":
        return ""
    what = str(part(record, "tune").get("what") or "")
    return TRAINED.get(what, what) or "some of it"


def is_native(record: Record) -> bool:
    """Whether transformers knows the result's architecture by itself."""
    kind = str(record.get("model_type") or "")
    return bool(kind) and not kind.startswith("moesaic_")


def method_name(record: Record) -> str:
    """The method as its paper writes it, with the variant if it was not the full one."""
    method, config = str(record.get("method") or ""), part(record, "config")
    known = METHODS.get(method, method)
    if family(record) == "prune":
        criterion = str(config.get("criterion") or "")
        return CRITERIA.get(criterion, criterion) or known
    if family(record) == "condense":
        return KEEPS.get(str(config.get("keep") or ""), known)
    variant = str(config.get("variant") or "full")
    return known if variant == "full" else f"{known}, {VARIANTS.get(variant, variant)}"


def made(record: Record) -> str:
    """What was done, in two or three words."""
    kind, method = family(record), method_name(record)
    done = [DONE.get(kind, ""), method, "trained" if trained(record) else ""]
    return ", ".join(d for d in done if d)


def active_ratio(record: Record) -> float | None:
    """Measured where it was, else what was asked for."""
    measured = figure(record, "scores", "result", "active_ratio")
    return measured if measured is not None else figure(record, "config", "active")


def stored_ratio(record: Record, name: str = "result") -> float | None:
    """Parameters that a model stores, relative to the original."""
    ours = figure(record, "scores", name, "total_parameters")
    theirs = figure(record, "scores", "original", "total_parameters")
    return ours / theirs if ours is not None and theirs else None


def compared_ratio(record: Record) -> tuple[str, Callable[[str], float | None]]:
    """The ratio that says most of the models of a run, in a word, and how to look it up."""
    if family(record) in ("prune", "condense"):
        return "stored", lambda name: stored_ratio(record, name)
    return "active", lambda name: figure(record, "scores", name, "active_ratio")


def chosen_layers(record: Record) -> list[int]:
    """The layers that were condensed, in the order in which they were chosen."""
    layers = record.get("layers")
    if isinstance(layers, list | tuple) and all(isinstance(i, int) for i in layers):
        return list(layers)
    placed = [(d["order"], i) for i, d in listed(record.get("condensed")) if "order" in d]
    return [i for _, i in sorted(placed)]


def kept_experts(record: Record) -> str:
    """How many experts stay of how many, such as 4–6 of 8; empty where that is not known."""
    layers = [d for _, d in listed(record.get("layers")) if d.get("kept") and d.get("experts")]
    if not layers:
        return ""
    kept, before = (
        _span(sorted(counts))
        for counts in ({len(d["kept"]) for d in layers}, {d["experts"] for d in layers})
    )
    return f"{kept} of {before} experts"


def skipped_calls(record: Record) -> str:
    """The share of calls that layers skip, such as 20–30 %; empty where that is not known."""
    shares = [figure(d, "skipped") for _, d in listed(record.get("layers"))]
    known = sorted(share for share in shares if share is not None)
    if not known:
        return ""
    least, most = figures.percent(known[0]), figures.percent(known[-1])
    return most if least == most else f"{least.split(figures.NBSP)[0]}–{most}"


def condensed_layers(record: Record) -> str:
    """How many layers were condensed or dropped, in words; empty where that is not known."""
    chosen, every = chosen_layers(record), len(listed(record.get("condensed")))
    if not chosen:
        return ""
    how = GONE.get(str(part(record, "config").get("keep")), "layers condensed")
    return f"{len(chosen)} of {every} {how}" if every else f"{len(chosen)} {how}"


def _span(values: Sequence[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]}–{values[-1]}"


def title(record: Record) -> str:
    """One line: what was made of what, how far."""
    line, method = model_name(record), method_name(record)
    kind, by = family(record), f" with {method}" if method else ""
    if kind == "carve":
        line += f", carved{by}" if method else ""
        ratio = active_ratio(record)
        line += "" if ratio is None else f" to {figures.percent(ratio)} active"
    elif kind == "prune":
        kept = kept_experts(record)
        line += f", pruned{by}" + (f" to {kept}" if kept else "")
    elif kind == "skip":
        skipped = skipped_calls(record)
        line += f", {skipped} of expert calls skipped{by}" if skipped else f", skipping{by}"
    elif kind == "condense":
        line += f", {condensed_layers(record) or 'condensed'}{by}"
    if what := trained(record):
        line += f", {what} trained" if kind == "tune" else f", then {what} trained"
    return line


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
STORED = "stored, of the original"
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
    ratios = [stored_ratio(record, name) for name in columns]
    if family(record) != "carve" and any(ratio not in (None, 1.0) for ratio in ratios):
        rows.append((STORED, [Cell(figures.percent(ratio, 1)) for ratio in ratios]))
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
