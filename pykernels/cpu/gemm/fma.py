"""AVX-512 GEMM in float32 multiply-adds, for CPUs on which two of them outrun one ``vdpbf16ps``.

Intel's cores begin two ``vfmadd231ps`` of 512 bits a cycle, but one ``vdpbf16ps`` in two: the same
products take half the time in float32. So a slab of a block is widened once for all tokens, scales
and minima applied on the way, and sums need not end with a scale group.

The loops, from the outside: slabs of 128 inputs, the tokens' widened once for all blocks; the
task's blocks of 32 outputs; runs of 12 tokens, 8 or 4, two sums of 16 outputs each in registers;
multiply-adds. The next block's slab is prefetched meanwhile.

Each output is summed in the same order whatever the number of tokens.
"""

from __future__ import annotations

import functools
from typing import Any

from ...quant.layout import K_BLOCK
from ..intrin.avx512 import (
    broadcast_f32,
    first_of_pairs,
    fma_f32,
    load_f32,
    mul_f32,
    second_of_pairs,
    store_f32,
    sub_f32,
    zero_f32,
)
from ..intrin.avx512_bytes import load_u8
from ..intrin.prefetch import prefetch_l2
from ..intrin.registers import f32x16_array
from ..isa import Instructions
from ..jit import inlined, linked, routine
from ..job import f32
from ..weights.dequant import make_reader
from ..weights.layout import LOADS, PACKINGS, make_prefetch
from .common import ARGUMENTS, MAX_TOKENS, OUT_AT, OUT_BYTES, TILE, padded_tokens
from .dequant_slab import NEAR

_STEP_K = 32  # inputs of a tile
_STEPS = K_BLOCK // _STEP_K  # of a slab
_ROW = 4 * K_BLOCK  # bytes of a token's slab
_B_AT = OUT_AT + OUT_BYTES  # float32 [inputs][32]
_A_AT = _B_AT + 128 * K_BLOCK  # float32 [MAX_TOKENS][steps][first, second of the pairs][16]
SCRATCH_BYTES = _A_AT + _ROW * MAX_TOKENS
"""Scratch of one worker, 64-byte aligned."""

_PASS_ARGUMENTS = 5


@functools.cache
def make_pass(T: int) -> Any:
    """Compiles ``run(a, b, c, ahead, lines) -> ahead``: T tokens by a widened slab of 32 outputs,
    added to ``c``, float32 [T, 32]; ``lines`` lines from ``ahead`` on are prefetched with each step
    of 32 inputs."""
    N = 2 * T

    @routine(_PASS_ARGUMENTS, f"fma-{T}")
    def run(a, b, c, ahead, lines):
        sums = f32x16_array(N)
        for i in range(N):
            sums[i] = load_f32(c + 64 * i)
        for _ in range(_STEPS):
            for pair in range(16):
                for which in range(2):
                    low, high = load_f32(b + 128 * which), load_f32(b + 128 * which + 64)
                    for t in range(T):
                        x = broadcast_f32(f32(a + _ROW * t + 64 * which, pair))
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
        at, row = a + t // 16 * a_group + t % 16 * 64, to + _ROW * t
        for step in range(_STEPS):
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
    read: Any = reader.halves or reader.rows
    factor_of: Any = scales.factor
    minimum_of: Any = scales.minimum

    @inlined
    def scaled(value, factor, less):
        if MINIMA:
            return fma_f32(value, factor, less)
        return mul_f32(value, factor) if GROUP else value

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
                    row0, row1 = read(w, load, part, tables)
                    at = to + 128 * (k + 4 * four) + 64 * half
                    store_f32(at, scaled(first_of_pairs(row0), factor, less))
                    store_f32(at + 128, scaled(second_of_pairs(row0), factor, less))
                    store_f32(at + 256, scaled(first_of_pairs(row1), factor, less))
                    store_f32(at + 384, scaled(second_of_pairs(row1), factor, less))
                w += TILE_BYTES

    return widen


def make_gemm(fmt: str, ops: Instructions) -> Any:
    """Compiles the GEMM (``common``) of packed blocks in ``fmt`` by bfloat16 inputs.

    Args:
        fmt: weight format.
    """
    packing = PACKINGS[fmt]
    STEP_BYTES = 2 * packing.tile_bytes * _STEP_K // packing.k_step  # packed, of 32 outputs
    widen = make_widen(fmt, ops)
    run12, run8, run4 = (linked(make_pass(T)) for T in (12, 8, 4))

    @routine(ARGUMENTS, f"fma-{fmt}-{ops.name}")
    def gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, rows, tables, scratch):
        Mp = padded_tokens(M)
        out, b_slab, a_slab = scratch + OUT_AT, scratch + _B_AT, scratch + _A_AT
        for i in range(0, blocks * Mp * 128, 64):
            store_f32(out + i, zero_f32())
        # Lines of the next slab of weights with each step: all at once they would wait.
        passes = (M + 11) // 12 * _STEPS
        lines = (_STEPS * STEP_BYTES // 64 + passes - 1) // passes
        for slab in range(k_blocks):
            w_slab = w + slab * _STEPS * STEP_BYTES
            _widen_tokens(Mp, a + slab * _STEPS * TILE, k_blocks * _STEPS * TILE, a_slab)
            for block in range(blocks):
                b = w_slab + block * block_bytes
                ahead = b + block_bytes if block + 1 < blocks else w_slab + _STEPS * STEP_BYTES
                widen(b, scale + block * scale_bytes, slab * K_BLOCK, tables, b_slab)
                t = 0
                while t < M:
                    c, left = out + (block * Mp + t) * 128, M - t
                    if left > 8:
                        ahead = run12(a_slab + _ROW * t, b_slab, c, ahead, lines)
                        t += 12
                    elif left > 4:
                        ahead = run8(a_slab + _ROW * t, b_slab, c, ahead, lines)
                        t += 8
                    else:
                        ahead = run4(a_slab + _ROW * t, b_slab, c, ahead, lines)
                        t += 4
        return 0

    return gemm
