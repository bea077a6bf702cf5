"""The tables and the picture of docs/slim.md.

python benchmarks/slim_table.py       writes them, from slim.json, slim_mixture.json and slim_refit.json
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from moesaic.report import draw

HERE = Path(__file__).parent
KEEPS = ("0.75", "0.5", "0.25")
TABLED = KEEPS[1:]
PLAIN = "--score energy --no-refit"
LABELS = {
    "slim": "slim surgeon, refit",
    "slim --allocate experts": "slim uneven surgeon, refit",
    "slim --allocate layers+experts": "slim uneven spread surgeon, refit",
    "slim --recipe paper": "slim uneven",
    "slim --score energy": "slim energy, refit",
    f"slim {PLAIN}": "slim energy",
    "slim --no-refit": "slim surgeon",
    "prune": "prune reconstruction, refit",
    "prune --score reap": "prune reap, refit",
    "prune --recipe paper": "prune reconstruction",
    "prune --no-refit": "prune reconstruction",
    "prune --score frequency --no-refit": "prune frequency",
    "prune --score random --no-refit": "prune random",
    "condense --no-refit": "condense",
}
"""By the command, the name in slim.json, which has more."""
LISTED = (
    "slim",
    "slim --allocate experts",
    "slim --recipe paper",
    "slim --score energy",
    f"slim {PLAIN}",
    "prune",
    "prune --recipe paper",
    "prune --score random --no-refit",
)
"""The rows of docs/slim.md."""
DRAWN = {
    "slim --allocate layers+experts": ("#cc79a7", "uneven, spread"),
    "slim --allocate experts": ("#0072b2", "uneven"),
    "slim": ("#56b4e9", "slim"),
    f"slim {PLAIN}": ("#009e73", "by energy, no refit"),
    "prune --recipe paper": ("#d55e00", "prune, no refit"),
    "prune": ("#e69f00", "prune"),
    "condense --no-refit": ("#7d858c", "condense, no refit"),
}
MIXTURE = "smollm2-mixture"
Results = Mapping[str, Any]


def draws(results: Results, model: str, keep: str, command: str) -> dict[int, dict[str, Any]]:
    """The results of one row, by draw."""
    start = f"{model} | {float(keep):g} | {LABELS[command]} | "
    matching = {k.removeprefix(start): v for k, v in results.items() if k.startswith(start)}
    return {int(draw): result for draw, result in sorted(matching.items())}


def models_of(record: Mapping[str, Any]) -> list[str]:
    """The originals: rows that are named after a model alone."""
    return [name for name in record["results"] if " | " not in name]


def stats(values: Sequence[float], digits: int) -> str:
    """Mean and, of several draws, their standard deviation."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def rows(record: Mapping[str, Any], model: str) -> Iterator[str]:
    """Markdown: perplexity on the text that ships, and KL; in brackets draws, where not three."""
    results = record["results"]
    yield f"| {model} | " + " | ".join(f"{k}: perplexity | KL" for k in TABLED) + " |"
    yield "| --- |" + " ---: | ---: |" * len(TABLED)
    same = f"{results[model]['ships']['perplexity']:.2f} | 0"
    yield f"| original | {' | '.join([same] * len(TABLED))} |"
    for command in LISTED:
        cells = []
        for keep in TABLED:
            runs = [f["ships"] for f in draws(results, model, keep, command).values()]
            if not runs:
                cells += ["", ""]
                continue
            few = f" ({len(runs)})" if len(runs) < 3 else ""
            cells += [
                stats([f["perplexity"] for f in runs], 2) + few,
                stats([f["kl"] for f in runs], 3),
            ]
        if any(cells):
            yield f"| `{command}` | {' | '.join(cells)} |"


