"""Estimated KL of changed layers, against measured KL and against its own definition."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import MOE, tiny_model, tiny_moe
from test_branches import narrower
from torch import nn

from moesaic.arch.lookup import base_arch
from moesaic.data.text import Tokens
from moesaic.io.source import resolve
from moesaic.losses import divergence, log_probabilities
from moesaic.observation.branches import changed as changed_by
from moesaic.observation.branches import divergences
from moesaic.observation.estimates import PricedLayer, estimated, estimates, priced_layers
from moesaic.observation.stream import BEFORE, LayerStream


@contextmanager
def noisy(layer: nn.Module, share: float) -> Iterator[nn.Module]:
    """The layer with noise of ``share`` of their spread on the FFN's down projections."""
    generator = torch.Generator().manual_seed(3)
    matrices = {p: p.detach().clone() for name, p in layer.named_parameters() if "down" in name}
    assert matrices
    with torch.no_grad():
        for p, before in matrices.items():
            p += share * before.std() * torch.randn(before.shape, generator=generator)
        yield layer
        for p, before in matrices.items():
            p.copy_(before)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "deepseek_v3"])
def test_small_changes_are_estimated_as_measured(model_type: str, padded: Tokens) -> None:
    """Of each layer alone and of all together, interactions included. Of mixtures whose routers
    are random the last layer alone: behind any other, experts change by chance."""
    model = (tiny_moe if model_type in MOE else tiny_model)(model_type, num_hidden_layers=3)
    arch = base_arch(model.config)
    stream = LayerStream(model, arch, padded, view=arch.view)
    changes: list[Any] = [{i: partial(noisy, share=0.1)} for i in range(3)]
    changes += [{0: changes[0][0], 1: changes[1][1], 2: changes[2][2]}, {}]
    measured = divergences(stream, changes).mean(1)
    found = estimated(stream, changes, draws=128).mean(1)
    assert found[-1] == 0
    some = slice(2, 3) if model_type in MOE else slice(4)
    assert measured[some].min() > 1e-7
    torch.testing.assert_close(found[some], measured[some], rtol=0.25, atol=1e-8)


def test_larger_changes_are_in_the_measured_order(tokens: Tokens) -> None:
    model = tiny_moe("mixtral", num_hidden_layers=3)
    arch = base_arch(model.config)
    stream = LayerStream(model, arch, tokens, view=arch.view)
    plans = [narrower("mixtral", width) for width in (4, 8, 12)]
    changes = [{i: plan} for i in range(3) for plan in plans]
    measured, found = divergences(stream, changes).mean(1), estimated(stream, changes, 8).mean(1)
    logs = torch.stack([measured.log(), found.log()])
    assert torch.corrcoef(logs)[0, 1] > 0.95
    for layer in found.view(3, 3):
        assert layer.argsort(descending=True).tolist() == [0, 1, 2]


def test_layers_come_from_last_to_first_and_are_read_twice(tokens: Tokens) -> None:
    model = tiny_moe("mixtral", num_hidden_layers=3)
    arch = base_arch(model.config)
    opened: list[int] = []

    @contextmanager
    def opening(i: int) -> Iterator[None]:
        if i in range(3):  # a layer
            opened.append(i)
        yield

    stream = LayerStream(model, arch, tokens, view=arch.view, opening=opening)
    places = [getattr(part, "block", None) for part in priced_layers(stream)]
    assert [block and block.index for block in places] == [2, 1, 0, None]
    assert opened == [0, 1, 2, 2, 1, 0]


def test_the_weights_of_one_layer_are_in_memory_at_a_time(tokens: Tokens, tmp_path: Path) -> None:
    """What remembers a layer's computation would keep its weights, beside those of the next one."""
    tiny_moe("mixtral", num_hidden_layers=3).save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    arch = base_arch(source.config)
    stream = LayerStream.from_disk(source.checkpoint, source.config, arch, tokens, view=arch.view)
    seen: list[Any] = []
    for part in priced_layers(stream, draws=2):
        assert not any(weight() is not None for weight in seen)
        if isinstance(part, PricedLayer):
            seen += map(weakref.ref, part.block.layer.parameters())
        del part


def test_draws_are_repeatable_and_differ(tokens: Tokens) -> None:
    model = tiny_moe("mixtral", num_hidden_layers=2)
    arch = base_arch(model.config)
    stream = LayerStream(model, arch, tokens, view=arch.view)
    changes = [{0: narrower("mixtral", 8)}]
    one, again, other = (estimated(stream, changes, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_changed_embeddings_are_estimated_and_a_changed_head_is_measured(padded: Tokens) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    arch = base_arch(model.config)
    stream = LayerStream(model, arch, padded, view=arch.view)

    @contextmanager
    def changed(name: str, whole: nn.Module) -> Iterator[nn.Module]:
        weight = whole.get_parameter(name)
        before, generator = weight.detach().clone(), torch.Generator().manual_seed(3)
        with torch.no_grad():
            weight += 0.1 * before.std() * torch.randn(before.shape, generator=generator)
            yield whole
            weight.copy_(before)

    def logits() -> torch.Tensor:
        mask = padded.attention_mask
        with torch.no_grad():
            found = model(input_ids=padded.input_ids, attention_mask=mask).logits
        return log_probabilities(found, padded.labels)

    places = {"model.embed_tokens.weight": BEFORE, "lm_head.weight": 2}
    changes = [{place: partial(changed, name)} for name, place in places.items()]
    found, original = estimated(stream, changes, draws=128).mean(1), logits()
    for name, kl, tolerance in zip(places, found.tolist(), (0.25, 1e-4), strict=True):
        with changed(name, model):
            measured = divergence(original, logits()).mean().item()
        assert measured > 1e-6
        assert kl == pytest.approx(measured, rel=tolerance)


def test_finished_layers_of_a_killed_pass_are_not_run_again(tokens: Tokens, tmp_path: Path) -> None:
    model = tiny_moe("mixtral", num_hidden_layers=3)
    arch = base_arch(model.config)
    stream = LayerStream(model, arch, tokens, view=arch.view)
    seen, killed = list[int](), [True]

    @contextmanager
    def narrowed(place: int, layer: nn.Module) -> Iterator[nn.Module]:
        if killed[0] and place == 1:
            raise KeyboardInterrupt
        seen.append(place)
        with changed_by(layer, arch, narrower("mixtral", 4 + 4 * place)) as other:
            assert other is not None
            yield other

    changes: list[Any] = [{i: partial(narrowed, i)} for i in range(3)]
    with pytest.raises(KeyboardInterrupt):
        estimates(stream, changes, 2, folder=tmp_path)
    assert seen == [2]
    killed[0] = False
    resumed = estimates(stream, changes, 2, folder=tmp_path)
    assert seen == [2, 1, 0]
    whole = estimates(stream, changes, 2)
    assert torch.equal(resumed.v_CKN, whole.v_CKN)
    assert whole.kl_CN.mean(1).min() > 0


def test_changes_of_several_layers_add_up(tokens: Tokens) -> None:
    """Before they are squared: together they are what one change of all of them is."""
    model = tiny_moe("mixtral", num_hidden_layers=3)
    arch = base_arch(model.config)
    stream = LayerStream(model, arch, tokens, view=arch.view)
    changes = [{i: narrower("mixtral", 4)} for i in range(3)]
    found = estimates(stream, [*changes, {i: changes[i][i] for i in range(3)}], 4)
    torch.testing.assert_close(found.v_CKN[:3].sum(0), found.v_CKN[3])
    assert not torch.allclose(found.kl_CN[:3].sum(0), found.kl_CN[3])
