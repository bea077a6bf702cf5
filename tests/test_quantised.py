"""Checkpoints of few bits: values as transformers has them, bytes as they were."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from builders import (
    altered,
    applied,
    drawn,
    edited,
    equal,
    int4_config,
    loaded,
    logits,
    opened,
    quantise,
    quantised_experts,
    tiny_config,
    tiny_moe,
    weights,
    with_others,
)
from released import deepseek_v4
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moesaic import MoesaicError, PruneConfig, SlimConfig, Tokens
from moesaic.api import apply, evaluate, verb
from moesaic.arch.lookup import dense_arch, moe_arch
from moesaic.io.formats import BlockFp8, CompressedTensors, Mxfp4, Mxfp4Experts, e4m3
from moesaic.io.quantised import Packed, quantization_of
from moesaic.io.source import Source, resolve
from moesaic.plans.cut import CutLayer
from moesaic.result import save_applied

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
INT4 = int4_config(group=16)
ERRORS = {
    "down_proj.weight_scale_inv": 0.04,
    "down_proj_scales": 0.15,
    "down_proj.weight_scale": 0.15,
    "w2.scale": 0.15,
}
"""By the name of a weight's scales, the share of it that its rounding may cost."""
KEPT = torch.tensor([0, 2, 3, 5, 6, 7])
IDS = Tokens(torch.arange(1, 9)[None])
TEXT = Tokens(torch.randint(1, 384, (8, 32), generator=torch.Generator().manual_seed(3)))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A DeepSeek-V3 in FP8; its first routed layer and its attention are in bfloat16."""
    folder = tmp_path_factory.mktemp("fp8") / "base"
    tiny_moe("deepseek_v3", moe_intermediate_size=32).save_pretrained(folder)

    def chosen(name, tensor):
        matrix = ".mlp." in name and tensor.dim() == 2
        return matrix and ".gate." not in name and "layers.1." not in name

    return quantise(folder, BlockFp8(FP8), chosen)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """A gpt-oss as it is published: experts in MXFP4."""
    model = tiny_moe("gpt_oss", hidden_size=64, intermediate_size=64)
    return quantised_experts(model, tmp_path_factory.mktemp("mxfp4") / "base", Mxfp4Experts(MXFP4))


@pytest.fixture(scope="module")
def int4(tmp_path_factory):
    """A Qwen3-MoE as llm-compressor writes it: experts in groups of int4."""
    model = tiny_moe("qwen3_moe", moe_intermediate_size=32)
    folder = tmp_path_factory.mktemp("int4") / "base"
    return quantised_experts(model, folder, CompressedTensors(INT4))


@pytest.fixture(scope="module")
def fp4(tmp_path_factory):
    """A DeepSeek-V4 as it is published: experts in FP4, other matrices in FP8."""
    return deepseek_v4(tmp_path_factory.mktemp("fp4") / "base")


@pytest.fixture(params=["fp8", "mxfp4", "int4", "fp4"])
def quantised(request):
    return request.getfixturevalue(request.param)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def plainly_loaded(folder):
    """The model as transformers alone has it, with plain weights."""
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = {**quantization_of(config), "dequantize": True}
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, output_loading_info=True
    )
    assert not info["missing_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def routed_applied(folder, out, make, **options):
    """A checkpoint with every routed layer converted, written from disk."""
    source = resolve(str(folder))
    model = source.load()
    arch = moe_arch(model.config)
    layers = {i: make(arch, arch.mixture(arch.layers(model)[i])) for i in arch.moe_layers(model)}
    applied(source, model, layers, out, **options)
    return model, arch, layers


# --- the formats ---------------------------------------------------------------------------------


def test_every_code_of_fp8_is_what_torch_reads():
    codes = torch.arange(1 << 8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(e4m3(codes), codes.half(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(256, 128), (200, 130), (3, 130, 200)])
def test_blocks_that_are_cut_off_have_their_scale(shape):
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    wide = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
    values = BlockFp8({"weight_block_size": [128, 128]}).values({"": codes, "_s": scales})
    assert torch.equal(values, codes.float() * wide[..., : shape[-2], : shape[-1]])


def test_values_are_transformers():
    raw = torch.randint(0, 256, (3, 6, 2, 16), generator=torch.Generator().manual_seed(0))
    scales = torch.randint(110, 140, (3, 6, 2), generator=torch.Generator().manual_seed(1))
    parts = {"_blocks": raw.to(torch.uint8), "_scales": scales.to(torch.uint8)}
    wanted = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.bfloat16)
    assert torch.equal(Mxfp4Experts(MXFP4).values(parts).bfloat16(), wanted)
    form = BlockFp8(FP8)
    weight = drawn(32, 48) * torch.logspace(-3, 3, 48)
    mine = form.parts(weight, {"": weight, "_scale_inv": torch.zeros(1, 1)})

    class Quantiser:
        class quantization_config:
            weight_block_size, scale_fmt = (16, 16), "float"

    theirs = Fp8Quantize(Quantiser())._quantize_one("w.weight", weight)
    torch.testing.assert_close(mine["_scale_inv"], theirs["w.weight_scale_inv"], rtol=1e-6, atol=0)
    for parts in (mine, {"": theirs["w.weight"], "_scale_inv": theirs["w.weight_scale_inv"]}):
        wanted = Fp8Dequantize(None)._dequantize_one(*parts.values(), output_dtype=torch.float32)
        assert torch.equal(form.values(parts), wanted)


LAYOUTS = {
    "int4 in groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}),
    "int4 in groups, with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "int4 a row": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int8 in words": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8 a row": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 in blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressed_tensors_by_its_own_package(layout):
    """Their values of our bytes, our values of theirs; chosen rows and groups carry their codes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    name, weights = LAYOUTS[layout]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    form = CompressedTensors({**INT4, "format": name, "config_groups": groups})
    theirs = BaseCompressor.get_value_from_registry(name)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    rows, columns = 32, 64
    grids = {"group": (rows, columns // 16), "channel": (rows, 1), "tensor": (1,), "block": (2, 2)}
    grid = grids[weights["strategy"]]
    values = drawn(rows, columns) * torch.logspace(-1, 1, columns)
    scale = torch.rand(grid, generator=torch.Generator().manual_seed(1)).bfloat16() + 0.1
    state = {"weight": values, "weight_scale": scale}
    if not weights.get("symmetric", True):
        state["weight_zero_point"] = torch.randint(-3, 3, grid).to(torch.int8)
    stored = theirs.compress(state, scheme)
    parts = {key.removeprefix("weight"): tensor for key, tensor in stored.items()}
    ends = (*(form.ends if "_packed" in parts else form.plain), *parts.keys() & {form.zero})
    assert [*form.weights(types(parts))] == [("up.weight", ends)]
    assert torch.equal(form.values(parts).bfloat16(), theirs.decompress(stored, scheme)["weight"])
    mine = form.parts(values, parts)
    assert {end: t.shape for end, t in mine.items()} == {end: t.shape for end, t in parts.items()}
    again = theirs.decompress({f"weight{end}": t for end, t in mine.items()}, scheme)["weight"]
    assert torch.equal(form.values(mine).bfloat16(), again)
    assert (form.values(mine) - values).norm() / values.norm() < 0.16
    carried = Packed(form, mine)
    for axis, order in ((0, [*range(16, 32), *range(16)]), (1, [*range(32, 64)])):
        some = carried.index_select(axis, torch.tensor(order))
        assert torch.equal(form.values(some.parts), some.as_subclass(torch.Tensor)), axis
    check_chosen(form, mine)


@pytest.mark.parametrize(
    ("layout", "largest"),
    [
        *(("int4 in groups", n) for n in range(1, 9)),
        ("int4 a row", 7),
        ("int8", 127),
        ("int8", 128),
    ],
)
def test_rounding_again_changes_nothing(layout, largest):
    """Also where the largest codes of groups are gone, as slim leaves them: 6.7 % were lost."""
    name, weights = LAYOUTS[layout]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    form = CompressedTensors({**INT4, "format": name, "config_groups": groups})
    generator = torch.Generator().manual_seed(largest)
    codes = torch.randint(1 - largest, largest, (32, 64), generator=generator).to(torch.int8)
    codes[:, ::16] = -largest
    scales = torch.rand(32, 4 if "groups" in layout else 1, generator=generator).bfloat16() + 0.1
    words = {"_packed": codes, "_shape": torch.zeros(2, dtype=torch.int64)}
    like = {"_scale": scales, **({"": codes} if layout == "int8" else words)}
    parts = form._stored(codes, scales, None, like)
    once = form.values(parts)
    assert torch.equal(form.values(form.parts(once, parts)), once)


def test_scales_stay_powers_of_two_where_the_config_says_so():
    """DeepSeek-V3.1 stores them as float32."""
    form = BlockFp8({**FP8, "scale_fmt": "ue8m0"})
    like = {form.ends[0]: drawn(64, 32), form.ends[1]: torch.zeros(1, 1)}
    scales = form.parts(drawn(64, 32), like)[form.ends[1]]
    assert scales.dtype == torch.float32
    assert torch.equal(scales.log2(), scales.log2().round())


def check_chosen(form, parts):
    """Rows and columns across blocks are those of the values, twice and in no order."""
    values = form.values(parts)
    for axis in range(-values.dim(), 0):
        order = torch.tensor([3, 0, values.shape[axis] - 1, 3])[: values.shape[axis] + 1]
        order = order.clamp(max=values.shape[axis] - 1)
        wanted = values.index_select(axis, order)
        assert torch.equal(Packed(form, parts).index_select(axis, order) + 0, wanted), axis


def types(parts):
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.int32: "I32"}
    return {f"up.weight{end}": names.get(part.dtype, "BF16") for end, part in parts.items()}


@pytest.mark.parametrize("form", [BlockFp8(FP8), Mxfp4Experts(MXFP4), Mxfp4(FP8)])
def test_what_a_format_holds_it_gives_back(form):
    """Rounding errors are those of the codes; values that are codes times scales come back."""
    values = drawn(2, 64, 32)
    like = {form.ends[0]: values, form.ends[1]: torch.zeros(1, 1)}
    once = form.values(form.parts(values, like))
    eight = type(form) is BlockFp8
    step = 2**-4 if eight else 0.25
    assert ((once - values).abs() <= step * values.abs().amax() + 1e-6).all()
    assert (once - values).norm() / values.norm() < (0.04 if eight else 0.15)
    check_chosen(form, form.parts(values, like))
    again = form.values(form.parts(once, like))
    torch.testing.assert_close(again, once, rtol=1e-6 if eight else 0, atol=0)


def test_mxfp4_rounds_to_the_nearest():
    """Every code is at most half a step away, against all sixteen."""
    values = drawn(1, 32, 40)
    form = Mxfp4Experts(MXFP4)
    parts = form.parts(values, {})
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    every = torch.cat([codes, -codes])
    scale = torch.exp2(parts["_scales"].float() - 127).transpose(1, 2)  # (1, 1, 40)
    distance = (every.view(-1, 1, 1, 1) * scale - values).abs().amin(0)
    torch.testing.assert_close((form.values(parts) - values).abs(), distance)


def test_a_stack_is_dequantised_expert_by_expert():
    """One of it alone, and all where it becomes a type."""
    form, read = Mxfp4Experts(MXFP4), []
    packed, values = Packed(form, form.parts(drawn(3, 64, 8), {})), form.values
    form.values = lambda parts: read.append(len(parts["_blocks"])) or values(parts)
    for i in (1, -1):
        assert torch.equal(packed[i] + 0, values(packed.parts)[i])
    assert read == [1, 1]
    assert torch.equal(packed.to(torch.bfloat16), values(packed.parts).bfloat16())
    assert read == [1] * 5


def test_a_stack_is_quantised_expert_by_expert(monkeypatch):
    """Codes take several times the memory of the values until they are packed."""
    rounded, sizes = Mxfp4._codes, []
    monkeypatch.setattr(
        Mxfp4, "_codes", lambda self, x, like: sizes.append(x.numel()) or rounded(self, x, like)
    )
    Mxfp4Experts(MXFP4).parts(drawn(3, 64, 8), {})
    assert sizes == [64 * 8] * 3


def test_choosing_carries_bytes():
    """Experts and whole blocks by their bytes; else by value alone."""
    form = Mxfp4Experts(MXFP4)
    packed = Packed(form, form.parts(drawn(3, 64, 8), {}))
    for axis, order in ((0, [2, 0]), (2, [7, 1, 3]), (1, list(range(32, 64)))):
        chosen = packed.index_select(axis, torch.tensor(order))
        assert torch.equal(form.values(chosen.parts), chosen.as_subclass(torch.Tensor))
    assert type(packed.index_select(1, torch.arange(1, 33))) is torch.Tensor
    assert type(packed + 1) is type(packed.float()) is torch.Tensor
    rows = torch.stack([row.index_select(1, torch.tensor([i])) for i, row in enumerate(packed)])
    assert torch.equal(form.values(rows.parts), rows.as_subclass(torch.Tensor))
    rows.index_fill_(0, torch.tensor([1]), 0)
    assert rows.format is None


# --- checkpoints ---------------------------------------------------------------------------------


def test_read_as_transformers_reads_it(quantised):
    model = plainly_loaded(quantised)
    naming = resolve(str(quantised)).naming
    state = model.state_dict()
    assert {*naming.in_memory.values()} == {*state}
    ours = resolve(str(quantised)).load().state_dict()
    for name, wanted in state.items():
        found = naming.read(name, lambda tensor: tensor.to(torch.bfloat16))
        assert torch.equal(found, wanted.to(torch.bfloat16)), name
        assert torch.equal(ours[name].to(torch.bfloat16), found), name


def test_pruning_keeps_every_byte(quantised, tmp_path):
    _, arch, _ = routed_applied(quantised, tmp_path / "out", lambda *_: CutLayer(KEPT))
    source, found = (load_file(f / "model.safetensors") for f in (quantised, tmp_path / "out"))
    kept = KEPT.tolist()
    for name, tensor in found.items():
        before, experts, rest = name.partition(".experts.")
        number, _, leaf = rest.partition(".")
        if experts and number.isdigit():
            wanted = source[f"{before}.experts.{kept[int(number)]}.{leaf}"]
        elif name.endswith("tid2eid"):  # a new table
            continue
        elif experts or "mlp.router" in name or ".gate." in name:
            wanted = source[name].view(torch.uint8)[KEPT] if experts else source[name][KEPT]
            tensor = tensor.view(torch.uint8) if experts else tensor
        else:
            wanted = source[name]
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), name
    said, found = (config_of(f)["quantization_config"] for f in (quantised, tmp_path / "out"))
    assert said.items() <= found.items()
    again = plainly_loaded(tmp_path / "out")
    assert arch.mixture(arch.layers(again)[arch.moe_layers(again)[0]]).count == 6


