"""Reports of synthetic records: nothing lost, nothing run, nothing glossed over."""

import ast
import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import yaml

from moesaic import MoesaicError, MoREConfig, ToMoEConfig, report
from moesaic.methods import implementation
from moesaic.methods.base import Decision
from moesaic.progress import Plain
from moesaic.record import LayerRecord, Record, Step
from moesaic.report import contents, facts, tables

EVIL = '<script>alert("x")</script>&amp;'


def score(perplexity, ratio, total=1_000_000, active=None):
    return {
        "perplexity": perplexity,
        "tokens": 8176,
        "total_parameters": total,
        "active_parameters": active or round(total * ratio),
        "active_ratio": ratio,
        "nominal_active_ratio": ratio,
        "router_parameters": 0,
    }


def speed(prefill, decode, width=0.01):
    return {
        "prefill_tokens_per_second": prefill,
        "prefill_spread": [prefill * (1 - width), prefill * (1 + width)],
        "decode_tokens_per_second": decode,
        "decode_spread": [decode * (1 - width), decode * (1 + width)],
        "first_token_seconds": 0.5,
        "peak_memory_bytes": 2**30,
    }


VARIANTS = {"static": "static pruning", "random": "random routing"}
VARIANTS |= {"naive": "petals without a backbone", "backbone": "only the backbone"}
SPLIT = Step(
    "carve", "more", "MoRE", "carved with MoRE to 80 % of its projections",
    "Its feed-forward networks are a backbone and petals, of which a router picks a few.",
    "Some Authors, A Paper, 2026", config={"active": 0.8, "variant": "full"}, variants=VARIANTS,
    unit="petal", ratio="projections",
)  # fmt: skip


