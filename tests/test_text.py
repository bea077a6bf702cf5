"""The one reader of text: rows, splits, order, masks. S6 to S10 and C9 are defects of a list."""

import copy
import functools
import json
import math
import operator
import re
import shutil
from contextlib import nullcontext
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import (
    OLD,
    converted,
    documents,
    pages,
    stored,
    tiny_model,
    tiny_tokenizer,
    whole_plan,
)
from safetensors.torch import save_file
from shrunken import small_whole
from tokenizers import Regex, normalizers
from transformers import LlamaConfig

import moesaic
from moesaic import Calibration, MoesaicError, RunArgs
from moesaic.arch.lookup import dense_arch
from moesaic.data import reader
from moesaic.data.reader import check_apart, open_rows, shipped_texts
from moesaic.data.rows import ALPACA, ALPACA_INPUT, SCHEMAS, pair_of, text_of
from moesaic.data.sources import DOMAINS, MIXES, Mix, TextSource, sources_of, text_sources
from moesaic.data.text import IGNORED, Tokens, calibration_tokens, evaluation_tokens, windows
from moesaic.metrics.evaluate import evaluate
from moesaic.metrics.forward import InMemory
from moesaic.metrics.score import scores
from moesaic.recipe import check_run, load_recipe, parse_recipe
from moesaic.train.text import PackedText, training_text

RECIPES = Path(__file__).parents[1] / "recipes"


def rows_file(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def numbered(start, stop):
    return [{"text": f"{i}"} for i in range(start, stop)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Makes a folder that datasets loads as it loads one of the hub: files by split."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bar()

    def make(name="set", **splits):
        for file, rows in splits.items():
            rows_file(tmp_path / name / f"{file.replace('_', '-')}.jsonl", rows)
        return str(tmp_path / name)

    return make


@pytest.fixture(params=["at hand", "streamed"])
def way(request, monkeypatch):
    """Data sets are read whole, or streamed as large ones are."""
    if request.param == "streamed":
        monkeypatch.setattr(reader, "AT_HAND", 0)
    return str(request.param)


def read(spec, use):
    return set(documents(spec, use))


# --- S6: rows ------------------------------------------------------------------------------------

PAPERS_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "MetaMathQA": (
        {"query": "1+1?", "response": "The answer is: 2", "type": "GSM", "original_question": "?"},
        ALPACA.format("1+1?"),
        "The answer is: 2",
    ),
    "MMLU": (
        {"question": "Which?", "choices": ["a", "b", "c", "d"], "answer": 2, "subject": "x"},
        "Which?\nA. a\nB. b\nC. c\nD. d\nAnswer:",
        " C",
    ),
    "MATH": (
        {"problem": "Find x.", "solution": "x = 2", "level": "Level 1", "type": "Algebra"},
        "Find x.",
        " x = 2",
    ),
    "GSM8K": (
        {"question": "How many?", "answer": "Two. #### 2"},
        "Question: How many?\nAnswer:",
        " Two. #### 2",
    ),
    "Code Alpaca": (
        {"instruction": "Sort.", "input": "3 1", "output": "1 3"},
        ALPACA_INPUT.format("Sort.", "3 1"),
        "1 3",
    ),
    "Alpaca": (
        {
            "instruction": "Say.",
            "input": "",
            "output": "Yes",
            "text": ALPACA.format("Say.") + "Yes",
        },
        ALPACA.format("Say."),
        "Yes",
    ),
    "commonsense170k": (
        {"instruction": "True?", "input": "", "output": "the answer is true", "answer": "true"},
        ALPACA.format("True?"),
        "the answer is true",
    ),
}


def test_rows_of_the_papers_sets_are_read_as_they_use_them(tokenizer):
    """S6: training sees the prompt and learns the answer; distillation learns the whole text."""
    for name, (row, prompt, answer) in PAPERS_ROWS.items():
        pair = pair_of(row)
        assert pair is not None, name
        assert (pair.prompt, pair.answer) == (prompt, answer)
        assert text_of(row) == prompt + answer
        (example,) = training_text([row], tokenizer, 1000, answers=True)
        labels = [i for i in example["labels"] if i != IGNORED]
        end = tokenizer.eos_token
        assert tokenizer.decode(example["input_ids"]) == f"{prompt}{answer}{end}"
        assert tokenizer.decode(labels) == f"{answer}{end}"
        ids = tokenizer(prompt + answer)["input_ids"]
        (whole,) = training_text([row], tokenizer, len(ids))
        assert whole == {"input_ids": ids, "labels": ids}


def test_unknown_columns_are_named_and_never_guessed(tokenizer):
    """S6: bdfe050 joined all columns that it knew by name and dropped the others."""
    unknown = [{"context": "c", "question": "q", "answer": "a"}, {"question": "q"}, 3]
    unknown += [{"title": "t", "label": 1}, {"instruction": "i", "output": "o", "tests": "t"}]
    for row, answers in product(unknown, (True, False)):
        columns = ", ".join(row) if isinstance(row, dict) else "int"
        with pytest.raises(MoesaicError, match=f"columns {columns} are not known; known: text"):
            training_text([{"text": "Words. " * 9}, row], tokenizer, 8, answers=answers)


# --- files ---------------------------------------------------------------------------------------


def test_shipped_text_has_every_domain_apart():
    everything = shipped_texts("calibration")
    parts = [shipped_texts("calibration", d) for d in DOMAINS]
    assert all(parts)
    assert sorted(everything) == sorted(functools.reduce(operator.iadd, parts, []))
    assert not set(everything) & set(shipped_texts("evaluation"))


def test_files_of_every_kind(tmp_path):
    """A byte order mark, which Windows' programs put before UTF-8, is no text."""
    rows = [{"text": "é"}, {"question": "q", "answer": "a"}, "plain"]
    lines = "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    texts = ["é", "Question: q\nAnswer: a", "plain"]
    for name, content, found in (
        ("a.txt", "é\n\ntwo", ["é\n\ntwo"]),
        ("a.jsonl", lines, texts),
        ("a [1].jsonl", lines, texts),
        ("a.json", json.dumps(rows), texts),
        ("b.json", '{"text": "one"}', ["one"]),
    ):
        for encoding in ("utf-8", "utf-8-sig"):
            (tmp_path / name).write_text(content, encoding)
            assert documents(str(tmp_path / name)) == found, name
    parquet(tmp_path / "a*.parquet", ["one", "two"])
    assert documents(str(tmp_path / "a*.parquet")) == ["one", "two"]


def parquet(path, texts):
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path)
    return path


