"""Products of few tokens with chosen rows of a matrix, at a cost of the rows that are chosen.

Compiled by numba on first use and kept in its cache. Tensors are given by address, so that a call
costs about a microsecond: a small product takes little longer.

Shape suffixes: T tokens, G matrices, I inputs (channels), O outputs, N chosen rows, R petals, M
neurons.
"""

# numba compiles these functions from their bytecode and brings no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from moesaic.nn.kernels.threads import Shared, at, numbers, part

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


AHEAD = 12
"""Cache lines of a row that are fetched while those before it are added: a row is short, and over
before the processor sees by itself that it is read in order."""


@intrinsic
def _fetch(typing, address):
    """Begin to bring a cache line near."""

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        said = [number(0), number(3), number(1)]  # to be read, kept near, of data
        builder.call(fetch, [builder.inttoptr(arguments[0], pointer), *said])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _adding(widen, size):
    """The function that adds rows of one type, ``size`` bytes a number, eight at a time."""

    @njit(inline="never", **OPTIONS)
    def add(rows, rows_IO, chosen_N, value_N, count, start, stop, sum_O):
        width, stride = stop - start, size * rows_IO.shape[1]
        near = min(size * width, 64 * AHEAD)
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


@njit(**OPTIONS)
def _read(x, half, x_I):
    """Numbers at an address, float32 or bfloat16, as float32."""
    inputs = x_I.shape[0]
    if half:
        half_I = carray(at(x), (inputs,), np.uint16)
        for i in range(inputs):
            x_I[i] = _wide(half_I[i])
    else:
        x_I[:] = carray(at(x), (inputs,), np.float32)


@njit(**OPTIONS)
def _write(sum_O, half, out):
    """Float32 numbers put at an address, as float32 or rounded to bfloat16."""
    outputs = sum_O.shape[0]
    if half:
        half_O = carray(at(out), (outputs,), np.uint16)
        for o in range(outputs):
            half_O[o] = _narrow(sum_O[o])
    else:
        carray(at(out), (outputs,), np.float32)[:] = sum_O


@njit(**OPTIONS)
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
            number = carray(at(group + 8 * t), (1,), np.int64)[0]
        many = inputs if scale else 0
        scale_I = carray(at(scale + 4 * number * many), (many,), np.float32)
        _read(x + size * t * inputs, narrow, x_I)
        count = choose(x_I, scale_I, keep, _float(threshold), bits_I, chosen_N, value_N)
        sum_O[:] = 0
        if half:
            own = rows + 2 * number * inputs * apart
            halves = carray(at(own), (inputs, apart), np.uint16)
            _add_half(own, halves, chosen_N, value_N, count, start, stop, sum_O)
        else:
            own = rows + 4 * number * inputs * apart
            whole = carray(at(own), (inputs, apart), np.float32)
            _add(own, whole, chosen_N, value_N, count, start, stop, sum_O)
        _write(sum_O, narrow, out + size * (t * outputs + start))


@Shared
def sums(given):
    """out[t] = sum over token t's chosen channels i of x[t, i] rows[group[t], i]; parts of outputs.

    Given are x, group, out, tokens, narrow, scale, rows, inputs, outputs, apart, keep, threshold
    and half. Five are addresses: x (T, I) and out (T, O) float32, or bfloat16 where ``narrow``;
    group (T) int64, or 0 for the first; scale (G, I) float32, or 0 for ones; rows (G, I, O)
    float32, or bfloat16 where ``half``, so many numbers ``apart``. The threshold is a float32's
    bits.
    """
    start, stop = part(given)
    while start < stop:
        _sums(*numbers(given, 13), start, stop)
        start, stop = part(given)


# --- petals --------------------------------------------------------------------------------------

BLOCK = 32
"""Neurons whose rows are read for all tokens before the next ones: they stay in the cache."""

WIDE = 16
"""Neurons of a petal from which it is made zero by itself, not neuron by neuron."""

GAP = 64
"""Numbers of a row that are read rather than left out: they share cache lines with others."""


