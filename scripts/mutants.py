"""Breaks the formulas on purpose, one small change at a time, and asks the tests to notice.

``python scripts/mutants.py [FILE ...]``: all files of tests/mutants.toml, or those whose path
holds one of the arguments. mutmut says what to change. Tests are collected, timed and traced once;
a mutant is a fork of that process in which one function has other code, and meets the tests that
reach this function, quickest first, until one fails.

Lists the survivors and the counts; exit code 1 if of any file fewer are killed than
tests/mutants.toml asks for. What was found is kept in build/mutants, so a stopped run continues,
and only what changed is tried again; delete that folder to begin anew.

SAMPLE=20 tries that many mutants a file, always the same ones. JOBS is how many run at a time.
"""

from __future__ import annotations
import __future__

import ast
import fcntl
import gc
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

with suppress(ModuleNotFoundError):  # `make mutants` brings them
    import libcst as cst
    from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
    from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
    from mutmut.mutation.mutators import mutation_operators
    from mutmut.mutation.pragma_handling import IgnoredCode

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
KEPT = (ROOT / "build" / "mutants").resolve()
TREE = KEPT / "tree"
COPIED = ("src", "tests", "docs", "recipes", "scripts", "pyproject.toml", "README.md")
JOBS = int(os.environ.get("JOBS") or os.cpu_count() or 1)
SAMPLE = int(os.environ.get("SAMPLE") or 0)
LEFT = "said"
SURVIVED, KILLED, NEVER_RAN, IMPOSSIBLE = 0, 1, "no test", 3
CONTROLS = 200
"""Tests that must pass in a fork in which nothing is changed."""
MEMORY = 4 << 30
"""Bytes that a mutant may take beyond what its parent has."""


# --- what is changed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One small change."""

    file: str
    """Below src/moesaic."""
    function: str
    """Its qualified name."""
    change: str
    """The lines that differ, before => after."""
    number: int
    """Of the change in its function."""
    code: CodeType
    """Of the changed function."""
    digest: str
    """Of the function as it is."""

    @property
    def place(self) -> str:
        return f"{self.file}::{self.function}"

    @property
    def label(self) -> str:
        """What an excuse names."""
        return f"{self.place}: {self.change}"

    @property
    def name(self) -> str:
        return f"{self.label} #{self.number}"


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def undecorated(source: str) -> str:
    """Source without decorators of functions, which mutmut would not change; lines are kept."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in node.decorator_list:
                for number in range(decorator.lineno - 1, decorator.end_lineno or decorator.lineno):
                    lines[number] = ""
    return "\n".join([*lines, ""])


def written(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def touched(node: cst.CSTNode, new: cst.CSTNode, parent: Mapping[Any, Any]) -> str:
    """What a change touches: ``callee(argument)``, or the node itself."""
    call, arguments = node, ()
    if isinstance(node, cst.Call) and isinstance(new, cst.Call):
        kept = [written(a.value) for a in new.args]
        arguments = [a for a in node.args if written(a.value) not in kept]
    elif isinstance(parent.get(node), cst.Arg):
        arguments = [parent[node]]
        call = parent.get(parent[node])
    if not arguments or not isinstance(call, cst.Call):
        return written(node)
    callee = written(call.func).rpartition(".")[2]
    keyword = arguments[0].keyword
    name = f"{keyword.value}=" if keyword else ""
    return f"{callee}({name}{written(arguments[0].value)})"


def compiled(source: str, file: str, names: Sequence[str]) -> CodeType:
    """The code object of a function that stands in a module, or in a class of one."""
    flag = __future__.annotations.compiler_flag
    code = compile(source, file, "exec", flags=flag, dont_inherit=True)
    for name in names:
        inner = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
        code = inner[-1]
    return code


def placed(function: cst.CSTNode, names: Sequence[str]) -> str:
    """A function's source, in its class where it has one."""
    text = written(function).lstrip("\n")
    if len(names) == 1:
        return text
    return f"class {names[0]}:\n{textwrap.indent(textwrap.dedent(text), '    ')}"


