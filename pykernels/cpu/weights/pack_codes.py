"""Codes of up to 8 bits to fours, with their scales: how each format's rows are read.

The order that is written is ``quant.layout``'s; the reference is each format's own ``pack``. A
format is a ``Source``: which four codes lie at an input, and where its scales are. Everything else
is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import carray, types

from ...quant.layout import N_BLOCK
from ..intrin.sync import as_pointer
from ..jit import inlined

CHUNK = 256
"""Inputs that are read of a row before the next row's: long enough to be a stream, and what they
become (4 to 8 KiB) stays in L1."""


@dataclass(frozen=True)
class Source:
    """How a format's rows are read.

    Attributes:
        bits: of a code.
        quad: ``quad(row, k, K) -> uint32``: the codes of inputs k .. k + 3 of the row at that
            address, a byte each, the first in the lowest; k is a multiple of 4.
        scale_k: inputs that scales are packed for together; 0 where a format packs its few scales
            itself. halves, small: scales of 16 and 8 bits that are written for each ``scale_k``
            inputs.
        half: ``half(row, scale_row, g, i) -> uint16``: the i-th of the 16-bit scales of the g-th
            ``scale_k`` inputs; ``scale_row`` is the address of the row's separate scales.
        byte: ``byte(row, g, i) -> uint8``: likewise the small ones.
    """

    bits: int
    quad: Callable
    scale_k: int = 0
    half: Callable | None = None
    halves: int = 1
    small: int = 0
    byte: Callable | None = None


@inlined
def _u8(address):
    return types.uint32(carray(as_pointer(address), (1,), types.uint8)[0])


@inlined
def _u16(address):
    return types.uint16(_u8(address) | (_u8(address + 1) << types.uint32(8)))


@inlined
def _u32(address):
    """Four bytes at any address (LLVM makes one load of them)."""
    octets = carray(as_pointer(address), (4,), types.uint8)
    low = types.uint32(octets[0]) | (types.uint32(octets[1]) << types.uint32(8))
    high = types.uint32(octets[2]) | (types.uint32(octets[3]) << types.uint32(8))
    return low | (high << types.uint32(16))


@inlined
def _nibbles(address, high):
    """The low or the high halves of four bytes."""
    return (_u32(address) >> types.uint32(4 * high)) & types.uint32(0x0F0F0F0F)


@inlined
def _quad_bytes(row, k, K):
    if k + 4 <= K:
        return _u32(row + k)
    quad = types.uint32(0)
    for i in range(K - k):
        quad |= _u8(row + k + i) << types.uint32(8 * i)
    return quad


@inlined
def _half_bf16(row, scale_row, g, i):
    return _u16(scale_row + 2 * g)


@inlined
def _half_e8m0(row, scale_row, g, i):
    """E8M0 as bfloat16: its exponent, but 2**-127 is subnormal."""
    e = _u8(scale_row + g)
    return types.uint16(e << types.uint32(7)) if e > 0 else types.uint16(0x40)


@inlined
def _quad_q8_0(row, k, K):
    return _u32(row + k // 32 * 34 + 2 + k % 32)


@inlined
def _half_q8_0(row, scale_row, g, i):
    return _u16(row + 34 * g)


@inlined
def _quad_q4_k(row, k, K):
    return _nibbles(row + k // 256 * 144 + 16 + k % 256 // 64 * 32 + k % 32, k % 64 // 32)


@inlined
def _quad_q5_k(row, k, K):
    block = row + k // 256 * 176
    low = _nibbles(block + 48 + k % 256 // 64 * 32 + k % 32, k % 64 // 32)
    fifth = (_u32(block + 16 + k % 32) >> types.uint32(k % 256 // 32)) & types.uint32(0x01010101)
    return low | (fifth << types.uint32(4))


@inlined
def _quad_q6_k(row, k, K):
    block = row + k // 256 * 210
    low = _nibbles(block + k % 256 // 128 * 64 + k % 64, k % 128 // 64)
    shift = types.uint32(2 * (k % 128 // 32))
    high = _u32(block + 128 + k % 256 // 128 * 32 + k % 32) >> shift
    return low | ((high & types.uint32(0x03030303)) << types.uint32(4))


@inlined
def _byte_6_bits(scales, i):
    """The i-th of sc 0, m 0, sc 1, m 1, .. of the 12 bytes of Q4_K and Q5_K."""
    g = i // 2
    first = scales + 4 * (i % 2)
    if g < 4:
        return types.uint8(_u8(first + g) & types.uint32(63))
    low = (_u8(scales + 4 + g) >> types.uint32(4 * (i % 2))) & types.uint32(15)
    return types.uint8(low | (_u8(first + g - 4) >> types.uint32(6) << types.uint32(4)))


@inlined
def _half_q4_k(row, scale_row, g, i):
    return _u16(row + 144 * g + 2 * i)


@inlined
def _byte_q4_k(row, g, i):
    return _byte_6_bits(row + 144 * g + 4, i)


@inlined
def _half_q5_k(row, scale_row, g, i):
    return _u16(row + 176 * g + 2 * i)


@inlined
def _byte_q5_k(row, g, i):
    return _byte_6_bits(row + 176 * g + 4, i)


@inlined
def _half_q6_k(row, scale_row, g, i):
    return _u16(row + 210 * g + 208)


@inlined
def _byte_q6_k(row, g, i):
    return types.uint8(_u8(row + 210 * g + 192 + i))


SOURCES = {
    "int8": Source(8, _quad_bytes, 128, _half_bf16),
    "int8-channel": Source(8, _quad_bytes),
    "int4": Source(4, _quad_bytes, 32, _half_bf16),
    "int4-g128": Source(4, _quad_bytes, 128, _half_bf16),
    "int4-channel": Source(4, _quad_bytes),
    "mxfp4": Source(4, _quad_bytes, 32, _half_e8m0),
    "q8_0": Source(8, _quad_q8_0, 32, _half_q8_0),
    "q4_k": Source(4, _quad_q4_k, 256, _half_q4_k, halves=2, small=16, byte=_byte_q4_k),
    "q5_k": Source(5, _quad_q5_k, 256, _half_q5_k, halves=2, small=16, byte=_byte_q5_k),
    "q6_k": Source(6, _quad_q6_k, 256, _half_q6_k, small=16, byte=_byte_q6_k),
}


def make_code_writer(source: Source) -> Callable:
    """``write(row, n, have, k_begin, k_end, out)``: inputs k_begin .. k_end of row n of a block.

    ``row`` is its address, ``have`` its inputs (0 for a row of padding: zeros are written), ``out``
    the address of the packed block. Row 0 must be written before row 1, 2 before 3: they share the
    bytes of masks.
    """
    BITS, quad = source.bits, source.quad
    TILE = 16 * 64 * BITS // 8

    @inlined
    def _gather(codes, bit):
        """The same bit of four bytes, as a nibble."""
        bits = (codes >> types.uint32(bit)) & types.uint32(0x01010101)
        # Bits 0, 8, 16, 24 times 2**28, 2**21, 2**14, 2**7: side by side, and no carries below.
        return types.uint8(types.uint32(bits * types.uint32(0x10204080)) >> types.uint32(28))

    @inlined
    def _mask(tile, r, n, codes):
        """Bits 4 and up of row r's codes of output n (0 .. 15), into half a byte of each mask."""
        for bit in range(4, BITS):
            at = tile + 512 + 8 * (r * (BITS - 4) + bit - 4) + n // 2
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
            for i in range(8):
                at = k + 8 * i
                even = quad(row, at, have) if at < have else types.uint32(0)
                odd = quad(row, at + 4, have) if at + 4 < have else types.uint32(0)
                if BITS == 8:
                    lines[2 * i * 16 + n % 16] = even
                    lines[(2 * i + 1) * 16 + n % 16] = odd
                else:
                    low = types.uint32(0x0F0F0F0F)
                    lines[i * 16 + n % 16] = (even & low) | ((odd & low) << types.uint32(4))
                if 4 < BITS < 8:
                    _mask(tile, 2 * i, n % 16, even)
                    _mask(tile, 2 * i + 1, n % 16, odd)

    return write


