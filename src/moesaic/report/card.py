"""The README of a converted checkpoint: a Hugging Face model card."""

from __future__ import annotations

import re
from pathlib import PurePath

import yaml

from moesaic.errors import how_to_install, printable
from moesaic.io.layout import FOLDER, PLAN
from moesaic.record import Record
from moesaic.report import numbers, read, words
from moesaic.report.read import part
from moesaic.report.tables import Cell, Table, tables

HUB_IDS = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "gemma3-270m": "google/gemma-3-270m",
}
TAGS = ("moesaic", "mixture-of-experts", "moe")
TAGS_OF = {
    "prune": ("expert-pruning", "pruned"),
    "slim": ("pruned",),
    "condense": ("expert-pruning", "pruned"),
    "tune": ("finetuned",),
}
"""Tags that people search the hub for, by the verb of a step."""


def model_card(record: Record, recipe_yaml: str, repo: str = "") -> str:
    """The card: what came of it, how to load it, what was measured, how it was made.

    Args:
        record: of the run.
        recipe_yaml: the recipe that made it.
        repo: the repository of the hub that it is in; empty for a folder.
    """
    model = read.model_name(record)
    front = {
        "base_model": HUB_IDS.get(model, model),
        "library_name": "transformers",
        "base_model_relation": "finetune",  # of the hub's kinds the one for changed weights
        "tags": [*TAGS, *dict.fromkeys(t for s in record.steps for t in TAGS_OF.get(s.verb, ()))],
        "pipeline_tag": "text-generation",
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {_inline(read.title(record))}",
        f"{_inline(words.outcome(record))} Measure it on your own text before relying on it.",
        _loading(record, repo),
        *_measured(record),
        "## How it was made",
        *map(_inline, words.step_paragraphs(record)),
        _inline(words.weights(record)),
        _fence(recipe_yaml, "yaml"),
        _rebuilding(record),
        "The base model's licence applies to its weights.",
    ]
    return printable("\n\n".join(filter(None, parts)) + "\n")


def _rebuilding(record: Record) -> str:
    """The use of ``plan.json``; a result that was trained has none."""
    if any(step.weights == "trained" for step in record.steps):
        return "The weights were trained, so no plan can rebuild this checkpoint: keep it whole."
    return (
        f"`{FOLDER}/{PLAN}` holds every decision; `moesaic apply BASE {FOLDER}/{PLAN} OUT` "
        "rebuilds the checkpoint from the base model."
    )


def _loading(record: Record, repo: str) -> str:
    path = PurePath(record.out)
    # the folder as the run was asked for it, but nothing of where that lies on the machine
    place = repr(repo or (path.name if path.is_absolute() else record.out) or "this-folder")
    note = "" if repo else "  # this folder"
    code = "" if record.native else "import moesaic  # without it: trust_remote_code=True in both\n"
    code += (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({place}){note}\n"
        f"tokenizer = AutoTokenizer.from_pretrained({place})"
    )
    if record.native:
        needs = f"An ordinary {_inline(record.model_type)} checkpoint: Moesaic is not needed."
    else:
        needs = f"Needs `{how_to_install()}`."
    return f"## Loading it\n\n{needs}\n\n{_fence(code, 'python')}"


def verdict(record: Record) -> str:
    """Return what was measured of any model beside its original, as Markdown for a card."""
    return printable("\n\n".join([_inline(words.outcome(record)), *_measured(record)]) + "\n")


def _measured(record: Record) -> list[str]:
    """What was measured: a list, tables, and on what."""
    lines = []
    for change in words.changes(record):
        figure = ", ".join(filter(None, (change.figure, change.difference)))
        lines.append(f"{change.what[:1].upper()}{change.what[1:]}: {figure}. {change.why}".strip())
    lines += [sentence.text for sentence in words.summary(record)]
    lines += [f"Warning of the run: {warning}" for warning in read.warnings(record)[1]]
    blocks = ["\n".join(f"- {_inline(text)}" for text in lines), *map(_table, tables(record))]
    parts = [p for p in blocks if p]
    head = ["## What it costs and what it brings"] if parts else []
    return [*head, *parts, " ".join([*_text(record), *_machine(record)])]


def _text(record: Record) -> list[str]:
    """What perplexity was measured on."""
    settings = part(record.measured, "evaluation")
    data, kind = settings.get("data"), settings.get("computed_in")
    if not data or not part(record.measured, "scores"):
        return []
    text = "text that ships with Moesaic" if data == "shipped" else _inline(str(data))
    precision = f", computed in {_inline(str(kind))}" if kind else ""
    bos = ", each begun with BOS" if settings.get("bos") else ""
    return [f"Perplexity on {text}, in windows of {settings['length']}{bos}{precision}."]


def _machine(record: Record) -> list[str]:
    """What speed was measured on."""
    machine = record.environment
    if not machine or not part(record.measured, "speed"):
        return []
    where = [_inline(str(machine[key])) for key in ("processor", "device") if machine.get(key)]
    threads = machine.get("threads", "some")
    speed = (
        f"Speed on {' · '.join(where)}, {threads} thread{'' if threads == 1 else 's'}, torch "
        f"{machine.get('torch', numbers.NONE)}; medians, with the least and the greatest round."
    )
    alone = "Timed one after the other: there was room for one model at a time."
    return [speed] if read.interleaved(record) else [speed, alone]


def _table(table: Table) -> str:
    def written(cell: Cell) -> str:
        return f"{cell.text} ({cell.note})" if cell.note else cell.text

    head = ["", *map(_inline, table.columns)]
    lines = [head, ["---", *["---:"] * len(table.columns)]]
    lines += [[_inline(label), *map(written, cells)] for label, cells in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _fence(code: str, language: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"


def _inline(text: str) -> str:
    """Text that means itself in a line of Markdown.

    >>> _inline("a_b\\n# <c>")
    'a\\\\_b \\\\# \\\\<c\\\\>'
    """
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", " ".join(text.splitlines()))
