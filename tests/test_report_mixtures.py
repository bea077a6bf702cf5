"""Reports of runs on mixtures of experts, and the frontier of several runs."""

import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from test_report import Page, make, measured, printed, said, score, with_figures

from moesaic import CondenseConfig, PruneConfig, SkipConfig, TuneConfig, report
from moesaic.record import Heat, LayerRecord, Record, Row, Step
from moesaic.report.frontier import best, frontiers, points
from moesaic.report.frontier import candidates_plot as tried_of
from moesaic.report.page import FEW, Plane, heat_maps
from moesaic.report.page import point_chart as drawn
from moesaic.report.tables import layer_table


def mixture(step, layers, result=(46.66, 0.54, 800), **parts):
    """A record of a run on a mixture of experts, as far as all of them are alike."""
    perplexity, ratio, total = result
    found = measured(petals=4, layers=range(3))
    found["scores"] = {
        "original": score(42.24, 0.44, total=1000, active=500),
        "result": score(perplexity, ratio, total=total, active=500),
    }
    record = Record("org/model", "out", "moesaic_mixtral", False, [step], layers, measured=found)
    return replace(record, **parts)


def pruned(**parts):
    words = (
        "pruned by REAP to 6 of 8 experts",
        "6 of 8 experts are kept in every layer that routes.",
    )
    more = {"config": {"keep": 6.0, "score": "reap"}, "variants": {"frequency": "frequency"}}
    paper = "Some Authors, On Experts, 2026"
    step = Step("prune", "naee", "REAP", *words, paper, ratio="stored", **more)
    kept = {"width": 64, "experts": 6, "experts_before": 8, "top_k": 2}
    kept |= {"shape": {"before": 8, "kept": [0, 1, 2, 3, 5, 7]}}
    kept |= {"analysis": {"relative_loss": 0.2286, "calls": [195, 162, 3, 40, 0, 7, 90, 8]}}
    layers = [LayerRecord(i, "cut", "6 of 8 experts kept", **kept) for i in range(3)]
    return mixture(with_figures(step, PruneConfig(), layers), layers, **parts)


def skipping():
    words = (
        "20–31 % of expert calls skipped with NAEE",
        "Routers leave out experts that weigh little.",
    )
    step = Step("skip", "naee", "NAEE", *words, ratio="active")
    layers = []
    for i, (beta, share) in enumerate([(0.44, 0.25), (0.21, 0.2), (0.3, 0.31)]):
        seen = {"calls_per_token": 2 - 2 * share, "skipped": share}
        found = {"shape": {"beta": beta, "rule": "top2"}, "analysis": seen}
        text = f"experts of low weight are skipped, beta {beta}"
        layers.append(LayerRecord(i, "cut", text, experts=8, top_k=2, **found))
    step = with_figures(step, SkipConfig(), layers)
    return mixture(step, layers, result=(42.5, 0.39, 1000))


def condensed():
    words = "2 of 3 layers condensed, CD-MoE-SR", "Layers 1–2 are small dense layers."
    options = {"count": 2, "keep": "shared+routed", "metric": "js"}
    step = Step("condense", "cd-moe", "CD-MoE-SR", *words, config=options, ratio="stored")
    search = [
        {"layer": 2, "losses": {"0": 0.03, "1": 0.01, "2": 0.006}},
        {"layer": 1, "losses": {"0": 0.04, "1": 0.014}},
    ]
    spread = {"attention": 0.18, "nothing": 0.41, "shared": 0.056, "shared+routed": 0.036}
    seen = {"calls": [71.0, 50.0, 0.0, 12.0], "divergence": spread}
    now = {"width": 64, "experts_before": 4, "analysis": seen}
    now |= {"shape": {"before": 4, "chosen": [1, 3], "gates": [0.4, 0.2]}}
    taken = "one dense MLP: 2 of 4 experts with fixed weights"
    layers = [LayerRecord(0, "moe", "", width=32, experts=4, top_k=2, analysis=seen)]
    layers += [LayerRecord(i, "condensed", taken, **now) for i in (1, 2)]
    summary = {"layers": [2, 1], "search": search}
    step = with_figures(step, CondenseConfig(**options), layers, summary)
    record = mixture(step, layers)
    record.measured["scores"]["1"] = score(44.0, 0.5, total=900, active=500)
    return record


def tuning(steps=30):
    logs = [
        {"step": i + 1, "loss": 4 - i / steps, "learning_rate": 1e-4 / (i + 1), "lambda": 0.1}
        for i in range(steps)
    ]
    training = {"what": "the condensed layers", "losses": logs}
    training |= {"trained_parameters": 9, "total_parameters": 99}
    words = "the condensed layers trained", "The condensed layers were trained."
    step = Step("tune", "sft", "fine-tuning", *words, weights="trained")
    return with_figures(step, TuneConfig(), [], {"training": training})


