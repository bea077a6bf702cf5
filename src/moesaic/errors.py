"""The one exception that means: the request is wrong, and here is what would work."""

from __future__ import annotations


class MoesaicError(Exception):
    """A request that cannot be met. The message is one or two lines: what, where, what would work.

    The command line prints it without a traceback and exits with code 2.
    """
