"""What is kept of a layer, of several parts at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import converted, equal, logits, tiny_moe

from moesaic.arch.lookup import moe_arch
from moesaic.errors import MoesaicError
from moesaic.plans.cut import CutLayer

KEPT = torch.tensor([1, 4, 6])
NEURONS = torch.stack([torch.arange(n, n + 16, 2) % 16 for n in range(3)])
SHARED = torch.arange(0, 16, 2)


def cut(model: Any, layer: CutLayer) -> Any:
    arch = moe_arch(model.config)
    return converted(model, dict.fromkeys(arch.moe_layers(model), layer))


@pytest.mark.parametrize("skips", [False, True])
def test_one_cut_is_its_parts_after_one_another(skips: bool, tokens: Any) -> None:
    """Experts, their neurons, the shared path's, and what routers do: in any number of plans."""
    options: dict[str, Any] = {"beta": 0.7, "rule": "top2"} if skips else {"top_k": 1}
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


WRONG: dict[str, tuple[str, Callable[[], CutLayer]]] = {
    "names no experts": ("mixtral", lambda: CutLayer(None, NEURONS[:1], 16)),
    "no shared path": ("mixtral", lambda: CutLayer(shared_S=SHARED)),
    "cannot run 4 of 3": ("mixtral", lambda: CutLayer(KEPT, top_k=4)),
    "no router": ("deepseek_v3", lambda: CutLayer(top_k=1)),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_cut_of_what_a_layer_does_not_have_is_refused(message: str) -> None:
    model_type, layer = WRONG[message]
    model = tiny_moe(model_type)
    dense = 0 if model_type == "deepseek_v3" else 1
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MoesaicError, match=message):
        converted(model, {dense: layer()})
    assert equal(dict(model.state_dict()), dict(before))
