"""Sections as Markdown, and the README of a result made of them: a Hugging Face model card."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

import yaml

from moesaic.errors import how_to_install, printable
from moesaic.io.names import FOLDER, PLAN
from moesaic.record import Record
from moesaic.report import facts
from moesaic.report.blocks import Block, Cell, Section, Sentence, Table
from moesaic.report.contents import contents

HUB_IDS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "gemma3-270m": "google/gemma-3-270m"}
TAGS = ("moesaic", "mixture-of-experts", "moe")
TAGS_OF = {
    "prune": ("expert-pruning", "pruned"),
    "slim": ("pruned",),
    "condense": ("expert-pruning", "pruned"),
    "tune": ("finetuned",),
}
"""Tags that people search the hub for, by the verb of a step."""


def model_card(record: Record, recipe_yaml: str, repo: str = "", tokenizer: bool = True) -> str:
    """Return the card: what came of it, how to load it, what was measured, how it was made.

    Args:
        record: of the run.
        recipe_yaml: the recipe that made it.
        repo: the repository of the hub that it is in; empty for a folder.
        tokenizer: True if the result has one.
    """
    model = facts.model_name(record)
    front = {
        "base_model": HUB_IDS.get(model, model),
        "library_name": "transformers",
        "base_model_relation": "finetune",  # of the hub's kinds the one for changed weights
        "tags": [*TAGS, *dict.fromkeys(t for s in record.steps for t in TAGS_OF.get(s.verb, ()))],
        "pipeline_tag": "text-generation",
    }
    sections = _shown(record)
    first = next((n for n, section in enumerate(sections) if section.title), len(sections))
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {_inline(facts.title(record))}",
        markdown(sections[:first]),
        "Measure it on your own text before relying on it.",
        _loading(record, repo, tokenizer),
        markdown(sections[first:]),
        _fence(recipe_yaml, "yaml"),
        _rebuilding(record),
        "The base model's licence applies to its weights.",
    ]
    return printable("\n\n".join(filter(None, parts)) + "\n")


def verdict(record: Record) -> str:
    """Return what was measured of any model beside its original, as Markdown for a card."""
    return printable(f"{markdown(_shown(record))}\n")


def markdown(sections: Iterable[Section]) -> str:
    """Return sections as Markdown; plots are left to the page."""
    parts = []
    for section in sections:
        parts += [f"## {_inline(section.title)}"] if section.title else []
        previous = ""
        for block in section.blocks:
            written = _block(block)
            if previous.startswith("- ") and written.startswith("- "):
                parts[-1] += f"\n{written}"
            elif written:
                parts.append(written)
            previous = written
    return "\n\n".join(parts)


def _shown(record: Record) -> list[Section]:
    return [section for section in contents(record) if "card" in section.also]


def _block(block: Block) -> str:
    if isinstance(block, Sentence):
        return f"{'- ' if block.kind == 'remark' else ''}{_inline(block.text)}"
    return _table(block) if isinstance(block, Table) else ""


def _table(table: Table) -> str:
    def written(cell: Cell) -> str:
        both = f"{cell.text} ({cell.note})" if cell.text and cell.note else cell.text or cell.note
        return _inline(both)

    head = ["", *map(_inline, table.columns)]
    lines = [head, ["---", *["---:"] * len(table.columns)]]
    lines += [[_inline(label), *map(written, cells)] for label, cells in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _rebuilding(record: Record) -> str:
    """Return the use of ``plan.json``; a result that was trained has none."""
    if any(step.weights == "trained" for step in record.steps):
        return "The weights were trained, so no plan can rebuild this checkpoint: keep it whole."
    return (
        f"`{FOLDER}/{PLAN}` holds every decision; `moesaic apply BASE {FOLDER}/{PLAN} OUT` "
        "rebuilds the checkpoint from the base model."
    )


def _loading(record: Record, repo: str, tokenizer: bool) -> str:
    path = PurePath(record.out)
    # the folder as it was requested, but not its place on the machine
    place = repr(repo or (path.name if path.is_absolute() else record.out) or "this-folder")
    note = "" if repo else "  # this folder"
    code = "" if record.native else "import moesaic  # without it: trust_remote_code=True in both\n"
    code += (
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' * tokenizer}\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({place}){note}"
    )
    code += f"\ntokenizer = AutoTokenizer.from_pretrained({place})" * tokenizer
    if record.native:
        needs = f"An ordinary {_inline(record.model_type)} checkpoint: Moesaic is not needed."
    else:
        needs = f"Needs `{how_to_install()}`."
    return f"## Loading it\n\n{needs}\n\n{_fence(code, 'python')}"


def _fence(code: str, language: str) -> str:
    """Return a code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"


def _inline(text: str) -> str:
    """Return text that means itself in a line of Markdown.

    >>> _inline("a_b\\n# <c>")
    'a\\\\_b \\\\# \\\\<c\\\\>'
    """
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", " ".join(text.splitlines()))
