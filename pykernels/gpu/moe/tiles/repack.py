"""256 inputs of a block of 32 rows, from the CPU's tiles to rows as the GPU's products read them.

Every code stays what it is (``int4``: with 8 added); ``gemm.weights`` has the layouts. ``rows``
point to the first word of each of the 32 rows, ``there`` [32] says which of them exist, ``chunk``
counts 256 inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import bytes_in_pairs, high_bits, low_bits, words

_EIGHTS = tl.constexpr(-0x77777778)
"""8 in each half byte."""


@triton.jit
def store_words(rows, there, at, inside, turned):
    """Words [W, 32] to the words ``at`` [W] of the rows."""
    mask = there[:, None] & inside[None, :]
    tl.store(rows[:, None] + at[None, :], tl.trans(turned), mask=mask)


@triton.jit
def repack_codes(block, rows, there, chunk, K, KIND: tl.constexpr):
    """All of a chunk but its scales."""
    r = tl.arange(0, 32)[None, :]
    if KIND == "bf16":
        w = chunk * 128 + tl.arange(0, 128)
        inside = w < K // 2
        store_words(rows, there, w, inside, words(block, w[:, None], r, inside[:, None]))
    elif KIND == "int8":
        w = chunk * 64 + tl.arange(0, 64)
        inside = w < K // 4
        store_words(rows, there, w, inside, words(block, w[:, None], r, inside[:, None]))
    elif KIND == "fp8":
        w = chunk * 64 + tl.arange(0, 64)
        inside = w < K // 4
        store_words(rows, there, w, inside, bytes_in_pairs(block, w[:, None], r, inside[:, None]))
    elif KIND == "q6_k":
        _halves_of_64(block, rows, there, chunk, r)
        _quarters_of_32(block, rows, there, chunk, r, K)
    else:
        w = chunk * 32 + tl.arange(0, 32)
        inside = w < K // 8
        f, within = (w // 8 * 16 + w % 8)[:, None], inside[:, None]
        low = low_bits(block, f, r, within, 4)
        found = low | low_bits(block, f + 8, r, within, 4) << 4
        if KIND == "int4":
            found ^= _EIGHTS
        at = w
        if KIND == "q4_k":  # 4 words of scales before each superblock's codes
            at = w + (chunk + 1) * 4
        store_words(rows, there, at, inside, found)


@triton.jit
def _halves_of_64(block, rows, there, chunk, r):
    """Q6_K's low bits: inputs 64 apart share a byte."""
    w = chunk * 32 + tl.arange(0, 32)
    f, inside = (w // 16 * 32 + w % 16)[:, None], w >= 0
    low = low_bits(block, f, r, inside[:, None], 6)
    found = low | low_bits(block, f + 16, r, inside[:, None], 6) << 4
    store_words(rows, there, w, inside, found)


@triton.jit
def _quarters_of_32(block, rows, there, chunk, r, K):
    """Q6_K's high bits: 4 inputs, 32 apart, share a byte."""
    w = chunk * 16 + tl.arange(0, 16)
    f, inside = (w // 8 * 32 + w % 8)[:, None], w >= 0
    found = high_bits(block, f, r, inside[:, None], 6)
    for quarter in tl.static_range(1, 4):
        part = high_bits(block, f + 8 * quarter, r, inside[:, None], 6)
        found |= part << (2 * quarter)
    store_words(rows, there, K // 8 + w, inside, found)


@triton.jit
def repack_scales(
    scales,
    to,
    rows,
    there,
    block,
    matrix,
    chunk,
    N,
    K,
    ROW,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A chunk's scales: to ``to`` (words), or among the codes.

    Args:
        block: which 32 rows; ``matrix``: which of the stack (int64).
        ROW: words of a row of codes.
    """
    if KIND == "int8" or KIND == "int4" or KIND == "mxfp4":
        _columns(scales, to, there, block, matrix, chunk, N, K, GROUP)
    elif KIND == "fp8":
        if block % 4 == 0:  # a scale of 128 rows lies with each 32 of them
            G = (K + 127) // 128
            j = chunk * 2 + tl.arange(0, 2)
            found = tl.load(scales.to(tl.pointer_type(tl.int32)) + j, mask=j < G, other=0)
            tl.store(to + (matrix * ((N + 127) // 128) + block // 4) * G + j, found, mask=j < G)
    elif KIND == "q4_k":
        _q4_k_head(scales + chunk * 640, rows + chunk * 36, there)
    elif KIND == "q6_k":
        _q6_k_tail(scales + chunk * 576, rows, there, chunk, K, ROW)


@triton.jit
def _columns(scales, to, there, block, matrix, chunk, N, K, GROUP: tl.constexpr):
    """Scales of integers and MXFP4: words for each group, or pair of groups, of all rows."""
    r = tl.arange(0, 32)
    own = block * 32 + r
    if GROUP == 0:
        if chunk == 0:
            found = tl.load(scales.to(tl.pointer_type(tl.int32)) + r)
            tl.store(to + matrix * N + own, found, mask=there)
    elif GROUP == 32:
        halves = scales.to(tl.pointer_type(tl.int16))
        j = chunk * 4 + tl.arange(0, 4)
        mask = (j < K // 64)[:, None] & there[None, :]
        at = j[:, None] * 64 + r[None, :]
        first = tl.load(halves + at, mask=mask, other=0).to(tl.int32)
        second = tl.load(halves + (at + 32), mask=mask, other=0).to(tl.int32)
        row = to + (matrix * (K // 64) + j)[:, None] * N + own[None, :]
        tl.store(row, (first & 0xFFFF) | (second << 16), mask=mask)
    else:
        halves = scales.to(tl.pointer_type(tl.int16))
        G = (K + GROUP - 1) // GROUP
        j = chunk * (256 // GROUP) + tl.arange(0, 256 // GROUP)
        mask = (j < G)[:, None] & there[None, :]
        found = tl.load(halves + (j[:, None] * 32 + r[None, :]), mask=mask, other=0).to(tl.int32)
        tl.store(to + (matrix * G + j)[:, None] * N + own[None, :], found << 16, mask=mask)


@triton.jit
def _q4_k_head(scales, rows, there):
    """A superblock's first 4 words: fp16 d and dmin, and 8 scales and minima of 6 bits."""
    r = tl.arange(0, 32)
    halves = scales.to(tl.pointer_type(tl.int16)) + r
    d, dmin = tl.load(halves).to(tl.int32), tl.load(halves + 32).to(tl.int32)
    small = scales + (128 + r)
    a, b, c = tl.zeros_like(d), tl.zeros_like(d), tl.zeros_like(d)
    for j in tl.static_range(4):
        sc, m = tl.load(small + 64 * j).to(tl.int32), tl.load(small + (64 * j + 32)).to(tl.int32)
        sc4 = tl.load(small + (64 * j + 256)).to(tl.int32)
        m4 = tl.load(small + (64 * j + 288)).to(tl.int32)
        a |= (sc | (sc4 >> 4) << 6) << (8 * j)
        b |= (m | (m4 >> 4) << 6) << (8 * j)
        c |= ((sc4 & 15) | (m4 & 15) << 4) << (8 * j)
    tl.store(rows, (d & 0xFFFF) | (dmin << 16), mask=there)
    tl.store(rows + 1, a, mask=there)
    tl.store(rows + 2, b, mask=there)
    tl.store(rows + 3, c, mask=there)


@triton.jit
def _q6_k_tail(scales, rows, there, chunk, K, ROW):
    """A superblock's int8 scales, and its fp16 scale twice; behind the last one zeros."""
    r = tl.arange(0, 32)
    d = tl.load(scales.to(tl.pointer_type(tl.int16)) + r).to(tl.int32) & 0xFFFF
    small = scales + (64 + r)
    behind = rows + (K // 8 + K // 16)
    for j in tl.static_range(4):
        word = tl.zeros_like(d)
        for i in tl.static_range(4):
            word |= tl.load(small + 32 * (4 * j + i)).to(tl.int32) << (8 * i)
        tl.store(behind + (chunk * 4 + j), word, mask=there)
    at = K // 8 + K // 16 + K // 64 + chunk
    tl.store(rows + at, d | d << 16, mask=there)
    if chunk == K // 256 - 1:
        for j in tl.static_range(1, 4):
            tl.store(rows + (at + j), tl.zeros_like(d), mask=there & (at + j < ROW))
