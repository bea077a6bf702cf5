"""The README of a converted checkpoint: a Hugging Face model card."""

from __future__ import annotations

import re
from pathlib import PurePath

import yaml

from moesaic.errors import how_to_install
from moesaic.record import Record
from moesaic.report import figures, read, words
from moesaic.report.read import Cell, Figures, figure, part

HUB_IDS = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "gemma3-270m": "google/gemma-3-270m",
}
TAGS = ["moesaic", "mixture-of-experts"]


def model_card(record: Record, recipe_yaml: str, repo: str = "", plan_only: bool = False) -> str:
    """The card: what it is, how to load it, what was measured, how it was made.

    Args:
        record: of the run.
        recipe_yaml: the recipe that made it.
        repo: the repository of the hub that it is in; empty for a folder.
        plan_only: of the result only its plan is there.
    """
    model = read.model_name(record)
    front = {
        "base_model": HUB_IDS.get(model, model),
        "library_name": "transformers",
        "tags": TAGS,
        "pipeline_tag": "text-generation",
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {_inline(read.title(record))}",
        *map(_inline, words.told(record)),
        f"{_inline(words.weights(record))} {_quality(record)}",
        _applying(repo) if plan_only else _loading(record, repo),
        *_measured(record),
        "## How it was made",
        _fence(recipe_yaml, "yaml"),
        "" if plan_only else _rebuilding(record),
        "The base model's licence applies to its weights.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _applying(repo: str) -> str:
    code = _fence(f"{how_to_install()}\nmoesaic apply {repo} OUT", "sh")
    return (
        "## Rebuilding it\n\nThis repository holds the plan and no weights: what was decided, "
        "index lists, and what was solved for. With the base model it is the checkpoint again, bit "
        f"for bit.\n\n{code}"
    )


def _quality(record: Record) -> str:
    scores = part(record.measured, "scores")
    ours, theirs = (figure(scores, name, "perplexity") for name in ("result", "original"))
    lost = ours is not None and theirs is not None and not ours <= theirs
    known = "Quality is lost: what" if lost else "What"
    return f"{known} it costs is below; measure it on your own text before relying on it."


def _rebuilding(record: Record) -> str:
    """The use of ``plan.json``; a result that was trained has none."""
    if any(step.weights == "trained" for step in record.steps):
        return "The weights were trained, so no plan can rebuild this checkpoint: keep it whole."
    return (
        "`plan.json` in this folder holds every decision; `moesaic apply BASE plan.json OUT` "
        "rebuilds the checkpoint from the base model."
    )


def _loading(record: Record, repo: str) -> str:
    folder = repo or PurePath(record.out).name or "path/to/this/folder"
    load = f'AutoModelForCausalLM.from_pretrained("{folder}"'
    code = (
        ("" if record.native else "import moesaic  # registers the model type\n")
        + "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = {load})\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")'
    )
    if record.native:
        return (
            f"## Loading it\n\n{_fence(code, 'python')}\n\n"
            f"An ordinary {record.model_type} checkpoint: Moesaic is not needed."
        )
    return (
        f"## Loading it\n\nNeeds `{how_to_install()}`.\n\n{_fence(code, 'python')}\n\n"
        f"Without the import: `{load}, trust_remote_code=True)`."
    )


def _measured(record: Record) -> list[str]:
    sentences = words.summary(record)
    parts = ["## What it costs and what it brings", "\n".join(f"- {s.text}" for s in sentences)]
    parts += map(_table, read.tables(record))
    settings, machine = part(record.measured, "evaluation"), record.environment
    on = settings.get("data")
    notes = []
    if on and part(record.measured, "scores"):
        text = "text that ships with Moesaic" if on == "shipped" else f"`{on}`"
        kind = settings.get("computed_in")
        numbers = f", computed in {kind}" if kind else ""
        notes.append(f"Perplexity on {text}, in windows of {settings['length']}{numbers}.")
    if part(record.measured, "speed") and machine:
        known = [machine.get("processor"), machine.get("device")]
        where = " · ".join(str(m) for m in known if m)
        notes.append(
            f"Speed on {where}, {machine.get('threads', 'some')} threads, torch "
            f"{machine.get('torch', figures.NONE)}; medians, with the least and the greatest round."
        )
        if not read.interleaved(record):
            notes.append("Timed one after the other: there was room for one model at a time.")
    return [*parts, " ".join(notes)] if notes else parts


def _table(table: Figures) -> str:
    def written(cell: Cell) -> str:
        return f"{cell.text} ({cell.note})" if cell.note else cell.text

    head = ["", *map(_inline, table.columns)]
    lines = [head, ["---", *["---:"] * len(table.columns)]]
    lines += [[label, *map(written, cells)] for label, cells in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _fence(code: str, language: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"


def _inline(text: str) -> str:
    """Text that means itself in Markdown."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)
