"""Packed weights to what dot products take, exactly, 64 weights at a time: one reader a format.

The 64 weights are 4 inputs of 16 outputs. For bfloat16 products a reader turns them into two
64-byte rows. Formats in pairs give those of a B tile of TDPBF16PS, ``16 n x (k, k + 1)`` and
``16 n x (k + 2, k + 3)``. Formats in fours give quads, ``8 n x (k .. k + 3)``: in each 128-bit
lane, outputs 0 and 1 of its four in the first row, 2 and 3 in the second. ``vdpbf16ps`` takes
either; it is cheaper to sum a quad's two halves once a group (``gemv.dot``) than to part them here.

A GEMM wants pairs of one output side by side. Which two inputs make a pair is free, as long as A
tiles say the same, and in formats in fours these are the inputs 0 and 2, 1 and 3 of each four
(``halves``): the even and the odd bytes of 16-bit words. Codes of 4 or 5 bits are then one lookup
of words each (``vpermw``), other ones two of bytes and two shifts.

Codes of 8 bits or fewer go through tables of the low and the high byte of their bfloat16
(``lookup``). OSDI'26 section 3.4 shifts bits instead, which loses E4M3's subnormals: ``vdpbf16ps``
takes unbiased ones for zeros.

Codes of 2 to 6 bits become bfloat16 in two operations, in the order of pairs, with the magic-number
trick: set into the upper bits of a mantissa, ``n`` of b bits is ``2**b + n``. That is exact too;
the sum of the inputs times the constant comes off a group's sum (``gemv.dot``).

For int8 products a reader gives one row of ``16 n x 4 k`` unsigned bytes, what ``vpdpbusd`` takes:
the weight plus a ``bias``, which costs nothing to make and one sum of the inputs to take off again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..intrin.avx512 import load_f16
from ..intrin.avx512_bits import add_where, low_crumbs, low_nibbles, raised_nibbles, upper_nibbles
from ..intrin.avx512_bytes import (
    abs_i8,
    add_u8,
    and_xor_words,
    broadcast_u8,
    interleave_high,
    interleave_low,
    load_u8,
    lookup_16,
    or_masked,
    sub_i8,
    where_negative,
    xor_u8,
)
from ..intrin.avx512_words import even_words, lookup_32_words, odd_words, shift_words
from ..isa import Instructions
from ..jit import inlined
from .layout import BIASES, CODE_BITS, MAGIC_OFFSETS, PACKINGS, TERNARY, UNITS, WIDE, Packing
from .lookup import (
    BIT2_AT,
    BIT4_AT,
    CODES_FROM,
    E4M3_AT,
    EVEN_AT,
    INT4_AT,
    INT4_WORDS,
    INT8_AT,
    IQ4_NL_AT,
    IQ4_NL_CODES,
    IQ4_NL_SIGNED,
    IQ4_NL_WORDS,
    MXFP4_AT,
    MXFP4_CODES,
    MXFP4_SIGNED,
    MXFP4_WORDS,
    OF_CODES,
    Q3_AT,
    Q3_WORDS,
    Q4_AT,
    Q4_WORDS,
    Q5_0_AT,
    Q5_0_WORDS,
    Q5_AT,
    Q5_WORDS,
    Q6_AT,
    TWOS_AT,
    TWOS_WORDS,
    WORDS_FROM,
)
from .scales import SCALES, Scales


@dataclass(frozen=True)
class Reader:
    """How the AVX-512 and AMX kernels read a format.

    Attributes:
        packing: its tiles.
        scales: its scales.
        rows: ``rows(tile, load, part, tables) -> (row, row)``, 64 weights in bfloat16: pair-rows,
            or quads of a format in fours; None for formats of ``layout.WIDE``.
        halves: the same of a format in fours as rows of pairs: inputs 0 and 2 of each of 16
            outputs, inputs 1 and 3; None for other formats.
        codes: ``codes(tile, load, part, tables) -> row``, the weights over ``unit`` plus
            ``bias`` as unsigned bytes; None if they are no integers.
        bias, unit: see ``codes``.
        magic: ``magic(tile, load, part, tables) -> (row, row)``, pair-rows in bfloat16 of the
            weights plus ``magic_offset``; None if codes are too wide or no integers.
        magic_offset: see ``magic``.
        signed: ``signed(tile, load, part, tables) -> row``, the weights over ``signed_unit`` as
            signed bytes; None if they are no integers.
        signed_unit: see ``signed``.
        floats: ``floats(tile, load, part, tables) -> (a, b, c, d)`` of a format of ``layout.WIDE``:
            64 weights as floats, of two inputs side by side those of outputs 0 to 7 (a) and 8 to 15
            (b), of the next two likewise; None for other formats.
    """

    packing: Packing
    scales: Scales
    rows: Callable | None
    halves: Callable | None = None
    codes: Callable | None = None
    bias: int = 0
    unit: float = 1.0
    magic: Callable | None = None
    magic_offset: int = 0
    signed: Callable | None = None
    signed_unit: float = 1.0
    floats: Callable | None = None


@functools.cache  # the tiles of a format compile its parts once
def make_reader(fmt: str, ops: Instructions) -> Reader:
    """The reader of a format, by the instructions of ``ops``."""
    rows, halves, codes = _READERS[fmt](ops)
    magic_offset = MAGIC_OFFSETS.get(fmt, 0)
    magic = _magic(fmt, ops, codes) if magic_offset else None
    bias, unit = BIASES.get(fmt, 0), UNITS.get(fmt, 1.0)
    signed, signed_unit = _signed(fmt, ops, codes, bias), unit
    if _READERS[fmt] is _INT4:
        signed, signed_unit = _high_nibbles, 1 / 16
    return Reader(
        PACKINGS[fmt],
        SCALES[fmt],
        rows,
        halves,
        codes,
        bias,
        unit,
        magic,
        magic_offset,
        signed,
        signed_unit,
        _floats_of_f16 if fmt in WIDE else None,
    )


@inlined
def _high_nibbles(tile, load, part, tables):
    """Codes of 4 bits in two's complement, each in the upper half of a byte: times 16."""
    both = load_u8(tile + 64 * load)
    return raised_nibbles(both) if part == 0 else upper_nibbles(both)


