"""Sizes of results and of checkpoints, from headers, before anything is computed.

Headers of the original are converted by the code that converts its weights, so that a result's
shape and bytes are exact wherever a method fixes them (:mod:`moesaic.io.source`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil
import torch

from moesaic.arch.dense import PREFIX, Arch
from moesaic.arch.lookup import base_arch
from moesaic.config import ExportArgs, MethodConfig, RunArgs, parse_dtype
from moesaic.errors import MoesaicError
from moesaic.hub import convert_config
from moesaic.io.checkpoint import INDEX_NAME, PICKLED, WEIGHTS
from moesaic.io.models import sizes_in, skeleton_of, working_type
from moesaic.io.names import check_name
from moesaic.io.source import Source, headers_of_model, resolve, source_or_model
from moesaic.methods import implementation
from moesaic.methods.base import Outline
from moesaic.metrics.evaluate import ROOM
from moesaic.metrics.score import Size, model_size
from moesaic.metrics.speed import free_bytes
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.recipe import Recipe, check_recipe
from moesaic.result import save_applied
from moesaic.surgery import applied_bytes, base_shape
from moesaic.types import JSON, Config, Model, Named, expand_home

T = TypeVar("T")
Steps = tuple[MethodConfig | ExportArgs, ...]
"""Steps of a recipe; the last may be the GGUF file that is made of the result."""

SPILL = 4 << 30
"""Largest number of bytes of hidden states in memory; the rest is on disk."""
OF_TRAINING = 16
"""Bytes of each parameter that learns: its value, gradient and two moments, in float32."""


@dataclass(frozen=True)
class Estimate:
    """Sizes of a run's result, and memory that the run needs."""

    output_bytes: int
    """Bytes of the result's weight files."""
    output_parameters: int
    active_parameters: int
    """Active parameters under uniform routing, embeddings and head included."""
    active_ratio: float
    exact: bool
    """True if the four above are exact; otherwise the result's sizes depend on text."""
    model_type: str
    native: bool
    """True if the result is of its base's own architecture."""
    peak_memory_bytes: int
    """Peak memory of this process (and of the device if a CPU); see :func:`peak_memory`."""
    input_bytes: int
    """Bytes of the original's weight files."""

    def as_json(self) -> JSON:
        """Return the fields by name."""
        return asdict(self)


def estimate(recipe: Recipe) -> Estimate:
    """Return the sizes of a recipe's result without reading weights or text.

    Raises:
        MoesaicError: the request cannot be met.
    """
    check_recipe(recipe)
    with on_headers(recipe) as steps:
        source = steps[-1].result
        result = Skeleton(source.config, parse_dtype(recipe.dtype))
        return Estimate(
            output_bytes=weight_bytes(source.folder),
            output_parameters=result.size.total_parameters,
            active_parameters=result.size.active_parameters,
            active_ratio=result.size.active_ratio,
            exact=steps[-1].exact,
            model_type=str(source.config.model_type),
            native=result.native,
            peak_memory_bytes=peak_memory(recipe, steps, result),
            input_bytes=steps[0].job.original.checkpoint.nbytes(),
        )


def peak_memory(recipe: Recipe, steps: Sequence[Step], result: Skeleton) -> int:
    """Return the estimated peak memory of a run in bytes, libraries included.

    A step holds its largest layer, as stored and as computed, the statistics of that layer, what
    its refit holds, and the hidden states of the calibration text; one that trains holds the whole
    model. Original and result are measured side by side if they fit into memory, otherwise layer
    by layer.
    """
    most = max(_held(step.job, step.outline) for step in steps)
    if recipe.evaluation is not None:
        original = Skeleton(steps[0].job.original.config, parse_dtype(recipe.dtype))
        both = original.held(recipe.device) + result.held(recipe.device)
        most = max(most, both * (both * ROOM <= free_bytes(recipe.device)))
    return int(psutil.Process().memory_info().rss + most)


def _held(job: Job[Arch], outline: Outline) -> int:
    layers = [sum(sizes_in(layer, job.working_type)) for layer in job.layers]
    every = sum(sizes_in(job.skeleton, job.working_type))
    if outline.trained:
        return every + OF_TRAINING * outline.trained
    weight = job.skeleton.get_input_embeddings().weight
    item = (job.working_type or weight.dtype).itemsize
    hidden, tokens = weight.shape[1], job.planned_tokens
    states = 2 * tokens * hidden * item  # into a layer, and out of it
    refits = [
        plan.refit_bytes(job.arch.view(job.layers[i]), hidden, tokens)
        for i, plan in outline.plan.layers.items()
        if outline.plan.config.get("refit")
    ]
    most = 2 * max(layers) + outline.statistics + max(refits, default=0)
    return max(every - sum(layers), most) + min(SPILL, states)


