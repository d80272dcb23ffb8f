"""Each token's experts in two parts by their weights. Twin of ``ref.router.split_routing``."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from .intrin.descriptor import descriptor
from .intrin.registers import stack_alloc
from .intrin.sync import as_pointer
from .jit import task
from .job import i64

MAX_TOPK = 64
"""Experts of a token, at most."""
_ORDER_BYTES = 8 * MAX_TOPK

SPLIT, split_at = descriptor(
    "split_routing",
    (
        "count_at",  # address of the number of tokens
        "ids",  # int64 [T, topk]
        "weights",  # float32 [T, topk]
        "topk",
        "last",  # of the smallest weights, which go into the second part; the others are not 0
        "first_ids",  # int64 [T, topk - last]
        "first_weights",  # float32, the same shape
        "last_ids",  # int64 [T, last]; 0: the second part is dropped
        "last_weights",
    ),
)


@functools.cache
def make_split() -> tuple[Any, Any]:
    """Compiles (open, run), tasks of ``SPLIT``: one for all tokens of a step."""

    @task("split-routing-open")
    def opening(address, index, worker):
        return 1 if i64(split_at(address).count_at, 0) > 0 else 0

    @task("split-routing")
    def run(address, index, worker):
        job = split_at(address)
        topk, last = job.topk, job.last
        first = topk - last
        order = carray(as_pointer(stack_alloc(_ORDER_BYTES)), (topk,), types.int64)
        for t in range(i64(job.count_at, 0)):
            ids = carray(as_pointer(job.ids + 8 * t * topk), (topk,), types.int64)
            weights = carray(as_pointer(job.weights + 4 * t * topk), (topk,), types.float32)
            for k in range(topk):  # insertion keeps equal weights in their order
                at = k
                while at > 0 and weights[order[at - 1]] < weights[k]:
                    order[at] = order[at - 1]
                    at -= 1
                order[at] = k
            to_ids, to_weights = job.first_ids + 8 * t * first, job.first_weights + 4 * t * first
            head_ids = carray(as_pointer(to_ids), (first,), types.int64)
            head_weights = carray(as_pointer(to_weights), (first,), types.float32)
            for k in range(first):
                head_ids[k], head_weights[k] = ids[order[k]], weights[order[k]]
            if job.last_ids == 0:
                continue
            to_ids, to_weights = job.last_ids + 8 * t * last, job.last_weights + 4 * t * last
            tail_ids = carray(as_pointer(to_ids), (last,), types.int64)
            tail_weights = carray(as_pointer(to_weights), (last,), types.float32)
            for k in range(last):
                tail_ids[k], tail_weights[k] = ids[order[first + k]], weights[order[first + k]]
        return 0

    return opening, run
