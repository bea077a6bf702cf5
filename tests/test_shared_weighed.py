"""Shared experts that the router weighs together with those it chooses (Inkling)."""

import copy
from dataclasses import replace

import pytest
import torch
from builders import equal, loaded, logits, stream_of, tiny_tokenizer, weights
from shrunken import small_model

from moesaic import CondenseConfig, PruneConfig, SlimConfig, Tokens, TuneConfig
from moesaic.api import condense, observe, prune, slim, tune
from moesaic.arch.dense import FFNNames
from moesaic.arch.lookup import base_arch, moe_arch
from moesaic.observation.stats import GRAM, gram_room, layer_stats
from moesaic.plans.cut import CutLayer
from moesaic.plans.neurons import of_stacked
from moesaic.surgery import apply_layer, layer_uses
from moesaic.train.tune.method import factors

TEXT = Tokens(torch.randint(1, 384, (6, 32), generator=torch.Generator().manual_seed(1)))


@pytest.fixture
def model():
    model = small_model("inkling_text")
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.mlp.gate.global_scale.fill_(0.7)
    return model


def test_rows_of_shared_experts_are_kept(model):
    before = copy.deepcopy(model.model.layers[1].mlp.state_dict())
    apply_layer(model.model.layers, 1, moe_arch(model.config), CutLayer(torch.tensor([1, 4, 6])))
    after = model.model.layers[1].mlp.state_dict()
    rows = torch.tensor([1, 4, 6, 8, 9])
    assert torch.equal(after["gate.weight"], before["gate.weight"][rows])
    bias = "gate.e_score_correction_bias"
    assert torch.equal(after[bias], before[bias][rows[:3]])
    others = {n for n in before if "shared" in n or "global" in n}
    assert len(others) == 4
    assert all(torch.equal(after[n], before[n]) for n in others)


def test_gram_matrices_of_shared_experts_keep_to_their_memory_too(model):
    stream = stream_of(model, TEXT, [1])
    for site in stream:
        room = gram_room(TEXT.count // 2, site.view.count + 2)
        stats = layer_stats(site, GRAM, TEXT, range(len(site)), room)
        assert stats["gram_SP"].nbytes == room


def test_decided_from_statistics_as_from_the_model(model, tmp_path):
    """Where the layer is closed, its router's own factor is read from disk."""
    model.save_pretrained(tmp_path / "base")
    base, file = str(tmp_path / "base"), tmp_path / "stats.safetensors"
    observe(base, file, calibration=TEXT)
    config = PruneConfig(keep=3, refit=False)
    seen = prune(model, config, calibration=TEXT)
    from_file = prune(base, config, stats=str(file))
    assert seen.analyses == from_file.analyses
    assert all(analysis["loss"] > 0 for analysis in seen.analyses.values())
    assert equal(weights(seen.save(tmp_path / "a")), weights(from_file.save(tmp_path / "b")))


def test_condensed_shared_experts_have_their_mean_weights(model, tmp_path):
    """And while they are trained these stay apart from their down projections."""
    found = []
    gate = model.model.layers[3].mlp.gate
    handle = gate.register_forward_hook(lambda _, args, out: found.append(out[3]))
    logits(model, TEXT)
    handle.remove()
    config = CondenseConfig(count=1, keep="shared", candidates=(3,), refit=False)
    result = condense(model, config, text=TEXT)
    scales = result.plan.layers[3].shared_scale
    torch.testing.assert_close(torch.tensor(scales), found[0].mean(0))
    folder = result.save(tmp_path / "out")
    fixed = factors(base_arch(model.config), model.config, result.plan)
    assert layer_uses(result.model, base_arch(result.model.config))[3].width == 32
    assert torch.equal(fixed[3], torch.tensor(scales).repeat_interleave(16))
    tuned = tune(str(folder), TuneConfig(steps=4), text=TEXT, tokenizer=tiny_tokenizer())
    change = logits(tuned.model, TEXT) - logits(result.model, TEXT)
    assert 0 < change.abs().max() < 0.1


@pytest.mark.usefixtures("short_text")
@pytest.mark.parametrize("shared", [0.5, 0.25], ids=["as narrow", "filled up"])
def test_each_shared_expert_is_as_narrow_as_a_routed_one(shared, model, tmp_path):
    config = SlimConfig(keep=0.5, shared=shared, allocate="uniform", refit=True)
    result, plain = (slim(model, c, text=TEXT) for c in (config, replace(config, refit=False)))
    whole, far = logits(model, TEXT), [logits(r.model, TEXT) for r in (result, plain)]
    assert (far[0] - whole).norm() < (far[1] - whole).norm()
    again = loaded(result.save(tmp_path / "out"))
    assert again.config.model_type == "inkling_text"
    assert again.model.layers[2].mlp.shared_experts.down_proj.shape == (2, 32, 8)
    assert torch.equal(logits(again, TEXT), logits(result.model, TEXT))


def test_no_neuron_stands_in_another_experts_place():
    tensor = torch.arange(24.0).view(2, 4, 3)
    kept = of_stacked(FFNNames(), "up_proj", tensor, torch.tensor([1, -1, 6, 7]))
    wanted = torch.stack([torch.stack([tensor[0, 1], torch.zeros(3)]), tensor[1, 2:]])
    assert torch.equal(kept, wanted)
    with pytest.raises(ValueError, match="another's place"):
        of_stacked(FFNNames(), "up_proj", tensor, torch.tensor([1, 4, 6, 7]))
