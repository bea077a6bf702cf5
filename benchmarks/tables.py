"""The tables and pictures of README and docs/, from the JSON files beside this.

python benchmarks/tables.py       writes them; pictures need matplotlib
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = [HERE.parent / "README.md"]
PAGES += [DOCS / f"{name}.md" for name in ("slim", "choosing", "frontier", "beyond", "fit")]
Results = Mapping[str, Any]


def record(name: str) -> dict[str, Any]:
    """A record of figures."""
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text("utf-8"))
    return found


def stats(values: Sequence[float], digits: int = 2, draws: int = 1) -> str:
    """Mean and, of several draws, their standard deviation; in brackets, if fewer than wanted, how
    many they are."""
    if not values:
        return ""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    few = f" ({len(values)})" if len(values) < draws else ""
    return f"{mean(values):.{digits}f}{spread}{few}"


def head(*names: str, words: Sequence[str] = ()) -> str:
    """Markdown: the names of columns; the first and those of words are aligned to the left."""
    aligned = ("---:" if n and name not in words else "---" for n, name in enumerate(names))
    return f"| {' | '.join(names)} |\n|{'|'.join(aligned)}|"


def line(*cells: str) -> str:
    """Markdown: a row."""
    return f"| {' | '.join(cells)} |"


def rewritten(page: str, tables: Mapping[str, str]) -> str:
    """A page with its tables as they should be: each between two comments, the first of which says
    ``figures of`` and the table's name."""
    for name, table in tables.items():
        start = rf"(<!-- figures of {name}:[^\n]*-->\n)"
        page = re.sub(rf"{start}.*?(<!-- end -->)", rf"\1{table}\2", page, flags=re.DOTALL)
    return page


# --- docs/slim.md --------------------------------------------------------------------------------

KEEPS = ("0.75", "0.5", "0.25")
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
    "prune --recipe paper": "prune reconstruction",
    "prune --no-refit": "prune reconstruction",
    "prune --score random --no-refit": "prune random",
    "condense --no-refit": "condense",
}
"""By the command, the name in slim.json, which has more."""
LISTED = (
    "slim",
    "slim --allocate experts",
    "slim --recipe paper",
    f"slim {PLAIN}",
    "prune",
    "prune --recipe paper",
    "prune --score random --no-refit",
)
"""The rows of docs/slim.md."""
SLIM_DRAWN = {
    "slim --allocate layers+experts": ("#cc79a7", "uneven, spread"),
    "slim --allocate experts": ("#0072b2", "uneven"),
    "slim": ("#56b4e9", "slim"),
    f"slim {PLAIN}": ("#009e73", "by energy, no refit"),
    "prune --recipe paper": ("#d55e00", "prune, no refit"),
    "prune": ("#e69f00", "prune"),
    "condense --no-refit": ("#7d858c", "condense, no refit"),
}
SLIM_PANELS = (
    ("slim", "tiny-shared-moe"),
    ("slim", "tiny-moe"),
    ("slim_mixture", "smollm2-mixture"),
)
REFITTED = ("slim --no-refit", "slim", "slim --allocate experts", "prune --no-refit", "prune")
"""The rows of each mixture that is refitted; slim_refit_before.json is of former code."""
OURS = (
    "slim",
    "slim --allocate layers+experts",
    "slim --score energy --no-refit",
    "prune",
    "prune --score reap",
    "prune --score weighted-ean",
)
"""Our rows beside other tools."""


def draws(results: Results, model: str, keep: str, command: str) -> dict[int, dict[str, Any]]:
    """The results of one row, by draw."""
    start = f"{model} | {float(keep):g} | {LABELS[command]} | "
    matching = {k.removeprefix(start): v for k, v in results.items() if k.startswith(start)}
    return {int(draw): result for draw, result in sorted(matching.items())}


