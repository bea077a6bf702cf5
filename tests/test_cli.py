"""The command line as a user meets it: figures, exit codes, one clear message, soon."""

import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import pytest
from builders import pages
from rich.console import Console
from transformers import AutoModelForCausalLM

from moesaic import __version__, pipeline, progress
from moesaic.cli import app
from moesaic.config import Calibration, Evaluation, about, flag_of
from moesaic.data.reader import shipped_texts
from moesaic.methods import METHODS, VERBS, methods_of
from moesaic.report.numbers import memory
from moesaic.types import Figures

TEXT = ("--calibration", pages("calibration"))
QUICK = (*TEXT, "--samples", "12", "--length", "32", "--layers", "all")
SMALL = (*TEXT, "--samples", "6", "--length", "24")


def test_carve_prints_one_json_object(done, llama_folder, tmp_path):
    text = tmp_path / "held-out.txt"
    text.write_text("\n\n".join(shipped_texts("evaluation", "prose")[:3]))
    out = done(
        "carve", llama_folder, tmp_path / "out", *QUICK, "--json", "--max-tokens", 1024,
        "--data", text, "--compare", "static", "-o", "alpha=1.0", "-o", "rounds=0",
        "-o", "new_tokens=2",
    )  # fmt: skip
    record = json.loads(out)
    assert record["steps"][0]["config"]["alpha"] == 1.0
    assert set(record["scores"]) == {"original", "result", "static"}
    assert "speed" not in record


def test_inspect(done, carved_folder):
    figures = json.loads(done("inspect", carved_folder, "--json"))
    assert figures["model_type"] == "moesaic_llama"
    assert [layer["kind"] for layer in figures["layers"]] == ["carved"] * 4
    assert figures["layers"][0]["experts"] == 4
    assert figures["active_ratio"] == pytest.approx(0.8, abs=0.02)
    assert "carved" in done("inspect", carved_folder)


def test_generate(done, carved_folder):
    out = done("generate", carved_folder, "The people", "--new-tokens", 4, "--json")
    assert json.loads(out)["prompt"] == "The people"
    prompt = ":heart: \x1b[31m" + "long " * 30
    out = done("generate", carved_folder, prompt, "--new-tokens", 4)
    assert out.startswith(prompt.replace("\x1b", "\N{REPLACEMENT CHARACTER}")), "as it was given"


def test_run_a_recipe_with_overrides(done, carved_folder, tmp_path):
    out = tmp_path / "out"
    done("run", carved_folder / "moesaic/recipe.yaml", f"out={out}", "steps.0.carve.active=0.9")
    assert json.loads((out / "moesaic/plan.json").read_text())["config"]["active"] == 0.9


def test_observe_prune_skip(command, done, moe_folder, tmp_path):
    stats, out, skipping = (tmp_path / name for name in ("stats", "out", "skipping"))
    printed = done("observe", moe_folder, stats, *SMALL, "--json")
    assert json.loads(printed)["layers"] == [0, 2]
    printed = done(
        "prune", moe_folder, out, "--keep", 5, "--stats", stats, "--compare", "frequency",
        "--data", pages("evaluation"), "--max-tokens", 600, "-o", "rounds=0", "-o",
        "new_tokens=2", "--json",
    )  # fmt: skip
    record = json.loads(printed)
    assert [len(record["layers"][i]["kept"]) for i in (0, 2)] == [5, 5]
    assert record["layers"][0]["loss"] > 0
    assert record["scores"].keys() == {"original", "result", "frequency"}
    scores = record["scores"]
    assert scores["result"]["total_parameters"] < scores["original"]["total_parameters"]
    assert (out / "moesaic/report.html").stat().st_size > 1000
    assert type(AutoModelForCausalLM.from_pretrained(out)).__name__ == "Qwen2MoeForCausalLM"
    printed = done("skip", out, skipping, *SMALL, "--no-eval", "--json")
    beta = json.loads(printed)["beta"]
    assert beta[1] is None
    assert 0 < beta[0] < 1
    printed = done("inspect", skipping, "--json")
    assert [layer["experts"] for layer in json.loads(printed)["layers"]] == [5, 0, 5]


