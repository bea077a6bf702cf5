"""The tables of docs/papers.md, from the YAML files beside this and what --small gave.

python benchmarks/papers/table.py       writes them
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import spearmanr

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "papers.md"
PAPERS = ("naee", "cdmoe", "more", "tomoe", "dsmoe")
sys.path.insert(0, str(HERE.parent))

from tables import record, rewritten  # noqa: E402


def found(value: Any, path: str) -> dict[str, float]:
    """The figures at a path, ``a.*.b`` for all of a level, by the names under its stars.

    >>> found({"a": {"x": {"b": 1.0}, "y": {"b": 2.0}}}, "a.*.b")
    {'x': 1.0, 'y': 2.0}
    """
    key, _, rest = path.partition(".")
    if not key:
        return {"": float(value)}
    if key == "*":
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        return {
            f"{name} {below}".strip(): figure
            for name, inner in parts
            for below, figure in found(inner, rest).items()
        }
    return found(value[int(key) if isinstance(value, list) else key], rest)


def entries(paper: str) -> dict[str, dict[str, Any]]:
    """What the YAML says of each table and figure, by its name there."""
    description = yaml.safe_load((HERE / f"{paper}.yaml").read_text("utf-8"))
    return {group["entry"]: group for group in description["rows"] if "entry" in group}


def results(paper: str) -> dict[str, Any]:
    """The rows of the small run."""
    rows: dict[str, Any] = record(f"papers/{paper}.small")["results"]
    return rows


def cells(rows: Mapping[str, Any], entry: str, path: str) -> tuple[dict[str, float], list[str]]:
    """A table's figures by row, and the rows that were not run."""
    figures: dict[str, float] = {}
    absent = []
    for name, row in rows.items():
        table, _, label = name.partition(" | ")
        if table != entry:
            continue
        if "not_run" in row:
            absent.append(label)
            continue
        for below, figure in found(row, path).items():
            figures[f"{label} {below}".strip()] = figure
    return figures, absent


def agreement(figures: Mapping[str, float], printed: Mapping[str, Any], path: str) -> str:
    """The rank correlation with the paper's numbers, and over how many rows."""
    theirs = {str(name): float(value) for name, value in printed["rows"].items()}
    both = [name for name in figures if name in theirs]
    if len(both) < 2:
        return "–"
    rho = float(spearmanr(*([of[n] for n in both] for of in (figures, theirs))).statistic)
    if printed["better"] == "high" and "perplexity" in path:
        rho = -rho
    return f"{round(rho, 2) + 0.0:+.2f}&nbsp;of&nbsp;{len(both)}".replace("-", "−")


def said(value: float) -> str:
    """Three digits, or a whole number."""
    if value == int(value) and abs(value) < 1e4:
        return f"{value:.0f}"
    return f"{value / 1e6:.1f}M" if value >= 1e5 else f"{value:.4g}"


def lines(paper: str) -> Iterator[str]:
    """Markdown: a line a table."""
    rows = results(paper)
    yield "| entry | what | small run | agreement | GPU hours |"
    yield "| --- | --- | --- | --- | ---: |"
    for entry, about in entries(paper).items():
        figures, absent = cells(rows, entry, about["shows"])
        shown = [f"{name.replace(' ', '&nbsp;')}:&nbsp;{said(f)}" for name, f in figures.items()]
        if absent:
            shown.append(f"not&nbsp;run:&nbsp;{','.join(absent).replace(' ', '&nbsp;')}")
        order = agreement(figures, about["printed"], about["shows"]) if "printed" in about else "–"
        small = "<br>".join(shown) or "not run"
        yield f"|`{entry}`|{about['title']}|{small}|{order}|{about['hours']:,}|"


def tables() -> dict[str, str]:
    """By name."""
    return {f"papers-{paper}": "\n".join(lines(paper)) + "\n" for paper in PAPERS}


def counted() -> str:
    """How many small rows were run, and their CPU time."""
    rows = [row for paper in PAPERS for row in results(paper).values()]
    made = {json.dumps(r["commands"]): sum(r["cpu_seconds"]) for r in rows if "commands" in r}
    absent = sum("not_run" in row for row in rows)
    return (
        f"{len(made)} different rows, {sum(made.values()) / 60:.0f} CPU minutes; {absent} not run"
    )


def written(page: str) -> str:
    """The page with its tables, and the count of its rows, as they should be."""
    page = re.sub(r"(?<=<!-- counted -->)[^<]*(?=<!-- end -->)", counted(), page)
    return rewritten(page, tables())


def main() -> None:
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
