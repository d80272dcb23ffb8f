"""Quantization of input rows in AVX-512: sums, int8 codes, int8 slices."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from ...quant.activations import SLICES, SLICES_K, SLICES_SHIFT
from ..intrin.avx512 import (
    abs_f32,
    add_f32,
    broadcast_f32,
    fma_f32,
    largest_f32,
    load_bf16,
    max_f32,
    mul_f32,
    sum_f32,
    zero_f32,
)
from ..intrin.avx512_bytes import (
    add_i32,
    low_bytes_i32,
    or_i32,
    shift_slice,
    store_low_bytes,
    sum_i32,
    to_i32,
    zero_i32,
)
from ..intrin.registers import i32x16_array
from ..intrin.scalar import bits_from_f32, f32_from_bits
from ..jit import inlined, routine
from ..job import poke_f32
from .int8_slices import MAGIC_BITS, SHORT
from .quantize import make_poke_sum, poke_i32, scales_of
from .row_layout import (
    SUM_UNIT,
    RowFormat,
    codes_at,
    lowest_at,
    offset_at,
    scale_at,
    slices_at,
    sum_at,
    unit_sum_at,
)

_LEAST = np.uint32(SLICES_SHIFT + 8)  # the least exponent (biased) whose scale is a normal number


@functools.cache
def make_quantize_row(how: RowFormat) -> Any:
    """Compiles ``quantize_row`` (``quantize``)."""
    if how.kind == "sums":
        body = _sums(how.sum_k)
    elif how.kind == "int8_slices":
        body = _int8_slices(how)
    else:
        body = _quantize(how)

    @routine(4, f"{how.name}-avx512")
    def quantize_row(row, K, first, last):
        body(row, K, first, last)
        return 0

    return quantize_row


def _make_sum(SUM_K: int):
    @inlined
    def sum_of(row, k):
        """The sum of the inputs from k on that share one."""
        total = zero_f32()
        for i in range(0, SUM_K, 16):
            total = add_f32(total, load_bf16(row + 2 * (k + i)))
        return sum_f32(total)

    return sum_of


def _sums(SUM_K: int):
    sum_of = _make_sum(SUM_K)

    @inlined
    def sums(row, K, first, last):
        for k in range(first, last, SUM_K):
            poke_f32(sum_at(row, K, k // SUM_K), sum_of(row, k))

    return sums


def _quantize(how: RowFormat):
    ACT_K, SUM_K, Q8_K = how.act_k, how.sum_k, how.kind == "q8_k"
    poke_sum = make_poke_sum(how.bias)
    VECTORS, PER_SUM, SUMS = ACT_K // 16, SUM_K // 16, ACT_K // SUM_K

    @inlined
    def quantize(row, K, first, last):
        for k in range(first, last, ACT_K):
            highest, poison = zero_f32(), zero_f32()
            for i in range(VECTORS):
                x = load_bf16(row + 2 * (k + 16 * i))
                highest = max_f32(abs_f32(x), highest)
                poison = fma_f32(x, zero_f32(), poison)
            largest = largest_f32(highest)
            scale, inverse = scales_of(row, k, ACT_K, largest, Q8_K)
            poke_f32(scale_at(row, K, k // ACT_K), scale + sum_f32(poison))
            for group in range(SUMS):
                total = zero_i32()
                for i in range(PER_SUM):
                    at = k + group * SUM_K + 16 * i
                    q = to_i32(mul_f32(load_bf16(row + 2 * at), broadcast_f32(inverse)))
                    store_low_bytes(codes_at(row, K) + at, q)
                    total = add_i32(total, q)
                poke_sum(sum_at(row, K, k // SUM_K + group), sum_i32(total))

    return quantize


def _int8_slices(how: RowFormat):
    SUM_K, BIAS, SUMS = how.sum_k, how.bias, how.sums
    sum_of, PER_UNIT = _make_sum(SUM_K), np.float32(1 / SUM_UNIT)

    @inlined
    def int8_slices(row, K, first, last):
        for k in range(first, last, SLICES_K):
            highest, poison = zero_f32(), zero_f32()
            for i in range(0, SLICES_K, 16):
                x = load_bf16(row + 2 * (k + i))
                highest = max_f32(abs_f32(x), highest)
                poison = fma_f32(x, zero_f32(), poison)
            # 2**e and 2**-e from the bits of the largest, whose own exponent is ``top``.
            top = max(bits_from_f32(largest_f32(highest)) >> types.uint32(23), _LEAST)
            scale = f32_from_bits(types.uint32((top - _LEAST + 1) << types.uint32(23)))
            inverse = f32_from_bits(types.uint32((_LEAST + 253 - top) << types.uint32(23)))
            poke_f32(scale_at(row, K, k // SLICES_K), scale + sum_f32(poison))
            whole = zero_i32()
            for group in range(k, k + SLICES_K, SUM_K):
                totals = i32x16_array(SLICES)
                for j in range(SLICES):
                    totals[j] = zero_i32()
                for i in range(group, group + SUM_K, 16):
                    q = to_i32(mul_f32(load_bf16(row + 2 * i), broadcast_f32(inverse)))
                    whole = or_i32(whole, q)
                    for j in range(SLICES):
                        # Signed bytes: what is left above one is rounded to nearest.
                        store_low_bytes(slices_at(row, K, i, SLICES - 1 - j), q)
                        totals[j] = add_i32(totals[j], q)
                        q = shift_slice(q)
                if SUMS:
                    total, index = sum_of(row, group), group // SUM_K
                    poke_f32(sum_at(row, K, index), total)
                    poke_f32(unit_sum_at(row, K, index), total * inverse * PER_UNIT)
                if BIAS != 0:
                    for j in range(SLICES):
                        above = sum_i32(totals[j + 1]) if j + 1 < SLICES else 0
                        total = sum_i32(totals[j]) - 256 * above
                        place = SLICES - 1 - j
                        magic = MAGIC_BITS if place < SHORT else 0
                        poke_i32(offset_at(row, K, group // SUM_K, place), magic - BIAS * total)
            poke_i32(lowest_at(row, K, k // SLICES_K), low_bytes_i32(whole))

    return int8_slices
