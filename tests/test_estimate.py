"""Predictions: a result's shape and bytes are told exactly before a weight is read."""

from __future__ import annotations

import itertools
import json
import math
import platform
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from builders import loaded, tiny_moe
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from moesaic import estimates, pipeline
from moesaic.cli import app
from moesaic.config import Calibration, Evaluation, MethodConfig
from moesaic.data.reader import shipped_texts
from moesaic.data.text import Tokens
from moesaic.data.training import foretold_tokens, training_examples
from moesaic.errors import MoesaicError
from moesaic.estimates import (
    REMEMBERED,
    Built,
    Machine,
    Stage,
    estimate,
    foreseen,
    kept_of_token,
    logits_held,
    making,
    measuring,
    weight_bytes,
)
from moesaic.fitting.redundancy import WINDOWS, looking
from moesaic.foreign import give_back
from moesaic.io.arithmetic import working_type
from moesaic.io.checkpoint import TYPES, align
from moesaic.io.source import resolve
from moesaic.io.weightless import header_bytes
from moesaic.methods.clustering import LIBRARIES
from moesaic.metrics import machine
from moesaic.metrics.score import _figures
from moesaic.metrics.size import model_size
from moesaic.pipeline import run_recipe
from moesaic.recipe import Recipe, step_config
from moesaic.report.numbers import memory

FAST = Machine(operations=1e12, call=0.0, bytes=1e12, started=1.0, resident=1000)
CASES: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    ("tiny-shared-moe", [("prune", {"keep": 9.5, "allocate": "layers", "score": "frequency"})]),
    ("tiny-shared-moe", [("slim", {"keep": 0.5, "shared": 0.5, "refit": True})]),
    ("tiny-shared-moe", [("slim", {"keep": 0.5, "allocate": "experts"})]),
    ("tiny-dense", [("slim", {"keep": 0.5})]),
    ("tiny-shared-moe", [("condense", {"count": 2, "shared_gate": "mean"})]),
    ("tiny-moe", [("condense", {"count": 1, "keep": "shared+routed"})]),
    ("tiny-moe", [("condense", {"memory": 16_000_000, "keep": "nothing"})]),
    ("tiny-dense", [("carve", {"method": "more", "variant": "static", "refit": True})]),
    (
        "tiny-dense",
        [("carve", {"method": "more", "layers": "all", "experts": 5, "router": "ridge"})],
    ),
    (
        "tiny-shared-moe",
        [("prune", {"keep": 12, "score": "frequency"}), ("slim", {"keep": 0.5})],
    ),
]


def recipe_of(model: str, out: str, *steps: tuple[str, dict[str, Any]], **options: Any) -> Recipe:
    configs = tuple(step_config(verb, given) for verb, given in steps)
    calibration = Calibration(samples=2, length=32)
    return Recipe(model, out, configs, calibration, **{"evaluation": None, **options})


