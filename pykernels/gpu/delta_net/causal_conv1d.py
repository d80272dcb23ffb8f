"""A causal convolution of each channel with itself, over inputs that a slot keeps between steps;
with gates before and behind it, as LFM2's layers have it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ...shapes import StateBatch
from ..common.launch import FLOATS, check_device, why_not
from ..common.strides import check_out
from .blocks import block_of, most_blocks, sequences_of
from .checks import check_floats, check_states

MAX_KERNEL = 16
"""Tokens of a sum, at most: so many a program has of a prompt, of which only the first program may
read the state that it then writes."""
_CHANNELS = 128


@triton.jit(do_not_specialize=["S"])
def _causal_conv1d(
    x,
    weight,
    bias,
    in_gate,
    out_gate,
    state,
    starts,
    lengths,
    slots,
    past,
    out,
    C,
    S,
    x_stride,
    in_stride,
    out_stride,
    w_c,
    w_k,
    K: tl.constexpr,
    BEFORE: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    s, block = block_of(tl.program_id(0), lengths, slots, S, ROWS, SEQUENCES)
    if s >= S:
        return
    length, slot = tl.load(lengths + s), tl.load(slots + s)
    if (slot < 0) | (block * ROWS >= length):
        return
    start, goes_on = tl.load(starts + s).to(tl.int64), tl.load(past + s) > 0
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = c < C
    own = state + slot.to(tl.int64) * (K - 1) * C + c
    i = block * ROWS + tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    if BIAS:
        total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        at = i - (K - 1) + j  # before the first token they are the state's
        mask = inside & (i < length)
        here = mask & (at >= 0)
        value = tl.load(x + (start + at) * x_stride + c, mask=here, other=0.0).to(tl.float32)
        if GATED:
            value *= tl.load(in_gate + (start + at) * in_stride + c, mask=here, other=0.0).to(
                tl.float32
            )
        kept = tl.load(own + (at + K - 1) * C, mask=mask & (at < 0) & goes_on, other=0.0)
        w = tl.load(weight + c * w_c + j * w_k, mask=inside, other=0.0)
        total += w.to(tl.float32) * (value + kept)
    if SILU:
        total = total * tl.sigmoid(total)
    if GATED:
        gate = tl.load(out_gate + (start + i) * out_stride + c, mask=inside & (i < length), other=0)
        total *= gate.to(tl.float32)
    tl.store(out + (start + i) * C + c, total, mask=inside & (i < length))
    if block == 0:
        r = tl.arange(0, BEFORE)[:, None]
        first = length - (K - 1) + r
        kept_at = inside & (r < K - 1)
        fresh = kept_at & (first >= 0)
        new = tl.load(x + (start + first) * x_stride + c, mask=fresh, other=0.0).to(tl.float32)
        if GATED:
            new *= tl.load(in_gate + (start + first) * in_stride + c, mask=fresh, other=0.0).to(
                tl.float32
            )
        old = tl.load(own + (length + r) * C, mask=kept_at & (first < 0) & goes_on, other=0.0)
        tl.debug_barrier()  # all of it is read before any of it is written
        tl.store(own + r * C, new + old, mask=kept_at)


Gates = tuple[torch.Tensor, torch.Tensor]


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
    bias: torch.Tensor | None = None,
    gates: Gates | None = None,
) -> torch.device:
    device = check_device(x, weight, state, batch.slots)
    if weight.ndim != 2 or not 2 <= weight.shape[1] <= MAX_KERNEL:
        raise PykernelsError(
            f"the weight is {tuple(weight.shape)}", f"Give [C, K], K from 2 to {MAX_KERNEL}"
        )
    C, K = weight.shape
    if weight.dtype not in FLOATS:
        raise PykernelsError(f"the weight is {weight.dtype}", "Give floats")
    check_floats("x", x, len(x), C)
    if bias is not None:
        check_floats("bias", bias, C)
    for name, gate in zip(("in_gate", "out_gate"), gates or (), strict=False):
        check_floats(name, gate, len(x), C)
    check_states(state, batch, K - 1, C)
    return device


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
    bias: torch.Tensor | None = None,
    gates: Gates | None = None,
) -> str | None:
    """None if ``causal_conv1d`` takes these, or the reason why not."""
    return why_not(_check, x, weight, state, batch, bias, gates)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
    *,
    silu: bool = True,
    bias: torch.Tensor | None = None,
    gates: Gates | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``pykernels.ref.causal_conv1d``: the same shapes, on the GPU; sums are float32.

    Args:
        x: floats [T, C], rows of any stride.
        weight: floats [C, K], any strides, K up to 16.
        state: float32 [slots, K - 1, C], contiguous.
        bias: floats [C].
        gates: floats [T, C] each, rows of any stride: factors of the inputs, which the state has
            with them, and of the result.
        out: floats [T, C], contiguous, not x itself; rows of no sequence stay as they are.

    Returns:
        [T, C] in x's dtype.

    Raises:
        PykernelsError: a dtype, size or GPU that the kernel does not take.
    """
    _check(x, weight, state, batch, bias, gates)
    before, behind = gates if gates is not None else (x, x)
    C, K = weight.shape
    out = check_out(out, x, *x.shape)
    if x.numel() and batch.S and batch.max_length:
        if out.data_ptr() == x.data_ptr() != 0:  # 0: of tensors without data
            raise PykernelsError("out is x", "Sums read the rows before theirs: give another one")
        rows = min(MAX_KERNEL, triton.next_power_of_2(batch.max_length))
        _causal_conv1d[(most_blocks(batch, len(x), rows), triton.cdiv(C, _CHANNELS))](
            x,
            weight,
            weight if bias is None else bias,
            before,
            behind,
            state,
            batch.starts,
            batch.lengths,
            batch.slots,
            batch.past,
            out,
            C,
            batch.S,
            x.stride(0),
            before.stride(0),
            behind.stride(0),
            *weight.stride(),
            K=K,
            BEFORE=triton.next_power_of_2(K - 1),
            SILU=bool(silu),
            BIAS=bias is not None,
            GATED=gates is not None,
            ROWS=rows,
            SEQUENCES=sequences_of(batch, rows),
            CHANNELS=_CHANNELS,
            num_warps=4,
        )
    return out
