"""Weights times the powers of two that are their scales: still a bfloat16 each, exactly.

The exponent of a scale is added to that of the weight when it is decoded, so that nothing is left
to fold. A scale below 2**-125 or above 2**125 counts as that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .decode import Reader
from .gemm import TILE
from .intrin.avx512_bytes import store_u8
from .intrin.avx512_words import add_where_nonzero
from .jit import inlined
from .packings import LOADS, make_ask
from .slabs import NEAR


def make_decode_powers(reader: Reader) -> Callable:
    """``decode(w, inputs, tables, b_slab, scale, first_k)``: packed blocks -> B tiles of bfloat16
    [step][half]."""
    packing, SCALE_K = reader.packing, reader.scales.k
    ask, ASKED = make_ask(packing), packing.asked
    halves: Any = reader.halves
    power_of: Any = reader.scales.power
    PARTS, TILE_BYTES, PACKED_K = packing.parts, packing.tile_bytes, packing.k_step

    @inlined
    def decode(w, inputs, tables, b_slab, scale, first_k):
        for k in range(0, inputs, PACKED_K):
            for half in range(2):
                for load in range(LOADS):
                    if load % ASKED == 0:
                        ask(w + NEAR, load)
                    for part in range(PARTS):
                        at = k + 4 * (load * PARTS + part)
                        if at % SCALE_K == 0:
                            power = power_of(scale, (first_k + at) // SCALE_K, half)
                        row0, row1 = halves(w, load, part, tables)
                        to = b_slab + (at // 32 * 2 + half) * TILE + at % 32 * 32
                        store_u8(to, add_where_nonzero(row0, power))
                        store_u8(to + 64, add_where_nonzero(row1, power))
                w += TILE_BYTES

    return decode
