"""Install the package as a newcomer would, and do what the README says first.

For every Python and for wheel and sdist: a fresh environment outside the checkout, the command
line's help, the first wrong command of each verb, and a small model pruned, read and reported.

    python scripts/try_install.py --python python3.10 python3.13

With --dist it builds nothing and needs no git: for a bare system that has only that Python.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 80, 50
WRONG = {
    "carve": ["tiny-moe out", "tiny-dense out --active 2", "tiny-dense"],
    "prune": ["tiny-dense out --keep 6", "tiny-moe out --keep 9", "tiny-moe out"],
    "slim": ["tiny-moe out --keep 2", "tiny-moe"],
    "condense": ["tiny-dense out --layers 2", "tiny-moe out --layers 99"],
    "skip": ["tiny-dense out --quantile 0.5", "tiny-moe out --quantile 5"],
    "observe": ["tiny-dense out"],
    "tune": ["tiny-moe out --steps 0", "nowhere out"],
    "eval": ["nowhere", ""],
    "bench": ["nowhere", "tiny-moe --rounds 0"],
    "inspect": ["nowhere"],
    "generate": ["tiny-moe", "nowhere Hello"],
    "run": ["nowhere.yaml"],
    "apply": ["tiny-moe nowhere.json out"],
    "export": ["tiny-moe out --to gguff", "nowhere out"],
    "report": ["nowhere"],
    "demo": ["--out here"],
    "sculpt": ["tiny-moe out"],
}
"""What a newcomer may get wrong first, by command."""
FIRST = (
    "inspect tiny-moe",
    "prune tiny-moe pruned --keep 6 --samples 8 --max-tokens 2048 -o rounds=0",
    "skip pruned skipping --quantile 0.5 --samples 8 --no-eval",
    "eval pruned --against tiny-moe --max-tokens 2048",
    "generate pruned Hello --new-tokens 8",
    "report pruned --out page.html",
    "export pruned native --to native",
)
"""What works at once, with a model that ships."""


def say(*words: object) -> None:
    print(*words, flush=True)


def pythons() -> list[str]:
    """The interpreters at hand, the oldest first."""
    names = [f"python3.{minor}" for minor in range(10, 15)]
    return [name for name in names if shutil.which(name)] or [sys.executable]


def build(folder: Path) -> list[Path]:
    """Wheel and sdist of the files that git knows."""
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return built_in(folder / "dist")


def built_in(dist: Path) -> list[Path]:
    """Wheel and sdist in a folder."""
    return sorted(dist.iterdir(), key=lambda file: file.suffix != ".whl")


class Installed:
    """A fresh environment with the package, and a folder to work in."""

    def __init__(self, python: str, package: Path, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir(parents=True)
        self.bin = folder / "venv/bin"
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        pip = [str(self.bin / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        if not shutil.which("nvidia-smi"):  # a build without CUDA saves gigabytes; else the default
            torch = [*pip, "install", "--no-deps", "torch==2.13.0"]
            index = ["--retries", "0", "--index-url", "https://download.pytorch.org/whl/cpu"]
            if subprocess.run([*torch, *index], check=False, capture_output=True).returncode:
                subprocess.run(torch, check=False)
        subprocess.run([*pip, "install", str(package)], check=True)

    def run(self, arguments: str) -> subprocess.CompletedProcess[str]:
        """A command, outside the checkout, without a network."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        size = {"COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [str(self.bin / "moesaic"), *arguments.split()],
            cwd=self.folder,
            env={**plain, **size, "MOESAIC_CACHE": str(self.folder / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )

    def helps(self) -> list[str]:
        """What is wrong with the help of any command."""
        found = []
        listed = self.run("--help").stdout
        for name in ["", *(word for word in WRONG if word != "sculpt")]:
            done = self.run(f"{name} --help")
            lines = done.stdout.rstrip().splitlines()
            if name and name not in listed:
                found.append(f"{name} is not in the list of commands")
            if done.returncode or len(lines) > HEIGHT or max(map(len, lines)) > WIDTH:
                widest = max(map(len, lines), default=0)
                found.append(f"{name} --help: {len(lines)} lines of up to {widest}")
        return found

    def refusals(self) -> list[str]:
        """What is wrong with the answer to any wrong command."""
        found = []
        (self.folder / "here").mkdir()
        for name, given in WRONG.items():
            for arguments in given:
                done = self.run(f"{name} {arguments}")
                said = done.stderr.strip()
                short = said and len(said.splitlines()) <= 6 and "Traceback" not in said
                if done.returncode != 2 or not short or (self.folder / "out").exists():
                    found.append(f"{name} {arguments}: exit {done.returncode}: {said[-400:]}")
        return found

    def first(self) -> list[str]:
        """What of the first commands does not work."""
        for arguments in FIRST:
            done = self.run(arguments)
            if done.returncode:
                return [f"{arguments}: exit {done.returncode}: {done.stderr[-800:]}"]
        return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", nargs="+", default=pythons(), help="interpreters to try")
    parser.add_argument("--dist", type=Path, help="a folder of wheel and sdist that were built")
    parser.add_argument("--form", choices=("wheel", "sdist", "both"), default="both")
    asked = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        built = built_in(asked.dist) if asked.dist else build(Path(temporary))
        forms = {"wheel": built[:1], "sdist": built[1:], "both": built}[asked.form]
        for python in asked.python:
            for n, package in enumerate(forms):
                told = subprocess.run([python, "--version"], capture_output=True, text=True)
                say(f"{told.stdout.strip()}, {package.name}")
                installed = Installed(python, package, Path(temporary) / f"{Path(python).name}-{n}")
                for name in ("helps", "refusals", "first"):
                    found = getattr(installed, name)()
                    say(f"  {name}: {'right' if not found else ''}")
                    for problem in found:
                        say(f"    {problem}")
                    wrong += len(found)
    say(json.dumps({"wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
