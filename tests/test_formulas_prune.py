"""Every criterion of pruning against its definition, by running experts token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from builders import VOCAB, statistics, tiny_moe
from torch import Tensor

import moesaic
from moesaic.arch.lookup import moe_arch
from moesaic.data.text import Tokens
from moesaic.methods.prune import reconstruction
from moesaic.methods.prune.config import BUILT_IN, CRITERIA, PruneConfig, ScoredLayer
from moesaic.observation.stream import LayerStream

EXPERTS = 8
Calls = list[tuple[int, float, Tensor]]
"""By token and choice: the expert's number, its combine weight and its output."""


def tokens_of(rows: int) -> Tokens:
    return Tokens(torch.randint(1, VOCAB, (rows, 8), generator=torch.Generator().manual_seed(1)))


@cache
@torch.no_grad()
def observed(moe_type: str, rows: int) -> tuple[ScoredLayer, list[Calls], Any]:
    """The first routed layer as criteria see it, what every token does in it, and the model."""
    model = tiny_moe(moe_type)
    arch = moe_arch(model.config)
    layers = arch.moe_layers(model)
    stream = iter(LayerStream(model, arch, tokens_of(rows), layers, view=arch.mixture))
    site = next(stream)
    view = site.view
    x_TD = torch.cat(list(site.inputs()))
    _, g_TK, chosen_TK = view.router(x_TD)
    done: list[Calls] = []
    for x_D, g_K, chosen_K in zip(x_TD, g_TK.tolist(), chosen_TK.tolist(), strict=True):
        done.append(
            [
                (e, g, view.expert(e, x_D[None])[0].double())
                for e, g in zip(chosen_K, g_K, strict=True)
            ]
        )
    case = ScoredLayer(statistics(site), view.routing, site.index)
    spread = []
    for e in range(EXPERTS):
        w = torch.cat([part.flatten() for part in view.weights_of(e)]).tolist()
        spread.append(sum(map(abs, w)) / len(w) / math.sqrt(sum(v * v for v in w) / len(w)))
    return case, done, (model, spread)


def outputs_of(e: int, done: list[Calls]) -> list[tuple[float, float]]:
    """(g, |f|) of every token that is routed to expert ``e``."""
    return [
        (g, math.sqrt(sum(v * v for v in f.tolist())))
        for calls in done
        for expert, g, f in calls
        if expert == e
    ]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


DEFINITIONS: dict[str, Callable[[int, list[Calls], list[float]], float]] = {
    "frequency": lambda e, done, _: len(outputs_of(e, done)),
    "gate": lambda e, done, _: sum(g for g, _ in outputs_of(e, done)),
    "ean": lambda e, done, _: sum(f for _, f in outputs_of(e, done)),
    "weighted-ean": lambda e, done, _: sum(g * f for g, f in outputs_of(e, done)),
    "man": lambda e, done, _: mean([f for _, f in outputs_of(e, done)]),
    "msan": lambda e, done, _: mean([f * f for _, f in outputs_of(e, done)]),
    "reap": lambda e, done, _: mean([g * f for g, f in outputs_of(e, done)]),
    "aimer": lambda e, _, spread: -spread[e],
}
"""Scores: the expert with the highest stays."""
OTHERS = ("reconstruction", "pairwise", "random")


def test_every_criterion_has_a_definition_here() -> None:
    assert set(DEFINITIONS) | set(OTHERS) == {c.name for c in BUILT_IN}
    for criterion in BUILT_IN:
        assert (criterion.score is None) != (criterion.losses is None)
        assert (criterion.losses is not None) == (criterion.name in ("reconstruction", "pairwise"))


