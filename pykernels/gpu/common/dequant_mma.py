"""Words of quantized weights to the left operand of the tensor cores, in registers (Gluon).

A lane of a matrix instruction multiplies pairs of neighbouring inputs. Which inputs these are is
free as long as both operands agree, so each lane dequantizes the words that it has loaded itself
and K is permuted: nothing passes through shared memory. Two codes at a time become bfloat16 where
they lie: masked, with ``MAGIC``'s exponents put on top (0x4300 is 128: its low bits count up by
ones). MAGIC is a run-time number because one instruction has room for one constant.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAGIC = 0x43004300
"""Two bfloat16 of 128."""


def powers(low: int, high: int) -> list[int]:
    """Powers of two from ``low`` up to, not including, ``high``."""
    return [1 << i for i in range(low.bit_length() - 1, high.bit_length() - 1)]


@gluon.jit
def pair(bits):
    """int32 -> the bfloat16 of its low half, that of its high half."""
    low = bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return low, high


@gluon.jit
def nibbles(words, MAGIC):
    """Codes q + 8 at bits 0 and 16 -> [.., 2]: their q."""
    low, high = pair((words & 0x000F000F) | MAGIC)
    return gl.join(low - 136.0, high - 136.0)


@gluon.jit
def nibbles_above(words, MAGIC):
    """Low halves of bytes -> [.., 2, 2], byte 2 j + i at [.., j, i], each with 128 added."""
    low, high = pair((words & 0x000F000F) | MAGIC)
    low_odd, high_odd = pair(((words >> 8) & 0x000F000F) | MAGIC)
    return gl.join(gl.join(low, high), gl.join(low_odd, high_odd))


@gluon.jit
def sixes_above(low, high, HALF: gl.constexpr, MAGIC):
    """Codes of 6 bits, four in the low half of a byte of ``low``, two in bits 4 HALF.. of one of
    ``high`` -> [.., 2, 2], byte 2 j + i at [.., j, i], each with 128 added."""
    top = high << 4 if HALF == 0 else high
    # A mask known when compiling would be two, for either side of what is one instruction.
    mask = (MAGIC ^ 0x43004300) | 0x30303030
    six = low ^ ((low ^ top) & mask)  # above them is what the next mask takes off
    a, b = pair((six & 0x003F003F) | MAGIC)
    c, d = pair(((six >> 8) & 0x003F003F) | MAGIC)
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def e2m1s(words):
    """E2M1 codes at bits 0 and 16 -> [.., 2], times 2**-126: subnormals are bfloat16's."""
    low, high = pair(((words & 0x00070007) << 6) | ((words & 0x00080008) << 12))
    return gl.join(low, high)


@gluon.jit
def octets(words, MAGIC):
    """int8 at bits 0 and 16: the low seven bits less the sign's 128."""
    low, high = pair((words & 0x007F007F) | MAGIC)
    sign_low, sign_high = pair((words & 0x00800080) | MAGIC)
    return gl.join(low - sign_low, high - sign_high)


@gluon.jit
def e4m3s(signs, magnitudes):
    """E4M3 as bfloat16 with a smaller exponent: subnormals and NaN (which E4M3 weights never are,
    and which would be 480) too; one product by 2**120 puts it right."""
    low, high = pair((magnitudes & 0x07F007F0) | (signs & -2147450880))  # 0x80008000
    return gl.join(low, high)


@gluon.jit
def e4m3s_below(words):
    """[..] words -> [.., 2, 2] bfloat16, as of ``codes``, times 2**-120."""
    return gl.join(e4m3s(words << 8, words << 4), e4m3s(words, words >> 4))


@gluon.jit
def codes(words, MAGIC, KIND: gl.constexpr):
    """[..] words -> [.., 2, 2] bfloat16, byte 2 j + i at [.., i, j]; of nibbles
    bytes' low halves."""
    if KIND == "int4":
        v = gl.join(nibbles(words, MAGIC), nibbles(words >> 8, MAGIC))
    elif KIND == "mxfp4":
        v = gl.join(e2m1s(words), e2m1s(words >> 8))
        v *= gl.full([], 0x7E80, gl.int16).to(gl.bfloat16, bitcast=True)  # 2**126
    elif KIND == "fp8":
        v = e4m3s_below(words) * gl.full([], 0x7B80, gl.int16).to(gl.bfloat16, bitcast=True)
    else:
        v = gl.join(octets(words, MAGIC), octets(words >> 8, MAGIC))
    return v
