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
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
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
    if "fork" not in get_all_start_methods():
        kind, text = _answer(tokenizer, turns, options)
    else:
        try:
            kind, text = _asked(tokenizer, turns, options)
        except (EOFError, OSError):
            while _CHILD:
                _CHILD.pop().kill()
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


_CHILD: list[Any] = []
"""Child process of the last tokenizer, with its pipe and what it was forked from."""


def _asked(tokenizer: Tokenizer, turns: Sequence[Values], options: Values) -> tuple[str, str]:
    """Return what :func:`_answer` returns in a child, which is kept for the next conversation.

    Raises:
        EOFError: the child has ended, or takes too long.
    """
    made_of = os.getpid(), tokenizer.chat_template, dict(tokenizer.special_tokens_map)
    if not _CHILD or _CHILD[0].made_of != made_of:
        for old in _CHILD:
            old.pipe.close()
        fork = get_context("fork")
        pipe, there = fork.Pipe()
        child: Any = fork.Process(target=_serve, args=(tokenizer, pipe, there), daemon=True)
        with warnings.catch_warnings():  # about threads, which templates do not use
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        there.close()
        child.pipe, child.made_of = pipe, made_of
        _CHILD[:] = [child]
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
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(OSError, ValueError):  # without this information, only time is limited
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))
    with suppress(EOFError, OSError):
        while True:
            turns, options = json.loads(pipe.recv_bytes())
            pipe.send_bytes(json.dumps(_answer(tokenizer, turns, options)).encode())
