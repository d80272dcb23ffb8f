"""The choice of experts, inside a kernel: from a row of logits in registers to ids and weights.

Scores become integers that order as they do: a warp finds the largest, and then the lowest index
that has it, by two instructions (redux), which floats and 64-bit keys do not have.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-(2**63))
_NONE = tl.constexpr(-(2**31))  # below every float's bits, ordered


@triton.jit
def ordered(value):
    """int32 that orders as the value does. Any NaN is above all, as in torch.topk."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 equals +0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value == value, bits, 0x7FFFFFFF)


@triton.jit
def rank_key(value, index):
    """int64 that orders by value, then by lower index. NaN is above all, as in torch.topk."""
    return (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _value_of(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def topk(
    logits,
    bias,
    row,
    E,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    GROUPS: tl.constexpr,
    GP: tl.constexpr,
    PP: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    SIGMOID: tl.constexpr,
    TOP2: tl.constexpr,
    BIAS: tl.constexpr,
    RENORM: tl.constexpr,
    MIN_SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Ids int32 [KP] and weights float32 [KP] of a row; entries from TOPK on are 0."""
    logits += row.to(tl.int64) * E
    group = tl.arange(0, GP)[:, None]
    within = tl.arange(0, PP)[None, :]
    per = E // GROUPS
    expert = group * per + within  # [GP, PP]
    real = (group < GROUPS) & (within < per)
    x = tl.load(logits + expert, mask=real, other=float("-inf"))
    if SIGMOID:
        top = 0.0
        sum_exp = 1.0
        score = tl.sigmoid(x)
    else:
        top = tl.max(tl.max(x, 1), 0)
        shifted = tl.where(real, tl.exp(x - top), 0.0)
        sum_exp = tl.sum(tl.sum(shifted, 1), 0)
        score = shifted / sum_exp
    if BIAS:
        choice = score + tl.load(bias + expert, mask=real, other=0.0)
    elif TOP2 and GROUPS > 1:
        choice = score
    else:
        choice = x
    score = tl.where(real, ordered(choice), _NONE)  # [GP, PP]
    if GROUPS > 1:
        best = tl.max(score, 1)  # [GP]
        value = _value_of(best)
        if TOP2:
            equal = score == best[:, None]
            second = tl.max(tl.where(equal, _NONE, score), 1)
            twice = tl.sum(equal.to(tl.int32), 1) > 1
            value += _value_of(tl.where(twice, best, second))
        number = tl.arange(0, GP)
        groups = tl.where(number < GROUPS, rank_key(value, number), _LEAST)
        taken = number < 0
        for _ in tl.static_range(GROUP_TOPK):
            now = groups == tl.max(groups, 0)
            taken = taken | now
            groups = tl.where(now, _LEAST, groups)
        score = tl.where(taken[:, None], score, _NONE)
    k = tl.arange(0, KP)
    ids = tl.zeros([KP], tl.int32)
    index = group * PP + within
    # Flat, so that a reduction is a whole warp's.
    score, index = tl.reshape(score, [GP * PP]), tl.reshape(index, [GP * PP])
    for i in tl.static_range(TOPK):
        at = tl.min(tl.where(score == tl.max(score, 0), index, GP * PP - 1), 0)
        ids = tl.where(k == i, at, ids)
        score = tl.where(index == at, _NONE, score)
    ids = ids // PP * per + ids % PP
    # The chosen logits are read again (from L1): cheaper than picking them out of registers.
    mask = (k < TOPK) & (ids < E)
    x = tl.load(logits + ids, mask=mask, other=0.0)
    weights = tl.sigmoid(x) if SIGMOID else tl.exp(x - top) / sum_exp
    weights = tl.where(mask, weights, 0.0)
    if RENORM:
        total = tl.sum(weights, 0) + 1e-20
        if MIN_SUM > 0:
            total = tl.maximum(total, MIN_SUM)
        weights = weights / total
    return tl.where(mask, ids, 0), weights * SCALE
