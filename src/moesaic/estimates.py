"""Predictions: what a run will make, and what it will take, before anything is computed.

Headers of the original are converted by the code that converts its weights, so that a result's
shape and bytes are exact wherever a method fixes them (:mod:`moesaic.io.weightless`). Memory and
time follow from a simple model of the stream, and from a small measurement of this machine: they
are predictions, and ``benchmarks/estimates.yaml`` tells how far off.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ParamSpec

import psutil
import torch
from torch import nn

from moesaic import __version__
from moesaic.arch.dense import PREFIX, Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.arch.use import LayerUse
from moesaic.config import Evaluation, MethodConfig, RunArgs, parse_dtype
from moesaic.data.text import SAMPLES
from moesaic.data.training import foretold_tokens
from moesaic.exports.engines import ENGINES, limits
from moesaic.exports.mixed import PARTS, PER_WEIGHT, TYPES, WINDOWS, tensor_types
from moesaic.foreign import JSON, Config, Model
from moesaic.io.arithmetic import sizes_in, working_type
from moesaic.io.checkpoint import INDEX_NAME, shape_of
from moesaic.io.names import cache_folder
from moesaic.io.outputs import whole_file
from moesaic.io.prediction import predicting_layers
from moesaic.io.source import resolve
from moesaic.io.weightless import Outliner, Weightless, foretold
from moesaic.layers.base import KINDS
from moesaic.methods import implementation
from moesaic.methods.base import Outline
from moesaic.methods.naee.config import PruneConfig
from moesaic.methods.slim.config import SlimConfig
from moesaic.metrics.evaluate import ROOM
from moesaic.metrics.forward import BATCH
from moesaic.metrics.machine import environment, free_bytes
from moesaic.metrics.size import Size, model_size
from moesaic.metrics.speed import clock
from moesaic.objectives import CHUNK
from moesaic.observation.job import Job
from moesaic.recipe import Recipe
from moesaic.report.numbers import memory, span
from moesaic.result import save_applied
from moesaic.surgery import headers_of

P = ParamSpec("P")
STARTED = min(time.process_time(), 20.0)
"""Seconds that this process took to begin, whatever it has done since."""
CACHE = 2 << 30
"""Bytes of a layer's activations that are kept at most."""
SPILL = 4 << 30
"""Bytes of hidden states that are in memory at most."""
PAGES = 600_000
"""Bytes of card, page, picture and record."""
DECIDING, MEASURING = 300_000_000, 280_000_000
"""Bytes that libraries, text and the allocator hold beside the model while it is decided or learns,
and while it is measured: 75 MB are modules that a dry run does without, 110 MB readers of text."""
REMEMBERED = 350_000_000
"""Bytes of compiled products, of which the command line lets 512 be kept, 290 MB measured, and of
the holes between them: experts meet that many numbers of tokens, dense layers few."""
TRAINER = 115_000_000
"""Bytes of transformers' Trainer, which stays when training has ended."""
RUN, CHILD = 3.3, 2.3
"""A run, and a process that measures memory, begin and end in so many times what a dry run needs to
begin: they import compilers, training and data sets, too, and a run draws text and writes the
page."""
MEASURED = 150_000
"""Tokens of all text that ships to measure on, about."""
STREAM_BATCH = 2048
"""Tokens that pass a layer at a time."""
AGAIN = 4
"""Types of a group that are measured beside the chosen ones of others: the next wider one and the
next narrower one, in two rounds."""


