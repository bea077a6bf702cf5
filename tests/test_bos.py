"""Where a tokenizer begins text with BOS all windows do, wherever they are for."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import documents, pages, tiny_model
from tokenizers import processors

import moesaic
from moesaic.data.reader import shipped_texts
from moesaic.data.rows import PromptAnswer
from moesaic.data.text import (
    IGNORED,
    Tokens,
    beginning,
    calibration_tokens,
    evaluation_tokens,
    joined,
    process_share,
    windows,
)
from moesaic.errors import MoesaicError
from moesaic.metrics.measurement import _prompt
from moesaic.metrics.score import score
from moesaic.report.frontier import points
from moesaic.train.text import PackedText, answered, training_text

BOS = 0
"""The token ``<|endoftext|>`` of the tests' tokenizer."""


def beginning_with(tokenizer: Any, ids: Sequence[int]) -> Any:
    """The same tokenizer, which puts these before any text."""
    begun = copy.deepcopy(tokenizer)
    names = tokenizer.convert_ids_to_tokens(ids)
    begun.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*names, "$A"]), special_tokens=list(zip(names, ids, strict=True))
    )
    return begun


@pytest.fixture
def begun(tokenizer: Any) -> Any:
    return beginning_with(tokenizer, [BOS])


def test_what_a_tokenizer_does_counts_and_not_what_it_says(tokenizer: Any, begun: Any) -> None:
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
def test_all_windows_begin_with_bos_and_are_no_longer(
    begin: list[int], tokenizer: Any, tmp_path: Path
) -> None:
    begun, length, p = beginning_with(tokenizer, begin), 12, len(begin)
    every = {
        "eval": evaluation_tokens("prose", begun, length, 120),
        "mix": evaluation_tokens("prose=1,shipped:code=1", begun, length, 240),
        "calibration": calibration_tokens("prose", begun, 9, length),
        "documents": calibration_tokens("prose", begun, 9, length, documents=True),
        "two": joined([evaluation_tokens(d, begun, length, 120) for d in ("prose", "reference")]),
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


def test_bos_is_not_scored_and_the_token_behind_it_is(begun: Any) -> None:
    model = tiny_model("llama")
    tokens = evaluation_tokens("prose", begun, 16, 160)
    with torch.no_grad():
        log_p = model(tokens.input_ids).logits[:, :-1].log_softmax(-1)
    losses = -log_p.gather(2, tokens.input_ids[:, 1:, None])
    found = score(model, tokens)
    assert found.tokens == losses.numel() == 150
    assert found.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert found.as_json()["bos"] is True
    given = score(model, Tokens(tokens.input_ids))  # of ids nobody knows what they begin with
    assert (given.perplexity, given.bos) == (found.perplexity, False)
    assert "bos" not in given.as_json()
    two = Tokens(tokens.input_ids, begun=2)
    assert score(model, two).tokens == 140


def test_what_ships_has_no_bos(tokenizer: Any) -> None:
    from moesaic.io.source import resolve

    for name in ("tiny-dense", "tiny-moe", "tiny-shared-moe"):
        own = resolve(name).tokenizer
        assert own.bos_token is not None, "it says that there is one"
        assert beginning(own) == []
    assert evaluation_tokens("prose", tokenizer, 16, 160).begun == 0


def test_a_bos_that_a_template_wrote_is_not_doubled(tokenizer: Any, begun: Any) -> None:
    talk = [
        {"messages": [{"role": "user", "content": f"What is {n}? A number."}]} for n in range(9)
    ]
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
    ids = evaluation_tokens(long, begun, 4).input_ids
    assert not ((ids[:, 0] == BOS) & (ids[:, 1] == BOS)).any()


def test_domains_are_those_of_the_text_behind_bos(tokenizer: Any, begun: Any) -> None:
    rows = [
        {"text": text, "domain": domain}
        for domain in ("prose", "code")
        for text in shipped_texts("evaluation", domain)[:2]
    ]
    plain, tokens = (evaluation_tokens(rows, each, n) for each, n in ((tokenizer, 15), (begun, 16)))
    assert torch.equal(tokens.input_ids[:, 1:], plain.input_ids)
    assert plain.part_NL is not None
    assert tokens.part_NL is not None
    assert torch.equal(tokens.part_NL[:, 1:], plain.part_NL)


def test_records_say_so_and_nothing_is_compared_across(
    moe_folder: Path, begun: Any, tmp_path: Path, command: Any
) -> None:
    folder = tmp_path / "begun"
    shutil.copytree(moe_folder, folder)
    begun.save_pretrained(folder)
    records = {}
    for name, model in (("plain", moe_folder), ("begun", folder)):
        text = ["--calibration", pages("calibration"), "--samples", 4, "--length", 24]
        measured = ["--data", pages("evaluation"), "--max-tokens", 200]
        measured += ["-o", "rounds=0", "-o", "new_tokens=2"]
        code, _, err = command(
            "prune", model, tmp_path / f"out-{name}", "--keep", 6, *text, *measured
        )
        assert code == 0, err
        record = json.loads((tmp_path / f"out-{name}/moesaic/result.json").read_text())
        has = name == "begun" or None
        assert record["calibration"].get("bos") is has
        assert record["evaluation"].get("bos") is has
        assert record["scores"]["result"].get("bos") is has
        records[name] = moesaic.record.Record.from_json(record)
    code, _, err = command("observe", folder, tmp_path / "stats", *text)
    assert code == 0, err
    assert len(points([*records.values()])) == 2, "two pictures: the text is not the same"
    given = ["--stats", tmp_path / "stats", "--no-eval", "--json"]
    code, printed, err = command("prune", folder, tmp_path / "out", "--keep", 6, *given)
    assert code == 0, err
    assert json.loads(printed)["calibration"]["bos"] is True


def test_prompts_begin_with_it_too(begun: Any, tmp_path: Path) -> None:
    class Source:
        tokenizer, config = begun, tiny_model("llama").config

    assert _prompt({"model": Source()}, 16)[0, 0] == BOS  # type: ignore[dict-item]
    HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
    lm = HFLM(pretrained=tiny_model("llama"), tokenizer=begun, backend="causal")
    before, _ = lm._encode_pair("Question: Why?\nAnswer:", " So")
    assert before[0] == BOS
    assert before.count(BOS) == 1
