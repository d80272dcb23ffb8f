"""Elements more than 2 ** 31 apart: addresses are 64 bits wide.

Memory that nobody writes is not there: only pages that a test touches are taken from the CPU.
"""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.gpu.attention.gqa_prefill import gqa_prefill
from pykernels.gpu.attention.prefill import _aligned
from pykernels.gpu.common import launch
from pykernels.gpu.gemm.split_k import add_kernel
from pykernels.gpu.gemm.triton_kernels import gemm_bf16, gemm_fp8
from pykernels.gpu.moe.router_logits import _sum_splits
from pykernels.gpu.quantize import NATIVE_FP8, quantize_fp8
from pykernels.shapes import Ragged
from pykernels.testing import relative_error

BF16 = torch.bfloat16
HEAD = (1 << 30) + 64
"""Elements from one head to the next, as of 128 heads of a long prompt one behind the other."""


def far_apart(T: int, D: int, device: torch.device) -> torch.Tensor:
    """bfloat16 [T, 3, D], random."""
    memory = torch.empty(2 * HEAD + T * D, dtype=BF16, device=device)
    x = memory.as_strided((T, 3, D), (D, HEAD, 1))
    return x.copy_(torch.randn(T, 3, D, device=device))


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_prefill_of_heads_that_lie_far_apart(which: str, device: torch.device) -> None:
    given = {name: torch.randn(4, 3, 16, device=device).to(BF16) for name in "qkv"}
    given[which] = far_apart(4, 16, device)
    starts, lengths = (torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 4))
    batch = Ragged(starts, lengths, lengths, 4, k_starts=starts)
    truth = ref.gqa_prefill(*given.values(), batch, scale=0.25, dtype=torch.float64)
    assert relative_error(gqa_prefill(*given.values(), batch, scale=0.25), truth) < 8e-3


def test_warp_specialized_copies_not_for_heads_beyond_32_bits() -> None:
    def heads(stride: int) -> torch.Tensor:
        return torch.empty_strided((4, 128, 128), (128, stride, 1), dtype=BF16, device="meta")

    assert _aligned(heads(1 << 23)) and not _aligned(heads(1 << 24))


@pytest.mark.parametrize("kernel", ["parts of a product", "splits of a router's inputs"])
def test_parts_that_lie_far_apart_are_added(kernel: str, device: torch.device) -> None:
    """The first program alone, of as many as 3 parts of 2 ** 30 and some sums would take."""
    SIZE, BLOCK = HEAD, 64
    memory = torch.empty(2 * SIZE + BLOCK, device=device)
    parts = memory.as_strided((3, BLOCK), (SIZE, 1)).copy_(torch.randn(3, BLOCK, device=device))
    if kernel == "parts of a product":
        out = torch.empty(BLOCK, dtype=BF16, device=device)
        add_kernel[(1,)](memory, out, None, SIZE, SIZE, 3, False, BLOCK)
    else:
        out = torch.empty(BLOCK, device=device)
        _sum_splits[(1,)](memory, out, SIZE, 3, 4, BLOCK)
    assert relative_error(out, parts.double().sum(0)) < 4e-3


def test_a_matrix_of_more_weights_than_32_bits_count(device: torch.device) -> None:
    """One tile of a gated product: its rows of up lie 2 ** 31 weights behind those of gate."""
    N, K, COLS = (1 << 16) + 16, 1 << 15, 16
    w = torch.empty(1, 2, N, K, dtype=BF16, device=device)
    w[:, :, :COLS] = (torch.randn(1, 2, COLS, K, device=device) / K**0.5).to(BF16)
    x = torch.randn(1, K, device=device).to(BF16)
    out = torch.full((1, N), torch.nan, dtype=BF16, device=device)
    gemm_bf16[(1,)](
        x,
        w,
        out,
        None,
        None,
        None,
        1,
        1,
        N,
        K,
        1,
        N // COLS,
        GATED=True,
        GATHER=False,
        HAS_BIAS=False,
        ACT=None,
        W_TMA=False,
        X_TMA=False,
        EVEN_K=True,
        E_PADDED=0,
        BLOCK_M=16,
        BLOCK_N=2 * COLS,
        BLOCK_K=128,
        GROUP_M=1,
        STAGES=1,
    )
    gate, up = (w[0, i, :COLS].double() @ x[0].double() for i in range(2))
    assert relative_error(out[0, :COLS], torch.nn.functional.silu(gate) * up) < 8e-3


def test_an_e4m3_matrix_of_more_weights_than_32_bits_count(device: torch.device) -> None:
    N, K, COLS = (1 << 16) + 16, 1 << 15, 16
    w = torch.empty(1, 2, N, K, dtype=torch.uint8, device=device)
    w[:, :, :COLS] = 0x38  # 1.0
    w[:, 1, :COLS] = 0x40  # 2.0
    x = torch.randn(1, K, device=device)
    x, x_scale = quantize_fp8(x / K**0.5)
    scale = torch.ones(2, -(-N // 128), K // 128, device=device)
    out = torch.full((1, N), torch.nan, dtype=BF16, device=device)
    native = launch.arch(device) >= NATIVE_FP8
    gemm_fp8[(1,)](
        x if native else x.view(torch.uint8),
        x_scale,
        w.view(x.dtype) if native else w,
        scale,
        out,
        None,
        None,
        None,
        1,
        1,
        N,
        K,
        1,
        N // COLS,
        GATED=True,
        GATHER=False,
        HAS_BIAS=False,
        ACT=None,
        NATIVE=native,
        W_TMA=False,
        X_TMA=False,
        EVEN_K=True,
        E_PADDED=0,
        BLOCK_M=16,
        BLOCK_N=COLS,
        GROUP_M=1,
        STAGES=1,
    )
    each = (x.double().view(-1, 128) * x_scale.double().view(-1, 1)).sum()
    truth = torch.nn.functional.silu(each) * 2 * each
    assert relative_error(out[0, :COLS], truth.expand(COLS)) < 8e-3
