"""Exception for requests that cannot be met, and helpers for its messages.

Messages may quote strangers' files: they are made printable, and of bounded length.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from reprlib import Repr

REPOSITORY = "https://github.com/moesaic/moesaic"
"""Home of this package: no index of packages has its name."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers if a disk or a quota is full, or a file reached its largest size."""
LONGEST = 950
"""Most characters of a message, so that with a prefix it is below a thousand."""
_WHITE = "\n\t\N{NO-BREAK SPACE}"
_PARTS = Repr()
_PARTS.maxlevel, _PARTS.maxstring, _PARTS.maxother = 3, 60, 60


class MoesaicError(Exception):
    """Request that cannot be met, raised by functions that refuse something.

    The message is one or two lines: what, where, what would work. It is printable and no longer
    than :data:`LONGEST`. The command line prints it without a traceback and exits with code 2.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(bounded(message))


def printable(text: str) -> str:
    """Return a text that cannot steer a terminal: control characters but newline and tab replaced.

    >>> printable("a\\x1b[31mb\\n")
    'a�[31mb\\n'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in _WHITE else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def bounded(message: object) -> str:
    """Return a printable message; if it is too long, its middle is left out.

    >>> len(bounded("x" * 10**6)), bounded("short")
    (950, 'short')
    """
    text = str(message)
    if len(text) > LONGEST:
        left_out, end = " [...] ", LONGEST // 3
        text = text[: LONGEST - end - len(left_out)] + left_out + text[-end:]
    return printable(text)


def is_panic(error: BaseException) -> bool:
    """Return True if an error is a panic of a library in Rust, which is no ``Exception``."""
    return type(error).__name__ == "PanicException"


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that caused it, each once."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def quote(value: object, most: int = 60) -> str:
    """Return the beginning of a value's repr, without making the rest.

    >>> quote([[0] * 10**6] * 10**6, 16), quote("x")
    ('[[0, 0, 0, 0, 0,', "'x'")
    """
    try:
        return _PARTS.repr(value)[:most]
    except (ValueError, RecursionError):  # a number of more digits than Python writes
        return f"a {type(value).__name__}"


def dims(shape: Iterable[int]) -> str:
    """Return a shape in words.

    >>> dims((2, 3)), dims(())
    ('2 x 3', 'one number')
    """
    return " x ".join(map(str, shape)) or "one number"


def hint(word: object, names: Iterable[str]) -> str:
    """Return a suggestion for an unknown word, to end a message with; often empty.

    >>> hint("recontruction", ["reconstruction", "frequency"])
    " Did you mean 'reconstruction'?"
    """
    near = get_close_matches(word[:60] if isinstance(word, str) else quote(word), [*names], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_known(
    what: str, word: object, names: Iterable[str], verdict: str = " is none of"
) -> None:
    """Refuse a word that is none of some names, with what may have been meant.

    >>> check_known("dtype", "float23", ["float32"])
    Traceback (most recent call last):
    moesaic.errors.MoesaicError: dtype 'float23' is none of float32. Did you mean 'float32'?
    """
    names = [*names]
    if word not in names:
        listed = ", ".join(names) or "none"
        raise MoesaicError(f"{what} {quote(word)}{verdict} {listed}.{hint(word, names)}")


def how_to_install(extra: str = "") -> str:
    """Return the command that installs this package.

    >>> how_to_install("tasks")
    "pip install 'moesaic[tasks] @ git+https://github.com/moesaic/moesaic'"
    """
    place = f"git+{REPOSITORY}"
    return f"pip install 'moesaic[{extra}] @ {place}'" if extra else f"pip install {place}"
