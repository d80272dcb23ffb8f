"""The router's logits in float32: hidden [T, H] times gate [E, H].

Products of two bf16 numbers are exact in float32, and a float32 gate is taken apart into three bf16
numbers that add up to it exactly. But tensor cores cut sums where float32 rounds them, an error
that grows with their number: they sum one block of H, and float32 additions sum the blocks (as
DeepSeek-V3 does for FP8, arXiv 2412.19437, 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ..common.bf16 import dot
from ..common.launch import H200_SMS, arch, check_device, unsupported
from ..common.strides import check_out
from ..plans.gemm import at_least, powers_of_two

FEW_TOKENS, FEW_EXPERTS = 8, 2048
"""Up to so many, float32 products and sums over all of H; a program reads its rows once. Of more
rows (a head's) two a program are 16,000 programs, which read 0.6 TB/s on an H100."""


@dataclass(frozen=True)
class GatePlan:
    """Tiles of the product; ``splits`` of H are summed by a second launch where above 1."""

    block_t: int
    block_e: int
    block_h: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        powers_of_two(self, "block_t", "block_e", "block_h", "num_warps")
        at_least(16, self, "block_t", "block_e", "block_h")
        at_least(1, self, "splits", "num_stages")


def gate_plan(T: int, E: int, H: int, wide: bool = False, num_sms: int = H200_SMS) -> GatePlan:
    """A program an SM with large tiles for prompts, else two, with splits of H.

    ``wide``: 192 KiB of shared memory hold three blocks of 128 of H of a bf16 gate.
    """
    if T >= 2048:
        block_t, block_e, block_h, wanted = 128, 128, 128 if wide else 64, 1
    else:
        block_t, block_e = max(16, min(64, triton.next_power_of_2(T))), 64
        block_h, wanted = 64, 2
    num_ctas = triton.cdiv(T, block_t) * triton.cdiv(E, block_e)
    splits = max(1, min(32, wanted * num_sms // num_ctas, H // 256))
    return GatePlan(block_t, block_e, block_h, splits, 8 if block_t == 128 else 4, 3)


@triton.jit(do_not_specialize=["T"])
def _dot_logits(
    x,
    gate,
    out,
    T,
    H,
    E,
    x_stride,
    TP: tl.constexpr,
    BE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    t = tl.arange(0, TP)
    acc = tl.zeros([TP, BE, BLOCK], tl.float32)
    for first in tl.range(0, H, BLOCK, num_stages=STAGES):
        h = first + tl.arange(0, BLOCK)
        at = e.to(tl.int64)[:, None] * H + h[None, :]
        w = tl.load(gate + at, mask=(e < E)[:, None] & (h < H)[None, :], other=0.0)
        at = t.to(tl.int64)[:, None] * x_stride + h[None, :]
        rows = tl.load(x + at, mask=(t < T)[:, None] & (h < H)[None, :], other=0.0)
        acc += w.to(tl.float32)[None, :, :] * rows.to(tl.float32)[:, None, :]
    at = t[:, None] * E + e[None, :]
    tl.store(out + at, tl.sum(acc, 2), mask=(t < T)[:, None] & (e < E)[None, :])


@triton.jit
def _sum_splits(sums, out, SIZE, splits, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    s = tl.arange(0, SPLITS)[:, None]
    found = tl.load(sums + s.to(tl.int64) * SIZE + i, mask=(s < splits) & (i < SIZE), other=0.0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.sum(found, 0), mask=i < SIZE)


@triton.jit(do_not_specialize=["T"])  # one kernel for any number of tokens
def _mma_logits(
    x,
    gate,
    out,
    T,
    E,
    H,
    x_stride,
    per_split,
    PARTS: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BH: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    split = tl.program_id(2)
    acc = tl.zeros([BE, BT], tl.float32)  # gate first: its parts are an operand in registers
    zero = tl.zeros([BE, BT], tl.float32)
    one = tl.full([BE, BT], 1.0, tl.float32)
    end = tl.minimum(split * per_split + per_split, H)
    for first in range(split * per_split, end, BH):
        h = first + tl.arange(0, BH)
        w = tl.load(
            gate + e.to(tl.int64)[:, None] * H + h[None, :],
            mask=(e < E)[:, None] & (h < end)[None, :],
            other=0.0,
        )
        rows = tl.load(
            x + t.to(tl.int64)[None, :] * x_stride + h[:, None],
            mask=(t < T)[None, :] & (h < end)[:, None],
            other=0.0,
        )
        if PARTS == 0:
            part = tl.dot(w.to(tl.float32), rows.to(tl.float32), input_precision="ieee")
        elif PARTS == 1:
            part = dot(w, rows, zero)
        else:
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            part = dot(high, rows, dot(middle, rows, dot(low, rows, zero)))
        acc = tl.fma(part, one, acc)  # a plain sum would be merged into the product
    at = (split.to(tl.int64) * T + t[None, :]) * E + e[:, None]
    tl.store(out + at, acc, mask=(t < T)[None, :] & (e < E)[:, None])


def supports(hidden: torch.Tensor, gate: torch.Tensor) -> str | None:
    """None if `router_logits` takes these, or the reason why not."""
    for name, x in (("hidden", hidden), ("gate", gate)):
        if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float32) or x.stride(1) != 1:
            return f"{name} is {x.dtype} {tuple(x.shape)}, not bf16 or float32 with dense rows"
    if not gate.numel():
        return f"the gate is {tuple(gate.shape)}: it has no experts, or no inputs"
    if hidden.shape[1] != gate.shape[1] or not gate.is_contiguous():
        return f"the gate is {tuple(gate.shape)}, hidden {tuple(hidden.shape)}"
    return unsupported(hidden, gate)


def router_logits(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor | None = None,
    plan: GatePlan | None = None,
) -> torch.Tensor:
    """``hidden @ gate.T``, float32 [T, E]; the same in every run.

    Args:
        hidden: bf16 or float32 [T, H], rows dense; H and E at least 1.
        gate: bf16 or float32 [E, H], contiguous.
        out: float32 [T, E], contiguous.
        plan: of more than a few tokens; None takes ``gate_plan``'s.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    device = check_device(hidden, gate)
    if reason := supports(hidden, gate):
        raise PykernelsError(f"router_logits does not take these: {reason}", "Convert them")
    (T, H), E = hidden.shape, gate.shape[0]
    out = check_out(out, hidden, T, E, dtype=torch.float32)
    if T == 0:
        return out
    if T <= FEW_TOKENS and E <= FEW_EXPERTS and plan is None:
        TP = triton.next_power_of_2(T)
        # One token's block is all of H, in registers; else blocks in flight, 96 KiB at most.
        block = min(triton.next_power_of_2(H), 8192 if TP == 1 else 1024)
        num_stages = 1 if TP == 1 else 4 if hidden.dtype == torch.bfloat16 else 3
        _dot_logits[(triton.cdiv(E, 2),)](
            hidden,
            gate,
            out,
            T,
            H,
            E,
            hidden.stride(0),
            TP=TP,
            BE=2,
            BLOCK=block,
            STAGES=num_stages,
            num_warps=8,
        )
        return out
    wide = arch(device)[0] in (9, 10) and gate.dtype == hidden.dtype == torch.bfloat16
    plan = plan or gate_plan(T, E, H, wide)
    parts = 0 if hidden.dtype == torch.float32 else 1 if gate.dtype == torch.bfloat16 else 3
    per_split = triton.cdiv(triton.cdiv(H, plan.splits), plan.block_h) * plan.block_h
    sums = out if plan.splits == 1 else out.new_empty(plan.splits, T, E)
    grid = (triton.cdiv(T, plan.block_t), triton.cdiv(E, plan.block_e), plan.splits)
    _mma_logits[grid](
        hidden,
        gate,
        sums,
        T,
        E,
        H,
        hidden.stride(0),
        per_split,
        PARTS=parts,
        BT=plan.block_t,
        BE=plan.block_e,
        BH=plan.block_h,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if plan.splits > 1:
        _sum_splits[(triton.cdiv(T * E, 256),)](
            sums,
            out,
            T * E,
            plan.splits,
            SPLITS=triton.next_power_of_2(plan.splits),
            BLOCK=256,
            num_warps=4,
        )
    return out
