"""The k-th largest logit and the ids of the largest, from the maxima and few groups of a row."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from numba import carray, types

from ...ref.sampling import MAX_LOGPROBS
from ..intrin.registers import stack_alloc
from ..intrin.scalar import bits_from_f32, f32_from_bits
from ..intrin.sync import as_pointer
from ..jit import inlined
from ..words import f32
from .args import CANDIDATES, GROUP_VECTORS
from .passes import LEAST, make_passes


@inlined
def ordered(value):
    """An integer that orders as the float32 does; 0 and -0 are next to each other."""
    bits = types.int64(types.int32(bits_from_f32(value)))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@inlined
def from_ordered(key):
    """The float32 of it."""
    return f32_from_bits(types.uint32((key ^ ((key >> 31) & 0x7FFFFFFF)) & 0xFFFFFFFF))


@functools.cache
def make_select() -> Any:
    """For this CPU's vectors; ``row``, ``maxima`` and groups as in `make_passes`."""
    P = make_passes()
    N, GROUP, STEP, SPARE = P.N, P.GROUP, P.STEP, P.SPARE
    V_, count, group_at = P.V, P.count, P.group_at
    at_least, lowest = P.L.at_least, P.L.lowest

    @inlined
    def bisect(at, vectors, k, low, high):
        """The k-th largest float of an array, k of whose floats are at least ``low`` and fewer are
        above ``high``."""
        least, beyond = ordered(low), ordered(high) + 1
        while beyond - least > 1:
            middle = (least + beyond) >> 1
            if count(at, vectors, from_ordered(middle)) >= k:
                least = middle
            else:
                beyond = middle
        return from_ordered(least)

    @inlined
    def take_aside(row, V, groups, maxima, least, to):
        """Copies the logits that are at least ``least`` to a buffer of CANDIDATES, filled up with
        -inf to whole vectors; returns how many, or -1 if they are too many."""
        spare = stack_alloc(SPARE)
        out = carray(as_pointer(to), (CANDIDATES + N,), types.float32)
        low, n = V_.broadcast(least), 0
        for g in range(groups):
            if at_least(V_.load_f32(maxima + STEP * g), low) == 0:
                continue
            at = group_at(row, V, g, spare)
            for i in range(GROUP_VECTORS):
                mask = at_least(V_.load_f32(at + STEP * i), low)
                while mask != 0:
                    if n == CANDIDATES:
                        return -1
                    out[n] = f32(at + STEP * i, lowest(mask))
                    mask &= mask - 1
                    n += 1
        for i in range(n, (n + N - 1) // N * N):
            out[i] = LEAST
        return n

    @inlined
    def kth_largest(row, V, groups, maxima, k, high, spare):
        """The k-th largest of a row without NaN whose largest is ``high``; ``spare`` holds
        CANDIDATES floats and a vector."""
        low = LEAST
        if k <= groups * N:  # as many logits, one a lane's maximum, are at least this:
            low = bisect(maxima, groups, k, low, high)
        n = take_aside(row, V, groups, maxima, low, spare)
        if n >= 0:
            return bisect(spare, (n + N - 1) // N, k, low, high)
        at, vectors = row, V // N
        tail = V - vectors * N
        least, beyond = ordered(low), ordered(high) + 1
        while beyond - least > 1:
            middle = (least + beyond) >> 1
            value = from_ordered(middle)
            found = count(at, vectors, value)
            for i in range(V - tail, V):
                found += 1 if f32(row, i) >= value else 0
            if found >= k:
                least = middle
            else:
                beyond = middle
        return from_ordered(least)

    @inlined
    def top_ids(row, V, groups, maxima, n, high, ids, values):
        """The n largest of a row without NaN whose largest is ``high``, of equals the lowest ids
        first: their ids (int64) and values; returns how many there are, V at most."""
        spare, held = stack_alloc(SPARE), 0
        out = carray(as_pointer(ids), (MAX_LOGPROBS,), types.int64)
        found = carray(as_pointer(values), (MAX_LOGPROBS,), types.float32)
        low = LEAST
        if n <= groups * N:
            low = bisect(maxima, groups, n, low, high)
        edge = V_.broadcast(low)
        for g in range(groups):
            if at_least(V_.load_f32(maxima + STEP * g), edge) == 0:
                continue
            at = group_at(row, V, g, spare)
            for i in range(GROUP_VECTORS):
                mask = at_least(V_.load_f32(at + STEP * i), edge)
                while mask != 0:
                    lane = lowest(mask)
                    mask &= mask - 1
                    token = g * GROUP + i * N + lane
                    x = f32(at + STEP * i, lane)
                    if token >= V or (held == n and not x > found[n - 1]):
                        continue
                    held = min(held + 1, n)
                    place = held - 1
                    while place > 0 and x > found[place - 1]:
                        found[place], out[place] = found[place - 1], out[place - 1]
                        place -= 1
                    found[place], out[place] = x, token
        return held

    return SimpleNamespace(kth_largest=kth_largest, top_ids=top_ids)
