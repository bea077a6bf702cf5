"""Exports: results as checkpoints and files that other engines load; exact or refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from moesaic.config import ExportArgs, form_of, path_to
from moesaic.hub import on_disk
from moesaic.progress import tracked
from moesaic.recipe import parse_as
from moesaic.types import JSON, Named, Tokenizer, Track


def export(
    model: Named,
    out: str | Path,
    to: str = "",
    *,
    overwrite: bool = False,
    tokenizer: Tokenizer | None = None,
    progress: bool | Track = True,
    revision: str | None = None,
    token: str | bool | None = None,
    **options: object,
) -> JSON:
    """Write a model in a form that other engines load.

    Args:
        model: a name or folder, a loaded model, or what a verb returned.
        out: the folder or GGUF file to write.
        to: ``native`` (:func:`moesaic.exports.native.export_native`) or ``gguf``
            (:func:`moesaic.exports.llamacpp.export_gguf`); by default by the name of ``out``.
        overwrite: replace ``out`` if it exists.
        tokenizer: tokenizer of a loaded model, which has none.
        progress: True to draw bars on stderr; or a function (items, label, total).
        revision: branch, tag or commit, when ``model`` is a hub id.
        token: access token of the hub, when ``model`` is a hub id.
        options: the other fields of :class:`moesaic.config.ExportArgs`.

    Raises:
        MoesaicError: the form is unknown, or cannot hold the model.
    """
    file = path_to(out)
    args = parse_as(ExportArgs, {"to": form_of(file, to), **options}, "")
    with on_disk(model, tokenizer, revision, token) as name:
        if args.to == "gguf":
            from moesaic.exports.llamacpp import export_gguf

            return export_gguf(name, file, args, overwrite, tracked(progress))
        from moesaic.exports.native import export_native

        return export_native(name, file, args.target, overwrite)


ERROR = re.compile(r"[\w.]+(Error|Exception): ")
"""Start of the last line of a traceback."""


def run_script(name: str, request: str, output: int | None = None, **env: str) -> str | None:
    """Run a script of this folder in a process of its own; return its error in a line, or None.

    Its folder is kept off the path, or its neighbours would be imported as packages of the same
    names. What it writes to stdout goes to ``output``, a file descriptor, if there is one.
    """
    script = Path(__file__).with_name(name)
    run = subprocess.run(
        [sys.executable, str(script), request],
        stdout=subprocess.DEVNULL if output is None else output,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", **env},
    )
    lines = run.stderr.strip().splitlines() or ["no message"]
    errors = [line for line in lines if ERROR.match(line)]  # bars may end after it
    return [*lines, *errors][-1] if run.returncode else None
