"""The first op: a chunk of a row's logits a task, adjusted and summed up."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, types

from ..intrin.sync import as_pointer
from ..jit import inlined, task
from ..words import f32, i32, i64
from .args import CHUNK, PARTIAL_BYTES, partial_at, sampling_at, word
from .passes import LEAST, is_finite, make_passes
from .rows import NAN, is_adjusted, is_allowed, mask_of, seen_of

_ZERO = np.float32(0.0)


@functools.cache
def make_scan() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``SAMPLING``: one for a chunk of a row."""
    P = make_passes()
    N, GROUP, STEP, V_ = P.N, P.GROUP, P.STEP, P.V
    pick = P.L.pick
    CHUNK_GROUPS = CHUNK // GROUP
    summarize, find, sum_exp = P.summarize, P.find, P.sum_exp

    @task("sampling-scan-setup")
    def setup(address, index, worker):
        args = sampling_at(address)
        return i64(args.count_at, 0) * ((args.V + CHUNK - 1) // CHUNK)

    @inlined
    def copy_allowed(x, y, mask, first, last):
        """Logits first .. last - 1 from x to y; -inf where the mask forbids."""
        nothing, whole = V_.broadcast(LEAST), first + (last - first) // N * N
        for v in range(first, whole, N):
            value = V_.load_f32(x + 4 * v)
            if mask != 0:
                if N == 16:
                    bits = types.int64(carray(as_pointer(mask + v // 8), (1,), types.uint16)[0])
                else:
                    bits = types.int64(carray(as_pointer(mask + v // 8), (1,), types.uint8)[0])
                value = pick(bits, value, nothing)
            V_.store_f32(y + 4 * v, value)
        out = carray(as_pointer(y), (last,), types.float32)
        for v in range(whole, last):
            out[v] = f32(x, v) if is_allowed(mask, v) else LEAST

    @inlined
    def adjust(args, r, first, last):
        """``ref.sampling.adjusted`` of logits first .. last - 1."""
        x, y = args.logits + r * args.logits_stride, args.adjusted + 4 * r * args.V
        copy_allowed(x, y, mask_of(args, r), first, last)
        out = carray(as_pointer(y), (last,), types.float32)
        start = i64(args.bias_start, r)
        for i in range(start, start + i64(args.bias_count, r)):
            v = types.int64(i32(args.bias_ids, i))
            if first <= v < last:
                out[v] += f32(args.bias, i)
        table = seen_of(args, r)
        if table == 0:
            return
        seen = carray(as_pointer(table), (last,), types.int32)
        repetition, presence = f32(args.repetition, r), f32(args.presence, r)
        frequency = f32(args.frequency, r)
        for v in range(first, last):
            if seen[v] != 0:
                value = out[v]
                value = value / repetition if value > _ZERO else value * repetition
                times = seen[v] >> 1
                value -= frequency * types.float32(times)
                out[v] = value - presence if times > 0 else value

    @inlined
    def first_nan(row, first, last):
        for v in range(first, last):
            value = f32(row, v)
            if value != value:
                return v
        return -1

    @task("sampling-scan")
    def run(address, index, worker):
        args = sampling_at(address)
        V = args.V
        chunks = (V + CHUNK - 1) // CHUNK
        r, chunk = index // chunks, index % chunks
        groups = (V + GROUP - 1) // GROUP
        first, last = chunk * CHUNK, min(chunk * CHUNK + CHUNK, V)
        from_group = chunk * CHUNK_GROUPS
        to_group = min(from_group + CHUNK_GROUPS, groups)
        maxima = args.maxima + STEP * groups * r
        partial = partial_at(args.partials + PARTIAL_BYTES * index)
        adjusted, wanted = is_adjusted(args, r), i64(args.logprobs, r) >= 0
        row = args.logits + r * args.logits_stride
        best, broken = LEAST, False
        total = _ZERO
        for after in range(2 if adjusted else 1):
            if adjusted and after == 1:
                adjust(args, r, first, last)
                row = args.adjusted + 4 * r * V
            elif adjusted and not wanted:
                continue
            best, broken = summarize(row, V, from_group, to_group, maxima)
            if after == 0 and wanted:
                partial.top = word(NAN if broken else best)
                if is_finite(best) and not broken:
                    total = sum_exp(row, V, from_group, to_group, best)
                partial.total = word(total)
        partial.first_nan = first_nan(row, first, last) if broken else -1
        partial.best = word(best)
        partial.best_id = find(row, V, from_group, to_group, maxima, best)
        return 0

    return setup, run
