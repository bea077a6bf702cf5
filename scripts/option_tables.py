"""Write the tables of options into the documents, from the methods' own configs.

    python scripts/option_tables.py        rewrites docs/*.md and README.md where they are stale

A table stands between two comments, the first of which names what it lists:

    <!-- options carve.more own: written by make docs-tables -->
    <!-- end of options -->

Names are those of METHODS, or of a dataclass of moesaic.config such as Calibration. ``own`` leaves
out what goes beyond the paper, ``beyond`` lists nothing else; of several methods the table says
whose each option is. ``criteria`` lists the criteria of prune, ``scores`` the scores of slim;
``engine vllm`` what vLLM made of every verb's results, by benchmarks/engines.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from moesaic import config as requests
from moesaic.cli.options import default_of, flag_of, help_of
from moesaic.config import about
from moesaic.methods import METHODS
from moesaic.methods.naee.criteria import CRITERIA
from moesaic.methods.slim.scores import SCORES
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


def pages() -> list[Path]:
    """The documents that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewritten(page: str) -> str:
    """A page with all its tables as they should be."""
    return BLOCK.sub(lambda found: found["head"] + table(found["names"]) + found["foot"], page)


def listed(page: str) -> set[str]:
    """The names in the comments of a page."""
    return {name for found in BLOCK.finditer(page) for name in found["names"].split()}


def table(names: str) -> str:
    """The table that a comment asks for, in Markdown."""
    asked = names.split()
    if asked[0] == "engine":
        return engine(asked[1])
    if names in LISTS:
        word, entries = LISTS[names]
        told = ((f"`{name}`", entries[name].help, entries[name].paper) for name in entries)
        return markdown([(word, "measure", "paper"), *told])
    wanted = next((ENTRIES[name] for name in asked if name in ENTRIES), (False, True))
    methods = [name for name in asked if name not in ENTRIES]
    lines = [("option", "of", "default", "meaning"), *rows(methods, wanted)]
    return markdown(lines if len(methods) > 1 else [(o, d, m) for o, _, d, m in lines])


def engine(name: str) -> str:
    """What an engine makes of every verb's result of every model: a table, and reasons below it."""
    record = json.loads((ROOT / "benchmarks/engines.json").read_text("utf-8"))
    reasons: list[str] = []
    tables = ""
    for dense in (False, True):
        models = {
            model: {verb: cells.get(name, "") for verb, cells in verbs.items()}
            for model, verbs in record["outcomes"].items()
            if any(verb.startswith("carve") for verb in verbs) == dense
        }
        verbs = sorted({verb for cells in models.values() for verb in cells})
        lines = [("", *(f"`{verb}`" for verb in verbs))]
        for model, cells in models.items():
            told = (outcome(name, model, cells.get(verb, ""), reasons) for verb in verbs)
            lines.append((model, *told))
        tables += markdown(lines) + "\n"
    version = f"{record['versions'][name]}:\n\n"
    return version + tables + "".join(f"{i}. {why}\n" for i, why in enumerate(reasons, 1))


def outcome(engine: str, model: str, said: str, reasons: list[str]) -> str:
    """A cell: yes, no with the number of the reason, or nothing."""
    kind, _, why = said.partition(": ")
    if kind in ("", "same"):
        return {"same": "yes"}.get(kind, "")
    if kind == "refused" and engine != "transformers":
        return "–"
    architecture = model.partition(" ")[0]
    why = why.replace(f"moesaic_{architecture}", "moesaic_<base>").replace(architecture, "it")
    why = {"refused": "Refused: ", "lacks": "Lacks "}.get(kind, "") + cell(why)
    if why not in reasons:
        reasons.append(why)
    return f"no ({reasons.index(why) + 1})"


def markdown(lines: Sequence[tuple[str, ...]]) -> str:
    """A table, its head first."""
    ruled = [lines[0], ("---",) * len(lines[0]), *lines[1:]]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in ruled)


def cell(text: str) -> str:
    """Text that stays in its cell and is no HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def rows(names: list[str], wanted: tuple[bool, ...]) -> Iterator[tuple[str, str, str, str]]:
    """Flag, verb, default and help of every wanted option of some configs."""
    for name in names:
        config: type[Any] = METHODS[name] if "." in name else getattr(requests, name)
        verb = name.partition(".")[0]
        for of in fields(config):
            if bool(about(of).beyond) in wanted:
                flag = f"-o {of.name}=" if about(of).seldom else flag_of(of)
                yield f"`{flag}`", f"`{verb}`", default(of), help_of(config, of)
        for bundle, options in getattr(config, "bundles", {}).items() if True in wanted else ():
            values = ", ".join(f"`{key}={plain(value)}`" for key, value in options.items())
            told = f"{values}, where not given otherwise." if values else "What the defaults are."
            yield f"`--recipe {bundle}`", f"`{verb}`", "", told


def default(of: Field[Any]) -> str:
    """A field's default as the option takes it; empty where there is none."""
    if about(of).required:
        return ""
    switch = about(of).seldom and isinstance(of.default, bool)
    value = plain(of.default) if switch else default_of(of)
    return f"`{value}`" if value else ""


def plain(value: object) -> str:
    """A value as ``-o`` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> None:
    for page in pages():
        text = page.read_text("utf-8")
        page.write_text(rewritten(text), "utf-8")


if __name__ == "__main__":
    main()
