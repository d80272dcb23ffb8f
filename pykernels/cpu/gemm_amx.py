"""AMX GEMM of packed 32-row blocks by many tokens (SOSP'25 section 3.2, Figure 6).

The loops, from the outside: slabs of 512 inputs; the task's blocks of 32 outputs; pairs of groups
of 16 tokens; scale groups; tile products. A slab of all tokens stays in L2 for all blocks; a slab
of a block is at most 32 KiB of B tiles and stays in L1 for all tokens; 2 x 2 C tiles hold 32 tokens
by 32 outputs in registers. The next slab of weights is prefetched meanwhile.

bf16 blocks are B tiles already, and so are 8-bit integers where activations are int8. Others are
decoded into a slab of them; C tiles are folded into the float32 sums at the end of each scale's
inputs. Where a scale covers fewer inputs than a tile has, tiles of fewer columns are multiplied.
"""

from __future__ import annotations

from typing import Any

from numba import carray, types

from ..quant.layout import K_BLOCK
from .activations import annotation
from .decode import AHEAD, LOADS, make_reader, pair_rows
from .instructions import Instructions
from .intrin.avx512 import broadcast_f32, fma_f32, fnma_f32, load_f32, mul_f32, store_f32, zero_f32
from .intrin.avx512_bytes import broadcast_u8, load_i32, store_u8, sub_i8, to_f32
from .intrin.prefetch import prefetch_l2
from .intrin.sync import as_pointer
from .jit import inlined, routine
from .job import i64
from .rows import activation_scale, group_sum

MAX_TOKENS = 256
"""Tokens of one pass over the weights: their A slab and sums still fit in L2."""
MAX_BLOCKS = 16
"""32-row blocks of one call, gate and up counted each."""
ARGUMENTS = 11
"""Of ``gemm``."""

_SLAB = 4  # input blocks of 128
TILE = 1024
"""Bytes of a tile: 16 rows of 64."""
_B_BYTES = _SLAB * K_BLOCK // 32 * 2 * TILE
_PART_BYTES = 32 * 32 * 4
_OUT_BYTES = MAX_BLOCKS * MAX_TOKENS * 32 * 4

OUT_AT = 0
"""Scratch offset of the result, float32 [blocks, M rounded up to 32, 32]."""
_CONFIG_AT = OUT_AT + _OUT_BYTES
_PART_AT = _CONFIG_AT + 64  # two of them: while one is folded the next one is multiplied
_B_AT = _PART_AT + 2 * _PART_BYTES
SCRATCH_BYTES = _B_AT + _B_BYTES
"""Scratch of one worker, 64-byte aligned."""


@inlined
def padded_tokens(M):
    """M rounded up to whole pairs of A tiles."""
    return (M + 31) // 32 * 32


@inlined
def write_config(config, b_rows):
    """The tile configuration: palette 1 (SDM, LDTILECFG).

    C tiles 0 - 3 and B tiles 6 and 7 have rows of 64 bytes, B only ``b_rows`` of them; A tiles 4
    and 5 have 16 rows of as many dwords.
    """
    store_u8(config, broadcast_u8(0))
    _poke_u8(config, 1)
    for tile in range(8):
        is_a, is_b = 4 <= tile < 6, tile >= 6
        _poke_u8(config + 16 + 2 * tile, 4 * b_rows if is_a else 64)
        _poke_u8(config + 48 + tile, b_rows if is_b else 16)
    return config


@inlined
def _poke_u8(address, value):
    carray(as_pointer(address), (1,), types.uint8)[0] = value


