"""The tables and pictures of docs/frontier.md and README: KL over bytes, beside plain types.

python benchmarks/below_table.py       writes them, from below.json
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from slim_table import rewritten, stats

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
FIT, VERB, LAYERS, PLAIN = "`fit`", "one verb, rounded", "types by layer", "one type"
COLOURS = {FIT: "#0072b2", VERB: "#d55e00", LAYERS: "#009e73", PLAIN: "#7d858c"}
Points = dict[tuple[str, str], list[tuple[float, ...]]]
"""By kind and name of a row the MB, KL and perplexity of its draws, and the KL of each source."""
SOURCES = ("prose", "reference", "code")
COLUMNS = 3
"""Panels of a line."""
INK = "#7d858c"
"""Of text that is read on white and on black."""
DRAWN = (
    "q6_k",
    "q5_k_m",
    "q3_k_m",
    "q2_k",
    "iq2_xs",
    "iq1_m",
    "prune to 3, iq1_s",
    "prune to 2, iq1_s",
    "slim to 1/3, iq1_s",
    "4 of eight, iq3_xxs",
)
"""Rows of which only the picture tells."""


def grouped(record: Mapping[str, Any]) -> dict[str, Points]:
    """The rows of each model."""
    points: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    for name, row in record["results"].items():
        folder, *parts = name.split(" | ")
        model = Path(folder).name
        if parts[0].startswith("fit"):
            name = f"--memory {parts[1]}`{parts[0].removeprefix('fit')}"
            key, size = (FIT, name), row["fit"]["gguf"]["bytes"]
        else:
            size = row["file"]["bytes"]
            kinds = {"by layer": LAYERS}
            key = (kinds.get(parts[0], VERB if len(parts) > 1 else PLAIN), parts[0])
        held = row["held"]
        of_sources = (held["sources"][source]["kl"] for source in SOURCES)
        points[model][key].append((size / 1e6, held["kl"], held["perplexity"], *of_sources))
    return points


def table(rows: Points) -> Iterator[str]:
    """Markdown: the largest first."""
    yield f"| | MB | KL | perplexity | KL of {'/'.join(SOURCES)} |"
    yield "|---|---:|---:|---:|---:|"
    for (kind, name), points in sorted(rows.items(), key=lambda row: -mean(p[0] for p in row[1])):
        if name in DRAWN:
            continue
        sizes, kls, perplexities, *of_sources = zip(*points, strict=True)
        words = {FIT: f"`fit {name}", LAYERS: "types by layer alone"}.get(kind, name)
        digits = 4 if mean(kls) < 0.01 else 3
        few = f" ({len(kls)})" if kind in (FIT, VERB) and len(kls) < 3 else ""
        parts = "/".join(stats([mean(values)], digits) for values in of_sources)
        figures = stats([mean(sizes)], 2), stats(kls, digits) + few, stats(perplexities, 2), parts
        yield f"| {words} | {' | '.join(figures)} |"


GAINS = (
    ("SmolLM2-135M, dense", "smollm2", "iq3_xxs", "fit --memory 86958KB"),
    ("eight copies of SmolLM2", "smollm2-mixture", "q4_k_m", "2 of eight, q8_0"),
    ("wide-moe", "wide-moe", "iq2_xxs", "fit --memory 3947KB"),
    ("tiny-moe", "tiny-moe", "iq1_s", "fit --memory 2614KB"),
    ("tiny-moe", "tiny-moe", "by layer", "fit --memory 2090KB"),
    ("tiny-moe", "tiny-moe", "iq3_xxs", "fit --memory 3315KB"),
    ("SmolLM2-135M, dense", "smollm2", "iq3_xxs", "slim to 3/5, iq3_xxs"),
)
"""README's rows: what a model is called and its name, a plain quantised file, and ours."""


