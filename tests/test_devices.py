"""Where things are computed: offloaded and hooked models, spilled tensors, several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from builders import EQUAL, carved_layer, converted, tiny_model
from torch import Tensor, nn

from moesaic.nn import CarvedFFN
from moesaic.nn.overlapping import OverlappingFFN

# --- offloaded and hooked results ----------------------------------------------------------------

ROUTINGS: dict[str, dict[str, Any]] = {
    "one petal": {},
    "two petals": {"top_k": 2},
    "backbone": {"top_k": 0},
}


def carved(kind: str = "one petal") -> Any:
    """A model of which every layer is carved."""
    layers = {i: carved_layer(*shape, seed=i, **ROUTINGS[kind]) for i, shape in EQUAL.items()}
    return converted(tiny_model("llama"), layers)


def weighed() -> Any:
    """A model whose petals have gates (DSMoE's)."""
    model = carved()
    for ffn in blocks(model):
        generator = torch.Generator().manual_seed(1)
        twin = CarvedFFN(
            {name: getattr(ffn, name) for name in ffn._projections},
            ffn.act_fn,
            ffn.names,
            32,
            ffn.backbone,
            ffn.petals,
            1,
            "threshold",
            gate={"tau": 0.5},
        )
        twin.router.weight.data = torch.randn(4, 32, generator=generator)
        replace(model, ffn, twin)
    return model.eval()


def overlapping() -> Any:
    """A model whose experts share neurons (ToMoE's)."""
    model = carved()
    for number, ffn in enumerate(blocks(model)):
        projections = {name: getattr(ffn, name) for name in ffn._projections}
        twin = OverlappingFFN(projections, ffn.act_fn, ffn.names, 32, 3, 40)
        generator = torch.Generator().manual_seed(number)
        rows = [torch.randperm(64, generator=generator)[:40].sort().values for _ in range(3)]
        twin.experts = torch.stack(rows)
        twin.router.weight.data = torch.randn(3, 32, generator=generator)
        twin.form = "moe"
        replace(model, ffn, twin)
    return model.eval()


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            if child is old:
                setattr(module, name, new)


def blocks(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, CarvedFFN)]


MODELS = {
    "one petal": carved,
    "two petals": lambda: carved("two petals"),
    "backbone": lambda: carved("backbone"),
    "gates": weighed,
    "overlapping": overlapping,
}


def on_cpu(model: Any, folder: Any) -> None:
    cpu_offload(model, execution_device="cpu")


def on_disk(model: Any, folder: Any) -> None:
    disk_offload(model, str(folder), execution_device="cpu")


def by_map(model: Any, folder: Any) -> None:
    """One layer stays, one waits in memory, one on disk, as ``device_map="auto"`` puts them."""
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places = ["cpu", "disk", "cpu", "disk"]
    device_map |= {f"model.layers.{i}": place for i, place in enumerate(places)}
    device_map["model.rotary_emb"] = "cpu"
    dispatch_model(model, device_map, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("offload", [on_cpu, on_disk, by_map], ids=lambda f: f.__name__)
def test_offloaded_results_compute_the_same(
    name: str, offload: Any, tokens: Any, tmp_path: Any
) -> None:
    model = MODELS[name]()
    with torch.no_grad():
        expected = model(tokens.input_ids).logits
        offload(model, tmp_path)
        assert any(p.is_meta for p in model.parameters()), "nothing was offloaded"
        found = model(tokens.input_ids).logits
        one = model(tokens.input_ids[:1, :1]).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(one, expected[:1, :1], atol=1e-5)


def test_a_replica_without_parameters_of_its_own_computes_the_same(tokens: Any) -> None:
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


def projections(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".mlp." in n}


class Ranges:
    """What a calibrating quantiser keeps: the largest size of each projection's input channels."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Tensor] = {}
        self.outputs: dict[str, int] = {}
        self.handles = []
        for name, module in projections(model).items():
            self.handles.append(module.register_forward_pre_hook(self._before(name)))
            self.handles.append(module.register_forward_hook(self._after(name)))

    def _before(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            size = args[0].detach().abs().flatten(0, -2).amax(0)
            self.seen[name] = torch.maximum(self.seen.get(name, size), size)

        return hook

    def _after(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            self.outputs[name] = self.outputs.get(name, 0) + out.flatten(0, -2).shape[0]

        return hook

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("name", MODELS)
def test_hooks_see_what_enters_every_projection(name: str, tokens: Any) -> None:
    model = MODELS[name]()
    entering: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, CarvedFFN):
            module.register_forward_pre_hook(
                lambda _, args, path=path: entering.update({path: args[0].flatten(0, -2)})
            )
    with torch.no_grad():
        expected = model(tokens.input_ids).logits
        ranges = Ranges(model)
        assert torch.allclose(model(tokens.input_ids).logits, expected, atol=1e-5)
        ranges.close()
        assert ranges.seen.keys() == projections(model).keys()
        for path, x_TD in entering.items():
            ffn = model.get_submodule(path)
            assert torch.equal(ranges.seen[f"{path}.gate_proj"], x_TD.abs().amax(0))
            assert torch.equal(ranges.seen[f"{path}.up_proj"], x_TD.abs().amax(0))
            assert ranges.outputs[f"{path}.down_proj"] == len(x_TD)
            assert torch.allclose(
                ranges.seen[f"{path}.down_proj"], running(ffn, x_TD).abs().amax(0), atol=1e-5
            )


def running(ffn: Any, x_TD: Tensor) -> Tensor:
    """What enters the down projection, neuron by neuron, idle ones zero (T, M)."""
    h_TM = ffn.act_fn(ffn.gate_proj(x_TD)) * ffn.up_proj(x_TD)
    on_TM = torch.zeros_like(h_TM)
    on_TM[:, : ffn.backbone] = 1
    for t, x_D in enumerate(x_TD):
        if ffn.top_k == 0:
            continue
        given = ffn.router(x_D[None])[0]
        if ffn.weighs:
            active = int((given > 0).sum()) or 1
            values = {e: float(g) * len(given) / active for e, g in enumerate(given)}
        else:
            values = dict.fromkeys(given.tolist(), 1.0)
        for e, value in values.items():
            if isinstance(ffn, OverlappingFFN):
                on_TM[t, ffn.experts[e]] = value
            else:
                on_TM[t, slice(*ffn.slices[e])] = value
    return h_TM * on_TM


def test_a_calibrating_quantiser_finds_its_scales(tokens: Any) -> None:
    """Static int8: ranges from one pass, then every projection's input rounded by hooks."""
    model = carved()
    with torch.no_grad():
        expected = model(tokens.input_ids).logits
        ranges = Ranges(model)
        model(tokens.input_ids)
        ranges.close()
        rounded: set[str] = set()
        for name, module in projections(model).items():
            step = ranges.seen[name].max() / 127

            def before(
                _: nn.Module, args: tuple[Tensor, ...], name: str = name, step: Tensor = step
            ) -> Tensor:
                rounded.add(name)
                return (args[0] / step).round() * step

            module.register_forward_pre_hook(before)
        found = model(tokens.input_ids).logits
    assert rounded == projections(model).keys()
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("name", ["one petal", "two petals", "gates"])
def test_torchao_quantises_a_result(name: str, tokens: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = MODELS[name]()
    with torch.no_grad():
        expected = model(tokens.input_ids).logits
        kinds = {type(m.weight) for m in projections(model).values()}
        quantize_(model, Int8WeightOnlyConfig())
        assert {type(m.weight) for m in projections(model).values()} != kinds
        found = model(tokens.input_ids).logits
    assert (found - expected).norm() < 0.1 * expected.norm()
