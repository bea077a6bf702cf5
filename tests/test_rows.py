"""Rows of text: those without text are left out, conversations, and windows that begin with BOS."""

import copy
import json
import math
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
from builders import documents, pages, tiny_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import moesaic
from moesaic.data.reader import shipped_texts
from moesaic.data.rows import SCHEMAS, PromptAnswer, RowError, pair_of, text_of
from moesaic.data.text import (
    IGNORED,
    Tokens,
    beginning,
    calibration_tokens,
    concat,
    evaluation_tokens,
    process_share,
    windows,
)
from moesaic.errors import MoesaicError
from moesaic.metrics.forward import InMemory
from moesaic.metrics.measurement import _prompt
from moesaic.metrics.score import scores
from moesaic.report.frontier import points
from moesaic.train.text import PackedText, answered, training_text

WHOLE = {
    "instruction": "Say.", "output": "Yes, I say.", "response": "Yes, I say.", "query": "1 + 1?",
    "question": "Which one?", "choices": ["this", "that"], "problem": "Find x.",
    "solution": "x = 2", "prompt": "Once", "completion": " upon a time",
}  # fmt: skip
EMPTY = {"null": None, "number": 7, "nan": float("nan"), "empty": "", "blank": " \n", "list": ["a"],
         "mapping": {"a": "b"}, "bool": True}  # fmt: skip

HALF = "A \ud83d of a pair"


def whole(schema):
    answer = {"answer": 1 if "choices" in schema else "Two."}
    return {name: {**WHOLE, **answer}[name] for name in schema}


def lacking():
    """A row, and the same row without text in one of its columns."""
    for schema in SCHEMAS:
        row = whole(schema)
        for name in schema:
            if name not in ("choices", "answer") or "choices" not in schema:
                yield from ((row, {**row, name: value}) for value in EMPTY.values())
    mmlu = {"question": "Which one?", "choices": ["this", "that"], "answer": 1}
    wrong = [{"answer": v} for v in (None, True, 2, -1, 1.0, "C", "AB", "", ["B"])]
    wrong += [{"choices": v} for v in (None, "ab", 3, ["a", None], {"text": "a", "label": "b"})]
    yield from ((mmlu, {**mmlu, **changed}) for changed in wrong)
    blanks = [value for value in EMPTY.values() if not isinstance(value, str)]
    yield from (({"text": "Words. " * 200}, {"text": value}) for value in [*blanks, HALF])
    first = whole(next(iter(SCHEMAS)))
    yield first, {**first, next(iter(first)): HALF}
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    spoilt = [None, [], "Hi.", 3, [None], ["Hi."], [*talk, {"role": "assistant"}]]
    spoilt += [[talk[0], {**talk[1], "content": value}] for value in (None, 3, {"a": "b"}, HALF)]
    spoilt += [[talk[0], {"role": None, "content": "Yes?"}]]
    yield from (({"messages": talk}, {"messages": value}) for value in spoilt)
    yield from (({"text": "Words. " * 200}, value) for value in [None])


def test_a_row_without_text_is_left_out_and_counted(tokenizer, caplog):
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


def test_every_use_leaves_them_out(tokenizer, tmp_path, caplog):
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


def test_an_answer_that_is_cut_off_is_counted(tokenizer, caplog):
    rows = [{"prompt": "word " * 99, "completion": "x"}, {"prompt": "a", "completion": "b"}]
    assert len(training_text(rows, tokenizer, 16, answers=True)) == 1
    assert "1 of 2 rows are left out" in caplog.text


def test_plain_text_that_is_blank_stays_a_line_of_its_text(tokenizer):
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


def talking(tokenizer, template):
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    return own


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_and_calls_reach_the_template_as_they_are(tools, tokenizer):
    own = talking(tokenizer, KNOWING)
    row = {"messages": CALLING, "tools": tools}
    want = own.apply_chat_template(CALLING, tools=TOOLS, tokenize=False)
    assert text_of(row, own) == want
    assert '"b": null' in want
    assert "(Add.)" in want
    pair = pair_of(row, own)
    assert pair.prompt + pair.answer == want
    assert pair.answer == "So it is 2.)Two.</>"
    shared = [{**turn, "tool_calls": turn.get("tool_calls")} for turn in CALLING]
    assert text_of({"messages": shared, "tools": tools}, own) == want, "columns of a table"
    none = [turn for turn in CALLING if "tool_calls" not in turn]
    for absent in (None, [], ""):
        text = own.apply_chat_template(none, tokenize=False)
        assert text_of({"messages": none, "tools": absent}, own) == text


