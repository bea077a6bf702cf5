"""Other libraries and processes: what is imported and when, what they have, what users install."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from builders import OLD, launch, tiny_moe
from packaging.requirements import Requirement
from rich.segment import Segment

from moesaic.cli import entry
from moesaic.cli.entry import exit_on_error
from moesaic.distributed import join_processes, wait_for_all
from moesaic.errors import MoesaicError

ROOT = Path(__file__).parents[1]
YOUNG = "transformers", "huggingface_hub", "accelerate", "safetensors", "gguf", "pydantic"
"""Libraries of which a next release may do without what an earlier one had."""


@cache
def trees():
    """The sources, by their paths in the package."""
    source = ROOT / "src/moesaic"
    return {f.relative_to(source): ast.parse(f.read_text()) for f in sorted(source.rglob("*.py"))}


def walked(node):
    """All nodes but what is for a type checker alone."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from walked(child)


def imported():
    """By module of another library the names that we take from it, and the files that do."""
    found = {}
    for file, tree in trees().items():
        for node in walked(tree):
            library = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and library.partition(".")[0] in YOUNG:
                for name in node.names:
                    found.setdefault(library, {}).setdefault(name.name, []).append(str(file))
    return found


@pytest.mark.filterwarnings("ignore")
def test_what_is_imported_is_there():
    gone = {}
    for module, names in imported().items():
        for name, files in names.items():
            try:
                exec(f"from {module} import {name}", {})
            except ImportError:
                gone[f"{name} of {module} {version(module.partition('.')[0])}"] = files
    assert not gone


def private():
    """By attribute that is no library's public interface, or young, an object that has it."""
    model, linear = tiny_moe("mixtral"), torch.nn.Linear(1, 1)
    kept = ("parameters", "buffers", "modules", "apply")
    hooks = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    form = ("is_transposed", "is_concatenated", "has_bias", "has_gate", "_apply_gate")
    of_model = ("_keep_in_fp32_modules_strict", "_no_split_modules", "all_tied_weights_keys")
    settable = ("_can_set_attn_implementation", "_can_set_experts_implementation")
    return {
        "_C": torch,
        "_make_wrapper_subclass": torch.Tensor,
        "_version": torch.ones(1),
        "_get_default_store": torch.distributed.distributed_c10d,
        "_exit": os,
        "_replace": Segment("of a named tuple"),
        "_attn_implementation": model.config,
        "_name_or_path": model.config,
        **dict.fromkeys((f"_{name}" for name in (*kept, *hooks)), linear),
        **dict.fromkeys(form, model.model.layers[0].mlp.experts),
        **dict.fromkeys((*of_model, *settable), model),
    }


LLAMA_CPP = ("_set_vocab_gpt2",)
"""Of llama.cpp, which is built apart (`make test-llamacpp`)."""


def test_private_attributes_are_there():
    known = private()
    gone = {name: type(owner).__name__ for name, owner in known.items() if not hasattr(owner, name)}
    assert not gone, f"torch {version('torch')}, transformers {version('transformers')}: {gone}"


def test_no_private_attribute_is_used_that_is_not_listed_here():
    used = {}
    ours = set()
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                if isinstance(node.ctx, ast.Store):
                    ours.add(node.attr)
                else:
                    used.setdefault(node.attr, set()).add(str(file))
    listed = {*private(), *LLAMA_CPP}
    assert not {name: files for name, files in used.items() if name not in ours | listed}


def test_young_libraries_have_an_upper_bound_that_was_tried():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = project.partition("dependencies = [")[2].partition("[project.scripts]")[0]
    wanted = {r.name: r for r in map(Requirement, re.findall(r'"(.+?)"', listed)) if r.specifier}
    for name in YOUNG:
        requirement = wanted[name.replace("_", "-")]
        assert any(part.operator == "<" for part in requirement.specifier), name
        assert requirement.specifier.contains(version(name)), name


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


def run(code, folder):
    code = code.replace("FOLDER", repr(str(folder)))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_no_more_is_imported_than_is_used(carved_folder):
    """Configs need no torch, loading a model no trainer; transformers then loads a result."""
    used = USED.replace('"sklearn", ', "") if OLD else USED  # which transformers 5.17 imports
    done = run(used + LOADED, carved_folder)
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


