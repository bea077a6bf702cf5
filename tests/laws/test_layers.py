"""Laws of every layer kind: live is disk, counted is said, and what is said is true."""

import copy
import io
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from builders import (
    applied,
    carved_layer,
    condensed_layer,
    configured,
    converted,
    drawn,
    equal,
    is_own,
    loaded,
    logits,
    nightly,
    same,
    saved,
    tiny_model,
    tiny_moe,
)
from cases import config_of, many_tokens
from safetensors.torch import load_file, save_file
from torch import nn

import moesaic
from moesaic import MoesaicError, Plan, ToMoEConfig
from moesaic.arch.lookup import base_arch, moe_arch
from moesaic.carving.overlapping_layer import OverlappingLayer
from moesaic.io.source import resolve
from moesaic.metrics.score import model_size
from moesaic.observation.stream import LayerStream
from moesaic.plans.base import KINDS, LayerPlan
from moesaic.plans.condensed import NO_FFN, DroppedLayer
from moesaic.plans.cut import CutLayer
from moesaic.plans.neurons import filled_up
from moesaic.record import WEIGHTS
from moesaic.surgery import base_shape, check_base, headers_of

TWO, FIRST, EVEN = torch.tensor([0, 2]), torch.arange(8), torch.arange(0, 24, 2)
ROOMY = torch.tensor([*range(16), -1, -1])
GATED = {"routing": "threshold", "gate": {"tau": 0.5}}
Sample = tuple[Any, dict[int, LayerPlan]]
"""A tiny model and its layers that are converted."""


def dense(layer, model_type="llama", **changes):
    return tiny_model(model_type, **changes), {i: layer(i) for i in (1, 3)}


def mixture(layer, model_type="mixtral"):
    return tiny_moe(model_type), {2: layer}


def shared_weights(i, **options):
    experts = torch.stack([some_neurons(64, 24, seed) for seed in (i, i + 9)])
    return OverlappingLayer(experts, drawn(2, 32, seed=i), **options)


def cut_attention():
    model = tiny_model("llama")
    given = asdict(config_of("carve.tomoe"))
    config = configured(ToMoEConfig, **given, head_bias=3.0)  # else attention is kept whole
    plan = moesaic.carve(model, config, calibration=many_tokens()).plan
    return model, dict(plan.layers)


