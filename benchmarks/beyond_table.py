"""The tables of docs/beyond.md and the README's picture, from beyond-MODEL.json.

python benchmarks/beyond_table.py [MODEL]       prints Markdown, writes docs/images/beyond.svg
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from moesaic.report import draw

HERE = Path(__file__).parent
SERIES = {
    "published": ("MoRE as published", "#7d858c"),
    "static, refit": ("static pruning, refit", "#e69f00"),
    "together": ("256 petals, fitted router, refit", "#0072b2"),
}
RATIOS = ("0.9", "0.8", "0.7", "0.6")
ALONE = {
    "published": "MoRE as published",
    "router=ridge": "`--router ridge`",
    "refit": "`--refit`",
    "all layers": "`--layers all`",
    "256 petals": "`--layers all --experts 256 --top-k 0`",
    "together": "**fine petals**",
    "static, refit": "the same, `--variant static`",
}
Found = Mapping[str, list[dict[str, Any]]]
"""By group and name, the results of every seed."""


def gathered(results: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for name, result in results.items():
        found.setdefault(name.split(", seed ")[0], []).append(result)
    return found


def of_ratio(found: Found, ratio: str, name: str) -> list[dict[str, Any]]:
    return found.get(f"{ratio}: {name}", [])


def told(results: Sequence[Mapping[str, Any]], text: str) -> str:
    """Mean and, of several seeds, their standard deviation."""
    values = [r["perplexity"][text] for r in results if text in r["perplexity"]]
    if not values:
        return ""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def rows(found: Found, names: Sequence[tuple[str, str]], texts: Sequence[str]) -> Iterator[str]:
    """Markdown: perplexity on every text, what was active, seconds, memory."""
    head = ["", *texts, "active ratio", "active parameters", "seconds", "peak GB", "seeds"]
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for label, key in names:
        results = found.get(key, [])
        if not results:
            continue
        first = results[0]
        timed = [r["seconds"] + r["shared_seconds"] for r in results if "seconds" in r]
        cells = [
            label,
            *(told(results, text) for text in texts),
            f"{first['active_ratio']:.3f}",
            f"{first['active_parameters'] / 1e6:.1f} M",
            f"{min(timed):.0f}" if timed else "",
            f"{first['peak_gb']:.1f}" if "peak_gb" in first else "",
            str(len(results)),
        ]
        yield f"| {' | '.join(cells)} |"


def alone(found: Found, text: str) -> Iterator[str]:
    """Markdown: every option by itself, ratio by ratio; seconds at 0.8 beside the pass."""
    yield f"| | {' | '.join(RATIOS)} | seconds |"
    yield f"|---|{'---:|' * (len(RATIOS) + 1)}"
    for name, label in ALONE.items():
        each = {ratio: of_ratio(found, ratio, name) for ratio in RATIOS}
        if not any(each.values()):
            continue
        seconds = [r["seconds"] for r in each["0.8"] if "seconds" in r]
        took = f"{min(seconds):.0f}" if seconds else ""
        cells = [label, *(told(results, text) for results in each.values()), took]
        yield f"| {' | '.join(cells)} |"


def closed(found: Found, texts: Sequence[str]) -> Iterator[str]:
    """Markdown: the share of published MoRE's gap to dense that is closed, seed by seed."""
    yield f"| | {' | '.join(RATIOS)} |"
    yield f"|---|{'---:|' * len(RATIOS)}"
    for text in texts:
        dense = found["dense"][0]["perplexity"][text]
        for name in list(SERIES)[1:]:
            cells = [f"{SERIES[name][0]}, {text}"]
            for ratio in RATIOS:
                pairs = zip(
                    of_ratio(found, ratio, "published"), of_ratio(found, ratio, name), strict=True
                )
                shares = [
                    (a["perplexity"][text] - b["perplexity"][text])
                    / (a["perplexity"][text] - dense)
                    for a, b in pairs
                ]
                spread = f" ± {100 * stdev(shares):.0f}" if len(shares) > 1 else ""
                cells.append(f"{100 * mean(shares):.0f}{spread} %")
            yield f"| {' | '.join(cells)} |"


def picture(found: Found, text: str, title: str) -> str:
    """Perplexity over active ratio, logarithmic, with the dense model as a line."""
    width, height, left, right, top, foot = 900.0, 430.0, 70.0, 250.0, 84.0, 60.0
    lines = {}
    for name in SERIES:
        points = [
            (float(r), mean(x["perplexity"][text] for x in of_ratio(found, r, name)))
            for r in RATIOS
            if of_ratio(found, r, name)
        ]
        lines[name] = points
    dense = found["dense"][0]["perplexity"][text]
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
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    results = json.loads((HERE / f"beyond-{model}.json").read_text())["results"]
    found = gathered(results)
    texts = list(found["dense"][0]["perplexity"])
    by_ratio = [("dense", "dense")]
    for ratio in RATIOS:
        for name, (label, _) in SERIES.items():
            by_ratio.append((f"{ratio}: {label}", f"{ratio}: {name}"))
    print("\n".join(rows(found, by_ratio, texts)), "\n")
    print("\n".join(closed(found, texts)), "\n")
    for text in texts:
        print(f"{text}\n\n" + "\n".join(alone(found, text)), "\n")
    known = {key for _, key in by_ratio} | {f"{r}: {name}" for r in RATIOS for name in ALONE}
    others = [(key, key) for key in found if key not in known]
    print("\n".join(rows(found, others, texts)))
    if model == "smollm2":
        title = "SmolLM2-135M without training, on WikiText-2" if len(texts) > 1 else model
        svg = picture(found, texts[-1], title)
        (HERE.parent / "docs" / "images" / "beyond.svg").write_text(svg)


if __name__ == "__main__":
    main()
