"""Names of text: a source with its slice, and mixes of several. Imports no torch, no datasets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from moesaic.config import about
from moesaic.errors import MoesaicError, shown
from moesaic.types import at_home

Use = Literal["calibration", "evaluation"]
"""Use of text; calibration and training are one use."""
DOMAINS = ("prose", "reference", "code")
"""Domains of the text that ships with the package; each can be named instead of a file."""
SHIPPED = "shipped"
"""Name of all text that ships; ``shipped:code`` is one domain of it."""
SPLIT = re.compile(r"(?P<name>[\w.-]*)(?:\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\])?")
"""Pattern of a split and its rows: ``train``, ``train[10%:]``, ``[:5000]``."""


class Mix(NamedTuple):
    """Data sets of the hub that are read together, in equal parts."""

    nearest: str
    """Most similar text that ships, suggested if they cannot be read."""
    sources: tuple[str, ...]


TALK = "HuggingFaceTB/smoltalk"
MIXES = {
    "code": Mix("shipped:code", ("theblackcat102/evol-codealpaca-v1", f"{TALK}:self-oss-instruct")),
    "chat": Mix(
        "shipped:prose=1,shipped:reference=1",
        (f"{TALK}:smol-magpie-ultra", f"{TALK}:everyday-conversations"),
    ),
    "tools": Mix("shipped:code=1,shipped:reference=1", (f"{TALK}:apigen-80k",)),
    "math": Mix("shipped:reference", ("openai/gsm8k:main", f"{TALK}:metamathqa-50k")),
    "multilingual": Mix(
        "prose=1,reference=1",
        tuple(
            f"wikimedia/wikipedia:20231101.{language}"
            for language in ("ar", "de", "es", "fr", "hi", "ja", "ru", "zh")
        ),
    ),
}
"""Mixes by name; docs/text.md says what their text is and how it is licensed."""


@dataclass(frozen=True)
class TextSource:
    """Source of text.

    Raises:
        MoesaicError: the split, the domain or the weight is none.
    """

    name: str = ""
    """File, folder, data set of the hub, one of :data:`DOMAINS` or :data:`MIXES`; empty for all
    text that ships."""
    config: str = ""
    data_dir: str = ""
    split: str = ""
    """Split in the form of :data:`SPLIT`; empty for the use's own split."""
    weight: float = 1.0
    """Share of a mix, relative to the others."""
    mix: str = field(default="", kw_only=True)
    """Named mix that the source is a part of."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", at_home(self.name))
        if not SPLIT.fullmatch(self.split):
            raise MoesaicError(
                f"{self.split!r} is not a split such as train, train[10%:] or [:5000]."
            )
        if self.name == SHIPPED and self.config not in ("", *DOMAINS):
            raise MoesaicError(
                f"{self.config!r} is no domain of the text that ships; known: {', '.join(DOMAINS)}."
            )
        if not 0 < self.weight < float("inf"):
            raise MoesaicError(f"The weight of {self} must be above 0, and finite: {self.weight}.")

    def __str__(self) -> str:
        return ":".join((self.name, self.config, self.data_dir, self.split)).rstrip(":")

    @property
    def shipped(self) -> bool:
        """True for text that ships with the package."""
        return self.name in ("", SHIPPED, *DOMAINS)

    @property
    def tokenised(self) -> bool:
        """True for a file of token ids."""
        return self.name.endswith(".safetensors")

    @property
    def place(self) -> tuple[str, str, str]:
        """Path or name, config and folder, alike for all slices and splits."""
        path = Path(self.name)
        return str(path.resolve()) if path.exists() else self.name, self.config, self.data_dir

    @property
    def split_name(self) -> str:
        """Split without its slice."""
        return self.split.partition("[")[0]

    @property
    def sliced(self) -> bool:
        """True if only some of the split's rows are named."""
        return "[" in self.split

    def rows(self, count: int | None) -> tuple[int, int | None]:
        """Return the first row of the slice, and the row that it ends before; None for the end.

        Args:
            count: rows of the split; None if unknown.

        Raises:
            MoesaicError: the slice is a share, and ``count`` is unknown.
        """
        match = SPLIT.fullmatch(self.split)
        ends: list[int | None] = []
        for text in match.group("start", "stop") if match else (None, None):
            number = int(text.rstrip("%")) if text else None
            if text and text.endswith("%"):
                if count is None:
                    raise MoesaicError(
                        f"{self}: a share in % needs the number of rows, which is not known here; "
                        "give numbers of rows instead, such as [5000:] or [:5000]."
                    )
                number = count * min(100, int(text[:-1])) // 100
            ends.append(number if count is None or number is None else min(number, count))
        return ends[0] or 0, count if ends[1] is None else ends[1]


FIELDS = tuple(entry.name for entry in fields(TextSource) if not entry.kw_only)


