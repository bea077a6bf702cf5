"""Recipes: a complete run as strict dataclasses, read from and written to YAML.

Unknown keys, wrong types and unknown methods are refused with the place and a remedy.
Nothing here imports torch, so that a wrong request is answered at once.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_origin

import yaml

from moesaic.config import (
    DTYPES,
    STRICT,
    Calibration,
    Evaluation,
    MethodConfig,
    about,
    check_device,
    choices,
    flag_of,
    option,
    parse_bytes,
    types_of,
)
from moesaic.data.reader import check_apart
from moesaic.data.sources import read_by, text_name, wanted_tasks
from moesaic.errors import MoesaicError, check_known, hint, quote
from moesaic.io.names import check_name
from moesaic.io.outputs import check_out, check_unfinished, run_folder
from moesaic.io.trust import DIGITS, mapping_of
from moesaic.methods import VERBS, methods_of
from moesaic.types import JSON, expand_home

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")


LARGEST = 100_000
"""Largest number of characters of a recipe."""
MOST = 10_000
"""Largest number of values of a recipe, counting those that an alias repeats each time."""


class _OneValueEach(yaml.SafeLoader):
    """YAML loader that refuses repeated keys, of which the last would silently win, and aliases
    that expand to more than :data:`MOST` values."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _values(node, {}) > MOST:
            raise yaml.YAMLError(f"it has more than {MOST:,} values")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and keys.setdefault(key.value, key) is not key:
                raise yaml.MarkedYAMLError(None, None, f"{key.value} stands twice", key.start_mark)
        return node


def _values(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values in a node and below it; infinity if it contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = isinstance(node, yaml.MappingNode)
        below = [part for pair in parts for part in pair] if pairs else parts
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # what is no text in UTF-8 names no file
            if "\0" in node.value:
                raise yaml.YAMLError("it holds NUL bytes")
        if node.tag.endswith(":int") and len(node.value) > DIGITS:
            raise yaml.YAMLError(f"a number of {len(node.value):,} digits")
        known[id(node)] = 1 + sum(_values(part, known) for part in below)
    return known[id(node)]


@dataclass(frozen=True)
class Recipe:
    """Description of one run: model, calibration, steps, evaluation."""

    __pydantic_config__: ClassVar[JSON] = STRICT

    model: str
    out: str
    steps: tuple[MethodConfig, ...]
    """Configs of the steps, in order; their classes determine verb and method."""
    calibration: Calibration = field(default_factory=Calibration)
    evaluation: Evaluation | None = field(default_factory=Evaluation)
    device: str = option("cpu", "Where to compute: cpu, cuda, cuda:1, mps.")
    dtype: str = option(
        "auto",
        "Floating-point type; auto: the checkpoint's, computed in float32 where the CPU lacks it.",
        choices=DTYPES,
    )

    def to_yaml(self) -> str:
        """Return the recipe as text that :func:`parse_recipe` reads back to an equal recipe."""
        steps = [{step.verb: {"method": step.name, **asdict(step)}} for step in self.steps]
        plain = json.loads(json.dumps({**asdict(self), "steps": steps}))  # lists for tuples
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)

    def __post_init__(self) -> None:
        for name in ("model", "out"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike):
                raise MoesaicError(f"A recipe names its {name} by a str; got {quote(value)}.")
            object.__setattr__(self, name, expand_home(os.fspath(value)))

    @property
    def texts(self) -> list[str]:
        """Names of all text that the steps calibrate or train on."""
        return [self.calibration.source, *(text for step in self.steps for text in step.texts)]

    @property
    def inputs(self) -> list[str]:
        """Names of all inputs: models, files, and text."""
        configs = (*self.steps, self.calibration, self.evaluation)
        return [self.model, *(name for config in configs for name in read_by(config))]


# --- checks --------------------------------------------------------------------------------------


def check_recipe(recipe: object) -> None:
    """Refuse a request for a run that is no :class:`Recipe`."""
    if not isinstance(recipe, Recipe):
        raise MoesaicError(f"A run takes a Recipe, as load_recipe returns; got {quote(recipe)}.")


