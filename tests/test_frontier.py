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
from moesaic.report.draw import FEW, Plane, maps
from moesaic.report.frontier import BOX, best, frontiers, points
from moesaic.report.page import LARGEST
from moesaic.report.tables import layer_table


def drawn_at(found):
    """By run and kind where a point is in a picture, and whether it is on the frontier."""
    marks = re.findall(
        r'class="point (\w+) s\d( beaten)?" transform="translate\((\d+) (\d+)\)"([^>]*)>',
        found.drawn,
    )
    run = re.compile(r"#run-(\d+)")
    return {
        (int(of[1]) if (of := run.search(rest)) else 0, kind): (int(x), int(y), not beaten)
        for kind, beaten, x, y, rest in marks
    }


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
    picture = only(records)
    assert picture.said.startswith("Perplexity (less is better) over active parameters (less")
    at = drawn_at(picture)
    ahead = {of for of, (_, _, best) in at.items() if best}
    assert ahead == {(0, "original"), (2, "result"), (1, "comparison")}  # 80 % and 84 % active
    # the same active parameters, a lower perplexity: lower on the picture, at the same place
    (x, y, _), (other_x, other_y, _) = (at[n, "result"] for n in (1, 2))
    assert x == other_x
    assert y < other_y


def test_every_original_has_a_picture_of_its_own():
    ours, theirs = make(), make(result=60.0)
    theirs.model = "org/other"
    theirs.measured["scores"]["original"] = score(30.0, 1.0, total=500)
    pictures = frontiers([ours, theirs])
    assert [p.model for p in pictures] == ["org/model", "org/other"]
    assert [{run for run, _ in drawn_at(p)} for p in pictures] == [{0, 1}, {0, 2}]
    svg = ET.fromstring(report.frontier_picture([ours, theirs]))
    texts = [t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"org/model", "org/other"} < {*texts}


def test_runs_on_different_texts_are_not_compared():
    other = make()
    other.measured["evaluation"] = {"data": "wikitext", "length": 512}
    assert [*points([make(), other])] == ["org/model, text 1", "org/model, text 2"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), None])
def test_a_figure_that_is_no_number_is_not_drawn(value):
    record = make(result=value)
    at = drawn_at(only([record, make()]))
    assert (1, "result") not in at
    assert at[2, "result"]


def test_two_models_are_no_frontier():
    record = make()
    del record.measured["scores"]["static"]
    assert frontiers([record]) == []
    assert "What is lost, and what is saved" not in report.html([record])


def test_a_plane_puts_points_where_they_belong():
    plane = Plane([(0.0, 1.0), (10.0, 100.0)], BOX)
    left, top, right, bottom = BOX
    assert plane.log
    assert plane.at(0, 1)[0] == left
    assert plane.at(10, 1)[0] == right
    assert plane.at(5, 10)[0] == (left + right) / 2
    assert plane.at(5, 10)[1] == pytest.approx((top + bottom) / 2)  # the middle of a log scale
    flat = Plane([(0.0, 0.0), (10.0, 100.0)], BOX)
    assert not flat.log
    assert flat.at(0, 0)[1] == bottom  # nothing lies below 0
    assert plane.levels() == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    tiny = Plane([(0.0, 2e-6), (1.0, 3e-5)], BOX)
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
    drawing = page[page.index("Candidates by the memory") :]
    drawing = drawing[: drawing.index("</svg>")]
    assert drawing.count("point result") == 1
    assert drawing.count("point comparison") == 3
    assert "slim: 1.05\N{NO-BREAK SPACE}MB, KL 0.200<" in drawing
    assert "front" not in drawing  # the chosen one is smaller and loses less than the other


def test_a_picture_of_several_runs_is_a_file_of_its_own():
    drawn = ET.fromstring(report.frontier_picture([make(decode=1.5), make(result=30.0)]))
    told = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert any(t and t.startswith("active") for t in told)
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

    head, *paths, cross, _ = re.split(r"(?=<path)|(?=</g>)", drawn(FEW + 1))
    assert head == "<g><title>layer 2: dropped 1</title>"
    assert sum(path.count("z") for path in paths) == FEW + 1
    assert len(paths) == 4  # three shades, and one that is gone
    assert cross.count("M") == 1
    alone = drawn(FEW)
    assert alone.count("<rect") == FEW
    assert alone.count("<polyline") == 1


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


def test_a_page_of_many_large_runs_stays_small_and_says_what_it_left_out():
    record = make(petals=128, layers=range(24))
    one, many = report.html([record]), report.html([record] * 20)
    assert len(one.encode()) < LARGEST
    assert "Left out here" not in one
    assert len(many.encode()) < LARGEST
    assert "Left out here, to keep this page small: drawings of layers" in Page(many).text
    assert len(Page(many).all("details", "run")) == 20
