"""Command-line options made from the fields of dataclasses: name, type, help and default."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    get_args,
    get_origin,
)

import typer
import yaml

from moesaic.config import About, about, choices, types_of
from moesaic.errors import MoesaicError
from moesaic.recipe import Recipe
from moesaic.types import JSON

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TEXT = ("source", "samples", "length", "seed", "documents")
"""The fields of Calibration that say which text."""
PLACE = ("device", "dtype")
"""The fields of Recipe that say where is computed."""
MODELS = "Hub id, folder, .gguf file, smollm2, tiny-moe ..."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODELS, show_default=False)]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Tell what would come out and what it would take; do nothing."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an unfinished run of the same.")]
Push = Annotated[
    str,
    typer.Option("--push", metavar="REPO", help="Upload the result to this repository of the hub."),
]

Value: TypeAlias = Any
"""A value that typer has read."""

Place: TypeAlias = "tuple[str, type[DataclassInstance], Field[object]]"
"""A method's name, its config and a field of that."""


# --- an option -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """An option of a command, before typer sees it. An option that is not given is ``None``."""

    name: str
    """Of the parameter."""
    flag: str
    """``--keep``, ``--option -o``, or ``--padding/--no-padding`` for a switch that is on."""
    kind: type[object]
    """bool, int, float, str, or list for an option that may be given several times."""
    help: str
    metavar: str = ""
    commas: bool = False
    """Its value is a list, given with commas between."""
    methods: Mapping[str, str] = field(default_factory=dict)
    """Its help of each method that has it; empty for an option of the command itself."""
    common: bool = False
    """It means the same for all verbs, and ``--help-all`` alone tells of it."""
    hidden: bool = False
    """No help text tells of it."""

    @property
    def parameter(self) -> inspect.Parameter:
        """As a parameter of a function that typer takes."""
        kind = list[str] if self.kind is list else self.kind
        words = {bool: None, int: "INT", float: "NUMBER"}
        parser = {int: _whole, float: _number}.get(self.kind)
        info = typer.Option(
            *self.flag.split(),
            help=self.help,
            metavar=self.metavar or words.get(self.kind, "TEXT"),
            show_default=False,
            hidden=self.hidden,
            parser=parser,
        )
        annotation: object = Annotated[kind | None, info]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=None, annotation=annotation)

    def read(self, value: Value) -> Value:
        """The value that the dataclass's field takes."""
        if self.commas:
            return [part.strip() for part in value.split(",") if part.strip()]
        return tuple(value) if self.kind is list else value


def _number(text: str) -> float:
    """Return a number that a user wrote."""
    try:
        return float(text)
    except ValueError:
        share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
        hint = f"; {text.strip()} is {float(share[1]) / 100:g}" if share else ""
        raise typer.BadParameter(f"{text!r} is not a number{hint}.") from None


def _whole(text: str) -> int:
    """Return a whole number that a user wrote."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number.") from None


def option(config: type[DataclassInstance], name: str, *, flag: str = "", help: str = "") -> Option:
    """The option of one field.

    Args:
        config: the dataclass.
        name: of the field.
        flag: instead of the field's own.
        help: instead of the field's own.
    """
    return replace(_merged([("", config, _field(config, name))], flag, help), hidden=False)


def of_methods(
    configs: Mapping[str, type[DataclassInstance]], taken: Iterable[str]
) -> list[Option]:
    """The options of several methods' configs, each once; seldom ones are hidden.

    Args:
        configs: the dataclasses by the method's name.
        taken: flags that mean something else.
    """
    places: dict[str, list[Place]] = {}
    for method, config in configs.items():
        for entry in fields(config):
            if flag_of(entry) not in taken:
                places.setdefault(entry.name, []).append((method, config, entry))
    return [_merged(group, methods=len(configs)) for group in places.values()]


def _field(config: type[DataclassInstance], name: str) -> Field[object]:
    return next(entry for entry in fields(config) if entry.name == name)


def flag_of(field: Field[object]) -> str:
    """The name on the command line: ``--keep``, or two of a switch that is on."""
    flag = about(field).flag or f"--{field.name.replace('_', '-')}"
    if field.default is True and "/" not in flag:
        return f"{flag}/--no-{flag.removeprefix('--')}"
    return flag


def help_of(config: type[DataclassInstance], field: Field[object]) -> str:
    """A field's help text, and its choices where the text does not name them."""
    allowed, text = [str(choice) for choice in choices(config, field.name)], about(field).help
    if any(not re.search(rf"\b{re.escape(name)}(?![\w-])", text) for name in allowed):
        text = f"{text} One of {', '.join(allowed)}."
    return text


def default_of(field: Field[object]) -> str:
    """A field's default as a user would write it; empty for one that says nothing."""
    value = field.default if field.default is not MISSING else None
    if value is None or value is False or value in ("", ()):
        return ""
    if value is True:
        return "on"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _merged(
    group: Sequence[Place],
    flag: str = "",
    help: str = "",
    methods: int = 1,
) -> Option:
    """One option of the fields that several methods call by the same name."""
    (_, config, first), info = group[0], about(group[0][2])
    kind, commas = _kind(types_of(config)[first.name], info)
    flag = flag or flag_of(first)
    return Option(
        first.name,
        flag,
        kind,
        help or _help(group, methods),
        info.metavar,
        commas,
        {place[0]: _help([place], 1) for place in group if place[0]},
        hidden=all(about(entry).seldom for _, _, entry in group),
    )


