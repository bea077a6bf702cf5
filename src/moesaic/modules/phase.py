"""Prompts and decoding: a converted layer may skip parts only in decoding.

A forward pass over one position per sequence is decoding. Prompts run dense if skipping parts would
save no time: they are then as fast, and more exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from moesaic.types import Values

MODES = ("decoding", "always")
"""Modes in which parts are skipped; ``always`` is for measuring."""


class Phase:
    """State shared by the modules of one decoder layer: whether they skip parts now."""

    def __init__(self) -> None:
        self.mode = "decoding"
        self.single = False
        """True if one position per sequence is run."""

    @classmethod
    def of(cls, layer: nn.Module) -> Phase:
        """Return a phase that is updated whenever a decoder layer runs."""
        phase = cls()
        layer.register_forward_pre_hook(phase.see, with_kwargs=True)
        return phase

    def see(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: Values) -> None:
        """Run as a hook before the layer: hidden states (B, L, D) of one position are decoding."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self.single = hidden.shape[1] == 1

    @property
    def skips(self) -> bool:
        """True if parts are skipped now."""
        return self.mode == "always" or (self.single and self.mode == "decoding")


@contextmanager
def set_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Set the mode of a model's layers, one of :data:`MODES`, while the context lasts.

    With ``always`` every token is treated as in decoding.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    phases = [phase for m in model.modules() if (phase := vars(m).get("phase"))]
    before = [phase.mode for phase in phases]
    for phase in phases:
        phase.mode = mode
    try:
        yield
    finally:
        for phase, old in zip(phases, before, strict=True):
            phase.mode = old
