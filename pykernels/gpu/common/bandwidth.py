"""The read roof: a kernel that does nothing but read device memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from .launch import check_device

_BLOCK = 4096


@triton.jit
def _read(data, sums, n, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(ROUNDS):
        acc += tl.load(data + at + i * BLOCK, mask=at + i * BLOCK < n, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(acc, 0))


def read(data: torch.Tensor) -> torch.Tensor:
    """Sums of slices: every byte of ``data`` is read once, next to nothing is written.

    Args:
        data: int32 [N], contiguous.

    Returns:
        int32 [ceil(N / 16384)], each the (wrapping) sum of 16384 elements.

    Raises:
        PykernelsError: another dtype, or Triton kernels do not run on its device.
    """
    if data.dtype != torch.int32 or not data.is_contiguous():
        raise PykernelsError(f"read() got {data.dtype}", "Give it contiguous int32")
    check_device(data)
    rounds = 4
    num_ctas = triton.cdiv(data.numel(), _BLOCK * rounds)
    sums = torch.empty(num_ctas, dtype=torch.int32, device=data.device)
    if num_ctas:
        _read[(num_ctas,)](data, sums, data.numel(), BLOCK=_BLOCK, ROUNDS=rounds, num_warps=8)
    return sums
