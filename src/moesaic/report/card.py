"""The README of a converted checkpoint: a Hugging Face model card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml

from moesaic.report import figures, read, words
from moesaic.report.read import Cell, Figures, Record, by_layer, part

HUB_IDS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
TAGS = ["moesaic", "mixture-of-experts"]


def model_card(record: Mapping[str, Any], recipe_yaml: str) -> str:
    """The card: what it is, how to load it, what was measured, how it was made.

    Args:
        record: what ``result.json`` holds.
        recipe_yaml: the recipe that made it.
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
        _what(record),
        _loading(record),
        *_measured(record),
        "## How it was made",
        _fence(recipe_yaml, "yaml"),
        _rebuilding(record, recipe_yaml),
        "The base model's licence applies to its weights.",
    ]
    return "\n\n".join(parts) + "\n"


def _what(record: Record) -> str:
    method, trained = read.method_name(record), read.trained(record)
    by = f" by {method}" if method and read.family(record) != "skip" else ""
    if trained:
        steps = len(part(record, "tune").get("losses") or ())
        how = f", {steps} steps" if steps else ""
        weights = f"It was trained: {trained}{how}."
    elif read.learned(record):
        weights = LEARNED
    else:
        weights = KEPT.get(read.family(record), KEPT["carve"])
    return (
        f"{_made(record)}{by}. {weights} What it costs is below; measure it on your own text "
        "before relying on it."
    )


KEPT = {
    "carve": "The weights are the base model's own, rearranged: nothing was trained, and quality "
    "is lost.",
    "prune": "The experts and routers that stay have the base model's own weights: nothing was "
    "trained, and quality is lost.",
    "skip": "The weights are the base model's own, all of them: nothing was trained, and quality "
    "is lost.",
    "condense": "What stays of the weights is the base model's own, experts scaled by fixed "
    "weights: nothing was trained, and quality is lost.",
    "tune": "",
}
LEARNED = (
    "Experts and routers were trained, the weights are the base model's own, and quality is lost."
)


def _made(record: Record) -> str:
    """What was done to the base model, up to the method's name."""
    model, kind = _inline(read.model_name(record)), read.family(record)
    if kind == "prune":
        kept = read.kept_experts(record)
        return f"{model}, {kept or 'some of its experts'} kept in every layer that routes, chosen"
    if kind == "skip":
        return (
            f"{model}, whose routers leave out experts that weigh little, token by token, by the "
            "rule of NAEE"
        )
    if kind == "condense":
        numbers = read.chosen_layers(record)
        which = f"layer{'s' if len(numbers) > 1 else ''} {figures.ranges(numbers)}"
        where = which if numbers else "some layers"
        keep = part(record, "config").get("keep")
        if keep in read.GONE:
            what = "the feed-forward blocks of " if keep == "attention" else ""
            return f"{model} without {what}{where}: chosen"
        return f"{model}, {where} turned from mixtures of experts into small dense layers"
    if kind == "tune":
        return f"{model}, trained further"
    layers = [i for i, _ in by_layer(part(record, "layers"))]
    where = f" in layers {figures.ranges(layers)}" if layers else ""
    if read.learned(record):
        whole = part(record, "config").get("attention") == "none"
        attention = "" if whole else ", and its attention cut down"
        return (
            f"{model}, its feed-forward networks{where} made experts that share their weights, of "
            f"which each token runs one{attention}"
        )
    if any(part(layer, "gate") for _, layer in by_layer(part(record, "layers"))):
        return (
            f"{model}, its feed-forward networks{where} cut into blocks, of which each token runs "
            "those that its gates open"
        )
    return (
        f"{model}, its feed-forward networks{where} rebuilt as a backbone that every token runs "
        "and petals of which a router picks a few"
        if read.petals(record)
        else f"{model}, its feed-forward networks{where} cut down"
    )


def _rebuilding(record: Record, recipe_yaml: str) -> str:
    """What ``plan.json`` is good for: a trained result has none, several steps have one each."""
    if read.trained(record):
        return "The weights were trained, so no plan can rebuild this checkpoint: keep it whole."
    if _steps(recipe_yaml) > 1:
        return "`plan.json` in this folder holds the decisions of the last step."
    return (
        "`plan.json` in this folder holds every decision; `moesaic apply BASE plan.json OUT` "
        "rebuilds the checkpoint from the base model."
    )


def _steps(recipe_yaml: str) -> int:
    try:
        recipe = yaml.safe_load(recipe_yaml)
    except yaml.YAMLError:
        return 1
    steps = recipe.get("steps") if isinstance(recipe, dict) else None
    return len(steps) if isinstance(steps, list) else 1


def _loading(record: Record) -> str:
    folder = PurePath(str(record.get("out") or "")).name or "path/to/this/folder"
    load = f'AutoModelForCausalLM.from_pretrained("{folder}"'
    native = read.is_native(record)
    code = (
        ("" if native else "import moesaic  # registers the model type\n")
        + "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = {load})\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")'
    )
    if native:
        kind = record["model_type"]
        return (
            f"## Loading it\n\n{_fence(code, 'python')}\n\n"
            f"An ordinary {kind} checkpoint: Moesaic is not needed."
        )
    return (
        f"## Loading it\n\nNeeds `pip install moesaic`.\n\n{_fence(code, 'python')}\n\n"
        f"Without the import: `{load}, trust_remote_code=True)`."
    )


def _measured(record: Record) -> list[str]:
    sentences = words.summary(record)
    parts = ["## What it costs and what it brings", "\n".join(f"- {s.text}" for s in sentences)]
    for table in (read.score_table(record), read.speed_table(record)):
        if table.rows:
            parts.append(_table(table))
    on = part(record, "evaluation").get("data")
    machine = part(record, "environment")
    notes = []
    if on and part(record, "scores"):
        text = "text that ships with Moesaic" if on == "shipped" else f"`{on}`"
        notes.append(f"Perplexity on {text}, in windows of {part(record, 'evaluation')['length']}.")
    if part(record, "speed") and machine:
        known = [machine.get("processor"), machine.get("device")]
        where = " · ".join(str(m) for m in known if m)
        notes.append(
            f"Speed on {where}, {machine.get('threads', 'some')} threads, torch "
            f"{machine.get('torch', figures.NONE)}; medians, with the least and the greatest round."
        )
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
