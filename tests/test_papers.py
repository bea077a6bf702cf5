"""benchmarks/papers: every table and figure of the five papers has an entry that can be run."""

import json
import re
import shlex
import sys
from importlib import import_module
from pkgutil import resolve_name

import pytest
import torch
import yaml
from test_documents import ROOT, read

FOLDER = ROOT / "benchmarks" / "papers"
LISTED = {
    "naee": [*(f"Tab. {n}" for n in range(1, 10)), "Fig. 4", "Fig. 5"],
    "cdmoe": [*(f"Tab. {n}" for n in range(1, 9)), *(f"Fig. {n}" for n in range(2, 6))],
    "more": [f"Tab. {n}" for n in range(1, 16)],
    "tomoe": [
        *(f"Tab. {n}" for n in range(1, 16) if n != 2),  # the paper has no Tab. 2
        *(f"Fig. {n}" for n in range(3, 10)),
    ],
    "dsmoe": [*(f"Tab. {n}" for n in range(1, 7)), "Fig. 2", "Fig. 3"],
}


@pytest.fixture(scope="module")
def scripts():
    """Import of a script of benchmarks/ or benchmarks/papers."""
    before = [*sys.path]
    sys.path[:0] = [str(FOLDER), str(ROOT / "benchmarks")]
    yield import_module
    sys.path[:] = before


def description(paper):
    return yaml.safe_load((FOLDER / f"{paper}.yaml").read_text("utf-8"))


@pytest.mark.parametrize("paper", LISTED)
def test_every_table_and_figure_has_an_entry_that_names_it(paper):
    groups = [group for group in description(paper)["rows"] if "entry" in group]
    assert sorted(group["table"] for group in groups) == sorted(LISTED[paper])
    for group in groups:
        kind, number = group["table"].split()
        assert group["entry"] == f"{kind[:3].lower()}{number}"
        assert group["title"]
        assert group["hours"] >= 0


@pytest.mark.parametrize("small", [False, True], ids=["paper", "small"])
@pytest.mark.parametrize("paper", LISTED)
def test_rows_can_be_run(paper, small, scripts, monkeypatch):
    """Commands are understood, functions exist and take their arguments; names are the tables'."""
    from inspect import signature

    described = description(paper)
    rows = [*scripts("run").rows_of(described, {}, small)]
    entries = {group["entry"] for group in described["rows"] if "entry" in group}
    assert {row.name.partition(" | ")[0] for row in rows} == entries
    assert len({row.name for row in rows}) == len(rows)
    asked = set()
    for row in rows:
        assert row.steps or row.needs, row.name
        for step in row.steps:
            if step.kind == "call":
                signature(resolve_name(step.command)).bind(**step.arguments)
            elif (command := re.sub(r"\b[\d.]+\b", "1", step.command)) not in asked:
                asked.add(command)
                read(shlex.split(step.command), monkeypatch)


@pytest.mark.parametrize("paper", LISTED)
def test_what_the_paper_printed_is_of_rows_that_there_are(paper, scripts):
    """So that no number is compared with nothing for the sake of a wrong name."""
    rows = [*scripts("run").rows_of(description(paper), {})]
    for entry, table in scripts("table").entries(paper).items():
        labels = [row.name.partition(" | ")[2] for row in rows if row.name.startswith(f"{entry} |")]
        for name in map(str, table.get("printed", {}).get("rows", ())):
            assert any(name == label or name.startswith(f"{label} ") for label in labels), name


def test_the_page_is_what_the_small_runs_gave(scripts):
    page = (ROOT / "docs/papers.md").read_text("utf-8")
    table = scripts("table")
    assert re.findall(r"figures of ([\w-]+)", page) == [f"papers-{p}" for p in LISTED]
    assert table.written(page) == page, "python benchmarks/papers/table.py"
    assert table.written(page.replace("|`tab1`|", "|`tab0`|")) == page


@pytest.mark.parametrize("paper", LISTED)
def test_small_runs_are_of_rows_that_there_are(paper, scripts):
    """Kept figures were made by the commands that the YAML has today."""
    kept = json.loads((FOLDER / f"{paper}.small.json").read_text("utf-8"))["results"]
    rows = {row.name: row for row in scripts("run").rows_of(description(paper), {}, True)}
    assert kept.keys() <= rows.keys()
    for name, result in kept.items():
        if "not_run" in result:
            assert result["not_run"] == f"needs {rows[name].needs}"
        else:
            assert result["commands"] == rows[name].commands, name


