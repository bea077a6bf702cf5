"""The options of fewer experts a token. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moesaic.config import MethodConfig, option
from moesaic.ladder import Ladder, Rung, Shape


@dataclass(frozen=True)
class TopKConfig(MethodConfig):
    """Options of fewer experts a token: one number for all layers, no method of a paper."""

    verb = "skip"
    name = "top-k"
    title = "one number for all layers"
    paper = ""
    implementation = "moesaic.methods.fewer.method:FewerExperts"

    top_k: int = option(1, "Experts that a token runs in every layer.", minimum=1)

    @classmethod
    def ladders(cls, model: Shape) -> Iterator[Ladder[TopKConfig]]:
        few = {round(share * model.top_k) for share in (3 / 4, 1 / 2)} - {0, model.top_k}
        rungs = [Rung(f"{n} a token", *[cls(top_k=n)] * 2) for n in sorted(few)]
        shares = tuple(n / model.top_k for n in range(1, model.top_k))
        if not shares:
            return

        def of_share(share: float) -> TopKConfig:
            return cls(top_k=round(share * model.top_k))

        yield Ladder("experts a token", shares, of_share, rungs=rungs, reads_less=True)
