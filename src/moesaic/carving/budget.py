"""Active ratio, counted one way for all methods, and solvers for a target.

The *active ratio* is parameters used per token over total parameters, counting only the linear
projections of attention and FFN in the decoder layers. Embeddings, head, norms, biases and routers
are left out (MoRE Eq. 16: APR; PR = 1 - APR).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from moesaic.arch.dense import Arch, weight_of
from moesaic.errors import MoesaicError

NEAR = 0.005
"""Share of a layer's neurons by which its petals may miss a target."""

APART = 0.02
"""Largest difference from the requested active ratio if widths must be multiples."""


@dataclass(frozen=True)
class LayerSize:
    """Sizes of one dense decoder layer; ``attention`` and ``ffn`` count projection weights."""

    attention: int
    ffn: int
    width: int
    """Neurons of the FFN (intermediate size)."""
    hidden: int = 0
    """Hidden size."""


def layer_sizes(model: nn.Module, arch: Arch) -> list[LayerSize]:
    """Count the projections of each layer of a dense model, which may be a skeleton."""
    sizes = []
    for layer in arch.layers(model):
        use = arch.use(layer)
        hidden = weight_of(arch.ffn_of(layer), arch.ffn.down).shape[0]
        sizes.append(LayerSize(use.attention, use.ffn, use.width, hidden))
    return sizes


def active_ratio(sizes: Sequence[LayerSize], active_width: Mapping[int, float]) -> float:
    """Return the share of the projections' parameters that one token uses.

    Args:
        sizes: the dense layers.
        active_width: neurons used per token by layer; all of them if a layer is not given.
    """
    total = sum(s.attention + s.ffn for s in sizes)
    idle = sum(sizes[i].ffn * (1 - width / sizes[i].width) for i, width in active_width.items())
    return 1 - idle / total


def ffn_share(sizes: Sequence[LayerSize], layers: Sequence[int], active: float) -> float:
    """Return the share a of each chosen layer's neurons that a token may use: PR = f (1 - a).

    Every chosen layer gets the same share. Negative if the target is out of reach.
    """
    total = sum(s.attention + s.ffn for s in sizes)
    chosen = sum(sizes[i].ffn for i in layers)
    return 1 - (1 - active) * total / chosen


@dataclass(frozen=True)
class Split:
    """Division of one layer's neurons into a backbone and ``experts`` petals of one size."""

    backbone: int
    petal: int
    experts: int
    top_k: int

    @property
    def active_width(self) -> int:
        return self.backbone + self.top_k * self.petal


