"""Options of ToMoE. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option, seed_option
from moesaic.types import JSON

PUBLISHED: JSON = {"published": True, "steps": 10_000, "length": 2048, "lr": 1e-3}
"""Bundle ``paper``: the paper's objective, start, masks, result and schedule (App. C; one text per
process at a time) where our defaults differ."""


@dataclass(frozen=True)
class ToMoEConfig(MethodConfig):
    """Options of ToMoE. The defaults are the paper's, or our decision."""

    verb: ClassVar[str] = "carve"
    name: ClassVar[str] = "tomoe"
    title: ClassVar[str] = "ToMoE"
    paper: ClassVar[str] = (
        "Gao et al., ToMoE: Converting Dense Large Language Models to Mixture-of-Experts through "
        "Dynamic Structural Pruning, TMLR 2025"
    )
    implementation: ClassVar[str] = "moesaic.carving.tomoe.method:ToMoE"
    library = ("accelerate", "train")
    variants: ClassVar[dict[str, str]] = {"more": "MoRE", "static": "static pruning"}
    bundles: ClassVar[dict[str, JSON]] = {"paper": PUBLISHED}

    active: float = option(
        0.6,
        "Target active ratio: the share of the projections' parameters that a token uses.",
        above=0,
        maximum=1,
        idle=(1, "leaves nothing out"),
    )
    experts: int = option(8, "Experts of a layer.", minimum=1, maximum=64)
    attention: Literal["routed", "none"] = option(
        "routed",
        "routed: each token chooses dimensions of values and outputs; none: attention is kept.",
        seldom=True,
    )
    tau: float = option(0.4, "Temperature of the straight-through masks.", above=0, seldom=True)
    published: bool = option(
        False,
        "As the paper and its code: a load balance of weight 1, attention that starts less full, "
        "masks in Eq. 2's three places, a constant rate without clipping, and a random result: "
        "experts are drawn once, and the router draws for each token; the budget counts maxima "
        "over draws, and the ratio is what results.",
        seldom=True,
    )
    materialize: bool = option(
        False, "Give every expert a copy of its weights: faster, and larger.", seldom=True
    )
    steps: int = option(
        800,
        "Optimizer steps. By default 204,800 tokens are trained on, of 300,000 that ship; the "
        "paper's are 20 million.",
        minimum=1,
    )
    length: int = option(256, "Tokens of a text; 2048 in the paper.", minimum=2, seldom=True)
    accumulate: int = option(
        1, "Texts that a process takes before the modules move.", minimum=1, seldom=True
    )
    lr: float = option(
        3e-3, "The highest learning rate; 1e-3 in the paper.", minimum=0, seldom=True
    )
    save_every: int = option(100, "Steps between checkpoints.", minimum=1, seldom=True)
    seed: int = seed_option("Seed of the modules' start and of tosses.", seldom=True)

    parameters: ClassVar[float] = 16.0
    """Weight alpha of the budget R_P."""
    union: ClassVar[float] = 2.0
    """Weight beta of the union of experts R_U."""
    bias: ClassVar[float] = 3.0
    """Bias b, with which every expert starts as the whole FFN (Eq. 15)."""
    batch: ClassVar[int] = 1
    warmup: ClassVar[float] = 0.0
    weight_decay: ClassVar[float] = 0.05

    @property
    def balance(self) -> float:
        """Weight gamma of the load balance R_L (Eq. 9)."""
        return 1.0 if self.published else 0.125

    @property
    def head_bias(self) -> float:
        """Bias b of attention's dimensions."""
        return 3.0 if self.published else 6.0

    @property
    def noise(self) -> bool:
        """True if the result's choices are random, with Gumbel noise."""
        return self.published

    @property
    def clip(self) -> float:
        """Norm at which gradients are clipped; 0 for never."""
        return 0.0 if self.published else 1.0

    @property
    def decay(self) -> str:
        """Learning rate schedule: ``constant``, or ``cosine`` to 0 at the last step."""
        return "constant" if self.published else "cosine"
