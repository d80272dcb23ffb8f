"""How rows of TQ1_0, TQ2_0, Q2_0 and Q1_0 are read to be packed: codes of 2 bits, scales twice."""

from __future__ import annotations

from numba import types

from ..jit import inlined
from .source import Source, twos, u8, u16, u32

_POWERS = (1, 3, 9, 27, 81)


@inlined
def _digits(address, digit):
    """A digit to the base 3 of each of four bytes: the upper byte of three times what is left."""
    found, quad = types.uint32(0), u32(address)
    power = types.uint32(_POWERS[digit])
    for i in range(4):
        left = ((quad >> types.uint32(8 * i)) & types.uint32(255)) * power & types.uint32(255)
        found |= (left * types.uint32(3) >> types.uint32(8)) << types.uint32(8 * i)
    return found


@inlined
def _quad_tq1_0(row, k, K):
    block, i = row + k // 256 * 54, k % 256
    if i < 160:
        return _digits(block + i % 32, i // 32)
    if i < 240:
        return _digits(block + 32 + (i - 160) % 16, (i - 160) // 16)
    return _digits(block + 48, (i - 240) // 4)


@inlined
def _half_tq1_0(row, scale_row, g, i):
    return u16(row + 54 * g + 52)


@inlined
def _quad_tq2_0(row, k, K):
    return twos(row + k // 256 * 66, k)


@inlined
def _half_tq2_0(row, scale_row, g, i):
    return u16(row + 66 * g + 64)


@inlined
def _quad_q2_0(row, k, K):
    byte = u8(row + k // 64 * 18 + 2 + k % 64 // 4)
    # Each pair of bits to a byte of its own.
    return (
        byte | (byte << types.uint32(6)) | (byte << types.uint32(12)) | (byte << types.uint32(18))
    ) & types.uint32(0x03030303)


@inlined
def _quad_q1_0(row, k, K):
    byte = u8(row + k // 128 * 18 + 2 + k % 128 // 8) >> types.uint32(k % 8)
    # Bit i times 2**(7 i) is the lowest of byte i; no two products of others meet.
    bits = (byte & types.uint32(15)) * types.uint32(0x00204081) & types.uint32(0x01010101)
    return bits << types.uint32(1)


@inlined
def _half_first(row, scale_row, g, i):
    return u16(row + 18 * g)


TERNARY_SOURCES = {
    "tq1_0": Source(2, _quad_tq1_0, 256, _half_tq1_0, halves=2),
    "tq2_0": Source(2, _quad_tq2_0, 256, _half_tq2_0, halves=2),
    "q2_0": Source(2, _quad_q2_0, 64, _half_first, halves=2),
    "q1_0": Source(2, _quad_q1_0, 128, _half_first),
}
