"""One slab of a 32-row block by 16 or 32 tokens, on AMX tiles, added to float32 sums.

A C tile has no scale, so at the end of each scale group it is stored and folded into the sums by
AVX-512. What that costs decides the shape of a pass:

``wide``: groups of 64 inputs and more, or none. 2 x 2 C tiles hold 32 tokens by 32 outputs. Folding
a group's 64 rows of registers is spread over the next group's products, so that the tile unit never
waits for it.

``narrow``: groups that end with each tile product. Sums stay in 16 registers for a whole slab, 16
tokens by 16 outputs, so that a fold is one multiply-add and no store of its own. Of four C tiles
two are multiplied into while the other two are stored and folded (25 cycles a product, 28 by fours;
the product alone takes 16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .intrin.avx512 import (
    add_f32,
    broadcast_f32,
    fma_f32,
    fnma_f32,
    load_f32,
    mul_f32,
    store_f32,
    zero_f32,
)
from .intrin.avx512_bytes import load_i32, to_f32
from .intrin.prefetch import prefetch_l2
from .intrin.registers import f32x16_array
from .jit import inlined
from .job import f32, i64, poke_f32, poke_i64
from .scales import Scales

MAX_TOKENS = 256
"""Tokens of one pass over the weights: their A slab and sums still fit in L2."""
TILE = 1024
"""Bytes of a tile: 16 rows of 64."""

_PLANE_BASE = np.float32(64.0)
_HEADER = 64
PARTS_BYTES = _HEADER + 4 * TILE
"""Scratch of the passes: what is not folded yet, and the products. (Not two rooms in turn: 4 KiB
apart, a load would take the other room's store for its own until their addresses are compared.)"""

_SUMS, _SCALE, _GROUP, _ACT, _ROWS, _PLANE, _LESS = range(7)  # words of the header


@dataclass(frozen=True)
class Passes:
    """The compiled loops over a slab.

    Attributes:
        run: ``run(inputs, count, a, a_group, b, c, scale, first_k, act_scales, sums, parts, ahead,
            lines) -> ahead``: ``c[32, 32] += scale * (products of a slab)`` for ``count`` groups of
            16 tokens, ``a_group`` bytes apart; prefetches ``lines`` from ``ahead`` on with each
            product; may leave the last of it to the next call.
        flush: ``flush(parts)``: adds what is left.
        token_groups: the most of ``count``.
        b_rows: rows of a B tile.
    """

    run: Any
    flush: Any
    token_groups: int
    b_rows: int


def make_passes(
    scales: Scales, ACT_K: int, SLAB_K: int, STEP_K: int, amx: Any, MINIMUM_K: int = 0
) -> Passes:
    """The passes of a format.

    Args:
        ACT_K: inputs of one activation scale; 0 for bf16 activations.
        SLAB_K: most inputs of a slab.
        STEP_K: inputs of a full tile.
        amx: ``intrin.amx`` or ``intrin.amx_model``.
        MINIMUM_K: inputs of a minimum where a group's B tiles are followed by another group of
            them, of weights that count 64 times less; else 0.
    """
    if MINIMUM_K:
        planes = (_PLANE_BASE, np.float32(1.0))
        return _wide(scales, ACT_K, SLAB_K, STEP_K, amx, planes, MINIMUM_K)
    make = _narrow if scales.k and scales.k <= STEP_K else _wide
    return make(scales, ACT_K, SLAB_K, STEP_K, amx)


def _wide(
    scales: Scales,
    ACT_K: int,
    SLAB_K: int,
    STEP_K: int,
    amx: Any,
    planes: tuple = (np.float32(1.0),),
    MINIMUM_K: int = 0,
) -> Passes:
    GROUP, SCALED, INT8 = scales.k or SLAB_K, scales.k > 0, ACT_K > 0
    MINIMA = scales.minimum is not None
    assert MINIMUM_K or not MINIMA, "minima are of narrow groups"
    minimum_of: Any = scales.minimum
    MINIMA_OF_GROUP = GROUP // MINIMUM_K if MINIMUM_K else 0
    PLANES, PLANE_OF = len(planes), planes
    factor_of: Any = scales.factor
    zero, load, store = amx.zero, amx.load, amx.store
    dot = amx.dot_i8 if INT8 else amx.dot_bf16

    @inlined
    def fold_minima(c, count, scale, group, act, less):
        """Sums -= minima times the sums of their inputs."""
        for half in range(2):
            minima = f32x16_array(MINIMA_OF_GROUP)
            for i in range(MINIMA_OF_GROUP):
                minima[i] = minimum_of(scale, group * MINIMA_OF_GROUP + i, half)
            for t in range(count):
                value = zero_f32()
                for i in range(MINIMA_OF_GROUP):
                    x = broadcast_f32(f32(less + 4 * MAX_TOKENS * i, t))
                    value = fma_f32(x, minima[i], value)
                at = c + 64 * half + 128 * t
                store_f32(at, fnma_f32(value, broadcast_f32(f32(act, t)), load_f32(at)))

    @inlined
    def fold(parts, first, count):
        """Sums += ``count`` rows of the products that the header tells of; it may be empty."""
        if count == 0:
            return
        part, c = parts + _HEADER + 128 * first, i64(parts, _SUMS) + 128 * first
        if SCALED:
            scale, group = i64(parts, _SCALE), i64(parts, _GROUP)
            low, high = factor_of(scale, group, 0), factor_of(scale, group, 1)
            if PLANES > 1:
                plane = broadcast_f32(f32(parts + 8 * _PLANE, 0))
                low, high = mul_f32(low, plane), mul_f32(high, plane)
        act = i64(parts, _ACT) + 4 * first
        if MINIMA:
            less = i64(parts, _LESS)
            if less != 0:
                fold_minima(c, count, scale, group, act, less + 4 * first)
        for _ in range(count):
            if INT8:
                x = broadcast_f32(f32(act, 0))
                a, b = mul_f32(to_f32(load_i32(part)), x), mul_f32(to_f32(load_i32(part + 64)), x)
            else:
                a, b = load_f32(part), load_f32(part + 64)
            if SCALED:
                store_f32(c, fma_f32(a, low, load_f32(c)))
                store_f32(c + 64, fma_f32(b, high, load_f32(c + 64)))
            else:
                store_f32(c, add_f32(load_f32(c), a))
                store_f32(c + 64, add_f32(load_f32(c + 64), b))
            part += 128
            c += 128
            act += 4

    @inlined
    def flush(parts):
        fold(parts, 0, i64(parts, _ROWS))
        poke_i64(parts, _ROWS, 0)

    @inlined
    def product(pair, a0, a1, b):
        """The C tiles += 1 or 2 A tiles x 2 B tiles."""
        load(6, b, 64)
        load(4, a0, 64)
        load(7, b + TILE, 64)
        if pair:
            load(5, a1, 64)
        dot(0, 4, 6)
        dot(1, 4, 7)
        if pair:
            dot(2, 5, 6)
            dot(3, 5, 7)

    @inlined
    def run(inputs, count, a, a_group, b, c, scale, first_k, act_scales, sums, parts, ahead, lines):
        pair = count > 1
        at = b
        for k in range(0, inputs, GROUP):
            steps = min(GROUP, inputs - k) // STEP_K
            for plane in range(PLANES):
                a0 = a + k // STEP_K * TILE
                left = i64(parts, _ROWS)
                each, folded = (left + steps - 1) // steps, 0
                zero(0)
                zero(1)
                zero(2)
                zero(3)
                for _ in range(steps):
                    product(pair, a0, a0 + a_group, at)
                    rows = min(each, left - folded)
                    fold(parts, folded, rows)
                    folded += rows
                    for _ in range(lines):
                        prefetch_l2(ahead)
                        ahead += 64
                    a0 += TILE
                    at += 2 * TILE
                part = parts + _HEADER
                store(0, part, 128)
                store(1, part + 64, 128)
                if pair:
                    store(2, part + 16 * 128, 128)
                    store(3, part + 16 * 128 + 64, 128)
                poke_i64(parts, _SUMS, c)
                poke_i64(parts, _SCALE, scale)
                poke_i64(parts, _GROUP, (first_k + k) // GROUP)
                if PLANES > 1:
                    poke_f32(parts + 8 * _PLANE, PLANE_OF[plane])
                if MINIMA:
                    last = plane == PLANES - 1
                    less = sums + 4 * MAX_TOKENS * (k // MINIMUM_K) if last else 0
                    poke_i64(parts, _LESS, less)
                if INT8:
                    poke_i64(parts, _ACT, act_scales + 4 * MAX_TOKENS * (k // ACT_K))
                poke_i64(parts, _ROWS, 16 * count)
        return ahead

    return Passes(run, flush, token_groups=2, b_rows=16)


def _narrow(scales: Scales, ACT_K: int, SLAB_K: int, STEP_K: int, amx: Any) -> Passes:
    GROUP, INT8 = scales.k, ACT_K > 0
    PER_STEP = STEP_K // GROUP  # scale groups in a full tile
    A_BYTES, B_BYTES = 64 // PER_STEP, TILE // PER_STEP
    QUAD = 4 * GROUP  # inputs of four products
    factor_of: Any = scales.factor
    minimum_of: Any = scales.minimum
    MINIMA = scales.minimum is not None
    zero, load, store = amx.zero, amx.load, amx.store
    dot = amx.dot_i8 if INT8 else amx.dot_bf16
    assert ACT_K % QUAD == 0, "four products have one activation scale"

    @inlined
    def read(at):
        return to_f32(load_i32(at)) if INT8 else load_f32(at)

    @inlined
    def a_skip(group):
        """Bytes from the first of four groups to another one, in A."""
        return group // PER_STEP * TILE + group % PER_STEP * A_BYTES

    @inlined
    def b_skip(group):
        return group // PER_STEP * 2 * TILE + group % PER_STEP * B_BYTES

    @inlined
    def multiply_01(a, b):
        """The first two of four groups."""
        zero(0)
        load(4, a, 64)
        load(6, b, 64)
        dot(0, 4, 6)
        zero(1)
        load(5, a + a_skip(1), 64)
        load(7, b + b_skip(1), 64)
        dot(1, 5, 7)

    @inlined
    def multiply_23(a, b):
        zero(2)
        load(4, a + a_skip(2), 64)
        load(6, b + b_skip(2), 64)
        dot(2, 4, 6)
        zero(3)
        load(5, a + a_skip(3), 64)
        load(7, b + b_skip(3), 64)
        dot(3, 5, 7)

    @inlined
    def fold_two(totals, part, half, scale, group, act, sums):
        """totals[16] += two groups' products, scaled."""
        f0, f1 = factor_of(scale, group, half), factor_of(scale, group + 1, half)
        if MINIMA:
            m0, m1 = minimum_of(scale, group, half), minimum_of(scale, group + 1, half)
        for t in range(16):
            at = part + 64 * t
            total = mul_f32(read(at), f0) if INT8 else fma_f32(read(at), f0, totals[t])
            total = fma_f32(read(at + TILE), f1, total)
            if MINIMA:
                total = fnma_f32(broadcast_f32(f32(sums, t)), m0, total)
                total = fnma_f32(broadcast_f32(f32(sums, MAX_TOKENS + t)), m1, total)
            totals[t] = fma_f32(total, broadcast_f32(f32(act, t)), totals[t]) if INT8 else total

    @inlined
    def run(inputs, count, a, a_group, b, c, scale, first_k, act_scales, sums, parts, ahead, lines):
        part01, part23 = parts + _HEADER, parts + _HEADER + 2 * TILE
        for half in range(2):
            to = c + 64 * half
            totals = f32x16_array(16)
            for t in range(16):
                totals[t] = load_f32(to + 128 * t)
            # Two tiles are multiplied while two are stored and the two before folded: the last
            # turn only stores and folds.
            for k in range(0, inputs + QUAD, QUAD):
                a_at, b_at = a + k // STEP_K * TILE, b + (2 * (k // STEP_K) + half) * TILE
                done = k - QUAD
                group = (first_k + done) // GROUP
                act = act_scales + 4 * MAX_TOKENS * (done // ACT_K) if INT8 else 0
                less = sums + 4 * MAX_TOKENS * (done // GROUP)
                if k < inputs:
                    multiply_01(a_at, b_at)
                if k > 0:
                    fold_two(totals, part01, half, scale, group, act, less)
                    store(2, part23, 64)
                    store(3, part23 + TILE, 64)
                if k < inputs:
                    multiply_23(a_at, b_at)
                if k > 0:
                    fold_two(totals, part23, half, scale, group + 2, act, less + 8 * MAX_TOKENS)
                if k < inputs:
                    store(0, part01, 64)
                    store(1, part01 + TILE, 64)
                if half == 0:
                    for _ in range(lines * (QUAD // STEP_K)):
                        prefetch_l2(ahead)
                        ahead += 64
            for t in range(16):
                store_f32(to + 128 * t, totals[t])
        return ahead

    @inlined
    def flush(parts):
        pass

    return Passes(run, flush, token_groups=1, b_rows=16 // PER_STEP)