@njit(**OPTIONS)
def _highest(scores, out, tokens, petals, top_k, start, stop):
    bits_R, low_bits = np.empty(petals, np.int32), np.int32(0x7FFFFFFF)
    for t in range(start, stop):
        score_R = carray(at(scores + 4 * t * petals), (petals,), np.float32)
        out_R = carray(at(out + 4 * t * petals), (petals,), np.float32)
        for r in range(petals):  # so that they are in the order of the scores, signs and all
            bits = _bits(score_R[r]) if score_R[r] != 0 else np.int32(0)  # of either sign
            bits_R[r] = bits ^ ((bits >> np.int32(31)) & low_bits)
        low, high = np.int64(-0x80000001), np.int64(0x7FFFFFFF)
        above = np.int64(petals)
        while high - low > 1 and above != top_k:
            middle = np.int32((low + high) >> 1)
            count = np.int32(0)
            for r in range(petals):
                count += bits_R[r] > middle
            if count >= top_k:
                low, above = np.int64(middle), np.int64(count)
            else:
                high = np.int64(middle)
        equal = np.int64(0)
        if above != top_k:  # some of those that are equal to ``high`` stay
            low, equal = high, np.int64(top_k)
            for r in range(petals):
                equal -= bits_R[r] > low
        for r in range(petals):
            out_R[r] = bits_R[r] > low
        r = np.int64(0)
        while equal > 0:
            if bits_R[r] == low:
                out_R[r] = 1
                equal -= 1
            r += 1


@Shared
def highest(given):
    """Ones for the petals with a token's highest scores, zeros for the others; parts of tokens.

    By bisection of the scores' bits, which costs a few passes over a token's scores. Given are
    scores, out, tokens, petals and top_k; scores and out are addresses of float32 (T, R). Of equal
    scores the first are taken.
    """
    start, stop = part(given)
    while start < stop:
        _highest(*numbers(given, 5), start, stop)
        start, stop = part(given)


@njit(inline="never", **OPTIONS)
def _mask(row_M, on_R, owner_M, kept_R, kept_M):
    """Numbers of a row, as whole numbers of their size, whose owners are off made zero."""
    for r in range(on_R.shape[0]):
        kept_R[r] = -(on_R[r] != 0)  # all bits or none
    for m in range(row_M.shape[0]):
        kept_M[m] = kept_R[owner_M[m]]
    for m in range(row_M.shape[0]):
        row_M[m] &= kept_M[m]


@njit(**OPTIONS)
def _silence(hidden, on, ends, owner, tokens, petals, width, half, start, stop):
    ends_R = carray(at(ends), (petals + 1,), np.int64)
    first, size = ends_R[0], 2 if half else 4
    owner_M = carray(at(owner), (width,), np.int32)[first:]
    kept_R, kept_M = np.empty(petals, np.int32), np.empty(width - first, np.int32)
    short_R, short_M = np.empty(petals, np.int16), np.empty(width - first, np.int16)
    wide = width - first >= WIDE * petals
    for t in range(start, stop):
        on_R = carray(at(on + 4 * t * petals), (petals,), np.float32)
        if wide:  # a fill for each
            bytes_B = carray(at(hidden + size * t * width), (size * width,), np.uint8)
            for r in range(petals):
                if on_R[r] == 0:
                    bytes_B[size * ends_R[r] : size * ends_R[r + 1]] = 0
        elif half:
            half_M = carray(at(hidden + 2 * t * width), (width,), np.int16)
            _mask(half_M[first:], on_R, owner_M, short_R, short_M)
        else:
            whole_M = carray(at(hidden + 4 * t * width), (width,), np.int32)
            _mask(whole_M[first:], on_R, owner_M, kept_R, kept_M)


@Shared
def silence(given):
    """Hidden activations of petals that a token does not run made zero; parts of tokens.

    Given are hidden, on, ends, owner, tokens, petals, width, half. The first four are addresses:
    hidden (T, M), float32, or two bytes each where ``half``; on float32 (T, R), zero for a petal
    that the token does not run; ends int64 (R + 1), where the backbone ends, and each petal; owner
    int32 (M), the petal of each neuron; the backbone's are not looked at.
    """
    start, stop = part(given)
    while start < stop:
        _silence(*numbers(given, 8), start, stop)
        start, stop = part(given)


