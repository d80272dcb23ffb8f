"""Pieces that the attention kernels share: scores, running softmax, cache rows, FP8 values.

Scores are kept in base 2 (``exp2`` is one instruction): the scale that arrives here already holds
``log2(e)``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LOG2E = math.log2(math.e)
BF16, NATIVE, BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How cache values arrive: bf16; E4M3 bytes that the GPU can convert; E4M3 bytes that it cannot."""


def cache_kind(values: torch.Tensor, capability: tuple[int, int]) -> int:
    """BF16, NATIVE or BITS; (0, 0) is the interpreter."""
    if values.dtype == torch.bfloat16:
        return BF16.value
    return BITS.value if (0, 0) < capability < (8, 9) else NATIVE.value


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(inner, outer): scores in base 2 are ``inner * s``, or ``outer * tanh(inner * s / 2)``.

    In the second case ``inner`` is for ``exp2``, so it holds ``log2(e)`` too.
    """
    if softcap is None:
        return float(scale) * LOG2E, 1.0  # NumPy's floats are none to Triton
    return 2 * LOG2E * float(scale) / float(softcap), float(softcap) * LOG2E


@triton.jit
def widened(x, KIND: tl.constexpr):
    """Cache values as bf16: exact, E4M3 has fewer bits."""
    if KIND == NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    elif KIND == BITS:
        # The seven bits behind the sign are exponent and mantissa of a float32 that is 2 ** 120 too
        # small, E4M3's subnormals included.
        bits = x.to(tl.uint32)
        small = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        exact = small * 1.329227995784916e36
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), exact).to(tl.bfloat16)
    else:
        return x


@triton.jit
def halves(x, KIND: tl.constexpr, ONCE: tl.constexpr):
    """Cache values as float16, E4M3 only: exact, and an instruction for two where the GPU has it.

    (There is none to bf16: through float16 it is one for two and one for each, at a quarter rate.)
    ONCE: where the value was loaded, for whatever takes it. Triton moves a conversion into each
    operand: a value that has to be transposed then comes from shared memory a byte at a time, but
    one that does not is spared a way through shared memory. (The interpreter knows no assembly.)
    """
    if KIND == NATIVE and ONCE:  # not known to be pure, Triton leaves it where it is
        return tl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    elif KIND == NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif KIND == BITS:
        bits = x.to(tl.uint16)
        small = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), small * 256).to(tl.float16)
    else:
        return x


@triton.jit
def rows_in_half(x):
    """(float16 rows of at most 2 ** 15, float32 powers of two that make them ``x`` [M, N] again).

    Exact but for elements 2 ** 28 times smaller than their row's largest.
    """
    top = tl.max(tl.abs(x.to(tl.float32)), 1)
    power = tl.maximum(top.to(tl.int32, bitcast=True) & 0x7F800000, 15 << 23) - (14 << 23)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    return (x * inverse[:, None]).to(tl.float16), power.to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, acc, WIDE: tl.constexpr):
    """``acc + a @ b``. WIDE: in float32, for the interpreter, which multiplies bf16 as integers."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def softmax_step(s, seen, m, total, inner, outer, MASKED: tl.constexpr, SOFTCAP: tl.constexpr):
    """One block of the running softmax.

    s [M, N] dot products; seen, what a row may see of them (only if MASKED); m [M] largest score so
    far; total [M] sum so far. Returns (shares [M, N], factor of the past [M], m, total).

    The largest score is that of the largest dot product, and scaling is part of the subtraction: a
    multiply-add and an exponential a score.
    """
    if SOFTCAP:  # tanh(x) is 1 - 2 / (exp(2x) + 1)
        s = 1 - 2 / (tl.exp2(s * inner) + 1)
    factor = outer if SOFTCAP else inner
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1) * factor)
    base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    p = tl.exp2(s * factor - base[:, None])
    alpha = tl.exp2(m - base)
    return p, alpha, top, total * alpha + tl.sum(p, 1)


