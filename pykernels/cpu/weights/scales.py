"""Where a format's scales lie, and what a group of inputs is multiplied by.

A group is ``SCALE_K`` inputs of one output: its products are summed without any scale and go into
the running sum with one multiply-add (OSDI'26 Figure 10). K-quants have a scale and a minimum for
each group, small integers under two halves for each superblock of 256 inputs: their products with
the half are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..intrin.avx512 import (
    broadcast_f32,
    load_bf16,
    load_f16,
    load_f32,
    load_i8_as_f32,
    load_u8_as_f32,
    mul_f32,
)
from ..intrin.avx512_words import load_i8_as_word_pairs, load_powers
from ..jit import inlined
from ..job import f32
from .layout import SCALE_K, SUPERBLOCK_K6, SUPERBLOCK_K45


@dataclass(frozen=True)
class Scales:
    """A block's scales.

    Attributes:
        k: inputs of a group; 0 for no scales.
        factor: ``factor(scale, group, half) -> f32x16``, of 16 outputs; ``scale`` is the address of
            the block's.
        minimum: likewise, what every weight of the group lies below ``factor * q``; None for zero.
        whole: whether all groups of an output have the same factor.
        power: ``power(scale, group, half)``: the factor is a power of two, and this is what it adds
            to a bfloat16 as a word, for each of 16 outputs twice; None for other factors.
        small: ``small(scale, group, half)``: the factor is this integer of 8 bits, each of 16 twice
            as a 16-bit word, times ``super_factor`` of ``super_k`` inputs; None for no such thing.
        small_minimum: likewise: the minimum is this integer as a float, times ``super_minimum``.
    """

    k: int = 0
    factor: Callable | None = None
    minimum: Callable | None = None
    small: Callable | None = None
    super_k: int = 0
    super_factor: Callable | None = None
    whole: bool = False
    power: Callable | None = None
    small_minimum: Callable | None = None
    super_minimum: Callable | None = None


@inlined
def _for_block(scale, group, half):
    return broadcast_f32(f32(scale, group))


@inlined
def _for_outputs(scale, group, half):
    return load_f32(scale + 64 * half)


@inlined
def _bf16_groups(scale, group, half):
    return load_bf16(scale + 64 * group + 32 * half)


@inlined
def _bf16_powers(scale, group, half):
    return load_powers(scale + 64 * group + 32 * half)


@inlined
def _f16_groups(scale, group, half):
    return load_f16(scale + 64 * group + 32 * half)


@inlined
def _k45_factor(scale, group, half):
    at = scale + (group >> 3) * SUPERBLOCK_K45
    small = load_u8_as_f32(at + 128 + 64 * (group & 7) + 16 * half)
    return mul_f32(load_f16(at + 32 * half), small)


@inlined
def _k45_minimum(scale, group, half):
    small = _k45_small_minimum(scale, group, half)
    return mul_f32(_k45_super_minimum(scale, group >> 3, half), small)


@inlined
def _k6_factor(scale, group, half):
    at = scale + (group >> 4) * SUPERBLOCK_K6
    small = load_i8_as_f32(at + 64 + 32 * (group & 15) + 16 * half)
    return mul_f32(load_f16(at + 32 * half), small)


@inlined
def _k45_small(scale, group, half):
    at = scale + (group >> 3) * SUPERBLOCK_K45
    return load_i8_as_word_pairs(at + 128 + 64 * (group & 7) + 16 * half)


@inlined
def _k45_super_factor(scale, group, half):
    return load_f16(scale + group * SUPERBLOCK_K45 + 32 * half)


@inlined
def _k45_small_minimum(scale, group, half):
    at = scale + (group >> 3) * SUPERBLOCK_K45
    return load_u8_as_f32(at + 160 + 64 * (group & 7) + 16 * half)


@inlined
def _k45_super_minimum(scale, group, half):
    return load_f16(scale + group * SUPERBLOCK_K45 + 64 + 32 * half)


@inlined
def _k6_small(scale, group, half):
    at = scale + (group >> 4) * SUPERBLOCK_K6
    return load_i8_as_word_pairs(at + 64 + 32 * (group & 15) + 16 * half)


@inlined
def _k6_super_factor(scale, group, half):
    return load_f16(scale + group * SUPERBLOCK_K6 + 32 * half)


_GROUPS = Scales(factor=_bf16_groups)
_CHANNEL = Scales(factor=_for_outputs, whole=True)
_K45 = Scales(
    factor=_k45_factor, minimum=_k45_minimum,
    small=_k45_small, super_k=256, super_factor=_k45_super_factor,
    small_minimum=_k45_small_minimum, super_minimum=_k45_super_minimum,
)  # fmt: skip
_K6 = Scales(factor=_k6_factor, small=_k6_small, super_k=256, super_factor=_k6_super_factor)

_SCALES = {
    "bf16": Scales(),
    "fp8": Scales(factor=_for_block),
    "fp8-channel": _CHANNEL,
    "int8": _GROUPS,
    "int8-channel": _CHANNEL,
    "int4": _GROUPS,
    "int4-g128": _GROUPS,
    "int4-channel": _CHANNEL,
    "mxfp4": Scales(factor=_bf16_groups, power=_bf16_powers),
    "q4_k": _K45,
    "q5_k": _K45,
    "q6_k": _K6,
    "q8_0": Scales(factor=_f16_groups),
}

SCALES = {fmt: replace(scales, k=SCALE_K[fmt]) for fmt, scales in _SCALES.items()}
"""By format name."""
