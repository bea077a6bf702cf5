"""Carries out a benchmark that is written down as commands: DESCRIPTION.yaml beside this file.

    python benchmarks/run.py slim.yaml --set data=wikitext2-valid.txt     writes slim.json
    python benchmarks/run.py slim.yaml --only "slim energy" --dry-run     the commands, not run
    python benchmarks/run.py FILE.yaml --work DIR --speed                times what DIR holds

A description has

- ``vary``: names and the values that they take; every combination is a row, the first name changes
  slowest. Values may have labels of their own (a mapping: label to value).
- ``name``: what a row is called, ``{name}`` standing for labels.
- ``steps``: commands of moesaic, ``{name}`` standing for values, ``{name_label}`` for their labels,
  ``OUT`` for the row's folder, and a pattern for the files that it matches. A mapping has ``run``,
  the command; ``as`` and ``take``: the keys of its ``--json`` that the row keeps under that name,
  all of them by default; ``if``: a name without whose value it is left out.
- ``set``: names that have one value for all rows, which ``--set`` replaces, like those of ``vary``.
- ``rows``: several groups, each with its own of the above beside those at the top.
- ``speed``: ``model`` beside which results are timed, interleaved, round by round; ``prompt``,
  ``new_tokens``, ``rounds``, ``threads``.

Each command is a process of its own: its CPU seconds, its peak of memory and the machine's load are
in the row. Rows that the JSON has already are not made again, and what comes is written at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
KEYS = ("vary", "name", "steps", "set")


@dataclass(frozen=True)
class Step:
    """One command of a row."""

    command: str
    """Words after ``moesaic``; ``OUT`` is the row's folder."""
    key: str = ""
    """Under which its figures are kept; empty: it tells none."""
    take: tuple[str, ...] = ()
    """Of its JSON the keys that are kept, ``a.b`` for one within another; empty: all."""


@dataclass(frozen=True)
class Row:
    """Commands that are carried out one after another, and their name."""

    name: str
    steps: tuple[Step, ...]

    @property
    def folder(self) -> str:
        """A name that every file system takes."""
        return re.sub(r"[^\w.-]+", "-", self.name)


def rows_of(description: Mapping[str, Any], settings: Mapping[str, str]) -> Iterator[Row]:
    """All rows of a description.

    Args:
        description: as the module's text says.
        settings: values that are set for names, of ``vary`` several with commas between.
    """
    shared = {key: description[key] for key in KEYS if key in description}
    for group in description.get("rows") or [{}]:
        options = {**shared, **group}
        vary = {name: _labelled(values) for name, values in options.get("vary", {}).items()}
        vary |= {n: _labelled(settings[n].split(",")) for n in vary if n in settings}
        fixed = {**shared.get("set", {}), **options.get("set", {})}
        fixed |= {name: value for name, value in settings.items() if name not in vary}
        for picked in product(*(values.items() for values in vary.values())):
            pairs = [*zip(vary, picked, strict=True)]
            labels = {**fixed, **{name: label for name, (label, _) in pairs}}
            values = {**fixed, **{name: value for name, (_, value) in pairs}}
            values |= {f"{name}_label": label for name, (label, _) in pairs}
            yield Row(options["name"].format(**labels), tuple(_steps(options["steps"], values)))


def _labelled(values: Any) -> dict[str, str]:
    """Values by their labels: of a list the last parts of their names."""
    if isinstance(values, Mapping):
        return {str(label): str(value) for label, value in values.items()}
    return {str(value).rpartition("/")[2]: str(value) for value in values}


def _steps(steps: Sequence[Any], values: Mapping[str, str]) -> Iterator[Step]:
    for step in steps:
        options = step if isinstance(step, Mapping) else {"run": step}
        if "if" in options and not values.get(options["if"]):
            continue
        command = options["run"]
        while (filled := command.format(**values)) != command:  # values may name others
            command = filled
        yield Step(command, options.get("as", ""), tuple(options.get("take", ())))


