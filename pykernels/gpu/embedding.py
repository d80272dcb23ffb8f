"""The embedding gather."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .common.launch import FLOATS, check_device, unsupported, why_not
from .common.strides import check_out, rows_of


@triton.jit
def _embed(ids, table, out, V, H, stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64)
    inside = (token >= 0) & (token < V)
    at = tl.where(inside, token, 0) * stride + h
    value = tl.load(table + at, mask=h < H, other=0.0).to(tl.float32)  # and back: exact
    tl.store(out + row * H + h, tl.where(inside, value * scale, float("nan")), mask=h < H)


def supports(ids: torch.Tensor, table: torch.Tensor) -> str | None:
    """None if `embed` takes these, or the reason why not."""
    if ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        return f"ids are {ids.dtype}, not contiguous int32 or int64"
    if table.ndim != 2 or table.dtype not in FLOATS or (ids.numel() and not table.shape[0]):
        return f"the table is {table.dtype} {tuple(table.shape)}, not floats [V, H]"
    return why_not(rows_of, table, "table") or unsupported(ids, table)


def embed(
    ids: torch.Tensor,
    table: torch.Tensor,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [..., H] of ``table`` [V, H] times ``scale``.

    An id outside ``0..V-1`` gets a row of NaN: the device cannot raise, but the error shows.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    check_device(ids, table)
    if reason := supports(ids, table):
        raise PykernelsError(f"embed does not take these: {reason}", "Convert them")
    V, H = table.shape
    _, stride = rows_of(table, "table")
    out = check_out(out, table, *ids.shape, H)
    if out.numel():
        block = min(1024, triton.next_power_of_2(H))
        grid = (ids.numel(), triton.cdiv(H, block))
        _embed[grid](ids, table, out, V, H, stride, float(scale), BLOCK=block, num_warps=4)
    return out
