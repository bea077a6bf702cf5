"""Carries out a benchmark that is written down as commands: DESCRIPTION.yaml beside this file.

    python benchmarks/run.py slim.yaml --set data=wikitext2-valid.txt     writes slim.json
    python benchmarks/run.py slim.yaml --only "slim energy" --dry-run     the commands, not run
    python benchmarks/run.py FILE.yaml --work DIR --speed                times what DIR holds
    python benchmarks/run.py papers/naee.yaml --only tab3 --small     a paper's table on tiny models

A description has

- ``vary``: names and the values that they take; every combination is a row, the first name changes
  slowest. Values may have labels of their own (a mapping: label to value).
- ``name``: what a row is called, ``{name}`` standing for labels.
- ``steps``: commands of moesaic, ``{name}`` standing for values, ``{name_label}`` for their labels,
  ``OUT`` for the row's folder, and a pattern for the files that it matches. A mapping has ``run``,
  the command; ``as`` and ``take``: the keys of its ``--json`` that the row keeps under that name,
  all of them by default; ``if``: a name without whose value it is left out.
- ``set``: names that have one value for all rows, which ``--set`` replaces, like those of ``vary``.
- ``small``: what stands for values of ``set`` and ``vary`` with ``--small``.
- ``needs``: the other tool that a row is made by. Without ``--peer TOOL=PYTHON:CHECKOUT``, or
  without steps, the row says that it was not run.
- ``rows``: several groups, each with its own of the above beside those at the top.
- ``speed``: a function that times what ``--work`` keeps: of rows' folders, by name, it returns the
  speeds.

Each command is a process of its own: its CPU seconds, its peak of memory and the machine's load are
in the row; with ``--small`` all are carried out in one process, which has no peaks. Rows that the
JSON has already are not made again, those of the same commands are copied, and what comes is
written at once.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
COST = """import json, os, sys
process = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(process, 0)
with open(sys.argv[1], "w") as file:
    json.dump([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024], file)
sys.exit(os.waitstatus_to_exitcode(status))"""
"""Runs a command from a small process, for a peak counts what the one that starts it holds."""


@dataclass(frozen=True)
class Step:
    """One command of a row."""

    command: str
    """Words after ``moesaic``; ``OUT`` is the row's folder."""
    key: str = ""
    """Key of its figures; empty if it has none."""
    take: tuple[str, ...] = ()
    """Of its JSON the keys that are kept, ``a.b`` for one within another; empty: all."""
    kind: str = "run"
    """``run``; ``call``, where the command is a function; ``peer``, where it is another tool's."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of a function."""

    @property
    def shown(self) -> str:
        """The command in words."""
        if self.kind == "call":
            given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
            return f"{self.command.replace(':', '.')}({given})"
        return f"moesaic {self.command}" if self.kind == "run" else f"python {self.command}"


@dataclass(frozen=True)
class Row:
    """Commands that are carried out one after another, and their name."""

    name: str
    steps: tuple[Step, ...]
    needs: str = ""
    """The other tool that it is made by."""

    @property
    def commands(self) -> list[str]:
        """Its steps in words."""
        return [step.shown for step in self.steps]

    @property
    def folder(self) -> str:
        """A name that every file system takes."""
        return re.sub(r"[^\w.-]+", "-", self.name)


def rows_of(
    description: Mapping[str, Any], settings: Mapping[str, str], small: bool = False
) -> Iterator[Row]:
    """All rows of a description.

    Args:
        description: as the module's text says.
        settings: values that are set for names, of ``vary`` several with commas between.
        small: take the values of ``small``.
    """
    for group in description.get("rows") or [{}]:
        options = {**description, **group}
        less = {**description.get("small", {}), **options.get("small", {})} if small else {}
        varied = options.get("vary", {})
        vary = {name: _labelled(less.pop(name, values)) for name, values in varied.items()}
        vary |= {n: _labelled(settings[n].split(",")) for n in vary if n in settings}
        fixed = {**description.get("set", {}), **options.get("set", {}), **less}
        fixed |= {name: value for name, value in settings.items() if name not in vary}
        for picked in product(*(values.items() for values in vary.values())):
            pairs = [*zip(vary, picked, strict=True)]
            labels = {**fixed, **{name: label for name, (label, _) in pairs}}
            values = {**fixed, **{name: value for name, (_, value) in pairs}}
            values |= {f"{name}_label": label for name, (label, _) in pairs}
            steps = tuple(_steps(options.get("steps", ()), values))
            needs = options.get("needs", "").format(**labels)
            yield Row(options["name"].format(**labels), steps, needs)


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
        kind = next(kind for kind in ("run", "call", "peer") if kind in options)
        arguments = {key: _filled(value, values) for key, value in options.get("with", {}).items()}
        command, take = _filled(options[kind], values), tuple(options.get("take", ()))
        yield Step(command, options.get("as", ""), take, kind, arguments)


def _filled(text: Any, values: Mapping[str, Any]) -> Any:
    """A text with values for names; anything else is unchanged."""
    while isinstance(text, str) and (filled := text.format(**values)) != text:  # they name others
        text = filled
    return text


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


