"""Faults on purpose: commands that are killed, disks that fill up, inputs that are damaged.

``python tests/faults [kills] [disk] [damage] [fuzz] [NAME ...]``: all of them without arguments;
names choose commands or cases that hold them, numbers cases of ``fuzz``. Each line names what went
wrong; at the end the counts, and exit code 1 if anything did.

MOESAIC_KILLS (25) and MOESAIC_DISKS (10) say how often each command is killed or its disk filled,
MOESAIC_FUZZ (2000) how many cases of ``fuzz`` there are, MOESAIC_JOBS (the cores) how many commands
run at a time.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", OMP_NUM_THREADS="1")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

from worker import Limits, contents, ran, seeded, tree  # noqa: E402

WARM = (
    "moesaic.pipeline", "moesaic.report.page", "moesaic.exports", "moesaic.carving.more.method",
    "moesaic.methods.prune.method", "moesaic.observation.files", "moesaic.train.loop",
    "moesaic.metrics.measurement", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2_moe.modeling_qwen2_moe", "sklearn.cluster", "scipy.optimize",
    "pydantic.type_adapter", "pydantic.dataclasses",
)  # fmt: skip
"""What children would import one after the other."""
KINDS = ("kills", "disk", "damage", "fuzz")
Outcome = tuple[str, str]
"""What was tried, and what went wrong; empty where nothing did."""


def undisturbed(command, place: Path) -> tuple[dict[str, object], float]:  # type: ignore[no-untyped-def]
    """What a command makes when nothing happens, and the seconds that takes."""
    cwd = fresh(place / "whole" / command.name)
    ended = ran(command.line(), cwd, place / f"said-{os.getpid()}")
    if ended.code:
        raise SystemExit(f"{command.name} fails undisturbed ({ended.code}): {ended.message}")
    return contents(cwd / command.out), ended.seconds


def finished(command, cwd: Path, whole: dict[str, object], output: Path) -> str:  # type: ignore[no-untyped-def]
    """Go on after a fault until the result is there; what is wrong with it."""
    out = cwd / command.out
    if out.exists():
        if contents(out) != whole:
            return "OUT is there and not whole"
    else:
        more = ("--resume",) if command.resumes else ()
        ended = ran(command.line(*more), cwd, output)
        if ended.code:
            return f"cannot go on ({ended.code}): {ended.message}"
        files = contents(out)
        if files != whole:
            names = [n for n in {**files, **whole} if files.get(n) != whole.get(n)]
            return f"another result: {', '.join(names)}"
    left = sorted(p.name for p in cwd.iterdir() if p.name != command.out)
    return f"left behind: {', '.join(left)}" if left else ""


def killed(command, number: int, place: Path, whole, seconds: float) -> Outcome:  # type: ignore[no-untyped-def]
    """One SIGKILL at a random moment."""
    moment = seeded("kill", command.name, number).uniform(0, seconds)
    cwd = fresh(place / "kills" / f"{command.name}-{number}")
    output = place / f"said-{os.getpid()}"
    ran(command.line(), cwd, output, Limits(kill=moment))
    wrong = finished(command, cwd, whole, output)
    shutil.rmtree(cwd)
    return f"{command.name} killed after {moment:.2f} of {seconds:.2f} s", wrong


def disk_full(command, number: int, place: Path, whole, seconds: float) -> Outcome:  # type: ignore[no-untyped-def]
    """One full disk, for large files or from a file on."""
    random = seeded("disk", command.name, number)
    sizes = [len(x) for x in whole.values() if isinstance(x, bytes)]
    if number % 2:
        limits, limit = Limits(writes=random.randint(1, 30)), "from a file on"
    else:
        limits = Limits(file_bytes=int(max(sizes) * random.random()))
        limit = f"at {limits.file_bytes:,} bytes"
    name = f"{command.name}, disk full {limit} ({number})"
    cwd = fresh(place / "disks" / f"{command.name}-{number}")
    output = place / f"said-{os.getpid()}"
    ended = ran(command.line(), cwd, output, limits)
    wrong = ""
    if ended.code == 0:
        if "writing" in "".join(p.name for p in cwd.iterdir()):
            wrong = "left behind after success"
    elif ended.code not in (1, 2) or not ended.orderly:
        wrong = f"exit code {ended.code}: {ended.message}"
    elif "fault of moesaic" in ended.text:
        wrong = f"blames itself: {ended.message}"
    elif (cwd / command.out).exists():
        wrong = "OUT was made nonetheless"
    elif any(".writing" in str(p) for p in cwd.rglob("*")):
        wrong = "something half-written is left"
    wrong = wrong or finished(command, cwd, whole, output)
    shutil.rmtree(cwd)
    return name, wrong


def damaged(case, number: int, place: Path) -> Outcome:  # type: ignore[no-untyped-def]
    """One damaged input: exit code 2, one message, nothing written but OUT."""
    cwd = fresh(place / "damage" / f"{number:03d}")
    source, copy = place / case.of, cwd / Path(case.of).name
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, copy)
    case.change(copy)
    digests = {
        "IN": copy, "TEXT": place / "text.jsonl", "DENSE": place / "dense", "MOE": place / "moe"
    }  # fmt: skip
    line = [str(digests.get(part, part)) for part in case.command]
    before = tree(cwd)
    # Kept outside of what is watched; caches go there as well.
    output = place / f"said-{os.getpid()}"
    home = {"XDG_CACHE_HOME": str(place / "cache")}
    ended = ran(line, cwd, output, Limits(seconds=60, memory=True, environment=home))
    after = {n: v for n, v in tree(cwd).items() if not n.startswith(("out/", "out.partial/"))}
    wrong = ""
    if ended.code == 0 and case.harmless:
        pass
    elif ended.code != 2:
        wrong = f"exit code {ended.code} after {ended.seconds:.0f} s: {ended.message}"
    elif not ended.orderly:
        wrong = f"not one message: {ended.message}"
    elif len(ended.text) > 1200:
        wrong = f"a message of {len(ended.text):,} characters"
    elif (cwd / "out").exists():
        wrong = "OUT was made"
    elif after != before:
        wrong = f"wrote {', '.join({**after, **before}.keys() ^ before.keys()) or 'to its input'}"
    shutil.rmtree(cwd)
    return case.name, wrong


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def at_once(tasks: Sequence[Callable[[], Outcome]], jobs: int, place: Path) -> list[Outcome]:
    """Results of tasks, each in a child of its own, some at a time."""
    import pickle

    running: dict[int, int] = {}
    outcomes: dict[int, Outcome] = {}
    waiting = list(enumerate(tasks))
    while waiting or running:
        while waiting and len(running) < jobs:
            number, task = waiting.pop(0)
            child = os.fork()
            if child == 0:
                try:
                    outcome = task()
                except BaseException as error:
                    outcome = (f"task {number}", f"the test itself failed: {error!r}")
                (place / f"outcome-{number}").write_bytes(pickle.dumps(outcome))
                os._exit(0)
            running[child] = number
        child, _ = os.wait()
        number = running.pop(child)
        file = place / f"outcome-{number}"
        outcomes[number] = pickle.loads(file.read_bytes())
        file.unlink()
        name, wrong = outcomes[number]
        if wrong:
            print(f"WRONG {name}\n      {wrong}", flush=True)
    return [outcomes[number] for number in sorted(outcomes)]


def fuzz(names: Sequence[str], sound: Path) -> list[Outcome]:
    """Cases in one process, by their numbers; counts by kind of file."""
    import fuzz

    fuzz.prepare(sound)
    wanted = range(int(os.environ.get("MOESAIC_FUZZ", "2000")))
    numbers = [int(name) for name in names if name.isdecimal()]
    by_kind = [n for n in wanted if any(x in fuzz.KINDS[n % len(fuzz.KINDS)].name for x in names)]
    counts: dict[str, Counter[str]] = {kind.name: Counter() for kind in fuzz.KINDS}
    outcomes = []
    for number, kind, outcome in fuzz.fuzzed(numbers or by_kind or wanted, sound):
        wrong = "" if outcome in ("result", "refused") else outcome
        counts[kind]["faults" if wrong else outcome] += 1
        outcomes.append((f"fuzz {number} ({kind})", wrong))
        if wrong:
            print(f"WRONG fuzz {number} ({kind})\n      {wrong}", flush=True)
    for kind, count in counts.items():
        listed = ", ".join(f"{count[name]} {name}" for name in ("result", "refused", "faults"))
        print(f"fuzz, {kind}: {listed}", flush=True)
    return outcomes


def main(arguments: Sequence[str]) -> int:
    """Everything that was asked for; the exit code is 1 if anything went wrong."""
    kinds = [a for a in arguments if a in KINDS] or list(KINDS)
    names = [a for a in arguments if a not in KINDS]
    jobs = int(os.environ.get("MOESAIC_JOBS", os.cpu_count() or 1))
    often = {
        "kills": int(os.environ.get("MOESAIC_KILLS", "25")),
        "disk": int(os.environ.get("MOESAIC_DISKS", "10")),
    }
    from moesaic import cli

    cli.entry.quiet_libraries()
    import conftest  # noqa: F401  (threads and progress bars as in tests)
    from commands import begun
    from damage import cases

    for module in WARM:
        import_module(module)
    began = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="moesaic-faults-"))
    sound = place / "sound"

    def call(line: list[str]) -> None:
        ended = ran(line, place, place / "said")
        if ended.code:
            raise SystemExit(f"{line[0]} fails undisturbed: {ended.text}")

    by_name = begun(sound, call)
    counts: dict[str, Counter[str]] = {}

    def count(kind: str, outcomes: Sequence[Outcome]) -> None:
        counts[kind] = Counter("wrong" if wrong else "right" for _, wrong in outcomes)

    if "damage" in kinds:
        tried = [c for c in cases() if not names or any(n in c.name for n in names)]
        tasks = [lambda c=c, i=i: damaged(c, i, sound) for i, c in enumerate(tried)]
        count("damage", at_once(tasks, jobs, place))
    if "fuzz" in kinds:
        count("fuzz", fuzz(names, sound))
    chosen = [c for c in by_name.values() if not names or c.name in names]
    chosen = chosen or [c for c in by_name.values() if any(n in c.name for n in names)]
    for kind, function in (("kills", killed), ("disk", disk_full)):
        if kind not in kinds:
            continue
        outcomes: list[Outcome] = []
        for command in chosen:
            whole, seconds = undisturbed(command, place)
            again, _ = undisturbed(command, place)
            if whole != again:
                print(f"{command.name}: two undisturbed runs differ", flush=True)
            tasks = [
                lambda c=command, n=n, w=whole, s=seconds, f=function: f(c, n, place, w, s)
                for n in range(often[kind])
            ]
            ended = at_once(tasks, jobs, place)
            wrong = sum(bool(problem) for _, problem in ended)
            print(f"{kind}, {command.name}: {len(ended) - wrong} right, {wrong} wrong", flush=True)
            outcomes += ended
        count(kind, outcomes)
    shutil.rmtree(place)
    for kind, result in counts.items():
        print(f"{kind}: {result['right']} right, {result['wrong']} wrong")
    print(f"{time.monotonic() - began:.0f} s, {jobs} at a time")
    return int(any(result["wrong"] for result in counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
