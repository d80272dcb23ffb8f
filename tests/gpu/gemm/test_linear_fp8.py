"""Linears of E4M3 rows by the kernel written out for Hopper: interpreted, and on its GPU."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.gpu.common import launch
from pykernels.gpu.gemm import grouped
from pykernels.gpu.gemm.hopper import fp8, linear_fp8
from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.plans.gemm import GemmPlan
from pykernels.gpu.quantize import quantize_fp8
from pykernels.quant import get_format
from pykernels.testing import relative_error

from ..gluon_shim import interpret
from .test_linear import made

PLAN = GemmPlan(128, 128, 128, 2, warp_specialized=True)
FP8 = get_format("fp8")


@pytest.fixture(autouse=True)
def warp_specialized(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, or the interpreter's versions in their places."""
    if not launch.interpreted():
        if launch.arch(device)[0] != 9:
            pytest.skip("no Hopper GPU")
        return
    monkeypatch.setattr(grouped, "supports_warp_specialized", lambda *args: True)
    interpret(monkeypatch, (fp8, "gemm_fp8_hopper"), (linear_fp8, "add_tail"))


CASES = [
    (3, 200, 640, (0, 3), True, "one tile in parts, half a block of outputs"),
    (130, 600, 576, (4, 3), True, "whole tiles, then shared ones; ragged in all sizes"),
    (129, 320, 192, (4, 1), False, "whole tiles alone, no bias"),
    (3, 300, 128, (2, 1), True, "a group of fewer blocks of rows than it may have"),
]


@pytest.mark.parametrize(
    ("M", "N", "K", "split", "biased", "why"), CASES, ids=[c[5] for c in CASES]
)
def test_against_float64(
    M: int,
    N: int,
    K: int,
    split: tuple[int, int],
    biased: bool,
    why: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_fp8, "tail_split", lambda *sizes: split)
    weight, stack = made("fp8", N, K)
    x, bias = torch.randn(M, K).bfloat16(), torch.randn(N) if biased else None
    out = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device=device)
    codes, scales = quantize_fp8(x.to(device))
    linear_fp8.multiply_rows(
        codes, scales, stack.to(device), out, None if bias is None else bias.to(device), 2
    )
    truth = ref.linear(x, weight, bias, fmt=FP8, activations="fp8", dtype=torch.float64)
    assert relative_error(out.cpu(), truth) < 4e-3


def test_a_linear_goes_there_by_its_plan(device: torch.device) -> None:
    weight, stack = made("fp8", 136, 192)
    x = torch.randn(5, 192).bfloat16()
    y = linear(x.to(device), stack.to(device), activations="fp8", plan=PLAN)
    truth = ref.linear(x, weight, fmt=FP8, activations="fp8", dtype=torch.float64)
    assert relative_error(y.cpu(), truth) < 4e-3
