"""Passes over a row of logits, group by group: largest of lanes, sums of exps, the best draw.

A *group* is ``GROUP_VECTORS`` vectors. The largest of each of its lanes are kept (``maxima``, a
sixteenth of the row), so what looks for few logits reads these, and only the groups that have one.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import carray, types

from ...target import detect
from ..intrin.registers import stack_alloc
from ..intrin.sync import as_pointer
from ..jit import inlined
from ..vectors import make_vectors, width
from ..words import f32
from .args import GROUP_VECTORS
from .lanes import make_lanes

LEAST = np.float32(-np.inf)
LOWEST = np.finfo(np.float32).min
"""Perturbed logits are not below: what may be drawn is above what may not."""
_MOST_NOISE = np.float32(16.7)  # -log(-log(1 - 2**-24)) is 16.64
_ONE = np.float32(1.0)


@functools.cache
def make_passes() -> Any:
    """The passes, for this CPU's vectors. ``row`` is the address of float32 [V] throughout, a
    vector's loads need no alignment; ``g`` counts groups."""
    N = width(detect())
    V_, L = make_vectors(N), make_lanes(N)
    GROUP = GROUP_VECTORS * N
    SPARE = 4 * GROUP
    STEP = 4 * N
    BEST = 8 * N
    at_least, above, equal, pick, poison = L.at_least, L.above, L.equal, L.pick, L.poison
    exp, gumbel, lane_numbers, lowest = L.exp, L.gumbel, L.lane_numbers, L.lowest

    @inlined
    def group_at(row, V, g, spare):
        """Address of a group; of the row's last one, if it is not whole, of a copy with -inf
        behind."""
        first = g * GROUP
        if first + GROUP <= V:
            return row + 4 * first
        out = carray(as_pointer(spare), (GROUP,), types.float32)
        for i in range(GROUP):
            out[i] = f32(row, first + i) if first + i < V else LEAST
        return spare

    @inlined
    def summarize(row, V, first, last, maxima):
        """Writes the maxima of groups first .. last - 1; returns (largest, whether there is a NaN,
        which counts for neither)."""
        spare = stack_alloc(SPARE)
        most, broken = V_.broadcast(LEAST), V_.zero()
        for g in range(first, last):
            at = group_at(row, V, g, spare)
            top = V_.broadcast(LEAST)
            for i in range(GROUP_VECTORS):
                x = V_.load_f32(at + STEP * i)
                top = V_.largest(x, top)
                broken = poison(broken, x)
            V_.store_f32(maxima + STEP * g, top)
            most = V_.largest(top, most)
        total = V_.sum(broken)
        return V_.maximum(most), total != total

    @inlined
    def find(row, V, first, last, maxima, value):
        """The lowest id of ``value`` in groups first .. last - 1; -1: not there."""
        spare = stack_alloc(SPARE)
        wanted = V_.broadcast(value)
        for g in range(first, last):
            if equal(V_.load_f32(maxima + STEP * g), wanted) == 0:
                continue
            at = group_at(row, V, g, spare)
            for i in range(GROUP_VECTORS):
                same = equal(V_.load_f32(at + STEP * i), wanted)
                if same != 0:
                    return g * GROUP + i * N + lowest(same)
        return -1

    @inlined
    def sum_exp(row, V, first, last, top):
        """Sum of ``exp(logit - top)`` over groups first .. last - 1."""
        spare = stack_alloc(SPARE)
        low, high, less = V_.zero(), V_.zero(), V_.broadcast(top)
        for g in range(first, last):
            at = group_at(row, V, g, spare)
            for i in range(0, GROUP_VECTORS, 2):
                low = V_.add(low, exp(V_.sub(V_.load_f32(at + STEP * i), less)))
                high = V_.add(high, exp(V_.sub(V_.load_f32(at + STEP * i + STEP), less)))
        return V_.sum(V_.add(low, high))

    @inlined
    def nucleus_mass(row, V, groups, maxima, heat, top, least, floor, border):
        """Sums of ``exp(logit / heat - top)``: (of all that are at least ``least``, divided by heat
        ``floor``; of those of them above ``border``)."""
        spare = stack_alloc(SPARE)
        whole, upper = V_.zero(), V_.zero()
        by, less, low = V_.broadcast(heat), V_.broadcast(top), V_.broadcast(least)
        bottom, edge = V_.broadcast(floor), V_.broadcast(border)
        for g in range(groups):
            if at_least(V_.load_f32(maxima + STEP * g), low) == 0:
                continue
            at = group_at(row, V, g, spare)
            for i in range(GROUP_VECTORS):
                x = V_.load_f32(at + STEP * i)
                scaled = V_.div(x, by)
                stay = at_least(x, low) & at_least(scaled, bottom)
                part = pick(stay, exp(V_.sub(scaled, less)), V_.zero())
                whole = V_.add(whole, part)
                upper = V_.add(upper, pick(above(x, edge), part, V_.zero()))
        return V_.sum(whole), V_.sum(upper)

    @inlined
    def best_draw(row, V, first, last, maxima, heat, seed, draws, best_id, least, floor):
        """(largest perturbed logit, its lowest id) of those in groups first .. last - 1 that are
        above -inf, at least ``least`` and, divided by heat, ``floor``; (-inf, -1) if none is.

        Noise is made only for what can still win, also against ``best_id``, one such token of any
        group: the row's largest leaves few.
        """
        spare, lanes = stack_alloc(SPARE), stack_alloc(BEST)
        key_low, key_high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
        draws_low, draws_high = draws & 0xFFFFFFFF, (draws >> 32) & 0xFFFFFFFF
        by, low, bottom = V_.broadcast(heat), V_.broadcast(least), V_.broadcast(floor)
        nothing, bound = V_.broadcast(LEAST), V_.broadcast(types.float32(LOWEST))
        best, best_at = nothing, V_.zero()
        v = best_id // N * N
        V_.store_f32(lanes, gumbel(v, key_low, key_high, draws_low, draws_high))
        rival = f32(row, best_id) / heat + f32(lanes, best_id - v)
        limit = max(floor, types.float32(rival - _MOST_NOISE))
        for g in range(first, last):
            edge = V_.broadcast(limit)
            summary = V_.load_f32(maxima + STEP * g)
            if at_least(summary, low) & at_least(V_.div(summary, by), edge) == 0:
                continue
            at = group_at(row, V, g, spare)
            for i in range(GROUP_VECTORS):
                x = V_.load_f32(at + STEP * i)
                scaled = V_.div(x, by)
                may = at_least(x, low) & above(x, nothing) & at_least(scaled, bottom)
                if may & at_least(scaled, edge) == 0:
                    continue
                v = g * GROUP + i * N
                noise = gumbel(v, key_low, key_high, draws_low, draws_high)
                noisy = V_.largest(V_.add(scaled, noise), bound)
                noisy = pick(may, noisy, nothing)
                better = above(noisy, best)
                best = V_.largest(noisy, best)
                numbers = V_.add(V_.broadcast(types.float32(v)), lane_numbers())
                best_at = pick(better, numbers, best_at)
            limit = max(limit, types.float32(V_.maximum(best) - _MOST_NOISE))
        V_.store_f32(lanes, best)
        V_.store_f32(lanes + STEP, best_at)
        value, token = LEAST, -1
        for lane in range(N):
            mine, v = f32(lanes, lane), types.int64(f32(lanes + STEP, lane))
            if mine > value or (mine == value and mine > LEAST and v < token):
                value, token = mine, v
        return value, token

    @inlined
    def count(at, vectors, least):
        """How many of ``vectors`` vectors' floats are at least ``least``."""
        low, one = V_.broadcast(least), V_.broadcast(_ONE)
        even, odd = V_.zero(), V_.zero()
        for i in range(0, vectors // 2 * 2, 2):
            even = V_.add(even, pick(at_least(V_.load_f32(at + STEP * i), low), one, V_.zero()))
            x = V_.load_f32(at + STEP * i + STEP)
            odd = V_.add(odd, pick(at_least(x, low), one, V_.zero()))
        if vectors % 2 != 0:
            x = V_.load_f32(at + STEP * (vectors - 1))
            even = V_.add(even, pick(at_least(x, low), one, V_.zero()))
        return types.int64(V_.sum(V_.add(even, odd)))

    return SimpleNamespace(
        N=N,
        GROUP=GROUP,
        SPARE=SPARE,
        STEP=STEP,
        V=V_,
        L=L,
        group_at=group_at,
        summarize=summarize,
        find=find,
        sum_exp=sum_exp,
        nucleus_mass=nucleus_mass,
        best_draw=best_draw,
        count=count,
    )


@inlined
def is_finite(value):
    """Whether a float32 is."""
    return not (math.isnan(value) or math.isinf(value))
