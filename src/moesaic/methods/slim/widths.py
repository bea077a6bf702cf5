"""Widths of experts that meet a budget."""

from __future__ import annotations

from moesaic.errors import MoesaicError

MULTIPLES = (256, 64, 32, 8, 4, 1)
"""Blocks of k-quants, tiles of kernels, blocks of q8_0 and q4_0; 8 and 4 numbers are the 16 bytes
that grouped matrix products want rows to be a multiple of, in 16 and 32 bits."""
CLOSE = 0.01
"""A width may miss its target by this share of the width there was."""


def multiple_for(width: int, target: float) -> int:
    """The largest multiple of which one lies close enough to a target.

    Args:
        width: neurons that there were.
        target: neurons that should stay.

    >>> multiple_for(14_336, 7_168), multiple_for(1408, 704), multiple_for(96, 67.2)
    (256, 64, 4)
    """
    near = (m for m in MULTIPLES if abs(nearest(target, m, width) - target) <= CLOSE * width)
    return next(near, 1)


def nearest(target: float, multiple: int, width: int) -> int:
    """The multiple that is nearest to a target, at least one of it, at most the width there was.

    >>> nearest(70, 64, 100), nearest(10, 64, 100), nearest(100, 64, 100)
    (64, 64, 64)
    """
    return max(multiple, min(round(target / multiple), width // multiple) * multiple)


def width_for(width: int, target: float, multiple: int | None, option: str) -> tuple[int, int]:
    """The width that meets a target, and what it is a multiple of.

    Args:
        width: neurons that there were.
        target: neurons that should stay, a fraction perhaps.
        multiple: what was asked for; None for the largest that meets the target.
        option: the name of the option that set the target.

    Raises:
        MoesaicError: no multiple is close; names the nearest that is.

    >>> width_for(128, 64, None, "keep"), width_for(128, 96, 32, "keep")
    ((64, 64), (96, 32))
    """
    step = multiple or multiple_for(width, target)
    found = nearest(target, step, width)
    if abs(found - target) > max(CLOSE * width, 0.5) or found > width:
        if step > width:
            raise MoesaicError(
                f"multiple {step} is out of reach: there are {width} neurons. At most {width} "
                "works."
            )
        raise MoesaicError(
            f"{option} {target / width:.4g} is out of reach with multiple {step} of {width} "
            f"neurons; the nearest that works is {found / width:.4g} ({found} neurons)."
        )
    return found, step
