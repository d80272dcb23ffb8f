"""How each format's rows are read to be packed: which codes lie at an input, and its scales."""

from __future__ import annotations

from numba import types

from ..jit import inlined
from .source import Source, nibbles, twos, u8, u16, u32
from .sources_grids import GRID_SOURCES
from .sources_ternary import TERNARY_SOURCES


@inlined
def _quad_bytes(row, k, K):
    if k + 4 <= K:
        return u32(row + k)
    quad = types.uint32(0)
    for i in range(K - k):
        quad |= u8(row + k + i) << types.uint32(8 * i)
    return quad


@inlined
def _half_bf16(row, scale_row, g, i):
    return u16(scale_row + 2 * g)


@inlined
def _half_e8m0(row, scale_row, g, i):
    """E8M0 as bfloat16: its exponent, but 2**-127 is subnormal."""
    e = u8(scale_row + g)
    return types.uint16(e << types.uint32(7)) if e > 0 else types.uint16(0x40)


@inlined
def _whole_nvfp4(row, scale_row, g, i):
    return u32(scale_row + 20 * g)


@inlined
def _byte_nvfp4(row, scale_row, g, i):
    return types.uint8(u8(scale_row + 20 * g + 4 + i))


@inlined
def _quad_q8_0(row, k, K):
    return u32(row + k // 32 * 34 + 2 + k % 32)


@inlined
def _half_q8_0(row, scale_row, g, i):
    return u16(row + 34 * g)


@inlined
def _half_pairs(row, scale_row, g, i):
    """Scales that stand in turns with zero points."""
    return u16(scale_row + 4 * g)


@inlined
def _byte_zero(row, scale_row, g, i):
    """A zero point, a float16 of a small integer, as that."""
    bits = types.uint32(u16(scale_row + 4 * g + 2)) & types.uint32(0x7FFF)
    if bits == 0:
        return types.uint8(0)
    mantissa = types.uint32(1024) | (bits & types.uint32(1023))
    return types.uint8(mantissa >> types.uint32(25 - (bits >> types.uint32(10))))


@inlined
def _block_nibbles(codes, k):
    """Four of a block of 32 whose second half is in the high halves."""
    return nibbles(codes + k % 16, k % 32 // 16)


@inlined
def _block_fifths(masks, k):
    """Bit 4 of four codes of a block, whose masks are 4 bytes."""
    bits = (u8(masks + k % 32 // 8) >> types.uint32(k % 8)) & types.uint32(15)
    # Bit i times 2**(7 i) is the lowest of byte i; no two products of others meet.
    return (bits * types.uint32(0x00204081) & types.uint32(0x01010101)) << types.uint32(4)


@inlined
def _quad_q4_0(row, k, K):
    return _block_nibbles(row + k // 32 * 18 + 2, k) ^ types.uint32(0x08080808)


@inlined
def _half_b18(row, scale_row, g, i):
    return u16(row + 18 * g)


@inlined
def _quad_q4_1(row, k, K):
    return _block_nibbles(row + k // 32 * 20 + 4, k)


@inlined
def _half_q4_1(row, scale_row, g, i):
    return types.uint16(u16(row + 20 * g + 2 * i) ^ types.uint16(i << 15))


@inlined
def _quad_q5_0(row, k, K):
    block = row + k // 32 * 22
    return _block_nibbles(block + 6, k) | _block_fifths(block + 2, k)


@inlined
def _half_q5_0(row, scale_row, g, i):
    return u16(row + 22 * g)


@inlined
def _quad_q5_1(row, k, K):
    block = row + k // 32 * 24
    return _block_nibbles(block + 8, k) | _block_fifths(block + 4, k)


@inlined
def _half_q5_1(row, scale_row, g, i):
    return types.uint16(u16(row + 24 * g + 2 * i) ^ types.uint16(i << 15))


@inlined
def _quad_iq4_nl(row, k, K):
    return _block_nibbles(row + k // 32 * 18 + 2, k)


@inlined
def _quad_q4_k(row, k, K):
    return nibbles(row + k // 256 * 144 + 16 + k % 256 // 64 * 32 + k % 32, k % 64 // 32)


@inlined
def _quad_q5_k(row, k, K):
    block = row + k // 256 * 176
    low = nibbles(block + 48 + k % 256 // 64 * 32 + k % 32, k % 64 // 32)
    fifth = (u32(block + 16 + k % 32) >> types.uint32(k % 256 // 32)) & types.uint32(0x01010101)
    return low | (fifth << types.uint32(4))


@inlined
def _quad_q6_k(row, k, K):
    block = row + k // 256 * 210
    low = nibbles(block + k % 256 // 128 * 64 + k % 64, k % 128 // 64)
    shift = types.uint32(2 * (k % 128 // 32))
    high = u32(block + 128 + k % 256 // 128 * 32 + k % 32) >> shift
    return low | ((high & types.uint32(0x03030303)) << types.uint32(4))


@inlined
def _byte_6_bits(scales, i):
    """The i-th of sc 0, m 0, sc 1, m 1, .. of the 12 bytes of Q4_K and Q5_K."""
    g = i // 2
    first = scales + 4 * (i % 2)
    if g < 4:
        return types.uint8(u8(first + g) & types.uint32(63))
    low = (u8(scales + 4 + g) >> types.uint32(4 * (i % 2))) & types.uint32(15)
    return types.uint8(low | (u8(first + g - 4) >> types.uint32(6) << types.uint32(4)))


@inlined
def _half_q4_k(row, scale_row, g, i):
    return u16(row + 144 * g + 2 * i)


@inlined
def _byte_q4_k(row, scale_row, g, i):
    return _byte_6_bits(row + 144 * g + 4, i)


@inlined
def _half_q5_k(row, scale_row, g, i):
    return u16(row + 176 * g + 2 * i)


@inlined
def _byte_q5_k(row, scale_row, g, i):
    return _byte_6_bits(row + 176 * g + 4, i)


@inlined
def _half_q6_k(row, scale_row, g, i):
    return u16(row + 210 * g + 208)


@inlined
def _byte_q6_k(row, scale_row, g, i):
    return types.uint8(u8(row + 210 * g + 192 + i))


@inlined
def _quad_q2_k(row, k, K):
    return twos(row + k // 256 * 84 + 16, k)


@inlined
def _half_q2_k(row, scale_row, g, i):
    return u16(row + 84 * g + 80 + 2 * i)


@inlined
def _byte_q2_k(row, scale_row, g, i):
    return types.uint8(u8(row + 84 * g + i))


@inlined
def _quad_q3_k(row, k, K):
    block = row + k // 256 * 110
    high = (u32(block + k % 32) >> types.uint32(k % 256 // 32)) & types.uint32(0x01010101)
    return twos(block + 32, k) | (high << types.uint32(2))


@inlined
def _half_q3_k(row, scale_row, g, i):
    return u16(row + 110 * g + 108)


@inlined
def _byte_q3_k(row, scale_row, g, i):
    block = row + 110 * g
    low = (u8(block + 96 + i % 8) >> types.uint32(i // 8 * 4)) & types.uint32(15)
    high = (u8(block + 104 + i % 4) >> types.uint32(i // 4 * 2)) & types.uint32(3)
    return types.uint8((low | (high << types.uint32(4))) - types.uint32(32))


@inlined
def _quad_iq4_xs(row, k, K):
    return _block_nibbles(row + k // 256 * 136 + 8 + k % 256 // 32 * 16, k)


@inlined
def _half_iq4_xs(row, scale_row, g, i):
    return u16(row + 136 * g)


@inlined
def _byte_iq4_xs(row, scale_row, g, i):
    block = row + 136 * g
    low = (u8(block + 4 + i // 2) >> types.uint32(i % 2 * 4)) & types.uint32(15)
    high = (types.uint32(u16(block + 2)) >> types.uint32(2 * i)) & types.uint32(3)
    return types.uint8((low | (high << types.uint32(4))) - types.uint32(32))


SOURCES = {
    "int8": Source(8, _quad_bytes, 128, _half_bf16),
    "int8-channel": Source(8, _quad_bytes),
    "int4": Source(4, _quad_bytes, 32, _half_bf16),
    "int4-g128": Source(4, _quad_bytes, 128, _half_bf16),
    "int4-channel": Source(4, _quad_bytes),
    "int4-zp": Source(4, _quad_bytes, 32, _half_pairs, small=1, byte=_byte_zero),
    "int4-zp-g128": Source(4, _quad_bytes, 128, _half_pairs, small=1, byte=_byte_zero),
    "mxfp4": Source(4, _quad_bytes, 32, _half_e8m0),
    "nvfp4": Source(4, _quad_bytes, 256, _whole_nvfp4, small=16, byte=_byte_nvfp4, floats=True),
    "q8_0": Source(8, _quad_q8_0, 32, _half_q8_0),
    "q4_0": Source(4, _quad_q4_0, 32, _half_b18),
    "q4_1": Source(4, _quad_q4_1, 32, _half_q4_1, halves=2),
    "q5_0": Source(5, _quad_q5_0, 32, _half_q5_0),
    "q5_1": Source(5, _quad_q5_1, 32, _half_q5_1, halves=2),
    "iq4_nl": Source(4, _quad_iq4_nl, 32, _half_b18),
    "q4_k": Source(4, _quad_q4_k, 256, _half_q4_k, halves=2, small=16, byte=_byte_q4_k),
    "q5_k": Source(5, _quad_q5_k, 256, _half_q5_k, halves=2, small=16, byte=_byte_q5_k),
    "q6_k": Source(6, _quad_q6_k, 256, _half_q6_k, small=16, byte=_byte_q6_k),
    "q3_k": Source(3, _quad_q3_k, 256, _half_q3_k, small=16, byte=_byte_q3_k),
    "q2_k": Source(2, _quad_q2_k, 256, _half_q2_k, halves=2, small=16, byte=_byte_q2_k),
    "iq4_xs": Source(4, _quad_iq4_xs, 256, _half_iq4_xs, small=8, byte=_byte_iq4_xs),
    **GRID_SOURCES,
    **TERNARY_SOURCES,
}
