"""Imports, when they happen and what they do. Help and wrong requests: test_cli.py.

Times are not asserted, imports are: torch alone costs a second of CPU time, transformers another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moesaic.cli import entry

USED = """
import sys

def check(used, *names):
    heavy = [m for m in ("sklearn", "matplotlib", "peft", *names) if m in sys.modules]
    assert not heavy, (used, heavy)

configs = "torch", "transformers", "torchao", "datasets", "scipy"
import moesaic
check("the package", *configs)
moesaic.MoREConfig(active=0.8), moesaic.PruneConfig(keep=5), moesaic.load_recipe
check("configs", *configs)
from moesaic.methods import METHODS
[*METHODS.values()]
check("the registry", *configs)
moesaic.carve
check("a verb", "transformers.trainer")
from moesaic.io.source import resolve
resolve("tiny-dense").config
check("a model's config", "transformers.trainer")
"""
LOADED = """
import transformers
config = transformers.AutoConfig.from_pretrained(FOLDER)
assert config.model_type == "moesaic_llama"
model = transformers.AutoModelForCausalLM.from_pretrained(config.name_or_path)
assert type(model).__name__ == "MoesaicLlamaForCausalLM"
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = code.replace("FOLDER", repr(str(folder)))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_no_more_is_imported_than_is_used(carved_folder):
    """Configs need no torch, loading a model no trainer; transformers then loads a result."""
    done = run(USED + LOADED, carved_folder)
    assert done.returncode == 0, done.stderr


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


def test_importing_it_changes_nothing_around_it(carved_folder):
    """But what transformers reads first, once, so that it knows our model types. It loads a result
    if it was imported first, too."""
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
        f"{LOADED}\n"
    )
    done = run(code, carved_folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", done.stderr


def test_products_are_remembered_as_the_user_says(monkeypatch):
    given, ours, other = entry.ENVIRONMENT
    monkeypatch.setenv(given, "7")
    monkeypatch.setenv(other, "NO")
    monkeypatch.setenv(ours, "")  # so that what is set below goes with the test
    monkeypatch.delenv(ours)
    entry.set_environment()
    assert (os.environ[given], os.environ[ours]) == ("7", entry.ENVIRONMENT[ours])
