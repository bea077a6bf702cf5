"""``moesaic MODEL``: what it picks and says, and all of its menu, through a terminal."""

import fcntl
import json
import os
import pty
import select
import shlex
import shutil
import signal
import sys
import termios
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from builders import SERVER, few_forms, pages, run_command

from moesaic import Calibration, FitConfig, MoesaicError, MoREConfig, SlimConfig, pipeline
from moesaic.cli import guide
from moesaic.cli.guide import Goal, Point
from moesaic.exports.allocation import Price
from moesaic.families import Shape
from moesaic.fitting import search
from moesaic.fitting.candidates import Candidate, pareto_front
from moesaic.fitting.prices import Prices, key_of, priced_configs
from moesaic.fitting.run import open_search
from moesaic.fitting.trials import Trials, _key
from moesaic.io.source import resolve
from moesaic.methods import METHODS
from moesaic.metrics import measurement
from moesaic.metrics.evaluate import quantise_in_place
from moesaic.recipe import Recipe, command_of
from moesaic.sizes import ResultSize, Skeleton, steps_as_json

TEXT = ["--native", "--samples", "12", "--length", "24", "--max-tokens", "512"]
TEXT += ["--calibration", pages("calibration"), "--data", pages("evaluation")]


def candidate(memory, kl, active=100, loss=0.0):
    size = ResultSize(memory, memory, active, native=True, exact=True)
    return Candidate(f"of {memory}", (SlimConfig(),), size, {"kl": kl, "loss": loss})


def test_candidates_that_none_beats_are_kept():
    every = [candidate(100, 0.1), candidate(99, 0.3), candidate(90, 0.2), candidate(80, 0.25)]
    every += [candidate(50, 0.9), candidate(50, 0.8), candidate(120, 0.1)]
    assert [(c.size.memory, c.kl) for c in pareto_front(every, "memory")] == [
        (100, 0.1), (90, 0.2), (80, 0.25), (50, 0.8),
    ]  # fmt: skip
    alike = [candidate(100, 0.1), candidate(98, 0.2)]  # as small, of more KL
    assert pareto_front(alike, "memory") == alike[:1]


def test_of_alike_sizes_the_simpler_candidate_is_kept_within_the_error():
    plain = replace(candidate(100, 0.21), kl_N=(0.20, 0.22))
    size = replace(plain.size, native=False)
    for kl_N, kept in (((0.10, 0.30), plain), ((0.19, 0.21), None)):
        odd = replace(candidate(100, 0.20), size=size, kl_N=kl_N)
        assert pareto_front([plain, odd], "memory") == [kept or odd]


def point(memory, kl, native=False, type=""):
    candidate = SimpleNamespace(size=SimpleNamespace(native=native, active_parameters=100))
    made = None if type else candidate
    return Point(f"of {memory}", memory, {"kl": kl, "loss": 0.1}, made, type)


@pytest.mark.parametrize(
    ("goal", "best"), [({"memory": 95}, 90), ({"memory": 10}, None), ({"max_kl": 0.25}, 90)]
)
def test_the_best_is_what_the_goal_asks_for(goal, best):
    points = [point(100, 0.1), point(90, 0.2), point(80, 0.3)]
    chosen = Goal(**goal).best(points)
    assert (chosen and chosen.memory) == best


@pytest.mark.parametrize(
    ("least", "sizes"), [(0, [800, 650, 500]), (300, [800, 650, 500]), (900, [960, 930, 900])]
)
def test_sizes_that_are_tried_are_within_reach(least, sizes):
    """Also of a model that is mostly vocabulary, which nothing makes half as large."""
    found = Goal(max_kl=0.1).budgets(1000, least=least)
    assert [budget.memory for budget in found] == pytest.approx(sizes, abs=1)
    assert all(budget.memory >= least for budget in found)


def test_the_goal_is_asked_for_only_where_it_is_not_known(monkeypatch, capsys, tmp_path):
    machine = {"weight_bytes": 1000, "free_bytes": 500}
    asks = (Goal(), tmp_path, True, True)
    assert guide._goal(machine, *asks) == Goal(memory=400), "it does not fit"
    machine["free_bytes"] = 10_000
    answers = iter(["much", "nan", "0.2", "0"])
    monkeypatch.setattr("rich.prompt.Prompt.ask", lambda *_, **__: next(answers))
    assert guide._goal(machine, *asks) == Goal(max_kl=0.2)
    assert guide._goal(machine, *asks) is None
    assert guide._goal(machine, Goal(), tmp_path, True, False) == Goal(max_kl=guide.MAX_KL)
    (tmp_path / "goal.json").write_text(json.dumps({"memory": 8_000_000, "max_kl": None}))
    assert guide._goal(machine, *asks) == Goal(memory=8_000_000)
    assert "Continuing with: 8MB." in capsys.readouterr().err
    with pytest.raises(MoesaicError, match="within this budget as it is"):
        guide._goal(machine, Goal(memory=2000), tmp_path, False, True)


