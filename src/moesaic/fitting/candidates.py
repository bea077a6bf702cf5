"""Candidates: recipes whose size follows from one number, and the number that meets a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import ExportArgs, MethodConfig
from moesaic.errors import MoesaicError
from moesaic.estimates import Built
from moesaic.fitting.config import BUDGETS, FitConfig
from moesaic.fitting.costs import Steps, Weight
from moesaic.foreign import JSON
from moesaic.io.source import Source
from moesaic.methods.cdmoe.config import CondenseConfig
from moesaic.methods.channels.config import WINAConfig
from moesaic.methods.lexi.config import LExIConfig
from moesaic.methods.mixtures import least_experts
from moesaic.methods.more.config import MoREConfig
from moesaic.methods.naee.config import PruneConfig
from moesaic.methods.slim.config import BEST, PAIRS_BYTES, SlimConfig, pairs_bytes

BLOCK = 32
"""Weights that GGUF's types round together, at least."""
KEPT = (7 / 8, 3 / 4, 1 / 2)
"""Shares of the experts that stay before those are made narrower."""
FINEST = 128
"""Shares that are told apart where no width limits them."""
QUICK = {"shared": "rank", "attention": "cosine", "nothing": "cosine"}
"""Searches of layers in one pass over the text, by what stays of them."""
SEARCHED = 8
"""Layers up to which they are searched as the paper does, trying each in every round."""


@dataclass(frozen=True)
class Family:
    """Recipes of one form, of which one number is open."""

    name: str
    shares: tuple[float, ...]
    """The values of that number, rising: the larger, the larger the result."""
    rough: Callable[[float], Steps]
    """The recipe that is quick to make."""
    fine: Sequence[Callable[[float], Steps]] = ()
    """The same size, made with more care."""


# --- families ------------------------------------------------------------------------------------


def families(source: Source, config: FitConfig) -> list[Family]:
    """All forms of recipe that a model may be fitted by.

    Raises:
        MoesaicError: the model is of no architecture that can be made smaller.
    """
    arch, built = base_arch(source.config), Built(source.config, None)
    if isinstance(arch, MoEArch):
        found = [*_of_mixture(source, arch, built, config)]
    else:
        found = [*_of_dense(arch, built, config)]
    if not config.types:
        return found
    return [made for type in config.types for made in _as_files(found, type, config)]


def _as_files(found: Sequence[Family], type: str, config: FitConfig) -> Iterator[Family]:
    """The same forms, and none, with a GGUF file made in the end.

    It is of one type, and where that is made with care, of the best of all for each layer.
    """
    last = ExportArgs(to="gguf", type=type)  # type: ignore[arg-type]
    ends = (last, *mixed(config))
    yield Family(type, (1.0,), lambda _: (last,))

    def ended(family: Family) -> Family:
        fine = tuple(_before(steps, end) for steps in family.fine for end in ends)
        return Family(f"{family.name}, {type}", family.shares, _before(family.rough, last), fine)

    yield from map(ended, found)


def mixed(config: FitConfig) -> Sequence[ExportArgs]:
    """The file whose layers have the best of several types; nothing where one was asked for."""
    if len({*config.types} - {"f32"}) < 2:
        return ()
    return (ExportArgs(to="gguf", memory=config.memory, among=config.types),)


