"""A decode step of a gated delta net in two launches: what all layers of a model do in turn is
short, so that launches are a large part of it.

The first one convolves, makes the gates, and reads and corrects the states of heads; the second one
norms and gates what they gave. Programs of several heads read the inputs that the convolution's
state has of a key head, so no program of the first launch may replace them: the second one does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ...shapes import StateBatch
from ..common.launch import FLOATS, check_device, why_not
from ..common.strides import check_out
from .checks import check_floats, check_states
from .gate import gates_of
from .gated_delta_rule import MAX_HEAD

MAX_KERNEL = 16
_V_BLOCK = 32
_CHANNELS = 256


class DeltaNet(NamedTuple):
    """Weights and states of a layer, of HK key and HV value heads, and C = 2 HK DK + HV DV channels
    of queries, keys and values.

    Attributes:
        conv: floats [C, K], any strides; K from 2 to 16.
        conv_state: float32 [slots, K - 1, C], contiguous.
        state: float32 [slots, HV, DK, DV], contiguous.
        a_log, dt_bias: floats [HV].
        HK: key heads; ``tiled``: whether value head ``h`` has the key head ``h % HK``.
        scale: of queries; None: DK^-0.5.
        eps: of the norms of queries and keys.
    """

    conv: torch.Tensor
    conv_state: torch.Tensor
    state: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    HK: int
    tiled: bool = False
    scale: float | None = None
    eps: float = 1e-6


@triton.jit
def _convolved(x, own, weight, c, inside, goes_on, C, w_c, w_k, K: tl.constexpr):
    """The SiLU of the convolution of a token's channels, rounded as a tensor of x's dtype."""
    total = tl.zeros(c.shape, tl.float32)
    for j in tl.static_range(K):
        if j == K - 1:
            value = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
        else:
            value = tl.load(own + j * C + c, mask=inside & goes_on, other=0.0)
        total += tl.load(weight + c * w_c + j * w_k, mask=inside, other=0.0).to(tl.float32) * value
    return (total * tl.sigmoid(total)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _delta_step(
    x,
    a,
    b,
    conv,
    conv_state,
    state,
    a_log,
    dt_bias,
    starts,
    lengths,
    slots,
    past,
    out,
    scale,
    eps,
    C,
    HV,
    x_t,
    a_t,
    b_t,
    w_c,
    w_k,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    s, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + s).to(tl.int64)
    if (slot < 0) | (tl.load(lengths + s) <= 0):
        return
    t, goes_on = tl.load(starts + s).to(tl.int64), tl.load(past + s) > 0
    d = tl.arange(0, K_BLOCK)
    e = tl.program_id(0) * V_BLOCK + tl.arange(0, V_BLOCK)
    inputs, before = x + t * x_t, conv_state + slot * (K - 1) * C
    of_query = head // GROUP % HK * DK + d
    query = _convolved(inputs, before, conv, of_query, d < DK, goes_on, C, w_c, w_k, K)
    of_key = HK * DK + of_query
    key = _convolved(inputs, before, conv, of_key, d < DK, goes_on, C, w_c, w_k, K)
    of_value = 2 * HK * DK + head * DV + e
    value = _convolved(inputs, before, conv, of_value, e < DV, goes_on, C, w_c, w_k, K)
    log_decay, written = gates_of(
        tl.load(a + t * a_t + head).to(tl.float32),
        tl.load(b + t * b_t + head).to(tl.float32),
        tl.load(a_log + head).to(tl.float32),
        tl.load(dt_bias + head).to(tl.float32),
    )
    inside = (d < DK)[:, None] & (e < DV)[None, :]
    own = state + (slot * HV + head) * (DK * DV) + d[:, None] * DV + e[None, :]
    h = tl.load(own, mask=inside & goes_on, other=0.0) * tl.exp(log_decay)
    key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
    query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
    h += key[:, None] * ((value - tl.sum(h * key[:, None], 0)) * written)[None, :]
    tl.store(out + (t * HV + head) * DV + e, tl.sum(h * query[:, None], 0), mask=e < DV)
    tl.store(own, h, mask=inside)


@triton.jit(do_not_specialize=["rows", "norms"])
def _norm_and_shift(
    values,
    gate,
    weight,
    out,
    x,
    conv_state,
    starts,
    lengths,
    slots,
    past,
    rows,
    norms,
    HV,
    DV,
    C,
    v_t,
    gate_t,
    x_t,
    eps,
    K: tl.constexpr,
    BEFORE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The first ``norms`` programs norm and gate rows of heads; of the others each moves some
    channels of one sequence's inputs on."""
    p = tl.program_id(0)
    if p < norms:
        row = (p * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        d = tl.arange(0, BLOCK)[None, :]
        t, head, mask = row // HV, row % HV, (row < rows) & (d < DV)
        value = tl.load(values + t * v_t + head * DV + d, mask=mask, other=0.0).to(tl.float32)
        opened = tl.load(gate + t * gate_t + head * DV + d, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(value * value, 1) / DV
        w = tl.load(weight + d, mask=d < DV, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(mean + eps)[:, None] * w * opened
        tl.store(out + row * DV + d, value * tl.sigmoid(opened), mask=mask)
    else:
        blocks = tl.cdiv(C, CHANNELS)
        s = (p - norms) // blocks
        slot = tl.load(slots + s).to(tl.int64)
        has_token = (slot >= 0) & (tl.load(lengths + s) > 0)
        start, goes_on = tl.load(starts + s).to(tl.int64), tl.load(past + s) > 0
        c = (p - norms) % blocks * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        j = tl.arange(0, BEFORE)[:, None]
        inside = (c < C) & (j < K - 1) & has_token
        own, is_last = conv_state + slot * (K - 1) * C + c, j == K - 2
        kept = tl.load(own + (j + 1) * C, mask=inside & goes_on & (j < K - 2), other=0.0)
        new = tl.load(x + start * x_t + c + 0 * j, mask=inside & is_last, other=0.0)
        tl.debug_barrier()  # all of it is read before any of it is written
        tl.store(own + j * C, kept + new.to(tl.float32), mask=inside)


def _check(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, net: DeltaNet, batch: StateBatch
) -> torch.device:
    device = check_device(x, a, b, *net[:5], batch.slots)
    if net.state.ndim != 4 or not net.HK or net.state.shape[1] % net.HK:
        raise PykernelsError(
            f"states are {tuple(net.state.shape)}, of {net.HK} key heads",
            "Give [slots, HV, DK, DV], HV a multiple of HK",
        )
    HV, DK, DV = net.state.shape[1:]
    if not 16 <= DK <= MAX_HEAD or not 16 <= DV <= MAX_HEAD:
        raise PykernelsError(f"heads of {DK} and {DV}", f"The kernels take 16 to {MAX_HEAD}")
    C = 2 * net.HK * DK + HV * DV
    if net.conv.shape[:1] != (C,) or net.conv.ndim != 2 or not 2 <= net.conv.shape[1] <= MAX_KERNEL:
        raise PykernelsError(
            f"the weight is {tuple(net.conv.shape)}", f"Give [{C}, K], K from 2 to {MAX_KERNEL}"
        )
    if net.conv.dtype not in FLOATS:
        raise PykernelsError(f"the weight is {net.conv.dtype}", "Give floats")
    check_floats("x", x, len(x), C)
    for name, vector in (("a", a), ("b", b)):
        check_floats(name, vector, len(x), HV)
    for name, vector in (("a_log", net.a_log), ("dt_bias", net.dt_bias)):
        check_floats(name, vector, HV)
    check_states(net.state, batch, HV, DK, DV)
    check_states(net.conv_state, batch, net.conv.shape[1] - 1, C)
    return device


def supports(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, net: DeltaNet, batch: StateBatch
) -> str | None:
    """None if ``delta_step`` takes these, or the reason why not."""
    return why_not(_check, x, a, b, net, batch)


def delta_step(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    net: DeltaNet,
    batch: StateBatch,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``ref.causal_conv1d``, ``delta_gates`` and ``gated_delta_rule`` of one token a sequence, but
    that the convolution's state stays as it is until ``norm_and_shift``.

    Args:
        x: floats [T, C], rows of any stride: what is convolved.
        a, b: floats [T, HV], rows of any stride.
        net: its ``state`` is replaced.
        batch: sequences of one token, or of none.
        out: floats [T, HV, DV], contiguous; rows of no sequence stay as they are.

    Returns:
        [T, HV, DV] in x's dtype.

    Raises:
        PykernelsError: a dtype, size or GPU that the kernel does not take.
    """
    _check(x, a, b, net, batch)
    T, (HV, DK, DV) = len(x), net.state.shape[1:]
    out = check_out(out, x, T, HV, DV)
    if T and batch.S:
        v_block = min(_V_BLOCK, triton.next_power_of_2(DV))
        _delta_step[(triton.cdiv(DV, v_block), HV, batch.S)](
            x,
            a,
            b,
            net.conv,
            net.conv_state,
            net.state,
            net.a_log,
            net.dt_bias,
            batch.starts,
            batch.lengths,
            batch.slots,
            batch.past,
            out,
            DK**-0.5 if net.scale is None else float(net.scale),
            float(net.eps),
            x.shape[1],
            HV,
            x.stride(0),
            a.stride(0),
            b.stride(0),
            *net.conv.stride(),
            HK=net.HK,
            GROUP=1 if net.tiled else HV // net.HK,
            DK=DK,
            DV=DV,
            K=net.conv.shape[1],
            K_BLOCK=triton.next_power_of_2(DK),
            V_BLOCK=v_block,
            num_warps=4,
        )
    return out


def norm_and_shift(
    values: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``ref.gated_rms_norm``; and the convolution's state moves on by one token.

    Args:
        values: floats [T, HV, DV], contiguous: of ``delta_step``.
        gate: floats [T, HV, DV], contiguous but for the first dimension.
        weight: floats [DV].
        x: floats [T, C], rows of any stride; ``conv_state``: float32 [slots, K - 1, C], contiguous,
            which is replaced.
        batch: sequences of one token, or of none.
        out: floats [T, HV, DV], contiguous.

    Returns:
        [T, HV, DV] in the dtype of ``values``.

    Raises:
        PykernelsError: a dtype, size or GPU that the kernel does not take.
    """
    check_device(values, gate, weight, x, conv_state, batch.slots)
    T, HV, DV = values.shape
    check_floats("values", values, T, HV, DV)
    check_floats("gate", gate, T, HV, DV)
    check_floats("weight", weight, DV)
    if not values.is_contiguous() or gate.stride(1) != DV:
        raise PykernelsError("values or their gates have gaps", "Make them contiguous")
    C = x.shape[-1]
    check_floats("x", x, T, C)
    check_states(conv_state, batch, conv_state.shape[1], C)
    out = check_out(out, values, T, HV, DV)
    if T and batch.S:
        before, block = conv_state.shape[1], triton.next_power_of_2(DV)
        per_program = max(1, min(16, 2048 // block))
        norms = triton.cdiv(T * HV, per_program)
        _norm_and_shift[(norms + batch.S * triton.cdiv(C, _CHANNELS),)](
            values,
            gate,
            weight,
            out,
            x,
            conv_state,
            batch.starts,
            batch.lengths,
            batch.slots,
            batch.past,
            T * HV,
            norms,
            HV,
            DV,
            C,
            values.stride(0),
            gate.stride(0),
            x.stride(0),
            float(eps),
            K=before + 1,
            BEFORE=triton.next_power_of_2(before),
            ROWS=per_program,
            BLOCK=block,
            CHANNELS=_CHANNELS,
            num_warps=4,
        )
    return out