def gains(record: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: a plain quantised file, and ours of its bytes or less."""
    models = {
        model: {name.replace("`", ""): points for (_, name), points in rows.items()}
        for model, rows in grouped(record).items()
    }
    yield "| model | quantised alone | MB | KL | Moesaic | MB | KL |"
    yield "|---|---|---:|---:|---|---:|---:|"
    for called, model, plain, ours in GAINS:
        cells = [called]
        for name in (plain, ours):
            points = models[model][name.removeprefix("fit ")]
            sizes, kls, *_ = zip(*points, strict=True)
            label = {"by layer": "types by layer"}.get(name, name)
            cells += [f"`{label}`", stats([mean(sizes)], 2), stats(kls, 3)]
        yield f"| {' | '.join(cells)} |"


def tables() -> dict[str, str]:
    """By name."""
    record = read("below")
    of_models = {f"below-{model}": table(rows) for model, rows in grouped(record).items()}
    written = {**of_models, "skills": skills(read("skills")), "gains": gains(record)}
    return {name: "\n".join(lines) + "\n" for name, lines in written.items()}


def read(name: str) -> dict[str, Any]:
    """A record of figures."""
    result: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text("utf-8"))
    return result


def skills(record: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: KL of two more texts, accuracy in percent, the share that loops."""
    yield "| SmolLM2 | MB | KL of WikiText-2/arithmetic | sums | questions | loops |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, row in record["results"].items():
        kls = [row[text]["kl"] for text in ("second", "arithmetic") if text in row]
        size = f"{row['file']['bytes'] / 1e6:.2f}" if "file" in row else ""
        sums, questions = (
            f"{100 * mean(task['acc_norm'] for task in row[tasks]['tasks'].values()):.0f}"
            for tasks in ("sums", "held")
        )
        loops = f"{100 * row['held']['generations']['0']['looping']:.0f}"
        two = "/".join(f"{kl:.4f}" if kl < 0.01 else f"{kl:.3f}" for kl in kls)
        cells = name.split(" | ")[1], size, two, sums, questions, loops
        yield f"| {' | '.join(cells)} |"


def picture(record: Mapping[str, Any], file: Path) -> None:
    """KL, logarithmic, over megabytes; a panel a model."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "moesaic", "font.size": 10})
    models = grouped(record)
    lines = -(-len(models) // COLUMNS)
    size = (5.2 * COLUMNS, 5.0 * lines)
    figure, grid = plt.subplots(lines, COLUMNS, figsize=size, squeeze=False)
    panels = [*grid.flat]
    for axes in panels[len(models) :]:
        axes.remove()
    for axes, (model, rows) in zip(panels, models.items(), strict=False):
        kinds: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for (kind, name), points in rows.items():
            kinds[kind].append((mean(p[0] for p in points), mean(p[1] for p in points), name))
        for kind, colour in COLOURS.items():
            named = sorted(kinds[kind])
            line = "-" if kind in (FIT, PLAIN) else ""
            xs, ys = [x for x, _, _ in named], [y for _, y, _ in named]
            order = 3 if kind == FIT else 2
            axes.plot(xs, ys, f"o{line}", color=colour, label=kind.replace("`", ""), zorder=order)
            for x, y, name in named if kind in (PLAIN, VERB) else ():
                label = name.removesuffix(", iq1_s").removesuffix(", iq3_xxs")
                axes.annotate(label, (x, y), (7, -3), textcoords="offset points", fontsize=7)
        axes.set_yscale("log")
        axes.set_xlabel("megabytes of the GGUF file")
        axes.set_ylabel("KL from the original, nats a token")
        axes.set_title(model, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


LABELLED = {
    "by layer": ("the smallest quantised file", (9, 4)),
    "--memory 2090KB": ("fit, of that size", (-8, -36)),
    "--memory 1310KB": ("fit, smaller still", (9, 4)),
}
"""Points that README's picture names: what it says, and where."""


def first(record: Mapping[str, Any], file: Path) -> None:
    """README's picture: one mixture, quantised alone and by fit."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "moesaic", "font.size": 13})
    figure, axes = plt.subplots(figsize=(8.5, 4.2))
    lines: dict[str, list[tuple[float, float]]] = {FIT: [], PLAIN: []}
    for (kind, name), points in grouped(record)["tiny-moe"].items():
        line = lines.get(PLAIN if kind == LAYERS else kind)
        if line is None:
            continue
        point = mean(p[0] for p in points), mean(p[1] for p in points)
        line.append(point)
        words, place = LABELLED.get(name.replace("`", ""), ("", (0, 0)))
        if words:
            side = "right" if place[0] < 0 else "left"
            axes.annotate(
                f"{words}:\n{point[0]:.2f} MB, KL {point[1]:.2f}",
                point, place, textcoords="offset points", ha=side, color=INK,
            )  # fmt: skip
    for kind, label in ((PLAIN, "quantised alone"), (FIT, "moesaic fit")):
        axes.plot(*zip(*sorted(lines[kind]), strict=True), "o-", color=COLOURS[kind], label=label)
    axes.set(yscale="log", xlim=(1.1, 4.4), ylim=(0.002, 1.2))
    axes.set_xlabel("megabytes of the GGUF file", color=INK)
    axes.set_ylabel("KL from the original", color=INK)
    axes.tick_params(colors=INK, which="both")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)
    axes.legend(frameon=False, labelcolor=INK, loc="lower left")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None}, transparent=True)


def main() -> None:
    for page in (DOCS / "frontier.md", DOCS.parent / "README.md"):
        page.write_text(rewritten(page.read_text("utf-8"), tables()), "utf-8")
    first(read("below"), DOCS / "images" / "first.svg")
    picture(read("below"), DOCS / "images" / "below.svg")


if __name__ == "__main__":
    main()
