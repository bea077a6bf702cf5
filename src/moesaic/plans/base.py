"""Layer kinds: the interface of a converted decoder layer, from its plan to its description.

One file holds a kind and everything about it. The rest of the package calls these methods and never
checks which kind it has.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch, LayerUse, RoutedModule
from moesaic.arch.mixture import FFN
from moesaic.config import types_of
from moesaic.errors import MoesaicError, quote
from moesaic.io.checkpoint import cast
from moesaic.io.naming import Naming
from moesaic.io.trust import check_fields
from moesaic.modules.running import LayerTokens
from moesaic.registry import Registry
from moesaic.types import JSON, Values

Header = Values
"""JSON of a converted layer in ``config.json``: enough to build its modules without values."""


class LiveState(dict[str, Tensor]):
    """Tensors of a live layer by name in memory; their stored names are the same."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__({name: tensor.detach() for name, tensor in layer.state_dict().items()})

    def stored(self, *prefixes: str) -> Iterator[tuple[str, str]]:
        """Yield the stored name and the name in memory of tensors under some prefixes."""
        return ((name, name) for name in self if name.startswith(prefixes))

    def read(self, stored: str) -> Tensor:
        """Return a tensor by its stored name."""
        return self[stored]


class DiskState:
    """Tensors of a layer in a checkpoint, which are read when they are used.

    Args:
        naming: the checkpoint's names and tensors.
        prefix: the start of the layer's names in memory.
        names: full names in memory of the layer's tensors, by full name on disk.
        dtype: function from a full name in memory to its dtype, None for the checkpoint's own.
    """

    def __init__(
        self,
        naming: Naming,
        prefix: str,
        names: Mapping[str, str],
        dtype: Callable[[str], torch.dtype | None],
    ) -> None:
        self._naming, self._prefix, self._dtype = naming, prefix, dtype
        number = f".{prefix.rstrip('.').rpartition('.')[2]}."
        starts = {disk.partition(number)[0] + number for disk in names if number in disk}
        self.stored_prefix = starts.pop() if len(starts) == 1 else prefix
        """Start of the layer's names on disk, such as ``backbone.layers.3.``."""
        self._names = {
            disk.removeprefix(self.stored_prefix): name.removeprefix(prefix)
            for disk, name in names.items()
        }
        self._in_memory = {*self._names.values()}

    def stored(self, *prefixes: str) -> Iterator[tuple[str, str]]:
        return ((d, n) for d, n in self._names.items() if n.startswith(prefixes))

    def read(self, stored: str) -> Tensor:
        dtype = self._dtype(self._prefix + self._names[stored])
        return self._naming.ordered(self.stored_prefix + stored, lambda t: cast(t, dtype))

    def __getitem__(self, name: str) -> Tensor:
        full = self._prefix + name
        return self._naming.read(full, lambda tensor: cast(tensor, self._dtype(full)))

    def __contains__(self, name: str) -> bool:
        return name in self._in_memory


State: TypeAlias = LiveState | DiskState
"""Tensors of one decoder layer, live or on disk. Names are relative to the layer.

Tensors are stored under other names and in other pieces than a model in memory has them: a
checkpoint holds every expert by itself, memory holds all experts of a layer in one tensor.
"""


@dataclass(frozen=True)
class Description:
    """Words and figures about a converted layer, for records."""

    text: str
    """New form of the layer in words, such as ``6 of 8 experts kept``."""
    shape: Values = field(default_factory=dict)
    """Figures that only this kind has."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the decoder layer that a plan is for."""

    hidden_size: int
    width: int
    """Neurons of its FFN, or of one expert if it routes."""
    experts: int = 0
    """Routed experts, 0 if it is dense."""
    padding: bool = False
    """True if the router can keep an empty place from being chosen."""

    @property
    def most(self) -> int:
        """Upper bound of the neurons that a plan may ask for."""
        return 8 * self.hidden_size + self.width * max(1, self.experts)


NO_EXPERTS = torch.empty(0, dtype=torch.int64, device="cpu")
"""Empty list of routed experts."""
PADDING = -1
"""Index that marks an empty place in a list of indices; the place is filled with zeros."""


