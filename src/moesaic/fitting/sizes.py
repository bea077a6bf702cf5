"""What recipes' results weigh, and what it takes to make them: told from headers."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from moesaic.arch.dense import Arch
from moesaic.config import Evaluation, ExportArgs, MethodConfig, parse_dtype
from moesaic.errors import MoesaicError
from moesaic.estimates import (
    Built,
    Machine,
    Stage,
    Step,
    carried_out,
    making,
    measuring,
    observing,
    outlined,
)
from moesaic.exports.mixed import TYPES, groups
from moesaic.fitting.config import BUDGETS, FitConfig
from moesaic.fitting.files import Files
from moesaic.foreign import JSON, Model
from moesaic.hub import convert_config
from moesaic.io.weightless import Weightless, foretold
from moesaic.methods.base import Outline
from moesaic.observation.job import Job
from moesaic.recipe import Recipe

Steps = tuple[MethodConfig | ExportArgs, ...]
"""The steps of a recipe, the file that is made of its result as the last where one is."""


@dataclass(frozen=True)
class Weight:
    """What a recipe's result weighs."""

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
class _Known:
    """A recipe's result, and its last step."""

    weight: Weight
    making: list[Stage]
    """Of the last step."""
    measuring: list[Stage]
    made: Built
    """The result, without values."""


