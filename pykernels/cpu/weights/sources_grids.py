"""How rows of the IQ types are read to be packed: a point of a grid and signs become codes."""

from __future__ import annotations

from numba import types

from ...quant.gguf import grids
from ...quant.gguf.grid_types import SIGNS_OF_SEVEN
from ..jit import inlined
from .source import Source, u8, u16, u32

_IQ3_S, _IQ3_XXS = grids.IQ3_S.words.ravel(), grids.IQ3_XXS.words.ravel()
_IQ2_S, _IQ2_XS = grids.IQ2_S.words.ravel(), grids.IQ2_XS.words.ravel()
_IQ2_XXS = grids.IQ2_XXS.words.ravel()
_IQ1 = grids.IQ1.words.ravel()
_SIGNS = SIGNS_OF_SEVEN


@inlined
def _signed(levels, mask, k, bit):
    """Levels of inputs k .. k + 3 with their signs, of which ``mask`` has 8, at that bit."""
    signs = (mask >> types.uint32(k % 8)) & types.uint32(15)
    # Bit i times 2**(7 i) is the lowest of byte i; no two products of others meet.
    spread = signs * types.uint32(0x00204081) & types.uint32(0x01010101)
    return levels | (spread << types.uint32(bit))


@inlined
def _odd(nibble):
    """A group's scale from its 4 bits."""
    return types.uint8(types.uint32(2) * (nibble & types.uint32(15)) + types.uint32(1))


