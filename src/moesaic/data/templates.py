"""Chat templates from strangers, rendered with limits of time and memory.

A template is a program. transformers runs it in Jinja's sandbox, which keeps it from files and
attributes, but not from nested loops or from strings that double. So it runs in a child process,
which has a limit of memory and is ended if it takes too long. If the system cannot fork, it runs in
this process.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from moesaic.errors import MoesaicError
from moesaic.types import Tokenizer, Values

SECONDS = 20.0
"""Most seconds of one rendering."""
LONGEST = 10_000_000
"""Most characters of a rendered conversation."""
MEMORY = 1 << 30
"""Bytes of memory that a template may use."""


def rendered(tokenizer: Tokenizer, turns: Sequence[Values], **options: Any) -> str:
    """Return a conversation in a tokenizer's chat template, as ``apply_chat_template`` renders it.

    Args:
        tokenizer: a tokenizer with a template.
        turns: the turns that the template gets.
        options: further options of ``apply_chat_template``.

    Raises:
        MoesaicError: the template takes more than :data:`SECONDS` or :data:`MEMORY`, or writes more
            than :data:`LONGEST`.
        TemplateError: the template refuses the conversation, or fails over it.
    """
    if not hasattr(os, "fork"):
        kind, text = _answer(tokenizer, turns, options)
    else:
        try:
            kind, text = _asked(tokenizer, turns, options)
        except (EOFError, OSError):
            _end()
            kind, text = (
                "failed",
                f"takes more than {SECONDS:g} seconds, or more memory than it may",
            )
    if kind == "refused":
        raise TemplateError(text)
    if kind == "failed":
        raise MoesaicError(f"The chat template of this model {text}. Give text instead of turns.")
    return text


def _answer(tokenizer: Tokenizer, turns: Sequence[Values], options: Values) -> tuple[str, str]:
    """Return the outcome of a conversation, ``text``, ``refused`` or ``failed``, and its text or
    reason."""
    try:
        text = str(tokenizer.apply_chat_template([*turns], tokenize=False, **options))
    except MemoryError:
        return "failed", f"takes more than {MEMORY >> 20:,} MiB of memory"
    except Exception as error:  # a template is a program: it may raise anything over a turn
        return "refused", str(error)[:LONGEST] or type(error).__name__
    if len(text) > LONGEST:
        return "failed", f"writes more than {LONGEST:,} characters"
    return "text", text


@dataclass
class _Child:
    """Child process that renders one tokenizer's conversations."""

    process: int
    pipe: Connection
    made_of: tuple[object, ...]
    """Its parent, the tokenizer's class, template and special tokens."""


_CHILD: list[_Child] = []
"""Child of the last tokenizer."""


def _end() -> None:
    """End the child, unless it is another process's."""
    while _CHILD:
        child = _CHILD.pop()
        child.pipe.close()
        if child.made_of[0] == os.getpid():
            with suppress(OSError):
                os.kill(child.process, signal.SIGKILL)
                os.waitpid(child.process, 0)


def _asked(tokenizer: Tokenizer, turns: Sequence[Values], options: Values) -> tuple[str, str]:
    """Return what :func:`_answer` returns in a child, which is kept for the next conversation.

    Raises:
        EOFError: the child has ended, or takes too long.
    """
    words = tokenizer.chat_template, dict(tokenizer.special_tokens_map)
    made_of = (os.getpid(), type(tokenizer), *words)
    if not _CHILD or _CHILD[0].made_of != made_of:
        _end()
        pipe, there = Pipe()
        with warnings.catch_warnings():  # about threads, which templates do not use
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()  # multiprocessing lets no daemon have a child
        if not process:
            try:
                _serve(tokenizer, pipe, there)
            finally:
                os._exit(0)
        there.close()
        _CHILD.append(_Child(process, pipe, made_of))
    _CHILD[0].pipe.send_bytes(json.dumps(([*turns], options), default=str).encode())
    if not _CHILD[0].pipe.poll(SECONDS):
        raise EOFError
    kind, text = json.loads(_CHILD[0].pipe.recv_bytes(8 * LONGEST))
    return kind, text


def _serve(tokenizer: Tokenizer, parents: Connection, pipe: Connection) -> None:
    """Render requested conversations, in the child."""
    import resource

    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for ending in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(ending, signal.SIG_DFL)
    with suppress(OSError, ValueError):  # without this information, only time is limited
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))
    with suppress(EOFError, OSError):
        while True:
            turns, options = json.loads(pipe.recv_bytes())
            signal.alarm(int(SECONDS) + 1)  # ends it, if its parent has ended meanwhile
            pipe.send_bytes(json.dumps(_answer(tokenizer, turns, options)).encode())
            signal.alarm(0)
