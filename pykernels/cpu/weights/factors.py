"""What a group of inputs is multiplied by, from a format's packed scales.

A group is ``SCALE_K`` inputs of one output: its products are summed without any scale and go into
the running sum with one multiply-add (OSDI'26 Figure 10). K-quants have a scale and a minimum for
each group, small integers under two halves for each superblock of 256 inputs: their products with
the half are exact in float32. So are a scale's with a zero point, which make a minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..jit import inlined
from ..words import f32
from .layout import GROUP_HALVES, GROUP_ZERO, SUPER_NVFP4, SUPERBLOCKS, TERNARY, Superblock
from .nibbles import Nibbles


@dataclass(frozen=True)
class Factors:
    """Factors of a block's groups.

    Attributes:
        factor: ``factor(scale, group, part) -> floats``, of a vector of outputs, the ``part``-th of
            the block's 32; ``scale`` is the address of the block's. None for no scales.
        minimum: likewise, what every weight of the group lies below ``factor * q``; None for zero.
    """

    factor: Callable | None = None
    minimum: Callable | None = None


def make_factors(vectors: Any, nibbles: Nibbles, N: int) -> dict[str, Factors]:
    """By format name, in vectors of N outputs.

    Args:
        vectors: the module of intrinsics, ``intrin.avx512`` or ``intrin.avx2``.
        nibbles: loads of halves of bytes into these vectors.
    """
    broadcast_f32, load_f32 = vectors.broadcast_f32, vectors.load_f32
    load_bf16, load_f16, mul_f32 = vectors.load_bf16, vectors.load_f16, vectors.mul_f32
    load_u8_as_f32, load_i8_as_f32 = vectors.load_u8_as_f32, vectors.load_i8_as_f32
    load_e4m3_halved = vectors.load_e4m3_halved

    @inlined
    def for_block(scale, group, part):
        return broadcast_f32(f32(scale, group))

    @inlined
    def for_outputs(scale, group, part):
        return load_f32(scale + 4 * N * part)

    @inlined
    def bf16_groups(scale, group, part):
        return load_bf16(scale + 64 * group + 2 * N * part)

    @inlined
    def f16_groups(scale, group, part):
        return load_f16(scale + 64 * group + 2 * N * part)

    @inlined
    def halves_factor(scale, group, part):
        return load_f16(scale + GROUP_HALVES * group + 2 * N * part)

    @inlined
    def halves_minimum(scale, group, part):
        return load_f16(scale + GROUP_HALVES * group + 64 + 2 * N * part)

    @inlined
    def zero_factor(scale, group, part):
        return load_f16(scale + GROUP_ZERO * group + 2 * N * part)

    @inlined
    def zero_minimum(scale, group, part):
        at = scale + GROUP_ZERO * group
        return mul_f32(load_f16(at + 2 * N * part), load_u8_as_f32(at + 64 + N * part))

    @inlined
    def nvfp4(scale, group, part):
        at = scale + (group >> 4) * SUPER_NVFP4
        small = load_e4m3_halved(at + 128 + 32 * (group & 15) + N * part)
        return mul_f32(load_f32(at + 4 * N * part), small)

    def superblock(of: Superblock) -> Factors:
        SHIFT, MASK, NBYTES = of.shift, (1 << of.shift) - 1, of.nbytes
        FIRST, STEP, UNIT = of.first, of.step, np.float32(of.unit)
        load_small = load_u8_as_f32 if of.minima else load_i8_as_f32
        load_less, LESS = load_u8_as_f32, 32  # bytes behind a group's scales
        if of.nibbles:
            load_small, load_less, LESS = nibbles.low_as_f32, nibbles.high_as_f32, 0

        @inlined
        def factor(scale, group, part):
            at = scale + (group >> SHIFT) * NBYTES
            small = load_small(at + FIRST + STEP * (group & MASK) + N * part)
            if UNIT != 1:
                small = mul_f32(small, broadcast_f32(UNIT))
            return mul_f32(load_f16(at + 2 * N * part), small)

        @inlined
        def minimum(scale, group, part):
            at = scale + (group >> SHIFT) * NBYTES
            small = load_less(at + FIRST + LESS + STEP * (group & MASK) + N * part)
            if UNIT != 1:
                small = mul_f32(small, broadcast_f32(UNIT))
            return mul_f32(load_f16(at + 64 + 2 * N * part), small)

        return Factors(factor, minimum if of.minima else None)

    groups, channel = Factors(bf16_groups), Factors(for_outputs)
    f16, halves = Factors(f16_groups), Factors(halves_factor, halves_minimum)
    zero = Factors(zero_factor, zero_minimum)
    return {
        "bf16": Factors(),
        "f16": Factors(),
        "fp8": Factors(for_block),
        "fp8-channel": channel,
        "int8": groups,
        "int8-channel": channel,
        "int4": groups,
        "int4-g128": groups,
        "int4-channel": channel,
        "int4-zp": zero,
        "int4-zp-g128": zero,
        "mxfp4": groups,
        "nvfp4": Factors(nvfp4),
        "q8_0": f16,
        "q4_0": f16,
        "q4_1": halves,
        "q5_0": f16,
        "q5_1": halves,
        "iq4_nl": f16,
        **dict.fromkeys(TERNARY, f16),
        **{fmt: superblock(of) for fmt, of in SUPERBLOCKS.items()},
    }