@pytest.mark.parametrize("rows", [6, 1], ids=["many tokens", "some experts idle"])
@pytest.mark.parametrize("moe_type", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_scores_are_their_definitions(name: str, moe_type: str, rows: int) -> None:
    case, done, (_, spread) = observed(moe_type, rows)
    if rows == 1:
        assert (case.stats["calls_E"] == 0).any()
    wanted = [DEFINITIONS[name](e, done, spread) for e in range(EXPERTS)]
    score = CRITERIA[name].score
    assert score is not None
    assert score(case).tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", [*DEFINITIONS])
def test_those_of_the_highest_scores_stay(name: str) -> None:
    _, done, (model, spread) = observed("qwen2_moe", 6)
    wanted = [DEFINITIONS[name](e, done, spread) for e in range(EXPERTS)]
    config = PruneConfig(keep=5, score=name)
    layer = moesaic.prune(model, config, calibration=tokens_of(6)).plan.layers[0]
    lowest = sorted(sorted(range(EXPERTS), key=lambda e: wanted[e])[3:])
    assert layer.kept == lowest  # type: ignore[attr-defined]


@pytest.mark.parametrize("moe_type", ["mixtral", "qwen2_moe"])
def test_pairwise_is_what_the_experts_that_go_added(moe_type: str) -> None:
    """No token is rerouted: the squared norm of what the dropped experts had added."""
    case, done, _ = observed(moe_type, 6)
    criterion = CRITERIA["pairwise"]
    assert criterion.losses is not None
    assert criterion.squared
    losses, whole = criterion.losses(case)
    generator = torch.Generator().manual_seed(0)
    sets_CE = torch.rand(20, EXPERTS, generator=generator) < 0.6
    zero = torch.zeros_like(done[0][0][2])
    for kept_E, found in zip(sets_CE, losses(sets_CE).tolist(), strict=True):
        wanted = sum(
            sum((g * f for e, g, f in calls if not kept_E[e]), zero).square().sum().item()
            for calls in done
        )
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    every = sum(sum((g * f for _, g, f in c), zero).square().sum().item() for c in done)
    assert whole == pytest.approx(math.sqrt(every), rel=1e-4)


def test_reconstruction_counts_as_everything_lost_what_the_layer_adds() -> None:
    """Its losses are compared with the block cut to each set in ``test_prune_criteria.py``."""
    case, done, _ = observed("mixtral", 6)
    criterion = CRITERIA["reconstruction"]
    assert criterion.losses is not None
    losses, whole = criterion.losses(case)
    zero = torch.zeros_like(done[0][0][2])
    every = sum(sum((g * f for _, g, f in c), zero).square().sum().item() for c in done)
    assert whole == pytest.approx(math.sqrt(every), rel=1e-4)
    assert losses(torch.ones(1, EXPERTS, dtype=torch.bool)).item() == 0


def test_random_scores_follow_seed_and_layer_alone() -> None:
    case, _, _ = observed("mixtral", 6)
    score = CRITERIA["random"].score
    assert score is not None

    def drawn(seed: int, layer: int) -> list[float]:
        return score(ScoredLayer(case.stats, case.routing, layer, seed)).tolist()

    assert drawn(1, 0) == drawn(1, 0)
    assert len({tuple(drawn(seed, layer)) for seed in range(4) for layer in range(4)}) == 16
    values = torch.tensor([drawn(seed, 0) for seed in range(200)])
    assert values.min() >= 0
    assert values.max() < 1
    assert (values.mean(0) - 0.5).abs().max() < 0.1, "no expert is preferred"


@pytest.mark.parametrize("summed", [False, True])
def test_norms_are_of_batches_where_that_is_asked_for(
    summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconstruction, "RELEASED_BATCH", 7)
    case, _, _ = observed("mixtral", 6)
    asked = replace(case, sum_batch_norms=summed)
    kept_CE = torch.ones(EXPERTS, EXPERTS, dtype=torch.bool).fill_diagonal_(False)
    losses = CRITERIA["reconstruction"].losses
    assert losses is not None
    found, wanted, other = (
        make(kept_CE)
        for make in (
            losses(asked)[0],
            reconstruction.Reconstruction(case.stats, case.routing, summed),
            reconstruction.Reconstruction(case.stats, case.routing, not summed),
        )
    )
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, other)
