"""AMX tiles of few tokens: a packed 32-row block times M tokens, bf16 activations, exactly.

On a core that two threads share, dot products of AVX-512 take longer than reading narrow weights
does. A tile product takes weights as they lie in memory, or decoded, and up to 16 rows of inputs:
those of 16 tokens in bfloat16, or of 4 as digits (``rows``), where weights are integers. It costs
the same for any number of rows, so a block of weights is read at the rate of its decoding.

A block of 128 inputs is decoded into B tiles while the products of the one before are on their way.
Sums of digits are integers, folded in the order of ``tile_avx512``: there a token's result is the
same, bit for bit, from either. Products of bfloat16 are rounded in another order than there, so
where weights are no integers, one token and several are paths of their own (``FROM``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
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
from .jit import inlined, kernel, linked, routine
from .job import i64
from .rows import activation_scale, digits_at, group_sum
from .tile_avx512 import ahead, by_tokens
from .tile_avx512 import make_tile as make_tile_avx512
from .tile_avx512 import make_tiles as make_tiles_avx512

FROM = {
    "bf16": 3,
    "fp8": 3,
    "fp8-channel": 3,
    "int8": 2,
    "int4-g128": 2,
    "int4": 3,
    "mxfp4": 3,
    "q4_k": 3,
    "q5_k": 3,
    "q8_0": 3,
}
"""Tokens of a pass from which a format takes these tiles; fewer, and other formats, AVX-512.

As measured on Emerald Rapids: what decides is the number of sums to fold, by group and token."""

_BASE, _ONE = np.float32(256.0), np.float32(1.0)


@inlined
def _poke_u8(address, value):
    carray(as_pointer(address), (1,), types.uint8)[0] = value


@functools.cache  # the tiles of every M share it
def _make_decode(fmt: str, ops: Instructions) -> Any:
    """Compiles ``decode(w, near, far, tables, b)``: a packed block of 128 inputs -> B tiles
    [step][half].

    As it goes, it asks for as many bytes from ``near`` on in the first cache, from ``far`` on in
    the second.
    """
    reader = make_reader(fmt, ops)
    packing, INT8 = reader.packing, reader.signed is not None
    read: Any = reader.signed or reader.rows
    STEP_K = 64 if INT8 else 32  # inputs of a full tile
    PACKED, PACKED_K, PARTS = packing.tile_bytes, packing.k_step, packing.parts
    ask_l1, ask_l2 = make_ask(packing), make_ask(packing, prefetch_l2)
    ASKED = packing.asked

    @inlined
    def write(to, at, load, part, tables):
        if INT8:
            store_u8(to, read(at, load, part, tables))
        else:
            row0, row1 = read(at, load, part, tables)
            store_u8(to, row0)
            store_u8(to + 64, row1)

    @routine(5, f"{fmt}-{ops.name}")
    def decode(w, near, far, tables, b):
        for step in range(K_BLOCK // PACKED_K):
            for half in range(2):
                packed = (2 * step + half) * PACKED
                at = w + packed
                for lot in range(0, LOADS, ASKED):
                    ask_l1(near + packed, lot)
                    ask_l2(far + packed, lot)
                    for load in range(lot, lot + ASKED):
                        for part in range(PARTS):
                            k = step * PACKED_K + 4 * (load * PARTS + part)
                            to = b + (k // STEP_K * 2 + half) * TILE + k % STEP_K * 1024 // STEP_K
                            write(to, at, load, part, tables)
                    in_order()
        return 0

    return linked(decode)


@dataclass(frozen=True)
class _Shape:
    """Tiles of 128 inputs by M tokens and 32 outputs.

    Attributes:
        M: tokens.
        int8: whether products are of 8 bits.
        group: inputs of a sum.
    """

    M: int
    int8: bool
    group: int

    @property
    def rows_each(self) -> int:
        """Rows of an A tile for a token."""
        return DIGITS if self.int8 else 1

    @property
    def rows(self) -> int:
        return self.M * self.rows_each

    @property
    def sums_bytes(self) -> int:
        """Of the sums of a group by 16 outputs: a C tile, or two."""
        return 64 * self.rows

    @property
    def step_k(self) -> int:
        """Inputs of a full tile."""
        return 64 if self.int8 else 32

    @property
    def steps(self) -> int:
        return K_BLOCK // self.step_k

    @property
    def groups(self) -> int:
        return K_BLOCK // self.group

    @property
    def per_step(self) -> int:
        """Groups in a full tile."""
        return max(1, self.step_k // self.group)

    @property
    def name(self) -> str:
        return f"m{self.M}-{'int8' if self.int8 else 'bf16'}-{self.group}"


@functools.cache
def _make_configure(shape: _Shape) -> Any:
    """``configure(config)``: C tiles 0 - 3, A tiles 4 and 5, B tiles 6 and 7 (SDM, LDTILECFG)."""
    ROWS, B_ROWS = min(16, shape.rows), 16 // shape.per_step

    @inlined
    def configure(config):
        store_u8(config, broadcast_u8(0))
        _poke_u8(config, 1)
        for tile in range(8):
            is_a, is_b = 4 <= tile < 6, tile >= 6
            _poke_u8(config + 16 + 2 * tile, 4 * B_ROWS if is_a else 64)
            _poke_u8(config + 48 + tile, B_ROWS if is_b else ROWS)

    return configure


@functools.cache
def _make_gather(shape: _Shape) -> Any:
    """Compiles ``gather(rows, K, block, a)``: a block's A tiles [step][token][its rows][64]."""
    M, EACH, ROWS, STEPS, INT8 = shape.M, shape.rows_each, shape.rows, shape.steps, shape.int8

    @routine(4, shape.name)
    def gather(rows, K, block, a):
        for t in range(M):
            row, k = i64(rows, t), block * K_BLOCK
            source = digits_at(row, K, k, 0) if INT8 else row + 2 * k
            for step in range(STEPS):
                for i in range(EACH):
                    line = load_u8(source + 64 * (step * EACH + i))
                    store_u8(a + 64 * (step * ROWS + t * EACH + i), line)
        return 0

    return linked(gather)


