"""Rows to text: the known columns, and their form as the model sees it.

A chat template from a stranger is a program. transformers runs it in Jinja's sandbox, which keeps
it from files and attributes, but not from nested loops or from strings that double. So it runs in a
child process, which has a limit of memory and is ended if it takes too long. If the system cannot
fork, it runs in this process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from moesaic.errors import MoesaicError, quote
from moesaic.types import JSON, Tokenizer, Values

logger = logging.getLogger(__name__)
T = TypeVar("T")
Row = str | Values
"""Text, or columns."""

PLAIN = ("text", "content")
"""Columns that hold a whole text, whatever other columns there are."""
ASIDE = (
    "id", "idx", "index", "uid", "unique_id", "url", "source", "metadata", "original_question",
    "category", "domain", "subject", "topic", "task", "type", "level", "difficulty", "language",
)  # fmt: skip
"""Columns with information about a row, which are not read."""
DOMAIN = "domain"
"""Column that holds the kind of text of a row; each kind is also measured by itself."""

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{0}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{0}\n\n### Input:\n{1}\n\n### Response:\n"
)
"""Template of Alpaca's own ``text`` column; Code Alpaca, MetaMath and LLM-Adapters
(commonsense170k) use it too."""


class RowError(MoesaicError):
    """Error for a row without text in its columns, or one that the chat template refuses. If other
    rows can be used, it is skipped and counted."""


def usable_rows(
    rows: Iterable[Row], read: Callable[[Row], T], name: str, warn: bool = True
) -> Iterator[tuple[Row, T]]:
    """Yield rows, and the result of ``read`` for each, without those that are :class:`RowError`.

    Args:
        rows: rows of one source.
        read: function of a row.
        name: name of the source, for messages.
        warn: True to warn at the end how many were left out.

    Raises:
        MoesaicError: all rows are unusable, or one has columns that are not known.
    """
    taken = left = 0
    reason: RowError | None = None
    try:
        for row in rows:
            try:
                item = read(row)
            except RowError as error:
                left, reason = left + 1, reason or error
                continue
            taken += 1
            yield row, item
    finally:
        if warn and left and taken:
            logger.warning(
                "%s: %d of %d rows are left out. The first: %s", name, left, left + taken, reason
            )
    if reason is not None and not taken:
        raise MoesaicError(f"{name}: none of {left} rows can be used. {reason}") from reason


@dataclass(frozen=True)
class PromptAnswer:
    """Prompt and its answer; their concatenation is the whole text."""

    prompt: str
    answer: str

    def __post_init__(self) -> None:
        checked(self.prompt + self.answer)


def checked(text: str) -> str:
    """Return the text unchanged.

    Raises:
        RowError: it has half of a surrogate pair, which JSON may hold and no tokenizer accepts.

    >>> checked("a \\ud83d b")
    Traceback (most recent call last):
    moesaic.data.rows.RowError: A row holds half of a surrogate pair, no character: 'a \\ud83d b'
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = quote(text[max(0, error.start - 20) : error.end + 20])
        raise RowError(f"A row holds half of a surrogate pair, no character: {near}") from error
    return text


def _alpaca(row: Values, instruction: str, answer: str) -> tuple[str, str]:
    words = row[instruction].strip(), (row.get("input") or "").strip()
    return (ALPACA_INPUT if words[1] else ALPACA).format(*words), row[answer]


def _choices(row: Values) -> tuple[str, str]:
    choices, right = row["choices"], row["answer"]
    listed = isinstance(choices, list | tuple) and all(isinstance(c, str) for c in choices)
    if not listed or isinstance(right, bool):
        raise TypeError
    letters = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"][: len(choices)]
    if isinstance(right, str):
        letter = right.strip().upper()
        right = letters.index(letter) if letter in letters else -1
    if not 0 <= right < len(choices):
        raise RowError(f"An answer {row['answer']!r} is none of {len(choices)} choices.")
    lines = "".join(f"\n{a}. {choice}" for a, choice in zip(letters, choices, strict=True))
    return f"{row['question'].strip()}{lines}\nAnswer:", f" {letters[right]}"


Form = tuple[tuple[str, ...], Callable[[Values], tuple[str, str]]]
SCHEMAS: Mapping[tuple[str, ...], Form] = {
    ("instruction", "output"): (
        ("input", "answer"),
        lambda row: _alpaca(row, "instruction", "output"),
    ),
    ("instruction", "response"): (("input",), lambda row: _alpaca(row, "instruction", "response")),
    ("query", "response"): ((), lambda row: _alpaca({**row, "input": ""}, "query", "response")),
    ("question", "choices", "answer"): ((), _choices),
    ("problem", "solution"): (("answer",), lambda row: (row["problem"], f" {row['solution']}")),
    ("question", "answer"): (
        (),
        lambda row: (f"Question: {row['question']}\nAnswer:", f" {row['answer']}"),
    ),
    ("prompt", "completion"): ((), lambda row: (row["prompt"], row["completion"])),
    ("prompt", "response"): ((), lambda row: (f"{row['prompt']}\n", row["response"])),
}
"""Forms of rows by their columns, in the order in which they are tried: columns that may be there
too, and the function from a row to its prompt and answer."""


