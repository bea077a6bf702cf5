"""Mixture whose router skips, for each token, the experts of little weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch
from moesaic.errors import shown
from moesaic.modules.skipping_router import RULES, make_skipping
from moesaic.plans.base import Description, Header, RoutingPlan, Sizes


@dataclass(frozen=True)
class SkippingLayer(RoutingPlan):
    """Plan of a layer whose router skips experts by beta; weights and earlier steps are kept."""

    kind: ClassVar[str] = "skipping"
    refines: ClassVar[bool] = True

    beta: float
    rule: str
    """Rule: ``top2`` compares the second weight to the first, ``tail`` the last ones to the sum."""

    def check(self, sizes: Sizes) -> None:
        if self.rule not in RULES or not 0 <= self.beta < math.inf:
            raise ValueError(
                f"experts cannot be left out by {shown(self.rule, 20)} {shown(self.beta, 20)}"
            )

    @classmethod
    def install(cls, layers: nn.ModuleList, index: int, arch: Arch, header: Header) -> None:
        assert isinstance(arch, MoEArch)
        view = arch.mixture(layers[index])
        make_skipping(view.router, header["beta"], header["rule"], view.experts)

    def describe(self, experts: int) -> Description:
        text = f"experts are left out by beta {self.beta:.3g}"
        return Description(text, {"beta": self.beta, "rule": self.rule})

    @classmethod
    def obstacle(cls, header: Header) -> str | None:
        return "No native router skips experts: export the model without skip."
