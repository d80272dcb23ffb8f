"""Dot products of 64 weights (16 outputs by 4 inputs) with M tokens, in bfloat16 or in integers.

An accumulator is several chains of 16 outputs, so that one dot product need not wait for the last.
With int8 activations a group's sum is an exact integer, whatever the order, and begins with what
takes the bias of the codes off; its scale is that of the weights times that of the token's inputs.

Codes of 4 to 6 bits meet bf16 activations with a magic number added (``weights.dequant``): its
product with the sum of a group's inputs, which their row holds, comes off the group's sum.

Or integer weights meet bf16 activations as int8 slices (``quant.activations.int8_slices``): each
input is an integer of 30 bits, four signed bytes of it a chain each, the lowest left out where all
are zero. Three or four ``vpdpbusd`` take the codes as they lie, where dequantizing 64 of them to
bfloat16 costs two table lookups, two shuffles and two ``vdpbf16ps``; a group's sum is exact until
its slices are put together. (Float32 then holds it times any scale from 2**-87 to 2**87.)
MXFP4's weights are integers too, in halves. Those of float16 are multiplied as float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...quant.activations import SLICES, SLICES_K
from ..activations.int8_slices import MAGIC_BITS, SHORT, make_joins
from ..activations.row_layout import (
    SUM_UNIT,
    activation_scale,
    codes_at,
    group_sum,
    offset_at,
    row_format,
    slices_at,
    sum_at,
    unit_sum,
)
from ..intrin import avx512, avx512_bytes
from ..intrin.avx512 import (
    add_f32,
    add_neighbours,
    broadcast_bf16_pair,
    broadcast_f32,
    even_lanes,
    fma_f32,
    fnma_f32,
    mul_f32,
    odd_lanes,
    zero_f32,
)
from ..intrin.avx512_bytes import (
    add_i32,
    all_i32,
    broadcast_dword,
    broadcast_i32,
    broadcast_qword,
    to_f32,
    zero_i32,
)
from ..intrin.registers import f32x16_array, i32x16_array
from ..isa import Instructions
from ..jit import inlined
from ..weights.dequant import Reader, make_reader

JOINS = make_joins(avx512, avx512_bytes)


@dataclass(frozen=True)
class Products:
    """The inner operations of a tile.

    Attributes:
        chains: of an accumulator.
        slices: int8 slices of an input that are multiplied, the highest first; 0 for none.
        new_sums: ``new_sums(length)``, an array of chains.
        begin: ``begin(sums, i, row, K, k)``: the chains from i on begin a group that holds input k.
        read: ``read(tile, load, part, tables)``, 64 weights as ``add`` takes them.
        add: ``add(sums, i, weights, row, K, k, part)``: the chains from i on += the weights of a
            part of a load times the four inputs from k on of the token at ``row``.
        total: ``total(sums, i, row, K, k) -> f32x16``, the sum of a group that holds input k.
        offset: ``offset(row, K, k) -> float``, the sum of the group's inputs themselves.
        scaled: ``scaled(value, row, K, k) -> f32x16``, times the activation scale of input k, which
            is that of 128 inputs at least.
    """

    chains: int
    slices: int
    new_sums: Callable
    begin: Callable
    read: Callable
    add: Callable
    total: Callable
    offset: Callable
    scaled: Callable


@functools.cache  # tiles of every M share them, and compile them once
def make_products(
    fmt: str, ops: Instructions, activations: str, chains: int, slices: int
) -> Products:
    """The products of a format's tiles with ``activations`` "bf16" or "int8".

    Args:
        chains: of an accumulator of 8-bit products, 1 or 2; of no use to others.
        slices: of bf16 activations that meet integer weights, all ``SLICES`` or
            ``int8_slices.SHORT`` where the lowest are zero; 0: they meet them as bfloat16.
    """
    reader = make_reader(fmt, ops)
    if activations == "int8":
        return _int8(fmt, reader, ops, chains)
    if slices and reader.codes:
        return _int8_slices(reader, ops, slices)
    if reader.floats:
        return _floats(reader)
    return _magic(reader, ops) if reader.magic else _bf16(reader, ops)


def _bf16(reader: Reader, ops: Instructions) -> Products:
    dot, GROUP, FOURS = ops.dot_bf16, reader.scales.k, reader.packing.fours
    rows: Any = reader.rows

    @inlined
    def begin(sums, i, row, K, k):
        sums[i] = zero_f32()
        sums[i + 1] = zero_f32()

    @inlined
    def add(sums, i, weights, row, K, k, part):
        (first, second), x = weights, row + 2 * k
        if FOURS:
            four = broadcast_qword(x)
            sums[i] = dot(sums[i], first, four)
            sums[i + 1] = dot(sums[i + 1], second, four)
        else:
            sums[i] = dot(sums[i], first, broadcast_dword(x))
            sums[i + 1] = dot(sums[i + 1], second, broadcast_dword(x + 4))

    @inlined
    def total(sums, i, row, K, k):
        if FOURS:  # a quad's halves lie side by side
            return add_neighbours(sums[i], sums[i + 1])
        return add_f32(sums[i], sums[i + 1])

    @inlined
    def offset(row, K, k):
        return group_sum(row, K, k // GROUP)

    @inlined
    def scaled(value, row, K, k):
        return value

    return Products(2, 0, f32x16_array, begin, rows, add, total, offset, scaled)


def _floats(reader: Reader) -> Products:
    """Multiply-adds of two inputs side by side: a chain has 8 outputs. There are no scales."""
    floats: Any = reader.floats

    @inlined
    def begin(sums, i, row, K, k):
        sums[i] = zero_f32()
        sums[i + 1] = zero_f32()

    @inlined
    def add(sums, i, weights, row, K, k, part):
        a, b, c, d = weights
        x, y = broadcast_bf16_pair(row + 2 * k), broadcast_bf16_pair(row + 2 * k + 4)
        sums[i] = fma_f32(c, y, fma_f32(a, x, sums[i]))
        sums[i + 1] = fma_f32(d, y, fma_f32(b, x, sums[i + 1]))

    @inlined
    def total(sums, i, row, K, k):
        return add_f32(even_lanes(sums[i], sums[i + 1]), odd_lanes(sums[i], sums[i + 1]))

    @inlined
    def offset(row, K, k):
        return np.float32(0)

    @inlined
    def scaled(value, row, K, k):
        return value

    return Products(2, 0, f32x16_array, begin, floats, add, total, offset, scaled)


def _magic(reader: Reader, ops: Instructions) -> Products:
    magic: Any = reader.magic
    dot, GROUP, OFFSET = ops.dot_bf16, reader.scales.k, np.float32(reader.magic_offset)

    @inlined
    def begin(sums, i, row, K, k):
        sums[i] = zero_f32()
        sums[i + 1] = zero_f32()

    @inlined
    def add(sums, i, weights, row, K, k, part):
        (first, second), x = weights, row + 2 * k
        sums[i] = dot(sums[i], first, broadcast_dword(x))
        sums[i + 1] = dot(sums[i + 1], second, broadcast_dword(x + 4))

    @inlined
    def offset(row, K, k):
        return group_sum(row, K, k // GROUP)

    @inlined
    def total(sums, i, row, K, k):
        both = add_f32(sums[i], sums[i + 1])
        return fnma_f32(broadcast_f32(offset(row, K, k)), broadcast_f32(OFFSET), both)

    @inlined
    def scaled(value, row, K, k):
        return value

    return Products(2, 0, f32x16_array, begin, magic, add, total, offset, scaled)


def _int8_slices(reader: Reader, ops: Instructions, KEPT: int) -> Products:
    dot, GROUP, BIAS = ops.dot_u8i8, reader.scales.k, reader.bias
    codes: Any = reader.codes
    UNIT = np.float32(reader.unit)
    LEFT_OUT = np.float32(256.0 ** (SLICES - KEPT))
    WHOLE = np.float32(SUM_UNIT / LEFT_OUT)
    join_short, join_lowest = JOINS

    @inlined
    def begin(sums, i, row, K, k):
        for j in range(KEPT):
            if BIAS != 0:
                sums[i + j] = broadcast_i32(offset_at(row, K, k // GROUP, j))
            elif j < SHORT:
                sums[i + j] = all_i32(MAGIC_BITS)
            else:
                sums[i + j] = zero_i32()

    @inlined
    def add(sums, i, weights, row, K, k, part):
        for j in range(KEPT):
            x = broadcast_dword(slices_at(row, K, k, j))
            sums[i + j] = dot(sums[i + j], weights, x)

    @inlined
    def total(sums, i, row, K, k):
        value = join_short(sums[i], sums[i + 1], sums[i + 2])
        return value if KEPT == SHORT else join_lowest(value, sums[i + 3])

    @inlined
    def offset(row, K, k):
        return unit_sum(row, K, k // GROUP) * WHOLE

    @inlined
    def scaled(value, row, K, k):
        return mul_f32(
            value, broadcast_f32(LEFT_OUT * UNIT * activation_scale(row, K, k, SLICES_K))
        )

    return Products(KEPT, KEPT, i32x16_array, begin, codes, add, total, offset, scaled)


def _int8(fmt: str, reader: Reader, ops: Instructions, CHAINS: int) -> Products:
    codes, dot, GROUP, BIAS = reader.codes, ops.dot_u8i8, reader.scales.k, reader.bias
    how = row_format(fmt, "int8")
    assert how is not None and codes is not None
    ACT_K = how.act_k

    @inlined
    def begin(sums, i, row, K, k):
        for j in range(CHAINS):
            sums[i + j] = zero_i32()
        if BIAS != 0:
            sums[i] = broadcast_i32(sum_at(row, K, k // GROUP))

    @inlined
    def add(sums, i, weights, row, K, k, part):
        at = i + part % CHAINS  # a part of a load each
        sums[at] = dot(sums[at], weights, broadcast_dword(codes_at(row, K) + k))

    @inlined
    def total(sums, i, row, K, k):
        return to_f32(sums[i] if CHAINS == 1 else add_i32(sums[i], sums[i + 1]))

    @inlined
    def offset(row, K, k):
        return group_sum(row, K, k // GROUP)

    @inlined
    def scaled(value, row, K, k):
        return mul_f32(value, broadcast_f32(activation_scale(row, K, k, ACT_K)))

    return Products(CHAINS, 0, i32x16_array, begin, codes, add, total, offset, scaled)
