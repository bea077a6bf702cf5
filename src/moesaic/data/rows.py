"""Rows to text: the columns that are known, and how a model is shown them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moesaic.errors import MoesaicError, shown
from moesaic.types import JSON, Tokenizer, Values

logger = logging.getLogger(__name__)
T = TypeVar("T")
Row = str | Values
"""A text, or columns."""

PLAIN = ("text", "content")
"""Columns that are a text of their own, whatever stands beside them."""

ASIDE = (
    "id", "idx", "index", "uid", "unique_id", "url", "source", "metadata", "original_question",
    "category", "domain", "subject", "topic", "task", "type", "level", "difficulty", "language",
)  # fmt: skip
"""Columns that are about a row and are not read."""

DOMAIN = "domain"
"""The column that says what kind of text a row is, each of which is measured by itself, too."""

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{0}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{0}\n\n### Input:\n{1}\n\n### Response:\n"
)
"""The template of Alpaca's own ``text`` column; Code Alpaca, MetaMath and LLM-Adapters
(commonsense170k) use it too."""


class Unusable(MoesaicError):
    """A row without text in its columns, or one that the chat template refuses. Among rows that
    can be used it is left out, and counted."""


def usable(
    rows: Iterable[Row], read: Callable[[Row], T], name: str, say: bool = True
) -> Iterator[tuple[Row, T]]:
    """Rows, and what is read of each; those that are :class:`Unusable` are left out.

    Args:
        rows: of one source.
        read: what to read of a row.
        name: of the source, for messages.
        say: warn of how many were left out, when there are no more rows or nobody wants more.

    Raises:
        MoesaicError: all rows are unusable, or one has columns that are not known.
    """
    taken = left = 0
    reason: Unusable | None = None
    try:
        for row in rows:
            try:
                item = read(row)
            except Unusable as error:
                left, reason = left + 1, reason or error
                continue
            taken += 1
            yield row, item
    finally:
        if say and left and taken:
            logger.warning(
                "%s: %d of %d rows are left out. The first: %s", name, left, left + taken, reason
            )
    if reason is not None and not taken:
        raise MoesaicError(f"{name}: none of {left} rows can be used. {reason}") from reason


@dataclass(frozen=True)
class PromptAnswer:
    """A prompt and its answer; one after the other they are the whole text."""

    prompt: str
    answer: str

    def __post_init__(self) -> None:
        checked(self.prompt + self.answer)


def checked(text: str) -> str:
    """The text.

    Raises:
        Unusable: half of a surrogate pair is in it, which JSON may hold and no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = shown(text[max(0, error.start - 20) : error.end + 20])
        raise Unusable(f"A row holds half of a surrogate pair, no character: {near}") from error
    return text


@dataclass(frozen=True)
class Schema:
    """Columns that belong together."""

    data_sets: str
    """The data sets that have them."""
    needs: tuple[str, ...]
    may: tuple[str, ...]
    """Columns that it reads, or that say again what others say."""
    read: Callable[[Values], PromptAnswer]
    texts: tuple[str, ...] | None = None
    """The columns of ``needs`` that must hold words; None for all of them."""

    def fits(self, row: Values) -> bool:
        """All columns are there, and none that is not known."""
        columns = {*self.needs, *self.may, *ASIDE, *PLAIN}
        return row.keys() >= set(self.needs) and row.keys() <= columns

    def pair(self, row: Values) -> PromptAnswer:
        """The prompt and the answer of a row that fits.

        Raises:
            Unusable: a column does not hold what it should.
        """
        for name in self.needs if self.texts is None else self.texts:
            if not isinstance(row[name], str) or not row[name].strip():
                raise Unusable(f"A row has no text in its column {name}: {dict(row)!r:.120}")
        try:
            return self.read(row)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise Unusable(
                f"A row with the columns of {self.data_sets} does not hold text in them: "
                f"{dict(row)!r:.120}"
            ) from error


def _alpaca(instruction: str, context: str, answer: str) -> PromptAnswer:
    instruction, context = instruction.strip(), context.strip()
    if context:
        return PromptAnswer(ALPACA_INPUT.format(instruction, context), answer)
    return PromptAnswer(ALPACA.format(instruction), answer)


