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

MAX_ADDENDS, MAX_ROWS = 5, 4
_BLOCK = 256  # numbers a program copies: 28 programs for a row of 7168
_ROWS = (*FLOATS, torch.int32, torch.int64)


@triton.jit
def _copy_block(source, target, t, n, N, stride):
    # The host may have written it after this kernel's graph was launched: volatile, so that nothing
    # that was cached before is taken for it.
    value = tl.load(source + t * stride + n, mask=n < N, other=0, volatile=True)
    to = target + t * N + n
    if target.dtype.element_ty == tl.bfloat16:
        tl.store(to, to_bf16(value.to(tl.float32)), mask=n < N)
    else:
        tl.store(to, value.to(target.dtype.element_ty), mask=n < N)


@triton.jit
def _copy_rows(
    x0,
    x1,
    x2,
    x3,
    y0,
    y1,
    y2,
    y3,
    N0,
    N1,
    N2,
    N3,
    s0,
    s1,
    s2,
    s3,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _copy_block(x0, y0, t, n, N0, s0)
    if COUNT > 1:
        _copy_block(x1, y1, t, n, N1, s1)
    if COUNT > 2:
        _copy_block(x2, y2, t, n, N2, s2)
    if COUNT > 3:
        _copy_block(x3, y3, t, n, N3, s3)


@triton.jit
def _combine(
    residual,
    a0,
    a1,
    a2,
    a3,
    a4,
    weight,
    out,
    total,
    H,
    r_stride,
    s0,
    s1,
    s2,
    s3,
    s4,
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
    if COUNT > 4:
        x4 = tl.load(a4 + t * s4 + h, mask=mask, other=0.0, volatile=True).to(tl.float32)
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
    if COUNT > 4:
        value += x4
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
    """None if rows like these are combined, or the reason why not."""
    if x.dtype not in FLOATS or x.ndim != 2 or x.stride(1) != 1:
        return f"{x.dtype} {tuple(x.shape)}, not floats [T, H] with dense rows"
    if not 0 < x.shape[1] <= MAX_WIDTH:
        return f"rows of {x.shape[1]}, not 1 to {MAX_WIDTH}"
    return unsupported(x)


def copy_rows(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copies rows over the link, converted to what the targets hold. One launch.

    Many programs share a row: one alone pulls 28 KB from the host in 15 us, all together in 4.

    Args:
        sources: up to ``MAX_ROWS`` of [T, N], each with its own N; floats or integers, rows dense;
            on the GPU, or pinned.
        targets: of the same shapes, contiguous; on the GPU, or pinned. The CPU may read them when a
            flag behind this kernel says so.

    Raises:
        PykernelsError: other dtypes or shapes, memory that is not pinned, or no Triton here.
    """
    if not 0 < len(sources) == len(targets) <= MAX_ROWS:
        raise PykernelsError(
            f"{len(sources)} sources, {len(targets)} targets", f"Give 1 to {MAX_ROWS} of each"
        )
    for source, target in zip(sources, targets, strict=True):
        _check_copy(source, target)
    T, most = len(sources[0]), max(x.shape[1] for x in sources)
    if not T or not most:
        return
    empty = [None] * (MAX_ROWS - len(sources))
    _copy_rows[(T, triton.cdiv(most, _BLOCK))](
        *sources,
        *empty,
        *targets,
        *empty,
        *(x.shape[1] for x in sources),
        *(0 for _ in empty),
        *(x.stride(0) for x in sources),
        *(0 for _ in empty),
        COUNT=len(sources),
        BLOCK=_BLOCK,
        num_warps=1,
    )


def _check_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    shape = tuple(source.shape)
    if source.dtype not in _ROWS or source.ndim != 2 or (shape[1] > 1 and source.stride(1) != 1):
        raise PykernelsError(f"{source.dtype} {shape} to copy", "Give numbers [T, N], rows dense")
    if target.dtype not in _ROWS or tuple(target.shape) != shape or not target.is_contiguous():
        raise PykernelsError(
            f"the target of {shape} is {target.dtype} {tuple(target.shape)}",
            "Give a contiguous one of the same shape",
        )
    if source.dtype.is_floating_point != target.dtype.is_floating_point:
        raise PykernelsError(f"{source.dtype} to {target.dtype}", "Give floats or integers to both")
    for name, x in (("a source", source), ("a target", target)):
        _check_host(name, x)
        if x.device.type != "cpu" or interpreted():
            check_device(x)


def combine(
    residual: torch.Tensor,
    addends: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream behind a layer's experts, and the norm that the next layer begins with.

    One launch for each ``MAX_ADDENDS``. Sums are float32, rounded once to what ``out`` holds.

    Args:
        residual: [T, H], floats, rows dense.
        addends: any number, of the same shape, on the GPU or pinned, rows dense; added in this
            order: what shared experts, experts on the GPU and experts on the CPU (of both
            this layer's, and those deferred from the one before) gave.
        weight: [H], of the RMSNorm.
        eps: added to its mean.
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
    while len(addends) > MAX_ADDENDS:
        sums = torch.empty(T, H, dtype=torch.float32, device=residual.device)
        combine(residual, addends[:MAX_ADDENDS], weight, eps, (normed, sums))
        residual, addends = sums, addends[MAX_ADDENDS:]
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
