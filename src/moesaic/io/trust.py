"""Folders from strangers: no code in them is run, and no link out of them is followed."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from moesaic.errors import MoesaicError
from moesaic.io.headers import LARGEST, mapping_of
from moesaic.io.layout import FOLDER, READ, SIDE_FILES, TEMPLATES, misread
from moesaic.types import Values

NEVER_READ = (*READ, "LICENSE*", "NOTICE*", "README*", "*.md", ".*")
"""Name patterns at the top of a model's folder that are not checked here: weights are checked when
they are opened, and nothing opens the others."""
REPOSITORY = re.compile(r"(model|dataset|space|kernel)s--.+")
HASH = re.compile(r"[0-9a-f]{64}")
POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the pointer that git-lfs has in place of a large file until that is fetched."""

NEEDS_CODE = "it needs Python code that comes with it, which Moesaic never runs."


def pretrained(auto: Any, folder: Path, **options: Any) -> Any:
    """Load a folder by one of transformers' auto classes, without running code from the folder.

    Raises:
        MoesaicError: the folder needs such code.
    """
    try:
        made = auto.from_pretrained(folder, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise MoesaicError(f"{folder}: {NEEDS_CODE}") from None
    # for other values transformers may fetch compiled code from the hub, if it has ``kernels``
    for name in ("_attn_implementation", "_experts_implementation"):
        if hasattr(made, "_attn_implementation") and getattr(made, name, None) != "eager":
            setattr(made, name, None)
    return made


def brings_code(folder: Path) -> bool:
    """Return True if a folder's tokenizer names Python code of its own."""
    file = folder / "tokenizer_config.json"
    return file.is_file() and "auto_map" in mapping_of(file)


def check_config(config: Values, folder: Path) -> None:
    """Refuse a config.json that names compiled code on the hub.

    Raises:
        MoesaicError: names the key.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            check_config(value, folder / key)
        if key.endswith("_implementation") and "/" in str(value):
            raise MoesaicError(f"{folder}: {key} names code of the hub, which Moesaic never runs.")


def check_adapter(names: set[str], where: object) -> None:
    """Refuse an adapter, which changes the weights of another model.

    Args:
        names: of the files in the folder.
        where: the folder or repository, for messages.

    Raises:
        MoesaicError: the files are an adapter's.
    """
    if "adapter_config.json" in names:
        raise MoesaicError(
            f"{where} holds an adapter (LoRA): merge it into its model first "
            "(merge_and_unload of peft, then save_pretrained)."
        )


def _leads_out(file: Path, folder: Path) -> bool:
    """Return True if a file of a model's folder is a link out of the folder.

    The hub's cache is made of links: links to the blobs of the folder's own repository, and to the
    store that all repositories of a cache share, are allowed.
    """
    try:
        folder, target = folder.resolve(), file.resolve()
    except (OSError, RuntimeError):  # a link to itself
        return True
    return not (target.is_relative_to(folder) or _is_blob_of(target, folder))


def _is_blob_of(target: Path, folder: Path) -> bool:
    """Return True if a path is a blob where the hub's library keeps a snapshot's files."""
    for snapshot in (folder, *folder.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and REPOSITORY.fullmatch(repository.name):
            store, name = repository.parent / "blobs", target.name
            shared = target.parent == store / name[:2] and HASH.fullmatch(name) is not None
            return shared or target.parent == repository / "blobs"
    return False


def check_file(file: Path, folder: Path) -> None:
    """Refuse a file of a model's folder that is a link out of it, a pipe or a device.

    Raises:
        MoesaicError: it is a link out of the folder or to nothing, a pipe or a device.
    """
    if _leads_out(file, folder):
        raise MoesaicError(
            f"{file} is a link out of its folder, which is not followed. Put the file there."
        )
    if os.path.lexists(file) and not (file.is_file() or file.is_dir()):
        kind = "a link to nothing" if file.is_symlink() else "no ordinary file"
        raise MoesaicError(f"{file} is {kind}. Put the file there, or remove it.")


def check_fetched(file: Path) -> None:
    """Refuse a file that git-lfs has not fetched.

    Raises:
        MoesaicError: it is a pointer to the file.
    """
    if file.is_file() and file.stat().st_size < 1024:
        with file.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                raise MoesaicError(
                    f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in its "
                    "repository."
                )


def check_links(folder: Path) -> None:
    """Refuse a model or a result if a file that may be opened is not in its folder.

    Weights are checked where they are opened (:class:`moesaic.io.checkpoint.Checkpoint`).

    Raises:
        MoesaicError: names a file that is a link out of it, no plain file, or was not fetched.
    """
    for name in (FOLDER, TEMPLATES):
        check_file(folder / name, folder)
    try:
        parts = [p for name in ("", FOLDER, TEMPLATES) if (p := folder / name).is_dir()]
        files = [file for part in parts for file in sorted(part.iterdir())]
    except OSError as error:
        raise MoesaicError(f"{folder} cannot be read: {error.strerror}.") from error
    for file in files:
        top = file.parent == folder
        if top and (file.is_dir() or any(fnmatch(file.name, name) for name in NEVER_READ)):
            continue
        check_file(file, folder)
        check_fetched(file)
        # other libraries read these whole
        side = any(fnmatch(str(file.relative_to(folder)), name) for name in SIDE_FILES)
        if side and file.is_file() and (size := file.stat().st_size) > LARGEST:
            raise MoesaicError(
                f"{file} has {size:,} bytes; {LARGEST:,} are the most for such a file."
            )


def _side_files(folder: Path) -> Iterator[Path]:
    """Yield the files that a rewritten checkpoint takes over: no weights, no code, no link out."""
    weights = misread(folder)
    for file in sorted({file for pattern in SIDE_FILES for file in folder.glob(pattern)}):
        if not file.is_file() or file.name in weights or file.suffix == ".py":
            continue
        if _leads_out(file, folder):
            logging.getLogger(__name__).warning("%s is a link elsewhere and left out.", file)
            continue
        yield file


def copy_side_files(folder: Path, out: Path, pattern: str = "") -> None:
    """Copy tokenizer, generation settings and licence of a checkpoint, and files of a pattern."""
    for file in {*_side_files(folder), *(folder.glob(pattern) if pattern else ())}:
        to = out / file.relative_to(folder)
        to.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, to)


def settle_tokenizer(folder: Path, out: Path) -> None:
    """Remove references to code from a copied tokenizer, or warn if it needs that code.

    Args:
        folder: of the source.
        out: where its side files were copied to.
    """
    if not brings_code(folder):
        return
    from transformers import AutoTokenizer

    try:
        pretrained(AutoTokenizer, folder)
    except Exception:  # tokenizers raises anything over a file that is odd
        logging.getLogger(__name__).warning(
            "The tokenizer cannot be loaded from the result: it needs Python code that comes with "
            "the source, which is neither run nor copied. Load the source's tokenizer."
        )
        return
    file = out / "tokenizer_config.json"
    said = {key: value for key, value in mapping_of(file).items() if key != "auto_map"}
    file.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", "utf-8")
