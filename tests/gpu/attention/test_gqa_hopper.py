"""GQA decode's Gluon kernels: the ring buffer for bf16, operands in registers for E4M3.

On any CPU their arithmetic, permutations, pages and masks; on a GPU other plans than the shipped.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.attention.gqa_decode import gqa_decode
from pykernels.gpu.attention.hopper import split_kv
from pykernels.gpu.common import launch
from pykernels.gpu.plans.attention import DecodePlan

from .inputs import check, gqa_inputs

F32 = torch.float32
RING = DecodePlan(rows=16, keys=64, num_warps=4, num_stages=2, ring_buffer=True)
EIGHT = DecodePlan(rows=8, keys=64, num_warps=2, num_stages=1, fp8_mma=True)
SIXTEEN = DecodePlan(rows=16, keys=64, num_warps=4, num_stages=1, fp8_mma=True)
BF16_SIZES: dict[str, Any] = {"NH": 4, "KVH": 1, "D": 128, "page": 64}
E4M3_SIZES: dict[str, Any] = {"NH": 4, "KVH": 1, "D": 128, "page": 32, "fp8": True}
FULL: dict[str, Any] = {"NH": 32, "KVH": 8, "D": 128, "page": 64}
TILES: dict[str, Any] = {"NH": 11, "S": 2, "window": 70, "softcap": 2.0}

BF16 = [
    ({"lengths": [100, 0, 64, 1]}, RING, "ragged: an empty sequence, one key, a whole block"),
    ({"lengths": [300, 33]}, replace(RING, ctas_per_sm=0), "a ring buffer refilled, no combining"),
    ({"lengths": [190, 2], **TILES}, replace(RING, num_stages=3), "two tiles, tokens, window, cap"),
    ({"lengths": [135, 136], "S": 2, "window": 71}, RING, "windows at the edge of a block"),
    ({"lengths": [2200], "page": 128}, replace(RING, ctas_per_sm=0), "pages come 32 at a time"),
    ({"lengths": [100, 0, 64], "sinks": F32}, replace(RING, ctas_per_sm=0), "sinks, no combining"),
    ({"lengths": [300, 1], "S": 2, "sinks": F32}, RING, "sinks, tokens, the last split adds up"),
]
E4M3 = [
    ({"lengths": [100, 0, 64, 1]}, EIGHT, "E4M3, ragged: an empty sequence, one key"),
    ({"lengths": [100, 33]}, replace(EIGHT, ctas_per_sm=0), "E4M3, no combining"),
    ({"lengths": [90, 2], **TILES}, SIXTEEN, "E4M3, two tiles, tokens, window, cap"),
    ({"lengths": [135, 136], "S": 2, "window": 71}, EIGHT, "E4M3, windows at a block's edge"),
    (
        {"lengths": [70, 0], "NH": 11, "S": 2, "sinks": F32},
        replace(SIXTEEN, ctas_per_sm=0),
        "E4M3, sinks",
    ),
    ({"lengths": [200, 3], "sinks": F32}, EIGHT, "E4M3, sinks, combining"),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), BF16, ids=[row[2] for row in BF16])
def test_ring_buffer(sizes: dict[str, Any], plan: DecodePlan, why: str, device, hopper) -> None:
    check(gqa_decode, ref.gqa_decode, gqa_inputs(device=device, **BF16_SIZES | sizes), plan=plan)


@pytest.fixture
def converts_e4m3(device: torch.device, gluon: Any) -> None:
    if not launch.interpreted() and launch.arch(device) < (8, 9):
        pytest.skip("the GPU has no conversion from E4M3")


@pytest.mark.parametrize(("sizes", "plan", "why"), E4M3, ids=[row[2] for row in E4M3])
def test_fp8_mma(sizes: dict[str, Any], plan: DecodePlan, why: str, device, converts_e4m3) -> None:
    check(gqa_decode, ref.gqa_decode, gqa_inputs(device=device, **E4M3_SIZES | sizes), plan=plan)


@pytest.mark.parametrize("plan", [RING, EIGHT], ids=["ring", "E4M3"])
def test_other_caches_are_refused(plan: DecodePlan, device) -> None:
    sizes = BF16_SIZES if plan is RING else E4M3_SIZES
    for bad in ({"fp8": plan is RING}, {"page": 16}, {"D": 64}):
        inputs, options = gqa_inputs([20], device, **sizes | bad)
        with pytest.raises(PykernelsError, match=f"a {plan.kernel} plan of gqa_decode for heads"):
            gqa_decode(*inputs, **options, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("num_stages", [2, 6])
@pytest.mark.parametrize("ctas_per_sm", [0, 1, 3])
def test_plans_of_the_ring_buffer(num_stages: int, ctas_per_sm: int, device, hopper) -> None:
    plan = replace(RING, num_stages=num_stages, ctas_per_sm=ctas_per_sm)
    for page in (64, 256):
        given = gqa_inputs([6000, 0, 500, 65, 128], device, NH=24, KVH=2, D=128, page=page)
        check(gqa_decode, ref.gqa_decode, given, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 16])
def test_plans_of_fp8_mma(rows: int, device, converts_e4m3) -> None:
    given = gqa_inputs([6000, 0, 500, 65], device, NH=24, KVH=2, D=128, page=64, fp8=True)
    for keys, ctas_per_sm in product((64, 128), (0, 3)):
        plan = DecodePlan(
            rows, keys, num_warps=4, num_stages=1, ctas_per_sm=ctas_per_sm, fp8_mma=True
        )
        check(gqa_decode, ref.gqa_decode, given, plan=plan)


@triton.jit
def _late(length, table, new_length, new_table, N, ROUNDS, BLOCK: tl.constexpr):
    """Lets the next kernel begin, works for some 50 us, and then writes what that one reads."""
    gdc_launch_dependents()
    x = ROUNDS
    for _ in range(ROUNDS):
        x = x * 1664525 + 1013904223
    i = tl.arange(0, BLOCK) + (x == 12345)
    tl.store(length, tl.load(new_length))
    tl.store(table + i, tl.load(new_table + i, mask=i < N, other=0), mask=i < N)


@pytest.mark.gpu
def test_what_the_kernel_in_front_writes_late_is_read(device, hopper) -> None:
    inputs, options = gqa_inputs([3000], device, **FULL)
    *given, table, length = inputs
    expected = gqa_decode(*inputs, **options)
    for garbage in (0, -7, 100, 1 << 30):
        late_table, late_length = torch.full_like(table, garbage), torch.full_like(length, garbage)
        torch.cuda.synchronize()
        _late[(1,)](late_length, late_table, length, table, table.numel(), 20000, BLOCK=64)
        assert torch.equal(gqa_decode(*given, late_table, late_length, **options), expected)


# --- the last split of a sequence combines all


@pytest.mark.parametrize("found", ["zero", "ones", "other calls", "nearly this call"])
def test_counters_may_hold_anything(found: str, device, hopper, monkeypatch) -> None:
    given = gqa_inputs([200, 0, 65], device, NH=12, KVH=2, D=128, page=64)
    new_counters, made = split_kv.new_counters, []

    def filled(device: torch.device, sequences: int) -> tuple[int, torch.Tensor]:
        call, counters = new_counters(device, sequences)
        other = call ^ (1 << 62 if made else 1 << 16) | 1
        counters.fill_({"zero": 0, "ones": -1, "other calls": 3, "nearly this call": other}[found])
        made.append((call, counters))
        return call, counters

    monkeypatch.setattr(split_kv, "new_counters", filled)
    for _ in range(2):
        check(gqa_decode, ref.gqa_decode, given, plan=replace(RING, ctas_per_sm=2))
    assert [len(counters) for _, counters in made] == [3 * 2] * 2
    assert not any(counters.any() for _, counters in made)


def test_many_rows_of_many_splits_have_a_kernel(device, hopper, monkeypatch) -> None:
    monkeypatch.setattr(split_kv, "worth_it", lambda rows, splits: False)
    monkeypatch.setattr(split_kv, "new_counters", None)
    given = gqa_inputs([200, 3], device, **BF16_SIZES, sinks=F32)
    check(gqa_decode, ref.gqa_decode, given, plan=RING)