def test_condense_then_tune(done, moe_folder, tmp_path):
    quick = [*TEXT, "--samples", "4", "--length", "32", "--no-eval", "--json"]
    small, tuned = tmp_path / "small", tmp_path / "tuned"
    record = json.loads(done("condense", moe_folder, small, "--keep", "shared+routed", *quick))
    (i,) = record["layers"]
    assert len(record["experts"][str(i)]) == 2
    assert json.loads(done("inspect", small, "--json"))["layers"][i]["kind"] == "condensed"
    options = ["--steps", "2", "--length", "32", "--no-eval", "--json"]
    (step,) = json.loads(done("tune", small, tuned, "--train", "prose", *options))["steps"]
    assert len(step["summary"]["training"]["losses"]) == 2
    assert step["weights"] == "trained"


# --- wrong requests ------------------------------------------------------------------------------

AT_ONCE = """
carve MODEL OUT --method magic | unknown method 'magic'; known: more
carve MODEL OUT --method mor | Did you mean 'more'?
carve MODEL OUT --method more --tau 3 | --tau is an option of --method tomoe, not of more
carve MODEL OUT --experts 0 | --experts 0 must be at least 1
carve MODEL OUT --tua 3 | No such option of carve: --tua. Did you mean '--tau'?
carve MODEL OUT --variant best | --variant 'best' is none of full, backbone
carve MODEL OUT -o beta=1 | beta is not an option of carve, method more; known: active
carve MODEL OUT -o beta | -o 'beta' is not NAME=VALUE
carve MODEL OUT -o rounds=0 -o rounds=3 | rounds is given twice
carve MODEL OUT -o alpha=2 | --alpha 2.0 must be at most 1
carve MODEL OUT -o seed=-1 --method more | -1 must be at least 0
carve MODEL OUT -o lr=-1 --method tomoe | -1.0 must be at least 0
carve MODEL OUT --recipe worst | known: best
carve MODEL OUT --recipe paper | is for more, tomoe, dsmoe: give method=more
carve MODEL OUT --method dsmoe --compare static | --compare 'static' is none of
carve MODEL OUT --samples 0 | --samples 0 must be at least 1
carve MODEL OUT --samples 99999999999999999999 | must be at most 1e+15
carve MODEL OUT --seed 100000000000000000000000 | must be at most 4294967295
carve MODEL OUT --max-tokens -1 | --max-tokens -1 must be at least 0
carve MODEL OUT --dtype int3 | --dtype 'int3'
carve MODEL OUT --device warp | --device 'warp'
carve MODEL OUT --active x | --active 'x' is not a number
carve MODEL OUT --active 1 | --active 1 leaves nothing out
carve MODEL OUT -o prompt= | prompt is empty
carve MODEL OUT -o tasks=no.jsonl | tasks: no file
carve MODEL OUT --calibration no.txt | No text file at no.txt
carve MODEL OUT --data no.txt | No text file at no.txt
carve MODEL OUT --data no.safetensors | No text file at no.safetensors
carve MODEL | Missing argument 'OUT'
carve MODEL DONE | exists. Choose another name, or pass --overwrite
carve /nowhere OUT | No model folder
carve smolm2 OUT | Did you mean 'smollm2'?
prune MIXTURE OUT --keep 6 -o keep=4 | --keep is given twice
prune MIXTURE OUT --keep 6 -o keeep=3 | keeep is not an option of prune; known: keep
prune MIXTURE OUT --keep 6 -o keeep=3 | Did you mean 'keep'?
prune MIXTURE OUT --kepe 6 | No such option of prune: --kepe. Did you mean '--keep'?
prune MIXTURE OUT --keep 2 --compare magic | --compare 'magic'
prune MIXTURE OUT --keep 6 --score magic | --score 'magic'
prune MIXTURE OUT --keep 6 --score reapp | Did you mean 'reap'?
prune MIXTURE OUT --keep six | --keep 'six' is not a number.
prune MIXTURE OUT --keep 50% | --keep '50%' is not a number; give 0.5.
prune MIXTURE OUT --keep 5.5 | allocate=layers
prune MIXTURE OUT --keep inf | --keep must be a number; got inf
prune MIXTURE OUT --keep nan | --keep must be a number; got nan
prune MIXTURE OUT --keep 6 --seed -1 | --seed -1 must be at least 0
prune MIXTURE OUT --keep 6 --stats nowhere | No statistics at nowhere
prune MIXTURE OUT --keep 6 --data code=0 | weight of code must be above 0
prune MIXTURE OUT --keep 6 --calibration code=0 | weight of code must be above 0
prune MIXTURE OUT --keep 6 --no-eval --baseline q8_0 | --baseline is for measuring: not with
slim MIXTURE OUT --keep 1 | --keep 1 removes nothing
slim MIXTURE OUT -o =3 | -o '=3' is not NAME=VALUE
slim MIXTURE OUT --allocate unifrom | Did you mean 'uniform'?
skip MIXTURE OUT --quantile 0 | --quantile 0 skips nothing
skip MIXTURE OUT --top-k two | 'two' is not a whole number
condense MIXTURE OUT --count 0 | --count 0 condenses nothing
condense MIXTURE OUT --memory much | not a number of bytes
condense MIXTURE OUT --candidates 1,a | candidates.1 'a' is not a whole number
tune MIXTURE OUT --data old.txt | trained on, too, with --train FILE
fit MIXTURE OUT | Give a budget
fit MIXTURE OUT --memory 9MB --windows 3 | --windows 3 must be at least 4
fit MIXTURE OUT --memory 50% | --memory '50%' is not a number of bytes
fit MIXTURE OUT --max-loss nan | --max-loss must be a number; got nan
fit MIXTURE OUT --memory 9MB --data no.txt | No text file at no.txt
tiny-moe --memory much --out OUT | number of bytes
tiny-moe --max-kl -1 --out OUT | --max-kl -1 must be a number above 0
tiny-moe --max-kl 1e400 --out OUT | --max-kl inf must be a number above 0
tiny-moe --memory 8MB --max-kl 0.1 --out OUT | --memory and --max-kl are two goals
tiny-moe --yse --out OUT | Did you mean '--yes'?
observe /nowhere OUT | No model folder
observe MODEL DONE | is a folder
eval MODEL --length 1 | --length 1
eval MODEL --draw x.svg | No such option of eval: --draw
eval MODEL --tasks none.jsonl | --tasks: no file
eval MODEL --shots 1 | --shots 1 needs tasks
eval MODEL --card | --card needs --against
eval MODEL --limit 3 | --limit 3 needs tasks
eval MODEL --tasks arc_easy --limit 0 | --limit 0 must be at least 1
export MODEL OUT --to paper | --to 'paper' is none of native, gguf
export MODEL OUT.gguf --to native | is a GGUF file's name
export MODEL OUT --memory 3MB | to=gguf
export MODEL OUT --type q8_0 | --type=q8_0 is a type of GGUF files: pass to=gguf
export MODEL OUT --to gguf --memory 3MX | is not a number of bytes
export MODEL OUT --to gguf --memory 3MB --type q8_0 | leave type=q8_0 out
export MODEL OUT --to gguf --among q8_0 | --among=q8_0 needs memory
run none.yaml | No recipe
apply MODEL /nowhere OUT | No plan
apply MODEL | apply takes [BASE] PLAN OUT
report /nowhere | No run at
report DONE --out x.png | ends in .html or .svg
generate MODEL '' | prompt is empty
generate MODEL hi --new-tokens 0 | --new-tokens
fly | No such command: fly.
pruen MODEL OUT | Did you mean 'prune'?
--versoin | Did you mean '--version'?
"""
LATER = r"""
carve MODEL OUT --method more --active 0.2 | out of reach
carve DONE OUT --method more | already carved
carve MODEL OUT --device hpu | device 'hpu' cannot be used here
eval some/model | could not be fetched
eval MODEL --tasks BAD | no choices
eval MODEL --tasks FEW --shots 5 | --shots 5: the examples are other questions
eval MODEL --tasks FEW,FEW | twice
eval MODEL --data a.jsonl,prose | a mix is written as a.jsonl=1,prose=1
eval MODEL --data prose=nan,code=1 | weight of prose must be above 0
eval MODEL --data '{"name": "prose", "weight": Infinity}' | weight of prose must be above 0
generate tiny-moe hi --chat | --chat: this model has no chat template
export MIXTURE OUT --target x | a mixture is kept one
prune MIXTURE OUT --keep 1 | needs at least 2
prune MIXTURE FILE/out --keep 6 --no-eval | is no folder.
prune MIXTURE LOOP/out --keep 6 --no-eval | is no folder.
observe MIXTURE FILE/stats | is no folder.
observe MIXTURE FOLDER --overwrite | is a folder; give
report DONE --out FILE/page.html | is no folder.
inspect ~nobody/model | No model folder at ~nobody/model
run RECIPE x=DEEP | is no value for x
export MIXTURE FOLDER --to gguf --overwrite | is a folder; give
"""


