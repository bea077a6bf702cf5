"""What only a GPU shows: ``pytest -m gpu``, on a machine that has one; some tests want two."""

import copy
import subprocess
import sys

import pytest
import torch
from builders import EQUAL, carved_layer, converted, tiny_model, tiny_moe

import moesaic
from moesaic import CondenseConfig, PruneConfig, TuneConfig
from moesaic.metrics.speed import free_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(params=["cuda", pytest.param("cuda:1", marks=two)])
def device(request):
    return str(request.param)


def close(ours, theirs):
    return bool((ours.cpu() - theirs.cpu()).norm() <= 1e-3 * theirs.norm())


def test_carved_models_compute_the_same(device, tokens):
    for top_k in (0, 1, 2):
        layers = {i: carved_layer(*EQUAL[i], seed=i, top_k=top_k) for i in EQUAL}
        model = converted(tiny_model("llama"), layers)
        with torch.no_grad():
            expected = model(tokens.input_ids).logits
            ids = tokens.input_ids.to(device)
            assert close(model.to(device)(ids).logits, expected)


@pytest.mark.usefixtures("spilling")
def test_condensing_with_everything_spilled(device, tokens):
    config = CondenseConfig(count=2)
    expected = moesaic.condense(tiny_moe("qwen2_moe"), config, text=tokens)
    found = moesaic.condense(tiny_moe("qwen2_moe").to(device), config, text=tokens)
    for i, seen in expected.analyses.items():
        assert found.analyses[i]["divergence"] == pytest.approx(seen["divergence"], abs=1e-3)


def test_pruning_searches_on_the_gpu(device, tokens):
    config = PruneConfig(keep=4, exhaustive_limit=0)
    expected = moesaic.prune(tiny_moe("qwen3_moe"), config, text=tokens)
    found = moesaic.prune(tiny_moe("qwen3_moe").to(device), config, text=tokens)
    for i, layer in expected.plan.layers.items():
        assert found.plan.layers[i].kept == layer.kept


def sft(tokens, model, **options):
    config = TuneConfig(what="all", steps=2, batch=2, lr=1e-3)
    return moesaic.tune(model, config, text=tokens, **options)


def test_training_on_the_gpu_that_was_named(device, tokens):
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.max_memory_allocated(device)
    sft(tokens, tiny_model("llama"), device=device)
    assert torch.cuda.max_memory_allocated(device) > before


def test_a_live_model_trains_where_it_is(device, tokens):
    model = tiny_model("llama").to(device)
    twin = copy.deepcopy(model)
    tuned = sft(tokens, model, inplace=True).model
    assert tuned.device == model.device == twin.device
    assert any(
        not torch.equal(a, b) for a, b in zip(tuned.parameters(), twin.parameters(), strict=True)
    )


@two
def test_each_process_has_its_own_gpu(tmp_path):
    script = tmp_path / "where.py"
    script.write_text(
        "import torch\n"
        "from moesaic.distributed import gathered, join_processes, own_device, process\n"
        "join_processes()\n"
        "x = torch.ones(1, device=own_device('cuda'))\n"
        "assert sorted(gathered(x.device.index)) == [0, 1], gathered(x.device.index)\n"
        "torch.distributed.destroy_process_group()\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    subprocess.run(run, check=True)


def test_free_memory_counts_what_torch_only_keeps(device):
    free = free_bytes(device)
    block = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert free_bytes(device) <= free - (1 << 28) + (1 << 25)
    del block
    assert free_bytes(device) >= free - (1 << 25)