@pytest.mark.parametrize(("keep", "width", "warns"), [(0.52, 64, False), (0.625, 80, True)])
def test_experts_keep_whole_blocks_where_these_come_near(keep, width, warns, tmp_path, caplog):
    """Other widths are stored in bfloat16, which is said."""
    model = tiny_moe("qwen3_moe", moe_intermediate_size=128)
    form = BlockFp8({**FP8, "weight_block_size": [32, 32]})
    folder = quantised_experts(model, tmp_path / "base", form)
    config = SlimConfig(keep=keep, score="magnitude", refit=False)
    plan = verb("slim", str(folder), config, calibration=TEXT).plan
    assert {layer.width for layer in plan.layers.values()} == {width}
    assert caplog.text.count("no whole blocks of 32") == warns, "once for all layers"


@pytest.mark.parametrize(
    ("form", "columns", "model_type", "width"),
    [
        (BlockFp8(FP8), 16, "qwen3_moe", "moe_intermediate_size"),
        (Mxfp4Experts(MXFP4), 32, "gpt_oss", "intermediate_size"),
        (CompressedTensors(INT4), 16, "qwen3_moe", "moe_intermediate_size"),
    ],
)
def test_slimming_keeps_columns_with_those_whose_scale_they_share(
    form, columns, model_type, width, tmp_path
):
    """More values are kept than if neurons were kept in rising order."""
    assert form.columns == columns
    folder = quantised_experts(tiny_moe(model_type, **{width: 128}), tmp_path / "base", form)
    source = Source("base", folder)
    config = SlimConfig(keep=0.75, score="random", refit=False)
    plan = verb("slim", str(folder), config, calibration=TEXT).plan
    model, arch = source.load(), moe_arch(source.config)
    rising = {
        i: replace(layer, neurons_EW=layer.neurons_EW.sort().values)
        for i, layer in plan.layers.items()
    }
    found = {}
    for way, layers in (("in groups", plan.layers), ("rising", rising)):
        (tmp_path / way).mkdir()
        save_applied(source, replace(plan, layers=layers), tmp_path / way)
        again = Source(way, tmp_path / way).load()
        same, lost = [], []
        for i, layer in layers.items():
            old, new = (arch.mixture(arch.layers(m)[i]) for m in (model, again))
            for e, order_W in enumerate(layer.neurons_EW):
                wanted = old.weights_of(e)[-1].index_select(1, order_W)
                error = new.weights_of(e)[-1] - wanted
                same.append((error == 0).float().mean().item())
                lost.append((error.norm() / wanted.norm()).item())
        found[way] = torch.tensor([same, lost]).mean(1)
    assert found["in groups"][0] > found["rising"][0]
    assert found["in groups"][1] < 0.9 * found["rising"][1]


