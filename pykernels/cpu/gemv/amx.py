"""AMX tiles of few tokens: a packed 32-row block times M tokens, bf16 activations, exactly.

On a core that two threads share, dot products of AVX-512 take longer than reading narrow weights
does. A tile product takes weights as they lie in memory, or dequantized, and up to 16 rows of
inputs: those of 16 tokens in bfloat16, or of 4 as int8 slices (``activations.row_layout``), where
weights are integers. It costs the same for any number of rows, so a block of weights is read at the
rate of its dequantization.

A block of 128 inputs is dequantized into B tiles while the products of the one before are computed.
Sums of slices are integers, scaled in the order of ``avx512_block``: there a token's result is the
same, bit for bit, from either. Products of bfloat16 are rounded in another order than there, so
where weights are no integers, one token and several differ in the last bits (``FROM``).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...quant.activations import SLICES_K
from ...quant.layout import K_BLOCK
from ..activations.int8_slices import MAGIC_BITS
from ..activations.row_layout import SUM_UNIT, activation_scale, group_sum, unit_sum
from ..gemm.common import TILE
from ..intrin.avx512 import (
    add_f32,
    broadcast_f32,
    fma_f32,
    fnma_f32,
    load_f32,
    mul_f32,
    store_f32,
    zero_f32,
)
from ..intrin.avx512_bytes import add_i32, all_i32, load_i32, store_u8
from ..intrin.prefetch import in_order, prefetch_l2
from ..intrin.registers import f32x16_array, stack_alloc
from ..isa import Instructions
from ..jit import inlined, kernel, linked, routine
from ..weights.dequant import make_reader
from ..weights.layout import AHEAD_L1, AHEAD_L2, LOADS, make_prefetch, packed_bytes
from ..words import i64
from .amx_mma import Shape, make_configure, make_gather, make_multiply
from .avx512 import make_tile as make_tile_avx512
from .avx512 import make_tiles as make_tiles_avx512
from .common import ahead, by_tokens
from .dot import JOINS

FROM = {
    "bf16": 3,
    "fp8": 3,
    "fp8-channel": 3,
    "int8": 2,
    "int8-channel": 2,
    "int4-g128": 3,
    "int4-channel": 3,
    "int4-zp-g128": 3,
    "int4": 5,
    "int4-zp": 5,
    "mxfp4": 5,
    "q4_k": 5,
    "q5_k": 5,
    "q8_0": 3,
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"), 5),
}
"""Tokens of a pass from which a format takes these tiles; fewer, and other formats, AVX-512.