def test_a_native_point_is_among_those_shown():
    odd = replace(candidate(90, 0.1), size=replace(candidate(90, 0.1).size, native=False))
    natives = [candidate(95, 0.3), candidate(80, 0.2)]
    searched = SimpleNamespace(
        tried=[odd, *natives],
        frontier=lambda budgets: [odd],
        config=FitConfig(memory=90),
        least=lambda: 0,
    )
    found = guide.front
    assert found(searched, Goal(memory=90), 100) == [odd, natives[1]]
    assert searched.config.native


def test_layers_that_were_decided_on_other_text_are_not_handed_over(tmp_path):
    """Some methods hold windows back to compare, and a run holds others back than a search."""
    trials = Trials.__new__(Trials)
    trials.work, trials.texts = tmp_path, SimpleNamespace(both=[SimpleNamespace(fingerprint="a")])
    steps = (SlimConfig(allocate="layers+experts"),)
    layers = tmp_path / f"layers-{_key(steps_as_json(steps))}"
    layers.mkdir()
    for text, handed in (("b", False), ("a", True)):
        (layers / "request.json").write_text(json.dumps({"text": {"fingerprint": text}}))
        assert trials.hand_over(steps, str(tmp_path / "out")) == handed


def test_the_command_that_does_it_again():
    step = SlimConfig(keep=0.5, refit=False, shared=0.5)
    recipe = Recipe("tiny-moe", "a b", (step,), Calibration(samples=7), device="cuda")
    assert command_of(recipe) == (
        "moesaic slim tiny-moe 'a b' --keep 0.5 -o shared=0.5 --no-refit --samples 7 --device cuda"
    )
    carve = MoREConfig(layers=(4, 5))
    said = command_of(Recipe("tiny-dense", "out", (carve,)))
    assert said == "moesaic carve tiny-dense out --method more --layers 4,5"


