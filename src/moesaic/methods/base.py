"""Interface of all methods, trained or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from moesaic.arch.dense import PREFIX, Arch
from moesaic.arch.lookup import dense_arch, moe_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import MethodConfig
from moesaic.data.text import check_length, needs_tokenizer, positions
from moesaic.errors import MoesaicError
from moesaic.methods import figures
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.record import Figure, LayerRecord
from moesaic.surgery import headers_of
from moesaic.types import Config, Model, Values

C = TypeVar("C", bound=MethodConfig)
A = TypeVar("A", bound=Arch)
M = TypeVar("M", bound="Method[Any, Any]")


@dataclass
class Decision:
    """Result of a method's run on one model."""

    plan: Plan | None
    """Plan of the result. For methods that train: the plan before training. None if a converted
    model was only trained further."""
    analyses: Mapping[int, Values] = field(default_factory=dict)
    """Observations by layer index, as plain JSON."""
    comparisons: Mapping[str, Plan] = field(default_factory=dict)
    """Plans of the requested variants, decided from the same statistics."""
    summary: Values = field(default_factory=dict)
    """Observations about the whole model, as plain JSON; training curves under ``training``."""
    trained: Model | None = None
    """Live model with trained weights, which no plan can rebuild; None if nothing was trained."""
    retrained: Mapping[str, Callable[[], Model]] = field(default_factory=dict)
    """Variants that no plan can rebuild, such as trained ones: functions that return the live
    model, by name."""


@dataclass(frozen=True)
class Summary:
    """Sentences about a method's result, for titles and model cards."""

    title: str
    """Clause that follows the model's name, such as ``pruned by REAP to 6 of 8 experts``."""
    text: str
    """Sentences, one or two, on how the result differs from its model."""
    output: Values = field(default_factory=dict)
    """Keys that programs rely on in ``--json``."""


@dataclass(frozen=True)
class Outline:
    """Shape of a result, known before weights or text are read."""

    plan: Plan
    """Plan of the same size as the final one; empty if a model is only trained further."""
    exact: bool = True
    """True if the result will have exactly this shape, False if only nearly."""
    statistics: int = 0
    """Bytes of the largest layer's statistics."""
    trained: int = 0
    """Number of trainable parameters; if above 0, the whole model is in memory."""


class Method(ABC, Generic[C, A]):
    """Base class of all methods: decides how to change a model, by the options of its config."""

    ratio: str = "stored"
    """Size ratio shown as the headline of most results; see :class:`moesaic.record.Step`."""

    varies: ClassVar[str] = "variant"
    """Name of the option in which comparisons differ."""

    def __init__(self, config: C) -> None:
        self.config = config

    def compared(self: M, names: Iterable[str]) -> dict[str, M]:
        """Return copies of this method with the option :attr:`varies` set to each name, by name."""
        return {n: type(self)(replace(self.config, **{self.varies: n})) for n in names}

    @abstractmethod
    def find(self, config: Config) -> A:
        """Return the architecture of a model's config.

        Raises:
            MoesaicError: the method does not support such a model; names what would work.
        """

    def resolve_defaults(self, job: Job[A]) -> Iterator[str]:
        """Replace options whose default depends on the model by their values.

        Layers are refitted by default, unless decisions come from a file of statistics. Windows are
        at most as long as the model's positions.

        Yields:
            a sentence and its reason for each default that is not the most accurate one.

        Raises:
            MoesaicError: this model does not allow a given option.
        """
        config: Any = self.config
        calibration, text = job.args.calibration, job.args.text
        if calibration.length is not None:
            check_length(calibration.length, job.original.config)
        if text is None:
            text = getattr(config, "train", calibration.source)
        if hasattr(config, "length") and needs_tokenizer(text):
            most = positions(job.original.config) or config.length
            if config.length == type(config).length > most:  # not set by the caller
                self.config = config = replace(config, length=most)
            check_length(config.length, job.original.config)
        if "refit" in vars(config) and config.refit is None:
            self.config = replace(config, refit=not job.args.calibration.stats)
            if job.args.calibration.stats:
                yield "Statistics hold no tokens to refit on: nothing is refitted."

    @abstractmethod
    def run(self, job: Job[A]) -> Decision:
        """Run the method on a job's model and text, and return its decision.

        Raises:
            MoesaicError: the request cannot be met.
        """

    def outline(self, job: Job[A]) -> Outline:
        """Return the shape of what :meth:`run` will make, and the memory that it needs.

        Reads only headers: ``job.skeleton`` is a skeleton on the meta device, ``job.tokens`` is not
        used.

        Raises:
            MoesaicError: the request cannot be met, or the method cannot estimate it.
        """
        raise MoesaicError(f"{self.config.title} cannot estimate its result beforehand.")

    def described_config(self, plan: Plan | None) -> C:
        """Return the config for titles and text, with ``refit`` off if no layer was refitted."""
        config: Any = self.config
        if plan is None or not getattr(config, "refit", False):
            return config
        solved = any(layer.weights != "own" for layer in plan.layers.values())
        return config if solved else replace(config, refit=False)

    @abstractmethod
    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        """Return a title and sentences that describe the result and nothing else.

        Args:
            layers: records of all decoder layers of the result.
            decision: what :meth:`run` returned.
            active: the result's share of active parameters, None if it was not measured.
        """

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        """Return the figures of a result for the report.

        Args:
            layers: all decoder layers of the result, as only this step changed them.
            decision: what :meth:`run` returned.
        """
        return [
            *figures.refit_figures(layers),
            *figures.training_figures(decision.summary.get("training") or {}),
        ]


class DenseMethod(Method[C, Arch]):
    """Base class of methods for dense models."""

    def find(self, config: Config) -> Arch:
        """Return the architecture of a dense model's config.

        Raises:
            MoesaicError: the model is a mixture, was converted before, or is unknown.
        """
        return dense_arch(config)


def original(config: Config, instead: str) -> MoEArch:
    """Return the architecture of a mixture of experts that was not converted before.

    Raises:
        MoesaicError: the model was converted (the message ends with ``instead``), or is no known
            mixture of experts.
    """
    if config.model_type.startswith(PREFIX):
        raise MoesaicError(f"{config.model_type} was reduced already; {instead}.")
    return moe_arch(config)


def unskipped(config: Config) -> MoEArch:
    """Return the architecture of a mixture of experts whose routers skip no experts.

    Raises:
        MoesaicError: the model skips already, or is no known mixture of experts.
    """
    if any("beta" in header for stack in headers_of(config).values() for header in stack):
        raise MoesaicError("This model skips already; start from the one it was made from.")
    return moe_arch(config)
