"""The one exception that means: the request is wrong, and here is what would work."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

REPOSITORY = "https://github.com/moesaic/moesaic"
"""Where this package is: no index of packages has its name."""


class MoesaicError(Exception):
    """A request that cannot be met. The message is one or two lines: what, where, what would work.

    The command line prints it without a traceback and exits with code 2.
    """


def meant(word: object, names: Iterable[str]) -> str:
    """What was probably meant instead of an unknown word, to end a message with; often nothing.

    >>> meant("recontruction", ["reconstruction", "frequency"])
    " Did you mean 'reconstruction'?"
    """
    near = get_close_matches(str(word), [*names], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def how_to_install(extra: str = "") -> str:
    """The command that installs this package.

    >>> how_to_install("tasks")
    "pip install 'moesaic[tasks] @ git+https://github.com/moesaic/moesaic'"
    """
    place = f"git+{REPOSITORY}"
    return f"pip install 'moesaic[{extra}] @ {place}'" if extra else f"pip install {place}"