def _choices(row: Values) -> PromptAnswer:
    choices, right = row["choices"], row["answer"]
    listed = isinstance(choices, list | tuple) and all(isinstance(c, str) for c in choices)
    if not listed or isinstance(right, bool):
        raise TypeError
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]
    if isinstance(right, str):
        right = letters.find(right.strip().upper()) if right.strip() else -1
    if not 0 <= right < len(choices):
        raise Unusable(f"An answer {row['answer']!r} is none of {len(choices)} choices.")
    lines = "".join(f"\n{a}. {choice}" for a, choice in zip(letters, choices, strict=True))
    return PromptAnswer(f"{row['question'].strip()}{lines}\nAnswer:", f" {letters[right]}")


SCHEMAS = (
    Schema(
        "Alpaca, Code Alpaca, commonsense170k",
        ("instruction", "output"),
        ("input", "answer"),
        lambda row: _alpaca(row["instruction"], row.get("input") or "", row["output"]),
    ),
    Schema(
        "instructions with a response",
        ("instruction", "response"),
        ("input",),
        lambda row: _alpaca(row["instruction"], row.get("input") or "", row["response"]),
    ),
    Schema(
        "MetaMathQA",
        ("query", "response"),
        (),
        lambda row: _alpaca(row["query"], "", row["response"]),
    ),
    Schema("MMLU", ("question", "choices", "answer"), (), _choices, texts=("question",)),
    Schema(
        "MATH",
        ("problem", "solution"),
        ("answer",),
        lambda row: PromptAnswer(row["problem"], f" {row['solution']}"),
    ),
    Schema(
        "GSM8K",
        ("question", "answer"),
        (),
        lambda row: PromptAnswer(f"Question: {row['question']}\nAnswer:", f" {row['answer']}"),
    ),
    Schema(
        "prompts with a completion",
        ("prompt", "completion"),
        (),
        lambda row: PromptAnswer(row["prompt"], row["completion"]),
    ),
    Schema(
        "prompts with a response",
        ("prompt", "response"),
        (),
        lambda row: PromptAnswer(f"{row['prompt']}\n", row["response"]),
    ),
)
"""In the order in which they are tried."""


TURNS = ("messages", "conversations")
"""Columns that are a conversation, whatever stands beside them."""
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant"}
"""Names of roles, as some data sets have them."""
SAID = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of a turn that may need no ``content`` beside them."""


def _turns(row: Row) -> list[JSON]:
    """A row's conversation, each turn with all that it has, by ``role`` and ``content``; empty
    where the row has none.

    Raises:
        Unusable: its turns are of no form that is known.
    """
    if not isinstance(row, Mapping):
        return []
    return [*map(_turn, next((row[n] for n in TURNS if isinstance(row.get(n), list | tuple)), ()))]


def _turn(turn: object) -> JSON:
    """One turn. A field that is null is as good as absent, but ``content`` beside others, of which
    templates ask whether it is null."""
    fields = dict(turn) if isinstance(turn, Mapping) else {}
    for name, usual in (("from", "role"), ("value", "content")):
        if fields.get(usual) is None and name in fields:
            fields[usual] = fields.pop(name)
    fields = {k: v for k, v in fields.items() if v is not None or k == "content"}
    role, content = fields.get("role"), fields.get("content")
    silent = content is None and any(fields.get(name) for name in SAID)
    if not isinstance(role, str) or not (silent or isinstance(content, str | list | tuple)):
        raise Unusable(
            f"A conversation's turn has role and content, or from and value; got {shown(turn, 70)}."
        )
    return {**fields, "role": ROLES.get(role, role)}


def _tools(row: Row) -> list[Values] | None:
    """The functions that a row's conversation may call; None where it has none."""
    tools = row.get("tools") if isinstance(row, Mapping) else None
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except ValueError:
        tools = ...
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise Unusable(f"A conversation's tools are no list: {shown(row, 120)}")
    return [*tools]