def split_layer(i, petals=4):
    seen = {"never_activated": {"0.1": 0.0, "0.01": 0.02, "0.001": 0.25}}
    seen |= {"activation_mass": [j / 20 for j in range(21)]}
    return LayerRecord(
        index=i,
        kind="carved",
        text=f"36 neurons for every token and 1 of {petals} experts",
        width=36 + 64 // petals * petals,
        width_before=100,
        active_width=36 + 64 / petals,
        experts=petals,
        top_k=1,
        shape={"backbone": 36, "petals": [64 // petals] * petals, "routing": "top-k"},
        analysis=seen,
    )


def measured(
    petals=4, layers=(2, 3, 7), result=19.57, static=20.41, prefill=1.27, decode=0.96, routers=500
):
    share = [(j + 1) / (petals * (petals + 1) / 2) for j in range(petals)]
    scores = {"static": score(static, 0.8, total=842_000)}
    scores |= {"result": score(result, 0.8, total=1_000_500, active=842_000)}
    scores |= {"original": score(12.79, 1.0)}
    scores["result"]["router_parameters"] = routers
    return {
        "evaluation": {"data": "shipped", "length": 512},
        "scores": scores,
        "routing": {str(i): {"share": share, "jsd": 0.041} for i in layers},
        "generation": {"prompt": "Once", "original": " upon a time", "result": " a day"},
        "speed": {"original": speed(800, 25), "result": speed(800 * prefill, 25 * decode)},
        "speed_ratio": {
            "prefill": prefill,
            "prefill_spread": [prefill * 0.99, prefill * 1.01],
            "decode": decode,
            "decode_spread": [decode * 0.99, decode * 1.01],
            "rounds": 5,
        },
    }


def make(petals=4, layers=(2, 3, 7), **found):
    dense = {i: LayerRecord(i, "dense", "", width=100, active_width=100) for i in range(8)}
    cut = {i: split_layer(i, petals) for i in layers}
    every = list((dense | cut).values())
    return Record(
        model="org/model",
        out="/home/someone/out-folder",
        model_type="moesaic_llama",
        native=False,
        steps=[with_figures(SPLIT, MoREConfig(), every)],
        layers=every,
        moesaic="0.1.0",
        calibration={"source": "", "samples": 100},
        environment={"torch": "2.9.0", "threads": 2, "device": "cpu", "processor": "a chip"},
        measured=measured(petals, layers, **found),
    )


def with_figures(step, config, layers, summary=None):
    """A step with the figures that its method makes of its layers."""
    summary = summary or {}
    made = implementation(config).figures(layers, Decision(None, summary=summary))
    return replace(step, figures=tuple(made), summary=summary)


def with_step(record, **parts):
    return replace(record, steps=[replace(record.steps[-1], **parts)])


class Page(HTMLParser):
    """Elements that are open must close in order; attributes and text are kept."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag, kind=""):
        return [a for t, a in self.elements if t == tag and kind in (a.get("class") or "")]


def plain(text):
    """Text with its spaces alike."""
    return re.sub(r"\s+", " ", text.replace("\N{NO-BREAK SPACE}", " "))


def routed(page):
    """The fields of a map of where tokens went."""
    return re.findall(r"layer \d+, petal \d+: ", page.text)


def said(record):
    return plain(" ".join(s.text for s in contents.other_ways(record)))


def printed(record, width=80):
    console = Plain()
    console.width, console.file = width, io.StringIO()
    console.print(report.terminal(record))
    return console.file.getvalue()


# --- one run -------------------------------------------------------------------------------------


def test_a_record_is_the_same_after_json():
    plain = json.loads(json.dumps(make().as_json()))
    again = Record.from_json({**plain, "layers": [{**x, "new": 1} for x in plain["layers"]]})
    assert again == make()
    assert report.html([again]) == report.html([make()])


@pytest.mark.parametrize("format", [None, 1, 4])
def test_other_formats_are_refused(format):
    with pytest.raises(ValueError, match="make the result anew"):
        Record.from_json({**make().as_json(), "format": format})
    with pytest.raises(ValueError, match="not whole"):
        Record.from_json({"format": 3})


@pytest.mark.parametrize(
    "wrong",
    [{"model": [1]}, {"native": "yes"}, {"steps": 3}, {"steps": ["a"]}, {"layers": {}},
     {"layers": [[]]}, {"layers": [{"text": 3}]}, {"layers": [{"shape": "x"}]},
     {"steps": [{"verb": 1}]}, {"steps": [{"figures": [{"kind": "cake"}]}]},
     {"steps": [{"beyond": {"x": 1}}]}, {"log": []}, {"calibration": "x"}, {"out": None}],
)  # fmt: skip
def test_a_record_of_wrong_types_is_refused(wrong):
    with pytest.raises(ValueError, match="not whole"):
        Record.from_json({**make().as_json(), **wrong})


def test_page_shows_what_the_record_holds():
    """The original stands before the result, whatever the record's order."""
    page = Page(report.html([make()]))
    head = re.search(r"<thead>(.*?)</thead>", report.html([make()]), re.S).group(1)
    assert re.findall(r">(\w+)</th>", head) == ["original", "result", "static"]
    for shown in ("12.79", "19.57", "20.41", "8,176", "16 % fewer", "1.27×", "0.96×", "500 ms"):
        assert shown in page.text, shown
    for shown in ("842.0k", "1.00M", "1.07 GB", "792–808", "upon a time", "a chip", "2–3, 7"):
        assert shown in page.text, shown
    assert len(routed(page)) == 3 * 4
    assert "0.041" in page.text
    assert "layer 7, strongest channels 35 %: 35 %" in plain(page.text)  # of its activation


def test_half_of_a_page_is_left_empty_by_no_section():
    """Only two beside each other take half of its width each."""
    record = make()
    without = {name: part for name, part in record.measured.items() if name != "speed"}
    counts = []
    for some in (record, replace(record, measured=without)):
        kinds = re.findall(r'<section class="(\w*)"', report.html([some]))
        runs = re.findall("(?:half )+", " ".join([*kinds, ""]))
        assert all(len(run.split()) % 2 == 0 for run in runs), kinds
        counts.append(kinds.count("half"))
    assert counts[0] > counts[1]


def test_everything_is_escaped():
    record = with_step(make(), text=EVIL, title=EVIL, label=EVIL, paper=EVIL, beyond=(EVIL,))
    record.model = record.moesaic = EVIL
    record.layers = [replace(layer, text=EVIL) for layer in record.layers]
    record.environment = {EVIL: EVIL}
    found = record.measured
    found["generation"] = {"prompt": EVIL, "original": EVIL, "result": EVIL}
    found["scores"][EVIL] = score(15.0, 0.8)
    for text in (report.html([record]), report.html([record, record])):
        assert "alert(" in text
        assert "<script>alert" not in text
        assert not Page(text).all("script")
    ET.fromstring(report.frontier_picture([record, make()]))


def test_page_needs_no_network():
    page_text = report.html([make(), make(petals=2)])
    assert "http" not in page_text
    assert not re.search(r"@import|url\(|//\w", page_text)
    for tag, attrs in Page(page_text).elements:
        assert tag not in {"link", "img", "iframe", "object"}
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith("#")


def test_page_says_nothing_of_where_the_result_lies():
    assert "someone" not in report.html([make()])
    local = replace(make(), model="/home/someone/llama")
    assert "someone" not in report.html([local])
    assert Page(report.html([local])).text.count("llama")


@pytest.mark.parametrize("key", sorted(measured()))
def test_any_measurement_may_be_missing(key):
    record = make()
    del record.measured[key]
    Page(report.html([record]))
    Page(report.html([record, make()]))
    assert printed(record)
    assert report.model_card(record, "a: 1").startswith("---\n")
    ET.fromstring(report.frontier_picture([record, make()]))


def test_without_evaluation_the_cut_is_still_shown():
    """And an empty record is no failure."""
    page = Page(report.html([replace(make(), measured={})]))
    assert "Layers 2–3, 7: 36 neurons for every token and 1 of 4 experts" in page.text
    assert "carved with MoRE to 80 %" in page.text
    assert "erplexity" not in page.text
    record = Record("", "", "", False, [], [])
    for text in (Page(report.html([record])).text, printed(record)):
        assert "Quality was not measured" in text


def test_what_the_refit_gave_back_is_drawn():
    record = make()
    for layer in record.layers:
        if layer.changed:
            layer.analysis["refit"] = {"lost": 0.01 * layer.index, "recovered": 0.25}
    record.steps = [with_figures(SPLIT, MoREConfig(), record.layers)]
    page = report.html([record])
    assert "Error by layer." in page
    assert "before, layer 7: 7<" in page
    assert "after, layer 7: 5.2<" in page
    assert "Error by layer." not in report.html([make()])


def test_a_result_that_does_not_route_has_no_routing():
    record = make(routers=0)
    words = "every token runs the same 52 neurons"
    record.layers = [replace(x, text=words, experts=0) if x.changed else x for x in record.layers]
    record.measured["routing"] = {}
    page = Page(report.html([record]))
    assert words in page.text
    assert not routed(page)


def test_perplexities_that_are_no_numbers():
    record = make(result=float("inf"), static=float("nan"))
    assert "∞" in Page(report.html([record, record])).text
    assert "worse on this text (perplexity 12.79 → ∞)" in contents.outcome(record)
    ET.fromstring(report.frontier_picture([record, make()]))
    printed(record)


# --- plain words ---------------------------------------------------------------------------------


def test_every_form_begins_with_what_came_of_it():
    record = make()
    record.measured["files"] = {"original": 300 * 2**20, "result": 200 * 2**20}
    outcome = (
        "33 % smaller on disk, 53.0 % worse on this text (perplexity 12.79 → 19.57); prefill "
        "faster (1.27×), decode slower (0.96×)."
    )
    assert plain(contents.outcome(record)) == outcome
    page = plain(Page(report.html([record])).text)
    assert page.index(outcome) < page.index("Its feed-forward networks are")
    card = plain(report.model_card(record, ""))
    assert card.index(outcome) < card.index("Its feed-forward networks are")
    assert plain(printed(record)).index(outcome) < plain(printed(record)).index("tokens measured")
    for shown in (page, card):
        assert "315 MB → 210 MB" in shown


@pytest.mark.parametrize(
    ("place", "sizes", "clause"),
    [
        ("disk", (100, 50), "50 % smaller on disk"),
        ("disk", (100, 120), "20 % larger on disk"),
        ("disk", (98, 539), "5.5 times as large on disk"),
        ("disk", (100, 100), "Runs 16 % fewer parameters per token"),
        ("memory", (2_000_000, 1_500_000), "25 % smaller in memory, "),
    ],
)
def test_a_larger_file_is_said_to_be_one(place, sizes, clause):
    """Bytes in memory stand where files were not looked at."""
    record = make()
    for name, size in zip(("original", "result"), sizes, strict=True):
        if place == "disk":
            record.measured.setdefault("files", {})[name] = size
        else:
            record.measured["scores"][name]["total_bytes"] = size
    assert plain(contents.outcome(record)).startswith(clause)


@pytest.mark.parametrize(
    ("speeds", "spread", "rounds", "word"),
    [
        ((20, 10), (0.4, 0.6), 5, "slower"),
        ((20, 28), (1.01, 1.9), 5, "faster"),
        ((20, 28), (1.01, 1.9), 4, "no clear difference"),
        ((20, 28), (0.99, 1.9), 9, "no clear difference"),
        ((20, 16), (0.7, 1.01), 5, "no clear difference"),
        ((20, 28), (1.4, 1.4), 5, "no clear difference"),
        ((1000, 1019), (1.002, 1.03), 5, "no clear difference"),
        ((5068, 5248), (0.5, 0.9), 5, "no clear difference"),  # rounds say slower, medians faster
    ],
)
def test_faster_is_said_only_where_five_rounds_say_so(speeds, spread, rounds, word):
    """The ratio is that of the speeds that are shown; where it is unclear none is."""
    record = make(prefill=1.0)
    for name, value in zip(("original", "result"), speeds, strict=True):
        record.measured["speed"][name]["decode_tokens_per_second"] = value
    record.measured["speed_ratio"] |= {"decode_spread": list(spread), "rounds": rounds}
    tones = {"slower": "worse", "faster": "better", "no clear difference": "unsure"}
    (tile,) = [c for c in contents.changes(record) if c.what.startswith("decode")]
    unclear = word == "no clear difference"
    ratio = f"{speeds[1] / speeds[0]:.2f}×"
    assert tile.difference == (word if unclear else f"{word} ({ratio})")
    assert tile.tone == tones[word]
    assert ("speed: no clear difference" in contents.outcome(record)) == unclear
    shown = (Page(report.html([record])).text, report.model_card(record, ""), printed(record))
    for text in map(plain, shown):
        assert (ratio in text) == (not unclear)
        for other in ("faster", "slower"):
            assert (other in text) == (word == other)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (12.80, "0.1 % worse"),
        (12.79, "no clear difference"),
        (12.70, "no clear difference"),
        (12.15, "5.0 % better"),
    ],
)
def test_a_small_gain_in_perplexity_is_no_gain(result, verdict):
    assert verdict in plain(contents.outcome(make(result=result)))