def _signed(fmt: str, ops: Instructions, codes: Callable | None, bias: int) -> Callable | None:
    if codes is None or bias == 0:
        return codes
    known: Any = codes

    if fmt in _SIGNED_AT:
        nibbles, table_at = _nibbles(ops), _SIGNED_AT[fmt]

        @inlined
        def found(tile, load, part, tables):
            return lookup_16(load_u8(tables + table_at), nibbles(tile, load, part))

        return found

    @inlined
    def signed(tile, load, part, tables):
        return sub_i8(known(tile, load, part, tables), broadcast_u8(bias))

    return signed


def _magic(fmt: str, ops: Instructions, codes: Callable) -> Callable:
    """A code's bits below an exponent that makes their lowest an integer's: ``2**BITS + code``."""
    first, second, BITS = ops.first_words, ops.second_words, CODE_BITS[fmt]
    SHIFT = 7 - BITS  # a bfloat16 has 7 bits of mantissa
    MASK, EXPONENT = (1 << 7) - (1 << SHIFT), (127 + BITS) << 7

    if BITS > 4:

        @inlined
        def magic(tile, load, part, tables):
            found = codes(tile, load, part, tables)
            return (
                and_xor_words(first(found, SHIFT), MASK, EXPONENT),
                and_xor_words(second(found, SHIFT), MASK, EXPONENT),
            )

        return magic

    # Signed codes are the weights' two's complement: the flipped sign bit adds the bias.
    FLIP = EXPONENT | (BIASES.get(fmt, 0) << SHIFT)

    @inlined
    def magic_nibbles(tile, load, part, tables):
        both = load_u8(tile + 64 * load)
        shift = SHIFT - 4 * part
        return (
            and_xor_words(first(both, shift), MASK, FLIP),
            and_xor_words(second(both, shift), MASK, FLIP),
        )

    return magic_nibbles


def _bf16(ops: Instructions):
    @inlined
    def rows(tile, load, part, tables):
        at = tile + 128 * load
        return load_u8(at), load_u8(at + 64)

    return rows, None, None


def _f16(ops: Instructions):
    return None, None, None


@inlined
def _floats_of_f16(tile, load, part, tables):
    at = tile + 128 * load
    return load_f16(at), load_f16(at + 32), load_f16(at + 64), load_f16(at + 96)


def _fp8(ops: Instructions):
    lookup = ops.lookup_128

    @inlined
    def rows(tile, load, part, tables):
        at = tile + 64 * load
        codes = load_u8(at)
        table = tables + E4M3_AT
        low = lookup(load_u8(table), load_u8(table + 64), codes)
        high = lookup(load_u8(table + 128), load_u8(table + 192), codes)
        high = or_masked(high, codes, broadcast_u8(0x80))
        return interleave_low(low, high), interleave_high(low, high)

    return rows, None, None


