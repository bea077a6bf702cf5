"""Prompts and decoding: what a converted layer leaves out may be left out at decoding alone.

A forward pass over one position a sequence is decoding. Prompts run dense where leaving something
out would save them nothing: they are faster so, and lose nothing. So does decoding of channels
where there are no compiled functions for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moesaic.foreign import Values
from moesaic.nn.kernels import reads_rows

MODES = ("decoding", "always", "never")
"""When parts are left out; ``always`` is for measuring, ``never`` for comparing."""


class Phase:
    """What the modules of one decoder layer share: whether they leave parts out now.

    Args:
        compiled: parts are left out by compiled functions, and nothing is where there are none.
    """

    def __init__(self, compiled: bool = True) -> None:
        self.compiled = compiled
        self.mode = "decoding"
        self.single = False
        """One position a sequence is run, and what is left out is not read."""
        self.real: Tensor | None = None
        """bool (B, L), False on padding of the batch that runs, which is not counted."""

    @classmethod
    def of(cls, layer: nn.Module, compiled: bool = True) -> Phase:
        """A phase that is told of everything that a decoder layer runs."""
        phase = cls(compiled)
        layer.register_forward_pre_hook(phase.see, with_kwargs=True)
        return phase

    def see(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: Values) -> None:
        """Before the layer runs: hidden states (B, L, D) of one position are decoded."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self.single = hidden.shape[1] == 1 and (
            not self.compiled
            or torch.compiler.is_compiling()
            or reads_rows(hidden.device, hidden.dtype)
        )

    @property
    def skips(self) -> bool:
        """Parts are left out now."""
        return self.mode == "always" or (self.single and self.mode == "decoding")


def phased(model: nn.Module) -> list[tuple[nn.Module, Phase]]:
    """The modules that leave parts out at decoding, each with its layer's ``phase``."""
    return [(m, phase) for m in model.modules() if (phase := vars(m).get("phase"))]


@contextmanager
def set_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Inside, a model's layers leave parts out in this mode, one of :data:`MODES`.

    With ``always`` every token is treated as at decoding, and what is read is counted.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    modules = phased(model)
    before = [phase.mode for _, phase in modules]
    for _, phase in modules:
        phase.mode = mode
    try:
        yield
    finally:
        for (module, phase), old in zip(modules, before, strict=True):
            phase.mode = old
            if old != mode:
                for tally in getattr(module, "tallies", {}).values():
                    tally.clear()
