"""The one exception that means: the request is wrong, and here is what would work."""

from __future__ import annotations

REPOSITORY = "https://github.com/moesaic/moesaic"
"""Where this package is: no index of packages has its name."""


class MoesaicError(Exception):
    """A request that cannot be met. The message is one or two lines: what, where, what would work.

    The command line prints it without a traceback and exits with code 2.
    """


def how_to_install(extra: str = "") -> str:
    """The command that installs this package.

    >>> how_to_install("tasks")
    "pip install 'moesaic[tasks] @ git+https://github.com/moesaic/moesaic'"
    """
    place = f"git+{REPOSITORY}"
    return f"pip install 'moesaic[{extra}] @ {place}'" if extra else f"pip install {place}"
