"""The epilogues in plain Numba, which LLVM vectorizes with what the CPU has."""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray, types

from ...shapes import ExpertSpec
from ..intrin.scalar import round_bf16
from ..intrin.sync import as_pointer
from ..jit import inlined
from .epilogue import Epilogue


@inlined
def _floats(address, count):
    return carray(as_pointer(address), (count,), types.float32)


@functools.cache
def make_epilogue(spec: ExpertSpec) -> Epilogue:
    """The epilogues of a spec."""
    BIAS, limit, offset = spec.bias, np.float32(spec.limit), np.float32(spec.up_offset)
    minus_alpha = np.float32(-spec.alpha)
    CUBIC, cubic = spec.cubic != 0, np.float32(spec.cubic)

    @inlined
    def swiglu(gate, up, bias, h):
        gates, ups = _floats(gate, 32), _floats(up, 32)
        biases = _floats(bias, 64)
        out = carray(as_pointer(h), (32,), types.uint16)
        for n in range(32):
            g, u = gates[n], ups[n]
            if BIAS:
                g, u = g + biases[n], u + biases[32 + n]
            g = limit if g > limit else g  # NaN stays NaN
            u = limit if u > limit else (-limit if u < -limit else u)
            z = minus_alpha * g
            if CUBIC:
                z = z * (types.float32(1) + cubic * g * g)
            glu = g / (types.float32(1) + types.float32(math.exp(z)))
            out[n] = round_bf16(types.float32(glu * (u + offset)))

    @inlined
    def weighted_add(weight, value, bias, acc):
        sums, values, biases = _floats(acc, 32), _floats(value, 32), _floats(bias, 32)
        for n in range(32):
            sums[n] += weight * (values[n] + biases[n] if BIAS else values[n])

    return Epilogue(f"generic-{spec.name}", spec, swiglu, weighted_add)