@contextmanager
def on_headers(recipe: Recipe) -> Iterator[list[Step]]:
    """Yield a recipe's steps, carried out on headers; their results are temporary folders."""
    with TemporaryDirectory(prefix="moesaic-") as work:
        sizes, steps = RecipeSizes(recipe, Path(work)), recipe.steps
        yield [sizes.step(steps[:count]) for count in range(1, len(steps) + 1)]


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a folder's weight files, including their index."""
    files = [*folder.glob("model*.safetensors"), *folder.glob(INDEX_NAME)]
    return sum(file.stat().st_size for file in files)


# --- a model -------------------------------------------------------------------------------------


def inspect(model: Named, *, revision: str | None = None, token: str | bool | None = None) -> JSON:
    """Return the parts of a model; for a name only the config and headers of weights are read.

    Args:
        model: a name or folder, a loaded model, or what a verb returned.
        revision: branch, tag or commit, when ``model`` is a hub id.
        token: of the hub, when ``model`` is a hub id.

    Returns:
        ``model_type``, ``layers`` (of each ``kind``, ``experts``, ``top_k``, ``width`` and
        ``active_width``), ``total_parameters``, ``active_parameters``, ``active_ratio`` and
        ``router_parameters``.

    Raises:
        MoesaicError: there is no such model, or its architecture is unknown.
    """
    opened: Model
    with TemporaryDirectory(prefix="moesaic-") as folder:
        if isinstance(model, str | Path):
            name, at = str(model), (revision, token)
            check_name(name)
            local = Path(expand_home(name)).is_dir()
            opened = resolve(name) if local else headers_of_model(name, Path(folder), *at)
            size = model_size(skeleton_of(opened.config))
            if any(file.name.endswith((*WEIGHTS, *PICKLED)) for file in opened.folder.iterdir()):
                _ = opened.checkpoint  # a missing or damaged file is reported
        else:
            opened = source_or_model(model)
            size = model_size(opened)
    of_layer = ("kind", "experts", "top_k", "width", "active_width")
    of_model = ("total_parameters", "active_parameters", "active_ratio", "router_parameters")
    return {
        "model_type": opened.config.model_type,
        "layers": [{name: getattr(use, name) for name in of_layer} for use in size.layers],
        **{name: getattr(size, name) for name in of_model},
    }


class Skeleton:
    """Model without values, from which sizes are counted.

    Args:
        config: of the model.
        dtype: floating-point type; None for the config's own.
        exact: False if sizes depend on text.
        stored: bytes of the weights where they are not those of the parameters in their type: of a
            storage format, and with tensors that the model's class lacks, such as MTP layers.
    """

    def __init__(
        self,
        config: Config,
        dtype: torch.dtype | None,
        exact: bool = True,
        stored: int | None = None,
    ) -> None:
        self.config, self._dtype, self.exact, self._stored = config, dtype, exact, stored

    @classmethod
    def of(cls, source: Source, dtype: torch.dtype | None) -> Skeleton:
        """Return a checkpoint's skeleton; None as its type leaves weights as they are stored."""
        stored = source.checkpoint.tensor_bytes()
        if dtype is not None:
            arch = base_arch(source.config)
            nothing = Plan("", base_shape(skeleton_of(source.config), arch), {})
            headers = replace(source, headers_only=True)
            stored = applied_bytes(headers, arch, nothing, {}, dtype)
        return cls(source.config, dtype, stored=stored)

    @cached_property
    def model(self) -> Model:
        """Skeleton on the meta device."""
        return skeleton_of(self.config, self._dtype)

    @cached_property
    def size(self) -> Size:
        """Parameter counts."""
        return model_size(self.model)

    @property
    def bytes(self) -> int:
        """Bytes of the model's weights as stored."""
        return self.in_memory if self._stored is None else self._stored

    @property
    def in_memory(self) -> int:
        """Bytes of the model's parameters."""
        return sum(sizes_in(self.model))

    def held(self, device: str) -> int:
        """Return the bytes of the weights in the type in which the model is run on a device."""
        return sum(sizes_in(self.model, working_type(self.config, self._dtype, device)))

    @property
    def native(self) -> bool:
        """True if the model is of its base's own architecture."""
        return not self.config.model_type.startswith(PREFIX)


