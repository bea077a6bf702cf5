"""What changes of some layers do to a model's output, against whole models that were changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from builders import MOE, tiny_model, tiny_moe

from moesaic.arch.lookup import base_arch
from moesaic.data.text import Tokens
from moesaic.losses import predicting
from moesaic.metrics.forward import Whole
from moesaic.metrics.score import qualities
from moesaic.observation.branches import branches, divergences, measured
from moesaic.observation.stream import LayerStream
from moesaic.plans.condensed import DroppedLayer
from moesaic.plans.cut import CutLayer
from moesaic.surgery import apply_layer


def narrower(model_type: str, width: int, shift: int = 0) -> Any:
    order = torch.arange(shift, shift + width)
    if model_type in MOE:
        return CutLayer(torch.arange(8), order.repeat(8, 1), 16)
    return CutLayer(None, order[None], 64)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "olmoe"])
def test_divergences_are_those_of_whole_models(model_type: str, padded: Tokens) -> None:
    """Of one layer, of several, of one layer in two ways, of a layer dropped, and of none."""
    model = (tiny_moe if model_type in MOE else tiny_model)(model_type, num_hidden_layers=3)
    arch, shared = base_arch(model.config), narrower(model_type, 8)
    changes = [
        {1: shared},
        {0: narrower(model_type, 4), 1: shared, 2: narrower(model_type, 12)},
        {1: narrower(model_type, 8, shift=4)},
        {1: shared, 2: DroppedLayer()},
        {},
    ]
    kl_CN = divergences(LayerStream(model, arch, padded, view=arch.view), changes)
    assert kl_CN.shape == (len(changes), len(padded.input_ids))
    found = kl_CN.mean(1).tolist()
    for change, kl in zip(changes, found, strict=True):
        changed = copy.deepcopy(model)
        for i, plan in sorted(change.items(), reverse=True):
            apply_layer(arch.layers(changed), i, arch, plan)
        wanted = qualities([Whole(changed), Whole(model)], padded)[0].kl
        assert kl == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert len({round(kl, 6) for kl in found}) == len(found)


def test_divergences_tell_windows_apart(padded: Tokens) -> None:
    """Each window's is that of the window alone, weighed by its tokens."""
    model = tiny_moe("mixtral", num_hidden_layers=2)
    arch, changes = base_arch(model.config), [{0: narrower("mixtral", 8)}]
    found = divergences(LayerStream(model, arch, padded, view=arch.view), changes)[0]
    every = [padded.rows(slice(n, n + 1)) for n in range(len(padded.input_ids))]
    alone = [
        divergences(LayerStream(model, arch, w, view=arch.view), changes).item() for w in every
    ]
    counts = torch.stack([predicting(window.labels).sum() for window in every]).double()
    assert len({*counts.tolist()}) > 1
    wanted = torch.tensor(alone) * counts / counts.mean()
    torch.testing.assert_close(found, wanted.double(), rtol=1e-4, atol=1e-8)


def test_logits_are_of_one_window_at_a_time(tokens: Tokens) -> None:
    """Those of a whole batch would take gigabytes of a vocabulary of today's size. Changes
    that come to the same model meet the head once."""
    model = tiny_moe("mixtral", num_hidden_layers=2)
    arch, rows = base_arch(model.config), list[int]()

    def made(_: Any, __: Any, out: torch.Tensor) -> None:
        rows.append(len(out))

    model.lm_head.register_forward_hook(made)
    stream = LayerStream(model, arch, tokens, view=arch.view, tokens_per_batch=1 << 20)
    one, other = narrower("mixtral", 8), narrower("mixtral", 4)
    kl_CN = divergences(stream, [{0: one}, {}, {0: other}, {0: one}, {}])
    assert kl_CN.shape == (5, len(tokens.input_ids))
    assert torch.equal(kl_CN[[0, 1]], kl_CN[[3, 4]])
    assert kl_CN[:3].mean(1).unique().numel() == 3
    assert rows == [1] * 4 * len(tokens.input_ids)  # of the original and of three

    rows.clear()
    (original,) = branches(stream, [{}])
    sums_CN, tokens_N = measured(stream, [{0: one}, {}], original=original)
    assert torch.equal(sums_CN / tokens_N.mean(), kl_CN[:2])
    assert rows == [1] * 3 * len(tokens.input_ids)


def test_what_is_alike_goes_together(tokens: Tokens) -> None:
    """The layers before a change, and those that changes share, run once for all."""
    model = tiny_moe("mixtral", num_hidden_layers=3)
    arch, calls = base_arch(model.config), [0, 0, 0]
    for i, layer in enumerate(arch.layers(model)):

        def count(_: Any, __: Any, i: int = i) -> None:
            calls[i] += 1

        layer.mlp.register_forward_pre_hook(count)
    one, other = narrower("mixtral", 8), narrower("mixtral", 4)
    stream = LayerStream(model, arch, tokens, view=arch.view, tokens_per_batch=1 << 20)
    found = branches(stream, [{0: one}, {0: one, 2: other}, {0: one, 2: one}, {0: one}])
    assert calls == [1, 1, 3]
    assert found[0] is found[3]
    assert len({id(states) for states in found}) == 3
