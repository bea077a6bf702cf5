"""Command line: rich prints text for people, and ``--json`` one JSON object on stdout.

Nothing here imports torch before it is needed: help, the version and wrong arguments are answered
at once.
"""

from moesaic.cli.commands import app
from moesaic.cli.entry import main

__all__ = ["app", "main"]
