"""Rotary embedding: cos and sin of a step's positions once, for all layers, and their use.

Twin of ``ref.rope``. Pairs stay where they are: (2i, 2i + 1) if interleaved, else (i, i + R / 2).
"""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import carray, types

from .intrin.descriptor import descriptor
from .intrin.scalar import f32_from_bits
from .intrin.sync import as_pointer
from .jit import inlined, task
from .words import f32, i64

ROPE, rope_at = descriptor(
    "rope",
    (
        "count_at",  # address of the number of tokens
        "positions",  # int64 [T]
        "frequencies",  # float32 [half]
        "half",  # R / 2
        "scale",  # of cos and sin, bits of a float32
        "out",  # float32 [T, 2, half]: cos, then sin
    ),
)


@functools.cache
def make_rope_table() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``ROPE``: one a token."""

    @task("rope-setup")
    def setup(address, index, worker):
        return i64(rope_at(address).count_at, 0)

    @task("rope")
    def run(address, t, worker):
        args = rope_at(address)
        half = args.half
        frequencies = carray(as_pointer(args.frequencies), (half,), types.float32)
        out = carray(as_pointer(args.out + 8 * half * t), (2 * half,), types.float32)
        position, scale = (
            types.float32(i64(args.positions, t)),
            f32_from_bits(types.uint32(args.scale)),
        )
        for i in range(half):
            angle = types.float32(position * frequencies[i])
            out[i] = types.float32(math.cos(angle)) * scale
            out[half + i] = types.float32(math.sin(angle)) * scale
        return 0

    return setup, run


@inlined
def rotate(x, table, half, interleaved, pair):
    """The two rotated numbers of a pair of x, float32, by a token's row of the table."""
    a_at = 2 * pair if interleaved != 0 else pair
    b_at = a_at + 1 if interleaved != 0 else pair + half
    a, b = f32(x, a_at), f32(x, b_at)
    cos, sin = f32(table, pair), f32(table, half + pair)
    return a * cos - b * sin, a * sin + b * cos, a_at, b_at
