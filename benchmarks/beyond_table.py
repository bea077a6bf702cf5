"""The tables and the picture of docs/beyond.md, from beyond-smollm2.json and beyond_mixtures.json.

python benchmarks/beyond_table.py       writes them
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from slim_table import rewritten

from moesaic.report import draw

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
SERIES = {
    "published": ("MoRE as published", "#7d858c"),
    "static, refit": ("static pruning, refit", "#e69f00"),
    "together": ("256 petals, fitted router, refit", "#0072b2"),
}
RATIOS = ("0.9", "0.8", "0.7", "0.6")
SHOWN = ("0.9", "0.8", "0.6")
"""Of these the ratios in tables."""
LABELS = {
    "published": "MoRE as published",
    "router=ridge": "`-o router=ridge`",
    "refit": "`--refit`",
    "256 petals": "`--layers all --experts 256 --top-k 0`",
    "static, refit": "static, refit",
    "together": "**fine petals**",
}
MIXTURES = {
    "prune to 50% by frequency": "half of the experts, by frequency",
    "prune to 50% by reconstruction": "half of the experts, by reconstruction",
    "condense 2 layers to shared": "2 layers condensed to their shared path",
    "condense 2 layers to shared+routed": "2 layers condensed to shared and routed",
}
Groups = Mapping[str, list[dict[str, Any]]]
"""By group and name, the results of every seed."""


def gathered(results: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, result in results.items():
        groups.setdefault(name.split(", seed ")[0], []).append(result)
    return groups


def at_ratio(groups: Groups, ratio: str, name: str) -> list[dict[str, Any]]:
    return groups.get(f"{ratio}: {name}", [])


def stats(results: Sequence[Mapping[str, Any]], text: str) -> str:
    """Mean and, of several seeds, their standard deviation."""
    return spread([r["perplexity"][text] for r in results])


def spread(values: Sequence[float]) -> str:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return f"{mean(values):.2f}" + (f" ± {deviation:.2f}" if deviation > 0.005 else "")


def rows(groups: Groups) -> Iterator[str]:
    """Markdown: perplexity on both texts, what was active, seconds with the pass."""
    yield "| | text that ships | WikiText-2 | active parameters | seconds |"
    yield f"|---|{'---:|' * 4}"
    keys = [f"{ratio}: {name}" for ratio in SHOWN for name in SERIES]
    for key in ("dense", *keys):
        results = groups[key]
        ratio, _, name = key.rpartition(": ")
        active = f"{results[0]['active_parameters'] / 1e6:.1f} M"
        timed = [r["seconds"] + r["shared_seconds"] for r in results if "seconds" in r]
        cells = [
            f"{ratio}: {LABELS[name]}" if ratio else name,
            *(stats(results, text) for text in ("shipped", "wikitext2-valid")),
            active,
            f"{min(timed):.0f}" if timed else "",
        ]
        yield f"| {' | '.join(cells)} |"


def alone(groups: Groups) -> Iterator[str]:
    """Markdown: every option by itself on the text that ships; seconds at 0.8 beside the pass."""
    ratios = SHOWN[1:]
    yield f"| | {' | '.join(ratios)} | seconds |"
    yield f"|---|{'---:|' * (len(ratios) + 1)}"
    for name, label in LABELS.items():
        figures = [stats(at_ratio(groups, ratio, name), "shipped") for ratio in ratios]
        seconds = min(r["seconds"] for r in at_ratio(groups, "0.8", name))
        yield f"| {label} | {' | '.join(figures)} | {seconds:.0f} |"


def mixtures(results: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: perplexity and seconds without and with a refit."""
    yield "| | no refit | refit | seconds |"
    yield f"|---|{'---:|' * 3}"
    for name, label in MIXTURES.items():
        both = results[name], results[f"{name}, refit"]
        seconds = " / ".join(f"{r['seconds']:.0f}" for r in both)
        yield f"| {label} | {' | '.join(spread(r['perplexity']) for r in both)} | {seconds} |"


def results_of(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text("utf-8"))["results"]


def tables() -> dict[str, str]:
    """By name."""
    groups = gathered(results_of("beyond-smollm2"))
    tables = {
        "petals": rows(groups),
        "petals-options": alone(groups),
        "refits": mixtures(results_of("beyond_mixtures")),
    }
    return {name: "\n".join(lines) + "\n" for name, lines in tables.items()}


def picture(groups: Groups, text: str, title: str) -> str:
    """Perplexity over active ratio, logarithmic, with the dense model as a line."""
    width, height, left, right, top, foot = 900.0, 430.0, 70.0, 250.0, 84.0, 60.0
    lines = {}
    for name in SERIES:
        points = [
            (float(r), mean(x["perplexity"][text] for x in at_ratio(groups, r, name)))
            for r in RATIOS
            if at_ratio(groups, r, name)
        ]
        lines[name] = points
    dense = groups["dense"][0]["perplexity"][text]
    values = [y for points in lines.values() for _, y in points] + [dense]
    least, most = math.log(min(values)) - 0.08, math.log(max(values)) + 0.05

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log(y) - least) / (most - least)
        return (
            left + (width - left - right) * (0.92 - x) / 0.34,
            top + (height - top - foot) * (1 - share),
        )

    style = (
        "text{font:12px system-ui,-apple-system,Roboto,Arial,sans-serif;fill:#1d2126}"
        ".title{font-size:19px;font-weight:600}.quiet{fill:#666d75;font-size:11px}"
        ".grid{stroke:#e4e1d9;fill:none}.dense{stroke:#1d2126;stroke-dasharray:4 4;fill:none}"
        ".own{font-weight:600}"
    )
    out = [
        f"<style>{style}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10" fill="#fcfbf8" '
        'stroke="#dedbd2"/>',
        draw.text(36, 44, title, "title"),
        draw.text(36, 66, "perplexity, logarithmic; lower is better", "quiet"),
    ]
    for y in (15.0, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000):
        if least < math.log(y) < most:
            out.append(draw.line([at(0.92, y), at(0.58, y)], "grid"))
            out.append(draw.text(left - 8, at(0.92, y)[1] + 4, f"{y:g}", "quiet", "end"))
    for ratio in RATIOS:
        x = at(float(ratio), dense)[0]
        out.append(draw.text(x, height - foot + 20, f"{float(ratio):.0%}", "quiet", "middle"))
    out.append(draw.text(at(0.75, dense)[0], height - foot + 40, "active ratio", "quiet", "middle"))
    out.append(draw.line([at(0.92, dense), at(0.58, dense)], "dense"))
    out.append(draw.text(at(0.58, dense)[0] + 8, at(0.58, dense)[1] + 4, f"dense {dense:.1f}"))
    for name, points in lines.items():
        label, colour = SERIES[name]
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in points))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for point in points:
            x, y = at(*point)
            out.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" stroke="#fcfbf8">'
                f"<title>{label}: {point[1]:.2f}</title></circle>"
            )
        x, y = at(*points[-1])
        out.append(draw.text(x + 12, y + 4, f"{label} {points[-1][1]:.1f}", "own"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img"><title>{title}</title>'
        f"{''.join(out)}</svg>\n"
    )


def main() -> None:
    page = DOCS / "beyond.md"
    page.write_text(rewritten(page.read_text("utf-8"), tables()), "utf-8")
    groups = gathered(results_of("beyond-smollm2"))
    svg = picture(groups, "wikitext2-valid", "SmolLM2-135M without training, on WikiText-2")
    (DOCS / "images" / "beyond.svg").write_text(svg)


if __name__ == "__main__":
    main()
