"""Estimates: a result's shape and bytes are exact before a weight is read."""

import platform
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from builders import loaded, pages, python, tiny_moe
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moesaic import Calibration, Evaluation, MoesaicError, sizes
from moesaic.io.checkpoint import TYPES, _header_bytes, align
from moesaic.io.models import sizes_in, working_type
from moesaic.io.source import resolve
from moesaic.metrics.score import model_size
from moesaic.pipeline import run_recipe
from moesaic.recipe import Recipe, step_config
from moesaic.sizes import Skeleton, estimate, on_headers, weight_bytes
from moesaic.types import release_memory

CASES: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    ("moe_folder", [("slim", {"keep": 0.5, "shared": 0.5, "refit": True})]),
    ("moe_folder", [("slim", {"keep": 0.5, "allocate": "experts"})]),
    ("llama_folder", [("slim", {"keep": 0.5})]),
    ("tiny-moe", [("condense", {"count": 1, "keep": "shared+routed"})]),
    ("tiny-moe", [("condense", {"memory": 9_000_000, "keep": "nothing"})]),
    ("llama_folder", [("carve", {"method": "more", "variant": "static", "refit": True})]),
    (
        "llama_folder",
        [("carve", {"method": "more", "layers": "all", "experts": 5, "router": "ridge"})],
    ),
    ("moe_folder", [("prune", {"keep": 6, "score": "frequency"}), ("slim", {"keep": 0.5})]),
]


def recipe_of(model, out, *steps, **options):
    configs = tuple(step_config(verb, given) for verb, given in steps)
    calibration = Calibration(pages("calibration"), samples=2, length=32)
    return Recipe(model, out, configs, calibration, **{"evaluation": None, **options})


@pytest.mark.parametrize(("model", "steps"), CASES, ids=lambda x: str(x)[:60])
def test_what_comes_out_is_what_was_told(model, steps, request, tmp_path):
    name = str(request.getfixturevalue(model)) if model.endswith("_folder") else model
    out = tmp_path / "out"
    recipe = recipe_of(name, str(out), *steps)
    sizes = estimate(recipe)
    record = run_recipe(recipe)
    size = model_size(loaded(out))
    assert sizes.output_bytes == weight_bytes(out)
    assert sizes.output_parameters == size.total_parameters
    assert sizes.active_parameters == size.active_parameters
    assert sizes.active_ratio == size.active_ratio
    assert (sizes.model_type, sizes.native) == (record.model_type, record.native)


def test_later_steps_know_what_earlier_ones_made():
    """Tuning what was condensed asks for its plan; only those layers learn."""
    condense, tune = ("condense", {"count": 2}), ("tune", {"what": "condensed", "steps": 3})
    before = estimate(recipe_of("tiny-shared-moe", "out", condense))
    after = estimate(recipe_of("tiny-shared-moe", "out", condense, tune))
    assert after.output_parameters == before.output_parameters


