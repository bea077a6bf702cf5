"""Figures, names and ratios of a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath

from moesaic.config import BASELINES
from moesaic.record import Heat, Record, Row, Step
from moesaic.types import Values


def part(mapping: object, *keys: str) -> Values:
    """Return the mapping at a path of a record; empty if there is none."""
    for key in keys:
        mapping = mapping.get(key) if isinstance(mapping, Mapping) else None
    return mapping if isinstance(mapping, Mapping) else {}


def figure(mapping: object, *keys: str) -> float | None:
    """Return the number at a path of a record; None if there is none."""
    value = part(mapping, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def pair(mapping: object, *keys: str) -> tuple[float, float] | None:
    """Return the two numbers at a path of a record; None for anything else."""
    values = part(mapping, *keys[:-1]).get(keys[-1])
    if not isinstance(values, list | tuple) or len(values) != 2:
        return None
    found = [v for v in values if isinstance(v, int | float)]
    return (found[0], found[1]) if len(found) == 2 else None


# --- models --------------------------------------------------------------------------------------

FILE = "GGUF file"
"""Name of the file that a search wrote beside its result, in tables and plots."""


def scores(record: Record) -> Values:
    """Return the scores of a run's models by name, those of its GGUF file included."""
    found, file = part(record.measured, "scores"), part(record.measured, "gguf")
    if "kl" not in file:
        return found
    return {"original": file.get("against", {}), **found, FILE: file}


def wanted(record: Record) -> str:
    """Return the name of the model that the run was for: its GGUF file if it wrote one, else its
    result."""
    return FILE if part(record.measured, "gguf") else "result"


def names(scores: Values) -> list[str]:
    """Return the names of models in reading order: original, result, its file, comparisons."""
    first = [name for name in ("original", "result", FILE) if name in scores]
    return first + [name for name in scores if name not in first]


def comparisons(record: Record) -> list[str]:
    """Return the names of the models that were measured beside original and result."""
    return [n for n in part(record.measured, "scores") if n not in ("original", "result")]


def variants(record: Record) -> dict[str, str]:
    """Return words for the comparisons of all steps, by name."""
    described = {name: words for step in record.steps for name, words in step.variants.items()}
    quantised = [name for name in comparisons(record) if name in BASELINES]
    return described | {name: f"the original quantised to {name}" for name in quantised}


def model_name(record: Record) -> str:
    """Return the requested model's name; of a path, its last part."""
    name = record.model or "a model"
    looks_like_path = name.startswith(("/", "./", "../", "~")) or "\\" in name
    return (PurePath(name.replace("\\", "/")).name or name) if looks_like_path else name


def title(record: Record) -> str:
    """Return the title of a result: the model, and the change by every step."""
    done = ", then ".join(step.title for step in record.steps)
    return ", ".join(filter(None, (model_name(record), done)))


def step_labels(record: Record) -> str:
    """Return the verbs and methods of all steps, short."""
    return " · ".join(f"{step.verb}, {step.label}" for step in record.steps)


# --- sizes ---------------------------------------------------------------------------------------


def measured_active_ratio(record: Record, name: str = "result") -> float | None:
    """Return the measured share of parameters that a token runs.

    It is relative to the projections where dense layers were made experts, and to the original's
    active parameters otherwise.
    """
    if by_projections(record):
        return figure(record.measured, "scores", name, "active_ratio")
    return relative(record, name, "active_parameters")


def relative(record: Record, name: str, key: str) -> float | None:
    """Return a score of a model, relative to the original's."""
    scores = part(record.measured, "scores")
    model, original = figure(scores, name, key), figure(scores, "original", key)
    return model / original if model is not None and original else None


def compared_ratio(record: Record) -> tuple[str, Callable[[str], float | None]]:
    """Return the ratio that describes a run's models best, in words, and a function for it."""
    step = _main_step(record)
    if step is not None and step.ratio == "stored":
        return "of the parameters", lambda name: relative(record, name, "total_parameters")
    return "active", lambda name: measured_active_ratio(record, name)


def size(record: Record, name: str, where: str) -> float | None:
    """Return the bytes of a model's weights ``on disk`` or ``in memory``."""
    if where == "in memory":
        return figure(record.measured, "scores", name, "total_bytes")
    path = ("gguf", "bytes") if name == FILE else ("files", name)
    return figure(record.measured, *path)


def bytes_before_after(record: Record) -> tuple[float, float, str] | None:
    """Return the bytes of the original and of the model that the run was for, and where: on disk if
    files were measured."""
    for where in ("on disk", "in memory"):
        before, after = (size(record, name, where) for name in ("original", wanted(record)))
        if before and after:
            return before, after, where
    return None


# --- steps and layers ----------------------------------------------------------------------------


def _main_step(record: Record) -> Step | None:
    """Return the last step that changed the model's shape, else the last one."""
    steps = [step for step in record.steps if step.ratio] or record.steps
    return steps[-1] if steps else None


def by_projections(record: Record) -> bool:
    """Return True if dense layers were made experts: ratios are then those of their projections."""
    step = _main_step(record)
    return step is not None and step.ratio == "projections"


def routes(record: Record) -> Heat | None:
    """Return the share of tokens by layer and expert; None where nothing routes."""
    routing = part(record.measured, "routing")
    routed = sorted((int(i), r) for i, r in routing.items() if r.get("share"))
    if not routed:
        return None
    step = _main_step(record)
    unit = step.unit if step else "expert"
    renumbered = any(0 < layer.experts < layer.experts_before for layer in record.layers)
    return Heat(
        section="Layer by layer",
        title="Where tokens were routed.",
        caption=f"Percent of a layer’s calls on the evaluation text by {unit}"
        f"{', numbered as in the result' if renumbered else ''}. Bars: Jensen–Shannon divergence "
        "from uniform routing, base 2; 0 is even.",
        rows=tuple(
            Row(str(i), tuple(100 * s for s in r["share"]), bar=figure(r, "jsd")) for i, r in routed
        ),
        columns=tuple(map(str, range(max(len(r["share"]) for _, r in routed)))),
        column=unit,
        side="JSD from uniform",
        form=".1f",
        of="%",
        written=".0f",
    )


# --- the run -------------------------------------------------------------------------------------


def warnings(record: Record) -> tuple[list[str], list[str]]:
    """Return the warnings that explain the run's speed, and the others."""
    messages = list(record.log.get("warnings") or ())
    speed = [message for message in messages if message in (record.log.get("of_speed") or ())]
    return speed, [message for message in messages if message not in speed]
