"""Gates: heads times the sigmoid or the SiLU of theirs, normed before; and the delta rule's own.

Twins of ``ref.gated_rms_norm``, ``ref.sigmoid_mul`` and ``ref.delta_gates``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import types

from ..attention.softmax import LOG2E, make_exp2
from ..intrin.descriptor import descriptor
from ..intrin.scalar import f32_from_bits
from ..jit import inlined, task
from ..vectors import make_vectors
from ..words import f32, i64, poke_f32

_HEADS = 16
"""Heads of a task."""
_TOKENS = 16
"""Tokens of a task of ``DELTA_GATES``."""
_ZERO, _ONE = np.float32(0), np.float32(1)

GATE, gate_at = descriptor(
    "gate",
    (
        "count_at",  # address of the number of tokens
        "x",  # float32 [T, heads, D]
        "x_stride",  # bytes from a token to the next; heads follow each other
        "gate",  # float32 [T, heads, D], or one number a head
        "gate_stride",
        "gate_head_bytes",  # from a head to the next
        "one",  # whether a head's gate is one number
        "weight",  # float32 [D], of the norm, after which the gate's SiLU follows; 0: its sigmoid
        "eps",  # bits of a float32
        "heads",
        "D",  # a multiple of 16
        "out",  # float32 [T, heads, D]; may be x
        "out_stride",
    ),
)

DELTA_GATES, delta_gates_at = descriptor(
    "delta_gates",
    (
        "count_at",  # address of the number of tokens
        "a",  # float32 [T, HV]
        "a_stride",  # bytes
        "b",  # float32 [T, HV]
        "b_stride",
        "rate",  # float32 [HV]: -exp(a_log)
        "dt_bias",  # float32 [HV]
        "HV",
        "g",  # float32 [T, HV]
        "beta",  # float32 [T, HV]
    ),
)


@functools.cache
def make_sigmoid(N: int) -> Any:
    """``sigmoid(x)`` of N floats, without overflow; NaN stays NaN."""
    V: Any = make_vectors(N)
    exp2, minus_log2e = make_exp2(N), np.float32(-LOG2E)

    @inlined
    def sigmoid(x):
        small = exp2(V.mul(V.absolute(x), V.broadcast(minus_log2e)))  # exp(-|x|)
        one = V.broadcast(_ONE)
        return V.div(V.where_less(x, V.zero(), small, one), V.add(one, small))

    return sigmoid


@functools.cache
def make_gate(N: int) -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``GATE``: 16 heads of a token."""
    V: Any = make_vectors(N)
    sigmoid = make_sigmoid(N)

    @task("gate-setup")
    def setup(address, index, worker):
        args = gate_at(address)
        return i64(args.count_at, 0) * ((args.heads + _HEADS - 1) // _HEADS)

    @inlined
    def inverse_rms(x, D, eps):
        squares = V.zero()
        for d in range(0, 4 * D, 4 * N):
            value = V.load_f32(x + d)
            squares = V.fma(value, value, squares)
        mean = V.sum(squares) / types.float32(D) + eps
        return _ONE / types.float32(mean ** types.float32(0.5))

    @task(f"gate-x{N}")
    def run(address, index, worker):
        args = gate_at(address)
        chunks = (args.heads + _HEADS - 1) // _HEADS
        t, first = index // chunks, index % chunks * _HEADS
        D, factor = args.D, _ONE
        for head in range(first, min(first + _HEADS, args.heads)):
            x = args.x + t * args.x_stride + 4 * D * head
            gate = args.gate + t * args.gate_stride + head * args.gate_head_bytes
            out = args.out + t * args.out_stride + 4 * D * head
            if args.weight != 0:
                factor = inverse_rms(x, D, f32_from_bits(types.uint32(args.eps)))
            by = V.broadcast(factor)
            for d in range(0, 4 * D, 4 * N):
                g = V.broadcast_at(gate) if args.one != 0 else V.load_f32(gate + d)
                value, opened = V.load_f32(x + d), sigmoid(g)
                if args.weight != 0:
                    value = V.mul(V.mul(value, by), V.load_f32(args.weight + d))
                    opened = V.mul(opened, g)
                V.store_f32(out + d, V.mul(value, opened))
        return 0

    return setup, run


@functools.cache
def make_delta_gates() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``DELTA_GATES``: 16 tokens."""

    @task("delta-gates-setup")
    def setup(address, index, worker):
        return (i64(delta_gates_at(address).count_at, 0) + _TOKENS - 1) // _TOKENS

    @task("delta-gates")
    def run(address, index, worker):
        args = delta_gates_at(address)
        last = min((index + 1) * _TOKENS, i64(args.count_at, 0))
        for t in range(index * _TOKENS, last):
            for head in range(args.HV):
                x = f32(args.a + t * args.a_stride, head) + f32(args.dt_bias, head)
                steps = x  # softplus: log(1 + exp(x)), which is x + log(1 + exp(-x)) too
                if x < _ZERO:
                    steps = types.float32(math.log1p(math.exp(x)))
                else:
                    steps += types.float32(math.log1p(math.exp(-x)))
                at = 4 * (t * args.HV + head)
                poke_f32(args.g + at, f32(args.rate, head) * steps)
                b = f32(args.b + t * args.b_stride, head)
                poke_f32(args.beta + at, _ONE / (_ONE + types.float32(math.exp(-b))))
        return 0

    return setup, run