def differing(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """The lines of each between the first and the last that differ, on one line."""
    equal = [a == b for a, b in zip(old, new, strict=False)]
    first = equal.index(False) if False in equal else len(equal)
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    for lines in (old, new):
        yield " ".join(line.strip() for line in lines[first : len(lines) - last])


def mutants_of(file: str, settings: Mapping[str, Any]) -> list[Mutant]:
    """The changes of a file that are changes of formulas; SAMPLE of them, always the same."""
    path = TREE / "src" / "moesaic" / file
    source = undecorated(path.read_text("utf-8"))
    wrapper = MetadataWrapper(cst.parse_module(source))
    lines = [re.compile(p) for p in settings["lines"]]
    left_alone = {
        i for i, line in enumerate(source.splitlines(), 1) if any(p.search(line) for p in lines)
    }
    visitor = MutationVisitor(mutation_operators, IgnoredCode(set(), set(), left_alone))
    wrapper.visit(visitor)
    position = wrapper.resolve(PositionProvider)
    parent = wrapper.resolve(ParentNodeProvider)
    changes = [re.compile(p) for p in settings["changes"]]
    functions = re.compile(f"(^|[.])({'|'.join(settings['functions'])})$")
    named: dict[cst.FunctionDef, list[str]] = {}
    counts: Counter[str] = Counter()
    candidates = []
    for mutation in visitor.mutations:
        function = mutation.contained_by_top_level_function
        node = mutation.original_node
        if not isinstance(function, cst.FunctionDef):
            continue
        if function not in named:
            above = parent.get(parent.get(function))
            outer = [above.name.value] if isinstance(above, cst.ClassDef) else []
            named[function] = [*outer, function.name.value]
        name = ".".join(named[function])
        begins = position[function.body].start
        at = position.get(node)
        in_signature = at is not None and (at.start.line, at.start.column) < (
            begins.line, begins.column,
        )  # fmt: skip
        text = touched(node, mutation.mutated_node, parent)
        if in_signature or functions.search(name) or any(p.search(text) for p in changes):
            continue
        counts[name] += 1
        candidates.append((digest(file, name, str(counts[name])), name, counts[name], mutation))
    if SAMPLE:
        chosen = {digest_of for digest_of, *_ in sorted(c[:3] for c in candidates)[:SAMPLE]}
        candidates = [c for c in candidates if c[0] in chosen]
    mutants: list[Mutant] = []
    originals: dict[str, tuple[str, CodeType]] = {}
    for _, name, number, mutation in candidates:
        function = mutation.contained_by_top_level_function
        assert function is not None
        names = named[function]
        after = deep_replace(function, mutation.original_node, mutation.mutated_node)
        assert isinstance(after, cst.FunctionDef)
        if name not in originals:
            old = placed(function, names)
            originals[name] = old, compiled(old, str(path), names)
        old, as_it_is = originals[name]
        new = placed(after, names)
        try:
            code = compiled(new, str(path), names)
        except SyntaxError:
            continue
        if code != as_it_is:
            change = " => ".join(differing(old.splitlines(), new.splitlines()))
            mutants.append(Mutant(file, name, change, number, code, digest(old)))
    return mutants


# --- tests ---------------------------------------------------------------------------------------


@dataclass
class Traced:
    """What the tests of one file reach, and how long they take."""

    digest: str
    """Of the file."""
    seconds: dict[str, float]
    """Of each test that passes."""
    reached: dict[str, list[str]]
    """Tests by the place of a function."""
    failing: list[str]


def spans(source: str) -> dict[int, str]:
    """The function of every line: of the module, or of a class of it."""
    names = {}

    def note(body: Iterable[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not before:
                note(node.body, f"{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for line in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1):
                    names[line] = before + node.name

    note(ast.parse(source).body, "")
    return names


class Runner:
    """A pytest plugin that runs mutants in place of the tests that were collected."""

    def __init__(self, settings: Mapping[str, Any], files: Sequence[str]) -> None:
        self.settings = settings
        self.files = files
        self.failed = False
        self.code = 1

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: Any) -> bool:
        if session.testsfailed:
            print("The tests cannot be collected.")
            return True
        self.items = {item.nodeid: item for item in session.items}
        traced = self.trace()
        print(f"{sum(len(t.seconds) for t in traced):,} tests", flush=True)
        self.code = self.judge(traced)
        return True

    def passes(self, items: Sequence[Any]) -> Iterator[tuple[Any, bool, float]]:
        """Run tests in this process: each, whether it passed, and its seconds of CPU."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.failed = False
            began = sum(os.times()[:4])
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item, not self.failed, sum(os.times()[:4]) - began

    # --- once ------------------------------------------------------------------------------------

    def trace(self) -> list[Traced]:
        """What every file of tests reaches, from an earlier run where the file is the same."""
        folder = KEPT / "traced"
        folder.mkdir(parents=True, exist_ok=True)
        by_file: dict[str, list[Any]] = {}
        for nodeid, item in self.items.items():
            by_file.setdefault(nodeid.partition("::")[0], []).append(item)
        kept = {file: folder / (file.replace("/", "-") + ".json") for file in by_file}
        digests = {file: digest((TREE / file).read_text("utf-8")) for file in by_file}

        def cached(file: str) -> Traced | None:
            if not kept[file].exists():
                return None
            traced = Traced(**json.loads(kept[file].read_text()))
            return traced if traced.digest == digests[file] else None

        missing = [file for file in by_file if cached(file) is None]
        tasks = {
            file: partial(self.traced, by_file[file], digests[file], kept[file]) for file in missing
        }
        for file, status, _ in at_once(tasks):
            print(f"traced {file}" if status == 0 else f"{file} cannot be traced", flush=True)
        result = [traced for traced in map(cached, by_file) if traced is not None]
        for nodeid in [n for traced in result for n in traced.failing]:
            print(f"fails as it is, so it is left out: {nodeid}", flush=True)
        return result

    def traced(self, items: Sequence[Any], digest_of: str, file: Path) -> int:
        """Run a file's tests in this process, and write down what they reach."""
        import coverage

        cov = coverage.Coverage(
            data_file=None, include=[f"{TREE}/src/moesaic/*"], config_file=False
        )  # fmt: skip
        seconds, failing = {}, []
        cov.start()
        running = self.passes(items)
        for item in items:
            cov.switch_context(item.nodeid)
            _, passed, took = next(running)
            if passed:
                seconds[item.nodeid] = took
            else:
                failing.append(item.nodeid)
        cov.stop()
        data = cov.get_data()
        reached: dict[str, set[str]] = {}
        for measured in data.measured_files():
            name = str(Path(measured).relative_to(TREE / "src" / "moesaic"))
            if name not in self.settings["files"]:
                continue
            function_at = spans(Path(measured).read_text("utf-8"))
            for line, contexts in data.contexts_by_lineno(measured).items():
                if line in function_at:
                    reached.setdefault(f"{name}::{function_at[line]}", set()).update(contexts)
        plain = {place: sorted(tests & seconds.keys()) for place, tests in reached.items()}
        file.write_text(json.dumps(vars(Traced(digest_of, seconds, plain, failing))))
        return 0

    # --- for each mutant -------------------------------------------------------------------------

    def judge(self, traced: Sequence[Traced]) -> int:
        """Try the mutants of every file and say what became of them; the exit code."""
        seconds = {n: s for t in traced for n, s in t.seconds.items() if n in self.items}
        state = {n: t.digest for t in traced for n in t.seconds}
        reach: dict[str, list[str]] = {}
        for of_file in traced:
            for place, tests in of_file.reached.items():
                reach.setdefault(place, []).extend(t for t in tests if t in seconds)
        for place, tests in reach.items():
            tests.sort(key=lambda t: (seconds[t], t))
            whole = 0.0
            for number, test in enumerate(tests):
                whole += seconds[test]
                if whole > self.settings["seconds"] and number:
                    reach[place] = tests[:number]
                    break
        for file in self.files:
            import_module(f"moesaic.{file.removesuffix('.py').replace('/', '.')}")
        quickest = sorted(seconds, key=seconds.__getitem__)[:CONTROLS]
        for _, status, killer in at_once({"nothing": partial(self.meets, None, quickest, {}, 600)}):
            if status != SURVIVED:
                print(f"Tests fail although nothing is changed: {killer or 'no memory or time'}")
                return 1
        kept = Results(KEPT / "results.jsonl")
        live = live_functions()
        mutants = {file: mutants_of(file, self.settings) for file in self.files}
        digests: dict[str, str] = {}
        tasks = {}
        for mutant in (m for many in mutants.values() for m in many):
            tests = reach.get(mutant.place, [])
            digests[mutant.name] = digest(*(f"{t} {state[t]}" for t in sorted(tests)))
            if kept.end(mutant, digests[mutant.name]):
                continue
            if not tests:
                kept.put(mutant, digests[mutant.name], NEVER_RAN)
                continue
            limit = math.ceil(10 + 4 * sum(seconds[t] for t in tests))
            tasks[mutant] = partial(self.meets, mutant, tests, live, limit)
        print(f"{sum(map(len, mutants.values())):,} mutants, {len(tasks):,} to try", flush=True)
        for mutant, status, killer in at_once(tasks):
            if killer:  # it is likely to kill the next one, too
                tests = reach[mutant.place]
                tests.remove(killer)
                tests.insert(0, killer)
            ends = {SURVIVED: "survived", KILLED: "killed", IMPOSSIBLE: "impossible"}
            kept.put(mutant, digests[mutant.name], ends.get(status, "killed"))
            if status == SURVIVED:
                print(f"survived {mutant.label}", flush=True)
        return self.summary({
            file: [(m, kept.results[m.name]["end"]) for m in many]
            for file, many in mutants.items()
        })  # fmt: skip

    def meets(
        self,
        mutant: Mutant | None,
        tests: Sequence[str],
        live: Mapping[str, Sequence[FunctionType]],
        limit: int,
    ) -> int:
        """Run tests with a function changed, or with nothing changed; how that ended."""
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # files are not among these
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        signal.alarm(5 * limit)
        if mutant is not None:
            functions = live.get(mutant.place, ())
            try:
                for function in functions:
                    function.__code__ = mutant.code
            except ValueError:  # it reads other variables of what surrounds it
                return IMPOSSIBLE
            if not functions:
                return IMPOSSIBLE
        for item, passed, _ in self.passes([self.items[t] for t in tests]):
            if not passed:
                Path(os.environ["TMPDIR"], LEFT).write_text(item.nodeid)
                return KILLED
        return SURVIVED

    def summary(self, ends: Mapping[str, Sequence[tuple[Mutant, str]]]) -> int:
        """Say what became of the mutants; the exit code."""
        excused, least = self.settings["excused"], self.settings["at_least"]
        whole: Counter[str] = Counter()
        poor = []
        for file, many in ends.items():
            counts: Counter[str] = Counter()
            for mutant, end in many:
                if end in ("survived", NEVER_RAN) and mutant.label in excused:
                    end = "excused"
                counts[end] += 1
                if end in ("survived", NEVER_RAN):
                    print(f"    {mutant.label}" + (" (no test)" if end == NEVER_RAN else ""))
            alive = counts["survived"] + counts[NEVER_RAN]
            share = counts["killed"] / max(1, counts["killed"] + alive)
            beyond = f", {counts['impossible']} impossible" if counts["impossible"] else ""
            print(
                f"{file}: {share:.1%} ({counts['killed']} killed, {alive} survived, "
                f"{counts['excused']} excused{beyond})",
                flush=True,
            )
            whole += counts
            if share < least and alive:
                poor.append(file)
        alive = whole["survived"] + whole[NEVER_RAN]
        tried = whole["killed"] + alive
        print(
            f"In all {whole['killed'] / max(1, tried):.1%} of {tried:,} are killed; "
            f"{whole['excused']} are excused" + (f"; {SAMPLE} a file" if SAMPLE else "")
        )
        if poor:
            print(f"Below {least:.0%}: {', '.join(poor)}")
        return int(bool(poor))


class Results:
    """What became of mutants, on disk as soon as it is known."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.results: dict[str, Any] = {}
        if file.exists():
            for line in file.read_text("utf-8").splitlines():
                result = json.loads(line)
                self.results[result["name"]] = result

    def end(self, mutant: Mutant, tests: str) -> str | None:
        """What became of a mutant of this function; a survivor of other tests is tried again."""
        result = self.results.get(mutant.name)
        if result is None or result["function"] != mutant.digest or result["end"] == "impossible":
            return None
        if result["end"] in ("survived", NEVER_RAN) and result["tests"] != tests:
            return None
        return str(result["end"])

    def put(self, mutant: Mutant, tests: str, end: str) -> None:
        result = {"name": mutant.name, "function": mutant.digest, "tests": tests, "end": end}
        self.results[mutant.name] = result
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def live_functions() -> dict[str, list[FunctionType]]:
    """The functions of this process, decorated or not, by their place."""
    functions: dict[str, list[FunctionType]] = {}
    source = f"{TREE}/src/moesaic/"
    gc.unfreeze()  # what the tests keep out of the collector's passes is in no list
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename.startswith(source):
            name = function.__qualname__
            if function.__code__.co_name == name.rpartition(".")[2]:
                file = function.__code__.co_filename.removeprefix(source)
                functions.setdefault(f"{file}::{name}", []).append(function)
    return functions


def at_once(tasks: Mapping[Any, Callable[[], int]]) -> Iterator[tuple[Any, int, str]]:
    """Carry out each task in a fork that ends with what it returns, some at a time.

    Yields:
        the task's name, what it returned, and what it left in the file LEFT of its folder.
    """
    waiting = list(tasks.items())[::-1]
    while waiting or RUNNING:
        while waiting and len(RUNNING) < JOBS:
            name, task = waiting.pop()
            place = tempfile.mkdtemp(prefix="mutant-")
            child = os.fork()
            if child == 0:
                forked(task, place)
            RUNNING[child] = name, place
        child, status = os.wait()
        name, place = RUNNING[child]
        message = Path(place, LEFT).read_text() if Path(place, LEFT).exists() else ""
        ended(child)
        code = os.waitstatus_to_exitcode(status)
        yield name, code if code >= 0 else KILLED, message


RUNNING: dict[int, tuple[Any, str]] = {}
"""Forks, each with its task and its folder."""


def ended(child: int) -> None:
    """End whatever a fork has started, and take its files away."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    shutil.rmtree(RUNNING.pop(child)[1], ignore_errors=True)


def stopped(*_: Any) -> NoReturn:
    """End at once: what is known is on disk."""
    for child in list(RUNNING):
        ended(child)
    os._exit(130)


def forked(task: Callable[[], int], place: str) -> NoReturn:
    """Carry out a task in this process, which was made for it, with files of its own."""
    os.setpgid(0, 0)
    RUNNING.clear()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.environ.update(PYTEST_DEBUG_TEMPROOT=place, TMPDIR=place)
    tempfile.tempdir = place
    status = KILLED
    try:
        status = task()
    finally:
        os._exit(status)


def main(wanted: Sequence[str]) -> int:
    """Change the files that are wanted, all without any.

    Returns:
        the exit code.
    """
    settings = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))
    files = [f for f in settings["files"] if not wanted or any(part in f for part in wanted)]
    KEPT.mkdir(parents=True, exist_ok=True)
    lock = (KEPT / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"Another run is at work in {KEPT}.")
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, TREE / name)
    os.chdir(TREE)
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, stopped)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=f"{TREE}/src")
    sys.path[:0] = [f"{TREE}/src"]
    sys.dont_write_bytecode = True
    import pytest

    runner = Runner(settings, files)
    options = ["-o", "addopts=--doctest-modules", "-m", "not slow and not gpu", "-s"]
    off = [part for name in ("xdist", "cacheprovider", "terminal") for part in ("-p", f"no:{name}")]
    tests = [f"tests/{test}" for test in settings["tests"]]
    tests += [f"src/moesaic/{file}" for file in files]  # examples in the documentation
    pytest.main([*options, *off, f"--rootdir={TREE}", *tests], plugins=[runner])
    return runner.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