def check_numbers(
    what: str,
    numbers: Tensor | None,
    count: int | None,
    padding: bool = False,
    lists: int = 1,
    places: int | None = None,
) -> None:
    """Refuse lists of experts, neurons or rows that a layer does not have.

    Args:
        what: plural noun for messages, such as "experts".
        numbers: indices (N,), or (L, N) for L lists; None is accepted.
        count: how many the layer has; None if that is checked later.
        padding: True if PADDING is allowed among them.
        lists: most lists.
        places: longest list; by default ``count``.

    Raises:
        ValueError: names the indices and the limit.
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
    places = places or (rows.unique().numel() if count is None else count)
    if len(rows) > lists or rows.shape[1] > places:
        shape = " x ".join(map(str, rows.shape))
        raise ValueError(f"there are places for {places} {what}, and not for {shape}")


@dataclass(frozen=True)
class LayerPlan(ABC):
    """Plan of one converted decoder layer: a header and tensors, and the code that applies them.

    Subclasses are frozen dataclasses. ``header`` and ``tensors`` together are the whole decision:
    by default all fields, those in ``held`` as tensors, the others as plain JSON.
    """

    kind: ClassVar[str]
    held: ClassVar[Mapping[str, str]] = {}
    """Field names by the names of their tensors in the plan's files; a field may be None."""

    @property
    def weights(self) -> str:
        """Change of the layer's weights, one of :data:`moesaic.record.WEIGHTS`."""
        return "refitted" if "down" in self.tensors() else "own"

    def header(self) -> JSON:
        """Return ``kind`` and the sizes of the new modules, as plain JSON."""
        return {"kind": self.kind, **{name: getattr(self, name) for name in self._plain()}}

    def tensors(self) -> dict[str, Tensor]:
        """Return index lists, routers and replaced weights, by name; ``down`` is a refitted one."""
        every = {name: getattr(self, field) for name, field in self.held.items()}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    @classmethod
    def load(cls, header: Header, tensors: Mapping[str, Tensor]) -> LayerPlan:
        """Return the plan of a header and tensors; the inverse of those two methods."""
        return cls(**{name: header[name] for name in cls._plain()}, **cls.fields_of(tensors))

    @classmethod
    def _plain(cls) -> list[str]:
        """Return the names of the fields that are no tensors."""
        return [field.name for field in fields(cls) if field.name not in cls.held.values()]

    @classmethod
    def fields_of(cls, tensors: Mapping[str, Tensor]) -> JSON:
        """Return the fields that are tensors, for :meth:`load`."""
        return {field: tensors[name] for name, field in cls.held.items() if name in tensors}

    @abstractmethod
    def check(self, sizes: Sizes) -> None:
        """Refuse indices and sizes that the layer does not have, before anything is built from
        them.

        Plans may come from strangers: what is not bounded here is written as the plan asks.

        Args:
            sizes: sizes of the layer that the plan is for.

        Raises:
            ValueError: names the wrong value.
        """

    @abstractmethod
    def sources(self, arch: Arch) -> tuple[str, ...]:
        """Return name prefixes, relative to the decoder layer, of all tensors that change."""

    @abstractmethod
    def convert(self, arch: Arch, state: State) -> Iterator[tuple[str, Tensor]]:
        """Yield the layer's new tensors, only those under :meth:`sources`.

        A pure function, used alike for a live model and for a checkpoint on disk.

        Yields:
            names relative to the decoder layer, and tensors; a tensor that is only moved keeps the
            form in which it is stored.
        """

    def masked(self, arch: Arch, layer: nn.Module) -> AbstractContextManager[nn.Module] | None:
        """Return a context in which a loaded layer itself computes what a converted one does.

        A converted copy of a mixture's layer takes gigabytes and seconds. None if only a copy
        computes the same.
        """
        return None

    def origin(self, stored: str) -> str:
        """Return the stored name of the old tensor whose values a new tensor holds.

        Args:
            stored: the new tensor's name, as :meth:`convert` yields it.
        """
        return stored

    @classmethod
    @abstractmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        """Give ``layers[index]`` the modules that a header describes, in place.

        Parameters that change are new ones on the meta device, without values.
        """

    @abstractmethod
    def describe(self, experts: int) -> Description:
        """Describe the converted layer in words and figures.

        Args:
            experts: routed experts that it had before; 0 if it was dense.
        """

    @classmethod
    def use(cls, layer: nn.Module, arch: Arch, header: Header, width: int) -> LayerUse:
        """Return the parameters of a converted layer, and those that a token uses, nominally.

        Args:
            layer: with its modules installed; a skeleton on the meta device will do.
            arch: the architecture.
            header: the layer's header.
            width: FFN width before, or width of one expert if it routed.
        """
        return arch.use(layer)

    @classmethod
    def routed(cls, layer: nn.Module, arch: Arch, header: Header) -> RoutedModule | None:
        """Return the module that chooses a token's experts, and their sizes; None without one."""
        return arch.routed(layer)

    def refit(self, site: LayerTokens[Any]) -> tuple[LayerPlan, JSON]:
        """Solve for weights with which the layer's output is nearest to the original's.

        ``site`` is the unchanged layer with its tokens.

        Returns:
            the new plan, and figures for the record: ``lost`` and ``recovered``, with ``strength``
            if one was chosen for the whole layer; empty if nothing was refitted.

        Raises:
            MoesaicError: layers of this kind cannot be refitted.
        """
        raise MoesaicError(f"Layers of kind {self.kind!r} are not refitted.")

    def refit_bytes(self, view: FFN, hidden: int, tokens: int) -> int:
        """Return the bytes that :meth:`refit` holds, from shapes.

        Args:
            view: the unchanged layer.
            hidden: hidden size.
            tokens: number of calibration tokens.
        """
        return 0

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        """Return why no other architecture can hold such a layer exactly; None if one may."""
        return f"Layers of kind {cls.kind} have no native form yet."

    @classmethod
    def exporter(cls, header: Header) -> Callable[..., Any] | None:
        """Return the function that writes dense layers of this kind as another architecture's.

        It has the signature of :func:`moesaic.exports.native.narrow_export`. None: they become
        narrower layers of the base's own class.
        """
        return None

    @classmethod
    def removes(cls, header: Header) -> bool:
        """Return True if the whole decoder layer is removed."""
        return False

    def mtp_plan(self) -> LayerPlan | None:
        """Return the same decision for an MTP layer, which was not observed.

        It has no refitted weights. None if MTP layers are kept unchanged.
        """
        return None

    def native(self) -> JSON | None:
        """Return the config values with which the base's own class holds the layer; None if it
        cannot.

        Keys: ``dense`` (width of a plain MLP); or, of what changed, ``experts`` (number of routed
        experts), ``width`` of each, ``shared`` (width of the shared path) and ``top_k``.
        """
        return None