def slimmed(results: Results, model: str) -> Iterator[str]:
    """Perplexity on the text that ships, and KL; in brackets draws, where not three."""
    yield head(model, *(name for k in KEEPS[1:] for name in (f"{k}: perplexity", "KL")))
    yield line("original", *[f"{results[model]['ships']['perplexity']:.2f}", "0"] * 2)
    for command in LISTED:
        cells = []
        for keep in KEEPS[1:]:
            runs = [f["ships"] for f in draws(results, model, keep, command).values()]
            cells += [stats([f["perplexity"] for f in runs], draws=3)]
            cells += [stats([f["kl"] for f in runs], 3)]
        if any(cells):
            yield line(f"`{command}`", *cells)


def refitted(results: Results) -> Iterator[str]:
    """Half of the experts' parameters, KL and CPU seconds of the command."""
    yield head("", "perplexity", "KL", "CPU s")
    for model in (name for name in results if " | " not in name):
        yield line(model, f"{results[model]['ships']['perplexity']:.2f}", "0", "")
        for command in REFITTED:
            for run in draws(results, model, "0.5", command).values():
                figures = f"{run['ships']['perplexity']:.2f}", f"{run['ships']['kl']:.5f}"
                yield line(f"`{command}`", *figures, f"{run['cpu_seconds'][0]:.0f}")


def peers(found: Results) -> Iterator[str]:
    """A line a tool; of each model and share KL and CPU seconds."""
    rows = {(row["tool"], row["model"], row["keep"]): row for row in found["results"]}
    places = [(m, k) for m in found["models"] for k in found["keep"] if ("slim", m, k) in rows]
    heads = [name for m, k in places for name in (f"{m}, {k:g}: KL", "CPU s")]
    yield head("", *heads, "loads", words=["loads"])
    for tool in dict.fromkeys([*OURS, *(tool for tool, *_ in rows)]):
        ran = [row for place in places if "kl" in (row := rows.get((tool, *place), {}))]
        loads = all(row["loads_in_transformers"] is True and "note" not in row for row in ran)
        cells = []
        for place in places:
            row = rows.get((tool, *place), {})
            cells += [f"{row['kl']:.3f}", f"{row['cpu_seconds']:.0f}"] if row in ran else ["", ""]
        if ran:
            yield line(f"`{tool}`" if tool in OURS else tool, *cells, "yes" if loads else "no")


# --- docs/beyond.md ------------------------------------------------------------------------------

