"""A dequantized slab of 32 outputs by a few tokens, in AVX-512 dot products, added to float32 sums.

Two sums of 16 outputs a token stay in registers, two totals beside them where scales part the
inputs: 6 tokens fill the 32, and 12 where there is no scale. Sums of 8-bit products begin with what
takes the bias of the codes off.
"""

from __future__ import annotations

import functools
from typing import Any

from ...quant.layout import K_BLOCK
from ..intrin.avx512 import broadcast_f32, fma_f32, fnma_f32, load_f32, mul_f32, store_f32, zero_f32
from ..intrin.avx512_bytes import broadcast_dword, broadcast_i32, load_u8, to_f32, zero_i32
from ..intrin.prefetch import prefetch_l2
from ..intrin.registers import f32x16_array, i32x16_array
from ..isa import Instructions
from ..jit import inlined, routine
from ..words import f32
from .common import MAX_TOKENS, TILE

ARGUMENTS = 12
"""A pass has so many."""


@inlined
def _row_of(a, a_group, t):
    """Address of token t's row in the A tiles."""
    return a + t // 16 * a_group + t % 16 * 64


@functools.cache
def make_pass(
    T: int, scale_k: int, MINIMA: bool, ACT_K: int, BIASED: bool, ops: Instructions
) -> Any:
    """Compiles ``run(inputs, a, a_group, first, b, c, factors, minima, act_scales, sums, ahead,
    lines) -> ahead`` for T tokens, once for all formats that are scaled alike.

    It adds the products of a slab to ``c``, float32 [T, 32].

    Args:
        scale_k: inputs that share a scale of the weights; 0 for no scales.
        MINIMA: whether the weights have minima.
        ACT_K: inputs of an activation scale; 0 for products in bfloat16.
        BIASED: whether a group's sum begins with an integer at ``sums``.

    Args of the kernel (addresses are int64):
        inputs: of the slab, a multiple of 128 (and of ACT_K).
        a: the slab's A tiles of 16 tokens, of the next 16 ``a_group`` on.
        first: the first token.
        b: the slab's B tiles [step][half].
        factors, minima: float32 [groups][32] of the slab.
        act_scales, sums: 32 bits [groups][MAX_TOKENS] of the first token on.
        ahead: ``lines`` lines from here on are prefetched with each B tile pair.
    """
    INT8, GROUP = ACT_K > 0, scale_k or K_BLOCK
    STEP_K = 64 if INT8 else 32
    ROWS = min(GROUP, STEP_K) * 16 // STEP_K  # of a B tile, in a group
    STEPS = max(1, GROUP // STEP_K)  # of a group
    SPAN = max(GROUP, STEP_K)
    PARTS = SPAN // GROUP
    SCALED = scale_k > 0
    # Totals of a narrow group have yet to be multiplied by the activation scale.
    NARROW = INT8 and GROUP < ACT_K
    OUTER = ACT_K if NARROW else SPAN
    new_sums, zero = (i32x16_array, zero_i32) if INT8 else (f32x16_array, zero_f32)
    dot = ops.dot_u8i8 if INT8 else ops.dot_bf16
    N = 2 * T
    variant = f"{T}-{scale_k}-{MINIMA:d}-{ACT_K}-{BIASED:d}-{ops.name}"

    @inlined
    def multiply(products, a, a_group, first, b, row):
        low, high = load_u8(b + 64 * row), load_u8(b + TILE + 64 * row)
        for t in range(T):
            x = broadcast_dword(_row_of(a, a_group, first + t) + 4 * row)
            products[2 * t] = dot(products[2 * t], low, x)
            products[2 * t + 1] = dot(products[2 * t + 1], high, x)

    @inlined
    def apply_scales(totals, products, factors, minima, act_scales, sums, group, k):
        at = factors + 128 * group
        low, high = load_f32(at), load_f32(at + 64)
        for t in range(T):
            a, b = products[2 * t], products[2 * t + 1]
            if INT8:
                a, b = to_f32(a), to_f32(b)
                if not NARROW:
                    x = broadcast_f32(f32(act_scales + 4 * (k // ACT_K * MAX_TOKENS + t), 0))
                    a, b = mul_f32(a, x), mul_f32(b, x)
            totals[2 * t] = fma_f32(a, low, totals[2 * t])
            totals[2 * t + 1] = fma_f32(b, high, totals[2 * t + 1])
        if MINIMA:
            at = minima + 128 * group
            low, high = load_f32(at), load_f32(at + 64)
            for t in range(T):
                x = broadcast_f32(f32(sums + 4 * (group * MAX_TOKENS + t), 0))
                if INT8 and not NARROW:
                    by = f32(act_scales + 4 * (k // ACT_K * MAX_TOKENS + t), 0)
                    x = mul_f32(x, broadcast_f32(by))
                totals[2 * t] = fnma_f32(x, low, totals[2 * t])
                totals[2 * t + 1] = fnma_f32(x, high, totals[2 * t + 1])

    @routine(ARGUMENTS, variant)
    def run(inputs, a, a_group, first, b, c, factors, minima, act_scales, sums, ahead, lines):
        totals = f32x16_array(N)
        if not NARROW:
            for i in range(N):
                totals[i] = load_f32(c + 64 * i)
        for outer in range(0, inputs, OUTER):
            if NARROW:
                for i in range(N):
                    totals[i] = zero_f32()
            for k in range(outer, outer + OUTER, SPAN):
                to_a, to_b = a + k // STEP_K * TILE, b + k // STEP_K * 2 * TILE
                for part in range(PARTS):
                    if SCALED:
                        products, group = new_sums(N), k // GROUP + part
                        for t in range(T):
                            bias = sums + 4 * (group * MAX_TOKENS + t)
                            value = broadcast_i32(bias) if BIASED else zero()
                            products[2 * t] = value
                            products[2 * t + 1] = value
                    else:
                        products, group = totals, 0
                    for step in range(STEPS):
                        for row in range(ROWS):
                            multiply(
                                products,
                                to_a + step * TILE,
                                a_group,
                                first,
                                to_b + step * 2 * TILE,
                                part * ROWS + row,
                            )
                    if SCALED:
                        apply_scales(totals, products, factors, minima, act_scales, sums, group, k)
                for _ in range(lines * STEPS):
                    prefetch_l2(ahead)
                    ahead += 64
            if NARROW:
                at = act_scales + 4 * (outer // ACT_K * MAX_TOKENS)
                for i in range(N):
                    x = broadcast_f32(f32(at, i // 2))
                    store_f32(c + 64 * i, fma_f32(totals[i], x, load_f32(c + 64 * i)))
        if not NARROW:
            for i in range(N):
                store_f32(c + 64 * i, totals[i])
        return ahead

    return run