def _of_dense(arch: Arch, built: Built, config: FitConfig) -> Iterator[Family]:
    widths = [arch.width_of(layer) for layer in arch.layers(built.model)]
    shares = _widths(min(widths), _itemsize(built), config)
    yield Family("slim", shares, _slim(), (_slim(refit=True),))
    if config.active_parameters and not config.memory and not config.parameters:
        every = tuple(n / FINEST for n in range(FINEST // 4, FINEST + 1, 2))
        more = partial(_carve, MoREConfig, layers="all", experts=64, top_k=0, router="ridge")
        if not config.plain:
            yield Family("carve", every, more, (partial(more, refit=True),))
            yield Family("channels", every, partial(_carve, WINAConfig))


def _of_mixture(source: Source, arch: MoEArch, built: Built, config: FitConfig) -> Iterator[Family]:
    layers, model_config = arch.layers(built.model), source.config
    routed = arch.moe_layers(built.model)
    if not routed:
        raise MoesaicError("No layer of this model routes.")
    view = arch.mixture(layers[routed[0]])
    groups = arch.group_count(model_config)
    least = least_experts(arch, view.top_k, model_config)
    counts = range(least, view.count + 1, groups)
    uneven = not view.odd and not config.plain
    pairs = pairs_bytes(view.count, view.width) <= PAIRS_BYTES
    slim = partial(_slim, score=BEST) if pairs else _slim
    narrower = shares = _widths(view.width, _itemsize(built), config)
    if uneven:
        least_share = -(-FINEST // view.width)  # a neuron of each expert
        narrower = tuple(n / FINEST for n in range(least_share, FINEST + 1))
    yield Family(
        "prune",
        tuple(n / view.count for n in counts),
        _prune(view.count),
        (_prune(view.count, refit=True),),
    )
    total = len(routed) * view.count
    if len(routed) > 1 and not config.plain:
        sums = range(len(routed) * least, total + 1, max(1, total // FINEST))
        spread = partial(_prune, view.count, uniform=False)
        yield Family(
            "prune spread", tuple(n / total for n in sums), spread(), (spread(refit=True),)
        )
    yield Family("slim", shares, _slim(), (slim(refit=True),))
    end: JSON = {"uneven": True, "spread": "sensitivity"} if uneven else {}
    last, fine = _slim(**end), slim(refit=True, **end)
    name = "slim uneven, spread" if uneven else "slim"
    if uneven:
        alone: JSON = {"uneven": True}
        yield Family("slim uneven", narrower, _slim(**alone), (slim(refit=True, **alone),))
        yield Family(name, narrower, last, (fine,))
    if view.shared_width:
        half = {**end, "shared": 0.5}
        yield Family(f"{name} shared", narrower, _slim(**half), (slim(refit=True, **half),))
    kept = {least_of(counts, share * view.count) for share in KEPT} - {view.count}
    for count in sorted(kept, reverse=True):
        yield Family(
            f"prune {count}, {name}",
            narrower,
            _after(PruneConfig(keep=count, refit=False), last),
            (_after(PruneConfig(keep=count, refit=True), fine),),
        )
    kinds = ["shared"] if view.shared_width else []
    kinds += [] if config.plain else ["attention", "nothing"]
    thin = Family(name, narrower, last, (fine,))
    for kind in kinds:
        dropped = len(routed) - (kind == "nothing" and 0 in routed)
        yield from _of_layers(kind, len(routed), dropped, thin, config)
    if config.active_parameters and arch.chosen is not None:
        for number in sorted({round(share * view.top_k) for share in (0.75, 0.5)}):
            if 0 < number < view.top_k:
                few = LExIConfig(experts_per_token=number)
                careful = (_after(few, fine),)
                yield Family(f"{number} a token, {name}", narrower, _after(few, last), careful)
    if config.active_parameters and not (config.memory or config.parameters):
        if arch.chosen is not None and view.top_k > 1:
            parts = 1 if config.plain else len(routed)
            calls = range(parts, view.top_k * parts)
            every = tuple(n / (view.top_k * parts) for n in calls)
            yield Family("experts a token", every, _fewer(view.top_k, not config.plain))
        if not config.plain:
            every = tuple(n / FINEST for n in range(FINEST // 4, FINEST + 1, 2))
            yield Family("channels", every, partial(_carve, WINAConfig))


def _of_layers(
    kind: str, routed: int, most: int, thin: Family, config: FitConfig
) -> Iterator[Family]:
    """Layers condensed, alone and before the others are made narrower.

    Args:
        kind: what stays of them.
        routed: layers that route.
        most: of them may be condensed.
        thin: what makes layers narrower.
        config: what is asked for.
    """

    search = {} if routed <= SEARCHED else {"layer_search": QUICK[kind]}
    options: JSON = {"keep": kind, "refit": False, **_gate(config), **search}
    refit = kind == "shared"
    for number in _numbers(routed):
        quick, careful = (
            CondenseConfig(layers=number, **{**options, "refit": again}) for again in (False, refit)
        )
        yield Family(
            f"condense {number} to {kind}, {thin.name}",
            thin.shares,
            _after(quick, thin.rough),
            tuple(_after(careful, fine) for fine in thin.fine),
        )
    made = partial(_condense, routed, **options)
    yield Family(
        f"condense to {kind}",
        tuple(1 - n / routed for n in range(most, 0, -1)),
        made,
        (partial(made, refit=True),) if refit else (),
    )


def _gate(config: FitConfig) -> JSON:
    """Native results have no gate token by token."""
    return {"shared_gate": "mean"} if config.plain else {}


def _numbers(routed: int) -> list[int]:
    """How many layers are condensed before the others are made narrower.

    >>> _numbers(6), _numbers(24), _numbers(1)
    ([1, 2, 3], [4, 8, 12], [])
    """
    found = {max(1, round(share * routed)) for share in (1 / 6, 1 / 3, 1 / 2)}
    return sorted(found - {routed})


def least_of(counts: Sequence[int], wanted: float) -> int:
    """The smallest of some numbers that is not below a wish; the greatest where all are.

    >>> least_of([4, 8, 12], 6), least_of([4, 8], 9)
    (8, 8)
    """
    return next((count for count in counts if count >= wanted), counts[-1])


def _itemsize(built: Built) -> int:
    return next(built.model.parameters()).element_size()


def _widths(width: int, itemsize: int, config: FitConfig) -> tuple[float, ...]:
    """The shares of a width that kernels like, rising: rows of 16 bytes, of a file blocks of 32.

    >>> size = FitConfig(memory=1)
    >>> _widths(32, 4, size)[:2], _widths(32, 2, size)[:2], len(_widths(1408, 2, size))
    ((0.125, 0.25), (0.25, 0.5), 22)
    >>> _widths(96, 4, FitConfig(memory=1, types=("q8_0",)))[:2]
    (0.3333333333333333, 0.6666666666666666)
    """
    row = BLOCK if config.types else 16 // itemsize
    step = next((s for s in (64, 32, 16, 8) if row <= s <= width // 8), row)
    return tuple(n / width for n in range(step, width + 1, step))


def _slim(**options: object) -> Callable[[float], Steps]:
    options = {"score": "energy", "refit": False, **options}

    def steps(share: float) -> Steps:
        multiple = 1 if options.get("uneven") else None
        return (SlimConfig(keep=share, **{"multiple": multiple, **options}),)  # type: ignore[arg-type]

    return steps


def _prune(count: int, uniform: bool = True, refit: bool = False) -> Callable[[float], Steps]:
    def steps(share: float) -> Steps:
        keep = round(share * count) if uniform else share * count
        return (PruneConfig(keep=keep, uniform=uniform, refit=refit),)

    return steps


def _fewer(top_k: int, by_layer: bool) -> Callable[[float], Steps]:
    return lambda share: (LExIConfig(experts_per_token=share * top_k, by_layer=by_layer),)


def _condense(routed: int, share: float, **options: object) -> Steps:
    number = round((1 - share) * routed)
    return (CondenseConfig(layers=number, **options),)  # type: ignore[arg-type]


def _carve(kind: type[MethodConfig], share: float, **options: object) -> Steps:
    return (kind(active=share, **options),)  # type: ignore[call-arg]


def _before(steps: Callable[[float], Steps], last: ExportArgs) -> Callable[[float], Steps]:
    return lambda share: (*steps(share), last)


def _after(first: MethodConfig, then: Callable[[float], Steps]) -> Callable[[float], Steps]:
    return lambda share: (first, *then(share))


# --- sizes ---------------------------------------------------------------------------------------


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
        limit, low, high = (getattr(of, name) for of in (config, least, most))
        if limit is not None and high > low:
            part = (limit - low) / (high - low)
            wanted = shares[0] + part * (shares[-1] - shares[0])
            places.append(sum(share <= wanted + 1e-9 for share in shares) - 1)
    return max(0, min(places, default=len(shares) - 1))