def _int8(ops: Instructions, LEAST: bool = False):
    """Signed bytes from -127 on, or with -128 (``LEAST``), which is its own magnitude."""
    lookup, lookup_half = ops.lookup_128, ops.lookup_64

    @inlined
    def fours(tile, load, part):
        at = tile + 128 * load + 64 * part
        return load_u8(at)

    @inlined
    def rows(tile, load, part, tables):
        values = fours(tile, load, part)
        magnitude = abs_i8(values)
        table = tables + INT8_AT
        low = lookup(load_u8(table), load_u8(table + 64), magnitude)
        high = lookup(load_u8(table + 128), load_u8(table + 192), magnitude)
        if LEAST:
            high = where_negative(magnitude, broadcast_u8(0x43), high)
        # The sign of zero does not matter, and a negative byte has bit 7 set.
        high = or_masked(high, values, broadcast_u8(0x80))
        return interleave_low(low, high), interleave_high(low, high)

    @inlined
    def halves(tile, load, part, tables):
        values = fours(tile, load, part)
        magnitude = abs_i8(values)
        table, less = tables + INT8_AT, sub_i8(magnitude, broadcast_u8(64))
        # From 64 on the bytes are 0x42 and the magnitude shifted to the left by one.
        low, high = lookup_half(load_u8(table), magnitude), load_u8(table + 128)
        high = lookup_half(high, magnitude)
        low = where_negative(less, low, add_u8(magnitude, magnitude))
        from_64 = broadcast_u8(0x42)
        if LEAST:
            from_64 = where_negative(magnitude, broadcast_u8(0x43), from_64)
        high = where_negative(less, high, from_64)
        high = or_masked(high, values, broadcast_u8(0x80))
        even = load_u8(tables + EVEN_AT)
        return even_words(low, high, even), odd_words(low, high, even)

    @inlined
    def codes(tile, load, part, tables):
        return xor_u8(fours(tile, load, part), broadcast_u8(0x80))

    return rows, halves, codes


def _nibbles(ops: Instructions) -> Callable:
    """``nibbles(tile, load, part)``: 64 codes of 4 bits, a byte each; 128 share a line."""
    high = ops.high_nibbles

    @inlined
    def nibbles(tile, load, part):
        both = load_u8(tile + 64 * load)
        return low_nibbles(both) if part == 0 else high(both)

    return nibbles


def _four_bits(table_at: int, words_at: int, flip: bool = False, codes_at: int | None = None):
    """Reader of 4-bit codes: their bfloat16 values are at ``table_at`` as bytes, at ``words_at`` as
    words; what ``Reader.codes`` gives is ``code ^ 8`` (``flip``), or at ``codes_at`` as bytes."""

    def make(ops: Instructions):
        nibbles, high_flipped = _nibbles(ops), ops.high_nibbles_flipped

        @inlined
        def rows(tile, load, part, tables):
            found = nibbles(tile, load, part)
            table = tables + table_at
            low, high = lookup_16(load_u8(table), found), lookup_16(load_u8(table + 64), found)
            return interleave_low(low, high), interleave_high(low, high)

        @inlined
        def halves(tile, load, part, tables):
            # A lookup reads the lowest five bits of a word, of which a code is four.
            both, table = load_u8(tile + 64 * load), load_u8(tables + words_at)
            low = both if part == 0 else shift_words(both, 4)
            return lookup_32_words(table, low), lookup_32_words(
                table, shift_words(both, 8 + 4 * part)
            )

        @inlined
        def codes(tile, load, part, tables):
            if flip:
                both = load_u8(tile + 64 * load)
                if part == 0:
                    return xor_u8(low_nibbles(both), broadcast_u8(8))
                return high_flipped(both)
            found = nibbles(tile, load, part)
            if codes_at is None:
                return found
            return lookup_16(load_u8(tables + codes_at), found)

        return rows, halves, codes

    return make


def _bit_planes(planes: int, table_at: int, words_at: int = 0):
    """Reader of 4-bit codes with one or two more bits, each a mask of 64 bits a row of fours; the
    values of codes are at ``table_at`` as bytes, those of 5 bits at ``words_at`` as words."""

    def make(ops: Instructions):
        lookup, nibbles, set_planes = ops.lookup_64, _nibbles(ops), ops.set_planes

        @inlined
        def codes(tile, load, part, tables):
            found = nibbles(tile, load, part)
            masks = tile + 512 + (2 * load + part) * 8 * planes
            if planes > 1:
                return set_planes(found, masks)
            return add_where(found, masks, load_u8(tables + BIT4_AT))

        @inlined
        def rows(tile, load, part, tables):
            found = codes(tile, load, part, tables)
            table = tables + table_at
            low, high = lookup(load_u8(table), found), lookup(load_u8(table + 64), found)
            return interleave_low(low, high), interleave_high(low, high)

        @inlined
        def halves(tile, load, part, tables):
            found = codes(tile, load, part, tables)
            if planes == 1:
                table = load_u8(tables + words_at)
                return lookup_32_words(table, found), lookup_32_words(table, shift_words(found, 8))
            table = tables + table_at
            low, high = lookup(load_u8(table), found), lookup(load_u8(table + 64), found)
            even = load_u8(tables + EVEN_AT)
            return even_words(low, high, even), odd_words(low, high, even)

        return rows, halves, codes

    return make


