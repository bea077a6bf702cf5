"""Where a mixture is redundant, on mixtures that were made so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import tiny_moe
from typer.testing import CliRunner

import moesaic
from moesaic.cli import app
from moesaic.config import Calibration, RunArgs
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.fitting import search
from moesaic.fitting.config import FitConfig
from moesaic.fitting.redundancy import Redundancy, cosine, redundancy
from moesaic.fitting.search import Search
from moesaic.fitting.trials import Trials
from moesaic.metrics.forward import Whole
from moesaic.metrics.score import qualities
from moesaic.recipe import Recipe


def looked_at(model: Any, tokens: Tokens, folder: Path) -> Any:
    file = folder / "model.stats"
    moesaic.observe(model, file, text=tokens)
    args = RunArgs(model, text=tokens, calibration=Calibration(stats=str(file)))
    return redundancy(args, tokens)


def mixture(kind: str) -> Any:
    """Experts that are copies of each other; or of which half of the neurons write nothing."""
    model = tiny_moe("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            experts = layer.mlp.experts
            experts.down_proj.mul_(8)
            if kind == "copies":
                for weight in (experts.gate_up_proj, experts.down_proj):
                    weight.copy_(weight[:1].expand_as(weight).clone())
            elif kind == "idle":
                experts.down_proj[:, :, 1::2] = 0
    return model


def test_copies_are_interchangeable(tokens: Tokens, tmp_path: Path) -> None:
    found = looked_at(mixture("copies"), tokens, tmp_path)
    assert found.dropped == {0.25: pytest.approx(0, abs=1e-6), 0.5: pytest.approx(0, abs=1e-6)}
    assert 0 < found.narrowed[0.25] < found.narrowed[0.5]
    assert found.alike == pytest.approx(1, abs=1e-3)
    assert found.lies == "between"
    assert found.hopeless("slim")
    assert not found.hopeless("prune")
    assert found.summary.startswith("Experts are interchangeable")
    assert json.loads(json.dumps(found.as_json()))["lies"] == "between"


def test_idle_neurons_can_go(tokens: Tokens, tmp_path: Path) -> None:
    found = looked_at(mixture("idle"), tokens, tmp_path)
    assert found.narrowed == {0.25: pytest.approx(0, abs=1e-6), 0.5: pytest.approx(0, abs=1e-6)}
    assert 0 < found.dropped[0.25] < found.dropped[0.5]
    assert found.half == 1
    assert found.alike is not None
    assert abs(found.alike) < 0.5
    assert [found.lies, found.hopeless("prune"), found.hopeless("slim")] == ["inside", True, False]
    alone = replace(found, dropped={})
    assert "narrowing experts" in alone.summary
    assert "needed" not in alone.summary


def test_what_is_told_is_what_a_result_would_lose(tokens: Tokens, tmp_path: Path) -> None:
    """Before any refit: of the same decision, as a whole model."""
    model = mixture("plain")
    found = looked_at(model, tokens, tmp_path)
    stats = str(tmp_path / "model.stats")
    for keep, part in ((6, 0.25), (4, 0.5)):
        config = moesaic.PruneConfig(keep=keep, score="pairwise", refit=False)
        result = moesaic.prune(model, config, text=tokens, stats=stats)
        kl = qualities([Whole(result.model), Whole(model)], tokens)[0].kl
        assert found.dropped[part] == pytest.approx(kl, rel=1e-3)


def test_cosines_of_different_experts_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    outputs_SED = torch.randn(5, 3, 7, generator=draw).double()
    gram_SEE = outputs_SED @ outputs_SED.transpose(1, 2)
    pairs = [(0, 1), (0, 2), (1, 2)]
    wanted = [torch.cosine_similarity(outputs_SED[:, i], outputs_SED[:, j]) for i, j in pairs]
    assert cosine(gram_SEE) == pytest.approx(torch.stack(wanted).mean().item())


@pytest.mark.parametrize(("kind", "left"), [("copies", "prune"), ("idle", "slim")])
def test_a_search_leaves_out_what_cannot_win(
    kind: str,
    left: str,
    tokens: Tokens,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = looked_at(mixture(kind), tokens, tmp_path)
    monkeypatch.setattr(search, "redundancy", lambda *_: found)
    monkeypatch.setattr(Trials, "args", lambda *_, **__: None)
    lines: list[str] = []
    recipe = Recipe("tiny-moe", str(tmp_path / "out"), (), Calibration(samples=4, length=16))
    looking = Search(recipe, FitConfig(memory=1), tmp_path / "work", tell=lines.append)
    looking.texts = SimpleNamespace(both=(tokens, tokens))  # type: ignore[assignment]
    known = search.forms(looking.source, looking.config)
    hopeful = {form.quick(1.0)[0].verb for form, _ in looking._hopeful([(f, 1.0) for f in known])}
    assert {"prune", "slim"} & {form.quick(1.0)[0].verb for form in known} == {"prune", "slim"}
    assert {"prune", "slim"} & hopeful == {left}
    assert lines == [found.summary]
    looking._hopeful([(f, 0.9) for f in known])  # of another budget: said once
    assert len([r for r in caplog.records if "is not tried" in r.message]) == 1
    near = [(f, 0.4) for f in known]  # where the other way has to take more than a half
    assert looking._hopeful(near) == near
    others = [(f, 1.0) for f in known if f.quick(1.0)[0].verb not in (left, "condense", "skip")]
    assert others
    assert looking._hopeful(others) == others  # nothing else reaches the size


def test_what_is_not_known_is_not_hopeless() -> None:
    found = Redundancy({}, {0.25: 0.1, 0.5: 0.2}, None, 0.5, 1.0)
    assert not found.hopeless("prune")
    assert not found.hopeless("slim")
    assert not found.hopeless("condense")


def test_nothing_is_told_of_a_mixture_that_can_lose_nothing_more(
    tokens: Tokens, tmp_path: Path
) -> None:
    """Experts that differ in width are neither pruned nor slimmed again."""
    config = moesaic.SlimConfig(keep=0.5, score="energy", allocate="experts", refit=False)
    model = moesaic.slim(mixture("plain"), config, text=tokens).model
    assert looked_at(model, tokens, tmp_path) is None


def test_observe_tells_where(tmp_path: Path) -> None:
    words = ["observe", "tiny-moe", str(tmp_path / "a.stats"), "--samples", "8", "--length", "64"]
    shown = CliRunner().invoke(app, words).stdout
    assert "Each expert is needed" in shown
    assert {"d", "n"} <= {*shown.partition("KL over the percentage")[2].partition("└")[0]}


def test_inspect_tells_where_from_a_file_of_statistics(tmp_path: Path) -> None:
    file = tmp_path / "tiny.stats"
    moesaic.observe("tiny-moe", file, samples=8, length=64)
    said = CliRunner().invoke(app, ["inspect", "tiny-moe", "--stats", str(file), "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)["redundancy"]
    assert found["lies"] == "inside"
    assert found["narrowed"]["0.5"] < found["dropped"]["0.5"] < 1
    shown = CliRunner().invoke(app, ["inspect", "tiny-moe", "--stats", str(file)]).stdout
    assert "Each expert is needed" in shown
    other = CliRunner().invoke(app, ["inspect", "tiny-shared-moe", "--stats", str(file)])
    assert isinstance(other.exception, MoesaicError)
    assert "another model" in str(other.exception)
