"""A slab of a packed block on its way into a GEMM: weights dequantized, rows' scales gathered.

Dequantized weights are B tiles, 1 KiB of 16 outputs each: 32 inputs in bfloat16 pairs, or 64 in
fours of 8 bits. ``tdpbf16ps`` and ``tdpbssd`` take one whole, ``vdpbf16ps`` and ``vpdpbusd`` its 16
rows. A pair is two neighbours, but of formats in fours inputs 0 and 2, 1 and 3 of each four
(``dequant.Reader.halves``): A tiles for them are packed in that order (``common``).

B tiles hold codes without their scales (``make_dequantize``), or with them where that is exact:

- ``make_dequantize_powers``: scales that are powers of two. Their exponent is added to that of the
  weight, still a bfloat16. A scale below 2**-125 or above 2**125 counts as that.
- ``make_dequantize_planes``: K-quants, whose group's factor is a small integer times one float of
  its superblock of 256 inputs. Where a group is less than a tile, the integers are multiplied into
  the codes, v = code * integer: then scales are applied once in 256 inputs, not in 16 or 32, and
  every tile is whole. v has up to 13 bits, more than an operand, hence two products, of two planes
  of B tiles:

  int8 activations: ``v = 64 * high + low``. A plane is a group of products with its own scale.

  bf16 activations: ``v = 128 (h - 1) + (128 + l)``, l the lowest seven bits of -v as they lie in
  the fraction of a bfloat16, h (six bits, signed) through a table; of -v, since v may be +4096 but
  not -4096. Both are exact and go into the same sums: no more than ``|v| + 510`` is multiplied
  where v was, so float32 sums are as exact as those of weights at most 511 / 4096 of the largest
  one larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import carray, types

from ..activations.row_layout import scale_at, sum_at
from ..intrin.avx512_bytes import broadcast_u8, load_u8, store_u8, sub_i8
from ..intrin.avx512_words import (
    add_where_nonzero,
    even_bytes_fma,
    lookup_64_words,
    low_plane_bf16,
    lower_bytes,
    mul_words,
    odd_bytes_fma,
    offset_words,
    shift_words,
    upper_bytes,
)
from ..intrin.sync import as_pointer
from ..jit import inlined
from ..weights.dequant import Reader
from ..weights.layout import LOADS, make_prefetch
from ..weights.lookup import PLANE_WORDS
from ..words import i64
from .common import MAX_TOKENS, TILE

NEAR = 512
"""Bytes that loads of a slab that is in L2 are prefetched to L1."""


@inlined
def _copy_word(to, source):
    carray(as_pointer(to), (1,), types.uint32)[0] = carray(as_pointer(source), (1,), types.uint32)[
        0
    ]


def make_gather(ACT_K: int, SUM_K: int) -> Callable:
    """``gather(M, rows, K, first_k, inputs, act_scales, sums)``: a slab's activation scales and
    sums, token by token: 32 bits each [group][MAX_TOKENS].

    Args:
        ACT_K: inputs of an activation scale, 0 for none.
        SUM_K: inputs of a sum, 0 for none.
    """

    @inlined
    def gather(M, rows, K, first_k, inputs, act_scales, sums):
        if ACT_K:
            for group in range((inputs + ACT_K - 1) // ACT_K):
                for t in range(M):
                    at = scale_at(i64(rows, t), K, (first_k + group * ACT_K) // ACT_K)
                    _copy_word(act_scales + 4 * (group * MAX_TOKENS + t), at)
        if SUM_K:
            for group in range(inputs // SUM_K):
                for t in range(M):
                    at = sum_at(i64(rows, t), K, first_k // SUM_K + group)
                    _copy_word(sums + 4 * (group * MAX_TOKENS + t), at)

    return gather


def make_dequantize(reader: Reader, INT8: bool, signed: bool) -> Callable:
    """``dequantize(w, inputs, tables, b_slab)``: packed blocks -> B tiles [step][half].

    Args:
        INT8: whether products are of 8 bits.
        signed: whether 8-bit products take the weights themselves, not ``reader.codes`` with their
            bias.
    """
    packing = reader.packing
    prefetch, PREFETCH_LOADS = make_prefetch(packing), packing.prefetch_loads
    read: Any = reader.halves or reader.rows
    codes: Any = reader.codes
    PARTS, TILE_BYTES, PACKED_K = packing.parts, packing.tile_bytes, packing.k_step
    STEP_K = 64 if INT8 else 32  # inputs of a full tile
    BIAS = reader.bias if signed else 0

    @inlined
    def dequantize(w, inputs, tables, b_slab):
        for k in range(0, inputs, PACKED_K):
            for half in range(2):
                for load in range(LOADS):
                    if load % PREFETCH_LOADS == 0:
                        prefetch(w + NEAR, load)
                    for part in range(PARTS):
                        first = k + 4 * (load * PARTS + part)
                        tile = b_slab + (2 * (first // STEP_K) + half) * TILE
                        if INT8:
                            q = sub_i8(codes(w, load, part, tables), broadcast_u8(BIAS))
                            store_u8(tile + first % STEP_K * 16, q)
                        else:
                            row0, row1 = read(w, load, part, tables)
                            store_u8(tile + first % STEP_K * 32, row0)
                            store_u8(tile + first % STEP_K * 32 + 64, row1)
                w += TILE_BYTES

    return dequantize


def make_dequantize_powers(reader: Reader) -> Callable:
    """``dequantize(w, inputs, tables, b_slab, scale, first_k)``: packed blocks -> B tiles of
    bfloat16 [step][half]."""
    packing, SCALE_K = reader.packing, reader.scales.k
    prefetch, PREFETCH_LOADS = make_prefetch(packing), packing.prefetch_loads
    halves: Any = reader.halves
    power_of: Any = reader.scales.power
    PARTS, TILE_BYTES, PACKED_K = packing.parts, packing.tile_bytes, packing.k_step

    @inlined
    def dequantize(w, inputs, tables, b_slab, scale, first_k):
        for k in range(0, inputs, PACKED_K):
            for half in range(2):
                for load in range(LOADS):
                    if load % PREFETCH_LOADS == 0:
                        prefetch(w + NEAR, load)
                    for part in range(PARTS):
                        at = k + 4 * (load * PARTS + part)
                        if at % SCALE_K == 0:
                            power = power_of(scale, (first_k + at) // SCALE_K, half)
                        row0, row1 = halves(w, load, part, tables)
                        to = b_slab + (at // 32 * 2 + half) * TILE + at % 32 * 32
                        store_u8(to, add_where_nonzero(row0, power))
                        store_u8(to + 64, add_where_nonzero(row1, power))
                w += TILE_BYTES

    return dequantize


def make_dequantize_planes(reader: Reader, INT8: bool) -> Callable:
    """``dequantize(w, inputs, tables, b_slab, scale, first_k)``: packed blocks -> B tiles.

    B tiles are [256 inputs][plane][step][half] for int8 activations, [step][plane][half] for bf16.
    """
    packing, SUM_K, SUPER_K = reader.packing, reader.scales.k, reader.scales.super_k
    small_of: Any = reader.scales.small
    codes: Any = reader.codes
    prefetch, PREFETCH_LOADS = make_prefetch(packing), packing.prefetch_loads
    PARTS, TILE_BYTES, PACKED_K = packing.parts, packing.tile_bytes, packing.k_step
    BIAS = reader.bias
    write = _write_int8(SUPER_K) if INT8 else _write_bf16

    @inlined
    def dequantize(w, inputs, tables, b_slab, scale, first_k):
        for k in range(0, inputs, PACKED_K):
            for half in range(2):
                for load in range(LOADS):
                    if load % PREFETCH_LOADS == 0:
                        prefetch(w + NEAR, load)
                    for part in range(PARTS):
                        at = k + 4 * (load * PARTS + part)
                        if at % SUM_K == 0:
                            small = small_of(scale, (first_k + at) // SUM_K, half)
                            if INT8:
                                factor, offset = small, offset_words(small, BIAS)
                            else:
                                factor, offset = mul_words(small, -1), mul_words(small, BIAS)
                        q = codes(w, load, part, tables)
                        even = even_bytes_fma(q, factor, offset)
                        odd = odd_bytes_fma(q, factor, offset)
                        write(b_slab, at, half, even, odd, tables)
                w += TILE_BYTES

    return dequantize


def _write_int8(SUPER_K: int) -> Callable:
    """v rounded to multiples of 64, over 64; and what is left of it."""
    PLANE = SUPER_K // 64 * 2 * TILE

    @inlined
    def write(b_slab, at, half, even, odd, tables):
        to = b_slab + at // SUPER_K * 2 * PLANE
        to += (at % SUPER_K // 64 * 2 + half) * TILE + at % 64 * 16
        store_u8(to, upper_bytes(even, odd))
        store_u8(to + PLANE, lower_bytes(even, odd))

    return write


@inlined
def _write_bf16(b_slab, at, half, even, odd, tables):
    """The two addends of v, from -v."""
    to = b_slab + (at // 32 * 4 + half) * TILE + at % 32 * 32
    store_u8(to, _high_plane(even, tables))
    store_u8(to + 64, _high_plane(odd, tables))
    store_u8(to + 2 * TILE, low_plane_bf16(even))
    store_u8(to + 2 * TILE + 64, low_plane_bf16(odd))


@inlined
def _high_plane(negated, tables):
    table = tables + PLANE_WORDS
    return lookup_64_words(load_u8(table), load_u8(table + 64), shift_words(negated, 7))
