"""256 inputs of a block of 32 rows, from the CPU's tiles to rows as the GPU's products read them.

Every code stays what it is (``int4``: with 8 added); ``gemm.weights`` has the layouts. ``rows``
point to the first word of each of the 32 rows, ``there`` [32] says which of them exist. ``chunk``
counts 256 inputs of the tiles, ``to_k`` is the first of them in the rows, of ``K_OUT``: tiles of a
part of the inputs (``quant.split``) have fewer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import byte_order, high_bits, low_bits, words

_EIGHTS = tl.constexpr(-0x77777778)
"""8 in each half byte."""


@triton.jit
def store_words(rows, there, at, inside, turned):
    """Words [W, 32] to the words ``at`` [W] of the rows."""
    mask = there[:, None] & inside[None, :]
    tl.store(rows[:, None] + at[None, :], tl.trans(turned), mask=mask)


@triton.jit
def repack_codes(block, rows, there, chunk, K, to_k, K_OUT, KIND: tl.constexpr):
    """All of a chunk but its scales."""
    r = tl.arange(0, 32)[None, :]
    if KIND == "bf16":
        w = tl.arange(0, 128)
        f, inside = (chunk * 128 + w)[:, None], chunk * 128 + w < K // 2
        store_words(rows, there, to_k // 2 + w, inside, words(block, f, r, inside[:, None]))
    elif KIND == "int8" or KIND == "fp8":
        w = tl.arange(0, 64)
        f, inside = (chunk * 64 + w)[:, None], chunk * 64 + w < K // 4
        if KIND == "int8":
            found = words(block, f, r, inside[:, None])
        else:
            found = byte_order(block, f, inside[:, None])
        store_words(rows, there, to_k // 4 + w, inside, found)
    elif KIND == "q6_k":
        _halves_of_64(block, rows + to_k // 8, there, chunk, r)
        _quarters_of_32(block, rows + (K_OUT // 8 + to_k // 16), there, chunk, r)
    else:
        w = tl.arange(0, 32)
        inside = chunk * 32 + w < K // 8
        f, within = (chunk * 64 + w // 8 * 16 + w % 8)[:, None], inside[:, None]
        low = low_bits(block, f, r, within, 4)
        found = low | low_bits(block, f + 8, r, within, 4) << 4
        if KIND == "int4":
            found ^= _EIGHTS
        first = to_k // 8
        if KIND == "q4_k":  # 4 words of scales before each superblock's codes
            first = to_k // 256 * 36 + 4
        store_words(rows, there, first + w, inside, found)


@triton.jit
def _halves_of_64(block, rows, there, chunk, r):
    """Q6_K's low bits: inputs 64 apart share a byte."""
    w = tl.arange(0, 32)
    f, inside = (chunk * 64 + w // 16 * 32 + w % 16)[:, None], w >= 0
    low = low_bits(block, f, r, inside[:, None], 6)
    found = low | low_bits(block, f + 16, r, inside[:, None], 6) << 4
    store_words(rows, there, w, inside, found)


@triton.jit
def _quarters_of_32(block, rows, there, chunk, r):
    """Q6_K's high bits: 4 inputs, 32 apart, share a byte."""
    w = tl.arange(0, 16)
    f, inside = (chunk * 64 + w // 8 * 32 + w % 8)[:, None], w >= 0
    found = high_bits(block, f, r, inside[:, None], 6)
    for quarter in tl.static_range(1, 4):
        part = high_bits(block, f + 8 * quarter, r, inside[:, None], 6)
        found |= part << (2 * quarter)
    store_words(rows, there, w, inside, found)


@triton.jit
def repack_scales(
    scales,
    to,
    rows,
    there,
    matrix,
    to_n,
    chunk,
    K,
    to_k,
    N_OUT,
    K_OUT,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A chunk's scales: to ``to`` (words), or before the codes.

    Args:
        matrix: which of the stack (int64); ``to_n``: the first of the 32 rows there.
    """
    if KIND == "int8" or KIND == "int4" or KIND == "mxfp4":
        _columns(scales, to, there, matrix, to_n, chunk, K, to_k, N_OUT, K_OUT, GROUP)
    elif KIND == "fp8":
        if to_n % 128 == 0:  # a scale of 128 rows lies with each 32 of them
            G = (K_OUT + 127) // 128
            j = tl.arange(0, 2)
            mask = chunk * 2 + j < (K + 127) // 128
            own = scales.to(tl.pointer_type(tl.int32)) + chunk * 2
            found = tl.load(own + j, mask=mask, other=0)
            row = to + (matrix * ((N_OUT + 127) // 128) + to_n // 128) * G + to_k // 128
            tl.store(row + j, found, mask=mask)
    elif KIND == "q4_k":
        _head(scales + chunk * 640, rows + to_k // 256 * 36, there)


@triton.jit
def _columns(scales, to, there, matrix, to_n, chunk, K, to_k, N_OUT, K_OUT, GROUP: tl.constexpr):
    """Scales of integers and MXFP4: words for each group, or pair of groups, of all rows."""
    r = tl.arange(0, 32)
    own = to_n + r
    if GROUP == 0:
        if chunk == 0:
            found = tl.load(scales.to(tl.pointer_type(tl.int32)) + r)
            tl.store(to + matrix * N_OUT + own, found, mask=there)
    else:
        EVERY: tl.constexpr = 64 if GROUP == 32 else GROUP  # inputs of a word
        COUNT: tl.constexpr = 256 // EVERY
        j = tl.arange(0, COUNT)
        mask = (chunk * COUNT + j < (K + EVERY - 1) // EVERY)[:, None] & there[None, :]
        halves = scales.to(tl.pointer_type(tl.int16)) + chunk * (256 // GROUP * 32)
        at = halves + (j[:, None] * (EVERY // GROUP * 32) + r[None, :])
        found = tl.load(at, mask=mask, other=0).to(tl.int32)
        if GROUP == 32:
            second = tl.load(at + 32, mask=mask, other=0).to(tl.int32)
            found = (found & 0xFFFF) | (second << 16)
        else:
            found = found << 16  # bfloat16 as float32
        row = matrix * ((K_OUT + EVERY - 1) // EVERY) + to_k // EVERY + j
        tl.store(to + (row[:, None] * N_OUT + own[None, :]), found, mask=mask)


@triton.jit
def _head(scales, rows, there):
    """A Q4_K superblock's first 4 words: fp16 d and dmin, and 8 scales and minima of 6 bits."""
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
def repack_tail(scales, rows, there, chunk, to_k, K_OUT, ROW):
    """A Q6_K superblock's int8 scales, and its fp16 scale twice; behind the last one zeros.

    Args:
        ROW: words of a row.
    """
    scales += chunk * 576
    r = tl.arange(0, 32)
    d = tl.load(scales.to(tl.pointer_type(tl.int16)) + r).to(tl.int32) & 0xFFFF
    small = scales + (64 + r)
    behind = rows + (K_OUT // 8 + K_OUT // 16)
    for j in tl.static_range(4):
        word = tl.zeros_like(d)
        for i in tl.static_range(4):
            word |= tl.load(small + 32 * (4 * j + i)).to(tl.int32) << (8 * i)
        tl.store(behind + (to_k // 64 + j), word, mask=there)
    at = K_OUT // 8 + K_OUT // 16 + K_OUT // 64 + to_k // 256
    tl.store(rows + at, d | d << 16, mask=there)
    if to_k == K_OUT - 256:
        for j in tl.static_range(1, 4):
            tl.store(rows + (at + j), tl.zeros_like(d), mask=there & (at + j < ROW))
