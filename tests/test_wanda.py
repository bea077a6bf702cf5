"""What NAEE's paper shows beside its method: Wanda at 2:4, and the experts that are chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_moe
from torch import Tensor

import moesaic
from moesaic import MoesaicError, PruneConfig, Tokens
from moesaic.arch.lookup import moe_arch
from moesaic.layers.pruned import PrunedLayer
from moesaic.methods.naee.tendency import Overlap, overlap, together
from moesaic.methods.naee.wanda import thin, thinned, two_of_four
from moesaic.observation.stream import LayerStream
from moesaic.plan import BaseShape, Plan
from moesaic.report import overlap as drawn_overlap
from moesaic.report.mixtures import together as drawn_together


def best_of_six(weight_OI: Tensor, norm_I: Tensor) -> Tensor:
    """Of each four the pair whose |W| ||x|| is the most, all six tried, row by row."""
    kept = torch.zeros_like(weight_OI, dtype=torch.bool)
    for o, row in enumerate(weight_OI.tolist()):
        for start in range(0, len(row), 4):
            score = [abs(row[start + j]) * float(norm_I[start + j]) for j in range(4)]
            pair = max(combinations(range(4), 2), key=lambda p: score[p[0]] + score[p[1]])
            kept[o, [start + j for j in pair]] = True
    return kept


def test_two_of_four_are_the_best_of_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(7, 24, generator=generator)
    norm_I = torch.rand(24, generator=generator) + 0.1
    assert torch.equal(two_of_four(weight_OI, norm_I), best_of_six(weight_OI, norm_I))
    assert not torch.equal(two_of_four(weight_OI, norm_I), two_of_four(weight_OI, norm_I * 0 + 1))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_wanda_is_wanda_layer_by_layer(model_type: str, padded: Tokens) -> None:
    """Each layer's own inputs, in the model whose earlier layers are thinned already."""
    model = tiny_moe(model_type)
    config = PruneConfig(keep=4, criterion="random")
    result = moesaic.prune(model, config, calibration=padded, compare=["wanda"])
    assert not result.comparisons
    thin = result.builders["wanda"]()
    arch = moe_arch(model.config)
    for site in LayerStream(thin, arch, padded, arch.moe_layers(model), view=arch.mixture):
        i, x_TD = site.index, torch.cat(list(site.inputs()))
        was = arch.mixture(arch.layers(model)[i])
        ran_TE = was.combine_weights(x_TD) != 0
        for e in range(was.count):
            x_ND = x_TD[ran_TE[:, e]]
            if not len(x_ND):
                continue
            norms = [x.norm(dim=0) for x in (x_ND, x_ND, was.hidden(e, x_ND))]
            pairs_of = zip(was.weights_of(e), site.view.weights_of(e), norms, strict=True)
            for before_OI, after_OI, norm_I in pairs_of:
                assert torch.equal(after_OI, before_OI * best_of_six(before_OI, norm_I))
    names = [n for n, p in thin.named_parameters() if not torch.equal(p, model.get_parameter(n))]
    assert names
    assert all(".experts." in name and "bias" not in name for name in names)
    assert sum(int((p == 0).sum()) for p in thin.parameters()) > 0


def test_wanda_is_measured_beside_a_result(moe_folder: Path, tmp_path: Path, command: Any) -> None:
    out = tmp_path / "out"
    given = ["--keep", 4, "--compare", "wanda", "-o", "rounds=0", "--samples", 4, "--length", 24]
    code, text, errors = command("prune", moe_folder, out, *given, "--max-tokens", 640, "--json")
    assert code == 0, errors
    record = json.loads(text)
    assert record["scores"].keys() == {"original", "result", "wanda"}
    assert record["scores"]["wanda"]["kl"] > 0
    assert "half of the weights" in record["steps"][0]["variants"]["wanda"]
    assert "chosen together" in (out / "moesaic/report.html").read_text("utf-8")
    again = tmp_path / "again"
    text = ["--calibration", "shipped:code", "--samples", 4, "--length", 24]
    given = ["--keep", 4, "--no-eval", *text]
    assert command("prune", moe_folder, again, *given)[0] == 0
    code, text, _ = command("inspect", out, "--against", again, "--json")
    found = json.loads(text)["overlap"]
    assert code == 0
    assert len(found["layers"]) == 2
    for layer in found["layers"]:
        assert layer["both"] == sorted(set(layer["first"]) & set(layer["second"]))
    drawn = tmp_path / "overlap.svg"
    assert command("inspect", out, "--against", again, "--draw", drawn)[0] == 0
    assert drawn.read_text("utf-8").startswith("<svg")
    code, _, errors = command("inspect", out, "--against", moe_folder)
    assert code == 2
    assert command("inspect", out, "--draw", drawn)[0] == 2


