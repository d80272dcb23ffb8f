"""The GEMM of multiply-adds in AVX2: of each half of the outputs two sums for each of 6 tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ...quant.layout import K_BLOCK
from ..intrin.avx2 import (
    and_i32,
    broadcast_f32,
    broadcast_f32_at,
    broadcast_i32,
    even_lanes,
    first_of_pairs,
    fma_f32,
    load_f16,
    load_f32,
    load_i32,
    mul_f32,
    odd_lanes,
    second_of_pairs,
    shift_left_i32,
    shift_right_u32,
    store_f32,
    sub_f32,
    to_f32,
    zero_f32,
)
from ..intrin.prefetch import prefetch_l1, prefetch_l2
from ..intrin.registers import f32x8_array
from ..jit import inlined, routine
from ..weights.codes_avx2 import FACTORS, make_codes, pairs_of_e4m3
from ..weights.layout import INTEGERS, LOADS, PACKINGS, SCALE_K, WIDE
from . import fma
from .common import TILE
from .dequant_slab import NEAR
from .fma import PASS_ARGUMENTS, ROW, STEPS

SCRATCH_BYTES = fma.SCRATCH_BYTES


@functools.cache
def make_pass(T: int) -> Any:
    """Compiles ``run`` (``fma.make_gemm``) of T tokens, at most 6: 12 of the 16 registers are
    sums."""
    N = 2 * T

    @routine(PASS_ARGUMENTS, f"fma-avx2-{T}")
    def run(a, b, c, ahead, lines):
        for half in range(2):
            sums = f32x8_array(N)
            for t in range(T):
                sums[2 * t] = load_f32(c + 128 * t + 64 * half)
                sums[2 * t + 1] = load_f32(c + 128 * t + 64 * half + 32)
            x, w = a, b + 64 * half
            for _ in range(STEPS):
                for pair in range(16):
                    for which in range(2):
                        low, high = load_f32(w + 128 * which), load_f32(w + 128 * which + 32)
                        for t in range(T):
                            one = broadcast_f32_at(x + ROW * t + 64 * which + 4 * pair)
                            sums[2 * t] = fma_f32(low, one, sums[2 * t])
                            sums[2 * t + 1] = fma_f32(high, one, sums[2 * t + 1])
                    w += 256
                x += 128
                if half == 0:
                    for _ in range(lines):
                        prefetch_l2(ahead)
                        ahead += 64
            for t in range(T):
                store_f32(c + 128 * t + 64 * half, sums[2 * t])
                store_f32(c + 128 * t + 64 * half + 32, sums[2 * t + 1])
        return ahead

    return run


@inlined
def _widen_tokens(M, a, a_group, to):
    for t in range(M):
        at, row = a + t // 16 * a_group + t % 16 * 64, to + ROW * t
        for step in range(STEPS):
            for part in range(2):
                pairs = load_i32(at + TILE * step + 32 * part)
                store_f32(row + 128 * step + 32 * part, first_of_pairs(pairs))
                store_f32(row + 128 * step + 64 + 32 * part, second_of_pairs(pairs))


def _widen_pairs(fmt: str) -> Callable:
    packing, factor_of = PACKINGS[fmt], FACTORS[fmt].factor
    FP8, F16 = factor_of is not None, fmt in WIDE
    LINES, K_STEP = packing.tile_bytes // 64, packing.k_step
    LINE_K, UP = K_STEP // LINES, np.float32(2.0**120)
    factor_of_any: Any = factor_of

    @inlined
    def scaled(value, factor):
        return mul_f32(mul_f32(value, broadcast_f32(UP)), factor) if FP8 else value

    @inlined
    def store_pairs(to, pairs, factor):
        store_f32(to, scaled(first_of_pairs(pairs), factor))
        store_f32(to + 128, scaled(second_of_pairs(pairs), factor))

    @inlined
    def widen(w, scale, first_k, tables, to):
        for k in range(0, K_BLOCK, K_STEP):
            for quarter in range(4):
                half, side = quarter // 2, quarter % 2
                factor = zero_f32()
                if FP8:
                    factor = factor_of_any(scale, first_k // K_BLOCK, quarter)
                for line in range(LINES):
                    if side == 0:
                        prefetch_l1(w + 64 * (LINES * half + line) + NEAR)
                    source = w + 64 * (LINES * half + line) + 32 * side
                    at = to + 128 * (k + LINE_K * line) + 32 * quarter
                    if FP8:
                        low, high = pairs_of_e4m3(load_i32(source))
                        store_pairs(at, low, factor)
                        store_pairs(at + 256, high, factor)
                    elif F16:
                        a, b = load_f16(source), load_f16(source + 16)
                        store_f32(at, even_lanes(a, b))
                        store_f32(at + 128, odd_lanes(a, b))
                    else:
                        store_pairs(at, load_i32(source), factor)
            w += 128 * LINES

    return widen


def _widen_fours(fmt: str) -> Callable:
    codes, GROUP = make_codes(fmt), SCALE_K[fmt]
    read, SIGNED, TILE_BYTES = codes.rows, codes.signed, codes.packing.tile_bytes
    factor_of: Any = codes.factors.factor
    minimum_of: Any = codes.factors.minimum
    MINIMA, LESS = minimum_of is not None, minimum_of is not None or codes.bias != 0
    UNIT = np.float32(codes.unit * (2.0**-24 if SIGNED else 1))
    BIAS = np.float32(codes.bias)
    GROUP_LOADS = min(GROUP, 64) // 8
    LINES = TILE_BYTES // 64

    @inlined
    def number(row, i):
        """Input i's codes as floats, signed ones times 2**24."""
        if SIGNED:
            high = broadcast_i32(0xFF000000)
            if i == 0:
                return to_f32(shift_left_i32(row, 24))
            if i == 1:
                return to_f32(and_i32(shift_left_i32(row, 16), high))
            if i == 2:
                return to_f32(and_i32(shift_left_i32(row, 8), high))
            return to_f32(and_i32(row, high))
        low = broadcast_i32(0xFF)
        if i == 0:
            return to_f32(and_i32(row, low))
        if i == 1:
            return to_f32(and_i32(shift_right_u32(row, 8), low))
        if i == 2:
            return to_f32(and_i32(shift_right_u32(row, 16), low))
        return to_f32(shift_right_u32(row, 24))

    @inlined
    def store_row(to, row, factor, less):
        for i in range(4):
            if LESS:
                value = fma_f32(number(row, i), factor, less)
            else:
                value = mul_f32(number(row, i), factor)
            store_f32(to + 128 * i, value)

    @inlined
    def widen(w, scale, first_k, tables, to):
        for k in range(0, K_BLOCK, 64):
            for half in range(2):
                for line in range(LINES):
                    prefetch_l1(w + 64 * line + NEAR)
                for side in range(2):
                    quarter = 2 * half + side
                    for first in range(0, LOADS, GROUP_LOADS):
                        group = (first_k + k + 8 * first) // GROUP
                        factor = mul_f32(factor_of(scale, group, quarter), broadcast_f32(UNIT))
                        less = zero_f32()
                        if LESS:
                            less = sub_f32(less, mul_f32(factor, broadcast_f32(BIAS)))
                        if MINIMA:
                            less = sub_f32(less, minimum_of(scale, group, quarter))
                        for load in range(first, first + GROUP_LOADS):
                            even, odd = read(w, load, side, tables)
                            at = to + 128 * (k + 8 * load) + 32 * quarter
                            store_row(at, even, factor, less)
                            store_row(at + 512, odd, factor, less)
                w += TILE_BYTES

    return widen


def make_gemm(fmt: str) -> Any:
    """Compiles the GEMM (``common``) of packed blocks in ``fmt`` by bfloat16 inputs, whose A tiles
    are in order."""
    widen = _widen_fours(fmt) if fmt in INTEGERS else _widen_pairs(fmt)
    runs = {T: make_pass(T) for T in (6, 4, 2)}
    return fma.make_gemm(fmt, "avx2", widen, _widen_tokens, runs)
