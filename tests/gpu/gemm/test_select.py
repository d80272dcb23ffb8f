"""Which kernel multiplies which rows, and by which plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton import cdiv

from pykernels.env import env
from pykernels.gpu.gemm import select as module
from pykernels.gpu.gemm.hopper import linear_fp8
from pykernels.gpu.gemm.select import kernel_of, most_skinny_rows, select, select_experts
from pykernels.gpu.gemm.weights import empty_for_gpu
from pykernels.gpu.plans.gemm import (
    DequantPlan,
    GemmPlan,
    GemvInt8Plan,
    GemvMmaPlan,
    LinearPlan,
    SkinnyExpertsPlan,
)
from pykernels.gpu.plans.grouped import UNPACK_ROWS, gemm_plan
from pykernels.gpu.plans.registers import (
    dequant_experts_plan,
    dequant_plan,
    fine_scales,
    gemv_mma_plan,
    skinny_experts_plan,
    skinny_plan,
)
from pykernels.gpu.plans.tuned import write_tuned
from pykernels.quant import get_format

CPU = torch.device("cpu")
SMS = 132
HOPPER, AMPERE, INTERPRETER = (9, 0), (8, 0), (0, 0)

# kind, rows, outputs, GPU, whether dequant_gemm has a form, kernel
KERNELS = [
    ("int8", 1, 7168, HOPPER, True, "gemv"),
    ("int8", 1, 18432, HOPPER, True, "gemv_mma"),
    ("fp8", 1, 7168, AMPERE, True, "gemv_mma"),
    ("q4_k", 1, 18432, AMPERE, True, "gemv_mma"),
    ("q4_k", 2, 18432, AMPERE, True, "skinny_k_quants"),
    ("q4_k", 8, 7168, AMPERE, False, "skinny_k_quants"),
    ("int8", 2, 7168, HOPPER, True, "skinny"),
    ("int8", 9, 2048, HOPPER, True, "skinny"),
    ("int8", 9, 7168, HOPPER, True, "dequant"),
    ("int4", 17, 7168, HOPPER, True, "dequant"),
    ("int4", 17, 7168, HOPPER, False, "skinny"),
    ("int4", 33, 7168, AMPERE, True, "linear"),
    ("q4_k", 9, 7168, HOPPER, False, "linear"),
    ("fp8", 16, 7168, HOPPER, True, "skinny"),
    ("fp8", 1500, 7168, HOPPER, True, "dequant"),
    ("fp8", 1501, 7168, HOPPER, True, "linear"),
    ("q6_k", 4, 7168, HOPPER, True, "skinny_k_quants"),
    ("q6_k", 5, 7168, HOPPER, True, "dequant"),
    ("q6_k", 1501, 7168, HOPPER, True, "linear"),
    ("q4_k", 1, 7168, INTERPRETER, False, "linear"),
    ("int4", 1, 7168, INTERPRETER, True, "linear"),
]


def test_which_kernel_multiplies_which_rows() -> None:
    for kind, M, N, capability, dequant, kernel in KERNELS:
        found = kernel_of(kind, M, N, 7168, SMS, capability, dequant)
        assert found == kernel, (kind, M, N, capability, dequant)
    assert kernel_of("int4", 1, 7168, 65536, SMS, HOPPER, True) == "skinny"  # K: no gemv_mma
    assert kernel_of("int8", 9, 7168, 7168, SMS, HOPPER, True, group=32) == "skinny"


def test_narrow_matrices_take_more_warps() -> None:
    for kind, group in (("int4", 128), ("int4", 32), ("int8", 7168), ("fp8", 128)):
        for M in (1, 16):
            narrow, wide = (skinny_plan(kind, group, M, N, SMS) for N in (7168, 18432))
            assert (narrow.warps, wide.warps) == (8, 4)
        for K in (7168, 18432):
            fills = gemv_mma_plan(kind, group, 18432, K, SMS)
            assert fills.num_ctas * fills.warps in (3 * 4 * SMS, 3 * 8 * SMS, 16 * SMS)
    for kind in ("q4_k", "q6_k"):
        assert gemv_mma_plan(kind, 0, 18432, 7168, SMS) == GemvMmaPlan(16, 4, 2, 3 * SMS)
        assert gemv_mma_plan(kind, 0, 18432, 7424, SMS).registers == 168
    for kind, warps in (("int4", 8), ("fp8", 4)):  # less than a block of 32 rows an SM, or one
        less, one = (gemv_mma_plan(kind, 128, 32 * SMS - n, 7168, SMS) for n in (1, 0))
        assert (less.rows, less.warps) == (16, 8)
        assert (one.rows, one.warps) == (32 if kind == "int4" else 16, warps)


def test_blocks_of_gemv_mma_are_whole_waves() -> None:
    """Two programs of 8 warps an SM, or four of 4: none has many blocks more than others."""
    for kind, room in (("int4", 2 * SMS), ("fp8", 4 * SMS)):
        for N in range(32 * SMS, 96 * SMS, 37):
            plan = gemv_mma_plan(kind, 128, N, 7168, SMS)
            rounds = cdiv(cdiv(N, plan.rows), room)
            if plan.used:
                assert 3 * plan.rows <= 4 * plan.used <= 4 * plan.rows
                assert 0.9 * rounds * room < cdiv(N, plan.used) <= rounds * room
            else:  # whole waves would have too few rows
                assert 4 * cdiv(N, rounds * room) < 3 * plan.rows
    used = [gemv_mma_plan("int4", 128, N, 7168, SMS).used for N in (5120, 6336, 7168, 8192, 8448)]
    assert used == [0, 24, 28, 32, 32]


@pytest.mark.parametrize("N", [512, 7168, 18432])
@pytest.mark.parametrize("M", [9, 64, 300, 3000])
def test_no_part_of_dequant_gemm_is_empty(M: int, N: int) -> None:
    for steps in (1, 9, 56, 112):
        for kind in ("int4", "int8"):
            plan = dequant_plan(kind, M, N, steps, SMS)
            share = -(-steps // plan.split_k)
            assert -(-steps // share) == plan.split_k
            assert _fits(plan)


def _fits(plan: DequantPlan) -> bool:
    """Two programs of 4 warps share an SM's memory, one of 8 has all."""
    shared = plan.stages * plan.cols * 128 + plan.word_stages * plan.warps * 1024
    return shared <= (113 if plan.warps == 4 else 226) * 1024


