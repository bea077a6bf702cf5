"""Formulas of methods by hand or by an independent few lines: divergences, searches, clusters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moesaic.methods.cdmoe.divergence import cosine, js, kl


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- divergences ---------------------------------------------------------------------------------


def shares(x: Tensor) -> list[float]:
    whole = sum(math.exp(v) for v in x.tolist())
    return [math.exp(v) / whole for v in x.tolist()]


def kl_by_hand(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("apart", [1.0, 0.1])
def test_divergences_of_hidden_states(apart: float) -> None:
    p_ND = drawn(5, 7)
    q_ND = p_ND + apart * drawn(5, 7, seed=1)
    kept = p_ND.clone(), q_ND.clone()
    for i, (p_D, q_D) in enumerate(zip(p_ND, q_ND, strict=True)):
        p, q = shares(p_D), shares(q_D)
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        close = {"rel": 1e-3, "abs": 3e-7}
        assert kl(p_ND, q_ND)[i].item() == pytest.approx(kl_by_hand(p, q), **close)
        half = (kl_by_hand(p, m) + kl_by_hand(q, m)) / 2
        assert js(p_ND, q_ND)[i].item() == pytest.approx(half, **close)
        inner = sum(a * b for a, b in zip(p_D.tolist(), q_D.tolist(), strict=True))
        size = math.sqrt(sum(a * a for a in p_D.tolist()) * sum(b * b for b in q_D.tolist()))
        assert cosine(p_ND, q_ND)[i].item() == pytest.approx(1 - inner / size, **close)
    assert torch.equal(p_ND, kept[0])
    assert torch.equal(q_ND, kept[1])


def test_equal_states_are_at_no_distance_and_far_ones_at_ln_2() -> None:
    p_ND = torch.tensor([[0.0, 200.0], [3.0, 1.0]])
    assert 0 <= js(p_ND, p_ND.clone()).min() <= js(p_ND, p_ND.clone()).max() < 1e-7
    assert kl(p_ND, p_ND.clone()).tolist() == [0, 0]
    assert js(p_ND[:1], -p_ND[:1]).item() == pytest.approx(math.log(2))
    assert js(p_ND[:1], p_ND.clone()).shape == (2,)
