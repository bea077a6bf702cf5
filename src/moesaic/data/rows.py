"""Rows to text: the columns that are known, and how a model is shown them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moesaic.errors import MoesaicError, shown
from moesaic.foreign import Tokenizer, Values

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


@dataclass(frozen=True)
class PromptAnswer:
    """A prompt and its answer; one after the other they are the whole text."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Schema:
    """Columns that belong together."""

    data_sets: str
    """The data sets that have them."""
    needs: tuple[str, ...]
    may: tuple[str, ...]
    """Columns that it reads, or that say again what others say."""
    read: Callable[[Values], PromptAnswer]

    def fits(self, row: Values) -> bool:
        """All columns are there, and none that is not known."""
        columns = {*self.needs, *self.may, *ASIDE, *PLAIN}
        return row.keys() >= set(self.needs) and row.keys() <= columns


def _alpaca(instruction: str, context: str, answer: str) -> PromptAnswer:
    instruction, context = instruction.strip(), context.strip()
    if context:
        return PromptAnswer(ALPACA_INPUT.format(instruction, context), answer)
    return PromptAnswer(ALPACA.format(instruction), answer)


def _choices(row: Values) -> PromptAnswer:
    choices, right = row["choices"], row["answer"]
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]
    if isinstance(right, str):
        right = letters.find(right.strip().upper()) if right.strip() else -1
    if not 0 <= right < len(choices):
        raise MoesaicError(f"An answer {row['answer']!r} is none of {len(choices)} choices.")
    listed = "".join(f"\n{a}. {choice}" for a, choice in zip(letters, choices, strict=True))
    return PromptAnswer(f"{row['question'].strip()}{listed}\nAnswer:", f" {letters[right]}")


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
    Schema("MMLU", ("question", "choices", "answer"), (), _choices),
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


def _turns(row: Row) -> list[dict[str, str]] | None:
    """A row's conversation by ``role`` and ``content``; None where it has none.

    Raises:
        MoesaicError: its turns are of no form that is known.
    """
    if not isinstance(row, Mapping):
        return None
    turns = next((row[name] for name in TURNS if isinstance(row.get(name), Sequence)), None)
    if turns is None:
        return None
    conversation = []
    for turn in turns:
        fields = turn if isinstance(turn, Mapping) else {}
        role = fields.get("role", fields.get("from"))
        content = fields.get("content", fields.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise MoesaicError(
                "A conversation's turn has role and content, or from and value; got "
                f"{shown(turn, 70)}."
            )
        conversation.append({"role": ROLES.get(role, role), "content": content})
    return conversation


def _conversation(
    turns: Sequence[Mapping[str, str]], tokenizer: Tokenizer | None, prompt: bool = False
) -> str:
    """A conversation as the model is shown it: in the tokenizer's own template if it has one.

    Args:
        turns: ``role`` and ``content``.
        tokenizer: of the model.
        prompt: the model's answer follows.
    """
    if getattr(tokenizer, "chat_template", None) is None or tokenizer is None:
        return "\n\n".join(turn["content"] for turn in turns) + ("\n\n" if prompt else "")

    from jinja2 import TemplateError

    from moesaic.data.templates import rendered

    try:
        return rendered(tokenizer, turns, add_generation_prompt=prompt)
    except TemplateError:  # some know no system's turns: what it says begins the first other one
        system = [turn["content"] for turn in turns if turn["role"] == "system"]
        first, *others = [turn for turn in turns if turn["role"] != "system"] or turns
        content = "\n\n".join([*system, first["content"]])
        merged = [{**first, "content": content}, *others]
        try:
            return rendered(tokenizer, merged, add_generation_prompt=prompt)
        except TemplateError as error:
            raise MoesaicError(f"The chat template refuses a conversation: {error}") from error


def _answered(turns: Sequence[Mapping[str, str]], tokenizer: Tokenizer | None) -> PromptAnswer:
    """What comes before the last turn, and that turn."""
    text = _conversation(turns, tokenizer)
    prompt = _conversation(turns[:-1], tokenizer, prompt=True) if len(turns) > 1 else ""
    pairs = enumerate(zip(prompt, text, strict=False))
    end = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(text)))
    return PromptAnswer(text[:end], text[end:])


def asked(row: Row, tokenizer: Tokenizer | None = None) -> PromptAnswer | None:
    """The prompt and the answer of a row; None for plain text.

    Args:
        row: a text, or columns.
        tokenizer: of the model, whose template conversations are shown in.

    Raises:
        MoesaicError: its columns are not known, or hold no text.
    """
    if isinstance(row, str):
        return None
    turns = _turns(row)
    if turns:
        return _answered(turns, tokenizer)
    if isinstance(row, Mapping):
        for schema in SCHEMAS:
            if schema.fits(row):
                try:
                    return schema.read(row)
                except (AttributeError, TypeError, KeyError) as error:
                    raise MoesaicError(
                        f"A row with the columns of {schema.data_sets} does not hold text in them: "
                        f"{shown(dict(row), 120)}"
                    ) from error
        if any(isinstance(row.get(name), str) for name in PLAIN):
            return None
        for name in (*PLAIN, *TURNS):
            if name in row:
                raise MoesaicError(
                    f"A row has no text in its column {name}: {shown(dict(row), 120)}"
                )
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
        return row
    if isinstance(row, Mapping):
        plain = next((row[name] for name in PLAIN if isinstance(row.get(name), str)), None)
        if plain is not None:
            return plain
    turns = _turns(row)
    if turns:
        return _conversation(turns, tokenizer)
    pair = asked(row)
    assert pair is not None
    return pair.prompt + pair.answer
