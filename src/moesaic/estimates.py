"""Sizes of a result, estimated from headers before anything is computed.

Headers of the original are converted by the code that converts its weights, so that a result's
shape and bytes are exact wherever a method fixes them (:mod:`moesaic.io.source`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from moesaic.arch.dense import PREFIX, Arch
from moesaic.config import MethodConfig, RunArgs, parse_dtype
from moesaic.io.checkpoint import INDEX_NAME, ShardWriter
from moesaic.io.models import shape_of, sizes_in, working_type
from moesaic.io.source import Source, headers_of_model
from moesaic.methods import implementation
from moesaic.methods.base import Outline
from moesaic.metrics.evaluate import ROOM
from moesaic.metrics.machine import free_bytes
from moesaic.metrics.size import Size, model_size
from moesaic.observation.job import Job
from moesaic.recipe import Recipe
from moesaic.result import save_applied
from moesaic.types import JSON, Config, Model

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
    with foreseen(recipe) as steps:
        source = steps[-1].result
        result = Built(source.config, parse_dtype(recipe.dtype))
        return Estimate(
            output_bytes=weight_bytes(source.folder),
            output_parameters=result.size.total_parameters,
            active_parameters=result.size.active_parameters,
            active_ratio=result.size.active_ratio,
            exact=all(step.outline.exact for step in steps),
            model_type=str(source.config.model_type),
            native=result.native,
            peak_memory_bytes=peak_memory(recipe, steps, result),
            input_bytes=steps[0].job.original.checkpoint.nbytes(),
        )


def peak_memory(recipe: Recipe, steps: Sequence[Step], result: Built) -> int:
    """Return the estimated peak memory of a run in bytes, libraries included.

    A step holds its largest layer, as stored and as computed, the statistics of that layer, and
    the hidden states of the calibration text; one that trains holds the whole model. Original and
    result are measured side by side if they fit into memory, otherwise layer by layer.
    """
    most = max(_held(step.job, step.outline) for step in steps)
    if recipe.evaluation is not None:
        original = Built(steps[0].job.original.config, parse_dtype(recipe.dtype))
        both = original.held(recipe.device) + result.held(recipe.device)
        most = max(most, both * (both * ROOM <= free_bytes(recipe.device)))
    return int(psutil.Process().memory_info().rss + most)


def _held(job: Job[Arch], outline: Outline) -> int:
    layers = [sum(sizes_in(layer, job.working_type)) for layer in job.layers]
    every = sum(sizes_in(job.shape, job.working_type))
    if outline.trained:
        return every + OF_TRAINING * outline.trained
    weight = job.shape.get_input_embeddings().weight
    item = (job.working_type or weight.dtype).itemsize
    states = 2 * job.planned_tokens * weight.shape[1] * item  # into a layer, and out of it
    return max(every - sum(layers), 2 * max(layers) + outline.statistics) + min(SPILL, states)


# --- steps on headers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Step of a recipe that was carried out on headers."""

    job: Job[Arch]
    outline: Outline
    result: Source


@contextmanager
def foreseen(recipe: Recipe) -> Iterator[list[Step]]:
    """Yield a recipe's steps, carried out on headers; their results are temporary folders.

    Raises:
        MoesaicError: the request cannot be met.
    """
    with TemporaryDirectory(prefix="moesaic-") as work:
        first = Path(work) / "original"
        first.mkdir()
        source = headers_of_model(recipe.model, first)
        steps: list[Step] = []
        for number, config in enumerate(recipe.steps):
            folder = Path(work) / f"step-{number}"
            steps.append(carried_out(source, config, recipe, folder))
            source = steps[-1].result
        yield steps


def outlined(
    source: Source, config: MethodConfig, recipe: Recipe, shape: Model | None = None
) -> tuple[Job[Arch], Outline]:
    """Return one step's job and its outline, from headers.

    Args:
        source: the step's input.
        config: the step.
        recipe: gives text, device and type.
        shape: a skeleton of the source, if there is one already.
    """
    method = implementation(config)
    calibration, dtype = recipe.calibration, parse_dtype(recipe.dtype)
    args = RunArgs(model=source, calibration=calibration, device=recipe.device, dtype=dtype)
    job: Job[Arch] = Job(args, method.find, config.window, shape)
    for _ in method.resolve_defaults(job):
        pass  # said by the run itself
    return job, method.outline(job)


def carried_out(source: Source, config: MethodConfig, recipe: Recipe, folder: Path) -> Step:
    """Carry out one step on headers; write its result's small files, and headers of weights.

    Args:
        source: the step's input.
        config: the step.
        recipe: gives text, device and type.
        folder: the folder to make.
    """
    job, outline = outlined(source, config, recipe)
    folder.mkdir()
    writer = ShardWriter(folder, outline=True)
    save_applied(source, outline.plan, folder, job.dtype, writer)
    if outline.plan.layers:
        outline.plan.save(folder)  # tune asks which layers were condensed
    return Step(job, outline, Source(recipe.out, folder, headers_only=True))


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a folder's weight files, including their index."""
    files = [*folder.glob("model*.safetensors"), *folder.glob(INDEX_NAME)]
    return sum(file.stat().st_size for file in files)


# --- a model -------------------------------------------------------------------------------------


class Built:
    """Model without values, and the sizes of its parts."""

    def __init__(self, config: Config, dtype: torch.dtype | None) -> None:
        self.config, self._dtype = config, dtype

    @cached_property
    def model(self) -> Model:
        """Skeleton on the meta device."""
        return shape_of(self.config, self._dtype)

    @cached_property
    def size(self) -> Size:
        """Parameter counts."""
        return model_size(self.model)

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return sum(sizes_in(self.model))

    def held(self, device: str) -> int:
        """Bytes of its weights in the type in which it is run."""
        return sum(sizes_in(self.model, working_type(self.config, self._dtype, device)))

    @property
    def native(self) -> bool:
        """True if it is of its base's own architecture."""
        return not self.config.model_type.startswith(PREFIX)
