"""Text to windows: every source, no special tokens, a fingerprint, clear refusals."""

import functools
import json
import operator

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import documents
from safetensors.torch import save_file
from transformers import LlamaConfig

from moesaic.data import reader
from moesaic.data.reader import open_rows, shipped_texts
from moesaic.data.rows import text_of
from moesaic.data.sources import DOMAINS, TextSource
from moesaic.data.text import (
    Tokens,
    calibration_tokens,
    evaluation_tokens,
    windows,
)
from moesaic.errors import MoesaicError


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


@pytest.mark.parametrize("name", ["none.txt", "/no/such.jsonl", "./nothing"])
def test_missing_file(name):
    with pytest.raises(MoesaicError, match="No text file"):
        documents(name)


def test_windows_are_the_text_and_nothing_else(tokenizer):
    texts = ["Fellow citizens, it is done.", "And so on."]
    ids = windows(texts, tokenizer, 4)
    assert (
        tokenizer.decode(ids.flatten())
        == "\n\n".join(texts)[: len(tokenizer.decode(ids.flatten()))]
    )
    assert tokenizer.eos_token_id not in ids


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


def test_tokenised_file_is_used_as_it_is(tmp_path, tokenizer):
    ids = torch.arange(12).view(3, 4)
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    assert torch.equal(calibration_tokens(str(tmp_path / "ids.safetensors"), None).input_ids, ids)
    save_file({"input_ids": ids.int()}, tmp_path / "narrow.safetensors")
    assert torch.equal(
        calibration_tokens(str(tmp_path / "narrow.safetensors"), None).input_ids, ids
    )
    save_file({"input_ids": ids.float()}, tmp_path / "bad.safetensors")
    with pytest.raises(MoesaicError, match=r"bad\.safetensors: input_ids must be .*whole numbers"):
        calibration_tokens(str(tmp_path / "bad.safetensors"), None)


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
    assert given.fingerprint == wanted.fingerprint
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


def test_fingerprint_sees_the_mask():
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert Tokens(ids).fingerprint != Tokens(ids, torch.ones(2, 3, dtype=torch.bool)).fingerprint


def test_batches_cover_all_rows():
    ids = torch.arange(40).view(10, 4)
    batches = list(Tokens(ids).batches(12))
    assert [len(b.input_ids) for b in batches] == [3, 3, 3, 1]
    assert torch.equal(torch.cat([b.input_ids for b in batches]), ids)


def test_padding_is_not_learned():
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert Tokens(ids).examples()[1]["labels"] == [8, 9, 0]
    padded = Tokens(ids, mask).examples()
    assert [e["input_ids"] for e in padded] == [[5, 6, 7], [8, 9]]
    assert [e["labels"] for e in padded] == [[5, 6, 7], [8, 9]]
