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
import weakref
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
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
        try:
            return _applied(tokenizer, turns, options)
        except Exception as error:
            raise TemplateError(str(error)) from error
    child = _CHILDREN.get(tokenizer)
    if child is None or child.of != _state(tokenizer):
        child = _CHILDREN[tokenizer] = _Child(tokenizer)
    try:
        kind, text = child.ask(turns, options)
    except (EOFError, OSError):
        del _CHILDREN[tokenizer]
        kind, text = "bounds", f"takes more than {SECONDS:g} seconds, or more memory than there is"
    if kind == "refused":
        raise TemplateError(text)
    if kind != "text":
        raise MoesaicError(f"The chat template of this model {text}. Give text instead of turns.")
    return text


def _applied(tokenizer: Tokenizer, turns: Sequence[Values], options: Values) -> str:
    return str(tokenizer.apply_chat_template([*turns], tokenize=False, **options))


def _state(tokenizer: Tokenizer) -> tuple[object, ...]:
    """Return what a child depends on: its parent, the template, and the special tokens."""
    return os.getpid(), tokenizer.chat_template, dict(tokenizer.special_tokens_map)


class _Child:
    """Child process that renders one tokenizer's template, until it fails."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.of = _state(tokenizer)
        self._pipe, there = Pipe()
        with warnings.catch_warnings():  # about threads, which templates do not use
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = os.fork()
        if not self.process:
            try:
                self._pipe.close()
                _serve(tokenizer, there)
            finally:
                os._exit(0)
        there.close()
        weakref.finalize(self, _end, self.process, os.getpid())

    def ask(self, turns: Sequence[Values], options: Values) -> tuple[str, str]:
        """Return the outcome for a conversation, ``text``, ``refused`` or ``failed``, and its text
        or reason.

        Raises:
            EOFError: the child has ended.
        """
        self._pipe.send_bytes(json.dumps(([*turns], options), default=str).encode())
        if not self._pipe.poll(SECONDS):
            raise EOFError
        kind, text = json.loads(self._pipe.recv_bytes(8 * LONGEST))
        return str(kind), str(text)


def _end(process: int, owner: int) -> None:
    if os.getpid() == owner:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _serve(tokenizer: Tokenizer, pipe: Connection) -> None:
    """Render requested conversations, in the child."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError, ValueError):  # without this information, only time is limited
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))
    while True:
        try:
            turns, options = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = "text", _applied(tokenizer, turns, options)
            if len(answer[1]) > LONGEST:
                answer = "failed", f"writes more than {LONGEST:,} characters"
        except MemoryError:
            answer = "failed", f"takes more than {MEMORY >> 20:,} MiB of memory"
        except Exception as error:  # a template is a program: it may raise anything over a turn
            answer = "refused", str(error)[:LONGEST] or type(error).__name__
        pipe.send_bytes(json.dumps(answer).encode())


_CHILDREN: MutableMapping[Tokenizer, _Child] = weakref.WeakKeyDictionary()
