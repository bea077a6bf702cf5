"""Every command that writes, on tiny models; made from the registry of methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from builders import stored, tiny_model, tiny_moe
from cases import KEYS, config_of, make_start

from moesaic.data.reader import shipped_texts
from moesaic.errors import MoesaicError
from moesaic.exports.llamacpp import find_converter
from moesaic.methods import VERBS, methods_of

TEXT = ["--samples", "6", "--length", "32"]
SLOWER = {"steps": 8, "save_every": 2}
"""Longer than a test's, so that a kill finds something to destroy."""


@dataclass(frozen=True)
class Command:
    """A command that makes something at ``out``, run in a folder of its own."""

    name: str
    arguments: tuple[str, ...]
    """``OUT`` stands for the output."""
    out: str = "out"
    resumes: bool = True

    def line(self, *more: str) -> list[str]:
        return [*(self.out if a == "OUT" else a for a in self.arguments), *more]


def prepare(place: Path, keys: Sequence[str] = KEYS) -> None:
    """The models, texts, plans and statistics that commands and damage start from."""
    place.mkdir(parents=True)
    dense, moe = tiny_model("llama"), tiny_moe("qwen2_moe")
    for name, model in (("dense", dense), ("moe", moe)):
        stored(model, place / name, max_shard_size="60KB")
    for key in keys:
        make_start(key, place / f"start-{key}")
    text = "\n".join(json.dumps({"text": t}) for t in shipped_texts("calibration", "prose")[:40])
    (place / "text.jsonl").write_text(text + "\n")
    other = json.dumps({"text": shipped_texts("evaluation", "prose")[0]})
    (place / "other.jsonl").write_text(other + "\n")


def of_method(key: str, place: Path) -> Command:
    """The command that carries a method out, with its quick settings."""
    verb, _, method = key.partition(".")
    config = config_of(key)
    values = asdict(config)
    default = asdict(type(config)())
    changed = {k: v for k, v in values.items() if v != default.get(k) and v is not None}
    changed |= {k: v for k, v in SLOWER.items() if k in values}
    options = [part for k, v in changed.items() for part in ("-o", f"{k}={v}")]
    text = ["--calibration", str(place / "text.jsonl"), *TEXT] if VERBS[verb].calibrates else []
    if verb == "tune":
        text = ["--train", str(place / "text.jsonl")]
    several = len(methods_of(verb)) > 1
    chosen = ["--method", method] if several else []
    line = [verb, str(place / f"start-{key}"), "OUT", *chosen, *options, *text, "--no-eval"]
    return Command(key, tuple(line))


def commands(place: Path) -> list[Command]:
    """All of them: the methods first, then those that work on results."""
    text = str(place / "text.jsonl")
    recipe = place / "recipe.yaml"
    recipe.write_text(
        f"model: {place / 'moe'}\nout: out\nsteps:\n- prune: {{keep: 6}}\n- condense: {{count: 1}}"
        f"\ncalibration: {{source: {text}, samples: 6, length: 32}}\n"
        f"evaluation: {{data: {place / 'other.jsonl'}, length: 32, max_tokens: 256, rounds: 0, "
        "new_tokens: 2}\n"
    )
    carved, goal = str(place / "carved"), ["--memory", budget(place), "--windows", "4"]
    fit = ["fit", str(place / "moe"), "OUT", *goal, "--calibration", text, *TEXT]
    observe = ["observe", str(place / "moe"), "OUT", "--calibration", text, *TEXT]
    return [
        *(of_method(key, place) for key in KEYS),
        Command("observe", tuple(observe), "stats"),
        Command("fit", (*fit, "--data", str(place / "other.jsonl"), "--max-tokens", "256")),
        Command("run", ("run", str(recipe), "out=out")),
        Command("apply", ("apply", str(place / "dense"), carved, "OUT"), resumes=False),
        Command("export", ("export", str(place / "pruned"), "OUT"), resumes=False),
        *_in_llama_cpp(),
        Command("report", ("report", carved, "--out", "OUT"), "report.html", resumes=False),
    ]


def budget(place: Path) -> str:
    """Four fifths of the mixture's bytes."""
    return f"{0.8 * sum(f.stat().st_size for f in (place / 'moe').glob('*.safetensors')):.0f}"


def _in_llama_cpp() -> list[Command]:
    """An export for llama.cpp; none, and a word about it, where its converter is not there."""
    try:
        find_converter()
    except MoesaicError as error:
        print(f"export.gguf is left out: {error}", flush=True)
        return []
    line = ("export", "tiny-moe", "OUT", "--to", "gguf", "--type", "f16")
    return [Command("export.gguf", line, "out.gguf", resumes=False)]


FIRST = {"carved": "carve.more", "pruned": "prune.naee"}
"""Results that are made before anything is damaged, by the name of their folder."""


def begun(
    place: Path, call: Callable[[list[str]], None], keys: Sequence[str] = KEYS
) -> dict[str, Command]:
    """All commands by name, and what damage starts from; ``call`` carries out what makes that."""
    prepare(place, keys)
    by_name = {c.name: c for c in commands(place)}
    for folder, name in FIRST.items():
        call([str(place / folder) if part == "out" else part for part in by_name[name].line()])
    text = ["--calibration", str(place / "text.jsonl"), *TEXT]
    call(["observe", str(place / "moe"), str(place / "stats"), *text])
    return by_name