def tuned(steps=30, earlier=None):
    if earlier is None:
        earlier = replace(mixture(tuning(), []), steps=[])
    return replace(earlier, steps=[*earlier.steps, tuning(steps)])


RUNS = {
    "prune": pruned,
    "skip": skipping,
    "condense": condensed,
    "tune": tuned,
    "condense and tune": lambda: tuned(earlier=condensed()),
}


def whole(record):
    """Every form of a record, each of them well formed."""
    page = report.html([record])
    Page(report.html([record, make()]))
    return Page(page), report.model_card(record, "steps: [a]"), printed(record, 100)


def test_map_of_pruned_experts():
    page, card, text = whole(pruned())
    assert len(page.all("rect", "gone")) == 3 * 2
    assert [a["d"].count("M") for a in page.all("path", "cross")] == [2] * 3
    assert len(page.all("rect", "heat")) == 3 * 6 + 3 * 4  # the map, and the routing of the result
    assert "layer 0, expert 4: 0.0 % of calls, removed" in page.text.replace("\xa0", " ")
    assert "0.229" in page.text
    for shown in (page.text, card, text):
        assert "6 of 8 experts" in shown
        assert "petal" not in shown
        assert "arved" not in shown
    assert "Nothing was trained" in card


def test_comparisons_are_called_what_the_step_calls_them():
    record = pruned()
    record.measured["scores"]["frequency"] = score(40.0, 0.54, total=800)
    assert "Frequency at the same size does better: perplexity 40.00" in said(record)


def test_skipping_by_layer():
    page, card, _ = whole(skipping())
    shown = page.text.replace("\xa0", " ")
    for figure in ("0.440", "25.0 %", "31.0 %", "20–31 % of expert calls skipped"):
        assert figure in shown, figure
    assert "Routers leave out experts" in card


def test_condensed_layers():
    page, card, text = whole(condensed())
    for shown in ("choice 1", "choice 2", "2 of 3 layers condensed", "in this order: 2, 1."):
        assert shown in page.text, shown
    assert len(page.all("rect", "gone")) == 2 * 2
    assert len(page.all("rect", "kept")) == 2 * 2 + 2  # kept experts, layers that were taken
    assert len(page.all("polyline", "series")) == 4  # divergences
    assert len(page.all("polyline", "strong")) == 1
    assert "Layers 1–2 are small dense layers" in card
    assert "1,000     800" in text


def test_a_layer_of_an_unknown_kind_is_shown_in_its_own_words():
    record = pruned()
    record.layers[1] = LayerRecord(1, "folded", "folded twice", "refitted", shape={"folds": 2})
    page, card, _ = whole(record)
    assert "Layer 1: folded twice." in page.text
    assert "Layers 0, 2: 6 of 8 experts kept." in page.text
    assert "solved for in closed form" in card


@pytest.mark.parametrize("steps", [1, 30, 2000])
def test_training_curve(steps):
    page, card, _ = whole(tuned(steps))
    assert len(page.all("polyline", "series")) == (2 if steps > 1 else 3)
    assert ("Constant: lambda 0.1." in page.text) == (steps > 1)
    assert max(len(a["points"]) for a in page.all("polyline", "series")) < 6000
    assert "Nothing was trained" not in card
    assert f"Trained: the condensed layers, {steps:,} steps." in card
    assert "moesaic apply" not in card


def test_every_step_is_told_in_its_order():
    record = tuned(earlier=condensed())
    page, card, text = whole(record)
    assert "Training" in page.text
    assert "Which layers were condensed" in page.text
    assert "Nothing was trained" not in card
    said_first, said_then = (card.index(x) for x in ("1. Layers 1", "2. The condensed layers"))
    assert said_first < said_then
    shown = re.sub(r"\s+", " ", text)
    assert "2 of 3 layers condensed, CD-MoE-SR, then the condensed layers trained" in shown


def test_native_results_need_no_import():
    """A plan rebuilds either, and every step."""
    for kind, own in (("mixtral", True), ("moesaic_mixtral", False)):
        record = pruned(model_type=kind, native=own)
        card = report.model_card(record, "")
        for steps in (record.steps, record.steps * 2):
            assert "`moesaic apply" in report.model_card(replace(record, steps=steps), "")
        assert ("import moesaic" in card) != own
        assert ("trust_remote_code" in card) != own
        assert ("ordinary mixtral checkpoint" in card) == own


@pytest.mark.parametrize("name", RUNS)
def test_any_finding_of_a_layer_may_be_missing(name):
    record = RUNS[name]()
    for of in ("shape", "analysis"):
        for key in {key for layer in record.layers for key in getattr(layer, of)}:
            less = [
                replace(x, **{of: {k: v for k, v in getattr(x, of).items() if k != key}})
                for x in record.layers
            ]
            left_out(record, whole(replace(record, layers=less)))
    left_out(record, whole(replace(record, measured={})))