def taken(figures: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The figures under some keys, by the keys' last parts; all of them where none is named.

    >>> taken({"scores": {"result": {"kl": 0.5}}, "out": "x"}, ["scores.result.kl"])
    {'kl': 0.5}
    """
    selected = {}
    for key in keys:
        value: Any = figures
        for part in key.split("."):
            value = value[part]
        selected[key.rpartition(".")[2]] = value
    return selected or dict(figures)


def carried_out(row: Row, work: Path) -> dict[str, Any]:
    """A row's figures, and what its commands took.

    Raises:
        SystemExit: a command failed; its own words are shown.
    """
    out = work / row.folder
    figures: dict[str, Any] = {"commands": [f"moesaic {step.command}" for step in row.steps]}
    figures |= {"cpu_seconds": [], "peak_memory_bytes": [], "load": os.getloadavg()[0]}
    for step in row.steps:
        words = [word.replace("OUT", str(out)) for word in shlex.split(step.command)]
        words = [name for word in words for name in _matching(word)]
        finished = out.exists() and str(out) in words and not step.key
        if finished and "--resume" not in words:  # of a run that was stopped behind this step
            continue
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen([sys.executable, "-m", "moesaic", *words], stdout=output)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise SystemExit(f"{row.name}: moesaic {shlex.join(words)} failed.")
            output.seek(0)
            if step.key:
                figures[step.key] = taken(json.loads(output.read()), step.take)
        figures["cpu_seconds"].append(round(used.ru_utime + used.ru_stime, 1))
        figures["peak_memory_bytes"].append(used.ru_maxrss * 1024)
    return figures


def _matching(word: str) -> list[str]:
    """The files that a pattern matches, or a word that is none."""
    path = Path(word)
    return sorted(map(str, path.parent.glob(path.name))) if "*" in path.name else [word]


def timed(rows: Sequence[Row], speed: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Speeds of all results that a folder holds, beside a model, interleaved round by round."""
    import torch

    from moesaic.io.source import resolve
    from moesaic.metrics.size import model_size
    from moesaic.metrics.speed import against, compare_speed

    torch.set_num_threads(speed.get("threads", 1))
    names = {row.name: str(work / row.folder) for row in rows if (work / row.folder).exists()}
    folders = {"original": speed["model"], **names}
    models = {name: resolve(folder).load() for name, folder in folders.items()}
    prompt = torch.randint(
        5, 4000, (1, speed["prompt"]), generator=torch.Generator().manual_seed(0)
    )
    speeds = compare_speed(models, prompt, speed["new_tokens"], speed["rounds"])
    whole = model_size(models["original"]).active_parameters
    return {
        name: {
            **result.as_json(),
            **against(result, speeds["original"], whole / model_size(model).active_parameters),
        }
        for (name, model), result in zip(models.items(), speeds.values(), strict=True)
    }


def circumstances(file: Path, words: Sequence[str]) -> dict[str, Any]:
    """What every result carries: the command that makes it, versions and machine."""
    from moesaic import __version__
    from moesaic.metrics.machine import environment

    head = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": shlex.join(["python", "benchmarks/run.py", file.name, *words]),
        "moesaic": __version__,
        "commit": commit,
        "environment": environment(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("description", help="a YAML file, of this folder where it is not here")
    parser.add_argument("--set", nargs="*", action="extend", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", nargs="*", help="rows whose names hold one of these")
    parser.add_argument("--work", type=Path, help="keeps what rows make, for --speed")
    parser.add_argument("--out", type=Path, help="default: the description's name, .json")
    parser.add_argument("--speed", action="store_true", help="time what --work keeps")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    args = parser.parse_args(arguments)
    file = Path(args.description)
    file = file if file.exists() else HERE / file
    description = yaml.safe_load(file.read_text("utf-8"))
    settings = dict(pair.split("=", 1) for pair in args.set)
    rows = [
        row
        for row in rows_of(description, settings)
        if args.only is None or any(part in row.name for part in args.only)
    ]
    if args.dry_run:
        for row in rows:
            print(f"# {row.name}", *(f"moesaic {step.command}" for step in row.steps), sep="\n")
        return
    out = args.out or HERE / f"{file.stem}.json"
    record: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {}
    words = [word for pair in args.set for word in ("--set", pair)]
    record |= circumstances(file, words)
    results = record.setdefault("results", {})

    def keep() -> None:
        out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    if args.speed:
        speed, load = description["speed"], os.getloadavg()
        speed |= {"model": settings.get("model", speed["model"])}
        for name, figures in timed(rows, speed, args.work).items():
            results.setdefault(name, {})["speed"] = figures
        record["load_while_timed"] = [load[0], os.getloadavg()[0]]
        keep()
        return
    with tempfile.TemporaryDirectory(prefix="moesaic-benchmark-") as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for row in rows:
            if row.name in results:
                continue
            results[row.name] = carried_out(row, work)
            keep()
            print(row.name, json.dumps(results[row.name]), flush=True)
            if args.work is None:
                shutil.rmtree(work / row.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
