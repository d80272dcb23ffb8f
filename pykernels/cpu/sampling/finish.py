"""The third op: a row a task; what its chunks have found becomes a token and its logprobs, and the
token is counted for the penalties of those to come."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import carray, types

from ...ref.sampling import MAX_LOGPROBS
from ..intrin.sync import as_pointer
from ..jit import inlined, task
from ..words import f32, i64, poke_f32, poke_i64
from .args import CANDIDATES, CHUNK, number, sampling_at
from .passes import LEAST, is_finite, make_passes
from .rows import (
    NAN,
    heat_of,
    is_adjusted,
    is_allowed,
    keeps_all,
    largest,
    mask_of,
    partial_of,
    row_of,
    seen_of,
)
from .select import from_ordered, make_select, ordered

_ZERO, _ONE, _INFINITY = np.float32(0.0), np.float32(1.0), np.float32(np.inf)


@functools.cache
def make_finish() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``SAMPLING``, to be run last: one for a row."""
    P, S = make_passes(), make_select()
    N, GROUP, STEP = P.N, P.GROUP, P.STEP
    best_draw, nucleus_mass, summarize = P.best_draw, P.nucleus_mass, P.summarize
    kth_largest, top_ids = S.kth_largest, S.top_ids

    @task("sampling-finish-setup")
    def setup(address, index, worker):
        return i64(sampling_at(address).count_at, 0)

    @inlined
    def largest_and_mass(args, r, chunks):
        """(largest logit of a row as it came, log of the sum of ``exp(logit - largest)``: NaN if
        there is no finite largest)."""
        top = LEAST
        for c in range(chunks):
            mine = number(partial_of(args, r, c).top)
            if mine != mine:
                return NAN, NAN
            top = max(top, mine)
        if not is_finite(top):
            return top, NAN
        total = _ZERO
        for c in range(chunks):
            partial = partial_of(args, r, c)
            less = types.float32(math.exp(number(partial.top) - top))
            total += number(partial.total) * less
        return top, types.float32(math.log(total))

    @inlined
    def draw(args, r, chunks, groups, maxima, best, best_id, heat, spare):
        """The token of a row without NaN whose largest logit is above -inf, not greedily."""
        V, row = args.V, row_of(args, r)
        seed, draws = i64(args.seed, r), i64(args.draws, r)
        least, floor = LEAST, LEAST
        top, token, p = best / heat, -1, f32(args.top_p, r)
        limited = not keeps_all(args, r)
        if limited:
            k, min_p = i64(args.top_k, r), f32(args.min_p, r)
            if 0 < k < V:
                least = kth_largest(row, V, groups, maxima, k, best, spare)
            if min_p > _ZERO:
                floor = types.float32(top + types.float32(math.log(min(min_p, _ONE))))
        else:
            noisy = LEAST
            for c in range(chunks):
                partial = partial_of(args, r, c)
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
    def choose(args, r, chunks, groups, maxima, spare):
        best, best_id, first_nan = largest(args, r)
        if first_nan >= 0:
            return first_nan
        if best_id < 0:  # nothing is above -inf
            mask = mask_of(args, r)
            for v in range(args.V):
                if is_allowed(mask, v):
                    return v
            return -1
        heat = heat_of(args, r)
        if heat > _ZERO:
            return draw(args, r, chunks, groups, maxima, best, best_id, heat, spare)
        return best_id

    @inlined
    def report(args, r, token, chunks, groups, maxima, spare):
        """Writes the logprobs of a row; what is not wanted or not there as -1 and NaN."""
        ids = args.top_ids + 8 * MAX_LOGPROBS * r
        values = args.top_logprobs + 4 * MAX_LOGPROBS * r
        out = carray(as_pointer(values), (MAX_LOGPROBS,), types.float32)
        wanted, held, own = i64(args.logprobs, r), 0, NAN
        top, mass = LEAST, NAN
        if wanted >= 0 and token >= 0:
            top, mass = largest_and_mass(args, r, chunks)
            row = args.logits + r * args.logits_stride
            if is_finite(mass):
                own = f32(row, token) - top - mass
                if wanted > 0:
                    if is_adjusted(args, r):  # the maxima are of the adjusted logits
                        maxima = spare + 4 * (CANDIDATES + N)
                        summarize(row, args.V, 0, groups, maxima)
                    n = min(wanted, MAX_LOGPROBS)
                    held = top_ids(row, args.V, groups, maxima, n, top, ids, values)
            for i in range(held):
                out[i] = out[i] - top - mass
        poke_f32(args.logprobs_out + 4 * r, own)
        for i in range(held, MAX_LOGPROBS):
            poke_i64(ids, i, -1)
            out[i] = NAN

    @task("sampling-finish")
    def run(address, r, worker):
        args = sampling_at(address)
        chunks = (args.V + CHUNK - 1) // CHUNK
        groups = (args.V + GROUP - 1) // GROUP
        maxima = args.maxima + STEP * groups * r
        spare = args.scratch + worker * args.scratch_stride
        token = choose(args, r, chunks, groups, maxima, spare)
        poke_i64(args.tokens, r, token)
        seen = seen_of(args, r)
        if seen != 0 and token >= 0:
            carray(as_pointer(seen), (token + 1,), types.int32)[token] += 2
        report(args, r, token, chunks, groups, maxima, spare)
        return 0

    return setup, run