def split_for_target(
    sizes: Sequence[LayerSize],
    layers: Sequence[int],
    active: float,
    experts: int,
    top_k: int,
    multiple: int | None = None,
) -> dict[int, Split]:
    """Return backbone and petal sizes that meet an active ratio, in closed form.

    A token idles ``experts - top_k`` petals, so the petal is ``(1 - a) m / (experts - top_k)``, and
    the backbone has the other neurons.

    Args:
        sizes: all layers.
        layers: indices of those to carve.
        active: the target, above 0, at most 1.
        experts: petals of a layer.
        top_k: petals that a token runs.
        multiple: both sizes are a multiple of this, as near to the target as that allows; None for
            a multiple that hardly changes a layer (:func:`alignment`).

    Raises:
        MoesaicError: the target is out of reach; the message names the nearest that works.

    >>> sizes = [LayerSize(884_736, 2_654_208, 1536)]
    >>> split_for_target(sizes, [0], 0.8, 24, 11, multiple=32)  # 409.6 neurons would idle
    {0: Split(backbone=768, petal=32, experts=24, top_k=11)}
    """
    if not layers:
        raise MoesaicError("No layer is chosen to be carved.")
    if not 0 < top_k < experts:
        raise MoesaicError(f"top_k {top_k} must be at least 1 and below experts {experts}.")
    if multiple:
        _check_multiple([sizes[i].width for i in layers], experts, multiple)
    share = ffn_share(sizes, layers, active)
    if share < top_k / experts:
        lowest = {i: sizes[i].width * top_k / experts for i in layers}
        everywhere = {i: s.width * top_k / experts for i, s in enumerate(sizes)}
        raise MoesaicError(
            f"active {active:g} is out of reach: {len(layers)} of {len(sizes)} layers with "
            f"{experts} experts, top-{top_k}, can go down to {active_ratio(sizes, lowest):.3f} "
            f"({active_ratio(sizes, everywhere):.3f} with layers=all). "
            "Carve more layers or use more experts."
        )
    splits = {}
    for i in layers:
        width, idle = sizes[i].width, experts - top_k
        step = multiple or alignment(width, idle)
        petal = step * round((1 - share) * width / idle / step)
        petal = min(petal, width // experts // step * step)
        splits[i] = Split(width - experts * petal, petal, experts, top_k)
    actual = active_ratio(sizes, {i: split.active_width for i, split in splits.items()})
    if multiple and abs(actual - active) > APART:
        raise MoesaicError(
            f"active {active:g} is out of reach with multiple={multiple}, {experts} experts and "
            f"top-{top_k}; the nearest that works is active={actual:.4g}."
        )
    return splits


def _check_multiple(widths: Sequence[int], experts: int, multiple: int) -> None:
    """Refuse a multiple that does not divide the widths, or leaves too few petals.

    Raises:
        MoesaicError: names what would work.
    """
    common, least = math.gcd(*widths), min(widths)
    fits = max(m for m in range(1, min(multiple, least // 2) + 1) if common % m == 0)
    if fits < multiple:
        raise MoesaicError(
            f"multiple {multiple}: the {least} neurons of a layer cannot be divided so; "
            f"multiple={fits} works."
        )
    if least < experts * multiple:
        raise MoesaicError(
            f"multiple {multiple}: the {least} neurons of a layer are fewer than {experts} such "
            f"petals have; experts={least // multiple} works."
        )


def split_for_share(
    sizes: Sequence[LayerSize], layers: Sequence[int], share: float, experts: int, top_k: int
) -> dict[int, Split]:
    """Return a backbone of k_share = max(1, floor(rho_share m)) neurons (MoRE, Sec. 2.2), and
    petals of the others, some of which may have one neuron more.

    Raises:
        MoesaicError: fewer neurons than petals are left.

    >>> split_for_share([LayerSize(0, 300, 100)], [0], 0.55, 4, 1)
    {0: Split(backbone=55, petal=11, experts=4, top_k=1)}
    """
    if not 0 < top_k < experts:
        raise MoesaicError(f"top_k {top_k} must be at least 1 and below experts {experts}.")
    splits = {}
    for i in layers:
        width = sizes[i].width
        backbone = max(1, int(share * width))
        if width - backbone < experts:
            raise MoesaicError(
                f"share {share:g} leaves {width - backbone} of layer {i}'s {width} neurons to "
                f"{experts} petals."
            )
        splits[i] = Split(backbone, (width - backbone) // experts, experts, top_k)
    return splits


def solved_top_k(
    sizes: Sequence[LayerSize],
    layers: Sequence[int],
    active: float,
    experts: int,
    multiple: int | None = None,
) -> int:
    """Return the top-k that meets an active ratio most closely with about a third of a token's
    neurons in petals of whole neurons.

    With ``multiple``, petals are the narrowest of those that meet the target within :data:`NEAR`
    and the third within a tenth of the width.

    >>> sizes = [LayerSize(884_736, 2_654_208, 1536)]
    >>> solved_top_k(sizes, [0], 0.8, 256), solved_top_k(sizes, [0], 0.8, 6, multiple=32)
    (119, 3)
    """
    width = sizes[layers[0]].width
    idle = (1 - min(max(ffn_share(sizes, layers, active), 0.0), 1.0)) * width
    target = idle + (width - idle) / 3

    def idling(petal: int) -> int:
        return min(max(round(idle / petal), 1), experts - 1)

    def rank(petal: int) -> tuple[float, float, int]:
        missed, apart = abs(idling(petal) * petal - idle), abs(experts * petal - target)
        return max(missed, NEAR * width), max(apart, 0.1 * width), petal

    petal = max(1, round(target / experts))
    if multiple:
        petals = range(multiple, width // experts + 1, multiple)
        petal = min(petals, key=rank, default=multiple)
    return experts - idling(petal)


def alignment(width: int, idle: int) -> int:
    """Return the multiple for petal sizes: 32, 16 or 8, which kernels and native formats prefer, or
    1.

    The largest of them whose rounding, times the ``idle`` petals of a token, is at most 1 % of the
    layer's width.

    >>> alignment(14_336, 3), alignment(1536, 3), alignment(1536, 32)
    (32, 8, 1)
    """
    return next((step for step in (32, 16, 8) if idle * step / 2 <= 0.01 * width), 1)