def check_run(recipe: Recipe, *, overwrite: bool = False) -> None:
    """Refuse a recipe that can be seen to be wrong without opening the model.

    Values are checked first, then inputs, and the output last: an unfinished run hides no error.
    """
    check_recipe(recipe)
    settings, calibration = recipe.evaluation, recipe.calibration
    compare = settings.compare if settings is not None else ()
    for number, step in enumerate(recipe.steps, 1):
        check_step(step, calibration, compare if number == len(recipe.steps) else ())
    check_known("dtype", recipe.dtype, DTYPES)
    if Path(recipe.out).suffix == ".gguf":
        raise MoesaicError(
            f"A result is a folder, and {recipe.out} ends in .gguf: name a folder, and make the "
            "file of it by moesaic export."
        )
    check_name(recipe.model)
    check_device(recipe.device)
    check_apart(recipe.texts, "" if settings is None else settings.data)
    if settings is not None:
        wanted_tasks(settings.tasks, settings.shots, settings.limit)
    if (stats := calibration.stats) and not Path(stats).is_file():
        raise MoesaicError(
            f"No statistics at {stats}; moesaic observe {recipe.model} {stats} makes them."
        )
    check_out(Path(recipe.out), overwrite, recipe.inputs)


def check_anew(recipe: Recipe, *, overwrite: bool = False, resume: bool = False) -> None:
    """Refuse to begin a run whose output has an unfinished one, neither to ``overwrite`` nor to
    ``resume``; after all other checks."""
    folder = run_folder(recipe.out)
    check_unfinished(folder, overwrite, resume, f"run{_named(folder, recipe.out)}")


def _named(folder: Path, out: str) -> str:
    """Return the command of an unfinished run, and its progress; empty if that is unknown."""
    with suppress(MoesaicError, KeyError, TypeError, StopIteration):
        note = next(iter(sorted(folder.rglob("request.json"))))
        request = mapping_of(note)
        step = step_config(request["verb"], {"method": request["method"], **request["config"]})
        names = {of.name for of in fields(Calibration)}
        text = {name: v for name, v in request.get("text", {}).items() if name in names}
        run = Recipe(request["base"]["name"], out, (step,), parse_as(Calibration, text, ""))
        files = note.parent.glob("layer-*.safetensors")  # several of a layer where it is compared
        done = len({file.name.split("-")[1] for file in files})
        return f" ({command_of(run)}{f', {done} layers finished' if done else ''})"
    return ""


