"""A complete run as strict dataclasses, read from and written to YAML.

Unknown keys, wrong types and unknown methods are refused with the place and what would work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import TypeAdapter, ValidationError

from moesaic.errors import MoesaicError
from moesaic.methods import BUNDLES, STEPS

STRICT: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class Calibration:
    """The text that statistics are taken on."""

    __pydantic_config__: ClassVar = STRICT

    source: str = ""
    """A file, a hub dataset id, prose, reference or code; empty for all text that ships."""
    samples: int = 100
    length: int = 256
    seed: int = 0
    stats: str = ""
    """A file of observe to decide from, instead of running the model over text."""


@dataclass(frozen=True)
class Evaluation:
    """What is measured of the result, beside the original."""

    __pydantic_config__: ClassVar = STRICT

    data: str = ""
    length: int = 512
    max_tokens: int | None = 16_384
    compare: tuple[str, ...] = ()
    """Variants measured beside the result at the same active width, such as static."""
    rounds: int = 3
    """Rounds of the speed comparison; 0 leaves speed and memory out."""
    prompt: str = "The capital of France is"
    """Continued by every model, for the eye."""
    new_tokens: int = 40


@dataclass(frozen=True)
class Recipe:
    """One run: model, calibration, steps, evaluation."""

    __pydantic_config__: ClassVar = STRICT

    model: str
    out: str
    steps: tuple[Any, ...]
    """The steps' configs, in order; their classes say which step and method."""
    calibration: Calibration = Calibration()
    evaluation: Evaluation | None = Evaluation()
    device: str = "cpu"
    dtype: str = "auto"

    def to_yaml(self) -> str:
        """The recipe as text that :func:`parse_recipe` reads back to an equal recipe."""
        plain = {**asdict(self), "steps": [_step_to_plain(step) for step in self.steps]}
        return yaml.safe_dump(_lists(plain), sort_keys=False, allow_unicode=True)


def _step_to_plain(step: Any) -> dict[str, Any]:
    for verb, methods in STEPS.items():
        for method, config_class in methods.items():
            if type(step) is config_class:
                return {verb: {"method": method, **asdict(step)}}
    raise TypeError(f"{type(step).__name__} is not a step")


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, list | tuple) else value


def step_config(verb: str, options: Any, where: str = "") -> Any:
    """The config of one step, checked.

    Raises:
        MoesaicError: the verb, the method or an option is unknown or of the wrong type.
    """
    where = where or verb
    if verb not in STEPS:
        raise MoesaicError(f"{where}: unknown step {verb!r}; known: {', '.join(STEPS)}.")
    if not isinstance(options, dict):
        raise MoesaicError(f"{where}: expected options such as 'method: ...', got {options!r:.60}.")
    methods = STEPS[verb]
    options = dict(options)
    method = options.pop("method", next(iter(methods)))
    if method not in methods:
        raise MoesaicError(f"{where}: unknown method {method!r}; known: {', '.join(methods)}.")
    bundle = options.pop("recipe", None)
    if bundle is not None:
        options = {**_bundle(bundle, method, methods[method], where), **options}
    return _checked(methods[method], options, where)


def _bundle(name: Any, method: str, config: Any, where: str) -> dict[str, Any]:
    """The options that a name stands for."""
    if name not in BUNDLES:
        raise MoesaicError(f"{where}: unknown recipe {name!r}; known: {', '.join(BUNDLES)}.")
    known = {f.name for f in fields(config)}
    bundle = BUNDLES[name].get(method, {})
    if not bundle.keys() & known:
        raise MoesaicError(
            f"{where}: recipe {name!r} is for {', '.join(BUNDLES[name])}, not for {method}."
        )
    return bundle


def _checked(cls: Any, data: Any, where: str) -> Any:
    try:
        return TypeAdapter(cls).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([where, *map(str, first["loc"])]).strip(".")
        known = [f.name for f in fields(cls)]
        if first["type"] == "unexpected_keyword_argument":
            raise MoesaicError(f"{place} is not an option; known: {', '.join(known)}.") from None
        raise MoesaicError(f"{place}: {first['msg']} (got {first['input']!r:.60}).") from None


def parse_recipe(text: str, overrides: Sequence[str] = (), where: str = "recipe") -> Recipe:
    """Read a recipe.

    Args:
        text: YAML.
        overrides: ``key=value``, the key dotted, such as ``steps.0.carve.active=0.7``.
        where: named in errors.

    Raises:
        MoesaicError: the recipe is not valid; the message names the place.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise MoesaicError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
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
            raise MoesaicError(f"{where}: steps.{i} must have one key: {', '.join(STEPS)}.")
        ((verb, options),) = step.items()
        configs.append(step_config(verb, options, f"steps.{i}.{verb}"))
    recipe: Recipe = _checked(Recipe, {**data, "steps": tuple(configs)}, "")
    return recipe


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file; see :func:`parse_recipe`."""
    file = Path(path)
    if not file.is_file():
        raise MoesaicError(f"No recipe at {file}.")
    return parse_recipe(file.read_text("utf-8"), overrides, str(file))


def _override(data: Any, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise MoesaicError(f"{override!r} is not key=value.")
    *path, last = key.split(".")
    try:
        for part in path:
            data = data[int(part)] if isinstance(data, list) else data.setdefault(part, {})
        data[int(last) if isinstance(data, list) else last] = yaml.safe_load(value)
    except (ValueError, IndexError, TypeError, AttributeError, yaml.YAMLError):
        raise MoesaicError(f"{key} does not name a place in the recipe.") from None