def left_out(record, forms):
    """What is not known is not reported: the title stands, and no hole shows."""
    page, card, text = forms
    for shown in (page.text, card, text):
        assert not re.search(r"\bNone\b|\bnan\b|NaN|undefined", shown)
    assert report.title(record) in re.sub(r"\\(.)", r"\1", card)


def test_models_of_different_originals_share_no_frontier():
    runs = [make(), pruned(), skipping(), condensed(), tuned()]
    for n, record in enumerate(runs[1:]):
        record.model = "org/mixture"
        for name, found in record.measured["scores"].items():
            found["total_bytes"] = 2000 if name == "original" else 1000 + n
    page = Page(report.html(runs))
    for model in ("org/model", "org/mixture"):
        assert f"{model}: Perplexity over" in page.text
    first, _ = page.text.split("org/mixture: Perplexity over")
    assert "org/mixture, pruned" not in first.split("What is lost")[1]
    for shown in ("prune, REAP", "skip, NAEE", "condense, CD-MoE-SR", "tune, fine-tuning"):
        assert shown in page.text
    alone = Page(report.html([make(), pruned(model="org/mixture")]))
    assert "org/mixture: Perplexity" not in alone.text  # two models are no frontier


def placed(plot):
    """By run and kind where a point is, and whether no other beats it."""
    return {(p.run, p.kind): (p.x, p.y, p.ahead) for p in plot.points}


def only(records):
    """The one picture of runs of one original."""
    (picture,) = frontiers(records)
    return picture


def test_best_points_are_those_that_none_beats():
    draw = random.Random(0)
    for _ in range(50):
        at = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(12)]
        ahead = [
            i
            for i, (x, y) in enumerate(at)
            if all(a > x or b > y or (a, b) == (x, y) for a, b in at)
        ]
        assert best(at) == ahead


def test_runs_of_one_original_share_it():
    records = [make(), make(result=15.0, static=40.0), replace(make(), measured={})]
    found = points(records)
    assert [*found] == ["org/model"]
    shown = [(p.run, p.kind) for p in found["org/model"]]
    assert shown == [(0, "original"), (1, "result"), (1, "static"), (2, "result"), (2, "static")]
    plot = only(records)
    assert plot.x == "active parameters (less is better)"
    assert plot.y == "perplexity (less is better)"
    at = placed(plot)
    assert {of for of, (_, _, best) in at.items() if best} == {
        (0, "original"), (2, "result"), (1, "static"),
    }  # fmt: skip
    assert at[1, "result"][0] == at[2, "result"][0]
    assert at[1, "result"][1] > at[2, "result"][1]


