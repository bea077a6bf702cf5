"""Entry point of the command line, and its handling of errors."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import click
import wrapt

from moesaic.cli import conversions, guide, measure
from moesaic.cli.commands import app, fail, fail_interrupted
from moesaic.errors import FULL, MoesaicError, bounded, with_causes

TORCH = "inline_container.cc"
"""Source file of torch's writer of training checkpoints, whose errors give no cause."""

ENVIRONMENT = {
    "GOMP_SPINCOUNT": "1000",
    "LRU_CACHE_CAPACITY": "512",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
    "USE_HUB_KERNELS": "NO",
}
"""Environment variables of the command line.

- Turns that a thread of torch waits for the others before it gives its core away. By default they
  are 300,000: beside another job on the same cores, ``slim tiny-moe --no-eval`` then took 235
  seconds, with 1,000 turns 20; alone 13 and 14.
- Numbers of matrix products, compiled by shape, that torch and oneDNN cache, each half a megabyte:
  experts get new numbers of tokens in each batch. The default is 1,024; prompts of a small mixture
  take a third longer with 256, and as long with 512.
- The last variable keeps transformers from fetching compiled code for layers.
"""

for group in (conversions, measure, guide):
    group.commands()


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn exceptions into one message and an exit code: 2 for a wrong request, 1 for our fault."""
    try:
        yield
    except MoesaicError as error:
        if _several():
            from moesaic.distributed import publish_refusal

            publish_refusal(str(error))
        fail(str(error), 2)
    except (click.Abort, KeyboardInterrupt):
        fail_interrupted(None)
    except click.ClickException as error:
        fail(error.format_message(), 2)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if any(isinstance(one, KeyboardInterrupt) for one in with_causes(error)):
            fail_interrupted(None)  # modules that are imported turn it into an error of theirs
        if os.environ.get("MOESAIC_DEBUG"):
            raise
        if _several():
            from moesaic.distributed import peer_failure

            for one in with_causes(error):
                if (ended := peer_failure(one)) is not None:
                    reason, refused = ended
                    fail(reason, 2 if refused else 1)
        if disk_full(error):
            again = "free space and repeat the command, with --resume where it has that"
            fail(f"The disk is full ({error}). OUT was not made; {again}.", 2)
        if isinstance(error, OSError) and error.filename is not None:
            fail(f"{error.filename} may not be read or written: {error.strerror}.", 2)
        if isinstance(error, FileNotFoundError):  # of no file: the system knows no current folder
            fail("The current folder is no longer there; change to one that is.", 2)
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            fail("Out of memory; try a narrower --dtype, a smaller batch or less text.", 1)
        if "strides should be multiple of 16 bytes" in str(error):
            fail("torch cannot run experts of these widths in 16 bits: take float32 (--dtype).", 2)
        if type(error).__name__ == "OutOfMemoryError":
            fail("Out of memory on the device; try --device cpu or a narrower --dtype.", 1)
        fail(
            f"{type(error).__name__}: {error}\n"
            "This is a fault of moesaic, not of your request; MOESAIC_DEBUG=1 shows where.",
            1,
        )


def _several() -> bool:
    """Return True if this process is one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def disk_full(error: BaseException) -> bool:
    """Return True if an error, or one that caused it, means that the disk is full."""
    messages = (*map(os.strerror, FULL), TORCH)
    return any(
        (isinstance(one, OSError) and one.errno in FULL) or any(m in str(one) for m in messages)
        for one in with_causes(error)
    )


def quiet_libraries() -> None:
    """Keep other libraries' bars and notices out of the output, as soon as they are imported."""
    for name in ("torchao", "torch.utils._pytree", "lm_eval"):  # they print while they are imported
        logging.getLogger(name).setLevel(logging.ERROR)

    @wrapt.when_imported("transformers.utils.logging")
    def quiet(module: ModuleType) -> None:
        module.set_verbosity_error()
        module.disable_progress_bar()

    @wrapt.when_imported("datasets.utils.tqdm")
    def without_bars(module: ModuleType) -> None:
        module.disable_progress_bars()


class _Printable(logging.Formatter):
    """Log formatter that makes warnings printable, as they quote strangers' files."""

    def format(self, record: logging.LogRecord) -> str:
        return bounded(super().format(record))


def set_environment() -> None:
    """Set the variables of :data:`ENVIRONMENT`, unless the user did."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def main() -> None:
    """Run the ``moesaic`` command."""
    quiet_libraries()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
    if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding may lack characters
        sys.stdout.reconfigure(errors="replace")
    set_environment()
    # a launcher of several ends them by it; Python handles signals in the main thread alone
    if not _several() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's Ctrl-C
    with exit_on_error():
        if _several():
            from moesaic.distributed import join_processes

            join_processes()
        sys.exit(app(standalone_mode=False))