def make_gemm(fmt: str, ops: Instructions, activations: str, amx: Any) -> Any:
    """Compiles the GEMM of packed blocks in ``fmt``.

    The routine ``gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, rows, tables,
    scratch)`` computes ``out[b, t, n] = sum_k w[b][n, k] * x_t[k]`` for ``blocks`` consecutive
    packed blocks and ``M`` tokens into scratch at ``OUT_AT``; rows beyond M hold nothing of use.

    Args:
        fmt: weight format.
        activations: "bf16" or "int8".
        amx: ``intrin.amx``, or ``intrin.amx_model`` where there is none.

    Args of the routine (addresses are int64):
        M: tokens, at most MAX_TOKENS.
        blocks: at most MAX_BLOCKS, ``block_bytes`` apart from ``w`` on.
        scale: packed scales, a block's ``scale_bytes`` apart; unread if the format has none.
        k_blocks: inputs / 128.
        a: A tiles [groups of 16 tokens][steps][16 rows][64 bytes], 32 bf16 or 64 int8 inputs a
            step; an even number of groups, of which the rows beyond M may hold anything.
        rows: int64 [M rounded up to 32], address of each token's row (``cpu.rows``).
        tables: ``decode.TABLES``.
        scratch: SCRATCH_BYTES of this worker.
    """
    reader = make_reader(fmt, ops)
    packing, scales, INT8 = reader.packing, reader.scales, activations == "int8"
    read, BIAS = reader.rows, reader.bias
    codes: Any = reader.codes
    factor_of: Any = scales.factor
    minimum_of = scales.minimum
    how = annotation(fmt, activations)
    ACT_K = how.act_k if how and INT8 else 0
    PARTS, TILE_BYTES, PACKED_K = packing.parts, packing.tile_bytes, packing.k_step
    FOURS, STEP_K = packing.fours, 64 if INT8 else 32  # inputs of a full tile
    DIRECT = TILE_BYTES == TILE and STEP_K == PACKED_K and (INT8 or scales.k == 0)
    GROUP = scales.k or _SLAB * K_BLOCK
    TILE_K = min(STEP_K, GROUP)  # inputs of one product
    B_ROWS = 16 * TILE_K // STEP_K
    PRODUCTS, SCALED = GROUP // TILE_K, scales.k > 0
    STEP_BYTES = 2 * TILE_BYTES * STEP_K // PACKED_K  # packed bytes of 32 outputs by a step
    STEPS = K_BLOCK // STEP_K
    tile_zero, tile_load, tile_store = amx.zero, amx.load, amx.store
    dot = amx.dot_i8 if INT8 else amx.dot_bf16

    @inlined
    def prefetch(address):
        for line in range(0, STEP_BYTES, 64):
            prefetch_l2(address + line)

    @inlined
    def decode(w, inputs, tables, ahead, b_slab):
        """Packed blocks -> B tiles [step][half] in scratch."""
        for k in range(0, inputs, PACKED_K):
            for half in range(2):
                for load in range(LOADS):
                    for part in range(PARTS):
                        first = k + 4 * (load * PARTS + part)
                        tile = b_slab + (2 * (first // STEP_K) + half) * TILE
                        if INT8:
                            q = sub_i8(codes(w, load, part, AHEAD), broadcast_u8(BIAS))
                            store_u8(tile + first % STEP_K * 16, q)
                        else:
                            row0, row1 = read(w, load, part, tables, AHEAD)
                            if FOURS:
                                row0, row1 = pair_rows(row0, row1)
                            store_u8(tile + first % STEP_K * 32, row0)
                            store_u8(tile + first % STEP_K * 32 + 64, row1)
                w += TILE_BYTES
            for step in range(PACKED_K // STEP_K):
                prefetch(ahead + (k // STEP_K + step) * STEP_BYTES)

    @inlined
    def product(a0, a1, b):
        """The four C tiles += 2 A tiles x 2 B tiles."""
        tile_load(6, b, 64)
        tile_load(4, a0, 64)
        tile_load(7, b + TILE, 64)
        tile_load(5, a1, 64)
        dot(0, 4, 6)
        dot(1, 4, 7)
        dot(2, 5, 6)
        dot(3, 5, 7)

    @inlined
    def fold(part, scale, group, rows, k, K, out):
        """out[32, 32] += a group's products, scaled."""
        low, high = factor_of(scale, group, 0), factor_of(scale, group, 1)
        if minimum_of is not None:
            min_low, min_high = minimum_of(scale, group, 0), minimum_of(scale, group, 1)
        for t in range(32):
            at, to = part + 128 * t, out + 128 * t
            if INT8:
                x_scale = broadcast_f32(activation_scale(i64(rows, t), K, k, ACT_K))
                a = mul_f32(to_f32(load_i32(at)), x_scale)
                b = mul_f32(to_f32(load_i32(at + 64)), x_scale)
            else:
                a, b = load_f32(at), load_f32(at + 64)
            a, b = fma_f32(a, low, load_f32(to)), fma_f32(b, high, load_f32(to + 64))
            if minimum_of is not None:
                less = group_sum(i64(rows, t), K, group)
                if INT8:
                    less *= activation_scale(i64(rows, t), K, k, ACT_K)
                a = fnma_f32(broadcast_f32(less), min_low, a)
                b = fnma_f32(broadcast_f32(less), min_high, b)
            store_f32(to, a)
            store_f32(to + 64, b)

    @inlined
    def store_c(to):
        tile_store(0, to, 128)
        tile_store(1, to + 64, 128)
        tile_store(2, to + 16 * 128, 128)
        tile_store(3, to + 16 * 128 + 64, 128)

    @inlined
    def zero_c():
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)

    @inlined
    def load_c(at):
        tile_load(0, at, 128)
        tile_load(1, at + 64, 128)
        tile_load(2, at + 16 * 128, 128)
        tile_load(3, at + 16 * 128 + 64, 128)

    @inlined
    def unscaled(steps, a0, a1, b, c, first, ahead):
        """out[32, 32] += a slab's products."""
        if first:
            zero_c()
        else:
            load_c(c)
        for _ in range(steps):
            product(a0, a1, b)
            if ahead != 0:
                prefetch(ahead)
                ahead += STEP_BYTES
            a0 += TILE
            a1 += TILE
            b += 2 * TILE
        store_c(c)

    @inlined
    def scaled(inputs, a0, a1, b, c, scale, first_k, rows, K, part):
        """out[32, 32] += a slab's products, a scale group at a time."""
        for k in range(0, inputs, GROUP):
            zero_c()
            for i in range(PRODUCTS):
                at = k + i * TILE_K
                step, within = at // STEP_K, at % STEP_K
                skip = step * TILE + within * (64 // STEP_K)
                product(a0 + skip, a1 + skip, b + 2 * step * TILE + within * (TILE // STEP_K))
            parts = part + k // GROUP % 2 * _PART_BYTES
            store_c(parts)
            fold(parts, scale, (first_k + k) // GROUP, rows, first_k + k, K, c)

    @routine(ARGUMENTS, f"{fmt}-{activations}-{ops.name}-{amx.__name__.split('.')[-1]}")
    def gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, rows, tables, scratch):
        Mp, K = padded_tokens(M), k_blocks * K_BLOCK
        out, part, b_slab = scratch + OUT_AT, scratch + _PART_AT, scratch + _B_AT
        a_group = k_blocks * STEPS * TILE
        amx.load_config(write_config(scratch + _CONFIG_AT, B_ROWS))
        if SCALED:
            for i in range(0, blocks * Mp * 128, 64):
                store_f32(out + i, zero_f32())
        for slab in range(0, k_blocks, _SLAB):
            slab_blocks = min(_SLAB, k_blocks - slab)
            steps = slab_blocks * STEPS
            w_slab = w + slab * STEPS * STEP_BYTES
            for block in range(blocks):
                b = w_slab + block * block_bytes
                ahead = b + block_bytes if block + 1 < blocks else w_slab + steps * STEP_BYTES
                if not DIRECT:
                    decode(b, slab_blocks * K_BLOCK, tables, ahead, b_slab)
                    b = b_slab
                elif SCALED:
                    for step in range(steps):
                        prefetch(ahead + step * STEP_BYTES)
                for token in range(0, Mp, 32):
                    c = out + (block * Mp + token) * 128
                    a0 = a + token // 16 * a_group + slab * STEPS * TILE
                    a1 = a0 + a_group
                    if SCALED:
                        scaled(
                            slab_blocks * K_BLOCK, a0, a1, b, c, scale + block * scale_bytes,
                            slab * K_BLOCK, rows + 8 * token, K, part,
                        )  # fmt: skip
                    else:
                        unscaled(steps, a0, a1, b, c, slab == 0, ahead if token == 0 else 0)
        amx.release()
        return 0

    return gemm