def load_plan(header: Header, tensors: Mapping[str, Tensor]) -> LayerPlan:
    """Return the plan of a layer of any kind, with its fields checked against their types.

    Args:
        header: the layer's header.
        tensors: the layer's tensors, by name.

    Raises:
        KeyError, TypeError, ValueError: the kind is unknown, or header and tensors do not fit it or
            each other.
    """
    plan = KINDS[header["kind"]].load(header, tensors)
    check_fields({f.name: getattr(plan, f.name) for f in fields(plan)}, types_of(type(plan)))
    made: JSON = json.loads(json.dumps(plan.header()))
    wrong = [key for key in {**made, **header} if made.get(key) != header.get(key)]
    if wrong:
        raise ValueError(f"{', '.join(map(quote, wrong))} of its header do not fit its tensors")
    return plan


KINDS: Registry[type[LayerPlan]] = Registry(
    "moesaic.plans",
    {
        "carved": "moesaic.carving.carved_layer:CarvedLayer",
        "overlapping": "moesaic.carving.overlapping_layer:OverlappingLayer",
        "cut": "moesaic.plans.cut:CutLayer",
        "condensed": "moesaic.plans.condensed:CondensedLayer",
        "dropped": "moesaic.plans.condensed:DroppedLayer",
    },
)
"""Layer kinds by the name in their headers."""