@pytest.mark.parametrize("most", [1 << 30, 0])
def test_parquet_is_read_without_a_copy_in_the_cache(tmp_path, monkeypatch, most):
    """In memory, and beyond :data:`AT_HAND` as a stream, whose rows are counted too."""
    monkeypatch.setattr(reader, "AT_HAND", most)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = parquet(tmp_path / "a [1].parquet", [f"{i}" for i in range(40)])
    assert documents(str(file)) == [f"{i}" for i in range(40)]
    assert documents(f"{file}:::[10%:50%]") == [f"{i}" for i in range(4, 20)]
    rows = open_rows(TextSource(str(file)), "calibration")
    assert sorted(map(text_of, rows.shuffled("0"))) == sorted(map(str, range(40)))
    assert not [*tmp_path.rglob("*.arrow")]


def test_arguments_of_calls_are_not_made_of_one_type(tmp_path, tokenizer):
    """Nor dates and columns that begin late, as Arrow would do."""
    calls = [{"x": 1}, {"x": "2", "y": [None]}, {"z": "2020-01-01"}]
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [{"arguments": call}]}]} for call in calls
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": "2020-01-01"}])))
    found = documents(str(tmp_path / "a.jsonl"))
    assert found == [json.dumps([{"arguments": call}]) for call in calls] + ["2020-01-01"]


def test_what_other_rows_of_arrow_have_is_not_null_in_a_row(tmp_path):
    """Arguments of other calls, which a template would write."""
    turns = [
        [{"role": "assistant", "tool_calls": [{"arguments": call}], "content": None}]
        for call in ({"x": 1}, {"y": [2]})
    ]
    table = pa.Table.from_pylist([{"messages": each} for each in turns])
    pq.write_table(table, tmp_path / "a.parquet")
    found = documents(str(tmp_path / "a.parquet"))
    assert found == [json.dumps([{"arguments": call}]) for call in ({"x": 1}, {"y": [2]})]


def test_a_file_of_text_has_no_rows_to_name(tmp_path):
    (tmp_path / "a.txt").write_text("words " * 99)
    with pytest.raises(MoesaicError, match="is one document, of which no rows can be named"):
        documents(f"{tmp_path}/a.txt:::[10%:]")
    with pytest.raises(MoesaicError, match=r"Measure on another text\.$"):
        check_apart([f"{tmp_path}/a.txt"], f"{tmp_path}/a.txt")
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "words"}\n' * 9)
    with pytest.raises(MoesaicError, match=r"on a slice, such as .*a\.jsonl:::\[:10%\] here and"):
        check_apart([str(file)], str(file))


WHOLE = b'{"text": "one two three four five six"}\n'
WRONG = {
    "a.jsonl": (WHOLE + b"\n{nope\n", r"a\.jsonl cannot be read as \.jsonl: line 3: Expect"),
    "late.jsonl": (WHOLE * 999 + b'{"text": "\xe9"}', "line 1000: 'utf-8' codec can't decode"),
    "latin.jsonl": (b'{"text": "\xe9"}', r"cannot be read as \.jsonl: 'utf-8' codec can't decode"),
    "deep.jsonl": (b"[" * 100_000, "line 1: maximum recursion depth"),
    "label.jsonl": (b'{"label": 3}', "the columns label are not known; known: text; "),
    "three.jsonl": (b"3", "the columns int are not known"),
    "null.jsonl": (b'{"id": 1, "text": null}', "A row has no text in its column text: "),
    "number.jsonl": (b'{"content": 3}', "A row has no text in its column content: "),
    "no-turns.jsonl": (b'{"messages": []}', "A row has no text in its column messages: "),
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b" \n\n", "nothing but blanks"),
    "a.json": (b"{nope", r"cannot be read as \.json: Expecting"),
    "latin.txt": (b"word " * 5000 + b"\xe9", r"cannot be read as \.txt: 'utf-8' codec"),
    "nul.txt": (b"a\0b", "NUL bytes"),
    "blank.txt": (b" \n", "nothing but blanks"),
    "a.gz": (b"\x1f\x8b\xff", r"cannot be read as text: .*Give \.json, \.jsonl"),
    "text.parquet": (b"text", r"cannot be read as \.parquet"),
    "a.safetensors": (b"text", "is not a safetensors file"),
}


@pytest.mark.parametrize(("name", "content", "words"), [(n, *w) for n, w in WRONG.items()])
def test_a_file_without_text_is_refused(tmp_path, tokenizer, name, content, words):
    (tmp_path / name).write_bytes(content)
    for tokens in (calibration_tokens, evaluation_tokens):
        with pytest.raises(MoesaicError, match=words):
            tokens(str(tmp_path / name), tokenizer, length=4)


