"""The router's logits in float32: hidden [T, H] times gate [E, H].

Products of two bf16 numbers are exact in float32, so tensor cores lose nothing but the order of the
sums. A float32 gate is taken apart into three bf16 numbers that add up to it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .arith import dot
from .launch import check_device

FEW_TOKENS = 8
"""Up to so many, a program keeps its rows of the gate in registers and reads them once."""
MAX_FEW_WIDTH = 16384


@dataclass(frozen=True)
class GatePlan:
    """Tiles of the product; ``splits`` of H are summed by a second launch where above 1."""

    block_t: int
    block_e: int
    block_h: int
    splits: int
    warps: int
    stages: int


def gate_plan(T: int, E: int, H: int, multiprocessors: int = 132) -> GatePlan:
    """About one program a multiprocessor: large tiles for prompts, splits of H for few tokens."""
    block_t, block_e = (128, 128) if T >= 2048 else (64, 64) if T >= 256 else (16, 32)
    programs = triton.cdiv(T, block_t) * triton.cdiv(E, block_e)
    splits = max(1, min(16, multiprocessors // programs, H // 256))
    block_h = 64 if block_t >= 64 else 128
    return GatePlan(block_t, block_e, block_h, splits, 8 if block_t == 128 else 4, 3)


@triton.jit
def _few(x, gate, out, H, E, x_stride, T: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr):
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    h = tl.arange(0, BLOCK)
    mask = (e < E)[:, None] & (h < H)[None, :]
    at = e.to(tl.int64)[:, None] * H + h[None, :]
    w = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    for t in tl.static_range(T):
        row = tl.load(x + t * x_stride + h, mask=h < H, other=0.0).to(tl.float32)
        tl.store(out + t * E + e, tl.sum(w * row[None, :], 1), mask=e < E)


@triton.jit(do_not_specialize=["T"])  # one kernel for any number of tokens
def _many(
    x, gate, out, T, E, H, x_stride, per_split,
    PARTS: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    split = tl.program_id(2)
    total = tl.zeros([BE, BT], tl.float32)  # gate first: its parts are an operand in registers
    end = tl.minimum(split * per_split + per_split, H)
    for first in range(split * per_split, end, BH):
        h = first + tl.arange(0, BH)
        w = tl.load(
            gate + e.to(tl.int64)[:, None] * H + h[None, :],
            mask=(e < E)[:, None] & (h < end)[None, :], other=0.0,
        )  # fmt: skip
        rows = tl.load(
            x + t.to(tl.int64)[None, :] * x_stride + h[:, None],
            mask=(t < T)[None, :] & (h < end)[:, None], other=0.0,
        )  # fmt: skip
        if PARTS == 0:
            total += tl.dot(w.to(tl.float32), rows.to(tl.float32), input_precision="ieee")
        elif PARTS == 1:
            total = dot(w, rows, total)
        else:
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            total = dot(low, rows, total)
            total = dot(middle, rows, total)
            total = dot(high, rows, total)
    at = (split.to(tl.int64) * T + t[None, :]) * E + e[:, None]
    tl.store(out + at, total, mask=(t < T)[None, :] & (e < E)[:, None])


def supports(hidden: torch.Tensor, gate: torch.Tensor) -> str | None:
    """None if `router_logits` takes these, or the reason why not."""
    for name, x in (("hidden", hidden), ("gate", gate)):
        if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float32) or x.stride(1) != 1:
            return f"{name} is {x.dtype} {tuple(x.shape)}, not bf16 or float32 with dense rows"
    if hidden.shape[1] != gate.shape[1] or not gate.is_contiguous():
        return f"the gate is {tuple(gate.shape)}, hidden {tuple(hidden.shape)}"
    return None


def router_logits(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor | None = None,
    plan: GatePlan | None = None,
) -> torch.Tensor:
    """``hidden @ gate.T``, float32 [T, E]; the same in every run.

    Args:
        hidden: bf16 or float32 [T, H], rows dense.
        gate: bf16 or float32 [E, H], contiguous.
        out: float32 [T, E], contiguous.
        plan: of more than a few tokens; None takes ``gate_plan``'s.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    if reason := supports(hidden, gate):
        raise PykernelsError(f"router_logits does not take these: {reason}", "Convert them")
    device = check_device(hidden, gate)
    (T, H), E = hidden.shape, gate.shape[0]
    if out is None:
        out = torch.empty(T, E, dtype=torch.float32, device=device)
    if out.shape != (T, E) or out.dtype != torch.float32 or not out.is_contiguous():
        raise PykernelsError(f"out is {out.dtype} {tuple(out.shape)}", f"Give float32 [{T}, {E}]")
    if T == 0:
        return out
    if T <= FEW_TOKENS and H <= MAX_FEW_WIDTH and plan is None:
        _few[(triton.cdiv(E, 2),)](
            hidden, gate, out, H, E, hidden.stride(0),
            T=T, BE=2, BLOCK=triton.next_power_of_2(H), num_warps=8,
        )  # fmt: skip
        return out
    plan = plan or gate_plan(T, E, H)
    parts = 0 if hidden.dtype == torch.float32 else 1 if gate.dtype == torch.bfloat16 else 3
    per_split = triton.cdiv(triton.cdiv(H, plan.splits), plan.block_h) * plan.block_h
    sums = out if plan.splits == 1 else out.new_empty(plan.splits, T, E)
    grid = (triton.cdiv(T, plan.block_t), triton.cdiv(E, plan.block_e), plan.splits)
    _many[grid](
        hidden, gate, sums, T, E, H, hidden.stride(0), per_split,
        PARTS=parts, BT=plan.block_t, BE=plan.block_e, BH=plan.block_h,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if plan.splits > 1:
        torch.sum(sums, 0, out=out)
    return out