def test_rows_that_are_no_multiple_of_four(tokens: Tokens) -> None:
    model = tiny_moe("mixtral", intermediate_size=18)
    with pytest.raises(MoesaicError, match="rows of 18 weights"):
        thinned(model, moe_arch(model.config), tokens)


@torch.no_grad()
def test_an_expert_that_no_token_reached_goes_by_its_weights(tokens: Tokens) -> None:
    model = tiny_moe("mixtral")
    arch = moe_arch(model.config)
    for site in LayerStream(model, arch, tokens, [1], view=arch.mixture):
        x_D = next(iter(site.inputs()))[:1]
        reached = set(site.view.router(x_D)[2].flatten().tolist())
        before = [[w.clone() for w in site.view.weights_of(i)] for i in range(site.view.count)]
        thin(site.view, [x_D])  # type: ignore[arg-type]
        for i in range(site.view.count):
            for was, now in zip(before[i], site.view.weights_of(i), strict=True):
                assert (now == 0).float().mean() == 0.5
                by_size = two_of_four(was, torch.ones(was.shape[1]))
                assert torch.equal(now, was * by_size) == (i not in reached)


# --- Figs. 4 and 5 -------------------------------------------------------------------------------


@torch.no_grad()
def test_experts_chosen_together_are_counted(tokens: Tokens) -> None:
    model = tiny_moe("qwen3_moe", top_k=3, num_hidden_layers=5)
    result = moesaic.prune(model, PruneConfig(keep=4), calibration=tokens)
    arch = moe_arch(model.config)
    told = {i: a["together"] for i, a in result.analyses.items() if "together" in a}
    assert sorted(told) == [0, 2, 4], "the first, the middle and the last"
    for site in LayerStream(model, arch, tokens, [2], view=arch.mixture):
        x_TD = torch.cat(list(site.inputs()))
        chosen_TK = site.view.router(x_TD)[2].tolist()
        wanted = [[sum(i in c and j in c for c in chosen_TK) for j in range(8)] for i in range(8)]
        assert told[2] == wanted
        assert together(site.view.logits(x_TD), site.view.routing).tolist() == wanted
    assert str(drawn_together([(2, told[2])])).count("<rect") == 8 * 7


def plan_of(*kept: list[int]) -> Plan:
    base = BaseShape("mixtral", 8, (4, 4), (4, 4))
    return Plan("naee", base, {i: PrunedLayer(torch.tensor(k)) for i, k in enumerate(kept)})


def test_sets_of_two_calibrations() -> None:
    found = overlap(plan_of([0, 1], [2, 3]), plan_of([1, 3], [2, 3]))
    assert found == [Overlap(0, 4, (0, 1), (1, 3)), Overlap(1, 4, (2, 3), (2, 3))]
    assert [o.both for o in found] == [(1,), (2, 3)]
    assert [o.same for o in found] == [False, True]
    drawn = drawn_overlap([(o.layer, o.experts, o.first, o.second) for o in found], "two")
    assert drawn.count(": kept by both") == 3
    assert "1 in common" in drawn
    both = plan_of([0, 1], [2, 3])
    second = replace(both, layers={1: PrunedLayer(torch.tensor([0, 2]))})
    assert overlap(both, second) == [Overlap(1, 4, (2, 3), (0, 2))], "only where both have pruned"
    other = Plan("naee", BaseShape("mixtral", 8, (4,), (4,)), {})
    with pytest.raises(MoesaicError, match="different shapes"):
        overlap(plan_of([0, 1], [2, 3]), other)