@compiled()
def listed(on, ends, chosen, count, weight, tokens, petals, width):
    """The neurons that each token runs, in rising order, and how many they are.

    Args:
        on, ends: as in :func:`silence`.
        chosen: address of int32 (T, M), takes the neurons at its left.
        count: address of int64 (T).
        weight: address of float32 (T, M), zeros, takes the weights of the neurons that run; 0 if
            nobody asks.
    """
    ends_R = carray(at(ends), (petals + 1,), np.int64)
    count_T = carray(at(count), (tokens,), np.int64)
    for t in range(tokens):
        on_R = carray(at(on + 4 * t * petals), (petals,), np.float32)
        chosen_M = carray(at(chosen + 4 * t * width), (width,), np.int32)
        places = width if weight else 0
        weight_M = carray(at(weight + 4 * t * places), (places,), np.float32)
        found = ends_R[0]
        for m in range(found):
            chosen_M[m] = m
        if weight:
            weight_M[:found] = 1
        for r in range(petals):
            if on_R[r] != 0:
                for m in range(ends_R[r], ends_R[r + 1]):
                    chosen_M[found] = m
                    found += 1
                if weight:
                    weight_M[ends_R[r] : ends_R[r + 1]] = on_R[r]
        count_T[t] = found


def _dotting(widen):
    """The function that multiplies a token with rows of one type, four at a time."""

    @njit(inline="never", **OPTIONS)
    def dot(x_I, rows_MI, chosen_N, first, last, out_M):
        n = first
        while n + 4 <= last:
            r0, r1 = rows_MI[chosen_N[n]], rows_MI[chosen_N[n + 1]]
            r2, r3 = rows_MI[chosen_N[n + 2]], rows_MI[chosen_N[n + 3]]
            s0 = s1 = s2 = s3 = np.float32(0)
            for i in range(x_I.shape[0]):
                x = x_I[i]
                s0 += x * widen(r0[i])
                s1 += x * widen(r1[i])
                s2 += x * widen(r2[i])
                s3 += x * widen(r3[i])
            out_M[chosen_N[n]], out_M[chosen_N[n + 1]] = s0, s1
            out_M[chosen_N[n + 2]], out_M[chosen_N[n + 3]] = s2, s3
            n += 4
        while n < last:
            row, total = rows_MI[chosen_N[n]], np.float32(0)
            for i in range(x_I.shape[0]):
                total += x_I[i] * widen(row[i])
            out_M[chosen_N[n]] = total
            n += 1

    return dot


_dot = _dotting(_same)
_dot_half = _dotting(_wide)


@njit(inline="always")
def _until(chosen_N, count, place, neuron):
    """The first place from this one on whose neuron is not below one."""
    while place < count and chosen_N[place] < neuron:
        place += 1
    return place


@njit(**OPTIONS)
def _dots(x, rows, chosen, count, out, tokens, inputs, width, half, start, stop):
    x_TI = carray(at(x), (tokens, inputs), np.float32)
    whole = carray(at(rows), (width, inputs), np.float32)
    halves = carray(at(rows), (width, inputs), np.uint16)
    chosen_TM = carray(at(chosen), (tokens, width), np.int32)
    count_T = carray(at(count), (tokens,), np.int64)
    out_TM = carray(at(out), (tokens, width), np.float32)
    place_T = np.empty(tokens, np.int64)
    for t in range(tokens):
        place_T[t] = np.searchsorted(chosen_TM[t, : count_T[t]], start)
    step = BLOCK if tokens > 1 else stop - start
    while start < stop:
        end = min(start + step, stop)
        for t in range(tokens):
            first = place_T[t]
            place_T[t] = _until(chosen_TM[t], count_T[t], first, end)
            if half:
                _dot_half(x_TI[t], halves, chosen_TM[t], first, place_T[t], out_TM[t])
            else:
                _dot(x_TI[t], whole, chosen_TM[t], first, place_T[t], out_TM[t])
        start = end


@Shared
def dots(given):
    """out[g, t, m] = x[t] . rows[g][m], of chosen neurons m; parts of both matrices' neurons.

    Given are x, the matrices, chosen, count, out, tokens, inputs, width, and half: addresses of x
    float32 (T, I); of two matrices (M, I), float32, or bfloat16 where ``half``, of which the second
    is not looked at where there are places for one; chosen and count as :func:`listed` leaves
    them; out float32 (G, T, M).
    """
    x, rows, more, chosen, count, out, tokens, inputs, width, half = numbers(given, 10)
    start, stop = part(given)
    while start < stop:
        end = min(stop, width)
        if start < end:
            _dots(x, rows, chosen, count, out, tokens, inputs, width, half, start, end)
        start = max(start, width)
        if start < stop:
            second = out + 4 * tokens * width
            start, end = start - width, stop - width
            _dots(x, more, chosen, count, second, tokens, inputs, width, half, start, end)
        start, stop = part(given)