def test_warnings_stand_with_the_figures_that_they_explain():
    record = make(decode=0.5)
    slow, other = "No kernel was there.", "The text was replaced."
    record.log = {"warnings": [slow, other], "of_speed": [slow]}
    for shown in (Page(report.html([record])).text, report.model_card(record, "")):
        assert f"Warning of the run: {other}" in shown
        assert slow in shown[shown.index("Speed and memory") :]


def test_rows_that_say_nothing_are_left_out():
    record = make(routers=0)
    text = Page(report.html([record])).text
    assert "router parameters" not in text
    assert "even routing" not in text
    record.measured["scores"]["result"]["nominal_active_ratio"] = 0.7
    assert "active ratio, even routing" in Page(report.html([record])).text


@pytest.mark.parametrize(
    ("static", "verdict"),
    [(18.0, "does better"), (19.57, "does as well"), (19.6, "does as well"), (25, "does worse")],
)
def test_static_pruning_that_does_better_is_not_hidden(static, verdict):
    record = make(static=static)
    assert f"Static pruning at the same active ratio {verdict}" in said(record)
    assert ("Routing did not pay here." in said(record)) == (verdict != "does worse")
    for shown in (Page(report.html([record])).text, report.model_card(record, ""), printed(record)):
        assert verdict in re.sub(r"\s+", " ", shown)


