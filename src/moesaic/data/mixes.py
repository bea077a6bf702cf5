"""Named mixes of data sets, by what their text is for.

A name is an entry of a table; its sources are read like any others. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from moesaic.data.reader import Use, check_rows, check_there, open_rows
from moesaic.data.text_source import DOMAINS, TextSource, text_sources
from moesaic.errors import MoesaicError

PATIENCE = 5.0
"""Seconds that the hub has to answer."""


@dataclass(frozen=True)
class Mix:
    """Sources that are read together, with equal weights."""

    about: str
    """Description of the text in a few words."""
    sources: Mapping[str, str]
    """Licences by source, as the data set's card states them."""
    instead: str
    """Most similar text that ships, suggested if the hub cannot be reached."""


TALK = "HuggingFaceTB/smoltalk"
MIXES: dict[str, Mix] = {
    "code": Mix(
        "tasks in words, and programs that solve them",
        {
            "theblackcat102/evol-codealpaca-v1": "Apache-2.0",
            f"{TALK}:self-oss-instruct": "ODC-BY",
        },
        "shipped:code",
    ),
    "chat": Mix(
        "conversations of several turns",
        {f"{TALK}:smol-magpie-ultra": "Apache-2.0", f"{TALK}:everyday-conversations": "Apache-2.0"},
        "shipped:prose=1,shipped:reference=1",
    ),
    "tools": Mix(
        "conversations in which functions are called",
        {f"{TALK}:apigen-80k": "CC-BY-4.0, Apache-2.0"},
        "shipped:code=1,shipped:reference=1",
    ),
    "math": Mix(
        "problems, and solutions step by step",
        {"openai/gsm8k:main": "MIT", f"{TALK}:metamathqa-50k": "MIT"},
        "shipped:reference",
    ),
    "multilingual": Mix(
        "encyclopaedia articles in eight languages",
        {
            f"wikimedia/wikipedia:20231101.{language}": "CC-BY-SA-3.0, GFDL"
            for language in ("ar", "de", "es", "fr", "hi", "ja", "ru", "zh")
        },
        "prose=1,reference=1",
    ),
}
"""Mixes by name. Licences are those on the data sets' cards; smoltalk's refers to the cards of the
sets that its parts were taken from."""


def sources_of(spec: str, use: Use) -> tuple[TextSource, ...]:
    """Return the sources that a text's name stands for, with named mixes replaced by theirs.

    For evaluation, a name that is also a domain of the text that ships is that domain, so that
    figures are the same everywhere.

    Args:
        spec: as for :func:`moesaic.data.text_source.text_sources`.
        use: calibration (or training), or evaluation.

    Raises:
        MoesaicError: the name is wrong, or a mix's data sets cannot be read: they are not replaced
            by other text, so that results do not depend on the network.
    """
    weights: dict[TextSource, float] = {}
    for part in (p for source in text_sources(spec) for p in _parts(source, use)):
        key = replace(part, weight=1.0)
        weights[key] = weights.get(key, 0.0) + part.weight
    return tuple(replace(source, weight=weight) for source, weight in weights.items())


def check_apart(used: Iterable[str], measured: str) -> None:
    """Refuse missing text, and evaluation on rows that are used for calibration or training.

    Args:
        used: names of those texts, as for :func:`moesaic.data.text_source.text_sources`.
        measured: the text to measure on.

    Raises:
        MoesaicError: some row is in both, or a source cannot be read.
    """
    used = list(used)
    for source in (source for spec in (measured, *used) for source in text_sources(spec)):
        check_there(source)
    ours = [source for spec in used for source in sources_of(spec, "calibration")]
    check_rows(ours, sources_of(measured, "evaluation"))


def _parts(source: TextSource, use: Use) -> Iterator[TextSource]:
    mix = MIXES.get(source.name)
    measured = use == "evaluation" and source.name in DOMAINS
    if mix is None or measured or Path(source.name).exists():
        yield source
        return
    if source != TextSource(source.name, weight=source.weight):
        raise MoesaicError(f"{source}: a named mix has no config, data_dir or split.")
    if reason := _lacking(source.name, use):
        raise MoesaicError(
            f"{source.name}: its data sets cannot be read. {reason} Text that ships can be named "
            f"instead: {mix.instead}."
        )
    for name in mix.sources:
        weight = source.weight / len(mix.sources)
        yield replace(_one(name), weight=weight, mix=source.name)


def _one(spec: str) -> TextSource:
    (source,) = text_sources(spec)
    return source


@cache
def _lacking(name: str, use: Use) -> str:
    """Return why a mix's sources cannot be read; empty if they can."""
    sources = [*map(_one, MIXES[name].sources)]
    reason = "" if all(Path(s.name).exists() for s in sources) else _unreachable()
    try:
        for source in () if reason else sources:
            open_rows(source, use)
    except MoesaicError as error:
        reason = str(error)
    return reason


@cache
def _unreachable() -> str:
    """Return why the hub cannot be reached; empty if it can."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set."
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as error:
        return f"{constants.ENDPOINT} does not answer ({type(error).__name__})."
    return ""