def _pair(
    row: Values, needs: Sequence[str], read: Callable[[Values], tuple[str, str]]
) -> PromptAnswer:
    """Return the prompt and the answer of a row that has the columns of a form."""
    for name in needs[:1] if read is _choices else needs:
        if not isinstance(row[name], str) or not row[name].strip():
            raise RowError(f"A row has no text in its column {name}: {quote(dict(row), 120)}")
    try:
        return PromptAnswer(*read(row))
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise RowError(
            f"A row does not hold text in its columns {', '.join(needs)}: {quote(dict(row), 120)}"
        ) from error


# --- conversations -------------------------------------------------------------------------------

TURNS = ("messages", "conversations")
"""Columns that hold a conversation, whatever other columns there are."""
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""Usual names of roles, by those in some data sets."""
SYSTEM = ("system", "developer")
"""Roles that some templates do not have."""
ASKING = (*SYSTEM, "user", "tool", "function", "ipython")
"""Roles whose turns are no answer of a model."""
SAID = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of a turn that may stand without ``content``."""


def _turns(row: Row) -> list[JSON]:
    """Return a row's conversation, each turn with all its fields, ``role`` and ``content`` among
    them; empty if there is none."""
    if not isinstance(row, Mapping):
        return []
    return [*map(_turn, next((row[n] for n in TURNS if isinstance(row.get(n), list | tuple)), ()))]


def _turn(turn: object) -> JSON:
    """Return one turn without null fields. A null ``content`` is kept beside others, since
    templates check for it."""
    fields = dict(turn) if isinstance(turn, Mapping) else {}
    for name, usual in (("from", "role"), ("value", "content")):
        if fields.get(usual) is None and name in fields:
            fields[usual] = fields.pop(name)
    fields = {k: v for k, v in fields.items() if v is not None or k == "content"}
    role, content = fields.get("role"), fields.get("content")
    silent = content is None and any(fields.get(name) for name in SAID)
    if not isinstance(role, str) or not (silent or isinstance(content, str | list | tuple)):
        raise RowError(
            f"A conversation's turn has role and content, or from and value; got {quote(turn, 70)}."
        )
    return {**fields, "role": ROLES.get(role, role)}


def _tools(row: Row) -> list[Values] | None:
    """Return the functions that a row's conversation may call; None without any."""
    tools = row.get("tools") if isinstance(row, Mapping) else None
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except ValueError:
        tools = ...
    if tools and not isinstance(tools, list | tuple):
        raise RowError(f"A conversation's tools are no list: {quote(row, 120)}")
    return [*tools] if tools else None


