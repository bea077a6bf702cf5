"""The entry point, and what becomes of errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from moesaic.io.checkpoint import disk_full
from moesaic.cli.shared import app, fail
from moesaic.errors import MoesaicError
from moesaic.stream.experts import join_processes
from moesaic.version import __version__


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@contextmanager
def explained() -> Iterator[None]:
    """Turn exceptions into one message and an exit code: 2 the request, 1 ourselves."""
    try:
        yield
    except MoesaicError as error:
        fail(str(error), 2)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if os.environ.get("MOESAIC_DEBUG"):
            raise
        if disk_full(error):
            fail(f"The disk is full ({error}). OUT was not made; free space, then --resume.", 2)
        if type(error).__name__ == "OutOfMemoryError":
            fail("Out of memory on the device; try --device cpu or a narrower --dtype.", 1)
        fail(
            f"{type(error).__name__}: {error}\n"
            "This is a fault of moesaic, not of your request; MOESAIC_DEBUG=1 shows where.",
            1,
        )


def quiet_libraries() -> None:
    """Keep other libraries' bars and notices out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main() -> None:
    """Entry point of the ``moesaic`` command."""
    quiet_libraries()
    with explained():
        join_processes()
        app()