@pytest.mark.parametrize(("model", "steps"), CASES, ids=lambda x: str(x)[:60])
def test_what_comes_out_is_what_was_told(model: str, steps: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = recipe_of(model, str(out), *steps)
    told = estimate(recipe, FAST)
    record = run_recipe(recipe)
    size = model_size(loaded(out))
    assert told.output_bytes == weight_bytes(out)
    assert told.output_parameters == size.total_parameters
    assert told.active_parameters == size.active_parameters
    assert told.active_ratio == size.active_ratio
    assert record is not None
    assert (told.model_type, told.native) == (record.model_type, record.native)


def test_later_steps_know_what_earlier_ones_made() -> None:
    """Tuning what was condensed asks for its plan; only those layers learn."""
    condense, tune = ("condense", {"count": 2}), ("tune", {"what": "condensed", "steps": 3})
    before = estimate(recipe_of("tiny-shared-moe", "out", condense), FAST)
    after = estimate(recipe_of("tiny-shared-moe", "out", condense, tune), FAST)
    assert after.output_parameters == before.output_parameters
    assert after.seconds > before.seconds


def test_nothing_is_read_but_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose data are damaged is told about as any other."""
    folder = tmp_path / "model"
    tiny_moe("mixtral").save_pretrained(folder)
    wanted = estimate(recipe_of(str(folder), "out", ("slim", {"keep": 0.5})), FAST)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as damaged:
        damaged.seek(size // 2)
        damaged.write(b"\xff" * (size - size // 2))
    monkeypatch.setattr(torch.nn.Module, "__call__", None)
    assert estimate(recipe_of(str(folder), "out", ("slim", {"keep": 0.5})), FAST) == wanted
    file.unlink()  # and one that has a config alone
    alone = estimate(recipe_of(str(folder), "out", ("slim", {"keep": 0.5})), FAST)
    assert alone.output_parameters == wanted.output_parameters
    assert alone.active_parameters == wanted.active_parameters


def test_headers_are_those_of_safetensors(tmp_path: Path) -> None:
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
    header = header_bytes({name: tensor.to("meta") for name, tensor in tensors.items()})
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


def test_time_is_the_sum_of_its_parts() -> None:
    machine = Machine(operations=10.0, call=2.0, bytes=5.0, started=3.0, resident=0)
    assert machine.seconds(Stage(7, operations=20.0, calls=4.0, bytes=10.0)) == 2 + 8 + 2
    assert machine.seconds(Stage(starts=2)) == 6


def test_more_work_takes_longer_and_more_room() -> None:
    slim = ("slim", {"keep": 0.5})
    small = estimate(recipe_of("tiny-moe", "out", slim), FAST)
    measured = estimate(recipe_of("tiny-moe", "out", slim, evaluation=Evaluation()), FAST)
    assert measured.seconds > small.seconds
    assert measured.peak_memory_bytes > small.peak_memory_bytes > FAST.resident
    assert measured.disk_bytes > small.disk_bytes > small.output_bytes
    assert measured.output_bytes == small.output_bytes


def test_mixtures_hold_compiled_products_of_many_shapes() -> None:
    moe, dense = (Built(resolve(name).config, None) for name in ("tiny-moe", "tiny-dense"))
    stages = {m: measuring(m, m, Evaluation(), "cpu")[0] for m in (moe, dense)}
    told = [stage.memory - 2 * m.held("cpu") for m, stage in stages.items()]
    assert told[0] - told[1] == REMEMBERED


def saved_bytes(model: Any, ids: torch.Tensor) -> int:
    """Of what autograd keeps of a forward pass, the model's weights and what is kept twice left
    out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(input_ids=ids, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_what_is_kept_of_a_token_is_what_autograd_keeps(name: str) -> None:
    model = resolve(name).load(dtype=torch.float32)
    ids = torch.arange(256).view(1, -1)
    told = kept_of_token(model_size(model).layers, model.config.hidden_size, 4) * ids.numel()
    assert told == pytest.approx(saved_bytes(model.base_model, ids), rel=0.05)


class Held(TorchDispatchMode):
    """Bytes of the tensors that operations make, at the most crowded moment."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in given}
        self.most = self.now = sum(x.nbytes for x in given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else [made]:
            place = x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else 0
            if place and place not in self.known:
                self.known.add(place)
                self.now += x.nbytes
                weakref.finalize(x, self.freed, place, x.nbytes)
        self.most = max(self.most, self.now)
        return made

    def freed(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


@pytest.mark.parametrize("verb", ["prune", "slim"])
def test_layers_that_will_differ_are_told_to_differ(verb: str) -> None:
    """Without statistics all lose alike; the result is none of the base's architecture."""
    recipe = recipe_of("tiny-moe", "out", (verb, {"keep": 0.75, "allocate": "layers"}))
    with foreseen(recipe) as (step,):
        assert step.result.config.model_type == "moesaic_mixtral"


def test_logits_are_held_as_often_as_told() -> None:
    """Two models' logits of a batch, and what comparing a chunk of them takes."""
    ids = torch.zeros(2, 512, dtype=torch.int64)
    theirs, ours = torch.ones(2, 512, 2000), torch.ones(2, 512, 2000)
    with Held(theirs, ours) as held:
        _figures([theirs, ours], Tokens(ids).labels)
    assert held.most == pytest.approx(logits_held(2000, 512), rel=0.1)


def training(model: str, **options: Any) -> Stage:
    """What a tune of all weights is told to take while it learns."""
    with foreseen(recipe_of(model, "out", ("tune", {"what": "all", **options}))) as (step,):
        return making(step.job, step.outline, 0, decided=False)[0]


def test_training_holds_a_batch_moments_and_the_teacher() -> None:
    one, two = (training("tiny-moe", steps=9, batch=b, length=64) for b in (1, 2))
    taught = training("tiny-moe", steps=9, batch=1, length=64, teacher="tiny-moe")
    lora = training("tiny-moe", steps=9, batch=1, length=64, what="lora")
    moe = Built(resolve("tiny-moe").config, None)
    count = moe.size.total_parameters
    item = (working_type(moe.config) or torch.bfloat16).itemsize
    kept = kept_of_token(moe.size.layers, 256, item) + 16 * 4096
    copies = 16 + item * (item < 4)
    assert one.memory == estimates.DECIDING + copies * count + round(64 * kept)
    assert two.memory - one.memory == round(64 * kept)
    assert taught.memory - one.memory == moe.held("cpu") + 64 * 16 * 4096
    assert taught.operations == pytest.approx(one.operations * 4 / 3)
    assert lora.memory < one.memory - 10 * count


@pytest.mark.parametrize(
    ("model", "step"),
    [
        ("tiny-dense", ("carve", {"method": "dsmoe", "active": 0.7})),
        ("tiny-dense", ("carve", {"method": "tomoe", "active": 0.7})),
        ("tiny-moe", ("tune", {"what": "all"})),
    ],
)
def test_training_takes_by_default_no_more_text_than_ships(model: str, step: Any) -> None:
    """And its paper's own number where that is asked for."""
    tokenizer = resolve(model).tokenizer
    there = len(training_examples(shipped_texts("calibration"), tokenizer, 256)) * 256
    with foreseen(recipe_of(model, "out", step)) as (made,):
        assert there / 2 < made.outline.tokens <= there
    with foreseen(recipe_of(model, "out", (step[0], {**step[1], "recipe": "paper"}))) as (made,):
        assert (made.outline.tokens > 50 * there) == (step[0] == "carve")


def test_the_text_that_tune_is_given_says_how_long_it_takes(tmp_path: Path) -> None:
    file, ids = tmp_path / "text.txt", tmp_path / "ids.safetensors"
    file.write_text("word " * 8000, "utf-8")
    save_file({"input_ids": torch.zeros(10, 100, dtype=torch.int64)}, ids)
    assert foretold_tokens(str(file)) == 10_000
    assert foretold_tokens(str(ids)) == pytest.approx(1000, rel=0.1)
    assert foretold_tokens("somebody/text") is None
    one, two = (training("tiny-moe", data=str(file), epochs=n).operations for n in (1.0, 2.0))
    assert two == pytest.approx(2 * one, rel=0.05)


def test_weights_wait_only_where_they_are_new() -> None:
    """Whole experts are copied from file to file; narrower ones are computed, and wait."""
    experts, routers = 6 * 8 * 3 * 96 * 256 * 2, 6 * 8 * 256 * 2
    for verb, keep, new in (("prune", 6, routers * 6 // 8), ("slim", 0.5, experts // 2 + routers)):
        with foreseen(recipe_of("tiny-moe", "out", (verb, {"keep": keep}))) as (step,):
            assert step.waiting == new


def test_clustering_brings_libraries() -> None:
    held = {}
    for variant in ("full", "static"):
        with foreseen(
            recipe_of("tiny-dense", "out", ("carve", {"method": "more", "variant": variant}))
        ) as (step,):
            held[variant] = step.outline.libraries
    assert held == {"full": LIBRARIES, "static": 0}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_freed_memory_goes_back() -> None:
    blocks = [bytearray(b"1" * 100_000) for _ in range(1000)]
    last = blocks.pop()  # on top of the heap, which does not shrink below it
    blocks.clear()
    before = psutil.Process().memory_info().rss
    give_back()
    assert psutil.Process().memory_info().rss < before - 50_000_000
    assert last[0] == ord("1")


def test_what_runs_beside_a_measurement_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three times another process has the core: of those the least is taken."""
    moments = itertools.accumulate(itertools.cycle([0.0, 1.0, 0.0, 9.0, 0.0, 9.0]))
    monkeypatch.setattr(estimates.time, "perf_counter", lambda: next(moments))
    found = estimates.measured("cpu")
    assert found["operations"] == 2.0 * 64 * 1024 * 1024 * estimates.EFFICIENCY
    assert found["call"] == estimates.CALL


def test_the_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path))
    first = Machine.here()
    monkeypatch.setattr(estimates, "measured", None)
    again = Machine.here()
    assert (again.operations, again.call, again.bytes) == (
        first.operations,
        first.call,
        first.bytes,
    )
    monkeypatch.setattr(machine, "_processor", lambda: "another, with the same cache")
    with pytest.raises(TypeError):
        Machine.here()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (("prune", {"keep": 1}), "needs at least 2"),
        (("slim", {"keep": 0.5, "multiple": 90}), "nearest that works"),
        (("condense", {"memory": 1, "keep": "shared+routed"}), "out of reach"),
        (("skip", {"calls": 9}), "runs 2 experts"),
    ],
)
def test_what_cannot_be_is_refused(step: Any, said: str) -> None:
    with pytest.raises(MoesaicError, match=said):
        estimate(recipe_of("tiny-moe", "out", step), FAST)


def test_what_cannot_go_with_statistics_is_refused_beforehand() -> None:
    recipe = recipe_of("tiny-moe", "out", ("prune", {"keep": 6, "progressive": True}))
    with pytest.raises(MoesaicError, match="cannot decide from stats"):
        estimate(replace(recipe, calibration=Calibration(stats="some.stats")), FAST)


def test_dry_run_says_it_and_does_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ["prune", "tiny-moe", str(out), "--keep", "6", "--dry-run", "--json"]
    run = CliRunner().invoke(app, given, catch_exceptions=False)
    assert run.exit_code == 0, run.stderr
    told = json.loads(run.stdout)["estimate"]
    for key in ("peak_memory_bytes", "disk_bytes", "seconds", "output_bytes", "output_parameters"):
        assert told[key] > 0
    assert told["native"]
    assert list(tmp_path.iterdir()) == []


# --- said beforehand -----------------------------------------------------------------------------


def test_a_long_run_is_told_before_anything_is_computed(
    command: Any, moe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "QUICK", 0)
    monkeypatch.setattr(estimates, "LONG", 0)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "convert", interrupted)
        given = ("prune", moe_folder, tmp_path / "out", "--keep", "6", "--samples", "2")
        code, out, err = command(*given, "--max-tokens", "512", "--json")
    assert (code, out) == (2, "")
    told = r"Predicted: \S+ \w+, \S+ \w+ memory, \S+ MiB disk, weights (.*) -> (.*)\. Error: now"
    before, after = re.match(told, err).groups()  # type: ignore[union-attr]
    assert before == " ".join(memory(resolve(str(moe_folder)).checkpoint.nbytes()).split())
    code, out, err = command(*given, "--no-eval", "--json")
    assert code == 0
    stored = json.loads(out)["files"]
    assert [" ".join(memory(size).split()) for size in stored.values()] == [before, after]
    assert f"({before} -> {after})" in err
    for more in (
        ("eval", moe_folder, "--against", tmp_path / "out", "--max-tokens", "512"),
        ("observe", moe_folder, tmp_path / "stats", "--samples", "2"),
    ):
        code, out, err = command(*more, "--json")
        assert code == 0
        assert re.match(r"Predicted: \S+ \w+, \S+ \w+ memory\.", err)
        json.loads(out)


def test_choosing_types_is_told_and_its_progress_shown(
    command: Any, moe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file with types by layer; one of a single type takes no such look."""
    monkeypatch.setattr(estimates, "in_words", lambda seconds, *_: f"{seconds}")
    monkeypatch.setattr(Machine, "here", lambda *_: Machine(1.0, 0.0, math.inf, 0.0, 0))
    bars: list[Any] = []

    def written(*_: Any, track: Any, **__: Any) -> None:
        bars.append(track)
        raise MoesaicError("not written")

    monkeypatch.setattr("moesaic.exports.export", written)
    given = ("export", moe_folder, tmp_path / "model.gguf", "--to", "gguf")
    _, _, err = command(*given, "--memory", "1MB", "--among", "q8_0", "--among", "q4_k_m")
    built = Built(resolve(str(moe_folder)).config, None)
    changes = (3 * built.depth + 2) * (2 + 4)  # groups in two types, then in two others twice
    told = float(err.partition("Error")[0])
    assert told == pytest.approx(
        sum(estimates.comparing(built, n, 8 * 256, 0.5).operations for n in (changes, 0))
    )
    _, _, err = command(*given, "--type", "q4_k_m")
    assert err.startswith("Error: not written")
    assert all(callable(track) for track in bars)


def test_what_is_looked_at_beside_is_told_too(
    command: Any, moe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of observe where a mixture is redundant, of eval drafts: whole passes of their texts."""
    monkeypatch.setattr(estimates, "QUICK", 0)
    monkeypatch.setattr(estimates, "in_words", lambda seconds, *_: f"{seconds}")
    monkeypatch.setattr(Machine, "here", lambda *_: Machine(1.0, 0.0, math.inf, 0.0, 0))
    made = Built(resolve(str(moe_folder)).config, None)
    pass_of_token = 2.0 * made.size.active_parameters
    recipe = Recipe(str(moe_folder), "", (), Calibration(samples=2), evaluation=None)
    alone = float(estimates.notice_of_observing(recipe))
    _, _, err = command("observe", moe_folder, tmp_path / "stats", "--samples", "2")
    windows = WINDOWS * MethodConfig.window
    assert float(err.split()[0]) - alone == pytest.approx(5 * windows * pass_of_token)
    assert looking(Built(resolve("tiny-dense").config, None)) == []
    (stage,) = looking(made)
    assert stage.memory > 5 * 4 * made.vocabulary * MethodConfig.window  # logits of a window

    where: Any = {"device": "cpu", "dtype": None}
    for stream in (False, True):
        settings = Evaluation(max_tokens=1000, stream=stream)
        asked = [str(moe_folder)], settings
        without, drafts = (
            float(estimates.notice_of_scoring(*asked, **where, mtp=mtp)) for mtp in (False, True)
        )
        passes = 0 if stream else 1000 * pass_of_token  # what is kept passes the layers once
        assert drafts - without == pytest.approx(passes)  # it has none of those layers itself


def interrupted(*_: Any) -> None:
    raise MoesaicError("now")


def test_short_runs_and_predictions_that_fail_say_nothing(
    moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(str(moe_folder), "out", ("prune", {"keep": 6}))
    monkeypatch.setattr(estimates, "LONG", 0)
    with monkeypatch.context() as patch:
        patch.setattr(estimates, "estimate", None)  # it is not even asked
        assert estimates.notice(recipe) == ""
    monkeypatch.setattr(estimates, "QUICK", 0)
    assert estimates.notice(recipe)
    assert estimates.notice(replace(recipe, model="nowhere")) == ""
    monkeypatch.setattr(estimates, "LONG", 1e9)
    assert estimates.notice(recipe) == ""


def test_the_least_that_a_run_takes_counts_each_weight_and_token() -> None:
    weights = 2.0 * resolve("tiny-moe").checkpoint.nbytes()
    slim, tune = ("slim", {"keep": 0.5}), ("tune", {"steps": 9, "batch": 4, "length": 16})
    assert estimates.at_least(recipe_of("tiny-moe", "out", slim)) == weights * 64
    measured = recipe_of("tiny-moe", "out", slim, evaluation=Evaluation(max_tokens=1000))
    assert estimates.at_least(measured) == weights * (64 + 2000)
    assert estimates.at_least(recipe_of("tiny-moe", "out", tune)) == weights * (64 + 3 * 9 * 64)