def test_the_prompt_ends_where_the_answer_begins(tokenizer):
    """Not where the template's prompt, which may hold more than comes back, ends by its length."""
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes"}]
    row = {"messages": turns}
    pair = pair_of(row, talking(tokenizer, KNOWING))
    assert (pair.prompt, pair.answer) == ("<user>Hi.</><assistant>", "Yes</>")


def test_only_what_the_model_answers_is_learned(tokenizer):
    """Not a user's turn that nothing answers; nor is a template's end of text, or BOS, doubled."""
    end = "<|endoftext|>"
    own = talking(
        tokenizer,
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}"
        "<|endoftext|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    )
    user, model = ({"role": r, "content": f"by {r}"} for r in ("user", "assistant"))
    pair = pair_of({"messages": [user, model, user]}, own)
    assert pair.answer == f"by assistant{end}\n"
    ids = answered(pair, own, 99)["input_ids"]
    assert ids == own(pair.prompt + pair.answer)["input_ids"], "and no second end"
    for turns in ([user], [{"role": "system", "content": "Be kind."}, user, user]):
        with pytest.raises(RowError, match="has no answer"):
            pair_of({"messages": turns}, own)
    one = talking(beginning_with(tokenizer, [BOS]), end + "{{ messages[0].content }}")
    example = answered(pair_of({"messages": [model]}, one), one, 99, [BOS])
    assert example["input_ids"][:2].count(BOS) == 1
    assert example["labels"][0] == IGNORED


SPACED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
    "[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Mixtral's template."""


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scheme", ["prepend", "always", "first", "never"])
def test_an_answer_has_the_tokens_of_the_whole_text(scheme, fast, monkeypatch):
    """As Llama-2's tokenizers, which put a space before any text, have them in the template."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if scheme == "prepend":
        before = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        raw.normalizer = normalizers.Sequence(before)
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    texts = shipped_texts("calibration", "prose")[:9]
    special = ["<unk>", "<s>", "</s>"]
    options = {"special_tokens": special, "show_progress": False, "max_token_length": 8}
    raw.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, **options))
    of_special = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    own = PreTrainedTokenizerFast(tokenizer_object=raw, **of_special)
    own.chat_template = SPACED
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "the sea"}]
    whole = own.apply_chat_template(turns, return_dict=False)
    if not fast:
        monkeypatch.setattr(type(own), "is_fast", False)
    example = answered(pair_of({"messages": turns}, own), own, 99)
    assert example["input_ids"] == whole
    learned = [label for label in example["labels"] if label != IGNORED]
    assert whole[-len(learned) :] == learned
    spelt = "".join(own.convert_ids_to_tokens(learned)).replace("▁", " ")
    assert spelt.strip() == "the sea</s>"
    plain = answered(PromptAnswer("Question: What? Answer:", " the sea"), own, 99)
    text = "Question: What? Answer: the sea</s>"
    assert plain["input_ids"] == own(text, add_special_tokens=False)["input_ids"]


def test_parts_of_text_are_a_text(tokenizer):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    picture = [*parts, {"type": "image", "url": "a.png"}]
    answer = {"role": "assistant", "content": "None of these."}

    def row(content):
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


def test_null_content_is_never_the_word_none(tokenizer):
    shown = text_of({"messages": CALLING}, talking(tokenizer, NAIVE))
    assert shown == "<user>1 + 1?</><assistant></><tool>2</><assistant>Two.</>"
    plain = text_of({"messages": CALLING, "tools": TOOLS}, tokenizer)
    assert "None" not in plain
    assert json.dumps([CALL]) in plain
    assert json.dumps(TOOLS) in plain


def test_a_conversation_that_the_template_refuses_is_left_out(tokenizer, caplog):
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


BOS = 0
"""The token ``<|endoftext|>`` of the tests' tokenizer."""


def beginning_with(tokenizer, ids):
    """The same tokenizer, which puts these before any text."""
    begun = copy.deepcopy(tokenizer)
    names = tokenizer.convert_ids_to_tokens(ids)
    begun.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*names, "$A"]), special_tokens=list(zip(names, ids, strict=True))
    )
    return begun