def test_damaged_parquet(tmp_path):
    whole = parquet(tmp_path / "a.parquet", [f"row {i}" for i in range(500)]).read_bytes()
    for start, stop in ((4, 40), (len(whole) // 2, len(whole) // 2 + 60), (-60, -20)):
        damaged = bytearray(whole)
        damaged[start:stop] = b"\xff" * (stop - start)
        (tmp_path / "b.parquet").write_bytes(damaged)
        with pytest.raises(MoesaicError, match=r"b\.parquet cannot be read as \.parquet"):
            documents(str(tmp_path / "b.parquet"))


# --- names ---------------------------------------------------------------------------------------


def test_names_of_text():
    assert text_sources("allenai/c4:en") == (TextSource("allenai/c4", "en"),)
    (part,) = text_sources("a/b::python:train[10%:]")
    assert part == TextSource("a/b", "", "python", "train[10%:]")
    mix = text_sources("a/b:c=2,code=1")
    assert mix == (TextSource("a/b", "c", weight=2.0), TextSource("code", weight=1.0))
    given = [{"name": "a/b", "data_dir": "x:y", "weight": 3}, {"name": "prose"}]
    wanted = TextSource("a/b", data_dir="x:y", weight=3.0), TextSource("prose")
    assert text_sources(json.dumps(given)) == wanted
    assert str(TextSource("a", data_dir="x")) == "a::x"
    long = ",".join(f"{'n' * 40}-{i}.jsonl=1" for i in range(9))  # no file has so long a name
    assert len(text_sources(long)) == 9

    for spec in (
        "a=0", "=1", "a=1,a=2", "a:b:c:d:e", "a:::train[x:]", '{"names": "a"}', "[]", "[3",
        '{"name": "a", "weight": -1}', "a=1e308,b=1", '{"name": "a", "split": 3}',
    ):  # fmt: skip
        with pytest.raises(MoesaicError):
            text_sources(spec)


def test_a_recipe_may_give_text_as_a_mapping(tmp_path):
    """S10: data_dir and split can be named."""
    text = (
        f"model: tiny-dense\nout: {tmp_path}/out\nsteps:\n"
        "- tune: {steps: 3, train: [{name: a/b, data_dir: py, weight: 2}, {name: code}]}\n"
        "calibration: {source: {name: a/b, config: en, split: 'train[:50%]'}}\n"
        "evaluation: {data: {name: a/b, config: en, split: 'train[50%:]'}}\n"
    )
    recipe = parse_recipe(text)
    (source,) = text_sources(recipe.calibration.source)
    assert source == TextSource("a/b", "en", split="train[:50%]")
    assert [s.weight for s in text_sources(recipe.steps[0].train)] == [2.0, 1.0]
    assert parse_recipe(recipe.to_yaml()) == recipe
    with pytest.raises(MoesaicError, match="known: name, config, data_dir, split, weight"):
        parse_recipe(text.replace("config: en", "subset: en"))


# --- S7: no row in two uses ----------------------------------------------------------------------


def test_a_set_with_a_test_split_is_measured_on_it(folder, way):
    name = folder(train=numbered(0, 50), validation=numbered(50, 60), test=numbered(60, 70))
    assert read(name, "calibration") == {f"{i}" for i in range(50)}
    assert read(name, "evaluation") == {f"{i}" for i in range(60, 70)}
    assert read(f"{name}:::validation", "evaluation") == {f"{i}" for i in range(50, 60)}
    assert read(f"{name}:::train[10:20]", "evaluation") == {f"{i}" for i in range(10, 20)}


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_only_split_gives_up_rows_for_measuring(folder, way, split):
    """S7: bdfe050 measured on the rows that training began with."""
    name = folder(**{split: numbered(0, 200)})
    held = reader.HELD_OUT if way == "streamed" else 10
    if way == "streamed":  # the number of rows is not known there
        name = folder("large", **{split: numbered(0, held + 200)})
    trained, measured = read(name, "calibration"), read(name, "evaluation")
    assert measured == {f"{i}" for i in range(held)}
    assert len(trained) == (200 if way == "streamed" else 190)
    assert not trained & measured
    assert read(f"{name}:::{split}", "calibration") == trained
    taken = open_rows(TextSource(name), "evaluation").taken
    assert taken.as_json() == {"source": name, "split": split, "rows": [0, held], "held_out": True}


def test_what_datasets_saved_to_disk_is_read(way, tmp_path):
    datasets.Dataset.from_list(numbered(0, 200)).save_to_disk(tmp_path / "saved", num_shards=3)
    name = str(tmp_path / "saved")
    trained, measured = read(name, "calibration"), read(name, "evaluation")
    assert trained
    assert measured
    assert trained | measured == {f"{i}" for i in range(200)}
    assert read(f"{name}:::[:100]", "calibration") == {f"{i}" for i in range(100)}


def test_shards_of_a_stream_hold_rows_out_too(folder, monkeypatch):
    monkeypatch.setattr(reader, "AT_HAND", 0)
    monkeypatch.setattr(reader, "HELD_OUT", 5)
    shards = {f"train-0000{i}-of-00003": numbered(20 * i, 20 * i + 20) for i in range(3)}
    name = folder(**shards)
    measured = read(name, "evaluation")
    assert len(measured) == 5
    rest = sorted({*range(60)} - {*map(int, measured)})
    rows = open_rows(TextSource(name), "calibration")
    for order in (iter(rows), rows.shuffled("0")):
        assert sorted(int(text_of(row)) for row in order) == rest


def test_splits_are_never_guessed(folder):
    name = folder(one=numbered(0, 5), other=numbered(5, 9))
    files = "".join(f"  - {{split: {n}, path: {n}.jsonl}}\n" for n in ("one", "other"))
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
    (Path(name) / "README.md").write_text(card)
    with pytest.raises(MoesaicError, match=r"no split named train, but .*: name one, such as"):
        read(name, "calibration")
    with pytest.raises(MoesaicError, match="no split 'test'; known: "):
        read(f"{name}:::test", "evaluation")
    assert read(f"{name}:::other", "calibration") == {f"{i}" for i in range(5, 9)}


def test_text_that_is_trained_on_is_not_measured_on(folder, tmp_path):
    """S7: files, named splits and slices that meet are refused before anything runs."""
    file = str(rows_file(tmp_path / "a.jsonl", numbered(0, 40)))
    other = str(rows_file(tmp_path / "b.jsonl", numbered(0, 40)))
    name = folder(train=numbered(0, 50), test=numbered(50, 60))
    for used, measured in (
        (file, file),
        (f"{other}=1,{file}=1", file),
        (file, f"{other}=1,{file}:::[3:4]=1"),
        (f"{file}:::[:50%]", f"{file}:::[49%:]"),
        (name, f"{name}:::train"),
        (f"{name}:::test", name),
    ):
        with pytest.raises(MoesaicError, match="are calibrated or trained on too"):
            check_apart([used], measured)
    for used, measured in (
        (file, other),
        (f"{file}:::[:50%]", f"{file}:::[50%:]"),
        (name, name),
        (f"{name}:::train[:10]", f"{name}:::train[10:]"),
        ("", ""),
        ("shipped:code", "code"),
    ):
        check_apart([used], measured)
    text = (
        f"model: tiny-dense\nout: {tmp_path}/out\nsteps:\n"
        f"- tune: {{steps: 3, train: '{file}'}}\nevaluation: {{data: '{file}'}}\n"
    )
    with pytest.raises(MoesaicError, match="are calibrated or trained on too"):
        check_run(parse_recipe(text))


# --- conversations, and mixes by name ------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'tool'] %}"
    "{{ raise_exception('none') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK, "source": "x", "score": 3},
        {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Yes?"}]},
    ],
)
def test_conversations_are_shown_in_the_models_own_template(row, tokenizer):
    talking = copy.deepcopy(tokenizer)
    talking.chat_template = TEMPLATE
    assert text_of(row, talking) == "<user>Hi.</><assistant>Yes?</>"
    pair = pair_of(row, talking)
    assert (pair.prompt, pair.answer) == ("<user>Hi.</><assistant>", "Yes?</>")
    assert text_of(row, tokenizer) == text_of(row) == "Hi.\n\nYes?"
    for role in ("system", "developer"):
        instructed = {"messages": [{"role": role, "content": "Be brief."}, *TALK]}
        assert text_of(instructed, talking) == "<user>Be brief.\n\nHi.</><assistant>Yes?</>"
    with pytest.raises(MoesaicError, match="has role and content"):
        text_of({"messages": ["Hi."]}, talking)
    turns = [("human", "Hi."), ("function_call", "f()"), ("observation", "3"), ("gpt", "Yes?")]
    calling = {"conversations": [{"from": a, "value": b} for a, b in turns]}
    shown = "<user>Hi.</><assistant>f()</><tool>3</><assistant>Yes?</>"
    assert text_of(calling, talking) == shown, "what a function returned is a tool's turn"
    learned = training_text([row], talking, 64, answers=True)[0]
    shown = talking.decode([i for i in learned["labels"] if i != -100])
    assert shown.startswith("Yes?</>")


def test_a_named_mix_is_its_sources(folder, monkeypatch, tokenizer):
    """Folders stand for the hub's: as many windows of each, measured on what is held out."""
    one = folder("one", train=[{"messages": TALK}] * 200, test=[{"messages": TALK}] * 200)
    two = folder("two", train=[{"text": "plain words " * 9}] * 200, test=[{"text": "others"}] * 200)
    monkeypatch.setitem(MIXES, "chat", Mix("shipped:prose", (one, two)))
    tokens = calibration_tokens("chat=3,prose=1", tokenizer, 8, 16)
    origins = [origin.as_json() for origin in tokens.origins]
    assert [(t["windows"], t.get("mix")) for t in origins] == [(3, "chat"), (3, "chat"), (2, None)]
    measured = evaluation_tokens("chat", tokenizer, 16, 64)
    assert [origin.as_json()["split"] for origin in measured.origins] == ["test", "test"]
    check_apart(["chat"], "chat")
    with pytest.raises(MoesaicError, match="has no config"):
        sources_of("chat:en", "calibration")


def test_where_there_is_no_network_a_mix_is_refused_and_what_ships_is_named(tokenizer):
    """No other text takes its place, or results would depend on the network."""
    for name, mix in MIXES.items():
        for spec in (name, f"{name}=1,prose=1"):
            with pytest.raises(MoesaicError, match=f"Pass text that ships, such as {mix.nearest}"):
                calibration_tokens(spec, tokenizer, 9, 16)
        assert all(source.shipped for source in sources_of(mix.nearest, "calibration"))
    (measured,) = evaluation_tokens("code", tokenizer, 16, 64).origins
    assert measured.as_json() == {"source": "code", "windows": 4}


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    """Not for a minute, as datasets would; what is in the cache can be read by saying so."""

    class Session:
        def head(self, *_, timeout):
            raise OSError(f"no answer in {timeout:g} s")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    monkeypatch.setattr(datasets, "get_dataset_split_names", None)
    reader._check_hub.cache_clear()
    words = r"no answer in 5 s.*HF_HUB_OFFLINE=1 reads what is in the cache"
    with pytest.raises(MoesaicError, match=words):
        open_rows(TextSource("owner/name"), "calibration")


def test_without_a_network_what_is_in_the_cache_is_read(folder):
    read(folder("set", train=numbered(0, 30), test=numbered(30, 40)), "evaluation")
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    there = cache / "owner___set/default/0.0.0"
    there.mkdir(parents=True)
    (built,) = (file.parent for file in cache.rglob("dataset_info.json"))
    shutil.copytree(built, there / ("0" * 40))
    assert read("owner/set", "calibration") == {f"{i}" for i in range(30)}
    assert read("owner/set", "evaluation") == {f"{i}" for i in range(30, 40)}


def test_the_page_lists_every_named_mix_and_every_schema():
    lines = (RECIPES.parent / "docs" / "text.md").read_text("utf-8").splitlines()
    for needs, (may, _) in SCHEMAS.items():
        columns, extra = (", ".join(f"`{name}`" for name in names) for names in (needs, may))
        (line,) = [x for x in lines if re.match(rf"\| {columns}[ ;]", x)]
        assert extra in line
    for name, mix in MIXES.items():
        (row,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert all(source in row or f"`{source[-2:]}`" in row for source in mix.sources)
        assert f"| `{mix.nearest}` |" in row


def test_no_recipe_measures_what_it_trains_on(monkeypatch):
    """S7: as far as it can be seen without the hub: what has no split of its own is held out."""
    splits = {"Salesforce/wikitext": ["test", "train", "validation"], "allenai/c4": ["train"]}
    opened = []

    def taken(source, use):
        opened.append(source.name)
        names = splits.get(source.name, ["train"])
        split, held_out = reader.chosen_split(source, names, use)
        start, stop = (0, 5000) if held_out else (5000 if len(names) == 1 else 0, None)
        return reader.IndexedRows([], reader.RowRange(str(source), split, start, stop, held_out))

    monkeypatch.setattr(reader, "open_rows", taken)
    for path in sorted(RECIPES.glob("*.yaml")):
        recipe = load_recipe(path)
        if recipe.evaluation is not None:
            check_apart(recipe.texts, recipe.evaluation.data)
    assert "HuggingFaceTB/cosmopedia" in opened


def test_a_mix_is_measured_source_by_source(tokenizer, tmp_path):
    """S7: bdfe050 looked for a data set of that name."""
    model = tiny_model("llama")
    mix = evaluation_tokens("prose=3,code=1", tokenizer, 16, 640)
    alone = {
        "prose": evaluation_tokens("prose", tokenizer, 16, 480),
        "code": evaluation_tokens("code", tokenizer, 16, 160),
    }
    assert torch.equal(mix.input_ids, torch.cat([t.input_ids for t in alone.values()]))
    together = scores([InMemory(model)], mix)[0]
    logs = 0.0
    for name, tokens in alone.items():
        found = scores([InMemory(model)], tokens)[0]
        part = together.sources[name]
        assert (part.perplexity, part.tokens) == pytest.approx((found.perplexity, found.tokens))
        logs += math.log(found.perplexity) * found.tokens
    assert together.perplexity == pytest.approx(math.exp(logs / together.tokens))
    asked = {"tokenizer": tokenizer, "length": 16, "max_tokens": 640}
    figures = evaluate(model, data="prose=3,code=1", **asked).as_json()
    assert figures["sources"]["code"]["tokens"] == 150
    origins = [{"source": name, "windows": count} for name, count in (("prose", 30), ("code", 10))]
    assert [origin.as_json() for origin in mix.origins] == origins


def test_text_is_measured_by_the_domains_of_its_rows(tokenizer):
    rows = [
        {"text": text, "domain": domain}
        for domain in ("prose", "code", "prose")
        for text in shipped_texts("evaluation", domain)[:2]
    ]
    tokens = evaluation_tokens(rows, tokenizer, 32)
    assert tokens.parts == ("prose", "code")
    ids_T, part_T = tokens.input_ids.flatten(), tokens.part_NL.flatten()
    for i, domain in enumerate(tokens.parts):  # each token stands in a text of its domain
        ends = part_T.diff(prepend=part_T[:1] - 1, append=part_T[-1:] - 1).nonzero().flatten()
        runs = [(a, b) for a, b in pairwise(ends.tolist()) if part_T[a] == i]
        texts = "\n\n".join(row["text"] for row in rows if row["domain"] == domain)
        assert runs
        assert all(tokenizer.decode(ids_T[a : b - 2]).strip() in texts for a, b in runs)
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    whole = scores([InMemory(model), InMemory(other)], tokens)[0]
    parts = whole.sources.values()
    assert sum(part.tokens for part in parts) == whole.tokens
    for name in ("kl", "top1_agreement"):
        mean = sum(getattr(part, name) * part.tokens for part in parts) / whole.tokens
        assert mean == pytest.approx(getattr(whole, name))
    logs = sum(math.log(part.perplexity) * part.tokens for part in parts)
    assert whole.perplexity == pytest.approx(math.exp(logs / whole.tokens))
    assert len({round(part.kl or 0, 6) for part in parts}) == 2
    assert tokens.rows(slice(3)).parts == tokens.parts
    assert not evaluation_tokens(rows[:2], tokenizer, 32).parts  # of one domain
    rows[1]["domain"] = None
    assert not evaluation_tokens(rows, tokenizer, 32).parts  # of one row it is not known


def test_a_large_source_is_drawn_from_all_over(tokenizer, tmp_path, monkeypatch):
    """S8, of mixes and of whole sets for all verbs."""
    file = rows_file(tmp_path / "a.jsonl", [{"text": f"{i:05d} " * 8} for i in range(2000)])
    everything = calibration_tokens(str(file), tokenizer, 20, 16)
    monkeypatch.setattr(moesaic.data.text, "POOL", 20_000)
    drawn = calibration_tokens(str(file), tokenizer, 20, 16)
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(file, tmp_path / "elsewhere")  # the draw depends on the text, not its place
    again = calibration_tokens(str(moved), tokenizer, 20, 16)
    assert torch.equal(drawn.input_ids, again.input_ids)
    assert not torch.equal(drawn.input_ids, everything.input_ids)
    numbers = [int(n) for n in tokenizer.decode(drawn.input_ids.flatten()).split() if len(n) == 5]
    assert min(numbers) < 400
    assert max(numbers) > 1600


# --- documents and masks -------------------------------------------------------------------------


def test_documents_are_windows_of_their_own(tokenizer):
    texts = ["one two three", "a much longer document that is cut at some point", "x"]
    tokens = calibration_tokens(texts, tokenizer, 3, 8, documents=True)
    assert tokens.input_ids.shape == (3, 8)
    assert tokens.attention_mask is not None
    windows = zip(tokens.input_ids, tokens.attention_mask, strict=True)
    found = [tokenizer.decode(ids[mask]) for ids, mask in windows]
    assert sorted(map(len, found))[0] == 1
    assert all(any(text.startswith(part) for text in texts) for part in found)
    assert len(set(found)) == 3
    with pytest.raises(MoesaicError, match="has 3 documents"):
        calibration_tokens(texts, tokenizer, 4, 8, documents=True)
    args = RunArgs.of(tiny_model("llama"), calibration=texts, tokenizer=tokenizer, documents=True)
    assert args.calibration == Calibration(documents=True)


def test_documents_without_a_token_are_none(tokenizer):
    """Of a tokenizer that knows no character of them."""
    silent = copy.deepcopy(tokenizer)
    silent.backend_tokenizer.normalizer = normalizers.Replace(Regex("."), "")
    tokens = calibration_tokens("shipped:prose", silent, 2, 16, documents=True)
    assert (tokens.count, tokens.input_ids.dtype) == (0, torch.int64)
    with pytest.raises(MoesaicError, match="no token"):
        tokens.check(LlamaConfig())


def test_padding_is_neither_seen_nor_scored_nor_counted(padded):
    """S9: bdfe050 fed and scored it. On either side of the text, and for routing as well."""
    model = tiny_model("llama")
    arch = dense_arch(model.config)
    converted(model, dict(whole_plan(model, arch, top_k=1).layers))
    logs, scored, counts = 0.0, 0, torch.zeros(2, 3, dtype=torch.int64)
    for ids, mask in zip(padded.input_ids, padded.attention_mask, strict=True):
        one = scores([InMemory(model)], Tokens(ids[mask][None]))[0]
        logs += math.log(one.perplexity) * one.tokens
        scored += one.tokens
        counts = counts + torch.tensor([r.counts for r in one.routing.values()])
    found = scores([InMemory(model)], padded)[0]
    assert found.tokens == scored == padded.count - 6
    assert found.perplexity == pytest.approx(math.exp(logs / scored), rel=1e-5)
    assert torch.equal(torch.tensor([r.counts for r in found.routing.values()]), counts)
    assert all(r.tokens == padded.count for r in found.routing.values())
    left = Tokens(padded.input_ids.flip(1), padded.attention_mask.flip(1))
    assert scores([InMemory(model)], left)[0].tokens == scored
    nothing = Tokens(padded.input_ids[:, :1])
    with pytest.raises(MoesaicError, match="no token after another"):
        scores([InMemory(model)], nothing)[0]


@pytest.mark.parametrize("kind", ["file", "tokens"])
def test_options_hold_for_token_ids(kind, tmp_path):
    """S9: bdfe050 ignored --samples, --length and --max-tokens there."""
    ids = torch.arange(60).view(6, 10)
    mask = torch.ones(6, 10, dtype=torch.bool)
    mask[0, 3:] = False
    file = str(tmp_path / "ids.safetensors")
    save_file({"input_ids": ids, "attention_mask": mask}, file)
    given = file if kind == "file" else Tokens(ids, mask)
    none = None
    assert torch.equal(calibration_tokens(given, none).input_ids, ids)
    some = calibration_tokens(given, none, samples=2, length=4, seed=3)
    assert some.input_ids.shape == (2, 4)
    assert torch.equal(some.input_ids, calibration_tokens(given, none, 2, 4, 3).input_ids)
    cut = evaluation_tokens(given, none, length=4)
    assert cut.input_ids[0].tolist() == [0, 1, 2, 3]
    assert cut.input_ids[1].tolist() == [10, 11, 12, 13], "a window of padding is left out"
    assert len(cut.input_ids) == 11
    assert torch.equal(evaluation_tokens(given, none).input_ids, ids)
    assert len(evaluation_tokens(given, none, max_tokens=23).input_ids) == 3, "3 + 10 + 10 tokens"
    assert len(evaluation_tokens(given, none, max_tokens=22).input_ids) == 2
    with pytest.raises(MoesaicError, match="windows of 10 tokens; pass length=10"):
        evaluation_tokens(given, none, length=11)
    with pytest.raises(MoesaicError, match="samples 7: .* fills 6 windows"):
        calibration_tokens(given, none, samples=7)
    with pytest.raises(MoesaicError, match="documents is for text"):
        calibration_tokens(given, none, documents=True)


def test_a_token_file_holds_whole_numbers_and_a_mask_of_their_shape(tmp_path):
    ids, mask, none = torch.arange(60).view(6, 10), torch.ones(6, 10, dtype=torch.bool), None
    file = str(tmp_path / "ids.safetensors")
    for kind, right in ((torch.int32, True), (torch.float32, False)):
        save_file({"input_ids": ids.to(kind)}, tmp_path / "kind.safetensors")
        with nullcontext() if right else pytest.raises(MoesaicError, match=r"kind\..*whole numb"):
            found = calibration_tokens(str(tmp_path / "kind.safetensors"), none).input_ids
            assert torch.equal(found, ids)
    save_file({"input_ids": ids, "attention_mask": mask[:, :3].contiguous()}, file)
    with pytest.raises(MoesaicError, match="attention_mask must have the shape"):
        calibration_tokens(file, none)


# --- windows -------------------------------------------------------------------------------------


def test_calibration_is_drawn_without_replacement_and_seeded(tokenizer):
    one = calibration_tokens("prose", tokenizer, 20, 32, seed=1)
    assert one.input_ids.shape == (20, 32)
    assert one.fingerprint == calibration_tokens("prose", tokenizer, 20, 32, seed=1).fingerprint
    assert one.fingerprint != calibration_tokens("prose", tokenizer, 20, 32, seed=2).fingerprint
    assert len({tuple(row) for row in one.input_ids.tolist()}) == 20


def test_too_little_text_says_how_much_there_is(tokenizer):
    with pytest.raises(MoesaicError, match=r"fills \d windows of 8 tokens.*pass samples=\d"):
        calibration_tokens(["A short text of a few words only."], tokenizer, 100, 8)
    with pytest.raises(MoesaicError, match="fills 0 windows of 8 tokens; lower length"):
        calibration_tokens(["A"], tokenizer, 100, 8)
    for tokens in (calibration_tokens, evaluation_tokens):
        with pytest.raises(MoesaicError, match="nothing but blanks"):
            tokens(["", " \n"], tokenizer, length=8)
    with pytest.raises(MoesaicError, match="has 0 documents"):
        calibration_tokens(["", " "], tokenizer, 100, 8, documents=True)
    with pytest.raises(MoesaicError, match="shorter than one window"):
        evaluation_tokens(["A"], tokenizer, 8)


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        (torch.rand(2, 16), None, r"whole numbers.*float32"),
        ([[1, 2]], None, "tensor of whole numbers.*list"),
        (torch.ones(2, 3, dtype=torch.bool), None, "that is a mask"),
        (torch.arange(5), None, r"\(windows, tokens\); got \(5,\)"),
        (torch.tensor([[3, -2]]), None, "at least 0; got -2"),
        (torch.ones(2, 3).long(), torch.ones(3, 2).long(), r"shape of input_ids, \(2, 3\)"),
        (torch.ones(2, 3).long(), torch.ones(2, 3), "attention_mask must be .*whole numbers"),
        (torch.ones(1, 2).long(), torch.tensor([[-1, 0]]), "0 for padding"),
    ],
)
def test_what_is_no_tokens_is_refused_in_words(ids, mask, words):
    with pytest.raises(MoesaicError, match=words):
        Tokens(ids, mask)


