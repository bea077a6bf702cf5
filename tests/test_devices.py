"""Where things are computed: offloaded and hooked models, spilled tensors, several devices."""

import gc
import weakref
from typing import Any

import faraway
import pytest
import test_gpu
import torch
from accelerate import cpu_offload, dispatch_model
from builders import (
    EQUAL,
    carved_layer,
    converted,
    drawn,
    pages,
    routed_sites,
    running,
    statistics,
    stream_of,
    tiny_model,
    tiny_moe,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import CondenseConfig, Evaluation, MoesaicError, PruneConfig, RunArgs
from moesaic.arch.lookup import dense_arch
from moesaic.carving.carved_layer import CarvedFFN
from moesaic.carving.overlapping_layer import OverlappingLayer
from moesaic.distributed import own_device
from moesaic.io.source import Source, resolve
from moesaic.metrics.evaluate import ROOM, measured_text
from moesaic.metrics.forward import InMemory
from moesaic.metrics.measurement import Measurement, bench
from moesaic.metrics.speed import free_bytes
from moesaic.modules.running import SpilledList
from moesaic.observation.job import Job
from moesaic.train.learning import Schedule
from moesaic.train.loop import train

# --- offloaded and hooked results ----------------------------------------------------------------


def carved(**options):
    """A model of which every layer is carved."""
    layers = {i: carved_layer(*shape, seed=i, **options) for i, shape in EQUAL.items()}
    return converted(tiny_model("llama"), layers)


def overlapping():
    """A model whose experts share neurons (ToMoE's)."""
    rows = [torch.randperm(64, generator=torch.Generator().manual_seed(i))[:40] for i in range(3)]
    experts = torch.stack(rows).sort(1).values
    layers = {i: OverlappingLayer(experts.clone(), drawn(3, 32, seed=i)) for i in range(4)}
    return converted(tiny_model("llama"), layers)


MODELS = {
    "one petal": carved,
    "two petals": lambda: carved(top_k=2),
    "gates": lambda: carved(top_k=4, routing="threshold", gate={"tau": 0.5}),
    "overlapping": overlapping,
}


def blocks(model):
    return [m for m in model.modules() if isinstance(m, CarvedFFN)]


def test_a_replica_without_parameters_of_its_own_computes_the_same(tokens):
    """As nn.DataParallel makes them: tensors where parameters were."""
    model = carved()
    for ffn in blocks(model):
        x = torch.randn(2, 5, 32)
        expected = ffn(x)
        replicas = {m: m._replicate_for_data_parallel() for m in ffn.modules()}
        for original, replica in replicas.items():
            for name, child in original._modules.items():
                replica._modules[name] = replicas.get(child, child)
            for name, parameter in original._parameters.items():
                if parameter is None:
                    replica._parameters[name] = None
                else:
                    setattr(replica, name, parameter.detach().clone())
        assert torch.allclose(replicas[ffn](x), expected, atol=1e-6)


def projections(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".mlp." in n}


@pytest.mark.parametrize("name", ["two petals", "gates", "overlapping"])
def test_hooks_see_what_enters_every_projection(name, tokens):
    """As a calibrating quantiser has them, whose ranges are those of input channels."""
    model = MODELS[name]()
    entering, outputs = {}, {}
    paths = {module: path for path, module in model.named_modules()}

    def note(module, args, out):
        entering[paths[module]] = args[0].flatten(0, -2)
        outputs[paths[module]] = out.flatten(0, -2).shape[0]

    with torch.no_grad():
        expected = model(tokens.input_ids).logits
        for module in [*blocks(model), *projections(model).values()]:
            module.register_forward_hook(note)
        assert torch.allclose(model(tokens.input_ids).logits, expected, atol=1e-5)
        assert entering.keys() >= projections(model).keys()
        for ffn in blocks(model):
            path, x_TD = paths[ffn], entering[paths[ffn]]
            for part in ("gate_proj", "up_proj"):
                assert torch.equal(entering[f"{path}.{part}"], x_TD)
            found, wanted = entering[f"{path}.down_proj"], running(ffn, x_TD)
            assert outputs[f"{path}.down_proj"] == len(x_TD)
            assert torch.allclose(found.abs().amax(0), wanted.abs().amax(0), atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("name", ["one petal", "gates"])
def test_torchao_quantises_a_result(name, tokens):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = MODELS[name]()
    with torch.no_grad():
        expected = model(tokens.input_ids).logits
        kinds = {type(m.weight) for m in projections(model).values()}
        quantize_(model, Int8WeightOnlyConfig())
        assert {type(m.weight) for m in projections(model).values()} != kinds
        found = model(tokens.input_ids).logits
    assert (found - expected).norm() < 0.1 * expected.norm()


# --- a device that refuses tensors of another ----------------------------------------------------


def test_the_other_device_refuses_tensors_of_this_one():
    with faraway.device():
        x = torch.ones(3).to(faraway.FAR)
        assert (x + x).tolist() == [2, 2, 2]
        assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2], "numbers may mix"
        with pytest.raises(faraway.Mixed):
            x + torch.ones(3)
        with pytest.raises(faraway.Mixed):
            torch.nn.functional.linear(x, torch.ones(2, 3))


@pytest.mark.usefixtures("spilling")
def test_what_is_spilled_comes_back_on_its_device():
    with faraway.device():
        spill = SpilledList(1 << 30)
        spill.append(torch.arange(4.0).to(faraway.FAR))
        spill.append(torch.arange(3.0))
        assert [x.device for x in spill] == [faraway.FAR, torch.device("cpu")]
        spill.replace(1, torch.ones(3).to(faraway.FAR))
        assert spill[1].device == faraway.FAR
        assert spill[1].tolist() == [1, 1, 1]
        spill.clear()


@pytest.mark.usefixtures("spilling")
@pytest.mark.parametrize("follow", [False, True])
def test_a_stream_on_another_device(follow, padded):
    def seen(model):
        stream = stream_of(model, padded, follow=follow)
        found = []
        for site in stream:
            found += [h.cpu() for _, h in site.activations()]
            found += [y.cpu() for y in site.targets() if y is not None]
            found += [s.cpu() for s in site.residuals()]
        return found

    expected = seen(tiny_model("llama"))
    with faraway.device():
        found = seen(faraway.put_far(tiny_model("llama")))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def experts_on_cpu(model_type):
    model = tiny_moe(model_type, experts=4)
    model.config._experts_implementation = "eager"
    return model


@pytest.mark.usefixtures("spilling")
def test_experts_are_observed_on_another_device(tokens):
    def seen(model):
        return [statistics(site) for site in routed_sites(model, tokens, follow=True)]

    expected = seen(experts_on_cpu("qwen2_moe"))
    with faraway.device():
        found = seen(faraway.put_far(experts_on_cpu("qwen2_moe")))
    for ours, theirs in zip(found, expected, strict=True):
        for name, tensor in theirs.items():
            mine = ours[name]
            assert type(mine) is Tensor, f"{name} stayed on the device"
            assert torch.allclose(mine.float(), tensor.float(), rtol=1e-3, atol=1e-4), name


@pytest.mark.usefixtures("spilling")
@pytest.mark.parametrize("search", ["greedy", "ppl"])
def test_condensing_on_another_device(search, tokens):
    options = {"metric": "ppl"} if search == "ppl" else {"layer_search": search}

    def decided(model):
        text = tokens.rows(slice(2))
        config = CondenseConfig(count=2, **options)
        result = moesaic.condense(model, config, text=text, inplace=True)
        return result.plan.layers, result.analyses

    layers, analyses = decided(experts_on_cpu("qwen2_moe"))
    with faraway.device():
        found, ours = decided(faraway.put_far(experts_on_cpu("qwen2_moe")))
    assert found.keys() == layers.keys()
    for i, seen in analyses.items():
        assert ours[i]["divergence"] == pytest.approx(seen["divergence"], abs=1e-4)


# --- which device --------------------------------------------------------------------------------


def test_each_of_several_processes_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_device("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [own_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]
    model = tiny_model("llama")
    job = Job(RunArgs(model=model, device="cuda"), dense_arch)
    assert job.device == "cuda:3"


def test_a_model_that_is_somewhere_stays_there(tokens):
    with faraway.device():
        model = faraway.put_far(tiny_model("llama"))
        job = Job(RunArgs(model=model), dense_arch)
        assert torch.device(job.device) == faraway.FAR
        assert torch.device(job.return_device) == faraway.FAR


def test_a_model_whose_weights_are_elsewhere_is_refused(tokens):
    model = tiny_model("llama")
    cpu_offload(model, execution_device="cpu")
    with pytest.raises(MoesaicError, match="Pass its name or its folder"):
        moesaic.carve(model, text=tokens)


def test_streaming_leaves_the_hooks_of_a_device_map(tokens, tmp_path):
    model = tiny_model("llama")
    device_map = {"": "cpu"}
    dispatch_model(model, device_map, main_device="cpu", force_hooks=True)
    layers = model.model.layers
    for layer in layers:
        layer.forward = layer.forward  # as a hook on each layer stands
    before = [layer.__dict__["forward"] for layer in layers]
    for _ in stream_of(model, tokens):
        pass
    assert [layer.__dict__.get("forward") for layer in layers] == before


class Seen(Exception):
    """Training got as far as its arguments."""


@pytest.mark.parametrize(
    ("asked", "expected"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cuda:3", "cuda:3")]
)
def test_one_process_trains_on_the_one_gpu_that_was_asked_for(asked, expected, monkeypatch, tokens):
    """On a machine of four GPUs: not the first one whatever was asked for, and no DataParallel."""
    chosen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)

    def trainer(self, *, args, **_):
        self.asked = args
        raise Seen(args)

    monkeypatch.setattr("moesaic.train.loop._Loop.__init__", trainer)
    model = tiny_model("llama")
    every, once = dict(model.named_parameters()), {"steps": 1, "batch": 1, "accumulate": 1}
    schedule = Schedule(**once, lr=1e-3, warmup=0, weight_decay=0, seed=0, save_every=1)
    with pytest.raises(Seen) as raised:
        train(model, tokens.examples(), schedule, trainable=every, device=asked)
    (arguments,) = raised.value.args
    assert arguments.n_gpu == 1, "transformers would wrap the model in nn.DataParallel"
    assert arguments.device == torch.device(expected)
    assert torch.device(chosen[-1]) == torch.device(expected), "accelerate takes the current one"


# --- one model at a time -------------------------------------------------------------------------


class Held:
    """Counts the models that are alive when another one is loaded."""

    def __init__(self, monkeypatch):
        self.most = 0
        self.alive: list[Any] = []
        first = Source.load

        def load(source, *given, **options):
            model = first(source, *given, **options)
            self.count(model)
            return model

        monkeypatch.setattr(Source, "load", load)

    def count(self, model):
        gc.collect()
        self.alive = [*(ref for ref in self.alive if ref() is not None), weakref.ref(model)]
        self.most = max(self.most, len(self.alive))


@pytest.mark.parametrize("room", [2, 1, 0])
def test_measuring_holds_both_models_only_if_there_is_room(
    room, llama_folder, tmp_path, monkeypatch
):
    original = resolve(str(llama_folder))
    weights = sum(p.nbytes for p in InMemory.of(original).shape.parameters())
    free = int((room + 0.5) * ROOM * weights)
    text = moesaic.Calibration(pages("calibration"), samples=8, length=32)
    result = moesaic.carve(str(llama_folder), calibration=text)
    result.save(tmp_path / "out")
    held = Held(monkeypatch)
    monkeypatch.setattr("moesaic.metrics.evaluate.free_bytes", lambda _: free)
    compared = {"again": lambda: original.load()}
    settings = Evaluation(pages("evaluation"), max_tokens=512, new_tokens=2, rounds=1)
    read = measured_text(original, settings)
    measured = Measurement(tmp_path / "out", original, settings, read).figures(compared)
    assert held.most == room
    assert measured["scores"]["result"]["kl"] > 0
    assert measured["evaluation"].get("layer_by_layer", False) is (room < 2)
    if room:
        assert measured["speed_interleaved"] is (room == 2)
        assert measured["speed_ratio"]["decode"] > 0
        assert {*measured["generation"]} == {"prompt", "original", "result", "again"}
    else:
        assert not {"speed", "generation"} & measured.keys()


@pytest.mark.parametrize("free", [1 << 60, 1 << 10], ids=["room for both", "room for one"])
def test_bench_holds_both_models_only_if_there_is_room(free, llama_folder, moe_folder, monkeypatch):
    held = Held(monkeypatch)
    monkeypatch.setattr("moesaic.metrics.evaluate.free_bytes", lambda _: free)
    found = bench(str(moe_folder), str(llama_folder), length=16, new_tokens=2, rounds=1)
    assert held.most == (2 if free > 1 << 30 else 1)
    assert found["ratio"]["decode"]["ratio"] > 0


def test_free_memory_is_this_machines():
    assert 0 < free_bytes("cpu") < 1 << 50


def test_some_tests_are_for_gpus():
    """``pytest -m gpu``, of which CONTRIBUTING.md speaks, selects something."""
    marks = test_gpu.pytestmark if isinstance(test_gpu.pytestmark, list) else [test_gpu.pytestmark]
    assert "gpu" in {mark.name for mark in marks}
    assert sum(name.startswith("test_") for name in vars(test_gpu)) >= 6


@pytest.mark.parametrize("uneven", [False, True], ids=["carved", "pruned unevenly"])
def test_saved_results_load_with_parts_on_disk(uneven, tokens, tmp_path):
    """As a user loads what is larger than the device: ``device_map="auto"``."""
    if uneven:
        config = PruneConfig(keep=5, allocate="layers")
        result = moesaic.prune(tiny_moe("mixtral"), config, text=tokens)
    else:
        result = moesaic.carve(tiny_model("llama"), text=tokens)
    folder = result.save(tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    size = sum(p.numel() * p.element_size() for p in whole.parameters())
    room = {"max_memory": {"cpu": size * 2 // 3}, "offload_folder": tmp_path / "offload"}
    parts = AutoModelForCausalLM.from_pretrained(folder, device_map="auto", **room).eval()
    assert "disk" in parts.hf_device_map.values()
    with torch.no_grad():
        expected = whole(tokens.input_ids).logits
        assert torch.allclose(parts(tokens.input_ids).logits, expected, atol=1e-5)
