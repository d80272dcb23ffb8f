"""Each token's experts in two parts by their weights. Twin of ``ref.router.split_routing``."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from .intrin.descriptor import descriptor
from .intrin.registers import stack_alloc
from .intrin.sync import as_pointer
from .jit import task
from .words import i64

MAX_TOPK = 64
"""Experts of a token, at most."""
_ORDER_BYTES = 8 * MAX_TOPK

SPLIT, split_at = descriptor(
    "split_routing",
    (
        "count_at",  # address of the number of tokens
        "ids",  # int64 [T, topk]; -1: not here
        "weights",  # float32 [T, topk]
        "topk",
        "last",  # of the smallest weights, which go into the second part
        "whole",  # int64 [T]: a token with another number than 0 is not parted; 0: all are
        "first_ids",  # int64 [T, topk], -1 where it is in the other part
        "last_ids",  # likewise; 0: the second part is dropped
    ),
)


@functools.cache
def make_split() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``SPLIT``: one for all tokens of a step."""

    @task("split-routing-setup")
    def setup(address, index, worker):
        return 1 if i64(split_at(address).count_at, 0) > 0 else 0

    @task("split-routing")
    def run(address, index, worker):
        args = split_at(address)
        topk = args.topk
        order = carray(as_pointer(stack_alloc(_ORDER_BYTES)), (topk,), types.int64)
        for t in range(i64(args.count_at, 0)):
            ids = carray(as_pointer(args.ids + 8 * t * topk), (topk,), types.int64)
            weights = carray(as_pointer(args.weights + 4 * t * topk), (topk,), types.float32)
            first = carray(as_pointer(args.first_ids + 8 * t * topk), (topk,), types.int64)
            here = 0
            for k in range(topk):  # insertion keeps equal weights in their order
                first[k] = ids[k]
                if ids[k] < 0:
                    continue
                at = here
                while at > 0 and weights[order[at - 1]] < weights[k]:
                    order[at] = order[at - 1]
                    at -= 1
                order[at] = k
                here += 1
            kept = args.whole != 0 and i64(args.whole, t) != 0
            stay = here if kept else max(0, here - args.last)
            for i in range(stay, here):
                first[order[i]] = -1
            if args.last_ids != 0:
                last = carray(as_pointer(args.last_ids + 8 * t * topk), (topk,), types.int64)
                for k in range(topk):
                    last[k] = -1
                for i in range(stay, here):
                    last[order[i]] = ids[order[i]]
        return 0

    return setup, run
