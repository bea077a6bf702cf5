"""prune, skip and observe as a user meets them."""

from __future__ import annotations

import json

import pytest
from moe_models import tiny_moe
from test_cli import moesaic  # noqa: F401  (a fixture)
from transformers import AutoModelForCausalLM

QUICK = ("--calibration", "prose", "--samples", "6", "--length", "24")


@pytest.fixture
def folder(tmp_path, tokenizer):
    tiny_moe("qwen2_moe").save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    return tmp_path / "moe"


def test_observe_prune_skip(moesaic, folder, tmp_path):  # noqa: F811
    stats, out, skipping = (tmp_path / name for name in ("stats", "out", "skipping"))
    code, printed, _ = moesaic("observe", folder, stats, *QUICK, "--json")
    assert code == 0
    assert json.loads(printed)["layers"] == [0, 2]
    code, printed, _ = moesaic(
        "prune", folder, out, "--keep", 5, "--stats", stats, "--compare", "frequency",
        "--max-tokens", 600, "--json",
    )  # fmt: skip
    assert code == 0
    record = json.loads(printed)
    assert [len(record["layers"][i]["kept"]) for i in (0, 2)] == [5, 5]
    assert record["layers"][0]["loss"] > 0
    assert record["scores"].keys() == {"original", "result", "frequency"}
    scores = record["scores"]
    assert scores["result"]["total_parameters"] < scores["original"]["total_parameters"]
    assert (out / "report.html").stat().st_size > 1000
    assert type(AutoModelForCausalLM.from_pretrained(out)).__name__ == "Qwen2MoeForCausalLM"
    code, printed, _ = moesaic("skip", out, skipping, *QUICK, "--no-eval", "--json")
    assert code == 0
    beta = json.loads(printed)["beta"]
    assert beta[1] is None
    assert 0 < beta[0] < 1
    code, printed, _ = moesaic("inspect", skipping, "--json")
    assert [layer["experts"] for layer in json.loads(printed)["layers"]] == [5, 0, 5]
    code, _, _ = moesaic("observe", folder, tmp_path / "twice", "--merge", stats, "--merge", stats)
    assert code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--keep", 1), "needs at least 2"),
        (("--keep", 6, "--criterion", "magic"), "Unknown criterion"),
        (("--keep", 6, "--stats", "nowhere"), "No statistics at"),
        (("--keep", 6, "-o", "keeep=3"), "is not an option"),
        (("--keep", 5.5), "--non-uniform"),
        (("--keep", 6, "--calibration", "code=0"), "not a mix"),
    ],
)
def test_wrong_requests_exit_2(moesaic, folder, tmp_path, args, message):  # noqa: F811
    code, out, err = moesaic("prune", folder, tmp_path / "out", "--no-eval", *args)
    assert code == 2
    assert message in err
    assert out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["prune", "skip", "observe"])
def test_help_shows_an_example(moesaic, command):  # noqa: F811
    code, out, _ = moesaic(command, "--help")
    assert code == 0
    assert f"moesaic {command} tiny-moe" in " ".join(out.split())
