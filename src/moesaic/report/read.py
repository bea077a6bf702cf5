"""Reading a record: its parts, names, titles and ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TypeVar

from moesaic.config import ROUNDED
from moesaic.record import Heat, LayerRecord, Record, Row, Step
from moesaic.types import Values

V = TypeVar("V")

# --- parts of what was measured ------------------------------------------------------------------


def part(mapping: object, *keys: str) -> Values:
    """The mapping at a path; empty where there is none."""
    for key in keys:
        mapping = mapping.get(key) if isinstance(mapping, Mapping) else None
    return mapping if isinstance(mapping, Mapping) else {}


def figure(mapping: object, *keys: str) -> float | None:
    """The number at a path; None where there is none."""
    value = part(mapping, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def names(scores: Values) -> list[str]:
    """Models in reading order: the original, the result, then the comparisons."""
    first = [name for name in ("original", "result") if name in scores]
    return first + [name for name in scores if name not in first]


def comparisons(record: Record) -> list[str]:
    """The names of the models that were measured beside original and result."""
    return [n for n in part(record.measured, "scores") if n not in ("original", "result")]


def by_layer(values: Mapping[str, V]) -> list[tuple[int, V]]:
    """What is kept by layer, in the model's order."""
    return sorted((int(i), value) for i, value in values.items())


def routing(record: Record) -> list[tuple[int, Values]]:
    """Where tokens went in the layers of the result that route, in the model's order."""
    return [(i, r) for i, r in by_layer(part(record.measured, "routing")) if r.get("share")]


# --- steps and layers ----------------------------------------------------------------------------


def _main_step(record: Record) -> Step | None:
    """The last step that changed the model's shape, else the last; None where there is none."""
    steps = [step for step in record.steps if step.ratio] or record.steps
    return steps[-1] if steps else None


def by_projections(record: Record) -> bool:
    """Dense layers were made experts: what a token runs is told of their projections."""
    step = _main_step(record)
    return step is not None and step.ratio == "projections"


def unit(record: Record) -> str:
    """The name of the things that the result's routers choose."""
    step = _main_step(record)
    return step.unit if step else "expert"


def variants(record: Record) -> dict[str, str]:
    """Comparisons in words, by name."""
    described = {name: words for step in record.steps for name, words in step.variants.items()}
    return described | {name: f"the original quantised to {name}" for name in rounded(record)}


def rounded(record: Record) -> list[str]:
    """The types that the original was rounded to, to be measured beside the result."""
    return [name for name in comparisons(record) if name in ROUNDED]


def interleaved(record: Record) -> bool:
    """Models were timed in turn; False where there was room for one at a time only."""
    return record.measured.get("speed_interleaved", True) is not False


def changed(record: Record) -> list[LayerRecord]:
    """The layers that are not as they were in the base."""
    return [layer for layer in record.layers if layer.changed]


def renumbered(record: Record) -> bool:
    """The numbers of experts count those that stayed."""
    return any(0 < layer.experts < layer.experts_before for layer in record.layers)


def most_experts(record: Record) -> int:
    """The most experts that a layer of the result routes to; 0 where nothing is routed."""
    counts = [layer.experts for layer in record.layers]
    return max([0, *counts, *(len(r["share"]) for _, r in routing(record))])


def trainings(record: Record) -> list[Values]:
    """What the steps that trained say of it."""
    return [training for step in record.steps if (training := part(step.summary, "training"))]


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
    """Return one line: what was made of what, how far."""
    return ", ".join(part for part in (model_name(record), done(record)) if part)


def step_labels(record: Record) -> str:
    """The verbs and methods of all steps, short."""
    return " · ".join(f"{step.verb}, {step.label}" for step in record.steps)


def stored_ratio(record: Record, name: str = "result") -> float | None:
    """Parameters that a model stores, relative to the original."""
    scores = record.measured.get("scores")
    model = figure(scores, name, "total_parameters")
    original = figure(scores, "original", "total_parameters")
    return model / original if model is not None and original else None


def active_ratio(record: Record, name: str = "result") -> float | None:
    """What a token runs as measured: of dense layers made experts the share of their projections,
    of other results the share of the original's active parameters."""
    scores = part(record.measured, "scores")
    if by_projections(record):
        return figure(scores, name, "active_ratio")
    model, original = (figure(scores, n, "active_parameters") for n in (name, "original"))
    return model / original if model is not None and original else None


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
    messages = list(record.log.get("warnings") or ())
    speed = [message for message in messages if message in (record.log.get("of_speed") or ())]
    return speed, [message for message in messages if message not in speed]


def compared_ratio(record: Record) -> tuple[str, Callable[[str], float | None]]:
    """The ratio that says most of the models of a run, in a word, and how to look it up."""
    step = _main_step(record)
    if step is not None and step.ratio == "stored":
        return "stored", lambda name: stored_ratio(record, name)
    return "active", lambda name: active_ratio(record, name)


def models(record: Record) -> tuple[list[tuple[str, float | None, float | None]], str]:
    """Every scored model's name, perplexity and ratio; and what the ratio is."""
    scores, (what, ratio) = part(record.measured, "scores"), compared_ratio(record)
    return [(n, figure(scores, n, "perplexity"), ratio(n)) for n in names(scores)], what


def routes(record: Record, caption: str = "") -> Heat:
    """The share of tokens by layer and expert, and its divergence from uniform as bars."""
    routed = routing(record)
    count = max((len(r["share"]) for _, r in routed), default=0)
    return Heat(
        section="Layer by layer",
        title="Where tokens went.",
        caption=caption,
        rows=tuple(
            Row(str(i), tuple(100 * s for s in r["share"]), bar=figure(r, "jsd")) for i, r in routed
        ),
        columns=tuple(map(str, range(count))),
        column=unit(record),
        side="JSD from uniform",
        form=".1f",
        of="%",
        written=".0f",
    )