@inlined
def _quad_iq3_s(row, k, K):
    block, i = row + k // 256 * 110, k % 256 // 4
    high = (u8(block + 66 + i // 8) >> types.uint32(i % 8)) & types.uint32(1)
    levels = _IQ3_S[u8(block + 2 + i) | (high << types.uint32(8))]
    return _signed(levels, u8(block + 74 + i // 2), k, 3)


@inlined
def _half_iq3_s(row, scale_row, g, i):
    return u16(row + 110 * g)


@inlined
def _byte_iq3_s(row, scale_row, g, i):
    return _odd(u8(row + 110 * g + 106 + i // 2) >> types.uint32(i % 2 * 4))


@inlined
def _quad_iq3_xxs(row, k, K):
    block = row + k // 256 * 98
    levels = _IQ3_XXS[u8(block + 2 + k % 256 // 4)]
    seven = u32(block + 66 + k % 256 // 32 * 4) >> types.uint32(k % 32 // 8 * 7)
    return _signed(levels, types.uint32(_SIGNS[seven & types.uint32(127)]), k, 3)


@inlined
def _half_iq3_xxs(row, scale_row, g, i):
    return u16(row + 98 * g)


@inlined
def _byte_iq3_xxs(row, scale_row, g, i):
    return _odd(u8(row + 98 * g + 66 + 4 * i + 3) >> types.uint32(4))


@inlined
def _quad_iq2_s(row, k, K):
    block, j = row + k // 256 * 82, k % 256 // 8
    high = (u8(block + 66 + j // 4) >> types.uint32(j % 4 * 2)) & types.uint32(3)
    point = types.int64(u8(block + 2 + j) | (high << types.uint32(8)))
    return _signed(_IQ2_S[2 * point + k % 8 // 4], u8(block + 34 + j), k, 2)


@inlined
def _half_iq2_s(row, scale_row, g, i):
    return u16(row + 82 * g)


@inlined
def _byte_iq2_s(row, scale_row, g, i):
    return _odd(u8(row + 82 * g + 74 + i // 2) >> types.uint32(i % 2 * 4))


@inlined
def _quad_iq2_xs(row, k, K):
    word = types.uint32(u16(row + k // 256 * 74 + 2 + k % 256 // 8 * 2))
    point = types.int64(word & types.uint32(511))
    mask = types.uint32(_SIGNS[word >> types.uint32(9)])
    return _signed(_IQ2_XS[2 * point + k % 8 // 4], mask, k, 2)


@inlined
def _half_iq2_xs(row, scale_row, g, i):
    return u16(row + 74 * g)


@inlined
def _byte_iq2_xs(row, scale_row, g, i):
    return _odd(u8(row + 74 * g + 66 + i // 2) >> types.uint32(i % 2 * 4))


@inlined
def _quad_iq2_xxs(row, k, K):
    group = row + k // 256 * 66 + 2 + k % 256 // 32 * 8
    point = types.int64(u8(group + k % 32 // 8))
    seven = (u32(group + 4) >> types.uint32(k % 32 // 8 * 7)) & types.uint32(127)
    return _signed(_IQ2_XXS[2 * point + k % 8 // 4], types.uint32(_SIGNS[seven]), k, 2)


@inlined
def _half_iq2_xxs(row, scale_row, g, i):
    return u16(row + 66 * g)


@inlined
def _byte_iq2_xxs(row, scale_row, g, i):
    return _odd(u8(row + 66 * g + 2 + 8 * i + 7) >> types.uint32(4))


@inlined
def _quad_iq1_s(row, k, K):
    block, j = row + k // 256 * 50, k % 256 // 8
    word = types.uint32(u16(block + 34 + j // 4 * 2))
    high = (word >> types.uint32(j % 4 * 3)) & types.uint32(7)
    point = types.int64(u8(block + 2 + j) | (high << types.uint32(8)))
    return _IQ1[2 * point + k % 8 // 4]


@inlined
def _half_iq1_s(row, scale_row, g, i):
    return u16(row + 50 * g)


@inlined
def _byte_iq1_s(row, scale_row, g, i):
    """Byte i of a group: 8 times its scale, or, where i is odd, the shift of its codes by it."""
    word = types.uint32(u16(row + 50 * g + 34 + i // 2 * 2))
    eighths = types.uint32(8)
    if i % 2 == 1:
        eighths = types.uint32(7) + (word >> types.uint32(15) << types.uint32(1))
    return types.uint8(eighths * (2 * ((word >> types.uint32(12)) & types.uint32(7)) + 1))


@inlined
def _quad_iq1_m(row, k, K):
    block, j = row + k // 256 * 56, k % 256 // 8
    high = u8(block + 32 + j // 2) >> types.uint32(j % 2 * 4)
    point = types.int64(u8(block + j) | ((high & types.uint32(7)) << types.uint32(8)))
    down = (high >> types.uint32(3)) & types.uint32(1)
    return _IQ1[2 * point + k % 8 // 4] | (down * types.uint32(0x04040404))


@inlined
def _half_iq1_m(row, scale_row, g, i):
    half = types.uint32(0)
    for j in range(4):
        word = types.uint32(u16(row + 56 * g + 48 + 2 * j))
        half |= (word >> types.uint32(12)) << types.uint32(4 * j)
    return types.uint16(half)


@inlined
def _byte_iq1_m(row, scale_row, g, i):
    word = types.uint32(u16(row + 56 * g + 48 + i // 4 * 2))
    return types.uint8(2 * ((word >> types.uint32(i % 4 * 3)) & types.uint32(7)) + 1)


GRID_SOURCES = {
    "iq3_s": Source(4, _quad_iq3_s, 256, _half_iq3_s, small=8, byte=_byte_iq3_s),
    "iq3_xxs": Source(4, _quad_iq3_xxs, 256, _half_iq3_xxs, small=8, byte=_byte_iq3_xxs),
    "iq2_s": Source(3, _quad_iq2_s, 256, _half_iq2_s, small=16, byte=_byte_iq2_s),
    "iq2_xs": Source(3, _quad_iq2_xs, 256, _half_iq2_xs, small=16, byte=_byte_iq2_xs),
    "iq2_xxs": Source(3, _quad_iq2_xxs, 256, _half_iq2_xxs, small=8, byte=_byte_iq2_xxs),
    "iq1_s": Source(2, _quad_iq1_s, 256, _half_iq1_s, halves=2, small=16, byte=_byte_iq1_s),
    "iq1_m": Source(3, _quad_iq1_m, 256, _half_iq1_m, small=16, byte=_byte_iq1_m),
}