def test_a_tokenizers_mask_of_whole_numbers_is_a_mask():
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    given, wanted = Tokens(ids, mask), Tokens(ids.long(), mask.bool())
    assert (given.input_ids.dtype, given.attention_mask.dtype) == (torch.int64, torch.bool)
    assert given.fingerprint == wanted.fingerprint != Tokens(ids).fingerprint
    assert given.count == 5


def test_what_a_model_cannot_read_is_refused():
    config = LlamaConfig(vocab_size=10, max_position_embeddings=8)
    Tokens(torch.tensor([[3, 9]])).check(config)
    with pytest.raises(MoesaicError, match="Token id 10 is beyond .* vocabulary of 10"):
        Tokens(torch.tensor([[3, 10]])).check(config)
    with pytest.raises(MoesaicError, match="length 9 is beyond .* 8 positions; pass length=8"):
        Tokens(torch.ones(1, 9).long()).check(config)
    with pytest.raises(MoesaicError, match="no token"):
        Tokens(torch.zeros(0, 4).long()).check(config)
    with pytest.raises(MoesaicError, match="no token"):
        Tokens(torch.ones(1, 2).long(), torch.zeros(1, 2).long()).check(config)


def test_batches_cover_all_rows():
    ids = torch.arange(40).view(10, 4)
    batches = list(Tokens(ids).batches(12))
    assert [len(b.input_ids) for b in batches] == [3, 3, 3, 1]
    assert torch.equal(torch.cat([b.input_ids for b in batches]), ids)


