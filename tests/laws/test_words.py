"""Laws of what a result says of itself, each on a real run of every method in every variant.

Card, page, title and terminal name what was done and claim nothing else; what they say of the
weights is compared with the weights.
"""

import html
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from builders import is_own, loaded, nightly, pages
from cases import KEYS, make_start, variants
from test_report import printed

import moesaic
from moesaic import Calibration, Evaluation, Recipe, Record
from moesaic.arch.lookup import base_arch
from moesaic.methods import METHODS
from moesaic.surgery import routed_modules

SMALL = Evaluation(length=64, max_tokens=256, rounds=0, new_tokens=2)
NAMES = ("MoRE", "ToMoE", "DSMoE", "NAEE", "REAP", "AIMER", "M-SMoE", "CD-MoE", "Layer Drop")
"""Names that papers gave their methods."""
TRAINED = re.compile(r"nothing was trained", re.IGNORECASE)
OWN = re.compile(r"weights [^.]*are the base model's own", re.IGNORECASE)


def spoken(options):
    return ", ".join(f"{k}={Path(str(v)).name}" for k, v in options.items()) or "default"


BY_DAY = {
    "carve.more": ("variant=static", "refit=True"),
    "prune.naee": ("score=random", "allocate=layers"),
    "condense.cd-moe": ("keep=shared+routed, refit=True", "keep=nothing, refit=False"),
    "tune.sft": ("what=lora", "what=routers, teacher=teacher"),
}
"""Variants beside each method's default; the others are tried by ``make test-all``."""


def cases():
    for key in KEYS:
        default = next(iter(variants(key)))
        for config in variants(key):
            changed = {
                of.name: getattr(config, of.name)
                for of in fields(config)
                if getattr(config, of.name) != getattr(default, of.name)
            }
            name = spoken(changed)
            marks = () if not changed or name in BY_DAY.get(key, ()) else pytest.mark.nightly
            yield pytest.param(key, config, id=f"{key}: {name}", marks=marks)


def carried_out(key, config, place, out, **changes):
    """The model of a run of one step on a few pages, and its record."""
    start = place / f"{key}-start"
    if not start.exists():
        make_start(key, start)
    if getattr(config, "teacher", ""):
        config = replace(config, teacher=f"{start}-before")
    text = Calibration(pages("calibration"), samples=12, length=32)
    measured = replace(SMALL, data=pages("evaluation"), **changes)
    return start, moesaic.run_recipe(Recipe(str(start), str(out), (config,), text, measured))


def visible(page):
    """The words of a page, drawings included."""
    text = re.sub(r"<(style|script)\b.*?</\1>", " ", page, flags=re.DOTALL)
    words = html.unescape(re.sub(r"<[^>]+>", " ", text))
    return re.sub(r"\s+", " ", words.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))


def plain(markdown):
    """Markdown without escapes and without the recipe, which names every option."""
    return re.sub(r"\\(.)", r"\1", re.sub(r"```yaml.*?```", " ", markdown, flags=re.DOTALL))


def own_layers(start, out):
    """By decoder layer, whether all its matrices are made of the base's rows or columns."""
    base, model = loaded(start), loaded(out)
    arch = base_arch(base.config)
    routers = {m for r in routed_modules(model, arch).values() for m in r.router.modules()}
    found = []
    for old, new in zip(arch.layers(base), arch.layers(model), strict=True):
        matrices = [
            p
            for name, module in new.named_modules()
            for p in module.parameters(recurse=False)
            if module not in routers and "partial" not in name
            if p.numel() > p.shape[0]
        ]
        known = [p for p in old.parameters() if p.dim() > 1]
        found.append(all(is_own(p, known) for p in matrices if p.numel()))
    rest = [n for n in base.state_dict() if not n.startswith(f"{arch.layers_path}.")]
    a, b = base.state_dict(), model.state_dict()
    return found, all(torch.equal(a[name], b[name]) for name in rest)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's
@pytest.mark.parametrize(("key", "config"), [*cases()])
def test_card_page_and_terminal_are_true(key, config, place, tmp_path):
    out = tmp_path / "out"
    start, record = carried_out(key, config, place, out)
    written = json.loads((out / "moesaic/result.json").read_text())
    assert json.loads(json.dumps(Record.from_json(written).as_json())) == written
    (step,) = record.steps
    card = plain((out / "README.md").read_text())
    page = visible((out / "moesaic/report.html").read_text())
    title = next(line for line in card.splitlines() if line.startswith("# "))
    everything = {"card": card, "page": page, "terminal": printed(record, 200), "title": title}

    # the weights
    layers, rest = own_layers(start, out)
    trained = "training" in step.summary and not (out / "moesaic/plan.json").exists()
    own = all(layers) and rest and not trained
    assert (step.weights == "own") == own
    assert (step.weights == "trained") == trained
    for layer, is_its_own in zip(record.layers, layers, strict=True):
        assert is_its_own or layer.weights != "own", layer
    for text in (card, page):
        assert bool(OWN.search(text)) == own
        assert bool(TRAINED.search(text)) == ("training" not in step.summary)

    # the names
    for name in NAMES:
        if re.search(rf"(?<!\w){name}(?![\w])", title):
            assert name in config.label or name in METHODS[key].title, title
            assert name in config.base_label, f"{title} credits {name}"
    assert {*step.beyond} <= {*config.beyond}  # an addition may have changed nothing
    if step.beyond:
        credited = [name for name in NAMES if name in title]
        assert not credited or "beyond" in title, title
        for what in step.beyond:
            assert what in card
    else:
        assert "beyond" not in title
    for what in {*config.beyond} - {*step.beyond}:
        assert what not in card
    assert step.paper == config.credit
    if config.credit:
        assert config.credit.rstrip(".") in card
    assert step.label == config.label or step.beyond != config.beyond

    # nothing odd
    for name, text in everything.items():
        assert not re.search(r"\bNone\b|\bnan\b|\{\w*\}|<function|object at 0x", text), name


COMPARED = [("prune.naee", "random"), ("condense.cd-moe", "1"), ("carve.more", "static")]
COMPARED += [
    nightly(key, name)
    for key in KEYS
    for name in METHODS[key].variants
    if key != "prune.naee" and (key, name) not in COMPARED
]


@pytest.mark.parametrize(("key", "compare"), COMPARED)
def test_comparisons_are_named_as_what_they_are(key, compare, place, tmp_path):
    """Never by the name of the method that they are compared with."""
    config = next(iter(variants(key)))
    if key == "condense.cd-moe":
        config = replace(config, count=2)
    out = tmp_path / "out"
    _, record = carried_out(key, config, place, out, compare=(compare,))
    assert compare in record.measured["scores"]
    assert record.steps[0].variants == {compare: config.compared(compare)}
    page = visible((out / "moesaic/report.html").read_text())
    named = "the first chosen" if compare.isdecimal() else config.compared(compare)
    assert named.lower() in page.lower()
    assert "None" not in page
