"""Reports of runs on mixtures of experts: pruned, skipping, condensed, trained."""

import re
import xml.etree.ElementTree as ET

import pytest
from test_report import Page, make, printed, said, score

from moesaic import report


def mixture(method, **parts):
    """A record of a run on a mixture of experts, as far as all of them are alike."""
    record = {k: v for k, v in make(petals=4, layers=range(3)).items() if k != "layers"}
    record["scores"] = {
        "original": score(42.24, 0.44, total=1000, active=500),
        "result": score(46.66, 0.54, total=800, active=500),
    }
    return {**record, "model_type": "moesaic_mixtral", "method": method, "config": {}, **parts}


def pruned(**parts):
    layer = {
        "kind": "pruned",
        "experts": 8,
        "kept": [0, 1, 2, 3, 5, 7],
        "loss": 33.3,
        "relative_loss": 0.2286,
        "search": "exhaustive",
        "sets": 28,
        "greedy_gap": 0.0,
        "calls": [195, 162, 3, 40, 0, 7, 90, 8],
    }
    config = {"keep": 6.0, "criterion": "reconstruction"}
    return mixture("naee", layers=[layer] * 3, config=config, **parts)


def skipping():
    layers = [
        {"kind": "skipping", "beta": b, "rule": "top2", "calls_per_token": 2 - 2 * s, "skipped": s}
        for b, s in ((0.44, 0.25), (0.21, 0.2), (0.3, 0.31))
    ]
    scores = mixture("")["scores"]
    scores["result"] = score(42.5, 0.39, total=1000, active=450)
    return mixture("naee-skipping", layers=layers, beta=[0.44, 0.21, 0.3], scores=scores)


def condensed(keep="shared+routed"):
    spread = {"attention": 0.18, "nothing": 0.41, "shared": 0.056, "shared+routed": 0.036}
    seen = {"calls": [71.0, 50.0, 0.0, 12.0], "divergence": spread, "cosine": {"nothing": 0.9}}
    taken = {"kind": "condensed", "experts": 4, "chosen": [1, 3], "gates": [0.4, 0.2], "width": 64}
    described = [
        {"kind": "moe", "width": 32, **seen},
        {**taken, **seen, "order": 1},
        {**taken, **seen, "order": 0},
    ]
    record = mixture("cd-moe", layers=[2, 1], condensed=described)
    record["config"] = {"layers": 2, "keep": keep, "metric": "js", "layer_search": "greedy"}
    record["experts"] = {"2": [3, 1], "1": [1, 3]}
    record["search"] = [
        {"layer": 2, "losses": {"0": 0.03, "1": 0.01, "2": 0.006}},
        {"layer": 1, "losses": {"0": 0.04, "1": 0.014}},
    ]
    record["memory_bytes"] = {"original": 2000, "result": 1600}
    record["scores"]["1"] = score(44.0, 0.5, total=900, active=500)
    return record


def tuned(steps=30, earlier=None):
    logs = [{"step": i + 1, "loss": 4 - i / steps, "learning_rate": 1e-4} for i in range(steps)]
    told = {"what": "condensed", "losses": logs, "trained_parameters": 9, "total_parameters": 99}
    return {**(earlier or mixture("tune", layers={})), "tune": told}


RUNS = {
    "prune": pruned,
    "skip": skipping,
    "condense": condensed,
    "tune": tuned,
    "condense and tune": lambda: tuned(earlier=condensed()),
}


def whole(record):
    """Every form of a record, each of them well formed."""
    ET.fromstring(report.picture(record))
    page = report.html([record])
    Page(report.html([record, make()]))
    return Page(page), report.model_card(record, "steps: [a]"), printed(record, 100)


def test_map_of_pruned_experts():
    page, card, text = whole(pruned())
    assert len(page.all("rect", "gone")) == len(page.all("polyline", "cross")) == 3 * 2
    assert len(page.all("rect", "heat")) == 3 * 6 + 3 * 4  # the map, and the routing of the result
    assert "layer 0, expert 4: 0.0 % of calls, dropped" in page.text.replace("\xa0", " ")
    assert "0.229" in page.text
    for shown in (page.text, card, text):
        assert "6 of 8 experts" in shown
        assert "petal" not in shown
        assert "arved" not in shown
    assert "nothing was trained" in card