def test_scripts_are_short():
    assert sum(len(f.read_text("utf-8").splitlines()) for f in FOLDER.glob("*.py")) <= 900


# --- what the scripts compute --------------------------------------------------------------------


def test_rank_correlation(scripts):
    table = scripts("table")
    figures = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    rows = {"a": 10.0, "b": 20.0, "c": 40.0, "d": 30.0}
    found = table.agreement(figures, {"better": "low", "rows": rows}, "measured.perplexity")
    assert found == "+0.80&nbsp;of&nbsp;4"
    printed = {"better": "high", "rows": {"a": 60.0, "b": 50.0, "c": 1.0}}
    for figures, sign in (({"a": 20.0, "b": 30.0}, "+"), ({"a": 30.0, "b": 20.0}, "−")):
        found = table.agreement(figures, printed, "measured.perplexity")
        assert found == f"{sign}1.00&nbsp;of&nbsp;2"


def test_two_of_every_four_weights_are_kept(scripts):
    """Those of largest |W| times the input's norm."""
    two_of_four = scripts("baselines").two_of_four
    weight_OI, norm_I = torch.randn(6, 12), torch.rand(12)
    kept_OI = two_of_four(weight_OI, norm_I)
    assert (kept_OI.unflatten(1, (-1, 4)).sum(-1) == 2).all()
    score_OI = weight_OI.abs() * norm_I
    for row, kept in zip(
        score_OI.unflatten(1, (-1, 4)), kept_OI.unflatten(1, (-1, 4)), strict=True
    ):
        for four, keeps in zip(row, kept, strict=True):
            assert four[keeps].min() >= four[~keeps].max()


def test_similarity_of_representations(scripts):
    """CKA is 1 of a rotation and a scale, and falls with noise."""
    cka = scripts("analyses").cka
    x_ND = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    turn_DD = torch.linalg.qr(torch.randn(8, 8)).Q
    assert cka(x_ND, 3 * x_ND @ turn_DD) == pytest.approx(1, abs=1e-5)
    assert cka(x_ND, torch.randn(24, 8)) < 0.9


def test_layers_that_change_nothing_go_first(scripts, tmp_path):
    """ShortGPT, UIDL and ReplaceMe take out a layer that writes nothing, and nothing changes."""
    import moesaic
    from moesaic.arch.lookup import base_arch
    from moesaic.io.source import resolve

    source = resolve("tiny-dense")
    live = source.load(dtype=torch.float32)
    arch, layer = base_arch(live.config), 3
    idle = arch.layers(live)[layer]
    with torch.no_grad():
        for module, name in ((arch.ffn_of(idle), "down_proj"), (arch.attention_of(idle), "o_proj")):
            getattr(module, name).weight.zero_()
    scripts("baselines").kept(source, live, str(tmp_path / "idle"))
    for name in ("shortgpt", "uidl", "replaceme"):
        out = tmp_path / name
        figures = getattr(scripts("baselines"), name)(
            str(tmp_path / "idle"), str(out), "shipped,6,128", "0.84"
        )
        assert figures["removed"] == [layer]
        score = moesaic.evaluate(str(out), against=live, max_tokens=256, length=128)
        assert score.kl == pytest.approx(0, abs=1e-4)


def test_a_row_of_another_tool_says_what_it_needs(scripts, tmp_path):
    run = scripts("run")
    described = {"name": "tab1 | {row}", "needs": "{row}", "vary": {"row": ["FLAP"]}}
    (row,) = run.rows_of({**described}, {})
    assert run.carried_out(row, tmp_path) == {"not_run": "needs FLAP"}
    steps = [{"as": "made", "peer": "main.py {n}"}]
    (row,) = run.rows_of({**described, "steps": steps, "set": {"n": "7"}}, {})
    assert run.carried_out(row, tmp_path) == {"not_run": "needs FLAP"}
    (tmp_path / "main.py").write_text("import sys, json; print(json.dumps({'n': sys.argv[1]}))")
    peers = {"FLAP": (sys.executable, str(tmp_path))}
    assert run.carried_out(row, tmp_path, peers=peers)["made"] == {"n": "7"}