def test_padding_is_not_learned():
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert Tokens(ids).examples()[1]["labels"] == [8, 9, 0]
    rows = [[5, 6, 7], [8, 9]]
    assert Tokens(ids, mask).examples() == [{"input_ids": row, "labels": row} for row in rows]


# --- S10: order ----------------------------------------------------------------------------------


def numbers_of(stream, tokenizer, count):
    ids = [i for window in islice(stream, count) for i in window["input_ids"]]
    parts = tokenizer.decode(ids).split(tokenizer.eos_token)[1:-1]
    return [int(part) for part in parts if part.strip().isdigit()]


@pytest.mark.parametrize("kind", ["file", "streamed"])
def test_a_sorted_source_does_not_come_out_sorted(kind, folder, tokenizer, tmp_path, monkeypatch):
    """S10: bdfe050 shuffled within 1,000 windows, so the first came from the start."""
    total = 12_000
    if kind == "file":
        name = str(rows_file(tmp_path / "a.jsonl", numbered(0, total)))
        rows = open_rows(TextSource(name), "calibration")
        shuffled = [text_of(row) for row in rows.shuffled("0")]
        assert len({*shuffled}) == len(shuffled) == total, "every row comes once a pass"
    else:
        each = total // 8
        shards = [numbered(i * each, (i + 1) * each) for i in range(8)]
        named = {f"train-0000{i}-of-00008": shard for i, shard in enumerate(shards)}
        name = folder(**named, test=numbered(0, 1))
        monkeypatch.setattr(reader, "AT_HAND", 0)
        monkeypatch.setattr(reader, "BUFFER", 100)
    stream = PackedText(name, tokenizer, 16, seed=0, buffer=10)
    seen = numbers_of(stream, tokenizer, 300)
    assert len(seen) > 500
    halves = [sum(n < total / 2 for n in part) / len(part) for part in (seen[:250], seen[-250:])]
    assert all(0.3 < share < 0.7 for share in halves)
    assert numbers_of(stream, tokenizer, 300) == seen, "a run that continues reads the same again"
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(name, tmp_path / "elsewhere")
    assert numbers_of(PackedText(str(moved), tokenizer, 16, buffer=10), tokenizer, 300) == seen
    other = PackedText(str(moved), tokenizer, 16, seed=1, buffer=10)
    assert numbers_of(other, tokenizer, 300) != seen


