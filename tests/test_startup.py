"""Imports, and when they happen: configs cost no torch. Help and wrong requests: test_cli.py.

Times are not asserted, imports are: torch alone costs a second of CPU time, transformers another.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moesaic.cli import entry

HEAVY = ("torch", "transformers", "sklearn", "matplotlib", "peft", "torchao", "datasets")


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


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
