"""Tuned plans of attention: launchers take them, near shapes share them, wrong lines are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.gpu.attention.select import select_decode, select_prefill
from pykernels.gpu.plans import attention
from pykernels.gpu.plans.attention import DecodePlan, PrefillPlan, shipped_decode
from pykernels.gpu.plans.attention_shape import AttentionShape
from pykernels.gpu.plans.tuned import tuned_attention, write_tuned

CPU = torch.device("cpu")
MLA = AttentionShape(128, 1, 512, 64, 512, 64, 0, batch=8, queries=1, context=8192)
GQA = AttentionShape(32, 8, 128, 0, 128, 64, 0, batch=8, queries=1, context=8192)
ROWS = GQA._replace(page=0, batch=1, queries=2048, context=2048)
WARPS = DecodePlan(64, 64, 8, 2, warp_specialized=True)
RING = DecodePlan(16, 64, 4, 4, ring_buffer=True)
FP8_MMA = DecodePlan(8, 128, 4, 1, fp8_mma=True)
TILES = DecodePlan(16, 32, 4, 2)
PREFILL = PrefillPlan(64, 32, 4, 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with env.override(cache_dir=tmp_path):
        yield tmp_path


def write(op: str, shape: AttentionShape, plan: Any, path: str = "bf16", device: str = "") -> Path:
    return write_tuned(device, op, path, plan, **shape._asdict())


@pytest.fixture
def hopper_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "arch", lambda device: (9, 0))


def test_a_plan_is_taken_for_near_sizes_of_the_same_heads() -> None:
    write("gqa_decode", GQA, TILES)
    write("gqa_decode", GQA._replace(context=32768), PLAN := DecodePlan(16, 64, 4, 2))

    def found(op: str = "gqa_decode", path: str = "bf16", device: str = "", **sizes: int) -> object:
        return tuned_attention(op, path, device, GQA._replace(**sizes))

    assert found() == found(batch=6, context=12288) == found(batch=12) == TILES
    assert found(context=22000) == found(context=40000) == PLAN
    for others in (
        {"context": 16400},
        {"batch": 4},
        {"queries": 2},
        {"context": 0},
        {"heads": 16},
        {"kv_heads": 4},
        {"head_dim": 64},
        {"page": 16},
        {"window": 4096},
        {"path": "fp8"},
        {"op": "mla_decode"},
        {"device": "another"},
    ):
        assert found(**others) is None, others  # type: ignore[arg-type]


RUNS = [
    ("mla_decode", MLA, False, WARPS),
    ("gqa_decode", GQA, False, RING),
    ("gqa_decode", GQA, True, FP8_MMA),
]


@pytest.mark.parametrize(("op", "shape", "fp8", "plan"), RUNS)
@pytest.mark.usefixtures("hopper_plans")
def test_a_kernel_that_cannot_run_here_is_passed_over(
    op: str, shape: AttentionShape, fp8: bool, plan: DecodePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(op, shape, plan, "fp8" if fp8 else "bf16")
    assert select_decode(op, shape, fp8, True, CPU) == plan
    shipped = shipped_decode(op, shape, fp8, CPU, aligned=False)
    assert select_decode(op, shape, fp8, False, CPU) == shipped != plan
    monkeypatch.setattr(attention, "arch", lambda device: (8, 0))
    assert select_decode(op, shape, fp8, True, CPU) == shipped_decode(op, shape, fp8, CPU) != plan
    with pytest.raises(PykernelsError, match=f"a {plan.kernel} plan of {op} for heads"):
        select_decode(op, shape, fp8, True, CPU, plan)


@pytest.mark.usefixtures("hopper_plans")
def test_the_call_decides_about_unpacking_not_the_plan() -> None:
    paged = ROWS._replace(page=64)
    write("gqa_prefill", paged, PREFILL, "fp8")
    write("gqa_prefill", paged, unpack := PrefillPlan(128, 64, 8, 1, True, True), "unpacked")
    assert select_prefill(paged, True, False, True, CPU) == PREFILL
    assert select_prefill(paged, True, True, True, CPU) == unpack
    assert not select_prefill(paged, True, True, False, CPU).warp_specialized  # not aligned
    assert select_prefill(paged, False, False, True, CPU).keys == 128  # bf16: as it is shipped
    rotated = ROWS._replace(rope=64)
    write("mla_prefill", rotated, PREFILL)  # with a rotated part it is another op
    assert select_prefill(rotated, False, False, True, CPU) == PREFILL
    assert select_prefill(ROWS, False, False, True, CPU) != PREFILL


WRONG = [
    ("gqa_decode", GQA, "bf16", WARPS, "takes these .* this warp_specialized"),
    ("mla_decode", MLA._replace(head_dim=256), "bf16", WARPS, "this warp_specialized"),
    ("gqa_decode", GQA._replace(head_dim=64), "fp8", FP8_MMA, "this fp8_mma"),
    ("gqa_prefill", ROWS, "unpacked", PREFILL, "this unpack"),
    ("gqa_decode", GQA, "bf16", PREFILL, "unexpected keyword argument 'unpack'"),
    ("mla_prefill", ROWS, "fp8", PREFILL, "mla_prefill has no path 'fp8'"),
    ("gqa_decode", GQA._replace(batch=0), "bf16", TILES, "batch and queries and context"),
    ("attention", GQA, "bf16", TILES, "of attention: "),
]


@pytest.mark.parametrize(("op", "shape", "path", "plan", "why"), WRONG)
def test_a_line_that_no_kernel_takes_is_named(
    op: str, shape: AttentionShape, path: str, plan: Any, why: str
) -> None:
    write("mla_decode", MLA._replace(heads=64), WARPS)
    write(op, shape, plan, path)
    with pytest.raises(PykernelsError, match=f"gpu-plans.json cannot be read: plan 2, .*{why}"):
        tuned_attention("mla_decode", "bf16", "", MLA)


DAMAGED = [
    ({"page": None}, "what it is for is not said: page"),
    ({"plan": {"rows": 16, "keys": 48, "num_warps": 4, "num_stages": 1}}, "a plan has keys=48"),
    ({"context": "long"}, "batch, queries, context must be numbers"),
]


@pytest.mark.parametrize(("change", "why"), DAMAGED)
def test_a_damaged_line_is_named(change: dict[str, Any], why: str, folder: Path) -> None:
    file = write("gqa_decode", GQA, TILES)
    line = json.loads(file.read_text())[0] | change
    file.write_text(json.dumps([{k: v for k, v in line.items() if v is not None}]))
    with env.override(cache_dir=f"{folder}/."), pytest.raises(PykernelsError, match=why):
        tuned_attention("gqa_decode", "bf16", "", GQA)
