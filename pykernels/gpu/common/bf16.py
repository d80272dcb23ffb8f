"""bfloat16 arithmetic that the interpreter, which keeps bfloat16 as bare bits, does as well.

Compiled, these are the instructions that they look like. Interpreted, operands become float32 and
results are rounded once: the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, in float32."""
    if INTERPRETED:
        acc += tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def to_bf16(x):
    """float32 -> bfloat16, to nearest even (the interpreter's own conversion cuts)."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536  # what is cut: it would spoil zeros
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def times(a, b):
    """bfloat16 a * b, rounded once."""
    if INTERPRETED:
        product = to_bf16(a.to(tl.float32) * b.to(tl.float32))
    else:
        product = a * b
    return product


@triton.jit
def nibble_to_bf16(q):
    """uint8 codes 0 .. 15 -> q - 8, exact: 128 + q is 0x4300 with the code as its low bits."""
    above = (q.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    if INTERPRETED:
        value = (above.to(tl.float32) - 136.0).to(tl.bfloat16)
    else:
        value = above - tl.full((), 136.0, tl.bfloat16)
    return value