def command_of(recipe: Recipe) -> str:
    """Return the command line that runs a recipe of one step again."""
    (step,) = recipe.steps
    words = ["moesaic", step.verb, recipe.model, recipe.out]
    words += ["--method", step.name] if len(methods_of(step.verb)) > 1 else []
    for config in (step, recipe.calibration):
        for entry in fields(config):
            value = getattr(config, entry.name)
            on, _, off = flag_of(entry).partition("/")
            if value == entry.default and entry.name != "keep":
                continue
            if about(entry).seldom:
                words += ["-o", f"{entry.name}={json.dumps(value).strip(chr(34))}"]
            elif isinstance(value, bool):
                words.append(on if value else off)
            else:
                words += [on, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    for name in ("device", "dtype"):
        value = getattr(recipe, name)
        words += [f"--{name}", value] if value != getattr(Recipe, name) else []
    return shlex.join(words)


# --- steps ---------------------------------------------------------------------------------------


def check_step(
    config: MethodConfig, calibration: Calibration, compare: Sequence[str], text: str = ""
) -> None:
    """Refuse statistics, text beside them, and comparisons that a step does not use.

    Args:
        config: of the step.
        calibration: where text comes from.
        compare: other methods to decide by.
        text: what was given in place of a source, in a word; empty for nothing.
    """
    verb = VERBS[config.verb]
    if calibration.stats and not verb.observes:
        raise MoesaicError(f"{verb.name} takes no statistics: leave stats out.")
    own = {entry.name for entry in fields(config)}  # a seed may be the method's, too
    refits = getattr(config, "refit", False)  # on text
    given = [(f.name, getattr(calibration, f.name), f.default) for f in fields(Calibration)]
    beside = [("calibration", text, ""), *(v for v in given if v[0] not in ("stats", *own))]
    for name, value, default in beside if calibration.stats and not refits else ():
        if value != default:
            raise MoesaicError(
                f"{name}={value} chooses text, and the statistics were observed on text "
                "already: leave it out."
            )
    if compare and not verb.compares:
        raise MoesaicError(f"{verb.name} has no comparisons: leave compare out.")
    for name in compare:
        config.compared(name)


def step_config(verb: str, options: object, where: str = "") -> MethodConfig:
    """Return the checked config of one step; by default the method and options that measure best.

    Args:
        verb: such as ``carve``.
        options: the fields of the method's config, and ``method`` and ``recipe``, the name of a
            bundle of options.
        where: the step's place in a recipe, for messages; empty if there is only one.

    Raises:
        MoesaicError: the verb, the method or an option is unknown or of the wrong type.
    """
    place = where or verb
    check_known(f"{place}: unknown step", verb, VERBS, "; known:")
    methods = methods_of(verb)
    options = {} if options is None else options  # "- prune:" in YAML
    if not isinstance(options, dict):
        raise MoesaicError(
            f"{place}: expected options such as 'method: ...', got {quote(options)}."
        )
    given = ("method", "recipe")
    options = {n: value for n, value in options.items() if n not in given or value is not None}
    method = method_of(verb, options)
    check_known(f"{place}: unknown method", method, methods, "; known:")
    config = methods[method]
    bundle = options.pop("recipe", None)
    if options.pop("method", None) is None and bundle is None and "best" in config.bundles:
        bundle = "best"
    if bundle is not None:
        options = {**_bundle(verb, method, str(bundle), place), **options}
    return parse_as(config, options, where)


def method_of(verb: str, options: JSON) -> str:
    """Return the method that options name, or the first that has all the options they name.

    Of several methods with the bundle, the only one that has all the options is returned.

    Args:
        verb: such as ``skip``.
        options: as for :func:`step_config`.

    Raises:
        MoesaicError: several methods have the bundle and the options.
    """
    methods = methods_of(verb)
    if "method" in options:
        return str(options["method"])
    names, bundle = options.keys() - {"recipe"}, str(options.get("recipe"))
    having = [name for name in methods if bundle in methods[name].bundles]
    candidates = having or list(methods)
    able = [
        name for name in candidates if names <= {f.name for f in fields(methods[name])}
    ] or candidates
    if not having or len(able) == 1:
        return able[0]
    raise MoesaicError(
        f"Recipe {bundle!r} is for {', '.join(candidates)}: give method={able[0]}, or another of "
        "them."
    )


def _plain_values(config: type[DataclassInstance], options: JSON) -> JSON:
    """Return options with sizes and names of text as a dataclass's fields hold them."""
    values = dict(options)
    for entry in fields(config):
        value = options.get(entry.name)
        if about(entry).parse == "bytes" and isinstance(value, str):
            try:
                values[entry.name] = parse_bytes(value)
            except MoesaicError as error:
                raise MoesaicError(f"{entry.name} {error}") from None
        if about(entry).parse == "text" and isinstance(value, dict | list):
            values[entry.name] = text_name(value)
        hint: object = types_of(config)[entry.name]
        kinds = {hint, *get_args(hint)}
        if isinstance(value, bool) and bool not in kinds and {int, float} & kinds:
            values[entry.name] = f"{value}"  # YAML's yes, which would be taken as 1
        if isinstance(value, str) and get_origin(hint) is tuple and str not in get_args(hint):
            values[entry.name] = value.split(",")  # numbers, as a command line has them
    return values


def _bundle(verb: str, method: str, name: str, where: str) -> JSON:
    """Return the options that a bundle's name stands for."""
    bundles = {other: config.bundles for other, config in methods_of(verb).items()}
    options = bundles[method].get(name)
    if options is not None:
        return dict(options)
    recipes = dict.fromkeys(n for names in bundles.values() for n in names)
    check_known(f"{where}: unknown recipe", name, recipes, "; known:")
    able = ", ".join(other for other, names in bundles.items() if name in names)
    raise MoesaicError(f"{where}: recipe {name!r} is for {able}, not for {method}.")


def parse_as(cls: type[D], data: object, where: str) -> D:
    """Return plain data as a dataclass; refuse fields that are unknown, missing or of a wrong type.

    ``where`` is named in messages.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        values = _plain_values(cls, data) if isinstance(data, dict) else data
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise MoesaicError(_in_words(cls, error.errors()[0], where)) from None


PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
WRONG = {"float": "not a number", "int": "not a whole number", "bool": "neither true nor false"}
"""Words for a wrong value, by prefixes of pydantic's names of errors."""


def _in_words(cls: type[DataclassInstance], error: Any, where: str) -> str:
    """Return pydantic's first error as a message with a remedy."""
    kind, value = str(error["type"]), error["input"]
    place = ".".join([where, *map(str, error["loc"])]).strip(".")
    names = [f.name for f in fields(cls)]
    if kind == "unexpected_keyword_argument":
        owner = ""
        if issubclass(cls, MethodConfig):
            several = len(methods_of(cls.verb)) > 1
            owner = f" of {cls.verb}{f', method {cls.name}' if several else ''}"
        listed, word = ", ".join(names), hint(error["loc"][-1], names)
        return f"{place} is not an option{owner}; known: {listed}.{word}"
    if kind == "missing":  # what is given is all the rest
        return f"{place} is missing."
    if kind == "literal_error":
        allowed = choices(cls, str(error["loc"][0]))
        return f"{place} {quote(value)} is none of {', '.join(allowed)}.{hint(value, allowed)}"
    wrong = WRONG.get(kind.partition("_")[0])
    if wrong is None:
        return f"{place}: {error['msg']} (got {quote(value)})."
    share = PERCENT.fullmatch(value) if isinstance(value, str) and kind[0] == "f" else None
    remedy = f"; give {float(share[1]) / 100:g}" if share else ""
    return f"{place} {quote(value)} is {wrong}{remedy}."


# --- files ---------------------------------------------------------------------------------------


def parse_recipe(text: str, overrides: Sequence[str] = (), where: str = "recipe") -> Recipe:
    """Read a recipe.

    Args:
        text: YAML.
        overrides: ``key=value``, the key dotted, such as ``steps.0.carve.active=0.7``.
        where: named in messages.

    Raises:
        MoesaicError: the recipe is not valid; the message names the place.
    """
    try:
        if len(text) > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} characters")
        data = yaml.load(text, _OneValueEach)
    except (yaml.YAMLError, ValueError) as error:
        raise MoesaicError(
            f"{where} is not valid YAML: {' '.join(str(error).split()):.300}"
        ) from error
    except (LookupError, AttributeError, TypeError):  # of yaml's readers of single types
        raise MoesaicError(
            f"{where} is not valid YAML: a value is not of the type that its tag names."
        ) from None
    except RecursionError:
        raise MoesaicError(f"{where} is not valid YAML: it is nested too deeply.") from None
    if not isinstance(data, dict):
        raise MoesaicError(f"{where} must be a mapping with model, out and steps.")
    for override in overrides:
        _override(data, override)
    steps = data.get("steps")
    if not isinstance(steps, list) or not steps:
        raise MoesaicError(f"{where}: steps must be a list such as '- carve: {{active: 0.8}}'.")
    configs = []
    for i, step in enumerate(steps):
        if not isinstance(step, dict) or len(step) != 1:
            raise MoesaicError(f"{where}: steps.{i} must have one key: {', '.join(VERBS)}.")
        ((verb, options),) = step.items()
        configs.append(step_config(verb, options, f"steps.{i}.{verb}"))
    if data.get("calibration") is None:  # as if it were not there
        data.pop("calibration", None)
    for name, config in (("calibration", Calibration), ("evaluation", Evaluation)):
        if isinstance(data.get(name), dict):
            data[name] = parse_as(config, data[name], name)
    return parse_as(Recipe, {**data, "steps": tuple(configs)}, "")


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file; see :func:`parse_recipe`.

    Raises:
        MoesaicError: there is no such file, or it is not valid.
    """
    if not isinstance(path, str | os.PathLike):
        raise MoesaicError(f"A recipe file is named by a str or a Path; got {quote(path)}.")
    file = Path(path)
    try:
        if not file.is_file():
            raise MoesaicError(f"No recipe at {file}.")
        with file.open(encoding="utf-8-sig") as opened:
            text = opened.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise MoesaicError(f"{file} cannot be read: {error}") from error
    return parse_recipe(text, overrides, str(file))


def _override(data: Any, override: str) -> None:
    key, equals, value = str(override).partition("=")
    if not equals:
        raise MoesaicError(f"{override!r} is not key=value.")
    try:
        parsed = yaml.load(value, _OneValueEach)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise MoesaicError(f"{quote(value)} is no value for {key}: {reason:.120}") from None
    *path, last = key.split(".")
    try:
        for part in path:
            data = data[int(part)] if isinstance(data, list) else data.setdefault(part, {})
        data[int(last) if isinstance(data, list) else last] = parsed
    except (ValueError, LookupError, TypeError, AttributeError):
        raise MoesaicError(f"{key} does not name a place in the recipe.") from None
