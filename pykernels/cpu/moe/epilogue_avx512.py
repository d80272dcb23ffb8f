"""The epilogues in AVX-512, 16 outputs at a time.

exp is the classic reduction: ``2**n * exp(r)`` with ``|r| <= ln 2 / 2``, r by two-step subtraction
of ``n ln 2`` (Cody-Waite) and a degree-6 Taylor-like minimax polynomial (the coefficients of
Cephes' ``expf``), within 2 ulp.
"""

from __future__ import annotations

import functools

import numpy as np

from ..intrin.avx512 import (
    add_f32,
    broadcast_f32,
    div_f32,
    fma_f32,
    load_f32,
    max_f32,
    min_f32,
    mul_f32,
    round_f32,
    scale_exp2_f32,
    store_f32,
)
from ..isa import Instructions
from ..jit import inlined
from .epilogue import Epilogue

_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(-0.693359375)
_LN2_LOW = np.float32(2.12194440e-4)
_P0, _P1, _P2, _P3, _P4, _P5 = (
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
_ONE = np.float32(1.0)
_LOWEST, _HIGHEST = np.float32(-104.0), np.float32(104.0)  # beyond, expf is 0 or infinity


@inlined
def exp_f32(x):
    """exp of 16 floats; NaN stays NaN."""
    x = max_f32(broadcast_f32(_LOWEST), min_f32(broadcast_f32(_HIGHEST), x))
    n = round_f32(mul_f32(x, broadcast_f32(_LOG2E)))
    r = fma_f32(n, broadcast_f32(_LN2_HIGH), x)
    r = fma_f32(n, broadcast_f32(_LN2_LOW), r)
    p = fma_f32(broadcast_f32(_P0), r, broadcast_f32(_P1))
    p = fma_f32(p, r, broadcast_f32(_P2))
    p = fma_f32(p, r, broadcast_f32(_P3))
    p = fma_f32(p, r, broadcast_f32(_P4))
    p = fma_f32(p, r, broadcast_f32(_P5))
    p = fma_f32(mul_f32(r, r), p, add_f32(r, broadcast_f32(_ONE)))
    return scale_exp2_f32(p, n)


@inlined
def silu_mul_f32(gate, up):
    """``gate / (1 + exp(-gate)) * up``."""
    e = exp_f32(mul_f32(gate, broadcast_f32(np.float32(-1.0))))
    return mul_f32(div_f32(gate, add_f32(e, broadcast_f32(_ONE))), up)


@functools.cache
def make_epilogue(ops: Instructions) -> Epilogue:
    """The epilogues by the instructions of ``ops``."""
    store_bf16 = ops.store_bf16

    @inlined
    def silu_mul(gate, up, h):
        for i in range(2):
            value = silu_mul_f32(load_f32(gate + 64 * i), load_f32(up + 64 * i))
            store_bf16(h + 32 * i, value)

    return Epilogue(ops.name, silu_mul, _weighted_add)


@inlined
def _weighted_add(weight, value, acc):
    for i in range(2):
        at = acc + 64 * i
        store_f32(at, fma_f32(broadcast_f32(weight), load_f32(value + 64 * i), load_f32(at)))
