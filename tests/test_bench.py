"""Speed beside another model: ratios, the ideal, plain words."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moesaic.exports.llamacpp import SCRIPT, find_converter
from moesaic.io.source import resolve
from moesaic.metrics.measurement import _prompt
from moesaic.metrics.speed import Speed, Timing, against, environment, interleaved, peak_memory
from moesaic.report.contents import speed_words

CPU = Path("/proc/cpuinfo")


def speed(prefill, decode):
    return Speed(Timing(prefill), Timing(decode), Timing((1.0,)))


def test_ratios_are_those_of_the_medians_and_spreads_of_the_rounds():
    ours = speed((200.0, 110.0, 90.0), (10.0, 10.0, 10.0))
    theirs = speed((100.0, 100.0, 100.0), (8.0, 10.0, 20.0))
    found = against(ours, theirs, ideal=1.25)
    assert found["prefill"]["ratio"] == pytest.approx(1.1)
    assert found["prefill"]["share"] == pytest.approx(0.88)
    of_decode = {"ratio": 1.0, "spread": [0.5, 1.25], "rounds": 3, "ideal": 1.25, "share": 0.8}
    assert found["decode"] == of_decode


def test_models_take_turns():
    turns = []

    def runner(name):
        def run(prompt, new_tokens):
            turns.append(name)
            return prompt.shape[1] / 2, new_tokens / 4

        return run

    runners = {name: runner(name) for name in "ab"}
    speeds = interleaved(runners, torch.zeros(1, 8, dtype=torch.int64), new_tokens=4, rounds=2)
    assert "".join(turns) == "baabba"
    assert speeds["b"].prefill.values == (2.0, 2.0)
    assert speeds["b"].decode.values == (4.0, 4.0)


def test_what_is_slower_is_called_slower():
    found = {"ratio": 0.9, "spread": [0.8, 0.95], "ideal": 1.5, "share": 0.6, "rounds": 5}
    (said,) = speed_words({"decode": found})
    assert said.startswith("Decode: 0.90× (0.80× to 0.95×), slower than the other.")
    assert "60" in said
    for unsure in ([0.8, 1.1], [0.9, 0.9]):
        (said,) = speed_words({"prefill": {**found, "spread": unsure}})
        assert "no clear difference." in said


def test_bench_on_the_command_line(done, carved_folder, llama_folder):
    options = ("--rounds", 1, "--length", 16, "--new-tokens", 2)
    out = done("bench", carved_folder, "--against", llama_folder, *options, "--json")
    record = json.loads(out)
    checkpoint = resolve(str(carved_folder)).checkpoint
    assert record["file_bytes"] == checkpoint.nbytes()
    theirs, ours = record["against"]["active_parameters"], record["active_parameters"]
    for what in ("prefill", "decode"):
        assert record["ratio"][what]["ideal"] == pytest.approx(theirs / ours)
        assert record["ratio"][what]["share"] > 0
    for side in (record, record["against"]):
        assert side["prefill_tokens_per_second"] > 0
        assert side["decode_tokens_per_second"] > 0
        assert side["peak_memory_bytes"] > 0
    low, high = record["first_token_spread"]
    assert low <= record["first_token_seconds"] <= high


def test_memory_is_that_of_a_fresh_process(carved_folder):
    assert peak_memory(carved_folder, 16, 2, "cpu", None) > 50e6


def test_every_model_knows_the_tokens_that_it_is_timed_on(llama_folder):
    first = resolve(str(llama_folder))
    small = SimpleNamespace(config=SimpleNamespace(vocab_size=7))
    assert _prompt({"model": first}, 64).max() >= 7
    assert _prompt({"model": first, "against": small}, 64).max() < 7


def test_a_model_without_a_tokenizer_is_timed_too(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*token*"))
    prompt = _prompt({"model": resolve(str(tmp_path / "model"))}, 64)
    assert prompt.shape == (1, 64)
    assert len(prompt.unique()) > 16


def test_a_tilde_is_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / SCRIPT).touch()
    for place in ("~", f"~/{SCRIPT}"):
        monkeypatch.setenv("LLAMA_CPP", place)
        assert find_converter() == tmp_path / SCRIPT


def test_a_processor_is_named_as_the_system_names_it():
    listed = CPU.read_text() if CPU.is_file() else ""
    if "model name" not in listed:
        pytest.skip("this system lists no processor by its name")
    assert f": {environment()['processor']}\n" in listed
