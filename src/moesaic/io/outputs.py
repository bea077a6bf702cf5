"""Output files and folders: whole or absent, one run at a time, nothing foreign replaced.

An output is written under a hidden name beside its own and renamed when it is complete. A list of
the files in a folder (:data:`moesaic.io.names.FILES`) ensures that nothing is ever deleted that
this package did not write.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.errors import MoesaicError
from moesaic.io.names import FILES, FOLDER, NAMES, misread, our_folder
from moesaic.io.trust import mapping_of

if TYPE_CHECKING:
    from filelock import FileLock

DRAWN = "<!-- made by Moesaic -->"
"""Comment in every page and drawing by which it is recognised as our own."""
STATISTICS = re.compile(rb'.{8}\{"__metadata__":\{"moesaic":', re.DOTALL)
GGUF = re.compile(b"GGUF")
DRAWING = re.compile(b"<[^>]*>" + DRAWN.encode())
"""Patterns of the first bytes of statistics, GGUF files and drawings: older outputs."""
NO_LINK, NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
SCRATCH = re.compile(
    r"(request|machine|goal)\.json|(layer-|stats).*\.safetensors|(step|tried)-.*\.json|best\.yaml|"
    r".*\.stats|\..*\.(writing|lock)"
)
"""Pattern of names at the top of a folder that keeps an unfinished run or search."""


# --- checks, before any work is done -------------------------------------------------------------


def run_folder(out: str | Path) -> Path:
    """Return the folder where an unfinished run keeps its finished layers."""
    return Path(f"{Path(out)}.partial")


def search_folder(out: str | Path) -> Path:
    """Return the folder where an unfinished search keeps its measured candidates."""
    return Path(f"{Path(out)}.search")


def check_unfinished(folder: Path, overwrite: bool, resume: bool, what: str = "run") -> None:
    """Refuse to begin beside an unfinished run, neither to overwrite nor to resume.

    Args:
        folder: of the unfinished run.
        overwrite: True if it may be removed.
        resume: True if it is continued.
        what: what it is, in words.
    """
    _check_folder(folder)
    if folder.exists() and not (overwrite or resume):
        raise MoesaicError(
            f"{folder} holds an unfinished {what}: continue it with resume=True (--resume), or "
            "start anew with overwrite=True (--overwrite)."
        )


def _check_place(out: Path) -> None:
    """Refuse an output that cannot be written at its path, or that another run is writing."""
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise MoesaicError(f"{str(out)!r} cannot be made: its name is no UTF-8.") from None
    if out.name in ("", ".."):
        raise MoesaicError(f"{str(out)!r} cannot be made: give a name that nothing has yet.")
    around = next(place for place in out.absolute().parents if os.path.lexists(place))
    if not around.is_dir():
        raise MoesaicError(f"{out} cannot be made: {around} is no folder.")
    if not os.access(around, os.W_OK | os.X_OK):
        raise MoesaicError(f"{out} cannot be made: {around} may not be written to.")
    if _lock_of(out).exists():  # a run's, or left by one that was killed
        with _locked(out):
            pass


def _check_free(out: Path, overwrite: bool) -> None:
    """Refuse to replace an existing output without ``overwrite``."""
    if os.path.lexists(out) and not overwrite:
        raise MoesaicError(
            f"{out} exists. Choose another name, or pass --overwrite (in Python overwrite=True)."
        )


def _check_inputs(out: Path, inputs: Iterable[str | Path]) -> None:
    """Refuse an output that is or holds an input, or is a file of one; names of no path pass."""
    place = out.resolve()
    for name in filter(os.path.lexists, filter(None, map(str, inputs))):
        read = Path(name).resolve()
        if place in (read, *read.parents):
            where = "is" if place == read else "lies in"
            raise MoesaicError(f"{name} {where} {out}, and is read. Choose another OUT.")
        if out.is_file() and read in place.parents:
            raise MoesaicError(f"{out} is a file of {name}, which is read. Choose another OUT.")


def check_out_file(
    out: Path, kind: re.Pattern[bytes], overwrite: bool = False, inputs: Iterable[str | Path] = ()
) -> None:
    """Refuse a file that exists and may not be replaced, has no place, is a folder, or is read.

    Args:
        out: the file to make.
        kind: pattern of the first bytes of such files.
        overwrite: replace ``out`` if it is an older one of its kind, or empty.
        inputs: names of models, files and text that are read.
    """
    _check_place(out)
    if out.is_dir():
        raise MoesaicError(f"{out} is a folder; give the name of the file to make.")
    _check_free(out, overwrite)
    _check_inputs(out, inputs)
    if out.exists():
        start = b"?"
        if out.is_file():
            with out.open("rb") as file:
                start = file.read(512)
        if start and not kind.match(start):
            raise MoesaicError(
                f"{out} exists, and is no file such as this command makes; it will not be "
                "overwritten. Choose another name."
            )


def check_out(out: Path, overwrite: bool = False, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse a folder that exists, cannot be made, is not our own, or holds an input, also in the
    folder of its unfinished run."""
    _check_place(out)
    if out.name in NAMES and out.parent.resolve() == Path.cwd():
        raise MoesaicError(
            f"{out} would be read in the place of the model of that name from now on. Choose "
            "another name."
        )
    if out.is_symlink():
        raise MoesaicError(f"{out} is a link. Give the name of the folder itself, or another one.")
    if not _is_empty(out):
        _check_free(out, overwrite)
    inputs, work = [*inputs], (run_folder(out), search_folder(out))
    for place in (out, *work):
        _check_inputs(place, inputs)
    if out.exists():
        _check_ours(out)
    for place in work if overwrite else ():
        _check_scratch(place)


