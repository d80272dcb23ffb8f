"""Common to the attention kernels: online softmax, cache rows, E4M3 values, split-KV.

Functions that name no layout (the softmax, split-KV, scales) serve the Gluon kernels too.

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
def cache_to_bf16(x, KIND: tl.constexpr):
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
def cache_to_half(x, KIND: tl.constexpr, ONCE: tl.constexpr):
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
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    elif KIND == NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif KIND == BITS:
        bits = x.to(tl.uint16)
        small = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), small * 256).to(tl.float16)
    else:
        return x


@triton.jit
def half_scale(amax):
    """(power of two, its inverse), float32: numbers of at most ``amax`` times the inverse are at
    most 2 ** 15, and fit in float16."""
    power = tl.maximum(amax.to(tl.int32, bitcast=True) & 0x7F800000, 15 << 23) - (14 << 23)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    return power.to(tl.float32, bitcast=True), inverse


@triton.jit
def half_rows(x):
    """(float16 rows of at most 2 ** 15, float32 powers of two that make them ``x`` [M, N] again).

    Exact but for elements 2 ** 28 times smaller than their row's largest.
    """
    power, inverse = half_scale(tl.max(tl.abs(x.to(tl.float32)), 1))
    return (x * inverse[:, None]).to(tl.float16), power


@triton.jit
def product(a, b, acc, WIDE: tl.constexpr):
    """``acc + a @ b``. WIDE: in float32, for the interpreter, which multiplies bf16 as integers."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def capped(s, inner):
    """tanh(x), which is 1 - 2 / (exp(2x) + 1), of dot products: see ``score_factors``."""
    return 1 - 2 / (tl.exp2(s * inner) + 1)


@triton.jit
def exp_scores(s, mask, m_i, factor, MASKED: tl.constexpr):
    """``softmax_step`` but for the cap and ``l_i``: (p, factor of what was accumulated, m_i).

    The largest score is that of the largest dot product, and scaling is part of the subtraction: a
    multiply-add and an exponential a score.
    """
    if MASKED:
        s = tl.where(mask, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row without a key so far
    p = tl.exp2(s * factor - base[:, None])
    return p, tl.exp2(m_i - base), m_new


@triton.jit
def softmax_step(s, mask, m_i, l_i, inner, outer, MASKED: tl.constexpr, SOFTCAP: tl.constexpr):
    """One block of the online softmax.

    Args:
        s: [M, N] dot products.
        mask: [M, N], keys that a row may attend to; read only if MASKED.
        m_i, l_i: [M], running maximum of the scores and sum of their exponentials.

    Returns:
        (p [M, N], the factor of what was accumulated before [M], m_i, l_i).
    """
    if SOFTCAP:
        s = capped(s, inner)
    p, alpha, m_i = exp_scores(s, mask, m_i, outer if SOFTCAP else inner, MASKED)
    return p, alpha, m_i, l_i * alpha + tl.sum(p, 1)


@triton.jit
def softmax_step_scaled(s, mask, scale, m_i, l_i, inner, outer, SOFTCAP: tl.constexpr):
    """``softmax_step`` where every key's value has a factor ``scale`` [N].

    ``p`` has the factors in it, and m_i is such that its largest element is 1: it fits in float16
    whatever the scales are. ``l_i`` sums the probabilities without the factors.
    """
    scale = tl.maximum(scale, 7.888609052210118e-31)  # 2 ** -100: a row of zeros has any
    if SOFTCAP:
        s = capped(s, inner)
    factor = outer if SOFTCAP else inner
    s = tl.where(mask, s * factor + tl.log2(scale)[None, :], float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row without a key so far
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(m_i - base)
    return p, alpha, m_new, l_i * alpha + tl.sum(p * (1 / scale)[None, :], 1)


@triton.jit
def log_sum_exp(m_i, l_i):
    """Base 2; -inf for a row without a key."""
    return tl.where(l_i == 0, float("-inf"), m_i + tl.log2(tl.where(l_i == 0, 1.0, l_i)))


@triton.jit
def with_sink(sink, m_i, l_i):
    """``l_i`` with a sink in it, one more score whose value is zero; once, when all keys are in.

    A row without a key stays one. A sink far above all scores makes ``l_i`` infinite: zeros.
    """
    score = sink.to(tl.float32) * 1.4426950408889634  # log2(e)
    return tl.where(l_i == 0, 0.0, l_i + tl.exp2(score - m_i))


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
def first_key(lengths, S, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """First key that any of the S newest tokens attends to, at a block's edge."""
    if WINDOW:
        return tl.maximum(0, lengths - S + 1 - window) // KEYS * KEYS
    else:
        return lengths * 0


@triton.jit
def load_lengths(length_ptr, B, BATCH: tl.constexpr):
    """(numbers of the sequences, their lengths), int32 [BATCH]."""
    i = tl.arange(0, BATCH)
    return i, tl.load(length_ptr + i, mask=i < B, other=0)


@triton.jit
def count_splits(i, lengths, B, total_splits, S, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Split-KV: (splits of each sequence, number of its first one), int32 [BATCH].

    Every sequence has one, and of the others in proportion to its blocks of keys, so that a
    long sequence beside short ones is not cut into fewer splits than the GPU has room for.
    """
    blocks = tl.cdiv(lengths - first_key(lengths, S, window, KEYS, WINDOW), KEYS)
    num_splits = 1 + (total_splits - B) * blocks // tl.maximum(tl.sum(blocks, 0), 1)
    num_splits = tl.where(i < B, num_splits, 0)
    return num_splits, tl.cumsum(num_splits, 0) - num_splits


@triton.jit
def find_split(
    i, lengths, split_idx, B, total_splits, S, window, KEYS: tl.constexpr, WINDOW: tl.constexpr
):
    """What split ``split_idx`` of all is: (sequence, its length, split, splits of the sequence).

    No splits: it is of no sequence, and there is nothing to do.
    """
    num_splits, first = count_splits(i, lengths, B, total_splits, S, window, KEYS, WINDOW)
    mine = (split_idx >= first) & (split_idx < first + num_splits)
    b = tl.sum(tl.where(mine, i, 0), 0)
    length = tl.sum(tl.where(mine, lengths, 0), 0)
    split = split_idx - tl.sum(tl.where(mine, first, 0), 0)
    return b, length, split, tl.sum(tl.where(mine, num_splits, 0), 0)


@triton.jit
def split_range(first, length, split, num_splits, KEYS: tl.constexpr, MAY_BE_NONE: tl.constexpr):
    """(first key of a split, the key behind its last) of the keys ``first .. length``.

    MAY_BE_NONE: there may be no splits, and then the range means nothing.
    """
    blocks = tl.cdiv(length - first, KEYS)
    if MAY_BE_NONE:
        num_splits = tl.maximum(num_splits, 1)
    each = tl.cdiv(blocks, num_splits) * KEYS
    begin = first + split * each
    return begin, tl.minimum(length, begin + each)