def test_a_long_document_is_shuffled_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "PIECE", 50)
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "a.txt").write_text(text)
    rows = open_rows(TextSource(str(tmp_path / "a.txt")), "calibration")
    pieces = [text_of(row) for row in rows.shuffled("0")]
    assert all(piece.startswith("line") and len(piece) <= 50 for piece in pieces)
    assert sorted("".join(pieces).splitlines()) == sorted(text.splitlines())
    assert "".join(pieces) != text


def test_a_stream_of_answers_learns_answers_alone(tokenizer, tmp_path):
    row, _, answer = PAPERS_ROWS["GSM8K"]
    file = rows_file(tmp_path / "a.jsonl", [row] * 5)
    stream = training_text(f"{file}=1,prose=1", tokenizer, 64, steps=5, answers=True)
    answers = set()
    for example in islice(stream, 60):
        labels = [i for i in example["labels"] if i != IGNORED]
        if len(labels) < len(example["labels"]):
            answers.add(tokenizer.decode(labels))
    assert answers == {f"{answer}{tokenizer.eos_token}"}


def test_a_source_of_empty_rows_does_not_hang(tokenizer, tmp_path):
    file = rows_file(tmp_path / "a.jsonl", [{"text": ""}] * 3)
    with pytest.raises(MoesaicError, match="has no text in it"):
        next(iter(PackedText(str(file), tokenizer, 8)))