def _words(content: object) -> str:
    """Return a turn's content as one text; a part that is none, such as an image, is refused."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [content]
    found = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise RowError(f"A conversation's turn has parts that are no text: {quote(content, 120)}")
    return "".join(texts)


def _conversation(
    turns: Sequence[Values],
    tools: Sequence[Values] | None,
    tokenizer: Tokenizer | None,
    prompt: bool = False,
) -> str:
    """Return a conversation as the model sees it: in the tokenizer's own template if it has one,
    else as texts with blank lines between, tools and their calls as JSON.

    With ``prompt`` the model's answer follows.
    """
    if getattr(tokenizer, "chat_template", None) is None or tokenizer is None:
        texts = [json.dumps(tools, ensure_ascii=False, default=str)] if tools else []
        for turn in turns:
            calls = turn.get("tool_calls")
            texts += filter(None, (_words(turn.get(n)) for n in ("reasoning_content", "content")))
            texts += [json.dumps(calls, ensure_ascii=False, default=str)] if calls else []
        return "\n\n".join([*texts, ""] if prompt else texts)
    from jinja2 import TemplateError

    refusals: list[Exception] = []

    def in_template(messages: Sequence[Values]) -> str | None:
        try:
            return rendered(tokenizer, messages, tools=tools, add_generation_prompt=prompt)
        except TemplateError as error:
            refusals.append(error)
            return None

    text = in_template(turns)
    odd = [turn.get("content") for turn in turns if not isinstance(turn.get("content"), str)]
    # a template for only text may refuse other content, or write it as Python's repr
    if odd and (text is None or any(str(content) in text for content in odd)):
        plain = [{**turn, "content": _words(turn.get("content"))} for turn in turns]
        other = in_template(plain)
        if text is None:
            text, turns = other, plain
        elif other is not None and any(text.count(str(c)) > other.count(str(c)) for c in odd):
            text = other
    if text is None:  # some have no system role: put its content before the first other turn
        system = [_words(turn.get("content")) for turn in turns if turn["role"] in SYSTEM]
        first, *others = [turn for turn in turns if turn["role"] not in SYSTEM] or turns
        content = "\n\n".join([*system, _words(first.get("content"))])
        text = in_template([{**first, "content": content}, *others])
    if text is None:
        reason = " ".join(str(refusals[0]).split())
        raise RowError(
            f"The chat template refuses a conversation ({reason:.120}): {quote(turns, 120)}"
        )
    return text


def pair_of(row: Row, tokenizer: Tokenizer | None = None) -> PromptAnswer | None:
    """Return the prompt and the answer of a row, conversations in the tokenizer's template; None
    for plain text.

    Raises:
        RowError: its columns hold no text, or the template refuses it.
        MoesaicError: its columns are unknown.
    """
    if isinstance(row, str):
        return None
    if turns := _turns(row):
        tools = _tools(row)
        while turns and turns[-1]["role"] in ASKING:  # nothing answers them
            turns.pop()
        if not turns:
            raise RowError(f"A conversation has no answer: {quote(row, 120)}")
        text = _conversation(turns, tools, tokenizer)
        before = _conversation(turns[:-1], tools, tokenizer, prompt=True) if turns[1:] else ""
        # where both differ before the prompt's end, it ends at the first difference
        pairs = enumerate(zip(before, text, strict=False))
        end = next((i for i, (a, b) in pairs if a != b), min(len(before), len(text)))
        return PromptAnswer(text[:end], text[end:])
    if row is None:
        raise RowError("A row is null: it has no text.")
    columns = row if isinstance(row, Mapping) else {}
    for needs, (may, read) in SCHEMAS.items():
        if {*needs} <= columns.keys() <= {*needs, *may, *ASIDE, *PLAIN}:
            return _pair(columns, needs, read)
    if any(isinstance(columns.get(name), str) for name in PLAIN):
        return None
    for name in (*PLAIN, *TURNS):
        if name in columns:
            raise RowError(f"A row has no text in its column {name}: {quote(dict(row), 120)}")
    named = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
    formats = "; ".join((*PLAIN, *TURNS, *map(" + ".join, SCHEMAS)))
    raise MoesaicError(
        f"Rows with the columns {named} are not known; known: {formats}. "
        "Rename the columns, or give the text of each row as text."
    )


def text_of(row: Row, tokenizer: Tokenizer | None = None) -> str:
    """Return the whole text of a row: its own, a conversation, or prompt and answer.

    Errors are those of :func:`pair_of`.
    """
    columns = row if isinstance(row, Mapping) else {PLAIN[0]: row}
    plain = next((columns[name] for name in PLAIN if isinstance(columns.get(name), str)), None)
    if plain is not None:
        return checked(plain)
    if turns := _turns(row):
        return checked(_conversation(turns, _tools(row), tokenizer))
    pair = pair_of(row)
    assert pair is not None
    return pair.prompt + pair.answer


# --- chat templates ------------------------------------------------------------------------------

SECONDS = 20.0
"""Most seconds of one rendering."""
LONGEST, TIMES = 50_000, 10
"""Most characters of a rendered conversation, and as many times those that it is made of."""
MEMORY = 1 << 30
"""Bytes of memory that a template may use."""


def rendered(tokenizer: Tokenizer, turns: Sequence[Values], **options: Any) -> str:
    """Return a conversation in a tokenizer's chat template, as ``apply_chat_template`` renders it.

    Raises:
        MoesaicError: the template takes more than :data:`SECONDS` or :data:`MEMORY`, or writes more
            than :data:`LONGEST` and :data:`TIMES` the conversation.
        TemplateError: the template refuses the conversation, or fails over it.
    """
    if not hasattr(os, "fork"):
        kind, text = _answer(tokenizer, turns, options)
    else:
        try:
            kind, text = _asked(tokenizer, turns, options)
        except (EOFError, OSError):
            _end()
            limits = f"{SECONDS:g} seconds, or more memory than it may"
            kind, text = "failed", f"takes more than {limits}"
    if kind == "refused":
        from jinja2 import TemplateError

        raise TemplateError(text)
    if kind == "failed":
        raise MoesaicError(f"The chat template of this model {text}. Give text instead of turns.")
    return text


def _most(turns: Sequence[Values], options: Values) -> int:
    """Return the most characters that a template may make of a conversation."""
    return LONGEST + TIMES * len(json.dumps([[*turns], options], default=str))


def _answer(tokenizer: Tokenizer, turns: Sequence[Values], options: Values) -> tuple[str, str]:
    """Return the outcome of a conversation, ``text``, ``refused`` or ``failed``, and its text or
    reason."""
    try:
        text = str(tokenizer.apply_chat_template([*turns], tokenize=False, **options))
    except MemoryError:
        return "failed", f"takes more than {MEMORY >> 20:,} MiB of memory"
    except Exception as error:  # a template is a program: it may raise anything over a turn
        return "refused", str(error)[:LONGEST] or type(error).__name__
    if len(text) > (most := _most(turns, options)):
        return "failed", f"writes more than {most:,} characters"
    return "text", text


@dataclass
class _Child:
    """Child process that renders one tokenizer's conversations."""

    process: int
    pipe: Connection
    made_of: tuple[object, ...]
    """Parent process, and the tokenizer's class, template and special tokens."""


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
    kind, text = json.loads(_CHILD[0].pipe.recv_bytes(8 * _most(turns, options)))
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
