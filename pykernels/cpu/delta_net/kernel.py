"""The gated delta rule over states in slots: a decode step's tokens and prompts by one kernel.

Twin of ``ref.gated_delta_rule``. A few tokens (``args.BLOCK``) meet the state at once, which is the
chunked form of the rule with a small chunk. With G the sum of g from the block's first token on,
and S its state before:

    delta_i = beta_i (v_i - e^G_i S^T k_i - sum_{j < i} e^(G_i - G_j) (k_i k_j) delta_j)
    out_i = e^G_i S^T q_i + sum_{j <= i} e^(G_i - G_j) (q_i k_j) delta_j
    S = e^G_n S + sum_j e^(G_n - G_j) k_j delta_j^T

A multiply-add costs the same in all of these, so a token's are 3 DK DV whatever the block, and what
a block adds between its tokens grows with it: with 64 tokens, as on a GPU, that would be as much
again. One token alone reads the state twice, the second time from the cache, and writes it once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from numba import types

from ...errors import PykernelsError
from ..intrin.registers import stack_alloc
from ..intrin.scalar import f32_from_bits
from ..jit import inlined, task
from ..vectors import make_vectors
from ..words import f32, i64, poke_f32
from .args import BLOCK, delta_rule_at
from .products import make_read, make_update

_ROWS = 4
"""Rows of keys or queries that read the state at once, and that it is updated with."""


@dataclass(frozen=True)
class DeltaRule:
    """One op on a ``DELTA_RULE`` record; each task a ``jit.TASK``.

    Attributes:
        setup: returns the tasks of ``run``.
        run: a head of a sequence, or ``columns`` of it.
        strip: ``columns`` is a multiple of this, and DV of ``columns``.
    """

    setup: Any
    run: Any
    strip: int


def _vectors_of(DV: int, N: int, most: int) -> int:
    return next(n for n in range(most, 0, -1) if DV // N % n == 0)


@functools.cache
def make_delta_rule(DK: int, DV: int, N: int) -> DeltaRule:
    """Compiles the rule for heads of DK (keys, queries) and DV (values) numbers.

    Args:
        N: floats of a vector, 8 or 16 (``vectors.width``).

    Raises:
        PykernelsError: DK or DV is no multiple of 16.
    """
    for name, D in (("DK", DK), ("DV", DV)):
        if D < 16 or D % 16:
            raise PykernelsError(
                f"a gated delta rule with {name} = {D}", "Head sizes must be multiples of 16"
            )
    V: Any = make_vectors(N)
    C = _vectors_of(DV, N, N // 4)  # 4 rows by 4 sums fill 32 registers, 4 by 2 fill 16
    C_ONE = 2 * C if DV // N % (2 * C) == 0 else C  # and so do 2 rows of twice as many
    STRIP, STRIP_ONE = C * N, C_ONE * N
    read = make_read(DK, DV, N, _ROWS, C, STRIP)
    update = make_update(DK, DV, N, _ROWS, C, STRIP)
    read_one = make_read(DK, DV, N, 2, C_ONE, DV, BLOCK)  # the key and the query
    update_one = make_update(DK, DV, N, 1, C_ONE, DV)
    K, Q = 0, 4 * BLOCK * DK  # float32 [BLOCK, DK]: normed keys, then normed and scaled queries
    OF_K = Q + 4 * BLOCK * DK  # float32 [BLOCK, DV]: S^T k, and then delta
    OF_Q = OF_K + 4 * BLOCK * DV  # S^T q
    KK = OF_Q + 4 * BLOCK * DV  # float32 [BLOCK, BLOCK]: e^(G_i - G_j) k_i k_j
    QK = KK + 4 * BLOCK * BLOCK
    DECAY = QK + 4 * BLOCK * BLOCK  # float32 [BLOCK]: e^G_i
    STEP = DECAY + 4 * BLOCK  # float32 [BLOCK]: e^g_i
    LATER = STEP + 4 * BLOCK  # float32 [BLOCK]: e^(G_n - G_i)
    STATE = LATER + 4 * BLOCK  # float32 [DV / STRIP][DK, STRIP]: while there are many tokens
    END = STATE + 4 * DK * DV
    name = f"{DK}-{DV}-x{N}"

    @task(f"gated-delta-rule-setup-{DV}")
    def setup(address, index, worker):
        args = delta_rule_at(address)
        return i64(args.count_at, 0) * args.HV * (DV // args.columns)

    @inlined
    def load_normed(x, eps, scale, to):
        squares = V.zero()
        for d in range(0, 4 * DK, 4 * N):
            value = V.load_f32(x + d)
            squares = V.fma(value, value, squares)
        total = V.sum(squares) + eps
        factor = V.broadcast(scale / types.float32(total ** types.float32(0.5)))
        for d in range(0, 4 * DK, 4 * N):
            V.store_f32(to + d, V.mul(factor, V.load_f32(x + d)))

    @inlined
    def dot(x, y):
        products = V.zero()
        for d in range(0, 4 * DK, 4 * N):
            products = V.fma(V.load_f32(x + d), V.load_f32(y + d), products)
        return V.sum(products)

    @inlined
    def clear(state, columns):
        for d in range(DK):
            for at in range(0, 4 * columns, 4 * N):
                V.store_f32(state + 4 * DV * d + at, V.zero())

    @inlined
    def load_block(args, head, t, count, memory):
        """Keys, queries and their products of ``count`` tokens from t on; zeros up to ``_ROWS``,
        which read nothing and change nothing."""
        key_head = head // args.group % args.HK
        scale = f32_from_bits(types.uint32(args.scale))
        eps = f32_from_bits(types.uint32(args.eps))
        k = args.k + t * args.k_stride + key_head * (4 * DK)
        q = args.q + t * args.q_stride + key_head * (4 * DK)
        decay = types.float32(1)
        for i in range(count):
            row = memory + 4 * DK * i
            load_normed(k + i * args.k_stride, eps, types.float32(1), row + K)
            load_normed(q + i * args.q_stride, eps, scale, row + Q)
            step = types.float32(math.exp(f32(args.g + (t + i) * args.g_stride, head)))
            decay *= step
            poke_f32(memory + STEP + 4 * i, step)
            poke_f32(memory + DECAY + 4 * i, decay)
            between = types.float32(1)
            for j in range(i, -1, -1):  # from the token itself back to the first one
                at, key = 4 * (BLOCK * i + j), memory + K + 4 * DK * j
                poke_f32(memory + QK + at, between * dot(row + Q, key))
                poke_f32(memory + KK + at, between * dot(row + K, key))
                between *= f32(memory + STEP, j)
        later = types.float32(1)
        for i in range(count - 1, -1, -1):
            poke_f32(memory + LATER + 4 * i, later)
            later *= f32(memory + STEP, i)
        for i in range(count, (count + _ROWS - 1) // _ROWS * _ROWS):
            for d in range(0, 4 * DK, 4 * N):
                V.store_f32(memory + K + 4 * DK * i + d, V.zero())
                V.store_f32(memory + Q + 4 * DK * i + d, V.zero())

    @inlined
    def solve(args, head, t, count, strip, columns, memory):
        """Makes deltas of ``S^T k`` and writes the tokens' results, of one strip."""
        v = args.v + t * args.v_stride + head * (4 * DV)
        out = args.out + t * args.out_stride + head * (4 * DV)
        for at in range(strip, strip + 4 * columns, 4 * N):
            for i in range(count):
                decay = V.broadcast_at(memory + DECAY + 4 * i)
                of_k = V.load_f32(memory + OF_K + 4 * DV * i + at)
                value = V.load_f32(v + i * args.v_stride + at)
                delta = V.sub(value, V.mul(decay, of_k))
                result = V.mul(decay, V.load_f32(memory + OF_Q + 4 * DV * i + at))
                for j in range(i):
                    other = V.load_f32(memory + OF_K + 4 * DV * j + at)
                    pair = 4 * (BLOCK * i + j)
                    delta = V.sub(delta, V.mul(V.broadcast_at(memory + KK + pair), other))
                    result = V.fma(V.broadcast_at(memory + QK + pair), other, result)
                beta = f32(args.beta + (t + i) * args.beta_stride, head)
                delta = V.mul(V.broadcast(beta), delta)
                own = V.broadcast_at(memory + QK + 4 * (BLOCK * i + i))
                V.store_f32(out + i * args.out_stride + at, V.fma(own, delta, result))
                V.store_f32(memory + OF_K + 4 * DV * i + at, delta)
            for i in range(count):
                place = memory + OF_K + 4 * DV * i + at
                later = V.broadcast_at(memory + LATER + 4 * i)
                V.store_f32(place, V.mul(later, V.load_f32(place)))

    @inlined
    def one_token(args, head, t, column, state, memory):
        """Reads the state where it lies, then changes what is in the cache by then."""
        load_block(args, head, t, 1, memory)
        decay = f32(memory + DECAY, 0)
        for part in range(0, 4 * args.columns, 4 * STRIP_ONE):
            at, strip = 4 * column + part, state + part
            read_one(memory + K, strip, memory + OF_K + at)
            solve(args, head, t, 1, at, STRIP_ONE, memory)
            update_one(memory + K, memory + OF_K + at, strip, decay)

    @inlined
    def split(state, strips, columns, back):
        """Copies rows of a state to strips, or back: as one stream of memory either way."""
        for d in range(DK):
            for at in range(0, 4 * columns, 4 * N):
                place = strips + at // (4 * STRIP) * (4 * STRIP * DK)
                place += 4 * STRIP * d + at % (4 * STRIP)
                if back:
                    V.store_f32(state + 4 * DV * d + at, V.load_f32(place))
                else:
                    V.store_f32(place, V.load_f32(state + 4 * DV * d + at))

    @inlined
    def tokens(args, head, t, length, column, state, memory):
        """Has the state in strips of its own: rows of ``DV`` would fall into few sets of L1."""
        split(state, memory + STATE, args.columns, False)
        for first in range(0, length, BLOCK):
            count = min(BLOCK, length - first)
            load_block(args, head, t + first, count, memory)
            for part in range(0, 4 * args.columns, 4 * STRIP):
                at, strip = 4 * column + part, memory + STATE + part * DK
                for i in range(0, count, _ROWS):
                    x, to = memory + 4 * DK * i, memory + 4 * DV * i + at
                    read(x + K, strip, to + OF_K)
                    read(x + Q, strip, to + OF_Q)
                solve(args, head, t + first, count, at, STRIP, memory)
                decay = f32(memory + DECAY, count - 1)
                for i in range(0, count, _ROWS):
                    deltas = memory + OF_K + 4 * DV * i + at
                    update(memory + K + 4 * DK * i, deltas, strip, decay)
                    decay = types.float32(1)
        split(state, memory + STATE, args.columns, True)

    @task(f"gated-delta-rule-{name}")
    def run(address, index, worker):
        args = delta_rule_at(address)
        parts = DV // args.columns
        s, head, column = (
            index // (args.HV * parts),
            index // parts % args.HV,
            index % parts * args.columns,
        )
        slot, length, t = i64(args.slots, s), i64(args.lengths, s), i64(args.starts, s)
        if slot < 0 or length <= 0:
            return 0
        state = args.state + slot * args.slot_bytes + 4 * (head * (DK * DV) + column)
        memory = stack_alloc(END)
        if i64(args.past, s) == 0:
            clear(state, args.columns)
        if length == 1:
            one_token(args, head, t, column, state, memory)
        else:
            tokens(args, head, t, length, column, state, memory)
        return 0

    return DeltaRule(setup, run, STRIP_ONE)
