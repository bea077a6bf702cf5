"""Budgets of results, and the options of ``fit``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_args

from moesaic.config import GgufType, Options, option
from moesaic.errors import MoesaicError, check_known

LEAST = 4
"""Fewest windows that choose among candidates."""


@dataclass(frozen=True)
class FitConfig(Options):
    """Budgets, at least one, and how much is tried."""

    memory: int | None = option(
        None, "The most that the weights may take: bytes, 12GB, 800MB.", minimum=1, parse="bytes"
    )
    parameters: float | None = option(None, "The most parameters, such as 8e9.", minimum=1)
    active_parameters: float | None = option(
        None,
        "The most parameters that a token uses if all experts are used equally, embeddings and "
        "head included.",
        minimum=1,
    )
    max_loss: float | None = option(
        None,
        "The most by which perplexity may rise: 0.05 is 5 %. Without another budget: the smallest "
        "result within it.",
        minimum=0,
    )
    native: bool = option(False, "Only results of the base's own architecture.")
    types: tuple[str, ...] = option(
        (),
        "Make a GGUF file too, of this type or whichever of several is best; memory then counts "
        "its bytes. Repeatable.",
        flag="--type",
    )
    confirm: int = option(
        3,
        "Candidates, those of least estimated KL, that are made and measured; up to two follow if "
        "measured KL changes the estimates.",
        minimum=1,
    )
    prices: str = option(
        "",
        "File with the estimated KL of every alternative: read if it exists, otherwise written, so "
        "that another budget need not estimate them again.",
        metavar="FILE",
    )
    windows: int = option(
        32,
        "Windows of calibration text that candidates are compared on, apart from those that "
        "calibrate.",
        minimum=LEAST,
    )

    def check(self) -> None:
        for type in self.types:
            check_known("types", type, get_args(GgufType))
        if self.types and self.memory is None:
            raise MoesaicError(
                "types needs a budget of bytes (memory): what type a file has changes "
                "its bytes, and no number of parameters."
            )
        if not any(getattr(self, name) for name in BUDGETS) and self.max_loss is None:
            raise MoesaicError(
                "Give a budget: memory=9MB, parameters=8e9, active_parameters=3e9 or max_loss=0.05."
            )

    @property
    def native_only(self) -> bool:
        """True if a result must be of the base's own architecture, as llama.cpp knows no other."""
        return self.native or bool(self.types)

    @property
    def has_size(self) -> bool:
        """True if bytes, parameters or active parameters are limited, not only the loss."""
        return any(getattr(self, name) is not None for name in BUDGETS)

    def allows(self, sizes: object) -> bool:
        """Return True if sizes, in fields named like the budgets, are within all of them."""
        limits = ((getattr(sizes, name), getattr(self, name)) for name in BUDGETS)
        return all(limit is None or size <= limit for size, limit in limits)


BUDGETS = tuple(field.name for field in fields(FitConfig))[:3]
"""Fields that limit a result's size."""
