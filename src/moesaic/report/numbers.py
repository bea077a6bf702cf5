"""Formats of figures, the same everywhere. A figure that is missing is a dash."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec

from moesaic.errors import quote

P = ParamSpec("P")
NONE = "–"
NBSP = "\u00a0"
FORM = re.compile(r",?(\.\d)?[efg%]")
"""Specifications of number formats that are allowed, since they also come from files."""


def _any(
    write: Callable[Concatenate[float, P], str],
) -> Callable[Concatenate[float | None, P], str]:
    """Return a format for any value, also None and infinity, from one for finite numbers."""

    @wraps(write)
    def written(value: float | None, /, *args: P.args, **options: P.kwargs) -> str:
        if value is None:
            return NONE
        if math.isnan(value):
            return "not a number"
        if math.isinf(value):
            return "∞" if value > 0 else "-∞"
        return write(value, *args, **options)

    return written


@_any
def perplexity(value: float) -> str:
    """Return a perplexity with two decimals, fewer as it grows.

    >>> [perplexity(v) for v in (12.7856, 412.06, 30_412.4, 1e6, math.inf, -math.inf, None)]
    ['12.79', '412.1', '30,412', '1.0e+06', '∞', '-∞', '–']
    """
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


@_any
def count(value: float) -> str:
    """Return a count to four digits: exact below ten thousand.

    >>> [count(v) for v in (0, 8176, 34_560, 134_515_008, 8_030_261_248)]
    ['0', '8,176', '34.6k', '134.5M', '8.03B']
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size and value >= 10_000:
            scaled = value / size
            return f"{scaled:,.{2 if scaled < 10 else 1}f}{unit}"
    return f"{value:,.0f}"


@_any
def percent(share: float, digits: int = 0) -> str:
    """Return a share in percent.

    >>> percent(0.80004, 1).replace(NBSP, " "), percent(None)
    ('80.0 %', '–')
    """
    return f"{100 * share:.{digits}f}{NBSP}%"


@_any
def share(value: float) -> str:
    """Return a relative loss, to two digits where it is small.

    >>> share(0.2286), share(0.00012), share(1.5)
    ('0.229', '0.00012', '1.500')
    """
    return f"{value:.3f}" if value >= 0.001 else f"{value:.2g}"


@_any
def number(value: float, form: str) -> str:
    """Return a number by a format specification of Python, its percent sign apart.

    >>> number(0.1234, ".1%").replace(NBSP, " "), number(1234.5, ",.0f"), number(None, ".3g")
    ('12.3 %', '1,234', '–')
    """
    if not FORM.fullmatch(form):
        raise ValueError(f"{quote(form)} is no form of a number")
    return format(value, form).replace("%", f"{NBSP}%")


@_any
def times(ratio: float) -> str:
    """Return a ratio.

    >>> times(1.2744)
    '1.27×'
    """
    return f"{ratio:.2f}×"


@_any
def rate(value: float) -> str:
    """Return a speed to three digits.

    >>> [rate(v) for v in (1031.18, 24.75, 3.456)]
    ['1,031', '24.8', '3.46']
    """
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


@_any
def duration(seconds: float) -> str:
    """Return seconds, or milliseconds below one.

    >>> [duration(s).replace(NBSP, " ") for s in (0.4969, 0.0042, 12.3)]
    ['497 ms', '4.2 ms', '12.30 s']
    """
    if seconds >= 1:
        return f"{seconds:.2f}{NBSP}s"
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f}{NBSP}ms"


@_any
def memory(size: float) -> str:
    """Return bytes in decimal units, as budgets are given, to three digits.

    >>> [memory(v).replace(NBSP, " ") for v in (4_195_250_176, 734_003_200, 7_261_056)]
    ['4.20 GB', '734 MB', '7.26 MB']
    """
    return f"{rate(size / 1e9)}{NBSP}GB" if size >= 1e9 else f"{rate(size / 1e6)}{NBSP}MB"


def ranges(numbers: Sequence[int]) -> str:
    """Return layer numbers, runs of them drawn together.

    >>> ranges([4, 5, 6, 9, 11, 12])
    '4–6, 9, 11–12'
    """
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def plain(value: object) -> str:
    """Return an option as text.

    >>> plain(True), plain(""), plain([1, 2]), plain(None), plain(0.8)
    ('yes', '–', '1, 2', '–', '0.8')
    >>> plain([{"source": "prose", "windows": 3}, {"source": "code", "windows": 1}])
    'source prose, windows 3; source code, windows 1'
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return NONE
    if isinstance(value, Sequence) and not isinstance(value, str):
        between = "; " if any(isinstance(v, Mapping) for v in value) else ", "
        return between.join(plain(v) for v in value) or NONE
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(v)}" for key, v in value.items()) or NONE
    return f"{value:g}" if isinstance(value, float) else str(value)
