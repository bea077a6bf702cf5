"""What this package stands on in other libraries, name by name.

Raise a bound in pyproject.toml, and these tests say what is gone and who needs it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_moe
from packaging.requirements import Requirement
from rich.segment import Segment

ROOT = Path(__file__).parents[1]
YOUNG = (
    "transformers",
    "huggingface_hub",
    "accelerate",
    "safetensors",
    "gguf",
    "pydantic",
)
"""Libraries of which a next release may do without what an earlier one had."""


@cache
def trees() -> dict[Path, ast.Module]:
    """The sources, by their paths in the package."""
    source = ROOT / "src/moesaic"
    return {f.relative_to(source): ast.parse(f.read_text()) for f in sorted(source.rglob("*.py"))}


def walked(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but what is for a type checker alone."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from walked(child)


def imported() -> dict[str, dict[str, list[str]]]:
    """By module of another library the names that we take from it, and the files that do."""
    found: dict[str, dict[str, list[str]]] = {}
    for file, tree in trees().items():
        for node in walked(tree):
            library = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and library.partition(".")[0] in YOUNG:
                for name in node.names:
                    found.setdefault(library, {}).setdefault(name.name, []).append(str(file))
    return found


@pytest.mark.filterwarnings("ignore")
def test_what_is_imported_is_there() -> None:
    gone = {}
    for module, names in imported().items():
        for name, files in names.items():
            try:
                exec(f"from {module} import {name}", {})
            except ImportError:
                gone[f"{name} of {module} {version(module.partition('.')[0])}"] = files
    assert not gone


def private() -> dict[str, Any]:
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


def test_private_attributes_are_there() -> None:
    known = private()
    gone = {name: type(owner).__name__ for name, owner in known.items() if not hasattr(owner, name)}
    assert not gone, f"torch {version('torch')}, transformers {version('transformers')}: {gone}"


def test_no_private_attribute_is_used_that_is_not_listed_here() -> None:
    used: dict[str, set[str]] = {}
    ours: set[str] = set()
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


def test_young_libraries_have_an_upper_bound_that_was_tried() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = project.partition("dependencies = [")[2].partition("[project.scripts]")[0]
    wanted = {r.name: r for r in map(Requirement, re.findall(r'"(.+?)"', listed)) if r.specifier}
    for name in YOUNG:
        requirement = wanted[name.replace("_", "-")]
        assert any(part.operator == "<" for part in requirement.specifier), name
        assert requirement.specifier.contains(version(name)), name
