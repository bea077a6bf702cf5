"""Folders from strangers: no code in them is run, and no link is followed out of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic.errors import MoesaicError
from moesaic.foreign import Values
from moesaic.io.headers import mapping_of
from moesaic.io.layout import SIDE_FILES, misread

READ = ("config.json", "model*.safetensors", "*.safetensors.index.json", *SIDE_FILES)
"""Files of a model's folder that are read or copied."""

NEEDS_CODE = "it needs Python code that comes with it, which Moesaic never runs."


def pretrained(auto: Any, folder: Path, **options: Any) -> Any:
    """What one of transformers' auto classes makes of a folder, without running code of it.

    Raises:
        MoesaicError: it needs such code.
    """
    try:
        return auto.from_pretrained(folder, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise MoesaicError(f"{folder}: {NEEDS_CODE}") from None


def brings_code(folder: Path) -> bool:
    """Whether a folder's tokenizer names Python code of its own."""
    file = folder / "tokenizer_config.json"
    return file.is_file() and "auto_map" in mapping_of(file)


def check_config(config: Values, folder: Path) -> None:
    """Refuse what a config.json would have transformers fetch: other weights, or compiled code.

    Raises:
        MoesaicError: it names attention of the hub, or an adapter of another model lies beside it.
    """
    if (folder / "adapter_config.json").exists():
        raise MoesaicError(f"{folder} holds an adapter: merge it into its model first.")
    for key, value in config.items():
        if isinstance(value, dict):
            check_config(value, folder / key)
        if key.endswith("_implementation") and "/" in str(value):
            raise MoesaicError(f"{folder}: {key} names code of the hub, which Moesaic never runs.")


def _leads_out(file: Path) -> bool:
    """Whether a file in a model's folder is a link to somewhere else.

    The hub's cache is made of links: there a repository's own blobs are no other place.
    """
    folder, target = file.parent.resolve(), file.resolve()
    blobs = folder.parent.parent / "blobs"
    cached = folder.parent.name == "snapshots" and target.parent == blobs
    return not (cached or target.is_relative_to(folder))


def check_links(folder: Path) -> None:
    """Refuse a model of which a file that is read lies elsewhere.

    Raises:
        MoesaicError: names the link.
    """
    for file in (file for pattern in READ for file in folder.glob(pattern)):
        if not file.name.startswith("LICENSE") and _leads_out(file):
            raise MoesaicError(
                f"{file} is a link out of its folder, which is not followed. Put the file there."
            )


def side_files(folder: Path) -> Iterator[Path]:
    """What a rewritten checkpoint takes over from a folder: no weights, no code, no link out."""
    weights = misread(folder)
    for file in sorted({file for pattern in SIDE_FILES for file in folder.glob(pattern)}):
        if not file.is_file() or file.name in weights or file.suffix == ".py":
            continue
        if _leads_out(file):
            logging.getLogger(__name__).warning("%s is a link elsewhere and left out.", file)
            continue
        yield file
