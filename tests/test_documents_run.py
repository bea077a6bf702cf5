"""Every command of the documents is run, with a small model in place of a big one.

Commands of a page run in its order, in one folder, so that one uses what another made. A command
that was run before, on the same inputs, is not run again.
"""

import contextlib
import gc
import io
import json
import os
import re
import shlex
import shutil
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from test_documents import PAGES, ROOT, blocks, spoken

from moesaic.cli.entry import main
from moesaic.data.reader import shipped_texts
from moesaic.errors import MoesaicError
from moesaic.exports.llamacpp import find_converter
from moesaic.methods import VERBS
from moesaic.metrics.gguf_engine import library
from moesaic.recipe import load_recipe

pytestmark = [pytest.mark.documents, pytest.mark.filterwarnings("ignore")]

STANDS = {"smollm2": "tiny-dense", "OTHER": "tiny-dense", "ORIGINAL": "tiny-moe"}
"""Small models, by the names of big ones."""
MODELS = {"carve": "tiny-dense", "condense": "tiny-shared-moe"}
"""What ``MODEL`` stands for, by command; else a mixture without a shared expert."""
LESS = {
    "carve": "--samples 4 --max-tokens 512 -o rounds=0",
    "observe": "--samples 4",
    "fit": "--samples 8 --length 64 --windows 8 --max-tokens 512",
    "tiny-moe": "--samples 8 --length 64 --max-tokens 512",  # without a verb
    "eval": "--max-tokens 512",
    "bench": "--rounds 1",
    "generate": "--new-tokens 8",
    "tune": "--max-tokens 512 -o rounds=0",
}
"""Options that make a command cheap."""
FEWER = {
    "0.05": "0.5",
    "20GB": "10MB",
    "2000": "2",
    "steps=2000": "steps=2",
    "500": "4",
    "200": "4",
}
HUB = re.compile(r"arc_easy|--tasks naee|--push|you/|allenai/")
"""Tasks whose data sets come from the hub, and repositories there."""


def cheap(given):
    """The same command on a small model, with little text and few steps."""
    name, *rest = given
    stands = {**STANDS, **FEWER, "MODEL": MODELS.get(name, "tiny-moe"), "cuda": "cpu"}
    words = [stands.get(word, word) for word in rest]
    if name == "condense" and "--count" in words:
        words[words.index("--count") + 1] = "2"
    trains = name == "tune" or {"dsmoe", "tomoe"} & {*words}
    less = LESS.get(name, LESS["carve"] if name in VERBS else "")
    words += (less.replace("--samples 4", "") if "--stats" in words else less).split()
    words += ["-o", "steps=2"] if trains and "--steps" not in words else []
    words += ["--length", "64"] if "paper" in words and "tomoe" in words else []  # of 1,024
    if name in VERBS or name in ("apply", "export", "fit", "tiny-moe"):
        words.append("--overwrite")
    if name == "run":
        words = [*words, *smaller(words[0], words[1:])]
    return [name, *words]


def smaller(recipe, overrides):
    """Overrides that make a recipe cheap; its steps are kept."""
    asked = load_recipe(ROOT / recipe)
    verb = asked.steps[0].verb
    given = [f"model={MODELS.get(verb, 'tiny-moe')}", "dtype=float32", "device=cpu"]
    for n, step in enumerate(asked.steps):
        place = f"steps.{n}.{step.verb}"
        if step.verb == "tune" or step.name in ("dsmoe", "tomoe"):
            given += [f"{place}.steps=2", f"{place}.length=64"]
            given += [f"{place}.batch=2"] * (step.name != "tomoe")
            given += [f"{place}.train=text.jsonl"] * hasattr(step, "train")
        if step.verb == "tune" and getattr(step, "what", "") == "routers":
            given.append(f"{place}.teacher={MODELS.get(verb, 'tiny-moe')}")
        if step.verb == "condense":
            given.append(f"{place}.count=2")
    given += ["calibration.source=''", "calibration.samples=4", "calibration.length=64"]
    if asked.evaluation is not None:
        given += ["evaluation.data=''", "evaluation.length=128", "evaluation.max_tokens=1024"]
        given += ["evaluation.rounds=0", "evaluation.tasks=''"]
        if verb == "condense" and asked.evaluation.compare:
            given.append('evaluation.compare=["1"]')
    return given


