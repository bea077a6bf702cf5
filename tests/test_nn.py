"""The carved FFN: petal by petal and masked are the same function."""

import copy

import pytest
import torch
from builders import WAYS, force, masked, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moesaic.arch.dense import FFNNames, dense_ffn
from moesaic.arch.lookup import dense_arch
from moesaic.carving.carved_layer import CarvedFFN, CarvedLayer
from moesaic.carving.routers import Router, top
from moesaic.surgery import apply_layer


def carved(model_type, top_k, petals=(8, 16, 24), dtype=torch.float64, routing="cosine"):
    model = tiny_model(model_type).to(dtype)
    arch = dense_arch(model.config)
    ffn = arch.ffn_of(arch.layers(model)[0])
    layer = CarvedLayer(
        order_M=torch.randperm(64),
        backbone=64 - sum(petals),
        petals=petals,
        top_k=top_k,
        routing=routing,
        router_RD=torch.randn(len(petals), 32) if petals else None,
    )
    ffn = copy.deepcopy(ffn)
    apply_layer(arch.layers(model), 0, arch, layer)
    return arch.ffn_of(arch.layers(model)[0]), ffn, layer, arch


def by_hand(module, ffn, layer, arch, x_TD):
    """Each token through the original block with its idle neurons zeroed."""
    view = dense_ffn(ffn, arch.ffn)
    h_TM = view.hidden(x_TD)
    ends = torch.tensor([layer.backbone, *layer.petals]).cumsum(0).tolist()
    keep_TM = torch.zeros_like(h_TM)
    for t, on_R in enumerate(module.router(x_TD)):
        keep_TM[t, layer.order_M[: layer.backbone]] = 1
        for e in on_R.nonzero().flatten().tolist():
            keep_TM[t, layer.order_M[ends[e] : ends[e + 1]]] = 1
    return view.output(h_TM * keep_TM)


@pytest.mark.parametrize(
    ("model_type", "top_k"), [("llama", 1), ("llama", 2), ("phi3", 1), ("phi", 2)]
)
def test_grouped_is_masked_is_by_hand(model_type, top_k, monkeypatch):
    force(monkeypatch, "petal by petal")
    module, ffn, layer, arch = carved(model_type, top_k)
    for tokens in (1, 2, 33):
        x_TD = torch.randn(tokens, 32, dtype=torch.float64)
        expected = by_hand(module, ffn, layer, arch, x_TD)
        torch.testing.assert_close(module(x_TD), expected)
        torch.testing.assert_close(masked(module)(x_TD), expected)
        torch.testing.assert_close(module(x_TD[None]), expected[None])


@pytest.mark.parametrize("model_type", ["llama", "phi"])
def test_blocks_side_by_side_are_those_of_their_places(model_type):
    model = tiny_model(model_type)
    ffn = dense_arch(model.config).dense(model.model.layers[0])
    x_TD = torch.randn(5, 32)
    for part, place in zip(ffn.split((8, 16, 40)), [(0, 8), (8, 24), (24, 64)], strict=True):
        expected = ffn.neurons(*place)
        assert torch.equal(part.output(part.hidden(x_TD)), expected.output(expected.hidden(x_TD)))


@pytest.mark.parametrize("top_k", [0, 1])
def test_no_backbone_and_no_petals(top_k):
    module, ffn, layer, arch = carved("llama", 1, petals=(32, 32))
    assert layer.backbone == 0
    x_TD = torch.randn(5, 32, dtype=torch.float64)
    torch.testing.assert_close(module(x_TD), by_hand(module, ffn, layer, arch, x_TD))
    module.top_k = module.router.top_k = 0
    torch.testing.assert_close(module(x_TD), masked(module)(x_TD))


def test_wrapped_projections_are_called():
    """Adapters and quantisers put modules of their own in the place of the projections."""
    module, *_ = carved("llama", 1, dtype=torch.float32)
    x_TD = torch.randn(4, 32)
    expected, ran = module(x_TD), []
    wrapped = masked(module)
    wrapped.up_proj.register_forward_hook(lambda *_: ran.append(True))
    torch.testing.assert_close(wrapped(x_TD), expected)
    assert ran


@pytest.mark.parametrize("top_k", [1, 2])
def test_routing_ignores_the_scale_of_x(top_k):
    router = Router(32, 5, top_k)
    nn.init.normal_(router.weight)
    x_TD = torch.randn(50, 32)
    assert torch.equal(router(x_TD), router(x_TD * 8.0))


