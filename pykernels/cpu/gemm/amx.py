"""AMX GEMM of packed 32-row blocks by many tokens (SOSP'25 section 3.2, Figure 6).

The loops, from the outside: slabs of 128 inputs; the task's blocks of 32 outputs; groups of 16
tokens; scale groups; tile products. A slab of a block stays in L1 for all tokens, and so does that
of up to 64 tokens for all blocks: the second level feeds tile loads too slowly to bring both.
(Where sums stay in registers for a slab, ``amx_narrow``, and of planes a slab is 16 KiB of B tiles;
where weights have one scale an output and activations groups of 256, it is one of these.) The tiles
of more tokens come from the second level for every block anyway: where no scale ends a sum sooner,
their slabs are twice as long, so that half as many sums are added in memory.

The next slab of weights is prefetched meanwhile, a few lines with each product, its two pages side
by side where it has two: the second level's own prefetcher, which follows streams within a page,
then has time to run ahead, and fewer lines wait for memory in the few buffers of the first level.

bf16 blocks are B tiles already, and so are 8-bit integers where activations are int8. Others are
dequantized into a slab of them (``dequant_slab``), with the scales of small groups where that is
exact: powers of two, small integers in two planes. ``amx_wide`` or ``amx_narrow`` multiplies a
slab and adds it to the sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numba import carray, types

from ...quant.layout import K_BLOCK
from ..activations.row_layout import row_format
from ..intrin.avx512 import store_f32, zero_f32
from ..intrin.avx512_bytes import broadcast_u8, store_u8
from ..intrin.sync import as_pointer
from ..isa import Instructions
from ..jit import inlined, routine
from ..weights.dequant import make_reader
from ..weights.scales import Scales
from . import amx_minima
from .amx_narrow import make_narrow
from .amx_passes import PARTS_BYTES
from .amx_wide import make_wide
from .common import ARGUMENTS, MAX_TOKENS, OUT_AT, OUT_BYTES, SLAB_BYTES, TILE, padded_tokens
from .dequant_slab import (
    make_dequantize,
    make_dequantize_planes,
    make_dequantize_powers,
    make_gather,
)

_ACT_GROUPS = 4  # of a slab, at most
_PAGE = 4096

LONG_FROM = 128
"""Tokens from which slabs are twice as long."""

_CONFIG_AT = OUT_AT + OUT_BYTES
_PARTS_AT = _CONFIG_AT + 64
_B_AT = _PARTS_AT + PARTS_BYTES
_ACT_SCALES_AT = _B_AT + SLAB_BYTES + amx_minima.BYTES  # float32 [_ACT_GROUPS, MAX_TOKENS]
_MINIMA_AT = _ACT_SCALES_AT + 4 * _ACT_GROUPS * MAX_TOKENS  # A tiles
SCRATCH_BYTES = _MINIMA_AT + TILE * (MAX_TOKENS // 16)
"""Scratch of one worker, 64-byte aligned."""


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
    """Compiles the GEMM (``common``) of packed blocks in ``fmt``.

    Args:
        fmt: weight format.
        activations: "bf16" or "int8".
        amx: ``intrin.amx``, or ``intrin.amx_model`` where there is none.
    """
    reader = make_reader(fmt, ops)
    packing, scales, INT8 = reader.packing, reader.scales, activations == "int8"
    how = row_format(fmt, activations)
    ACT_K = how.act_k if how and INT8 else 0
    TILE_BYTES, PACKED_K = packing.tile_bytes, packing.k_step
    STEP_K = 64 if INT8 else 32  # inputs of a full tile
    DIRECT = TILE_BYTES == TILE and STEP_K == PACKED_K and (INT8 or scales.k == 0)
    STEP_BYTES = 2 * TILE_BYTES * STEP_K // PACKED_K  # packed bytes of 32 outputs by a step
    STEPS = K_BLOCK // STEP_K
    PLANES = 2 if scales.small and scales.k < STEP_K else 1
    MINIMA = scales.super_minimum is not None
    dequantize_scaled: Any = None
    if PLANES > 1:
        dequantize_scaled = make_dequantize_planes(reader, INT8)
        scales = replace(scales, k=scales.super_k, factor=scales.super_factor)
    elif scales.power:
        dequantize_scaled = make_dequantize_powers(reader)
        scales = Scales(0)
    if scales.whole and INT8:  # only the activations' scales are applied to products
        scales = replace(scales, k=ACT_K)
    NARROW = 0 < scales.k <= STEP_K
    # Input blocks of 128.
    if NARROW or PLANES > 1:
        SLAB = SLAB_BYTES // (2 * TILE * STEPS * PLANES)
    else:
        SLAB = max(1, scales.k // K_BLOCK)
    STREAMS = 2 if SLAB * STEPS * STEP_BYTES >= 2 * _PAGE else 1
    FREE = not INT8 and not NARROW and PLANES == 1 and (scales.k == 0 or scales.whole)
    if NARROW:
        passes = make_narrow(scales, ACT_K, STEP_K, amx, STREAMS)
    else:
        passes = make_wide(scales, ACT_K, SLAB * K_BLOCK, STEP_K, amx, STREAMS, PLANES, free=FREE)
    run, flush, GROUPS, B_ROWS = passes.run, passes.flush, passes.token_groups, passes.b_rows
    dequantize = make_dequantize(reader, INT8, signed=True)
    gather = make_gather(ACT_K, 0)
    # Minima under no float of their superblock.
    BEGIN = scales.minimum is not None and not MINIMA
    begin_at_minima: Any = amx_minima.make_begin_at_minima(reader.scales, ACT_K) if BEGIN else None
    gather_minima: Any = amx_minima.make_gather_minima(reader.scales) if MINIMA else None
    write_minima: Any = amx_minima.make_write_minima(reader.scales) if MINIMA else None
    variant = f"{fmt}-{activations}-{ops.name}-{amx.__name__.split('.')[-1]}"

    @routine(ARGUMENTS, variant)
    def gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, rows, tables, scratch):
        Mp, K = padded_tokens(M), k_blocks * K_BLOCK
        out, parts, b_slab = scratch + OUT_AT, scratch + _PARTS_AT, scratch + _B_AT
        act_scales, minima = scratch + _ACT_SCALES_AT, scratch + _MINIMA_AT
        a_group = k_blocks * STEPS * TILE
        groups = (M + 15) // 16
        amx.load_config(write_config(scratch + _CONFIG_AT, B_ROWS))
        store_u8(parts, broadcast_u8(0))  # no products wait for their scales
        if BEGIN:
            for block in range(blocks):
                begin_at_minima(Mp, rows, K, scale + block * scale_bytes, out + block * Mp * 128)
        else:
            for i in range(0, blocks * Mp * 128, 64):
                store_f32(out + i, zero_f32())
        length = 2 * SLAB if FREE and M >= LONG_FROM else SLAB
        for slab in range(0, k_blocks, length):
            slab_blocks = min(length, k_blocks - slab)
            inputs, steps = slab_blocks * K_BLOCK, slab_blocks * STEPS
            w_slab = w + slab * STEPS * STEP_BYTES
            gather(16 * groups, rows, K, slab * K_BLOCK, inputs, act_scales, 0)
            if MINIMA:
                gather_minima(16 * groups, rows, K, slab * K_BLOCK, minima)
            # Lines of the next slab of weights with each product: all at once they would wait.
            products = (groups + GROUPS - 1) // GROUPS * steps * (PLANES if INT8 else 1)
            stream = steps * STEP_BYTES // STREAMS
            lines = (stream // 64 + products - 1) // products
            for block in range(blocks):
                b = w_slab + block * block_bytes
                ahead = b + block_bytes if block + 1 < blocks else w_slab + steps * STEP_BYTES
                if dequantize_scaled is not None:
                    at = scale + block * scale_bytes
                    dequantize_scaled(b, inputs, tables, b_slab, at, slab * K_BLOCK)
                    b = b_slab
                elif not DIRECT:
                    dequantize(b, inputs, tables, b_slab)
                    b = b_slab
                if MINIMA:
                    write_minima(scale + block * scale_bytes, slab * K_BLOCK, b + SLAB_BYTES)
                for group in range(0, groups, GROUPS):
                    a_slab = a + group * a_group + slab * STEPS * TILE
                    ahead = run(
                        inputs,
                        min(GROUPS, groups - group),
                        a_slab,
                        a_group,
                        b,
                        out + (block * Mp + 16 * group) * 128,
                        scale + block * scale_bytes,
                        slab * K_BLOCK,
                        act_scales + 64 * group,
                        minima + TILE * group,
                        parts,
                        ahead,
                        stream,
                        lines,
                    )
            flush(parts)
        amx.release()
        return 0

    return gemm
