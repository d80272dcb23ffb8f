"""A causal convolution of each channel with itself, over inputs that a slot keeps between steps;
with gates before and behind it, as LFM2's layers have it.

Twin of ``ref.causal_conv1d``. A task has some channels of one sequence: a token's sums read the
rows before it, which are in the cache, and no task reads what another one writes.
"""

from __future__ import annotations

import functools
from typing import Any

from ..intrin.descriptor import descriptor
from ..jit import inlined, task
from ..vectors import make_vectors
from ..words import i64
from .gate import make_sigmoid

CHANNELS = 256
"""Channels of a task: their K rows of inputs and of weights lie in L1."""

CONV, conv_at = descriptor(
    "causal_conv1d",
    (
        "count_at",  # address of the number of sequences
        "starts",  # int64 [S], the first row of each
        "lengths",  # int64 [S], its rows in this step
        "slots",  # int64 [S], of its state; negative: padding
        "past",  # int64 [S], tokens that the state has seen; 0: it begins as zeros
        "x",  # float32 [T, C]
        "x_stride",  # bytes
        "in_gate",  # float32 [T, C], of x; of gated ones alone
        "in_gate_stride",
        "out_gate",  # float32 [T, C], of the sums
        "out_gate_stride",
        "weight",  # float32 [K, C]: a row for each place
        "bias",  # float32 [C]; 0: none
        "C",  # a multiple of 16
        "state",  # float32 [slots, K - 1, C]
        "slot_bytes",
        "out",  # float32 [T, C], not x itself
        "out_stride",
    ),
)


@functools.cache
def make_causal_conv1d(K: int, silu: bool, gated: bool, N: int) -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``CONV``: ``CHANNELS`` of a sequence.

    Args:
        K: tokens of a sum.
        silu: of the sums.
        gated: whether inputs and sums have gates; the state has inputs times theirs.
        N: floats of a vector, 8 or 16.
    """
    V: Any = make_vectors(N)
    sigmoid = make_sigmoid(N)
    BEFORE = K - 1

    @task("causal-conv1d-setup")
    def setup(address, index, worker):
        args = conv_at(address)
        return i64(args.count_at, 0) * ((args.C + CHANNELS - 1) // CHANNELS)

    @inlined
    def inputs(args, state, row, t, c):
        """A sequence's inputs of token t, which is in that row; before its first one they are the
        state's."""
        if t < 0:
            return V.load_f32(state + (BEFORE + t) * (4 * args.C) + c)
        x = V.load_f32(args.x + row * args.x_stride + c)
        if gated:
            return V.mul(x, V.load_f32(args.in_gate + row * args.in_gate_stride + c))
        return x

    @task(f"causal-conv1d-{K}-{silu}-{gated}-x{N}")
    def run(address, index, worker):
        args = conv_at(address)
        parts = (args.C + CHANNELS - 1) // CHANNELS
        s, part = index // parts, index % parts
        slot, length, start = i64(args.slots, s), i64(args.lengths, s), i64(args.starts, s)
        if slot < 0 or length <= 0:
            return 0
        first, last = 4 * CHANNELS * part, 4 * min(args.C, CHANNELS * (part + 1))
        state, row_bytes = args.state + slot * args.slot_bytes, 4 * args.C
        if i64(args.past, s) == 0:
            for j in range(BEFORE):
                for c in range(first, last, 4 * N):
                    V.store_f32(state + row_bytes * j + c, V.zero())
        for t in range(length):
            out = args.out + (start + t) * args.out_stride
            for c in range(first, last, 4 * N):
                total = V.zero()
                if args.bias != 0:
                    total = V.load_f32(args.bias + c)
                for j in range(K):
                    at = t - BEFORE + j
                    x = inputs(args, state, start + at, at, c)
                    total = V.fma(x, V.load_f32(args.weight + row_bytes * j + c), total)
                if silu:
                    total = V.mul(total, sigmoid(total))
                if gated:
                    gate = args.out_gate + (start + t) * args.out_gate_stride
                    total = V.mul(total, V.load_f32(gate + c))
                V.store_f32(out + c, total)
        for j in range(BEFORE):  # a row is read before it is overwritten
            at = length - BEFORE + j
            for c in range(first, last, 4 * N):
                V.store_f32(state + row_bytes * j + c, inputs(args, state, start + at, at, c))
        return 0

    return setup, run
