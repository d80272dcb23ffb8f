"""One row times an int8 matrix on the plain arithmetic units, at the rate it is read.

Each weight is used once, and to dequantize it must cost less than to fetch it. A code that is
masked where it lies in its word *is* a float32, a subnormal one (NVIDIA's multiply-add takes these
at full rate); the power of two of its bits is in the inputs, which a program's rows share, and so
is the codes' offset. Every SM streams whole rows, so nothing is split over K and no second pass
adds anything up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common.bf16 import to_bf16
from ...common.launch import early_launch, launches_early
from ...plans.gemm import GemvInt8Plan
from ..weights import Matrices, scale_every, scale_words

KINDS = ("int8",)
UNIT = tl.constexpr(2.0**-89)
"""What a code of 1 times an input of 1 is while it is added up."""


@triton.jit
def four_inputs(word):
    """int64 -> its four bfloat16, as float32."""
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    a, b = (low << 16).to(tl.float32, bitcast=True), (low & -65536).to(tl.float32, bitcast=True)
    c, d = (high << 16).to(tl.float32, bitcast=True), (high & -65536).to(tl.float32, bitcast=True)
    return a, b, c, d


@triton.jit
def code(words, FIRST: tl.constexpr, MASK: tl.constexpr):
    """Bits of each word as float32: the code times 2**(FIRST - 149), a subnormal number."""
    return (words & (MASK << FIRST)).to(tl.float32, bitcast=True)


@triton.jit
def dot_bytes(words, a, b, c, d):
    """Sum over four inputs [words] of the bytes, codes q + 128, of [rows, words] words.

    A code at bit p is a float of 2**(p - 149) as it lies there; its input carries 2**(60 - p).
    """
    acc = (a + b + c + d)[None, :] * -(128 * UNIT)
    high = words >> 16
    acc += code(words, 0, 255) * (a * 2.0**60)[None, :]
    acc += code(words, 8, 255) * (b * 2.0**52)[None, :]
    acc += code(high, 0, 255) * (c * 2.0**60)[None, :]
    acc += code(high, 8, 255) * (d * 2.0**52)[None, :]
    return acc


@triton.jit
def word_scales(word, odd, GROUP: tl.constexpr):
    """Scales [rows, blocks, 1] of blocks of 8 words, from their words.

    In groups of 32 a word has two bfloat16, of an even block and of an ``odd`` one.
    """
    if GROUP == 32:
        s0 = (word << 16).to(tl.float32, bitcast=True)
        s1 = (word & -65536).to(tl.float32, bitcast=True)
        scale = tl.where(odd, s1, s0)
    else:
        scale = word.to(tl.float32, bitcast=True)
    return scale[:, :, None]


@triton.jit
def gemv(
    x,
    w,
    w_scale,
    out,
    bias,
    N,
    K,
    WORDS,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[n] = sum over k of x[k] * w[n, k]: one program BLOCK_N rows of w, all of K.

    A step is [BLOCK_N, BLOCKS * 8] words of 32 bits; 8 words are 32 weights.

    Args:
        x: int64 [K / 4], four bfloat16 each.
        w: int32 [N, WORDS].
        w_scale: int32 [K / max(GROUP, 64), N] (GROUP 0: [N]): see ``gemm.weights``.
        PDL: the kernel behind may be launched while this one runs, and this one was.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < N
    i = tl.arange(0, BLOCKS * 8)
    block = tl.arange(0, BLOCKS)
    rows = w + n.to(tl.int64)[:, None] * WORDS + i[None, :]
    quads = x + i
    # Lanes keep sums of their own; they are added up once, behind the loop.
    acc = tl.zeros((BLOCK_N, BLOCKS, 8), tl.float32)
    for first in tl.range(0, WORDS, BLOCKS * 8, num_stages=STAGES):
        inside = first + i < WORDS
        words = tl.load(rows + first, mask=mask[:, None] & inside[None, :], other=0)
        scale = 1.0
        if GROUP != 0:
            k_block = first // 8 + block
            at = k_block * 32 // max(GROUP, 64)
            both = mask[:, None] & (k_block * 8 < WORDS)[None, :]
            word = tl.load(w_scale + at[None, :] * N + n[:, None], mask=both, other=0)
            scale = word_scales(word, (k_block % 2 == 1)[None, :], GROUP)
        a, b, c, d = four_inputs(tl.load(quads + first, mask=inside, other=0))
        part = dot_bytes(words ^ -2139062144, a, b, c, d)  # 0x80808080
        acc += part.reshape(BLOCK_N, BLOCKS, 8) * scale
    value = tl.sum(tl.sum(acc, axis=2), axis=1) * (1 / UNIT)
    if GROUP == 0:
        scale = tl.load(w_scale + n, mask=mask, other=0)
        value *= scale.to(tl.float32, bitcast=True)
    if HAS_BIAS:
        value += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + n, to_bf16(value), mask=mask)


def multiply_gemv_int8(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    plan: GemvInt8Plan,
) -> None:
    """out = x @ w.T + bias; the caller has checked shapes, dtypes and alignment.

    Args:
        x: bfloat16 [1, K].
        stack: one int8 matrix.
        out: bfloat16 [1, N].
    """
    words = stack.data[0].view(torch.int32)
    x = x if x.storage_offset() % 4 == 0 else x.clone()  # read 8 bytes at a time
    group = scale_every(stack)
    # With scales of groups the launch behind takes the slots of programs yet to come: x0.76.
    pdl = launches_early(x.device) and group == 0
    gemv[(triton.cdiv(stack.N, plan.block_n),)](
        x.view(torch.int64),
        words,
        scale_words(stack),
        out,
        bias,
        stack.N,
        stack.K,
        words.shape[1],
        GROUP=group,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        BLOCK_N=plan.block_n,
        BLOCKS=max(1, plan.words // 8),
        STAGES=plan.num_stages,
        num_warps=plan.num_warps,
        **early_launch(pdl),
    )