def rows(table, at_once):
    """Arguments and message of each line, and whether it is seen before anything is opened."""
    for line in table.strip().splitlines():
        words, _, message = line.partition(" | ")
        yield pytest.param(shlex.split(words), message, at_once, id=words)


@pytest.fixture
def placed(llama_folder, moe_folder, carved_folder, tmp_path):
    """Arguments with the folders of this test in place of capital words."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "recipe").write_text("model: tiny-moe\nout: out\nsteps: [prune: {}]\n")
    question = {"question": "Is ice cold?", "choices": ["yes", "no"], "answer": 0}
    (tmp_path / "few.jsonl").write_text(json.dumps(question))
    (tmp_path / "bad.jsonl").write_text('{"question": "a?"}')
    places = {"MODEL": llama_folder, "MIXTURE": moe_folder, "DONE": carved_folder}
    places |= {
        name: tmp_path / name.lower() for name in ("OUT", "FILE", "FOLDER", "LOOP", "RECIPE")
    }
    places |= {name: tmp_path / f"{name.lower()}.jsonl" for name in ("FEW", "BAD")}
    places["DEEP"] = "[" * 2000
    name = re.compile(r"(?:^|(?<=[,=]))[A-Z]+")
    return lambda args: [name.sub(lambda m: str(places.get(m[0], m[0])), a) for a in args]


@pytest.mark.parametrize(
    ("args", "message", "at_once"), [*rows(AT_ONCE, True), *rows(LATER, False)]
)
def test_wrong_requests_exit_2_with_one_message(
    command, placed, tmp_path, args, message, at_once, monkeypatch
):
    """Mostly before a model is opened; an unfinished run hides nothing that is wrong."""
    if at_once and "OUT" in args:
        monkeypatch.setattr(pipeline, "convert", None)
        (tmp_path / "out.partial").mkdir()
    before = sorted(tmp_path.iterdir())
    code, out, err = command(*placed(args))
    assert (code, out) == (2, "")
    assert message in err
    assert not re.search("Traceback|unfinished", err)
    assert sorted(tmp_path.iterdir()) == before


def test_each_part_of_a_message_names_its_option():
    said = app.commands["fit"].in_flags
    assert said("memory 1 is little; parameters 2, too; what", ()) == (
        "--memory 1 is little; --parameters 2, too; what"
    )
    assert said("memory 1; parameters 2", ["parameters"]) == "--memory 1; parameters 2"
    assert said("Text: one; memory 2", ()) == "Text: one; memory 2"


def test_an_unfinished_run_is_named_by_its_command(
    command, refused, moe_folder, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    verb = ["slim", moe_folder, out, "--no-eval", "--length", 24]
    with monkeypatch.context() as patch:
        patch.setattr("moesaic.result.Result.write", Mock(side_effect=KeyboardInterrupt))
        assert command(*verb, "--keep", 0.5, "--samples", 6)[0] == 130
    err = refused("holds an unfinished run (moesaic slim", *verb, "--keep", 0.75, "--samples", 6)
    assert " --keep 0.5 " in err, err
    assert " --samples 6 --length 24, 2 layers finished)" in err, err
    other = [*verb, "--keep", 0.75, "--samples", 5, "--resume"]
    refused("keep was 0.5, is 0.75; samples was 6, is 5", *other)
    assert command(*verb, "--keep", 0.5, "--samples", 6, "--resume")[0] == 0


def test_a_file_without_text_is_refused_before_anything_is_computed(
    refused, llama_folder, tmp_path, monkeypatch
):
    """What is none is in test_text.py."""
    empty, line = tmp_path / "empty.txt", ("carve", llama_folder, tmp_path / "out")
    empty.touch()
    monkeypatch.setattr(pipeline, "convert", None)
    for option in ("--data", "--calibration"):
        refused("empty.txt is empty", *line, option, empty)
        monkeypatch.undo()
    assert not (tmp_path / "out").exists()


def test_a_folder_without_text_is_refused_in_words(refused, llama_folder, tmp_path):
    said = "is a folder in which no text can be read"
    line = ("carve", llama_folder, tmp_path / "out", "--calibration", tmp_path)
    assert "dataset_name" not in refused(said, *line)
    (tmp_path / "a.txt").write_bytes("Un café. ".encode("latin-1") * 90)
    refused(f"{said}: 'utf-8'", "eval", llama_folder, "--data", tmp_path)


@pytest.mark.parametrize("name", [name for name in app.commands if name != "inspect"])
def test_a_command_alone_asks_for_its_first_argument(refused, name):
    refused("Missing argument", name)


def test_a_slash_after_the_name_of_a_model_that_ships_is_ignored(command):
    for words in (["inspect", "tiny-moe/"], ["generate", "tiny-moe/", "The", "--new-tokens", 1]):
        assert command(*words)[0] == 0


def test_a_tilde_is_the_users_folder(command, refused, llama_folder, tmp_path, monkeypatch):
    """Also where the shell leaves it alone, behind = and in quotes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(llama_folder)
    (tmp_path / "t.txt").write_text("A line of a text that is long enough. " * 90)
    command("carve", "~/model", "~/out", "--calibration=~/t.txt", "--no-eval", *QUICK[2:6])
    assert (tmp_path / "out" / "config.json").is_file()
    refused("~/nowhere", "inspect", "~/nowhere")


