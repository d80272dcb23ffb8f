"""Weights of every kind to bfloat16, 64 inputs of a tile of rows at a time, as two halves of 32.

Each kind gives ``(first, second)``, bfloat16 [rows, 32]: inputs k .. k + 31 and k + 32 .. k + 63.
A weight is its code times its scale, rounded to bfloat16 once (K-quants: in float32, then rounded),
which is what a dequantized checkpoint in bfloat16 holds.

Sources: OCP 8-bit floating point (E4M3) and Microscaling (E2M1); ``block_q4_K`` and ``block_q6_K``
of ggml-common.h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bf16 import nibble_to_bf16, times, to_bf16


@triton.jit
def e4m3_to_float(code):
    """uint8 -> float32, exact: subnormals and NaN too. For GPUs without an E4M3 type (sm_80, 86).

    Subnormal float32 numbers never occur on the way: a GPU may flush them.
    """
    magnitude = (code & 0x7F).to(tl.int32)
    value = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    # Exponent 0: the line above read 2**-7 (1 + m / 8) where 2**-6 m / 8 was meant.
    value = tl.where(magnitude < 8, 2 * value - 0.015625, value)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    sign = (code & 0x80).to(tl.int32) << 24  # as a bit: compiled, -value is 0 - value, and 0 for 0
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def float_to_e4m3(x):
    """float32 -> uint8, to nearest even; magnitudes above 448 become 448. NaN stays NaN.

    In integers on every GPU, so that all of them quantize alike.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = bits.to(tl.float32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Steps of 2**-9; adding 1.5 * 2**23 rounds to nearest even.
    small = ((magnitude * 512 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.minimum(tl.where(magnitude < 0.015625, small, normal), 0x7E)
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def byte_to_bf16(q):
    """int8 as uint8 -> bfloat16, exact: q + 128 becomes the low bits of 2**23, by one operation."""
    value = (q.to(tl.int32) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
    return value.to(tl.bfloat16)


@triton.jit
def integer_scales(scales, mask, k, N, GROUP: tl.constexpr):
    """bfloat16 scales of inputs k and k + 32 of a tile's rows, from words (see ``gemm.weights``).

    GROUP 0: one scale an output, float32. Shifts are constants: a splat of a number known at run
    time would send the whole tile through shared memory on its way to the product.
    """
    if GROUP == 0:
        own = tl.load(scales, mask=mask, other=0)
        found = own.to(tl.float32, bitcast=True)[:, None]
        first, second = found, found
    else:
        if GROUP == 32:
            word = tl.load(scales + k // 64 * N, mask=mask, other=0)
            s0, s1 = word.to(tl.int16), (word >> 16).to(tl.int16)
        else:
            word = tl.load(scales + k // GROUP * N, mask=mask, other=0)
            s0 = (word >> 16).to(tl.int16)  # of a float32
            s1 = s0
        first = s0.to(tl.bfloat16, bitcast=True)[:, None]
        second = s1.to(tl.bfloat16, bitcast=True)[:, None]
    return first, second


@triton.jit
def weighed(codes, scale, GROUP: tl.constexpr):
    """bfloat16 codes times ``integer_scales``, rounded once."""
    if GROUP == 0:
        product = to_bf16(codes.to(tl.float32) * scale)
    else:
        product = times(codes, scale)
    return product


@triton.jit
def int8_pair(rows, scales, mask, k, N, GROUP: tl.constexpr):
    at = rows[:, None] + (k + tl.arange(0, 32))[None, :]
    s0, s1 = integer_scales(scales, mask, k, N, GROUP)
    q0, q1 = tl.load(at), tl.load(at + 32)
    return weighed(byte_to_bf16(q0), s0, GROUP), weighed(byte_to_bf16(q1), s1, GROUP)


@triton.jit
def e2m1_to_bf16(code):
    """uint8 codes 0 .. 15 -> bfloat16, exact. No subnormal float32 occurs on the way."""
    magnitude = (code & 7).to(tl.int32)
    value = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, 0.5 * magnitude.to(tl.float32), value)  # exponent 0
    sign = (code & 8).to(tl.int32) << 28
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def nibble_pair(rows, scales, mask, k, N, KIND: tl.constexpr, GROUP: tl.constexpr):
    q = tl.load(rows[:, None] + (k // 2 + tl.arange(0, 32))[None, :])
    s0, s1 = integer_scales(scales, mask, k, N, GROUP)
    if KIND == "mxfp4":
        low, high = e2m1_to_bf16(q & 15), e2m1_to_bf16(q >> 4)
    else:
        low, high = nibble_to_bf16(q & 15), nibble_to_bf16(q >> 4)
    return weighed(low, s0, GROUP), weighed(high, s1, GROUP)


@triton.jit
def fp8_pair(rows, scales, k, NATIVE: tl.constexpr):
    """``scales``: float32, to the scale of inputs 0 .. 127 of each row."""
    at = rows[:, None] + (k + tl.arange(0, 32))[None, :]
    q0, q1 = tl.load(at), tl.load(at + 32)
    s = tl.load(scales + k // 128)[:, None]
    if NATIVE:
        w0 = q0.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        w1 = q1.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        w0, w1 = e4m3_to_float(q0), e4m3_to_float(q1)
    return to_bf16(w0 * s), to_bf16(w1 * s)


@triton.jit
def half_to_float(bits):
    """The low 16 bits of an int32 as fp16."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def q4_k_scale(d, a, b, c, GROUP: tl.constexpr):
    """(scale, minimum) [rows, 1] of group 0 .. 7, from a block's first 4 words."""
    SHIFT: tl.constexpr = 8 * (GROUP % 4)
    if GROUP < 4:
        sc = (a >> SHIFT) & 63
        m = (b >> SHIFT) & 63
    else:
        sc = (c >> SHIFT) & 15 | ((a >> (SHIFT + 6)) & 3) << 4
        m = (c >> (SHIFT + 4)) & 15 | ((b >> (SHIFT + 6)) & 3) << 4
    scale = half_to_float(d) * sc.to(tl.float32)
    low = half_to_float(d >> 16) * m.to(tl.float32)
    return scale[:, None], low[:, None]


@triton.jit
def q4_k_pair(rows, k, PAIR: tl.constexpr):
    """PAIR: k // 64 % 4, which two groups of 32 of a superblock."""
    block = rows + k // 256 * 144
    head = block.to(tl.pointer_type(tl.int32))
    d, a, b, c = tl.load(head), tl.load(head + 1), tl.load(head + 2), tl.load(head + 3)
    q = tl.load(block[:, None] + (16 + 32 * PAIR + tl.arange(0, 32))[None, :])
    s0, m0 = q4_k_scale(d, a, b, c, 2 * PAIR)
    s1, m1 = q4_k_scale(d, a, b, c, 2 * PAIR + 1)
    first = (q & 15).to(tl.float32) * s0 - m0
    second = (q >> 4).to(tl.float32) * s1 - m1
    return to_bf16(first), to_bf16(second)


@triton.jit
def q6_k_value(low, high, d, steps, LOW: tl.constexpr, HIGH: tl.constexpr, STEP: tl.constexpr):
    """32 inputs from bits LOW.. and HIGH.. of bytes, and two int8 scales from bit STEP of words."""
    scale = half_to_float(d)
    s0 = ((steps << (24 - STEP)) >> 24).to(tl.float32) * scale
    s1 = ((steps << (16 - STEP)) >> 24).to(tl.float32) * scale
    code = ((low >> LOW) & 15) | ((high >> HIGH) & 3) << 4
    i = tl.arange(0, 32)[None, :]
    value = code.to(tl.float32) - 32
    return to_bf16(value * tl.where(i < 16, s0[:, None], s1[:, None]))


@triton.jit
def q6_k_pair(rows, k, K, PAIR: tl.constexpr):
    """In each 128 inputs an even pair has the low halves of 64 bytes, an odd one the high ones."""
    SHIFT: tl.constexpr = 4 * (PAIR % 2)
    i = tl.arange(0, 32)[None, :]
    low = rows[:, None] + (k // 128 * 64 + i)
    q0, q1 = tl.load(low), tl.load(low + 32)
    high = tl.load(rows[:, None] + (K // 2 + k // 128 * 32 + i))
    behind = rows + (K // 2 + K // 4)
    steps = tl.load((behind + k // 16).to(tl.pointer_type(tl.int32)))
    d = tl.load((behind + (K // 16 + k // 256 * 4)).to(tl.pointer_type(tl.int32)))
    first = q6_k_value(q0, high, d, steps, SHIFT, SHIFT, 0)
    return first, q6_k_value(q1, high, d, steps, SHIFT, SHIFT + 2, 16)


@triton.jit
def dequantize_pair(
    rows,
    scales,
    mask,
    k,
    N,
    K,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PAIR: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Inputs k .. k + 63 of a tile of rows, as two bfloat16 [rows, 32].

    Args:
        rows: uint8 pointers [rows], to the first byte of each row.
        scales: pointers [rows] to the scales of input 0 (int8, int4, mxfp4, fp8), or anything.
        there: [rows], which rows exist: integer scales of others are not read (``rows`` points to
            some row everywhere). A clamped index would hide from Triton that scales are a run.
        k: a multiple of 64.
        PAIR: k // 64 % 4, known when compiling.
        NATIVE: the GPU has an E4M3 type.
    """
    if KIND == "int8":
        first, second = int8_pair(rows, scales, mask, k, N, GROUP)
    elif KIND == "int4" or KIND == "mxfp4":
        first, second = nibble_pair(rows, scales, mask, k, N, KIND, GROUP)
    elif KIND == "fp8":
        first, second = fp8_pair(rows, scales, k, NATIVE)
    elif KIND == "q4_k":
        first, second = q4_k_pair(rows, k, PAIR)
    else:
        first, second = q6_k_pair(rows, k, K, PAIR)
    return first, second