@pytest.mark.parametrize("shape", [Shape(6, 96, 8, 8, 2, top_k=2, uneven=True), Shape(6, 96, 8)])
def test_every_form_is_said_as_the_command_that_makes_it(shape, command, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(pipeline, "run_recipe", lambda recipe, **_: asked.append(recipe))
    steps = [
        make(family.configs[0])
        for method in METHODS.values()
        for family in method.families(shape)
        for make in (lambda config: config, family.careful)
    ]
    assert len({type(step) for step in steps}) > 1
    for step in steps:
        recipe = Recipe("tiny-moe", str(tmp_path / "out"), (step,), Calibration(samples=7))
        said = command(*shlex.split(command_of(recipe))[1:], "--no-eval")
        assert asked, said
        again = asked.pop()
        assert (again.steps, again.calibration) == (recipe.steps, recipe.calibration)


def test_matrices_are_rounded_as_the_gguf_package_does(moe_folder):
    import torch
    from gguf import GGMLQuantizationType, quants

    plain, model = resolve(str(moe_folder)).load(), resolve(str(moe_folder)).load()
    size = quantise_in_place(model, "q4_0")
    before = dict(plain.named_parameters())
    kept = changed = 0
    for name, parameter in model.named_parameters():
        whole = before[name].detach()
        router = name.endswith("mlp.gate.weight")
        if whole.ndim < 2 or len(whole) < 2 or router:
            assert torch.equal(parameter, whole), name
            kept += 4 * whole.numel()
            continue
        if whole.shape[-1] % 32:
            assert torch.equal(parameter, whole.half().float()), name
            kept += 2 * whole.numel()
            continue
        rows = whole.reshape(-1, whole.shape[-1]).numpy()
        made = quants.quantize(rows, GGMLQuantizationType.Q4_0)
        wanted = quants.dequantize(made, GGMLQuantizationType.Q4_0)
        assert torch.equal(parameter.reshape(rows.shape), torch.from_numpy(wanted)), name
        changed += made.nbytes
    assert changed > 0
    assert size == kept + changed


def in_terminal(device, words, folder):
    """Run the command line in this process with a terminal in the place of its three files."""
    os.setsid()
    terminal = os.open(device, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )
    os.chdir(folder)
    os.environ.update(COLUMNS="120", BROWSER="true", TERM="dumb", LLAMA_CPP="nowhere")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    measurement.peak_memory = lambda *_: 1 << 26  # a fresh process otherwise
    search.forms = few_forms
    run_command(*words)


class Terminal:
    """The command line in a terminal, and what is typed into it."""

    def __init__(self, words, folder):
        self.file, theirs = pty.openpty()
        asked = os.ttyname(theirs), words, folder
        self.process, self.text = SERVER.Process(target=in_terminal, args=asked), ""
        self.process.start()
        self.theirs = theirs  # held open, or what it says last is lost

    def until(self, wanted, seconds=240):
        """What it says until that."""
        end, said = time.monotonic() + seconds, ""
        while wanted not in said and time.monotonic() < end:
            running = self.process.is_alive()
            if not select.select([self.file], [], [], 1)[0]:
                if not running:
                    break
            else:
                try:
                    said += os.read(self.file, 4096).decode(errors="replace")
                except OSError:
                    break
        self.text += said
        assert wanted in said, self.text[-3000:]
        return said

    def type(self, words):
        os.write(self.file, f"{words}\n".encode())

    def end(self):
        """Its exit code."""
        while self.process.is_alive():
            if select.select([self.file], [], [], 0.1)[0]:
                os.read(self.file, 4096)
        os.close(self.file)
        os.close(self.theirs)
        return self.process.exitcode


@pytest.fixture(scope="module")
def saved(moe_folder, tmp_path_factory):
    """A search that was interrupted twice, and went on to its end without a terminal."""
    folder = tmp_path_factory.mktemp("guided")
    words = [str(moe_folder), "--memory", "200KB", *TEXT]
    terminal = Terminal(words, folder)
    terminal.until("Measuring candidates")
    os.write(terminal.file, b"\x03")
    interrupted = [(terminal.until("--resume"), terminal.end(), [*folder.glob("*-smaller")])]
    terminal = Terminal([*words[:1], *words[3:], "--resume"], folder)
    assert "Continuing with: 200KB" in terminal.until("Which one")
    os.write(terminal.file, b"\x04")
    interrupted += [(terminal.until("--resume"), terminal.end(), [*folder.glob("*-smaller")])]
    left = Path(shutil.copytree(folder, tmp_path_factory.mktemp("left") / "here"))
    said, printed = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said), redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(search, "forms", few_forms)
        with pytest.raises(SystemExit) as ended:
            run_command(*words, "--yes", "--json", "--resume")
    assert not ended.value.code, said.getvalue()
    found = json.loads(printed.getvalue())
    return SimpleNamespace(
        folder=folder, said=said.getvalue(), found=found, interrupted=interrupted, left=left
    )


@pytest.mark.parametrize(("kl", "suggested"), [(0.2, True), (0.01, False)])
def test_where_quantising_alone_wins_both_are_suggested(kl, suggested, monkeypatch):
    said = []
    monkeypatch.setattr(guide, "print_words", said.append)
    search = SimpleNamespace(source=resolve("tiny-moe"), recipe=Recipe("a model", "out", ()))
    guide._suggest_both(search, [point(9000, kl), point(8000, 0.1, type="q4_0")])
    assert ("moesaic fit 'a model' OUT --memory 6KB --type q8_0" in " ".join(said)) is suggested


def test_a_search_that_is_interrupted_prints_how_to_continue(saved):
    """Also when it has ended, and nothing was picked yet."""
    for said, code, made in saved.interrupted:
        assert "nothing was saved" in " ".join(said.split())
        assert (code, made) == (130, [])


def test_a_quantised_point_is_saved_under_any_name(monkeypatch, tmp_path):
    """Without its ending, export would not know that a GGUF file is meant."""
    monkeypatch.chdir(tmp_path)
    answers, exported = iter(["1", "mine", "0"]), []
    monkeypatch.setattr(guide, "prompt", lambda *_: next(answers))
    monkeypatch.setattr(guide.shared, "app", lambda words, **_: exported.append(words))
    points = [point(8000, 0.1, type="q4_0")]
    search = SimpleNamespace(recipe=Recipe("model", "out", ()), work=tmp_path / "work")
    guide._choose(search, points, points, points[0], {})
    assert exported == [["export", "model", "mine.gguf", "--type", "q4_0"]]


