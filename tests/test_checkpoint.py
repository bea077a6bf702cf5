"""Checkpoints: lazy, never pickled, whole or absent."""

import errno
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import equal, inside, tiny_model, weights
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import MoesaicError, PruneConfig
from moesaic.io.checkpoint import (
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    ShardWriter,
    check_finite,
    extend,
    write_shard,
)
from moesaic.io.naming import Naming
from moesaic.io.outputs import whole_folder
from moesaic.io.source import resolve


def test_shards_hold_what_was_added(tmp_path):
    tensors = {f"layer.{i}": torch.randn(10, 10) for i in range(7)}
    writer = ShardWriter(tmp_path, shard_bytes=900)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    assert len(list(tmp_path.glob("model-*-of-00004.safetensors"))) == 4
    again = Checkpoint(tmp_path)
    assert set(again.names()) == set(tensors)
    assert all(torch.equal(again.tensor(n), t) for n, t in tensors.items())
    assert list(again.under("layer.")) == [n.removeprefix("layer.") for n in again.names()]
    with pytest.raises(MoesaicError, match=r"no tensor 'layer\.7'"):
        again.tensor("layer.7")


def test_one_file_may_be_larger_than_memory(tmp_path):
    """A file of holes, which takes no room."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = 2 * memory // 1024
    header = {"w": {"dtype": "BF16", "shape": [rows, 512], "data_offsets": [0, rows * 1024]}}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + rows * 1024)
    assert Checkpoint(tmp_path).shape("w") == (rows, 512)


PLACES = {"a": "model-00001-of-00002.safetensors"}
INDEX = json.dumps({"metadata": {}, "weight_map": PLACES})


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("pytorch_model.bin", b"x", "pickled weights only"),
        (SINGLE_NAME, save({"a": torch.ones(9)})[:-5], "safetensors is missing, truncated or corr"),
        (INDEX_NAME, INDEX.encode(), "00001-of-00002"),
        (INDEX_NAME, b"{", r"index\.json cannot be read"),
        ("none", b"", r"No model\.safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path, file, content, words):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(MoesaicError, match=words):
        Checkpoint(tmp_path)


EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda t: t.mul_(2),
    "through .data": lambda t: t.data[-1:].zero_(),
    "through numpy": lambda t: t.numpy().fill(0),
    "new data": lambda t: setattr(t, "data", torch.ones(300, 200)),
    "turned": lambda t: t.t_(),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_was_edited_is_saved_as_it_is(tmp_path, edit):
    """However it was edited; what is copied by its place is as the file has it."""
    save_file({"a": torch.randn(300, 200)}, tmp_path / "model.safetensors")
    read = Checkpoint(tmp_path)
    tensor, before = read.tensor("a"), read.tensor("a").clone()
    EDITS[edit](tensor)
    (tmp_path / "out").mkdir()
    writer = ShardWriter(tmp_path / "out")
    writer.add("edited", tensor)
    for stored in read.stored("a"):
        writer.add(*stored)
    writer.close()
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(again["edited"], tensor)
    assert torch.equal(again["a"], before)


def test_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "deep" / "out"
    with pytest.raises(RuntimeError), whole_folder(out) as work:  # noqa: PT012
        (work / "half").write_text("x")
        raise RuntimeError
    assert not any(tmp_path.iterdir())
    with whole_folder(out) as work:
        (work / "config.json").write_text("{}")
        assert not out.exists()
    with pytest.raises(RuntimeError), whole_folder(out, overwrite=True):
        raise RuntimeError
    assert inside(out) == {"config.json", "moesaic/files.json"}, "a failed run took it away"


@pytest.mark.parametrize("system", ["copies", "copies a part", "cannot"])
def test_shards_are_as_safetensors_writes_them(tmp_path, monkeypatch, system):
    """Tensors of every type: from memory, as they were read, changed since, a part, in no order."""
    copy, asked = os.copy_file_range, []

    def faulty(source, out, count, at):
        asked.append(count)
        if system == "cannot" or len(asked) % 2 == 0:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return copy(source, out, min(count, 7), at)

    if system != "copies":
        monkeypatch.setattr(os, "copy_file_range", faulty)
    drawn = torch.randint(0, 256, (400,), dtype=torch.uint8)
    tensors = {
        kind: drawn.clone().view(getattr(torch, kind)).reshape(-1, 5)
        for kind in ("float32", "bfloat16", "float8_e4m3fn", "uint8", "int64")
    }
    for name in ("float32", "bfloat16"):
        tensors[name] = tensors[name].nan_to_num(0, 0, 0)
    tensors |= {"none": torch.zeros(0, 3), "one": torch.tensor(2.5)}
    for name in ("read", "out"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "read/model.safetensors", metadata={"format": "pt"})
    checkpoint, writer = Checkpoint(tmp_path / "read"), ShardWriter(tmp_path / "out")
    wanted = {}
    for name in checkpoint.names():
        wanted[name] = checkpoint.tensor(name)
        writer.add(*next(checkpoint.stored(name)))
    wanted["changed"] = Checkpoint(tmp_path / "read").tensor("float32")  # mapped on its own
    wanted["changed"][3, 1] = 7
    wanted["turned"], wanted["part"] = checkpoint.tensor("bfloat16").T, tensors["int64"][2:4]
    for name in ("changed", "turned", "part"):
        writer.add(name, wanted[name])
        wanted[name] = wanted[name].contiguous().clone()
    writer.close()
    save_file(wanted, tmp_path / "wanted.safetensors", metadata={"format": "pt"})
    found = (tmp_path / "out/model.safetensors").read_bytes()
    assert found == (tmp_path / "wanted.safetensors").read_bytes()
    assert bool(asked) == (system != "copies")


def test_a_model_that_another_run_replaces_is_not_mixed_with_it(moe_folder, tmp_path):
    """Not even with one of the same names and shapes; what was read stays as it was."""
    folder = Path(shutil.copytree(moe_folder, tmp_path / "it"))
    source = resolve(str(folder))
    name = source.checkpoint.names()[0]
    read, before = source.checkpoint.tensor(name), source.checkpoint.tensor(name).clone()
    (_, place), *_ = source.checkpoint.stored(name)
    folder.rename(tmp_path / "old")
    shutil.copytree(moe_folder, folder, copy_function=shutil.copyfile)
    for use in (
        lambda: source.checkpoint.tensor(name),
        lambda: write_shard(tmp_path / "copy.safetensors", {name: place}),
        source.load,
    ):
        with pytest.raises(MoesaicError, match=r"safetensors was changed or replaced while"):
            use()
    shutil.rmtree(tmp_path / "old")
    assert torch.equal(read, before)


def test_what_ends_while_it_is_copied(tmp_path):
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    (tmp_path / "out").mkdir()
    writer = ShardWriter(tmp_path / "out")
    _, place = next(Checkpoint(tmp_path).stored("a"))
    writer.add("a", place._replace(made=()))  # it ends after it was opened
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(whole[:-50])
    with pytest.raises(MoesaicError, match="truncated or corrupt"):
        writer.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("changed", [True, False])
def test_values_that_are_not_finite_are_not_written(tmp_path, value, changed):
    """Whether they are copied from a file or were made; also after the first piece."""
    bad = torch.ones(1200, 1000, dtype=torch.bfloat16)
    bad[1199, 998] = value
    save_file({"good": torch.ones(3), "bad": bad}, tmp_path / "model.safetensors")
    (tmp_path / "out").mkdir()
    writer = ShardWriter(tmp_path / "out")
    for name in ("good", "bad"):
        checkpoint = Checkpoint(tmp_path)
        value = checkpoint.tensor(name) if changed else next(checkpoint.stored(name))[1]
        writer.add(name, value)
    with pytest.raises(MoesaicError, match="bad holds a value that is not finite"):
        writer.close()


def test_a_bound_may_be_infinite(tmp_path):
    """Gemma 4's audio tower stores what it clips its inputs to, and that may be nothing."""
    bounds = {"least": torch.tensor(-float("inf")), "most": torch.tensor(float("inf"))}
    save_file(bounds, tmp_path / "model.safetensors")
    (tmp_path / "out").mkdir()
    writer = ShardWriter(tmp_path / "out")
    for name in bounds:
        writer.add(*next(Checkpoint(tmp_path).stored(name)))
    writer.add("none", torch.tensor(1.0))
    writer.close()
    assert Checkpoint(tmp_path / "out").tensor("most") == bounds["most"]
    with pytest.raises(MoesaicError, match="factor holds a value that is not finite"):
        check_finite("factor", torch.tensor(float("nan")))