@dataclass(frozen=True)
class Estimate:
    """A run, told beforehand."""

    output_bytes: int
    """Of the result's weight files."""
    output_parameters: int
    active_parameters: int
    """Under uniform routing, embeddings and head included."""
    active_ratio: float
    exact: bool
    """The four above are what will come out; otherwise the result's sizes follow from text."""
    model_type: str
    native: bool
    """The result is of its base's own architecture."""
    loads_in: dict[str, list[str]]
    """By engine, what it lacks for the result; an empty list where nothing is known to be."""
    peak_memory_bytes: int
    """Of this process, and of the device where that is the CPU; predicted."""
    disk_bytes: int
    """Files at the fullest moment, the result and those kept for resuming; predicted."""
    input_bytes: int
    """Of the original's weight files."""
    seconds: float
    """Predicted."""

    def as_json(self) -> JSON:
        """The fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class Stage:
    """A part of a run: what it holds, and what it computes."""

    memory: int = 0
    operations: float = 0.0
    calls: float = 0.0
    """Modules that are called, which takes a little however small they are."""
    bytes: float = 0.0
    """Read and written."""
    starts: float = 0.0
    """Processes that begin, each as long as a dry run needs to."""


def estimate(recipe: Recipe, machine: Machine | None = None) -> Estimate:
    """Predict what a recipe makes and takes; no weight is read and no text is looked at.

    Args:
        recipe: the run.
        machine: how fast things go; measured here by default.

    Raises:
        MoesaicError: the request cannot be met.
    """
    with foreseen(recipe) as steps:
        stages, exact, disk = [Stage(starts=RUN)], True, 0
        for step in steps:
            files = sum(f.stat().st_size for f in step.result.folder.iterdir())
            output_bytes = weight_bytes(step.result.folder)
            decided = bool(recipe.calibration.stats)
            stages += making(step.job, step.outline, output_bytes, decided, step.waiting)
            disk += files + 2 * sum(
                tensor.nbytes for tensor in step.outline.plan.tensors().values()
            )
            exact &= step.outline.exact
        source, dtype = steps[-1].result, parse_dtype(recipe.dtype)
        result = Built(source.config, dtype)
        if recipe.evaluation is not None:
            original = Built(steps[0].job.original.config, dtype)
            overhead = max(step.outline.libraries for step in steps)
            overhead += TRAINER * any(step.outline.trained for step in steps)
            last = steps[-1].outline
            overhead += result.bytes * (last.trained > last.added)  # the live model is the result
            stages += measuring(original, result, recipe.evaluation, recipe.device, overhead)
            disk += PAGES
        machine = machine or Machine.here(recipe.device)
        config = result.config
        return Estimate(
            output_bytes=weight_bytes(source.folder),
            output_parameters=result.size.total_parameters,
            active_parameters=result.size.active_parameters,
            active_ratio=result.size.active_ratio,
            exact=exact,
            model_type=str(config.model_type),
            native=result.native,
            loads_in=loads_in(config),
            peak_memory_bytes=machine.resident + max(stage.memory for stage in stages),
            disk_bytes=disk,
            input_bytes=steps[0].job.original.checkpoint.nbytes(),
            seconds=sum(machine.seconds(stage) for stage in stages),
        )


# --- in words ------------------------------------------------------------------------------------


LONG = 60.0
"""Seconds from which on a run is told beforehand."""
QUICK = 1e10
"""Operations that no machine takes long for; what takes no more is not worth a dry run."""


def _stopping_nothing(predict: Callable[P, str]) -> Callable[P, str]:
    """A prediction that is empty where it cannot be made: what is wrong, the run says better."""

    @wraps(predict)
    def cautious(*arguments: P.args, **options: P.kwargs) -> str:
        try:
            return predict(*arguments, **options)
        except Exception:
            return ""

    return cautious


@_stopping_nothing
def notice(recipe: Recipe) -> str:
    """What a run is predicted to take, in a line; empty where that is no minute."""
    if at_least(recipe) < QUICK:
        return ""
    prediction = estimate(recipe)
    sizes = f"weights {memory(prediction.input_bytes)} -> {memory(prediction.output_bytes)}"
    return in_words(
        prediction.seconds,
        prediction.peak_memory_bytes,
        f"{memory(prediction.disk_bytes)} disk",
        sizes,
    )


def at_least(recipe: Recipe) -> float:
    """Operations of a run's simplest form: two a weight and token, of what is read and learned."""
    tokens = 0
    for step in recipe.steps or (PruneConfig(),):
        learned = [getattr(step, name, 1) for name in ("batch", "length", "accumulate")]
        calibrated = (recipe.calibration.samples or SAMPLES) * (
            recipe.calibration.length or step.window
        )
        steps = getattr(step, "steps", 0)
        tokens += calibrated + 3 * math.prod(learned) * (100 if steps is None else steps)
    if recipe.evaluation is not None:
        tokens += 2 * (recipe.evaluation.max_tokens or MEASURED)
    return 2.0 * resolve(recipe.model).checkpoint.nbytes() * tokens  # of a byte each, at most


