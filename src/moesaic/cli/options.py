"""Command-line options made from the configs' fields: a field's name is its flag.

A message that names a field, ``allocate=layers``, is thereby right on the command line, too: it
takes ``--allocate=layers`` and ``-o allocate=layers``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
import yaml

from moesaic.config import about, check_device, choices, flag_of, parse_dtype, types_of
from moesaic.errors import MoesaicError
from moesaic.recipe import Recipe, parse_as
from moesaic.types import JSON, expand_home

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TEXT = ("source", "samples", "length", "seed", "documents")
"""Fields of Calibration that name the text."""
PLACE = ("device", "dtype")
"""Fields of Recipe that set device and type."""
OWN, COMMON, RUN, SELDOM = "Options", "Text, measuring and device", "The run", "Seldom used"
"""Groups of options; a brief help shows the first, and names those of the next two."""


class _Place(click.ParamType):  # type: ignore[type-arg]
    """Path; ~ at its beginning, which shells do not expand after =, is the user's home."""

    name = "path"

    def convert(self, value: Any, param: object, ctx: object) -> Path:
        return Path(expand_home(value))


PATH = _Place()


class Number(click.ParamType):  # type: ignore[type-arg]
    """Number of a kind, ``int`` or ``float``."""

    name = "number"

    def __init__(self, kind: type[float], least: float = -math.inf) -> None:
        self.kind, self.least = kind, least

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        with suppress(ValueError):
            if (number := self.kind(value)) >= self.least:
                return number
        whole = "whole " if self.kind is int else ""
        least = "" if self.least == -math.inf else f" of at least {self.least:g}"
        raise MoesaicError(f"{param.opts[0]} {value!r} is not a {whole}number{least}.")


class Argument(click.Argument):
    """Argument with its help text."""

    def __init__(self, name: str, words: str, metavar: str = "", **more: Any) -> None:
        super().__init__([name], metavar=metavar or name.upper(), **more)
        self.words = words


class Option(click.Option):
    """Option in a group of the help."""

    of_field = False
    """True if a value that is not given is left out, since the config has the default."""

    def __init__(self, names: str, help: str, group: str = OWN, **more: Any) -> None:
        if not more.keys() & {"metavar", "is_flag"} and "/" not in names:
            more |= {"is_flag": True, "default": False}
        super().__init__(names.split(), help=help, **more)
        self.group = group


MODEL = Argument("model", "Hub id, folder, .gguf file, smollm2, tiny-moe ...")
OUT = Argument("out", "The folder to make.", type=PATH)
AS_JSON = Option("as_json --json", "Print one JSON object.", RUN)
OVERWRITE = Option("--overwrite", "Replace OUT if it exists.", RUN)
RESUME = Option("--resume", "Continue an unfinished run of the same request.", RUN)
DRY_RUN = Option("--dry-run", "Print the result's size and the memory needed; make nothing.", RUN)
PUSH = Option("--push", "Upload the result to this repository of the hub.", RUN, metavar="YOU/NAME")


# --- of fields -----------------------------------------------------------------------------------


def option_of(
    config: type[DataclassInstance],
    name: str,
    group: str = OWN,
    help: str = "",
    bundle: Mapping[str, object] = MappingProxyType({}),
) -> Option:
    """Return the option of a config's field.

    ``help`` stands in place of the field's own text, values of ``bundle`` in place of defaults.
    """
    field = next(entry for entry in fields(config) if entry.name == name)
    kinds, default = _kinds_of(config, name), value_text(bundle.get(name, field.default))
    text = help or help_of(config, field)
    if default and "efault" not in text:
        text = f"{text} Default: {default}."
    more: JSON = {"metavar": _metavar_of(config, field)}
    if bool in kinds:
        more = {"is_flag": True, "default": None}
    elif get_origin(kinds[0]) is tuple and str in get_args(kinds[0]):
        more = {"metavar": more["metavar"].replace("TEXT", "NAME"), "multiple": True}
    made = Option(f"{name} {flag_of(field)}", text, group, **more)
    made.of_field = True
    return made


def _kinds_of(config: type, name: str) -> list[object]:
    """Return the types that a field may have, without None."""
    hint: Any = types_of(config)[name]
    kinds = get_args(hint) if get_origin(hint) not in (Literal, tuple, None) else (hint,)
    return [kind for kind in kinds if kind is not type(None)]


def _metavar_of(config: type[DataclassInstance], field: Field[object]) -> str:
    """Return the word that stands for an option's value in help texts."""
    info, kinds, allowed = about(field), _kinds_of(config, field.name), choices(config, field.name)
    listed = "|".join(map(str, allowed))
    if info.metavar or (allowed and len(listed) <= 22):
        return info.metavar or listed
    plain = {"bytes": "SIZE", "text": "TEXT"}.get(info.parse) or ("NAME" if allowed else "")
    words = ((float, "NUMBER"), (int, "N"))
    return plain or next((word for kind, word in words if kind in kinds), "TEXT")


def help_of(config: type[DataclassInstance], field: Field[object]) -> str:
    """Return a field's help text, and its choices where the text does not name them."""
    allowed, text = [str(choice) for choice in choices(config, field.name)], about(field).help
    if any(not re.search(rf"\b{re.escape(name)}(?![\w-])", text) for name in allowed):
        text = f"{text} One of {', '.join(allowed)}."
    return text


def value_text(value: object) -> str:
    """Return a value as a user would write it; empty for None and empty values."""
    if value is None or value is MISSING or value is False or value in ("", ()):
        return ""
    if value is True:
        return "on"
    return f"{value:g}" if isinstance(value, float) else str(value)


DEVICE, DTYPE = (option_of(Recipe, name, COMMON) for name in PLACE)


# --- values --------------------------------------------------------------------------------------


def field_of(flag: str) -> str:
    """Return the name of the field that a flag sets.

    >>> field_of("--no-refit"), field_of("--max-tokens")
    ('refit', 'max_tokens')
    """
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


def take(options: JSON, names: Iterable[str]) -> JSON:
    """Remove the options of these names from what was given, and return them."""
    return {name: options.pop(name) for name in names if name in options}


def device_and_dtype(options: JSON) -> JSON:
    """Remove device and floating-point type from what was given, and return them."""
    dtype = parse_dtype(options.pop("dtype", Recipe.dtype))
    return {"device": check_device(options.pop("device", Recipe.device)), "dtype": dtype}


def read(config: type[DataclassInstance], options: JSON) -> JSON:
    """Remove a config's options from what was given, and return their checked values.

    Raises:
        MoesaicError: a value is of another type, or the options contradict each other.
    """
    given = take(options, [entry.name for entry in fields(config)])
    made = parse_as(config, given, "")
    return {name: getattr(made, name) for name in given}


def pairs(arguments: Sequence[str]) -> JSON:
    """Read ``key=value`` pairs; lists, mappings and null are read as in a recipe.

    >>> pairs(["alpha=0.5", "layers=[1, 2]", "steps=null"])
    {'alpha': '0.5', 'layers': [1, 2], 'steps': None}
    >>> pairs(["prompt=[INST] hi"])
    {'prompt': '[INST] hi'}

    Raises:
        MoesaicError: one is no such pair, or of a key that another has.
    """
    values: JSON = {}
    for pair in arguments:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise MoesaicError(f"-o {pair!r} is not NAME=VALUE.")
        if key in values:
            raise MoesaicError(f"{key} is given twice; give one value.")
        values[key] = value
        if re.match(r"\s*[\[{]|null$", value):
            with suppress(yaml.YAMLError):  # text that only begins like a list
                values[key] = yaml.safe_load(value)
    return values