def _is_empty(out: Path) -> bool:
    """Return True if an output is an empty folder that can be replaced: no link, no mount."""
    return out.is_dir() and not (out.is_symlink() or out.is_mount() or any(out.iterdir()))


def _check_ours(folder: Path) -> None:
    """Refuse to delete a folder unless this package made it and every file in it."""
    if not folder.is_dir():
        raise MoesaicError(f"{folder} is a file; it will not be overwritten by a folder.")
    files, ours = _inside(folder), set()
    with suppress(MoesaicError, KeyError, TypeError):
        ours = {*map(str, mapping_of(folder / FOLDER / FILES)["files"])}
    if files and not ours:
        raise MoesaicError(f"{folder} was not made by Moesaic; it will not be overwritten.")
    if others := sorted(files - ours):
        more = f" and {len(others) - 1} more files" if len(others) > 1 else ""
        raise MoesaicError(
            f"{folder} holds {others[0]}{more}, which Moesaic did not write; it will not be "
            "overwritten. Move that, or choose another name."
        )


def _check_folder(folder: Path) -> None:
    """Refuse a file or a link that has the name of an unfinished run."""
    if folder.is_symlink() or folder.is_file():
        raise MoesaicError(f"{folder} is no folder of an unfinished run. Move it away.")


def _check_scratch(folder: Path) -> None:
    """Refuse to delete a folder that has an unfinished run's name but other content."""
    _check_folder(folder)
    for file in sorted(folder.iterdir()) if folder.exists() else ():
        if file.is_symlink() or not (file.is_dir() or SCRATCH.fullmatch(file.name)):
            raise MoesaicError(
                f"{folder} holds {file.name}, which is of no unfinished run. Move it away."
            )


def _inside(folder: Path) -> set[str]:
    """Return the paths of all files and links under a folder; links are not followed."""
    paths = (Path(at, name) for at, *both in os.walk(folder) for names in both for name in names)
    return {p.relative_to(folder).as_posix() for p in paths if p.is_symlink() or not p.is_dir()}


# --- one run at a time ---------------------------------------------------------------------------


def _lock_of(out: Path) -> Path:
    return out.parent.resolve() / f".{out.name}.lock"


def _acquired(lock: FileLock, file: Path, wait: bool) -> bool:
    """Acquire a lock; return False if its holder removed the file meanwhile: it locks nothing."""
    # a pipe that nobody reads is refused instead of waited for
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | NO_WAIT | NO_LINK, 0o666)
    try:
        lock.acquire(-1 if wait else 0)
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(opened), file.stat())
        return False
    finally:
        os.close(opened)


@contextmanager
def _locked(out: Path, wait: bool = False) -> Iterator[bool]:
    """Hold an output's lock, which ends with this process at the latest; a thread may nest them.

    Yields:
        True if this thread had not held it before. Files that killed runs left are then removed.
    """
    from filelock import FileLock, Timeout  # which wrong requests need not wait for

    file = _lock_of(out)
    created = [place for place in file.parents if not place.exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, is_singleton=True)
    first = not lock.is_locked
    try:
        while not _acquired(lock, file, wait):
            lock.release()
    except Timeout:
        raise MoesaicError(f"Another run is writing {out}.") from None
    try:
        if first:
            _sweep(out)
        yield first
    finally:
        if first:
            with suppress(OSError):  # Windows keeps it while it is open
                file.unlink()
        lock.release()
        for place in created:
            with suppress(OSError):  # what was made in it is kept
                place.rmdir()


@contextmanager
def output_lock(out: Path, wait: bool = False) -> Iterator[None]:
    """Context in which no other run, of this process or of another, writes an output.

    Warns if there is something in its place: callers have checked that it may be replaced.

    Args:
        out: a file or a folder.
        wait: wait for another run that writes it, instead of refusing.

    Raises:
        MoesaicError: another run writes it.
    """
    with _locked(out, wait) as first:
        if first and (out.is_file() or (out.is_dir() and _inside(out))):
            logging.getLogger(__name__).warning("%s, made before, will be replaced.", out)
        yield


# --- whole or absent -----------------------------------------------------------------------------


