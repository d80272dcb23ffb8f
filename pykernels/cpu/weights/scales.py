"""A format's scales as the AVX-512 and AMX kernels read them, 16 outputs at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..intrin import avx512
from ..intrin.avx512 import broadcast_f32, load_f16, load_u8_as_f32, mul_f32
from ..intrin.avx512_words import load_i8_as_word_pairs, load_powers
from ..jit import inlined
from . import nibbles
from .factors import make_factors
from .layout import SCALE_K, SUPERBLOCKS, Superblock


@dataclass(frozen=True)
class Scales:
    """A block's scales.

    Attributes:
        k: inputs of a group; 0 for no scales.
        factor, minimum: ``factors.Factors``, ``part`` being the half of the block.
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
def _bf16_powers(scale, group, half):
    return load_powers(scale + 64 * group + 32 * half)


def _superblock(of: Superblock) -> Scales:
    SHIFT, MASK, NBYTES, FIRST, STEP = of.shift, (1 << of.shift) - 1, of.nbytes, of.first, of.step
    UNIT = np.float32(of.unit)
    load_small = nibbles.OF_16.low_as_word_pairs if of.nibbles else load_i8_as_word_pairs

    @inlined
    def small(scale, group, half):
        at = scale + (group >> SHIFT) * NBYTES
        return load_small(at + FIRST + STEP * (group & MASK) + 16 * half)

    @inlined
    def super_factor(scale, group, half):
        halves = load_f16(scale + group * NBYTES + 32 * half)
        return halves if UNIT == 1 else mul_f32(halves, broadcast_f32(UNIT))

    @inlined
    def small_minimum(scale, group, half):
        at = scale + (group >> SHIFT) * NBYTES
        return load_u8_as_f32(at + FIRST + 32 + STEP * (group & MASK) + 16 * half)

    @inlined
    def super_minimum(scale, group, half):
        halves = load_f16(scale + group * NBYTES + 64 + 32 * half)
        return halves if UNIT == 1 else mul_f32(halves, broadcast_f32(UNIT))

    found = Scales(small=small, super_k=256, super_factor=super_factor)
    # A tile product has no room for 16 minima, so they are floats of each group there.
    if not of.minima or of.shift > 3:
        return found
    return replace(found, small_minimum=small_minimum, super_minimum=super_minimum)


_MORE = {
    **dict.fromkeys(("fp8-channel", "int8-channel", "int4-channel"), Scales(whole=True)),
    "mxfp4": Scales(power=_bf16_powers),
    # The codes of iq4_xs go through a table: its kernels take a group's factor as a float.
    **{fmt: _superblock(of) for fmt, of in SUPERBLOCKS.items() if fmt != "iq4_xs"},
}

SCALES = {
    fmt: replace(_MORE.get(fmt, Scales()), k=SCALE_K[fmt], factor=f.factor, minimum=f.minimum)
    for fmt, f in make_factors(avx512, nibbles.OF_16, 16).items()
}
"""By format name."""
