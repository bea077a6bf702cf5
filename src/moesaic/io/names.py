"""Names of models and outputs, checked before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moesaic.errors import MoesaicError

SHIPPED = ("tiny-dense", "tiny-moe", "tiny-shared-moe")
"""Models that come with the package."""

PACKAGED = ("smollm2",)
"""Models that a package of the Python index carries."""


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A file to write that gets its name when it is whole, and is gone if that fails.

    Yields:
        the path to write to, beside ``file``.
    """
    partial = file.with_name(f".{file.name}.writing")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


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
            f"No model folder at {name}. Known names: smollm2, {', '.join(SHIPPED)}; "
            "or a folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B."
        )


def check_out(out: Path, overwrite: bool = False) -> None:
    """Refuse an output that exists, before any work is done.

    Raises:
        MoesaicError: it exists and may not be replaced, or is no model folder.
    """
    if out.exists() and not overwrite:
        raise MoesaicError(f"{out} exists. Choose another name, or pass overwrite=True.")
    if out.exists() and not (
        out.is_dir() and ((out / "config.json").exists() or not any(out.iterdir()))
    ):
        raise MoesaicError(f"{out} is not a model folder; it will not be overwritten.")
