"""AMX tiles of few tokens: a packed 32-row block times M tokens, bf16 activations, exactly.

On a core that two threads share, dot products of AVX-512 take longer than reading narrow weights
does. A tile product takes weights as they lie in memory, or decoded to bytes, and up to 16 rows of
inputs: those of 16 tokens in bfloat16, or of 4 as digits (``rows``), where weights are integers. It
costs the same for any number of rows, so a block of weights is read at the rate of its decoding.

A block of 128 inputs is decoded into B tiles while the products of the one before are on their way;
its sums are folded as in ``tile_avx512``, in the same order whatever M is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from ..quant.activations import DIGITS, DIGITS_K
from ..quant.layout import K_BLOCK
from .decode import AHEAD_L1, AHEAD_L2, LOADS, make_ask, make_reader, packed_bytes
from .gemm import TILE
from .instructions import Instructions
from .intrin.avx512 import (
    add_f32,
    broadcast_f32,
    fma_f32,
    fnma_f32,
    load_f32,
    mul_f32,
    store_f32,
    zero_f32,
)
from .intrin.avx512_bytes import broadcast_u8, load_i32, load_u8, store_u8, to_f32
from .intrin.prefetch import in_order, prefetch_l1, prefetch_l2
from .intrin.registers import f32x16_array, stack_alloc
from .intrin.sync import as_pointer
from .jit import inlined, kernel, routine
from .job import i64
from .rows import activation_scale, digits_at, group_sum
from .tile_avx512 import ARGUMENTS

_BASE = np.float32(256.0)


@inlined
def _poke_u8(address, value):
    carray(as_pointer(address), (1,), types.uint8)[0] = value


def make_tile(fmt: str, M: int, ops: Instructions, amx: Any) -> Any:
    """Compiles ``tile(w, scale, first, last, K, rows, tables, out)`` for M tokens.

    Arguments of the tile are those of ``tile_avx512.make_tile``.

    Args:
        amx: ``intrin.amx``, or ``intrin.amx_model`` where there is none.
    """
    reader = make_reader(fmt, ops)
    packing, scales = reader.packing, reader.scales
    signed: Any = reader.signed
    INT8 = signed is not None
    read: Any = signed or reader.rows
    factor_of: Any = scales.factor
    minimum_of: Any = scales.minimum
    dot = amx.dot_i8 if INT8 else amx.dot_bf16
    zero, load, store = amx.zero, amx.load, amx.store
    ROWS_EACH = DIGITS if INT8 else 1  # rows of an A tile for a token
    ROWS = M * ROWS_EACH
    STEP_K = 64 if INT8 else 32  # inputs of a full tile
    STEPS = K_BLOCK // STEP_K
    GROUP = scales.k or K_BLOCK
    GROUPS = K_BLOCK // GROUP
    PER_STEP = max(1, STEP_K // GROUP)  # groups in a full tile
    PRODUCTS = max(1, GROUP // STEP_K)  # tiles of a group
    A_BYTES, B_BYTES = 64 // PER_STEP, TILE // PER_STEP  # of a tile of one group
    SUMS = ROWS * 64  # bytes of a C tile
    DIRECT = INT8 and packing.tile_bytes == TILE
    PACKED, PACKED_K, PARTS = packing.tile_bytes, packing.k_step, packing.parts
    BLOCK = packed_bytes(fmt)
    A_ROOM, B_ROOM, C_ROOM = STEPS * SUMS, STEPS * 2 * TILE, GROUPS * 2 * SUMS
    ask, ASKED = make_ask(packing, AHEAD_L2 - AHEAD_L1), packing.asked
    UNIT = np.float32(reader.signed_unit)

    @inlined
    def configure(config):
        store_u8(config, broadcast_u8(0))
        _poke_u8(config, 1)
        for tile in range(8):
            is_a, is_b = 4 <= tile < 6, tile >= 6
            _poke_u8(config + 16 + 2 * tile, A_BYTES if is_a else 64)
            _poke_u8(config + 48 + tile, 16 // PER_STEP if is_b else min(16, ROWS))

    @inlined
    def inputs_of(row, K, block):
        """Address of a token's A rows of a block: [step][ROWS_EACH][64 bytes]."""
        return digits_at(row, K, block * K_BLOCK, 0) if INT8 else row + 2 * block * K_BLOCK

    @inlined
    def gather(rows, K, block, a):
        """A tiles of a block: [step][M][ROWS_EACH][64 bytes]."""
        if M > 1:
            for t in range(M):
                source = inputs_of(i64(rows, t), K, block)
                for step in range(STEPS):
                    for r in range(ROWS_EACH):
                        line = load_u8(source + 64 * (step * ROWS_EACH + r))
                        store_u8(a + 64 * (step * ROWS + t * ROWS_EACH + r), line)

    @inlined
    def decode(w, tables, b):
        """B tiles of a packed block: [step][half]."""
        for step in range(K_BLOCK // PACKED_K):
            for half in range(2):
                at = w + (2 * step + half) * PACKED
                for lot in range(0 if DIRECT else LOADS // ASKED):
                    ask(at + AHEAD_L1, lot * ASKED)
                    for j in range(ASKED):
                        for part in range(PARTS):
                            k = step * PACKED_K + 4 * ((lot * ASKED + j) * PARTS + part)
                            to = b + (k // STEP_K * 2 + half) * TILE + k % STEP_K * 1024 // STEP_K
                            if INT8:
                                store_u8(to, read(at, lot * ASKED + j, part, tables))
                            else:
                                row0, row1 = read(at, lot * ASKED + j, part, tables)
                                store_u8(to, row0)
                                store_u8(to + 64, row1)
                    in_order()

    @inlined
    def ask_ahead(at):
        """The lines of a tile, where products read packed weights themselves."""
        if DIRECT:
            for i in range(B_BYTES // 64):
                prefetch_l1(at + AHEAD_L1 + 64 * i)
                prefetch_l2(at + AHEAD_L2 + 64 * i)
            in_order()

    @inlined
    def a_at(group):
        return group // PER_STEP * SUMS + group % PER_STEP * A_BYTES

    @inlined
    def b_at(group):
        return group // PER_STEP * 2 * TILE + group % PER_STEP * B_BYTES

    @inlined
    def multiply_groups(a, b, c):
        """C tiles of a block: [group][half]. Stores wait until other products have begun."""
        for group in range(0, GROUPS, 2):
            a0, b0 = a + a_at(group), b + b_at(group)
            a1, b1 = a + a_at(group + 1), b + b_at(group + 1)
            to = c + 2 * group * SUMS
            zero(0)
            zero(1)
            load(4, a0, 64)
            load(6, b0, 64)
            dot(0, 4, 6)
            ask_ahead(b + 2 * group * B_BYTES)
            load(7, b0 + TILE, 64)
            dot(1, 4, 7)
            ask_ahead(b + (2 * group + 1) * B_BYTES)
            if group > 0:
                store(2, to - 2 * SUMS, 64)
                store(3, to - SUMS, 64)
            zero(2)
            zero(3)
            load(5, a1, 64)
            load(6, b1, 64)
            dot(2, 5, 6)
            ask_ahead(b + (2 * group + 2) * B_BYTES)
            load(7, b1 + TILE, 64)
            dot(3, 5, 7)
            ask_ahead(b + (2 * group + 3) * B_BYTES)
            store(0, to, 64)
            store(1, to + SUMS, 64)
        store(2, c + (2 * GROUPS - 2) * SUMS, 64)
        store(3, c + (2 * GROUPS - 1) * SUMS, 64)

    @inlined
    def multiply_block(a, b, c):
        """The same of a block that is one group."""
        zero(0)
        zero(1)
        for step in range(STEPS):
            load(4, a + step * SUMS, 64)
            load(6, b + 2 * step * TILE, 64)
            dot(0, 4, 6)
            ask_ahead(b + 2 * step * TILE)
            load(7, b + (2 * step + 1) * TILE, 64)
            dot(1, 4, 7)
            ask_ahead(b + (2 * step + 1) * TILE)
        store(0, c, 64)
        store(1, c + SUMS, 64)

    @inlined
    def multiply_more(a, b, c):
        """The same of two A tiles of 16 rows each."""
        for group in range(GROUPS):
            to = c + 2 * group * SUMS
            zero(0)
            zero(1)
            zero(2)
            zero(3)
            for step in range(PRODUCTS):
                a0 = a + a_at(group) + step * SUMS
                b0 = b + b_at(group) + step * 2 * TILE
                load(4, a0, 64)
                load(6, b0, 64)
                dot(0, 4, 6)
                at = b + (group * PRODUCTS + step) * 2 * B_BYTES
                ask_ahead(at)
                load(5, a0 + 1024, 64)
                dot(1, 5, 6)
                load(7, b0 + TILE, 64)
                dot(2, 4, 7)
                ask_ahead(at + B_BYTES)
                dot(3, 5, 7)
            store(0, to, 64)
            store(1, to + 1024, 64)
            store(2, to + SUMS, 64)
            store(3, to + SUMS + 1024, 64)

    @inlined
    def total(at):
        """The sum of one token's rows."""
        if INT8:
            value = to_f32(load_i32(at))
            for j in range(1, DIGITS):
                value = fma_f32(value, broadcast_f32(_BASE), to_f32(load_i32(at + 64 * j)))
            return value
        return load_f32(at)

    @inlined
    def scaled(value, row, K, k):
        if INT8:
            return mul_f32(value, broadcast_f32(UNIT * activation_scale(row, K, k, DIGITS_K)))
        return value

    @inlined
    def fold(c, scale, block, K, rows, out):
        for half in range(2):
            outs, less = f32x16_array(M), f32x16_array(M)
            for t in range(M):
                outs[t] = zero_f32()
                less[t] = zero_f32()
            for i in range(GROUPS):
                group = block * GROUPS + i
                if factor_of is not None:
                    factor = factor_of(scale, group, half)
                if minimum_of is not None:
                    minimum = minimum_of(scale, group, half)
                for t in range(M):
                    value = total(c + (2 * i + half) * SUMS + 64 * t * ROWS_EACH)
                    if factor_of is None:
                        outs[t] = add_f32(value, outs[t])
                    else:
                        outs[t] = fma_f32(value, factor, outs[t])
                    if minimum_of is not None:
                        inputs = broadcast_f32(group_sum(i64(rows, t), K, group))
                        less[t] = fnma_f32(inputs, minimum, less[t])
            for t in range(M):
                to = out + 128 * t + 64 * half
                value = scaled(outs[t], i64(rows, t), K, block * K_BLOCK)
                if minimum_of is not None:
                    value = add_f32(value, less[t])
                store_f32(to, add_f32(value, load_f32(to)))

    variant = f"{fmt}-m{M}-{ops.name}-{amx.__name__.split('.')[-1]}"

    @kernel(variant)
    def tile(w, scale, first, last, K, rows, tables, out):
        a_room, b_room = stack_alloc(A_ROOM), stack_alloc(B_ROOM)
        c, config = stack_alloc(C_ROOM), stack_alloc(64)
        configure(config)
        amx.load_config(config)
        if first == 0:
            for i in range(2 * M):
                store_f32(out + 64 * i, zero_f32())
        w += first * BLOCK
        gather(rows, K, first, a_room)
        decode(w, tables, b_room)
        for block in range(first, last):
            a = inputs_of(i64(rows, 0), K, block) if M == 1 else a_room
            b = w if DIRECT else b_room
            if ROWS > 16:
                multiply_more(a, b, c)
            elif GROUPS > 1:
                multiply_groups(a, b, c)
            else:
                multiply_block(a, b, c)
            w += BLOCK
            if block + 1 < last:
                gather(rows, K, block + 1, a_room)
                decode(w, tables, b_room)
            fold(c, scale, block, K, rows, out)
        amx.release()

    return tile


def make_tiles(fmt: str, ops: Instructions, amx: Any) -> Any:
    """Compiles the routine ``tiles`` as ``tile_avx512.make_tiles`` does."""
    tile1, tile2, tile4, tile8 = (make_tile(fmt, M, ops, amx) for M in (1, 2, 4, 8))

    @routine(ARGUMENTS, f"{fmt}-{ops.name}-{amx.__name__.split('.')[-1]}")
    def tiles(M, w, scale, first, last, K, rows, tables, out):
        if M == 1:
            tile1(w, scale, first, last, K, rows, tables, out)
        elif M == 2:
            tile2(w, scale, first, last, K, rows, tables, out)
        elif M <= 4:
            tile4(w, scale, first, last, K, rows, tables, out)
        else:
            tile8(w, scale, first, last, K, rows, tables, out)
        return 0

    return tiles
