"""AMX passes of scale groups that end with each tile product.

Sums stay in 16 registers for a whole slab, 16 tokens by 16 outputs, so that applying a scale is one
multiply-add and no store of its own. Of four C tiles two are multiplied into while the other two
are stored and scaled (25 cycles a product, 28 by fours; the product alone takes 16). The minima of
a slab, one superblock, are multiplied before its first groups and applied beside them.
"""

from __future__ import annotations

from typing import Any

from ..intrin.avx512 import broadcast_f32, fma_f32, load_f32, mul_f32, store_f32
from ..intrin.avx512_bytes import load_i32, to_f32
from ..intrin.prefetch import prefetch_l2
from ..intrin.registers import f32x16_array
from ..jit import inlined
from ..weights.scales import Scales
from ..words import f32
from .amx_passes import HEADER, Passes
from .common import MAX_TOKENS, SLAB_BYTES, TILE


def make_narrow(scales: Scales, ACT_K: int, STEP_K: int, amx: Any, streams: int) -> Passes:
    """The passes of groups of a tile product; arguments as of ``amx_wide.make_wide``."""
    GROUP, INT8 = scales.k, ACT_K > 0
    PER_STEP = STEP_K // GROUP  # scale groups in a full tile
    A_BYTES, B_BYTES = 64 // PER_STEP, TILE // PER_STEP
    QUAD = 4 * GROUP  # inputs of four products
    SUPER_K = scales.super_k
    factor_of: Any = scales.factor
    minimum_of: Any = scales.super_minimum
    MINIMA = scales.super_minimum is not None
    zero, load, store = amx.zero, amx.load, amx.store
    dot = amx.dot_i8 if INT8 else amx.dot_bf16
    assert ACT_K % QUAD == 0, "four products have one activation scale"
    assert not (MINIMA and INT8), "these are planes"

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
    def multiply_minima(a, b, half):
        zero(2)
        load(4, a, 64)
        load(6, b + SLAB_BYTES + half * TILE, 64)
        dot(2, 4, 6)

    @inlined
    def apply_minima(totals, part, half, scale, superblock):
        factor = minimum_of(scale, superblock, half)
        for t in range(16):
            totals[t] = fma_f32(load_f32(part + 64 * t), factor, totals[t])

    @inlined
    def apply_two_scales(totals, part, half, scale, group, act):
        """totals[16] += two groups' products, scaled."""
        f0, f1 = factor_of(scale, group, half), factor_of(scale, group + 1, half)
        for t in range(16):
            at = part + 64 * t
            total = mul_f32(read(at), f0) if INT8 else fma_f32(read(at), f0, totals[t])
            total = fma_f32(read(at + TILE), f1, total)
            totals[t] = fma_f32(total, broadcast_f32(f32(act, t)), totals[t]) if INT8 else total

    @inlined
    def run(
        inputs,
        count,
        a,
        a_group,
        b,
        c,
        scale,
        first_k,
        act_scales,
        minima,
        parts,
        ahead,
        stream,
        lines,
    ):
        part01, part23 = parts + HEADER, parts + HEADER + 2 * TILE
        for half in range(2):
            to = c + 64 * half
            totals = f32x16_array(16)
            for t in range(16):
                totals[t] = load_f32(to + 128 * t)
            if MINIMA:
                multiply_minima(minima, b, half)
            # Two tiles are multiplied while two are stored and the two before scaled: the last
            # iteration only stores and scales.
            for k in range(0, inputs + QUAD, QUAD):
                a_at, b_at = a + k // STEP_K * TILE, b + (2 * (k // STEP_K) + half) * TILE
                done = k - QUAD
                group = (first_k + done) // GROUP
                act = act_scales + 4 * MAX_TOKENS * (done // ACT_K) if INT8 else 0
                if k < inputs:
                    multiply_01(a_at, b_at)
                if k > 0:
                    apply_two_scales(totals, part01, half, scale, group, act)
                    store(2, part23, 64)
                    store(3, part23 + TILE, 64)
                elif MINIMA:
                    store(2, part23, 64)
                if k < inputs:
                    multiply_23(a_at, b_at)
                if k > 0:
                    apply_two_scales(totals, part23, half, scale, group + 2, act)
                elif MINIMA:
                    apply_minima(totals, part23, half, scale, first_k // SUPER_K)
                if k < inputs:
                    store(0, part01, 64)
                    store(1, part01 + TILE, 64)
                if half == 0:
                    for _ in range(lines * (QUAD // STEP_K)):
                        for i in range(streams):
                            prefetch_l2(ahead + i * stream)
                        ahead += 64
            for t in range(16):
                store_f32(to + 128 * t, totals[t])
        return ahead

    @inlined
    def flush(parts):
        pass

    return Passes(run, flush, token_groups=1, b_rows=16 // PER_STEP)
