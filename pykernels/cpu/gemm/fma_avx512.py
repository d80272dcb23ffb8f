"""The GEMM of multiply-adds in AVX-512: two sums of 16 outputs for each of 12 tokens."""

from __future__ import annotations

import functools
from typing import Any

from ...quant.layout import K_BLOCK
from ..intrin.avx512 import (
    broadcast_f32,
    even_lanes,
    first_of_pairs,
    fma_f32,
    load_f32,
    mul_f32,
    odd_lanes,
    second_of_pairs,
    store_f32,
    sub_f32,
    zero_f32,
)
from ..intrin.avx512_bytes import load_u8
from ..intrin.prefetch import prefetch_l2
from ..intrin.registers import f32x16_array
from ..isa import Instructions
from ..jit import inlined, routine
from ..weights.dequant import make_reader
from ..weights.layout import LOADS, make_prefetch
from ..words import f32
from . import fma
from .common import TILE
from .dequant_slab import NEAR
from .fma import PASS_ARGUMENTS, ROW, STEPS

SCRATCH_BYTES = fma.SCRATCH_BYTES


@functools.cache
def make_pass(T: int) -> Any:
    """Compiles ``run(a, b, c, ahead, lines) -> ahead``: T tokens by a widened slab of 32 outputs,
    added to ``c``, float32 [T, 32]; ``lines`` lines from ``ahead`` on are prefetched with each step
    of 32 inputs."""
    N = 2 * T

    @routine(PASS_ARGUMENTS, f"fma-{T}")
    def run(a, b, c, ahead, lines):
        sums = f32x16_array(N)
        for i in range(N):
            sums[i] = load_f32(c + 64 * i)
        for _ in range(STEPS):
            for pair in range(16):
                for which in range(2):
                    low, high = load_f32(b + 128 * which), load_f32(b + 128 * which + 64)
                    for t in range(T):
                        x = broadcast_f32(f32(a + ROW * t + 64 * which, pair))
                        sums[2 * t] = fma_f32(low, x, sums[2 * t])
                        sums[2 * t + 1] = fma_f32(high, x, sums[2 * t + 1])
                b += 256
            a += 128
            for _ in range(lines):
                prefetch_l2(ahead)
                ahead += 64
        for i in range(N):
            store_f32(c + 64 * i, sums[i])
        return ahead

    return run


@inlined
def _widen_tokens(M, a, a_group, to):
    """A slab's A tiles, of each 16 tokens ``a_group`` bytes apart, to float32."""
    for t in range(M):
        at, row = a + t // 16 * a_group + t % 16 * 64, to + ROW * t
        for step in range(STEPS):
            pairs = load_u8(at + TILE * step)
            store_f32(row + 128 * step, first_of_pairs(pairs))
            store_f32(row + 128 * step + 64, second_of_pairs(pairs))


def make_widen(fmt: str, ops: Instructions) -> Any:
    """``widen(w, scale, first_k, tables, to)``: packed blocks -> float32 [inputs][32] of a slab,
    times their scales, less their minima; of each 32 inputs in the order of pair-rows."""
    reader = make_reader(fmt, ops)
    packing, scales = reader.packing, reader.scales
    GROUP, MINIMA = scales.k, scales.minimum is not None
    PARTS, TILE_BYTES, PACKED_K = packing.parts, packing.tile_bytes, packing.k_step
    prefetch, PREFETCH_LOADS = make_prefetch(packing), packing.prefetch_loads
    read: Any = reader.floats or reader.halves or reader.rows
    FLOATS = reader.floats is not None
    factor_of: Any = scales.factor
    minimum_of: Any = scales.minimum

    @inlined
    def scaled(value, factor, less):
        if MINIMA:
            return fma_f32(value, factor, less)
        return mul_f32(value, factor) if GROUP else value

    @inlined
    def numbers(weights):
        """16 outputs of each of four inputs."""
        if FLOATS:
            a, b, c, d = weights
            return even_lanes(a, b), odd_lanes(a, b), even_lanes(c, d), odd_lanes(c, d)
        row0, row1 = weights
        return (
            first_of_pairs(row0),
            second_of_pairs(row0),
            first_of_pairs(row1),
            second_of_pairs(row1),
        )

    @inlined
    def widen(w, scale, first_k, tables, to):
        factor, less = zero_f32(), zero_f32()
        for k in range(0, K_BLOCK, PACKED_K):
            for half in range(2):
                for four in range(LOADS * PARTS):  # of inputs
                    load, part = four // PARTS, four % PARTS
                    if part == 0 and load % PREFETCH_LOADS == 0:
                        prefetch(w + NEAR, load)
                    if GROUP and 4 * four % GROUP == 0:
                        group = (first_k + k + 4 * four) // GROUP
                        factor = factor_of(scale, group, half)
                        if MINIMA:
                            less = sub_f32(zero_f32(), minimum_of(scale, group, half))
                    n0, n1, n2, n3 = numbers(read(w, load, part, tables))
                    at = to + 128 * (k + 4 * four) + 64 * half
                    store_f32(at, scaled(n0, factor, less))
                    store_f32(at + 128, scaled(n1, factor, less))
                    store_f32(at + 256, scaled(n2, factor, less))
                    store_f32(at + 384, scaled(n3, factor, less))
                w += TILE_BYTES

    return widen


def make_gemm(fmt: str, ops: Instructions) -> Any:
    """Compiles the GEMM (``common``) of packed blocks in ``fmt`` by bfloat16 inputs."""
    runs = {T: make_pass(T) for T in (12, 8, 4)}
    return fma.make_gemm(fmt, ops.name, make_widen(fmt, ops), _widen_tokens, runs)
