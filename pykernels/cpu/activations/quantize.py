"""Makes a row's annotations (``rows``) from its bfloat16 inputs: sums, int8 codes, digits.

Which annotations of its input rows a kernel asks for.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, types

from ...quant import get_format
from ...quant.activations import DIGITS, DIGITS_K, DIGITS_SHIFT, GROUPS
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
    shift_digit,
    store_low_bytes,
    sum_i32,
    to_i32,
    zero_i32,
)
from ..intrin.registers import i32x16_array
from ..intrin.scalar import bf16_as_f32, bits_from_f32, f32_from_bits
from ..intrin.sync import as_pointer
from ..jit import inlined, routine
from ..job import poke_f32
from ..weights.layout import BIASES, INTEGERS, LIFTS
from ..weights.scales import SCALES
from .int8_slices import LIFT_BITS, SHORT
from .row_layout import (
    SUM_UNIT,
    Annotation,
    codes_at,
    digits_at,
    lowest_at,
    offset_at,
    scale_at,
    sum_at,
    unit_sum_at,
)


def annotation(fmt: str, activations: str, exact: str = "decoded") -> Annotation | None:
    """What ``annotate.make_annotate`` shall do for a format's tiles; None for nothing.

    bf16 activations need sums where weights have minima or are lifted, int8 ones codes, scales and
    sums, which a bias of the weights' codes makes integers.

    Args:
        exact: how integer weights meet bf16 activations (``products``): "decoded", "lifted" or as
            "digits".
    """
    scales = SCALES[fmt]
    if activations == "bf16" and exact == "digits" and fmt in INTEGERS:
        return Annotation("digits", DIGITS_K, scales.k, BIASES.get(fmt, 0), bool(scales.minimum))
    if activations == "bf16":
        wanted = scales.minimum or (exact == "lifted" and fmt in LIFTS)
        return Annotation("sums", 0, scales.k) if wanted else None
    kind = get_format(fmt).int8_kind
    assert kind is not None, "registry lets no other format pass"
    return Annotation(kind, GROUPS[kind], scales.k, BIASES.get(fmt, 0))


_MAX = np.float32(127.0)
_ONE, _ZERO, _INFINITY = np.float32(1.0), np.float32(0.0), np.float32(np.inf)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves no fraction bits, ties to even
_LEAST = np.uint32(DIGITS_SHIFT + 8)  # the least exponent (biased) whose scale is a normal number


@functools.cache
def make_annotate(how: Annotation, generic: bool) -> Any:
    """Compiles ``annotate(row, K, first, last)`` for inputs ``first .. last - 1``.

    ``first`` and ``last`` are multiples of ``how.k``. A NaN or infinity makes its scale NaN.

    Args:
        generic: whether to do without AVX-512.
    """
    if how.kind == "sums":
        body = _generic_sums(how.sum_k) if generic else _sums(how.sum_k)
    elif how.kind == "digits":
        body = _digits(how)
    else:
        make = _generic_quantize if generic else _quantize
        body = make(how)
    name = f"{how.name}-{'generic' if generic else 'avx512'}"

    @routine(4, name)
    def annotate(row, K, first, last):
        body(row, K, first, last)
        return 0

    return annotate


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


@inlined
def _poke_i32(address, value):
    carray(as_pointer(address), (1,), types.int32)[0] = value


def _make_poke_sum(BIAS: int):
    """``poke_sum(to, total)``: stores what tiles take of the sum of a group's int8 codes."""

    @inlined
    def poke_sum(to, total):
        if BIAS != 0:
            _poke_i32(to, -BIAS * total)
        else:
            poke_f32(to, types.float32(total))

    return poke_sum


def _quantize(how: Annotation):
    ACT_K, SUM_K, Q8_K = how.act_k, how.sum_k, how.kind == "q8_k"
    poke_sum = _make_poke_sum(how.bias)
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
                poke_sum(sum_at(row, K, k // SUM_K + group), sum_i32(total))

    return quantize


def _digits(how: Annotation):
    SUM_K, BIAS, SUMS = how.sum_k, how.bias, how.sums
    sum_of, PER_UNIT = _make_sum(SUM_K), np.float32(1 / SUM_UNIT)

    @inlined
    def digits(row, K, first, last):
        for k in range(first, last, DIGITS_K):
            highest, poison = zero_f32(), zero_f32()
            for i in range(0, DIGITS_K, 16):
                x = load_bf16(row + 2 * (k + i))
                highest = max_f32(abs_f32(x), highest)
                poison = fma_f32(x, zero_f32(), poison)
            # 2**e and 2**-e from the bits of the largest, whose own exponent is ``top``.
            top = max(bits_from_f32(largest_f32(highest)) >> types.uint32(23), _LEAST)
            scale = f32_from_bits(types.uint32((top - _LEAST + 1) << types.uint32(23)))
            inverse = f32_from_bits(types.uint32((_LEAST + 253 - top) << types.uint32(23)))
            poke_f32(scale_at(row, K, k // DIGITS_K), scale + sum_f32(poison))
            whole = zero_i32()
            for group in range(k, k + DIGITS_K, SUM_K):
                totals = i32x16_array(DIGITS)
                for j in range(DIGITS):
                    totals[j] = zero_i32()
                for i in range(group, group + SUM_K, 16):
                    q = to_i32(mul_f32(load_bf16(row + 2 * i), broadcast_f32(inverse)))
                    whole = or_i32(whole, q)
                    for j in range(DIGITS):
                        # Signed digits: what is left above one is rounded to nearest.
                        store_low_bytes(digits_at(row, K, i, DIGITS - 1 - j), q)
                        totals[j] = add_i32(totals[j], q)
                        q = shift_digit(q)
                if SUMS:
                    total, index = sum_of(row, group), group // SUM_K
                    poke_f32(sum_at(row, K, index), total)
                    poke_f32(unit_sum_at(row, K, index), total * inverse * PER_UNIT)
                if BIAS != 0:
                    for j in range(DIGITS):
                        above = sum_i32(totals[j + 1]) if j + 1 < DIGITS else 0
                        total = sum_i32(totals[j]) - 256 * above
                        digit = DIGITS - 1 - j
                        lift = LIFT_BITS if digit < SHORT else 0
                        _poke_i32(offset_at(row, K, group // SUM_K, digit), lift - BIAS * total)
            _poke_i32(lowest_at(row, K, k // DIGITS_K), low_bytes_i32(whole))

    return digits


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


def _generic_quantize(how: Annotation):
    ACT_K, SUM_K, Q8_K = how.act_k, how.sum_k, how.kind == "q8_k"
    poke_sum = _make_poke_sum(how.bias)

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
                poke_sum(sum_at(row, K, group // SUM_K), total)

    return quantize
