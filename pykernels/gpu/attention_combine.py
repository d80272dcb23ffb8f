"""Partial results of the splits of a sequence, made one: weights from their log-sum-exps."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .launch import arch

_D_BLOCK, _SPLIT_BLOCK = 128, 64  # at most


@triton.jit
def _combine(
    partial, lse, out, splits,
    D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()  # until the splits are done
    row = tl.program_id(0).to(tl.int64)  # of B * R
    d = tl.program_id(1) * D_BLOCK + tl.arange(0, D_BLOCK)
    n = tl.arange(0, BLOCK)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([D_BLOCK], tl.float32)
    for start in range(0, splits, BLOCK):
        at = start + n
        z = tl.load(lse + row * splits + at, mask=at < splits, other=float("-inf"))
        top = tl.maximum(m, tl.max(z, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp2(z - base)  # [BLOCK]
        alpha = tl.exp2(m - base)
        there = (at < splits)[:, None] & (d < D)[None, :]
        x = tl.load(partial + (row * splits + at)[:, None] * D + d[None, :], mask=there, other=0.0)
        # An empty split wrote no values. It is left out here, not in the load, which would wait.
        x = tl.where((z > float("-inf"))[:, None], x.to(tl.float32) * w[:, None], 0.0)
        acc = acc * alpha + tl.sum(x, 0)
        total = total * alpha + tl.sum(w, 0)
        m = top
    y = acc / tl.where(total == 0, 1.0, total)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty), mask=d < D)


class Partials:
    """Scratch of one call: normalised partial results and their log-sum-exps, base 2.

    Attributes:
        values: [B, R, splits, D], or the result itself where there is one split.
        lse: float32 [B, R, splits].
        early: whether the combining kernel is launched while the splits still run (from Hopper on):
            its programs are there when they end. In a graph it becomes an edge of that kind.
    """

    def __init__(self, out: torch.Tensor, splits: int) -> None:
        """out: [B, R, D], contiguous; it is what ``combine`` fills."""
        B, R, D = out.shape
        self.out, self.splits = out, splits
        self.early = splits > 1 and arch(out.device)[0] >= 9
        shape = (B, R, splits)
        self.lse = torch.empty(
            shape if splits > 1 else (1,), dtype=torch.float32, device=out.device
        )
        self.values = (
            torch.empty(*shape, D, dtype=torch.float32, device=out.device) if splits > 1 else out
        )

    def combine(self) -> None:
        """``out`` from the partial results; nothing to do for one split."""
        B, R, D = self.out.shape
        if self.splits == 1:
            return
        block = min(_D_BLOCK, triton.next_power_of_2(D))
        launch: dict[str, Any] = {"launch_pdl": True} if self.early else {}
        _combine[(B * R, triton.cdiv(D, block))](
            self.values, self.lse, self.out, self.splits,
            D=D, D_BLOCK=block, BLOCK=min(_SPLIT_BLOCK, triton.next_power_of_2(self.splits)),
            EARLY=self.early, num_warps=4, **launch,
        )  # fmt: skip
