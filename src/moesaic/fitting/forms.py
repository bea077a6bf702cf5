"""Forms of recipes whose results differ only in size: the families of all methods, and pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import ExportArgs, MethodConfig
from moesaic.errors import MoesaicError
from moesaic.exports.quantiser import WHOLE
from moesaic.families import Family, Shape
from moesaic.fitting.config import FitConfig
from moesaic.io.source import Source
from moesaic.methods import METHODS
from moesaic.methods.mixtures import least_experts
from moesaic.plans.condensed import cache_leaders
from moesaic.sizes import Skeleton

BLOCK = 32
"""Weights that GGUF's types round together, at least."""


@dataclass(frozen=True, eq=False)
class Form:
    """Recipes of one family of configs, after one config of another family or none."""

    family: Family[Any]
    before: Family[Any] | None = None
    first: MethodConfig | None = None
    """Config of the step ``before``."""

    @property
    def name(self) -> str:
        """Names of the families, and the size of the first step."""
        if self.before is None:
            return self.family.name
        ends = self.before.configs[0], self.before.configs[-1]
        size = next(
            (
                f"{getattr(self.first, f.name):g} "
                for f in fields(ends[0])
                if len({getattr(end, f.name) for end in ends}) > 1
            ),
            "",
        )
        return f"{self.before.name} {size}, {self.family.name}".replace(" ,", ",")

    @property
    def single(self) -> bool:
        """True if the recipes have one step."""
        return self.first is None

    @property
    def count(self) -> int:
        """Number of recipes, whose results rise in size."""
        return len(self.family.configs)

    def steps(self, place: int, careful: bool = False) -> tuple[MethodConfig, ...]:
        """Return the steps of recipe ``place``, quick to carry out or, if ``careful``, refitted."""
        steps = [] if self.first is None else [(self.before, self.first)]
        every = [*steps, (self.family, self.family.configs[place])]
        return tuple(family.careful(c) if careful and family else c for family, c in every)


def places_priced(family: Family[Any]) -> list[int]:
    """Return the numbers of the configs whose KL is estimated, both ends among them.

    >>> places_priced(Family("", range(20), lambda c: c, priced=3))
    [0, 10, 19]
    """
    count = len(family.configs)
    return sorted({round(n) for n in np.linspace(0, count - 1, min(count, family.priced))})


def forms(source: Source, config: FitConfig) -> list[Form]:
    """Return the forms of recipe that suit a model: families of methods, single and in pairs.

    Raises:
        MoesaicError: the model is of no architecture that can be made smaller.
    """
    shape = _shape(source, config)
    every = [f for m in METHODS.values() for f in m.families(shape) if f.configs]
    size = config.memory or config.parameters
    # a family that keeps all weights meets no budget of weights
    single = [f for f in every if not f.reads_less or (config.active_parameters and not size)]
    first = [f for f in every if not f.reads_less or config.active_parameters]
    fills = [f for f in every if f.fills]
    pairs = [Form(fill, f, c) for fill in fills[-1:] for f in first for c in f.first]
    return [*map(Form, single), *pairs]


def ending(config: FitConfig) -> ExportArgs:
    """Return the file that recipes end in: of one type, or of the best of several by layer."""
    if len({*config.types} - {WHOLE}) > 1:
        return ExportArgs(to="gguf", memory=config.memory, among=config.types)
    return ExportArgs(to="gguf", type=config.types[0])  # type: ignore[arg-type]


def _shape(source: Source, config: FitConfig) -> Shape:
    """Return the sizes of a model, read from headers, that families of configs depend on.

    Raises:
        MoesaicError: no layer routes, or the architecture is unknown.
    """
    arch, model = base_arch(source.config), Skeleton(source.config, None).model
    itemsize = next(model.parameters()).element_size()
    multiple = BLOCK if config.types else 16 // itemsize  # rows of 16 bytes are what kernels like
    layers = arch.layers(model)
    if not isinstance(arch, MoEArch):
        widths = [arch.width_of(layer) for layer in layers]
        return Shape(len(layers), min(widths), multiple, native=config.native_only)
    routed = arch.moe_layers(model)
    if not routed:
        raise MoesaicError("No layer of this model routes.")
    view = arch.mixture(layers[routed[0]])
    return Shape(
        layers=len(routed),
        width=view.width,
        multiple=multiple,
        experts=view.count,
        fewest=least_experts(arch, view.top_k, source.config),
        groups=arch.group_count(source.config),
        top_k=0 if arch.chosen is None else view.top_k,
        shared=bool(view.shared_width),
        uneven=not view.odd and not config.native_only,
        replaceable=arch.entry is None,
        leaders=len(cache_leaders(source.config) & {*routed}),
        native=config.native_only,
    )


def largest(numbers: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest number that fits, where all below it do; None where none does.

    >>> largest(range(5), lambda n: n < 4), largest([0], lambda _: False)
    (3, None)
    """
    low, high = 0, len(numbers)  # all before low fit, none from high on
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(numbers[middle]) else (low, middle)
    return numbers[low - 1] if low else None
