"""Which kernel multiplies which rows, and by which plan."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from triton import cdiv

from pykernels.env import env
from pykernels.gpu.gemm import select as module
from pykernels.gpu.gemm.hopper import linear_fp8
from pykernels.gpu.gemm.select import kernel_of, select_experts
from pykernels.gpu.gemm.weights import empty_for_gpu
from pykernels.gpu.plans.gemm import DequantPlan, SkinnyExpertsPlan
from pykernels.gpu.plans.grouped import gemm_plan
from pykernels.gpu.plans.registers import dequant_experts_plan, dequant_plan
from pykernels.gpu.plans.tuned import write_tuned
from pykernels.quant import get_format
from pykernels.shapes import ExpertSpec

CPU = torch.device("cpu")
SMS = 132
HOPPER, AMPERE, INTERPRETER = (9, 0), (8, 0), (0, 0)

# kind, rows, outputs, GPU, whether dequant_gemm has a form, kernel
KERNELS = [
    ("int8", 1, 7168, HOPPER, True, "gemv"),
    ("fp8", 1, 7168, AMPERE, True, "gemv_mma"),
    ("q4_k", 8, 7168, AMPERE, False, "skinny_k_quants"),
    ("int8", 2, 7168, HOPPER, True, "skinny"),
    ("int4", 17, 7168, HOPPER, True, "dequant"),
    ("int4", 17, 7168, HOPPER, False, "skinny"),
    ("int4", 33, 7168, AMPERE, True, "linear"),
    ("fp8", 1501, 7168, HOPPER, True, "linear"),
    ("int4", 1, 7168, INTERPRETER, True, "linear"),
]


def test_which_kernel_multiplies_which_rows() -> None:
    for kind, M, N, capability, dequant, kernel in KERNELS:
        found = kernel_of(kind, M, N, 7168, SMS, capability, dequant)
        assert found == kernel, (kind, M, N, capability, dequant)
    assert kernel_of("int4", 1, 7168, 65536, SMS, HOPPER, True) == "skinny"  # K: no gemv_mma


@pytest.mark.parametrize("kind", ["int4", "int8", "q4_k"])
def test_no_part_of_dequant_gemm_is_empty_and_all_fit(kind: str) -> None:
    """Two programs of 4 warps share an SM's memory, one of 8 has all."""
    plans = [dequant_experts_plan(kind, rows) for rows in (3, 17, 33, 64, 128, 300)]
    for M, N, steps in product((9, 64, 300, 3000), (512, 7168, 18432), (1, 9, 56, 112)):
        plan = dequant_plan(kind, M, N, steps, SMS)
        share = cdiv(steps, plan.split_k)
        assert cdiv(steps, share) == plan.split_k
        plans.append(plan)
    for plan in plans:
        shared = plan.num_stages * plan.cols * 128 + plan.word_stages * plan.num_warps * 1024
        assert shared <= (113 if plan.num_warps == 4 else 226) * 1024


def test_shared_tiles_of_e4m3_are_never_empty() -> None:
    for steps in (1, 8, 56, 144):
        for tiles in range(1, 400, 7):
            whole, parts = linear_fp8.tail_split(tiles, steps, SMS)
            assert whole == tiles or parts > 1
            assert whole <= tiles and -(-steps // parts) * (parts - 1) < steps


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """As if on a GPU of this capability, with an H200's SMs and no tuned plans."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(module, "arch", lambda device: capability)
        monkeypatch.setattr(module, "num_sms", lambda device: SMS)
        for name in ("supports_dequant", "supports_warp_specialized"):
            monkeypatch.setattr(module, name, lambda *args: capability == HOPPER)

    with env.override(cache_dir=tmp_path):
        yield pretend


def _stack(name: str, N: int, K: int, count: int = 1):
    return empty_for_gpu(get_format(name), count, N, K, CPU)


def test_experts_that_are_not_warp_specialized(on) -> None:
    on(HOPPER)
    for aligned in (True, False):  # no descriptor begins at an odd address
        plan = select_experts("down", _stack("bf16", 64, 128, 2), "bf16", 500, CPU, aligned)
        assert plan == gemm_plan("down", "bf16", HOPPER, 500, 64, 128, "", aligned)
        assert plan.warp_specialized is aligned
    biased = ExpertSpec(bias=True)  # which no warp-specialized kernel adds
    for name in ("bf16", "fp8"):
        stack = _stack(name, 64, 128, 2)
        assert not select_experts("down", stack, name, 500, CPU, True, biased).warp_specialized


TUNED = [("skinny_down", 1, SkinnyExpertsPlan(64, 8, 16)), ("down", 10, DequantPlan(128))]


@pytest.mark.parametrize(("op", "rows", "plan"), TUNED)
def test_tuned_plans_of_experts_come_first(op: str, rows: float, plan: object, on) -> None:
    on(HOPPER)
    stack = _stack("int8", 64, 128, 4)
    write_tuned("", op, "int8", plan, rows=rows, N=64, K=128)
    assert select_experts("down", stack, "bf16", rows, CPU) == plan
    assert select_experts("gate_up", stack, "bf16", rows, CPU) != plan
