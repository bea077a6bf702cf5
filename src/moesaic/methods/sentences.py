"""Phrases that methods share in the sentences about their results."""

from __future__ import annotations

from moesaic.config import MethodConfig

NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def percent(share: float) -> str:
    """Return a share in percent, with a space that does not break.

    >>> percent(0.804).replace(chr(160), " ")
    '80 %'
    """
    return f"{100 * share:.0f}\u00a0%"


def number(count: int) -> str:
    """Return a count as text has it.

    >>> number(1), number(12)
    ('one', '12')
    """
    return NUMBERS[count] if 0 <= count < len(NUMBERS) else f"{count:,}"


def some(count: int, total: int) -> str:
    """Return how many layers, in words: ``all layers``, ``2 of 8 layers``.

    >>> some(8, 8), some(2, 8)
    ('all layers', '2 of 8 layers')
    """
    return "all layers" if count == total else f"{count} of {total} layers"


def carved(config: MethodConfig, active: float | None) -> str:
    """Return the title's clause of a carved model; ``active`` is the share of its projections that
    a token uses, None if unknown."""
    comma = "," if config.beyond else ""
    target = "" if active is None else f"{comma} to {percent(active)} active"
    return f"carved{credited(config, 'with')}{target}"


def credited(config: MethodConfig, by: str) -> str:
    """Return the end of a title's clause: ``by`` or ``with`` a method, and additions to it."""
    if not config.beyond:
        return f" {by} {config.base_label}"
    return f", beyond {config.base_label} ({', '.join(config.beyond)})"
