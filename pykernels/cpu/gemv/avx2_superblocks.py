"""AVX2 tiles of integer weights whose scales are small integers under a float of 256 inputs.

As ``avx2_codes``, but a group's integer scale multiplies its integer sums: in the ``vpmaddwd``
that adds up pairs of words anyway, or after AVX-VNNI's ``vpdpbusd`` in a ``vpdpwssd``, or in a
``vpmulld`` where sums are wider than words. So the four or two groups of a packed tile, 64 inputs,
share one conversion to floats and one multiply-add by the superblock's float. What the bias of the
codes and the minima have added is the sum of each group's inputs times its integer, summed up as
floats and taken off once.

A sum is an exact integer of less than 2**31: codes below 87, scales of 8 bits, slices of 8.
"""

from __future__ import annotations

import numpy as np

from ...quant.activations import SLICES
from ..activations.row_layout import SUM_UNIT, codes_at, group_sum, slices_at, unit_sum
from ..intrin.avx2 import (
    add_i32,
    add_words,
    broadcast_f32,
    broadcast_i32_at,
    dot_u8i8,
    dot_words,
    dpbusd,
    dpwssd,
    fma_f32,
    fnma_f32,
    load_f16,
    load_f32,
    load_i8_as_f32,
    load_i8_as_i32,
    load_i8_as_word_pairs,
    load_u8_as_f32,
    mul_f32,
    mul_i32,
    store_f32,
    to_f32,
    zero_f32,
    zero_i32,
)
from ..intrin.prefetch import prefetch_l1, unknown
from ..intrin.registers import f32x8_array, i32x8_array, pin_i32
from ..jit import inlined
from ..weights.codes_avx2 import make_codes
from ..weights.layout import BIASES, SUPERBLOCKS
from ..weights.nibbles import OF_8
from ..words import i64
from .avx2_group import Group