def test_nothing_is_read_but_headers(tmp_path, monkeypatch):
    """A checkpoint whose data are damaged is estimated as any other."""
    folder = tmp_path / "model"
    tiny_moe("mixtral").save_pretrained(folder)

    def estimated():
        recipe = recipe_of(str(folder), "out", ("slim", {"keep": 0.5}))
        return replace(estimate(recipe), peak_memory_bytes=0)

    wanted = estimated()
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as damaged:
        damaged.seek(size // 2)
        damaged.write(b"\xff" * (size - size // 2))
    monkeypatch.setattr(torch.nn.Module, "__call__", None)
    assert estimated() == wanted
    file.unlink()  # and one that has a config alone
    alone = estimated()
    assert alone.output_parameters == wanted.output_parameters
    assert alone.active_parameters == wanted.active_parameters


def test_headers_are_those_of_safetensors(tmp_path):
    """Every type, in the order in which files hold them, with names that are not plain; and values
    begin at a whole cache line, once they are aligned."""
    tensors = {
        f'{"zyx"[i % 3]}.ü"{i}': torch.zeros(i % 4, 3).to(kind)
        for i, kind in enumerate(TYPES.values())
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    theirs = (tmp_path / "a.safetensors").read_bytes()
    align(tmp_path / "a.safetensors")
    written = (tmp_path / "a.safetensors").read_bytes()
    header = _header_bytes({name: tensor.to("meta") for name, tensor in tensors.items()})
    assert written[: len(header)] == header
    assert len(written) == len(header) + sum(tensor.nbytes for tensor in tensors.values())
    assert len(header) % 64 == 0
    assert header[8:].rstrip() == theirs[8 : 8 + len(header)].split(b"}}")[0] + b"}}"
    assert written[len(header) :] == theirs[len(theirs) - len(written) + len(header) :]
    read = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "a.safetensors").chmod(0o600)  # as safetensors leaves it
    align(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == written
    (tmp_path / "new").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode


def held(monkeypatch, model, *steps, **options):
    """Return what a run is estimated to hold beside libraries."""
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))
    monkeypatch.setattr(sizes.psutil, "Process", lambda: process)
    return estimate(recipe_of(model, "out", *steps, **options)).peak_memory_bytes


def test_peak_memory_is_a_layer_its_statistics_and_hidden_states(monkeypatch):
    moe = Skeleton(resolve("tiny-moe").config, None)
    dtype = working_type(moe.config) or torch.bfloat16
    layer = max(sum(sizes_in(layer, dtype)) for layer in moe.model.model.layers)
    states = 2 * 2 * 32 * 256 * dtype.itemsize  # before and after a layer, of two windows
    energy = ("slim", {"keep": 0.5, "score": "energy", "refit": False})
    assert held(monkeypatch, "tiny-moe", energy) == 2 * layer + states
    products = ("slim", {"keep": 0.5, "score": "surgeon"})
    # inner products of eight experts, and three matrices like one of them
    decided = 2 * layer + states + (8 + 3) * 8 * 96**2
    without = ("slim", {"keep": 0.5, "score": "surgeon", "refit": False})
    assert held(monkeypatch, "tiny-moe", without) == decided
    tokens, kept = 64 * (2 * 48 + 3 * 256), 8 * 48
    refitted = 4 * (tokens + kept * (3 + 6) * 256 + 2 * kept * 48)
    assert held(monkeypatch, "tiny-moe", products) == decided + refitted
    monkeypatch.setattr(sizes, "free_bytes", lambda _: 1 << 40)
    both = held(monkeypatch, "tiny-moe", ("prune", {"keep": 8}), evaluation=Evaluation())
    assert both == 2 * moe.held("cpu")
    monkeypatch.setattr(sizes, "free_bytes", lambda _: 0)
    alone = held(monkeypatch, "tiny-moe", energy, evaluation=Evaluation())
    assert alone == 2 * layer + states
    trained = held(monkeypatch, "tiny-moe", ("tune", {"what": "all", "steps": 1}))
    assert trained == moe.held("cpu") + 16 * moe.size.total_parameters


def test_a_second_step_finds_the_first_ones_result_in_the_requested_type():
    steps = ("prune", {"keep": 6}), ("slim", {"keep": 0.5})
    with on_headers(recipe_of("tiny-moe", "out", *steps, dtype="float32")) as made:
        for result in (step.result for step in made):
            count = Skeleton(result.config, None).size.total_parameters
            assert result.checkpoint.tensor_bytes() == 4 * count


MEASURED = """
import sys
from pathlib import Path
from moesaic.metrics.speed import _peak_resident
from moesaic.pipeline import run_recipe
from moesaic.recipe import load_recipe
from moesaic.sizes import estimate

recipe = load_recipe(sys.argv[1])
estimated = estimate(recipe).peak_memory_bytes
run_recipe(recipe)
Path(sys.argv[2]).write_text(f"{estimated} {_peak_resident()}")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("verb", ["prune", "slim"])
def test_memory_is_as_estimated_at_the_width_of_a_real_models_experts(verb, tmp_path):
    """Most of it is what a refit holds, which small layers hide."""
    small = {"hidden_size": 1024, "num_hidden_layers": 1, "vocab_size": 4096, "head_dim": 64}
    routed = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, **routed))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("tiny-moe").folder / name, tmp_path / "model")
    recipe = recipe_of(str(tmp_path / "model"), str(tmp_path / "out"), (verb, {"keep": 0.5}))
    text = replace(recipe.calibration, samples=16, length=256)
    (tmp_path / "recipe.yaml").write_text(replace(recipe, calibration=text).to_yaml())
    with python("-c", MEASURED, tmp_path / "recipe.yaml", tmp_path / "memory") as running:
        running.communicate()
    estimated, measured = map(int, (tmp_path / "memory").read_text().split())
    assert 0.6 * estimated < measured < 1.2 * estimated


@pytest.mark.parametrize("verb", ["prune", "slim"])
def test_layers_that_will_differ_are_told_to_differ(verb):
    """Without statistics all have one loss; the result is none of the base's architecture."""
    recipe = recipe_of("tiny-moe", "out", (verb, {"keep": 0.75, "allocate": "layers"}))
    with on_headers(recipe) as (step,):
        assert step.result.config.model_type == "moesaic_mixtral"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_freed_memory_is_returned():
    blocks = [bytearray(b"1" * 100_000) for _ in range(1000)]
    last = blocks.pop()  # on top of the heap, which does not shrink below it
    blocks.clear()
    before = psutil.Process().memory_info().rss
    release_memory()
    assert psutil.Process().memory_info().rss < before - 50_000_000
    assert last[0] == ord("1")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (("prune", {"keep": 1}), "needs at least 2"),
        (("slim", {"keep": 0.5, "multiple": 90}), "nearest that works"),
        (("condense", {"memory": 1, "keep": "shared+routed"}), "out of reach"),
        (("skip", {"calls": 9}), "runs 2 experts"),
    ],
)
def test_what_cannot_be_is_refused(step, said):
    with pytest.raises(MoesaicError, match=said):
        estimate(recipe_of("tiny-moe", "out", step))


def test_what_cannot_go_with_statistics_is_refused_beforehand():
    recipe = recipe_of("tiny-moe", "out", ("prune", {"keep": 6, "progressive": True}))
    with pytest.raises(MoesaicError, match="cannot decide from stats"):
        estimate(replace(recipe, calibration=Calibration(stats="some.stats")))
