"""256 inputs of a block of 32 rows, from the CPU's tiles to rows of bfloat16, in every format.

A weight is what its format's ``dequantize`` gives in float32, rounded to bfloat16 once. ``block``,
``rows``, ``there``, ``chunk`` and ``to_k`` are those of ``repack``. Packed scales: see each
format's ``pack_scales``, and ``quant.gguf.base``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....quant.gguf.iq4_nl import VALUES
from ...common.dequant import e2m1_to_bf16, e4m3_to_float, half_to_float
from .codes import fours, words


def _packed(values: list[int]) -> tl.constexpr:
    """Four signed bytes as a signed word."""
    return tl.constexpr(int.from_bytes(bytes(v & 255 for v in values), "little", signed=True))


_IQ4_NL = VALUES.int().tolist()
_IQ4_NL_0, _IQ4_NL_4 = _packed(_IQ4_NL[:4]), _packed(_IQ4_NL[4:8])
_IQ4_NL_8, _IQ4_NL_12 = _packed(_IQ4_NL[8:12]), _packed(_IQ4_NL[12:])


@triton.jit
def dequantize_chunk(
    block,
    scales,
    rows,
    there,
    chunk,
    K,
    to_k,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    SMALL: tl.constexpr,
):
    """A chunk of weights as bfloat16, two in a word.

    Args:
        GROUP: inputs of a scale, or of a block of GGUF's; 0: one an output.
        HALVES: fp16 scales of a block of GGUF's; ``SMALL``: those that are bytes.
    """
    r = tl.arange(0, 32)[None, :]
    w = tl.arange(0, 128)
    inside = chunk * 128 + w < K // 2
    mask = there[:, None] & inside[None, :]
    to = rows[:, None] + (to_k // 2 + w)[None, :]
    if BITS == 16:
        found = words(block, (chunk * 128 + w)[:, None], r, inside[:, None])
        if KIND == "f16":
            found = _pair(half_to_float(found), half_to_float(found >> 16))
        tl.store(to, tl.trans(found), mask=mask)
    else:
        f = (chunk * 64 + tl.arange(0, 64))[:, None]
        within = f < K // 4
        codes = fours(block, f, r, within, KIND, BITS)
        scale, low = _scale(scales, 4 * f, r, within, KIND, GROUP, HALVES, SMALL)
        first = _pair(
            _weight(codes & 255, scale, low, KIND), _weight(codes >> 8 & 255, scale, low, KIND)
        )
        second = _pair(
            _weight(codes >> 16 & 255, scale, low, KIND),
            _weight(codes >> 24 & 255, scale, low, KIND),
        )
        turned = tl.permute(tl.join(first, second), (1, 0, 2)).reshape(32, 128)
        tl.store(to, turned, mask=mask)


@triton.jit
def _pair(a, b):
    """Two float32 as the bfloat16 halves of a word, to nearest even.

    In integers, since the interpreter's conversion has no subnormal bfloat16.
    """
    low, high = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    low += 0x7FFF + ((low >> 16) & 1)
    high += 0x7FFF + ((high >> 16) & 1)
    return ((low >> 16) & 0xFFFF) | (high & -0x10000)


@triton.jit
def _weight(code, scale, low, KIND: tl.constexpr):
    """float32 of codes 0 .. 255. No product here is rounded before a difference of it is."""
    if KIND == "fp8" or KIND == "fp8-channel":
        value = e4m3_to_float(code) * scale
    elif KIND == "mxfp4" or KIND == "nvfp4":
        value = e2m1_to_bf16(code).to(tl.float32) * scale
    elif KIND == "int8" or KIND == "q8_0":
        value = ((code << 24) >> 24).to(tl.float32) * scale
    elif KIND == "int4" or KIND == "q4_0":
        value = ((code ^ 8) - 8).to(tl.float32) * scale
    elif KIND == "iq4_nl" or KIND == "iq4_xs":
        first = tl.where(code < 4, _IQ4_NL_0, _IQ4_NL_4)
        word = tl.where(code < 8, first, tl.where(code < 12, _IQ4_NL_8, _IQ4_NL_12))
        value = ((word << (24 - code % 4 * 8)) >> 24).to(tl.float32) * scale
    elif KIND == "iq3_s":
        value = _signed((2 * (code & 7) + 1).to(tl.float32), code >> 3) * scale
    elif KIND == "iq3_xxs":
        level = (code & 7).to(tl.float32)
        value = 2 * level + 1 + 0.5 * (level == 7)
        value = _signed(value, code >> 3) * scale
    elif KIND == "iq2_s" or KIND == "iq2_xs" or KIND == "iq2_xxs":
        level = (code & 3).to(tl.float32)
        value = 1 + 2.125 * level + 0.125 * (level == 2)
        value = _signed(value, code >> 2) * scale
    elif KIND == "iq1_m":
        move = tl.where(code >> 2 == 1, -1.125, -0.875)
        value = ((code & 3).to(tl.float32) + move) * scale
    elif KIND == "iq1_s":
        value = (code.to(tl.float32) * scale - low) * 0.125
    elif KIND == "tq1_0" or KIND == "tq2_0" or KIND == "q2_0" or KIND == "q1_0":
        value = (code - 1).to(tl.float32) * scale
    elif KIND == "q5_0":
        value = (code - 16).to(tl.float32) * scale
    elif KIND == "q6_k":
        value = (code - 32).to(tl.float32) * scale
    elif KIND == "q3_k":
        value = (code - 4).to(tl.float32) * scale
    elif KIND == "int4-zp":
        value = (code.to(tl.float32) - low) * scale
    else:
        value = code.to(tl.float32) * scale - low
    return value


@triton.jit
def _signed(value, sign):
    """The value, or (``sign`` 1) less than 0."""
    return tl.where(sign == 1, -value, value)


@triton.jit
def _scale(
    scales,
    k,
    r,
    inside,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    SMALL: tl.constexpr,
):
    """float32 scale of input k [F, 1] of rows r [1, 32], and what is subtracted, or 0."""
    low = 0.0
    if KIND == "fp8":
        scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + k // 128, mask=inside, other=0)
    elif KIND == "int4-zp":
        group = k // GROUP * 96
        scale = _half(scales + (group + 2 * r), inside)
        low = tl.load(scales + (group + 64 + r), mask=inside, other=0).to(tl.float32)
    elif KIND == "nvfp4":
        block = k // 256 * 640
        scale = tl.load(
            (scales + (block + 4 * r)).to(tl.pointer_type(tl.float32)), mask=inside, other=0
        )
        small = tl.load(scales + (block + 128 + k % 256 // 16 * 32 + r), mask=inside, other=0)
        scale *= e4m3_to_float(small.to(tl.int32))
    elif HALVES > 0:
        block = k // GROUP * (64 * HALVES + 32 * SMALL) + r
        scale = _half(scales + (block + r), inside)
        if HALVES == 2:
            low = _half(scales + (block + r + 64), inside)
        small = scales + (block + 64 * HALVES)
        if SMALL > 0 and HALVES == 1:  # signed
            step = tl.load(small + k % 256 // (256 // SMALL) * 32, mask=inside, other=0)
            scale *= step.to(tl.int8, bitcast=True).to(tl.float32)
        elif KIND == "q2_k":
            both = tl.load(small + k % 256 // 16 * 32, mask=inside, other=0)
            scale *= (both & 15).to(tl.float32)
            low *= (both >> 4).to(tl.float32)
        elif SMALL > 0:
            own = small + k % 256 // (512 // SMALL) * 64
            scale *= tl.load(own, mask=inside, other=0).to(tl.float32)
            low *= tl.load(own + 32, mask=inside, other=0).to(tl.float32)
    elif GROUP == 0:
        scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + r)
    else:
        bits = tl.load(
            scales.to(tl.pointer_type(tl.int16)) + (k // GROUP * 32 + r), mask=inside, other=0
        )
        scale = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return scale, low


@triton.jit
def _half(at, inside):
    """fp16 as float32."""
    bits = tl.load(at.to(tl.pointer_type(tl.int16)), mask=inside, other=0)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)