def test_every_original_has_a_picture_of_its_own():
    ours, theirs = make(), make(result=60.0)
    theirs.model = "org/other"
    theirs.measured["scores"]["original"] = score(30.0, 1.0, total=500)
    pictures = frontiers([ours, theirs])
    assert [p.title.split(":")[0] for p in pictures] == ["org/model", "org/other"]
    assert [{run for run, _ in placed(p)} for p in pictures] == [{0, 1}, {0, 2}]
    svg = ET.fromstring(report.frontier_picture([ours, theirs]))
    texts = [t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {p.title for p in pictures} < {*texts}


def test_runs_on_different_texts_are_not_compared():
    """Of those on one, the quantised original is one point."""
    other = make()
    other.measured["evaluation"] = {"data": "wikitext", "length": 512}
    assert [*points([make(), other])] == ["org/model, text 1", "org/model, text 2"]
    records = [make(), make(result=15.0)]
    for record in records:
        record.measured["scores"]["q4_0"] = score(13.0, 1.0)
    assert [p.kind for p in points(records)["org/model"]].count("q4_0") == 1


@pytest.mark.parametrize("value", [float("inf"), float("nan"), None])
def test_a_figure_that_is_no_number_is_not_drawn(value):
    record = make(result=value)
    at = placed(only([record, make()]))
    assert (1, "result") not in at
    assert at[2, "result"]


def test_every_point_has_its_name_beside_it_and_no_name_lies_on_another():
    record = make()
    for n, name in enumerate(("random", "naive", "backbone")):
        record.measured["scores"][name] = score(13.0 + 2 * n, 0.8 - n / 20)
    plot = only([record])
    found = re.compile(r'<text x="(\S+)" y="(\S+)" class="label.*?>(.*?)<')
    for width in (680, 340):
        names = {name for _, _, name in found.findall("".join(drawn(plot, width)[0]))}
        assert names == {p.label for p in plot.points}
    many = replace(plot, points=tuple(replace(plot.points[0], label=str(n)) for n in range(12)))
    assert 1 <= len(found.findall("".join(drawn(many, 680)[0]))) <= 8  # there is no room for more


def test_a_plane_puts_points_where_they_belong():
    left, top, right, bottom = box = (58.0, 30.0, 664.0, 348.0)
    plane = Plane([(0.0, 1.0), (10.0, 100.0)], box)
    assert plane.log
    assert plane.at(0, 1)[0] == left
    assert plane.at(10, 1)[0] == right
    assert plane.at(5, 10)[0] == (left + right) / 2
    assert plane.at(5, 10)[1] == pytest.approx((top + bottom) / 2)  # the middle of a log scale
    flat = Plane([(0.0, 0.0), (10.0, 100.0)], box)
    assert not flat.log
    assert flat.at(0, 0)[1] == bottom  # nothing lies below 0
    assert plane.levels() == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    tiny = Plane([(0.0, 2e-6), (1.0, 3e-5)], box)
    assert tiny.levels() == pytest.approx([2e-6, 5e-6, 1e-5, 2e-5])


def test_what_a_search_tried_is_drawn():
    tried = [
        {"form": "prune", "steps": [1], "memory": 2**21, "kl": 0.3},
        {"form": "slim", "steps": [2], "memory": 2**20, "kl": 0.2},
        {"form": "prune", "steps": [4], "memory": 2**21, "kl": 0.25},
        {"form": "skip", "steps": [3], "memory": 2**21, "kl": 0.4},
        {"form": "skip", "steps": [3], "memory": 2**21},
    ]
    record = make()
    assert "The search" not in Page(report.html([record])).text
    record.measured |= {"tried": tried, "chosen": tried[1]}
    page = report.html([record])
    assert "4 candidates" in Page(page).text
    plot = tried_of(record)
    assert [p.kind for p in plot.points].count("candidate") == 3
    assert plot.points[1].kind == "result"
    assert plot.points[1].tip == "slim: 1.05\N{NO-BREAK SPACE}MB, KL 0.200"
    assert plot.front == (1,)  # smaller than the others, and of less KL


def test_a_picture_of_several_runs_is_a_file_of_its_own():
    drawn = ET.fromstring(report.frontier_picture([make(), make(result=30.0)]))
    texts = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "active parameters (less is better)" in texts
    assert any(t and t.startswith("2. org/model, carved with MoRE") for t in texts)
    record = make()
    del record.measured["scores"]["static"]  # two models are no frontier
    assert frontiers([record]) == []
    assert "What is lost, and what is saved" not in report.html([record])
    assert report.frontier_picture([record]) == ""


def test_many_cells_are_drawn_together():
    def drawn(count):
        row = Row("2", tuple(j % 3 / 2 for j in range(count)), gone=(1,))
        columns = tuple(map(str, range(count)))
        of = Heat(section="", title="", rows=(row,), columns=columns)
        return "".join(heat_maps(of)[0])

    many = drawn(FEW + 1)
    assert "<title>layer 2: removed 1</title>" in many
    paths = re.findall(r'<path class="(?:heat|gone)"[^>]*>', many)
    assert sum(path.count("z") for path in paths) == FEW + 1
    assert len(paths) == 4  # three shades, and one that is removed
    alone = drawn(FEW)
    assert alone.count("<rect") == FEW
    for each in (many, alone):
        assert each.count("cross") == 1


def test_every_layer_has_a_row():
    table = layer_table(pruned())
    assert [label for label, _ in table.rows] == ["0", "1", "2"]
    assert table.columns == ["what it is", "neurons", "experts", "top-k"]
    assert [c.text for c in table.rows[0][1]] == ["6 of 8 experts kept", "64", "6", "2"]
    record = pruned()
    record.layers[1] = replace(record.layers[1], analysis={"refit": {"lost": 0.25}})
    table = layer_table(record)
    assert table.columns[-1] == "refit: lost"
    assert [cells[-1].text for _, cells in table.rows] == ["–", "0.25", "–"]


def test_pages_of_large_runs_stay_small():
    record = make(petals=128, layers=range(24))
    one, many = report.html([record]), report.html([record] * 20)
    assert len(one.encode()) < 1_000_000
    assert "Where tokens were routed" in one
    assert len(many.encode()) < 1_000_000
    assert "Plots and tables of layers are on each run’s own page" in many
    assert len(Page(many).all("details")) == 20


def test_no_two_marks_of_an_axis_read_alike():
    """Of sizes between 8.96 and 8.99 MB half were written twice."""
    tried = [{"form": str(size), "memory": size, "kl": 0.1} for size in (8_962_000, 8_991_000)]
    plot = tried_of(replace(pruned(), measured={"tried": tried}))
    drawing = "".join(drawn(plot, 800.0)[0]).replace("\N{NO-BREAK SPACE}", " ")
    marks = re.findall(r">(8\.9\d MB)<", drawing)
    assert len(marks) == len({*marks}) > 1
