"""Quantization of input rows in plain Numba: sums and int8 codes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, types

from ..intrin.scalar import bf16_as_f32
from ..intrin.sync import as_pointer
from ..jit import inlined, routine
from ..words import poke_f32
from .quantize import make_poke_sum, scales_of
from .row_layout import RowFormat, codes_at, scale_at, sum_at

_ZERO = np.float32(0.0)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves no fraction bits, ties to even


@functools.cache
def make_quantize_row(how: RowFormat) -> Any:
    """Compiles ``quantize_row`` (``quantize``)."""
    body = _sums(how.sum_k) if how.kind == "sums" else _quantize(how)

    @routine(4, f"{how.name}-generic")
    def quantize_row(row, K, first, last):
        body(row, K, first, last)
        return 0

    return quantize_row


def _sums(SUM_K: int):
    @inlined
    def sums(row, K, first, last):
        x = carray(as_pointer(row), (last,), types.uint16)
        for k in range(first, last, SUM_K):
            total = _ZERO
            for i in range(k, k + SUM_K):
                total += bf16_as_f32(x[i])
            poke_f32(sum_at(row, K, k // SUM_K), total)

    return sums


def _quantize(how: RowFormat):
    ACT_K, SUM_K, Q8_K = how.act_k, how.sum_k, how.kind == "q8_k"
    poke_sum = make_poke_sum(how.bias)

    @inlined
    def quantize(row, K, first, last):
        x = carray(as_pointer(row), (last,), types.uint16)
        codes = carray(as_pointer(codes_at(row, K)), (last,), types.int8)
        for k in range(first, last, ACT_K):
            largest, poison = _ZERO, _ZERO
            for i in range(k, k + ACT_K):
                value = bf16_as_f32(x[i])
                poison += value * _ZERO
                largest = max(largest, abs(value))
            scale, inverse = scales_of(row, k, ACT_K, largest, Q8_K)
            poke_f32(scale_at(row, K, k // ACT_K), scale + poison)
            for group in range(k, k + ACT_K, SUM_K):
                total = 0
                for i in range(group, group + SUM_K):
                    q = types.int32(bf16_as_f32(x[i]) * inverse + _ROUND - _ROUND)
                    codes[i] = types.int8(q)
                    total += q
                poke_sum(sum_at(row, K, group // SUM_K), total)

    return quantize
