"""Compiled functions whose parts torch's own threads share.

A second pool beside torch's would wait for cores on which torch's threads still wait, busy, for
work: products of a token are over in less time.
"""

# numba compiles these functions from their bytecode and brings no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

HEAD = 3
"""Numbers before a call's arguments: the next place, all places, and places of a part."""


@intrinsic
def at(typing, address):
    """An address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def _claimed(typing, pointer, count):
    """The number that stands there, before ``count`` is added to it; at once for all threads."""

    def generate(context, builder, signature, arguments):
        place = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "monotonic")

    return types.int64(types.voidptr, types.int64), generate


@njit(inline="always")
def part(given):
    """The places that this thread does next, from the first to the one after the last; none are
    left where they are the same."""
    head = carray(given, (HEAD,), np.int64)
    start = _claimed(given, head[2])
    return min(start, head[1]), min(start + head[2], head[1])


@njit(inline="always")
def numbers(given, count):
    """The arguments of a call, as a tuple; ``count`` is a constant."""
    return to_fixed_tuple(carray(given, (HEAD + count,), np.int64)[HEAD:], count)


@cache
def _torch_threads() -> Any:
    """OpenMP's own entry, in the library that torch has loaded; None where it has another."""
    try:
        run = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run


class Shared:
    """A compiled function of a call's numbers, which does one part of its places after another.

    The loop over parts stands in each of them: numba compiles a function that closes over another
    anew in every process, whatever its cache holds.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @cached_property
    def _compiled(self) -> tuple[Any, Any]:
        """As ctypes calls it, and what holds its code; on disk where there is a place for it."""
        signature, options = types.void(types.voidptr), {"error_model": "numpy"}
        try:
            made = cfunc(signature, cache=True, **options)(self.function)
        except RuntimeError:
            made = cfunc(signature, **options)(self.function)
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address), made

    def __call__(self, *arguments: int, size: int, step: int = 0) -> None:
        """Do all places.

        Args:
            arguments: whole numbers: addresses, sizes.
            size: places.
            step: places of a part, which one thread does; 0 for one part.
        """
        call, made = self._compiled
        given = array("q", (0, size, step or size, *arguments))
        place, _ = given.buffer_info()
        run = _torch_threads() if 0 < step < size else None
        if run is None:
            call(place)
        else:
            run(made.address, place, torch.get_num_threads(), 0)