def make_scale_writer(source: Source) -> Callable:
    """``write(row, scale_row, n, have, groups, out)``: row n's scales into a block's packed ones.

    ``groups`` times ``scale_k`` inputs' scales are written, of which the row has ``have``. Only
    where ``scale_k`` is not 0.
    """
    HALVES, SMALL, byte = source.halves, source.small, source.byte
    half: Any = source.half
    BYTES = N_BLOCK * (2 * HALVES + SMALL)

    @inlined
    def write_halves(row, scale_row, n, have, groups, out):
        for g in range(groups):
            wide = carray(as_pointer(out + g * BYTES), (N_BLOCK * HALVES,), types.uint16)
            for i in range(HALVES):
                value = half(row, scale_row, g, i) if g < have else types.uint16(0)
                wide[N_BLOCK * i + n] = value

    if byte is None:
        return write_halves

    @inlined
    def write(row, scale_row, n, have, groups, out):
        write_halves(row, scale_row, n, have, groups, out)
        for g in range(groups):
            at = out + g * BYTES + 2 * N_BLOCK * HALVES
            narrow = carray(as_pointer(at), (N_BLOCK * SMALL,), types.uint8)
            for i in range(SMALL):
                narrow[N_BLOCK * i + n] = byte(row, g, i) if g < have else types.uint8(0)

    return write
