"""The carved FFN: petal by petal and masked are the same function."""

import copy

import pytest
import torch
from builders import WAYS, force, masked, running, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moesaic.arch.dense import FFNNames
from moesaic.arch.lookup import dense_arch
from moesaic.carving.carved_layer import CarvedFFN
from moesaic.carving.routers import Router, top

BLOCKS = [
    ("llama", torch.float64, {"top_k": 2}),
    ("llama", torch.bfloat16, {"top_k": 1}),
    ("phi3", torch.float32, {"top_k": 1}),
    ("phi", torch.float32, {"top_k": 2}),
    ("llama", torch.float32, {"top_k": 2, "routing": "softmax", "petals": (8, 8, 8, 8)}),
    ("llama", torch.float64, {"top_k": 1, "petals": (32, 32)}),  # no backbone
    ("llama", torch.float64, {"top_k": 0, "petals": (32, 32)}),  # and nothing runs
]


def carved(
    model_type="llama", dtype=torch.float32, petals=(8, 8, 24, 3), top_k=1, routing="cosine"
):
    """A carved block and inputs; its biases are not zero."""
    torch.manual_seed(0)
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    ffn, names = arch.ffn_of(arch.layers(model)[0]), arch.ffn
    projections = {name: copy.deepcopy(getattr(ffn, name)) for name in names.projections}
    sizes = 32, 64 - sum(petals), petals, top_k, routing
    module = CarvedFFN(projections, getattr(ffn, names.act), names, *sizes)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    module = module.to(dtype).eval()
    module.router.float()
    return module, torch.randn(33, 32).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "dtype", "options"), BLOCKS)
def test_petal_by_petal_is_masked_is_by_hand(model_type, dtype, options, monkeypatch):
    module, x_TD = carved(model_type, dtype, **options)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    for tokens in (1, 3, 33):
        expected = module.view().output(running(module, x_TD[:tokens]))
        size = expected.abs().max().item()
        close = {"rtol": 0, "atol": tolerance * size}
        torch.testing.assert_close(masked(module)(x_TD[:tokens]), expected, **close)
        for way in WAYS:
            force(monkeypatch, way)
            torch.testing.assert_close(module(x_TD[:tokens]), expected, **close)
            torch.testing.assert_close(module(x_TD[None, :tokens]), expected[None], **close)


@pytest.mark.parametrize("model_type", ["llama", "phi"])
def test_blocks_side_by_side_are_those_of_their_places(model_type):
    model = tiny_model(model_type)
    ffn = dense_arch(model.config).dense(model.model.layers[0])
    x_TD = torch.randn(5, 32)
    for part, place in zip(ffn.split((8, 16, 40)), [(0, 8), (8, 24), (24, 64)], strict=True):
        expected = ffn.neurons(*place)
        assert torch.equal(part.output(part.hidden(x_TD)), expected.output(expected.hidden(x_TD)))


def test_wrapped_projections_are_called():
    """Adapters and quantisers put modules of their own in the place of the projections."""
    module, _ = carved()
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
    router = Router(4, 4, 1, "gumbel")
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
    module, _ = carved()
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
