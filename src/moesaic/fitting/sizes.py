"""Sizes of recipes' results, computed on headers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from moesaic.config import ExportArgs, MethodConfig, parse_dtype
from moesaic.errors import MoesaicError
from moesaic.estimates import Built, Step, carried_out, outlined
from moesaic.fitting.config import BUDGETS, FitConfig
from moesaic.fitting.gguf_files import Files
from moesaic.hub import convert_config
from moesaic.io.source import Source, headers_of_model
from moesaic.recipe import Recipe
from moesaic.types import JSON, Model

T = TypeVar("T")
Steps = tuple[MethodConfig | ExportArgs, ...]
"""The steps of a recipe, the file that is made of its result as the last where one is."""


@dataclass(frozen=True)
class Weight:
    """Sizes of a recipe's result."""

    memory: int
    parameters: int
    active_parameters: int
    native: bool
    exact: bool

    def meets(self, config: FitConfig) -> bool:
        """Whether it keeps within every budget of size."""
        limits = ((getattr(self, name), getattr(config, name)) for name in BUDGETS)
        return all(limit is None or size <= limit for size, limit in limits)


@dataclass(frozen=True)
class _Cost:
    """A recipe's result."""

    weight: Weight
    built: Built


class Costs:
    """Sizes of recipes' results; the steps before the last are shared.

    Args:
        recipe: model, text, device and type; its steps are not looked at.
        folder: an existing one, for headers.
        files: GGUF files, where candidates end in one.
    """

    def __init__(self, recipe: Recipe, folder: Path, files: Files | None = None) -> None:
        self.recipe, self.folder, self.files = recipe, folder, files
        (folder / "original").mkdir()
        self._steps: dict[str, Step | str] = {}
        self._costs: dict[str, _Cost | str] = {}
        self._shapes: dict[Path, Model] = {}
        self._source = headers_of_model(recipe.model, folder / "original")
        self._original = Built(self._source.config, parse_dtype(recipe.dtype))

    def weight(self, steps: Steps) -> Weight | None:
        """Return the sizes of a result; None where the steps cannot be carried out."""
        with suppress(MoesaicError):
            return self._cost(steps).weight
        return None

    def built(self, steps: Steps) -> Built:
        """Return a result without values, the original where there are no steps.

        Raises:
            MoesaicError: the steps cannot be carried out.
        """
        return self._cost(steps).built

    def _cost(self, steps: Steps) -> _Cost:
        return _once(self._costs, steps, lambda: self._weighed(steps))

    def _weighed(self, steps: Steps) -> _Cost:
        if not steps:
            return _Cost(_weight(self._original, exact=True), self._original)
        before, last = steps[:-1], steps[-1]
        if isinstance(last, ExportArgs):
            return self._filed(before, last)
        source, exact = self._source, True
        for number in range(len(before)):
            step = self._carried_out(source, before[: number + 1])
            source, exact = step.result, exact and step.outline.exact
        job, outline = outlined(source, last, self.recipe, self._shapes.get(source.folder))
        self._shapes[source.folder] = job.shape
        config = copy.deepcopy(source.config)
        convert_config(config, job.arch, outline.plan)
        built = Built(config, job.dtype)
        return _Cost(_weight(built, exact and outline.exact), built)

    def _filed(self, steps: Steps, file: ExportArgs) -> _Cost:
        """Return a result without values, with the bytes of its file as its size."""
        cost = self._cost(steps)
        assert self.files is not None  # whoever looks among files has given them
        memory = self.files.size(cost.built, file)
        return replace(cost, weight=replace(cost.weight, memory=memory))

    def _carried_out(self, source: Source, steps: Steps) -> Step:
        last, folder = steps[-1], self.folder / str(len(self._steps))
        assert isinstance(last, MethodConfig)  # a file comes after all of them
        return _once(self._steps, steps, lambda: carried_out(source, last, self.recipe, folder))


def _weight(built: Built, exact: bool) -> Weight:
    """Return the sizes of a result without values."""
    size = built.size
    sizes = size.total_parameters, size.active_parameters
    return Weight(built.bytes, *sizes, native=built.native, exact=exact)


def _once(table: dict[str, T | str], steps: Steps, make: Callable[[], T]) -> T:
    """Return what ``make`` returned for these steps, or raise its error; it is called once."""
    key = _key(steps)
    if key not in table:
        try:
            table[key] = make()
        except MoesaicError as error:
            table[key] = str(error)
    result = table[key]
    if isinstance(result, str):
        raise MoesaicError(result)
    return result


def conversions(steps: Steps) -> tuple[MethodConfig, ...]:
    """Return the steps without the file."""
    return tuple(step for step in steps if isinstance(step, MethodConfig))


def steps_as_json(steps: Steps) -> list[JSON]:
    """Return steps as a recipe has them, without options that have their defaults."""
    return [{step.verb: _options(step)} for step in steps]


def _options(step: MethodConfig | ExportArgs) -> JSON:
    method = {"method": step.name} if isinstance(step, MethodConfig) else {}
    values = ((field.name, getattr(step, field.name), field.default) for field in fields(step))
    return method | {name: value for name, value, default in values if value != default}


def _key(steps: Steps) -> str:
    return json.dumps(steps_as_json(steps))