@pytest.mark.parametrize("aligned", [True, False])
def test_slimming_keeps_whole_blocks(quantised, aligned, tmp_path):
    def slim(arch, view):
        width, half = view.width, view.width // 2
        order = torch.arange(half) + (half if aligned else 1)
        shared = torch.arange(half) if arch.shared_count else None
        return CutLayer(torch.arange(8), order.repeat(8, 1), width, shared_S=shared)

    model, arch, layers = routed_applied(quantised, tmp_path / "out", slim)
    source, out = (resolve(str(f)).checkpoint._stored for f in (quantised, tmp_path / "out"))
    assert {n.replace("experts", "") for n in out} <= {n.replace("experts", "") for n in source}
    again = Source("out", tmp_path / "out").load()
    i = arch.moe_layers(model)[-1]
    old, new = (arch.mixture(arch.layers(m)[i]) for m in (model, again))
    rows = layers[i].neurons_EW[3]
    for before, after, axis in zip(old.weights_of(3), new.weights_of(3), (0, 0, 1), strict=True):
        wanted = before.index_select(axis, rows)
        if aligned:
            assert torch.equal(after, wanted)
        else:
            assert (after - wanted).norm() / wanted.norm() < 0.16


def test_new_weights_go_into_the_format(quantised, tmp_path):
    down = {}

    def refitted(arch, view):
        down_E = view.experts.down_proj.detach().float()[KEPT] * 1.1
        down[len(down)] = down_E
        return CutLayer(KEPT, down_E=down_E)

    model, arch, _ = routed_applied(quantised, tmp_path / "out", refitted)
    again = Source("out", tmp_path / "out").load()
    i = arch.moe_layers(model)[-1]
    found = arch.mixture(arch.layers(again)[i]).experts.down_proj.float()
    wanted = down[len(down) - 1]
    error = (found - wanted).norm() / wanted.norm()
    stored = resolve(str(tmp_path / "out")).checkpoint._stored
    (error_of,) = {ERRORS[end] for end in ERRORS if any(name.endswith(end) for name in stored)}
    assert 0 < error < error_of