def test_every_comparison_is_told_in_words():
    record = make()
    record.measured["scores"]["random"] = score(25.0, 0.8)
    assert "Random routing at the same active ratio does worse" in said(record)
    record.measured["scores"]["random"] = score(17.0, 0.75)
    assert "Random routing at 75.0 % active does better" in said(record)
    assert "Routing did not pay" not in said(make(static=10.0, routers=0)), "it has no routers"


def test_a_gguf_file_is_what_its_run_was_for():
    """Verdict, tables and the comparison of runs show it, beside the result that it was made of."""
    file = {**score(25.6, 1.0), "kl": 0.5, "file": "moesaic/model-q2_k.gguf", "bytes": 250_000}
    record = make()
    record.measured |= {"files": {"original": 2e6, "result": 1e6}, "gguf": file, "speed": {}}
    said = contents.outcome(record)
    assert said.startswith("moesaic/model-q2_k.gguf: 88\u00a0% smaller on disk, 100\u00a0% worse")
    table = tables.score_table(record)
    assert table.columns == ["original", "result", facts.FILE, "static"]
    rows = dict(table.rows)
    assert [cell.value for cell in rows["perplexity"]] == [12.79, 19.57, 25.6, 20.41]
    assert [cell.value for cell in rows["files on disk"]] == [2e6, 1e6, 250_000, None]
    (row,) = (dict(zip(t.columns, t.rows[0][1], strict=True)) for t in [tables.overview([record])])
    assert (row["perplexity"].value, row["on disk"].value) == (25.6, 250_000)
    del file["kl"], file["perplexity"]  # with --no-eval only its bytes are known
    assert tables.score_table(record).columns == ["original", "result", "static"]
    assert contents.outcome(record).startswith("moesaic/model-q2_k.gguf: 88\u00a0% smaller on disk")