def text_sources(spec: str) -> tuple[TextSource, ...]:
    """Return the sources that a text's name stands for, each with its weight.

    Args:
        spec: ``name:config:data_dir:split``, all but the name optional; a mix such as
            ``code=3,prose=1``; or either as JSON, one mapping or a list of them, with the fields
            of :class:`TextSource`, for names with ``:``, ``,`` or ``=`` in them.

    Raises:
        MoesaicError: the name has another form.

    >>> [(s.name, s.split, s.weight) for s in text_sources("code=3,allenai/c4:en::train=1")]
    [('code', '', 3.0), ('allenai/c4', 'train', 1.0)]
    """
    if spec.lstrip().startswith(("{", "[")):
        return tuple(_from_json(spec))
    spec = at_home(spec)
    if Path(spec).exists() or ("=" not in spec and "," not in spec):
        return (_parsed(spec),)
    if "=" not in spec:
        mix = ",".join(f"{name.strip()}=1" for name in spec.split(","))
        raise MoesaicError(f"{spec!r} has no weights: a mix is written as {mix}.")
    pairs = [pair.rpartition("=") for pair in spec.split(",")]
    try:
        sources = [_parsed(name.strip(), float(weight)) for name, _, weight in pairs if name]
    except ValueError:
        sources = []
    if len(sources) < len(pairs) or not all(source.name for source in sources):
        raise MoesaicError(
            f"{spec!r} is not a mix such as code=3,prose=1: a source and its weight for each part."
        )
    if len({*map(str, sources)}) < len(sources):
        raise MoesaicError(f"{spec!r} names a source twice.")
    return tuple(sources)


def spelled(value: object) -> str:
    """Return a text's name as one string, from a recipe's string, mapping or list of mappings.

    Raises:
        MoesaicError: a field is unknown.
    """
    if isinstance(value, str):
        return value
    spec = json.dumps(value)
    text_sources(spec)
    return spec


def _parsed(text: str, weight: float = 1.0) -> TextSource:
    parts = [text] if Path(text).exists() else text.split(":", 3)
    name, config, data_dir, split = [*parts, "", "", ""][:4]
    return TextSource(name, config, data_dir, split, weight)


def _from_json(spec: str) -> Iterator[TextSource]:
    try:
        listed = json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise MoesaicError(f"{spec:.60} is not JSON: {error}") from error
    for part in listed if isinstance(listed, list) and listed else [listed]:
        given = part if isinstance(part, Mapping) else {}
        words = {name: value for name, value in given.items() if name != "weight"}
        weight = given.get("weight", 1.0)
        right = given.keys() <= {*FIELDS} and all(isinstance(v, str) for v in words.values())
        if not (right and words.get("name") and isinstance(weight, int | float)):
            raise MoesaicError(
                f"A source of text is a mapping of words, with a name; known: {', '.join(FIELDS)}; "
                f"weight is a number. Got {shown(part, 80)}."
            )
        yield TextSource(**words, weight=float(weight))


def sources_of(spec: str, use: Use) -> tuple[TextSource, ...]:
    """Return the sources that a text's name stands for, with named mixes replaced by theirs.

    For evaluation, a name that is also a domain of the text that ships is that domain, so that
    figures are the same everywhere.

    Args:
        spec: as for :func:`text_sources`.
        use: calibration (or training), or evaluation.

    Raises:
        MoesaicError: the name is wrong.
    """
    merged: dict[str, TextSource] = {}
    for part in (part for source in text_sources(spec) for part in _parts(source, use)):
        before = merged.get(str(part))
        weight = part.weight + (before.weight if before else 0.0)
        merged[str(part)] = replace(before or part, weight=weight)
    return tuple(merged.values())


def _parts(source: TextSource, use: Use) -> Iterator[TextSource]:
    mix = MIXES.get(source.name)
    measured = use == "evaluation" and source.name in DOMAINS
    if mix is None or measured or Path(source.name).exists():
        yield source
        return
    if str(source) != source.name:
        raise MoesaicError(f"{source}: a named mix has no config, data_dir or split.")
    for spec in mix.sources:
        yield replace(_parsed(spec, source.weight / len(mix.sources)), mix=source.name)


def read_by(config: object) -> list[str]:
    """Return the names of models, files and text in a dataclass of options; not all are local.

    Raises:
        MoesaicError: a name of text has a wrong form.
    """
    names: list[str] = []
    for entry in fields(config) if is_dataclass(config) else ():
        value, info = getattr(config, entry.name), about(entry)
        if info.parse == "text":
            names += [source.name for source in text_sources(value or "")]
        elif {"MODEL", "FILE", "FILE.jsonl"} & {*info.metavar.split("|")}:
            names += str(value or "").split(",")
    return [at_home(name) for name in names if name]