@functools.cache
def _make_multiply(shape: _Shape, direct: bool, amx: Any) -> Any:
    """Compiles ``multiply(a, b, near, far, c)``: a block's C tiles [group][half].

    Args:
        direct: whether ``b`` is packed weights; then it asks for later ones as ``_make_decode``.
    """
    INT8, GROUPS, PER_STEP = shape.int8, shape.groups, shape.per_step
    SUMS, STEPS = shape.sums_bytes, max(1, shape.group // shape.step_k)
    A_BYTES, B_BYTES = 64 // PER_STEP, TILE // PER_STEP  # of a tile of one group
    TWO = shape.rows > 16  # A tiles
    dot = amx.dot_i8 if INT8 else amx.dot_bf16
    zero, load, store = amx.zero, amx.load, amx.store

    @inlined
    def ask_ahead(near, far, tile):
        """The lines of the ``tile``-th tile product, in the order of their bytes."""
        if direct:
            for i in range(tile * B_BYTES, (tile + 1) * B_BYTES, 64):
                prefetch_l1(near + i)
                prefetch_l2(far + i)
            in_order()

    @inlined
    def a_at(group):
        return group // PER_STEP * SUMS + group % PER_STEP * A_BYTES

    @inlined
    def b_at(group):
        return group // PER_STEP * 2 * TILE + group % PER_STEP * B_BYTES

    @inlined
    def two_groups(a, b, near, far, c):
        """Stores wait until other products have begun."""
        for group in range(0, GROUPS, 2):
            a0, b0 = a + a_at(group), b + b_at(group)
            a1, b1 = a + a_at(group + 1), b + b_at(group + 1)
            to = c + 2 * group * SUMS
            zero(0)
            zero(1)
            load(4, a0, 64)
            load(6, b0, 64)
            dot(0, 4, 6)
            ask_ahead(near, far, 2 * group)
            load(7, b0 + TILE, 64)
            dot(1, 4, 7)
            ask_ahead(near, far, 2 * group + 1)
            if group > 0:
                store(2, to - 2 * SUMS, 64)
                store(3, to - SUMS, 64)
            zero(2)
            zero(3)
            load(5, a1, 64)
            load(6, b1, 64)
            dot(2, 5, 6)
            ask_ahead(near, far, 2 * group + 2)
            load(7, b1 + TILE, 64)
            dot(3, 5, 7)
            ask_ahead(near, far, 2 * group + 3)
            store(0, to, 64)
            store(1, to + SUMS, 64)
        store(2, c + (2 * GROUPS - 2) * SUMS, 64)
        store(3, c + (2 * GROUPS - 1) * SUMS, 64)

    @inlined
    def one_group(a, b, near, far, c):
        """The block is one."""
        zero(0)
        zero(1)
        for step in range(STEPS):
            load(4, a + step * SUMS, 64)
            load(6, b + 2 * step * TILE, 64)
            dot(0, 4, 6)
            ask_ahead(near, far, 2 * step)
            load(7, b + (2 * step + 1) * TILE, 64)
            dot(1, 4, 7)
            ask_ahead(near, far, 2 * step + 1)
        store(0, c, 64)
        store(1, c + SUMS, 64)

    @inlined
    def two_a_tiles(a, b, near, far, c):
        for group in range(GROUPS):
            to = c + 2 * group * SUMS
            zero(0)
            zero(1)
            zero(2)
            zero(3)
            for step in range(STEPS):
                a0 = a + a_at(group) + step * SUMS
                b0 = b + b_at(group) + step * 2 * TILE
                load(4, a0, 64)
                load(6, b0, 64)
                dot(0, 4, 6)
                ask_ahead(near, far, 2 * (group * STEPS + step))
                load(5, a0 + TILE, 64)
                dot(1, 5, 6)
                load(7, b0 + TILE, 64)
                dot(2, 4, 7)
                ask_ahead(near, far, 2 * (group * STEPS + step) + 1)
                dot(3, 5, 7)
            store(0, to, 64)
            store(1, to + TILE, 64)
            store(2, to + SUMS, 64)
            store(3, to + SUMS + TILE, 64)

    @routine(5, f"{shape.name}-{direct}-{amx.__name__.split('.')[-1]}")
    def multiply(a, b, near, far, c):
        if TWO:
            two_a_tiles(a, b, near, far, c)
        elif GROUPS > 1:
            two_groups(a, b, near, far, c)
        else:
            one_group(a, b, near, far, c)
        return 0

    return linked(multiply)


def make_tile(fmt: str, M: int, ops: Instructions, amx: Any) -> Any:
    """Compiles ``tile(w, then, scale, first, last, K, rows, tables, out)`` for M tokens.

    Arguments of the tile are those of ``tile_avx512.make_tile``.

    Args:
        amx: ``intrin.amx``, or ``intrin.amx_model`` where there is none.
    """
    reader = make_reader(fmt, ops)
    scales, INT8 = reader.scales, reader.signed is not None
    factor_of: Any = scales.factor
    minimum_of: Any = scales.minimum
    shape = _Shape(M, INT8, scales.k or K_BLOCK)
    DIRECT = reader.packing.tile_bytes == TILE  # packed weights are B tiles
    configure, gather = _make_configure(shape), _make_gather(shape)
    multiply = _make_multiply(shape, DIRECT, amx)
    decode: Any = None if DIRECT else _make_decode(fmt, ops)
    GROUPS, SUMS, EACH, BLOCK = shape.groups, shape.sums_bytes, shape.rows_each, packed_bytes(fmt)
    A_ROOM, B_ROOM, C_ROOM = shape.steps * SUMS, shape.steps * 2 * TILE, GROUPS * 2 * SUMS
    UNIT = np.float32(reader.signed_unit)

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
    def unscaled(value, row, K, block):
        """A sum of inputs as it meets the sums of products: exact, scales are powers of two."""
        if INT8:
            return value * (_ONE / activation_scale(row, K, block * K_BLOCK, DIGITS_K))
        return value

    @inlined
    def scaled(value, row, K, block):
        if INT8:
            by = UNIT * activation_scale(row, K, block * K_BLOCK, DIGITS_K)
            return mul_f32(value, broadcast_f32(by))
        return value

    @inlined
    def fold(c, scale, block, K, rows, out):
        """The order of operations is that of ``tile_avx512``."""
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
                        less = unscaled(group_sum(i64(rows, t), K, group), i64(rows, t), K, block)
                        outs[t] = fnma_f32(broadcast_f32(less), minimum, outs[t])
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
            decode(w, near, far, tables, b)
        for block in range(first, last):
            multiply(a, w if DIRECT else b, near, far, c)
            w += BLOCK
            if block + 1 < last:
                near, far = ahead(w, AHEAD_L1, end, then), ahead(w, AHEAD_L2, end, then)
                gather(rows, K, block + 1, a)
                if not DIRECT:
                    decode(w, near, far, tables, b)
            fold(c, scale, block, K, rows, out)
        amx.release()

    return tile


def make_tiles(fmt: str, ops: Instructions, amx: Any) -> Any:
    """Compiles the routine ``tiles`` as ``tile_avx512.make_tiles`` does, for bf16 activations."""
    if fmt not in FROM:
        return make_tiles_avx512(fmt, ops, "bf16", digits=True)
    tiles = {
        M: make_tile_avx512(fmt, M, ops, "bf16", digits=True)
        if M < FROM[fmt]
        else make_tile(fmt, M, ops, amx)
        for M in (1, 2, 4, 8)
    }
    return by_tokens(tiles, f"{fmt}-{ops.name}-{amx.__name__.split('.')[-1]}")