As measured on Emerald Rapids (the channel formats' and those with zero points are those of int8 and
int4-g128, GGUF's blocks of 32 those of int4): what decides is the number of sums to scale, by group
and token."""

_SUM_UNIT = np.float32(SUM_UNIT)


@functools.cache  # the tiles of every M share it
def _make_dequantize(fmt: str, ops: Instructions) -> Any:
    """Compiles ``dequantize(w, near, far, tables, b)``: a packed block of 128 inputs -> B tiles
    [step][half].

    As it goes, it prefetches as many bytes from ``near`` on to L1, from ``far`` on to L2.
    """
    reader = make_reader(fmt, ops)
    packing, INT8 = reader.packing, reader.signed is not None
    read: Any = reader.signed or reader.rows
    STEP_K = 64 if INT8 else 32  # inputs of a full tile
    PACKED, PACKED_K, PARTS = packing.tile_bytes, packing.k_step, packing.parts
    prefetch_near = make_prefetch(packing)
    prefetch_far = make_prefetch(packing, prefetch_l2)
    PREFETCH_LOADS = packing.prefetch_loads

    @inlined
    def write(to, at, load, part, tables):
        if INT8:
            store_u8(to, read(at, load, part, tables))
        else:
            row0, row1 = read(at, load, part, tables)
            store_u8(to, row0)
            store_u8(to + 64, row1)

    @routine(5, f"{fmt}-{ops.name}")
    def dequantize(w, near, far, tables, b):
        for step in range(K_BLOCK // PACKED_K):
            for half in range(2):
                packed = (2 * step + half) * PACKED
                at = w + packed
                for first_load in range(0, LOADS, PREFETCH_LOADS):
                    prefetch_near(near + packed, first_load)
                    prefetch_far(far + packed, first_load)
                    for load in range(first_load, first_load + PREFETCH_LOADS):
                        for part in range(PARTS):
                            k = step * PACKED_K + 4 * (load * PARTS + part)
                            to = b + (k // STEP_K * 2 + half) * TILE + k % STEP_K * 1024 // STEP_K
                            write(to, at, load, part, tables)
                    in_order()
        return 0

    return linked(dequantize)


def make_tile(fmt: str, M: int, ops: Instructions, amx: Any) -> Any:
    """Compiles ``tile(w, then, scale, first, last, K, rows, tables, out)`` for M tokens.

    Arguments of the tile are those of ``avx512.make_tile``.

    Args:
        amx: ``intrin.amx``, or ``intrin.amx_model`` where there is none.
    """
    reader = make_reader(fmt, ops)
    scales, INT8 = reader.scales, reader.signed is not None
    factor_of: Any = scales.factor
    minimum_of: Any = scales.minimum
    shape = Shape(M, INT8, scales.k or K_BLOCK)
    DIRECT = reader.packing.tile_bytes == TILE  # packed weights are B tiles
    configure, gather = make_configure(shape), make_gather(shape)
    multiply = make_multiply(shape, DIRECT, amx)
    dequantize: Any = None if DIRECT else _make_dequantize(fmt, ops)
    GROUPS, SUMS, EACH, BLOCK = shape.groups, shape.sums_bytes, shape.rows_each, packed_bytes(fmt)
    A_ROOM, B_ROOM, C_ROOM = shape.steps * SUMS, shape.steps * 2 * TILE, GROUPS * 2 * SUMS
    UNIT = np.float32(reader.signed_unit)
    join_short, join_lowest = JOINS

    @inlined
    def total(at):
        """The sum of one token's rows."""
        if INT8:
            magic = all_i32(MAGIC_BITS)
            value = join_short(
                add_i32(load_i32(at), magic),
                add_i32(load_i32(at + 64), magic),
                add_i32(load_i32(at + 128), magic),
            )
            return join_lowest(value, load_i32(at + 192))
        return load_f32(at)

    @inlined
    def input_sum(row, K, group):
        """A sum of inputs in the unit of the sums of products."""
        return unit_sum(row, K, group) * _SUM_UNIT if INT8 else group_sum(row, K, group)

    @inlined
    def scaled(value, row, K, block):
        if INT8:
            by = UNIT * activation_scale(row, K, block * K_BLOCK, SLICES_K)
            return mul_f32(value, broadcast_f32(by))
        return value

    @inlined
    def apply_scales(c, scale, block, K, rows, out):
        """out += the block's sums times their scales, in the order of ``avx512_block``."""
        for half in range(2):
            outs = f32x16_array(M)
            for t in range(M):
                outs[t] = zero_f32()
            for i in range(GROUPS):
                group = block * GROUPS + i
                if factor_of is not None:
                    factor = factor_of(scale, group, half)
                if minimum_of is not None:
                    minimum = minimum_of(scale, group, half)
                for t in range(M):
                    value = total(c + (2 * i + half) * SUMS + 64 * t * EACH)
                    if factor_of is None:
                        outs[t] = add_f32(value, outs[t])
                    else:
                        outs[t] = fma_f32(value, factor, outs[t])
                    if minimum_of is not None:
                        less = broadcast_f32(input_sum(i64(rows, t), K, group))
                        outs[t] = fnma_f32(less, minimum, outs[t])
            for t in range(M):
                to = out + 128 * t + 64 * half
                value = scaled(outs[t], i64(rows, t), K, block)
                store_f32(to, add_f32(value, load_f32(to)))

    @kernel(f"{fmt}-m{M}-{ops.name}-{amx.__name__.split('.')[-1]}")
    def tile(w, then, scale, first, last, K, rows, tables, out):
        a, b = stack_alloc(A_ROOM), stack_alloc(B_ROOM)
        c, config = stack_alloc(C_ROOM), stack_alloc(64)
        configure(config)
        amx.load_config(config)
        if first == 0:
            for i in range(2 * M):
                store_f32(out + 64 * i, zero_f32())
        end = w + K // K_BLOCK * BLOCK
        w += first * BLOCK
        near, far = ahead(w, AHEAD_L1, end, then), ahead(w, AHEAD_L2, end, then)
        gather(rows, K, first, a)
        if not DIRECT:
            dequantize(w, near, far, tables, b)
        for block in range(first, last):
            multiply(a, w if DIRECT else b, near, far, c)
            w += BLOCK
            if block + 1 < last:
                near, far = ahead(w, AHEAD_L1, end, then), ahead(w, AHEAD_L2, end, then)
                gather(rows, K, block + 1, a)
                if not DIRECT:
                    dequantize(w, near, far, tables, b)
            apply_scales(c, scale, block, K, rows, out)
        amx.release()

    return tile


def make_tiles(fmt: str, ops: Instructions, amx: Any) -> Any:
    """Compiles the routine ``tiles`` (``common``) for bf16 activations."""
    if fmt not in FROM:
        return make_tiles_avx512(fmt, ops, "bf16", int8_slices=True)
    tiles = {
        M: make_tile_avx512(fmt, M, ops, "bf16", int8_slices=True)
        if M < FROM[fmt]
        else make_tile(fmt, M, ops, amx)
        for M in (1, 2, 4, 8)
    }
    return by_tokens(tiles, f"{fmt}-{ops.name}-{amx.__name__.split('.')[-1]}")
