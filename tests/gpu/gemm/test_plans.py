"""Launch plans: every case has one, a tuned file comes first, a damaged one is named."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.gpu.moe.router_logits import GatePlan
from pykernels.gpu.plans.attention import DecodePlan, PrefillPlan
from pykernels.gpu.plans.gemm import (
    DequantPlan,
    GemmPlan,
    GemvInt8Plan,
    GemvMmaPlan,
    SkinnyExpertsPlan,
    SkinnyPlan,
)
from pykernels.gpu.plans.grouped import OPS, PATHS, gemm_plan, generation
from pykernels.gpu.plans.tuned import tuned_plan, write_tuned

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


def test_a_tuned_plan_of_this_gpu_and_shape_comes_first() -> None:
    tuned = GemmPlan(64, 64, 32, num_stages=5)
    write("a gpu", "down", "bf16", 100, 7168, 2048, GemmPlan(16, 16, 16))
    write("a gpu", "down", "bf16", 100, 7168, 2048, tuned)  # in place of the first one
    write("a gpu", "down", "bf16", 140, 7168, 2048, GemmPlan(32, 32, 32))

    def found(rows: float, N: int = 7168, device: str = "a gpu") -> GemmPlan:
        return gemm_plan("down", "bf16", (9, 0), rows, N, 2048, device)

    assert found(100) == found(80) == found(115) == tuned  # the nearest
    assert found(125) == found(200) == GemmPlan(32, 32, 32)
    shipped = gemm_plan("down", "bf16", (9, 0), 100, 7168, 2048)
    assert found(20) == gemm_plan("down", "bf16", (9, 0), 20, 7168, 2048)
    assert found(100, N=4096) == found(100, device="another") == shipped


def test_warp_specialized_plans_are_for_gpus_with_the_kernel() -> None:
    plan = GemmPlan(128, 128, 128, 2, warp_specialized=True)
    write("a gpu", "down", "fp8", 200, 7168, 2048, plan)
    args = ("down", "fp8", (9, 0), 200, 7168, 2048, "a gpu")
    assert gemm_plan(*args, warp_specialized=True) == plan
    assert not gemm_plan(*args).warp_specialized


@pytest.mark.parametrize("text", ["{", "{}", '[{"plan": {"magic": 1}}]', "[1]", "[" * 100_000])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "gpu-plans.json").write_text(text)
    with pytest.raises(PykernelsError, match="gpu-plans.json cannot be read"):
        gemm_plan("down", "bf16", (9, 0), 100, 7168, 2048)


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path: Path) -> None:
    with env.override(cache_dir=tmp_path / ("x" * 300)):
        with pytest.raises(PykernelsError, match=r"gpu-plans.json cannot be read: .*CACHE_DIR"):
            tuned_plan("down", "bf16", "a gpu", 100, 7168, 2048)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / f"gpu-plans.json.{os.getpid()}.new").mkdir()
    with pytest.raises(PykernelsError, match=r"gpu-plans.json cannot be written: .*CACHE_DIR"):
        write("a gpu", "down", "bf16", 100, 7168, 2048, GemmPlan(16, 16, 16))


TILE = {"block_m": 16, "block_n": 16, "block_k": 16}


@pytest.mark.parametrize(
    ("op", "path", "plan"),
    [
        ("down", "int4", TILE | {"block_m": True}),
        ("down", "int4", TILE | {"tma": 0}),
        ("down", "int4", TILE | {"split_k": 2}),
        ("gate_up", "int4", {"cols": 64, "num_ctas": 132}),
    ],
)
def test_a_line_that_no_kernel_takes_is_named(
    op: str, path: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    line = {"device": "a gpu", "op": op, "path": path, "rows": 8, "N": 64, "K": 64, "plan": plan}
    (tmp_path / "gpu-plans.json").write_text(json.dumps([line]))
    with pytest.raises(PykernelsError, match="plan 1, of"):
        tuned_plan("down", "bf16", "a gpu", 8, 64, 64)


DECODE = {"rows": 16, "keys": 64, "num_warps": 4, "num_stages": 1}
PREFILL = {"rows": 64, "keys": 64, "num_warps": 4, "num_stages": 1}
GATE = asdict(GatePlan(16, 16, 64, 1, 4, 3))
GROUPS: list[tuple[Any, dict[str, Any], list[dict[str, Any]]]] = [
    (
        GemmPlan,
        TILE,
        [
            {"block_m": 48},
            {"block_m": 8},
            {"block_k": 2048},
            {"num_warps": 64},
            {"num_stages": 0},
            {"split_k": 65},
            {"group_m": 1 << 20},
        ],
    ),
    (
        DecodePlan,
        DECODE,
        [
            {"rows": 48},
            {"num_stages": 17},
            {"ctas_per_sm": -1},
            {"rows": 64, "keys": 128, "warp_specialized": True},
            {"rows": 32, "fp8_mma": True},
            {"ring_buffer": True, "fp8_mma": True},
        ],
    ),
    (PrefillPlan, PREFILL, [{"rows": 96}, {"num_stages": 0}, {"warp_specialized": True}]),
    (GatePlan, GATE, [{"block_e": 48}, {"splits": 0}]),
    (GemvMmaPlan, {"rows": 32, "num_warps": 4}, [{"rows": 48}, {"ahead": 0}, {"num_ctas": -1}]),
    (SkinnyPlan, {"rows": 32, "num_warps": 4}, [{"rows": 48}, {"ahead": 3}, {"chunks": 64}]),
    (SkinnyExpertsPlan, {"rows": 16, "num_warps": 4}, [{"rows": 8}, {"tokens": 64}]),
    (DequantPlan, {"cols": 64}, [{"cols": 96}, {"num_stages": 1}, {"num_ctas": 132, "split_k": 2}]),
    (GemvInt8Plan, {"block_n": 16, "words": 128}, [{"block_n": 12}, {"words": 1 << 20}]),
]
IMPOSSIBLE = [(kind, good | bad) for kind, good, bads in GROUPS for bad in bads]


@pytest.mark.parametrize(("kind", "values"), IMPOSSIBLE, ids=str)
def test_a_plan_that_would_be_wrong_is_refused(kind: Any, values: dict[str, Any]) -> None:
    with pytest.raises(PykernelsError):
        kind(**values)
