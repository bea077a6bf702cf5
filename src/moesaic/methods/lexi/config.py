"""The options of fewer experts a token. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from moesaic.config import MethodConfig, option
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
    bundles: ClassVar[Mapping[str, Values]] = {"paper": {"by_layer": True}}

    experts_per_token: float | None = option(
        None,
        "Experts that a token runs in every layer; if it is no whole number, their mean at most, "
        "and each layer's own is chosen by what it loses. Default: as few in each layer as keep "
        "layer_loss.",
        minimum=1,
    )
    by_layer: bool = option(
        False, "A whole number is a mean, too: each layer's own is chosen by what it loses."
    )
    layer_loss: float = option(
        0.1,
        "Without experts_per_token: the most that a layer's output may be off, as a share of its "
        "size.",
        minimum=0,
    )
    gram_mb: int = option(256, "MiB for one layer's Gram matrices.", minimum=1, seldom=True)

    @classmethod
    def ladders(cls, model: Shape) -> Iterator[Ladder[LExIConfig]]:
        few = {round(share * model.top_k) for share in (3 / 4, 1 / 2)} - {0, model.top_k}
        rungs = [Rung(f"{n} a token", *[cls(experts_per_token=n)] * 2) for n in sorted(few)]
        parts = 1 if model.native else model.layers
        shares = tuple(n / (model.top_k * parts) for n in range(parts, model.top_k * parts))
        if not shares:
            return

        def of_share(share: float) -> LExIConfig:
            return cls(experts_per_token=share * model.top_k, by_layer=not model.native)

        yield Ladder("experts a token", shares, of_share, rungs=rungs, reads_less=True)

    @property
    def uniform(self) -> bool:
        """All layers have the same number, and no text is looked at."""
        number = self.experts_per_token
        return number is not None and number == int(number) and not self.by_layer

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
        if self.experts_per_token is not None and self.layer_loss != type(self).layer_loss:
            raise MoesaicError("experts_per_token is given: leave layer_loss out.")
        if self.experts_per_token is None and self.by_layer:
            raise MoesaicError("by_layer needs experts_per_token, the mean over all layers.")