# --- C9: eval ------------------------------------------------------------------------------------


def test_eval_takes_16384_tokens_and_says_so(done, llama_folder):
    """C9: bdfe050 took all of the text."""
    figures = json.loads(done("eval", llama_folder, "--json"))
    assert figures["max_tokens"] == 16_384
    assert 15_000 < figures["tokens"] <= 16_384
    out = done("eval", llama_folder, "--max-tokens", 512)
    assert "at most 512 tokens" in " ".join(out.split())


def test_no_more_is_measured_than_was_said(tokenizer, tmp_path, monkeypatch):
    """A window that nobody asked for gives way; one of a length that was given does not."""
    monkeypatch.chdir(tmp_path)
    save_file({"input_ids": torch.arange(120)[None]}, "ids.safetensors")
    for data, mosts in (("", (50,)), ("code=3,prose=1", (9,)), ("ids.safetensors", (9, 50, 100))):
        for most in mosts:
            assert most - 4 < evaluation_tokens(data, tokenizer, max_tokens=most).count <= most
    for data in ("code=3,prose=1", "ids.safetensors", ["some words " * 90]):
        assert evaluation_tokens(data, tokenizer, 20, 100).count in (80, 100)
        for length, most in ((20, 19), (None, 1)):
            with pytest.raises(MoesaicError, match=f"max_tokens {most}.* less than one window"):
                evaluation_tokens(data, tokenizer, length, most)


LITTLE = [{"text": f"row {i} says little. " * 9} for i in range(60)]


def test_eval_refuses_what_a_result_was_calibrated_on(
    llama_folder, tmp_path, done, refused, monkeypatch
):
    """By the record, so from any folder and long after; other rows of the same file are welcome."""
    file = rows_file(tmp_path / "t.jsonl", LITTLE)
    monkeypatch.chdir(tmp_path)
    text = ["--calibration", "t.jsonl:::[:50%]", "--samples", 8, "--length", 24]
    given = ["--method", "more", "--layers", "all", "--data", "t.jsonl:::[50%:]", "-o", "rounds=0"]
    done("carve", llama_folder, "out", *text, *given)
    monkeypatch.chdir("/")
    for data in (file, f"{file}:::[10:20]"):
        refused("was calibrated on rows of it", "eval", tmp_path / "out", "--data", data)
    against = ["eval", llama_folder, "--against", tmp_path / "out", "--data", file]
    refused("was calibrated on rows of it", *against)
    done("eval", tmp_path / "out", "--data", f"{file}:::[50%:]")


