"""What a user's environment has, and how documents' words are held against figures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def try_install() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield import_module("try_install")
    finally:
        sys.path.pop(0)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_runs_in_an_environment_with_one_extra_alone() -> None:
    """Whatever else was set up before: what it shows is what a user of ``gguf`` gets."""
    told = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    made = [line for line in told if "setup_venv.sh" in line]
    assert made == ["scripts/setup_venv.sh .venv-user gguf"]
    run = re.findall(r"\.venv-user/bin/moesaic (\w+)", "\n".join(told))
    assert run == ["generate", "eval", "export", "fit", "report"]
    assert "dev" not in " ".join(told).replace("/dev/null", "")


RECORD = {
    "speed_ratio": {"prefill_spread": [0.9, 1.1], "decode_spread": [0.7, 0.9]},
    "scores": {"original": {"total_bytes": 10}, "result": {"total_bytes": 10}},
}


@pytest.mark.parametrize(
    ("comment", "printed", "problem"),
    [
        ("", "prefill no clear difference", ""),
        ("", "Worse; prefill\nfaster (1.2×)", "prefill is told to be faster"),
        ("dense: decodes faster", "", "said to decode faster; its rounds are 0.70 to 0.90"),
        ("a mixture: narrower experts", "", "said to be smaller"),
        ("", "20 % smaller on disk", "told to be smaller"),
    ],
)
def test_words_that_figures_deny_are_found(
    comment: str, printed: str, problem: str, try_install: Any, tmp_path: Path
) -> None:
    (tmp_path / "out/moesaic").mkdir(parents=True)
    (tmp_path / "out/moesaic/result.json").write_text(json.dumps(RECORD))
    line = "moesaic carve smollm2 out --active 0.8"
    found = try_install.broken(line, comment, printed, tmp_path)
    assert [problem in said for said in found] == [True] * bool(problem)


def test_each_line_of_the_documents_is_run_or_left_out_with_a_reason(try_install: Any) -> None:
    every = [line for page in try_install.DOCUMENTS for line, _ in try_install.lines(page)]
    assert len(every) > 14
    for line in every:
        program = try_install.cheap(line)[0]
        left_out = any(line.startswith(what.replace("\\", "")) for what in try_install.LEFT_OUT)
        assert program in ("moesaic", "pip", "python") or left_out, line