@pytest.fixture
def begun(tokenizer):
    return beginning_with(tokenizer, [BOS])


def test_what_a_tokenizer_does_counts_and_not_what_it_says(tokenizer, begun):
    said = copy.deepcopy(tokenizer)
    said.add_bos_token, said.bos_token = True, "<|endoftext|>"
    assert (beginning(said), beginning(begun)) == ([], [BOS])
    assert beginning(beginning_with(tokenizer, [BOS, 5])) == [BOS, 5]
    ended = copy.deepcopy(tokenizer)
    ended.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", BOS)]
    )
    assert beginning(ended) == []


@pytest.mark.parametrize("begin", [[BOS], [BOS, 5]])
def test_all_windows_begin_with_bos_and_are_no_longer(begin, tokenizer, tmp_path):
    begun, length, p = beginning_with(tokenizer, begin), 12, len(begin)
    every = {
        "eval": evaluation_tokens("prose", begun, length, 120),
        "mix": evaluation_tokens("prose=1,shipped:code=1", begun, length, 240),
        "calibration": calibration_tokens("prose", begun, 9, length),
        "documents": calibration_tokens("prose", begun, 9, length, documents=True),
        "two": concat([evaluation_tokens(d, begun, length, 120) for d in ("prose", "reference")]),
        "shared": process_share(calibration_tokens("prose", begun, 9, length), 1, 2, length)[0],
        "batch": next(evaluation_tokens("prose", begun, length, 120).batches(24)),
    }
    for name, tokens in every.items():
        assert tokens.input_ids.shape[1] == length, name
        assert (tokens.input_ids[:, :p] == torch.tensor(begin)).all(), name
        assert tokens.begun == p, name
        assert (tokens.labels[:, :p] == IGNORED).all(), name
        assert torch.equal(tokens.labels[:, p:], tokens.input_ids[:, p:]), name
        assert (tokens.input_ids[:, p] != BOS).all(), name
    plain = tokenizer("\n\n".join(documents("prose", "evaluation")))["input_ids"]
    text = every["eval"].input_ids[:, p:].flatten().tolist()
    assert text == plain[: len(text)], "nothing of the text is left out between windows"
    for examples in (
        training_text("prose", begun, length),
        islice(PackedText("prose=1,reference=1", begun, length), 20),
    ):
        for example in examples:
            assert len(example["input_ids"]) == length
            assert example["input_ids"][:p] == begin
            assert example["labels"] == [IGNORED] * p + example["input_ids"][p:]
    pair = PromptAnswer("Why?", " So.")
    ids = [tokenizer(text)["input_ids"] for text in (pair.prompt, pair.answer)]
    example = answered(pair, begun, 99, beginning(begun))
    assert example["input_ids"] == [*begin, *ids[0], *ids[1], tokenizer.eos_token_id]
    assert example["labels"] == [IGNORED] * (p + len(ids[0])) + [*ids[1], tokenizer.eos_token_id]
    for draw in (evaluation_tokens, windows):
        with pytest.raises(MoesaicError, match=f"length {p}: "):
            draw(["some text"], begun, p)
    with pytest.raises(MoesaicError, match=f"length {p} "):
        PackedText("prose", begun, p)


def test_bos_is_not_scored_and_the_token_after_it_is(begun):
    model = tiny_model("llama")
    tokens = evaluation_tokens("prose", begun, 16, 160)
    with torch.no_grad():
        log_p = model(tokens.input_ids).logits[:, :-1].log_softmax(-1)
    losses = -log_p.gather(2, tokens.input_ids[:, 1:, None])
    found = scores([InMemory(model)], tokens)[0]
    assert found.tokens == losses.numel() == 150
    assert found.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert found.as_json()["bos"] is True
    ids = Tokens(tokens.input_ids)  # of ids nobody knows what they begin with
    (given,) = scores([InMemory(model)], ids)
    assert (given.perplexity, given.bos) == (found.perplexity, False)
    assert "bos" not in given.as_json()
    two = Tokens(tokens.input_ids, begun=2)
    assert scores([InMemory(model)], two)[0].tokens == 140


