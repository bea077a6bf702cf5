"""DSMoE's gate, its scale, its losses and its controller against values computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from builders import configured

from moesaic.carving.dsmoe.config import DSMoEConfig
from moesaic.carving.dsmoe.method import SparseObjective, imbalance, sparsity
from moesaic.carving.routers import (
    SoftmaxRouter,
    ThresholdRouter,
    norm_scale,
    straight_through,
    thresholded,
)

ROWS = [[1.0, 0.0], [0.0, -1.0], [0.5, 0.5]]
TOKENS = [[2.0, 1.0], [-1.0, 0.25], [0.5, -3.0]]


def gates() -> list[list[float]]:
    """sigmoid(x . Y_i) of every token and block."""
    return [[1 / (1 + math.exp(-(x[0] * y[0] + x[1] * y[1]))) for y in ROWS] for x in TOKENS]


def router_of(**options: float | bool) -> ThresholdRouter:
    router = ThresholdRouter(2, 3, 0, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        router.weight.copy_(torch.tensor(ROWS))
    return router


@pytest.mark.parametrize("tau", [0.4, 0.5, 0.7])
@pytest.mark.parametrize("training", [True, False])
def test_the_gate_by_hand(tau: float, training: bool) -> None:
    """Eqs. 3 and 7: the sigmoid where it is above tau, zero elsewhere."""
    router = router_of(tau=tau).train(training)
    found = router(torch.tensor(TOKENS)).tolist()
    wanted = [[g if g > tau else 0.0 for g in row] for row in gates()]
    assert any(g for row in wanted for g in row)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)


def test_a_gate_at_the_threshold_is_idle() -> None:
    assert thresholded(torch.tensor([0.5, 0.50001]), 0.5).tolist() == [0.0, pytest.approx(0.50001)]


def test_the_straight_through_gradient_by_hand() -> None:
    """Eqs. 10 and 11: dS/dg is 1 for idle gates too, so that dY is g (1 - g) x."""
    for through in (True, False):
        router = router_of(through=through).train()
        router(torch.tensor(TOKENS[:1])).sum().backward()
        for row, g in zip(router.weight.grad.tolist(), gates()[0], strict=True):
            slope = g * (1 - g) if through or g > 0.5 else 0.0
            assert row == pytest.approx([slope * v for v in TOKENS[0]], rel=1e-4, abs=1e-7)
    value = torch.tensor([3.0])
    g = torch.tensor([0.25], requires_grad=True)
    S = straight_through(value, g)
    (5 * S).backward()
    assert (S.item(), g.grad.item()) == (3.0, 5.0)


def test_the_scale_by_hand() -> None:
    """Eq. 8: n over the active blocks of a token; over one where there is none."""
    weights_TR = torch.tensor([[0.6, 0.9, 0.0], [0.7, 0.8, 0.9], [0.0, 0.0, 0.0], [0.0, 0.1, 0.0]])
    assert norm_scale(weights_TR).tolist() == [[1.5], [1.0], [3.0], [3.0]]


def test_the_softmax_by_hand() -> None:
    """LLaMA-MoE: the highest logits' own softmax, times the scale."""
    router = SoftmaxRouter(2, 3, 2, scale=1.5)
    with torch.no_grad():
        router.weight.copy_(torch.tensor(ROWS))
    found = router(torch.tensor(TOKENS[:1]))[0].tolist()  # logits 2, -1, 1.5
    one, two = math.exp(2), math.exp(1.5)
    assert found == pytest.approx([1.5 * one / (one + two), 0, 1.5 * two / (one + two)], rel=1e-5)
    powers = [math.exp(v) for v in (2, -1, 1.5)]
    wanted = [p / sum(powers) for p in powers]
    assert router.probabilities(torch.tensor(TOKENS[:1]))[0].tolist() == pytest.approx(wanted)


def test_the_losses_by_hand() -> None:
    G_LTN = torch.tensor([[[0.9, 0.0], [0.6, 0.7]], [[0.0, 0.0], [0.8, 0.0]]])
    assert sparsity(G_LTN).tolist() == pytest.approx([0.9 / 4, 2.1 / 4])
    weights_TN = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])  # f = 1/3, 2/3, 0
    probabilities_TN = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.7, 0.2]])
    wanted = 3 * (1 / 3 * 0.15 + 2 / 3 * 0.6)
    assert imbalance(weights_TN, probabilities_TN).item() == pytest.approx(wanted)


def test_the_controller_by_hand() -> None:
    """Proportional and integral: lambda + gain (sum of what is too many) + 10 gain (the last)."""
    objective = SparseObjective([], configured(DSMoEConfig, sparsity=2.0, gain=0.1), target=0.5)
    assert objective.stepped({"active_blocks": 0.9}) == {"lambda": 2.0}
    assert objective.state == pytest.approx({"lambda": 2 + 0.04 + 0.4, "sum": 0.04})
    assert objective.stepped({"active_blocks": 0.4}) == {"lambda": pytest.approx(2.44)}
    assert objective.state == pytest.approx({"lambda": 2 + 0.03 - 0.1, "sum": 0.03})
    free = SparseObjective([], configured(DSMoEConfig, sparsity=2.0), target=None)
    free.stepped({"active_blocks": 0.9})
    assert free.state["lambda"] == 2.0


class Gates(torch.nn.Module):
    """A router whose gates are given."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.rows = torch.tensor(rows)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.rows


class Gated(torch.nn.Module):
    """A model that asks two routers, and says the same of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = torch.nn.ModuleList(
            [Gates([[0.0, 0.0]] * 3), Gates([*ROWS[:2], [0.0, 0.0]])]
        )

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        for router in self.routers:
            router(torch.ones(3, 2))
        return SimpleNamespace(logits=torch.zeros(1, 3, 4))


def test_blocks_and_tokens_that_idle_are_counted() -> None:
    """The last token predicts nothing. Of two layers the first runs nothing; in the second the
    first token has a gate above 0, the second token one below 0."""
    model = Gated()
    objective = SparseObjective(
        list(model.routers), configured(DSMoEConfig, sparsity=2.0), target=None
    )
    ids = torch.tensor([[1, 2, 3]])
    loss, figures = objective(model, {"input_ids": ids, "labels": ids})
    assert figures["language"].item() == pytest.approx(2 * math.log(4))
    assert figures["idle_tokens"].item() == pytest.approx(1 + 0.5)
    assert figures["active_blocks"].item() == pytest.approx(0.5 / 2)
    assert figures["sparsity"].item() == pytest.approx(1 / 4)
    assert loss.item() == pytest.approx(2 * math.log(4) + 2 / 4)
