"""The one interface of all methods, trained or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import dense_arch
from moesaic.config import MethodConfig
from moesaic.data.text import check_length, needs_tokenizer, positions
from moesaic.errors import MoesaicError
from moesaic.methods import figures
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.record import Figure, LayerRecord, strongest
from moesaic.types import Config, Model, Values

C = TypeVar("C", bound=MethodConfig)
A = TypeVar("A", bound=Arch)
M = TypeVar("M", bound="Method[Any, Any]")


@dataclass
class Decision:
    """What a method made of a model."""

    plan: Plan | None
    """What was decided; of a method that trains, where training began; None where a converted
    model was only trained further."""
    analyses: Mapping[int, Values] = field(default_factory=dict)
    """What was seen of each layer, as plain JSON."""
    comparisons: Mapping[str, Plan] = field(default_factory=dict)
    """Plans of the variants that were asked for, from the same statistics."""
    summary: Values = field(default_factory=dict)
    """What was found of the whole model, as plain JSON; training curves under ``training``."""
    trained: Model | None = None
    """The live model where weights were trained: no plan can rebuild it."""
    retrained: Mapping[str, Callable[[], Model]] = field(default_factory=dict)
    """Comparisons that no plan can rebuild, trained ones among them: by name a function that
    returns the live model."""


@dataclass(frozen=True)
class Summary:
    """What a method says of its result, in words, for titles and cards."""

    title: str
    """A clause: ``pruned by REAP to 6 of 8 experts``. The model's name stands before it."""
    text: str
    """One or two sentences: what the result is, as against the model it was made from."""
    output: Values = field(default_factory=dict)
    """Keys that programs rely on in ``--json``."""


@dataclass(frozen=True)
class Outline:
    """A result as it is known before weights or text are looked at."""

    plan: Plan
    """Any decision that weighs as much as the one that will be made; empty where a model is only
    trained further."""
    exact: bool = True
    """The result will be of this very shape; otherwise near it."""
    statistics: int = 0
    """Bytes of the largest layer's statistics."""
    backward: bool = False
    """Hidden states of all layers are kept, for a pass backward."""
    trained: int = 0
    """Parameters that learn; the whole model is then in memory."""


class Method(ABC, Generic[C, A]):
    """Decides what to make of a model, by the options of its config."""

    ratio: str = "stored"
    """What says most of its results; see :class:`moesaic.record.Step`."""

    varies: ClassVar[str] = "variant"
    """The option that comparisons differ in."""

    def __init__(self, config: C) -> None:
        self.config = config

    def compared(self: M, names: Iterable[str]) -> dict[str, M]:
        """The same method by other options, by the comparison's name."""
        return {n: type(self)(replace(self.config, **{self.varies: n})) for n in names}

    @abstractmethod
    def find(self, config: Config) -> A:
        """The architecture of a model's config.

        Raises:
            MoesaicError: the method cannot take such a model; says what would work.
        """

    def resolve_defaults(self, job: Job[A]) -> Iterator[str]:
        """Decide the options that were left open, by the model: :attr:`config` has none after.

        Layers are refitted by default, but for decisions from statistics. Windows are no longer
        than the model's positions.

        Yields:
            a sentence for each that is not what would lose least, and why.

        Raises:
            MoesaicError: an option was given that this model does not allow.
        """
        config: Any = self.config
        calibration, text = job.args.calibration, job.args.text
        if calibration.length is not None:
            check_length(calibration.length, job.original.config)
        if text is None:
            text = getattr(config, "train", calibration.source)
        if hasattr(config, "length") and needs_tokenizer(text):
            most = positions(job.original.config) or config.length
            if config.length == type(config).length > most:  # nobody asked for it
                self.config = config = replace(config, length=most)
            check_length(config.length, job.original.config)
        if "refit" in vars(config) and config.refit is None:
            self.config = replace(config, refit=not job.args.calibration.stats)
            if job.args.calibration.stats:
                yield "Statistics hold no tokens to refit on: nothing is refitted."

    @abstractmethod
    def run(self, job: Job[A]) -> Decision:
        """Look at the model, and decide.

        Raises:
            MoesaicError: the request cannot be met.
        """

    def outline(self, job: Job[A]) -> Outline:
        """The shape of what :meth:`run` will make, and the memory that this needs.

        Only headers are read: ``job.shape`` is a skeleton, and ``job.tokens`` are not asked for.

        Raises:
            MoesaicError: the request cannot be met, or the method cannot tell beforehand.
        """
        raise MoesaicError(f"{self.config.title} cannot tell beforehand what it will make.")

    def effective(self, plan: Plan | None) -> C:
        """The options without additions that no layer of a plan has, for words."""
        config: Any = self.config
        if plan is None or not getattr(config, "refit", False):
            return config
        solved = any(layer.weights != "own" for layer in plan.layers.values())
        return config if solved else replace(config, refit=False)

    @abstractmethod
    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        """What came of it, in words. Says what was done and nothing else.

        Args:
            layers: all decoder layers of the result.
            decision: what :meth:`run` returned.
            active: the result's active ratio, measured where it was measured.
        """

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        """What is drawn of it.

        Args:
            layers: all decoder layers of the result, as this step alone made them.
            decision: what :meth:`run` returned.
        """
        return [
            *figures.refitted(layers),
            *figures.trained(decision.summary.get("training") or {}),
        ]


class DenseMethod(Method[C, Arch]):
    """A method that takes dense models."""

    def find(self, config: Config) -> Arch:
        """The architecture of a dense model's config.

        Raises:
            MoesaicError: the model is a mixture of experts, was converted already, or is unknown.
        """
        return dense_arch(config)


def weights_of(layers: list[LayerRecord], decision: Decision) -> str:
    """The greatest change of weights in a result, one of :data:`moesaic.record.WEIGHTS`."""
    return "trained" if decision.trained is not None else strongest([x.weights for x in layers])
