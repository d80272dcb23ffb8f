"""Sums of int8 slices (``quant.activations``) put together, one conversion in place of three.

The integers of the first three chains of products begin at ``MAGIC_BITS``, the bits of ``MAGIC``, a
float32 whose last place is 1: so with a sum of less than 2**22 added they are the bits of ``MAGIC``
plus the sum. What is too much leaves in the first multiply-add, exactly; the sum of ``256 s0``,
``s1`` and a constant of 2**15.6 is rounded once, and once with ``s2``: to 24 bits, each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...quant.activations import SLICES
from ..jit import inlined

SHORT = SLICES - 1
"""Int8Slices of inputs that are none smaller than 2**-14 of the largest of their 128."""

MAGIC_BITS = 0x4B400000
MAGIC = np.uint32(MAGIC_BITS).view(np.float32)  # 1.5 * 2**23

_BASE = np.float32(256.0)
_LESS = np.float32(-257 * float(MAGIC) - float(MAGIC) / 256)
assert float(_LESS) == -257 * float(MAGIC) - float(MAGIC) / 256


class Joins(NamedTuple):
    """How sums of slices are put together.

    Attributes:
        short: ``short(s0, s1, s2)``: ``(256 s0 + s1) 256 + s2`` of sums plus MAGIC_BITS each, at
            most 2**-23 of it off; exact below 2**24.
        lowest: ``lowest(value, s3)``: ``256 value + s3``, the sum of the lowest slices, plain
            integers.
    """

    short: Any
    lowest: Any


def make_joins(floats: Any, integers: Any) -> Joins:
    """By the intrinsics of two modules, of any vector width."""
    add_f32, broadcast_f32, fma_f32 = floats.add_f32, floats.broadcast_f32, floats.fma_f32
    bits_as_f32, to_f32 = integers.bits_as_f32, integers.to_f32

    @inlined
    def short(s0, s1, s2):
        value = fma_f32(bits_as_f32(s0), broadcast_f32(_BASE), broadcast_f32(_LESS))
        value = add_f32(value, bits_as_f32(s1))
        return fma_f32(value, broadcast_f32(_BASE), bits_as_f32(s2))

    @inlined
    def lowest(value, s3):
        return fma_f32(value, broadcast_f32(_BASE), to_f32(s3))

    return Joins(short, lowest)
