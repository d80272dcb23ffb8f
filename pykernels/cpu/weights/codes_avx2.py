"""Packed weights in AVX2: 8 outputs by 4 inputs a register, bytes as they are multiplied.

A row of fours (``quant.layout``) is 64 bytes, two sides of 8 outputs. Codes of 8 bits are loaded;
of 4 bits two rows share a register, an even one in the low halves of its bytes; further bits are
masks, a byte for each of which is made by one shuffle and a comparison.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..intrin import avx2
from ..intrin.avx2 import (
    and_i32,
    broadcast_i32,
    expand_bits,
    high_bytes_to_words,
    load_i32,
    lookup_16,
    low_bytes_to_words,
    or_i32,
    shift_right_u16,
    shift_right_u16_by,
    shift_right_words,
    xor_i32,
)
from ..jit import inlined
from . import nibbles
from .factors import Factors, make_factors
from .layout import BIASES, PACKINGS, SCALE_K, TERNARY, UNITS, Packing
from .lookup import CODES_FROM, IQ4_NL_SIGNED, MXFP4_CODES, OF_CODES

FACTORS = make_factors(avx2, nibbles.OF_8, 8)
"""By format name; the ``part`` is a quarter of the block."""

_E4M3_MASK = 0x87F087F0


@inlined
def pairs_of_e4m3(codes):
    """32 E4M3 bytes of 8 outputs by two pairs of inputs -> (pairs, pairs) of bf16, each 2**-120 of
    a weight, subnormals included: ``(byte << 8) >> 4`` (signed) and a mask."""
    mask = broadcast_i32(_E4M3_MASK)
    low = and_i32(shift_right_words(low_bytes_to_words(codes), 4), mask)
    return low, and_i32(shift_right_words(high_bytes_to_words(codes), 4), mask)


@dataclass(frozen=True)
class Codes:
    """How the AVX2 kernels read a format of integer weights.

    Attributes:
        packing: its tiles.
        k: inputs of a scale group.
        factors: its scales.
        rows: ``rows(tile, load, side, tables) -> (even, odd)``: rows ``2 load`` and ``2 load + 1``
            of a packed tile, 8 outputs by 4 inputs each: int8 weights, or unsigned bytes.
        signed: whether ``rows`` are weights; else they are weights over ``unit`` plus ``bias``.
        bias, unit: see ``signed``.
        largest: magnitude of a byte.
    """

    packing: Packing
    k: int
    factors: Factors
    rows: Callable
    signed: bool
    bias: int
    unit: float
    largest: int


@functools.cache
def make_codes(fmt: str) -> Codes:
    """The reader of a format of integer weights."""
    rows, largest, signed = _ROWS[fmt]
    return Codes(
        PACKINGS[fmt],
        SCALE_K[fmt],
        FACTORS[fmt],
        rows,
        signed,
        0 if signed else BIASES.get(fmt, 0),
        UNITS.get(fmt, 1.0),
        largest,
    )


@inlined
def _bytes(tile, load, side, tables):
    at = tile + 128 * load + 32 * side
    return load_i32(at), load_i32(at + 64)


@inlined
def _halves(both):
    low = broadcast_i32(0x0F0F0F0F)
    return and_i32(both, low), and_i32(shift_right_u16(both, 4), low)


@inlined
def _unsigned(tile, load, side, tables):
    return _halves(load_i32(tile + 64 * load + 32 * side))


@inlined
def _twos_complement(tile, load, side, tables):
    """The flipped sign bit adds 8."""
    return _halves(xor_i32(load_i32(tile + 64 * load + 32 * side), broadcast_i32(0x88888888)))


def _looked_up(table_at: int) -> Callable:
    @inlined
    def rows(tile, load, side, tables):
        even, odd = _halves(load_i32(tile + 64 * load + 32 * side))
        table = load_i32(tables + table_at)
        return lookup_16(table, even), lookup_16(table, odd)

    return rows


@inlined
def _five_bits(tile, load, side, tables):
    even, odd = _unsigned(tile, load, side, tables)
    masks, bit4 = tile + 512 + 16 * load + 4 * side, broadcast_i32(0x10101010)
    even = or_i32(even, and_i32(expand_bits(masks), bit4))
    return even, or_i32(odd, and_i32(expand_bits(masks + 8), bit4))


@inlined
def _six_bits(tile, load, side, tables):
    even, odd = _unsigned(tile, load, side, tables)
    masks = tile + 512 + 32 * load + 4 * side
    return _add_bits(even, masks), _add_bits(odd, masks + 16)


@inlined
def _add_bits(row, masks):
    bit4 = and_i32(expand_bits(masks), broadcast_i32(0x10101010))
    bit5 = and_i32(expand_bits(masks + 8), broadcast_i32(0x20202020))
    return or_i32(row, or_i32(bit4, bit5))


@inlined
def _crumbs(tile, load, side, tables):
    four, shift = load_i32(tile + 64 * (load >> 1) + 32 * side), 4 * (load & 1)
    low = broadcast_i32(0x03030303)
    even, odd = shift_right_u16_by(four, shift), shift_right_u16_by(four, shift + 2)
    return and_i32(even, low), and_i32(odd, low)


@inlined
def _three_bits(tile, load, side, tables):
    even, odd = _crumbs(tile, load, side, tables)
    masks, bit2 = tile + 256 + 16 * load + 4 * side, broadcast_i32(0x04040404)
    even = or_i32(even, and_i32(expand_bits(masks), bit2))
    return even, or_i32(odd, and_i32(expand_bits(masks + 8), bit2))


def _three_looked_up(table_at: int) -> Callable:
    @inlined
    def rows(tile, load, side, tables):
        even, odd = _three_bits(tile, load, side, tables)
        table = load_i32(tables + table_at)
        return lookup_16(table, even), lookup_16(table, odd)

    return rows


_ROWS: dict[str, tuple[Callable, int, bool]] = {
    **dict.fromkeys(("int8", "q8_0"), (_bytes, 127, True)),
    "int8-channel": (_bytes, 128, True),
    **dict.fromkeys(("int4", "int4-g128", "int4-channel", "q4_0"), (_twos_complement, 15, False)),
    "mxfp4": (_looked_up(MXFP4_CODES), 24, False),
    "nvfp4": (_looked_up(OF_CODES["nvfp4"] + CODES_FROM), 24, False),
    **dict.fromkeys(("iq4_nl", "iq4_xs"), (_looked_up(IQ4_NL_SIGNED), 127, True)),
    "iq3_s": (_looked_up(OF_CODES["iq3_s"] + CODES_FROM), 30, False),
    "iq3_xxs": (_looked_up(OF_CODES["iq3_xxs"] + CODES_FROM), 62, False),
    **dict.fromkeys(
        ("iq2_s", "iq2_xs", "iq2_xxs"),
        (_three_looked_up(OF_CODES["iq2_s"] + CODES_FROM), 86, False),
    ),
    "iq1_m": (_three_looked_up(OF_CODES["iq1_m"] + CODES_FROM), 18, False),
    **dict.fromkeys(("int4-zp", "int4-zp-g128", "q4_k", "q4_1"), (_unsigned, 15, False)),
    **dict.fromkeys(("q5_k", "q5_0", "q5_1"), (_five_bits, 31, False)),
    "q6_k": (_six_bits, 63, False),
    "q3_k": (_three_bits, 7, False),
    **dict.fromkeys(("q2_k", "iq1_s", *TERNARY), (_crumbs, 3, False)),
}
"""By format name: ``rows``, ``largest``, ``signed``."""
