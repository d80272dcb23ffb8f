"""A packed block times M tokens in AVX-512, where scales are small integers under a float.

As ``avx512_block``, but the integer scale of a group multiplies its integer sums, in the
``vpdpwssd`` that adds them up: a group's sum of 2-bit codes by 8-bit inputs fits in a word. So all
groups of a block of 128 inputs share one conversion to floats and one multiply-add by the
superblock's float. Their minima are the sums of each group's inputs times its integer, summed up as
floats and taken off once.

Inputs are integers of 8 bits, or bfloat16 as int8 slices (``dot``); a block's sum is an exact
integer, below 2**22 for every slice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...quant.activations import SLICES, SLICES_K
from ...quant.layout import K_BLOCK
from ..activations.int8_slices import MAGIC_BITS, SHORT
from ..activations.row_layout import (
    SUM_UNIT,
    activation_scale,
    codes_at,
    group_sum,
    row_format,
    slices_at,
    unit_sum,
)
from ..intrin.avx512 import (
    add_f32,
    broadcast_f32,
    fma_f32,
    fnma_f32,
    load_f16,
    load_f32,
    mul_f32,
    store_f32,
    zero_f32,
)
from ..intrin.avx512_bytes import all_i32, broadcast_dword, to_f32, zero_i32
from ..intrin.prefetch import in_order, prefetch_l1, prefetch_l2
from ..intrin.registers import f32x16_array, i32x16_array
from ..isa import Instructions
from ..jit import inlined
from ..weights.dequant import make_reader
from ..weights.layout import AHEAD_L1, AHEAD_L2, SUPERBLOCKS, packed_bytes
from ..weights.nibbles import OF_16
from ..words import i64
from .avx512_block import Block
from .dot import JOINS

FORMATS = frozenset(("q2_k",))
"""Formats whose blocks these are: scales and minima of 4 bits, codes of 2."""

SCALES_AHEAD = 1280
"""Bytes from a scale to the prefetch of its like: two superblocks."""


def make_block(fmt: str, M: int, ops: Instructions, KEPT: int) -> Block:
    """The block of a format for M tokens.

    Args:
        KEPT: slices of bf16 inputs that are multiplied; 0 for int8 inputs.
    """
    reader, of = make_reader(fmt, ops), SUPERBLOCKS[fmt]
    assert of.minima and of.nibbles and reader.bias == 0 and of.unit == 1
    codes: Any = reader.codes
    dot, dot_words = ops.dot_u8i8, ops.dot_words
    low_as_i32, high_as_f32 = OF_16.low_as_i32, OF_16.high_as_f32
    join_short, join_lowest = JOINS
    NBYTES, FIRST, STEP = of.nbytes, of.first, of.step
    TILE, TILE_K, GROUP = reader.packing.tile_bytes, reader.packing.k_step, reader.scales.k
    STEPS, TILE_GROUPS, ROWS = K_BLOCK // TILE_K, TILE_K // GROUP, GROUP // 4
    GROUPS, SUPER_BLOCKS = K_BLOCK // GROUP, reader.scales.super_k // K_BLOCK
    SUPER_GROUPS = SUPER_BLOCKS * GROUPS
    EACH = max(1, KEPT)
    HALVES = 2 if M * EACH <= 4 else 1  # that are read in one pass, as registers allow
    ALL, LOW, WORDS = M * HALVES * EACH, M * HALVES, HALVES * EACH
    LINES = HALVES * TILE // 64 // TILE_GROUPS  # of a group
    SCALE_LINES = NBYTES // SUPER_BLOCKS // 64
    LEFT_OUT = np.float32(256.0 ** (SLICES - KEPT) if KEPT else 1)
    WHOLE = np.float32(SUM_UNIT / LEFT_OUT if KEPT else 1)
    how = row_format(fmt, "int8")
    assert how is not None
    ACT_K = SLICES_K if KEPT else how.act_k
    DISTANCE = AHEAD_L1 if HALVES == 2 else max(AHEAD_L1, packed_bytes(fmt))
    FURTHER = DISTANCE - AHEAD_L1 + AHEAD_L2

    @inlined
    def inputs_at(row, K, k):
        """Address of inputs; of slices the next ones are 64 bytes further."""
        return codes_at(row, K) + k if KEPT == 0 else slices_at(row, K, k, 0)

    @inlined
    def sum_of(row, K, group):
        """A group's sum of inputs, of slices in SUM_UNITs."""
        return group_sum(row, K, group) if KEPT == 0 else unit_sum(row, K, group)

    @inlined
    def add_group(sums, low, at, g, tables, rows, K, group, small):
        """A group of the tile ``at``, its scales at ``small``."""
        for t in range(M):
            words = i32x16_array(WORDS)  # [HALVES, EACH]
            for i in range(WORDS):
                words[i] = zero_i32()
            x = inputs_at(i64(rows, t), K, GROUP * group)
            for r in range(ROWS):
                row = ROWS * g + r
                for j in range(EACH):
                    four = broadcast_dword(x + 4 * r + 64 * j)
                    for half in range(HALVES):
                        weights = codes(at + half * TILE, row // 2, row % 2, tables)
                        i = half * EACH + j
                        words[i] = dot(words[i], weights, four)
            total = broadcast_f32(sum_of(i64(rows, t), K, group))
            for half in range(HALVES):
                scales = low_as_i32(small + 16 * half)
                for j in range(EACH):
                    i = (t * HALVES + half) * EACH + j
                    sums[i] = dot_words(sums[i], words[half * EACH + j], scales)
                minima = high_as_f32(small + 16 * half)
                i = t * HALVES + half
                low[i] = fma_f32(total, minima, low[i])

    @inlined
    def joined(sums, i):
        """The chains from i on as floats."""
        if KEPT == 0:
            return to_f32(sums[i])
        value = join_short(sums[i], sums[i + 1], sums[i + 2])
        return value if KEPT == SHORT else join_lowest(value, sums[i + 3])

    @inlined
    def begin(sums, low):
        for i in range(ALL):
            sums[i] = all_i32(MAGIC_BITS) if KEPT and i % EACH < SHORT else zero_i32()
        for i in range(LOW):
            low[i] = zero_f32()

    @inlined
    def multiply(w, near, far, scale, block, K, rows, tables, out):
        of_super = scale + block // SUPER_BLOCKS * NBYTES
        smalls = of_super + FIRST + STEP * (block * GROUPS % SUPER_GROUPS)
        ahead = scale + block * (NBYTES // SUPER_BLOCKS) + SCALES_AHEAD
        for sweep in range(0, 2, HALVES):
            sums, low = i32x16_array(ALL), f32x16_array(LOW)  # [M, HALVES, EACH], [M, HALVES]
            begin(sums, low)
            for step in range(STEPS):
                at = w + (2 * step + sweep) * TILE
                for g in range(TILE_GROUPS):
                    index = step * TILE_GROUPS + g
                    first_line = (sweep * GROUPS + index) * LINES
                    for line in range(first_line, first_line + LINES):
                        prefetch_l1(near + 64 * line)
                        prefetch_l2(far + 64 * line)
                    if sweep == 0 and index < SCALE_LINES:
                        prefetch_l1(ahead + 64 * index)
                    small = smalls + STEP * index + 16 * sweep
                    add_group(sums, low, at, g, tables, rows, K, block * GROUPS + index, small)
                    in_order()
            for half in range(HALVES):
                factor = load_f16(of_super + 32 * (sweep + half))
                minimum = load_f16(of_super + 64 + 32 * (sweep + half))
                if WHOLE != 1:
                    minimum = mul_f32(minimum, broadcast_f32(WHOLE))
                for t in range(M):
                    i = t * HALVES + half
                    value = mul_f32(joined(sums, EACH * i), factor)
                    value = fnma_f32(low[i], minimum, value)
                    by = LEFT_OUT * activation_scale(i64(rows, t), K, block * K_BLOCK, ACT_K)
                    to = out + 64 * (2 * t + sweep + half)
                    store_f32(to, add_f32(mul_f32(value, broadcast_f32(by)), load_f32(to)))

    return Block(multiply, DISTANCE, FURTHER)