def _beside(out: Path, what: str = "writing") -> Path:
    """Return a hidden, random path beside an output."""
    return out.with_name(f".{out.name}.{secrets.token_hex(8)}.{what}")


def _empty(path: Path) -> Path:
    """Make a new empty file and return its path; an existing file or link is never written to."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666))
    return path


def _sweep(out: Path) -> None:
    """Remove files that killed runs left beside a locked output.

    An older output that was about to be replaced gets its name back if the new one had not got it.
    """
    names = "|".join(re.escape(f.name) for f in (out, run_folder(out), search_folder(out)))
    left = re.compile(rf"\.({names})\.[0-9a-f]{{16}}\.(writing|replaced)")
    for path in [path for path in out.parent.iterdir() if left.fullmatch(path.name)]:
        if path.suffix == ".replaced" and not os.path.lexists(out):
            path.rename(out)
            logging.getLogger(__name__).warning("%s is back: a run was killed replacing it.", out)
        elif path.is_dir() and not path.is_symlink():
            path = path.rename(_beside(out))  # half of one must not come back
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Yield a temporary file that gets its name when it is complete, or is removed on failure.

    It is new and empty, beside ``file``, whose folder is made if need be. A file that has the name
    by then is replaced.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = _empty(_beside(file))
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def put_file(work: Path, file: Path, overwrite: bool) -> None:
    """Rename a complete file; refuse a name that is taken, unless ``overwrite``."""
    if not overwrite:
        with suppress(OSError):  # the name is taken, or the file system has no links
            os.link(work, file)  # a rename would replace
            work.unlink()
            return
        _check_free(file, overwrite)
    work.replace(file)


@contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside an output for intermediate files; it is removed afterwards.

    If this process is killed, the next run of the output removes it.

    Args:
        out: a file or a folder, which no other run writes meanwhile.

    Raises:
        MoesaicError: another run writes it.
    """
    with output_lock(out):
        work = _beside(out)
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def whole_folder(
    out: Path, overwrite: bool = False, inputs: Iterable[str | Path] = ()
) -> Iterator[Path]:
    """Yield a temporary folder beside ``out`` that is renamed to it at the end, or removed.

    Args:
        out: path of the folder.
        overwrite: replace an existing one that is our own.
        inputs: names of models, files and text that are read meanwhile.

    Yields:
        the folder to write to.

    Raises:
        MoesaicError: as :func:`check_out`; another run is writing it; it exists by then.
    """
    check_out(out, overwrite, inputs)
    with scratch_folder(out) as work:
        yield work
        assert not misread(work), f"engines would read {misread(work)}"
        files = our_folder(work) / FILES
        files.touch()
        files.write_text(json.dumps({"files": sorted(_inside(work))}, indent=1) + "\n")
        _put_folder(work, out, overwrite)


def _put_folder(work: Path, out: Path, overwrite: bool) -> None:
    """Rename a complete folder; an older one of that name is removed afterwards."""
    if not out.exists() or _is_empty(out):
        try:
            if out.exists():
                out.rmdir()
            work.rename(out)
        except OSError:
            _check_free(out, overwrite=False)
            raise
        return
    _check_free(out, overwrite)
    _check_ours(out)
    if _exchanged(work, out):
        return  # the old one has the new one's name, by which it is removed
    old = _beside(out, "replaced")
    out.rename(old)  # a folder that is being removed is no whole one
    try:
        work.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders exchange their names in one step; False where the system cannot do that."""
    names, here, exchange = [os.fsencode(one.absolute()), os.fsencode(other.absolute())], -100, 2
    try:
        library = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return int(library.renamex_np(*names, exchange)) == 0
        return int(library.renameat2(here, names[0], here, names[1], exchange)) == 0
    except (AttributeError, OSError, TypeError):  # neither is there
        return False


def remove(folder: Path) -> None:
    """Remove a folder; it is whole or absent even if this process is killed meanwhile."""
    folder = folder.rename(_beside(folder))  # a name that the next run sweeps
    shutil.rmtree(folder, ignore_errors=True)


def resumable(out: str | Path) -> bool:
    """Return True if an unfinished run of an output left layers to continue from."""
    return any(run_folder(out).rglob("*.safetensors"))


def discard(folder: Path) -> None:
    """Remove the folder of an unfinished run or search; refuse one that holds other files."""
    _check_scratch(folder)
    if folder.exists():
        remove(folder)


def let_read(file: Path) -> None:
    """Give a file the permissions of any new one: safetensors lets only the owner read it."""
    new = _empty(_beside(file))
    shutil.copymode(new, file)
    new.unlink()


# --- drawings ------------------------------------------------------------------------------------


def mark_drawn(text: str) -> str:
    """Return HTML or SVG with the comment :data:`DRAWN` after its first tag.

    >>> mark_drawn("<svg><path/></svg>")
    '<svg><!-- made by Moesaic --><path/></svg>'
    """
    return text.replace(">", f">{DRAWN}", 1)
