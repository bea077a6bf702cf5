"""Expert widths that meet a budget."""

from __future__ import annotations

from moesaic.errors import MoesaicError

MULTIPLES = {256: 0.01, 64: 0.01, 32: 0.01, 8: 0.05, 4: 0.05}
"""Most distance from the target width, relative to the width before, at which a multiple is chosen.

Blocks of k-quants, tiles of kernels, blocks of q8_0 and q4_0; 8 and 4 numbers are :data:`ROW`
bytes, in 16 and in 32 bits.
"""
ROW = 16
"""Bytes of which experts' rows must be a multiple in transformers' grouped matrix products."""
CLOSE = 0.01
"""Distance by which a requested multiple may miss its target, relative to the width before."""


def _multiple_for(width: int, target: float, row: int = 1) -> int:
    """Return the largest multiple that comes close enough to a target.

    Args:
        width: neurons before.
        target: neurons to keep.
        row: the least multiple, near the target or not, if it divides the width.

    >>> _multiple_for(14_336, 7_168), _multiple_for(1408, 704), _multiple_for(96, 67.2)
    (256, 64, 8)
    >>> _multiple_for(32, 4), _multiple_for(32, 4, row=8), _multiple_for(30, 4, row=8)
    (4, 8, 4)
    """
    row = 1 if width % row else row

    def misses(multiple: int) -> float:
        return abs(nearest(target, multiple, width) - target) / width

    fits = (m for m, most in MULTIPLES.items() if row <= m <= width and misses(m) <= most)
    return next(fits, row)


def nearest(target: float, multiple: int, width: int) -> int:
    """Return the multiple nearest to a target, at least one of it, at most the width before.

    >>> nearest(70, 64, 100), nearest(10, 64, 100), nearest(100, 64, 100)
    (64, 64, 64)
    """
    return max(multiple, min(round(target / multiple), width // multiple) * multiple)


def width_for(
    width: int, target: float, multiple: int | None, option: str, row: int = 1
) -> tuple[int, int]:
    """Return the width that meets a target, and the number that it is a multiple of.

    Args:
        width: neurons before.
        target: neurons to keep; may be a fraction.
        multiple: the requested multiple; None for the largest that meets the target.
        option: name of the option that set the target, for messages.
        row: the least multiple, if it divides the width.

    Raises:
        MoesaicError: no multiple is close (names the nearest that works), or it is none of ``row``.

    >>> width_for(128, 64, None, "keep"), width_for(128, 96, 32, "keep")
    ((64, 64), (96, 32))
    >>> width_for(1000, 505, 10, "keep")  # a hundredth of the width is close enough
    (500, 10)
    """
    if multiple is None:
        step = _multiple_for(width, target, row)
        return nearest(target, step, width), step
    if multiple > width:
        raise MoesaicError(
            f"multiple {multiple} is out of reach: there are {width} neurons, the most that works."
        )
    best, step = nearest(target, multiple, width), multiple
    if abs(best - target) > max(CLOSE * width, 0.5):
        raise MoesaicError(
            f"{option} {target / width:.4g} is out of reach with multiple {step} of {width} "
            f"neurons; the nearest that works is {best / width:.4g} ({best} neurons)."
        )
    if best % row and not width % row:
        raise MoesaicError(
            f"multiple {step}: {best} neurons are not a whole number of rows of {ROW} bytes, which "
            f"transformers' products of experts take; {nearest(target, row, width)} are."
        )
    return best, step
