"""Codes of up to 8 bits to fours, with their scales: how each format's rows are written.

The order that is written is ``quant.layout``'s; the reference is each format's own ``pack``. A
format is a ``sources.Source``; everything else is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import carray, types

from ...quant.layout import N_BLOCK
from ..intrin.sync import as_pointer
from ..jit import inlined
from .source import Source

CHUNK = 256
"""Inputs that are read of a row before the next row's: long enough to be a stream, and what they
become (4 to 8 KiB) stays in L1."""


def make_code_writer(source: Source) -> Callable:
    """``write(row, n, have, k_begin, k_end, out)``: inputs k_begin .. k_end of row n of a block.

    ``row`` is its address, ``have`` its inputs (0 for a row of padding: zeros are written), ``out``
    the address of the packed block. Row 0 must be written before row 1, 2 before 3: they share the
    bytes of masks.
    """
    BITS, quad = source.bits, source.quad
    TILE = 16 * 64 * BITS // 8
    LOW = 8 if BITS == 8 else 4 if BITS >= 4 else 2  # bits of a code beside those of others
    EACH, MASK = 8 // LOW, types.uint32(0x01010101 * ((1 << LOW) - 1))  # rows that share bytes

    @inlined
    def _gather(codes, bit):
        """The same bit of four bytes, as a nibble."""
        bits = (codes >> types.uint32(bit)) & types.uint32(0x01010101)
        # Bits 0, 8, 16, 24 times 2**28, 2**21, 2**14, 2**7: side by side, and no carries below.
        return types.uint8(types.uint32(bits * types.uint32(0x10204080)) >> types.uint32(28))

    @inlined
    def _mask(tile, r, n, codes):
        """Bits LOW and up of row r's codes of output n (0 .. 15), into half a byte of each mask."""
        for bit in range(LOW, BITS):
            at = tile + 128 * LOW + 8 * (r * (BITS - LOW) + bit - LOW) + n // 2
            octet = carray(as_pointer(at), (1,), types.uint8)
            if n % 2 == 0:
                octet[0] = _gather(codes, bit)
            else:
                octet[0] |= _gather(codes, bit) << types.uint8(4)

    @inlined
    def write(row, n, have, k_begin, k_end, out):
        for k in range(k_begin, k_end, 64):
            tile = out + (k // 64 * 2 + n // 16) * TILE
            lines = carray(as_pointer(tile), (TILE // 4,), types.uint32)
            for line in range(16 // EACH):
                together = types.uint32(0)
                for i in range(EACH):
                    r = line * EACH + i
                    at = k + 4 * r
                    four = quad(row, at, have) if at < have else types.uint32(0)
                    together |= (four & MASK) << types.uint32(LOW * i)
                    if LOW < BITS:
                        _mask(tile, r, n % 16, four)
                lines[line * 16 + n % 16] = together

    return write


def make_scale_writer(source: Source) -> Callable:
    """``write(row, scale_row, n, have, groups, out)``: row n's scales into a block's packed ones.

    ``groups`` times ``scale_k`` inputs' scales are written, of which the row has ``have``. Only
    where ``scale_k`` is not 0.
    """
    HALVES, SMALL, byte = source.halves, source.small, source.byte
    half: Any = source.half
    WIDTH, element = (4, types.uint32) if source.floats else (2, types.uint16)
    BYTES = N_BLOCK * (WIDTH * HALVES + SMALL)

    @inlined
    def write_halves(row, scale_row, n, have, groups, out):
        for g in range(groups):
            wide = carray(as_pointer(out + g * BYTES), (N_BLOCK * HALVES,), element)
            for i in range(HALVES):
                value = half(row, scale_row, g, i) if g < have else element(0)
                wide[N_BLOCK * i + n] = value

    if byte is None:
        return write_halves

    @inlined
    def write(row, scale_row, n, have, groups, out):
        write_halves(row, scale_row, n, have, groups, out)
        for g in range(groups):
            at = out + g * BYTES + WIDTH * N_BLOCK * HALVES
            narrow = carray(as_pointer(at), (N_BLOCK * SMALL,), types.uint8)
            for i in range(SMALL):
                narrow[N_BLOCK * i + n] = byte(row, scale_row, g, i) if g < have else types.uint8(0)

    return write
