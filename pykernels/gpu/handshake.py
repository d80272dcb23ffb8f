"""A layer's way to the experts on the CPU and back: kernels that store to and load from the host.

Small rows go fastest by kernels on pinned memory: copies in a graph take three times as long. Flags
in pinned memory say who may read when (``common.stream_memory``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .common.bf16 import to_bf16
from .common.launch import FLOATS, check_device, interpreted, unsupported
from .common.strides import check_out, rows_of
from .norm import MAX_WIDTH

MAX_ADDENDS = 4
_BLOCK = 256  # numbers a program stores: 28 programs for a row of 7168


@triton.jit
def _submit(
    x,
    ids,
    weights,
    to_x,
    to_ids,
    to_weights,
    T,
    H,
    K,
    x_stride,
    ids_stride,
    weights_stride,
    BLOCK: tl.constexpr,
    KP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + t * x_stride + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(to_x + t * H + h, to_bf16(value), mask=h < H)
    if tl.program_id(1) == 0:
        k = tl.arange(0, KP)
        expert = tl.load(ids + t * ids_stride + k, mask=k < K, other=-1)
        tl.store(to_ids + t * K + k, expert.to(tl.int32), mask=k < K)
        factor = tl.load(weights + t * weights_stride + k, mask=k < K, other=0.0)
        tl.store(to_weights + t * K + k, factor.to(tl.float32), mask=k < K)


@triton.jit
def _combine(
    residual,
    a0,
    a1,
    a2,
    a3,
    weight,
    out,
    total,
    H,
    r_stride,
    s0,
    s1,
    s2,
    s3,
    eps,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < H
    # What comes over the link is asked for first. The host wrote it after this kernel's graph was
    # launched: volatile, so that nothing that was cached before is taken for it.
    if COUNT > 0:
        x0 = tl.load(a0 + t * s0 + h, mask=mask, other=0.0, volatile=True).to(tl.float32)
    if COUNT > 1:
        x1 = tl.load(a1 + t * s1 + h, mask=mask, other=0.0, volatile=True).to(tl.float32)
    if COUNT > 2:
        x2 = tl.load(a2 + t * s2 + h, mask=mask, other=0.0, volatile=True).to(tl.float32)
    if COUNT > 3:
        x3 = tl.load(a3 + t * s3 + h, mask=mask, other=0.0, volatile=True).to(tl.float32)
    value = tl.load(residual + t * r_stride + h, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + h, mask=mask, other=0.0).to(tl.float32)
    if COUNT > 0:
        value += x0
    if COUNT > 1:
        value += x1
    if COUNT > 2:
        value += x2
    if COUNT > 3:
        value += x3
    if total.dtype.element_ty == tl.bfloat16:
        stored = to_bf16(value)
    else:
        stored = value.to(total.dtype.element_ty)
    tl.store(total + t * H + h, stored, mask=mask)
    value = stored.to(tl.float32)  # what later layers will see
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / H + eps) * w
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + t * H + h, to_bf16(normed), mask=mask)
    else:
        tl.store(out + t * H + h, normed.to(out.dtype.element_ty), mask=mask)


def _check_host(name: str, x: torch.Tensor) -> None:
    """The kernels may reach it: on the GPU's own side, or pinned."""
    if interpreted() or x.device.type != "cpu" or not x.numel():  # nothing is pinned of nothing
        return
    if not x.is_pinned():
        raise PykernelsError(f"{name} is not pinned", "Give pinned or registered memory")


def supports(x: torch.Tensor) -> str | None:
    """None if rows like these are submitted and combined, or the reason why not."""
    if x.dtype not in FLOATS or x.ndim != 2 or x.stride(1) != 1:
        return f"{x.dtype} {tuple(x.shape)}, not floats [T, H] with dense rows"
    if not 0 < x.shape[1] <= MAX_WIDTH:
        return f"rows of {x.shape[1]}, not 1 to {MAX_WIDTH}"
    return unsupported(x)