@njit(**OPTIONS)
def _scores(x, rows, out, inputs, petals, start, stop):
    rows_RI = carray(at(rows), (petals, inputs), np.float32)
    every_R, x_I = np.arange(petals).astype(np.int32), np.empty(inputs, np.float32)
    for t in range(start, stop):
        _read(x + 2 * t * inputs, True, x_I)
        score_R = carray(at(out + 4 * t * petals), (petals,), np.float32)
        _dot(x_I, rows_RI, every_R, 0, petals, score_R)


@Shared
def scores(given):
    """out[t, r] = x[t] . rows[r]; parts of tokens.

    Given are addresses of x bfloat16 (T, I), rows float32 (R, I) and out float32 (T, R), and inputs
    and petals.
    """
    start, stop = part(given)
    while start < stop:
        _scores(*numbers(given, 5), start, stop)
        start, stop = part(given)


@njit(**OPTIONS)
def _weighted(hidden, rows, chosen, count, out, tokens, width, outputs, start, stop):
    hidden_TM = carray(at(hidden), (tokens, width), np.float32)
    rows_MO = carray(at(rows), (width, outputs), np.float32)
    chosen_TM = carray(at(chosen), (tokens, width), np.int32)
    count_T = carray(at(count), (tokens,), np.int64)
    out_TO = carray(at(out), (tokens, outputs), np.float32)
    place_T, value_M = np.zeros(tokens, np.int64), np.empty(width, np.float32)
    out_TO[:, start:stop] = 0
    step = BLOCK if tokens > 1 else width
    for end in range(step, width + step, step):
        for t in range(tokens):
            first = place_T[t]
            last = place_T[t] = _until(chosen_TM[t], count_T[t], first, end)
            at_N = chosen_TM[t, first:last]
            for n in range(last - first):
                value_M[n] = hidden_TM[t, at_N[n]]
            _add(rows, rows_MO, at_N, value_M, last - first, start, stop, out_TO[t, start:stop])


@Shared
def weighted(given):
    """out[t] = sum over chosen neurons m of hidden[t, m] rows[m]; parts of outputs.

    Args:
        hidden: address of float32 (T, M).
        rows: address of float32 (M, O).
        chosen, count: as :func:`listed` leaves them.
        out: address of float32 (T, O).
    """
    start, stop = part(given)
    while start < stop:
        _weighted(*numbers(given, 8), start, stop)
        start, stop = part(given)


@njit(**OPTIONS)
def _spanned(hidden, columns, chosen, count, out, tokens, width, outputs, start, stop):
    hidden_TM = carray(at(hidden), (tokens, width), np.float32)
    columns_OM = carray(at(columns), (outputs, width), np.uint16)
    chosen_TM = carray(at(chosen), (tokens, width), np.int32)
    count_T = carray(at(count), (tokens,), np.int64)
    out_TO = carray(at(out), (tokens, outputs), np.float32)
    spans_S2 = np.empty((width, 2), np.int64)
    for t in range(tokens):
        spans = 0
        for n in range(count_T[t]):
            m = np.int64(chosen_TM[t, n])
            if spans and m - spans_S2[spans - 1, 1] <= GAP:
                spans_S2[spans - 1, 1] = m + 1
            else:
                spans_S2[spans, 0], spans_S2[spans, 1] = m, m + 1
                spans += 1
        for o in range(start, stop):
            total = np.float32(0)
            for s in range(spans):
                first, last = spans_S2[s, 0], spans_S2[s, 1]
                h_N, column_N = hidden_TM[t, first:last], columns_OM[o, first:last]
                part = np.float32(0)
                for n in range(last - first):
                    part += h_N[n] * _wide(column_N[n])
                total += part
            out_TO[t, o] = total


@Shared
def spanned(given):
    """As :func:`weighted`, of a bfloat16 matrix (O, M) whose columns are the neurons'.

    Where few neurons lie between chosen ones they are read as well; their ``hidden`` is zero.
    """
    start, stop = part(given)
    while start < stop:
        _spanned(*numbers(given, 8), start, stop)
        start, stop = part(given)