def carried_out(
    row: Row, work: Path, here: bool = False, peers: Mapping[str, Sequence[str]] = {}
) -> dict[str, Any]:
    """A row's figures, and what its commands took.

    Args:
        row: a row.
        work: where its folder is made.
        here: in this process.
        peers: the Python and the checkout of other tools, by name.

    Raises:
        SystemExit: a command failed; its own words are shown.
    """
    if row.needs and not (row.steps and row.needs in peers):
        return {"not_run": f"needs {row.needs}"}
    out = work / row.folder
    figures: dict[str, Any] = {"commands": row.commands}
    figures |= {"cpu_seconds": [], "peak_memory_bytes": [], "load": os.getloadavg()[0]}
    for step in row.steps:
        words = [word.replace("OUT", str(out)) for word in shlex.split(step.command)]
        words = [name for word in words for name in _matching(word)]
        finished = out.exists() and str(out) in words and not step.key
        if finished and "--resume" not in words:  # of a run that was stopped after this step
            continue
        if step.kind == "call" or (here and step.kind == "run"):
            started = time.process_time()
            output = _called(step, out) if step.kind == "call" else _said(words)
            seconds = time.process_time() - started
        else:
            command = [sys.executable, "-m", "moesaic", *words]
            if step.kind == "peer":
                python, checkout = peers[row.needs]
                command = [python, f"{checkout}/{words[0]}", *words[1:]]
            process, seconds, peak = apart(command, stdout=subprocess.PIPE)
            if process.returncode:
                raise SystemExit(f"{row.name}: {shlex.join(command)} failed.")
            output = process.stdout
            figures["peak_memory_bytes"].append(peak)
        if step.key:
            figures[step.key] = taken(json.loads(output), step.take)
        figures["cpu_seconds"].append(round(seconds, 1))
    return figures if figures["peak_memory_bytes"] else figures | {"peak_memory_bytes": None}


def apart(
    command: Sequence[str], **options: Any
) -> tuple[subprocess.CompletedProcess[str], float, int]:
    """A command, finished in a process of its own; its CPU seconds and peak of memory (bytes)."""
    with tempfile.NamedTemporaryFile("r") as cost:
        words = [sys.executable, "-c", COST, cost.name, *command]
        process = subprocess.run(words, text=True, check=False, **options)
        seconds, peak = json.load(cost)
    return process, seconds, peak


def _said(words: Sequence[str]) -> str:
    """What a command prints that is carried out in this process."""
    from moesaic.cli import app

    with redirect_stdout(StringIO()) as output:
        app.main([*words], standalone_mode=False)
    return output.getvalue()


def _called(step: Step, out: Path) -> str:
    """What a function of a script returns, as JSON."""
    arguments = {
        name: value.replace("OUT", str(out)) if isinstance(value, str) else value
        for name, value in step.arguments.items()
    }
    return json.dumps(resolve_name(step.command)(**arguments))


def _matching(word: str) -> list[str]:
    """The files that a pattern matches, or a word that is none."""
    path = Path(word)
    return sorted(map(str, path.parent.glob(path.name))) if "*" in path.name else [word]


def commit(folder: Path | str) -> str:
    """Of the checkout that a folder is in."""
    head = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()


def circumstances(*words: str) -> dict[str, Any]:
    """What every record carries: the command that makes it, versions and machine."""
    from moesaic import __version__
    from moesaic.metrics.speed import environment

    return {
        "command": shlex.join(["python", *words]),
        "moesaic": __version__,
        "commit": commit(HERE),
        "environment": environment(),
    }


def read(file: Path) -> dict[str, Any]:
    """A record, empty where there is none yet."""
    record: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return record


def write(record: Mapping[str, Any], file: Path) -> None:
    """Keep a record."""
    file.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("description", help="a YAML file, of this folder where it is not here")
    parser.add_argument("--set", nargs="*", action="extend", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", nargs="*", help="rows whose names hold one of these words")
    parser.add_argument("--work", type=Path, help="keeps what rows make, for --speed")
    parser.add_argument("--out", type=Path, help="default: the description's name, .json")
    parser.add_argument("--small", action="store_true", help="a paper's rows on tiny models")
    parser.add_argument(
        "--peer", nargs="*", action="extend", default=[], metavar="TOOL=PYTHON:CHECKOUT"
    )
    parser.add_argument("--speed", action="store_true", help="time what --work keeps")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    args = parser.parse_args(arguments)
    file = Path(args.description)
    file = file if file.exists() else HERE / file
    description = yaml.safe_load(file.read_text("utf-8"))
    settings = dict(pair.split("=", 1) for pair in args.set)
    rows = [
        row
        for row in rows_of(description, settings, args.small)
        if args.only is None
        or any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", row.name) for part in args.only)
    ]
    if args.dry_run:
        for row in rows:
            print(f"# {row.name}", *row.commands, sep="\n")
        return
    sys.path.insert(0, str(file.resolve().parent))
    peers = {
        name: place.partition(":")[::2]
        for name, place in (pair.split("=", 1) for pair in args.peer)
    }
    path = file.resolve()
    own = path.relative_to(HERE) if path.is_relative_to(HERE) else Path(path.name)
    out = args.out or (HERE / own).with_suffix(".small.json" if args.small else ".json")
    record = read(out)
    words = [word for pair in args.set for word in ("--set", pair)] + ["--small"] * args.small
    record |= circumstances("benchmarks/run.py", str(own), *words)
    results = record.setdefault("results", {})
    if args.speed:
        made, load = {row.name: args.work / row.folder for row in rows}, os.getloadavg()[0]
        for name, speed in resolve_name(description["speed"])(made).items():
            results.setdefault(name, {})["speed"] = speed
        record["load_while_timed"] = [load, os.getloadavg()[0]]
        write(record, out)
        return
    with tempfile.TemporaryDirectory(prefix="moesaic-benchmark-") as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for row in rows:
            if row.name in results:
                continue
            twins = (r for r in results.values() if row.steps and r.get("commands") == row.commands)
            twin = next(twins, None)
            results[row.name] = twin or carried_out(row, work, args.small, peers)
            write(record, out)
            print(row.name, json.dumps(results[row.name])[:500], flush=True)
            if args.work is None:
                shutil.rmtree(work / row.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