def submit(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stores activations and their routing to where the CPU reads them. One launch.

    Args:
        x: [T, H], floats, rows dense.
        ids: int32 or int64 [T, topk], rows dense; -1: not on the CPU.
        weights: float32 [T, topk], rows dense.
        out: bf16 [T, H], int32 [T, topk] and float32 [T, topk], contiguous, in pinned memory.

    Returns:
        ``out``; the CPU may read it when a flag behind this kernel says so.

    Raises:
        PykernelsError: other dtypes or shapes, memory that is not pinned, or no Triton here.
    """
    check_device(x, ids, weights)
    if reason := supports(x):
        raise PykernelsError(f"submit does not take these: {reason}", "Convert them")
    T, H = x.shape
    K = ids.shape[-1]
    if ids.dtype not in (torch.int32, torch.int64) or ids.shape != (T, K) or ids.stride(1) != 1:
        raise PykernelsError(f"ids are {ids.dtype} {tuple(ids.shape)}", f"Give ints [{T}, topk]")
    dense = weights.dtype == torch.float32 and weights.stride(-1) == 1
    if weights.shape != ids.shape or not dense:
        raise PykernelsError(
            f"weights are {weights.dtype} {tuple(weights.shape)}", f"Give float32 {[T, K]}"
        )
    wanted = ((torch.bfloat16, (T, H)), (torch.int32, (T, K)), (torch.float32, (T, K)))
    for name, to, (dtype, shape) in zip(("x", "ids", "weights"), out, wanted, strict=True):
        if to.dtype != dtype or to.shape != shape or not to.is_contiguous():
            raise PykernelsError(
                f"the place of {name} is {to.dtype} {tuple(to.shape)}",
                f"Give {dtype} {list(shape)}",
            )
        _check_host(f"the place of {name}", to)
    if T:
        _submit[(T, triton.cdiv(H, _BLOCK))](
            x,
            ids,
            weights,
            *out,
            T,
            H,
            K,
            x.stride(0),
            ids.stride(0),
            weights.stride(0),
            BLOCK=_BLOCK,
            KP=triton.next_power_of_2(K),
            num_warps=1,
        )
    return out


def combine(
    residual: torch.Tensor,
    addends: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream behind a layer's experts, and the norm that the next layer begins with.

    One launch. Sums are float32, rounded once to what ``out`` holds.

    Args:
        residual: [T, H], floats, rows dense.
        addends: up to ``MAX_ADDENDS``, of the same shape, on the GPU or pinned, rows dense; added
            in this order: what shared experts, experts on the GPU and experts on the CPU (this
            layer's, and those deferred from the one before) gave.
        weight: [H], of the RMSNorm.
        eps: beside its mean.
        out: the normed sum and the sum (which may be ``residual`` itself), contiguous floats; None:
            new ones, like ``residual``.

    Returns:
        The normed sum and the sum.

    Raises:
        PykernelsError: other dtypes or shapes, memory that is not pinned, or no Triton here.
    """
    check_device(residual, weight)
    if reason := supports(residual):
        raise PykernelsError(f"combine does not take these: {reason}", "Convert them")
    T, H = residual.shape
    if len(addends) > MAX_ADDENDS:
        raise PykernelsError(f"{len(addends)} addends", f"Give {MAX_ADDENDS} at most")
    if weight.shape != (H,) or weight.dtype not in FLOATS or not weight.is_contiguous():
        raise PykernelsError(f"the weight is {weight.dtype} {tuple(weight.shape)}", f"Give [{H}]")
    for i, addend in enumerate(addends):
        if addend.shape != (T, H) or addend.dtype not in FLOATS or addend.stride(1) != 1:
            raise PykernelsError(
                f"addend {i} is {addend.dtype} {tuple(addend.shape)}", f"Give floats {[T, H]}"
            )
        _check_host(f"addend {i}", addend)
        if addend.device.type != "cpu":
            check_device(residual, addend)
    normed = check_out(out[0] if out else None, residual, T, H)
    total = check_out(out[1] if out else None, residual, T, H)
    if T:
        filled = [*addends, *[None] * (MAX_ADDENDS - len(addends))]
        strides = [0 if x is None else rows_of(x, "an addend")[1] for x in filled]
        block = triton.next_power_of_2(H)
        _combine[(T,)](
            residual,
            *filled,
            weight,
            normed,
            total,
            H,
            residual.stride(0),
            *strides,
            float(eps),
            COUNT=len(addends),
            BLOCK=block,
            num_warps=max(4, min(16, block // 512)),
        )
    return normed, total
