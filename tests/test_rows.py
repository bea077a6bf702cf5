"""Rows that hold no text are left out and counted; conversations reach the template as they are."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from moesaic.data.rows import SCHEMAS, asked, text_of
from moesaic.data.text import calibration_tokens, evaluation_tokens
from moesaic.errors import MoesaicError
from moesaic.train.text import PackedText, training_text

WHOLE = {
    "instruction": "Say.", "output": "Yes, I say.", "response": "Yes, I say.", "query": "1 + 1?",
    "question": "Which one?", "choices": ["this", "that"], "problem": "Find x.",
    "solution": "x = 2", "prompt": "Once", "completion": " upon a time",
}  # fmt: skip
EMPTY = {"null": None, "number": 7, "nan": float("nan"), "empty": "", "blank": " \n", "list": ["a"],
         "mapping": {"a": "b"}, "bool": True}  # fmt: skip

HALF = "A \ud83d of a pair"


def whole(schema: Any) -> dict[str, Any]:
    answer = {"answer": 1 if "choices" in schema else "Two."}
    return {name: {**WHOLE, **answer}[name] for name in schema}


def lacking() -> Iterator[tuple[Any, Any]]:
    """A row, and the same row without text in one of its columns."""
    for schema in SCHEMAS:
        row = whole(schema)
        for name in schema:
            if name not in ("choices", "answer") or "choices" not in schema:
                yield from ((row, {**row, name: value}) for value in EMPTY.values())
    mmlu = {"question": "Which one?", "choices": ["this", "that"], "answer": 1}
    wrong = [{"answer": v} for v in (None, True, 2, -1, 1.0, "C", "", ["B"])]
    wrong += [{"choices": v} for v in (None, "ab", 3, ["a", None], {"text": "a", "label": "b"})]
    yield from ((mmlu, {**mmlu, **changed}) for changed in wrong)
    blanks = [value for value in EMPTY.values() if not isinstance(value, str)]
    yield from (({"text": "Words. " * 200}, {"text": value}) for value in [*blanks, HALF])
    first = whole(next(iter(SCHEMAS)))
    yield first, {**first, next(iter(first)): HALF}
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    spoilt: list[Any] = [None, [], "Hi.", 3, [None], ["Hi."], [*talk, {"role": "assistant"}]]
    spoilt += [[talk[0], {**talk[1], "content": value}] for value in (None, 3, {"a": "b"}, HALF)]
    spoilt += [[talk[0], {"role": None, "content": "Yes?"}]]
    yield from (({"messages": talk}, {"messages": value}) for value in spoilt)


def test_a_row_without_text_is_left_out_and_counted(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for right, wrong in lacking():
        for answers in (True, False):
            caplog.clear()
            length = 300 if answers else 8  # of an example, or of a window
            found = training_text([right, wrong, right, wrong], tokenizer, length, answers=answers)
            clean = training_text([right, right], tokenizer, length, answers=answers)
            assert list(found) == list(clean), wrong
            assert "2 of 4 rows are left out" in caplog.text, wrong
            with pytest.raises(MoesaicError, match="none of 1 rows can be used"):
                training_text([wrong], tokenizer, length, answers=answers)


def test_every_use_leaves_them_out(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"problem": f"Find the {n}th x.", "solution": f"It is {n}."} for n in range(40)]
    bad = [{"problem": "None here.", "solution": None}] * 3
    files = {}
    for name, rows in {"both": [*bad, *good], "good": good, "bad": bad}.items():
        files[name] = str(tmp_path / f"{name}.jsonl")
        Path(files[name]).write_text("\n".join(map(json.dumps, rows)))
    uses = {
        "evaluation": lambda file: evaluation_tokens(file, tokenizer, 8).input_ids.tolist(),
        "calibration": lambda file: calibration_tokens(file, tokenizer, 9, 8).input_ids.tolist(),
        "documents": lambda file: sorted(
            calibration_tokens(file, tokenizer, 40, 8, documents=True).input_ids.tolist()
        ),
        "training": lambda file: list(training_text(file, tokenizer, 50, answers=True)),
    }
    for name, use in uses.items():
        caplog.clear()
        assert use(files["both"]) == use(files["good"]), name
        assert "both.jsonl: 3 of 43 rows are left out. The first: A row has no text" in caplog.text
        with pytest.raises(MoesaicError, match="none of 3 rows can be used"):
            use(files["bad"])
    caplog.clear()
    stream = PackedText(files["both"], tokenizer, 50, buffer=1, answers=True)
    assert not caplog.text, "it is said when rows are read to be learned"
    assert all("None" not in tokenizer.decode(e["input_ids"]) for e in islice(stream, 100))
    assert caplog.text.count("3 of 43 rows") == 1, "of the first pass only"
    with pytest.raises(MoesaicError, match="none of 3 rows can be used"):
        PackedText(files["bad"], tokenizer, 8)


def test_an_answer_that_is_cut_off_is_counted(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "word " * 99, "completion": "x"}, {"prompt": "a", "completion": "b"}]
    assert len(training_text(rows, tokenizer, 16, answers=True)) == 1
    assert "1 of 2 rows are left out" in caplog.text


def test_plain_text_that_is_blank_stays_a_line_of_its_text(tokenizer: Any) -> None:
    rows = [{"text": text} for text in ("One line.", "", "Another line.")]
    (ids,) = evaluation_tokens(rows, tokenizer, 12).input_ids[:1]
    assert tokenizer.decode(ids).startswith("One line.\n\n\n\nA")


# --- conversations -------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"default": None}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
CALLING = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Add."},
    {"role": "tool", "name": "add", "content": "2", "tool_call_id": "x"},
    {"role": "assistant", "content": "Two.", "reasoning_content": "So it is 2."},
]
KNOWING = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.content is none %}!{% elif m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '*' }}{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.tool_call_id }}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>(think){% endif %}"
)
NAIVE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ '<' + m.content + '>' }}"
    "{% endfor %}"
)


def talking(tokenizer: Any, template: str) -> Any:
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    return own


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_and_calls_reach_the_template_as_they_are(tools: Any, tokenizer: Any) -> None:
    own = talking(tokenizer, KNOWING)
    row = {"messages": CALLING, "tools": tools}
    want = own.apply_chat_template(CALLING, tools=TOOLS, tokenize=False)
    assert text_of(row, own) == want
    assert '"b": null' in want
    assert "(Add.)" in want
    pair = asked(row, own)
    assert pair is not None
    assert pair.prompt + pair.answer == want
    assert pair.answer == "So it is 2.)Two.</>"
    shared = [{**turn, "tool_calls": turn.get("tool_calls")} for turn in CALLING]
    assert text_of({"messages": shared, "tools": tools}, own) == want, "columns of a table"
    none = [turn for turn in CALLING if "tool_calls" not in turn]
    for absent in (None, [], ""):
        text = own.apply_chat_template(none, tokenize=False)
        assert text_of({"messages": none, "tools": absent}, own) == text


def test_the_prompt_ends_where_the_answer_begins(tokenizer: Any) -> None:
    """Not where the template's prompt, which may hold more than comes back, ends by its length."""
    row = {
        "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes"}]
    }
    pair = asked(row, talking(tokenizer, KNOWING))
    assert pair is not None
    assert (pair.prompt, pair.answer) == ("<user>Hi.</><assistant>", "Yes</>")


