"""The third op: a row a task; what its chunks have found becomes a token and its logprobs."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import carray, types

from ...ref.sampling import MAX_LOGPROBS
from ..intrin.sync import as_pointer
from ..jit import inlined, task
from ..job import f32, i64, poke_f32, poke_i64
from .job import CANDIDATES, CHUNK, number, sampling_at
from .passes import LEAST, is_finite, make_passes
from .rows import (
    NAN,
    heat_of,
    is_adjusted,
    is_allowed,
    keeps_all,
    largest,
    partial_of,
    row_of,
)
from .select import from_ordered, make_select, ordered

_ZERO, _ONE, _INFINITY = np.float32(0.0), np.float32(1.0), np.float32(np.inf)


@functools.cache
def make_finish() -> tuple[Any, Any]:
    """Compiles (open, run), tasks of ``SAMPLING``, to be run last: one for a row."""
    P, S = make_passes(), make_select()
    N, GROUP, STEP = P.N, P.GROUP, P.STEP
    best_draw, nucleus_mass, summarize = P.best_draw, P.nucleus_mass, P.summarize
    kth_largest, top_ids = S.kth_largest, S.top_ids

    @task("sampling-finish-open")
    def opening(address, index, worker):
        return i64(sampling_at(address).count_at, 0)

    @inlined
    def largest_and_mass(job, r, chunks):
        """(largest logit of a row as it came, log of the sum of ``exp(logit - largest)``: NaN if
        there is no finite largest)."""
        top = LEAST
        for c in range(chunks):
            mine = number(partial_of(job, r, c).top)
            if mine != mine:
                return NAN, NAN
            top = max(top, mine)
        if not is_finite(top):
            return top, NAN
        total = _ZERO
        for c in range(chunks):
            partial = partial_of(job, r, c)
            less = types.float32(math.exp(number(partial.top) - top))
            total += number(partial.total) * less
        return top, types.float32(math.log(total))

    @inlined
    def draw(job, r, chunks, groups, maxima, best, best_id, heat, spare):
        """The token of a row without NaN whose largest logit is above -inf, not greedily."""
        V, row = job.V, row_of(job, r)
        seed, draws = i64(job.seed, r), i64(job.draws, r)
        least, floor = LEAST, LEAST
        top, token, p = best / heat, -1, f32(job.top_p, r)
        limited = not keeps_all(job, r)
        if limited:
            k, min_p = i64(job.top_k, r), f32(job.min_p, r)
            if 0 < k < V:
                least = kth_largest(row, V, groups, maxima, k, best, spare)
            if min_p > _ZERO:
                floor = types.float32(top + types.float32(math.log(min(min_p, _ONE))))
        else:
            noisy = LEAST
            for c in range(chunks):
                partial = partial_of(job, r, c)
                if number(partial.noisy) > noisy:
                    noisy, token = number(partial.noisy), partial.noisy_id
        if not p >= _ONE and not is_finite(top):
            return best_id  # no sum says more than that it has all the mass
        limit = least
        while True:
            if token < 0:
                _, token = best_draw(
                    row, V, 0, groups, maxima, heat, seed, draws, best_id, limit, floor
                )
            if p >= _ONE:
                return token
            border = f32(row, token) + _ZERO  # not -0, whose next larger one is 0: no larger
            if not border < best:
                return token
            mass, upper = nucleus_mass(row, V, groups, maxima, heat, top, least, floor, border)
            if upper < p * mass:
                return token
            # No token as small as this one is in the nucleus: the best of those above it, if any.
            limit, token = from_ordered(ordered(border) + 1), -1

    @inlined
    def choose(job, r, chunks, groups, maxima, spare):
        best, best_id, first_nan = largest(job, r)
        if first_nan >= 0:
            return first_nan
        if best_id < 0:  # nothing is above -inf
            mask = i64(job.mask, r)
            for v in range(job.V):
                if is_allowed(mask, v):
                    return v
            return -1
        heat = heat_of(job, r)
        if heat > _ZERO:
            return draw(job, r, chunks, groups, maxima, best, best_id, heat, spare)
        return best_id

    @inlined
    def report(job, r, token, chunks, groups, maxima, spare):
        """Writes the logprobs of a row; what is not wanted or not there as -1 and NaN."""
        ids = job.top_ids + 8 * MAX_LOGPROBS * r
        values = job.top_logprobs + 4 * MAX_LOGPROBS * r
        out = carray(as_pointer(values), (MAX_LOGPROBS,), types.float32)
        wanted, held, own = i64(job.logprobs, r), 0, NAN
        top, mass = LEAST, NAN
        if wanted >= 0 and token >= 0:
            top, mass = largest_and_mass(job, r, chunks)
            row = job.logits + r * job.logits_stride
            if is_finite(mass):
                own = f32(row, token) - top - mass
                if wanted > 0:
                    if is_adjusted(job, r):  # the maxima are of the adjusted logits
                        maxima = spare + 4 * (CANDIDATES + N)
                        summarize(row, job.V, 0, groups, maxima)
                    n = min(wanted, MAX_LOGPROBS)
                    held = top_ids(row, job.V, groups, maxima, n, top, ids, values)
            for i in range(held):
                out[i] = out[i] - top - mass
        poke_f32(job.logprobs_out + 4 * r, own)
        for i in range(held, MAX_LOGPROBS):
            poke_i64(ids, i, -1)
            out[i] = NAN

    @task("sampling-finish")
    def run(address, r, worker):
        job = sampling_at(address)
        chunks = (job.V + CHUNK - 1) // CHUNK
        groups = (job.V + GROUP - 1) // GROUP
        maxima = job.maxima + STEP * groups * r
        spare = job.scratch + worker * job.scratch_stride
        token = choose(job, r, chunks, groups, maxima, spare)
        poke_i64(job.tokens, r, token)
        report(job, r, token, chunks, groups, maxima, spare)
        return 0

    return opening, run
