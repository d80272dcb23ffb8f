"""Quantization of input rows in vectors of AVX-512 or AVX2: sums, int8 codes, slices, floats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types

from ...quant.activations import SLICES, SLICES_K, SLICES_SHIFT
from ..intrin import avx2, avx512, avx512_bytes
from ..intrin.registers import i32x8_array, i32x16_array
from ..intrin.scalar import bits_from_f32, f32_from_bits
from ..jit import inlined, routine
from ..words import poke_f32
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


@dataclass(frozen=True)
class Vectors:
    """Vectors of one instruction set.

    Attributes:
        N: floats or integers of one.
        floats, integers: modules of intrinsics.
        array: of vectors of integers.
    """

    N: int
    floats: Any
    integers: Any
    array: Any


VECTORS = {
    "avx512": Vectors(16, avx512, avx512_bytes, i32x16_array),
    "avx2": Vectors(8, avx2, avx2, i32x8_array),
}

_LEAST = np.uint32(SLICES_SHIFT + 8)  # the least exponent (biased) whose scale is a normal number


@functools.cache
def make_quantize_row(how: RowFormat, name: str) -> Any:
    """Compiles ``quantize_row`` (``quantize``) in the ``VECTORS`` of that name."""
    body = _KINDS.get(how.kind, _quantize)(how, VECTORS[name])

    @routine(4, f"{how.name}-{name}")
    def quantize_row(row, K, first, last):
        body(row, K, first, last)
        return 0

    return quantize_row


def _make_sum(SUM_K: int, v: Vectors) -> Callable:
    f, N = v.floats, v.N

    @inlined
    def sum_of(row, k):
        """The sum of the inputs from k on that share one."""
        total = f.zero_f32()
        for i in range(0, SUM_K, N):
            total = f.add_f32(total, f.load_bf16(row + 2 * (k + i)))
        return f.sum_f32(total)

    return sum_of


def _sums(how: RowFormat, v: Vectors) -> Callable:
    SUM_K, sum_of = how.sum_k, _make_sum(how.sum_k, v)

    @inlined
    def sums(row, K, first, last):
        for k in range(first, last, SUM_K):
            poke_f32(sum_at(row, K, k // SUM_K), sum_of(row, k))

    return sums


def _make_extremes(ACT_K: int, v: Vectors) -> Callable:
    f, N = v.floats, v.N

    @inlined
    def extremes(row, k):
        """The largest magnitude of a group, and 0, or NaN if one is infinite or NaN."""
        highest, poison = f.zero_f32(), f.zero_f32()
        for i in range(0, ACT_K, N):
            x = f.load_bf16(row + 2 * (k + i))
            highest = f.max_f32(f.abs_f32(x), highest)
            poison = f.fma_f32(x, f.zero_f32(), poison)
        return f.largest_f32(highest), f.sum_f32(poison)

    return extremes


def _quantize(how: RowFormat, v: Vectors) -> Callable:
    f, n, N = v.floats, v.integers, v.N
    ACT_K, SUM_K, Q8_K = how.act_k, how.sum_k, how.kind == "q8_k"
    poke_sum, extremes = make_poke_sum(how.bias), _make_extremes(ACT_K, v)

    @inlined
    def quantize(row, K, first, last):
        for k in range(first, last, ACT_K):
            largest, poison = extremes(row, k)
            scale, inverse = scales_of(row, k, ACT_K, largest, Q8_K)
            poke_f32(scale_at(row, K, k // ACT_K), scale + poison)
            for group in range(k, k + ACT_K, SUM_K):
                total = n.zero_i32()
                for i in range(group, group + SUM_K, N):
                    q = n.to_i32(f.mul_f32(f.load_bf16(row + 2 * i), f.broadcast_f32(inverse)))
                    n.store_low_bytes(codes_at(row, K) + i, q)
                    total = n.add_i32(total, q)
                poke_sum(sum_at(row, K, group // SUM_K), n.sum_i32(total))

    return quantize


def _int8_slices(how: RowFormat, v: Vectors) -> Callable:
    f, n, N, new_array = v.floats, v.integers, v.N, v.array
    SUM_K, BIAS, SUMS = how.sum_k, how.bias, how.sums
    extremes = _make_extremes(SLICES_K, v)
    sum_of, PER_UNIT = _make_sum(SUM_K, v), np.float32(1 / SUM_UNIT)

    @inlined
    def int8_slices(row, K, first, last):
        for k in range(first, last, SLICES_K):
            largest, poison = extremes(row, k)
            # 2**e and 2**-e from the bits of the largest, whose own exponent is ``top``.
            top = max(bits_from_f32(largest) >> types.uint32(23), _LEAST)
            scale = f32_from_bits(types.uint32((top - _LEAST + 1) << types.uint32(23)))
            inverse = f32_from_bits(types.uint32((_LEAST + 253 - top) << types.uint32(23)))
            poke_f32(scale_at(row, K, k // SLICES_K), scale + poison)
            whole = n.zero_i32()
            for group in range(k, k + SLICES_K, SUM_K):
                totals = new_array(SLICES)
                for j in range(SLICES):
                    totals[j] = n.zero_i32()
                for i in range(group, group + SUM_K, N):
                    q = n.to_i32(f.mul_f32(f.load_bf16(row + 2 * i), f.broadcast_f32(inverse)))
                    whole = n.or_i32(whole, q)
                    for j in range(SLICES):
                        # Signed bytes: what is left above one is rounded to nearest.
                        n.store_low_bytes(slices_at(row, K, i, SLICES - 1 - j), q)
                        totals[j] = n.add_i32(totals[j], q)
                        q = n.shift_slice(q)
                if SUMS:
                    total, index = sum_of(row, group), group // SUM_K
                    poke_f32(sum_at(row, K, index), total)
                    poke_f32(unit_sum_at(row, K, index), total * inverse * PER_UNIT)
                if BIAS != 0:
                    for j in range(SLICES):
                        above = n.sum_i32(totals[j + 1]) if j + 1 < SLICES else 0
                        total = n.sum_i32(totals[j]) - 256 * above
                        place = SLICES - 1 - j
                        magic = MAGIC_BITS if place < SHORT else 0
                        poke_i32(offset_at(row, K, group // SUM_K, place), magic - BIAS * total)
            poke_i32(lowest_at(row, K, k // SLICES_K), n.low_bytes_i32(whole))

    return int8_slices


def _floats(how: RowFormat, v: Vectors) -> Callable:
    f, N, ACT_K, POWER = v.floats, v.N, how.act_k, how.power
    extremes = _make_extremes(ACT_K, v)
    LEAST, MOST, SUM = np.uint32(POWER + 1), np.uint32(254), np.uint32(POWER + 254)

    @inlined
    def floats(row, K, first, last):
        for k in range(first, last, ACT_K):
            largest, poison = extremes(row, k)
            top = min(max(bits_from_f32(largest) >> types.uint32(23), LEAST), MOST)
            scale = f32_from_bits(types.uint32((top - LEAST + 1) << types.uint32(23)))
            inverse = f.broadcast_f32(f32_from_bits(types.uint32((SUM - top) << types.uint32(23))))
            poke_f32(scale_at(row, K, k // ACT_K), scale + poison)
            for i in range(k, k + ACT_K, N):
                f.store_f32(codes_at(row, K) + 4 * i, f.mul_f32(f.load_bf16(row + 2 * i), inverse))

    return floats


_KINDS = {"sums": _sums, "int8_slices": _int8_slices, "floats": _floats}
