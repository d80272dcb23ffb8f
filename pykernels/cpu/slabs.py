"""A slab of a packed block on its way into a GEMM: weights decoded, rows' scales and sums gathered.

Decoded weights are B tiles, 1 KiB of 16 outputs each: 32 inputs in bfloat16 pairs, or 64 in fours
of 8 bits. ``tdpbf16ps`` and ``tdpbssd`` take one whole, ``vdpbf16ps`` and ``vpdpbusd`` its 16 rows.
A pair is two neighbours, but of formats in fours inputs 0 and 2, 1 and 3 of each four
(``decode.Reader.halves``): A tiles for them are packed in that order (``gemm``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import carray, types

from .decode import Reader
from .gemm import MAX_TOKENS, TILE
from .intrin.avx512_bytes import broadcast_u8, store_u8, sub_i8
from .intrin.sync import as_pointer
from .jit import inlined
from .job import i64
from .packings import LOADS, make_ask
from .rows import scale_at, sum_at

NEAR = 512
"""Bytes that loads of a slab that is in L2 are prefetched to L1."""


def make_decode(reader: Reader, INT8: bool, signed: bool) -> Callable:
    """``decode(w, inputs, tables, b_slab)``: packed blocks -> B tiles [step][half].

    Args:
        INT8: whether products are of 8 bits.
        signed: whether these take the weights themselves, not ``reader.codes`` with their bias.
    """
    packing = reader.packing
    ask, ASKED = make_ask(packing), packing.asked
    read: Any = reader.halves or reader.rows
    codes: Any = reader.codes
    PARTS, TILE_BYTES, PACKED_K = packing.parts, packing.tile_bytes, packing.k_step
    STEP_K = 64 if INT8 else 32  # inputs of a full tile
    BIAS = reader.bias if signed else 0

    @inlined
    def decode(w, inputs, tables, b_slab):
        for k in range(0, inputs, PACKED_K):
            for half in range(2):
                for load in range(LOADS):
                    if load % ASKED == 0:
                        ask(w + NEAR, load)
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

    return decode


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
