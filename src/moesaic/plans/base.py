"""A layer kind: what a converted decoder layer is, from its plan to the words that describe it.

One file of this folder holds one kind and everything about it. The rest of the package asks the
kind and never which kind it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.use import LayerUse, RoutedModule
from moesaic.config import types_of
from moesaic.errors import MoesaicError
from moesaic.io.headers import check_fields
from moesaic.modules.chance import Passage
from moesaic.registry import Registry
from moesaic.types import JSON, Values

V_co = TypeVar("V_co", covariant=True)
Header = Values
"""A converted layer in ``config.json``: enough to build its modules without values."""


class State(Protocol):
    """One decoder layer's tensors, live or on disk. Names are relative to the layer.

    Tensors are stored under other names and in other pieces than a model in memory has them: a
    checkpoint holds every expert by itself, memory holds all experts of a layer in one tensor.
    """

    def stored(self, *prefixes: str) -> Iterator[tuple[str, str]]:
        """The name as stored, and the name in memory, of tensors under some prefixes."""

    def read(self, stored: str) -> Tensor:
        """A tensor by the name it is stored under."""

    def __getitem__(self, name: str) -> Tensor:
        """A tensor by its name in memory."""

    def __contains__(self, name: str) -> bool:
        """Whether a name in memory is there."""


class Site(Protocol[V_co]):
    """A layer as it was, and the calibration tokens that reach it; a ``stream.Site`` is one."""

    @property
    def view(self) -> V_co:
        """A DenseFFN or a MoEFFN."""

    @property
    def layer(self) -> nn.Module:
        """The decoder layer."""

    @property
    def passage(self) -> Passage:
        """The tokens that run through it now."""

    def inputs(self) -> Iterator[Tensor]:
        """Batches of x (T, D), the FFN's input."""

    def targets(self) -> Iterator[Tensor | None]:
        """Batches of the original's output (T, D); None where it is the FFN's own of inputs()."""

    def activations(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of x (T, D) and of a dense FFN's h (T, M)."""


@dataclass(frozen=True)
class Description:
    """A layer in words and figures, for records."""

    text: str
    """The layer's new form, in words: ``6 of 8 experts stay``."""
    shape: Values = field(default_factory=dict)
    """Figures that only this kind has."""


@dataclass(frozen=True)
class Sizes:
    """What a decoder layer has that a plan takes parts of."""

    hidden_size: int
    width: int
    """Neurons of its FFN; of one expert, where it routes."""
    experts: int = 0
    """Routed experts, 0 where it is dense."""

    @property
    def most(self) -> int:
        """Neurons of all that a layer may have: more are no plan's of it."""
        return 8 * self.hidden_size + self.width * max(1, self.experts)


PADDING = -1
"""In a list of numbers: a place for what is not there, filled with zeros."""


def check_numbers(
    what: str, numbers: Tensor | None, count: int | None, padding: bool = False, lists: int = 1
) -> None:
    """Refuse lists of experts, neurons or rows that a layer has not, or has not so many of.

    Args:
        what: they are, for messages.
        numbers: (N,) or (L, N) of L lists; None for none.
        count: how many there are; None where that is found out when they are taken.
        padding: PADDING may stand among them, as often as there is room for.
        lists: as many may stand side by side.

    Raises:
        ValueError: says which.
    """
    if numbers is None or not numbers.numel():
        return
    if numbers.dtype != torch.int64 or numbers.dim() > 2:
        raise ValueError(f"{what} are numbered by {numbers.dtype} of shape {tuple(numbers.shape)}")
    rows = numbers.reshape(-1, numbers.shape[-1])
    low, high = (int(n) for n in numbers.aminmax())
    if low < (PADDING if padding else 0) or (count is not None and high >= count):
        limit = "" if count is None else f", and there are {count}"
        raise ValueError(f"{what} are numbered {low} to {high}{limit}")
    places = rows.unique().numel() if count is None else count
    if len(rows) > lists or rows.shape[1] > places:
        shape = " x ".join(map(str, rows.shape))
        raise ValueError(f"there are {places} {what}, and places for {shape}")


@dataclass(frozen=True)
class LayerPlan(ABC):
    """What becomes of one decoder layer: a header, tensors, and how they are put to use.

    Subclasses are frozen dataclasses. ``header`` and ``tensors`` together are the whole decision:
    by default all fields, those that are ``held`` as tensors, the others as plain JSON.
    """

    kind: ClassVar[str]
    refines: ClassVar[bool] = False
    """It leaves the layer the kind that it was and only adds to it; see :meth:`refine`."""
    held: ClassVar[Mapping[str, str]] = {}
    """By the name of a tensor in the plan's files the field that it is; a field may be None."""

    @property
    def weights(self) -> str:
        """What became of the layer's weights, one of :data:`moesaic.record.WEIGHTS`."""
        return "refitted" if "down" in self.tensors() else "own"

    def header(self) -> JSON:
        """``kind`` and the sizes of the new modules, as plain JSON."""
        return {"kind": self.kind, **{name: getattr(self, name) for name in self._plain()}}

    def tensors(self) -> dict[str, Tensor]:
        """Index lists, routers and replaced weights, by name; ``down`` is one that was refitted."""
        every = {name: getattr(self, field) for name, field in self.held.items()}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    @classmethod
    def load(cls, header: Header, tensors: Mapping[str, Tensor]) -> LayerPlan:
        """The plan of a header and tensors; the inverse of those two methods."""
        return cls(**{name: header[name] for name in cls._plain()}, **cls.fields_of(tensors))

    @classmethod
    def _plain(cls) -> list[str]:
        """The fields that are no tensors."""
        return [field.name for field in fields(cls) if field.name not in cls.held.values()]

    @classmethod
    def fields_of(cls, tensors: Mapping[str, Tensor]) -> JSON:
        """The fields that tensors are, for :meth:`load`."""
        return {field: tensors[name] for name, field in cls.held.items() if name in tensors}

    @abstractmethod
    def check(self, sizes: Sizes) -> None:
        """Refuse numbers and sizes that no such layer has, before anything is made of them.

        Plans come from strangers: what is not bounded here is written as it says.

        Args:
            sizes: of the layer that the plan is for.

        Raises:
            ValueError: says which.
        """

    @abstractmethod
    def sources(self, arch: Arch) -> tuple[str, ...]:
        """Prefixes of the names, relative to the decoder layer, of all tensors that change."""

    @abstractmethod
    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """The layer's tensors as they will be, those under :meth:`sources` only.

        A pure function, used alike for a live model and for a checkpoint on disk.

        Yields:
            names relative to the decoder layer, and tensors; a tensor that is only moved keeps the
            form in which it is stored.
        """

    def origin(self, stored: str) -> str:
        """The tensor of the layer before whose values come to be stored under a name.

        Args:
            stored: a name of :meth:`convert`.
        """
        return stored

    @classmethod
    @abstractmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        """Give ``layers[index]`` the modules that a header says, in place.

        Parameters that change are new ones on the meta device, without values.
        """

    @abstractmethod
    def describe(self, experts: int) -> Description:
        """What became of the layer.

        Args:
            experts: routed experts that it had before; 0 where it was dense.
        """

    @classmethod
    def use(cls, layer: nn.Module, arch: Arch, header: Header, width: int) -> LayerUse:
        """Parameters of a converted layer, and what a token uses of them, nominally.

        Args:
            layer: with its modules installed; a skeleton on the meta device will do.
            arch: the architecture.
            header: of the layer.
            width: the FFN width it had before; of one expert where it routed.
        """
        return arch.use(layer)

    @classmethod
    def refine(cls, use: LayerUse, layer: nn.Module, arch: Arch, header: Header) -> LayerUse:
        """The same of a kind that ``refines``, from what the layer uses without it."""
        return use

    @classmethod
    def routed(cls, layer: nn.Module, arch: Arch, header: Header) -> RoutedModule | None:
        """The module that chooses a token's experts, and their sizes; None where none does."""
        return arch.routed(layer)

    def refit(self, site: Site[Any], **options: bool) -> tuple[LayerPlan, JSON]:
        """The layer with weights solved for, so that its output is nearest to the original's.

        ``site`` is the layer as it was, and its tokens.

        Returns:
            the new plan, and ``lost``, ``recovered`` and ``strength`` for the record.

        Raises:
            MoesaicError: layers of this kind are not refitted.
        """
        raise MoesaicError(f"Layers of kind {self.kind!r} are not refitted.")

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        """The reason why no other architecture holds such a layer exactly; None if one may."""
        return f"Layers of kind {cls.kind} have no native form yet."

    @classmethod
    def exporter(cls, header: Header) -> Callable[..., Any] | None:
        """Return what writes dense layers of this kind as those of another architecture.

        It is called as :func:`moesaic.exports.narrowed.narrowed` is. None: they are written as
        narrower layers of the base's own.
        """
        return None

    @classmethod
    def removes(cls, header: Header) -> bool:
        """Whether the whole decoder layer is gone."""
        return False

    def mtp_plan(self) -> LayerPlan | None:
        """The same decision for a layer that follows the last one and that nobody looked at.

        Such layers predict further tokens. No weights that were solved for are in it; None if
        they stay as they are.
        """
        return None

    def native(self) -> JSON | None:
        """What a config of the base's own class must say to hold the layer; None: it cannot.

        Keys: ``dense`` (width of a plain MLP); or ``experts`` (routed experts that are left) and,
        where they are not as wide as they were, ``width`` and ``shared`` (of the shared path); or
        ``top_k`` (experts that a token runs).
        """
        return None


@dataclass(frozen=True)
class RoutingPlan(LayerPlan):
    """A layer whose tensors all stay, and whose router alone decides otherwise."""

    def sources(self, arch: Arch) -> tuple[str, ...]:
        return ()

    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def loaded(header: Header, tensors: Mapping[str, Tensor]) -> LayerPlan:
    """The plan of a layer of any kind, its fields of the types that they are said to have.

    Args:
        header: of the layer.
        tensors: its own, by name.

    Raises:
        KeyError, TypeError, ValueError: there is no such kind, or it has no such layer.
    """
    plan = KINDS[header["kind"]].load(header, tensors)
    check_fields({f.name: getattr(plan, f.name) for f in fields(plan)}, types_of(type(plan)))
    return plan


def same(a: LayerPlan, b: LayerPlan) -> bool:
    """Whether two layers' decisions are identical, tensors bitwise."""
    ta, tb = a.tensors(), b.tensors()
    return (
        a.header() == b.header()
        and ta.keys() == tb.keys()
        and all(torch.equal(ta[k], tb[k]) for k in ta)
    )


KINDS: Registry[type[LayerPlan]] = Registry(
    "moesaic.plans",
    {
        "carved": "moesaic.carving.carved_layer:CarvedLayer",
        "overlapping": "moesaic.carving.overlapping_layer:OverlappingLayer",
        "narrowed": "moesaic.plans.narrowed:NarrowedLayer",
        "pruned": "moesaic.plans.pruned:PrunedLayer",
        "slimmed": "moesaic.plans.slimmed:SlimmedLayer",
        "skipping": "moesaic.plans.skipping:SkippingLayer",
        "fewer": "moesaic.plans.fewer:FewerLayer",
        "condensed": "moesaic.plans.condensed:CondensedLayer",
        "dropped": "moesaic.plans.dropped:DroppedLayer",
    },
)
"""Layer kinds by the name in their headers."""
