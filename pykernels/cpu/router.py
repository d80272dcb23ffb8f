"""Routing: experts of each token and their weights, from logits. Twin of ``ref.router``.

Float32; of equal values the lowest index wins; NaN counts as the largest.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import carray, types

from .intrin.descriptor import descriptor
from .intrin.registers import stack_alloc
from .intrin.scalar import f32_from_bits
from .intrin.sync import as_pointer
from .jit import inlined, task
from .words import f32, i64

MAX_EXPERTS = 1024
"""A layer has so many at most."""
_FLOATS = 4 * MAX_EXPERTS

ROUTER, router_at = descriptor(
    "router",
    (
        "count_at",  # address of the number of tokens
        "logits",  # float32 [T, E]
        "logits_stride",  # bytes
        "bias",  # float32 [E] added to the scores for the choice; 0: none
        "E",
        "topk",
        "sigmoid",  # 1: scores are sigmoids, 0: a softmax
        "renormalize",
        "min_sum",  # bits of a float32
        "groups",
        "group_topk",
        "top2",  # 1: a group counts as its two best, 0: as its best
        "scale",  # bits of a float32
        "factors",  # float32 [E], of the experts' weights; 0: none
        "ids",  # int64 [T, width]
        "weights",  # float32 [T, width]
        "width",  # of their rows: topk, and such experts as take every token
        "chunk",  # tokens of a task
    ),
)


@inlined
def _above(a, b):
    """Whether a comes before b."""
    return a > b or (a != a and b == b)


@functools.cache
def make_router() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``ROUTER``: one for ``chunk`` tokens."""

    @task("router-setup")
    def setup(address, index, worker):
        args = router_at(address)
        return (i64(args.count_at, 0) + args.chunk - 1) // args.chunk

    @inlined
    def score(args, logits, scores):
        E = args.E
        if args.sigmoid != 0:
            for e in range(E):
                scores[e] = types.float32(1) / (
                    types.float32(1) + types.float32(math.exp(-logits[e]))
                )
            return
        top = logits[0]
        for e in range(1, E):
            if _above(logits[e], top):
                top = logits[e]
        total = types.float32(0)
        for e in range(E):
            scores[e] = types.float32(math.exp(logits[e] - top))
            total += scores[e]
        for e in range(E):
            scores[e] = scores[e] / total

    @inlined
    def group_value(args, choice, group, per):
        best, second = choice[group * per], types.float32(-math.inf)
        for e in range(group * per + 1, (group + 1) * per):
            if _above(choice[e], best):
                best, second = choice[e], best
            elif _above(choice[e], second):
                second = choice[e]
        return best + second if args.top2 != 0 else best

    @inlined
    def close_groups(args, choice, closed):
        """Marks the experts of groups that are not taken."""
        per = args.E // args.groups
        values = carray(as_pointer(stack_alloc(_FLOATS)), (args.groups,), types.float32)
        for group in range(args.groups):
            values[group] = group_value(args, choice, group, per)
            closed[group * per : (group + 1) * per] = 1
        taken = carray(as_pointer(stack_alloc(MAX_EXPERTS)), (args.groups,), types.uint8)
        taken[:] = 0
        for _ in range(args.group_topk):
            best = -1
            for group in range(args.groups):
                if taken[group] == 0 and (best < 0 or _above(values[group], values[best])):
                    best = group
            taken[best] = 1
            closed[best * per : (best + 1) * per] = 0

    @inlined
    def choose(args, t):
        E = args.E
        at = args.logits + t * args.logits_stride
        logits = carray(as_pointer(at), (E,), types.float32)
        scores = carray(as_pointer(stack_alloc(_FLOATS)), (E,), types.float32)
        choice = carray(as_pointer(stack_alloc(_FLOATS)), (E,), types.float32)
        closed = carray(as_pointer(stack_alloc(MAX_EXPERTS)), (E,), types.uint8)
        ids = carray(as_pointer(args.ids + 8 * t * args.width), (args.topk,), types.int64)
        weights = carray(as_pointer(args.weights + 4 * t * args.width), (args.topk,), types.float32)
        score(args, logits, scores)
        # Scores rise with logits but may round to equal: where nothing else counts, by logits.
        by_logits = args.bias == 0 and (args.top2 == 0 or args.groups == 1)
        for e in range(E):
            choice[e] = logits[e] if by_logits else scores[e]
            closed[e] = 0
        if args.bias != 0:
            bias = carray(as_pointer(args.bias), (E,), types.float32)
            for e in range(E):
                choice[e] += bias[e]
        if args.groups > 1:
            close_groups(args, choice, closed)
        total = types.float32(0)
        for k in range(args.topk):
            best = -1
            for e in range(E):
                if closed[e] == 0 and (best < 0 or _above(choice[e], choice[best])):
                    best = e
            closed[best] = 1
            ids[k], weights[k] = best, scores[best]
            total += scores[best]
        by = f32_from_bits(types.uint32(args.scale))
        total += types.float32(1e-20)
        least = f32_from_bits(types.uint32(args.min_sum))
        total = least if least > total else total
        for k in range(args.topk):
            if args.renormalize != 0:
                weights[k] = weights[k] / total
            weights[k] = weights[k] * by
            if args.factors != 0:
                weights[k] = weights[k] * f32(args.factors, ids[k])

    @task("router")
    def run(address, index, worker):
        args = router_at(address)
        first = index * args.chunk
        for t in range(first, min(first + args.chunk, i64(args.count_at, 0))):
            choose(args, t)
        return 0

    return setup, run
