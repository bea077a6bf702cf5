"""Forms of recipes whose size follows from one number, and the number that meets a budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import ExportArgs, MethodConfig
from moesaic.errors import MoesaicError
from moesaic.estimates import Built
from moesaic.exports.quantiser import WHOLE
from moesaic.fitting.config import BUDGETS, FitConfig
from moesaic.fitting.sizes import Steps, Weight
from moesaic.io.source import Source
from moesaic.ladder import Ladder, Shape
from moesaic.methods import METHODS
from moesaic.methods.mixtures import least_experts
from moesaic.plans.dropped import cache_leaders

BLOCK = 32
"""Weights that GGUF's types round together, at least."""


class Form(Ladder[Steps]):
    """Whole recipes of one form, of which one number is open."""

    @property
    def single(self) -> bool:
        """Its recipes are of one step."""
        return len(self.quick(self.shares[-1])) == 1


def forms(source: Source, config: FitConfig) -> list[Form]:
    """All forms of recipe that a model may be fitted by: ladders of methods, alone and in pairs.

    Raises:
        MoesaicError: the model is of no architecture that can be made smaller.
    """
    shape = _shape(source, config)
    every = (ladder for method in METHODS.values() for ladder in method.ladders(shape))
    ladders = [ladder for ladder in every if ladder.shares]
    size = config.memory or config.parameters
    # where weights are to go, what keeps them all serves no budget
    alone = [x for x in ladders if not x.reads_less or (config.active_parameters and not size)]
    first = [x for x in ladders if not x.reads_less or config.active_parameters]
    singles = [
        Form(x.name, x.shares, _after((), x.quick), x.careful and _after((), x.careful))
        for x in alone
    ]
    fills = [ladder for ladder in ladders if ladder.fills]
    return singles + [form for fill in fills[-1:] for form in _pairs(first, fill)]


def ending(config: FitConfig) -> ExportArgs:
    """The file that recipes end in: of one type, or of the best of several by layer."""
    if len({*config.types} - {WHOLE}) > 1:
        return ExportArgs(to="gguf", memory=config.memory, among=config.types)
    return ExportArgs(to="gguf", type=config.types[0])  # type: ignore[arg-type]


def _shape(source: Source, config: FitConfig) -> Shape:
    """What ladders follow from, read off headers.

    Raises:
        MoesaicError: no layer routes, or the architecture is unknown.
    """
    arch, model = base_arch(source.config), Built(source.config, None).model
    itemsize = next(model.parameters()).element_size()
    multiple = BLOCK if config.types else 16 // itemsize  # rows of 16 bytes are what kernels like
    layers = arch.layers(model)
    if not isinstance(arch, MoEArch):
        widths = [arch.width_of(layer) for layer in layers]
        return Shape(len(layers), min(widths), multiple, native=config.plain)
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
        uneven=not view.odd and not config.plain,
        replaceable=arch.entry is None,
        leaders=len(cache_leaders(source.config) & {*routed}),
        native=config.plain,
    )


def _pairs(ladders: Sequence[Ladder[MethodConfig]], fill: Ladder[MethodConfig]) -> Iterator[Form]:
    """A rung of one ladder, and what is left of the budget filled by another."""
    make = fill.careful or fill.quick
    for rung in (rung for ladder in ladders for rung in ladder.rungs):
        yield Form(
            f"{rung.name}, {fill.name}",
            fill.shares,
            _after((rung.quick,), fill.quick),
            _after((rung.careful,), make),
        )


def _after(first: Steps, make: Callable[[float], MethodConfig]) -> Callable[[float], Steps]:
    return lambda share: (*first, make(share))


def filed(form: Form, file: ExportArgs) -> Form:
    """The same form with a file in the end."""

    def ended(make: Callable[[float], Steps]) -> Callable[[float], Steps]:
        return lambda share: (*make(share), file)

    careful = form.careful and ended(form.careful)
    return Form(f"{form.name}, {file.called}", form.shares, ended(form.quick), careful)


def largest(
    shares: Sequence[float], fits: Callable[[float], bool], guess: int | None = None
) -> float | None:
    """The largest share that fits, where all below it do; None where none does.

    Args:
        shares: rising.
        fits: asked as seldom as can be.
        guess: the place where it is looked for first.

    >>> largest([0.25, 0.5, 0.75, 1.0], lambda share: share < 0.8), largest([0.5], lambda _: False)
    (0.75, None)
    >>> asked = []
    >>> largest([1, 2, 3, 4, 5, 6, 7, 8], lambda s: not asked.append(s) and s < 6, guess=4), asked
    (5, [5, 6])
    """
    low, high = 0, len(shares)  # all before low fit, none from high on
    while low < high:
        middle = (low + high) // 2
        if guess is not None and low <= guess < high:
            middle, guess = guess, guess + 1
        low, high = (middle + 1, high) if fits(shares[middle]) else (low, middle)
    return shares[low - 1] if low else None


def guessed(shares: Sequence[float], least: Weight, most: Weight, config: FitConfig) -> int:
    """The place of the largest share that fits if sizes rise evenly.

    Args:
        shares: rising.
        least: of the first.
        most: of the last.
        config: the budget.
    """
    places = []
    for name in BUDGETS:
        budget, low, high = (getattr(sizes, name) for sizes in (config, least, most))
        if budget is not None and high > low:
            part = (budget - low) / (high - low)
            share = shares[0] + part * (shares[-1] - shares[0])
            places.append(bisect_right(shares, share + 1e-9) - 1)
    return max(0, min(places, default=len(shares) - 1))