def _two_bits(table_at: int, words_at: int, plane: bool = False, codes_at: int | None = None):
    """Reader of codes of 2 bits, or with a ``plane`` of 3, a mask of 64 bits a row of fours being
    their bit 2; their values are at ``table_at`` as bytes, at ``words_at`` as words; what
    ``Reader.codes`` gives is the code, or at ``codes_at`` as bytes."""

    def make(ops: Instructions):
        @inlined
        def crumbs(tile, load, part, tables):
            four = load_u8(tile + 64 * (load >> 1))
            return low_crumbs(shift_words(four, 4 * (load & 1) + 2 * part))

        @inlined
        def threes(tile, load, part, tables):
            found = crumbs(tile, load, part, tables)
            masks = tile + 256 + 8 * (2 * load + part)
            return add_where(found, masks, load_u8(tables + BIT2_AT))

        codes = threes if plane else crumbs

        @inlined
        def rows(tile, load, part, tables):
            found = codes(tile, load, part, tables)
            table = tables + table_at
            low, high = lookup_16(load_u8(table), found), lookup_16(load_u8(table + 64), found)
            return interleave_low(low, high), interleave_high(low, high)

        @inlined
        def halves(tile, load, part, tables):
            found, table = codes(tile, load, part, tables), load_u8(tables + words_at)
            return lookup_32_words(table, found), lookup_32_words(table, shift_words(found, 8))

        @inlined
        def biased(tile, load, part, tables):
            return lookup_16(load_u8(tables + codes_at), codes(tile, load, part, tables))

        return rows, halves, codes if codes_at is None else biased

    return make


def _looked_up(kind: Callable, table: str) -> Callable:
    """Reader of codes into a table of ``lookup.OF_CODES``."""
    at = OF_CODES[table]
    return kind(at, at + WORDS_FROM, codes_at=at + CODES_FROM)


_INT4 = _four_bits(INT4_AT, INT4_WORDS, flip=True)

_READERS: dict[str, Callable] = {
    "bf16": _bf16,
    "f16": _f16,
    "fp8": _fp8,
    "fp8-channel": _fp8,
    "int8": _int8,
    "int8-channel": functools.partial(_int8, LEAST=True),
    "int4": _INT4,
    "int4-g128": _INT4,
    "int4-channel": _INT4,
    "mxfp4": _four_bits(MXFP4_AT, MXFP4_WORDS, codes_at=MXFP4_CODES),
    "nvfp4": _looked_up(_four_bits, "nvfp4"),
    **dict.fromkeys(("int4-zp", "int4-zp-g128", "q4_k", "q4_1"), _four_bits(Q4_AT, Q4_WORDS)),
    **dict.fromkeys(("q5_k", "q5_1"), _bit_planes(1, Q5_AT, Q5_WORDS)),
    "q6_k": _bit_planes(2, Q6_AT),
    "q3_k": _two_bits(Q3_AT, Q3_WORDS, plane=True),
    **dict.fromkeys(("q2_k", "iq1_s"), _two_bits(Q4_AT, Q4_WORDS)),
    **dict.fromkeys(TERNARY, _two_bits(TWOS_AT, TWOS_WORDS)),
    "q8_0": _int8,
    "q4_0": _INT4,
    "q5_0": _bit_planes(1, Q5_0_AT, Q5_0_WORDS),
    **dict.fromkeys(
        ("iq4_nl", "iq4_xs"), _four_bits(IQ4_NL_AT, IQ4_NL_WORDS, codes_at=IQ4_NL_CODES)
    ),
    "iq3_s": _looked_up(_four_bits, "iq3_s"),
    "iq3_xxs": _looked_up(_four_bits, "iq3_xxs"),
    **dict.fromkeys(
        ("iq2_s", "iq2_xs", "iq2_xxs"),
        _looked_up(functools.partial(_two_bits, plane=True), "iq2_s"),
    ),
    "iq1_m": _looked_up(functools.partial(_two_bits, plane=True), "iq1_m"),
}

_SIGNED_AT = {"mxfp4": MXFP4_SIGNED, "iq4_nl": IQ4_NL_SIGNED, "iq4_xs": IQ4_NL_SIGNED}
"""Where the weights of 4-bit codes that are no integers themselves are, as signed bytes."""