@pytest.mark.parametrize("name", ["o[/b]", "a[bold]one"])
def test_brackets_in_a_name_are_a_name(refused, done, llama_folder, tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)  # so that names are short
    out = Path(name)
    refused(name, "carve", llama_folder, out, *QUICK, "--no-eval", code=0)
    measured = ["eval", out, "--max-tokens", 64, "--length", 32, "--data", pages("evaluation")]
    for line, shown in ((["inspect", out], name), (measured, out.name)):
        said = done(*line)
        assert shown in "".join(said.split())


def test_bytes_before_and_after_are_printed(command, llama_folder, tmp_path):
    given = llama_folder, tmp_path / "out", "--keep", 0.5, *SMALL, "--no-eval"
    code, _, said = command("slim", *given)
    assert code == 0, said
    files = json.loads((tmp_path / "out" / "moesaic" / "result.json").read_text("utf-8"))["files"]
    assert files["result"] < files["original"]
    sizes = f"({memory(files['original'])} -> {memory(files['result'])})"
    assert sizes.replace("\N{NO-BREAK SPACE}", " ") in said


ASKED = """
import io, sys
from contextlib import redirect_stderr, redirect_stdout

from moesaic import cli

for arguments in {requests!r}:
    sys.argv = ["moesaic", *arguments]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            cli.main()
        except SystemExit:
            pass
    names = ("torch", "transformers", "sklearn", "matplotlib", "peft", "torchao", "datasets")
    heavy = [name for name in names if sys.modules.get(name)]
    assert not heavy, (arguments, heavy)
"""