def test_variables_that_the_user_set_are_kept(monkeypatch):
    ours, *given = entry.ENVIRONMENT
    for name in given:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv(ours, "")  # so that what is set below goes with the test
    monkeypatch.delenv(ours)
    entry.set_environment()
    assert {name: os.environ[name] for name in given} == dict.fromkeys(given, "7")
    assert os.environ[ours] == entry.ENVIRONMENT[ours]


def test_a_signal_to_end_interrupts_as_ctrl_c_does(monkeypatch, capsys):
    """What timeout, systemd, docker and Slurm send: nothing of the size of a model is left."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(entry, "app", lambda **_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as ended:
            entry.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 130
    assert "Interrupted." in capsys.readouterr().err


@pytest.fixture(scope="module")
def try_install():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield import_module("try_install")
    finally:
        sys.path.pop(0)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_runs_in_an_environment_with_one_extra_alone():
    """Whatever else was set up before: what it shows is what a user of ``gguf`` gets."""
    commands = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    made = [line for line in commands if "setup_venv.sh" in line]
    assert made == ["scripts/setup_venv.sh .venv-user gguf"]
    run = re.findall(r"\.venv-user/bin/moesaic (\w+)", "\n".join(commands))
    assert run == ["generate", "eval", "export", "fit", "report"]
    assert "dev" not in " ".join(commands).replace("/dev/null", "")


RECORD = {
    "speed_ratio": {"prefill_spread": [0.9, 1.1], "decode_spread": [0.7, 0.9]},
    "scores": {"original": {"total_bytes": 10}, "result": {"total_bytes": 10}},
}


@pytest.mark.parametrize(
    ("comment", "printed", "problem"),
    [
        ("", "prefill no clear difference", ""),
        ("", "Worse; prefill\nfaster (1.2×)", "prefill is said to be faster"),
        ("dense: decodes faster", "", "said to decode faster; its rounds are 0.70 to 0.90"),
        ("a mixture: narrower experts", "", "said to be smaller"),
        ("", "20 % smaller on disk", "said to be smaller"),
    ],
)
def test_words_that_figures_deny_are_found(comment, printed, problem, try_install, tmp_path):
    (tmp_path / "out/moesaic").mkdir(parents=True)
    (tmp_path / "out/moesaic/result.json").write_text(json.dumps(RECORD))
    line = "moesaic carve smollm2 out --active 0.8"
    found = try_install.broken(line, comment, printed, tmp_path)
    assert [problem in said for said in found] == [True] * bool(problem)


def test_each_line_of_the_documents_is_run_or_left_out_with_a_reason(try_install):
    every = [line for page in try_install.DOCUMENTS for line, _ in try_install.lines(page)]
    assert len(every) > 14
    for line in every:
        program = try_install.cheap(line)[0]
        left_out = any(line.startswith(what.replace("\\", "")) for what in try_install.LEFT_OUT)
        assert program in ("moesaic", "pip", "python") or left_out, line


def ending(how, which):
    """In one of several processes, one of which ends early."""
    with exit_on_error():
        join_processes()
        wait_for_all()
        if os.environ["RANK"] == str(which):
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MoesaicError("keep 9 is out of reach.")
        wait_for_all()


@pytest.mark.parametrize(
    ("end", "which"),
    [
        ("refuses", 1),
        ("is killed", 0),
        pytest.param("refuses", 0, marks=pytest.mark.nightly),
        pytest.param("is killed", 1, marks=pytest.mark.nightly),
    ],
)
def test_the_other_process_says_the_true_reason(end, which):
    codes, said = zip(*launch(ending, end, which, ends=True), strict=True)
    errors, other = [" ".join(text.split()) for text in said], 1 - which
    assert "fault of moesaic" not in errors[other]
    if end == "refuses":
        assert codes == (2, 2), errors
        assert all("keep 9 is out of reach." in error for error in errors)
    else:
        assert codes[other] == 1
        assert "Another of the 2 processes ended" in errors[other]
