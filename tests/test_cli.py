"""The command line as a user meets it: figures, exit codes, one clear message."""

import errno
import io
import json
import sys

import pytest
from moe_models import tiny_moe
from rich.console import Console

from moesaic import cli, run
from moesaic.cli import bars
from moesaic.data.text import shipped_texts
from moesaic.progress import Figures
from moesaic.version import __version__

QUICK = ["--samples", "12", "--length", "32", "--layers", "all"]


@pytest.fixture
def moesaic(monkeypatch, capsys):
    """Run a command; returns exit code, stdout and stderr."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["moesaic", *map(str, args)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return call


@pytest.fixture(scope="module")
def carved(llama_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "out"
    old = sys.argv
    sys.argv = ["moesaic", "carve", str(llama_folder), str(out), *QUICK, "--no-eval"]
    try:
        cli.main()
    except SystemExit as stop:
        assert not stop.code  # noqa: PT017
    finally:
        sys.argv = old
    return out


def test_carve_prints_one_json_object(moesaic, llama_folder, tmp_path):
    text = tmp_path / "held-out.txt"
    text.write_text("\n\n".join(shipped_texts("evaluation", "prose")[:3]))
    code, out, _ = moesaic(
        "carve", llama_folder, tmp_path / "out", *QUICK, "--json", "--max-tokens", 1024,
        "--data", text, "--compare", "static", "-o", "alpha=1.0",
    )  # fmt: skip
    assert code == 0
    record = json.loads(out)
    assert record["config"]["alpha"] == 1.0
    assert set(record["scores"]) == {"original", "result", "static"}
    code, out, _ = moesaic(
        "eval", tmp_path / "out", "--data", text, "--max-tokens", 1024, "--json", "--against",
        llama_folder,
    )  # fmt: skip
    figures = json.loads(out)
    assert figures["perplexity"] == pytest.approx(record["scores"]["result"]["perplexity"])
    assert figures.keys() >= {
        "perplexity", "tokens", "total_parameters", "active_parameters", "active_ratio", "against",
    }  # fmt: skip
    assert figures["against"]["perplexity"] == pytest.approx(
        record["scores"]["original"]["perplexity"]
    )


def test_inspect(moesaic, carved):
    code, out, _ = moesaic("inspect", carved, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["model_type"] == "moesaic_llama"
    assert [layer["kind"] for layer in figures["layers"]] == ["carved"] * 4
    assert figures["layers"][0]["experts"] == 4
    assert figures["active_ratio"] == pytest.approx(0.8, abs=0.02)
    code, out, _ = moesaic("inspect", carved)
    assert code == 0
    assert "carved" in out


def test_generate(moesaic, carved):
    code, out, _ = moesaic("generate", carved, "The people", "--new-tokens", 4, "--json")
    assert code == 0
    assert json.loads(out)["prompt"] == "The people"


def test_apply_and_report(moesaic, carved, llama_folder, tmp_path):
    code, _, _ = moesaic("apply", llama_folder, carved / "plan.json", tmp_path / "again")
    assert code == 0
    assert (tmp_path / "again" / "config.json").exists()
    code, _, _ = moesaic("report", carved, "--out", tmp_path / "r.html")
    assert code == 0
    assert "<html" in (tmp_path / "r.html").read_text()


def test_run_a_recipe_with_overrides(moesaic, carved, tmp_path):
    out = tmp_path / "out"
    code, _, _ = moesaic("run", carved / "recipe.yaml", f"out={out}", "steps.0.carve.active=0.9")
    assert code == 0
    assert json.loads((out / "plan.json").read_text())["config"]["active"] == 0.9


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["carve", "MODEL", "OUT", "--active", "0.2"], "out of reach"),
        (["carve", "MODEL", "OUT", "--method", "magic"], "unknown method 'magic'; known: more"),
        (["carve", "MODEL", "OUT", "--variant", "best"], "carve.variant"),
        (["carve", "MODEL", "OUT", "-o", "beta=1"], "carve.beta is not an option"),
        (["carve", "MODEL", "OUT", "-o", "beta"], "not key=value"),
        (["carve", "MODEL", "OUT", "--calibration", "no.txt"], "No text file"),
        (["carve", "MODEL", "OUT", "--samples", "100000"], "--samples"),
        (["carve", "MODEL", "OUT", "--dtype", "int3"], "--dtype"),
        (["carve", "MODEL", "OUT", "--device", "warp"], "--device 'warp'"),
        (["carve", "MODEL"], "Missing argument"),
        (["carve", "MODEL", "DONE"], "exists"),
        (["carve", "DONE", "OUT"], "already carved"),
        (["carve", "/nowhere", "OUT"], "No model folder"),
        (["eval", "some/model"], "could not be fetched"),
        (["eval", "MODEL", "--length", "1"], "--length"),
        (["run", "none.yaml"], "No recipe"),
        (["apply", "MODEL", "/nowhere", "OUT"], "No plan"),
        (["report", "/nowhere"], "no readable result.json"),
        (["generate", "MODEL", ""], "prompt is empty"),
        (["fly"], "No such command"),
    ],
)
def test_wrong_requests_exit_2_with_one_message(
    moesaic, llama_folder, carved, tmp_path, args, message
):
    places = {"MODEL": llama_folder, "OUT": tmp_path / "out", "DONE": carved}
    code, out, err = moesaic(*(places.get(a, a) for a in args))
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not any(tmp_path.iterdir())


def test_damaged_checkpoint(moesaic, llama_folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in llama_folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    shard = sorted(broken.glob("model-*.safetensors"))[3]
    shard.write_bytes(shard.read_bytes()[:-100])
    for command in (["carve", broken, tmp_path / "out", *QUICK], ["eval", broken]):
        code, _, err = moesaic(*command)
        assert code == 2
        assert shard.name in err
        assert "truncated" in err
    assert not (tmp_path / "out").exists()


def test_full_disk_is_said(moesaic, llama_folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("moesaic.io.checkpoint.ShardWriter.close", full)
    code, _, err = moesaic("carve", llama_folder, tmp_path / "out", *QUICK, "--no-eval")
    assert code == 2
    assert "disk is full" in err
    assert not (tmp_path / "out").exists()


def test_a_fault_of_ours_exits_1_and_says_so(moesaic, monkeypatch, tmp_path):
    def broken(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(run, "run_recipe", broken)
    code, _, err = moesaic("carve", "smollm2", tmp_path / "out")
    assert code == 1
    assert "ZeroDivisionError" in err
    assert "fault of moesaic" in err


def test_interrupt(moesaic, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_recipe", interrupted)
    code, _, err = moesaic("carve", "smollm2", tmp_path / "out")
    assert code == 130
    assert "--resume" in err


def test_version_and_help(moesaic):
    assert moesaic("--version")[1].strip() == __version__
    for command in (
        "carve",
        "run",
        "demo",
        "eval",
        "bench",
        "inspect",
        "generate",
        "apply",
        "export",
    ):
        code, out, _ = moesaic(command, "--help")
        assert code == 0
        assert "Example: moesaic" in out, command


def test_condense_then_tune(moesaic, tokenizer, tmp_path):
    model = tmp_path / "model"
    tiny_moe("qwen2_moe").save_pretrained(model)
    tokenizer.save_pretrained(model)
    quick = ["--samples", "4", "--length", "32", "--no-eval", "--json"]
    small, tuned = tmp_path / "small", tmp_path / "tuned"
    code, out, err = moesaic("condense", model, small, "--keep", "shared+routed", *quick)
    assert code == 0, err
    record = json.loads(out)
    (i,) = record["layers"]
    assert len(record["experts"][str(i)]) == 2
    code, out, err = moesaic("inspect", small, "--json")
    assert json.loads(out)["layers"][i]["kind"] == "dense"
    options = ["--steps", "2", "--length", "32", "--no-eval", "--json"]
    code, out, err = moesaic("tune", small, tuned, "--data", "prose", *options)
    assert code == 0, err
    assert len(json.loads(out)["tune"]["losses"]) == 2
    code, out, err = moesaic("tune", model, tmp_path / "none", "--data", "prose", *options)
    assert code == 2
    assert "no condensed layers" in err
    code, out, err = moesaic("condense", model, tmp_path / "none", "--memory", "much", *quick)
    assert code == 2
    assert "not a number of bytes" in err
    assert not (tmp_path / "none").exists()


def test_figures_of_the_passing_items_are_drawn_under_the_bar(monkeypatch):
    told = Console(record=True, width=100, file=io.StringIO())
    monkeypatch.setattr(bars, "err_console", told)
    steps = [Figures(loss=float(n), union=0.0) for n in range(8, 0, -1)]
    assert list(bars.bars(steps, "Training", 8)) == steps
    drawn = told.export_text()
    assert "Training" in drawn
    assert "loss                    █▇▆▅▄▃▂▁ 1" in drawn
    assert "union                   ▁▁▁▁▁▁▁▁ 0" in drawn