def test_a_search_that_finds_nothing_leaves_nothing(moe_folder, refused, monkeypatch, tmp_path):
    """Or another goal would be refused for an unfinished search."""
    monkeypatch.chdir(tmp_path)
    words = moe_folder, "--memory", "1KB", "--samples", 4, "--length", 16, "--yes"
    refused("1KB is out of reach", *words, "--calibration", pages("calibration"))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        ('{"memory": "abc", "max_kl": null}', "memory is 'abc'"),
        ('{"x": 1}', "no 'memory'"),
        ('{"memory": null, "max_kl": null}', "it holds no goal"),
        ('{"memory": 1e400, "max_kl": null}', "memory is inf"),
        ('{"memory": 0, "max_kl": -3}', "max-kl -3 must be a number above 0"),
    ],
)
def test_a_goal_that_was_kept_and_is_none_is_refused(
    goal, said, moe_folder, refused, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.search").mkdir()
    (tmp_path / "out.search" / "goal.json").write_text(goal)
    refused(said, moe_folder, "--out", "out", "--resume", "--yes")


def test_without_stdin_nothing_is_asked(refused, monkeypatch, tmp_path):
    """As of a service, which is begun without one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)

    def goal(*given: object) -> None:
        raise MoesaicError(f"asked: {given[-1]}")

    monkeypatch.setattr(guide, "_goal", goal)
    refused("asked: False", "tiny-moe", "--max-tokens", 512)


def test_without_a_terminal_the_best_that_fits_is_saved(saved, moe_folder):
    found, out = saved.found, saved.folder / f"{moe_folder.name}-smaller"
    assert {"machine", "frontier", "quantised", "out", "scores"} <= found.keys()
    assert found["machine"]["free_bytes"] > 0
    assert any(one["native"] for one in found["frontier"])
    result = found["scores"]["result"]
    assert result["total_bytes"] <= 200_000
    shown = next(c for c in found["frontier"] if c["steps"] == found["chosen"]["steps"])
    assert result["kl"] == pytest.approx(shown["kl"], rel=1e-4), "the figure of the table"
    assert (out / "model.safetensors").is_file()
    assert [of["form"] for of in found["quantised"]] == ["quantised to q8_0", "quantised to q4_0"]
    assert not list(saved.folder.glob("*.search"))


def test_it_says_what_the_model_is_and_the_command(saved, moe_folder, done, monkeypatch):
    said = " ".join(saved.said.split())
    assert "experts in each of" in said
    assert "This machine: " in said
    assert "Estimated KL at 200KB: " in said
    assert "Ways to make it smaller" in said
    assert "$ moesaic " in said
    commands = [line.split() for line in saved.said.splitlines() if line.startswith("$ moesaic")]
    words = next(words for words in commands if words[2] not in ("export", "fit"))
    monkeypatch.chdir(saved.folder)
    done(*words[2:4], "again", *words[5:], "--no-eval")
    one, two = (
        (saved.folder / name / "model.safetensors").read_bytes()
        for name in (f"{moe_folder.name}-smaller", "again")
    )
    assert one == two


def test_of_what_is_fastest_nothing_is_offered_that_keeps_a_tokens_work(moe_folder, tmp_path):
    """prune leaves a token as many experts as before."""
    model = resolve(str(moe_folder))
    fast = FitConfig(active_parameters=Skeleton(model.config, None).size.active_parameters - 2000)
    text = Calibration(pages("calibration"), samples=12, length=24)
    looking = open_search(Recipe(model.name, str(tmp_path / "out"), (), text), fast)
    some = [form for form in looking.forms if form.name in ("slim", "prune", "prune spread")]
    assert len(some) == 3
    looking.forms = some
    price = Price(np.full((1, 1), 0.3))
    looking.prices = Prices({}, {key_of(config): price for config in priced_configs(some)})
    names = {option.form for option in looking._options(fast)}
    assert "slim" in names
    assert not names & {"prune", "prune spread"}


def test_points_are_saved_as_they_are_picked(saved, moe_folder):
    """Continuing with what was interrupted, for another goal, for which it asks."""
    (goal,) = saved.left.rglob(guide.GOAL)
    goal.unlink()
    terminal = Terminal([str(moe_folder), *TEXT, "--resume"], saved.left)
    terminal.until("Largest KL")
    terminal.type("100")
    said = " ".join(terminal.until("Which one").split())
    assert "3 and 4 cannot be saved: No convert_hf_to_gguf.py at nowhere." in said
    terminal.type("1")
    terminal.until("Folder")
    terminal.type("mine")
    said = terminal.until("Which one")
    assert "$ moesaic " in said
    assert "moesaic generate mine" in said
    assert "moesaic export" not in said, "there is no llama.cpp"
    assert (saved.left / "mine" / "config.json").is_file()
    terminal.type("0")
    assert terminal.end() == 0
    assert [path.name for path in saved.left.iterdir()] == ["mine"]
