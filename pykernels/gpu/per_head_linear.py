"""A matrix for each head: latent attention's absorbed W_UK and W_UV, in decode and prefill.

With few tokens it is a stream of weights (DeepSeek-V3: 17 MB for each of the two), so programs take
few rows of a head's matrix, and K at once where it fits. With many, it is a batched product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .common.bf16 import dot, to_bf16
from .common.launch import FLOATS, check_device, unsupported
from .plans.gemm import at_least, powers_of_two


@dataclass(frozen=True)
class PerHeadPlan:
    """Tiles: ``rows`` of a head's matrix, ``tokens``, and steps of K."""

    rows: int
    tokens: int
    step: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "tokens", "step", "num_warps")
        at_least(16, self, "rows", "tokens", "step")
        at_least(1, self, "num_stages")


def per_head_plan(T: int, N: int, K: int) -> PerHeadPlan:
    """One tile of up to 64 tokens, so that weights are read once; beyond, tiles of 128."""
    step = max(16, min(128 if T <= 64 else 64, triton.next_power_of_2(K)))
    most = 64 if T <= 64 else 128
    rows = max(16, min(most, triton.next_power_of_2(N)))
    tokens = max(16, min(triton.next_power_of_2(T), most))
    return PerHeadPlan(rows, tokens, step, 8 if rows * tokens >= 128 * 128 else 4, 3)


@triton.jit(do_not_specialize=["T"])  # one kernel for any number of tokens
def _per_head(
    x,
    weight,
    out,
    T,
    N,
    K,
    x_t,
    x_g,
    out_t,
    out_g,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(1).to(tl.int64)
    t = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        w = tl.load(
            weight + (g * N + n)[:, None] * K + k[None, :],
            mask=(n < N)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        rows = tl.load(
            x + t[None, :] * x_t + g * x_g + k[:, None],
            mask=(t < T)[None, :] & (k < K)[:, None],
            other=0.0,
        )
        acc = dot(w, to_bf16(rows.to(tl.float32)), acc)
    at = out + t[None, :] * out_t + g * out_g + n[:, None]
    mask = (t < T)[None, :] & (n < N)[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(at, to_bf16(acc), mask=mask)
    else:
        tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


def supports(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """None if `per_head_linear` takes these, or the reason why not."""
    if x.ndim != 3 or x.dtype not in FLOATS or x.stride(2) != 1:
        return f"x is {x.dtype} {tuple(x.shape)}, not floats [T, G, K] with a dense last dimension"
    if weight.ndim != 3 or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        return f"the weight is {weight.dtype} {tuple(weight.shape)}, not contiguous bf16 [G, N, K]"
    if (weight.shape[0], weight.shape[2]) != tuple(x.shape[1:]) or not weight.numel():
        return f"the weight is {tuple(weight.shape)}, x {tuple(x.shape)}"
    return unsupported(x, weight)


def per_head_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    plan: PerHeadPlan | None = None,
) -> torch.Tensor:
    """``out[t, g] = weight[g] @ x[t, g]``, sums in float32, rounded once; the same in every run.

    Args:
        x: [T, G, K], floats, rounded to bf16; the last dimension dense, so that a slice of wider
            heads is read where it lies.
        weight: bf16 [G, N, K], contiguous.
        out: [T, G, N], floats, the last dimension dense, so that it may be a slice too; None: a new
            one, like ``x``.
        plan: None takes ``per_head_plan``'s.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    check_device(x, weight, *(() if out is None else (out,)))
    if reason := supports(x, weight):
        raise PykernelsError(f"per_head_linear does not take these: {reason}", "Convert them")
    (T, G, K), N = x.shape, weight.shape[1]
    if out is None:
        out = x.new_empty(T, G, N)
    if out.shape != (T, G, N) or out.dtype not in FLOATS or out.stride(2) != 1:
        raise PykernelsError(
            f"out is {out.dtype} {tuple(out.shape)}", f"Give floats {[T, G, N]}, the last dense"
        )
    if T:
        plan = plan or per_head_plan(T, N, K)
        grid = (triton.cdiv(N, plan.rows), G, triton.cdiv(T, plan.tokens))
        _per_head[grid](
            x,
            weight,
            out,
            T,
            N,
            K,
            x.stride(0),
            x.stride(1),
            out.stride(0),
            out.stride(1),
            ROWS=plan.rows,
            TOKENS=plan.tokens,
            STEP=plan.step,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )
    return out