@pytest.mark.parametrize("shard", ["10MB", "60KB"])
def test_a_further_shard_joins_those_that_are_there(shard, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size=shard)
    before = weights(tmp_path)
    more = {"mtp.fc.weight": torch.ones(4, 8), "mtp.norm.weight": torch.zeros(4)}
    extend(tmp_path, more)
    assert equal(weights(tmp_path), {**before, **more})
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert {*index["weight_map"].values()} == {f.name for f in tmp_path.glob("*.safetensors")}
    assert equal(dict(resolve(str(tmp_path)).load().state_dict()), before)


def test_experts_are_read_into_their_place(tmp_path):
    """Of a layer that is many times its experts, no second copy lies beside it while it is read."""
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    naming = Naming(checkpoint, "qwen3_moe")
    alive = []
    most = 0

    def counted(tensor):
        nonlocal most
        copied = tensor.clone()
        alive.append(weakref.ref(copied))
        most = max(most, sum(other() is not None for other in alive))
        return copied

    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{name}"
        assert torch.equal(naming.read(name, counted), model.state_dict()[name])
    assert len(alive) == 3 * model.config.num_experts
    assert most <= 3


def test_a_saved_model_is_mapped_from_whole_cache_lines(moe_folder, tmp_path):
    """A CPU decodes the same weights up to a tenth slower where their rows lie across lines."""
    out = moesaic.prune(moe_folder, PruneConfig(keep=6, score="random", refit=False))
    model = AutoModelForCausalLM.from_pretrained(out.save(tmp_path / "out"))
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
