"""Names of the files in a result's folder.

Files that transformers and engines read by name are at its top. Our own are in a subfolder, as
some engines read by pattern: vLLM takes every ``*.safetensors`` for weights of the model.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

FOLDER = "moesaic"
"""Subfolder of a result that holds our own files."""
CARD = "README.md"
PLAN, PLAN_TENSORS = ("plan.json", "plan.safetensors")
RECIPE, RECORD, PAGE = "recipe.yaml", "result.json", "report.html"
FILES = "files.json"
"""List of every file that was written to the folder, so that no other is ever deleted."""
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "*.tiktoken",
    "*.model",
)
"""Files from which a tokenizer is read."""
TEMPLATES = "additional_chat_templates"
"""Folder in which transformers keeps chat templates beside the default one."""
SIDE_FILES = (
    *TOKENIZER_FILES,
    "chat_template*",
    f"{TEMPLATES}/*.jinja",
    "generation_config.json",
    "*processor_config.json",
    "LICENSE*",
)
"""Files that a rewritten checkpoint takes over from its source as they are."""

READ = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "consolidated*")
"""Name patterns of files that some engine takes for weights of the model beside them."""


def misread(folder: Path) -> list[str]:
    """Return the files at the top of a folder that an engine would wrongly take for weights."""
    names = {file.name for pattern in READ for file in folder.glob(pattern)}
    return sorted(name for name in names if not fnmatch(name, "model*.safetensors"))


def our_folder(folder: Path) -> Path:
    """Return the subfolder of a result that holds our own files, after making it if need be."""
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    return place


def placed(folder: Path, name: str) -> Path:
    """Return the path of a file of ours in a result's folder, whether it is there or not.

    A folder that a plan alone was saved to has it at the top.
    """
    ours = folder / FOLDER / name
    return folder / name if (folder / name).is_file() and not ours.is_file() else ours
