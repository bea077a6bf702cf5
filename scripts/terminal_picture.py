"""Write a picture of a command and what it prints.

    python scripts/terminal_picture.py docs/images/terminal.svg slim tiny-moe half ...

Runs ``moesaic`` with these words in an empty folder and writes all that it prints as SVG. Lines
that a bar draws again and again are shown as they end, those of the saved result's run not at all.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, BAR = 100, "━━━ "


def main(out: str, *words: str) -> None:
    environment = {
        **os.environ,
        "COLUMNS": str(COLUMNS),
        "FORCE_COLOR": "1",
        "TTY_INTERACTIVE": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            ["moesaic", *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {shlex.join(['moesaic', *words])}", style="bold"))
    again = False
    for line in run.stdout.splitlines():
        shown = Text.from_ansi(line.rpartition("\r")[2])
        again |= shown.plain.startswith("$ ")
        if shown.plain.strip() and not (again and BAR in shown.plain):
            console.print(shown)
    Path(out).write_text(console.export_svg(title="moesaic", unique_id="terminal"), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