def test_blocks_that_do_not_divide_stay_plain(fp8, tmp_path):
    """A width of 24 in blocks of 16: all of an expert in bfloat16; the config names the modules."""

    def slim(arch, view):
        shared = torch.arange(24)
        return CutLayer(torch.arange(8), torch.arange(24).repeat(8, 1), 32, shared_S=shared)

    model, arch, _ = routed_applied(fp8, tmp_path / "out", slim)
    before, after = (config_of(f)["quantization_config"] for f in (fp8, tmp_path / "out"))
    listed = after[BlockFp8.plainly]
    assert "model.layers.2.mlp.experts" in listed
    assert "model.layers.1.mlp.experts" not in listed  # was plain before
    assert {*before.get(BlockFp8.plainly, ())} <= {*listed}
    expert = "model.layers.2.mlp.experts.0."
    stored = {n: t.dtype for n, t in weights(tmp_path / "out").items() if n.startswith(expert)}
    assert {*stored.values()} == {torch.bfloat16}
    again = Source("out", tmp_path / "out").load()
    assert torch.isfinite(logits(again, IDS)).all()
    old, new = (arch.mixture(arch.layers(m)[2]).weights_of(3) for m in (model, again))
    assert torch.equal(new[1], old[1][:24])


def test_matrices_that_were_cut_off_stay_in_blocks():
    """Rows or columns that blocks did not divide before; others that they no longer divide do
    not."""
    form, values = BlockFp8(FP8), torch.randn(40, 24)

    def stored(*shape):
        scales = torch.ones(-(-shape[0] // 16), -(-shape[1] // 16))
        return {"": torch.zeros(shape).to(torch.float8_e4m3fn), "_scale_inv": scales}

    parts = form.parts(values, stored(40, 24))
    assert parts["_scale_inv"].shape == (3, 2)
    assert (form.values(parts) - values).norm() / values.norm() < 0.04
    for whole in (stored(48, 24), stored(40, 32)):
        with pytest.raises(ValueError, match="blocks of 16 x 16 do not divide 40 x 24"):
            form.parts(values, whole)


def test_widths_that_no_block_divides_are_refused_at_once(mxfp4, tmp_path, refused):
    """Before anything is observed; without a wish, widths are a multiple of the block."""
    ask = ("slim", mxfp4, tmp_path / "out", "--no-eval", "--score", "magnitude")
    said = "--multiple 8: this checkpoint stores experts in blocks of 32"
    refused(said, *ask, "--keep", "0.5", "--multiple", "8")
    refused("--keep 0.7 is out of reach with multiple 32 of 64 neurons", *ask, "--keep", "0.7")


def test_experts_in_groups_are_slimmed_to_whole_ones(int4, tmp_path, refused):
    """transformers fills plain down projections beside gates and ups in groups with random
    numbers."""
    ask = "slim", int4, tmp_path / "out", "--no-eval", "--score", "magnitude"
    refused("keep 0.75 is out of reach with multiple 16 of 32", *ask, "--keep", "0.75")
    said = "--multiple 8: this checkpoint stores experts in blocks of 16"
    refused(said, *ask, "--keep", "0.5", "--multiple", "8")
    config = SlimConfig(keep=0.5, score="magnitude", refit=False)
    out = verb("slim", str(int4), config).save(tmp_path / "out")
    down = "model.layers.0.mlp.experts.0.down_proj.weight_packed"
    assert down in weights(out)


def test_a_mixed_checkpoint_is_read(int4, tmp_path):
    """One layer's experts are plain, another's in groups: each is what it is stored as."""
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def change(tensors):
        parts = {end: tensors.pop(name + end) for end in CompressedTensors.ends}
        tensors[name] = CompressedTensors(INT4).values(parts).bfloat16()

    mixed = Source("mixed", with_others(int4, tmp_path / "mixed", change))
    whole = Source("whole", int4)
    assert torch.equal(mixed.checkpoint.tensor(name), whole.checkpoint.tensor(name).bfloat16())
    assert torch.equal(logits(mixed.load(), IDS), logits(whole.load(), IDS))


def test_with_a_dtype_the_result_is_plain(quantised, tmp_path):
    make = lambda *_: CutLayer(KEPT)  # noqa: E731
    routed_applied(quantised, tmp_path / "out", make, dtype=torch.bfloat16)
    config = config_of(tmp_path / "out")
    assert not config.keys() & {"quantization_config", "expert_dtype"}
    kinds = {t.dtype for name, t in weights(tmp_path / "out").items() if "tid2eid" not in name}
    assert kinds <= {torch.bfloat16, torch.float32}
    loaded(tmp_path / "out")


def test_a_whole_run_reads_layer_by_layer(fp8, tmp_path):
    """From observation to a checkpoint in the same format; the loss is that of a plain copy."""
    source = resolve(str(fp8))
    source.load().save_pretrained(tmp_path / "plain")
    found = {}
    for name, folder in (("fp8", fp8), ("plain", tmp_path / "plain")):
        config = PruneConfig(keep=6, score="frequency")
        result = verb("prune", str(folder), config, calibration=TEXT)
        result.save(tmp_path / f"{name}-out")
        found[name] = [result.plan.layers[i].kept for i in sorted(result.plan.layers)]
    assert found["fp8"] == found["plain"]
    names = resolve(str(tmp_path / "fp8-out")).checkpoint._stored
    assert any(name.endswith("weight_scale_inv") for name in names)
    model = tiny_moe("mixtral")
    model.hf_quantizer = object()  # as transformers leaves it where weights stay quantised
    with pytest.raises(MoesaicError, match="loaded from quantised weights"):
        verb("prune", model, PruneConfig(keep=6), calibration=TEXT)


# --- bad input -----------------------------------------------------------------------------------


UP = "model.layers.2.mlp.experts.3.up_proj.weight"
DOWN = "model.layers.1.mlp.experts.down_proj"
GONE = None
BAD = [
    ("fp8", f"{UP}_scale_inv", GONE, f"no tensor '{UP}_scale_inv'"),
    (
        "fp8",
        f"{UP}_scale_inv",
        lambda t: t[:1].clone(),
        "need scales of 2 x 2, and they are of 1 x 2",
    ),
    ("mxfp4", f"{DOWN}_scales", GONE, "down_proj_scales"),
    ("mxfp4", f"{DOWN}_blocks", lambda t: t.short(), "as I16, which is not read; U8 is"),
    ("int4", f"{UP}_scale", lambda t: t[:, :1].clone(), "are not for groups of 16"),
    ("int4", f"{UP}_scale", lambda _: torch.ones(32, 3), "scales of 32 x 3 do not divide"),
    ("int4", f"{UP}_scale", GONE, f"no tensor '{UP}_sc"),
    ("int4", f"{UP}_packed", lambda t: t.float(), "stored as F32, which is not read"),
    ("int4", f"{UP}_packed", GONE, f"'{UP}_packed'"),
    ("int4", f"{UP}_g_idx", lambda _: torch.arange(32), "by activation order"),
    ("int4", UP, lambda _: torch.zeros(32, 32), f"has {UP} twice"),
    (
        "int4",
        f"{UP}_shape",
        lambda _: torch.tensor([32, 30]),
        "its shape is given as 32 x 30, and its codes are 32 x 32",
    ),
]


@pytest.mark.parametrize(("base", "name", "change", "words"), BAD)
def test_bad_input_is_named(base, name, change, words, request, tmp_path):
    folder = request.getfixturevalue(base)
    folder = with_others(folder, tmp_path / "bad", altered(name, change))
    with pytest.raises(MoesaicError, match=re.escape(words)):
        Source("bad", folder).load()


def test_other_formats_are_refused(fp8):
    config = resolve(str(fp8)).config
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(
        MoesaicError, match="'gptq', which is not read; fp8, mxfp4, compressed-tensors are"
    ):
        moe_arch(config)
    with pytest.raises(MoesaicError, match="static activation scales"):
        BlockFp8({**FP8, "activation_scheme": "static"})
    weights = INT4["config_groups"]["group_0"]["weights"]
    for words, said in {
        "'nvfp4-pack-quantized' is not read": {"format": "nvfp4-pack-quantized"},
        "status 'frozen'": {"quantization_status": "frozen"},
        "sparse or transformed": {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "integers of 3 bits": {"config_groups": {"g": {"weights": {**weights, "num_bits": 3}}}},
        "with static activation scales": {
            "config_groups": {"g": {"weights": weights, "input_activations": {"dynamic": False}}}
        },
    }.items():
        with pytest.raises(MoesaicError, match=words):
            CompressedTensors({**INT4, **said})
    dense = tiny_config("llama", quantization_config=FP8)
    with pytest.raises(MoesaicError, match="carve takes plain weights"):
        dense_arch(dense)


# --- what is in no format, and what nothing is known of ------------------------------------------

FEW = torch.tensor([0, 5, 7])
EXPERT = "model.layers.{}.mlp.experts.{}.{}.weight"
MODULE = "model.layers.2.mlp.experts.{}"


def mixed(folder, form, entries):
    """A mixture of which experts 5 and 6 of the last layer are in no format, as a list says."""
    tiny_moe("qwen3_moe", moe_intermediate_size=32).save_pretrained(folder)
    plain = re.compile(r"layers\.2\..*experts\.[56]\.")
    quantise(folder, form, lambda name, _: ".experts." in name and not plain.search(name))
    said = {**config_of(folder)["quantization_config"], form.plainly: ["lm_head", *entries]}
    edited(folder / "config.json", quantization_config=said)
    return folder


@pytest.mark.parametrize(
    ("form", "entries", "wanted"),
    [
        (BlockFp8(FP8), [MODULE.format(5), MODULE.format(6)], [MODULE.format(1)]),
        (
            CompressedTensors(INT4),
            [r"re:.*layers\.2\.mlp\.experts\.[56]\..*"],
            [MODULE.format(1) + f".{m}_proj" for m in ("down", "gate", "up")],
        ),
    ],
    ids=["modules", "regular expression"],
)
@pytest.mark.parametrize("refit", [False, True])
def test_an_expert_in_no_format_stays_so_under_another_number(
    form, entries, wanted, refit, tmp_path
):
    """Its values are not rounded; others keep the format, also under the number of one in none."""
    base, kept = mixed(tmp_path / "base", form, entries), torch.tensor([0, 1, 2, 3, 4, 7])
    down = Source("base", base).load().model.layers[2].mlp.experts.down_proj.detach().float()

    def made(arch, view, few=FEW):
        down_E = view.experts.down_proj.detach().float()[few] * 1.1 if refit else None
        return CutLayer(few, down_E=down_E)

    routed_applied(base, tmp_path / "out", made)
    said = config_of(tmp_path / "out")["quantization_config"]
    assert said[form.plainly] == ["lm_head", *wanted]
    out = resolve(str(tmp_path / "out")).checkpoint
    before, after = (weights(f) for f in (base, tmp_path / "out"))
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        stored = after[EXPERT.format(2, 1, leaf)]
        assert stored.dtype == torch.bfloat16
        wanted = before[EXPERT.format(2, 5, leaf)]
        wanted = (down[5] * 1.1).bfloat16() if leaf == "down_proj" and refit else wanted
        assert torch.equal(stored, wanted)
    for layer in (0, 1, 2):
        for new in (0, 2) if layer == 2 else (0, 1, 2):
            assert EXPERT.format(layer, new, "down_proj") in out._parts
    # those that are kept stand in the place of those in no format
    routed_applied(base, tmp_path / "others", partial(made, few=kept))
    others = resolve(str(tmp_path / "others")).checkpoint
    assert {EXPERT.format(2, i, "down_proj") for i in range(6)} <= others._parts.keys()
    assert config_of(tmp_path / "others")["quantization_config"][form.plainly] == ["lm_head"]


NVFP4 = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}


@pytest.mark.parametrize(
    ("said", "beside", "words"),
    [
        ({}, None, "stored as I32, and config.json names no format"),
        ({}, True, "'modelopt'"),
        ({"quantization_config": {"quant_algo": "FP8"}}, False, "'modelopt'"),
        (
            {"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}},
            False,
            "'modelopt'",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, False, "'mlx'"),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, False, "'mlx'"),
        ({"quantization_config": {"load_in_4bit": True}}, False, "'bitsandbytes'"),
        ({}, False, "stored as F8_E4M3, and config.json names no format"),
    ],
)
def test_a_format_that_is_not_read_is_refused_by_its_name(said, beside, words, tmp_path):
    """Wherever it stands; or weights in few bits of which nothing stands anywhere."""
    base = tmp_path / "base"
    tiny_moe("qwen3_moe").save_pretrained(base)
    name = EXPERT.format(1, 3, "up_proj")
    with opened(base) as tensors:
        stored = tensors[name].to(torch.float8_e4m3fn)
        tensors[name] = torch.zeros(16, 4, dtype=torch.int32) if beside is None else stored
        tensors[f"{name}_scale"] = torch.ones(())
    edited(base / "config.json", **said)
    if beside:
        (base / "hf_quant_config.json").write_text(json.dumps(NVFP4))
    for act in (
        lambda: verb("prune", str(base), PruneConfig(keep=6, score="frequency"), text=TEXT),
        lambda: evaluate(str(base), data=TEXT, stream=True),
        lambda: evaluate(str(base), data=TEXT),
    ):
        with pytest.raises(MoesaicError, match=re.escape(words)):
            act()


@pytest.mark.parametrize("base", ["fp8", "int4"])
def test_a_chain_in_memory_is_rebuilt_by_its_plan(base, request, tmp_path):
    """In the type that it was in there, and not quantised again."""
    folder = str(request.getfixturevalue(base))
    few = PruneConfig(keep=4, score="frequency", refit=False)
    first = verb("prune", folder, few, calibration=TEXT)
    narrow = SlimConfig(keep=0.5, score="energy", refit=False)
    out = verb("slim", first, narrow, calibration=TEXT).save(tmp_path / "out")
    apply(folder, out, tmp_path / "again")
    assert equal(weights(out), weights(tmp_path / "again"))