class Costs:
    """What recipes' results weigh and what making them takes; the steps before the last are shared.

    Args:
        recipe: model, text, device and type; its steps are not looked at.
        folder: an existing one.
        files: GGUF files, where candidates end in one.
        tokens: that results are measured on.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        files: Files | None = None,
        tokens: int = 0,
    ) -> None:
        self.recipe, self.folder, self.files = recipe, folder, files
        self._measured = Evaluation(max_tokens=tokens, rounds=0, new_tokens=1)
        (folder / "original").mkdir()
        self._made: dict[str, Step | None] = {}
        self._known: dict[str, _Known | None] = {}
        self._reasons: dict[str, str] = {}
        self._shapes: dict[Path, Model] = {}
        self._source = foretold(recipe.model, folder / "original")
        self._original = Built(self._source.config, parse_dtype(recipe.dtype))

    def of(self, steps: Steps) -> Weight | None:
        """What a result weighs; None where the steps cannot be carried out."""
        known = self._of(steps)
        return None if known is None else known.weight

    def made(self, steps: Steps) -> Built:
        """A result without values, the original where there are no steps.

        Raises:
            MoesaicError: the steps cannot be carried out.
        """
        known = self._of(steps) if steps else None
        if steps and known is None:
            raise MoesaicError(self.reason(steps))
        return known.made if known else self._original

    def reason(self, steps: Steps) -> str:
        """Why steps cannot be carried out."""
        return self._reasons.get(_key(steps), "") if self._of(steps) is None else ""

    def predicted(self, several: Sequence[Steps]) -> tuple[float, int]:
        """Seconds in which results are made and measured, and bytes of memory meanwhile.

        Statistics and steps that several have in common are counted once.
        """
        parts: dict[str, list[Stage]] = {}
        for steps in several:
            known = [self._of(steps[:number]) for number in range(1, len(steps) + 1)]
            for number, part in enumerate(known, 1):
                if part is not None:
                    parts[_key(steps[:number])] = part.making
                    parts[f"measured {_key(steps)}"] = part.measuring
            if self.decided(steps[0], 0):
                parts["statistics"] = self._observing
        stages = [stage for part in parts.values() for stage in part]
        machine = Machine.here(self.recipe.device)
        peak = max((stage.memory for stage in stages), default=0)
        return sum(map(machine.seconds, stages)), machine.resident + peak

    def decided(self, step: MethodConfig | ExportArgs, number: int) -> bool:
        """Whether a step decides from the file of statistics.

        Args:
            step: of a recipe.
            number: its place there.
        """
        return not number and getattr(step, "decides_from_stats", False)

    @cached_property
    def _observing(self) -> list[Stage]:
        """Observing statistics, which is what pruning by them does first."""
        return observing(self._source, self.recipe)

    def _of(self, steps: Steps) -> _Known | None:
        key = _key(steps)
        if key not in self._known:
            try:
                self._known[key] = self._weighed(steps)
            except MoesaicError as error:
                self._known[key], self._reasons[key] = None, str(error)
        return self._known[key]

    def _weighed(self, steps: Steps) -> _Known:
        *before, last = steps
        if isinstance(last, ExportArgs):
            made, known = self.made(tuple(before)), self._of(tuple(before)) if before else None
            weight = self._as_file(known.weight if known else self._whole, made, last)
            measuring = known.measuring if known else self._measuring(self._original)
            # read and converted, written, read and rounded, written
            written = [Stage(bytes=4.0 * weight.memory)]
            looks = 0 if before else self._looks(last)  # types follow from the original's losses
            return _Known(weight, written + looks * measuring, measuring, made)
        source, exact = self._source, True
        for number in range(len(before)):
            step = self._after(source, tuple(before[: number + 1]))
            source, exact = step.result, exact and step.outline.exact
        job, outline = self._outlined(source, last)
        config = copy.deepcopy(source.config)
        convert_config(config, job.arch, outline.plan)
        made = Built(config, job.dtype)
        weight = _weight(made, exact and outline.exact)
        decided = self.decided(last, len(before)) and not getattr(last, "refit", False)
        stages = making(job, outline, weight.memory, decided)
        return _Known(weight, stages, self._measuring(made), made)

    def _measuring(self, made: Built) -> list[Stage]:
        return measuring(self._original, made, self._measured, self.recipe.device)

    def _outlined(self, source: Weightless, step: MethodConfig) -> tuple[Job[Arch], Outline]:
        job, outline = outlined(source, step, self.recipe, self._shapes.get(source.folder))
        self._shapes[source.folder] = job.shape
        return job, outline

    @cached_property
    def _whole(self) -> Weight:
        """The original's."""
        return _weight(self._original, exact=True)

    def _as_file(self, weight: Weight, made: Built, asked: ExportArgs) -> Weight:
        if self.files is None:
            raise MoesaicError("types are of files.")
        return replace(weight, memory=self.files.told(made, asked))

    def _looks(self, asked: ExportArgs) -> int:
        """How often a model is measured until each layer's type is known."""
        if asked.memory is None:
            return 0
        return len(asked.among or TYPES) * groups(self._source.config.num_hidden_layers)

    def _after(self, source: Weightless, steps: Steps) -> Step:
        key = _key(steps)
        if key not in self._made:
            folder = self.folder / str(len(self._made))
            self._made[key], last = None, steps[-1]
            assert isinstance(last, MethodConfig)  # a file comes after all of them
            self._made[key] = carried_out(source, last, self.recipe, folder)
        step = self._made[key]
        if step is None:
            raise MoesaicError("These steps cannot be carried out.")
        return step


def _weight(made: Built, exact: bool) -> Weight:
    size = made.size
    sizes = size.total_parameters, size.active_parameters
    return Weight(made.bytes, *sizes, native=made.native, exact=exact)


def converting(steps: Steps) -> tuple[MethodConfig, ...]:
    """The steps without the file."""
    return tuple(step for step in steps if isinstance(step, MethodConfig))


def told(steps: Steps) -> list[JSON]:
    """Steps as a recipe has them, options left out that are as by default."""
    return [{step.verb: _options(step)} for step in steps]


def _options(step: MethodConfig | ExportArgs) -> JSON:
    named = {"method": step.name} if isinstance(step, MethodConfig) else {}
    given = ((of.name, getattr(step, of.name), of.default) for of in fields(step))
    return named | {name: value for name, value, default in given if value != default}


def _key(steps: Steps) -> str:
    return json.dumps(told(steps))
