"""GEMM in float32 multiply-adds, for CPUs on which two of them outrun one ``vdpbf16ps``.

Intel's cores begin two ``vfmadd231ps`` of 512 bits a cycle, but one ``vdpbf16ps`` in two: the same
products take half the time in float32; and AVX2 has no other of bfloat16. So a slab of a block is
widened once for all tokens, scales and minima applied on the way, and sums need not end with a
scale group.

The loops, from the outside: slabs of 128 inputs, the tokens' widened once for all blocks; the
task's blocks of 32 outputs; runs of as many tokens as have their sums in registers; multiply-adds.
The next block's slab is prefetched meanwhile.

Each output is summed in the same order whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...quant.layout import K_BLOCK
from ..jit import linked, routine
from ..weights.layout import PACKINGS
from ..words import poke_f32
from .common import ARGUMENTS, MAX_TOKENS, OUT_AT, OUT_BYTES, TILE, padded_tokens

_STEP_K = 32  # inputs of a tile
STEPS = K_BLOCK // _STEP_K  # of a slab
ROW = 4 * K_BLOCK  # bytes of a token's slab
_B_AT = OUT_AT + OUT_BYTES  # float32 [inputs][32]
_A_AT = _B_AT + 128 * K_BLOCK  # float32 [MAX_TOKENS][steps][first, second of the pairs][16]
SCRATCH_BYTES = _A_AT + ROW * MAX_TOKENS
"""Scratch of one worker, 64-byte aligned."""

PASS_ARGUMENTS = 5


def make_gemm(fmt: str, name: str, widen: Callable, widen_tokens: Callable, runs: dict) -> Any:
    """Compiles the GEMM (``common``) of packed blocks in ``fmt`` by bfloat16 inputs.

    Args:
        fmt: weight format.
        name: of the instructions.
        widen: ``widen(w, scale, first_k, tables, to)``: packed blocks -> float32 [inputs][32] of a
            slab, times their scales, less their minima; of each 32 inputs in the order of A tiles.
        widen_tokens: ``widen_tokens(M, a, a_group, to)``: a slab's A tiles, of each 16 tokens
            ``a_group`` bytes apart, to float32.
        runs: three routines ``run(a, b, c, ahead, lines) -> ahead`` by the number of tokens, the
            largest first: tokens by a widened slab of 32 outputs, added to ``c``, float32
            [tokens, 32]; ``lines`` lines from ``ahead`` on are prefetched with each step of 32
            inputs. More tokens than there are may be run: there is room for them.
    """
    packing = PACKINGS[fmt]
    STEP_BYTES = 2 * packing.tile_bytes * _STEP_K // packing.k_step  # packed, of 32 outputs
    T0, T1, T2 = runs
    run0, run1, run2 = (linked(run) for run in runs.values())

    @routine(ARGUMENTS, f"fma-{fmt}-{name}")
    def gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, rows, tables, scratch):
        Mp = padded_tokens(M)
        out, b_slab, a_slab = scratch + OUT_AT, scratch + _B_AT, scratch + _A_AT
        for i in range(0, blocks * Mp * 128, 4):
            poke_f32(out + i, 0)
        # Lines of the next slab of weights with each step: all at once they would wait.
        passes = (M + T0 - 1) // T0 * STEPS
        lines = (STEPS * STEP_BYTES // 64 + passes - 1) // passes
        for slab in range(k_blocks):
            w_slab = w + slab * STEPS * STEP_BYTES
            widen_tokens(Mp, a + slab * STEPS * TILE, k_blocks * STEPS * TILE, a_slab)
            for block in range(blocks):
                b = w_slab + block * block_bytes
                ahead = b + block_bytes if block + 1 < blocks else w_slab + STEPS * STEP_BYTES
                widen(b, scale + block * scale_bytes, slab * K_BLOCK, tables, b_slab)
                t = 0
                while t < M:
                    c, left = out + (block * Mp + t) * 128, M - t
                    if left > T1:
                        ahead = run0(a_slab + ROW * t, b_slab, c, ahead, lines)
                        t += T0
                    elif left > T2:
                        ahead = run1(a_slab + ROW * t, b_slab, c, ahead, lines)
                        t += T1
                    else:
                        ahead = run2(a_slab + ROW * t, b_slab, c, ahead, lines)
                        t += T2
        return 0

    return gemm
