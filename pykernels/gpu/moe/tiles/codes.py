"""Codes of a block of 32 rows, read from the CPU's tile order; ``quant.layout`` says what that is.

``block`` points to the block's first byte. ``f`` [F, 1] counts fours, the inputs 4 f .. 4 f + 3 (or
pairs of 2 bytes); ``r`` [1, 32] are the block's rows. Neighbouring rows are neighbouring words, so
tiles are read as they lie, and turned by whoever stores them. What ``inside`` [F, 1] leaves out is
0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words(block, f, r, inside):
    """Words [F, 32] of two inputs (the wide order) or of fours of 8 bits: 16 rows of 16 a tile."""
    at = (f // 16 * 512 + f % 16 * 16) + (r // 16 * 256 + r % 16)
    return tl.load(block + at, mask=inside, other=0)


@triton.jit
def byte_order(block, f, inside):
    """Fours [F, 32] of the byte order: a word has two inputs of two rows, and the two words behind
    a pair of them the next two inputs."""
    p = tl.arange(0, 16)[None, :]  # pairs of rows
    at = (f // 8 * 256 + f % 8 * 16) + (p // 8 * 128 + p % 8 // 2 * 4 + p % 2)
    first = tl.load(block + at, mask=inside, other=0)
    second = tl.load(block + (at + 2), mask=inside, other=0)
    even = (first & 0xFFFF) | (second << 16)
    odd = ((first >> 16) & 0xFFFF) | (second & -0x10000)
    return tl.join(even, odd).reshape(f.shape[0], 32)


@triton.jit
def low_bits(block, f, r, inside, BITS: tl.constexpr):
    """The bits of fours [F, 32] that share bytes with other fours', a byte each: 0 .. 3 of codes of
    4 to 6 bits (``BITS``), 0 and 1 of those of 2 or 3."""
    LOW: tl.constexpr = 4 if BITS >= 4 else 2
    EACH: tl.constexpr = 8 // LOW
    TILE: tl.constexpr = 32 * LOW + 32 * (BITS - LOW)
    MASK: tl.constexpr = 0x0F0F0F0F if BITS >= 4 else 0x03030303
    at = (f // 16 * (2 * TILE) + f % 16 // EACH * 16) + (r // 16 * TILE + r % 16)
    return (tl.load(block + at, mask=inside, other=0) >> (f % EACH * LOW)) & MASK


@triton.jit
def high_bits(block, f, r, inside, BITS: tl.constexpr):
    """The other bits of fours [F, 32], as bits 0 and 1 of a byte each."""
    LOW: tl.constexpr = 4 if BITS >= 4 else 2
    TILE: tl.constexpr = 128 * BITS
    masks = block.to(tl.pointer_type(tl.uint8)) + 128 * LOW
    at = (f // 16 * (2 * TILE) + f % 16 * (8 * (BITS - LOW))) + (r // 16 * TILE + r % 16 // 2)
    found = _spread(tl.load(masks + at, mask=inside, other=0), r)
    if BITS == 6:
        found |= _spread(tl.load(masks + (at + 8), mask=inside, other=0), r) << 1
    return found


@triton.jit
def _spread(mask, r):
    """The 4 bits of an odd or even row in the masks' bytes, each in a byte of a word."""
    nibble = (mask >> (r % 2 * 4).to(tl.uint8)).to(tl.int32) & 15
    return (nibble * 0x204081) & 0x01010101


@triton.jit
def fours(block, f, r, inside, KIND: tl.constexpr, BITS: tl.constexpr):
    """Codes [F, 32] of any format but those of 16 bits, a byte each."""
    if KIND == "fp8" or KIND == "fp8-channel":
        found = byte_order(block, f, inside)
    elif BITS == 8:
        found = words(block, f, r, inside)
    elif BITS == 4 or BITS == 2:
        found = low_bits(block, f, r, inside, BITS)
    else:
        high = high_bits(block, f, r, inside, BITS) << (4 if BITS > 4 else 2)
        found = low_bits(block, f, r, inside, BITS) | high
    return found
