"""The options of channel skipping. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON
from moesaic.ladder import FINEST, Ladder, Shape, shares_of

_Where = Literal["all", "ffn"]
_Choice = Literal["top-k", "threshold"]
_Shares = Literal["uniform", "greedy"]

WINA = (
    "Chen et al., WINA: Weight Informed Neuron Activation for Accelerating Large Language Model "
    "Inference"
)
TEAL = "Liu et al., Training-Free Activation Sparsity in Large Language Models, ICLR 2025"

_CHOICE = (
    "A token reads as many channels as any other (top-k), or those above a calibrated threshold."
)
_SHARES = (
    "uniform: the same share of every projection; greedy: within each layer more of those where "
    "less is lost by it."
)


@dataclass(frozen=True)
class ChannelsConfig(MethodConfig):
    """Options that both papers share."""

    verb: ClassVar[str] = "carve"
    implementation: ClassVar[str] = "moesaic.methods.channels.method:Channels"
    unit: ClassVar[str] = "channel"
    score: ClassVar[str]
    """One of :data:`moesaic.layers.channels.SCORES`."""

    active: float = option(
        0.8,
        "Target active ratio: the share of the projections' parameters that a token reads at "
        "decoding, of those that it runs in MODEL.",
        above=0,
        maximum=1,
    )
    where: _Where = option(
        "all",
        "Projections that skip: all of them, or those of the feed-forward networks (ffn).",
        seldom=True,
    )
    layers: str | tuple[int, ...] = option(
        "all", "Layers: all, last-half, uniform, early-middle, or numbers such as 4,5,6."
    )
    choice: _Choice = option("top-k", _CHOICE, seldom=True)
    shares: _Shares = option("uniform", _SHARES, seldom=True)
    steps: int = option(16, "Steps of the greedy search in each layer.", minimum=1, seldom=True)
    gradients: bool = option(
        False,
        "Rank channels by |x| times the size of the loss's gradient, and let one threshold for the "
        "whole model decide how many each projection reads, in the mean (choice top-k) or token by "
        "token (threshold).",
        beyond="channels weighed by gradients",
        seldom=True,
    )
    gradient_tokens: int = option(
        8192, "Calibration tokens that gradients are taken on.", minimum=1, seldom=True
    )

    def check(self) -> None:
        if self.gradients and self.shares != type(self).shares:
            raise MoesaicError(
                f"shares={self.shares}: gradients give each projection its share. Leave shares "
                "out, or take gradients=False."
            )

    @property
    def calibrates(self) -> bool:
        """Whether calibration text is looked at."""
        return self.gradients or self.choice == "threshold" or self.shares == "greedy"


@dataclass(frozen=True)
class WINAConfig(ChannelsConfig):
    """Options of WINA: channels by |x_i| times the norm of W[:, i], top-k, no calibration.

    ``paper`` adds its authors' greedy shares; their transformation of the weights is not here.
    """

    name: ClassVar[str] = "wina"
    title: ClassVar[str] = "WINA"
    paper: ClassVar[str] = WINA
    score: ClassVar[str] = "norm"
    bundles: ClassVar[dict[str, JSON]] = {
        "best": {"gradients": True},
        "paper": {"choice": "top-k", "shares": "greedy", "gradients": False},
    }

    choice: _Choice = option("top-k", _CHOICE, beyond="calibrated thresholds", seldom=True)

    @classmethod
    def ladders(cls, model: Shape) -> Iterator[Ladder[WINAConfig]]:
        if not model.native:
            shares = shares_of(FINEST, FINEST // 4, 2)
            yield Ladder("channels", shares, lambda share: cls(active=share), reads_less=True)


@dataclass(frozen=True)
class TEALConfig(ChannelsConfig):
    """Options of TEAL: channels by |x_i|, calibrated thresholds, shares found greedily."""

    name: ClassVar[str] = "teal"
    title: ClassVar[str] = "TEAL"
    paper: ClassVar[str] = TEAL
    score: ClassVar[str] = "size"
    bundles: ClassVar[dict[str, JSON]] = {"paper": {"choice": "threshold", "shares": "greedy"}}

    choice: _Choice = option("threshold", _CHOICE, seldom=True)
    shares: _Shares = option("greedy", _SHARES, seldom=True)
