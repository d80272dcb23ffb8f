"""The epilogues in plain Numba, which LLVM vectorizes with what the CPU has."""

from __future__ import annotations

import math

from numba import carray, types

from ..intrin.scalar import round_bf16
from ..intrin.sync import as_pointer
from ..jit import inlined
from .epilogue import Epilogue


@inlined
def _floats(address, count):
    return carray(as_pointer(address), (count,), types.float32)


@inlined
def _silu_mul(gate, up, h):
    gates, ups = _floats(gate, 32), _floats(up, 32)
    out = carray(as_pointer(h), (32,), types.uint16)
    for n in range(32):
        g = gates[n]
        silu = g / (types.float32(1) + types.float32(math.exp(-g)))
        out[n] = round_bf16(types.float32(silu * ups[n]))


@inlined
def _weighted_add(weight, value, acc):
    sums, values = _floats(acc, 32), _floats(value, 32)
    for n in range(32):
        sums[n] += weight * values[n]


PORTABLE = Epilogue("generic", _silu_mul, _weighted_add)