# --- several runs --------------------------------------------------------------------------------


def test_several_runs():
    other = make(result=31.2)
    other.model = "org/other"
    unmeasured = replace(other, measured={})
    page = Page(report.html([make(), other, unmeasured]))
    assert len(page.all("details")) == 3
    assert {a.get("id") for a in page.all("div")} >= {"run-1", "run-2", "run-3"}
    links = [a["href"] for a in page.all("a") if "class" not in a]
    assert links == ["#run-1", "#run-2", "#run-3"]
    outcome = plain(contents.outcome(other))
    assert plain(page.text).index(outcome) < page.text.index("What is lost, and what is saved")
    assert {a["href"] for a in page.all("a", "point")} == {"#run-1", "#run-2"}
    assert "31.20" in page.text
    assert "3 runs" in page.text


def test_runs_far_apart_are_drawn_on_a_logarithmic_scale():
    far = make(result=4000.0)
    assert "logarithmic" in report.html([make(), far])
    assert "logarithmic" not in report.html([make(), make(result=30.0)])


# --- terminal, card -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_fits(width):
    record = make()
    for name in ("backbone", "random", "naive"):
        record.measured["scores"][name] = {**score(30.1, 0.8), "total_bytes": 734_003_200}
        record.measured["generation"][name] = "word " * 40
    text = printed(record, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for shown in ("12.79", "naive", "0.96× slower", "Once", "upon a time", "1.00"):
        assert shown in text, shown


def test_terminal_takes_text_as_it_is():
    record = make()
    record.measured["generation"]["result"] = "[bold]x[/bold] \x1b[31mred"
    text = printed(record)
    assert "[bold]x[/bold]" in text
    assert "\x1b" not in text


def test_model_card():
    recipe = "model: org/model\nnote: '```'\n"
    card = report.model_card(make(), recipe)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "org/model", "base_model_relation": "finetune",
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["moesaic", "mixture-of-experts", "moe"],
    }  # fmt: skip
    assert "````yaml\n" + recipe + "````" in body
    assert "import moesaic" in body
    assert "trust_remote_code=True" in body
    assert "53.0\N{NO-BREAK SPACE}% worse on this text" in body
    assert "Nothing was trained." in body
    assert "Some Authors, A Paper, 2026" in body
    assert "AutoTokenizer.from_pretrained('out-folder')" in body
    assert "Tokenizer" not in report.model_card(make(), recipe, tokenizer=False)
    assert "| perplexity | 12.79 | 19.57 | 20.41 |" in body
    assert "/home" not in body.replace(recipe, "")


@pytest.mark.parametrize(
    ("out", "repo", "place"),
    [
        ("demo/faster", "", "demo/faster"),
        ("/home/someone/faster", "", "faster"),
        ("faster", "you/faster", "you/faster"),
        ("", "", "this-folder"),
    ],
)
def test_the_card_loads_the_folder_that_the_run_was_asked_for(out, repo, place):
    card = report.model_card(replace(make(), out=out), "", repo)
    assert f"from_pretrained({place!r})" in card
    assert ("# this folder" in card) == (not repo)


def test_a_task_without_a_headline_has_no_row():
    record = make()
    for found in record.measured["scores"].values():
        found["tasks"] = {"few": {"acc": 0.5, "n": 4}, "words": {"bleu": 12.0, "n": 4}}
    assert [label for label, _ in tables.task_table(record).rows] == ["few, acc"]


