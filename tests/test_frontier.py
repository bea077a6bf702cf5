"""The frontier of several runs, against points compared one by one; the page that is under 1 MB."""

import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from test_report import Page, make, score
from test_report_mixtures import pruned

from moesaic import report
from moesaic.record import Heat, Row
from moesaic.report.frontier import best, frontiers, points
from moesaic.report.frontier import tried as tried_of
from moesaic.report.page import FEW, Plane, maps
from moesaic.report.page import points as drawn
from moesaic.report.tables import layer_table


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
    told = [(p.run, p.kind) for p in found["org/model"]]
    assert told == [(0, "original"), (1, "result"), (1, "static"), (2, "result"), (2, "static")]
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
    other = make()
    other.measured["evaluation"] = {"data": "wikitext", "length": 512}
    assert [*points([make(), other])] == ["org/model, text 1", "org/model, text 2"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), None])
def test_a_figure_that_is_no_number_is_not_drawn(value):
    record = make(result=value)
    at = placed(only([record, make()]))
    assert (1, "result") not in at
    assert at[2, "result"]


def test_two_models_are_no_frontier():
    record = make()
    del record.measured["scores"]["static"]
    assert frontiers([record]) == []
    assert "What is lost, and what is saved" not in report.html([record])


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


def test_the_quantised_original_of_several_runs_is_one_point():
    records = [make(), make(result=15.0)]
    for record in records:
        record.measured["scores"]["q4_0"] = score(13.0, 1.0)
    assert [p.kind for p in points(records)["org/model"]].count("q4_0") == 1


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
    assert plot.front == (1,)  # smaller than the others, and loses less


def test_a_picture_of_several_runs_is_a_file_of_its_own():
    drawn = ET.fromstring(report.frontier_picture([make(), make(result=30.0)]))
    told = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "active parameters (less is better)" in told
    assert any(t and t.startswith("2. org/model, carved with MoRE") for t in told)
    record = make()
    del record.measured["scores"]["static"]
    assert report.frontier_picture([record]) == ""


def test_many_cells_are_drawn_together():
    def drawn(count):
        row = Row("2", tuple(j % 3 / 2 for j in range(count)), gone=(1,))
        columns = tuple(map(str, range(count)))
        of = Heat(section="", title="", rows=(row,), columns=columns)
        return "".join(maps(of)[0])

    many = drawn(FEW + 1)
    assert "<title>layer 2: removed 1</title>" in many
    paths = re.findall(r'<path class="(?:heat|gone)"[^>]*>', many)
    assert sum(path.count("z") for path in paths) == FEW + 1
    assert len(paths) == 4  # three shades, and one that is gone
    alone = drawn(FEW)
    assert alone.count("<rect") == FEW
    for each in (many, alone):
        assert each.count("cross") == 1


def test_every_layer_has_a_row():
    table = layer_table(pruned())
    assert [label for label, _ in table.rows] == ["0", "1", "2"]
    assert table.columns == ["what it is", "neurons", "experts", "top-k"]
    assert [c.text for c in table.rows[0][1]] == ["6 of 8 experts stay", "64", "6", "2"]
    record = pruned()
    record.layers[1] = replace(record.layers[1], analysis={"refit": {"lost": 0.25}})
    table = layer_table(record)
    assert table.columns[-1] == "refit: lost"
    assert [cells[-1].text for _, cells in table.rows] == ["–", "0.25", "–"]


def test_pages_of_large_runs_stay_small():
    record = make(petals=128, layers=range(24))
    one, many = report.html([record]), report.html([record] * 20)
    assert len(one.encode()) < 1_000_000
    assert "Where tokens went" in one
    assert len(many.encode()) < 1_000_000
    assert "Plots and tables of layers are on each run’s own page" in many
    assert len(Page(many).all("details")) == 20
