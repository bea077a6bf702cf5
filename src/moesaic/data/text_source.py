"""Names of text: one source, a mix of several, and the rows of each. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

from moesaic.config import about
from moesaic.errors import MoesaicError, shown
from moesaic.types import at_home

DOMAINS = ("prose", "reference", "code")
"""Domains of the text that ships with the package; each can be named instead of a file."""
SHIPPED = "shipped"
"""Name of all text that ships; ``shipped:code`` is one domain of it."""

SPLIT = re.compile(r"(?P<name>[\w.-]*)(?:\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\])?")
"""Pattern of a split and its rows: ``train``, ``train[10%:]``, ``[:5000]``."""


@dataclass(frozen=True)
class TextSource:
    """Source of text."""

    name: str = ""
    """File, folder, data set of the hub, one of :data:`DOMAINS` or of
    :data:`moesaic.data.mixes.MIXES`; empty for all text that ships."""
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

    def __str__(self) -> str:
        parts = (self.name, self.config, self.data_dir, self.split)
        return ":".join(parts).rstrip(":")

    @property
    def shipped(self) -> bool:
        """True for text that ships with the package."""
        return self.name in ("", SHIPPED, *DOMAINS)

    @property
    def domain(self) -> str:
        """Domain of text that ships; empty for all of it."""
        return self.config if self.name == SHIPPED else self.name

    @property
    def tokenised(self) -> bool:
        """True for a file of token ids."""
        return self.name.endswith(".safetensors")

    @property
    def split_name(self) -> str:
        """Split without its slice."""
        return self._split["name"] or ""

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
        start, stop = (self._row(self._split[part], count) for part in ("start", "stop"))
        return start or 0, count if stop is None else stop

    @property
    def _split(self) -> re.Match[str]:
        match = SPLIT.fullmatch(self.split)
        assert match is not None
        return match

    def _row(self, text: str | None, count: int | None) -> int | None:
        if text is None:
            return None
        if not text.endswith("%"):
            return int(text) if count is None else min(int(text), count)
        if count is None:
            raise MoesaicError(
                f"{self}: a share in % needs the number of rows, which this source does not tell; "
                "give numbers of rows instead, such as [5000:] or [:5000]."
            )
        return count * min(100, int(text[:-1])) // 100


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
        return _from_json(spec)
    spec = at_home(spec)
    if Path(spec).exists() or ("=" not in spec and "," not in spec):
        return (_parsed(spec),)
    if "=" not in spec:
        mix = ",".join(f"{name.strip()}=1" for name in spec.split(","))
        raise MoesaicError(f"{spec!r} has no weights: a mix is written as {mix}.")
    sources = []
    for pair in spec.split(","):
        name, _, weight = pair.rpartition("=")
        try:
            sources.append(_parsed(name.strip(), float(weight)))
        except ValueError:
            sources.append(TextSource())
    names = [str(source) for source in sources]
    if "" in names or not all(0 < source.weight < math.inf for source in sources):
        raise MoesaicError(
            f"{spec!r} is not a mix such as code=3,prose=1: a source and its "
            "weight, above 0, for each part."
        )
    if len(set(names)) < len(names):
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


def _from_json(spec: str) -> tuple[TextSource, ...]:
    names = [entry.name for entry in fields(TextSource) if not entry.kw_only]
    try:
        listed = json.loads(spec)
    except ValueError as error:
        raise MoesaicError(f"{spec:.60} is not JSON: {error}") from error
    sources = []
    for part in listed if isinstance(listed, list) else [listed]:
        if not isinstance(part, Mapping) or not part.keys() <= set(names) or not part.get("name"):
            raise MoesaicError(
                f"A source of text is a mapping with a name; known: {', '.join(names)}; "
                f"got {shown(part, 80)}."
            )
        weight = part.get("weight", 1.0)
        words = {k: v for k, v in part.items() if k != "weight"}
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise MoesaicError(
                f"The weight of a source of text is above 0; got {shown(weight, 40)}."
            )
        if not all(isinstance(v, str) for v in words.values()):
            raise MoesaicError(f"The fields of a source of text are words; got {shown(part, 80)}.")
        sources.append(TextSource(**words, weight=float(weight)))
    if not sources:
        raise MoesaicError("A list of sources of text names none.")
    return tuple(sources)


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