def test_what_the_package_offers_is_there():
    assert all(hasattr(report, name) for name in report.__all__)
    with pytest.raises(MoesaicError, match="one run at least"):
        report.html([])


def test_nothing_from_outside_is_markup_or_code_on_a_card():
    evil = '\n# x\n<img src=x> [a](b) | `c` "); import os; os.system("id'
    record = replace(make(), model=evil, out=evil, model_type=evil, native=True)
    record = with_step(record, text=evil, title=evil, label=evil, paper=evil, variants={evil: evil})
    found = record.measured
    found["scores"][evil] = score(15.0, 0.8)
    found["scores"]["original"]["tasks"] = {evil: {"acc": 0.5}}
    found["evaluation"] |= {"data": evil, "computed_in": evil}
    record.environment = {"processor": evil, "device": evil}
    record.log = {"warnings": [evil]}
    body = report.model_card(record, "").split("---\n", 2)[2]
    code = re.search("```python\n(.*?)\n```", body, re.S).group(1)
    calls = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)]
    assert [n.func.attr for n in calls] == ["from_pretrained"] * 2
    assert calls[0].args[0].value == evil
    prose = body.replace(code, "")
    assert not re.search(r"(?<!\\)[<|]img|(?<!\\)\[a", prose)
    heads = [line for line in prose.splitlines() if line.startswith("#")]
    assert len(heads) == 7
    rows = [line for line in prose.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3, 4, 5, 6}  # as columns


@pytest.mark.parametrize("name", ["a: b", "'quoted'", "- x", "smollm2", "/data/llama"])
def test_card_front_matter_parses_for_any_model(name):
    front = report.model_card(replace(make(), model=name), "").split("---\n")[1]
    expected = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "/data/llama": "llama"}
    assert yaml.safe_load(front)["base_model"] == expected.get(name, name)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("own", "base model's own"),
        ("refitted", "solved for in closed form"),
        ("trained", "they were trained"),
    ],
)
def test_the_card_says_what_became_of_the_weights(weights, says):
    card = report.model_card(with_step(make(), weights=weights), "")
    page = Page(report.html([with_step(make(), weights=weights)])).text
    for shown in (card, page):
        assert says in shown
        assert ("Nothing was trained" in shown) == (weights != "trained")
        assert ("base model's own" in shown) == (weights == "own")
    assert ("`moesaic apply" in card) == (weights != "trained")


def test_the_card_says_how_it_was_made():
    """Additions to a paper are not credited to it; a single thread is one."""
    record = with_step(make(), beyond=("fitted router", "refitted down projections"))
    record.environment = {"processor": "a processor", "threads": 1}
    card = report.model_card(record, "")
    assert "Not in that paper: fitted router, refitted down projections." in card
    assert ", 1 thread, torch" in card


# --- drawings that suit a step -------------------------------------------------------------------


def test_learned_experts_are_drawn():
    seen = {"expert_widths": [30, 40, 50, 60], "similarity": [[1.0, 0.5], [0.5, 1.0]]}
    seen |= {"union": 0.9, "qk": 8, "vo": 12, "head_dim": 16}
    logs = [{"step": n, "distillation": 1 / n, "balance": 0.1 * n} for n in (1, 2, 3)]
    training = {"what": "experts and routers", "losses": logs, "trained_parameters": 9}
    training |= {"labels": {"distillation": "KL divergence"}}
    record = make()
    record.layers = [
        replace(x, shape={}, analysis=seen, width_before=100, active_width=60) if x.changed else x
        for x in record.layers
    ]
    step = replace(SPLIT, unit="expert")
    record.steps = [with_figures(step, ToMoEConfig(), record.layers, {"training": training})]
    page = Page(report.html([record]))
    for shown in ("Width by layer", "The union of experts", "Widths of experts", "Similarity of"):
        assert shown in page.text, shown
    for curve in ("KL divergence", "balance"):
        assert curve in page.text
    assert "layer 2, FFN, an expert: 60 %" in page.text.replace("\xa0", " ")
    card = report.model_card(record, "")
    assert "Trained: experts and routers, 3 steps." in card
    assert "base model's own" in card
    assert "Nothing was trained" not in card
