"""Files from strangers, checked before they are trusted.

Sizes of JSON files and of safetensors headers are limited and types are checked before anything is
computed from them, or a library reads them; no tensor is read here. No code in a model's folder is
run, and no link out of it is followed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from moesaic.errors import FULL, MoesaicError, quote
from moesaic.io.names import FOLDER, READ, SIDE_FILES, TEMPLATES, misread
from moesaic.types import JSON, Values, suits

LARGEST = 100_000_000
"""Largest number of bytes of a header or of a JSON file, as in safetensors itself."""
DEEPEST = 64
"""Deepest nesting of lists and mappings."""
DIGITS = 300
"""Largest number of digits of a whole number, so that it can be converted to a float."""
ODD = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, OSError,
    AssertionError, SafetensorError, struct.error,
)  # fmt: skip
"""Exceptions that readers raise over a damaged file, RecursionError included."""
LAYERS, EXPERTS = 1000, 20_000
"""Largest numbers of decoder layers and of experts; the largest known are 126 and 16,384 (Doge's).
More are a mistake, and would take minutes to be found out."""
_COUNTS = (
    (re.compile(r"(layers?|num_blocks|block_count|depth)$"), LAYERS),
    (re.compile(r"experts|expert_(used_)?count$"), EXPERTS),
)

_USED = re.compile(
    r"(num_)?experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts"
)
_ROUTED = re.compile(r"(moe_)?num_(local_|routed_)?experts|n_routed_experts")
"""Names, in configs, of the experts that a token runs and of those that it may choose from."""

TRUNCATED = "is missing, truncated or corrupt"


@contextmanager
def reading(
    what: object,
    remedy: str = "",
    failure: str = "cannot be read",
    errors: tuple[type[Exception], ...] = ODD,
) -> Iterator[None]:
    """Context in which the exceptions of readers of a damaged file become :class:`MoesaicError`.

    Args:
        what: the file or field that is read, for the message.
        remedy: a sentence that ends the message.
        failure: sentence on what is wrong with the file, before the reason.
        errors: that its readers may raise.

    Raises:
        MoesaicError: gives the reason why the file cannot be read.

    >>> with reading("plan.json"):
    ...     {}["layers"]
    Traceback (most recent call last):
    moesaic.errors.MoesaicError: plan.json cannot be read: it has no 'layers'.
    """
    try:
        yield
    except MoesaicError:
        raise
    except errors as error:
        if isinstance(error, OSError) and error.errno in FULL:  # of what is written meanwhile
            raise
        reason = " ".join(f"{error}".split())[:300].strip(" .") or type(error).__name__
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        if isinstance(error, KeyError) and " " not in reason:  # some libraries' are sentences
            reason = f"it has no {reason}"
        end = f" {remedy}" if remedy else ""
        raise MoesaicError(f"{what} {failure}: {reason}.{end}") from error


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON from a file.

    Args:
        text: the file's content.
        where: the file, for messages.

    Raises:
        MoesaicError: it is not JSON, is no text, is larger than :data:`LARGEST`, is nested beyond
            :data:`DEEPEST`, or holds a whole number of more than :data:`DIGITS`.

    >>> parse_json("[" * 100_000, "a.json")
    Traceback (most recent call last):
    moesaic.errors.MoesaicError: a.json cannot be read: it is nested too deeply.
    """
    with reading(where):
        return _json(text)


def _json(text: str | bytes, **options: Any) -> Any:
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    content = json.loads(text, parse_int=_whole, **options)
    level, depth = [content], 0
    while level := [p for value in level for p in _parts(value) if isinstance(p, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise RecursionError
    return content


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _parts(value: object) -> Iterable[object]:
    """Return the values directly in a list or a mapping; nothing for anything else."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def mapping_of(path: Path) -> JSON:
    """Return the JSON object that a file holds; refuse a file that holds none."""
    with reading(path), path.open("rb") as file:
        text = file.read(LARGEST + 1)
    content = parse_json(text, str(path))
    if not isinstance(content, dict):
        raise MoesaicError(f"{path} cannot be read: it holds no JSON object.")
    return content


def check_fields(plain: Values, hints: Mapping[str, object]) -> None:
    """Refuse values whose type is not their hint's; missing ones pass.

    Args:
        plain: values by name.
        hints: types by name.

    Raises:
        TypeError: names the first.

    >>> check_fields({"layers": "x"}, {"layers": list[int]})
    Traceback (most recent call last):
    TypeError: layers is 'x'
    """
    for name, hint in hints.items():
        if name in plain and not suits(plain[name], hint):
            raise TypeError(f"{name} is {quote(plain[name])}")


def check_counts(plain: object) -> None:
    """Refuse numbers of layers and of experts that no model has, at any depth of a config, and more
    or fewer experts for a token than there are.

    Args:
        plain: a config as plain JSON, or a part of one.

    Raises:
        ValueError: names the first.

    >>> check_counts({"text_config": {"num_hidden_layers": 10**9}})
    Traceback (most recent call last):
    ValueError: num_hidden_layers is 1,000,000,000, of 1,000 at most
    """
    for key, value in plain.items() if isinstance(plain, dict) else ():
        for names, most in _COUNTS:
            if type(value) in (int, float) and value > most and names.search(str(key)):
                raise ValueError(f"{key} is {value:,}, of {most:,} at most")
    counts = {k: v for k, v in plain.items() if type(v) is int} if isinstance(plain, dict) else {}
    routed = max((n for key, n in counts.items() if _ROUTED.fullmatch(str(key))), default=0)
    for key, count in counts.items():
        if routed > 1 and _USED.fullmatch(str(key)) and not 1 <= count <= routed:
            raise ValueError(f"{key} is {count}, from 1 to {routed} works")
    for part in _parts(plain):
        check_counts(part)


def _once(pairs: list[tuple[str, object]]) -> JSON:
    """Return key-value pairs as a JSON object; ValueError if a key occurs twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{quote(name)} is there twice")
    return mapping


CODE = "it holds pickled weights, which can run code when opened; convert them to safetensors"
OTHERS = {
    b"PK": CODE,
    b"\x80": CODE,
    b"GGUF": "it is a GGUF file; give it by its own name",
    b"<": "it is a web page, not the file",
}
"""Files that are taken for safetensors, by how they begin."""


def header_of(path: Path) -> tuple[JSON, int]:
    """Read the header of a safetensors file.

    Returns:
        for every tensor's name its ``dtype``, ``shape`` and ``data_offsets``, counted from the
        second value: the byte at which data begin.

    Raises:
        MoesaicError: the file is missing or truncated, names a tensor twice, or has an entry that
            is not valid.
    """
    with reading(path, failure=TRUNCATED):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            room = path.stat().st_size - 8 - size
            if not 0 < size <= LARGEST or room < 0:
                file.seek(0)
                begun = file.read(8)
                other = (what for sign, what in OTHERS.items() if begun.startswith(sign))
                raise ValueError(next(other, f"it gives its header {size:,} bytes"))
            header = _json(file.read(size), object_pairs_hook=_once)
        check_fields({"the header": header}, {"the header": dict})
        notes = header.pop("__metadata__", None) or {}
        check_fields({"metadata": notes}, {"metadata": dict})
        check_fields(notes, dict.fromkeys(notes, str))
        for name, entry in header.items():
            if not _is_valid(entry, room):
                raise ValueError(f"{quote(name)} has the entry {quote(entry, 200)}")
    return header, 8 + size


def _is_valid(entry: object, room: int) -> bool:
    """Return True if a tensor's entry in a header is valid; ``room``: bytes of all data."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(kind) is not str or not (_are_counts(shape) and _are_counts(offsets)):
        return False
    return len(offsets) == 2 and offsets[0] <= offsets[1] <= room


def _are_counts(value: object) -> bool:
    """Return True if a value is a list of whole numbers, none of them below 0."""
    return type(value) is list and all(type(n) is int and n >= 0 for n in value)


NEVER_READ = (*READ, "LICENSE*", "NOTICE*", "README*", "*.md", ".*")
"""Name patterns at the top of a model's folder that are not checked here: weights are checked when
they are opened, and nothing opens the others."""
REPOSITORY = re.compile(r"(model|dataset|space|kernel)s--.+")
HASH = re.compile(r"[0-9a-f]{64}")
POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the pointer that git-lfs has in place of a large file until that is fetched."""

NEEDS_CODE = "it needs Python code that comes with it, which Moesaic never runs."


def pretrained(auto: Any, folder: Path, **options: Any) -> Any:
    """Load a folder by one of transformers' auto classes; refuse one that needs its own code."""
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


GROWTH = 16
"""Most characters that a tokenizer's normalizer may make of one."""


def check_growth(tokenizer: Any) -> None:
    """Refuse a tokenizer that makes a text many times as long; ValueError says how many times."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    times = 1.0 if normalizer is None else _growth(json.loads(normalizer.__getstate__()))
    if times > GROWTH:
        raise ValueError(f"its normalizer makes text up to {times:.4g} times as long")


def _growth(rule: Any) -> float:
    """Return the most characters that a normalizer makes of one.

    >>> grow = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
    >>> _growth({"type": "Sequence", "normalizers": [grow, {"type": "NFC"}, grow]})
    4.0
    """
    pattern = rule.get("pattern") or {}
    own = len(rule.get("content") or "") / max(1, len(pattern.get("String") or ""))
    return prod(map(_growth, rule.get("normalizers") or ()), start=max(1.0, own))


def brings_code(folder: Path) -> bool:
    """Return True if a folder's tokenizer names Python code of its own."""
    file = folder / "tokenizer_config.json"
    return file.is_file() and "auto_map" in mapping_of(file)


def check_config(config: Values, folder: Path) -> None:
    """Refuse a config.json that names compiled code on the hub."""
    for key, value in config.items():
        if isinstance(value, dict):
            check_config(value, folder / key)
        if key.endswith("_implementation") and "/" in str(value):
            raise MoesaicError(f"{folder}: {key} names code of the hub, which Moesaic never runs.")


def check_adapter(names: set[str], where: object) -> None:
    """Refuse the files of an adapter, which changes the weights of another model."""
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
    except (OSError, RuntimeError, ValueError):  # a link to itself, or a name that cannot be one
        return True
    if target.is_relative_to(folder):
        return False
    for snapshot in (folder, *folder.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and REPOSITORY.fullmatch(repository.name):
            store, name = repository.parent / "blobs", target.name
            shared = target.parent == store / name[:2] and HASH.fullmatch(name) is not None
            return not (shared or target.parent == repository / "blobs")
    return True


def check_plain_file(file: Path, folder: Path) -> None:
    """Refuse a file of a model's folder that is a link out of it, a pipe or a device."""
    if _leads_out(file, folder):
        raise MoesaicError(
            f"{file} is a link out of its folder, which is not followed. Put the file there."
        )
    if os.path.lexists(file) and not (file.is_file() or file.is_dir()):
        kind = "a link to nothing" if file.is_symlink() else "no ordinary file"
        raise MoesaicError(f"{file} is {kind}. Put the file there, or remove it.")


def check_fetched(file: Path) -> None:
    """Refuse a file that git-lfs has not fetched."""
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
    """
    for name in (FOLDER, TEMPLATES):
        check_plain_file(folder / name, folder)
    try:
        parts = [p for name in ("", FOLDER, TEMPLATES) if (p := folder / name).is_dir()]
        files = [file for part in parts for file in sorted(part.iterdir())]
    except OSError as error:
        raise MoesaicError(f"{folder} cannot be read: {error.strerror}.") from error
    for file in files:
        top = file.parent == folder
        if top and (file.is_dir() or any(fnmatch(file.name, name) for name in NEVER_READ)):
            continue
        check_plain_file(file, folder)
        check_fetched(file)
        # other libraries read these whole
        side = any(fnmatch(str(file.relative_to(folder)), name) for name in SIDE_FILES)
        if side and file.is_file() and (size := file.stat().st_size) > LARGEST:
            raise MoesaicError(
                f"{file} has {size:,} bytes; {LARGEST:,} are the most for such a file."
            )


def copy_side_files(folder: Path, out: Path, pattern: str = "") -> None:
    """Copy tokenizer, generation settings and licence of a checkpoint, and files of a pattern.

    Of the former no weights, no code and no link out of the folder are copied.
    """
    weights, files = misread(folder), {*(folder.glob(pattern) if pattern else ())}
    for file in sorted({file for pattern in SIDE_FILES for file in folder.glob(pattern)}):
        if not file.is_file() or file.name in weights or file.suffix == ".py":
            continue
        if _leads_out(file, folder):
            logging.getLogger(__name__).warning("%s is a link elsewhere and left out.", file)
        else:
            files.add(file)
    for file in files:
        to = out / file.relative_to(folder)
        to.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, to)


def clean_tokenizer(folder: Path, out: Path) -> None:
    """Remove references to code from a tokenizer that was copied from ``folder``, or warn if it
    needs that code."""
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
    settings = {key: value for key, value in mapping_of(file).items() if key != "auto_map"}
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
