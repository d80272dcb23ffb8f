"""AVX2 tiles in float32 multiply-adds: bf16, f16, E4M3 and 8-bit integers, all exact products.

Weights become floats by shifts and masks: a bf16 is the upper half of one, and an E4M3 byte b is,
as the word ``(b << 8) >> 4`` (signed) masked by 0x87F0, the bf16 of its value times 2**-120,
subnormals included. An int8 in the highest byte of a word is converted as 2**24 times itself, and
an f16 by ``vcvtph2ps``. IQ4_NL's codes are looked up first: its weights are integers of 8 bits. The
inputs are floats in their rows (``activations.row_layout``), scaled so that none of it is lost.

8 outputs have two accumulators, one for the even and one for the odd inputs; of f16, which are
converted as they lie, one for each 4 outputs with the even and the odd inputs side by side.
"""

from __future__ import annotations

from typing import Any

from ..activations.row_layout import float_at
from ..intrin.avx2 import (
    add_f32,
    and_i32,
    broadcast_f32_at,
    broadcast_i32,
    broadcast_pair_at,
    even_lanes,
    first_of_pairs,
    fma_f32,
    load_f16,
    load_f32,
    load_i32,
    odd_lanes,
    second_of_pairs,
    shift_left_i32,
    store_f32,
    to_f32,
    zero_f32,
)
from ..intrin.prefetch import prefetch_l1
from ..intrin.registers import f32x8_array, pin_f32
from ..jit import inlined
from ..weights.codes_avx2 import FACTORS, make_codes, pairs_of_e4m3
from ..weights.layout import PACKINGS, SCALE_K
from ..words import i64
from .avx2_group import Group

E4M3_UNITS = (2.0**60, 2.0**60)

UNITS = dict.fromkeys(("fp8", "fp8-channel"), E4M3_UNITS) | {"bf16": (), "f16": ()}
"""By format name, what a weight as a float is short of; the others are 8-bit integers."""


@inlined
def _pairs(sums, i, pairs, x):
    """Two inputs of 8 outputs, as pairs of bf16."""
    sums[i] = pin_f32(fma_f32(first_of_pairs(pairs), broadcast_f32_at(x), sums[i]))
    x1 = broadcast_f32_at(x + 4)
    sums[i + 1] = pin_f32(fma_f32(second_of_pairs(pairs), x1, sums[i + 1]))


@inlined
def _by_inputs(sums, i):
    return add_f32(sums[i], sums[i + 1])


@inlined
def _by_outputs(sums, i):
    return add_f32(even_lanes(sums[i], sums[i + 1]), odd_lanes(sums[i], sums[i + 1]))


@inlined
def _read_bf16(at, tables):
    return load_i32(at)


@inlined
def _add_bf16(sums, i, pairs, x):
    _pairs(sums, i, pairs, x)


@inlined
def _read_f16(at, tables):
    return load_f16(at), load_f16(at + 16)


@inlined
def _add_f16(sums, i, halves, x):
    a, b = halves
    pair = broadcast_pair_at(x)
    sums[i] = pin_f32(fma_f32(a, pair, sums[i]))
    sums[i + 1] = pin_f32(fma_f32(b, pair, sums[i + 1]))


@inlined
def _read_fp8(at, tables):
    return pairs_of_e4m3(load_i32(at))


@inlined
def _add_fp8(sums, i, pairs, x):
    low, high = pairs
    _pairs(sums, i, low, x)
    _pairs(sums, i, high, x + 8)


@inlined
def _floats(codes):
    high = broadcast_i32(0xFF000000)
    return (
        to_f32(shift_left_i32(codes, 24)),
        to_f32(and_i32(shift_left_i32(codes, 16), high)),
        to_f32(and_i32(shift_left_i32(codes, 8), high)),
        to_f32(and_i32(codes, high)),
    )


@inlined
def _add_int8(sums, i, fours, x):
    a, b, c, d = fours
    sums[i] = fma_f32(a, broadcast_f32_at(x), sums[i])
    sums[i + 1] = fma_f32(b, broadcast_f32_at(x + 4), sums[i + 1])
    sums[i] = pin_f32(fma_f32(c, broadcast_f32_at(x + 8), sums[i]))
    sums[i + 1] = pin_f32(fma_f32(d, broadcast_f32_at(x + 12), sums[i + 1]))


@inlined
def _read_int8(at, tables):
    return _floats(load_i32(at))


_iq4_nl = make_codes("iq4_nl").rows


@inlined
def _read_iq4_nl(at, tables):
    even, odd = _iq4_nl(at, 0, 0, tables)
    return _floats(even), _floats(odd)


@inlined
def _add_iq4_nl(sums, i, both, x):
    even, odd = both
    _add_int8(sums, i, even, x)
    _add_int8(sums, i, odd, x + 16)


_FP8 = _read_fp8, _add_fp8, _by_inputs

_PRODUCTS = {
    "bf16": (_read_bf16, _add_bf16, _by_inputs),
    "f16": (_read_f16, _add_f16, _by_outputs),
    "fp8": _FP8,
    "fp8-channel": _FP8,
    **dict.fromkeys(("iq4_nl", "iq4_xs"), (_read_iq4_nl, _add_iq4_nl, _by_inputs)),
}
"""By format name: ``read(address of 32 bytes, tables)``; ``add(sums, i, what it gave, x)``: floats
at x times it go to the two accumulators from i on; ``total(sums, i)`` of those."""

_INTEGERS = _read_int8, _add_int8, _by_inputs


def make_group(fmt: str, M: int) -> Group:
    """The group of M tokens, at most 4, by rows of floats."""
    packing, factor_of = PACKINGS[fmt], FACTORS[fmt].factor
    read, add_floats, total = _PRODUCTS.get(fmt, _INTEGERS)
    FACTOR, GROUP = factor_of is not None, SCALE_K[fmt] or packing.k_step
    factor_of_any: Any = factor_of
    PIECE = min(GROUP, packing.k_step)
    SIDES = 2 if M <= 2 else 1
    SUMS = 2 * SIDES * M
    LINE_K = packing.k_step // (packing.tile_bytes // 64)

    @inlined
    def add(outs, tile, first, side, k, near, LINES, scale, quarter, rows, K, tables):
        sums = f32x8_array(SUMS)
        for i in range(SUMS):
            sums[i] = pin_f32(zero_f32())  # else the first products are vmulps
        start = tile + 64 * (first // LINE_K) + 32 * side
        for line in range(PIECE // LINE_K):
            if line < LINES:
                prefetch_l1(near + 64 * line)
            for s in range(SIDES):
                weights = read(start + 64 * line + 32 * s, tables)
                for t in range(M):
                    x = float_at(i64(rows, t), K, k + LINE_K * line)
                    add_floats(sums, 2 * (s * M + t), weights, x)
        for s in range(SIDES):
            if FACTOR:
                factor = factor_of_any(scale, k // GROUP, quarter + s)
            for t in range(M):
                i, to = 2 * (s * M + t), outs + 128 * t + 32 * (quarter + s)
                value = total(sums, i)
                if FACTOR:
                    value = fma_f32(value, factor, load_f32(to))
                else:
                    value = add_f32(value, load_f32(to))
                store_f32(to, value)

    return Group(add, PIECE, SIDES, UNITS.get(fmt, (2.0**-24,)))
