"""Tuned plans of attention: launchers take them, near shapes share them, wrong lines are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.gpu.attention import select
from pykernels.gpu.attention.select import select_decode, select_prefill, shipped_decode
from pykernels.gpu.plans import attention
from pykernels.gpu.plans.attention import DecodePlan, PrefillPlan
from pykernels.gpu.plans.attention_shape import AttentionShape
from pykernels.gpu.plans.tuned import tuned_attention, write_tuned

CPU = torch.device("cpu")
MLA = AttentionShape(128, 1, 512, 64, 512, 64, 0, batch=8, queries=1, context=8192)
GQA = AttentionShape(32, 8, 128, 0, 128, 64, 0, batch=8, queries=1, context=8192)
ROWS = GQA._replace(page=0, batch=1, queries=2048, context=2048)
BY_HAND = DecodePlan(64, 64, 8, 2, warp_specialized=True)
RING = DecodePlan(16, 64, 4, 4, in_ring=True)
LANES = DecodePlan(8, 128, 4, 1, in_lanes=True)
ACROSS = DecodePlan(64, 64, 8, 2, across=True)
TILES = DecodePlan(16, 32, 4, 2)
PREFILL = PrefillPlan(64, 32, 4, 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with env.override(cache_dir=tmp_path):
        yield tmp_path


def write(op: str, shape: AttentionShape, plan: Any, path: str = "bf16", device: str = "") -> Path:
    return write_tuned(device, op, path, plan, **shape._asdict())


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "arch", lambda device: (9, 0))


def test_a_plan_is_taken_for_near_sizes_of_the_same_heads() -> None:
    write("gqa_decode", GQA, TILES)
    write("gqa_decode", GQA._replace(context=32768), PLAN := DecodePlan(16, 64, 4, 2))

    def found(op: str = "gqa_decode", path: str = "bf16", device: str = "", **sizes: int) -> object:
        return tuned_attention(op, path, device, GQA._replace(**sizes))

    assert found() == found(batch=6, context=12288) == found(batch=12) == TILES
    assert found(context=22000) == found(context=40000) == PLAN
    for others in (
        {"context": 16400}, {"batch": 4}, {"queries": 2}, {"context": 0}, {"heads": 16},
        {"kv_heads": 4}, {"head_dim": 64}, {"page": 16}, {"window": 4096}, {"path": "fp8"},
        {"op": "mla_decode"}, {"device": "another"},
    ):  # fmt: skip
        assert found(**others) is None, others  # type: ignore[arg-type]


def test_a_written_plan_replaces_that_of_its_shape_alone(folder: Path) -> None:
    old = {"device": "a gpu", "op": "gemv", "path": "int8", "rows": 1, "N": 8, "K": 8}
    old |= {"plan": {"block_n": 16, "words": 128, "warps": 4, "stages": 3}}
    (folder / "gpu-plans.json").write_text(json.dumps([old]))  # before attention was tuned
    write("gqa_decode", GQA, TILES)
    write("mla_decode", MLA, BY_HAND)
    file = write("gqa_decode", GQA, RING)
    lines = json.loads(file.read_text())
    assert [line["op"] for line in lines] == ["gemv", "mla_decode", "gqa_decode"]
    assert lines[0] == old and lines[2]["plan"] == asdict(RING)


@pytest.mark.parametrize(
    ("op", "shape", "path", "plan"),
    [
        ("mla_decode", MLA, "bf16", BY_HAND),
        ("gqa_decode", GQA, "bf16", RING),
        ("gqa_decode", GQA, "fp8", LANES),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_a_kernel_that_cannot_run_here_is_passed_over(
    op: str, shape: AttentionShape, path: str, plan: DecodePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(op, shape, plan, path)
    fp8 = path == "fp8"
    assert select_decode(op, shape, fp8, CPU, aligned=True) == plan
    shipped = shipped_decode(op, shape, fp8, CPU, aligned=False)
    assert select_decode(op, shape, fp8, CPU, aligned=False) == shipped != plan
    monkeypatch.setattr(attention, "arch", lambda device: (8, 0))
    shipped = shipped_decode(op, shape, fp8, CPU)
    assert select_decode(op, shape, fp8, CPU, aligned=True) == shipped != plan


@pytest.mark.usefixtures("hopper")
def test_unpacking_is_decided_by_the_call_not_by_the_plan() -> None:
    paged = ROWS._replace(page=64)
    write("gqa_prefill", paged, PREFILL, "fp8")
    write("gqa_prefill", paged, unpack := PrefillPlan(128, 64, 8, 1, True, True), "unpacked")
    assert select_prefill(paged, True, False, True, CPU) == PREFILL
    assert select_prefill(paged, True, True, True, CPU) == unpack
    assert not select_prefill(
        paged, True, True, False, CPU
    ).warp_specialized  # rows that are not aligned
    assert select_prefill(paged, False, False, True, CPU).keys == 128  # bf16: as it is shipped


@pytest.mark.usefixtures("hopper")
def test_keys_in_e4m3_are_not_for_the_prefill_warp_specialized() -> None:
    """Unless they become bf16 first, which are rows then and no pages."""
    plan = PrefillPlan(128, 64, 8, 1, warp_specialized=True)
    sizes = (128, 128, 0)
    prefills = attention.warp_specialized_prefills
    assert prefills(*sizes, False, plan, True, 64, CPU)
    assert not prefills(*sizes, True, plan, True, 64, CPU)
    assert prefills(*sizes, True, PrefillPlan(128, 64, 8, 1, True, True), True, 4, CPU)
    assert not prefills(*sizes, False, plan, False, 64, CPU)


@pytest.mark.usefixtures("hopper")
def test_a_prefill_with_a_rotated_part_has_plans_of_its_own() -> None:
    rotated = ROWS._replace(rope=64)
    write("mla_prefill", rotated, PREFILL)
    assert select_prefill(rotated, False, False, True, CPU) == PREFILL
    assert select_prefill(ROWS, False, False, True, CPU) != PREFILL


def test_kernels_want_pages_that_hold_what_they_read_at_once() -> None:
    fits = attention.in_lanes_fits, attention.in_ring_fits, attention.warp_specialized_fits
    lanes, ring, warp_specialized = fits
    assert lanes(128, True, 32) and not lanes(128, True, 16)
    assert ring(128, False, 64) and not ring(128, False, 32)
    assert warp_specialized(512, 64, False, 8) and not warp_specialized(512, 64, False, 4)
    assert warp_specialized(512, 64, True, 64) and not warp_specialized(512, 64, True, 32)


def test_it_pays_to_unpack_for_many_rows_in_little_room() -> None:
    worth = attention.worth_unpacking
    assert worth(512, 2 << 30) and not worth(511, 1) and not worth(512, (2 << 30) + 1)


WRONG = [
    ("gqa_decode", GQA, "bf16", BY_HAND, "takes these .* this warp_specialized"),
    ("gqa_decode", GQA, "bf16", ACROSS, "this across"),
    ("mla_decode", MLA, "bf16", RING, "this in_ring"),
    ("mla_decode", MLA._replace(head_dim=256), "bf16", BY_HAND, "this warp_specialized"),
    ("gqa_decode", GQA, "fp8", RING, "this in_ring"),
    ("gqa_decode", GQA, "bf16", LANES, "this in_lanes"),
    ("gqa_decode", GQA._replace(head_dim=64), "fp8", LANES, "this in_lanes"),
    ("gqa_prefill", ROWS, "fp8",
     PrefillPlan(128, 64, 8, 1, warp_specialized=True), "this warp_specialized"),
    ("gqa_prefill", ROWS._replace(head_dim=256, value_dim=256), "bf16",
     PrefillPlan(128, 128, 8, 1, warp_specialized=True), "this warp_specialized"),
    ("gqa_prefill", ROWS, "bf16", PrefillPlan(64, 64, 4, 1, unpack=True), "this unpack"),
    ("gqa_prefill", ROWS, "unpacked", PREFILL, "this unpack"),
    ("gqa_decode", GQA, "bf16", PREFILL, "unexpected keyword argument 'unpack'"),
    ("mla_prefill", ROWS, "fp8", PREFILL, "mla_prefill has no path 'fp8'"),
    ("gqa_decode", GQA._replace(batch=0), "bf16", TILES, "batch and queries and context"),
    ("attention", GQA, "bf16", TILES, "of attention: "),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shape", "path", "plan", "why"), WRONG)
def test_a_line_that_no_kernel_takes_is_named(
    op: str, shape: AttentionShape, path: str, plan: Any, why: str
) -> None:
    write("mla_decode", MLA._replace(heads=64), BY_HAND)
    write(op, shape, plan, path)
    with pytest.raises(PykernelsError, match=f"gpu-plans.json cannot be read: plan 2, .*{why}"):
        tuned_attention("mla_decode", "bf16", "", MLA)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"page": None}, "what it is for is not said: page"),
        ({"plan": {"rows": 16, "keys": 48, "warps": 4, "stages": 1}}, "a plan has keys=48"),
        ({"plan": {**asdict(TILES), "parts": 4}}, "unexpected keyword argument 'parts'"),
        ({"plan": 7}, "plan 1, of gqa_decode"),
        ({"plan": {**asdict(TILES), "stages": 1.5}}, "a plan has stages=1.5. It is a whole number"),
        ({"plan": {**asdict(TILES), "in_ring": "no"}}, "a plan has in_ring='no'. It is true or"),
        ({"device": ["a gpu"]}, "op, device and path must be text"),
        ({"path": ["bf16"]}, "op, device and path must be text"),
        ({"op": None}, "plan 1: there is no 'op'"),
        ({"context": "long"}, "batch, queries, context must be numbers"),
        ({"heads": [32]}, "plan 1, of gqa_decode: heads, .* must be numbers"),
    ],
)
def test_a_damaged_line_is_named(change: dict[str, Any], why: str, folder: Path) -> None:
    file = write("gqa_decode", GQA, TILES)
    line = json.loads(file.read_text())[0] | change
    file.write_text(json.dumps([{k: v for k, v in line.items() if v is not None}]))
    with env.override(cache_dir=f"{folder}/."), pytest.raises(PykernelsError, match=why):
        tuned_attention("gqa_decode", "bf16", "", GQA)


def test_a_launch_without_a_line_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("gqa_decode", GQA, TILES)
    assert tuned_attention("gqa_decode", "bf16", "", GQA) == TILES
    file.unlink()
    monkeypatch.setattr(Path, "read_text", None)
    monkeypatch.setattr(Path, "exists", None)
    assert tuned_attention("gqa_decode", "bf16", "", GQA._replace(batch=9)) == TILES
    assert tuned_attention("gqa_decode", "bf16", "", GQA._replace(heads=8)) is None
    assert select._name(CPU) == ""