@triton.jit
def scaled_step(s, seen, scale, m, total, inner, outer, SOFTCAP: tl.constexpr):
    """``softmax_step`` where every key's value has a factor ``scale`` [N].

    The shares [M, N] have the factors in them, and m is such that the largest is 1: they fit in
    float16 whatever the scales are. The total is that of the plain shares.
    """
    scale = tl.maximum(scale, 7.888609052210118e-31)  # 2 ** -100: a row of zeros has any
    if SOFTCAP:
        s = 1 - 2 / (tl.exp2(s * inner) + 1)
    factor = outer if SOFTCAP else inner
    s = tl.where(seen, s * factor + tl.log2(scale)[None, :], float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(m - base)
    return p, alpha, top, total * alpha + tl.sum(p * (1 / scale)[None, :], 1)


@triton.jit
def pages_at(table, start, end, n, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Pages of the keys ``start + n``: one where blocks do not straddle pages, else [BLOCK].

    Behind the end it is that of the last key. A kernel asks for the next block's before it needs
    them: a load that waits for another cannot be prefetched as far ahead.
    """
    if PAGE % BLOCK == 0:
        return tl.load(table + start // PAGE, mask=start < end, other=0)
    else:
        at = tl.minimum(start + n, end - 1)
        return tl.load(table + at // PAGE, mask=start + tl.zeros_like(n) < end, other=0)


@triton.jit
def page_rows(pages, start, n, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Row numbers in the cache, int64 [BLOCK], of the keys ``start + n``."""
    if PAGE % BLOCK == 0:
        return pages.to(tl.int64) * PAGE + start % PAGE + n
    else:
        return pages.to(tl.int64) * PAGE + (start + n) % PAGE


@triton.jit
def log_total(m, total):
    """Base-2 log-sum-exp of a row; -inf for one that saw no key."""
    return tl.where(total == 0, float("-inf"), m + tl.log2(tl.where(total == 0, 1.0, total)))


@triton.jit
def first_seen(lengths, S, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """First key that any of the S newest tokens sees, at a block's edge."""
    if WINDOW:
        return tl.maximum(0, lengths - S + 1 - window) // KEYS * KEYS
    else:
        return lengths * 0


@triton.jit
def shares_of_slots(
    length_ptr, B, slots, S, window, KEYS: tl.constexpr, BATCH: tl.constexpr, WINDOW: tl.constexpr
):
    """How ``slots`` programs are dealt out: (lengths, parts, first slot), int32 [BATCH].

    Every sequence has one and of the others as many as its share of all blocks, so that a long one
    beside short ones is not cut into fewer parts than the GPU has room for.
    """
    i = tl.arange(0, BATCH)
    lengths = tl.load(length_ptr + i, mask=i < B, other=0)
    blocks = tl.cdiv(lengths - first_seen(lengths, S, window, KEYS, WINDOW), KEYS)
    parts = 1 + (slots - B) * blocks // tl.maximum(tl.sum(blocks, 0), 1)
    parts = tl.where(i < B, parts, 0)
    return lengths, parts, tl.cumsum(parts, 0) - parts


@triton.jit
def share_of_slot(
    length_ptr, slot, B, slots, S, window,
    KEYS: tl.constexpr, BATCH: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """What one program does: (sequence, its length, part, parts); no parts: nothing."""
    i = tl.arange(0, BATCH)
    lengths, parts, start = shares_of_slots(length_ptr, B, slots, S, window, KEYS, BATCH, WINDOW)
    mine = (slot >= start) & (slot < start + parts)
    b = tl.sum(tl.where(mine, i, 0), 0)
    length = tl.sum(tl.where(mine, lengths, 0), 0)
    part = slot - tl.sum(tl.where(mine, start, 0), 0)
    return b, length, part, tl.sum(tl.where(mine, parts, 0), 0)
