"""Write the tables of options into the documents, from the methods' own configs.

    python scripts/option_tables.py        rewrites docs/*.md and README.md where they are stale

A table stands between two comments, the first of which names what it lists:

    <!-- options carve.more own: written by make docs-tables -->
    <!-- end of options -->

Names are those of METHODS, or of a dataclass of moesaic.config such as Calibration. A table lists
what ``--help`` does, and names where a method's other options are. ``own`` leaves out what is
beyond the paper, ``beyond`` lists nothing else; of several methods the table says whose each option
is. ``criteria`` lists the criteria of prune, ``scores`` the scores of slim;
``engines`` what each engine made of every verb's results, by benchmarks/engines.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeAlias

from moesaic import config as requests
from moesaic.cli.options import help_of, value_text
from moesaic.config import about, flag_of
from moesaic.methods import METHODS, methods_of
from moesaic.methods.prune.config import CRITERIA
from moesaic.methods.slim.config import SCORES
from moesaic.registry import Registry

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(?P<head><!-- options (?P<names>[^:]*):[^\n]*-->\n)(?P<table>.*?)"
    r"(?P<foot><!-- end of options -->)",
    re.DOTALL,
)
LISTS: dict[str, tuple[str, Registry[Any]]] = {
    "criteria": ("criterion", CRITERIA),
    "scores": ("score", SCORES),
}
ENTRIES = {"own": (False,), "beyond": (True,)}
ENGINES = {
    "vllm": "vLLM",
    "mlx": "mlx-lm",
    "llamacpp": "llama.cpp",
}
"""What the engines of benchmarks/engines.json are called; transformers computes all alike."""
Outcomes: TypeAlias = Mapping[str, Mapping[str, str]]
"""What came of a model: by verb, by engine."""


def pages() -> list[Path]:
    """The documents that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewritten(page: str) -> str:
    """A page with all its tables as they should be."""
    return BLOCK.sub(lambda match: match["head"] + table(match["names"]) + match["foot"], page)


def listed(page: str) -> set[str]:
    """The names in the comments of a page."""
    return {name for match in BLOCK.finditer(page) for name in match["names"].split()}


def table(names: str) -> str:
    """The table that a comment asks for, in Markdown."""
    asked = names.split()
    if names == "engines":
        return engines()
    if names in LISTS:
        word, entries = LISTS[names]
        cells = [(f"`{name}`", entries[name].help, entries[name].paper) for name in entries]
        return markdown([(word, "measure", "paper"), *titles_once(cells)])
    wanted = next((ENTRIES[name] for name in asked if name in ENTRIES), (False, True))
    methods = [name for name in asked if name not in ENTRIES]
    lines = [("option", "of", "default", "meaning"), *rows(methods, wanted)]
    return markdown(lines if len(methods) > 1 else [(o, d, m) for o, _, d, m in lines])


def titles_once(lines: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """The same lines; for a paper that was named before, the line that named it."""
    first: dict[str, str] = {}
    for name, measure, paper in lines:
        yield name, measure, f"that of {first[paper]}" if paper in first else paper
        if paper:
            first.setdefault(paper, name)


def engines() -> str:
    """What every engine makes of every verb's results: two tables, and reasons below them."""
    record = json.loads((ROOT / "benchmarks/engines.json").read_text("utf-8"))
    reasons: list[str] = []
    tables = ""
    outcomes: dict[str, Outcomes] = record["outcomes"]
    carved = {model for model, verbs in outcomes.items() if any("carve" in v for v in verbs)}
    for kind, dense in (("Mixtures of experts", False), ("Dense models", True)):
        models = {m: v for m, v in outcomes.items() if (m.partition(" ")[0] in carved) == dense}
        tried = sorted({verb for verbs in models.values() for verb in verbs})
        lines = [("", *(record["versions"][name] for name in ENGINES))]
        for model, verbs in models.items():
            lines.append((model, *(outcome(name, model, verbs, reasons) for name in ENGINES)))
        named = ", ".join(f"`{verb}`" for verb in tried)
        tables += f"{kind}, rebuilt by {named}:\n\n{markdown(lines)}\n"
    return tables + "".join(f"{i}. {why}\n" for i, why in enumerate(reasons, 1))


def outcome(engine: str, model: str, verbs: Outcomes, reasons: list[str]) -> str:
    """A cell: the results that an engine computes alike, with the numbers of reasons for others."""
    asked = {
        verb: status
        for verb, cells in verbs.items()
        if (status := cells.get(engine)) and "refused" not in status
    }
    others: dict[str, list[str]] = {}
    for verb, status in asked.items():
        if status != "same":
            why = reason(engine, model, status)
            if why not in reasons:
                reasons.append(why)
            others.setdefault(f"({reasons.index(why) + 1})", []).append(f"`{verb}`")
    if not others:
        return "all" if asked else ""
    if sum(map(len, others.values())) < len(asked):
        exceptions = ", ".join(f"{', '.join(names)} {number}" for number, names in others.items())
        return f"all but {exceptions}"
    untried = all(status.startswith("machine") for status in asked.values())
    return f"{'not tried' if untried else 'none'} {' '.join(others)}"


def reason(engine: str, model: str, status: str) -> str:
    """Why an engine does not compute a result."""
    kind, _, why = status.partition(": ")
    architecture = model.partition(" ")[0]
    why = why.replace(architecture, "it")
    lacks = f"{ENGINES[engine]} does not support "
    words = {"lacks": lacks, "machine": "Not tried: "}[kind] + why
    return f"{cell(words).removesuffix('.')}."


def markdown(lines: Sequence[tuple[str, ...]]) -> str:
    """A table, its head first."""
    ruled = [lines[0], ("---",) * len(lines[0]), *lines[1:]]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in ruled)


def cell(text: str) -> str:
    """Escape text, so that it is kept in its cell and is no HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def rows(names: list[str], wanted: tuple[bool, ...]) -> Iterator[tuple[str, str, str, str]]:
    """Flag, verb, default and help of every wanted option of some configs."""
    for name in names:
        config: type[Any] = METHODS[name] if "." in name else getattr(requests, name)
        verb = name.partition(".")[0]
        for field in fields(config):
            if bool(about(field).beyond) in wanted and not about(field).seldom:
                yield f"`{flag_of(field)}`", f"`{verb}`", default(field), help_of(config, field)
        for bundle, options in getattr(config, "bundles", {}).items() if True in wanted else ():
            values = ", ".join(f"`{key}={plain(value)}`" for key, value in options.items())
            if values:  # else it is what the defaults are
                yield f"`--recipe {bundle}`", f"`{verb}`", "", values
        if False in wanted and any(about(field).seldom for field in fields(config)):
            yield "others", f"`{verb}`", "", f"`{every_option(name)}`"


def every_option(name: str) -> str:
    """The command that prints all options of a method."""
    verb, _, method = name.partition(".")
    chosen = f" --method {method}" if len(methods_of(verb)) > 1 else ""
    return f"moesaic {verb}{chosen} --help-all"


def default(field: Field[Any]) -> str:
    """A field's default as the option takes it; empty where there is none."""
    value = value_text(field.default)
    return f"`{value}`" if value else ""


def plain(value: object) -> str:
    """A value as ``-o`` takes it; of many numbers the first two."""
    if isinstance(value, tuple) and len(value) > 8:
        return f"{value[0]},{value[1]},... ({len(value)} numbers)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> None:
    for page in pages():
        text = page.read_text("utf-8")
        page.write_text(rewritten(text), "utf-8")


if __name__ == "__main__":
    main()
