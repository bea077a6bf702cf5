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

from moesaic.cli import start
from moesaic.cli.start import PLAIN, UNRUN, WHOLE, Missed, Outlined, kept, outlined
from moesaic.methods import VERBS

HEAVY = ("torch", "transformers", "sklearn", "matplotlib", "peft", "torchao", "datasets")
UNNEEDED = (
    *("scipy", "sklearn", "pandas", "matplotlib", "peft", "torchao", "datasets", "numba"),
    *("lm_eval", "transformers.trainer", "gguf", "llama_cpp", *UNRUN),
)
"""Beside torch and transformers, where headers alone are looked at."""
COMMANDS = [
    ["--help"],
    ["--version"],
    *([verb, "--help"] for verb in VERBS),
    ["--nonsense"],
    ["sculpt", "tiny-dense", "out"],
    ["carve", "tiny-dense", "out", "--method", "chisel"],
    ["carve", "tiny-dense", "out", "--actve", "0.8"],
    ["carve", "tiny-dense", "out", "--router", "magnetic"],
    ["carve", "tiny-dense", "out", "--propagate"],
    ["carve", "no-such-model", "out"],
    ["carve", "./no/such/folder", "out"],
    ["carve", "tiny-dense", "{existing}"],
    ["prune", "tiny-moe", "out", "--keep", "5", "--padding"],
    ["prune", "tiny-moe", "out"],
    ["condense", "tiny-moe", "out", "--layers", "2", "--active", "100"],
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


DRY_RUN = (
    "import json, os, sys\n"
    "sys.argv[0] = 'moesaic'\n"
    "from moesaic import cli\n"
    "import wrapt\n"
    "made = []\n"
    "@wrapt.when_imported('moesaic.io.checkpoint')\n"
    "def count(checkpoint):\n"
    "    own = checkpoint.skeleton\n"
    "    def counted(config, *args, **options):\n"
    "        made.append(getattr(config, 'num_local_experts', 0))\n"
    "        return own(config, *args, **options)\n"
    "    checkpoint.skeleton = counted\n"
    "if 'MISSED' in os.environ:\n"
    "    cli.start.UNRUN = (os.environ['MISSED'],)\n"
    "code = 0\n"
    "try:\n"
    "    cli.main()\n"
    "except SystemExit as stop:\n"
    "    code = stop.code or 0\n"
    f"heavy = [m for m in {UNNEEDED} if getattr(sys.modules.get(m), '__file__', None)]\n"
    "if 'MISSED' not in os.environ:\n"
    "    import gc, scipy.optimize\n"  # is there when it is asked for
    "    assert gc.isenabled()\n"
    "said = [heavy, made, 'MOESAIC_WHOLE' in os.environ]\n"
    "print(json.dumps(said), file=sys.__stderr__)\n"
    "sys.exit(code)\n"
)


def dry_run(*arguments: str) -> tuple[Any, list[str]]:
    """What a dry run prints, and the last lines of stderr."""
    done = run(DRY_RUN, *arguments, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.strip().splitlines()


PRUNE = ("prune", "tiny-moe", "out", "--keep", "6")


@pytest.fixture(scope="module")
def told():
    return dry_run(*PRUNE)


def test_a_dry_run_imports_no_more_than_it_needs(told):
    """And makes each model's skeleton once: the original's, and the result's."""
    heavy, made, whole = json.loads(told[1][-1])
    assert heavy == []
    assert sorted(made) == [6, 8]
    assert not whole


@pytest.mark.parametrize(
    "arguments",
    [
        ("carve", "tiny-dense", "out", "--method", "tomoe"),
        ("slim", "tiny-moe", "out", "--keep", "0.5"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_verb_needs_what_a_dry_run_leaves_out(arguments):
    heavy, _, whole = json.loads(dry_run(*arguments)[1][-1])
    assert heavy == []
    assert not whole


@pytest.mark.parametrize("missed", ["transformers.initialization", "transformers.modeling_layers"])
def test_a_dry_run_that_misses_something_is_made_again_with_everything(missed, told, monkeypatch):
    """A function that is called, and a class that is one of nothing."""
    monkeypatch.setenv("MISSED", missed)
    again, lines = dry_run(*PRUNE)
    notes = [json.loads(line) for line in lines if line.startswith("[[")]
    assert [whole for _, _, whole in notes] == [True, False]  # the second one inside the first
    predicted = {"seconds", "peak_memory_bytes"}
    assert {k: v for k, v in again["estimate"].items() if k not in predicted} == {
        k: v for k, v in told[0]["estimate"].items() if k not in predicted
    }


def test_stand_ins_are_named_derived_from_and_decorate():
    finder = Outlined(["nowhere"])
    sys.meta_path.insert(0, finder)
    try:
        from nowhere.at import Shape, guard  # type: ignore[import-not-found]
        from nowhere.at.all import Other  # type: ignore[import-not-found]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "nowhere"]:
            del sys.modules[name]

    class Derived(Shape):  # type: ignore[misc]
        pass

    assert Shape is not Other
    assert isinstance(Derived(3), Shape)
    assert not isinstance(finder, Shape)
    assert guard(run) is run
    assert guard(None, recursive=False)(run) is run
    assert not finder.missed
    with pytest.raises(Missed, match=r"nowhere\.at\.guard"):
        guard(3)
    assert finder.missed


def test_only_dry_runs_do_without(monkeypatch):
    for dry, loaded, whole in ((False, False, False), (True, True, False), (True, False, True)):
        with monkeypatch.context() as patch:
            if not loaded:
                patch.delitem(sys.modules, "torch", raising=False)
            else:
                patch.setitem(sys.modules, "torch", sys)
            if whole:
                patch.setenv(WHOLE, "1")
            with outlined(dry):
                assert not any(isinstance(finder, Outlined) for finder in sys.meta_path)


@pytest.mark.parametrize("name", PLAIN)
def test_sizes_of_plain_numbers_are_as_torch_has_them(name):
    from torch.fx.experimental import symbolic_shapes

    theirs = getattr(symbolic_shapes, name)
    given: list[tuple[Any, ...]] = [(True,), (False,)]
    if name in ("sym_and", "sym_or"):
        given += [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]
    if name == "is_nested_int":
        given = [(0,), (5,)]
    if name == "sym_eq":
        given = [(3, 3), (3, 4), ((1, 2), [1, 2]), ((1, 2), (1, 3)), ([1], (1, 1)), ((), ())]
    for values in given:
        assert PLAIN[name](*values) == theirs(*values), values


def test_names_are_read_again_where_a_library_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "site-packages" / "library"
    (root / "models" / "one").mkdir(parents=True)
    read: list[Any] = [{"one": {frozenset({"torch"}): {"modeling_one": {"One"}}}}, {"two": {}}, {}]
    calls = iter(read)
    assert kept(root, lambda: next(calls)) == read[0]
    assert kept(root, lambda: next(calls)) == read[0]  # remembered
    (root / "models" / "two").mkdir()
    assert kept(root, lambda: next(calls)) == read[1]
    assert kept(root, lambda: next(calls)) == read[1]
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert kept(root, lambda: next(calls)) == read[2]
    monkeypatch.setenv("MOESAIC_CACHE", str(file / "no" / "folder"))
    assert kept(root, lambda: {"three": 3}) == {"three": 3}
    assert kept(root, lambda: {"what": start}) == {"what": start}  # nothing that can be kept


def test_products_are_remembered_as_the_user_says(monkeypatch):
    given, ours = start.REMEMBERED
    monkeypatch.setenv(given, "7")
    monkeypatch.setenv(ours, "")  # so that what is set below goes with the test
    monkeypatch.delenv(ours)
    start.remember_less()
    assert (os.environ[given], os.environ[ours]) == ("7", start.REMEMBERED[ours])