def test_help_and_wrong_requests_need_nothing_heavy(placed, tmp_path):
    helped = [[], ["--version"], ["-h"], ["tiny-moe", "-h"], ["help", "slim"]]
    helped += [[name, "--help"] for name in app.commands]
    wrong = [placed(row.values[0]) for row in rows(AT_ONCE, True)]
    code = ASKED.format(requests=[*helped, *wrong])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_nothing_is_said_before_our_first_line(llama_folder, tmp_path):
    line = [sys.executable, "-m", "moesaic", "inspect", str(llama_folder), "--json"]
    run = subprocess.run(line, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["model_type"] == "llama"
    assert run.stderr == ""


# --- failures ------------------------------------------------------------------------------------


def test_what_stdout_cannot_write_costs_no_run_its_end(
    command, llama_folder, tmp_path, monkeypatch
):
    """Windows writes to files in cp1252, which has no arrow."""
    (tmp_path / "before → after").symlink_to(llama_folder)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "cp1252"))
    code, _, err = command("inspect", tmp_path / "before → after")
    sys.stdout.flush()
    assert (code, err) == (0, "")
    assert b"before ? after" in written.getvalue()


def test_full_disk_is_said(refused, llama_folder, tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("moesaic.io.checkpoint.ShardWriter.close", full)
    refused("disk is full", "carve", llama_folder, tmp_path / "out", *QUICK, "--no-eval")
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


def test_a_fault_of_ours_exits_1_and_says_so(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "run_recipe", Mock(side_effect=ZeroDivisionError))
    said = refused("ZeroDivisionError", "carve", "smollm2", tmp_path / "out", code=1)
    assert "fault of moesaic" in said


def test_interrupt(command, refused, monkeypatch, tmp_path):
    """It says what is true: whether anything is kept."""
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(pipeline, "run_recipe", interrupted)
    carve = ["carve", "smollm2", tmp_path / "out"]
    refused("Nothing is finished yet", *carve, code=130)
    kept = tmp_path / "out.partial"
    kept.mkdir()
    (kept / "layer-result-0.safetensors").touch()
    refused("--resume continues", *carve, "--resume", code=130)
    for place in ("moesaic.metrics.evaluate.evaluate", "moesaic.fitting.run.search_and_make"):
        monkeypatch.setattr(place, interrupted)
    assert command("eval", "tiny-moe")[::2] == (130, "Interrupted.")
    fit = ["fit", "tiny-moe", tmp_path / "fitted", "--memory", "9MB"]
    assert "Nothing is finished yet" in command(*fit)[2]
    (tmp_path / "fitted.search").mkdir()
    refused("--resume continues", *fit, "--resume", code=130)
    monkeypatch.setattr("moesaic.api.observe", interrupted)
    observe = ["observe", "tiny-moe", tmp_path / "stats"]
    refused("Nothing is finished yet", *observe, code=130)


def test_an_interruption_that_an_import_calls_an_error_is_one(command, monkeypatch):
    def imported(*_, **__):
        try:
            raise KeyboardInterrupt
        except BaseException as error:
            raise ModuleNotFoundError("Could not import module 'AutoConfig'") from error

    monkeypatch.setattr("moesaic.metrics.evaluate.evaluate", imported)
    assert command("eval", "tiny-moe")[::2] == (130, "Interrupted.")


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*app.commands, "tiny-moe"])
def test_help_fits_a_screen_and_ends_with_an_example(command, done, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = done(name, "-h")
    assert f"Example: moesaic {name}" in " ".join(out.split())
    assert len(out.splitlines()) <= 42
    assert out == command("help", name)[1] if name in app.commands else "guide" not in out
    assert not re.search(r"list\[|Path|<|INTEGER", out.replace("moesaic_<base>", ""))


@pytest.mark.parametrize("key", METHODS)
def test_help_is_of_one_method(command, key):
    verb, _, method = key.partition(".")
    several = len(methods_of(verb)) > 1
    asked = [verb, *(["--method", method] if several else [])]
    brief, whole = (command(*asked, word)[1] for word in ("--help", "--help-all"))
    for of in fields(METHODS[key]):
        if not about(of).seldom:
            assert flag_of(of).partition("/")[0] in brief
        assert flag_of(of).partition("/")[0] in whole
    of_others = {of.name for m in methods_of(verb).values() for of in fields(m)}
    configs = (METHODS[key], Calibration, Evaluation)
    shared = {of.name for config in configs for of in fields(config)}
    for name in of_others - shared:
        assert f"\n  --{name.replace('_', '-')} " not in whole
    assert "\n  --samples " not in brief
    assert "\n  --device " in whole


def test_options_are_few(command):
    asked = [[name] for name in [*app.commands, "tiny-moe"]]
    asked += [[verb, "--method", m] for verb in VERBS for m in methods_of(verb)]
    helped = "".join(command(*words, "-h")[1] for words in asked)
    assert len(set(re.findall(r"--[a-z][a-z-]+", helped))) <= 100
    assert len(app.commands) <= 16


COMPLETED = ("moesaic pru", "1", "plain,prune"), ("moesaic prune m out --sco", "4", "plain,--score")


@pytest.mark.parametrize(("words", "at", "found"), COMPLETED)
def test_shells_complete_commands_and_options(words, at, found):
    asked = {"_MOESAIC_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": at}
    code = "import sys; sys.argv = ['moesaic']; from moesaic import cli; cli.main()"
    env, line = {**os.environ, **asked}, [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=env)
    assert done.stdout.split() == [found]


def test_version(command):
    assert command("--version")[1].strip() == __version__


def test_defaults_stand_in_the_configs_alone(command, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(pipeline, "run_recipe", lambda recipe, **_: asked.append(recipe))
    for key in METHODS:
        verb, _, method = key.partition(".")
        given = ["--method", method] if len(methods_of(verb)) > 1 else []
        said = command(verb, "smollm2", tmp_path / "out", *given)
        assert asked, said
        recipe = asked.pop()
        assert recipe.steps == (METHODS[key](),)
        assert recipe.evaluation == Evaluation()


def test_time_left_is_told_from_the_second_item_on_however_long_it_takes():
    """rich's own column forgets what was done more than half a minute ago."""
    clock = [0.0]
    column, quiet = progress.Left(), Console(file=io.StringIO())
    with progress.Progress(
        column, get_time=lambda: clock[0], console=quiet, auto_refresh=False
    ) as bar:
        number = bar.add_task("Trying", total=3)
        (task,) = bar.tasks
        clock[0] = 100.0
        assert str(column.render(task)) == "-:--:--"
        bar.advance(number)
        column.render(task)
        clock[0] = 110.0
        assert str(column.render(task)) == "0:03:10"


def test_a_verb_shows_what_rounding_alone_costs(done, moe_folder, tmp_path):
    words = ["--no-refit", *SMALL, "--data", pages("evaluation"), "--max-tokens", "256"]
    words += ["-o", "rounds=0", "-o", "new_tokens=2", "--baseline", "q8_0"]
    said = done("prune", moe_folder, tmp_path / "out", "--keep", "5", *words)
    assert "q8_0" in said


@pytest.fixture
def terminal(monkeypatch):
    """What takes the place of a terminal."""
    console = Console(record=True, width=100, file=io.StringIO())
    monkeypatch.setattr(progress, "err_console", console)
    return console


def test_nothing_is_drawn_where_there_is_nothing_to_do(terminal):
    assert list(progress.bars([], "Refining", 0)) == []
    assert terminal.export_text() == ""


def test_the_loss_of_the_passing_items_stands_beside_the_bar(terminal, monkeypatch):
    steps = [Figures(loss=float(n), union=0.0) for n in range(8, 0, -1)]
    monkeypatch.setenv("RANK", "1")
    assert list(progress.bars(steps, "Training", 8)) == steps
    assert terminal.export_text() == "", "the first of several processes draws for all"
    monkeypatch.setenv("RANK", "0")
    assert list(progress.bars(steps, "Training", 8)) == steps
    drawn = terminal.export_text()
    assert "Training, loss 1" in drawn
