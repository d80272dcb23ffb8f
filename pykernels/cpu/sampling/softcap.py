"""The cap of logits, before one is drawn. Twin of ``ref.softcap``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from ..delta_net.gate import make_sigmoid
from ..intrin.descriptor import descriptor
from ..intrin.scalar import f32_from_bits
from ..jit import task
from ..vectors import make_vectors
from ..words import i64, poke_f32

SOFTCAP, softcap_at = descriptor(
    "softcap",
    (
        "count_at",  # address of the number of rows
        "x",  # float32 [R, V], changed in place
        "x_stride",  # bytes
        "V",
        "cap",  # bits of a float32
    ),
)

_PIECE = 4096
"""Logits of a task."""
_TWO = np.float32(2)


@functools.cache
def make_softcap(N: int) -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``SOFTCAP``: 4,096 numbers of a row."""
    V: Any = make_vectors(N)
    sigmoid = make_sigmoid(N)

    @task("softcap-setup")
    def setup(address, index, worker):
        args = softcap_at(address)
        return i64(args.count_at, 0) * ((args.V + _PIECE - 1) // _PIECE)

    @task(f"softcap-x{N}")
    def run(address, index, worker):
        """``tanh(x)`` is ``2 * sigmoid(2 * x) - 1``."""
        args = softcap_at(address)
        pieces = (args.V + _PIECE - 1) // _PIECE
        first = index % pieces * _PIECE
        row, cap = args.x + index // pieces * args.x_stride, f32_from_bits(types.uint32(args.cap))
        by, twice = V.broadcast(_TWO / cap), V.broadcast(_TWO * cap)
        last = min(first + _PIECE, args.V)
        whole = first + (last - first) // N * N
        for v in range(first, whole, N):
            opened = sigmoid(V.mul(V.load_f32(row + 4 * v), by))
            V.store_f32(row + 4 * v, V.fma(opened, twice, V.broadcast(-cap)))
        for v in range(whole, last):
            opened = V.first(sigmoid(V.mul(V.broadcast_at(row + 4 * v), by)))
            poke_f32(row + 4 * v, opened * _TWO * cap - cap)
        return 0

    return setup, run
