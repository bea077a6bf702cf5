"""CKA of what FFNs activate (MoRE, App. E.2), against loops over its definition."""

from __future__ import annotations

import json
import math
from statistics import median_low
from typing import Any

import pytest
import torch
from builders import tiny_model
from torch import Tensor
from typer.testing import CliRunner

import moesaic
from moesaic import MoesaicError, Tokens
from moesaic.arch.lookup import dense_arch
from moesaic.cli.entry import app
from moesaic.methods.more.similarity import cka, depths, kernel


def brute_kernel(rows: list[list[float]]) -> list[list[float]]:
    """Eq. 15."""
    squares = [[math.dist(a, b) ** 2 for b in rows] for a in rows]
    n = len(rows)
    sigma = median_low(math.sqrt(squares[i][j]) for i in range(n) for j in range(n) if i != j)
    return [[math.exp(-s / (2 * sigma**2)) for s in line] for line in squares]


def brute_cka(k: list[list[float]], other: list[list[float]]) -> float:
    """Eq. 14, with H = I - 1/n written out."""
    n = range(len(k))
    H = [[(i == j) - 1 / len(k) for j in n] for i in n]

    def product(a: Any, b: Any) -> list[list[float]]:
        return [[sum(a[i][m] * b[m][j] for m in n) for j in n] for i in n]

    def inner(a: Any, b: Any) -> float:
        return sum(a[i][j] * b[i][j] for i in n for j in n)

    x, y = (product(product(H, m), H) for m in (k, other))
    return inner(x, y) / math.sqrt(inner(x, x) * inner(y, y))


def test_cka_is_its_definition() -> None:
    X = torch.randn(8, 5, dtype=torch.float64)
    Y = torch.randn(8, 3, dtype=torch.float64) + X[:, :3]
    wanted = brute_kernel(X.tolist()), brute_kernel(Y.tolist())
    for found, by_hand in zip((kernel(X), kernel(Y)), wanted, strict=True):
        torch.testing.assert_close(found, torch.tensor(by_hand, dtype=torch.float64))
    assert cka(kernel(X), kernel(Y)) == pytest.approx(brute_cka(*wanted))
    assert 0 < cka(kernel(X), kernel(Y)) < 1
    turned = X @ torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    assert cka(kernel(X), kernel(3 * turned)) == pytest.approx(1)


def rows_of(model: Any, ids: Tensor) -> list[Tensor]:
    """Each layer's mean hidden activation of every text, from hooks on the down projections."""
    arch = dense_arch(model.config)
    seen: list[Tensor] = []
    handles = [
        arch.ffn_of(layer).down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        for layer in arch.layers(model)
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return [h.double().mean(1) for h in seen]


def test_layers_models_and_texts_are_compared() -> None:
    ids = torch.randint(1, 90, (6, 16), generator=torch.Generator().manual_seed(0))
    more = torch.randint(1, 90, (6, 16), generator=torch.Generator().manual_seed(1))
    model, second = tiny_model("llama"), tiny_model("llama", num_hidden_layers=3)
    found = moesaic.similarity(model, against=second, other=Tokens(more), calibration=ids)
    own, theirs, others = (
        [kernel(x) for x in rows]
        for rows in (rows_of(model, ids), rows_of(second, ids), rows_of(model, more))
    )
    count = len(own)
    for i in range(count):
        for j in range(count):
            assert found["layers"][i][j] == pytest.approx(cka(own[i], own[j]), rel=1e-4)
        assert found["other"][i] == pytest.approx(cka(own[i], others[i]), rel=1e-4)
        at = round(2 * i / (count - 1))
        assert found["against"][i] == pytest.approx(cka(own[i], theirs[at]), rel=1e-4)
    assert found["texts"] == 6
    assert found["depths"] == depths(count)


def test_padding_is_not_activated(padded: Tokens) -> None:
    texts = Tokens(padded.input_ids.repeat(2, 1), padded.attention_mask.repeat(2, 1))
    changed = texts.input_ids.masked_fill(texts.attention_mask == 0, 7)
    model = tiny_model("llama")
    one, two = (
        moesaic.similarity(model, calibration=Tokens(ids, texts.attention_mask))["layers"]
        for ids in (texts.input_ids, changed)
    )
    assert one == two


def test_requests_that_compare_nothing_are_refused() -> None:
    model, ids = tiny_model("llama"), torch.ones(2, 8, dtype=torch.int64)
    with pytest.raises(MoesaicError, match="three"):
        moesaic.similarity(model, calibration=ids)
    with pytest.raises(MoesaicError, match="one by one"):
        moesaic.similarity(model, calibration=ids.repeat(2, 1), other=Tokens(ids))


def test_the_command() -> None:
    asked = ["similarity", "tiny-dense", "--samples", "4", "--length", "16", "--calibration"]
    asked += ["prose", "--other", "reference", "--json"]
    found = json.loads(CliRunner().invoke(app, asked).stdout)
    assert len(found["layers"]) == len(found["other"]) == 6
    assert found["layers"][2][2] == pytest.approx(1)
    table = CliRunner().invoke(app, asked[:-1]).stdout
    assert "shallow - deep" in table