def in_words(seconds: float, peak: int, *more: str) -> str:
    """A prediction in a line, empty where it is of less than a minute.

    >>> in_words(59, 1 << 30), " ".join(in_words(840, 3 << 30, "1 GiB disk").split())
    ('', 'Predicted: 14 min, 3.00 GiB memory, 1 GiB disk.')
    """
    if seconds < LONG:
        return ""
    return f"Predicted: {', '.join([span(seconds), f'{memory(peak)} memory', *more])}."


# --- steps on headers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step of a recipe, carried out on headers."""

    job: Job[Arch]
    outline: Outline
    result: Weightless
    waiting: int
    """Bytes of new weights that are in memory at most, before they are written."""


@contextmanager
def foreseen(recipe: Recipe) -> Iterator[list[Step]]:
    """A recipe's steps carried out on headers; inside, their results are folders.

    Raises:
        MoesaicError: the request cannot be met.
    """
    with TemporaryDirectory(prefix="moesaic-") as work:
        first = Path(work) / "original"
        first.mkdir()
        source = foretold(recipe.model, first)
        steps: list[Step] = []
        for number, config in enumerate(recipe.steps):
            folder = Path(work) / f"step-{number}"
            steps.append(carried_out(source, config, recipe, folder))
            source = steps[-1].result
        yield steps


def outlined(
    source: Weightless, config: MethodConfig, recipe: Recipe, shape: Model | None = None
) -> tuple[Job[Arch], Outline]:
    """One step's job and its outline, from headers.

    Args:
        source: what the step starts from.
        config: the step.
        recipe: text, device and type.
        shape: a skeleton of the source, where one is at hand.
    """
    method = implementation(config)
    calibration, dtype = recipe.calibration, parse_dtype(recipe.dtype)
    args = RunArgs(model=source, calibration=calibration, device=recipe.device, dtype=dtype)
    job: Job[Arch] = Job(args, method.find, config.window, shape)
    for _ in method.settle(job):
        pass  # said by the run itself
    return job, method.outline(job)


def carried_out(source: Weightless, config: MethodConfig, recipe: Recipe, folder: Path) -> Step:
    """One step, on headers; its result's files but the weights, and their headers, are written.

    Args:
        source: what the step starts from.
        config: the step.
        recipe: text, device and type.
        folder: to make.
    """
    job, outline = outlined(source, config, recipe)
    folder.mkdir()
    writer = Outliner(folder)
    save_applied(source, outline.plan, folder, job.dtype, writer)
    if outline.plan.layers:
        outline.plan.save(folder)  # tune asks which layers were condensed
    return Step(job, outline, Weightless(recipe.out, folder), writer.waiting)


def weight_bytes(folder: Path) -> int:
    """Bytes of a folder's weight files, their index included."""
    files = [*folder.glob("model*.safetensors"), *folder.glob(INDEX_NAME)]
    return sum(file.stat().st_size for file in files)


