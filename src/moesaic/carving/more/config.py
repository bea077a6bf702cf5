"""Options of MoRE. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option, seed_option
from moesaic.errors import MoesaicError
from moesaic.families import FINEST, Family, Shape, shares_of
from moesaic.types import JSON

Variant = Literal["full", "backbone", "random", "naive", "static"]
Router = Literal["cosine", "ridge"]
Prompts = Literal["auto", "petals", "dense"]

BEST: JSON = {"experts": 256, "top_k": 0, "layers": "all", "router": "ridge", "refit": True}
"""Bundle ``best``: fine petals."""
FAST: JSON = {
    "experts": 6,
    "top_k": 0,
    "multiple": 32,
    "layers": "all",
    "router": "ridge",
    "refit": True,
}
_PAPER: JSON = {
    "experts": 4,
    "top_k": 1,
    "layers": "last-half",
    "router": "cosine",
    "balanced": False,
    "refit": False,
}
"""Bundle ``paper``: clusters of any size, since Sec. 2.2 does not make them equal."""
_UNFITTED = ("static", "backbone", "random")
"""Variants without a router, or with a random one."""


@dataclass(frozen=True)
class MoREConfig(MethodConfig):
    """Options of MoRE. The defaults are the paper's, or our decision where it gives none."""

    verb: ClassVar[str] = "carve"
    name: ClassVar[str] = "more"
    title: ClassVar[str] = "MoRE"
    paper: ClassVar[str] = (
        "Zhang et al., Less Prune, MoRE Experts: Recognizing and Restructuring Latent Experts for "
        "Model Compression"
    )
    implementation: ClassVar[str] = "moesaic.carving.more.method:MoRE"
    library = ("sklearn", "carve")
    variants: ClassVar[dict[str, str]] = {
        "static": "static pruning",
        "backbone": "only the backbone",
        "random": "random routing",
        "naive": "petals without a backbone",
    }
    bundles: ClassVar[dict[str, JSON]] = {"best": BEST, "fast": FAST, "paper": _PAPER}
    unit: ClassVar[str] = "petal"

    active: float = option(
        0.8,
        "Target active ratio: the share of the projections' parameters that a token uses.",
        above=0,
        maximum=1,
        idle=(1, "leaves nothing out"),
    )
    experts: int = option(
        4, "Petals of a layer; with top_k 0 at most half as many as it has neurons.", minimum=1
    )
    top_k: int = option(
        1,
        "Petals that a token runs beside the backbone; 0 for as many as leave two thirds of a "
        "token's neurons to the backbone.",
    )
    layers: str | tuple[int, ...] = option(
        "last-half",
        "Layers to carve: last-half, all, uniform, early-middle, or numbers such as 4,5,6.",
    )
    variant: Variant = option(
        "full",
        "full, or one of the paper's comparisons: backbone (no petals), random (random routing), "
        "naive (no backbone), static (pruned to the same active width).",
        seldom=True,
    )
    share: float | None = option(
        None,
        "rho_share: the backbone's share of the channels, from which the active ratio follows. "
        "Default: the share that meets active.",
        above=0,
        below=1,
        seldom=True,
    )
    multiple: int | None = option(
        None,
        "Backbone and petals are a multiple of this many neurons, as near to active as that "
        "allows. Default: petals of 32, 16 or 8 where that changes little.",
        minimum=1,
        seldom=True,
    )
    activation_ratio: float = option(
        0.1,
        "The share of channels that count as activated by a token (Eq. 4).",
        above=0,
        maximum=1,
        seldom=True,
    )
    alpha: float = option(
        0.5,
        "Exponent of an expert's size that its energy is divided by (Eq. 9); without effect while "
        "petals are balanced, and so of one size.",
        minimum=0,
        maximum=1,
        seldom=True,
    )
    balanced: bool = option(True, "Petals of equal size.", seldom=True)
    router: Router = option(
        "cosine",
        "cosine (the paper's), or fitted in closed form: ridge.",
        beyond="fitted router",
        seldom=True,
    )
    prompts: Prompts = option(
        "auto",
        "petals: tokens of prompts are routed, too; dense: prompts run every neuron, tokens are "
        "routed only at decoding; auto: dense where a fitted router has petals of fewer than "
        "32 neurons, by which a prompt would gain nothing.",
        seldom=True,
    )
    refit: bool = option(
        False,
        "Solve for new down projections that bring outputs near the original layers'.",
        flag="--refit/--no-refit",
        beyond="refitted down projections",
    )
    seed: int = seed_option("Seed of clustering and of random routing.", seldom=True)

    @classmethod
    def families(cls, model: Shape) -> Iterator[Family[MoREConfig]]:
        if model.experts or model.native:
            return
        petals = partial(cls, layers="all", experts=64, top_k=0, router="ridge")
        configs = [petals(active=share) for share in shares_of(FINEST, FINEST // 4, 2)]
        refitted = partial(replace, refit=True)
        yield Family("carve", configs, refitted, priced=3, reads_less=True)

    def check(self) -> None:
        if self.share is not None and self.active != type(self).active:
            raise MoesaicError("The active ratio follows from share: give active or share.")
        if self.share and (self.variant == "naive" or self.multiple or not self.top_k):
            raise MoesaicError(
                "share fixes the backbone: not with variant naive, multiple, or top_k 0."
            )
        if self.multiple is not None and (self.variant == "naive" or not self.balanced):
            raise MoesaicError(
                "multiple gives all petals one size: not with variant naive, or balanced=False."
            )

    @property
    def beyond(self) -> tuple[str, ...]:
        """Additions to the paper's method; a router without effect is left out."""
        fitted = self.variant not in _UNFITTED
        return tuple(words for words in super().beyond if fitted or words != "fitted router")
