"""The options of fewer experts a token. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from moesaic.config import Former, MethodConfig, option
from moesaic.errors import MoesaicError
from moesaic.foreign import Values
from moesaic.ladder import Ladder, Rung, Shape

LEXI = (
    'Chitty-Venkata et al., "LExI: Layer-Adaptive Active Experts for Efficient MoE Model '
    'Inference" (2025)'
)


@dataclass(frozen=True)
class LExIConfig(MethodConfig):
    """Options of fewer experts a token."""

    verb = "skip"
    name = "lexi"
    title = "LExI"
    paper = LEXI
    implementation = "moesaic.methods.lexi.method:FewerExperts"
    bundles: ClassVar[Mapping[str, Values]] = {"paper": {"allocate": "layers"}}
    former: ClassVar[Mapping[str, Former]] = {
        "experts_per_token": Former("top_k", "--experts-per-token"),
        "by_layer": Former("allocate", "--by-layer", {"true": "layers", "false": None}),
    }

    top_k: float | None = option(
        None,
        "Experts that a token runs in every layer; if it is no whole number, their mean at most, "
        "and each layer's own is chosen by what it loses. Default: as few in each layer as keep "
        "layer_loss.",
        minimum=1,
    )
    allocate: Literal["uniform", "layers"] = option(
        "uniform",
        "layers: a whole number is a mean, too: each layer's own is chosen by what it loses.",
    )
    layer_loss: float = option(
        0.1,
        "Without top_k: the most that a layer's output may be off, as a share of its size.",
        minimum=0,
    )
    gram_mb: int = option(256, "MiB for one layer's Gram matrices.", minimum=1, seldom=True)

    @classmethod
    def ladders(cls, model: Shape) -> Iterator[Ladder[LExIConfig]]:
        few = {round(share * model.top_k) for share in (3 / 4, 1 / 2)} - {0, model.top_k}
        rungs = [Rung(f"{n} a token", *[cls(top_k=n)] * 2) for n in sorted(few)]
        parts = 1 if model.native else model.layers
        shares = tuple(n / (model.top_k * parts) for n in range(parts, model.top_k * parts))
        if not shares:
            return

        def of_share(share: float) -> LExIConfig:
            return cls(top_k=share * model.top_k, allocate="uniform" if model.native else "layers")

        yield Ladder("experts a token", shares, of_share, rungs=rungs, reads_less=True)

    @property
    def uniform(self) -> bool:
        """All layers have the same number, and no text is looked at."""
        number = self.top_k
        return number is not None and number == int(number) and self.allocate == "uniform"

    @property
    def decides_from_stats(self) -> bool:
        return True

    @property
    def credit(self) -> str:
        return "" if self.uniform else self.paper

    @property
    def base_label(self) -> str:
        return "one number for all layers" if self.uniform else self.title

    def check(self) -> None:
        if self.top_k is not None and self.layer_loss != type(self).layer_loss:
            raise MoesaicError("top_k is given: leave layer_loss out.")
        if self.top_k is None and self.allocate == "layers":
            raise MoesaicError("allocate=layers needs top_k, the mean over all layers.")
