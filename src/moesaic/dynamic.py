"""Classes that are made while a program runs, and can be pickled all the same."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import cache, wraps
from typing import TypeVar

C = TypeVar("C", bound=Callable[..., type])


class Dynamic(type):
    """The metaclass of classes that a function decorated with :func:`remade` returns."""


def remade(make: C) -> C:
    """Decorates a module's function that returns a :class:`Dynamic` class.

    Equal arguments return the same class. Pickling it, or one of its instances, keeps the function
    and its arguments, from which another process makes the class again.
    """

    @wraps(make)
    @cache
    def made(*arguments: object) -> type:
        kind = make(*arguments)
        kind._remade = made, arguments  # type: ignore[attr-defined]
        return kind

    return made  # type: ignore[return-value]


def _reduced(kind: type) -> str | tuple[object, ...]:
    """Return the pickled form of a class: a call, or its name if it is a subclass that has one."""
    return vars(kind).get("_remade", kind.__qualname__)


copyreg.pickle(Dynamic, _reduced)  # type: ignore[arg-type]