def test_pruning_names_the_criterion_that_was_used():
    record = pruned()
    record["config"]["criterion"] = "reap"
    record["scores"]["frequency"] = score(40.0, 0.54, total=800)
    page, card, _ = whole(record)
    assert "pruned with REAP" in page.text
    assert "NAEE" not in page.text + card
    assert "Pruning by frequency at the same size does better: perplexity 40.00" in said(record)


def test_skipping_by_layer():
    page, card, text = whole(skipping())
    shown = page.text.replace("\xa0", " ")
    for figure in ("0.440", "25.0 %", "31.0 %", "20–31 % of expert calls skipped"):
        assert figure in shown, figure
    assert "Stores 1,000 parameters, no fewer" in text
    assert "routers leave out experts" in card


def test_condensed_layers():
    page, card, text = whole(condensed())
    for shown in ("condensed, 1st", "condensed, 2nd", "2 of 3 layers condensed", "CD-MoE-SR"):
        assert shown in page.text, shown
    assert len(page.all("rect", "kept")) == len(page.all("rect", "gone")) == 2 * 2
    assert len(page.all("rect", "taken")) == 2
    assert len(page.all("polyline", "series")) == 4 + 1  # divergences, perplexity over size
    assert len(page.all("polyline", "strong")) == 1
    assert "layers 1–2 turned from mixtures of experts into small dense layers by CD-MoE-SR" in card
    assert "80.0 %" in text.replace("\xa0", " ")


@pytest.mark.parametrize(("keep", "name"), [("attention", "Block Drop"), ("nothing", "Layer Drop")])
def test_dropped_layers_are_not_called_condensed(keep, name):
    page, card, _ = whole(condensed(keep))
    assert name in page.text
    assert "small dense layers" not in card
    assert "without" in card


@pytest.mark.parametrize("steps", [1, 30, 2000])
def test_training_curve(steps):
    page, card, _ = whole(tuned(steps))
    assert len(page.all("polyline", "series")) == 2
    assert max(len(a["points"]) for a in page.all("polyline", "series")) < 6000
    assert "nothing was trained" not in card
    assert f"the condensed layers, {steps} steps" in card
    assert "moesaic apply" not in card


def test_what_was_trained_after_another_step_is_said():
    page, card, text = whole(tuned(earlier=condensed()))
    assert "Training" in page.text
    assert "Which layers were condensed" in page.text
    assert "nothing was trained" not in card
    assert "then the condensed layers trained" in re.sub(r"\s+", " ", text)


def test_native_results_need_no_import():
    for kind, own in (("mixtral", True), ("moesaic_mixtral", False)):
        card = report.model_card(pruned(model_type=kind), "")
        assert ("import moesaic" in card) != own
        assert ("trust_remote_code" in card) != own
        assert ("ordinary mixtral checkpoint" in card) == own


def test_a_plan_rebuilds_only_a_single_step():
    assert "`moesaic apply" in report.model_card(pruned(), "steps: [a]")
    assert "`moesaic apply" not in report.model_card(pruned(), "steps: [a, b]")


@pytest.mark.parametrize("name", RUNS)
def test_any_part_of_any_run_may_be_missing(name):
    record = RUNS[name]()
    for key in record:
        whole({k: v for k, v in record.items() if k != key})
    for key in ("layers", "condensed", "search"):
        every = record.get(key)
        for known in {k for d in every or () if isinstance(d, dict) for k in d}:
            less = [{k: v for k, v in d.items() if k != known} for d in every]
            whole({**record, key: less})


def test_several_runs_of_mixtures_are_compared_by_what_they_store():
    page = Page(report.html([make(), pruned(), skipping(), condensed(), tuned()]))
    charts = [a["aria-label"] for a in page.all("svg") if "over" in (a.get("aria-label") or "")]
    assert "Perplexity over active ratio, measured" in charts
    assert "Perplexity over parameters stored, of the original" in charts
    for shown in ("pruned, NAEE", "skipping, NAEE", "condensed, CD-MoE-SR", "trained"):
        assert shown in page.text
