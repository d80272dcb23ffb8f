"""AVX2 tiles of float weights, bf16 and E4M3: exact products in float32 multiply-adds.

A cache line of a packed block holds 16 outputs times a pair of inputs (bf16) or two pairs (E4M3).
Its weights become floats by shifts and masks: a bf16 is the upper half of one, and an E4M3 byte b
is, as the word ``(b << 8) >> 4`` (signed) masked by 0x87F0, the bf16 of its value times 2**-120,
subnormals included.

M = 1 reads a line once for all its outputs; more tokens go over the block, by then in the first
cache, once for each half or quarter of the outputs, so that eight accumulators hold M tokens. An
output has two, one for the first and one for the second inputs of the pairs, whatever M is: a
token's result does not depend on its batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...quant.layout import K_BLOCK
from ..intrin.avx2 import (
    add_f32,
    and_i32,
    broadcast_f32,
    broadcast_i32,
    broadcast_i32_at,
    first_of_pairs,
    fma_f32,
    high_bytes_to_words,
    load_f32,
    load_i32,
    low_bytes_to_words,
    mul_f32,
    pin_f32,
    second_of_pairs,
    shift_right_words,
    store_f32,
    zero_f32,
)
from ..intrin.prefetch import prefetch_l1
from ..intrin.registers import f32x8_array
from ..jit import inlined, kernel
from ..job import f32, i64
from ..weights.layout import packed_bytes
from .common import ahead, by_tokens

_E4M3_MASK = 0x87F087F0
_E4M3_UP = np.float32(2.0**60)  # twice: of the inputs and of the sums

AHEAD = {"bf16": 2048, "fp8": 4096, "fp8-channel": 4096}
"""Bytes from a load to the prefetch of its like."""


def make_tile(fmt: str, M: int) -> Any:
    """Compiles the tile of M tokens, 1, 2 or 4 (``gemv.common``, without the argument M)."""
    FP8 = fmt != "bf16"
    BLOCK, DISTANCE = packed_bytes(fmt), AHEAD[fmt]
    LINES = 8 if FP8 else 16  # of 16 outputs by 32 inputs
    HALF, STEP = 64 * LINES, 128 * LINES
    QUARTERS = 4 // M  # of 8 outputs, in a pass
    FACTOR = {"bf16": "none", "fp8": "block", "fp8-channel": "outputs"}[fmt]
    SUMS = 8

    @inlined
    def add(sums, at, pairs, x, t):
        """Accumulators of a quarter's token t += 8 outputs' pairs times the pair at x."""
        pair = broadcast_i32_at(x)
        x0, x1 = first_of_pairs(pair), second_of_pairs(pair)
        if FP8:
            scale = broadcast_f32(_E4M3_UP)
            x0, x1 = mul_f32(x0, scale), mul_f32(x1, scale)
        i = 2 * (at * M + t)
        sums[i] = pin_f32(fma_f32(first_of_pairs(pairs), x0, sums[i]))
        sums[i + 1] = pin_f32(fma_f32(second_of_pairs(pairs), x1, sums[i + 1]))

    @inlined
    def add_words(sums, at, words, x, t):
        """The same of E4M3 bytes that are the upper halves of words."""
        add(sums, at, and_i32(shift_right_words(words, 4), broadcast_i32(_E4M3_MASK)), x, t)

    @inlined
    def add_load(sums, at, address, rows, offset):
        codes = load_i32(address)
        for t in range(M):
            x = i64(rows, t) + offset
            if FP8:
                add_words(sums, at, low_bytes_to_words(codes), x, t)
                add_words(sums, at, high_bytes_to_words(codes), x + 4, t)
            else:
                add(sums, at, codes, x, t)

    @inlined
    def add_lines(sums, at, w, near, count, rows, offset):
        """``count`` quarters of 16 outputs by 32 inputs at w."""
        for line in range(LINES):
            prefetch_l1(near + 64 * line)
            for j in range(count):
                add_load(sums, at + j, w + 64 * line + 32 * j, rows, offset + 64 // LINES * line)

    @inlined
    def finish(sums, at, quarter, scale, block, out):
        for t in range(M):
            i, to = 2 * (at * M + t), out + 128 * t + 32 * quarter
            value = add_f32(sums[i], sums[i + 1])
            if FACTOR == "none":
                value = add_f32(value, load_f32(to))
            else:
                if FACTOR == "block":
                    factor = broadcast_f32(f32(scale, block))
                else:
                    factor = load_f32(scale + 32 * quarter)
                value = fma_f32(mul_f32(value, broadcast_f32(_E4M3_UP)), factor, load_f32(to))
            store_f32(to, value)

    @kernel(f"{fmt}-m{M}-avx2")
    def tile(w, then, scale, first, last, K, rows, tables, out):
        if first == 0:
            for i in range(4 * M):
                store_f32(out + 32 * i, zero_f32())
        end = w + K // K_BLOCK * BLOCK
        w += first * BLOCK
        for block in range(first, last):
            near = ahead(w, DISTANCE, end, then)
            for sweep in range(M):
                sums = f32x8_array(SUMS)  # [QUARTERS, M, 2]
                for i in range(SUMS):
                    sums[i] = zero_f32()
                for step in range(4):
                    at, asked = w + STEP * step, near + BLOCK // M * sweep + STEP // M * step
                    x = 2 * K_BLOCK * block + 64 * step
                    if M == 1:
                        add_lines(sums, 0, at, asked, 2, rows, x)
                        add_lines(sums, 2, at + HALF, asked + HALF, 2, rows, x)
                    elif M == 2:
                        add_lines(sums, 0, at + HALF * sweep, asked, 2, rows, x)
                    else:
                        start = at + HALF * (sweep // 2) + 32 * (sweep % 2)
                        add_lines(sums, 0, start, asked, 1, rows, x)
                for q in range(QUARTERS):
                    finish(sums, q, QUARTERS * sweep + q, scale, block, out)
            w += BLOCK

    return tile


def make_tiles(fmt: str, activations: str) -> Any:
    """Compiles ``tiles`` (``gemv.common``)."""
    tiles = {M: make_tile(fmt, M) for M in (1, 2, 4)}
    tile4 = tiles[4]

    @inlined
    def tile8(w, then, scale, first, last, K, rows, tables, out):
        for block in range(first, last):
            tile4(w, then, scale, block, block + 1, K, rows, tables, out)
            tile4(w, then, scale, block, block + 1, K, rows + 32, tables, out + 512)

    return by_tokens({**tiles, 8: tile8}, f"{fmt}-avx2")