def test_parts_of_text_are_a_text(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    picture = [*parts, {"type": "image", "url": "a.png"}]
    answer = {"role": "assistant", "content": "None of these."}

    def row(content: Any) -> Any:
        return {"messages": [{"role": "user", "content": content}, answer]}

    knowing, naive, strict = (talking(tokenizer, t) for t in (KNOWING, NAIVE, STRICT))
    assert text_of(row(picture), knowing).startswith("<user>What is this?*</>")
    shown = text_of(row(parts), naive)
    assert shown == "<user>What is this?</><assistant>None of these.</>"
    assert text_of(row(parts), strict) == "<What is this?><None of these.>"
    assert text_of(row(parts), tokenizer) == "What is this?\n\nNone of these."
    for own in (naive, strict, tokenizer):
        with pytest.raises(MoesaicError, match="parts that are no text"):
            text_of(row(picture), own)


def test_null_content_is_never_the_word_none(tokenizer: Any) -> None:
    shown = text_of({"messages": CALLING}, talking(tokenizer, NAIVE))
    assert shown == "<user>1 + 1?</><assistant></><tool>2</><assistant>Two.</>"
    plain = text_of({"messages": CALLING, "tools": TOOLS}, tokenizer)
    assert "None" not in plain
    assert json.dumps([CALL]) in plain
    assert json.dumps(TOOLS) in plain


def test_a_conversation_that_the_template_refuses_is_left_out(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    said = [("human", "Hi."), ("gpt", "Yes?")]
    good, bad = (
        {"conversations": [{"from": who, "value": words} for who, words in turns]}
        for turns in (said, [said[0], said[0], said[1]])
    )
    for template in (STRICT, STRICT.replace("raise_exception('Roles must alternate')", "1 + 'a'")):
        own = talking(tokenizer, template)
        for answers in (True, False):
            caplog.clear()
            length = 30 if answers else 4
            found = training_text([good, bad, good], own, length, answers=answers)
            assert list(found) == list(training_text([good, good], own, length, answers=answers))
            assert "1 of 3 rows are left out. The first: The chat template refuses" in caplog.text
        with pytest.raises(MoesaicError, match="none of 2 rows can be used. The chat template"):
            calibration_tokens([bad, bad], own, 1, 4)
