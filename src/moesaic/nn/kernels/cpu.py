"""Products of few tokens with chosen rows of a matrix, at a cost of the rows that are chosen.

Compiled by numba on first use and kept in its cache. Tensors are given by address, so that a call
costs about a microsecond: a small product takes little longer. Torch's own threads share the parts
of a call: a second pool would wait for cores on which torch's threads still wait, busy, for work.

Shape suffixes: T tokens, G matrices, I inputs (channels), O outputs, N chosen rows.
"""

# numba compiles these functions from their bytecode and brings no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

_OPTIONS: dict[str, object] = {
    "fastmath": {"contract", "reassoc", "nsz"},
    "nogil": True,
    "error_model": "numpy",
}


@intrinsic
def _at(typing, address):
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
def _narrow(number):
    """A float32 as the nearest bfloat16, stored as uint16; of two the even one."""
    bits = np.uint32(_bits(number))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if number == number else np.uint16(0x7FC0)


@njit(inline="always")
def _same(value):
    """A float32 as it is stored."""
    return value


@njit(inline="always")
def _wide(value):
    """A bfloat16, stored as uint16, as float32."""
    return _float(np.uint32(value) << np.uint32(16))


@njit(**_OPTIONS)
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
    if keep < 0:
        low = _bits(threshold)
    else:
        # the highest bits that at least ``keep`` channels are above: in turn where they would be if
        # scores were spread evenly on a logarithmic scale, which bits nearly are, and in the middle
        low, high = np.int32(0x7FFFFFFF), np.int32(0)
        for i in range(inputs):
            low, high = min(low, bits_I[i]), max(high, bits_I[i])
        low -= np.int32(1)
        above, beyond, even = np.int64(inputs), np.int64(0), True
        while np.int64(high) - low > 1 and above != keep:
            span = np.int64(high) - low
            part = span * (above - keep) // (above - beyond) if even else span // 2
            middle = np.int32(low + min(max(part, 1), span - 1))
            count = np.int32(0)
            for i in range(inputs):
                count += np.int32(bits_I[i] > middle)
            if count >= keep:
                low, above = middle, np.int64(count)
            else:
                high, beyond = middle, np.int64(count)
            even = not even
        if above > keep:  # some of those that are equal to ``high`` stay
            low, equal = high, np.int64(keep) - beyond
            i = np.int64(0)
            while equal > 0:
                if bits_I[i] == high:
                    bits_I[i] += 1
                    equal -= 1
                i += 1
    count = np.int64(0)
    for i in range(inputs):  # no branch: which channels stay is not to be foreseen
        chosen_N[count] = i
        value_N[count] = x_I[i]
        count += bits_I[i] > low
    return count


_AHEAD = 12
"""Cache lines of a row that are fetched while those before it are added: a row is short, and over
before the processor sees by itself that it is read in order."""


@intrinsic
def _fetch(typing, address):
    """Begin to bring a cache line near."""

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        hints = [number(0), number(3), number(1)]  # to be read, kept near, of data
        builder.call(fetch, [builder.inttoptr(arguments[0], pointer), *hints])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _adding(widen, size):
    """The function that adds rows of one type, ``size`` bytes a number, eight at a time."""

    @njit(inline="never", **_OPTIONS)
    def add(rows, rows_IO, chosen_N, value_N, count, start, stop, sum_O):
        width, stride = stop - start, size * rows_IO.shape[1]
        near = min(size * width, 64 * _AHEAD)
        n = 0
        while n + 8 <= count:
            for m in range(n + 8, min(n + 16, count)):
                first = rows + stride * np.int64(chosen_N[m]) + size * start
                for line in range(first, first + near, 64):
                    _fetch(line)
            v0, v1, v2, v3 = value_N[n], value_N[n + 1], value_N[n + 2], value_N[n + 3]
            v4, v5, v6, v7 = value_N[n + 4], value_N[n + 5], value_N[n + 6], value_N[n + 7]
            r0, r1 = rows_IO[chosen_N[n], start:stop], rows_IO[chosen_N[n + 1], start:stop]
            r2, r3 = rows_IO[chosen_N[n + 2], start:stop], rows_IO[chosen_N[n + 3], start:stop]
            r4, r5 = rows_IO[chosen_N[n + 4], start:stop], rows_IO[chosen_N[n + 5], start:stop]
            r6, r7 = rows_IO[chosen_N[n + 6], start:stop], rows_IO[chosen_N[n + 7], start:stop]
            for o in range(width):
                left = (v0 * widen(r0[o]) + v1 * widen(r1[o])) + (
                    v2 * widen(r2[o]) + v3 * widen(r3[o])
                )
                right = (v4 * widen(r4[o]) + v5 * widen(r5[o])) + (
                    v6 * widen(r6[o]) + v7 * widen(r7[o])
                )
                sum_O[o] += left + right
            n += 8
        while n < count:
            value, row = value_N[n], rows_IO[chosen_N[n], start:stop]
            for o in range(width):
                sum_O[o] += value * widen(row[o])
            n += 1

    return add


