"""The choice of experts, inside a kernel: from logits of R rows in registers to ids and weights.

Scores become integers that order as they do: a warp finds the largest, and then the lowest index
that has it, by two instructions (redux), which floats and 64-bit keys do not have.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-(2**63))
_NONE = tl.constexpr(-(2**31))  # below every float's bits, ordered


@triton.jit
def _ordered(value):
    """int32 that orders as the value does. Any NaN is above all, as in torch.topk."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 equals +0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value == value, ordered, 0x7FFFFFFF)


@triton.jit
def rank_key(value, index):
    """int64 that orders by value, then by lower index. NaN is above all, as in torch.topk."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 equals +0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _value_of(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_of_best(score, place, last, R: tl.constexpr):
    """Lowest place [R] of each row's largest score.

    Several rows stay three-dimensional: a reshape may leave a row's lanes apart, and Triton 3.6
    reduces over adjacent ones whatever the layout says, that is, over other rows.
    """
    if R == 1:
        best = tl.max(score, 1)[:, None]
        at = tl.min(tl.where(score == best, place, last), 1)
    else:
        best = tl.max(tl.max(score, 2), 1)[:, None, None]
        at = tl.min(tl.min(tl.where(score == best, place, last), 2), 1)
    return at


@triton.jit
def choose(
    logits, bias, first, T, E,
    TOPK: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    GROUPS: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr, GROUP_TOPK: tl.constexpr,
    SIGMOID: tl.constexpr, TOP2: tl.constexpr, BIAS: tl.constexpr, RENORM: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Ids int32 [R, KP] and weights float32 [R, KP] of rows ``first .. first + R``.

    Entries from TOPK on, and rows from T on, are 0.
    """
    row = first + tl.arange(0, R)
    group = tl.arange(0, GP)[None, :, None]
    within = tl.arange(0, PP)[None, None, :]
    per = E // GROUPS
    expert = group * per + within  # [1, GP, PP]
    real = (group < GROUPS) & (within < per)
    at = row.to(tl.int64)[:, None, None] * E + expert
    x = tl.load(logits + at, mask=(row < T)[:, None, None] & real, other=float("-inf"))
    x = tl.where((row < T)[:, None, None], x, 0.0)  # no row of -inf alone: its softmax is NaN
    if SIGMOID:
        top = tl.zeros([R], tl.float32)
        total = tl.full([R], 1.0, tl.float32)
        score = tl.sigmoid(x)
    else:
        top = tl.max(tl.max(x, 2), 1)
        shifted = tl.where(real, tl.exp(x - top[:, None, None]), 0.0)
        total = tl.sum(tl.sum(shifted, 2), 1)
        score = shifted / total[:, None, None]
    if BIAS:
        choice = score + tl.load(bias + expert, mask=real, other=0.0)
    elif TOP2 and GROUPS > 1:
        choice = score
    else:
        choice = x
    score = tl.where(real, _ordered(choice), _NONE)  # [R, GP, PP]
    if GROUPS > 1:
        best = tl.max(score, 2)  # [R, GP]
        value = _value_of(best)
        if TOP2:
            equal = score == best[:, :, None]
            second = tl.max(tl.where(equal, _NONE, score), 2)
            twice = tl.sum(equal.to(tl.int32), 2) > 1
            value += _value_of(tl.where(twice, best, second))
        number = tl.arange(0, GP)[None, :] + tl.zeros_like(best)
        groups = tl.where(number < GROUPS, rank_key(value, number), _LEAST)
        taken = number < 0
        for _ in tl.static_range(GROUP_TOPK):
            now = groups == tl.max(groups, 1)[:, None]
            taken = taken | now
            groups = tl.where(now, _LEAST, groups)
        score = tl.where(taken[:, :, None], score, _NONE)
    k = tl.arange(0, KP)[None, :]
    ids = tl.zeros([R, KP], tl.int32)
    place = group * PP + within
    if R == 1:  # flat, so that a reduction is a whole warp's
        score, place = tl.reshape(score, [R, GP * PP]), tl.reshape(place, [R, GP * PP])
    for i in tl.static_range(TOPK):
        at = _first_of_best(score, place, GP * PP - 1, R)
        ids = tl.where(k == i, at[:, None], ids)
        score = tl.where(place == (at[:, None] if R == 1 else at[:, None, None]), _NONE, score)
    ids = ids // PP * per + ids % PP
    # The chosen logits are read again (from L1): cheaper than picking them out of registers.
    mask = (row < T)[:, None] & (k < TOPK) & (ids < E)
    x = tl.load(logits + row.to(tl.int64)[:, None] * E + ids, mask=mask, other=0.0)
    weights = tl.sigmoid(x) if SIGMOID else tl.exp(x - top[:, None]) / total[:, None]
    weights = tl.where(mask, weights, 0.0)
    if RENORM:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    return tl.where(mask, ids, 0), weights * SCALE