def loads_in(config: Config) -> dict[str, list[str]]:
    """By engine, what it lacks for a checkpoint of this config; an empty list where nothing."""
    if not config.model_type.startswith(PREFIX):
        return {"transformers": [], **limits(config)}
    stacks = headers_of(config).values()
    obstacles = [KINDS[header["kind"]].obstacle(header) for stack in stacks for header in stack]
    reasons = list(dict.fromkeys(reason for reason in obstacles if reason))
    lacks = reasons or [f"{config.model_type}: export it --to native first"]
    return {"transformers": ["needs this package"], **dict.fromkeys(ENGINES, lacks)}


# --- a model -------------------------------------------------------------------------------------


class Built:
    """A model without values, and what its parts weigh."""

    def __init__(self, config: Config, dtype: torch.dtype | None) -> None:
        self.config, self._dtype = config, dtype

    @cached_property
    def model(self) -> Model:
        """On the meta device."""
        return shape_of(self.config, self._dtype)

    @cached_property
    def size(self) -> Size:
        """Its parameters."""
        return model_size(self.model)

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return sum(sizes_in(self.model))

    def held(self, device: str) -> int:
        """Bytes of its weights while it is looked at."""
        return sum(sizes_in(self.model, working_type(self.config, self._dtype, device)))

    @property
    def native(self) -> bool:
        """It is of its base's own architecture."""
        return not self.config.model_type.startswith(PREFIX)

    @property
    def depth(self) -> int:
        """Decoder layers."""
        return len(self.size.layers)

    @property
    def vocabulary(self) -> int:
        """Tokens that it knows."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def hidden(self) -> int:
        """Hidden size."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    @property
    def calls(self) -> float:
        """Modules that a batch of tokens passes, experts one by one."""
        return sum(20.0 + 3 * use.experts for use in self.size.layers)


# --- stages --------------------------------------------------------------------------------------