_add = _adding(_same, 4)
_add_half = _adding(_wide, 2)


@njit(**_OPTIONS)
def _read(x, half, x_I):
    """Numbers at an address, float32 or bfloat16, as float32."""
    inputs = x_I.shape[0]
    if half:
        half_I = carray(_at(x), (inputs,), np.uint16)
        for i in range(inputs):
            x_I[i] = _wide(half_I[i])
    else:
        x_I[:] = carray(_at(x), (inputs,), np.float32)


@njit(**_OPTIONS)
def _write(sum_O, half, out):
    """Float32 numbers put at an address, as float32 or rounded to bfloat16."""
    outputs = sum_O.shape[0]
    if half:
        half_O = carray(_at(out), (outputs,), np.uint16)
        for o in range(outputs):
            half_O[o] = _narrow(sum_O[o])
    else:
        carray(_at(out), (outputs,), np.float32)[:] = sum_O


@njit(**_OPTIONS)
def _sums(
    x, group, out, tokens, narrow, scale, rows, inputs, outputs, apart, keep, threshold, half,
    start, stop,
):  # fmt: skip
    x_I, sum_O = np.empty(inputs, np.float32), np.empty(stop - start, np.float32)
    bits_I, chosen_N = np.empty(inputs, np.int32), np.empty(inputs, np.int32)
    value_N = np.empty(inputs, np.float32)
    size, number = 2 if narrow else 4, np.int64(0)
    for t in range(tokens):
        if group:
            number = carray(_at(group + 8 * t), (1,), np.int64)[0]
        many = inputs if scale else 0
        scale_I = carray(_at(scale + 4 * number * many), (many,), np.float32)
        _read(x + size * t * inputs, narrow, x_I)
        count = choose(x_I, scale_I, keep, _float(threshold), bits_I, chosen_N, value_N)
        sum_O[:] = 0
        if half:
            matrix = rows + 2 * number * inputs * apart
            halves = carray(_at(matrix), (inputs, apart), np.uint16)
            _add_half(matrix, halves, chosen_N, value_N, count, start, stop, sum_O)
        else:
            matrix = rows + 4 * number * inputs * apart
            whole = carray(_at(matrix), (inputs, apart), np.float32)
            _add(matrix, whole, chosen_N, value_N, count, start, stop, sum_O)
        _write(sum_O, narrow, out + size * (t * outputs + start))


# --- a call, its parts shared --------------------------------------------------------------------

_HEAD, _ARGUMENTS = 3, 13
"""Numbers before a call's arguments: the next output, all outputs, and those of a part; and its
arguments."""


def _parts(call):
    """Do one part of the outputs after another, until none is left."""
    numbers = carray(call, (_HEAD + _ARGUMENTS,), np.int64)
    arguments = to_fixed_tuple(numbers[_HEAD:], _ARGUMENTS)
    outputs, step = numbers[1], numbers[2]
    start = _claimed(call, step)
    while start < outputs:
        _sums(*arguments, start, min(start + step, outputs))
        start = _claimed(call, step)


@cache
def _compiled() -> tuple[Any, Any]:
    """The loop as ctypes calls it, and what holds its code; on disk where there is a place."""
    signature, options = types.void(types.voidptr), {"error_model": "numpy"}
    try:
        compiled = cfunc(signature, cache=True, **options)(_parts)
    except RuntimeError:  # no folder that can be written to
        compiled = cfunc(signature, **options)(_parts)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address), compiled


@cache
def _torch_threads() -> Callable[..., object] | None:
    """OpenMP's own entry, in the library that torch has loaded; None where it has another."""
    try:
        run = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run


def sums(*arguments: int, size: int, step: int = 0) -> None:
    """out[t] = sum over token t's chosen channels i of x[t, i] rows[group[t], i]; parts of outputs.

    Args:
        arguments: x, group, out, tokens, narrow, scale, rows, inputs, outputs, apart, keep,
            threshold and half. Five are addresses: x (T, I) and out (T, O) float32, or bfloat16
            where ``narrow``; group (T) int64, or 0 for the first; scale (G, I) float32, or 0 for
            ones; rows (G, I, O) float32, or bfloat16 where ``half``, so many numbers ``apart``.
            The threshold is a float32's bits.
        size: outputs.
        step: outputs of a part, which one thread does; 0 for one part.
    """
    call, compiled = _compiled()
    numbers = array("q", (0, size, step or size, *arguments))
    place, _ = numbers.buffer_info()
    run = _torch_threads() if 0 < step < size else None
    if run is None:
        call(place)
    else:
        run(compiled.address, place, torch.get_num_threads(), 0)
