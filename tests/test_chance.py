"""Choices that are drawn: functions of a token's id, position and layer, and of nothing else."""

import copy
from dataclasses import asdict

import pytest
import torch
from builders import VOCAB, carved_layer, configured, converted, tiny_model
from cases import config_of, many_tokens

import moesaic
from moesaic import Tokens, ToMoEConfig
from moesaic.carving.routers import Router
from moesaic.hub import save_live
from moesaic.io.source import resolve
from moesaic.metrics.forward import InMemory, Layerwise
from moesaic.modules.running import RunningTokens
from moesaic.types import cache_of

IDS = torch.randint(1, VOCAB, (2, 40), generator=torch.Generator().manual_seed(3))


def drawn(kind):
    """A tiny model whose routers draw."""
    if kind == "random":
        return converted(
            tiny_model("llama"),
            {i: carved_layer(16, (12, 12, 12, 12), seed=i, routing="random") for i in (1, 3)},
        )
    given = asdict(config_of("carve.tomoe", steps=8, lr=0.05, active=0.6))
    config = configured(ToMoEConfig, **given, noise=True)
    result = moesaic.carve(tiny_model("llama"), config, calibration=many_tokens(), progress=False)
    headers = [layer.header() for layer in result.plan.layers.values()]
    assert any(h["routing"] == "gumbel" for h in headers)
    assert any(h["head_top_k"] for h in headers)
    return result.model


@pytest.fixture(scope="module", params=["random", "gumbel"])
def model(request):
    return drawn(request.param).eval()


@torch.no_grad()
def logits(model, ids, **more):
    return model(ids, **more).logits


def near(a, b):
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3)


def test_a_prefix_alone_is_the_same_place_in_the_whole(model):
    whole = logits(model, IDS)
    for length in (1, 7, 23):
        assert near(logits(model, IDS[:, :length]), whole[:, :length])
    assert near(logits(model, IDS[1:]), whole[1:])


@torch.no_grad()
def test_decoding_with_a_cache_is_the_whole(model):
    whole, out, cache = logits(model, IDS), [], {}
    for start, stop in ((0, 9), *((i, i + 1) for i in range(9, 40))):
        step = model(IDS[:, start:stop], **cache, use_cache=True)
        cache = cache_of(step)
        out.append(step.logits)
    assert near(torch.cat(out, 1), whole)


def test_generated_text_is_that_of_the_whole_and_of_a_padded_batch(model):
    prompt = IDS[:1, :6]
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0]
    assert torch.equal(logits(model, alone[None])[0, 5:-1].argmax(-1), alone[6:])
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), prompt], 1)
    both = torch.cat([padded, IDS[1:, :10]])
    mask = (both != 0).long()
    together = model.generate(both, attention_mask=mask, **options)[0]
    assert torch.equal(together[10:], alone[6:])
    assert near(logits(model, padded, attention_mask=mask[:1])[:, 4:], logits(model, prompt))


def test_layer_by_layer_is_the_whole(model, tmp_path):
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[1, 30:] = False
    batch = Tokens(IDS, mask)
    save_live(copy.deepcopy(model), None, tmp_path)
    streamed = [out for out, _ in Layerwise(resolve(str(tmp_path))).run([batch]).logits]
    (whole,) = [out for out, _ in InMemory(model).run([batch]).logits]
    assert torch.equal(streamed[0][mask], whole[mask])


def test_a_refit_sees_the_draws_of_the_result(monkeypatch):
    """Each batch's tokens reach the router that is refitted, without padding."""
    mask = torch.ones(4, 64, dtype=torch.bool)
    mask[2, 40:] = False
    tokens = Tokens(many_tokens().input_ids[:4], mask)
    seen = []
    forward = Router.forward

    def noted(self, x_TD):
        seen.append(forward(self, x_TD))
        return seen[-1]

    monkeypatch.setattr(Router, "forward", noted)
    config = moesaic.MoREConfig(variant="random", active=0.7, refit=True, layers="all")
    result = moesaic.carve(tiny_model("llama"), config, calibration=tokens, progress=False)
    layer = result.plan.layers[0]
    assert seen
    passage = RunningTokens()
    passage.see(tokens.input_ids, torch.arange(64).expand(4, 64), 0)
    wanted = passage.uniform(4 * 64, len(layer.petals), torch.device("cpu"))
    chosen = torch.zeros_like(wanted).scatter(1, wanted.topk(layer.top_k).indices, 1)
    assert torch.equal(seen[0], chosen[mask.flatten()])
    seen.clear()
    logits(result.model, tokens.input_ids)
    assert torch.equal(seen[0], chosen)


def test_numbers_are_even_and_their_streams_apart():
    passage = RunningTokens()
    passage.see(torch.full((1, 5000), 7), torch.arange(5000)[None], 2)
    device = torch.device("cpu")
    first = passage.uniform(5000, 4, device)
    assert (first.mean(0) - 0.5).abs().max() < 0.02
    assert first.min() > 0
    assert first.max() < 1
    second = passage.uniform(5000, 4, device, stream=1)
    both = torch.cat([first, second], 1).T
    assert (both.corrcoef() - torch.eye(8)).abs().max() < 0.06
    passage.see(torch.full((1, 5000), 8), torch.arange(5000)[None], 2)
    assert not torch.equal(passage.uniform(5000, 4, device), first)
    passage.see(torch.full((1, 5000), 7), torch.arange(5000)[None], 3)
    assert not torch.equal(passage.uniform(5000, 4, device), first)
