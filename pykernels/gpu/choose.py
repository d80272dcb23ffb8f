"""The choice of experts, inside a kernel: from logits of R rows in registers to ids and weights.

Scores become integer keys (a float's bits, ordered, above the inverted index), so that one integer
maximum finds the best and, of equal ones, the lowest index.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-(2**63))


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
def _value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


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
    key = tl.where(real, rank_key(choice, expert + tl.zeros_like(at).to(tl.int32)), _LEAST)
    if GROUPS > 1:
        best = tl.max(key, 2)  # [R, GP]
        value = _value_of(best)
        if TOP2:
            second = tl.max(tl.where(key == best[:, :, None], _LEAST, key), 2)
            value += _value_of(second)
        number = tl.arange(0, GP)[None, :] + tl.zeros_like(best).to(tl.int32)
        groups = tl.where(number < GROUPS, rank_key(value, number), _LEAST)
        taken = number < 0
        for _ in tl.static_range(GROUP_TOPK):
            now = groups == tl.max(groups, 1)[:, None]
            taken = taken | now
            groups = tl.where(now, _LEAST, groups)
        key = tl.where(taken[:, :, None], key, _LEAST)
    key = tl.reshape(key, [R, GP * PP])
    k = tl.arange(0, KP)[None, :]
    ids = tl.zeros([R, KP], tl.int32)
    for i in tl.static_range(TOPK):
        best = tl.max(key, 1)[:, None]
        ids = tl.where(k == i, index_of(best), ids)
        key = tl.where(key == best, _LEAST, key)
    # The chosen logits are read again (from L1): cheaper than picking them out of registers.
    mask = (row < T)[:, None] & (k < TOPK)
    x = tl.load(logits + row.to(tl.int64)[:, None] * E + ids, mask=mask, other=0.0)
    weights = tl.sigmoid(x) if SIGMOID else tl.exp(x - top[:, None]) / total[:, None]
    weights = tl.where(mask, weights, 0.0)
    if RENORM:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    return tl.where(mask, ids, 0), weights * SCALE
