"""Text to windows: every source, no special tokens, a fingerprint, clear refusals."""

import functools
import json
import operator

import pytest
import torch
from builders import documents
from safetensors.torch import save_file
from transformers import LlamaConfig

from moesaic.data.reader import shipped_texts
from moesaic.data.rows import ALPACA
from moesaic.data.text import (
    Tokens,
    calibration_tokens,
    evaluation_tokens,
    windows,
)
from moesaic.data.text_source import DOMAINS
from moesaic.errors import MoesaicError


def test_shipped_text_has_every_domain_apart():
    everything = shipped_texts("calibration")
    parts = [shipped_texts("calibration", d) for d in DOMAINS]
    assert all(parts)
    assert sorted(everything) == sorted(functools.reduce(operator.iadd, parts, []))
    assert not set(everything) & set(shipped_texts("evaluation"))


def test_files_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"question": "q", "answer": "a"}\n')
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "i", "output": "o"}, "plain"]))
    assert documents(str(tmp_path / "a.txt")) == ["one\n\ntwo"]
    assert documents(str(tmp_path / "a.jsonl")) == [
        "one",
        "Question: q\nAnswer: a",
    ]
    assert documents(str(tmp_path / "a.json")) == [
        f"{ALPACA.format('i')}o",
        "plain",
    ]


def test_parquet(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(tmp_path / "a.parquet")
    assert documents(str(tmp_path / "a.parquet")) == ["one", "two"]
    damaged = bytearray((tmp_path / "a.parquet").read_bytes())
    damaged[4:40] = b"\xff" * 36
    (tmp_path / "b.parquet").write_bytes(damaged)
    with pytest.raises(MoesaicError, match=r"b\.parquet cannot be read as \.parquet"):
        documents(str(tmp_path / "b.parquet"))


@pytest.mark.parametrize("name", ["none.txt", "/no/such.jsonl", "./nothing"])
def test_missing_file(name):
    with pytest.raises(MoesaicError, match="No text file"):
        documents(name)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", "é"), ("a.json", '[{"text": "é"}]'), ("a.jsonl", '{"text": "é"}')],
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, content):
    """Windows' programs put one before UTF-8."""
    (tmp_path / name).write_text(content, "utf-8-sig")
    assert documents(str(tmp_path / name)) == ["é"]


def test_broken_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "whole"}\n\n{nope\n')
    with pytest.raises(MoesaicError, match=r"a\.jsonl cannot be read as \.jsonl: line 3: Expect"):
        documents(str(tmp_path / "a.jsonl"))


def test_row_without_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"label": 3}\n')
    with pytest.raises(MoesaicError, match="the columns label are not known; known: text; "):
        documents(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(("column", "value"), [("text", None), ("content", 3), ("messages", [])])
def test_a_known_column_without_text_is_not_said_to_be_unknown(tmp_path, column, value):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 1, column: value}))
    with pytest.raises(MoesaicError, match=f"A row has no text in its column {column}: "):
        documents(str(tmp_path / "a.jsonl"))


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
    with pytest.raises(MoesaicError, match="length 8: .* shorter than one window; lower it"):
        calibration_tokens(["A"], tokenizer, 100, 8)
    for tokens in (calibration_tokens, evaluation_tokens):
        with pytest.raises(MoesaicError, match="nothing but blanks"):
            tokens(["", " \n"], tokenizer, length=8)
    with pytest.raises(MoesaicError, match="documents: .* has none"):
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
