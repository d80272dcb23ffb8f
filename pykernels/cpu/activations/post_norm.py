"""What a branch gives to the residual stream, normed before it joins. Twin of ``ref.post_norm``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from ...target import detect
from ..intrin.descriptor import descriptor
from ..intrin.scalar import f32_from_bits
from ..jit import task
from ..norm import make_sums
from ..vectors import make_vectors, width
from ..words import f32, i64, poke_f32

POST_NORM, post_norm_at = descriptor(
    "post_norm",
    (
        "count_at",  # address of the number of tokens
        "x",  # float32 [T, H], the residual; 0: none
        "x_stride",  # bytes
        "adds",  # address of ``norm.ADD`` records, add_count of them, one at the least
        "add_count",
        "weight",  # float32 [H]
        "scale",  # float32 [1], of the result; 0: none
        "eps",  # bits of a float32
        "H",
        "out",  # float32 [T, H]; may be x
        "out_stride",
        "scratch",  # float32 [H] of worker 0; the next one's is scratch_stride on
        "scratch_stride",
    ),
)

_ONE = np.float32(1)


@functools.cache
def make_post_norm() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``POST_NORM``: one for each token."""
    V = make_vectors(width(detect()))
    N: int = V.N
    addend, add_two = make_sums(N)

    @task("post-norm-setup")
    def setup(address, index, worker):
        return i64(post_norm_at(address).count_at, 0)

    @task("post-norm")
    def run(address, index, worker):
        args = post_norm_at(address)
        H, to = args.H, args.scratch + worker * args.scratch_stride
        rows = (addend(args, index, 0), addend(args, index, 1), addend(args, index, 2))
        total = add_two(rows[0], rows[1], rows[2], H, to)
        for i in range(3, args.add_count, 2):
            total = add_two(to, addend(args, index, i), addend(args, index, i + 1), H, to)
        mean = total / types.float32(H) + f32_from_bits(types.uint32(args.eps))
        factor = _ONE / types.float32(mean ** types.float32(0.5))
        scale = f32(args.scale, 0) if args.scale != 0 else _ONE
        x = args.x + index * args.x_stride if args.x != 0 else 0
        out, whole = args.out + index * args.out_stride, H // N * N
        for h in range(0, whole, N):
            value = V.mul(V.load_f32(to + 4 * h), V.broadcast(factor))
            value = V.mul(value, V.load_f32(args.weight + 4 * h))
            if x != 0:
                value = V.add(value, V.load_f32(x + 4 * h))
            V.store_f32(out + 4 * h, V.mul(value, V.broadcast(scale)))
        for h in range(whole, H):
            one = f32(to, h) * factor * f32(args.weight, h)
            if x != 0:
                one += f32(x, h)
            poke_f32(out + 4 * h, one * scale)
        return 0

    return setup, run
