"""How a group of a row's bfloat16 inputs becomes int8 codes: what both implementations share.

``quantize_vectors`` and ``quantize_portable`` compile ``quantize_row(row, K, first, last)``, which
makes what a ``RowFormat`` needs of inputs ``first .. last - 1`` (multiples of ``how.k``): sums,
int8 codes with their scales, or int8 slices. A NaN or infinity makes its group's scale NaN.
``quant.activations`` has the rules and the reference; the bytes are the same from either.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types

from ..intrin.scalar import bf16_as_f32
from ..intrin.sync import as_pointer
from ..jit import inlined
from ..words import poke_f32

_MAX = np.float32(127.0)
_ONE, _ZERO, _INFINITY = np.float32(1.0), np.float32(0.0), np.float32(np.inf)


@inlined
def _extreme(row, k, count, largest):
    """The first input whose magnitude is ``largest``."""
    for i in range(k, k + count):
        value = bf16_as_f32(carray(as_pointer(row), (i + 1,), types.uint16)[i])
        if abs(value) == largest:
            return value
    return largest


@inlined
def scales_of(row, k, count, largest, q8_k):
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
def poke_i32(address, value):
    """Sets the int32 at ``address``."""
    carray(as_pointer(address), (1,), types.int32)[0] = value


def make_poke_sum(BIAS: int):
    """``poke_sum(to, total)``: stores what tiles take of the sum of a group's int8 codes."""

    @inlined
    def poke_sum(to, total):
        if BIAS != 0:
            poke_i32(to, -BIAS * total)
        else:
            poke_f32(to, types.float32(total))

    return poke_sum
