"""The kernels of `sampling`: adjusted logits, digits of the k-th largest, noise, the nucleus.

A row is cut into ``splits`` programs of ``BLOCK`` logits. What a row does not ask for (top-k,
penalties, logprobs ...) its programs leave out, each for itself, so one captured graph serves all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..ref.sampling import COLDEST, HOTTEST, MAX_LOGPROBS
from .common.topk import index_of, ordered, rank_key

_COLDEST, _HOTTEST = tl.constexpr(COLDEST), tl.constexpr(HOTTEST)
_TOPS = tl.constexpr(MAX_LOGPROBS)
_LEAST = tl.constexpr(-(2**63))
_NOWHERE = tl.constexpr(2**31 - 1)
_WIN = tl.constexpr(20.0)  # noise lies in -2.82 .. 16.64: what is so far below the largest loses


@triton.jit
def _heat(temperature, row):
    """A row's temperature; NaN stays NaN, which is not as warm as ``_COLDEST`` either."""
    heat = tl.load(temperature + row)
    return tl.where(heat > _HOTTEST, _HOTTEST, heat)


@triton.jit
def _unsigned(x):
    """uint32 that orders as the float does."""
    return (ordered(x) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _key(x, v, stay):
    """Rank keys of what may be drawn: all above -inf."""
    return tl.where(stay & ~(x == float("-inf")), rank_key(x, v), _LEAST)


@triton.jit
def best_keys(logits, best, V, splits, stride, BLOCK: tl.constexpr):
    """The largest logit of each split."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    tl.store(best + row * splits + split, tl.max(tl.where(v < V, rank_key(x, v), _LEAST), 0))


@triton.jit
def pick_best(best, out, splits, SPLITS: tl.constexpr):
    row, s = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    keys = tl.load(best + row * splits + s, mask=s < splits, other=_LEAST)
    tl.store(out + row, index_of(tl.max(keys, 0)).to(tl.int64))


@triton.jit
def adjust(
    logits,
    adjusted,
    best,
    allowed,
    tops,
    masses,
    keys,
    logprobs,
    repetition,
    presence,
    frequency,
    seen,
    seen_row,
    bias_ids,
    bias,
    bias_start,
    bias_count,
    mask,
    mask_row,
    V,
    splits,
    stride,
    W,
    SEEN: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``ref.sampling.adjusted``, and what the later kernels ask of each split: the largest adjusted
    logit, the first allowed token; of the logits as they came the largest, their exps' sum and,
    where they are wanted, the keys of the ``MAX_LOGPROBS`` largest."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = split * BLOCK + tl.arange(0, BLOCK)
    real = v < V
    part = row * splits + split
    x = tl.load(logits + row * stride + v, mask=real, other=float("-inf")).to(tl.float32)
    wanted = tl.load(logprobs + row)
    if wanted >= 0:
        top = tl.max(x, 0)
        exps = tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
        broken = tl.max((x != x).to(tl.int32), 0) > 0
        tl.store(tops + part, tl.where(broken, float("nan"), top))
        tl.store(masses + part, tl.sum(exps, 0))
        key = tl.where(real, rank_key(x, v), _LEAST)
        for i in range(0, tl.minimum(wanted, _TOPS)):
            largest = tl.max(key, 0)
            tl.store(keys + part * _TOPS + i, largest)
            key = tl.where(key == largest, _LEAST, key)
    may = real
    if MASK:
        mine = tl.load(mask_row + row).to(tl.int64)
        if mine >= 0:
            word = tl.load(mask + mine * W + v // 32, mask=real, other=0)
            may = may & (((word >> (v % 32)) & 1) != 0)
            x = tl.where(may, x, float("-inf"))
    if BIAS:
        first = tl.load(bias_start + row)
        for i in range(first, first + tl.load(bias_count + row)):
            token = tl.load(bias_ids + i)
            if token // BLOCK == split:
                x = tl.where(v == token, x + tl.load(bias + i), x)
    if SEEN:
        mine = tl.load(seen_row + row).to(tl.int64)
        if mine >= 0:
            count = tl.load(seen + mine * V + v, mask=real, other=0)
            times = count >> 1
            by = tl.load(repetition + row) + tl.zeros_like(x)
            less = tl.where(x > 0, tl.div_rn(x, by), x * by)
            less = less - tl.load(frequency + row) * times.to(tl.float32)
            less = less - tl.where(times > 0, tl.load(presence + row), 0.0)
            x = tl.where(count != 0, less, x)
    tl.store(adjusted + row * V + v, x, mask=real)
    tl.store(best + part, tl.max(_key(x, v, may), 0))
    tl.store(allowed + part, tl.min(tl.where(may, v, _NOWHERE), 0))


@triton.jit
def _narrow(counts, found, row, k, splits, SPLITS: tl.constexpr, BYTE: tl.constexpr):
    """(prefix, rank left) of the k-th largest after the digits above ``BYTE`` are known."""
    if BYTE == 3:
        prefix = tl.zeros([], tl.uint32)
        left = k
    else:
        prefix = tl.load(found + (row * 4 + BYTE + 1) * 2).to(tl.uint32)
        left = tl.load(found + (row * 4 + BYTE + 1) * 2 + 1).to(tl.int32)
        s = tl.arange(0, SPLITS)[:, None]
        digit = tl.arange(0, 256)
        at = ((row * 4 + BYTE + 1) * splits + s) * 256 + digit[None, :]
        whole = tl.sum(tl.load(counts + at, mask=s < splits, other=0), 0)
        reached = tl.cumsum(whole, 0, reverse=True) >= left
        chosen = tl.max(tl.where(reached, digit, 0), 0)
        left -= tl.sum(tl.where(digit > chosen, whole, 0), 0)
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    return prefix, left


@triton.jit
def digits(
    adjusted,
    temperature,
    top_k,
    counts,
    found,
    V,
    splits,
    SPLITS: tl.constexpr,
    BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many logits of each split that begin as the k-th largest does have which digit next."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.load(top_k + row)
    if (k >= 1) & (k < V) & (_heat(temperature, row) >= _COLDEST):
        prefix, left = _narrow(counts, found, row, k, splits, SPLITS, BYTE)
        if split == 0:
            tl.store(found + (row * 4 + BYTE) * 2, prefix.to(tl.int64))
            tl.store(found + (row * 4 + BYTE) * 2 + 1, left.to(tl.int64))
        v = split * BLOCK + tl.arange(0, BLOCK)
        key = _unsigned(tl.load(adjusted + row * V + v, mask=v < V, other=0.0))
        digit = ((key >> (8 * BYTE)) & 255).to(tl.int32)
        same = v < V
        if BYTE < 3:
            same = same & ((key >> (8 * BYTE + 8)) == prefix)
        histogram = tl.histogram(tl.where(same, digit, 256), 512)
        d = tl.arange(0, 512)
        at = ((row * 4 + BYTE) * splits + split) * 256 + d
        tl.store(counts + at, histogram, mask=d < 256)


@triton.jit
def _largest(adjusted, best, row, V, splits, SPLITS: tl.constexpr):
    """(key, logit) of a row's largest; the key is ``_LEAST`` if nothing is above -inf."""
    s = tl.arange(0, SPLITS)
    key = tl.max(tl.load(best + row * splits + s, mask=s < splits, other=_LEAST), 0)
    there = key != _LEAST
    value = tl.load(adjusted + row * V + tl.where(there, index_of(key), 0))
    return key, tl.where(there, value, float("nan"))


@triton.jit
def perturb(
    adjusted,
    best,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    draws,
    counts,
    found,
    noisy,
    drawn,
    masses,
    V,
    splits,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best perturbed logit of each split among those that top-k and min-p leave, and the sum of
    their exps. A row that is greedy, or has NaN, has neither."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = _heat(temperature, row)
    best_key, value = _largest(adjusted, best, row, V, splits, SPLITS)
    if (heat >= _COLDEST) & (value == value):
        top = tl.div_rn(value, heat)
        v = split * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(adjusted + row * V + v, mask=v < V, other=float("-inf"))
        scaled = tl.div_rn(x, heat + tl.zeros_like(x))
        stay = x > float("-inf")
        k = tl.load(top_k + row)
        if (k >= 1) & (k < V):
            least, left = _narrow(counts, found, row, k, splits, SPLITS, -1)
            stay = stay & (_unsigned(x) >= least)
        p = tl.load(min_p + row)
        if p > 0:
            share = tl.where(p > 1, 1.0, p).to(tl.float64)
            stay = stay & (scaled >= top + tl.log(share).to(tl.float32))
        if tl.load(top_p + row) < 1:
            exps = tl.where(stay & (scaled > float("-inf")), tl.exp(scaled - top), 0.0)
            tl.store(masses + row * splits + split, tl.sum(exps, 0))
        largest = tl.max(tl.where(stay, scaled, float("-inf")), 0)
        key = tl.full([], _LEAST, tl.int64)
        if ~(largest < top - _WIN):
            step = tl.load(draws + row)
            zero = v * 0
            words, _, _, _ = tl.philox(
                tl.load(seed + row),
                v,
                zero,
                zero + step.to(tl.int32),
                zero + (step >> 32).to(tl.int32),
            )
            uniform = ((words >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07
            y = scaled - tl.log(-tl.log(uniform)).to(tl.float32)
            tl.store(noisy + row * V + v, y, mask=v < V)
            key = tl.max(tl.where(stay, rank_key(y, v), _LEAST), 0)
        tl.store(drawn + row * splits + split, key)


@triton.jit
def _nucleus(adjusted, noisy, row, token, heat, top, allowance, V, BLOCK: tl.constexpr):
    """The best draw with less than ``allowance`` of the mass strictly above it: ``token``, or the
    best of those above it, and so on. One or two rounds as a rule."""
    searching = allowance == allowance
    while searching:
        least = tl.load(adjusted + row * V + token)
        above = tl.zeros([BLOCK], tl.float32)
        better = tl.full([BLOCK], _LEAST, tl.int64)
        for first in range(0, V, BLOCK):
            v = first + tl.arange(0, BLOCK)
            x = tl.load(adjusted + row * V + v, mask=v < V, other=float("-inf"))
            y = tl.load(noisy + row * V + v, mask=v < V, other=float("-inf"))
            higher = x > least
            scaled = tl.div_rn(x, heat + tl.zeros_like(x))
            above += tl.where(higher, tl.exp(scaled - top), 0.0)
            better = tl.maximum(better, tl.where(higher, rank_key(y, v), _LEAST))
        heavy = ~(tl.sum(above, 0) < allowance)
        following = tl.max(better, 0)
        searching = heavy & (following > _LEAST)
        token = tl.where(searching, index_of(following), token)
    return token


@triton.jit
def finish(
    logits,
    adjusted,
    best,
    allowed,
    tops,
    masses,
    keys,
    noisy,
    drawn,
    kept_masses,
    temperature,
    top_p,
    logprobs,
    tokens,
    own,
    top_ids,
    top_logprobs,
    V,
    splits,
    stride,
    SPLITS: tl.constexpr,
    TOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's token from what its splits have found, and the logprobs that are wanted."""
    row, s = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    here = s < splits
    key, value = _largest(adjusted, best, row, V, splits, SPLITS)
    heat = _heat(temperature, row)
    token = index_of(key)
    if key == _LEAST:  # nothing is above -inf
        token = tl.min(tl.load(allowed + row * splits + s, mask=here, other=_NOWHERE), 0)
        token = tl.where(token == _NOWHERE, -1, token)
    elif (heat >= _COLDEST) & (value == value):
        top = tl.div_rn(value, heat)
        p = tl.load(top_p + row)
        finite = tl.abs(top) < float("inf")
        if (p >= 1) | finite:
            found = tl.load(drawn + row * splits + s, mask=here, other=_LEAST)
            token = index_of(tl.max(found, 0))
            if ~(p >= 1):
                parts = tl.load(kept_masses + row * splits + s, mask=here, other=0.0)
                allowance = tl.where(p > 0, tl.sum(parts, 0) * p, 0.0)
                token = _nucleus(adjusted, noisy, row, token, heat, top, allowance, V, BLOCK)
    tl.store(tokens + row, token.to(tl.int64))
    i = tl.arange(0, TOPS)
    ids = tl.full([TOPS], -1, tl.int32)
    wanted = tl.load(logprobs + row)
    less = tl.full([], float("nan"), tl.float32)
    total = tl.full([], float("nan"), tl.float32)
    if (wanted >= 0) & (token >= 0):
        part_tops = tl.load(tops + row * splits + s, mask=here, other=float("-inf"))
        parts = tl.load(masses + row * splits + s, mask=here, other=0.0)
        broken = tl.max((part_tops != part_tops).to(tl.int32), 0) > 0
        less = tl.max(part_tops, 0)
        if (~broken) & (tl.abs(less) < float("inf")):
            total = tl.sum(tl.where(parts > 0, parts * tl.exp(part_tops - less), 0.0), 0)
            total = tl.log(total.to(tl.float64)).to(tl.float32)
            if wanted > 0:
                at = (row * splits + s[:, None]) * _TOPS + i[None, :]
                there = here[:, None] & (i[None, :] < tl.minimum(wanted, _TOPS))
                left = tl.reshape(tl.load(keys + at, mask=there, other=_LEAST), [SPLITS * TOPS])
                for n in range(0, tl.minimum(wanted, _TOPS)):
                    largest = tl.max(left, 0)
                    found_id = tl.where(largest == _LEAST, -1, index_of(largest))
                    ids = tl.where(i == n, found_id, ids)
                    left = tl.where(left == largest, _LEAST, left)
    x = tl.load(logits + row * stride + tl.maximum(token, 0)).to(tl.float32)
    tl.store(own + row, x - less - total)
    x = tl.load(logits + row * stride + ids, mask=ids >= 0, other=float("nan")).to(tl.float32)
    at = row * _TOPS + i
    tl.store(top_ids + at, ids.to(tl.int64), mask=i < _TOPS)
    tl.store(top_logprobs + at, x - less - total, mask=i < _TOPS)


@triton.jit
def count_drawn(tokens, seen_row, seen, V):
    row = tl.program_id(0)
    token, mine = tl.load(tokens + row), tl.load(seen_row + row).to(tl.int64)
    if (token >= 0) & (token < V) & (mine >= 0):
        at = seen + mine * V + token
        tl.store(at, tl.load(at) + 2)