SERIES = {
    "published": ("MoRE as published", "#7d858c"),
    "static, refit": ("static pruning, refit", "#e69f00"),
    "together": ("256 petals, fitted router, refit", "#0072b2"),
}
RATIOS = ("0.9", "0.8", "0.7", "0.6")
SHOWN = ("0.8", "0.6")
"""Of these the ratios in tables."""
PETALS = {
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
"""By ratio and name, the results of every seed."""


def by_seed(results: Results) -> Groups:
    """Results without their seeds' names."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, result in results.items():
        groups[name.split(", seed ")[0]].append(result)
    return groups


def spread(values: Sequence[float]) -> str:
    """Mean and deviation, where that is not nothing."""
    return stats(values if len(values) > 1 and stdev(values) > 0.005 else values[:1])


def perplexity(results: Iterable[Results], text: str) -> list[float]:
    """Of every seed."""
    return [r["perplexity"][text] for r in results]


def petals(groups: Groups) -> Iterator[str]:
    """Perplexity on both texts, what was active, seconds with the pass."""
    yield head("", "text that ships", "WikiText-2", "active parameters", "seconds")
    for key in ("dense", *(f"{ratio}: {name}" for ratio in SHOWN for name in SERIES)):
        results = groups[key]
        ratio, _, name = key.rpartition(": ")
        timed = [r["seconds"] + r["shared_seconds"] for r in results if "seconds" in r]
        yield line(
            f"{ratio}: {PETALS[name]}" if ratio else name,
            *(spread(perplexity(results, text)) for text in ("shipped", "wikitext2-valid")),
            f"{results[0]['active_parameters'] / 1e6:.1f} M",
            f"{min(timed):.0f}" if timed else "",
        )


def petal_options(groups: Groups) -> Iterator[str]:
    """Every option by itself on the text that ships; seconds at 0.8 beside the pass."""
    yield head("", *SHOWN, "seconds")
    for name, label in PETALS.items():
        both = [groups[f"{ratio}: {name}"] for ratio in SHOWN]
        seconds = min(r["seconds"] for r in both[0])
        yield line(label, *(spread(perplexity(r, "shipped")) for r in both), f"{seconds:.0f}")


def refits(results: Results) -> Iterator[str]:
    """Perplexity and seconds without and with a refit."""
    yield head("", "no refit", "refit", "seconds")
    for name, label in MIXTURES.items():
        both = results[name], results[f"{name}, refit"]
        seconds = " / ".join(f"{r['seconds']:.0f}" for r in both)
        yield line(label, *(spread(r["perplexity"]) for r in both), seconds)


# --- docs/frontier.md and README -----------------------------------------------------------------

FIT, VERB, LAYERS, PLAIN_TYPE = "`fit`", "one verb, quantised", "types by layer", "one type"
COLOURS = {FIT: "#0072b2", VERB: "#d55e00", LAYERS: "#009e73", PLAIN_TYPE: "#7d858c"}
Points = dict[tuple[str, str], list[tuple[float, ...]]]
"""By kind and name of a row the MB, KL and perplexity of its draws, and the KL of each source."""
SOURCES = ("prose", "reference", "code")
DRAWN = (
    "q6_k",
    "q5_k_m",
    "q3_k_m",
    "q2_k",
    "iq2_xs",
    "iq1_m",
    "prune to 3, iq1_s",
    "prune to 2, iq1_s",
    "prune to 4, iq1_s",
    "slim to 1/3, iq1_s",
    "4 of eight, iq3_xxs",
    "2 of eight, iq3_xxs",
)
"""Rows that are in the picture alone."""
GAINS = (
    ("SmolLM2-135M, dense", "smollm2", "iq3_xxs", "fit --memory 86958KB"),
    ("eight copies of SmolLM2", "smollm2-mixture", "q4_k_m", "fit --memory 186420KB"),
    ("flat-moe", "flat-moe", "iq2_xxs", "fit --memory 3263KB"),
    ("tiny-moe", "tiny-moe", "iq1_s", "fit --memory 2614KB"),
    ("tiny-moe", "tiny-moe", "by layer", "fit --memory 2090KB"),
    ("tiny-moe", "tiny-moe", "iq3_xxs", "fit --memory 3315KB"),
    ("SmolLM2-135M, dense", "smollm2", "iq3_xxs", "slim to 3/5, iq3_xxs"),
)
"""README's rows: what a model is called and its name, a plain quantised file, and ours."""


def below() -> dict[str, Points]:
    """The rows of each model."""
    points: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    for name, row in record("below")["results"].items():
        folder, *parts = name.split(" | ")
        if parts[0].startswith("fit"):
            key = FIT, f"--memory {parts[1]}`{parts[0].removeprefix('fit')}"
            size = row["fit"]["gguf"]["bytes"]
        else:
            kind = VERB if len(parts) > 1 else PLAIN_TYPE
            key, size = (LAYERS if parts[0] == "by layer" else kind, parts[0]), row["file"]["bytes"]
        held = row["held"]
        of_sources = (held["sources"][source]["kl"] for source in SOURCES)
        points[Path(folder).name][key].append(
            (size / 1e6, held["kl"], held["perplexity"], *of_sources)
        )
    return points


def files(rows: Points) -> Iterator[str]:
    """The largest first."""
    yield head("", "MB", "KL", "perplexity", f"KL of {'/'.join(SOURCES)}")
    for (kind, name), points in sorted(rows.items(), key=lambda row: -mean(p[0] for p in row[1])):
        if name in DRAWN:
            continue
        sizes, kls, perplexities, *of_sources = zip(*points, strict=True)
        words = {FIT: f"`fit {name}", LAYERS: "types by layer alone"}.get(kind, name)
        digits = 4 if mean(kls) < 0.01 else 3
        figures = stats(kls, digits, 3 if kind in (FIT, VERB) else 1), stats(perplexities)
        parts = "/".join(f"{mean(values):.{digits}f}" for values in of_sources)
        yield line(words, f"{mean(sizes):.2f}", *figures, parts)


def gains(found: Mapping[str, Points]) -> Iterator[str]:
    """A plain quantised file, and ours of its bytes or less."""
    words = "quantised alone", "Moesaic"
    yield head("model", words[0], "MB", "KL", words[1], "MB", "KL", words=words)
    for called, model, plain, ours in GAINS:
        named = {name.replace("`", ""): points for (_, name), points in found[model].items()}
        cells = [called]
        for name in (plain, ours):
            sizes, kls, *_ = zip(*named[name.removeprefix("fit ")], strict=True)
            label = {"by layer": "types by layer"}.get(name, name)
            cells += [f"`{label}`", f"{mean(sizes):.2f}", stats(kls, 3)]
        yield line(*cells)


def skills(results: Results) -> Iterator[str]:
    """KL of two more texts, accuracy in percent, the share that loops."""
    columns = "MB", "KL of WikiText-2/arithmetic", "sums", "questions", "loops"
    yield head("SmolLM2", *columns)
    for name, row in results.items():
        kls = [row[text]["kl"] for text in ("second", "arithmetic") if text in row]
        sums, questions = (
            f"{100 * mean(task['acc_norm'] for task in row[tasks]['tasks'].values()):.0f}"
            for tasks in ("sums", "held")
        )
        yield line(
            name.split(" | ")[1],
            f"{row['file']['bytes'] / 1e6:.2f}" if "file" in row else "",
            "/".join(f"{kl:.4f}" if kl < 0.01 else f"{kl:.3f}" for kl in kls),
            sums,
            questions,
            f"{100 * row['held']['generations']['0']['looping']:.0f}",
        )


# --- docs/choosing.md and docs/fit.md ------------------------------------------------------------

DENSE = {
    "dense": "dense, float32, transformers",
    "llama.cpp, f32": "the same in llama.cpp",
    "llama.cpp, q8_0": "**q8_0 in llama.cpp**",
    "llama.cpp, q4_k_m": "q4_k_m in llama.cpp",
    "llama.cpp, q4_1": "the file it comes in, in llama.cpp",
    "int8 in torch": "int8 in torch",
    "static pruning, refitted": "static pruning, refitted, all layers{}",
    "slim": "`slim`, all layers",
    "MoRE": "MoRE (`--method more`), the last half of the layers{}",
    "fine petals": "**`carve`**, [fine petals](beyond.md) in all layers{}",
}
"""The rows of the table; ``{}`` for the active ratio."""


def dense(results: Results) -> Iterator[str]:
    """Quality of one draw; speed as the median of the rounds' ratios, with their range."""
    columns = "file", "text that ships", "WikiText-2", "KL", "decoding", "prompts"
    yield head("SmolLM2-135M", *columns)
    for name, words in DENSE.items():
        row = results[name]
        speeds = [row["speed"][what] for what in ("decode", "prefill")]
        timed = [f"{s['ratio']:.1f} ({s['spread'][0]:.1f}–{s['spread'][1]:.1f})" for s in speeds]
        yield line(
            words.format(f", {row['shipped']['active_ratio']:.2f} active"),
            f"{row['file']['bytes'] / 1e6:.0f} MB",
            *(f"{row[text]['perplexity']:.2f}" for text in ("shipped", "wikitext2-valid")),
            f"{row['shipped'].get('kl', 0):.3f}",
            *(["1", "1"] if name == "dense" else timed),
        )


def growth(results: Results) -> Iterator[str]:
    """CPU seconds at the smallest size and at each that is twice as large."""
    grown: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for name, result in results.items():
        verb, size, number = re.split(r" \| |-(?=\d+$)", name)
        grown[verb][size][int(number)] = sum(result["cpu_seconds"])
    (sizes, *_) = grown.values()
    yield head("CPU seconds", *(f"{size} {min(n)} to {max(n)}" for size, n in sizes.items()))
    for verb, seconds in grown.items():
        cells = ("/".join(f"{seconds[size][n]:.0f}" for n in sorted(sizes[size])) for size in sizes)
        yield line(f"`{verb}`", *cells)


def tables() -> dict[str, str]:
    """All tables by name."""
    groups, found = by_seed(record("beyond-smollm2")["results"]), below()
    written: dict[str, Iterator[str]] = {
        **{model: slimmed(record(name)["results"], model) for name, model in SLIM_PANELS},
        "refitted": refitted(record("slim_refit")["results"]),
        "peers": peers(record("peers")),
        "petals": petals(groups),
        "petals-options": petal_options(groups),
        "refits": refits(record("beyond_mixtures")["results"]),
        **{f"below-{model}": files(rows) for model, rows in found.items()},
        "skills": skills(record("skills")["results"]),
        "gains": gains(found),
        "frontier": dense(record("frontier")["results"]),
        "growth": growth(record("growth")["results"]),
    }
    return {name: "\n".join(lines) + "\n" for name, lines in written.items()}


# --- pictures ------------------------------------------------------------------------------------

INK = "#7d858c"
"""Of text that is read on white and on black."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moesaic",
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
"""Settings of matplotlib for all pictures."""
MEGABYTES, DIVERGENCE = "megabytes of the GGUF file", "KL from the original"
LABELLED = {
    "by layer": ("the smallest quantised file", (9, 4)),
    "--memory 2090KB": ("fit, of that size", (-8, -36)),
    "--memory 1310KB": ("fit, smaller still", (9, 4)),
}
"""Points that README's picture names: what it says, and where."""


def numbered(axis: Any, ticks: Iterable[float]) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    low, high = axis.get_view_interval()
    within = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(within, [f"{tick:g}" for tick in within])
    axis.set_ticks([], minor=True)


def picture_of_slim(figure: Any) -> None:
    """Perplexity over bytes in bfloat16, a panel for each model."""
    for axes, (name, model) in zip(figure.subplots(1, 3), SLIM_PANELS, strict=True):
        results = record(name)["results"]
        for command, (colour, words) in SLIM_DRAWN.items():
            each = [draws(results, model, keep, command).values() for keep in KEEPS]
            runs = [[results[model]], *filter(None, each)]
            sizes, perplexities = (
                [mean(run["ships"][what] for run in of) for of in runs]
                for what in ("total_parameters", "perplexity")
            )
            if len(runs) > 1:
                megabytes = [2 * size / 1e6 for size in sizes]
                axes.plot(megabytes, perplexities, "o-", color=colour, label=words)
        axes.set(xlabel="megabytes in bfloat16", ylabel="perplexity", yscale="log", title=model)
        numbered(axes.yaxis, (14, 20, 30, 35, 40, 50, 60, 80, 100, 150, 250))
    figure.axes[0].legend()


def picture_of_petals(figure: Any) -> None:
    """Perplexity on WikiText-2 over the active ratio."""
    groups, text = by_seed(record("beyond-smollm2")["results"]), "wikitext2-valid"
    axes = figure.subplots()
    for name, (label, colour) in SERIES.items():
        found = {r: groups[f"{r}: {name}"] for r in RATIOS if groups[f"{r}: {name}"]}
        means = [mean(perplexity(results, text)) for results in found.values()]
        axes.plot([*map(float, found)], means, "o-", color=colour, label=label)
    level = mean(perplexity(groups["dense"], text))
    axes.axhline(level, color=INK, linestyle="--", label=f"dense {level:.1f}")
    axes.invert_xaxis()
    axes.set(xlabel="active ratio", ylabel="perplexity", yscale="log")
    axes.set_title("SmolLM2-135M without training, on WikiText-2")
    numbered(axes.yaxis, (20, 25, 30, 40, 50, 70, 100, 140))
    axes.legend()


def centres(rows: Points, *kinds: str) -> list[tuple[float, float, str]]:
    """MB and KL, the means of draws, and names of the rows of some kinds, the smallest first."""
    means = (
        (mean(p[0] for p in points), mean(p[1] for p in points), name)
        for (kind, name), points in rows.items()
        if kind in kinds
    )
    return sorted(means)


def picture_of_files(figure: Any) -> None:
    """KL over megabytes, a panel a model."""
    panels = figure.subplots(2, 3).flat
    panels[-1].set_axis_off()
    for axes, (model, rows) in zip(panels, below().items(), strict=False):
        for kind, colour in COLOURS.items():
            named = centres(rows, kind)
            style = "o-" if kind in (FIT, PLAIN_TYPE) else "o"
            xs, ys = [x for x, _, _ in named], [y for _, y, _ in named]
            axes.plot(xs, ys, style, color=colour, label=kind.replace("`", ""))
            for x, y, name in named if kind in (PLAIN_TYPE, VERB) else ():
                label = name.removesuffix(", iq1_s").removesuffix(", iq3_xxs")
                offset = {"textcoords": "offset points", "fontsize": 8, "color": INK}
                axes.annotate(label, (x, y), (7, -3), **offset)
        axes.set(xlabel=MEGABYTES, ylabel=DIVERGENCE, yscale="log", title=model)
    figure.axes[0].legend()


def picture_of_one(figure: Any) -> None:
    """README's: one mixture, quantised alone and by fit."""
    axes, rows = figure.subplots(), below()["tiny-moe"]
    for kinds, label in (((PLAIN_TYPE, LAYERS), "quantised alone"), ((FIT,), "moesaic fit")):
        xs, ys, names = zip(*centres(rows, *kinds), strict=True)
        axes.plot(xs, ys, "o-", color=COLOURS[kinds[0]], label=label)
        for x, y, name in zip(xs, ys, names, strict=True):
            if words := LABELLED.get(name.replace("`", "")):
                offset = {"textcoords": "offset points", "color": INK}
                aligned = "right" if words[1][0] < 0 else "left"
                text = f"{words[0]}:\n{x:.2f} MB, KL {y:.2f}"
                axes.annotate(text, (x, y), words[1], ha=aligned, **offset)
    axes.set(xlabel=MEGABYTES, ylabel=DIVERGENCE, yscale="log", xlim=(1.1, 4.4), ylim=(0.002, 1.2))
    axes.legend(loc="lower left")


def picture_of_speeds(figure: Any) -> None:
    """Perplexity and KL over decoding speed, beside the dense model."""
    results = record("frontier")["results"]
    base = results["dense"]["shipped"]["perplexity"]
    left, right = figure.subplots(1, 2)
    for n, (name, row) in enumerate(results.items()):
        here, speed = row["shipped"], row["speed"]["decode"]["ratio"]
        mark = {"marker": "os"[n // 10], "color": f"C{n % 10}", "linestyle": ""}
        left.plot(speed, 100 * (here["perplexity"] / base - 1), label=name, **mark)
        right.plot(speed, here.get("kl", 0.0), **mark)
    for axes, up, least, ticks in (
        (left, "perplexity above the dense model's, %", 2, (0, 1, 2, 5, 10, 20, 50, 100, 200)),
        (right, "KL from it", 0.02, (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)),
    ):
        across = "tokens a second at decoding, dense = 1"
        axes.set(xlabel=across, ylabel=up, xscale="log", yscale="log")  # whose limits are kept
        axes.set_yscale("symlog", linthresh=least)
        numbered(axes.yaxis, ticks)
        numbered(axes.xaxis, (1, 1.5, 2, 3, 5))
    figure.legend(loc="outside lower center", ncols=4)


PICTURES = {
    "slim": (picture_of_slim, (14, 4.6)),
    "beyond": (picture_of_petals, (8.5, 4.4)),
    "below": (picture_of_files, (11, 9)),
    "first": (picture_of_one, (8.5, 4.2)),
    "frontier": (picture_of_speeds, (9.4, 4.6)),
}
"""By file, what draws it, and its inches."""


def main() -> None:
    import matplotlib.pyplot as plt

    made = tables()
    for page in PAGES:
        page.write_text(rewritten(page.read_text("utf-8"), made), "utf-8")
    for name, (draw, size) in PICTURES.items():
        with plt.rc_context({**STYLE, "font.size": 13 if name == "first" else 10}):
            figure = plt.figure(figsize=size, layout="constrained")
            draw(figure)
            file = DOCS / "images" / f"{name}.svg"
            figure.savefig(file, metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    main()
