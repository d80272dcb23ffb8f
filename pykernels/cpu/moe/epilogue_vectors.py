"""The epilogues in vectors of AVX-512 or AVX2.

exp is the classic reduction: ``2**n * exp(r)`` with ``|r| <= ln 2 / 2``, r by two-step subtraction
of ``n ln 2`` (Cody-Waite) and a degree-6 Taylor-like minimax polynomial (the coefficients of
Cephes' ``expf``), within 2 ulp.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ...shapes import ExpertSpec
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


@functools.cache
def make_epilogue(name: str, f: Any, N: int, store_bf16: Any, spec: ExpertSpec) -> Epilogue:
    """The epilogues of a spec in vectors of N floats.

    Args:
        f: module of intrinsics, ``intrin.avx512`` or ``intrin.avx2``.
        store_bf16: ``store_bf16(address, floats)``.
    """
    BIAS, CLAMPED, OFFSET = spec.bias, math.isfinite(spec.limit), spec.up_offset != 0
    limit, up_offset = np.float32(spec.limit), np.float32(spec.up_offset)
    minus_limit, minus_alpha = np.float32(-spec.limit), np.float32(-spec.alpha)
    CUBIC, cubic = spec.cubic != 0, np.float32(spec.cubic)

    @inlined
    def exp_f32(x):
        """NaN stays NaN."""
        x = f.max_f32(f.broadcast_f32(_LOWEST), f.min_f32(f.broadcast_f32(_HIGHEST), x))
        n = f.round_f32(f.mul_f32(x, f.broadcast_f32(_LOG2E)))
        r = f.fma_f32(n, f.broadcast_f32(_LN2_HIGH), x)
        r = f.fma_f32(n, f.broadcast_f32(_LN2_LOW), r)
        p = f.fma_f32(f.broadcast_f32(_P0), r, f.broadcast_f32(_P1))
        p = f.fma_f32(p, r, f.broadcast_f32(_P2))
        p = f.fma_f32(p, r, f.broadcast_f32(_P3))
        p = f.fma_f32(p, r, f.broadcast_f32(_P4))
        p = f.fma_f32(p, r, f.broadcast_f32(_P5))
        p = f.fma_f32(f.mul_f32(r, r), p, f.add_f32(r, f.broadcast_f32(_ONE)))
        return f.scale_exp2_f32(p, n)

    @inlined
    def swiglu(gate, up, bias, h):
        """``gate / (1 + exp(-z)) * (up + up_offset)``."""
        for i in range(32 // N):
            g, u = f.load_f32(gate + 4 * N * i), f.load_f32(up + 4 * N * i)
            if BIAS:
                g = f.add_f32(g, f.load_f32(bias + 4 * N * i))
                u = f.add_f32(u, f.load_f32(bias + 128 + 4 * N * i))
            if CLAMPED:  # the operand that is NaN stays, being the second one
                g = f.min_f32(f.broadcast_f32(limit), g)
                u = f.min_f32(f.broadcast_f32(limit), u)
                u = f.max_f32(f.broadcast_f32(minus_limit), u)
            z = f.mul_f32(g, f.broadcast_f32(minus_alpha))
            if CUBIC:
                square = f.mul_f32(g, g)
                z = f.mul_f32(z, f.fma_f32(square, f.broadcast_f32(cubic), f.broadcast_f32(_ONE)))
            e = exp_f32(z)
            if OFFSET:
                u = f.add_f32(u, f.broadcast_f32(up_offset))
            value = f.mul_f32(f.div_f32(g, f.add_f32(e, f.broadcast_f32(_ONE))), u)
            store_bf16(h + 2 * N * i, value)

    @inlined
    def weighted_add(weight, value, bias, acc):
        for i in range(32 // N):
            at, v = acc + 4 * N * i, f.load_f32(value + 4 * N * i)
            if BIAS:
                v = f.add_f32(v, f.load_f32(bias + 4 * N * i))
            sums = f.fma_f32(f.broadcast_f32(weight), v, f.load_f32(at))
            f.store_f32(at, sums)

    return Epilogue(f"{name}-{spec.name}", spec, swiglu, weighted_add)
