"""A token's inputs as the tiles read them: one row of bytes, annotated once, read by every block.

====================  ==========================  ==================================================
offset (bytes)        what                        for
====================  ==========================  ==================================================
``0``                 bfloat16 [K]                bf16 products
``2 K``               int8 [K]                    int8 products
``3 K``               float32 [K / act_k]         their scales, one for ``act_k`` inputs
``3 K + K / 32``      float32 [K / scale_k]       sums of each group's bf16 inputs, or int8 codes
====================  ==========================  ==================================================

K is padded. Everything behind the bfloat16 is made from it by ``annotate``, and only where a format
asks: sums for its minima or biases, codes for int8 activations (``quant.activations`` has the
rules and the reference).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray, types

from ..quant.layout import ceil_to
from .intrin.avx512 import (
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
from .intrin.avx512_bytes import add_i32, store_low_bytes, sum_i32, to_i32, zero_i32
from .intrin.scalar import bf16_as_f32
from .intrin.sync import as_pointer
from .jit import inlined, routine
from .job import f32, poke_f32

_MAX = np.float32(127.0)
_ONE, _ZERO, _INFINITY = np.float32(1.0), np.float32(0.0), np.float32(np.inf)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves no fraction bits, ties to even


@dataclass(frozen=True)
class Annotation:
    """What is made of a row.

    Attributes:
        kind: "sums", "q8" or "q8_k".
        act_k: inputs of one activation scale (128 or 256; of no use to "sums").
        sum_k: inputs of one sum.
    """

    kind: str
    act_k: int
    sum_k: int

    @property
    def k(self) -> int:
        """Inputs that are annotated together."""
        return self.sum_k if self.kind == "sums" else self.act_k


def row_bytes(K: int) -> int:
    """Bytes of a row of K (padded) inputs, with room for every annotation."""
    return ceil_to(3 * K + K // 32 + K // 4, 64)


@inlined
def codes_at(row, K):
    """Address of a row's int8 codes."""
    return row + 2 * K


@inlined
def scale_at(row, K, index):
    """Address of the ``index``-th activation scale."""
    return row + 3 * K + 4 * index


@inlined
def sum_at(row, K, index):
    """Address of the ``index``-th sum."""
    return row + 3 * K + K // 32 + 4 * index


@functools.cache
def make_annotate(how: Annotation, generic: bool) -> Any:
    """Compiles ``annotate(row, K, first, last)`` for inputs ``first .. last - 1``.

    ``first`` and ``last`` are multiples of ``how.k``. A NaN or infinity makes its scale NaN.

    Args:
        generic: whether to do without AVX-512.
    """
    if how.kind == "sums":
        body = _generic_sums(how.sum_k) if generic else _sums(how.sum_k)
    else:
        make = _generic_quantize if generic else _quantize
        body = make(how.act_k, how.sum_k, how.kind == "q8_k")
    name = f"{how.kind}-{how.act_k}-{how.sum_k}-{'generic' if generic else 'avx512'}"

    @routine(4, name)
    def annotate(row, K, first, last):
        body(row, K, first, last)
        return 0

    return annotate


def _sums(SUM_K: int):
    @inlined
    def sums(row, K, first, last):
        for k in range(first, last, SUM_K):
            total = zero_f32()
            for i in range(0, SUM_K, 16):
                total = add_f32(total, load_bf16(row + 2 * (k + i)))
            poke_f32(sum_at(row, K, k // SUM_K), sum_f32(total))

    return sums


@inlined
def _extreme(row, k, count, largest):
    """Of the inputs of magnitude ``largest``, the first one."""
    for i in range(k, k + count):
        value = bf16_as_f32(carray(as_pointer(row), (i + 1,), types.uint16)[i])
        if abs(value) == largest:
            return value
    return largest


@inlined
def _scales(row, k, count, largest, q8_k):
    """(scale, its inverse) of a group whose largest magnitude is given."""
    if q8_k:  # ggml's block_q8_K: the extreme input becomes -127
        inverse = -_MAX / _extreme(row, k, count, largest)
        scale = _ONE / inverse
    else:
        scale = largest / _MAX
        inverse = _ONE / scale
    if not abs(inverse) < _INFINITY:  # zeros, or all too small to tell
        return _ZERO, _ZERO
    return scale, inverse


def _quantize(ACT_K: int, SUM_K: int, Q8_K: bool):
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
            scale, inverse = _scales(row, k, ACT_K, largest, Q8_K)
            poke_f32(scale_at(row, K, k // ACT_K), scale + sum_f32(poison))
            for group in range(SUMS):
                total = zero_i32()
                for i in range(PER_SUM):
                    at = k + group * SUM_K + 16 * i
                    q = to_i32(mul_f32(load_bf16(row + 2 * at), broadcast_f32(inverse)))
                    store_low_bytes(codes_at(row, K) + at, q)
                    total = add_i32(total, q)
                poke_f32(sum_at(row, K, k // SUM_K + group), types.float32(sum_i32(total)))

    return quantize


def _generic_sums(SUM_K: int):
    @inlined
    def sums(row, K, first, last):
        x = carray(as_pointer(row), (last,), types.uint16)
        for k in range(first, last, SUM_K):
            total = _ZERO
            for i in range(k, k + SUM_K):
                total += bf16_as_f32(x[i])
            poke_f32(sum_at(row, K, k // SUM_K), total)

    return sums


def _generic_quantize(ACT_K: int, SUM_K: int, Q8_K: bool):
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
            scale, inverse = _scales(row, k, ACT_K, largest, Q8_K)
            poke_f32(scale_at(row, K, k // ACT_K), scale + poison)
            for group in range(k, k + ACT_K, SUM_K):
                total = 0
                for i in range(group, group + SUM_K):
                    q = types.int32(bf16_as_f32(x[i]) * inverse + _ROUND - _ROUND)
                    codes[i] = types.int8(q)
                    total += q
                poke_f32(sum_at(row, K, group // SUM_K), types.float32(total))

    return quantize


@inlined
def activation_scale(row, K, k, ACT_K):
    """The activation scale of input k."""
    return f32(scale_at(row, K, k // ACT_K), 0)


@inlined
def group_sum(row, K, group):
    """The ``group``-th sum."""
    return f32(sum_at(row, K, group), 0)
