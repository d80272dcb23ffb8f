"""Rotary position embedding, in place on q and k (RoFormer, arXiv 2104.09864).

Frequencies, YaRN's too, are made once on the host: `rope_frequencies`, `yarn_frequencies`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..errors import PykernelsError
from ..ref.rope import rope_frequencies, yarn_frequencies, yarn_scale
from .common.launch import FLOATS, check_device, launches_early, unsupported
from .common.strides import check_out, overlaps

__all__ = ["rope", "rope_frequencies", "rope_table", "supports", "yarn_frequencies", "yarn_scale"]


@triton.jit
def _turn(
    x,
    t,
    head,
    cos,
    sin,
    pair,
    heads,
    half,
    t_stride,
    head_stride,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    base = x + t * t_stride + head[:, None].to(tl.int64) * head_stride
    mask = head[:, None] < heads
    if INTERLEAVED:  # as one contiguous run, so that loads stay wide
        at = tl.arange(0, 2 * BLOCK)[None, :]
        mask = mask & (at < 2 * half)
        both = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [both.shape[0], BLOCK, 2]))
        rotated = tl.join(a * cos - b * sin, a * sin + b * cos)
        rotated = tl.reshape(rotated, [both.shape[0], 2 * BLOCK])
        tl.store(base + at, rotated.to(x.dtype.element_ty), mask=mask)
    else:
        mask = mask & (pair < half)
        a = tl.load(base + pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(base + half + pair, mask=mask, other=0.0).to(tl.float32)
        tl.store(base + pair, (a * cos - b * sin).to(x.dtype.element_ty), mask=mask)
        tl.store(base + half + pair, (a * sin + b * cos).to(x.dtype.element_ty), mask=mask)


@triton.jit
def _rope(
    q,
    k,
    positions,
    frequencies,
    half,
    q_heads,
    k_heads,
    scale,
    q_t,
    q_head,
    k_t,
    k_head,
    K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    if TRIGGER:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)[None, :]
    angle = tl.load(positions + t).to(tl.float32) * tl.load(
        frequencies + pair, mask=pair < half, other=0.0
    )
    cos = tl.cos(angle) * scale
    sin = tl.sin(angle) * scale
    _turn(q, t, head, cos, sin, pair, q_heads, half, q_t, q_head, INTERLEAVED, BLOCK)
    if K:
        _turn(k, t, head, cos, sin, pair, k_heads, half, k_t, k_head, INTERLEAVED, BLOCK)


@triton.jit
def _rope_table(positions, frequencies, out, half, scale, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    angle = tl.load(positions + t).to(tl.float32) * tl.load(
        frequencies + pair, mask=pair < half, other=0.0
    )
    at = out + t * 2 * half + pair
    tl.store(at, tl.cos(angle) * scale, mask=pair < half)
    tl.store(at + half, tl.sin(angle) * scale, mask=pair < half)


def supports(x: torch.Tensor, frequencies: torch.Tensor) -> str | None:
    """None if `rope` turns this, or the reason why not."""
    if x.ndim != 3 or x.dtype not in FLOATS or x.stride(2) != 1:
        return f"{x.dtype} {tuple(x.shape)} is not floats [T, heads, D] with a dense last dimension"
    if overlaps(x):
        return f"{tuple(x.shape)} with strides {x.stride()} turns some elements more than once"
    vector = frequencies.ndim == 1 and frequencies.is_contiguous()
    if frequencies.dtype != torch.float32 or not vector:
        return f"frequencies are {frequencies.dtype} {tuple(frequencies.shape)}, not dense float32"
    if 2 * frequencies.shape[0] > x.shape[2]:
        return f"{frequencies.shape[0]} frequencies turn more than a head of {x.shape[2]}"
    return unsupported(x, frequencies)


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    interleaved: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turns the first R = 2 * len(frequencies) of q's and k's last dimension, in place.

    Args:
        q: [T, heads, D], D >= R; strides between tokens and heads are free, so that a slice of a
            wider projection is rotated where it lies, but none may overlap another (``expand``).
        k: [T, kv heads, D'] or None; MLA's single rope key has one head.
        positions: int32 or int64 [T].
        frequencies: float32 [R / 2].
        interleaved: pairs are (2i, 2i + 1), not (i, i + R / 2); they stay where they are.
        scale: of cos and sin (YaRN's attention factor).

    Returns:
        The same q and k.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    check_device(q, positions, frequencies, *(() if k is None else (k,)))
    for x in (q,) if k is None else (q, k):
        if reason := supports(x, frequencies):
            raise PykernelsError(f"rope does not take these: {reason}", "Convert them")
        if positions.shape != x.shape[:1]:
            raise PykernelsError(
                f"{tuple(positions.shape)} positions for {tuple(x.shape)}", "Give one a token"
            )
    if positions.dtype not in (torch.int32, torch.int64) or not positions.is_contiguous():
        raise PykernelsError(f"positions are {positions.dtype}", "Give contiguous integers")
    T, half, heads = (
        q.shape[0],
        frequencies.shape[0],
        max(q.shape[1], 0 if k is None else k.shape[1]),
    )
    if T and half and heads:
        block = triton.next_power_of_2(half)
        together = min(triton.next_power_of_2(heads), max(1, 1024 // block))
        _rope[(T, triton.cdiv(heads, together))](
            q,
            k,
            positions,
            frequencies,
            half,
            q.shape[1],
            0 if k is None else k.shape[1],
            float(scale),
            q.stride(0),
            q.stride(1),
            0 if k is None else k.stride(0),
            0 if k is None else k.stride(1),
            K=k is not None,
            INTERLEAVED=interleaved,
            HEADS=together,
            BLOCK=block,
            TRIGGER=launches_early(q.device),
            num_warps=4,
        )
    return q, k


def rope_table(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """cos and sin of each token's angles, times ``scale``: float32 [T, 2, R / 2].

    Args:
        positions: int32 or int64 [T].
        frequencies: float32 [R / 2].
        scale: YaRN's attention factor.
        out: float32 [T, 2, R / 2].

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    check_device(positions, frequencies, *(() if out is None else (out,)))
    integers = positions.dtype in (torch.int32, torch.int64)
    if not integers or positions.ndim != 1 or not positions.is_contiguous():
        raise PykernelsError(
            f"positions are {positions.dtype} {tuple(positions.shape)}", "Give contiguous integers"
        )
    dense = frequencies.ndim == 1 and frequencies.is_contiguous() and frequencies.numel() > 0
    if frequencies.dtype != torch.float32 or not dense:
        raise PykernelsError(
            f"frequencies are {frequencies.dtype} {tuple(frequencies.shape)}", "Give dense float32"
        )
    T, half = positions.shape[0], frequencies.shape[0]
    out = check_out(out, frequencies, T, 2, half, dtype=torch.float32)
    if T:
        _rope_table[(T,)](
            positions,
            frequencies,
            out,
            half,
            float(scale),
            BLOCK=triton.next_power_of_2(half),
            num_warps=1,
        )
    return out