def test_what_ships_has_no_bos(tokenizer):
    from moesaic.io.source import resolve

    for name in ("tiny-dense", "tiny-moe", "tiny-shared-moe"):
        own = resolve(name).tokenizer
        assert own.bos_token is not None, "it says that there is one"
        assert beginning(own) == []
    assert evaluation_tokens("prose", tokenizer, 16, 160).begun == 0


def test_a_bos_that_a_template_wrote_is_not_doubled(tokenizer, begun, tmp_path):
    asked = (f"What is {n}? A number." for n in range(9))
    talk = [{"messages": [{"role": "user", "content": content}]} for content in asked]
    for one in (tokenizer, begun):
        one = copy.deepcopy(one)
        one.chat_template = "<|endoftext|>{% for m in messages %}{{ m.content }}{% endfor %}"
        for tokens in (
            evaluation_tokens(talk[:1], one, 4),
            calibration_tokens(talk, one, 9, 8, documents=True),
        ):
            assert (tokens.input_ids[:1, 0] == BOS).all()
            assert (tokens.input_ids[:, 1] != BOS).all()
        each = calibration_tokens(talk, one, 9, 8, documents=True).input_ids
        assert (each[:, 0] == BOS).all(), "a tokenizer that adds none keeps the template's"
        pair = PromptAnswer("<|endoftext|>Why?", " So.")
        example = answered(pair, one, 99, beginning(one))
        assert example["input_ids"].count(BOS) == 2, "at both ends"
    long = [{"text": "<|endoftext|>".join(["a b c d e f g h"] * 40)}]
    (tmp_path / "long.jsonl").write_text(json.dumps(long[0]))
    packed = islice(PackedText(str(tmp_path / "long.jsonl"), begun, 5), 40)
    for ids in (
        evaluation_tokens(long, begun, 5).input_ids,
        torch.tensor([example["input_ids"] for example in packed]),
    ):
        assert not ((ids[:, 0] == BOS) & (ids[:, 1] == BOS)).any()


def test_domains_are_those_of_the_text_after_bos(tokenizer, begun):
    rows = [
        {"text": text, "domain": domain}
        for domain in ("prose", "code")
        for text in shipped_texts("evaluation", domain)[:2]
    ]
    plain, tokens = (evaluation_tokens(rows, each, n) for each, n in ((tokenizer, 15), (begun, 16)))
    assert torch.equal(tokens.input_ids[:, 1:], plain.input_ids)
    assert plain.part_NL is not None
    assert torch.equal(tokens.part_NL[:, 1:], plain.part_NL)


def test_records_say_so_and_nothing_is_compared_across(moe_folder, begun, tmp_path, done):
    folder = tmp_path / "begun"
    shutil.copytree(moe_folder, folder)
    begun.save_pretrained(folder)
    records = {}
    for name, model in (("plain", moe_folder), ("begun", folder)):
        text = ["--calibration", pages("calibration"), "--samples", 4, "--length", 24]
        measured = ["--data", pages("evaluation"), "--max-tokens", 200]
        measured += ["-o", "rounds=0", "-o", "new_tokens=2"]
        done("prune", model, tmp_path / f"out-{name}", "--keep", 6, *text, *measured)
        record = json.loads((tmp_path / f"out-{name}/moesaic/result.json").read_text())
        has = name == "begun" or None
        assert record["calibration"].get("bos") is has
        assert record["evaluation"].get("bos") is has
        assert record["scores"]["result"].get("bos") is has
        records[name] = moesaic.record.Record.from_json(record)
    done("observe", folder, tmp_path / "stats", *text)
    assert len(points([*records.values()])) == 2, "two pictures: the text is not the same"
    given = ["--stats", tmp_path / "stats", "--no-eval", "--json"]
    printed = done("prune", folder, tmp_path / "out", "--keep", 6, *given)
    assert json.loads(printed)["calibration"]["bos"] is True


def test_prompts_begin_with_it_too(begun, tmp_path):
    class Source:
        tokenizer, config = begun, tiny_model("llama").config

    assert _prompt({"model": Source()}, 16)[0, 0] == BOS
    HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
    lm = HFLM(pretrained=tiny_model("llama"), tokenizer=begun, backend="causal")
    before, _ = lm._encode_pair("Question: Why?\nAnswer:", " So")
    assert before[0] == BOS
    assert before.count(BOS) == 1