def _words(content: object) -> str:
    """A turn's content as one text.

    Raises:
        Unusable: a part of it is no text, such as a picture.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [content]
    found = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise Unusable(f"A conversation's turn has parts that are no text: {shown(content, 120)}")
    return "".join(texts)


def _without_template(turns: Sequence[Values], tools: Sequence[Values] | None) -> str:
    """A conversation as plain text; tools and their calls as JSON."""
    texts = [json.dumps(tools, ensure_ascii=False, default=str)] if tools else []
    for turn in turns:
        calls = turn.get("tool_calls")
        texts += filter(None, (_words(turn.get(n)) for n in ("reasoning_content", "content")))
        texts += [json.dumps(calls, ensure_ascii=False, default=str)] if calls else []
    return "\n\n".join(texts)


def _conversation(
    turns: Sequence[Values],
    tools: Sequence[Values] | None,
    tokenizer: Tokenizer | None,
    prompt: bool = False,
) -> str:
    """A conversation as the model is shown it: in the tokenizer's own template if it has one.

    Args:
        turns: of :func:`_turns`, which the template is given as they are.
        tools: the functions that may be called.
        tokenizer: of the model.
        prompt: the model's answer follows.

    Raises:
        Unusable: the template refuses it.
    """
    if getattr(tokenizer, "chat_template", None) is None or tokenizer is None:
        return _without_template(turns, tools) + ("\n\n" if prompt else "")
    from jinja2 import TemplateError

    from moesaic.data.templates import rendered

    refusal: Exception | None = None

    def in_template(messages: Sequence[Values]) -> str | None:
        nonlocal refusal
        try:
            return rendered(tokenizer, messages, tools=tools, add_generation_prompt=prompt)
        except TemplateError as error:
            refusal = refusal or error
            return None

    text = in_template(turns)
    odd = [turn.get("content") for turn in turns if not isinstance(turn.get("content"), str)]
    # a template that knows texts only may refuse others, or write them as Python does
    if odd and (text is None or any(str(content) in text for content in odd)):
        plain = [{**turn, "content": _words(turn.get("content"))} for turn in turns]
        other = in_template(plain)
        if text is None:
            text, turns = other, plain
        elif other is not None and any(text.count(str(c)) > other.count(str(c)) for c in odd):
            text = other
    if text is None:  # some know no system's turns: what it says begins the first other one
        system = [_words(turn.get("content")) for turn in turns if turn["role"] == "system"]
        first, *others = [turn for turn in turns if turn["role"] != "system"] or turns
        content = "\n\n".join([*system, _words(first.get("content"))])
        text = in_template([{**first, "content": content}, *others])
    if text is None:
        reason = " ".join(str(refusal).split())
        raise Unusable(
            f"The chat template refuses a conversation ({reason:.120}): {shown(turns, 120)}"
        )
    return text


def _answered(
    turns: Sequence[Values], tools: Sequence[Values] | None, tokenizer: Tokenizer | None
) -> PromptAnswer:
    """What comes before the last turn, and that turn."""
    text = _conversation(turns, tools, tokenizer)
    prompt = _conversation(turns[:-1], tools, tokenizer, prompt=True) if len(turns) > 1 else ""
    # where the answer begins otherwise than templates end a prompt, the prompt ends before that
    pairs = enumerate(zip(prompt, text, strict=False))
    end = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(text)))
    return PromptAnswer(text[:end], text[end:])


def asked(row: Row, tokenizer: Tokenizer | None = None) -> PromptAnswer | None:
    """The prompt and the answer of a row; None for plain text.

    Args:
        row: a text, or columns.
        tokenizer: of the model, whose template conversations are shown in.

    Raises:
        Unusable: its columns hold no text, or the template refuses it.
        MoesaicError: its columns are not known.
    """
    if isinstance(row, str):
        return None
    turns = _turns(row)
    if turns:
        return _answered(turns, _tools(row), tokenizer)
    if isinstance(row, Mapping):
        for schema in SCHEMAS:
            if schema.fits(row):
                return schema.pair(row)
        if any(isinstance(row.get(name), str) for name in PLAIN):
            return None
        for name in (*PLAIN, *TURNS):
            if name in row:
                raise Unusable(f"A row has no text in its column {name}: {shown(dict(row), 120)}")
    formats = "; ".join((*PLAIN, *TURNS, *(" + ".join(schema.needs) for schema in SCHEMAS)))
    columns = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
    raise MoesaicError(
        f"Rows with the columns {columns} are not known; known: {formats}. "
        "Rename the columns, or give the text of each row as text."
    )


def text_of(row: Row, tokenizer: Tokenizer | None = None) -> str:
    """The whole text of a row: its own, a conversation, or prompt and answer.

    Arguments and errors are those of :func:`asked`.
    """
    if isinstance(row, str):
        return checked(row)
    if isinstance(row, Mapping):
        plain = next((row[name] for name in PLAIN if isinstance(row.get(name), str)), None)
        if plain is not None:
            return checked(plain)
    turns = _turns(row)
    if turns:
        return checked(_conversation(turns, _tools(row), tokenizer))
    pair = asked(row)
    assert pair is not None
    return pair.prompt + pair.answer
