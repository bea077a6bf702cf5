"""Names of the files in a result's folder.

At its top lies what transformers and engines know by name. What is ours lies in a folder of its
own, for some engines read by pattern: vLLM takes every ``*.safetensors`` for weights of the model.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

FOLDER = "moesaic"
"""The folder in a result that holds what is ours."""
CARD = "README.md"
PLAN, PLAN_TENSORS = ("plan.json", "plan.safetensors")
RECIPE, RECORD, PAGE = "recipe.yaml", "result.json", "report.html"
FILES = "files.json"
"""Names every file that was written to the folder, so that no other is ever deleted."""
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
"""The folder in which transformers keeps chat templates beside the default one."""
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
"""Names of files that one engine or another takes for weights of the model beside them."""


def misread(folder: Path) -> list[str]:
    """Files at the top of a folder that an engine would take for weights of its model."""
    names = {file.name for pattern in READ for file in folder.glob(pattern)}
    return sorted(name for name in names if not fnmatch(name, "model*.safetensors"))


def our_folder(folder: Path) -> Path:
    """The folder in a result that holds what is ours; it is made if there is none."""
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    return place


def placed(folder: Path, name: str) -> Path:
    """Return the path of a file of ours in a result's folder, whether it is there or not.

    A folder that a plan alone was saved to has it at the top.
    """
    ours = folder / FOLDER / name
    return folder / name if (folder / name).is_file() and not ours.is_file() else ours