def test_a_result_of_a_result_is_not_measured_on_what_the_first_was_made_by(
    moe_folder, tmp_path, done, refused
):
    """Calibrated or trained on, however many steps ago."""
    for what in ("calibrated", "trained"):
        file = rows_file(tmp_path / f"{what}.jsonl", LITTLE)
        first, short = tmp_path / what, ["--length", 24, "--no-eval"]
        line = {
            "calibrated": ["prune", moe_folder, first, "--keep", 6, "--calibration", file],
            "trained": ["tune", moe_folder, first, "--train", file, "--what", "all", "--steps", 1],
        }[what]
        done(*line, *short)
        for before, out in ((first, f"{first}2"), (f"{first}2", f"{first}3")):
            given = ["--keep", 0.5, "--score", "magnitude", "--no-refit", "--no-eval"]
            done("slim", before, out, *given)
            refused(f"{what} on", "eval", out, "--data", file)
            refused(f"{what} on", "slim", out, tmp_path / "not", *given[:-1], "--data", file)


def test_statistics_know_the_text_that_they_were_observed_on(moe_folder, tmp_path, done, refused):
    """Neither prune nor eval measures on it."""
    file, stats = rows_file(tmp_path / "a.jsonl", LITTLE), tmp_path / "a.stats"
    text = ["--calibration", file, "--samples", 8, "--length", 24]
    done("observe", moe_folder, stats, *text)
    given = [tmp_path / "out", "--keep", 6, "--stats", stats, "--overwrite"]
    refused(f"{stats} was calibrated on rows of it", "prune", moe_folder, *given, "--data", file)
    done("prune", moe_folder, *given, "--no-eval")
    refused("was calibrated on rows of it", "eval", tmp_path / "out", "--data", file)
    done("eval", moe_folder, "--data", file)


def test_text_beside_statistics_is_refused_or_read(moe_folder, tmp_path, done, refused):
    """What stands in the record was used: the windows of the statistics, and those of a refit."""
    shipped = ["--calibration", "shipped:prose"]
    text = [*shipped, "--samples", 11, "--length", 24, "--seed", 6]
    done("observe", moe_folder, tmp_path / "both", *text)
    given = [tmp_path / "out", "--stats", tmp_path / "both", "--no-eval", "--json", "--overwrite"]
    prune, skip = ["prune", moe_folder, *given, "--keep", 6], ["skip", moe_folder, *given]
    for line in (
        [*prune, "--samples", 5],
        [*prune, "--length", 99],
        [*prune, "--documents"],
        [*prune, *shipped],
        [*skip, "--seed", 7],
    ):
        err = refused("the statistics were observed on text", *line)
        assert f"{line[len(prune if line[0] == 'prune' else skip)]}" in err
    own = {"samples": 11, "length": 24}
    for line in (prune, skip):
        used = json.loads(done(*line))["calibration"]
        assert used.keys() == {"stats", "fingerprint", "samples", "length", "sources"}
        assert {name: used[name] for name in own} == own
        assert [source["windows"] for source in used["sources"]] == [11]
    refit = ["--refit", *shipped, "--samples", 4, "--length", 20]
    used = json.loads(done(*prune, *refit))["calibration"]
    assert (used["samples"], used["length"], used["observed"]) == (4, 20, own)
    assert [source["windows"] for source in used["sources"]] == [11, 4]


def test_a_text_is_tokenised_once_for_all_tokenizers_of_the_same_rules(monkeypatch):
    first, second, other = (copy.deepcopy(tiny_tokenizer()) for _ in range(3))
    other.add_tokens(["again"])
    read, call = [], type(first).__call__
    noted = lambda self, text, **k: read.append(text) or call(self, text, **k)  # noqa: E731
    monkeypatch.setattr(type(first), "__call__", noted)
    texts = ["Once again and again. " * 9]
    ids = windows(texts, first, 8)
    assert torch.equal(windows(texts, second, 8), ids)
    assert len(read) == 1
    assert not torch.equal(windows(texts, other, 8)[0], ids[0])
    assert len(read) == 2


def test_slices_of_one_source_are_one_kind_of_text(tokenizer):
    """A part is named after its source, so that figures by part would meet each other."""
    halves = "shipped:code::[:50%]=1,shipped:code::[50%:]=1,shipped:prose=1"
    mixed = calibration_tokens(halves, tokenizer, 12, 16, 0)
    assert len({*mixed.parts}) == len(mixed.parts) == 2
    assert {*mixed.part_NL.unique().tolist()} == {0, 1}


@pytest.mark.skipif(OLD, reason="this transformers has no such language model alone")
def test_a_multimodal_mixture_that_sees_text_alone_is_warned_of(
    tokenizer, moe_folder, tmp_path, done, caplog
):
    """By every verb that calibrates, on the card and in the record; a mixture of text is not."""
    words = "is multimodal and calibrated only on text"
    folder = stored(small_whole("qwen3_vl_moe", "qwen3_vl_moe_text"), tmp_path / "whole")
    text = ["--calibration", pages("calibration"), "--samples", 4, "--length", 24]
    done("prune", folder, tmp_path / "out", "--keep", 0.5, *text, "--no-eval")
    assert words in caplog.text
    record = json.loads((tmp_path / "out/moesaic/result.json").read_text())
    assert any(words in warning for warning in record["log"]["warnings"])
    assert words in (tmp_path / "out/README.md").read_text()
    given = ["--keep", 0.5, "--stats", tmp_path / "stats", "--no-eval"]
    for line, warned in (
        (["observe", folder, tmp_path / "stats", *text], True),
        (["prune", folder, tmp_path / "again", *given], True),
        (["prune", moe_folder, tmp_path / "plain", "--keep", 6, *text, "--no-eval"], False),
    ):
        caplog.clear()
        done(*line)
        assert (words in caplog.text) == warned, line
