"""The table and the picture of docs/frontier.md: KL over bytes, above and below plain types.

python benchmarks/below_table.py       writes them, from below.json
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from slim_table import rewritten, told

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
FIT, VERB, LAYERS, PLAIN = "`fit`", "one verb, q2_k", "types by layer", "one type"
COLOURS = {FIT: "#0072b2", VERB: "#d55e00", LAYERS: "#009e73", PLAIN: "#7d858c"}


def grouped(record: Mapping[str, Any]) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """By kind and name of a row the MB, KL and perplexity of its draws."""
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for name, row in record["results"].items():
        _, *parts = name.split(" | ")
        if parts[0] == "fit":
            key, size = (FIT, parts[1]), row["fit"]["gguf"]["bytes"]
        else:
            size = row["file"]["bytes"]
            kinds = {"by layer": LAYERS}
            key = (kinds.get(parts[0], VERB if len(parts) > 1 else PLAIN), parts[0])
        held = row["held"]
        found[key].append((size / 1e6, held["kl"], held["perplexity"]))
    return dict(found)


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: the largest first."""
    yield "| | MB | KL | perplexity |"
    yield "|---|---:|---:|---:|"
    rows = sorted(grouped(record).items(), key=lambda row: -mean(p[0] for p in row[1]))
    for (kind, name), points in rows:
        sizes, kls, perplexities = zip(*points, strict=True)
        words = {FIT: f"`fit --memory {name}`", LAYERS: "types by layer alone"}.get(kind, name)
        digits = 4 if mean(kls) < 0.01 else 3
        few = f" ({len(kls)})" if kind in (FIT, VERB) and len(kls) < 3 else ""
        figures = told([mean(sizes)], 2), told(kls, digits) + few, told(perplexities, 2)
        yield f"| {words} | {' | '.join(figures)} |"


def tables() -> dict[str, str]:
    """By name."""
    record = json.loads((HERE / "below.json").read_text("utf-8"))
    return {"below": "\n".join(table(record)) + "\n"}


def picture(record: Mapping[str, Any], file: Path) -> None:
    """KL, logarithmic, over megabytes."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "moesaic", "font.size": 10})
    figure, axes = plt.subplots(figsize=(8.2, 4.3))
    kinds: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for (kind, name), points in grouped(record).items():
        kinds[kind].append((mean(p[0] for p in points), mean(p[1] for p in points), name))
    for kind, colour in COLOURS.items():
        named = sorted(kinds[kind])
        line = "-" if kind in (FIT, PLAIN) else ""
        xs, ys, _ = zip(*named, strict=True)
        order = 3 if kind == FIT else 2
        axes.plot(xs, ys, f"o{line}", color=colour, label=kind.replace("`", ""), zorder=order)
        if kind in (PLAIN, VERB):
            for x, y, name in named:
                axes.annotate(
                    name.removesuffix(", q2_k"),
                    (x, y),
                    (5, 5),
                    textcoords="offset points",
                    fontsize=8,
                )
    axes.set_yscale("log")
    axes.set_xlabel("megabytes of the GGUF file")
    axes.set_ylabel("KL from the original, nats a token")
    axes.set_title("Fewer weights, fewer bits, or both: tiny-moe", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    page = DOCS / "frontier.md"
    page.write_text(rewritten(page.read_text("utf-8"), tables()), "utf-8")
    record = json.loads((HERE / "below.json").read_text("utf-8"))
    picture(record, DOCS / "images" / "below.svg")


if __name__ == "__main__":
    main()
