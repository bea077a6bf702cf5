"""Prompts and decoding: what a converted layer leaves out may be left out at decoding alone.

A forward pass over one position a sequence is decoding. Prompts run dense where leaving something
out would save them nothing: they are as fast so, and lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from moesaic.types import Values

MODES = ("decoding", "always")
"""When parts are left out; ``always`` is for measuring."""


class Phase:
    """What the modules of one decoder layer share: whether they leave parts out now."""

    def __init__(self) -> None:
        self.mode = "decoding"
        self.single = False
        """One position a sequence is run."""

    @classmethod
    def of(cls, layer: nn.Module) -> Phase:
        """A phase that is told of everything that a decoder layer runs."""
        phase = cls()
        layer.register_forward_pre_hook(phase.see, with_kwargs=True)
        return phase

    def see(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: Values) -> None:
        """Before the layer runs: hidden states (B, L, D) of one position are decoded."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self.single = hidden.shape[1] == 1

    @property
    def skips(self) -> bool:
        """Parts are left out now."""
        return self.mode == "always" or (self.single and self.mode == "decoding")


@contextmanager
def set_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Inside, a model's layers leave parts out in this mode, one of :data:`MODES`.

    With ``always`` every token is treated as at decoding.
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