def some_neurons(width, keep, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(width, generator=generator)[:keep].sort().values


def narrow_layer(i, **options):
    return CutLayer(None, some_neurons(64, 24, i)[None], 64, **options)


def uneven_layer():
    widths = (3, 8, 1, 8, 5, 2, 7, 6)
    rows = [filled_up(some_neurons(16, w, i), 8) for i, w in enumerate(widths)]
    return CutLayer(torch.arange(8), torch.stack(rows), 16, uneven=True)


def slim_layer(kept, **options):
    neurons = torch.stack([some_neurons(16, 8, i) for i in kept])
    return CutLayer(torch.tensor([*kept]), neurons, 16, **options)


def refitted_shared_path():
    options = {"down_E": torch.randn(2, 32, 8), "shared_DS": torch.randn(32, 8)}
    return mixture(slim_layer([0, 2], shared_S=FIRST, **options), "qwen2_moe")


SAMPLES: dict[str, dict[str, Callable[[], Sample]]] = {
    "carved": {
        "experts": lambda: dense(lambda i: carved_layer(40, (12, 12), seed=i)),
        "uneven, fused": lambda: dense(lambda i: carved_layer(40, (8, 16), seed=i), "phi3"),
        "not gated": lambda: dense(lambda i: carved_layer(40, (12, 12), seed=i), "phi"),
        "fewer neurons": lambda: dense(lambda i: carved_layer(40, (), seed=i)),
        "new down projections": lambda: dense(
            lambda i: carved_layer(40, (12, 12), seed=i, down_DM=torch.randn(32, 64))
        ),
        "gates": lambda: dense(lambda i: carved_layer(32, (8, 8, 8, 8), i, top_k=4, **GATED)),
    },
    "overlapping": {
        "shared weights": lambda: dense(shared_weights),
        "copies": lambda: dense(lambda i: shared_weights(i, materialized=True)),
        "gumbel": lambda: dense(lambda i: shared_weights(i, noise=True)),
        "attention": cut_attention,
    },
    "cut": {
        "fewer experts": lambda: mixture(CutLayer(torch.tensor([0, 2, 3, 7]))),
        "biased experts": lambda: mixture(CutLayer(torch.tensor([1, 5])), "gpt_oss"),
        "and padded": lambda: mixture(CutLayer(torch.tensor([1, 5, 6])).padded(6), "gpt_oss"),
        "fewer, new down projections": lambda: mixture(CutLayer(TWO, down_E=drawn(2, 32, 16))),
        "a dense layer": lambda: dense(lambda i: narrow_layer(i)),
        "and remembered": lambda: dense(lambda i: narrow_layer(i, counted=True)),
        "dense, fused": lambda: dense(lambda i: narrow_layer(i), "phi3"),
        "dense, not gated": lambda: dense(lambda i: narrow_layer(i), "phi"),
        "dense, new down projection": lambda: dense(
            lambda i: narrow_layer(i, down_E=drawn(1, 32, 24))
        ),
        "narrower experts": lambda: mixture(slim_layer(range(8))),
        "fewer and narrower": lambda: mixture(slim_layer([1, 5])),
        "biases, by turns": lambda: mixture(slim_layer([1, 5, 6]), "gpt_oss"),
        "fused": lambda: mixture(slim_layer([0, 7]), "granitemoe"),
        "padded": lambda: mixture(slim_layer([1, 5, 6]).padded(6), "gpt_oss"),
        "a shared path": lambda: mixture(slim_layer(range(8), shared_S=EVEN), "qwen2_moe"),
        "one beside": lambda: mixture(slim_layer([2, 3], shared_S=FIRST), "granitemoeshared"),
        "one filled up": lambda: mixture(slim_layer(range(8), shared_S=ROOMY), "glm4_moe"),
        "new down projections": lambda: mixture(slim_layer([0, 2], down_E=torch.randn(2, 32, 8))),
        "of different widths": lambda: mixture(uneven_layer()),
        "and of the shared path": refitted_shared_path,
        "top2": lambda: mixture(CutLayer(beta=0.7, rule="top2")),
        "tail": lambda: mixture(CutLayer(beta=0.3, rule="tail"), "deepseek_v3"),
        "one a token": lambda: mixture(CutLayer(top_k=1)),
        "fewer, narrower, and skipping": lambda: mixture(
            slim_layer([1, 5, 6], shared_S=FIRST, beta=0.7, rule="top2"), "qwen2_moe"
        ),
        "of groups": lambda: mixture(CutLayer(top_k=1), "deepseek_v3"),
    },
    "condensed": {
        "shared path": lambda: mixture(condensed_layer([], 24), "granitemoeshared"),
        "with experts": lambda: mixture(condensed_layer([3, 1], 56), "glm4_moe"),
        "a gate": lambda: mixture(condensed_layer([3], 40, gated=24), "qwen2_moe"),
        "new down projections": lambda: mixture(
            condensed_layer([3], 16, shared=False, down_DM=drawn(32, 16))
        ),
        "nothing": lambda: mixture(NO_FFN),
    },
    "dropped": {"gone": lambda: mixture(DroppedLayer())},
}
CASES = [(kind, name) for kind, samples in SAMPLES.items() for name in samples]
BY_DAY = {
    "carved": {"experts", "new down projections", "gates"},
    "overlapping": {"shared weights", "attention"},
    "cut": {
        "and padded", "fewer, new down projections", "dense, not gated",
        "dense, new down projection", "a shared path", "of different widths",
        "and of the shared path", "top2", "one a token", "fewer, narrower, and skipping",
    },
    "condensed": {"a gate", "nothing"}, "dropped": {"gone"},
}  # fmt: skip
"""One sample of each form of tensors; the others are tried by ``make test-all``."""


def by_day(kind, name):
    marks = () if name in BY_DAY[kind] else pytest.mark.nightly
    return pytest.param((kind, name), id=f"{kind}: {name}", marks=marks)


@cache
def _made(kind, name):
    torch.manual_seed(0)
    return SAMPLES[kind][name]()


@pytest.fixture(params=[by_day(*case) for case in CASES])
def sample(request):
    """A model as the base has it, which a test may change, and layers of one kind."""
    model, layers = _made(*request.param)
    assert {layer.kind for layer in layers.values()} == {request.param[0]}
    return copy.deepcopy(model), layers


def test_every_kind_has_samples():
    assert SAMPLES.keys() == BY_DAY.keys() == set(KINDS)


# --- one conversion ------------------------------------------------------------------------------


def test_live_is_disk_bitwise(sample, tokens, tmp_path):
    """Converted in memory and saved, or converted tensor by tensor from disk to disk."""
    model, layers = sample
    model.save_pretrained(tmp_path / "base", max_shard_size="50KB")
    applied(tmp_path / "base", model, layers, tmp_path / "disk")
    saved(tmp_path / "live", model, layers)
    wanted = logits(model, tokens)
    for name in ("live", "disk"):  # names in files may differ: mlp or block_sparse_moe
        again = loaded(tmp_path / name)
        assert equal(dict(again.state_dict()), dict(model.state_dict()))
        assert torch.equal(logits(again, tokens), wanted)


def test_is_pickled_and_copied(sample, tokens):
    model, layers = sample
    model = converted(model, layers)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    pickled = pickle.loads(pickle.dumps(model))
    for again in (pickled, copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(again) is type(model)
        assert type(again.config) is type(model.config)
        assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(logits(again, tokens), logits(model, tokens))


def test_runs_with_its_weights_on_disk(sample, tokens, tmp_path):
    """As ``device_map`` leaves them: a weight is there only while its module is called."""
    model = converted(*sample)
    wanted = logits(model, tokens)
    disk_offload(model, str(tmp_path), execution_device="cpu")
    assert all(p.is_meta for p in model.parameters()), "something was not offloaded"
    assert torch.allclose(logits(model, tokens), wanted, atol=1e-5)


def test_text_is_generated_with_a_cache_as_without(sample):
    model = converted(*sample)
    ids = torch.randint(1, 300, (2, 5), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(ids)
    cached = model.generate(ids, use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    assert cached.shape == (2, 13)


def test_hooks_of_every_linear_module_fire(sample, tokens):
    """Which is how quantisers see what enters it."""
    model = converted(*sample)
    wanted, seen = logits(model, tokens), {}
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.numel()  # a dropped layer's have none
    }
    for name, module in linear.items():
        module.register_forward_pre_hook(
            lambda m, args, name=name: seen.update({name: args[0].shape[-1] == m.in_features})
        )
    assert torch.allclose(logits(model, tokens), wanted, atol=1e-5)
    assert seen == dict.fromkeys(linear, True)


def test_layers_that_are_no_part_of_it_are_kept(sample):
    model, layers = sample
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converted(model, layers)
    after, arch = model.state_dict(), base_arch(model.config)
    changed = tuple(
        arch.layer_prefix(i) + start for i, plan in layers.items() for start in plan.sources(arch)
    )
    for name, tensor in before.items():
        if not name.startswith(changed or "\0"):
            assert torch.equal(after[name], tensor), name


def test_a_plan_saved_is_the_same_plan(sample, tmp_path):
    model, layers = sample
    plan = Plan("test", base_shape(model, base_arch(model.config)), layers, {"a": 1}, "text")
    plan.save(tmp_path)
    again = Plan.load(tmp_path)
    assert again.header() == plan.header()
    assert all(same(layer, again.layers[i]) for i, layer in layers.items())


def test_a_second_layer_is_added_to_the_first(sample):
    """Headers are stacked: what was converted is kept, and the base's shape is kept."""
    model, layers = sample
    config, base = converted(model, layers).config, base_shape(model, base_arch(model.config))
    first = headers_of(config)
    if not first:
        return  # the base's own class holds it
    assert {i: stack[-1] for i, stack in first.items()} == {
        i: layer.header() for i, layer in layers.items()
    }
    plan = Plan("again", base, {})
    moesaic.hub.convert_config(config, base_arch(config), plan)
    assert headers_of(config) == first


# --- what is said of it --------------------------------------------------------------------------


def own_modules(layer, plan, arch):
    """The modules under what the plan changes, routers left out."""
    routed = type(plan).routed(layer, arch, plan.header())
    routers = set() if routed is None else set(routed.router.modules())
    found = {}
    for name, module in layer.named_modules():
        inside = any(f"{name}.".startswith(start) for start in plan.sources(arch))
        if inside and module not in routers and ".partial" not in name:
            found[name] = module
    return found


def test_what_became_of_weights_is_true(sample):
    """``own`` is said exactly where every matrix is made of the base's rows or columns."""
    model, layers = sample
    arch = base_arch(model.config)
    stored = [[p.clone() for p in layer.parameters()] for layer in arch.layers(model)]
    converted(model, layers)
    for i, plan in layers.items():
        assert plan.weights in WEIGHTS
        layer = arch.layers(model)[i]
        tensors = [
            p
            for module in own_modules(layer, plan, arch).values()
            for name, p in module.named_parameters(recurse=False)
            if p.numel() > p.shape[0]
            and name != "gate_up_proj_bias"  # fewer neurons are neither rows nor columns of it
        ]
        own = all(is_own(t, stored[i]) for t in tensors)
        assert own == (plan.weights == "own")


def test_use_is_counted_from_the_tensors(sample):
    model, layers = sample
    arch = base_arch(model.config)
    before = model_size(model)
    converted(model, layers)
    size = model_size(model)
    for i, plan in layers.items():
        layer, use = arch.layers(model)[i], size.layers[i]
        assert use.kind in (plan.kind, "moe"), "fewer experts are a mixture, too"
        modules = own_modules(layer, plan, arch)
        ffn = sum(
            p.numel()
            for name, module in layer.named_modules()
            for p in module.parameters(recurse=False)
            if any(f"{name}.".startswith(f"{path}.") for path in arch.replaced_paths)
            and (name in modules or not plan.sources(arch))
            and p.dim() > 1
            and p.shape[0] > 1
            and not hasattr(module, "top_k")
        )
        biases = ("gate_up_proj_bias", "down_proj_bias")  # in matrices of their own
        bias = sum(p.numel() for name, p in layer.named_parameters() if name.endswith(biases))
        assert use.ffn - ffn in (0, -bias), (use, ffn)
        assert use.active_width <= use.width
        assert use.active_ffn <= use.ffn
        if plan.weights == "own" and use.copied == 0:
            old = before.layers[i]
            assert use.dropped + use.ffn + use.attention <= old.ffn + old.attention
    assert size.total_parameters == sum(p.numel() for p in model.parameters())
    assert size.active_parameters <= size.total_parameters
    assert 0 < size.active_ratio <= 1


def test_words_and_numbers_of_a_layer(sample):
    model, layers = sample
    base = base_shape(model, base_arch(model.config))
    for i, plan in layers.items():
        said = plan.describe(base.experts_of(i))
        assert said.text
        assert "None" not in said.text
        assert "kind" not in said.shape


# --- refit ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_text")
def test_refit_says_so_or_is_refused(sample, tokens):
    """Weights that were solved for are never called the base's own, and never get worse."""
    model, layers = sample
    arch = base_arch(model.config)
    routed = any(base_shape(model, arch).experts)
    view = arch.mixture if routed else arch.dense
    for site in LayerStream(model, arch, tokens, layers, view=view):
        plan = layers[site.index]
        try:
            new, found = plan.refit(site)
        except MoesaicError as error:
            assert plan.kind in str(error) or "refitted" in str(error)  # noqa: PT017
            continue
        if same(new, plan):
            assert found == {}
            continue
        assert new.weights == "refitted"
        assert type(new) is type(plan)
        assert 0 <= found["recovered"] <= 1


# --- what cannot be ------------------------------------------------------------------------------

HOSTILE = [("overlapping", "attention"), ("cut", "a shared path"), ("cut", "and padded")]
HOSTILE += [nightly(*case) for case in {case[0]: case for case in reversed(CASES)}.values()]
WRONG: dict[type, tuple[Any, ...]] = {
    bool: ("x",), int: (-7, 10**12, "x"), float: (-7.0, float("nan"), "x"), str: ("x", 3),
    list: ([], ["x"], 3), dict: ({}, 3), type(None): (3,),
}  # fmt: skip


def hostile(layer):
    """The plan of a layer as somebody else might send it, one thing of it at a time."""
    header, tensors = layer.header(), layer.tensors()
    for key, value in header.items():
        for other in WRONG[type(value)] if key != "kind" else ():
            yield f"{key} = {other!r}", {**header, key: other}, tensors
    for key, tensor in tensors.items():
        odd = {"a number below 0": -7, "a number beyond": 10**6}
        for name, number in odd.items() if tensor.numel() and tensor.dtype == torch.int64 else ():
            changed = tensor.clone()
            changed.view(-1)[-1 if number > 0 else 0] = number
            yield f"{key}: {name}", header, {**tensors, key: changed}
        twice = torch.cat([tensor, torch.full_like(tensor, -1)], -1)
        yield f"{key}: twice as long", header, {**tensors, key: twice}
        bomb = tensor.flatten()[:1].expand(10**6) if tensor.numel() else torch.zeros(10**6)
        yield f"{key}: a million", header, {**tensors, key: bomb}
        yield f"{key}: no numbers", header, {**tensors, key: tensor.double() + 0.5}
        yield f"{key}: left out", header, {k: v for k, v in tensors.items() if k != key}


@pytest.mark.parametrize(("kind", "name"), HOSTILE)
def test_a_plan_of_a_strangers_fits_or_is_refused(kind, name, tmp_path):
    """In words, before anything large is made of it; what is made can be loaded."""
    model, layers = _made(kind, name)
    model.save_pretrained(tmp_path / "base")
    base = resolve(str(tmp_path / "base"))
    size, refused = base.checkpoint.nbytes(), 0
    (index, layer), *_ = layers.items()
    for number, (what, header, tensors) in enumerate(hostile(layer)):
        out = tmp_path / str(number)
        try:
            try:
                changed = type(layer).load(header, tensors)
            except (ValueError, KeyError, TypeError, AttributeError) as error:  # as Plan.load does
                raise MoesaicError(str(error)) from error
            applied(base, model, {index: changed}, out)
        except MoesaicError:
            refused += 1
            shutil.rmtree(out, ignore_errors=True)
            continue
        made = resolve(str(out))
        assert made.checkpoint.nbytes() < 2 * size, what
        assert sum(p.numel() for p in made.load().parameters()), what
        shutil.rmtree(out)
    assert refused or kind == "dropped"


def test_an_unknown_kind_is_an_error(tmp_path):
    model = tiny_model("llama")
    plan = Plan("test", base_shape(model, base_arch(model.config)), {1: carved_layer(64, ())})
    plan.save(tmp_path)
    file = tmp_path / "plan.json"
    file.write_text(file.read_text().replace('"carved"', '"folded"'))
    with pytest.raises(MoesaicError, match="folded"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("header", "tensors", "refused"),
    [
        ({}, {"1.experts": None}, "'experts' of its header"),
        ({"experts": 5}, {}, "'experts' of its header"),
        ({"width": 3}, {}, "'width' of its header"),
        ({}, {"1.experts": torch.tensor([0, 2, -1])}, "experts are numbered -1 to 2"),
    ],
)
def test_a_plan_whose_header_and_tensors_differ_is_refused(header, tensors, refused, tmp_path):
    """Half of a plan is not applied; nor an empty place, which this router would choose."""
    model = tiny_moe("mixtral")
    arch = base_arch(model.config)
    Plan("test", base_shape(model, arch), {1: CutLayer(torch.tensor([0, 2, 3]))}).save(tmp_path)
    content = json.loads((tmp_path / "plan.json").read_text())
    content["layers"]["1"] |= header
    (tmp_path / "plan.json").write_text(json.dumps(content))
    kept = {**load_file(tmp_path / "plan.safetensors"), **tensors}
    save_file({n: t for n, t in kept.items() if t is not None}, tmp_path / "plan.safetensors")
    with pytest.raises(MoesaicError, match=refused):
        check_base(Plan.load(tmp_path), model, arch)


def test_a_kind_that_leaves_something_out_cannot_be():
    class Half(LayerPlan):
        kind = "half"

        def header(self):
            return {"kind": "half"}

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_what_a_kind_does_not_say_is_refused():
    """Defaults refuse; none of them is silently right for a kind that says nothing."""

    class Silent(DroppedLayer):
        kind = "silent"
        refit, native = LayerPlan.refit, LayerPlan.native

    with pytest.raises(MoesaicError, match="'silent' are not refitted"):
        Silent().refit(None)
    assert Silent().native() is None


KEPT = torch.tensor([1, 4, 6])
NEURONS = torch.stack([torch.arange(n, n + 16, 2) % 16 for n in range(3)])
SHARED = torch.arange(0, 16, 2)


def cut(model, layer):
    arch = moe_arch(model.config)
    return converted(model, dict.fromkeys(arch.moe_layers(model), layer))


@pytest.mark.parametrize("skips", [False, True])
def test_one_cut_is_its_parts_after_one_another(skips, tokens):
    """Experts, their neurons, the shared path's, and what routers do: in any number of plans."""
    options = {"beta": 0.7, "rule": "top2"} if skips else {"top_k": 1}
    one = cut(tiny_moe("qwen2_moe"), CutLayer(KEPT, NEURONS, 16, shared_S=SHARED, **options))
    parts = [
        CutLayer(KEPT),
        CutLayer(torch.arange(3), NEURONS, 16),
        CutLayer(shared_S=SHARED),
        CutLayer(**options),
    ]
    several = tiny_moe("qwen2_moe")
    for part in parts:
        several = cut(several, part)
    assert equal(dict(one.state_dict()), dict(several.state_dict()))
    assert torch.equal(logits(one, tokens), logits(several, tokens))
    assert one.config.model_type == several.config.model_type
    assert skips == one.config.model_type.startswith("moesaic_")
    if not skips:
        assert one.config.to_dict() == several.config.to_dict()
        sizes = ("num_experts", "moe_intermediate_size", "num_experts_per_tok")
        assert [getattr(one.config, name) for name in sizes] == [3, 8, 1]
        assert one.config.shared_expert_intermediate_size == 8


LACKING: dict[str, tuple[str, Callable[[], CutLayer]]] = {
    "names no experts": ("mixtral", lambda: CutLayer(None, NEURONS[:1], 16)),
    "no shared path": ("mixtral", lambda: CutLayer(shared_S=SHARED)),
    "cannot run 4 of 3": ("mixtral", lambda: CutLayer(KEPT, top_k=4)),
    "no router": ("deepseek_v3", lambda: CutLayer(top_k=1)),
}


@pytest.mark.parametrize("message", LACKING)
def test_a_cut_of_what_a_layer_does_not_have_is_refused(message):
    model_type, layer = LACKING[message]
    model = tiny_moe(model_type)
    dense = 0 if model_type == "deepseek_v3" else 1
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MoesaicError, match=message):
        converted(model, {dense: layer()})
    assert equal(dict(model.state_dict()), dict(before))
