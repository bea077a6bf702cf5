"""The type that a checkpoint is computed in, on processors with and without products of its own."""

import copy
import json
import logging
from functools import partial

import pytest
import torch
from builders import examples, pages, tiny_moe, weights
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import moesaic
from moesaic import Calibration, Evaluation, MoesaicError, Recipe, SlimConfig, TuneConfig
from moesaic.io import models
from moesaic.io.models import multiplies_natively, working_type
from moesaic.pipeline import run_recipe
from moesaic.sizes import estimate

QUICK = {"calibration": pages("calibration"), "samples": 12, "length": 32}
CONFIG = SlimConfig(keep=0.5, score="surgeon", refit=True, multiple=1)


@pytest.fixture
def without_products(monkeypatch):
    """A processor that cannot multiply matrices of bfloat16."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    models._warn_widened.cache_clear()


@pytest.fixture
def with_products(monkeypatch):
    """A processor that has them."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)


@pytest.fixture
def folder(moe_folder, tmp_path):
    """A mixture in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(moe_folder).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow")
    for file in moe_folder.glob("token*"):
        (tmp_path / "narrow" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "narrow"


def test_float32_stands_in_only_where_nothing_was_asked(without_products):
    narrow, wide = (PretrainedConfig(dtype=t) for t in (torch.bfloat16, torch.float32))
    assert working_type(narrow) == torch.float32
    assert working_type(narrow, torch.bfloat16) == torch.bfloat16
    assert working_type(narrow, device="cuda") is None
    assert working_type(wide) is None
    assert multiplies_natively(torch.float32, "cpu")


def test_the_own_type_is_kept_where_the_processor_has_it(with_products):
    assert working_type(PretrainedConfig(dtype=torch.bfloat16)) is None


def test_a_mixture_in_float64_is_computed_in_float32_and_stays_one(folder, tmp_path):
    """torch multiplies no experts in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    model.save_pretrained(folder)
    assert moesaic.evaluate(str(folder), length=16, max_tokens=64, progress=False).tokens == 60
    out = moesaic.prune(str(folder), keep=6, **QUICK).save_pretrained(tmp_path / "out")
    assert AutoConfig.from_pretrained(out).dtype is torch.float64


def test_torch_without_onednn_has_none(with_products, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not multiplies_natively(torch.bfloat16, "cpu")
    assert multiplies_natively(torch.float32, "cpu")


def test_a_result_is_that_of_float32_rounded(folder, tmp_path, without_products):
    ours = moesaic.slim(str(folder), CONFIG, **QUICK)
    ours.save(tmp_path / "ours")
    wide = moesaic.slim(str(folder), CONFIG, dtype=torch.float32, **QUICK)
    wide.save(tmp_path / "wide")
    got, want = weights(tmp_path / "ours"), weights(tmp_path / "wide")
    assert {t.dtype for t in got.values()} == {torch.bfloat16}
    assert {t.dtype for t in want.values()} == {torch.float32}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name].to(torch.bfloat16)) for name in got)
    moesaic.apply(str(folder), tmp_path / "ours", tmp_path / "again")
    again = weights(tmp_path / "again")
    assert all(torch.equal(got[name], again[name]) for name in got)


def test_it_is_measured_in_float32_and_said_once(
    folder, tmp_path, without_products, capsys, monkeypatch
):
    monkeypatch.setattr(logging.root, "handlers", [])
    text = Evaluation(pages("evaluation"), length=32, max_tokens=256, rounds=1, new_tokens=2)
    asked = Recipe(
        model=str(folder),
        out=str(tmp_path / "out"),
        steps=(SlimConfig(keep=0.5, multiple=1),),
        calibration=Calibration(QUICK["calibration"], 12, 32),
        evaluation=text,
    )
    record = run_recipe(asked)
    (said,) = record.log["warnings"]
    assert "cannot multiply matrices of bfloat16" in said
    assert record.log["of_speed"] == [said]
    assert capsys.readouterr().err.count(said) == 1
    kept = json.loads((tmp_path / "out" / "moesaic/result.json").read_text("utf-8"))
    assert kept["evaluation"]["computed_in"] == "float32"
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "in windows of 32, computed in float32." in card
    options = {"max_tokens": 256, "length": 32, "data": pages("evaluation")}
    for name, model in (("original", folder), ("result", tmp_path / "out")):
        score = moesaic.evaluate(str(model), dtype=torch.float32, **options)
        assert kept["scores"][name]["perplexity"] == score.perplexity
        narrow = moesaic.evaluate(str(model), dtype=torch.bfloat16, **options)
        assert narrow.perplexity != score.perplexity


def test_what_was_begun_in_one_type_is_not_continued_in_another(folder, tmp_path, monkeypatch):
    """As on another machine."""
    asked = {"resume_from": tmp_path / "work", **QUICK}
    supported = partial(monkeypatch.setattr, torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    supported(lambda: True)
    moesaic.slim(str(folder), CONFIG, **asked)
    supported(lambda: False)
    with pytest.raises(MoesaicError, match="computed_in"):
        moesaic.slim(str(folder), CONFIG, **asked)


def test_training_is_that_of_float32(without_products):
    """Two steps over the same values, which are rounded at the end."""
    narrow = tiny_moe("mixtral").to(torch.bfloat16)
    wide = copy.deepcopy(narrow).float()
    config = TuneConfig(what="routers", teacher="given", steps=2, lr=1e-2)
    options = {"text": examples(8), "teacher": tiny_moe("mixtral")}
    results = [moesaic.tune(model, config, **options) for model in (narrow, wide)]
    ours, want = (result.summary["training"]["losses"] for result in results)
    assert [step["loss"] for step in ours] == [step["loss"] for step in want]
    got, exact = (result.model.state_dict() for result in results)
    assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
    assert all(torch.equal(got[name], exact[name].to(torch.bfloat16)) for name in got)


def test_what_stands_in_takes_more_memory(monkeypatch):
    asked = Recipe(
        model="tiny-moe", out="out", steps=(SlimConfig(keep=0.5),), evaluation=Evaluation()
    )
    sizes = []
    for there in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", partial(bool, there))
        sizes.append(estimate(asked))
    assert sizes[0].output_bytes == sizes[1].output_bytes
    assert sizes[0].peak_memory_bytes < sizes[1].peak_memory_bytes