def picture(panels: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """Perplexity over bytes in bfloat16, logarithmic, a panel for each record's model."""
    height, top, foot, room = 400.0, 84.0, 58.0, 380.0
    width = 40 + len(panels) * (room + 50)
    out = [
        "<style>text{font:12px system-ui,-apple-system,Roboto,Arial,sans-serif;fill:#1d2126}"
        ".title{font-size:19px;font-weight:600}.quiet{fill:#666d75;font-size:11px}"
        ".grid{stroke:#e4e1d9;fill:none}.end{font-weight:600}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10" fill="#fcfbf8" '
        'stroke="#dedbd2"/>',
        draw.text(36, 40, "Mixtures made smaller: perplexity over size", "title"),
        draw.text(36, 62, "held-out text that ships, logarithmic; lower is better", "quiet"),
    ]
    for n, (record, model) in enumerate(panels):
        left = 60 + n * (room + 50)
        first = record["results"][model]
        lines: dict[str, list[tuple[float, float]]] = {}
        for command in DRAWN:
            each = [draws(record["results"], model, keep, command) for keep in KEEPS]
            points = [
                (
                    2 * mean(f["ships"]["total_parameters"] for f in by_draw.values()) / 1e6,
                    mean(f["ships"]["perplexity"] for f in by_draw.values()),
                )
                for by_draw in each
                if by_draw
            ]
            whole = (2 * first["ships"]["total_parameters"] / 1e6, first["ships"]["perplexity"])
            if points:
                lines[command] = [whole, *points]
        xs, ys = zip(*(p for points in lines.values() for p in points), strict=True)
        least, most = math.log(min(ys)) - 0.05, math.log(max(ys)) + 0.05

        def at(
            x: float,
            y: float,
            left: float = left,
            low: float = min(xs),
            high: float = max(xs),
            least: float = least,
            most: float = most,
        ) -> tuple[float, float]:
            return (
                left + 20 + (room - 60) * (x - low) / (high - low),
                top + (height - top - foot) * (1 - (math.log(y) - least) / (most - least)),
            )

        level = height
        for y in (14, 18, 24, 32, 36, 40, 45, 50, 60, 80, 100, 150, 250):
            if least < math.log(y) < most and at(0, y)[1] < level - 20:
                level = at(0, y)[1]
                out.append(draw.line([(left, level), (left + room - 30, level)], "grid"))
                out.append(draw.text(left - 6, level + 4, f"{y:g}", "quiet", "end"))
        for x in draw.ticks(min(xs), max(xs), 4):
            out.append(draw.text(at(x, ys[0])[0], height - foot + 18, f"{x:g}", "quiet", "middle"))
        below = f"{model}, megabytes in bfloat16"
        out.append(draw.text(left + room / 2, height - foot + 36, below, "quiet", "middle"))
        for row, (command, points) in enumerate(lines.items()):
            colour, words = DRAWN[command]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in points))
            out.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
            )
            out += [
                f'<circle cx="{at(*p)[0]:.1f}" cy="{at(*p)[1]:.1f}" r="4" fill="{colour}" '
                f'stroke="#fcfbf8"><title>{command}: {p[1]:.2f}</title></circle>'
                for p in points
            ]
            if n == 0:
                level = top + 6 + 17 * row
                out.append(f'<circle cx="{left + 170}" cy="{level - 4}" r="4" fill="{colour}"/>')
                out.append(draw.text(left + 180, level, words, "end"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img"><title>Perplexity over size</title>'
        f"{''.join(map(str, out))}</svg>\n"
    )


REFITTED = ("slim --no-refit", "slim", "slim --allocate experts", "prune --no-refit", "prune")
"""The rows of each mixture that is refitted; slim_refit_before.json is of former code."""


def refitted(record: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: half of the experts' parameters, KL and CPU seconds of the command."""
    yield "| | perplexity | KL | CPU s |"
    yield "| --- | ---: | ---: | ---: |"
    for model in models_of(record):
        yield f"| {model} | {record['results'][model]['ships']['perplexity']:.2f} | 0 | |"
        for command in REFITTED:
            for run in draws(record["results"], model, "0.5", command).values():
                figures = f"{run['ships']['perplexity']:.2f} | {run['ships']['kl']:.5f}"
                yield f"| `{command}` | {figures} | {run['cpu_seconds'][0]:.0f} |"


def rewritten(page: str, tables: Mapping[str, str]) -> str:
    """A page with its tables as they should be: each between two comments, the first of which says
    ``figures of`` and the table's name."""
    for name, table in tables.items():
        start = rf"(<!-- figures of {name}:[^\n]*-->\n)"
        page = re.sub(rf"{start}.*?(<!-- end -->)", rf"\1{table}\2", page, flags=re.DOTALL)
    return page


def tables() -> dict[str, str]:
    """All tables by name."""
    alone, mixture, refit = (
        json.loads((HERE / f"{name}.json").read_text())
        for name in ("slim", "slim_mixture", "slim_refit")
    )
    contents = {model: [*rows(r, model)] for r in (alone, mixture) for model in models_of(r)}
    contents["refitted"] = [*refitted(refit)]
    return {name: "\n".join(lines) + "\n" for name, lines in contents.items()}


def main() -> None:
    page = HERE.parent / "docs" / "slim.md"
    page.write_text(rewritten(page.read_text("utf-8"), tables()), "utf-8")
    panels = [
        (json.loads((HERE / f"{name}.json").read_text()), model)
        for name, models in (
            ("slim", ("tiny-shared-moe", "tiny-moe")),
            ("slim_mixture", (MIXTURE,)),
        )
        for model in models
    ]
    (HERE.parent / "docs" / "images" / "slim.svg").write_text(picture(panels))


if __name__ == "__main__":
    main()