def _kind(hint: object, info: About) -> tuple[type[object], bool]:
    """The type that typer reads a field as, and whether it is a list with commas between."""
    kinds = [k for k in (get_args(hint) or (hint,)) if k not in (type(None), Ellipsis)]
    if get_origin(hint) in (Literal, tuple):
        kinds = [hint]
    plain = [k for k in kinds if k in (bool, int, float, str)]
    if info.parse or str in plain or any(get_origin(k) is Literal for k in kinds):
        return str, False
    if any(get_origin(k) is tuple for k in kinds):
        return (list, False) if str in get_args(kinds[0]) else (str, True)
    return (float if float in plain else plain[0]), False


def _help(group: Sequence[Place], methods: int) -> str:
    """Help, choices and default; with the methods' names where they differ."""
    texts: dict[str, list[str]] = {}
    for method, config, entry in group:
        texts.setdefault(help_of(config, entry), []).append(method)
    same = len(texts) == 1 and len(group) == methods
    sentences = [t if same else f"{', '.join(names)}: {t}" for t, names in texts.items()]
    values: dict[str, list[str]] = {}
    for method, _, entry in group:
        values.setdefault(default_of(entry), []).append(method)
    if len(values) == 1:
        (value,) = values
        default = f"Default: {value}." if value else ""
    else:
        default = ", ".join(f"{', '.join(m)} {v}" for v, m in values.items() if v)
        default = f"Default: {default}." if default else ""
    if "efault" in " ".join(sentences):
        default = ""
    return " ".join([*sentences, default]).strip()


# --- values --------------------------------------------------------------------------------------


def taken(options: JSON, names: Iterable[str]) -> JSON:
    """The options of these names, as far as they were given; they are taken out."""
    return {name: options.pop(name) for name in names if name in options}


def pairs(arguments: Sequence[str] | None) -> JSON:
    """``key=value`` pairs; lists, mappings and null are read as in a recipe.

    >>> pairs(["alpha=0.5", "layers=[1, 2]", "steps=null"])
    {'alpha': '0.5', 'layers': [1, 2], 'steps': None}
    >>> pairs(["prompt=[INST] hi"])
    {'prompt': '[INST] hi'}

    Raises:
        MoesaicError: one is no such pair, or of a key that another has.
    """
    values = {}
    for pair in arguments or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise MoesaicError(f"option {pair!r} is not key=value.")
        if key in values:
            raise MoesaicError(f"{key} is given twice; give one value.")
        values[key] = value
        if re.match(r"\s*[\[{]|null$", value):
            with suppress(yaml.YAMLError):  # text that only begins like a list
                values[key] = yaml.safe_load(value)
    return values


# --- messages ------------------------------------------------------------------------------------

MENTIONS = re.compile(
    r"^(?:\w+\.)?(?P<first>[a-z]\w*)(?:\.\d+)?(?: (?P<said>'[^']*'|[\d.]*\d))?(?=[ ,:;.]|$)"
    r"|(?<![\w=.-])(?P<set>[a-z]\w*)=(?P<value>[\w.+/'-]*\w)"
    r"|(?<![\w.=-])(?P<bare>[a-z]+_\w+)\b"
)
"""Fields in a message: its first word, one with ``=`` and a value, a name with an underscore."""


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """A message of the library, which speaks of fields, in words of the command line.

    Args:
        message: such as ``keep 9 is out of reach``.
        flags: by field, ``--keep``, ``--padding/--no-padding`` or, of a seldom one, ``-o alpha``.

    >>> flags = {"keep": "--keep", "refit": "--refit/--no-refit", "gram_mb": "-o gram_mb"}
    >>> in_flags("keep 5.5 is no whole number; pass refit=False.", flags)
    '--keep 5.5 is no whole number; pass --no-refit.'
    >>> in_flags("gram_mb 0 leaves keep out; more gram_mb=9, experts keep 3.", flags)
    '-o gram_mb=0 leaves keep out; more -o gram_mb=9, experts keep 3.'
    >>> in_flags("prune.keep: Input should be a number.", flags)
    '--keep: Input should be a number.'
    """

    def flag(match: re.Match[str]) -> str:
        name = match["first"] or match["set"] or match["bare"]
        value = match["said"] or match["value"]
        if name not in flags:
            return match[0]
        on, _, off = flags[name].partition("/")
        on, between = (on, "=") if on.startswith("-o ") else (on.split()[0], " ")
        if value in ("True", "False") and between == " ":
            return on if value == "True" else off or f"-o {name}=false"
        return on if value is None else f"{on}{between}{value}"

    speaks, separator, listed = message.partition("known: ")
    return MENTIONS.sub(flag, speaks) + separator + listed


DEVICE, DTYPE = option(Recipe, "device"), option(Recipe, "dtype")
