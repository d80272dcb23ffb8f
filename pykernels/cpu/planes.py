"""K-quants as two planes of B tiles: codes times the integer scale of their group.

A group's factor is a small integer times one float of its 256 inputs. Where a group is less than a
tile, the integers are multiplied into the codes, v = code * integer, when these are decoded: then a
fold is due once in 256 inputs, not in 16 or 32, and every tile is whole. v has up to 13 bits, more
than an operand, hence two products.

int8 activations: ``v = 64 * high + low``. A plane is a group of products and a fold of its own.

bf16 activations: ``v = 128 (h - 1) + (128 + l)``, l the lowest seven bits of -v as they lie in the
fraction of a bfloat16, h (six bits, signed) through a table; of -v, since v may be +4096 but not
-4096. Both are exact and go into the same sums: no more than ``|v| + 510`` is multiplied where v
was, so float32 sums are as exact as those of weights at most 511 / 4096 of the largest one larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .decode import Reader
from .gemm import TILE
from .intrin.avx512_bytes import load_u8, store_u8
from .intrin.avx512_words import (
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
from .jit import inlined
from .packings import LOADS, make_ask
from .slabs import NEAR
from .tables import PLANE_WORDS


def make_decode_planes(reader: Reader, INT8: bool) -> Callable:
    """``decode(w, inputs, tables, b_slab, scale, first_k)``: packed blocks -> B tiles.

    B tiles are [256 inputs][plane][step][half] for int8 activations, [step][plane][half] for bf16.
    """
    packing, SUM_K, SUPER_K = reader.packing, reader.scales.k, reader.scales.super_k
    small_of: Any = reader.scales.small
    codes: Any = reader.codes
    ask, ASKED = make_ask(packing), packing.asked
    PARTS, TILE_BYTES, PACKED_K = packing.parts, packing.tile_bytes, packing.k_step
    BIAS = reader.bias
    write_lot = _int8_lot(SUPER_K) if INT8 else _bf16_lot

    @inlined
    def decode(w, inputs, tables, b_slab, scale, first_k):
        for k in range(0, inputs, PACKED_K):
            for half in range(2):
                for load in range(LOADS):
                    if load % ASKED == 0:
                        ask(w + NEAR, load)
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
                        write_lot(b_slab, at, half, even, odd, tables)
                w += TILE_BYTES

    return decode


def _int8_lot(SUPER_K: int) -> Callable:
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
def _bf16_lot(b_slab, at, half, even, odd, tables):
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
