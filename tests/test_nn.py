"""The carved FFN: grouped, one token at a time and masked are the same function."""

import copy

import pytest
import torch
from builders import masked, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moesaic.arch.dense import FFNNames, dense_ffn
from moesaic.arch.lookup import dense_arch
from moesaic.layers.carved import CarvedLayer
from moesaic.nn import CarvedFFN, Router, kernels
from moesaic.nn.kernels import petals as kernel
from moesaic.nn.routers import by_neuron, chosen
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
    for t, on_R in enumerate(chosen(module.router(x_TD), len(module.petals))):
        keep_TM[t, layer.order_M[: layer.backbone]] = 1
        for e in on_R.nonzero().flatten().tolist():
            keep_TM[t, layer.order_M[ends[e] : ends[e + 1]]] = 1
    return view.output(h_TM * keep_TM)


@pytest.mark.parametrize("model_type", ["llama", "phi3", "phi"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_grouped_is_masked_is_by_hand(model_type, top_k, tokens):
    module, ffn, layer, arch = carved(model_type, top_k)
    x_TD = torch.randn(tokens, 32, dtype=torch.float64)
    expected = by_hand(module, ffn, layer, arch, x_TD)
    torch.testing.assert_close(module(x_TD), expected)
    torch.testing.assert_close(masked(module)(x_TD), expected)
    torch.testing.assert_close(module(x_TD.view(1, tokens, 32)), expected.view(1, tokens, 32))


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
    chosen_T1 = router(x_TD)
    share_R = torch.bincount(chosen_T1.flatten(), minlength=4) / len(x_TD)
    torch.testing.assert_close(share_R, wanted.softmax(0), atol=0.01, rtol=0)
    assert torch.equal(router(x_TD), chosen_T1)


def test_random_routing_is_even_and_repeatable():
    router = Router(32, 4, 1, "random")
    nn.init.normal_(router.weight, std=32**-0.5)
    x_TD = torch.randn(4000, 32) + 3
    counts = torch.bincount(router(x_TD).flatten(), minlength=4)
    assert torch.equal(router(x_TD), router(x_TD))
    assert counts.min() > 800


def test_gradients_reach_only_what_ran():
    module, *_ = carved("llama", 1, dtype=torch.float32)
    x_TD = torch.randn(1, 32, requires_grad=True)
    module(x_TD).sum().backward()
    start, stop = module.slices[module.router(x_TD).item()]
    ran = module.up_proj.weight.grad.abs().sum(1) > 0
    assert ran[: module.backbone].all()
    assert ran[start:stop].all()
    assert ran.sum() == module.backbone + stop - start
    assert x_TD.grad.isfinite().all()


def test_unknown_routing_is_refused():
    with pytest.raises(ValueError, match="routing"):
        Router(8, 2, 1, "sideways")


def test_shape_is_shown():
    module = CarvedFFN({}, nn.SiLU(), FFNNames(), 8, 4, (2, 2), 1, "cosine")
    assert "petals=(2, 2)" in repr(module)
    assert "top-1 of 2, cosine" in repr(module)


# --- compiled functions for few tokens -----------------------------------------------------------

KERNELS = [
    ("llama", torch.float32, {"top_k": 2}),
    ("llama", torch.bfloat16, {"top_k": 1}),
    ("phi3", torch.float32, {"top_k": 1}),
    ("phi", torch.float32, {"top_k": 2}),
    ("phi", torch.bfloat16, {"top_k": 2}),
    ("llama", torch.float32, {"top_k": 2, "routing": "backbone"}),
    ("llama", torch.bfloat16, {"top_k": 2, "routing": "softmax"}),
    ("llama", torch.float32, {"gate": {"threshold": 0.5}}),
]


def randomised(model_type, dtype, top_k=1, routing="cosine", gate=None):
    """A carved block and inputs; its biases are not zero."""
    petals = (8, 8, 8, 8) if routing == "softmax" else (8, 8, 24, 3)
    model = tiny_model(model_type)
    arch = dense_arch(model.config)
    ffn, names = arch.ffn_of(arch.layers(model)[0]), arch.ffn
    projections = {name: copy.deepcopy(getattr(ffn, name)) for name in names.projections}
    backbone = 64 - sum(petals)
    module = CarvedFFN(
        projections, getattr(ffn, names.act), names, 32, backbone, petals, top_k, routing, gate=gate
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    module = module.to(dtype)
    module.router.float()
    return module, torch.randn(33, 32).to(dtype)


@pytest.mark.parametrize(("model_type", "dtype", "options"), KERNELS)
def test_kernels_give_what_masking_gives(model_type, dtype, options, monkeypatch):
    """Of one token, of few, and of many; by one thread and by two."""
    torch.manual_seed(0)
    module, x_TD = randomised(model_type, dtype, **options)
    calls = []
    original = kernel.few
    monkeypatch.setattr("moesaic.nn.carved.few", lambda *a: calls.append(original(*a)) or calls[-1])
    monkeypatch.setattr(kernels, "APART", 0)
    monkeypatch.setitem(kernel.MOST, torch.bfloat16, 8)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    with torch.no_grad():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            try:
                for tokens in (1, 3, 8, 33):
                    expected = masked(module)(x_TD[:tokens])
                    found = module(x_TD[:tokens])
                    assert (calls[-1] is not None) == (tokens <= 8)
                    assert found.dtype == dtype
                    size = expected.abs().max().item()
                    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * size)
            finally:
                torch.set_num_threads(1)
    assert module(x_TD[:1]).requires_grad
    assert calls[-1] is None, "gradients pass where somebody trains"


def test_without_kernels_the_result_is_the_same(monkeypatch):
    torch.manual_seed(0)
    module, x_TD = randomised("llama", torch.float32, top_k=2)
    monkeypatch.setattr(kernel, "fast", lambda: None)
    with torch.no_grad():
        for tokens in (1, 33):
            torch.testing.assert_close(module(x_TD[:tokens]), masked(module)(x_TD[:tokens]))


def test_weights_that_kernels_turn_keep_shape_and_values():
    module, x_TD = randomised("llama", torch.float32, top_k=2)
    before = module.down_proj.weight.detach().clone()
    with torch.no_grad():
        module(x_TD[:1])
    assert module.down_proj.weight.mT.is_contiguous()
    assert torch.equal(module.down_proj.weight, before)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1e-30, 2.0]), min_size=1, max_size=20),
    st.data(),
)
def test_petals_of_the_highest_scores_are_taken(values, data):
    """Ties, signs and zeros: as many as asked, none of them lower than what is left."""
    top_k = data.draw(st.integers(1, len(values)))
    scores_TR = torch.tensor(values).repeat(kernels.FEW + 1, 1)
    on_TR = kernel.highest(scores_TR, top_k)
    assert set(on_TR.flatten().tolist()) <= {0.0, 1.0}
    for row in on_TR.tolist():
        taken = [value for value, on in zip(values, row, strict=True) if on]
        assert sorted(taken) == sorted(values)[-top_k:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backbone", [0, 5])
@pytest.mark.parametrize("petals", [(3, 1, 70), (3, 1, 2)], ids=["wide", "narrow"])
def test_idle_petals_are_silenced(dtype, backbone, petals):
    h_TM = torch.randn(7, backbone + sum(petals)).to(dtype)
    on_TR = chosen(torch.randint(0, 3, (7, 1)), 3)
    expected = h_TM * by_neuron(on_TR, backbone, petals)
    assert kernel.silenced(h_TM, on_TR, backbone, petals)
    assert torch.equal(h_TM, expected.to(dtype))


@pytest.mark.parametrize("width", [70, 33])
@pytest.mark.parametrize("matrices", [1, 2])
def test_parts_of_two_matrices_end_where_they_end(width, matrices, monkeypatch):
    """Parts are so many neurons of both: one of them lies in either."""
    from moesaic.nn.kernels import cpu as compiled

    monkeypatch.setattr(kernels, "APART", 0)
    x_TI, rows_GMI = torch.randn(3, 5), torch.randn(matrices, width, 5)
    runs_TM = torch.rand(3, width) < 0.6
    chosen_TM = torch.zeros(3, width, dtype=torch.int32)
    for chosen_M, runs_M in zip(chosen_TM, runs_TM, strict=True):
        chosen_M[: runs_M.sum()] = runs_M.nonzero().flatten()
    torch.set_num_threads(2)
    try:
        found = kernel._dots(compiled, x_TI, list(rows_GMI), chosen_TM, runs_TM.sum(1))
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(found, torch.einsum("ti,gmi->gtm", x_TI, rows_GMI) * runs_TM)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("petals", [1, 6, 17])
def test_scores_are_exact_whatever_the_type_of_tokens(threads, petals, monkeypatch):
    """A router multiplies in float32: rounded scores would be equal where they are not."""
    monkeypatch.setattr(kernels, "APART", 0)
    x_TD, weight_RD = torch.randn(9, 40).bfloat16(), torch.randn(petals, 40)
    torch.set_num_threads(threads)
    try:
        for tokens in (1, 9):
            found = kernel.scored(x_TD[:tokens], weight_RD)
            wanted = x_TD[:tokens].double() @ weight_RD.double().T
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(1)
