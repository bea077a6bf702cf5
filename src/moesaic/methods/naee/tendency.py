"""The experts that tokens choose, and that calibrations choose: NAEE's Figs. 4 and 5."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.arch.routing import RoutingFunction
from moesaic.errors import MoesaicError
from moesaic.plan import Plan

MANY = 64
"""The most experts of which pairs are told: more cannot be made out in a drawing."""


def together(logits_TE: Tensor, routing: RoutingFunction) -> Tensor:
    """Fig. 5: how many tokens run both of two experts, int64 (E, E).

    The diagonal says how many run an expert at all.

    Args:
        logits_TE: the router's, of tokens.
        routing: the layer's routing function.
    """
    ran_TE = (routing.weights(logits_TE) != 0).double()
    return (ran_TE.T @ ran_TE).to(torch.int64)


@dataclass(frozen=True)
class Overlap:
    """One layer's experts as two runs chose them."""

    layer: int
    experts: int
    """The experts that the layer had."""
    first: tuple[int, ...]
    """Those that stay by the first run."""
    second: tuple[int, ...]

    @property
    def both(self) -> tuple[int, ...]:
        """The experts that stay by both."""
        return tuple(sorted(set(self.first) & set(self.second)))

    @property
    def same(self) -> bool:
        """Both runs chose the same set."""
        return set(self.first) == set(self.second)


def overlap(first: Plan, second: Plan) -> list[Overlap]:
    """Fig. 4: the sets that two calibrations chose, layer by layer.

    Raises:
        MoesaicError: the plans are of different models, or take no experts out.
    """
    if first.base != second.base:
        raise MoesaicError("against: the two were made from models of different shapes.")
    kept = [
        {i: tuple(shape["kept"]) for i, shape in shapes.items() if "kept" in shape}
        for shapes in (
            {i: layer.describe(plan.base.experts_of(i)).shape for i, layer in plan.layers.items()}
            for plan in (first, second)
        )
    ]
    layers = sorted(kept[0].keys() & kept[1].keys())
    if not layers:
        raise MoesaicError("against: in no layer have both runs taken experts out.")
    return [Overlap(i, first.base.experts_of(i), kept[0][i], kept[1][i]) for i in layers]
