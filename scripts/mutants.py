"""Breaks the formulas on purpose, one small change at a time, and asks the tests to notice.

``python scripts/mutants.py [FILE ...]``: all files of tests/mutants.toml, or those whose path
holds one of the arguments. Works in a copy of the tree, build/mutants. Lists the survivors and the
counts; exit code 1 if fewer are killed than tests/mutants.toml asks for, or one survives without
excuse. With MOESAIC_QUICK only the first test file of each is run, MOESAIC_JOBS mutants at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
COPIED = ("src", "tests", "docs", "recipes", "scripts", "pyproject.toml", "README.md")
FOUND = re.compile(r"^\s*(\S+__mutmut_\d+): (.+?)\s*$", re.MULTILINE)
NOT_COUNTED = ("skipped", "not checked", "caught by type check")
QUICK = "MOESAIC_QUICK" in os.environ
JOBS = os.environ.get("MOESAIC_JOBS", str(os.cpu_count() or 1))


def configured(file: str, tests: list[str], untouched: list[str]) -> str:
    """pyproject.toml with mutmut told what to change and how to test it."""
    own = {
        "source_paths": ["src"],
        "only_mutate": [f"src/moesaic/{file}"],
        "do_not_mutate_patterns": untouched,
        "pytest_add_cli_args_test_selection": [f"tests/{test}" for test in tests],
        "pytest_add_cli_args": ["-p", "no:xdist", "-p", "no:cacheprovider", "-x"],
        "mutate_only_covered_lines": False,
        "also_copy": ["docs", "recipes", "scripts", "README.md"],
        "use_git_change_detection": False,
        "timeout_constant": 30.0,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in own.items()]
    plain = (ROOT / "pyproject.toml").read_text("utf-8")
    return "\n".join([plain, "[tool.mutmut]", *lines, ""])


def mutated(file: str, tests: list[str], untouched: list[str]) -> dict[str, str]:
    """What became of every mutant of a file, by mutmut's name of it."""
    shutil.rmtree(WORK / "mutants", ignore_errors=True)
    for name in ("src", "tests"):  # Python looks once whether what is on its path is there
        (WORK / "mutants" / name).mkdir(parents=True)
    (WORK / "pyproject.toml").write_text(configured(file, tests, untouched), "utf-8")
    path = os.pathsep.join([str(WORK / "mutants" / "src"), str(WORK / "mutants" / "tests")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    mutmut = [sys.executable, "-m", "mutmut"]
    ran = subprocess.run(
        [*mutmut, "run", "--max-children", JOBS],
        cwd=WORK, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = subprocess.run(
        [*mutmut, "results", "--all", "true"],
        cwd=WORK, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = dict(FOUND.findall(told.stdout))
    if not any(end not in NOT_COUNTED for end in found.values()):
        sys.exit(f"{file}: mutmut made nothing of it.\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}")
    return found


def main(wanted: list[str]) -> int:
    """Change the files that are wanted, all without any.

    Returns:
        the exit code.
    """
    settings = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))
    excused: dict[str, str] = settings["excused"]
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, WORK / name)
    whole: Counter[str] = Counter()
    poor = []
    for file, tests in settings["files"].items():
        if wanted and not any(part in file for part in wanted):
            continue
        found = mutated(file, tests[:1] if QUICK else tests, settings["untouched"])
        alive = [name for name, end in found.items() if end in ("survived", "no tests")]
        left = [name for name in alive if name not in excused]
        counts = Counter(
            "excused" if name in excused else "survived" if name in left else "killed"
            for name, end in found.items()
            if end not in NOT_COUNTED
        )
        whole += counts
        share = counts["killed"] / max(1, counts["killed"] + counts["survived"])
        told = ", ".join(f"{count} {what}" for what, count in counts.items())
        print(f"{file}: {share:.1%} ({told})", flush=True)
        for name in left:
            print(f"    {name}: {found[name]}", flush=True)
        if share < settings["at_least"]:
            poor.append(file)
    tried = whole["killed"] + whole["survived"]
    share = whole["killed"] / max(1, tried)
    print(f"In all {share:.1%} of {tried:,} are killed; {whole['excused']} are excused")
    if poor:
        print(f"Below {settings['at_least']:.0%}: {', '.join(poor)}")
    return int(bool(poor or whole["survived"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