def test_steps_are_shared_evenly_where_shares_are_long() -> None:
    def ctas_per_sm(kind: str, M: int, N: int, steps: int) -> float:
        return dequant_plan(kind, M, N, steps, SMS).num_ctas / SMS

    rows = (16, 32, 64, 128, 256, 512)
    assert [ctas_per_sm("q4_k", M, 18432, 56) for M in rows] == [4, 3, 3, 2, 2, 2]
    assert [ctas_per_sm("int8", M, 7168, 144) for M in rows] == [4, 3, 3, 2, 0, 0]
    assert [ctas_per_sm("int4", 64, N, 56) for N in (18432, 7168, 4096, 1024)] == [4, 4, 3, 0]
    assert [ctas_per_sm("int8", M, 131072, 56) for M in (64, 256, 4096)] == [0, 0, 0]  # many rounds
    halves = [("int8", 4096, 56), ("int8", 7168, 56), ("int4", 7168, 56), ("q4_k", 7168, 144)]
    assert [dequant_plan(k, 256, N, steps, SMS).split_k for k, N, steps in halves] == [2, 1, 2, 2]
    assert dequant_plan("int8", 3000, 18432, 56, SMS).warps == 8


def test_shared_tiles_of_e4m3_are_never_empty_and_pay() -> None:
    for steps in (1, 8, 56, 144):
        for tiles in range(1, 400, 7):
            whole, parts = linear_fp8.tail_split(tiles, steps, SMS)
            assert whole == tiles or parts > 1
            assert whole <= tiles and -(-steps // parts) * (parts - 1) < steps
    assert linear_fp8.tail_split(144, 56, SMS) == (132, 7)  # 256 rows of 18432 outputs
    assert linear_fp8.tail_split(1152, 56, SMS) == (1152, 1)
    pays = [linear_fp8.pays(M, N, K, SMS) for M, N, K in ((128, 18432, 7168), (256, 7168, 7168))]
    assert pays == [True, False]  # 56 tiles for 132 SMs


def test_plans_of_experts_go_by_their_rows() -> None:
    for kind, group in (("q4_k", 0), ("int4", 32), ("int4", 128), ("int8", 7168)):
        assert 2 <= most_skinny_rows(kind, group, True) < most_skinny_rows(kind, group, False) <= 8
    for kind, group in (("q4_k", 0), ("q6_k", 0), ("int4", 32), ("int4", 128), ("fp8", 128)):
        deep, flat = (skinny_experts_plan(kind, group, 1, K) for K in (7168, 2048))
        assert deep.warps == 2 * flat.warps
        assert deep.tokens == (2 if fine_scales(kind, group) else 8)
    assert [skinny_experts_plan("q4_k", 0, rows, 7168).tokens for rows in (2, 2.5)] == [2, 4]
    plans = [dequant_experts_plan("int4", rows) for rows in (3, 17, 33, 64, 128, 300)]
    assert [plan.cols for plan in plans] == [16, 32, 64, 64, 128, 256] and all(map(_fits, plans))


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


def test_the_gemm_of_a_linear_splits_k_or_unpacks(on) -> None:
    def found(name: str, M: int, K: int = 2048) -> LinearPlan:
        return select(_stack(name, 72, K), M, CPU)

    on(INTERPRETER)
    assert isinstance(found("int8", 1, 384), GemvInt8Plan)
    assert found("q4_k", 1).split_k == 4  # 8 steps of 256, at least two a part
    assert found("q4_k", 3000).split_k == 1
    for M in (1, UNPACK_ROWS["linear"], 3000):
        assert found("q6_k", M).unpack == (M >= UNPACK_ROWS["linear"])
    on(HOPPER)
    assert found("fp8", 1).__class__ is not GemmPlan and found("fp8", 3000).unpack


def test_experts_end_their_kernels_rows_where_they_say(on) -> None:
    on(AMPERE)
    for name, most in (("int4", 4), ("int4-g128", 8), ("q6_k", 4)):
        stack = _stack(name, 64, 256, 4)
        plans = [select_experts("gate_up", stack, "bf16", most + n, CPU) for n in (0, 0.5)]
        assert [type(plan) for plan in plans] == [SkinnyExpertsPlan, GemmPlan]
    on(HOPPER)
    for aligned in (True, False):  # no descriptor begins at an odd address
        plan = select_experts("down", _stack("bf16", 64, 128, 2), "bf16", 500, CPU, aligned)
        assert plan == gemm_plan("down", "bf16", HOPPER, 500, 64, 128, "", aligned)
        assert plan.warp_specialized is aligned


@pytest.mark.parametrize(
    ("op", "rows", "plan"),
    [
        ("skinny_down", 1, SkinnyExpertsPlan(64, 8, 16)),
        ("down", 10, DequantPlan(128)),
        ("down", 10, GemmPlan(16, 32, 64)),
    ],
)
def test_tuned_plans_of_experts_come_first(op: str, rows: float, plan: object, on) -> None:
    on(HOPPER)
    stack = _stack("int8", 64, 128, 4)
    write_tuned("", op, "int8", plan, rows=rows, N=64, K=128)
    assert select_experts("down", stack, "bf16", rows, CPU) == plan
    assert select_experts("gate_up", stack, "bf16", rows, CPU) != plan