# --- recipes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResultSize:
    """Sizes of a recipe's result."""

    memory: int
    """Bytes of the weights as stored; of a recipe that ends in a GGUF file, those of the file."""
    parameters: int
    active_parameters: int
    """Parameters that a token uses."""
    native: bool
    """True if the result is of the base's own architecture."""
    exact: bool
    """False if sizes depend on text."""


@dataclass(frozen=True)
class Step:
    """Step of a recipe, carried out on headers."""

    job: Job[Arch]
    outline: Outline
    result: Source
    exact: bool
    """False if sizes after this step depend on text."""


def _once(make: Callable[[RecipeSizes, Any], T]) -> Callable[[RecipeSizes, Any], T]:
    """Decorate a method to carry steps out once: later calls return what it made, or its error."""

    @wraps(make)
    def made(self: RecipeSizes, steps: Steps) -> T:
        key = f"{make.__name__} {json.dumps(steps_as_json(steps))}"
        if key not in self._known:
            try:
                self._known[key] = make(self, steps)
            except MoesaicError as error:
                self._known[key] = str(error)
        result: T | str = self._known[key]
        if isinstance(result, str):
            raise MoesaicError(result)
        return result

    return made


class RecipeSizes:
    """Sizes of the results of one model's recipes, which share the steps that they begin with.

    Args:
        recipe: model, text, device and type; its steps are not used.
        folder: an existing folder, for headers.
        file_size: returns the bytes of a result's GGUF file, where recipes end in one.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        file_size: Callable[[Skeleton, ExportArgs], int] | None = None,
    ) -> None:
        self.recipe, self.folder, self.file_size = recipe, folder, file_size
        (folder / "original").mkdir()
        self._known: dict[str, Any] = {}
        """Results of methods that are called once, or messages of errors."""
        self._skeletons: dict[Path, Model] = {}
        self._source = headers_of_model(recipe.model, folder / "original")

    def of(self, steps: Steps) -> ResultSize | None:
        """Return the sizes of a result; None where the steps cannot be carried out."""
        with suppress(MoesaicError):
            built, memory = self.skeleton(steps), None
            if steps and isinstance(file := steps[-1], ExportArgs):
                assert self.file_size is not None
                memory = self.file_size(built, file)
            return ResultSize(
                memory=built.bytes if memory is None else memory,
                parameters=built.size.total_parameters,
                active_parameters=built.size.active_parameters,
                native=built.native,
                exact=built.exact,
            )
        return None

    def skeleton(self, steps: Steps) -> Skeleton:
        """Return a result without values, the original where there are no steps."""
        return self._skeleton(conversions(steps))

    @_once
    def _skeleton(self, steps: tuple[MethodConfig, ...]) -> Skeleton:
        if not steps:
            return Skeleton.of(self._source, parse_dtype(self.recipe.dtype))
        source, job, outline, exact = self._outlined(steps)
        config, stored = copy.deepcopy(source.config), None
        changed = convert_config(config, job.arch, outline.plan)
        original = self.skeleton(())
        if original.bytes != original.in_memory:
            stored = applied_bytes(source, job.arch, outline.plan, changed, job.dtype)
        return Skeleton(config, job.dtype, exact, stored)

    @_once
    def step(self, steps: tuple[MethodConfig, ...]) -> Step:
        """Carry out steps on headers, and return the last of them.

        Its result has small files, and headers of weights.
        """
        source, job, outline, exact = self._outlined(steps)
        folder = self.folder / f"step-{len(self._known)}"
        folder.mkdir()
        save_applied(source, outline.plan, folder, job.dtype, outline=True)
        if outline.plan.layers:
            outline.plan.save(folder)  # tune asks which layers were condensed
        return Step(job, outline, Source(self.recipe.out, folder, headers_only=True), exact)

    def _outlined(self, steps: tuple[MethodConfig, ...]) -> tuple[Source, Job[Arch], Outline, bool]:
        """Return the input of the last step, its job, its outline, and True if sizes are exact."""
        source, exact, recipe = self._source, True, self.recipe
        if len(steps) > 1:
            before = self.step(steps[:-1])
            source, exact = before.result, before.exact
        method, dtype = implementation(steps[-1]), parse_dtype(recipe.dtype)
        args = RunArgs(source, recipe.calibration, device=recipe.device, dtype=dtype)
        shape = self._skeletons.get(source.folder)
        job: Job[Arch] = Job(args, method.find, steps[-1].window, shape)
        for _ in method.resolve_defaults(job):
            pass  # the run itself prints them
        outline = method.outline(job)
        self._skeletons[source.folder] = job.skeleton
        return source, job, outline, exact and outline.exact


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
