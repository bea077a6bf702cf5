"""The commands. Text for people goes through rich; ``--json`` puts one JSON object on stdout."""

from moesaic.cli import convert, measure, results
from moesaic.cli.entry import main
from moesaic.cli.shared import app

__all__ = ["app", "convert", "main", "measure", "results"]
