"""Text of a search: windows that candidates decide on, and others that choose among them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from moesaic.config import Calibration, MethodConfig
from moesaic.data.text import SAMPLES, Tokens, calibration_tokens, without_overlap
from moesaic.errors import MoesaicError
from moesaic.fitting.forms import largest
from moesaic.io.source import Source

LEAST = 4
"""Fewest windows that choose among candidates."""
PART = 4
"""Share of the windows that choose where there is too little text: one of this many."""


class Texts:
    """Windows of one length that share nothing with each other.

    Args:
        drawn: the requested text; if it does not say how many windows calibrate, the text is
            divided.
        source: the model, for its tokenizer.
        windows: number of windows that choose.
    """

    def __init__(self, drawn: Calibration, source: Source, windows: int) -> None:
        self.source, self.windows = source, windows
        self._drawn: dict[int | None, Tokens] = {}
        length = drawn.length or MethodConfig.window  # one, whichever method looks at it
        self.drawn = drawn if tokenised(drawn) else replace(drawn, length=length)
        """Calibration text, with its length and number of windows."""
        self.drawn = self._with_number()

    @cached_property
    def both(self) -> tuple[Tokens, Tokens]:
        """Windows that candidates decide on, and others that share nothing with them.

        Raises:
            MoesaicError: there is too little text.
        """
        first = self._windows(self.drawn.samples)
        count = len(first.input_ids)
        available = self._available(count + self.windows)
        others = without_overlap(self._windows(available), first)
        if len(others.input_ids) < LEAST:
            raise MoesaicError(
                f"fit needs windows that choose beside those that calibrate, {LEAST} at least: "
                f"of {available}, {count} calibrate and {len(others.input_ids)} share no text with "
                "them. Give more text, lower samples, or lower length."
            )
        return first, others.rows(slice(self.windows))

    def _with_number(self) -> Calibration:
        """Return the text with its number of windows, some left over to choose by."""
        if self.drawn.samples is not None:
            return self.drawn
        limit = None if tokenised(self.drawn) else SAMPLES + self.windows
        available = self._available(limit)
        return replace(self.drawn, samples=available - min(self.windows, available // PART))

    def _available(self, limit: int | None) -> int:
        """Return the number of windows that the text fills, up to a limit; None for no limit."""

        def fills(samples: float) -> bool:
            try:
                return bool(self._windows(int(samples)).count)
            except MoesaicError:
                return False

        try:
            return len(self._windows(limit).input_ids)
        except MoesaicError:
            fewer = largest(range(1, limit or 1), fills)
            if fewer is None:
                raise
            return int(fewer)

    def _windows(self, samples: int | None) -> Tokens:
        drawn = self.drawn
        if samples not in self._drawn:
            self._drawn[samples] = calibration_tokens(
                drawn.source,
                self.source.tokenizer,
                samples,
                drawn.length,
                drawn.seed,
                documents=drawn.documents,
            )
        return self._drawn[samples]


def tokenised(drawn: Calibration) -> bool:
    """Return True for a file of token ids, whose windows have a length and a number."""
    return drawn.source.endswith(".safetensors")
