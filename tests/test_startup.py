"""What is imported, and when: help and wrong requests are answered without torch.

Times are not asserted, imports are: torch alone costs a second of CPU time, transformers another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from moesaic.cli import entry
from moesaic.methods import VERBS

HEAVY = ("torch", "transformers", "sklearn", "matplotlib", "peft", "torchao", "datasets")
COMMANDS = [
    ["--help"],
    ["--version"],
    *([verb, "--help"] for verb in VERBS),
    ["--nonsense"],
    ["sculpt", "tiny-dense", "out"],
    ["carve", "tiny-dense", "out", "--method", "chisel"],
    ["carve", "tiny-dense", "out", "--actve", "0.8"],
    ["carve", "tiny-dense", "out", "--router", "magnetic"],
    ["carve", "no-such-model", "out"],
    ["carve", "./no/such/folder", "out"],
    ["carve", "tiny-dense", "{existing}"],
    ["prune", "tiny-moe", "out", "--keep", "5", "--padding"],
    ["slim", "tiny-moe", "out", "--keep", "0"],
    ["condense", "tiny-moe", "out", "--count", "2", "--active", "100"],
    ["skip", "tiny-moe", "out", "--quantile", "7"],
    ["tune", "tiny-moe", "out", "--what", "routers"],
    ["fit", "--help"],
    ["fit", "tiny-moe", "out"],
    ["fit", "tiny-moe", "out", "--memory", "much"],
    ["run", "no-such-recipe.yaml"],
    ["eval", "no-such-model"],
]
"""Commands that need no model."""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def answered(arguments: list[str]) -> dict[str, Any]:
    """Exit code, stdout and stderr of a command, and which heavy modules it imported."""
    code = (
        "import json, sys\n"
        "sys.argv[0] = 'moesaic'\n"
        "from moesaic import cli\n"
        "code = 0\n"
        "try:\n"
        "    cli.main()\n"
        "except SystemExit as stop:\n"
        "    code = stop.code or 0\n"
        f"heavy = [m for m in {HEAVY} if sys.modules.get(m)]\n"  # None: kept from being imported
        "print(json.dumps([code, heavy]), file=sys.__stdout__)\n"
    )
    done = run(code, *arguments)
    last = done.stdout.strip().splitlines()[-1]
    code_and_heavy = json.loads(last)
    return {
        "code": code_and_heavy[0],
        "heavy": code_and_heavy[1],
        "out": done.stdout.removesuffix(last + "\n"),
        "err": done.stderr,
    }


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_answered_without_torch(arguments, tmp_path):
    existing = tmp_path / "existing"
    existing.mkdir()
    (existing / "config.json").write_text("{}")
    said = answered([a.format(existing=existing) for a in arguments])
    assert said["heavy"] == []
    asked = "--help" in arguments or "--version" in arguments
    assert said["code"] == (0 if asked else 2), said
    assert said["out" if asked else "err"].strip()
    assert "Traceback" not in said["err"]
    if not asked:
        assert said["out"] == ""


@pytest.mark.parametrize(
    "code",
    [
        "import moesaic",
        "import moesaic; moesaic.MoREConfig(active=0.8); moesaic.PruneConfig(keep=5)",
        "import moesaic; moesaic.load_recipe",
        "from moesaic.methods import METHODS; [*METHODS.values()]",
    ],
)
def test_configs_cost_no_torch(code):
    done = run(f"{code}; import sys; print([m for m in {HEAVY} if m in sys.modules])")
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


def test_the_library_in_use_imports_no_more_than_it_needs():
    """Loading a model needs torch and transformers; not the trainer, scikit-learn, matplotlib."""
    code = (
        "import moesaic, sys\n"
        "from moesaic.io.source import resolve\n"
        "resolve('tiny-dense').config\n"
        "heavy = ('sklearn', 'matplotlib', 'peft', 'transformers.trainer')\n"
        "print([m for m in heavy if m in sys.modules])\n"
    )
    done = run(code)
    assert done.stdout.strip() == "[]", done.stderr


STATE = """
import logging, os, sys, warnings
import torch, transformers
from transformers import AutoConfig, LlamaForCausalLM  # libraries of its own, too

def asked(log):  # one that merely exists is nobody's
    return log.level or log.disabled or log.handlers

def state():
    names = logging.Logger.manager.loggerDict
    loggers = [logging.root, *(logging.getLogger(n) for n in names if "moesaic" not in n)]
    return (
        dict(os.environ), list(warnings.filters), warnings.showwarning, sys.excepthook,
        {log.name: (log.level, log.disabled, list(log.handlers)) for log in loggers if asked(log)},
        transformers.utils.logging.is_progress_bar_enabled(), torch.get_num_threads(),
        vars(AutoConfig)["from_pretrained"],
    )

before = state()
"""


def test_importing_it_changes_nothing_around_it():
    """But what transformers reads first, once, so that it knows our model types."""
    code = (
        f"{STATE}\n"
        "import moesaic\n"
        "assert state()[:-1] == before[:-1], 'import'\n"
        "moesaic.prune, moesaic.load_recipe, moesaic.Tokens\n"
        "try:\n"
        "    AutoConfig.from_pretrained('./none')\n"
        "except OSError:\n"
        "    pass\n"
        "assert 'moesaic_llama' in transformers.CONFIG_MAPPING\n"
        "after = state()\n"
        "print([i for i, (a, b) in enumerate(zip(after, before)) if a != b])\n"
    )
    done = run(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_products_are_remembered_as_the_user_says(monkeypatch):
    given, ours = entry.REMEMBERED
    monkeypatch.setenv(given, "7")
    monkeypatch.setenv(ours, "")  # so that what is set below goes with the test
    monkeypatch.delenv(ours)
    entry.remember_less()
    assert (os.environ[given], os.environ[ours]) == ("7", entry.REMEMBERED[ours])