def test_tossed_routing_has_the_softmaxs_probabilities_and_is_repeatable():
    """ToMoE, Eq. 14: the largest x + g of the same scores, again and again, is the softmax."""
    router = Router(4, 4, 1, "tossed")
    router.weight.data = torch.eye(4)
    wanted = torch.tensor([1.0, 0.0, -1.0, 0.5])
    x_TD = wanted + 0.02 * torch.randn(40_000, 4)
    on_TR = router(x_TD)
    torch.testing.assert_close(on_TR.mean(0), wanted.softmax(0), atol=0.01, rtol=0)
    assert torch.equal(router(x_TD), on_TR)


def test_random_routing_is_even_and_repeatable():
    router = Router(32, 4, 1, "random")
    nn.init.normal_(router.weight, std=32**-0.5)
    x_TD = torch.randn(4000, 32) + 3
    assert torch.equal(router(x_TD), router(x_TD))
    assert router(x_TD).sum(0).min() > 800


def test_gradients_reach_only_what_ran(monkeypatch):
    force(monkeypatch, "petal by petal")
    module, *_ = carved("llama", 1, dtype=torch.float32)
    x_TD = torch.randn(1, 32, requires_grad=True)
    module(x_TD).sum().backward()
    start, stop = module.slices[module.router(x_TD).argmax()]
    ran = module.up_proj.weight.grad.abs().sum(1) > 0
    assert ran[: module.backbone].all()
    assert ran[start:stop].all()
    assert ran.sum() == module.backbone + stop - start
    assert x_TD.grad.isfinite().all()


def test_shape_is_shown_and_unknown_routing_refused():
    module = CarvedFFN({}, nn.SiLU(), FFNNames(), 8, 4, (2, 2), 1, "cosine")
    assert "petals=(2, 2)" in repr(module)
    assert "top-1 of 2, cosine" in repr(module)
    with pytest.raises(ValueError, match="routing"):
        Router(8, 2, 1, "sideways")


# --- one of two ways -----------------------------------------------------------------------------

BLOCKS = [
    ("llama", torch.float32, {"top_k": 2}),
    ("llama", torch.bfloat16, {"top_k": 1}),
    ("phi3", torch.float32, {"top_k": 1}),
    ("phi", torch.float32, {"top_k": 2}),
    ("llama", torch.float32, {"top_k": 2, "routing": "softmax"}),
]


def randomised(model_type, dtype, top_k=1, routing="cosine"):
    """A carved block and inputs; its biases are not zero."""
    petals = (8, 8, 8, 8) if routing == "softmax" else (8, 8, 24, 3)
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    ffn, names = arch.ffn_of(arch.layers(model)[0]), arch.ffn
    projections = {name: copy.deepcopy(getattr(ffn, name)) for name in names.projections}
    backbone = 64 - sum(petals)
    module = CarvedFFN(
        projections, getattr(ffn, names.act), names, 32, backbone, petals, top_k, routing
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    module = module.to(dtype)
    module.router.float()
    return module, torch.randn(33, 32).to(dtype)


@pytest.mark.parametrize(("model_type", "dtype", "options"), BLOCKS)
def test_petal_by_petal_is_masked(model_type, dtype, options, monkeypatch):
    torch.manual_seed(0)
    module, x_TD = randomised(model_type, dtype, **options)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    with torch.no_grad():
        for tokens in (1, 3, 33):
            expected = masked(module)(x_TD[:tokens])
            for way in WAYS:
                force(monkeypatch, way)
                output = module(x_TD[:tokens])
                assert output.dtype == dtype
                size = expected.abs().max().item()
                torch.testing.assert_close(output, expected, rtol=0, atol=tolerance * size)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1e-30, 2.0]), min_size=1, max_size=20),
    st.data(),
)
def test_petals_of_the_highest_scores_are_taken(values, data):
    """Ties, signs and zeros: as many as asked, the highest, of equal ones the first."""
    top_k = data.draw(st.integers(0, len(values)))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    for row in top(torch.tensor(values).repeat(3, 1), top_k):
        assert row.nonzero().flatten().tolist() == sorted(order[:top_k])


def test_scores_are_exact_whatever_the_type_of_tokens():
    """A router multiplies in float32: rounded scores would be equal where they are not."""
    router, x_TD = Router(40, 6, 1), torch.randn(9, 40).bfloat16()
    nn.init.normal_(router.weight)
    wanted = x_TD.double() @ router.weight.double().T
    torch.testing.assert_close(router.scores(x_TD).double(), wanted, rtol=1e-5, atol=1e-5)
