"""The table of docs/fit.md: how the cost of deciding grows, from growth.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slim_table import rewritten

HERE = Path(__file__).parent
GROWN = {
    "layers": (4, 8, 16, 32),
    "experts": (16, 32, 64, 128),
    "width": (128, 256, 512, 1024),
    "samples": (16, 32, 64, 128),
}


def rows(record: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: CPU seconds at the smallest size and at each that is twice as large."""
    heads = (f"{size} {values[0]} to {values[-1]}" for size, values in GROWN.items())
    yield f"| CPU seconds | {' | '.join(heads)} |"
    yield "| --- |" + " ---: |" * len(GROWN)
    results = record["results"]
    for verb in dict.fromkeys(name.partition(" | ")[0] for name in results):
        cells = []
        for size, values in GROWN.items():
            seconds = [sum(results[f"{verb} | {size}-{n}"]["cpu_seconds"]) for n in values]
            cells.append("/".join(f"{s:.0f}" for s in seconds))
        yield f"| `{verb}` | {' | '.join(cells)} |"


def tables() -> dict[str, str]:
    """By name."""
    record = json.loads((HERE / "growth.json").read_text("utf-8"))
    return {"growth": "\n".join(rows(record)) + "\n"}


def main() -> None:
    page = HERE.parent / "docs" / "fit.md"
    page.write_text(rewritten(page.read_text("utf-8"), tables()), "utf-8")


if __name__ == "__main__":
    main()
