"""One ``moesaic`` command in a child of this process, which has imported torch once for all."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
MEMORY = 6 << 30
"""Bytes that a command may take beyond what this process has mapped."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code; the negative number of the signal that ended it."""
    text: str
    """Its stdout and stderr."""
    seconds: float

    @property
    def orderly(self) -> bool:
        """One message and no traceback."""
        return len(re.findall(r"(?<!\w)Error:", self.text)) == 1 and "Traceback" not in self.text

    @property
    def message(self) -> str:
        return " ".join(self.text.split())[-300:]


@dataclass(frozen=True)
class Limits:
    """What befalls a command."""

    seconds: float = 120.0
    kill: float | None = None
    """SIGKILL after this many seconds."""
    file_bytes: int | None = None
    """No file can be larger: the disk is full for whatever writes it, in whatever language."""
    writes: int | None = None
    """The disk is full when Python opens or makes the file of this number."""
    memory: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def full_after(writes: int) -> None:
    """Make this process find the disk full from its n-th file on, until nothing is left to do."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        creates = event == "os.mkdir" or (
            event == "open"
            and isinstance(arguments[0], str)
            and not arguments[0].startswith(("/dev/", "/proc/"))
            and isinstance(arguments[2], int)
            and arguments[2] & WRITING
        )
        if creates:
            count += 1
            if count >= writes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    sys.addaudithook(hook)


def limited() -> None:
    """Limit this process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _child(arguments: Sequence[str], cwd: Path, output: Path, limits: Limits) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(cwd)
    os.environ.update(limits.environment)
    sys.argv = ["moesaic", *arguments]
    if limits.memory:
        limited()
    if limits.file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    if limits.writes is not None:
        full_after(limits.writes)
    from moesaic import cli

    code: Any = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(int(code or 0))


def ran(
    arguments: Sequence[object], cwd: Path, output: Path, limits: Limits | None = None
) -> Ended:
    """Carry out a command in a child process; ``output`` lies outside of all that is watched."""
    limits = limits or Limits()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            _child([str(a) for a in arguments], cwd, output, limits)
        finally:
            os._exit(71)
    last = began + min(limits.seconds, limits.seconds if limits.kill is None else limits.kill)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() >= last:
            for victim in (lambda: os.killpg(child, signal.SIGKILL), lambda: os.kill(child, 9)):
                try:
                    victim()
                    break
                except ProcessLookupError:
                    continue
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.005)
    text = output.read_text("utf-8", "replace") if output.exists() else ""
    return Ended(os.waitstatus_to_exitcode(status), text, time.monotonic() - began)


# --- what is on disk -----------------------------------------------------------------------------


def tree(folder: Path, *without: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file under a folder, by its path."""
    result = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(path == w or w in path.parents for w in without):
            stat = path.stat()
            result[str(path.relative_to(folder))] = (stat.st_size, stat.st_mtime_ns)
    return result


TIMES = re.compile(r"second|_s$|time|memory|speed|rss|date|environment|load|^log$", re.IGNORECASE)


def _plain(value: Any) -> Any:
    """JSON without what two runs never have in common."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if not TIMES.search(k)}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def contents(out: Path) -> dict[str, object]:
    """A result's files by name, bitwise; the record without times; what is drawn of it left out."""
    if out.is_file():
        return {out.name: out.read_bytes()}
    result: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.name == "result.json":
            result[name] = json.dumps(_plain(json.loads(path.read_text())), sort_keys=True)
        elif path.is_file() and path.suffix not in (".html", ".md", ".svg"):
            result[name] = path.read_bytes()
        elif path.is_file():
            result[name] = "drawn"
    return result


def seeded(*parts: object) -> random.Random:
    """Random numbers of a place, the same in every run."""
    return random.Random(":".join(map(str, parts)))