FORMATS = frozenset(("q2_k", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s", "iq1_m"))
"""Formats whose tiles these are: those of ``SUPERBLOCKS`` that are faster so. Of wider codes, whose
sums take most of the time, a token's are no faster or slower (q3_k, q4_k, iq3_s)."""


def make_group(fmt: str, M: int, KEPT: int, VNNI: bool) -> Group:
    """The group of M tokens: the inputs of a packed tile.

    Args:
        KEPT: slices that are multiplied; 0 for int8 inputs.
        VNNI: whether the CPU has AVX-VNNI.
    """
    codes, of = make_codes(fmt), SUPERBLOCKS[fmt]
    NBYTES, FIRST, STEP, MASK = of.nbytes, of.first, of.step, (1 << of.shift) - 1
    read, GROUP, TILE_K = codes.rows, codes.k, codes.packing.k_step
    MINIMA, NIBBLES = of.minima, of.nibbles
    low_as_i32, low_as_word_pairs = OF_8.low_as_i32, OF_8.low_as_word_pairs
    high_as_f32 = OF_8.high_as_f32
    GROUPS, LOADS, EACH = TILE_K // GROUP, GROUP // 8, max(1, KEPT)
    UNIT, BIAS = np.float32(of.unit), np.float32(BIASES.get(fmt, 0))
    SUMS = M * EACH  # of a side
    SIDES = 2 if SUMS <= 4 and GROUP == 16 else 1  # as measured
    ALL, LOW = SIDES * SUMS, SIDES * M
    # Rows whose pairs of products add up in a word.
    ROWS = min(GROUP // 4, (1 << 15) // (256 * codes.largest))
    # A group's sum is a word, and the word above its scale, which has no sign, is zero.
    FIT = MINIMA and 128 * codes.largest * GROUP < 1 << 15
    PER = LOADS if VNNI else max(1, ROWS // 2)  # loads
    WHOLE = np.float32(SUM_UNIT / 256.0 ** (SLICES - KEPT))

    @inlined
    def inputs_at(row, K, k):
        """Address of the tile's inputs; of slices the next ones are 64 bytes further."""
        return codes_at(row, K) + k if KEPT == 0 else slices_at(row, K, k, 0)

    @inlined
    def sum_of(row, K, group):
        return group_sum(row, K, group) if KEPT == 0 else unit_sum(row, K, group) * WHOLE

    @inlined
    def load_scales(at):
        if NIBBLES:
            return low_as_i32(at) if VNNI else low_as_word_pairs(at)
        return load_i8_as_i32(at) if VNNI else load_i8_as_word_pairs(at)

    @inlined
    def load_less(at):
        """What a group's sum of inputs is multiplied by: its minimum, or its scale for a bias."""
        if NIBBLES:
            return high_as_f32(at)
        return load_u8_as_f32(at + 32) if MINIMA else load_i8_as_f32(at)

    @inlined
    def add_load(sums, s, words, i, even, odd, x, scales):
        """A load's two rows times 8 inputs at x."""
        x0, x1 = broadcast_i32_at(x), broadcast_i32_at(x + 4)
        if VNNI:
            words[i] = dpbusd(dpbusd(words[i], even, x0), odd, x1)
        elif ROWS < 2:
            at = s * SUMS + i
            sums[at] = add_i32(sums[at], dot_words(dot_u8i8(even, x0), scales))
            sums[at] = pin_i32(add_i32(sums[at], dot_words(dot_u8i8(odd, x1), scales)))
        else:
            both = add_words(dot_u8i8(even, x0), dot_u8i8(odd, x1))
            words[i] = pin_i32(add_words(words[i], both))

    @inlined
    def apply_scale(sums, s, words, scales):
        """A side's sums of products += what ``add_load`` has added up, times the group's scale."""
        for i in range(SUMS):
            at = s * SUMS + i
            if VNNI and FIT:
                sums[at] = pin_i32(dpwssd(sums[at], words[i], scales))
            elif VNNI:
                sums[at] = pin_i32(add_i32(sums[at], mul_i32(words[i], scales)))
            elif ROWS >= 2:
                sums[at] = pin_i32(add_i32(sums[at], dot_words(words[i], scales)))

    @inlined
    def joined(sums, i):
        value = to_f32(sums[i])
        for j in range(1, EACH):
            value = fma_f32(value, broadcast_f32(np.float32(256)), to_f32(sums[i + j]))
        return value

    @inlined
    def add(outs, tile, first, side, k, near, LINES, scale, quarter, rows, K, tables):
        sums, words, low = i32x8_array(ALL), i32x8_array(SUMS), f32x8_array(LOW)
        for i in range(ALL):
            sums[i] = zero_i32()
        for i in range(LOW):
            low[i] = zero_f32()
        block = scale + k // 256 * NBYTES
        for line in range(LINES):
            prefetch_l1(near + 64 * line)
        # Not unrolled, or LLVM would not unroll the loops inside: accumulators stay in registers.
        for index in range(unknown(GROUPS)):
            g = unknown(index)  # else each address would be counted in a register of its own
            group = k // GROUP + g
            for s in range(SIDES):
                small = block + FIRST + STEP * (group & MASK) + 8 * (quarter + s)
                scales = load_scales(small)
                for first_load in range(0, LOADS, PER):
                    for i in range(SUMS):
                        words[i] = zero_i32()
                    for at in range(PER):
                        load = g * LOADS + first_load + at
                        even, odd = read(tile, load, side + s, tables)
                        for t in range(M):
                            x = inputs_at(i64(rows, t), K, k) + 8 * load
                            for j in range(EACH):
                                i = t * EACH + j
                                add_load(sums, s, words, i, even, odd, x + 64 * j, scales)
                    apply_scale(sums, s, words, scales)
                if MINIMA or BIAS != 0:
                    less = load_less(small)
                    for t in range(M):
                        total = broadcast_f32(sum_of(i64(rows, t), K, group))
                        low[s * M + t] = fma_f32(total, less, low[s * M + t])
        for s in range(SIDES):
            at = block + 16 * (quarter + s)
            factor = load_f16(at)
            if MINIMA:
                minimum = load_f16(at + 64)
            elif BIAS != 0:
                minimum = mul_f32(factor, broadcast_f32(BIAS))
            for t in range(M):
                to = outs + 128 * t + 32 * (quarter + s)
                value = fma_f32(joined(sums, s * SUMS + t * EACH), factor, load_f32(to))
                if MINIMA or BIAS != 0:
                    value = fnma_f32(low[s * M + t], minimum, value)
                store_f32(to, value)

    unit = float(UNIT) * (256.0 ** (SLICES - KEPT) if KEPT else 1)
    return Group(add, TILE_K, SIDES, (unit,))
