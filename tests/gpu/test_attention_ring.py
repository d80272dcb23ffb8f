"""GQA decode through a ring of blocks, on any CPU: its arithmetic, turns, pages and masks.

On a GPU test_attention_decode.py runs the real one, and here are other plans.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

import pykernels.gpu.launch as launch
from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.attention_plan import DecodePlan, in_ring_takes

from .test_attention_decode import check, gqa, gqa_inputs


@pytest.fixture
def ring(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the interpreter's version in the kernel's place; skips where the real one cannot run."""
    if not launch.interpreted():
        if not in_ring_takes(128, False, 64, device, True):
            pytest.skip("the kernel is for Hopper")
        return
    from pykernels.gpu import gqa_decode, gqa_decode_ring

    from .gluon_shim import interpreted

    kernel = interpreted(gqa_decode_ring.gqa_decode_ring)
    monkeypatch.setattr(gqa_decode_ring, "gqa_decode_ring", kernel)
    monkeypatch.setattr(gqa_decode, "in_ring_takes", lambda *lies: True)


def plan(stages: int = 2, per_sm: int = 1) -> DecodePlan:
    return DecodePlan(rows=16, keys=64, warps=4, stages=stages, per_sm=per_sm, in_ring=True)


CASES = [
    ({"lengths": [100, 0, 64, 1]}, plan(), "ragged: an empty sequence, one key, a whole block"),
    ({"lengths": [300, 33]}, plan(per_sm=0), "a ring that turns, no combining"),
    (
        {"lengths": [190, 2], "NH": 11, "S": 2, "window": 70, "softcap": 2.0},
        plan(3),
        "two tiles of sixteen rows, tokens, window, cap",
    ),
    ({"lengths": [2200], "page": 128}, plan(per_sm=0), "pages are asked for 32 blocks at a time"),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), CASES, ids=[row[2] for row in CASES])
def test_gqa_decode_through_a_ring(
    sizes: dict[str, Any], plan: DecodePlan, why: str, device, ring
) -> None:
    shape: dict[str, Any] = {"NH": 4, "KVH": 1, "D": 128, "page": 64} | sizes
    inputs, options = gqa_inputs(device=device, **shape)
    check(gqa, ref.gqa_decode, inputs, options, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 6])
@pytest.mark.parametrize("per_sm", [0, 1, 3])
@pytest.mark.parametrize("page", [64, 256])
def test_plans_agree(stages: int, per_sm: int, page: int, device, ring) -> None:
    sizes: dict[str, Any] = {"NH": 24, "KVH": 2, "D": 128, "page": page}
    inputs, options = gqa_inputs([6000, 0, 500, 65, 128], device, **sizes)
    check(gqa, ref.gqa_decode, inputs, options, plan=plan(stages, per_sm))


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
def test_what_the_kernel_in_front_writes_late_is_seen(device, ring) -> None:
    inputs, options = gqa_inputs([3000], device, NH=32, KVH=8, D=128, page=64)
    *given, table, length = inputs
    expected = gqa(*inputs, **options)
    for garbage in (0, -7, 100, 1 << 30):
        late_table, late_length = torch.full_like(table, garbage), torch.full_like(length, garbage)
        torch.cuda.synchronize()
        _late[(1,)](late_length, late_table, length, table, table.numel(), 20000, BLOCK=64)
        assert torch.equal(gqa(*given, late_table, late_length, **options), expected)


@pytest.mark.parametrize("bad", [{"fp8": True}, {"page": 16}, {"D": 64}], ids=str)
def test_what_the_ring_does_not_take_is_refused(bad: dict[str, Any], device) -> None:
    shape: dict[str, Any] = {"NH": 4, "KVH": 1, "D": 128, "page": 64} | bad
    inputs, options = gqa_inputs([20], device, **shape)
    with pytest.raises(PykernelsError, match="a plan with a ring for"):
        gqa(*inputs, **options, plan=plan())
