"""The carved FFN: grouped, one token at a time and masked are the same function."""

import copy

import pytest
import torch
from builders import masked, tiny_model
from torch import nn

from moesaic.arch.dense import FFNNames, dense_ffn
from moesaic.arch.lookup import dense_arch
from moesaic.layers.carved import CarvedLayer
from moesaic.nn import CarvedFFN, Router
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
    for t, chosen in enumerate(module.router(x_TD).tolist()):
        keep_TM[t, layer.order_M[: layer.backbone]] = 1
        for e in chosen:
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
