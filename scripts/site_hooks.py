"""Additions of ``make docs`` to the pages: the command reference, and links into the repository."""

from __future__ import annotations

import re
from typing import Any

from click.testing import CliRunner

from moesaic.cli import app
from moesaic.methods import VERBS, methods_of

OUTSIDE = re.compile(
    r"\]\((?:\.\./)+((?:src|benchmarks|recipes|tests|scripts)/?[^)\s]*|[A-Z]+\.md)\)"
)
"""Links of pages to files that are in the repository and not on the site."""
ROLE = re.compile(r":(?:class|func|data|meth|mod|attr):<code>~?([\w.]+)</code>")
"""A name in a docstring, as it comes out as HTML."""
COMMANDS = "reference/commands.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the page of commands, as ``--help-all`` prints them."""
    from mkdocs.structure.files import File  # only where the site is built

    files.append(File.generated(config, COMMANDS, content=commands()))
    return files


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Let links to sources and figures lead to the repository."""
    repository = config.extra["repository"]
    return OUTSIDE.sub(rf"]({repository}/blob/main/\1)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name classes and functions as Sphinx does; show the name alone."""
    return ROLE.sub(lambda match: f"<code>{match[1].rpartition('.')[2]}</code>", html)


def commands() -> str:
    """The page: every command with all its options, and every method's own."""
    parts = ["# Commands", "As `moesaic COMMAND --help-all` prints them."]
    for name in app.commands:
        parts.append(f"## {name}")
        methods = list(methods_of(name)) if name in VERBS else []
        for method in methods if len(methods) > 1 else [""]:
            words = [name, *(["--method", method] if method else [])]
            parts += [f"### {name} --method {method}"] * bool(method)
            parts.append(f"```text\n{help_text(*words)}\n```")
    return "\n\n".join(parts)


def help_text(*words: str) -> str:
    """The help that a command prints."""
    result = CliRunner().invoke(app, [*words, "--help-all"], prog_name="moesaic", terminal_width=78)
    return result.output.strip()
