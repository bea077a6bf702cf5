"""Products of few tokens with chosen rows of a matrix, at a cost of the rows that are chosen.

Compiled by numba on first use and kept in its cache. Tensors are given by address, so that a call
costs about a microsecond: a small product takes little longer.

Shape suffixes: T tokens, G matrices, I inputs (channels), O outputs, N chosen rows.
"""

# numba compiles these functions from their bytecode and brings no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

OPTIONS: Any = {"fastmath": {"contract", "reassoc", "nsz"}, "nogil": True, "error_model": "numpy"}


def compiled(**more: Any) -> Callable[[Any], Any]:
    """``njit`` that keeps its results on disk where there is a place for them."""

    def decorate(function: Any) -> Any:
        try:
            return njit(cache=True, **OPTIONS, **more)(function)
        except RuntimeError:  # no folder that can be written to
            return njit(**OPTIONS, **more)(function)

    return decorate


@intrinsic
def _at(typing, address):
    """An address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def _float(typing, bits):
    """Thirty-two bits as the float32 that they are."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits(typing, number):
    """A float32 as its bits; in order for numbers that are not negative."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit(inline="always")
def _same(value):
    """A float32 as it is stored."""
    return value


@njit(inline="always")
def _wide(value):
    """A bfloat16, stored as uint16, as float32."""
    return _float(np.uint32(value) << np.uint32(16))


@compiled()
def choose(x_I, scale_I, keep, threshold, bits_I, chosen_N, value_N):
    """The channels with the ``keep`` highest scores |x| * scale, or with scores above a threshold.

    Args:
        x_I: float32.
        scale_I: float32; empty for ones.
        keep: how many; below zero: by the threshold. Of equal scores the first stay.
        threshold: scores above it stay.
        bits_I: int32, to work with.
        chosen_N: int32, takes the channels in rising order.
        value_N: float32, takes their x.

    Returns:
        how many there are.
    """
    inputs = x_I.shape[0]
    if scale_I.shape[0]:
        for i in range(inputs):
            bits_I[i] = _bits(abs(x_I[i]) * scale_I[i])
    else:
        for i in range(inputs):
            bits_I[i] = _bits(abs(x_I[i]))
    equal = np.int64(0)
    if keep < 0:
        low = _bits(threshold)
    else:
        # by bisection the highest bits that at least ``keep`` channels are above
        low, high = np.int32(-1), np.int32(0x7FFFFFFF)
        above = np.int64(inputs)
        while np.int64(high) - low > 1 and above != keep:
            middle = np.int32((np.int64(low) + high) // 2)
            count = np.int64(0)
            for i in range(inputs):
                count += bits_I[i] > middle
            if count >= keep:
                low, above = middle, count
            else:
                high = middle
        if above > keep:  # some of those that are equal to ``high`` stay
            low, equal = high, np.int64(keep)
            for i in range(inputs):
                equal -= bits_I[i] > high
    count = 0
    for i in range(inputs):
        if bits_I[i] > low:
            stays = True
        else:
            stays = bits_I[i] == low and equal > 0
            equal -= stays
        if stays:
            chosen_N[count] = i
            value_N[count] = x_I[i]
            count += 1
    return count


def _adding(widen):
    """The function that adds rows of one type, four at a time."""

    @njit(inline="never", **OPTIONS)
    def add(rows_IO, chosen_N, value_N, count, start, stop, sum_O):
        width = stop - start
        n = 0
        while n + 4 <= count:
            v0, v1, v2, v3 = value_N[n], value_N[n + 1], value_N[n + 2], value_N[n + 3]
            r0 = rows_IO[chosen_N[n], start:stop]
            r1 = rows_IO[chosen_N[n + 1], start:stop]
            r2 = rows_IO[chosen_N[n + 2], start:stop]
            r3 = rows_IO[chosen_N[n + 3], start:stop]
            for o in range(width):
                sum_O[o] += (v0 * widen(r0[o]) + v1 * widen(r1[o])) + (
                    v2 * widen(r2[o]) + v3 * widen(r3[o])
                )
            n += 4
        while n < count:
            value, row = value_N[n], rows_IO[chosen_N[n], start:stop]
            for o in range(width):
                sum_O[o] += value * widen(row[o])
            n += 1

    return add


_add = _adding(_same)
_add_half = _adding(_wide)


@compiled()
def _token(x, scale, rows, group, out, t, inputs, outputs, keep, threshold, half, start, stop):
    """One token's share of :func:`sums`: outputs ``start`` to ``stop``."""
    x_I = carray(_at(x + 4 * t * inputs), (inputs,), np.float32)
    out_O = carray(_at(out + 4 * t * outputs), (outputs,), np.float32)
    number = np.int64(0)
    if group:
        number = carray(_at(group + 8 * t), (1,), np.int64)[0]
    many = inputs if scale else 0
    scale_I = carray(_at(scale + 4 * number * many), (many,), np.float32)
    bits_I, chosen_N = np.empty(inputs, np.int32), np.empty(inputs, np.int32)
    value_N = np.empty(inputs, np.float32)
    count = choose(x_I, scale_I, keep, np.float32(threshold), bits_I, chosen_N, value_N)
    sum_O = out_O[start:stop]
    sum_O[:] = 0
    if half:
        halves = carray(_at(rows + 2 * number * inputs * outputs), (inputs, outputs), np.uint16)
        _add_half(halves, chosen_N, value_N, count, start, stop, sum_O)
    else:
        whole = carray(_at(rows + 4 * number * inputs * outputs), (inputs, outputs), np.float32)
        _add(whole, chosen_N, value_N, count, start, stop, sum_O)


@compiled()
def sums(x, scale, rows, group, out, tokens, inputs, outputs, keep, threshold, half):
    """out[t] = sum over token t's chosen channels i of x[t, i] rows[group[t], i].

    The first five are addresses: x (T, I) and out (T, O) float32; scale (G, I) float32, or 0 for
    ones; rows (G, I, O) float32, or bfloat16 where ``half``; group (T) int64, or 0 for the first.
    """
    for t in range(tokens):
        _token(x, scale, rows, group, out, t, inputs, outputs, keep, threshold, half, 0, outputs)


@compiled(parallel=True)
def sums_parallel(
    x, scale, rows, group, out, tokens, inputs, outputs, keep, threshold, half, parts
):
    """As :func:`sums`, each token's outputs in so many parts, which threads share."""
    step = (outputs + 16 * parts - 1) // (16 * parts) * 16
    for job in prange(tokens * parts):
        t, part = job // parts, job % parts
        start, stop = min(part * step, outputs), min((part + 1) * step, outputs)
        if start < stop:
            _token(
                x, scale, rows, group, out, t, inputs, outputs, keep, threshold, half, start, stop
            )
