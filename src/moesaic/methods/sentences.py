"""Phrases that methods share in what they say of their results."""

from __future__ import annotations

from moesaic.config import MethodConfig

NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def percent(share: float) -> str:
    """A share in percent, with a space that does not break.

    >>> percent(0.804).replace(chr(160), " ")
    '80 %'
    """
    return f"{100 * share:.0f}\u00a0%"


def number(count: int) -> str:
    """A count as text has it.

    >>> number(1), number(12)
    ('one', '12')
    """
    return NUMBERS[count] if 0 <= count < len(NUMBERS) else f"{count:,}"


def some(count: int, total: int) -> str:
    """How many layers: ``all layers``, ``2 of 8 layers``.

    >>> some(8, 8), some(2, 8)
    ('all layers', '2 of 8 layers')
    """
    return "all layers" if count == total else f"{count} of {total} layers"


def carved(config: MethodConfig, active: float | None) -> str:
    """The title's clause of a carved model; ``active``, where it is known, is the share of its
    projections that a token uses."""
    comma = "," if config.beyond else ""
    target = "" if active is None else f"{comma} to {percent(active)} active"
    return f"carved{credited(config, 'with')}{target}"


def credited(config: MethodConfig, by: str) -> str:
    """The end of a title's clause: ``by`` or ``with`` a method, and what was done beyond it."""
    if not config.beyond:
        return f" {by} {config.base_label}"
    return f", beyond {config.base_label} ({', '.join(config.beyond)})"
