"""AVX-512 GEMM of packed 32-row blocks by many tokens, for CPUs without AMX (SOSP'25 Figure 6).

The loops, from the outside: slabs of 16 KiB of B tiles; the task's blocks of 32 outputs; runs of up
to 6 or 12 tokens (``avx512_passes``); scale groups; dot products. A slab of a block is
dequantized once, its scales too, and stays in L1 for all tokens; the next block's is prefetched
meanwhile.

Each output is summed in the same order whatever the number of tokens.
"""

from __future__ import annotations

from typing import Any

from ...quant.layout import K_BLOCK
from ..activations.row_layout import row_format
from ..intrin.avx512 import store_f32, zero_f32
from ..isa import Instructions
from ..jit import inlined, linked, routine
from ..weights.dequant import make_reader
from .avx512_passes import make_pass
from .common import ARGUMENTS, MAX_TOKENS, OUT_AT, OUT_BYTES, SLAB_BYTES, TILE, padded_tokens
from .dequant_slab import make_dequantize, make_gather

_SLAB_K = SLAB_BYTES // 32  # inputs of a slab, at most
_GROUPS, _ACT_GROUPS = _SLAB_K // 16, _SLAB_K // 128
_B_AT = OUT_AT + OUT_BYTES
_FACTORS_AT = _B_AT + SLAB_BYTES  # float32 [_GROUPS, 32]
_MINIMA_AT = _FACTORS_AT + _GROUPS * 128
_ACT_SCALES_AT = _MINIMA_AT + _GROUPS * 128  # float32 [_ACT_GROUPS, MAX_TOKENS]
_SUMS_AT = _ACT_SCALES_AT + 4 * _ACT_GROUPS * MAX_TOKENS  # 32 bits [_GROUPS, MAX_TOKENS]
SCRATCH_BYTES = _SUMS_AT + 4 * _GROUPS * MAX_TOKENS
"""Scratch of one worker, 64-byte aligned."""


def make_gemm(fmt: str, ops: Instructions, activations: str) -> Any:
    """Compiles the GEMM (``common``) of packed blocks in ``fmt``.

    Args:
        fmt: weight format.
        activations: "bf16" or "int8".
    """
    reader, INT8 = make_reader(fmt, ops), activations == "int8"
    packing, scales = reader.packing, reader.scales
    how = row_format(fmt, activations)
    ACT_K = how.act_k if how and INT8 else 0
    STEP_K = 64 if INT8 else 32  # inputs of a B tile
    STEPS = K_BLOCK // STEP_K
    SLAB = SLAB_BYTES // (2 * TILE * STEPS)  # input blocks of 128
    STEP_BYTES = 2 * packing.tile_bytes * STEP_K // packing.k_step  # packed, of 32 outputs
    DIRECT = packing.tile_bytes == TILE and packing.k_step == STEP_K and not INT8
    BIASED, MINIMA, GROUP = INT8 and reader.bias != 0, scales.minimum is not None, scales.k
    factor_of: Any = scales.factor
    minimum_of: Any = scales.minimum
    dequantize = make_dequantize(reader, INT8, signed=False)
    gather = make_gather(ACT_K, GROUP if BIASED or MINIMA else 0)
    variant = f"{fmt}-{activations}-{ops.name}"
    MOST = 6 if GROUP else 12  # tokens of a pass
    run_most, run4 = (linked(make_pass(T, GROUP, MINIMA, ACT_K, BIASED, ops)) for T in (MOST, 4))

    @inlined
    def expand_scales(scale, first_k, inputs, factors, minima):
        """A slab's factors and minima, float32 [groups][32] each."""
        for group in range((inputs + GROUP - 1) // GROUP):
            for half in range(2):
                to = 128 * group + 64 * half
                store_f32(factors + to, factor_of(scale, first_k // GROUP + group, half))
                if MINIMA:
                    store_f32(minima + to, minimum_of(scale, first_k // GROUP + group, half))

    @routine(ARGUMENTS, variant)
    def gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, rows, tables, scratch):
        Mp, K = padded_tokens(M), k_blocks * K_BLOCK
        out, b_slab = scratch + OUT_AT, scratch + _B_AT
        factors, minima = scratch + _FACTORS_AT, scratch + _MINIMA_AT
        act_scales, sums = scratch + _ACT_SCALES_AT, scratch + _SUMS_AT
        a_group = k_blocks * STEPS * TILE
        for i in range(0, blocks * Mp * 128, 64):
            store_f32(out + i, zero_f32())
        for slab in range(0, k_blocks, SLAB):
            slab_blocks = min(SLAB, k_blocks - slab)
            inputs, steps = slab_blocks * K_BLOCK, slab_blocks * STEPS
            a_slab, w_slab = a + slab * STEPS * TILE, w + slab * STEPS * STEP_BYTES
            gather(Mp, rows, K, slab * K_BLOCK, inputs, act_scales, sums)
            for block in range(blocks):
                b = w_slab + block * block_bytes
                ahead = b + block_bytes if block + 1 < blocks else w_slab + steps * STEP_BYTES
                # Lines of the next slab of weights with each step: all at once they would wait.
                passes = (M + MOST - 1) // MOST * steps
                lines = (steps * STEP_BYTES // 64 + passes - 1) // passes
                if not DIRECT:
                    dequantize(b, inputs, tables, b_slab)
                    b = b_slab
                if GROUP:
                    at = scale + block * scale_bytes
                    expand_scales(at, slab * K_BLOCK, inputs, factors, minima)
                t = 0
                while t < M:
                    c = out + (block * Mp + t) * 128
                    act, less, left = act_scales + 4 * t, sums + 4 * t, M - t
                    # 7 or 8 tokens go by fours, so that no pass is left with one or two.
                    if left > 8 or 4 < left <= 6 == MOST:
                        ahead = run_most(
                            inputs,
                            a_slab,
                            a_group,
                            t,
                            b,
                            c,
                            factors,
                            minima,
                            act,
                            less,
                            ahead,
                            lines,
                        )
                        t += MOST
                    else:
                        ahead = run4(
                            inputs,
                            a_slab,
                            a_group,
                            t,
                            b,
                            c,
                            factors,
                            minima,
                            act,
                            less,
                            ahead,
                            lines,
                        )
                        t += 4
        return 0

    return gemm
