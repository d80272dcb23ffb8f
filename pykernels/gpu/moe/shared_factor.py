"""The factor of a shared expert, the sigmoid of one linear, as the choice of a token that takes one
expert of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ...shapes import Routing, SortedPairs
from ..common.launch import FLOATS, check_device

_BLOCK = 2048


@triton.jit
def _shared_factor(
    x,
    gate,
    slots,
    ids,
    weights,
    pairs,
    starts,
    positions,
    H,
    x_stride,
    PADDED: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, H, BLOCK):
        h = first + tl.arange(0, BLOCK)
        row = tl.load(x + t * x_stride + h, mask=h < H, other=0.0).to(tl.float32)
        total += row * tl.load(gate + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(weights + t, tl.sigmoid(tl.sum(total, 0)))
    if PADDED:
        tl.store(ids + t, tl.where(tl.load(slots + t) < 0, -1, 0))
    else:
        tl.store(ids + t, 0)
    if ORDERED:
        tl.store(pairs, 0)
        tl.store(starts, 0)
        tl.store(starts + 1, 1)
        tl.store(positions, 0)


def shared_factor(
    x: torch.Tensor,
    gate: torch.Tensor,
    out: Routing,
    order: SortedPairs | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> Routing:
    """``ref.router`` with one expert and the sigmoid of ``ref.router_logits``, in one launch.

    Args:
        x: floats [T, H], rows of any stride.
        gate: floats [1, H], contiguous.
        out: ids, integers [T, 1], and weights, float32 [T, 1].
        order: of one token: where its one pair is.
        slot_mapping: integers [T]; a token whose slot is negative is padding and takes no expert:
            its id is -1.

    Raises:
        PykernelsError: another dtype or shape, or no Triton for this device.
    """
    check_device(x, gate, out.weights)
    (T, H), rows = x.shape, (len(x), 1)
    if gate.shape != (1, H) or x.dtype not in FLOATS or gate.dtype not in FLOATS:
        raise PykernelsError(
            f"{x.dtype} {(T, H)} by {gate.dtype} {tuple(gate.shape)}", "Give floats [1, H]"
        )
    if x.stride(1) != 1 or not gate.is_contiguous():
        raise PykernelsError("tokens or the gate have gaps", "Make them contiguous")
    if out.ids.shape != rows or out.weights.shape != rows or (order is not None and T != 1):
        raise PykernelsError(f"a choice of {tuple(out.ids.shape)}", f"Give {rows}, an order of one")
    if T:
        places = (out.ids,) * 3  # unread
        if order is not None:
            places = order.pairs, order.starts, order.positions
        _shared_factor[(T,)](
            x,
            gate,
            out.ids if slot_mapping is None else slot_mapping,
            out.ids,
            out.weights,
            *places,
            H,
            x.stride(0),
            PADDED=slot_mapping is not None,
            ORDERED=order is not None,
            BLOCK=min(_BLOCK, triton.next_power_of_2(H)),
            num_warps=8,
        )
    return out