QUICK = "--samples 4 --max-tokens 512 -o rounds=0"
GIVEN = {
    "carved": f"carve tiny-dense carved --experts 4 {QUICK}",
    "gated": f"carve tiny-dense gated --method dsmoe -o steps=2 {QUICK}",
    "pruned": f"prune tiny-moe pruned --keep 6 {QUICK}",
    "condensed": f"condense tiny-shared-moe condensed --count 2 {QUICK}",
    "base.gguf": "export tiny-moe base.gguf --to gguf --type q8_0",
}
"""How results are made that commands of pages take as given."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of what commands take as given: texts, and results as soon as one is asked for."""
    folder = tmp_path_factory.mktemp("made")
    rows = [{"text": text} for text in shipped_texts("evaluation", "prose")[:4]]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"question": "What is the capital of France?", "choices": ["Paris", "Rome"]}
    (folder / "questions.jsonl").write_text(4 * (json.dumps({**asked, "answer": "A"}) + "\n"))
    return folder


def carried_out(given, folder):
    """Run a command in a folder, as its own process would; what it printed."""
    said, before, here = io.StringIO(), sys.argv, Path.cwd()
    sys.argv = ["moesaic", *given]
    os.chdir(folder)
    code = 0
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        os.chdir(here)
        sys.argv = before
        gc.collect()
    assert code == 0, f"moesaic {shlex.join(given)}: exit {code}\n{said.getvalue()[-1500:]}"
    return said.getvalue()


def provide(given, folder, made):
    """Put what a command reads, and no command of the page has made, into the folder."""
    name, *words = given
    mixture = name in ("apply", "skip") or "tiny-moe" in given
    result = "pruned" if mixture else "carved"
    result = "condensed" if name == "tune" else result
    # results that it reads: all of report's words, the plan's folder, else the first word
    plan = [word for word in words if not word.startswith("--")][-2:-1]
    read = {"report": words, "apply": plan}.get(name, words[:1])
    for word in words:
        here = re.split("[/:]", word.rpartition("=")[2])[0]  # of name=FILE:part its file
        wanted = result if word in read and re.match(r"out|OUT", word) else here
        if wanted in GIVEN and word not in (*read, "base.gguf"):
            continue  # it is made by this command
        if (folder / here).exists():
            continue
        if wanted in GIVEN and not (made / wanted).exists():
            carried_out(GIVEN[wanted].split(), made)
        if (made / wanted).exists():
            copy = shutil.copytree if (made / wanted).is_dir() else shutil.copy2
            copy(made / wanted, folder / here)


@cache
def by_page():
    """The commands of each page, recipe and help, in order; those seen before are left out."""
    seen = set()
    found = {}
    for page, given in spoken().items():
        commands = [cheap(words) for words in given]
        left = [c for c in commands if tuple(c) not in seen]
        # a page's commands build on each other: none is left out while a later one is new
        if left:
            found[page] = commands[: commands.index(left[-1]) + 1]
            seen |= {tuple(c) for c in commands}
    return found


def left_out(given):
    """Why a command is not run here; empty for one that is."""
    line = " ".join(given)
    if HUB.search(line):
        return "its data sets are on the hub"
    if "--type" in given or "gguf" in line:
        try:
            find_converter()
            library()
        except MoesaicError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("page", spoken())
def test_commands_of_a_page_run(page, tmp_path, made):
    wrong = []
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for given in by_page().get(page, ()):
        said, start = left_out(given), time.process_time()
        if not said:
            said = "right"
            try:
                provide(given, tmp_path, made)
                carried_out(given, tmp_path)
            except AssertionError as error:
                wrong.append(str(error))
                said = "wrong"
            said += f", {time.process_time() - start:.1f} s of CPU"
        (ROOT / "build").mkdir(exist_ok=True)
        with (ROOT / "build/documents.log").open("a", encoding="utf-8") as log:
            log.write(f"{shlex.join(given)}: {said}\n")
    assert not wrong, "\n".join(wrong)


def python_of(page):
    """All Python of a page."""
    return "\n".join(text for kind, text in blocks(page) if kind == "python")


@pytest.mark.parametrize("page", [p for p in PAGES if python_of(p)], ids=lambda page: page.name)
def test_python_of_a_page_runs(page, tmp_path, made, monkeypatch):
    """In a folder that has the result that it loads, unless it makes it."""
    source = python_of(page)
    if ".save_pretrained(" not in source and 'from_pretrained("out")' in source:
        provide(["generate", "out"], tmp_path, made)
    monkeypatch.chdir(tmp_path)
    exec(compile(source, str(page), "exec"), {})
