"""Slimming: experts and dense FFNs made narrower, neuron by neuron."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from builders import equal, loaded, logits, tiny_model, tiny_moe, weights

import moesaic
from moesaic import MoesaicError, SlimConfig
from moesaic.arch.dense import DENSE
from moesaic.arch.mixture import MOE, base_arch, moe_arch
from moesaic.layers.slimmed import SlimmedLayer
from moesaic.methods.slim.choice import losses, routed
from moesaic.methods.slim.curvature import curvatures
from moesaic.methods.slim.scores import OWN, SCORES
from moesaic.stream.job import Job
from moesaic.stream.neurons import observe_neurons


def slimmed(model: Any, tokens: Any, *, compare: tuple[str, ...] = (), **options: Any) -> Any:
    """What slimming makes of a model."""
    return moesaic.slim(model, SlimConfig(**options), text=tokens, compare=compare)


def site_of(model: Any, tokens: Any, layer: int | None = None) -> Any:
    """The first routed layer of a model, or one layer, with the tokens that reach it."""
    job = Job(moesaic.RunArgs(model, text=tokens), lambda config: base_arch(config))
    layers = job.arch.moe_layers(model) if isinstance(job.arch, type(MOE["mixtral"])) else [0]
    wanted = layers[0] if layer is None else layer
    stream = iter(job.stream([wanted], job.arch.view))
    site = next(stream)
    site.stream = stream  # which clears the site's tokens when it ends
    return site


@pytest.fixture(params=sorted({**DENSE, **MOE}))
def any_type(request):
    return request.param


def any_model(model_type, **changes):
    build = tiny_moe if model_type in MOE else tiny_model
    return build(model_type, **changes)


# --- every architecture --------------------------------------------------------------------------


def test_result_is_native_and_what_it_computes_is_the_original_without_neurons(
    any_type, tokens, tmp_path
):
    """Saved, loaded by transformers alone, and compared with masked neurons."""
    model = any_model(any_type)
    result = slimmed(model, tokens, keep=0.5)
    result.save(tmp_path / "out")
    again = loaded(tmp_path / "out")
    assert again.config.model_type == any_type
    assert equal(dict(again.state_dict()), dict(result.model.state_dict()))
    masked = copy.deepcopy(model)
    silence(masked, result.plan)
    found = logits(again, tokens)
    torch.testing.assert_close(found, logits(masked, tokens), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, logits(model, tokens), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def silence(model, plan):
    """Set the down columns of neurons that go to zero."""
    arch = base_arch(model.config)
    for i, layer in plan.layers.items():
        view = arch.view(arch.layers(model)[i])
        orders = layer.neurons_EW if isinstance(layer, SlimmedLayer) else layer.order_W[None]
        for expert, kept in enumerate(orders):
            down_DM = view.weights_of(expert)[-1]
            gone = torch.ones(down_DM.shape[1], dtype=torch.bool)
            gone[kept] = False
            down_DM[:, gone] = 0


def test_from_disk_is_from_memory(any_type, tokens, tmp_path):
    model = any_model(any_type)
    model.save_pretrained(tmp_path / "base", max_shard_size="60KB")
    (tmp_path / "live").mkdir()
    slimmed(model, tokens, keep=0.5, refit=True).write(tmp_path / "live")
    slimmed(str(tmp_path / "base"), tokens, keep=0.5, refit=True).save(tmp_path / "disk")
    assert equal(weights(tmp_path / "disk"), weights(tmp_path / "live"))
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("disk", "live")
    ]
    assert configs[0] == configs[1]
    moesaic.apply(str(tmp_path / "base"), tmp_path / "disk", tmp_path / "applied")
    assert equal(weights(tmp_path / "applied"), weights(tmp_path / "disk"))


def test_keeping_all_neurons_is_the_identity(any_type, tokens):
    model = any_model(any_type)
    result = slimmed(model, tokens, keep=1.0)
    assert equal(dict(result.model.state_dict()), dict(model.state_dict()))


def test_table_knows_how_experts_lie(moe):
    arch = moe_arch(moe.config)
    experts = arch.mixture(arch.layers(moe)[arch.moe_layers(moe)[0]]).experts
    assert arch.transposed == experts.is_transposed == (not experts.is_concatenated)


# --- formulas ------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss", "granitemoeshared", "llama"])
def test_energy_is_what_a_neuron_writes(model_type, tokens):
    """sum over tokens of |w h_j d_j|^2, neuron by neuron, by the module's own weights."""
    site = site_of(any_model(model_type), tokens)
    view, stats = site.view, observe_neurons(site)
    (x_TD,) = list(site.inputs())
    score_EM = SCORES["energy"].score(neurons(stats.energy_EM, stats.reach_EM))
    for i in range(view.count):
        down_DM = view.weights_of(i)[-1]
        if model_type == "llama":
            wh_TM = view.hidden(x_TD)
        else:
            w_TE = view.routing.weights(view.logits(x_TD))
            wh_TM = view.hidden(i, x_TD) * w_TE[:, i, None]
        for j in (0, 7, down_DM.shape[1] - 1):
            written_TD = wh_TM[:, j, None] * down_DM[:, j]
            expected = written_TD.double().square().sum().sqrt()
            torch.testing.assert_close(score_EM[i, j], expected, rtol=1e-5, atol=1e-8)


def neurons(energy, reach, size=None, curvature=None, seed=0):
    from moesaic.methods.slim.scores import Neurons

    return Neurons(energy, reach, size if size is not None else reach, curvature, seed)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss", "granitemoeshared", "gemma2"])
def test_curvature_is_that_of_the_whole_model(model_type, padded):
    """Gradients layer by layer are those of one backward pass; (g . d_j)^2 token by token."""
    model = any_model(model_type)
    arch = base_arch(model.config)
    job = Job(moesaic.RunArgs(model, text=padded), lambda config: base_arch(config))
    layers = arch.moe_layers(model) if model_type in MOE else [0, 2]
    found = curvatures(job, layers)
    seen = {}
    handles = [
        arch.ffn_of(arch.layers(model)[i]).register_forward_hook(
            lambda _, args, out, i=i: seen.update({i: (args[0], out)})
        )
        for i in layers
    ]
    ids, mask = padded.input_ids, padded.attention_mask
    predicted = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    picked = predicted.gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -picked[mask[:, 1:]].sum()
    ys = [y[0] if isinstance(y, tuple) else y for _, y in seen.values()]
    gradients = torch.autograd.grad(loss, ys)
    for handle in handles:
        handle.remove()
    for (i, (x, _)), g in zip(seen.items(), gradients, strict=True):
        view = arch.view(arch.layers(model)[i])
        x_TD, g_TD = x[mask].detach(), g[mask]
        for e in range(view.count):
            down_DM = view.weights_of(e)[-1].detach()
            ran = torch.ones(len(x_TD), dtype=torch.bool)
            if model_type in MOE:
                ran = view.routing.weights(view.logits(x_TD))[:, e] != 0
            expected = (g_TD[ran] @ down_DM[:, 5]).square().mean().double()
            torch.testing.assert_close(
                found[i].routed_EM[e, 5], expected.nan_to_num(), rtol=2e-3, atol=1e-12
            )
        if view.shared_ffn is not None:
            down_DS = view.shared_ffn.down_DM.detach()
            expected = (g_TD @ down_DS).square().mean(0).double()
            torch.testing.assert_close(found[i].shared_S, expected, rtol=2e-3, atol=1e-12)
