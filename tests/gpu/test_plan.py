"""Launch plans: every case has one, a tuned file comes first, a damaged one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.weights import empty_for_gpu
from pykernels.gpu.moe import select as selection
from pykernels.gpu.moe.router_logits import GatePlan
from pykernels.gpu.moe.select import select
from pykernels.gpu.plans.attention import DecodePlan, PrefillPlan
from pykernels.gpu.plans.gemm import (
    DequantPlan,
    GemmPlan,
    GemvInt8Plan,
    GemvMmaPlan,
    SkinnyExpertsPlan,
    SkinnyPlan,
)
from pykernels.gpu.plans.grouped import OPS, PATHS, fit_stages, gemm_plan, generation, split_k
from pykernels.gpu.plans.tuned import tuned_plan, write_tuned
from pykernels.quant import get_format

ARCHS = ((0, 0), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@pytest.fixture(autouse=True)
def _no_file(tmp_path: Path) -> object:
    with env.override(cache_dir=tmp_path):
        yield


def write(device: str, op: str, path: str, rows: float, N: int, K: int, plan: Any) -> Path:
    return write_tuned(device, op, path, plan, rows=rows, N=N, K=K)


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_case_has_a_plan(op: str, arch: tuple[int, int]) -> None:
    for path in PATHS:
        for rows in (0.5, 1, 16, 17, 64, 100, 4096):
            plan = gemm_plan(op, path, arch, rows, 2048, 7168)
            assert not plan.tma or generation(arch) in ("hopper", "blackwell")
            # E4M3 weight scales are one number a tile: it must not cross a block of 128 outputs.
            assert path != "fp8" or plan.block_n <= 128


def test_generations_are_by_what_a_gpu_has() -> None:
    """Not by their numbers: consumers' Blackwell has Ada's shared memory and no wgmma."""
    names = ["interpreter", "ampere", "ampere", "ada", "hopper", "blackwell", "ada"]
    assert [generation(arch) for arch in ARCHS] == names


def test_a_row_of_the_table_is_up_to_its_rows() -> None:
    tiles = [gemm_plan("down", "bf16", (9, 0), n, 7168, 2048).block_m for n in (16, 17, 32, 33)]
    assert tiles == [16, 32, 32, 64]


def test_the_nearest_line_is_taken_whatever_came_first() -> None:
    for rows, block_m in ((100, 16), (120, 32), (140, 64)):
        write("a gpu", "down", "bf16", rows, 7168, 2048, GemmPlan(block_m, 16, 16))
    for rows, block_m in ((101, 16), (119, 32), (125, 32), (139, 64)):
        assert gemm_plan("down", "bf16", (9, 0), rows, 7168, 2048, "a gpu").block_m == block_m


def test_a_kind_that_is_decoded_takes_the_plans_of_decoding() -> None:
    assert gemm_plan("down", "q4_k", (9, 0), 8, 7168, 2048) == gemm_plan(
        "down", "decoded", (9, 0), 8, 7168, 2048
    )


def test_a_tuned_plan_of_this_gpu_and_shape_comes_first() -> None:
    tuned = GemmPlan(64, 64, 32, stages=5)
    write("a gpu", "down", "bf16", 100, 7168, 2048, GemmPlan(16, 16, 16))
    write("a gpu", "down", "bf16", 100, 7168, 2048, tuned)  # in place of the first one
    write("a gpu", "down", "bf16", 300, 7168, 2048, GemmPlan(32, 32, 32))

    def found(rows: float, N: int = 7168, device: str = "a gpu") -> GemmPlan:
        return gemm_plan("down", "bf16", (9, 0), rows, N, 2048, device)

    assert found(100) == found(80) == found(149) == tuned
    assert found(250) == GemmPlan(32, 32, 32)
    shipped = gemm_plan("down", "bf16", (9, 0), 100, 7168, 2048)
    assert found(20) == gemm_plan("down", "bf16", (9, 0), 20, 7168, 2048)
    assert found(100, N=4096) == found(100, device="another") == shipped


def test_lines_of_another_process_are_kept() -> None:
    file = write("a gpu", "down", "bf16", 100, 7168, 2048, GemmPlan(16, 16, 16))
    assert tuned_plan("down", "bf16", "a gpu", 100, 7168, 2048)  # read, and remembered
    theirs = json.loads(file.read_text())[0] | {"device": "another"}
    file.write_text(json.dumps([theirs]))
    write("a gpu", "down", "bf16", 300, 7168, 2048, GemmPlan(32, 32, 32))
    assert tuned_plan("down", "bf16", "another", 100, 7168, 2048) == theirs["plan"]


def test_warp_specialized_plans_by_capability() -> None:
    args = ("down", "fp8", (9, 0), 200, 7168, 2048, "a gpu")
    assert gemm_plan(*args, warp_specialized=True).warp_specialized
    assert (
        not gemm_plan(*args).warp_specialized
        and not gemm_plan(*args[:2], (10, 0), *args[3:]).warp_specialized
    )
    write(
        "a gpu", "down", "fp8", 200, 7168, 2048, GemmPlan(128, 128, 128, 2, warp_specialized=True)
    )
    assert gemm_plan(*args, warp_specialized=True).group_m == 2
    assert not gemm_plan(*args).warp_specialized
    for rows, warp_specialized in ((128, False), (256, True)):
        assert (
            gemm_plan(
                "down", "bf16", (9, 0), rows, 7168, 2048, warp_specialized=True
            ).warp_specialized
            is warp_specialized
        )


def test_experts_plans_are_for_the_rows_of_experts_that_may_have_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, asked = torch.device("cpu"), []
    monkeypatch.setattr(selection, "gemm_plan", lambda *args: asked.append(args))
    monkeypatch.setattr(selection, "warp_specialized_takes", lambda *args: True)
    monkeypatch.setattr(selection, "arch", lambda device: (9, 0))
    stack = empty_for_gpu(get_format("bf16"), 2, 64, 128, cpu)
    for S, E, rows in ((4, 256, 1), (512, 256, 2), (7, 2, 3.5), (0, 8, 0)):
        for aligned in (True, False):
            select("down", stack, "bf16", S, E, cpu, aligned)
            assert asked.pop() == ("down", "bf16", (9, 0), rows, 64, 128, "", aligned)


def test_few_rows_of_experts_end_where_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "arch", lambda device: (8, 0))
    monkeypatch.setattr(selection, "dequant_takes", lambda *args: False)
    for name, most in (("int4", 4), ("int4-g128", 8), ("q6_k", 4)):
        stack = empty_for_gpu(get_format(name), 4, 64, 256, torch.device("cpu"))
        plans = [
            select("gate_up", stack, "bf16", S, 2, torch.device("cpu"))
            for S in (2 * most, 2 * most + 1)
        ]
        assert [type(plan) for plan in plans] == [SkinnyExpertsPlan, GemmPlan]


@pytest.mark.parametrize("few", [True, False])
def test_tuned_plans_of_experts_are_taken(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(selection, "arch", lambda device: (9, 0))
    monkeypatch.setattr(selection, "dequant_takes", lambda *args: True)
    stack = empty_for_gpu(get_format("int8"), 4, 64, 128, cpu)
    for plan in (
        (SkinnyExpertsPlan(64, 8, 16),) if few else (DequantPlan(128), GemmPlan(16, 32, 64))
    ):
        op, S = ("few_down", 4) if few else ("down", 40)
        write("", op, "int8", S / 4, 64, 128, plan)
        assert select("down", stack, "bf16", S, 4, cpu) == plan
        other = select("gate_up", stack, "bf16", S, 4, cpu)
        assert type(other) is (SkinnyExpertsPlan if few else DequantPlan) and other != plan


def test_tuned_plans_of_experts_are_of_two_kinds() -> None:
    write("a gpu", "down", "int4", 64, 7168, 2048, DequantPlan(64))
    assert tuned_plan("down", "int4", "a gpu", 64, 7168, 2048) == asdict(DequantPlan(64))
    args = ("down", "int4", (9, 0), 64, 7168, 2048)
    assert gemm_plan(*args, "a gpu") == gemm_plan(*args)  # where that kernel cannot run


@pytest.mark.parametrize("text", ["{", "{}", '[{"plan": {"magic": 1}}]', "[1]", "[" * 100_000])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "gpu-plans.json").write_text(text)
    with pytest.raises(PykernelsError, match="gpu-plans.json cannot be read"):
        gemm_plan("down", "bf16", (9, 0), 100, 7168, 2048)


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path: Path) -> None:
    with env.override(cache_dir=tmp_path / ("x" * 300)):
        with pytest.raises(PykernelsError, match=r"gpu-plans.json cannot be read: .*CACHE_DIR"):
            tuned_plan("down", "bf16", "a gpu", 100, 7168, 2048)
        with pytest.raises(PykernelsError, match=r"gpu-plans.json cannot be read: .*CACHE_DIR"):
            write("a gpu", "down", "bf16", 100, 7168, 2048, GemmPlan(16, 16, 16))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "gpu-plans.new").mkdir()
    with pytest.raises(PykernelsError, match=r"gpu-plans.json cannot be written: .*CACHE_DIR"):
        write("a gpu", "down", "bf16", 100, 7168, 2048, GemmPlan(16, 16, 16))


TILE = {"block_m": 16, "block_n": 16, "block_k": 16}
IMPOSSIBLE: list[dict[str, Any]] = [
    {"block_m": 48}, {"block_m": 8}, {"block_n": 512}, {"block_k": 2048}, {"warps": 0},
    {"warps": 64}, {"stages": 0}, {"stages": 17}, {"split_k": 0}, {"split_k": 65},
    {"group_m": 0}, {"group_m": 1 << 20},
]  # fmt: skip


@pytest.mark.parametrize("bad", IMPOSSIBLE)
def test_impossible_plans_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(PykernelsError, match=next(iter(bad))):
        GemmPlan(**{**TILE, **bad})


@pytest.mark.parametrize(
    ("op", "path", "plan"),
    [
        ("down", "int4", TILE | {"block_m": True}),
        ("down", "int4", TILE | {"tma": 0}),
        ("down", "int4", TILE | {"stages": 2.0}),
        ("down", "int4", TILE | {"split_k": 2}),
        ("gate_up", "int4", {"cols": 64, "programs": 132}),
        ("gate_up", "int4", {"cols": 64, "split_k": 2}),
        ("linear", "bf16", TILE | {"split_k": 2}),
    ],
)
def test_a_line_that_no_kernel_takes_is_named(
    op: str, path: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    line = {"device": "a gpu", "op": op, "path": path, "rows": 8, "N": 64, "K": 64, "plan": plan}
    (tmp_path / "gpu-plans.json").write_text(json.dumps([line]))
    with pytest.raises(PykernelsError, match="plan 1, of"):
        tuned_plan("down", "bf16", "a gpu", 8, 64, 64)


@pytest.mark.parametrize("rows", [10**400, 1 << 63, 0], ids=["10**400", "1 << 63", "0"])
def test_a_line_of_no_such_size_is_named(rows: int, tmp_path: Path) -> None:
    line = {"device": "a gpu", "op": "down", "path": "int4", "rows": rows, "N": 64, "K": 64}
    (tmp_path / "gpu-plans.json").write_text(json.dumps([line | {"plan": TILE}]))
    with pytest.raises(PykernelsError, match="plan 1, of down: rows must be above 0"):
        tuned_plan("down", "int4", "a gpu", 8, 64, 64)


def test_stages_fit_into_shared_memory() -> None:
    plan = GemmPlan(128, 128, 256, stages=4)
    assert fit_stages(plan, (9, 0), 100 * 1024).stages == 2
    assert fit_stages(plan, (8, 6), 40 * 1024).stages == 2
    assert fit_stages(plan, (8, 6), 200 * 1024).stages == 1  # Triton then says what is wrong
    assert fit_stages(plan, (9, 0), 10 * 1024) is plan


def test_k_is_split_until_every_processor_has_work() -> None:
    assert split_k(112, 7168, 132, 128) == 4
    assert split_k(2000, 7168, 132, 128) == 1
    assert split_k(1, 512, 132, 128) == 2  # at least two steps a part
    assert split_k(1, 1 << 20, 132, 128) == 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: DecodePlan(48, 64, 4, 1),
        lambda: DecodePlan(8, 64, 4, 1),
        lambda: DecodePlan(16, 64, 0, 1),
        lambda: DecodePlan(16, 64, 4, 0),
        lambda: DecodePlan(16, 64, 4, 1, ctas_per_sm=-1),
        lambda: DecodePlan(16, 64, 4, 1, ctas_per_sm=33),
        lambda: DecodePlan(64, 128, 8, 1, warp_specialized=True),
        lambda: DecodePlan(128, 64, 8, 1, warp_specialized=True),
        lambda: DecodePlan(32, 128, 4, 1, fp8_mma=True),
        lambda: DecodePlan(8, 256, 4, 1, fp8_mma=True),
        lambda: DecodePlan(512, 64, 8, 1),
        lambda: DecodePlan(16, 64, 64, 1),
        lambda: DecodePlan(16, 64, 4, 17),
        lambda: DecodePlan(16, 64, 4, 1, ring_buffer=True, fp8_mma=True),
        lambda: PrefillPlan(96, 64, 8, 1),
        lambda: PrefillPlan(64, 8, 4, 1),
        lambda: PrefillPlan(64, 64, 4, 0),
        lambda: GatePlan(16, 48, 64, 1, 4, 3),
        lambda: GatePlan(16, 16, 64, 0, 4, 3),
        lambda: PrefillPlan(64, 64, 8, 1, warp_specialized=True),
        lambda: PrefillPlan(128, 32, 8, 1, warp_specialized=True),
        lambda: GemvMmaPlan(48, 4),
        lambda: GemvMmaPlan(32, 4, 0),
        lambda: GemvMmaPlan(32, 4, 2, -1),
        lambda: SkinnyPlan(48, 4),
        lambda: SkinnyPlan(32, 4, ahead=3),
        lambda: SkinnyExpertsPlan(8, 4),
        lambda: SkinnyExpertsPlan(16, 4, 64),
        lambda: DequantPlan(96),
        lambda: DequantPlan(64, warps=2),
        lambda: DequantPlan(64, stages=1),
        lambda: GemvInt8Plan(12, 128),
        lambda: GemvInt8Plan(1 << 20, 128),
        lambda: GemvInt8Plan(16, 1 << 20),
        lambda: GemvInt8Plan(16, 128, 64),
        lambda: GemvMmaPlan(16, 64),
        lambda: SkinnyPlan(16, 64),
        lambda: SkinnyPlan(16, 4, 64),
        lambda: SkinnyExpertsPlan(16, 64),
        lambda: SkinnyExpertsPlan(16, 4, 2, 64),
    ],
)
def test_a_plan_that_would_be_wrong_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(PykernelsError):
        make()