def making(
    job: Job[Arch], outline: Outline, output_bytes: int, decided: bool, waiting: int = 0
) -> list[Stage]:
    """Observing and deciding, training, and writing of one step.

    Args:
        job: its model and text.
        outline: its result, told beforehand.
        output_bytes: of the result's weights.
        decided: statistics are at hand.
        waiting: bytes of new weights that are in memory at most, before they are written.
    """
    model, dtype = job.shape, job.working_type
    uses = model_size(model).layers
    sizes = [sizes_in(layer, dtype) for layer in job.layers]
    layers = [sum(parts) for parts in sizes]
    # while a layer is read, stacks of experts are copied, of which the largest has two parts
    read = max(sum(parts) + max(parts) // 2 for parts in sizes)
    hidden = model.get_input_embeddings().weight.shape[1]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    item = (dtype or next(model.parameters()).dtype).itemsize
    tokens = job.planned_tokens
    run = sum(use.active for use in uses)
    every = sum(sizes_in(model, dtype))
    libraries = DECIDING + outline.libraries + REMEMBERED * any(use.experts for use in uses)
    stages = []
    if outline.passes and not decided:
        states = min(SPILL, 2 * tokens * hidden * item)
        dense = max(use.width for use in uses) if not job.base.experts else 0
        kept = min(CACHE, tokens * dense * item)
        batches = -(-tokens // STREAM_BATCH)
        stages.append(
            Stage(
                libraries
                + max(every - sum(layers), read + kept + outline.held)
                + states
                + outline.whole * every,
                outline.passes * 2.0 * run * tokens + outline.work * tokens,
                outline.passes * batches * sum(20.0 + 3 * use.experts for use in uses),
                outline.passes * every,
            )
        )
    if outline.trained:
        batch = min(outline.tokens, outline.batch)
        head = 16 * (1 + outline.taught) * vocabulary  # logits, log-softmax, gradients of both
        stages.append(
            Stage(
                round(
                    DECIDING
                    + (every - item * (outline.trained - outline.added))
                    + outline.beside
                    + 16 * outline.trained  # values, gradients and two moments, in float32
                    + item * outline.trained * (item < 4)  # what autocast makes of them
                    + batch * (kept_of_token(uses, hidden, item) + head)
                ),
                6.0 * (run + hidden * vocabulary) * outline.tokens * (1 + outline.taught / 3),
                60.0 * len(uses) * outline.tokens / batch,
                0.0,
            )
        )
    stages.append(Stage(libraries + waiting, bytes=2.0 * output_bytes))
    return stages


def kept_of_token(uses: Sequence[LayerUse], hidden: int, item: int) -> float:
    """Bytes that layers keep of a token from the forward to the backward pass.

    Around norms and attention 30 bytes of a hidden number whatever the type, and two numbers of it;
    of the FFN the gate, its activation, the up projection and their product; of each expert that
    runs what it is given, and what it makes of it.

    Args:
        uses: of the decoder layers.
        hidden: hidden size.
        item: bytes of a number in the type that the model computes in.
    """
    total = 0.0
    for use in uses:
        routed = 2 * 4 * use.top_k * (use.experts > 0)
        total += (30 + 2 * item + routed) * hidden + 4 * item * use.active_width
    return total


def logits_held(vocabulary: int, length: int) -> int:
    """Bytes of logits while two models are compared, in float32.

    Both models' of a batch; of a chunk of tokens the log-probabilities, their difference, the terms
    of the divergence, and these in float64.

    Args:
        vocabulary: tokens.
        length: of a window.
    """
    return 4 * (2 * vocabulary * max(BATCH, length) + 8 * max(CHUNK, vocabulary))


def measuring(
    original: Built, result: Built, settings: Evaluation, device: str, overhead: int = 0
) -> list[Stage]:
    """Quality of both models, then speed and memory.

    Args:
        original: what the result is compared with.
        result: the other.
        settings: how much is measured.
        device: where.
        overhead: bytes that deciding left behind: libraries, a model that was trained.
    """
    both = (original, result)
    quality = scoring(both, settings, device, overhead)
    if not settings.rounds:
        return [quality]
    head = logits_held(original.vocabulary, settings.length or 512)
    active = sum(model.size.active_parameters for model in both)
    calls = sum(model.calls for model in both)
    rounds = settings.rounds + 1
    speed = Stage(
        quality.memory - head,
        2.0 * active * (rounds + 1) * (512 + 32),
        calls * ((rounds + 1) * 33 + 10),
        (rounds * 32 + 10.0) * active * 4,
    )
    return [quality, replace(speed, starts=2 * CHILD)]


def scoring(
    models: Sequence[Built], settings: Evaluation, device: str = "cpu", overhead: int = 0
) -> Stage:
    """Quality of models on one text, side by side; tasks are not counted.

    Args:
        models: one, or two that are compared.
        settings: how much is measured.
        device: where.
        overhead: bytes beside the models.
    """
    tokens, vocabulary = settings.max_tokens or MEASURED, models[0].vocabulary
    kept = MEASURING + overhead + REMEMBERED * any(use.experts for use in models[0].size.layers)
    weights = sum(model.held(device) for model in models)
    if _layer_by_layer(models, settings, device):
        weights = round(2 * max(model.held(device) / model.depth for model in models))
    active = sum(model.size.active_parameters for model in models)
    variants = 1 + len(settings.compare)
    return Stage(
        kept + weights + logits_held(vocabulary, settings.length or 512),
        variants * 2.0 * active * tokens + 30.0 * vocabulary * tokens,
        sum(model.calls for model in models)
        * (variants * tokens / BATCH + settings.new_tokens + 40),
        4.0 * sum(model.bytes for model in models),
    )


def comparing(model: Built, changes: int, tokens: int, share: float = 1.0) -> Stage:
    """What changes of some layers do to a model's output, all looked at in passing.

    Args:
        model: with which each is compared.
        changes: how many.
        tokens: of the text, in windows of the default length.
        share: of the layers that a change runs anew; the head it always runs.
    """
    batches, active = -(-tokens // STREAM_BATCH), model.size.active_parameters
    head = model.hidden * model.vocabulary
    # a window's logits, those of a change, its log-softmax, and the terms of the divergence
    logits = 5 * 4 * model.vocabulary * MethodConfig.window
    states = min(SPILL, 4 * (1 + changes) * tokens * model.hidden)
    return Stage(
        memory=DECIDING + 2 * model.held("cpu") // model.depth + logits + states,
        operations=2.0 * tokens * (active + changes * (head + share * (active - head))),
        calls=(1 + changes * share) * model.calls * batches,
        bytes=float(model.bytes),
    )


def choosing_types(model: Built, groups: int, types: int) -> list[Stage]:
    """What each group of a model's tensors loses in each type, and again beside the chosen ones.

    Args:
        model: without values.
        groups: of tensors; each is rounded alone.
        types: that are not measured yet.
    """
    tokens = WINDOWS * MethodConfig.window
    held = PER_WEIGHT * model.size.total_parameters
    measured = (groups * types, AGAIN * groups)
    stages = [comparing(model, changes, tokens, share=0.5) for changes in measured]
    return [replace(stage, memory=stage.memory + held) for stage in stages]


def _layer_by_layer(models: Sequence[Built], settings: Evaluation, device: str) -> bool:
    """Whether models are measured without being loaded whole."""
    weights = sum(model.held(device) for model in models)
    return (settings.stream and not settings.rounds) or weights * ROOM > free_bytes(device)


def _drafting(models: Sequence[Built], settings: Evaluation, device: str = "cpu") -> Stage:
    """Drafts of layers that predict further tokens, each the work of a decoder layer and a head.

    Models that are loaded run once more for them; of others the last layer's outputs are kept.

    Args:
        models: as of :func:`scoring`.
        settings: how much is measured.
        device: where.
    """
    tokens, again = settings.max_tokens or MEASURED, not _layer_by_layer(models, settings, device)
    operations = calls = 0.0
    for model in models:
        further, hidden = predicting_layers(model.config), model.hidden
        each = model.size.layers[-1].active + hidden * (2 * hidden + model.vocabulary)
        operations += 2.0 * tokens * (again * model.size.active_parameters + further * each)
        calls += (again + further / model.depth) * model.calls * tokens / BATCH
    return Stage(operations=operations, calls=calls)


def observing(source: Weightless, recipe: Recipe) -> list[Stage]:
    """Statistics of experts and neurons, which other decisions look at.

    Args:
        source: the model.
        recipe: text, device and type.
    """
    model, arch = Built(source.config, None).model, base_arch(source.config)
    step: MethodConfig = SlimConfig(keep=0.5, score="energy", refit=False)
    if routed := arch.moe_layers(model) if isinstance(arch, MoEArch) else ():
        view = arch.view(arch.layers(model)[routed[0]])
        step = PruneConfig(keep=view.count, refit=False)
    job, outline = outlined(source, step, recipe)
    return making(job, outline, 0, decided=False)


@_stopping_nothing
def notice_of_observing(
    recipe: Recipe, further: Callable[[Built], list[Stage]] = lambda _: []
) -> str:
    """What observing is predicted to take, in a line; empty where that is no minute.

    Args:
        recipe: the model, text, device and type; it has no steps.
        further: what is done beside, with what was observed of a model.
    """
    if at_least(recipe) < QUICK:
        return ""
    with TemporaryDirectory(prefix="moesaic-") as folder:
        source = foretold(recipe.model, Path(folder))
        stages = [*observing(source, recipe), *further(Built(source.config, None))]
    return _told(stages, recipe.device)


@_stopping_nothing
def notice_of_choosing(model: str, types: Sequence[str]) -> str:
    """What types chosen by layer are predicted to take, in a line; empty where that is no minute.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        types: of files; by default all that are chosen from.
    """
    built = Built(resolve(model).config, None)
    groups = 3 * min(PARTS, built.depth) + 2  # attention and two of the FFN; embeddings, head
    return _told(choosing_types(built, groups, len(tensor_types(types or TYPES))))


@_stopping_nothing
def notice_of_scoring(
    names: Sequence[str],
    settings: Evaluation,
    device: str,
    dtype: torch.dtype | None,
    mtp: bool = False,
) -> str:
    """What measuring models is predicted to take, in a line; empty where that is no minute.

    Args:
        names: of one model or of two.
        settings: how much is measured.
        device: where.
        dtype: floating-point type; None for each model's own.
        mtp: drafts are looked at, too.
    """
    sources = [resolve(name) for name in names]
    tokens = settings.max_tokens or foretold_tokens(settings.data) or MEASURED
    if 2.0 * sum(source.checkpoint.nbytes() for source in sources) * tokens < QUICK:
        return ""
    models = [Built(source.config, dtype) for source in sources]
    settings = replace(settings, max_tokens=tokens, rounds=0)
    stages = [scoring(models, settings, device)]
    stages += [_drafting(models, settings, device)] if mtp else []
    return _told(stages, device, *(["tasks beside that"] if settings.tasks else []))


def _told(stages: Sequence[Stage], device: str = "cpu", *more: str) -> str:
    """What stages are predicted to take on this machine, in a line."""
    machine = Machine.here(device)
    peak = machine.resident + max(stage.memory for stage in stages)
    return in_words(sum(map(machine.seconds, stages)), peak, *more)


# --- this machine --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """How fast a machine is, and what a process of it holds before it begins."""

    operations: float
    """Floating-point operations a second, of a model's own matrix products."""
    call: float
    """Seconds of a module's call beside what it computes."""
    bytes: float
    """Bytes a second, read or written."""
    started: float
    """Seconds until a process can begin."""
    resident: int
    """Bytes of a process that has imported everything."""

    def seconds(self, stage: Stage) -> float:
        """The time of a stage."""
        return (
            stage.operations / self.operations
            + stage.calls * self.call
            + stage.bytes / self.bytes
            + stage.starts * self.started
        )

    @classmethod
    def here(cls, device: str = "cpu") -> Machine:
        """This machine, measured once for its versions and processor, kept beside other caches."""
        started, resident = STARTED, psutil.Process().memory_info().rss
        file = cache_folder() / "speed.json"
        key = [__version__, environment(device), EFFICIENCY, CALL]  # machines may share a cache
        try:
            cached: JSON = json.loads(file.read_text("utf-8"))
            if cached.pop("of") == key:
                return cls(**cached, started=started, resident=resident)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        speeds = measured(device)
        try:
            with whole_file(file) as partial:
                partial.write_text(json.dumps({"of": key, **speeds}), "utf-8")
        except OSError:
            pass  # nowhere to keep it
        return cls(**speeds, started=started, resident=resident)


def measured(device: str) -> dict[str, float]:
    """``operations``, ``call`` and ``bytes`` a second, of a few products and copies."""
    x, w = (torch.ones(64, 1024, device=device), torch.ones(1024, 1024, device=device))
    small = nn.Linear(8, 8, device=device)
    few = torch.ones(1, 8, device=device)

    def best(run: Callable[[], object], times: int) -> float:
        """The least time, which others that run beside it do not make longer."""
        took = []
        for _ in range(times):
            start = clock(x.device)
            run()
            took.append(clock(x.device) - start)
        return min(took)

    with torch.no_grad():
        product = best(lambda: x @ w, 49)
        call = best(lambda: small(few), 49)
        copied = best(lambda: w.clone(), 49)
    return {
        "operations": 2.0 * x.numel() * w.shape[1] / product * EFFICIENCY,
        "call": call * CALL,
        "bytes": 2.0 * w.numel() * 4 / copied / 4,
    }


EFFICIENCY = 0.5
"""The share of a single product's speed at which whole models run."""
CALL = 6.0
"""A module's call over that of a small linear one."""
