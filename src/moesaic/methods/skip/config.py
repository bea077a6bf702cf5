"""Options of both ways to run fewer experts per token. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option
from moesaic.errors import MoesaicError
from moesaic.families import Family, Shape
from moesaic.methods.prune.config import NAEE
from moesaic.types import Values

MIXTRAL_C4 = (
    *(0.402, 0.494, 0.463, 0.484, 0.478, 0.491, 0.523, 0.521, 0.544, 0.570, 0.574),
    *(0.489, 0.503, 0.618, 0.568, 0.535, 0.559, 0.519, 0.537, 0.487, 0.469, 0.461),
    *(0.461, 0.469, 0.458, 0.418, 0.433, 0.418, 0.406, 0.433, 0.447, 0.535),
)
MIXTRAL_MATH = (
    *(0.503, 0.586, 0.505, 0.531, 0.509, 0.422, 0.511, 0.461, 0.447, 0.478, 0.529),
    *(0.454, 0.472, 0.531, 0.499, 0.486, 0.503, 0.491, 0.430, 0.440, 0.402, 0.423),
    *(0.386, 0.407, 0.395, 0.354, 0.340, 0.351, 0.334, 0.368, 0.365, 0.346),
)
"""Betas that App. A.7 publishes for Mixtral 8x7B, one per layer, calibrated on C4 and on MATH."""


@dataclass(frozen=True)
class SkipConfig(MethodConfig):
    """Options of dynamic skipping. The defaults are the paper's."""

    verb = "skip"
    name = "naee"
    title = "NAEE"
    paper = NAEE
    implementation = "moesaic.methods.skip.method:Skipper"
    bundles: ClassVar[Mapping[str, Values]] = {
        "paper": {"quantile": 0.5, "rule": "auto"},
        "mixtral-c4": {"betas": MIXTRAL_C4},
        "mixtral-math": {"betas": MIXTRAL_MATH},
    }

    quantile: float = option(
        0.5,
        "Beta is this quantile of the ratios of weights; 0.5 is the paper's median.",
        minimum=0,
        maximum=1,
        idle=(0, "skips nothing"),
    )
    calls: float | None = option(
        None,
        "Mean number of experts that a token should run, in place of a quantile.",
        minimum=1,
    )
    rule: Literal["auto", "top2", "tail"] = option(
        "auto",
        "The rule of skipping; auto: top2 where a token runs two experts, else tail.",
        seldom=True,
    )
    betas: tuple[float, ...] = option(
        (),
        "Beta of each layer that routes, given instead of calibrated; one number for all layers.",
        seldom=True,
    )

    def check(self) -> None:
        if self.betas and (self.calls is not None or self.quantile != SkipConfig.quantile):
            raise MoesaicError("betas are given: leave quantile and calls out.")
        if self.calls is not None and self.quantile != SkipConfig.quantile:
            raise MoesaicError("calls is given: leave quantile out.")
        if any(not beta >= 0 for beta in self.betas):
            raise MoesaicError(f"betas {self.betas} must be at least 0.")


@dataclass(frozen=True)
class TopKConfig(MethodConfig):
    """Options of a lower top-k: one number of experts per token for all layers, from no paper."""

    verb = "skip"
    name = "top-k"
    title = "one number for all layers"
    paper = ""
    implementation = "moesaic.methods.skip.method:FewerExperts"

    top_k: int = option(1, "Experts that a token runs in every layer.", minimum=1)

    @classmethod
    def families(cls, model: Shape) -> Iterator[Family[TopKConfig]]:
        few = {round(share * model.top_k) for share in (3 / 4, 1 / 2)} - {0, model.top_k}
        configs, first = ([cls(top_k=n) for n in of] for of in (range(1, model.top_k), sorted(few)))
        if configs:
            yield Family("experts a token", configs, lambda c: c, first, reads_less=True)
