"""Sampling on the device: greedy, temperature, top-k, top-p, without a sort and without a sync.

Gumbel's trick makes a draw an argmax, and the noise is a function of (seed, step, row, token):
Philox4x32-10 of those counters, so that a captured graph draws anew when the step on the device
changes. What may be drawn is a threshold on the logits, so the draw is the best perturbed logit
above it:

- top-k: the k-th largest is found digit by digit (four launches, 8 bits of the ordered float each,
  by integer histograms);
- top-p: the best candidate is taken if less than p of the mass lies strictly above it; otherwise no
  token as small as it is in the nucleus, and the best of those above is the next candidate. One or
  two rounds as a rule.

NaN is above all logits, as in torch.topk: a row that has one draws its first, whatever the limits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from ..ref.sampling import COLDEST, HOTTEST
from .common.launch import FLOATS, check_device, unsupported
from .common.topk import index_of, ordered, rank_key

_BLOCK = 2048  # logits a program
_WIDE = 8192  # logits a step of the nucleus's loop
_COLDEST, _HOTTEST = tl.constexpr(COLDEST), tl.constexpr(HOTTEST)


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
def _narrow(counts, found, row, k, V, splits, SPLITS: tl.constexpr, BYTE: tl.constexpr):
    """(prefix, rank left) of the k-th largest after the digits above ``BYTE`` are known."""
    if BYTE == 3:
        prefix = tl.zeros([], tl.uint32)
        left = tl.where((k < 1) | (k > V), V, k)
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
def _digits(
    logits, top_k, counts, found, V, splits, stride,
    SPLITS: tl.constexpr, BYTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    prefix, left = _narrow(counts, found, row, tl.load(top_k + row), V, splits, SPLITS, BYTE)
    if split == 0:
        tl.store(found + (row * 4 + BYTE) * 2, prefix.to(tl.int64))
        tl.store(found + (row * 4 + BYTE) * 2 + 1, left.to(tl.int64))
    v = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + v, mask=v < V, other=0.0).to(tl.float32)
    key = _unsigned(x)
    digit = ((key >> (8 * BYTE)) & 255).to(tl.int32)
    same = v < V
    if BYTE < 3:
        same = same & ((key >> (8 * BYTE + 8)) == prefix)
    histogram = tl.histogram(tl.where(same, digit, 256), 512)
    d = tl.arange(0, 512)
    at = ((row * 4 + BYTE) * splits + split) * 256 + d
    tl.store(counts + at, histogram, mask=d < 256)


@triton.jit
def _perturb(
    logits, state, temperature, top_k, counts, found, noisy, best, mass, V, splits, stride,
    SPLITS: tl.constexpr, NOISE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    stay = v < V
    if TOP_K:
        least, _ = _narrow(counts, found, row, tl.load(top_k + row), V, splits, SPLITS, -1)
        stay = stay & (_unsigned(x) >= least)
    y = x
    if NOISE:
        heat = _heat(temperature, row)
        scaled = x / tl.where(heat >= _COLDEST, heat, 1.0)
        seed, step = tl.load(state), tl.load(state + 1)
        zero = v * 0
        words, _, _, _ = tl.philox(
            seed, v, zero + row.to(tl.int32), zero + step.to(tl.int32),
            zero + (step >> 32).to(tl.int32),
        )  # fmt: skip
        uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
        y = tl.where(heat >= _COLDEST, scaled - tl.log(-tl.log(uniform)), x)
        if TOP_P:
            top = tl.max(tl.where(stay, scaled, float("-inf")), 0)
            part = tl.where(stay & (scaled > float("-inf")), tl.exp(scaled - top), 0.0)
            tl.store(mass + (row * splits + split) * 2, top)
            tl.store(mass + (row * splits + split) * 2 + 1, tl.sum(part, 0))
            tl.store(noisy + row * V + v, tl.where(stay, y, float("-inf")), mask=v < V)
    key = tl.where(stay, rank_key(y, v), -(2**63))
    tl.store(best + row * splits + split, tl.max(key, 0))


@triton.jit
def _pick(best, out, splits, SPLITS: tl.constexpr):
    row, s = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    keys = tl.load(best + row * splits + s, mask=s < splits, other=-(2**63))
    tl.store(out + row, index_of(tl.max(keys, 0)).to(tl.int64))


@triton.jit
def _nucleus(
    logits, temperature, top_p, noisy, best, mass, out, V, splits, stride,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, s = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    keys = tl.load(best + row * splits + s, mask=s < splits, other=-(2**63))
    tops = tl.load(mass + (row * splits + s) * 2, mask=s < splits, other=float("-inf"))
    parts = tl.load(mass + (row * splits + s) * 2 + 1, mask=s < splits, other=0.0)
    top = tl.max(tops, 0)
    wanted = tl.sum(tl.where(parts > 0, parts * tl.exp(tops - top), 0.0), 0)
    p = tl.load(top_p + row)
    wanted *= p
    heat = _heat(temperature, row)
    heat = tl.where(heat >= _COLDEST, heat, 1.0)
    token = index_of(tl.max(keys, 0))
    searching = ~(p >= 1)
    while searching:
        least = tl.load(logits + row * stride + token).to(tl.float32)
        above = tl.zeros([BLOCK], tl.float32)
        better = tl.full([BLOCK], -(2**63), tl.int64)
        for first in range(0, V, BLOCK):
            v = first + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
            y = tl.load(noisy + row * V + v, mask=v < V, other=float("-inf"))
            higher = x > least
            above += tl.where(higher, tl.exp(x / heat - top), 0.0)
            better = tl.maximum(better, tl.where(higher, rank_key(y, v), -(2**63)))
        heavy = ~(tl.sum(above, 0) < wanted)  # sums of infinities too: the largest is left
        following = tl.max(better, 0)
        searching = heavy & (following > -(2**63))
        token = tl.where(searching, index_of(following), token)
    tl.store(out + row, token.to(tl.int64))


def supports(logits: torch.Tensor) -> str | None:
    """None if `greedy` and `sample` take these, or the reason why not."""
    if logits.ndim != 2 or logits.dtype not in FLOATS or logits.stride(1) != 1:
        return f"logits are {logits.dtype} {tuple(logits.shape)}, not floats [T, V] in dense rows"
    if not 0 < logits.shape[1] < 2**30:
        return f"a vocabulary of {logits.shape[1]}"
    return unsupported(logits)


def _empty_out(logits: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    check_device(logits, *(() if out is None else (out,)))
    if reason := supports(logits):
        raise PykernelsError(f"sampling does not take these: {reason}", "Convert them")
    T = logits.shape[0]
    if out is None:
        return torch.empty(T, dtype=torch.int64, device=logits.device)
    if out.shape != (T,) or out.dtype != torch.int64 or not out.is_contiguous():
        raise PykernelsError(f"out is {out.dtype} {tuple(out.shape)}", f"Give it int64 [{T}]")
    return out


def _splits(logits: torch.Tensor) -> tuple[int, int]:
    splits = triton.cdiv(logits.shape[1], _BLOCK)
    return splits, triton.next_power_of_2(splits)


def greedy(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The largest of each row (NaN, if it has one), of equal ones the lowest index: int64 [T].

    Two launches.

    Args:
        logits: [T, V], bf16, fp16 or float32.
        out: int64 [T].

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    out = _empty_out(logits, out)
    (T, V), (splits, padded) = logits.shape, _splits(logits)
    if T:
        best = torch.empty(T, splits, dtype=torch.int64, device=logits.device)
        _perturb[(T, splits)](
            logits, None, None, None, None, None, None, best, None, V, splits, logits.stride(0),
            SPLITS=padded, NOISE=False, TOP_K=False, TOP_P=False, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        _pick[(T,)](best, out, splits, SPLITS=padded, num_warps=4)
    return out


def sample(
    logits: torch.Tensor,
    state: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token a row from the softmax of ``logits / temperature``, as `ref.sampling` defines it.

    Nothing but the choice of top-k and top-p being given at all is decided on the host: in a
    captured graph, rows may change temperature, k and p, and each draw wants ``state[1] += 1``.

    Args:
        logits: [T, V], bf16, fp16 or float32.
        state: int64 [2] on the device: seed and step.
        temperature: float32 [T]; 0, and what is below ``COLDEST``, is greedy; what is above
            ``HOTTEST`` counts as that.
        top_k: int32 [T]; 0 is off.
        top_p: float32 [T]; 1 is off; 0, and NaN, leaves the largest.
        out: int64 [T].

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    out = _empty_out(logits, out)
    (T, V), (splits, padded) = logits.shape, _splits(logits)
    wanted = {"state": (state, torch.int64, 2), "temperature": (temperature, torch.float32, T)}
    wanted |= {} if top_k is None else {"top_k": (top_k, torch.int32, T)}
    wanted |= {} if top_p is None else {"top_p": (top_p, torch.float32, T)}
    for name, (tensor, dtype, size) in wanted.items():
        if tensor.dtype != dtype or tensor.shape != (size,) or not tensor.is_contiguous():
            raise PykernelsError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}", f"Give it {dtype} [{size}]"
            )
    device = check_device(logits, out, *(row[0] for row in wanted.values()))
    if not T:
        return out
    counts = found = noisy = mass = None
    if top_k is not None:
        counts = torch.empty(T, 4, splits, 256, dtype=torch.int32, device=device)
        found = torch.empty(T, 4, 2, dtype=torch.int64, device=device)
        for byte in (3, 2, 1, 0):
            _digits[(T, splits)](
                logits, top_k, counts, found, V, splits, logits.stride(0),
                SPLITS=padded, BYTE=byte, BLOCK=_BLOCK, num_warps=4,
            )  # fmt: skip
    if top_p is not None:
        noisy = torch.empty(T, V, dtype=torch.float32, device=device)
        mass = torch.empty(T, splits, 2, dtype=torch.float32, device=device)
    best = torch.empty(T, splits, dtype=torch.int64, device=device)
    _perturb[(T, splits)](
        logits, state, temperature, top_k, counts, found, noisy, best, mass, V, splits,
        logits.stride(0),
        SPLITS=padded, NOISE=True, TOP_K=top_k is not None, TOP_P=top_p is not None, BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip
    if top_p is None:
        _pick[(T,)](best, out, splits, SPLITS=padded, num_warps=4)
    else:
        _nucleus[(T,)](
            logits, temperature, top_p, noisy, best, mass, out, V, splits, logits.stride(0),
            SPLITS=padded, BLOCK=_WIDE, num_warps=16,
        )  # fmt: skip
    return out
